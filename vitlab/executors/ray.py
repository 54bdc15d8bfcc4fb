"""Ray executor: trials as tasks on all machines of a Ray cluster (``pip install 'vitlab[ray]'``).

**Processes.**  Every trial is one Ray task in a fresh process, with ``run.threads`` CPUs, or ``run.resources.cpu``, and
a GPU, or the share set by ``run.resources.gpu``; Ray selects the machine and sets ``CUDA_VISIBLE_DEVICES``.  A trial
with several processes, each on a GPU or with its CPUs, is one task that takes all of these on one machine and starts
the processes itself; with ``run.resources.nodes``, one such task on each machine of a placement group.  Slots are
recounted regularly, so a machine that joins is used.  Some trials more than fit are queued in Ray, up to twice as many,
because an autoscaler starts machines for queued tasks, also where there is none yet.  Ray's own retries are disabled:
a worker that dies is ``lost`` and handled as for every executor.  vitlab, the plugins installed by pip and the data
must be on every machine; a trial refuses to run with other code than planned.

**Files.**  The task is a stream.  If the machines see the driver's output folder (``files: shared``), workers write
there and the stream carries only the job's ending.  Otherwise (``files: copy``) the trial's checkpoint and its
prerequisites are sent as objects, and the stream returns every file as it is written
(:mod:`vitlab.executors.task`); the driver holds the lease meanwhile.  Files sent before a worker died have arrived,
so the trial resumes from its last checkpoint on any machine.

**Stopping.**  ``cancel`` signals a small actor, on which every worker waits; the workers write a checkpoint and exit,
and those still running after the grace period are killed.  The actor runs on the driver's machine, so that it survives
the loss of other machines.  A worker ends its trial itself after ``run.timeout``; one that cannot, because it is
stopped or stuck, is killed on its machine.  When the driver dies, Ray ends its tasks at once, and the next driver
resumes from the last checkpoints, which are at most a minute old.

**Address.**  ``auto`` is the cluster on this machine or the one named by RAY_ADDRESS, ``HOST:PORT`` another one.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from vitlab.errors import UserError, VitlabError, format_count
from vitlab.executors import base, worker
from vitlab.executors.base import JobEnd, PollingExecutor, Watchdog, executor, format_error
from vitlab.executors.task import (
    FileChange,
    Finished,
    Started,
    StopSignal,
    apply_file_change,
    list_input_files,
    run_ray_task,
)
from vitlab.runner.job import Job
from vitlab.spec import RunSpec
from vitlab.store.folders import TrialFolder
from vitlab.store.locks import Busy, kill_process
from vitlab.store.result import Ending

log = logging.getLogger(__name__)

POLL_S = 0.2  #: interval at which the driver tries to take a lease
FORCE_S = 10.0  #: time limit for Ray to kill a task
AHEAD = 8  #: trials that are queued in Ray in any case, for its autoscaler
COUNT_S = 5.0  #: interval at which machines are counted and this machine's daemon is checked

QUEUED = Started("", "", "", "")  #: of a job that runs nowhere yet


@dataclass
class _SubmittedJob:
    """A job submitted to Ray: its stream, and the leases and objects held until its end."""

    job: Job
    stream: Any
    leases: ExitStack
    inputs: tuple[str, Any]  #: the token of a shared folder, and the files sent to another one
    watchdog: Watchdog
    group: Any = None  #: the placement group of a trial on several machines
    peers: list[Any] = field(default_factory=list)  #: streams of its other machines
    started: Started = QUEUED  #: where it runs


@executor.register("ray")
class Ray(PollingExecutor):
    """Tasks of a Ray cluster, one per trial, each with its CPUs and its share of a GPU.

    Args:
        run: where and how trials run.
        address: ``auto`` or ``HOST:PORT``, the last not from a study file, for what a cluster sends is run here; a Ray
            that this process is connected to is used as it is.
        files: whether workers see the driver's output folder; ``auto`` is shared where the cluster is this machine.
        labels: labels of the machines to use, such as ``{ray.io/accelerator-type: H100}``.
        resources: custom resources of a trial, such as ``{licence: 1}``.
        runtime_env: Ray's runtime environment of the workers, such as ``{pip: [acme-vit]}``; not from a study file.

    Raises:
        UserError: if Ray is not installed, or there is no such cluster.
    """

    several_nodes = True

    def __init__(
        self,
        run: RunSpec,
        *,
        address: Annotated[str, Field(min_length=1)] = "auto",
        files: Literal["auto", "shared", "copy"] = "auto",
        labels: Mapping[str, str] = {},
        resources: Mapping[str, float] = {},
        runtime_env: Mapping[str, Any] = {},
    ) -> None:
        super().__init__(run)
        self._ray = import_and_connect_ray(address)
        self._daemon, self._looked = daemon_address(self._ray), time.monotonic()
        self._files = files
        self._each = trial_demand_on_cluster(self._ray, run)
        options = {"label_selector": labels, "resources": resources, "runtime_env": runtime_env}
        self._options = {name: dict(value) for name, value in options.items() if value}
        self._slots, self._counted = 0, -math.inf
        self._bell: Any = None
        self._stopping = False
        self._running: dict[Any, _SubmittedJob] = {}  #: by stream
        self._shared: dict[Path, Any] = {}  #: files of prerequisites, each stored once in the object store

    @classmethod
    def cli_only_option(cls, options: Mapping[str, object]) -> str | None:
        """Return ``runtime_env`` if it is given, and ``address`` unless it is ``auto``: they run code."""
        if options.get("runtime_env"):
            return "runtime_env"
        return None if options.get("address", "auto") == "auto" else "address"

    @property
    def slots(self) -> int:
        """Value of ``run.workers``, or the trials that fit on the current machines, and those that Ray is to see."""
        if self.run.workers is None and time.monotonic() - self._counted > COUNT_S:
            self._slots = count_fitting_trials(self._ray, self._each) // self.run.resources.nodes
            self._counted = time.monotonic()
        return self.run.workers or max(1, self._slots + min(self.waiting, max(AHEAD, self._slots)))

    def submit(self, job: Job) -> None:
        """Submit a job to Ray, which queues it until a machine has room."""
        if not self._submit_unless_leased(job):
            self._waiting.append(job)

    def cancel(self, grace_s: float) -> None:
        """Drop queued jobs and ask running ones to stop."""
        self._stopping = True
        self._drop_waiting_jobs()
        if not is_listening(*self._daemon):  # Ray does not respond any more, and its workers exit by themselves
            for running in list(self._running.values()):
                self._record_end(running, Ending.STOPPED)
        try:
            if self._running:
                self._bell.set.remote()
                self._wait_and_collect_ends(0.0)
            for running in self._running.values():
                if not running.started.host:  # still in the queue
                    self._ray.cancel(running.stream)
            self._wait_for_all(grace_s)
        except KeyboardInterrupt:
            pass  # second Ctrl-C: stop waiting
        for running in self._running.values():
            self._ray.cancel(running.stream, force=True)
        self._wait_for_all(FORCE_S)
        for running in self._running.values():
            self._kill_worker(running)  # Ray relies on the process itself, which cannot react while stopped
        self._wait_for_all(FORCE_S)
        for running in list(self._running.values()):
            self._record_end(running, Ending.LOST, f"its worker on {running.started.host} could not be ended")
        self._bell, self._stopping = None, False

    def _submit_unless_leased(self, job: Job) -> bool:
        """Submit a job; return False if its files are to be copied and another process holds a lease."""
        with ExitStack() as leases:
            token, files = uuid.uuid4().hex, None
            if self._must_copy_files():
                folders = [TrialFolder(folder) for folder in job.folders]
                try:
                    for folder in folders:
                        leases.enter_context(folder.lease())
                except Busy:
                    return False
                for folder in folders:
                    folder.prepare_for_attempt()
                worker.refer_to_shared_log(job)
                files = [(path, self._put_file(file, job)) for path, file in list_input_files(job)]
            else:
                worker.append_to_log(job.folder, f"handed to Ray as {token}")
            if self._bell is None:
                bell = self._ray.remote(num_cpus=0, max_concurrency=100_000, max_restarts=-1, max_task_retries=-1)(
                    StopSignal
                )
                self._bell = bell.options(
                    scheduling_strategy=self._make_node_strategy(self._ray.get_runtime_context().get_node_id())
                ).remote()
            # Without max_calls Ray would reuse the process; task.options() does not support it.
            group = self._make_placement_group(job)
            items = self._start_task(job, token, files, group)
            watchdog = Watchdog(job.timeout_s)
            self._running[items] = _SubmittedJob(job, items, leases.pop_all(), (token, files), watchdog, group)
        return True

    def _gpus_per_node(self, job: Job) -> float:
        """Return the GPUs of a job on each of its machines."""
        return 0.0 if job.settings.device == "cpu" else job.gpu or self._each.gpus

    def _make_placement_group(self, job: Job) -> Any:
        """Return a placement group of as many machines as a trial needs; None for one."""
        if self.run.resources.nodes == 1:
            return None
        needs = {"CPU": float(self._each.cpus), "GPU": self._gpus_per_node(job), **self._options.get("resources", {})}
        bundles = [{name: value for name, value in needs.items() if value}] * self.run.resources.nodes
        labels = self._options.get("label_selector")
        return self._ray.util.placement_group(
            bundles, "STRICT_SPREAD", bundle_label_selector=[labels] * len(bundles) if labels else None
        )

    def _start_task(self, job: Job, token: str, files: Any, group: Any, node: int = 0, address: str = "") -> Any:
        """Start a job's task, or the task of one of its further machines, and return its stream."""
        share, nodes = self._gpus_per_node(job), self.run.resources.nodes
        options = dict(self._options)
        if group is not None:  # its bundles have the labels
            options.pop("label_selector", None)
            strategies = self._ray.util.scheduling_strategies
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(group, node)
        task = self._ray.remote(
            num_cpus=self._each.cpus, num_gpus=share, max_calls=1, max_retries=0, num_returns="streaming", **options
        )(run_ray_task)
        place = (node, address) if nodes > 1 else None
        return task.remote(job, token, files, share > 0, self._bell, os.getcwd(), place)

    def _must_copy_files(self) -> bool:
        if self._files != "auto":
            return self._files == "copy"
        here = self._ray.util.get_node_ip_address()
        return any(node["NodeManagerAddress"] != here for node in self._ray.nodes() if node["Alive"])

    def _put_file(self, file: Path, job: Job) -> Any:
        """Put a file into the object store; files of prerequisites, which several trials may share, only once."""
        if file.parent in job.folders or file.parent.parent in job.folders:
            return self._ray.put(file.read_bytes())
        if file not in self._shared:
            self._shared[file] = self._ray.put(file.read_bytes())
        return self._shared[file]

    def _wait_and_collect_ends(self, timeout_s: float) -> None:
        """Wait for an item of any stream, and take one item of each stream that has some."""
        if time.monotonic() - self._looked > COUNT_S:
            self._looked = time.monotonic()
            self._require_daemon()
        self._waiting = [job for job in self._waiting if not self._submit_unless_leased(job)]
        if self._waiting:
            timeout_s = min(timeout_s, POLL_S)
        if not self._running:
            time.sleep(timeout_s)
            return
        due = min(running.watchdog.due for running in self._running.values())
        wait_s = max(0.0, min(timeout_s, due - time.monotonic()))
        if self._ray.wait(list(self._running), num_returns=1, timeout=wait_s)[0]:
            count = len(self._running)
            for ready in self._ray.wait(list(self._running), num_returns=count, timeout=0)[0]:
                self._handle_stream_item(self._running[ready])
        for running in self._running.values():
            if running.watchdog.mark_killed_if_due():
                self._kill_worker(running)

    def _handle_stream_item(self, running: _SubmittedJob) -> None:
        try:
            item = self._ray.get(next(running.stream))
        except (StopIteration, self._ray.exceptions.RayError) as error:
            self._record_end(running, *self._classify_stream_error(error, running))
            return
        match item:
            case Started():
                running.started = item
                running.peers = [
                    self._start_task(running.job, *running.inputs, running.group, node, item.address)
                    for node in range(1, self.run.resources.nodes)
                ]
                running.watchdog.start(base.START_S)
            case "tries" | "begun" | "waits":
                running.watchdog.record_stage(item)
            case FileChange():
                try:
                    apply_file_change(item, running.job.folders)
                except Busy:
                    self._ray.cancel(running.stream, force=True)
                    self._record_end(running, Ending.LOST, "another driver has taken its trial over")
            case Finished(Ending.STOPPED, _) if not self._stopping:
                detail = f"its worker on {running.started.host} lost its connection to the driver"
                self._record_end(running, Ending.LOST, detail)
            case Finished():
                self._record_end(running, *item)

    def _classify_stream_error(self, error: Exception, running: _SubmittedJob) -> tuple[Ending, str]:
        """Return how a job ended whose stream has ended with an error."""
        errors, where = self._ray.exceptions, running.started.host or "a machine of the cluster"
        match error:
            case errors.TaskCancelledError() if not running.started.host:
                return Ending.STOPPED, ""
            case errors.TaskCancelledError():
                reason = "it did not stop in time and was killed"
            case StopIteration():
                reason = f"its worker on {where} ended and reported nothing; see log.txt"
            case errors.RayTaskError():
                reason = f"it could not start on {where}: {format_error(error.cause or error)}"
            case errors.OutOfMemoryError():
                reason = f"memory ran out on {where}, and Ray ended its worker"
            case _ if running.watchdog.has_killed:
                return Ending.TIMEOUT, base.KILLED.format(process=f"its process on {where}")
            case errors.WorkerCrashedError():
                reason = f"its worker on {where} was killed or crashed; see log.txt"
            case errors.NodeDiedError():
                reason = f"its machine {where} has died"
            case _:  # Ray explains at length
                reason = f"its worker on {where} is gone: {str(error).partition(chr(10))[0]}"
        return Ending.LOST, reason

    def _kill_worker(self, running: _SubmittedJob) -> None:
        """Kill the process of a task, by another task on its machine."""
        if running.started.host:
            task = self._ray.remote(num_cpus=0, max_calls=1, max_retries=0)(kill_process)
            task.options(scheduling_strategy=self._make_node_strategy(running.started.node)).remote(
                running.started.process
            )

    def _make_node_strategy(self, node: str) -> Any:
        """Return the scheduling strategy that requires a given node."""
        return self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _require_daemon(self) -> None:
        """Raise an error if Ray's daemon on this machine has died.

        Raises:
            VitlabError: if it has died; the trials are intact, and no attempt counts.
        """
        if not self._stopping and not is_listening(*self._daemon):
            raise VitlabError(
                "Ray's daemon on this machine (raylet) has died. Run the same command again, which resumes from the "
                "last checkpoints; first start the daemon with 'ray start'."
            )

    def _record_end(self, running: _SubmittedJob, ending: Ending, detail: str = "") -> None:
        if ending == Ending.LOST:
            self._require_daemon()
        del self._running[running.stream]
        if running.group is not None:
            self._ray.util.remove_placement_group(running.group)  # ends its tasks
        running.leases.close()
        self._ends.append(JobEnd(running.job, ending, detail))


