"""What a study file may ask for, before anything is planned: what it needs is here, and nothing in it does harm.

A study file comes from others.  What has code run, or writes outside the output folder, is said by who starts the
study, on the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitlab import registry
from vitlab.errors import OptionError, Problem
from vitlab.registry import plugins
from vitlab.spec import Document, Study, read_document


def mistakes(
    study: Study,
    document: Document,
    loaded: Iterable[registry.Origin],
    file: str | Path,
    out: str | Path,
    changes: Mapping[str, Any],
) -> list[Problem]:
    """What is wrong with what a study needs, with how it is to be run, and with what its file has no right to say.

    Args:
        study: as read.
        document: where everything stands.
        loaded: what the command line has loaded.
        file: as it is, without what the command line changes.
        out: the output folder.
        changes: what the command line changes.
    """
    around = _around(study, document)
    return [*_required(study, document, loaded), *(around or _untrusted(study, file, out, changes))]


# -- how it is done ---------------------------------------------------------------------------------------------------


def _required(study: Study, document: Document, loaded: Iterable[registry.Origin]) -> list[Any]:
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


def _around(study: Study, document: Document) -> list[Problem]:
    """What is wrong with the choices of an executor and a tracker, which no trial's identity holds."""
    problems = []
    for name, choice in (("executor", study.run.executor), ("tracker", study.run.tracker)):
        try:
            registry.slot(name).resolve(choice)
        except OptionError as error:
            problems += [document.problem(("run", name, *path), sentence) for path, sentence in error.faults]
    return problems


def _untrusted(study: Study, file: str | Path, out: str | Path, changes: Mapping[str, Any]) -> list[Problem]:
    """What a study file may not say, because it comes from others: it would run code, or write elsewhere."""
    document = read_document(file)
    said = document.data.get("run")
    said = said if isinstance(said, Mapping) else {}
    problems = []
    choice = said.get("executor")
    if isinstance(choice, Mapping) and choice.get("type") == study.run.executor.type:
        name = registry.slot("executor").resolve(study.run.executor).component.cli_only_option(choice)  # type: ignore[attr-defined]
        if name is not None and study.run.executor.options.get(name) == choice[name]:
            sentence = f"'{name}' has code run, so only who starts the study may give it: --set run.executor.{name}=..."
            problems.append(document.problem(("run", "executor", name), sentence))
    uri = said.get("tracking_uri")
    if isinstance(uri, str):
        from vitlab.trackers.address import public, unconfirmed

        if public(uri) != uri:  # the file is copied to the output folder
            sentence = "a study file holds no password; give the URI as --tracking-uri, or set MLFLOW_TRACKING_URI"
        else:
            sentence = "" if _gives(changes, "run.tracking_uri") else unconfirmed(uri, Path(out).resolve())
        if sentence:
            problems.append(document.problem(("run", "tracking_uri"), sentence))
    return problems


def _gives(changes: Mapping[str, Any], path: str) -> bool:
    """Return whether who starts the study has given an option, by itself or with the mapping that it stands in."""
    return any(path == given or path.startswith(f"{given}.") for given in changes)
