"""The slot ``metric``: the metrics of an evaluation, one number per split each.

Every trial reports the metrics of its task (:data:`STANDARD`) and those named in its ``train.metrics``, as
``val/NAME`` and ``test/NAME``.  Metrics are part of a trial's identity although they change no weight: logits are not
stored, so a metric added later requires training again.

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
from vitlab.data.splits import FurtherSplit
from vitlab.geometry import DataInfo, Task
from vitlab.registry import BUILT_IN, Resolved, Slot
from vitlab.spec import Choice
from vitlab.spec.choice import UNITS, Goal, Unit, is_unit
from vitlab.training.losses import flat

TASKS: tuple[Task, ...] = get_args(Task)


class Metric(ABC):
    """Contract: ``rows`` returns the contributions of a batch, and ``value`` reduces those of a split to one number.

    The rows of all batches are concatenated along the first axis and read back from the device once, at the end.  The
    default reduction is their mean, so that a mean over images, such as accuracy, defines ``rows`` alone.  The rows of
    other metrics hold whatever ``value`` needs, such as the numerator and denominator of a ratio.  The result must not
    depend on how a split is divided into batches.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("classification",)  #: tasks it applies to
    goal: ClassVar[Goal] = "max"  #: the better direction, unless the study names one
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)  #: its range; ``math.inf`` for an end without a limit
    unit: ClassVar[Unit | None] = None
    """``share``: of one, shown in percent; ``number``: shown without a unit; any other word, such as ``images`` or
    ``ms``, is shown as the unit.  By default a metric from 0 to 1 is a share, and any other a number."""
    quantum: ClassVar[float] = 0.0
    """Smallest change of the metric, times the number of images: 1 for a share of images; 0 if it has none.

    Equal values of several seeds then have an interval of the width of this rounding, instead of none."""
    step: ClassVar[float] = 0.0
    """Smallest change of the metric, whatever the number of images: 1 for a count.  A metric has it or ``quantum``."""
    splits: ClassVar[tuple[str, ...]] = ("val", "test")  #: splits that it is reported of
    option: ClassVar[str] = ""  #: option of a trial that adds it; by default its name in ``train.metrics``
    every_view: ClassVar[bool] = False
    """Whether it is also reported for further classifiers of the head, as ``NAME_VIEW``, such as ``accuracy_dist``."""
    name: str = ""  #: in results; by default the name in the study; set it if an option changes what is computed

    @abstractmethod
    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the contributions of a batch, (B, ...), or fewer rows if they are already summed.

        Args:
            logits: (B, K) or (B, K, rows, columns), float32 or wider.
            target: Class indices, (B,) or (B, rows, columns).  Decisions labelled
                :data:`~vitlab.data.pixels.IGNORED` must not count.
        """

    def value(self, rows_N: Tensor) -> float:
        """Return the metric of a split; by default the mean.

        Args:
            rows_N: The rows of all its batches, on the CPU.
        """
        return mean(rows_N)

    def column(self, rows_N: Tensor) -> Tensor | None:
        """Return one value per image, (N,), for ``predictions.parquet``; None if the metric has none."""
        return None

    def chance(self, data: DataInfo) -> float | None:
        """Return the value that guesses reach if all classes are equally likely; None if it is not known.

        Example: ``return 1 / data.classes``
        """
        return None

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Mapping[str, Any]) -> str | None:
        """Return in one sentence why the metric does not apply to the data; None if it does."""
        return None


def declaration_fault(component: type[Metric]) -> str | None:
    """Return in one sentence what is wrong with the facts that a metric declares; None if nothing is."""
    goal, bounds, unit, tasks = component.goal, component.bounds, component.unit, component.tasks
    if goal not in get_args(Goal):
        return f"goal is {goal!r}; it is max or min"
    if not (isinstance(bounds, tuple | list) and len(bounds) == 2 and all(map(_is_number, bounds))):
        return f"bounds are {bounds!r}; they are two numbers, with math.inf for an end without a limit"
    if not bounds[0] < bounds[1]:
        return f"bounds are {bounds}; the lower one comes first"
    if unit is not None and not (isinstance(unit, str) and is_unit(unit)):
        return f"unit is {unit!r}; it is {UNITS}"
    for name in ("quantum", "step"):
        value = getattr(component, name)
        if not (_is_number(value) and 0 <= value < math.inf):
            return f"{name} is {value!r}; it is 0 or more"
    if component.quantum and component.step:
        return f"quantum is {component.quantum:g} and step is {component.step:g}; set one of them"
    if not tasks or isinstance(tasks, str) or not set(tasks) <= set(TASKS):
        return f"tasks is {tasks!r}; it is a tuple of at least one of {', '.join(TASKS)}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


metric: Slot[Metric] = Slot("metric", Metric, fault=declaration_fault)  # type: ignore[type-abstract]  # a contract is not built


# -- metrics of decisions ----------------------------------------------------------------------------------------------


class OfDecisions(Metric):
    """A mean over decisions (images or their pixels); a row per image holds the sum and the number of decisions."""

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum and the count of each image's decisions, B2."""
        logits_MK, target_M = flat(logits, target)
        shape = (len(logits), -1)
        value_BP = self.of_each(logits_MK, target_M).double().view(shape)
        labelled_BP = (target_M != IGNORED).view(shape)
        return torch.stack([torch.where(labelled_BP, value_BP, 0).sum(1), labelled_BP.double().sum(1)], 1)

    @abstractmethod
    def of_each(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        """Return the value of each decision, (M,); values of unlabelled decisions are ignored."""

    def value(self, rows_N: Tensor) -> float:
        """Return the mean over all decisions."""
        sums_N, counts_N = rows_N.T.contiguous()
        return float(sums_N.sum() / counts_N.sum())

    def column(self, rows_N: Tensor) -> Tensor:
        """Return the mean over the decisions of each image; NaN for an image without labels."""
        return rows_N[:, 0] / rows_N[:, 1]


@metric.register("loss")
class NegativeLogLikelihood(OfDecisions):
    """Mean negative log-likelihood of the class, independent of the training loss, so that arms are comparable.

    A training whose value is not finite has diverged.
    """

    tasks = TASKS
    goal = "min"
    bounds = (0.0, math.inf)

    def chance(self, data: DataInfo) -> float:
        """Return the loss of a uniform prediction."""
        return math.log(data.classes)

    def of_each(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        """Return the cross-entropy of each decision."""
        return F.cross_entropy(logits_MK, target_M, ignore_index=IGNORED, reduction="none")


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


# -- metrics of images -------------------------------------------------------------------------------------------------


@metric.register("accuracy")
class Accuracy(Metric):
    """Share of images whose class has the largest logit."""

    every_view = True
    quantum = 1.0

    def chance(self, data: DataInfo) -> float:
        """Return the accuracy of guesses: 1 / classes."""
        return 1 / data.classes

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each correctly classified image, (B,)."""
        return logits.argmax(1) == target


@metric.register("top_k")
class TopK(Metric):
    """Share of images whose class is among the k largest logits; named ``topK``, such as ``top5``, in results.

    Args:
        k: Number of largest logits.
    """

    quantum = 1.0

    def __init__(self, *, k: Annotated[int, Field(ge=2)] = 5) -> None:
        self.k = k
        self.name = f"top{k}"

    def chance(self, data: DataInfo) -> float:
        """Return the share of images whose class is among k guesses."""
        return min(1.0, self.k / data.classes)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return True for each image whose class is among its ``k`` largest logits, (B,)."""
        top_BK = logits.topk(self.k, 1).indices
        return (top_BK == target[:, None]).any(1)

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Mapping[str, Any]) -> str | None:
        """Return a sentence if the data has at most ``k`` classes, which makes all correct; None otherwise."""
        k = options["k"]
        return None if data.classes > k else f"k is {k}, and the data has {data.classes} classes; set a smaller k"


@metric.register("balanced_accuracy")
class BalancedAccuracy(Metric):
    """Mean over the classes of the split of the share of their images that are predicted correctly.

    A rare class counts as much as a frequent one.  Reference: Brodersen et al., The Balanced Accuracy and Its Posterior
    Distribution, ICPR 2010.
    """

    def chance(self, data: DataInfo) -> float:
        """Return the accuracy of guesses: 1 / classes."""
        return 1 / data.classes

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the class of each image and whether it was recognised, B2."""
        return torch.stack([target, logits.argmax(1) == target], 1)

    def value(self, rows_N: Tensor) -> float:
        """Return the mean of the accuracies of the classes."""
        target_N, correct_N = rows_N.unbind(1)
        count_K = torch.bincount(target_N)
        correct_K = torch.bincount(target_N, weights=correct_N.double())
        return mean(correct_K[count_K > 0] / count_K[count_K > 0])


@metric.register("ece")
class ExpectedCalibrationError(Metric):
    """Mean distance of accuracy from confidence, over bins of equal width.  Reference: arXiv:1706.04599.

    Args:
        bins: Number of bins.
    """

    goal = "min"

    def __init__(self, *, bins: Annotated[int, Field(ge=1)] = 15) -> None:
        self.bins = bins

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the confidence of each image and whether it is correct, B2."""
        probability_B, correct_B = logits.softmax(1).amax(1), logits.argmax(1) == target
        return torch.stack([probability_B.double(), correct_B.double()], 1)

    def value(self, rows_N: Tensor) -> float:
        """Return the weighted gap between confidence and accuracy over the bins."""
        probability_N, correct_N = rows_N.unbind(1)
        return calibration_error(probability_N, correct_N, self.bins)


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


# -- metrics of a confusion matrix -------------------------------------------------------------------------------------


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


# -- the metrics of a trial --------------------------------------------------------------------------------------------

STANDARD: Mapping[Task, tuple[str, ...]] = {
    "classification": ("loss", "accuracy", "top_k", "ece"),
    "segmentation": ("loss", "pixel_accuracy", "miou", "miou_foreground"),
}
"""Metrics of every trial of a task, except those incompatible with its data, such as ``top5`` of five classes."""

RESERVED = ("split", "id", "label", "prediction", "probability")
"""Names of the other columns of ``predictions.parquet``."""


def metrics_of(data: DataInfo, chosen: Sequence[Choice] = ()) -> dict[str, Metric]:
    """Return the metrics of a trial by name: those of its task and the ``chosen`` ones."""
    return {_name(choice): metric.build(choice) for choice in [*_standard(data), *map(metric.resolve, chosen)]}


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


def resolve_metrics(data: DataInfo, chosen: Sequence[Resolved]) -> tuple[list[int], list[tuple[int, str]]]:
    """Return the indices of the metrics a trial adds to those of its task, and the errors by index.

    Standard metrics and duplicates are dropped, so that equal trials have equal keys.
    """
    components = [(choice.component, choice.options) for choice in _standard(data)]
    names = {_name(choice) for choice in _standard(data)}
    indices: list[int] = []
    faults = []
    for index, choice in enumerate(chosen):
        if (choice.component, choice.options) in components:
            continue
        component, name = choice.component, _name(choice)
        assert issubclass(component, Metric)
        if data.task not in component.tasks:
            faults.append((index, f"metric '{choice.type}' is for {' and '.join(component.tasks)}, not {data.task}"))
        elif reason := component.incompatibility(data, choice.options):
            faults.append((index, f"metric '{choice.type}': {reason}"))
        elif not re.fullmatch(r"\w+", name) or name in RESERVED:
            message = f"its name in results, '{name}', is reserved or not of letters, digits and _; rename it"
            faults.append((index, f"metric '{choice.type}': {message}"))
        elif name in names:
            message = f"another metric of the trial is called '{name}' in results; remove one of the two"
            faults.append((index, f"metric '{choice.type}': {message}"))
        indices.append(index)
        components.append((component, choice.options))
        names.add(name)
    return indices, faults


def _standard(data: DataInfo) -> list[Resolved]:
    # By full name, since a plugin may register the same short name.
    choices = [metric.resolve(f"{BUILT_IN}:{name}") for name in STANDARD[data.task]]
    return [choice for choice in choices if choice.component.incompatibility(data, choice.options) is None]  # type: ignore[attr-defined]


def _name(choice: Resolved) -> str:
    return metric.build(choice).name or choice.type.rpartition(":")[2]


def mean(values: Tensor) -> float:
    """Return the mean, computed in float64."""
    return float(values.double().mean())


def calibration_error(probability_N: Tensor, right_N: Tensor, bins: int = 15) -> float:
    """Return the mean distance of accuracy from confidence over equal-width bins, weighted by their image counts.

    Args:
        probability_N: Probability of the predicted class.
        right_N: True where the prediction is correct.
        bins: Number of bins.
    """
    bin_N = (probability_N.double() * bins).ceil().long().sub(1).clamp(0, bins - 1)
    excess_N = right_N.double() - probability_N.double()
    gap_S = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_N, excess_N)
    return float(gap_S.abs().sum() / len(probability_N))


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
