"""The contract of metrics.

Every trial reports the metrics of its task and those named in its ``train.metrics``, as ``val/NAME`` and
``test/NAME``.  Metrics are part of a trial's identity although they change no weight: logits are not stored, so a
metric added later requires training again.

B images of a batch, N rows of a split, K classes, P pixels of an image, M decisions: images, or the pixels of
segmentation.  Classes stand on axis 1 of logits, (B, K) or (B, K, rows, columns).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitlab.components.base import Options
from vitlab.data.pixels import IGNORED
from vitlab.geometry import TASKS, DataInfo, Task
from vitlab.registry import Slot
from vitlab.spec.choice import UNITS, Goal, Unit
from vitlab.spec.tree import type_adapter
from vitlab.store.result import Number
from vitlab.training.losses import flat


class Metric(ABC):
    """Contract: ``rows`` returns the contributions of a batch, and ``value`` one number from all of a split.

    The rows of all batches are concatenated along the first axis and read back from the device once, at the end.  The
    default reduction is their mean, so that a mean over images, such as accuracy, defines ``rows`` alone.  The rows of
    other metrics hold whatever ``value`` needs, such as the numerator and denominator of a ratio.  The result must not
    depend on how a split is divided into batches.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("classification",)  #: tasks it applies to
    reads: ClassVar[Literal["logits", "features"]] = "logits"
    """The tensor that ``rows`` gets; for features see :class:`vitlab.training.metrics.features.FeatureMetric`."""
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
    labels: tuple[str, ...] = ()  #: names of the classes, where the data has them; set before the metric is used
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

    def parts(self, rows_N: Tensor) -> Mapping[str, float]:
        """Return values of parts of a split, such as its classes, reported as ``NAME_PART``; by default none.

        Args:
            rows_N: The rows of all its batches, on the CPU.
        """
        return {}

    def column(self, rows_N: Tensor) -> Tensor | None:
        """Return one value per image, (N,), for ``predictions.parquet``; None if the metric has none."""
        return None

    def chance(self, data: DataInfo) -> float | None:
        """Return the value that guesses reach if all classes are equally likely; None if it is not known.

        Example: ``return 1 / data.classes``
        """
        return None

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Options) -> str | None:
        """Return in one sentence why the metric does not apply to the data; None if it does."""
        return None


_Step = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Tasks = Annotated[tuple[Task, ...], Field(min_length=1)]
DECLARED: Mapping[str, tuple[Any, str]] = {
    "goal": (Goal, "max or min"),
    "bounds": (tuple[Number, Number], "two numbers, the lower one first, with math.inf for an end without a limit"),
    "unit": (Unit | None, UNITS),
    "quantum": (_Step, "0 or more"),
    "step": (_Step, "0 or more"),
    "tasks": (_Tasks, f"a tuple of at least one of {', '.join(TASKS)}"),
}
"""Type of each fact that a metric declares, and what is allowed, in words."""


def find_declaration_fault(component: type[Metric]) -> str | None:
    """Return in one sentence what is wrong with the facts that a metric declares; None if nothing is."""
    for name, (kind, allowed) in DECLARED.items():
        value = getattr(component, name)
        try:
            type_adapter(kind).validate_python(value)
            is_right = name != "bounds" or value[0] < value[1]
        except (ValueError, TypeError):  # the latter of bounds without an order, such as a set
            is_right = False
        if not is_right:
            return f"{name}: found {value!r}; allowed: {allowed}"
    if component.quantum and component.step:
        return f"quantum is {component.quantum:g} and step is {component.step:g}; set one of them"
    return None


metric = Slot("metric", Metric, fault=find_declaration_fault)  # type: ignore[type-abstract]  # a contract is not built


class GuessedByClass:
    """Accuracies: guesses reach one over the number of classes."""

    def chance(self, data: DataInfo) -> float:
        """Return the accuracy of guesses: 1 / classes."""
        return 1 / data.classes


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
        sums_N, counts_N = rows_N.T.contiguous()
        return float(sums_N.sum() / counts_N.sum())

    def column(self, rows_N: Tensor) -> Tensor:
        """Return the mean over the decisions of each image; NaN for an image without labels."""
        return rows_N[:, 0] / rows_N[:, 1]


def mean(values: Tensor) -> float:
    """Return the mean, computed in float64."""
    return float(values.double().mean())
