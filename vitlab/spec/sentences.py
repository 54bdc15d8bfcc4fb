"""What pydantic finds wrong with a value, as sentences: where, what was found, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vitlab.errors import Path, nearest

FORM = re.compile(r"<.*|constrained-\w+|int|float|str|bool|(tuple|list|dict|literal|function-\w+)\[.*")
"""What pydantic calls the forms that a value may take; none of them is a key of a document."""


def sentences(error: ValidationError, top: Mapping[str, Any] = {}) -> list[tuple[Path, str]]:
    """What pydantic found, each as a path and one sentence.  ``top`` are the names allowed at the top level."""
    found = []
    for detail in details(error):
        path = tuple(part for part in detail["loc"] if not FORM.fullmatch(str(part)))
        found.append((path, _sentence(detail, path, top)))
    return found


def details(error: ValidationError) -> list[ErrorDetails]:
    """What pydantic found, less the forms of a union that were not meant: 0 is no pair, and a pair no whole number."""
    groups: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for index, detail in enumerate(error.errors(include_url=False)):
        form = next((at for at, part in enumerate(detail["loc"]) if FORM.fullmatch(str(part))), None)
        groups.setdefault((index,) if form is None else ("form", *detail["loc"][:form]), []).append(detail)
    kept = []
    for group in groups.values():
        meant = [detail for detail in group if not detail["type"].endswith(("_type", "_parsing"))]
        if not meant and len(group) > 1:
            forms = [detail["msg"].removeprefix("Input should be ").partition(",")[0] for detail in group]
            meant = [{**group[0], "msg": f"Input should be {' or '.join(forms)}"}]
        kept += meant or group
    return kept


def _sentence(detail: ErrorDetails, path: Path, top: Mapping[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    found = detail["input"]
    name = ".".join(str(part) for part in path)
    if kind == "extra_forbidden":
        allowed = _allowed(path, top)
        known = f" Allowed here: {', '.join(allowed)}." if allowed else ""
        return f"unknown key '{path[-1]}'.{nearest(str(path[-1]), allowed)}{known}"
    if kind == "missing":
        return f"'{name}' is missing"
    if kind in ("value_error", "assertion_error"):
        text = str(context.get("error", detail["msg"]))
        return f"{name}: {text}" if name else text
    if kind == "literal_error":
        expected = str(context["expected"])
        choices = re.findall(r"'([^']*)'", expected)
        return f"{name}: found {found!r}; allowed: {', '.join(choices) or expected}.{nearest(str(found), choices)}"
    if kind == "string_type" and isinstance(found, bool):
        return f"{name}: a text belongs here, and YAML reads yes, no, on and off as true or false; put it in quotes"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    shown = "" if isinstance(found, dict | list) else f"; found {found!r:.80}"
    return f"{name}: {message}{shown}"


def _allowed(path: Sequence[str | int], top: Mapping[str, Any]) -> list[str]:
    """The keys allowed beside the unknown one at ``path``, as far as the models say."""
    fields = dict(top)
    for part in path[:-1]:
        if isinstance(part, str):
            forms = set(_models(getattr(fields.get(part), "annotation", None)))
            fields = dict(forms.pop().model_fields) if len(forms) == 1 else {}
    return [field.alias or name for name, field in fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation, such as that of a list of them."""
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
