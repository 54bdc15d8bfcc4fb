"""The second look of a study: which comparisons ``seeds.escalate_to`` gives more seeds.

It is asked in planning, and answered from results and from what was answered before, so that whoever plans the same
study from the same results plans the same trials, and a second look that was begun is not forgotten.  What a look costs
stands in :mod:`vitlab.report.comparison`.
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
    """Arms whose comparison the first seeds have not decided, though they could be judged.

    The comparisons that were registered are judged together, so none of them is opened before all of them have ended.
    What was open stays so once its first seeds have all ended: either look is sound by itself.

    Args:
        plan: with the seeds of the first look alone, and with what was registered.
        store: where the results are.
        before: what was open in the plan before this one, at the same first seeds.
    """
    if plan.looks is None or plan.pending:
        return ()
    rows = plain(summary(table(plan, gather(plan, store)), plan))
    waiting = {row["arm"] for row in rows if row["awaited"]}
    known = {row["arm"] for row in rows if row["arm"] in before} - waiting
    if not waiting - added_comparisons(plan):
        failed = {row["arm"]: row["failed"] for row in rows}
        known |= {row["arm"] for row in rows if row["arm"] not in waiting and may_be_settled(row, plan, failed)}
    return tuple(row["arm"] for row in rows if row["arm"] in known)


def may_be_settled(row: phrasing.Row, plan: Plan, failed: Mapping[str, int]) -> bool:
    """Whether a comparison is open, and more seeds may settle it.

    Not where it is refused, and not where a trial of it failed: that is no result, and is to be trained again first.

    Args:
        row: of its summary.
        plan: says how it is judged.
        failed: arm to how many of its trials failed.
    """
    if row["difference"] is None or failed[row["arm"]] or failed.get(row["baseline"]):
        return False
    return bool(row["verdict"] == Verdict.CANNOT_TELL)
