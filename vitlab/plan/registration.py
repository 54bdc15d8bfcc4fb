"""What a study said about its judgement before its results were known: kept in plan.json from the first run on.

Metric, goal, correction, margin, sides, seeds, those of a second look among them, and the family of comparisons are
frozen once a trial has ended.  A later change of the file is obeyed, and what it leads to is called exploratory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vitlab.plan.values import Plan

JUDGED_BY = ("metric", "goal", "at", "margin", "correction", "alpha", "sides")


def registration(plan: Plan) -> dict[str, Any]:
    """How the answer of a plan is to be judged, in JSON values."""
    analysis = plan.analysis.model_dump(mode="json")
    return {
        **{name: analysis[name] for name in JUDGED_BY if name in analysis},
        "sides": 2,
        "seeds": sorted(
            {planned.seed for planned in (*plan.trials, *plan.pending)} if plan.looks is None else plan.looks.first
        ),
        "escalate_to": None if plan.looks is None else len(plan.looks.second),
        "family": family(plan),
    }


def family(plan: Plan) -> list[list[str]]:
    """Every comparison of a plan: an arm that runs, and the arm it is compared with."""
    return [[arm.name, arm.baseline] for arm in plan.arms if arm.baseline is not None and not arm.skip]


def registered(plan: Plan, earlier: Mapping[str, Any] | None, ended: Callable[[str, str], bool]) -> Plan:
    """The plan with what was registered when it was first run.

    Args:
        plan: as the file says now.
        earlier: the plan.json of the run before.
        ended: whether the trial of a key and a code has a result.  Where no trial of the earlier plan has one, nothing
            was known that could have led to a change, and what the file says now is registered.
    """
    first = (earlier or {}).get("registered")
    if (
        earlier is not None
        and first is not None
        and any(ended(item["key"], item["code"]) for item in earlier["trials"])
    ):
        return replace(plan, registered=first)
    return replace(plan, registered=registration(plan))


def changes(plan: Plan) -> list[str]:
    """What every comparison is exploratory for: each change since the first run as a clause."""
    first, now = plan.registered, registration(plan)
    if first is None:
        return []
    said = [
        f"{name} was {_said(first[name])} and is {_said(now[name])}"
        for name in (*JUDGED_BY, "escalate_to")
        if first.get(name) != now[name]
    ]
    if first["seeds"] != now["seeds"]:
        counts = len(first["seeds"]), len(now["seeds"])
        said.append(
            f"there were {counts[0]} seeds and are {counts[1]}" if counts[0] != counts[1] else "other seeds ran"
        )
    return said


def added(plan: Plan) -> set[str]:
    """Arms whose comparison was not among those of the first run."""
    if plan.registered is None:
        return set()
    known = [tuple(pair) for pair in plan.registered["family"]]
    return {arm for arm, baseline in family(plan) if (arm, baseline) not in known}


def removed(plan: Plan) -> list[str]:
    """Arms whose comparison was among those of the first run and is no longer; it still counts in the family."""
    if plan.registered is None:
        return []
    known = [(arm.name, arm.baseline) for arm in plan.arms]  # one that cannot run is still there, and says why
    return [arm for arm, baseline in plan.registered["family"] if (arm, baseline) not in known]


def _said(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
