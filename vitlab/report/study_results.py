"""StudyResults: what a report is made of, read once, with the values of the metric for each image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.plan.values import Plan
from vitlab.report import frame as frames
from vitlab.report.frame import StoredTrial
from vitlab.store.folders import Store
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

ImageValues = Mapping[str, Mapping[int, "NDArray[np.float64]"]]
"""Arm to seed to one value per image; the images of all are the same, in the same order."""

MAX_VALUES = 5_000_000  #: of all trials together; above, reading them would delay the report
ROUNDING = 1e-6  #: relative; metrics are means in single precision


@dataclass(frozen=True)
class StudyResults:
    """The results of a study: its stored trials, their table, and what the comparison of its arms needs beside it."""

    plan: Plan
    frame: pd.DataFrame  #: one row per trial, see :func:`vitlab.report.frame.results`
    trials: tuple[StoredTrial, ...] = ()  #: empty for a table of other programs
    quantum: float = 0.0  #: smallest change of the metric; 0 if it has none or it is not known
    overlap: Mapping[str, float] = field(default_factory=dict)
    """Arm to validation images over training images, see :func:`vitlab.report.frame.validation_overlap`."""

    @classmethod
    def read(cls, plan: Plan, store: Store) -> StudyResults:
        """Read the results of a plan from its store."""
        trials = tuple(frames.gather(plan, store))
        return cls(
            plan,
            frames.table(plan, trials),
            trials,
            frames.metric_quantum(plan, trials),
            frames.validation_overlap(plan, trials),
        )

    @cached_property
    def values(self) -> dict[str, dict[int, float]]:
        """Return the values by which arms are judged, by arm and seed, see :func:`vitlab.report.frame.usable`."""
        return frames.usable(self.frame, self.plan.analysis, self.quantum)

    @cached_property
    def images(self) -> ImageValues:
        """Return the values of the metric for each image, see :func:`image_values`."""
        return image_values(self.plan, self.trials)

    def overlap_of(self, arms: Iterable[str]) -> float:
        """Return the largest overlap of some arms; NaN if one is not known."""
        ratios = [self.overlap.get(arm, 0.0) for arm in arms]
        return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=0.0)


def image_values(plan: Plan, trials: Sequence[StoredTrial]) -> ImageValues:
    """Return the values whose mean over images is the metric; empty if it is no such mean or images differ.

    It is also empty for fewer than two images, and for more values than ``MAX_VALUES``.  Accuracy is 1 for an image
    that is classified correctly and 0 for another; other metrics have a column of their own in ``predictions.parquet``.
    """
    split, _, name = plan.analysis.metric.partition("/")
    if plan.analysis.at != "last" or not trials:
        return {}
    values: dict[str, dict[int, NDArray[np.float64]]] = {}
    images: NDArray[Any] | None = None
    total = 0
    for item in trials:
        if item.status != Ending.DONE or item.result is None:
            continue
        stored = _values(item, split, name)
        if stored is None:
            continue
        ids, per_image = stored
        value = item.result.outcome.metrics.get(plan.analysis.metric, math.nan)
        # Predictions of another moment than the metric, or of other images, say nothing about it.
        same = images is None or np.array_equal(images, ids)
        if not same or not math.isclose(per_image.mean(), value, rel_tol=ROUNDING, abs_tol=ROUNDING):
            return {}
        images, total = ids, total + len(ids)
        if total > MAX_VALUES or len(ids) < 2:
            return {}
        values.setdefault(item.planned.arm, {})[item.planned.seed] = per_image
    return values


def _values(item: StoredTrial, split: str, name: str) -> tuple[NDArray[Any], NDArray[np.float64]] | None:
    """Return the numbers of the images of a split and their values; None if they are not stored."""
    names = ["label", "prediction"] if name == "accuracy" else [name]
    table = frames.read_predictions(item.folder, split, ["id", *names])
    if table is None:
        return None
    ids, *columns = (table.column(column).to_numpy() for column in ("id", *names))
    per_image = columns[0] == columns[1] if name == "accuracy" else columns[0]
    return ids, np.asarray(per_image, dtype=np.float64)
