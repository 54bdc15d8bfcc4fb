"""Slurm executor: packs of trials as jobs of a Slurm cluster, through submitit (``pip install 'vitlab[slurm]'``).

**Packs.**  A Slurm job receives ``pack`` trials and the resources for all of them: their cores, and their GPUs if
``run.resources.gpu`` or ``run.device: cuda`` requests any.  Within the job, the local executor runs the trials, each in
its own process, on its share of a GPU.  The output folder, the data and this Python environment must be on a file
system that the nodes see.

**Pre-emption and time limits.**  ``SIGNAL_S`` before Slurm ends a job it sends SIGUSR2, and where ``PreemptParameters``
has ``send_user_signal``, also when it pre-empts one.  The trials then write a checkpoint and the job requeues itself,
which counts as no attempt.  A job that reaches its time limit is requeued up to ``requeues`` times.

**Files.**  A pack has a folder ``slurm/PACK`` in the output folder: ``pack.json`` names the Slurm job and the trials,
``ends.jsonl`` lists the ending of each trial as it ends, ``stop`` requests a checkpoint and the end of the job;
submitit stores its own files there too.

**Stopping.**  ``cancel`` removes pending jobs from the queue and makes running ones write a checkpoint.  When the
driver dies, the jobs continue, and the next driver finds them by their folders, or by their names in the queue.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vitlab.errors import UserError
from vitlab.executors.base import JobEnd, PollingExecutor, executor, one_sentence
from vitlab.executors.local import Local
from vitlab.runner.job import Job
from vitlab.spec import Choice, RunSpec
from vitlab.store.files import append_json, cut_torn_line, read_json, read_lines, write_json
from vitlab.store.result import Ending

POLL_S = 1.0  #: interval at which driver and pack check for each other's files
STATE_S = 60.0  #: interval at which the states of Slurm jobs are queried
SIGNAL_S = 90  #: time before the end of a job at which Slurm signals it
PACK_GRACE_S = 60.0  #: part of that time for the trials' checkpoints

STATES: Mapping[str, Ending] = {
    "OUT_OF_MEMORY": Ending.OOM,
    "TIMEOUT": Ending.TIMEOUT,
    "DEADLINE": Ending.TIMEOUT,
    "PREEMPTED": Ending.PREEMPTED,
    "CANCELLED": Ending.STOPPED,
}
"""Ending of trials whose Slurm job ended without reporting them, by the job's state; otherwise they are lost."""

FINAL = (Ending.DONE, Ending.FAILED, Ending.ERROR, Ending.OOM, Ending.REFUSED)
"""Endings that a requeue of the Slurm job would repeat."""

ShellWord = Annotated[str, Field(pattern=r"^\S+$")]
"""Value on a line of the sbatch script; without white space, because a line of its own would be executed."""


@dataclass
class _Submitted:
    """A pack submitted to Slurm."""

    folder: Path
    slurm: Any  #: submitit's job
    jobs: dict[str, Job]  #: jobs that have not ended, by their name in ``ends.jsonl``
    offset: int = 0  #: bytes read of ``ends.jsonl``


