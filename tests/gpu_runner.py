"""Replacement of ``vitlab.runner.execution`` on a GPU: a trial allocates the share of memory in its spec."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from executor_runner import end_of, result

from vitlab.planning.values import Trial
from vitlab.runner.job import Job, TrialEnd
from vitlab.store.folders import TrialFolder
from vitlab.store.result import TrialResult


def execute(job: Job, stop: Callable[[], bool]) -> list[TrialEnd]:
    return [end_of(run_trial(item.trial, TrialFolder(item.folder), stop)) for item in job.trials]


def run_trial(trial: Trial, folder: TrialFolder, stop: Callable[[], bool]) -> TrialResult | None:
    with folder.lease():
        stop()
        try:
            _, total = torch.cuda.mem_get_info()
            block = torch.empty(int(trial.spec.data.options["takes"] * total), dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        stop()
        time.sleep(trial.spec.data.options["for"])
        del block
        folder.write_result(result(trial))
    return folder.result()
