"""``vitlab list [SLOT]``: what can be named, and where it comes from.  Imports no component."""

from __future__ import annotations

import json
from collections import Counter

import click

from vitlab import slots
from vitlab.cli.options import json_option


@click.command()
@click.argument("slot", required=False)
@json_option
def command(slot: str | None, as_json: bool) -> None:
    """List the components of SLOT, or all slots with theirs."""
    names = [slot] if slot else list(slots.ROOMS)
    entries = [entry for name in names for entry in slots.listing(name)]
    if as_json:
        rows = [{"slot": e.slot, "name": e.name, "origin": str(e.origin), "target": e.target} for e in entries]
        click.echo(json.dumps(rows, indent=1))
    elif slot:
        clashes = Counter(entry.name for entry in entries)
        for entry in entries:
            shown = f"{entry.origin.source}:{entry.name}" if clashes[entry.name] > 1 else entry.name
            click.echo(f"{shown:24} {entry.origin!s:24} {entry.target}")
    else:
        for name in names:
            mine = [entry.name for entry in entries if entry.slot == name]
            click.echo(f"{name:12} {', '.join(mine)}")
