"""The style of the report's figures, the labels of arms in them, and figures as files and as elements of a page.

Figures are drawn without pyplot, which shares global state.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from typing import TYPE_CHECKING

from vitlab.errors import one_line
from vitlab.explaining.colours import BETTER, GREY, INK, PAPER, RULE, SERIES, WORSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VARIABLES = {INK: "ink", GREY: "grey", RULE: "rule", PAPER: "paper", BETTER: "better", WORSE: "worse"} | {
    colour: f"series-{index}" for index, colour in enumerate(SERIES)
}
"""Colour to its CSS variable in a page, which has a light and a dark theme."""
WIDTH = 7.2  #: inches: a picture as wide as a page
NARROW = WIDTH / 2  #: as wide as a phone, or a column of a paper
MAX_LINES = 4  #: most lines of a label; a longer one is cut
_PART = re.compile(r"\S+?(?:[=,_/]|[-.](?!\d)|$)")
"""Part of a word, such as an arm's name, after which it may go on in the next line."""

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
    "axes.titlesize": 8.0,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 1.4,
    "figure.labelsize": 9.0,
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
    "text.hinting": "none",  # text is measured as wide as SVG and PDF have it, whatever the resolution
    "svg.fonttype": "none",
    "svg.hashsalt": "vitlab",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption."""

    figure: Figure
    caption: str

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG file whose text is text; equal figures are equal files."""
        return _save(self.figure, "svg", "Date").decode()


def empty_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches; its axes have the style it is made in, see :func:`apply_style`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    # A notebook shows other figures only once pyplot has been used there.  A class of its own could not be pickled.
    figure._repr_png_ = partial(render_png, figure, dpi=100)  # type: ignore[attr-defined]
    return figure


def render_png(figure: Figure, dpi: float = 200) -> bytes:
    """Return the figure as a PNG on white; a very tall one is coarser, because a PNG has less than 65,536 rows."""
    return _save(figure, "png", "Software", dpi=min(dpi, 30_000 / figure.get_figheight()))


def render_pdf(figure: Figure) -> bytes:
    """Return the figure as a PDF whose text is text; equal figures are equal files."""
    return _save(figure, "pdf", "CreationDate", "Creator")


def _save(figure: Figure, format: str, *left_out: str, dpi: float = 100) -> bytes:
    """Return the figure in a format, on white but for SVG, without some facts of a file of it."""
    with apply_style(), io.BytesIO() as file:
        colour = PAPER if format == "svg" else "white"
        figure.savefig(file, format=format, dpi=dpi, facecolor=colour, metadata=dict.fromkeys(left_out))
        return file.getvalue()


def svg_to_element(svg: str, id_prefix: str, alt_text: str) -> str:
    """Convert the SVG of a :class:`Drawing` to an element of a page, in the page's colours (``var(--ink)``, ...).

    The name, unique in the page, stands before identifiers; the alternative is for readers who do not see the figure.
    """
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL).replace(
        'id="figure_1"', 'id="figure"'
    )
    return re.sub(r"<[^>]+>", lambda tag: _adapt_svg_tag(tag[0], id_prefix, alt_text), svg)


def stacked_panels_svg(drawing: Drawing, name: str) -> str:
    """Return two panels of a figure as elements that show parts of its element in a page, for narrow screens.

    The second panel has the labels of the first one on its left.  Empty for any other figure.  The SVG of the figure
    comes first, since that lays out its panels.
    """
    figure, points = drawing.figure, 72 / drawing.figure.dpi
    first, second = figure.axes if len(figure.axes) == 2 else (None, None)
    # No panel would show a text or a legend of the figure.
    if not first or not second or first.bbox.x1 > second.bbox.x0 or figure.legends or figure.texts:
        return ""
    with apply_style():
        box = second.get_tightbbox()
    assert box is not None
    width, height = (72 * size for size in figure.get_size_inches())
    left, start = points * first.bbox.x0 - 1, points * box.x0 - 1

    def view(at: float, x0: float, x1: float, y1: float) -> str:
        box = f'x="{at:.1f}" width="{x1 - x0:.1f}" height="{y1:.1f}" viewBox="{x0:.1f} 0 {x1 - x0:.1f} {y1:.1f}"'
        return f'<svg {box}><use href="#{name}-figure"/></svg>'

    labels = view(0.0, 0.0, left, height - points * first.bbox.y0)
    panels = {start: view(0.0, 0.0, start, height), left + width - start: labels + view(left, start, width, height)}
    elements = (
        f'<svg viewBox="0 0 {size:.1f} {height:.1f}" style="max-width: {1.4 * size:.0f}px">{inside}</svg>'
        for size, inside in panels.items()
    )
    return f'<div class="panels" aria-hidden="true">{"".join(elements)}</div>'


