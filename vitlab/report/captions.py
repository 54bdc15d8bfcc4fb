"""Captions of the report's figures, which explain what is drawn in the figure at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.curves import loss_of
from vitlab.report.drawing import BASELINE, BEATEN, BEYOND, BROKEN, CLAIM, INTERVAL, SEED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def captions(plan: Plan, figures: Mapping[str, Figure]) -> dict[str, str]:
    """Return the caption of each figure, see :func:`vitlab.report.figures.figures`."""
    return {name: _CAPTIONS[name](plan, figure) for name, figure in figures.items()}


def _arms(plan: Plan, figure: Figure) -> str:
    panels = figure.axes
    own = _parts(panels[0])
    text = "each seed (small) and the mean" if SEED in own else "the value"
    text += f" with its {_level(plan)} t-interval" * (INTERVAL in own)
    text = f"First {text}" if len(panels) > 1 else f"Of every arm {text}"
    if len(panels) > 1:
        text = f"{text}, then the difference to the baseline"
        if INTERVAL in _parts(panels[1]):
            several = sum(arm.baseline is not None for arm in plan.arms) > 1 and plan.analysis.correction != "none"
            text += f" with its {_level(plan)} interval" + ", which holds for all of them at once" * several
        text += "; a filled dot is a verdict of better or worse" * (CLAIM in _parts(panels[1]))
    beyond = any(BEYOND in _parts(axes) for axes in panels)
    return f"{text}." + " An arrow marks an interval that goes on beyond the picture." * beyond


def _interaction(plan: Plan, figure: Figure) -> str:
    interval = f" with its {_level(plan)} t-interval" * (INTERVAL in _all_parts(figure))
    lines = "Parallel lines: the effect of one factor does not depend on the other."
    return f"The mean of every cell of the grid{interval}. {lines}"


def _curves(plan: Plan, figure: Figure, metric: str = "") -> str:
    parts = _all_parts(figure)
    lines = "the mean of the seeds" if {SEED, INTERVAL} & parts else "one seed per arm"
    lines += f" with its {_level(plan)} t-interval (band)" * (INTERVAL in parts)
    lines += ", and single seeds (thin)" * (SEED in parts)
    lines += "; dashed where one diverged or failed" * (BROKEN in parts)
    title = phrasing.Scale.of(metric or plan.analysis.metric, plan.units).title
    text = f"{title} over training: {lines}."
    text += " The baseline is grey in the panels of other arms." * (BASELINE in parts)
    return text + " Some curves lie partly outside the picture." * any(map(_leaves_picture, figure.axes))


def _leaves_picture(axes: Axes) -> bool:
    low, high = axes.get_ylim()
    values = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    return axes.get_visible() and any(bool(((line < low) | (line > high)).any()) for line in values)


def _scaling(plan: Plan, figure: Figure) -> str:
    parts = _all_parts(figure)
    axis = "The metric" if plan.analysis.goal == "min" else "One less the metric"
    points = "each seed (small), the mean of their logarithms" if SEED in parts else "each arm"
    band = f" with the {_level(plan)} band that the spread of the seeds allows" * (INTERVAL in parts)
    comma = "," * (SEED in parts)
    return f"{axis} over size, both on logarithmic axes: {points}{comma} and a power law{band}."


def _pareto(plan: Plan, figure: Figure) -> str:
    seeds = ", mean of the seeds," if len({planned.seed for planned in plan.trials}) > 1 else ""
    text = f"What each arm reaches{seeds} over what it costs."
    if BEATEN not in _all_parts(figure):
        return f"{text} No arm is beaten in both by another one; the line joins them."
    has_lines = any(np.size(axes.lines[0].get_xdata()) > 1 for axes in figure.axes if axes.lines)
    return f"{text} Filled: arms that no other one beats in both{'; the line joins them' * has_lines}."


def _parts(axes: Axes) -> set[str]:
    """Return the labels of the parts that are drawn in a panel."""
    return {str(artist.get_label()) for artist in axes.get_children()}


def _all_parts(figure: Figure) -> set[str]:
    return set().union(*map(_parts, figure.axes))


def _level(plan: Plan) -> str:
    return phrasing.percent(1 - plan.analysis.alpha)


_CAPTIONS = {
    "arms": _arms,
    "interaction": _interaction,
    "curves": _curves,
    "loss": lambda plan, figure: _curves(plan, figure, loss_of(plan)),
    "scaling": _scaling,
    "pareto": _pareto,
}
