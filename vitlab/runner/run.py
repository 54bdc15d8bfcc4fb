"""Run trials on a worker, from their specs to their results.

Everything is written to the trial's folder while its lock is held.  The next process that takes the lock resumes from
the checkpoint and continues the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

from vitlab.errors import OutOfMemory, Refused, VitlabError
from vitlab.plan import source
from vitlab.plan.key import RUNNER, closure, code_of, modules_of_spec, refresh
from vitlab.plan.trial import Trial
from vitlab.registry import load_file
from vitlab.runner.attempt import Attempt, result_of
from vitlab.runner.circumstances import versions
from vitlab.runner.failures import out_of_memory, record, sentence_of
from vitlab.runner.settings import Settings, device_of, torch_settings
from vitlab.runner.sharing import train_shared
from vitlab.store.folders import Busy, TrialFolder
from vitlab.store.result import Result
from vitlab.training.cohort import Member, require_stackable, train_cohort
from vitlab.training.loop import Training, TrainingResult

__all__ = ["Settings", "begin_trial", "run_cohort", "run_trial"]


def check_trial(trial: Trial) -> None:
    """Check that this process runs the code and versions that a trial was planned with.

    Raises:
        Refused: If the code or a version differs, or a component of the trial is missing.
    """
    if not trial.code:
        return  # the trial has no plan
    here = versions()
    missing = [
        f"{name} {version}, not {here.get(name)}"
        for name, version in trial.versions.items()
        if here.get(name) != version
    ]
    if missing:
        raise Refused(f"this trial was planned under {' and '.join(missing)}; plan it again with 'vitlab run'")
    refresh()
    try:
        code = code_of(trial.spec, trial.needs, trial.versions, source.loaded)
        modules = closure({RUNNER, *modules_of_spec(trial.spec)}, source.loaded)
    except VitlabError as error:
        raise Refused(f"the components of this trial differ from its plan: {error}") from error
    sentence = source.mixed_versions_message(modules)
    if code != trial.code:
        sentence = (
            sentence
            or source.edited_module_message(modules)
            or (
                f"the code here ({code[:12]}) is not the code this trial was planned under ({trial.code[:12]}); "
                "plan it again with 'vitlab run'"
            )
        )
    if sentence:
        raise Refused(sentence)


def run_trial(
    trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool] = lambda: False
) -> Result | None:
    """Train a trial, resume it, or return its stored result.

    Args:
        trial: The trial.
        folder: Its folder; nothing is written elsewhere.
        settings: Device, threads and files to keep.
        stop: Called before every step; training stops once it returns True.

    Returns:
        The result, whose status may be ``diverged``, or None if training was stopped after writing a checkpoint.

    Raises:
        Busy: If another process holds the trial.
        Refused: If code or versions differ from the plan; then nothing is written.
        OutOfMemory: If memory ran out.
        Lost: If one of several processes died.
        Exception: Any error of the trial or its components; it is recorded in the folder too.
    """
    for plugin in settings.plugins:
        load_file(plugin)
    check_trial(trial)
    if settings.processes > 1:
        return train_shared(trial, folder, settings, stop)
    with folder.lease():
        result = result_of(folder, settings)
        if result is not None:
            return result
        try:
            device = device_of(settings.device)
            with torch_settings(settings, device):
                return Attempt(trial, folder, settings, device).train(stop)
        except Exception as error:
            sentence = record(error, trial, folder)
            if out_of_memory(error):
                raise OutOfMemory(sentence) from error
            raise


def run_cohort(
    work: Sequence[tuple[Trial, TrialFolder]], settings: Settings, stop: Callable[[], bool] = lambda: False
) -> None:
    """Train trials of one shape together, with stacked weights.  The outcome of each is stored in its folder.

    The engine is ``settings.engine``.  Models it does not support are trained by ``vmap``, and models that cannot be
    stacked one after another; the journals state the reason.  If memory runs out, each half is trained separately.

    Args:
        work: Trials of equal :func:`vitlab.plan.cohorts.stack_key`, and their folders.  Trials that have ended or are
            locked by another process are skipped.
        settings: See :func:`run_trial`.
        stop: Called before every step; unfinished trials then have a checkpoint.

    Raises:
        Busy: If another process has taken one of them over; unfinished trials can be resumed.
        Refused: If code or versions differ from the plan of one of them; then nothing is written.
    """
    for plugin in settings.plugins:
        load_file(plugin)
    for trial, _ in work:
        check_trial(trial)
    with ExitStack() as leases:
        attempts: list[Attempt] = []
        for trial, folder in work:
            with suppress(Busy):
                leases.enter_context(folder.lease())
                if result_of(folder, settings) is None:
                    attempts.append(Attempt(trial, folder, settings, device_of(settings.device)))
        if not attempts:
            return
        with torch_settings(settings, attempts[0].device):
            try:
                _train_together(attempts, stop)
                return
            except Busy:  # one of them was taken over
                raise
            except Exception as error:
                unfinished = [attempt for attempt in attempts if not attempt.over]
                if not out_of_memory(error) or len(attempts) == 1:
                    for attempt in unfinished:
                        attempt.record_failure(error)
                    return
    half = len(work) // 2
    run_cohort(work[:half], settings, stop)
    run_cohort(work[half:], settings, stop)


@contextmanager
def begin_trial(trial: Trial, folder: TrialFolder, settings: Settings) -> Iterator[Training]:
    """Yield the training of a trial before its first step, under the trial's torch settings, for inspection.

    Raises:
        Busy: If another process holds the trial.
    """
    for plugin in settings.plugins:
        load_file(plugin)
    check_trial(trial)
    device = device_of(settings.device)
    with folder.lease(), torch_settings(settings, device):
        yield Attempt(trial, folder, settings, device).begin("loop")


# -- helpers -----------------------------------------------------------------------------------------------------------


def _train_together(attempts: Sequence[Attempt], stop: Callable[[], bool]) -> None:
    """Train several attempts as a cohort, without those that fail to begin."""
    started: list[tuple[Attempt, Training]] = []
    for attempt in attempts:
        try:
            started.append((attempt, attempt.begin(attempt.settings.engine)))
        except Busy:  # it was taken over
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            attempt.record_failure(error)
    steps = [training.step for _, training in started]
    try:
        for _, training in started:
            require_stackable(training.model)
        members = [Member(training, attempt.log, attempt.save) for attempt, training in started]
        engine = started[0][0].stacking if started else "vmap"
        results = train_cohort(members, engine=engine, stop=stop, every_s=attempts[0].settings.every_s)
    except Busy:  # one was taken over, which is unrelated to stacking
        raise
    except Exception as error:
        if out_of_memory(error) or [training.step for _, training in started] != steps:
            raise
        note = f"trained by itself, for it could not be stacked: {sentence_of(error, attempts[0].trial)}"
        for attempt, _ in started:
            try:
                attempt.train(stop, note)
            except Busy:  # it was taken over
                raise
            except Exception as own:
                attempt.record_failure(own)
        return

    def finish(attempt: Attempt, training: Training, trained: TrainingResult | None) -> None:
        if trained is not None:
            try:
                attempt.finish(training, trained, len(started))
            except Busy:  # it was taken over
                raise
            except Exception as error:  # such as a full disk; the other members are not affected
                attempt.record_failure(error)

    with ThreadPoolExecutor(len(started)) as threads:  # one thread per member, so that they wait for the disk together
        list(threads.map(finish, *zip(*started, strict=True), results))
