"""Slurm: packs of trials as jobs of a Slurm cluster, through submitit (``pip install 'vitlab[slurm]'``).

**Packs.**  A Slurm job is given ``pack`` trials and what they need together: their cores, and their GPUs, where
``run.resources.gpu`` or ``run.device: cuda`` asks for any.  In the job they are run as on any machine, by the local
executor: each in a process of its own, on its share of a GPU.  The output folder, the data and this Python environment
have to be on a file system that the nodes see.

**Pre-emption and time limits.**  ``SIGNAL_S`` before Slurm ends a job it sends SIGUSR2, and where ``PreemptParameters``
has ``send_user_signal``, also when it pre-empts one.  The trials then write a checkpoint and the job puts itself back
into the queue; no attempt is lost by it.  A job that reaches its time limit does so ``requeues`` times.

**Files.**  A pack has a folder ``slurm/PACK`` in the output folder: ``pack.json`` names the Slurm job and the trials,
``ends.jsonl`` says how each trial ended, as it ends, ``stop`` asks for a checkpoint and the end; submitit keeps there
what it hands to the job.

**Stopping.**  ``cancel`` takes jobs that wait out of the queue and asks those that run to write a checkpoint.  When the
driver dies, the jobs go on, and the next driver finds them by their folders, or by their names in the queue.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vitlab.errors import UserError
from vitlab.executors.base import Companion, Ended, Executor, How, Job, executor, one_sentence
from vitlab.executors.local import Local
from vitlab.spec import RunSpec
from vitlab.store.folders import append_json, cut_torn_line, read_json, read_lines, write_json

POLL_S = 1.0  #: how often the driver and a pack look for each other's files
STATE_S = 60.0  #: how often Slurm is asked for the state of its jobs
SIGNAL_S = 90  #: how long before the end Slurm warns a job
PACK_GRACE_S = 60.0  #: of that, how long its trials may take to write their checkpoints

STATES: Mapping[str, How] = {
    "OUT_OF_MEMORY": "oom",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
    "CANCELLED": "stopped",
}
"""How the trials of a Slurm job ended that did not say so; in any other state they are lost."""

RankResult = Annotated[str, Field(pattern=r"^\S+$")]
"""What stands in a line of the script that sbatch is given; a line of its own would be run."""


@dataclass
class _Sent:
    """A pack that Slurm has."""

    folder: Path
    slurm: Any  #: submitit's job
    jobs: dict[str, Job]  #: those that have not ended, by the name they go by in ``ends.jsonl``
    read: int = 0  #: bytes of ``ends.jsonl``


@executor.register("slurm")
class Slurm(Executor):
    """Jobs of a Slurm cluster, each with several trials; checkpoints and requeues when its time is up."""

    def __init__(
        self,
        run: RunSpec,
        *,
        pack: Annotated[int, Field(ge=1)] = 4,
        jobs: Annotated[int, Field(ge=1)] = 16,
        minutes: Annotated[int, Field(ge=1)] = 240,
        mem_gb: Annotated[float, Field(gt=0)] | None = None,
        partition: RankResult | None = None,
        account: RankResult | None = None,
        qos: RankResult | None = None,
        constraint: RankResult | None = None,
        setup: tuple[str, ...] = (),
        requeues: Annotated[int, Field(ge=0)] = 20,
    ) -> None:
        """
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
        super().__init__(run)
        self._submitit = _submitit()
        self._pack = pack
        self._slots = min(run.workers or pack * jobs, pack * jobs)
        self._jobs = min(jobs, math.ceil(self._slots / pack))
        self._requeues = requeues
        named = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
        self._parameters: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        self._parameters |= {"time": minutes, "signal_delay_s": SIGNAL_S}
        if mem_gb is not None:
            self._parameters["mem"] = f"{math.ceil(mem_gb * 1024)}MB"
        if setup:
            self._parameters["setup"] = list(setup)
        self._waiting: list[Job] = []
        self._sent: list[_Sent] = []
        self._ended: list[Ended] = []
        self._asked_at = time.monotonic()

    @classmethod
    def cli_only_option(cls, options: Mapping[str, Any]) -> str | None:
        return "setup" if options.get("setup") else None

    @property
    def slots(self) -> int:
        return self._slots

    def submit(self, job: Job) -> None:
        """Queue a job for the next pack, which :meth:`poll` sends when fewer than ``jobs`` are with Slurm.

        A driver submits a job for each that has ended, so by the time that a whole pack has, the next one is full.
        """
        self._waiting.append(job)

    def poll(self, timeout_s: float) -> list[Ended]:
        while self._waiting and len(self._sent) < self._jobs:
            self._send(self._waiting[: self._pack])
            del self._waiting[: self._pack]
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            if self._ended or (left := deadline - time.monotonic()) <= 0:
                ended, self._ended = self._ended, []
                return ended
            time.sleep(min(POLL_S, left))

    def cancel(self, grace_s: float) -> None:
        self._ended += [Ended(job, "stopped") for job in self._waiting]
        self._waiting.clear()
        for sent in self._sent:
            (sent.folder / "stop").touch()
            if not (sent.folder / "started").exists():
                sent.slurm.cancel(check=False)
                self._end(sent, "stopped", "")
        try:
            deadline = time.monotonic() + grace_s
            while self._running() and time.monotonic() < deadline:
                time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
                self._look()
        except KeyboardInterrupt:
            pass  # asked again: no more waiting
        for sent in self._running():
            sent.slurm.cancel(check=False)
            self._end(sent, "lost", "it did not stop when asked to, and its Slurm job was cancelled")
        self._sent.clear()

    def reattach(self, jobs: Sequence[Job]) -> list[Job]:
        by_folder = {job.folder: job for job in jobs}
        for folder in sorted({folder for job in jobs for folder in _root(job).glob("slurm/*")}):
            record = read_json(folder / "pack.json")
            if record is None or (folder / "ended").exists():
                continue
            found = {}
            for name, folders in record["trials"].items():
                mine = [by_folder[Path(item)] for item in folders if Path(item) in by_folder]
                if mine:
                    others = tuple(Companion(job.name, job.folder, job.trial) for job in mine[1:])
                    found[name] = replace(mine[0], companions=others)
            if not found:
                continue  # another study's, whose driver may be about to submit it
            job_id = record["job"] or _found(folder)
            sent = _Sent(folder, self._submitit.SlurmJob(folder=folder, job_id=job_id or "0"), found)
            if job_id is None or sent.slurm.done(force_check=True):
                (folder / "ended").touch()  # what became of its trials stands in their folders
            else:
                self._sent.append(sent)
        return [job for sent in self._sent for job in sent.jobs.values()]

    # -- how it is done -----------------------------------------------------------------------------------------------

    def _send(self, jobs: Sequence[Job]) -> None:
        """Hand a pack to Slurm.

        Raises:
            UserError: if Slurm does not take it.
        """
        folder = _root(jobs[0]) / "slurm" / uuid.uuid4().hex[:12]
        trials = {str(job.folder): [str(item) for item in job.folders] for job in jobs}
        write_json(folder / "pack.json", {"job": None, "trials": trials})  # should this driver die as it submits
        slurm = self._submitit.SlurmExecutor(folder, max_num_timeout=self._requeues)
        slurm.update_parameters(job_name=_name(folder), **self._parameters, **self._needs(jobs))
        try:
            sent = slurm.submit(Pack(folder, self.run, tuple(jobs), self.runner))
        except (self._submitit.core.utils.FailedJobError, OSError) as error:
            (folder / "ended").touch()
            raise UserError(f"Slurm did not take the job: {one_sentence(error)}") from error
        write_json(folder / "pack.json", {"job": sent.job_id, "trials": trials})
        self._sent.append(_Sent(folder, sent, {str(job.folder): job for job in jobs}))

    def _needs(self, jobs: Sequence[Job]) -> dict[str, int]:
        """What a pack takes of a node."""
        resources = self.run.resources
        needs = {"nodes": 1, "ntasks_per_node": 1, "cpus_per_task": len(jobs) * resources.cores(self.run.threads)}
        shares = [
            job.gpu or resources.gpu or 1.0
            for job in jobs
            if job.device == "cuda" or (job.device == "auto" and resources.gpu is not None)
        ]
        return {**needs, "gpus_per_node": math.ceil(sum(shares) - 1e-6)} if shares else needs

    def _running(self) -> list[_Sent]:
        return [sent for sent in self._sent if sent.jobs]

    def _look(self) -> None:
        """Collect the trials that have ended, and forget the packs whose Slurm job has ended."""
        due = time.monotonic() - self._asked_at >= STATE_S
        remaining = []
        for sent in self._sent:
            over = sent.slurm.paths.result_pickle.exists() or (due and sent.slurm.done(force_check=True))
            self._read(sent)
            if not sent.jobs:
                (sent.folder / "ended").touch()
            elif over:
                state = str(sent.slurm.state).split(" ")[0]
                because = f"its Slurm job {sent.slurm.job_id} ended ({state}) before it did; see {sent.folder}"
                self._end(sent, STATES.get(state, "lost"), because)
            if not over:
                remaining.append(sent)
        if due:
            self._asked_at = time.monotonic()
        self._sent = remaining

    def _read(self, sent: _Sent) -> None:
        lines, sent.read = read_lines(sent.folder / "ends.jsonl", sent.read)
        for name, how, detail in map(json.loads, lines):
            job = sent.jobs.pop(name, None)
            if job is not None:
                self._ended.append(Ended(job, how, detail))

    def _end(self, sent: _Sent, how: How, detail: str) -> None:
        self._ended += [Ended(job, how, detail) for job in sent.jobs.values()]
        sent.jobs.clear()
        (sent.folder / "ended").touch()


