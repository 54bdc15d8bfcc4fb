"""Heads: from tokens to predictions, in two steps, pooling and classifying.

B batch, T tokens (prefix, then patches row by row), N patches, S vectors a head pools to, D width, H heads, K = D / H,
C classes, M and W pixel rows and columns of the image, R width of the pre-logits.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.components.base import Count, Dropout, Gelu, Options, Part, Positive, Probability
from vitlab.geometry import Geometry
from vitlab.registry import Slot, slot

Pool = Literal["cls", "gap", "map", "max", "avgmax", "seq", "prr"]
Over = Literal["patches", "all"]
Weights = Literal["drawn", "zero"]
Fusion = Literal["logits", "softmax", "cls", "dist"]


class Logits(NamedTuple):
    """Scores before the softmax: (B, C), or (B, C, M, W) for segmentation."""

    logits: Tensor


class DistilledLogits(NamedTuple):
    """(B, C) each: the predictions of the class token and of the distillation token."""

    cls: Tensor
    dist: Tensor


class Head(Part):
    """Contract: ``Head(g, *, options)``.  ``pool`` is (B, T, D) to (B, S, D); ``classify`` (B, S, D) to a NamedTuple.

    The model can apply its last norm between the two.  A head that overrides ``forward`` instead gets all tokens, and
    cannot be combined with a norm after pooling.
    """

    task: ClassVar[Literal["classification", "segmentation"]] = "classification"
    canonical: ClassVar[Mapping[str, str]] = {}
    """Prefix of own parameter names to the prefix in the canonical checkpoint; all others are under ``head.``"""
    keeps_init: frozenset[str] = frozenset()
    """Own parameters that schemes of initial values do not draw."""
    reads: tuple[str, ...] | None = None
    """Names of the prefix tokens it predicts from: empty if it reads patches, None if unknown."""

    def pool(self, x_BTD: Tensor) -> Tensor:
        """Pool the tokens into the rows that are classified, BTD to BSD."""
        raise NotImplementedError

    def classify(self, x_BSD: Tensor) -> NamedTuple:
        """Return the logits of the pooled rows."""
        raise NotImplementedError

    def forward(self, x_BTD: Tensor) -> NamedTuple:
        """Pool the tokens and classify the result."""
        return self.classify(self.pool(x_BTD))

    def logits_by_head(self, output: Any) -> dict[str, Tensor]:
        """Return the logits of an output by name: ``""`` for the prediction, other names for further ones."""
        return {"": output.logits}


head = Slot("head", Head)


class AttentionPool(nn.Module):
    """One learned query that attends to the tokens, then an MLP.  Reference: arXiv:2106.04560 (MAP head).

    Parameters are named as in timm's ``AttentionPoolLatent``.
    """

    def __init__(self, g: Geometry, approximate: Gelu, heads: int | None, ratio: float, eps: float) -> None:
        super().__init__()
        dim, std = g.dim, g.dim**-0.5
        self.heads = heads or g.heads
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = slot("norm").build({"type": "layernorm", "eps": eps}, dim)
        self.mlp = slot("mlp").build({"type": "gelu", "approximate": approximate, "ratio": ratio}, g)
        nn.init.trunc_normal_(self.latent, std=std, a=-2 * std, b=2 * std)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Attend from the latent query to all tokens, BND to BSD."""
        k_BNHK, v_BNHK = self.kv(x_BND).unflatten(-1, (2, self.heads, -1)).unbind(2)
        q_1HSK = self.q(self.latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        # One query has one row of weights, so a fused kernel saves nothing.
        weights_BHSN = (q_1HSK * q_1HSK.shape[-1] ** -0.5 @ k_BNHK.permute(0, 2, 3, 1)).softmax(-1)
        x_BHSK = weights_BHSN @ v_BNHK.transpose(1, 2)
        x_BSD = self.proj(x_BHSK.transpose(1, 2).flatten(2))
        return x_BSD + self.mlp(self.norm(x_BSD))


@head.register("linear")
class LinearHead(Head):
    """One linear layer on the pooled tokens.  Reference: arXiv:2010.11929.

    Args:
        pool: ``cls`` is the class token; ``gap`` the mean of the tokens, ``max`` their maximum per channel, ``avgmax``
            half of the sum of both, and ``map`` attention pooling (arXiv:2106.04560).  ``seq`` is the mean weighted by
            the softmax of a learned linear score of each token (arXiv:2104.05704, the sequence pooling of CCT).
            ``prr`` lets all tokens attend to each other, with themselves as queries, keys and values, and takes the
            class token, or the mean of all without one: timm's port of "Locality-Attending Vision Transformer" (ICLR
            2026).
        over: what is pooled: the patches, or all tokens.
        drop: dropout before the last layer.
        approximate: the GELU of attention pooling, as in the blocks' MLP.
        pool_heads: heads of attention pooling; by default as many as in the blocks.
        ratio: hidden width of the MLP of attention pooling over ``g.dim``.
        pool_eps: added to the variance by the norm in attention pooling.
        weights: ``drawn`` by the scheme of initial values, or ``zero``, as the ViT paper fine-tunes.
    """

    canonical: ClassVar[Mapping[str, str]] = {
        "fc.": "head.",
        "pre_logits.": "pre_logits.fc.",
        "attn_pool.": "attn_pool.",
        "score.": "seq_pool.",
    }

    def __init__(
        self,
        g: Geometry,
        *,
        pool: Pool = "cls",
        over: Over = "patches",
        drop: Probability = 0.0,
        approximate: Gelu = "none",
        pool_heads: Count | None = None,
        ratio: Positive = 4.0,
        pool_eps: Positive = 1e-6,
        weights: Weights = "drawn",
    ) -> None:
        super().__init__()
        self.kind = pool
        self.reads = ("class",) if pool == "cls" else () if over == "patches" and pool != "prr" else None
        self.prefix = g.prefix
        self.heads = g.heads
        self.skip = 0 if over == "all" or pool == "prr" else len(g.prefix)
        self.attn_pool = AttentionPool(g, approximate, pool_heads, ratio, pool_eps) if pool == "map" else None
        self.score = nn.Linear(g.dim, 1) if pool == "seq" else None
        self.drop = Dropout(drop)
        self.fc = _build_classifier(g.dim, g.classes, weights)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        pool = options["pool"]
        if pool == "cls" and "class" not in g.prefix:
            return "pooling 'cls' reads the class token, and the model has none: add class to prefix, or pool by gap"
        if options["over"] == "all" and pool in ("cls", "prr"):
            return f"pooling '{pool}' does not choose its tokens; remove over: all"
        if pool == "map" and g.dim % (options["pool_heads"] or 1):
            return (
                f"the {options['pool_heads']} heads of attention pooling do not divide dim {g.dim}; use a divisor of it"
            )
        return None

    def pool(self, x_BTD: Tensor) -> Tensor:
        if self.attn_pool is not None:
            return self.attn_pool(x_BTD[:, self.skip :])
        if self.kind == "prr":
            x_BHTK = x_BTD.reshape(*x_BTD.shape[:2], self.heads, -1).transpose(1, 2)
            x_BTD = F.scaled_dot_product_attention(x_BHTK, x_BHTK, x_BHTK).transpose(1, 2).flatten(2)
        if self.kind == "cls" or (self.kind == "prr" and "class" in self.prefix):
            at = self.prefix.index("class")
            return x_BTD[:, at : at + 1]
        x_BSD = x_BTD[:, self.skip :]
        if self.score is not None:
            return self.score(x_BSD).softmax(1).mT @ x_BSD
        if self.kind == "max":
            return x_BSD.amax(1, keepdim=True)
        mean_B1D = x_BSD.mean(1, keepdim=True)
        return (x_BSD.amax(1, keepdim=True) + mean_B1D) / 2 if self.kind == "avgmax" else mean_B1D

    def classify(self, x_BSD: Tensor) -> Logits:
        return Logits(self.fc(self.drop(x_BSD[:, 0])))


@head.register("mlp")
class MLPHead(LinearHead):
    """A hidden layer with tanh (the pre-logits), then a linear one.  Reference: arXiv:2010.11929, section 3.2.

    Args:
        representation_size: width of the pre-logits; by default the tokens' own.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        pool: Pool = "cls",
        over: Over = "patches",
        drop: Probability = 0.0,
        approximate: Gelu = "none",
        pool_heads: Count | None = None,
        ratio: Positive = 4.0,
        pool_eps: Positive = 1e-6,
        representation_size: Count | None = None,
        weights: Weights = "drawn",
    ) -> None:
        super().__init__(
            g,
            pool=pool,
            over=over,
            drop=drop,
            approximate=approximate,
            pool_heads=pool_heads,
            ratio=ratio,
            pool_eps=pool_eps,
            weights=weights,
        )
        self.pre_logits = nn.Linear(g.dim, representation_size or g.dim)
        self.fc = _build_classifier(self.pre_logits.out_features, g.classes, weights)

    def classify(self, x_BSD: Tensor) -> Logits:
        return super().classify(self.pre_logits(x_BSD[:, 0]).tanh()[:, None])


@head.register("distilled")
class Distilled(Head):
    """A classifier each for the class and the distillation token.  Reference: arXiv:2012.12877, section 4.

    The paper adds the two softmax outputs; its code, and all ports, average the logits.  ``fusion`` says which, or
    that one of the two decides alone, in evaluation, and so what ``val/accuracy`` is the accuracy of; in training the
    prediction is always the average of the logits, so that the weights do not depend on it.  All four are logits of
    every output, with metrics of their own.

    Args:
        fusion: how the two predictions are combined in evaluation, or which of them is used.
        weights: ``drawn`` by the scheme of initial values, or ``zero``, as the ViT paper fine-tunes.
    """

    canonical: ClassVar[Mapping[str, str]] = {"fc.": "head.", "fc_dist.": "head_dist."}
    reads = ("class", "distillation")

    def __init__(self, g: Geometry, *, fusion: Fusion = "logits", weights: Weights = "drawn") -> None:
        super().__init__()
        self.at = (g.prefix.index("class"), g.prefix.index("distillation"))
        self.fc = _build_classifier(g.dim, g.classes, weights)
        self.fc_dist = _build_classifier(g.dim, g.classes, weights)
        self.fusion = fusion

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        missing = [token for token in ("class", "distillation") if token not in g.prefix]
        if missing:
            return (
                f"head 'distilled' reads a class and a distillation token, and the model has no "
                f"{' and no '.join(missing)} token: set prefix to [class, distillation]"
            )
        return None

    def pool(self, x_BTD: Tensor) -> Tensor:
        return torch.stack([x_BTD[:, at] for at in self.at], 1)

    def classify(self, x_BSD: Tensor) -> DistilledLogits:
        return DistilledLogits(self.fc(x_BSD[:, 0]), self.fc_dist(x_BSD[:, 1]))

    def logits_by_head(self, output: Any) -> dict[str, Tensor]:
        """Return the logits of all four fusions by name; ``""`` is the configured one (in training ``logits``)."""
        # Sums of probabilities, as logits.
        summed = torch.logaddexp(output.cls.log_softmax(1), output.dist.log_softmax(1))
        logits = {
            "logits": (output.cls + output.dist) / 2,
            "softmax": summed - math.log(2),
            "cls": output.cls,
            "dist": output.dist,
        }
        return {"": logits["logits" if self.training else self.fusion], **logits}


@head.register("segmentation")
class Segmentation(Head):
    """A linear layer on every patch, upsampled to pixels.  Reference: arXiv:2105.05633 (Segmenter, linear decoder).

    Class, distillation and register tokens are left out.

    Args:
        weights: ``drawn`` by the scheme of initial values, or ``zero``, as the ViT paper fine-tunes.
    """

    task = "segmentation"
    canonical: ClassVar[Mapping[str, str]] = {"fc.": "head."}
    reads = ()

    def __init__(self, g: Geometry, *, weights: Weights = "drawn") -> None:
        super().__init__()
        self.skip = len(g.prefix)
        self.grid = g.grid
        self.image = g.image
        self.fc = _build_classifier(g.dim, g.classes, weights)

    def pool(self, x_BTD: Tensor) -> Tensor:
        return x_BTD[:, self.skip :]

    def classify(self, x_BSD: Tensor) -> Logits:
        logits_BChw = self.fc(x_BSD).transpose(1, 2).unflatten(2, self.grid)
        # Logits are upsampled, not probabilities, so that the loss reads what the prediction is made of.
        logits_BCMW = F.interpolate(logits_BChw, size=self.image, mode="bilinear", align_corners=False)
        return Logits(logits_BCMW)


def _build_classifier(inputs: int, classes: int, weights: Weights) -> nn.Linear:
    """Return a linear layer; if its weights are zero, the scheme of initial values leaves them so."""
    layer = nn.Linear(inputs, classes)
    if weights == "zero":
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        layer.keeps_init = ("weight", "bias")  # type: ignore[assignment]  # torch types attributes as modules
    return layer