@executor.register("slurm")
class Slurm(PollingExecutor):
    """Jobs of a Slurm cluster, each with several trials; checkpoints and requeues when its time is up.

    Args:
        run: where and how trials run; ``workers`` is trials at a time.
        pack: trials of one Slurm job.
        jobs: Slurm jobs at a time; trials that are ready meanwhile wait for the next pack.
        minutes: time limit of a Slurm job; trials may take longer.
        mem_gb: memory of a Slurm job; by default what the partition gives.
        partition: as of sbatch; by default the site's.
        account: as of sbatch.
        qos: as of sbatch.
        constraint: as of sbatch, such as ``a100``.
        setup: shell lines before the trials begin, such as ``module load cuda``; not from a study file.
        requeues: how often a job that reached its time limit is put back into the queue.

    Raises:
        UserError: if submitit is not installed, or this is no machine of a Slurm cluster.
    """

    def __init__(
        self,
        run: RunSpec,
        *,
        pack: Annotated[int, Field(ge=1)] = 4,
        jobs: Annotated[int, Field(ge=1)] = 16,
        minutes: Annotated[int, Field(ge=1)] = 240,
        mem_gb: Annotated[float, Field(gt=0)] | None = None,
        partition: ShellWord | None = None,
        account: ShellWord | None = None,
        qos: ShellWord | None = None,
        constraint: ShellWord | None = None,
        setup: tuple[str, ...] = (),
        requeues: Annotated[int, Field(ge=0)] = 20,
    ) -> None:
        super().__init__(run)
        self._submitit = _submitit()
        self._pack = pack
        self._slots = min(run.workers or pack * jobs, pack * jobs)
        self._jobs = min(jobs, math.ceil(self._slots / pack))
        self._requeues = requeues
        options = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
        self._parameters: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self._parameters |= {"time": minutes, "signal_delay_s": SIGNAL_S}
        if mem_gb is not None:
            self._parameters["mem"] = f"{math.ceil(mem_gb * 1024)}MB"
        if setup:
            self._parameters["setup"] = list(setup)
        self._waiting: list[Job] = []
        self._sent: list[_Submitted] = []
        self._asked_at = time.monotonic()

    @classmethod
    def cli_only_option(cls, options: Mapping[str, object]) -> str | None:
        """Return ``setup`` if it holds shell commands, which run on the cluster; None otherwise."""
        return "setup" if options.get("setup") else None

    @property
    def slots(self) -> int:
        """Return how many trials run at once."""
        return self._slots

    def submit(self, job: Job) -> None:
        """Queue a job for the next pack, which :meth:`poll` submits when fewer than ``jobs`` packs are in Slurm.

        The driver submits a new job for each ended one, so when a whole pack has ended, the next one is full.
        """
        self._waiting.append(job)

    def cancel(self, grace_s: float) -> None:
        """Drop queued jobs and ask running ones to stop."""
        self._ends += [JobEnd(job, Ending.STOPPED) for job in self._waiting]
        self._waiting.clear()
        for pack in self._sent:
            (pack.folder / "stop").touch()
            if not (pack.folder / "started").exists():
                pack.slurm.cancel(check=False)
                self._end(pack, Ending.STOPPED, "")
        try:
            deadline = time.monotonic() + grace_s
            while self._running() and time.monotonic() < deadline:
                time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
                self._look()
        except KeyboardInterrupt:
            pass  # second Ctrl-C: stop waiting
        for pack in self._running():
            pack.slurm.cancel(check=False)
            self._end(pack, Ending.LOST, "it did not stop in time, and its Slurm job was cancelled")
        self._sent.clear()

    def reattach(self, jobs: Sequence[Job]) -> list[Job]:
        """Find jobs that an earlier driver left in the queue."""
        by_folder = {job.folder: job for job in jobs}
        for folder in sorted({folder for job in jobs for folder in _root(job).glob("slurm/*")}):
            record = read_json(folder / "pack.json")
            if record is None or (folder / "ended").exists():
                continue
            matching = {}
            for name, folders in record["trials"].items():
                own_jobs = [by_folder[Path(item)] for item in folders if Path(item) in by_folder]
                if own_jobs:
                    matching[name] = replace(own_jobs[0], trials=tuple(item for job in own_jobs for item in job.trials))
            if not matching:
                continue  # a pack of another study, whose driver may be about to submit it
            job_id = record["job"] or _query_job_id(folder)
            pack = _Submitted(folder, self._submitit.SlurmJob(folder=folder, job_id=job_id or "0"), matching)
            if job_id is None or pack.slurm.done(force_check=True):
                (folder / "ended").touch()  # the trials' folders hold their results
            else:
                self._sent.append(pack)
        return [job for pack in self._sent for job in pack.jobs.values()]

    def _send(self, jobs: Sequence[Job]) -> None:
        """Submit a pack to Slurm.

        Raises:
            UserError: if Slurm rejects it.
        """
        folder = _root(jobs[0]) / "slurm" / uuid.uuid4().hex[:12]
        trials = {str(job.folder): [str(item) for item in job.folders] for job in jobs}
        # Written before the submission, in case this driver dies meanwhile.
        write_json(folder / "pack.json", {"job": None, "trials": trials})
        python = f"{shlex.quote(sys.executable)} -P"  # imports nothing from the folder of the submission
        slurm = self._submitit.SlurmExecutor(folder, max_num_timeout=self._requeues, python=python)
        slurm.update_parameters(job_name=_name(folder), **self._parameters, **self._needs(jobs))
        try:
            submission = slurm.submit(SlurmBatch(folder, self.run, tuple(jobs), self.runner))
        except (self._submitit.core.utils.FailedJobError, OSError) as error:
            (folder / "ended").touch()
            raise UserError(f"Slurm rejected the job: {one_sentence(error)}") from error
        write_json(folder / "pack.json", {"job": submission.job_id, "trials": trials})
        self._sent.append(_Submitted(folder, submission, {str(job.folder): job for job in jobs}))

    def _needs(self, jobs: Sequence[Job]) -> dict[str, int]:
        """Return what a Slurm job requests to run these trials together on one node: its cores, and GPUs if any."""
        resources = self.run.resources
        needs = {"nodes": 1, "ntasks_per_node": 1, "cpus_per_task": len(jobs) * resources.cores(self.run.threads)}
        shares = [
            job.gpu or resources.gpu or 1.0
            for job in jobs
            if job.settings.device == "cuda" or (job.settings.device == "auto" and resources.gpu is not None)
        ]
        return {**needs, "gpus_per_node": math.ceil(sum(shares) - 1e-6)} if shares else needs

    def _wait(self, timeout_s: float) -> None:
        """Send waiting jobs and collect ended ones."""
        while self._waiting and len(self._sent) < self._jobs:
            self._send(self._waiting[: self._pack])
            del self._waiting[: self._pack]
        self._look()
        if not self._ends:
            time.sleep(min(POLL_S, timeout_s))

    def _running(self) -> list[_Submitted]:
        return [pack for pack in self._sent if pack.jobs]

    def _look(self) -> None:
        """Collect the trials that have ended, and remove the packs whose Slurm job has ended."""
        due = time.monotonic() - self._asked_at >= STATE_S
        remaining = []
        for pack in self._sent:
            over = pack.slurm.paths.result_pickle.exists() or (due and pack.slurm.done(force_check=True))
            self._collect_endings(pack)
            if not pack.jobs:
                (pack.folder / "ended").touch()
            elif over:
                state = str(pack.slurm.state).split(" ")[0]
                because = f"its Slurm job {pack.slurm.job_id} ended ({state}) before it did; see {pack.folder}"
                self._end(pack, STATES.get(state, Ending.LOST), because)
            if not over:
                remaining.append(pack)
        if due:
            self._asked_at = time.monotonic()
        self._sent = remaining

    def _collect_endings(self, pack: _Submitted) -> None:
        lines, pack.offset = read_lines(pack.folder / "ends.jsonl", pack.offset)
        for name, value, detail in map(json.loads, lines):
            job = pack.jobs.pop(name, None)
            if job is not None:
                self._ends.append(JobEnd(job, Ending(value), detail))

    def _end(self, pack: _Submitted, ending: Ending, detail: str) -> None:
        self._ends += [JobEnd(job, ending, detail) for job in pack.jobs.values()]
        pack.jobs.clear()
        (pack.folder / "ended").touch()


