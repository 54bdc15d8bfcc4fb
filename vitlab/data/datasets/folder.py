"""``image_folder``: pictures of your own, one folder per class, as torchvision and Keras read them.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from vitlab.data.datasets import files
from vitlab.data.datasets.base import SPLITS, Dataset, Images, Split, dataset
from vitlab.data.datasets.pictures import Decoded, Fit, Pictures, check_memory
from vitlab.data.options import Size
from vitlab.errors import DataError
from vitlab.geometry import DataInfo, Pair
from vitlab.registry import Unhashed

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TEST_FOLDERS = ("test", "val")
"""The first that is there is the test split; validation is split off ``train`` as for every data set."""

SETTLED_S = 10.0
"""For so long after a picture was written, it may be written again and have the same time of change."""


@dataset.register("image_folder")
class ImageFolder(Dataset):
    """``root/train/<class>/*`` to train on and ``root/test/<class>/*`` (or ``val``) to test on, in colour.

    Pictures may lie in folders below their class's.  A set that is large beside the memory of the machine is not
    decoded as a whole, see ``decoded``.  Its identity is a digest over the relative path, the size and the content of
    every picture; it is remembered between processes for as long as no picture has been written to since.
    """

    def __init__(
        self,
        *,
        root: Annotated[str, Unhashed()],
        image_size: Size = (224, 224),
        fit: Fit = "crop",
        num_classes: Annotated[int, Field(ge=2)] | None = None,
        decoded: Annotated[Decoded, Unhashed()] = "auto",
    ) -> None:
        """
        Args:
            root: the folder with ``train`` and ``test`` (or ``val``).
            image_size: pixels that every picture is brought to, by antialiased bilinear interpolation.
            fit: ``crop`` resizes until both sides are covered and cuts out the middle, ``squash`` ignores proportions.
            num_classes: how many there are; needed only to plan where the folder is not.
            decoded: where decoded pictures are kept: ``memory``, of every worker; ``disk``, once for all of them, below
                the user's cache; or ``never``: they are decoded as batches ask for them, by as many threads as the
                trial has.  ``auto``: in memory up to a quarter of it, and beyond that never.  Batches are the same.
        """
        self.root = Path(os.path.expanduser(root))
        self.image_size: Pair = image_size
        self.fit: Fit = fit
        self.num_classes = num_classes
        self.decoded: Decoded = decoded

    def missing(self) -> str | None:
        if not self.root.is_dir():
            return f"image_folder: there is no folder {self.root}"
        if not (self.root / "train").is_dir():
            return f"image_folder: {self.root} has no folder 'train' with one folder per class"
        if self._test() is None:
            return f"image_folder: {self.root} has no folder {' or '.join(map(repr, TEST_FOLDERS))} to test on"
        return None

    def info(self) -> DataInfo:
        reason = self.missing()
        if reason is not None:
            if self.num_classes is None:
                raise DataError(f"{reason}; to plan without it, say how many classes there are with 'num_classes'")
            return DataInfo(image=self.image_size, channels=3, classes=self.num_classes)
        labels = self._labels()
        return DataInfo(
            image=self.image_size, channels=3, classes=len(labels), identity=self._identity(), labels=tuple(labels)
        )

    def read(self, split: Split) -> Images:
        pictures = self.pictures(split)
        needed = len(pictures) * 3 * self.image_size[0] * self.image_size[1]
        check_memory(needed, f"image_folder: the pictures of {self.root}")
        x_NCHW = torch.empty((len(pictures), 3, *self.image_size), dtype=torch.uint8)
        for index, x_CHW in enumerate(x_NCHW):
            x_CHW.copy_(pictures.image(index))
        return Images(x_NCHW, pictures.y_N)

    def pictures(self, split: Split) -> Pictures:
        reason = self.missing()
        if reason is not None:
            raise DataError(reason)
        index = {label: i for i, label in enumerate(self._labels())}
        found = self._pictures(split)
        y_N = torch.tensor([index[label] for label, _ in found], dtype=torch.int64)
        return Pictures([path for _, path in found], y_N, self.image_size, self.fit, self.decoded)

    def _test(self) -> Path | None:
        return next((self.root / name for name in TEST_FOLDERS if (self.root / name).is_dir()), None)

    def _labels(self) -> list[str]:
        labels = sorted(_text(path.name, path) for path in (self.root / "train").iterdir() if path.is_dir())
        if len(labels) < 2:
            raise DataError(f"image_folder: {self.root / 'train'} needs a folder for each class; it has {len(labels)}")
        if self.num_classes not in (None, len(labels)):
            raise DataError(
                f"image_folder: {self.root / 'train'} has {len(labels)} classes, num_classes says {self.num_classes}"
            )
        return labels

    def _pictures(self, split: Split) -> list[tuple[str, str]]:
        """Class and path of each picture, classes and relative paths in the order of their names."""
        base = self.root / "train" if split == "train" else self._test()
        assert base is not None  # missing() has been asked
        labels = self._labels()
        names = [_text(path.name, path) for path in base.iterdir() if path.is_dir()]
        unknown = sorted(name for name in names if name not in labels)
        if unknown:
            raise DataError(f"image_folder: {base} has a class '{unknown[0]}' that {self.root / 'train'} has not")
        # Paths are text until they are wanted as more: there may be a million of them.
        return [(label, path) for label in labels for path in _below(os.path.join(base, label))]

    def _identity(self) -> str:
        """A digest over content; looked up where names, sizes, inodes and times of change are those it was made of."""
        begun, seen, latest, listed = time.time(), hashlib.blake2b(digest_size=16), 0.0, []
        before = len(str(self.root / "train")) - len("train")  # of what is '.', nothing stands in a path
        for split in SPLITS:
            for label, path in self._pictures(split):
                stat, of = os.stat(path), f"{split}\0{label}\0{path[before:].replace(os.sep, '/')}"
                latest = max(latest, stat.st_ctime)
                listed.append((f"{of}\0{stat.st_size}", path))
                state = (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
                seen.update(f"{of}\0{state}\n".encode())
        note = files.cache() / "identities" / seen.hexdigest()
        if (known := files.noted(note)) is not None:
            return known
        digest = hashlib.blake2b(digest_size=16)
        for of, path in listed:
            digest.update(f"{of}\0{files.checksum(Path(path))}\n".encode())
        identity = f"image_folder:{digest.hexdigest()}"
        if latest < begun - SETTLED_S:  # reading them may take longer than that
            files.note(note, identity)
        return identity


def _text(name: str, path: os.PathLike[str] | str) -> str:
    """Return the name of a file or folder.

    Raises:
        DataError: if it is no text, and so can stand neither in an identity nor in a report.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"image_folder: {os.fsencode(path)!r} has a name that is not UTF-8; rename it") from None
    return name


def _below(folder: str) -> list[str]:
    """The pictures in a folder and those below it, in the order of their names, folder by folder."""
    found, waiting = [], [folder]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError as error:
            raise DataError(f"image_folder: a folder cannot be listed: {error}") from None
        for entry in entries:
            _text(entry.name, entry.path)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                found.append(entry.path)
    return sorted(found, key=lambda path: path.split(os.sep))
