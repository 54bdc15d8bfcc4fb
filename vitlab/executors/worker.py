"""Worker processes: one process runs one job, and reports how it ended.

:func:`run_job_and_exit` is the whole work of such a process.  It begins in one of two ways.

**With a pipe**, in :func:`run_piped_worker`, for the local executor.  Only the driver holds the other end.  The message
``stop`` requests a checkpoint and exit; a closed pipe means that the driver is dead, which requests the same and ends
the process after ``ORPHAN_S`` in any case.  Before it exits, the worker sends the ending of its job; if it dies without
one, the driver infers the ending from the exit code.  Meanwhile it sends its stages: see
:data:`vitlab.executors.base.Stage`.

**As a command line**, a :class:`WorkerCommand`, for executors that start programs or submit to a queue:
``python -P -m vitlab.executors.worker FOLDER``, which runs wherever the output folder and this Python environment can
be seen.  FOLDER is a new one in the trial's folder, with these files:

    job.json      the job
    stop          requests a checkpoint and the end; checked every :data:`CHECK_S`
    ending.json   the ending and one sentence, written as the last step of the worker

A trial on several machines (``run.resources.nodes``) is the same command under torchrun on each of them, with one
process a machine: ``torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m ...``.
"""

import faulthandler
import itertools
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from vitlab.errors import Refused
from vitlab.executors.base import JobEnd, Stage, format_error, shorten
from vitlab.imports import import_object
from vitlab.runner import fork_server
from vitlab.runner.job import NODE_VARIABLE, Deferral, Job, Stop, TrialEnd, stored_end
from vitlab.spec.tree import parse_as, type_adapter
from vitlab.store.files import json_parser, open_nofollow, read_json, read_stored_strictly, require_mapping, write_json
from vitlab.store.folders import Keep, TrialFolder
from vitlab.store.locks import DRIVER, is_alive, kill_orphan
from vitlab.store.result import Ending

CHECK_S = 0.2  #: interval at which the worker of a command line checks whether it is to stop
POLL_S = 0.5  #: polling interval while another process holds a trial's lease
GONE_S = 45.0  #: time after which a worker whose driver is dead has exited
WATCH_S = 1.0  #: interval at which a worker checks whether its driver is alive


def run_piped_worker(job: Job, environment: Mapping[str, str], cores: Sequence[int], driver: Connection) -> NoReturn:
    """Run one job and exit.

    Args:
        job: the job to run.
        environment: the complete environment, including threads and GPU; set before anything reads it.
        cores: cores to pin the process to; empty for all.
        driver: the pipe to the driver.
    """
    stop_requested = fork_server.set_environment_and_listen(environment, driver)
    if cores and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # a sandbox may forbid it; then the kernel places the threads
            os.sched_setaffinity(0, cores)

    def report_stage(stage: Stage) -> None:
        with suppress(OSError):  # the driver may be dead
            driver.send_bytes(json.dumps(stage).encode())

    run_job_and_exit(
        job,
        stop_requested.is_set,
        lambda ending, detail: driver.send_bytes(json.dumps([ending, detail]).encode()),
        report_stage,
    )


