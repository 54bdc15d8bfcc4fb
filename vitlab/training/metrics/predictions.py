"""Metrics of predictions: of the class of an image and its probability, and of every pixel.

Reference: Everingham et al., The Pascal Visual Object Classes Challenge: a retrospective, 2015, section 2.5
(intersection over union).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.components.base import Count, Options
from vitlab.data.pixels import IGNORED
from vitlab.geometry import TASKS, DataInfo, Task
from vitlab.spec.choice import TwoOrMore
from vitlab.training.losses import flat
from vitlab.training.metrics.contract import GuessedByClass, Metric, OfDecisions, mean, metric


@metric.register("loss")
class NegativeLogLikelihood(OfDecisions):
    """Mean negative log-likelihood of the class, independent of the training loss, so that arms are comparable.

    Of images of several classes, it is the mean over classes of the loss of their separate decisions.  A training whose
    value is not finite has diverged.
    """

    tasks = TASKS
    goal = "min"
    bounds = (0.0, math.inf)

    def chance(self, data: DataInfo) -> float:
        return math.log(2 if data.task == "multilabel" else data.classes)

    def of_each(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        if target_M.is_floating_point():
            return F.binary_cross_entropy_with_logits(logits_MK, target_M.to(logits_MK), reduction="none").mean(1)
        return F.cross_entropy(logits_MK, target_M, ignore_index=IGNORED, reduction="none")


@metric.register("accuracy")
class Accuracy(GuessedByClass, Metric):
    """Share of images whose class has the largest logit."""

    every_view = True
    quantum = 1.0

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each correctly classified image, (B,)."""
        return logits.argmax(1) == target


@metric.register("top_k")
@dataclass(kw_only=True)
class TopK(Metric):
    """Share of images whose class is among the k largest logits; named ``topK``, such as ``top5``, in results.

    Args:
        k: Number of largest logits.
    """

    quantum = 1.0

    k: TwoOrMore = 5

    def __post_init__(self) -> None:
        """Set the name in results."""
        self.name = f"top{self.k}"

    def chance(self, data: DataInfo) -> float:
        return min(1.0, self.k / data.classes)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each image whose class is among its ``k`` largest logits, (B,)."""
        top_BK = logits.topk(self.k, 1).indices
        return (top_BK == target[:, None]).any(1)

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Options) -> str | None:
        k = options["k"]
        return None if data.classes > k else f"k is {k}, and the data has {data.classes} classes; set a smaller k"


@metric.register("balanced_accuracy")
class BalancedAccuracy(GuessedByClass, Metric):
    """Mean over the classes of the split of the share of their images that are predicted correctly.

    A rare class counts as much as a frequent one.  Reference: Brodersen et al., The Balanced Accuracy and Its Posterior
    Distribution, ICPR 2010.
    """

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the class of each image and whether it was recognised, B2."""
        return torch.stack([target, logits.argmax(1) == target], 1)

    def value(self, rows_N: Tensor) -> float:
        return mean(torch.tensor(list(_accuracy_of_classes(rows_N).values()), dtype=torch.float64))


@metric.register("per_class_accuracy")
class PerClassAccuracy(BalancedAccuracy):
    """Share of each class's images that are predicted correctly, its recall, as ``per_class_accuracy_CLASS``.

    CLASS is the name of the class, with ``_`` for all but letters and digits, or its index where names are unknown or
    not distinct.  ``per_class_accuracy`` itself is the mean over the classes of the split, the balanced accuracy.
    """

    def parts(self, rows_N: Tensor) -> Mapping[str, float]:
        """Return the accuracy of each class of the split by its name."""
        names = [re.sub(r"\W+", "_", label) for label in self.labels]
        is_known = len(set(names)) == len(names) > 0
        return {
            names[label] if is_known else str(label): value for label, value in _accuracy_of_classes(rows_N).items()
        }


def _accuracy_of_classes(rows_N: Tensor) -> dict[int, float]:
    """Return the share of correct images of each class that occurs, from rows of class and correctness."""
    target_N, correct_N = rows_N.unbind(1)
    count_K = torch.bincount(target_N).double()
    share_K = torch.bincount(target_N, weights=correct_N.double()) / count_K
    return {int(label): float(share_K[label]) for label in count_K.nonzero()[:, 0]}


@metric.register("ece")
@dataclass(kw_only=True)
class ExpectedCalibrationError(Metric):
    """Mean distance of accuracy from confidence, over bins of equal width.  Reference: arXiv:1706.04599.

    Args:
        bins: Number of bins.
    """

    goal = "min"

    bins: Count = 15

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the confidence of each image and whether it is correct, B2."""
        probability_B, correct_B = logits.softmax(1).amax(1), logits.argmax(1) == target
        return torch.stack([probability_B.double(), correct_B.double()], 1)

    def value(self, rows_N: Tensor) -> float:
        probability_N, right_N = rows_N.double().unbind(1)
        # Bins are closed on the right, as in the reference.
        bin_N = (probability_N * self.bins).ceil().long().sub(1).clamp(0, self.bins - 1)
        gap_S = torch.zeros(self.bins, dtype=torch.float64).index_add_(0, bin_N, right_N - probability_N)
        return float(gap_S.abs().sum() / len(rows_N))


@metric.register("brier")
class Brier(Metric):
    """Mean squared distance of the probabilities from the class, summed over classes; 0 to 2.

    Reference: G. W. Brier, Verification of forecasts expressed in terms of probability, 1950.
    """

    goal = "min"
    bounds = (0.0, 2.0)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the squared distance between probabilities and target per image."""
        probability_BK = logits.double().softmax(1)
        return (probability_BK - F.one_hot(target, logits.shape[1])).square().sum(1)


