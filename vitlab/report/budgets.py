"""Figures of scaling and cost: power laws and Pareto fronts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlab.plan.palette import GREY, INK, PAPER, RULE, SERIES
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.costs import Row, with_costs
from vitlab.report.drawing import BEATEN, INTERVAL, SEED, WIDE, style
from vitlab.report.frame import usable
from vitlab.report.labels import wrapped_labels, wrapped_line
from vitlab.report.tradeoff import COSTS, SIZES, as_error, fronts, scalings

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_PER_ROW = 3  #: panels side by side
MAX_LABELLED = 12  #: arms of a picture that are named in it


def scaling(plan: Plan, frame: pd.DataFrame, width: float = WIDE) -> Figure | None:
    """Draw a panel per size, with a power law per series; None if there are too few sizes."""
    laws = scalings(plan, frame)
    if not laws:
        return None
    scale = phrasing.Scale.of(plan.analysis.metric, plan.units)
    values = usable(frame, plan.analysis)
    sizes = [size for size in SIZES if any(item.size == size for item in laws)]
    series = list(dict.fromkeys(item.series for item in laws))
    with style():
        from matplotlib.figure import Figure

        across = len(sizes) if width >= WIDE else 1
        down = len(sizes) // across
        figure = Figure(figsize=(min(width, WIDE if across > 1 else 4.6), 3.2 * down), layout="constrained")
        panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
        for axes, size in zip(panels, sizes, strict=True):
            for item in (item for item in laws if item.size == size):
                colour = SERIES[series.index(item.series) % len(SERIES)]
                for arm in item.arms:
                    x = float(frame.loc[frame["arm"] == arm, size].max())
                    errors = [scale.factor * as_error(plan, value) for value in values[arm].values()]
                    [seeds] = axes.plot([x] * len(errors), errors, "o", markersize=3, color=colour, alpha=0.6)
                    seeds.set(markerfacecolor="none", label=SEED if len(errors) > 1 else None)
                    axes.plot([x], [math.exp(np.mean(np.log(errors)))], "o", markersize=5.5, color=colour)
                label = f"{wrapped_line(item.series, 30)}\n" if item.series else ""
                label += f"exponent {item.law.exponent:.2f}".replace("-", phrasing.MINUS)
                axes.plot(item.law.x, scale.factor * np.array(item.law.y), color=colour, linewidth=1.4, label=label)
                low, high = (scale.factor * np.array(end) for end in (item.law.low, item.law.high))
                band = INTERVAL if np.isfinite(low).any() and (high > low).any() else None
                axes.fill_between(item.law.x, low, high, color=colour, alpha=0.14, linewidth=0, label=band)
            axes.set_xscale("log")
            axes.set_yscale("log")
            _plain_ticks(axes)
            axes.set_xlabel(SIZES[size])
            axes.grid(color=RULE, linewidth=0.5)
            axes.legend(frameon=False, fontsize=7.5)
        less = "" if plan.analysis.goal == "min" else ("100 % less " if scale.is_share else "1 less ")
        for axes in panels[::across]:
            axes.set_ylabel(less + scale.title)
        return figure


def pareto(plan: Plan, rows: Sequence[Row], costs: Sequence[Row] = (), width: float = WIDE) -> Figure | None:
    """Draw a panel per cost in which arms differ; None if they differ in none.

    ``costs`` are the measured costs of the arms.
    """
    by_arm = {row["arm"]: row for row in with_costs(rows, costs)}
    fronts_by_cost = fronts(plan, list(by_arm.values()))
    if not fronts_by_cost:
        return None
    scale = phrasing.Scale.of(plan.analysis.metric, plan.units)
    with style():
        from matplotlib.figure import Figure

        columns = PANELS_PER_ROW if width >= WIDE else 1
        across = -(-len(fronts_by_cost) // -(-len(fronts_by_cost) // columns))  # rows as even as they go
        down = -(-len(fronts_by_cost) // across)
        figure = Figure(figsize=(min(width, WIDE if across > 1 else 4.6), 3.2 * down), layout="constrained")
        panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
        for axes in panels[len(fronts_by_cost) :]:
            axes.set_visible(False)
        for axes, (cost, on_front) in zip(panels, fronts_by_cost.items(), strict=False):
            at = {arm: (float(by_arm[arm][cost]), scale.factor * by_arm[arm]["mean"]) for arm in on_front}
            front = sorted(at[arm] for arm, on in on_front.items() if on)
            axes.plot([x for x, _ in front], [y for _, y in front], color=GREY, linewidth=0.9, zorder=1)
            for arm, on in on_front.items():
                fill, label = (INK, None) if on else (PAPER, BEATEN)
                axes.plot(*at[arm], "o", markersize=5.5, color=INK, markerfacecolor=fill, label=label)
            if max(x for x, _ in at.values()) > 10 * min(x for x, _ in at.values()):
                axes.set_xscale("log")
            axes.margins(x=0.18, y=0.2)
            _plain_ticks(axes)
            axes.set_xlabel(COSTS[cost])
            axes.grid(color=RULE, linewidth=0.5)
            axes.set_axisbelow(True)
        for axes in panels[::across]:
            axes.set_ylabel(scale.title)
        layout = figure.get_layout_engine()
        assert layout is not None
        layout.execute(figure)  # fixes the positions of points
        for axes, (cost, on_front) in zip(panels, fronts_by_cost.items(), strict=False):
            at = {arm: (float(by_arm[arm][cost]), scale.factor * by_arm[arm]["mean"]) for arm in on_front}
            _name_points(axes, at, sorted(on_front, key=lambda arm: not on_front[arm]), on_front)
        return figure


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


def _plain_ticks(axes: Axes) -> None:
    """Format sizes as ``1.2 M`` and other numbers without mathematical exponents."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _whole(phrasing.compact(x))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    if axes.get_xscale() == "log":
        low, high = axes.get_xlim()
        wide = math.log10(high / low)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if wide < 1.4 else (1, 3) if wide < 2.5 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.tick_params(axis="y", which="minor", labelsize=7)


def _whole(label: str) -> str:
    """Return ``20 k`` for ``20.0 k``: ticks are at exact values."""
    number, space, prefix = label.partition(" ")
    return f"{number.rstrip('0').rstrip('.')}{space}{prefix}" if "." in number else label
