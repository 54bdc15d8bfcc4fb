"""Attribution of failures to plugins: the file and line of a plugin in the traceback of an exception."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType

from vitlab.errors import VitlabError
from vitlab.registry import plugin_files, plugins

SHOWN = 5
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
            if SHOWN <= number < len(self.frames) - SHOWN:
                if number == SHOWN:
                    lines.append(f"  ... {len(self.frames) - 2 * SHOWN} more calls")
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
    beside = any(path.is_relative_to(loaded.parent) for loaded in plugin_files.loaded())
    own = (
        beside and not {"site-packages", "dist-packages"} & set(path.parts) and module.partition(".")[0] != plugins.HOST
    )
    return own or path in plugin_files.loaded() or module.partition(".")[0] in plugins.packages()


def _relative(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
