"""The means of a grid of two factors, and interactions: whether two changes together do more than both alone."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitlab.comparison.study import Sample, judge_study
from vitlab.planning.values import Arm, Plan
from vitlab.report.comparison import plan_without_registration, samples_by_arm, trials_by_arm
from vitlab.report.drawing import Drawing
from vitlab.report.frame import StudyResults
from vitlab.report.phrasing import (
    DASH,
    Column,
    Columns,
    compared_rows,
    describe_baseline,
    difference_columns,
    interval_name,
    table_and_sentence_decimals,
)
from vitlab.report.sections import Findings, Section, Table, finite_or_none, section
from vitlab.report.sections.arms import draw_effects
from vitlab.spec import Analysis
from vitlab.spec.design import format_value, short_names

if TYPE_CHECKING:
    from vitlab.report.report import Report

CAVEAT = "P values and intervals are corrected for the interactions alone, a family beside the comparisons of arms."
MAX_LEVELS = 4  #: of both factors of a crossed table; a larger one wraps in a terminal of 80 columns


@dataclass(frozen=True)
class Grid:
    """The arms of a design by their levels: the values of the paths that arms vary, as text."""

    arms: Mapping[tuple[str, ...], Arm]
    reference: tuple[str, ...]  #: levels of the first arm without a baseline
    factors: Mapping[str, int]  #: path to its place among the levels, without those that a block sets

    @classmethod
    def from_plan(cls, plan: Plan) -> Grid | None:
        """Return the arms that run, controls apart; None if all of them have a baseline."""
        running = [arm for arm in plan.arms if not arm.skip and not arm.is_control]
        arms = {tuple(format_value(arm.values.get(path)) for path in plan.paths): arm for arm in running}
        reference = next((levels for levels, arm in arms.items() if arm.baseline is None), None)
        if reference is None:
            return None
        blocks = {arm.block for arm in running}
        factors = {
            path: place
            for place, path in enumerate(plan.paths)
            if len({(arm.block, levels[place]) for levels, arm in arms.items()}) > len(blocks)
        }
        return cls(arms, reference, factors)

    def arm(self, levels: Sequence[str], *places: int) -> Arm | None:
        """Return the arm with these levels, but for some places the reference's; None if there is none."""
        return self.arms.get(tuple(self.reference[at] if at in places else level for at, level in enumerate(levels)))

    def arms_by_interaction(self) -> dict[tuple[str, str, str], list[Arm]]:
        """Return, for two changes beside the reference, the arms with both and with neither; each beside one with one.

        The one beside it is its baseline.  Changes without all four arms are left out.
        """
        squares = defaultdict[tuple[str, str, str], list[Arm]](list)
        for (first, i), (second, j) in itertools.combinations(self.factors.items(), 2):
            against = f"{first}={self.reference[i]}, {second}={self.reference[j]}"
            for levels, both in self.arms.items():
                one, other, neither = (self.arm(levels, *places) for places in ((j,), (i,), (i, j)))
                is_changed = levels[i] != self.reference[i] and levels[j] != self.reference[j]
                if is_changed and one and other and neither:
                    corners = replace(both, baseline=one.name), replace(neither, baseline=other.name)
                    squares[f"{first}={levels[i]}", f"{second}={levels[j]}", against] += corners
        return squares


@dataclass(frozen=True)
class Cell:
    """An arm of a grid of two factors."""

    changes: ClassVar = ("first", "second")
    first: str  #: the arm's level of the first factor, as ``path=value``
    second: str  #: its level of the second factor
    arm: str  #: the arm
    mean: float | None  #: mean of the judged metric; missing without a value
    low: float | None  #: its interval, as in the table of arms; missing where seeds collapsed, too
    high: float | None  #: its upper end


@section.register("crossed")
class Crossed(Section[Cell]):
    """Means of the arms of a grid of two factors."""

    heading = "Means of the grid"
    place = 24
    row = Cell
    of_seeds = True

    def rows(self, findings: Findings) -> Iterator[Cell]:
        plan, grid = findings.plan, Grid.from_plan(findings.plan)
        if grid is None or len(plan.paths) != 2 or not grid.arms_by_interaction():
            return
        rows = {row["arm"]: row for row in findings.arms}
        if max(len({*levels}) for levels in zip(*grid.arms, strict=True)) <= MAX_LEVELS:
            for levels, arm in grid.arms.items():
                first, second = (f"{path}={level}" for path, level in zip(plan.paths, levels, strict=True))
                if row := rows.get(arm.name):
                    yield Cell(first, second, arm.name, row["mean"], row["low"], row["high"])

    def table(self, rows: Sequence[Cell], report: Report) -> Table:
        scale, labels = report.scale, shorten_change_paths(rows)
        decimals, _ = table_and_sentence_decimals(report.arms, scale)
        cells = {}
        for row in rows:
            text = f"{scale.number(row.mean, decimals)} {scale.interval(row.low, row.high, decimals)}"
            cells[row.first, row.second] = text.removesuffix(f" {DASH}")
        firsts, seconds = map(dict.fromkeys, zip(*cells, strict=True))
        name = labels[rows[0].first].partition("=")[0]
        columns = [
            Column(name, tuple(first.partition("=")[2] for first in firsts), right=False),
            *(
                Column(labels[second], tuple(cells.get((first, second), "") for first in firsts), right=False)
                for second in seconds
            ),
        ]
        interval = f" with its {interval_name(1, report.analysis)}" * any(row.low is not None for row in rows)
        paths = dict.fromkeys(change.partition("=")[0] for change in labels)
        caption = f"Mean {scale.title} of every arm{interval}, by {' and '.join(paths)}."
        if compared_rows(report.arms):
            caption += f" Arms are compared with {describe_baseline(row['baseline'] for row in report.arms)}."
        return Table(columns, caption, caption)


