"""Single Python files of components, loaded for one run.

A file is run again if its code has changed; the components of a file that fails are unregistered.

A failure is attributed to a plugin by the file and line of the plugin in the traceback of its exception.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from vitlab import imports
from vitlab.errors import BrokenComponent, ClashError, VitlabError
from vitlab.registry import plugins
from vitlab.registry.slot_modules import Origin

if TYPE_CHECKING:
    from vitlab.registry.slots import Slot


@dataclass(frozen=True)
class FromFile:
    """A component registered by a file."""

    slot: Slot[Any]
    name: str
    component: type
    origin: Origin

    def register(self) -> None:
        """Add the component to its slot."""
        self.slot._add(self.name, self.component, self.origin)
        _from_files.append(self)

    def unregister(self) -> None:
        """Remove the component from its slot."""
        self.slot._remove(self.name, self.origin)
        _from_files.remove(self)


class _TextLoader(SourceFileLoader):
    """Loader of text that has been read: the digested text runs, not a newer file or older code in __pycache__."""

    def __init__(self, name: str, path: Path, text: bytes) -> None:
        super().__init__(name, str(path))
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text, self.path)


_running: dict[str, tuple[Path, Origin]] = {}  # module to file and origin, while a file runs
_files: dict[Path, Origin] = {}  # files that have run, with the digest of their code
_texts: dict[str, bytes] = {}  # module to the source that was run, earlier versions of files included
_from_files: list[FromFile] = []


def running(module: str) -> Origin | None:
    """Return the origin of the file that is being run as this module, or None."""
    return _running[module][1] if module in _running else None


def registered(slot: str) -> list[FromFile]:
    """Return the components that files have registered in a slot."""
    return [item for item in _from_files if item.slot.name == slot]


def loaded() -> list[Path]:
    """Return the files that have been run, or are being run."""
    return [*_files, *(path for path, _ in _running.values())]


def module_of(origin: Origin) -> str:
    """Return the module name under which a file of components is run."""
    return f"vitlab_file_{Path(origin.source).stem}_{origin.version}"


def modules() -> frozenset[str]:
    """Return the modules of all files that this process has run; running one can have any side effect."""
    return frozenset(_texts)


def text_of(module: str) -> bytes | None:
    """Return the source that was run as this module, or None if the module is not a file of components."""
    return _texts.get(module)


def load_file(file: Path | str) -> Origin:
    """Run a Python file that registers components in this process.

    A file whose code has not changed is run once.  An edited file is run again, and its components replace those it
    registered before.  A file that fails changes nothing.

    Raises:
        BrokenComponent: if the file does not exist or fails; the message ends with the lines that were running.
        ClashError: if it registers a component that another file of the same name has registered.
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
    if path.suffix != ".py":
        raise BrokenComponent(f"plugin file {file}: rename it so that it ends in .py")
    loader = _TextLoader(name, path, text)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    replaced = [item for item in _from_files if item.origin == _files.get(path)]
    for item in replaced:
        item.unregister()
    count_before = len(_from_files)
    _running[name] = path, origin
    imports.note(name, path)
    try:
        loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        for new in _from_files[count_before:]:
            new.unregister()
        for item in replaced:
            item.register()
        if not isinstance(error, Exception | SystemExit) or isinstance(error, BrokenComponent | ClashError):
            raise
        raise BrokenComponent(f"plugin file {file} failed: {with_frames(error)}") from error
    finally:
        del _running[name]
    _files[path] = origin
    _texts[name] = text
    return origin


def _digest(text: bytes) -> str:
    """Return the digest of the syntax tree, which ignores comments, or of the text if it does not parse."""
    with suppress(SyntaxError, ValueError):
        text = ast.dump(ast.parse(text)).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


SHOWN_FRAMES = 5
"""Number of frames shown at each end of a long stack, such as that of an endless recursion."""


@dataclass(frozen=True)
class Culprit:
    """The innermost plugin code in the traceback of an exception."""

    file: Path
    line: int
    function: str
    frames: tuple[traceback.FrameSummary, ...]  #: all frames of plugins, the outermost first

    @property
    def place(self) -> str:
        """Return ``my_blocks.py:13``, relative to the working directory if the file is below it."""
        return f"{_relative(self.file)}:{self.line}"

    def __str__(self) -> str:
        lines = []
        for number, frame in enumerate(self.frames):
            if SHOWN_FRAMES <= number < len(self.frames) - SHOWN_FRAMES:
                if number == SHOWN_FRAMES:
                    lines.append(f"  ... {len(self.frames) - 2 * SHOWN_FRAMES} more calls")
                continue
            lines.append(f"  {_relative(Path(frame.filename))}:{frame.lineno}, in {frame.name}")
            if frame.line:
                lines.append(f"    {frame.line}")
        return "\n".join(lines)


def culprit(error: BaseException) -> Culprit | None:
    """Return the plugin code in the traceback of an exception, or None if only vitlab and libraries are in it.

    Plugins are the files loaded with ``--plugin``, modules beside them, and installed distributions that offer
    components.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        frames = [
            traceback.FrameSummary(code.co_filename, line, code.co_name)
            for module, code, line in _frames(link.__traceback__)
            if _is_plugin_code(module, code.co_filename)
        ]
        if isinstance(link, SyntaxError) and link.filename and _is_plugin_code("", link.filename):
            frames.append(traceback.FrameSummary(link.filename, link.lineno or 1, "<module>"))
        if frames:
            last = frames[-1]
            return Culprit(Path(last.filename), last.lineno or 0, last.name, tuple(frames))
    return None


def sentence_with_place(error: BaseException) -> str:
    """Return an exception on one line: vitlab's own unchanged, others with their type and the line of the plugin."""
    text = " ".join(str(error).split())
    if isinstance(error, VitlabError):
        return text
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    source = culprit(error)
    return text if source is None else f"{text}, at {source.place}"


def with_frames(error: BaseException) -> str:
    """Return an exception as :func:`sentence_with_place` does, followed by the frames of plugins on further lines."""
    source = culprit(error)
    return sentence_with_place(error) + (f"\n{source}" if source is not None else "")


def _frames(link: TracebackType | None) -> Iterator[tuple[str, CodeType, int]]:
    """Yield the module, code and line of every frame, outermost first."""
    while link is not None:
        yield str(link.tb_frame.f_globals.get("__name__", "")), link.tb_frame.f_code, link.tb_lineno
        link = link.tb_next


def _is_plugin_code(module: str, file: str) -> bool:
    """Return whether code belongs to a plugin, given the name and file of its module."""
    path = Path(file)
    beside = any(path.is_relative_to(loaded.parent) for loaded in loaded())
    own = (
        beside and not {"site-packages", "dist-packages"} & set(path.parts) and module.partition(".")[0] != plugins.HOST
    )
    return own or path in loaded() or module.partition(".")[0] in plugins.packages()


def _relative(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
