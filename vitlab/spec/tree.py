"""Trees: the plain values of a study file, nested mappings and lists, and the paths of values in them."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from vitlab.errors import Path

T = TypeVar("T")

Tree = Mapping[str, Any]
"""Nested plain values by key, as YAML and JSON have them: mappings, lists, texts, numbers, booleans and None."""

NewTree = dict[str, Any]
"""A tree that belongs to whoever gets it: it may be changed, or written as JSON."""

Values = Mapping[str, Any]
"""Values of a study by dotted path, such as ``model.dim: 64``: the changes of an arm, or of the command line."""


def parse_as(kind: type[T], value: Any) -> T:
    """Return plain values, such as of JSON, as a value of a type.

    Raises:
        ValueError: if a value is missing or of another type, naming it.
    """
    return cast(T, type_adapter(kind).validate_python(value))  # type: ignore[arg-type]  # a class is hashable


@cache  # a plan has thousands of values of one type, and an adapter takes milliseconds
def type_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of a type."""
    return TypeAdapter(kind)


def deep_copy(value: Any) -> Any:
    """Return a deep copy of plain values; several times faster than ``copy.deepcopy``."""
    if isinstance(value, Mapping):
        return {key: deep_copy(item) for key, item in value.items()}
    return [deep_copy(item) for item in value] if isinstance(value, list | tuple) else value


def flatten(tree: Any, place: str = "") -> NewTree:
    """Return every leaf of nested mappings under its dotted path."""
    if not isinstance(tree, Mapping) or not tree:
        return {place: tree}
    leaves: NewTree = {}
    for name, value in tree.items():
        leaves |= flatten(value, f"{place}.{name}" if place else str(name))
    return leaves


def keys_of(dotted: str) -> tuple[str, ...]:
    """Return the keys of a dotted path; for the ``type`` of a slot, the keys of the slot."""
    return tuple(dotted.removesuffix(".type").split("."))


def value_at(tree: Any, path: Path) -> Any:
    """Return the value at a path, or None if there is none."""
    for part in path:
        if isinstance(tree, list):
            tree = tree[index] if (index := index_in(tree, part)) is not None else None
        else:
            tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def index_in(values: Sequence[Any], part: str | int) -> int | None:
    """Return the index that a key of a path is in a list, counted from 0; None if there is no such element."""
    return int(part) if str(part).isdecimal() and int(part) < len(values) else None


def set_value(tree: Any, path: Path, value: Any) -> None:
    """Set the value at a path whose parents exist."""
    for part in path[:-1]:
        tree = tree[part]
    tree[path[-1]] = value


def without(tree: Tree, path: Sequence[str]) -> NewTree:
    """Return a tree without the value at a path; only the mappings along the path are copied."""
    copy = dict(tree)
    first, *rest = path
    if not rest:
        copy.pop(first, None)
    elif isinstance(copy.get(first), Mapping):
        copy[first] = without(copy[first], rest)
    return copy
