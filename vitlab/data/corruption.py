"""Corruptions of test images: fourteen kinds by five severities, as in CIFAR-10-C and ImageNet-C.

The fifteenth published kind, frost, is a set of photographs; it is read from published images alone.

Every corruption is a function of an image, its identity and the severity, independent of the rest of a batch.
Linear filters along an axis are matrices, which makes any border rule one product.  They are computed in float64, so
that the rounding of a product, which depends on the number of images in a batch, changes no pixel.

Reference: Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations,
arXiv:1903.12261, and the authors' scripts for 32 and for 224 pixels.

B images of a batch, C channels, H rows, W columns, N pixels along an axis, S side of a square map.
"""

import io
import math
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage, special
from torch import Tensor

from vitlab import noise
from vitlab.data.pixels import LUMA, mirrored_pixels
from vitlab.geometry import Pair

CHUNK_VALUES = 1 << 19
"""Values of the images that are corrupted together, so that they stay in a processor's cache."""

Parameters = tuple[float, ...]
"""Parameters of a corruption at one severity."""

Border = Literal["nearest", "reflect"]
"""What scipy continues an image with beyond its edge: the last pixel, or the mirrored image."""

TABLE = """
gaussian_noise    -     0.04 0.06 0.08 0.09 0.1    0.08 0.12 0.18 0.26 0.38
shot_noise        -     500  250  100  75   50     60   25   12   5    3
impulse_noise     -     0.01 0.02 0.03 0.05 0.07   0.03 0.06 0.09 0.17 0.27
defocus_blur      px    0.3  0.4  0.5  1    1.5    3    4    6    8    10
defocus_blur      px    0.4  0.5  0.6  0.2  0.1    0.1  0.5  0.5  0.5  0.5
glass_blur        px    0.05 0.25 0.4  0.25 0.4    0.7  0.9  1    1.1  1.5
glass_blur        px    1    1    1    1    1      1    2    2    3    4
glass_blur        -     1    1    1    2    2      2    1    3    2    2
motion_blur       px    6    6    6    8    9      10   15   15   15   20
motion_blur       px    1    1.5  2    2    2.5    3    5    8    12   15
zoom_blur         -     1.06 1.11 1.16 1.21 1.26   1.11 1.16 1.21 1.26 1.31
zoom_blur         -     0.01 0.01 0.01 0.01 0.01   0.01 0.01 0.02 0.02 0.03
snow              -     0.1  0.1  0.15 0.25 0.3    0.1  0.2  0.55 0.55 0.55
snow              -     0.2  0.2  0.3  0.3  0.3    0.3  0.3  0.3  0.3  0.3
snow              px    1    1    1.75 2.25 1.25   3    2    4    4.5  2.5
snow              -     0.6  0.5  0.55 0.6  0.65   0.5  0.5  0.9  0.85 0.85
snow              px    8    10   10   12   14     10   12   12   12   12
snow              px    3    4    4    6    12     4    4    8    8    12
snow              -     0.95 0.9  0.9  0.85 0.8    0.8  0.7  0.7  0.65 0.55
fog               -     0.2  0.5  0.75 1    1.5    1.5  2    2.5  2.5  3
fog               -     3    3    2.5  2    1.75   2    2    1.7  1.5  1.4
brightness        -     0.05 0.1  0.15 0.2  0.3    0.1  0.2  0.3  0.4  0.5
contrast          -     0.75 0.5  0.4  0.3  0.15   0.4  0.3  0.2  0.1  0.05
elastic_transform side  0    0.05 0.08 0.1  0.1    2    2    0.05 0.07 0.12
elastic_transform side  0    0.2  0.06 0.04 0.03   0.7  0.08 0.01 0.01 0.01
elastic_transform side  0.08 0.07 0.06 0.05 0.03   0.1  0.2  0.02 0.02 0.02
pixelate          -     0.95 0.9  0.85 0.75 0.65   0.6  0.5  0.4  0.3  0.25
jpeg_compression  -     80   65   58   50   40     25   18   15   10   7
"""
"""Corruption, unit, and a parameter's values by severity: five for 32 by 32 pixels, as in the script of CIFAR-10-C, and
five for 224 by 224 pixels, as in the script of ImageNet-C.  Lengths are in pixels (px), or in shares of a side of 32 or
244 pixels."""

