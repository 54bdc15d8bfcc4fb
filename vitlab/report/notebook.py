"""Frames with a notebook display of their own; otherwise ordinary pandas frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import pandas as pd

from vitlab.errors import count
from vitlab.plan.values import Plan
from vitlab.report import comparison, phrasing
from vitlab.report import frame as frames
from vitlab.report.document import of_version, plain
from vitlab.report.image_values import image_values
from vitlab.report.notes import notes
from vitlab.report.phrasing import Column
from vitlab.report.tables import columns, trial_columns
from vitlab.spec import Analysis
from vitlab.store.folders import Store

ROWS = 60  #: trials that a notebook shows


class Results(pd.DataFrame):
    """A frame of :func:`vitlab.report.frame.results`; slices of it are ordinary frames."""

    _metadata = ("units",)
    units: Mapping[str, str]

    @classmethod
    def of_study(cls, plan: Plan, store: Store) -> Results:
        """Return the results of a study."""
        results = cls(frames.results(plan, store))
        results.units = plan.units
        return results

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def _repr_html_(self) -> str | None:
        """Return the counts per status and the table of trials as HTML; every text is escaped."""
        if not {*frames.BEFORE, *frames.AFTER} <= set(self.columns):
            return pd.DataFrame(self)._repr_html_()  # type: ignore[operator,no-any-return]
        states = {name: int((self["status"] == name).sum()) for name in frames.STATUSES}
        summary = [f"{count(len(self), 'trial')}: {phrasing.states(states)}"]
        remainder = f"... and {len(self) - ROWS:,} more." if len(self) > ROWS else ""
        return _html(summary, trial_columns(plain(self.head(ROWS)), self.units), [remainder] if remainder else [])


class Comparison(pd.DataFrame):
    """A frame of :func:`vitlab.report.comparison.summary_frame`; slices of it are ordinary frames."""

    _metadata = ("analysis", "units", "notes")
    analysis: Analysis
    units: Mapping[str, str]
    notes: tuple[str, ...]

    @classmethod
    def of_study(cls, plan: Plan, store: Store) -> Comparison:
        """Return the comparison of a study's arms, with the notes of its report."""
        trials = frames.gather(plan, store)
        table = frames.table(plan, trials)
        rows = comparison.summary(table, plan, images=image_values(plan, trials))
        trial_notes = notes(plan, [*frames.prerequisites(plan, store), *trials], table, rows)
        return cls.of(rows, plan, (*of_version(plan, store), *trial_notes))

    @classmethod
    def of(cls, rows: Sequence[phrasing.Row], plan: Plan, notes: tuple[str, ...] = ()) -> Comparison:
        """Return the rows of arms as a comparison with the analysis of its plan and notes."""
        comparison_frame = cls(comparison.summary_frame(rows, plan.analysis))
        comparison_frame.analysis, comparison_frame.units = plan.analysis, plan.units
        comparison_frame.notes = notes
        return comparison_frame

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    @property
    def answers(self) -> list[str]:
        """The answers, one sentence per comparison."""
        return phrasing.answers(plain(self), self.analysis, self.units)

    def _repr_html_(self) -> str:
        """Return answers, the table of arms and notes as HTML; every text is escaped."""
        notes = [f"{self.analysis.metric}: {self.analysis.direction}.", *self.notes]
        return _html(self.answers, columns(plain(self), self.analysis, self.units), notes)


def _html(sentences: Sequence[str], table: Sequence[Column], notes_below: Sequence[str]) -> str:
    answers = "".join(f"<li>{escape(text)}</li>" for text in sentences)
    head = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in table)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in zip(*(column.cells for column in table), strict=True)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in notes_below)
    table_html = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><ul>{answers}</ul>{table_html}{notes}</div>"
