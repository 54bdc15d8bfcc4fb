"""Attention over tokens.

Several implementations compute one function of the same weights.  Each has its own parameter names, and converts a
state to and from the canonical form, which is timm's: ``qkv.weight`` with rows [q; k; v] and heads in order
inside each, ``proj``, and ``q_norm``, ``k_norm`` where queries and keys are normalised.

B images, T tokens, D width, H heads, K channels of a head (D = H * K).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitlab.components.base import Dropout, Part, stacked
from vitlab.errors import OptionError
from vitlab.geometry import Geometry
from vitlab.registry import Pick, Slot, slot
from vitlab.spec import Choice

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (T, K/2), or (H, T, K/2) where heads differ; pairs are channels 2i and 2i + 1."""

State = Mapping[str, Tensor]
Probability = Annotated[float, Field(ge=0, lt=1)]


class Attention(Part):
    """Base of attentions.

    A subclass defines ``forward``, and ``maps`` if it has attention weights.
    """

    takes_bias: ClassVar[bool] = True  #: whether a bias on the logits is applied
    takes_rotation: ClassVar[bool] = True  #: whether queries and keys are rotated
    canonical: ClassVar[Literal["timm"] | None] = "timm"  #: the canonical form of its weights; None if it has none

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Mix tokens, (B, T, D) to (B, T, D)."""
        raise NotImplementedError

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Return the weight of every key for every query, (B, H, T, T), before dropout; rows sum to 1.

        Raises:
            NotImplementedError: if the attention has no such weights.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attention weights")

    def to_canonical(self, state: State) -> dict[str, Tensor]:
        """Convert a state of this module to the canonical one.  Depends only on ``state`` and the sizes."""
        return dict(state)

    def from_canonical(self, state: State) -> dict[str, Tensor]:
        """Convert a canonical state to one of this module; the inverse of :meth:`to_canonical`."""
        return dict(state)


attention = Slot("attention", Attention)


class _Softmax(Attention):
    """Scaled dot-product attention with softmax; implementations differ in how q, k, v and the product are computed.

    Reference: arXiv:1706.03762; arXiv:2010.11929 equations 5 to 8.

    Args:
        qkv_bias: a bias for queries, keys and values.
        qk_norm: the norm of queries and keys, over the width of a head.
        drop: dropout of the attention weights.
        proj_drop: dropout after the output projection.
    """

    def __init__(self, g: Geometry, *, qkv_bias: bool, qk_norm: Choice | str, drop: float, proj_drop: float) -> None:
        super().__init__()
        self.num_heads = g.heads
        self.head_dim = g.head_dim
        self.scale = g.head_dim**-0.5
        self._projections(g, qkv_bias)
        self.q_norm = slot("norm").build(qk_norm, g.head_dim)
        self.k_norm = slot("norm").build(qk_norm, g.head_dim)
        self.attn_drop = Dropout(drop)
        self.proj = nn.Linear(g.dim, g.dim)
        self.proj_drop = Dropout(proj_drop)

    def _projections(self, g: Geometry, bias: bool) -> None:
        """Create the projections to queries, keys and values."""
        raise NotImplementedError

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (B, H, T, K), neither normalised nor rotated."""
        raise NotImplementedError

    def _qkv_for_product(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised and rotated queries and keys, and values."""
        q_BHTK, k_BHTK, v_BHTK = self._qkv(x_BTD)
        q_BHTK, k_BHTK = self.q_norm(q_BHTK), self.k_norm(k_BHTK)
        if rotation is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, rotation), rotate(k_BHTK, rotation)
        return q_BHTK, k_BHTK, v_BHTK

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        """Return the values mixed by attention weights, (B, H, T, K)."""
        weights_BHTT: Tensor = self.attn_drop(_weights(q_BHTK * self.scale, k_BHTK, bias_HTT))
        return weights_BHTT @ v_BHTK

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        y_BHTK = self._mix(*self._qkv_for_product(x_BTD, rotation), bias_HTT)
        out_BTD: Tensor = self.proj_drop(self.proj(y_BHTK.transpose(1, 2).flatten(2)))
        return out_BTD

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        q_BHTK, k_BHTK, _ = self._qkv_for_product(x_BTD, rotation)
        return _weights(q_BHTK * self.scale, k_BHTK, bias_HTT)


class _Fused(_Softmax):
    """Queries, keys and values from one matrix."""

    def _projections(self, g: Geometry, bias: bool) -> None:
        self.qkv = nn.Linear(g.dim, 3 * g.dim, bias=bias)

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv_BT3HK = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, self.head_dim))
        q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4).unbind(0)
        return q_BHTK, k_BHTK, v_BHTK


@attention.register("fused")
class Fused(_Fused):
    """One matrix for queries, keys and values; the weights are computed and kept.

    The explicit form: it shows its maps, drops weights, works everywhere and stacks.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: bool = True,
        qk_norm: Annotated[Choice | str, Pick("norm")] = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop)


