"""``vitlab status``, the progress of a study, and ``vitlab studies``, the studies of an output folder."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitlab.cli import print_json, say, wants_json
from vitlab.cli.completion import complete_study
from vitlab.cli.options import PATH, display_path, out_option, parse_changes, set_option
from vitlab.errors import UserError
from vitlab.spec.tree import NewTree
from vitlab.store.result import Ending

if TYPE_CHECKING:
    from vitlab.planning.study_folder import Version
    from vitlab.planning.values import Plan
    from vitlab.store.folders import Store, TrialFolder

STATES = (Ending.DONE, "running", "paused", Ending.FAILED, "missing")


@click.command()
@click.argument("study", type=PATH, required=False, shell_complete=complete_study)
@out_option
@set_option
def status_command(study: Path | None, out: Path, changes: tuple[str, ...]) -> None:
    """Show how many trials of STUDY (its file, folder or name) are done, running, paused, failed or missing, and why.

    By default STUDY is the one that was run last. A paused trial has a checkpoint, from which the next run goes on.
    """
    from rich.console import Console
    from rich.text import Text

    from vitlab.driver.session import driver_of
    from vitlab.report.api import open_study
    from vitlab.report.formats import fitted_table
    from vitlab.report.phrasing import Column

    plan, store = open_study(_latest(out) if study is None else study, out=out, changes=parse_changes(changes))
    counts: dict[str, Counter[str]] = {arm.name: Counter() for arm in plan.arms}
    tuning: Counter[str] = Counter()
    failures, progress = [], []
    # Trials of tunings belong to no arm until a choice is made.
    rivals = [planned for item in plan.tuning if item.open for planned in item.trials]
    for planned in (*plan.trials, *rivals):
        folder = store.folder(planned.trial)
        state = _state_of(folder)
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
    if wants_json():
        summary = {"study": plan.study, "arms": counts, "tuning": tuning}
        print_json({**summary, "failures": failures, "progress": progress, "driver": driver})
        return
    rows = {"(tuning)": tuning, **counts} if rivals else counts
    reasons = {arm.name: f"skipped: {arm.skip}" for arm in plan.arms if arm.skip}
    columns = [Column(plan.study, tuple(rows), right=False)]
    for state in [*STATES, "pending"] if plan.pending else STATES:
        cells = tuple(str(row[state] or "") for row in rows.values())
        columns.append(Column(state, cells, rank=0 if any(cells) else 1))  # narrow terminals leave out empty columns
    if reasons:
        columns.append(Column("", tuple(reasons.get(name, "") for name in rows), right=False))
    console = Console()
    console.print(fitted_table(columns, console))
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
        say(f"{latest.name} was run last; 'vitlab status STUDY' shows another: {names}")
    return latest


def _state_of(folder: TrialFolder) -> str:
    """Return one of ``STATES``; a result that is damaged counts as missing, and is named on stderr."""
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


@click.command()
@out_option
def studies_command(out: Path) -> None:
    """List the studies in the output folder, each with its question and its versions.

    A version is what the file of a study said when it was run, with the changes of the command line. VERSION names one
    as NAME@VERSION, for 'vitlab report' and wherever else a study is asked for; NAME alone is the latest.
    """
    from vitlab.store.folders import Store

    store = Store(out.resolve())
    studies = [item for file in sorted(out.glob("studies/*/plan.json")) if (item := _study_row(file.parent, store))]
    if wants_json():
        print_json(studies)
        return
    if not studies:
        say(f"no study has been run in {out}")
    for study in studies:
        _print(study)


def _study_row(folder: Path, store: Store) -> NewTree | None:
    """Return a study with its versions, the latest first, as ``--json`` prints it; None if it was deleted meanwhile."""
    from vitlab.planning.study_folder import read_plan, versions

    recorded = versions(folder.resolve())
    plans = [(version, plan) for version in recorded if (plan := read_plan(version.folder / "plan.json"))]
    rows = [_version_row(version, plan, recorded[0], store) for version, plan in plans]
    return {"study": folder.name, "question": plans[0][1].question, "versions": rows} if plans else None


def _version_row(version: Version, plan: Plan, latest: Version, store: Store) -> NewTree:
    from vitlab.planning.study_folder import differences

    if version.folder != store.study(plan.study):
        plan = replace(plan, version=version.name)
    trials = {(item.trial.key, item.trial.code) for item in plan.trials}  # arms may share trials
    states = Counter(_state_of(store.trial(key, code)) for key, code in trials)
    states["missing"] += len(plan.pending)
    comparable = version.content is not None and latest.content is not None
    return {
        "version": version.name,
        "run": version.when,
        "file": version.run.file,
        "set": version.set_options,
        "differs": differences(latest.content or {}, version.content or {}) if comparable else "",
        **{state: states[state] for state in STATES},
        "answer": _answer(plan, store),
    }


def _answer(plan: Plan, store: Store) -> str:
    """Return the number of comparisons by verdict, from the stored report if it is up to date."""
    from vitlab import report

    text = report.read_report(plan, store, "json") or report.render(plan, store, "json")
    rows = json.loads(text)["arms"]
    # Baselines have no verdict.
    counts = Counter(row["verdict"] for row in rows if row["verdict"])
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing compared"


def _print(study: NewTree) -> None:
    from vitlab.planning.packaged import packaged_name

    click.echo(f"{study['study']}  {study['question']}")
    rows = []
    for row in study["versions"]:
        file = Path(row["file"])
        place = packaged_name(file) or display_path(file) if row["file"] else ""
        source = " ".join(text for text in (place, row["set"]) if text)
        trials = ", ".join(f"{row[state]} {state}" for state in STATES if row[state]) or "none planned"
        rows.append((row["version"][:8], row["run"], trials, row["answer"], source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        click.echo(" ".join(f" {cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
    for row in study["versions"][1:]:
        if row["differs"]:
            click.echo(f"  {row['version'][:8]} against the latest: {row['differs']}")
