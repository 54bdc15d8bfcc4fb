"""Metrics of further test images: corrupted ones, and other sets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.data.splits import FurtherSplit
from vitlab.geometry import DataInfo
from vitlab.registry import BUILT_IN
from vitlab.training.metrics.contract import Metric, metric


@metric.register("mce")
class MeanCorruptionError(Metric):
    """Mean corruption error: share of corrupted test images that are classified wrongly, as ``test/mce``.

    It is reported by trials with ``data.corrupted``, at the end of the training.  The errors of each corruption are
    averaged over its severities (``test/mce_fog``), and these over the corruptions.  It is not divided by the error of
    AlexNet, as the mCE of the paper is.  Reference: arXiv:1903.12261.
    """

    goal = "min"
    splits = ("test",)
    option = "data.corrupted: all"

    def chance(self, data: DataInfo) -> float:
        """Return the error of guesses."""
        return 1 - 1 / data.classes

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each wrongly classified image, (B,)."""
        return logits.argmax(1) != target

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Mapping[str, Any]) -> str:
        """Return the sentence that names the option of the data that adds this metric."""
        return "it is a metric of corrupted test images, which another option adds: write base.data.corrupted: all"


@metric.register("shifted_accuracy")
class ShiftedAccuracy(Metric):
    """Share of correctly classified images of further test sets, such as ImageNet-R, as ``test/shifted_accuracy``.

    It is reported by trials with ``data.shifted``, at the end of the training: of each set
    (``test/shifted_accuracy_NAME``) and as the mean over the sets.  Predictions are among the classes that occur in the
    set alone.  Reference: arXiv:2006.16241 (ImageNet-R), arXiv:1907.07174 (ImageNet-A).
    """

    splits = ("test",)
    option = "data.shifted: {NAME: FOLDER}"
    classes: tuple[int, ...] = ()  #: classes that occur; empty for all

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each correctly classified image, (B,)."""
        if not self.classes:
            return logits.argmax(1) == target
        classes_K = torch.tensor(self.classes, device=logits.device)
        return classes_K[logits[:, classes_K].argmax(1)] == target

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Mapping[str, Any]) -> str:
        """Return the sentence that names the option of the data that adds this metric."""
        return "it is a metric of further test images, which another option adds: write base.data.shifted"


def further_metrics(options: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics of further test images by name, from the options of a data set that add them."""
    names = {"corrupted": "mce", "shifted": "shifted_accuracy"}
    return {name: metric.build(f"{BUILT_IN}:{name}") for option, name in names.items() if options.get(option)}


def metrics_of_further(split: FurtherSplit) -> dict[str, Metric]:
    """Return the metrics of a further split by name."""
    one = metric.build(f"{BUILT_IN}:{split.metric}")
    if isinstance(one, ShiftedAccuracy):
        one.classes = split.classes
    return {split.metric: one}


def further_values(by_kind: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return the metrics of all further splits: the mean of each kind, and the mean over kinds.

    Args:
        by_kind: Kind to the metrics of its splits, which are the same for each of them.
    """
    values: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for kind, each in by_kind.items():
        for name in each[0]:
            values[name][kind] = math.fsum(one[name] for one in each) / len(each)
    means = {name: math.fsum(of_kind.values()) / len(of_kind) for name, of_kind in values.items()}
    return means | {f"{name}_{kind}": value for name, of_kind in values.items() for kind, value in of_kind.items()}
