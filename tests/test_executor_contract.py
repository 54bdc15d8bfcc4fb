"""Tests of the contract test of executors: it passes good executors and detects every bad one, with the rule."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import slot_fixtures
from job_helpers import HERE, PATIENCE_S, alive, ends, job, until

from vitlab.cli.new import write_plugin
from vitlab.errors import UserError
from vitlab.executors import Executor, Job, JobEnd, executor, worker
from vitlab.executors.inline import Inline
from vitlab.executors.local import Local
from vitlab.spec import RunSpec
from vitlab.spec.tree import parse_as
from vitlab.store.files import read_json
from vitlab.store.result import Ending
from vitlab.testing import check_component
from vitlab.testing import executors as contract


@pytest.fixture(autouse=True)
def _slot_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, executor)


class KilledIsDone(Local):
    """A dead worker, reported as done."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        ends = super().poll(timeout_s)
        return [replace(end, ending=Ending.DONE) if end.ending == Ending.LOST else end for end in ends]


class ErrorIsLost(Local):
    """An exception, reported as a dead worker."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        ends = super().poll(timeout_s)
        return [replace(end, ending=Ending.LOST) if end.ending == Ending.ERROR else end for end in ends]


class StoppedIsDone(Local):
    """A cancelled job, reported as done."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        ends = super().poll(timeout_s)
        return [replace(end, ending=Ending.DONE) if end.ending == Ending.STOPPED else end for end in ends]


class CancelsNothing(Local):
    """A cancel that does nothing; the test ends the workers."""

    def cancel(self, grace_s: float) -> None:
        if not grace_s:
            super().cancel(grace_s)


class CancelsAtOnce(Local):
    """A cancel without a checkpoint."""

    def cancel(self, grace_s: float) -> None:
        for running in self._running.values():
            running.process.kill()
        super().cancel(0.0)


class CancelsInName(Local):
    """A cancel that reports jobs which go on."""

    def cancel(self, grace_s: float) -> None:
        if grace_s:
            self._ends += [JobEnd(running.job, Ending.STOPPED) for running in self._running.values()]
        else:
            super().cancel(grace_s)

    def poll(self, timeout_s: float) -> list[JobEnd]:
        ends, self._ends = self._ends, []
        return ends or super().poll(timeout_s)


class ReportsTwice(Local):
    """Every end, reported again by the next poll."""

    last: tuple[JobEnd, ...] = ()

    def poll(self, timeout_s: float) -> list[JobEnd]:
        if self.last:
            again, self.last = self.last, ()
            return list(again)
        self.last = tuple(super().poll(timeout_s))
        return list(self.last)


class SubmitRaises(Local):
    """An exception of submit."""

    def submit(self, job: Job) -> None:
        raise ConnectionError("no queue")


class PollRaises(Local):
    """An exception of poll."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        raise ConnectionError("no queue")


class PollBlocks(Local):
    """A poll that waits until a job ends."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        return super().poll(timeout_s if timeout_s != contract.TIMEOUT_S else PATIENCE_S)


class PollSpins(Local):
    """A poll that never waits."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        return super().poll(0.0)


class NoSlots(Local):
    """A negative number of slots."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__(run)
        self.slots = 0


class TooManySlots(Local):
    """More slots than run.workers."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__(run)
        self.slots = 3


class NoLog(Local):
    """Workers whose output is lost."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        ends = super().poll(timeout_s)
        for running in self._running.values():
            (running.job.folder / "log.txt").unlink(missing_ok=True)
        return ends


class OtherJob(Local):
    """Another job than the submitted one."""

    def submit(self, job: Job) -> None:
        super().submit(replace(job, runner="vitlab.runner.execution"))


class NoDetail(Local):
    """Ends without a sentence."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        return [replace(end, detail="") for end in super().poll(timeout_s)]


class OneAtATime(Local):
    """A good executor with one slot."""

    slots = 1  # type: ignore[assignment]


class NothingHappens(Inline):
    """Jobs that are done without running."""

    def poll(self, timeout_s: float) -> list[JobEnd]:
        self._ends += [
            JobEnd(job, Ending.ERROR if job.name == "raise" else Ending.DONE, "because") for job in self._waiting
        ]
        self._waiting.clear()
        ends, self._ends = self._ends, []
        return ends


class NotHere(Local):
    """An executor that cannot be used."""

    def __init__(self, run: RunSpec) -> None:
        raise UserError("there is no cluster")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (KilledIsDone, r"job 'kill' ended as done \(its process was killed by signal 9 .*; a worker that died is lost"),
        (ErrorIsLost, r"job 'raise' ended as lost .*; a job whose trial raises an exception ends as error"),
        (StoppedIsDone, "job 'stop' ended as done .* after cancel; a job that writes a checkpoint .* ends as stopped"),
        (CancelsNothing, "poll reports no end of job 'stop' within 2 s of cancel; cancel stops every job"),
        (CancelsAtOnce, r"job 'stop' ended as lost \(.* after cancel; a job that writes a checkpoint"),
        (CancelsInName, r"process \d+ of a job still runs 2 s after cancel; cancel leaves no process"),
        (ReportsTwice, "poll reports the end of job 'kill' twice, .* every submitted job ends exactly once"),
        (SubmitRaises, r"submit raises an exception, which ends the run: ConnectionError: no queue"),
        (PollRaises, r"poll raises an exception, which ends the run: ConnectionError: no queue"),
        (
            PollBlocks,
            r"poll\(0.4\) took .* s, and no job ended; it waits up to timeout_s for the first end, and no longer",
        ),
        (PollSpins, r"poll\(0.4\) took .* s, and no job ended; it waits up to timeout_s"),
        (NoSlots, "slots is 0 for run.workers 2; it is at least 1 and at most run.workers"),
        (TooManySlots, "slots is 3 for run.workers 2"),
        (
            NoLog,
            "has not printed 'contract test: .* to log.txt in job.folder within 2 s; workers append their output there",
        ),
        (OtherJob, r"ended as done \(\), and it does not end by itself; workers run the job that was submitted"),
        (NoDetail, "job 'kill' ended as lost without a detail; give one sentence"),
        (NothingHappens, "job 'train' ended as done, and its trial has no result in the store"),
    ],
)
def test_bad_executor_is_caught(cls: type[Any], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {CancelsNothing: "END_S", CancelsInName: "END_S", PollBlocks: "LATE_S", NoLog: "START_S"}
    if cls in limits:  # otherwise these tests would take as long as the limits
        monkeypatch.setattr(contract, limits[cls], 2.0)
    executor.register("bad")(cls)
    with pytest.raises(AssertionError, match=sentence):
        check_component("executor", "bad")


@pytest.mark.slow
def test_executor_with_one_slot_passes() -> None:
    executor.register("one")(OneAtATime)
    check_component("executor", "one")


def test_executor_without_cluster_is_skipped() -> None:
    executor.register("cluster")(NotHere)
    with pytest.raises(SkipTest, match=r"executor 'cluster' \(.*\): cannot be used here: there is no cluster"):
        check_component("executor", "cluster")


# -- workers of a command line ----------------------------------------------------------------------------------------


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executor:
    """Return the executor that ``vitlab new plugin`` writes, whose jobs are those of ``executor_runner``."""
    file = write_plugin("acme-exec", "executor", out=tmp_path) / "src" / "acme_exec" / "__init__.py"
    spec = importlib.util.spec_from_file_location("acme_exec", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{HERE.parent}")
    executor: Executor = module.AcmeExecutor(RunSpec(device="cpu", threads=3), niceness=0)
    return executor


@pytest.mark.slow
def test_template_follows_contract(template: Executor, tmp_path: Path) -> None:
    """Its rules, and logs and preemption, by processes that import no torch."""
    assert template.slots == 2 and template.poll(0.0) == []
    work = [job(tmp_path, "train"), job(tmp_path, "raise"), job(tmp_path, "exit"), job(tmp_path, "finish")]
    for item in work:
        template.submit(item)
    endings = ends(template, 3)
    assert {name: end.ending for name, end in endings.items()} == {"raise": "error", "exit": "lost", "finish": "done"}
    assert "exit code 9" in endings["exit"].detail and "no such layer" in endings["raise"].detail
    assert "said by a child of it" in (work[3].folder / "log.txt").read_text()
    assert read_json(work[3].folder / "around.json")["environment"][0] == "1"  # of the job's settings
    pid = until(lambda: read_json(work[0].folder / "pid.json"))
    os.kill(pid, signal.SIGINT)
    assert template.poll(0.3) == []
    os.kill(pid, signal.SIGTERM)
    preempted = ends(template, 1)["train"]
    assert preempted.ending == "preempted" and (work[0].folder / "checkpoint").is_dir()
    template.submit(job(tmp_path, "resume"))
    until((job(tmp_path, "resume").folder / "pid.json").exists)
    template.cancel(PATIENCE_S)
    assert ends(template, 1)["resume"].ending == "stopped" and (job(tmp_path, "resume").folder / "checkpoint").is_dir()
    template.submit(job(tmp_path, "ignore"))
    pid = until(lambda: read_json(job(tmp_path, "ignore").folder / "pid.json"))
    template.cancel(0.2)
    assert not alive(pid) and ends(template, 1)["ignore"].ending == "lost"
    assert not list(tmp_path.glob("trials/*/*/.worker-*"))


DRIVER = """
import subprocess, sys, time
sys.path.insert(0, {here!r})
import job_helpers
from pathlib import Path
from vitlab.executors.inline import Inline
from vitlab.executors.worker import WorkerCommand
from vitlab.spec import RunSpec
work = job_helpers.job(Path({root!r}), "train")
command = WorkerCommand(work)
environment = Inline(RunSpec()).worker_environment(work)
subprocess.Popen(command.words, env=environment, start_new_session=True)
job_helpers.until((work.folder / "pid.json").exists)
"""


@pytest.mark.slow
def test_worker_command_ends_with_its_driver(tmp_path: Path) -> None:
    script = DRIVER.format(here=str(HERE), root=str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    work = job(tmp_path, "train")
    pid = until(lambda: read_json(work.folder / "pid.json"))
    until(lambda: not alive(pid))
    assert (work.folder / "checkpoint").is_dir()
    [report] = work.folder.glob(".worker-*/ending.json")
    assert read_json(report) == ["stopped", ""]


def test_job_survives_its_file(tmp_path: Path) -> None:
    one, other = job(tmp_path, "train", steps=3), job(tmp_path, "finish")
    settings = replace(one.settings, plugins=("/a/b.py",), threads=3, engine="vmap")
    work = Job(one.trials + other.trials, settings, timeout_s=2.5, gpu=0.5, runner="runner")
    *_, folder = worker.WorkerCommand(work).words
    assert parse_as(Job, json.loads((Path(folder) / "job.json").read_text())) == work
