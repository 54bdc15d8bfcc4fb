"""Figures of a study: learning curves, and arms with their intervals.

Drawn on Figure objects of their own: no pyplot, no state shared with whoever imports this.  Colours are those of Okabe
and Ito, told apart by colour-blind readers, and every line is labelled where it ends.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from vitlab.plan.values import Plan
from vitlab.report import words
from vitlab.report.frame import usable
from vitlab.report.verdict import Verdict
from vitlab.statistics import mean_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, RULE, PAPER = "#1b1e23", "#6e747c", "#d3d6da", "#fefefe"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#a1508e", "#b07d00", "#3b9bd1", "#7a4a2b")
BETTER, WORSE = "#009e74", "#d55e01"  #: one step off the series, so that a page can give them colours of their own
VARIABLES = {INK: "ink", GREY: "grey", RULE: "rule", PAPER: "paper", BETTER: "better", WORSE: "worse"} | {
    colour: f"series-{index}" for index, colour in enumerate(SERIES)
}
"""Colour to the CSS variable that stands for it in a page, which has a light and a dark side."""
TOGETHER = len(SERIES) + 1  #: arms drawn into one panel, the baseline in ink among them
PANELS = 24
TICKS = 36  #: characters that the labels of an axis have room for
WIDE = 7.2  #: inches: a picture as wide as a page

STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,  # an arm may be called anything, dollars included
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.0,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "svg.fonttype": "none",
}


def figures(
    plan: Plan, frame: pd.DataFrame, summary: pd.DataFrame, history: pd.DataFrame, costs: Sequence[words.Row] = ()
) -> dict[str, Figure]:
    """Name to figure, of those there is something to show in: ``arms``, ``curves``, ``scaling`` and ``pareto``.

    ``costs`` are what was measured of the arms, see :func:`vitlab.report.costs.measured`.
    """
    from vitlab.report.budgets import pareto, scaling

    drawn = {"arms": arms(plan, frame, summary), "curves": curves(plan, frame, history)}
    drawn |= {"scaling": scaling(plan, frame), "pareto": pareto(plan, summary, costs)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def captions(plan: Plan) -> dict[str, str]:
    """What each figure shows, in a sentence."""
    level = words.percent(1 - plan.analysis.alpha)
    several = sum(arm.baseline is not None for arm in plan.arms) > 1 and plan.analysis.correction != "none"
    seeds = f"each seed (small) and the mean with its {level} t-interval"
    return {
        "arms": f"Left: {seeds}. Right: the difference to the baseline with its {level} interval"
        + (", which holds for all of them at once" if several else "")
        + "; filled where it is told apart. An arrow stands where an interval goes on beyond the picture."
        if any(arm.baseline for arm in plan.arms)
        else f"Of every arm {seeds}.",
        "curves": f"{words.Scale.of(plan.analysis.metric).title} over training: mean of the seeds, each seed (thin; "
        f"dashed where it diverged or failed), and the {level} t-interval of the mean (band, from three seeds on). "
        "The first fifth may lie outside the picture.",
        "scaling": f"{'The metric' if plan.analysis.goal == 'min' else 'One less the metric'} over size, both on "
        "logarithmic axes: each seed (small), the mean of their logarithms, and a power law with the "
        f"{level} band that the spread of the seeds allows.",
        "pareto": "What each arm reaches, mean of the seeds, over what it costs. Filled: arms that no other one beats "
        "in both; the line joins them.",
    }


def curves(plan: Plan, frame: pd.DataFrame, history: pd.DataFrame) -> Figure | None:
    """Learning curves per arm.  Many arms get a panel each, with the baseline behind.

    Means are those of trials that are done; what diverged or failed is shown dashed, as far as it came.
    """
    scale = words.Scale.of(plan.analysis.metric)
    ended = frame.loc[frame["status"].isin(["done", "diverged", "failed"]), ["arm", "seed", "status"]]
    seen = history[(history["metric"] == plan.analysis.metric) & np.isfinite(history["value"])]
    seen = seen.merge(ended, on=["arm", "seed"])
    broken, seen = seen[seen["status"] != "done"], seen[seen["status"] == "done"]
    names = [arm.name for arm in plan.arms if (seen["arm"] == arm.name).any()]
    if not names or seen["step"].nunique() < 2:
        return None
    with style():
        from matplotlib.figure import Figure

        colours = colours_of(plan)
        if len(names) <= TOGETHER:
            figure = Figure(figsize=(WIDE, 3.9), layout="constrained")
            axes = figure.subplots()
            for name in sorted(names, key=lambda name: colours[name] == INK):
                _curve(axes, seen[seen["arm"] == name], scale, colours[name], plan.analysis.alpha)
                _broken(axes, broken[broken["arm"] == name], scale, colours[name])
            _bounds([axes], seen, scale)
            _label_ends(axes, seen, names, scale, colours)
            axes.set_xlabel("optimizer steps")
            axes.set_ylabel(scale.title)
            return figure
        shown = names[:PANELS]
        columns = 4
        lines = math.ceil(len(shown) / columns)
        high = 1.7 if any(len(name) > 26 for name in shown) else 1.55
        figure = Figure(figsize=(WIDE, 0.5 + high * lines), layout="constrained")
        grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
        baselines = {arm.name: arm.baseline for arm in plan.arms}
        for axes, name in zip(grid, shown, strict=False):
            behind = baselines[name]
            if behind in names:
                _curve(axes, seen[seen["arm"] == behind], scale, GREY, plan.analysis.alpha, faint=True)
            colour = INK if behind is None else SERIES[0]
            _curve(axes, seen[seen["arm"] == name], scale, colour, plan.analysis.alpha)
            _broken(axes, broken[broken["arm"] == name], scale, colour)
            axes.set_title("\n".join(textwrap.wrap(shortened(name, 52), 26)), loc="left", fontsize=8)
        for axes in grid[len(shown) :]:
            axes.set_visible(False)
        _bounds(grid, seen, scale)
        figure.supxlabel("optimizer steps", fontsize=9)
        figure.supylabel(scale.title, fontsize=9)
        if len(shown) < len(names):
            figure.suptitle(f"the first {len(shown)} of {len(names)} arms", fontsize=8, color=GREY)
        return figure


def arms(plan: Plan, frame: pd.DataFrame, summary: pd.DataFrame) -> Figure | None:
    """Every arm with its seeds and interval, and beside it the difference to its baseline."""
    values = {name: list(known.values()) for name, known in usable(frame, plan.analysis).items() if known}
    if not values:
        return None
    from vitlab.report.document import plain

    rows = {row["arm"]: row for row in plain(summary)}
    names = [name for name in rows if name in values]
    compared = [name for name in names if rows[name]["difference"] is not None]
    scale = words.Scale.of(plan.analysis.metric)
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDE, 0.95 + 0.34 * len(names)), layout="constrained")
        if compared:
            left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
        else:
            left, right = figure.subplots(), None
        place = {name: index for index, name in enumerate(names)}
        for name in names:
            _dots(left, place[name], [scale.factor * value for value in values[name]])
        marks = [
            _Mark(place[name], rows[name]["mean"], rows[name]["low"], rows[name]["high"], INK, INK) for name in names
        ]
        _marks(left, marks, scale, [value for known in values.values() for value in known])
        left.set_yticks(list(place.values()), [shortened(name, 44) for name in names])
        left.set_ylim(len(names) - 0.4, -0.6)
        left.tick_params(axis="y", length=0, pad=7)
        left.set_xlabel(scale.title + (", best" if plan.analysis.at == "best" else ""))
        left.grid(axis="x", color=RULE, linewidth=0.5)
        left.set_axisbelow(True)
        if right is not None:
            _marks(right, [_difference(place[name], rows[name]) for name in compared], scale, [0.0])
            right.axvline(0, color=GREY, linewidth=0.9, zorder=1)
            baselines = {rows[name]["baseline"] for name in compared}
            against = shortened(baselines.pop(), 24) if len(baselines) == 1 else "its baseline"
            right.set_xlabel(f"difference to {against}" + (f" ({scale.points})" if scale.points else ""))
            right.grid(axis="x", color=RULE, linewidth=0.5)
            right.set_axisbelow(True)
            right.spines["left"].set_visible(False)
            right.tick_params(axis="y", length=0)
        return figure


def png(figure: Figure, dpi: float = 200) -> bytes:
    """The figure as a PNG on white; a very tall one is made coarser, because no PNG of matplotlib's has 65,536 rows."""
    dpi = min(dpi, 30_000 / figure.get_figheight())
    with style(), io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
        return file.getvalue()


