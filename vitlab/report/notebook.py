"""A frame that shows its answers above its rows in a notebook."""

from __future__ import annotations

from html import escape

import pandas as pd

from vitlab.report import words
from vitlab.report.document import plain
from vitlab.report.tables import columns
from vitlab.spec import Analysis


class Compared(pd.DataFrame):
    """The columns of :func:`vitlab.report.judgement.summary`.  What is cut from it is an ordinary frame."""

    _metadata = ("analysis", "notes")
    analysis: Analysis
    notes: tuple[str, ...]

    @classmethod
    def of(cls, frame: pd.DataFrame, analysis: Analysis, notes: tuple[str, ...] = ()) -> Compared:
        """The frame, with how it was judged."""
        made = cls(frame)
        made.analysis, made.notes = analysis, notes
        return made

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    @property
    def answers(self) -> list[str]:
        """One sentence per comparison."""
        return words.answers(plain(self), self.analysis)

    def _repr_html_(self) -> str:
        """Answers, the table as the report has it, and notes; every text is escaped."""
        shown = columns(plain(self), self.analysis)
        said = "".join(f"<li>{escape(text)}</li>" for text in self.answers)
        head = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in shown)
        body = "".join(
            f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
            for first, *rest in zip(*(column.cells for column in shown), strict=True)
        )
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<div><ul>{said}</ul>{table}{notes}</div>"
