"""LaTeX of a report: its tables, to be read into a document that uses booktabs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitlab.report.escaping import LATIN, TEX, latex, one_line
from vitlab.report.phrasing import Column

if TYPE_CHECKING:
    from vitlab.report.document import Report

TEX_LINE, TEX_WRAP = 26, 0.3  #: characters from which on a column wraps, and its width then, as a share of the line


def latex_table(report: Report) -> str:
    """Return the table of arms in the width of a paper, to be read into a document that uses booktabs."""
    from vitlab.report.sections.arms import paper_caption, paper_columns

    about = report.arms, report.analysis, report.units
    return _file(report, [("arms", paper_caption(report.question, *about), paper_columns(*about))])


def latex_tables(report: Report) -> str:
    """Return every table of the report with all its columns."""
    from vitlab.report.sections import sections

    parts = []
    for name, part in sections().items():
        if table := part.table(report.sections.get(name, ()), report):
            caption = report.title if name == "arms" else f"{part.heading}. {table.caption}"
            parts.append((part.heading.lower(), caption, table.columns))
    return _file(report, parts)


def _file(report: Report, parts: Sequence[tuple[str, str, Sequence[Column]]]) -> str:
    """Return tables with their labels and captions; the answers and notes of the report stand in comments."""
    notes = [f"% {one_line(note)}" for note in (*report.answers, *report.notes)]
    notes += [f"% {one_line(head)}: {one_line(text)}" for head, text in report.provenance]
    lines = ["% \\usepackage{booktabs}", *notes]
    texts = [text for *_, columns in parts for column in columns for text in (column.title, *column.cells)]
    characters = {char for text in texts for char in text}
    if any(ord(char) > LATIN for char in characters - TEX.keys()):
        lines.insert(1, "% Names in other scripts than Latin want lualatex or xelatex, and a font that has them.")
    study = re.sub(r"[^A-Za-z0-9.-]+", "-", report.study)
    for name, caption, columns in parts:
        rows = zip(*(column.cells for column in columns), strict=True)
        lines += [
            "",
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{latex(caption)}}}",
            f"  \\label{{tab:{study}-{name}}}",
            f"  \\begin{{tabular}}{{@{{}}{''.join(map(_tex_column, columns))}@{{}}}}",
            r"    \toprule",
            "    " + " & ".join(latex(column.title) for column in columns) + r" \\",
            r"    \midrule",
            *("    " + " & ".join(map(latex, cells)) + r" \\" for cells in rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
    return "\n".join(lines) + "\n"


def _tex_column(column: Column) -> str:
    """Return the column specification: long text wraps."""
    if column.right:
        return "r"
    return rf"p{{{TEX_WRAP}\linewidth}}" if max(map(len, column.cells), default=0) > TEX_LINE else "l"
