"""``vitlab logs``: what a trial wrote while it ran, and why it failed."""

from __future__ import annotations

from pathlib import Path

import click

from vitlab.cli.options import out_option
from vitlab.errors import UserError
from vitlab.store import TrialFolder, read_json


@click.command()
@click.argument("trial")
@out_option
def command(trial: str, out: Path) -> None:
    """Print the events, the output and the failure of TRIAL, named by the first letters of its key."""
    folders = sorted(path for path in (out / "trials").glob("*/*") if path.parent.name.startswith(trial))
    if not folders or not trial.isalnum():
        raise UserError(f"no trial whose key begins with '{trial}' in {out}")
    keys = sorted({path.parent.name for path in folders})
    if len(keys) > 1:
        raise UserError(f"'{trial}' begins {len(keys)} keys: {', '.join(key[:16] for key in keys)}")
    for path in folders:
        click.echo(f"{path}")
        events, _ = TrialFolder(path).events()
        for event in events:
            click.echo(f"{event.kind:8} " + "  ".join(f"{name}={value}" for name, value in event.body.items()))
        log = path / "log.txt"
        if log.exists():
            click.echo(log.read_text(errors="replace"))
        failure = read_json(path / "failure.json")
        if failure:
            click.echo(f"{failure['failure']}\n{failure['traceback']}")
