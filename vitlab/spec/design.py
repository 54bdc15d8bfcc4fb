"""The design algebra: the arms of a study, as one node that can contain others.

one_at_a_time  the base, and each alternative of each factor alone            1 + sum(k)
leave_one_out  a full recipe with one part removed (or a bare one with one added)   1 + n, or 2 + 2n
grid           every combination of the levels, or of the arms of several nodes     product(k)
zip            several factors moved together, row by row                      k
arms           listed by name                                                  k
union          the arms of several nodes, equal ones merged                    at most sum(k)
sample         n arms drawn from a node with a seed of its own                 n
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from vitlab.errors import Path
from vitlab.spec.choice import PARTS, TOGETHER, Frozen, OneOrMore
from vitlab.spec.mistakes import conflict_error
from vitlab.spec.tree import NewTree, Tree, Values, deep_copy, index_in, keys_of, value_at
from vitlab.spec.trial import LENGTHS, TrialSpec

Levels = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)]
"""Dotted path to its values."""


class LeaveOneOut(Frozen):
    """A recipe less one part (``remove``), the bare recipe plus one part (``add``), or ``both``."""

    of: Annotated[NewTree, Field(min_length=1)]
    """Dotted path to the value that stands for "without"; or the name of a part to several such changes, as in
    ``arms``."""
    direction: Literal["remove", "add", "both"] = "remove"
    """Whether parts are removed from the recipe, added to the bare one, or both."""


class Zip(Frozen):
    """``{PATH: [v, ...], ...}`` with equal lengths, and names for the rows under ``labels``."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[list[Any], Field(min_length=1)]]

    labels: list[str] | None = None
    """Names of the rows."""

    @property
    def levels(self) -> Levels:
        """Dotted path to its values."""
        return self.__pydantic_extra__

    @model_validator(mode="after")
    def _check_lengths_and_labels(self) -> Zip:
        lengths = {path: len(levels) for path, levels in self.levels.items()}
        if self.labels is not None:
            lengths["labels"] = len(self.labels)
            if len(set(self.labels)) < len(self.labels):
                raise ValueError("two rows have the same label; each needs its own")
        if len(set(lengths.values())) > 1 or not self.levels:
            counts = ", ".join(f"{n} of {p}" for p, n in lengths.items())
            raise ValueError(f"rows need one value of each; found {counts or 'none'}")
        return self


class Sample(Frozen):
    """``n`` arms drawn from the arms of ``over`` without replacement."""

    n: OneOrMore
    """Number of arms drawn."""
    seed: int = 0
    """Seed of the draw."""
    over: Node
    """Design whose arms are drawn from."""


Grid = Annotated[
    Annotated[Levels, Tag("<levels>")] | Annotated[list["Node"], Field(min_length=1), Tag("<nodes>")],
    # With a discriminator, pydantic reports errors of one form only.
    Discriminator(lambda grid: "<nodes>" if isinstance(grid, list) else "<levels>"),
]


class Node(Frozen):
    """A node of a design: exactly one of the seven kinds."""

    one_at_a_time: Levels | None = None
    """Dotted path to values: one arm per value, all else as in the base."""
    leave_one_out: LeaveOneOut | None = None
    """A recipe less one part, the bare recipe plus one part, or both."""
    grid: Grid | None = None
    """Dotted path to values: one arm per combination; or designs to cross."""
    zip: Zip | None = None
    """Several factors moved together, row by row."""
    arms: Annotated[dict[str, NewTree | None], Field(min_length=1)] | None = None
    """Name of an arm to its changes of the base."""
    union: Annotated[list[Node], Field(min_length=1)] | None = None
    """Designs whose arms are joined."""
    sample: Sample | None = None
    """Arms drawn from a design."""

    @model_validator(mode="after")
    def _check_one_kind(self) -> Node:
        if len(self.kinds) != 1:
            actual = " and ".join(self.kinds) or "an empty design"
            sentence = f"a design has exactly one of {', '.join(type(self).model_fields)}; found {actual}"
            raise conflict_error(sentence, *self.kinds)
        return self

    @property
    def kinds(self) -> NewTree:
        """The kinds that are set, of which a valid node has one, and their values."""
        return {kind: value for kind, value in self if value is not None}


