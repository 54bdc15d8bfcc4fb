"""``vitlab studies``: list the studies of an output folder with their versions and answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli.options import display_path, json_option, out_option
from vitlab.store.result import Ending

if TYPE_CHECKING:
    from vitlab.plan.values import Plan
    from vitlab.plan.versions import Version
    from vitlab.store.folders import Store

COUNTS = (Ending.DONE, Ending.FAILED, "running", "paused", "missing")


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
        click.echo(json.dumps(studies))
        return
    if not studies:
        click.echo(f"no study has been run in {out}", err=True)
    for study in studies:
        _show(study)


def _study(folder: Path, store: Store) -> dict[str, Any] | None:
    from vitlab.plan.versions import versions

    recorded = versions(folder.resolve())
    rows = [row for version in recorded if (row := _row(version, recorded[0], store))]
    questions = [row.pop("question") for row in rows]
    return {"study": folder.name, "question": questions[0], "versions": rows} if rows else None


def _row(version: Version, latest: Version, store: Store) -> dict[str, Any] | None:
    """Return the row of a version, or None if its plan has been deleted meanwhile."""
    from dataclasses import replace

    from vitlab.cli.status import state_of
    from vitlab.plan.plan_file import read_plan
    from vitlab.plan.versions import differences

    plan = read_plan(version.folder / "plan.json")
    if plan is None:
        return None
    study = store.study(plan.study)
    if version.folder != study:
        plan = replace(plan, version=version.name)
    states = Counter(
        state_of(store.trial(trial.key, trial.code))
        for trial in {(item.trial.key, item.trial.code): item.trial for item in plan.trials}.values()
    )
    comparable = version.content is not None and latest.content is not None
    return {
        "question": plan.question,
        "version": version.name,
        "run": version.when,
        "file": version.run.get("file", ""),
        "set": version.set_options,
        "differs": differences(latest.content or {}, version.content or {}) if comparable else "",
        **{name: states[name] for name in COUNTS[:-1]},
        "missing": len(plan.pending) + states["missing"],
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


def _show(study: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitlab.plan.packaged import packaged_name

    console = Console(highlight=False, width=10_000)  # never wrap: lines are piped to grep and cut
    console.print(Text(study["study"], style="bold") + Text(f"  {study['question']}"))
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in study["versions"]:
        file = Path(row["file"])
        place = packaged_name(file) or display_path(file) if row["file"] else ""
        source = " ".join(text for text in (place, row["set"]) if text)
        trials = ", ".join(f"{row[name]} {name}" for name in COUNTS if row[name]) or "none planned"
        table.add_row(*(Text(f" {cell}") for cell in (row["version"][:8], row["run"], trials, row["answer"], source)))
    console.print(table)
    for row in study["versions"][1:]:
        if row["differs"]:
            console.print(Text(f"  {row['version'][:8]} against the latest: {row['differs']}"))