# -- several classes an image ------------------------------------------------------------------------------------------


@metric.register("auroc")
class AUROC(Metric):
    """Mean over classes of the area under the ROC curve: the chance that an image of the class has the larger logit.

    More exactly the larger probability of the class, compared with an image of another class; ties count half.  Over
    the classes of the split; 1/2 if it has one class alone.  It keeps a number per image and class until the end of an
    evaluation.  Reference: Fawcett, An introduction to ROC analysis, Pattern Recognition Letters 27, 2006.
    """

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the probabilities of each image, and its class as the last column, (B, K + 1)."""
        return torch.cat([logits.softmax(1), target[:, None].to(logits.dtype)], 1)

    def value(self, rows_N: Tensor) -> float:
        from scipy.stats import rankdata  # takes half a second to import

        probability_NK, target_N = rows_N[:, :-1].numpy(), rows_N[:, -1].long().numpy()
        areas = []
        for label in np.unique(target_N):
            ranks_M = rankdata(probability_NK[:, label])[target_N == label]
            positive, negative = len(ranks_M), len(target_N) - len(ranks_M)
            if negative:
                areas.append((ranks_M.sum() - positive * (positive + 1) / 2) / (positive * negative))
        return float(np.mean(areas)) if areas else 0.5


@metric.register("map")
class MeanAveragePrecision(Metric):
    """Mean over classes of average precision: the mean precision at each rise of the recall, as in scikit-learn.

    Classes without an image in the split are left out.
    """

    tasks = ("multilabel",)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the score of each class and whether the image has it, (B, K, 2)."""
        return torch.stack([logits.double(), target.double()], 2)

    def value(self, rows_N: Tensor) -> float:
        values = [_average_precision(*rows_N2.unbind(1)) for rows_N2 in rows_N.unbind(1) if rows_N2[:, 1].any()]
        return mean(torch.tensor(values, dtype=torch.float64)) if values else 0.0


def _average_precision(score_N: Tensor, hit_N: Tensor) -> float:
    """Return the sum over distinct scores of the precision there times the rise of the recall."""
    order_N = score_N.argsort(descending=True)
    is_last_N = score_N[order_N].diff(append=score_N.new_tensor([-math.inf])) != 0
    found_N = hit_N[order_N].cumsum(0)
    rank_M = is_last_N.nonzero()[:, 0] + 1
    found_M = found_N[is_last_N]
    return float((found_M.diff(prepend=found_M.new_zeros(1)) * found_M / rank_M).sum() / found_N[-1])


@metric.register("micro_f1")
class MicroF1(Metric):
    """F1 of all decisions of the split together, where a class is predicted by a probability above 0.5."""

    tasks: ClassVar[tuple[Task, ...]] = ("multilabel",)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the numbers of right and of all positive predictions and labels by class, (1, K, 2)."""
        if target.ndim == 1:  # one class an image, and the one with the largest logit is predicted
            predicted_BK, has_BK = (F.one_hot(each_B, logits.shape[1]) > 0 for each_B in (logits.argmax(1), target))
        else:
            predicted_BK, has_BK = logits > 0, target > 0
        return torch.stack([2 * (predicted_BK & has_BK).sum(0), predicted_BK.sum(0) + has_BK.sum(0)], 1)[None]

    def value(self, rows_N: Tensor) -> float:
        """Return twice the right positive predictions over all positive predictions and labels."""
        right, positive = rows_N.sum((0, 1)).tolist()
        return right / positive if positive else 0.0


@metric.register("macro_f1")
class MacroF1(MicroF1):
    """Mean over classes of F1, over the classes that occur in the split as labels or predictions.

    As scikit-learn's ``f1_score`` with ``average="macro"``; of images with one class each, the class with the largest
    logit is predicted.
    """

    tasks = ("classification", "multilabel")

    def value(self, rows_N: Tensor) -> float:
        right_K, positive_K = rows_N.sum(0).double().unbind(1)
        return mean((right_K / positive_K)[positive_K > 0]) if positive_K.any() else 0.0


# -- segmentation ----------------------------------------------------------------------------------------------------


@metric.register("pixel_accuracy")
class PixelAccuracy(GuessedByClass, OfDecisions):
    """Share of correctly predicted pixels of the split.

    Uninformative for images that are mostly background: predicting background alone reaches the background's share.
    """

    tasks = ("segmentation",)

    def of_each(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
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
        return confusion_matrix(logits, target)[None]

    def value(self, rows_N: Tensor) -> float:
        confusion_KK = rows_N.sum(0)
        hit_K = confusion_KK.diagonal().double()
        union_K = confusion_KK.sum(0) + confusion_KK.sum(1) - confusion_KK.diagonal()
        counts_K = union_K > 0
        if self.left_out is not None:  # confusions with it still count against the other classes
            counts_K[self.left_out] = False
        return mean(hit_K[counts_K] / union_K[counts_K]) if counts_K.any() else 0.0


@metric.register("miou_foreground")
class MeanIoUForeground(MeanIoU):
    """Mean over classes of intersection over union, without the background (class 0)."""

    left_out = 0


def confusion_matrix(logits: Tensor, target: Tensor) -> Tensor:
    """Return the (K, K) counts of labelled decisions by label (rows) and prediction (columns)."""
    classes = logits.shape[1]
    logits_MK, target_M = flat(logits, target)
    # Unlabelled pixels are counted in one extra bin, which is dropped.
    pair_M = torch.where(target_M != IGNORED, target_M * classes + logits_MK.argmax(1), classes**2)
    return torch.bincount(pair_M, minlength=classes**2 + 1)[:-1].view(classes, classes)
