"""Jobs: trials and how to run them, as values.  Imports no torch, so that executors and the driver can use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from vitlab.identity.trial import Trial
from vitlab.store.folders import LAST, Keep, TrialFolder
from vitlab.store.result import Ending

NODE_VARIABLE = "GROUP_RANK"
"""Environment variable with the number of this machine among those of a trial, as torchrun sets it, with the variables
``MASTER_ADDR`` and ``MASTER_PORT``, at which the processes of all machines find each other."""


Stop = Callable[[], bool]
"""Returns True once a training is to stop; it is called before every step."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run, which are not part of a trial's identity."""

    threads: int = 1
    device: str = "auto"  #: auto, cpu, cuda or mps
    deterministic: bool = True
    keep: Keep = LAST  #: trained weights to keep
    plugins: tuple[str, ...] = ()  #: files of components to load first
    every_s: float = 60.0  #: longest time between two checkpoints
    processes: int = 1  #: processes per trial, each with its share of every batch
    nodes: int = 1  #: machines that these processes are divided among
    micro_batch_size: int | None = None  #: images that a process computes at a time; None for all
    activation_checkpointing: str = "none"  #: none or blocks
    engine: str = "loop"  #: one of the slot ``engine``


@dataclass(frozen=True)
class JobTrial:
    """A trial of a job."""

    name: str  #: display name, such as ``arm/s0``
    folder: Path  #: the trial's folder; equal for two trials if and only if they have the same key and code
    trial: Trial


@dataclass(frozen=True)
class Job:
    """A list of trials and how to run them.  Several trials have one shape and are trained together."""

    trials: tuple[JobTrial, ...]
    settings: Settings = Settings()
    timeout_s: float | None = None  #: time limit of training
    gpu: float | None = None  #: share of a GPU; None for the share of ``run.resources``
    #: module whose ``execute`` trains the trials, in the worker; only tests replace it
    runner: str = "vitlab.runner.execution"

    @property
    def name(self) -> str:
        """Display name of the job: its first trial's name."""
        return self.trials[0].name

    @property
    def folder(self) -> Path:
        """Folder of the first trial, which identifies the job and holds its log."""
        return self.trials[0].folder

    @property
    def folders(self) -> list[Path]:
        """Folder of every trial."""
        return [item.folder for item in self.trials]

    def halve_trials_in(self, folders: Sequence[Path]) -> list[Job]:
        """Return the trials in ``folders`` as two jobs of half the size, which need less memory; a single one as one.

        The other trials of this job are in neither.
        """
        selected = tuple(item for item in self.trials if item.folder in folders)
        half = len(selected) // 2
        return [replace(self, trials=part) for part in (selected[:half], selected[half:]) if part]


class Deferral(StrEnum):
    """Why a process leaves the ending of a trial to another process."""

    BUSY = "busy"  #: another process holds the trial
    PEER_DIED = "peer died"  #: another process of the trial has died, or has failed and reports the cause


@dataclass(frozen=True)
class TrialEnd:
    """How an attempt at one trial of a job has ended, in its worker."""

    ending: Ending | Deferral
    detail: str = ""  #: one sentence on a failure, or on a training that diverged
    traceback: str = ""


def stored_end(folder: TrialFolder, keep: Keep) -> TrialEnd | None:
    """Return how a trial has ended that has a result, with the weights to keep; None for another one."""
    result = folder.result_unless_weights_lost(keep)
    return None if result is None else TrialEnd(Ending.DONE, result.failure)
