"""Contract of executors, which run jobs and report how they ended; results are stored in the trials' folders.

A job names its trials and their folders.  The executor reports only how a job ended; its results are read from the
folders, so the death of the driver loses nothing, and two runs of one study can use different executors.

The driver decides on retries, according to ``run.retries``; see :class:`vitlab.store.result.Ending`.

**Workers.**  A worker is the process that runs a job.  The simplest is the command line of
:class:`vitlab.executors.worker.WorkerCommand`; one of your own calls
:func:`vitlab.executors.worker.run_job_and_exit`.  Both follow these rules, which hold for every worker:

- A job can be pickled, so it can be sent through a pipe, a file or a queue.
- A worker appends its output to ``log.txt`` in ``job.folder``.
- Ctrl-C reaches the driver alone: start workers in a session or process group of their own.
- The executor sets the environment before the worker imports torch: the number of threads and
  ``CUDA_VISIBLE_DEVICES``; see :meth:`Executor.worker_environment`.
- A worker that received a SIGTERM which its executor did not send ends its job as ``preempted``.
- A worker whose driver has died writes a checkpoint and ends, or is ended; the next driver may otherwise wait for it.
  On a cluster it may go on, if ``reattach`` finds it.
- A worker that ends without a report is ``lost``, whatever its exit code.
"""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from vitlab.registry import Slot
from vitlab.registry.plugins import sentence_with_place
from vitlab.runner.job import Job
from vitlab.spec import RunSpec
from vitlab.store.folders import TrialFolder
from vitlab.store.locks import DRIVER, own_unique_process_name
from vitlab.store.result import Ending

Stage = Literal["tries", "begun", "waits"]
"""Stage of an attempt: its time limit begins, its first step is done, or it waits for another process that holds the
trial's lease."""

FROZEN_S = 45.0  #: time after the time limit at which a silent (stopped or stuck) worker is killed by its driver
KILLED = "it trained longer than run.timeout allows, and {process}, stopped or stuck, was killed"
"""Detail of a job whose process was killed."""
START_S = 300.0  #: time limit for a worker's start: importing torch from a slow file system takes minutes


@dataclass(frozen=True)
class JobEnd:
    """A job that has ended, and how: ``done`` if each of its trials has a result, which may be diverged."""

    job: Job
    ending: Ending
    detail: str = ""  #: one sentence unless the ending is ``done``


