"""Figures of a study: learning curves, and arms with their intervals.

Figures are drawn without pyplot, so that no global state is shared.  Colours are those of Okabe and Ito, which
colour-blind readers can distinguish, and every line is labelled at its end.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

import numpy as np

from vitlab.plan.design import short_names, text
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.frame import usable
from vitlab.report.labels import shared_parts, wrapped_labels, wrapped_line
from vitlab.report.verdict import Verdict
from vitlab.statistics import mean_interval
from vitlab.store.result import Ending

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
"""Colour to its CSS variable in a page, which has a light and a dark theme."""
TOGETHER = 4  #: arms drawn into one panel, the baseline in ink among them
BAND = 3  #: seeds from which on a mean has a band
PANELS = 24
OUTLIER = 4  #: times the median length of the intervals, from which on one is cut
TICKS = 36  #: characters that the labels of an axis have room for
WIDE = 7.2  #: inches: a picture as wide as a page
NARROW = 3.6  #: inches: a picture as wide as a phone

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
    "pdf.fonttype": 42,
}


def figures(
    plan: Plan,
    frame: pd.DataFrame,
    summary: pd.DataFrame,
    history: pd.DataFrame,
    costs: Sequence[phrasing.Row] = (),
    width: float = WIDE,
) -> dict[str, Figure]:
    """Return name to figure, of those that have something to show.

    They are ``arms``, ``interaction``, ``curves``, ``loss``, ``scaling`` and ``pareto``.

    Args:
        plan: of the study.
        frame: see :func:`vitlab.report.frame.results`.
        summary: see :func:`vitlab.report.comparison.summary`.
        history: see :func:`vitlab.report.frame.history`.
        costs: measured costs of the arms, see :func:`vitlab.report.costs.read_costs`.
        width: in inches, ``WIDE`` or ``NARROW``; panels of a narrow figure stand below each other.
    """
    from vitlab.report.budgets import pareto, scaling

    candidates = {
        "arms": arms(plan, frame, summary, width),
        "interaction": interaction(plan, summary, width),
        "curves": curves(plan, frame, history, width),
        "loss": loss_curves(plan, frame, history, width),
        "scaling": scaling(plan, frame, width),
        "pareto": pareto(plan, summary, costs, width),
    }
    return {name: figure for name, figure in candidates.items() if figure is not None}


def captions(plan: Plan) -> dict[str, str]:
    """Return the caption of each figure."""
    level = phrasing.percent(1 - plan.analysis.alpha)
    several = sum(arm.baseline is not None for arm in plan.arms) > 1 and plan.analysis.correction != "none"
    seeds = f"each seed (small) and the mean with its {level} t-interval"
    over = (
        f"over training: the mean of the seeds with its {level} t-interval (band, from three seeds on), and single "
        "seeds (thin) where a panel has room for them; dashed where one diverged or failed. In a panel of one arm, its "
        "baseline is grey. The first fifth may lie outside the picture."
    )
    return {
        "arms": f"First {seeds}, then the difference to the baseline with its {level} interval"
        + (", which holds for all of them at once" if several else "")
        + "; a filled dot is a verdict of better or worse. An arrow marks an interval that goes on beyond the picture."
        if any(arm.baseline for arm in plan.arms)
        else f"Of every arm {seeds}.",
        "interaction": f"The mean of every cell of the grid with its {level} t-interval. Parallel lines: the effect of "
        "one factor does not depend on the other.",
        "curves": f"{phrasing.Scale.of(plan.analysis.metric, plan.shares).title} {over}",
        "loss": f"{phrasing.Scale.of(_loss_of(plan), plan.shares).title} {over}",
        "scaling": f"{'The metric' if plan.analysis.goal == 'min' else 'One less the metric'} over size, both on "
        "logarithmic axes: each seed (small), the mean of their logarithms, and a power law with the "
        f"{level} band that the spread of the seeds allows.",
        "pareto": "What each arm reaches, mean of the seeds, over what it costs. Filled: arms that no other one beats "
        "in both; the line joins them.",
    }


def curves(
    plan: Plan, frame: pd.DataFrame, history: pd.DataFrame, width: float = WIDE, metric: str | None = None
) -> Figure | None:
    """Draw the learning curves of a metric, by default the judged one; None where nothing was measured twice.

    Arms that are compared with one baseline share a panel if they are few; otherwise every arm has its own, with its
    baseline behind it.  Means are those of trials that are done.
    """
    metric = metric or plan.analysis.metric
    scale = phrasing.Scale.of(metric, plan.shares)
    endings = frame.loc[frame["status"].isin([Ending.DONE, Ending.DIVERGED, Ending.FAILED]), ["arm", "seed", "status"]]
    measurements = history[(history["metric"] == metric) & np.isfinite(history["value"])]
    measurements = measurements.merge(endings, on=["arm", "seed"])
    measurements, unit = _over_training(measurements)
    broken, measurements = (
        measurements[measurements["status"] != Ending.DONE],
        measurements[measurements["status"] == Ending.DONE],
    )
    names = [arm.name for arm in plan.arms if (measurements["arm"] == arm.name).any()]
    if not names or measurements["step"].nunique() < 2:
        return None
    baselines = {arm.name: arm.baseline for arm in plan.arms}
    families: dict[str | None, list[str]] = {}
    for name in names:
        families.setdefault(baselines[name] or (name if name in baselines.values() else None), []).append(name)
    panels = [sorted(family, key=lambda name: baselines[name] is not None) for family in families.values()]
    crowded = any(len(family) > TOGETHER for family in panels)
    panels = [[name] for name in names] if crowded else panels
    visible = panels[:PANELS]
    wide = width >= WIDE
    across = (4 if crowded else 2) if wide else (2 if crowded else 1)
    n_rows = math.ceil(len(visible) / across)
    n_columns = math.ceil(len(visible) / n_rows)
    if crowded:
        titles = wrapped_labels(names, 26)
    else:
        everywhere = shared_parts(names)
        titles = {
            panel[0]: wrapped_line(", ".join(part for part in shared_parts(panel) if part not in everywhere), 44)
            for panel in visible
        }
    height = 1.4 + 0.15 * max(titles[panel[0]].count("\n") + 1 for panel in visible) if crowded else 2.9
    if len(visible) == 1 and wide:
        height = 3.4
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, 0.5 + height * n_rows), layout="constrained")
        grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
        for axes, panel in zip(grid, visible, strict=False):
            baseline = baselines[panel[0]]
            if crowded and baseline in names:
                _curve(axes, measurements[measurements["arm"] == baseline], scale, GREY, plan.analysis.alpha, "mean")
            labels = wrapped_labels(panel, 28 if wide else 36)
            kind: Literal["band", "seeds"] = "seeds" if len(panel) == 1 else "band"
            for name, colour in _colours(panel, baselines).items():
                _curve(
                    axes,
                    measurements[measurements["arm"] == name],
                    scale,
                    colour,
                    plan.analysis.alpha,
                    kind,
                    labels[name],
                )
                _unsuccessful_curves(axes, broken[broken["arm"] == name], scale, colour)
            if len(visible) > 1:
                axes.set_title(titles[panel[0]], loc="left", fontsize=8)
        for axes in grid[len(visible) :]:
            axes.set_visible(False)
        for axes in grid[max(0, len(visible) - n_columns) : len(visible)]:  # the lowest of every column
            axes.tick_params(axis="x", labelbottom=True)
        _bounds(grid, measurements, scale)
        if not crowded and len(visible) == 1 and wide:
            _label_ends(grid[0], measurements, panels[0], scale, _colours(panels[0], baselines))
        elif not crowded:
            for axes, panel in zip(grid, visible, strict=False):
                if len(panel) > 1 or len(visible) == 1:
                    axes.legend(frameon=False, fontsize=7.5, loc="best", handlelength=1.4)
        figure.supxlabel(unit, fontsize=9)
        figure.supylabel(scale.title, fontsize=9)
        if len(visible) < len(panels):
            figure.suptitle(f"the first {len(visible)} of {len(panels)} arms", fontsize=8, color=GREY)
        return figure


def loss_curves(plan: Plan, frame: pd.DataFrame, history: pd.DataFrame, width: float = WIDE) -> Figure | None:
    """Draw :func:`curves` of the loss on the images of the judged metric, unless that is judged itself."""
    metric = _loss_of(plan)
    return None if metric == plan.analysis.metric else curves(plan, frame, history, width, metric)


def interaction(plan: Plan, summary: pd.DataFrame, width: float = WIDE) -> Figure | None:
    """Draw the cells of a grid of two factors: a line per level of the one over the levels of the other.

    None for other designs, and for grids of which no two rows share two columns.
    """
    from vitlab.report.document import plain

    rows = {row["arm"]: row for row in plain(summary) if row["mean"] is not None}
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
    scale, short = phrasing.Scale.of(plan.analysis.metric, plan.shares), short_names(paths)
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
        return figure


def arms(plan: Plan, frame: pd.DataFrame, summary: pd.DataFrame, width: float = WIDE) -> Figure | None:
    """Draw every arm with its seeds and interval, and beside it (below it, if narrow) its difference."""
    values = {name: list(by_seed.values()) for name, by_seed in usable(frame, plan.analysis).items() if by_seed}
    if not values:
        return None
    from vitlab.report.document import plain

    rows = {row["arm"]: row for row in plain(summary)}
    names = [name for name in rows if name in values]
    compared = [name for name in names if rows[name]["difference"] is not None]
    scale, wide = phrasing.Scale.of(plan.analysis.metric, plan.shares), width >= WIDE
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
        left.set_xlabel(scale.title + (", best" if plan.analysis.at == "best" else ""))
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


def png(figure: Figure, dpi: float = 200) -> bytes:
    """Return the figure as a PNG on white; a very tall one is coarser, because a PNG has less than 65,536 rows."""
    dpi = min(dpi, 30_000 / figure.get_figheight())
    with style(), io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
        return file.getvalue()


def pdf(figure: Figure) -> bytes:
    """Return the figure as a PDF whose text is text; equal figures are equal files."""
    with style(), io.BytesIO() as file:
        figure.savefig(file, format="pdf", facecolor="white", metadata={"CreationDate": None, "Creator": None})
        return file.getvalue()


def svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG file whose text is text; ``name`` makes its identifiers."""
    from matplotlib import rc_context

    with style(), rc_context({"svg.hashsalt": name}), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()


