"""Deliveries to the tracker of a study: in the background while it runs, and of every study in an output folder.

While the driver trains and reports, a process of its own imports MLflow and delivers.  Only the command line starts
one.  Other programs, such as notebooks, deliver in their own process, as does a driver whose delivering process has
died.  The process ends with its pipe to the driver, at once, as a thread would; the next delivery continues from the
record of the last.  One that hangs is killed by the driver as that ends, or by the next run, which finds it through its
lock.
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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from vitlab.errors import MASK, Interrupted, UserError, format_count, public
from vitlab.interrupts import is_command
from vitlab.planning.study_folder import read_plan, read_run_spec
from vitlab.planning.values import Plan
from vitlab.spec import Choice, RunSpec
from vitlab.store.folders import Store
from vitlab.store.locks import DRIVER, own_unique_process_name
from vitlab.trackers import EMBEDDED, Tracker, read_deliveries
from vitlab.trackers import tracker as trackers

log = logging.getLogger(__name__)

ELSEWHERE = (
    "it was delivered to another place, which nothing here names; name it by --tracking-uri or MLFLOW_TRACKING_URI. "
    "--tracker mlflow delivers to the output folder."
)
TRIAL_S = 0.001
"""Time from one delivery during a run to the next, for each trial of the study: a delivery looks at all of them."""


@dataclass(frozen=True)
class Delivery:
    """The delivery of one study by :func:`sync`."""

    study: str
    link: str | None = None  #: address, or command that shows it; empty if there is none; None if something is missing
    counts: Mapping[str, int] = field(default_factory=dict)  #: what was missing: number by kind, such as points

    @property
    def sentence(self) -> str:
        """What was delivered, in words."""
        items = [format_count(number, kind.removesuffix("s")) for kind, number in self.counts.items() if number]
        return f"delivered {', '.join(items)}" if items else "nothing was missing"


def sync(
    folder: str | Path,
    *,
    tracker: Choice | str | Mapping[str, Any] | None = None,
    say: Callable[..., None] = log.debug,
) -> list[Delivery]:
    """Deliver the journals of every study in an output folder.

    Args:
        folder: the output folder.
        tracker: the tracker to deliver to, as in ``run.tracker``; by default the one in each study's file, unless it
            has options that need confirmation, such as a server on another machine.
        say: shows a sentence on progress.

    Raises:
        UserError: if the tracker is not installed or its options cannot work; also if files of a study are damaged,
            after all other studies have been delivered.
    """
    store = Store(Path(folder).resolve())
    if not store.root.is_dir():
        raise UserError(f"{folder}: no such folder; write the folder that 'vitlab run' wrote to, its --out")
    requested = None if tracker is None else RunSpec.model_validate({"tracker": tracker}).tracker
    if requested is not None:
        trackers.resolve_choice(requested)
    deliveries: list[Delivery] = []
    unreadable: list[str] = []
    files = sorted(store.root.glob("studies/*/plan.json"))
    if not files:
        raise UserError(f"{folder} has no studies; write the folder that 'vitlab run' wrote to, its --out")
    for file in files:
        try:
            plan, run = read_plan(file), read_run_spec(file.parent)
        except UserError as error:
            unreadable.append(str(error))
            continue
        if plan is None:
            continue  # deleted meanwhile
        choice = requested or _tracker_unless_unconfirmed(plan, run.tracker, store)
        if choice is None:
            deliveries.append(Delivery(plan.study))
            continue
        built: Tracker = trackers.build(choice, plan, store, run)
        places = read_deliveries(file.parent)
        if requested is None and built.place() == EMBEDDED and places and EMBEDDED not in places:
            log.warning("%s: %s", plan.study, ELSEWHERE)
            deliveries.append(Delivery(plan.study))
        elif built.title:
            say(f"{plan.study}: {built.title} gets what it lacks; for many trials this takes minutes")
            link = built.sync(sorted((file.parent / "report").glob("*")))
            deliveries.append(Delivery(plan.study, link and (built.start_command() or link), built.delivered))
    if unreadable:
        raise UserError(*unreadable)
    return deliveries


def _tracker_unless_unconfirmed(plan: Plan, choice: Choice, store: Store) -> Choice | None:
    """Return a stored study's tracker, or None, with a warning, if the user must confirm one of its options first."""
    component = trackers.get(choice.type)
    for name, value in choice.options.items():
        if sentence := component.reason_to_confirm(name, value, store.root):
            log.warning("%s is not delivered to %s: %s.", plan.study, public(str(value)), sentence)
            return None
    # An option that was stored without its password is in the environment.
    stored = {name: value for name, value in choice.options.items() if not (isinstance(value, str) and MASK in value)}
    return Choice(choice.type, stored)


