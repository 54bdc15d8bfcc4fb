"""Figures of a model's attention and parameters.

Every function takes numbers and returns a matplotlib Figure; the numbers are computed elsewhere.

C channels, N patches.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from vitlab.data.pixels import IGNORED
from vitlab.explain import ALARM, GREY, INK, SERIES

Array = NDArray[np.floating[Any]]
Labels = NDArray[np.int64]

HEAT = "inferno"
HEADS = "viridis"
TRUE, PREDICTED = SERIES[2], SERIES[0]  #: colours of the true class and of others
COLUMNS = 5  #: at most, of pictures in a row of a comparison
MAX_AXIS_CHARACTERS = 34  #: characters that the height of a figure has room for


def attention_overlay(
    image_HWC: Array, heat_YX: Array, *, title: str, predictions: Sequence[tuple[str, float]], truth: str | None
) -> Figure:
    """Draw the image, the heatmap over it, the image darkened where the heatmap is low, and the top predictions.

    Args:
        image_HWC: in [0, 1]; of more than three channels the first three are shown, of two the first.
        heat_YX: over the grid of patches; scaled to its own largest value.
        title: of the heatmap.
        predictions: label and probability, best first; none are drawn if it is empty.
        truth: the true label, marked among the predictions; None where it is not known.
    """
    widths = [1, 1, 1, *([0.9] if predictions else [])]
    figure = _new_figure(11.5 * sum(widths) / 3.9, 3.3)
    first, middle, right, *others = figure.subplots(1, len(widths), width_ratios=widths)
    _show_image(first, image_HWC, "image")
    _show_image(middle, image_HWC, title)
    heatmap = _draw_overlay(middle, image_HWC, _scale_to_maximum(heat_YX))
    figure.colorbar(heatmap, ax=middle, shrink=0.8, label="attention relative to its maximum")
    _show_image(right, image_HWC, "image weighted by it")
    _draw_overlay(right, image_HWC, np.zeros_like(heat_YX), alpha=0.85 * (1 - _scale_to_maximum(heat_YX)), cmap="gray")
    for bars in others:
        _draw_predictions(bars, predictions, truth)
    return figure


def _draw_predictions(bars: Any, predictions: Sequence[tuple[str, float]], truth: str | None) -> None:
    names, shares = zip(*reversed(predictions), strict=True)  # the best on top
    colours = [TRUE if name == truth else PREDICTED for name in names]
    bars.barh(range(len(names)), [share * 100 for share in shares], color=colours)
    bars.set_yticks(range(len(names)), [f"{name} (true)" if name == truth else name for name in names], fontsize=8)
    bars.set(xlim=(0, 100), xlabel="probability, %")
    bars.spines[["top", "right"]].set_visible(False)
    note = "" if truth is None or truth in names else f"; true: {truth}"
    bars.set_title(f"top {len(names)} predictions{note}", fontsize=9)


def side_by_side(
    models: Mapping[str, tuple[Array, Array, Sequence[tuple[str, float]]]], *, title: str, truth: str | None
) -> Figure:
    """Draw the image, and beside it the heatmap of each model over it, with the model's name and best prediction.

    Args:
        models: name to the image as that model reads it, (H, W, C) in [0, 1]; its heatmap over the grid of patches,
            scaled to its own maximum; and labels with their probabilities, best first, empty if it predicts none.
        title: of the figure.
        truth: the true label; a wrong prediction is named in red.
    """
    figure, (first, *others) = _panels(len(models) + 1)
    _show_image(first, next(iter(models.values()))[0], "image" if truth is None else f"image: {truth}")
    for axis, (name, (image_HWC, heat_YX, predictions)) in zip(others, models.items(), strict=True):
        _show_image(axis, image_HWC, name)
        heatmap = _draw_overlay(axis, image_HWC, _scale_to_maximum(heat_YX))
        for label, share in predictions[:1]:
            right = truth is None or label == truth
            axis.set_xlabel(f"predicts {label} ({share:.0%})", fontsize=8, color=INK if right else ALARM)
    figure.colorbar(heatmap, ax=[first, *others], shrink=0.7, label="attention relative to its maximum")
    figure.suptitle(title, fontsize=10)
    return figure


def label_maps(
    image_HWC: Array, predicted: Mapping[str, Labels], labels: Sequence[str], truth_HW: Labels | None
) -> Figure:
    """Draw the image, its true labels, and the predicted labels of each model, with the share of right pixels.

    Args:
        image_HWC: in [0, 1].
        predicted: model to the class of every pixel; models may differ in the size of the image that they read.
        labels: names of the classes; numbers if empty.
        truth_HW: the true class of every pixel, those without a label as :data:`~vitlab.data.pixels.IGNORED`; None
            where it is not known.
    """
    maps = {**({} if truth_HW is None else {"true labels": truth_HW}), **predicted}
    classes = sorted({int(label) for map_HW in maps.values() for label in np.unique(map_HW)} - {IGNORED})
    # Of 20 colours every second is dark: these come first, so that few classes are easy to tell apart.
    colours = [colormaps["tab20"](index)[:3] for index in (*range(0, 20, 2), *range(1, 20, 2))]
    colour_of = {label: colours[index % len(colours)] for index, label in enumerate(classes)}
    figure, (first, *others) = _panels(len(maps) + 1)
    _show_image(first, image_HWC, "image")
    for axis, (name, map_HW) in zip(others, maps.items(), strict=True):
        picture_HWC = np.ones((*map_HW.shape, 3))  # pixels without a label stay white
        for label, colour in colour_of.items():
            picture_HWC[map_HW == label] = colour
        _show_image(axis, picture_HWC, name)
        if truth_HW is not None and name in predicted and map_HW.shape == truth_HW.shape:
            right_M = (map_HW == truth_HW)[truth_HW != IGNORED]
            if right_M.size:
                axis.set_xlabel(f"{right_M.mean():.0%} of the pixels right", fontsize=8)
    patches = [Patch(color=colour_of[label], label=labels[label] if labels else str(label)) for label in classes]
    figure.legend(handles=patches, loc="outside right center", frameon=False, fontsize=8)
    return figure


def add_caption(figure: Figure, text: str) -> None:
    """Write a line under a figure, wrapped to the figure's width."""
    width = max(24, int(figure.get_figwidth() * 15))
    figure.supxlabel("\n".join(textwrap.wrap(text, width)), fontsize=7, color=GREY)


