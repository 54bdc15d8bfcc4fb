"""The slot ``augment``: batched, keyed versions of the augmentations used to train Vision Transformers.

An augmentation is drawn anew in every epoch.

B images of a batch, C channels, H rows, W columns.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from vitlab import noise
from vitlab.registry import Slot
from vitlab.spec.choice import Share

Probability = Share

Side = int | Tensor
"""Height or width in pixels: one number for all images, or one per image, (B, 1)."""


class Boxes(NamedTuple):
    """One rectangle per image, in whole pixels, and a flag that says if a random attempt fitted."""

    top_B: Tensor
    left_B: Tensor
    height_B: Tensor
    width_B: Tensor
    fits_B: Tensor


class Augment(ABC):
    """A random change of each image of a batch, on the batch's device.

    The change is a function of the key and the image's identity alone, drawn with :mod:`vitlab.noise`, so it is the
    same in any batch, on any device and after a resume.
    """

    normalized: ClassVar[bool] = False
    """True for augmentations of normalised images, where zero is the mean, instead of pixels."""

    of_picture: bool = False
    """True for augmentations that crop full-size pictures from their files.  Such an augmentation comes first, and its
    :meth:`boxes` is called instead of :meth:`__call__`."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation that resizes a crop of a picture to the size of an image."""

    @abstractmethod
    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Return changed images of the same shape, dtype and device.

        Args:
            x_BCHW: uint8; float of any range where :attr:`normalized`.  Not modified.
            key: derived from the seed, the epoch and the position in the study's list of augmentations.  For trials
                that a GPU trains together, it is a tensor with a key for each image, (B,), as the functions of
                :mod:`vitlab.noise` take it.
            id_B: int64 identities of the images.
        """

    def boxes(self, key: noise.Key, id_B: Tensor, height: Side, width: Side) -> Boxes:
        """Return the rectangles to crop from pictures of ``height`` by ``width`` pixels."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'boxes' to crop pictures; implement it")

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Return the label masks of the same images, transformed like their pixels.

        An augmentation that changes only colours returns them as they are.  One that moves pixels moves the labels by
        nearest neighbour, with :data:`~vitlab.data.pixels.VOID` outside of the image.  An augmentation without this
        method is rejected for segmentation.

        Args:
            y_BHW: uint8, not modified.
            key: the key that was passed for the pixels, so that the draws are the same.
            id_B: the identities that were passed for the pixels.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method 'masks' to transform label masks; implement it")


class Stationary(Augment):
    """Base of augmentations that move no pixel, so that label masks stay as they are."""

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Return the masks unchanged."""
        return y_BHW


augment = Slot("augment", Augment)  # type: ignore[type-abstract]
