"""Looks at the results of a study: the comparisons that get more seeds.

They depend on the results of the seeds so far, and on the arms that were open before: an addition of seeds that has
begun continues.  A run stores them in plan.json, where planning reads them.  :mod:`vitlab.comparison.study`
describes the spending of alpha.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from vitlab.comparison import Verdict
from vitlab.comparison.study import is_futile
from vitlab.plan.registration import added_comparisons
from vitlab.plan.values import Looks, Plan
from vitlab.report.comparison import summary
from vitlab.report.phrasing import Row
from vitlab.report.study_results import StudyResults
from vitlab.store.folders import Store


def with_open_arms(plan: Plan, store: Store) -> Looks | None:
    """Return the plan's looks with the arms that each leaves open, by the results that exist; None without looks."""
    looks = plan.looks
    if looks is None or plan.pending:  # tunings come first
        return looks
    existing = {(planned.arm, planned.seed) for planned in plan.trials}
    for look, seeds in enumerate(looks.seeds[:-1]):
        if look and any((arm, seed) not in existing for arm in looks.open[look - 1] for seed in seeds):
            break  # the next plan has the seeds of this look
        trials = tuple(planned for planned in plan.trials if planned.seed in seeds)
        so_far = replace(plan, trials=trials, looks=replace(looks, open=looks.open[:look]))
        arms = inconclusive_arms(so_far, store, *looks.open[look : look + 1])
        looks = replace(looks, open=(*looks.open[:look], arms, *looks.open[look + 1 :]) if arms else looks.open[:look])
        if not arms:
            break
    return looks


def inconclusive_arms(plan: Plan, store: Store, before: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the arms whose comparison is inconclusive at the latest of the plan's looks.

    Registered comparisons are judged together, so none is opened before all of them have ended.  An arm that was open
    stays open once its seeds have all ended: each look is valid on its own.

    Args:
        plan: the plan with the seeds of that look alone, and with its registration.
        store: the store of its trials.
        before: arms that an earlier run left open at the same look.
    """
    if plan.looks is None or plan.pending:
        return ()
    rows = summary(StudyResults.read(plan, store))
    failed = {row["arm"] for row in rows if row["failed"]}
    rows = [row for row in rows if plan.looks.number(row["arm"]) == len(plan.looks.open)]
    pending = {row["arm"] for row in rows if row["awaited"]}
    open_arms = set(before)
    if not pending - added_comparisons(plan):
        open_arms |= {row["arm"] for row in rows if _may_become_conclusive(row, plan, failed)}
    return tuple(row["arm"] for row in rows if row["arm"] in open_arms - pending)


def _may_become_conclusive(row: Row, plan: Plan, failed: Collection[str]) -> bool:
    """Return whether a comparison is inconclusive and more seeds may decide it.

    False if it is refused, if a trial of one of its arms failed, which must be retried first, or if all seeds that it
    may get would decide it with too little probability.
    """
    if row["difference"] is None or row["arm"] in failed or row["baseline"] in failed:
        return False
    return bool(row["verdict"] == Verdict.CANNOT_TELL) and not is_futile(row["decidable"], plan)
