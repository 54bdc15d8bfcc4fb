"""Corruptions of test images: fourteen kinds by five severities, as in CIFAR-10-C and ImageNet-C.

The fifteenth published kind, frost, is a set of photographs; it is read from published images alone.

Every corruption is a function of an image, its identity, the severity and a seed, independent of the rest of a batch.
Reference: Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations,
arXiv:1903.12261, and the authors' scripts for 32 and for 224 pixels.

B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data.corruption.kinds import KINDS, Draws, Parameters
from vitlab.geometry import Pair

CHUNK_VALUES = 1 << 19
"""Values of the images that are corrupted together, so that they stay in a processor's cache."""

SEVERITIES = (1, 2, 3, 4, 5)

CIFAR: Mapping[str, tuple[Parameters, ...]] = {
    "gaussian_noise": ((0.04, 0.06, 0.08, 0.09, 0.1),),
    "shot_noise": ((500, 250, 100, 75, 50),),
    "impulse_noise": ((0.01, 0.02, 0.03, 0.05, 0.07),),
    "defocus_blur": ((0.3, 0.4, 0.5, 1, 1.5), (0.4, 0.5, 0.6, 0.2, 0.1)),
    "glass_blur": ((0.05, 0.25, 0.4, 0.25, 0.4), (1, 1, 1, 1, 1), (1, 1, 1, 2, 2)),
    "motion_blur": ((6, 6, 6, 8, 9), (1, 1.5, 2, 2, 2.5)),
    "zoom_blur": ((1.06, 1.11, 1.16, 1.21, 1.26), (0.01, 0.01, 0.01, 0.01, 0.01)),
    "snow": (
        (0.1, 0.1, 0.15, 0.25, 0.3),
        (0.2, 0.2, 0.3, 0.3, 0.3),
        (1, 1, 1.75, 2.25, 1.25),
        (0.6, 0.5, 0.55, 0.6, 0.65),
        (8, 10, 10, 12, 14),
        (3, 4, 4, 6, 12),
        (0.95, 0.9, 0.9, 0.85, 0.8),
    ),
    "fog": ((0.2, 0.5, 0.75, 1, 1.5), (3, 3, 2.5, 2, 1.75)),
    "brightness": ((0.05, 0.1, 0.15, 0.2, 0.3),),
    "contrast": ((0.75, 0.5, 0.4, 0.3, 0.15),),
    "elastic_transform": (
        (0, 0.05 * 32, 0.08 * 32, 0.1 * 32, 0.1 * 32),
        (0, 0.2 * 32, 0.06 * 32, 0.04 * 32, 0.03 * 32),
        (0.08 * 32, 0.07 * 32, 0.06 * 32, 0.05 * 32, 0.03 * 32),
    ),
    "pixelate": ((0.95, 0.9, 0.85, 0.75, 0.65),),
    "jpeg_compression": ((80, 65, 58, 50, 40),),
}
"""Values of each parameter for 32 by 32 pixels, by severity, as in the authors' script."""

