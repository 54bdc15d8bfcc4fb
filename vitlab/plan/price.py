"""What a training costs, by arithmetic alone: from multiply-accumulates and images to work and to hours of a GPU.

A training costs 3 x MACs x images: one pass forward, and one backward of twice its work.  A multiply-accumulate is two
floating-point operations, and a GPU that trains does about 0.4 of what it could do at its peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BACKWARD = 3  #: a training step is a pass forward, and one backward of twice its work
UTILISATION = 0.4  #: share of the peak rate that a training attains; 0.3 to 0.5 where images arrive in time


def images_seen(train: Mapping[str, Any], examples: int | None = None) -> int | None:
    """Return how many images a training sees, in whole batches.

    Args:
        train: how it is trained, as a trial's spec says.
        examples: number of training images; without it, None is returned for a length in epochs.
    """
    size = int(train["batch_size"])
    if train.get("steps") is not None:
        return int(train["steps"]) * size
    if train.get("images") is not None:
        return max(1, round(int(train["images"]) / size)) * size
    if examples is not None:
        return max(1, round(float(train["epochs"]) * max(1, examples // size))) * min(size, examples)
    return None


def train_macs(macs: int, images: int) -> int:
    """Multiply-accumulates of a training that sees so many images; a teacher is not counted."""
    return BACKWARD * macs * images


def gpu_hours(train_macs: float, tflops: float) -> float:
    """Hours of one GPU for a training.

    Args:
        train_macs: multiply-accumulates of the training.
        tflops: peak rate of the GPU at the precision of the training, in 10^12 operations a second.
    """
    return 2 * train_macs / (tflops * 1e12 * UTILISATION) / 3600
