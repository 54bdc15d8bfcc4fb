"""Scheduler of jobs: submits them to an executor as their prerequisites allow, and handles their endings."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitlab.driver.session import Session, add_missing_prerequisites, describe_outdated
from vitlab.errors import Interrupted, Refused, TrialFailed, format_count
from vitlab.executors import Executor, Job, JobEnd, JobTrial, Settings, machine, read_trial_endings
from vitlab.geometry import Work
from vitlab.identity.trial import Trial
from vitlab.planning.engine_choice import choose_engine, group_trials
from vitlab.planning.values import Plan, Planned
from vitlab.registry import slot
from vitlab.spec import Analysis, RunSpec
from vitlab.store.folders import Keep, TrialFolder
from vitlab.store.result import Ending

GRACE_S = 30.0  #: time that a worker has to write a checkpoint when it is stopped
TRACK_EVERY_S = 2.0  #: from one update of the tracker to the next


def train_missing(stage: Plan, trials: Sequence[Planned], session: Session, *, retry_failed: bool) -> dict[str, str]:
    """Train the trials of a stage, each given once, and their missing prerequisites.

    Trials that failed under the same code stay failed unless ``retry_failed`` is set.

    Returns:
        ``trained`` or ``failed`` for each training, by its ``key/code``.

    Raises:
        Refused: if the code has changed since the trials were planned; running trials have ended.
        TrialFailed: if so many trials failed that the study was aborted.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint.
    """

    def has_failed(planned: Planned) -> bool:
        return not retry_failed and session.store.folder(planned.trial).has_failed_for_good()

    # A trial that failed before brings no prerequisites; among those of the others, some may have failed before.
    todo = add_missing_prerequisites(stage, [planned for planned in trials if not has_failed(planned)], session.store)
    failed_before = [planned for planned in (*trials, *todo) if has_failed(planned)]
    todo = [planned for planned in todo if not has_failed(planned)]
    if failed_before:
        session.watch.say(
            f"{format_count(len(failed_before), 'trial')} failed before under this code; --retry-failed trains them "
            "again."
        )
    _report_trials_lacking_weights(stage, trials, session)
    for sentence in describe_outdated(session.store.folder(planned.trial) for planned in todo):
        session.watch.say(sentence)
    session.watch.on_plan(stage, todo, session.store)
    try:
        if todo:
            Schedule.for_trials(todo, session, stage).run_jobs()
    finally:
        session.watch.close()
    return {
        planned.trial.name: "trained" if session.store.folder(planned.trial).done() else "failed"
        for planned in (*todo, *failed_before)
    }


def _report_trials_lacking_weights(stage: Plan, missing: Sequence[Planned], session: Session) -> None:
    keep = _weights_retention(session.run, stage.analysis, is_needed=False)
    names = {planned.trial.name for planned in missing}
    folders = {session.store.folder(planned.trial) for planned in stage.trials if planned.trial.name not in names}
    if lacking := sum(folder.done() and folder.result_unless_weights_lost(keep) is None for folder in folders):
        session.watch.say(
            f"{format_count(lacking, 'trial')} ended without weights that run.keep asks for now, and an ended trial is "
            "not trained again for these; delete its folder to have it trained again."
        )


class Schedule:
    """Jobs on their way through an executor: as many at a time as it has slots, retried as ``run.retries`` allows.

    Args:
        executor: the executor.
        planned: folder to trial, of all trials.
        session: the run.
        waiting: jobs to submit.
        reattached: jobs of an earlier driver that the executor is still running.
    """

    def __init__(
        self,
        executor: Executor,
        planned: Mapping[Path, Planned],
        session: Session,
        waiting: Sequence[Job],
        reattached: Sequence[Job] = (),
    ) -> None:
        self._executor, self._planned, self._session = executor, planned, session
        self._waiting = list(waiting)
        self._running = {job.folder for job in reattached}
        self._endings: dict[Path, Counter[Ending]] = {folder: Counter() for folder in planned}
        for folder in (folder for job in reattached for folder in job.folders):
            # Jobs of an earlier driver do not count as attempts: their workers may exit because that driver died.
            self._endings[folder][Ending.LOST] = -1
        self._done = self.failed = 0  #: trials
        self._tracked_at = -TRACK_EVERY_S
        self._refusals: list[str] = []

    @classmethod
    def for_trials(cls, todo: Sequence[Planned], session: Session, plan: Plan) -> Schedule:
        """Return the schedule of trials of a plan, after looking for jobs that an earlier driver has left."""
        run = session.run
        executor: Executor = slot("executor").build(run.executor, run)
        dependencies = {name for planned in todo for name in planned.trial.needs.values()}

        make_job = partial(_make_job, session, plan.analysis, dependencies)
        by_folder = {session.store.folder(item.trial).path: item for item in todo}
        engine_arguments = run.effective_engine, _model_work_per_image, plan.probes, machine.device_type(run)
        # One by one: how an earlier driver has batched them is not known here.  The executor returns its own jobs.
        running = executor.reattach(
            [make_job(choose_engine(item.trial, *engine_arguments).engine, [item]) for item in todo]
        )
        reattached = {folder for job in running for folder in job.folders}
        rest = [item for folder, item in by_folder.items() if folder not in reattached]
        waiting = [make_job(*group) for group in group_trials(rest, executor.slots, *engine_arguments)]
        return cls(executor, by_folder, session, waiting, running)

    def run_jobs(self) -> None:
        """Run all jobs to their end; for what it raises see :func:`train_missing`."""
        try:
            while self._waiting or self._running:
                self._update_tracker()
                self._submit_ready_jobs()
                for end in self._executor.poll(timeout_s=0.2) if self._running else ():
                    self._handle_end(end)
                if self._refusals:
                    self._waiting.clear()  # the rest was planned with the same code; running jobs continue to their end
                self._check_abort()
                self._session.watch.tick()
        except KeyboardInterrupt:
            self._session.watch.close()
            self._session.watch.say("stopping: running trials write a checkpoint; Ctrl-C again ends them at once.")
            self._executor.cancel(GRACE_S)
            raise Interrupted("interrupted") from None
        except BaseException:
            self._executor.cancel(GRACE_S)
            raise
        self._check_refusals()

    def _update_tracker(self) -> None:
        """Update the tracker if that is due, at first before the first worker starts."""
        if time.monotonic() - self._tracked_at > TRACK_EVERY_S:
            self._session.delivery.update()
            self._tracked_at = time.monotonic()

    def _submit_ready_jobs(self) -> None:
        """Submit the jobs that are ready, as far as slots are free; end those that wait for a failed trial."""
        self._executor.waiting = len(self._waiting)  # an executor on an autoscaling cluster asks for more machines
        free = max(0, self._executor.slots - len(self._running))
        for job in list(itertools.islice(filter(_is_ready, self._waiting), free)):
            self._waiting.remove(job)
            self._executor.submit(job)
            self._running.add(job.folder)
            for folder in job.folders:
                self._session.watch.on_start(self._planned[folder])
        if not self._running:
            for folder in (folder for job in self._waiting for folder in job.folders):
                self.failed += 1
                self._session.watch.on_end(
                    self._planned[folder], Ending.FAILED, "a trial that it starts from has failed"
                )
            self._waiting.clear()

    def _handle_end(self, end: JobEnd) -> None:
        """Handle the end of a job: each of its trials is done, has failed for good, or is tried again."""
        self._running.discard(end.job.folder)
        retries: list[tuple[Job, list[Path]]] = []  # trials whose successors are equal are retried together
        for folder, ending, detail in read_trial_endings(end):
            stored = TrialFolder(folder)
            self._endings[folder][ending] += 1
            successor = self._make_retry(end.job, ending, self._endings[folder][ending])
            if ending == Ending.REFUSED:
                self._refusals.append(detail)
                with suppress(OSError):  # the run ends with the reason all the same
                    stored.write_failure(detail, kind=ending)
            elif successor is not None:
                # Otherwise the next driver would skip the trial, should this one die.
                stored.clear_failure()
                folders = next((folders for job, folders in retries if job == successor), None)
                if folders is None:
                    retries.append((successor, folders := []))
                folders.append(folder)
                detail += "; it is resumed" if ending == Ending.PREEMPTED else "; it is tried again"
            elif ending == Ending.DONE:
                self._done += 1
                stored.remove_checkpoint_and_restore_spec()
                stored.remove_empty_log()
            else:
                self.failed += 1
                if ending != Ending.STOPPED:  # from outside, which leaves the trial intact, but incomplete
                    with suppress(OSError):  # if nothing can be written, the next run retries the trial
                        stored.mark_failed(detail, ending)
                    ending = Ending.FAILED
            self._session.watch.on_end(self._planned[folder], ending, detail)
        # In halves after every ending: a batch mostly lacks memory, and the kernel ends a worker without saying so.
        self._waiting += [half for job, folders in retries for half in job.halve_trials_in(folders)]

    def _make_retry(self, job: Job, ending: Ending, times: int) -> Job | None:
        """Return the job that retries a trial after its ``times``-th ending of this kind; None for no retry."""
        run = self._session.run
        if ending == Ending.OOM:
            if (larger := self._executor.with_more_memory(job)) is not None:
                return larger
            if run.on_oom == "cpu" and job.settings.device != "cpu":
                return replace(job, settings=replace(job.settings, device="cpu"), gpu=None)
        return job if times <= run.retries.allowed(ending) else None

    def _check_refusals(self) -> None:
        """Raise Refused if a worker has refused a trial, whose code is not the plan's."""
        if self._refusals:
            remaining = len(self._planned) - self._done - self.failed
            raise Refused(
                f"{self._refusals[0]}. Not trained: {format_count(remaining, 'trial')}; run the same command to plan "
                "again and train what is left; trials whose code is unchanged keep their results"
            )

    def _check_abort(self) -> None:
        """Raise TrialFailed if so many of the finished trials have failed that the study is to be aborted."""
        abort, finished, planned = self._session.run.abort_study, self._done + self.failed, len(self._planned)
        if abort is None or finished < abort.min_finished or finished == planned:
            return
        if self.failed >= abort.failed_fraction * finished:
            raise TrialFailed(
                f"run.abort_study: {self.failed} of the {finished} trials that ended have failed, and "
                f"{planned - finished} were not trained; 'vitlab status' lists the failures, and the same command "
                "resumes"
            )


