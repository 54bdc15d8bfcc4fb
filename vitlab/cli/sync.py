"""``vitlab sync DIR``: deliver to a tracker what is missing there."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default="vitlab-runs")
@click.option("--tracker", metavar="NAME", help="mlflow, or a plugin's; by default the one each study names.")
@click.option("--tracking-uri", help="MLflow server or database; by default the one each study names.")
def command(folder: Path, tracker: str | None, tracking_uri: str | None) -> None:
    """Deliver the journals of all studies in FOLDER to their tracker.  What is there already is not delivered twice."""
    from vitlab.lab import sync

    for study, link in sync(folder, tracker=tracker, tracking_uri=tracking_uri):
        click.echo(f"{study}   {link or 'not reached'}")
