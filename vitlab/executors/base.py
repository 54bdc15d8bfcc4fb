"""Contract of executors, which receive jobs and report how they ended; results are stored in the trials' folders.

A job names a trial and its folder.  The executor reports only how a job ended; its results are read from the folder, so
the death of the driver loses nothing, and two runs of one study can use different executors.

Endings of a job:

=========  ============================================================================================
done       the folder holds a result, possibly that of a diverged trial
failed     the trial raised an exception, which a retry would raise again.  The folder holds ``failure.json``
oom        memory ran out; a retry with a larger share of the device may succeed
timeout    the time limit was exceeded; a checkpoint exists
preempted  the machine was claimed for other work; a checkpoint exists
lost       the worker died (a signal, the kernel's OOM killer, a lost machine); a retry may succeed
refused    the trial's code on the worker differs from the plan.  Nothing was written
stopped    the trial was stopped on request, after writing a checkpoint
=========  ============================================================================================

The driver decides on retries, according to ``run.retries``.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from vitlab.errors import Lost, OutOfMemory, Refused
from vitlab.plan.values import Trial
from vitlab.registry import Slot
from vitlab.registry.blame import sentence_with_place
from vitlab.spec import RunSpec
from vitlab.store.folders import Busy, TrialFolder, holds_lock, owner, process

How = Literal["done", "failed", "oom", "timeout", "preempted", "lost", "refused", "stopped"]

Stage = Literal["tries", "begun", "waits"]
"""Stage of an attempt: its time limit begins, its first step is done, or it waits for another process that holds the
trial's lease."""

POLL_S = 0.5  #: polling interval while another process holds a trial's lease
OVERDUE_S = 30.0  #: time for the checkpoint after the time limit
FROZEN_S = 45.0  #: time after the time limit at which a silent (stopped or stuck) worker is killed by its driver
START_S = 300.0  #: time limit for a worker's start: importing torch from a slow file system takes minutes
GONE_S = 45.0  #: time after the driver's death at which its workers have exited (see ``worker.ORPHAN_S``)


@dataclass(frozen=True)
class Companion:
    """A further trial of a job, trained together with the first."""

    name: str
    folder: Path
    trial: Trial


