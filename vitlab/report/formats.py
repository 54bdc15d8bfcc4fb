"""The formats of a report, one entry each: the commands and the files of a report are made from this table."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vitlab.errors import line_width, list_some, one_line
from vitlab.report.drawing import wrap_words
from vitlab.report.page import read_template, render_page
from vitlab.report.phrasing import DASH, MAX_LISTED, MINUS, PLUS_MINUS, Column, keep_together
from vitlab.report.sections import Table, all_sections
from vitlab.report.sections.arms import paper_table

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table as RichTable

    from vitlab.report.report import Report

TEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': "''",
    "\N{NO-BREAK SPACE}": "~",
    "\N{SUPERSCRIPT TWO}": "$^2$",
    DASH: "--",
    MINUS: "$-$",
    PLUS_MINUS: r"$\pm$",
}
_FORMULA = tuple(
    "=+-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
)
BOLD = " Bold: the best mean, and every mean that no other arm is shown to improve on."
TEX_WRAP, TEX_WRAPPED = 26, 0.28  #: characters from which on a column wraps, and its width then, as a share of the line
TEX_TITLE = 13  #: characters into which the titles of a wide table are wrapped where cells are not longer
TEX_WIDEST = 107  #: characters of the widest table; scaled to a line, it has letters of 7 points

UNBOUNDED = 10_000  #: characters of a line where there is no terminal
NARROW = 8  #: characters: no text of a table is wrapped into less
MAIN, WRAPPED = 4, 20  #: columns of ranks up to the first are left out only if texts were wrapped into less


@dataclass(frozen=True)
class Format:
    """A format of a report."""

    render: Callable[[Report], str | bytes]
    file: str = ""  #: name in the folder of the report; empty if it is not written there
    of_results: bool = False  #: whether it needs the results, where others are rendered from ``report.json``


def replace_controls(text: str) -> str:
    """Replace control characters: the name of an arm must not control the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def join_lines(text: str) -> str:
    """Return text on one line, where it cannot end a comment."""
    return one_line(replace_controls(text))


def escape_markdown(text: str) -> str:
    """Escape text for Markdown and the HTML it allows."""
    # An underscore within a word, as in an option's name, means nothing there.
    escaped = re.sub(r"[\\`*\[\]<|#~$&]|(?<![^\W_])_|_(?=_*(?:[\W]|$))", r"\\\g<0>", join_lines(text))
    # At the start of a line these would start a quotation or a list.
    return re.sub(r"^(?=>)|^(\d*)(?=[-+.)](?:\s|$))", r"\1\\", escaped)


def escape_latex(text: str) -> str:
    """Escape text for LaTeX."""
    text = keep_together(re.sub(r"-(?=-)", "-\0", join_lines(text)))
    escaped = "".join(TEX.get(char, char) for char in text).replace("\0", "{}")
    # After two backslashes these would be parsed as its arguments.
    return f"{{}}{escaped}" if escaped.startswith(("[", "*")) else escaped


def escape_csv_cell(value: Any) -> Any:
    """Prefix text that a spreadsheet would evaluate by an apostrophe, as OWASP advises; other values are unchanged."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def frame_to_csv(frame: pd.DataFrame) -> str:
    """Return a frame as CSV; text that a spreadsheet would evaluate is prefixed by an apostrophe, as OWASP advises."""
    texts = frame.select_dtypes(exclude="number").columns
    plain = frame.assign(**{str(name): frame[name].map(escape_csv_cell, na_action="ignore") for name in texts})
    return str(plain.rename(columns=escape_csv_cell).to_csv(index=False))


def render_terminal(report: Report) -> str:
    """Return the report fitted to the width of the terminal; whole elsewhere."""
    console = _new_console(colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    if report.question:
        _print_text(report.question, console, "bold")
    if report.overview:
        _print_text(report.overview, console)
    for sentence in report.main_answers:
        _print_text(sentence, console, indent=2)
    _print_text(f"{report.analysis.metric}: {report.analysis.direction}.", console, "dim")
    for name, part in all_sections().items():
        table = report.table(name) if part.in_terminal else None
        if table is not None:
            if name != "arms":
                _print_text(part.heading, console, "bold")
            columns = [replace(column, cells=column.cells[: table.lines]) for column in table.columns]
            _print_table(columns, console, " or another format (report.html, or --format)")
            if table.caveat:
                _print_text(table.caveat, console, "dim")
                console.print()
    for note in report.notes:
        _print_text(note, console, "dim", indent=2)
    for head, text in report.provenance_lines:
        if head in ("Data", "Training"):
            _print_text(f"{head:<9}{text}", console, "dim")
    return _text_of(console)


def parts_to_text(*parts: str | Sequence[Column], width: int | None = None) -> str:
    """Return sentences and tables, fitted to a width, by default the terminal's; whole elsewhere."""
    console = _new_console()
    console.width = width or console.width
    for part in parts:
        if isinstance(part, str):
            _print_text(part, console)
        else:
            _print_table(part, console)
    return _text_of(console)


