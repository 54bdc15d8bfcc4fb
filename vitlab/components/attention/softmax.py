"""Scaled dot-product attention with softmax, in five implementations of one function, and two that change it.

B images, T tokens, D width, H heads, K channels of a head (D = H * K), G factors per token.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitlab.components.attention import Attention, MixValues, attention, rotate
from vitlab.components.base import Dropout, NewState, Options, Probability, Rotation, State, inside_vmap
from vitlab.components.norm import NormChoice
from vitlab.geometry import Geometry
from vitlab.registry import slot

Kernel = Literal["explicit", "sdpa"]
QKVBias = bool | Literal["qv"]
"""Whether queries, keys and values have a bias; ``qv``: queries and values alone."""


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
        qkv_bias: a bias for queries, keys and values; ``qv``: for queries and values alone, as in BEiT and EVA.
        qk_norm: the norm of queries and keys, over the width of a head.
        drop: dropout of the attention weights.
        proj_drop: dropout after the output projection.
        proj_bias: a bias for the output projection.
        norm: the norm of the mixed values of all heads, before the output projection (timm's ``scale_attn_norm``).
    """

    mixes_values = True
    counts_keys = True

    kernel: Kernel = "explicit"  #: what computes the weighted values; of ``auto``, in the latest forward pass
    maps_per_head: ClassVar[int] = 1  #: attention maps of a head, each of which has an equal share of its channels

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: QKVBias = True,
        qk_norm: NormChoice = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
        proj_bias: bool = True,
        norm: NormChoice = "none",
    ) -> None:
        super().__init__()
        self.num_heads = g.heads
        self.head_dim = g.head_dim
        map_dim = g.head_dim // self.maps_per_head
        self.scale = map_dim**-0.5
        self.qkv_bias = qkv_bias
        self._build_projections(g, qkv_bias)
        self.q_norm = slot("norm").build(qk_norm, map_dim)
        self.k_norm = slot("norm").build(qk_norm, map_dim)
        self.attn_drop = Dropout(drop)
        self.norm = slot("norm").build(norm, g.dim)
        self.proj = nn.Linear(g.dim, g.dim, bias=proj_bias)
        self.proj_drop = Dropout(proj_drop)

    def _build_projections(self, g: Geometry, bias: QKVBias) -> None:
        self.qkv = QueryValueBias(g.dim) if bias == "qv" else nn.Linear(g.dim, 3 * g.dim, bias=bias)

    def to_canonical(self, state: State) -> NewState:
        """Give keys a bias of zeros where they have none."""
        out = dict(state)
        if self.qkv_bias == "qv" and "qkv.bias" in out:
            out["qkv.bias"] = insert_key_bias(out["qkv.bias"])
        return out

    def from_canonical(self, state: State) -> NewState:
        """Leave out the bias of keys where they have none."""
        out = dict(state)
        if self.qkv_bias == "qv" and "qkv.bias" in out:
            out["qkv.bias"] = torch.cat(out["qkv.bias"].chunk(3)[::2])
        return out

    def stacked_maps(self) -> Mapping[str, int]:
        return {"qkv.weight": 3}

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation | None,
        bias_HTT: Tensor | None,
        mix_values: MixValues | None = None,
    ) -> Tensor:
        # Blocks that merge tokens compare the keys that the product sees, so they get them rotated.
        q_BHTK, k_BHTK, v_BHTK = self._prepare_qkv(x_BTD, rotation)
        if mix_values is not None:
            v_BHTK = mix_values(k_BHTK, v_BHTK)
        y_BTD = self._mix_values(q_BHTK, k_BHTK, v_BHTK, bias_HTT).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(self._output_projection_input(y_BTD, x_BTD)))

    def _output_projection_input(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        """Return the input of the output projection, from the mixed values and the input of the attention."""
        return self.norm(y_BTD)

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        q_BHTK, k_BHTK, _ = self._prepare_qkv(x_BTD, rotation)
        return _attention_weights(q_BHTK * self.scale, k_BHTK, bias_HTT)

    def _prepare_qkv(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised and rotated queries and keys, and values, each (B, H, T, K)."""
        q_BHTK, k_BHTK, v_BHTK = self._qkv(x_BTD)
        q_BHTK, k_BHTK = self.q_norm(q_BHTK), self.k_norm(k_BHTK)
        if rotation is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, rotation), rotate(k_BHTK, rotation)
        return q_BHTK, k_BHTK, v_BHTK

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each (B, H, T, K), neither normalised nor rotated."""
        # Rows [q; k; v], with the heads in order inside of each, as in timm.
        qkv_BT3HK = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, self.head_dim))
        return tuple(qkv_BT3HK.permute(2, 0, 3, 1, 4).unbind(0))

    def _mix_values(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        """Return the values mixed by attention weights, (B, H, T, K)."""
        if self.kernel == "explicit":
            return self.attn_drop(_attention_weights(q_BHTK * self.scale, k_BHTK, bias_HTT)) @ v_BHTK
        mask = None if bias_HTT is None else bias_HTT.to(q_BHTK.dtype)
        if mask is not None and mask.ndim == 3:
            mask = mask[None]
        # Torch's own default is rounded in another way, and is kept where it is meant.
        scale = None if self.scale == q_BHTK.shape[-1] ** -0.5 else self.scale
        if inside_vmap() and v_BHTK.device.type == "cuda":
            # The gradients of other fused kernels fail inside of vmap, and autocast does not cast their inputs there.
            q_BHTK, k_BHTK = q_BHTK.to(v_BHTK.dtype), k_BHTK.to(v_BHTK.dtype)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask, scale=scale)
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask, scale=scale)


