"""Execution: jobs handed to an executor in the order their prerequisites allow, and what becomes of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vitlab import registry
from vitlab.errors import Interrupted, Refused, TrialFailed
from vitlab.executors import Companion, Executor, How, Job, trial_endings
from vitlab.geometry import Work
from vitlab.plan.cohorts import engine_of, grouped
from vitlab.plan.values import EngineBenchmark, Plan, Planned, Trial
from vitlab.spec import RunSpec
from vitlab.spec.run import Abort
from vitlab.store.folders import Store, TrialFolder
from vitlab.trackers import Tracker

GRACE_S = 30.0  #: how long a worker may take to checkpoint when asked to stop
TRACK_EVERY_S = 2.0
POLL_S = 0.5  #: how often one that looks on looks


class Watch:
    """What somebody who watches a run is told.  The base class looks away."""

    def planned(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """The plan stands; ``todo`` are the trials that will be trained."""

    def started(self, planned: Planned) -> None:
        """A trial was handed to a worker."""

    def ended(self, planned: Planned, how: str, detail: str) -> None:
        """A trial ended: done, failed, refused, stopped; or an attempt at one: error, oom, timeout, preempted, lost."""

    def tick(self) -> None:
        """A moment passed."""

    def say(self, sentence: str) -> None:
        """Something the user should know now."""

    def close(self) -> None:
        """Nothing more will come."""


def execute(
    todo: Sequence[Planned],
    store: Store,
    run: RunSpec,
    plugins: Sequence[str | Path],
    tracker: Tracker,
    watch: Watch,
    probes: Mapping[str, EngineBenchmark] = {},
) -> int:
    """Train the trials, as many at a time as the executor holds.  Returns how many failed.

    ``probes`` are those of the plan, see :func:`vitlab.plan.cohorts.engine_of`.

    Raises:
        Refused: where the code was changed since the trials were planned; what ran already has ended.
        TrialFailed: if so many failed that the study was given up.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint.
    """
    executor: Executor = registry.slot("executor").build(run.executor, run)
    needed = {name for planned in todo for name in planned.trial.needs.values()}

    def job(engine: str, group: Sequence[Planned]) -> Job:
        return _job(engine, group, store, run, plugins, needed)

    planned_of = {_path(store, planned): planned for planned in todo}
    running = executor.reattach(
        [job(engine_of(item.trial, run.effective_engine, _work, probes), [item]) for item in todo]
    )
    elsewhere = {folder for job in running for folder in job.folders}
    rest = [planned for folder, planned in planned_of.items() if folder not in elsewhere]
    jobs = [job(engine, group) for engine, group in grouped(rest, executor.slots, run.effective_engine, _work, probes)]
    return _drive(executor, running, jobs, planned_of, run, tracker, watch)


def follow_driver(todo: Sequence[Planned], store: Store, busy: Callable[[], bool], watch: Watch) -> None:
    """Show what becomes of trials that another driver trains, for as long as it is busy.

    Raises:
        Interrupted: after Ctrl-C; the other goes on.
    """
    left = {path: planned for planned in todo if not TrialFolder(path := _path(store, planned)).done()}
    begun: set[Path] = set()
    try:
        while busy():
            for path, planned in list(left.items()):
                if TrialFolder(path).done():
                    del left[path]
                    watch.ended(planned, "done", "")
                elif path not in begun and TrialFolder(path).held():
                    begun.add(path)
                    watch.started(planned)
            watch.tick()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Interrupted("looks on no more; the other driver goes on") from None


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
    ends: dict[Path, Counter[How]] = {folder: Counter() for folder in planned_of}
    for folder in (folder for job in reattached for folder in job.folders):
        # What an earlier driver began is no attempt of ours: its worker may leave because that driver died.
        ends[folder]["lost"] = -1
    waiting = list(jobs)
    done, failed, refused, tracked = 0, 0, list[str](), 0.0
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
                again: list[tuple[Job, list[Path]]] = []
                for folder, how, detail in trial_endings(ended):
                    ends[folder][how] += 1
                    said: str = how
                    successor = _successor(executor, ended.job, how, ends[folder][how], run)
                    if how == "refused":
                        refused.append(detail)
                    elif successor is not None:
                        TrialFolder(
                            folder
                        ).clear_failure()  # or it would keep the next driver from it, should this one die
                        _add(again, successor, folder)
                        said = "error" if how == "failed" else how  # it has not failed yet
                        detail += "; it goes on" if how == "preempted" else "; it is tried again"
                    elif how == "done":
                        done += 1
                        TrialFolder(folder).remove_checkpoint()
                    elif how == "stopped":  # by somebody else: nothing is wrong with it, but it is missing
                        failed += 1
                    else:
                        failed += 1
                        with suppress(OSError):  # where nothing can be written it is only tried again
                            TrialFolder(folder).mark_failed(detail, "error" if how == "failed" else how)
                        said = "failed"
                    watch.ended(planned_of[folder], said, detail)
                waiting += [half for job, folders in again for half in job.halves(folders)]
            if refused:
                waiting.clear()  # the rest was planned under the same code; what runs goes on to its end
            if run.abort_study is not None:
                _go_on(run.abort_study, done, failed, len(planned_of))
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
    if refused:
        left = len(planned_of) - done - failed
        trials, them = ("1 trial was", "it") if left == 1 else (f"{left} trials were", "them")
        raise Refused(
            f"{refused[0]}.  {trials} not trained; nothing is wrong with {them}: the same command plans {them} again "
            "and goes on"
        )
    return failed


def _successor(executor: Executor, job: Job, how: How, times: int, run: RunSpec) -> Job | None:
    """How a trial is tried again that ended this way for the ``times``-th time; None if it is not."""
    if how == "oom":
        with_more_memory = executor.with_more_memory(job)
        if with_more_memory is not None:
            return with_more_memory
        if run.on_oom == "cpu" and job.device != "cpu":
            return replace(job, device="cpu", gpu=None)
    return job if times <= run.retries.allowed(how) else None


def _add(again: list[tuple[Job, list[Path]]], job: Job, folder: Path) -> None:
    """Note that a trial is tried again as part of ``job``."""
    for known, folders in again:
        if known == job:
            folders.append(folder)
            return
    again.append((job, [folder]))


def _go_on(abort: Abort, done: int, failed: int, planned: int) -> None:
    """Whether a study is worth going on with.

    Raises:
        TrialFailed: if it is not.
    """
    ended = done + failed
    if ended >= abort.min_finished and failed >= abort.failed_fraction * ended and ended < planned:
        raise TrialFailed(
            f"the study was given up: {failed} of the {ended} trials that ended have failed (run.abort_study), "
            f"and {planned - ended} are left; 'vitlab status' says what failed, and the same command goes on"
        )


def _ready(job: Job) -> bool:
    """Whether every trial that this one starts from is there to start from."""
    trials = job.folder.parents[1]
    return all(TrialFolder(trials / needed).usable() for needed in job.trial.needs.values())


def _path(store: Store, planned: Planned) -> Path:
    return store.trial(planned.trial.key, planned.trial.code).path


def _work(trial: Trial) -> Work | None:
    """See :data:`vitlab.plan.cohorts.Works`."""
    from vitlab.data.prepare import data_info

    model = registry.slot("model").resolve(trial.spec["model"])
    info = data_info(registry.slot("dataset").resolve(trial.spec["data"]))
    found: Work | None = model.component.work(info, model.options)  # type: ignore[attr-defined]
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
        timeout_s=run.timeout,
        processes=run.resources.together,
        micro_batch_size=run.micro_batch_size,
    )
