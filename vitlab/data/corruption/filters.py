"""Filters and random fields of the corruptions.

Linear filters along an axis are matrices, which makes any border rule one product.  They are computed in float64, so
that the rounding of a product, which depends on the number of images in a batch, changes no pixel.

B images of a batch, C channels, H rows, W columns, N pixels along an axis, S side of a square map.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def apply(x_BCHW: Tensor, rows_HH: Tensor, columns_WW: Tensor) -> Tensor:
    """Return images filtered along their rows and columns."""
    return (rows_HH @ x_BCHW.double() @ columns_WW.T).to(x_BCHW.dtype)


@cache
def gaussian(n: int, sigma: float, truncate: float = 4.0, reflect: bool = False) -> Tensor:
    """Return the matrix of a Gaussian filter over ``n`` pixels, (N, N), equal to ``scipy.ndimage.gaussian_filter1d``.

    Args:
        n: Number of pixels.
        sigma: Standard deviation in pixels.
        truncate: Radius of the filter in standard deviations.
        reflect: Mirror the image at its edge, repeating the last pixel; otherwise the last pixel continues.
    """
    radius = int(truncate * sigma + 0.5)
    offset_K = torch.arange(-radius, radius + 1)
    weight_K = torch.exp(-0.5 * (offset_K.double() / sigma) ** 2) if radius else torch.ones(1, dtype=torch.float64)
    weight_K /= weight_K.sum()
    index_NK = torch.arange(n)[:, None] + offset_K
    if reflect:
        index_NK = index_NK % (2 * n)
        index_NK = torch.minimum(index_NK, 2 * n - 1 - index_NK)
    return torch.zeros(n, n, dtype=torch.float64).scatter_add_(
        1, index_NK.clamp(0, n - 1), weight_K.expand(n, -1).contiguous()
    )


@cache
def zoom(n: int, factor: float) -> Tensor:
    """Return the matrix, (N, N), that enlarges the centre of ``n`` pixels to ``n`` pixels by linear interpolation.

    The grid is that of ``scipy.ndimage.zoom``, whose first and last output pixel are the first and last input pixel.
    """
    inner = math.ceil(n / factor)
    outer = round(inner * factor)
    position_N = (torch.arange(n) + (outer - n) // 2).double() * ((inner - 1) / max(outer - 1, 1))
    low_N = position_N.floor().long().clamp(0, max(inner - 2, 0))
    share_N = position_N - low_N
    matrix_NN = torch.zeros(n, n, dtype=torch.float64)
    row_N, first = torch.arange(n), (n - inner) // 2
    matrix_NN[row_N, first + low_N] = 1 - share_N
    matrix_NN[row_N, (first + low_N + 1).clamp(max=n - 1)] += share_N
    return matrix_NN


@cache
def zooms(n: int, stop: float, step: float) -> Tensor:
    """Return the matrices, (Z, N, N), of the identity and of the factors 1, 1 + ``step``, ... below ``stop``."""
    return torch.stack([zoom(n, factor) for factor in (1.0, *np.arange(1, stop, step).tolist())])


@cache
def disk(radius: float, sigma: float) -> tuple[tuple[int, int, float], ...]:
    """Return the taps (row, column, weight) of a disk with smoothed edges, the blur of a lens out of focus."""
    half = 8 if radius <= 8 else math.ceil(radius)
    ksize = 3 if radius <= 8 else 5
    line = torch.arange(-half, half + 1).double()
    inside = (line[:, None] ** 2 + line**2 <= radius**2).double()
    edge = torch.arange(ksize).double() - ksize // 2
    kernel = torch.exp(-(edge**2) / (2 * sigma**2))
    kernel /= kernel.sum()
    padded = F.pad((inside / inside.sum())[None], (ksize // 2,) * 4, mode="reflect")[0]
    smooth = F.conv2d(padded[None, None], (kernel[:, None] * kernel)[None, None])[0, 0]
    places = (smooth > 1e-7).nonzero().tolist()
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
