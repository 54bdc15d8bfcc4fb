"""The metrics that a study's trials report, and the direction in which each is better."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from vitlab.errors import OptionError, Path, closest, nearest
from vitlab.plan.resolve import Partial, ResolvedTrial
from vitlab.registry import SLOT_MODULES, slot
from vitlab.spec import Document, Study
from vitlab.spec.check import Goal
from vitlab.spec.trial import METRICS


def metrics(trial: ResolvedTrial | Partial) -> dict[str, Any]:
    """Return name to metric, for the metrics that a trial reports of a split; empty if its data is unknown."""
    if trial.info is None:
        return {}
    train, key = METRICS
    chosen = trial.plain[train].get(key, ()) if isinstance(trial.plain.get(train), Mapping) else ()
    known = []
    for choice in chosen:
        with suppress(OptionError, ValueError):  # mistakes in a metric are reported when the trial is resolved
            known.append(slot("metric").resolve(choice))
    room: Any = importlib.import_module(SLOT_MODULES["metric"])
    found: dict[str, Any] = room.metrics_of(trial.info, known)
    return found


def goals(trial: ResolvedTrial | Partial) -> dict[str, Goal]:
    """Return name to declared goal, for the metrics that a trial reports of a split."""
    return {name: metric.goal for name, metric in metrics(trial).items()}


def goal_of(metric: str, known: Mapping[str, Goal]) -> Goal | None:
    """Return the goal of a metric such as ``val/accuracy``; None if it is not declared.

    Every ``train`` metric is a loss.  ``accuracy_dist`` is the accuracy of one of several predictions.
    """
    group, _, name = metric.partition("/")
    if group == "train":
        return "min"
    own = _own(name, known)
    return None if own is None else known[own]


def _own(name: str, known: Iterable[str]) -> str | None:
    """Return the metric that a name in results belongs to: ``accuracy`` for ``accuracy_dist``."""
    return max((one for one in known if name == one or name.startswith(f"{one}_")), key=len, default=None)


def with_goal(study: Study, base: ResolvedTrial | Partial) -> Study:
    """Return the study with the goal of its analysis filled in, if the file names none."""
    if "goal" in study.analysis.model_fields_set:
        return study
    metric = study.analysis.metric
    goal = goal_of(metric, goals(base)) or _installed(metric.partition("/")[2]) or study.analysis.goal
    return study.model_copy(update={"analysis": study.analysis.model_copy(update={"goal": goal})})


def _installed(name: str) -> Goal | None:
    """Return the goal of an installed metric, which an arm may report although the base does not."""
    if name not in slot("metric").names():
        return None
    declared: Goal = slot("metric").get(name).goal
    return declared


def mistakes(
    study: Study, document: Document, base: ResolvedTrial | Partial, arms: Iterable[ResolvedTrial | Partial]
) -> Iterator[tuple[Path, str]]:
    """Yield mistakes in the metrics of a study and in amounts in their units, as places and sentences."""
    yield from _unreported(study, base, arms)
    yield from _amounts(study, document, metrics(base))


def _unreported(
    study: Study, base: ResolvedTrial | Partial, arms: Iterable[ResolvedTrial | Partial]
) -> Iterator[tuple[Path, str]]:
    """Yield a mistake for each metric that the study compares or selects by and that no trial reports."""
    asked: dict[Path, str] = {("analysis", "metric"): study.analysis.metric}
    if study.tune is not None and study.tune.select is not None:
        asked["tune", "select"] = study.tune.select
    if study.check is not None:
        asked |= {("check", "metrics", metric): metric for metric in study.check.metrics}
    known = goals(base)
    if base.info is None or all(goal_of(metric, known) is not None for metric in asked.values()):
        return  # the usual case, in which no arm need be examined
    for trial in arms:
        known |= goals(trial)
        if trial.plain.get("distill"):
            return  # distillation reports values that are not metrics
    for place, metric in asked.items():
        if goal_of(metric, known) is None:
            group, _, name = metric.partition("/")
            there = ", ".join(f"{group}/{one}" for one in known)
            installed = slot("metric").names()
            named = f" Name it where trials are: base.train.metrics: [{name}]." if name in installed else ""
            close = closest(name, known)
            hint = f" Did you mean '{group}/{close}'?" if close is not None else ""
            yield place, f"no trial reports {metric}.{hint} Reported: {there}.{named}"


def _amounts(study: Study, document: Document, known: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield a mistake for each amount that is as large as the whole range of its metric."""
    amounts: list[tuple[Path, str, float]] = []
    if study.analysis.margin is not None:
        amounts.append((("analysis", "margin"), study.analysis.metric, study.analysis.margin))
    if study.check is not None:
        judged = list(dict.fromkeys([study.analysis.metric, *study.check.metrics]))
        for name, by_metric in (("margin", study.check.margin), ("min_abs", study.check.min_abs)):
            for metric, amount in by_metric.items():
                amounts.append((("check", name, metric), metric, amount))
                if metric not in judged:
                    hint = nearest(metric, judged)
                    yield amounts[-1][0], f"{metric} is not judged.{hint} Judged: {', '.join(judged)}."
    for place, metric, amount in amounts:
        group, _, name = metric.partition("/")
        own = None if group == "train" else _own(name, known)
        if own is None:
            continue
        (low, high), where = known[own].bounds, ".".join(map(str, place))
        share = (low, high) == (0, 1)
        written: Any = document.data
        for part in place:
            written = written.get(part) if isinstance(written, Mapping) else None
        if isinstance(written, str) and not share:
            yield place, f"{where}: points are hundredths of a share, and {metric} is none; write a number"
        elif amount >= high - low:
            fix = f"a number below {high - low:g}"
            if share and not isinstance(written, str) and amount < 100:
                fix = f"'{amount:g} points' or {amount / 100:g}"
            yield (
                place,
                f"{where}: {metric} lies from {low:g} to {high:g}, so no difference exceeds {written}; write {fix}",
            )
