"""Corruptions of test images: fourteen kinds by five severities, as in CIFAR-10-C and ImageNet-C.

The fifteenth published kind, frost, is a set of photographs; it is read from published images alone.

Every corruption is a function of an image, its identity, the severity and a seed, independent of the rest of a batch.
Reference: Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations,
arXiv:1903.12261.

B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data.corruption.kinds import KINDS, Draws
from vitlab.data.corruption.tables import SEVERITIES as SEVERITIES
from vitlab.data.corruption.tables import parameters
from vitlab.data.datasets.base import MIN_CORRUPTED_SIDE

CHUNK_VALUES = 1 << 19
"""Values of the images that are corrupted together, so that they stay in a processor's cache."""


def corrupt(x_BCHW: Tensor, name: str, severity: int, id_B: Tensor, seed: int = 0) -> Tensor:
    """Return corrupted images of the same shape and dtype, on the CPU.

    Bytes are truncated, not rounded, to 256 levels, as by the authors.

    Args:
        x_BCHW: uint8, or float in [0, 1]; 1 or 3 channels, at least 8 by 8 pixels.
        name: One of :data:`~vitlab.data.datasets.base.COMPUTED_CORRUPTIONS`.
        severity: 1 to 5; parameters follow from it and the size, see :func:`vitlab.data.corruption.tables.parameters`.
        id_B: int64, identities of the images.
        seed: Of the draws.

    Raises:
        ValueError: If the images have other sizes or channels.
    """
    channels, height, width = x_BCHW.shape[1:]
    if channels not in (1, 3) or min(height, width) < MIN_CORRUPTED_SIDE:
        raise ValueError(f"{channels} channels and {height} by {width} pixels; 1 or 3 and at least 8 by 8 are allowed")
    c, key = parameters(name, severity, (height, width)), noise.key(seed, "corruption", name, severity)
    is_bytes, results = x_BCHW.dtype == torch.uint8, []
    at_once = max(1, CHUNK_VALUES // (channels * height * width))
    for begin in range(0, len(x_BCHW), at_once):
        part = slice(begin, begin + at_once)
        pixels_BCHW = x_BCHW[part].cpu()
        x01_BCHW = pixels_BCHW.float() / 255 if is_bytes else pixels_BCHW.float()
        changed_BCHW = KINDS[name](x01_BCHW, c, Draws(key, id_B[part].cpu())).clamp_(0, 1)
        if is_bytes:  # a thousandth of a level covers the rounding of float32
            results.append((changed_BCHW * 255 + 1e-3).to(torch.uint8))
        else:
            results.append(changed_BCHW.to(x_BCHW.dtype))
    return torch.cat(results) if results else x_BCHW.cpu()
