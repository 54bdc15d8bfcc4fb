"""``vitlab sync DIR``: deliver to a tracker what is missing there."""

from __future__ import annotations

from pathlib import Path

import click

from vitlab.cli import say
from vitlab.cli.completion import components_of


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default="vitlab-runs")
@click.option(
    "--tracker",
    metavar="NAME",
    shell_complete=components_of("tracker"),
    help="A tracker's name; by default the one each study names.",
)
@click.option("--tracking-uri", help="MLflow server or database; by default the one each study names.")
def sync_command(folder: Path, tracker: str | None, tracking_uri: str | None) -> list[str]:
    """Deliver the journals of all studies in FOLDER to their tracker.  What is there already is not delivered twice."""
    from vitlab.trackers.delivery import sync

    choice = {name: value for name, value in (("type", tracker), ("uri", tracking_uri)) if value is not None}
    deliveries = sync(folder, tracker=choice or None)
    if not deliveries:
        say(f"no study in {folder} has a tracker to deliver to")
    return [
        f"{item.study}   not reached" if item.link is None else f"{item.study}   {item.link}   {item.sentence}"
        for item in deliveries
    ]
