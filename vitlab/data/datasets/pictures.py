"""Picture files and the masks beside them, decoded to one size.

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
"""``crop`` resizes until both sides are covered and cuts out the middle, ``squash`` ignores proportions."""

Decoded = Literal["auto", "memory", "disk", "never"]
"""Where decoded pictures are kept; see :func:`vitlab.data.image_cache.place`.  No number of a trial depends on it."""

Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Pictures:
    """One official split as pictures in their files, each of which can be read by itself."""

    paths: Sequence[str]
    y_N: Tensor  #: int64, class indices
    size: Pair
    fit: Fit
    decoded: Decoded = "auto"

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Tensor:
        """uint8 (3, H, W): as :func:`decode`."""
        return decode(Path(self.paths[index]), self.size, self.fit)

    def sides(self, index: int) -> Pair:
        """Rows and columns of a picture, by its header alone."""
        from PIL import Image

        path = Path(self.paths[index])
        with _reading(path), Image.open(path) as picture:
            return picture.height, picture.width

    def cut(self, index: int, corners: Sequence[int], size: Pair, how: Interpolation) -> Tensor:
        """uint8 (3, H, W): a rectangle of a picture, brought to ``size`` by antialiased interpolation.

        Args:
            index: of the picture.
            corners: top, left, height and width of the rectangle.
            size: rows and columns wanted.
            how: they are interpolated.
        """
        import numpy as np
        from PIL import Image

        top, left, height, width = corners
        picture = _opened(Path(self.paths[index]), "RGB").crop((left, top, left + width, top + height))
        resampling = Image.Resampling.BILINEAR if how == "bilinear" else Image.Resampling.BICUBIC
        return torch.from_numpy(np.array(picture.resize((size[1], size[0]), resampling))).permute(2, 0, 1)


def decode(path: Path, size: Pair, fit: Fit) -> Tensor:
    """uint8 (3, H, W): a picture in RGB, brought to ``size`` by antialiased bilinear interpolation.

    Raises:
        DataError: if it cannot be read.
    """
    return _small(_opened(path, "RGB"), size, fit)


def decode_with_mask(path: Path, mask: Path, size: Pair, fit: Fit) -> tuple[Tensor, Tensor]:
    """A picture as of :func:`decode`, and uint8 (H, W): the levels of its mask, resized by nearest neighbour.

    A mask is a picture of one level a pixel; of one with a palette, as Pascal VOC's, the levels are the palette's
    indices.

    Raises:
        DataError: if either cannot be read, or the two are not of one size.
    """
    import numpy as np
    from PIL import Image

    levels = _opened(mask, None)
    if levels.mode not in ("P", "L"):
        raise DataError(f"{mask} has no single level at each pixel: Pillow reads it as {levels.mode}, not as P or L")
    picture = _opened(path, "RGB")
    if levels.size != picture.size:
        found = " and ".join("{1} by {0}".format(*image.size) for image in (picture, levels))
        raise DataError(f"{path} and its mask {mask} are not of one size: {found} pixels")
    small = levels.resize((size[1], size[0]), Image.Resampling.NEAREST, box=_box(levels, size, fit))
    return _small(picture, size, fit), torch.from_numpy(np.array(small))


def check_memory(needed: int, what: str) -> None:
    """Refuse pictures that would not fit into memory.

    Raises:
        DataError: with both numbers.
    """
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.8 * available:
        raise DataError(
            f"{what} need {needed / 2**30:.1f} GiB decoded, and this machine has {available / 2**30:.1f} GiB of "
            "memory; a smaller 'image_size' would fit"
        )


def _opened(path: Path, mode: str | None) -> Image:
    """The picture, converted where a mode is named."""
    from PIL import Image

    with _reading(path), Image.open(path) as picture:
        if mode is not None:
            return picture.convert(mode)
        picture.load()
        return picture


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file, in one sentence that names it."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path} was here when its folder was listed, and is gone") from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} is not a picture that can be read: {error}") from None


def _small(picture: Image, size: Pair, fit: Fit) -> Tensor:
    import numpy as np
    from PIL import Image

    small = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=_box(picture, size, fit))
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def _box(image: Image, size: Pair, fit: Fit) -> tuple[float, float, float, float] | None:
    """The part of a picture that is shown: left, upper, right, lower; None for all of it."""
    if fit == "squash":
        return None
    height, width = size
    scale = min(image.width / width, image.height / height)
    left, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
    return left, top, left + width * scale, top + height * scale
