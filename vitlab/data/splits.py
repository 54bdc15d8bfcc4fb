"""The splits of a data set, and the test sets beside its test split.

N images of a split, M of an official split, B of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitlab.data.datasets.base import Images
from vitlab.data.image_cache import StoredImages
from vitlab.data.pixels import resize, resize_masks, with_channels
from vitlab.geometry import DataInfo

if TYPE_CHECKING:
    from vitlab.data.test_sets import TestSet


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


@dataclass(frozen=True)
class Prepared:
    """A data set ready to train on."""

    train: Subset
    val: Subset
    test: Subset
    info: DataInfo  #: of the model's inputs; its identity is that of the files that were read
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    test_sets: Mapping[str, TestSet] = field(default_factory=dict)  #: by name


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
