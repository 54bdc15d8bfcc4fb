"""Frames with a notebook display of their own; otherwise ordinary pandas frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import pandas as pd

from vitlab.errors import count
from vitlab.plan.values import Plan
from vitlab.report import comparison, phrasing
from vitlab.report import frame as frames
from vitlab.report.document import Report, plain
from vitlab.report.page import trial_columns
from vitlab.report.phrasing import Column
from vitlab.report.sections.arms import columns
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
        more = [f"... and {len(self) - ROWS:,} more."] if len(self) > ROWS else []
        table = trial_columns(plain(self.head(ROWS)), self.units)
        return _html([f"{count(len(self), 'trial')}: {phrasing.states(states)}"], table, more)


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
        direction = f"{self.report.analysis.metric}: {self.report.analysis.direction}."
        return _html(
            self.answers, columns(self.report.arms, self.report.analysis, self.report.units), [direction, *self.notes]
        )


def _html(sentences: Sequence[str], table: Sequence[Column], notes: Sequence[str]) -> str:
    answers, below = (
        "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) for tag, texts in (("li", sentences), ("p", notes))
    )
    rows = list(zip(*(column.cells for column in table), strict=True))
    with pd.option_context("display.max_colwidth", None):
        cells = pd.DataFrame(rows, columns=[column.title for column in table]).to_html(index=False, border=0)
    return f"<div><ul>{answers}</ul>{cells}{below}</div>"
