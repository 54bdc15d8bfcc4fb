"""Execution: jobs handed to an executor in the order their prerequisites allow, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitlab import slots
from vitlab.errors import Interrupted
from vitlab.executors import Executor, Job
from vitlab.plan.values import Plan, Planned
from vitlab.spec import RunSpec
from vitlab.store import Store, TrialFolder
from vitlab.trackers import Tracker

GRACE_S = 30.0  #: how long a worker may take to checkpoint when asked to stop
TRACK_EVERY_S = 2.0


class Watch:
    """What somebody who watches a run is told.  The base class looks away."""

    def planned(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """The plan stands; ``todo`` are the trials that will be trained."""

    def started(self, planned: Planned) -> None:
        """A trial was handed to a worker."""

    def ended(self, planned: Planned, how: str, detail: str) -> None:
        """A trial ended: done, failed, lost (its worker died; it is tried again) or stopped."""

    def tick(self) -> None:
        """A moment passed."""

    def say(self, sentence: str) -> None:
        """Something the user should know now."""

    def close(self) -> None:
        """Nothing more will come."""


def execute(
    todo: Sequence[Planned], store: Store, run: RunSpec, plugins: Sequence[str | Path], tracker: Tracker, watch: Watch
) -> int:
    """Train the trials, as many at a time as the executor holds.  Returns how many failed.

    Raises:
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint.
    """
    executor: Executor = slots.slot("executor").build(run.executor, run)
    needed = {name for planned in todo for name in planned.trial.needs.values()}
    jobs = [(planned, _job(planned, store, run, plugins, needed)) for planned in todo]
    return _drive(executor, jobs, run, tracker, watch)


def with_prerequisites(plan: Plan, todo: Sequence[Planned], store: Store) -> list[Planned]:
    """``todo`` after the trials these start from, directly or not, that stand in no arm and are still missing."""
    known = {f"{trial.key}/{trial.code}": trial for trial in plan.prerequisites}
    found: dict[str, Planned] = {}
    waiting = [needed for planned in todo for needed in planned.trial.needs.values()]
    while waiting:
        name = waiting.pop()
        trial = known.get(name)
        if trial is None or name in found or store.trial(trial.key, trial.code).usable():
            continue
        found[name] = Planned(f"prerequisite {trial.key[:8]}", trial.seeds["init"], trial)
        waiting += trial.needs.values()
    return [*found.values(), *todo]


def distinct(trials: Iterable[Planned]) -> list[Planned]:
    """Each trial once, however many seeds or arms reach it."""
    found: dict[str, Planned] = {}
    for planned in trials:
        found.setdefault(f"{planned.trial.key}/{planned.trial.code}", planned)
    return list(found.values())


def _drive(
    executor: Executor, jobs: Sequence[tuple[Planned, Job]], run: RunSpec, tracker: Tracker, watch: Watch
) -> int:
    planned_of = {job.folder: planned for planned, job in jobs}
    running = {job.folder for job in executor.reattach([job for _, job in jobs])}
    # What an earlier driver began is no attempt of ours: its worker may leave because that driver died.
    attempts = {folder: int(folder not in running) for folder in planned_of}
    waiting = [job for _, job in jobs if job.folder not in running]
    failed, tracked = 0, 0.0
    try:
        while waiting or running:
            ready = [job for job in waiting if _ready(job)]
            if not ready and not running:
                for job in waiting:
                    watch.ended(planned_of[job.folder], "failed", "it needs a trial that failed")
                return failed + len(waiting)
            for job in ready[: max(0, executor.slots - len(running))]:
                waiting.remove(job)
                executor.submit(job)
                running.add(job.folder)
                watch.started(planned_of[job.folder])
            for ended in executor.poll(timeout_s=0.2):
                folder = ended.job.folder
                running.discard(folder)
                watch.ended(planned_of[folder], ended.how, ended.detail)
                if ended.how == "lost" and attempts[folder] <= run.retries:
                    attempts[folder] += 1
                    waiting.append(ended.job)
                elif ended.how in ("lost", "failed"):
                    failed += 1
                    if ended.how == "lost":  # its worker died before it could say so itself
                        TrialFolder(folder).fail(ended.detail)
            watch.tick()
            if time.monotonic() - tracked > TRACK_EVERY_S:
                tracker.update()
                tracked = time.monotonic()
    except KeyboardInterrupt:
        watch.say("stopping: running trials write a checkpoint; Ctrl-C again ends them at once.")
        executor.cancel(GRACE_S)
        raise Interrupted("interrupted; the same command goes on from here") from None
    except BaseException:
        executor.cancel(GRACE_S)
        raise
    return failed


def _ready(job: Job) -> bool:
    """Whether every trial that this one starts from is there to start from."""
    trials = job.folder.parents[1]
    return all(TrialFolder(trials / needed).usable() for needed in job.trial.needs.values())


def _job(planned: Planned, store: Store, run: RunSpec, plugins: Sequence[str | Path], needed: set[str]) -> Job:
    trial = planned.trial
    return Job(
        name=f"{planned.arm}/s{planned.seed}",
        folder=store.trial(trial.key, trial.code).path,
        trial=trial,
        plugins=tuple(str(Path(plugin).resolve()) for plugin in plugins),
        threads=run.threads,
        device=run.device,
        deterministic=run.deterministic,
        # What another trial starts from must be kept, whatever the study keeps.
        keep="last" if f"{trial.key}/{trial.code}" in needed else run.keep,
    )
