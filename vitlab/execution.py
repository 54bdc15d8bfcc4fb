"""Execution: jobs handed to an executor in the order their prerequisites allow, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vitlab import slots
from vitlab.errors import Interrupted
from vitlab.executors import Companion, Executor, Job, fates
from vitlab.plan.cohorts import engine_of, grouped
from vitlab.plan.values import Plan, Planned, Trial
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

    def job(engine: str, group: Sequence[Planned]) -> Job:
        return _job(engine, group, store, run, plugins, needed)

    planned_of = {_path(store, planned): planned for planned in todo}
    running = executor.reattach([job(engine_of(item.trial, run.engine, _values), [item]) for item in todo])
    elsewhere = {job.folder for job in running}
    rest = [planned for folder, planned in planned_of.items() if folder not in elsewhere]
    jobs = [job(engine, group) for engine, group in grouped(rest, executor.slots, run.engine, _values)]
    return _drive(executor, running, jobs, planned_of, run, tracker, watch)


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
    executor: Executor,
    reattached: Sequence[Job],
    jobs: Sequence[Job],
    planned_of: Mapping[Path, Planned],
    run: RunSpec,
    tracker: Tracker,
    watch: Watch,
) -> int:
    running = {job.folder for job in reattached}
    # What an earlier driver began is no attempt of ours: its worker may leave because that driver died.
    attempts = {folder: int(folder not in running) for folder in planned_of}
    waiting = list(jobs)
    failed, tracked = 0, 0.0
    try:
        while waiting or running:
            ready = [job for job in waiting if _ready(job)]
            if not ready and not running:
                kept_out = [folder for job in waiting for folder in job.folders]
                for folder in kept_out:
                    watch.ended(planned_of[folder], "failed", "it needs a trial that failed")
                return failed + len(kept_out)
            for job in ready[: max(0, executor.slots - len(running))]:
                waiting.remove(job)
                executor.submit(job)
                running.add(job.folder)
                for folder in job.folders:
                    watch.started(planned_of[folder])
            for ended in executor.poll(timeout_s=0.2):
                running.discard(ended.job.folder)
                again = []
                for folder, how, detail in fates(ended):
                    watch.ended(planned_of[folder], how, detail)
                    if how == "lost" and attempts[folder] <= run.retries:
                        attempts[folder] += 1
                        again.append(folder)
                    elif how in ("lost", "failed"):
                        failed += 1
                        if TrialFolder(folder).failure() is None:  # its worker died before it could say so itself
                            TrialFolder(folder).fail(detail)
                waiting += ended.job.halves(again)
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


def _path(store: Store, planned: Planned) -> Path:
    return store.trial(planned.trial.key, planned.trial.code).path


def _values(trial: Trial) -> int | None:
    """See :data:`vitlab.plan.cohorts.Values`."""
    from vitlab.data.prepare import data_info

    model = slots.slot("model").resolve(trial.spec["model"])
    info = data_info(slots.slot("dataset").resolve(trial.spec["data"]))
    found: int | None = model.component.values(info, model.options)  # type: ignore[attr-defined]
    return found


def _job(
    engine: str,
    group: Sequence[Planned],
    store: Store,
    run: RunSpec,
    plugins: Sequence[str | Path],
    needed: set[str],
) -> Job:
    members = [Companion(f"{item.arm}/s{item.seed}", _path(store, item), item.trial) for item in group]
    first, *others = members
    return Job(
        name=first.name,
        folder=first.folder,
        trial=first.trial,
        plugins=tuple(str(Path(plugin).resolve()) for plugin in plugins),
        threads=run.threads,
        device=run.device,
        deterministic=run.deterministic,
        # What another trial starts from must be kept, whatever the study keeps.
        keep="last" if needed & {f"{item.trial.key}/{item.trial.code}" for item in group} else run.keep,
        engine=engine,
        companions=tuple(others),
    )