def _is_ready(job: Job) -> bool:
    """Return True if the weights of all trials that the job depends on are available."""
    trials = job.folder.parents[1]
    return all(TrialFolder(trials / name).has_weights() for item in job.trials for name in item.trial.needs.values())


def _model_work_per_image(trial: Trial) -> Work | None:
    """Return the model's work per image; see :data:`vitlab.planning.engine_choice.Works`."""
    from vitlab.data.prepare import data_info

    model = slot("model").resolve_choice(trial.spec.model)
    work: Work | None = model.component.work(data_info(trial.spec.data), model.options)
    return work


def _weights_retention(run: RunSpec, analysis: Analysis, *, is_needed: bool) -> Keep:
    """Return the weights to keep; those of trials that other trials need are kept, whatever the study says."""
    which, every = run.keep.which, run.keep.every
    best = (analysis.metric.replace("test/", "val/"), analysis.goal) if which == "best" else None
    return Keep(is_needed or which != "none", every or 0, best)


def _make_job(
    session: Session, analysis: Analysis, dependencies: Collection[str], engine: str, group: Sequence[Planned]
) -> Job:
    """Return the job of trials, some of which may be in ``dependencies``, which other trials start from."""
    run, is_needed = session.run, any(item.trial.name in dependencies for item in group)
    return Job(
        tuple(
            JobTrial(f"{item.arm}/s{item.seed}", session.store.folder(item.trial).path, item.trial) for item in group
        ),
        Settings(
            threads=run.threads,
            device=run.device,
            deterministic=run.deterministic,
            keep=_weights_retention(run, analysis, is_needed=is_needed),
            plugins=session.plugin_files,
            every_s=run.checkpoint_interval,
            processes=run.resources.together,
            nodes=run.resources.nodes,
            micro_batch_size=run.micro_batch_size,
            activation_checkpointing=run.activation_checkpointing,
            engine=engine,
        ),
        timeout_s=run.timeout,
    )
