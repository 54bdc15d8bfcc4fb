"""Encoded pictures, such as JPEG files, that are decoded one by one to one size, and their masks.

H rows, W columns.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import sys
from abc import ABC, abstractmethod
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

Orient = Literal["exif", "ignore"]
"""``exif`` turns a photograph upright as its EXIF orientation says, as viewers do; ``ignore`` leaves it as stored."""

ORIENTATION = 0x0112
"""EXIF tag; 5 to 8 exchange rows and columns."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a picture becomes an image of one size: 8-bit RGB, resized with antialiasing, and cropped in the centre.

    ``fit: crop`` equals torchvision's ``Resize(floor(size / crop_pct))`` and ``CenterCrop(size)``, and timm's transform
    for evaluation, to the bit.  The first frame of an animation or of a file of several pages is the picture.  16 bits
    become 8 by their high byte (65,535 becomes 255), as in torchvision.
    """

    size: Pair  #: rows and columns of the image
    fit: Fit = "crop"
    crop_pct: float = 1.0  #: share of the resized picture's side that the crop keeps
    interpolation: Interpolation = "bilinear"  #: of the resize
    orient: Orient = "exif"

    def __call__(self, picture: Image) -> Tensor:
        """Return a picture as an image, uint8 (3, H, W).

        Raises:
            ValueError: if the range of its values is unknown, as of floats.
        """
        return _to_tensor(self.shape(self.rgb(picture), self.interpolation))

    def rgb(self, picture: Image) -> Image:
        """Return a picture upright, in 8-bit RGB."""
        import numpy as np
        from PIL import Image, ImageOps

        picture.load()
        bits, kind = picture.mode, picture.format
        if self.orient == "exif":
            ImageOps.exif_transpose(picture, in_place=True)
        if bits.startswith("I;16") or (bits == "I" and kind in ("PNG", "PPM")):
            picture = Image.fromarray((np.asarray(picture).astype(np.int32) >> 8).astype(np.uint8))
        elif bits in ("I", "F"):
            what = "floats" if bits == "F" else "integers of 32 bits"
            raise ValueError(f"its values are {what}, whose range is unknown; save it with 8 or 16 bits")
        return picture.convert("RGB")

    def sides(self, picture: Image) -> Pair:
        """Return rows and columns of an upright picture, from its header."""
        # The header is enough: decoding all pictures of a batch to learn their sizes would double the work.
        is_turned = self.orient == "exif" and picture.format != "TIFF"  # Pillow itself turns a TIFF
        if is_turned and picture.getexif().get(ORIENTATION, 1) >= 5:
            return picture.width, picture.height
        return picture.height, picture.width

    def shape(self, picture: Image, interpolation: Interpolation | Literal["nearest"]) -> Image:
        """Return a picture or a mask resized and cropped to ``size``."""
        from PIL import Image

        height, width = self.size
        whole = self._resized((picture.height, picture.width))
        if whole != (picture.height, picture.width):
            picture = picture.resize(whole[::-1], Image.Resampling[interpolation.upper()])
        if whole == self.size:
            return picture
        # torchvision's rounding: halves to even
        top, left = round((whole[0] - height) / 2), round((whole[1] - width) / 2)
        return picture.crop((left, top, left + width, top + height))

    def _resized(self, sides: Pair) -> Pair:
        """Return rows and columns of a picture after the resize, before the crop."""
        height, width = (math.floor(side / self.crop_pct) for side in self.size)
        if self.fit == "squash":
            return height, width
        rows, columns = sides
        if height != width:  # timm's rule for images that are not square
            ratio = min(rows / height, columns / width)
            return round(rows / ratio), round(columns / ratio)
        return (height, int(width * columns / rows)) if rows <= columns else (int(height * rows / columns), width)


class Pictures(ABC):
    """Pictures of a split that are read one by one."""

    y_N: Tensor  #: int64, class indices; uint8 (N, K) with 1 for each class of a picture that has several
    decoded: Decoded = "auto"

    def __len__(self) -> int:
        return len(self.y_N)

    @abstractmethod
    def image(self, index: int) -> Tensor:
        """Return a picture as an image of the data set's size, uint8 (C, H, W).  Must be thread-safe."""


