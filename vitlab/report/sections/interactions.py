"""Interactions of a grid: whether two changes together do more, or less, than both alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vitlab.comparison.arrays import Design, contrast
from vitlab.plan.design import text
from vitlab.plan.palette import RULE, SERIES
from vitlab.plan.values import Arm
from vitlab.report.drawing import WIDE, Drawing, new_figure, style, wrapped_line
from vitlab.report.phrasing import Column, Scale, half_width, interval_name, p_value, percent
from vitlab.report.sections.base import Findings, Section, Table, finite_or_none, section
from vitlab.report.study_results import StudyResults
from vitlab.spec.design import short_names

if TYPE_CHECKING:
    from vitlab.report.document import Report


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

    def rows(self, findings: Findings) -> list[Interaction]:
        """Return the interaction of every two paths and pair of levels, against the reference levels."""
        return interactions(findings.results)

    def table(self, rows: Sequence[Interaction], report: Report) -> Table | None:
        """Return the table."""
        if not rows:
            return None
        scale, analysis = Scale.of(report.analysis.metric, report.units), report.analysis
        decimals = scale.decimals([half_width(row.low, row.high) for row in rows], [row.difference for row in rows])
        title = "interaction" + (f" ({scale.points})" if scale.points else "")
        intervals = tuple(scale.interval(row.low, row.high, decimals) for row in rows)
        columns = [
            Column("change", tuple(row.first for row in rows), right=False),
            Column("with", tuple(row.second for row in rows), right=False),
            Column("beside", tuple(row.against for row in rows), rank=2, right=False),
            Column("n", tuple(str(row.pairs) for row in rows), rank=1),
            Column(title, tuple(scale.number(row.difference, decimals, sign=True) for row in rows)),
            Column(interval_name({"family": rows[0].family}, analysis), intervals, rank=1),
            Column("p", tuple(p_value(row.p_corrected, analysis.alpha) for row in rows)),
        ]
        return Table(
            columns,
            "Difference that two changes make together, minus the sum of their single differences, at the n seeds that "
            "all four arms have; other seeds are left out. Exploratory: p values are corrected for these interactions "
            "alone, and none is registered.",
        )

    def figure(self, rows: Sequence[Interaction], findings: Findings, width: float) -> Drawing | None:
        """Draw the cells of a grid of two factors: a line per level of the one over the levels of the other.

        None for other designs, and for grids in which no two rows share two columns.
        """
        return _figure(findings, width)


def interactions(results: StudyResults) -> list[Interaction]:
    """Return the two-way interactions of a grid: for every two paths and pair of levels, against the reference levels.

    The reference is the first arm without a baseline.  Effects are means, at each seed, over all settings
    of the other paths at which the four arms exist; they form a family of their own.  Values are in the
    unit of the metric.
    """
    plan, values = results.plan, results.values
    paths = plan.paths
    arms = {_at(paths, arm): arm.name for arm in plan.arms if not arm.skip}
    reference = next((arm for arm in plan.arms if arm.baseline is None and not arm.skip), None)
    if reference is None or len(paths) < 2:
        return []
    reference_levels = _at(paths, reference)
    levels = [list(dict.fromkeys(key[index] for key in arms)) for index in range(len(paths))]
    effects: list[tuple[str, str, str, list[dict[int, float]]]] = []
    for (i, first), (j, second) in itertools.combinations(enumerate(paths), 2):
        for a, b in itertools.product(levels[i], levels[j]):
            squares = (
                list(_squares(arms, i, j, (a, reference_levels[i]), (b, reference_levels[j])))
                if a != reference_levels[i] and b != reference_levels[j]
                else []
            )
            if squares:
                cells = [_mean([values.get(square[corner], {}) for square in squares]) for corner in range(4)]
                effects.append(
                    (
                        f"{first}={a}",
                        f"{second}={b}",
                        f"{first}={reference_levels[i]}, {second}={reference_levels[j]}",
                        cells,
                    )
                )
    share = 1 / len(plan.alpha_shares)  # interactions are tested at every look
    design = replace(
        Design.with_one_baseline(1),
        family=np.array([len(effects)]),
        alpha=plan.analysis.alpha,
        share=share,
        correction=plan.analysis.correction,
        overlap=results.overlap_of(arms.values()),
    )
    rows = []
    for first, second, against, (both, one, other, neither) in effects:
        seeds = both.keys() & one.keys() & other.keys() & neither.keys()
        # For two factors of two levels, t is that of a repeated-measures analysis of variance with the seed as subject.
        result = contrast(
            {seed: both[seed] - one[seed] for seed in seeds},
            {seed: other[seed] - neither[seed] for seed in seeds},
            design,
        )
        numbers = {name: getattr(result, name) for name in ("difference", "low", "high", "p", "p_corrected")}
        rows.append(Interaction(first, second, against, result.pairs, len(effects), **finite_or_none(numbers)))
    return rows


def _at(paths: Sequence[str], arm: Arm) -> tuple[str, ...]:
    return tuple(text(arm.values.get(path)) for path in paths)


def _squares(
    arms: Mapping[tuple[str, ...], str], i: int, j: int, first: tuple[str, str], second: tuple[str, str]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield sets of four arms: both changes, the first, the second, neither; other paths are equal within a set."""
    for key in arms:
        if (key[i], key[j]) != (first[0], second[0]):
            continue
        corners = []
        for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            other = list(key)
            other[i], other[j] = first[a], second[b]
            corners.append(arms.get(tuple(other)))
        if all(corner is not None for corner in corners):
            yield tuple(corners)  # type: ignore[misc]


