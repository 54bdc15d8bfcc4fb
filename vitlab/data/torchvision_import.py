"""The one place torchvision is imported, late and in spite of a torch without its operators."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any

import torch

OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""What torchvision registers shape functions for as it is imported, and vitlab never calls."""

_fragments: list[torch.library.Library] = []


@cache
def torchvision(module: str = "torchvision") -> Any:
    """``torchvision``, or a module below it.

    The wheels of the public index pair a CPU-only torch with a torchvision whose compiled operators do not load; its
    Python then stumbles over operators nobody declared.  They are declared here, and the import is tried again.
    """
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # the first try left them half-made
    fragment = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            fragment.define(schema)  # type: ignore[no-untyped-call]
    _fragments.append(fragment)  # an operator lives as long as its library
    return importlib.import_module(module)
