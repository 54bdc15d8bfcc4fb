"""Geometry: the sizes of a Vision Transformer, derived once and handed to every component.

Nobody below the model sees ``patch_size``: components see the grid and the tokens it leads to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitlab.errors import GeometryError

Pair = tuple[int, int]
"""Height and width."""

Task = Literal["classification", "segmentation"]
"""What a label is of: of an image, or of each of its pixels."""

LARGEST_LISTED = 4096  #: divisors up to here are listed; a size with a digit too many is not searched to its end


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that components share.

    Tokens are ordered as in timm: class token, distillation token, registers, then the patches row by row.
    """

    image: Pair  #: pixels, height and width
    channels: int
    patch: Pair  #: pixels (of the map the patch embedding sees) per patch
    grid: Pair  #: patches, rows and columns
    prefix: tuple[str, ...]  #: names of the tokens that stand before the patches, in order
    dim: int
    depth: int
    heads: int
    classes: int  #: outputs per prediction

    @classmethod
    def of(
        cls,
        *,
        image: Pair,
        channels: int,
        patch: Pair,
        reduction: int,
        prefix: tuple[str, ...],
        dim: int,
        depth: int,
        heads: int,
        classes: int,
    ) -> Geometry:
        """Divide once, and explain what does not divide.

        ``reduction`` is the stride of whatever stands before the patches (a convolutional stem), 1 for none.

        Raises:
            GeometryError: naming the option to change and the nearest values that would do.
        """
        for axis, pixels, side in zip(("height", "width"), image, patch, strict=True):
            step = side * reduction
            if pixels % step:
                stem = f" (after a stem of stride {reduction})" if reduction > 1 else ""
                raise GeometryError(
                    "patch_size",
                    f"image {axis} {pixels} is not a multiple of patch_size {side}{stem}; "
                    f"the last {pixels % step} pixels would be dropped. "
                    f"Sizes that divide it: {_divisors(pixels, reduction)}.",
                )
        if dim % heads:
            raise GeometryError(
                "heads",
                f"dim {dim} is not a multiple of heads {heads}, so head_dim would not be whole. "
                f"Heads that divide it: {_divisors(dim)}.",
            )
        grid = (image[0] // (patch[0] * reduction), image[1] // (patch[1] * reduction))
        return cls(
            image=image,
            channels=channels,
            patch=patch,
            grid=grid,
            prefix=prefix,
            dim=dim,
            depth=depth,
            heads=heads,
            classes=classes,
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def patches(self) -> int:
        """Number of patch tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Number of all tokens: the prefix, then the patches."""
        return len(self.prefix) + self.patches


class Work(NamedTuple):
    """What decides which engine trains a model faster, counted for one image."""

    values: int  #: numbers handed from layer to layer
    products: int | None = None
    """Products that a head of attention forms of queries and keys; None where :mod:`vitlab.models.innermost` knows
    another attention only."""


def _divisors(n: int, of: int = 1) -> str:
    divisors = [d for d in range(1, min(n // of, LARGEST_LISTED) + 1) if n % (d * of) == 0]
    return ", ".join(map(str, divisors)) or "none"


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """What a model needs to know of its data, known without reading any of it."""

    image: Pair  #: pixels, height and width, as the model sees them
    channels: int
    classes: int
    task: Task = "classification"
    identity: str | None = None  #: checksum or manifest digest of the content; None while the data is not here
    labels: tuple[str, ...] = ()  #: names of the classes, where they are known
