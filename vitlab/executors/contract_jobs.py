"""Runner of the jobs of an executor's contract test: the job's name says what it does.

It imports no torch unless a trial is trained.  See :mod:`vitlab.testing.executors`.
"""

import time
from typing import Any

from vitlab.runner.job import Job, Stop, TrialEnd
from vitlab.store.locks import own_unique_process_name
from vitlab.store.result import Ending

MARK = "contract test: process "  #: beginning of the line that a job prints, before the name of its process
WAITS = "contract test: waits to be stopped"  #: line of a job that has done its first steps
FAILURE = "the contract test raises this"  #: message of the exception of a job ``raise``
STEPS = 2  #: steps of a job ``stop`` before it waits
PATIENCE_S = 300.0  #: time after which a job ends that nobody stops


def execute(job: Job, stop: Stop) -> Any:
    """Execute a job of the contract test, as :func:`vitlab.runner.execution.execute` does.

    ``raise`` raises an exception; ``kill`` waits to be killed, without a training; ``stop`` trains some steps and waits
    to be stopped; ``train`` trains to the end.
    """
    print(f"{MARK}{own_unique_process_name()}", flush=True)
    if job.name == "raise":
        raise RuntimeError(FAILURE)
    if job.name == "kill":
        return _wait_for_stop(stop, [TrialEnd(Ending.STOPPED)] * len(job.trials))
    from vitlab.runner.execution import execute as train

    steps = 0

    def stop_after_steps() -> bool:
        nonlocal steps
        steps += 1
        return stop() if job.name == "train" or steps <= STEPS else bool(_wait_for_stop(stop, True))

    return train(job, stop_after_steps)


def _wait_for_stop(stop: Stop, value: Any) -> Any:
    """Return ``value`` once the job is stopped."""
    print(WAITS, flush=True)
    end = time.monotonic() + PATIENCE_S
    while not stop():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing has stopped this job within {PATIENCE_S:g} s")
        time.sleep(0.02)
    return value
