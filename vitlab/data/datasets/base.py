"""The slot ``dataset`` and its contract: properties and pixels of a data set.

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
"""The official splits; validation is split off ``train``, see :meth:`Dataset.held_out`."""

SPLITS: tuple[Split, ...] = ("train", "test")


class Images(NamedTuple):
    """One official split, in its official order.

    For segmentation, labels are masks: 0 is the background, and :data:`~vitlab.data.pixels.VOID` marks pixels without
    a label.
    """

    x_NCHW: Tensor  #: uint8
    y_N: Tensor  #: int64, class indices; uint8 (N, H, W) for segmentation


class Dataset(ABC):
    """A set of labelled images with an official training and an official test split.

    Its keyword-only options come from YAML; vitlab handles those of :class:`~vitlab.data.options.DataOptions`.
    """

    validation: ClassVar[float] = 0.1  #: default share of the training split to hold out

    @abstractmethod
    def info(self) -> DataInfo:
        """Return the properties of the data as stored, without decoding any image.

        ``identity`` identifies the content: a published checksum or a digest of files; None if the data is not here.

        Raises:
            DataError: if the files are not as expected.
        """

    @abstractmethod
    def read(self, split: Split) -> Images:
        """Return all images of an official split.

        Raises:
            DataError: if the data is not here, naming the folders searched, or is invalid.
        """

    def pictures(self, split: Split) -> Pictures | None:
        """Return the split as single pictures if the set may be larger than memory; None to read it at once.

        Raises:
            DataError: as :meth:`read`.
        """
        return None

    def groups(self) -> Tensor | None:
        """Return the group of each training image, int64 (N,); None if images are independent.

        Images of one group, such as those of one patient, are never split between training and validation.
        """
        return None

    def held_out(self) -> Tensor | None:
        """Return the indices of the authors' validation images, int64 (M,); None if the authors define none.

        These are the validation split, for every seed, unless the study sets ``validation``.
        """
        return None

    def missing(self) -> str | None:
        """Return a sentence that says why :meth:`read` would fail; None if no reason is known without reading."""
        return None


dataset: Slot[Dataset] = Slot("dataset", Dataset, shared=DataOptions)  # type: ignore[type-abstract]
