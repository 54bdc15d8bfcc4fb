"""What is written is read again, as whoever opens the file will, and compared with the model it was written from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vitlab.components.attention import SOFTMAX
from vitlab.models.vit import ViT
from vitlab.models.weights.architecture import Architecture
from vitlab.slots import Resolved

TRAINED_BY = ("drop", "proj_drop", "weights", "output")
"""Options of components that change nothing of what a trained model computes."""

SHAPES = ("ratio", "representation_size", "width_factor")
"""Options of components that decide shapes alone, so that they agree where all tensors fit."""

SHOWN = 3  #: options in a sentence

Values = dict[str, Any]
"""Option to its value."""


def differences(mine: Architecture, theirs: Architecture, *, head: bool, shapes: bool) -> list[str]:
    """Return every option in which two models compute differently: ``OPTION is MINE, and the file holds THEIRS``.

    All options of all components are compared, except :data:`TRAINED_BY`.

    Args:
        mine: the model that is written.
        theirs: the model that is read.
        head: whether there is a head to compare.
        shapes: whether options that only decide shapes count.
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    tables = [_places(which, head) for which in (mine, theirs)]
    for place in tables[0]:
        block, name = place
        one, other = (table.get(place, {}) for table in tables)
        for option in _differing(one, other, shapes):
            values = _shown(one.get(option)), _shown(other.get(option))
            found.setdefault((f"{name}{option}", *values), []).append(block)
    depth = mine.options["depth"]
    return [
        f"{option}{'' if blocks in ([-1], [*range(depth)]) else _of(blocks)} is {own}, and the file holds {other}"
        for (option, own, other), blocks in found.items()
    ]


# -- how it is done ---------------------------------------------------------------------------------------------------


def _places(model: Architecture, head: bool) -> dict[tuple[int, str], Values]:
    """Return the options of every place of a model, by block (-1 outside of blocks) and the name of the place."""
    options = {name: value for name, value in model.options.items() if name != "type"}
    anatomy = ViT.anatomy(model.info, options)
    g, normed = anatomy.geometry, anatomy.final_norm.type != "none"
    table: dict[tuple[int, str], Values] = {
        (-1, ""): {
            "image": g.image,
            "patch_size": g.patch,
            "dim": g.dim,
            "depth": g.depth,
            "heads": g.heads,
            "prefix": g.prefix,
            "layer_scale": options.get("layer_scale") is not None,
            "final_norm_at": anatomy.final_norm_at if normed else "tokens",
        },
        (-1, "patch"): dict(_options(anatomy.patch)),
        (-1, "position"): dict(_options(anatomy.position)),
        (-1, "final_norm"): dict(_options(anatomy.final_norm)),
    }
    if ".prefix_rows" in table[-1, "position"]:
        rows = model.prefix_rows if g.prefix else None
        table[-1, "position"][".prefix_rows"] = rows
    if head:
        table[-1, "head"] = dict(_options(anatomy.head))
        if table[-1, "head"].get(".pool") != "map":
            table[-1, "head"].pop(".approximate", None)
    for index, block in enumerate(anatomy.blocks):
        for name, choice in (("attention", block.attention), ("mlp", block.mlp), ("norm", block.norm)):
            table[index, name] = dict(_options(choice))
    return table


def _options(choice: Resolved, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every option of a component, its type under the empty path."""
    yield path, "softmax" if choice.component in SOFTMAX else choice.type.rpartition(":")[2]
    for name, value in choice.options.items():
        if isinstance(value, Resolved):
            yield from _options(value, f"{path}.{name}")
        elif name not in TRAINED_BY:
            yield f"{path}.{name}", value


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], shapes: bool) -> Iterator[str]:
    """Yield the options that differ; of components that differ only themselves."""
    others: list[str] = []
    for option in one.keys() | other.keys():
        equal = option in one and option in other and _plain(one[option]) == _plain(other[option])
        if not equal and (shapes or option.rpartition(".")[2] not in SHAPES):
            others.append(option)
    for option in sorted(others):
        if not any(option != above and option.startswith(f"{above}.") for above in others):
            yield option


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _of(blocks: list[int]) -> str:
    return f" of block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
