"""Arms by tuning budget: the expected best score among a number of candidates.

With few candidates an arm is judged by how much its typical setting is worth, with many by its best one, so the order
of the arms may depend on the budget.  Reference: arXiv:1909.03004, here for candidates drawn without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.report.phrasing import Column, Row, Scale

BUDGETS = (1, 2, 5)  #: numbers of candidates, besides all of them


def expected_best(scores: Sequence[float], tried: int, goal: str) -> float:
    """Return the mean over all sets of ``tried`` scores of the best of a set; ``goal`` is max or min."""
    ordered = sorted(scores, reverse=goal == "min")  # the best last
    sets = [math.comb(worse, tried - 1) for worse in range(len(ordered))]
    return sum(score * count for score, count in zip(ordered, sets, strict=True)) / math.comb(len(ordered), tried)


def by_arm(rows: Sequence[Row], goal: str) -> dict[str, dict[int, float]]:
    """Return the expected best score of each arm by budget; empty without at least two arms of three candidates each.

    Args:
        rows: Candidates of finished tunings, as in :func:`vitlab.report.document.tuning`.  One that diverged counts
            like the worst of all scores.
        goal: Goal of the scores, max or min.
    """
    candidates: dict[str, list[Row]] = {}
    for row in rows:
        candidates.setdefault(row["arm"], []).append(row)
    counts = {len(own) for own in candidates.values()}
    finished = all(row["score"] is not None or row["outcome"] for row in rows)
    scores = [row["score"] for row in rows if row["score"] is not None]
    if len(candidates) < 2 or min(counts) < 3 or not finished or not scores:
        return {}
    worst = min(scores) if goal == "max" else max(scores)
    budgets = [*(budget for budget in BUDGETS if budget < min(counts)), min(counts)]
    return {
        arm: {
            budget: expected_best([worst if row["score"] is None else row["score"] for row in own], budget, goal)
            for budget in budgets
        }
        for arm, own in candidates.items()
    }


def caption(rows: Sequence[Row], goal: str) -> str:
    """Return the description of the table, with the best arm of each budget."""
    table = by_arm(rows, goal)
    best = max if goal == "max" else min
    leaders: dict[str, list[str]] = {}
    for budget in next(iter(table.values()), {}):
        leader = best(table, key=lambda arm: table[arm][budget])
        leaders.setdefault(leader, []).append(str(budget))
    order = "; ".join(f"{arm} with {', '.join(budgets)}" for arm, budgets in leaders.items())
    return (
        "Expected score of the best of so many candidates, drawn at random from the grid of the arm, before any "
        f"reported trial. Best arm: {order}."
    )


def columns(rows: Sequence[Row], goal: str, units: Mapping[str, str]) -> list[Column]:
    """Return the table of arms by tuning budget."""
    table: dict[str, dict[int, Any]] = by_arm(rows, goal)
    if not table:
        return []
    scale = Scale.of(rows[0]["metric"], units)
    decimals = scale.decimals_of([row["score"] for row in rows], 2, 4)
    return [
        Column("arm", tuple(table), right=False),
        *(
            Column(f"{budget} tried", tuple(scale.number(scores[budget], decimals) for scores in table.values()))
            for budget in next(iter(table.values()))
        ),
    ]
