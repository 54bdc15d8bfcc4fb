"""Changes of a study on the command line, ``--set PATH=VALUE``, mistakes in them, and secrets among them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.errors import Problem, closest
from vitlab.spec.mistakes import models_in
from vitlab.spec.other_trainers import how_to_write
from vitlab.spec.study import Study, format_change
from vitlab.spec.tree import NewTree, Values
from vitlab.spec.trial import TrialSpec
from vitlab.spec.yaml import Document


def is_known(path: str) -> bool:
    """Return whether a path starts with a key of a study or of its base."""
    first = path.split(".")[0]
    return first in Study.model_fields or first in TrialSpec.model_fields


def unknown(path: str, value: Any, document: Document) -> Problem:
    """Return the problem of a change whose path does not start with a key of a study or of its base."""
    first = path.split(".")[0]
    names = _names(document)
    close = closest(first, [*Study.model_fields, *TrialSpec.model_fields]) or closest(first, names)
    meant = f" Did you mean '{names[close]}'?" if close is not None else ""
    hint = meant if first in names else how_to_write(first) or meant
    keys = ", ".join([*Study.model_fields, *TrialSpec.model_fields])
    return Problem(format_change(path, value), 0, 0, f"unknown key '{first}'.{hint} A path begins with one of: {keys}.")


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


def public(text: str) -> str:
    """Mask user names, passwords and tokens of the addresses in a text."""
    without_users = re.sub(_USER, rf"\1{MASK}@", text)
    return re.sub(_SECRET, rf"\1{MASK}", re.sub(_NO_PORT, rf"\1{MASK}", without_users))


MASK = "***"  #: in place of what :func:`public` hides
_USER = re.compile(r"(://)[^\s'\"]*@")  # up to the last @, because a password may contain an unescaped one
# What follows a host and is no port: a password, if the @ after it was forgotten.
_NO_PORT = re.compile(r"(://[^\s'\"/:@\[]*:)(?!\d*(?:[/?#:;,.)\s'\"]|$))[^\s'\"]+")
_SECRET = re.compile(r"([?&;](?:\w*(?:password|passwd|pwd|token|secret|key))=)[^&;#\s'\"]+", re.IGNORECASE)


def _names(document: Document) -> dict[str, str]:
    """Return every name that can end a path, with the shortest path to it."""
    fields = {**Study.model_fields, **TrialSpec.model_fields}
    names = {name: name for name in fields}

    def walk(tree: Any, before: str) -> None:
        for name, value in tree.items() if isinstance(tree, Mapping) else ():
            names.setdefault(str(name), f"{before}{name}")
            walk(value, f"{before}{name}.")

    for section, field in fields.items():
        for model in models_in(field.annotation) if section != "base" else ():
            walk(dict(model.model_fields), f"{section}.")
    walk(document.data.get("base"), "")
    return names
