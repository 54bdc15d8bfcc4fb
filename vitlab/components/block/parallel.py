"""Blocks with attention and MLP side by side.

B images, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from vitlab.components.attention import Rotation
from vitlab.components.base import DropPath
from vitlab.components.block.contract import Block, Place, Role, block, layer_scale


@block.register("parallel")
class Parallel(Block):
    """Attention and MLP of the same normalised tokens, added together.  Reference: arXiv:2302.05442 (ViT-22B).

    timm's ``ParallelScalingBlock``, which keeps the first matrices of both in one: ``in_norm`` is ``norm1`` here, the
    rows of ``in_proj`` are those of ``mlp.fc1`` and ``attn.qkv``, ``attn_out_proj`` and ``mlp_out_proj`` are
    ``attn.proj`` and ``mlp.fc2``, and ``ls`` is ``ls1``.
    """

    parts: Mapping[str, Role] = {"norm1": "norm", "attn": "attention", "mlp": "mlp"}
    branches = 1

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Add attention and MLP of the normalised tokens to the tokens."""
        y_BTD = self.norm1(x_BTD)
        y_BTD = self.attn(y_BTD, rotation, bias_HTT) + self.mlp(y_BTD)
        x_BTD = x_BTD + self.drop_path1(self.ls1(y_BTD))
        return x_BTD


@block.register("parallel_things")
class ParallelThings(Block):
    """Several attentions side by side, then several MLPs, each branch with its own norm.  Reference: arXiv:2203.09795.

    timm's ``ParallelThingsBlock``, under its names.  ``{depth: 6, block: {type: parallel_things, number: 2}}`` has the
    parameters and the work of 12 pre-norm blocks.

    Args:
        number: attentions, and MLPs, of a block.
    """

    parts: Mapping[str, Role] = {
        "attns.0.norm": "norm",
        "attns.0.attn": "attention",
        "ffns.0.norm": "norm",
        "ffns.0.mlp": "mlp",
    }
    branches = 0

    def __init__(self, place: Place, *, number: Annotated[int, Field(gt=0, le=100)] = 2) -> None:
        super().__init__(place)
        self.attns = nn.ModuleList(_branch(place) for _ in range(number))
        self.ffns = nn.ModuleList(_branch(place) for _ in range(number))
        self.parts = {path.replace("0", str(i)): role for i in range(number) for path, role in type(self).parts.items()}

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Add all attentions of the normalised tokens to the tokens, then all MLPs."""
        attns: list[Any] = [*self.attns]
        x_BTD = x_BTD + sum(each.drop_path(each.ls(each.attn(each.norm(x_BTD), rotation, bias_HTT))) for each in attns)
        ffns: list[Any] = [*self.ffns]
        x_BTD = x_BTD + sum(each.drop_path(each.ls(each.mlp(each.norm(x_BTD)))) for each in ffns)
        return x_BTD


def _branch(place: Place) -> nn.Module:
    """Return the end of a branch, to which the model adds its norm and its attention or MLP."""
    return nn.ModuleDict({"ls": layer_scale(place), "drop_path": DropPath(place.drop_path)})
