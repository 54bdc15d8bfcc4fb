"""What a study is judged by: which metrics its trials report, and which way is better where it does not say."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vitlab.errors import Path, nearest
from vitlab.plan.resolve import ResolvedTrial
from vitlab.slots import ROOMS, slot
from vitlab.spec import Choice, Study
from vitlab.spec.check import Goal
from vitlab.spec.trial import METRICS


def goals(trial: ResolvedTrial) -> dict[str, Goal]:
    """The metrics that a trial reports of a split, each with what it says of itself."""
    train, metrics = METRICS
    named = [Choice.of(choice) for choice in trial.plain[train].get(metrics, ())]
    room: Any = importlib.import_module(ROOMS["metric"])
    return {name: metric.goal for name, metric in room.metrics_of(trial.info, named).items()}


def goal_of(metric: str, known: Mapping[str, Goal]) -> Goal | None:
    """Which way a metric such as ``val/accuracy`` is better; None where nobody has said.

    What is measured while training is a loss.  ``accuracy_dist`` is the accuracy of one of several predictions.
    """
    group, _, name = metric.partition("/")
    if group == "train":
        return "min"
    own = max((one for one in known if name == one or name.startswith(f"{one}_")), key=len, default=None)
    return None if own is None else known[own]


def with_goal(study: Study, base: ResolvedTrial) -> Study:
    """The study with the goal of its analysis, where the file names none."""
    if "goal" in study.analysis.model_fields_set:
        return study
    metric = study.analysis.metric
    goal = goal_of(metric, goals(base)) or _installed(metric.partition("/")[2]) or study.analysis.goal
    return study.model_copy(update={"analysis": study.analysis.model_copy(update={"goal": goal})})


def _installed(name: str) -> Goal | None:
    """What a metric says of itself that not the base, but maybe an arm reports."""
    if name not in slot("metric").names():
        return None
    declared: Goal = slot("metric").get(name).goal
    return declared


def unreported(study: Study, base: ResolvedTrial, arms: Iterable[ResolvedTrial]) -> Iterator[tuple[Path, str]]:
    """Metrics that the study judges or chooses by, and that none of its trials reports: places and sentences."""
    asked: dict[Path, str] = {("analysis", "metric"): study.analysis.metric}
    if study.tune is not None and study.tune.select is not None:
        asked["tune", "select"] = study.tune.select
    if study.check is not None:
        asked |= {("check", "metrics", metric): metric for metric in study.check.metrics}
    known = goals(base)
    if all(goal_of(metric, known) is not None for metric in asked.values()):
        return  # as nearly always, so that thousands of arms are not asked
    for trial in arms:
        known |= goals(trial)
        if trial.plain.get("distill"):
            return  # with a teacher there is more to see than metrics
    for place, metric in asked.items():
        if goal_of(metric, known) is None:
            group, _, name = metric.partition("/")
            there = ", ".join(f"{group}/{one}" for one in known)
            named = (
                f" Name it where trials are: base.train.metrics: [{name}]." if name in slot("metric").names() else ""
            )
            yield place, f"no trial reports {metric}.{nearest(name, known)} Reported: {there}.{named}"
