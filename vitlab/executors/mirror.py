"""Copies of trial folders on machines that do not share the driver's file system.

The trial writes to the worker's copy; a :class:`FileSender` there detects changes, and the driver applies each of them
to the original folder by :func:`apply_change`.  Files are sent whole and replaced atomically, and if the worker dies,
the driver's folder holds a consistent state of the trial:

- a checkpoint arrives after the journal's lines that were written before it, because a trial resumed from it would not
  write them again;
- the result arrives last, because it implies that everything else is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from vitlab.errors import VitlabError
from vitlab.runner.job import Job
from vitlab.store.files import write_bytes
from vitlab.store.folders import TrialFolder

JOURNAL, LOG, RESULT = "events.jsonl", "log.txt", "result.json"
ORDER = (JOURNAL, LOG, None, RESULT)
"""Order in which changed files are sent; ``None`` stands for all others, such as checkpoints."""
LOCKS = ("lock", "lock.held")

Place = tuple[int, str]  #: index of a folder among the job's, and a path in it
Signature = tuple[int, int, int]


@dataclass(frozen=True)
class FileChange:
    """A change to one file of a job's trials."""

    place: Place
    data: bytes | None  #: its content; None if it was removed


def input_files(job: Job) -> list[tuple[str, Path]]:
    """Return the files that a remote worker needs, each with its path below the worker's folder.

    These are the files of the job's trials, the results and weights of their prerequisites, and the plugins.  The
    caller holds the leases.
    """
    root = job.folder.parents[1]
    files = [folder / path for folder in job.folders for path in _files(folder)]
    for name in sorted({name for item in job.trials for name in item.trial.needs.values()}):
        prerequisite = TrialFolder(root / name)
        files += [prerequisite.spec, prerequisite.weights, prerequisite.path / RESULT]
    inputs = [("trials" / file.relative_to(root), file) for file in files if file.exists()]
    inputs += [
        (Path("plugins", str(index), Path(file).name), Path(file)) for index, file in enumerate(job.settings.plugins)
    ]
    return [(path.as_posix(), file) for path, file in inputs]


def relocate(job: Job, root: Path) -> Job:
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
        self._sent = self._signatures()

    def changes(self, *, ended: bool = False) -> Iterator[FileChange]:
        """Yield the changes of the job's files since the last call, so that the copy is consistent wherever they stop.

        A ``result.json`` comes last, and only if the job has ``ended``.
        """
        present = self._signatures()
        changed = [place for place, signature in present.items() if self._sent.get(place) != signature]
        removed = [place for place in self._sent if place not in present]
        contents: dict[Place, bytes] = {}
        # A journal is read after the checkpoint and sent before it: it has all lines that the checkpoint presupposes.
        for place in sorted(changed, key=_order, reverse=True):
            if ended or place[1] != RESULT:
                with suppress(FileNotFoundError):  # the next call finds it removed
                    contents[place] = (self._folders[place[0]] / place[1]).read_bytes()
        for place in sorted(contents, key=_order):
            yield FileChange(place, contents[place])
            self._sent[place] = present[place]
        for place in removed:
            yield FileChange(place, None)
            del self._sent[place]

    def _signatures(self) -> dict[Place, Signature]:
        signatures: dict[Place, Signature] = {}
        for index, folder in enumerate(self._folders):
            for path in _files(folder):
                with suppress(FileNotFoundError):  # removed meanwhile
                    stat = (folder / path).stat()
                    signatures[index, path] = stat.st_ino, stat.st_mtime_ns, stat.st_size
        return signatures


def apply_change(change: FileChange, folders: Sequence[Path]) -> None:
    """Apply a change at the worker to the driver's folders of a job, whose leases the caller holds.

    Raises:
        Busy: if another process has taken over the trial.
        VitlabError: if the file is outside of the trial's folder.
    """
    index, path = change.place
    folder, inside = folders[index], PurePosixPath(path)
    TrialFolder(folder).require()
    if inside.is_absolute() or ".." in inside.parts:
        raise VitlabError(f"a worker sent a file for {path}, which is not in its trial's folder")
    file = folder / inside
    if change.data is not None:
        write_bytes(file, change.data, fsync=path not in (JOURNAL, LOG))  # these change many times a minute
        return
    file.unlink(missing_ok=True)
    if file.parent != folder:
        with suppress(OSError):  # it holds other files, or does not exist
            file.parent.rmdir()


def _files(folder: Path) -> list[str]:
    """Return the files of a trial, without locks and temporary files."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if path.name not in LOCKS and not path.name.startswith("."))


def _order(place: Place) -> int:
    return ORDER.index(place[1] if place[1] in ORDER else None)
