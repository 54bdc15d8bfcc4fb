"""Whose code has failed: the file and the line of a plugin in the traceback of an exception."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType

from vitlab.errors import VitlabError
from vitlab.registry import plugin_files, plugins

SHOWN = 5
"""Number of frames that are shown of each end of a long stack, as an endless recursion has."""


@dataclass(frozen=True)
class Culprit:
    """The innermost code of a plugin that an exception has passed through."""

    file: Path
    line: int
    function: str
    frames: tuple[traceback.FrameSummary, ...]  #: all frames of plugins, the outermost first

    @property
    def place(self) -> str:
        """``my_blocks.py:13``, relative to the working directory where the file is below it."""
        return f"{_relative(self.file)}:{self.line}"

    def __str__(self) -> str:
        lines = []
        for number, frame in enumerate(self.frames):
            if SHOWN <= number < len(self.frames) - SHOWN:
                if number == SHOWN:
                    lines.append(f"  ... {len(self.frames) - 2 * SHOWN} more calls")
                continue
            lines.append(f"  {_relative(Path(frame.filename))}:{frame.lineno}, in {frame.name}")
            if frame.line:
                lines.append(f"    {frame.line}")
        return "\n".join(lines)


def culprit(error: BaseException) -> Culprit | None:
    """Return the code of a plugin that an exception has passed through, or None if it is that of vitlab or a library.

    Plugins are the files that ``--plugin`` has loaded, modules beside them, and installed distributions that offer
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
            if _is_of_a_plugin(module, code.co_filename)
        ]
        if isinstance(link, SyntaxError) and link.filename and _is_of_a_plugin("", link.filename):
            frames.append(traceback.FrameSummary(link.filename, link.lineno or 1, "<module>"))
        if frames:
            last = frames[-1]
            return Culprit(Path(last.filename), last.lineno or 0, last.name, tuple(frames))
    return None


def sentence_with_place(error: BaseException) -> str:
    """Return an exception on one line: our own as they are, others with their type and the line of a plugin."""
    text = " ".join(str(error).split())
    if isinstance(error, VitlabError):
        return text
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    found = culprit(error)
    return text if found is None else f"{text}, at {found.place}"


def with_frames(error: BaseException) -> str:
    """Return an exception as :func:`sentence_with_place` does and, on further lines, the frames of plugins."""
    found = culprit(error)
    return sentence_with_place(error) + (f"\n{found}" if found is not None else "")


def _frames(link: TracebackType | None) -> Iterator[tuple[str, CodeType, int]]:
    """Return the module, the code and the line of every frame, the outermost first."""
    while link is not None:
        yield str(link.tb_frame.f_globals.get("__name__", "")), link.tb_frame.f_code, link.tb_lineno
        link = link.tb_next


def _is_of_a_plugin(module: str, file: str) -> bool:
    """Return whether code is that of a plugin, given the name and the file of its module."""
    path = Path(file)
    beside = any(path.is_relative_to(loaded.parent) for loaded in plugin_files.loaded())
    own = (
        beside and not {"site-packages", "dist-packages"} & set(path.parts) and module.partition(".")[0] != plugins.HOST
    )
    return own or path in plugin_files.loaded() or module.partition(".")[0] in plugins.packages()


def _relative(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
