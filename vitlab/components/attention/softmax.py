"""Scaled dot-product attention with softmax, in five implementations of one function.

B images, T tokens, D width, H heads, K channels of a head (D = H * K).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.components.attention.contract import (
    Attention,
    MixValues,
    Probability,
    Rotation,
    State,
    attention,
    rotate,
)
from vitlab.components.base import Dropout, stacked
from vitlab.errors import OptionError
from vitlab.geometry import Geometry
from vitlab.registry import Pick, slot
from vitlab.spec import Choice


class SoftmaxAttention(Attention):
    """Scaled dot-product attention with softmax: one function, computed in one of five ways.

    This class has one projection matrix and the explicit kernel; an implementation replaces one of the two.

    ============  =====================================  =======================================
    name          projection to queries, keys, values    kernel
    ============  =====================================  =======================================
    ``explicit``  one matrix                             explicit: the weights are materialised
    ``sdpa``      one matrix                             torch's ``scaled_dot_product_attention``
    ``auto``      one matrix                             either, chosen in every forward pass
    ``split``     three matrices                         explicit
    ``per_head``  three matrices per head                explicit, one head after the other
    ============  =====================================  =======================================

    Reference: arXiv:1706.03762; arXiv:2010.11929, equations 5 to 8.

    Args:
        qkv_bias: a bias for queries, keys and values.
        qk_norm: the norm of queries and keys, over the width of a head.
        drop: dropout of the attention weights.
        proj_drop: dropout after the output projection.
        proj_bias: a bias for the output projection.
        norm: of the mixed values of all heads, before the output projection (timm's ``scale_attn_norm``).

    Raises:
        OptionError: if the implementation cannot drop weights.
    """

    mixes_values = True
    counts_keys = True

    kernel: Literal["sdpa", "explicit"] | None  #: of ``auto`` alone: the kernel of the latest forward pass

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: bool = True,
        qk_norm: Annotated[Choice | str, Pick("norm")] = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
        proj_bias: bool = True,
        norm: Annotated[Choice | str, Pick("norm")] = "none",
    ) -> None:
        super().__init__()
        self.num_heads = g.heads
        self.head_dim = g.head_dim
        self.scale = g.head_dim**-0.5
        self._add_projections(g, qkv_bias)
        self.q_norm = slot("norm").build(qk_norm, g.head_dim)
        self.k_norm = slot("norm").build(qk_norm, g.head_dim)
        self.attn_drop = Dropout(drop)
        self.norm = slot("norm").build(norm, g.dim)
        self.proj = nn.Linear(g.dim, g.dim, bias=proj_bias)
        self.proj_drop = Dropout(proj_drop)
        self.kernel = None
        if reason := self.incompatibility(g, {"drop": drop}):
            raise OptionError([(("drop",), reason)])

    def _add_projections(self, g: Geometry, bias: bool) -> None:
        self.qkv = nn.Linear(g.dim, 3 * g.dim, bias=bias)

    def stacked_maps(self) -> Mapping[str, int]:
        """Return 3 for the one matrix of queries, keys and values."""
        return {"qkv.weight": 3} if self._matrices() == ["qkv"] else {}

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation | None,
        bias_HTT: Tensor | None,
        mix_values: MixValues | None = None,
    ) -> Tensor:
        """Mix tokens, (B, T, D) to (B, T, D)."""
        q_BHTK, k_BHTK, v_BHTK = self._qkv_for_product(x_BTD, rotation)
        if mix_values is not None:
            v_BHTK = mix_values(k_BHTK, v_BHTK)
        y_BTD = self._mix(q_BHTK, k_BHTK, v_BHTK, bias_HTT).transpose(1, 2).flatten(2)
        out_BTD: Tensor = self.proj_drop(self.proj(self._before_projection(y_BTD, x_BTD)))
        return out_BTD

    def _before_projection(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        """Return the input of the output projection, from the mixed values and the input of the attention."""
        return cast(Tensor, self.norm(y_BTD))

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Return the weight of every key for every query, (B, H, T, T), before dropout."""
        q_BHTK, k_BHTK, _ = self._qkv_for_product(x_BTD, rotation)
        return _weights(q_BHTK * self.scale, k_BHTK, bias_HTT)

    def _qkv_for_product(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised and rotated queries and keys, and values, each (B, H, T, K)."""
        q_BHTK, k_BHTK, v_BHTK = self._qkv(x_BTD)
        q_BHTK, k_BHTK = self.q_norm(q_BHTK), self.k_norm(k_BHTK)
        if rotation is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, rotation), rotate(k_BHTK, rotation)
        return q_BHTK, k_BHTK, v_BHTK

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each (B, H, T, K), neither normalised nor rotated."""
        qkv_BT3HK = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, self.head_dim))
        return tuple(qkv_BT3HK.permute(2, 0, 3, 1, 4).unbind(0))

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        """Return the values mixed by attention weights, (B, H, T, K)."""
        weights_BHTT: Tensor = self.attn_drop(_weights(q_BHTK * self.scale, k_BHTK, bias_HTT))
        return weights_BHTT @ v_BHTK

    def _matrices(self) -> list[str]:
        """Return the names of the projections whose rows, in this order, are those of the canonical ``qkv``."""
        return ["qkv"]

    def to_canonical(self, state: State) -> dict[str, Tensor]:
        """Fuse the projections into one qkv projection."""
        matrices = self._matrices()
        if matrices == ["qkv"]:
            return dict(state)
        out = {name: value for name, value in state.items() if name.rpartition(".")[0] not in matrices}
        for kind in ("weight", "bias"):
            if f"{matrices[0]}.{kind}" in state:
                out[f"qkv.{kind}"] = torch.cat([state[f"{matrix}.{kind}"] for matrix in matrices])
        return out

    def from_canonical(self, state: State) -> dict[str, Tensor]:
        """Split the qkv projection into those of this implementation."""
        matrices = self._matrices()
        if matrices == ["qkv"]:
            return dict(state)
        out = {name: value for name, value in state.items() if not name.startswith("qkv.")}
        for kind in ("weight", "bias"):
            if f"qkv.{kind}" in state:
                rows = state[f"qkv.{kind}"].chunk(len(matrices))
                out |= {f"{matrix}.{kind}": part.clone() for matrix, part in zip(matrices, rows, strict=True)}
        return out