@attention.register("sdpa")
class SDPA(_Fused):
    """One matrix for queries, keys and values, and torch's fused kernel, which never holds the weights.

    Dropout of weights is refused: the kernel would draw it from a generator, and no two kernels draw alike.
    """

    vmap_safe = False  # on CPU the kernel has no batching rule, on CUDA its gradient has none: a loop over members

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: bool = True,
        qk_norm: Annotated[Choice | str, Pick("norm")] = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop)
        if reason := self.incompatibility(g, {"drop": drop}):
            raise OptionError([(("drop",), reason)])

    @classmethod
    def incompatibility(cls, g: Geometry, options: Mapping[str, Any]) -> str | None:
        """Refuse attention dropout, which the kernel cannot repeat, and what the base refuses."""
        if options.get("drop", 0.0) > 0:
            return (
                f"attention 'sdpa' cannot drop attention weights (drop is {options['drop']:g}): its kernel draws from "
                "a generator that no replay reproduces; use 'fused' or 'auto', or drop: 0"
            )
        return None

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        return _fused_kernel(q_BHTK, k_BHTK, v_BHTK, bias_HTT)


@attention.register("auto")
class Auto(_Fused):
    """Fused or explicit product, chosen by a rule.

    The first line that applies decides:

    1. weights are dropped in this step: explicit, because draws are keyed;
    2. inside ``torch.func.vmap``: explicit, because the fused kernel has no batching rule
       on CPU and none for its gradient on CUDA, and would fall back to a loop over members;
    3. on CPU in a type of 16 bits: explicit, which is ten times as fast there;
    4. otherwise: torch's fused kernel.

    ``kernel`` says which the latest forward pass took.
    """

    kernel: Literal["sdpa", "explicit"] | None

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: bool = True,
        qk_norm: Annotated[Choice | str, Pick("norm")] = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop)
        self.kernel = None

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        dropping = self.training and self.attn_drop.p > 0
        # The values' dtype decides: under autocast, a norm returns wide queries and keys, which the kernel casts back.
        narrow_on_cpu = v_BHTK.device.type == "cpu" and v_BHTK.dtype in (torch.bfloat16, torch.float16)
        if dropping or narrow_on_cpu or stacked():
            self.kernel = "explicit"
            return super()._mix(q_BHTK, k_BHTK, v_BHTK, bias_HTT)
        self.kernel = "sdpa"
        return _fused_kernel(q_BHTK, k_BHTK, v_BHTK, bias_HTT)


