"""What a study said about its judgement before its results were known: kept in plan.json from the first run on.

Metric, goal, correction, margin, sides, seeds, those of a second look among them, the family of comparisons and what
each arm trains are frozen once a trial has ended, and stay so.  A later change of the file is obeyed, and what it leads
to is called exploratory.  So is a comparison whose results were there already when it was registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vitlab.plan.values import Plan

JUDGED_BY = ("metric", "goal", "at", "margin", "correction", "alpha", "sides")


def registration(plan: Plan) -> dict[str, Any]:
    """Return how the answer of a plan is to be judged, in JSON values."""
    analysis = plan.analysis.model_dump(mode="json")
    return {
        **{name: analysis[name] for name in JUDGED_BY if name in analysis},
        "sides": 2,
        "seeds": sorted(
            {planned.seed for planned in (*plan.trials, *plan.pending)} if plan.looks is None else plan.looks.first
        ),
        "escalate_to": None if plan.looks is None else len(plan.looks.second),
        "family": family(plan),
        "arms": dict(plan.identities),
    }


def family(plan: Plan) -> list[list[str]]:
    """Every comparison of a plan: an arm that runs, and the arm it is compared with."""
    return [[arm.name, arm.baseline] for arm in plan.arms if arm.baseline is not None and not arm.skip]


def registered(plan: Plan, earlier: Mapping[str, Any] | None, ended: Callable[[str, str], bool]) -> Plan:
    """Return the plan with what was registered when it was first run.

    Args:
        plan: as the file says now.
        earlier: the plan.json of the run before.
        ended: whether the trial of a key and a code has a result.  As long as no trial of any earlier plan has one,
            nothing was known that could have led to a change, and what the file says now is registered.
    """
    first = (earlier or {}).get("registered")
    if (
        earlier is not None
        and first is not None
        and (first.get("seen") or any(ended(item["key"], item["code"]) for item in earlier["trials"]))
    ):
        kept = {**first, "arms": {**plan.identities, **first.get("arms", {})}}
        if not any(ended(item.trial.key, item.trial.code) for item in plan.trials):
            kept["seen"] = True  # nothing in this plan will tell the next run that there were results
        return replace(plan, registered=kept)
    return replace(plan, registered={**registration(plan), "known": _known(plan, ended)})


def changes(plan: Plan) -> list[str]:
    """Return what every comparison is exploratory for: each change since the first run as a clause."""
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


def altered(plan: Plan) -> list[str]:
    """Return the arms that train something else than they did when they were registered under their names."""
    known = (plan.registered or {}).get("arms", {})
    return [arm for arm, identity in plan.identities.items() if known.get(arm, identity) != identity]


def known_before(plan: Plan) -> tuple[int, int, list[str]]:
    """Return how many trials had results before the plan was registered, of how many, and whose comparison had any."""
    known = (plan.registered or {}).get("known") or {"results": 0, "trials": 0, "comparisons": []}
    return known["results"], known["trials"], known["comparisons"]


def removed(plan: Plan) -> list[str]:
    """Arms whose comparison was among those of the first run and is no longer; it still counts in the family."""
    if plan.registered is None:
        return []
    known = [(arm.name, arm.baseline) for arm in plan.arms]  # one that cannot run is still there, and says why
    return [arm for arm, baseline in plan.registered["family"] if (arm, baseline) not in known]


def _known(plan: Plan, ended: Callable[[str, str], bool]) -> dict[str, Any]:
    """Which trials have results already; a comparison is known where both of its arms have one at the same seed."""
    trials = {(item.arm, item.seed): (item.trial.key, item.trial.code) for item in plan.trials}
    results = {trial for trial in trials.values() if ended(*trial)}
    seeds: dict[str, set[int]] = {}
    for (arm, seed), trial in trials.items():
        if trial in results:
            seeds.setdefault(arm, set()).add(seed)
    compared = [arm for arm, baseline in family(plan) if seeds.get(arm, set()) & seeds.get(baseline, set())]
    return {"results": len(results), "trials": len(set(trials.values())), "comparisons": compared}


def _said(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