def svg(figure: Figure, name: str, alternative: str) -> str:
    """The figure as an SVG element to stand in a page: text is text, colours are the page's (``var(--ink)``, ...).

    Args:
        figure: any of :func:`figures`.
        name: of the figure; stands before the identifiers in it.
        alternative: what it shows, for whoever does not see it.
    """
    from matplotlib import rc_context

    with style(), rc_context({"svg.hashsalt": name}), io.StringIO() as file:
        figure.savefig(file, format="svg", transparent=True)
        text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"<[^>]+>", lambda tag: _tag_of_page(tag[0], name, alternative), text)


# -- how it is done ---------------------------------------------------------------------------------------------------


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style of the house."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        # Arms may be named in scripts the font lacks; a box in the picture is no reason to speak or to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _tag_of_page(tag: str, name: str, alternative: str) -> str:
    """A tag of matplotlib's SVG as it stands in a page, which gives the face, the colours and the width."""
    tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag)
    label = f'<svg role="img" aria-label="{escape(alternative, quote=True)}"'

    def sized(found: re.Match[str]) -> str:
        """A narrow picture takes its share of the width, so that letters are of one size in all."""
        return f'{label} style="--share: {float(found[1]) / (72 * WIDE):.3g}"'

    tag = re.sub(r'^<svg width="([\d.]+)pt" height="[^"]*"', sized, tag)
    tag = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", tag)
    tag = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", tag)  # unique among the pictures of a page
    for colour, variable in VARIABLES.items():
        tag = tag.replace(colour, f"var(--{variable})")
    return tag


