"""Blocks that add the values of an earlier block to their own.

B images, T tokens, D width, H heads, K channels of a head.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.components.base import Rotation
from vitlab.components.block import Block, Place, block


@block.register("value_residual")
class ValueResidual(Block):
    """A pre-norm block whose attention mixes the first block's values into its own.  Reference: arXiv:2410.17897.

    The values of block n are a V_1 + b V_n, with two numbers a and b of its own.  The first block of this kind has
    V_1 and no such numbers.

    Args:
        mix: whether a and b are learned or stay as they start, at 0.5 each.
    """

    passes = "values"

    def __init__(self, place: Place, *, mix: Literal["learned", "fixed"] = "learned") -> None:
        super().__init__(place)
        shares_2 = torch.full((2,), 0.5)
        if not place.receives_values:
            self.shares = None
        elif mix == "learned":
            self.shares = nn.Parameter(shares_2)
        else:
            self.register_buffer("shares", shares_2)

    def forward(  # type: ignore[override]
        self,
        x_BTD: Tensor,
        rotation: Rotation | None,
        bias_HTT: Tensor | None,
        first_BHTK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens after this block, and the values of the first block of this kind, which gets None."""
        own: list[Tensor] = []

        def mixed(k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
            # Before they are mixed: later blocks add the first values as they are.
            own.append(v_BHTK)
            if first_BHTK is None or self.shares is None:
                return v_BHTK
            shares_2 = self.shares.to(v_BHTK.dtype)
            return shares_2[0] * first_BHTK + shares_2[1] * v_BHTK

        y_BTD = self.attn(self.norm1(x_BTD), rotation, bias_HTT, mixed)
        x_BTD = x_BTD + self.drop_path1(self.ls1(y_BTD))
        x_BTD = x_BTD + self._mlp_branch(x_BTD)
        return x_BTD, own[0] if first_BHTK is None else first_BHTK
