"""``vitlab studies``: list the studies of an output folder with their versions and answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitlab.cli import print_json
from vitlab.cli.options import display_path, json_option, out_option
from vitlab.spec.tree import NewTree

if TYPE_CHECKING:
    from vitlab.plan.values import Plan
    from vitlab.plan.versions import Version
    from vitlab.store.folders import Store


@click.command()
@out_option
@json_option
def command(out: Path, as_json: bool) -> None:
    """List the studies in the output folder, each with its question and its versions.

    A version is what the file of a study said when it was run, with the changes of the command line. VERSION names one
    as NAME@VERSION, for 'vitlab report' and wherever else a study is asked for; NAME alone is the latest.
    """
    from vitlab.store.folders import Store

    store = Store(out.resolve())
    studies = [item for file in sorted(out.glob("studies/*/plan.json")) if (item := _study(file.parent, store))]
    if as_json:
        print_json(studies)
        return
    if not studies:
        click.echo(f"no study has been run in {out}", err=True)
    for study in studies:
        _show(study)


def _study(folder: Path, store: Store) -> NewTree | None:
    """Return a study with its versions, the latest first, as ``--json`` prints it; None if it was deleted meanwhile."""
    from vitlab.plan.plan_file import read_plan
    from vitlab.plan.versions import versions

    recorded = versions(folder.resolve())
    plans = [(version, plan) for version in recorded if (plan := read_plan(version.folder / "plan.json"))]
    rows = [_row(version, plan, recorded[0], store) for version, plan in plans]
    return {"study": folder.name, "question": plans[0][1].question, "versions": rows} if plans else None


def _row(version: Version, plan: Plan, latest: Version, store: Store) -> NewTree:
    from vitlab.cli.status import STATES, state_of
    from vitlab.plan.versions import differences

    if version.folder != store.study(plan.study):
        plan = replace(plan, version=version.name)
    trials = {(item.trial.key, item.trial.code) for item in plan.trials}  # arms may share trials
    states = Counter(state_of(store.trial(key, code)) for key, code in trials)
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


def _show(study: NewTree) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitlab.cli.status import STATES
    from vitlab.plan.packaged import packaged_name

    console = Console(highlight=False, width=10_000)  # never wrap: lines are piped to grep and cut
    console.print(Text(study["study"], style="bold") + Text(f"  {study['question']}"))
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in study["versions"]:
        file = Path(row["file"])
        place = packaged_name(file) or display_path(file) if row["file"] else ""
        source = " ".join(text for text in (place, row["set"]) if text)
        trials = ", ".join(f"{row[state]} {state}" for state in STATES if row[state]) or "none planned"
        table.add_row(*(Text(f" {cell}") for cell in (row["version"][:8], row["run"], trials, row["answer"], source)))
    console.print(table)
    for row in study["versions"][1:]:
        if row["differs"]:
            console.print(Text(f"  {row['version'][:8]} against the latest: {row['differs']}"))