class QueryValueBias(nn.Linear):
    """One matrix of queries, keys and values, (3 D, D), and a bias (2 D) of queries and values."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 3 * dim)
        self.bias = nn.Parameter(self.bias.detach()[dim:])

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return queries, keys and values, (B, T, D) to (B, T, 3 D)."""
        return F.linear(x_BTD, self.weight, insert_key_bias(self.bias))


def insert_key_bias(bias: Tensor) -> Tensor:
    """Return a bias of queries and values with zeros for the keys between them, (2 D) to (3 D)."""
    queries, values = bias.chunk(2)
    return torch.cat([queries, torch.zeros_like(queries), values])


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

    vmap_safe = False  # most kernels have no batching rule that works: a loop over members
    kernel = "sdpa"

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        if options.get("drop", 0.0) > 0:
            return (
                f"attention 'sdpa' cannot drop attention weights (drop is {options['drop']:g}): its kernel draws from "
                "a generator that no replay reproduces; use 'explicit' or 'auto', or drop: 0"
            )
        return None


@attention.register("auto")
class Auto(SoftmaxAttention):
    """Softmax attention by one projection matrix; explicit or SDPA kernel, by a rule.

    The first line that applies decides:

    1. weights are dropped in this step: explicit, because draws are keyed;
    2. on CPU in a type of 16 bits: explicit, which is ten times as fast there;
    3. inside ``torch.func.vmap``: SDPA on CUDA in a type of 16 bits without a bias, as only its flash kernel has a
       batching rule that works, and explicit otherwise;
    4. otherwise: SDPA.
    """

    def _mix_values(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        dropping = self.training and self.attn_drop.p > 0
        # The values' dtype decides: under autocast, a norm returns wide queries and keys, which the kernel casts back.
        narrow, device = v_BHTK.dtype in (torch.bfloat16, torch.float16), v_BHTK.device.type
        slow = device == "cpu" and narrow
        unbatched = inside_vmap() and not (device == "cuda" and narrow and bias_HTT is None)
        self.kernel = "explicit" if dropping or slow or unbatched else "sdpa"
        return super()._mix_values(q_BHTK, k_BHTK, v_BHTK, bias_HTT)


class _SeparateProjections(SoftmaxAttention):
    """Base of implementations with several matrices in the place of the canonical ``qkv``."""

    matrices: list[str]  #: paths of the projections; their rows, in this order, are the rows of ``qkv``

    def stacked_maps(self) -> Mapping[str, int]:
        return {}

    def to_canonical(self, state: State) -> NewState:
        out = {name: value for name, value in state.items() if name.rpartition(".")[0] not in self.matrices}
        for kind in ("weight", "bias"):
            parts = [state[name] for matrix in self.matrices if (name := f"{matrix}.{kind}") in state]
            if parts:
                out[f"qkv.{kind}"] = torch.cat(parts)
        return super().to_canonical(out)

    def from_canonical(self, state: State) -> NewState:
        own, fused = dict(self.named_parameters()), super().from_canonical(state)
        out = {name: value for name, value in fused.items() if not name.startswith("qkv.")}
        for kind in ("weight", "bias"):
            if f"qkv.{kind}" in fused:
                names = [name for matrix in self.matrices if (name := f"{matrix}.{kind}") in own]
                names = names or [f"qkv.{kind}"]  # which this attention lacks, and the caller reports
                rows = fused[f"qkv.{kind}"].chunk(len(names))
                out |= {name: part.clone() for name, part in zip(names, rows, strict=True)}
        return out


@attention.register("split")
class Split(_SeparateProjections):
    """Three projection matrices, for q, k and v; explicit kernel.

    Hugging Face's implementation has the same projections.
    """

    def _build_projections(self, g: Geometry, bias: QKVBias) -> None:
        self.matrices = ["q", "k", "v"]
        self.q, self.k, self.v = build_projections(g.dim, g.dim, bias)

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        head_shape = (self.num_heads, self.head_dim)
        parts_BTHK = [layer(x_BTD).unflatten(-1, head_shape) for layer in (self.q, self.k, self.v)]
        return tuple(part_BTHK.transpose(1, 2) for part_BTHK in parts_BTHK)


@attention.register("per_head")
class PerHead(_SeparateProjections):
    """Three projection matrices per head; explicit kernel, head by head.

    The form of textbooks, and the slowest.
    """

    def _build_projections(self, g: Geometry, bias: QKVBias) -> None:
        self.matrices = [f"heads.{head}.{part}" for part in "qkv" for head in range(g.heads)]
        projections = (build_projections(g.dim, g.head_dim, bias) for _ in range(g.heads))
        self.heads = nn.ModuleList(nn.ModuleDict(dict(zip("qkv", of_head, strict=True))) for of_head in projections)

    def _qkv(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.stack([getattr(head, part)(x_BTD) for head in self.heads], 1) for part in "qkv")

    def _mix_values(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        heads = range(self.num_heads)
        biases: Sequence[Tensor | None] = [None] * self.num_heads
        if bias_HTT is not None:  # an axis of length 1 stands for all heads
            biases = bias_HTT.expand(*bias_HTT.shape[:-3], self.num_heads, -1, -1).unbind(-3)
        maps = [_attention_weights(q_BHTK[:, head] * self.scale, k_BHTK[:, head], biases[head]) for head in heads]
        # One dropout for all heads, because the other implementations draw for all heads, too.
        dropped_BHTT = self.attn_drop(torch.stack(maps, 1))
        return torch.stack([dropped_BHTT[:, head] @ v_BHTK[:, head] for head in heads], 1)


def build_projections(dim: int, out: int, bias: QKVBias) -> Iterator[nn.Linear]:
    """Yield the projections to queries, keys and values, from ``dim`` to ``out`` channels."""
    return (nn.Linear(dim, out, bias=has_bias) for has_bias in (bool(bias), bias is True, bool(bias)))


SOFTMAX = (Explicit, SDPA, Auto, Split, PerHead)
"""Implementations of one function.  Derived classes do not count, because they may compute another."""


@attention.register("gated")
class Gated(Auto):
    """Softmax attention times the sigmoid of a linear map of its input, before the output projection.

    Reference: arXiv:2505.06708, the gate G1.  timm's ``Attention(gated=True)`` is the elementwise one.

    Args:
        qkv_bias: a bias for queries, keys and values, and for the gate; ``qv``: for all but keys.
        norm: the norm of the mixed values of all heads, before the gate.
        gate: a factor for every channel, or one for all channels of a head.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: QKVBias = True,
        qk_norm: NormChoice = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
        proj_bias: bool = True,
        norm: NormChoice = "none",
        gate: Literal["elementwise", "headwise"] = "elementwise",
    ) -> None:
        super().__init__(
            g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop, proj_bias=proj_bias, norm=norm
        )
        self.gate = nn.Linear(g.dim, g.dim if gate == "elementwise" else g.heads, bias=bool(qkv_bias))

    def _output_projection_input(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        # From the attention's input, not from what it has found, as the reference's G1.
        gate_BTG = self.gate(x_BTD).sigmoid()
        y_BTD = super()._output_projection_input(y_BTD, x_BTD)
        return y_BTD * gate_BTG.repeat_interleave(y_BTD.shape[-1] // gate_BTG.shape[-1], -1)


@attention.register("sigmoid")
class Sigmoid(Explicit):
    """Weights are the sigmoid of the scaled products less the logarithm of the number of tokens.

    Reference: arXiv:2409.04431.  The weights of a query do not sum to 1, so there are no attention maps to explain.
    """

    counts_keys = False  # the sigmoid of a sum with log(n) is not n times the sigmoid
    maps = Attention.maps  # rows of the weights do not sum to 1

    def _mix_values(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        logits_BHTT = (q_BHTK * self.scale) @ k_BHTK.transpose(-2, -1) - math.log(k_BHTK.shape[2])
        if bias_HTT is not None:
            logits_BHTT = logits_BHTT + bias_HTT.to(logits_BHTT.dtype)
        return self.attn_drop(logits_BHTT.sigmoid()) @ v_BHTK


def _attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return attention weights (..., T, T) of scaled queries and keys (..., T, K)."""
    logits = q @ k.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return logits.softmax(-1)
