"""A single Python file of components, for one run: run again when its code has changed, and taken back if it fails."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab import imports
from vitlab.errors import BrokenComponent, ClashError
from vitlab.registry.slot_modules import Origin

if TYPE_CHECKING:
    from vitlab.registry.slots import Slot


@dataclass(frozen=True)
class FromFile:
    """A component that a file has registered."""

    slot: Slot[Any]
    name: str
    component: type
    origin: Origin

    def join(self) -> None:
        """Be found under its name from now on."""
        self.slot._add(self.name, self.component, self.origin)
        _from_files.append(self)

    def leave(self) -> None:
        """Be found no more."""
        self.slot._remove(self.name, self.origin)
        _from_files.remove(self)


_running: dict[str, tuple[Path, Origin]] = {}  # module to file and origin, while a file runs
_files: dict[Path, Origin] = {}  # that have run, and under which digest
_texts: dict[str, bytes] = {}  # module to the text that was run, earlier versions of files included
_from_files: list[FromFile] = []


def running(module: str) -> Origin | None:
    """The origin of a file that is being run as this module; None for every other module."""
    return _running[module][1] if module in _running else None


def registered(slot: str) -> list[FromFile]:
    """The components of a slot that files have registered."""
    return [known for known in _from_files if known.slot.name == slot]


def loaded() -> list[Path]:
    """Return the files that have been run, or are being run."""
    return [*_files, *(path for path, _ in _running.values())]


def module_of(origin: Origin) -> str:
    """Return the name of the module that a file of components is run as."""
    return f"vitlab_file_{Path(origin.source).stem}_{origin.version}"


def modules() -> frozenset[str]:
    """Return the modules of all files that this process has run: each may have changed anything."""
    return frozenset(_texts)


def text_of(module: str) -> bytes | None:
    """Return the text that was run as this module; None for a module that is no file of components."""
    return _texts.get(module)


def load_file(file: Path | str) -> Origin:
    """Run a Python file that registers components, for this process.

    A file whose code has not changed is run once; one that was edited is run again, and its components replace those it
    registered before.  A file that fails leaves everything as it was.

    Raises:
        BrokenComponent: if it is not there or fails; below the sentence, its lines that were running.
        ClashError: if it registers what another file of that name has registered.
    """
    path = Path(file).resolve()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BrokenComponent(f"plugin file {file}: {error.strerror}") from None
    digest = _digest(text)
    origin = Origin(path.name, digest)
    if _files.get(path) == origin:
        return origin
    name = module_of(origin)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise BrokenComponent(f"plugin file {file}: the name of a Python file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    replaced = [known for known in _from_files if known.origin == _files.get(path)]
    for known in replaced:
        known.leave()
    kept = len(_from_files)
    _running[name] = path, origin
    imports.note(name, path)
    try:
        # The text of the digest; the loader would read the file again, or take older code out of __pycache__.
        exec(spec.loader.source_to_code(text, str(path)), vars(module))
    except BaseException as error:
        del sys.modules[name]
        for new in _from_files[kept:]:
            new.leave()
        for known in replaced:
            known.join()
        if not isinstance(error, Exception | SystemExit) or isinstance(error, BrokenComponent | ClashError):
            raise
        from vitlab.registry.blame import with_frames

        # whatever else a guest raises while it is run is what we are here to report
        raise BrokenComponent(f"plugin file {file} failed: {with_frames(error)}") from error
    finally:
        del _running[name]
    _files[path] = origin
    _texts[name] = text
    return origin


def _digest(text: bytes) -> str:
    """Of the syntax tree, which a comment does not change; of the text of what has none."""
    with suppress(SyntaxError, ValueError):
        text = ast.dump(ast.parse(text)).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()
