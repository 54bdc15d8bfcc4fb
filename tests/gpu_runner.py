"""Replacement of ``vitlab.runner.execution`` on a GPU: a trial allocates the share of memory in its spec."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from executor_runner import result

from vitlab.errors import OutOfMemory
from vitlab.planning.values import Trial
from vitlab.runner.job import Job
from vitlab.store.folders import TrialFolder
from vitlab.store.result import TrialResult


def execute(job: Job, stop: Callable[[], bool]) -> list[TrialResult | None]:
    return [run_trial(item.trial, TrialFolder(item.folder), stop) for item in job.trials]


def run_trial(trial: Trial, folder: TrialFolder, stop: Callable[[], bool]) -> TrialResult | None:
    with folder.lease():
        stop()
        try:
            _, total = torch.cuda.mem_get_info()
            block = torch.empty(int(trial.spec.data.options["takes"] * total), dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from error
        stop()
        time.sleep(trial.spec.data.options["for"])
        del block
        folder.write_result(result(trial))
    return folder.result()
