"""The worker's side of the executor ray: one task, one trial, and what the task says of it while it lasts."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.executors import base, worker
from vitlab.executors.base import How, Job, Stage, attempt
from vitlab.executors.mirror import FileChunk, FileSender, moved
from vitlab.store.folders import process, write_bytes

POLL_S = 0.2  #: how often a worker looks for changed files


class Started(NamedTuple):
    """The first item of a stream: the task has a process."""

    host: str
    process: str = ""  #: its name, as of :func:`vitlab.store.folders.process`
    node: str = ""  #: Ray's name for the machine


class ProgressMessage(NamedTuple):
    """How far the attempt is."""

    stage: Stage


class End(NamedTuple):
    """The last item of a stream."""

    how: How
    detail: str


class StopSignal:
    """An actor that tells every worker at once to stop."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    async def ring(self) -> None:
        self._rung.set()

    async def rung(self) -> None:
        """Return when it has been rung."""
        await self._rung.wait()


def stream(
    job: Job, runner: str, token: str, sent: Sequence[tuple[str, Any]] | None, on_gpu: bool, bell: Any
) -> Iterator[Started | ProgressMessage | FileChunk | End]:
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
    yield Started(host, process(os.getpid()), ray.get_runtime_context().get_node_id())
    stop = threading.Event()
    bell.rung.remote().future().add_done_callback(lambda _: stop.set())  # also when the actor is gone
    with ExitStack() as scratch:
        outbox = None
        if sent is not None:
            root = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="vitlab-")))
            for path, reference in sent:
                write_bytes(root / path, ray.get(reference))
            job = moved(job, root)
            outbox = FileSender(job.folders)
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
            trial.join(POLL_S)
            while not told.empty():
                yield ProgressMessage(told.get())
            if outbox is not None:
                yield from outbox.changes()
        if outbox is not None:
            yield from outbox.changes(ended=True)
    for left in multiprocessing.active_children():  # of a trial that does not stop; its exit would wait for them
        left.kill()
    yield End(*ended[0]) if ended else End("lost", "the trial's thread was ended; see log.txt")


def _sees(folder: Path, token: str) -> bool:
    try:
        return token in (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
