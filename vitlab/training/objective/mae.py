"""The objective ``mae``: a masked autoencoder.

B images, C channels, H and W pixels, N patches in a random order, of which the first V are visible and the last M are
hidden, F = C*h*w pixels of a patch, T tokens, P prefix tokens, D width, E width of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitlab import noise
from vitlab.components.attention.softmax import SOFTMAX, Auto
from vitlab.components.base import Count, Part, Rotation, gather_rows, to_float32_or_wider
from vitlab.components.block import Place
from vitlab.components.block.residual import PreNorm
from vitlab.components.init import draw_matrices_and_zero_biases
from vitlab.components.mlp import GeluMLP
from vitlab.components.norm import LayerNorm
from vitlab.components.patch import LinearPatches, cut_patches
from vitlab.components.position import Position, encodings_of_choice
from vitlab.components.position.additive import Additive, SinCos2D
from vitlab.data.batches import Batch
from vitlab.geometry import DataInfo, Geometry
from vitlab.models.contract import Model, names_in_last_layer
from vitlab.models.vit import ViT
from vitlab.models.vit_parts import Anatomy
from vitlab.registry import ResolvedChoice
from vitlab.spec.choice import Fraction
from vitlab.training.evaluation import autocast
from vitlab.training.losses import Value
from vitlab.training.objective import Objective, Setup, objective

VARIANCE_EPS = 1e-6
"""Added to the variance of a patch's pixels, as in the authors' code."""


@objective.register("mae")
class MAE(Objective):
    """Reconstruct hidden patches from the visible ones.  Reference: arXiv:2111.06377.

    The model's blocks see the visible patches alone, each with the position of its place; a narrow decoder sees them
    and a learned token at every hidden place, and predicts the pixels of these.  The loss is the mean squared error
    over hidden patches.  Every image has the same number of visible patches, drawn per image and epoch; in evaluations
    they are the same for all trials.

    Args:
        setup: Parts of the training.
        mask_ratio: Share of the patches that is hidden.
        dim: Width of the decoder.
        depth: Blocks of the decoder.
        heads: Attention heads of the decoder.
        norm_pixels: Predict the pixels of each patch normalised by their mean and variance.
    """

    labels = False
    unread = ("train.loss", "model.head")
    vmap_safe = True

    def __init__(
        self,
        setup: Setup,
        *,
        mask_ratio: Fraction = 0.75,
        dim: Count = 64,
        depth: Count = 1,
        heads: Count = 4,
        norm_pixels: bool = True,
    ) -> None:
        super().__init__(setup)
        model = setup.model
        assert isinstance(model, ViT)
        self.patches = model.geometry.patches
        visible = count_visible_patches(self.patches, mask_ratio)
        decoder = Decoder(model.geometry, dim, depth, heads)
        decoder.initialise(setup.seeds["init"])
        self.module = MaskedAutoencoder(model, decoder.to(next(model.parameters())), visible, norm_pixels)

    @classmethod
    def incompatibility(cls, data: DataInfo, model: ResolvedChoice, trial: Mapping[str, Any]) -> str | None:
        """Return a sentence if the model does not treat its patches one by one, or nothing would be hidden."""
        if data.task != "classification":
            return f"objective 'mae' is for images with one label each, and the task of this data is {data.task}"
        if getattr(model.component, "forward_features", None) is not ViT.forward_features:
            return f"objective 'mae' hides patches of a ViT, and model '{model.type}' is none; use model 'vit'"
        anatomy, options = model.component.anatomy(data, model.options), trial["train"]["objective"]
        if count_visible_patches(anatomy.geometry.patches, options["mask_ratio"]) < 1:
            return (
                f"objective 'mae' leaves no patch visible: mask_ratio is {options['mask_ratio']:g}, and the model has "
                f"{anatomy.geometry.patches} patches; use a smaller one"
            )
        dim, heads = options["dim"], options["heads"]
        if dim % heads:
            return f"the decoder of objective 'mae': dim {dim} is not a multiple of heads {heads}"
        if dim % 4:
            return f"the decoder of objective 'mae': dim {dim} is not a multiple of 4, as its positions need"
        return _masking_incompatibility(anatomy)

    def batch(self, step: int, rows: range) -> Batch:
        """Return the images, and a random order of the patches of each."""
        batch = super().batch(step, rows)
        return self._with_patch_order(batch, noise.key(self.setup.seeds["augment"], "mae", batch.epoch))

    def evaluation_batch(self, batch: Batch) -> Batch:
        """Return the images, and an order of patches that is the same in every evaluation of every trial."""
        # Key 0 for all seeds: losses of trials are then of the same patches.
        return self._with_patch_order(batch, noise.key(0, "mae", "evaluation"))

    def loss(self, x: Tensor, target: Tensor) -> Value:
        """Return the mean over hidden patches; all images have as many."""
        return Value(self.views(x, target)[""].mean(), {})

    def views(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the mean squared error of each image, (B,)."""
        with autocast(x.device, self.setup.spec.precision):
            return {"": self.module(x, target)}

    def _with_patch_order(self, batch: Batch, key: noise.Key) -> Batch:
        draw_BN = noise.uniform(key, batch.id_B, self.patches)
        return batch._replace(y_B=draw_BN.argsort(dim=1, stable=True))


