"""Figures of a model's attention and parameters.

Every function takes numbers and returns a matplotlib Figure; the numbers are computed elsewhere.

C channels, K components, N patches.
"""

from __future__ import annotations

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
from vitlab.plan.palette import ALARM, GREY, INK, SERIES

Array = NDArray[np.floating[Any]]

HEAT = "inferno"
HEADS = "viridis"
MIN_SIDE = 224  #: smallest side of a picture, in pixels
TRUE, PREDICTED = SERIES[2], SERIES[0]  #: colours of the true class and of others
LABEL_COLOURS = [colormaps["tab20"](index)[:3] for index in range(20)]  #: of the pixels of a class
COLUMNS = 5  #: at most, of pictures in a row of a comparison
MAX_AXIS_CHARACTERS = 34  #: characters that the height of a figure has room for


def attention_overlay(
    image_HWC: Array, heat_HW: Array, *, title: str, predictions: Sequence[tuple[str, float]], truth: str | None
) -> Figure:
    """Draw the image, the heatmap over it, the image darkened where the heatmap is low, and the top predictions.

    Args:
        image_HWC: in [0, 1]; of more than three channels the first three are shown, of two the first.
        heat_HW: of the image's size or of the patch grid; scaled to its own largest value.
        title: of the heatmap.
        predictions: label and probability, best first; none are drawn if it is empty.
        truth: the true label, marked among the predictions; None where it is not known.
    """
    image_HWC = _enlarged(_colours(image_HWC))
    heat_HW = _to_size(heat_HW / max(float(heat_HW.max()), 1e-12), image_HWC.shape[:2])
    widths = [1, 1, 1, *([0.9] if predictions else [])]
    figure = Figure(figsize=(11.5 * sum(widths) / 3.9, 3.3), layout="constrained")
    first, middle, right, *others = figure.subplots(1, len(widths), width_ratios=widths)
    _show(first, image_HWC, "image")
    _show(middle, image_HWC, title)
    heatmap = _heat(middle, image_HWC, heat_HW)
    figure.colorbar(heatmap, ax=middle, shrink=0.8, label="attention relative to its maximum")
    _show(right, image_HWC * (0.15 + 0.85 * heat_HW[..., None]), "image weighted by it")
    for bars in others:
        _draw_predictions(bars, predictions, truth)
    return figure


def _draw_predictions(bars: Any, predictions: Sequence[tuple[str, float]], truth: str | None) -> None:
    names = [name for name, _ in predictions][::-1]
    colours = [TRUE if name == truth else PREDICTED for name in names]
    bars.barh(range(len(names)), [share * 100 for _, share in predictions][::-1], color=colours)
    bars.set_yticks(range(len(names)), [f"{name} (true)" if name == truth else name for name in names], fontsize=8)
    bars.set_xlim(0, 100)
    bars.set_xlabel("probability, %")
    bars.spines[["top", "right"]].set_visible(False)
    note = "" if truth is None or truth in names else f"; true: {truth}"
    bars.set_title(f"top {len(names)} predictions{note}", fontsize=9)