def _new_console(*, colour: bool = False) -> Console:
    """Return a console as wide as the terminal, for :func:`_text_of`; elsewhere, programs read all columns."""
    from rich.console import Console

    width = max(40, line_width(sys.stdout) or UNBOUNDED)
    # In a notebook, rich would show what is printed.
    return Console(file=io.StringIO(), width=width, force_terminal=colour, force_jupyter=False, highlight=False)


def _text_of(console: Console) -> str:
    """Return what was printed on a console, without spaces at the ends of lines."""
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def _print_text(text: str, console: Console, style: str = "", indent: int = 0) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding.indent(Text(replace_controls(text), style=style), indent))


def _print_table(columns: Sequence[Column], console: Console, page: str = "") -> None:
    """Print a table that fits into a console, and the titles of the columns that are left out.

    Columns of the highest rank are left out until it fits.  From ``MAIN`` down, titles and texts wrap instead, unless
    texts would be narrower than ``WRAPPED``, or for rank 1 than ``NARROW``.  Columns of rank 0 stay, and wrap within a
    word only where no column can be narrower.
    """
    # Measured without bounds, since a measure within them never exceeds the width.
    ranks, unbounded = sorted({column.rank for column in columns}), console.options.update(max_width=UNBOUNDED)
    fitting = columns

    def needed(width: int) -> int:
        return console.measure(_make_rich_table(fitting, width), options=unbounded).maximum

    while needed(0 if ranks[-1] > MAIN else WRAPPED if ranks[-1] > 1 else NARROW) > console.width and ranks[1:]:
        highest = ranks.pop()
        fitting = [column for column in fitting if column.rank < highest]
    width = 0
    if needed(0) > console.width:
        widths = range(NARROW, console.width)
        width = widths[max(bisect_right(widths, console.width, key=needed) - 1, 0)]
    console.print(_make_rich_table(fitting, width))
    if hidden := [column.title for column in columns if column not in fitting and any(column.cells)]:
        console.print(
            f"Not shown: {list_some(hidden, MAX_LISTED)}. See a wider terminal{page}.\n", style="dim", markup=False
        )


