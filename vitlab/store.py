"""The store: one folder per trial, shared by all studies, in which the truth about the trial lives.

    trials/<key>/<code>/
        spec.json          what the trial is
        lock               held by whoever writes here; see leases.py
        events.jsonl       what happened, one event a line
        checkpoint/        the last state a resume would start from
        weights.safetensors  the final weights, where they are kept
        predictions.parquet
        result.json        written last, by rename: it is there, whole, or not at all
        failure.json       why the last attempt ended without a result

Everything is written to a temporary name and renamed, so a reader never sees half a file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.leases import DRIVER as DRIVER
from vitlab.leases import Busy as Busy
from vitlab.leases import held as held
from vitlab.leases import hold as hold
from vitlab.leases import holder as holder
from vitlab.leases import locks as locks
from vitlab.leases import process as process
from vitlab.leases import require
from vitlab.result import Result


@dataclass(frozen=True)
class Event:
    """One line of a journal.  ``t`` is milliseconds since 1970, taken when it happened and never changed."""

    t: int
    kind: str  #: start, metrics, artifact, end
    body: Mapping[str, Any]


@dataclass(frozen=True)
class TrialFolder:
    """The folder of one trial under one version of the code."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def weights(self) -> Path:
        return self.path / "weights.safetensors"

    @property
    def predictions(self) -> Path:
        return self.path / "predictions.parquet"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    def result(self) -> Result | None:
        """The result, if the trial has ended."""
        file = self.path / "result.json"
        data = read_json(file)
        if data is None:
            return None
        result = Result.from_json(data)
        if result.circumstances.ended:
            return result
        return replace(result, circumstances=replace(result.circumstances, ended=file.stat().st_mtime))

    def done(self) -> bool:
        """Whether the trial has ended, without reading its result."""
        return (self.path / "result.json").exists()

    def usable(self) -> bool:
        """Whether another trial can start from this one: it has ended, and its weights were kept."""
        return self.done() and self.weights.exists()

    def finish(self, result: Result) -> None:
        """Write the result: the last thing that happens to a trial.  Where it is, everything is: also on the disk."""
        settle([file for file in (self.spec, self.weights, self.predictions) if file.exists()])
        self.require()
        write_json(self.path / "result.json", result.to_json())
        self.forgive()

    def tidy(self) -> None:
        """Remove the checkpoint of a trial that has ended, which a worker that was killed right then has left."""
        if self.checkpoint.exists() and self.done():
            with suppress(Busy, OSError, UserError), self.lease():
                shutil.rmtree(self.checkpoint)

    def failure(self) -> str | None:
        """Why the last attempt ended without a result, if it did."""
        data = read_json(self.path / "failure.json")
        return str(data["failure"]) if data is not None else None

    def kind(self) -> str:
        """What ended the last attempt, if it ended without a result: error, oom, timeout, preempted or lost."""
        data = read_json(self.path / "failure.json") or {}
        return str(data.get("kind", "error"))

    def fail(self, failure: str, traceback: str = "", kind: str = "error") -> None:
        """Note why an attempt ended without a result: in one sentence, in full, and of which kind, as data."""
        self.require()
        said = {"failure": failure, "kind": kind, "traceback": traceback, "time": time.time()}
        write_json(self.path / "failure.json", said)

    def give_up(self, failure: str, kind: str) -> None:
        """Note that the last failure, or this one where the worker has left none, was the last: nobody tries again.

        Until a driver has said so, a failure is that of an attempt.  One that dies before it has made the next leaves
        that to the next driver.
        """
        said = read_json(self.path / "failure.json") or {"failure": failure, "kind": kind, "traceback": ""}
        write_json(self.path / "failure.json", {"time": time.time(), **said, "given_up": True})

    def given_up(self) -> bool:
        """Whether it failed, and is not to be tried again unless somebody asks."""
        return bool((read_json(self.path / "failure.json") or {}).get("given_up"))

    def forgive(self) -> None:
        """Let the last failure keep nobody from the trial any more."""
        (self.path / "failure.json").unlink(missing_ok=True)

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the trial while writing to it; see :func:`vitlab.leases.hold`.

        Raises:
            Busy: if another process holds it.
        """
        with hold(self.lock):
            yield

    def require(self) -> None:
        """Pass, unless this process held the trial and another has taken it over: then nothing may be written.

        Raises:
            Taken: then.
        """
        require(self.lock)

    def held(self) -> bool:
        """Whether some process holds the lease now.  Looking writes nothing, so that others' results can be read."""
        return held(self.lock)

    # -- the journal ------------------------------------------------------------------------------------------------

    def emit(self, kind: str, **body: Any) -> None:
        """Append one event.  One ``write`` of one line, so that lines of a killed worker are whole or last.

        Raises:
            OSError: if the disk is full; the journal is then as it was.
        """
        self.require()
        append_json(self.path / "events.jsonl", {"t": int(time.time() * 1000), "kind": kind, **body})

    def mend(self) -> None:
        """Make ready for an attempt, first of all once the lease is held.

        A torn last line is cut off the journal, what a killed writer left half done goes, and why an earlier attempt
        failed is no longer what keeps the trial.

        Raises:
            Taken: if another process has taken the trial over; then nothing is touched.
        """
        self.require()
        self.forgive()
        cut_torn_line(self.path / "events.jsonl")
        for name in (self.weights.name, self.predictions.name, self.spec.name, "result.json"):
            for unfinished in self.path.glob(f".{name}.*"):
                unfinished.unlink(missing_ok=True)

    def events(self, offset: int = 0) -> tuple[list[Event], int]:
        """Events from a byte offset on, and the offset to go on from.

        A torn last line is left for later, and one that a disk has damaged is passed over: the result has it, too.
        """
        lines, offset = read_lines(self.path / "events.jsonl", offset)
        events = []
        for line in lines:
            with suppress(ValueError, LookupError, AttributeError, TypeError):
                body = json.loads(line)
                events.append(Event(body.pop("t"), body.pop("kind"), body))
        return events, offset


