"""Renderings of a report: terminal, Markdown, HTML, LaTeX, JSON, CSV, Parquet."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.errors import UserError, nearest
from vitlab.plan.palette import SERIES
from vitlab.plan.values import Plan
from vitlab.plan.versions import folder_of
from vitlab.report import attention_pictures, phrasing, tables
from vitlab.report.document import document, provenance_lines, state
from vitlab.report.escaping import csv_cell, markdown, printable, valid_html
from vitlab.report.latex import latex_table, latex_tables
from vitlab.report.phrasing import Column
from vitlab.report.verdict import Verdict
from vitlab.spec import Analysis
from vitlab.store.files import read_json, write_bytes
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from vitlab.report.between import Between

FILES = {
    "md": "report.md",
    "html": "report.html",
    "latex": "report.tex",
    "json": "report.json",
    "csv": "results.csv",
    "parquet": "results.parquet",
}
"""File names of the formats in the study's folder."""
FORMATS = ("terminal", *FILES, "latex-all")
SECONDARY = 4  #: from this rank on, columns of the table of arms are folded in a page
FOLDED_FROM = 40  #: from this number of arms on, their picture is folded in a page


@dataclass(frozen=True)
class Content:
    """The content of a report, which all formats share."""

    plan: Plan
    store: Store
    doc: Mapping[str, Any]
    results: pd.DataFrame
    history: pd.DataFrame

    def figures(self) -> dict[str, tuple[Figure, Figure]]:
        """Return every figure twice, as wide as a page and as wide as a phone."""
        from vitlab.report.drawing import NARROW, WIDE
        from vitlab.report.figures import figures

        data = self.plan, self.results, self.doc["arms"], self.history, self.doc["cost"]
        wide, narrow = (figures(*data, width=width) for width in (WIDE, NARROW))
        return {name: (figure, narrow[name]) for name, figure in wide.items()}

    def render(self, format: str) -> str | bytes:
        """Return the report in one format, see :func:`render`."""
        if format in _FROM_DOCUMENT:
            return _FROM_DOCUMENT[format](self.doc)
        if format == "html":
            pictures_by_name = self.figures()
            return _html(self, _svgs(pictures_by_name), _captions(self.plan, pictures_by_name))
        if format == "csv":
            return _csv(self.results)
        from vitlab.report.frame import parquet

        return parquet(self.results)


def render(plan: Plan, store: Store, format: str) -> str | bytes:
    """Render the report of a study in one format; bytes for parquet, otherwise text.

    Args:
        plan: the study.
        store: the output folder.
        format: terminal (fitted to the width of this one), md, html, json, csv, parquet, latex (the arms, in the width
            of a paper) or latex-all (every table with all its columns).

    Raises:
        UserError: if there is no such format.
    """
    _check_format(format)
    return collect(plan, store).render(format)


def collect(plan: Plan, store: Store) -> Content:
    """Return the content of a study's report."""
    from vitlab.report import comparison, frame
    from vitlab.report.image_values import image_values

    at = state(plan, store)
    trials = frame.gather(plan, store)
    results, history = frame.table(plan, trials), frame.curves(trials)
    rows = comparison.summary(results, plan, images=image_values(plan, trials))
    return Content(plan, store, document(plan, store, trials, results, rows, at), results, history)


def render_between(comparison: Between, format: str) -> str:
    """Return the comparison of two studies in one format: terminal, md, latex, latex-all, json or csv."""
    if format != "csv":
        return _FROM_DOCUMENT[format](comparison.document())
    from vitlab.report.comparison import summary_frame

    return _csv(summary_frame(comparison.rows, comparison.plan.analysis))


def read_report(plan: Plan, store: Store, format: str) -> str | bytes | None:
    """Return the report that :func:`write` stored, without pandas; None if it is missing or outdated.

    Raises:
        UserError: if there is no such format.
    """
    _check_format(format)
    folder = folder_of(store.study(plan.study), plan.version) / "report"
    try:
        doc = read_json(folder / FILES["json"])
        if not isinstance(doc, dict) or doc.get("state") != state(plan, store):
            return None
        if format in _FROM_DOCUMENT:  # report.md refers to pictures that lie beside that file only
            return _FROM_DOCUMENT[format](doc)
        data = (folder / FILES[format]).read_bytes()
        return data if format == "parquet" else data.decode()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a damaged file is rendered anew
        return None


