"""Filters and random fields of the corruptions.

Linear filters along an axis are matrices, which makes any border rule one product.  They are computed in float64, so
that the rounding of a product, which depends on the number of images in a batch, changes no pixel.

B images of a batch, C channels, H rows, W columns, N pixels along an axis, S side of a square map.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def apply(x_BCHW: Tensor, rows_HH: Tensor, columns_WW: Tensor) -> Tensor:
    """Return images filtered along their rows and columns."""
    return (rows_HH @ x_BCHW.double() @ columns_WW.T).to(x_BCHW.dtype)


@cache
def gaussian(n: int, sigma: float, truncate: float = 4.0, mode: Literal["nearest", "reflect"] = "nearest") -> Tensor:
    """Return the matrix of scipy's Gaussian filter over ``n`` pixels, (N, N).

    Args:
        n: Number of pixels.
        sigma: Standard deviation in pixels.
        truncate: Radius of the filter in standard deviations.
        mode: ``reflect`` mirrors the image at its edge, repeating the last pixel; with ``nearest`` that continues.
    """
    from scipy import ndimage

    return torch.from_numpy(ndimage.gaussian_filter1d(np.eye(n), sigma, 0, mode=mode, truncate=truncate))


@cache
def zoom(n: int, factor: float) -> Tensor:
    """Return the matrix, (N, N), that enlarges the centre of ``n`` pixels to ``n`` pixels by scipy's linear zoom."""
    from scipy import ndimage

    inner = math.ceil(n / factor)
    enlarged = ndimage.zoom(np.eye(inner), (factor, 1), order=1)
    top, left = (len(enlarged) - n) // 2, (n - inner) // 2
    matrix_NN = np.zeros((n, n))
    matrix_NN[:, left : left + inner] = enlarged[top : top + n]
    return torch.from_numpy(matrix_NN)


@cache
def zooms(n: int, stop: float, step: float) -> Tensor:
    """Return the matrices, (Z, N, N), of the identity and of the factors 1, 1 + ``step``, ... below ``stop``."""
    return torch.stack([zoom(n, factor) for factor in (1.0, *np.arange(1, stop, step).tolist())])


@cache
def disk(radius: float, sigma: float) -> tuple[tuple[int, int, float], ...]:
    """Return the taps (row, column, weight) of a disk with smoothed edges, the blur of a lens out of focus."""
    from scipy import ndimage

    half, reach = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    line, edge = np.arange(-half, half + 1), np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    inside = (line[:, None] ** 2 + line**2 <= radius**2).astype(float)
    kernel = np.outer(edge, edge) / edge.sum() ** 2
    smooth = ndimage.correlate(inside / inside.sum(), kernel, mode="mirror")
    places = np.argwhere(smooth > 1e-7).tolist()
    return tuple((row - half, column - half, float(smooth[row, column])) for row, column in places)


def motion(x_BCHW: Tensor, radius: float, sigma: float, angle_B: Tensor) -> Tensor:
    """Return images blurred in one direction, by half a Gaussian over ``2 radius + 1`` pixels, as in ImageMagick.

    Args:
        x_BCHW: Images; the last pixel continues beyond their edges.
        radius: Half of the largest length in pixels.
        sigma: Standard deviation in pixels.
        angle_B: Direction in degrees; 0 is to the right and 90 down.
    """
    height, width = x_BCHW.shape[-2:]
    step_K = torch.arange(2 * round(radius) + 1).double()
    weight_K = torch.exp(-(step_K**2) / (2 * sigma**2))
    weight_K /= weight_K.sum()
    taps = int((weight_K > 1e-6).sum())
    radian_B1 = torch.deg2rad(angle_B.double())[:, None]
    row_BK = torch.ceil(step_K * torch.sin(radian_B1) - 0.5).long()[:, :taps]
    column_BK = torch.ceil(step_K * torch.cos(radian_B1) - 0.5).long()[:, :taps]
    top, left = -int(row_BK.min()), -int(column_BK.min())
    # A margin beyond the image's own size shows nothing but its edge.
    margins = (left, int(column_BK.max()), top, int(row_BK.max()))
    padded_BCHW = F.pad(x_BCHW, margins, mode="replicate")
    view_BCYXHW = padded_BCHW.unfold(2, height, 1).unfold(3, width, 1)
    one_B = torch.arange(len(x_BCHW))
    result_BCHW = weight_K[0].item() * x_BCHW
    for tap in range(1, taps):
        shifted_BCHW = view_BCYXHW[one_B, :, row_BK[:, tap] + top, column_BK[:, tap] + left]
        result_BCHW.add_(shifted_BCHW, alpha=weight_K[tap].item())
    return result_BCHW


def plasma(u_BN: Tensor, side: int, decay: float) -> Tensor:
    """Return plasma fractals by the diamond-square algorithm, (B, S, S), from 0 to 1.

    Args:
        u_BN: ``side * side`` uniform draws in [-1, 1) for each map.
        side: Power of two.
        decay: Ratio of the noise from one scale to the next finer one.
    """
    map_BSS = u_BN.new_zeros(len(u_BN), side, side)
    step, wobble, offset = side, 100.0, 0

    def middle(sum_BSS: Tensor) -> Tensor:
        nonlocal offset
        count = sum_BSS[0].numel()
        draw_BSS = u_BN[:, offset : offset + count].view(sum_BSS.shape)
        offset += count
        return torch.add(sum_BSS / 4, draw_BSS, alpha=wobble**2)

    while step >= 2:
        half = step // 2
        corner_BSS = map_BSS[:, ::step, ::step]
        pairs_BSS = corner_BSS + corner_BSS.roll(-1, 1)
        map_BSS[:, half::step, half::step] = middle(pairs_BSS + pairs_BSS.roll(-1, 2))
        centre_BSS = map_BSS[:, half::step, half::step]
        rows_BSS = centre_BSS + centre_BSS.roll(1, 1) + corner_BSS + corner_BSS.roll(-1, 2)
        map_BSS[:, ::step, half::step] = middle(rows_BSS)
        columns_BSS = centre_BSS + centre_BSS.roll(1, 2) + corner_BSS + corner_BSS.roll(-1, 1)
        map_BSS[:, half::step, ::step] = middle(columns_BSS)
        step, wobble = half, wobble / decay
    low_B11, high_B11 = map_BSS.amin((1, 2), keepdim=True), map_BSS.amax((1, 2), keepdim=True)
    return (map_BSS - low_B11) / (high_B11 - low_B11)
