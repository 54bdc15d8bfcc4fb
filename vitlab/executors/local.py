"""Local executor: each job, a trial or several that are trained together, runs in a process of its own.

**Processes.**  A fork server imports torch and the built-in components once (:mod:`vitlab.runner.fork_server`), and
every trial is a fork of it: nothing of one trial (CUDA context, memory, random state, environment) reaches the next,
and the death of one worker affects no other.  A worker killed by a signal or by the kernel's OOM killer is ``lost``;
one whose trial raises is ``failed``.  Its output goes to ``log.txt`` in the trial's folder.

**Placement.**  A worker sees only its GPU.  A trial takes a whole GPU, or what ``run.resources`` requests: a share,
or several GPUs with one process on each; with more ``run.workers`` than GPUs, the GPUs are shared
evenly.  A GPU accepts the next trial after the previous one has done its first step
(:mod:`vitlab.executors.machine`).  On the CPU, the number of slots is the number of usable cores (within a
container's limit) divided by ``run.threads`` per process, or by ``run.resources.cpu``; if all workers fit, each is
pinned to its share of the cores.

**Stopping.**  ``cancel`` makes the workers write a checkpoint and exit, waits, then terminates, then kills them; Ctrl-C
during the wait kills them at once.  A worker ignores Ctrl-C, and stops on SIGTERM.  If the driver dies, the workers see
their pipe close, write a checkpoint and exit within 30 seconds.  A worker ends its trial itself after ``run.timeout``;
one that cannot, because it is stopped or stuck, is killed.

**Leases.**  A worker may find that another one still holds the lease of its trial: an orphan that is about to exit, or
one of another study that trains the same trial.  It waits until the lease is free, and reads the result or trains the
trial.  An orphan that does not exit is killed.
"""

from __future__ import annotations

import atexit
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import numpy as np

from vitlab.errors import UserError
from vitlab.executors import base, machine, worker
from vitlab.executors.base import JobEnd, PollingExecutor, Watchdog, executor
from vitlab.executors.machine import Placement
from vitlab.runner import fork_server
from vitlab.runner.fork_server import ServerDied
from vitlab.runner.job import Job
from vitlab.spec import RunSpec
from vitlab.store.result import Ending

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

TERMINATE_S = 2.0  #: time between terminating and killing a worker


@dataclass
class _Worker:
    """A running process with its slot, and the driver's end of its pipe."""

    job: Job
    place: int
    process: ForkServerProcess
    pipe: Connection
    watchdog: Watchdog
    ending: Sequence[str] = ()  #: how its job ended, and one sentence
    silent: bool = False  #: True if it has closed its end


