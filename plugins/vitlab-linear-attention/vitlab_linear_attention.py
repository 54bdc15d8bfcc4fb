"""Attentions whose cost does not grow with the square of the number of tokens: two linear ones and two sparse ones.

A linear attention replaces exp(q k) by a product of features f(q) f(k).  Keys are multiplied with values first, so
that the matrix of weights is never computed.  It has no logits and therefore takes no bias.  A sparse attention has a
few logits per query.  All have the canonical parameters ``qkv`` and ``proj``, so that weights of any other
attention can be loaded and arms start from the same values.

B images, T tokens, P prefix tokens, N patches, D width, H heads, K channels of a head, F features, W keys of a window,
S = P + W.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vitlab.plugin import Attention, Choice, Dropout, Geometry, Pick, Rotation, rotate, slot

Probability = Annotated[float, Field(ge=0, lt=1)]
Norm = Annotated[Choice | str, Pick("norm")]
Window = Annotated[int, Field(gt=0, le=1023)]


class _Projected(Attention):
    """Attention with one projection for queries, keys and values, and another after the heads."""

    def __init__(self, g: Geometry, *, qkv_bias: bool, qk_norm: Choice | str, proj_drop: float) -> None:
        super().__init__()
        self.shape = (3, g.heads, g.head_dim)
        self.qkv = nn.Linear(g.dim, 3 * g.dim, bias=qkv_bias)
        self.q_norm = slot("norm").build(qk_norm, g.head_dim)
        self.k_norm = slot("norm").build(qk_norm, g.head_dim)
        self.proj = nn.Linear(g.dim, g.dim)
        self.proj_drop = Dropout(proj_drop)

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (B, H, T, K)."""
        q_BHTK, k_BHTK, v_BHTK = self.qkv(x_BTD).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q_BHTK), self.k_norm(k_BHTK), v_BHTK

    def _out(self, y_BHTK: Tensor) -> Tensor:
        out_BTD: Tensor = self.proj_drop(self.proj(y_BHTK.transpose(1, 2).flatten(2)))
        return out_BTD


# -- linear attention -------------------------------------------------------------------------------------------------


