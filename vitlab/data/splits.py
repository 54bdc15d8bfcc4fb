"""The splits of a data set, and the draws of validation splits and training subsets.

A draw is stratified, nested, and a pure function of a key.  The images of each class are ordered by a draw from the key
and their identities.  Validation is the front of that order, a fraction the front of another order of the remaining
images.  A larger share therefore contains a smaller one, and the two shares do not influence each other's order.

N images of a split, M of an official split, B of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data.datasets.base import Images
from vitlab.data.image_cache import StoredImages
from vitlab.data.pixels import resize, resize_masks, with_channels
from vitlab.errors import DataError
from vitlab.geometry import DataInfo


def hold_out(y_N: Tensor, id_N: Tensor, share: float, k: noise.Key) -> tuple[Tensor, Tensor]:
    """Return the positions in ``id_N`` of training and of validation images, both ascending.

    Of each class of n images, ``share * n`` are held out, rounded to the nearest whole number; at least one if the
    class has two or more, and never all.

    Args:
        y_N: classes.
        id_N: identities of the images, by which the draw is keyed.
        share: in (0, 1).
        k: key of the draw.

    Raises:
        DataError: if no class has two images.
    """
    held_out_N = torch.zeros(len(y_N), dtype=torch.bool)
    for position_M in _orders(y_N, id_N, k):
        count = min(max(_rounded_share(share, len(position_M)), 1), len(position_M) - 1)
        held_out_N[position_M[:count]] = True
    if not held_out_N.any():
        raise DataError(
            f"no class has two images, so none of the {len(y_N)} can be held out for validation; add images"
        )
    return (~held_out_N).nonzero()[:, 0], held_out_N.nonzero()[:, 0]


def hold_out_groups(group_N: Tensor, share: float, k: noise.Key) -> tuple[Tensor, Tensor]:
    """Return the positions in ``group_N`` of training and of validation images, both ascending, no group in both.

    Args:
        group_N: the group of each image.
        share: of the groups, in (0, 1); rounded to the nearest whole number, at least one, and never all.
        k: key of the draw, by group.

    Raises:
        DataError: if there are fewer than two groups.
    """
    name_G, index_N = group_N.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if len(name_G) < 2:
        raise DataError("all images are of one group, so none can be held out for validation; add images")
    _, group_M = hold_out(torch.zeros_like(name_G), name_G, share, k)
    mask_N = torch.isin(index_N, group_M)
    return (~mask_N).nonzero()[:, 0], mask_N.nonzero()[:, 0]


def fraction(y_N: Tensor, id_N: Tensor, share: float, k: noise.Key) -> Tensor:
    """Return the positions in ``id_N`` of a stratified share, ascending; a smaller share is a subset of a larger one.

    Args:
        y_N: classes.
        id_N: identities of the images, by which the draw is keyed.
        share: in (0, 1]; of each class of n images ``share * n`` are selected, rounded, at least one.
        k: key of the draw.
    """
    if share == 1:
        return torch.arange(len(y_N))
    mask_N = torch.zeros(len(y_N), dtype=torch.bool)
    for position_M in _orders(y_N, id_N, k):
        mask_N[position_M[: max(_rounded_share(share, len(position_M)), 1)]] = True
    return mask_N.nonzero()[:, 0]


def at_most(y_N: Tensor, id_N: Tensor, count: int, k: noise.Key) -> Tensor:
    """Return the positions in ``id_N`` of ``count`` images of each class, or of all if it has fewer, ascending.

    A smaller count selects a subset of a larger one.  With the key of :func:`fraction`, both select from the front of
    the same order.

    Args:
        y_N: classes.
        id_N: identities of the images, by which the draw is keyed.
        count: at least one.
        k: key of the draw.
    """
    mask_N = torch.zeros(len(y_N), dtype=torch.bool)
    for position_M in _orders(y_N, id_N, k):
        mask_N[position_M[:count]] = True
    return mask_N.nonzero()[:, 0]


def _orders(y_N: Tensor, id_N: Tensor, k: noise.Key) -> Iterator[Tensor]:
    """Yield, for each class, the positions of its images in an order drawn from ``k`` and their identities."""
    word_N2 = noise.bits(k, id_N, 2).long() & 0x7FFFFFFF
    rank_N = torch.argsort((word_N2[:, 0] << 31) | word_N2[:, 1], stable=True)
    for label in sorted(set(y_N.tolist())):
        yield rank_N[y_N[rank_N] == label]


def _rounded_share(share: float, n: int) -> int:
    """Return ``share * n`` rounded to the nearest whole number, halves up."""
    return int(share * n + 0.5)


@dataclass(frozen=True)
class Subset:
    """Images of one split.  On the CPU, subsets of one official split share its pixels."""

    pixels_MCHW: Tensor | StoredImages  #: uint8, all images of the official split
    row_N: Tensor  #: int64, rows of ``pixels_MCHW`` in this subset
    y_N: Tensor  #: int64; uint8 (N, H, W) for segmentation
    id_N: Tensor  #: int64, position in the official split, by which draws are keyed in any split or fraction

    @classmethod
    def of(cls, x_NCHW: Tensor | StoredImages, y_N: Tensor, id_N: Tensor) -> Subset:
        """Return a subset of all given images."""
        return cls(x_NCHW, torch.arange(len(y_N), device=y_N.device), y_N, id_N)

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
        row_B = self.row_N[position_B]
        if isinstance(self.pixels_MCHW, Tensor):
            return self.pixels_MCHW.index_select(0, row_B)  # copies whole images; indexing copies pixel by pixel
        return self.pixels_MCHW.take(row_B)

    def select(self, position_N: Tensor) -> Subset:
        """Return the subset of the images at these positions."""
        return Subset(self.pixels_MCHW, self.row_N[position_N], self.y_N[position_N], self.id_N[position_N])

    def to(self, device: torch.device) -> Subset:
        """Return a copy on a device with only the images of this subset.

        The subset itself is returned if its images are in storage or already on the device.
        """
        if not isinstance(self.pixels_MCHW, Tensor) or self.pixels_MCHW.device == device:
            return self
        return Subset.of(self.x_NCHW.to(device), self.y_N.to(device), self.id_N.to(device))


class FurtherSplit(ABC):
    """Images on which a training is evaluated once more, at its end, such as corrupted ones.

    Attributes:
        metric: Name of its metric.
        kind: Kind of the images; values of one kind are averaged, and reported under its name.
        classes: Classes that predictions are among; empty for all.
        y_N: int64, class indices.
        id_N: int64, identities of the images.
    """

    metric: str
    kind: str
    y_N: Tensor
    id_N: Tensor
    classes: tuple[int, ...] = ()

    @abstractmethod
    def at(self, part: slice) -> Tensor:
        """Return the images at some positions, uint8 (B, C, H, W), on the CPU."""


class TensorCache:
    """Tensors by key, up to a total size."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}
        self._bytes = 0

    def get(self, key: Hashable) -> Tensor | None:
        """Return a tensor; None if it is not cached."""
        return self._tensors.get(key)

    def add(self, key: Hashable, tensor: Tensor, max_bytes: int) -> None:
        """Cache a tensor under a new key, unless all tensors would take more than ``max_bytes``."""
        if self._bytes + tensor.nbytes <= max_bytes:
            self._tensors[key] = tensor
            self._bytes += tensor.nbytes