def head_maps(maps_LHYX: Sequence[Array], *, query: str) -> Figure:
    """Draw the attention of a query, a row for each block and a column for each head; each map on its own scale."""
    figure, axes = _tiles(len(maps_LHYX), len(maps_LHYX[0]), 1.2, 1.25)
    for (block, head), axis in np.ndenumerate(axes):
        axis.imshow(maps_LHYX[block][head], cmap=HEAT)
    for head, axis in enumerate(axes[0]):
        axis.set_title(f"head {head + 1}", fontsize=8)
    for block, axis in enumerate(axes[:, 0]):
        axis.set_ylabel(f"block {block + 1}", fontsize=8)
    figure.suptitle(f"attention of the {query}, each map on its own scale", fontsize=10, wrap=True)
    return figure


def distances(distance_LH: Array, *, largest: float) -> Figure:
    """Draw the mean attention distance of every head against depth."""
    figure, axis = _new_plot("block", "mean attention distance, pixels")
    depth = np.arange(1, len(distance_LH) + 1)
    axis.plot(depth, distance_LH, "o", ms=4, color=SERIES[0], alpha=0.6)
    axis.plot(depth, distance_LH.mean(1), color=INK, lw=1.5, label="mean of the heads")
    axis.set(ylim=(0, largest), xticks=depth)
    axis.legend(frameon=False, fontsize=8)
    return figure


def position_grids(similarity_YXYX: Array) -> Figure:
    """Draw, for each patch, the cosine similarity of its position with all others."""
    rows, columns = similarity_YXYX.shape[:2]
    figure, axes = _tiles(rows, columns, 0.75, 0.75)
    for place, axis in np.ndenumerate(axes):
        picture = axis.imshow(similarity_YXYX[place], cmap=HEADS, vmin=-1, vmax=1)
    figure.colorbar(picture, ax=axes, label="cosine similarity", shrink=0.8)
    figure.suptitle("similarity of positions", fontsize=10)
    return figure


def depth_curve(values: Array, ylabel: str) -> Figure:
    """Draw numbers by depth; depth 0 is before the first block."""
    figure, axis = _new_plot("depth, blocks", "\n".join(textwrap.wrap(ylabel, MAX_AXIS_CHARACTERS)))
    axis.plot(values, "o-", ms=4)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _new_plot(xlabel: str, ylabel: str) -> tuple[Figure, Any]:
    figure = _new_figure(5.5, 3.5)
    axis = figure.subplots()
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _tiles(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure of rows and columns of pictures, each of a width and a height in inches, and their axes."""
    figure = _new_figure(width * columns + 1, height * rows + 0.5)
    return figure, figure.subplots(rows, columns, squeeze=False, subplot_kw={"xticks": [], "yticks": []})


def _panels(count: int) -> tuple[Figure, list[Any]]:
    """Return a figure of some pictures in the fewest rows, as even as possible, and their axes."""
    rows = -(-count // COLUMNS)
    figure, axes = _tiles(rows, -(-count // rows), 2.3, 2.8)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def _show_image(axis: Any, image_HWC: Array, title: str) -> None:
    picture = image_HWC[..., :3] if image_HWC.shape[2] >= 3 else image_HWC[..., 0]  # colours, or the first as grey
    axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
    axis.set_title("\n".join(textwrap.wrap(title, 28)), fontsize=9)


def _draw_overlay(axis: Any, image_HWC: Array, values_YX: Array, alpha: Any = 0.6, cmap: str = HEAT) -> Any:
    """Draw values over an image that :func:`_show_image` has drawn; bilinearly, so that a coarse grid looks smooth."""
    extent = (-0.5, image_HWC.shape[1] - 0.5, image_HWC.shape[0] - 0.5, -0.5)
    return axis.imshow(values_YX, cmap=cmap, alpha=alpha, vmin=0, vmax=1, extent=extent, interpolation="bilinear")


def _scale_to_maximum(heat_YX: Array) -> Array:
    return heat_YX / max(float(heat_YX.max()), 1e-12)
