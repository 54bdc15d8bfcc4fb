"""The contract that all parts of a model share, and dropout with keyed draws.

B images, T tokens, D width; ``...`` any axes.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from vitlab import noise
from vitlab.geometry import Geometry

Options = Mapping[str, Any]
"""The options of a component by name."""

State = Mapping[str, Tensor]
"""Parameters and buffers by name."""

NewState = dict[str, Tensor]
"""A state that belongs to whoever gets it."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (T, K/2), or (H, T, K/2) where heads differ; pairs are channels 2i and 2i + 1."""

Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = PositiveFloat
Count = PositiveInt
Gelu = Literal["none", "tanh", "sigmoid"]
"""The GELU, or an approximation of it."""


class Part(nn.Module):
    """Base of the contracts of patch embeddings, positions, attentions, MLPs and heads."""

    vmap_safe: ClassVar[bool] = True
    """Whether replicates can be trained stacked: no ``.item()``, no branch on data, no randomness but keyed draws."""

    exact_gradient: ClassVar[bool] = True
    """Whether the gradient is exact; False for straight-through estimators."""

    def __init__(self, *sizes: object) -> None:
        super().__init__()

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        """Return the reason why ``g`` and ``options`` cannot be combined, in one sentence; None if they can.

        Such a combination is planned as a skip with that reason, instead of failing in training.
        """
        return None

    def no_weight_decay(self) -> frozenset[str]:
        """Return the names of own parameters without weight decay, besides biases and vectors."""
        return frozenset()

    def stacked_maps(self) -> Mapping[str, int]:
        """Return the names of own matrices with several equal linear maps stacked along their rows, and their number.

        Optimizers of matrices treat each map as a matrix.
        """
        return {}


def to_float32_or_wider(x: Tensor) -> Tensor:
    """Return a tensor in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inside_vmap() -> bool:
    """Return True inside of ``torch.func.vmap``, at any depth, where several models are computed at once.

    Torch has no public function for it.
    """
    # Any level counts: a component may call vmap inside of an engine's.
    functorch = torch._C._functorch
    return any(level.key() == functorch.TransformType.Vmap for level in functorch.get_interpreter_stack() or ())


class _Drop(nn.Module):
    """Base of layers that drop values with probability ``p``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.place: int | None = None  #: set by :func:`set_dropout_ids`

    def _draw_uniform(self, stream: Literal["dropout", "drop_path"], x: Tensor, count: int) -> Tensor:
        """Return ``count`` uniform draws of each sample of ``x``, (B, count).

        Outside of ``noise.use_model_draws``, they come from torch's generator.

        Raises:
            RuntimeError: inside of it, if :func:`set_dropout_ids` was not called on the model.
        """
        draws = noise.current()
        if draws is None:
            return torch.rand(len(x), count, device=x.device)
        if self.place is None:
            raise RuntimeError(
                "dropout of this model has no keys; call vitlab.components.base.set_dropout_ids(model) once built"
            )
        return noise.uniform(noise.fold(getattr(draws, stream), self.place), draws.sample_B, count)


class Dropout(_Drop):
    """Zero each value with probability ``p``, and scale the rest by 1 / (1 - p).

    Inside :func:`vitlab.noise.use_model_draws`, the mask of a sample is a function of the step's key, the sample and
    the place of this layer in the model (see :func:`set_dropout_ids`), so it is the same alone, stacked, or after a
    resume.  Outside, it comes from torch's generator.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, (B, ...), with values dropped in training mode and unchanged in evaluation mode."""
        if not self.training or self.p == 0:
            return x
        # A draw for every value of a sample, whatever else is in the batch.
        draw_BN = self._draw_uniform("dropout", x, math.prod(x.shape[1:]))
        return x * (draw_BN >= self.p).view(x.shape).to(x.dtype) / (1 - self.p)


