"""The store: one folder per trial, shared by all studies; the authoritative record of the trial.

    trials/<key>/<code>/
        spec.json          what the trial is
        lock               held by the process that writes here; see locks.py
        events.jsonl       the journal, one event per line
        checkpoint/        the state to resume from
        weights.safetensors  the final weights, if kept
        predictions.parquet
        result.json        written last, atomically
        failure.json       why the last attempt ended without a result

Every file is written under a temporary name and renamed, so that readers never see a partial file.  A damaged file
counts as absent: :func:`read_stored` reports it once per process, and the next writer of the file first renames the
damaged one to ``NAME.damaged-TIME``.  Readers rename nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import TypeAdapter

from vitlab.errors import UserError, VitlabError
from vitlab.store import locks
from vitlab.store.locks import DRIVER as DRIVER
from vitlab.store.locks import Busy as Busy
from vitlab.store.locks import holds_lock as holds_lock
from vitlab.store.locks import is_locked as is_locked
from vitlab.store.locks import owner as owner
from vitlab.store.locks import process as process
from vitlab.store.locks import require
from vitlab.store.result import Failure, Millis, Progress, Result

log = logging.getLogger(__name__)

R = TypeVar("R")

DAMAGED = ".damaged-"
"""Separates the name of a damaged file from the time at which it was set aside."""

ABANDONED_S = 24 * 3600.0
"""Age in seconds from which a temporary file of another machine or an unknown process counts as abandoned."""

COPIED_S = 7 * 24 * 3600.0
"""Age of a result when its file was written from which on the file is taken for a copy."""


class Damaged(VitlabError):
    """A damaged stored file."""


@dataclass(frozen=True)
class Event:
    """One line of a journal.  ``t`` is the time of the event in milliseconds since 1970."""

    t: int
    kind: str  #: start, metrics, artifact, end
    body: Mapping[str, Any]


@dataclass(frozen=True)
class TrialFolder:
    """The folder of one trial under one version of the code."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint."""
        return self.path / "checkpoint"

    @property
    def weights(self) -> Path:
        """Path of the weights."""
        return self.path / "weights.safetensors"

    @property
    def predictions(self) -> Path:
        """Path of the predictions."""
        return self.path / "predictions.parquet"

    @property
    def spec(self) -> Path:
        """Path of the spec."""
        return self.path / "spec.json"

    def result(self) -> Result | None:
        """Return the result, or None if the trial has not ended or its result is damaged."""
        file = self.path / "result.json"
        result = read_json(file, self._own_result)
        if result is None or result.circumstances.ended:
            return result
        ended, around = file.stat().st_mtime, result.circumstances
        earliest = around.started + around.wall_s
        if not earliest <= ended <= earliest + COPIED_S:
            ended = earliest
        return replace(result, circumstances=replace(around, ended=ended))

    def done(self) -> bool:
        """Return True if the trial has a result."""
        return _is_whole(self.path / "result.json", lambda file: read_json(file, self._own_result))

    def has_weights(self) -> bool:
        """Return True if another trial can start from this one: it has ended, and its weights exist undamaged."""
        return (
            self.done()
            and _is_whole(self.weights, lambda file: read_stored(file, check_weights))
            and _is_whole(self.spec, lambda file: read_json(file, mapping))
        )

    def _own_result(self, data: Any) -> Result:
        """Parse a result.

        Raises:
            ValueError: If it belongs to another trial.
        """
        result = Result.from_json(data)
        trials, key, code = self.path.parts[-3:] if len(self.path.parts) > 3 else ("", "", "")
        if trials == "trials" and (key, code) != (result.key, result.code):
            raise ValueError(f"it is the result of trial {result.key[:16]}/{result.code[:16]}")
        return result

    def finish(self, result: Result) -> None:
        """Write the result last, after all other files of the trial are synced to the disk."""
        fsync_all([file for file in (self.spec, self.weights, self.predictions) if file.exists()])
        self.require()
        write_json(self.path / "result.json", result.to_json())
        self.clear_failure()

    def remove_checkpoint(self, spec: Mapping[str, Any] | None = None) -> None:
        """Remove the checkpoint of a trial that has ended, and restore a damaged or missing spec.json.

        A checkpoint remains if a worker was killed between writing the result and deleting it.

        Args:
            spec: The trial in JSON values, if known.
        """
        lacks_spec = spec is not None and not _is_whole(self.spec, lambda file: read_json(file, mapping))
        if (lacks_spec or self.checkpoint.exists()) and self.done():
            with suppress(Busy, OSError, UserError), self.lease():
                remove(self.checkpoint)
                if lacks_spec:
                    write_json(self.spec, spec)

    def last_failure(self) -> Failure | None:
        """Return how the last attempt ended, if it ended without a result."""
        return read_json(self.path / "failure.json", Failure.from_json)

    def failure(self) -> str | None:
        """Return why the last attempt ended without a result, if it did."""
        failure = self.last_failure()
        return failure.failure if failure is not None else None

    def kind(self) -> str:
        """Return what ended the last attempt without a result: error, oom, timeout, preempted or lost."""
        failure = self.last_failure()
        return failure.kind if failure is not None else "error"

    def fail(self, failure: str, traceback: str = "", kind: str = "error") -> None:
        """Write failure.json: why an attempt ended without a result."""
        self.require()
        write_json(self.path / "failure.json", asdict(Failure(failure, kind, traceback, time.time())))

    def mark_failed(self, failure: str, kind: str) -> None:
        """Mark the trial as failed for good, so that it is not tried again.

        The given failure is used if the worker left none.  Without this mark a failure ends one attempt alone, and
        the next driver tries again.
        """
        last = self.last_failure() or Failure(failure, kind, "", time.time())
        write_json(self.path / "failure.json", {**asdict(last), "has_failed_for_good": True})

    def has_failed_for_good(self) -> bool:
        """Return True if the trial failed and runs again only on request."""
        failure = self.last_failure()
        return failure is not None and failure.has_failed_for_good

    def clear_failure(self) -> None:
        """Delete failure.json, so that the trial can run again.  A damaged one is set aside."""
        file = self.path / "failure.json"
        if self.last_failure() is None:
            set_aside_damaged(file)
        else:
            file.unlink(missing_ok=True)

    @property
    def lock(self) -> Path:
        """Path of the lock."""
        return self.path / "lock"

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the trial while writing to it; see :func:`vitlab.store.locks.hold`.

        Raises:
            Busy: if another process holds it.
        """
        with locks.hold(self.lock):
            yield

    def require(self) -> None:
        """Check that no other process has taken over the lock of this process; nothing may be written then.

        Raises:
            LockLost: If another process has.
        """
        require(self.lock)

    def is_locked(self) -> bool:
        """Return True if a process holds the lock.  Nothing is written, so that read-only folders work."""
        return is_locked(self.lock)

    # -- journal -------------------------------------------------------------------------------------------------------

    def emit(self, kind: str, **body: Any) -> None:
        """Append one event in one ``write``, so that only the last line of a killed worker can be torn.

        Raises:
            OSError: If the disk is full; the journal is then unchanged.
        """
        self.require()
        append_json(self.path / "events.jsonl", {"t": int(time.time() * 1000), "kind": kind, **body})

    def recover_journal(self) -> None:
        """Prepare the folder for an attempt; call it first after taking the lock.

        Truncate a torn last line of the journal, delete temporary files of killed writers, set damaged files aside and
        delete an earlier failure.

        Raises:
            LockLost: If another process has taken the trial over; then nothing is changed.
        """
        self.require()
        self.clear_failure()
        if self.result() is None:
            set_aside_damaged(self.path / "result.json")
        if self.checkpoint.exists() and not self.checkpoint.is_dir():
            set_aside(self.checkpoint)
        cut_torn_line(self.path / "events.jsonl")
        for name in (self.weights.name, self.predictions.name, self.spec.name, "result.json", "failure.json"):
            for partial in self.path.glob(f".{name}.*"):
                remove(partial)

    def events(self, offset: int = 0) -> tuple[list[Event], int]:
        """Return the events from a byte offset on, and the offset for the next call.

        A torn last line is left for the next call.  Damaged lines are skipped; the result holds their metrics too.
        """
        lines, offset = read_lines(self.path / "events.jsonl", offset)
        events = []
        for line in lines:
            with suppress(ValueError, LookupError, AttributeError, TypeError, RecursionError):
                events.append(_event(parse_json(line)))
        return events, offset


@dataclass(frozen=True)
class Store:
    """The output folder: trials of all studies, and one folder per study."""

    root: Path

    def trial(self, key: str, code: str) -> TrialFolder:
        """Return the folder of a trial under a digest of the code."""
        return TrialFolder(self.root / "trials" / key / code)

    def study(self, name: str) -> Path:
        """Return the path of a study's folder."""
        return self.root / "studies" / name

    def driver(self, study: str) -> Path:
        """Return the lock file of a study's driver."""
        return self.study(study) / "driver.lock"

    def clear(self, study: str) -> None:
        """Delete abandoned temporary files in the output folder and in a study's folder."""
        for folder in (self.root, self.study(study), self.study(study) / "report"):
            for file in abandoned(folder):
                with suppress(OSError):
                    remove(file)

    def leftovers(self) -> list[Path]:
        """Return the files that nothing reads: abandoned temporary files, and damaged files that were set aside."""
        folders = [self.root, *(path for path in self.root.glob("studies/**") if path.is_dir())]
        folders += [
            path for depth in ("*", "*/*", "*/*/*") for path in self.root.glob(f"trials/{depth}") if path.is_dir()
        ]
        damaged = [path for folder in folders for path in folder.glob(f"*{DAMAGED}*")]
        return sorted({*damaged, *(file for folder in folders for file in abandoned(folder))})