@executor.register("local")
class Local(PollingExecutor):
    """Worker processes on this machine, one per trial, each on its GPU or its share of the cores.

    It has no options of its own.  ``run.workers`` is the number of trials at a time: by default one per GPU, or on a
    CPU the usable cores, within a container's limit, divided by ``run.threads``.  ``run.threads`` is the number of
    threads of each.  ``run.resources`` sets a trial's share of a GPU (``gpu: 0.5``), several GPUs
    (``gpu: 2``), or its cores (``cpu: 4``).  A trial's output goes to ``log.txt`` in its folder.

    Args:
        run: where and how trials run.

    Raises:
        UserError: if ``run.device`` is cuda and there is no GPU, or there are fewer than it requests.
    """

    slots: int = 1  #: worker processes at once

    def __init__(self, run: RunSpec) -> None:
        super().__init__(run)
        self._gpus = machine.usable_gpus() if run.device in ("auto", "cuda") else []
        if run.device == "cuda" and not self._gpus:
            raise UserError(
                "run.device is cuda, and this machine has no GPU that torch could use: CUDA_VISIBLE_DEVICES and "
                "nvidia-smi list none, or this torch is built for the CPU alone; set run.device: cpu, or "
                "install torch for CUDA"
            )
        cores, budget = machine.usable_cores(), machine.count_usable_cores()
        cores_per_trial = run.resources.cores(run.threads)
        self._placement = Placement(self._gpus)
        self._share, self._count = self._share_and_count_of_gpus()
        if self._gpus:
            places = self._placement.capacity(self._share, self._count)
            if run.resources.cpu is not None:
                places = max(1, min(places, budget // cores_per_trial))
        else:  # one trial at a time on the only GPU of a Mac
            places = run.workers or (1 if run.device == "mps" else max(1, budget // cores_per_trial))
        self.slots = min(run.workers or places, places)
        shared_out = not self._gpus or run.resources.cpu is not None
        fits = shared_out and cores_per_trial * self.slots <= budget
        self._shares = [share.tolist() for share in np.array_split(cores, self.slots)] if fits else [[]] * self.slots
        self._running: dict[int, _Worker] = {}  # by sentinel
        # Otherwise the interpreter would wait at exit for workers that nothing stops.
        atexit.register(self._close_pipes)

    @classmethod
    def prepare(cls) -> None:
        """Start the fork server, which takes seconds to import torch; it ends with this process if it is not used."""
        fork_server.ensure_server_running()

    def submit(self, job: Job) -> None:
        """Start a job once a GPU has room.  The first job waits until the fork server has imported torch."""
        self._waiting.append(job)
        self._start_waiting_jobs()

    def cancel(self, grace_s: float) -> None:
        """Ask the workers to stop, and end those that do not."""
        self._drop_waiting_jobs()
        for running in self._running.values():
            with suppress(OSError):  # it has just died
                running.pipe.send_bytes(b"stop")
        try:
            self._wait_for_all(grace_s)
            for running in self._running.values():
                running.process.terminate()
            self._wait_for_all(TERMINATE_S)
        except KeyboardInterrupt:
            pass  # second Ctrl-C: stop waiting
        for running in self._running.values():
            running.process.kill()
        self._wait_for_all(TERMINATE_S)

    def with_more_memory(self, job: Job) -> Job | None:
        """Return the job with twice its share of a GPU; None on a machine without any, or for a whole one."""
        return super().with_more_memory(job) if self._gpus else None

    def _share_and_count_of_gpus(self) -> tuple[float, int]:
        """Return the share of a GPU that a trial of this study needs, and the number of GPUs."""
        share, count = self.run.resources.gpu, 1
        if share is not None and share > 1:
            share, count = 1.0, int(share)
            if len(self._gpus) < count:
                raise UserError(
                    f"run.resources.gpu is {count}, and this machine has {len(self._gpus)} that torch could use; set a "
                    "smaller number"
                )
        elif share is None:
            share = 1 / math.ceil(max(1, (self.run.workers or 1) / max(1, len(self._gpus))))
        return share, count

    def _start_waiting_jobs(self) -> None:
        """Start waiting jobs in order as far as GPUs have room for them."""
        while self._waiting:
            job, gpu = self._waiting[0], ""
            if self._gpus and job.settings.device != "cpu":
                share = job.gpu or self._share
                assigned = self._placement.assign_gpus(job.folder, share, self._count)
                if assigned is None:
                    return
                job, gpu = replace(job, gpu=share), assigned  # with the share that a retry after ``oom`` doubles
            self._waiting.pop(0)
            self._start_worker(job, gpu)

    def _start_worker(self, job: Job, gpu: str) -> None:
        used = {running.place for running in self._running.values()}
        place = min(set(range(len(used) + 1)) - used)
        share = self._shares[place] if place < self.slots else []
        arguments = job, self.worker_environment(job, gpu), share
        try:
            process, pipe = fork_server.start_process(worker.run_piped_worker, arguments, job.name)
        except ServerDied as error:
            self._placement.remove(job.folder)
            self._ends.append(JobEnd(job, Ending.LOST, str(error)))
            return
        watchdog = Watchdog(job.timeout_s)
        watchdog.start(base.START_S)
        self._running[process.sentinel] = _Worker(job, place, process, pipe, watchdog)

    def _wait_and_collect_ends(self, timeout_s: float) -> None:
        """Wait for workers to exit or to send messages, and record the endings of their jobs."""
        if not self._running:
            time.sleep(timeout_s)
            return
        pipes = {running.pipe: running for running in self._running.values() if not running.silent}
        due = min(running.watchdog.due for running in self._running.values())
        for ready in wait([*self._running, *pipes], max(0.0, min(timeout_s, due - time.monotonic()))):
            if isinstance(ready, int):
                self._record_end(self._running.pop(ready))
            elif isinstance(ready, Connection):
                self._read_messages(pipes[ready])
        for running in self._running.values():
            if running.watchdog.mark_killed_if_due():
                running.process.kill()
        self._start_waiting_jobs()

    def _read_messages(self, running: _Worker) -> None:
        """Read the new messages of a worker; a closed pipe ends reading."""
        try:
            while running.pipe.poll():
                message = json.loads(running.pipe.recv_bytes())
                if isinstance(message, list):
                    running.ending = message
                    continue
                running.watchdog.record_stage(message)
                if message != "tries":
                    self._placement.mark_started(running.job.folder)
        except (EOFError, OSError):
            running.silent = True

    def _record_end(self, running: _Worker) -> None:
        running.process.join()
        self._read_messages(running)
        if running.ending:
            ending, detail = Ending(running.ending[0]), running.ending[1]
        elif running.watchdog.has_killed:
            ending, detail = Ending.TIMEOUT, base.KILLED.format(process="its process")
        else:
            ending, detail = Ending.LOST, f"its process {fork_server.describe_exit(running.process.exitcode)}"
        self._ends.append(JobEnd(running.job, ending, detail))
        self._placement.remove(running.job.folder)
        # A worker that outlived the fork server looks dead from here; closing the pipe stops it.
        running.pipe.close()
        running.process.close()

    def _close_pipes(self) -> None:
        for running in self._running.values():
            running.pipe.close()