def _make_rich_table(columns: Sequence[Column], width: int) -> RichTable:
    """Return a table; with a width, not 0, texts are wrapped into it, and titles into the width of their columns."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table, wrapped = RichTable(box=box.SIMPLE_HEAD, pad_edge=False), []
    for column in columns:
        title, cells = replace_controls(column.title), [*map(replace_controls, column.cells)]
        if width:
            cells = cells if column.right else [wrap_words(cell, width) for cell in cells]
            title = wrap_words(title, max((len(line) for cell in cells for line in cell.splitlines()), default=1))
        justify = "right" if column.right else "left"
        table.add_column(Text(title), justify=justify, no_wrap=column.right, overflow="fold")  # type: ignore[arg-type]
        wrapped.append(cells)
    for row in zip(*wrapped, strict=True):
        table.add_row(*map(Text, row))
    return table


def render_markdown(report: Report, captions: Mapping[str, str] = {}) -> str:
    """Return the report; ``captions`` are the captions of the pictures that lie beside the file, by section."""
    parts = [(name, part.heading, report.table(name)) for name, part in all_sections().items()]
    functions = {"md": escape_markdown, "table": markdown_table, "indent": textwrap.indent}
    return read_template("report.md.j2").render(functions, report=report, parts=parts, captions=captions)


def markdown_table(columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| " + " | ".join(escape_markdown(column.title) for column in columns) + " |"]
    lines += ["|" + "|".join("---:" if column.right else ":---" for column in columns) + "|"]
    rows = zip(*(column.cells for column in columns), strict=True)
    return [*lines, *("| " + " | ".join(map(escape_markdown, cells)) + " |" for cells in rows)]


def render_latex(report: Report, tables: Mapping[str, Table]) -> str:
    """Return tables by their labels, wide ones in parts of some columns; answers and notes stand in comments."""
    notes = (*report.answers, *report.notes, *(f"{head}: {text}" for head, text in report.provenance_lines))
    lines = [
        r"% Needs \usepackage{array,booktabs,graphicx}. A table that is too wide is several.",
        *(f"% {replace_controls(line)}" for note in notes for line in note.splitlines()),
    ]
    study = re.sub(r"[^A-Za-z0-9.-]+", "-", report.study)
    for label, table in tables.items():
        parts = _split_columns(table.columns)
        caption = escape_latex(f"{table.caption}{BOLD * any(any(column.bold) for column in table.columns)}")
        for number, columns in enumerate(parts, 1):
            rows = zip(*map(_latex_cells, columns), strict=True)
            part = f" Columns, part {number} of {len(parts)}." * (len(parts) > 1)
            lines += [
                "",
                r"\begin{table}",
                r"  \centering\footnotesize\setlength{\tabcolsep}{3.5pt}",
                f"  \\caption{{{caption}{part}}}",
                f"  \\label{{tab:{study}-{label}{f'-{number}' * (number > 1)}}}\\smallskip",
                r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
                f"  \\begin{{tabular}}{{@{{}}{''.join(map(_latex_alignment, columns))}@{{}}}}",
                r"    \toprule",
                "    " + " & ".join(map(_latex_title, columns)) + r" \\",
                r"    \midrule",
                *("    " + " & ".join(cells) + r" \\" for cells in rows),
                r"    \bottomrule",
                r"  \end{tabular}}",
                r"\end{table}",
            ]
            caption = rf"Table~\ref{{tab:{study}-{label}}}, continued."
    return "\n".join(lines) + "\n"


def _latex_cells(column: Column) -> Iterator[str]:
    for text, is_bold in itertools.zip_longest(column.cells, column.bold):
        cell = escape_latex(text)
        if "p{" in _latex_alignment(column):  # else a long option has no place to break at
            cell = re.sub(r"(\\_|[=(,])(?=\S)", r"\1\\penalty500{}", cell)  # rather at a space
        yield rf"\textbf{{{cell}}}" if is_bold else cell


def _split_columns(columns: Sequence[Column]) -> list[list[Column]]:
    """Return the columns of each part of a table, with titles in several lines if the table is too wide otherwise.

    Each part begins with the first column.  A difference, its interval, its p value and the verdict stay together, and
    costs stand beside other columns.
    """
    if sum(map(_latex_width, columns)) > TEX_WIDEST:
        columns = [
            replace(column, title=wrap_words(keep_together(column.title), max(TEX_TITLE, *map(len, column.cells))))
            for column in columns
        ]
    parts, groups = [[columns[0]]], list[list[Column]]()
    for column in columns[1:]:
        if not groups or not re.search(r"interval|^p\b|^(verdict|parameters|MACs)$", column.title):
            groups.append([])
        groups[-1].append(column)
    for group in groups:
        if len(parts[-1]) > 1 and sum(map(_latex_width, (*parts[-1], *group))) > TEX_WIDEST:
            parts.append([columns[0]])
        parts[-1] += group
    return parts


def _latex_title(column: Column) -> str:
    lines = r"\\".join(map(escape_latex, column.title.splitlines()))
    return rf"\shortstack[{'r' if column.right else 'l'}]{{{lines}}}" if "\n" in column.title else lines


def _latex_width(column: Column) -> int:
    """Return the width of a column in characters, with the space beside it."""
    width = max(map(len, (*column.title.splitlines(), *column.cells)))
    return 2 + (width if column.right else min(width, TEX_WRAP))


def _latex_alignment(column: Column) -> str:
    if column.right:
        return "r"
    wraps = max(map(len, column.cells), default=0) > TEX_WRAP
    return rf">{{\raggedright\arraybackslash}}p{{{TEX_WRAPPED}\linewidth}}" if wraps else "l"


def _tables_by_section(report: Report, *names: str) -> dict[str, Table]:
    """Return the tables of some sections by label, each with its heading in the caption."""
    return {
        part.heading.lower().replace(" ", "-"): Table(table.columns, f"{part.heading}. {table.caption}")
        for name, part in all_sections().items()
        if name in names and (table := report.table(name))
    }


FORMATS = {
    "terminal": Format(render_terminal),
    "md": Format(render_markdown, "report.md"),
    "html": Format(render_page, "report.html", of_results=True),
    "csv": Format(lambda report: frame_to_csv(report.results_frame), "results.csv", of_results=True),
    "parquet": Format(lambda report: report.results_frame.to_parquet(index=False), "results.parquet", of_results=True),
    "latex": Format(
        lambda report: render_latex(
            report, {"arms": paper_table(report), **_tables_by_section(report, "blocks", "main_effects", "crossed")}
        ),
        "report.tex",
    ),
    "latex-all": Format(lambda report: render_latex(report, _tables_by_section(report, *all_sections()))),
    "json": Format(
        lambda report: json.dumps(report.to_json(), indent=1, allow_nan=False, ensure_ascii=False) + "\n", "report.json"
    ),
}
