"""The comparison of arms as a frame with a notebook display of its own."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from vitlab.report import comparison
from vitlab.report.document import Content, Report
from vitlab.report.sections.arms import arm_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Comparison(pd.DataFrame):
    """A frame of :func:`vitlab.report.comparison.summary_frame`; slices of it are ordinary frames."""

    _metadata = ("report", "content")
    report: Report
    content: Content

    @classmethod
    def of(cls, content: Content) -> Comparison:
        """Return the arms of a report, with its answers, notes and figures."""
        frame = cls(comparison.summary_frame(content.report.arms, content.report.analysis))
        frame.report, frame.content = content.report, content
        return frame

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    @property
    def answers(self) -> list[str]:
        """The answers, one sentence per comparison."""
        return list(self.report.answers)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the report."""
        return tuple(self.report.notes)

    @property
    def figures(self) -> dict[str, Figure]:
        """The figures of the report by section, such as ``arms`` and ``curves``; a notebook shows one as a picture."""
        return {name: drawing.figure for name, drawing in self.content.figures.items()}

    def render(self, format: str = "terminal") -> str | bytes:
        """Return the report in a format, such as ``md``, ``html`` or ``latex``; bytes for parquet, otherwise text.

        Raises:
            UserError: if there is no such format.
        """
        return self.content.render(format)

    def _repr_html_(self) -> str:
        """Return answers, the table of arms and notes as HTML; every text is escaped."""
        table = arm_columns(self.report.arms, self.report.analysis, self.report.units)
        rows = list(zip(*(column.cells for column in table), strict=True))
        with pd.option_context("display.max_colwidth", None):
            cells = pd.DataFrame(rows, columns=[column.title for column in table]).to_html(index=False, border=0)
        answers = "".join(f"<li>{escape(answer)}</li>" for answer in self.answers)
        direction = f"{self.report.analysis.metric}: {self.report.analysis.direction}."
        notes = "".join(f"<p>{escape(note)}</p>" for note in (direction, *self.notes))
        return f"<div><ul>{answers}</ul>{cells}{notes}</div>"
