"""The metrics that a study's trials report: their facts, the goal of the analysis, and mistakes in naming them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vitlab.errors import Fault, OptionError, Path, closest, nearest
from vitlab.geometry import TASKS, DataInfo, Task
from vitlab.planning.resolve import ResolvedTrial
from vitlab.planning.values import MetricFacts, declared_metric, why_no_block_average
from vitlab.registry import import_slot, slot
from vitlab.spec import Analysis, Document, Study
from vitlab.spec.choice import Goal, Unit
from vitlab.spec.tree import NewTree, Tree, value_at
from vitlab.spec.trial import METRICS, OBJECTIVE, TEST_SET_OPTIONS

Metrics = Mapping[str, Any]
"""Name in results, without the split, to the metric: a component of the slot, or a class like one."""


def reported_metrics(plain: Tree, info: DataInfo | None) -> Metrics:
    """Return name to metric, for the metrics that a trial reports of a split; empty if its data is unknown."""
    if info is None:
        return {}
    data, train = (section if isinstance(section, Mapping) else {} for section in map(plain.get, ("data", "train")))
    components, standard = [], None
    for choice in train.get(METRICS[1], ()):
        with suppress(OptionError, ValueError):  # mistakes are reported when the trial is resolved
            components.append(slot("metric").resolve_choice(choice))
    if objective := train.get(OBJECTIVE[1]):
        with suppress(OptionError, ValueError):
            standard = slot("objective").resolve_choice(objective).component.standard_metrics(info)
    module = import_slot("metric")
    return {**module.build_metrics(info, components, standard), **module.metrics_of_data_options(data)}


def _possible_metrics(plain: Tree) -> Metrics:
    """Return name to metric, for every metric that a trial may report, whatever its data turns out to be."""
    data = plain.get("data")
    added = dict.fromkeys(TEST_SET_OPTIONS, True)  # an option that adds a test set may be what is wrong
    options = {**data, **added} if isinstance(data, Mapping) else added
    results: NewTree = {}
    for task in TASKS:
        info = DataInfo(image=(1, 1), channels=1, classes=1_000, task=task)
        results |= reported_metrics({**plain, "data": options}, info)
    return results


def collect_metric_facts(trials: Mapping[str, ResolvedTrial]) -> dict[str, MetricFacts]:
    """Return metric to its facts, for the metrics that the trials of a study's arms report."""
    results: dict[str, MetricFacts] = {}
    chance: dict[str, dict[str, float]] = {}
    for arm, trial in trials.items():
        for name, metric in reported_metrics(trial.plain, trial.info).items():
            low, high = (end if math.isfinite(end) else None for end in metric.bounds)
            results[name] = MetricFacts(metric.goal, unit_of(metric), (low, high), metric.quantum, step=metric.step)
            level = metric.chance(trial.info)
            if level is not None:
                chance.setdefault(name, {})[arm] = level
    return {name: replace(each, chance=chance.get(name, {})) for name, each in results.items()}


def unit_of(metric: Any) -> Unit:
    """Return the unit of a metric or its class: the declared one, else ``share`` for bounds of 0 and 1."""
    unit: Unit | None = metric.unit
    return unit or ("share" if tuple(metric.bounds) == (0, 1) else "number")


def goal_of(metric: str, reported: Metrics) -> Goal | None:
    """Return the goal, ``min`` or ``max``, of a metric such as ``val/accuracy``; None if no arm reports it.

    Every ``train`` metric is a loss.
    """
    group, _, name = metric.partition("/")
    if group == "train":
        return "min"
    own = declared_metric(name, reported)
    return None if own is None else reported[own].goal


def _is_reported(metric: str, reported: Metrics) -> bool:
    """Return whether one of the metrics by name is reported as ``metric``, of its split too."""
    group, _, name = metric.partition("/")
    own = declared_metric(name, reported)
    is_of_split = group == "train" or (own is not None and group in reported[own].splits)
    return is_of_split and name.isidentifier()


def fill_in_goal(study: Study, reported: Metrics) -> Study:
    """Return the study with the goal of its analysis filled in, if the file names none.

    Args:
        study: the study.
        reported: name to metric, for the metrics of the base.
    """
    if "goal" in study.analysis.model_fields_set:
        return study
    metric, installed = study.analysis.metric, slot("metric")
    goal = goal_of(metric, reported)
    if goal is None and (name := metric.partition("/")[2]) in installed.names():
        goal = installed.get(name).goal  # an arm may report it although the base does not
    goal = goal or study.analysis.goal
    return study.model_copy(update={"analysis": study.analysis.model_copy(update={"goal": goal})})


def note_unusual_goal(analysis: Analysis, reported: Metrics) -> list[str]:
    """Return a note if the goal of an analysis is not the one that its metric declares."""
    declared = goal_of(analysis.metric, reported)
    if declared in (None, analysis.goal):
        return []
    better, other = ("lower", "higher") if declared == "min" else ("higher", "lower")
    return [
        f"{analysis.metric} is better when {better}, and the study asks for {analysis.goal}: verdicts count {other} "
        "values as better."
    ]


