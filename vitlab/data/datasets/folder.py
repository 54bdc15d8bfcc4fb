"""``image_folder``: pictures of your own, one folder per class, as torchvision and Keras read them.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from vitlab.data.datasets import files
from vitlab.data.datasets.base import Dataset, Images, Split, dataset
from vitlab.data.datasets.pictures import Fit, check_memory, decode
from vitlab.data.options import Size
from vitlab.errors import DataError
from vitlab.geometry import DataInfo, Pair
from vitlab.slots import Unhashed

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TEST_FOLDERS = ("test", "val")
"""The first that is there is the test split; validation is split off ``train`` as for every data set."""


@dataset.register("image_folder")
class ImageFolder(Dataset):
    """``root/train/<class>/*`` to train on and ``root/test/<class>/*`` (or ``val``) to test on, in colour.

    Pictures may lie in folders below their class's.  All are decoded into memory; a set that would not fit is refused.
    Its identity is a digest over the relative path, the size and the content of every picture.
    """

    def __init__(
        self,
        *,
        root: Annotated[str, Unhashed()],
        image_size: Size = (224, 224),
        fit: Fit = "crop",
        num_classes: Annotated[int, Field(ge=2)] | None = None,
    ) -> None:
        """
        Args:
            root: the folder with ``train`` and ``test`` (or ``val``).
            image_size: pixels that every picture is brought to, by antialiased bilinear interpolation.
            fit: ``crop`` resizes until both sides are covered and cuts out the middle, ``squash`` ignores proportions.
            num_classes: how many there are; needed only to plan where the folder is not.
        """
        self.root = Path(root).expanduser()
        self.image_size: Pair = image_size
        self.fit: Fit = fit
        self.num_classes = num_classes

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
        reason = self.missing()
        if reason is not None:
            raise DataError(reason)
        index = {label: i for i, label in enumerate(self._labels())}
        found = [(path, index[label]) for label, path in self._pictures(split)]
        needed = len(found) * 3 * self.image_size[0] * self.image_size[1]
        check_memory(needed, f"image_folder: the pictures of {self.root}")
        x_NCHW = torch.empty((len(found), 3, *self.image_size), dtype=torch.uint8)
        for x_CHW, (path, _) in zip(x_NCHW, found, strict=True):
            x_CHW.copy_(decode(path, self.image_size, self.fit))
        return Images(x_NCHW, torch.tensor([label for _, label in found], dtype=torch.int64))

    def _test(self) -> Path | None:
        return next((self.root / name for name in TEST_FOLDERS if (self.root / name).is_dir()), None)

    def _labels(self) -> list[str]:
        labels = sorted(path.name for path in (self.root / "train").iterdir() if path.is_dir())
        if len(labels) < 2:
            raise DataError(f"image_folder: {self.root / 'train'} needs a folder for each class; it has {len(labels)}")
        if self.num_classes not in (None, len(labels)):
            raise DataError(
                f"image_folder: {self.root / 'train'} has {len(labels)} classes, num_classes says {self.num_classes}"
            )
        return labels

    def _pictures(self, split: Split) -> list[tuple[str, Path]]:
        """Class and path of each picture, classes and relative paths in the order of their names."""
        base = self.root / "train" if split == "train" else self._test()
        assert base is not None  # missing() has been asked
        labels = self._labels()
        unknown = sorted(path.name for path in base.iterdir() if path.is_dir() and path.name not in labels)
        if unknown:
            raise DataError(f"image_folder: {base} has a class '{unknown[0]}' that {self.root / 'train'} has not")
        return [
            (label, path)
            for label in labels
            for path in sorted((base / label).rglob("*"))
            if path.suffix.lower() in SUFFIXES and path.is_file()
        ]

    def _identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for split in ("train", "test"):
            for label, path in self._pictures(split):
                name = path.relative_to(self.root).as_posix()
                digest.update(f"{split}\0{label}\0{name}\0{path.stat().st_size}\0{files.checksum(path)}\n".encode())
        return f"image_folder:{digest.hexdigest()}"
