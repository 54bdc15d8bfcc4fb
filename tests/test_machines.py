"""Tests of machines without POSIX: commands where it is hidden, workers that are spawned, locks that are heartbeats."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic_studies
import warm
from job_helpers import ends, job

from vitlab import report
from vitlab.executors import machine
from vitlab.executors.local import Local
from vitlab.runner import fork_server
from vitlab.spec import RunSpec
from vitlab.store import locks
from vitlab.store.result import Ending

HERE = Path(__file__).parent


def without_posix(*commands: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    words = [word for command in commands for word in ("--then", *command)][1:]
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); sys.argv[1:] = {words!r}"
    return warm.python(f"{code}; import without_posix; without_posix.main()", folder, os.environ)


@pytest.mark.slow
def test_commands_that_train_nothing_run_without_posix(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(
        tmp_path / "out", {"baseline": [0.9, 0.8, 0.85], "position=none": [0.7, 0.6, 0.65]}
    )
    report.write(report.collect_report(plan, store), store.study(plan.study) / "report")
    (tmp_path / "r.csv").write_text(
        "arm,seed,acc\n" + "".join(f"{arm},{seed},0.{8 + seed}\n" for arm in "ab" for seed in (0, 1))
    )
    out = ["--out", str(store.root)]
    done = without_posix(
        ["validate", "quickstart"], ["list", "position"], ["show", "position", "rope2d"], ["plan", "quickstart", *out],
        ["judge", "r.csv", "--metric", "acc", "--arm", "arm"], ["report", plan.study, *out], ["status", plan.study, *out],
        folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in (
        "3 arms, 24 trials",
        "rope2d",
        "theta",
        "batch_last",
        "acc: higher is better",
        "below baseline",
        "done",
    ):
        assert words in done.stdout, words


def test_hidden_names_are_hidden(tmp_path: Path) -> None:
    """A control: a plugin whose module is called as vitlab's are sees what Windows has."""
    (tmp_path / "vitlab_probe.py").write_text(
        "import os, signal\nassert not hasattr(os, 'fork') and not hasattr(signal, 'SIGKILL')\n"
        "try:\n    import fcntl\nexcept ImportError:\n    print('hidden')\n"
    )
    code = "import without_posix; without_posix.hide(); import vitlab_probe; import numpy; print(os.uname()[0])"
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", f"import os; {code}"], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["hidden", "Linux"], done.stderr


@pytest.mark.slow
def test_workers_are_spawned_where_there_is_no_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    executor = Local(RunSpec(device="cpu", workers=2))
    Local.prepare()
    assert fork_server._multiprocessing_context().get_start_method() == "spawn"
    jobs = [job(tmp_path, "finish"), job(tmp_path, "finish", name="again")]
    for each in jobs:
        executor.submit(each)
    found = {key: end.ending for key, end in ends(executor, len(jobs)).items()}
    assert found == {"finish": Ending.DONE, "again": Ending.DONE}


def test_trials_are_locked_where_there_is_no_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # type: ignore[arg-type]
    file = tmp_path / "trial.lock"
    with locks.hold_lock(file):
        assert locks.is_locked(file)
        with pytest.raises(locks.Busy), locks.hold_lock(file):
            pass
        locks.raise_if_lock_lost(file)
    assert not locks.is_locked(file)


def test_plan_on_a_mac_says_that_its_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.notes_on_unused_mps("auto") == []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    (note,) = machine.notes_on_unused_mps("auto")
    assert "mps" in note and not machine.notes_on_unused_mps("cpu") and not machine.notes_on_unused_mps("mps")