# -- the cluster -------------------------------------------------------------------------------------------------------


class Demand(NamedTuple):
    """Resources of one trial on each of its machines."""

    cpus: int
    gpus: float  #: a share of one GPU, or a number of whole GPUs


def trial_demand_on_cluster(ray: Any, run: RunSpec) -> Demand:
    """Return the resources that a trial of a study requires on each of its machines.

    With ``device: auto`` it has a GPU if a machine of the cluster has some now.
    """
    resources, machines = run.resources.share_per_node, _machine_resources(ray)
    has_gpus = any(machine.get("GPU", 0) for machine in machines)
    gpus = 0.0
    if run.device == "cuda" or (run.device == "auto" and (has_gpus or resources.gpu is not None)):
        gpus = resources.gpu or 1.0
    # As elsewhere, a trial may have more threads than there are cores.
    fitting = [int(machine.get("CPU", 0)) for machine in machines if machine.get("GPU", 0) >= math.ceil(gpus)]
    cores = resources.cores(run.threads)
    each = Demand(min(cores, max(fitting, default=0)) or cores, gpus)
    if not count_fitting_trials(ray, each):
        gpu = f", {gpus:g} GPU" if gpus else ""
        _warn_once(
            f"no machine of the Ray cluster has {format_count(each.cpus, 'CPU')}{gpu} now; trials wait until one joins."
        )
        if run.device == "auto" and not gpus:
            _warn_once("run.device is auto, and the cluster has no GPU now; run.device: cuda makes trials ask for one.")
    return each


