"""Stands in for ``vitlab.trial`` in tests of Ray: the same trial, slower, with a checkpoint after every step.

Steps take the time that VITLAB_TEST_STEP_S says, so that a test can come in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitlab import trial
from vitlab.plan.values import Trial
from vitlab.result import Result
from vitlab.store import TrialFolder, write_json


@dataclass(frozen=True)
class Settings(trial.Settings):
    every_s: float = 0.0


def slowed(stop: Callable[[], bool]) -> Callable[[], bool]:
    def asked() -> bool:
        time.sleep(float(os.environ.get("VITLAB_TEST_STEP_S", "0.1")))
        return stop()

    return asked


def run_trial(one: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool]) -> Result | None:
    if one.spec.get("do") == "ignore":
        write_json(folder.path / "pid.json", os.getpid())
        while True:
            time.sleep(60)
    return trial.run_trial(one, folder, settings, slowed(stop))


def run_cohort(work: Sequence[tuple[Trial, TrialFolder]], settings: Settings, stop: Callable[[], bool]) -> None:
    trial.run_cohort(work, settings, slowed(stop))
