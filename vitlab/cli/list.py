"""``vitlab list [SLOT]``: list component names and origins without importing components."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click

from vitlab import registry
from vitlab.cli.options import json_option, plugin_option


@click.command()
@click.argument("slot", required=False)
@plugin_option
@json_option
def command(slot: str | None, plugins: tuple[Path, ...], as_json: bool) -> None:
    """List the components of SLOT, or all slots with theirs."""
    for plugin in plugins:
        registry.load_file(plugin)
    if slot and not as_json:
        show_components(slot)
        return
    names = [slot] if slot else list(registry.SLOT_MODULES)
    entries = [entry for name in names for entry in registry.listing(name)]
    if as_json:
        rows = [
            {"slot": e.slot, "name": e.name, "origin": str(e.origin), "target": e.target, "summary": e.summary}
            for e in entries
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    for name in names:
        components = [entry.name for entry in entries if entry.slot == name]
        click.echo(f"{name:12} {', '.join(components)}")


def show_components(slot: str) -> None:
    """Print the components of a slot, each with its origin and the first line of its documentation."""
    entries = registry.listing(slot)
    clashes = Counter(entry.name for entry in entries)
    for entry in entries:
        label = f"{entry.origin.source}:{entry.name}" if clashes[entry.name] > 1 else entry.name
        click.echo(f"{label:20} {entry.origin!s:20} {entry.summary or entry.target}")
