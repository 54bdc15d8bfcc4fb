"""Samples of arms: values by seed, and what is known about those that have none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vitlab import statistics
from vitlab.plan.values import Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_PREREQUISITES = 3  #: distinct prerequisites that each arm needs if arms differ by them


@dataclass(frozen=True)
class Sample:
    """The sample of an arm."""

    values: Mapping[int, float]  #: seed to value
    lost: Sequence[int] = ()  #: seeds that diverged or failed
    overlap: float = 0.0  #: validation images over training images, if seeds hold out others of the same images
    images: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """Seed to one value per image; the images of all arms are the same, in the same order."""


def prerequisites(plan: Plan, seeds: Collection[int] | None = None) -> dict[str, dict[str, set[str]]]:
    """Return the trainings that each arm's trials start from, by arm and role, at the given seeds or at all."""
    found: dict[str, dict[str, set[str]]] = {}
    for planned in plan.trials:
        if seeds is None or planned.seed in seeds:
            for role, trial in planned.trial.needs.items():
                found.setdefault(planned.arm, {}).setdefault(role, set()).add(trial.partition("/")[0])
    return found


def refusals(plan: Plan, seeds: Collection[int] | None = None) -> dict[str, str]:
    """Return the reasons why comparisons are refused, by arm, at the given seeds or at all.

    If two arms differ by their prerequisite (a teacher, a pre-trained body), the prerequisites are the sample:
    five students of one teacher are one sample of the teacher.
    """
    of_arms, reasons = prerequisites(plan, seeds), {}
    for arm in plan.arms:
        first, second = of_arms.get(arm.name, {}), of_arms.get(arm.baseline or "", {})
        for role in sorted(first.keys() & second.keys()):
            if first[role] != second[role] and (reason := no_sample(min(len(first[role]), len(second[role])))):
                reasons[arm.name] = f"the arms differ by their {role}, of which {reason}"
    return reasons


def no_sample(prerequisites: int) -> str:
    """Return why so many distinct prerequisites of an arm are no sample; empty if they are."""
    if prerequisites >= MIN_PREREQUISITES:
        return ""
    stand = "training stands" if prerequisites == 1 else "trainings stand"
    return f"{prerequisites} {stand} behind an arm: fewer than {MIN_PREREQUISITES} are no sample"


def choices(plan: Plan, values: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Return the variance of the choice of knobs, and its degrees of freedom, of arms that are tuned by the metric."""
    sign, of_arms = 1 if plan.analysis.goal == "max" else -1, {}
    for tuning in plan.tuning:
        arm, winner = tuning.arm or "", tuning.winner
        own = values.get(arm, [])
        scores = {place: sign * rival.score for place, rival in enumerate(tuning.rivals) if rival.score is not None}
        if winner is not None and tuning.select == plan.analysis.metric and min(len(own), len(scores)) > 1:
            of_arms[arm] = statistics.choice_variance(
                [*scores.values()],
                [*scores].index(winner),
                sign * float(np.mean(own)),
                float(np.std(own, ddof=1)),
                len(tuning.rivals[winner].trials),
            )
    return of_arms
