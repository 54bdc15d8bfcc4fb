"""Worker processes: one process runs one job, and reports how it ended.

:func:`run_job_and_exit` is the whole work of such a process.  :func:`main` is that of the local executor, whose worker
holds one end of a pipe whose other end only the driver holds.  The message ``stop`` requests a checkpoint and exit; a
closed pipe means that the driver is dead, which requests the same and ends the process after ``ORPHAN_S`` in any case.
Before it exits, the worker sends the ending of its job; if it dies without one, the driver infers the ending from the
exit code.  Meanwhile it sends its stages: see :data:`vitlab.executors.base.Stage`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from vitlab.executors.base import Stage, attempt, overdue_message
from vitlab.runner.job import Job
from vitlab.store.files import open_in_place
from vitlab.store.locks import DRIVER, is_alive
from vitlab.store.result import Ending

ORPHAN_S = 30.0  #: maximum time that a worker outlives its driver
ORPHANED = 75  #: exit code of a worker that reached this time
WATCH_S = 1.0  #: interval at which a worker checks whether its driver is alive


def main(job: Job, runner: str, environment: Mapping[str, str], cores: Sequence[int], driver: Connection) -> NoReturn:
    """Run one job and exit.

    Args:
        job: the job to run.
        runner: see ``Executor.runner``.
        environment: the complete environment, including threads and GPU; set before anything reads it.
        cores: cores to pin the process to; empty for all.
        driver: the pipe to the driver.
    """
    os.environ.clear()
    os.environ.update(environment)
    if cores and sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it; then the kernel places the threads
            os.sched_setaffinity(0, cores)
    stop = threading.Event()
    threading.Thread(target=_listen, args=(driver, stop), daemon=True).start()

    def report_stage(stage: Stage) -> None:
        with suppress(OSError):  # the driver may be dead
            driver.send_bytes(stage.encode())

    run_job_and_exit(
        job,
        runner,
        stop.is_set,
        lambda ending, detail: driver.send_bytes(json.dumps([ending, detail]).encode()),
        report_stage,
    )


def run_job_and_exit(
    job: Job,
    runner: str,
    stop: Callable[[], bool],
    report: Callable[[Ending, str], None],
    report_stage: Callable[[Stage], None] = lambda stage: None,
) -> NoReturn:
    """Run a job as the whole work of this process, report how it ended, and exit; call it in the main thread.

    All output goes to ``log.txt``.  Ctrl-C is ignored, since the driver handles it.  SIGTERM, which schedulers send
    before they reclaim a machine, stops the trial as ``preempted``.  A trial that does not stop after its time limit is
    ended as ``timeout``.  If the driver named by the environment variable ``VITLAB_DRIVER`` has died on this machine,
    the trial writes a checkpoint and stops, and the process ends within :data:`ORPHAN_S`.

    Args:
        job: the job to run.
        runner: see ``Executor.runner``.
        stop: called before every step; True requests a checkpoint and the end, as ``stopped``.
        report: called once with the ending and one sentence; an OSError means that the driver is dead.
        report_stage: called with each stage of the attempt.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to(job.folder)
    note_shared_log(job)
    preempted, orphaned, reporting = threading.Event(), threading.Event(), threading.Lock()
    signal.signal(signal.SIGTERM, lambda number, frame: preempted.set())
    if os.environ.get(DRIVER, "").partition("/")[0] == socket.gethostname():
        threading.Thread(target=_watch, args=(os.environ[DRIVER], orphaned), daemon=True).start()

    def leave(ending: Ending, detail: str) -> NoReturn:
        reporting.acquire()  # never released: the process reports once
        try:
            report(ending, detail)
        except OSError:
            print(f"the driver has died; the trial is {ending}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without waiting for threads that a plugin may have started

    ending, detail = attempt(
        job,
        runner,
        lambda: preempted.is_set() or orphaned.is_set() or stop(),
        report_stage,
        overdue=lambda: leave(Ending.TIMEOUT, overdue_message()),
    )
    if ending == Ending.STOPPED and preempted.is_set() and not orphaned.is_set() and not stop():
        ending, detail = Ending.PREEMPTED, "its worker received SIGTERM"
    leave(ending, detail)


def log_to(folder: Path) -> None:
    """Redirect all output of this process, including C libraries and crash traces, to ``log.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    log = open_in_place(folder / "log.txt")
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
        with open(open_in_place(folder / "log.txt"), "a", encoding="utf-8") as log:
            log.write(f"trained along with {job.name}, whose log is {job.folder / 'log.txt'}\n")


def _watch(driver: str, orphaned: threading.Event) -> None:
    while is_alive(driver):
        time.sleep(WATCH_S)
    orphaned.set()
    time.sleep(ORPHAN_S)
    os._exit(ORPHANED)


def _listen(driver: Connection, stop: threading.Event) -> None:
    try:
        while True:
            driver.recv_bytes()
            stop.set()
    except (EOFError, OSError):
        stop.set()
        time.sleep(ORPHAN_S)
        os._exit(ORPHANED)