def format_ticks_without_exponents(axes: Axes) -> None:
    """Format sizes as ``1.2 M`` and other numbers without mathematical exponents, on linear and logarithmic axes."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())


@contextmanager
def apply_style() -> Iterator[None]:
    """Apply the style of the report's figures."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        # Names of arms may use scripts that the font lacks; the picture then shows boxes, without a warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _adapt_svg_tag(tag: str, id_prefix: str, alt_text: str) -> str:
    """Adapt a tag of matplotlib's SVG to a page, which sets colours and width."""
    tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag)
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)  # hundredths of a point
    if size := re.match(r'<svg width="([\d.]+)pt" height="[^"]*"', tag):
        # As a share of the width of a page, so that text has the same size in all pictures.
        share = float(size[1]) / (72 * WIDTH)
        label = escape(alt_text, quote=True)
        narrow = ' class="narrow"' * (float(size[1]) <= 72 * NARROW)
        tag = f'<svg role="img"{narrow} aria-label="{label}" style="--share: {share:.3g}"{tag[size.end() :]}'
    # Lines of one label stand where the font of the figure puts them; Verdana is as wide.
    tag = re.sub(r"font-family: [^;\"]*", "font-family: 'DejaVu Sans', Verdana, sans-serif", tag)
    tag = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{id_prefix}-", tag)  # unique among the pictures of a page
    for colour, variable in VARIABLES.items():
        tag = tag.replace(colour, f"var(--{variable})")
    return tag


def split_name_at_commas(name: str) -> tuple[str, ...]:
    """Split an arm's name at its commas, except within brackets."""
    parts, depth, current = [], 0, ""
    for char in one_line(name):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return tuple(part for part in (*parts, current.strip()) if part)


def _shared_name_parts(names: Collection[str]) -> list[str]:
    """Return the parts that all of several names share."""
    first, *others = map(split_name_at_commas, names) if len(names) > 1 else [()]
    return [part for part in first if all(part in other for other in others)]


def short_labels(names: Collection[str]) -> dict[str, str]:
    """Return each name on one line, without the parts of :func:`describe_shared_name_parts`."""
    shared, labels = _shared_name_parts(names), {}
    for name in names:
        own_parts = [part for part in split_name_at_commas(name) if part not in shared]
        labels[name] = ", ".join(own_parts) if shared and own_parts else one_line(name)
    return _number_duplicates(labels)


def describe_shared_name_parts(names: Collection[str]) -> str:
    """Return a sentence for a caption with the parts that :func:`short_labels` leaves out; empty if there are none."""
    shared = _shared_name_parts(names)
    return f" All with {', '.join(shared)}." if shared else ""


def wrapped_labels(names: Sequence[str], width: int) -> dict[str, str]:
    """Return :func:`short_labels` in lines of at most ``width`` characters; of a long one the first lines."""
    return _number_duplicates({name: wrap_line(label, width) for name, label in short_labels(names).items()})


def wrap_line(text: str, width: int) -> str:
    """Return a text in lines of at most ``width`` characters; of a long one the first lines."""
    return textwrap.fill(wrap_words(text, width), width, max_lines=MAX_LINES, placeholder="...")


def wrap_words(text: str, width: int) -> str:
    """Return a text in lines of at most ``width`` characters; only between its parts is a longer word broken."""
    lines = []
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        lines.append("")
        for part in _PART.findall(line) if len(line) > width else [line]:
            if lines[-1] and len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(lines)


def _number_duplicates(labels: Mapping[str, str]) -> dict[str, str]:
    """Append a number to labels that occur more than once."""
    counts = Counter(labels.values())
    return {
        name: f"{label} #{index}" if counts[label] > 1 else label
        for index, (name, label) in enumerate(labels.items(), 1)
    }
