"""Registration of a study's analysis before its results are known, stored in plan.json at the first run.

Metric, goal, correction, margin, sides, seeds, the looks at them, the family of comparisons and what
each arm trains are frozen once a trial has ended.  A later change of the file takes effect, and its comparisons are
labelled exploratory.  So is a comparison whose results existed before it was registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from vitlab.plan.values import Looks, Plan
from vitlab.spec.tree import NewTree, Tree

JUDGED_BY = ("metric", "goal", "at", "margin", "correction", "variance", "over_blocks", "alpha", "sides")


def registration(plan: Plan) -> NewTree:
    """Return the registration of a plan's analysis, in JSON values."""
    analysis = plan.analysis.model_dump(mode="json")
    return {
        **{name: analysis[name] for name in JUDGED_BY if name in analysis},
        "sides": 2,
        "seeds": sorted(
            {planned.seed for planned in (*plan.trials, *plan.pending)} if plan.looks is None else plan.looks.seeds[0]
        ),
        "looks": [] if plan.looks is None else [[len(some), share] for some, share in _looks(plan.looks)],
        "family": family(plan),
        "arms": dict(plan.identities),
    }


def family(plan: Plan) -> list[list[str]]:
    """Return every comparison of a plan but of controls: an arm that runs, and its baseline."""
    return [
        [arm.name, arm.baseline]
        for arm in plan.arms
        if arm.baseline is not None and not arm.skip and not arm.is_control
    ]


def with_registration(plan: Plan, earlier: Tree | None, ended: Callable[[str, str], bool]) -> Plan:
    """Return the plan with the registration of its first run.

    Args:
        plan: plan of the current file.
        earlier: plan.json of the previous run.
        ended: returns whether the trial of a key and a code has a result.  Until a trial of an earlier plan has one,
            no result can have led to a change, and the current file is registered.
    """
    first = (earlier or {}).get("registered")
    if (
        earlier is not None
        and first is not None
        and (first.get("seen") or any(ended(item["key"], item["code"]) for item in earlier["trials"]))
    ):
        plan = _with_registered_looks(plan, first, earlier)
        registered_before = {**first, "arms": {**plan.identities, **first.get("arms", {})}}
        if not any(ended(item.trial.key, item.trial.code) for item in plan.trials):
            registered_before["seen"] = True  # the next run cannot tell from this plan's trials that there were results
        return replace(plan, registered=registered_before)
    return replace(plan, registered={**registration(plan), "known": _count_earlier_results(plan, ended)})


def changes(plan: Plan) -> list[str]:
    """Return each change of the analysis since the first run as a clause; any makes all comparisons exploratory."""
    first, now = plan.registered, registration(plan)
    if first is None:
        return []
    clauses = [
        f"{name} was {_format(first.get(name))} and is {_format(now[name])}"
        for name in JUDGED_BY
        if first.get(name) != now[name]
    ]
    clauses += _changed_looks(first, now)
    if first["seeds"] != now["seeds"]:
        counts = len(first["seeds"]), len(now["seeds"])
        clauses.append(
            f"there were {counts[0]} seeds and are {counts[1]}" if counts[0] != counts[1] else "other seeds ran"
        )
    return clauses


def _looks(looks: Looks) -> Iterator[tuple[tuple[int, ...], float]]:
    return zip(looks.seeds, looks.shares, strict=True)


def _with_registered_looks(plan: Plan, first: Tree, earlier: Tree) -> Plan:
    """Return the plan with the levels of its looks that were registered, if it looks at the same numbers of seeds."""
    if plan.looks is None:
        return plan
    shares: Sequence[float] = [share for _, share in first.get("looks", ())]
    sizes = [size for size, _ in first.get("looks", ())]
    if sizes != [len(seeds) for seeds in plan.looks.seeds]:
        return plan
    return replace(plan, looks=replace(plan.looks, shares=tuple(shares)))


def _changed_looks(first: Tree, now: Tree) -> list[str]:
    """Return the change of the numbers of seeds at which the study looks, as a clause."""
    sizes = [[size for size, _ in some.get("looks", ())] for some in (first, now)]
    if sizes[0] == sizes[1]:
        return []
    before, after = (f"at {', '.join(map(str, some[:-1]))} and {some[-1]} seeds" if some else "once" for some in sizes)
    return [f"the results were to be judged {before}, and are judged {after}"]


def added_comparisons(plan: Plan) -> set[str]:
    """Return the arms whose comparison was not registered at the first run."""
    if plan.registered is None:
        return set()
    registered_pairs = [tuple(pair) for pair in plan.registered["family"]]
    return {arm for arm, baseline in family(plan) if (arm, baseline) not in registered_pairs}


def altered_arms(plan: Plan) -> list[str]:
    """Return the arms that train something else than the arm registered under the same name."""
    identities = (plan.registered or {}).get("arms", {})
    return [arm for arm, identity in plan.identities.items() if identities.get(arm, identity) != identity]


def results_before_registration(plan: Plan) -> tuple[int, int, list[str]]:
    """Return the results that existed before registration.

    Returns:
        The number of trials with results, the number of all trials, and the arms whose comparison had results.
    """
    earlier = (plan.registered or {}).get("known") or {"results": 0, "trials": 0, "comparisons": []}
    return earlier["results"], earlier["trials"], earlier["comparisons"]


def removed_comparisons(plan: Plan) -> list[str]:
    """Return the arms whose comparison was registered and is no longer in the plan; it still counts in the family."""
    if plan.registered is None:
        return []
    pairs = [(arm.name, arm.baseline) for arm in plan.arms]  # skipped arms included
    return [arm for arm, baseline in plan.registered["family"] if (arm, baseline) not in pairs]


def blocks_since_registration(plan: Plan) -> tuple[set[str], set[str]]:
    """Return what is compared over blocks, by names in a block.

    Returns:
        All compared arms, with those that were registered and are no longer compared, and those of them that were to be
        compared in a further block.
    """
    names = {arm.name_in_block for arm in plan.arms if arm.baseline is not None and not arm.skip and not arm.is_control}
    blocks = {arm.block for arm in plan.arms if not arm.skip}
    compared, fewer = {arm for arm, _ in family(plan)}, set[str]()
    for arm, _ in () if plan.registered is None else plan.registered["family"]:
        if arm not in compared:
            inside = [arm.removeprefix(f"{block}: ") for block in blocks if arm.startswith(f"{block}: ")]
            names |= {*inside}
            if not inside:
                fewer |= {name for name in names if arm.endswith(f": {name}")}
    return names, fewer


def _count_earlier_results(plan: Plan, ended: Callable[[str, str], bool]) -> NewTree:
    """Return the counts of existing results, and the arms that share a seed with results with their baseline."""
    trials = {(item.arm, item.seed): (item.trial.key, item.trial.code) for item in plan.trials}
    results = {trial for trial in trials.values() if ended(*trial)}
    seeds: dict[str, set[int]] = {}
    for (arm, seed), trial in trials.items():
        if trial in results:
            seeds.setdefault(arm, set()).add(seed)
    compared = [arm for arm, baseline in family(plan) if seeds.get(arm, set()) & seeds.get(baseline, set())]
    return {"results": len(results), "trials": len(set(trials.values())), "comparisons": compared}


def _format(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
