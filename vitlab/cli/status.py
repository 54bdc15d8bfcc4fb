"""``vitlab status``: how far a study is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click

from vitlab.cli.options import json_option, out_option


@click.command()
@click.argument("study", type=click.Path(path_type=Path))
@out_option
@json_option
def command(study: Path, out: Path, as_json: bool) -> None:
    """Show how many trials of STUDY (its file or its folder) are done, running, failed or missing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitlab.lab import open_study

    plan, store = open_study(study, out=out)
    counts: dict[str, Counter[str]] = {arm.name: Counter() for arm in plan.arms}
    failures = []
    for planned in plan.trials:
        folder = store.trial(planned.trial.key, planned.trial.code)
        if folder.done():
            state = "done"
        elif folder.held():
            state = "running"
        elif (failure := folder.failure()) is not None:
            state = "failed"
            failures.append(f"{planned.arm} s{planned.seed}: {failure}")
        else:
            state = "missing"
        counts[planned.arm][state] += 1
    if as_json:
        click.echo(json.dumps({"study": plan.study, "arms": counts, "failures": failures}))
        return
    states = ("done", "running", "failed", "missing")
    table = Table(box=None, pad_edge=False)
    table.add_column(plan.study, overflow="fold")
    for state in states:
        table.add_column(state, justify="right")
    for arm in plan.arms:
        cells = [str(counts[arm.name][state] or "") for state in states]
        table.add_row(Text(arm.name), *cells, f"skipped: {arm.skip}" if arm.skip else "")
    console = Console()
    console.print(table)
    for failure in failures:
        console.print(Text(failure))
