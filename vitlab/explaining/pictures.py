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
TOLERANCE = 0.05  #: largest relative error of an attribution's sum of patches
ROUNDING = 1e-5  #: largest absolute error, of logits in float32
RANDOM = 16  #: choices of random patches, beside which a map's largest patches are hidden
MOST = 0.75  #: part of a probability: a plain image that keeps it, or random patches that take it, are noted
FAINT = 0.25  #: part of a scale, below which a map that has no larger value is noted as faint
COLUMNS = 5  #: at most, of pictures in a row of a comparison

Kind = Literal["rollout", "attribution", "heads", "distance", "norms"]
"""What numbers are: of patches the shares of attention, over all blocks or of a head, or the parts of a class's logit;
the distances of heads; the norms of tokens."""


class Scale(NamedTuple):
    """The range of numbers, and their colours: of parts of a logit, which have a sign, around 0, of others from 0."""

    low: float
    high: float

    @classmethod
    def of(cls, kind: Kind, arrays: Iterable[Array]) -> Scale:
        """Return one scale for all finite numbers of a kind."""
        high = max([1e-12, *(float(np.abs(values).max(initial=0, where=np.isfinite(values))) for values in arrays)])
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
        """Return a number as text: a share in percent, or a part of a logit to three digits."""
        return f"{value:+#.3g}".rstrip(".") if self.low else percent(value)


def sums_differ(numbers: Mapping[str, Any]) -> bool:
    """Return whether an attribution's sum of patches is not the difference of the logits, which it approximates."""
    total, difference = numbers["sum"], numbers["logit_difference"]
    return bool(abs(total - difference) > TOLERANCE * abs(difference) + ROUNDING)


class Map(NamedTuple):
    """Numbers over the grid of patches."""

    kind: Kind
    title: str
    values_YX: Array
    numbers: Mapping[str, Any]  #: by their names, as ``maps.csv`` and JSON have them
    scale: Scale

    @classmethod
    def of(cls, kind: Kind, title: str, values_YX: Array, numbers: Mapping[str, Any]) -> Map:
        """Return a map with a scale of its own."""
        return cls(kind, title, values_YX, numbers, Scale.of(kind, [values_YX]))

    @property
    def facts(self) -> dict[str, str]:
        """The numbers as lines of text below the map, and a note if a shared scale leaves little of it to see."""
        lines, number = dict[str, str](), self.numbers
        if "largest_share" in number:
            largest = number["largest_share"]
            lines["largest share"] = f"{percent(largest)}, {largest / number['mean_share']:.1f} x the mean"
        if "sum" in number:
            lines["sum of all patches"] = self.scale.format(number["sum"])
            lines["difference of the logits"] = self.scale.format(number["logit_difference"])
            if sums_differ(number):
                lines["sum"] = f"failed: off by more than {percent(TOLERANCE)}"
        if "probability" in number:
            mean, lowest, highest = (100 * number[f"without_random_{of}"] for of in ("mean", "lowest", "highest"))
            whole, plain = number["probability"], number["plain_probability"]
            lines[f"probability of class {number['class']}"] = percent(whole)
            remark = ", more than here" if plain > whole else ", most of it" * (plain > MOST * whole)
            lines["on a plain image"] = percent(plain) + remark
            if count := number["patches_removed"]:
                lines[f"without its {count} largest patches"] = percent(number["without_largest"])
                lines[f"without {count} random ones"] = f"{mean:.1f} % ({lowest:.1f} to {highest:.1f})"
                remark = "; these take most of the probability, too" * (whole - mean / 100 > MOST * whole)
                if whole - number["without_largest"] < 0.01:
                    remark = "; the probability does not fall by a point"
                lines["check"] = f"below {number['random_above']} of {RANDOM} random choices{remark}"
            else:
                lines["check"] = "none: too few patches"
        if Scale.of(self.kind, [self.values_YX]).high < FAINT * self.scale.high:
            lines["colours"] = "faint on the common scale; --scale own shows them"
        return lines


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


def render_map(one: Map, size: tuple[int, int], resample: Image.Resampling = Image.Resampling.NEAREST) -> Image.Image:
    """Return a map as an RGB picture of a width and a height."""
    low, high = one.scale
    share_YX = ((one.values_YX - low) / (high - low)).astype(np.float32)
    share_HW = np.asarray(Image.fromarray(share_YX).resize(size, resample))
    return Image.fromarray(np.ascontiguousarray(one.scale.colours(share_HW, bytes=True)[..., :3]))


def overlay(image_HWC: Array, one: Map) -> Image.Image:
    """Return :func:`to_picture` below :func:`render_map`, which is interpolated bilinearly and has ``OPACITY``.

    Every value stands in the centre of its patch.
    """
    picture = to_picture(image_HWC)
    return Image.blend(picture, render_map(one, picture.size, Image.Resampling.BILINEAR), OPACITY)


