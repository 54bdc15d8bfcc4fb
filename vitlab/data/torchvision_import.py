"""Lazy import of torchvision that works with wheels whose compiled operators do not load."""

import importlib
import sys
from functools import cache
from typing import Any

import torch

OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators for which torchvision registers shape functions on import; vitlab never calls them."""


@cache
def torchvision(module: str = "torchvision") -> Any:
    """Import ``torchvision`` or a module below it, even if its compiled operators cannot be loaded.

    With a CPU-only torch, the compiled operators of PyPI's torchvision wheel do not load, and its import fails because
    they are not declared.  This function then declares them and imports again.
    """
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # the first attempt left partly initialised modules
    for name, schema in OPERATORS.items():
        torch.library.define(name, schema)  # which raises if that was not what was missing
    return importlib.import_module(module)
