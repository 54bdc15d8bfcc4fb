"""The store: files whole or not at all, leases, journals that survive being cut."""

import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from vitlab.result import Circumstances, Measurement, Outcome, Result
from vitlab.store import Busy, Store, TrialFolder, read_json, write_json


def result() -> Result:
    history = (Measurement(1, 0.5, 8, {"val/accuracy": 0.1 + 0.2}), Measurement(2, 1.0, 16, {"val/loss": float("nan")}))
    outcome = Outcome({"val/accuracy": 1 / 3}, history, "abc", 2, 16)
    circumstances = Circumstances(1.5, 2.5, "here", 1, 10, 20, 30, {"torch": "2"}, {"threads": 1})
    return Result("key", "code", "done", outcome, circumstances)


def test_a_result_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = Store(tmp_path).trial("key", "code")
    assert folder.result() is None and not folder.done()
    folder.finish(result())
    back = folder.result()
    assert back is not None and repr(back) == repr(result()) and folder.done()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert read_json(file) == {"a": 1} and [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_torn_line_waits_and_is_mended(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.emit("start", attempt=1)
    folder.emit("metrics", step=1, metrics={"a": 1.0})
    with open(tmp_path / "events.jsonl", "a") as journal:
        journal.write('{"t": 1, "kind": "met')
    events, offset = folder.events()
    assert [event.kind for event in events] == ["start", "metrics"]
    assert folder.events(offset) == ([], offset)
    folder.mend()
    folder.emit("end", status="done")
    events, _ = folder.events(offset)
    assert [event.kind for event in events] == ["end"]
    assert all(json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())


def test_a_line_that_the_disk_had_no_room_for_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TrialFolder(tmp_path)
    folder.emit("start", attempt=1)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        with pytest.raises(OSError, match="No space left"):
            folder.emit("metrics", step=1)
    folder.emit("end", status="failed")
    assert [event.kind for event in folder.events()[0]] == ["start", "end"]


def test_an_attempt_that_goes_on_is_no_longer_kept_by_an_earlier_failure(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.fail("the disk was full")
    with folder.lease():
        folder.mend()
    assert folder.failure() is None


def test_looking_leaves_nothing(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    assert not folder.held() and list(tmp_path.iterdir()) == []


def _hold(path: Path, ready: Connection) -> None:
    with TrialFolder(path).lease():
        ready.send(True)
        signal.pause()


def test_a_lease_is_exclusive_and_ends_with_its_process(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path, theirs))
    holder.start()
    assert ours.recv()
    folder = TrialFolder(tmp_path)
    assert folder.held()
    with pytest.raises(Busy), folder.lease():
        pass
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert not folder.held()
    with folder.lease():
        assert folder.held()