def pixels_right(predicted_HW: Labels, truth_HW: Labels | None) -> str:
    """Return the share of pixels with the right class, of those with a label; empty if there are none to compare."""
    if truth_HW is None or predicted_HW.shape != truth_HW.shape or (truth_HW == IGNORED).all():
        return ""
    return f"{percent((predicted_HW == truth_HW)[truth_HW != IGNORED].mean())} of the pixels right"


class Panel(NamedTuple):
    """A model in a figure of several."""

    image_HWC: Array  #: in [0, 1], as the model reads it
    map: Map
    answer: str  #: its prediction; empty if it has none
    is_wrong: bool  #: whether the prediction is known to be wrong, which is drawn in red


def draw_models_side_by_side(models: Mapping[str, Panel], *, truth: str | None) -> Figure:
    """Draw the image, and beside it the map of each model over it, with the model's name and its prediction.

    Args:
        models: name, which may be empty, to panel; the facts of each map are written below it.
        truth: the true label; None where it is not known.
    """
    figure, (first, *others) = _make_subplots(len(models) + 1)
    picture = to_picture(next(iter(models.values())).image_HWC)
    titles = {panel.map.title for panel in models.values()}
    _show_picture(first, picture, "image" if truth is None else f"image: {truth}")
    for axis, (name, panel) in zip(others, models.items(), strict=True):
        facts = "\n".join(f"{fact}: {number}" for fact, number in panel.map.facts.items())
        shown = overlay(panel.image_HWC, panel.map)
        own = f"\n{panel.map.title}" * (len(titles) > 1)  # each model may have a class of its own
        _show_picture(axis, shown, f"{name}\n{panel.answer}{own}".lstrip(), facts, ALARM if panel.is_wrong else INK)
    if len(scales := {panel.map.scale for panel in models.values()}) == 1:
        _add_colorbar(figure, [first, *others], scales.pop(), [panel.map.values_YX for panel in models.values()])
    if len(titles) == 1:
        figure.suptitle(titles.pop(), fontsize=10, wrap=True)
    return figure


def draw_label_maps(
    image_HWC: Array, predicted: Mapping[str, Labels], labels: Sequence[str], truth_HW: Labels | None
) -> Figure:
    """Draw the image, its true labels, and the predicted labels of each model, with the share of right pixels.

    Args:
        image_HWC: in [0, 1].
        predicted: model to the class of every pixel; models may differ in the size of the image that they read.
        labels: names of the classes.
        truth_HW: the true class of every pixel, those without a label as :data:`~vitlab.data.pixels.IGNORED`; None
            where it is not known.
    """
    maps = {**({} if truth_HW is None else {"true labels": truth_HW}), **predicted}
    classes = sorted({int(label) for map_HW in maps.values() for label in np.unique(map_HW)} - {IGNORED})
    # Of 20 colours every second is dark: these come first, so that few classes are easy to tell apart.
    colours = colormaps["tab20"]([*range(0, 20, 2), *range(1, 20, 2)])[:, :3]
    colour_of = {label: colours[index % len(colours)] for index, label in enumerate(classes)}
    figure, (first, *others) = _make_subplots(len(maps) + 1)
    _show_picture(first, to_picture(image_HWC), "image")
    for axis, (name, map_HW) in zip(others, maps.items(), strict=True):
        picture_HWC = np.ones((*map_HW.shape, 3))  # pixels without a label stay white
        for label, colour in colour_of.items():
            picture_HWC[map_HW == label] = colour
        below = pixels_right(map_HW, truth_HW) if name in predicted else ""
        _show_picture(axis, to_picture(picture_HWC), name, below)
    patches = [Patch(color=colour_of[label], label=labels[label]) for label in classes]
    figure.legend(handles=patches, loc="outside right center", frameon=False, fontsize=8)
    return figure


def percent(share: float) -> str:
    """Return a share in percent, such as ``3.4 %``."""
    return f"{100 * share:.1f} %"


def add_caption(figure: Figure, text: str) -> None:
    """Write a line under a figure, wrapped to the figure's width."""
    figure.supxlabel(text, fontsize=7, color=GREY, wrap=True)


def draw_head_maps(maps_LHYX: Array, scale: Scale, *, query: str) -> Figure:
    """Draw the attention of a query, a row for each block and a column for each head."""
    figure, axis = _draw_picture_grid(maps_LHYX, 1.2, scale, "inferno")
    axis.set(xlabel="head", ylabel="block")
    _add_colorbar(figure, axis, scale, [maps_LHYX])
    figure.suptitle(f"attention of the {query}", fontsize=10, wrap=True)
    return figure


