"""Processes that do one piece of work together, and whoever watches over them.

The process that is asked for the work does none of it: it starts the others as forks of a server that has everything
imported, passes on the wish to stop, and finds out what became of them.  So it never waits in a call that another's
death would keep from returning.  Where one fails or dies the rest is ended at once, and what is told is the cause:
not that of those who only found it gone.  Nobody is left behind: a process whose watcher dies sees its pipe close, and
leaves.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

PRELOAD = "vitlab.executors.preload"
POLL_S = 0.1  #: how often the watcher asks whether to stop
CAUSE_S = 10.0  #: how long it looks for the cause, when all it knows is that somebody found another gone
LEAVE_S = 10.0  #: how long the others may take to leave when the first has ended well
ORPHANED = 75  #: exit code of a process whose watcher has died

How = Literal["done", "stopped", "busy", "oom", "error", "lost", "gone"]


@dataclass(frozen=True)
class RankResult:
    """What a process says of its part when that has ended."""

    how: How
    sentence: str = ""  #: where it did not end well
    traceback: str = ""


Work = Callable[..., RankResult]
"""Called in each process with its number, the file by which all can meet, whether to stop, and the arguments."""


@dataclass
class _Process:
    number: int
    process: ForkServerProcess
    pipe: Connection
    word: RankResult | None = None


def together(count: int, work: Work, arguments: Sequence[Any], stop: Callable[[], bool]) -> RankResult:
    """Do a piece of work in several processes.

    Args:
        count: how many.
        work: a function of a module, that says itself how its part has ended.
        arguments: for it; they are pickled.
        stop: asked again and again, here; the processes are then asked to stop.

    Returns:
        the word of the first process, where that ended well; else of the one that failed first, or ``lost`` where one
        died.
    """
    with tempfile.TemporaryDirectory(prefix="vitlab-together-") as folder:
        processes: list[_Process] = []
        try:
            for number in range(count):
                processes.append(_started(number, work, (Path(folder) / "meeting", *arguments)))
            return _watched(processes, stop)
        except (EOFError, ConnectionError):
            return RankResult("lost", "the server of its processes died before it could start them")
        finally:
            for one in processes:
                one.process.kill()
            for one in processes:
                one.process.join()
                one.pipe.close()


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the main module: multiprocessing would run the user's script again in every process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# -- how it is done ---------------------------------------------------------------------------------------------------


def _started(number: int, work: Work, arguments: Sequence[Any]) -> _Process:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_main, args=(number, work, arguments, dict(os.environ), theirs), name=f"part {number}"
    )
    try:
        with without_main():
            process.start()
    finally:
        theirs.close()
    return _Process(number, process, ours)


def _main(number: int, work: Work, arguments: Sequence[Any], environment: dict[str, str], watcher: Connection) -> None:
    """What each process does."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they are for the watcher, who passes them on
        signal.signal(ignored, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    asked = threading.Event()
    threading.Thread(target=_listen, args=(watcher, asked), daemon=True).start()
    rendezvous, *rest = arguments
    word = work(number, rendezvous, asked.is_set, *rest)
    watcher.send(word)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that a library may have left behind


def _listen(watcher: Connection, asked: threading.Event) -> None:
    try:
        while True:
            watcher.recv_bytes()
            asked.set()
    except (EOFError, OSError):
        os._exit(ORPHANED)


def _watched(processes: Sequence[_Process], stop: Callable[[], bool]) -> RankResult:
    """Wait until the first process has ended well, or the cause is known why it cannot."""
    asked, deadline = False, float("inf")
    while True:
        left = [one for one in processes if one.word is None]
        wait([one.process.sentinel for one in left] + [one.pipe for one in left], POLL_S)
        for one in left:
            _hear(one)
        words = [one.word for one in processes if one.word is not None]
        if (first := processes[0].word) is not None and first.how in ("done", "stopped"):
            _let_leave(processes)
            return first
        causes = [word for word in words if word.how not in ("done", "stopped", "gone")]
        if causes:
            return causes[0]
        if any(word.how == "gone" for word in words):
            deadline = min(deadline, time.monotonic() + CAUSE_S)
        if time.monotonic() > deadline or len(words) == len(processes):
            (gone, *_) = [word for word in words if word.how == "gone"]
            return RankResult("lost", gone.sentence, gone.traceback)
        if not asked and stop():
            asked = True
            for one in processes:
                _ask(one)


def _hear(one: _Process) -> None:
    """Note what a process has said, or that it died without a word."""
    dead = not one.process.is_alive()  # asked first: what it says, it says before
    try:
        if one.pipe.poll():
            one.word = one.pipe.recv()
            return
    except (EOFError, OSError):
        pass
    if dead:
        one.word = RankResult("lost", f"process {one.number} of this trial {_death(one.process.exitcode)}; see log.txt")


def _death(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "was killed by signal 9 (SIGKILL), as the kernel does when memory runs out"
    if code is not None and code < 0:
        return f"was killed by signal {-code}"
    return f"ended with exit code {code} and said nothing"


def _ask(one: _Process) -> None:
    with suppress(OSError):  # it has just died, which is noted next
        one.pipe.send_bytes(b"stop")


def _let_leave(processes: Sequence[_Process]) -> None:
    deadline = time.monotonic() + LEAVE_S
    for one in processes:
        one.process.join(max(0.0, deadline - time.monotonic()))
