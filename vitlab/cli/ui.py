"""``vitlab ui``: the MLflow server on the results."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

import click

from vitlab.cli.completion import complete_study
from vitlab.cli.options import out_option


@click.command()
@click.argument("study", required=False, shell_complete=complete_study)
@out_option
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True, help="Port of the server.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Interface to listen on; 0.0.0.0 for other machines."
)
@click.option("--no-browser", is_flag=True, help="Print the addresses only.")
def command(study: str | None, out: Path, port: int, host: str, no_browser: bool) -> None:
    """Open STUDY (by default the one that was run last) in MLflow, and serve the results until Ctrl-C.

    STUDY is a study's name or file. Its page shows curves and final values grouped by arm. The browser is opened where
    there is a display; the addresses of all studies are printed.
    """
    click.echo("starting MLflow", err=True)  # its import takes seconds
    from vitlab.trackers.server import serve

    name = _name(study) if study is not None else None
    opens = not no_browser and sys.stdout.isatty() and _has_display()
    show = webbrowser.open if opens else (lambda address: False)
    serve(out.resolve(), name, port, host, show)


def _name(study: str) -> str:
    """Return the name of a study from its name or its file."""
    from vitlab.plan.packaged import study_name
    from vitlab.spec import read_document

    return str(read_document(Path(study)).data.get("study")) if Path(study).is_file() else study_name(study)


def _has_display() -> bool:
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