def _mean(sides: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return seed to mean over several arms, for the seeds that all of them have."""
    seeds = set.intersection(*(set(side) for side in sides))
    return {seed: sum(side[seed] for side in sides) / len(sides) for seed in sorted(seeds)}


def _figure(findings: Findings, width: float) -> Drawing | None:
    plan = findings.plan
    rows = {row["arm"]: row for row in findings.arms if row["mean"] is not None}
    arms = [arm for arm in plan.arms if arm.name in rows]
    paths = [path for path in plan.paths if len({text(arm.values.get(path)) for arm in arms}) > 1]
    if len(paths) != 2:
        return None
    cells = {(text(arm.values.get(paths[0])), text(arm.values.get(paths[1]))): rows[arm.name] for arm in arms}
    if len(cells) < len(arms):
        return None
    across, apart = (list(dict.fromkeys(cell[i] for cell in cells)) for i in (0, 1))
    if len(apart) > len(across):
        across, apart, paths = apart, across, paths[::-1]
        cells = {(second, first): row for (first, second), row in cells.items()}
    full = any(
        sum((x, first) in cells and (x, second) in cells for x in across) > 1
        for first, second in itertools.combinations(apart, 2)
    )
    if not full or len(apart) > len(SERIES):
        return None
    scale, short = Scale.of(plan.analysis.metric, plan.units), short_names(paths)
    lows = [row["low"] for row in cells.values()]
    with style():
        figure = new_figure(width, 3.2)
        axes = figure.subplots()
        for index, level in enumerate(apart):
            offset = 0.12 * (index - (len(apart) - 1) / 2)
            places = [place for place, x in enumerate(across) if (x, level) in cells]
            points = [cells[across[place], level] for place in places]
            means = [scale.factor * row["mean"] for row in points]
            half = [0.0 if row["low"] is None else scale.factor * (row["high"] - row["mean"]) for row in points]
            axes.errorbar(
                [place + offset for place in places],
                means,
                yerr=half,
                color=SERIES[index],
                marker="o",
                markersize=5,
                linewidth=1.4,
                elinewidth=1.0,
                capsize=2.5,
                label=wrapped_line(f"{short[paths[1]]}={level}", 36),
            )
        room = max(8, int((84 if width >= WIDE else 40) / len(across)))
        axes.set_xticks(range(len(across)), [wrapped_line(x, room) for x in across])
        axes.set_xlim(-0.5, len(across) - 0.5)
        axes.set_xlabel(short[paths[0]])
        axes.set_ylabel(scale.title)
        axes.grid(axis="y", color=RULE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, loc="best", handlelength=1.4)
        interval = f" with its {percent(1 - plan.analysis.alpha)} t-interval" * any(low is not None for low in lows)
        lines = "Parallel lines: the difference that one factor makes does not depend on the other."
        return Drawing(figure, f"The mean of every cell of the grid{interval}. {lines}")
