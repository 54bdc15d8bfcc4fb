"""``image_folder``: your own pictures, one folder per class, as in torchvision and Keras.

Hidden entries are left out, and those that systems and notebooks add.  A link to a folder is followed, and each folder
is read once for a class.  Names of classes and the order of pictures follow Unicode's composed form (NFC), which does
not depend on the system that made the folders.

N images, C channels, H rows, W columns.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError

from vitlab.data.datasets import files
from vitlab.data.datasets.base import CorruptionName, dataset
from vitlab.data.datasets.pictures import (
    TEST,
    TRAIN,
    VAL,
    Listing,
    PictureFiles,
    PictureSet,
    is_hidden,
    picture_suffixes,
    quote_names,
)
from vitlab.errors import DataError, format_count
from vitlab.geometry import DataInfo
from vitlab.registry import Unhashed
from vitlab.spec.choice import TwoOrMore

VALIDATION = ("val", "validation", "valid")
"""Names of the folder of validation pictures; the first that exists is used."""


class Layout(NamedTuple):
    """The folders of the splits of an ``image_folder``."""

    train: Path
    val: Path | None  #: None: validation is held out of ``train``
    test: Path | None  #: None: a share of ``train``
    notes: tuple[str, ...] = ()


Picture = tuple[str, str]
"""Class and path of a picture."""


class Found(NamedTuple):
    """Pictures below class folders, and what was left out beside them."""

    labels: list[str]  #: classes, sorted; a class may have no pictures
    pictures: list[Picture]  #: sorted by class and path
    left_out: Counter[str]  #: reason to the number of files


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
    num_classes: TwoOrMore | None = None
    corrupted_root: Annotated[str | None, Unhashed()] = None
    shifted: Annotated[dict[Annotated[str, Field(pattern=r"^\w+$")], str] | None, Unhashed()] = None
    real_labels: Annotated[str | None, Unhashed()] = None

    @property
    def where(self) -> Path:
        return files.expand_home(self.root)

    def missing(self) -> str | None:
        layout = self._layout_or_fault()
        return layout if isinstance(layout, str) else None

    def info(self) -> DataInfo:
        """Return the facts of the data set; without a folder, ``num_classes`` says how many there are."""
        if (reason := self.missing()) is None:
            return replace(super().info(), test_sets=self._identity_of_test_sets())
        if self.num_classes is None:
            raise DataError(f"{reason}. To plan without it, set 'num_classes'.")
        return DataInfo(image=self.decoding.size, channels=3, classes=self.num_classes)

    def scan(self) -> Listing:
        layout = self._layout_or_fault()
        assert isinstance(layout, Layout)
        folders = {TRAIN: layout.train, TEST: layout.test, VAL: layout.val}
        listings = {split: find_class_pictures(folder) for split, folder in folders.items() if folder is not None}
        faults = [
            fault
            for split, listing in listings.items()
            for fault in self._find_class_faults(listing, folders[split], listings[TRAIN])
        ]
        if faults:
            raise DataError(f"image_folder: {'; '.join(faults)}")
        labels = listings[TRAIN].labels
        pictures = [picture for listing in listings.values() for picture in listing.pictures]
        splits, start = {}, 0
        for split, listing in listings.items():
            splits[split] = torch.arange(start, start := start + len(listing.pictures))
        encoded = self._picture_files(pictures, labels)
        splits, notes = self.hold_out_test_split(splits, encoded.y_N, str(layout.train))
        test = layout.test
        return Listing(
            encoded,
            labels,
            splits,
            keys=[f"{label}\0{relative_name(path, self.where)}" for label, path in pictures],
            files=[Path(path) for _, path in pictures],
            remark=f" (folder '{test.name}')" if test is not None and test.name != TEST else "",
            rest=f", {describe_left_out([listing.left_out for listing in listings.values()])}",
            notes=(*layout.notes, *notes),
        )

    def corrupted(self, kind: CorruptionName, severity: int) -> PictureFiles | None:
        """Return the pictures of a published corruption, in a folder ``corrupted_root`` or one below it."""
        if self.corrupted_root is None:
            return None
        root, name = files.expand_home(self.corrupted_root), Path(kind, str(severity))
        folders = [root / name, *sorted(root.glob(f"*/{name}"))]
        folder = next(filter(Path.is_dir, folders), None)
        if folder is None:
            raise DataError(f"image_folder: {root} has no folder {name}; add it, or leave it out of 'corrupted'")
        return self._find_pictures_of_classes(folder)

    def shifted_sets(self) -> Mapping[str, PictureFiles]:
        return {name: self._find_pictures_of_classes(folder) for name, folder in self._shifted_roots().items()}

    def reassessed(self) -> Sequence[frozenset[int]] | None:
        if self.real_labels is None:
            return None
        return read_real_labels(files.expand_home(self.real_labels), self.pictures("test").names)

    def _find_pictures_of_classes(self, folder: Path) -> PictureFiles:
        """Return the pictures of a folder with a folder for each of some classes."""
        labels = self.get_listing().labels  # the identity of the test sets is known with it, so the folder is there
        listing = find_class_pictures(folder)
        for fault in _unknown_classes(listing, folder, labels):
            raise DataError(f"image_folder: {fault}")
        return self._picture_files(listing.pictures, labels)

    def _picture_files(self, pictures: Sequence[Picture], labels: Sequence[str]) -> PictureFiles:
        index = {label: i for i, label in enumerate(labels)}
        y_N = torch.tensor([index[label] for label, _ in pictures], dtype=torch.int64)
        return PictureFiles([path for _, path in pictures], y_N, self.decoding, self.decoded)

    def _shifted_roots(self) -> dict[str, Path]:
        return {name: files.expand_home(folder) for name, folder in (self.shifted or {}).items()}

    def _layout_or_fault(self) -> Layout | str:
        """Return the folders of the splits, or in one sentence which of them is missing."""
        root = self.where
        if not root.is_dir():
            return f"image_folder: there is no folder {root}; set 'root' to the folder of your pictures"
        train, test = root / TRAIN, root / TEST
        if not train.is_dir():
            return self._find_layout_without_train(_folders_in(root))
        beside = [name for name in VALIDATION if (root / name).is_dir()]
        unused = tuple(f"'{root / name}' is not used: '{beside[0]}' has validation pictures." for name in beside[1:])
        val = root / beside[0] if beside else None
        classes = set(map(compose_unicode, _folders_in(train)))
        is_labelled = not classes.isdisjoint(map(compose_unicode, _folders_in(test)))
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

    def _find_layout_without_train(self, classes: Sequence[str]) -> Layout | str:
        """Return the layout of a root without a folder ``train``, which has the folders of the classes."""
        root, no_train = self.where, f"image_folder: {self.where} has no folder '{TRAIN}'"
        if not set(classes).isdisjoint((TEST, *VALIDATION)) or len(classes) < 2:
            below = [f". Did you mean {root / name}?" for name in classes if (root / name / TRAIN).is_dir()]
            hint = below[0] if below else "; for pictures with a table of labels, write type: image_table"
            return f"{no_train}; create it, with one folder per class{hint}"
        if self.test is None:
            return (
                f"{no_train}; if its {len(classes)} folders ({quote_names(classes)}) are the classes, set 'test: 0.2' "
                "to test on a share of the pictures of each"
            )
        return Layout(root, None, None)

    def _find_class_faults(self, found: Found, folder: Path | None, train: Found) -> Iterator[str]:
        if found is train:
            if len(found.labels) < 2:
                yield f"{folder} needs a folder per class, at least two; found {len(found.labels)}"
            elif self.num_classes not in (None, len(found.labels)):
                yield f"{folder} has {len(found.labels)} classes, num_classes says {self.num_classes}; correct it"
        yield from _unknown_classes(found, folder, train.labels)
        if empty := sorted(set(found.labels) - {label for label, _ in found.pictures}):
            yield (
                f"{folder} has no pictures of {'class' if len(empty) == 1 else 'classes'} {quote_names(empty)} "
                f"({describe_left_out([found.left_out])}); add some, or remove the folder"
            )

    def _identity_of_test_sets(self) -> str:
        """Return a digest over the further test pictures and labels; empty without any.

        The content of pictures is not read, but their names and sizes: there are 75 times as many corrupted pictures as
        there are test pictures.  A process lists them again only after a change of one of their folders.
        """
        roots = {f"shifted/{name}": folder for name, folder in self._shifted_roots().items()}
        if self.corrupted_root is not None:
            roots["corrupted"] = files.expand_home(self.corrupted_root)
        parts = [digest_names_and_sizes(name, folder) for name, folder in sorted(roots.items())]
        if self.real_labels is not None:
            file = files.expand_home(self.real_labels)
            if not file.is_file():
                raise DataError(f"image_folder: there is no file {file}; correct 'real_labels'")
            parts.append(files.content_md5(file))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest() if parts else ""


def _unknown_classes(found: Found, folder: Path | None, labels: Sequence[str]) -> Iterator[str]:
    for label in sorted(set(found.labels) - set(labels)):
        yield f"{folder} has a class '{label}' that the training pictures do not have; move it or add it there"


def _folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder that are not hidden; an empty list if it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not is_hidden(path.name) and path.is_dir())


def find_class_pictures(folder: Path) -> Found:
    """Return the pictures below the class folders of a folder, those in subfolders included."""
    labels, left_out = set(), Counter[str]()
    pictures: list[Picture] = []
    for entry in sorted(folder.iterdir()):
        if is_hidden(entry.name):
            left_out["hidden"] += _count_files(entry)
        elif entry.is_dir():
            labels.add(label := compose_unicode(entry.name))
            pictures.extend((label, picture) for picture in pictures_below(entry, left_out))
        else:
            left_out["outside of a class folder"] += 1
    # Two folders of one name, in two forms of Unicode, are one class.
    return Found(sorted(labels), sorted(pictures, key=lambda picture: picture[0]), left_out)


def pictures_below(folder: Path, left_out: Counter[str]) -> list[str]:
    """Return the pictures in a folder and its subfolders, sorted by path components; count others in ``left_out``."""
    paths = []
    for current, names in _walk_visible_files(folder, left_out):
        for name in names:
            path, suffix = os.path.join(current, name), os.path.splitext(name)[1].lower()
            if suffix not in picture_suffixes():
                left_out[suffix or "no suffix"] += 1
            elif not os.path.isfile(path):
                left_out["broken link or special file"] += 1
            else:
                paths.append(path)
    return sorted(paths, key=lambda path: compose_unicode(path).split(os.sep))


def _walk_visible_files(folder: Path, left_out: Counter[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and each folder below, links to folders included, once, and the names of its files."""
    parent = folder.parent.resolve()
    seen = set(map(str, (parent, *parent.parents, *folder.resolve().parents)))  # a link to one of these would be a loop
    for current, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        if (real := os.path.realpath(current)) in seen:
            left_out[f"link to a folder that is read already: {current}"] += 1
            folders.clear()
            continue
        seen.add(real)
        left_out["hidden"] += sum(_count_files(Path(current, name)) for name in (*folders, *names) if is_hidden(name))
        # Links are followed last, so that a folder is read in its own place.
        folders[:] = [name for name in folders if not is_hidden(name)]
        folders.sort(key=lambda name: (os.path.islink(os.path.join(current, name)), compose_unicode(name)))
        yield current, [name for name in names if not is_hidden(name)]


