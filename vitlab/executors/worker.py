"""Worker side of the local executor: one process runs one job.

The worker holds one end of a pipe whose other end only the driver holds.  The message ``stop`` requests a checkpoint
and exit; a closed pipe means that the driver is dead, which requests the same and ends the process after ``ORPHAN_S``
in any case.  Before it exits, the worker sends the ending of its job; if it dies without one, the driver infers the
ending from the exit code.  Meanwhile it sends its stages: see :data:`vitlab.executors.base.Stage`.

SIGTERM, which schedulers send before they reclaim a machine, stops the trial too, as ``preempted``.
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

from vitlab.executors.base import Stage, attempt
from vitlab.runner.job import Job
from vitlab.store.result import Ending

ORPHAN_S = 30.0  #: maximum time that a worker outlives its driver
ORPHANED = 75  #: exit code of a worker that reached this time
OVERDUE = 76  #: exit code of a worker whose trial does not stop after its time limit


def main(job: Job, runner: str, environment: Mapping[str, str], cores: Sequence[int], driver: Connection) -> NoReturn:
    """Run one job and exit.

    Args:
        job: the job to run.
        runner: see ``Executor.runner``.
        environment: the complete environment, including threads and GPU; set before anything reads it.
        cores: cores to pin the process to; empty for all.
        driver: the pipe to the driver.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the driver handles Ctrl-C
    os.environ.clear()
    os.environ.update(environment)
    if cores and sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it; then the kernel places the threads
            os.sched_setaffinity(0, cores)
    log_to(job.folder)
    note_shared_log(job)
    stop_requested, preempted = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: preempted.set())
    threading.Thread(target=_listen, args=(driver, stop_requested), daemon=True).start()

    def report(stage: Stage) -> None:
        with suppress(OSError):  # the driver may be dead
            driver.send_bytes(stage.encode())

    ending, detail = attempt(
        job, runner, lambda: stop_requested.is_set() or preempted.is_set(), report, overdue=lambda: os._exit(OVERDUE)
    )
    if ending == Ending.STOPPED and not stop_requested.is_set():
        ending, detail = Ending.PREEMPTED, "its worker received SIGTERM"
    try:
        driver.send_bytes(json.dumps([ending, detail]).encode())
    except OSError:
        print(f"the driver has died; the trial is {ending}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that a plugin may have started


def log_to(folder: Path) -> None:
    """Redirect all output of this process, including C libraries and crash traces, to ``log.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    faulthandler.enable()


def note_shared_log(job: Job) -> None:
    """Append to the logs of the job's other trials a reference to the log of the job."""
    for folder in job.folders[1:]:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log.txt", "a", encoding="utf-8") as log:
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
