"""The slot ``augment`` and its contract: what is done to a training image anew each time it is seen.

B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from vitlab import noise
from vitlab.slots import Slot


class Augment(ABC):
    """A random change of each image of a batch, on whatever device the batch lies.

    What happens to an image is a function of the key and of its identity alone, drawn with :mod:`vitlab.noise`: it is
    the same in any batch, on any device, after a resume.
    """

    normalized: ClassVar[bool] = False
    """Whether it acts on normalised images, where zero is the mean, rather than on pixels."""

    @abstractmethod
    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """The images changed, with the shape, dtype and device they had.

        Args:
            x_BCHW: uint8 in 0..255 or float in 0..1; float of any range where :attr:`normalized`.  Not written to.
            key: what the draws are for: the seed, the epoch and the place among a study's augmentations.
            id_B: int64 identities of the images.
        """

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
