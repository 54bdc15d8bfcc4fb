"""Heads: the accuracy of each head of an arm with several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitlab.report.phrasing import Column, Scale
from vitlab.report.sections.base import Findings, Section, Table, section
from vitlab.store.result import Ending

if TYPE_CHECKING:
    from vitlab.report.document import Report


@dataclass(frozen=True)
class HeadsOfArm:
    """Means over the seeds of an arm, by metric; None for a metric that the arm has not."""

    arm: str
    means: Mapping[str, float | None]


@section.register("heads")
class Heads(Section[HeadsOfArm]):
    """Mean accuracy of each head and of their combinations, and their token cosine, of arms with several heads."""

    heading = "Heads"
    place = 70
    row = HeadsOfArm

    def rows(self, findings: Findings) -> list[HeadsOfArm]:
        """Return a row per arm with several heads."""
        frame, group = findings.results.frame, findings.plan.analysis.metric.partition("/")[0]
        names = [str(name) for name in frame.columns if name.startswith(f"{group}/accuracy_")]
        rows = []
        for arm, trials in frame[frame["status"] == Ending.DONE].groupby("arm", sort=False):
            means = trials.reindex(columns=[*names, f"{group}/token_cosine"]).mean()
            if means[names].notna().any():
                by_name = {str(name): None if math.isnan(mean) else float(mean) for name, mean in means.items()}
                rows.append(HeadsOfArm(str(arm), by_name))
        return rows

    def table(self, rows: Sequence[HeadsOfArm], report: Report) -> Table | None:
        """Return the table; metrics that no arm has are left out."""
        table = [Column("arm", tuple(row.arm for row in rows), right=False)]
        for name in rows[0].means if rows else ():
            means = [row.means[name] for row in rows]
            if any(mean is not None for mean in means):
                scale = Scale.of(name, report.units)
                decimals = scale.decimals_of(means, 1, 3)
                table.append(Column(scale.title, tuple(scale.number(mean, decimals) for mean in means)))
        caption = "Mean over seeds of the metric of each head alone, and of all heads together."
        return Table(table, caption) if rows else None

    def to_json(self, rows: Sequence[HeadsOfArm]) -> Any:
        """Return the rows as JSON values: the arm beside its means."""
        return [{"arm": row.arm, **row.means} for row in rows]

    def from_json(self, values: Any) -> list[HeadsOfArm]:
        """Return the rows of JSON values."""
        return [HeadsOfArm(value["arm"], {name: value[name] for name in value if name != "arm"}) for value in values]