class _Kernel(_Projected):
    """Attention with weights f(q) f(k), divided by their sum, for positive features f."""

    takes_bias = False  # a bias is added to logits, and there are none

    def _features(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of queries and of keys, each (B, H, T, F), and the values."""
        raise NotImplementedError

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        q_BHTF, k_BHTF, v_BHTK = self._features(x_BTD, rotation)
        wide_BHTK = v_BHTK.to(k_BHTF.dtype)
        sum_BHTK = q_BHTF @ (k_BHTF.transpose(-2, -1) @ wide_BHTK)
        total_BHT1 = (q_BHTF * k_BHTF.sum(-2, keepdim=True)).sum(-1, keepdim=True)
        return self._out((sum_BHTK / _positive(total_BHT1)).to(x_BTD.dtype))

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Return the matrix of weights, which the forward pass does not compute."""
        q_BHTF, k_BHTF, _ = self._features(x_BTD, rotation)
        weights_BHTT = q_BHTF @ k_BHTF.transpose(-2, -1)
        return weights_BHTT / _positive(weights_BHTT.sum(-1, keepdim=True))


class Linear(_Kernel):
    """Linear attention with the features elu(x) + 1.  Reference: arXiv:2006.16236, equations 4 to 7.

    It takes neither a bias nor a rotation: a rotation is defined for the logits of a softmax, and these features do not
    approximate them.  There is no factor 1 / sqrt(K), as in the paper.

    Args:
        g: the sizes of the model.
        qkv_bias: a bias for queries, keys and values.
        qk_norm: the norm of queries and keys, over the width of a head.
        proj_drop: dropout after the output projection.
    """

    takes_rotation = False

    def __init__(
        self, g: Geometry, *, qkv_bias: bool = True, qk_norm: Norm = "none", proj_drop: Probability = 0.0
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, proj_drop=proj_drop)

    def _features(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTK, k_BHTK, v_BHTK = self._qkv(x_BTD)
        return _elu_plus_1(_wide(q_BHTK)), _elu_plus_1(_wide(k_BHTK)), v_BHTK


class Performer(_Kernel):
    """FAVOR+: positive orthogonal random features, whose products are exp(q k / sqrt(K)) on average over draws.

    It estimates softmax attention, with rotated queries and keys if the position is a rotation.  The features are drawn
    once, with the initial values, and are part of the state; the heads of a block share them.  The paper's code adds a
    small number to the features; here the factors that prevent underflow cancel instead.

    Reference: arXiv:2009.14794, lemma 1 and section 2.4; without the redrawing of section 4.2.

    Args:
        g: sizes.
        features: number of features; more give a better estimate.  Default: K log K, rounded up, for K channels of a
            head.
        qkv_bias: whether queries, keys and values have a bias.
        qk_norm: normalisation of queries and keys.
        proj_drop: dropout after the last matrix.
    """

    features_FK: Tensor

    def __init__(
        self,
        g: Geometry,
        *,
        features: Annotated[int, Field(gt=0, le=65536)] | None = None,
        qkv_bias: bool = True,
        qk_norm: Norm = "none",
        proj_drop: Probability = 0.0,
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, proj_drop=proj_drop)
        count = features or max(1, math.ceil(g.head_dim * math.log(g.head_dim)))
        self.register_buffer("features_FK", orthogonal(count, g.head_dim))

    def _features(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTK, k_BHTK, v_BHTK = self._qkv(x_BTD)
        if rotation is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, rotation), rotate(k_BHTK, rotation)
        log_q_BHTF, log_k_BHTF = self._logs(q_BHTK), self._logs(k_BHTK)
        # Move the largest key of each feature to the queries, and divide each query by its largest feature, which
        # cancels: no exponent is above 0, and the sum of weights is at least 1.
        max_BH1F = log_k_BHTF.detach().amax(-2, keepdim=True)
        log_q_BHTF = log_q_BHTF + max_BH1F
        log_q_BHTF = log_q_BHTF - log_q_BHTF.detach().amax(-1, keepdim=True)
        return log_q_BHTF.exp(), (log_k_BHTF - max_BH1F).exp(), v_BHTK

    def _logs(self, x_BHTK: Tensor) -> Tensor:
        """Return the logarithms of the features up to a constant, (B, H, T, F)."""
        x_BHTK = _wide(x_BHTK) * x_BHTK.shape[-1] ** -0.25
        product_BHTF: Tensor = x_BHTK @ self.features_FK.to(x_BHTK.dtype).T
        return product_BHTF - x_BHTK.square().sum(-1, keepdim=True) / 2

    def from_canonical(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state, with this module's own features if it comes from another attention."""
        return {"features_FK": self.features_FK, **state}


def orthogonal(features: int, channels: int) -> Tensor:
    """Draw vectors (F, K) that are orthogonal in groups of K and as long as normal vectors."""
    directions = []
    for _ in range(math.ceil(features / channels)):
        q_KK, r_KK = torch.linalg.qr(torch.randn(channels, channels))
        directions.append((q_KK * r_KK.diagonal().sign()).T)  # with these signs, uniform among rotations
    length_F1: Tensor = torch.randn(features, channels).norm(dim=1, keepdim=True)
    return torch.cat(directions)[:features] * length_F1


# -- sparse attention -------------------------------------------------------------------------------------------------


class _Sparse(_Projected):
    """Attention of each patch to a few tokens, and of prefix tokens to all.

    It takes a bias and a rotation as softmax attention does.
    """

    def __init__(self, g: Geometry, *, qkv_bias: bool, qk_norm: Choice | str, drop: float, proj_drop: float) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, proj_drop=proj_drop)
        self.prefix = len(g.prefix)
        self.scale = g.head_dim**-0.5
        self.global_drop = Dropout(drop)
        self.window_drop = Dropout(drop)

    def _keys(self) -> tuple[Tensor, Tensor | None]:
        """Return the tokens that each patch attends to, (N, S), and which of them it does not see, if any."""
        raise NotImplementedError

    def _logits(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> tuple[Tensor, ...]:
        """Return the logits of prefix tokens (B, H, P, T) and of patches (B, H, N, S), and the values."""
        key_NS, hidden_NS = self._keys()
        q_BHTK, k_BHTK, v_BHTK = self._qkv(x_BTD)
        if rotation is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, rotation), rotate(k_BHTK, rotation)
        q_BHTK = q_BHTK * self.scale
        prefix_BHPT = q_BHTK[:, :, : self.prefix] @ k_BHTK.transpose(-2, -1)
        patches_BHNS = (_rows(k_BHTK, key_NS) @ q_BHTK[:, :, self.prefix :, :, None]).squeeze(-1)
        if bias_HTT is not None:
            bias_HTT = bias_HTT.to(q_BHTK.dtype)
            prefix_BHPT = prefix_BHPT + bias_HTT[:, : self.prefix]
            key_HNS = key_NS.expand(bias_HTT.shape[0], -1, -1)
            patches_BHNS = patches_BHNS + bias_HTT[:, self.prefix :].gather(-1, key_HNS)
        if hidden_NS is not None:
            patches_BHNS = patches_BHNS.masked_fill(hidden_NS, -math.inf)
        return prefix_BHPT, patches_BHNS, v_BHTK

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Attend to the tokens of each patch; prefix tokens attend to all."""
        prefix_BHPT, patches_BHNS, v_BHTK = self._logits(x_BTD, rotation, bias_HTT)
        prefix_BHPK = self.global_drop(prefix_BHPT.softmax(-1)) @ v_BHTK
        weights_BHN1S = self.window_drop(patches_BHNS.softmax(-1))[:, :, :, None]
        patches_BHNK = (weights_BHN1S @ _rows(v_BHTK, self._keys()[0])).squeeze(-2)
        return self._out(torch.cat([prefix_BHPK, patches_BHNK], 2))

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Return the matrix of weights, with zeros for tokens that a patch does not attend to."""
        prefix_BHPT, patches_BHNS, _ = self._logits(x_BTD, rotation, bias_HTT)
        weights_BHNS = patches_BHNS.softmax(-1)
        zeros_BHNT = weights_BHNS.new_zeros(*weights_BHNS.shape[:3], prefix_BHPT.shape[-1])
        # Hidden keys have index 0 and weight 0, so they are added, not written.
        patches_BHNT = zeros_BHNT.scatter_add(-1, self._keys()[0].expand(weights_BHNS.shape), weights_BHNS)
        return torch.cat([prefix_BHPT.softmax(-1), patches_BHNT], 2)


def _rows(x_BHTK: Tensor, key_NS: Tensor) -> Tensor:
    """Gather the rows of the tokens that each patch attends to, (B, H, N, S, K)."""
    near_BHXK = x_BHTK.index_select(2, key_NS.flatten())
    return near_BHXK.reshape(*x_BHTK.shape[:2], *key_NS.shape, x_BHTK.shape[-1])


class Neighborhood(_Sparse):
    """Attention of each patch to a window of patches and to the prefix tokens, which attend to all tokens.

    At the edge of the grid the window is moved, not cut, so that every patch attends to the same number of tokens.  If
    the grid has fewer rows or columns than the window, the window covers that axis.

    Reference: arXiv:2204.07143, equations 1 to 3 (neighborhood attention); global tokens as in arXiv:2004.05150,
    section 3.1.

    Args:
        g: sizes.
        window: rows and columns of the window.
        qkv_bias: whether queries, keys and values have a bias.
        qk_norm: normalisation of queries and keys.
        drop: dropout of attention weights.
        proj_drop: dropout after the last matrix.
    """

    key_NS: Tensor

    def __init__(
        self,
        g: Geometry,
        *,
        window: Window = 3,
        qkv_bias: bool = True,
        qk_norm: Norm = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop)
        self.register_buffer("key_NS", neighbours(g, window), persistent=False)

    def _keys(self) -> tuple[Tensor, Tensor | None]:
        return self.key_NS, None


class Windowed(_Sparse):
    """Attention of each patch to the patches of its window and to the prefix tokens, which attend to all tokens.

    Windows divide the grid; those at its edge may be smaller.  In odd blocks they may be shifted by half a window, so
    that neighbouring windows exchange information.  An axis that one window covers is not shifted.

    Reference: arXiv:2103.14030 (Swin), section 3.2; its masked cyclic shift is the same as smaller windows at the edge.

    Args:
        g: sizes.
        window: rows and columns of a window.
        shift: in which blocks windows are shifted; blocks are counted from 0.
        qkv_bias: whether queries, keys and values have a bias.
        qk_norm: normalisation of queries and keys.
        drop: dropout of attention weights.
        proj_drop: dropout after the last matrix.
    """

    key_NS: Tensor
    hidden_NS: Tensor

    def __init__(
        self,
        g: Geometry,
        *,
        window: Window = 4,
        shift: Literal["odd", "none"] = "odd",
        qkv_bias: bool = True,
        qk_norm: Norm = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
    ) -> None:
        super().__init__(g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop)
        self.geometry = g
        self.window = window
        self.shift_of_odd = window // 2 if shift == "odd" else 0
        self._shift: int | None = None  # of the buffers
        self.block_index = 0

    @property
    def block_index(self) -> int:
        """Index of the attention's block, from 0; windows depend on it."""
        return self._block_index

    @block_index.setter
    def block_index(self, index: int) -> None:
        self._block_index = index
        shift = self.shift_of_odd if index % 2 else 0
        if shift != self._shift:
            self._shift = shift
            key_NS, hidden_NS = windows(self.geometry, self.window, shift)
            self.register_buffer("key_NS", key_NS.to(self.proj.weight.device), persistent=False)
            self.register_buffer("hidden_NS", hidden_NS.to(self.proj.weight.device), persistent=False)

    def _keys(self) -> tuple[Tensor, Tensor | None]:
        return self.key_NS, self.hidden_NS


def neighbours(g: Geometry, window: int) -> Tensor:
    """Return the tokens that each patch attends to, (N, S) int64: the prefix, then its window row by row."""
    first, offset = [], []
    for length in g.grid:
        size = min(window, length)
        first.append((torch.arange(length) - size // 2).clamp(0, length - size))
        offset.append(torch.arange(size))
    row_NW = (first[0][:, None, None, None] + offset[0][:, None]).expand(*g.grid, len(offset[0]), len(offset[1]))
    column_NW = first[1][:, None, None] + offset[1]
    patch_NW = (row_NW * g.grid[1] + column_NW).flatten(2).flatten(0, 1)
    prefix_NP = torch.arange(len(g.prefix)).expand(g.patches, -1)
    return torch.cat([prefix_NP, patch_NW + len(g.prefix)], 1)


def windows(g: Geometry, window: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of each patch's window after the prefix, (N, S) int64, and which of them only fill up."""
    first, size = [], []
    for length in g.grid:
        offset = shift if window < length else 0
        start = (torch.arange(length) - offset).div(window, rounding_mode="floor") * window + offset
        first.append(start.clamp(min=0))
        size.append((start + window).clamp(max=length) - first[-1])
    row_N1, rows_N1 = (axis.repeat_interleave(g.grid[1])[:, None] for axis in (first[0], size[0]))
    column_N1, columns_N1 = (axis.repeat(g.grid[0])[:, None] for axis in (first[1], size[1]))
    place_W = torch.arange(min(window, g.grid[0]) * min(window, g.grid[1]))  # in a window, row by row
    patch_NW = (row_N1 + place_W // columns_N1) * g.grid[1] + column_N1 + place_W % columns_N1
    hidden_NW = place_W >= rows_N1 * columns_N1
    prefix_NP = torch.arange(len(g.prefix)).expand(g.patches, -1)
    key_NS = torch.cat([prefix_NP, (patch_NW + len(g.prefix)).masked_fill(hidden_NW, 0)], 1)
    return key_NS, torch.cat([torch.zeros_like(prefix_NP, dtype=torch.bool), hidden_NW], 1)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    """Cast to at least float32, because sums over all tokens lose small terms."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _elu_plus_1(x: Tensor) -> Tensor:
    """Compute elu(x) + 1 without rounding to 0 for x far below 0."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _positive(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny)
