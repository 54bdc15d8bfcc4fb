"""The report as a page: one file without scripts or anything fetched."""

from __future__ import annotations

import base64
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vitlab.explaining.colours import SERIES
from vitlab.report import phrasing
from vitlab.report.drawing import stacked_panels_svg, svg_to_element
from vitlab.report.phrasing import DASH, Column, Columns, Row, Scale, format_duration
from vitlab.report.sections import Section, all_sections

if TYPE_CHECKING:
    from jinja2 import Template

    from vitlab.report.report import Report

_NOT_IN_HTML = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def render_page(report: Report) -> str:
    """Return the page; figures are inline."""
    others, folded = phrasing.merge_unclear_answers(report)
    parts = [_section_context(report, name, part) for name, part in all_sections().items()]
    values = {
        "report": report,
        "answers": [*others[: phrasing.OVERVIEW_FROM], *folded],
        "parts": [part for part in parts if part["table"] or part["figure"] or part["images"]],
        "trials": trial_columns(report.trials, report.units),
    }
    return fill_template("report.html.j2", values)


def fill_template(name: str, values: Mapping[str, object]) -> str:
    """Return the page of a template in this package; every text is escaped."""
    # Other values are numbers and HTML, of which the type is Markup.
    template = read_template(
        name, autoescape=True, finalize=lambda value: phrasing.keep_together(value) if type(value) is str else value
    )
    text = template.render(values, series=SERIES)
    # What is invalid in HTML, or changes the direction of the text around it.
    return _NOT_IN_HTML.sub("\N{REPLACEMENT CHARACTER}", text)


def read_template(name: str, **options: Any) -> Template:
    """Return a template of this package, in an environment with these options."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("vitlab", "report")
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, **options).get_template(name)


def png_address(png: bytes) -> str:
    """Return the address of a PNG that is part of its page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def trial_columns(rows: Sequence[Row], units: Mapping[str, str]) -> list[Column]:
    """Return the table of trials: a selection of the columns of results.csv."""
    column = Columns(rows)
    table = [
        column.text_column("arm"),
        column("seed", lambda row: str(row["seed"])),
        column.text_column("status"),
        column.text_column("failure", "failure_kind"),
    ]
    names = [*rows[0]] if rows else []
    judged = re.sub(".*/|@.*", "", "".join(names[-1:]))  # the last column is the judged metric
    for metric in dict.fromkeys(names[-1:] + [name for name in names if name in (f"val/{judged}", f"test/{judged}")]):
        scale = Scale.of(metric, units)
        decimals = scale.decimals_for_values([row[metric] for row in rows], 2, 4)
        table.append(Column(scale.title, tuple(scale.number(row[metric], decimals) for row in rows)))
    table += [
        column("time", lambda row: DASH if row["wall_s"] is None else format_duration(row["wall_s"])),
        column("trial", lambda row: row["trial"][:12], right=False),
    ]
    return [one for one in table if one.title != "failure" or any(one.cells)]


def _section_context(report: Report, name: str, part: Section[Any]) -> Mapping[str, object]:
    from markupsafe import Markup

    # A stored report has no rows of sections that store none, such as the arms.
    rows = report.sections.get(name, ())
    drawing = report.figures.get(name)
    images = defaultdict[str, list[tuple[str, str]]](list)
    store = report.findings and report.findings.store
    for image in part.images(rows, store) if store else ():
        with suppress(OSError):  # deleted since; the page omits it
            images[image.heading].append((png_address(image.file.read_bytes()), image.caption))
    return {
        "name": name,
        "section": part,
        "table": report.table(name),
        "figure": drawing and Markup(svg_to_element(drawing.svg, name, drawing.caption)),
        "panels": drawing and Markup(stacked_panels_svg(drawing, name)),
        "drawing": drawing,
        "images": images,
    }
