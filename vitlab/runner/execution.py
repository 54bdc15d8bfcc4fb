"""Run trials on a worker, from their specs to their results.

Everything is written to the trial's folder while its lock is held.  The next process that takes the lock resumes from
the checkpoint and continues the journal.
"""

import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitlab.engines.base import EngineFailed, train
from vitlab.errors import Refused, UserError, VitlabError
from vitlab.identity import source
from vitlab.identity.code import (
    clear_caches,
    edited_module_message,
    mixed_versions_message,
    modules_of_spec,
    resolve_spec,
    trial_code_digest,
    trial_module_digests,
)
from vitlab.identity.trial import Trial
from vitlab.registry import load_file
from vitlab.runner.attempt import Attempt, describe_failure, end_of, record_failure
from vitlab.runner.circumstances import require_versions
from vitlab.runner.job import NODE_VARIABLE, Deferral, Job, Settings, Stop, TrialEnd, stored_end
from vitlab.runner.ranks import launch_ranks
from vitlab.spec import TrialSpec
from vitlab.store.folders import TrialFolder
from vitlab.store.locks import Busy
from vitlab.store.result import Ending, Outcome
from vitlab.training.distributed import PeerDied, RankMismatch, join_process_group
from vitlab.training.memory import is_out_of_memory


def resolve_as_planned(trials: Iterable[Trial]) -> list[Trial]:
    """Return trials with their choices resolved.

    Raises:
        Refused: If this process runs other code or versions than a trial was planned with, or lacks a component.
    """
    clear_caches()
    return [replace(trial, spec=_resolve_and_verify_code(trial)) for trial in trials]


def _resolve_and_verify_code(trial: Trial) -> TrialSpec:
    """Return the spec of a trial, resolved; for what it raises see :func:`resolve_as_planned`."""
    if not trial.code:  # it has no plan
        return resolve_spec(trial.spec)
    require_versions(trial.versions)
    try:
        spec = resolve_spec(trial.spec)
        roots = modules_of_spec(spec)
        code = trial_code_digest(roots, trial.needs, trial.versions, source.read_source_as_imported)
        modules = trial_module_digests(roots, source.read_source_as_imported)
    except VitlabError as error:
        raise Refused(
            f"the components of this trial differ from its plan: {error}; plan it again with 'vitlab run'"
        ) from error
    sentence = mixed_versions_message(modules)
    if code != trial.code:
        sentence = (
            sentence
            or edited_module_message(modules)
            or (
                f"the code here ({code[:12]}) is not the code this trial was planned under ({trial.code[:12]}); "
                "plan it again with 'vitlab run'"
            )
        )
    if sentence:
        raise Refused(sentence)
    return spec


def execute(job: Job, stop: Stop = lambda: False) -> list[TrialEnd]:
    """Train the trials of a job, or resume them; write to their folders alone, and return how each has ended.

    An engine that does not support them is replaced by its fallback; the journals state the reason.  If memory runs
    out, the halves are trained separately.

    Args:
        job: The trials, of equal :func:`vitlab.planning.engine_choice.joint_training_key` if there are several.
        stop: Called before every step; training stops once it returns True.

    Returns:
        For each trial ``done`` if it has a result, which may be diverged; ``stopped`` after writing a checkpoint;
        ``busy`` if another process holds it; ``lost`` if one of its processes died; or ``error`` or ``oom``, which its
        folder records.

    Raises:
        Refused: If code or versions differ from the plan of a trial; then nothing is written.
        VitlabError: If a plugin cannot be loaded, or the device does not exist.
    """
    settings = job.settings
    _load_plugins(settings)
    trials = resolve_as_planned(item.trial for item in job.trials)
    if settings.processes > 1:
        return [_run_in_ranks(item.trial, TrialFolder(item.folder), settings, stop) for item in job.trials]
    device = torch_device(settings.device)
    too_large = False
    with ExitStack() as contexts:  # which holds the locks of the trials
        opened: list[Attempt | TrialEnd] = [
            _open_attempt(trial, TrialFolder(folder), settings, device, contexts)
            for trial, folder in zip(trials, job.folders, strict=True)
        ]
        attempts = [each for each in opened if isinstance(each, Attempt)]
        contexts.enter_context(torch_settings(settings, device, trials[0].spec.train.precision))
        try:
            _train_attempts_with_fallback(attempts, settings.engine, stop)
        except Exception as error:
            too_large = is_out_of_memory(error) and len(attempts) > 1
            for attempt in attempts:
                if attempt.end is None and not too_large:
                    attempt.end_with_error(error)
    if too_large:
        # Only here, where the error is gone with its tensors, and the locks are free again.
        del opened, attempts
        return [end for half in job.halve_trials_in(job.folders) for end in execute(half, stop)]
    ends = [each.end if isinstance(each, Attempt) else each for each in opened]
    # An attempt without an end was stopped, and has written a checkpoint.
    return [end or TrialEnd(Ending.STOPPED) for end in ends]