# -- writing -----------------------------------------------------------------------------------------------------------


def write_json(path: Path, data: Any, *, fsync: bool = True) -> None:
    """Write JSON atomically.  NaN and infinities are written as Python's json does."""
    write_bytes(path, (json.dumps(data, indent=1) + "\n").encode(), fsync=fsync)


def write_bytes(path: Path, data: bytes, *, fsync: bool = True) -> None:
    """Write a file atomically: under a temporary name, synced, then renamed.

    Args:
        path: The file.
        data: Its content.
        fsync: Sync to the disk; otherwise call :func:`fsync_all` before relying on the file.

    Raises:
        OSError: If the disk is full or read-only; no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary(path)
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        if path.is_dir():
            set_aside(path)
        set_aside_damaged(path)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def fsync_all(files: Sequence[Path]) -> None:
    """Sync files to the disk in parallel, so that the file system needs one commit instead of one per file.

    Raises:
        OSError: If the disk is full.
    """
    from concurrent.futures import ThreadPoolExecutor

    def to_disk(file: Path) -> None:
        with open(file, "rb") as reader:
            os.fsync(reader.fileno())

    with ThreadPoolExecutor(max(1, len(files))) as threads:
        list(threads.map(to_disk, files))


def temporary(path: Path) -> Path:
    """Return a name beside ``path`` that no other thread, process or machine uses: ``.NAME.OWNER.RANDOM``.

    The leading dot marks an unfinished file, which nothing reads.  ``OWNER`` names the process, so that
    :func:`abandoned` finds the files of a killed one.
    """
    return path.with_name(f".{path.name}.{_owner(process(os.getpid()))}.{os.urandom(8).hex()}")


def abandoned(folder: Path) -> list[Path]:
    """Return the temporary files in a folder whose writer has ended.

    Processes of this machine are looked up; files of another machine or an unknown process count as abandoned after
    :data:`ABANDONED_S`.
    """
    files = []
    for file in sorted(folder.glob(".*")):
        if (name := _TEMPORARY.fullmatch(file.name)) is None:
            continue
        host, _, number = (name["owner"] or "").rpartition("~")[0].rpartition("~")
        with suppress(OSError):  # it was renamed in the meantime
            if host == _place() and number.isdecimal():
                is_abandoned = _owner(process(int(number))) != name["owner"]
            else:
                is_abandoned = time.time() - file.lstat().st_mtime > ABANDONED_S
            if is_abandoned:
                files.append(file)
    return files


def remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def hold(file: Path) -> Iterator[None]:
    """Hold the lock of a file, see :func:`vitlab.store.locks.hold`; a folder in its place is set aside."""
    if file.is_dir():
        report_damage(file, "it is a folder")
        set_aside(file)
    with locks.hold(file):
        yield


# -- reading -----------------------------------------------------------------------------------------------------------


def read_stored(path: Path, parse: Callable[[Path], R]) -> R | None:
    """Return what a stored file holds, or None if it does not exist or is damaged.

    Damage is reported once per process.  The file is not moved; :func:`write_bytes` sets it aside.

    Args:
        path: The file.
        parse: Reads it, and raises ValueError, LookupError, TypeError or AttributeError if it is damaged.

    Raises:
        OSError: If the file cannot be read, for example for lack of permission.
    """
    try:
        return load_stored(path, parse)
    except Damaged as error:
        report_damage(path, str(error))
        return None


def load_stored(path: Path, parse: Callable[[Path], R]) -> R | None:
    """Return what a stored file holds, or None if it does not exist.

    Args:
        path: The file.
        parse: See :func:`read_stored`.

    Raises:
        Damaged: If the file is damaged; the message is the reason alone.
        OSError: If the file cannot be read, for example for lack of permission.
    """
    signature = _signature(path)
    try:
        if path.is_dir():
            raise ValueError("it is a folder")
        record = parse(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
        _checked[path] = signature, False
        raise Damaged(_reason(path, error)) from None
    except OSError as error:
        if error.errno is not None:
            raise
        _checked[path] = signature, False  # raised by a library for unreadable content
        raise Damaged(_reason(path, error)) from None
    _checked[path] = signature, True
    return record


@overload
def read_json(path: Path) -> Any: ...
@overload
def read_json(path: Path, parse: Callable[[Any], R]) -> R | None: ...
def read_json(path: Path, parse: Callable[[Any], Any] = lambda data: data) -> Any:
    """Return the record in a JSON file, or None if the file does not exist or is damaged; see :func:`read_stored`."""
    return read_stored(path, _of_json(parse))


def load_json(path: Path, parse: Callable[[Any], R]) -> R | None:
    """Return the record in a JSON file, or None if the file does not exist; see :func:`load_stored`."""
    return load_stored(path, _of_json(parse))


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is not JSON, or holds text that cannot be encoded.
    """
    value = json.loads(data)
    if b"\\ud" in data.lower():  # half of a surrogate pair
        json.dumps(value, ensure_ascii=False).encode()
    return value


