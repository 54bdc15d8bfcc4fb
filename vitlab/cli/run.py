"""``vitlab run FILE``: bring a study to its answer."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import click

from vitlab.cli.options import (
    file_argument,
    json_option,
    no_plugin_option,
    out_option,
    parse_changes,
    plugin_option,
    set_option,
)
from vitlab.errors import TrialFailed, UserError


@click.command()
@file_argument
@out_option
@set_option
@plugin_option
@no_plugin_option
@click.option("--executor", help="Where trials run: local, inline, ray, slurm, or a plugin's.")
@click.option("--workers", type=click.IntRange(min=1), help="Trials at a time.")
@click.option("--tracking-uri", help="MLflow server or database; by default a database in the output folder.")
@click.option("--only", metavar="arm=PATTERN", help="Train these arms only, such as arm=position=*.")
@click.option(
    "--smoke", is_flag=True, help="Two steps of every distinct set of components, to see that all of them run."
)
@click.option("--retry-failed", is_flag=True, help="Train again what failed under the same code.")
@json_option
def command(
    file: Path,
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    executor: str | None,
    workers: int | None,
    tracking_uri: str | None,
    only: str | None,
    smoke: bool,
    retry_failed: bool,
    as_json: bool,
) -> None:
    """Train what FILE asks for and is missing, track it, and answer its question.

    Trials that have been trained before, by this or another study, are not trained again.
    """
    from vitlab import lab
    from vitlab.cli.watch import watch_on

    # A scheduler that ends the job asks by SIGTERM; it is answered like Ctrl-C, by checkpoints.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    values = parse_changes(changes)
    for path, value in {"run.executor": executor, "run.workers": workers, "run.tracking_uri": tracking_uri}.items():
        if value is not None:
            values[path] = value
    watch = watch_on()
    if smoke:
        count = lab.smoke(file, out=out, changes=values, plugins=plugins, watch=watch)
        click.echo(f"{count} distinct sets of components ran two steps each.")
        return
    answer = lab.run(
        file,
        out=out,
        changes=values,
        plugins=plugins,
        only=_pattern(only),
        retry_failed=retry_failed,
        watch=watch,
    )
    from vitlab import report

    if as_json:
        click.echo(report.render(answer.plan, answer.store, "json"))
    else:
        click.echo(report.render(answer.plan, answer.store, "terminal"))
        click.echo(_epilogue(answer))
    if answer.failed:
        said = f"{answer.failed} trial{'s' if answer.failed != 1 else ''}"
        raise TrialFailed(f"{said} failed; 'vitlab logs' shows why, --retry-failed trains them again.")


def _pattern(only: str | None) -> str:
    if only is None:
        return "*"
    name, equals, pattern = only.partition("=")
    if name != "arm" or not equals:
        raise UserError(f"--only {only}: write arm=PATTERN, such as arm=position=*")
    return pattern


def _epilogue(answer: Any) -> str:
    width = max(len("Report"), len(answer.tracker)) + 3
    lines = [
        f"{answer.trained} trained, {answer.cached} taken from earlier runs.",
        f"{'Report':{width}}{_short(answer.folder / 'report' / 'report.html')}",
    ]
    if answer.link:
        started = answer.tracker == "MLflow" and "127.0.0.1" in answer.link
        lines.append(f"{answer.tracker:{width}}{answer.link}" + ("   (start it: vitlab ui)" if started else ""))
    elif answer.tracker:
        lines.append(f"{answer.tracker:{width}}not reached; 'vitlab sync' delivers what is missing.")
    return "\n".join(lines)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