@dataclass(frozen=True)
class Interaction:
    """An interaction of two changes, in the unit of the metric; numbers are None where too few seeds have them."""

    changes: ClassVar = ("first", "second")
    first: str  #: a change, as ``path=value``
    second: str  #: another change, of another factor
    against: str  #: the values that both are changed from
    pairs: int  #: seeds that all arms have
    family: int  #: interactions that are corrected together
    difference: float | None  #: effect of both changes together minus the sum of their single effects
    low: float | None  #: its interval, which holds for the whole family at once
    high: float | None  #: its upper end
    p: float | None  #: two-sided p of this row alone
    p_corrected: float | None  #: the same, corrected for the family
    lost: int = 0  #: lost seeds of the arms; with any, no interaction is claimed


@section.register("interactions")
class Interactions(Section[Interaction]):
    """Interactions of every two changes of a grid."""

    heading = "Interactions"
    place = 30
    row = Interaction
    of_seeds = True

    def rows(self, findings: Findings) -> Iterator[Interaction]:
        """Return the interaction of every two paths and pair of levels, against the levels of a reference.

        The reference is the first arm without a baseline.  Effects are means, at each seed, over all settings of the
        other paths at which the four arms exist; they form a family of their own.
        """
        grid = Grid.from_plan(findings.plan)
        squares = {} if grid is None else grid.arms_by_interaction()
        # For two factors of two levels, t is that of a repeated-measures analysis of variance over seeds.
        for changes, row in zip(squares, judge_averages(findings.results, squares.values()), strict=True):
            if not row["pairs"]:  # its arms have not been trained yet
                continue
            # Of two effects, one is (both - one) and one (other - neither): their difference is twice an average.
            sizes = (row[name] and 2 * row[name] for name in ("difference", "low", "high"))
            yield Interaction(
                *changes, row["pairs"], row["family"], *sizes, *(row[name] for name in ("p", "p_corrected", "lost"))
            )

    def figure(self, rows: Sequence[Interaction], findings: Findings) -> Drawing:
        labels = shorten_change_paths(rows)
        effects = {f"{labels[row.first]} with {labels[row.second]}": row for row in rows}
        verdicts = ["shown" * is_shown(row, findings.plan.analysis) for row in rows]
        return Drawing(
            draw_effects(effects, verdicts, "difference of differences", findings.scale),
            f"Every interaction with its {interval_name(rows[0].family, findings.plan.analysis)}"
            f"{'; a filled dot is one that is shown' * any(verdicts)}.",
        )

    def table(self, rows: Sequence[Interaction], report: Report) -> Table:
        column, labels = Columns(rows), shorten_change_paths(rows)
        columns = [
            column("change", lambda row: labels[row.first], right=False),
            column("with", lambda row: labels[row.second], right=False),
            column("n", lambda row: str(row.pairs), rank=2),
            *difference_columns(rows, report.arms, report.analysis, report.scale, "interaction"),
        ]
        return Table(
            columns,
            f"Difference that two changes from {'; '.join(dict.fromkeys(row.against for row in rows))} make together, "
            "minus the sum of their single differences, at the n seeds that all four arms have. "
            f"{CAVEAT}",
            CAVEAT,
        )


def is_shown(row: Interaction, analysis: Analysis) -> bool:
    """Return whether an interaction is shown; it has no verdict, because more is not better."""
    return not row.lost and row.p_corrected is not None and row.p_corrected <= analysis.alpha


def shorten_change_paths(rows: Iterable[Any]) -> dict[str, str]:
    """Return the ``changes`` of some rows, each ``path=value``, with the short names of their paths."""
    parts = {change: change.partition("=") for row in rows for change in map(vars(row).get, row.changes)}
    short = short_names([path for path, *_ in parts.values()])
    return {change: f"{short[path]}={value}" for change, (path, _, value) in parts.items()}


def judge_averages(results: StudyResults, arm_groups: Iterable[Sequence[Arm]]) -> list[dict[str, Any]]:
    """Return the comparison of the average of some arms with the average of their baselines, for each effect.

    Averages are judged as arms are: see :func:`vitlab.comparison.study.judge_study`.  Numbers are JSON values.
    """
    samples = samples_by_arm(results, trials_by_arm(results))
    compared, averages = dict[str, str](), dict[str, Sample]()

    def average(arms: Sequence[str], seeds: Sequence[int]) -> Sample:
        alike = [samples.get(arm, Sample({})) for arm in arms]
        values = {seed: float(np.mean([sample.values[seed] for sample in alike])) for seed in seeds}
        overlap = float(np.max([sample.overlap for sample in alike]))  # NaN if one is not known
        return Sample(values, sorted({seed for sample in alike for seed in sample.lost}), overlap)

    for place, arms in enumerate(arm_groups):
        own, others = ([str(getattr(arm, side)) for arm in arms] for side in ("name", "baseline"))
        seeds = sorted(set.intersection(*(set(results.values.get(arm, {})) for arm in (*own, *others))))
        level, baseline = f"level {place}", f"{'; '.join(others)} at {seeds}"
        compared[level] = baseline
        averages |= {level: average(own, seeds), baseline: average(others, seeds)}
    plan = plan_without_registration(results.plan)
    rows = judge_study(plan, compared, averages, quantum=results.quantum).values()
    return [finite_or_none({**row, "low": row["difference_low"], "high": row["difference_high"]}) for row in rows]
