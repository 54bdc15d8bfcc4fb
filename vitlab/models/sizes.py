"""Named sizes of a Vision Transformer, such as ``size: S``.

A size is shorthand for four options, dim, depth, heads and the ratio of the MLP; explicit options override it.  The
patch is not part of it: ViT-S/16 is ``{size: S, patch_size: 16}``.

Reference: arXiv:2010.11929 (B, L, H), arXiv:2012.12877 (Ti, S, and DeiT's, which are of the same sizes),
arXiv:2106.04560 (g, G).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vitlab.registry import BUILT_IN, slot
from vitlab.spec import Choice


@dataclass(frozen=True)
class Size:
    """Width, number of blocks, heads per block, hidden width of the MLP over the width."""

    dim: int
    depth: int
    heads: int
    ratio: float = 4.0


Name = Literal["pico", "nano", "micro", "mini", "Ti", "S", "M", "B", "L", "H", "g", "G"]

SIZES: dict[str, Size] = {
    # For small images on a laptop; 0.03, 0.2, 0.8 and 2.7 million parameters in the blocks.
    "pico": Size(32, 2, 2),
    "nano": Size(64, 4, 4),
    "micro": Size(128, 4, 4),
    "mini": Size(192, 6, 3),
    # Published sizes; Ti, S and B are DeiT's too.
    "Ti": Size(192, 12, 3),
    "S": Size(384, 12, 6),
    "M": Size(512, 12, 8),
    "B": Size(768, 12, 12),
    "L": Size(1024, 24, 16),
    "H": Size(1280, 32, 16),
    "g": Size(1408, 40, 16, 48 / 11),
    "G": Size(1664, 48, 16, 64 / 13),
}
DEFAULT = "Ti"


def expand_size(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model with the numbers of its size filled in; explicit options are unchanged.

    The ratio applies to the plain MLP, ``gelu``; others keep their own.
    """
    name = options.get("size") or DEFAULT
    if not isinstance(name, str) or name not in SIZES:
        return dict(options)  # validation reports it, with the names of the sizes
    size = SIZES[name]
    full = dict(options)
    for number in ("dim", "depth", "heads"):
        if full.get(number) is None:
            full[number] = getattr(size, number)
    try:
        mlp = Choice.of(full["mlp"] if "mlp" in full else slot("mlp").qualify_builtin("gelu"))
    except ValueError:
        return full  # validation reports it
    if mlp.type in ("gelu", f"{BUILT_IN}:gelu"):
        full["mlp"] = {"type": mlp.type, "ratio": size.ratio, **mlp.options}
    return full
