"""The block of the ViT paper.

B images, T tokens, D width.
"""

from __future__ import annotations

from torch import Tensor

from vitlab.components.attention import Rotation
from vitlab.components.block.contract import Block, block


@block.register("prenorm")
class PreNorm(Block):
    """Attention, then an MLP, each on normalised tokens and added to its input.

    Reference: arXiv:2010.11929, figure 1; arXiv:2002.04745.
    """

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Apply attention and MLP, each normalised before and added to its input."""
        x_BTD = x_BTD + self.drop_path1(self.ls1(self.attn(self.norm1(x_BTD), rotation, bias_HTT)))
        x_BTD = x_BTD + self.drop_path2(self.ls2(self.mlp(self.norm2(x_BTD))))
        return x_BTD
