"""Arms by tuning budget: the expected best score among a number of candidates.

With few candidates an arm is judged by how much its typical setting is worth, with many by its best one, so the order
of the arms may depend on the budget.  Reference: arXiv:1909.03004, here for candidates drawn without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitlab.report.phrasing import Column, Scale
from vitlab.report.sections.base import Section, Table, section
from vitlab.report.sections.tuning import Candidate

if TYPE_CHECKING:
    from vitlab.report.document import Report

BUDGETS = (1, 2, 5)  #: numbers of candidates, besides all of them


@section.register("tuning_budget")
class TuningBudget(Section[Candidate]):
    """The expected best score of each arm by number of candidates."""

    heading = "Tuning budget"
    place = 100

    def table(self, rows: Sequence[Candidate], report: Report) -> Table | None:
        """Return the table; its caption has the best arm of each budget."""
        candidates, goal = report.sections["tuning"], report.analysis.goal
        table = by_arm(candidates, goal)
        if not table:
            return None
        scale = Scale.of(candidates[0].metric, report.units)
        decimals = scale.decimals_of([candidate.score for candidate in candidates], 2, 4)
        columns = [Column("arm", tuple(table), right=False)]
        leaders: dict[str, list[str]] = {}
        for budget in next(iter(table.values())):
            at_budget = {arm: scores[budget] for arm, scores in table.items()}
            columns.append(Column(f"{budget} tried", tuple(scale.number(at, decimals) for at in at_budget.values())))
            best = (max if goal == "max" else min)(at_budget, key=at_budget.__getitem__)
            leaders.setdefault(best, []).append(str(budget))
        order = "; ".join(f"{arm} with {', '.join(budgets)}" for arm, budgets in leaders.items())
        return Table(
            columns,
            "Expected score of the best of so many candidates, drawn at random from the grid of the arm, before any "
            f"reported trial. Best arm by these scores: {order}.",
        )


def by_arm(candidates: Sequence[Candidate], goal: str) -> dict[str, dict[int, float]]:
    """Return the expected best score of each arm by budget; empty without at least two arms of three candidates each.

    Args:
        candidates: of finished tunings; one that diverged counts like the worst of all scores.
        goal: goal of the scores, max or min.
    """
    arms: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        arms.setdefault(candidate.arm, []).append(candidate)
    counts = {len(own) for own in arms.values()}
    finished = all(candidate.score is not None or candidate.outcome for candidate in candidates)
    scores = [candidate.score for candidate in candidates if candidate.score is not None]
    if len(arms) < 2 or min(counts) < 3 or not finished or not scores:
        return {}
    worst = min(scores) if goal == "max" else max(scores)
    budgets = [*(budget for budget in BUDGETS if budget < min(counts)), min(counts)]
    table = {}
    for arm, own in arms.items():
        known = [worst if candidate.score is None else candidate.score for candidate in own]
        table[arm] = {budget: expected_best(known, budget, goal) for budget in budgets}
    return table


def expected_best(scores: Sequence[float], tried: int, goal: str) -> float:
    """Return the mean over all sets of ``tried`` scores of the best of a set; ``goal`` is max or min."""
    ordered = sorted(scores, reverse=goal == "min")  # the best last
    sets = [math.comb(worse, tried - 1) for worse in range(len(ordered))]
    return sum(score * count for score, count in zip(ordered, sets, strict=True)) / math.comb(len(ordered), tried)
