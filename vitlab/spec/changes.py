"""Reading of a study file with the changes of the command line, ``--set PATH=VALUE``, and secrets among these."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import click

from vitlab.errors import MASK, Path, Problem, closest, public
from vitlab.spec.design import apply_change
from vitlab.spec.mistakes import collect_mistakes, foreign_option_hint, models_in
from vitlab.spec.study import Study
from vitlab.spec.tree import NewTree, Tree, Values, deep_copy
from vitlab.spec.trial import TrialSpec
from vitlab.spec.yaml import Document, read_document

STAND_INS: Tree = {"study": "study", "train": {"steps": 1}, "steps": 1}
"""Values that replace missing or wrong ones, so that the rest of a study can be validated."""

BASE: Tree = {"data": "digits", "model": "vit", "train": {"steps": 1}}
"""The same for a base that lacks its data or its model."""


TOP_KEYS = (*Study.model_fields, *TrialSpec.model_fields)
"""Keys with which the path of a change begins."""


def read_study(file: FilePath | str, changes: Values) -> tuple[Study | None, Document, list[Problem]]:
    """Read a study file with ``changes`` (``--set path=value``) applied.

    Returns:
        The study, the document and the problems so far, to which the caller adds its own before raising all together.
        If there are problems, study and document contain the sound values, and defaults or stand-ins for the rest; the
        study is None if too few values are sound.

    Raises:
        SpecError: if the file is not a YAML mapping.
    """
    document = read_document(file)
    problems = [*document.repeated]
    data, options = deep_copy(document.data), dict[Path, str]()
    for path, value in changes.items():
        if path.split(".")[0] in TOP_KEYS:
            # A design names its axes by dotted paths.
            keys = tuple(full_path(path).split(".", 2 if re.match(r"design\.(one_at_a_time|grid|zip)\.", path) else -1))
            apply_change(data, keys, value)
            options[keys] = format_changes({path: value})
        else:
            problems.append(_unknown_path_problem(path, value, document))
    document = replace(document, data=data, written=document.data, changes=options)
    collected = collect_mistakes(Study, document.data, STAND_INS)
    problems += [document.problem(mistake.path, mistake.message) for mistake in collected.mistakes]
    study = collected.value
    if problems and study is None:
        # The base is too incomplete to be validated; validate the rest of the study with another base.
        study = collect_mistakes(Study, {**collected.tree, "base": BASE}, STAND_INS).value
        if isinstance(base := document.data.get("base"), Mapping):
            collected.tree["base"] = collect_mistakes(TrialSpec, base, STAND_INS).tree
    return study, document.with_sound_data(collected.tree, collected.written) if problems else document, problems


def format_changes(changes: Values) -> str:
    """Format changes as they were given: as options of the command line, or else as the argument in Python."""
    context = click.get_current_context(silent=True)
    if context is None:
        return f"changes={changes!r:.200}"
    typed = {  # options of the command itself, which go before --set
        f"run.{name.replace('tracking_uri', 'tracker.uri')}": f"--{name.replace('_', '-')} "
        for name, value in context.params.items()
        if value
    }
    texts = {
        path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for path, value in changes.items()
    }
    return " ".join(f"{typed.get(path, f'--set {path}=')}{text:.100}" for path, text in texts.items())


def full_path(path: str) -> str:
    """Return the full path of a ``--set`` option: ``data.root`` is short for ``base.data.root``."""
    return path if path.split(".")[0] in Study.model_fields else f"base.{path}"


def _unknown_path_problem(path: str, value: Any, document: Document) -> Problem:
    """Return the problem of a change whose path does not start with a key of a study or of its base."""
    first = path.split(".")[0]
    names = paths_by_name(document.data.get("base"))
    close = closest(first, TOP_KEYS) or closest(first, names)
    meant = f" Did you mean '{names[close]}'?" if close is not None else ""
    hint = meant if first in names else foreign_option_hint(first) or meant
    sentence = f"unknown key '{first}'.{hint} A path begins with one of: {', '.join(TOP_KEYS)}."
    return Problem(format_changes({path: value}), 0, 0, sentence)


def add_path_of_same_key(problem: Problem, paths: Mapping[str, str]) -> Problem:
    """Return a mistake; on an unknown key, with the path at which there is one of that name."""
    form = r"(.*(?:unknown key|has no option) '(\w+)'\.(?: Did you mean '\w+'\?)?)((?: Allowed here| Options|$).*)"
    match = re.fullmatch(form, problem.message)
    if match is None or match[2] not in paths:
        return problem
    in_design = problem.path[:1] == ("design",)
    path = paths[match[2]] if in_design else full_path(paths[match[2]])
    place = f"The path of '{match[2]}' is {path}" if "." in path else f"'{path}' stands at the top of the file"
    if in_design and path == "base":
        place = "Paths in a design begin below it: leave out 'base.'"
    return replace(problem, message=f"{match[1]} {place}.{match[3]}")


def without_secrets(changes: Values) -> NewTree:
    """Return changes as they are stored: without secrets of addresses and values of variables in the run section."""

    def masked(value: Any, path: Sequence[str]) -> Any:
        if isinstance(value, Mapping):
            return {name: masked(item, [*path, str(name)]) for name, item in value.items()}
        if "env_vars" in path:  # of the executor ray; they may hold keys of any service
            return MASK
        return public(value) if isinstance(value, str) else value

    return {
        path: masked(value, path.split(".")) if path.partition(".")[0] == "run" else value
        for path, value in changes.items()
    }


def paths_by_name(base: Any) -> dict[str, str]:
    """Return every name that can end a path, with the shortest path to it; of components, the names in ``base``."""
    fields = {**Study.model_fields, **TrialSpec.model_fields}
    names = {name: name for name in fields}

    def walk(tree: Any, before: str) -> None:
        for name, value in tree.items() if isinstance(tree, Mapping) else ():
            names.setdefault(str(name), f"{before}{name}")
            walk(value, f"{before}{name}.")

    for section, field in fields.items():
        for model in models_in(field.annotation) if section != "base" else ():
            walk(dict(model.model_fields), f"{section}.")
    walk(base, "")
    return names
