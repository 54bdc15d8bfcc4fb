"""Errors on corrupted test images: mean with interval per arm, relative to its baseline, and of each corruption."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitlab.plan.values import Plan
from vitlab.report.phrasing import DASH, Column, Row, Scale, percent, widths
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

METRIC = "test/mce"
"""Mean corruption error; that of a corruption is ``test/mce_NAME``."""


def corruptions(plan: Plan, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per arm with a mean corruption error.

    ``relative`` is the mean over corruptions of the arm's error divided by that of its baseline: the mCE of the paper
    (arXiv:1903.12261), with the baseline in the place of AlexNet.
    """
    from vitlab import statistics

    if METRIC not in frame:
        return []
    kinds = [name for name in frame.columns if name.startswith(f"{METRIC}_")]
    done = frame[(frame["status"] == Ending.DONE) & frame[METRIC].notna()]
    means = {str(arm): trials[kinds].mean() for arm, trials in done.groupby("arm", sort=False)}
    rows = []
    for arm, trials in done.groupby("arm", sort=False):
        interval = statistics.mean_interval(trials[METRIC].tolist(), plan.analysis.alpha, 0.0)
        baseline = trials["baseline"].iloc[0]
        relative = math.nan
        if baseline in means and (means[baseline] > 0).all():
            relative = float((means[str(arm)] / means[baseline]).mean())
        values = {"mean": interval.mean, "low": interval.low, "high": interval.high, "relative": relative}
        values |= {str(name): float(value) for name, value in means[str(arm)].items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        rows.append({"arm": str(arm), "n": interval.n, **finite})
    return rows


def corruption_columns(rows: Sequence[Row], alpha: float, units: Mapping[str, str]) -> list[Column]:
    """Return the table of :func:`corruptions`."""
    if not rows:
        return []
    scale = Scale.of(METRIC, units)
    decimals = scale.decimals(widths(rows, "low", "high"), [row["mean"] for row in rows])

    def cells(cell: Any) -> tuple[str, ...]:
        return tuple(cell(row) for row in rows)

    def bracket(row: Row) -> str:
        if row["low"] is None:
            return DASH
        return f"[{scale.end(row['low'], decimals)}, {scale.end(row['high'], decimals)}]"

    table = [
        Column("arm", cells(lambda row: row["arm"]), right=False),
        Column(scale.title, cells(lambda row: scale.number(row["mean"], decimals))),
        Column(f"{percent(1 - alpha)} interval", cells(bracket), rank=1),
    ]
    if any(row["relative"] is not None for row in rows):
        relative = cells(lambda row: DASH if row["relative"] is None else f"{100 * row['relative']:.1f}")
        table.append(Column("of its baseline's (%)", relative, rank=2))
    kinds = [name for name in rows[0] if name.startswith(f"{METRIC}_")]
    for name in kinds:
        title = name.removeprefix(f"{METRIC}_").replace("_", " ")
        table.append(Column(title, cells(lambda row, name=name: scale.number(row.get(name), 1)), rank=3))
    return table
