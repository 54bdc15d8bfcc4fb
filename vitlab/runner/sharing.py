"""One trial trained by several processes, each with its share of every batch.

The process that is asked for it watches over them; the first of them writes to the trial's folder.
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
from vitlab.runner.ranks import RankResult, together
from vitlab.runner.settings import Settings, device_of, torch_set
from vitlab.store.folders import Busy, TrialFolder
from vitlab.store.result import Circumstances, Measurement, Outcome, Result
from vitlab.training.distributed import PeerDied, RankMismatch, rendezvous
from vitlab.training.loop import Trained, Training


def train_shared(trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool]) -> Result | None:
    """See :func:`vitlab.runner.run.run_trial`."""
    result = result_of(folder, settings)
    if result is not None:
        return result
    word = together(settings.processes, _share, (trial, folder, settings), stop)
    match word.how:
        case "done":
            return folder.result()
        case "stopped":
            return None
        case "busy":
            raise Busy(str(folder.path))
        case "lost":
            raise Lost(word.sentence)
    with suppress(Busy), folder.lease():
        folder.fail(word.sentence, word.traceback, word.how)
        folder.emit("end", status="failed", failure=word.sentence)
    raise (OutOfMemory if word.how == "oom" else TrialFailed)(word.sentence) from _Elsewhere(word.traceback)


def _share(
    rank: int, place: Path, stop: Callable[[], bool], trial: Trial, folder: TrialFolder, settings: Settings
) -> RankResult:
    """What each of several processes does; see :data:`vitlab.runner.ranks.Work`."""
    try:
        for plugin in settings.plugins:
            load_file(plugin)
        with ExitStack() as held:
            if rank == 0:
                held.enter_context(folder.lease())
                if result_of(folder, settings) is not None:
                    return RankResult("done")
            device = device_of(settings.device)
            peers = held.enter_context(rendezvous(rank, settings.processes, place, device))  # chooses the GPU, so first
            held.enter_context(torch_set(settings, device))
            attempt = (Attempt if rank == 0 else _Onlooker)(trial, folder, settings, device, peers)
            return RankResult("stopped" if attempt.train(peers.any_rank(stop)) is None else "done")
    except Busy:
        return RankResult("busy")
    except PeerDied as error:
        return RankResult("gone", str(error), traceback.format_exc())
    except RankMismatch as error:
        return RankResult("lost", str(error), traceback.format_exc())
    except (Exception, SystemExit) as error:  # whatever a guest raises
        how: Literal["oom", "error"] = "oom" if out_of_memory(error) else "error"
        return RankResult(how, sentence_of(error, trial), traceback.format_exc())


class _Elsewhere(Exception):
    """The traceback of another process, as the cause of what is raised here."""

    def __str__(self) -> str:
        return f"in another process\n{self.args[0]}"


class _Onlooker(Attempt):
    """The work of every process on a trial but the first: the same, and nothing of it is written."""

    def open(self) -> None:
        pass

    def log_start(self, training: Training, note: str) -> None:
        pass

    def tell(self, measurement: Measurement) -> None:
        pass

    def save(self, state: Mapping[str, Any]) -> None:
        pass

    def write_result(self, trained: Trained, model: Model, circumstances: Circumstances) -> Result:
        return Result(self.trial.key, self.trial.code, "done", _NOTHING, circumstances)


_NOTHING = Outcome({}, (), "", 0, 0)
