"""``vitlab sync DIR``: deliver to a tracker what is missing there."""

from pathlib import Path

import click

from vitlab.cli import print_lines, say, wants_json
from vitlab.cli.completion import completion_of_components
from vitlab.cli.options import FOLDER
from vitlab.errors import UserError, list_some


@click.command()
@click.argument("folder", type=FOLDER, default="vitlab-runs")
@click.option(
    "--tracker",
    metavar="NAME",
    shell_complete=completion_of_components("tracker"),
    help="A tracker's name; by default the one each study names.",
)
@click.option("--tracking-uri", help="MLflow server or database; by default the one each study names.")
def sync_command(folder: Path, tracker: str | None, tracking_uri: str | None) -> list[str]:
    """Deliver the journals of all studies in FOLDER to their tracker.  What is there already is not delivered twice.

    Exit code 2 if a study could not be delivered.
    """
    from vitlab.trackers.delivery import sync

    choice = {name: value for name, value in (("type", tracker), ("uri", tracking_uri)) if value is not None}
    deliveries = sync(folder, tracker=choice or None, say=say)
    if not deliveries:
        say(f"no study in {folder} has a tracker to deliver to")
    lines = [
        "   ".join(filter(None, [item.study, item.link, item.sentence])) for item in deliveries if item.link is not None
    ]
    if undelivered := [item.study for item in deliveries if item.link is None]:
        if not wants_json():
            print_lines(lines)
        error = UserError(
            f"{len(undelivered)} of {len(deliveries)} studies not delivered: {list_some(undelivered)}. The "
            "lines above say why; the same command tries again."
        )
        error.result = {"lines": lines}
        raise error
    return lines