def colours_of(plan: Plan) -> dict[str, str]:
    """Baselines in ink, the others in the order of the design."""
    others = iter(range(len(plan.arms)))
    compared = any(arm.baseline for arm in plan.arms)
    return {
        arm.name: INK if compared and arm.baseline is None else SERIES[next(others) % len(SERIES)] for arm in plan.arms
    }


def _curve(
    axes: Axes, seen: pd.DataFrame, scale: words.Scale, colour: str, alpha: float, *, faint: bool = False
) -> None:
    if not faint:
        for _, seed in seen.groupby("seed"):
            line = seed.sort_values("step")
            axes.plot(line["step"], scale.factor * line["value"], color=colour, linewidth=0.5, alpha=0.35)
    means = [(step, mean_interval(at["value"].tolist(), alpha)) for step, at in seen.groupby("step")]
    steps = [int(str(step)) for step, _ in means]
    axes.plot(steps, [scale.factor * mean.mean for _, mean in means], color=colour, linewidth=1.2 if faint else 1.7)
    if not faint:
        wide = [mean.n >= 3 for _, mean in means]
        low, high = ([scale.factor * getattr(mean, end) for _, mean in means] for end in ("low", "high"))
        axes.fill_between(steps, low, high, where=wide, color=colour, alpha=0.14, linewidth=0)


def _broken(axes: Axes, broken: pd.DataFrame, scale: words.Scale, colour: str) -> None:
    """Trials that did not end well."""
    for _, seed in broken.groupby("seed"):
        line = seed.sort_values("step")
        axes.plot(line["step"], scale.factor * line["value"], color=colour, linewidth=0.7, linestyle=(0, (3, 2)))


def _bounds(panels: Sequence[Axes], seen: pd.DataFrame, scale: words.Scale) -> None:
    """Limits from where arms differ: the curves after the first fifth, and not their bands, which may be wider."""
    late = seen.loc[seen["step"] >= 0.2 * seen["step"].max(), "value"]
    low, high = scale.factor * late.min(), scale.factor * late.max()
    room = 0.05 * (high - low) or 0.5
    for axes in panels:
        axes.set_ylim(low - room, high + room)
        axes.grid(axis="y", color=RULE, linewidth=0.5)
        axes.set_axisbelow(True)


