"""Damaged files: found on reading, reported once, and set aside by the next writer.

A damaged file counts as absent.  :func:`read_stored` reports it once per process, and the next writer of the file
first renames the damaged one to ``NAME.damaged-TIME``.  Readers rename nothing.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from vitlab.errors import VitlabError

log = logging.getLogger(__name__)

R = TypeVar("R")

DAMAGED = ".damaged-"
"""Separates the name of a damaged file from the time at which it was set aside."""

_Signature = tuple[int, int, int] | None

_damaged: dict[Path, _Signature] = {}  #: damaged files that were read, and their state
_reported: dict[Path, _Signature] = {}  #: damaged files that were reported


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
            raise ValueError("it is a folder, not a file")
        return parse(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
        _damaged[path] = signature
        raise Damaged(_reason(path, error)) from None
    except OSError as error:
        if error.errno is not None:
            raise
        _damaged[path] = signature  # raised by a library for unreadable content
        raise Damaged(_reason(path, error)) from None


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
    if path in _damaged and _damaged[path] == _signature(path) and os.path.lexists(path):
        set_aside(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to ``NAME.damaged-TIME`` and return the new path."""
    stamp = f"{path.name}{DAMAGED}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    count, new = 1, path.with_name(stamp)
    while os.path.lexists(new):
        count, new = count + 1, path.with_name(f"{stamp}-{count}")
    path.rename(new)
    return new


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
