"""Geometry: the sizes of a Vision Transformer, derived once and passed to every component.

Components do not see ``patch_size``, which only the model has; they see the grid and the number of tokens.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from vitlab.errors import Fault, GeometryError

Pair = tuple[int, int]
"""Height and width."""

Task = Literal["classification", "segmentation", "multilabel"]
"""Classification has a label for each image, segmentation one for each pixel, multilabel any number for each image."""

TASKS: tuple[Task, ...] = get_args(Task)

LARGEST_LISTED = 4096  #: largest divisor that error messages list, as a limit on the search


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of a Vision Transformer, shared by its components.

    Tokens are ordered as in timm: class token, distillation token, registers, then the patches row by row.
    """

    image: Pair  #: pixels, height and width
    channels: int
    patch: Pair  #: pixels per patch, of the input of the patch embedding
    reduction: int = 1  #: stride of a convolutional stem before the patches
    prefix: tuple[str, ...]  #: names of the tokens before the patches, in order
    dim: int
    depth: int
    heads: int
    classes: int  #: outputs per prediction

    def __post_init__(self) -> None:
        """Check that patches divide the image and heads divide the width.

        Raises:
            GeometryError: with every size that does not divide another, the option to change and values that do.
        """
        faults: list[Fault] = []
        axes = list(zip(("height", "width"), self.image, self.patch, strict=True))
        # Of a square, one sentence is enough.
        equal = axes[0][1:] == axes[1][1:]
        for axis, pixels, side in axes[:1] if equal else axes:
            step = side * self.reduction
            if pixels % step:
                stem = f" (after a stem of stride {self.reduction})" if self.reduction > 1 else ""
                sentence = (
                    f"image {axis} {pixels} is not a multiple of patch_size {side}{stem}; "
                    f"the last {pixels % step} pixels would be dropped. "
                    f"Sizes that divide it: {_list_divisors(pixels, self.reduction)}."
                )
                faults.append((("patch_size", "patch"), sentence))
        if self.dim % self.heads:
            sentence = (
                f"dim {self.dim} is not a multiple of heads {self.heads}, so head_dim would not be whole. "
                f"Heads that divide it: {_list_divisors(self.dim)}."
            )
            faults.append((("heads", "dim", "size"), sentence))
        if faults:
            raise GeometryError(*faults)

    @property
    def grid(self) -> Pair:
        """Number of patches, rows and columns."""
        height, width = (pixels // (side * self.reduction) for pixels, side in zip(self.image, self.patch, strict=True))
        return height, width

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
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
    """The work of a model for one image, by which the engine is chosen."""

    values: int  #: numbers passed from layer to layer
    products: int | None = None
    """Query-key products of an attention head; None if the attention is not the plain one, or unknown."""


def _list_divisors(n: int, of: int = 1) -> str:
    divisors = [d for d in range(1, min(n // of, LARGEST_LISTED) + 1) if n % (d * of) == 0]
    return ", ".join(map(str, divisors)) or "none"


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """Properties of a data set, available without reading the data."""

    image: Pair  #: pixels, height and width, as the model sees them
    channels: int
    classes: int
    task: Task = "classification"
    identity: str | None = None  #: checksum or manifest digest of the content; None if it is not downloaded yet
    labels: tuple[str, ...] = ()  #: names of the classes, if they are known
    test_sets: str = ""
    """Digest of the test sets beside the test split, such as corrupted images, 32 hexadecimal digits; empty without
    any.  No other image depends on them."""

    @property
    def content(self) -> str | None:
        """The identity of all files, as keys, stores and reports contain it; None if they are not downloaded yet."""
        return f"{self.identity}+{self.test_sets}" if self.identity is not None and self.test_sets else self.identity


def image_identity(content: str) -> str:
    """Return the part of :attr:`DataInfo.content` that identifies the training and the test images."""
    return re.sub(r"\+[0-9a-f]{32}$", "", content)
