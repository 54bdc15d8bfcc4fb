"""Worker side of the Ray executor: one task runs one job and streams its progress.

Where the machines do not share the driver's file system, the trial writes to the worker's copy of its folder; a
:class:`FileSender` there detects changes, and the driver applies each of them to the original folder by
:func:`apply_file_change`.  Of journals and logs, which only grow, the new end is sent; other files are sent whole and
replaced atomically.  If the worker dies, the driver's folder holds a consistent state of the trial:

- a checkpoint arrives after the journal's lines that were written before it, because a trial resumed from it would not
  write them again;
- the result arrives last, because it implies that everything else is complete.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitlab.errors import VitlabError
from vitlab.executors import worker
from vitlab.executors.base import Stage, thread_variables
from vitlab.runner.job import NODE_VARIABLE, Job
from vitlab.store.files import open_nofollow, write_bytes
from vitlab.store.folders import TrialFolder
from vitlab.store.locks import own_unique_process_name
from vitlab.store.result import Ending

POLL_S = 0.2  #: interval at which a worker checks for changed files


JOURNAL, LOG, RESULT = "events.jsonl", "log.txt", "result.json"
ORDER = (JOURNAL, LOG, None, RESULT)
"""Order in which changed files are sent; ``None`` stands for all others, such as checkpoints."""
LOCKS = ("lock", "lock.held")

Place = tuple[int, str]  #: index of a folder among the job's, and a path in it
Signature = tuple[int, int, int]


class Started(NamedTuple):
    """First item of a stream: the process of the task."""

    host: str
    process: str  #: name of the process, see :func:`vitlab.store.locks.unique_process_name`
    node: str  #: Ray's id of the machine
    address: str  #: host and port at which the processes of a trial on several machines meet


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


def run_ray_task(
    job: Job,
    token: str,
    sent: Sequence[tuple[str, Any]] | None,
    on_gpu: bool,
    stop_signal: Any,
    folder: str,
    node: tuple[int, str] | None = None,
) -> Iterator[Started | Stage | FileChange | Finished]:
    """Run one job in this process, as a Ray task; a stage is yielded when the attempt has reached it.

    The trial runs in a background thread, because the task's own thread yields the items.

    Args:
        job: the job to run.
        token: text in the log of a shared folder, by which the worker recognises it.
        sent: destination paths and contents of the files of a folder that is not shared; None for a shared folder.
        on_gpu: True if Ray has assigned a GPU to this process.
        stop_signal: the actor that signals the stop.
        folder: the driver's current folder, entered if it exists here; nothing is imported from it.
        node: for a trial on several machines the number of this one, and the address of the first one on the others.
    """
    import ray

    with suppress(OSError):
        os.chdir(folder)

    os.environ.update(thread_variables(job) | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}))
    host, address = socket.gethostname(), ""
    if node is not None:
        address = node[1] or f"{ray.util.get_node_ip_address()}:{_find_free_port()}"
        os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = address.rpartition(":")
        os.environ[NODE_VARIABLE] = str(node[0])
    yield Started(host, own_unique_process_name(), ray.get_runtime_context().get_node_id(), address)
    stop = threading.Event()
    stop_signal.wait.remote().future().add_done_callback(lambda _: stop.set())  # also when the actor is gone
    with ExitStack() as scratch:
        if sent is not None:
            root = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="vitlab-")))
            for path, reference in sent:
                write_bytes(root / path, ray.get(reference))
            job = relocate_job(job, root)
        elif token not in worker.read_log(job.folder):
            hint = "without a shared folder, set run.executor.files: copy"
            yield Finished(Ending.REFUSED, f"{host} does not see {job.folder}; {hint}")
            return
        outbox = FileSender(() if sent is None else job.folders)
        worker.redirect_output_to_log(job.folder)
        if sent is None:
            worker.refer_to_shared_log(job)
        endings: list[tuple[Ending, str]] = []
        stages: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        trial = threading.Thread(
            target=lambda: endings.append(worker.run_job(job, stop.is_set, stages.put)), daemon=True
        )
        trial.start()
        while trial.is_alive():
            trial.join(POLL_S)
            while not stages.empty():
                yield stages.get()
            yield from outbox.read_changes()
        yield from outbox.read_changes(ended=True)
    yield Finished(*endings[0]) if endings else Finished(Ending.LOST, "the trial's thread was ended; see log.txt")


def _find_free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


# -- copies of files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileChange:
    """A change to one file of a job's trials."""

    place: Place
    data: bytes | None  #: its content; None if it was removed
    offset: int = 0  #: where its content begins, in a file that has grown


