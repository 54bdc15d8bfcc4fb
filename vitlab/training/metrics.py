"""The slot ``metric``: what is said of a model after an evaluation, one number of a split each.

Every trial reports the metrics of its task (:data:`STANDARD`) and those that its ``train.metrics`` names, as
``val/NAME`` and ``test/NAME``.  Evaluating changes no weight; metrics are a part of what a trial is all the same,
because no other record of an evaluation holds what they are made of: one that is named later is computed by training
again.

B images of a batch, N rows of a split, K classes, P pixels of an image, M decisions: images, or the pixels of
segmentation.  Classes stand on axis 1 of logits, (B, K) or (B, K, rows, columns).

Reference: arXiv:1706.04599 (calibration); Everingham et al., The Pascal Visual Object Classes Challenge: a
retrospective, 2015, section 2.5 (intersection over union).
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vitlab.data.pixels import IGNORED
from vitlab.geometry import DataInfo, Task
from vitlab.registry import BUILT_IN, Resolved, Slot
from vitlab.spec import Choice
from vitlab.spec.check import Goal
from vitlab.training.losses import flat

TASKS: tuple[Task, ...] = get_args(Task)

Columns = dict[str, Tensor]
"""One value per image, by name."""


class Metric(ABC):
    """Contract: ``rows`` says what a batch contributes, ``value`` makes one number of the rows of a whole split.

    The rows of all batches are joined along their first axis, and read back from the device once, at the end.  By
    default a metric is their mean, so that one of images, such as accuracy, defines ``rows`` alone.  One that is no
    mean of images keeps in its rows what it takes: of a rank correlation ranks, of a ratio numerator and denominator.
    How a split was cut into batches must not matter.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("classification",)  #: what it can judge
    goal: ClassVar[Goal] = "max"  #: which way is better, where a study does not say
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)  #: between which it lies
    every_view: ClassVar[bool] = False
    """Also of the other predictions of heads that make several, as ``NAME_VIEW``: ``accuracy_dist``."""
    name: str = ""  #: in results; by default what the study calls it, and set where an option makes it another number

    @abstractmethod
    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """What a batch contributes, (B, ...), or in fewer rows what is already added up.

        Args:
            logits: float32 or wider, (B, K) or (B, K, rows, columns).
            target: the class, (B,) or (B, rows, columns); :data:`~vitlab.data.pixels.IGNORED` where there is none,
                which must count nowhere.
        """

    def value(self, rows_N: Tensor) -> float:
        """The metric of a split; by default the mean.

        Args:
            rows_N: the rows of all its batches, on the CPU.
        """
        return mean(rows_N)

    def column(self, rows_N: Tensor) -> Tensor | None:
        """One value per image, (N,), to be kept in ``predictions.parquet`` under the metric's name; or nothing."""
        return None

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Mapping[str, Any]) -> str | None:
        """Why it says nothing of such data, in one sentence."""
        return None


metric: Slot[Metric] = Slot("metric", Metric)  # type: ignore[type-abstract]  # a contract is not built


# -- of decisions -----------------------------------------------------------------------------------------------------


