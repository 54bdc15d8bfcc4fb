"""Softmax attention with a gate.

B images, T tokens, D width, G factors per token.
"""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor, nn

from vitlab.components.attention.contract import Probability, attention
from vitlab.components.attention.softmax import Auto
from vitlab.geometry import Geometry
from vitlab.registry import Pick
from vitlab.spec import Choice


@attention.register("gated")
class Gated(Auto):
    """Softmax attention times the sigmoid of a linear map of its input, before the output projection.

    Reference: arXiv:2505.06708, the gate G1.  timm's ``Attention(gated=True)`` is the elementwise one.

    Args:
        qkv_bias: a bias for queries, keys and values, and for the gate.
        qk_norm: the norm of queries and keys, over the width of a head.
        drop: dropout of the attention weights.
        proj_drop: dropout after the output projection.
        proj_bias: a bias for the output projection.
        norm: of the mixed values of all heads, before the gate.
        gate: a factor for every channel, or one for all channels of a head.
    """

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
        gate: Literal["elementwise", "headwise"] = "elementwise",
    ) -> None:
        super().__init__(
            g, qkv_bias=qkv_bias, qk_norm=qk_norm, drop=drop, proj_drop=proj_drop, proj_bias=proj_bias, norm=norm
        )
        self.gate = nn.Linear(g.dim, g.dim if gate == "elementwise" else g.heads, bias=qkv_bias)

    def _before_projection(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        gate_BTG: Tensor = self.gate(x_BTD).sigmoid()
        y_BTD = super()._before_projection(y_BTD, x_BTD)
        return y_BTD * gate_BTG.repeat_interleave(y_BTD.shape[-1] // gate_BTG.shape[-1], -1)
