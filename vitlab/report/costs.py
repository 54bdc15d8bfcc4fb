"""Costs of arms as :mod:`vitlab.driver.benchmark` measured them, kept in a file of their own and never in trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Plan
from vitlab.store.folders import Store, read_stored

FILE = "cost.parquet"
SPEEDS = {"train_images_per_s": "images/s in training", "infer_images_per_s": "images/s in inference"}
MEMORY = {"peak_bytes": "bytes of memory at most"}
MEASURED = {name: f"{what}, alone" for name, what in {**SPEEDS, **MEMORY}.items()}
"""What can be traded for what an arm reaches."""

Row = Mapping[str, Any]


def file_of(plan: Plan, store: Store) -> Path:
    """Where the measurements of a study stand, if there are any."""
    return store.study(plan.study) / FILE


def changed(plan: Plan, store: Store) -> int:
    """When the measurements were written; 0 where there are none."""
    file = file_of(plan, store)
    return file.stat().st_mtime_ns if file.exists() else 0


def measured(plan: Plan, store: Store) -> tuple[list[dict[str, Any]], list[str]]:
    """The measurements of a plan's arms, and the arms that were measured as something else than they are now."""
    rows = read_stored(file_of(plan, store), _rows)
    if rows is None:
        return [], []
    firsts = {planned.arm: planned.trial for planned in reversed(plan.trials)}
    known = {row["arm"]: {str(name): value for name, value in row.items()} for row in rows}
    now = [arm for arm, trial in firsts.items() if arm in known and _is(known[arm], trial.key, trial.code)]
    order = [arm.name for arm in plan.arms]
    return [known[arm] for arm in order if arm in now], [arm for arm in order if arm in known and arm not in now]


def beside(rows: Sequence[Row], costs: Sequence[Row]) -> list[Row]:
    """The rows of a summary with what was measured beside them, where anything was."""
    by_arm = {row["arm"]: {name: row[name] for name in MEASURED} for row in costs}
    return [{**row, **by_arm.get(row["arm"], {})} for row in rows]


def notes(outdated: Sequence[str]) -> list[str]:
    """That measurements were left out."""
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
    frame[["arm", "trial", "code", *MEASURED]]
    rows: list[Any] = frame.astype({"measured": "string"}).astype(object).to_dict(orient="records")
    return rows


def _is(row: Row, key: str, code: str) -> bool:
    return (row["trial"], row["code"]) == (key, code)