@cache
def _warn_once(sentence: str) -> None:
    """Log a warning once, although a run builds its executor several times."""
    log.warning(sentence)


def count_fitting_trials(ray: Any, each: Demand) -> int:
    """Return the number of trials that fit on the current machines at a time."""
    total = 0
    for machine in _machine_resources(ray):
        fit, gpus = int(machine.get("CPU", 0)) // each.cpus, int(machine.get("GPU", 0))
        if each.gpus:  # Ray places a share on one GPU and never splits it over two
            fit = min(fit, int(gpus // each.gpus) if each.gpus >= 1 else gpus * int(1 / each.gpus + 1e-9))
        total += fit
    return total


def daemon_address(ray: Any) -> tuple[str, int]:
    """Return the address and port of Ray's daemon on this machine."""
    [node] = [node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()]
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def is_listening(address: str, port: int) -> bool:
    """Return True if a process of this machine listens on a port.

    Ray itself needs half a minute to detect that a daemon has died, and streams from its workers never end.
    """
    try:
        with socket.create_connection((address, port), timeout=5.0):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:  # too busy to answer
        return True


def _machine_resources(ray: Any) -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def import_and_connect_ray(address: str) -> Any:
    """Return the ``ray`` module, connected to the cluster at ``address``."""
    if address.startswith("ray://"):
        raise UserError(
            f"run.executor.address is {address}, and trials cannot stream through Ray's client; "
            "run vitlab on a machine of the cluster, with address: auto"
        )
    # num_gpus=0 hides all GPUs, without a warning; usage reports are disabled.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"the executor ray needs Ray (pip install 'vitlab[ray]'): {error}") from None
    if ray.is_initialized():
        return ray
    is_main = threading.current_thread() is threading.main_thread()
    old_handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.chdir("/"):  # Ray has workers import from the current folder first; see task.run_ray_task
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # Of a machine that dies, Ray prints some 40 lines on stdout, which is for the answer; the trial's line says it.
        ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
    except Exception as error:  # Ray raises no specific type if it does not answer in time
        at = "on this machine, and RAY_ADDRESS names none" if address == "auto" else f"at {address}"
        raise UserError(
            f"no Ray cluster answers {at}: start one with 'ray start --head'. Ray says: {format_error(error)}"
        ) from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, old_handler)  # Ray replaces the handler; the driver needs its own
    return ray
