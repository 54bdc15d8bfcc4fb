"""Expansion of a design into sets of changes to the base, one per arm, and their application to trees of values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vitlab.errors import Path
from vitlab.spec.choice import PARTS, TOGETHER
from vitlab.spec.collect import copied
from vitlab.spec.design import Levels, Node
from vitlab.spec.trial import LENGTHS, TrialSpec

MOST = 1_000_000
"""Largest number of arms of a design and of trials of a plan; a larger one would exhaust memory."""


class DesignFault(Exception):
    """A design that cannot be expanded, with its place in the document."""

    def __init__(self, place: Path, sentence: str) -> None:
        self.place = place
        super().__init__(sentence)


@dataclass(frozen=True)
class Changes:
    """The changes of an arm to the base, before they are resolved."""

    values: Mapping[str, Any] = field(default_factory=dict)  #: dotted path to value
    places: Mapping[str, Path] = field(default_factory=dict)  #: dotted path to where the document says so
    label: str = ""  #: name from the document or the node
    against: Mapping[str, Any] = field(default_factory=dict)  #: values of the arm it is compared with
    beside: frozenset[str] = frozenset()  #: paths that the label does not cover

    def and_(self, other: Changes) -> Changes:
        """Return the changes of both."""
        return Changes(
            {**self.values, **other.values},
            {**self.places, **other.places},
            ", ".join(filter(None, (self.label, other.label))),
            {**self.against, **other.against},
            frozenset().union(*(each.beside if each.label else each.values for each in (self, other))),
        )


def changes_of(node: Node | None, place: Path = ("design",)) -> list[Changes]:
    """Return the changes of a design's arms in order, duplicates included; without a design, those of the base alone.

    Raises:
        DesignFault: if two nodes of a grid set the same path, a sample is larger than its population, or there are more
            than ``MOST`` arms.
    """
    if node is None:
        return [Changes()]
    here = (*place, node.kind)
    if (arms := count(node)) > MOST:
        raise DesignFault(here, f"a {node.kind} of {arms:,} arms; a design has at most {MOST:,}")
    if node.one_at_a_time is not None:
        return [Changes(), *_alone(node.one_at_a_time, here)]
    if node.leave_one_out is not None:
        return _leave_one_out(node.leave_one_out.of, node.leave_one_out.direction, (*here, "of"))
    if node.zip is not None:
        return _rows(node.zip.levels, node.zip.labels, here)
    if node.arms is not None:
        return [
            Changes(values or {}, {path: (*here, name, path) for path in values or {}}, name)
            for name, values in node.arms.items()
        ]
    if node.union is not None:
        return [each for index, part in enumerate(node.union) for each in changes_of(part, (*here, index))]
    if node.sample is not None:
        population = changes_of(node.sample.over, (*here, "over"))
        if node.sample.n > len(population):
            raise DesignFault(
                (*here, "n"), f"a sample of {node.sample.n} is larger than its population of {len(population)}"
            )
        indices = random.Random(node.sample.seed).sample(range(len(population)), node.sample.n)
        return [population[index] for index in sorted(indices)]
    assert node.grid is not None
    return _product(_axes(node.grid, here), here)


def count(node: Node) -> int:
    """Return the number of arms of a design, duplicates included, without expanding it."""
    if node.one_at_a_time is not None:
        return 1 + sum(map(len, node.one_at_a_time.values()))
    if node.leave_one_out is not None:
        each = 1 + len(node.leave_one_out.of)
        return 2 * each if node.leave_one_out.direction == "both" else each
    if node.zip is not None:
        return len(next(iter(node.zip.levels.values())))
    if node.arms is not None:
        return len(node.arms)
    if node.union is not None:
        return sum(map(count, node.union))
    if node.sample is not None:
        return node.sample.n
    assert node.grid is not None
    return math.prod(map(len, node.grid.values()) if isinstance(node.grid, Mapping) else map(count, node.grid))


def _alone(levels: Levels, here: Path) -> list[Changes]:
    return [
        Changes({path: value}, {path: (*here, path, index)})
        for path, values in levels.items()
        for index, value in enumerate(values)
    ]


def _leave_one_out(of: Mapping[str, Any], direction: str, here: Path) -> list[Changes]:
    parts = {key: value if _is_part(key, value) else {key: value} for key, value in of.items()}
    short = short_names([key for key, changes in parts.items() if key in changes])
    names = {key: short.get(key, key) for key in parts}
    remove = [
        Changes(changes, {path: (*here, *dict.fromkeys((key, path))) for path in changes}, f"without {names[key]}")
        for key, changes in parts.items()
    ]
    bare = Changes()
    for key, removed in zip(parts, remove, strict=True):
        if direction != "remove" and (shared := bare.values.keys() & removed.values.keys()):
            raise DesignFault((*here, key), f"two parts both set '{min(shared)}'; no arm can have only one of them")
        bare = replace(bare.and_(removed), label="bare", beside=frozenset())
    add = [bare]
    for key, restored in parts.items():
        rest = {path: value for path, value in bare.values.items() if path not in restored}
        places = {path: bare.places[path] for path in rest}
        add.append(Changes(rest, places, f"bare + {names[key]}", against=bare.values))
    if direction == "remove":
        return [Changes(), *remove]
    return add if direction == "add" else [Changes(), *remove, *add]


def _is_part(key: str, value: Any) -> bool:
    """Return whether an entry of ``leave_one_out.of`` is a part's name with its changes, rather than a path."""
    return isinstance(value, Mapping) and "." not in key and key not in TrialSpec.model_fields


