"""Blocks with attention and MLP side by side.

B images, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from vitlab.components.attention import Rotation
from vitlab.components.block.contract import Block, Role, block


@block.register("parallel")
class Parallel(Block):
    """Attention and MLP of the same normalised tokens, added together.  Reference: arXiv:2302.05442 (ViT-22B).

    timm's ``ParallelScalingBlock``, which keeps the first matrices of both in one: ``in_norm`` is ``norm1`` here, the
    rows of ``in_proj`` are those of ``mlp.fc1`` and ``attn.qkv``, ``attn_out_proj`` and ``mlp_out_proj`` are
    ``attn.proj`` and ``mlp.fc2``, and ``ls`` is ``ls1``.
    """

    parts: ClassVar[Mapping[str, Role]] = {"norm1": "norm", "attn": "attention", "mlp": "mlp"}
    branches = 1

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Add attention and MLP of the normalised tokens to the tokens."""
        y_BTD = self.norm1(x_BTD)
        y_BTD = self.attn(y_BTD, rotation, bias_HTT) + self.mlp(y_BTD)
        x_BTD = x_BTD + self.drop_path1(self.ls1(y_BTD))
        return x_BTD
