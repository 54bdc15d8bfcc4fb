"""Registration of a study's analysis before its results are known, stored in plan.json at the first run.

Metric, goal, correction, margin, seeds, the looks at them, the family of comparisons and what
each arm trains are frozen once a trial has ended.  A later change of the file takes effect, and its comparisons are
labelled exploratory.  So is a comparison whose results existed before it was registered.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vitlab.planning.values import EarlierResults, Plan, Registration, Trial
from vitlab.spec.design import format_value

JUDGED_BY = ("metric", "goal", "at", "margin", "correction", "variance", "over_blocks", "alpha")


def make_registration(plan: Plan) -> Registration:
    """Return the registration of a plan's analysis."""
    seeds = {planned.seed for planned in plan.trials_and_pending} if plan.looks is None else plan.looks.seeds[0]
    return Registration(
        **{name: getattr(plan.analysis, name) for name in JUDGED_BY},
        seeds=tuple(sorted(seeds)),
        looks=() if plan.looks is None else tuple(zip(map(len, plan.looks.seeds), plan.looks.shares, strict=True)),
        family=tuple(comparison_family(plan)),
        arms=dict(plan.identities),
    )


def registered_or_own(plan: Plan) -> Registration:
    """Return the registration of a plan; before its first run, the one that it would get."""
    return plan.registered or make_registration(plan)


def comparison_family(plan: Plan) -> list[tuple[str, str]]:
    """Return every comparison of a plan but of controls: an arm that runs, and its baseline."""
    return [
        (arm.name, arm.baseline)
        for arm in plan.arms
        if arm.baseline is not None and not arm.skip and not arm.is_control
    ]


def with_first_registration(plan: Plan, earlier: Plan | None, ended: Callable[[Trial], bool]) -> Plan:
    """Return the plan with the registration of its first run.

    Args:
        plan: plan of the current file.
        earlier: plan of the previous run.
        ended: returns whether a trial has a result.  Until a trial of an earlier plan has one, no result can have led
            to a change, and the current file is registered.
    """

    def any_ended(plan: Plan) -> bool:
        return any(ended(item.trial) for item in plan.trials)

    first = None if earlier is None else earlier.registered
    if earlier is None or first is None or not (first.seen or any_ended(earlier)):
        return replace(plan, registered=replace(make_registration(plan), known=_find_earlier_results(plan, ended)))
    if plan.looks is not None and [size for size, _ in first.looks] == [len(seeds) for seeds in plan.looks.seeds]:
        # The levels that were registered stay: they depend on the number of comparisons.
        plan = replace(plan, looks=replace(plan.looks, shares=tuple(share for _, share in first.looks)))
    # A further level may give the arms of a grid longer names.
    by_identity = {identity: arm for arm, identity in plan.identities.items()}
    longer = {arm: by_identity.get(own, arm) for arm, own in first.arms.items() if arm not in plan.identities}
    names = {arm: name for arm, name in longer.items() if name not in first.arms}
    family = tuple((names.get(arm, arm), names.get(baseline, baseline)) for arm, baseline in first.family)
    earlier_results = replace(first.known, comparisons=tuple(names.get(arm, arm) for arm in first.known.comparisons))
    arms = {**plan.identities, **{names.get(arm, arm): identity for arm, identity in first.arms.items()}}
    # The next run cannot tell from a plan without results that there were some.
    seen = first.seen or not any_ended(plan)
    return replace(plan, registered=replace(first, family=family, arms=arms, known=earlier_results, seen=seen))


def _format_exactly(value: Any) -> str:
    """Format a value so that any other value looks different."""
    return repr(value) if isinstance(value, float) else format_value(value)


def describe_analysis_changes(plan: Plan) -> list[str]:
    """Return each change of the analysis since the first run as a clause; any makes all comparisons exploratory."""
    first, now = registered_or_own(plan), make_registration(plan)
    pairs = {name: (getattr(first, name), getattr(now, name)) for name in JUDGED_BY}
    clauses = [
        f"{name} was {_format_exactly(was)} and is {_format_exactly(is_now)}"
        for name, (was, is_now) in pairs.items()
        if was != is_now
    ]
    sizes = [[size for size, _ in each.looks] for each in (first, now)]
    if sizes[0] != sizes[1]:
        before, after = (
            f"at {', '.join(map(str, some[:-1]))} and {some[-1]} seeds" if some else "once" for some in sizes
        )
        clauses.append(f"the results were to be judged {before}, and are judged {after}")
    if first.seeds != now.seeds:
        counts = len(first.seeds), len(now.seeds)
        clauses.append(
            f"there were {counts[0]} seeds and are {counts[1]}" if counts[0] != counts[1] else "other seeds ran"
        )
    return clauses


def newly_compared_arms(plan: Plan) -> set[str]:
    """Return the arms whose comparison was not registered at the first run."""
    return {arm for arm, _ in {*comparison_family(plan)}.difference(registered_or_own(plan).family)}


def altered_arms(plan: Plan) -> list[str]:
    """Return the arms that train something else than the arm registered under the same name."""
    identities = registered_or_own(plan).arms
    return [arm for arm, identity in plan.identities.items() if identities.get(arm, identity) != identity]


def no_longer_compared_arms(plan: Plan) -> list[str]:
    """Return the arms whose comparison was registered and is no longer in the plan; it still counts in the family."""
    pairs = [(arm.name, arm.baseline) for arm in plan.arms]  # skipped arms included
    return [pair[0] for pair in registered_or_own(plan).family if pair not in pairs]


def family_over_blocks_and_incomplete_arms(plan: Plan) -> tuple[set[str], set[str]]:
    """Return what is compared over blocks, by names in a block.

    Returns:
        All compared arms, with those that were registered and are no longer compared, and those of them that were to be
        compared in a further block.
    """
    compared, fewer = {arm for arm, _ in comparison_family(plan)}, set[str]()
    names = {plan.arm(arm).name_in_block for arm in compared}
    blocks = {arm.block for arm in plan.arms if not arm.skip}
    for arm, _ in registered_or_own(plan).family:
        if arm not in compared:
            inside = [arm.removeprefix(f"{block}: ") for block in blocks if arm.startswith(f"{block}: ")]
            names |= {*inside}
            if not inside:
                fewer |= {name for name in names if arm.endswith(f": {name}")}
    return names, fewer


def _find_earlier_results(plan: Plan, ended: Callable[[Trial], bool]) -> EarlierResults:
    trials = {item.trial.name: item.trial for item in plan.trials}
    results = {name for name, trial in trials.items() if ended(trial)}
    seeds: dict[str, set[int]] = {}
    for item in plan.trials:
        if item.trial.name in results:
            seeds.setdefault(item.arm, set()).add(item.seed)
    compared = [arm for arm, baseline in comparison_family(plan) if seeds.get(arm, set()) & seeds.get(baseline, set())]
    return EarlierResults(len(results), len(trials), tuple(compared))
