"""Slurm executor: packs of trials as jobs of a Slurm cluster, through submitit (``pip install 'vitlab[slurm]'``).

**Packs.**  A Slurm job receives ``pack`` trials and the resources for all of them: their cores, and their GPUs.  With
``run.device: auto`` GPUs are requested if the partition has some; otherwise a warning says that it has none.  Within
the job, the local executor runs the trials, each in its own process, on its share of a GPU.  Packs that are ready
together are one job array.  The output folder, the data and this Python environment must be on a file system that the
nodes see.

**Several nodes.**  With ``run.resources.nodes``, a pack is one trial with a task on each node, whose local executor
starts that node's processes; the first node alone writes and reports.

**Pre-emption and time limits.**  ``SIGNAL_S`` before Slurm ends a job it sends SIGUSR2, and where ``PreemptParameters``
has ``send_user_signal``, also when it pre-empts one.  The trials then write a checkpoint and the job requeues itself,
which counts as no attempt.  A job that reaches its time limit is requeued up to ``requeues`` times.

**Files.**  A submission has a folder ``slurm/SUBMISSION`` in the output folder, with submitit's files and a folder for
each pack: ``pack.json`` names the Slurm job and the trials, ``ends.jsonl`` lists the ending of each trial as it ends,
``stop`` requests a checkpoint and the end of the job, ``ended`` says that nothing is expected of it any more.

**Stopping.**  ``cancel`` removes pending jobs from the queue and makes running ones write a checkpoint.  When the
driver dies, the jobs continue, and the next driver finds them by their folders.  A pack whose driver died while it
submitted it is given up: it ends at once if it starts later, and the end of a trial that it trains is awaited.  While
Slurm's controller does not answer, nothing is submitted and nothing is lost.

**The driver** of ``vitlab run --detach`` is a Slurm job, too.  Before its time is up it is killed and requeues itself:
the next one finds the packs.
"""

import json
import logging
import math
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from vitlab.errors import UserError, one_line
from vitlab.executors.base import JobEnd, PollingExecutor, executor, format_error
from vitlab.executors.local import Local
from vitlab.runner.job import NODE_VARIABLE, Job
from vitlab.spec import Choice, RunSpec
from vitlab.spec.choice import OneOrMore
from vitlab.store.files import append_json, read_complete_lines, read_json, truncate_torn_line, write_json
from vitlab.store.result import Ending

log = logging.getLogger(__name__)

POLL_S = 1.0  #: interval at which driver and pack check for each other's files
STATE_S = 60.0  #: interval at which the states of Slurm jobs are queried
SIGNAL_S = 90  #: time before the end of a job at which Slurm signals it
PACK_GRACE_S = 60.0  #: part of that time for the trials' checkpoints
AGAIN_S = 30.0  #: pause after a submission that Slurm's controller did not answer
UNANSWERED = re.compile("contact slurm controller|timed out|connection refused|connect failure", re.IGNORECASE)
"""Messages of Slurm's commands while the controller restarts."""

DRIVER = """#!/bin/bash
{setup}
id=$SLURM_JOB_ID
unset ${{!SLURM_@}} ${{!SBATCH_@}}  # they would change the jobs that the driver submits
{command} & driver=$!
trap 'kill -KILL $driver; until scontrol requeue $id; do sleep 5; done; exit' USR1  # the controller may restart
trap 'kill -TERM $driver' TERM
wait $driver; code=$?
while kill -0 $driver 2>/dev/null; do wait $driver; code=$?; done  # a signal ends a wait
exit $code
"""

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