def count_visible_patches(patches: int, mask_ratio: float) -> int:
    """Return the number of visible patches of an image, rounded down as in the authors' code."""
    return int(patches * (1 - mask_ratio))


class MaskedAutoencoder(Model):
    """A ViT on visible patches, and a decoder.

    Args:
        model: The encoder; its head is frozen, since nothing reads it.
        decoder: The decoder.
        visible: V.
        norm_pixels: See :class:`MAE`.
    """

    def __init__(self, model: ViT, decoder: Decoder, visible: int, norm_pixels: bool) -> None:
        super().__init__()
        self.model = model
        self.decoder = decoder
        self.visible = visible
        self.norm_pixels = norm_pixels
        for name in names_in_last_layer(model) & dict(model.named_parameters()).keys():
            model.get_parameter(name).requires_grad_(False)

    def forward(self, x_BCHW: Tensor, order_BN: Tensor) -> Tensor:  # type: ignore[override]
        """Return the mean squared error over the hidden patches of each image, (B,), in float32 or wider.

        Args:
            x_BCHW: The images.
            order_BN: A permutation of the patches of each; the first ones are visible.
        """
        position = PartialPosition(self.model.position, order_BN[:, : self.visible], self.model.geometry)
        x_BTD = self.model.forward_features(x_BCHW, position)
        predicted_BMF = self.decoder(x_BTD, order_BN)[:, self.visible :]
        pixels_BNF = cut_patches(x_BCHW, self.model.geometry.patch)
        target_BMF = to_float32_or_wider(gather_rows(pixels_BNF, order_BN[:, self.visible :]))
        if self.norm_pixels:
            centred_BMF = target_BMF - target_BMF.mean(2, keepdim=True)
            # Local contrast in place of brightness, which the paper found better.
            target_BMF = centred_BMF / (target_BMF.var(2, keepdim=True) + VARIANCE_EPS).sqrt()
        return (predicted_BMF.to(target_BMF.dtype) - target_BMF).square().mean((1, 2))


