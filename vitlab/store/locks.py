"""Leases: who may write somewhere, on one machine or on several that share a file system.

**Locks.**  A process holds the lock of a file while it writes, and the kernel lets go when the process dies.

**Heartbeats.**  Where a file system has no locks (NFS without its lock service, Lustre mounted without flock), a file
beside that one, ``FILE.held``, says who holds it: of several who make it one succeeds, and renews it every
:data:`BEAT_S`.  A holder that has been silent for :data:`SILENT_S`, by the file system's own clock, is taken for dead,
and who wants the lease takes it over.  A holder that was only stopped finds out before it writes again, by
:func:`require`, and writes nothing more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vitlab.errors import UserError

DRIVER = "VITLAB_DRIVER"
"""The variable that tells a worker which process it works for, by the name that :func:`process` gives it."""

BEAT_S = 10.0  #: how often a holder says that it is there
SILENT_S = 120.0  #: how long it may say nothing; NFS shows files as they were up to a minute ago
LOOKS = 500  #: how often :func:`hold` tries again, some milliseconds apart, while processes only look
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  #: what says that there are none here


class Busy(Exception):
    """Somebody else holds the lease."""


class LockLost(Busy):
    """Somebody else holds what this process held: it was silent for so long that it was taken for dead."""


@contextmanager
def hold(file: Path) -> Iterator[None]:
    """Hold the lease of a file, until the block ends or the process dies.

    Raises:
        Busy: if another process holds it.
        UserError: if nothing can be held there, such as in a folder that cannot be written.
    """
    try:
        lease = _held_here(file)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{file} cannot be written ({why}), and who writes there has to hold it") from None
    with lease:
        yield


def require(file: Path) -> None:
    """Pass, unless this process held the lease of a file and somebody has taken it over.

    Raises:
        Taken: then.
    """
    heartbeat = _heartbeats.get(_beside(file))
    if heartbeat is not None and not heartbeat.heard():
        raise LockLost(f"{file} was taken over by {holder(file)[0] or 'another process'}")


def held(file: Path) -> bool:
    """Whether some process holds the lease of a file.  Looking writes nothing.

    So a heartbeat is judged by the local clock: where that is ahead of the file system's by more than
    :data:`SILENT_S`, this may say no and :func:`hold` say :class:`Busy`.
    """
    try:
        with open(file, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError as error:  # it is not there, or the file system has no locks
        return error.errno in NO_LOCKS and not _silent(_beside(file), time.time())


def holder(file: Path) -> tuple[str, str]:
    """Who took the lease of a file last, and for whom they work, as :func:`process` names them; empty: nobody knows."""
    for place in (_beside(file), file):
        with suppress(OSError, ValueError):
            who, driver, *_ = f"{place.read_text(encoding='utf-8').strip()} ".split(" ")
            return who, driver
    return "", ""


def holds_lock(name: str, file: Path) -> bool:
    """Return whether a process of this user holds the lock of a file, by the word of the kernel alone.

    What stands in the file can be written by anyone who may write there.

    Args:
        name: the process, as :func:`process` names it.
        file: the file.
    """
    pid = name.partition("/")[2].partition("/")[0]
    if not pid.isdecimal() or process(int(pid)) != name:
        return False
    with suppress(OSError):
        there = Path("/proc") / pid
        if there.stat().st_uid != os.geteuid():
            return False
        inode = os.stat(file)
        for descriptor in (there / "fd").iterdir():
            with suppress(OSError):  # closed in between
                if os.path.samestat(descriptor.stat(), inode):
                    info = (there / "fdinfo" / descriptor.name).read_text()
                    if re.search(rf"^lock:.* FLOCK .* WRITE {pid} ", info, re.MULTILINE):
                        return process(int(pid)) == name
    return False


def process(pid: int) -> str:
    """A name that no other process has, ``HOST/PID/WHEN IT BEGAN``; empty if it has ended, or the system does not tell.

    A number alone is no name: when a process has ended another may get it.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else f"{socket.gethostname()}/{pid}/{rest[18]}"


# -- locks -------------------------------------------------------------------------------------------------------------