class SlurmBatch:
    """Callable of a Slurm job (a pack), which runs its trials with the local executor and records their endings.

    submitit calls it, and on SIGUSR2 its ``checkpoint``, which returns the submission of the requeued job.
    """

    def __init__(self, folder: Path, run: RunSpec, jobs: tuple[Job, ...], runner: str) -> None:
        self.folder = folder
        # The job's resources limit the workers, not run.workers; and no address with a password is pickled to disk.
        self.run = run.model_copy(update={"workers": None, "tracker": Choice("none")})
        self.jobs = jobs
        self.runner = runner
        self._local: Local | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_local": None}

    def __call__(self) -> None:
        """Run the pack's jobs on the node."""
        (self.folder / "started").write_text(os.environ.get("SLURM_JOB_ID", ""))
        cut_torn_line(self.folder / "ends.jsonl")  # Slurm may have killed an earlier run in the middle of a line
        local = self._local = Local(self.run)
        local.runner = self.runner  # type: ignore[misc]
        finished = {name for name, _, _ in self._recorded()}
        waiting = [job for job in self.jobs if str(job.folder) not in finished]
        running = 0
        while waiting or running:
            if (self.folder / "stop").exists():
                local.cancel(PACK_GRACE_S)
                self._say(local.poll(0.0))
                self._say([JobEnd(job, Ending.STOPPED) for job in waiting])
                return
            while waiting and running < local.slots:
                local.submit(waiting.pop(0))
                running += 1
            ends = local.poll(POLL_S)
            running -= len(ends)
            self._say(ends)

    def checkpoint(self) -> Any:
        """Make every trial write a checkpoint, and return this pack for requeueing; it skips ended trials."""
        if self._local is not None:
            self._local.cancel(PACK_GRACE_S)
            self._say([end for end in self._local.poll(0.0) if end.ending in FINAL])
        return _submitit().helpers.DelayedSubmission(self)

    def _say(self, ends: Sequence[JobEnd]) -> None:
        for end in ends:
            append_json(self.folder / "ends.jsonl", [str(end.job.folder), end.ending, end.detail])

    def _recorded(self) -> list[list[str]]:
        return [json.loads(line) for line in read_lines(self.folder / "ends.jsonl")[0]]


def _name(folder: Path) -> str:
    """Return the unique name of a pack's Slurm job."""
    return f"vitlab-{folder.name}"


def _query_job_id(folder: Path) -> str | None:
    """Return the id of a pack's job whose driver died before recording it; None if it was never submitted.

    Raises:
        UserError: if the queue cannot be queried, because the pack might then be submitted twice.
    """
    with suppress(FileNotFoundError):
        return (folder / "started").read_text() or None
    command = ["squeue", "--noheader", "--format=%A", f"--name={_name(folder)}"]
    try:
        ids = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        because = " ".join((getattr(error, "stderr", None) or str(error)).split())
        raise UserError(
            f"Slurm does not say whether it has the job {_name(folder)} ({because}); run again when squeue answers"
        ) from error
    return ids[0] if ids else None


def _root(job: Job) -> Path:
    """Return the output folder that contains a job's folder."""
    return job.folder.parents[2]


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise UserError("run.executor is slurm, which needs submitit; run: pip install 'vitlab[slurm]'") from None
    if submitit.SlurmExecutor.affinity() <= 0:
        raise UserError("run.executor is slurm, and this machine has no srun; run 'vitlab run' on a Slurm login node")
    return submitit
