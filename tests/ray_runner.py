"""Replacement of ``vitlab.runner.run`` in tests of Ray: slow steps, with a checkpoint after each.

Steps take the time that VITLAB_TEST_STEP_S says, so that a test can come in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitlab.plan.values import Trial
from vitlab.runner import run as runner
from vitlab.store.folders import TrialFolder, write_json
from vitlab.store.result import Result


@dataclass(frozen=True)
class Settings(runner.Settings):
    every_s: float = 0.0


def slowed(stop: Callable[[], bool]) -> Callable[[], bool]:
    def stop_slowly() -> bool:
        time.sleep(float(os.environ.get("VITLAB_TEST_STEP_S", "0.1")))
        return stop()

    return stop_slowly


def run_trial(one: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool]) -> Result | None:
    if one.spec.get("do") == "ignore":
        write_json(folder.path / "pid.json", os.getpid())
        while True:
            time.sleep(60)
    return runner.run_trial(one, folder, settings, slowed(stop))


def run_cohort(work: Sequence[tuple[Trial, TrialFolder]], settings: Settings, stop: Callable[[], bool]) -> None:
    runner.run_cohort(work, settings, slowed(stop))
