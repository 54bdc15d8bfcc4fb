"""StudyResults: what a report is made of, read once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from vitlab.plan.values import Plan
from vitlab.report import frame as frames
from vitlab.report.frame import StoredTrial
from vitlab.report.image_values import ImageValues, image_values
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd


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
        """Return the values of the metric for each image, see :func:`vitlab.report.image_values.image_values`."""
        return image_values(self.plan, self.trials)

    def overlap_of(self, arms: Iterable[str]) -> float:
        """Return the largest overlap of some arms, NaN if that of one is not known."""
        ratios = [self.overlap.get(arm, 0.0) for arm in arms]
        return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=0.0)
