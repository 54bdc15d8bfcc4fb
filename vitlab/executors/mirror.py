"""Copies of trial folders on machines that do not share the driver's file system.

The trial writes to the worker's copy; a :class:`FileSender` there detects changes, and a :class:`FileReceiver` at the
driver applies them to the original folder.  The journal and the log are appended to, every other file is replaced
atomically, and if the worker dies, the driver's folder holds a consistent state of the trial:

- a checkpoint arrives after the journal's lines that were written before it, because a trial resumed from it would not
  write them again;
- the result arrives last, because it implies that everything else is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from vitlab.errors import VitlabError
from vitlab.runner.job import Job
from vitlab.store.files import open_in_place, temporary, write_bytes
from vitlab.store.folders import TrialFolder

CHUNK = 16 * 2**20  #: maximum number of bytes per message
JOURNAL = "events.jsonl"
LOG = "log.txt"
RESULT = "result.json"
GROW = (LOG, JOURNAL)
STAY = ("lock", "lock.held", *GROW)  #: not compared as files

Signature = tuple[int, int, int]


@dataclass(frozen=True)
class FileChunk:
    """A change to one file of a job's trials."""

    index: int  #: index among the job's folders
    path: str  #: path within the folder
    how: Literal["append", "write", "remove"]
    data: bytes = b""
    begin: int = 0  #: offset of ``data`` in a written file
    last: bool = True  #: True if the file is then complete


def input_files(job: Job) -> list[tuple[str, Path]]:
    """Return the files that a remote worker needs, each with its path below the worker's folder.

    These are the files of the job's trials, the results and weights of their prerequisites, and the plugins.  The
    caller holds the leases.
    """
    root = job.folder.parents[1]
    files = [(path, folder / path) for folder in job.folders for path in [*_files(folder), JOURNAL]]
    for name in sorted({name for item in job.trials for name in item.trial.needs.values()}):
        prerequisite = TrialFolder(root / name)
        files += [(path.name, path) for path in (prerequisite.spec, prerequisite.weights, prerequisite.path / RESULT)]
    inputs = [("trials" / file.relative_to(root), file) for _, file in files if file.exists()]
    inputs += [
        (Path("plugins", str(index), Path(file).name), Path(file)) for index, file in enumerate(job.settings.plugins)
    ]
    return [(path.as_posix(), file) for path, file in inputs]


def relocate(job: Job, root: Path) -> Job:
    """Return the job with its paths relocated to a worker's folder ``root``."""
    trials = job.folder.parents[1]

    def there(folder: Path) -> Path:
        return root / "trials" / folder.relative_to(trials)

    plugins = [str(root / "plugins" / str(index) / Path(file).name) for index, file in enumerate(job.settings.plugins)]
    return replace(
        job,
        trials=tuple(replace(item, folder=there(item.folder)) for item in job.trials),
        settings=replace(job.settings, plugins=tuple(plugins)),
    )


class FileSender:
    """Detector of file changes at the worker, since the last call or since the files arrived."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._sent = {(index, path): mark for index, path, mark in self._marks()}
        self._grown = {
            (index, path): (folder / path).stat().st_size
            for index, folder in enumerate(folders)
            for path in GROW
            if (folder / path).exists()
        }

    def changes(self, *, ended: bool = False) -> Iterator[FileChunk]:
        """Yield the changes of the job's files since the last call, so that the copy is consistent wherever they stop.

        A ``result.json`` comes last, and only if the job has ``ended``.
        """
        marks = {(index, path): mark for index, path, mark in self._marks() if ended or path != RESULT}
        changed = sorted(
            (place for place, mark in marks.items() if self._sent.get(place) != mark),
            key=lambda place: place[1] == RESULT,
        )
        with ExitStack() as files:
            # Files are opened before the journal is read, and sent after it.  They are replaced by rename, so an open
            # file does not change.
            open_files: list[tuple[tuple[int, str], BinaryIO]] = []
            for place in changed:
                with suppress(FileNotFoundError):
                    open_files.append((place, files.enter_context(open(self._folders[place[0]] / place[1], "rb"))))
            for index, folder in enumerate(self._folders):
                for path in GROW:
                    if data := self._growth(index, folder, path, ended):
                        yield FileChunk(index, path, "append", data)
            for place, file in open_files:
                yield from _pieces(*place, file)
                self._sent[place] = _mark(os.fstat(file.fileno()))
        for place in [place for place in self._sent if place not in marks and (ended or place[1] != RESULT)]:
            del self._sent[place]
            yield FileChunk(*place, "remove")

    def _growth(self, index: int, folder: Path, path: str, ended: bool) -> bytes:
        """Return the bytes appended to a file; only whole lines while it may still grow."""
        begin = self._grown.get((index, path), 0)
        try:
            with open(folder / path, "rb") as file:
                file.seek(begin)
                data = file.read()
        except FileNotFoundError:
            return b""
        if path == JOURNAL or not ended:
            data = data[: data.rfind(b"\n") + 1]
        self._grown[index, path] = begin + len(data)
        return data

    def _marks(self) -> Iterator[tuple[int, str, Signature]]:
        for index, folder in enumerate(self._folders):
            for path in _files(folder):
                with suppress(FileNotFoundError):
                    yield index, path, _mark((folder / path).stat())


class FileReceiver:
    """Applier of a worker's file changes to the driver's folders.  The caller holds the leases."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._incomplete: dict[Path, Path] = {}  #: file to the temporary file that collects its chunks

    def take(self, piece: FileChunk) -> None:
        """Apply a received change to the driver's copy of a trial's folder.

        Raises:
            Busy: if another process has taken over the trial.
            VitlabError: if the file is outside of the trial's folder.
        """
        folder, inside = self._folders[piece.index], PurePosixPath(piece.path)
        TrialFolder(folder).require()
        if inside.is_absolute() or ".." in inside.parts:
            raise VitlabError(f"a worker sent a file for {piece.path}, which is not in its trial's folder")
        path = folder / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        if piece.how == "append":
            with open(open_in_place(path), "ab") as file:
                file.write(piece.data)
        elif piece.how == "write":
            self._write(path, piece)
        else:
            path.unlink(missing_ok=True)
            if path.parent != folder:
                with suppress(OSError):  # it holds other files
                    path.parent.rmdir()

    def close(self) -> None:
        """Delete the partially received files."""
        for file in self._incomplete.values():
            file.unlink(missing_ok=True)
        self._incomplete.clear()

    def _write(self, path: Path, piece: FileChunk) -> None:
        if piece.last and not piece.begin:
            write_bytes(path, piece.data)
            return
        if not piece.begin:
            self._incomplete[path] = temporary(path)
        partial = self._incomplete[path]
        with open(partial, "ab" if piece.begin else "wb") as file:
            file.write(piece.data)
            file.flush()
            os.fsync(file.fileno())
        if piece.last:
            os.replace(partial, path)
            del self._incomplete[path]


def _files(folder: Path) -> list[str]:
    """Return the files of a trial that are replaced rather than appended to, without temporary files."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if path.name not in STAY and not path.name.startswith("."))


def _pieces(index: int, path: str, file: BinaryIO) -> Iterator[FileChunk]:
    data, begin = file.read(CHUNK), 0
    while True:
        further = file.read(CHUNK) if len(data) == CHUNK else b""
        yield FileChunk(index, path, "write", data, begin, last=not further)
        if not further:
            return
        data, begin = further, begin + len(data)


def _mark(stat: os.stat_result) -> Signature:
    """Return a signature that differs between a file and its replacement."""
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
