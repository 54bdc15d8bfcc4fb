"""``vitlab gc``: delete trials that no study needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from vitlab.cli import say
from vitlab.cli.options import out_option
from vitlab.errors import UserError
from vitlab.planning.study_folder import EARLIER, read_plan
from vitlab.planning.values import Plan
from vitlab.store.files import remove
from vitlab.store.folders import Store
from vitlab.store.locks import Busy


@click.command()
@out_option
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would be deleted.")
def gc_command(out: Path, yes: bool) -> list[str]:
    """Delete trials that no version of a study needs: results of older code, and of versions that were deleted.

    Damaged files that were set aside, and temporary files of killed processes, are deleted too. 'vitlab studies' lists
    the versions. To delete an earlier one, delete its folder first: studies/NAME/versions/VERSION.
    """
    for folder in (out / "trials", out / "studies"):
        if folder.is_symlink():  # results may come from other people, and the link may lead to any folder of the user
            raise UserError(f"{folder} is a link, and nothing outside of the output folder is deleted; move it there")
    required, names = set(), dict[str, str]()
    for file in _plans(out):
        try:
            plan = read_plan(file)
        except UserError as error:
            raise UserError(
                "nothing is deleted, because the plan of a study cannot be read, so the trials that it needs are not "
                f"known: {error}"
            ) from None
        if plan is None:
            continue  # deleted meanwhile
        trials = _trial_names(plan)
        names |= {key: name for (key, _), name in trials.items()}
        required |= set(trials)
    store = Store(out)
    freed, lines = 0, []
    for path in store.leftovers():
        freed += _size(path)
        lines.append(str(path))
        if yes:
            remove(path)
    for trial in store.trials():
        path = trial.path
        if (path.parent.name, path.name) in required or trial.is_locked():
            continue
        freed += _size(path)
        lines.append(f"{path}\t{names.get(path.parent.name, 'belongs to no study, such as from --smoke')}")
        if not yes:
            continue
        with suppress(Busy), trial.lease():  # so that no process starts to train it now
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # not empty: it has the results of other code
                path.parent.rmdir()
    done = "deleted" if yes else "would be deleted; add --yes"
    say(f"{freed / 1e6:.1f} MB {done}" if freed else "nothing to delete")
    return lines


def _plans(out: Path) -> Iterator[Path]:
    """Yield every stored plan; the latest ones twice, because a run that starts meanwhile replaces one."""
    for pattern in ("studies/*/plan.json", f"studies/*/{EARLIER}/*/plan.json", "studies/*/plan.json"):
        yield from out.glob(pattern)


def _trial_names(plan: Plan) -> dict[tuple[str, str], str]:
    """Return the study, arm and seed of every trial that a plan needs, by its key and code."""
    names = {(trial.key, trial.code): f"study {plan.study}, prerequisite" for trial in plan.prerequisites}
    for item, how in [*((item, ", tuning") for item in plan.rival_trials), *((item, "") for item in plan.trials)]:
        names[item.trial.key, item.trial.code] = f"study {plan.study}, arm {item.arm}, seed {item.seed}{how}"
    return names


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    return sum(file.lstat().st_size for file in (path, *path.rglob("*")) if file.is_file())
