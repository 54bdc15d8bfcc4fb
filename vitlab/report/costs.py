"""Costs of arms as :mod:`vitlab.driver.benchmark` measured them, kept in a file of their own and never in trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Plan
from vitlab.store.damage import read_stored
from vitlab.store.folders import Store

FILE = "cost.parquet"
SPEEDS = {"train_images_per_s": "images/s in training", "infer_images_per_s": "images/s in inference"}
MEMORY = {"peak_bytes": "bytes of memory at most"}
COST_COLUMNS = {name: f"{what}, alone" for name, what in {**SPEEDS, **MEMORY}.items()}
"""Measured cost columns with their labels."""

Row = Mapping[str, Any]


def file_of(plan: Plan, store: Store) -> Path:
    """Return the path of a study's measurements, which may not exist."""
    return store.study(plan.study) / FILE


def modified_ns(plan: Plan, store: Store) -> int:
    """Return the modification time of the measurements in ns; 0 if there are none."""
    file = file_of(plan, store)
    return file.stat().st_mtime_ns if file.exists() else 0


def read_costs(plan: Plan, store: Store) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the measurements of a plan's arms, and the arms whose measurements are outdated."""
    rows = read_stored(file_of(plan, store), _rows)
    if rows is None:
        return [], []
    firsts = {planned.arm: planned.trial for planned in reversed(plan.trials)}
    by_arm = {row["arm"]: {str(name): value for name, value in row.items()} for row in rows}
    current = [arm for arm, trial in firsts.items() if arm in by_arm and _is(by_arm[arm], trial.key, trial.code)]
    order = [arm.name for arm in plan.arms]
    return [by_arm[arm] for arm in order if arm in current], [
        arm for arm in order if arm in by_arm and arm not in current
    ]


def with_costs(rows: Sequence[Row], costs: Sequence[Row]) -> list[Row]:
    """Return the rows of a summary with the measured costs added."""
    by_arm = {row["arm"]: {name: row[name] for name in COST_COLUMNS} for row in costs}
    return [{**row, **by_arm.get(row["arm"], {})} for row in rows]


def notes(outdated: Sequence[str]) -> list[str]:
    """Return a note about outdated measurements, if there are any."""
    if not outdated:
        return []
    return [
        f"What {'; '.join(outdated)} cost was measured under other code or another spec and is left out; "
        "'vitlab run --measure' measures again."
    ]


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of measurements.

    Raises:
        KeyError: if a column is missing.
    """
    import pandas as pd

    frame = pd.read_parquet(file)
    frame[["arm", "trial", "code", *COST_COLUMNS]]
    rows: list[Any] = frame.astype({"measured": "string"}).astype(object).to_dict(orient="records")
    return rows


def _is(row: Row, key: str, code: str) -> bool:
    return (row["trial"], row["code"]) == (key, code)
