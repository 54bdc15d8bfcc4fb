"""The fork server, from which worker processes start within about 30 ms with everything imported.

It imports :mod:`vitlab.runner.preload`.  One server belongs to each process that starts workers.  Where processes
cannot fork, as on Windows, each worker is spawned and imports everything itself, which takes seconds.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

ORPHAN_S = 30.0  #: maximum time that a worker outlives its driver
ORPHANED = 75  #: exit code of a process whose parent has died
PRELOAD = "vitlab.runner.preload"
SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable with which Python imports nothing from the current folder."""

_output: int | None = None
"""Descriptor of a file with what the server has printed, and its workers before they open their log."""


class ServerDied(Exception):
    """Death of the fork server before it could start a process; the message has the last line that it printed."""


def ensure_server_running() -> None:
    """Start the server if it is not running, without waiting for its imports; it ends with this process."""
    global _output
    if not _has_fork_server():
        return
    from multiprocessing import forkserver, resource_tracker

    if server_pid() is None:
        atexit.register(_kill_idle_server)
    _multiprocessing_context()
    with _isolate_new_processes():
        # Otherwise the fork server starts it, which unblocks Ctrl-C.
        resource_tracker.ensure_running()
        if _output is None:
            with tempfile.TemporaryFile() as file:
                _output = os.dup(file.fileno())
        # The server inherits the blocked signal, and vitlab.runner.preload unblocks it once it ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _redirect_output(_output):
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_process(
    target: Callable[..., object], args: Sequence[Any], name: str
) -> tuple[ForkServerProcess, Connection]:
    """Start a process that calls a function of a module; the first call waits until the server has imported torch.

    Args:
        target: the function; its last argument is one end of a pipe.
        args: the arguments before it.
        name: name of the process.

    Returns:
        The process, and the other end of the pipe.

    Raises:
        ServerDied: if the server has died, such as for an import that fails.
    """
    ensure_server_running()
    ours, theirs = multiprocessing.Pipe()
    child: ForkServerProcess = _multiprocessing_context().Process(target=target, args=(*args, theirs), name=name)
    try:
        with theirs, _isolate_new_processes():
            child.start()
    except (EOFError, ConnectionError):
        ours.close()
        raise ServerDied(f"the fork server died before it could start a worker{_last_printed_line()}") from None
    return child, ours


def set_environment_and_listen(
    environment: Mapping[str, str], parent: Connection, orphan_s: float | None = None
) -> threading.Event:
    """Set the environment of a started process, and return an event that a message of its parent sets.

    A closed pipe means that the parent is dead: it sets the event, and ends the process after ``orphan_s`` seconds, by
    default :data:`ORPHAN_S`.
    """
    os.environ.clear()
    os.environ.update(environment)
    stop = threading.Event()

    def listen() -> None:
        try:
            while True:
                parent.recv_bytes()
                stop.set()
        except (EOFError, OSError):
            stop.set()
            time.sleep(ORPHAN_S if orphan_s is None else orphan_s)
            os._exit(ORPHANED)

    threading.Thread(target=listen, daemon=True).start()
    return stop


def describe_exit(code: int | None) -> str:
    """Return how a process ended that reported nothing, such as ``was killed by signal 15``, by its exit code."""
    if code == -9:
        return "was killed by signal 9 (SIGKILL), as the kernel does when memory runs out; fewer run.workers need less"
    if code is not None and code < 0:
        with suppress(ValueError):  # a real-time signal has no name
            return f"was killed by signal {-code} ({signal.Signals(-code).name}); see log.txt"
    return f"ended with exit code {code} and reported nothing; see log.txt"


def server_pid() -> int | None:
    """Return the process id of the server, if it has been started."""
    from multiprocessing import forkserver

    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return pid


def _has_fork_server() -> bool:
    return "forkserver" in multiprocessing.get_all_start_methods()


def _multiprocessing_context() -> Any:
    if not _has_fork_server():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


def _kill_idle_server() -> None:
    """End the server unless it has workers: while it is importing, it does not notice that this process has ended."""
    pid = server_pid()
    if pid is not None and not multiprocessing.active_children():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _isolate_new_processes() -> Iterator[None]:
    """Have processes that start inside the block run no script again, and import nothing from the current folder.

    multiprocessing would run the user's script in each of them, and a file random.py there would hide Python's.
    """
    main, before = sys.modules["__main__"], os.environ.get(SAFE_PATH)
    sys.modules["__main__"], os.environ[SAFE_PATH] = types.ModuleType("__main__"), "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        del os.environ[SAFE_PATH]
        if before is not None:
            os.environ[SAFE_PATH] = before


@contextmanager
def _redirect_output(file: int) -> Iterator[None]:
    """Have processes that start inside the block print to the file of a descriptor."""
    before = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        yield
    finally:
        for descriptor, original in zip((1, 2), before, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def _last_printed_line() -> str:
    """Return the last line that the server has printed, after a colon; empty if there is none."""
    assert _output is not None
    lines = os.pread(_output, os.fstat(_output).st_size, 0).decode(errors="replace").split("\n")
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
