"""Test sets beside the test split: corrupted images, computed or published, other pictures of the classes, new labels.

N images of a test set, B of a batch, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data import draws
from vitlab.data.datasets.base import COMPUTED_CORRUPTIONS, CORRUPTIONS, Dataset
from vitlab.data.datasets.pictures import Pictures, memory
from vitlab.data.image_cache import StoredImages
from vitlab.data.splits import Subset, select_classes
from vitlab.errors import DataError
from vitlab.geometry import DataInfo

MAX_MEMORY_SHARE = 1 / 8
"""Largest share of the machine's memory for the cached images of a process; others are corrupted each time."""


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


TensorCache = dict[Hashable, Tensor]


def test_sets(
    dataset: Dataset, options: Mapping[str, Any], test: Subset, info: DataInfo, cache: TensorCache
) -> dict[str, TestSet]:
    """Return the test sets of a trial by name, such as ``corrupted/fog/3``.

    The images are the same for every trial: neither their choice nor their corruption depends on a trial's seeds.

    Args:
        dataset: The data set.
        options: Its options.
        test: Its test split.
        info: Properties of the images as the model sees them.
        cache: Corrupted images by corruption, severity and positions, for the next trials.

    Raises:
        DataError: If a set has no images.
    """
    sets: dict[str, TestSet] = {}
    corrupted, classes = options["corrupted"], options["classes"]
    every = CORRUPTIONS if options.get("corrupted_root") else COMPUTED_CORRUPTIONS
    for kind in () if corrupted is None else corrupted.corruptions or every:
        for severity in corrupted.severities:
            name = f"corrupted/{kind}/{severity}"
            pictures = dataset.corrupted(kind, severity)
            subset = _limit(test if pictures is None else _stored(pictures, info, classes, name), corrupted.images)
            at = _corruption(subset, kind, severity, cache) if pictures is None else subset.at
            sets[name] = TestSet("mce", kind, subset.y_N, subset.id_N, at)
    for name, pictures in dataset.shifted().items():
        subset = _stored(pictures, info, classes, name)
        occurring = tuple(sorted(set(subset.y_N.tolist())))
        sets[f"shifted/{name}"] = TestSet("shifted_accuracy", name, subset.y_N, subset.id_N, subset.at, occurring)
    if (right := dataset.reassessed()) is not None:
        sets["real_labels"] = _reassessed(test, right, info.classes, classes)
    return sets


def _corruption(subset: Subset, kind: str, severity: int, cache: TensorCache) -> Callable[[slice], Tensor]:
    def at(part: slice) -> Tensor:
        from vitlab.data.corruption import corrupt  # imported for the few studies that ask for corrupted images

        key = (kind, severity, len(subset), part.start, part.stop)
        x_BCHW = cache.get(key)
        if x_BCHW is None:
            x_BCHW = corrupt(subset.at(part), kind, severity, subset.id_N[part])
            if sum(cached.nbytes for cached in (*cache.values(), x_BCHW)) <= MAX_MEMORY_SHARE * memory():
                cache[key] = x_BCHW
        return x_BCHW

    return at


def _reassessed(test: Subset, right: Sequence[frozenset[int]], count: int, classes: Sequence[int] | None) -> TestSet:
    """Return the test images whose set of right classes is not empty.

    Args:
        test: the test split.
        right: the set of each image of the official test split.
        count: number of classes.
        classes: the selected classes; None for all.
    """
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


def _stored(pictures: Pictures, info: DataInfo, classes: Sequence[int] | None, what: str) -> Subset:
    """Return pictures of the selected classes with the channels and the size of the model's images."""
    id_N, y_N = select_classes(pictures.y_N, classes)
    if not len(id_N):
        raise DataError(f"{what}: there are no pictures of the classes of the training images; add some, or remove it")
    return Subset(StoredImages(pictures, info.channels, info.image), id_N, y_N, id_N)


def _limit(subset: Subset, count: int | None) -> Subset:
    """Return at most ``count`` images, in their order; a smaller count selects a part of those of a larger one."""
    if count is None or count >= len(subset):
        return subset
    one_class_N = torch.zeros_like(subset.id_N)
    return subset.select(draws.at_most(one_class_N, subset.id_N, count, noise.key(0, "corruption", "images")))
