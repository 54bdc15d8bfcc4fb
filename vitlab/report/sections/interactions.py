"""Interactions of a grid: whether two changes together do more, or less, than both alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vitlab.comparison.arrays import Comparisons, judge_studies
from vitlab.planning.values import Arm
from vitlab.report.phrasing import Columns, format_p_value, half_width, interval_name
from vitlab.report.sections import Findings, Section, Table, finite_or_none, section
from vitlab.spec.design import format_value
from vitlab.statistics import replicates

if TYPE_CHECKING:
    from vitlab.report.report import Report

CAVEAT = "Exploratory: p values are corrected for these interactions alone, and none is registered."


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
        paths = plan.paths
        running = [arm for arm in plan.arms if not arm.skip]
        arms = {_levels_of_arm(paths, arm): arm.name for arm in running}
        reference = next((_levels_of_arm(paths, arm) for arm in running if arm.baseline is None), None)
        if reference is None:
            return
        by_seed = [results.values.get(arm, {}) for arm in arms.values()]
        table_AN = replicates.values_to_array(by_seed)
        values_N = dict(zip(arms.values(), table_AN, strict=True))
        effects = []
        # Values that are the same within a block are its own.
        varied = [
            (place, path)
            for place, path in enumerate(paths)
            if len({(arm.block, format_value(arm.values.get(path))) for arm in running})
            > len({arm.block for arm in running})
        ]
        for (i, first), (j, second) in itertools.combinations(varied, 2):
            squares: dict[tuple[str, str], list[list[str]]] = {}
            for levels in arms:
                if levels[i] != reference[i] and levels[j] != reference[j]:
                    squares.setdefault((levels[i], levels[j]), []).extend(_find_squares(arms, levels, reference, i, j))
            for (a, b), alike in squares.items():
                if alike:
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
            overlap=results.largest_overlap(arms.values()),
        )
        # For two factors of two levels, t is that of a repeated-measures analysis of variance over seeds.
        for first, second, against, of_first_2N in effects:
            present_2N = of_first_2N[:, np.isfinite(of_first_2N).all(axis=0)]
            result = judge_studies(present_2N[None], design).contrasts.single(0, 0)
            numbers = {name: getattr(result, name) for name in ("difference", "low", "high", "p", "p_corrected")}
            yield Interaction(first, second, against, result.pairs, len(effects), **finite_or_none(numbers))

    def table(self, rows: Sequence[Interaction], report: Report) -> Table:
        scale, analysis, column = report.scale, report.analysis, Columns(rows)
        decimals = scale.decimals([half_width(row.low, row.high) for row in rows], [row.difference for row in rows])
        title = "interaction" + (f" ({scale.points})" if scale.points else "")
        interval = interval_name({"family": rows[0].family}, analysis)
        columns = [
            column.text("change", "first"),
            column.text("with", "second"),
            column.text("beside", "against", rank=2),
            column("n", lambda row: str(row.pairs), rank=1),
            column(title, lambda row: scale.number(row.difference, decimals, sign=True)),
            column(interval, lambda row: scale.interval(row.low, row.high, decimals), rank=1),
            column("p", lambda row: format_p_value(row.p_corrected, analysis.alpha)),
        ]
        return Table(
            columns,
            "Difference that two changes make together, minus the sum of their single differences, at the n seeds that "
            f"all four arms have; other seeds are left out. {CAVEAT}",
            CAVEAT,
        )


def _levels_of_arm(paths: Sequence[str], arm: Arm) -> tuple[str, ...]:
    return tuple(format_value(arm.values.get(path)) for path in paths)


def _find_squares(
    arms: Mapping[tuple[str, ...], str], both: Sequence[str], reference: Sequence[str], i: int, j: int
) -> Iterator[list[str]]:
    """Yield four arms, if there are all: both changes, the one at ``i``, the one at ``j``, neither."""
    corners = [
        tuple(reference[at] if at in unchanged else level for at, level in enumerate(both))
        for unchanged in ((), (j,), (i,), (i, j))
    ]
    if all(corner in arms for corner in corners):
        yield [arms[corner] for corner in corners]
