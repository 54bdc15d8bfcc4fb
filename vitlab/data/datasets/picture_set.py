"""Base of data sets of encoded pictures: options, splits, identity and notes, whatever file contains the pictures.

N pictures of a data set, M of a split.
"""

# No postponed annotations: a subclass in another module, which does not have their names, could not resolve them.
import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vitlab import noise
from vitlab.data import draws
from vitlab.data.datasets import files
from vitlab.data.datasets.base import Dataset, Size, Split
from vitlab.data.datasets.pictures import Decoded, Decoding, EncodedPictures, Fit, Interpolation, Orient, Selection
from vitlab.errors import DataError, count
from vitlab.geometry import DataInfo
from vitlab.registry import Unhashed

TRAIN, VAL, TEST = "train", "val", "test"

MAX_LISTED = 20  #: names or mistakes listed in a message

Share = Annotated[float, Field(gt=0, lt=1)]


class PictureFiles(EncodedPictures):
    """Pictures in files, whose names are their paths."""

    def open(self, index: int) -> bytes:
        """Return the content of a file."""
        return Path(self.names[index]).read_bytes()

    def checksum(self, index: int) -> tuple[int, str]:
        """Return the size of a file and its MD5, which this process computes once."""
        path = Path(self.names[index])
        return path.stat().st_size, files.checksum(path)


class Listing(NamedTuple):
    """The pictures of a data set and its splits."""

    pictures: EncodedPictures  #: of all splits
    labels: Sequence[str]  #: names of the classes
    splits: Mapping[str, Tensor]  #: ``train``, ``test``, and ``val`` if there are pictures of its own, to their indices
    keys: Sequence[str]  #: of each picture, what identifies it beside its content: ``CLASS\\0NAME``
    files: Sequence[Path]  #: that contain the pictures
    details: Mapping[str, str] = {}  #: of ``train``, ``test`` and the ``rest``, what the note on the splits adds
    notes: Sequence[str] = ()  #: further notes
    column: str = ""  #: which has the pictures, where the files are tables


@dataclass(frozen=True)
class Content:
    """What follows from the bytes of all pictures."""

    identity: str
    copies: Mapping[str, int]  #: see :func:`count_copies`


@dataclass(kw_only=True)
class PictureSet(Dataset):
    """Base of data sets of encoded pictures.  A subclass defines :meth:`missing`, :meth:`scan` and :attr:`where`.

    A set that is too large for memory is not decoded as a whole, see ``decoded``.  The identity is a digest over the
    class and content of every picture; it is cached between processes until a file is written to.

    Args:
        image_size: pixels of every picture after an antialiased resize.
        fit: ``crop`` resizes to cover both sides and crops the centre, ``squash`` ignores proportions.
        crop_pct: share of the resized side that the crop keeps, as in timm: 0.875 resizes to 256 and crops 224.
        interpolation: of the resize.
        orient: ``exif`` turns photographs upright by their EXIF orientation, ``ignore`` reads them as stored.
        test: share of the training pictures of each class to test on, if there are no test pictures.
        decoded: place for decoded pictures, one copy for all workers in the user's cache: mapped as a whole
            (``memory``) or read batch by batch (``disk``); or ``never``: each batch is decoded anew by the trial's
            threads.  ``auto``: memory if the set fits into a quarter of it, else never.  Batches do not depend on it.
    """

    kind: ClassVar[str]  #: first part of the identity, and of messages

    image_size: Size = (224, 224)
    fit: Fit = "crop"
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 1.0
    interpolation: Interpolation = "bilinear"
    orient: Orient = "exif"
    test: Share | None = None
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
        self._content: Content | None = None

    @abstractmethod
    def scan(self) -> Listing:
        """Return the pictures and splits, without decoding a picture.

        Raises:
            DataError: with every mistake of the files.
        """

    @abstractmethod
    def missing(self) -> str | None:
        """Return a sentence that names the missing file or folder; None if there is none."""

    def info(self) -> DataInfo:
        """Return the facts of the data set.

        Raises:
            DataError: if its files are not here, or wrong.
        """
        if (reason := self.missing()) is not None:
            raise DataError(reason)
        listing = self._listing = self.scan()
        content = self._content = content_of(self.kind, listing)
        return DataInfo(
            image=self.decoding.size,
            channels=3,
            classes=len(listing.labels),
            task="classification" if listing.pictures.y_N.ndim == 1 else "multilabel",
            identity=content.identity,
            labels=tuple(listing.labels),
            test_images=len(listing.splits[TEST]),
        )

    def listed(self) -> Listing:
        """Return the listing of the last call of :meth:`info`, which is called first if it has not been."""
        if self._listing is None:
            # info() may know the classes of a set that is not here.
            if (reason := self.missing()) is not None:
                raise DataError(reason)
            self.info()
        assert self._listing is not None
        return self._listing

    def notes(self) -> Sequence[str]:
        """Return what was read, what was left out, and how many pictures are duplicates."""
        listing = self.listed()
        assert self._content is not None
        numbers = {split: len(row_M) for split, row_M in listing.splits.items()}
        parts = [
            f"train {numbers[TRAIN]:,} pictures of {len(listing.labels)} classes",
            *([f"val {numbers[VAL]:,}"] if VAL in numbers else []),
            f"test {numbers[TEST]:,}{listing.details.get(TEST, '')}",
        ]
        return [
            f"{self.where}: {', '.join(parts)}{listing.details.get('rest', '')}.",
            *listing.notes,
            *describe_copies(self._content.copies, numbers),
        ]

    @property
    @abstractmethod
    def where(self) -> Path:
        """The file or folder that has the pictures."""

    def pictures(self, split: Split) -> EncodedPictures:
        """Return the pictures of a split; the authors' validation pictures are the last training pictures."""
        listing = self.listed()
        row_M = listing.splits[split]
        if split == TRAIN and VAL in listing.splits:
            row_M = torch.cat([row_M, listing.splits[VAL]])
        return Selection(listing.pictures, row_M)

    def held_out(self) -> Tensor | None:
        """Return the indices of the authors' validation pictures, if there are test pictures beside them."""
        splits = self.listed().splits
        if VAL not in splits:
            return None
        return torch.arange(len(splits[VAL])) + len(splits[TRAIN])

    def with_test(self, splits: Mapping[str, Tensor], y_N: Tensor, source: str) -> tuple[dict[str, Tensor], list[str]]:
        """Return splits with the option ``test`` applied, and a note on it.

        Args:
            splits: as the files define them.
            y_N: classes of all pictures.
            source: what the training pictures are in.
        """
        if self.test is None:
            return dict(splits), []
        row_M = splits[TRAIN]
        class_M = y_N[row_M] if y_N.ndim == 1 else torch.zeros_like(row_M)
        # The draw is the same for every trial.
        train_M, test_M = draws.hold_out(class_M, torch.arange(len(row_M)), self.test, noise.key(0, TEST))
        of = "pictures of each class" if y_N.ndim == 1 else "pictures"
        note = (
            f"The test split is {self.test:g} of the {of} in '{source}', drawn once with seed 0: the same for all arms "
            "and seeds."
        )
        return {**splits, TRAIN: row_M[train_M], TEST: row_M[test_M]}, [note]


