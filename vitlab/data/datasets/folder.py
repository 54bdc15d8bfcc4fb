"""``image_folder``: your own pictures, one folder per class, as in torchvision and Keras.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError

from vitlab import noise
from vitlab.data import draws
from vitlab.data.datasets import class_folders, files
from vitlab.data.datasets.base import CorruptionName, Dataset, Images, Size, Split, dataset
from vitlab.data.datasets.class_folders import Content, Found, Picture
from vitlab.data.datasets.pictures import Decoded, Decoding, Fit, Interpolation, Orient, PictureFiles
from vitlab.errors import DataError
from vitlab.geometry import DataInfo
from vitlab.registry import Unhashed

TRAIN, TEST = "train", "test"
VALIDATION = ("val", "validation", "valid")
"""Names of the folder of validation pictures; the first that exists is used."""

MAX_LISTED = 20  #: names listed in a message

Share = Annotated[float, Field(gt=0, lt=1)]


class Layout(NamedTuple):
    """The folders of the splits of an ``image_folder``."""

    train: Path
    val: Path | None  #: None: validation is held out of ``train``
    test: Path | None  #: None: a share of ``train``
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listing:
    """The pictures of each split: class and path, sorted by both."""

    layout: Layout
    labels: Sequence[str]
    splits: Mapping[str, Sequence[Picture]]  #: ``train``, ``test``, and ``val`` if the folder has one
    left_out: Sequence[Counter[str]]
    content: Content


@dataset.register("image_folder")
class ImageFolder(Dataset):
    """Colour pictures in ``root/train/<class>/*`` to train on and ``root/test/<class>/*`` to test on.

    With ``val`` (or ``validation``, ``valid``) beside both, its pictures are the validation split; without a labelled
    ``test``, they are the test split.  A folder without ``train``, ``root/<class>/*``, needs the option ``test``.

    Every format that Pillow decodes is read, from subfolders too, the first frame of several.  Hidden entries are left
    out.  Photographs are turned upright by their EXIF orientation (option ``orient``), and 16 bits become 8.

    A set that is too large for memory is not decoded as a whole, see ``decoded``.  The identity is a digest over the
    relative path, size and content of every picture; it is cached between processes until a picture is written to.

    Args:
        root: the folder with ``train`` and ``test`` or ``val``, or with the folders of the classes.
        image_size: pixels of every picture after an antialiased resize.
        fit: ``crop`` resizes to cover both sides and crops the centre, ``squash`` ignores proportions.
        crop_pct: share of the resized side that the crop keeps, as in timm: 0.875 resizes to 256 and crops 224.
        interpolation: of the resize.
        orient: ``exif`` turns photographs upright by their EXIF orientation, ``ignore`` reads them as stored.
        test: share of the training pictures of each class to test on, if no folder has test pictures.
        num_classes: number of classes; required only to plan on a machine without the folder.
        decoded: place for decoded pictures: ``memory``, of every worker; ``disk``, one copy for all workers in the
            user's cache; or ``never``: each batch is decoded anew by the trial's threads.  ``auto``: memory if the
            set fits into a quarter of it, else never.  Batches do not depend on it.
        corrupted_root: folder of published corrupted test pictures, ``CORRUPTION/SEVERITY/CLASS/*`` as in ImageNet-C,
            which ``corrupted`` reads instead of corrupting the test split.
        shifted: further test sets: name to a folder ``CLASS/*`` with some of the classes of ``train``, such as
            ImageNet-R and ImageNet-A.
        real_labels: JSON file with the set of right classes of each test picture, as of ImageNet-ReaL: a list in the
            order of the numbers at the end of the pictures' names, or a mapping from the names.
    """

    def __init__(
        self,
        *,
        root: Annotated[str, Unhashed()],
        image_size: Size = (224, 224),
        fit: Fit = "crop",
        crop_pct: Annotated[float, Field(gt=0, le=1)] = 1.0,
        interpolation: Interpolation = "bilinear",
        orient: Orient = "exif",
        test: Share | None = None,
        num_classes: Annotated[int, Field(ge=2)] | None = None,
        decoded: Annotated[Decoded, Unhashed()] = "auto",
        corrupted_root: Annotated[str | None, Unhashed()] = None,
        shifted: Annotated[dict[Annotated[str, Field(pattern=r"^\w+$")], str], Unhashed()] = {},
        real_labels: Annotated[str | None, Unhashed()] = None,
    ) -> None:
        self.root = files.expand(root)
        self.decoding = Decoding(
            size=image_size, fit=fit, crop_pct=crop_pct, interpolation=interpolation, orient=orient
        )
        self.test = test
        self.num_classes = num_classes
        self.decoded: Decoded = decoded
        self.corrupted_root = None if corrupted_root is None else files.expand(corrupted_root)
        self.shifted_roots = {name: files.expand(folder) for name, folder in (shifted or {}).items()}
        self.real_labels = None if real_labels is None else files.expand(real_labels)
        self._listing: Listing | None = None  #: as of the last call of info()

    def missing(self) -> str | None:
        """Return a sentence that names the missing folder; None if all exist."""
        layout = self._layout()
        return layout if isinstance(layout, str) else None

    def info(self) -> DataInfo:
        """Return the facts of the data set; without a folder, ``num_classes`` says how many there are."""
        layout = self._layout()
        if isinstance(layout, str):
            if self.num_classes is None:
                raise DataError(f"{layout}. To plan without it, set 'num_classes'.")
            return DataInfo(image=self.decoding.size, channels=3, classes=self.num_classes)
        listing = self._listing = self._list(layout)
        return DataInfo(
            image=self.decoding.size,
            channels=3,
            classes=len(listing.labels),
            identity=listing.content.identity,
            labels=tuple(listing.labels),
            test_sets=self._identity_of_test_sets(),
            test_images=len(listing.splits[TEST]) if self.corrupted_root is None else None,
        )

    def notes(self) -> Sequence[str]:
        """Return what was read, what was left out, and how many pictures are duplicates."""
        listing = self._listed()
        numbers = {split: len(pictures) for split, pictures in listing.splits.items()}
        test, left_out = listing.layout.test, class_folders.describe(listing.left_out)
        parts = [
            f"train {numbers[TRAIN]:,} pictures of {len(listing.labels)} classes",
            *([f"val {numbers['val']:,}"] if "val" in numbers else []),
            f"test {numbers[TEST]:,}" + (f" (folder '{test.name}')" if test is not None and test.name != TEST else ""),
        ]
        return [
            f"{self.root}: {', '.join(parts)}, {left_out}.",
            *listing.layout.notes,
            *class_folders.describe_copies(listing.content.copies, numbers),
        ]

    def read(self, split: Split) -> Images:
        """Return the pictures of a split at once."""
        pictures = self.pictures(split)
        return Images(torch.stack(list(map(pictures.image, range(len(pictures))))), pictures.y_N)

    def pictures(self, split: Split) -> PictureFiles:
        """Return the pictures of a split; the pictures of a folder ``val`` are the last training pictures."""
        splits = self._listed().splits
        return self._files([*splits[TRAIN], *splits.get("val", ())] if split == "train" else splits[TEST])

    def held_out(self) -> torch.Tensor | None:
        """Return the indices of the pictures of a folder ``val`` beside ``train`` and ``test``."""
        splits = self._listed().splits
        if "val" not in splits:
            return None
        return torch.arange(len(splits["val"])) + len(splits[TRAIN])

    def corrupted(self, kind: CorruptionName, severity: int) -> PictureFiles | None:
        """Return the pictures of a published corruption, in a folder ``corrupted_root`` or one below it."""
        if self.corrupted_root is None:
            return None
        name = Path(kind, str(severity))
        folders = [self.corrupted_root / name, *sorted(self.corrupted_root.glob(f"*/{name}"))]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            raise DataError(
                f"image_folder: {self.corrupted_root} has no folder {name}; add it, or leave it out of 'corrupted'"
            )
        return self._test_set(folder)

    def shifted(self) -> Mapping[str, PictureFiles]:
        """Return the pictures of the further test sets."""
        return {name: self._test_set(folder) for name, folder in self.shifted_roots.items()}

    def reassessed(self) -> Sequence[frozenset[int]] | None:
        """Return the set of right classes of each test picture from ``real_labels``."""
        if self.real_labels is None:
            return None
        return read_real_labels(self.real_labels, [path for _, path in self._listed().splits[TEST]])

    def _test_set(self, folder: Path) -> PictureFiles:
        """Return the pictures of a folder with a folder for each of some classes."""
        if not folder.is_dir():
            raise DataError(f"image_folder: there is no folder {folder}; correct its path in the study")
        found = class_folders.find(folder)
        for fault in _unknown_classes(found, folder, self._listed().labels):
            raise DataError(f"image_folder: {fault}")
        return self._files(found.pictures)

    def _files(self, pictures: Sequence[Picture]) -> PictureFiles:
        y_N = _classes(pictures, self._listed().labels)
        return PictureFiles([path for _, path in pictures], y_N, self.decoding, self.decoded)

    def _listed(self) -> Listing:
        """Return the listing of the last call of :meth:`info`, which is called first if it has not been.

        Raises:
            DataError: if a folder is missing.
        """
        if self._listing is None:
            if (reason := self.missing()) is not None:
                raise DataError(reason)
            self.info()
        assert self._listing is not None
        return self._listing

    def _layout(self) -> Layout | str:
        """Return the folders of the splits, or in one sentence which of them is missing."""
        root = self.root
        if not root.is_dir():
            return f"image_folder: there is no folder {root}; set 'root' to the folder of your pictures"
        train, test = root / TRAIN, root / TEST
        if not train.is_dir():
            return self._flat_layout(_folders_in(root))
        beside = [name for name in VALIDATION if (root / name).is_dir()]
        unused = tuple(f"'{root / name}' is not used: '{beside[0]}' has validation pictures." for name in beside[1:])
        val = root / beside[0] if beside else None
        classes = set(map(class_folders.composed, _folders_in(train)))
        is_labelled = not classes.isdisjoint(map(class_folders.composed, _folders_in(test)))
        no_labels = f"'{test}' has no folder of a class of 'train', so its pictures have no labels"
        unlabelled = (f"{no_labels}; they are not used.",) if test.is_dir() and not is_labelled else ()
        if self.test is not None:
            if is_labelled:
                raise DataError(f"image_folder: {root} has a folder '{TEST}'; remove it, or the option 'test'")
            return Layout(train, val, None, (*unused, *unlabelled, self._about_share(train)))
        if is_labelled:
            return Layout(train, val, test, unused)
        if val is not None:
            return Layout(train, None, val, (*unused, *unlabelled))
        why = no_labels if test.is_dir() else f"{root} has no folder '{TEST}' or '{VALIDATION[0]}' to test on"
        return (
            f"image_folder: {why}; create '{TEST}' with one folder per class, or set 'test: 0.2' to test on a share of "
            "the training pictures"
        )

    def _flat_layout(self, classes: Sequence[str]) -> Layout | str:
        """Return the layout of a root without a folder ``train``, which has the folders of the classes."""
        root, no_train = self.root, f"image_folder: {self.root} has no folder '{TRAIN}'"
        if not set(classes).isdisjoint((TEST, *VALIDATION)) or len(classes) < 2:
            below = [f" Did you mean {root / name}?" for name in classes if (root / name / TRAIN).is_dir()]
            return f"{no_train}; create it, with one folder per class.{''.join(below[:1])}"
        if self.test is None:
            return (
                f"{no_train}; if its {len(classes)} folders ({_names(classes)}) are the classes, set 'test: 0.2' to "
                "test on a share of the pictures of each"
            )
        return Layout(root, None, None, (self._about_share(root),))

    def _about_share(self, train: Path) -> str:
        return (
            f"The test split is {self.test:g} of the pictures of each class in '{train}', drawn once with seed 0: the "
            "same for all arms and seeds."
        )

    def _list(self, layout: Layout) -> Listing:
        """Return the pictures of all splits.

        Raises:
            DataError: with every fault of the folders.
        """
        folders = {TRAIN: layout.train, TEST: layout.test, "val": layout.val}
        found = {split: class_folders.find(folder) for split, folder in folders.items() if folder is not None}
        faults = [fault for split, one in found.items() for fault in self._faults(one, folders[split], found[TRAIN])]
        if faults:
            raise DataError(f"image_folder: {'; '.join(faults)}")
        labels = found[TRAIN].labels
        splits: dict[str, Sequence[Picture]] = {split: one.pictures for split, one in found.items()}
        if layout.test is None:
            assert self.test is not None
            splits[TRAIN], splits[TEST] = _hold_out(found[TRAIN].pictures, labels, self.test)
        left_out = [one.left_out for one in found.values()]
        return Listing(layout, labels, splits, left_out, class_folders.content_of(self.root, splits))

    def _faults(self, found: Found, folder: Path | None, train: Found) -> Iterator[str]:
        """Yield what is wrong with the class folders of a split."""
        if found is train:
            if len(found.labels) < 2:
                yield f"{folder} needs a folder per class, at least two; found {len(found.labels)}"
            elif self.num_classes not in (None, len(found.labels)):
                yield f"{folder} has {len(found.labels)} classes, num_classes says {self.num_classes}; correct it"
        yield from _unknown_classes(found, folder, train.labels)
        if empty := sorted(set(found.labels) - {label for label, _ in found.pictures}):
            yield (
                f"{folder} has no pictures of {'class' if len(empty) == 1 else 'classes'} {_names(empty)} "
                f"({class_folders.describe([found.left_out])}); add some, or remove the folder"
            )

    def _identity_of_test_sets(self) -> str:
        """Return a digest over the further test pictures and labels; empty without any.

        The content of pictures is not read, but their names and sizes: there are 75 times as many corrupted pictures as
        there are test pictures.  A process lists them again only after a change of one of their folders.
        """
        roots = {f"shifted/{name}": folder for name, folder in self.shifted_roots.items()}
        if self.corrupted_root is not None:
            roots["corrupted"] = self.corrupted_root
        parts = [class_folders.digest_of_names(name, folder) for name, folder in sorted(roots.items())]
        if self.real_labels is not None:
            if not self.real_labels.is_file():
                raise DataError(f"image_folder: there is no file {self.real_labels}; correct 'real_labels'")
            parts.append(files.checksum(self.real_labels))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest() if parts else ""


