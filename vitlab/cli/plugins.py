"""``vitlab plugins``: who is a guest here, and whether they load."""

from __future__ import annotations

import click

from vitlab import slots
from vitlab.errors import BrokenComponent, ClashError, VitlabError


@click.command()
@click.option("--strict", is_flag=True, help="Exit with 3 if a plugin does not load.")
def command(strict: bool) -> None:
    """List what installed plugins offer, loading each to see whether it works."""
    broken = []
    guests = [entry for slot in slots.ROOMS for entry in slots.listing(slot) if entry.origin.source != slots.BUILT_IN]
    for entry in guests:
        try:
            slots.slot(entry.slot).find(f"{entry.origin.source}:{entry.name}")
            state = "loads"
        except (BrokenComponent, ClashError) as error:
            state = "BROKEN"
            broken.append(str(error))
        click.echo(f"{entry.slot:12} {entry.name:20} {entry.origin!s:28} {state}")
    if not guests:
        click.echo("no plugins are installed")
    for text in broken:
        click.echo(f"\n{text}", err=True)
    if broken and strict:
        raise VitlabError(f"{len(broken)} plugins do not load")
