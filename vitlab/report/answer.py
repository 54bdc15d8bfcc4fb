"""The result of a run, with a notebook display of its own."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from vitlab.plan.values import Plan
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.report.notebook import Comparison


@dataclass(frozen=True, repr=False)
class Answer:
    """The result of :func:`vitlab.run`: counts of trainings, the answers, and the frames behind them.

    Each training counts once, including those that tune options.
    """

    plan: Plan
    store: Store
    trained: int  #: by this run
    cached: int  #: taken from earlier runs
    failed: int  #: without a result after this run
    tracker: str  #: display name of the tracker; empty if the study has none
    link: str | None  #: address of the study in the tracker; None if it could not be reached
    elsewhere: int = 0  #: trained by other runs meanwhile
    start_command: str = ""  #: command that serves the address; empty if it is served already
    link_notes: tuple[str, ...] = ()  #: lines below the address, such as further addresses

    @property
    def folder(self) -> Path:
        """Return the study's folder, which contains its report."""
        return self.store.study(self.plan.study)

    @property
    def report(self) -> Path:
        """Return the path of the HTML report."""
        return self.folder / "report" / "report.html"

    @property
    def answers(self) -> list[str]:
        """Return one sentence per comparison."""
        return self.compare().answers

    def results(self) -> pd.DataFrame:
        """Return one row per trial, see :func:`vitlab.results`."""
        from vitlab.report import frame

        return frame.results(self.plan, self.store)

    def compare(self) -> Comparison:
        """Return one row per arm, see :func:`vitlab.compare`."""
        from vitlab.report import collect
        from vitlab.report.notebook import Comparison

        return Comparison.of(collect(self.plan, self.store).report)

    def history(self) -> pd.DataFrame:
        """Return the curves, see :func:`vitlab.history`."""
        from vitlab.report import frame

        return frame.history(self.plan, self.store)

    def __repr__(self) -> str:
        return f"<Answer {self.plan.study}: {self._counts}; {self.report}>"

    def _repr_html_(self) -> str:
        """Return the question, the answers, the counts and a link to the report; every text is escaped."""
        answers = "".join(f"<li>{escape(answer)}</li>" for answer in self.answers)
        here = Path.cwd()
        # A notebook serves only the files below its folder.
        link = self.report.relative_to(here).as_posix() if self.report.is_relative_to(here) else self.report.as_uri()
        anchor = f'<a href="{escape(quote(link, safe="/:%"))}" target="_blank">{escape(self.report.name)}</a>'
        question = escape(self.plan.question or self.plan.study)
        return f"<div><b>{question}</b><ul>{answers}</ul><p>{escape(self._counts)}. Report: {anchor}</p></div>"

    @property
    def _counts(self) -> str:
        return f"{self.trained} trained, {self.cached} cached, {self.failed} failed"
