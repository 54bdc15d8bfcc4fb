"""Figures of a study: arms with their intervals, interactions, and the captions of all figures."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitlab.plan.design import short_names, text
from vitlab.plan.palette import BETTER, GREY, INK, PAPER, RULE, SERIES, WORSE
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.budgets import pareto, scaling
from vitlab.report.curves import curves, loss_curves
from vitlab.report.drawing import BEYOND, CLAIM, INTERVAL, SEED, WIDE, style
from vitlab.report.frame import usable
from vitlab.report.labels import wrapped_labels, wrapped_line
from vitlab.report.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTLIER = 4  #: times the median length of the intervals, from which on one is cut
MAX_TICK_CHARACTERS = 36  #: characters that the labels of an axis have room for


def figures(
    plan: Plan,
    frame: pd.DataFrame,
    rows: Sequence[phrasing.Row],
    history: pd.DataFrame,
    costs: Sequence[phrasing.Row] = (),
    width: float = WIDE,
) -> dict[str, Figure]:
    """Return name to figure, of those that have something to show.

    They are ``arms``, ``interaction``, ``curves``, ``loss``, ``scaling`` and ``pareto``.

    Args:
        plan: of the study.
        frame: see :func:`vitlab.report.frame.results`.
        rows: of arms, see :func:`vitlab.report.comparison.summary`.
        history: see :func:`vitlab.report.frame.history`.
        costs: measured costs of the arms, see :func:`vitlab.report.costs.read_costs`.
        width: in inches, ``WIDE`` or ``NARROW``; panels of a narrow figure stand below each other.
    """
    candidates = {
        "arms": arms(plan, frame, rows, width),
        "interaction": interaction(plan, rows, width),
        "curves": curves(plan, frame, history, width),
        "loss": loss_curves(plan, frame, history, width),
        "scaling": scaling(plan, frame, width),
        "pareto": pareto(plan, rows, costs, width),
    }
    return {name: figure for name, figure in candidates.items() if figure is not None}


def interaction(plan: Plan, arm_rows: Sequence[phrasing.Row], width: float = WIDE) -> Figure | None:
    """Draw the cells of a grid of two factors: a line per level of the one over the levels of the other.

    None for other designs, and for grids of which no two rows share two columns.
    """
    rows = {row["arm"]: row for row in arm_rows if row["mean"] is not None}
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
    scale, short = phrasing.Scale.of(plan.analysis.metric, plan.units), short_names(paths)
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, 3.2), layout="constrained")
        axes = figure.subplots()
        for index, level in enumerate(apart):
            offset = 0.12 * (index - (len(apart) - 1) / 2)
            places = [place for place, x in enumerate(across) if (x, level) in cells]
            points = [cells[across[place], level] for place in places]
            means = [scale.factor * row["mean"] for row in points]
            half = [0.0 if row["low"] is None else scale.factor * (row["high"] - row["mean"]) for row in points]
            bars = axes.errorbar(
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
            if any(half):
                bars.lines[2][0].set_label(INTERVAL)
        room = max(8, int((84 if width >= WIDE else 40) / len(across)))
        axes.set_xticks(range(len(across)), [wrapped_line(x, room) for x in across])
        axes.set_xlim(-0.5, len(across) - 0.5)
        axes.set_xlabel(short[paths[0]])
        axes.set_ylabel(scale.title)
        axes.grid(axis="y", color=RULE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, loc="best", handlelength=1.4)
        return figure


def arms(plan: Plan, frame: pd.DataFrame, arm_rows: Sequence[phrasing.Row], width: float = WIDE) -> Figure | None:
    """Draw every arm with its seeds and interval, and beside it (below it, if narrow) its difference."""
    values = {name: list(by_seed.values()) for name, by_seed in usable(frame, plan.analysis).items() if by_seed}
    if not values:
        return None
    rows = {row["arm"]: row for row in arm_rows}
    names = [name for name in rows if name in values]
    compared = [name for name in names if rows[name]["difference"] is not None]
    scale, wide = phrasing.Scale.of(plan.analysis.metric, plan.units), width >= WIDE
    labels = wrapped_labels(names, 30 if wide else 20)
    row = max(0.34, 0.14 * max(label.count("\n") + 1 for label in labels.values()) + 0.12)
    with style():
        from matplotlib.figure import Figure

        if not compared:
            figure = Figure(figsize=(width, 0.95 + row * len(names)), layout="constrained")
            left, right = figure.subplots(), None
        elif wide:
            figure = Figure(figsize=(width, 0.95 + row * len(names)), layout="constrained")
            left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
        else:
            heights = [0.7 + row * len(group) for group in (names, compared)]
            figure = Figure(figsize=(width, 0.4 + sum(heights)), layout="constrained")
            left, right = figure.subplots(2, 1, height_ratios=heights)
        place = {name: index for index, name in enumerate(names)}
        for name in names:
            _dots(left, place[name], [scale.factor * value for value in values[name]])
        marks = [
            _Mark(place[name], rows[name]["mean"], rows[name]["low"], rows[name]["high"], INK, INK) for name in names
        ]
        _marks(left, marks, scale, [value for by_seed in values.values() for value in by_seed])
        _name_rows(left, names, labels)
        label = scale.title + (", best" if plan.analysis.at == "best" else "")
        left.set_xlabel(wrapped_line(f"{label}; {plan.analysis.direction}", 38 if wide else 40))
        if right is not None:
            beside = names if wide else compared
            place = {name: index for index, name in enumerate(beside)}
            _marks(right, [_difference(place[name], rows[name]) for name in compared], scale, [0.0])
            _name_rows(right, beside, labels)
            right.axvline(0, color=GREY, linewidth=0.9, zorder=1)
            baselines = {rows[name]["baseline"] for name in compared}
            against = labels.get(baselines.pop(), "its baseline") if len(baselines) == 1 else "its baseline"
            unit = f" ({scale.points})" if scale.points else ""
            right.set_xlabel(wrapped_line(f"difference to {against}{unit}", 38 if wide else 26))
            if wide:
                right.spines["left"].set_visible(False)
                right.tick_params(axis="y", length=0, labelleft=False)
        return figure


def _name_rows(axes: Axes, names: Sequence[str], labels: Mapping[str, str]) -> None:
    axes.set_yticks(range(len(names)), [labels[name] for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, pad=7)
    axes.grid(axis="x", color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)


def _dots(axes: Axes, y: float, values: Sequence[float]) -> None:
    """Draw single seeds, alternately a little above and below their line."""
    places = [y + (0.13 * (-1) ** index if len(values) > 1 else 0.0) for index in range(len(values))]
    label = SEED if len(values) > 1 else None
    axes.scatter(values, places, s=11, facecolors="none", edgecolors=GREY, linewidths=0.8, label=label)


@dataclass(frozen=True)
class _Mark:
    """A value with its interval on the line ``y``."""

    y: float
    value: float
    low: float | None
    high: float | None
    colour: str
    fill: str


def _difference(y: float, row: phrasing.Row) -> _Mark:
    colour = {Verdict.BETTER: BETTER, Verdict.WORSE: WORSE}.get(row["verdict"])
    fill, colour = colour or PAPER, colour or GREY
    return _Mark(y, row["difference"], row["difference_low"], row["difference_high"], colour, fill)


def _marks(axes: Axes, marks: Sequence[_Mark], scale: phrasing.Scale, points: Sequence[float]) -> None:
    """Draw values with their intervals, within limits that hold all values, ``points`` and intervals.

    An interval that is more than ``OUTLIER`` times as long as is typical of the others ends in an arrow if it would
    also be longer than what the values span.
    """
    values = [scale.factor * value for value in [*points, *(mark.value for mark in marks)]]
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal values: use the width of a notable difference
        notable = 1e-3 if scale.decimals_of(values, 0, 1) else 1.0
        half_width = 0.5 * max(notable, abs(high) * 0.02)
        low, high = low - half_width, high + half_width
    ends = [(mark.value, end) for mark in marks for end in (mark.low, mark.high) if end is not None]
    lengths = [scale.factor * abs(end - value) for value, end in ends]
    longest = max(high - low, OUTLIER * statistics.median_low(lengths or [0.0]))
    for value, end in ends:
        reach = max(-longest, min(longest, scale.factor * (end - value)))
        low, high = min(low, scale.factor * value + reach), max(high, scale.factor * value + reach)
    room = 0.05 * (high - low)
    low, high = low - room, high + room
    for mark in marks:
        if mark.low is not None and mark.high is not None:
            left, right = scale.factor * mark.low, scale.factor * mark.high
            ends_shown = [max(left, low), min(right, high)]
            axes.plot(ends_shown, [mark.y] * 2, color=mark.colour, linewidth=1.5, label=INTERVAL)
            for beyond, edge, arrow in ((left < low, low, "<"), (right > high, high, ">")):
                if beyond:
                    axes.plot(
                        [edge], [mark.y], marker=arrow, markersize=4.5, color=mark.colour, clip_on=False, label=BEYOND
                    )
        axes.plot(
            [scale.factor * mark.value],
            [mark.y],
            marker="o",
            markersize=5.5,
            color=mark.colour,
            markerfacecolor=mark.fill,
            markeredgewidth=1.2,
            label=CLAIM if mark.fill in (BETTER, WORSE) else None,
        )
    axes.set_xlim(low, high)
    _few_ticks(axes)


def _few_ticks(axes: Axes) -> None:
    """Set as many ticks as have room: numbers that differ little have long labels."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    low, high = axes.get_xlim()
    for most in range(7, 0, -1):
        axes.xaxis.set_major_locator(MaxNLocator(most))
        ticks = [tick for tick in axes.xaxis.get_major_locator()() if low <= tick <= high]
        labels = axes.xaxis.get_major_formatter().format_ticks(ticks)
        if sum(len(label) + 2 for label in labels) <= MAX_TICK_CHARACTERS:
            return
