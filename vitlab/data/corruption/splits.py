"""Corrupted copies of a test split, computed batch by batch and cached for the next trials of a process.

N images of a split, B of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data import image_cache
from vitlab.data.corruption import corrupt
from vitlab.data.datasets.base import Corrupted
from vitlab.data.splits import FurtherSplit, Subset

MAX_MEMORY_SHARE = 1 / 8
"""Largest share of the machine's memory for the cached images of a process; further ones are corrupted each time."""

Cache = dict[tuple[Any, ...], Tensor]


class CorruptedSplit(FurtherSplit):
    """Test images of one corruption and severity.

    Args:
        subset: The images.
        kind: Name of the corruption.
        severity: From 1 to 5.
        cache: Corrupted images by corruption, severity and identities; shared by the splits of a test set.
    """

    def __init__(self, subset: Subset, kind: str, severity: int, cache: Cache) -> None:
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
        if key in self._cache:
            return self._cache[key]
        x_BCHW = corrupt(self._subset.at(part), self.kind, self.severity, id_B)
        stored = sum(cached_BCHW.nbytes for cached_BCHW in self._cache.values())
        if stored + x_BCHW.nbytes <= MAX_MEMORY_SHARE * image_cache.memory():
            self._cache[key] = x_BCHW
        return x_BCHW


def corrupted_splits(test: Subset, corrupted: Corrupted, cache: Cache) -> dict[str, CorruptedSplit]:
    """Return the corrupted copies of a test split by name, such as ``corrupted/fog/3``.

    The images are the same for every trial: neither their choice nor their corruption depends on a trial's seeds.
    """
    if corrupted.images is not None and corrupted.images < len(test):
        word_N2 = noise.bits(noise.key(0, "corruption", "images"), test.id_N, 2).long() & 0x7FFFFFFF
        order_N = torch.argsort((word_N2[:, 0] << 31) | word_N2[:, 1], stable=True)
        test = test.select(order_N[: corrupted.images].sort().values)
    return {
        f"corrupted/{kind}/{severity}": CorruptedSplit(test, kind, severity, cache)
        for kind in corrupted.corruptions
        for severity in corrupted.severities
    }
