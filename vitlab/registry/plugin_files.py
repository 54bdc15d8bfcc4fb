"""Single Python files of components that this process has run: their modules, origins and texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitlab.registry.slot_modules import Origin


@dataclass(frozen=True)
class PluginFile:
    """A file as it was when it was run."""

    path: Path
    origin: Origin
    text: bytes


_by_module: dict[str, PluginFile] = {}  # earlier versions of edited files included


def add(file: PluginFile) -> str:
    """Record a file that is about to be run, and return the name of its module."""
    name = module_of(file.origin)
    _by_module[name] = file
    return name


def discard(module: str) -> None:
    """Forget a file."""
    _by_module.pop(module, None)


def find(module: str) -> PluginFile | None:
    """Return the file that was run as this module, or None."""
    return _by_module.get(module)


def paths() -> frozenset[Path]:
    """Return the paths of all files."""
    return frozenset(file.path for file in _by_module.values())


def module_of(origin: Origin) -> str:
    """Return the module name under which a file of components is run."""
    return f"vitlab_file_{Path(origin.source).stem}_{origin.version}"


def modules() -> frozenset[str]:
    """Return the modules of all files that this process has run; running one can have any side effect."""
    return frozenset(_by_module)


def text_of(module: str) -> bytes | None:
    """Return the source that was run as this module, or None if the module is not a file of components."""
    file = find(module)
    return None if file is None else file.text
