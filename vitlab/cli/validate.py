"""``vitlab validate FILE...``: every mistake of every file, without running anything."""

from __future__ import annotations

from pathlib import Path

import click

from vitlab.cli import print_json, wants_json
from vitlab.cli.completion import complete_file
from vitlab.cli.options import PATH, parse_changes, plugin_option, set_option, study_file
from vitlab.errors import Problem, SpecError, count


@click.command()
@click.argument("files", nargs=-1, required=True, type=PATH, shell_complete=complete_file)
@set_option
@plugin_option
@click.option("--build", is_flag=True, help="Also build every distinct trial's model, without memory for its weights.")
def validate_command(files: tuple[Path, ...], changes: tuple[str, ...], plugins: tuple[Path, ...], build: bool) -> None:
    """Check study FILES against the installed components.  Writes nothing.

    Baselines of 'vitlab check' (.baseline.yaml), which lie beside studies, are skipped.
    """
    from vitlab.driver.planning import costs, plan_study

    problems, rows = list[Problem](), []
    for file in files:
        if file.name.endswith(".baseline.yaml"):
            click.echo(f"{file}: a baseline of 'vitlab check', no study: skipped", err=wants_json())
            continue
        try:
            _, plan = plan_study(study_file(file), changes=parse_changes(changes), plugins=plugins)
        except SpecError as error:
            problems += error.complete
            continue
        if build:
            costs(plan)
        arms, trials = len(plan.arms), len(plan.trials) + len(plan.pending)
        skipped = sum(1 for arm in plan.arms if arm.skip)
        rows.append({"file": str(file), "arms": arms, "trials": trials, "skipped": skipped, "notes": plan.notes})
        if not wants_json():
            and_skipped = f", {count(skipped, 'arm')} skipped" if skipped else ""
            click.echo(f"{file}: {count(arms, 'arm')}, {count(trials, 'trial')}{and_skipped}")
            for note in plan.notes:
                click.echo(f"  {note}")
    if problems:
        raise SpecError(problems)
    if wants_json():
        print_json(rows)
