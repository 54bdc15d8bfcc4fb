"""Plain trees of a trial's values: read, set and remove values at paths, and apply an arm's changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.errors import Path
from vitlab.spec.collect import copied
from vitlab.spec.trial import LENGTHS


def keys_of(dotted: str) -> tuple[str, ...]:
    """Return the keys of a dotted path; that of a slot's ``type`` is the path of the slot."""
    return tuple(dotted.removesuffix(".type").split("."))


def value_at(tree: Any, path: Path) -> Any:
    """Return the value at a path, or None if there is none."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at a path whose parents exist."""
    node: Any = tree
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value


def without(tree: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return a tree without the value at a path; only the mappings along the path are copied."""
    copy = dict(tree)
    first, *rest = path
    if not rest:
        copy.pop(first, None)
    elif isinstance(copy.get(first), Mapping):
        copy[first] = without(copy[first], rest)
    return copy


def changed(base: Mapping[str, Any], changes: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with an arm's changes, shortest paths first; a new type replaces its whole slot.

    Args:
        base: ``base`` as written in the document.
        changes: dotted path to value.
        resolved: the resolved base, which names the component of a slot that the document leaves out.
    """
    tree: dict[str, Any] = copied(base)
    for path in sorted(changes, key=lambda path: (path.count("."), path)):
        value = copied(changes[path])
        parts = keys_of(path)
        node, there = tree, resolved
        for part in parts[:-1]:
            there = there.get(part, {}) if isinstance(there, Mapping) else {}
            if isinstance(node.get(part), str):
                node[part] = {"type": node[part]}
            elif not isinstance(node.get(part), dict):
                node[part] = {"type": there["type"]} if isinstance(there, Mapping) and "type" in there else {}
            node = node[part]
        if parts[-2:-1] == ("train",) and parts[-1] in LENGTHS:
            for length in LENGTHS:
                node.pop(length, None)
        node[parts[-1]] = value
    return tree
