"""Studies that come with vitlab: the files in ``pipelines/``, each named by its path there without the suffix.

In a checkout ``vitlab/pipelines`` is a link to ``pipelines``; a wheel has copies of the files in its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vitlab._version import __version__
from vitlab.errors import SpecError, UserError, nearest
from vitlab.plan.versions import content_of, differences
from vitlab.spec import read_document
from vitlab.store.files import mapping, read_json
from vitlab.store.folders import Store

FOLDER = Path(__file__).parents[1] / "pipelines"
SUFFIXES = (".yaml", ".yml")


def packaged_studies() -> dict[str, Path]:
    """Return name to file: ``quickstart``, ``imagenet/recipe``; baselines of ``vitlab check`` are left out."""
    files = sorted(FOLDER.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files if "." not in file.stem}


def study_file(path: Path, out: str | Path, say: Callable[[str], None] = lambda sentence: None) -> Path:
    """Return the file of a study that is given by its path or by the name of a packaged study.

    An existing path precedes a packaged study.  If the output folder has the packaged study of another vitlab, the
    stored file precedes the packaged one, so that an upgrade does not change a study that has been run.

    Args:
        path: Path of a study file, or the name of a packaged study.
        out: The output folder.
        say: Called with a sentence if another study has the same name.

    Raises:
        UserError: If ``path`` is a folder, or has no suffix, does not exist and names no packaged study.
    """
    name, studies = str(path), packaged_studies()
    if os.path.isdir(path):
        other = "; for the study that comes with vitlab, run this in another folder" if name in studies else ""
        raise UserError(f"{name} is a folder here, not a study file; write the path of a file{other}")
    if os.path.exists(path):  # also for names that are too long for a path
        if name in studies:
            say(f"{name}: the file of this name is used, not the study of this name that comes with vitlab")
        return path
    if path.suffix:
        if path.suffix in SUFFIXES and (stem := str(path.with_suffix(""))) in studies:
            raise UserError(f"{name}: no such file; the study that comes with vitlab is named '{stem}'")
        return path
    if name not in studies:
        raise UserError(
            f"{name}: no such file, and no study of this name comes with vitlab.{nearest(name, studies)} "
            "'vitlab list studies' lists them."
        )
    file = studies[name]
    folder = Store(Path(out).resolve()).study(study_name(name))
    stored = folder / "study.yaml"
    with suppress(SpecError):  # not run yet, or in a format of the past
        before, now = content_of(stored), content_of(file)
        run = read_json(folder / "run.json", mapping) or {}
        if before != now and not str(run.get("file", "")).endswith(f"/{FOLDER.resolve().name}/{name}.yaml"):
            say(f"{name}: another file of this study name was run in {out}, too: {run.get('file', stored)}")
        elif before != now:
            say(
                f"{name}: the version that was run in {out} is used; that of vitlab {__version__} differs from it: "
                f"{differences(before, now)}. 'vitlab show study {name} > {path.name}.yaml' writes it to a file."
            )
            return stored
    return file


def study_name(name: str) -> str:
    """Return the name in the file of a packaged study, under which its results are stored; otherwise ``name``."""
    file = packaged_studies().get(name)
    return name if file is None else str(read_document(file).data["study"])


def packaged_name(file: Path) -> str:
    """Return the name of the packaged study that is in a file; empty for other files."""
    return next((name for name, path in packaged_studies().items() if path.resolve() == file.resolve()), "")


def header(file: Path) -> dict[str, str]:
    """Return the entries of the comment at the top of a packaged study, such as ``Cost``, by their first word."""
    entries: dict[str, str] = {}
    name = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if (match := re.fullmatch(r"# (?:(\w+))? +(.*)", line)) is None:
            break
        name = match[1] or name
        entries[name] = f"{entries[name]} {match[2]}" if match[1] is None else match[2]
    return entries
