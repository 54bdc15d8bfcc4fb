"""``vitlab status``: show the progress of a study."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitlab.cli import print_json
from vitlab.cli.completion import complete_study
from vitlab.cli.options import display_path, json_option, out_option, parse_changes, set_option
from vitlab.errors import UserError
from vitlab.store.result import Ending

if TYPE_CHECKING:
    from vitlab.store.folders import TrialFolder

STATES = (Ending.DONE, "running", "paused", Ending.FAILED, "missing")


@click.command()
@click.argument("study", type=click.Path(path_type=Path), required=False, shell_complete=complete_study)
@out_option
@set_option
@json_option
def command(study: Path | None, out: Path, changes: tuple[str, ...], as_json: bool) -> None:
    """Show how many trials of STUDY (its file, folder or name) are done, running, paused, failed or missing, and why.

    By default STUDY is the one that was run last. A paused trial has a checkpoint, from which the next run goes on.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitlab.driver.scheduler import driver_of
    from vitlab.report.api import open_study

    plan, store = open_study(_latest(out) if study is None else study, out=out, changes=parse_changes(changes))
    counts: dict[str, Counter[str]] = {arm.name: Counter() for arm in plan.arms}
    tuning: Counter[str] = Counter()
    failures, progress = [], []
    # Trials of tunings belong to no arm until a choice is made.
    rivals = [planned for item in plan.tuning if item.open for planned in item.trials]
    for planned in (*plan.trials, *rivals):
        folder = store.trial(planned.trial.key, planned.trial.code)
        state = state_of(folder)
        if state in ("running", "paused"):
            progress.append(f"{planned.arm} s{planned.seed}: {state}{_reached(folder)}")
        if state == Ending.FAILED:
            log = folder.path / "log.txt"
            place = f" ({display_path(log)})" if log.is_file() else ""
            failures.append(f"{planned.arm} s{planned.seed}: {folder.kind()}: {folder.failure()}{place}")
        counts.get(planned.arm, tuning)[state] += 1
    for planned in plan.pending:
        counts[planned.arm]["pending"] += 1
    driver = driver_of(plan.study, store)
    if as_json:
        summary = {"study": plan.study, "arms": counts, "tuning": tuning}
        print_json({**summary, "failures": failures, "progress": progress, "driver": driver})
        return
    table = Table(box=None, pad_edge=False)
    table.add_column(plan.study, overflow="fold")
    states = [*STATES, "pending"] if plan.pending else STATES
    for state in states:
        table.add_column(state, justify="right")
    rows = {"(tuning)": tuning, **counts} if rivals else counts
    reasons = {arm.name: f"skipped: {arm.skip}" for arm in plan.arms if arm.skip}
    for name, row in rows.items():
        table.add_row(Text(name), *(str(row[state] or "") for state in states), reasons.get(name))
    console = Console()
    console.print(table)
    if driver:
        log = store.study(plan.study) / "driver.log"
        console.print(Text(f"run by {driver}" + (f"; its log is {display_path(log)}" if log.exists() else "")))
    for line in (*progress, *failures):
        console.print(Text(line))


def _latest(out: Path) -> Path:
    """Return the folder of the study that was run last, and name the others on stderr.

    Raises:
        UserError: if none has been run.
    """
    plans = sorted(out.glob("studies/*/plan.json"), key=lambda file: file.stat().st_mtime)
    if not plans:
        raise UserError(f"no study has been run in {out}; 'vitlab run FILE' runs one")
    *others, latest = (file.parent for file in plans)
    if others:
        names = ", ".join(sorted(folder.name for folder in others))
        click.echo(f"{latest.name} was run last; 'vitlab status STUDY' shows another: {names}", err=True)
    return latest


def state_of(folder: TrialFolder) -> str:
    """Return one of ``STATES``."""
    if folder.done():
        return Ending.DONE
    if folder.is_locked():
        return "running"
    if folder.failure() is not None:
        return Ending.FAILED
    return "paused" if folder.checkpoint.exists() else "missing"


def _reached(folder: TrialFolder) -> str:
    """Return the last evaluated step and epoch in a trial's journal, or nothing before the first evaluation."""
    reached = [event.body for event in folder.events()[0] if event.kind == "metrics"]
    return f", at step {reached[-1]['step']:,}, epoch {reached[-1]['epoch']:.3g}" if reached else ""
