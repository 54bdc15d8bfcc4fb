"""Ray: trials as tasks of a Ray cluster, on as many machines as it has (``pip install 'vitlab[ray]'``).

**Processes.**  Every trial is one Ray task in a fresh process, with ``run.threads`` CPUs, or ``run.resources.cpu``,
and a GPU, or the share of one that ``run.resources.gpu`` says; Ray finds the machine and sets ``CUDA_VISIBLE_DEVICES``.
Ray tries nothing again: a worker that dies is ``lost``, and what is done about that is the same as for every executor.
vitlab, the plugins installed by pip and the data have to be on every machine; a trial refuses other code than it was
planned under.

**Files.**  The task is a stream.  Where the machines see the driver's output folder (``files: shared``), workers write
there and the stream carries only how the job ended.  Elsewhere (``files: copy``) the trial's checkpoint and the trials
it starts from go out as objects, and the stream brings back every line of the journal and every file when it is
written (:mod:`vitlab.executors.mirror`); the driver holds the lease meanwhile.  What was sent before a worker died has
arrived, so the trial goes on from its last checkpoint on any machine.

**Stopping.**  ``cancel`` tells a small actor, on which every worker waits; they write a checkpoint and leave, and those
that have not after the grace are ended by force.  The actor lives beside the driver, so that no other machine's end
takes it along.  A worker whose ``run.timeout`` is over ends its trial itself; one that cannot, because it is stopped or
stuck, is killed on its machine.  When the driver dies, Ray ends its tasks at once, and the next driver goes on from the
last checkpoints, which are at most a minute old.

**Address.**  ``auto`` is the cluster that runs on this machine or that RAY_ADDRESS names, ``HOST:PORT`` another, and
``local`` starts Ray here and stops it with the driver.  Ray so started listens on the network and asks for a token.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from vitlab.errors import UserError
from vitlab.executors import base, machine, worker
from vitlab.executors.base import Ended, Executor, How, Job, Stage, attempt, executor, one_sentence
from vitlab.executors.mirror import Inbox, Outbox, Piece, belongings, moved
from vitlab.spec import RunSpec
from vitlab.store import Busy, process, write_bytes

LOOK_S = 0.2  #: how often a worker looks for changed files, and the driver for a lease
FORCE_S = 10.0  #: how long Ray has to end a task by force
STORE_BYTES = 256 * 2**20  #: of the object store of a Ray that is started here; it spills to the disk


class Begun(NamedTuple):
    """The first item of a stream: the task has a process."""

    host: str
    process: str = ""  #: its name, as of :func:`vitlab.store.process`
    node: str = ""  #: Ray's name for the machine


class Told(NamedTuple):
    """How far the attempt is."""

    stage: Stage


class End(NamedTuple):
    """The last item of a stream."""

    how: How
    detail: str


class Bell:
    """An actor that tells every worker at once to stop."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    async def ring(self) -> None:
        self._rung.set()

    async def rung(self) -> None:
        """Return when it has been rung."""
        await self._rung.wait()


@dataclass
class _Running:
    """A job that Ray has: its stream, what the stream's items are done with, and what is held until its end."""

    job: Job
    stream: Any
    inbox: Inbox | None
    leases: ExitStack
    sent: Sequence[Any]
    begun: Begun | None = None  #: where it runs, once it does
    due: float = math.inf  #: when, by ``time.monotonic()``, it is killed unless it says something before
    killed: bool = False  #: for that reason

    @property
    def host(self) -> str:
        return self.begun.host if self.begun is not None else ""


