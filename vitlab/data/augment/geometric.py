"""Geometric augmentations and random erasing: ``flip``, ``crop``, ``random_resized_crop``, ``erasing``.

B images of a batch, C channels, H rows, W columns, A attempts at a rectangle.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from vitlab import noise
from vitlab.data.augment import Augment, Boxes, Probability, Side, Stationary, augment, pixels
from vitlab.data.datasets.base import require_ascending
from vitlab.data.pixels import VOID, mirrored_pixels, nearest_pixels
from vitlab.spec.choice import Portion

ATTEMPTS = 10
"""Rectangles drawn before the fallback, as in torchvision."""

Sides = tuple[Side, Side]

Area = Annotated[tuple[Portion, Portion], AfterValidator(require_ascending)]
"""Smallest and largest share of the image."""

Ratio = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(require_ascending)]
"""Smallest and largest ratio of width to height."""


@augment.register("flip")
@dataclass(kw_only=True)
class Flip(Augment):
    """Flip images left to right.

    Args:
        p: probability that an image is flipped.
    """

    p: Probability = 0.5

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        flip_B = noise.uniform(key, id_B, 1)[:, 0] < self.p
        return torch.where(flip_B[:, None, None, None], x_BCHW.flip(-1), x_BCHW)

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return self(y_BHW[:, None], key, id_B)[:, 0]


@augment.register("crop")
@dataclass(kw_only=True)
class Crop(Augment):
    """Pad on every side, then crop the original size at a uniformly drawn position.  Reference: arXiv:1512.03385.

    Args:
        padding: pixels on every side.
        mode: ``zero`` pads with black, ``reflect`` mirrors without repeating the border pixel.
    """

    padding: PositiveInt = 4
    mode: Literal["zero", "reflect"] = "zero"

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return self._crop_at_random(x_BCHW, key, id_B, 0)

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return self._crop_at_random(y_BHW[:, None], key, id_B, VOID)[:, 0]

    def _crop_at_random(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor, fill: int) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        offset_B2 = noise.integers(key, id_B, 2, 2 * self.padding + 1)
        if self.mode == "zero":
            padded_BCHW = F.pad(x_BCHW, (self.padding,) * 4, value=fill)
        else:
            row_H, column_W = (mirrored_pixels(n, self.padding, x_BCHW.device) for n in (height, width))
            padded_BCHW = x_BCHW[:, :, row_H][..., column_W]
        # A strided view of all crops, indexed by each image's offset, is faster than a gather.
        view_BCYXHW = padded_BCHW.unfold(2, height, 1).unfold(3, width, 1)
        one_B = torch.arange(len(x_BCHW), device=x_BCHW.device)
        return view_BCYXHW[one_B, :, offset_B2[:, 0], offset_B2[:, 1]]


@augment.register("random_resized_crop")
@dataclass(kw_only=True)
class RandomResizedCrop(Augment):
    """Crop a rectangle of random area and shape, and resize it to the size of the image.  Reference: arXiv:1409.4842.

    The distribution is torchvision's: area uniform, logarithm of the aspect ratio uniform, ten attempts to fit, then
    the largest centred rectangle within the range of ratios.

    Args:
        scale: smallest and largest share of the area.
        ratio: smallest and largest width over height.
        interpolation: the interpolation of the resize.
        of: what is cropped: the ``image``, already resized to the model's input size, or the full-size ``picture``
            in its file, as in ImageNet recipes.  With ``picture``, every crop decodes the file again, downsizing
            is antialiased, and this must be the first augmentation.
    """

    scale: Area = (0.08, 1.0)
    ratio: Ratio = (3 / 4, 4 / 3)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    of: Literal["image", "picture"] = "image"

    def __post_init__(self) -> None:
        self.of_picture = self.of == "picture"

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        boxes = self.boxes(key, id_B, *x_BCHW.shape[-2:])
        return pixels.resized_crop(x_BCHW, boxes, self.interpolation)

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        height, width = y_BHW.shape[-2:]
        box = self.boxes(key, id_B, height, width)
        row_BH = box.top_B[:, None] + nearest_pixels(box.height_B[:, None], height)
        column_BW = box.left_B[:, None] + nearest_pixels(box.width_B[:, None], width)
        one_B = torch.arange(len(y_BHW), device=y_BHW.device)
        return y_BHW[one_B[:, None, None], row_BH[:, :, None], column_BW[:, None]]

    def boxes(self, key: noise.Key, id_B: Tensor, height: Side, width: Side) -> Boxes:
        box = _draw_boxes(key, id_B, (height, width), (height, width), self.scale, self.ratio)
        height_B, width_B = (
            torch.full_like(id_B, side) if isinstance(side, int) else side.flatten() for side in (height, width)
        )
        # The fallback is the largest centred rectangle within the range of ratios.
        low, high = self.ratio
        tall_B = torch.minimum(height_B, (width_B.double() / low).round().long())
        wide_B = torch.minimum(width_B, (height_B.double() * high).round().long())
        fallback = ((height_B - tall_B) // 2, (width_B - wide_B) // 2, tall_B, wide_B)
        sides = (torch.where(box.fits_B, side_B, other_B) for side_B, other_B in zip(box[:4], fallback, strict=True))
        return Boxes._make((*sides, box.fits_B))


@augment.register("erasing")
@dataclass(kw_only=True)
class Erasing(Stationary):
    """Cover a rectangle of the normalised image.  Reference: arXiv:1708.04896.

    The distribution is torchvision's: area uniform, logarithm of the aspect ratio uniform, ten attempts to fit.
    Covered pixels keep their labels, as in torchvision.

    Args:
        p: probability that a rectangle of an image is covered.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height.
        fill: ``mean`` covers with the mean colour, ``noise`` with standard normal noise, as in DeiT.
    """

    normalized = True

    p: Probability = 0.25
    scale: Area = (0.02, 1 / 3)
    ratio: Ratio = (0.3, 10 / 3)
    fill: Literal["mean", "noise"] = "noise"

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        channels, height, width = x_BCHW.shape[1:]
        covered_B = noise.uniform(noise.fold(key, 1), id_B, 1)[:, 0] < self.p
        # A rectangle must be shorter than the image in both directions, as in torchvision.
        box = _draw_boxes(key, id_B, (height, width), (height - 1, width - 1), self.scale, self.ratio)
        in_rows_BH = _interval_mask(box.top_B, box.height_B, height)
        in_columns_BW = _interval_mask(box.left_B, box.width_B, width)
        hidden_BHW = in_rows_BH[:, :, None] & in_columns_BW[:, None] & (covered_B & box.fits_B)[:, None, None]
        if self.fill == "mean":
            return x_BCHW.masked_fill(hidden_BHW[:, None], 0)
        grain_BD = noise.normal(noise.fold(key, 2), id_B, channels * height * width)
        return torch.where(hidden_BHW[:, None], grain_BD.view(x_BCHW.shape).to(x_BCHW.dtype), x_BCHW)


def _draw_boxes(
    key: noise.Key, id_B: Tensor, image: Sides, largest: Sides, scale: tuple[float, float], ratio: tuple[float, float]
) -> Boxes:
    """Return the first of ten random rectangles of at most ``largest`` that fits, at a uniformly drawn position."""
    (height, width), (most_rows, most_columns) = image, largest
    # All attempts are drawn at once: a loop until one fits would wait for the device in every turn.
    u_BA4 = noise.uniform(key, id_B, 4 * ATTEMPTS).view(-1, ATTEMPTS, 4)
    area_BA = height * width * (scale[0] + (scale[1] - scale[0]) * u_BA4[..., 0])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratio_BA = torch.exp(low + (high - low) * u_BA4[..., 1])
    height_BA = (area_BA / ratio_BA).sqrt().round().long()
    width_BA = (area_BA * ratio_BA).sqrt().round().long()
    fits_BA = (height_BA > 0) & (height_BA <= most_rows) & (width_BA > 0) & (width_BA <= most_columns)
    first_B1 = fits_BA.int().argmax(1, keepdim=True)
    height_B1, width_B1 = height_BA.gather(1, first_B1), width_BA.gather(1, first_B1)
    place_B2 = u_BA4.gather(1, first_B1[..., None].expand(-1, -1, 4))[:, 0, 2:]
    top_B1 = (place_B2[:, :1] * (height - height_B1 + 1)).long()
    left_B1 = (place_B2[:, 1:] * (width - width_B1 + 1)).long()
    return Boxes(top_B1[:, 0], left_B1[:, 0], height_B1[:, 0], width_B1[:, 0], fits_BA.any(1))


def _interval_mask(start_B: Tensor, length_B: Tensor, size: int) -> Tensor:
    distance_BN = torch.arange(size, device=start_B.device) - start_B[:, None]
    return (distance_BN >= 0) & (distance_BN < length_B[:, None])