@attention.register("split")
class Split(_Softmax):
    """A matrix each for queries, keys and values, as in Hugging Face's implementation."""

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: bool = True,
        qk_norm: Annotated[Choice | str, Pick("norm")] = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop)

    def _projections(self, g: Geometry, bias: bool) -> None:
        self.q = nn.Linear(g.dim, g.dim, bias=bias)
        self.k = nn.Linear(g.dim, g.dim, bias=bias)
        self.v = nn.Linear(g.dim, g.dim, bias=bias)

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BTHK, k_BTHK, v_BTHK = (
            make(x_BTD).unflatten(-1, (self.num_heads, self.head_dim)) for make in (self.q, self.k, self.v)
        )
        return q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2)

    def to_canonical(self, state: State) -> dict[str, Tensor]:
        """Fuse the weights of q, k and v into one qkv projection."""
        out = {name: value for name, value in state.items() if name[:2] not in ("q.", "k.", "v.")}
        for kind in ("weight", "bias"):
            if f"q.{kind}" in state:
                out[f"qkv.{kind}"] = torch.cat([state[f"{part}.{kind}"] for part in "qkv"])
        return out

    def from_canonical(self, state: State) -> dict[str, Tensor]:
        """Split the qkv projection into q, k and v."""
        out = {name: value for name, value in state.items() if not name.startswith("qkv.")}
        for kind in ("weight", "bias"):
            if f"qkv.{kind}" in state:
                for part, rows in zip("qkv", state[f"qkv.{kind}"].chunk(3), strict=True):
                    out[f"{part}.{kind}"] = rows.clone()
        return out


class OneHead(nn.Module):
    """The projections of one head: D to K, three times."""

    def __init__(self, dim: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.q = nn.Linear(dim, head_dim, bias=bias)
        self.k = nn.Linear(dim, head_dim, bias=bias)
        self.v = nn.Linear(dim, head_dim, bias=bias)


@attention.register("per_head")
class PerHead(_Softmax):
    """A module per head, one after the other: the form of textbooks, and the slowest."""

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: bool = True,
        qk_norm: Annotated[Choice | str, Pick("norm")] = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop)

    def _projections(self, g: Geometry, bias: bool) -> None:
        self.heads = nn.ModuleList([OneHead(g.dim, g.head_dim, bias) for _ in range(g.heads)])

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTK = torch.stack([head.q(x_BTD) for head in self.heads], 1)  # type: ignore[operator]
        k_BHTK = torch.stack([head.k(x_BTD) for head in self.heads], 1)  # type: ignore[operator]
        v_BHTK = torch.stack([head.v(x_BTD) for head in self.heads], 1)  # type: ignore[operator]
        return q_BHTK, k_BHTK, v_BHTK

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        maps = [
            _weights(q_BHTK[:, head] * self.scale, k_BHTK[:, head], None if bias_HTT is None else bias_HTT[head])
            for head in range(self.num_heads)
        ]
        # One dropout for all heads, so that the draws are those of the other implementations.
        dropped_BHTT = self.attn_drop(torch.stack(maps, 1))
        return torch.stack([dropped_BHTT[:, head] @ v_BHTK[:, head] for head in range(self.num_heads)], 1)

    def to_canonical(self, state: State) -> dict[str, Tensor]:
        """Fuse the projections of all heads into one qkv projection."""
        out = {name: value for name, value in state.items() if not name.startswith("heads.")}
        for kind in ("weight", "bias"):
            if f"heads.0.q.{kind}" in state:
                rows = [state[f"heads.{head}.{part}.{kind}"] for part in "qkv" for head in range(self.num_heads)]
                out[f"qkv.{kind}"] = torch.cat(rows)
        return out

    def from_canonical(self, state: State) -> dict[str, Tensor]:
        """Split the qkv projection by head."""
        out = {name: value for name, value in state.items() if not name.startswith("qkv.")}
        for kind in ("weight", "bias"):
            if f"qkv.{kind}" in state:
                rows = iter(state[f"qkv.{kind}"].chunk(3 * self.num_heads))
                for part in "qkv":
                    for head in range(self.num_heads):
                        out[f"heads.{head}.{part}.{kind}"] = next(rows).clone()
        return out


SOFTMAX = (Fused, SDPA, Auto, Split, PerHead)
"""Implementations of one function.  Derived classes do not count, because they may compute another."""


def rotate(x_BHTK: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of channels (2i, 2i + 1) by its angle, in the wider of the two dtypes."""
    cos, sin = rotation
    even, odd = x_BHTK[..., 0::2], x_BHTK[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return turned.flatten(-2).to(x_BHTK.dtype)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return attention weights (..., T, T) of scaled queries and keys (..., T, K)."""
    logits = q @ k.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return logits.softmax(-1)


def _fused_kernel(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
    mask = None if bias_HTT is None else bias_HTT.to(q_BHTK.dtype)[None]
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask)
