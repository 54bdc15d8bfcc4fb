"""Pictures of a model's attention and parameters: figures by matplotlib, and the pictures of a page by Pillow.

Every function takes numbers, which are computed elsewhere.

C channels, H and W pixels, Y and X rows and columns of patches.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.pixels import IGNORED
from vitlab.explaining.colours import ALARM, GREY, INK, SERIES

Array = NDArray[np.floating[Any]]
Labels = NDArray[np.int64]

SIDE = 360  #: most pixels of a side of a picture of a page
OPACITY = 0.6  #: of a map over an image
HEADS = "viridis"
TRUE, PREDICTED = SERIES[2], SERIES[0]  #: colours of the true class and of others
COLUMNS = 5  #: at most, of pictures in a row of a comparison

Kind = Literal["rollout", "attribution", "heads"]
"""What the numbers of patches are: shares of attention, over all blocks or of a head, or parts of a class's logit."""


class Scale(NamedTuple):
    """The colours of numbers of patches: of shares from 0, of parts of a logit, which have a sign, around 0."""

    low: float
    high: float

    @classmethod
    def of(cls, kind: Kind, arrays: Iterable[Array]) -> Scale:
        """Return one scale for all numbers of a kind."""
        high = max(1e-12, *(float(np.abs(values).max()) for values in arrays))
        return cls(-high if kind == "attribution" else 0.0, high)

    @property
    def colours(self) -> Colormap:
        """The colours from ``low`` to ``high``."""
        return colormaps["RdBu_r" if self.low else "inferno"]

    @property
    def steps(self) -> list[str]:
        """Some of the colours, for a page."""
        return [to_hex(self.colours(share / 8)) for share in range(9)]

    def format(self, value: float) -> str:
        """Return a number as text: a share in percent, or a part of a logit."""
        return f"{value:+.3g}" if self.low else percent(value)


class Map(NamedTuple):
    """Numbers over the grid of patches."""

    kind: Kind
    title: str
    values_YX: Array
    note: str  #: written below it
    scale: Scale

    @classmethod
    def of(cls, kind: Kind, title: str, values_YX: Array, note: str) -> Map:
        """Return a map with a scale of its own."""
        return cls(kind, title, values_YX, note, Scale.of(kind, [values_YX]))


def to_picture(image_HWC: Array) -> Image.Image:
    """Return an image in [0, 1] as an RGB picture of at most ``SIDE`` pixels a side; small pixels become squares.

    Of more than three channels the first three are shown, of two the first.
    """
    colour_HWC = image_HWC[..., :3] if image_HWC.shape[2] >= 3 else image_HWC[..., :1].repeat(3, axis=2)
    picture = Image.fromarray(np.rint(colour_HWC * 255).astype(np.uint8))
    factor = SIDE // max(picture.size)
    if factor:
        return picture.resize((factor * picture.width, factor * picture.height), Image.Resampling.NEAREST)
    picture.thumbnail((SIDE, SIDE))
    return picture


def to_map(one: Map, size: tuple[int, int], how: Image.Resampling = Image.Resampling.NEAREST) -> Image.Image:
    """Return a map as an RGB picture of a width and a height."""
    low, high = one.scale
    share_YX = ((one.values_YX - low) / (high - low)).astype(np.float32)
    share_HW = np.asarray(Image.fromarray(share_YX).resize(size, how))
    return Image.fromarray(np.ascontiguousarray(one.scale.colours(share_HW, bytes=True)[..., :3]))


def overlay(image_HWC: Array, one: Map) -> Image.Image:
    """Return :func:`to_picture` below :func:`to_map`, which is interpolated bilinearly and has ``OPACITY``.

    Every value stands in the centre of its patch.
    """
    picture = to_picture(image_HWC)
    return Image.blend(picture, to_map(one, picture.size, Image.Resampling.BILINEAR), OPACITY)


def share_right(predicted_HW: Labels, truth_HW: Labels | None) -> float | None:
    """Return the share of pixels with the right class, of those with a label; None if there are none to compare."""
    if truth_HW is None or predicted_HW.shape != truth_HW.shape or (truth_HW == IGNORED).all():
        return None
    return float((predicted_HW == truth_HW)[truth_HW != IGNORED].mean())


def one_map(image_HWC: Array, one: Map, *, predictions: Sequence[tuple[str, float]], truth: str | None) -> Figure:
    """Draw the image, a map, the map over the image, and the top predictions.

    Args:
        image_HWC: in [0, 1], see :func:`to_picture`.
        one: the map.
        predictions: label and probability, best first; none are drawn if it is empty.
        truth: the true label, marked among the predictions; None where it is not known.
    """
    widths = [1, 1, 1, *([0.9] if predictions else [])]
    figure = _new_figure(11.5 * sum(widths) / 3.9, 3.3)
    axes = figure.subplots(1, len(widths), width_ratios=widths)
    picture = to_picture(image_HWC)
    over = overlay(image_HWC, one)
    shown = {"image": picture, one.title: to_map(one, picture.size), "map over the image": over}
    for axis, (name, each) in zip(axes, shown.items(), strict=False):
        _show_picture(axis, each, name)
    axes[1].set_xlabel(textwrap.fill(one.note, 32), fontsize=8)
    _add_scale(figure, axes[1], one.scale)
    for bars in axes[3:]:
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


