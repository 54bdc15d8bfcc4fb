"""The catalogue of components: every name of every slot, listed without importing any component."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from vitlab.registry import plugins
from vitlab.registry.slot_modules import BUILTIN_ORIGIN, Origin, built_ins, slot_module
from vitlab.registry.slots import registered_by_files


@dataclass(frozen=True)
class Entry:
    """One line of ``vitlab list``: a component's name and origin, read without importing it."""

    slot: str
    name: str
    origin: Origin
    target: str  #: ``module:Class``
    summary: str = ""  #: the first line of its documentation; empty for plugins, which are not imported


def listing(name: str) -> list[Entry]:
    """Return every component of a slot without importing any.

    Raises:
        UnknownComponent: if no slot has that name.
    """
    slot_module(name)  # raises for a name that no slot has
    built_in = [
        Entry(name, component, BUILTIN_ORIGIN, f"{place.module}:{place.cls}", without_markup(place.summary))
        for component, place in built_ins(name).items()
    ]
    offered = [
        Entry(name, point.name, Origin(plugins.source(point), plugins.version(point)), point.value)
        for point in plugins.points(name)
    ]
    by_file = [
        Entry(name, component, origin, f"{cls.__module__}:{cls.__qualname__}", first_line(inspect.getdoc(cls)))
        for component, cls, origin in registered_by_files(name)
    ]
    return sorted(built_in + offered + by_file, key=lambda entry: (entry.name, str(entry.origin)))


def first_line(documentation: str | None) -> str:
    """Return the first line of a docstring."""
    return without_markup((documentation or "").partition("\n")[0])


def without_markup(documentation: str) -> str:
    """Return a docstring without the markup of reStructuredText, such as roles."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", documentation).replace("``", "`")
