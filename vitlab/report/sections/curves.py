"""Learning curves: panels of arms over training, every line labelled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitlab.plan.palette import GREY, INK, RULE, SERIES
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.drawing import BASELINE, BROKEN, INTERVAL, SEED, WIDE, parts_of, style
from vitlab.report.labels import shared_parts, wrapped_labels, wrapped_line
from vitlab.report.sections.base import Findings, Section, section
from vitlab.report.study_results import StudyResults
from vitlab.statistics import mean_interval
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ARMS_PER_PANEL = 4  #: arms drawn into one panel, the baseline in ink among them
MIN_SEEDS_FOR_BAND = 3  #: seeds from which on a mean has a band
MAX_PANELS = 24


@section.register("curves")
class Curves(Section[Any]):
    """Learning curves of the judged metric."""

    heading = "Curves"
    place = 10

    def metric(self, plan: Plan) -> str | None:
        """Return the metric that is drawn; None for no figure."""
        return plan.analysis.metric

    def figure(self, rows: Sequence[Any], findings: Findings, width: float) -> Figure | None:
        """Draw the learning curves; None where nothing was measured twice."""
        metric = self.metric(findings.plan)
        return None if metric is None else draw(findings.results, findings.history, metric, width)

    def figure_caption(self, figure: Figure, plan: Plan) -> str:
        """Return the caption of the figure."""
        parts, level = parts_of(*figure.axes), phrasing.percent(1 - plan.analysis.alpha)
        lines = "the mean of the seeds" if {SEED, INTERVAL} & parts else "one seed per arm"
        lines += f" with its {level} t-interval (band)" * (INTERVAL in parts)
        lines += ", and single seeds (thin)" * (SEED in parts)
        lines += "; dashed where one diverged or failed" * (BROKEN in parts)
        title = phrasing.Scale.of(str(self.metric(plan)), plan.units).title
        text = f"{title} over training: {lines}."
        text += " The baseline is grey in the panels of other arms." * (BASELINE in parts)
        return text + " Some curves lie partly outside the picture." * any(map(_leaves_picture, figure.axes))


@section.register("loss")
class Loss(Curves):
    """Learning curves of the loss on the images of the judged metric, unless the loss is judged."""

    heading = "Loss"
    place = 11

    def metric(self, plan: Plan) -> str | None:
        """Return the loss of the split; None if it is judged itself."""
        loss = f"{plan.analysis.metric.partition('/')[0]}/loss"
        return None if loss == plan.analysis.metric else loss


@dataclass(frozen=True)
class _Layout:
    """Panels of arms, and where they stand."""

    panels: list[list[str]]  #: arms of each visible panel, its baseline first
    hidden: int  #: panels that have no room
    single: bool  #: whether every arm has a panel of its own, with its baseline behind it
    rows: int
    columns: int
    wide: bool

    @classmethod
    def of(cls, names: Sequence[str], baselines: Mapping[str, str | None], wide: bool) -> _Layout:
        """Return the layout: arms with one baseline share a panel if they are few."""
        families: dict[str | None, list[str]] = {}
        for name in names:
            family = baselines[name] or (name if name in baselines.values() else None)
            families.setdefault(family, []).append(name)
        single = any(len(family) > MAX_ARMS_PER_PANEL for family in families.values())
        panels = [sorted(family, key=lambda name: baselines[name] is not None) for family in families.values()]
        panels = [[name] for name in names] if single else panels
        visible = panels[:MAX_PANELS]
        most = {(True, True): 4, (True, False): 2, (False, True): 2, (False, False): 1}[single, wide]
        rows = math.ceil(len(visible) / most)
        return cls(visible, len(panels) - len(visible), single, rows, math.ceil(len(visible) / rows), wide)

    @property
    def alone(self) -> bool:
        """True if there is one panel."""
        return len(self.panels) == 1

    def titles(self, names: Sequence[str]) -> list[str]:
        """Return the title of each panel: its arm, or what its arms have in common."""
        if self.single:
            labels = wrapped_labels(names, 26)
            return [labels[panel[0]] for panel in self.panels]
        everywhere = shared_parts(names)
        common = ([part for part in shared_parts(panel) if part not in everywhere] for panel in self.panels)
        return [wrapped_line(", ".join(parts), 44) for parts in common]

    def height(self, titles: Sequence[str]) -> float:
        """Return the height of a row of panels in inches."""
        if self.alone and self.wide:
            return 3.4
        return 1.4 + 0.15 * max(title.count("\n") + 1 for title in titles) if self.single else 2.9


def draw(results: StudyResults, history: pd.DataFrame, metric: str, width: float) -> Figure | None:
    """Draw the learning curves of a metric; None where nothing was measured twice.

    Means are those of trials that are done.
    """
    plan, scale = results.plan, phrasing.Scale.of(metric, results.plan.units)
    done, failures, unit = _measurements(results, history, metric)
    names = [arm.name for arm in plan.arms if (done["arm"] == arm.name).any()]
    if not names or done["step"].nunique() < 2:
        return None
    baselines = {arm.name: arm.baseline for arm in plan.arms}
    layout = _Layout.of(names, baselines, width >= WIDE)
    titles = layout.titles(names)
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, 0.5 + layout.height(titles) * layout.rows), layout="constrained")
        grid = figure.subplots(layout.rows, layout.columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
        for axes, panel, title in zip(grid, layout.panels, titles, strict=False):
            baseline = baselines[panel[0]]
            if layout.single and baseline in names:
                _curve(axes, done[done["arm"] == baseline], scale, GREY, plan.analysis.alpha, "mean", BASELINE)
            labels = wrapped_labels(panel, 28 if layout.wide else 36)
            kind: Literal["band", "seeds"] = "seeds" if len(panel) == 1 else "band"
            for name, colour in _colours(panel, baselines).items():
                own, overlap = done[done["arm"] == name], results.overlap_of([name])
                _curve(axes, own, scale, colour, plan.analysis.alpha, kind, labels[name], overlap)
                _unsuccessful_curves(axes, failures[failures["arm"] == name], scale, colour)
            if not layout.alone:
                axes.set_title(title, loc="left", fontsize=8)
        for axes in grid[len(layout.panels) :]:
            axes.set_visible(False)
        for axes in grid[max(0, len(layout.panels) - layout.columns) : len(layout.panels)]:  # the lowest of a column
            axes.tick_params(axis="x", labelbottom=True)
        _bounds(grid, done, scale)
        _name_curves(grid, layout, done, scale, baselines)
        figure.supxlabel(unit, fontsize=9)
        figure.supylabel(scale.title, fontsize=9)
        if layout.hidden:
            shown = len(layout.panels)
            figure.suptitle(f"the first {shown} of {shown + layout.hidden} arms", fontsize=8, color=GREY)
        return figure


def _measurements(results: StudyResults, history: pd.DataFrame, metric: str) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Return the finite measurements of trials that are done and of unsuccessful ones, and the unit of their axis."""
    frame = results.frame
    ended = frame.loc[frame["status"].isin([Ending.DONE, Ending.DIVERGED, Ending.FAILED]), ["arm", "seed", "status"]]
    rows = history[(history["metric"] == metric) & np.isfinite(history["value"])].merge(ended, on=["arm", "seed"])
    rows, unit = _over_training(rows)
    return rows[rows["status"] == Ending.DONE], rows[rows["status"] != Ending.DONE], unit


