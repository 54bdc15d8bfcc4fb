"""Tuning: the candidates of each tuning, with their scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitlab.planning.tune import format_knobs, knobs_at_edge
from vitlab.report.phrasing import DASH, Columns, Scale, format_duration
from vitlab.report.sections import Findings, Section, Table, section

if TYPE_CHECKING:
    from vitlab.report.report import Report


@dataclass(frozen=True)
class Candidate:
    """A candidate of a tuning."""

    arm: str  #: the arm that it is tuned for; ``all arms`` if they are tuned once
    rival: str  #: the candidate: the values of its knobs
    metric: str  #: the metric that chooses
    score: float | None  #: mean of the metric; missing if it diverged or has not ended
    trials: int  #: its trainings
    wall_s: float  #: seconds of all of them
    outcome: str  #: chosen, diverged, or empty


@section.register("tuning")
class Tuning(Section[Candidate]):
    """The candidates of each tuning, with their scores."""

    heading = "Tuning"
    place = 90
    row = Candidate

    def rows(self, findings: Findings) -> Iterator[Candidate]:
        for tuning in findings.plan.tuning:
            edge = knobs_at_edge(tuning)
            win = f"chosen, at the edge of the grid of {', '.join(edge)}" if edge else "chosen"
            for index, rival in enumerate(tuning.rivals):
                other = "" if tuning.open or rival.score is not None else "diverged"
                outcome, arm = win if index == tuning.winner else other, tuning.arm or "all arms"
                facts = rival.score, len(rival.trials), rival.wall_s, outcome
                yield Candidate(arm, format_knobs(rival.values), tuning.select, *facts)

    def table(self, rows: Sequence[Candidate], report: Report) -> Table:
        scale, column = Scale.of(rows[0].metric, report.units), Columns(rows)
        decimals = scale.decimals_for_values([row.score for row in rows], 2, 4)
        columns = [
            column.text_column("tuned for", "arm"),
            column.text_column("candidate", "rival"),
            column(scale.title, lambda row: scale.number(row.score, decimals)),
            column("trainings", lambda row: str(row.trials), rank=2),
            column("time", lambda row: format_duration(row.wall_s) if row.wall_s else DASH, rank=1),
            column.text_column("outcome"),
        ]
        what = "Candidates of each tuning, by the mean of their trainings; its spread is not stored. None is judged."
        return Table(columns, what)
