"""``image_folder``: your own pictures, one folder per class, as in torchvision and Keras.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError

from vitlab.data.datasets import class_folders, files
from vitlab.data.datasets.base import CorruptionName, dataset
from vitlab.data.datasets.class_folders import Found, Picture
from vitlab.data.datasets.picture_set import TEST, TRAIN, VAL, Listing, PictureFiles, PictureSet, listed_names
from vitlab.errors import DataError
from vitlab.geometry import DataInfo
from vitlab.registry import Unhashed

VALIDATION = ("val", "validation", "valid")
"""Names of the folder of validation pictures; the first that exists is used."""


class Layout(NamedTuple):
    """The folders of the splits of an ``image_folder``."""

    train: Path
    val: Path | None  #: None: validation is held out of ``train``
    test: Path | None  #: None: a share of ``train``
    notes: tuple[str, ...] = ()


@dataset.register("image_folder")
@dataclass(kw_only=True)
class ImageFolder(PictureSet):
    """Colour pictures in ``root/train/<class>/*`` to train on and ``root/test/<class>/*`` to test on.

    With ``val`` (or ``validation``, ``valid``) beside both, its pictures are the validation split; without a labelled
    ``test``, they are the test split.  A folder without ``train``, ``root/<class>/*``, needs the option ``test``.

    Every format that Pillow decodes is read, from subfolders too, the first frame of several.  Hidden entries are left
    out.  Photographs are turned upright by their EXIF orientation (option ``orient``), and 16 bits become 8.

    A set that is too large for memory is not decoded as a whole, see ``decoded``.  The identity is a digest over the
    relative path, size and content of every picture; it is cached between processes until a picture is written to.

    Args:
        root: the folder with ``train`` and ``test`` or ``val``, or with the folders of the classes.
        num_classes: number of classes; required only to plan on a machine without the folder.
        corrupted_root: folder of published corrupted test pictures, ``CORRUPTION/SEVERITY/CLASS/*`` as in ImageNet-C,
            which ``corrupted`` reads instead of corrupting the test split.
        shifted: further test sets: name to a folder ``CLASS/*`` with some of the classes of ``train``, such as
            ImageNet-R and ImageNet-A.
        real_labels: JSON file with the set of right classes of each test picture, as of ImageNet-ReaL: a list in the
            order of the numbers at the end of the pictures' names, or a mapping from the names.
    """

    kind = "image_folder"

    root: Annotated[str, Unhashed()]
    num_classes: Annotated[int, Field(ge=2)] | None = None
    corrupted_root: Annotated[str | None, Unhashed()] = None
    shifted: Annotated[dict[Annotated[str, Field(pattern=r"^\w+$")], str] | None, Unhashed()] = None
    real_labels: Annotated[str | None, Unhashed()] = None

    @property
    def where(self) -> Path:
        """The folder."""
        return files.expand(self.root)

    def missing(self) -> str | None:
        """Return a sentence that names the missing folder; None if all exist."""
        layout = self._layout()
        return layout if isinstance(layout, str) else None

    def info(self) -> DataInfo:
        """Return the facts of the data set; without a folder, ``num_classes`` says how many there are."""
        if (reason := self.missing()) is None:
            info = replace(super().info(), test_sets=self._identity_of_test_sets())
            return info if self.corrupted_root is None else replace(info, test_images=None)
        if self.num_classes is None:
            raise DataError(f"{reason}. To plan without it, set 'num_classes'.")
        return DataInfo(image=self.decoding.size, channels=3, classes=self.num_classes)

    def scan(self) -> Listing:
        """Return the pictures of all splits.

        Raises:
            DataError: with every fault of the folders.
        """
        layout = self._layout()
        assert isinstance(layout, Layout)
        folders = {TRAIN: layout.train, TEST: layout.test, VAL: layout.val}
        found = {split: class_folders.find(folder) for split, folder in folders.items() if folder is not None}
        faults = [fault for split, one in found.items() for fault in self._faults(one, folders[split], found[TRAIN])]
        if faults:
            raise DataError(f"image_folder: {'; '.join(faults)}")
        labels = found[TRAIN].labels
        pictures = [picture for one in found.values() for picture in one.pictures]
        splits, start = {}, 0
        for split, one in found.items():
            splits[split] = torch.arange(start, start := start + len(one.pictures))
        encoded = self._files(pictures, labels)
        splits, notes = self.with_test(splits, encoded.y_N, str(layout.train))
        test = layout.test
        return Listing(
            encoded,
            labels,
            splits,
            keys=[f"{label}\0{class_folders.relative_name(path, self.where)}" for label, path in pictures],
            files=[Path(path) for _, path in pictures],
            details={
                TEST: f" (folder '{test.name}')" if test is not None and test.name != TEST else "",
                "rest": f", {class_folders.describe([one.left_out for one in found.values()])}",
            },
            notes=(*layout.notes, *notes),
        )

    def corrupted(self, kind: CorruptionName, severity: int) -> PictureFiles | None:
        """Return the pictures of a published corruption, in a folder ``corrupted_root`` or one below it."""
        if self.corrupted_root is None:
            return None
        root, name = files.expand(self.corrupted_root), Path(kind, str(severity))
        folders = [root / name, *sorted(root.glob(f"*/{name}"))]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            raise DataError(f"image_folder: {root} has no folder {name}; add it, or leave it out of 'corrupted'")
        return self._test_set(folder)

    def shifted_sets(self) -> Mapping[str, PictureFiles]:
        """Return the pictures of the further test sets."""
        return {name: self._test_set(folder) for name, folder in self._shifted_roots().items()}

    def reassessed(self) -> Sequence[frozenset[int]] | None:
        """Return the set of right classes of each test picture from ``real_labels``."""
        if self.real_labels is None:
            return None
        return read_real_labels(files.expand(self.real_labels), self.pictures("test").names)

    def _test_set(self, folder: Path) -> PictureFiles:
        """Return the pictures of a folder with a folder for each of some classes."""
        if not folder.is_dir():
            raise DataError(f"image_folder: there is no folder {folder}; correct its path in the study")
        found, labels = class_folders.find(folder), self.listed().labels
        for fault in _unknown_classes(found, folder, labels):
            raise DataError(f"image_folder: {fault}")
        return self._files(found.pictures, labels)

    def _files(self, pictures: Sequence[Picture], labels: Sequence[str]) -> PictureFiles:
        index = {label: i for i, label in enumerate(labels)}
        y_N = torch.tensor([index[label] for label, _ in pictures], dtype=torch.int64)
        return PictureFiles([path for _, path in pictures], y_N, self.decoding, self.decoded)

    def _shifted_roots(self) -> dict[str, Path]:
        return {name: files.expand(folder) for name, folder in (self.shifted or {}).items()}

    def _layout(self) -> Layout | str:
        """Return the folders of the splits, or in one sentence which of them is missing."""
        root = self.where
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
            return Layout(train, val, None, (*unused, *unlabelled))
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
        root, no_train = self.where, f"image_folder: {self.where} has no folder '{TRAIN}'"
        if not set(classes).isdisjoint((TEST, *VALIDATION)) or len(classes) < 2:
            below = [f" Did you mean {root / name}?" for name in classes if (root / name / TRAIN).is_dir()]
            return f"{no_train}; create it, with one folder per class.{''.join(below[:1])}"
        if self.test is None:
            return (
                f"{no_train}; if its {len(classes)} folders ({listed_names(classes)}) are the classes, set 'test: 0.2' "
                "to test on a share of the pictures of each"
            )
        return Layout(root, None, None)

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
                f"{folder} has no pictures of {'class' if len(empty) == 1 else 'classes'} {listed_names(empty)} "
                f"({class_folders.describe([found.left_out])}); add some, or remove the folder"
            )

    def _identity_of_test_sets(self) -> str:
        """Return a digest over the further test pictures and labels; empty without any.

        The content of pictures is not read, but their names and sizes: there are 75 times as many corrupted pictures as
        there are test pictures.  A process lists them again only after a change of one of their folders.
        """
        roots = {f"shifted/{name}": folder for name, folder in self._shifted_roots().items()}
        if self.corrupted_root is not None:
            roots["corrupted"] = files.expand(self.corrupted_root)
        parts = [class_folders.digest_of_names(name, folder) for name, folder in sorted(roots.items())]
        if self.real_labels is not None:
            file = files.expand(self.real_labels)
            if not file.is_file():
                raise DataError(f"image_folder: there is no file {file}; correct 'real_labels'")
            parts.append(files.checksum(file))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest() if parts else ""


def _unknown_classes(found: Found, folder: Path | None, labels: Sequence[str]) -> Iterator[str]:
    for label in sorted(set(found.labels) - set(labels)):
        yield f"{folder} has a class '{label}' that the training pictures do not have; move it or add it there"


def _folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder that are not hidden; an empty list if it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not class_folders.is_hidden(path.name) and path.is_dir())


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
