"""``vitlab ui``: the MLflow server on the results."""

from __future__ import annotations

from pathlib import Path

import click

from vitlab.cli.options import out_option


@click.command()
@out_option
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Others can reach it only if you say so here.")
def command(out: Path, port: int, host: str) -> None:
    """Start the MLflow server on the results, with its cheap settings, until Ctrl-C."""
    from vitlab.trackers.server import serve

    serve(out.resolve(), port=port, host=host)