def answers(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """Return one sentence per comparison, given the frame of :func:`vitlab.report.frame.results`."""
    from vitlab.report.comparison import summary

    return phrasing.answers(summary(frame, plan), plan.analysis, plan.units)


def warm_up() -> None:
    """Import what a report needs beyond this module, which takes seconds; for a thread of its own."""
    from importlib import import_module

    for kind in ("agg", "pdf", "svg"):
        import_module(f"matplotlib.backends.backend_{kind}")
    for name in ("pandas", "scipy.special", "vitlab.report.comparison", "vitlab.report.figures"):
        import_module(name)


def write(content: Content, folder: Path) -> list[Path]:
    """Write a report into ``folder``: documents, tables and pictures.  Returns the files written.

    Files are ``report.md, report.html, report.tex, report.json, results.csv, results.parquet, history.parquet,
    summary.csv`` and those of :func:`vitlab.report.figures.figures` that have something to show, each as ``.png``,
    ``.pdf`` and ``.svg``.
    """
    from vitlab.report.comparison import summary_frame
    from vitlab.report.drawing import pdf, png
    from vitlab.report.frame import write_parquet

    pictures_by_name = content.figures()
    svgs = _svgs(pictures_by_name)
    for wide, _ in pictures_by_name.values():
        wide.set_layout_engine("none")  # it keeps the layout of the SVG, and takes half the time
    captions_by_name = _captions(content.plan, pictures_by_name)
    texts = {
        FILES["md"]: _markdown(content.doc, captions_by_name),
        FILES["html"]: _html(content, svgs, captions_by_name),
        FILES["latex"]: latex_table(content.doc),
        FILES["csv"]: _csv(content.results),
        "summary.csv": _csv(summary_frame(content.doc["arms"], content.plan.analysis)),
        **{f"{name}.svg": wide for name, (wide, _) in svgs.items()},
    }
    frames = {FILES["parquet"]: content.results, "history.parquet": content.history}
    for name, text in texts.items():
        write_bytes(folder / name, text.encode())
    for name, frame in frames.items():
        write_parquet(frame, folder / name)
    pictures = {f"{name}.png": png(wide) for name, (wide, _) in pictures_by_name.items()}
    pictures |= {f"{name}.pdf": pdf(wide) for name, (wide, _) in pictures_by_name.items()}
    for name, data in pictures.items():
        write_bytes(folder / name, data)
    # Written last, because its state marks the other files as current.
    write_bytes(folder / FILES["json"], _json(content.doc).encode())
    return [folder / name for name in (*texts, *frames, *pictures, FILES["json"])]


def _svgs(figures: Mapping[str, tuple[Figure, Figure]]) -> dict[str, tuple[str, str]]:
    from vitlab.report.drawing import svg

    return {name: (svg(wide, name), svg(narrow, name)) for name, (wide, narrow) in figures.items()}


def _captions(plan: Plan, figures: Mapping[str, tuple[Figure, Figure]]) -> dict[str, str]:
    from vitlab.report.captions import captions

    return captions(plan, {name: wide for name, (wide, _) in figures.items()})


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise UserError(f"no report format '{format}'.{nearest(format, FORMATS)} Formats: {', '.join(FORMATS)}.")


def _columns(doc: Mapping[str, Any]) -> list[Column]:
    return tables.columns(doc["arms"], Analysis.model_validate(doc["analysis"]), doc["units"])


def _direction(doc: Mapping[str, Any]) -> str:
    """Return the sentence that says which direction of the metric is better."""
    analysis = Analysis.model_validate(doc["analysis"])
    return printable(f"{analysis.metric}: {analysis.direction}.")


# -- the terminal -----------------------------------------------------------------------------------------------------


def _terminal(doc: Mapping[str, Any]) -> str:
    """Return the report fitted to the terminal: columns of the highest rank are dropped, then text is folded."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    width = max(40, shutil.get_terminal_size((120, 24)).columns)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, highlight=False)
    if doc["question"]:
        console.print(Text(printable(doc["question"]), style="bold"))
    if doc["overview"]:
        console.print(Text(doc["overview"]))
    for sentence in doc["answers"]:
        console.print(Padding(Text(printable(sentence)), (0, 0, 0, 2)))
    console.print(Text(_direction(doc), style="dim"))
    unbounded = console.options.update(width=10_000)
    more = tables.tables(doc, Analysis.model_validate(doc["analysis"]))
    for columns in (_columns(doc), *(columns for name, _, columns in more if name != "Comparisons")):
        table = _rich_table(columns)
        while console.measure(table, options=unbounded).maximum > width and any(column.rank for column in columns):
            columns.remove(max(columns, key=lambda column: column.rank))
            table = _rich_table(columns)
        if columns:
            console.print(table)
    for note in doc["notes"]:
        console.print(Padding(Text(printable(note), style="dim"), (0, 0, 0, 2)))
    for head, text in provenance_lines(doc):
        if head in ("Data", "Training"):
            console.print(Text(f"{head:<9}{printable(text)}", style="dim"))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def _rich_table(columns: Sequence[Column]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(Text(printable(column.title)), justify=justify, no_wrap=column.right, overflow="fold")  # type: ignore[arg-type]
    verdicts = next((column.cells for column in columns if column.title == "verdict"), ())
    for index, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        style = "dim" if verdicts and verdicts[index].startswith((Verdict.CANNOT_TELL, Verdict.REFUSED)) else ""
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return table


# -- text formats -----------------------------------------------------------------------------------------------------


def _markdown(doc: Mapping[str, Any], figures: Mapping[str, str] = {}) -> str:
    """Return the report in Markdown; ``figures`` are the captions of the pictures beside the file, by name."""
    columns = _columns(doc)
    lines = [f"# {markdown(doc['question'] or doc['study'])}", ""]
    lines += [doc["overview"], ""] if doc["overview"] else []
    lines += [f"- {markdown(sentence)}" for sentence in doc["answers"]]
    lines += ["", markdown(_direction(doc)), "", *markdown_table(columns)]
    for name, caption in figures.items():
        lines += ["", f"![{name}]({name}.png)", "", markdown(caption)]
    for name, caption, table in tables.tables(doc, Analysis.model_validate(doc["analysis"])):
        lines += ["", f"## {name}", "", markdown(caption), "", *markdown_table(table)]
    if doc["notes"]:
        lines += ["", "## Notes", "", *(f"- {markdown(note)}" for note in doc["notes"])]
    lines += ["", "## How it was made", "", *(f"- {head}: {markdown(text)}" for head, text in provenance_lines(doc))]
    return "\n".join(lines) + "\n"


def markdown_table(columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| " + " | ".join(markdown(column.title) for column in columns) + " |"]
    lines += ["|" + "|".join("---:" if column.right else ":---" for column in columns) + "|"]
    rows = zip(*(column.cells for column in columns), strict=True)
    return [*lines, *("| " + " | ".join(map(markdown, cells)) + " |" for cells in rows)]


def _csv(frame: pd.DataFrame) -> str:
    """Return a frame as CSV; text that a spreadsheet would evaluate is prefixed by an apostrophe, as OWASP advises."""
    texts = frame.select_dtypes(exclude="number").columns
    plain = frame.assign(**{str(name): frame[name].map(csv_cell, na_action="ignore") for name in texts})
    return str(plain.rename(columns=csv_cell).to_csv(index=False))


def _json(doc: Mapping[str, Any]) -> str:
    return json.dumps(doc, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


# -- HTML -------------------------------------------------------------------------------------------------------------


def _html(content: Content, svgs: Mapping[str, tuple[str, str]], captions_by_name: Mapping[str, str]) -> str:
    """Return one file without scripts or anything fetched; every text is escaped, figures are inline.

    Args:
        content: the content of the report.
        svgs: name to figure, as wide as a page and as wide as a phone; a page shows the one that fits.
        captions_by_name: the captions of the figures.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from vitlab.report.drawing import element

    environment = Environment(
        loader=PackageLoader("vitlab", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    analysis, rows = content.plan.analysis, content.doc["arms"]
    kinds = [(row["verdict"] or "").replace(" ", "-") for row in rows]
    marks = [kind for kind in kinds if kind] or [""] * len(content.doc["answers"])
    answers = list(zip(content.doc["answers"], marks, strict=True))
    claims = [answer for answer in answers if answer[1] not in ("cannot-tell", "refused")]
    columns = _columns(content.doc)
    page = environment.get_template("report.html.j2").render(
        doc=content.doc,
        # Of many answers, those with a verdict come first; the others are folded.
        answers=claims if content.doc["overview"] else answers,
        few=phrasing.OVERVIEW_FROM,
        all_answers=answers if content.doc["overview"] else [],
        arms=_table([column for column in columns if column.rank < SECONDARY], kinds),
        more=_table([column for column in columns if column.rank >= SECONDARY or column is columns[0]]),
        tables=[(name, note, _table(columns)) for name, note, columns in tables.tables(content.doc, analysis)],
        figures=[
            (
                name,
                Markup(element(wide, name, captions_by_name[name])),
                Markup(element(narrow, f"{name}-narrow", captions_by_name[name])),
                captions_by_name[name],
            )
            for name, (wide, narrow) in svgs.items()
        ],
        folded={"arms": f"Picture of all {len(rows)} arms"} if len(rows) > FOLDED_FROM else {},
        looks=list(attention_pictures.pictures(content.doc["explained"], content.store.root)),
        trials=_table(
            tables.trial_columns(content.doc["trials"], content.doc["units"]),
            [trial["status"] for trial in content.doc["trials"]],
        ),
        made=provenance_lines(content.doc),
        judged=f"{analysis.metric} ({analysis.direction}, {analysis.at} evaluation)",
        series=SERIES,
    )
    return valid_html(page)


def _table(columns: Sequence[Column], classes: Sequence[str] = ()) -> dict[str, Any]:
    """Return a table for the template: the cells of each row, the first of them its heading, and the row's class."""
    rows = list(zip(*(column.cells for column in columns), strict=True))
    return {"columns": columns, "rows": list(zip(rows, classes or [""] * len(rows), strict=True))}


_FROM_DOCUMENT: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "terminal": _terminal,
    "md": _markdown,
    "latex": latex_table,
    "latex-all": latex_tables,
    "json": _json,
}
