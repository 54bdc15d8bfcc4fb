"""Comparison of two studies: every arm of the second with the arm of that name in the first, at equal seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitlab.errors import UserError
from vitlab.planning.study_folder import format_differences
from vitlab.planning.values import Arm, Plan, Planned, Trial
from vitlab.report.comparison import summary
from vitlab.report.frame import StudyResults
from vitlab.report.notes import note_unpaired_seeds
from vitlab.report.report import Report
from vitlab.report.sections import Findings
from vitlab.store.folders import Store

UNREGISTERED = "neither study registered this comparison"


@dataclass(frozen=True)
class _Side:
    """One of the two studies; its arms are named after it."""

    label: str
    plan: Plan
    results: StudyResults
    names: tuple[str, ...]  #: of all its arms that run
    common: tuple[str, ...]  #: names that both studies have

    def name(self, arm: str) -> str:
        return f"{self.label}: {arm}"

    def arms(self, baseline: _Side | None) -> list[Arm]:
        """Return the common arms, each compared with its counterpart of another side."""
        return [
            replace(
                self.plan.arm(arm),
                name=self.name(arm),
                baseline=None if baseline is None else baseline.name(arm),
                block="",
                is_control=False,
            )
            for arm in self.common
        ]

    def trials(self) -> list[Planned]:
        return [replace(item, arm=self.name(item.arm)) for item in self.plan.trials if item.arm in self.common]


def compare_studies(
    first: tuple[Plan, Store], second: tuple[Plan, Store], exploratory: str | None = UNREGISTERED
) -> Report:
    """Compare the second of two studies with the first, which serves as the baseline, as one family.

    ``exploratory`` says why the comparison is so; None if it was asked for before there were results.

    Raises:
        UserError: if they are judged by different metrics, or no arm of one has its name in the other.
    """
    old, new = _pair_sides(first, second)
    plan = Plan(
        f"{old.label} and {new.label}",
        f"How does {new.label} differ from {old.label}?",
        (*old.arms(None), *new.arms(old)),
        (*old.trials(), *new.trials()),
        new.plan.analysis,
    )
    results = _join_results(plan, old, new)
    refused = {
        arm: f"the studies have different data ({before.data or 'not here'} and {after.data or 'not here'})"
        for arm, before, after in _first_trials(old, new)
        if before.data != after.data
    }
    rows = [
        row if row["baseline"] is None else {**row, "exploratory": exploratory} for row in summary(results, refused)
    ]
    reason = [f"{exploratory[0].upper()}{exploratory[1:]}: it is exploratory."] if exploratory else []
    notes = [*reason, *_describe_differences(old, new), *note_unpaired_seeds(results, rows)]
    return Report.from_findings(Findings(results, rows), notes)


def _pair_sides(first: tuple[Plan, Store], second: tuple[Plan, Store]) -> tuple[_Side, _Side]:
    plans = first[0], second[0]
    criteria = [(plan.analysis.metric, plan.analysis.goal, plan.analysis.at) for plan in plans]
    if criteria[0] != criteria[1]:
        found = [f"{plan.study} by {' '.join(criterion)}" for plan, criterion in zip(plans, criteria, strict=True)]
        raise UserError(f"both studies need the same metric; found {' and '.join(found)}")
    names = [tuple(arm.name for arm in plan.arms if not arm.skip) for plan in plans]
    common = tuple(name for name in names[1] if name in names[0])
    if not common:
        raise UserError(
            f"no arm of {plans[1].study} has the name of an arm of {plans[0].study}; rename arms, or compare other "
            f"studies. Arms of {plans[1].study}: {'; '.join(names[1])}. Arms of {plans[0].study}: "
            f"{'; '.join(names[0])}."
        )
    labels = [plan.study for plan in plans]
    if labels[0] == labels[1]:
        labels = [f"{labels[0]} ({place})" for place in ("first", "second")]
    old, new = (
        _Side(label, plan, StudyResults.read(plan, store), own, common)
        for label, (plan, store), own in zip(labels, (first, second), names, strict=True)
    )
    return old, new


def _join_results(plan: Plan, old: _Side, new: _Side) -> StudyResults:
    """Return the results of the common arms of both studies, with the facts of their metrics."""
    import pandas as pd

    baselines = {arm.name: arm.baseline for arm in plan.arms}
    frames, metrics = [], {**old.plan.metrics, **new.plan.metrics}
    overlap: dict[str, float] = {}
    for side in (old, new):
        frame = side.results.frame[side.results.frame["arm"].isin(side.common)]
        arms = frame["arm"].map(side.name)
        frames.append(frame.assign(arm=arms.astype("string"), baseline=arms.map(baselines).astype("string")))
        overlap |= {side.name(arm): ratio for arm, ratio in side.results.overlap.items() if arm in side.common}
    for name, facts in metrics.items():
        sides = [side for side in (old, new) if name in side.plan.metrics]
        chance = {side.name(arm): of for side in sides for arm, of in side.plan.metrics[name].chance.items()}
        metrics[name] = replace(facts, chance=chance)
    # Of different steps, neither is one of the differences.
    quantum = new.results.quantum if new.results.quantum == old.results.quantum else 0.0
    frame = pd.concat(frames, ignore_index=True)
    return StudyResults(replace(plan, metrics=metrics), frame, quantum=quantum, overlap=overlap)


def _first_trials(old: _Side, new: _Side) -> Iterator[tuple[str, Trial, Trial]]:
    """Yield the name of each arm of the second study with the first trials of its counterpart and of itself."""
    before, after = (side.plan.first_trials for side in (old, new))
    for arm in new.common:
        if arm in before and arm in after:
            yield new.name(arm), before[arm].trial, after[arm].trial


def _describe_differences(old: _Side, new: _Side) -> Iterator[str]:
    """Yield the caveats: how arms differ between the studies, and which are in one alone."""
    # From the earlier to the later one, as reports name the changes of versions.
    earlier, later = sorted((old, new), key=lambda side: side.results.frame["ended"].max())
    for arm, before, after in _first_trials(earlier, later):
        clauses = [format_differences(before.spec.plain(), after.spec.plain())]
        clauses += [f"code {before.code[:8]} -> {after.code[:8]}"] * (before.code != after.code)
        if difference := "; ".join(filter(None, clauses)):
            yield f"From its counterpart, {arm} differs by {difference}."
    for side in (old, new):
        alone = [name for name in side.names if name not in side.common]
        if alone:
            yield f"In {side.label} alone, and not compared: {'; '.join(alone)}."
