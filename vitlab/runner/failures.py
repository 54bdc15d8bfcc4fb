"""Why an attempt at a trial ended without a result: of which kind it is, in one sentence, and written down."""

from __future__ import annotations

import traceback

import torch

from vitlab.plan.trial import Trial
from vitlab.registry.blame import sentence_with_place
from vitlab.store.folders import TrialFolder

OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""What the errors say that torch raises for it without a type of their own."""


def record(error: Exception, trial: Trial, folder: TrialFolder) -> str:
    """Leave behind why a trial failed, in one sentence, and return it."""
    sentence = sentence_of(error, trial)
    kind = "oom" if out_of_memory(error) else "error"
    folder.fail(sentence, "".join(traceback.format_exception(error)), kind)
    folder.emit("end", status="failed", failure=sentence)
    return sentence


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the host or of the device, be it where a library of the device asked for it."""
    said = isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)
    return said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def sentence_of(error: BaseException, trial: Trial) -> str:
    """Return why a trial failed: our own errors as they are, others with their type and the line of a plugin."""
    if out_of_memory(error):
        batch_size = trial.spec["train"].get("batch_size")
        return (
            f"memory ran out, with train.batch_size {batch_size}; a smaller one, a smaller model, "
            f"or fewer trials at a time (run.workers) need less"
        )
    return sentence_with_place(error)
