"""``vitlab sync DIR``: deliver to a tracker what is missing there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitlab.cli.completion import components_of
from vitlab.errors import count
from vitlab.store.files import mapping, read_json


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default="vitlab-runs")
@click.option(
    "--tracker",
    metavar="NAME",
    shell_complete=components_of("tracker"),
    help="A tracker's name; by default the one each study names.",
)
@click.option("--tracking-uri", help="MLflow server or database; by default the one each study names.")
def command(folder: Path, tracker: str | None, tracking_uri: str | None) -> None:
    """Deliver the journals of all studies in FOLDER to their tracker.  What is there already is not delivered twice."""
    from vitlab.trackers.delivery import sync

    options = {} if tracking_uri is None else {"uri": tracking_uri}
    choice = {**options, **({} if tracker is None else {"type": tracker})}
    before = _deliveries(folder)
    links = sync(folder, tracker=choice or None)
    after = _deliveries(folder)
    for study, link in links:
        delivered = sum(state != before.get(name) for name, state in after.items() if name[0] == study)
        is_tracked = any(name[0] == study for name in after)
        news = f"{count(delivered, 'trial')} delivered" if delivered else "nothing was missing"
        click.echo("   ".join([study, link or "not reached", *([news] if link and is_tracked else [])]))
    if not links:
        click.echo(f"no study in {folder} has a tracker to deliver to", err=True)


def _deliveries(folder: Path) -> dict[tuple[str, ...], Any]:
    """Return the state of every delivery, by study, file, destination and trial."""
    states: dict[tuple[str, ...], Any] = {}
    for file in folder.glob("studies/*/*-offsets.json"):
        for place, trials in (read_json(file, mapping) or {}).items():
            if isinstance(trials, dict):
                states |= {(file.parent.name, file.name, place, trial): state for trial, state in trials.items()}
    return states
