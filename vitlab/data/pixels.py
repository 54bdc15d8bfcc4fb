"""What is done to all pixels of a data set once, and to their labels: channels, size, and their statistics.

N images, C channels, H rows, W columns, O places of an output; uint8 throughout.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitlab.geometry import Pair

VOID = 255
"""What stands in a mask where a pixel has no label, as in Pascal VOC: it is not learned from, and not judged by."""

IGNORED = -100
"""The same in a batch, whose labels are int64: what torch's own losses ignore."""


def with_channels(x_NCHW: Tensor, channels: int) -> Tensor:
    """Colour to grey by Pillow's ITU-R 601 luma, in its integer arithmetic; grey to colour by repetition."""
    found = x_NCHW.shape[1]
    if found == channels:
        return x_NCHW
    if found == 1:
        return x_NCHW.expand(-1, channels, -1, -1).contiguous()
    red, green, blue = (x_NCHW[:, i].to(torch.int32) for i in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]


def resized(x_NCHW: Tensor, size: Pair) -> Tensor:
    """Pillow's antialiased bilinear resize: on every machine the pixels of the usual torchvision pipelines."""
    from PIL import Image

    if tuple(x_NCHW.shape[-2:]) == size:
        return x_NCHW
    n, channels = x_NCHW.shape[:2]
    out_NCHW = np.empty((n, channels, *size), np.uint8)
    for image_CHW, small_CHW in zip(x_NCHW.numpy(), out_NCHW, strict=True):
        for plane_HW, small_HW in zip(image_CHW, small_CHW, strict=True):
            small_HW[:] = Image.fromarray(plane_HW).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(out_NCHW)


def resized_masks(y_NHW: Tensor, size: Pair) -> Tensor:
    """Labels of pixels at another size: that of the nearest pixel, as labels have no mean."""
    row_O, column_O = (nearest(torch.tensor(old), new) for old, new in zip(y_NHW.shape[-2:], size, strict=True))
    return y_NHW[:, row_O][..., column_O]


def nearest(old: Tensor, new: int) -> Tensor:
    """int64 (..., O): of ``old`` (...) pixels in a row, those the middles of ``new`` ones lie in, in whole numbers.

    Torch's ``nearest-exact``; Pillow's nearest neighbour, but for middles on the border of two pixels.
    """
    return (2 * torch.arange(new, device=old.device) + 1) * old // (2 * new)


def statistics(x_NCHW: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """:func:`moments` of each channel over images and places."""
    return moments(levels(x_NCHW))


def levels(x_NCHW: Tensor) -> Tensor:
    """int64 (C, 256): how often each channel has each level."""
    counts = [torch.bincount(x_NCHW[:, channel].flatten().int(), minlength=256) for channel in range(x_NCHW.shape[1])]
    return torch.stack(counts)


def moments(count_CL: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels in [0, 1], from how often it has each level.

    So they are exact, however the images were counted.  A channel that is the same everywhere has the deviation of one
    grey level, so that dividing by it is harmless.
    """
    means, deviations = [], []
    level_L = torch.arange(256, dtype=torch.float64) / 255
    for count_L in count_CL.double():
        share_L = count_L / count_L.sum()
        mean = (share_L * level_L).sum()
        variance = (share_L * (level_L - mean) ** 2).sum()
        means.append(float(mean))
        deviations.append(max(float(variance.sqrt()), 1 / 255))
    return tuple(means), tuple(deviations)