def _held_here(file: Path) -> AbstractContextManager[Any]:
    """See :func:`hold`; leaving it lets go.

    Raises:
        Busy: as there.
        UserError: if the file cannot be locked.
        OSError: if nothing can be written there.
    """
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = open(file, "a+", encoding="utf-8")  # noqa: SIM115  # it stays open
        except FileNotFoundError:
            continue  # the folder went while this looked
        try:
            _lock(lock)
            if _is_still(file, lock.fileno()):  # or it was deleted in between, and its lock keeps nobody out
                with suppress(OSError):  # a full disk
                    lock.truncate(0)
                    lock.write(f"{own_id()}\n")
                    lock.flush()
                return lock
        except BlockingIOError:
            lock.close()
            raise Busy(str(file)) from None
        except OSError as error:
            lock.close()
            if error.errno in NO_LOCKS:
                return _Heartbeat(_beside(file))
            raise UserError(
                f"{file} cannot be locked ({error.strerror}), and two processes could write one trial"
            ) from None
        lock.close()


def _lock(file: IO[str]) -> None:
    """Lock an open file for this process alone.

    :func:`held` shares the lock for a moment.  Whoever can share it, too, knows that nobody holds it for itself.

    Raises:
        BlockingIOError: if another process holds the lock.
        OSError: if the file cannot be locked.
    """
    for remaining in reversed(range(LOOKS)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
            if not remaining:
                raise
        time.sleep(0.001 + 0.004 * random.random())  # two that do this at once would meet again and again


def _is_still(file: Path, descriptor: int) -> bool:
    """Whether a file is the one that was opened."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def own_id() -> str:
    """Return this process and its driver, as a lock file names them."""
    return f"{process(os.getpid())} {os.environ.get(DRIVER, '')}"


# -- heartbeats --------------------------------------------------------------------------------------------------------


class _Heartbeat:
    """A lease that is a file, which a thread of its holder renews; leaving it lets go.

    Raises:
        Busy: if somebody else holds it.
        OSError: if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._word = f"{own_id()} {os.urandom(8).hex()}\n"
        if not self._made() and not (reclaim_stale(path) and self._made()):
            raise Busy(str(path))
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"holds {path}", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        _heartbeats[self._path] = self

    def __exit__(self, *_: object) -> None:
        del _heartbeats[self._path]
        self._left.set()
        self._thread.join()
        if self.heard():
            self._path.unlink(missing_ok=True)

    def heard(self) -> bool:
        """Whether the lease is still this process's."""
        try:
            return self._path.read_text(encoding="utf-8") == self._word
        except FileNotFoundError:
            return False

    def _made(self) -> bool:
        try:
            file = open(self._path, "x", encoding="utf-8")  # noqa: SIM115  # what comes after has another remedy
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._word)
        except OSError:  # a full disk; left as it is, it would keep everybody out
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _beat(self) -> None:
        while not self._left.wait(BEAT_S):
            with suppress(OSError):  # a server that is away
                if not self.heard():
                    return
                os.utime(self._path)


_heartbeats: dict[Path, _Heartbeat] = {}  #: of this process


def _beside(file: Path) -> Path:
    return file.with_name(f"{file.name}.held")


def _silent(path: Path, now: float) -> bool:
    """Whether nobody has renewed a lease for long, or it is not there."""
    try:
        with open(path, "rb") as file:  # opening asks the server how old it is, where looking may not
            return now - os.fstat(file.fileno()).st_mtime > SILENT_S
    except FileNotFoundError:
        return True


def reclaim_stale(path: Path) -> bool:
    """Remove the lease of somebody who is silent.  Returns whether there is none now.

    Of several who do so at once one may remove what another has just made: that one finds out by :func:`require`.
    """
    probe_file = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        probe_file.touch()  # with the time of the file system, which is that of all who renew
        if not _silent(path, probe_file.stat().st_mtime):
            return False
        os.replace(path, probe_file)
    except FileNotFoundError:
        return True  # somebody else has
    finally:
        probe_file.unlink(missing_ok=True)
    return True