HARMLESS = {"account", "constraint", "exclude", "mem", "nodelist", "nice", "partition", "qos", "reservation"}
"""Options of sbatch that a study file may set: they choose where and when a job runs."""

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
        gres: name of the GPUs where a site wants ``--gres``, such as ``gpu`` or ``gpu:a100``; their number is appended.
        sbatch: options of sbatch, such as ``{partition: gpu, account: vision, mem: 64G, exclude: node7}``; a study file
            may set ``account``, ``constraint``, ``exclude``, ``mem``, ``nodelist``, ``nice``, ``partition``, ``qos``
            and ``reservation``, and the command line any, such as ``mail-user``.
        setup: shell lines before the trials begin, such as ``module load cuda``; not from a study file.  They are
            stored with the study and in its jobs, so a password belongs in a file that they read.
        requeues: how often a job that reached its time limit is put back into the queue.

    Raises:
        UserError: if submitit is not installed, or this is no machine of a Slurm cluster.
    """

    several_nodes = True
    slots: int = 1  #: trials at once

    def __init__(
        self,
        run: RunSpec,
        *,
        pack: OneOrMore = 4,
        jobs: OneOrMore = 16,
        minutes: OneOrMore = 240,
        gres: ShellWord | None = None,
        sbatch: Mapping[ShellWord, ShellWord | int] = {},
        setup: tuple[str, ...] = (),
        requeues: NonNegativeInt = 20,
    ) -> None:
        super().__init__(run)
        self._submitit = _require_submitit_and_srun()
        self._pack = pack if run.resources.nodes == 1 else 1
        self.slots = min(run.workers or self._pack * jobs, self._pack * jobs)
        self._jobs = min(jobs, math.ceil(self.slots / self._pack))
        self._requeues = requeues
        self._partition, self._gres = sbatch.get("partition"), gres
        self._parameters: dict[str, Any] = {
            "time": minutes,
            "signal_delay_s": SIGNAL_S,
            "array_parallelism": jobs,
            "wckey": None,  # submitit would charge its own name
            "setup": list(setup) or None,
            "additional_parameters": dict(sbatch),
        }
        self._sent: list[_Submitted] = []
        self._asked_at, self._again_at = time.monotonic(), 0.0

    @classmethod
    def cli_only_option(cls, options: Mapping[str, object]) -> str | None:
        """Return ``setup``, or ``sbatch`` with an option that is not harmless: they can run code and write files."""
        if options.get("setup"):
            return "setup"
        sbatch = options.get("sbatch")
        return "sbatch" if isinstance(sbatch, Mapping) and not sbatch.keys() <= HARMLESS else None

    @classmethod
    def detach(cls, options: Mapping[str, Any], words: Sequence[str], log: Path) -> tuple[str, str]:
        """Submit the driver as a job, which requeues itself when its time is up.

        Raises:
            UserError: if Slurm rejects it.
        """
        flags = {name: value for name, value in options["sbatch"].items() if name != "mem"}  # that of a pack
        flags |= {"job-name": "vitlab-driver", "time": options["minutes"], "signal": f"B:USR1@{SIGNAL_S}"}
        flags |= {"cpus-per-task": 1, "open-mode": "append", "output": log}
        script = DRIVER.format(setup="\n".join(options["setup"]), command=shlex.join(words))
        command = ["sbatch", "--parsable", "--requeue", *(f"--{name}={value}" for name, value in flags.items())]
        job_id = _run_command(*command, input=script).strip().partition(";")[0]
        return f"Slurm job {job_id}", f"scancel {job_id}"

    def cancel(self, grace_s: float) -> None:
        """Drop queued jobs and ask running ones to stop."""
        self._drop_waiting_jobs()
        for pack in self._sent:
            (pack.folder / "stop").touch()
            if not (pack.folder / "started").exists():
                pack.slurm.cancel(check=False)
                self._end_pack(pack, Ending.STOPPED, "")
        try:
            deadline = time.monotonic() + grace_s
            while any(pack.jobs for pack in self._sent) and time.monotonic() < deadline:
                time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
                self._collect_ended_jobs()
        except KeyboardInterrupt:
            pass  # second Ctrl-C: stop waiting
        for pack in [pack for pack in self._sent if pack.jobs]:
            pack.slurm.cancel(check=False)
            self._end_pack(pack, Ending.LOST, "it did not stop in time, and its Slurm job was cancelled")
        self._sent.clear()

    def reattach(self, jobs: Sequence[Job]) -> list[Job]:
        """Find jobs that an earlier driver left in the queue."""
        by_folder = {job.folder: job for job in jobs}
        for folder in sorted(folder for root in set(map(_output_folder, jobs)) for folder in root.glob("slurm/*/*/")):
            record = None if (folder / "ended").exists() else read_json(folder / "pack.json")
            if record is None:
                continue
            matching = {}
            for name, folders in record["trials"].items():
                own_jobs = [by_folder[Path(item)] for item in folders if Path(item) in by_folder]
                if own_jobs:
                    matching[name] = replace(own_jobs[0], trials=tuple(item for job in own_jobs for item in job.trials))
            if not matching:
                continue  # a pack of another study, whose driver may be about to submit it
            # Without a job the earlier driver died while it submitted the pack, whose trials have leases if they run.
            slurm = record["job"] and self._submitit.SlurmJob(folder=folder.parent, job_id=record["job"])
            if slurm is None or slurm.done(force_check=True):
                (folder / "ended").touch()  # the trials' folders hold their results
            else:
                self._sent.append(_Submitted(folder, slurm, matching))
        return [job for pack in self._sent for job in pack.jobs.values()]

    def _submit_packs(self, packs: Sequence[Sequence[Job]], needs: Mapping[str, object]) -> None:
        """Submit packs with equal needs, several as an array.

        Raises:
            UserError: if Slurm rejects them, or does not answer.
        """
        folder = _output_folder(packs[0][0]) / "slurm" / uuid.uuid4().hex[:12]
        python = f"{shlex.quote(sys.executable)} -P"  # imports nothing from the folder of the submission
        slurm = self._submitit.SlurmExecutor(folder, max_num_timeout=self._requeues, python=python)
        slurm.update_parameters(job_name=f"vitlab-{folder.name}", **self._parameters, **needs)
        trials = [{str(job.folder): [str(item) for item in job.folders] for job in jobs} for jobs in packs]
        batches = [SlurmBatch(folder / str(n), self.run, tuple(jobs)) for n, jobs in enumerate(packs)]
        for batch, own in zip(batches, trials, strict=True):
            # Written before the submission, in case this driver dies meanwhile.
            write_json(batch.folder / "pack.json", {"job": None, "trials": own})
        try:
            with slurm.batch():
                submissions = [slurm.submit(batch) for batch in batches]
        except (self._submitit.core.utils.FailedJobError, OSError) as error:
            for batch in batches:
                (batch.folder / "ended").touch()  # if the job was submitted after all, it ends at once
            raise UserError(f"Slurm rejected the job: {format_error(error)}") from error
        for jobs, batch, submission, own in zip(packs, batches, submissions, trials, strict=True):
            write_json(batch.folder / "pack.json", {"job": submission.job_id, "trials": own})
            self._sent.append(_Submitted(batch.folder, submission, {str(job.folder): job for job in jobs}))
            for job in jobs:
                self._waiting.remove(job)

    def _node_request(self, jobs: Sequence[Job]) -> dict[str, object]:
        """Return what a Slurm job requests on each node to run these trials together: cores, and GPUs if any."""
        resources, nodes = self.run.resources, self.run.resources.nodes
        cores = math.ceil(len(jobs) * resources.cores(self.run.threads) / nodes)
        needs: dict[str, object] = {"nodes": nodes, "ntasks_per_node": 1, "cpus_per_task": cores}
        if nodes > 1:
            needs["srun_args"] = ["--wait=60"]  # a node whose first one has failed ends
        devices = {job.settings.device for job in jobs}
        if not ("cuda" in devices or ("auto" in devices and self._device_auto_has_gpus)):
            return needs
        shares = [job.gpu or resources.gpu or 1.0 for job in jobs if job.settings.device != "cpu"]
        count = math.ceil(sum(shares) / nodes - 1e-6)
        return {**needs, **({"gres": f"{self._gres}:{count}"} if self._gres else {"gpus_per_node": count})}

    @cached_property
    def _device_auto_has_gpus(self) -> bool:
        """Whether trials of ``device: auto`` get GPUs: some are requested, or the partition has some.

        Raises:
            UserError: if Slurm does not answer.
        """
        if self.run.resources.gpu is not None or self._gres is not None:
            return True
        own = [f"--partition={self._partition}"] if self._partition else []
        lines = [line.split() for line in _run_command("sinfo", "--noheader", "--format=%P %G", *own).splitlines()]
        partitions = [words for words in lines if self._partition or words[0].endswith("*")]  # * marks the default one
        if any("gpu" in words[-1] for words in partitions or lines):
            return True
        where = f"partition {self._partition}" if self._partition else "the default partition"
        log.warning(
            "run.device is auto, and %s of Slurm lists no GPU: trials are trained on CPUs. Name another partition by "
            "run.executor.sbatch.partition, or set run.device: cpu.",
            where,
        )
        return False

    def _wait_and_collect_ends(self, timeout_s: float) -> None:
        """Send waiting jobs and collect ended ones.

        A pack is submitted when fewer than ``jobs`` packs are in Slurm.  The driver submits a new job for each ended
        one, so when a whole pack has ended, the next one is full.
        """
        free = self._jobs - len(self._sent)
        if self._waiting and free > 0 and time.monotonic() >= self._again_at:
            starts = range(0, len(self._waiting), self._pack)
            packs = [self._waiting[start : start + self._pack] for start in starts][:free]
            try:
                for needs, group in groupby(packs, self._node_request):
                    self._submit_packs(list(group), needs)
            except UserError as error:
                if not UNANSWERED.search(f"{error} {error.__cause__}"):
                    raise
                log.warning("Slurm's controller does not answer; trials are submitted when it does.")
                self._again_at = time.monotonic() + AGAIN_S
        self._collect_ended_jobs()
        if not self._ends:
            time.sleep(min(POLL_S, timeout_s))

    def _collect_ended_jobs(self) -> None:
        """Collect the trials that have ended, and remove the packs whose Slurm job has ended."""
        due = time.monotonic() - self._asked_at >= STATE_S
        remaining = []
        for pack in self._sent:
            over = pack.slurm.paths.result_pickle.exists() or (due and pack.slurm.done(force_check=True))
            lines, pack.offset = read_complete_lines(pack.folder / "ends.jsonl", pack.offset)
            for name, value, detail in map(json.loads, lines):
                job = pack.jobs.pop(name, None)
                if job is not None:
                    self._ends.append(JobEnd(job, Ending(value), detail))
            if not pack.jobs:
                (pack.folder / "ended").touch()
            elif over:
                state = str(pack.slurm.state).split(" ")[0]
                because = f"its Slurm job {pack.slurm.job_id} ended ({state}) before it did; see {pack.folder}"
                self._end_pack(pack, STATES.get(state, Ending.LOST), because)
            if not over:
                remaining.append(pack)
        if due:
            self._asked_at = time.monotonic()
        self._sent = remaining

    def _end_pack(self, pack: _Submitted, ending: Ending, detail: str) -> None:
        self._ends += [JobEnd(job, ending, detail) for job in pack.jobs.values()]
        pack.jobs.clear()
        (pack.folder / "ended").touch()


class SlurmBatch:
    """Callable of a Slurm job (a pack), which runs its trials with the local executor and records their endings.

    submitit calls it, and on SIGUSR2 its ``checkpoint``, which returns the submission of the requeued job.
    """

    def __init__(self, folder: Path, run: RunSpec, jobs: tuple[Job, ...]) -> None:
        self.folder = folder
        # The job's resources limit the workers, not run.workers; and no address or option with a password is pickled.
        own = {"workers": None, "tracker": Choice("none"), "resources": run.resources.share_per_node}
        self.run, self.nodes = run.model_copy(update={**own, "executor": Choice("local")}), run.resources.nodes
        self.jobs = jobs
        self._local: Local | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_local": None}

    def __call__(self) -> None:
        """Run the pack's jobs on the node."""
        if (self.folder / "ended").exists():
            return  # its driver has given it up
        if self.nodes > 1:
            _set_rank_variables()
        (self.folder / "started").touch()
        truncate_torn_line(self.folder / "ends.jsonl")  # Slurm may have killed an earlier run in the middle of a line
        local = self._local = Local(self.run)
        finished = {json.loads(line)[0] for line in read_complete_lines(self.folder / "ends.jsonl")[0]}
        waiting = [job for job in self.jobs if str(job.folder) not in finished]
        running = 0
        while waiting or running:
            if (self.folder / "stop").exists():
                local.cancel(PACK_GRACE_S)
                self._record_endings(local.poll(0.0))
                self._record_endings([JobEnd(job, Ending.STOPPED) for job in waiting])
                return
            while waiting and running < local.slots:
                local.submit(waiting.pop(0))
                running += 1
            ends = local.poll(POLL_S)
            running -= len(ends)
            self._record_endings(ends)

    def checkpoint(self) -> Any:
        """Make every trial write a checkpoint, and return this pack for requeueing; it skips ended trials."""
        if self._local is not None:
            self._local.cancel(PACK_GRACE_S)
            self._record_endings([end for end in self._local.poll(0.0) if end.ending in FINAL])
        return _require_submitit_and_srun().helpers.DelayedSubmission(self)

    def _record_endings(self, ends: Sequence[JobEnd]) -> None:
        for end in ends if os.environ.get(NODE_VARIABLE, "0") == "0" else ():
            append_json(self.folder / "ends.jsonl", [str(end.job.folder), end.ending, end.detail])


