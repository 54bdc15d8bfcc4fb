"""Locks for writing, on one machine or on several that share a file system.

**Kernel locks.**  A process locks a file while it writes, and the kernel releases the lock when the process dies.

**Heartbeats.**  Where there are none (NFS without its lock service, Lustre mounted without flock, Windows), a file
``FILE.held`` beside the locked one names the owner.  Only one of several processes succeeds in creating it, and renews
it every :data:`BEAT_S`.  An owner without a heartbeat for :data:`SILENT_S`, by the file system's own clock, counts as
dead, and another process may take the lock over.  A suspended owner detects this by :func:`raise_if_lock_lost` before
it writes again, and writes nothing more.
"""

import errno
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vitlab.errors import UserError
from vitlab.store.files import open_nofollow, temporary_path

DRIVER = "VITLAB_DRIVER"
"""Environment variable with the driver of a worker, as named by :func:`unique_process_name`."""

BEAT_S = 10.0  #: interval of heartbeats
SILENT_S = 120.0  #: age of a dead heartbeat; NFS may show files as they were a minute ago
ATTEMPTS = 500  #: retries of :func:`hold_lock`, some milliseconds apart, while readers share the lock
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  #: errors of file systems without locks


class Busy(Exception):
    """Another process holds the lock."""


class LockLost(Busy):
    """Another process took over the lock of this process, whose heartbeat had stopped."""


@contextmanager
def hold_lock(file: Path) -> Iterator[None]:
    """Hold the lock of a file until the block ends or the process dies.

    Raises:
        Busy: If another process holds it.
        UserError: If the file cannot be locked, for example in a read-only folder.
    """
    try:
        lock = _acquire(file)
    except OSError as error:
        why, mend = error.strerror or error, "delete it" if file.is_dir() else "make it writable"
        raise UserError(f"{file} cannot be written ({why}), so this process cannot lock it; {mend}") from None
    with lock:
        yield


def raise_if_lock_lost(file: Path) -> None:
    """Check that no other process has taken over a lock of this process.

    Raises:
        LockLost: If another process has.
    """
    heartbeat = _heartbeats.get(_heartbeat_file(file))
    if heartbeat is not None and not heartbeat.is_owned():
        raise LockLost(f"{file} was taken over by {lock_owner_and_driver(file)[0] or 'another process'}")


def is_locked(file: Path) -> bool:
    """Return True if a process holds the lock of a file.  Nothing is written.

    Heartbeats are therefore compared with the local clock: if that is ahead of the file system's by more than
    :data:`SILENT_S`, this may return False although :func:`hold_lock` raises :class:`Busy`.
    """
    try:
        with open(file, "rb") as lock:
            _flock(lock, "LOCK_SH", "LOCK_NB")
            return False
    except BlockingIOError:
        return True
    except OSError as error:  # it does not exist, or the file system has no locks
        return error.errno in NO_LOCKS and not _is_stale(_heartbeat_file(file), time.time())


def lock_owner_and_driver(file: Path) -> tuple[str, str]:
    """Return the :func:`unique_process_name` of the last owner of a file's lock and of its driver; empty if unknown."""
    for place in (_heartbeat_file(file), file):
        with suppress(OSError, ValueError):
            who, driver, *_ = f"{place.read_text(encoding='utf-8').strip()} ".split(" ")
            return who, driver
    return "", ""


def holds_lock(name: str, file: Path) -> bool:
    """Return True if a process of this user holds the kernel lock of a file.

    The content of the file is not trusted, since others may be able to write it.

    Args:
        name: The process, as :func:`unique_process_name` names it.
        file: The file.
    """
    if not is_alive(name):
        return False
    pid = name.split("/")[1]
    with suppress(OSError):
        folder = Path("/proc") / pid
        if folder.stat().st_uid != os.geteuid():
            return False
        inode = os.stat(file)
        for descriptor in (folder / "fd").iterdir():
            with suppress(OSError):  # closed in between
                if os.path.samestat(descriptor.stat(), inode):
                    info = (folder / "fdinfo" / descriptor.name).read_text()
                    if re.search(rf"^lock:.* FLOCK .* WRITE {pid} ", info, re.MULTILINE):
                        return unique_process_name(int(pid)) == name
    return False


