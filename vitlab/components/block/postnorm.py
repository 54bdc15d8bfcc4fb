"""Blocks with norms after attention and MLP.

B images, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vitlab.components.attention import Rotation
from vitlab.components.block.contract import Block, Role, block


@block.register("postnorm")
class PostNorm(Block):
    """Attention, then an MLP, with a norm after each sum.  Reference: arXiv:1706.03762.

    Nothing passes around the norms, so deep models need a warmup of the learning rate (arXiv:2002.04745).  The tokens
    leave the last block normalised; ``final_norm: none`` is the original's.
    """

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Apply attention and MLP, each added to its input and normalised after."""
        x_BTD = self.norm1(x_BTD + self.drop_path1(self.ls1(self.attn(x_BTD, rotation, bias_HTT))))
        x_BTD = self.norm2(x_BTD + self.drop_path2(self.ls2(self.mlp(x_BTD))))
        return x_BTD


@block.register("respostnorm")
class ResPostNorm(Block):
    """Attention, then an MLP, with a norm at the end of each branch, before the sum.  Reference: arXiv:2111.09883.

    timm's ``ResPostBlock``.  Its ``init_values`` are the start of the norms' scales; here ``layer_scale`` is a factor
    after the norm.
    """

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Apply attention and MLP, each normalised after and added to its input."""
        x_BTD = x_BTD + self.drop_path1(self.ls1(self.norm1(self.attn(x_BTD, rotation, bias_HTT))))
        x_BTD = x_BTD + self.drop_path2(self.ls2(self.norm2(self.mlp(x_BTD))))
        return x_BTD


@block.register("sandwich")
class Sandwich(Block):
    """Attention, then an MLP, with a norm before and after each, inside of its branch.  Reference: arXiv:2105.13290."""

    parts: Mapping[str, Role] = {
        "norm1": "norm",
        "attn": "attention",
        "post_norm1": "norm",
        "norm2": "norm",
        "mlp": "mlp",
        "post_norm2": "norm",
    }
    post_norm1: nn.Module
    post_norm2: nn.Module

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Apply attention and MLP, each normalised before and after and added to its input."""
        y_BTD = self.post_norm1(self.attn(self.norm1(x_BTD), rotation, bias_HTT))
        x_BTD = x_BTD + self.drop_path1(self.ls1(y_BTD))
        y_BTD = self.post_norm2(self.mlp(self.norm2(x_BTD)))
        x_BTD = x_BTD + self.drop_path2(self.ls2(y_BTD))
        return x_BTD
