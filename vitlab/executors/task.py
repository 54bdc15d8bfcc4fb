"""Worker side of the Ray executor: one task runs one job and streams its progress."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.executors import worker
from vitlab.executors.base import Stage
from vitlab.executors.mirror import FileChange, FileSender, relocate
from vitlab.runner.job import Job
from vitlab.store.files import write_bytes
from vitlab.store.locks import process
from vitlab.store.result import Ending

POLL_S = 0.2  #: interval at which a worker checks for changed files


class Started(NamedTuple):
    """First item of a stream: the process of the task."""

    host: str
    process: str = ""  #: name of the process, see :func:`vitlab.store.locks.process`
    node: str = ""  #: Ray's id of the machine


class ProgressMessage(NamedTuple):
    """Item of a stream between the first and the last: the stage that the attempt has reached."""

    stage: Stage


class Finished(NamedTuple):
    """Last item of a stream: the ending of the job."""

    ending: Ending
    detail: str


class StopSignal:
    """Actor that signals all workers to stop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def set(self) -> None:
        """Send the signal."""
        self._event.set()

    async def wait(self) -> None:
        """Wait for the signal."""
        await self._event.wait()


def stream(
    job: Job, runner: str, token: str, sent: Sequence[tuple[str, Any]] | None, on_gpu: bool, bell: Any, folder: str
) -> Iterator[Started | ProgressMessage | FileChange | Finished]:
    """Run one job in this process, as a Ray task.

    The trial runs in a background thread, because the task's own thread yields the items.

    Args:
        job: the job to run.
        runner: see ``Executor.runner``.
        token: text in the log of a shared folder, by which the worker recognises it.
        sent: destination paths and contents of the files of a folder that is not shared; None for a shared folder.
        on_gpu: True if Ray has assigned a GPU to this process.
        bell: the actor that signals the stop.
        folder: the driver's current folder, entered if it exists here; nothing is imported from it.
    """
    import ray

    with suppress(OSError):
        os.chdir(folder)

    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(job.settings.threads))
    os.environ.update(threads if on_gpu else {**threads, "CUDA_VISIBLE_DEVICES": ""})
    host = socket.gethostname()
    yield Started(host, process(os.getpid()), ray.get_runtime_context().get_node_id())
    stop = threading.Event()
    bell.wait.remote().future().add_done_callback(lambda _: stop.set())  # also when the actor is gone
    with ExitStack() as scratch:
        outbox = None
        if sent is not None:
            root = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="vitlab-")))
            for path, reference in sent:
                write_bytes(root / path, ray.get(reference))
            job = relocate(job, root)
            outbox = FileSender(job.folders)
        elif not _sees(job.folder, token):
            hint = "without a shared folder, set run.executor.files: copy"
            yield Finished(Ending.REFUSED, f"{host} does not see {job.folder}; {hint}")
            return
        worker.log_to(job.folder)
        if outbox is None:
            worker.note_shared_log(job)
        endings: list[tuple[Ending, str]] = []
        stages: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        trial = threading.Thread(
            target=lambda: endings.append(worker.run_job(job, runner, stop.is_set, stages.put)), daemon=True
        )
        trial.start()
        while trial.is_alive():
            trial.join(POLL_S)
            while not stages.empty():
                yield ProgressMessage(stages.get())
            if outbox is not None:
                yield from outbox.changes()
        if outbox is not None:
            yield from outbox.changes(ended=True)
    yield Finished(*endings[0]) if endings else Finished(Ending.LOST, "the trial's thread was ended; see log.txt")


def _sees(folder: Path, token: str) -> bool:
    try:
        return token in (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
