"""Worker as a command line, for executors that start programs or submit to a queue.

A job is a command, ``python -P -m vitlab.executors.command FOLDER``, which runs wherever the output folder and this
Python environment can be seen.  FOLDER is a new one in the trial's folder, with these files:

    job.json      the job and the module that runs it
    stop          requests a checkpoint and the end; checked every :data:`CHECK_S`
    ending.json   the ending and one sentence, written as the last step of the worker

A trial on several machines (``run.resources.nodes``) is the same command under torchrun on each of them, with one
process a machine: ``torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m ...``.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from vitlab.executors.base import JobEnd
from vitlab.executors.worker import run_job_and_exit
from vitlab.runner.job import NODE, Job
from vitlab.spec.tree import parsed
from vitlab.store.files import load_json, mapping, read_json, write_json
from vitlab.store.result import Ending

CHECK_S = 0.2  #: interval at which a worker checks whether it is to stop


class WorkerCommand:
    """A job as a command line: start it, stop it, and read how it ended.

    The worker follows every rule of :mod:`vitlab.executors.base`.  What starts the command gives it the job's threads
    and GPU, such as by :meth:`vitlab.executors.Executor.worker_environment`, and a process group of its own.

    Args:
        job: the job to run.
        runner: see ``Executor.runner``.
    """

    def __init__(self, job: Job, runner: str) -> None:
        self.job = job
        self._folder = job.folder / f".worker-{uuid.uuid4().hex[:12]}"
        write_json(self._folder / "job.json", _to_json(job, runner))
        #: the words of the command line
        self.words: tuple[str, ...] = (sys.executable, "-P", "-m", __name__, str(self._folder))

    def stop(self) -> None:
        """Request a checkpoint and the end of the worker, whose ending is then ``stopped``."""
        (self._folder / "stop").touch()

    def end(self, otherwise: str) -> JobEnd:
        """Return how the job ended and remove its files; call it once, after the worker has ended.

        Args:
            otherwise: the detail of a job that is ``lost``, because its worker ended without a report; such as
                ``its process ended with exit code 9``.
        """
        report = read_json(self._folder / "ending.json")
        shutil.rmtree(self._folder, ignore_errors=True)
        if report is None:
            return JobEnd(self.job, Ending.LOST, otherwise)
        return JobEnd(self.job, Ending(report[0]), report[1])


def main(folder: Path) -> NoReturn:
    """Run the job of a folder and exit."""
    data = load_json(folder / "job.json", mapping)
    if data is None:
        sys.exit(f"{folder} has no job.json: its driver has removed it, or this machine does not see the output folder")
    job, runner = _from_json(data)
    stop = threading.Event()

    def wait_for_file() -> None:
        while not (folder / "stop").exists():
            time.sleep(CHECK_S)
        stop.set()

    def report(ending: Ending, detail: str) -> None:
        if os.environ.get(NODE, "0") == "0":  # the first of the machines of torchrun
            write_json(folder / "ending.json", [ending, detail])

    threading.Thread(target=wait_for_file, daemon=True).start()
    run_job_and_exit(job, runner, stop.is_set, report)


def _to_json(job: Job, runner: str) -> dict[str, object]:
    trials = [{**vars(item), "folder": str(item.folder), "trial": item.trial.to_json()} for item in job.trials]
    return {"runner": runner, "job": {**vars(job), "trials": trials, "settings": vars(job.settings)}}


def _from_json(data: Mapping[str, Any]) -> tuple[Job, str]:
    return parsed(Job, data["job"]), data["runner"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
