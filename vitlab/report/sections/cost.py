"""Cost: speed and memory of every arm, measured alone by ``vitlab run --measure``.

Measurements are kept in a file of the study and never in trials, see :mod:`vitlab.driver.benchmark`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vitlab.errors import format_count
from vitlab.planning.values import Plan
from vitlab.report.phrasing import Columns
from vitlab.report.sections import Findings, Section, Table, section
from vitlab.spec.tree import parse_as
from vitlab.store.files import read_json, write_json
from vitlab.store.folders import Store

if TYPE_CHECKING:
    from vitlab.report.report import Report

SPEEDS = {"train_images_per_s": "images/s in training", "infer_images_per_s": "images/s in inference"}
COSTS = {name: f"{what}, alone" for name, what in {**SPEEDS, "peak_bytes": "bytes of memory at most"}.items()}
"""Measured costs with their labels."""


@dataclass(frozen=True)
class MeasuredCost:
    """The cost of an arm: medians over rounds with their quartiles, and the conditions of the measurement."""

    arm: str  #: the arm, measured alone
    trial: str  #: key of the trial of its first seed
    code: str  #: digest of the code that was measured
    rounds: int  #: measurements, of which the numbers are medians
    train_images_per_s: float  #: by the loop, with the training's batch size, data loading included
    train_images_per_s_q1: float  #: first quartile of the rounds
    train_images_per_s_q3: float  #: third quartile
    infer_images_per_s: float  #: without gradients
    infer_images_per_s_q1: float  #: first quartile of the rounds
    infer_images_per_s_q3: float  #: third quartile
    peak_bytes: int  #: most memory of the process, or of the allocator on CUDA
    device: str  #: cpu or cuda
    processor: str  #: name of the GPU, or instruction set of the CPU
    threads: int  #: threads of torch
    batch_size: int  #: images of a step
    precision: str  #: precision of the training
    torch: str  #: version of torch
    load: float  #: 1-minute load average of the machine at the end
    measured: str  #: when, in UTC


@section.register("cost")
class Cost(Section[MeasuredCost]):
    """Speed and memory of every arm alone."""

    heading = "Cost"
    place = 60
    row = MeasuredCost

    def inputs(self, plan: Plan, store: Store) -> int:
        file = _costs_file(plan, store)
        return file.stat().st_mtime_ns if file.exists() else 0

    def rows(self, findings: Findings) -> list[MeasuredCost]:
        return up_to_date_costs(findings)

    def notes(self, rows: Sequence[MeasuredCost], findings: Findings) -> Iterator[str]:
        current = {row.arm for row in rows}
        stored = _read_costs(findings)
        outdated = [arm.name for arm in findings.plan.arms if arm.name in stored and arm.name not in current]
        if outdated:
            yield (
                f"What {'; '.join(outdated)} cost was measured under other code or another spec and is left out; "
                "'vitlab run --measure' measures again."
            )

    def table(self, rows: Sequence[MeasuredCost], report: Report) -> Table:
        column = Columns(rows)
        table = [
            column.text_column("arm"),
            column(SPEEDS["train_images_per_s"], lambda row: f"{row.train_images_per_s:,.0f}"),
            column("quartiles", lambda row: f"{row.train_images_per_s_q1:,.0f} to {row.train_images_per_s_q3:,.0f}", 1),
            column(SPEEDS["infer_images_per_s"], lambda row: f"{row.infer_images_per_s:,.0f}"),
            column("quartiles", lambda row: f"{row.infer_images_per_s_q1:,.0f} to {row.infer_images_per_s_q3:,.0f}", 1),
            column("memory", lambda row: f"{row.peak_bytes / (1 << 20):,.0f} MiB"),
        ]
        first = rows[0]
        caption = (
            f"Each arm alone, arms in turns, medians of {format_count(first.rounds, 'round')}; training by the loop, "
            "with its data; memory of the whole process, or on a GPU of its allocator. "
            f"{first.device}, {first.processor}, {format_count(first.threads, 'thread')}, load {first.load:.1f}; "
            f"measured {first.measured[:16]} UTC."
        )
        return Table(table, caption)


def up_to_date_costs(findings: Findings) -> list[MeasuredCost]:
    """Return the measured costs of the arms whose spec and code are still those that were measured."""
    plan, stored = findings.plan, _read_costs(findings)
    rows = [(stored[arm], planned.trial) for arm, planned in plan.first_trials.items() if arm in stored]
    return [row for row, trial in rows if (row.trial, row.code) == (trial.key, trial.code)]


def write_costs(rows: Sequence[MeasuredCost], plan: Plan, store: Store) -> Path:
    """Write the measurements of a study, and return their file."""
    file = _costs_file(plan, store)
    write_json(file, [asdict(row) for row in rows])
    return file


def _costs_file(plan: Plan, store: Store) -> Path:
    return store.study(plan.study) / "cost.json"


def _read_costs(findings: Findings) -> dict[str, MeasuredCost]:
    """Return the stored measurements by arm; empty if there are none."""
    if findings.store is None:
        return {}
    rows = read_json(_costs_file(findings.plan, findings.store), partial(parse_as, list[MeasuredCost]))
    return {row.arm: row for row in rows or ()}
