"""Frames with texts of their own, for terminals and notebooks: the comparison of arms, and the results of trials."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, ClassVar

import pandas as pd

from vitlab.errors import format_count
from vitlab.planning.values import Plan
from vitlab.report import comparison, frame
from vitlab.report.formats import to_text
from vitlab.report.report import Report
from vitlab.report.sections.arms import arm_columns, paper_table
from vitlab.store.folders import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Frame(pd.DataFrame):
    """A frame whose slices and copies are ordinary frames."""

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame


class Comparison(_Frame):
    """A frame of :func:`vitlab.report.comparison.summary_frame`, shown as the report does until it is changed."""

    _metadata: ClassVar[list[str]] = ["report"]
    report: Report

    @classmethod
    def of(cls, report: Report) -> Comparison:
        """Return the arms of a report, with its answers, notes and figures."""
        arms = cls(comparison.summary_frame(report.arms, report.analysis))
        arms.report = report
        return arms

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
        return {name: drawing.figure for name, drawing in self.report.figures.items()}

    def render(self, format: str = "terminal") -> str | bytes:
        """Return the report in a format, such as ``md``, ``html`` or ``latex``; bytes for parquet, otherwise text.

        Raises:
            UserError: if there is no such format.
        """
        return self.report.render(format)

    @property
    def _is_unchanged(self) -> bool:
        """Whether the frame is still that of the report: it may have been changed in place."""
        return self.equals(comparison.summary_frame(self.report.arms, self.report.analysis))

    def __repr__(self) -> str:
        """Return the answers and a table of few columns, fitted to the terminal."""
        if not self._is_unchanged:
            return super().__repr__()
        table = paper_table(replace(self.report, question=""))
        more = f"{format_count(len(self.notes), 'note')} in .notes, the whole report in .render()."
        return to_text(*self.answers, table.columns, table.caption, more).rstrip()

    def _repr_html_(self) -> str | None:
        """Return answers, the table of arms and notes as HTML; every text is escaped."""
        if not self._is_unchanged:
            html: str | None = super()._repr_html_()  # type: ignore[misc]
            return html
        table = arm_columns(self.report.arms, self.report.analysis, self.report.units)
        rows = list(zip(*(column.cells for column in table), strict=True))
        with pd.option_context("display.max_colwidth", None):
            cells = pd.DataFrame(rows, columns=[column.title for column in table]).to_html(index=False, border=0)
        answers = "".join(f"<li>{escape(answer)}</li>" for answer in self.answers)
        direction = f"{self.report.analysis.metric}: {self.report.analysis.direction}."
        notes = "".join(f"<p>{escape(note)}</p>" for note in (direction, *self.notes))
        return f"<div><ul>{answers}</ul>{cells}{notes}</div>"


class Results(_Frame):
    """A frame of :func:`vitlab.report.frame.results`, whose text has the columns that most people look for."""

    _metadata: ClassVar[list[str]] = ["main"]
    main: list[str]  #: these columns

    @classmethod
    def of(cls, plan: Plan, store: Store) -> Results:
        """Return the results of the trials of a plan."""
        results, metric = cls(frame.results(plan, store)), plan.analysis.metric
        test = f"test/{metric.partition('/')[2]}"
        results.main = ["arm", "seed", "status", frame.metric_column(plan.analysis), test, "wall_s"]
        return results

    def __repr__(self) -> str:
        if not set(self.main) & set(self):  # renamed in place
            return super().__repr__()
        return f"{self.filter(self.main)!r}\ncolumns: {', '.join(map(str, self))}"
