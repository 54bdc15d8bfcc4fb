"""Memory of trials trained together, relative to single trials, each in a fresh process."""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from contenders import MICRO, training_spec
from measuring import Row, row

from vitlab.planning.values import Trial
from vitlab.runner.execution import execute
from vitlab.runner.job import Job, JobTrial, Settings
from vitlab.spec import STREAMS, TrialSpec
from vitlab.store.folders import TrialFolder

MEMBERS = 16
GATE = 120.0
STEPS = 2


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _send_peak(pipe: Connection, members: int) -> None:
    """Return the peak bytes of a training, above the bytes after the imports."""
    torch.set_num_threads(1)
    spec = training_spec(MICRO)
    spec = {**spec, "train": {**spec["train"], "steps": STEPS, "evaluations": 1}}
    with tempfile.TemporaryDirectory() as folder:
        work = []
        for seed in range(members):
            seeds = {**dict.fromkeys(STREAMS, seed), "split": 0}
            work.append(
                (
                    Trial(TrialSpec.model_validate(spec), seeds, (), None, key=str(seed)),
                    TrialFolder(Path(folder) / str(seed)),
                )
            )
        settings = Settings(device="cpu", every_s=0.0, engine="loop" if members == 1 else "vmap")
        trials = tuple(JobTrial(trial.key, folder.path, trial) for trial, folder in work)
        before = _peak()
        execute(Job(trials, settings))
        bytes_held = _peak() - before
        if not all(folder.done() for _, folder in work):
            raise RuntimeError(f"a trial has failed: {[folder.failure() for _, folder in work]}")
    pipe.send(bytes_held)


def _in_a_process(members: int) -> int:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_peak, args=(theirs, members))
    process.start()
    theirs.close()
    peak: int = ours.recv()
    process.join()
    return peak


def measure() -> list[Row]:
    """Measure with a checkpoint after every step and one evaluation."""
    alone, together = _in_a_process(1), _in_a_process(MEMBERS)
    share = 100 * together / (MEMBERS * alone)
    return [
        row("memory", f"micro, {MEMBERS} together, to {MEMBERS} trials by themselves", [share], "%", "", GATE),
        row("memory", "micro, one trial by itself, above the imports", [alone / 2**20], "MiB", ""),
        row("memory", f"micro, {MEMBERS} together", [together / 2**20], "MiB", ""),
    ]
