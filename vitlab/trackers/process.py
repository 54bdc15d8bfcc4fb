"""A process that imports MLflow and delivers, while the driver trains and reports.

Only the command line starts one.  Other programs, such as notebooks, deliver in their own process, as does a driver
whose delivering process has died.

The process ends with its pipe to the driver, at once, as a thread would; the next delivery continues from the record of
the last.  One that hangs is killed by the driver as that ends, or by the next run, which finds it through its lock.
"""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from vitlab.interrupts import is_command
from vitlab.plan.values import Plan
from vitlab.spec import RunSpec
from vitlab.store.folders import Store
from vitlab.store.locks import DRIVER, own_process
from vitlab.trackers.base import Tracker
from vitlab.trackers.base import tracker as trackers

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends to all processes of a job; the driver handles them, and still has to deliver."""

Study = tuple[Plan, Store, RunSpec]
Call = tuple[str, tuple[Sequence[Path], ...]]  #: a method of the study's tracker, and its arguments


class TrackerProcess:
    """The driver's end of a process that delivers."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._lock = threading.Lock()
        self._tracker: Tracker | None = None  #: the tracker that the process has
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a program that reads the answer waits for all writers to end
            pass_fds=[theirs.fileno()],
            env={**os.environ, DRIVER: own_process()},
            start_new_session=True,  # Ctrl-C reaches the driver alone
        )
        theirs.close()
        atexit.register(self._process.kill)

    def call(self, tracker: Tracker, method: str, arguments: tuple[Sequence[Path], ...]) -> str | None:
        """Return what a method of the tracker returns there, and log what it logs.

        Raises:
            EOFError, OSError: if the process has died.
        """
        with self._lock:
            try:
                if tracker is not self._tracker:
                    self._pipe.send((tracker.plan, tracker.store, tracker.run))
                    self._tracker = tracker
                self._pipe.send((method, arguments))
                while isinstance(answer := self._pipe.recv(), logging.LogRecord):
                    logging.getLogger(answer.name).handle(answer)
            except BaseException:
                self._pipe.close()  # an answer that nobody has read would be taken for the answer to the next call
                raise
        assert answer is None or isinstance(answer, str)
        return answer


started: TrackerProcess | None = None


def start() -> None:
    """Start the process of a command, unless it has one."""
    global started
    if started is None and is_command():
        started = TrackerProcess()


# -- the process ------------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> NoReturn:
    """Answer the driver's calls through a pipe until it dies."""
    driver: Connection = Connection(descriptor)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    messages = queue.SimpleQueue[Study | Call]()
    threading.Thread(target=_listen, args=(driver, messages), daemon=True).start()
    log = _ToDriver(driver)
    logging.getLogger().addHandler(log)
    tracker: Tracker | None = None
    while True:
        message = messages.get()
        if len(message) == 3:
            plan, store, run = message
            tracker = trackers.build(run.tracker, plan, store, run)
        else:
            method, arguments = message
            answer = getattr(tracker, method)(*arguments)
            log.send(answer)


def _listen(driver: Connection, messages: queue.SimpleQueue[Study | Call]) -> None:
    """Pass messages on, and end this process when the driver has died."""
    try:
        while True:
            messages.put(driver.recv())
    finally:
        os._exit(0)


class _ToDriver(logging.handlers.QueueHandler):
    """Sends records of the log to the driver, whose display they would otherwise disturb, and answers."""

    def __init__(self, driver: Connection) -> None:
        super().__init__(queue.SimpleQueue())
        self._driver, self._sending = driver, threading.Lock()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record."""
        self.send(record)

    def send(self, message: logging.LogRecord | str | None) -> None:
        """Send a record or an answer."""
        with self._sending:
            self._driver.send(message)
