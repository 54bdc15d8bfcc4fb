"""The store: files whole or not at all, leases, journals that survive being cut."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vitlab.result import Circumstances, Measurement, Outcome, Result
from vitlab.store import (
    Store,
    TrialFolder,
    read_json,
    temporary,
    write_bytes,
    write_json,
)


def result() -> Result:
    history = (Measurement(1, 0.5, 8, {"val/accuracy": 0.1 + 0.2}), Measurement(2, 1.0, 16, {"val/loss": float("nan")}))
    outcome = Outcome({"val/accuracy": 1 / 3}, history, "abc", 2, 16)
    circumstances = Circumstances(1.5, 2.5, "here", 1, 10, 20, 30, {"torch": "2"}, {"threads": 1}, 4.0)
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


def test_a_write_for_which_there_is_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes(tmp_path / "x", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(tmp_path / "x", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_bytes() == b"old"


def test_a_result_is_written_once_all_else_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, settled = TrialFolder(tmp_path), list[tuple[str, bool]]()
    for file in (folder.spec, folder.weights, folder.predictions):
        write_bytes(file, b"x", settled=False)

    def note(descriptor: int) -> None:
        settled.append((Path(f"/proc/self/fd/{descriptor}").readlink().name.strip(".")[:6], folder.done()))

    monkeypatch.setattr(os, "fsync", note)
    folder.finish(result())
    assert sorted(settled[:3]) == [("predic", False), ("spec.j", False), ("weight", False)]
    assert settled[3:] == [("result", False)] and folder.done()


def test_writers_with_one_process_number_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, or two containers: in each the first process has the number 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    texts = [bytes([letter]) * 100_000 for letter in b"abcdefgh"]
    with ThreadPoolExecutor(len(texts)) as threads:
        for _ in range(10):
            list(threads.map(lambda text: write_bytes(tmp_path / "x", text), texts))
            assert (tmp_path / "x").read_bytes() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_writer_left_half_done_goes(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    for path in (folder.weights, folder.predictions, tmp_path / "result.json"):
        temporary(path).touch()
    folder.mend()
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_of_a_trial_that_has_ended_goes_unless_somebody_trains_it_again(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    write_bytes(folder.checkpoint / "last.safetensors", b"")
    folder.tidy()
    assert folder.checkpoint.exists()
    folder.finish(result())
    with folder.lease():
        folder.tidy()
        assert folder.checkpoint.exists()
    folder.tidy()
    assert not folder.checkpoint.exists()


def test_a_line_that_the_disk_has_damaged_is_passed_over(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.emit("start", attempt=1)
    for damage in (b"\0\0\0\0\n", b'{"t": 1, "ki\n', b"[]\n", b"\xff\n"):
        with open(tmp_path / "events.jsonl", "ab") as journal:
            journal.write(damage)
    folder.emit("end", status="done")
    assert [event.kind for event in folder.events()[0]] == ["start", "end"]


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