def _unknown_classes(found: Found, folder: Path | None, labels: Sequence[str]) -> Iterator[str]:
    for label in sorted(set(found.labels) - set(labels)):
        yield f"{folder} has a class '{label}' that the training pictures do not have; move it or add it there"


def _folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder that are not hidden; an empty list if it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not class_folders.is_hidden(path.name) and path.is_dir())


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:MAX_LISTED]) + more


def _classes(pictures: Sequence[Picture], labels: Sequence[str]) -> torch.Tensor:
    index = {label: i for i, label in enumerate(labels)}
    return torch.tensor([index[label] for label, _ in pictures], dtype=torch.int64)


def _hold_out(
    pictures: Sequence[Picture], labels: Sequence[str], share: float
) -> tuple[Sequence[Picture], Sequence[Picture]]:
    """Return the training and the test pictures, drawn by class; the draw is the same for every trial."""
    parts = draws.hold_out(_classes(pictures, labels), torch.arange(len(pictures)), share, noise.key(0, "test"))
    train, test = ([pictures[position] for position in part_M.tolist()] for part_M in parts)
    return train, test


Labels = frozenset[Annotated[int, Field(ge=0, strict=True)]]
_REAL_LABELS: TypeAdapter[list[Labels] | dict[str, Labels]] = TypeAdapter(list[Labels] | dict[str, Labels])