# -- expansion --------------------------------------------------------------------------------------------------------

MAX_TRIALS = 1_000_000
"""Largest number of arms of a design and of trials of a plan; a larger one would exhaust memory."""


class DesignFault(Exception):
    """A design that cannot be expanded, with its place in the document."""

    def __init__(self, place: Path, sentence: str) -> None:
        self.place = place
        super().__init__(sentence)


@dataclass(frozen=True)
class Changes:
    """The changes of an arm to the base, before they are resolved."""

    values: Values = field(default_factory=dict)  #: dotted path to value
    places: Mapping[str, Path] = field(default_factory=dict)  #: dotted path to where the document says so
    label: str = ""  #: name from the document or the node
    against: Values = field(default_factory=dict)  #: values of the arm it is compared with
    beside: frozenset[str] = frozenset()  #: paths that the label does not cover
    block: str = ""  #: name of the block
    conditions: Values = field(default_factory=dict)  #: values of the block, which are among the others

    def merge(self, other: Changes) -> Changes:
        """Return the changes of both."""
        return Changes(
            {**self.values, **other.values},
            {**self.places, **other.places},
            ", ".join(filter(None, (self.label, other.label))),
            {**self.against, **other.against},
            frozenset().union(*(each.beside if each.label else each.values for each in (self, other))),
        )


def expand_design(node: Node | None, place: Path = ("design",)) -> list[Changes]:
    """Return the changes of a design's arms in order, duplicates included; without a design, the base alone.

    Raises:
        DesignFault: if two nodes of a grid set the same path, a sample is larger than its population, or there are more
            than ``MAX_TRIALS`` arms.
    """
    if node is None:
        return [Changes()]
    [(kind, value)] = node.kinds.items()
    return KINDS[kind](value, (*place, kind))


def _check_size(here: Path, arms: int) -> None:
    if arms > MAX_TRIALS:
        raise DesignFault(here, f"a {here[-1]} of {arms:,} arms; a design has at most {MAX_TRIALS:,}")


def _expand_levels(levels: Levels, here: Path) -> list[Changes]:
    return [
        Changes({path: value}, {path: (*here, path, index)})
        for path, values in levels.items()
        for index, value in enumerate(values)
    ]


def _expand_leave_one_out(design: LeaveOneOut, place: Path) -> list[Changes]:
    of, direction, here = design.of, design.direction, (*place, "of")
    # A name of a part with its changes, or a path.
    parts = {
        key: value
        if isinstance(value, Mapping) and "." not in key and key not in TrialSpec.model_fields
        else {key: value}
        for key, value in of.items()
    }
    short = short_names([key for key, changes in parts.items() if key in changes])
    names = {key: short.get(key, key) for key in parts}
    remove = [
        Changes(changes, {path: (*here, *dict.fromkeys((key, path))) for path in changes}, f"without {names[key]}")
        for key, changes in parts.items()
    ]
    if direction == "remove":
        return [Changes(), *remove]
    bare = Changes()
    for key, removed in zip(parts, remove, strict=True):
        if shared := bare.values.keys() & removed.values.keys():
            raise DesignFault((*here, key), f"two parts both set '{min(shared)}'; no arm can have only one of them")
        bare = replace(bare.merge(removed), label="bare", beside=frozenset())
    add = [bare]
    for key, restored in parts.items():
        rest = {path: value for path, value in bare.values.items() if path not in restored}
        places = {path: bare.places[path] for path in rest}
        add.append(Changes(rest, places, f"bare + {names[key]}", against=bare.values))
    return add if direction == "add" else [Changes(), *remove, *add]


def _expand_zip(design: Zip, here: Path) -> list[Changes]:
    levels, labels = design.levels, design.labels
    return [
        Changes(
            {path: values[row] for path, values in levels.items()},
            {path: (*here, path, row) for path in levels},
            labels[row] if labels else "",
        )
        for row in range(len(next(iter(levels.values()))))
    ]


def _expand_arms(arms: Mapping[str, Tree | None], here: Path) -> list[Changes]:
    return [
        Changes(values or {}, {path: (*here, name, path) for path in values or {}}, name)
        for name, values in arms.items()
    ]


