"""Ctrl-C on the command line: one line and exit code 130, whenever it comes and however often.

While modules are imported, and once a command has ended, it ends the process at once: nothing is under way then.  In
between the first two raise KeyboardInterrupt, upon which running trials write a checkpoint, or are ended; a third ends
the process at once.  Workers whose driver is gone write a checkpoint and leave by themselves.

``vitlab/__init__.py`` imports this module before all others, so it imports next to nothing.  A Ctrl-C before that,
while Python itself starts, cannot be handled.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # as in typing, whose import takes longer than all of these
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any

EXIT_CODE = 130


class _State:
    """State that decides the effect of the next Ctrl-C."""

    left = 0  #: how many more raise KeyboardInterrupt
    raised = False  #: whether one has
    reported = False  #: whether the user has been told
    code: int | None = None  #: exit code of a command that has ended


state = _State()


def is_command() -> bool:
    """Return True in a process of ``python -m vitlab``, or of the ``vitlab`` script beside its interpreter."""
    words = sys.orig_argv[1:3]
    script = os.path.join(os.path.dirname(sys.executable), "vitlab")
    return words == ["-m", "vitlab"] or words[:1] == [script]


def install() -> None:
    """Install the exit at the end, and the handler of Ctrl-C unless the parent process set Ctrl-C to be ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle_ctrl_c)
    atexit.register(_exit_without_interpreter_shutdown)  # registered first, it is called last
    sys.excepthook = _excepthook
    sys.unraisablehook = _exit_on_unraisable_interrupt


def is_repeated() -> bool:
    """Return whether a command has received Ctrl-C twice."""
    return state.raised and not state.left


def exit_interrupted() -> None:
    """End the process at once with exit code 130, after printing ``interrupted`` unless that was reported."""
    if not state.reported:
        # A view that is redrawn in place hides the cursor.
        os.write(2, b"\x1b[?25hinterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(EXIT_CODE)


def _handle_ctrl_c(number: int, frame: FrameType | None) -> None:
    if not state.left:
        exit_interrupted()
    state.left -= 1
    state.raised = True
    raise KeyboardInterrupt


def _exit_without_interpreter_shutdown() -> None:
    """End the process of a command that has ended, without the interpreter's shutdown.

    That takes a second once torch has been imported, and restores the default handler of Ctrl-C, which kills the
    process.  Where Ctrl-C came while ``exec`` ran code from text, as dataclasses do, CPython would end ``python -m`` as
    killed by a signal, whatever its exit code.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if state.code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, or it is closed
            if not state.code:
                return  # Python reports it
    os._exit(state.code)


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """End the process if the unhandled exception is a KeyboardInterrupt; print any other as usual."""
    if issubclass(kind, KeyboardInterrupt):
        exit_interrupted()
    sys.__excepthook__(kind, error, traceback)


def _exit_on_unraisable_interrupt(unraisable: Any) -> None:
    """End the process if Ctrl-C came where no exception can be raised, as in a destructor; print any other as usual."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        exit_interrupted()
    sys.__unraisablehook__(unraisable)
