"""Files: written atomically, read with damage reported, appended to line by line.

Every file is written under a temporary name and renamed, so that readers never see a partial file.

A damaged file counts as absent.  :func:`read_stored` reports it once per process, and the next writer of the file
first renames the damaged one to ``NAME.damaged-TIME``.  Readers rename nothing.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic_core import from_json

from vitlab.errors import UserError, VitlabError, one_line
from vitlab.imports import Stamp, file_stamp

log = logging.getLogger(__name__)

R = TypeVar("R")

MAX_NAME = 80  #: letters of an arm's or image's name that a folder's name holds
DRIVER_LOCK = "driver.lock"
"""Lock of the driver of a study, in the study's folder."""
ABANDONED_S = 3600.0
"""Age in seconds from which a temporary file counts as abandoned: writing one takes seconds."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}(?:-journal|-wal|-shm)?")  # the last three are SQLite's


def write_json(path: Path, data: Any, *, fsync: bool = True) -> None:
    """Write JSON atomically, one line per entry of a mapping.  NaN and infinities are written as Python's json does."""
    if isinstance(data, dict) and data:  # ``indent`` would take ten times as long, without the encoder in C
        text = "{\n" + ",\n".join(json.dumps({name: value})[1:-1] for name, value in data.items()) + "\n}\n"
    else:
        text = json.dumps(data) + "\n"
    write_bytes(path, text.encode(), fsync=fsync)


def write_bytes(
    path: Path, data: bytes, *, fsync: bool = True, before_rename: Callable[[], None] = lambda: None
) -> None:
    """Write a file atomically: under a temporary name, synced, then renamed.

    Args:
        path: The file.
        data: Its content.
        fsync: Sync to the disk; otherwise call :func:`fsync_all` before relying on the file.
        before_rename: Called when all is written; if it raises, the file stays as it was.

    Raises:
        OSError: If the disk is full or read-only; no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_path(path)
    try:
        with open(partial, "xb") as file:
            file.write(data)
        if fsync:
            fsync_all([partial])
        before_rename()
        if path.is_dir():
            set_aside(path)
        set_aside_damaged(path)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def fsync_all(files: Sequence[Path]) -> None:
    """Sync files to the disk.

    Raises:
        OSError: If the disk is full.
    """
    for file in files:
        with open(file, "r+b") as writer:  # Windows syncs no file that is open for reading alone
            os.fsync(writer.fileno())


def to_safe_name(name: str) -> str:
    """Return a name without separators of paths, for a folder or a file; two names never share one.

    On disks that ignore case, names that differ in case alone do.
    """
    clean = re.sub(r"[^\w=., -]", "_", name).strip(" .")
    if clean == name and len(name) <= MAX_NAME:
        return name
    return f"{clean[:MAX_NAME]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def temporary_path(path: Path) -> Path:
    """Return a name beside ``path`` that no other thread, process or machine uses: ``.NAME.RANDOM``.

    The leading dot marks an unfinished file, which nothing reads.
    """
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}")


def find_abandoned_files(folder: Path) -> list[Path]:
    """Return the temporary files in a folder that are so old that their writer must have been killed."""
    files = []
    for file in sorted(folder.glob(".*")):
        with suppress(OSError):  # it was renamed in the meantime
            if _TEMPORARY.fullmatch(file.name) and time.time() - file.lstat().st_mtime > ABANDONED_S:
                files.append(file)
    return files


def remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@overload
def read_json(path: Path) -> Any: ...
@overload
def read_json(path: Path, parse: Callable[[Any], R]) -> R | None: ...
def read_json(path: Path, parse: Callable[[Any], Any] = lambda data: data) -> Any:
    """Return the record in a JSON file, or None if the file does not exist or is damaged; see :func:`read_stored`."""
    return read_stored(path, json_parser(parse))


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is not JSON, or holds text that cannot be encoded.
    """
    try:
        return from_json(data)  # three times as fast as Python's json, with the same numbers
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def require_mapping(data: Any) -> Mapping[str, Any]:
    """Return ``data`` if it is a JSON object.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(data, dict):
        raise TypeError(f"it holds {type(data).__name__}, no mapping")
    return data


def check_safetensors_header(file: Path) -> bool:
    """Check that the header of a safetensors file fits its length, and return True.  Reads the header only.

    Raises:
        ValueError: for any other file.
    """
    import safetensors  # readers of results alone need none

    try:
        with safetensors.safe_open(file, framework="numpy"):
            return True
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None


def sort_safetensors_header(data: bytes) -> bytes:
    """Return a safetensors file with its header sorted by key.

    The library writes metadata in an order that changes from call to call; sorted, equal contents are equal bytes.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return b"".join((data[:8], text.encode().ljust(end - 8), memoryview(data)[end:]))


