"""Fronts: the arms that no other arm beats both in a cost and in the result."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitlab import statistics
from vitlab.errors import count
from vitlab.plan.palette import GREY, INK, PAPER, RULE
from vitlab.report.drawing import WIDE, Drawing, plain_ticks, style
from vitlab.report.labels import wrapped_labels
from vitlab.report.phrasing import Column, Scale
from vitlab.report.sections import cost
from vitlab.report.sections.base import Findings, Section, Table, section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitlab.report.document import Report

COSTS = {"params": "parameters", "macs": "MACs per image", **cost.COSTS}
"""Costs with their labels.  Speed counts only if measured for each arm alone: trials share their machine."""
APART = 1.05  #: smallest ratio of largest to smallest cost for a front
PANELS_PER_ROW = 3  #: panels side by side
MAX_LABELLED = 12  #: arms of a picture that are named in it


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

    def rows(self, findings: Findings) -> list[Front]:
        """Return the front of each cost in which arms differ.

        A cost is left out if fewer than two arms have it, or if its largest value is below ``APART`` times the least.
        """
        costs, goal, rows = costs_of(findings), findings.plan.analysis.goal, list[Front]()
        means = {row["arm"]: row["mean"] for row in findings.arms if row["mean"] is not None}
        for name in COSTS:
            values = {arm: costs[arm][name] for arm in means if costs[arm].get(name, 0.0) > 0}
            if len(values) < 2 or max(values.values()) < APART * min(values.values()):
                continue
            signed = [-value if name in cost.SPEEDS else value for value in values.values()]
            results = [means[arm] if goal == "max" else -means[arm] for arm in values]
            rows.append(Front(name, dict(zip(values, statistics.pareto(signed, results), strict=True))))
        return rows

    def table(self, rows: Sequence[Front], report: Report) -> Table | None:
        """Return the table; an arm whose mean lacks seeds that diverged or failed is marked."""
        if not rows:
            return None
        labels = {}
        for row in report.arms:
            broken = row["diverged"] + row["failed"]
            labels[row["arm"]] = f"{row['arm']} ({count(broken, 'broken seed')})" if broken else row["arm"]
        on_front = tuple("; ".join(labels[arm] for arm, on in row.arms.items() if on) for row in rows)
        columns = [
            Column("cost", tuple(COSTS[row.cost] for row in rows), right=False),
            Column("arms that no other arm beats in both", on_front, right=False),
        ]
        return Table(
            columns,
            "For each cost, the arms for which no other arm costs at most as much and has a mean "
            f"{report.analysis.metric} that is at least as good. Means and costs are taken as they are: where two arms "
            "differ by less than their intervals, other seeds may change the list.",
        )

    def figure(self, rows: Sequence[Front], findings: Findings, width: float) -> Drawing | None:
        """Draw a panel per cost."""
        return _figure(rows, findings, width) if rows else None

    def to_json(self, rows: Sequence[Front]) -> Any:
        """Return the rows as JSON values: cost to arm to whether it is on the front."""
        return {row.cost: dict(row.arms) for row in rows}

    def from_json(self, values: Any) -> list[Front]:
        """Return the rows of JSON values."""
        return [Front(name, arms) for name, arms in values.items()]


def costs_of(findings: Findings) -> dict[str, dict[str, float]]:
    """Return the known costs of each arm by name."""
    rows = {row.arm: row for row in cost.measured_costs(findings)}
    costs: dict[str, dict[str, float]] = {}
    for row in findings.arms:
        costs[row["arm"]] = {name: float(row[name]) for name in ("params", "macs") if row[name] is not None}
        if row["arm"] in rows:
            costs[row["arm"]] |= {name: float(getattr(rows[row["arm"]], name)) for name in cost.COSTS}
    return costs


def _figure(rows: Sequence[Front], findings: Findings, width: float) -> Drawing:
    plan, costs = findings.plan, costs_of(findings)
    means = {row["arm"]: row["mean"] for row in findings.arms}
    scale = Scale.of(plan.analysis.metric, plan.units)
    with style():
        from matplotlib.figure import Figure

        columns = PANELS_PER_ROW if width >= WIDE else 1
        across = -(-len(rows) // -(-len(rows) // columns))  # rows as even as they go
        down = -(-len(rows) // across)
        figure = Figure(figsize=(min(width, WIDE if across > 1 else 4.6), 3.2 * down), layout="constrained")
        panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
        for axes in panels[len(rows) :]:
            axes.set_visible(False)
        for axes, row in zip(panels, rows, strict=False):
            on_front = row.arms
            at = {arm: (costs[arm][row.cost], scale.factor * means[arm]) for arm in on_front}
            front = sorted(at[arm] for arm, on in on_front.items() if on)
            axes.plot([x for x, _ in front], [y for _, y in front], color=GREY, linewidth=0.9, zorder=1)
            for arm, on in on_front.items():
                fill = INK if on else PAPER
                axes.plot(*at[arm], "o", markersize=5.5, color=INK, markerfacecolor=fill)
            if max(x for x, _ in at.values()) > 10 * min(x for x, _ in at.values()):
                axes.set_xscale("log")
            axes.margins(x=0.18, y=0.2)
            plain_ticks(axes)
            axes.set_xlabel(COSTS[row.cost])
            axes.grid(color=RULE, linewidth=0.5)
            axes.set_axisbelow(True)
        for axes in panels[::across]:
            axes.set_ylabel(scale.title)
        layout = figure.get_layout_engine()
        assert layout is not None
        layout.execute(figure)  # fixes the positions of points
        for axes, row in zip(panels, rows, strict=False):
            on_front = row.arms
            at = {arm: (costs[arm][row.cost], scale.factor * means[arm]) for arm in on_front}
            _name_points(axes, at, sorted(on_front, key=lambda arm: not on_front[arm]), on_front)
        text = "What each arm reaches, as the mean of its seeds, over what it costs. Filled, and joined by a line: arms"
        return Drawing(figure, f"{text} that no other one beats in both.")


def _name_points(
    axes: Axes, at: Mapping[str, tuple[float, float]], names: Sequence[str], on_front: Mapping[str, bool]
) -> None:
    """Label points where the label covers neither a point nor another label.

    Points of the front come first; a label without room is left out, because the table of fronts names the arm.
    """
    from matplotlib.transforms import Bbox

    points = {arm: axes.transData.transform(place) for arm, place in at.items()}
    dots = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in points.values()]
    occupied: list[Bbox] = []
    labels = wrapped_labels(list(on_front), 22)
    for arm in names if len(on_front) <= MAX_LABELLED else [arm for arm in names if on_front[arm]]:
        for right, above in itertools.product((True, False), (4, -4)):
            label = axes.annotate(
                labels[arm],
                at[arm],
                (6 if right else -6, above),
                textcoords="offset points",
                ha="left" if right else "right",
                va="bottom" if above > 0 else "top",
                fontsize=7,
                color=INK,
                bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            )
            label.set_in_layout(False)
            box = label.get_window_extent()
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            inside = inside and axes.bbox.containsy(box.y0) and axes.bbox.containsy(box.y1)
            if inside and not box.count_overlaps([*dots, *occupied]):
                occupied.append(box)
                break
            label.remove()
