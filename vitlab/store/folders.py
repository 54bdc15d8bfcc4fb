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

Everything is written to a temporary name and renamed, so a reader never sees half a file.  A file that a disk or a
program has damaged counts as absent: :func:`read_stored` reports it, in one sentence a process, and whoever writes the
file again first renames the damaged one to ``NAME.damaged-TIME``.  Readers move nothing.
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
from vitlab.store.locks import held as held
from vitlab.store.locks import holder as holder
from vitlab.store.locks import holds_lock as holds_lock
from vitlab.store.locks import process as process
from vitlab.store.locks import require
from vitlab.store.result import Failure, Millis, Progress, Result

log = logging.getLogger(__name__)

R = TypeVar("R")

DAMAGED = ".damaged-"
"""Stands between the name of a damaged file and the time at which it was set aside."""

ABANDONED_S = 24 * 3600.0
"""Age at which a temporary file of another machine, or of an unknown process, is taken for abandoned."""


class Damaged(VitlabError):
    """A stored file that does not hold what was written."""


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
        """Return the result, or None if the trial has not ended or its result is damaged."""
        file = self.path / "result.json"
        result = read_json(file, self._own_result)
        if result is None or result.circumstances.ended:
            return result
        return replace(result, circumstances=replace(result.circumstances, ended=file.stat().st_mtime))

    def done(self) -> bool:
        """Return whether the trial has a result."""
        return _is_whole(self.path / "result.json", lambda file: read_json(file, self._own_result))

    def usable(self) -> bool:
        """Return whether another trial can start from this one: it has ended, and its weights are there, whole."""
        return (
            self.done()
            and _is_whole(self.weights, lambda file: read_stored(file, check_weights))
            and _is_whole(self.spec, lambda file: read_json(file, mapping))
        )

    def _own_result(self, data: Any) -> Result:
        """Parse a result, and refuse that of another trial."""
        result = Result.from_json(data)
        trials, key, code = self.path.parts[-3:] if len(self.path.parts) > 3 else ("", "", "")
        if trials == "trials" and (key, code) != (result.key, result.code):
            raise ValueError(f"it is the result of trial {result.key[:16]}/{result.code[:16]}")
        return result

    def finish(self, result: Result) -> None:
        """Write the result: the last thing that happens to a trial.  Where it is, everything is: also on the disk."""
        settle([file for file in (self.spec, self.weights, self.predictions) if file.exists()])
        self.require()
        write_json(self.path / "result.json", result.to_json())
        self.clear_failure()

    def remove_checkpoint(self, spec: Mapping[str, Any] | None = None) -> None:
        """Complete the folder of a trial that has ended.

        Remove the checkpoint that a worker which was killed right then has left, and write a damaged or missing
        spec.json again.

        Args:
            spec: the trial in JSON values, where it is known.
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
        """Note why an attempt ended without a result: in one sentence, in full, and of which kind, as data."""
        self.require()
        write_json(self.path / "failure.json", asdict(Failure(failure, kind, traceback, time.time())))

    def mark_failed(self, failure: str, kind: str) -> None:
        """Note that the last failure, or this one where the worker has left none, was the last: nobody tries again.

        Until a driver has said so, a failure is that of an attempt.  One that dies before it has made the next leaves
        that to the next driver.
        """
        last = self.last_failure() or Failure(failure, kind, "", time.time())
        write_json(self.path / "failure.json", {**asdict(last), "has_failed_for_good": True})

    def has_failed_for_good(self) -> bool:
        """Return whether it failed, and is not to be tried again unless somebody asks."""
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
        """Pass, unless this process held the trial and another has taken it over: then nothing may be written.

        Raises:
            Taken: then.
        """
        require(self.lock)

    def held(self) -> bool:
        """Whether some process holds the lease now.  Looking writes nothing, so that others' results can be read."""
        return held(self.lock)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def emit(self, kind: str, **body: Any) -> None:
        """Append one event.  One ``write`` of one line, so that lines of a killed worker are whole or last.

        Raises:
            OSError: if the disk is full; the journal is then as it was.
        """
        self.require()
        append_json(self.path / "events.jsonl", {"t": int(time.time() * 1000), "kind": kind, **body})

    def recover_journal(self) -> None:
        """Make ready for an attempt, first of all once the lease is held.

        A torn last line is cut off the journal, what a killed writer left half done goes, damaged files are set aside,
        and an earlier failure is deleted.

        Raises:
            Taken: if another process has taken the trial over; then nothing is touched.
        """
        self.require()
        self.clear_failure()
        if self.result() is None:
            set_aside_damaged(self.path / "result.json")
        if self.checkpoint.exists() and not self.checkpoint.is_dir():
            set_aside(self.checkpoint)
        cut_torn_line(self.path / "events.jsonl")
        for name in (self.weights.name, self.predictions.name, self.spec.name, "result.json", "failure.json"):
            for unfinished in self.path.glob(f".{name}.*"):
                remove(unfinished)

    def events(self, offset: int = 0) -> tuple[list[Event], int]:
        """Events from a byte offset on, and the offset to go on from.

        A torn last line is left for later, and a damaged one is passed over: the result has it, too.
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
        return TrialFolder(self.root / "trials" / key / code)

    def study(self, name: str) -> Path:
        return self.root / "studies" / name

    def driver(self, study: str) -> Path:
        """The lock of whoever runs a study."""
        return self.study(study) / "driver.lock"

    def clear(self, study: str) -> None:
        """Delete the temporary files that killed drivers have left in the output folder and in a study's folder."""
        for folder in (self.root, self.study(study), self.study(study) / "report"):
            for file in abandoned(folder):
                with suppress(OSError):
                    remove(file)

    def leftovers(self) -> list[Path]:
        """Return what nothing reads any more: abandoned temporary files, and what was set aside as damaged."""
        folders = [self.root, *(path for path in self.root.glob("studies/**") if path.is_dir())]
        folders += [
            path for depth in ("*", "*/*", "*/*/*") for path in self.root.glob(f"trials/{depth}") if path.is_dir()
        ]
        aside = [path for folder in folders for path in folder.glob(f"*{DAMAGED}*")]
        return sorted({*aside, *(file for folder in folders for file in abandoned(folder))})


