"""Comparisons: the statistics behind each verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitlab.report.phrasing import DASH, MINUS, Column, Row, Scale, p_value
from vitlab.report.sections.arms import decimals_of_means_and_differences
from vitlab.report.sections.base import Section, Table, section
from vitlab.spec import Analysis

if TYPE_CHECKING:
    from vitlab.report.document import Report

JOINT = ("interval with new images", "p with chance")
"""Columns that hold for all comparisons at once."""


@section.register("comparisons")
class Comparisons(Section[Row]):
    """The statistics behind each verdict."""

    heading = "Comparisons"
    place = 20
    in_terminal = False

    def table(self, rows: Sequence[Row], report: Report) -> Table | None:
        """Return the table; its caption says of several comparisons whether they are corrected."""
        columns = detail_columns(report.arms, report.analysis, report.units)
        text = "Statistics of each verdict."
        if sum(row["baseline"] is not None for row in report.arms) > 1:
            joint = [column.title for column in columns if column.title in JOINT]
            text += " Intervals and p values in this table are of one comparison each"
            text += f", except for {' and '.join(joint)}: these hold for all comparisons at once." if joint else "."
        return Table(columns, text) if columns else None


def detail_columns(rows: Sequence[Row], analysis: Analysis, units: Mapping[str, str]) -> list[Column]:
    """Return the table of comparisons with the statistics of each verdict; columns without values are left out."""
    compared = [row for row in rows if row["baseline"] is not None and row["difference"] is not None]
    if not compared:
        return []
    scale = Scale.of(analysis.metric, units)
    _, apart = decimals_of_means_and_differences(rows, scale)

    def bracket(row: Row, low: str, high: str, factor: float, decimals: int) -> str:
        if row[low] is None:
            return DASH
        return "[" + ", ".join(f"{factor * row[end]:.{decimals}f}".replace("-", MINUS) for end in (low, high)) + "]"

    def cells(cell: Any) -> tuple[str, ...]:
        return tuple(cell(row) for row in compared)

    alpha = analysis.alpha
    table = [
        Column("arm", cells(lambda row: row["arm"]), right=False),
        Column("compared with", cells(lambda row: row["baseline"]), right=False),
        Column("test", cells(lambda row: row["test"]), right=False),
        Column("pairs", cells(lambda row: str(row["pairs"]))),
        Column("p", cells(lambda row: p_value(row["p"], alpha))),
        Column(
            "interval with new images",
            cells(lambda row: bracket(row, "new_images_low", "new_images_high", scale.factor, apart)),
        ),
        Column("broken", cells(lambda row: str(row["broken"]))),
        Column("difference with chance", cells(lambda row: scale.number(row["chance_difference"], apart, sign=True))),
        Column("p with chance", cells(lambda row: p_value(row["chance_p"], alpha))),
    ]
    return [column for column in table if not set(column.cells) <= ({"0"} if column.title == "broken" else {DASH})]
