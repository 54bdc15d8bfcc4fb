"""A cluster in simulated time, for ``scale.py``: a trial takes no time and leaves the files of one that was trained."""

from __future__ import annotations

import heapq
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from vitlab.plugin import Executor, Job, JobEnd, RunSpec, executor
from vitlab.spec.tree import parse_as
from vitlab.store.files import write_bytes
from vitlab.store.folders import TrialFolder
from vitlab.store.result import Ending, TrialResult

CHECKPOINT_S = 60.0  #: a lost trial resumes from a checkpoint that is at most this old
LOSS_S = 60.0  #: simulated time in which a third of the workers is lost


@executor.register("simulated")
class Simulated(Executor):
    """Workers that need no time: the clock moves to the next end.

    Args:
        run: where and how trials run; ``workers`` of them run at a time.
        template: folder of a trial that was trained.
        ledger: file to which the driver's figures are written at the end, without the CPU time of this class.
        seconds: simulated mean time of a trial; they take half as long to one and a half times as long.
        loss_at: simulated second from which a third of the workers is lost within a minute; 0 for none.
        die_after: number of ended trials after which the driver is killed; 0 for none.
    """

    def __init__(
        self,
        run: RunSpec,
        *,
        template: str,
        ledger: str,
        seconds: float = 600.0,
        loss_at: float = 0.0,
        die_after: int = 0,
    ) -> None:
        super().__init__(run)
        self._ledger, self._seconds, self._die_after = Path(ledger), seconds, die_after
        self._files = {file.name: file.read_bytes() for file in Path(template).iterdir() if file.is_file()}
        self._result = json.loads(self._files.pop("result.json"))
        self._capacity, self._now, self._own_s = run.workers or 1, 0.0, 0.0
        self._events: list[tuple[float, int, str]] = []  #: time, number, and the folder of a job or empty for a loss
        self._running: dict[str, tuple[Job, float]] = {}  #: by folder: the job and its start
        self._left: dict[str, float] = {}  #: simulated seconds that a trial still needs
        self._number = 0
        self._figures: dict[str, Any] = {"ended": 0, "lost": 0, "needed": 0.0, "loss_at": loss_at}
        self._lost_workers = self._capacity // 3 if loss_at else 0
        for index in range(self._lost_workers):
            self._push(loss_at + LOSS_S * index / self._lost_workers, "")

    @property
    def slots(self) -> int:
        """Number of workers that are left."""
        return self._capacity

    def submit(self, job: Job) -> None:
        """Start a job at the present simulated time."""
        began = time.thread_time()
        name = str(job.folder)
        if name not in self._left:
            self._left[name] = self._seconds * (0.5 + random.Random(name).random())
            self._figures["needed"] += self._left[name]
        self._running[name] = job, self._now
        self._push(self._now + self._left[name], name)
        write_bytes(job.folder / "events.jsonl", self._files["events.jsonl"], fsync=False)  # displays read journals
        self._own_s += time.thread_time() - began

    def poll(self, timeout_s: float) -> list[JobEnd]:
        """Return the next end, and move the clock to it."""
        began = time.thread_time()
        self._figures.setdefault("cpu_at_start", time.process_time() - self._own_s)  # the first jobs are submitted
        ends: list[JobEnd] = []
        while self._events and not ends:
            when, _, name = heapq.heappop(self._events)
            if not name:
                self._now = when
                ends += self._lose()
            elif name in self._running and abs(self._running[name][1] + self._left[name] - when) < 1e-6:
                self._now = when
                job, _ = self._running.pop(name)
                self._write(job)
                ends.append(JobEnd(job, Ending.DONE))
        self._figures["ended"] += sum(end.ending == Ending.DONE for end in ends)
        self._own_s += time.thread_time() - began
        self._note()
        if self._die_after and self._figures["ended"] >= self._die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return ends

    def cancel(self, grace_s: float) -> None:
        """Forget the running jobs."""
        self._running.clear()

    def _push(self, when: float, name: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, name))

    def _lose(self) -> list[JobEnd]:
        """Lose a worker, and the trial that it runs up to its last checkpoint."""
        self._capacity -= 1
        if not self._running:
            return []
        name = random.Random(self._number + self._capacity).choice(list(self._running))
        job, since = self._running.pop(name)
        self._left[name] -= (self._now - since) // CHECKPOINT_S * CHECKPOINT_S
        self._figures["lost"] += 1
        return [JobEnd(job, Ending.LOST, "its machine is gone")]

    def _write(self, job: Job) -> None:
        """Write the files of a trial as a worker does, with another accuracy."""
        [item] = job.trials
        folder, draw = TrialFolder(item.folder), random.Random(item.trial.key).gauss(0.0, 0.01)
        with folder.lease():
            for name, content in self._files.items():
                if name != "lock":
                    write_bytes(folder.path / name, content, fsync=False)
            result = json.loads(json.dumps(self._result)) | {"key": item.trial.key, "code": item.trial.code}
            for metrics in (result["outcome"]["metrics"], *(m["metrics"] for m in result["outcome"]["history"])):
                metrics["val/accuracy"] += draw
            folder.write_result(parse_as(TrialResult, result))
            shutil.rmtree(folder.checkpoint, ignore_errors=True)

    def _note(self) -> None:
        """Write the figures: every hundredth end and the last ones."""
        if self._figures["ended"] % 100 == 0 or not self._running:
            figures = {**self._figures, "cpu": time.process_time() - self._own_s, "makespan": self._now}
            self._ledger.write_text(json.dumps(figures))
