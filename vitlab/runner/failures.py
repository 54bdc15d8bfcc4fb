"""Failures of attempts: their kind, their sentence and their record."""

from __future__ import annotations

import traceback

import torch

from vitlab.plan.trial import Trial
from vitlab.registry.blame import sentence_with_place
from vitlab.store.folders import TrialFolder

OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""Messages of RuntimeErrors that torch raises when memory runs out, instead of torch.OutOfMemoryError."""


def record(error: Exception, trial: Trial, folder: TrialFolder) -> str:
    """Record why a trial failed, and return it as one sentence."""
    sentence = sentence_of(error, trial)
    kind = "oom" if out_of_memory(error) else "error"
    folder.fail(sentence, "".join(traceback.format_exception(error)), kind)
    folder.emit("end", status="failed", failure=sentence)
    return sentence


def out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that the host or the device ran out of memory."""
    matches = isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)
    return matches or isinstance(error, MemoryError | torch.OutOfMemoryError)


def sentence_of(error: BaseException, trial: Trial) -> str:
    """Return why a trial failed; errors from outside vitlab get their type and the line in the plugin."""
    if out_of_memory(error):
        batch_size = trial.spec.train.batch_size
        return (
            f"memory ran out, with train.batch_size {batch_size}; a smaller one, a smaller model, "
            f"or fewer trials at a time (run.workers) need less"
        )
    return sentence_with_place(error)