BOUNDARY = 85
"""Shortest side up to which the table of CIFAR-10-C applies: the geometric mean of 32 and 224."""


def corruption_parameters(name: str, severity: int, size: Pair) -> Parameters:
    """Return the parameters of a corruption for images of a size.

    Images with a short side of up to :data:`BOUNDARY` pixels have the parameters of CIFAR-10-C, larger ones
    ImageNet-C's.  Lengths in pixels are proportional to the short side.  Below 32 pixels they stay as at 32 pixels,
    since shorter ones would be less than a pixel and change nothing; except for the displacements of
    ``elastic_transform``, which stay proportional.
    """
    side = min(size)
    first, usual, full = (0, 32, 32) if side <= BOUNDARY else (5, 224, 244)
    scale = side / usual
    if side <= BOUNDARY and name != "elastic_transform":
        scale = max(scale, 1)
    factors = {"-": (1, 1), "px": (1, scale), "side": (full, scale)}
    return tuple(
        float(values[first + severity - 1]) * factors[unit][0] * factors[unit][1]
        for kind, unit, *values in map(str.split, TABLE.strip().splitlines())
        if kind == name
    )


def corrupt(x_BCHW: Tensor, name: str, severity: int, id_B: Tensor) -> Tensor:
    """Return corrupted images, uint8, on the CPU.

    Args:
        x_BCHW: uint8; 1 or 3 channels, at least 8 by 8 pixels.
        name: One of :data:`~vitlab.data.datasets.base.COMPUTED_CORRUPTIONS`.
        severity: 1 to 5; parameters follow from it and the size, see :func:`corruption_parameters`.
        id_B: int64, identities of the images.
    """
    channels, height, width = x_BCHW.shape[1:]
    c, key = corruption_parameters(name, severity, (height, width)), noise.key(0, "corruption", name, severity)
    at_once = max(1, CHUNK_VALUES // (channels * height * width))
    results = []
    for pixels_BCHW, part_B in zip(torch.split(x_BCHW.cpu(), at_once), torch.split(id_B.cpu(), at_once), strict=True):
        changed_BCHW = KINDS[name](pixels_BCHW.float() / 255, c, Draws(key, part_B)).clamp_(0, 1)
        # Truncated to levels, as by the authors; a thousandth of a level covers the rounding of float32.
        results.append((changed_BCHW * 255 + 1e-3).to(torch.uint8))
    return torch.cat(results)


# -- the kinds ---------------------------------------------------------------------------------------------------------


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


def gaussian_noise(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Add normal noise."""
    return torch.add(x_BCHW, draws.normal(0, x_BCHW[0].numel()).view_as(x_BCHW), alpha=c[0])


def shot_noise(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Replace each of 256 levels of light by a Poisson count around it."""
    cumulative_M, counts = _poisson_table(c[0])
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
    taps = disk_kernel_taps(c[0], c[1])
    margin = max(max(abs(row), abs(column)) for row, column, _ in taps)
    height, width = x_BCHW.shape[-2:]
    padded_BCHW = x_BCHW[:, :, mirrored_pixels(height, margin)][..., mirrored_pixels(width, margin)]
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
    x_BCHW = ((gaussian_blur(x_BCHW, c[0]) * 255 + 4e-4).floor() / 255).clamp(0, 1)
    count = height * width
    order_N = torch.arange(count)
    moved_HW = torch.zeros(height, width, dtype=torch.bool)
    moved_HW[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    for index in range(rounds):
        offset_BM = noise.integers(noise.fold(draws.key, index), draws.id_B, 2 * count, 2 * reach) - reach
        row_BN, column_BN = offset_BM.chunk(2, 1)
        near_BN = order_N + row_BN * width + column_BN
        source_BN = torch.where(moved_HW.flatten(), near_BN, order_N)
        # A later pixel has its final value already; an earlier one, its old value, which is a node of its own.
        final_BN = torch.where(source_BN > order_N, source_BN, source_BN + count)
        node_BM = torch.cat([final_BN, (order_N + count).expand_as(final_BN)], 1)
        while not torch.equal(further_BM := node_BM.gather(1, node_BM), node_BM):
            node_BM = further_BM
        pixel_BN = node_BM[:, :count] - count
        x_BCHW = x_BCHW.flatten(2).gather(2, pixel_BN[:, None].expand(-1, x_BCHW.shape[1], -1)).view_as(x_BCHW)
    return gaussian_blur(x_BCHW, c[0])


def motion_blur(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Blur along a random direction."""
    return blur_along(x_BCHW, c[0], c[1], draws.uniform(0, 1, -45, 45)[:, 0])


def zoom_blur(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Average over several enlargements."""
    height, width = x_BCHW.shape[-2:]
    x64_BCHW = x_BCHW.double()
    pairs = list(zip(zoom_matrices(height, *c), zoom_matrices(width, *c), strict=True))
    total_BCHW = sum((filter_rows_and_columns(x64_BCHW, *pair) for pair in pairs), torch.zeros_like(x64_BCHW))
    return (total_BCHW / len(pairs)).float()


def snow(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Whiten the image and add flakes that fall in a random direction."""
    mean, deviation, factor, threshold, radius, sigma, share = c
    height, width = x_BCHW.shape[-2:]
    factor = max(factor, 1)  # below 112 pixels, ImageNet's factors would be smaller: flakes of less than a pixel
    flakes_B1HW = mean + deviation * draws.normal(0, height * width).view(-1, 1, height, width)
    flakes_B1HW = filter_rows_and_columns(
        flakes_B1HW, zoom_resampling_matrix(height, factor), zoom_resampling_matrix(width, factor)
    )
    flakes_B1HW = (flakes_B1HW.masked_fill(flakes_B1HW < threshold, 0).clamp(0, 1) * 255).floor() / 255
    flakes_B1HW = blur_along(flakes_B1HW, radius, sigma, draws.uniform(1, 1, -135, -45)[:, 0])
    flakes_B1HW = (flakes_B1HW * 255).round() / 255
    grey_B1HW = x_BCHW
    if x_BCHW.shape[1] == 3:
        red, green, blue = torch.split(x_BCHW, 1, 1)
        grey_B1HW = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    bright_BCHW = torch.maximum(x_BCHW, grey_B1HW * 1.5 + 0.5)
    return share * x_BCHW + (1 - share) * bright_BCHW + flakes_B1HW + flakes_B1HW.flip(2, 3)


def fog(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Add a plasma fractal, and scale to the old maximum."""
    height, width = x_BCHW.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()  # the next power of two
    map_BSS = plasma_fractals(draws.uniform(0, side * side, -1, 1), side, c[1])
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
    x_BCHW = _sample_bilinear(x_BCHW, at_B2HW[0], at_B2HW[1], repeat_edge=False)
    if not amplitude:
        return x_BCHW
    rough_B2HW = draws.uniform(1, 2 * height * width, -1, 1).view(-1, 2, height, width)
    field_B2HW = amplitude * gaussian_blur(rough_B2HW, sigma, 3.0, "reflect").double()
    return _sample_bilinear(x_BCHW, column_W + field_B2HW[:, 0], row_H1 + field_B2HW[:, 1], repeat_edge=True)


def pixelate(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Shrink and enlarge the image."""

    def change(picture: Image.Image) -> Image.Image:
        width, height = picture.size
        small = picture.resize((int(width * c[0]), int(height * c[0])), Image.Resampling.BOX)
        return small.resize((width, height), Image.Resampling.BOX)

    return _apply_with_pillow(x_BCHW, change)


def jpeg_compression(x_BCHW: Tensor, c: Parameters, draws: Draws) -> Tensor:
    """Compress as JPEG and read back."""

    def change(picture: Image.Image) -> Image.Image:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(c[0]))
        return Image.open(file)

    return _apply_with_pillow(x_BCHW, change)


KINDS = {
    kind.__name__: kind
    for kind in (
        *(gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur),
        *(snow, fog, brightness, contrast, elastic_transform, pixelate, jpeg_compression),
    )
}
"""Functions from float32 images in [0, 1] to corrupted images, of any range."""


# -- parts of corruptions ----------------------------------------------------------------------------------------------


@cache
def _poisson_table(rate: float) -> tuple[Tensor, int]:
    """Return the cumulative probabilities of the counts of 256 levels, plus the level's number, and their count."""
    counts = int(rate + 10 * rate**0.5 + 20)
    mean_L1 = (torch.arange(256).double() / 255 * rate)[:, None]
    cumulative_LM = torch.from_numpy(special.pdtr(np.arange(counts), mean_L1.numpy()))
    cumulative_LM[:, -1] = 1  # so that a draw never falls into the next level's part of the table
    return (cumulative_LM + torch.arange(256)[:, None]).flatten(), counts


def _sample_bilinear(x_BCHW: Tensor, column_BHW: Tensor, row_BHW: Tensor, *, repeat_edge: bool) -> Tensor:
    """Return images at positions in pixels by bilinear interpolation, mirrored at their edges."""
    height, width = x_BCHW.shape[-2:]
    if repeat_edge:
        scaled = ((2 * column_BHW + 1) / width - 1, (2 * row_BHW + 1) / height - 1)
    else:
        scaled = (2 * column_BHW / (width - 1) - 1, 2 * row_BHW / (height - 1) - 1)
    grid_BHW2 = torch.stack(scaled, 3).to(x_BCHW.dtype)
    return F.grid_sample(x_BCHW, grid_BHW2, "bilinear", "reflection", align_corners=not repeat_edge)


def _apply_with_pillow(x_BCHW: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    pixels_BHWC = (x_BCHW * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    results = np.empty_like(pixels_BHWC)
    for pixels_HWC, result_HWC in zip(pixels_BHWC, results, strict=True):
        picture = Image.fromarray(pixels_HWC[..., 0] if pixels_HWC.shape[2] == 1 else pixels_HWC)
        result_HWC[:] = np.atleast_3d(np.asarray(change(picture)))
    return torch.from_numpy(results).permute(0, 3, 1, 2).float() / 255


# -- filters and random fields -----------------------------------------------------------------------------------------


def filter_rows_and_columns(x_BCHW: Tensor, rows_HH: Tensor, columns_WW: Tensor) -> Tensor:
    """Return images filtered along their rows and columns."""
    return (rows_HH @ x_BCHW.double() @ columns_WW.T).to(x_BCHW.dtype)


def gaussian_blur(x_BCHW: Tensor, sigma: float, truncate: float = 4.0, mode: Border = "nearest") -> Tensor:
    """Return images filtered by a Gaussian, see :func:`gaussian_matrix`."""
    return filter_rows_and_columns(x_BCHW, *(gaussian_matrix(n, sigma, truncate, mode) for n in x_BCHW.shape[-2:]))


@cache
def gaussian_matrix(n: int, sigma: float, truncate: float, mode: Border) -> Tensor:
    """Return the matrix of scipy's Gaussian filter over ``n`` pixels, (N, N), of a deviation of ``sigma`` pixels.

    ``reflect`` mirrors the image at its edge, repeating the last pixel; with ``nearest`` that continues.
    """
    return torch.from_numpy(ndimage.gaussian_filter1d(np.eye(n), sigma, 0, mode=mode, truncate=truncate))


@cache
def zoom_resampling_matrix(n: int, factor: float) -> Tensor:
    """Return the matrix, (N, N), that enlarges the centre of ``n`` pixels to ``n`` pixels by scipy's linear zoom."""
    inner = math.ceil(n / factor)
    enlarged = ndimage.zoom(np.eye(inner), (factor, 1), order=1)
    top, left = (len(enlarged) - n) // 2, (n - inner) // 2
    matrix_NN = np.zeros((n, n))
    matrix_NN[:, left : left + inner] = enlarged[top : top + n]
    return torch.from_numpy(matrix_NN)


@cache
def zoom_matrices(n: int, stop: float, step: float) -> Tensor:
    """Return the matrices, (Z, N, N), of the identity and of the factors 1, 1 + ``step``, ... below ``stop``."""
    return torch.stack([zoom_resampling_matrix(n, factor) for factor in (1.0, *np.arange(1, stop, step).tolist())])


@cache
def disk_kernel_taps(radius: float, sigma: float) -> tuple[tuple[int, int, float], ...]:
    """Return the taps (row, column, weight) of a disk with smoothed edges, the blur of a lens out of focus."""
    half, reach = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    line, edge = np.arange(-half, half + 1), np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    inside = (line[:, None] ** 2 + line**2 <= radius**2).astype(float)
    kernel = np.outer(edge, edge) / edge.sum() ** 2
    smooth = ndimage.correlate(inside / inside.sum(), kernel, mode="mirror")
    places = np.argwhere(smooth > 1e-7).tolist()
    return tuple((row - half, column - half, float(smooth[row, column])) for row, column in places)


def blur_along(x_BCHW: Tensor, radius: float, sigma: float, angle_B: Tensor) -> Tensor:
    """Return images blurred in one direction, by half a Gaussian over ``2 radius + 1`` pixels, as in ImageMagick.

    The direction is in degrees; 0 is to the right and 90 down.  The last pixel continues beyond the edges.
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


def plasma_fractals(u_BN: Tensor, side: int, decay: float) -> Tensor:
    """Return plasma fractals by the diamond-square algorithm, (B, S, S), from 0 to 1.

    The side is a power of two; each map takes its square of uniform draws in [-1, 1).  ``decay`` is the ratio of the
    noise from one scale to the next finer one.
    """
    map_BSS = u_BN.new_zeros(len(u_BN), side, side)
    step, wobble, offset = side, 100.0, 0

    def noisy_mean(sum_BSS: Tensor) -> Tensor:
        nonlocal offset
        count = sum_BSS[0].numel()
        draw_BSS = u_BN[:, offset : offset + count].view(sum_BSS.shape)
        offset += count
        return torch.add(sum_BSS / 4, draw_BSS, alpha=wobble**2)

    while step >= 2:
        half = step // 2
        corner_BSS = map_BSS[:, ::step, ::step]
        pairs_BSS = corner_BSS + corner_BSS.roll(-1, 1)
        map_BSS[:, half::step, half::step] = noisy_mean(pairs_BSS + pairs_BSS.roll(-1, 2))
        centre_BSS = map_BSS[:, half::step, half::step]
        rows_BSS = centre_BSS + centre_BSS.roll(1, 1) + corner_BSS + corner_BSS.roll(-1, 2)
        map_BSS[:, ::step, half::step] = noisy_mean(rows_BSS)
        columns_BSS = centre_BSS + centre_BSS.roll(1, 2) + corner_BSS + corner_BSS.roll(-1, 1)
        map_BSS[:, half::step, ::step] = noisy_mean(columns_BSS)
        step, wobble = half, wobble / decay
    low_B11, high_B11 = map_BSS.amin((1, 2), keepdim=True), map_BSS.amax((1, 2), keepdim=True)
    return (map_BSS - low_B11) / (high_B11 - low_B11)
