"""Deliveries by a process of their own, which imports MLflow and writes to it while the driver trains and reports.

Only the command line starts one, by a fork before it has threads, which a fork does not copy, or has imported torch.
Other programs, such as notebooks, deliver in the driver's process, as does a driver whose delivering process has died.

The process ends with its driver, at once, as a thread would; the next delivery continues from the record of the last.
"""

from __future__ import annotations

import itertools
import logging
import logging.handlers
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vitlab.interrupts import is_command
from vitlab.plan.plan_file import read_plan
from vitlab.spec import RunSpec
from vitlab.store.folders import Store
from vitlab.trackers.base import Tracker
from vitlab.trackers.base import tracker as trackers

HANDLED_BY_DRIVER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are sent to all processes of a terminal or of a scheduler's job."""


class _Request(NamedTuple):
    """A call of a method of the tracker of a study whose plan is stored."""

    study: str
    store: Store
    run: RunSpec
    number: int  #: of the driver's tracker; a new one may have another plan
    method: str
    arguments: tuple[Any, ...]


class _Answer(NamedTuple):
    """The result of the method."""

    link: str | None


class TrackerProcess:
    """The driver's end of a process that delivers."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._lock = threading.Lock()
        # A signal right after the fork would be handled in the process as in the driver.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_BY_DRIVER)
        if not os.fork():
            self._pipe.close()
            _serve(theirs, blocked)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def call(self, request: _Request) -> str | None:
        """Return what the method returns, and log what it logs.

        Raises:
            EOFError, OSError: if the process has died.
        """
        with self._lock:
            try:
                self._pipe.send(request)
                while isinstance(answer := self._pipe.recv(), logging.LogRecord):
                    logging.getLogger(answer.name).handle(answer)
            except BaseException:
                self._pipe.close()  # an answer that nobody has read would be taken for that of the next request
                raise
        assert isinstance(answer, _Answer)
        return answer.link


_process: TrackerProcess | None = None


def start() -> None:
    """Start the process in a command that has no threads yet."""
    global _process
    if _process is None and is_command() and sys.platform == "linux" and threading.active_count() == 1:
        _process = TrackerProcess()


def remote(tracker: Tracker) -> Tracker:
    """Return a tracker that delivers in the process as ``tracker`` does here; itself if there is no process."""
    return tracker if _process is None else RemoteTracker(tracker, _process)


class RemoteTracker(Tracker):
    """Tracker that delivers in another process, and in this one once that has died."""

    _numbers = itertools.count(1)

    def __init__(self, tracker: Tracker, process: TrackerProcess) -> None:
        self._number = next(self._numbers)
        self.tracker = tracker
        self.title = tracker.title  # type: ignore[misc]  # a class attribute of every other tracker
        self._process = process

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        """Deliver in this process."""
        return self.tracker.deliver(final=final, until=until, report=report)

    def place(self) -> str:
        """Return the place of the tracker."""
        return self.tracker.place()

    def start_command(self) -> str:
        """Return the command of the tracker."""
        return self.tracker.start_command()

    def undelivered(self) -> int | None:
        """Return the number of the tracker, from its record."""
        return self.tracker.undelivered()

    def update(self) -> None:
        """Deliver the current content of the journals."""
        self._call("update")

    def close(self, report: Sequence[Path] = ()) -> str | None:
        """Deliver everything."""
        return self._call("close", report)

    def _call(self, method: str, *arguments: Any) -> str | None:
        of = self.tracker
        try:
            return self._process.call(_Request(of.plan.study, of.store, of.run, self._number, method, arguments))
        except (EOFError, OSError):
            link: str | None = getattr(of, method)(*arguments)
            return link


# -- the process ------------------------------------------------------------------------------------------------------


def _serve(driver: Connection, blocked: set[int]) -> NoReturn:
    """Answer the driver's requests until it dies; ``blocked`` are the signals that were blocked before the fork."""
    try:
        for ignored in HANDLED_BY_DRIVER:
            signal.signal(ignored, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        requests = queue.SimpleQueue[_Request]()
        threading.Thread(target=_listen, args=(driver, requests), daemon=True).start()
        sending = threading.Lock()
        logging.getLogger().addHandler(_Handler(driver, sending))
        tracker, number = None, 0
        while True:
            request = requests.get()
            if tracker is None or request.number != number:
                plan = read_plan(request.store.study(request.study) / "plan.json")
                tracker = trackers.build(request.run.tracker, plan, request.store, request.run)
                number = request.number
            answer = _Answer(getattr(tracker, request.method)(*request.arguments))
            with sending:
                driver.send(answer)
    except BrokenPipeError:
        pass  # the driver has died
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _listen(driver: Connection, requests: queue.SimpleQueue[_Request]) -> None:
    """Pass requests on, and end this process when the driver has died."""
    try:
        while True:
            requests.put(driver.recv())
    finally:
        os._exit(0)


class _Handler(logging.handlers.QueueHandler):
    """Sends records of the log to the driver, whose display they would otherwise disturb."""

    def __init__(self, driver: Connection, sending: threading.Lock) -> None:
        super().__init__(queue.SimpleQueue())
        self._driver, self._sending = driver, sending

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record."""
        with self._sending:
            self._driver.send(record)