class Decoder(Part):
    """Transformer blocks on all patches, the hidden ones as one learned token with the position of their place.

    Args:
        g: Sizes of the model.
        dim: E.
        depth: Number of blocks.
        heads: Attention heads.
    """

    def __init__(self, g: Geometry, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        own = replace(g, dim=dim, depth=depth, heads=heads)
        self.prefix = len(g.prefix)
        self.embed = nn.Linear(g.dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.position = SinCos2D(own, convention="mae")
        self.blocks = nn.ModuleList()
        for index in range(depth):
            block = PreNorm(Place(own, index))
            for path in ("norm1", "norm2"):
                block.add_part(path, LayerNorm(dim))
            block.add_part("attn", Auto(own))
            block.add_part("mlp", GeluMLP(own))
            self.blocks.append(block)
        self.norm = LayerNorm(dim)
        self.pred = nn.Linear(dim, g.channels * g.patch[0] * g.patch[1])

    def forward(self, x_BTD: Tensor, order_BN: Tensor) -> Tensor:
        """Return the predicted pixels of the patches in the given order, (B, N, F).

        Args:
            x_BTD: The prefix tokens, and the visible patches in this order.
            order_BN: The order of the patches.
        """
        x_BTE = self.embed(x_BTD)
        hidden = self.prefix + order_BN.shape[1] - x_BTE.shape[1]
        x_BTE = torch.cat([x_BTE, self.mask_token.to(x_BTE.dtype).expand(len(x_BTE), hidden, -1)], 1)
        # Attention does not depend on the order of its tokens, so they stay in the random one.
        x_BTE = x_BTE + _select_rows(self.position.add(torch.zeros_like(x_BTE[:1]), 0), order_BN, self.prefix)
        for block in self.blocks:
            x_BTE = block(x_BTE, None, None)
        return self.pred(self.norm(x_BTE[:, self.prefix :]))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every matrix from a Xavier uniform and the token from a normal, keyed by name; biases are zero."""
        draw_matrices_and_zero_biases(self, seed, "decoder", nn.init.xavier_uniform_)
        g = torch.Generator().manual_seed(noise.key(seed, "init", "decoder.mask_token"))
        nn.init.normal_(self.mask_token, std=0.02, generator=g)

    def no_weight_decay(self) -> frozenset[str]:
        return frozenset({"mask_token"})


class PartialPosition(Position):
    """The position encoding of some of the patches, which it selects in the stem.

    Args:
        whole: The encoding of all patches, for which :func:`_masking_incompatibility` finds no reason.
        visible_BV: The patches of each image.
        g: Sizes of the model.
    """

    def __init__(self, whole: Position, visible_BV: Tensor, g: Geometry) -> None:
        super().__init__()
        self.whole = [whole]  # not a submodule: its parameters belong to the model
        self.visible_BV = visible_BV
        self.g = g

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Add the encoding and select the visible patches in the stem; add the rows of these in later layers."""
        (whole,), prefix = self.whole, len(self.g.prefix)
        if layer == 0:
            return _select_rows(whole.add(x_BTD, 0), self.visible_BV, prefix)
        zeros_1TD = x_BTD.new_zeros(1, self.g.tokens, self.g.dim)
        rows_1TD = whole.add(zeros_1TD, layer)
        return x_BTD if rows_1TD is zeros_1TD else x_BTD + _select_rows(rows_1TD, self.visible_BV, prefix)

    def rotation(self, layer: int) -> Rotation | None:
        """Return the cosines and sines of each image's tokens, (B, 1 or H, T, K/2)."""
        rotation = self.whole[0].rotation(layer)
        return None if rotation is None else (self._select_turns(rotation[0]), self._select_turns(rotation[1]))

    def _select_turns(self, turn_HTK: Tensor) -> Tensor:
        turn_1HTK = turn_HTK[None, None] if turn_HTK.ndim == 2 else turn_HTK[None]
        turn_1THK = turn_1HTK.transpose(1, 2)
        rows_BTX = _select_rows(turn_1THK.flatten(2), self.visible_BV, len(self.g.prefix))
        return rows_BTX.unflatten(2, turn_1THK.shape[2:]).transpose(1, 2)  # type: ignore[no-untyped-call]


def _select_rows(x_BTD: Tensor, patches_BV: Tensor, prefix: int) -> Tensor:
    """Return the rows of the prefix tokens and of the given patches; one image stands for all."""
    x_BTD = x_BTD.expand(len(patches_BV), -1, -1)
    return torch.cat([x_BTD[:, :prefix], gather_rows(x_BTD[:, prefix:], patches_BV)], 1)


def _masking_incompatibility(anatomy: Anatomy) -> str | None:
    """Return in one sentence why a part of a model needs all patches; None if every part can do with some."""
    who = "objective 'mae' shows the model some of the patches, and"
    if anatomy.patch.component is not LinearPatches:
        return f"{who} patch '{anatomy.patch.type}' reads the pixels of others; use patch 'linear'"
    for part in encodings_of_choice(anatomy.position):
        component: Any = part.component
        if component.overrides("bias"):
            return f"{who} position '{part.type}' adds a bias for every pair of them; use another position"
        if component.overrides("mix") or component.add not in (Position.add, Additive.add):
            return f"{who} position '{part.type}' is computed from all of them; use another position"
    if anatomy.patch_drop:
        return f"{who} patch_drop {anatomy.patch_drop:g} removes some of those; use patch_drop: 0"
    if anatomy.final_norm_at == "pooled":
        return (
            "objective 'mae' reads the tokens of the model, and final_norm_at: pooled leaves them without the last "
            "norm; write final_norm_at: tokens"
        )
    for block in anatomy.blocks:
        if block.attention.component not in SOFTMAX:
            return f"{who} attention '{block.attention.type}' may need all; use attention 'auto'"
        if block.block.component.passes == "merged":
            return f"{who} block '{block.block.type}' merges some of those; use another block"
    return None
