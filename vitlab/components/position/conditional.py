"""Encodings computed from the tokens.

B images, T tokens, P prefix tokens, N patches, D width, R and C rows and columns of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from vitlab.components.position.contract import Position, position
from vitlab.errors import OptionError
from vitlab.geometry import Geometry


@position.register("conditional")
class Conditional(Position):
    """A depthwise convolution over the grid of patches, added after the first block.

    Zero padding makes the distance to the border visible.  Prefix tokens are unchanged.

    Reference: arXiv:2102.10882 (CPVT, its position encoding generator).

    Args:
        kernel_size: side of the kernel in patches, an odd number.
    """

    def __init__(self, g: Geometry, *, kernel_size: Annotated[int, Field(ge=1)] = 3) -> None:
        super().__init__()
        if reason := self.incompatibility(g, {"kernel_size": kernel_size}):
            raise OptionError([(("kernel_size",), reason)])
        self.prefix = len(g.prefix)
        self.grid = g.grid
        self.proj = nn.Conv2d(g.dim, g.dim, kernel_size, padding=kernel_size // 2, groups=g.dim)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Mapping[str, Any]) -> str | None:
        """Refuse an even kernel, which has no centre."""
        kernel_size = options.get("kernel_size", 3)
        if kernel_size % 2 == 0:
            return f"position 'conditional' centres its kernel on each patch, and kernel_size {kernel_size} is even"
        return None

    def no_weight_decay(self) -> frozenset[str]:
        """Exempt the kernel."""
        return frozenset({"proj.weight"})

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Add a depthwise convolution over the patches after the first block."""
        if layer != 1:
            return x_BTD
        prefix_BPD, patches_BND = x_BTD[:, : self.prefix], x_BTD[:, self.prefix :]
        map_BDRC = patches_BND.transpose(1, 2).reshape(-1, patches_BND.shape[2], *self.grid)
        return torch.cat([prefix_BPD, patches_BND + self.proj(map_BDRC).flatten(2).transpose(1, 2)], 1)
