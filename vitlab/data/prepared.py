"""Subset and Prepared: the images of one split, be they in memory or stored, and a data set ready to train on.

N images of a split, M of an official split, B of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.data.image_cache import Stored
from vitlab.geometry import DataInfo


@dataclass(frozen=True)
class Subset:
    """Images of one split.  On the CPU the subsets of an official split share its pixels."""

    pixels_MCHW: Tensor | Stored  #: uint8, whatever else is among them
    row_N: Tensor  #: int64, which of them are meant
    y_N: Tensor  #: int64; uint8 (N, H, W) where labels are of pixels
    id_N: Tensor  #: int64, place in the official split: whom a keyed draw is for, whatever split or fraction it is in

    @classmethod
    def of(cls, x_NCHW: Tensor | Stored, y_N: Tensor, id_N: Tensor) -> Subset:
        """All of these images."""
        return cls(x_NCHW, torch.arange(len(y_N), device=y_N.device), y_N, id_N)

    def __len__(self) -> int:
        return len(self.y_N)

    @property
    def x_NCHW(self) -> Tensor:
        """A copy of the images, uint8."""
        return self.at(slice(None))

    @property
    def stored(self) -> Stored | None:
        """Where the images are read from; None where they lie in memory."""
        return None if isinstance(self.pixels_MCHW, Tensor) else self.pixels_MCHW

    def at(self, position_B: Tensor | slice) -> Tensor:
        """uint8 (B, C, H, W): the images at some positions."""
        row_B = self.row_N[position_B]
        if isinstance(self.pixels_MCHW, Tensor):
            return self.pixels_MCHW.index_select(0, row_B)  # copies whole images; indexing would go pixel by pixel
        return self.pixels_MCHW.read(row_B)

    def picked(self, position_N: Tensor) -> Subset:
        """The subset of the images at these positions."""
        return Subset(self.pixels_MCHW, self.row_N[position_N], self.y_N[position_N], self.id_N[position_N])

    def to(self, device: torch.device) -> Subset:
        """The same on a device, where it has no more pixels than it needs.  What is stored stays where it is."""
        if not isinstance(self.pixels_MCHW, Tensor) or self.pixels_MCHW.device == device:
            return self
        return Subset.of(self.x_NCHW.to(device), self.y_N.to(device), self.id_N.to(device))


@dataclass(frozen=True)
class Prepared:
    """A data set ready to train on."""

    train: Subset
    val: Subset
    test: Subset
    info: DataInfo  #: what the model sees; its identity is that of the files that were read
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]
