"""Encoded pictures, such as JPEG files, decoded one by one to one size, and the base of data sets of them.

H rows, W columns of an image, N pictures of a data set, M of a split.
"""

# No postponed annotations: a subclass in another module, which does not have their names, could not resolve them.
import hashlib
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data import draws
from vitlab.data.datasets import files
from vitlab.data.datasets.base import Dataset, Size, Split
from vitlab.errors import DataError, format_count, list_some
from vitlab.geometry import DataInfo, Pair
from vitlab.registry import Unhashed
from vitlab.spec.choice import Fraction, Portion

if TYPE_CHECKING:
    from PIL.Image import Image

Fit = Literal["crop", "squash"]
"""``crop`` resizes to cover both sides and crops the centre, ``squash`` ignores proportions."""

Decoded = Literal["auto", "memory", "disk", "never"]
"""Place for decoded pictures, see :func:`vitlab.data.image_cache.choose_decoded_place`; it changes no trial's
results."""

Interpolation = Literal["bilinear", "bicubic"]

Orient = Literal["exif", "ignore"]
"""``exif`` turns a photograph upright as its EXIF orientation says, as viewers do; ``ignore`` leaves it as stored."""

ORIENTATION = 0x0112
"""EXIF tag; 5 to 8 exchange rows and columns."""

TRAIN, VAL, TEST = "train", "val", "test"

MAX_LISTED = 20  #: names or mistakes listed in a message

ADDED_BY_SYSTEMS = frozenset({"__macosx", "@eadir", "thumbs.db", "desktop.ini", "$recycle.bin", "lost+found"})
"""Names, in lower case, of entries that systems add; they are left out, as names that begin with a full stop."""

UNDECODABLE = frozenset({"EPS", "MPEG"})
"""Formats whose files Pillow recognises, but decodes only with other programs."""


@cache
def picture_suffixes() -> frozenset[str]:
    """Return the endings of files that Pillow decodes, such as ``.jpg``, in lower case."""
    from PIL import Image, ImageFile

    Image.init()
    formats = {
        name
        for name, (factory, _) in Image.OPEN.items()
        if not (isinstance(factory, type) and issubclass(factory, ImageFile.StubImageFile))
    } - UNDECODABLE
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


def is_hidden(name: str) -> bool:
    """Return whether an entry is hidden, or added by a system."""
    return name.startswith(".") or name.lower() in ADDED_BY_SYSTEMS


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

    def __call__(self, picture: "Image") -> Tensor:
        """Return a picture as an image, uint8 (3, H, W).

        Raises:
            ValueError: if the range of its values is unknown, as of floats.
        """
        return to_tensor(self.resize_and_crop(self.to_upright_rgb(picture), self.interpolation))

    def to_upright_rgb(self, picture: "Image") -> "Image":
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

    def upright_sides(self, picture: "Image") -> Pair:
        """Return rows and columns of an upright picture, from its header."""
        # The header is enough: decoding all pictures of a batch to learn their sizes would double the work.
        is_turned = self.orient == "exif" and picture.format != "TIFF"  # Pillow itself turns a TIFF
        if is_turned and picture.getexif().get(ORIENTATION, 1) >= 5:
            return picture.width, picture.height
        return picture.height, picture.width

    def resize_and_crop(self, picture: "Image", interpolation: Interpolation | Literal["nearest"]) -> "Image":
        """Return a picture or a mask resized and cropped to ``size``."""
        from PIL import Image

        height, width = self.size
        whole = self._resized_sides((picture.height, picture.width))
        if whole != (picture.height, picture.width):
            picture = picture.resize(whole[::-1], Image.Resampling[interpolation.upper()])
        if whole == self.size:
            return picture
        # torchvision's rounding: halves to even
        top, left = round((whole[0] - height) / 2), round((whole[1] - width) / 2)
        return picture.crop((left, top, left + width, top + height))

    def _resized_sides(self, sides: Pair) -> Pair:
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


