"""Interactions of a grid: whether two changes together do more, or less, than both alone."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vitlab.comparison.arrays import Comparisons, judge_studies
from vitlab.planning.values import Plan
from vitlab.report.phrasing import Columns, difference_columns, format_p_equation
from vitlab.report.sections import Findings, Section, Table, finite_or_none, section
from vitlab.spec.design import format_value
from vitlab.statistics import replicates

if TYPE_CHECKING:
    from vitlab.report.report import Report

CAVEAT = "Exploratory: p values are corrected for these interactions alone, and none is registered."


@dataclass(frozen=True)
class Grid:
    """The arms of a design by their levels: the values of the paths that arms vary, as text."""

    arms: Mapping[tuple[str, ...], str]
    reference: tuple[str, ...]  #: levels of the first arm without a baseline
    factors: Mapping[str, int]  #: path to its place among the levels, without those that a block sets

    @classmethod
    def from_plan(cls, plan: Plan) -> Grid | None:
        """Return the arms that run, controls apart; None if all of them have a baseline."""
        running = [arm for arm in plan.arms if not arm.skip and not arm.is_control]
        levels = {arm.name: tuple(format_value(arm.values.get(path)) for path in plan.paths) for arm in running}
        reference = next((levels[arm.name] for arm in running if arm.baseline is None), None)
        if reference is None:
            return None
        blocks = {arm.block for arm in running}
        factors = {
            path: place
            for place, path in enumerate(plan.paths)
            if len({(arm.block, levels[arm.name][place]) for arm in running}) > len(blocks)
        }
        return cls({own: arm for arm, own in levels.items()}, reference, factors)

    def arm(self, levels: Sequence[str], *places: int) -> str | None:
        """Return the arm with these levels, but for some places the reference's; None if there is none."""
        return self.arms.get(tuple(self.reference[at] if at in places else level for at, level in enumerate(levels)))


@dataclass(frozen=True)
class Interaction:
    """An interaction of two changes, in the unit of the metric; numbers are None where too few seeds have them."""

    first: str  #: a change, as ``path=value``
    second: str
    against: str  #: the values that both are changed from
    pairs: int  #: seeds that all arms have
    family: int  #: interactions that are corrected together
    difference: float | None  #: effect of both changes minus the sum of their single effects
    low: float | None
    high: float | None
    p: float | None
    p_corrected: float | None


@section.register("interactions")
class Interactions(Section[Interaction]):
    """Interactions of every two changes of a grid."""

    heading = "Interactions"
    place = 30
    row = Interaction

    def rows(self, findings: Findings) -> Iterator[Interaction]:
        """Return the interaction of every two paths and pair of levels, against the levels of a reference.

        The reference is the first arm without a baseline.  Effects are means, at each seed, over all settings of the
        other paths at which the four arms exist; they form a family of their own.
        """
        results, plan = findings.results, findings.plan
        grid = Grid.from_plan(plan)
        if grid is None:
            return
        table_AN = replicates.values_to_array([results.values.get(arm, {}) for arm in grid.arms.values()])
        values_N = dict(zip(grid.arms.values(), table_AN, strict=True))
        reference, effects = grid.reference, []
        for (first, i), (second, j) in itertools.combinations(grid.factors.items(), 2):
            squares: defaultdict[tuple[str, str], list[list[str]]] = defaultdict(list)
            for levels in grid.arms:
                corners = [grid.arm(levels, *places) for places in ((), (j,), (i,), (i, j))]
                if levels[i] != reference[i] and levels[j] != reference[j] and all(corners):
                    squares[levels[i], levels[j]].append(list(filter(None, corners)))
            for (a, b), alike in squares.items():
                both, one, other, neither = (
                    np.mean([values_N[arm] for arm in corner], axis=0) for corner in zip(*alike, strict=True)
                )
                against = f"{first}={reference[i]}, {second}={reference[j]}"
                effects.append((f"{first}={a}", f"{second}={b}", against, np.stack([other - neither, both - one])))
        design = replace(
            Comparisons.with_one_baseline(1),
            family=np.array([len(effects)]),
            alpha=plan.analysis.alpha,
            share=1 / len(plan.alpha_shares),  # interactions are tested at every look
            correction=plan.analysis.correction,
            overlap=results.largest_overlap(grid.arms.values()),
        )
        # For two factors of two levels, t is that of a repeated-measures analysis of variance over seeds.
        for first, second, against, of_first_2N in effects:
            present_2N = of_first_2N[:, np.isfinite(of_first_2N).all(axis=0)]
            result = judge_studies(present_2N[None], design).contrasts.single(0, 0)
            numbers = {name: getattr(result, name) for name in ("difference", "low", "high", "p", "p_corrected")}
            yield Interaction(first, second, against, result.pairs, len(effects), **finite_or_none(numbers))

    def notes(self, rows: Sequence[Interaction], findings: Findings) -> Iterator[str]:
        for row in rows:
            if row.p_corrected is not None and row.p_corrected <= findings.plan.analysis.alpha:
                p = f"p {format_p_equation(row.p_corrected, findings.plan.analysis.alpha)}"
                yield f"{row.first} and {row.second} interact ({p}): a main effect of either averages unlike ones."

    def table(self, rows: Sequence[Interaction], report: Report) -> Table:
        column = Columns(rows)
        columns = [
            column.text("change", "first"),
            column.text("with", "second"),
            column.text("beside", "against", rank=2),
            column("n", lambda row: str(row.pairs), rank=1),
            *difference_columns(rows, report.analysis, report.scale, "interaction"),
        ]
        return Table(
            columns,
            "Difference that two changes make together, minus the sum of their single differences, at the n seeds that "
            f"all four arms have; other seeds are left out. {CAVEAT}",
            CAVEAT,
        )
