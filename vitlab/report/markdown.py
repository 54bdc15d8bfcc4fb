"""The report in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vitlab.report.escaping import markdown
from vitlab.report.phrasing import Column

if TYPE_CHECKING:
    from vitlab.report.document import Report


def markdown_report(report: Report, captions: Mapping[str, str] = {}) -> str:
    """Return the report; ``captions`` are the captions of the pictures that lie beside the file, by section."""
    from vitlab.report.sections import sections

    lines = [f"# {markdown(report.title)}", "", *([report.overview, ""] if report.overview else [])]
    lines += [f"- {markdown(sentence)}" for sentence in report.answers]
    lines += ["", markdown(f"{report.analysis.metric}: {report.analysis.direction}.")]
    for name, part in sections().items():
        table = part.table(report.sections.get(name, ()), report)
        if (table or name in captions) and name != "arms":
            lines += ["", f"## {part.heading}"]
        if table:
            lines += ["", *([markdown(table.caption), ""] if name != "arms" else []), *markdown_table(table.columns)]
        if name in captions:
            lines += ["", f"![{name}]({name}.png)", "", markdown(captions[name])]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {markdown(note)}" for note in report.notes)]
    lines += ["", "## How it was made", "", *(f"- {head}: {markdown(text)}" for head, text in report.provenance)]
    return "\n".join(lines) + "\n"


def markdown_table(columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| " + " | ".join(markdown(column.title) for column in columns) + " |"]
    lines += ["|" + "|".join("---:" if column.right else ":---" for column in columns) + "|"]
    rows = zip(*(column.cells for column in columns), strict=True)
    return [*lines, *("| " + " | ".join(map(markdown, cells)) + " |" for cells in rows)]
