"""Tests of full and read-only disks, at the start and during a run: one sentence, and results are kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import yaml
from fuzz_store import STUDY
from test_cli import call

from vitlab.data.datasets.files import read_or_compute
from vitlab.store.folders import Store, TrialFolder
from vitlab.trackers import service

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.mark.parametrize(
    ("writes", "number"),
    [(0, errno.ENOSPC), (1, errno.EROFS), (12, errno.ENOSPC), (20, errno.EROFS)],
)
def test_full_disk_ends_run_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, number: int
) -> None:
    file, out = tmp_path / "tiny.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(STUDY))
    budget, fsync = [writes], os.fsync

    def full(descriptor: int) -> None:
        budget[0] -= 1
        if budget[0] < 0:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        code, _, err = call("run", file, "--out", out, "--json")
    assert code in (2, 4) and "Traceback" not in err, err
    assert os.strerror(number).lower() in err.splitlines()[-1].lower() and str(out) in err.splitlines()[-1], err
    before = {path: path.read_bytes() for path in out.glob("trials/*/*/result.json")}
    assert not [path for path in out.rglob(".*") if path.is_file() and path.name.count(".") > 2], "half a file"
    code, _, err = call("run", file, "--out", out, "--json", "--retry-failed")
    assert code == 0, err
    assert len(list(out.glob("trials/*/*/result.json"))) == 4
    assert all(path.read_bytes() == content for path, content in before.items())


def _refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_note_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_or_compute(tmp_path / "notes" / "mean", lambda: "0.5") == "0.5"
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mean"]
    monkeypatch.setattr(os, "replace", _refuse)
    assert read_or_compute(tmp_path / "notes" / "std", lambda: "0.2") == "0.2"
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mean"]


def test_database_that_cannot_be_created_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(database: Path) -> None:
        for suffix in ("", "-journal"):
            database.with_name(database.name + suffix).write_bytes(b"half")
        _refuse()

    monkeypatch.setattr(service, "create_tables", fail)
    with pytest.raises(OSError, match="No space"):
        service.initialise_database(tmp_path / "mlflow.db")
    assert {path.name for path in tmp_path.iterdir()} <= {".mlflow.db.lock"}


@pytest.mark.slow
def test_finished_study_is_reported_from_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = tmp_path / "tiny.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(STUDY))
    assert call("run", file, "--out", out, "--json")[0] == 0
    store = Store(out)
    (damaged, *_) = sorted(out.glob("trials/*/*/result.json"))
    damaged.write_bytes(b"")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as disk:
        for name in ("replace", "rename", "fsync", "mkdir", "unlink"):
            disk.setattr(os, name, refuse)
        for words in (
            ["report", "tiny"],
            ["report", "tiny", "--format", "csv"],
            ["status", "tiny"],
        ):
            code, printed, err = call(*words, "--out", out)
            assert code == 0 and printed, (words, err)
    assert damaged.read_bytes() == b""
    code, _, err = call("run", file, "--out", out, "--json")
    assert code == 0 and TrialFolder(damaged.parent).done(), err
    (aside,) = damaged.parent.glob("result.json.damaged-*")
    assert store.find_leftover_files() == [aside]
    assert str(aside) in call("gc", "--out", out)[1].splitlines() and aside.exists()
    call("gc", "--out", out, "--yes")
    assert not aside.exists() and damaged.exists()