def _set_rank_variables() -> None:
    """Set the variables by which the processes of a trial on several nodes find each other, as torchrun names them."""
    environment = _require_submitit_and_srun().slurm.slurm.SlurmJobEnvironment()
    os.environ[NODE_VARIABLE] = str(environment.node)
    os.environ.setdefault("MASTER_ADDR", environment.hostnames[0])
    os.environ.setdefault("MASTER_PORT", str(20_000 + int(environment.raw_job_id) % 10_000))


def _run_command(*command: str, input: str = "") -> str:
    """Return what a command of Slurm prints.

    Raises:
        UserError: if it fails.
    """
    try:
        return subprocess.run(command, input=input, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        because = one_line(getattr(error, "stderr", None) or error)
        raise UserError(f"Slurm does not answer {command[0]} ({because}); run again when it does") from error


def _output_folder(job: Job) -> Path:
    """Return the output folder that contains a job's folder."""
    return job.folder.parents[2]


def _require_submitit_and_srun() -> Any:
    try:
        import submitit
    except ImportError:
        raise UserError("run.executor is slurm, which needs submitit; run: pip install 'vitlab[slurm]'") from None
    if submitit.SlurmExecutor.affinity() <= 0:
        raise UserError("run.executor is slurm, and this machine has no srun; run 'vitlab run' on a Slurm login node")
    return submitit