def draw_distances(distance_LH: Array, scale: Scale, *, uniform: float) -> Figure:
    """Draw the mean attention distance of every head against depth, and the distance of uniform attention."""
    figure, axis = _new_plot("block", "mean attention distance, pixels")
    depth = np.arange(1, len(distance_LH) + 1)
    axis.plot(depth, distance_LH, "o", ms=4, color=SERIES[0], alpha=0.6)
    axis.plot(depth, distance_LH.mean(1), "_-", ms=12, color=INK, lw=1.5, label="mean of the heads")
    axis.axhline(uniform, color=GREY, ls="--", lw=1, label="uniform attention")
    axis.set(ylim=(0, 1.05 * scale.high), xticks=depth)
    axis.legend(frameon=False, fontsize=8)
    return figure


def draw_position_grids(similarity_YXYX: Array) -> Figure:
    """Draw, for each patch, the cosine similarity of its position with all others."""
    figure, axis = _draw_picture_grid(similarity_YXYX, 0.75, Scale(-1.0, 1.0), "viridis")
    axis.set(xlabel="column of the patch", ylabel="row of the patch")
    figure.colorbar(axis.images[0], ax=axis, label="cosine similarity", shrink=0.8)
    figure.suptitle("similarity of positions", fontsize=10)
    return figure


def draw_norm_ratios(ratio_L: Array, scale: Scale) -> Figure:
    """Draw the largest norm of patch tokens over the median by depth; depth 0 is before the first block."""
    figure, axis = _new_plot("depth, blocks", "norm of patch tokens,\nlargest over median")
    axis.plot(ratio_L, "o-", ms=4)
    axis.set_ylim(1, 1 + 1.05 * max(0.1, scale.high - 1))
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


def _draw_picture_grid(tiles_RCYX: Array, width: float, scale: Scale, colours: str) -> tuple[Figure, Any]:
    """Return a figure of rows and columns of pictures of a width in inches, and its one axis: many would take long."""
    rows, columns, height, length = tiles_RCYX.shape
    apart_RCYX = np.pad(tiles_RCYX, [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=np.nan)
    shown_YX = apart_RCYX.transpose(0, 2, 1, 3).reshape(rows * (height + 1), -1)
    aspect, left, top = (height + 1) / (length + 1), 0.5 + 0.5 / (length + 1), 0.5 + 0.5 / (height + 1)
    figure = _new_figure(width * columns + 1.5, max(2.0, width * rows * aspect) + 1)
    axis = figure.subplots(subplot_kw={"xticks": range(1, columns + 1), "yticks": range(1, rows + 1)})
    edges = (left, left + columns, top + rows, top)
    axis.imshow(shown_YX, colours, aspect=aspect, vmin=scale.low, vmax=scale.high, extent=edges)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return figure, axis


def _make_subplots(count: int) -> tuple[Figure, list[Any]]:
    """Return a figure of some pictures in the fewest rows, as even as possible, and their axes."""
    rows = -(-count // COLUMNS)
    columns = -(-count // rows)
    figure = _new_figure(2.7 * columns + 1, 4.5 * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, list(axes[:count])


def _show_picture(axis: Any, picture: Image.Image, title: str, below: str = "", colour: str = INK) -> None:
    axis.imshow(np.asarray(picture))
    axis.set(xticks=[], yticks=[])
    axis.set_title(_wrap_lines(title, 34), fontsize=9, color=colour)
    axis.set_xlabel(_wrap_lines(below, 46), fontsize=7.5)


def _wrap_lines(text: str, width: int) -> str:
    return "\n".join(
        textwrap.fill(line.replace(" %", "\N{NO-BREAK SPACE}%"), width, break_on_hyphens=False)
        for line in text.splitlines()
    )


def _add_colorbar(figure: Figure, axes: Any, scale: Scale, shown: Iterable[Array]) -> None:
    """Add the scale of the colours of maps beside some axes, of shares with a mark at the mean of each map."""
    colours = ScalarMappable(Normalize(scale.low, scale.high), scale.colours)
    ticks = None if scale.low else PercentFormatter(1, symbol=" %")
    bar = figure.colorbar(colours, ax=axes, shrink=0.7, format=ticks)
    bar.set_label("part of the logit", fontsize=8)
    if not scale.low:
        beside, mark = bar.ax.get_yaxis_transform(), "\N{BLACK RIGHT-POINTING TRIANGLE}"
        for values in shown:
            bar.ax.text(-0.1, values.mean(), mark, fontsize=7, ha="right", va="center", transform=beside)
        bar.set_label("share of the attention\nmark: mean", fontsize=8)
