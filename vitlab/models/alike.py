"""Comparison of components by those options that make two trained models compute different functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vitlab.components.attention import SOFTMAX
from vitlab.registry import Resolved

TRAINED_BY = ("drop", "proj_drop", "weights", "output")
"""Options of components that do not affect what a trained model computes."""

SHAPES = ("ratio", "representation_size", "width_factor")
"""Options of components that only decide shapes, so that they agree if all tensors fit."""


def options_of(choice: Resolved, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every option of a component, its type under the empty path.

    Options in :data:`TRAINED_BY` are left out; implementations of softmax attention have one type.
    """
    yield path, "softmax" if choice.component in SOFTMAX else choice.type.rpartition(":")[2]
    for name, value in choice.options.items():
        if isinstance(value, Resolved):
            yield from options_of(value, f"{path}.{name}")
        elif name not in TRAINED_BY:
            yield f"{path}.{name}", value


def differing_options(one: Mapping[str, Any], other: Mapping[str, Any], shapes: bool = False) -> Iterator[str]:
    """Yield the options that differ; of components of different types, only the types.

    Args:
        one: path to value.
        other: path to value.
        shapes: whether :data:`SHAPES` count.
    """
    options = []
    for option in one.keys() | other.keys():
        equal = option in one and option in other and _plain(one[option]) == _plain(other[option])
        if not equal and (shapes or option.rpartition(".")[2] not in SHAPES):
            options.append(option)
    for option in sorted(options):
        if not any(option != above and option.startswith(f"{above}.") for above in options):
            yield option


def group_by_block(differences: Iterable[tuple[int, str, str, str]], depth: int) -> Iterator[tuple[str, str, str]]:
    """Yield each difference once, with all blocks that have it.

    Args:
        differences: block (-1 outside of blocks), option, and its two values.
        depth: number of blocks.
    """
    blocks: dict[tuple[str, str, str], list[int]] = {}
    for block, *difference in differences:
        option, one, other = difference
        blocks.setdefault((option, one, other), []).append(block)
    for (option, one, other), which in blocks.items():
        yield f"{option}{'' if which in ([-1], [*range(depth)]) else _of(which)}", one, other


def format_value(value: Any) -> str:
    """Return an option's value as text."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _of(blocks: list[int]) -> str:
    return f" of block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
