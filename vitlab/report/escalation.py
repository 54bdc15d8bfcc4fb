"""The second look of a study: which comparisons ``seeds.escalate_to`` gives more seeds.

Planning decides from the results and from the arms that were open before, so that the same study and results always
give the same trials, and a second look that has begun continues.  :mod:`vitlab.report.comparison` describes the
spending of alpha.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitlab.plan.registration import added_comparisons
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.comparison import summary
from vitlab.report.document import plain
from vitlab.report.frame import gather, table
from vitlab.report.verdict import Verdict
from vitlab.store.folders import Store


def inconclusive_arms(plan: Plan, store: Store, before: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the arms whose comparison is inconclusive at the first seeds.

    Registered comparisons are judged together, so none is opened before all of them have ended.  An arm that was open
    stays open once its first seeds have all ended: each look is valid on its own.

    Args:
        plan: with the seeds of the first look alone, and with what was registered.
        store: where the results are.
        before: arms that were open in the previous plan, at the same first seeds.
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
        row: of its summary.
        plan: the plan with the analysis.
        failed: arm to how many of its trials failed.
    """
    if row["difference"] is None or failed[row["arm"]] or failed.get(row["baseline"]):
        return False
    return bool(row["verdict"] == Verdict.CANNOT_TELL)
