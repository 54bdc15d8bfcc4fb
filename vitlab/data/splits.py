"""The splits of a data set, and test sets beside its test split.

Test sets are corrupted images, computed or published, other pictures of the classes, and new labels.

N images of a split or test set, M of an official split, B of a batch, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vitlab import noise
from vitlab.data import draws
from vitlab.data.datasets.base import COMPUTED_CORRUPTIONS, CORRUPTIONS, Dataset, Images
from vitlab.data.datasets.pictures import Pictures
from vitlab.data.image_cache import StoredImages
from vitlab.data.pixels import convert_channels, resize, resize_masks
from vitlab.errors import DataError
from vitlab.geometry import DataInfo


@dataclass(frozen=True)
class Subset:
    """Images of one split.  On the CPU, subsets of one official split share its pixels."""

    pixels_MCHW: Tensor | StoredImages  #: uint8, all images of the official split
    row_N: Tensor  #: int64, rows of ``pixels_MCHW`` in this subset
    y_N: Tensor  #: int64; uint8 (N, H, W) for segmentation, uint8 (N, K) for images of several classes
    id_N: Tensor  #: int64, position in the official split, by which draws are keyed in any split or fraction

    def __len__(self) -> int:
        return len(self.y_N)

    @property
    def x_NCHW(self) -> Tensor:
        """A copy of all images, uint8."""
        return self.at(slice(None))

    @property
    def stored(self) -> StoredImages | None:
        """The storage of the images; None if they are in memory."""
        return None if isinstance(self.pixels_MCHW, Tensor) else self.pixels_MCHW

    def at(self, position_B: Tensor | slice) -> Tensor:
        """Return the images at some positions, uint8 (B, C, H, W)."""
        return self.images_in_rows(self.row_N[position_B])

    def images_in_rows(self, row_B: Tensor) -> Tensor:
        """Return the images in some rows of ``pixels_MCHW``, uint8 (B, C, H, W)."""
        if isinstance(self.pixels_MCHW, Tensor):
            # It copies whole images; indexing copies pixel by pixel.
            return self.pixels_MCHW.index_select(0, noise.to_device(row_B, self.pixels_MCHW.device))
        return self.pixels_MCHW.take(row_B)

    def select(self, position_N: Tensor) -> Subset:
        """Return the subset of the images at these positions."""
        return Subset(self.pixels_MCHW, self.row_N[position_N], self.y_N[position_N], self.id_N[position_N])

    def to(self, device: torch.device) -> Subset:
        """Return the subset with its images on a device; rows, labels and identities stay on the host.

        All subsets of one official split share the copy, in all trials of this process.  The subset itself is returned
        if its images are in storage or already on the device.
        """
        if not isinstance(self.pixels_MCHW, Tensor) or self.pixels_MCHW.device == device:
            return self
        copies = _copies.setdefault(self.pixels_MCHW, {})
        if device not in copies:
            copies[device] = self.pixels_MCHW.to(device)
        return replace(self, pixels_MCHW=copies[device])


_copies: MutableMapping[Tensor, dict[torch.device, Tensor]] = WeakTensorKeyDictionary()
"""Copies of the images of official splits by device, as long as the images themselves are in memory."""


@dataclass(frozen=True)
class TestSet:
    """Images on which a training is evaluated once more, at its end, such as corrupted ones."""

    metric: str  #: name of its metric
    kind: str  #: kind of the images; values of one kind are averaged, and reported under its name
    y_N: Tensor  #: int64, class indices; rows of ``right_NK`` if there are any
    id_N: Tensor  #: int64, identities of the images
    at: Callable[[slice], Tensor]  #: returns the images at some positions, uint8 (B, C, H, W), on the CPU
    classes: tuple[int, ...] = ()  #: classes that predictions are among; empty for all
    right_NK: Tensor | None = None  #: bool, the right classes of each image


@dataclass(frozen=True)
class Prepared:
    """A data set ready to train on."""

    train: Subset
    val: Subset
    test: Subset
    info: DataInfo  #: of the model's inputs; its identity is of the files that were read
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    test_sets: Mapping[str, TestSet]  #: by name


def select_and_resize(split: Images, options: Mapping[str, Any]) -> Subset:
    """Return an official split after ``classes``, ``channels`` and ``size``."""
    x_NCHW, y_N = split
    id_N, y_N = select_classes(y_N, options["classes"])
    if options["classes"]:
        x_NCHW = x_NCHW[id_N]
    if options["channels"]:
        x_NCHW = convert_channels(x_NCHW, options["channels"])
    if options["size"]:
        x_NCHW = resize(x_NCHW, options["size"])
        y_N = resize_masks(y_N, options["size"]) if y_N.ndim == 3 else y_N
    return Subset(x_NCHW, torch.arange(len(y_N)), y_N, id_N)


def select_images(images: StoredImages, classes: Sequence[int] | None) -> Subset:
    """Return the images of the selected classes."""
    id_N, y_N = select_classes(images.pictures.y_N, classes)
    return Subset(images, id_N, y_N, id_N)


def select_classes(y_N: Tensor, classes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Return the indices of the images of the selected classes, and their new labels."""
    if not classes:
        return torch.arange(len(y_N)), y_N
    new_labels = {old: new for new, old in enumerate(classes)}
    new_N = torch.tensor([new_labels.get(label, -1) for label in y_N.tolist()], dtype=torch.int64)
    id_N = (new_N >= 0).nonzero()[:, 0]
    return id_N, new_N[id_N]


