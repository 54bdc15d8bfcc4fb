"""Frames with texts of their own, for terminals and notebooks: the comparison of arms, and the results of trials."""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from html import escape
from typing import TYPE_CHECKING, ClassVar, Self

import pandas as pd

from vitlab.errors import ByName, UserError, format_count, list_some, nearest
from vitlab.report import comparison
from vitlab.report.formats import parts_to_text
from vitlab.report.report import Report
from vitlab.report.sections.arms import arm_columns, paper_table
from vitlab.report.sections.curves import draw_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHOWN = (
    *("arm", "level", "first", "second", "difference", "low", "high", "verdict"),
    *("train_images_per_s", "infer_images_per_s", "peak_bytes"),
)
"""Columns of sections that their text shows."""
OF_ARMS = ("arm", "mean", "sd", "difference", "difference_low", "difference_high", "verdict")
"""Columns of comparisons that the text of some of their rows shows."""


class NamedFrame(pd.DataFrame):
    """A frame whose text has the columns that most people look for, and says what it shows.

    So has the text of its rows, also with further columns; of selected columns, the text has all.
    """

    _metadata: ClassVar[list[str]] = ["heading", "shown", "others"]
    heading = ""  #: what it shows
    shown: Sequence[Hashable] = ()  #: the columns that its text has
    others: Sequence[Hashable] = ()  #: the other columns

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return type(self)

    @classmethod
    def from_table(cls, table: pd.DataFrame, heading: str, shown: Sequence[str]) -> Self:
        """Return a frame with what it shows, and the columns that its text has."""
        view = cls(table)
        view.heading, view.shown = heading, [name for name in table if name in shown]
        view.others = [name for name in table if name not in shown]
        return view

    def _shown_columns_and_note(self) -> tuple[pd.DataFrame, str]:
        """Return the columns that are shown, and a line that names all if these are fewer."""
        if self.others and {*self.shown, *self.others} <= set(self):
            return pd.DataFrame(self.drop(columns=self.others)), f"{self.heading}; columns: {', '.join(map(str, self))}"
        return pd.DataFrame(self), ""

    def __repr__(self) -> str:
        table, line = self._shown_columns_and_note()
        # pandas takes 80 columns for every script, and hides those that do not stand beside each other.
        width = shutil.get_terminal_size((120, 24)).columns
        longest = max(20, width // 2 - 2) if line else None
        with pd.option_context("display.width", width, "display.max_columns", 20, "display.max_colwidth", longest):
            return f"{table}\n{line}".rstrip()

    def _repr_html_(self) -> str:
        table, line = self._shown_columns_and_note()
        with pd.option_context("display.max_colwidth", None):
            return f"{table._repr_html_()}<p>{escape(line)}</p>"  # type: ignore[operator]


class Comparison(NamedFrame):
    """A frame of ``comparison.summary_rows_to_frame``, shown as a report shows it.

    What is selected of it is shown as numbers, and keeps the report.
    """

    _metadata: ClassVar[list[str]] = [*NamedFrame._metadata, "report"]
    report: Report

    @classmethod
    def of(cls, report: Report) -> Comparison:
        """Return the arms of a report, with its answers, notes and figures."""
        table = comparison.summary_rows_to_frame(report.arms, report.analysis)
        arms = cls.from_table(table, f"arms of {report.study}", OF_ARMS)
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
        return ByName({name: drawing.figure for name, drawing in self.report.figures.items()})

    @property
    def tables(self) -> Tables:
        """The numbers of the report's sections by name, such as ``main_effects`` and ``interactions``."""
        sections = self.report.sections.items()
        # A mapping, such as block to difference, is a column for each of its names.
        frames = ((name, pd.json_normalize([asdict(row) for row in rows])) for name, rows in sections if rows)
        return Tables(
            {
                name: NamedFrame.from_table(
                    table,
                    name,
                    SHOWN if len(table.columns) > 8 else [str(column) for column in table if column != "file"],
                )
                for name, table in frames
            }
        )

    def curves(self, metric: str) -> Figure:
        """Return a figure of a metric over training, such as ``train/loss``, as the report draws the judged one.

        Raises:
            UserError: if no finished trial has measured it twice.
        """
        findings = self.report.findings
        assert findings is not None
        drawing = draw_curves(findings.results, findings.history, metric)
        if drawing is None:
            names = sorted(findings.history["metric"].unique())
            measured = list_some(names, 20) or "none"
            raise UserError(f"no curves of '{metric}'.{nearest(metric, names)} Measured: {measured}.")
        return drawing.figure

    def render(self, format: str = "terminal") -> str | bytes:
        """Return the report in a format, such as ``md``, ``html`` or ``latex``; bytes for parquet, otherwise text.

        Raises:
            UserError: if there is no such format.
        """
        return self.report.render(format)

    @property
    def _is_changed(self) -> bool:
        """Whether the frame was changed in place or is a selection, so that the report does not show it."""
        report = getattr(self, "report", None)  # of joined frames, there is none
        return report is None or not self.equals(Comparison.of(report))

    def __repr__(self) -> str:
        """Return the answers and a table of few columns, fitted to the terminal."""
        if self._is_changed:
            return super().__repr__()
        table = paper_table(replace(self.report, question=""))
        more = f"{format_count(len(self.notes), 'note')} in .notes, the whole report in .render()."
        shown = (table.columns, table.caption) if table.columns[0].cells else ()
        return parts_to_text(*self.report.answers_and_warnings, *shown, more).rstrip()

    def _repr_html_(self) -> str:
        """Return answers, the table of arms and notes as HTML; every text is escaped."""
        if self._is_changed:
            return super()._repr_html_()
        table = arm_columns(self.report.arms, self.report.analysis, self.report.scale)
        shown = pd.DataFrame({column.title: column.cells for column in table})
        with pd.option_context("display.max_colwidth", None):
            cells = shown.to_html(index=False, border=0)
        answers = "".join(f"<li>{escape(answer)}</li>" for answer in self.report.main_answers)
        direction = f"{self.report.analysis.metric}: {self.report.analysis.direction}."
        notes = "".join(f"<p>{escape(note)}</p>" for note in (direction, *self.notes))
        return f"<div><ul>{answers}</ul>{cells * bool(len(shown))}{notes}</div>"


class Tables(ByName):
    """Frames by name, whose text has their names and sizes."""

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {len(table)} x {len(table.columns)}" for name, table in self.items()) or "no tables"
