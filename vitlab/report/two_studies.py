"""Comparison of two studies: every arm of the second with the arm of that name in the first, at equal seeds."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vitlab.errors import UserError
from vitlab.planning.study_folder import format_differences
from vitlab.planning.values import Plan, Trial
from vitlab.report.comparison import summary_rows
from vitlab.report.frame import StudyResults
from vitlab.report.notes import note_unpaired_seeds
from vitlab.report.phrasing import list_or_count
from vitlab.report.report import Report
from vitlab.report.sections import Findings
from vitlab.store.folders import Store

UNREGISTERED = "neither study registered this comparison"


def compare_studies(
    first: tuple[Plan, Store], second: tuple[Plan, Store], exploratory: str | None = UNREGISTERED
) -> Report:
    """Compare the second of two studies with the first, which serves as the baseline, as one family.

    ``exploratory`` says why the comparison is so; None if it was asked for before there were results.

    Raises:
        UserError: if they are the same, are judged by different metrics, or no arm of one has its name in the other.
    """
    plans = first[0], second[0]
    if first == second:
        name = plans[0].study
        raise UserError(
            f"both are the same run of {name}; name another study, or one of its earlier versions, 'vitlab compare "
            f"{name}@VERSION {name}', which 'vitlab studies' lists"
        )
    common, labels = _require_common_arms(plans), [plan.study for plan in plans]
    if labels[0] == labels[1]:
        labels = [f"{plan.study}@{plan.version[:8]}" for plan in plans]
    old, new = (
        _read_labelled_arms(*first, common, labels[0]),
        _read_labelled_arms(*second, common, labels[1], labels[0]),
    )
    results = _concat_results(old, new, labels)
    earlier, later = old.plan.first_trials, new.plan.first_trials
    pairs = {
        (str(arm.baseline), arm.name): (earlier[arm.baseline].trial, later[arm.name].trial)
        for arm in new.plan.arms
        if arm.baseline in earlier and arm.name in later
    }
    refused = {
        arm: f"the studies have different data ({before.data or 'not here'} and {after.data or 'not here'})"
        for (_, arm), (before, after) in pairs.items()
        if before.data != after.data
    }
    rows = [
        row if row["baseline"] is None else {**row, "exploratory": exploratory}
        for row in summary_rows(results, refused)
    ]
    notes = [f"{exploratory[0].upper()}{exploratory[1:]}: it is exploratory."] if exploratory else []
    notes += _describe_differences(pairs)
    for plan, label in zip(plans, labels, strict=True):
        if alone := [arm.name for arm in plan.arms if not arm.skip and arm.name not in common]:
            notes.append(f"In {label} alone, and not compared: {'; '.join(alone)}.")
    return Report.from_findings(Findings(results, rows), [*notes, *note_unpaired_seeds(results, rows)])


def _require_common_arms(plans: Sequence[Plan]) -> list[str]:
    """Return the names of the arms that run in both of two studies, in the order of the second."""
    criteria = [(plan.analysis.metric, plan.analysis.goal, plan.analysis.at) for plan in plans]
    if criteria[0] != criteria[1]:
        metrics = [f"{plan.study} by {' '.join(criterion)}" for plan, criterion in zip(plans, criteria, strict=True)]
        raise UserError(f"both studies need the same metric; found {' and '.join(metrics)}")
    old, new = ([arm.name for arm in plan.arms if not arm.skip] for plan in plans)
    common = [name for name in new if name in old]
    if not common:
        raise UserError(
            f"no arm of {plans[1].study} has the name of an arm of {plans[0].study}; rename arms, or compare other "
            f"studies. Arms of {plans[1].study}: {'; '.join(new)}. Arms of {plans[0].study}: {'; '.join(old)}."
        )
    return common


def _read_labelled_arms(
    plan: Plan, store: Store, names: Sequence[str], label: str, baseline_label: str | None = None
) -> StudyResults:
    """Read some arms of a study, named after it; each is compared with the arm of its name in another study."""
    arms = (
        replace(
            plan.arm(name),
            name=f"{label}: {name}",
            baseline=None if baseline_label is None else f"{baseline_label}: {name}",
            block="",
            is_control=False,
        )
        for name in names
    )
    trials = (replace(item, arm=f"{label}: {item.arm}") for item in plan.trials if item.arm in names)
    metrics = {
        metric: replace(facts, chance={f"{label}: {arm}": value for arm, value in facts.chance.items()})
        for metric, facts in plan.metrics.items()
    }
    return StudyResults.read(replace(plan, arms=tuple(arms), trials=tuple(trials), metrics=metrics), store)


def _concat_results(old: StudyResults, new: StudyResults, labels: Sequence[str]) -> StudyResults:
    """Return the results of both studies, with the facts of their metrics."""
    import pandas as pd

    metrics = dict(old.plan.metrics)
    for name, facts in new.plan.metrics.items():
        chance = metrics[name].chance if name in metrics else {}
        metrics[name] = replace(facts, chance={**chance, **facts.chance})
    plan = Plan(
        f"{labels[0]} and {labels[1]}",
        f"How does {labels[1]} differ from {labels[0]}?",
        (*old.plan.arms, *new.plan.arms),
        (*old.plan.trials, *new.plan.trials),
        new.plan.analysis,
        metrics=metrics,
    )
    # Of different steps, neither is one of the differences.
    quantum = new.quantum if new.quantum == old.quantum else 0.0
    frame = pd.concat([old.frame, new.frame], ignore_index=True)
    return StudyResults(plan, frame, quantum=quantum, overlap={**old.overlap, **new.overlap})


def _describe_differences(pairs: Mapping[tuple[str, str], tuple[Trial, Trial]]) -> Iterator[str]:
    """Yield how the later arms differ from the earlier ones, arms that differ alike together."""
    arms = defaultdict[str, list[str]](list)
    for (_, arm), (before, after) in pairs.items():
        clauses = [format_differences(before.spec.plain(), after.spec.plain())]
        clauses += [f"code {before.code[:8]} -> {after.code[:8]}"] * (before.code != after.code)
        arms["; ".join(filter(None, clauses))].append(arm)
    for difference, alike in arms.items():
        if difference:
            verb = "From its counterpart, {} differs" if len(alike) == 1 else "From their counterparts, {} differ"
            yield f"{verb.format(list_or_count(alike))} by {difference}."