def _raise(error: OSError) -> None:
    raise error  # os.walk would go on without the folder


def _count_files(entry: Path) -> int:
    """Return 1 for a file or a link, and the number of files below for a folder."""
    if entry.is_symlink() or not entry.is_dir():
        return 1
    return sum(len(names) for _, _, names in os.walk(entry))


def compose_unicode(name: str) -> str:
    """Return a name in Unicode's composed form; macOS stores decomposed ones."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"image_folder: {os.fsencode(name)!r} has a name that is not UTF-8; rename it") from None
    return unicodedata.normalize("NFC", name)


def describe_left_out(left_out: Iterable[Counter[str]]) -> str:
    """Return ``37 files left out (.txt 30, hidden 7)``; ``no files left out`` if there are none."""
    total = +sum(left_out, Counter[str]())
    if not total:
        return "no files left out"
    ordered = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    parts = ", ".join(f"{reason} {number:,}" for reason, number in ordered)
    return f"{format_count(total.total(), 'file')} left out ({parts})"


def relative_name(path: str, root: Path) -> str:
    """Return the path of a picture below a folder, equal on every system."""
    prefix = len(str(root / "x")) - 1  # 0 for the root '.', which paths do not show
    return compose_unicode(path[prefix:]).replace(os.sep, "/")


_digests_of_names: dict[tuple[str, Path], tuple[Mapping[str, int], str]] = {}


def digest_names_and_sizes(name: str, folder: Path) -> str:
    """Return a digest over names and sizes of the pictures below a folder; cached until one of its folders changes."""
    if not folder.is_dir():
        raise DataError(f"image_folder: there is no folder {folder}; correct its path in the study")
    key = name, folder.absolute()
    # Listing 75 times as many pictures as the test split has may take a minute, and a plan asks for each arm.
    changed, digest = _digests_of_names.get(key, ({}, ""))
    if not changed or any(os.stat(path).st_mtime_ns != time_ns for path, time_ns in changed.items()):
        # Before the listing, so that a change during it is noticed the next time.
        changed = {path: os.stat(path).st_mtime_ns for path, _ in _walk_visible_files(folder, Counter())}
        hashed = hashlib.blake2b(digest_size=16)
        for path in pictures_below(folder, Counter()):
            hashed.update(f"{name}\0{relative_name(path, folder)}\0{os.stat(path).st_size}\n".encode())
        digest = hashed.hexdigest()
        _digests_of_names[key] = changed, digest
    return digest


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
    try:
        content = _REAL_LABELS.validate_json(file.read_bytes())
    except ValidationError as error:
        # A wrong entry is deeper in one alternative than the wrong kind of the whole in the other.
        deepest = max((fault["loc"] for fault in error.errors()), key=len)
        place = ".".join(map(str, deepest[1:])) or "the file"
        raise DataError(
            f"{file} is neither a list of lists of class indices, as of ImageNet-ReaL, nor a mapping from names to "
            f"such lists: see {place}; correct 'real_labels'"
        ) from None
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
