"""``image_folder``: your own pictures, one folder per class, as in torchvision and Keras.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field

from vitlab.data.datasets import files
from vitlab.data.datasets.base import SPLITS, CorruptionName, Dataset, Images, Size, Split, dataset
from vitlab.data.datasets.pictures import Decoded, Fit, Pictures, check_memory
from vitlab.errors import DataError
from vitlab.geometry import DataInfo, Pair
from vitlab.registry import Unhashed

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TEST_FOLDERS = ("test", "val")
"""The first of these that exists is the test split; validation is split off ``train``."""

SETTLED_S = 10.0
"""Seconds after a write during which a second write may leave the same timestamp."""


@dataset.register("image_folder")
class ImageFolder(Dataset):
    """Colour pictures in ``root/train/<class>/*`` to train on and ``root/test/<class>/*`` (or ``val``) to test on.

    Pictures may be in subfolders of their class's folder.  A set that is too large for memory is not decoded as a
    whole, see ``decoded``.  The identity is a digest over the relative path, size and content of every picture; it is
    cached between processes until a picture is written to.

    Args:
        root: the folder with ``train`` and ``test`` (or ``val``).
        image_size: pixels of every picture after an antialiased bilinear resize.
        fit: ``crop`` resizes to cover both sides and crops the centre, ``squash`` ignores proportions.
        num_classes: number of classes; required only to plan on a machine without the folder.
        decoded: place for decoded pictures: ``memory``, of every worker; ``disk``, one copy for all workers in the
            user's cache; or ``never``: each batch is decoded anew by the trial's threads.  ``auto``: memory if the
            set fits into a quarter of it, else never.  Batches do not depend on it.
        corrupted_root: folder of published corrupted test pictures, ``CORRUPTION/SEVERITY/CLASS/*`` as in ImageNet-C,
            which ``corrupted`` reads instead of corrupting the test split.
        shifted: further test sets: name to a folder ``CLASS/*`` with some of the classes of ``train``, such as
            ImageNet-R and ImageNet-A.
    """

    def __init__(
        self,
        *,
        root: Annotated[str, Unhashed()],
        image_size: Size = (224, 224),
        fit: Fit = "crop",
        num_classes: Annotated[int, Field(ge=2)] | None = None,
        decoded: Annotated[Decoded, Unhashed()] = "auto",
        corrupted_root: Annotated[str | None, Unhashed()] = None,
        shifted: Annotated[dict[Annotated[str, Field(pattern=r"^\w+$")], str], Unhashed()] = {},
    ) -> None:
        self.root = Path(os.path.expanduser(root))
        self.image_size: Pair = image_size
        self.fit: Fit = fit
        self.num_classes = num_classes
        self.decoded: Decoded = decoded
        self.corrupted_root = None if corrupted_root is None else Path(os.path.expanduser(corrupted_root))
        self.shifted_roots = {name: Path(os.path.expanduser(folder)) for name, folder in (shifted or {}).items()}

    def missing(self) -> str | None:
        """Return a sentence that names the missing folder; None if all exist."""
        if not self.root.is_dir():
            return f"image_folder: there is no folder {self.root}; set 'root' to the folder of your pictures"
        if not (self.root / "train").is_dir():
            return f"image_folder: {self.root} has no folder 'train'; create it, with one folder per class"
        if self._test() is None:
            return (
                f"image_folder: {self.root} has no folder {' or '.join(map(repr, TEST_FOLDERS))} to test on; create "
                "it, with one folder per class"
            )
        return None

    def info(self) -> DataInfo:
        """Return the facts of the data set; without a folder, ``num_classes`` says how many there are."""
        reason = self.missing()
        if reason is not None:
            if self.num_classes is None:
                raise DataError(f"{reason}. To plan without it, set 'num_classes'.")
            return DataInfo(image=self.image_size, channels=3, classes=self.num_classes)
        labels = self._labels()
        pictures = {split: self._pictures(split) for split in SPLITS}
        return DataInfo(
            image=self.image_size,
            channels=3,
            classes=len(labels),
            identity=self._identity(pictures),
            labels=tuple(labels),
            further=self._further_identity(),
            test_images=len(pictures["test"]) if self.corrupted_root is None else None,
        )

    def read(self, split: Split) -> Images:
        """Decode and resize a split into memory."""
        pictures = self.pictures(split)
        required = len(pictures) * 3 * self.image_size[0] * self.image_size[1]
        check_memory(required, f"image_folder: the pictures of {self.root}")
        x_NCHW = torch.empty((len(pictures), 3, *self.image_size), dtype=torch.uint8)
        for index, x_CHW in enumerate(x_NCHW):
            x_CHW.copy_(pictures.image(index))
        return Images(x_NCHW, pictures.y_N)

    def pictures(self, split: Split) -> Pictures:
        """Return the paths and labels of a split."""
        reason = self.missing()
        if reason is not None:
            raise DataError(reason)
        index = {label: i for i, label in enumerate(self._labels())}
        files_of_split = self._pictures(split)
        y_N = torch.tensor([index[label] for label, _ in files_of_split], dtype=torch.int64)
        return Pictures([path for _, path in files_of_split], y_N, self.image_size, self.fit, self.decoded)

    def corrupted(self, kind: CorruptionName, severity: int) -> Pictures | None:
        """Return the paths and labels of a published corruption, in a folder ``corrupted_root`` or one below it."""
        if self.corrupted_root is None:
            return None
        name = Path(kind, str(severity))
        folders = [self.corrupted_root / name, *sorted(self.corrupted_root.glob(f"*/{name}"))]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            raise DataError(
                f"image_folder: {self.corrupted_root} has no folder {name}; add it, or leave it out of 'corrupted'"
            )
        return self._labelled(folder)

    def shifted(self) -> Mapping[str, Pictures]:
        """Return the paths and labels of the further test sets."""
        return {name: self._labelled(folder) for name, folder in self.shifted_roots.items()}

    def _labelled(self, folder: Path) -> Pictures:
        """Return the pictures of a folder with a folder for each of some classes."""
        if not folder.is_dir():
            raise DataError(f"image_folder: there is no folder {folder}; correct its path in the study")
        pictures = [(label, path) for label in self._classes_in(folder) for path in _walk(os.path.join(folder, label))]
        index = {label: i for i, label in enumerate(self._labels())}
        y_N = torch.tensor([index[label] for label, _ in pictures], dtype=torch.int64)
        return Pictures([path for _, path in pictures], y_N, self.image_size, self.fit)

    def _test(self) -> Path | None:
        return next((self.root / name for name in TEST_FOLDERS if (self.root / name).is_dir()), None)

    def _labels(self) -> list[str]:
        labels = sorted(_check_name(path.name, path) for path in (self.root / "train").iterdir() if path.is_dir())
        if len(labels) < 2:
            raise DataError(
                f"image_folder: {self.root / 'train'} needs a folder per class, at least two; found {len(labels)}"
            )
        if self.num_classes not in (None, len(labels)):
            raise DataError(
                f"image_folder: {self.root / 'train'} has {len(labels)} classes, num_classes says {self.num_classes}; "
                "correct it"
            )
        return labels

    def _pictures(self, split: Split) -> list[tuple[str, str]]:
        """Return class and path of each picture, sorted by class and relative path."""
        base = self.root / "train" if split == "train" else self._test()
        assert base is not None  # callers check missing() first
        self._classes_in(base)
        # Paths stay strings, because there may be a million of them.
        return [(label, path) for label in self._labels() for path in _walk(os.path.join(base, label))]

    def _classes_in(self, base: Path) -> list[str]:
        """Return the class folders of a folder, each of which is one of the training split."""
        labels = self._labels()
        names = [_check_name(path.name, path) for path in base.iterdir() if path.is_dir()]
        unknown = sorted(name for name in names if name not in labels)
        if unknown:
            raise DataError(
                f"image_folder: {base} has a class '{unknown[0]}' that {self.root / 'train'} does not have; move it or "
                "add it there"
            )
        return sorted(names)

    def _identity(self, pictures: Mapping[Split, Sequence[tuple[str, str]]]) -> str:
        """Return a digest over content, cached by names, sizes, inodes and modification times."""
        start, state_digest, latest, entries = time.time(), hashlib.blake2b(digest_size=16), 0.0, []
        prefix = len(str(self.root / "train")) - len("train")  # 0 for the root '.', which paths do not show
        for split in SPLITS:
            for label, path in pictures[split]:
                stat, entry = os.stat(path), f"{split}\0{label}\0{path[prefix:].replace(os.sep, '/')}"
                latest = max(latest, stat.st_ctime)
                entries.append((f"{entry}\0{stat.st_size}", path))
                state = (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
                state_digest.update(f"{entry}\0{state}\n".encode())
        note = files.cache() / "identities" / state_digest.hexdigest()
        if (cached := files.read_note(note)) is not None:
            return cached
        digest = hashlib.blake2b(digest_size=16)
        for entry, path in entries:
            digest.update(f"{entry}\0{files.checksum(Path(path))}\n".encode())
        identity = f"image_folder:{digest.hexdigest()}"
        if latest < start - SETTLED_S:  # measured from the start, as reading may take longer than that
            files.write_note(note, identity)
        return identity

    def _further_identity(self) -> str:
        """Return a digest over names and sizes of the further test pictures; empty without any.

        Their content is not read: there are 75 times as many corrupted pictures as there are test pictures.  A process
        lists them again only after a change of one of their folders.
        """
        roots = {f"shifted/{name}": folder for name, folder in self.shifted_roots.items()}
        if self.corrupted_root is not None:
            roots["corrupted"] = self.corrupted_root
        if not roots:
            return ""
        key = tuple((name, os.path.abspath(folder)) for name, folder in sorted(roots.items()))
        if key in _listings and all(_modified(folder) == time_ns for folder, time_ns in _listings[key].folders):
            return _listings[key].digest
        start, digest, folders = time.time(), hashlib.blake2b(digest_size=16), []
        for name, folder in sorted(roots.items()):
            if not folder.is_dir():
                raise DataError(f"image_folder: there is no folder {folder}; correct its path in the study")
            paths, below = _list(str(folder))
            for path in paths:
                entry = os.path.relpath(path, folder).replace(os.sep, "/")
                digest.update(f"{name}\0{entry}\0{os.stat(path).st_size}\n".encode())
            folders += below
        if all(time_ns < (start - SETTLED_S) * 1e9 for _, time_ns in folders):
            _listings[key] = _Listing(folders, digest.hexdigest())
        return digest.hexdigest()


class _Listing(NamedTuple):
    """The folders of further test pictures with their modification times, and the digest of the pictures."""

    folders: Sequence[tuple[str, int]]
    digest: str


_listings: dict[tuple[tuple[str, str], ...], _Listing] = {}


def _check_name(name: str, path: os.PathLike[str] | str) -> str:
    """Return the name of a file or folder.

    Raises:
        DataError: if it is not valid UTF-8, which identities and reports need.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"image_folder: {os.fsencode(path)!r} has a name that is not UTF-8; rename it") from None
    return name


def _walk(folder: str) -> list[str]:
    """Return the pictures in a folder and its subfolders, sorted by path components."""
    return _list(folder)[0]


def _list(folder: str) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the pictures in a folder and its subfolders, sorted by path components, and the state of each folder.

    The state is its absolute path, and the time of its last change as of before it is listed.
    """
    paths, folders, pending = [], [], [folder]
    while pending:
        current = pending.pop()
        folders.append((os.path.abspath(current), _modified(current)))
        try:
            entries = list(os.scandir(current))
        except OSError as error:
            raise DataError(
                f"image_folder: {error.filename} cannot be listed ({error.strerror}); check that it exists and may be "
                "read"
            ) from None
        for entry in entries:
            _check_name(entry.name, entry.path)
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                paths.append(entry.path)
    return sorted(paths, key=lambda path: path.split(os.sep)), folders


def _modified(folder: str) -> int:
    """Return the time of the last change of a folder's entries in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