class DropPath(_Drop):
    """Drop the whole residual branch of a sample with probability ``p``, and scale the others by 1 / (1 - p).

    Draws are keyed as in :class:`Dropout`.  A training draws them for all layers together, by :func:`draw_path_scales`.

    Reference: arXiv:1603.09382 (stochastic depth), per sample.
    """

    row: int | None = None  #: of this layer in the factors of a step; set by :func:`number_drop_paths`

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = (x.shape[0], *(1,) * (x.ndim - 1))
        draws = noise.current()
        if draws is not None and self.row is not None and len(draws.scale_LB):
            return x * cast(Tensor, draws.scale_LB)[self.row].to(x.dtype).view(shape)
        draw_B1 = self._draw_uniform("drop_path", x, 1)
        # The mask is scaled, not the branch: one number per sample.
        return x * ((draw_B1 >= self.p).view(shape).to(x.dtype) / (1 - self.p))


def number_drop_paths(model: nn.Module) -> list[DropPath]:
    """Return the layers of a model that drop paths, and set the row of each."""
    layers = [one for one in model.modules() if isinstance(one, DropPath) and one.p > 0 and one.place is not None]
    for row, layer in enumerate(layers):
        layer.row = row
    return layers


def draw_path_scales(
    layers: Sequence[DropPath], keys: Sequence[noise.Key], samples: Sequence[Tensor], like: Tensor
) -> Tensor:
    """Return the factors of the residual branches of layers in several trials, (K, L, B): 0, or 1 / (1 - p) if kept.

    A trial has a key of the stream ``drop_path`` and identities of samples, (B,), on whose device draws are made; the
    factors have the dtype and the device of ``like``.
    """
    keys_KL1 = torch.tensor([[[noise.fold(k, cast(int, layer.place))] for layer in layers] for k in keys])
    p_L1 = torch.tensor([[layer.p] for layer in layers], dtype=torch.float64)
    sample_K1B = torch.stack(list(samples))[:, None]
    draw_KLB = noise.uniform(keys_KL1.to(sample_K1B.device), sample_K1B, 1)[..., 0]
    # Rounded as a layer rounds its own probability.
    kept_KLB = (draw_KLB >= p_L1.to(draw_KLB)).to(like.dtype)
    return noise.to_device(kept_KLB / (1 - p_L1).to(kept_KLB), like.device)


class PatchDrop(_Drop):
    """Remove a share ``p`` of the patches of each sample, and keep the tokens before them and the order.

    Of N patches, max(1, int(N * (1 - p))) remain, as in timm.  Draws are keyed as in :class:`Dropout`.

    Reference: arXiv:2208.07220 (PatchDropout), arXiv:2212.00794.

    Args:
        p: share of the patches that is removed.
        prefix: number of tokens before the patches.
    """

    def __init__(self, p: float, prefix: int) -> None:
        super().__init__(p)
        self.prefix = prefix

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return tokens BTD with patches removed in training mode, and unchanged in evaluation mode."""
        if not self.training or self.p == 0:
            return x_BTD
        patches = x_BTD.shape[1] - self.prefix
        draw_BN = self._draw_uniform("dropout", x_BTD, patches)
        remaining = max(1, int(patches * (1 - self.p)))
        # Those with the smallest draws remain, in their order: places of later layers count on it.
        index_BN = draw_BN.argsort(dim=1, stable=True)[:, :remaining].sort(1).values + self.prefix
        return torch.cat([x_BTD[:, : self.prefix], gather_rows(x_BTD, index_BN)], 1)


def gather_rows(x_BTD: Tensor, index_BN: Tensor) -> Tensor:
    """Return the rows of each image at its indices, (B, N, D)."""
    return x_BTD.gather(1, index_BN[..., None].expand(-1, -1, x_BTD.shape[2]))


def set_dropout_ids(model: nn.Module) -> None:
    """Set the place of every :class:`Dropout`, :class:`DropPath` and :class:`PatchDrop`: a number for its path.

    Equal paths get equal masks, so two arms that differ elsewhere drop the same values.
    """
    for path, module in model.named_modules():
        if isinstance(module, _Drop):
            # Python's own hash of a text differs between processes.
            module.place = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest(), "little")
