"""collect: every mistake in a tree of values, not only those that pydantic reports first.

pydantic checks a rule across fields only if all fields are valid, so that a wrong key hides a wrong combination.  Here
a misspelt key is renamed to the nearest name, other wrong values are removed, and the rest is validated again, until
there are no new mistakes.  Rules on removed values are not checked, nor are the values of misspelt keys, because the
nearest name may be the wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from vitlab.errors import Path

M = TypeVar("M", bound=BaseModel)

CONFLICT = "conflict"  #: type of the pydantic errors that :func:`conflict` returns


def conflict(message: str, *fields: str) -> PydanticCustomError:
    """Return the error of a rule across ``fields`` of one model, for its validators to raise."""
    return PydanticCustomError(CONFLICT, "{message}", {"message": message, "fields": fields})


@dataclass(frozen=True)
class Fault:
    """One mistake in a tree of values."""

    path: Path
    message: str
    kind: str = ""  #: pydantic's error type, such as ``missing``
    fields: tuple[str, ...] = ()  #: fields below ``path`` that the violated rule concerns
    rename: str | None = None  #: nearest allowed key, for an unknown key
    within: Path | None = None  #: path to remove as a whole, if that is more than ``path``


@dataclass(frozen=True)
class Collected(Generic[M]):
    """The result of :func:`collect`."""

    value: M | None  #: model of the sound values; None if too few are sound
    faults: list[Fault]
    tree: dict[str, Any]  #: sound values and stand-ins
    removed: set[Path] = field(default_factory=set)  #: paths of removed values
    renamed: dict[Path, Path] = field(default_factory=dict)  #: path in ``tree`` to the path in the document


def collect(
    model: type[M],
    data: Mapping[str, Any],
    describe: Callable[[ValidationError], list[Fault]],
    stand_ins: Mapping[str, Any] = {},
) -> Collected[M]:
    """Validate ``data`` and return every mistake in it.

    Args:
        model: the model to validate against.
        data: plain values.
        describe: converts pydantic's errors to faults.
        stand_ins: name to value for missing or wrong required fields, so that the rest can be validated.
    """
    try:
        return Collected(model.model_validate(data), [], dict(data))
    except ValidationError as error:
        first = describe(error)
    tree: dict[str, Any] = copied(data)
    collected = Collected[M](None, [], tree)
    pending = first
    while True:
        before = copied(tree)
        # All are of one tree, so none of them follows from the removal of another one.
        collected.faults.extend(
            _original(fault, collected.renamed)
            for fault in pending
            if not _follows(fault, collected.removed) and fault.path not in collected.renamed
        )
        for fault in pending:
            _remove(fault, collected, stand_ins)
        if tree == before:
            return collected
        try:
            return Collected(model.model_validate(tree), collected.faults, tree, collected.removed, collected.renamed)
        except ValidationError as error:
            pending = describe(error)


def copied(value: Any) -> Any:
    """Return a deep copy of plain values; several times faster than ``copy.deepcopy``."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list | tuple) else value


def _follows(fault: Fault, removed: set[Path]) -> bool:
    """Return whether a fault is a consequence of a removal."""
    concerned = [fault.path, *((*fault.path, name) for name in fault.fields)]
    if not fault.fields:  # such as a mapping that is now empty, or a rule that names no fields
        concerned += [path for path in removed if path[: len(fault.path)] == fault.path]
    return any(path[: len(gone)] == gone for path in concerned for gone in removed)


def _original(fault: Fault, renamed: Mapping[Path, Path]) -> Fault:
    for new, old in renamed.items():
        if fault.path[: len(new)] == new:
            return replace(fault, path=(*old, *fault.path[len(new) :]))
    return fault


def _remove(fault: Fault, collected: Collected[Any], stand_ins: Mapping[str, Any]) -> None:
    tree, path = collected.tree, fault.path
    if fault.kind == "missing":
        parent = _at(tree, path[:-1])
        if path and path[-1] in stand_ins and isinstance(parent, dict):
            parent[path[-1]] = copied(stand_ins[str(path[-1])])
            return
        collected.removed.add(path)
        path = path[:-1]
    elif fault.fields:
        node = _at(tree, path)
        if isinstance(node, dict):
            present = [name for name in fault.fields if name in node]
            for name in present:
                del node[name]
            stand_in = next((name for name in fault.fields if name in stand_ins), None)
            if stand_in is not None:
                node[stand_in] = copied(stand_ins[stand_in])
            collected.removed.update((*path, name) for name in fault.fields)
            if present or stand_in is not None:
                return
    elif fault.rename is not None:
        node = _at(tree, path[:-1])
        if isinstance(node, dict) and path[-1] in node and fault.rename not in node:
            node[fault.rename] = node.pop(path[-1])
            new = (*path[:-1], fault.rename)
            collected.renamed[new] = _original(fault, collected.renamed).path
            return
    _delete(collected, path if fault.within is None else fault.within)


def _delete(collected: Collected[Any], path: Path) -> None:
    """Delete the deepest existing key of a path; a list is deleted as a whole, because its indices would shift."""
    node: Any = collected.tree
    last: tuple[dict[str, Any], str, int] | None = None
    for depth, part in enumerate(path):
        if not isinstance(node, dict) or part not in node:
            break
        last = (node, str(part), depth)
        node = node[part]
    if last is not None:
        holder, key, depth = last
        del holder[key]
        collected.removed.add(path[: depth + 1])


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree
