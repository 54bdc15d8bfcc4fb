"""Tests of failures: the ending of an attempt, and run.retries, on_oom and abort_study."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import job_helpers
import pytest
from pydantic import ValidationError

from vitlab.driver.scheduler import Schedule
from vitlab.driver.session import Session, Watch
from vitlab.errors import Refused, TrialFailed
from vitlab.executors import Executor, Job, JobEnd, worker
from vitlab.planning.values import Planned
from vitlab.runner.job import TrialEnd
from vitlab.spec import RunSpec
from vitlab.store.files import read_json
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.result import Ending


def job(root: Path, name: str, **spec: Any) -> Job:
    return job_helpers.with_settings(job_helpers.job(root, name, **spec), device="auto")


class Scripted(Executor):
    """Executor that ends each trial by a script, one after the other, and records its calls."""

    def __init__(self, run: RunSpec, scripts: dict[str, list[str]]) -> None:
        super().__init__(run)
        self.scripts = {name: deque(script) for name, script in scripts.items()}
        self.asked: list[Job] = []
        self.running: deque[Job] = deque()
        self.cancelled = False

    @property
    def slots(self) -> int:
        return 1

    def submit(self, job: Job) -> None:
        self.asked.append(job)
        self.running.append(job)

    def poll(self, timeout_s: float) -> list[JobEnd]:
        running, self.running = self.running, deque()
        endings = []
        for job in running:
            how: Any = self.scripts[job.trials[0].trial.key].popleft()
            if how == "done":
                job.folder.mkdir(parents=True, exist_ok=True)
                (job.folder / "result.json").write_text("{}")
            endings.append(JobEnd(job, how, "because"))
        return endings

    def cancel(self, grace_s: float) -> None:
        self.cancelled = True


class Ear(Watch):
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def on_end(self, planned: Planned, how: str, detail: str) -> None:
        self.heard.append((planned.arm, how))


def planned_of(work: Sequence[Any]) -> dict[Path, Planned]:
    return {item.folder: Planned(item.trial.key, 0, item.trial) for one in work for item in one.trials}


def drive(root: Path, scripts: dict[str, list[str]], **run: Any) -> tuple[int, Scripted, Ear]:
    executor, ear = Scripted(RunSpec(**run), scripts), Ear()
    work = [job(root, name) for name in scripts]
    schedule = Schedule(executor, planned_of(work), Session(Store(root), executor.run, watch=ear), work)
    schedule.run_jobs()
    return schedule.failed, executor, ear


@pytest.mark.parametrize(
    ("how", "retries", "attempts"),
    [
        ("lost", {}, 2),
        ("lost", 0, 1),
        ("lost", 3, 4),
        ("error", {}, 1),
        ("error", {"error": 2}, 3),
        ("timeout", {}, 1),
        ("timeout", {"timeout": 1}, 2),
        ("preempted", {"preempted": 2}, 3),
        ("oom", {}, 1),
        ("oom", {"oom": 1}, 2),
    ],
)
def test_failure_kinds_have_their_retries(how: str, retries: Any, attempts: int, tmp_path: Path) -> None:
    failed, executor, ear = drive(tmp_path, {"a": [how] * 9}, retries=retries)
    assert failed == 1
    assert len(executor.asked) == attempts
    assert [heard for _, heard in ear.heard] == [how] * (attempts - 1) + ["failed"]
    failure = read_json(job(tmp_path, "a").folder / "failure.json")
    assert failure["failure"] == "because" and failure["kind"] == how and failure["has_failed_for_good"]


def test_preempted_trial_is_retried_without_limit(tmp_path: Path) -> None:
    failed, executor, _ = drive(tmp_path, {"a": ["preempted"] * 20 + ["done"]}, retries=0)
    assert failed == 0 and len(executor.asked) == 21
    assert TrialFolder(job(tmp_path, "a").folder).failure() is None


def test_out_of_memory_gets_more_memory_then_cpu(tmp_path: Path) -> None:
    run: dict[str, Any] = {"resources": {"gpu": 0.25}, "retries": 0}
    failed, executor, _ = drive(tmp_path / "a", {"a": ["oom", "oom", "done"]}, **run)
    assert failed == 0 and [item.gpu for item in executor.asked] == [None, 0.5, 1.0]
    failed, executor, _ = drive(tmp_path / "b", {"a": ["oom"] * 9}, **run)
    assert failed == 1 and [item.gpu for item in executor.asked] == [None, 0.5, 1.0]
    failed, executor, _ = drive(tmp_path / "c", {"a": ["oom", "oom", "oom", "done"]}, on_oom="cpu", **run)
    assert failed == 0
    assert [(item.settings.device, item.gpu) for item in executor.asked] == [
        ("auto", None),
        ("auto", 0.5),
        ("auto", 1.0),
        ("cpu", None),
    ]


def test_study_with_failing_trials_is_given_up(tmp_path: Path) -> None:
    scripts = {name: ["done" if name in "ab" else "error"] for name in "abcdefghij"}
    abort = {"failed_fraction": 0.5, "min_finished": 3}
    with pytest.raises(TrialFailed, match="2 of the 4 trials that ended have failed"):
        drive(tmp_path / "a", scripts, abort_study=abort)
    failed, executor, _ = drive(tmp_path / "b", scripts)
    assert failed == 8 and len(executor.asked) == 10
    mostly = {name: ["error" if name == "a" else "done"] for name in "abcdefghij"}
    assert drive(tmp_path / "c", mostly, abort_study=abort)[0] == 1


def test_trial_stopped_by_another_driver_is_missing_not_failed(tmp_path: Path) -> None:
    failed, _, ear = drive(tmp_path, {"a": ["stopped"], "b": ["done"]})
    assert failed == 1 and ear.heard == [("a", "stopped"), ("b", "done")]
    assert TrialFolder(job(tmp_path, "a").folder).failure() is None


def test_full_disk_does_not_end_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrialFolder, "write_failure", full)
    failed, _, ear = drive(tmp_path, {"a": ["lost", "lost"], "b": ["done"]})
    assert failed == 1 and ("b", "done") in ear.heard


def test_changed_code_is_a_failure_that_the_next_run_retries(tmp_path: Path) -> None:
    executor = Scripted(RunSpec(), {"a": ["done"], "b": ["refused"], "c": ["done"]})
    work = [job(tmp_path, name) for name in "abc"]
    planned, ear = planned_of(work), Ear()
    with pytest.raises(Refused, match=r"\. Not trained: 2 trials; run the same command to plan again"):
        Schedule(executor, planned, Session(Store(tmp_path), executor.run, watch=ear), work).run_jobs()
    alone = Scripted(RunSpec(), {"b": ["refused"]})
    with pytest.raises(Refused, match="Not trained: 1 trial; run the same command"):
        Schedule(alone, planned_of(work[1:2]), Session(Store(tmp_path), alone.run), work[1:2]).run_jobs()
    assert ear.heard == [("a", "done"), ("b", "refused")]
    assert not executor.cancelled and [item.trials[0].trial.key for item in executor.asked] == ["a", "b"]
    a, b, c = (TrialFolder(item.folder).failure() for item in work)
    assert a is c is None and b is not None and b.kind == "refused" and b.failure and not b.has_failed_for_good


def test_attempt_records_its_facts(tmp_path: Path) -> None:
    def run_once(do: str, **limits: Any) -> tuple[str, str]:
        work = replace(job(tmp_path, do, **limits.pop("spec", {})), **limits)
        return worker.run_job(work, lambda: False)

    assert run_once("refuse")[0] == "refused"
    assert TrialFolder(job(tmp_path, "refuse").folder).failure() is None
    assert run_once("starve") == ("oom", "MemoryError: the host has none left")
    assert TrialFolder(job(tmp_path, "starve").folder).failure().kind == "oom"
    assert run_once("raise")[0] == "error"
    assert TrialFolder(job(tmp_path, "raise").folder).failure().kind == "error"
    how, why = run_once("train", timeout_s=0.05)
    assert how == "timeout" and "run.timeout allows (0.05 s)" in why
    assert (job(tmp_path, "train").folder / "checkpoint").is_dir()


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ([("done", ""), ("error", "the second"), ("oom", "the third")], ("error", "the second")),
        ([("done", ""), ("done", "the loss is not finite")], ("done", "")),
        ([("done", ""), ("stopped", ""), ("error", "the third")], ("stopped", "")),
    ],
)
def test_first_failed_trial_speaks_for_job_that_was_not_stopped(
    ends: list[tuple[str, str]], how: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_ends = [TrialEnd(Ending(ending), detail) for ending, detail in ends]
    monkeypatch.setattr(worker, "import_object", lambda *_: lambda *_: trial_ends)
    trials = tuple(job_helpers.job(tmp_path, "finish", f"k{number}").trials[0] for number in range(len(ends)))
    assert worker.run_job(Job(trials), lambda: False) == how


def test_first_step_is_reported_once(tmp_path: Path) -> None:
    for steps, stages in ((1, ["tries"]), (4, ["tries", "begun"])):
        announced: list[str] = []
        work = job(tmp_path, "step", steps=steps)
        (work.folder / "result.json").unlink(missing_ok=True)
        assert worker.run_job(work, lambda: False, announced.append)[0] == "done"
        assert announced == stages  # a single step has no further report; its end implies it


def test_retry_settings_of_study_file() -> None:
    run = RunSpec.model_validate({"resources": {"gpu": 0.25, "cpu": 2}, "retries": 2})
    assert (run.resources.gpu, run.retries.lost, run.retries.preempted) == (0.25, 2, "always")

    def refused(**run: Any) -> str:
        with pytest.raises(ValidationError) as caught:
            RunSpec.model_validate(run)
        return str(caught.value)

    assert "found gpu: 1.5; allowed: a share of one GPU" in refused(resources={"gpu": 1.5})
    assert "set resources.processes" in refused(resources={"gpu": 2}, device="cpu")
    assert "needs device: cpu" in refused(resources={"processes": 2})
    assert "resources request 2 processes" in refused(resources={"processes": 2}, device="cpu", engine="vmap")
    assert "Extra inputs" in refused(retries={"diverged": 1})  # a diverged trial has a result
    assert "Extra inputs" in refused(retries={"crashed": 1})
    assert "retries\n  Input should be a valid dictionary" in refused(retries=True)