@dataclass(eq=False)
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

    names: Sequence[str]
    y_N: Tensor
    decoding: Decoding
    decoded: Decoded = "auto"

    @abstractmethod
    def open(self, index: int) -> bytes:
        """Return an encoded picture, such as the content of a JPEG file.  Must be thread-safe."""

    def size_and_md5(self, index: int) -> tuple[int, str]:
        """Return the number of bytes of an encoded picture, and their MD5 in hex."""
        content = self.open(index)
        # Systems that forbid MD5 for security allow it for checksums, if told so.
        return len(content), hashlib.md5(content, usedforsecurity=False).hexdigest()

    def image(self, index: int) -> Tensor:
        """Return a picture decoded by :class:`Decoding`, uint8 (3, H, W)."""
        with naming_picture(self.names[index]):
            return self.decoding(self.open_header(index))

    def open_header(self, index: int) -> "Image":
        """Return a picture of which Pillow has read the header alone; its content is decoded on demand."""
        from PIL import Image

        with naming_picture(self.names[index]):
            return Image.open(io.BytesIO(self.open(index)))

    def decode_crop(self, index: int, header: "Image", box: Sequence[int], size: Pair, how: Interpolation) -> Tensor:
        """Return a rectangle of a picture, resized to ``size`` with antialiasing, uint8 (3, H, W).

        ``header`` is the picture of :meth:`open_header`; the box is top, left, height and width in the upright picture.
        """
        from PIL import Image

        top, left, height, width = box
        with naming_picture(self.names[index]):
            picture = self.decoding.to_upright_rgb(header).crop((left, top, left + width, top + height))
        return to_tensor(picture.resize(size[::-1], Image.Resampling[how.upper()]))

    def find_fault(self, index: int) -> str:
        """Return why a picture cannot be decoded; empty if it can.

        A JPEG is decoded at an eighth of its size, which reads the whole file in a third of the time.
        """
        from PIL import Image

        try:
            picture = Image.open(io.BytesIO(self.open(index)))
            picture.draft("RGB", (1, 1))  # decodes a JPEG at an eighth of its size
            self.decoding.to_upright_rgb(picture)
        except Exception as error:  # decoders of some formats raise errors of their own
            return _reason(error)
        return ""


class PictureFiles(EncodedPictures):
    """Pictures in files, whose names are their paths."""

    def open(self, index: int) -> bytes:
        return Path(self.names[index]).read_bytes()


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
        return self._pictures.open(self._rows[index])


@contextmanager
def naming_picture(name: str | Path, remedy: str = "replace or delete it") -> Iterator[None]:
    """Raise a DataError that names the picture, and a remedy, for any error in reading it."""
    from PIL import Image

    try:
        yield
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{name} cannot be read as a picture: {_reason(error)}; {remedy}") from None


def _reason(error: Exception) -> str:
    """Return Pillow's reason without the object that it read from."""
    return str(error).replace(" <_io.BytesIO object", "\0").partition("\0")[0] or type(error).__name__


def to_tensor(picture: "Image") -> Tensor:
    """Return an RGB picture as a tensor, uint8 (3, H, W)."""
    import numpy as np

    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


class Listing(NamedTuple):
    """The pictures of a data set and its splits."""

    pictures: EncodedPictures  #: of all splits
    labels: Sequence[str]  #: names of the classes
    splits: Mapping[str, Tensor]  #: ``train``, ``test``, and ``val`` if there are pictures of its own, to their indices
    keys: Sequence[str]  #: of each picture, what identifies it beside its content: ``CLASS\\0NAME``
    files: Sequence[Path]  #: that contain the pictures
    remark: str  #: on the test pictures
    rest: str  #: what else the note on the splits says
    notes: Sequence[str]  #: further notes
    column: str = ""  #: which has the pictures, where the files are tables


