"""Blocks: how attention and the MLP are normalised, and joined to the path around them; layer scale.

B images, T tokens, D width, H heads.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from vitlab.components.attention import Attention
from vitlab.components.base import DropPath, Part, Rotation
from vitlab.geometry import Geometry
from vitlab.registry import Slot

Role = Literal["norm", "attention", "mlp"]
"""The slot of a part that the model builds for a block; norms are built for ``g.dim`` channels."""

Passed = Literal["values", "merged"]
"""What a block passes on: the values (B, H, T, K) of an attention, or the tokens that were merged,
:class:`vitlab.components.block.token_merging.MergeState`."""


@dataclass(frozen=True)
class Place:
    """The place of a block in its model."""

    geometry: Geometry
    index: int = 0  #: of the block, from 0
    layer_scale: float | None = None  #: start of the layer scale of each branch; None without one
    drop_path: float = 0.0  #: probability with which a branch is dropped
    receives_values: bool = False  #: whether an earlier block passes its values on


class LayerScale(nn.Module):
    """A learned factor per channel at the end of a residual branch.  Reference: arXiv:2103.17239."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), start))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.gamma


class Block(Part):
    """Contract: ``Block(place, *, options)``; (B, T, D) to (B, T, D).

    A subclass declares its parts, which the model builds from the choices for this block and assigns, and defines
    ``forward``.  The constructor creates ``ls1`` and ``drop_path1``, ``ls2`` and ``drop_path2``, the end of each
    residual branch.
    """

    parts: Mapping[str, Role] = {"norm1": "norm", "attn": "attention", "norm2": "norm", "mlp": "mlp"}
    """Path to the slot of the part there.  Attentions, at least one, are called ``attn``: ``attn`` or ``x.0.attn``."""

    branches: ClassVar[int] = 2  #: number of residual branches

    plan_note: ClassVar[str] = ""
    """Sentence for the notes of every plan that uses the block."""

    passes: ClassVar[Passed | None] = None
    """What ``forward`` takes as a fourth argument from an earlier block of this kind, or None, and returns beside the
    tokens."""

    norm1: nn.Module
    attn: Attention
    ls1: nn.Module
    drop_path1: nn.Module
    norm2: nn.Module
    mlp: nn.Module
    ls2: nn.Module
    drop_path2: nn.Module

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.index = place.index
        for branch in range(1, self.branches + 1):
            # By name, so that checkpoints have timm's ls1, ls2.
            self.add_module(f"ls{branch}", build_layer_scale(place))
            self.add_module(f"drop_path{branch}", DropPath(place.drop_path))

    def add_part(self, path: str, part: nn.Module) -> None:
        """Add a part at its path."""
        parent, _, name = path.rpartition(".")
        self.get_submodule(parent).add_module(name, part)
        if isinstance(part, Attention):
            part.block_index = self.index

    def _mlp_branch(self, x_BTD: Tensor) -> Tensor:
        """Return the branch of the MLP on normalised tokens, BTD to BTD, which a block adds to them."""
        branch_BTD: Tensor = self.drop_path2(self.ls2(self.mlp(self.norm2(x_BTD))))
        return branch_BTD

    @abstractmethod
    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Return the tokens after this block, BTD to BTD."""


def build_layer_scale(place: Place) -> nn.Module:
    """Return the layer scale of a branch, or the identity without one."""
    return nn.Identity() if place.layer_scale is None else LayerScale(place.geometry.dim, place.layer_scale)


def _declaration_fault(component: type[Block]) -> str | None:
    attentions = [path for path, role in component.parts.items() if role == "attention"]
    if {path.rpartition(".")[2] for path in attentions} != {"attn"}:
        return f"its parts have the attentions {attentions}; declare at least one, each called attn"
    return None


block = Slot("block", Block, fault=_declaration_fault)  # type: ignore[type-abstract]  # a contract is not built
