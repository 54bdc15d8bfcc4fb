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
    choices = trial.plain[train].get(key, ()) if isinstance(trial.plain.get(train), Mapping) else ()
    named = []
    for choice in choices:
        with suppress(OptionError, ValueError):  # mistakes in a metric are reported when the trial is resolved
            named.append(slot("metric").resolve(choice))
    room: Any = importlib.import_module(SLOT_MODULES["metric"])
    results: dict[str, Any] = room.metrics_of(trial.info, named)
    return results


def goals(trial: ResolvedTrial | Partial) -> dict[str, Goal]:
    """Return name to declared goal, for the metrics that a trial reports of a split."""
    return {name: metric.goal for name, metric in metrics(trial).items()}


def goal_of(metric: str, goals_by_name: Mapping[str, Goal]) -> Goal | None:
    """Return the goal of a metric such as ``val/accuracy``; None if it is not declared.

    Every ``train`` metric is a loss.  ``accuracy_dist`` is the accuracy of one of several predictions.
    """
    group, _, name = metric.partition("/")
    if group == "train":
        return "min"
    own = _own(name, goals_by_name)
    return None if own is None else goals_by_name[own]


def _own(name: str, names: Iterable[str]) -> str | None:
    """Return the metric that a name in results belongs to: ``accuracy`` for ``accuracy_dist``."""
    return max((one for one in names if name == one or name.startswith(f"{one}_")), key=len, default=None)


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
    required: dict[Path, str] = {("analysis", "metric"): study.analysis.metric}
    if study.tune is not None and study.tune.select is not None:
        required["tune", "select"] = study.tune.select
    if study.check is not None:
        required |= {("check", "metrics", metric): metric for metric in study.check.metrics}
    reported = goals(base)
    if base.info is None or all(goal_of(metric, reported) is not None for metric in required.values()):
        return  # the usual case, in which no arm need be examined
    for trial in arms:
        reported |= goals(trial)
        if trial.plain.get("distill"):
            return  # distillation reports values that are not metrics
    for place, metric in required.items():
        if goal_of(metric, reported) is None:
            group, _, name = metric.partition("/")
            choices = ", ".join(f"{group}/{one}" for one in reported)
            installed = slot("metric").names()
            hint_to_name = f" Name it where trials are: base.train.metrics: [{name}]." if name in installed else ""
            close = closest(name, reported)
            hint = f" Did you mean '{group}/{close}'?" if close is not None else ""
            yield place, f"no trial reports {metric}.{hint} Reported: {choices}.{hint_to_name}"


def _amounts(study: Study, document: Document, metrics_by_name: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield a mistake for each amount that is as large as the whole range of its metric."""
    amounts: list[tuple[Path, str, float]] = []
    if study.analysis.margin is not None:
        amounts.append((("analysis", "margin"), study.analysis.metric, study.analysis.margin))
    if study.check is not None:
        compared = list(dict.fromkeys([study.analysis.metric, *study.check.metrics]))
        for name, by_metric in (("margin", study.check.margin), ("min_abs", study.check.min_abs)):
            for metric, amount in by_metric.items():
                amounts.append((("check", name, metric), metric, amount))
                if metric not in compared:
                    hint = nearest(metric, compared)
                    yield amounts[-1][0], f"{metric} is not judged.{hint} Judged: {', '.join(compared)}."
    for place, metric, amount in amounts:
        group, _, name = metric.partition("/")
        own = None if group == "train" else _own(name, metrics_by_name)
        if own is None:
            continue
        (low, high), where = metrics_by_name[own].bounds, ".".join(map(str, place))
        share = (low, high) == (0, 1)
        value: Any = document.data
        for part in place:
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and not share:
            yield place, f"{where}: points are hundredths of a share, and {metric} is none; write a number"
        elif amount >= high - low:
            fix = f"a number below {high - low:g}"
            if share and not isinstance(value, str) and amount < 100:
                fix = f"'{amount:g} points' or {amount / 100:g}"
            yield (
                place,
                f"{where}: {metric} lies from {low:g} to {high:g}, so no difference exceeds {value}; write {fix}",
            )
