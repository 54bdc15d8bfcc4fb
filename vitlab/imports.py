"""Imports: attributes that are imported on first use, and a record of each module's file as it was when imported.

A file may be edited after a process has imported it.  The process then runs other code than the file contains, and a
digest of the file would be of code that was not run.  A finder in front of all others records size, time and inode of
every module's file right before it is read, and again when the module is reloaded; it finds no modules itself.

The finder deletes bytecode that is older than its source.  Python compares sizes and whole seconds alone, so that it
would run the bytecode of a file that was edited within a second.
"""

import importlib
import itertools
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, NamedTuple

from vitlab.errors import nearest

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders into which distributions are installed."""


class Stamp(NamedTuple):
    """Metadata that distinguishes two versions of a file without reading them."""

    modified_ns: int
    size: int
    inode: int


class Import(NamedTuple):
    """The last import of a module."""

    stamp: Stamp
    number: int  #: position among all imports of this process


last_imports: dict[str, Import] = {}
"""The last import of each module."""

reloads: dict[str, int] = {}
"""Number of the last reload of each module that was reloaded."""


def file_stamp(file: str | os.PathLike[str]) -> Stamp | None:
    """Return modification time, size and inode of a file, which change with it; None if there is no such file."""
    try:
        state = os.stat(file)
    except (OSError, ValueError):
        return None
    return Stamp(state.st_mtime_ns, state.st_size, state.st_ino)


def import_lazy_name(module: str, name: str) -> Any:
    """Import and return a name that a module lists in its imports for type checkers, for its ``__getattr__``.

    Raises:
        AttributeError: if it lists no such name.
    """
    homes = _modules_of_names(module)
    if name not in homes:
        raise AttributeError(f"module '{module}' has no attribute '{name}'.{nearest(name, homes)}")
    return import_object(homes[name], name)


def import_object(module: str, name: str = "") -> Any:
    """Import a module, and return its attribute or submodule of this name; without a name, the module."""
    home = importlib.import_module(module)
    if not name:
        return home
    return getattr(home, name) if hasattr(home, name) else import_object(f"{module}.{name}")


@cache
def _modules_of_names(module: str) -> dict[str, str]:
    """Return each name in a module's imports for type checkers, and the module that has it."""
    import ast  # slow, and not needed by every command

    # The imports that type checkers read are the only list of names, so that the two cannot differ.
    body = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")).body
    lazy = [node for block in body if isinstance(block, ast.If) for node in block.body]
    return {alias.name: node.module or "" for node in lazy if isinstance(node, ast.ImportFrom) for alias in node.names}


def record_module_import(module: str, file: str | os.PathLike[str], reloaded: bool = False) -> None:
    """Record that a module is about to be imported from the current version of a file."""
    stamp = file_stamp(file)
    if stamp is not None:
        last_imports[module] = Import(stamp, next(_numbers))
        if reloaded:
            reloads[module] = last_imports[module].number


def record_imports() -> None:
    """Start recording imports; modules imported before count as imported now."""
    if any(isinstance(finder, _ImportRecorder) for finder in sys.meta_path):
        return
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and INSTALLED.isdisjoint(PurePath(file).parts):
            record_module_import(name, file)
    sys.meta_path.insert(0, _ImportRecorder())


_numbers = itertools.count()


def _delete_outdated_bytecode(spec: ModuleSpec) -> None:
    """Delete a module's bytecode if it is older than its source."""
    source, bytecode = (None if file is None else file_stamp(file) for file in (spec.origin, spec.cached))
    if source is not None and bytecode is not None and bytecode.modified_ns < source.modified_ns:
        with suppress(OSError):
            os.unlink(str(spec.cached))


class _ImportRecorder:
    """Finder that records the modules found by the other finders of ``sys.meta_path``."""

    def __init__(self) -> None:
        self._searching = threading.local()  # names being searched, as another finder may call all finders in turn

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        searching: set[str] = self._searching.__dict__.setdefault("names", set())
        if name in searching:
            return None
        searching.add(name)
        try:
            for finder in list(sys.meta_path):
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    reloaded = target is not None
                    if spec.has_location and spec.origin is not None and (reloaded or name not in sys.modules):
                        if not any(folder in spec.origin for folder in INSTALLED):
                            _delete_outdated_bytecode(spec)
                        record_module_import(name, spec.origin, reloaded)
                    return spec
        finally:
            searching.discard(name)
        return None
