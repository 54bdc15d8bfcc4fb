"""The comparison of arms as a frame with a notebook display of its own."""

from __future__ import annotations

from html import escape

import pandas as pd

from vitlab.report import comparison
from vitlab.report.document import Report
from vitlab.report.sections.arms import columns


class Comparison(pd.DataFrame):
    """A frame of :func:`vitlab.report.comparison.summary_frame`; slices of it are ordinary frames."""

    _metadata = ("report",)
    report: Report

    @classmethod
    def of(cls, report: Report) -> Comparison:
        """Return the arms of a report, with its answers and notes."""
        frame = cls(comparison.summary_frame(report.arms, report.analysis))
        frame.report = report
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

    def _repr_html_(self) -> str:
        """Return answers, the table of arms and notes as HTML; every text is escaped."""
        table = columns(self.report.arms, self.report.analysis, self.report.units)
        rows = list(zip(*(column.cells for column in table), strict=True))
        with pd.option_context("display.max_colwidth", None):
            cells = pd.DataFrame(rows, columns=[column.title for column in table]).to_html(index=False, border=0)
        answers = "".join(f"<li>{escape(answer)}</li>" for answer in self.answers)
        direction = f"{self.report.analysis.metric}: {self.report.analysis.direction}."
        notes = "".join(f"<p>{escape(note)}</p>" for note in (direction, *self.notes))
        return f"<div><ul>{answers}</ul>{cells}{notes}</div>"
