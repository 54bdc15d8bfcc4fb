"""``vitlab logs``: print the events, output and failure of a trial."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from vitlab.cli.completion import complete_arm, complete_study
from vitlab.cli.options import out_option
from vitlab.errors import UserError
from vitlab.store.folders import Event, TrialFolder


@click.command()
@click.argument("trial", metavar="STUDY|KEY", shell_complete=complete_study)
@click.option("--arm", shell_complete=complete_arm, help="The arm of STUDY, by default baseline.")
@click.option("--seed", type=int, help="The seed of STUDY, by default 0.")
@out_option
def command(trial: str, arm: str | None, seed: int | None, out: Path) -> None:
    """Print the events, the output and the failure of a trial: of STUDY (its file or folder), or by its KEY.

    The first letters of KEY are enough.
    """
    for folder in _folders(trial, arm, seed, out):
        click.echo(str(folder.path))
        events, _ = folder.events()
        for event in events:
            click.echo(_line(event))
        log = folder.path / "log.txt"
        if log.is_file():
            click.echo(log.read_text(encoding="utf-8", errors="replace"))
        failure = folder.last_failure()
        if failure is not None:
            click.echo(f"{failure.failure}\n{failure.traceback}")


def _folders(trial: str, arm: str | None, seed: int | None, out: Path) -> list[TrialFolder]:
    """Return the folders of a trial, one for each version of the code.

    Raises:
        UserError: if no trial matches, or several keys start with ``trial``.
    """
    paths = sorted(path for path in (out / "trials").glob("*/*") if path.parent.name.startswith(trial))
    if arm is None and seed is None and trial.isalnum() and paths:
        keys = sorted({path.parent.name for path in paths})
        if len(keys) > 1:
            raise UserError(
                f"'{trial}' begins {len(keys)} keys; give more of one: {', '.join(key[:16] for key in keys)}"
            )
        return [TrialFolder(path) for path in paths]
    if arm is None and seed is None and not _is_study(trial, out):
        raise UserError(
            f"no trial whose key begins with '{trial}' in {out}, and no study of that name; 'vitlab studies' lists the "
            "studies"
        )
    from vitlab.report.api import open_study

    plan, store = open_study(Path(trial), out=out)
    selected = plan.find("baseline" if arm is None else arm, 0 if seed is None else seed)
    folder = store.trial(selected.key, selected.code)
    if not folder.path.is_dir():
        raise UserError(
            f"this trial has not begun; run its study with 'vitlab run', which will train it and write to {folder.path}"
        )
    return [folder]


def _is_study(name: str, out: Path) -> bool:
    """Return True for a study's file, its folder, or the name of one in the output folder."""
    from vitlab.plan.packaged import study_name

    path = Path(name)
    return (
        path.is_file()
        or (path / "plan.json").is_file()
        or study_name(name) in {item.name for item in out.glob("studies/*")}
    )


def _line(event: Event) -> str:
    """Return an event on one line, numbers rounded to four digits."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.t / 1000))
    return f"{moment}  {event.kind:8}  {'  '.join(_pairs(event.body))}"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    pairs: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += _pairs(value)
        else:
            pairs.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return pairs
