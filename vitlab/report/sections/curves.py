"""Learning curves of the judged metric, and of the loss beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.explaining.colours import GREY, INK, SERIES
from vitlab.planning.values import Plan
from vitlab.report.drawing import (
    NARROW,
    WIDTH,
    Drawing,
    apply_style,
    describe_shared_name_parts,
    empty_figure,
    format_ticks_without_exponents,
    wrapped_labels,
)
from vitlab.report.frame import StudyResults
from vitlab.report.phrasing import Scale, describe_baseline, percent
from vitlab.report.sections import Findings, Section, section
from vitlab.statistics.replicates import mean_interval
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MAX_ARMS_PER_PANEL = 4  #: arms that share one panel; of more, each has its own, with its baseline behind it
MAX_PANELS = 24
LINEAR_RATIO = 30  #: most times the least value that the largest one is; of more, small ones need a logarithmic axis
MIN_SEEDS_FOR_BAND = 5  #: seeds from which on a mean has a band; of fewer, bands are wide and hide each other


@section.register("curves")
class Curves(Section[Any]):
    """Learning curves of the judged metric, or of the validation's if it is measured once, as on test images."""

    heading = "Curves"
    place = 10

    def metric(self, plan: Plan) -> str | None:
        """Return the metric that is drawn; None for no figure."""
        return plan.analysis.metric

    def figure(self, rows: Sequence[Any], findings: Findings) -> Drawing | None:
        metric = self.metric(findings.plan)
        names = () if metric is None else (metric, metric.replace("test/", "val/", 1))
        drawings = (draw_curves(findings.results, findings.history, name) for name in names)
        return next(filter(None, drawings), None)


@section.register("loss")
class Loss(Curves):
    """Learning curves of the loss on the images of the judged metric, unless the loss is judged."""

    heading = "Loss"
    place = 11

    def metric(self, plan: Plan) -> str | None:
        """Return the loss of the split; None if it is judged itself."""
        loss = f"{plan.analysis.metric.partition('/')[0]}/loss"
        return None if loss == plan.analysis.metric else loss


