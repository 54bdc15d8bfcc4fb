"""Values at dotted paths of trees, their short names, and the application of an arm's changes to the base."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitlab.errors import Path
from vitlab.spec.choice import PARTS, TOGETHER
from vitlab.spec.design import Changes, DesignFault, Zip, short_names
from vitlab.spec.tree import NewTree, Values, copied, index_in, keys_of, value_at
from vitlab.spec.trial import LENGTHS


def name_of(changes: Changes, short: Mapping[str, str], resolved: Values) -> str:
    """Return the name of an arm: its label and the values that the label does not cover, or ``baseline``.

    Example: ``position=learned+rope2d(theta=50), patch_size=4``.

    Args:
        changes: of the arm.
        short: dotted path to the name in place of it.
        resolved: the arm's trial, which shows where a list stands for one component.
    """
    parts = [changes.label] if changes.label else []
    parts += [
        f"{short[path]}={text(as_component(value, value_at(resolved, keys_of(path))))}"
        for path, value in changes.values.items()
        if path not in changes.conditions and (not changes.label or path in changes.beside)
    ]
    name = ", ".join(parts) or "baseline"
    return f"{changes.block}: {name}" if changes.block else name


def in_blocks(design: Sequence[Changes], blocks: Zip) -> list[Changes]:
    """Return the changes of every arm in every block; each is compared with an arm of its block.

    Raises:
        DesignFault: if the design sets a path of the blocks, or two blocks have one name.
    """
    paths = {key: key.removeprefix("base.") for key in blocks.levels}
    short, crossed = short_names([*paths.values()]), {}
    for key, path in paths.items():
        if any(path in changes.values for changes in design):
            raise DesignFault(("blocks", key), f"the design sets {path}, too; a block is the same for all of its arms")
    for row in range(len(next(iter(blocks.levels.values())))):
        values = {path: blocks.levels[key][row] for key, path in paths.items()}
        places: dict[str, Path] = {path: ("blocks", key, row) for key, path in paths.items()}
        name = ", ".join(
            text(value) if isinstance(value, str | Mapping) else f"{short[path]}={text(value)}"
            for path, value in values.items()
        )
        name = blocks.labels[row] if blocks.labels else name
        if name in crossed:
            raise DesignFault(next(iter(places.values())), f"two blocks are called '{name}'; name them by labels")
        block = Changes(values, places, against=values)
        crossed[name] = [
            replace(changes.and_(block), beside=changes.beside, block=name, conditions=values) for changes in design
        ]
    return [changes for arms in crossed.values() for changes in arms]


def as_component(value: Any, resolved: Any) -> Any:
    """Return a value of the document, and a list that stands for one component in its long form.

    Args:
        value: as written in the document.
        resolved: the same value after resolution, a mapping if it is a component.
    """
    if isinstance(value, list) and len(value) > 1 and isinstance(resolved, Mapping):
        return {"type": TOGETHER, PARTS: value}
    return value


def text(value: Any) -> str:
    """Format a value of the document briefly: ``learned+rope2d(theta=50)``, ``0.001``, ``none``."""
    if isinstance(value, Mapping) and value.get("type") == TOGETHER and isinstance(value.get(PARTS), list):
        return "+".join(map(text, value[PARTS]))
    if isinstance(value, Mapping):
        options = ", ".join(f"{name}={text(item)}" for name, item in value.items() if name != "type")
        return (
            f"{value['type']}({options})" if "type" in value and options else str(value.get("type", f"{{{options}}}"))
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def changed(base: Values, changes: Values, resolved: Values) -> NewTree:
    """Return ``base`` with an arm's changes, shortest paths first; a new type replaces its whole slot.

    Args:
        base: ``base`` as written in the document.
        changes: dotted path to value.
        resolved: the resolved base, which names the component of a slot that the document leaves out.
    """
    tree: NewTree = copied(base)
    for path in sorted(changes, key=lambda path: (path.count("."), path)):
        value = copied(changes[path])
        parts = keys_of(path)
        node: Any = tree
        there: Any = resolved
        for part, below in itertools.pairwise(parts):
            there = there.get(part, {}) if isinstance(there, Mapping) else {}
            key: Any = int(part) if isinstance(node, list) else part
            child = node[key] if isinstance(node, list) else node.get(part)
            if isinstance(child, str):
                node[key] = {"type": child}
            elif not isinstance(child, dict) and not (isinstance(child, list) and index_in(child, below) is not None):
                node[key] = {"type": there["type"]} if isinstance(there, Mapping) and "type" in there else {}
            node = node[key]
        if parts[-2:-1] == ("train",) and parts[-1] in LENGTHS:
            for length in LENGTHS:
                node.pop(length, None)
        node[int(parts[-1]) if isinstance(node, list) else parts[-1]] = value
    return tree