def _expand_union(nodes: Sequence[Node], here: Path) -> list[Changes]:
    arms: list[Changes] = []
    for index, node in enumerate(nodes):
        arms += expand_design(node, (*here, index))
        _check_size(here, len(arms))
    return arms


def _expand_sample(sample: Sample, here: Path) -> list[Changes]:
    population = expand_design(sample.over, (*here, "over"))
    if sample.n > len(population):
        sentence = f"a sample of {sample.n} is larger than its population of {len(population)}"
        raise DesignFault((*here, "n"), sentence)
    indices = random.Random(sample.seed).sample(range(len(population)), sample.n)
    return [population[index] for index in sorted(indices)]


def _expand_grid(grid: Levels | Sequence[Node], here: Path) -> list[Changes]:
    if isinstance(grid, Mapping):
        axes = [_expand_levels({path: values}, here) for path, values in grid.items()]
    else:
        axes = [expand_design(part, (*here, index)) for index, part in enumerate(grid)]
    paths = [{path for changes in axis for path in changes.values} for axis in axes]
    for first, second in itertools.combinations(paths, 2):
        if shared := first & second:
            raise DesignFault(here, f"two parts of one grid both set '{min(shared)}'; a grid varies each path once")
    _check_size(here, math.prod(map(len, axes)))
    products = [Changes()]
    for axis in axes:
        products = [left.merge(right) for left in products for right in axis]
    return products


KINDS: Mapping[str, Callable[[Any, Path], list[Changes]]] = {
    "one_at_a_time": lambda levels, here: [Changes(), *_expand_levels(levels, here)],
    "leave_one_out": _expand_leave_one_out,
    "grid": _expand_grid,
    "zip": _expand_zip,
    "arms": _expand_arms,
    "union": _expand_union,
    "sample": _expand_sample,
}
"""Key of a node to the function that returns its arms from its value and place, duplicates included.

A further kind is a field of :class:`Node` and an entry here.
"""


def short_names(paths: Tree | Sequence[str]) -> dict[str, str]:
    """Return the shortest unambiguous ending of each dotted path: ``dim`` for ``model.dim``."""
    names: dict[str, str] = {}
    for path in paths:
        parts = path.removesuffix(".type").split(".")
        for take in range(1, len(parts) + 1):
            name = ".".join(parts[-take:])
            if not any(f".{other.removesuffix('.type')}".endswith(f".{name}") for other in paths if other != path):
                break
        names[path] = name
    return names


# -- arms: names, blocks, and changes of the base ---------------------------------------------------------------------


def arm_names(design: Sequence[Changes], resolved: Sequence[Values]) -> list[str]:
    """Return the name of each arm: its label and the values that the label does not cover, or ``baseline``.

    Examples: ``position=learned+rope2d(theta=50)``; of several values ``learned, patch_size=4``.

    Args:
        design: the arms.
        resolved: the trial of each arm, which shows where a list stands for one component.
    """
    values = [
        {
            path: component_list_to_long_form(value, value_at(trial, keys_of(path)))
            for path, value in changes.values.items()
        }
        for changes, trial in zip(design, resolved, strict=True)
    ]
    shown = [
        {
            path: own[path]
            for path in own
            if path not in changes.conditions and (not changes.label or path in changes.beside)
        }
        for changes, own in zip(design, values, strict=True)
    ]
    with_path = _paths_shown_with_values(shown) | {path for own in shown if len(own) == 1 for path in own}
    short, names = short_names(list(dict.fromkeys(path for own in values for path in own))), []
    for changes, own in zip(design, shown, strict=True):
        name = ", ".join(filter(None, (changes.label, _name_values(own, short, with_path)))) or "baseline"
        names.append(f"{changes.block}: {name}" if changes.block else name)
    return names


def _name_values(values: Values, short: Mapping[str, str], with_path: Collection[str]) -> str:
    """Return the name of some values, dotted path to value; some paths stand before their values, by short names."""
    texts = {path: format_value(value) for path, value in values.items()}
    return ", ".join(f"{short[path]}={text}" if path in with_path else text for path, text in texts.items())


