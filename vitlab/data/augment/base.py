"""The slot ``augment`` and its contract: what is done to a training image anew each time it is seen.

B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from vitlab import noise
from vitlab.registry import Slot

Side = int | Tensor
"""Rows or columns of all images, or of each, (B, 1)."""


class Boxes(NamedTuple):
    """One rectangle for each image, in whole pixels, and whether an attempt succeeded."""

    top_B: Tensor
    left_B: Tensor
    height_B: Tensor
    width_B: Tensor
    fits_B: Tensor


class Augment(ABC):
    """A random change of each image of a batch, on whatever device the batch lies.

    What happens to an image is a function of the key and of its identity alone, drawn with :mod:`vitlab.noise`: it is
    the same in any batch, on any device, after a resume.
    """

    normalized: ClassVar[bool] = False
    """Whether it acts on normalised images, where zero is the mean, rather than on pixels."""

    of_picture: bool = False
    """Whether it cuts out of pictures as they lie in their files: then it comes first, and is asked for :meth:`boxes`
    instead of being called."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How what is cut out of pictures is brought to the size of an image."""

    @abstractmethod
    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """The images changed, with the shape, dtype and device they had.

        Args:
            x_BCHW: uint8 in 0..255 or float in 0..1; float of any range where :attr:`normalized`.  Not written to.
            key: what the draws are for: the seed, the epoch and the place among a study's augmentations.
            id_B: int64 identities of the images.
        """

    def boxes(self, key: noise.Key, id_B: Tensor, height: Side, width: Side) -> Boxes:
        """What is cut out of pictures of so many rows and columns."""
        raise NotImplementedError(f"{type(self).__name__} cuts nothing out of pictures")

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """The labels of the pixels of the same images, moved as their pixels were.

        What changes colours alone gives them back.  What moves pixels moves the labels by nearest neighbour, and has
        :data:`~vitlab.data.pixels.VOID` where there was no pixel.  An augmentation without this method is refused
        where labels are of pixels.

        Args:
            y_BHW: uint8, not written to.
            key: that of the pixels, so that the draw is theirs.
            id_B: as for the pixels.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what becomes of the labels of pixels")


augment: Slot[Augment] = Slot("augment", Augment)  # type: ignore[type-abstract]