def element(svg: str, name: str, alternative: str) -> str:
    """Convert a file of :func:`svg` to an element of a page, in the page's colours (``var(--ink)``, ...).

    Args:
        svg: the file.
        name: unique in the page; stands before the identifiers of the element.
        alternative: text for readers who do not see the figure.
    """
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"<[^>]+>", lambda tag: _tag_of_page(tag[0], name, alternative), svg)


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of the report's figures."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        # Names of arms may use scripts that the font lacks; the picture then shows boxes, without a warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _tag_of_page(tag: str, name: str, alternative: str) -> str:
    """Adapt a tag of matplotlib's SVG to a page, which sets font, colours and width."""
    tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag)
    label = f'<svg role="img" aria-label="{escape(alternative, quote=True)}"'

    def with_share(match: re.Match[str]) -> str:
        """Set the share of the page width, so that text has the same size in all pictures."""
        return f'{label} style="--share: {float(match[1]) / (72 * WIDE):.3g}"'

    tag = re.sub(r'^<svg width="([\d.]+)pt" height="[^"]*"', with_share, tag)
    tag = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", tag)
    tag = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", tag)  # unique among the pictures of a page
    for colour, variable in VARIABLES.items():
        tag = tag.replace(colour, f"var(--{variable})")
    return tag


