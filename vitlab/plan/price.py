"""Cost of a training: multiply-accumulates, images and GPU hours, by arithmetic alone.

A training costs 3 x MACs x images: a forward pass, and a backward pass of twice its work.  A multiply-accumulate is two
floating-point operations, and a GPU attains about 0.4 of its peak rate in training.
"""

from __future__ import annotations

from vitlab.spec.trial import TrainSpec

BACKWARD = 3  #: work of a training step in forward passes: one forward, and a backward of twice its work
UTILISATION = 0.4  #: share of the peak rate that a training attains; 0.3 to 0.5 if data loading keeps up


def images_seen(train: TrainSpec, examples: int | None = None) -> int | None:
    """Return the number of images that a training sees, in whole batches.

    Args:
        train: ``train`` of a trial's spec.
        examples: number of training images; if None, a length in epochs gives None.
    """
    size = train.batch_size
    if train.steps is not None:
        return train.steps * size
    if train.images is not None:
        return max(1, round(train.images / size)) * size
    if examples is not None and train.epochs is not None:
        return max(1, round(train.epochs * max(1, examples // size))) * min(size, examples)
    return None


def train_macs(macs: int, images: int) -> int:
    """Return the multiply-accumulates of a training on ``images`` images, without those of a teacher.

    Args:
        macs: multiply-accumulates of one forward pass of one image.
        images: number of images seen.
    """
    return BACKWARD * macs * images


def gpu_hours(train_macs: float, tflops: float) -> float:
    """Return the hours that a training takes on one GPU.

    Args:
        train_macs: multiply-accumulates of the training.
        tflops: peak rate of the GPU at the training's precision, in 10^12 operations per second.
    """
    return 2 * train_macs / (tflops * 1e12 * UTILISATION) / 3600
