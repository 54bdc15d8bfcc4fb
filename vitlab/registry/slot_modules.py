"""The module of each slot and of each built-in component, and the origin of components; nothing of these is imported.

A built-in component is imported when it is first asked for, so that a run loads only the components it uses.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vitlab._version import __version__
from vitlab.errors import UnknownComponent, nearest
from vitlab.imports import import_object

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
    "schedule": "vitlab.training.optim.schedules",
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
    "weights": "vitlab.weights.opening",
}
"""Name to module, of features that only some trials use.

They are imported by :func:`import_optional`, so that the code digest of a trial without a feature does not cover it.
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


def slot_module_name(name: str) -> str:
    """Return the name of the module that defines a slot.

    Raises:
        UnknownComponent: if no slot has that name; the message gives the nearest name and all slots.
    """
    if name not in SLOT_MODULES:
        raise UnknownComponent(
            f"no slot called '{name}'.{nearest(name, SLOT_MODULES)} Slots: {', '.join(SLOT_MODULES)}."
        )
    return SLOT_MODULES[name]


class BuiltIn(NamedTuple):
    """Place of a built-in component."""

    module: str
    cls: str  #: name of its class
    summary: str  #: the first line of its documentation


@cache
def built_ins(slot: str) -> Mapping[str, BuiltIn]:
    """Return name to place of every built-in component of a slot.

    They are found by ``@<slot>.register("name")`` in the source of the slot's package, so there is no list of them to
    maintain.  Text is searched, as parsing all modules would take longer than importing those that are used.
    """
    if slot not in SLOT_MODULES:
        return {}
    package = SLOT_MODULES[slot]
    root = Path(__file__).parents[1].joinpath(*package.split(".")[1:])
    files = sorted(root.glob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    registration = re.compile(
        rf'^@{slot}\.register\("(.+)"\)\n(?:@.*\n)*class (\w+).*:\n +r?"""(.*?)(?:"""|$)', re.MULTILINE
    )
    components = {}
    for file in files:
        module = f"{package}.{file.stem}" if root.is_dir() and file.stem != "__init__" else package
        for name, cls, summary in registration.findall(file.read_text(encoding="utf-8")):
            components[name] = BuiltIn(module, cls, summary)
    return components


def import_slot(name: str) -> Any:
    """Import and return the module that defines a slot.  Raises as :func:`slot_module_name`."""
    return import_object(slot_module_name(name))


def import_optional(name: str) -> Any:
    """Import and return the module of an optional feature; see :data:`OPTIONAL_MODULES`."""
    return import_object(OPTIONAL_MODULES[name])