def _open_attempt(
    trial: Trial, folder: TrialFolder, settings: Settings, device: torch.device, contexts: ExitStack
) -> Attempt | TrialEnd:
    """Return an attempt at a trial whose lock ``contexts`` holds; if it has a result or is busy, return that."""
    try:
        contexts.enter_context(folder.lease())
    except Busy as error:
        return end_of(error, trial)
    if end := stored_end(folder, settings.keep):
        return end
    attempt = Attempt(trial, folder, settings, device)
    contexts.enter_context(attempt.writer)  # left, and a checkpoint written, before the lease
    return attempt


@contextmanager
def begin_attempt(trial: Trial, folder: TrialFolder, settings: Settings) -> Iterator[Attempt]:
    """Yield an attempt before the first step of its training, under the trial's torch settings."""
    _load_plugins(settings)
    [trial] = resolve_as_planned([trial])
    device = torch_device(settings.device)
    with folder.lease(), torch_settings(settings, device, trial.spec.train.precision):
        attempt = Attempt(trial, folder, settings, device)
        with attempt.writer:
            attempt.build_or_resume_training("loop")
            yield attempt


def torch_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``mps``; raise UserError if it does not exist here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda, and torch finds no CUDA device; set run.device: cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("run.device is mps, and torch finds no GPU of Apple here; set run.device: cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@contextmanager
def torch_settings(settings: Settings, device: torch.device, precision: str) -> Iterator[None]:
    """Apply a trial's torch settings inside the block, and restore the process's settings afterwards."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    allowed = [each.allow_tf32 for each in backends]
    threads = torch.get_num_threads()
    debug_mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS for deterministic results
    if settings.deterministic:
        # Otherwise the rounding of MKL depends on memory alignment, and so on a trial's position in its batch.  MKL
        # reads the variable at the first product of a process, so every trial sets it, in a batch or not.
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    try:
        torch.set_num_threads(settings.threads)
        for each in backends:  # torch's default is tf32 in convolutions and not in products
            each.allow_tf32 = precision == "tf32"
        # As use_deterministic_algorithms, but that imports torch._inductor, for the engine compiled alone.
        torch.set_deterministic_debug_mode("error" if settings.deterministic else "default")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(threads)
        for each, value in zip(backends, allowed, strict=True):
            each.allow_tf32 = value
        torch.set_deterministic_debug_mode(debug_mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _load_plugins(settings: Settings) -> None:
    for plugin in settings.plugins:
        load_file(plugin)


def _train_attempts_with_fallback(attempts: Sequence[Attempt], engine: str, stop: Stop) -> None:
    """Train attempts by an engine, those at whose first step it fails by its fallback, and write their results.

    An error ends an attempt that was trained alone; an error of several is raised.
    """
    to_train: list[tuple[Sequence[Attempt], str, str]] = [(attempts, engine, "")]
    while to_train:
        started = _try_begin_trainings(*to_train.pop(0))
        alone = any(attempt.engine_type.one_at_a_time for attempt in started)
        for batch in [[each] for each in started] if alone or not started else [started]:
            first, trainings = batch[0], [attempt.training for attempt in batch]
            try:
                outcomes = train(trainings, first.engine_type, stop=stop, every_s=first.settings.every_s)
            except EngineFailed as failed:
                reason = f"engine {first.engine} failed: {describe_failure(failed.error, first.trial)}"
                to_train.append((batch, failed.fallback, f"trained by engine {failed.fallback}, for {reason}"))
            except Exception as error:
                if not alone:
                    raise
                first.end_with_error(error)
            else:
                _write_results(batch, outcomes)


def _try_begin_trainings(attempts: Sequence[Attempt], engine: str, note: str) -> list[Attempt]:
    """Return the attempts whose trainings have begun; one whose training cannot begin is ended."""
    started = []
    for attempt in attempts:
        try:
            attempt.build_or_resume_training(engine, note)
            started.append(attempt)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            attempt.end_with_error(error)
    return started


def _write_results(batch: Sequence[Attempt], outcomes: Sequence[Outcome | None]) -> None:
    """Write the results of trainings that have ended; those that were stopped have no outcome."""
    # Trials trained together share the time equally; it ends here for all, before the first one writes its files.
    shares_s = [attempt.spent_s() / len(batch) for attempt in batch]
    for attempt, outcome, share_s in zip(batch, outcomes, shares_s, strict=True):
        try:
            if outcome is None:
                attempt.wait_for_checkpoint()
            else:
                attempt.end_with_outcome(outcome, share_s)
        except Exception as error:  # such as a full disk; other trials are not affected
            attempt.end_with_error(error)


# -- several processes per trial ---------------------------------------------------------------------------------------


def _run_in_ranks(trial: Trial, folder: TrialFolder, settings: Settings, stop: Stop) -> TrialEnd:
    """Train a trial in several processes, of which this one supervises those of this machine.

    Rank 0 alone writes to the trial's folder.  On another machine than the first, nothing is known at the end but
    whether its ranks have failed.
    """
    # A trial of one machine may be trained by a program that torchrun has started, which has a number of its own.
    node = int(os.environ.get(NODE_VARIABLE, 0)) if settings.nodes > 1 else 0
    own = settings.processes // settings.nodes
    if end := stored_end(folder, settings.keep):
        return end
    end = launch_ranks(range(node * own, (node + 1) * own), _run_rank, (trial, folder, settings), stop)
    # Of a lost one nothing is recorded, as when a whole worker dies.
    if node == 0 and end.ending in (Ending.OOM, Ending.ERROR):
        with suppress(Busy), folder.lease():
            record_failure(folder, end)
    return end


def _run_rank(
    rank: int, rendezvous: Path, stop: Stop, trial: Trial, folder: TrialFolder, settings: Settings
) -> TrialEnd:
    """Run one rank; see :data:`vitlab.runner.ranks.RankFunction`."""
    try:
        _load_plugins(settings)
        with ExitStack() as contexts:
            if rank == 0:
                contexts.enter_context(folder.lease())
                if end := stored_end(folder, settings.keep):
                    return end
            device = torch_device(settings.device)
            peers = contexts.enter_context(
                join_process_group(rank, settings.processes, rendezvous, device, settings.nodes)
            )  # first, since it chooses the GPU
            contexts.enter_context(torch_settings(settings, device, trial.spec.train.precision))
            own = replace(trial, spec=resolve_spec(trial.spec))
            attempt = Attempt(own, folder, settings, device, peers)
            contexts.enter_context(attempt.writer)
            [outcome] = train(
                [attempt.build_or_resume_training("loop")], stop=peers.share_stop(stop), every_s=settings.every_s
            )
            if outcome is not None and attempt.writes:
                attempt.end_with_outcome(outcome, attempt.spent_s())
            attempt.wait_for_checkpoint()
            return TrialEnd(Ending.STOPPED) if outcome is None else TrialEnd(Ending.DONE, attempt.training.failure)
    except PeerDied as error:
        return TrialEnd(Deferral.PEER_DIED, str(error), traceback.format_exc())
    except RankMismatch as error:
        return TrialEnd(Ending.LOST, str(error), traceback.format_exc())
    except (Exception, SystemExit) as error:  # of any component
        return end_of(error, trial)