def run_job(
    job: Job,
    stop: Stop,
    report_stage: Callable[[Stage], None] = lambda stage: None,
) -> tuple[Ending, str]:
    """Run a job in this process until each of its trials has ended, and return how, with one sentence of detail.

    If another study is training the same trial, this waits for its result and trains only what is missing.  An ended
    trial is retrained if its weights are required and were not kept.  An exception of the trial is returned as one
    sentence and stored with its traceback in ``failure.json``.

    Args:
        job: the job to run.
        stop: called before every step, so it returns at once; True stops the trial, which writes a checkpoint.  The
            ending is then ``stopped``.
        report_stage: called with each stage; after the first step the trial holds all the memory that it needs.
    """
    is_late = False

    def count_step_and_check_stop() -> bool:
        nonlocal is_late
        if next(steps) == 1:
            report_stage("begun")
        is_late = time.monotonic() > deadline
        return is_late or stop()

    try:
        execute = import_object(job.runner, "execute")
        all_ends = _stored_ends(job.folders, job.settings.keep)  #: of the trials that have ended, by folder
        while remaining := tuple(item for item in job.trials if item.folder not in all_ends):
            steps, deadline = itertools.count(), time.monotonic() + (job.timeout_s or math.inf)
            report_stage("tries")
            ends = execute(replace(job, trials=remaining), count_step_and_check_stop)
            by_folder = dict(zip((item.folder for item in remaining), ends, strict=True))
            busy = [folder for folder, end in by_folder.items() if end.ending == Deferral.BUSY]
            is_stopped = Ending.STOPPED in [end.ending for end in ends]
            all_ends |= {
                folder: end for folder, end in by_folder.items() if end.ending not in (Deferral.BUSY, Ending.STOPPED)
            }
            if is_late and (busy or is_stopped):
                return Ending.TIMEOUT, f"it trained longer than run.timeout allows ({job.timeout_s:g} s)"
            if is_stopped:
                return Ending.STOPPED, ""
            if busy:  # another process trains them; this one trains what remains
                report_stage("waits")
                _wait_for_lease_release(TrialFolder(busy[0]), stop)
                if stop():
                    return Ending.STOPPED, ""
                all_ends |= _stored_ends(busy, job.settings.keep)
    except Refused as error:
        return Ending.REFUSED, format_error(error)
    except (Exception, SystemExit) as error:  # an exception of a trial or plugin ends only this job
        sentence, ending = format_error(error), Ending.OOM if isinstance(error, MemoryError) else Ending.ERROR
        with suppress(OSError):  # such as a full disk; the driver is informed all the same
            TrialFolder(job.folder).write_failure(sentence, traceback.format_exc(), ending)
        return ending, sentence
    # The first trial that failed speaks for the job.
    failed = [end for end in all_ends.values() if end.ending != Ending.DONE]
    end = [*failed, *all_ends.values()][0]
    return Ending(end.ending), shorten(end.detail)


def _stored_ends(folders: Sequence[Path], keep: Keep) -> dict[Path, TrialEnd]:
    """Return how the trials that have a result, with the weights to keep, have ended, by folder."""
    ends = {folder: stored_end(TrialFolder(folder), keep) for folder in folders}
    return {folder: end for folder, end in ends.items() if end}


def _wait_for_lease_release(folder: TrialFolder, stop: Stop) -> None:
    """Wait until no process holds the trial's lease, or until ``stop`` returns True."""
    since = time.monotonic()
    while True:
        time.sleep(POLL_S)
        if stop() or not folder.is_locked():
            return
        if time.monotonic() - since > GONE_S:
            kill_orphan(folder.lock)


def run_job_and_exit(
    job: Job,
    stop: Stop,
    report_ending: Callable[[Ending, str], None],
    report_stage: Callable[[Stage], None] = lambda stage: None,
) -> NoReturn:
    """Run a job as the whole work of this process, report how it ended, and exit; call it in the main thread.

    All output goes to ``log.txt``.  Ctrl-C is ignored, since the driver handles it.  SIGTERM, which schedulers send
    before they reclaim a machine, stops the trial as ``preempted``.  If the driver named by the environment variable
    ``VITLAB_DRIVER`` has died on this machine, the trial writes a checkpoint and stops, and the process ends within
    :data:`vitlab.runner.fork_server.ORPHAN_S`.

    Args:
        job: the job to run.
        stop: called before every step; True requests a checkpoint and the end, as ``stopped``.
        report_ending: called once with the ending and one sentence; an OSError means that the driver is dead.
        report_stage: called with each stage of the attempt.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redirect_output_to_log(job.folder)
    refer_to_shared_log(job)
    preempted, orphaned = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: preempted.set())
    if os.environ.get(DRIVER, "").partition("/")[0] == socket.gethostname():
        threading.Thread(target=_end_if_orphaned, args=(os.environ[DRIVER], orphaned), daemon=True).start()

    ending, detail = run_job(job, lambda: preempted.is_set() or orphaned.is_set() or stop(), report_stage)
    if ending == Ending.STOPPED and preempted.is_set() and not orphaned.is_set() and not stop():
        ending, detail = Ending.PREEMPTED, "its worker received SIGTERM"
    try:
        report_ending(ending, detail)
    except OSError:
        print(f"the driver has died; the trial is {ending}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that a plugin may have started


def redirect_output_to_log(folder: Path) -> None:
    """Redirect all output of this process, including C libraries and crash traces, to ``log.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    log = open_nofollow(folder / "log.txt")
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    sys.stdout, sys.stderr = (
        os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        for descriptor in (1, 2)
    )
    faulthandler.enable()


