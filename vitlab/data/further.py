"""Further test images: corrupted ones, computed or published, and sets of other pictures of the same classes.

N images of a split, B of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data import image_cache
from vitlab.data.corruption import corrupt
from vitlab.data.datasets.base import Dataset
from vitlab.data.datasets.pictures import Pictures
from vitlab.data.splits import FurtherSplit, Subset, TensorCache, select_classes
from vitlab.errors import DataError
from vitlab.geometry import DataInfo

MAX_MEMORY_SHARE = 1 / 8
"""Largest share of the machine's memory for the cached images of a process; further ones are corrupted each time."""


class CorruptedSplit(FurtherSplit):
    """Test images of one corruption and severity, computed batch by batch and cached for the next trials.

    Args:
        subset: The images.
        kind: Name of the corruption.
        severity: From 1 to 5.
        cache: Corrupted images by corruption, severity and positions; shared by the splits of a test set.
    """

    metric = "mce"

    def __init__(self, subset: Subset, kind: str, severity: int, cache: TensorCache) -> None:
        self.kind = kind
        self.severity = severity
        self.y_N = subset.y_N
        self.id_N = subset.id_N
        self._subset = subset
        self._cache = cache

    def at(self, part: slice) -> Tensor:
        """Return the corrupted images at some positions, uint8 (B, C, H, W)."""
        id_B = self.id_N[part]
        key = (self.kind, self.severity, len(self.id_N), part.start, part.stop)
        x_BCHW = self._cache.get(key)
        if x_BCHW is None:
            x_BCHW = corrupt(self._subset.at(part), self.kind, self.severity, id_B)
            self._cache.add(key, x_BCHW, int(MAX_MEMORY_SHARE * image_cache.memory()))
        return x_BCHW


class PictureSplit(FurtherSplit):
    """Test images in picture files, decoded at every evaluation.

    Args:
        subset: The images, in storage.
        metric: Name of the metric.
        kind: Name of the images in results.
        restricted: Whether predictions are among the classes that occur alone.
    """

    def __init__(self, subset: Subset, metric: str, kind: str, *, restricted: bool) -> None:
        self.metric = metric
        self.kind = kind
        self.y_N = subset.y_N
        self.id_N = subset.id_N
        self.classes = tuple(sorted(set(subset.y_N.tolist()))) if restricted else ()
        self._subset = subset

    def at(self, part: slice) -> Tensor:
        """Return the images at some positions, uint8 (B, C, H, W), decoded by several threads."""
        stored = self._subset.stored
        assert stored is not None
        row_B = self._subset.row_N[part]
        prefetcher = image_cache.Prefetcher(stored, torch.device("cpu"))

        def request(step: int) -> image_cache.ReadRequest | None:
            return image_cache.ReadRequest(row_B, row_B) if step == 0 else None

        return prefetcher.take(0, None, request)


def further_splits(
    dataset: Dataset, options: Mapping[str, Any], test: Subset, info: DataInfo, cache: TensorCache
) -> dict[str, FurtherSplit]:
    """Return the further test images of a trial by name, such as ``corrupted/fog/3``.

    The images are the same for every trial: neither their choice nor their corruption depends on a trial's seeds.

    Args:
        dataset: The data set.
        options: Its options.
        test: Its test split.
        info: Properties of the images as the model sees them.
        cache: See :class:`CorruptedSplit`.

    Raises:
        DataError: If a set has no images.
    """
    splits: dict[str, FurtherSplit] = {}
    corrupted = options["corrupted"]
    for kind in corrupted.corruptions if corrupted is not None else ():
        for severity in corrupted.severities:
            name = f"corrupted/{kind}/{severity}"
            pictures = dataset.corrupted(kind, severity)
            if pictures is None:
                splits[name] = CorruptedSplit(_limit(test, corrupted.images), kind, severity, cache)
            else:
                subset = _limit(_stored(pictures, info, options["classes"], name), corrupted.images)
                splits[name] = PictureSplit(subset, "mce", kind, restricted=False)
    for kind, pictures in dataset.shifted().items():
        subset = _stored(pictures, info, options["classes"], kind)
        splits[f"shifted/{kind}"] = PictureSplit(subset, "shifted_accuracy", kind, restricted=True)
    return splits


def _stored(pictures: Pictures, info: DataInfo, classes: Sequence[int] | None, what: str) -> Subset:
    """Return pictures of the selected classes with the channels and the size of the model's images."""
    id_N, y_N = select_classes(pictures.y_N, classes)
    if not len(id_N):
        raise DataError(f"{what}: there are no pictures of the classes of the training images; add some, or remove it")
    return Subset(image_cache.LazyDecode(pictures, info.channels, info.image), id_N, y_N, id_N)


def _limit(subset: Subset, count: int | None) -> Subset:
    """Return at most ``count`` images, in their order; a smaller count selects a part of those of a larger one."""
    if count is None or count >= len(subset):
        return subset
    word_N2 = noise.bits(noise.key(0, "corruption", "images"), subset.id_N, 2).long() & 0x7FFFFFFF
    order_N = torch.argsort((word_N2[:, 0] << 31) | word_N2[:, 1], stable=True)
    return subset.select(order_N[:count].sort().values)