def append_json(path: Path, data: Any) -> None:
    """Append one JSON line in one ``write``, so that only the last line of a killed process can be torn.

    Raises:
        OSError: If the disk is full; the file is then unchanged.
    """
    line = (json.dumps(data) + "\n").encode()
    descriptor = open_nofollow(path)
    try:
        count = os.write(descriptor, line)
        if count < len(line):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - count)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def open_nofollow(path: Path, access_flags: int = os.O_WRONLY | os.O_APPEND) -> int:
    """Return the descriptor of a file that is written in place, and create it with the rights that the umask gives.

    A results folder may come from other people, so a link is not followed: it could lead to any file of the user.
    Lines end as they are written, on Windows too.

    Raises:
        UserError: if the path is a link.
        OSError: if the file cannot be opened.
    """
    refusal = UserError(f"{path} is a link, and vitlab writes to no linked file; delete the link")
    no_follow = getattr(os, "O_NOFOLLOW", 0)
    if not no_follow and path.is_symlink():  # Windows cannot refuse links when it opens them
        raise refusal
    try:
        return os.open(path, access_flags | os.O_CREAT | no_follow | getattr(os, "O_BINARY", 0), 0o666)
    except OSError:
        if path.is_symlink():
            raise refusal from None
        raise


def read_complete_lines(path: Path, offset: int = 0) -> tuple[list[bytes], int]:
    """Return the complete lines from a byte offset on, and the offset for the next call."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return [], offset
    except IsADirectoryError:
        report_damage(path, "it is a folder, not a file")
        return [], offset
    complete = data[: data.rfind(b"\n") + 1]
    return complete.splitlines(), offset + len(complete)


def truncate_torn_line(path: Path) -> None:
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


def json_parser(parse: Callable[[Any], R]) -> Callable[[Path], R]:
    """Return the parser of a JSON file, for :func:`read_stored` and :func:`read_stored_strictly`."""
    return lambda path: parse(parse_json(path.read_bytes()))


# -- damage ------------------------------------------------------------------------------------------------------------

DAMAGED = ".damaged-"
"""Separates the name of a damaged file from the time at which it was set aside."""

_damaged: dict[Path, Stamp | None] = {}  #: damaged files that were read, and their state
_reported: dict[Path, Stamp | None] = {}  #: damaged files that were reported


class Damaged(VitlabError):
    """A damaged stored file."""


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
        return read_stored_strictly(path, parse)
    except Damaged as error:
        report_damage(path, str(error))
        return None


def read_stored_strictly(path: Path, parse: Callable[[Path], R]) -> R | None:
    """Return what a stored file holds, or None if it does not exist.

    Args:
        path: The file.
        parse: See :func:`read_stored`.

    Raises:
        Damaged: If the file is damaged; the message is the reason alone.
        OSError: If the file cannot be read, for example for lack of permission.
    """
    stamp = file_stamp(path)
    try:
        if path.is_dir():
            raise ValueError("it is a folder, not a file")
        return parse(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # without, by a library for unreadable content
            raise
        _damaged[path] = stamp
        raise Damaged(_describe_damage(path, error)) from None


def report_damage(path: Path, reason: str) -> None:
    """Log a damaged file, once per process for each state of it."""
    stamp = file_stamp(path)
    if _reported.get(path) != stamp:
        _reported[path] = stamp
        log.warning(
            "%s is damaged (%s) and counts as absent; the next 'vitlab run' sets it aside as %s%sTIME.",
            path,
            reason,
            path.name,
            DAMAGED,
        )


def set_aside_damaged(path: Path) -> None:
    """Set a file aside if it was read as damaged; delete nothing."""
    if path in _damaged and _damaged[path] == file_stamp(path) and os.path.lexists(path):
        set_aside(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to ``NAME.damaged-TIME`` and return the new path."""
    stamp = f"{path.name}{DAMAGED}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    count, new = 1, path.with_name(stamp)
    while os.path.lexists(new):
        count, new = count + 1, path.with_name(f"{stamp}-{count}")
    path.rename(new)
    return new


def _describe_damage(path: Path, error: Exception) -> str:
    """Return in one clause why a file is damaged."""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size == 0:
            return "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if "recursion limit" in str(error):  # of the parsers of JSON
        return "it is nested too deeply"
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic's
        first = errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg']}"
    return one_line(error)[:200] or type(error).__name__


def display_path(path: Path) -> str:
    """Return a path for display, relative if it is below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
