"""Replacement of ``vitlab.runner.execution`` in tests of Ray: slow steps, with a checkpoint after each.

Steps take the time that VITLAB_TEST_STEP_S says, so that a test can come in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from vitlab.runner import execution as runner
from vitlab.runner.job import Job, TrialEnd
from vitlab.store.files import write_json


def slowed(stop: Callable[[], bool]) -> Callable[[], bool]:
    def stop_slowly() -> bool:
        time.sleep(float(os.environ.get("VITLAB_TEST_STEP_S", "0.1")))
        return stop()

    return stop_slowly


def execute(job: Job, stop: Callable[[], bool]) -> list[TrialEnd]:
    if job.trials[0].trial.spec.data.type == "ignore":
        write_json(job.folder / "pid.json", os.getpid())
        while True:
            time.sleep(60)
    return runner.execute(replace(job, settings=replace(job.settings, every_s=0.0)), slowed(stop))
