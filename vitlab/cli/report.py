"""``vitlab report``: the answer of a study, printed or written."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from vitlab.cli.options import format_option, out_option, parse_changes, set_option, study_argument

FORMATS = ("terminal", "md", "html", "csv", "parquet", "latex", "latex-all", "json")


@click.command()
@study_argument
@out_option
@set_option
@format_option(FORMATS)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
def command(study: Path, out: Path, changes: tuple[str, ...], form: str, output: Path | None) -> None:
    """Print the report of STUDY: of the version that its file is, or of the latest run where its name is given.

    NAME@VERSION is an earlier version; 'vitlab studies' lists them.
    """
    from vitlab.report import read_report
    from vitlab.report.api import open_study

    plan, store = open_study(study, out=out, changes=parse_changes(changes))
    rendered = read_report(plan, store, form)
    if rendered is None:
        # Something ended since the last report, so it is made anew; only this needs pandas.
        from vitlab.report import render

        rendered = render(plan, store, form)
    data = rendered if isinstance(rendered, bytes) else rendered.encode()
    if output is not None:
        from vitlab.store.files import write_bytes

        write_bytes(output, data)
        click.echo(str(output), err=True)
    elif form == "parquet" and sys.stdout.isatty():
        raise click.UsageError("parquet cannot be printed on a terminal; name a file with --output")
    else:
        sys.stdout.buffer.write(data if form == "parquet" or data.endswith(b"\n") else data + b"\n")
