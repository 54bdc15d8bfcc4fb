"""Tests of running a finished study again: it is planned, and what is stored is printed, unless anything differs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slot_fixtures
import yaml
from test_datasets import small_cifar

import vitlab
from vitlab import report
from vitlab.data.datasets.cifar import CIFAR10
from vitlab.driver import scheduler
from vitlab.errors import UserError
from vitlab.lab import Answer
from vitlab.report import report as making
from vitlab.trackers import tracker
from vitlab.trackers.replay import Cursor, Replay, TrialUpdate

pytestmark = pytest.mark.usefixtures("no_figures")

DATA = {"type": "synthetic", "image_size": 8, "train_images": 64, "test_images": 16, "validation": 0.25}
STUDY = {
    "study": "stored",
    "base": {
        "data": DATA,
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 1, "batch_size": 16},
    },
    "design": {"one_at_a_time": {"model.heads": [1]}},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": "none"},
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "stored.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **changes}))
    return file


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a study that was run once."""
    folder = tmp_path_factory.mktemp("once")
    vitlab.run(write(folder), out=folder / "out")
    return folder


@pytest.fixture
def finished(once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a copy of that folder; the report then belongs to the folder of the copy."""
    shutil.copytree(once, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    run()
    return tmp_path / "copy"


def run(**options: Any) -> tuple[Answer, str]:
    """Run the study and return its answer and what is printed."""
    printed: list[str] = []
    answer = vitlab.run(
        "stored.yaml", out="out", on_report=lambda render: printed.append(str(render("terminal"))), **options
    )
    return answer, printed[0]


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the time and content of every file but locks."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.endswith("lock")]
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def test_finished_study_writes_nothing_and_shows_its_report(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(finished)
    for owner, name in ((report, "collect_report"), (report, "write"), (scheduler.Schedule, "for_trials")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("a finished study needs none of these"))
    answer, printed = run()
    assert (answer.trained, answer.cached, answer.failed) == (0, 4, 0)
    assert state(finished) == before
    monkeypatch.undo()
    assert printed == report.render(answer.plan, answer.store, "terminal")


def table(printed: str) -> list[str]:
    """Return the names and means of arms."""
    return [line[:35] for line in printed.splitlines() if line.startswith((" baseline", " heads=1"))]


def edit_result(folder: Path) -> None:
    (file, *_) = folder.glob("out/trials/*/*/result.json")
    result = json.loads(file.read_text())
    result["outcome"]["metrics"]["val/accuracy"] = 0.125
    file.write_text(json.dumps(result))


CHANGES: dict[str, Callable[[Path], object]] = {
    "comment in the study": lambda folder: (folder / "stored.yaml").open("a").write("# why not\n"),
    "page deleted": lambda folder: (folder / "out/studies/stored/report/report.html").unlink(),
    "table deleted": lambda folder: (folder / "out/studies/stored/report/results.parquet").unlink(),
    "report damaged": lambda folder: (folder / "out/studies/stored/report/report.json").write_text("{"),
    "result changed": edit_result,
    "run.json deleted": lambda folder: (folder / "out/studies/stored/run.json").unlink(),
    "plan damaged": lambda folder: (folder / "out/studies/stored/plan.json").write_text("{}"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_report_is_made_anew_after_a_change(change: Callable[[Path], object], finished: Path) -> None:
    _, before = run()
    change(finished)
    answer, printed = run()
    assert answer.trained == 0
    assert printed == report.render(answer.plan, answer.store, "terminal")
    assert ("val/accuracy" in printed) and (table(printed) != table(before)) == (change is edit_result)
    assert report.is_current(answer.plan, answer.store) and answer.report.is_file()


def test_report_is_made_anew_by_other_code(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, _ = run()
    assert report.is_current(answer.plan, answer.store)
    monkeypatch.setattr(making, "_report_code_digest", lambda: "other")
    assert not report.is_current(answer.plan, answer.store)
    for name in ("report", "comparison", "statistics"):
        assert name in making.PACKAGES


def test_corrupted_images_of_cifar_that_change_are_noticed(tmp_path: Path) -> None:
    """The arrays of CIFAR-10-C are in another folder than the batches."""
    (tmp_path / "data").mkdir()
    (tmp_path / "c").mkdir()
    small_cifar(tmp_path / "data", CIFAR10)
    labels = np.tile(np.arange(10, dtype=np.uint8), 5)
    fog = np.random.default_rng(0).integers(0, 256, (50, 32, 32, 3), np.uint8)
    np.save(tmp_path / "c" / "fog.npy", fog)
    np.save(tmp_path / "c" / "labels.npy", labels)
    data = {"type": "cifar10", "root": str(tmp_path / "data"), "corrupted_root": str(tmp_path / "c"), "validation": 0.5}
    data |= {"corrupted": ["fog"]}
    file = write(tmp_path, base={**STUDY["base"], "data": data}, design=None, seeds=1)  # type: ignore[dict-item]
    counts = []
    for _ in range(2):
        answer = vitlab.run(file, out=tmp_path / "out")
        counts.append((answer.trained, answer.cached))
    np.save(tmp_path / "c" / "fog.npy", np.concatenate([fog, fog]))
    np.save(tmp_path / "c" / "labels.npy", np.concatenate([labels, labels]))
    answer = vitlab.run(file, out=tmp_path / "out")
    counts.append((answer.trained, answer.cached))
    assert counts == [(1, 0), (0, 1), (1, 0)]
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(UserError, match="there is no folder"):
        vitlab.run(file, out=tmp_path / "out")


class Noted(Replay):
    """Tracker that keeps nothing, and counts its deliveries."""

    title = "Noted"
    deliveries = 0
    where = "here"
    has_address = True

    def place(self) -> str:
        return self.where

    def deliver(self, *, final: bool, report: Sequence[Path]) -> str | None:
        type(self).deliveries += 1
        return super().deliver(final=final, report=report)

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        return 1

    def write_study(self, report: Sequence[Path]) -> str | None:
        assert any(file.name == "report.html" for file in report)
        return f"noted://{self.where}" if self.has_address else None


@pytest.mark.slow
def test_delivery_is_judged_by_its_record(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, tracker)
    tracker.register("noted")(Noted)
    write(finished, run={"executor": "inline", "tracker": "noted"})

    def delivered() -> bool:
        Noted.deliveries = 0
        answer, _ = run()
        assert answer.link == (f"noted://{Noted.where}" if Noted.has_address else "") and answer.tracker == "Noted"
        return Noted.deliveries > 0

    assert delivered() and not delivered() and not delivered()
    (finished / "out/studies/stored/noted-offsets.json").unlink()
    assert delivered() and not delivered()
    (finished / "out/studies/stored/delivered.json").unlink()
    assert delivered() and not delivered()
    monkeypatch.setattr(Noted, "where", "elsewhere")
    assert delivered() and not delivered()
    monkeypatch.setattr(Noted, "where", "here")
    assert not delivered(), "each place has the report"
    monkeypatch.setattr(Noted, "where", "there")
    monkeypatch.setattr(Noted, "has_address", False)
    assert delivered() and not delivered()


@pytest.mark.slow
def test_finished_study_imports_neither_pandas_nor_a_tracker(finished: Path) -> None:
    heavy = ("mlflow", "pandas", "matplotlib", "scipy.stats")
    code = (
        "from vitlab.cli import cli; cli.main(['run', 'stored.yaml', '--out', 'out'], standalone_mode=False); "
        f"import sys; print('HEAVY', [name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, sentence, _, last = done.stdout.splitlines()
    assert (sentence, last) == ("0 trained, 4 cached from earlier runs.", "HEAVY []")
    assert done.stderr.splitlines()[0] == "reading stored.yaml"