class OfDecisions(Metric):
    """A mean over decisions, images or their pixels: a row per image holds a sum, and of how many decisions it is."""

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        logits_MK, target_M = flat(logits, target)
        shape = (len(logits), -1)
        value_BP = self.of_each(logits_MK, target_M).double().view(shape)
        labelled_BP = (target_M != IGNORED).view(shape)
        return torch.stack([torch.where(labelled_BP, value_BP, 0).sum(1), labelled_BP.double().sum(1)], 1)

    @abstractmethod
    def of_each(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        """The value of each decision, (M,); that of one without a label is left out."""

    def value(self, rows_N: Tensor) -> float:
        sums_N, counts_N = rows_N.T.contiguous()
        return float(sums_N.sum() / counts_N.sum())

    def column(self, rows_N: Tensor) -> Tensor:
        """The mean over the decisions of each image; of one without any label it is not a number."""
        return rows_N[:, 0] / rows_N[:, 1]


@metric.register("loss")
class NegativeLogLikelihood(OfDecisions):
    """Mean negative log-likelihood of the class, whatever loss is trained on, so that arms can be compared by it.

    Where it is not finite a training has diverged.
    """

    tasks = TASKS
    goal = "min"
    bounds = (0.0, math.inf)

    def of_each(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        return F.cross_entropy(logits_MK, target_M, ignore_index=IGNORED, reduction="none")


@metric.register("pixel_accuracy")
class PixelAccuracy(OfDecisions):
    """Share of all pixels of the split that are predicted rightly.

    Where most of an image is background it says little: predicting nothing else reaches the background's share.
    """

    tasks = ("segmentation",)

    def of_each(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        return logits_MK.argmax(1) == target_M


# -- of images --------------------------------------------------------------------------------------------------------


@metric.register("accuracy")
class Accuracy(Metric):
    """Share of images whose class has the largest logit."""

    every_view = True

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits.argmax(1) == target


@metric.register("top_k")
class TopK(Metric):
    """Share of images whose class is among the k with the largest logits; in results ``top5``, or another number."""

    def __init__(self, *, k: Annotated[int, Field(ge=2)] = 5) -> None:
        self.k = k
        self.name = f"top{k}"

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        top_BK = logits.topk(self.k, 1).indices
        return (top_BK == target[:, None]).any(1)

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Mapping[str, Any]) -> str | None:
        k = options["k"]
        return None if data.classes > k else f"the class is always among {k} of {data.classes}"


@metric.register("balanced_accuracy")
class BalancedAccuracy(Metric):
    """Mean over the classes of the split of the share of their images that are predicted rightly.

    A rare class counts as much as a frequent one.  Reference: Brodersen et al., The Balanced Accuracy and Its Posterior
    Distribution, ICPR 2010.
    """

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return torch.stack([target, logits.argmax(1) == target], 1)

    def value(self, rows_N: Tensor) -> float:
        target_N, right_N = rows_N.unbind(1)
        of_K = torch.bincount(target_N)
        right_K = torch.bincount(target_N, weights=right_N.double())
        return mean(right_K[of_K > 0] / of_K[of_K > 0])


@metric.register("ece")
class ExpectedCalibrationError(Metric):
    """Mean distance of accuracy from confidence, over bins of equal width.  Reference: arXiv:1706.04599."""

    goal = "min"

    def __init__(self, *, bins: Annotated[int, Field(ge=1)] = 15) -> None:
        self.bins = bins

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        probability_B, right_B = logits.softmax(1).amax(1), logits.argmax(1) == target
        return torch.stack([probability_B.double(), right_B.double()], 1)

    def value(self, rows_N: Tensor) -> float:
        probability_N, right_N = rows_N.unbind(1)
        return calibration_error(probability_N, right_N, self.bins)


@metric.register("brier")
class Brier(Metric):
    """Mean squared distance of the probabilities from the class, summed over classes; 0 to 2.

    Reference: G. W. Brier, Verification of forecasts expressed in terms of probability, 1950.
    """

    goal = "min"
    bounds = (0.0, 2.0)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        probability_BK = logits.double().softmax(1)
        return (probability_BK - F.one_hot(target, logits.shape[1])).square().sum(1)


# -- of a table of counts ---------------------------------------------------------------------------------------------


@metric.register("miou")
class MeanIoU(Metric):
    """Mean over classes of intersection over union, the background (class 0) among them.

    It comes from one table of counts over the whole split, and is of the classes that occur there, as labels or as
    predictions.
    """

    tasks = ("segmentation",)
    left_out: ClassVar[int | None] = None

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return confusion(logits, target)[None]

    def value(self, rows_N: Tensor) -> float:
        return mean_iou(rows_N.sum(0), self.left_out)


@metric.register("miou_foreground")
class MeanIoUForeground(MeanIoU):
    """Mean over classes of intersection over union, without the background (class 0)."""

    left_out = 0


# -- of a trial -------------------------------------------------------------------------------------------------------

STANDARD: Mapping[Task, tuple[str, ...]] = {
    "classification": ("loss", "accuracy", "top_k", "ece"),
    "segmentation": ("loss", "pixel_accuracy", "miou", "miou_foreground"),
}
"""What every trial of a task reports, less what says nothing of its data, such as ``top5`` of five classes."""

KEPT = ("split", "id", "label", "prediction", "probability")
"""Names of other columns of ``predictions.parquet``."""


def metrics_of(data: DataInfo, chosen: Sequence[Choice] = ()) -> dict[str, Metric]:
    """The metrics of a trial by their names in results: those of its task, and those it has chosen."""
    return {_name(choice): metric.build(choice) for choice in [*_standard(data), *map(metric.resolve, chosen)]}


def settled(data: DataInfo, chosen: Sequence[Resolved]) -> tuple[list[int], list[tuple[int, str]]]:
    """Which of the metrics that a trial names it reports beyond those of its task, and what is wrong with which.

    What is reported anyway, and what is named twice, is left out, so that equal trials have equal keys.
    """
    known = [(choice.component, choice.options) for choice in _standard(data)]
    taken = {_name(choice) for choice in _standard(data)}
    kept: list[int] = []
    faults = []
    for index, choice in enumerate(chosen):
        if (choice.component, choice.options) in known:
            continue
        component, name = choice.component, _name(choice)
        assert issubclass(component, Metric)
        if data.task not in component.tasks:
            faults.append((index, f"metric '{choice.type}' judges {' and '.join(component.tasks)}, not {data.task}"))
        elif reason := component.incompatibility(data, choice.options):
            faults.append((index, f"metric '{choice.type}': {reason}"))
        elif not re.fullmatch(r"\w+", name) or name in KEPT:
            faults.append((index, f"metric '{choice.type}' cannot be called '{name}' in results"))
        elif name in taken:
            faults.append((index, f"metric '{choice.type}' would be '{name}' in results, which another one is"))
        kept.append(index)
        known.append((component, choice.options))
        taken.add(name)
    return kept, faults


def _standard(data: DataInfo) -> list[Resolved]:
    # By their full names: a guest that offers one of these is in nobody's way.
    found = [metric.resolve(f"{BUILT_IN}:{name}") for name in STANDARD[data.task]]
    return [choice for choice in found if choice.component.incompatibility(data, choice.options) is None]  # type: ignore[attr-defined]


def _name(choice: Resolved) -> str:
    return metric.build(choice).name or choice.type.rpartition(":")[2]


class MetricAccumulator:
    """Takes an evaluation batch by batch; nothing is read back from the device before the end."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        """``metrics`` by their names in results, ``loss`` first: see :func:`metrics_of`."""
        self._metrics = metrics
        self._rows: defaultdict[str, defaultdict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self._columns: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add(self, views: Mapping[str, Tensor], target: Tensor, id_B: Tensor) -> None:
        """Take a batch: logits by view, ``""`` the prediction; the classes; the identities of the images."""
        self._columns["id"].append(id_B)
        if views[""].ndim == 2:
            probability_B, prediction_B = views[""].softmax(1).max(1)
            for name, column_B in (("label", target), ("prediction", prediction_B), ("probability", probability_B)):
                self._columns[name].append(column_B)
        for name, one in self._metrics.items():
            for view in views if one.every_view else ("",):
                self._rows[name][view].append(one.rows(views[view], target))

    def metrics(self) -> dict[str, float]:
        """The metrics over all that was taken; where the loss is not finite that alone, for the rest means nothing."""
        found: dict[str, float] = {}
        for name, one in self._metrics.items():
            for view, parts in self._rows[name].items():
                found[f"{name}_{view}" if view else name] = float(one.value(_joined(parts)))
            if not math.isfinite(found.get("loss", 0.0)):
                break
        return found

    def columns(self) -> Columns:
        """What each image contributed, on the CPU."""
        found = {name: _joined(parts) for name, parts in self._columns.items()}
        for name, one in self._metrics.items():
            column_N = one.column(_joined(self._rows[name][""]))
            if column_N is not None:
                found[name] = column_N
        return found


def _joined(parts: list[Tensor]) -> Tensor:
    """All parts as one, on the CPU; kept in their place."""
    parts[:] = [torch.cat(parts).cpu()]
    return parts[0]


# -- formulas ---------------------------------------------------------------------------------------------------------


def mean(values: Tensor) -> float:
    """The mean, summed in float64."""
    return float(values.double().mean())


def calibration_error(probability_N: Tensor, right_N: Tensor, bins: int = 15) -> float:
    """Mean distance of accuracy from confidence over bins of equal width, weighted by the images in each.

    Args:
        probability_N: of the predicted class.
        right_N: whether the prediction was right.
        bins: how many.
    """
    bin_N = (probability_N.double() * bins).ceil().long().sub(1).clamp(0, bins - 1)
    excess_N = right_N.double() - probability_N.double()
    gap_S = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_N, excess_N)
    return float(gap_S.abs().sum() / len(probability_N))


def confusion(logits: Tensor, target: Tensor) -> Tensor:
    """(K, K): the decisions of each label (rows) and prediction (columns), without those that have no label."""
    classes = logits.shape[1]
    logits_MK, target_M = flat(logits, target)
    # Pixels without a label are counted in a place of their own, behind the table, which is then left off.
    pair_M = torch.where(target_M != IGNORED, target_M * classes + logits_MK.argmax(1), classes**2)
    return torch.bincount(pair_M, minlength=classes**2 + 1)[:-1].view(classes, classes)


def mean_iou(confusion_KK: Tensor, background: int | None = None) -> float:
    """Mean intersection over union of the classes that occur, from counts of (label, prediction).

    Args:
        background: a class whose own intersection over union is left out of the mean; what was taken for it, or it
            for, still counts against the others.

    Returns:
        0 where no class is left: nothing of it was there, and nothing was found.
    """
    hit_K = confusion_KK.diagonal().double()
    union_K = confusion_KK.sum(0) + confusion_KK.sum(1) - confusion_KK.diagonal()
    counts_K = union_K > 0
    if background is not None:
        counts_K[background] = False
    return mean(hit_K[counts_K] / union_K[counts_K]) if counts_K.any() else 0.0
