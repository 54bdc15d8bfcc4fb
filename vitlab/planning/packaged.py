"""Studies that come with vitlab: the files in ``pipelines/``, each named by its path there without the suffix.

In a checkout ``vitlab/pipelines`` is a link to ``pipelines``; a wheel has copies of the files in its place.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from vitlab.errors import UserError, nearest
from vitlab.spec import read_document
from vitlab.spec.tree import Tree
from vitlab.spec.yaml import MAPPING
from vitlab.store.files import to_safe_name, write_bytes

FOLDER = Path(__file__).parents[1] / "pipelines"
SUFFIXES = (".yaml", ".yml")


def packaged_studies() -> dict[str, Path]:
    """Return name to file: ``quickstart``, ``imagenet/recipe``; baselines of ``vitlab check`` are left out."""
    files = sorted(FOLDER.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files if "." not in file.stem}


def find_study_file(path: Path, say: Callable[[str], None] = lambda sentence: None) -> Path:
    """Return the file of a study that is given by its path or by the name of a packaged study.

    An existing path precedes a packaged study.

    Args:
        path: Path of a study file, or the name of a packaged study.
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
        files = [name + suffix for suffix in SUFFIXES if os.path.isfile(name + suffix)]
        near = f" Did you mean '{files[0]}'?" if files else nearest(name, studies)
        raise UserError(
            f"{name}: no such file, and no study of this name comes with vitlab.{near} "
            "'vitlab list studies' lists them; a study that was run is given by its file, which 'vitlab studies' names."
        )
    return studies[name]


def find_or_write_study_file(
    study: str | Path | Tree, out: str | Path, say: Callable[[str], None] = lambda sentence: None
) -> Path:
    """Return the file of a study, given as for :func:`vitlab.run`; a mapping is written to a file.

    Raises:
        UserError: if there is no such file, or the content has a value that a file cannot have.
    """
    if not isinstance(study, Mapping):
        if "\n" in str(study):
            raise UserError(
                "a text of several lines is no path; the content of a file is a mapping: yaml.safe_load(TEXT)"
            )
        return find_study_file(Path(study), say)
    try:
        text = json.dumps(study, indent=1, ensure_ascii=False)  # which is YAML, too
    except (TypeError, ValueError) as error:
        raise UserError(f"a study has texts, numbers, lists and mappings alone: {error}") from None
    file = Path(out) / "written" / f"{to_safe_name(str(study.get('study', 'study')))}.yaml"
    write_bytes(file, f"{MAPPING}\n{text}\n".encode())
    return file


def stored_study_name(study: str) -> str:
    """Return the name under which the results of a study are stored.

    Args:
        study: a study file, the name of a packaged study, or the name of any other study, which is returned.

    Raises:
        SpecError: if the file cannot be read.
        UserError: if the file names no study.
    """
    is_file = Path(study).suffix in SUFFIXES or os.path.isfile(study)
    file = Path(study) if is_file else packaged_studies().get(study)
    if file is None:
        return study
    document = read_document(file)
    name = document.data.get("study")
    if not isinstance(name, str):
        raise UserError(f"{'the mapping' if document.is_mapping else file} names no study; add study: NAME at its top")
    return name


def packaged_name(file: Path) -> str:
    """Return the name of the packaged study that is in a file; empty for other files."""
    return next((name for name, path in packaged_studies().items() if path.resolve() == file.resolve()), "")


def read_cost(file: Path) -> str:
    """Return the first sentence of the entry ``Cost`` of the comment at the top of a packaged study."""
    entry = re.search(r"^# Cost +(.*(?:\n#  .*)*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return re.sub(r"\n# +", " ", entry[1]).partition("  ")[0] if entry else ""