@executor.register("ray")
class Ray(Executor):
    """Tasks of a Ray cluster, one per trial, each with its CPUs and its share of a GPU."""

    def __init__(
        self,
        run: RunSpec,
        *,
        address: Annotated[str, Field(min_length=1)] = "auto",
        files: Literal["auto", "shared", "copy"] = "auto",
    ) -> None:
        """
        Args:
            run: where and how trials run.
            address: ``auto``, ``local`` or ``HOST:PORT``, the last not from a study file, for what a cluster sends is
                run here; a Ray that this process is connected to is used as it is.
            files: whether workers see the driver's output folder; ``auto`` is shared where the cluster is this machine.

        Raises:
            UserError: if Ray is not installed, there is no such cluster, or it has no machine for a trial.
        """
        super().__init__(run)
        if run.resources.gpu_mem is not None:
            raise UserError("Ray does not know how much memory a GPU has: say run.resources.gpu in place of gpu_mem")
        if run.resources.together > 1:
            raise UserError(
                f"run.resources asks for {run.resources.together} processes for one trial, and tasks of Ray have one; "
                "the executors local and slurm have them"
            )
        self._ray = _connected(address)
        self._files = files
        self._cpus, self._share, fit = self._resources()
        self._slots = run.workers or max(1, fit)
        self._bell: Any = None
        self._stopping = False
        self._waiting: list[Job] = []  #: trials that somebody else holds
        self._running: dict[Any, _Running] = {}  #: by stream
        self._ended: list[Ended] = []
        self._needed: dict[Path, Any] = {}  #: what trials start from, in the object store once

    @classmethod
    def by_hand(cls, options: Mapping[str, Any]) -> str | None:
        return None if options.get("address", "auto") in ("auto", "local") else "address"

    @property
    def slots(self) -> int:
        return self._slots

    def submit(self, job: Job) -> None:
        """Hand a job to Ray, which queues it until a machine has room."""
        if not self._begin(job):
            self._waiting.append(job)

    def poll(self, timeout_s: float) -> list[Ended]:
        deadline = time.monotonic() + timeout_s
        while True:
            self._waiting = [job for job in self._waiting if not self._begin(job)]
            left = 0.0 if self._ended else max(0.0, deadline - time.monotonic())
            self._collect(min(left, LOOK_S) if self._waiting else left)
            if self._ended or time.monotonic() >= deadline:
                ended, self._ended = self._ended, []
                return ended

    def cancel(self, grace_s: float) -> None:
        self._stopping = True
        self._ended += [Ended(job, "stopped") for job in self._waiting]
        self._waiting = []
        try:
            if self._running:
                self._bell.ring.remote()
                self._collect(0.0)
            for running in [running for running in self._running.values() if not running.host]:
                self._ray.cancel(running.stream)  # still in the queue
            self._await_all(grace_s)
        except KeyboardInterrupt:
            pass  # asked again: no more waiting
        for running in self._running.values():
            self._ray.cancel(running.stream, force=True)
        self._await_all(FORCE_S)
        for running in self._running.values():
            self._kill(running)  # Ray asks the process itself, and one that is stopped does not hear it
        self._await_all(FORCE_S)
        for running in list(self._running.values()):
            self._end(running, "lost", f"its worker on {running.host} could not be ended")
        self._bell, self._stopping = None, False

    # -- how it is done -----------------------------------------------------------------------------------------------

    def _resources(self) -> tuple[int, float, int]:
        """The CPUs and the share of a GPU that a trial takes, and how many trials the cluster holds."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        with_gpu = [node for node in nodes if node.get("GPU")] if self.run.device != "cpu" else []
        if self.run.device == "cuda" and not with_gpu:
            raise UserError("run.device is cuda, and no machine of the Ray cluster has a GPU")
        cpus = [int(node.get("CPU", 0)) for node in with_gpu or nodes]
        if not any(cpus):
            raise UserError("no machine of the Ray cluster offers a CPU; 'ray start' takes --num-cpus")
        # As elsewhere, a trial may have more threads than there are cores.
        each = min(self.run.resources.cpu or self.run.threads, max(cpus))
        if not with_gpu:
            return each, 0.0, sum(count // each for count in cpus)
        share = self.run.resources.gpu or 1.0
        per_gpu = int(1 / share + 1e-9)
        fit = [min(count // each, int(node["GPU"]) * per_gpu) for count, node in zip(cpus, with_gpu, strict=True)]
        return each, share, sum(fit)

    def _begin(self, job: Job) -> bool:
        """Hand a job over; False if its files are to be copied and somebody else writes them."""
        with ExitStack() as leases:
            token, sent, inbox = uuid.uuid4().hex, None, None
            if self._copies():
                try:
                    for _, folder in job.work:
                        leases.enter_context(folder.lease())
                except Busy:
                    return False
                for _, folder in job.work:
                    folder.mend()
                worker.note_companions(job)
                sent = [(path, self._object(file, job)) for path, file in belongings(job)]
                inbox = Inbox(job.folders)
            else:
                job.folder.mkdir(parents=True, exist_ok=True)
                with open(job.folder / "log.txt", "a", encoding="utf-8") as log:
                    log.write(f"handed to Ray as {token}\n")
            if self._bell is None:
                bell = self._ray.remote(num_cpus=0, max_concurrency=100_000, max_restarts=-1, max_task_retries=-1)(Bell)
                here = self._ray.get_runtime_context().get_node_id()
                self._bell = bell.options(scheduling_strategy=_at(here)).remote()
            # max_calls stands here because a task's options cannot say it: without it Ray would use a process again.
            share = 0.0 if job.device == "cpu" else job.gpu or self._share
            task = self._ray.remote(
                num_cpus=self._cpus, num_gpus=share, max_calls=1, max_retries=0, num_returns="streaming"
            )(stream)
            handed = task.remote(job, self.runner, token, sent, share > 0, self._bell)
            self._running[handed] = _Running(job, handed, inbox, leases.pop_all(), sent or ())
        return True

    def _copies(self) -> bool:
        if self._files != "auto":
            return self._files == "copy"
        here = self._ray.util.get_node_ip_address()
        return any(node["NodeManagerAddress"] != here for node in self._ray.nodes() if node["Alive"])

    def _object(self, file: Path, job: Job) -> Any:
        """A file in the object store; what several trials start from is put there once."""
        if file.parent in job.folders or file.parent.parent in job.folders:
            return self._ray.put(file.read_bytes())
        if file not in self._needed:
            self._needed[file] = self._ray.put(file.read_bytes())
        return self._needed[file]

    def _collect(self, timeout_s: float) -> None:
        """Wait for an item of any stream, and take one of each that has some."""
        if not self._running:
            time.sleep(timeout_s)
            return
        due = min(running.due for running in self._running.values())
        left = max(0.0, min(timeout_s, due - time.monotonic()))
        if self._ray.wait(list(self._running), num_returns=1, timeout=left)[0]:
            count = len(self._running)
            for ready in self._ray.wait(list(self._running), num_returns=count, timeout=0)[0]:
                self._take(self._running[ready])
        for running in self._running.values():
            if time.monotonic() > running.due:
                running.due, running.killed = math.inf, True
                self._kill(running)

    def _take(self, running: _Running) -> None:
        errors = self._ray.exceptions
        try:
            item = self._ray.get(next(running.stream))
        except StopIteration:
            self._end(running, "lost", f"its worker on {running.host} left and said nothing; see log.txt")
        except errors.TaskCancelledError:
            if running.host:
                self._end(running, "lost", "it did not stop in time, and was ended by force")
            else:
                self._end(running, "stopped")
        except errors.RayTaskError as error:
            where = running.host or "its machine"
            self._end(running, "lost", f"it could not be begun on {where}: {one_sentence(error.cause or error)}")
        except errors.OutOfMemoryError:
            self._end(running, "lost", f"Ray ended its worker on {running.host}, for memory ran out there")
        except errors.RayError as error:
            where = running.host or "a machine of the cluster"
            if running.killed:
                why = f"its process on {where}, stopped or stuck, was killed"
                self._end(running, "timeout", f"it trained longer than run.timeout allows, and {why}")
            elif isinstance(error, errors.WorkerCrashedError):
                self._end(running, "lost", f"its worker on {where} was killed or crashed; see log.txt")
            else:
                self._end(running, "lost", one_sentence(error))
        else:
            match item:
                case Begun():
                    running.begun = item
                    self._hear(running, "tries")
                    running.due += base.START_S
                case Told():
                    self._hear(running, item.stage)
                case Piece():
                    assert running.inbox is not None
                    running.inbox.take(item)
                case End("stopped", _) if not self._stopping:
                    self._end(running, "lost", f"its worker on {running.host} was cut off from the driver")
                case End():
                    self._end(running, *item)

    def _hear(self, running: _Running, stage: Stage) -> None:
        timeout_s = running.job.timeout_s
        if stage == "tries" and timeout_s is not None:
            running.due = time.monotonic() + timeout_s + base.FROZEN_S
        if stage == "waits":
            running.due = math.inf

    def _kill(self, running: _Running) -> None:
        """Kill the process of a task, by another task on its machine."""
        if running.begun is not None:
            task = self._ray.remote(num_cpus=0, max_calls=1, max_retries=0)(base.kill)
            task.options(scheduling_strategy=_at(running.begun.node)).remote(running.begun.process)

    def _end(self, running: _Running, how: How, detail: str = "") -> None:
        del self._running[running.stream]
        if running.inbox is not None:
            running.inbox.close()
        running.leases.close()
        self._ended.append(Ended(running.job, how, detail))

    def _await_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._running and (left := deadline - time.monotonic()) > 0:
            self._collect(left)


# -- the worker's side ------------------------------------------------------------------------------------------------


def stream(
    job: Job, runner: str, token: str, sent: Sequence[tuple[str, Any]] | None, on_gpu: bool, bell: Any
) -> Iterator[Begun | Told | Piece | End]:
    """Run one job in this process: the task.

    The trial runs in a thread, because what the task yields it must yield from its own.

    Args:
        job: what to run.
        runner: see ``Executor.runner``.
        token: stands in the log of a folder that is shared.
        sent: files and where they go, of a folder that is not.
        on_gpu: whether Ray has given this process a GPU.
        bell: the actor.
    """
    import ray

    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(job.threads))
    os.environ.update(threads if on_gpu else {**threads, "CUDA_VISIBLE_DEVICES": ""})
    host = socket.gethostname()
    yield Begun(host, process(os.getpid()), ray.get_runtime_context().get_node_id())
    stop = threading.Event()
    bell.rung.remote().future().add_done_callback(lambda _: stop.set())  # also when the actor is gone
    with ExitStack() as scratch:
        outbox = None
        if sent is not None:
            root = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="vitlab-")))
            for path, reference in sent:
                write_bytes(root / path, ray.get(reference))
            job = moved(job, root)
            outbox = Outbox(job.folders)
        elif not _sees(job.folder, token):
            hint = "without a shared folder, set run.executor.files: copy"
            yield End("refused", f"{host} does not see {job.folder}; {hint}")
            return
        worker.log_to(job.folder)
        if outbox is None:
            worker.note_companions(job)
        ended: list[tuple[How, str]] = []
        told: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        late = f"it trained longer than run.timeout allows, and had not stopped {base.OVERDUE_S:g} s later"

        def run() -> None:
            ended.append(attempt(job, runner, stop.is_set, told.put, overdue=lambda: ended.append(("timeout", late))))

        trial = threading.Thread(target=run, daemon=True)  # one that does not stop ends with the process
        trial.start()
        while trial.is_alive() and not ended:
            trial.join(LOOK_S)
            while not told.empty():
                yield Told(told.get())
            if outbox is not None:
                yield from outbox.changes()
        if outbox is not None:
            yield from outbox.changes(ended=True)
    yield End(*ended[0]) if ended else End("lost", "the trial's thread was ended; see log.txt")


def _at(node: str) -> Any:
    """Where Ray is to put something: on this machine, or nowhere."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _sees(folder: Path, token: str) -> bool:
    try:
        return token in (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


# -- the cluster ------------------------------------------------------------------------------------------------------


def _connected(address: str) -> Any:
    """Ray, connected to the cluster at ``address``."""
    if address.startswith("ray://"):
        raise UserError(
            f"run.executor.address is {address}, and trials cannot stream through Ray's client; "
            "run vitlab on a machine of the cluster, with address: auto"
        )
    # Zero GPUs mean none, as vitlab asks for, and Ray neither warns of that nor reports that it is used.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"the executor ray needs Ray (pip install 'vitlab[ray]'): {error}") from None
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        # Ray's sockets lie in it, and the path of a socket may have 107 characters; a TMPDIR may have more.
        temporary = tempfile.mkdtemp(prefix="vitlab-", dir="/tmp")
        atexit.register(_hang_up, temporary)
        options |= {
            "num_cpus": machine.budget(),
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_temp_dir": temporary,
        }
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except Exception as error:  # of no type of its own where Ray does not come up in time
        if address == "local":
            raise UserError(f"Ray does not start on this machine: {one_sentence(error)}") from None
        at = "on this machine, and RAY_ADDRESS names none" if address == "auto" else f"at {address}"
        raise UserError(
            f"no Ray cluster answers {at}: start one with 'ray start --head', or set run.executor.address: local. "
            f"Ray says: {one_sentence(error)}"
        ) from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)  # Ray takes it; how a driver ends is for the driver to say
    return ray


def _hang_up(temporary: str) -> None:
    """Stop the Ray that was started here, and leave nothing of it."""
    import ray

    with suppress(Exception):  # the interpreter is at its end, and Ray may have ended before
        ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)
