"""Comparison of two studies: every arm of the second with the arm of that name in the first, at equal seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vitlab.errors import UserError
from vitlab.plan.metric_facts import MetricFacts
from vitlab.plan.values import Plan, Planned, Trial
from vitlab.plan.versions import flat
from vitlab.report import phrasing
from vitlab.report.comparison import summary
from vitlab.report.frame import results
from vitlab.store.folders import Store

MAX_LISTED = 8  #: differences of two arms that are listed one by one
UNREGISTERED = "neither study registered this comparison"


@dataclass(frozen=True)
class Between:
    """A comparison of arms that belong to no single study, judged as one family of its own."""

    plan: Plan  #: of two studies, each arm under the name of its study
    rows: list[dict[str, Any]]  #: see :func:`vitlab.report.comparison.summary`
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the report document; sections that need a single study are empty."""
        return {
            "study": self.plan.study,
            "question": self.plan.question,
            "analysis": self.plan.analysis.model_dump(mode="json"),
            "units": self.plan.units,
            "overview": phrasing.overview(self.rows),
            "answers": phrasing.answers(self.rows, self.plan.analysis, self.plan.units),
            "arms": self.rows,
            "tuning": [],
            "heads": [],
            "corrupted": [],
            "scaling": [],
            "fronts": {},
            "front_shares": {},
            "interactions": [],
            "cost": [],
            "notes": list(self.notes),
            "made": None,
        }


def between(first: tuple[Plan, Store], second: tuple[Plan, Store]) -> Between:
    """Compare the second of two studies with the first, which serves as the baseline.

    Raises:
        UserError: if they are judged by different metrics, or no arm of one has its name in the other.
    """
    import pandas as pd

    plans = first[0], second[0]
    criteria = [(plan.analysis.metric, plan.analysis.goal, plan.analysis.at) for plan in plans]
    if criteria[0] != criteria[1]:
        descriptions = [
            f"{plan.study} by {' '.join(criterion)}" for plan, criterion in zip(plans, criteria, strict=True)
        ]
        raise UserError(f"both studies need the same metric; found {' and '.join(descriptions)}")
    names = [[arm.name for arm in plan.arms if not arm.skip] for plan in plans]
    common = [name for name in names[1] if name in names[0]]
    if not common:
        raise UserError(
            f"no arm of {plans[1].study} has the name of an arm of {plans[0].study}; rename arms, or compare other "
            f"studies. Arms of {plans[1].study}: {'; '.join(names[1])}. Arms of {plans[0].study}: "
            f"{'; '.join(names[0])}."
        )
    labels = [plan.study for plan in plans]
    if labels[0] == labels[1]:
        labels = [f"{label} ({place})" for label, place in zip(labels, ("first", "second"), strict=True)]
    arms, trials, frames = [], [], []
    metrics: dict[str, MetricFacts] = {}
    overlap: dict[str, float] = {}
    for label, (plan, store) in zip(labels, (first, second), strict=True):
        against = {name: f"{labels[0]}: {name}" if label == labels[1] else None for name in common}
        own = {name: f"{label}: {name}" for name in common}
        arms += [replace(plan.arm(name), name=own[name], baseline=against[name]) for name in common]
        trials += [Planned(own[item.arm], item.seed, item.trial) for item in plan.trials if item.arm in own]
        for metric, facts in plan.metrics.items():
            earlier = metrics[metric].chance if metric in metrics else {}
            chance = {own[arm]: level for arm, level in facts.chance.items() if arm in own}
            metrics[metric] = replace(facts, chance={**earlier, **chance})
        frame = results(plan, store)
        overlap |= {own[arm]: ratio for arm, ratio in frame.attrs.get("overlap", {}).items() if arm in own}
        frame = frame[frame["arm"].isin(common)]
        renamed = {
            "baseline": frame["arm"].map(against).astype("string"),
            "arm": frame["arm"].map(own).astype("string"),
        }
        frames.append(frame.assign(**renamed))
    both = Plan(
        " and ".join(labels),
        f"How does {labels[1]} differ from {labels[0]}?",
        tuple(arms),
        tuple(trials),
        plans[1].analysis,
        metrics=metrics,
    )
    pairs = {f"{labels[1]}: {name}": (_one(plans[0], name), _one(plans[1], name)) for name in common}
    refused = {
        arm: f"the studies have different data ({old.data or 'not here'} and {new.data or 'not here'})"
        for arm, (old, new) in pairs.items()
        if old is not None and new is not None and old.data != new.data
    }
    notes = [f"{UNREGISTERED[0].upper()}{UNREGISTERED[1:]}: it is exploratory."]
    for arm, (old, new) in pairs.items():
        notes += _notes_on_changes(arm, old, new)
    for label, own_names, other_names in ((labels[0], names[0], names[1]), (labels[1], names[1], names[0])):
        unmatched = [name for name in own_names if name not in other_names]
        if unmatched:
            notes.append(f"In {label} alone, and not compared: {'; '.join(unmatched)}.")
    frame = pd.concat(frames, ignore_index=True)
    frame.attrs = {**frames[1].attrs, "overlap": overlap}
    if frames[0].attrs.get("quantum") != frames[1].attrs.get("quantum"):
        del frame.attrs["quantum"]
    rows = summary(frame, both, refused)
    for row in rows:
        if row["baseline"] is not None:
            row["exploratory"] = UNREGISTERED
    return Between(both, rows, tuple(notes))


def _one(plan: Plan, arm: str) -> Trial | None:
    return next((item.trial for item in plan.trials if item.arm == arm), None)


def _notes_on_changes(arm: str, old: Trial | None, new: Trial | None) -> list[str]:
    """Return a note on how an arm's spec and code differ between two studies; none if they are equal."""
    if old is None or new is None:
        return []
    before, after = flat(old.spec.plain()), flat(new.spec.plain())
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    differences = [
        f"{path} {before.get(path, 'absent')} and {after.get(path, 'absent')}" for path in paths[:MAX_LISTED]
    ]
    if len(paths) > MAX_LISTED:
        differences.append(f"{len(paths) - MAX_LISTED} more")
    if old.code != new.code:
        differences.append(f"code {old.code[:8]} and {new.code[:8]}")
    return [f"{arm} differs from its counterpart by {'; '.join(differences)}."] if differences else []