def mapping(data: Any) -> Mapping[str, Any]:
    """Return ``data`` if it is a JSON object.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(data, dict):
        raise TypeError(f"it holds {type(data).__name__}, no mapping")
    return data


def check_weights(file: Path) -> bool:
    """Return True for a safetensors file whose header fits its length.  Reads the header only.

    Raises:
        ValueError: for any other file.
    """
    with open(file, "rb") as reader:
        length = int.from_bytes(reader.read(8), "little")
        size = os.fstat(reader.fileno()).st_size
        if not 0 < length <= size - 8:
            raise ValueError("its header does not fit into it")
        header = mapping(json.loads(reader.read(length)))
    ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
    if max(ends, default=0) != size - 8 - length:
        raise ValueError("it is cut")
    return True


def sort_metadata(data: bytes) -> bytes:
    """Return a safetensors file with its metadata sorted by key.

    The library writes them in an order that changes from call to call; sorted, equal contents are equal bytes.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(data)[8 + length :]))


def report_damage(path: Path, reason: str) -> None:
    """Log a damaged file, once per process for each state of it."""
    signature = _signature(path)
    if _reported.get(path) != signature:
        _reported[path] = signature
        log.warning(
            "%s is damaged (%s) and counts as absent; the next 'vitlab run' sets it aside as %s%sTIME.",
            path,
            reason,
            path.name,
            DAMAGED,
        )


