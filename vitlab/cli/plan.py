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

    _, plan = lab.plan_study(file, changes=parse_changes(changes), plugins=plugins, out=out)
    store = lab.Store(out.resolve())
    done = {
        (planned.arm, planned.seed): store.trial(planned.trial.key, planned.trial.code).done()
        for planned in plan.trials
    }
    costs = lab.costs(plan) if cost else {}
    if form == "json":
        data = plan.to_json()
        for trial in data["trials"]:
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
        cells = [arm.name, *(text(arm.values[path]) for path in plan.paths), arm.baseline or ""]
        if arm.skip:
            cells += ["0", f"skipped: {arm.skip}"]
        else:
            cells += [str(len(trials)), str(sum(done[planned.arm, planned.seed] for planned in trials))]
        if costs and arm.name in costs:
            cells += [f"{costs[arm.name]['params']:,}", f"{costs[arm.name]['macs']:,}"]
        table.add_row(*map(Text, cells), style="dim" if arm.skip else "")
    console.print(table)
    for note in plan.notes:
        console.print(Text(note))
    console.print(
        f"{len(plan.trials)} trials, {sum(done.values())} of them trained already; metric {plan.analysis.metric}."
    )
