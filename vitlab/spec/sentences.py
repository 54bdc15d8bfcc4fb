"""pydantic's errors as plain sentences: the place, the mistake and the allowed values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vitlab.errors import Path, closest, nearest
from vitlab.spec.collect import CONFLICT, Fault
from vitlab.spec.other_trainers import how_to_write

FORM = re.compile(r"<.*|constrained-\w+|int|float|str|bool|(tuple|list|dict|literal|function-\w+)\[.*")
"""Names in pydantic's locations that stand for the forms of a union and are not keys of the document."""

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "model_attributes": "a mapping",
    "dataclass": "a mapping",
}
"""Prefix of a pydantic error type to the expected type in words."""

BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("greater than or equal to", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("less than or equal to", "le"),
}

PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$": "1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit",
}
"""Patterns of texts in words; other patterns are shown unchanged."""


def sentences(error: ValidationError) -> list[tuple[Path, str]]:
    """Return each of pydantic's errors as a path and one sentence."""
    return [(fault.path, fault.message) for fault in faults(error)]


def faults(error: ValidationError, top: Mapping[str, Any] = {}) -> list[Fault]:
    """Return each of pydantic's errors as a fault; ``top`` are the names allowed at the top level."""
    return [fault(detail, top) for detail in details(error)]


def fault(detail: ErrorDetails, top: Mapping[str, Any]) -> Fault:
    """Return one of pydantic's errors as a fault."""
    kind, location = detail["type"], detail["loc"]
    end = len(location) - (kind == "extra_forbidden")  # an unknown key may have the name of a form, such as 'int'
    path = tuple(part for at, part in enumerate(location) if at >= end or not FORM.fullmatch(str(part)))
    rename = None
    if kind == "extra_forbidden" and path and not how_to_write(str(path[-1])):
        rename = closest(str(path[-1]), _allowed(path, top))
    fields = tuple(detail.get("ctx", {}).get("fields", ())) if kind == CONFLICT else ()
    if len(fields) == 1:  # a rule of one field, which may hold in one model and not in another
        path, fields = (*path, *fields), ()
    return Fault(path, _sentence(detail, path, top), kind, fields, rename)


def details(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's errors, for a union only those of the form that the value most likely has."""
    groups: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for index, detail in enumerate(error.errors(include_url=False)):
        form = next((at for at, part in enumerate(detail["loc"]) if FORM.fullmatch(str(part))), None)
        groups.setdefault((index,) if form is None else ("form", *detail["loc"][:form]), []).append(detail)
    selected = []
    for group in groups.values():
        relevant = [detail for detail in group if not detail["type"].endswith(("_type", "_parsing"))]
        if not relevant and len(group) > 1:
            forms = " or ".join(dict.fromkeys(_kind(detail) or detail["msg"] for detail in group))
            relevant = [{**group[0], "type": "forms_type", "ctx": {"forms": forms}}]
        selected += relevant or group
    return selected


def _sentence(detail: ErrorDetails, path: Path, top: Mapping[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    value = detail["input"]
    name = ".".join(str(part) for part in path)
    if kind == "extra_forbidden":
        allowed = _allowed(path, top)
        allowed_keys = f" Allowed here: {', '.join(allowed)}." if allowed else ""
        key = str(path[-1])
        return f"unknown key '{key}'.{how_to_write(key) or nearest(key, allowed)}{allowed_keys}"
    if kind == "missing":
        return f"'{name}' is missing"
    if kind in ("value_error", "assertion_error", CONFLICT):
        text = str(context.get("message", context.get("error", detail["msg"])))
        return f"{name}: {text}" if name else text
    if kind == "literal_error":
        expected = str(context["expected"])
        choices = re.findall(r"'([^']*)'", expected)
        return (
            f"{name}: found {_format(value)}; allowed: {', '.join(choices) or expected}.{nearest(str(value), choices)}"
        )
    if kind == "string_type" and isinstance(value, bool):
        return f"{name}: a text belongs here, and YAML reads yes, no, on and off as true or false; put it in quotes"
    actual = f"; found {_format(value)}"
    if words := context.get("forms") or _kind(detail):
        return f"{name} must be {words}{actual}"
    if kind in BOUNDS:
        words, bound = BOUNDS[kind]
        limit = context[bound]
        return f"{name} must be {words} {int(limit) if limit == int(limit) else limit}{actual}"
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        words, bound = ("at least", "min_length") if kind.endswith("short") else ("at most", "max_length")
        unit = "character" if kind.startswith("string") else "value"
        count = context[bound]
        return f"{name} must have {words} {count} {unit}{'' if count == 1 else 's'}{actual}"
    if kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        return f"{name} must be {PATTERNS.get(pattern) or f'a text that matches {pattern}'}{actual}"
    return f"{name}: {detail['msg'][0].lower()}{detail['msg'][1:]}{actual}"


def _kind(detail: ErrorDetails) -> str:
    """Return in words the type that was expected; empty if the mistake is not a wrong type."""
    kind = detail["type"]
    if kind == "int_from_float":
        return KINDS["int"]
    for ending in ("_type", "_parsing", "_parsing_size"):
        if kind.endswith(ending):
            return KINDS.get(kind.removesuffix(ending), "")
    return ""


def _format(value: Any) -> str:
    """Format a value for an error message: lists and mappings by kind, long text shortened."""
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = str(value) if isinstance(value, int) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _allowed(path: Sequence[str | int], top: Mapping[str, Any]) -> list[str]:
    """Return the keys allowed in the mapping of the unknown key at ``path``, if a model defines them."""
    fields = dict(top)
    for part in path[:-1]:
        if isinstance(part, str):
            forms = set(models_in(getattr(fields.get(part), "annotation", None)))
            fields = dict(forms.pop().model_fields) if len(forms) == 1 else {}
    return [field.alias or name for name, field in fields.items()]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation, such as that of a list of models."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]
