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


MAX_TEXT = 38  #: characters of a text, so that a terminal of 80 columns shows whole rows


class Comparison(pd.DataFrame):
    """A frame of :func:`vitlab.report.comparison.summary_frame`, or some of its rows, shown as the report does."""

    _metadata: ClassVar[list[str]] = ["report"]
    report: Report

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return Comparison

    @classmethod
    def of(cls, report: Report) -> Comparison:
        """Return the arms of a report, with its answers, notes and figures."""
        arms = cls(comparison.summary_frame(report.arms, report.analysis))
        arms.report = report
        return arms

    @property
    def answers(self) -> list[str]:
        """The answers: of a grid on its factors, then one sentence per comparison."""
        return list(self.report.answers)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the report."""
        return tuple(self.report.notes)

    @property
    def figures(self) -> dict[str, Figure]:
        """The figures of the report by section, such as ``arms`` and ``curves``; a notebook shows one as a picture."""
        return {name: drawing.figure for name, drawing in self.report.figures.items()}

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The numbers of the report's sections by name, such as ``main_effects`` and ``interactions``."""
        return {name: pd.DataFrame(rows) for name, rows in self.report.sections.items() if rows}

    def render(self, format: str = "terminal") -> str | bytes:
        """Return the report in a format, such as ``md``, ``html`` or ``latex``; bytes for parquet, otherwise text.

        Raises:
            UserError: if there is no such format.
        """
        return self.report.render(format)

    def _selected(self) -> Report | None:
        """Return the report of the arms in the frame and their baselines; None if anything but the rows was changed."""
        report: Report | None = getattr(self, "report", None)  # frames that pandas joins have none
        arms = {row["arm"]: row for row in report.arms} if report is not None else {}
        names = list(self["arm"]) if "arm" in self else []
        if report is None or not names or not set(names) <= set(arms):
            return None
        rows = [arms[name] for name in names]
        is_same = self.reset_index(drop=True).equals(comparison.summary_frame(rows, report.analysis))
        beside = {row["baseline"] for row in rows} - {None, *names}
        rows = [*(row for row in report.arms if row["arm"] in beside), *rows]
        return replace(report, question="", arms=rows) if is_same else None

    @property
    def _main_answers(self) -> list[str]:
        return self.report.main_answers if len(self) == len(self.report.arms) else []

    def __repr__(self) -> str:
        """Return the answers and a table of few columns, fitted to the terminal; of some arms, the table alone."""
        if not len(self) and "arm" in self:
            return "no arms"
        selected = self._selected()
        if selected is None:
            return super().__repr__()
        table = paper_table(selected)
        more = f"{format_count(len(self.notes), 'note')} in .notes, the whole report in .render()."
        return to_text(*self._main_answers, table.columns, table.caption, more).rstrip()

    def _repr_html_(self) -> str | None:
        """Return answers, the table of arms and notes as HTML; every text is escaped."""
        selected = self._selected()
        if selected is None:
            html: str | None = super()._repr_html_()  # type: ignore[misc]
            return html
        table = arm_columns(selected.arms, selected.analysis, selected.units)
        rows = list(zip(*(column.cells for column in table), strict=True))
        with pd.option_context("display.max_colwidth", None):
            cells = pd.DataFrame(rows, columns=[column.title for column in table]).to_html(index=False, border=0)
        answers = "".join(f"<li>{escape(answer)}</li>" for answer in self._main_answers)
        direction = f"{self.report.analysis.metric}: {self.report.analysis.direction}."
        notes = "".join(f"<p>{escape(note)}</p>" for note in (direction, *self.notes))
        return f"<div><ul>{answers}</ul>{cells}{notes}</div>"


class Results(pd.DataFrame):
    """A frame whose text has the columns that most people look for, such as of :func:`vitlab.report.frame.results`.

    Its slices and copies are ordinary frames.
    """

    _metadata: ClassVar[list[str]] = ["main"]
    main: list[str]  #: these columns

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    @classmethod
    def of(cls, plan: Plan, store: Store) -> Results:
        """Return the results of the trials of a plan."""
        test = f"test/{plan.analysis.metric.partition('/')[2]}"
        main = ["arm", "seed", "status", frame.metric_column(plan.analysis), test, "wall_s"]
        return cls.showing(frame.results(plan, store), main)

    @classmethod
    def showing(cls, table: pd.DataFrame, main: list[str]) -> Results:
        """Return a frame with the columns that its text shows."""
        shown = cls(table)
        shown.main = main
        return shown

    def __repr__(self) -> str:
        if not set(self.main) & set(self):  # renamed in place
            return super().__repr__()
        with pd.option_context("display.max_colwidth", MAX_TEXT):
            table = repr(self.filter(self.main))
        return f"{table}\ncolumns: {', '.join(map(str, self))}"