@attention.register("explicit")
class Explicit(SoftmaxAttention):
    """One projection matrix; explicit kernel.

    It shows its maps, drops weights, works everywhere and stacks.  timm and torch call "fused" what is ``sdpa`` here.
    """


@attention.register("sdpa")
class SDPA(SoftmaxAttention):
    """One projection matrix; SDPA kernel, torch's fused attention.

    The weights are never materialised.  Dropout of weights is refused: the kernel would draw it from a generator, and
    no two kernels draw alike.
    """

    vmap_safe = False  # on CPU the kernel has no batching rule, on CUDA its gradient has none: a loop over members

    @classmethod
    def incompatibility(cls, g: Geometry, options: Mapping[str, Any]) -> str | None:
        """Return a sentence if ``drop`` is set with SDPA, which draws from torch's generator; None otherwise."""
        if options.get("drop", 0.0) > 0:
            return (
                f"attention 'sdpa' cannot drop attention weights (drop is {options['drop']:g}): its kernel draws from "
                "a generator that no replay reproduces; use 'explicit' or 'auto', or drop: 0"
            )
        return None

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        return _sdpa(q_BHTK, k_BHTK, v_BHTK, bias_HTT, self.scale)


@attention.register("auto")
class Auto(SoftmaxAttention):
    """One projection matrix; explicit or SDPA kernel, by a rule.

    The first line that applies decides:

    1. weights are dropped in this step: explicit, because draws are keyed;
    2. inside ``torch.func.vmap``: explicit, because the fused kernel has no batching rule
       on CPU and none for its gradient on CUDA, and would fall back to a loop over members;
    3. on CPU in a type of 16 bits: explicit, which is ten times as fast there;
    4. otherwise: SDPA.

    ``kernel`` is the one of the latest forward pass.
    """

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        dropping = self.training and self.attn_drop.p > 0
        # The values' dtype decides: under autocast, a norm returns wide queries and keys, which the kernel casts back.
        narrow_on_cpu = v_BHTK.device.type == "cpu" and v_BHTK.dtype in (torch.bfloat16, torch.float16)
        self.kernel = "explicit" if dropping or narrow_on_cpu or stacked() else "sdpa"
        if self.kernel == "explicit":
            return super()._mix(q_BHTK, k_BHTK, v_BHTK, bias_HTT)
        return _sdpa(q_BHTK, k_BHTK, v_BHTK, bias_HTT, self.scale)