def find_mistakes(
    study: Study,
    document: Document,
    reported: Metrics,
    trials: Iterable[tuple[Tree, DataInfo | None]],
    complete: bool,
) -> Iterator[Fault]:
    """Yield mistakes in the metrics of a study and in amounts in their units, as places and sentences.

    Args:
        study: the study.
        document: source of the amounts as written.
        reported: name to metric, for the metrics of the base; empty if its data is unknown.
        trials: values and data of the trials of the arms, as far as they are sound.
        complete: whether every metric that a trial names could be resolved; if not, a metric that no trial reports may
            be one of those, which have their own mistake.
    """
    unreported = [*_find_unreported(study, reported, trials)] if complete else []
    yield from unreported
    yield from _find_amounts_beyond_range(study, document, reported)
    if study.blocks is None and study.analysis.over_blocks is not None:
        yield ("analysis", "over_blocks"), "there are no blocks to judge over; remove it"
    if not complete or not reported or ("analysis", "metric") in dict(unreported):
        return  # what follows would be a consequence
    validation = study.analysis.metric.replace("test/", "val/")
    if study.run.keep.which == "best" and not (validation.startswith("val/") and _is_reported(validation, reported)):
        sentence = f"best is by a metric of validation, and no trial reports {validation} there; write keep: last"
        yield ("run", "keep"), sentence
    own = declared_metric(study.analysis.metric.partition("/")[2], reported)
    # A metric without a declaration is of a split without metrics but the loss.
    unit, bounds = ("number", (0.0, math.inf)) if own is None else (unit_of(reported[own]), reported[own].bounds)
    if study.blocks is not None and (fault := why_no_block_average(study.analysis, unit, bounds)):
        yield ("analysis", "over_blocks"), fault


def _find_unreported(study: Study, of_base: Metrics, trials: Iterable[tuple[Tree, DataInfo | None]]) -> Iterator[Fault]:
    """Yield a mistake for each metric that the study compares or selects by and that no trial reports."""
    required: dict[Path, str] = {("analysis", "metric"): study.analysis.metric}
    required |= {("check", "metrics", metric): metric for metric in study.check.metrics}
    tune = study.tune
    if tune and tune.select:
        required["tune", "select"] = tune.select
    elif tune:
        test = study.analysis.metric
        validation = test.replace("test/", "val/")
        if _is_reported(test, of_base) and not _is_reported(validation, of_base):
            yield (
                ("tune",),
                f"a tuning selects by the analysis' metric on validation, and no trial reports {validation}; set "
                "tune.select, such as val/accuracy",
            )
    reported = dict(of_base)
    is_data_known, tasks = bool(reported), set[Task]()
    for plain, info in trials:
        is_data_known &= info is not None
        tasks |= {info.task} if info else set()
        reported |= _possible_metrics(plain) if info is None else reported_metrics(plain, info)
        if plain.get("distill") and {"class", "distillation"} <= {*(value_at(plain, ("model", "prefix")) or ())}:
            reported["token_cosine"] = reported["loss"]  # whose splits it has; distillation reports it as no component
    for place, metric in required.items():
        if not _is_reported(metric, reported):
            group, _, name = metric.rpartition("/")
            splits = (group,) if group in ("train", "val", "test") else ("val", "test")
            listed = [f"{split}/{one}" for split in splits for one, own in reported.items() if split in own.splits]
            names = [one.partition("/")[2] for one in listed]
            choices = f" Reported: {', '.join(listed)}." if is_data_known and names else ""
            hint_to_name = " 'vitlab list metric' lists more."
            if (
                name not in names
                and name in slot("metric").names()
                and splits[0] in (facts := slot("metric").get(name)).splits
                and tasks.issubset(facts.tasks)
            ):
                hint_to_name = f" Write base.{facts.option or f'train.metrics: [{name}]'}."
            close = closest(name, names)
            hint = f" Did you mean '{listed[names.index(close)]}'?" if close is not None else ""
            yield place, f"no trial reports {metric}.{hint}{choices}{hint_to_name}"


def _find_amounts_beyond_range(study: Study, document: Document, metrics_by_name: Metrics) -> Iterator[Fault]:
    """Yield a mistake for each amount that is as large as the whole range of its metric."""
    amounts: list[tuple[Path, str, float]] = []
    if study.analysis.margin is not None:
        amounts.append((("analysis", "margin"), study.analysis.metric, study.analysis.margin))
    compared = list(dict.fromkeys([study.analysis.metric, *study.check.metrics]))
    for name, by_metric in (("margin", study.check.margin), ("min_abs", study.check.min_abs)):
        for metric, amount in by_metric.items():
            amounts.append((("check", name, metric), metric, amount))
            if metric not in compared:
                hint = nearest(metric, compared)
                yield amounts[-1][0], f"{metric} is not compared.{hint} Compared: {', '.join(compared)}."
    for place, metric, amount in amounts:
        group, _, name = metric.partition("/")
        own = None if group == "train" else declared_metric(name, metrics_by_name)
        if own is None:
            continue
        (low, high), where = metrics_by_name[own].bounds, ".".join(map(str, place))
        share = unit_of(metrics_by_name[own]) == "share"
        value = value_at(document.data, place)
        if isinstance(value, str) and not share:
            yield place, f"{where}: points are hundredths of a share, and {metric} is not a share; write a number"
        elif amount >= high - low:
            fix = f"a number below {high - low:g}"
            if share and not isinstance(value, str) and amount < 100:
                fix = f"'{amount:g} {'point' if amount == 1 else 'points'}' or {amount / 100:g}"
            yield (
                place,
                f"{where}: {metric} is from {low:g} to {high:g}, so no difference exceeds {value}; write {fix}",
            )
