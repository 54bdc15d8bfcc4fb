"""Fronts: the arms that no other arm beats both in a cost and in the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitlab.errors import format_count
from vitlab.explaining.colours import GREY, INK, SERIES
from vitlab.report.drawing import (
    WIDTH,
    Drawing,
    apply_style,
    describe_shared,
    empty_figure,
    format_ticks_without_exponents,
    wrapped_labels,
)
from vitlab.report.phrasing import Columns, name_baseline
from vitlab.report.sections import Findings, Section, Table, cost, section
from vitlab.statistics import scaling

if TYPE_CHECKING:
    from vitlab.report.report import Report

COSTS = {"params": "parameters", "macs": "MACs per image", **cost.COSTS}
"""Costs with their labels.  Speed counts only if measured for each arm alone: trials share their machine."""
APART = 1.05  #: smallest ratio of largest to smallest cost for a front
CAVEAT = (
    "Means and costs are taken as they are: other seeds may change the list, and measured speeds whose quartiles "
    "overlap are not told apart."
)
PANELS_PER_ROW = 3  #: panels side by side
MAX_NAMED = 12  #: with more arms, a picture names only those on a front


@dataclass(frozen=True)
class Front:
    """The Pareto front of one cost and the mean result."""

    cost: str  #: a key of ``COSTS``
    arms: Mapping[str, bool]  #: arm to whether it is on the front


@section.register("fronts")
class Fronts(Section[Front]):
    """Arms that no other arm beats both in a cost and in the mean result."""

    heading = "Fronts"
    place = 50
    row = Front

    def rows(self, findings: Findings) -> Iterator[Front]:
        """Return the front of each cost in which arms differ; none over blocks, whose results are on unlike data.

        A cost is left out if fewer than two arms have it, or if its largest value is below ``APART`` times the least.
        """
        if any(arm.block for arm in findings.plan.arms):
            return
        costs, goal = costs_by_arm(findings), findings.plan.analysis.goal
        means = {row["arm"]: row["mean"] for row in findings.arms if row["mean"] is not None}
        for name in COSTS:
            values = {arm: costs[arm][name] for arm in means if costs[arm].get(name, 0.0) > 0}
            if len(values) < 2 or max(values.values()) < APART * min(values.values()):
                continue
            signed = [-value if name in cost.SPEEDS else value for value in values.values()]
            results = [means[arm] if goal == "max" else -means[arm] for arm in values]
            yield Front(name, dict(zip(values, scaling.on_pareto_front(signed, results), strict=True)))

    def table(self, rows: Sequence[Front], report: Report) -> Table:
        labels = {}
        for row in report.arms:
            broken = row["diverged"] + row["failed"]
            labels[row["arm"]] = f"{row['arm']} ({format_count(broken, 'broken seed')})" if broken else row["arm"]

        def on_front(row: Front) -> str:
            return "; ".join(labels[arm] for arm, on in row.arms.items() if on)

        column = Columns(rows)
        columns = [
            column("cost", lambda row: COSTS[row.cost], right=False),
            column("arms that no other arm beats in both", on_front, right=False),
        ]
        return Table(
            columns,
            "For each cost, the arms for which no other arm costs at most as much and has a mean "
            f"{report.analysis.metric} that is at least as good. {CAVEAT}",
            CAVEAT,
        )

    def figure(self, rows: Sequence[Front], findings: Findings) -> Drawing:
        costs, scale = costs_by_arm(findings), findings.scale
        means = {row["arm"]: row["mean"] for row in findings.arms}
        across = min(len(rows), PANELS_PER_ROW)
        down = math.ceil(len(rows) / across)
        arms = list(dict.fromkeys(arm for row in rows for arm in row.arms))
        if len(arms) > MAX_NAMED:
            arms = [arm for arm in arms if any(row.arms.get(arm) for row in rows)]
        # Colours begin anew with another marker, so that each arm has a sign of its own.
        signs = dict(zip(arms, itertools.product("os^Dv", SERIES), strict=False))
        signs |= {row["baseline"]: ("o", INK) for row in findings.arms if row["baseline"] in arms}  # as in curves
        labels, handles = wrapped_labels(arms, 30), {}
        with apply_style():
            figure = empty_figure(WIDTH, 3.2 * down + 0.2 * len(arms) / across)
            panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
            for axes, row in zip(panels, rows, strict=False):
                at = {arm: (costs[arm][row.cost], scale.factor * means[arm]) for arm in row.arms}
                front = sorted(at[arm] for arm, on in row.arms.items() if on)
                axes.plot(*zip(*front, strict=True), color=GREY, linewidth=0.9, zorder=1)
                for arm, on in row.arms.items():
                    marker, colour = signs.get(arm, ("o", GREY))
                    fill = colour if on else "none"  # marks of equal results are seen through each other
                    (handles[arm],) = axes.plot(
                        *at[arm], marker, color=colour, markerfacecolor=fill, alpha=0.7, label=labels.get(arm)
                    )
                (lowest, _), (highest, _) = min(at.values()), max(at.values())
                if highest > 10 * lowest:
                    axes.set_xscale("log")
                format_ticks_without_exponents(axes)
                axes.set_xlabel(COSTS[row.cost])
                axes.grid()
            for axes in panels[len(rows) :]:
                axes.remove()
            for axes in panels[::across]:
                axes.set_ylabel(scale.title)
            figure.legend(handles=[handles[arm] for arm in arms], loc="outside lower center", ncols=across)
            caption = (
                "What each arm reaches, as the mean of its seeds, over what it costs; "
                f"{name_baseline(row['baseline'] for row in findings.arms)} is in the colour of the text. Filled, and "
                "joined by a line: arms that no other one beats in both."
            )
            caption += " Other arms are grey." * any(len(row.arms) > len(arms) for row in rows)
            return Drawing(figure, caption + describe_shared(labels))


def costs_by_arm(findings: Findings) -> dict[str, dict[str, float]]:
    """Return the known costs of each arm by name."""
    rows = {row.arm: row for row in cost.up_to_date_costs(findings)}
    costs: dict[str, dict[str, float]] = {}
    for row in findings.arms:
        costs[row["arm"]] = {name: float(row[name]) for name in ("params", "macs") if row[name] is not None}
        if row["arm"] in rows:
            costs[row["arm"]] |= {name: float(getattr(rows[row["arm"]], name)) for name in cost.COSTS}
    return costs
