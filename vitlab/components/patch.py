"""Patch embeddings: from an image to patch tokens.

B images, C channels, H height and W width in pixels, N patches (row by row), D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from vitlab.components.base import Part
from vitlab.geometry import Geometry
from vitlab.slots import Pick, Slot, slot
from vitlab.spec import Choice


class PatchEmbedding(Part):
    """Turns an image into the tokens of its patches."""

    reduction: ClassVar[int] = 1
    """Stride of what stands before the patches; ``patch_size`` counts pixels of the map behind it."""

    @classmethod
    def reduction_of(cls, options: Mapping[str, Any]) -> int:
        """As ``reduction``, for these options."""
        return cls.reduction

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) to (B, N, D)."""
        raise NotImplementedError


patch = Slot("patch", PatchEmbedding)


@patch.register("linear")
class Linear(PatchEmbedding):
    """One linear map for all patches, as a convolution whose stride is its kernel.  Reference: arXiv:2010.11929."""

    def __init__(self, g: Geometry, *, bias: bool = True, norm: Annotated[Choice | str, Pick("norm")] = "none") -> None:
        """
        Args:
            g: the sizes.
            bias: whether the map has a bias.
            norm: normalisation of the tokens it makes.
        """
        super().__init__()
        self.proj = nn.Conv2d(g.channels, g.dim, kernel_size=g.patch, stride=g.patch, bias=bias)
        self.norm = slot("norm").build(norm, g.dim)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BND: Tensor = self.norm(self.proj(x_BCHW).flatten(2).transpose(1, 2))
        return x_BND
