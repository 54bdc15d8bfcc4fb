"""Errors on corrupted test images: mean with interval per arm, relative to its baseline, and of each corruption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitlab import statistics
from vitlab.report.phrasing import DASH, Column, Scale, half_width, percent
from vitlab.report.sections.base import Findings, Section, Table, finite_or_none, section
from vitlab.store.result import Ending

if TYPE_CHECKING:
    from vitlab.report.document import Report

METRIC = "test/mce"
"""Mean corruption error; ``test/mce_NAME`` is the error of one corruption."""


@dataclass(frozen=True)
class Corrupted:
    """Errors of an arm on corrupted images, as shares of one; None for what is not known."""

    arm: str
    n: int  #: seeds
    mean: float | None
    low: float | None
    high: float | None
    relative: float | None
    """Mean over corruptions of the arm's error divided by its baseline's: the mCE of the paper (arXiv:1903.12261),
    with the baseline in the place of AlexNet."""
    by_corruption: Mapping[str, float | None]  #: ``test/mce_NAME`` to the mean over seeds


@section.register("corrupted")
class CorruptedImages(Section[Corrupted]):
    """Errors of every arm on corrupted test images."""

    heading = "Corrupted test images"
    place = 80
    row = Corrupted

    def rows(self, findings: Findings) -> list[Corrupted]:
        """Return a row per arm with a mean corruption error."""
        frame = findings.results.frame
        if METRIC not in frame:
            return []
        kinds = [str(name) for name in frame.columns if name.startswith(f"{METRIC}_")]
        done = frame[(frame["status"] == Ending.DONE) & frame[METRIC].notna()]
        means = {str(arm): trials[kinds].mean() for arm, trials in done.groupby("arm", sort=False)}
        rows = []
        for arm, trials in done.groupby("arm", sort=False):
            mean = statistics.mean_interval(trials[METRIC].tolist(), findings.plan.analysis.alpha, 0.0)
            values, baseline = {"mean": mean.mean, "low": mean.low, "high": mean.high}, trials["baseline"].iloc[0]
            comparable = baseline in means and (means[baseline] > 0).all()
            values["relative"] = float((means[str(arm)] / means[baseline]).mean()) if comparable else float("nan")
            by_corruption = finite_or_none({name: float(means[str(arm)][name]) for name in kinds})
            rows.append(Corrupted(str(arm), mean.n, **finite_or_none(values), by_corruption=by_corruption))
        return rows

    def table(self, rows: Sequence[Corrupted], report: Report) -> Table | None:
        """Return the table."""
        if not rows:
            return None
        scale = Scale.of(METRIC, report.units)
        decimals = scale.decimals([half_width(row.low, row.high) for row in rows], [row.mean for row in rows])
        intervals = tuple(scale.interval(row.low, row.high, decimals) for row in rows)
        table = [
            Column("arm", tuple(row.arm for row in rows), right=False),
            Column(scale.title, tuple(scale.number(row.mean, decimals) for row in rows)),
            Column(f"{percent(1 - report.analysis.alpha)} interval", intervals, rank=1),
        ]
        if any(row.relative is not None for row in rows):
            relative = tuple(DASH if row.relative is None else f"{100 * row.relative:.1f}" for row in rows)
            table.append(Column("of its baseline's (%)", relative, rank=2))
        for name in rows[0].by_corruption:
            title = name.removeprefix(f"{METRIC}_").replace("_", " ")
            table.append(Column(title, tuple(scale.number(row.by_corruption[name], 1) for row in rows), rank=3))
        return Table(
            table,
            "Mean error over corruptions and severities with the interval of the seeds, uncorrected for other arms; as "
            "a share of the baseline's, averaged over corruptions; and the mean over severities of each.",
        )

    def to_json(self, rows: Sequence[Corrupted]) -> Any:
        """Return the rows as JSON values, the errors of single corruptions beside the others."""
        names = ("arm", "n", "mean", "low", "high", "relative")
        return [{**{name: getattr(row, name) for name in names}, **row.by_corruption} for row in rows]

    def from_json(self, values: Any) -> list[Corrupted]:
        """Return the rows of JSON values."""
        rows = []
        for value in values:
            single = {name: error for name, error in value.items() if name.startswith(METRIC)}
            others = {name: item for name, item in value.items() if name not in single}
            rows.append(Corrupted(**others, by_corruption=single))
        return rows