def _paths_shown_with_values(arms: Sequence[Values]) -> set[str]:
    """Return the paths that are in the names of all arms that set them, because their values alone tell too little.

    They have a value other than a component or a text, or ``none``, or a value that another path has, too.
    """
    first, ambiguous = dict[str, str](), set[str]()
    for values in arms:
        for path, value in values.items():
            text = format_value(value)
            tells_path = isinstance(value, str) or (isinstance(value, Mapping) and "type" in value)
            other = first.setdefault(text, path)
            if not tells_path or text == "none" or other != path:
                ambiguous |= {path, other}
    return ambiguous


def cross_arms_with_blocks(design: Sequence[Changes], blocks: Zip) -> list[Changes]:
    """Return the changes of every arm in every block; each is compared with an arm of its block.

    Raises:
        DesignFault: if the design sets a path of the blocks, or two blocks have one name.
    """
    paths = {key: key.removeprefix("base.") for key in blocks.levels}
    for key, path in paths.items():
        if any(path in changes.values for changes in design):
            raise DesignFault(("blocks", key), f"the design sets {path}, too; a block is the same for all of its arms")
    number = len(next(iter(blocks.levels.values())))
    rows = [{path: blocks.levels[key][row] for key, path in paths.items()} for row in range(number)]
    short, with_path, crossed = short_names([*paths.values()]), _paths_shown_with_values(rows), {}
    for row, values in enumerate(rows):
        places: dict[str, Path] = {path: ("blocks", key, row) for key, path in paths.items()}
        name = blocks.labels[row] if blocks.labels else _name_values(values, short, with_path)
        if name in crossed:
            raise DesignFault(next(iter(places.values())), f"two blocks are called '{name}'; name them by labels")
        block = Changes(values, places, against=values)
        crossed[name] = [
            replace(changes.merge(block), beside=changes.beside, block=name, conditions=values) for changes in design
        ]
    return [changes for arms in crossed.values() for changes in arms]


def component_list_to_long_form(value: Any, resolved: Any) -> Any:
    """Return a value of the document, and a list that stands for one component in its long form.

    Args:
        value: as written in the document.
        resolved: the same value after resolution, a mapping if it is a component.
    """
    if isinstance(value, list) and len(value) > 1 and isinstance(resolved, Mapping):
        return {"type": TOGETHER, PARTS: value}
    return value


def format_value(value: Any) -> str:
    """Format a value of the document briefly: ``learned+rope2d(theta=50)``, ``0.001``, ``none``."""
    if isinstance(value, Mapping) and value.get("type") == TOGETHER and isinstance(value.get(PARTS), list):
        return "+".join(map(format_value, value[PARTS]))
    if isinstance(value, Mapping):
        options = ", ".join(f"{name}={format_value(item)}" for name, item in value.items() if name != "type")
        return (
            f"{value['type']}({options})" if "type" in value and options else str(value.get("type", f"{{{options}}}"))
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def apply_changes(base: Values, changes: Values, resolved: Values) -> NewTree:
    """Return ``base`` with an arm's changes, shortest paths first; a new type replaces its whole slot.

    Args:
        base: ``base`` as written in the document.
        changes: dotted path to value.
        resolved: the resolved base, which names the component of a slot that the document leaves out.
    """
    tree: NewTree = deep_copy(base)
    for path in sorted(changes, key=lambda path: (len(keys_of(path)), path)):  # a type before options beside it
        apply_change(tree, keys_of(path), changes[path], resolved)
    return tree


def apply_change(node: Any, path: Sequence[str], value: Any, there: Any = None) -> None:
    """Set a value in place; names of components along its path become mappings, and a length replaces any other."""
    for part, below in itertools.pairwise(path):
        there = there.get(part, {}) if isinstance(there, Mapping) else {}
        key: Any = int(part) if isinstance(node, list) else part
        child = node[key] if isinstance(node, list) else node.get(part)
        if isinstance(child, str):
            node[key] = {"type": child}
        elif not isinstance(child, dict) and not (isinstance(child, list) and index_in(child, below) is not None):
            node[key] = {"type": there["type"]} if isinstance(there, Mapping) and "type" in there else {}
        node = node[key]
    if path[-2:-1] == ("train",) and path[-1] in LENGTHS:
        for length in LENGTHS:
            node.pop(length, None)
    node[int(path[-1]) if isinstance(node, list) else path[-1]] = deep_copy(value)