def read_real_labels(file: Path, pictures: Sequence[str]) -> list[frozenset[int]]:
    """Return the set of right classes of each picture, as of ImageNet-ReaL (arXiv:2006.07159); empty for none.

    Args:
        file: JSON, a list of lists of class indices, whose n-th list is of the picture whose name ends in the number n
            (from 1), such as ``ILSVRC2012_val_00000293.JPEG``; or a mapping from the names of pictures to such lists.
        pictures: paths.

    Raises:
        DataError: if the file is no such file, or does not have a picture.
    """
    what = "a list of lists of class indices, as of ImageNet-ReaL, nor a mapping from names to such lists"
    try:
        content = _REAL_LABELS.validate_json(file.read_bytes())
    except ValidationError as error:
        # A wrong entry is deeper in one alternative than the wrong kind of the whole in the other.
        deepest = max((fault["loc"] for fault in error.errors()), key=len)
        place = ".".join(map(str, deepest[1:])) or "the file"
        raise DataError(f"{file} is neither {what}: see {place}; correct 'real_labels'") from None
    sets = []
    for path in pictures:
        name = Path(path).name
        number = re.search(r"(\d+)$", Path(name).stem)
        if isinstance(content, dict):
            right = content.get(name)
        else:
            right = content[int(number[1]) - 1] if number and 0 < int(number[1]) <= len(content) else None
        if right is None:
            raise DataError(f"{file} has no labels of {path}; correct 'real_labels', or remove it")
        sets.append(right)
    return sets