@dataclass(frozen=True)
class Prepared:
    """A data set ready to train on."""

    train: Subset
    val: Subset
    test: Subset
    info: DataInfo  #: of the model's inputs; its identity is that of the files that were read
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    further: Mapping[str, FurtherSplit] = field(default_factory=dict)  #: name to split


def apply_options(images: Images, options: Mapping[str, Any]) -> Subset:
    """Return an official split after ``classes``, ``channels`` and ``size``."""
    x_NCHW, y_N = images
    id_N, y_N = select_classes(y_N, options["classes"])
    if options["classes"]:
        x_NCHW = x_NCHW[id_N]
    if options["channels"]:
        x_NCHW = with_channels(x_NCHW, options["channels"])
    if options["size"]:
        x_NCHW = resize(x_NCHW, options["size"])
        y_N = resize_masks(y_N, options["size"]) if y_N.ndim > 1 else y_N
    return Subset.of(x_NCHW, y_N, id_N)


def select_classes(y_N: Tensor, classes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Return the indices of the images of the selected classes, and their new labels."""
    if not classes:
        return torch.arange(len(y_N)), y_N
    new_labels = {old: new for new, old in enumerate(classes)}
    new_N = torch.tensor([new_labels.get(label, -1) for label in y_N.tolist()], dtype=torch.int64)
    id_N = (new_N >= 0).nonzero()[:, 0]
    return id_N, new_N[id_N]
