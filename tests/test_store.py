"""Tests of the store: complete or no files, locks, and truncated journals."""

import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import synthetic_studies

from vitlab.errors import UserError
from vitlab.planning.study_folder import read_plan, write_registered_plan
from vitlab.store.files import find_abandoned_files, read_json, remove, temporary_path, write_bytes, write_json
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.result import Circumstances, Ending, Measurement, Outcome, TrialResult


def result() -> TrialResult:
    history = (Measurement(1, 0.5, 8, {"val/accuracy": 0.1 + 0.2}), Measurement(2, 1.0, 16, {"val/loss": float("nan")}))
    outcome = Outcome({"val/accuracy": 1 / 3}, history, "abc", 2, 16)
    circumstances = Circumstances(1.5, 2.5, "here", 1, 10, 20, 30, {"torch": "2"}, {"threads": 1}, 4.0)
    return TrialResult("key", "code", Ending.DONE, outcome, circumstances)


def test_result_round_trips_bitwise(tmp_path: Path) -> None:
    folder = Store(tmp_path).trial("key", "code")
    assert folder.result() is None and not folder.done()
    folder.write_result(result())
    back = folder.result()
    assert back is not None and repr(back) == repr(result()) and folder.done()


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert read_json(file) == {"a": 1} and [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_write_without_disk_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes(tmp_path / "x", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(tmp_path / "x", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_bytes() == b"old"


def test_result_is_written_after_everything_else_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = TrialFolder(tmp_path), list[tuple[str, bool]]()
    for file in (folder.spec, folder.weights_file, folder.predictions):
        write_bytes(file, b"x", fsync=False)

    def note(descriptor: int) -> None:
        calls.append((Path(f"/proc/self/fd/{descriptor}").readlink().name.strip(".")[:6], folder.done()))

    monkeypatch.setattr(os, "fsync", note)
    folder.write_result(result())
    assert sorted(calls[:3]) == [("predic", False), ("spec.j", False), ("weight", False)]
    assert calls[3:] == [("result", False)] and folder.done()


def test_writers_with_equal_pid_use_different_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two threads or containers, the first process may have the number 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    texts = [bytes([letter]) * 100_000 for letter in b"abcdefgh"]
    with ThreadPoolExecutor(len(texts)) as threads:
        for _ in range(10):
            list(threads.map(lambda text: write_bytes(tmp_path / "x", text), texts))
            assert (tmp_path / "x").read_bytes() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_leftovers_of_killed_writer_are_deleted(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    for path in (folder.weights_file, folder.predictions, tmp_path / "result.json"):
        temporary_path(path).touch()
    folder.prepare_for_attempt()
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_of_finished_trial_is_deleted_unless_in_use(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    write_bytes(folder.checkpoint / "last.safetensors", b"")
    folder.remove_checkpoint_and_restore_spec()
    assert folder.checkpoint.exists()
    folder.write_result(result())
    with folder.lease():
        folder.remove_checkpoint_and_restore_spec()
        assert folder.checkpoint.exists()
    folder.remove_checkpoint_and_restore_spec()
    assert not folder.checkpoint.exists()


def test_damaged_journal_line_is_skipped(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.emit("start", attempt=1)
    for damage in (b"\0\0\0\0\n", b'{"t": 1, "ki\n', b"[]\n", b"\xff\n"):
        with open(tmp_path / "events.jsonl", "ab") as journal:
            journal.write(damage)
    folder.emit("end", status="done")
    assert [event.kind for event in folder.events()[0]] == ["start", "end"]


def test_torn_journal_line_is_completed(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.emit("start", attempt=1)
    folder.emit("metrics", step=1, epoch=0.5, metrics={"a": 1.0})
    with open(tmp_path / "events.jsonl", "a") as journal:
        journal.write('{"t": 1, "kind": "met')
    events, offset = folder.events()
    assert [event.kind for event in events] == ["start", "metrics"]
    assert folder.events(offset) == ([], offset)
    folder.prepare_for_attempt()
    folder.emit("end", status="done")
    events, _ = folder.events(offset)
    assert [event.kind for event in events] == ["end"]
    assert all(json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())


def test_failed_journal_write_leaves_journal_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TrialFolder(tmp_path)
    folder.emit("start", attempt=1)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        with pytest.raises(OSError, match="No space left"):
            folder.emit("metrics", step=1)
    folder.emit("end", status="failed")
    assert [event.kind for event in folder.events()[0]] == ["start", "end"]


def test_resumed_attempt_clears_earlier_failure(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.write_failure("the disk was full")
    with folder.lease():
        folder.prepare_for_attempt()
    assert folder.failure() is None


# -- damage -----------------------------------------------------------------------------------------------------------


def damaged(file: Path, damage: str) -> None:
    """Damage a stored JSON file as disks, editors and killed programs do."""
    data = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
        return
    file.write_bytes(
        {
            "empty": b"",
            "cut": data[: len(data) // 2],
            "no text": b"\xff\xfe" + data,
            "zeros": bytes(len(data)),
            "list": b"[1, 2]",
            "number": b"7",
            "foreign": b'{"name": "app", "version": 3}',
            "deep": b"[" * 100_000,
            "surrogate": data.replace(b'"here"', b'"\\ud800"').replace(b'"because"', b'"\\ud800"'),
        }[damage]
    )


DAMAGES = ["folder", "empty", "cut", "no text", "zeros", "list", "number", "foreign", "deep", "surrogate"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_result_counts_as_absent_and_is_renamed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Store(tmp_path).trial("key", "code")
    folder.write_result(result())
    assert folder.done()
    file = folder.path / "result.json"
    damaged(file, damage)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert folder.result() is None and not folder.done()
    (record,) = caplog.records
    assert str(file) in record.getMessage() and "\n" not in record.getMessage()
    assert ("nested too deeply" in record.getMessage()) == (damage == "deep")
    assert file.exists(), "reading moves nothing"
    with folder.lease():
        folder.prepare_for_attempt()
    (aside,) = folder.path.glob("result.json.damaged-*")
    assert not file.exists() and aside.is_dir() == (damage == "folder")
    folder.write_result(result())
    assert folder.done() and aside.exists()


def test_result_with_wrong_types_is_damaged(tmp_path: Path) -> None:
    folder = Store(tmp_path).trial("key", "code")
    file = folder.path / "result.json"
    whole = asdict(result())
    for changed in (
        {**whole, "outcome": {**whole["outcome"], "steps": "2"}},
        {**whole, "outcome": {**whole["outcome"], "steps": 2.5}},
        {**whole, "outcome": {**whole["outcome"], "metrics": {"val/accuracy": "0.5"}}},
        {**whole, "outcome": {**whole["outcome"], "metrics": {"val/accuracy": True}}},
        {**whole, "outcome": {**whole["outcome"], "history": [1]}},
        {**whole, "outcome": {name: value for name, value in whole["outcome"].items() if name != "weights"}},
        {**whole, "circumstances": {**whole["circumstances"], "wall_s": float("nan")}},
        {**whole, "circumstances": {**whole["circumstances"], "params": float("inf")}},
        {**whole, "circumstances": {**whole["circumstances"], "started": 1e300}},
        {**whole, "circumstances": {**whole["circumstances"], "numerics": {"threads": "one"}}},
        {**whole, "status": "fine"},
        {**whole, "key": "another"},
    ):
        write_json(file, changed)
        assert folder.result() is None, changed
    write_json(file, whole)
    assert repr(folder.result()) == repr(result())


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_failure_does_not_block_trial(tmp_path: Path, damage: str) -> None:
    folder = TrialFolder(tmp_path)
    folder.mark_failed("because", "error")
    assert folder.has_failed_for_good() and folder.failure().failure == "because"
    damaged(tmp_path / "failure.json", damage)
    assert not folder.has_failed_for_good() and folder.failure() is None
    folder.prepare_for_attempt()
    assert len(list(tmp_path.glob("failure.json.damaged-*"))) == 1
    folder.write_failure("again")
    assert folder.failure().failure == "again"


@pytest.mark.parametrize("damage", DAMAGES[:-1])
def test_damaged_file_is_renamed_before_rewrite(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "changes.json"
    write_json(file, {"seeds": 3})
    damaged(file, damage)
    assert read_json(file, lambda data: data["seeds"]) is None
    write_json(file, {"seeds": 4})
    assert read_json(file) == {"seeds": 4}
    assert len(list(tmp_path.glob("changes.json.damaged-*"))) == 1


def test_folder_in_place_of_journal_or_checkpoint_is_renamed(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    (tmp_path / "events.jsonl").mkdir()
    folder.checkpoint.write_bytes(b"no folder")
    assert folder.events() == ([], 0)
    folder.prepare_for_attempt()
    folder.emit("start", attempt=1)
    assert [event.kind for event in folder.events()[0]] == ["start"]
    names = sorted(path.name.partition(".damaged-")[0] for path in tmp_path.iterdir())
    assert names == ["checkpoint", "events.jsonl", "events.jsonl"] and not folder.checkpoint.exists()


def test_folder_in_place_of_lock_is_refused(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    (folder.lock / "content").mkdir(parents=True)
    with pytest.raises(UserError, match=r"lock cannot be written \(Is a directory\), .*; delete it$"), folder.lease():
        pass
    assert (folder.lock / "content").is_dir() and not folder.is_locked()


def test_journal_lines_with_wrong_types_are_skipped(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.emit("metrics", step=1, epoch=0.5, metrics={"a": 1.0})
    for line in (
        {"t": "1", "kind": "metrics", "step": 1, "epoch": 0.5, "metrics": {}},
        {"t": 1e400, "kind": "start"},
        {"t": 1, "kind": ["start"]},
        {"t": 1, "kind": "metrics", "step": "1", "epoch": 0.5, "metrics": {}},
        {"t": 1, "kind": "metrics", "step": 1, "epoch": 0.5},
        {"t": 1, "kind": "metrics", "step": 1, "epoch": 0.5, "metrics": {"a": None}},
        {"t": 1, "kind": "metrics", "step": 1, "epoch": float("nan"), "metrics": {}},
    ):
        with open(tmp_path / "events.jsonl", "a") as journal:
            journal.write(json.dumps(line) + "\n")
    assert [event.body["step"] for event in folder.events()[0]] == [1]


def test_damaged_plan_names_no_folder_outside_store(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path)
    file = store.study(plan.study) / "plan.json"
    whole = json.loads(file.read_text())
    assert read_plan(file) == plan
    for changed in (
        {**whole, "study": "../../elsewhere"},
        {**whole, "version": "../../elsewhere"},
        {**whole, "trials": [{**whole["trials"][0], "key": "../../.."}, *whole["trials"][1:]]},
        {**whole, "trials": [{**whole["trials"][0], "code": "a/b"}, *whole["trials"][1:]]},
        {**whole, "trials": [{**whole["trials"][0], "needs": {"teacher": "../../x"}}, *whole["trials"][1:]]},
        {**whole, "trials": [{**whole["trials"][0], "seed": "zero"}, *whole["trials"][1:]]},
        {**whole, "arms": whole["arms"][1:]},
        {name: value for name, value in whole.items() if name != "specs"},
    ):
        file.write_text(json.dumps(changed))
        with pytest.raises(UserError, match="is damaged or in another format"):
            read_plan(file)


@pytest.mark.parametrize("damage", [{"alpha": None}, {"alpha": "much"}, {"metric": 3}, {"looks": "ten"}, "goal"])
def test_registration_with_missing_or_wrong_value_is_damaged(tmp_path: Path, damage: Mapping[str, Any] | str) -> None:
    plan, store = synthetic_studies.study(tmp_path)
    file = store.study(plan.study) / "plan.json"
    write_registered_plan(plan, store)
    stored = json.loads(file.read_text())
    assert json.loads(json.dumps(asdict(read_plan(file).registered))) == stored["registered"]
    if isinstance(damage, str):
        del stored["registered"][damage]
    else:
        stored["registered"] |= damage
    file.write_text(json.dumps(stored))
    with pytest.raises(UserError, match="is damaged or in another format"):
        read_plan(file)


def test_truncated_weights_are_unusable(tmp_path: Path) -> None:
    from safetensors.numpy import save

    folder = TrialFolder(tmp_path)
    folder.write_result(result())
    write_json(folder.spec, {})
    assert not folder.has_weights()
    data = save({"a": __import__("numpy").zeros(100)}, {"vitlab": "{}"})
    for content, expected in ((data, True), (data[:-1], False), (b"", False), (b"{}", False), (data, True)):
        write_bytes(folder.weights_file, content)
        assert folder.has_weights() == expected
    folder.weights_file.unlink()
    folder.weights_file.mkdir()
    assert not folder.has_weights()


# -- killed processes -------------------------------------------------------------------------------------------------


def test_old_temporary_file_is_abandoned(tmp_path: Path) -> None:
    written, killed = temporary_path(tmp_path / "plan.json"), temporary_path(tmp_path / "mlflow.db")
    journal = killed.with_name(f"{killed.name}-journal")
    others = [tmp_path / name for name in (".hidden", ".mlflow.lock", ".notes.1", "plan.json")]
    for file in (written, killed, journal, *others):
        file.touch()
        os.utime(file, (0, 0))
    os.utime(written)
    assert find_abandoned_files(tmp_path) == sorted([killed, journal])


def test_clear_deletes_only_leftovers_of_killed_drivers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    report = store.study("tiny") / "report"
    report.mkdir(parents=True)
    leftovers = [folder / ".x.json.0123456789abcdef" for folder in (tmp_path, store.study("tiny"), report)]
    to_keep = [store.study("tiny") / "plan.json", report / "report.html", temporary_path(report / "report.html")]
    for file in (*leftovers, *to_keep):
        file.touch()
    for file in (*leftovers, *to_keep[:2]):
        os.utime(file, (0, 0))
    assert store.find_leftover_files() == sorted(leftovers)
    for file in store.find_leftover_files():
        remove(file)
    assert [file.exists() for file in leftovers] == [False] * 3 and all(file.exists() for file in to_keep)
