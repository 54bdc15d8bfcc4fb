"""The module of each slot and the origin of components, importable without importing any slot."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from vitlab._version import __version__
from vitlab.errors import UnknownComponent, nearest

SLOT_MODULES = {
    "model": "vitlab.models",
    "patch": "vitlab.components.patch",
    "position": "vitlab.components.position",
    "block": "vitlab.components.block",
    "attention": "vitlab.components.attention",
    "mlp": "vitlab.components.mlp",
    "norm": "vitlab.components.norm",
    "head": "vitlab.components.head",
    "init": "vitlab.components.init",
    "dataset": "vitlab.data.datasets",
    "augment": "vitlab.data.augment",
    "optimizer": "vitlab.training.optim",
    "schedule": "vitlab.training.optim",
    "loss": "vitlab.training.losses",
    "objective": "vitlab.training.objective",
    "metric": "vitlab.training.metrics",
    "engine": "vitlab.engines",
    "executor": "vitlab.executors",
    "tracker": "vitlab.trackers",
    "section": "vitlab.report.sections",
}
"""Slot to the name of its module; a string, so that listing the slots imports nothing."""

OPTIONAL_MODULES = {
    "distillation": "vitlab.training.distillation",
    "mixing": "vitlab.training.mixup",
    "averaging": "vitlab.training.ema",
    "mup": "vitlab.models.mup",
    "weights": "vitlab.weights",
}
"""Name to module, of features that only some trials use.

They are imported by :func:`optional_module`, so that the code digest of a trial without a feature does not cover it.
"""

BUILT_IN = "vitlab"
"""The source of built-in components, as in ``vitlab:learned``."""


@dataclass(frozen=True)
class Origin:
    """The source of a component: a distribution with its version, or a file with a digest of its code."""

    source: str
    version: str

    def __str__(self) -> str:
        return f"{self.source} {self.version}"


BUILTIN_ORIGIN = Origin(BUILT_IN, __version__)
"""The origin of built-in components."""


def slot_module(name: str) -> str:
    """Return the name of the module that defines a slot.

    Raises:
        UnknownComponent: if no slot has that name; the message gives the nearest name and all slots.
    """
    if name not in SLOT_MODULES:
        raise UnknownComponent(
            f"no slot called '{name}'.{nearest(name, SLOT_MODULES)} Slots: {', '.join(SLOT_MODULES)}."
        )
    return SLOT_MODULES[name]


def slot_package(name: str) -> Any:
    """Import and return the module that defines a slot.  Raises as :func:`slot_module`."""
    return importlib.import_module(slot_module(name))


def optional_module(name: str) -> Any:
    """Import and return the module of an optional feature; see :data:`OPTIONAL_MODULES`."""
    return importlib.import_module(OPTIONAL_MODULES[name])
