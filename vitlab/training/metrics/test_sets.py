"""Metrics of test sets beside the test split: corrupted images, other pictures of the classes, and new labels."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitlab.components.base import Options
from vitlab.data.splits import TestSet
from vitlab.geometry import DataInfo
from vitlab.registry import BUILT_IN
from vitlab.spec.trial import TEST_SET_OPTIONS
from vitlab.training.metrics.contract import Metric, metric


class OfTestSet(Metric):
    """A metric that an option of the data adds, of the final weights; it is not named in ``train.metrics``."""

    splits = ("test",)
    test_set: TestSet

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Options) -> str:
        """Return the sentence that names the option of the data that adds this metric."""
        return f"it is a metric of a test set, which another option adds: write base.{cls.option}"


@metric.register("mce")
class MeanCorruptionError(OfTestSet):
    """Mean corruption error: share of corrupted test images that are classified wrongly, as ``test/mce``.

    It is reported by trials with ``data.corrupted``, at the end of the training.  The errors of each corruption are
    averaged over its severities (``test/mce_fog``), and these over the corruptions.  It is not divided by the error of
    AlexNet, as the mCE of the paper is.  ``frost``, a set of photographs, is part of the mean of published images
    (``corrupted_root``) alone.  Reference: arXiv:1903.12261.
    """

    goal = "min"
    option = "data.corrupted: all"

    def chance(self, data: DataInfo) -> float:
        return 1 - 1 / data.classes

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each wrongly classified image, (B,)."""
        return logits.argmax(1) != target


@metric.register("shifted_accuracy")
class ShiftedAccuracy(OfTestSet):
    """Share of correctly classified images of other test sets, such as ImageNet-R, as ``test/shifted_accuracy``.

    It is reported by trials with ``data.shifted``, at the end of the training: of each set
    (``test/shifted_accuracy_NAME``) and as the mean over the sets.  Predictions are among the classes that occur in the
    set alone.  Reference: arXiv:2006.16241 (ImageNet-R), arXiv:1907.07174 (ImageNet-A).
    """

    option = "data.shifted: {NAME: FOLDER}"

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each correctly classified image, (B,)."""
        # A prediction is among the classes of the set alone, as in its paper.
        classes_K = torch.tensor(self.test_set.classes, device=logits.device)
        return classes_K[logits[:, classes_K].argmax(1)] == target


@metric.register("real_accuracy")
class RealAccuracy(OfTestSet):
    """Share of test images whose prediction is one of their reassessed labels, as ``test/real_accuracy``.

    It is reported by trials with ``data.real_labels``, at the end of the training; images without labels are left out.
    Reference: arXiv:2006.07159 (ImageNet-ReaL).
    """

    option = "data.real_labels: FILE"

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each image whose prediction is right, (B,)."""
        assert self.test_set.right_NK is not None
        return self.test_set.right_NK.to(logits.device)[target, logits.argmax(1)]


def metrics_of_data_options(options: Options) -> dict[str, Metric]:
    """Return the metrics of test sets by name, from the options of a data set that add them."""
    return {
        name: metric.build(f"{BUILT_IN}:{name}") for option, name in TEST_SET_OPTIONS.items() if options.get(option)
    }


def metrics_of_test_set(test_set: TestSet) -> dict[str, Metric]:
    """Return the metrics of a test set by name."""
    one = metric.build(f"{BUILT_IN}:{test_set.metric}")
    assert isinstance(one, OfTestSet)
    one.test_set = test_set
    return {test_set.metric: one}


def average_test_sets(by_kind: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return the metrics of all test sets: the mean of each kind, and the mean over kinds.

    Args:
        by_kind: Kind to the metrics of its test sets, which are the same for each of them.
    """
    values: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for kind, each in by_kind.items():
        for name in each[0]:
            values[name][kind] = math.fsum(one[name] for one in each) / len(each)
    means = {name: math.fsum(of_kind.values()) / len(of_kind) for name, of_kind in values.items()}
    return means | {f"{name}_{kind}": value for name, of_kind in values.items() for kind, value in of_kind.items()}
