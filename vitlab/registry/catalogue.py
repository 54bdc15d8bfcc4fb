"""The catalogue of components: every name of every slot, listed without importing any component."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import vitlab
from vitlab.registry import plugins
from vitlab.registry.slot_modules import BUILTIN_ORIGIN, Origin, slot_module
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
    """Return every component of a slot without importing any; built-ins are read from the source of their package.

    Raises:
        UnknownComponent: if no slot has that name.
    """
    package = slot_module(name)
    built_in = [
        Entry(name, component, BUILTIN_ORIGIN, f"{module}:{cls}", summary)
        for module, component, cls, summary in _registrations(name, package)
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


@cache
def _registrations(slot: str, package: str) -> tuple[tuple[str, str, str, str], ...]:
    """Return (module, component, class, summary) of each ``@<slot>.register("name")`` in the source of ``package``."""
    rows = []
    for module, text in _sources(package):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id=name), attr="register"),
                        args=[ast.Constant(value=str(component))],
                    ) if name == slot:
                        rows.append((module, component, node.name, first_line(ast.get_docstring(node))))
    return tuple(rows)


def first_line(documentation: str | None) -> str:
    """Return the first line of a docstring."""
    return without_markup((documentation or "").partition("\n")[0])


def without_markup(documentation: str) -> str:
    """Return a docstring without the markup of reStructuredText, such as roles."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", documentation).replace("``", "`")


def _sources(package: str) -> Iterator[tuple[str, str]]:
    """Yield the name and source of each module of ``package``, which is a module or a package."""
    root = Path(vitlab.__path__[0]).joinpath(*package.split(".")[1:])
    modules = sorted(root.glob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    for file in modules:
        suffix = "" if file.stem == "__init__" or not root.is_dir() else f".{file.stem}"
        yield package + suffix, file.read_text(encoding="utf-8")
