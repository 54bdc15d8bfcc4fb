"""Conversions of whole data sets: channels, size, label masks, and pixel statistics.

N images, C channels, H rows, W columns, O output positions; uint8 throughout.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from vitlab.geometry import Pair

VOID = 255
"""Mask value of a pixel without a label, as in Pascal VOC; losses and metrics ignore it."""

IGNORED = -100
"""The corresponding label in a batch, int64: the ``ignore_index`` of torch's losses."""

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R 601)."""


def per_channel(values: Sequence[float]) -> Tensor:
    """Return one number per channel, float64 (C, 1, 1)."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def convert_channels(x_NCHW: Tensor, channels: int) -> Tensor:
    """Convert colour to grey by ITU-R 601 luma in Pillow's integer arithmetic, or grey to colour by repetition."""
    if x_NCHW.shape[1] == channels:
        return x_NCHW
    if x_NCHW.shape[1] == 1:
        return x_NCHW.expand(-1, channels, -1, -1).contiguous()
    red, green, blue = (x_NCHW[:, i].to(torch.int32) for i in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]


def resize(x_NCHW: Tensor, size: Pair) -> Tensor:
    """Resize with Pillow's antialiased bilinear filter, as the usual torchvision pipelines do."""
    from PIL import Image

    if tuple(x_NCHW.shape[-2:]) == size:
        return x_NCHW
    n, channels = x_NCHW.shape[:2]
    out_NCHW = np.empty((n, channels, *size), np.uint8)
    for image_CHW, small_CHW in zip(x_NCHW.numpy(), out_NCHW, strict=True):
        for plane_HW, small_HW in zip(image_CHW, small_CHW, strict=True):
            small_HW[:] = Image.fromarray(plane_HW).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(out_NCHW)


def resize_masks(y_NHW: Tensor, size: Pair) -> Tensor:
    """Resize label masks by nearest neighbour."""
    row_O, column_O = (nearest_pixels(torch.tensor(old), new) for old, new in zip(y_NHW.shape[-2:], size, strict=True))
    return y_NHW[:, row_O][..., column_O]


def nearest_pixels(old: Tensor, new: int) -> Tensor:
    """Return int64 (..., O) indices of the input pixels, of ``old`` (...), nearest to each of ``new`` output pixels.

    Equal to torch's ``nearest-exact``, and to Pillow's nearest neighbour except at ties.  Computed in integers.
    """
    return (2 * torch.arange(new, device=old.device) + 1) * old // (2 * new)


def mirrored_pixels(n: int, margin: int, device: torch.device | None = None) -> Tensor:
    """Return the indices of ``n`` pixels with a margin on both sides, mirrored without repeating the last pixel."""
    period = max(2 * (n - 1), 1)
    index = torch.arange(-margin, n + margin, device=device) % period
    return torch.minimum(index, period - index)


def channel_statistics(batches: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of pixels in [0, 1], over batches of images.

    Histograms make them exact for any order of the images.  The deviation of a constant channel is one grey level, so
    that dividing by it is safe.
    """
    counts = [
        torch.stack([torch.bincount(x_NHW.flatten().int(), minlength=256) for x_NHW in x_NCHW.unbind(1)])
        for x_NCHW in batches
    ]
    count_CL = torch.stack(counts).sum(0)
    level_L = torch.arange(256).double() / 255
    share_CL = count_CL / count_CL.double().sum(1, keepdim=True)
    mean_C = (share_CL * level_L).sum(1)
    variance_C = (share_CL * (level_L - mean_C[:, None]) ** 2).sum(1)
    return tuple(mean_C.tolist()), tuple(variance_C.sqrt().clamp(min=1 / 255).tolist())