@dataclass(kw_only=True)
class PictureSet(Dataset):
    """Base of data sets of encoded pictures.  A subclass defines :meth:`missing`, :meth:`scan` and :attr:`where`.

    A set that is too large for memory is not decoded as a whole, see ``decoded``.  The identity is a digest over the
    class and content of every picture; it is cached between processes until a file is written to.

    Args:
        image_size: pixels of every picture after an antialiased resize.
        fit: ``crop`` resizes to cover both sides and crops the centre, ``squash`` ignores proportions.
        crop_pct: share of the resized side that the crop keeps, as in timm: 0.875 resizes to 256 and crops 224.
        interpolation: the interpolation of the resize.
        orient: ``exif`` turns photographs upright by their EXIF orientation, ``ignore`` reads them as stored.
        test: share of the training pictures of each class to test on, if there are no test pictures.
        decoded: place for decoded pictures, one copy for all workers in the user's cache: mapped as a whole
            (``memory``) or read batch by batch (``disk``); or ``never``: each batch is decoded anew by the trial's
            threads.  ``auto``: memory if the set fits into a quarter of it, else never.  Batches do not depend on it.
    """

    kind: ClassVar[str]  #: first part of the identity, and of messages

    image_size: Size = (224, 224)
    fit: Fit = "crop"
    crop_pct: Portion = 1.0
    interpolation: Interpolation = "bilinear"
    orient: Orient = "exif"
    test: Fraction | None = None
    decoded: Annotated[Decoded, Unhashed()] = "auto"

    def __post_init__(self) -> None:
        """Collect the options of decoding."""
        self.decoding = Decoding(
            size=self.image_size,
            fit=self.fit,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            orient=self.orient,
        )
        self._listing: Listing | None = None  #: as of the last call of info()
        self._copies: Sequence[str] = ()

    @abstractmethod
    def scan(self) -> Listing:
        """Return the pictures and splits, without decoding a picture.

        Raises:
            DataError: with every mistake of the files.
        """

    def info(self) -> DataInfo:
        """Return the facts of the data set."""
        if (reason := self.missing()) is not None:
            raise DataError(reason)
        listing = self._listing = self.scan()
        identity, *self._copies = digest_and_describe_copies(self.kind, listing)
        return DataInfo(
            image=self.decoding.size,
            channels=3,
            classes=len(listing.labels),
            task="classification" if listing.pictures.y_N.ndim == 1 else "multilabel",
            identity=identity,
            labels=tuple(listing.labels),
        )

    def get_listing(self) -> Listing:
        """Return the listing of the last call of :meth:`info`, which is called first if it has not been."""
        if self._listing is None:
            self.info()
        if self._listing is None:  # info() may know the classes of a set that is not here
            raise DataError(self.missing() or f"{self.where} came while it was looked for; run the command again")
        return self._listing

    def notes(self) -> Sequence[str]:
        """Return what was read, what was left out, and how many pictures are duplicates."""
        listing = self.get_listing()
        splits = listing.splits
        parts = [
            f"train {len(splits[TRAIN]):,} pictures of {len(listing.labels)} classes",
            *([f"val {len(splits[VAL]):,}"] if VAL in splits else []),
            f"test {len(splits[TEST]):,}{listing.remark}",
        ]
        return [
            f"{self.where}: {', '.join(parts)}{listing.rest}.",
            *listing.notes,
            *self._copies,
        ]

    @property
    @abstractmethod
    def where(self) -> Path:
        """The file or folder that has the pictures."""

    def pictures(self, split: Split) -> EncodedPictures:
        """Return the pictures of a split; the authors' validation pictures are the last training pictures."""
        listing = self.get_listing()
        row_M = listing.splits[split]
        if split == TRAIN and VAL in listing.splits:
            row_M = torch.cat([row_M, listing.splits[VAL]])
        return Selection(listing.pictures, row_M)

    def held_out(self) -> Tensor | None:
        splits = self.get_listing().splits
        if VAL not in splits:
            return None
        return torch.arange(len(splits[VAL])) + len(splits[TRAIN])

    def hold_out_test_split(
        self, splits: Mapping[str, Tensor], y_N: Tensor, source: str
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Return splits with the option ``test`` applied, and a note on it; ``source`` has the training pictures."""
        if self.test is None:
            return dict(splits), []
        row_M = splits[TRAIN]
        class_M = y_N[row_M] if y_N.ndim == 1 else torch.zeros_like(row_M)
        # The draw is the same for every trial.
        train_M, test_M = draws.hold_out_stratified(class_M, torch.arange(len(row_M)), self.test, noise.key(0, TEST))
        of = "pictures of each class" if y_N.ndim == 1 else "pictures"
        note = (
            f"The test split is {self.test:g} of the {of} in '{source}', drawn once with seed 0: the same for all arms "
            "and seeds."
        )
        return {**splits, TRAIN: row_M[train_M], TEST: row_M[test_M]}, [note]


def digest_and_describe_copies(kind: str, listing: Listing) -> list[str]:
    """Return the identity of the bytes of all pictures, and sentences on pictures that are there twice.

    They are cached by the sizes, inodes and times of the files.
    """
    rows = [
        (f"{split}\0{listing.keys[row]}", row)
        for split, row_M in sorted(listing.splits.items(), reverse=True)
        for row in row_M.tolist()
    ]
    digest = hashlib.blake2b("\n".join(key for key, _ in rows).encode(), digest_size=16)
    # The word "copies" keeps this list apart from what earlier versions remembered of the same files in another form.
    entries = [(f"{kind} {listing.column} copies {digest.hexdigest()}", file) for file in listing.files]

    def compute() -> str:
        digest, checksums = hashlib.blake2b(digest_size=16), []
        for key, row in rows:
            size, checksum = listing.pictures.size_and_md5(row)
            digest.update(f"{key}\0{size}\0{checksum}\n".encode())
            split, label, name = f"{key}\0".split("\0")[:3]
            checksums.append((split, label, checksum, name))
        return json.dumps([f"{kind}:{digest.hexdigest()}", *notes_on_copies(checksums)])

    return json.loads(files.compute_once_per_file_state(entries, compute))


def notes_on_copies(pictures: Iterable[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield sentences on pictures that have the bytes of another one, in another split, in train, or in another class.

    A picture is its split, its class, its checksum and its name, which is empty in a table.
    """
    of_split: dict[str, list[tuple[str, str]]] = {TRAIN: [], VAL: [], TEST: []}
    classes: dict[str, dict[str, str]] = {}
    for split, label, checksum, name in pictures:
        of_split[split].append((checksum, name))
        classes.setdefault(checksum, {})[label] = name
    distinct = {split: dict(copies) for split, copies in of_split.items()}
    for one, other in ((TEST, TRAIN), (VAL, TRAIN), (TEST, VAL)):
        if names := [name for checksum, name in of_split[one] if checksum in distinct[other]]:
            yield (
                f"{len(names):,} of {format_count(len(of_split[one]), one + ' picture')} "
                f"{'is' if len(names) == 1 else 'are'} also in {other}, byte for byte{_list_copies(names)}."
            )
    if number := len(of_split[TRAIN]) - len(distinct[TRAIN]):
        held_out = "" if of_split[VAL] else ", some of which may be held out for validation"
        yield (
            f"{format_count(number, 'train picture')} {'is' if number == 1 else 'are'} identical to another{held_out}."
        )
    if names := [" and ".join(copies.values()) for copies in classes.values() if len(copies) > 1]:
        yield (
            f"{format_count(len(names), 'picture')} {'is' if len(names) == 1 else 'are'} in more than one class, byte "
            f"for byte{_list_copies(names)}."
        )


def _list_copies(names: Sequence[str]) -> str:
    """Return the first names after a colon; tables have none."""
    return f": {list_some(names, 5)}" if names[0].strip(" and") else ""


def quote_names(names: Sequence[str]) -> str:
    """Return names in quotation marks, at most :data:`MAX_LISTED` of them."""
    return list_some((f"'{name}'" for name in names), MAX_LISTED)