def unique_process_name(pid: int) -> str:
    """Return a unique name of a process, ``HOST/PID/START``; empty if it has ended or the system has no /proc.

    The process id alone is not unique, since the system reuses it.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else f"{socket.gethostname()}/{pid}/{rest[18]}"


def own_unique_process_name() -> str:
    """Return the name of this process, see :func:`unique_process_name`."""
    return unique_process_name(os.getpid())


def is_alive(name: str) -> bool:
    """Return True if the process with this :func:`unique_process_name` name runs on this machine."""
    pid = name.partition("/")[2].partition("/")[0]
    return pid.isdecimal() and unique_process_name(int(pid)) == name


def kill_process(name: str) -> bool:
    """Kill the process of this name, but never another one that reuses its PID; return True if it was running."""
    if not is_alive(name):
        return False
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(int(name.split("/")[1]))
        try:
            if is_alive(name):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    return True


def kill_orphan(file: Path) -> bool:
    """Kill the process that holds a lock if its driver is dead: it should have exited, so it is stopped or stuck.

    A lock file may be written by others, so the process it names is killed only if it holds that very lock.

    Returns:
        True if such a process was found on this machine.
    """
    name, driver = lock_owner_and_driver(file)
    if not driver or is_alive(driver) or driver.split("/")[0] != name.split("/")[0]:
        return False
    return holds_lock(name, file) and kill_process(name)


# -- kernel locks ------------------------------------------------------------------------------------------------------


def _acquire(file: Path) -> AbstractContextManager[Any]:
    """Acquire the lock of a file and return a context that releases it.

    Raises:
        Busy: If another process holds it.
        UserError: If the file cannot be locked.
        OSError: If the file cannot be written.
    """
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.fdopen(open_nofollow(file, os.O_RDWR | os.O_APPEND), "a+", encoding="utf-8")
        except FileNotFoundError:
            continue  # the folder was deleted in the meantime
        try:
            _lock_exclusively(lock)
            with suppress(FileNotFoundError):
                if os.path.samefile(file, lock.fileno()):  # else it was deleted, and its lock excludes nobody
                    with suppress(OSError):  # a full disk
                        lock.truncate(0)
                        lock.write(f"{own_and_driver_name()}\n")
                        lock.flush()
                    return lock
        except BlockingIOError:
            lock.close()
            raise Busy(str(file)) from None
        except OSError as error:
            lock.close()
            if error.errno in NO_LOCKS:
                return _Heartbeat(_heartbeat_file(file))
            raise UserError(
                f"{file} cannot be locked ({error.strerror}), so two processes could write the same trial; "
                "choose another --out"
            ) from None
        lock.close()


def _flock(file: IO[Any], *names: str) -> None:
    """Lock or unlock an open file as flock does, by the names of the operations.

    Raises:
        BlockingIOError: If another process holds the lock.
        OSError: If the file cannot be locked, with the number of :data:`NO_LOCKS` where the system has no flock.
    """
    try:
        import fcntl
    except ImportError:  # Windows, whose own locks would keep readers from the names in the file
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)) from None
    fcntl.flock(file, sum(getattr(fcntl, name) for name in names))


def _lock_exclusively(file: IO[str]) -> None:
    """Lock an open file exclusively.

    :func:`is_locked` shares the lock for a moment.  If sharing succeeds, no process holds it exclusively, so try again.

    Raises:
        BlockingIOError: If another process holds the lock.
        OSError: If the file cannot be locked.
    """
    for remaining in reversed(range(ATTEMPTS)):
        try:
            _flock(file, "LOCK_EX", "LOCK_NB")
            return
        except BlockingIOError:
            _flock(file, "LOCK_SH", "LOCK_NB")
            _flock(file, "LOCK_UN")
            if not remaining:
                raise
        time.sleep(0.001 + 0.004 * random.random())  # random, so that two processes do not keep colliding


def own_and_driver_name() -> str:
    """Return the names of this process and its driver, as written to lock files."""
    return f"{own_unique_process_name()} {os.environ.get(DRIVER, '')}"


# -- heartbeats --------------------------------------------------------------------------------------------------------


class _Heartbeat:
    """A lock that is a file renewed by a thread of its owner; leaving the context releases it.

    Raises:
        Busy: If another process holds it.
        OSError: If the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = f"{own_and_driver_name()} {os.urandom(8).hex()}\n"
        if not self._try_create_file() and not (remove_stale_heartbeat(path) and self._try_create_file()):
            raise Busy(str(path))
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"holds {path}", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        _heartbeats[self._path] = self

    def __exit__(self, *_: object) -> None:
        del _heartbeats[self._path]
        self._released.set()
        self._thread.join()
        if self.is_owned():
            self._path.unlink(missing_ok=True)

    def is_owned(self) -> bool:
        """Return True if this process still owns the lock."""
        try:
            return self._path.read_text(encoding="utf-8") == self._content
        except FileNotFoundError:
            return False

    def _try_create_file(self) -> bool:
        try:
            file = open(self._path, "x", encoding="utf-8")  # noqa: SIM115  # errors of writing are handled below
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._content)
        except OSError:  # a full disk; an empty file would block every process
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with suppress(OSError):  # a file server that does not respond
                if not self.is_owned():
                    return
                os.utime(self._path)


_heartbeats: dict[Path, _Heartbeat] = {}  #: of this process


def _heartbeat_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.held")


def _is_stale(path: Path, now: float) -> bool:
    """Return True if a heartbeat file is too old or does not exist."""
    try:
        with open(path, "rb") as file:  # opening fetches the age from the server; stat may use a cache
            return now - os.fstat(file.fileno()).st_mtime > SILENT_S
    except FileNotFoundError:
        return True


def remove_stale_heartbeat(path: Path) -> bool:
    """Remove a stale heartbeat file, and return True if there is none now.

    Of several processes doing so at once, one may remove the file another has just created; the latter detects this by
    :func:`raise_if_lock_lost`.
    """
    probe_file = temporary_path(path)
    try:
        probe_file.touch()  # for the time of the file system's clock
        if not _is_stale(path, probe_file.stat().st_mtime):
            return False
        os.replace(path, probe_file)
    except FileNotFoundError:
        return True  # another process removed it
    finally:
        probe_file.unlink(missing_ok=True)
    return True
