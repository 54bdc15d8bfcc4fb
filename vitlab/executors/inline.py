"""Inline executor: trials run in the driver's own process, one at a time.

For debuggers, profilers and notebooks, and where processes cannot be started.  A trial that kills its process kills
the driver too.  The first Ctrl-C makes the trial write a checkpoint and stop, the second ends it at once; output goes
to the terminal rather than to ``log.txt``.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vitlab.executors.base import JobEnd, PollingExecutor, executor
from vitlab.executors.worker import run_job
from vitlab.spec import RunSpec


@executor.register("inline")
class Inline(PollingExecutor):
    """Trials in the driver's own process, one at a time, for debuggers and notebooks.

    It has no options of its own, and runs one trial at a time, whatever ``run.workers`` is.  Output goes to the
    terminal rather than to ``log.txt``.  ``poll`` returns when the trial has ended.
    """

    in_driver = True
    slots: int = 1  #: jobs run one after another in this process

    def __init__(self, run: RunSpec) -> None:
        super().__init__(run)
        self._stop = threading.Event()

    def poll(self, timeout_s: float) -> list[JobEnd]:
        """Run the next job to its end.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once the trial has stopped.  The next call returns its ending.
        """
        if self._waiting and not self._ends:
            self._stop.clear()
            with _stop_at_first_signal(self._stop):
                job = self._waiting.pop(0)
                self._ends.append(JobEnd(job, *run_job(job, self._stop.is_set)))
            if self._stop.is_set():
                raise KeyboardInterrupt
        ends, self._ends = self._ends, []
        return ends

    def cancel(self, grace_s: float) -> None:
        """Drop jobs that have not started; called from another thread, also stop the running one."""
        self._stop.set()
        self._drop_waiting_jobs()


@contextmanager
def _stop_at_first_signal(stop: threading.Event) -> Iterator[None]:
    """Handle signals so that the first Ctrl-C sets ``stop`` and the next interrupts, likewise SIGTERM if so configured.

    Only the main thread can set signal handlers; in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        before[signal.SIGTERM] = signal.default_int_handler

    def on_first_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        handler = before[number]
        signal.signal(number, handler if callable(handler) else signal.default_int_handler)

    for number in before:
        signal.signal(number, on_first_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
