"""The report in a terminal, and tables that fit into one."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitlab.report.escaping import printable
from vitlab.report.phrasing import Column

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vitlab.report.document import Report


def terminal(report: Report) -> str:
    """Return the report fitted to the width of the terminal."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from vitlab.report.sections import sections

    width = max(40, shutil.get_terminal_size((120, 24)).columns)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, highlight=False)
    if report.question:
        console.print(Text(printable(report.question), style="bold"))
    if report.overview:
        console.print(Text(report.overview))
    for sentence in report.answers:
        console.print(Padding(Text(printable(sentence)), (0, 0, 0, 2)))
    console.print(Text(printable(f"{report.analysis.metric}: {report.analysis.direction}."), style="dim"))
    for name, part in sections().items():
        table = report.table(name) if part.in_terminal else None
        if table is not None:
            if name != "arms":
                console.print(Text(part.heading, style="bold"))
            console.print(fitted_table(table.columns, console))
    for note in report.notes:
        console.print(Padding(Text(printable(note), style="dim"), (0, 0, 0, 2)))
    for head, text in report.provenance:
        if head in ("Data", "Training"):
            console.print(Text(f"{head:<9}{printable(text)}", style="dim"))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def fitted_table(columns: Sequence[Column], console: Console, dim: Sequence[bool] = ()) -> Table:
    """Return a table that fits into a console: the columns of the highest rank are left out until it does.

    Columns of rank 0 stay, and text in them is folded; ``dim`` tells which rows are dimmed, by default none.
    """
    # Measured without bounds, since a measure within them never exceeds the width.
    ranks, unbounded = sorted({column.rank for column in columns}), console.options.update(max_width=10_000)
    table = _table(columns, dim)
    while console.measure(table, options=unbounded).maximum > console.width and (highest := ranks.pop()):
        columns = [column for column in columns if column.rank < highest]
        table = _table(columns, dim)
    return table


def _table(columns: Sequence[Column], dim: Sequence[bool]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        title, justify = Text(printable(column.title)), "right" if column.right else "left"
        table.add_column(title, justify=justify, no_wrap=column.right, overflow="fold")  # type: ignore[arg-type]
    rows = zip(*(column.cells for column in columns), strict=True)
    for cells, is_dim in zip(rows, dim or itertools.repeat(False), strict=False):
        table.add_row(*(Text(printable(cell)) for cell in cells), style="dim" if is_dim else "")
    return table
