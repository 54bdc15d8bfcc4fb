"""Picture files and their masks, decoded to one size.

H rows, W columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vitlab.errors import DataError
from vitlab.geometry import Pair

if TYPE_CHECKING:
    from PIL.Image import Image

Fit = Literal["crop", "squash"]
"""``crop`` resizes to cover both sides and crops the centre, ``squash`` ignores proportions."""

Decoded = Literal["auto", "memory", "disk", "never"]
"""Place for decoded pictures, see :func:`vitlab.data.image_cache.place`; it does not change a trial's results."""

Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Pictures:
    """One official split as picture files that are read one by one."""

    paths: Sequence[str]
    y_N: Tensor  #: int64, class indices
    size: Pair
    fit: Fit
    decoded: Decoded = "auto"

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Tensor:
        """Return a picture decoded by :func:`decode`, uint8 (3, H, W)."""
        return decode(Path(self.paths[index]), self.size, self.fit)

    def sides(self, index: int) -> Pair:
        """Return rows and columns of a picture, read from its header."""
        from PIL import Image

        path = Path(self.paths[index])
        with _reading(path), Image.open(path) as picture:
            return picture.height, picture.width

    def crop(self, index: int, box: Sequence[int], size: Pair, interpolation: Interpolation) -> Tensor:
        """Return a rectangle of a picture, resized to ``size`` with antialiasing, uint8 (3, H, W).

        Args:
            index: of the picture.
            box: top, left, height and width of the rectangle.
            size: rows and columns of the result.
            interpolation: of the resize.
        """
        import numpy as np
        from PIL import Image

        top, left, height, width = box
        picture = _load(Path(self.paths[index]), "RGB").crop((left, top, left + width, top + height))
        resampling = Image.Resampling.BILINEAR if interpolation == "bilinear" else Image.Resampling.BICUBIC
        return torch.from_numpy(np.array(picture.resize((size[1], size[0]), resampling))).permute(2, 0, 1)


def decode(path: Path, size: Pair, fit: Fit) -> Tensor:
    """Read a picture file as RGB, cropped or squashed to ``size`` by antialiased bilinear interpolation.

    Returns:
        uint8 (3, H, W)


    Raises:
        DataError: if it cannot be read.
    """
    return _resize(_load(path, "RGB"), size, fit)


def decode_with_mask(path: Path, mask: Path, size: Pair, fit: Fit) -> tuple[Tensor, Tensor]:
    """Return a picture decoded by :func:`decode`, and the levels of its mask, resized by nearest neighbour.

    A mask has one level per pixel, uint8 (H, W); with a palette, as in Pascal VOC, the levels are palette indices.

    Raises:
        DataError: if either cannot be read, or their sizes differ.
    """
    import numpy as np
    from PIL import Image

    levels = _load(mask, None)
    if levels.mode not in ("P", "L"):
        raise DataError(f"{mask} is not a label mask: Pillow reads it as mode {levels.mode}; save it as mode P or L")
    picture = _load(path, "RGB")
    if levels.size != picture.size:
        sizes = " and ".join("{1} by {0}".format(*image.size) for image in (picture, levels))
        raise DataError(f"{path} and its mask {mask} differ in size: {sizes} pixels; make them equal")
    small = levels.resize((size[1], size[0]), Image.Resampling.NEAREST, box=_box(levels, size, fit))
    return _resize(picture, size, fit), torch.from_numpy(np.array(small))


def check_memory(required: int, what: str) -> None:
    """Check that decoded pictures fit into memory.

    Args:
        required: bytes.
        what: the pictures, for the error message.

    Raises:
        DataError: if they need more than 80 % of the machine's memory.
    """
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if required > 0.8 * available:
        raise DataError(
            f"{what} need {required / 2**30:.1f} GiB decoded, and this machine has {available / 2**30:.1f} GiB of "
            "memory; set a smaller 'image_size'"
        )


def _load(path: Path, mode: str | None) -> Image:
    """Load a picture, converted to ``mode`` unless that is None."""
    from PIL import Image

    with _reading(path), Image.open(path) as picture:
        if mode is not None:
            return picture.convert(mode)
        picture.load()
        return picture


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise a DataError that names the file for any error in reading it."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path} was deleted after its folder was listed; run again") from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} cannot be read as a picture: {error}; replace or delete it") from None


def _resize(picture: Image, size: Pair, fit: Fit) -> Tensor:
    """Return a picture resized to ``size``, uint8 (3, H, W)."""
    import numpy as np
    from PIL import Image

    small = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=_box(picture, size, fit))
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def _box(image: Image, size: Pair, fit: Fit) -> tuple[float, float, float, float] | None:
    """Return the visible part of a picture as left, upper, right, lower; None for all of it."""
    if fit == "squash":
        return None
    height, width = size
    scale = min(image.width / width, image.height / height)
    left, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
    return left, top, left + width * scale, top + height * scale