class BackgroundDelivery:
    """Delivery beside a run: updates return at once, and do nothing during a delivery, which a later one completes.

    Args:
        tracker: the tracker.
        process: the process that delivers; this one does if there is none, or once it has died.
    """

    def __init__(self, tracker: Tracker, process: TrackerProcess | None = None) -> None:
        self._tracker = tracker
        self._process = process
        self._thread: threading.Thread | None = None
        self._next_at = 0.0

    def recorded_link(self) -> str | None:
        """Return what the last delivery returned; None if the tracker may lack something, by the records.

        A tracker that keeps no record of trials lacks nothing after a delivery.
        """
        tracker = self._tracker
        if not tracker.title:
            return None
        link = read_deliveries(tracker.folder).get(tracker.place())
        return link if isinstance(link, str) and not tracker.count_undelivered() else None

    def update(self) -> None:
        """Start a delivery, unless one is in progress or it is too early for the next one."""
        tracker, now = self._tracker, time.monotonic()
        if tracker.title and now >= self._next_at and (self._thread is None or not self._thread.is_alive()):
            self._next_at = now + TRIAL_S * len(tracker.plan.trials)
            self._thread = threading.Thread(target=self._call_tracker, args=["update"], daemon=True)
            self._thread.start()

    def close(self, report: Sequence[Path], say: Callable[[str], None] = lambda sentence: None) -> str | None:
        """Say that the tracker gets what it lacks, and deliver it.

        Args:
            report: files of the study's report.
            say: shows a sentence.

        Returns:
            The address to open, empty if the tracker has none; None if the destination was unreachable.

        Raises:
            Interrupted: after Ctrl-C; a later delivery continues.
        """
        tracker = self._tracker
        if not tracker.title:
            return None
        try:
            say(f"delivering to {tracker.title}; if this is interrupted, 'vitlab sync' delivers the rest")
            if self._thread is not None:
                self._thread.join()
            return self._call_tracker("close", report)
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted; the report is written, and the same command or 'vitlab sync' delivers what "
                f"{tracker.title} lacks"
            ) from None

    def _call_tracker(self, method: str, *arguments: Sequence[Path]) -> str | None:
        """Call a method of the tracker."""
        if self._process is not None:
            try:
                return self._process.call(self._tracker, method, arguments)
            except (EOFError, OSError):
                self._process = None
        link: str | None = getattr(self._tracker, method)(*arguments)
        return link


# -- the delivering process -------------------------------------------------------------------------------------------

IGNORED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
"""Signals that a scheduler sends to all processes of a job; the driver handles them, and still has to deliver."""

Call = tuple[tuple[Plan, Store, RunSpec] | None, str, tuple[Sequence[Path], ...]]
"""The study if it is not that of the last call, a method of its tracker, and its arguments."""


class TrackerProcess:
    """The driver's end of a process that delivers."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._lock = threading.Lock()
        self._tracker: Tracker | None = None  #: the tracker that the process has
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                f"from {__name__} import serve_tracker_calls; serve_tracker_calls({theirs.fileno()})",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a program that reads the answer waits for all writers to end
            pass_fds=[theirs.fileno()],
            env={**os.environ, DRIVER: own_unique_process_name()},
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
                study = None if tracker is self._tracker else (tracker.plan, tracker.store, tracker.run)
                self._pipe.send((study, method, arguments))
                self._tracker = tracker
                while isinstance(answer := self._pipe.recv(), logging.LogRecord):
                    logging.getLogger(answer.name).handle(answer)
            except BaseException:
                self._pipe.close()  # an answer that nobody has read would be taken for the answer to the next call
                raise
        assert answer is None or isinstance(answer, str)
        return answer


started: TrackerProcess | None = None


def start_tracker_process() -> None:
    """Start the process of a command, unless it has one, or the system cannot hand it a pipe, as Windows cannot."""
    global started
    if started is None and is_command() and os.name == "posix":
        started = TrackerProcess()


def serve_tracker_calls(descriptor: int) -> NoReturn:
    """Answer the driver's calls through a pipe until it dies."""
    driver: Connection = Connection(descriptor)
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    messages = queue.SimpleQueue[Call]()
    threading.Thread(target=_relay_messages_then_exit, args=(driver, messages), daemon=True).start()
    sending = threading.RLock()  # what is collected while a record is sent may log, too

    def send(message: logging.LogRecord | str | None) -> None:
        with sending:
            driver.send(message)

    # Records that are written here would disturb the display of the driver.
    logging.getLogger().addHandler(logging.handlers.QueueHandler(SimpleNamespace(put_nowait=send)))
    tracker: Tracker | None = None
    while True:
        study, method, arguments = messages.get()
        if study is not None:
            tracker = trackers.build(study[-1].tracker, *study)
        send(getattr(tracker, method)(*arguments))


def _relay_messages_then_exit(driver: Connection, messages: queue.SimpleQueue[Call]) -> None:
    """Pass messages on, and end this process when the driver has died."""
    try:
        while True:
            messages.put(driver.recv())
    finally:
        os._exit(0)