def side_by_side(
    images: Mapping[str, Array],
    heats: Mapping[str, Array],
    predictions: Mapping[str, tuple[str, float]],
    *,
    title: str,
    truth: str | None,
) -> Figure:
    """Draw the image, and beside it the heatmap of each model over it, with the model's name and best prediction.

    Args:
        images: model to the image as that model reads it, (H, W, C) in [0, 1].
        heats: model to its heatmap over the grid of patches; each is scaled to its own maximum.
        predictions: model to its most probable label, and the probability; not of models that predict none, or one for
            each pixel.
        title: of the figure.
        truth: the true label; a wrong prediction is named in red.
    """
    rows, columns = _layout(len(heats) + 1)
    figure = Figure(figsize=(2.3 * columns + 0.6, 2.8 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    first, *others = list(axes.flat)
    first.set_visible(True)
    _show(first, _enlarged(_colours(next(iter(images.values())))), "image" if truth is None else f"image: {truth}")
    for axis, (name, heat_HW) in zip(others, heats.items(), strict=False):
        axis.set_visible(True)
        image_HWC = _enlarged(_colours(images[name]))
        _show(axis, image_HWC, "\n".join(textwrap.wrap(name, 28)))
        heatmap = _heat(axis, image_HWC, _to_size(heat_HW / max(float(heat_HW.max()), 1e-12), image_HWC.shape[:2]))
        if name in predictions:
            label, share = predictions[name]
            right = truth is None or label == truth
            axis.set_xlabel(f"predicts {label} ({share:.0%})", fontsize=8, color=INK if right else ALARM)
    figure.colorbar(heatmap, ax=axes, shrink=0.7, label="attention relative to its maximum")
    figure.suptitle(title, fontsize=10)
    return figure


def label_maps(
    image_HWC: Array,
    predicted: Mapping[str, NDArray[np.int64]],
    *,
    labels: Sequence[str],
    truth_HW: NDArray[np.int64] | None,
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
    colours = [*LABEL_COLOURS[::2], *LABEL_COLOURS[1::2]]
    colour_of = {label: colours[index % len(colours)] for index, label in enumerate(classes)}
    rows, columns = _layout(len(maps) + 1)
    figure = Figure(figsize=(2.3 * columns + 1.6, 2.8 * rows + 0.5), layout="constrained")
    first, *others = figure.subplots(rows, columns, squeeze=False).flat
    _show(first, _colours(image_HWC), "image")
    for axis in others[len(maps) :]:
        axis.set_visible(False)
    for axis, (name, map_HW) in zip(others, maps.items(), strict=False):
        picture_HWC = np.ones((*map_HW.shape, 3))  # pixels without a label stay white
        for label, colour in colour_of.items():
            picture_HWC[map_HW == label] = colour
        _show(axis, picture_HWC, "\n".join(textwrap.wrap(name, 28)))
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
    blocks, heads = len(maps_LHYX), maps_LHYX[0].shape[0]
    figure = Figure(figsize=(1.2 * heads + 0.8, 1.25 * blocks + 0.5), layout="constrained")
    axes = figure.subplots(blocks, heads, squeeze=False)
    for block, maps_HYX in enumerate(maps_LHYX):
        for head in range(heads):
            axis = axes[block][head]
            axis.imshow(maps_HYX[head], cmap=HEAT)
            axis.set(xticks=[], yticks=[])
            if block == 0:
                axis.set_title(f"head {head + 1}", fontsize=8)
            if head == 0:
                axis.set_ylabel(f"block {block + 1}", fontsize=8)
    figure.suptitle(f"attention of the {query}, each map on its own scale", fontsize=10, wrap=True)
    return figure


def distances(distance_LH: Array, *, largest: float) -> Figure:
    """Draw the mean attention distance of every head against depth."""
    blocks, heads = distance_LH.shape
    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axis = figure.subplots()
    depth = np.arange(1, blocks + 1)
    ranked = np.sort(distance_LH, axis=1)
    for head in range(heads):
        axis.plot(
            np.full(1, depth[0]) if blocks == 1 else depth, ranked[:, head], "o", ms=4, color=SERIES[0], alpha=0.6
        )
    axis.plot(depth, distance_LH.mean(1), color=INK, lw=1.5, label="mean of the heads")
    axis.set(xlabel="block", ylabel="mean attention distance, pixels", ylim=(0, largest), xticks=depth)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure


def filters(filters_KCHW: Array, share_K: Array) -> Figure:
    """Draw the principal components of the patch filters, as RGB for three channels; each on its own scale."""
    count = len(filters_KCHW)
    columns = min(7, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.1 * columns, 1.25 * rows + 0.4), layout="constrained")
    for index, axis in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axis.set(xticks=[], yticks=[])
        if index >= count:
            axis.set_visible(False)
            continue
        image = _colours(filters_KCHW[index].transpose(1, 2, 0))
        low, high = image.min(), image.max()
        image = (image - low) / max(high - low, 1e-12)
        axis.imshow(image if image.shape[2] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=1)
        axis.set_title(f"{share_K[index]:.1%}", fontsize=7)
    figure.suptitle("principal components of the patch filters", fontsize=10)
    return figure


def position_grids(similarity_YXYX: Array) -> Figure:
    """Draw, for each patch, the cosine similarity of its position with all others."""
    rows, columns = similarity_YXYX.shape[:2]
    figure = Figure(figsize=(0.75 * columns + 1, 0.75 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for y in range(rows):
        for x in range(columns):
            picture = axes[y][x].imshow(similarity_YXYX[y, x], cmap=HEADS, vmin=-1, vmax=1)
            axes[y][x].set(xticks=[], yticks=[])
    figure.colorbar(picture, ax=axes, label="cosine similarity", shrink=0.8)
    figure.suptitle("similarity of positions", fontsize=10)
    return figure


def curves(values: Mapping[str, Array], *, ylabel: str) -> Figure:
    """Draw numbers by depth, one line for each name; depth 0 is before the first block."""
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axis = figure.subplots()
    for name, line in values.items():
        axis.plot(np.arange(len(line)), line, "o-", ms=4, label=name)
    axis.set(xlabel="depth, blocks", ylabel="\n".join(textwrap.wrap(ylabel, MAX_AXIS_CHARACTERS)))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    if len(values) > 1:
        axis.legend(frameon=False, fontsize=8)
    return figure


def _layout(pictures: int) -> tuple[int, int]:
    """Return rows and columns that hold some pictures, with as few empty places as possible in the fewest rows."""
    rows = -(-pictures // COLUMNS)
    return rows, -(-pictures // rows)


def _heat(axis: Any, image_HWC: Array, heat_HW: Array) -> Any:
    """Draw a heatmap of values in [0, 1] over an image that :func:`_show` has drawn."""
    return axis.imshow(heat_HW, cmap=HEAT, alpha=0.6, vmin=0, vmax=1, extent=_extent(image_HWC))


def _show(axis: Any, image_HWC: Array, title: str) -> None:
    grey = image_HWC.shape[2] == 1
    axis.imshow(image_HWC[..., 0] if grey else image_HWC, cmap="gray", vmin=0, vmax=1, extent=_extent(image_HWC))
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=9)


def _colours(image_HWC: Array) -> Array:
    return image_HWC[..., : 3 if image_HWC.shape[2] >= 3 else 1]


def _extent(image_HWC: Array) -> tuple[float, float, float, float]:
    height, width = image_HWC.shape[:2]
    return (0, width, height, 0)


def _enlarged(image_HWC: Array) -> Array:
    """Repeat pixels until the smaller side has 224, so that heatmaps over small images are smooth."""
    times = -(-MIN_SIDE // min(image_HWC.shape[:2]))
    return image_HWC.repeat(times, axis=0).repeat(times, axis=1)


def _to_size(heat_HW: Array, size: tuple[int, ...]) -> Array:
    """Resize bilinearly, so that a coarse grid gives a smooth heatmap."""
    import torch

    heat = torch.as_tensor(heat_HW, dtype=torch.float64)[None, None]
    scaled: Array = torch.nn.functional.interpolate(heat, size=size, mode="bilinear", align_corners=False)[0, 0].numpy()
    return scaled


def similarities(matrices: Sequence[tuple[str, str, Array]]) -> Figure:
    """Draw matrices of similarities in [0, 1] side by side, each with the names of its rows and columns."""
    figure = Figure(figsize=(3.1 * len(matrices) + 0.8, 3.4), layout="constrained")
    axes = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axis, (rows, columns, values_LM) in zip(axes, matrices, strict=True):
        depth, width = values_LM.shape
        extent = (0.5, width + 0.5, 0.5, depth + 0.5)
        image = axis.imshow(values_LM, cmap=HEADS, vmin=0, vmax=1, origin="lower", extent=extent, aspect="auto")
        axis.set_ylabel(f"block of {textwrap.shorten(rows, MAX_AXIS_CHARACTERS)}", fontsize=8)
        axis.set_xlabel(f"block of {textwrap.shorten(columns, MAX_AXIS_CHARACTERS)}", fontsize=8)
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, shrink=0.8, label="CKA")
    return figure
