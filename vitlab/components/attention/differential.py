"""Attention by the difference of two maps.

B images, T tokens, D width, H heads, K channels of a head, J = K / 2 channels of a half of it.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.components.attention import Attention, MixValues, attention
from vitlab.components.attention.softmax import SoftmaxAttention
from vitlab.components.base import Options, Probability, Rotation
from vitlab.components.norm import NormChoice, RMSNorm
from vitlab.geometry import Geometry


@attention.register("differential")
class Differential(SoftmaxAttention):
    """Two softmax maps per head, the second times a learned factor taken from the first.  Reference: arXiv:2410.05258.

    timm's ``DiffAttention``: each half of the channels of a head's queries and keys forms a map, and both are applied
    to all of its values.  The factor starts at 0.8 - 0.6 exp(-0.3 block), with blocks counted from 0; an RMS norm of
    each head follows.  Weights may be negative, so there are no attention maps to explain.

    Args:
        qkv_bias: a bias for queries, keys and values.
        qk_norm: the norm of queries and keys, over half of the width of a head.
        factor: learned as products of vectors, as in the paper, or as two numbers (timm's ``dual_lambda``).
    """

    takes_rotation = False  # the angles of a position are for heads of K channels
    maps_per_head = 2
    maps = Attention.maps  # weights may be negative

    def __init__(
        self,
        g: Geometry,
        *,
        qkv_bias: bool = True,
        qk_norm: NormChoice = "none",
        drop: Probability = 0.0,
        proj_drop: Probability = 0.0,
        proj_bias: bool = True,
        norm: NormChoice = "none",
        factor: Literal["vectors", "numbers"] = "vectors",
    ) -> None:
        super().__init__(
            g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop, proj_bias=proj_bias, norm=norm
        )
        self.factor = factor
        if factor == "vectors":
            vectors = (nn.Parameter(0.1 * torch.randn(g.head_dim // 2)) for _ in range(4))
            self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = vectors
        else:
            self.lambda_a, self.lambda_b = (nn.Parameter(torch.zeros(())) for _ in range(2))
        self.sub_norm = RMSNorm(g.head_dim, eps=1e-5)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        if g.head_dim % 2:
            return (
                f"attention 'differential' halves the channels of a head, and there are {g.head_dim}; choose dim and "
                "heads so that dim / heads is even"
            )
        return None

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation | None,
        bias_HTT: Tensor | None,
        mix_values: MixValues | None = None,
    ) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, -1)
        # A head's first and second half of the channels form its two maps.
        halves = (self.num_heads, 2, -1)
        q_BTH2J, k_BTH2J = self.q_norm(q_BTD.unflatten(-1, halves)), self.k_norm(k_BTD.unflatten(-1, halves))
        v_BHTK = v_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if mix_values is not None:
            v_BHTK = mix_values(k_BTH2J.flatten(3).transpose(1, 2), v_BHTK)
        logits_BH2TT = q_BTH2J.permute(0, 2, 3, 1, 4) * self.scale @ k_BTH2J.permute(0, 2, 3, 4, 1)
        if bias_HTT is not None:
            logits_BH2TT = logits_BH2TT + bias_HTT.to(logits_BH2TT.dtype).unsqueeze(-3)
        first_BHTT, second_BHTT = self.attn_drop(logits_BH2TT.softmax(-1)).unbind(2)
        # Deeper blocks subtract more, by the paper's schedule.
        start = 0.8 - 0.6 * math.exp(-0.3 * self.block_index)
        if self.factor == "numbers":
            learned = self.lambda_a.exp() - self.lambda_b.exp()
        else:
            learned = (self.lambda_q1 * self.lambda_k1).sum().exp() - (self.lambda_q2 * self.lambda_k2).sum().exp()
        factor = (learned + start).to(first_BHTT.dtype)
        # Times 1 - start, so that outputs and gradients have the size of a single map's.
        y_BHTK = self.sub_norm((first_BHTT - factor * second_BHTT) @ v_BHTK) * (1 - start)
        return self.proj_drop(self.proj(self.norm(y_BHTK.transpose(1, 2).flatten(2))))