class Panel(NamedTuple):
    """A model in a figure of several."""

    image_HWC: Array  #: in [0, 1], as the model reads it
    map: Map
    answer: str  #: its prediction; empty if it has none
    is_wrong: bool  #: whether the prediction is known to be wrong, which is drawn in red


def side_by_side(models: Mapping[str, Panel], *, truth: str | None) -> Figure:
    """Draw the image, and beside it the map of each model over it, with the model's name and its prediction.

    Args:
        models: name to panel, all of one kind; the note of each map is written below it.
        truth: the true label; None where it is not known.
    """
    figure, (first, *others) = _panels(len(models) + 1)
    shown = next(iter(models.values()))
    picture = to_picture(shown.image_HWC)
    _show_picture(first, picture, "image" if truth is None else f"image: {truth}")
    for axis, (name, panel) in zip(others, models.items(), strict=True):
        _show_picture(axis, overlay(panel.image_HWC, panel.map), name)
        lines = [panel.answer, textwrap.fill(panel.map.note, 32)]
        axis.set_xlabel("\n".join(filter(None, lines)), fontsize=8, color=ALARM if panel.is_wrong else INK)
    if len(scales := {panel.map.scale for panel in models.values()}) == 1:
        _add_scale(figure, [first, *others], scales.pop())
    figure.suptitle(shown.map.title, fontsize=10)
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
    _show_picture(first, to_picture(image_HWC), "image")
    for axis, (name, map_HW) in zip(others, maps.items(), strict=True):
        picture_HWC = np.ones((*map_HW.shape, 3))  # pixels without a label stay white
        for label, colour in colour_of.items():
            picture_HWC[map_HW == label] = colour
        _show_picture(axis, to_picture(picture_HWC), name)
        if name in predicted and (share := share_right(map_HW, truth_HW)) is not None:
            axis.set_xlabel(f"{percent(share)} of the pixels right", fontsize=8)
    patches = [Patch(color=colour_of[label], label=labels[label] if labels else str(label)) for label in classes]
    figure.legend(handles=patches, loc="outside right center", frameon=False, fontsize=8)
    return figure


def percent(share: float) -> str:
    """Return a share in percent, such as ``3.4 %``."""
    return f"{100 * share:.1f} %"


def add_caption(figure: Figure, text: str) -> None:
    """Write a line under a figure, wrapped to the figure's width."""
    width = max(24, int(figure.get_figwidth() * 15))
    figure.supxlabel("\n".join(textwrap.wrap(text, width)), fontsize=7, color=GREY)


def head_maps(maps_LHYX: Array, scale: Scale | None, *, query: str) -> Figure:
    """Draw the attention of a query, a row for each block and a column for each head; without a scale, each its own."""
    figure, axes = _tiles(len(maps_LHYX), maps_LHYX.shape[1], 1.2, 1.25)
    for (block, head), axis in np.ndenumerate(axes):
        low, high = (None, None) if scale is None else (0, scale.high)
        axis.imshow(maps_LHYX[block, head], cmap="inferno", vmin=low, vmax=high)
    for head, axis in enumerate(axes[0]):
        axis.set_title(f"head {head + 1}", fontsize=8)
    for block, axis in enumerate(axes[:, 0]):
        axis.set_ylabel(f"block {block + 1}", fontsize=8)
    own = ", each map on its own scale"
    figure.suptitle(f"attention of the {query}{own if scale is None else ''}", fontsize=10, wrap=True)
    if scale is not None:
        _add_scale(figure, axes, scale)
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


def norms(ratio_L: Array) -> Figure:
    """Draw the largest norm of patch tokens over the median by depth; depth 0 is before the first block."""
    figure, axis = _new_plot("depth, blocks", "norm of patch tokens,\nlargest over median")
    axis.plot(ratio_L, "o-", ms=4)
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


def _show_picture(axis: Any, picture: Image.Image, title: str) -> None:
    axis.imshow(np.asarray(picture))
    axis.set(xticks=[], yticks=[])
    axis.set_title("\n".join(textwrap.wrap(title, 28)), fontsize=9)


def _add_scale(figure: Figure, axes: Any, scale: Scale) -> None:
    """Add the scale of the colours of maps beside some axes."""
    colours = ScalarMappable(Normalize(scale.low, scale.high), scale.colours)
    label = "part of the logit" if scale.low else "share of the attention"
    ticks = None if scale.low else PercentFormatter(1, symbol=" %")
    bar = figure.colorbar(colours, ax=axes, shrink=0.7, format=ticks)
    bar.set_label(label, fontsize=8)