# -- files -------------------------------------------------------------------------------------------------------------


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
        if path.is_dir():
            set_aside(path)
        set_aside_damaged(path)
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
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
    """Return a name beside ``path`` that no other thread, process or machine uses: ``.NAME.OWNER.RANDOM``.

    It begins with a dot: what stands there is not finished, and nobody reads it.  ``OWNER`` names the process, so that
    :func:`abandoned` finds what a killed one has left.
    """
    return path.with_name(f".{path.name}.{_owner(process(os.getpid()))}.{os.urandom(8).hex()}")


def abandoned(folder: Path) -> list[Path]:
    """Return the temporary files in a folder whose writer is gone.

    Of a process on this machine that is known; what another machine or an unknown process has left counts as abandoned
    after :data:`ABANDONED_S`.
    """
    left = []
    for file in sorted(folder.glob(".*")):
        if (name := _TEMPORARY.fullmatch(file.name)) is None:
            continue
        host, _, number = (name["owner"] or "").rpartition("~")[0].rpartition("~")
        with suppress(OSError):  # it was renamed while this looked
            if host == _place() and number.isdecimal():
                gone = _owner(process(int(number))) != name["owner"]
            else:
                gone = time.time() - file.lstat().st_mtime > ABANDONED_S
            if gone:
                left.append(file)
    return left


def remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def hold(file: Path) -> Iterator[None]:
    """Hold the lease of a file, see :func:`vitlab.store.locks.hold`; a folder in its place is set aside."""
    if file.is_dir():
        report_damage(file, "it is a folder")
        set_aside(file)
    with locks.hold(file):
        yield


# -- reading -----------------------------------------------------------------------------------------------------------


def read_stored(path: Path, parse: Callable[[Path], R]) -> R | None:
    """Return what a stored file holds, or None if it does not exist or is damaged.

    Damage is reported once a process.  The file stays where it is; :func:`write_bytes` sets it aside.

    Args:
        path: the file.
        parse: reads it, and raises ValueError, LookupError, TypeError or AttributeError for what it cannot be.

    Raises:
        OSError: if the file cannot be read, as for lack of permission.
    """
    try:
        return load_stored(path, parse)
    except Damaged as error:
        report_damage(path, str(error))
        return None


def load_stored(path: Path, parse: Callable[[Path], R]) -> R | None:
    """Return what a stored file holds, or None if it does not exist.

    Args:
        path: the file.
        parse: see :func:`read_stored`.

    Raises:
        Damaged: with the reason alone, if it does not hold what was written.
        OSError: if the file cannot be read, as for lack of permission.
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
        _checked[path] = signature, False  # of a library that could not make sense of it
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
        ValueError: if it is none, or holds text that cannot be written anywhere.
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
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        size = os.fstat(opened.fileno()).st_size
        if not 0 < length <= size - 8:
            raise ValueError("its header does not fit into it")
        header = mapping(json.loads(opened.read(length)))
    ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
    if max(ends, default=0) != size - 8 - length:
        raise ValueError("it is cut")
    return True


def report_damage(path: Path, reason: str) -> None:
    """Report a damaged file, once a process for each state of it."""
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
    """Set a file aside if it was found damaged; delete nothing."""
    seen = _checked.get(path)
    if seen is not None and not seen[1] and seen[0] == _signature(path) and os.path.lexists(path):
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
    except (FileNotFoundError, NotADirectoryError):
        return [], offset
    except IsADirectoryError:
        report_damage(path, "it is a folder")
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    return whole.splitlines(), offset + len(whole)


def cut_torn_line(path: Path) -> None:
    """Cut off a last line that a killed writer did not finish, or the next would be appended to it."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return
    except IsADirectoryError:
        set_aside(path)
        return
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


# -- how it is done ----------------------------------------------------------------------------------------------------

_Signature = tuple[int, int, int] | None

_checked: dict[Path, tuple[_Signature, bool]] = {}  #: files that were read, in which state, and whether they were whole
_reported: dict[Path, _Signature] = {}  #: damaged files that were reported, and in which state

_TEMPORARY = re.compile(r"\..+?\.(?:(?P<owner>[^/.~]+~[^/.]*)\.)?[0-9a-f]{16}(?:-journal|-wal|-shm)?")

_PROGRESS = TypeAdapter(Progress)
_TIME = TypeAdapter(Millis)


def _is_whole(path: Path, read: Callable[[Path], object]) -> bool:
    """Return whether a file exists and is whole; one that has not changed is read once a process."""
    seen, signature = _checked.get(path), _signature(path)
    return read(path) is not None if seen is None or seen[0] != signature else seen[1]


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
    """Return what changes when a file is replaced or written to; None if it does not exist."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _reason(path: Path, error: Exception) -> str:
    """Return in a clause why a file cannot be what was written."""
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
    """Return where the numbers of processes count: a machine, or one container of it."""
    namespace = ""
    with suppress(OSError):
        namespace = "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', socket.gethostname())[:64]}~{namespace}"
