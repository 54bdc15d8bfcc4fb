"""The contract of executors: jobs go in, ends come out, and the truth stays in the trial's folder.

A job names a trial and the folder it lives in.  The executor says how a job ended, never what it found: that is read
from the folder, so the death of the driver loses nothing and executors can be exchanged between two runs of one study.

How a job ends:

=========  ============================================================================================
done       the folder holds a result; that of a trial that diverged is one
failed     the trial raised; trying again would raise again.  The folder holds ``failure.json``
oom        memory ran out; with more of the device to itself it may well succeed
timeout    it trained longer than it was given; a checkpoint waits
preempted  its machine was wanted for something else; a checkpoint waits
lost       the worker died (a signal, the kernel's memory killer, a machine gone); trying again may well succeed
refused    the trial is not, where it was to run, what it was planned to be.  Nothing was written
stopped    the trial was asked to stop and wrote a checkpoint to go on from
=========  ============================================================================================

Whether it is tried again is for the driver to say, by ``run.retries``.
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
"""What an attempt tells while it lasts: that its time begins, that it has done its first step, that it waits for
somebody else who has the trial."""

POLL_S = 0.5  #: how often a worker looks whether another has let go of its trial
OVERDUE_S = 30.0  #: how long a trial whose time is up may take to write its checkpoint
FROZEN_S = 45.0  #: how long its worker may then say nothing: it was stopped, or is stuck, and its driver ends it
START_S = 300.0  #: how long a worker may take until it tries: importing torch from a slow file system takes minutes
GONE_S = 45.0  #: how long after its driver a worker is gone for sure (see ``worker.ORPHAN_S``), unless it was stopped


@dataclass(frozen=True)
class Companion:
    """A trial that is trained along with another."""

    name: str
    folder: Path
    trial: Trial


@dataclass(frozen=True)
class Job:
    """One trial to run, and how; or several of one shape, to be trained together."""

    name: str  #: for people: ``arm/s0``
    folder: Path  #: the trial's folder; equal for two jobs if and only if they are the same trial and code
    trial: Trial
    plugins: tuple[str, ...]  #: files of components to load first
    threads: int
    device: str  #: auto, cpu or cuda
    deterministic: bool
    keep: str  #: trained weights to keep: none or last
    engine: str = "loop"  #: vmap or stack: as a cohort
    companions: tuple[Companion, ...] = ()  #: further members of the cohort; what became of each stands in its folder
    timeout_s: float | None = None  #: how long it may train
    gpu: float | None = None  #: share of a GPU, where it is not that of ``run.resources``
    processes: int = 1  #: that train it together
    micro_batch_size: int | None = None  #: images that a process computes at a time

    @property
    def work(self) -> list[tuple[Trial, TrialFolder]]:
        """Every trial of the job, and where it lives."""
        return [(item.trial, TrialFolder(item.folder)) for item in self._members()]

    @property
    def folders(self) -> list[Path]:
        """Where every trial of the job lives."""
        return [folder.path for _, folder in self.work]

    def halves(self, folders: Sequence[Path]) -> list[Job]:
        """Jobs for those of its trials that live in ``folders``: two, so that what was too much is not tried again."""
        left = [item for item in self._members() if item.folder in folders]
        parts = [part for part in (left[: len(left) // 2], left[len(left) // 2 :]) if part]
        return [replace(self, **vars(first), companions=tuple(others)) for first, *others in parts]

    def _members(self) -> list[Companion]:
        return [Companion(self.name, self.folder, self.trial), *self.companions]


@dataclass(frozen=True)
class Ended:
    """The end of a job.  ``detail`` is one sentence where it did not end well."""

    job: Job
    how: How
    detail: str = ""


class Executor(ABC):
    """Runs jobs somewhere.  One thread of one driver calls it; no method but ``poll`` and ``cancel`` waits."""

    runner: ClassVar[str] = "vitlab.runner.run"
    """The module that runs a job, by its ``run_trial`` and ``Settings``; imported only where the job runs."""

    in_driver: ClassVar[bool] = False
    """Whether trials run in the driver's process, with whatever else that has imported."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run

    @classmethod
    def cli_only_option(cls, options: Mapping[str, Any]) -> str | None:
        """The option among these that no study file may set, but only who starts the study, for it has code run."""
        return None

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many jobs run at a time; the driver submits no more."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Begin a job."""

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Ended]:
        """The jobs that have ended since the last call, each once; waits up to ``timeout_s`` for the first."""

    @abstractmethod
    def cancel(self, grace_s: float) -> None:
        """Ask every job to stop, and end those that have not after ``grace_s``; ``poll`` then says how each ended."""

    def with_more_memory(self, job: Job) -> Job | None:
        """The job with twice the share of a device that it had, after memory ran out; None where it had one alone."""
        share = job.gpu or self.run.resources.gpu or 1.0
        return replace(job, gpu=min(1.0, 2 * share)) if share < 1 and job.device != "cpu" else None

    def reattach(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of ``jobs`` that an earlier driver began and that still run.  They count as submitted from now on."""
        return []


executor = Slot("executor", Executor)  # type: ignore[type-abstract]  # a contract is not built itself


class Course:
    """How far an attempt has come, seen from the question that it asks before every step: whether to stop."""

    def __init__(self, stop: Callable[[], bool], timeout_s: float | None, begun: Callable[[], None]) -> None:
        self.late = False  #: whether its time is up
        self._stop, self._begun = stop, begun
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._steps = -1

    def stop(self) -> bool:
        self._steps += 1
        if self._steps == 1:
            self._begun()
        self.late = self._end is not None and time.monotonic() > self._end
        return self.late or self._stop()


def attempt(
    job: Job,
    runner: str,
    stop: Callable[[], bool],
    tell: Callable[[Stage], None] = lambda stage: None,
    overdue: Callable[[], None] | None = None,
) -> tuple[How, str]:
    """Run a job in this process, and say how it ended.

    Another study may be training the same trial: then this waits for its result, and trains only what the other left.
    A trial that has ended is trained again where its weights are wanted and were not kept.
    What the trial raises ends up as one sentence here and with its traceback in ``failure.json``.

    Args:
        job: what to run.
        runner: see ``Executor.runner``.
        stop: asked before every step.
        tell: told how far it is; after the first step the trial has what it takes of a machine.
        overdue: called where a trial whose time is up has not stopped by itself :data:`OVERDUE_S` later.
    """

    @contextmanager
    def course() -> Iterator[Course]:
        watchdog = threading.Timer((job.timeout_s or 0.0) + OVERDUE_S, overdue or (lambda: None))
        watchdog.daemon = True
        if job.timeout_s is not None and overdue is not None:
            watchdog.start()
        tell("tries")
        try:
            yield Course(stop, job.timeout_s, lambda: tell("begun"))
        finally:
            watchdog.cancel()

    def wait(folder: TrialFolder) -> None:
        tell("waits")
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
        run = _alone if job.engine == "loop" else _cohort
        return run(job, module, settings, stop, course, wait)
    except Refused as error:
        return "refused", one_sentence(error)
    except (Exception, SystemExit) as error:  # whatever a trial or a guest raises ends this job and no other
        sentence = one_sentence(error)
        kind = "oom" if isinstance(error, OutOfMemory | MemoryError) else "lost" if isinstance(error, Lost) else "error"
        with suppress(OSError):  # a full disk, say; the driver is told all the same
            TrialFolder(job.folder).fail(sentence, traceback.format_exc(), kind)
        return how_of(kind), sentence


Courses = Callable[[], AbstractContextManager[Course]]


def _alone(
    job: Job,
    module: Any,
    settings: Any,
    stop: Callable[[], bool],
    courses: Courses,
    wait: Callable[[TrialFolder], None],
) -> tuple[How, str]:
    """Train one trial."""
    folder = TrialFolder(job.folder)
    result = folder.result() if _ended(folder, job.keep) else None
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
            result = folder.result() if _ended(folder, job.keep) else None
    return ("failed" if result.status == "failed" else "done"), result.failure


def _cohort(
    job: Job,
    module: Any,
    settings: Any,
    stop: Callable[[], bool],
    courses: Courses,
    wait: Callable[[TrialFolder], None],
) -> tuple[How, str]:
    """Train a cohort.  It has ended when each of its trials has; ``failed``, or worse, if one of them did."""
    while True:
        with courses() as course, suppress(Busy):  # one was taken over
            module.run_cohort(job.work, settings, course.stop)
        left = [folder for _, folder in job.work if folder.failure() is None and not _ended(folder, job.keep)]
        if not left:
            break
        if course.late or stop():
            return _unfinished(job, course)
        wait(left[0])  # another has it; what that one leaves undone is done here
    failures = [(folder.kind(), failure) for _, folder in job.work if (failure := folder.failure()) is not None]
    return (how_of(failures[0][0]), failures[0][1]) if failures else ("done", "")


def _unfinished(job: Job, course: Course) -> tuple[How, str]:
    if course.late:
        return "timeout", f"it trained longer than run.timeout allows ({job.timeout_s:g} s)"
    return "stopped", ""


def how_of(kind: str) -> How:
    """How a job has ended whose folder tells of a failure of this kind."""
    return "failed" if kind == "error" else cast(How, kind)


def _ended(folder: TrialFolder, keep: str) -> bool:
    """Whether a trial needs no more; one that has ended is trained again for weights that were not kept."""
    result = folder.result()
    return result is not None and (keep == "none" or result.status != "done" or folder.has_weights())


def trial_endings(ended: Ended) -> list[tuple[Path, How, str]]:
    """What became of every trial of a job.  A job of one trial says so itself; of a cohort each folder does."""
    if not ended.job.companions:
        return [(ended.job.folder, ended.how, ended.detail)]
    found: list[tuple[Path, How, str]] = []
    for _, folder in ended.job.work:
        failure = folder.failure()
        if _ended(folder, ended.job.keep):
            found.append((folder.path, "done", ""))
        elif failure is not None and ended.how != "refused":  # else it is that of an earlier attempt
            found.append((folder.path, how_of(folder.kind()), failure))
        else:
            found.append((folder.path, "lost" if ended.how == "done" else ended.how, ended.detail))
    return found


def wait_for_lease(folder: TrialFolder, stop: Callable[[], bool]) -> None:
    """Return when nobody holds the trial any more, or when asked to stop."""
    since = time.monotonic()
    while True:
        time.sleep(POLL_S)
        if stop() or not folder.is_locked():
            return
        if time.monotonic() - since > GONE_S:
            end_orphan(folder)


def end_orphan(folder: TrialFolder) -> bool:
    """Kill the worker that holds a trial if its driver is dead: it should have left, so it is stopped or stuck.

    A lock file may be written by others, so the process it names is killed only if it holds that very lock.

    Returns:
        whether there was one on this machine.
    """
    who, driver = owner(folder.lock)
    if not driver or is_alive(driver) or driver.split("/")[0] != who.split("/")[0]:
        return False
    return holds_lock(who, folder.lock) and kill(who)


def is_alive(name: str) -> bool:
    """Whether the process that :func:`vitlab.store.folders.process` named so still runs, on this machine."""
    pid = name.partition("/")[2].partition("/")[0]
    return pid.isdecimal() and process(int(pid)) == name


def kill(name: str) -> bool:
    """Kill the process of a name, and no other that has its number by now.  Returns whether it was here."""
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
    """Return an exception on one line of at most 500 characters, with its place in a plugin's file."""
    text = sentence_with_place(error)
    return text if len(text) <= 500 else text[:499] + "…"
