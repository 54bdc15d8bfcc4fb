"""Parameters of the corruptions: those of CIFAR-10-C and ImageNet-C, scaled to the size of the images.

Reference: Hendrycks and Dietterich, arXiv:1903.12261, and the authors' scripts for 32 and for 224 pixels.
"""

from __future__ import annotations

from collections.abc import Mapping

from vitlab.geometry import Pair

SEVERITIES = (1, 2, 3, 4, 5)

Parameters = tuple[float, ...]

CIFAR: Mapping[str, tuple[Parameters, ...]] = {
    "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.1,)),
    "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
    "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
    "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
    "elastic_transform": (
        (0, 0, 0.08 * 32),
        (0.05 * 32, 0.2 * 32, 0.07 * 32),
        (0.08 * 32, 0.06 * 32, 0.06 * 32),
        (0.1 * 32, 0.04 * 32, 0.05 * 32),
        (0.1 * 32, 0.03 * 32, 0.03 * 32),
    ),
    "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
    "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
}
"""Parameters for 32 by 32 pixels, by severity."""

IMAGENET: Mapping[str, tuple[Parameters, ...]] = {
    "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
    "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
    "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
    "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
    "elastic_transform": (
        (2 * 244, 0.7 * 244, 0.1 * 244),
        (2 * 244, 0.08 * 244, 0.2 * 244),
        (0.05 * 244, 0.01 * 244, 0.02 * 244),
        (0.07 * 244, 0.01 * 244, 0.02 * 244),
        (0.12 * 244, 0.01 * 244, 0.02 * 244),
    ),
    "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
    "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
}
"""Parameters for 224 by 224 pixels, by severity."""

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

    Images with a short side of up to :data:`BOUNDARY` pixels have the parameters of CIFAR-10-C, larger ones those of
    ImageNet-C.  Lengths in pixels are proportional to the short side.  Below 32 pixels they stay those of 32 pixels,
    since shorter ones would be less than a pixel and change nothing; except for the displacements of
    ``elastic_transform``, which stay proportional.
    """
    side = min(size)
    table, reference = (CIFAR, 32) if side <= BOUNDARY else (IMAGENET, 224)
    scale = side / reference
    if name != "elastic_transform":
        scale = max(scale, 1) if table is CIFAR else scale
    lengths = PIXELS.get(name, ())
    return tuple(value * scale if index in lengths else value for index, value in enumerate(table[name][severity - 1]))
