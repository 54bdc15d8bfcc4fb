"""Scheduler of jobs: submits them to an executor as their prerequisites allow, and handles their endings.

One driver at a time runs a study; a second one follows it, and takes over when it ends.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitlab import registry
from vitlab.errors import Interrupted, Refused, TrialFailed, VitlabError
from vitlab.executors import Executor, Job, JobTrial, Settings, trial_endings
from vitlab.geometry import Work
from vitlab.plan.engine_choice import engine_of, group_trials
from vitlab.plan.values import EngineBenchmark, Plan, Planned, Trial
from vitlab.spec import RunSpec, read_study
from vitlab.spec.changes import is_known
from vitlab.spec.run import Abort
from vitlab.store.files import hold, mapping, read_json
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.locks import Busy, is_locked, owner
from vitlab.store.result import Ending
from vitlab.trackers import Tracker

GRACE_S = 30.0  #: time that a worker has to write a checkpoint when it is stopped
TRACK_EVERY_S = 2.0
POLL_S = 0.5  #: polling interval while another driver runs the study


class Watch:
    """Observer of a run.  The methods of the base class do nothing."""

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Handle the plan; ``todo`` are the trials to train."""

    def on_schedule(self, batches: Sequence[Sequence[Planned]], slots: int) -> None:
        """Handle the trials that are trained together, in batches of which ``slots`` run at a time."""

    def on_start(self, planned: Planned) -> None:
        """Handle the submission of a trial to a worker."""

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        """Handle the end of a trial (done, failed, refused or stopped), or of an attempt that is tried again."""

    def tick(self) -> None:
        """Refresh the display; called regularly."""

    def say(self, sentence: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """Close the display."""


def execute(
    todo: Sequence[Planned],
    store: Store,
    run: RunSpec,
    plugins: Sequence[str | Path],
    tracker: Tracker,
    watch: Watch,
    probes: Mapping[str, EngineBenchmark] = {},
) -> int:
    """Train the trials, as many at a time as the executor has slots, and return the number of failures.

    ``probes`` are the engine benchmarks of the plan, see :func:`vitlab.plan.engine_choice.engine_of`.

    Raises:
        Refused: if the code has changed since the trials were planned; running trials have ended.
        TrialFailed: if so many trials failed that the study was aborted.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint.
    """
    executor: Executor = registry.slot("executor").build(run.executor, run)
    dependencies = {name for planned in todo for name in planned.trial.needs.values()}

    def job(engine: str, group: Sequence[Planned]) -> Job:
        return _job(engine, group, store, run, plugins, dependencies)

    planned_of = {_path(store, planned): planned for planned in todo}
    running = executor.reattach(
        [job(engine_of(item.trial, run.effective_engine, _work, probes), [item]) for item in todo]
    )
    elsewhere = {folder for job in running for folder in job.folders}
    rest = [planned for folder, planned in planned_of.items() if folder not in elsewhere]
    groups = group_trials(rest, executor.slots, run.effective_engine, _work, probes)
    jobs = [job(engine, group) for engine, group in groups]
    watch.on_schedule([[planned_of[folder] for folder in job.folders] for job in (*running, *jobs)], executor.slots)
    return _drive(executor, running, jobs, planned_of, run, tracker, watch)


def follow_driver(todo: Sequence[Planned], store: Store, busy: Callable[[], bool], watch: Watch) -> None:
    """Show the progress of trials that another driver trains, until it ends.

    Raises:
        Interrupted: after Ctrl-C; the other driver continues.
    """
    remaining = {path: planned for planned in todo if not TrialFolder(path := _path(store, planned)).done()}
    running: set[Path] = set()
    try:
        while busy():
            for path, planned in list(remaining.items()):
                if TrialFolder(path).done():
                    del remaining[path]
                    watch.on_end(planned, Ending.DONE, "")
                elif path not in running and TrialFolder(path).is_locked():
                    running.add(path)
                    watch.on_start(planned)
            watch.tick()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Interrupted("stopped following; the other driver is still running") from None


def prepare_run(file: str | Path, changes: Mapping[str, Any], store: Store) -> None:
    """Have tracker and executor of a study start up while it is planned, unless its last run left nothing to train."""
    with suppress(VitlabError, OSError, LookupError, TypeError):
        study, _, problems = read_study(file, {path: value for path, value in changes.items() if is_known(path)})
        if study is None or problems:
            return
        folder = store.study(study.study)
        plan = read_json(folder / "plan.json", mapping) or {}
        same = (folder / "study.yaml").is_file() and (folder / "study.yaml").read_bytes() == Path(file).read_bytes()
        if not same or not all(store.trial(item["key"], item["code"]).done() for item in plan["trials"]):
            registry.slot("tracker").get(study.run.tracker.type).prepare()  # first, as it may fork this process
            registry.slot("executor").get(study.run.executor.type).prepare()


@contextmanager
def sole_driver(plan: Plan, store: Store, watch: Watch) -> Iterator[bool]:
    """Hold the study's lock and yield whether another process had it; follow that process until it ends."""
    lock = store.driver(plan.study)
    reported: set[str] = set()
    with ExitStack() as own_lock:

        def busy() -> bool:
            """Try to take the lock and return True if another process has it; see :func:`vitlab.store.files.hold`."""
            try:
                own_lock.enter_context(hold(lock))
                return False
            except Busy:
                other = _describe_owner(lock)
            if other not in reported:
                reported.add(other)
                watch.say(f"{plan.study} is run by {other}; this one follows until it ends.")
            return True

        waited = busy()
        if waited:
            trials = distinct(
                [*plan.trials, *(item for tuning in plan.tuning if tuning.open for item in tuning.trials)]
            )
            missing = [item for item in trials if not store.trial(item.trial.key, item.trial.code).done()]
            watch.on_plan(plan, missing, store)
            try:
                follow_driver(trials, store, busy, watch)
            finally:
                watch.close()
        yield waited


def driver_of(study: str, store: Store) -> str:
    """Describe the process that runs a study; empty if there is none."""
    lock = store.driver(study)
    return _describe_owner(lock) if is_locked(lock) else ""


def _describe_owner(lock: Path) -> str:
    """Describe the process that took the lock last."""
    host, _, rest = owner(lock)[0].partition("/")
    return f"process {rest.partition('/')[0]} on {host}" if host else "another process"


def with_prerequisites(plan: Plan, todo: Sequence[Planned], store: Store) -> list[Planned]:
    """Return ``todo`` preceded by the missing trials of no arm that it depends on, directly or indirectly."""
    prerequisites = {f"{trial.key}/{trial.code}": trial for trial in plan.prerequisites}
    missing: dict[str, Planned] = {}
    pending = [dependency for planned in todo for dependency in planned.trial.needs.values()]
    while pending:
        name = pending.pop()
        trial = prerequisites.get(name)
        if trial is None or name in missing or store.trial(trial.key, trial.code).has_weights():
            continue
        missing[name] = Planned(f"prerequisite {trial.key[:8]}", trial.seeds["init"], trial)
        pending += trial.needs.values()
    return [*missing.values(), *todo]


def distinct(trials: Iterable[Planned]) -> list[Planned]:
    """Return each trial once, also if several seeds or arms share it."""
    trials_by_name: dict[str, Planned] = {}
    for planned in trials:
        trials_by_name.setdefault(f"{planned.trial.key}/{planned.trial.code}", planned)
    return list(trials_by_name.values())


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
    ends: dict[Path, Counter[Ending]] = {folder: Counter() for folder in planned_of}
    for folder in (folder for job in reattached for folder in job.folders):
        # Jobs of an earlier driver do not count as attempts: their workers may exit because that driver died.
        ends[folder][Ending.LOST] = -1
    waiting = list(jobs)
    n_done, n_failed, refusals, tracked_at = 0, 0, list[str](), 0.0
    try:
        while waiting or running:
            if time.monotonic() - tracked_at > TRACK_EVERY_S:  # at first before the first worker starts
                tracker.update()
                tracked_at = time.monotonic()
            free = executor.slots - len(running)
            ready = list(itertools.islice(filter(_ready, waiting), free)) if free > 0 else []
            if not ready and not running:
                blocked = [folder for job in waiting for folder in job.folders]
                for folder in blocked:
                    watch.on_end(planned_of[folder], Ending.FAILED, "a trial that it starts from has failed")
                return n_failed + len(blocked)
            for job in ready:
                waiting.remove(job)
                executor.submit(job)
                running.add(job.folder)
                for folder in job.folders:
                    watch.on_start(planned_of[folder])
            for end in executor.poll(timeout_s=0.2):
                running.discard(end.job.folder)
                retries: list[tuple[Job, list[Path]]] = []
                for folder, ending, detail in trial_endings(end):
                    ends[folder][ending] += 1
                    successor = _successor(executor, end.job, ending, ends[folder][ending], run)
                    if ending == Ending.REFUSED:
                        refusals.append(detail)
                    elif successor is not None:
                        # Otherwise the next driver would skip the trial, should this one die.
                        TrialFolder(folder).clear_failure()
                        _add(retries, successor, folder)
                        detail += "; it is resumed" if ending == Ending.PREEMPTED else "; it is tried again"
                    elif ending == Ending.DONE:
                        n_done += 1
                        TrialFolder(folder).remove_checkpoint()
                    elif ending == Ending.STOPPED:  # stopped from outside: the trial is intact, but incomplete
                        n_failed += 1
                    else:
                        n_failed += 1
                        with suppress(OSError):  # if nothing can be written, the next run retries the trial
                            TrialFolder(folder).mark_failed(detail, ending)
                        ending = Ending.FAILED
                    watch.on_end(planned_of[folder], ending, detail)
                waiting += [half for job, folders in retries for half in job.split(folders)]
            if refusals:
                waiting.clear()  # the rest was planned with the same code; running jobs continue to their end
            if run.abort_study is not None:
                _check_abort(run.abort_study, n_done, n_failed, len(planned_of))
            watch.tick()
    except KeyboardInterrupt:
        watch.say("stopping: running trials write a checkpoint; Ctrl-C again ends them at once.")
        executor.cancel(GRACE_S)
        raise Interrupted("interrupted; the same command resumes from here") from None
    except BaseException:
        executor.cancel(GRACE_S)
        raise
    if refusals:
        remaining = len(planned_of) - n_done - n_failed
        trials, them = ("1 trial was", "it") if remaining == 1 else (f"{remaining} trials were", "them")
        raise Refused(
            f"{refusals[0]}. {trials} not trained; run the same command to plan {them} again and train {them}; trials "
            "whose code is unchanged keep their results"
        )
    return n_failed


def _successor(executor: Executor, job: Job, ending: Ending, times: int, run: RunSpec) -> Job | None:
    """Return the job that retries a trial after its ``times``-th ending of this kind; None for no retry."""
    if ending == Ending.OOM:
        with_more_memory = executor.with_more_memory(job)
        if with_more_memory is not None:
            return with_more_memory
        if run.on_oom == "cpu" and job.settings.device != "cpu":
            return replace(job, settings=replace(job.settings, device="cpu"), gpu=None)
    return job if times <= run.retries.allowed(ending) else None


def _add(retries: list[tuple[Job, list[Path]]], job: Job, folder: Path) -> None:
    """Add a trial's folder to those that ``job`` retries."""
    for existing, folders in retries:
        if existing == job:
            folders.append(folder)
            return
    retries.append((job, [folder]))


def _check_abort(abort: Abort, done: int, failed: int, planned: int) -> None:
    """Raise an error if the study is to be aborted.

    Raises:
        TrialFailed: if too many of the finished trials have failed.
    """
    finished = done + failed
    if finished >= abort.min_finished and failed >= abort.failed_fraction * finished and finished < planned:
        raise TrialFailed(
            f"run.abort_study: {failed} of the {finished} trials that ended have failed, and {planned - finished} were "
            "not trained; 'vitlab status' lists the failures, and the same command resumes"
        )


def _ready(job: Job) -> bool:
    """Return True if the weights of all trials that the job depends on are available."""
    trials = job.folder.parents[1]
    return all(TrialFolder(trials / name).has_weights() for item in job.trials for name in item.trial.needs.values())


def _path(store: Store, planned: Planned) -> Path:
    return store.trial(planned.trial.key, planned.trial.code).path


def _work(trial: Trial) -> Work | None:
    """Return the model's work per image; see :data:`vitlab.plan.engine_choice.Works`."""
    from vitlab.data.prepare import data_info

    model = registry.slot("model").resolve(trial.spec.model)
    info = data_info(registry.slot("dataset").resolve(trial.spec.data))
    work: Work | None = model.component.work(info, model.options)  # type: ignore[attr-defined]
    return work


def _job(
    engine: str,
    group: Sequence[Planned],
    store: Store,
    run: RunSpec,
    plugins: Sequence[str | Path],
    dependencies: set[str],
) -> Job:
    names = {f"{item.trial.key}/{item.trial.code}" for item in group}
    return Job(
        tuple(JobTrial(f"{item.arm}/s{item.seed}", _path(store, item), item.trial) for item in group),
        Settings(
            threads=run.threads,
            device=run.device,
            deterministic=run.deterministic,
            # Weights that another trial depends on are kept regardless of the study's setting.
            keep="last" if dependencies & names else run.keep,
            plugins=tuple(str(Path(plugin).resolve()) for plugin in plugins),
            processes=run.resources.together,
            micro_batch_size=run.micro_batch_size,
            activation_checkpointing=run.activation_checkpointing,
            engine=engine,
        ),
        timeout_s=run.timeout,
    )