def _name_curves(
    grid: Sequence[Axes],
    layout: _Layout,
    done: pd.DataFrame,
    scale: phrasing.Scale,
    baselines: Mapping[str, str | None],
) -> None:
    """Name the arms: at the ends of their curves in a wide panel alone, otherwise in legends."""
    if layout.single:
        return  # the titles do
    if layout.alone and layout.wide:
        _label_ends(grid[0], done, layout.panels[0], scale, _colours(layout.panels[0], baselines))
        return
    for axes, panel in zip(grid, layout.panels, strict=False):
        if len(panel) > 1 or layout.alone:
            axes.legend(frameon=False, fontsize=7.5, loc="best", handlelength=1.4)


def _leaves_picture(axes: Axes) -> bool:
    low, high = axes.get_ylim()
    values = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    return axes.get_visible() and any(bool(((line < low) | (line > high)).any()) for line in values)


def _colours(panel: Sequence[str], baselines: Mapping[str, str | None]) -> dict[str, str]:
    """Return arm to colour: a baseline in ink, the others in the order of the design; the baseline is drawn last."""
    ink = [name for name in panel if name in baselines.values()]
    others = [name for name in panel if name not in ink]
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(others)} | dict.fromkeys(ink, INK)


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
    overlap: float = 0.0,
) -> None:
    """Draw the mean of an arm, with its interval as a band, or also with its seeds; seeds where there is no band."""
    means = {
        float(str(x)): mean_interval(at["value"].tolist(), alpha, overlap=overlap)
        for x, at in measurements.groupby("x")
    }
    intervals = list(means.values())
    several = any(mean.n > 1 for mean in intervals)
    if several and (kind == "seeds" or (kind == "band" and all(mean.n < MIN_SEEDS_FOR_BAND for mean in intervals))):
        for _, seed in measurements.groupby("seed"):
            line = seed.sort_values("x")
            axes.plot(line["x"], scale.factor * line["value"], color=colour, linewidth=0.5, alpha=0.35, label=SEED)
    thick = 1.2 if kind == "mean" else 1.7
    axes.plot(list(means), [scale.factor * mean.mean for mean in intervals], color=colour, linewidth=thick, label=label)
    if kind != "mean":
        low, high = ([scale.factor * getattr(mean, end) for mean in intervals] for end in ("low", "high"))
        wide = [mean.n >= MIN_SEEDS_FOR_BAND for mean in intervals]
        band = INTERVAL if any(wide) else None
        axes.fill_between(list(means), low, high, where=wide, color=colour, alpha=0.14, linewidth=0, label=band)


def _unsuccessful_curves(axes: Axes, broken: pd.DataFrame, scale: phrasing.Scale, colour: str) -> None:
    """Draw the curves of trials that diverged or failed."""
    for _, seed in broken.groupby("seed"):
        line = seed.sort_values("x")
        values = scale.factor * line["value"]
        axes.plot(line["x"], values, color=colour, linewidth=0.7, linestyle=(0, (3, 2)), label=BROKEN)


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
