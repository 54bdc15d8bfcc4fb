"""``vitlab gc``: delete what no study needs any more."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import click

from vitlab.cli.options import out_option
from vitlab.errors import UserError
from vitlab.plan.written import read_plan
from vitlab.store import Busy, Store, TrialFolder, remove


@click.command()
@out_option
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would be deleted.")
def command(out: Path, yes: bool) -> None:
    """Delete trials that no study's latest plan names: results of older code and of arms that are gone.

    Damaged files that were set aside, and temporary files of killed processes, are deleted too.
    """
    needed = set()
    for file in out.glob("studies/*/plan.json"):
        try:
            plan = read_plan(file)
        except UserError as error:
            raise UserError(f"nobody knows which trials a study needs, so nothing is deleted: {error}") from None
        if plan is None:
            continue  # it went while this looked
        named = [item.trial for item in (*plan.trials, *(item for tuning in plan.tuning for item in tuning.trials))]
        needed |= {(trial.key, trial.code) for trial in (*named, *plan.prerequisites)}
    leftovers = Store(out).leftovers()
    freed = sum(_size(path) for path in leftovers)
    for path in leftovers:
        click.echo(str(path))
        if yes:
            remove(path)
    for path in sorted((out / "trials").glob("*/*")):
        if (path.parent.name, path.name) in needed:
            continue
        if TrialFolder(path).held():
            continue
        freed += _size(path)
        click.echo(str(path))
        if not yes:
            continue
        with suppress(Busy), TrialFolder(path).lease():  # or somebody could begin to train it just now
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # it holds the results of other code
                path.parent.rmdir()
    click.echo(f"{freed / 1e6:.1f} MB " + ("deleted" if yes else "would be deleted; add --yes"), err=True)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    return sum(file.lstat().st_size for file in (path, *path.rglob("*")) if file.is_file())