def _label_ends(
    axes: Axes, seen: pd.DataFrame, names: Sequence[str], scale: words.Scale, colours: Mapping[str, str]
) -> None:
    """Each arm's name at the end of its curve, moved apart where curves end together."""
    low, high = axes.get_ylim()
    ends = {}
    for name in names:
        arm = seen[seen["arm"] == name]
        last = arm["step"].max()
        ends[name] = scale.factor * float(arm.loc[arm["step"] == last, "value"].mean())
    gap = 0.058 * (high - low)
    order = sorted(names, key=lambda name: ends[name])
    places = _apart([ends[name] for name in order], gap, low + gap / 2, high - gap / 2)
    edge = float(seen["step"].max())
    for name, place in zip(order, places, strict=True):
        axes.annotate(
            shortened(name, 34),
            xy=(1.0, ends[name]),
            xytext=(1.035, place),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            color=colours[name],
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colours[name],
                "linewidth": 0.6,
                "shrinkA": 2,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )
    axes.set_xlim(float(seen["step"].min()), edge)


def _apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for sorted values, at least ``gap`` apart, near the values and within bounds where that is possible."""
    places: list[float] = []
    for value in values:
        places.append(max(value, low, places[-1] + gap if places else -math.inf))
    for index in reversed(range(len(places))):
        ceiling = high if index == len(places) - 1 else places[index + 1] - gap
        places[index] = min(places[index], ceiling)
    return places


def _dots(axes: Axes, y: float, values: Sequence[float]) -> None:
    """The single seeds, alternately a little above and below their line."""
    places = [y + (0.13 * (-1) ** index if len(values) > 1 else 0.0) for index in range(len(values))]
    axes.scatter(values, places, s=11, facecolors="none", edgecolors=GREY, linewidths=0.8)


@dataclass(frozen=True)
class _Mark:
    """A value with its interval on the line ``y``."""

    y: float
    value: float
    low: float | None
    high: float | None
    colour: str
    fill: str


def _difference(y: float, row: words.Row) -> _Mark:
    colour = {Verdict.BETTER: BETTER, Verdict.WORSE: WORSE}.get(row["verdict"])
    fill, colour = colour or PAPER, colour or GREY
    return _Mark(y, row["difference"], row["difference_low"], row["difference_high"], colour, fill)


def _marks(axes: Axes, marks: Sequence[_Mark], scale: words.Scale, points: Sequence[float]) -> None:
    """Draw values with their intervals, within limits that hold all values and ``points``.

    Intervals count as far as they leave the values room; one that goes on beyond the picture ends in an arrow.
    """
    held = [scale.factor * value for value in [*points, *(mark.value for mark in marks)]]
    ends = [scale.factor * end for mark in marks for end in (mark.low, mark.high) if end is not None]
    low, high = min(held), max(held)
    span, room = high - low, 0.05
    if span <= 1e-9 * max(abs(low), abs(high)):  # all alike: a picture as wide as would hold a difference to speak of
        span, room = max(1.0 if scale.unit else 1e-3, abs(high) * 0.02), 0.5
    low, high = (
        min([low, *(max(end, low - 1.2 * span) for end in ends)]),
        max([high, *(min(end, high + 1.2 * span) for end in ends)]),
    )
    low, high = low - room * span, high + room * span
    for mark in marks:
        if mark.low is not None and mark.high is not None:
            left, right = scale.factor * mark.low, scale.factor * mark.high
            axes.plot([max(left, low), min(right, high)], [mark.y] * 2, color=mark.colour, linewidth=1.5)
            for beyond, edge, arrow in ((left < low, low, "<"), (right > high, high, ">")):
                if beyond:
                    axes.plot([edge], [mark.y], marker=arrow, markersize=4.5, color=mark.colour, clip_on=False)
        axes.plot(
            [scale.factor * mark.value],
            [mark.y],
            marker="o",
            markersize=5.5,
            color=mark.colour,
            markerfacecolor=mark.fill,
            markeredgewidth=1.2,
        )
    axes.set_xlim(low, high)
    _few_ticks(axes)


def _few_ticks(axes: Axes) -> None:
    """As many ticks as have room beside each other: numbers that hardly differ are long."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    low, high = axes.get_xlim()
    for most in range(7, 0, -1):
        axes.xaxis.set_major_locator(MaxNLocator(most))
        ticks = [tick for tick in axes.xaxis.get_major_locator()() if low <= tick <= high]
        labels = axes.xaxis.get_major_formatter().format_ticks(ticks)
        if sum(len(label) + 2 for label in labels) <= TICKS:
            return


def shortened(name: str, most: int) -> str:
    """A name on one line of at most so many characters."""
    said = " ".join(name.split())
    return said if len(said) <= most else f"{said[: most - 3]}..."
