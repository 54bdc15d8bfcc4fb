"""The store: one folder per trial, shared by all studies, in which the truth about the trial lives.

    trials/<key>/<code>/
        spec.json          what the trial is
        lock               held by whoever writes here
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
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.result import Result


class Busy(Exception):
    """Somebody else holds the lease of this trial."""


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
        data = read_json(self.path / "result.json")
        return Result.from_json(data) if data is not None else None

    def done(self) -> bool:
        """Whether the trial has ended, without reading its result."""
        return (self.path / "result.json").exists()

    def usable(self) -> bool:
        """Whether another trial can start from this one: it has ended, and its weights were kept."""
        return self.done() and self.weights.exists()

    def finish(self, result: Result) -> None:
        """Write the result: the last thing that happens to a trial."""
        write_json(self.path / "result.json", result.to_json())
        self.forgive()

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
        said = {"failure": failure, "kind": kind, "traceback": traceback, "time": time.time()}
        write_json(self.path / "failure.json", said)

    def forgive(self) -> None:
        """Let the last failure keep nobody from the trial any more."""
        (self.path / "failure.json").unlink(missing_ok=True)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the trial while writing to it; the kernel lets go when the process dies.

        Raises:
            Busy: if another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(str(self.path)) from None
            yield

    def held(self) -> bool:
        """Whether some process holds the lease now.  Looking writes nothing, so that others' results can be read."""
        try:
            with open(self.path / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False

    # -- the journal ------------------------------------------------------------------------------------------------

    def emit(self, kind: str, **body: Any) -> None:
        """Append one event.  One ``write`` of one line, so that lines of a killed worker are whole or last.

        Raises:
            OSError: if the disk is full; the journal is then as it was.
        """
        line = (json.dumps({"t": int(time.time() * 1000), "kind": kind, **body}) + "\n").encode()
        descriptor = os.open(self.path / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(descriptor, line)
            if written < len(line):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Make ready for an attempt, first of all once the lease is held.

        A torn last line is cut off the journal, and why an earlier attempt failed is no longer what keeps the trial.
        """
        self.forgive()
        journal = self.path / "events.jsonl"
        if journal.exists():
            data = journal.read_bytes()
            if data and not data.endswith(b"\n"):
                os.truncate(journal, data.rfind(b"\n") + 1)

    def events(self, offset: int = 0) -> tuple[list[Event], int]:
        """Events from a byte offset on, and the offset to go on from.  A torn last line is left for later."""
        try:
            with open(self.path / "events.jsonl", "rb") as journal:
                journal.seek(offset)
                data = journal.read()
        except FileNotFoundError:
            return [], offset
        whole = data[: data.rfind(b"\n") + 1]
        events = []
        for line in whole.splitlines():
            body = json.loads(line)
            events.append(Event(body.pop("t"), body.pop("kind"), body))
        return events, offset + len(whole)


@dataclass(frozen=True)
class Store:
    """The output folder: trials of all studies, and one folder per study."""

    root: Path

    def trial(self, key: str, code: str) -> TrialFolder:
        return TrialFolder(self.root / "trials" / key / code)

    def study(self, name: str) -> Path:
        return self.root / "studies" / name


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all.  NaN and infinities are written as Python's json does and read back so."""
    write_bytes(path, (json.dumps(data, indent=1) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: to a temporary name beside it, to the disk, then by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """The JSON in a file, or None where there is no file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