def _rows(levels: Levels, labels: Sequence[str] | None, here: Path) -> list[Changes]:
    count = len(next(iter(levels.values())))
    return [
        Changes(
            {path: values[row] for path, values in levels.items()},
            {path: (*here, path, row) for path in levels},
            labels[row] if labels else "",
        )
        for row in range(count)
    ]


def _axes(grid: Levels | list[Node], here: Path) -> list[list[Changes]]:
    if isinstance(grid, Mapping):
        return [_alone({path: values}, here) for path, values in grid.items()]
    return [changes_of(part, (*here, index)) for index, part in enumerate(grid)]


def _product(axes: list[list[Changes]], here: Path) -> list[Changes]:
    for first, second in itertools.combinations(axes, 2):
        shared = {path for changes in first for path in changes.values} & {
            path for changes in second for path in changes.values
        }
        if shared:
            raise DesignFault(here, f"two parts of one grid both set '{min(shared)}'; a grid varies each path once")
    products = [Changes()]
    for axis in axes:
        products = [left.and_(right) for left in products for right in axis]
    return products


def short_names(paths: Mapping[str, Any] | Sequence[str]) -> dict[str, str]:
    """Return the shortest unambiguous ending of each dotted path: ``dim`` for ``model.dim``."""
    names: dict[str, str] = {}
    for path in paths:
        parts = path.removesuffix(".type").split(".")
        for take in range(1, len(parts) + 1):
            name = ".".join(parts[-take:])
            if not any(_ends(other, name) for other in paths if other != path):
                break
        names[path] = name
    return names


def _ends(path: str, name: str) -> bool:
    return f".{path.removesuffix('.type')}".endswith(f".{name}")


def name_of(changes: Changes, short: Mapping[str, str], resolved: Mapping[str, Any]) -> str:
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
        if not changes.label or path in changes.beside
    ]
    return ", ".join(parts) or "baseline"


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


def keys_of(dotted: str) -> tuple[str, ...]:
    """Return the keys of a dotted path; that of a slot's ``type`` is the path of the slot."""
    return tuple(dotted.removesuffix(".type").split("."))


def value_at(tree: Any, path: Path) -> Any:
    """Return the value at a path, or None if there is none."""
    for part in path:
        if isinstance(tree, list):
            tree = tree[index] if (index := _index(tree, part)) is not None else None
        else:
            tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _index(values: Sequence[Any], part: str | int) -> int | None:
    """Return the index that a key of a path is in a list, counted from 0; None if there is no such element."""
    return int(part) if str(part).isdecimal() and int(part) < len(values) else None


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at a path whose parents exist."""
    node: Any = tree
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value


def with_value(tree: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a tree with another value at a path whose parents exist; only the mappings along the path are copied."""
    first, *rest = path
    return {**tree, first: with_value(tree[first], rest, value) if rest else value}


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
        node: Any = tree
        there: Any = resolved
        for part, below in itertools.pairwise(parts):
            there = there.get(part, {}) if isinstance(there, Mapping) else {}
            key: Any = int(part) if isinstance(node, list) else part
            child = node[key] if isinstance(node, list) else node.get(part)
            if isinstance(child, str):
                node[key] = {"type": child}
            elif not isinstance(child, dict) and not (isinstance(child, list) and _index(child, below) is not None):
                node[key] = {"type": there["type"]} if isinstance(there, Mapping) and "type" in there else {}
            node = node[key]
        if parts[-2:-1] == ("train",) and parts[-1] in LENGTHS:
            for length in LENGTHS:
                node.pop(length, None)
        node[int(parts[-1]) if isinstance(node, list) else parts[-1]] = value
    return tree