def content_of(kind: str, listing: Listing) -> Content:
    """Return what follows from the bytes of all pictures, cached by the sizes, inodes and times of their files."""
    rows = [
        (f"{split}\0{listing.keys[row]}", row)
        for split, row_M in sorted(listing.splits.items(), reverse=True)
        for row in row_M.tolist()
    ]
    digest = hashlib.blake2b("\n".join(key for key, _ in rows).encode(), digest_size=16)
    entries = [(f"{kind} {listing.column} {digest.hexdigest()}", file) for file in listing.files]

    def compute() -> str:
        digest, checksums = hashlib.blake2b(digest_size=16), []
        for key, row in rows:
            size, checksum = listing.pictures.checksum(row)
            digest.update(f"{key}\0{size}\0{checksum}\n".encode())
            split, label, *_ = key.split("\0")
            checksums.append((split, label, checksum))
        return json.dumps(asdict(Content(f"{kind}:{digest.hexdigest()}", count_copies(checksums))))

    return Content(**json.loads(files.remember(entries, compute)))


def count_copies(pictures: Sequence[tuple[str, str, str]]) -> dict[str, int]:
    """Return how many pictures have the bytes of another one, by where that is; without zeros.

    Keys are ``test/train`` (test pictures that are also in train), ``val/train``, ``test/val``, ``train`` (training
    pictures beyond the first of equal ones), and ``classes`` (contents that stand in more than one class).

    Args:
        pictures: split, class and checksum of each picture.
    """
    of_split: dict[str, list[str]] = {TRAIN: [], VAL: [], TEST: []}
    classes: dict[str, set[str]] = {}
    for split, label, checksum in pictures:
        of_split[split].append(checksum)
        classes.setdefault(checksum, set()).add(label)
    distinct = {split: set(checksums) for split, checksums in of_split.items()}
    copies = {
        f"{one}/{other}": sum(checksum in distinct[other] for checksum in of_split[one])
        for one, other in ((TEST, TRAIN), (VAL, TRAIN), (TEST, VAL))
    }
    copies[TRAIN] = len(of_split[TRAIN]) - len(distinct[TRAIN])
    copies["classes"] = sum(len(labels) > 1 for labels in classes.values())
    return {where: number for where, number in copies.items() if number}


def describe_copies(copies: Mapping[str, int], numbers: Mapping[str, int]) -> list[str]:
    """Return a sentence for each entry of :func:`count_copies`.

    Args:
        copies: as returned by it.
        numbers: split to the number of its pictures.
    """
    sentences = []
    for where, number in copies.items():
        one, _, other = where.partition("/")
        are = "is" if number == 1 else "are"
        if other:
            sentences.append(
                f"{number:,} of {count(numbers[one], f'{one} picture')} {are} also in {other}, byte for byte."
            )
        elif where == TRAIN:
            held_out = "" if VAL in numbers else ", some of which may be held out for validation"
            sentences.append(f"{count(number, 'train picture')} {are} identical to another{held_out}.")
        else:
            sentences.append(f"{count(number, 'picture')} {are} in more than one class, byte for byte.")
    return sentences


def listed_names(names: Sequence[str]) -> str:
    """Return names in quotation marks, at most :data:`MAX_LISTED` of them."""
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:MAX_LISTED]) + more
