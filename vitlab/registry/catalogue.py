"""What can be named: every component of a slot, known without importing any of them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import vitlab
from vitlab.registry import plugin_files, plugins
from vitlab.registry.slot_modules import BUILTIN_ORIGIN, Origin, room_of


@dataclass(frozen=True)
class Entry:
    """One line of ``vitlab list``: a name and its origin, known without importing anything."""

    slot: str
    name: str
    origin: Origin
    target: str  #: ``module:Class``
    summary: str = ""  #: the first line of its documentation; empty for plugins, which are not imported


def listing(name: str) -> list[Entry]:
    """Every component of a slot, without importing any: built-ins are read from the text of their room.

    Raises:
        UnknownComponent: for what is no slot.
    """
    room = room_of(name)
    built_in = [
        Entry(name, component, BUILTIN_ORIGIN, f"{module}:{cls}", summary)
        for module, component, cls, summary in _written(name, room)
    ]
    offered = [
        Entry(name, point.name, Origin(plugins.source(point), plugins.version(point)), point.value)
        for point in plugins.points(name)
    ]
    by_file = [
        Entry(
            name,
            known.name,
            known.origin,
            f"{known.component.__module__}:{known.component.__qualname__}",
            _first_line(inspect.getdoc(known.component)),
        )
        for known in plugin_files.registered(name)
    ]
    return sorted(built_in + offered + by_file, key=lambda entry: (entry.name, str(entry.origin)))


@cache
def _written(slot: str, room: str) -> tuple[tuple[str, str, str, str], ...]:
    """(module, component, class, summary) for each ``@<slot>.register("name")`` in the text of the slot's room."""
    found = []
    for module, text in _texts(room):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id=name), attr="register"),
                        args=[ast.Constant(value=str(known))],
                    ) if name == slot:
                        found.append((module, known, node.name, _first_line(ast.get_docstring(node))))
    return tuple(found)


def _first_line(documentation: str | None) -> str:
    """Return the first sentence of a docstring, as far as it stands in its first line."""
    line = (documentation or "").partition("\n")[0]
    return line if len(line) <= 100 else f"{line[:97]}..."


def _texts(room: str) -> Iterator[tuple[str, str]]:
    """The modules of a room and their text; a room is a module, or a package with one module per component."""
    root = Path(vitlab.__path__[0]).joinpath(*room.split(".")[1:])
    modules = sorted(root.glob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    for file in modules:
        suffix = "" if file.stem == "__init__" or not root.is_dir() else f".{file.stem}"
        yield room + suffix, file.read_text(encoding="utf-8")
