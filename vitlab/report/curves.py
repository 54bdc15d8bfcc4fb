"""Learning curves: panels of arms over training, every line labelled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from vitlab.plan.palette import GREY, INK, RULE, SERIES
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.drawing import BASELINE, BROKEN, INTERVAL, SEED, WIDE, style
from vitlab.report.frame import joint_overlap
from vitlab.report.labels import shared_parts, wrapped_labels, wrapped_line
from vitlab.statistics import mean_interval
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ARMS_PER_PANEL = 4  #: arms drawn into one panel, the baseline in ink among them
MIN_SEEDS_FOR_BAND = 3  #: seeds from which on a mean has a band
MAX_PANELS = 24


def loss_of(plan: Plan) -> str:
    """Return the name of the loss on the images of the judged metric."""
    return f"{plan.analysis.metric.partition('/')[0]}/loss"


def curves(
    plan: Plan, frame: pd.DataFrame, history: pd.DataFrame, width: float = WIDE, metric: str | None = None
) -> Figure | None:
    """Draw the learning curves of a metric, by default the judged one; None where nothing was measured twice.

    Arms that are compared with one baseline share a panel if they are few; otherwise every arm has its own, with its
    baseline behind it.  Means are those of trials that are done.
    """
    metric = metric or plan.analysis.metric
    scale = phrasing.Scale.of(metric, plan.units)
    endings = frame.loc[frame["status"].isin([Ending.DONE, Ending.DIVERGED, Ending.FAILED]), ["arm", "seed", "status"]]
    measurements = history[(history["metric"] == metric) & np.isfinite(history["value"])]
    measurements = measurements.merge(endings, on=["arm", "seed"])
    measurements, unit = _over_training(measurements)
    failures, measurements = (
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
    crowded = any(len(family) > MAX_ARMS_PER_PANEL for family in panels)
    panels = [[name] for name in names] if crowded else panels
    visible = panels[:MAX_PANELS]
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
                of_baseline = measurements[measurements["arm"] == baseline]
                _curve(axes, of_baseline, scale, GREY, plan.analysis.alpha, "mean", BASELINE)
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
                    joint_overlap(frame, [name]),
                )
                _unsuccessful_curves(axes, failures[failures["arm"] == name], scale, colour)
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
    metric = loss_of(plan)
    return None if metric == plan.analysis.metric else curves(plan, frame, history, width, metric)


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