def refer_to_shared_log(job: Job) -> None:
    """Append to the logs of the job's other trials a reference to the log of the job."""
    for folder in job.folders[1:]:
        append_to_log(folder, f"trained along with {job.name}, whose log is {job.folder / 'log.txt'}")


def append_to_log(folder: Path, line: str) -> None:
    """Append a line to ``log.txt`` in a trial's folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(open_nofollow(folder / "log.txt"), "a", encoding="utf-8") as log:
        log.write(f"{line}\n")


def read_log(folder: Path) -> str:
    """Return the content of ``log.txt`` in a trial's folder; empty if there is none."""
    with suppress(OSError):
        return (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    return ""


def _end_if_orphaned(driver: str, orphaned: threading.Event) -> None:
    while is_alive(driver):
        time.sleep(WATCH_S)
    orphaned.set()
    time.sleep(fork_server.ORPHAN_S)
    os._exit(fork_server.ORPHANED)


# -- workers as command lines ------------------------------------------------------------------------------------------


class WorkerCommand:
    """A job as a command line: start it, stop it, and read how it ended.

    The worker follows every rule of :mod:`vitlab.executors.base`.  What starts the command gives it the job's threads
    and GPU, such as by :meth:`vitlab.executors.Executor.worker_environment`, and a process group of its own.

    Args:
        job: the job to run.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._folder = job.folder / f".worker-{uuid.uuid4().hex[:12]}"
        write_json(self._folder / "job.json", type_adapter(Job).dump_python(job, mode="json"))
        #: the words of the command line
        self.words: tuple[str, ...] = (sys.executable, "-P", "-m", "vitlab.executors.worker", str(self._folder))

    def stop(self) -> None:
        """Request a checkpoint and the end of the worker, whose ending is then ``stopped``."""
        (self._folder / "stop").touch()

    def end(self, lost_detail: str) -> JobEnd:
        """Return how the job ended and remove its files; call it once, after the worker has ended.

        Args:
            lost_detail: the detail of a job that is ``lost``, because its worker ended without a report; such as
                ``its process ended with exit code 9``.
        """
        report = read_json(self._folder / "ending.json")
        shutil.rmtree(self._folder, ignore_errors=True)
        if report is None:
            return JobEnd(self.job, Ending.LOST, lost_detail)
        return JobEnd(self.job, Ending(report[0]), report[1])


def _run_job_file_and_exit(folder: Path) -> NoReturn:
    """Run the job of a folder and exit."""
    data = read_stored_strictly(folder / "job.json", json_parser(require_mapping))
    if data is None:
        sys.exit(f"{folder} has no job.json: its driver has removed it, or this machine does not see the output folder")
    job = parse_as(Job, data)
    stop = threading.Event()

    def wait_for_file() -> None:
        while not (folder / "stop").exists():
            time.sleep(CHECK_S)
        stop.set()

    def report_ending(ending: Ending, detail: str) -> None:
        if os.environ.get(NODE_VARIABLE, "0") == "0":  # the first of the machines of torchrun
            write_json(folder / "ending.json", [ending, detail])

    threading.Thread(target=wait_for_file, daemon=True).start()
    run_job_and_exit(job, stop.is_set, report_ending)


if __name__ == "__main__":
    _run_job_file_and_exit(Path(sys.argv[1]))