def draw_curves(results: StudyResults, history: pd.DataFrame, metric: str) -> Drawing | None:
    """Draw the learning curves of a metric; None where nothing was measured twice.  Means are over finished trials."""
    plan, scale, frame = results.plan, Scale.of(metric, results.plan.units), results.frame
    endings = frame.loc[frame["status"].isin([Ending.DONE, Ending.DIVERGED, Ending.FAILED]), ["arm", "seed", "status"]]
    rows = history[(history["metric"] == metric) & np.isfinite(history["value"])].merge(endings, on=["arm", "seed"])
    rows, unit = _choose_x_axis(rows.assign(value=scale.factor * rows["value"]))
    done = rows[rows["status"] == Ending.DONE]
    names = [arm.name for arm in plan.arms if (done["arm"] == arm.name).any()]
    if not names or done["step"].nunique() < 2:
        return None
    baselines = {arm.name: arm.baseline for arm in plan.arms}
    share_panel = len(names) <= MAX_ARMS_PER_PANEL
    labels = wrapped_labels(names, 50 if share_panel else 26)
    panels = [names] if share_panel else [[name] for name in names[:MAX_PANELS]]
    across = min(len(panels), 4)
    down = math.ceil(len(panels) / across)
    height = 3.2 if share_panel else 1.6 + 0.15 * max(label.count("\n") for label in labels.values())
    # Curves of the first fifth would flatten the others.
    late = done.loc[done["x"] >= 0.2 * done["x"].max(), "value"]
    low, high = late.agg(["min", "max"]).tolist()
    if is_log := not scale.points and 0 < LINEAR_RATIO * low < high:  # as of the loss of an arm that fails
        low, high = low / 1.1, high * 1.1
    else:
        room = 0.05 * (high - low) or 0.5
        low, high = low - room, high + room
    with apply_style():
        figure = empty_figure(NARROW if share_panel else WIDTH, 0.5 + height * down)
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.remove()
        for axes, panel in zip(grid, panels, strict=False):
            colours = dict(zip(panel, SERIES, strict=False))
            colours |= {name: INK for name in panel if name in baselines.values()}
            if not share_panel:
                axes.set_title(labels[panel[0]])
                if baselines[panel[0]] in names:
                    _draw_mean(axes, done[done["arm"] == baselines[panel[0]]], GREY)
            # Baselines are drawn in front, and come first in the legend.
            for name in sorted(panel, key=lambda name: baselines[name] is not None)[::-1]:
                own = rows[rows["arm"] == name]
                _draw_arm(
                    axes, own, colours[name], labels[name], plan.analysis.alpha, results.largest_val_train_ratio([name])
                )
            if share_panel:
                figure.legend(loc="outside upper left", reverse=True)
            axes.tick_params(labelbottom=True)
            if is_log:
                axes.set_yscale("log")
                format_ticks_without_exponents(axes)
            axes.set_ylim(low, high)
            axes.set_xlim(0, float(done["x"].max()))
            axes.locator_params(axis="x", integer=True)
            axes.grid(axis="y")
        figure.supxlabel(unit)
        figure.supylabel(scale.title)
        counts = done.groupby("arm")["seed"].nunique()
        spreads = []
        if (counts >= MIN_SEEDS_FOR_BAND).any():
            spreads.append(f"its {percent(1 - plan.analysis.alpha)} t-interval (band)")
        if counts.between(2, MIN_SEEDS_FOR_BAND - 1).any():
            spreads.append("each seed (thin)")
        caption = f"{scale.title} over training: the mean of the seeds"
        if spreads:
            caption += f" with {' or '.join(spreads)}"
        caption += "; dashed curves diverged or failed" if len(done) < len(rows) else ""
        compared = any(baselines.values())
        # Of what is drawn, which are bands or the seeds.
        is_cut = any(axes.dataLim.y0 < low or axes.dataLim.y1 > high for axes in grid[: len(panels)])
        caption += "; some values lie beyond the picture" * is_cut + "; the axis is logarithmic" * is_log
        caption += f"; {describe_baseline(baselines.values())} is in the colour of the text" * compared + "."
        if not share_panel:
            caption += " The baseline is grey behind other arms." * compared
            caption += f" The first {MAX_PANELS} of {len(names)} arms are shown." * (len(names) > MAX_PANELS)
        return Drawing(figure, caption + describe_shared_name_parts(names))


def _choose_x_axis(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return measurements with their place on the axis (``x``), and its name.

    The place is the epoch if the epochs of all arms have equally many steps, else the optimizer step.
    """
    first, last = rows.groupby("step")["epoch"].min(), rows.groupby("step")["epoch"].max()
    if len(rows) and last.max() >= 1 and bool(np.allclose(first, last)):
        return rows.assign(x=rows["epoch"]), "epoch"
    return rows.assign(x=rows["step"].astype(float)), "optimizer step"


def _draw_mean(axes: Axes, rows: pd.DataFrame, colour: str, label: str | None = None) -> None:
    means = rows.groupby("x")["value"].mean()
    axes.plot(means.index, means, color=colour, linewidth=1.7 if label else 1.2, label=label)


def _draw_arm(axes: Axes, rows: pd.DataFrame, colour: str, label: str, alpha: float, overlap: float) -> None:
    """Draw the mean of an arm with its band, or with its seeds if they are few; dashed, what diverged or failed."""
    done = rows[rows["status"] == Ending.DONE]
    at_places = {float(str(x)): mean_interval(at.tolist(), alpha, 0.0, overlap) for x, at in done.groupby("x")["value"]}
    band = {x: (at.low, at.high) for x, at in at_places.items() if at.n >= MIN_SEEDS_FOR_BAND}
    for _, seed in rows.sort_values("x").groupby("seed"):
        if seed["status"].iloc[0] != Ending.DONE:
            axes.plot(seed["x"], seed["value"], color=colour, linewidth=0.7, linestyle=(0, (3, 2)))
        elif not band and done["seed"].nunique() > 1:
            axes.plot(seed["x"], seed["value"], color=colour, linewidth=0.5, alpha=0.35)
    low, high = ([ends[side] for ends in band.values()] for side in (0, 1))
    axes.fill_between(list(band), low, high, color=colour, alpha=0.14, linewidth=0)
    _draw_mean(axes, done, colour, label)
