"""Lazy import of torchvision that works with wheels whose compiled operators do not load."""

import importlib
import sys
from functools import cache
from typing import Any

import torch

OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators for which torchvision registers shape functions on import; vitlab never calls them."""

_fragments: list[torch.library.Library] = []


@cache
def torchvision(module: str = "torchvision") -> Any:
    """Import ``torchvision`` or a module below it, even if its compiled operators cannot be loaded.

    With a CPU-only torch, the compiled operators of PyPI's torchvision wheel do not load, and its import fails because
    they are not declared.  This function then declares them and imports again.
    """
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _fragments:
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # the first attempt left partly initialised modules
    fragment = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            fragment.define(schema)  # type: ignore[no-untyped-call]
    _fragments.append(fragment)  # an operator exists only as long as its library object
    return torchvision(module)
