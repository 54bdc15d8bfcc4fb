"""Tests of mirrors: files of a remote trial folder arrive in an order that may be interrupted."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from vitlab.errors import VitlabError
from vitlab.executors import Job, JobTrial, Settings
from vitlab.executors.task import FileChange, FileSender, apply_file_change, list_input_files, relocate_job
from vitlab.planning.values import Trial
from vitlab.spec import Choice, TrainSpec, TrialSpec
from vitlab.store.files import write_bytes
from vitlab.store.folders import Store, TrialFolder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_and_mirror_stay_equal(tmp_path: Path) -> None:
    """For any writes, and reads at any time, both folders are finally equal."""
    dice = random.Random(0)
    for round_ in range(20):
        there, here = TrialFolder(tmp_path / f"there{round_}"), TrialFolder(tmp_path / f"here{round_}")
        for folder in (there, here):  # as left by an earlier attempt
            folder.path.mkdir()
            write_bytes(folder.checkpoint / "last.safetensors", b"old")
        sender = FileSender([there.path])
        for step in range(12):
            match dice.randrange(5):
                case 0:
                    there.emit("metrics", step=step)
                case 1:
                    write_bytes(there.checkpoint / "last.safetensors", dice.randbytes(dice.choice([0, 1, 64, 300])))
                case 2:
                    write_bytes(there.weights_file, dice.randbytes(dice.choice([128, 129])))
                case 3:
                    shutil.rmtree(there.checkpoint, ignore_errors=True)
                case 4:
                    there.write_failure("no") if step % 2 else (there.path / "failure.json").unlink(missing_ok=True)
            if dice.random() < 0.5:
                for change in sender.read_changes():
                    apply_file_change(change, [here.path])
        (there.path / "log.txt").write_text("said, and not ended by a line")
        write_bytes(there.path / "result.json", b"{}")
        for change in sender.read_changes():
            assert change.place != (0, "result.json")
            apply_file_change(change, [here.path])
        last = list(sender.read_changes(ended=True))
        assert last[-1].place == (0, "result.json")
        for change in last:
            apply_file_change(change, [here.path])
        assert content(here.path) == content(there.path) and list(sender.read_changes(ended=True)) == []
        assert here.checkpoint.exists() == (here.checkpoint / "last.safetensors").exists()


def test_checkpoint_arrives_after_its_journal(tmp_path: Path) -> None:
    there = TrialFolder(tmp_path)
    sender = FileSender([tmp_path])
    there.emit("metrics", step=1)
    write_bytes(there.checkpoint / "last.safetensors", b"step 1")
    changes = sender.read_changes()
    first = next(changes)
    # Written during the transfer: they belong to the next call.
    there.emit("metrics", step=2)
    write_bytes(there.checkpoint / "last.safetensors", b"step 2")
    (second,) = changes
    assert first.place == (0, "events.jsonl")
    assert b'"step": 1' in (first.data or b"") and b'"step": 2' not in (first.data or b"")
    assert second.data == b"step 1"
    third, fourth = sender.read_changes()
    assert b'"step": 2' in (third.data or b"") and fourth.data == b"step 2"
    assert list(sender.read_changes()) == []


SPEC = TrialSpec(data=Choice("digits"), model=Choice("vit"), train=TrainSpec(steps=1))


@pytest.mark.parametrize("path", ["../../elsewhere", "/etc/passwd", "checkpoint/../../x"])
def test_worker_cannot_write_outside_its_folder(path: str, tmp_path: Path) -> None:
    with pytest.raises(VitlabError, match="not in its trial's folder"):
        apply_file_change(FileChange((0, path), b"x"), [tmp_path / "a" / "b"])


def test_input_files_are_copied_to_expected_paths(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    plugin = tmp_path / "blocks.py"
    plugin.write_text("")

    def trial(key: str, **needs: str) -> Trial:
        return Trial(spec=SPEC, seeds={}, origins=(), data=None, key=key, code="c", needs=needs)

    teacher = store.trial("teacher", "c")
    for path in (
        teacher.spec,
        teacher.weights_file,
        teacher.path / "result.json",
        teacher.predictions,
        teacher.path / "lock",
    ):
        write_bytes(path, path.name.encode())
    one, two = store.trial("one", "c"), store.trial("two", "c")
    for path in (
        one.checkpoint / "last.safetensors",
        one.path / "events.jsonl",
        one.path / "log.txt",
        one.path / ".half",
    ):
        write_bytes(path, b"")
    job = Job(
        (
            JobTrial("a/s0", one.path, trial("one", teacher="teacher/c")),
            JobTrial("a/s1", two.path, trial("two", teacher="teacher/c")),
        ),
        Settings(plugins=(str(plugin),), engine="vmap"),
    )
    files = dict(list_input_files(job))
    assert sorted(files) == [
        "plugins/0/blocks.py",
        "trials/one/c/checkpoint/last.safetensors",
        "trials/one/c/events.jsonl",
        "trials/one/c/log.txt",
        "trials/teacher/c/result.json",
        "trials/teacher/c/spec.json",
        "trials/teacher/c/weights.safetensors",
    ]
    there = relocate_job(job, tmp_path / "scratch")
    assert there.folders == [tmp_path / "scratch/trials/one/c", tmp_path / "scratch/trials/two/c"]
    assert there.settings.plugins == (str(tmp_path / "scratch/plugins/0/blocks.py"),)
    assert [item.trial for item in there.trials] == [item.trial for item in job.trials]
