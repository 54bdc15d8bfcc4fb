"""Blocks with learned gates where a branch joins its input.

B images, T tokens, D width.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.components.base import Rotation
from vitlab.components.block import Block, Place, block

Gate = Literal["output", "highway", "gru"]


class ResidualGate(nn.Module):
    """A gate in the place of the sum of tokens x and a branch y.  Reference: arXiv:1910.06764, section 3.2.

    ===========  ========================================================================
    ``output``   x + s(W x - b) y
    ``highway``  s(W x + b) x + (1 - s(W x + b)) y
    ``gru``      (1 - z) x + z tanh(W_g y + U_g (r x)), with r = s(W_r y + U_r x) and
                 z = s(W_z y + U_z x - b)
    ===========  ========================================================================

    s is the sigmoid, products are channel by channel, and b starts at ``start``: positive values favour x.
    """

    keeps_init = ("bias",)

    def __init__(self, dim: int, gate: Gate, start: float) -> None:
        super().__init__()
        self.gate = gate
        # Of gru: reset, update and candidate, below each other.
        self.from_x = nn.Linear(dim, 3 * dim if gate == "gru" else dim, bias=False)
        self.from_y = nn.Linear(dim, 3 * dim, bias=False) if gate == "gru" else None
        self.bias = nn.Parameter(torch.full((dim,), start))

    def forward(self, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        if self.from_y is None:
            w_BTD = self.from_x(x_BTD)
            if self.gate == "output":
                return x_BTD + (w_BTD - self.bias).sigmoid() * y_BTD
            share_BTD = (w_BTD + self.bias).sigmoid()
            return share_BTD * x_BTD + (1 - share_BTD) * y_BTD
        reset_y_BTD, update_y_BTD, candidate_y_BTD = self.from_y(y_BTD).chunk(3, -1)
        reset_DD, update_DD, candidate_DD = self.from_x.weight.chunk(3)
        reset_BTD = (reset_y_BTD + nn.functional.linear(x_BTD, reset_DD)).sigmoid()
        update_BTD = (update_y_BTD + nn.functional.linear(x_BTD, update_DD) - self.bias).sigmoid()
        candidate_BTD = (candidate_y_BTD + nn.functional.linear(reset_BTD * x_BTD, candidate_DD)).tanh()
        return (1 - update_BTD) * x_BTD + update_BTD * candidate_BTD


@block.register("gated")
class Gated(Block):
    """Attention, then an MLP, each on normalised tokens and joined to its input by a learned gate.

    Reference: arXiv:1910.06764 (GTrXL), without its ReLU before the gate.

    Args:
        gate: the form of the gate: ``output`` and ``highway`` have D * D weights per branch, ``gru`` six times as many.
        start: initial bias of the gates; positive values start near the identity.
    """

    def __init__(self, place: Place, *, gate: Gate = "output", start: float = 2.0) -> None:
        super().__init__(place)
        self.gate1 = ResidualGate(place.geometry.dim, gate, start)
        self.gate2 = ResidualGate(place.geometry.dim, gate, start)

    def stacked_maps(self) -> Mapping[str, int]:
        if self.gate1.gate != "gru":
            return {}
        return {f"{gate}.{side}.weight": 3 for gate in ("gate1", "gate2") for side in ("from_x", "from_y")}

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        y_BTD = self.drop_path1(self.ls1(self.attn(self.norm1(x_BTD), rotation, bias_HTT)))
        x_BTD = self.gate1(x_BTD, y_BTD)
        y_BTD = self._mlp_branch(x_BTD)
        return self.gate2(x_BTD, y_BTD)
