"""``vitlab plan FILE``: what would be trained, before paying for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from vitlab.cli.options import file_argument, out_option, parse_changes, plugin_option, set_option


@click.command()
@file_argument
@out_option
@set_option
@plugin_option
@click.option(
    "--cost", is_flag=True, help="Add parameters and multiply-accumulates of each arm (builds each model once)."
)
@click.option("--full", is_flag=True, help="Print every arm's resolved spec, defaults included.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(
    file: Path, out: Path, changes: tuple[str, ...], plugins: tuple[Path, ...], cost: bool, full: bool, form: str
) -> None:
    """Show the arms and trials of FILE: what runs, what is skipped and why, what has been trained already."""
    from vitlab import lab
    from vitlab.store import Store

    _, plan = lab.plan_study(file, changes=parse_changes(changes), plugins=plugins, out=out)
    store = Store(out.resolve())
    rivals = [planned for tuning in plan.tuning for planned in tuning.trials]
    done = {
        (planned.arm, planned.seed): store.trial(planned.trial.key, planned.trial.code).done()
        for planned in (*plan.trials, *rivals)
    }
    costs = lab.costs(plan) if cost else {}
    if form == "json":
        data = plan.to_json()
        tried = [trial for tuning in data["tuning"] for rival in tuning["rivals"] for trial in rival["trials"]]
        for trial in (*data["trials"], *tried):
            trial["cached"] = done[trial["arm"], trial["seed"]]
        for arm in data["arms"]:
            arm["cost"] = costs.get(arm["name"])
        click.echo(json.dumps(data, indent=1))
        return
    _table(plan, done, costs)
    if full:
        for arm, spec in plan.to_json()["specs"].items():
            click.echo(f"\n# {arm}\n{json.dumps(spec, indent=1)}")


def _table(plan: Any, done: dict[tuple[str, int], bool], costs: dict[str, dict[str, int]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitlab.plan.design import text
    from vitlab.plan.tune import PENDING

    console = Console()
    if plan.question:
        console.print(Text(plan.question), style="italic")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm", overflow="fold")
    for path in plan.paths:
        table.add_column(path.rpartition(".")[2])
    table.add_column("compared with")
    table.add_column("trials", justify="right")
    table.add_column("cached", justify="right")
    if costs:
        table.add_column("parameters", justify="right")
        table.add_column("MACs", justify="right")
    for arm in plan.arms:
        trials = [planned for planned in plan.trials if planned.arm == arm.name]
        pending = sum(planned.arm == arm.name for planned in plan.pending)
        cells = [arm.name, *(text(arm.values[path]) for path in plan.paths), arm.baseline or ""]
        if arm.skip:
            cells += ["0", f"skipped: {arm.skip}"]
        elif pending:
            cells += [str(pending), PENDING]
        else:
            cells += [str(len(trials)), str(sum(done[planned.arm, planned.seed] for planned in trials))]
        if costs and arm.name in costs:
            cells += [f"{costs[arm.name]['params']:,}", f"{costs[arm.name]['macs']:,}"]
        table.add_row(*map(Text, cells), style="dim" if arm.skip else "")
    console.print(table)
    for note in (*plan.notes, *(f"{arm.name}: {arm.note}" for arm in plan.arms if arm.note)):
        console.print(Text(note))
    for tuning in plan.tuning:
        console.print(Text(_tuning(tuning, done)))
    trained = sum(done[planned.arm, planned.seed] for planned in plan.trials)
    waiting = f", {len(plan.pending)} more once their knobs are tuned" if plan.pending else ""
    console.print(
        f"{len(plan.trials)} trials, {trained} of them trained already{waiting}; metric {plan.analysis.metric}."
    )


def _tuning(tuning: Any, done: dict[tuple[str, int], bool]) -> str:
    from vitlab.plan.tune import name_of

    whom = tuning.arm or "all arms"
    if tuning.winner is not None:
        return f"{whom}: {name_of(tuning.rivals[tuning.winner].values)} was chosen by {tuning.select}."
    trained = sum(done[planned.arm, planned.seed] for planned in tuning.trials)
    rivals = "; ".join(name_of(rival.values) for rival in tuning.rivals)
    return tuning.failure or (
        f"{whom}: tuned first, by {tuning.select}, among {rivals}: {len(tuning.trials)} trials, {trained} of them "
        "trained already."
    )
