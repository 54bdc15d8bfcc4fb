"""``vitlab ab BASE..HEAD STUDY``: compare two revisions of the user's git repository on a study."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from vitlab.cli.check import finish, workflow_of
from vitlab.cli.options import (
    as_written,
    json_option,
    junit_option,
    parse_changes,
    study_file,
    study_options,
)


@click.command()
@click.argument("revisions", metavar="BASE..HEAD")
@study_options
@click.option(
    "--install",
    metavar="WORDS",
    help="Give each revision an environment of its own, filled by 'pip install WORDS' in its folder, such as '.'.",
)
@click.option("--workflow", is_flag=True, help="Print a workflow of GitHub Actions that compares each pull request.")
@junit_option
@json_option
@click.option("--format", "form", type=click.Choice(["terminal", "md", "json"]), default="terminal", show_default=True)
@click.pass_context
def command(
    context: click.Context,
    revisions: str,
    file: Path,
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    install: str | None,
    workflow: bool,
    junit: Path | None,
    as_json: bool,
    form: str,
) -> None:
    """Train FILE's study by two commits of this repository, and say whether HEAD is better, worse or equivalent.

    Exit code 0: no regression; 1: HEAD is worse, or costs more than check.cost allows; 5: it cannot be told, if the
    file makes that a failure.
    """
    if workflow:
        words = as_written(context, without=("--workflow", "--junit", "--json", "--format", "--out"))
        click.echo(workflow_of("ab", [str(file), *words]))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's end is handled like Ctrl-C
    from vitlab.regression.ab import compare_revisions
    from vitlab.regression.check import CheckRequest

    request = CheckRequest(study_file(file), Path(), out, parse_changes(changes), plugins)
    content, result = compare_revisions(revisions, request, install)
    finish(result, str(content.render(form)), str(content.render("md")), as_json, junit)
