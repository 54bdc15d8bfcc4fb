"""Tuning: the candidates of each tuning, with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitlab.planning.tune import edges, name_of
from vitlab.report.phrasing import DASH, Columns, Scale, duration
from vitlab.report.sections import Findings, Section, Table, section

if TYPE_CHECKING:
    from vitlab.report.document import Report


@dataclass(frozen=True)
class Candidate:
    """A candidate of a tuning."""

    arm: str  #: it is tuned for; ``all arms`` if they are tuned once
    rival: str  #: the values of its knobs
    metric: str
    score: float | None  #: mean of the metric; None if it diverged or has not ended
    trials: int
    wall_s: float
    outcome: str  #: chosen, diverged, or empty


@section.register("tuning")
class Tuning(Section[Candidate]):
    """The candidates of each tuning, with their scores."""

    heading = "Tuning"
    place = 90
    row = Candidate

    def rows(self, findings: Findings) -> list[Candidate]:
        """Return a row for every candidate."""
        rows = []
        for tuning in findings.plan.tuning:
            edge = edges(tuning)
            win = f"chosen, at the edge of the grid of {', '.join(edge)}" if edge else "chosen"
            for index, rival in enumerate(tuning.rivals):
                other = "" if tuning.open or rival.score is not None else "diverged"
                outcome, values = win if index == tuning.winner else other, name_of(rival.values)
                score, trials = rival.score, len(rival.trials)
                rows.append(
                    Candidate(tuning.arm or "all arms", values, tuning.select, score, trials, rival.wall_s, outcome)
                )
        return rows

    def table(self, rows: Sequence[Candidate], report: Report) -> Table:
        """Return the table of candidates."""
        scale, column = Scale.of(rows[0].metric, report.units), Columns(rows)
        decimals = scale.decimals_of([row.score for row in rows], 2, 4)
        columns = [
            column.text("tuned for", "arm"),
            column.text("candidate", "rival"),
            column(scale.title, lambda row: scale.number(row.score, decimals)),
            column("trainings", lambda row: str(row.trials), rank=2),
            column("time", lambda row: duration(row.wall_s) if row.wall_s else DASH, rank=1),
            column.text("outcome"),
        ]
        return Table(
            columns,
            "Candidates of each tuning, with the mean of their trainings, by which one is chosen and none is judged.",
        )
