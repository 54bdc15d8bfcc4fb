"""Comparison of a written model, as its file is read again, with the model it was written from."""

from __future__ import annotations

from typing import Any

from vitlab.models.alike import differing_options, format_value, group_by_block, options_of
from vitlab.models.vit import ViT
from vitlab.weights.architecture import Architecture

SHOWN = 3  #: options in a sentence

Values = dict[str, Any]
"""Option to its value."""


def differences(mine: Architecture, theirs: Architecture, *, head: bool, shapes: bool) -> list[str]:
    """Return the options in which two models compute differently: ``OPTION is MINE, and the file holds THEIRS``.

    Options of all components are compared, except those that only affect training.

    Args:
        mine: the written model.
        theirs: the model that is read from the file.
        head: whether there is a head to compare.
        shapes: whether options that only decide shapes count.
    """
    tables = [_places(which, head) for which in (mine, theirs)]
    rows = [
        (block, f"{name}{option}", format_value(one.get(option)), format_value(other.get(option)))
        for block, name in tables[0]
        for one, other in [[table.get((block, name), {}) for table in tables]]
        for option in differing_options(one, other, shapes)
    ]
    depth = mine.options["depth"]
    return [f"{option} is {own}, and the file holds {other}" for option, own, other in group_by_block(rows, depth)]


def _places(model: Architecture, head: bool) -> dict[tuple[int, str], Values]:
    """Return the options of every component of a model, by block (-1 outside of blocks) and component name."""
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
        (-1, "patch"): dict(options_of(anatomy.patch)),
        (-1, "position"): dict(options_of(anatomy.position)),
        (-1, "final_norm"): dict(options_of(anatomy.final_norm)),
    }
    if ".prefix_rows" in table[-1, "position"]:
        rows = model.prefix_rows if g.prefix else None
        table[-1, "position"][".prefix_rows"] = rows
    if head:
        table[-1, "head"] = dict(options_of(anatomy.head))
        if table[-1, "head"].get(".pool") != "map":
            table[-1, "head"].pop(".approximate", None)
    for index, block in enumerate(anatomy.blocks):
        for name, choice in (("attention", block.attention), ("mlp", block.mlp), ("norm", block.norm)):
            table[index, name] = dict(options_of(choice))
    return table
