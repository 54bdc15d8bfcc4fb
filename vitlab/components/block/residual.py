"""Blocks that add branches to the tokens: norms before or after the branches, and branches side by side.

B images, T tokens, D width.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from vitlab.components.base import DropPath, Rotation
from vitlab.components.block import Block, Place, Role, block, build_layer_scale


@block.register("prenorm")
class PreNorm(Block):
    """Attention, then an MLP, each on normalised tokens and added to its input.

    Reference: arXiv:2010.11929, figure 1; arXiv:2002.04745.
    """

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.drop_path1(self.ls1(self.attn(self.norm1(x_BTD), rotation, bias_HTT)))
        return x_BTD + self._mlp_branch(x_BTD)


@block.register("postnorm")
class PostNorm(Block):
    """Attention, then an MLP, with a norm after each sum.  Reference: arXiv:1706.03762.

    Nothing passes around the norms, so deep models need a warmup of the learning rate (arXiv:2002.04745).  The tokens
    leave the last block normalised; ``final_norm: none`` is the original's.
    """

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        x_BTD = self.norm1(x_BTD + self.drop_path1(self.ls1(self.attn(x_BTD, rotation, bias_HTT))))
        return self.norm2(x_BTD + self.drop_path2(self.ls2(self.mlp(x_BTD))))


@block.register("respostnorm")
class ResPostNorm(Block):
    """Attention, then an MLP, with a norm at the end of each branch, before the sum.  Reference: arXiv:2111.09883.

    timm's ``ResPostBlock``.  Its ``init_values`` are the start of the norms' scales; here ``layer_scale`` is a factor
    after the norm.
    """

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.drop_path1(self.ls1(self.norm1(self.attn(x_BTD, rotation, bias_HTT))))
        return x_BTD + self.drop_path2(self.ls2(self.norm2(self.mlp(x_BTD))))


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
        y_BTD = self.post_norm1(self.attn(self.norm1(x_BTD), rotation, bias_HTT))
        x_BTD = x_BTD + self.drop_path1(self.ls1(y_BTD))
        y_BTD = self.post_norm2(self.mlp(self.norm2(x_BTD)))
        return x_BTD + self.drop_path2(self.ls2(y_BTD))


@block.register("parallel")
class Parallel(Block):
    """Attention and MLP of the same normalised tokens, added together.  Reference: arXiv:2302.05442 (ViT-22B).

    timm's ``ParallelScalingBlock``, which keeps the first matrices of both in one: ``in_norm`` is ``norm1`` here, the
    rows of ``in_proj`` are the rows of ``mlp.fc1`` and ``attn.qkv``, ``attn_out_proj`` and ``mlp_out_proj`` are
    ``attn.proj`` and ``mlp.fc2``, and ``ls`` is ``ls1``.
    """

    parts: Mapping[str, Role] = {"norm1": "norm", "attn": "attention", "mlp": "mlp"}
    branches = 1

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        y_BTD = self.norm1(x_BTD)
        return x_BTD + self.drop_path1(self.ls1(self.attn(y_BTD, rotation, bias_HTT) + self.mlp(y_BTD)))


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
        self.attns: Any = nn.ModuleList(_build_branch_end(place) for _ in range(number))
        self.ffns: Any = nn.ModuleList(_build_branch_end(place) for _ in range(number))
        self.parts = {path.replace("0", str(i)): role for i in range(number) for path, role in type(self).parts.items()}

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        x_BTD = x_BTD + sum(
            each.drop_path(each.ls(each.attn(each.norm(x_BTD), rotation, bias_HTT))) for each in self.attns
        )
        return x_BTD + sum(each.drop_path(each.ls(each.mlp(each.norm(x_BTD)))) for each in self.ffns)


def _build_branch_end(place: Place) -> nn.Module:
    """Return the end of a branch, to which the model adds its norm and its attention or MLP."""
    return nn.ModuleDict({"ls": build_layer_scale(place), "drop_path": DropPath(place.drop_path)})
