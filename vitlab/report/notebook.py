"""Frames that show in a notebook what a reader wants to see first, and are ordinary frames otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import pandas as pd

from vitlab.plan.values import Plan
from vitlab.report import comparison, phrasing
from vitlab.report import frame as frames
from vitlab.report.document import of_version, plain
from vitlab.report.notes import notes
from vitlab.report.tables import Column, columns, trial_columns
from vitlab.spec import Analysis
from vitlab.store.folders import Store

ROWS = 60  #: trials that a notebook shows


class Results(pd.DataFrame):
    """The columns of :func:`vitlab.report.frame.results`.  What is cut from it is an ordinary frame."""

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def _repr_html_(self) -> str | None:
        """How many trials came to what, and what is looked up about each; every text is escaped."""
        if not {*frames.BEFORE, *frames.AFTER} <= set(self.columns):
            return pd.DataFrame(self)._repr_html_()  # type: ignore[operator,no-any-return]
        states = {name: int((self["status"] == name).sum()) for name in frames.STATUSES}
        said = [f"{phrasing.count(len(self), 'trial')}: {phrasing.states(states)}"]
        hidden = f"... and {len(self) - ROWS:,} more." if len(self) > ROWS else ""
        return _html(said, trial_columns(plain(self.head(ROWS))), [hidden] if hidden else [])


class Compared(pd.DataFrame):
    """The columns of :func:`vitlab.report.comparison.summary`.  What is cut from it is an ordinary frame."""

    _metadata = ("analysis", "notes")
    analysis: Analysis
    notes: tuple[str, ...]

    @classmethod
    def of_study(cls, plan: Plan, store: Store) -> Compared:
        """The judgement of a study, with the notes of its report."""
        found = frames.gather(plan, store)
        table = frames.table(plan, found)
        judged = comparison.summary(table, plan)
        said = notes(plan, [*frames.prerequisites(plan, store), *found], table, plain(judged))
        return cls.of(judged, plan.analysis, (*of_version(plan, store), *said))

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
        return phrasing.answers(plain(self), self.analysis)

    def _repr_html_(self) -> str:
        """Answers, the table as the report has it, and notes; every text is escaped."""
        return _html(self.answers, columns(plain(self), self.analysis), self.notes)


def _html(said: Sequence[str], table: Sequence[Column], below: Sequence[str]) -> str:
    answers = "".join(f"<li>{escape(text)}</li>" for text in said)
    head = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in table)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in zip(*(column.cells for column in table), strict=True)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in below)
    shown = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><ul>{answers}</ul>{shown}{notes}</div>"