IMAGENET: Mapping[str, tuple[Parameters, ...]] = {
    "gaussian_noise": ((0.08, 0.12, 0.18, 0.26, 0.38),),
    "shot_noise": ((60, 25, 12, 5, 3),),
    "impulse_noise": ((0.03, 0.06, 0.09, 0.17, 0.27),),
    "defocus_blur": ((3, 4, 6, 8, 10), (0.1, 0.5, 0.5, 0.5, 0.5)),
    "glass_blur": ((0.7, 0.9, 1, 1.1, 1.5), (1, 2, 2, 3, 4), (2, 1, 3, 2, 2)),
    "motion_blur": ((10, 15, 15, 15, 20), (3, 5, 8, 12, 15)),
    "zoom_blur": ((1.11, 1.16, 1.21, 1.26, 1.31), (0.01, 0.01, 0.02, 0.02, 0.03)),
    "snow": (
        (0.1, 0.2, 0.55, 0.55, 0.55),
        (0.3, 0.3, 0.3, 0.3, 0.3),
        (3, 2, 4, 4.5, 2.5),
        (0.5, 0.5, 0.9, 0.85, 0.85),
        (10, 12, 12, 12, 12),
        (4, 4, 8, 8, 12),
        (0.8, 0.7, 0.7, 0.65, 0.55),
    ),
    "fog": ((1.5, 2, 2.5, 2.5, 3), (2, 2, 1.7, 1.5, 1.4)),
    "brightness": ((0.1, 0.2, 0.3, 0.4, 0.5),),
    "contrast": ((0.4, 0.3, 0.2, 0.1, 0.05),),
    "elastic_transform": (
        (2 * 244, 2 * 244, 0.05 * 244, 0.07 * 244, 0.12 * 244),
        (0.7 * 244, 0.08 * 244, 0.01 * 244, 0.01 * 244, 0.01 * 244),
        (0.1 * 244, 0.2 * 244, 0.02 * 244, 0.02 * 244, 0.02 * 244),
    ),
    "pixelate": ((0.6, 0.5, 0.4, 0.3, 0.25),),
    "jpeg_compression": ((25, 18, 15, 10, 7),),
}
"""The same for 224 by 224 pixels."""

PIXELS: Mapping[str, tuple[int, ...]] = {
    "defocus_blur": (0, 1),
    "glass_blur": (0, 1),
    "motion_blur": (0, 1),
    "snow": (2, 4, 5),
    "elastic_transform": (0, 1, 2),
}
"""Positions of the parameters that are lengths in pixels.  All others are shares, and the same at any size."""

BOUNDARY = 85
"""Shortest side up to which the table of CIFAR-10-C applies: the geometric mean of 32 and 224."""


def parameters(name: str, severity: int, size: Pair) -> Parameters:
    """Return the parameters of a corruption for images of a size.

    Images with a short side of up to :data:`BOUNDARY` pixels have the parameters of CIFAR-10-C, larger ones
    ImageNet-C's.  Lengths in pixels are proportional to the short side.  Below 32 pixels they stay as at 32 pixels,
    since shorter ones would be less than a pixel and change nothing; except for the displacements of
    ``elastic_transform``, which stay proportional.
    """
    side = min(size)
    table, scale = (CIFAR, side / 32) if side <= BOUNDARY else (IMAGENET, side / 224)
    if table is CIFAR and name != "elastic_transform":
        scale = max(scale, 1)
    values, lengths = [by_severity[severity - 1] for by_severity in table[name]], PIXELS.get(name, ())
    return tuple(value * scale if index in lengths else value for index, value in enumerate(values))


def corrupt(x_BCHW: Tensor, name: str, severity: int, id_B: Tensor, seed: int = 0) -> Tensor:
    """Return corrupted images, uint8, on the CPU.

    Args:
        x_BCHW: uint8; 1 or 3 channels, at least 8 by 8 pixels.
        name: One of :data:`~vitlab.data.datasets.base.COMPUTED_CORRUPTIONS`.
        severity: 1 to 5; parameters follow from it and the size, see :func:`parameters`.
        id_B: int64, identities of the images.
        seed: Of the draws.
    """
    channels, height, width = x_BCHW.shape[1:]
    c, key = parameters(name, severity, (height, width)), noise.key(seed, "corruption", name, severity)
    at_once = max(1, CHUNK_VALUES // (channels * height * width))
    results = []
    for pixels_BCHW, part_B in zip(torch.split(x_BCHW.cpu(), at_once), torch.split(id_B.cpu(), at_once), strict=True):
        changed_BCHW = KINDS[name](pixels_BCHW.float() / 255, c, Draws(key, part_B)).clamp_(0, 1)
        # Truncated to levels, as by the authors; a thousandth of a level covers the rounding of float32.
        results.append((changed_BCHW * 255 + 1e-3).to(torch.uint8))
    return torch.cat(results)
