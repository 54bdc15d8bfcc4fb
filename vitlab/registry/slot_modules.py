"""Where slots stand, and where components come from.  Naming a slot imports nothing."""

from __future__ import annotations

import importlib
import typing
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from vitlab._version import __version__
from vitlab.errors import UnknownComponent, nearest

if TYPE_CHECKING:
    from vitlab.registry.slots import Slot

ROOMS = {
    "model": "vitlab.models",
    "patch": "vitlab.components.patch",
    "position": "vitlab.components.position",
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
    "metric": "vitlab.training.metrics",
    "executor": "vitlab.executors",
    "tracker": "vitlab.trackers",
}
"""Slot to the module it stands in.  A string, so that naming a slot imports nothing."""

BUILT_IN = "vitlab"
"""The source of built-in components, as in ``vitlab:learned``."""


@dataclass(frozen=True)
class Origin:
    """Where a component comes from: a distribution with its version, or a file with a digest of its code."""

    source: str
    version: str

    def __str__(self) -> str:
        return f"{self.source} {self.version}"


BUILTIN_ORIGIN = Origin(BUILT_IN, __version__)
"""Of what is built in."""


def room_of(name: str) -> str:
    """The module that a slot stands in.

    Raises:
        UnknownComponent: for what is no slot, with the nearest name and all there are.
    """
    if name not in ROOMS:
        raise UnknownComponent(f"no slot called '{name}'.{nearest(name, ROOMS)} Slots: {', '.join(ROOMS)}.")
    return ROOMS[name]


@cache
def slot(name: str) -> Slot[Any]:
    """The slot called ``name``; imports the room it stands in.  Raises as :func:`room_of`."""
    return typing.cast("Slot[Any]", getattr(importlib.import_module(room_of(name)), name))
