"""The worker's side of the local executor: one process, one trial.

The worker holds one end of a pipe whose other end only the driver holds.  ``stop`` on it asks for a checkpoint and the
end; its closing says that the driver is dead, which asks for the same and ends the process after ``ORPHAN_S`` in any
case.  Before it exits, the worker says on the pipe how its job ended; one that dies says nothing, and the driver draws
its conclusion.  Between, it says in a word how far it is: see :data:`vitlab.executors.base.Stage`.

SIGTERM, as schedulers send it before they take a machine away, is a wish to stop, too: the trial is ``preempted``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from vitlab.executors.base import Job, Stage, attempt

ORPHAN_S = 30.0  #: seconds a worker outlives its driver at most
ORPHANED = 75  #: its exit code then
OVERDUE = 76  #: its exit code when a trial whose time is up does not stop


def main(job: Job, runner: str, environment: Mapping[str, str], cores: Sequence[int], driver: Connection) -> NoReturn:
    """Run one job and leave.

    Args:
        job: what to run.
        runner: see ``Executor.runner``.
        environment: the whole environment, threads and GPU included; set before anything reads it.
        cores: cores to stay on; empty for all.
        driver: the pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    os.environ.clear()
    os.environ.update(environment)
    if cores and sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it; then the kernel places the threads
            os.sched_setaffinity(0, cores)
    log_to(job.folder)
    note_companions(job)
    asked, preempted = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: preempted.set())
    threading.Thread(target=_listen, args=(driver, asked), daemon=True).start()

    def tell(stage: Stage) -> None:
        with suppress(OSError):  # an orphan has nobody to tell
            driver.send_bytes(stage.encode())

    how, detail = attempt(
        job, runner, lambda: asked.is_set() or preempted.is_set(), tell, overdue=lambda: os._exit(OVERDUE)
    )
    if how == "stopped" and not asked.is_set():
        how, detail = "preempted", "its worker was asked by SIGTERM to leave"
    try:
        driver.send_bytes(json.dumps([how, detail]).encode())
    except OSError:
        print(f"the driver is gone; the trial is {how}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that a guest may have left behind


def log_to(folder: Path) -> None:
    """Send all output of this process, that of C libraries and the traces of crashes included, to ``log.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    faulthandler.enable()


def note_companions(job: Job) -> None:
    """Append to the logs of a cohort's other members where they are trained."""
    for companion in job.companions:
        companion.folder.mkdir(parents=True, exist_ok=True)
        with open(companion.folder / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"trained along with {job.name}, whose log is {job.folder / 'log.txt'}\n")


def _listen(driver: Connection, stop: threading.Event) -> None:
    try:
        while True:
            driver.recv_bytes()
            stop.set()
    except (EOFError, OSError):
        stop.set()
        time.sleep(ORPHAN_S)
        os._exit(ORPHANED)
