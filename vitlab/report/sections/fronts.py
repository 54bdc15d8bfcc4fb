"""Fronts: the arms that no other arm beats both in a cost and in the result."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitlab.errors import format_count
from vitlab.explaining.colours import GREY, INK, SERIES
from vitlab.report.drawing import (
    WIDTH,
    Drawing,
    apply_style,
    describe_shared_name_parts,
    empty_figure,
    format_ticks_without_exponents,
    wrapped_labels,
)
from vitlab.report.phrasing import Column, describe_baseline
from vitlab.report.sections import Findings, Section, Table, cost, section
from vitlab.statistics import scaling

if TYPE_CHECKING:
    from vitlab.report.report import Report

COSTS = {**cost.COSTS, "macs": "MACs per image", "params": "parameters"}
"""Costs with their labels.  Speed counts only if measured for each arm alone: trials share their machine."""
APART = 1.05  #: smallest ratio of largest to smallest cost for a front
CAVEAT = (
    "Means and costs are taken as they are: other seeds, or another measurement where a speed is measured, may change "
    "the list."
)
LEGEND_COLUMNS = 3
MAX_NAMED = 12  #: with more arms, a picture names only those on a front


@dataclass(frozen=True)
class Front:
    """An arm beside the Pareto front of one cost and the mean result."""

    cost: str  #: what the front is of: params, macs, or a column of the table ``cost``
    arm: str  #: the arm
    value: float  #: its cost
    mean: float  #: its mean of the judged metric
    on_front: bool  #: whether no other arm costs at most as much and has a mean that is at least as good


@section.register("fronts")
class Fronts(Section[Front]):
    """Arms that no other arm beats both in a cost and in the mean result."""

    heading = "Fronts"
    place = 50
    row = Front
    of_seeds = True

    def rows(self, findings: Findings) -> Iterator[Front]:
        """Return the front of each cost in which arms differ; none over blocks, whose results are on unlike data.

        A cost is left out if fewer than two arms have it, or if its largest value is below ``APART`` times the least.
        """
        if any(arm.block for arm in findings.plan.arms):
            return
        goal = findings.plan.analysis.goal
        arms = {row["arm"]: row for row in findings.arms if row["mean"] is not None}
        measured = {row.arm: row for row in cost.up_to_date_costs(findings)}
        for name in COSTS:
            values = {
                arm: float(value)
                for arm, row in arms.items()
                if (value := row.get(name) or getattr(measured.get(arm), name, None))
            }
            if len(values) < 2 or max(values.values()) < APART * min(values.values()):
                continue
            signed = [-value if name in cost.SPEEDS else value for value in values.values()]
            results = [arms[arm]["mean"] * (1 if goal == "max" else -1) for arm in values]
            for (arm, value), on_front in zip(values.items(), scaling.on_pareto_front(signed, results), strict=True):
                yield Front(name, arm, value, arms[arm]["mean"], on_front)

    def table(self, rows: Sequence[Front], report: Report) -> Table:
        labels = {}
        for row in report.arms:
            lost = row["diverged"] + row["failed"]
            labels[row["arm"]] = f"{row['arm']} ({format_count(lost, 'lost seed')})" if lost else row["arm"]
        fronts = defaultdict[str, list[str]](list)
        for point in rows:
            fronts[COSTS[point.cost]] += [labels[point.arm]] * point.on_front
        columns = [
            Column("cost", tuple(fronts), right=False),
            Column("arms that no other arm beats in both", tuple(map("; ".join, fronts.values())), right=False),
        ]
        return Table(
            columns,
            "For each cost, the arms for which no other arm costs at most as much and has a mean "
            f"{report.analysis.metric} that is at least as good. {CAVEAT}",
            CAVEAT,
        )

    def figure(self, rows: Sequence[Front], findings: Findings) -> Drawing:
        scale = findings.scale
        rows = [row for row in rows if row.cost in cost.COSTS] or rows  # a count is no measurement
        names = dict.fromkeys(row.cost for row in rows)
        arms = list(dict.fromkeys(row.arm for row in rows if row.on_front or len(rows) <= MAX_NAMED * len(names)))
        # Colours begin anew with another marker, so that each arm has a sign of its own.
        signs = dict(zip(arms, itertools.product("os^Dv", SERIES), strict=False))
        signs |= {row["baseline"]: ("o", INK) for row in findings.arms if row["baseline"] in arms}  # as in curves
        labels, handles = wrapped_labels(arms, 30), {}
        with apply_style():
            figure = empty_figure(WIDTH, 3.2 + 0.2 * (1 + len(arms) // LEGEND_COLUMNS))
            panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
            for axes, name in zip(panels, names, strict=True):
                at = {row: (row.value, scale.factor * row.mean) for row in rows if row.cost == name}
                front = sorted(place for row, place in at.items() if row.on_front)
                axes.plot(*zip(*front, strict=True), color=GREY, linewidth=0.9, zorder=1)
                for row, place in at.items():
                    marker, colour = signs.get(row.arm, ("o", GREY))
                    fill = colour if row.on_front else "none"  # marks of equal results are seen through each other
                    (handles[row.arm],) = axes.plot(
                        *place, marker, color=colour, markerfacecolor=fill, alpha=0.7, label=labels.get(row.arm)
                    )
                (lowest, _), (highest, _) = min(at.values()), max(at.values())
                if highest > 10 * lowest:
                    axes.set_xscale("log")
                format_ticks_without_exponents(axes)
                axes.set_xlabel(COSTS[name])
                axes.grid()
            panels[0].set_ylabel(scale.title)
            figure.legend(handles=[handles[arm] for arm in arms], loc="outside lower center", ncols=LEGEND_COLUMNS)
            caption = (
                "What each arm reaches, as the mean of its seeds, over what it costs; the figure of the arms has the "
                "intervals of the means. Filled, and joined by a line: arms that no other one beats in both."
            )
            baselines = {row["baseline"] for row in findings.arms} - {None}
            caption += f" In the colour of the text: {describe_baseline(baselines)}." * bool(baselines)
            caption += " Other arms are grey." * (len(handles) > len(arms))
            return Drawing(figure, caption + describe_shared_name_parts(labels))
