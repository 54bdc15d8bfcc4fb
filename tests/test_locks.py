"""Tests of locks: one owner, detection of dead and silent owners, and no writes after a lost lock."""

from __future__ import annotations

import errno
import fcntl
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from job_helpers import run_together, run_trial

from vitlab.errors import UserError
from vitlab.spec import TrialSpec
from vitlab.store import locks
from vitlab.store.files import temporary_path, write_bytes
from vitlab.store.folders import TrialFolder
from vitlab.store.locks import (
    DRIVER,
    Busy,
    LockLost,
    hold_lock,
    holds_lock,
    is_locked,
    lock_owner_and_driver,
    unique_process_name,
)

SILENT_S = 2.0


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def without_locks(patch: pytest.MonkeyPatch, error: int = errno.ENOLCK) -> None:
    """Pretend that the file system has no locks."""

    def none(file: Any, how: int) -> None:
        raise OSError(error, os.strerror(error))

    patch.setattr(fcntl, "flock", none)
    patch.setattr(locks, "BEAT_S", 0.05)
    patch.setattr(locks, "SILENT_S", SILENT_S)


def test_reading_locks_leaves_no_file(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    assert not folder.is_locked() and list(tmp_path.iterdir()) == []


def test_deleted_lock_blocks_nobody_and_loses_ownership(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """'vitlab gc' may delete it between opening and locking: two processes would each lock a different file."""
    lock = tmp_path / "trial" / "lock"
    flock, once = fcntl.flock, [True]

    def deleted_before(file: Any, how: int) -> None:
        if once.pop() if once else False:
            lock.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", deleted_before)
    with hold_lock(lock):
        assert lock.exists() and is_locked(lock)
        with pytest.raises(Busy), hold_lock(lock):
            pass
    assert not is_locked(lock)


def test_exception_inside_lock_is_propagated(tmp_path: Path) -> None:
    for error in (FileNotFoundError("its data"), BlockingIOError("its socket"), Busy("another")):
        with pytest.raises(type(error)) as caught, TrialFolder(tmp_path).lease():
            raise error
        assert caught.value is error


def test_unlockable_file_gives_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch, errno.EIO)
    with pytest.raises(UserError, match=r"cannot be locked \(Input/output error\)"), TrialFolder(tmp_path).lease():
        pass


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_permission(*_: object) -> None:
    raise OSError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(
    ("bad", "why"), [("mkdir", "Not a directory"), ("open", "Permission denied"), ("beside", "No space left on device")]
)
def test_unwritable_folder_gives_one_sentence(
    bad: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TrialFolder(tmp_path / "key" / "code")
    if bad == "mkdir":
        (tmp_path / "key").touch()
    elif bad == "open":
        folder.path.mkdir(parents=True)
        monkeypatch.setattr(locks, "_acquire", no_permission)
    else:
        without_locks(monkeypatch)
        monkeypatch.setattr(locks, "remove_stale_heartbeat", no_room)
        folder.path.mkdir(parents=True)
        (folder.path / "lock.held").touch()
    with pytest.raises(UserError, match=rf"code/lock cannot be written \({why}\)"), folder.lease():
        pass
    if bad == "open":
        write_bytes(folder.path / "result.json", b"{}")
        write_bytes(folder.checkpoint / "last.safetensors", b"")
        folder.remove_checkpoint_and_restore_spec()  # this must not be an error
        assert folder.checkpoint.exists()


def test_truncated_heartbeat_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    monkeypatch.setattr(locks, "SILENT_S", 120.0)
    with monkeypatch.context() as full:
        full.setattr(locks, "open", lambda path, mode, **how: Full(path, mode), raising=False)
        with pytest.raises(UserError, match="No space left"), hold_lock(tmp_path / "lock"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with hold_lock(tmp_path / "lock"):
        assert is_locked(tmp_path / "lock")


class Full(io.FileIO):
    """A file on a disk that has room for its name but not for its content."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lock_file_names_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = unique_process_name(os.getpid())
    assert me.split("/")[1] == str(os.getpid()) and unique_process_name(2**22 + 1) == ""
    monkeypatch.setenv(DRIVER, "elsewhere/1/2")
    with hold_lock(tmp_path / "lock"):
        assert lock_owner_and_driver(tmp_path / "lock") == (me, "elsewhere/1/2")
    assert lock_owner_and_driver(tmp_path / "none") == ("", "")


def test_acquire_waits_for_readers(tmp_path: Path) -> None:
    """A reader shares the lock; this one takes longer than any."""
    (tmp_path / "lock").touch()
    look = open(tmp_path / "lock", "rb")  # noqa: SIM115
    fcntl.flock(look, fcntl.LOCK_SH)
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(lambda: ExitStack().enter_context(hold_lock(tmp_path / "lock")))
        time.sleep(0.1)
        assert not entered.done()
        look.close()
        entered.result(timeout=60)


def test_acquire_of_held_lock_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", None)
    with hold_lock(tmp_path / "lock"), pytest.raises(Busy), hold_lock(tmp_path / "lock"):
        pass


def test_is_locked_is_true_only_for_owner_process(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path, theirs))
    other.start()
    try:
        assert ours.recv() and other.pid is not None
        lock, name, me = tmp_path / "lock", unique_process_name(other.pid), unique_process_name(os.getpid())
        assert holds_lock(name, lock) and lock_owner_and_driver(lock)[0] == name
        assert not holds_lock(f"{name}0", lock) and not holds_lock("", lock)
        with open(lock, "a+", encoding="utf-8") as file:  # an open file is no lock
            file.truncate(0)
            file.write(f"{me} gone/1/2\n")
            file.flush()
            assert lock_owner_and_driver(lock)[0] == me and not holds_lock(me, lock) and holds_lock(name, lock)
        lock.unlink()
        lock.touch()
        assert not holds_lock(name, lock), "that is another file"
    finally:
        other.kill()
        other.join()


def _hold(path: Path, ready: Connection) -> None:
    with TrialFolder(path).lease():
        ready.send(True)
        signal.pause()


def test_lock_is_exclusive_and_ends_with_process(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path, theirs))
    holder.start()
    assert ours.recv()
    folder = TrialFolder(tmp_path)
    assert folder.is_locked()
    with pytest.raises(Busy), folder.lease():
        pass
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert not folder.is_locked()
    with folder.lease():
        assert folder.is_locked()


# -- file systems without locks ---------------------------------------------------------------------------------------


def _hold_and_write(path: Path, parent: Connection) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_locks(patch)
        folder = TrialFolder(path)
        with folder.lease():
            folder.emit("start", attempt=1)
            parent.send(unique_process_name(os.getpid()))
            parent.recv()
            for write in (folder.prepare_for_attempt, lambda: folder.emit("metrics", step=1)):
                try:
                    write()
                    parent.send("written")
                except LockLost:
                    parent.send("taken")
        parent.send("left")


@pytest.mark.slow
def test_silent_owner_is_declared_dead_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_hold_and_write, args=(tmp_path, theirs))
    other.start()
    assert other.pid is not None
    try:
        name, folder = ours.recv(), TrialFolder(tmp_path)
        assert lock_owner_and_driver(folder.lock) == (name, "")
        with pytest.raises(Busy), folder.lease():
            pass
        os.kill(other.pid, signal.SIGSTOP)
        assert (tmp_path / "lock.held").exists(), "it may only be slow"
        with ExitStack() as lease:
            until(lambda: _entered(lease, folder))
            folder.emit("start", attempt=2)
            folder.write_failure("memory ran out")
            partial = temporary_path(folder.weights_file)
            partial.touch()
            os.kill(other.pid, signal.SIGCONT)
            ours.send("write")
            assert [ours.recv(), ours.recv(), ours.recv()] == ["taken", "taken", "left"]
            assert folder.failure().failure == "memory ran out" and partial.exists()
            folder.prepare_for_attempt()
            assert folder.is_locked() and lock_owner_and_driver(folder.lock)[0] == unique_process_name(os.getpid()), (
                "it has not let go for us"
            )
            folder.emit("end", status="done")
        assert [event.body.get("attempt") for event in folder.events()[0]] == [1, 2, None]
        assert not folder.is_locked() and sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "lock"]
    finally:
        other.kill()
        other.join()


def _entered(lease: ExitStack, folder: TrialFolder) -> bool:
    try:
        lease.enter_context(folder.lease())
    except Busy:
        return False
    return True


def test_slow_owner_is_not_declared_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread renews the heartbeat independent of its other work."""
    without_locks(monkeypatch)
    monkeypatch.setattr(locks, "SILENT_S", 0.5)
    lease = tmp_path / "lock.held"
    with hold_lock(tmp_path / "lock"):
        modified = lease.stat().st_mtime
        until(lambda: lease.stat().st_mtime > modified + 0.6)
        assert is_locked(tmp_path / "lock")
        with pytest.raises(Busy), hold_lock(tmp_path / "lock"):
            pass
    assert not is_locked(tmp_path / "lock") and not lease.exists()


def test_one_of_several_drivers_takes_over_stale_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another driver locks between the check and the lock: this one must not own it as well."""
    without_locks(monkeypatch)
    lock, lease = tmp_path / "lock", tmp_path / "lock.held"
    lease.write_text("gone/1/2  0\n")
    os.utime(lease, (0, 0))
    buried = locks.remove_stale_heartbeat

    def late(path: Path) -> bool:
        gone = buried(path)
        path.write_text("other/3/4  1\n")
        return gone

    monkeypatch.setattr(locks, "remove_stale_heartbeat", late)
    with pytest.raises(Busy), hold_lock(lock):
        pass
    assert lock_owner_and_driver(lock) == ("other/3/4", "")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_driver_with_skewed_clock_still_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local clock is ahead of the file system's, so the lock of the other driver looks stale."""
    from vitlab.driver import session
    from vitlab.driver.session import follow_until_sole_driver
    from vitlab.store.folders import Store

    without_locks(monkeypatch)
    monkeypatch.setattr(locks, "SILENT_S", 120.0)
    monkeypatch.setattr(locks, "time", SimpleNamespace(time=lambda: time.time() + 1000))
    monkeypatch.setattr(session, "POLL_S", 0.01)
    store = Store(tmp_path)
    lease = store.driver_lock("tiny").with_name("driver.lock.held")
    lease.parent.mkdir(parents=True)
    lease.write_text("far/3/4  1\n")
    messages: list[str] = []

    class Ear(session.Watch):
        def on_plan(self, *_: object) -> None:
            messages.append("planned")

        def say(self, sentence: str) -> None:
            messages.append(sentence)
            assert len(messages) < 9

        def tick(self) -> None:
            messages.append("tick")
            if messages.count("tick") == 3:
                lease.unlink()

    plan: Any = SimpleNamespace(study="tiny", trials=(), tuning=())
    with follow_until_sole_driver(plan, store, Ear()) as driver:
        assert driver and lease.exists()
    message = "tiny is run by process 3 on far; this one follows until it ends, then trains what is missing."
    assert messages == [message, "planned", "tick", "tick", "tick"]


def test_driver_says_whom_it_takes_over_from_only_if_that_one_was_killed(tmp_path: Path) -> None:
    from vitlab.driver.session import Watch, describe_killed_driver, follow_until_sole_driver
    from vitlab.store.folders import Store

    store, plan = Store(tmp_path), cast(Any, SimpleNamespace(study="tiny", trials=(), tuning=()))
    said: list[str] = []
    watch = Watch()
    watch.say = said.append  # type: ignore[method-assign]
    for _ in range(2):  # the second follows a driver that has ended by itself
        with suppress(KeyboardInterrupt), follow_until_sole_driver(plan, store, watch):
            raise KeyboardInterrupt
    assert not said
    killed = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom pathlib import Path\nfrom vitlab.store.locks import hold_lock\n"
            "with hold_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)",
            str(store.driver_lock("tiny")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.stdout is not None and killed.stdout.readline() == "held\n"
    name = f"process {killed.pid} on {socket.gethostname()}"
    assert describe_killed_driver(plan, store) == ""
    killed.kill()
    killed.communicate()
    assert describe_killed_driver(plan, store) == name
    for _ in range(2):
        with follow_until_sole_driver(plan, store, watch) as followed:
            assert not followed
    assert describe_killed_driver(plan, store) == ""
    assert said == [f"tiny was run by {name}, which is gone; this one takes over."]


SPEC = {
    "data": {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 6},
    "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
    "train": {"steps": 12, "batch_size": 16, "evaluations": 4},
}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_training_that_lost_its_lock_writes_nothing(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitlab.planning.values import Trial  # here, because processes of other tests need no torch
    from vitlab.runner.job import Settings
    from vitlab.spec import STREAMS

    without_locks(monkeypatch)
    work = []
    for seed in range(2 if engine == "vmap" else 1):
        work.append(
            (
                Trial(TrialSpec.model_validate(SPEC), dict.fromkeys(STREAMS, seed), (), None, key=f"k{seed}"),
                TrialFolder(tmp_path / f"{seed}"),
            )
        )
    trial, folder = work[0]
    before: dict[str, bytes] = {}
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        if count == 5:
            while any(folder.path.rglob(".*")):  # a checkpoint is being written by its thread
                time.sleep(0.01)
            (folder.path / "lock.held").write_text("other/3/4  1\n")
            files = [file for file in folder.path.rglob("[!.]*") if file.is_file()]  # a thread may begin to write
            before.update({str(file): file.read_bytes() for file in files})
        return False

    settings = Settings(device="cpu", every_s=0.0)
    with pytest.raises(Busy, match="was taken over by other/3/4"):
        run_together(work, settings, stop) if engine == "vmap" else run_trial(trial, folder, settings, stop)
    assert {str(file): file.read_bytes() for file in folder.path.rglob("*") if file.is_file()} == before
    assert any("checkpoint" in name for name in before)
    for _, each in work:
        assert each.failure() is None and not each.done()
        assert each.is_locked() == (each is folder), "what was not taken over is let go of"


@pytest.mark.parametrize("at", ["train", "build_or_resume_training"])
def test_lost_lock_in_batch_is_not_taken_for_stacking_failure(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitlab.planning.values import Trial
    from vitlab.runner import execution as room
    from vitlab.runner.attempt import Attempt
    from vitlab.spec import STREAMS

    work = [
        (
            Trial(TrialSpec.model_validate(SPEC), dict.fromkeys(STREAMS, seed), (), None, key=f"k{seed}"),
            TrialFolder(tmp_path / f"{seed}"),
        )
        for seed in range(2)
    ]

    def lose_lock(*_: object, **__: object) -> None:
        raise LockLost("was taken over")

    monkeypatch.setattr(*((room, at, lose_lock) if at == "train" else (Attempt, at, lose_lock)))
    with pytest.raises(Busy, match="was taken over"):
        run_together(work, room.Settings(device="cpu"))
    for _, folder in work:
        assert not folder.done() and not any("note" in event.body for event in folder.events()[0])
        assert folder.failure() is None