class EncodedPictures(Pictures):
    """Base of pictures in any container: files, a Parquet column, members of a tar archive, rows of a database.

    A subclass defines :meth:`open`; decoding, crops of full-size pictures (``random_resized_crop`` with ``of:
    picture``), caches and the check of all pictures before a study starts are the same for every container.

    Args:
        names: of the pictures, for error messages.
        y_N: int64, class indices; uint8 (N, K) with 1 for each class of a picture that has several.
        decoding: how a picture becomes an image.
        decoded: place for decoded pictures.
    """

    def __init__(self, names: Sequence[str], y_N: Tensor, decoding: Decoding, decoded: Decoded = "auto") -> None:
        self.names = names
        self.y_N = y_N
        self.decoding = decoding
        self.decoded: Decoded = decoded

    @abstractmethod
    def open(self, index: int) -> bytes:
        """Return an encoded picture, such as the content of a JPEG file.  Must be thread-safe."""

    def checksum(self, index: int) -> tuple[int, str]:
        """Return the number of bytes of an encoded picture, and their MD5 in hex."""
        content = self.open(index)
        # Systems that forbid MD5 for security allow it for checksums, if told so.
        return len(content), hashlib.md5(content, usedforsecurity=False).hexdigest()

    def image(self, index: int) -> Tensor:
        """Return a picture decoded by :class:`Decoding`, uint8 (3, H, W)."""
        with reading(self.names[index]):
            return self.decoding(self.header(index))

    def header(self, index: int) -> Image:
        """Return a picture of which Pillow has read the header alone; its content is decoded on demand."""
        from PIL import Image

        with reading(self.names[index]):
            return Image.open(io.BytesIO(self.open(index)))

    def crop(self, index: int, header: Image, box: Sequence[int], size: Pair, how: Interpolation) -> Tensor:
        """Return a rectangle of a picture, resized to ``size`` with antialiasing, uint8 (3, H, W).

        Args:
            index: of the picture.
            header: the picture as returned by :meth:`header`.
            box: top, left, height and width of the rectangle in the upright picture.
            size: rows and columns of the result.
            how: interpolation of the resize.
        """
        from PIL import Image

        top, left, height, width = box
        with reading(self.names[index]):
            picture = self.decoding.rgb(header).crop((left, top, left + width, top + height))
        return _to_tensor(picture.resize(size[::-1], Image.Resampling[how.upper()]))

    def fault(self, index: int) -> str:
        """Return why a picture cannot be decoded; empty if it can.

        A JPEG is decoded at an eighth of its size, which reads the whole file in a third of the time.
        """
        from PIL import Image

        try:
            picture = Image.open(io.BytesIO(self.open(index)))
            picture.draft("RGB", (1, 1))  # decodes a JPEG at an eighth of its size
            self.decoding.rgb(picture)
        except Exception as error:  # decoders of some formats raise errors of their own
            return _reason(error)
        return ""


class Selection(EncodedPictures):
    """Some pictures of a container, such as one split.

    Args:
        pictures: of the container.
        row_N: int64, their indices in it.
    """

    def __init__(self, pictures: EncodedPictures, row_N: Tensor) -> None:
        self._pictures = pictures
        self._rows = row_N.tolist()
        names = [pictures.names[row] for row in self._rows]
        super().__init__(names, pictures.y_N[row_N], pictures.decoding, pictures.decoded)

    def open(self, index: int) -> bytes:
        """Return a picture of the container."""
        return self._pictures.open(self._rows[index])


def decode_with_mask(path: Path, mask: Path, decoding: Decoding) -> tuple[Tensor, Tensor]:
    """Return a picture as an image, uint8 (3, H, W), and the levels of its mask, resized by nearest neighbour.

    A mask has one level per pixel, uint8 (H, W); with a palette, as in Pascal VOC, the levels are palette indices.

    Raises:
        DataError: if either cannot be read, or their sizes differ.
    """
    import numpy as np
    from PIL import Image

    with reading(mask), Image.open(mask) as levels:
        levels.load()
    if levels.mode not in ("P", "L"):
        raise DataError(f"{mask} is not a label mask: Pillow reads it as mode {levels.mode}; save it as mode P or L")
    with reading(path), Image.open(path) as picture:
        rgb = decoding.rgb(picture)
    if levels.size != rgb.size:
        sizes = " and ".join("{1} by {0}".format(*image.size) for image in (rgb, levels))
        raise DataError(f"{path} and its mask {mask} differ in size: {sizes} pixels; make them equal")
    small = decoding.shape(levels, "nearest")
    return _to_tensor(decoding.shape(rgb, decoding.interpolation)), torch.from_numpy(np.array(small))


def memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, or of its container if that has less; no limit if it is unknown."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return min(machine, int((root / name).read_text()))
        except (OSError, ValueError):
            continue
    return machine


def check_memory(required: int, what: str) -> None:
    """Check that decoded pictures fit into memory.

    Args:
        required: bytes.
        what: the pictures, for the error message.

    Raises:
        DataError: if they need more than 80 % of the machine's memory.
    """
    available = memory()
    if required > 0.8 * available:
        raise DataError(
            f"{what} needs {required / 2**30:.1f} GiB decoded, and this machine has {available / 2**30:.1f} GiB of "
            "memory; set a smaller 'image_size'"
        )


@contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Raise a DataError that names the picture for any error in reading it."""
    from PIL import Image

    try:
        yield
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{name} cannot be read as a picture: {_reason(error)}; replace or delete it") from None


def _reason(error: Exception) -> str:
    """Return Pillow's reason without the object that it read from."""
    return str(error).replace(" <_io.BytesIO object", "\0").partition("\0")[0] or type(error).__name__


def _to_tensor(picture: Image) -> Tensor:
    """Return an RGB picture as a tensor, uint8 (3, H, W)."""
    import numpy as np

    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
