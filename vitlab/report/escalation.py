"""Interim analysis of a study: the comparisons that ``seeds.escalate_to`` gives more seeds.

It depends on the results of the first seeds and on the arms that were open before, so that an escalation that has begun
continues.  A run stores it in plan.json, where planning reads it.  :mod:`vitlab.report.comparison` describes the
spending of alpha.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vitlab.plan.registration import added_comparisons
from vitlab.plan.values import InterimAnalysis, Plan
from vitlab.report import phrasing
from vitlab.report.comparison import summary
from vitlab.report.document import plain
from vitlab.report.frame import gather, table
from vitlab.report.verdict import Verdict
from vitlab.store.folders import Store


def interim_analysis(plan: Plan, store: Store) -> InterimAnalysis | None:
    """Return the plan's interim analysis by the results that exist; None if the study has none."""
    if plan.looks is None:
        return None
    trials = tuple(planned for planned in plan.trials if planned.seed in plan.looks.first)
    first = replace(plan, trials=trials, looks=replace(plan.looks, open=()))
    return replace(plan.looks, open=inconclusive_arms(first, store, plan.looks.open))


def inconclusive_arms(plan: Plan, store: Store, before: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the arms whose comparison is inconclusive at the first seeds.

    Registered comparisons are judged together, so none is opened before all of them have ended.  An arm that was open
    stays open once its first seeds have all ended: each look is valid on its own.

    Args:
        plan: the plan with the first seeds alone, and with its registration.
        store: the store of its trials.
        before: arms that an earlier analysis of the same first seeds left open.
    """
    if plan.looks is None or plan.pending:
        return ()
    rows = plain(summary(table(plan, gather(plan, store)), plan))
    pending = {row["arm"] for row in rows if row["awaited"]}
    open_arms = {row["arm"] for row in rows if row["arm"] in before} - pending
    if not pending - added_comparisons(plan):
        failed = {row["arm"]: row["failed"] for row in rows}
        open_arms |= {
            row["arm"] for row in rows if row["arm"] not in pending and may_become_conclusive(row, plan, failed)
        }
    return tuple(row["arm"] for row in rows if row["arm"] in open_arms)


def may_become_conclusive(row: phrasing.Row, plan: Plan, failed: Mapping[str, int]) -> bool:
    """Return whether a comparison is inconclusive and more seeds may decide it.

    False if it is refused, or if one of its trials failed, which must be retried first.

    Args:
        row: the comparison's row of the summary.
        plan: the plan with the analysis.
        failed: arm to the number of its failed trials.
    """
    if row["difference"] is None or failed[row["arm"]] or failed.get(row["baseline"]):
        return False
    return bool(row["verdict"] == Verdict.CANNOT_TELL)
