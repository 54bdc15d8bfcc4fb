"""A trial, from its spec to its result: what a worker does.

Everything is written to the trial's folder while its lease is held.  Whoever takes the lease goes on where the last one
was: from the checkpoint, and after the last line of the journal.
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
from vitlab.runner.settings import Settings, device_of, torch_set
from vitlab.runner.sharing import train_shared
from vitlab.store.folders import Busy, TrialFolder
from vitlab.store.result import Result
from vitlab.training.cohort import Member, require_stackable, train_cohort
from vitlab.training.loop import Trained, Training

__all__ = ["Settings", "begin_trial", "run_cohort", "run_trial"]


def check_trial(trial: Trial) -> None:
    """Refuse a trial that would not be, here, what it was planned to be.

    Raises:
        Refused: if the code that this process runs is not that the trial was planned under, or a component of it is not
            here at all.
    """
    if not trial.code:
        return  # nobody planned it
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
        raise Refused(f"what this trial is made of is not here as it was planned: {error}") from error
    sentence = source.mixed(modules)
    if code != trial.code:
        sentence = (
            sentence
            or source.edited(modules)
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
    """Train a trial, or go on with it, or find that it has ended.

    Args:
        trial: what to run.
        folder: where; everything is written there.
        settings: on what, and what to keep.
        stop: asked before every step.

    Returns:
        the result (``diverged`` is one), or None if it was stopped; then a checkpoint waits for the next call.

    Raises:
        Busy: if another process has the trial.
        Refused: if it would not be what it was planned to be; then nothing is written.
        OutOfMemory: if memory ran out.
        Lost: if one of several processes died.
        Exception: whatever the trial or its components raise; the reason is in the folder, too.
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
            with torch_set(settings, device):
                return Attempt(trial, folder, settings, device).train(stop)
        except Exception as error:
            sentence = record(error, trial, folder)
            if out_of_memory(error):
                raise OutOfMemory(sentence) from error
            raise


def run_cohort(
    work: Sequence[tuple[Trial, TrialFolder]], settings: Settings, stop: Callable[[], bool] = lambda: False
) -> None:
    """Train trials of one shape together, their weights stacked.  What becomes of each stands in its folder.

    Their engine is ``settings.engine``.  Where it does not know their models ``vmap`` is, and where these cannot be
    stacked at all they are trained one after another; their journals say why.  Where memory runs out, they are trained
    in halves.

    Args:
        work: trials of equal :func:`vitlab.plan.cohorts.stack_key`, and where they live.  Those that have ended, and
            those that another process has, are left alone.
        settings: as of :func:`run_trial`.
        stop: asked before every step; what has not ended then has a checkpoint.

    Raises:
        Busy: if another process has taken one of them over; those that have not ended may go on.
        Refused: if one of them would not be what it was planned to be; then nothing is written.
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
        with torch_set(settings, attempts[0].device):
            try:
                _together(attempts, stop)
                return
            except Busy:  # one of them was taken over
                raise
            except Exception as error:
                left = [attempt for attempt in attempts if not attempt.over]
                if not out_of_memory(error) or len(attempts) == 1:
                    for attempt in left:
                        attempt.failed(error)
                    return
    half = len(work) // 2
    run_cohort(work[:half], settings, stop)
    run_cohort(work[half:], settings, stop)


@contextmanager
def begin_trial(trial: Trial, folder: TrialFolder, settings: Settings) -> Iterator[Training]:
    """A trial before its first step, with torch set as it wants it: for whoever wants to see how its training begins.

    Raises:
        Busy: if another process has the trial.
    """
    for plugin in settings.plugins:
        load_file(plugin)
    check_trial(trial)
    device = device_of(settings.device)
    with folder.lease(), torch_set(settings, device):
        yield Attempt(trial, folder, settings, device).begin("loop")


# -- how it is done ----------------------------------------------------------------------------------------------------


def _together(attempts: Sequence[Attempt], stop: Callable[[], bool]) -> None:
    """Train several as a cohort; one that cannot even begin fails, and the others go on without it."""
    begun: list[tuple[Attempt, Training]] = []
    for attempt in attempts:
        try:
            begun.append((attempt, attempt.begin(attempt.settings.engine)))
        except Busy:  # it was taken over
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            attempt.failed(error)
    steps = [training.step for _, training in begun]
    try:
        for _, training in begun:
            require_stackable(training.model)
        members = [Member(training, attempt.tell, attempt.save) for attempt, training in begun]
        how = begun[0][0].stacking if begun else "vmap"
        ended = train_cohort(members, engine=how, stop=stop, every_s=attempts[0].settings.every_s)
    except Busy:  # one was taken over, which says nothing of stacking
        raise
    except Exception as error:
        if out_of_memory(error) or [training.step for _, training in begun] != steps:
            raise
        note = f"trained by itself, for it could not be stacked: {sentence_of(error, attempts[0].trial)}"
        for attempt, _ in begun:
            try:
                attempt.train(stop, note)
            except Busy:  # it was taken over
                raise
            except Exception as own:
                attempt.failed(own)
        return

    def finish(attempt: Attempt, training: Training, trained: Trained | None) -> None:
        if trained is not None:
            try:
                attempt.finish(training, trained, len(begun))
            except Busy:  # it was taken over
                raise
            except Exception as error:  # such as a full disk, and it is this member's alone
                attempt.failed(error)

    with ThreadPoolExecutor(len(begun)) as threads:  # which wait for the disk together
        list(threads.map(finish, *zip(*begun, strict=True), ended))
