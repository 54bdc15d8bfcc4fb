"""The slot ``dataset`` and its contract: what a data set knows of itself, and how its pixels are read.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from vitlab.data.datasets.pictures import Pictures
from vitlab.data.options import DataOptions
from vitlab.geometry import DataInfo
from vitlab.registry import Slot

Split = Literal["train", "test"]
"""The official splits; validation is split off ``train`` by the room, or by the authors: see `Dataset.held_out`."""

SPLITS: tuple[Split, ...] = ("train", "test")


class Images(NamedTuple):
    """One official split, in its official order.

    Where the task is segmentation, labels are of pixels: 0 is the background, and
    :data:`~vitlab.data.pixels.VOID` stands where there is no label.
    """

    x_NCHW: Tensor  #: uint8
    y_N: Tensor  #: int64, class indices; uint8 (N, H, W) where labels are of pixels


class Dataset(ABC):
    """A set of labelled images with an official training and an official test split.

    Its keyword-only options come from YAML; those of :class:`~vitlab.data.options.DataOptions` are not its concern.
    """

    validation: ClassVar[float] = 0.1  #: share of the training split held out where the study does not say

    @abstractmethod
    def info(self) -> DataInfo:
        """The data as stored, without decoding any image.

        ``identity`` stands for the content: a published checksum or a digest of files; None while the data is not here.

        Raises:
            DataError: if what is here is not what it was said to be.
        """

    @abstractmethod
    def read(self, split: Split) -> Images:
        """All images of an official split.

        Raises:
            DataError: if the data is not here, naming where it was looked for, or does not hold what it should.
        """

    def pictures(self, split: Split) -> Pictures | None:
        """The same split by picture, for a set that may be larger than memory; None where all are read at once.

        Raises:
            DataError: as :meth:`read`.
        """
        return None

    def groups(self) -> Tensor | None:
        """int64 (N,): the group of each training image; None where every image stands for itself.

        Images of one group, such as those of one patient, are all trained on or all held out for validation.
        """
        return None

    def held_out(self) -> Tensor | None:
        """int64 (M,): which training images the authors hold out for validation; None where they do not say.

        These are validated on, whatever the seed, unless the study gives a share of its own.
        """
        return None

    def missing(self) -> str | None:
        """Why :meth:`read` would fail, in one sentence, as far as can be told without reading; None if it would not."""
        return None


dataset: Slot[Dataset] = Slot("dataset", Dataset, shared=DataOptions)  # type: ignore[type-abstract]
