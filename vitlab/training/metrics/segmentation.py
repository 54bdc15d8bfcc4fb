"""Metrics of segmentation.

Reference: Everingham et al., The Pascal Visual Object Classes Challenge: a retrospective, 2015, section 2.5
(intersection over union).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vitlab.data.pixels import IGNORED
from vitlab.geometry import DataInfo
from vitlab.training.losses import flat
from vitlab.training.metrics.contract import Metric, OfDecisions, mean, metric


@metric.register("pixel_accuracy")
class PixelAccuracy(OfDecisions):
    """Share of correctly predicted pixels of the split.

    Uninformative for images that are mostly background: predicting background alone reaches the background's share.
    """

    tasks = ("segmentation",)

    def chance(self, data: DataInfo) -> float:
        """Return the accuracy of guesses: 1 / classes."""
        return 1 / data.classes

    def of_each(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        """Return True for each correct decision, (M,)."""
        return logits_MK.argmax(1) == target_M


@metric.register("miou")
class MeanIoU(Metric):
    """Mean over classes of intersection over union, including the background (class 0).

    Computed from the confusion matrix of the whole split, over the classes that occur there as labels or predictions.
    """

    tasks = ("segmentation",)
    left_out: ClassVar[int | None] = None

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the batch's confusion matrix as one row."""
        return confusion(logits, target)[None]

    def value(self, rows_N: Tensor) -> float:
        """Return the mean IoU of the summed confusion matrix."""
        return mean_iou(rows_N.sum(0), self.left_out)


@metric.register("miou_foreground")
class MeanIoUForeground(MeanIoU):
    """Mean over classes of intersection over union, without the background (class 0)."""

    left_out = 0


def confusion(logits: Tensor, target: Tensor) -> Tensor:
    """Return the (K, K) counts of labelled decisions by label (rows) and prediction (columns)."""
    classes = logits.shape[1]
    logits_MK, target_M = flat(logits, target)
    # Unlabelled pixels are counted in one extra bin, which is dropped.
    pair_M = torch.where(target_M != IGNORED, target_M * classes + logits_MK.argmax(1), classes**2)
    return torch.bincount(pair_M, minlength=classes**2 + 1)[:-1].view(classes, classes)


def mean_iou(confusion_KK: Tensor, background: int | None = None) -> float:
    """Return the mean intersection over union of the classes that occur.

    Args:
        confusion_KK: Counts by (label, prediction).
        background: A class left out of the mean; confusions with it still count against the other classes.

    Returns:
        The mean, or 0 if no class occurs.
    """
    hit_K = confusion_KK.diagonal().double()
    union_K = confusion_KK.sum(0) + confusion_KK.sum(1) - confusion_KK.diagonal()
    counts_K = union_K > 0
    if background is not None:
        counts_K[background] = False
    return mean(hit_K[counts_K] / union_K[counts_K]) if counts_K.any() else 0.0