@dataclass(frozen=True)
class Store:
    """The output folder: trials of all studies, and one folder per study."""

    root: Path

    def trial(self, key: str, code: str) -> TrialFolder:
        return TrialFolder(self.root / "trials" / key / code)

    def study(self, name: str) -> Path:
        return self.root / "studies" / name

    def driver(self, study: str) -> Path:
        """The lock of whoever runs a study."""
        return self.study(study) / "driver.lock"


# -- files ------------------------------------------------------------------------------------------------------------


def write_json(path: Path, data: Any, *, settled: bool = True) -> None:
    """Write JSON whole or not at all.  NaN and infinities are written as Python's json does and read back so."""
    write_bytes(path, (json.dumps(data, indent=1) + "\n").encode(), settled=settled)


def write_bytes(path: Path, data: bytes, *, settled: bool = True) -> None:
    """Write a file whole or not at all: to a temporary name beside it, to the disk, then by rename.

    Args:
        path: where.
        data: what.
        settled: whether to wait for the disk; else whoever relies on the file calls :func:`settle` first.

    Raises:
        OSError: if the disk is full, or takes no writing; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = temporary(path)
    try:
        with open(unfinished, "xb") as file:
            file.write(data)
            file.flush()
            if settled:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def settle(files: Sequence[Path]) -> None:
    """Bring files to the disk: all at once, so that the file system needs one commit for them, and not one for each.

    Raises:
        OSError: if the disk is full.
    """
    from concurrent.futures import ThreadPoolExecutor

    def to_disk(file: Path) -> None:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())

    with ThreadPoolExecutor(max(1, len(files))) as threads:
        list(threads.map(to_disk, files))


def temporary(path: Path) -> Path:
    """A name beside ``path`` that no other thread, process or machine has; in containers process numbers repeat.

    It begins with a dot: what stands there is not finished, and nobody reads it.
    """
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}")


def read_json(path: Path) -> Any:
    """The JSON in a file, or None where there is no file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def append_json(path: Path, data: Any) -> None:
    """Append one line.  It is one ``write``, so that lines of a killed process are whole or last.

    Raises:
        OSError: if the disk is full; the file is then as it was.
    """
    line = (json.dumps(data) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, line)
        if written < len(line):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_lines(path: Path, offset: int = 0) -> tuple[list[bytes], int]:
    """The whole lines from a byte offset on, and the offset to go on from; a torn last line is left for later."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    return whole.splitlines(), offset + len(whole)


def cut_torn_line(path: Path) -> None:
    """Cut off a last line that a killed writer did not finish, or the next would be appended to it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