def _colours(panel: Sequence[str], baselines: Mapping[str, str | None]) -> dict[str, str]:
    """Return arm to colour: a baseline in ink, the others in the order of the design; the baseline is drawn last."""
    ink = [name for name in panel if name in baselines.values()]
    others = [name for name in panel if name not in ink]
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(others)} | dict.fromkeys(ink, INK)


def _loss_of(plan: Plan) -> str:
    return f"{plan.analysis.metric.partition('/')[0]}/loss"


def _over_training(measurements: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the measurements with their place on the axis (``x``), and its name.

    The place is the epoch if the epochs of all arms have equally many steps, else the optimizer step.
    """
    first, last = measurements.groupby("step")["epoch"].min(), measurements.groupby("step")["epoch"].max()
    if len(measurements) and last.max() >= 1 and bool(np.allclose(first, last)):
        return measurements.assign(x=measurements["epoch"]), "epoch"
    return measurements.assign(x=measurements["step"].astype(float)), "optimizer step"


def _curve(
    axes: Axes,
    measurements: pd.DataFrame,
    scale: phrasing.Scale,
    colour: str,
    alpha: float,
    kind: Literal["mean", "band", "seeds"],
    label: str | None = None,
) -> None:
    """Draw the mean of an arm, with its interval as a band, or also with its seeds; seeds where there is no band."""
    means = {float(str(x)): mean_interval(at["value"].tolist(), alpha) for x, at in measurements.groupby("x")}
    intervals = list(means.values())
    if kind == "seeds" or (kind == "band" and all(mean.n < BAND for mean in intervals)):
        for _, seed in measurements.groupby("seed"):
            line = seed.sort_values("x")
            axes.plot(line["x"], scale.factor * line["value"], color=colour, linewidth=0.5, alpha=0.35)
    thick = 1.2 if kind == "mean" else 1.7
    axes.plot(list(means), [scale.factor * mean.mean for mean in intervals], color=colour, linewidth=thick, label=label)
    if kind != "mean":
        low, high = ([scale.factor * getattr(mean, end) for mean in intervals] for end in ("low", "high"))
        wide = [mean.n >= BAND for mean in intervals]
        axes.fill_between(list(means), low, high, where=wide, color=colour, alpha=0.14, linewidth=0)


def _unsuccessful_curves(axes: Axes, broken: pd.DataFrame, scale: phrasing.Scale, colour: str) -> None:
    """Draw the curves of trials that diverged or failed."""
    for _, seed in broken.groupby("seed"):
        line = seed.sort_values("x")
        axes.plot(line["x"], scale.factor * line["value"], color=colour, linewidth=0.7, linestyle=(0, (3, 2)))


def _bounds(panels: Sequence[Axes], measurements: pd.DataFrame, scale: phrasing.Scale) -> None:
    """Set the limits to the range of the curves after the first fifth, bands excluded."""
    late = measurements.loc[measurements["x"] >= 0.2 * measurements["x"].max(), "value"]
    low, high = scale.factor * late.min(), scale.factor * late.max()
    room = 0.05 * (high - low) or 0.5
    for axes in panels:
        axes.set_ylim(low - room, high + room)
        axes.set_xlim(0, float(measurements["x"].max()))
        axes.grid(axis="y", color=RULE, linewidth=0.5)
        axes.set_axisbelow(True)


def _label_ends(
    axes: Axes, measurements: pd.DataFrame, names: Sequence[str], scale: phrasing.Scale, colours: Mapping[str, str]
) -> None:
    """Write each arm's name at the end of its curve, moved apart where curves end together."""
    low, high = axes.get_ylim()
    ends, labels = {}, wrapped_labels(names, 30)
    for name in names:
        arm = measurements[measurements["arm"] == name]
        last = arm["x"].max()
        ends[name] = min(max(scale.factor * float(arm.loc[arm["x"] == last, "value"].mean()), low), high)
    gap = 0.058 * (high - low) * max(label.count("\n") + 1 for label in labels.values())
    order = sorted(names, key=lambda name: ends[name])
    places = _apart([ends[name] for name in order], gap, low + gap / 2, high - gap / 2)
    for name, place in zip(order, places, strict=True):
        axes.annotate(
            labels[name],
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


def _apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions for sorted values, at least ``gap`` apart, near the values and within bounds if possible."""
    places: list[float] = []
    for value in values:
        places.append(max(value, low, places[-1] + gap if places else -math.inf))
    for index in reversed(range(len(places))):
        ceiling = high if index == len(places) - 1 else places[index + 1] - gap
        places[index] = min(places[index], ceiling)
    return places


def _dots(axes: Axes, y: float, values: Sequence[float]) -> None:
    """Draw single seeds, alternately a little above and below their line."""
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
        half_width = 0.5 * max(1.0 if scale.unit else 1e-3, abs(high) * 0.02)
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
    """Set as many ticks as have room: numbers that differ little have long labels."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    low, high = axes.get_xlim()
    for most in range(7, 0, -1):
        axes.xaxis.set_major_locator(MaxNLocator(most))
        ticks = [tick for tick in axes.xaxis.get_major_locator()() if low <= tick <= high]
        labels = axes.xaxis.get_major_formatter().format_ticks(ticks)
        if sum(len(label) + 2 for label in labels) <= TICKS:
            return
