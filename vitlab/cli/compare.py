"""``vitlab compare``: two studies side by side."""

from __future__ import annotations

from pathlib import Path

import click

from vitlab.cli.completion import complete_study
from vitlab.cli.options import format_option, out_option, print_report
from vitlab.report.formats import FORMATS


@click.command()
@click.argument("first", type=click.Path(path_type=Path), shell_complete=complete_study)
@click.argument("second", type=click.Path(path_type=Path), shell_complete=complete_study)
@out_option
@format_option(tuple(FORMATS))
def command(first: Path, second: Path, out: Path, form: str) -> None:
    """Compare every arm of SECOND with the arm of that name in FIRST (their files or folders)."""
    from vitlab.report.api import open_study
    from vitlab.report.two_studies import compare_studies

    print_report(compare_studies(open_study(first, out=out), open_study(second, out=out)).render(form), form)