class Executor(ABC):
    """Runner of jobs, called by one thread of one driver.

    ``slots``, ``submit``, ``poll`` and ``cancel`` are required; only the last two may wait.  Every submitted job ends
    exactly once, in a :class:`JobEnd` of ``poll``.

    A run calls nothing after its last job has ended, or after ``cancel`` and the ``poll`` that follows it.  From then
    on, an executor holds no process; connections and temporary files are released with it or by :mod:`atexit`.

    Args:
        run: where and how trials run; ``run.workers`` limits the jobs at a time.
    """

    in_driver: ClassVar[bool] = False
    """True if trials run in the driver's process.  Optional; by default False."""

    several_nodes: ClassVar[bool] = False
    """True if a trial may run on several machines (``run.resources.nodes``).  Optional; by default False."""

    waiting = 0
    """Number of jobs that wait for a slot, set by the driver, for clusters that grow with the demand."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run

    @classmethod
    def cli_only_option(cls, options: Mapping[str, object]) -> str | None:
        """Return the option that a study file may not set, because it runs code.  Optional; by default None."""
        return None

    @classmethod
    def detach(cls, options: Mapping[str, Any], words: Sequence[str], log: Path) -> tuple[str, str] | None:
        """Start a driver where it outlives the user's session, for ``vitlab run --detach``; optional.

        Args:
            options: the options of the executor.
            words: the driver's command line.
            log: file for its output.

        Returns:
            What runs it, and the command that stops it; by default None: it becomes a process of this machine.
        """
        return None

    @classmethod
    def prepare(cls) -> None:
        """Start what every job needs, without waiting for it, before jobs are known.  Optional; by default nothing."""
        return

    @property
    @abstractmethod
    def slots(self) -> int:
        """Maximum number of jobs at a time, at least 1 and at most ``run.workers``; the driver submits no more."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Start a job.  One that cannot be started ends as ``lost``; an exception ends the run."""

    @abstractmethod
    def poll(self, timeout_s: float) -> list[JobEnd]:
        """Return the jobs that have ended since the last call, each once; wait up to ``timeout_s`` for the first."""

    @abstractmethod
    def cancel(self, grace_s: float) -> None:
        """Stop every job, and kill those still running after ``grace_s``; ``poll`` then reports their endings.

        A worker that is asked to stop writes a checkpoint and reports ``stopped``; a killed one is ``lost``.
        """

    def worker_environment(self, job: Job, gpu: str | None = None) -> dict[str, str]:
        """Return the environment of a worker: this process's, with the threads of a job and the driver's name.

        A worker in this environment ends if the driver dies; see :func:`vitlab.executors.worker.run_job_and_exit`.

        Args:
            job: the job to run.
            gpu: value of ``CUDA_VISIBLE_DEVICES``, empty for no GPU; by default this process's.
        """
        devices = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        return {**os.environ, **thread_variables(job), **devices, DRIVER: own_unique_process_name()}

    def with_more_memory(self, job: Job) -> Job | None:
        """Return the job with a larger share of its device, for a retry after ``oom``; None if there is no larger one.

        Optional; by default with twice the share of a GPU.
        """
        share = job.gpu or self.run.resources.gpu or 1.0
        return replace(job, gpu=min(1.0, 2 * share)) if share < 1 and job.settings.device != "cpu" else None

    def reattach(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs of an earlier driver that are still running; they count as submitted from now on.

        Optional; by default none, and a job whose trial is still locked waits in its worker.
        """
        return []


class PollingExecutor(Executor):
    """Executor with a queue.  A subclass defines :meth:`_wait_and_collect_ends`, which fills ``_ends``, or ``poll``."""

    _running: Collection[object]  #: jobs that have begun, set by a subclass that calls :meth:`_wait_for_all`

    def __init__(self, run: RunSpec) -> None:
        super().__init__(run)
        self._waiting: list[Job] = []  #: jobs that have not begun
        self._ends: list[JobEnd] = []

    def submit(self, job: Job) -> None:
        """Queue a job; :meth:`poll` starts it."""
        self._waiting.append(job)

    def poll(self, timeout_s: float) -> list[JobEnd]:
        """Wait for ended jobs, at most ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._wait_and_collect_ends(0.0 if self._ends else max(0.0, deadline - time.monotonic()))
            if self._ends or time.monotonic() >= deadline:
                ends, self._ends = self._ends, []
                return ends

    def _wait_and_collect_ends(self, timeout_s: float) -> None:
        """Note jobs that have ended; return after ``timeout_s`` at most, and earlier at any news."""
        raise NotImplementedError

    def _wait_for_all(self, timeout_s: float) -> None:
        """Wait until no job is running, at most ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._running and (remaining_s := deadline - time.monotonic()) > 0:
            self._wait_and_collect_ends(remaining_s)

    def _drop_waiting_jobs(self) -> None:
        self._ends += [JobEnd(job, Ending.STOPPED) for job in self._waiting]
        self._waiting.clear()


@dataclass
class Watchdog:
    """Time by which a worker must report again; one that does not is stopped or stuck, and is killed by its driver."""

    timeout_s: float | None  #: time limit of the job
    due: float = math.inf  #: by ``time.monotonic()``
    has_killed: bool = False

    def start(self, extra_s: float = 0.0) -> None:
        """Begin to count the time limit."""
        self.due = math.inf if self.timeout_s is None else time.monotonic() + self.timeout_s + FROZEN_S + extra_s

    def record_stage(self, stage: Stage) -> None:
        """Handle a stage that the worker reports."""
        if stage == "tries":
            self.start()
        if stage == "waits":
            self.due = math.inf

    def mark_killed_if_due(self) -> bool:
        """Return whether the worker must be killed now, once."""
        if time.monotonic() <= self.due:
            return False
        self.due, self.has_killed = math.inf, True
        return True


executor = Slot("executor", Executor)  # type: ignore[type-abstract]  # the abstract class itself is never built


def read_trial_endings(job_end: JobEnd) -> list[tuple[Path, Ending, str]]:
    """Return the ending of every trial of a job; of several trials, each is read from its folder."""
    job = job_end.job
    if len(job.trials) == 1:
        return [(job.folder, job_end.ending, job_end.detail)]
    endings: list[tuple[Path, Ending, str]] = []
    otherwise = Ending.LOST if job_end.ending == Ending.DONE else job_end.ending
    for folder in map(TrialFolder, job.folders):
        failure = folder.failure()
        if (result := folder.result_unless_weights_lost(job.settings.keep)) is not None:
            endings.append((folder.path, Ending.DONE, result.failure))
        elif failure is not None and job_end.ending != Ending.REFUSED:  # otherwise it belongs to an earlier attempt
            endings.append((folder.path, failure.kind, failure.failure))
        else:
            endings.append((folder.path, otherwise, job_end.detail))
    return endings


def thread_variables(job: Job) -> dict[str, str]:
    """Return the environment variables that set the number of threads of a job."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(job.settings.threads))


def format_error(error: BaseException) -> str:
    """Format an exception as one line of at most 500 characters, with its place in a plugin's file."""
    return shorten(sentence_with_place(error))


def shorten(text: str) -> str:
    """Return a text of at most 500 characters."""
    return text if len(text) <= 500 else text[:499] + "…"