def make_test_sets(dataset: Dataset, options: Mapping[str, Any], test: Subset, info: DataInfo) -> dict[str, TestSet]:
    """Return the test sets of a trial by name, such as ``corrupted/fog/3``.

    The images are the same for every trial: neither their choice nor their corruption depends on a trial's seeds.

    Raises:
        DataError: if a set has no images.
    """
    sets = {}
    corrupted, classes = options["corrupted"], options["classes"]
    every = CORRUPTIONS if options.get("corrupted_root") else COMPUTED_CORRUPTIONS
    for kind in () if corrupted is None else corrupted.corruptions or every:
        for severity in corrupted.severities:
            name = f"corrupted/{kind}/{severity}"
            pictures = dataset.corrupted(kind, severity)
            subset = test if pictures is None else _nonempty_class_subset(pictures, info, classes, name)
            if corrupted.images is not None:  # a smaller number selects a part of a larger one's
                # Not stratified: the share of classes is the test split's on average.
                one_class_N, key = torch.zeros_like(subset.id_N), noise.key(0, "corruption", "images")
                subset = subset.select(draws.limit_per_class(one_class_N, subset.id_N, corrupted.images, key))
            at = partial(_read_corrupted, subset, kind, severity) if pictures is None else subset.at
            sets[name] = TestSet("mce", kind, subset.y_N, subset.id_N, at)
    for name, pictures in dataset.shifted_sets().items():
        subset = _nonempty_class_subset(pictures, info, classes, name)
        occurring = tuple(sorted(set(subset.y_N.tolist())))
        sets[f"shifted/{name}"] = TestSet("shifted_accuracy", name, subset.y_N, subset.id_N, subset.at, occurring)
    if (right := dataset.reassessed()) is not None:
        sets["real_labels"] = _make_real_labels_set(test, right, info.classes, classes)
    return sets


def _read_corrupted(subset: Subset, kind: str, severity: int, part: slice) -> Tensor:
    from vitlab.data.corruption import corrupt  # imported for the few studies that ask for corrupted images

    return corrupt(subset.at(part), kind, severity, subset.id_N[part])


def _make_real_labels_set(
    test: Subset, right: Sequence[frozenset[int]], count: int, classes: Sequence[int] | None
) -> TestSet:
    """Return the test images whose set of right classes, of the selected ones, is not empty."""
    place = {old: new for new, old in enumerate(classes or range(count))}
    right_NK = torch.zeros(len(test), count, dtype=torch.bool)
    for right_K, identity in zip(right_NK, test.id_N.tolist(), strict=True):
        right_K[[place[label] for label in right[identity] if label in place]] = True
    kept_N = right_NK.any(1).nonzero()[:, 0]
    if not len(kept_N):
        raise DataError("real_labels: no test image has a right class; correct the file, or remove the option")
    subset = test.select(kept_N)
    y_N = torch.arange(len(kept_N))
    return TestSet("real_accuracy", "real_labels", y_N, subset.id_N, subset.at, right_NK=right_NK[kept_N])


def _nonempty_class_subset(pictures: Pictures, info: DataInfo, classes: Sequence[int] | None, what: str) -> Subset:
    """Return pictures of the selected classes with the channels and the size of the model's images."""
    subset = select_images(StoredImages(pictures, info.channels, info.image), classes)
    if not len(subset):
        raise DataError(f"{what}: there are no pictures of the classes of the training images; add some, or remove it")
    return subset