def list_input_files(job: Job) -> list[tuple[str, Path]]:
    """Return the files that a remote worker needs, each with its path below the worker's folder.

    These are the files of the job's trials, the results and weights of their prerequisites, and the plugins.  The
    caller holds the leases.
    """
    root = job.folder.parents[1]
    files = [folder / path for folder in job.folders for path in _list_trial_files(folder)]
    for name in sorted({name for item in job.trials for name in item.trial.needs.values()}):
        prerequisite = TrialFolder(root / name)
        files += [prerequisite.spec, prerequisite.weights_file, prerequisite.path / RESULT]
    inputs = [("trials" / file.relative_to(root), file) for file in files if file.exists()]
    inputs += [
        (Path("plugins", str(index), Path(file).name), Path(file)) for index, file in enumerate(job.settings.plugins)
    ]
    return [(path.as_posix(), file) for path, file in inputs]


def relocate_job(job: Job, root: Path) -> Job:
    """Return the job with its paths relocated to a worker's folder ``root``."""
    trials = job.folder.parents[1]
    plugins = [str(root / "plugins" / str(index) / Path(file).name) for index, file in enumerate(job.settings.plugins)]
    return replace(
        job,
        trials=tuple(replace(item, folder=root / "trials" / item.folder.relative_to(trials)) for item in job.trials),
        settings=replace(job.settings, plugins=tuple(plugins)),
    )


class FileSender:
    """Detector of file changes at the worker, since the last call or since the files arrived."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._sent = self._file_signatures()

    def read_changes(self, *, ended: bool = False) -> Iterator[FileChange]:
        """Yield the changes of the job's files since the last call, so that the copy is consistent wherever they stop.

        A ``result.json`` comes last, and only if the job has ``ended``.
        """
        present = self._file_signatures()
        changed = [place for place, signature in present.items() if self._sent.get(place) != signature]
        removed = [place for place in self._sent if place not in present]
        contents: dict[Place, tuple[bytes, int]] = {}
        # A journal is read after the checkpoint and sent before it: it has all lines that the checkpoint presupposes.
        for place in sorted(changed, key=_transfer_order, reverse=True):
            if ended or place[1] != RESULT:
                size = self._sent.get(place, (0, 0, 0))[2]
                offset = size if place[1] in (JOURNAL, LOG) and size <= present[place][2] else 0
                with (
                    suppress(FileNotFoundError),  # the next call finds it removed
                    open(self._folders[place[0]] / place[1], "rb") as file,
                ):
                    file.seek(offset)
                    contents[place] = file.read(), offset
        for place in sorted(contents, key=_transfer_order):
            yield FileChange(place, *contents[place])
            self._sent[place] = present[place]
        for place in removed:
            yield FileChange(place, None)
            del self._sent[place]

    def _file_signatures(self) -> dict[Place, Signature]:
        signatures: dict[Place, Signature] = {}
        for index, folder in enumerate(self._folders):
            for path in _list_trial_files(folder):
                with suppress(FileNotFoundError):  # removed meanwhile
                    stat = (folder / path).stat()
                    signatures[index, path] = stat.st_ino, stat.st_mtime_ns, stat.st_size
        return signatures


def apply_file_change(change: FileChange, folders: Sequence[Path]) -> None:
    """Apply a change at the worker to the driver's folders of a job, whose leases the caller holds.

    Raises:
        Busy: if another process has taken over the trial.
        VitlabError: if the file is outside of the trial's folder.
    """
    index, path = change.place
    folder, inside = folders[index], PurePosixPath(path)
    TrialFolder(folder).raise_if_lock_lost()
    if inside.is_absolute() or ".." in inside.parts:
        raise VitlabError(f"a worker sent a file for {path}, which is not in its trial's folder")
    file = folder / inside
    if change.data is not None and change.offset:
        with open(open_nofollow(file, os.O_WRONLY), "wb") as original:
            original.seek(change.offset)
            original.write(change.data)
            original.truncate()  # last, because a reader would take a shorter journal for another training
    elif change.data is not None:
        write_bytes(file, change.data, fsync=path not in (JOURNAL, LOG))  # these change many times a minute
    else:
        file.unlink(missing_ok=True)
        if file.parent != folder:
            with suppress(OSError):  # it holds other files, or does not exist
                file.parent.rmdir()


def _list_trial_files(folder: Path) -> list[str]:
    """Return the files of a trial, without locks and temporary files."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if path.name not in LOCKS and not path.name.startswith("."))


def _transfer_order(place: Place) -> int:
    return ORDER.index(place[1] if place[1] in ORDER else None)