@dataclass(frozen=True)
class Job:
    """One trial to run with its settings, or several of one shape to train together."""

    name: str  #: display name, such as ``arm/s0``
    folder: Path  #: the trial's folder; equal for two jobs if and only if they are the same trial and code
    trial: Trial
    plugins: tuple[str, ...]  #: files of components to load first
    threads: int
    device: str  #: auto, cpu or cuda
    deterministic: bool
    keep: str  #: trained weights to keep: none or last
    engine: str = "loop"  #: vmap or stack train the trials as a cohort
    companions: tuple[Companion, ...] = ()  #: further members of the cohort; each folder holds its own result
    timeout_s: float | None = None  #: time limit of training
    gpu: float | None = None  #: share of a GPU; None for that of ``run.resources``
    processes: int = 1  #: number of processes that train it together
    micro_batch_size: int | None = None  #: images per forward pass of a process

    @property
    def work(self) -> list[tuple[Trial, TrialFolder]]:
        """Every trial of the job with its folder."""
        return [(item.trial, TrialFolder(item.folder)) for item in self._members()]

    @property
    def folders(self) -> list[Path]:
        """Folder of every trial of the job."""
        return [folder.path for _, folder in self.work]

    def halves(self, folders: Sequence[Path]) -> list[Job]:
        """Split the job's trials in ``folders`` into two jobs, so that a retry needs less memory."""
        selected = [item for item in self._members() if item.folder in folders]
        parts = [part for part in (selected[: len(selected) // 2], selected[len(selected) // 2 :]) if part]
        return [replace(self, **vars(first), companions=tuple(others)) for first, *others in parts]

    def _members(self) -> list[Companion]:
        return [Companion(self.name, self.folder, self.trial), *self.companions]


@dataclass(frozen=True)
class Ended:
    """Ending of a job.  ``detail`` is one sentence unless the job succeeded."""

    job: Job
    how: How
    detail: str = ""


class Executor(ABC):
    """Runner of jobs.  One thread of one driver calls it; only ``poll`` and ``cancel`` wait."""

    runner: ClassVar[str] = "vitlab.runner.run"
    """Module whose ``run_trial`` and ``Settings`` run a job; imported only where the job runs."""

    in_driver: ClassVar[bool] = False
    """True if trials run in the driver's process."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run

    @classmethod
    def cli_only_option(cls, options: Mapping[str, Any]) -> str | None:
        """Return the option that only the command line may set, because it runs code; None if there is none."""
        return None

    @property
    @abstractmethod
    def slots(self) -> int:
        """Maximum number of concurrent jobs; the driver submits no more."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Start a job."""

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Ended]:
        """Return the jobs that have ended since the last call, each once; wait up to ``timeout_s`` for the first."""

    @abstractmethod
    def cancel(self, grace_s: float) -> None:
        """Stop every job, and kill those still running after ``grace_s``; ``poll`` then reports their endings."""

    def with_more_memory(self, job: Job) -> Job | None:
        """Return the job with twice its share of a device, for a retry after oom; None if it had a whole device."""
        share = job.gpu or self.run.resources.gpu or 1.0
        return replace(job, gpu=min(1.0, 2 * share)) if share < 1 and job.device != "cpu" else None

    def reattach(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs of an earlier driver that are still running; they count as submitted from now on."""
        return []


executor = Slot("executor", Executor)  # type: ignore[type-abstract]  # the abstract class itself is never built


class AttemptClock:
    """Time limit and progress of an attempt, updated by the ``stop`` callback that runs before every step."""

    def __init__(self, stop: Callable[[], bool], timeout_s: float | None, begun: Callable[[], None]) -> None:
        self.late = False  #: True if the time limit is exceeded
        self._stop, self._begun = stop, begun
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._steps = -1

    def stop(self) -> bool:
        """Count a step and return True if the attempt has to stop."""
        self._steps += 1
        if self._steps == 1:
            self._begun()
        self.late = self._end is not None and time.monotonic() > self._end
        return self.late or self._stop()


def attempt(
    job: Job,
    runner: str,
    stop: Callable[[], bool],
    report: Callable[[Stage], None] = lambda stage: None,
    overdue: Callable[[], None] | None = None,
) -> tuple[How, str]:
    """Run a job in this process and return how it ended, with one sentence of detail.

    If another study is training the same trial, this waits for its result and trains only what is missing.  An ended
    trial is retrained if its weights are required and were not kept.  An exception of the trial is returned as one
    sentence and stored with its traceback in ``failure.json``.

    Args:
        job: the job to run.
        runner: see ``Executor.runner``.
        stop: called before every step; True stops the trial.
        report: called with each stage; after the first step the trial holds all the memory that it needs.
        overdue: called if a trial has not stopped :data:`OVERDUE_S` after its time limit.
    """

    @contextmanager
    def course() -> Iterator[AttemptClock]:
        watchdog = threading.Timer((job.timeout_s or 0.0) + OVERDUE_S, overdue or (lambda: None))
        watchdog.daemon = True
        if job.timeout_s is not None and overdue is not None:
            watchdog.start()
        report("tries")
        try:
            yield AttemptClock(stop, job.timeout_s, lambda: report("begun"))
        finally:
            watchdog.cancel()

    def wait(folder: TrialFolder) -> None:
        report("waits")
        wait_for_lease(folder, stop)

    try:
        module: Any = importlib.import_module(runner)
        settings = module.Settings(
            threads=job.threads,
            device=job.device,
            deterministic=job.deterministic,
            keep=job.keep,
            plugins=job.plugins,
            processes=job.processes,
            micro_batch_size=job.micro_batch_size,
            engine=job.engine,
        )
        run = _run_single if job.engine == "loop" else _run_cohort
        return run(job, module, settings, stop, course, wait)
    except Refused as error:
        return "refused", one_sentence(error)
    except (Exception, SystemExit) as error:  # an exception of a trial or plugin ends only this job
        sentence = one_sentence(error)
        kind = "oom" if isinstance(error, OutOfMemory | MemoryError) else "lost" if isinstance(error, Lost) else "error"
        with suppress(OSError):  # such as a full disk; the driver is informed all the same
            TrialFolder(job.folder).fail(sentence, traceback.format_exc(), kind)
        return how_of(kind), sentence


AttemptClocks = Callable[[], AbstractContextManager[AttemptClock]]


def _run_single(
    job: Job,
    module: Any,
    settings: Any,
    stop: Callable[[], bool],
    courses: AttemptClocks,
    wait: Callable[[TrialFolder], None],
) -> tuple[How, str]:
    """Train one trial."""
    folder = TrialFolder(job.folder)
    result = folder.result() if _is_complete(folder, job.keep) else None
    while result is None:
        try:
            with courses() as course:
                result = module.run_trial(job.trial, folder, settings, course.stop)
            if result is None:
                return _unfinished(job, course)
        except Busy:
            wait(folder)
            if stop():
                return "stopped", ""
            result = folder.result() if _is_complete(folder, job.keep) else None
    return ("failed" if result.status == "failed" else "done"), result.failure


def _run_cohort(
    job: Job,
    module: Any,
    settings: Any,
    stop: Callable[[], bool],
    courses: AttemptClocks,
    wait: Callable[[TrialFolder], None],
) -> tuple[How, str]:
    """Train a cohort until each of its trials has ended; if one failed, the job's ending is that of the failure."""
    while True:
        with courses() as course, suppress(Busy):  # another process took over a trial
            module.run_cohort(job.work, settings, course.stop)
        remaining = [
            folder for _, folder in job.work if folder.failure() is None and not _is_complete(folder, job.keep)
        ]
        if not remaining:
            break
        if course.late or stop():
            return _unfinished(job, course)
        wait(remaining[0])  # another process trains it; this one trains what remains
    failures = [(folder.kind(), failure) for _, folder in job.work if (failure := folder.failure()) is not None]
    return (how_of(failures[0][0]), failures[0][1]) if failures else ("done", "")


def _unfinished(job: Job, course: AttemptClock) -> tuple[How, str]:
    if course.late:
        return "timeout", f"it trained longer than run.timeout allows ({job.timeout_s:g} s)"
    return "stopped", ""


def how_of(kind: str) -> How:
    """Return the ending of a job whose folder holds a failure of this kind."""
    return "failed" if kind == "error" else cast(How, kind)


def _is_complete(folder: TrialFolder, keep: str) -> bool:
    """Return True if a trial needs no training: it has ended, and its weights exist if they are to be kept."""
    result = folder.result()
    return result is not None and (keep == "none" or result.status != "done" or folder.has_weights())


def trial_endings(job_end: Ended) -> list[tuple[Path, How, str]]:
    """Return the ending of every trial of a job; for a cohort, it is read from each folder."""
    if not job_end.job.companions:
        return [(job_end.job.folder, job_end.how, job_end.detail)]
    endings: list[tuple[Path, How, str]] = []
    for _, folder in job_end.job.work:
        failure = folder.failure()
        if _is_complete(folder, job_end.job.keep):
            endings.append((folder.path, "done", ""))
        elif failure is not None and job_end.how != "refused":  # otherwise it belongs to an earlier attempt
            endings.append((folder.path, how_of(folder.kind()), failure))
        else:
            endings.append((folder.path, "lost" if job_end.how == "done" else job_end.how, job_end.detail))
    return endings


def wait_for_lease(folder: TrialFolder, stop: Callable[[], bool]) -> None:
    """Wait until no process holds the trial's lease, or until ``stop`` returns True."""
    since = time.monotonic()
    while True:
        time.sleep(POLL_S)
        if stop() or not folder.is_locked():
            return
        if time.monotonic() - since > GONE_S:
            end_orphan(folder)


def end_orphan(folder: TrialFolder) -> bool:
    """Kill the worker that holds a trial if its driver is dead: it should have exited, so it is stopped or stuck.

    A lock file may be written by others, so the process it names is killed only if it holds that very lock.

    Returns:
        True if such a worker was found on this machine.
    """
    process_name, driver = owner(folder.lock)
    if not driver or is_alive(driver) or driver.split("/")[0] != process_name.split("/")[0]:
        return False
    return holds_lock(process_name, folder.lock) and kill(process_name)


def is_alive(name: str) -> bool:
    """Return True if the process with this :func:`vitlab.store.folders.process` name runs on this machine."""
    pid = name.partition("/")[2].partition("/")[0]
    return pid.isdecimal() and process(int(pid)) == name


def kill(name: str) -> bool:
    """Kill the process of this name, but never another one that reuses its PID; return True if it was running."""
    if not is_alive(name):
        return False
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(int(name.split("/")[1]))
        try:
            if is_alive(name):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    return True


def one_sentence(error: BaseException) -> str:
    """Format an exception as one line of at most 500 characters, with its place in a plugin's file."""
    text = sentence_with_place(error)
    return text if len(text) <= 500 else text[:499] + "…"