class Pack:
    """What a Slurm job does: run its trials by the local executor, and say how each ended.

    submitit calls it, and on SIGUSR2 its ``checkpoint``, which gives what the requeued job is to do.
    """

    def __init__(self, folder: Path, run: RunSpec, jobs: tuple[Job, ...], runner: str) -> None:
        self.folder = folder
        # The job sets the limit here, not the driver's workers; and a URI with a password is not pickled to disk.
        self.run = run.model_copy(update={"workers": None, "tracking_uri": None})
        self.jobs = jobs
        self.runner = runner
        self._local: Local | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_local": None}

    def __call__(self) -> None:
        (self.folder / "started").write_text(os.environ.get("SLURM_JOB_ID", ""))
        cut_torn_line(self.folder / "ends.jsonl")  # Slurm may have killed an earlier one in the middle of it
        local = self._local = Local(self.run)
        local.runner = self.runner  # type: ignore[misc]
        ended = {name for name, _, _ in self._said()}
        waiting = [job for job in self.jobs if str(job.folder) not in ended]
        running = 0
        while waiting or running:
            if (self.folder / "stop").exists():
                local.cancel(PACK_GRACE_S)
                self._say(local.poll(0.0))
                self._say([Ended(job, "stopped") for job in waiting])
                return
            while waiting and running < local.slots:
                local.submit(waiting.pop(0))
                running += 1
            ended_now = local.poll(POLL_S)
            running -= len(ended_now)
            self._say(ended_now)

    def checkpoint(self) -> Any:
        """Have every trial write a checkpoint; what is left is this pack again, less the trials that have ended."""
        if self._local is not None:
            self._local.cancel(PACK_GRACE_S)
            self._say([ended for ended in self._local.poll(0.0) if ended.how in ("done", "failed", "oom", "refused")])
        return _submitit().helpers.DelayedSubmission(self)

    def _say(self, ends: Sequence[Ended]) -> None:
        for ended in ends:
            append_json(self.folder / "ends.jsonl", [str(ended.job.folder), ended.how, ended.detail])

    def _said(self) -> list[list[str]]:
        return [json.loads(line) for line in read_lines(self.folder / "ends.jsonl")[0]]


def _name(folder: Path) -> str:
    """What a pack's job is called, as no other is."""
    return f"vitlab-{folder.name}"


def _found(folder: Path) -> str | None:
    """The number of a pack's job whose driver died before it could note it; None where Slurm never had it.

    Raises:
        UserError: if Slurm does not say: what it has would be submitted twice.
    """
    with suppress(FileNotFoundError):
        return (folder / "started").read_text() or None
    asked = ["squeue", "--noheader", "--format=%A", f"--name={_name(folder)}"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        because = " ".join((getattr(error, "stderr", None) or str(error)).split())
        raise UserError(
            f"Slurm does not say whether it has the job {_name(folder)} ({because}); run again when squeue answers"
        ) from error
    return said[0] if said else None


def _root(job: Job) -> Path:
    """The output folder that a job's folder lies in."""
    return job.folder.parents[2]


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise UserError("run.executor is slurm, which needs submitit: pip install 'vitlab[slurm]'") from None
    if submitit.SlurmExecutor.affinity() <= 0:
        raise UserError("run.executor is slurm, and this machine has no srun: 'vitlab run' it on a Slurm login node")
    return submitit
