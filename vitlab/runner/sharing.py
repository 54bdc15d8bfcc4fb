"""Train one trial in several processes, each with its share of every batch.

The calling process supervises them; rank 0 alone writes to the trial's folder.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import Lost, OutOfMemory, TrialFailed
from vitlab.models.contract import Model
from vitlab.plan.trial import Trial
from vitlab.registry import load_file
from vitlab.runner.attempt import Attempt, result_of
from vitlab.runner.failures import out_of_memory, sentence_of
from vitlab.runner.ranks import RankResult, launch_ranks
from vitlab.runner.settings import Settings, device_of, torch_settings
from vitlab.store.folders import Busy, TrialFolder
from vitlab.store.result import Circumstances, Measurement, Outcome, Result
from vitlab.training.distributed import PeerDied, RankMismatch, rendezvous
from vitlab.training.loop import Training, TrainingResult


def train_shared(trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool]) -> Result | None:
    """Train a trial in ``settings.processes`` processes; see :func:`vitlab.runner.run.run_trial`."""
    result = result_of(folder, settings)
    if result is not None:
        return result
    outcome = launch_ranks(settings.processes, _run_rank, (trial, folder, settings), stop)
    match outcome.how:
        case "done":
            return folder.result()
        case "stopped":
            return None
        case "busy":
            raise Busy(str(folder.path))
        case "lost":
            raise Lost(outcome.sentence)
    with suppress(Busy), folder.lease():
        folder.fail(outcome.sentence, outcome.traceback, outcome.how)
        folder.emit("end", status="failed", failure=outcome.sentence)
    raise (OutOfMemory if outcome.how == "oom" else TrialFailed)(outcome.sentence) from _RemoteTraceback(
        outcome.traceback
    )


def _run_rank(
    rank: int, place: Path, stop: Callable[[], bool], trial: Trial, folder: TrialFolder, settings: Settings
) -> RankResult:
    """Run one rank; see :data:`vitlab.runner.ranks.Work`."""
    try:
        for plugin in settings.plugins:
            load_file(plugin)
        with ExitStack() as contexts:
            if rank == 0:
                contexts.enter_context(folder.lease())
                if result_of(folder, settings) is not None:
                    return RankResult("done")
            device = device_of(settings.device)
            peers = contexts.enter_context(
                rendezvous(rank, settings.processes, place, device)
            )  # first, since it chooses the GPU
            contexts.enter_context(torch_settings(settings, device))
            attempt = (Attempt if rank == 0 else _ReadOnlyAttempt)(trial, folder, settings, device, peers)
            return RankResult("stopped" if attempt.train(peers.any_rank(stop)) is None else "done")
    except Busy:
        return RankResult("busy")
    except PeerDied as error:
        return RankResult("gone", str(error), traceback.format_exc())
    except RankMismatch as error:
        return RankResult("lost", str(error), traceback.format_exc())
    except (Exception, SystemExit) as error:  # of any component
        how: Literal["oom", "error"] = "oom" if out_of_memory(error) else "error"
        return RankResult(how, sentence_of(error, trial), traceback.format_exc())


class _RemoteTraceback(Exception):
    """The traceback of another process, used as the cause of an error."""

    def __str__(self) -> str:
        return f"in another process\n{self.args[0]}"


class _ReadOnlyAttempt(Attempt):
    """The attempt of a rank other than 0, which writes nothing."""

    def open(self) -> None:
        pass

    def log_start(self, training: Training, note: str) -> None:
        pass

    def log(self, measurement: Measurement) -> None:
        pass

    def save(self, state: Mapping[str, Any]) -> None:
        pass

    def write_result(self, trained: TrainingResult, model: Model, circumstances: Circumstances) -> Result:
        return Result(self.trial.key, self.trial.code, "done", _NO_OUTCOME, circumstances)


_NO_OUTCOME = Outcome({}, (), "", 0, 0)
