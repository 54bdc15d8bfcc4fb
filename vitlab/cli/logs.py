"""``vitlab logs``: print the events, output and failure of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import click

from vitlab.cli.completion import complete_arm, complete_study
from vitlab.cli.options import out_option
from vitlab.errors import UserError
from vitlab.store.folders import Event, Store, TrialFolder


@click.command()
@click.argument("trial", metavar="STUDY|KEY", shell_complete=complete_study)
@click.option("--arm", shell_complete=complete_arm, help="The arm of STUDY, by default baseline.")
@click.option("--seed", type=int, help="The seed of STUDY, by default 0.")
@out_option
def logs_command(trial: str, arm: str | None, seed: int | None, out: Path) -> list[str]:
    """Print the events, the output and the failure of a trial: of STUDY (its file or folder), or by its KEY.

    The first letters of KEY are enough.
    """
    lines = []
    for folder in _folders(trial, arm, seed, out):
        lines += [str(folder.path), *map(_line, folder.events()[0])]
        log = folder.path / "log.txt"
        if log.is_file():
            lines += log.read_text(encoding="utf-8", errors="replace").splitlines()
        failure = folder.last_failure()
        if failure is not None:
            lines += [failure.failure, *failure.traceback.splitlines()]
    return lines


def _folders(trial: str, arm: str | None, seed: int | None, out: Path) -> list[TrialFolder]:
    """Return the folders of a trial, one for each version of the code.

    Raises:
        UserError: if no trial matches, or several keys start with ``trial``.
    """
    from vitlab.report.api import open_study

    # A key names trials of one version of the code each; an arm and a seed name a trial of a study.
    is_key = arm is None and seed is None and trial.isalnum()
    folders = [folder for folder in Store(out).trials() if is_key and folder.path.parent.name.startswith(trial)]
    if folders:
        keys = sorted({folder.path.parent.name[:16] for folder in folders})
        if len(keys) > 1:
            raise UserError(f"'{trial}' begins {len(keys)} keys; give more of one: {', '.join(keys)}")
        return folders
    try:
        plan, store = open_study(Path(trial), out=out)
    except UserError as error:
        raise UserError(f"no trial whose key begins with '{trial}' in {out}; {error}") from None
    selected = plan.find("baseline" if arm is None else arm, 0 if seed is None else seed)
    folder = store.folder(selected)
    if not folder.path.is_dir():
        raise UserError(
            f"this trial has not begun; run its study with 'vitlab run', which will train it and write to {folder.path}"
        )
    return [folder]


def _line(event: Event) -> str:
    """Return an event on one line, numbers rounded to four digits."""
    moment = datetime.fromtimestamp(event.t / 1000).isoformat(" ", "seconds")
    return f"{moment}  {event.kind:8}  {'  '.join(_pairs(event.body))}"


def _pairs(values: Mapping[str, object]) -> list[str]:
    pairs: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += _pairs(value)
        else:
            pairs.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return pairs
