"""Checks of a study file before planning: its requirements are met, and its run settings are safe.

A study file may come from other people.  Options that run code, or write outside the output folder, must be given on
the command line by the user who starts the study.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitlab import registry
from vitlab.errors import ClashError, OptionError, Problem, UnknownComponent
from vitlab.planning.engine_choice import RULES
from vitlab.registry import plugins
from vitlab.spec import Document, Study
from vitlab.spec.changes import full_path, public, study_document


def find_problems(
    study: Study,
    document: Document,
    loaded: Iterable[registry.Origin],
    file: str | Path,
    out: str | Path,
    changes: Mapping[str, object],
) -> list[Problem]:
    """Return the problems of a study's requirements and run settings, and of options its file may not set.

    Args:
        study: the validated study.
        document: the document with the positions of all values.
        loaded: origins of the plugins loaded by the command line.
        file: the study file, without the changes of the command line.
        out: the output folder.
        changes: the changes of the command line.
    """
    run_problems = _run_problems(study, document)
    original = study_document(file) if changes else document
    return [*_unmet(study, document, loaded), *(run_problems or _untrusted(study, original, out, changes))]


def _unmet(study: Study, document: Document, loaded: Iterable[registry.Origin]) -> list[Any]:
    problems = []
    files = {origin.source for origin in loaded}
    for index, name in enumerate(study.plugins.require):
        place = ("plugins", "require", index)
        if name.endswith(".py"):
            if name not in files:
                problems.append(document.problem(place, f"this study needs {name}: add --plugin PATH/{name}"))
            continue
        if sentence := plugins.unmet(name):
            problems.append(document.problem(place, sentence))
    return problems


def _run_problems(study: Study, document: Document) -> list[Problem]:
    """Return the problems of the engine, the executor and the tracker, which are part of no trial's identity."""
    problems = []
    for name, choice in (("executor", study.run.executor), ("tracker", study.run.tracker)):
        try:
            registry.slot(name).resolve(choice)
        except OptionError as error:
            problems += [document.problem(("run", name, *path), sentence) for path, sentence in error.faults]
    executor, nodes = registry.slot("executor"), study.run.resources.nodes
    if not problems and nodes > 1 and not executor.get(study.run.executor.type).several_nodes:
        sentence = (
            f"executor '{study.run.executor.type}' runs a trial on one machine; use ray or slurm, or remove nodes"
        )
        problems.append(document.problem(("run", "resources", "nodes"), sentence))
    if study.run.engine not in RULES:
        try:
            registry.slot("engine").find(study.run.engine)
        except (UnknownComponent, ClashError) as error:
            sentence = f"{error} Rules that choose one: {', '.join(RULES)}."
            problems.append(document.problem(("run", "engine"), sentence))
    return problems


def _untrusted(study: Study, document: Document, out: str | Path, changes: Mapping[str, object]) -> list[Problem]:
    """Return the problems of options that would let a study file run code, write elsewhere or send results away.

    ``document`` is the file, without the changes of the command line.
    """
    run = document.data.get("run")
    run = run if isinstance(run, Mapping) else {}
    problems = []
    choice = run.get("executor")
    if isinstance(choice, Mapping) and choice.get("type") == study.run.executor.type:
        name = registry.slot("executor").resolve(study.run.executor).component.cli_only_option(choice)
        if name is not None and study.run.executor.options.get(name) == choice[name]:
            sentence = f"'{name}' runs code, so a study file may not set it; write --set run.executor.{name}=..."
            problems.append(document.problem(("run", "executor", name), sentence))
    choice, component = run.get("tracker"), registry.slot("tracker").resolve(study.run.tracker).component
    for name, value in choice.items() if isinstance(choice, Mapping) else ():
        sentence = ""
        if isinstance(value, str) and public(value) != value:  # the file is copied to the output folder
            sentence = f"a study file holds no password; give this option as --set run.tracker.{name}=..."
        elif not any(f"run.tracker.{name}.".startswith(f"{change}.") for change in map(full_path, changes)):
            sentence = component.unconfirmed(name, value, Path(out).resolve())
        if sentence:
            problems.append(document.problem(("run", "tracker", name), sentence))
    return problems