@attention.register("split")
class Split(SoftmaxAttention):
    """Three projection matrices, for q, k and v; explicit kernel.

    The projections are those of Hugging Face's implementation.
    """

    def _add_projections(self, g: Geometry, bias: bool) -> None:
        self.q, self.k, self.v = (nn.Linear(g.dim, g.dim, bias=bias) for _ in "qkv")

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        head_shape = (self.num_heads, self.head_dim)
        parts_BTHK = [layer(x_BTD).unflatten(-1, head_shape) for layer in (self.q, self.k, self.v)]
        return tuple(part_BTHK.transpose(1, 2) for part_BTHK in parts_BTHK)

    def _matrices(self) -> list[str]:
        return list("qkv")


@attention.register("per_head")
class PerHead(SoftmaxAttention):
    """Three projection matrices per head; explicit kernel, head by head.

    The form of textbooks, and the slowest.
    """

    def _add_projections(self, g: Geometry, bias: bool) -> None:
        self.heads = nn.ModuleList([OneHead(g.dim, g.head_dim, bias) for _ in range(g.heads)])

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.stack([getattr(head, part)(x_BTD) for head in self.heads], 1) for part in "qkv")

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        heads = range(self.num_heads)
        biases = [None] * self.num_heads if bias_HTT is None else _by_head(bias_HTT, self.num_heads)
        maps = [_weights(q_BHTK[:, head] * self.scale, k_BHTK[:, head], biases[head]) for head in heads]
        # One dropout for all heads, so that the draws are those of the other implementations.
        dropped_BHTT = self.attn_drop(torch.stack(maps, 1))
        return torch.stack([dropped_BHTT[:, head] @ v_BHTK[:, head] for head in heads], 1)

    def _matrices(self) -> list[str]:
        return [f"heads.{head}.{part}" for part in "qkv" for head in range(self.num_heads)]


class OneHead(nn.Module):
    """The projections of one head: D to K, three times."""

    def __init__(self, dim: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.q = nn.Linear(dim, head_dim, bias=bias)
        self.k = nn.Linear(dim, head_dim, bias=bias)
        self.v = nn.Linear(dim, head_dim, bias=bias)


SOFTMAX = (Explicit, SDPA, Auto, Split, PerHead)
"""Implementations of one function.  Derived classes do not count, because they may compute another."""


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return attention weights (..., T, T) of scaled queries and keys (..., T, K)."""
    logits = q @ k.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return logits.softmax(-1)


def _by_head(bias_HTT: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Return the bias of each head; an axis of length 1 stands for all heads."""
    return bias_HTT.expand(*bias_HTT.shape[:-3], heads, -1, -1).unbind(-3)


def _sdpa(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None, scale: float) -> Tensor:
    mask = None if bias_HTT is None else bias_HTT.to(q_BHTK.dtype)
    if mask is not None and mask.ndim == 3:
        mask = mask[None]
    default = q_BHTK.shape[-1] ** -0.5  # where torch's own rounding is kept
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHTK, v_BHTK, attn_mask=mask, scale=None if scale == default else scale
    )
