"""The second look of a study: which comparisons ``seeds.escalate_to`` gives more seeds.

It is asked in planning, and answered from results alone, so that whoever plans the same study from the same results
plans the same trials.  What a look costs stands in :mod:`vitlab.report.judgement`.
"""

from __future__ import annotations

from dataclasses import replace

from vitlab.plan.values import Plan
from vitlab.report import words
from vitlab.report.document import plain
from vitlab.report.frame import gather, table
from vitlab.report.judgement import summary
from vitlab.store import Store


def left_open(plan: Plan, store: Store) -> tuple[str, ...]:
    """Arms whose comparison the first seeds have not decided, though they could be judged; none before all have ended.

    Args:
        plan: with the seeds of the first look, and with what was registered.
        store: where the results are.
    """
    if plan.looks is None or plan.pending:
        return ()
    first = replace(plan, looks=replace(plan.looks, open=()))
    found = gather(first, store)
    if any(item.status in ("running", "missing") for item in found):
        return ()
    rows = plain(summary(table(first, found), first))
    return tuple(row["arm"] for row in rows if _judged(row) and words.verdict(row, plan.analysis) == "cannot tell")


def _judged(row: words.Row) -> bool:
    """Whether more seeds may help: not where a comparison is refused, or one side has nothing but failures."""
    return row["refused"] is None and row["difference"] is not None
