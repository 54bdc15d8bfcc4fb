"""The corruptions of images, each a function of pixels, parameters and keyed draws.

B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab import noise
from vitlab.data.corruption import filters
from vitlab.data.pixels import mirrored

Parameters = tuple[float, ...]
"""Parameters of a corruption at one severity."""

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R 601)."""


class Draws(NamedTuple):
    """Random draws of a corruption, independent for each stream and image."""

    key: noise.Key
    id_B: Tensor  #: int64, identities of the images

    def uniform(self, stream: int, n: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return draws in [low, high), float32 (B, n)."""
        return low + (high - low) * noise.uniform(noise.fold(self.key, stream), self.id_B, n)

    def normal(self, stream: int, n: int) -> Tensor:
        """Return standard normal draws, float32 (B, n)."""
        return noise.normal(noise.fold(self.key, stream), self.id_B, n)

    def integers(self, stream: int, n: int, below: int) -> Tensor:
        """Return integers in [0, below), int64 (B, n)."""
        return noise.integers(noise.fold(self.key, stream), self.id_B, n, below)


Kind = Callable[[Tensor, Parameters, Draws], Tensor]
"""Returns corrupted images, of any range, from float32 images in [0, 1]."""


def gaussian_noise(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Add normal noise."""
    return torch.add(x_BCHW, draws.normal(0, x_BCHW[0].numel()).view_as(x_BCHW), alpha=c[0])


def shot_noise(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Replace each of 256 levels of light by a Poisson count around it."""
    cumulative_M, counts = _poisson(c[0])
    level_BD = (x_BCHW.flatten(1) * 255).round()
    # The distributions of all levels stand one after another in a single sorted table.
    place_BD = torch.searchsorted(cumulative_M, (draws.uniform(0, level_BD.shape[1]).double() + level_BD), right=True)
    return ((place_BD - level_BD.long() * counts).clamp(0, counts - 1) / c[0]).float().view_as(x_BCHW)


def impulse_noise(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Set a share of the values to black or white."""
    u_BCHW = draws.uniform(0, x_BCHW[0].numel()).view_as(x_BCHW)
    return x_BCHW.masked_fill(u_BCHW < c[0], 1).masked_fill(u_BCHW < c[0] / 2, 0)


def defocus_blur(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Average over a disk."""
    taps = filters.disk(c[0], c[1])
    margin = max(max(abs(row), abs(column)) for row, column, _ in taps)
    height, width = x_BCHW.shape[-2:]
    padded_BCHW = x_BCHW[:, :, mirrored(height, margin)][..., mirrored(width, margin)]
    result_BCHW = torch.zeros_like(x_BCHW)
    for row, column, weight in taps:
        top, left = margin + row, margin + column
        result_BCHW.add_(padded_BCHW[:, :, top : top + height, left : left + width], alpha=weight)
    return result_BCHW


def glass_blur(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Blur, replace each pixel by a random near one, and blur again.

    The pixels are replaced one after another from the last one on, so that a value may travel further than one step.
    (The authors' code reads as an exchange of two pixels, but copies one over the other.)
    """
    height, width = x_BCHW.shape[-2:]
    reach, rounds = max(1, round(c[1])), int(c[2])
    blur = partial(filters.apply, rows_HH=filters.gaussian(height, c[0]), columns_WW=filters.gaussian(width, c[0]))
    x_BCHW = ((blur(x_BCHW) * 255 + 4e-4).floor() / 255).clamp(0, 1)
    order_HW = torch.arange(height * width).view(height, width)
    moved_HW = torch.zeros(height, width, dtype=torch.bool)
    moved_HW[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    for index in range(rounds):
        offset_B2N = (draws.integers(index, 2 * height * width, 2 * reach) - reach).view(-1, 2, height * width)
        near_BN = order_HW.flatten() + offset_B2N[:, 0] * width + offset_B2N[:, 1]
        source_BN = torch.where(moved_HW.flatten(), near_BN, order_HW.flatten())
        # A later pixel has its final value already; an earlier one, its old value, which is a node of its own.
        count = height * width
        final_BN = torch.where(source_BN > order_HW.flatten(), source_BN, source_BN + count)
        node_BM = torch.cat([final_BN, (order_HW.flatten() + count).expand_as(final_BN)], 1)
        while not torch.equal(further_BM := node_BM.gather(1, node_BM), node_BM):
            node_BM = further_BM
        pixel_BN = node_BM[:, :count] - count
        x_BCHW = x_BCHW.flatten(2).gather(2, pixel_BN[:, None].expand(-1, x_BCHW.shape[1], -1)).view_as(x_BCHW)
    return blur(x_BCHW)


def motion_blur(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Blur along a random direction."""
    return filters.motion(x_BCHW, c[0], c[1], draws.uniform(0, 1, -45, 45)[:, 0])


def zoom_blur(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Average over several enlargements."""
    height, width = x_BCHW.shape[-2:]
    x64_BCHW = x_BCHW.double()
    pairs = list(zip(filters.zooms(height, *c), filters.zooms(width, *c), strict=True))
    total_BCHW = torch.zeros_like(x64_BCHW)
    for rows_HH, columns_WW in pairs:
        total_BCHW += rows_HH @ x64_BCHW @ columns_WW.T
    return (total_BCHW / len(pairs)).float()


def snow(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Whiten the image and add flakes that fall in a random direction."""
    mean, deviation, factor, threshold, radius, sigma, share = c
    height, width = x_BCHW.shape[-2:]
    factor = max(factor, 1)  # below 112 pixels, ImageNet's factors would be smaller: flakes of less than a pixel
    flakes_B1HW = mean + deviation * draws.normal(0, height * width).view(-1, 1, height, width)
    flakes_B1HW = filters.apply(flakes_B1HW, filters.zoom(height, factor), filters.zoom(width, factor))
    flakes_B1HW = (flakes_B1HW.masked_fill(flakes_B1HW < threshold, 0).clamp(0, 1) * 255).floor() / 255
    flakes_B1HW = filters.motion(flakes_B1HW, radius, sigma, draws.uniform(1, 1, -135, -45)[:, 0])
    flakes_B1HW = (flakes_B1HW * 255).round() / 255
    bright_BCHW = torch.maximum(x_BCHW, _grey(x_BCHW) * 1.5 + 0.5)
    return share * x_BCHW + (1 - share) * bright_BCHW + flakes_B1HW + flakes_B1HW.flip(2, 3)


def fog(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Add a plasma fractal, and scale to the old maximum."""
    height, width = x_BCHW.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()  # the next power of two
    map_BSS = filters.plasma(draws.uniform(0, side * side, -1, 1), side, c[1])
    top_B111 = x_BCHW.amax((1, 2, 3), keepdim=True)
    return (x_BCHW + c[0] * map_BSS[:, None, :height, :width]) * top_B111 / (top_B111 + c[0])


def brightness(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Raise the value of hue, saturation and value, which is the largest channel."""
    value_B1HW = x_BCHW.amax(1, keepdim=True)
    raised_B1HW = (value_B1HW + c[0]).clamp(max=1)
    return torch.where(value_B1HW > 0, x_BCHW * (raised_B1HW / value_B1HW), raised_B1HW)


def contrast(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Move every channel towards its mean."""
    mean_BC11 = x_BCHW.double().mean((2, 3), keepdim=True)
    return ((x_BCHW - mean_BC11) * c[0] + mean_BC11).float()


def elastic_transform(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Apply a random affine map, then move every pixel by a smooth random field."""
    amplitude, sigma, jitter = c
    height, width = x_BCHW.shape[-2:]
    row_H1, column_W = torch.arange(height).double()[:, None], torch.arange(width).double()
    middle, reach = torch.tensor([width // 2, height // 2]).double(), min(height, width) // 3
    corner_32 = middle + reach * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]).double()
    moved_B32 = corner_32 + draws.uniform(0, 6, -jitter, jitter).double().view(-1, 3, 2)
    ones_B31 = torch.ones_like(moved_B32[..., :1])
    inverse_B32 = torch.linalg.solve(torch.cat([moved_B32, ones_B31], 2), corner_32.expand_as(moved_B32))
    at_B2HW = [
        one_B3[:, 0, None, None] * column_W + one_B3[:, 1, None, None] * row_H1 + one_B3[:, 2, None, None]
        for one_B3 in inverse_B32.unbind(2)
    ]
    x_BCHW = _sample(x_BCHW, at_B2HW[0], at_B2HW[1], repeat_edge=False)
    if not amplitude:
        return x_BCHW
    smooth = partial(
        filters.apply,
        rows_HH=filters.gaussian(height, sigma, 3.0, "reflect"),
        columns_WW=filters.gaussian(width, sigma, 3.0, "reflect"),
    )
    field_B2HW = amplitude * smooth(draws.uniform(1, 2 * height * width, -1, 1).view(-1, 2, height, width)).double()
    return _sample(x_BCHW, column_W + field_B2HW[:, 0], row_H1 + field_B2HW[:, 1], repeat_edge=True)


def pixelate(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Shrink and enlarge the image."""

    def change(picture: Any) -> Any:
        from PIL import Image

        width, height = picture.size
        small = picture.resize((int(width * c[0]), int(height * c[0])), Image.Resampling.BOX)
        return small.resize((width, height), Image.Resampling.BOX)

    return _by_pillow(x_BCHW, change)


def jpeg_compression(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Compress as JPEG and read back."""

    def change(picture: Any) -> Any:
        from PIL import Image

        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(c[0]))
        return Image.open(file)

    return _by_pillow(x_BCHW, change)


KINDS: Mapping[str, Kind] = {
    kind.__name__: kind
    for kind in (
        *(gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur),
        *(snow, fog, brightness, contrast, elastic_transform, pixelate, jpeg_compression),
    )
}


# -- parts of corruptions ----------------------------------------------------------------------------------------------


def _grey(x_BCHW: Tensor) -> Tensor:
    if x_BCHW.shape[1] == 1:
        return x_BCHW
    red, green, blue = torch.split(x_BCHW, 1, 1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


@cache
def _poisson(rate: float) -> tuple[Tensor, int]:
    """Return the cumulative probabilities of the counts of 256 levels, each level's plus its number, and their count.

    Args:
        rate: Mean count of the brightest level.
    """
    from scipy import special

    counts = int(rate + 10 * rate**0.5 + 20)
    mean_L1 = (torch.arange(256).double() / 255 * rate)[:, None]
    cumulative_LM = torch.from_numpy(special.pdtr(np.arange(counts), mean_L1.numpy()))
    cumulative_LM[:, -1] = 1  # so that a draw never falls into the next level's part of the table
    return (cumulative_LM + torch.arange(256)[:, None]).flatten(), counts


def _sample(x_BCHW: Tensor, column_BHW: Tensor, row_BHW: Tensor, *, repeat_edge: bool) -> Tensor:
    """Return images at positions in pixels by bilinear interpolation, mirrored at their edges."""
    height, width = x_BCHW.shape[-2:]
    if repeat_edge:
        scaled = ((2 * column_BHW + 1) / width - 1, (2 * row_BHW + 1) / height - 1)
    else:
        scaled = (2 * column_BHW / (width - 1) - 1, 2 * row_BHW / (height - 1) - 1)
    grid_BHW2 = torch.stack(scaled, 3).to(x_BCHW.dtype)
    return F.grid_sample(x_BCHW, grid_BHW2, "bilinear", "reflection", align_corners=not repeat_edge)


def _by_pillow(x_BCHW: Tensor, change: Callable[[Any], Any]) -> Tensor:
    """Return images changed by Pillow as pictures of 256 levels."""
    from PIL import Image

    pixels_BHWC = (x_BCHW * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    results = np.empty_like(pixels_BHWC)
    for pixels_HWC, result_HWC in zip(pixels_BHWC, results, strict=True):
        grey = pixels_HWC.shape[2] == 1
        changed = np.asarray(change(Image.fromarray(pixels_HWC[..., 0] if grey else pixels_HWC)))
        result_HWC[:] = changed[..., None] if grey else changed
    return torch.from_numpy(results).permute(0, 3, 1, 2).float() / 255
