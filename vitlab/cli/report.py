"""``vitlab report``: the answer of a study, printed or written."""

from __future__ import annotations

from pathlib import Path

import click

from vitlab.cli.options import (
    format_option,
    out_option,
    parse_changes,
    plugin_option,
    print_report,
    set_option,
    study_argument,
)
from vitlab.report.formats import FORMATS


@click.command()
@study_argument
@out_option
@set_option
@plugin_option
@format_option(tuple(FORMATS))
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
def command(
    study: Path, out: Path, changes: tuple[str, ...], plugins: tuple[Path, ...], form: str, output: Path | None
) -> list[str] | None:
    """Print the report of STUDY: of the version that its file is, or of the latest run where its name is given.

    NAME@VERSION is an earlier version; 'vitlab studies' lists them.
    """
    from vitlab.registry import load_file
    from vitlab.report import read_report
    from vitlab.report.api import open_study

    for plugin in plugins:
        load_file(plugin)
    plan, store = open_study(study, out=out, changes=parse_changes(changes))
    rendered = read_report(plan, store, form)
    if rendered is None:
        # Something ended since the last report, so it is made anew; only this needs pandas.
        from vitlab.report import render

        rendered = render(plan, store, form)
    if output is None:
        print_report(rendered, form)
        return None
    from vitlab.store.files import write_bytes

    write_bytes(output, rendered if isinstance(rendered, bytes) else rendered.encode())
    click.echo(str(output), err=True)
    return []