def set_aside_damaged(path: Path) -> None:
    """Set a file aside if it was read as damaged; delete nothing."""
    checked = _checked.get(path)
    if checked is not None and not checked[1] and checked[0] == _signature(path) and os.path.lexists(path):
        set_aside(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to ``NAME.damaged-TIME`` and return the new path."""
    stamp = f"{path.name}{DAMAGED}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    count, new = 1, path.with_name(stamp)
    while os.path.lexists(new):
        count, new = count + 1, path.with_name(f"{stamp}-{count}")
    path.rename(new)
    return new


def append_json(path: Path, data: Any) -> None:
    """Append one JSON line in one ``write``, so that only the last line of a killed process can be torn.

    Raises:
        OSError: If the disk is full; the file is then unchanged.
    """
    line = (json.dumps(data) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        count = os.write(descriptor, line)
        if count < len(line):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - count)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_lines(path: Path, offset: int = 0) -> tuple[list[bytes], int]:
    """Return the complete lines from a byte offset on, and the offset for the next call."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return [], offset
    except IsADirectoryError:
        report_damage(path, "it is a folder")
        return [], offset
    complete = data[: data.rfind(b"\n") + 1]
    return complete.splitlines(), offset + len(complete)


def cut_torn_line(path: Path) -> None:
    """Truncate a torn last line of a killed writer, so that the next line is not appended to it."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return
    except IsADirectoryError:
        set_aside(path)
        return
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


# -- helpers -----------------------------------------------------------------------------------------------------------

_Signature = tuple[int, int, int] | None

_checked: dict[Path, tuple[_Signature, bool]] = {}  #: files that were read, their state, and True if whole
_reported: dict[Path, _Signature] = {}  #: damaged files that were reported, and their state

# Earlier versions named them without an owner, and some by numbers: .NAME.PID and .mlflow.db.PID.TIME_NS.
_TEMPORARY = re.compile(
    r"\.(?:.+?\.(?:(?P<owner>[^/.~]+~[^/.]*)\.)?[0-9a-f]{16}"
    r"|(?:plan\.json|study\.yaml|changes\.json|report\.\w+|mlflow-offsets\.json|mlflow\.db)\.[0-9]+(?:\.[0-9]{18,20})?)"
    r"(?:-journal|-wal|-shm)?"
)

_PROGRESS = TypeAdapter(Progress)
_TIME = TypeAdapter(Millis)


def _is_whole(path: Path, read: Callable[[Path], object]) -> bool:
    """Return True if a file exists undamaged; an unchanged file is read once per process."""
    checked, signature = _checked.get(path), _signature(path)
    return read(path) is not None if checked is None or checked[0] != signature else checked[1]


def _of_json(parse: Callable[[Any], R]) -> Callable[[Path], R]:
    return lambda path: parse(parse_json(path.read_bytes()))


def _event(body: Any) -> Event:
    """Return the event of a line of a journal.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: if the line is damaged.
    """
    t, kind = _TIME.validate_python(body.pop("t")), body.pop("kind")
    if kind == "metrics":
        _PROGRESS.validate_python(body)
    elif not isinstance(kind, str):
        raise TypeError("a kind is text")
    return Event(t, kind, body)


def _signature(path: Path) -> _Signature:
    """Return the modification time, size and inode of a file, or None if it does not exist."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _reason(path: Path, error: Exception) -> str:
    """Return in one clause why a file is damaged."""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size == 0:
            return "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg}, line {error.lineno}"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic's
        first = errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg']}"
    return " ".join(str(error).split())[:200] or type(error).__name__


def _owner(name: str) -> str:
    """Return the part of a temporary file's name that stands for a process: ``HOST~NAMESPACE~PID~START``."""
    _, _, rest = name.partition("/")
    return f"{_place()}~{rest.replace('/', '~')}" if rest else f"{_place()}~unknown~"


@cache
def _place() -> str:
    """Return the scope in which process ids are unique: a machine, or one of its containers."""
    namespace = ""
    with suppress(OSError):
        namespace = "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', socket.gethostname())[:64]}~{namespace}"
