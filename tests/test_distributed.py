"""Tests of one trial by several processes: equal to one process, also after faults."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from job_helpers import alive, ends, run_trial, until

import vitlab
from vitlab.errors import TrialFailed, UserError
from vitlab.executors import Job, JobEnd, JobTrial, machine
from vitlab.executors.local import Local
from vitlab.executors.machine import Placement
from vitlab.executors.worker import WorkerCommand
from vitlab.planning.values import Trial
from vitlab.runner.job import NODE_VARIABLE, Settings, TrialEnd
from vitlab.runner.models import load_model
from vitlab.spec import STREAMS, RunSpec, TrialSpec
from vitlab.store.files import read_json
from vitlab.store.folders import TrialFolder
from vitlab.store.result import Ending, TrialResult

DATA = {
    "type": "synthetic",
    "image_size": 8,
    "train_images": 90,
    "test_images": 30,
    "num_classes": 6,
    "augment": [{"type": "crop", "padding": 2}, "flip"],
}
MODEL = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "drop": 0.1, "drop_path": 0.3}
TRAIN = {
    "steps": 20,
    "batch_size": 15,
    "evaluations": 4,
    "precision": "fp64",
    "optimizer": {"type": "adamw", "lr": 1e-3},
    "schedule": "cosine",
    "clip_grad": 0.5,
    "mix": {"mixup": 0.8, "cutmix": 1.0},
    "ema": {"decay": 0.9},
    "loss": "cross_entropy",
}

GUESTS = """
import os, signal, time
from pathlib import Path
import torch
from vitlab.plugin import Metric, metric
from vitlab.training import distributed
from vitlab.training.losses import CrossEntropy, loss

HERE = Path(__file__).parent
distributed.BUCKET_SIZE = 100

@metric.register("ordered")
class Ordered(Metric):
    '''A sum that depends on the order of its rows, of which a batch has half as many as images.'''
    bounds = (0.0, float("inf"))

    def rows(self, logits, target):
        return logits.softmax(1).amax(1)[: len(logits) // 2]

    def value(self, rows_N):
        return float((rows_N * torch.arange(len(rows_N))).sum())

@loss.register("troubled")
class Troubled(CrossEntropy):
    '''Leaves a file that says where it runs, takes its time, and from the fourth call on gets into trouble once.'''
    def __init__(self, *, trouble: str = "none", rank: int = 1, step_s: float = 0.0) -> None:
        super().__init__(label_smoothing=0.0)
        self.trouble, self.rank, self.step_s, self.calls = trouble, rank, step_s, 0

    def __call__(self, views, target):
        self.calls += 1
        rank = torch.distributed.get_rank()
        if self.calls == 1:
            (HERE / f"pid{rank}").write_text(str(os.getpid()))
        time.sleep(self.step_s)
        if rank == self.rank and self.calls > 3 and (HERE / "trouble").exists():
            (HERE / "trouble").unlink()
            if self.trouble == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
            if self.trouble == "error":
                raise ArithmeticError("the loss went off")
        return super().__call__(views, target)
"""


def trial(train: dict[str, Any] = {}) -> Trial:
    spec = {"data": DATA, "model": MODEL, "train": {**TRAIN, **train}}
    return Trial(TrialSpec.model_validate(spec), dict.fromkeys(STREAMS, 0), (), None, key="key")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], TrialFolder]:
    return lambda name: TrialFolder(tmp_path / name)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plugin") / "troubled.py"
    file.write_text(GUESTS)
    return file


@pytest.fixture
def guests(plugin: Path) -> Path:
    for file in [*plugin.parent.glob("pid*"), *plugin.parent.glob("trouble")]:
        file.unlink()
    return plugin


def settings(plugin: Path | None = None, **how: Any) -> Settings:
    plugins = () if plugin is None else (str(plugin),)
    return Settings(device="cpu", plugins=plugins, **{"processes": 2, "every_s": 0.0, **how})


def done(result: TrialResult | None) -> TrialResult:
    assert result is not None and result.status == "done"
    return result


def gone(guests: Path) -> bool:
    """Return whether all processes of the loss have ended; some need time."""
    pids = [int(file.read_text()) for file in guests.parent.glob("pid*")]
    assert len(pids) == 2
    return bool(until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialFolder, TrialResult]:
    """Return the uninterrupted result of two processes."""
    where = TrialFolder(tmp_path_factory.mktemp("two"))
    return where, done(run_trial(trial(), where, settings(every_s=60.0)))


@pytest.mark.slow
def test_several_processes_equal_one_up_to_rounding(
    two: tuple[TrialFolder, TrialResult], folder: Any, plugin: Path
) -> None:
    """Gradients of three are summed in several buckets, which the plugin makes small."""
    one = done(run_trial(trial(), folder("one"), settings(processes=1, every_s=60.0)))
    three = done(run_trial(trial(), folder("three"), settings(plugin, processes=3, micro_batch_size=2, every_s=60.0)))
    for several in (two[1], three):
        assert len(several.outcome.history) == len(one.outcome.history) == 4
        for actual, expected in zip(several.outcome.history, one.outcome.history, strict=True):
            assert actual.metrics == pytest.approx(expected.metrics, rel=0, abs=1e-10)
            assert (actual.step, actual.epoch, actual.images) == (expected.step, expected.epoch, expected.images)
        assert several.outcome.images == one.outcome.images == 20 * 15
    theirs = load_model(folder("one"))[0].state_dict()
    for where in (two[0], folder("three")):
        for key, value in load_model(where)[0].state_dict().items():
            torch.testing.assert_close(value, theirs[key], rtol=0, atol=1e-10)
    assert [which.circumstances.numerics["processes"] for which in (one, two[1], three)] == [1, 2, 3]
    assert three.circumstances.numerics["micro_batch_size"] == 2
    events = two[0].events()[0]
    assert [event.kind for event in events] == ["start", *["metrics"] * 4, "end"], "the others write nothing"
    assert events[0].body["effective_batch_size"] == 15


@pytest.mark.slow
def test_divided_evaluation_equals_one_process_to_the_bit(folder: Any, plugin: Path) -> None:
    """Of initial weights; the test split has four batches of evaluation, the others have one."""
    metrics = ["per_class_accuracy", "auroc", "macro_f1", "brier", "knn", "effective_rank", "ordered"]
    spec = TrialSpec.model_validate(
        {
            "data": {
                **DATA,
                "test_images": 1600,
                "corrupted": {"corruptions": ["fog"], "severities": [3], "images": 600},
            },
            "model": {**MODEL, "prefix": ["class", "distillation"], "head": "distilled"},
            "train": {"steps": 0, "batch_size": 15, "precision": "fp64", "evaluations": 1, "metrics": metrics},
            "distill": {"kind": "labels"},
        }
    )
    what = Trial(spec, dict.fromkeys(STREAMS, 0), (), None, key="key")
    one, three = (done(run_trial(what, folder(str(n)), settings(plugin, processes=n))) for n in (1, 3))
    assert three.outcome == one.outcome
    assert one.outcome.metrics.keys() >= {"val/token_cosine", "test/ordered", "test/per_class_accuracy_5", "test/mce"}
    assert folder("3").predictions.read_bytes() == folder("1").predictions.read_bytes()


def test_trial_resumed_by_another_number_of_processes_says_so(
    two: tuple[TrialFolder, TrialResult], folder: Any
) -> None:
    where, steps = folder("moved"), iter(range(7))
    alone = settings(processes=1, every_s=60.0)
    assert run_trial(trial(), where, alone, stop=lambda: next(steps, None) is None) is None
    moved = done(run_trial(trial(), where, settings(every_s=60.0)))
    assert (moved.circumstances.numerics["processes"], moved.circumstances.numerics["resumed"]) == (
        2,
        "from processes 1",
    )
    starts = [event.body for event in where.events()[0] if event.kind == "start"]
    assert [body["step"] for body in starts] == [0, 7] and starts[1]["note"] == "resumed from processes 1"
    for actual, expected in zip(moved.outcome.history, two[1].outcome.history, strict=True):
        assert actual.metrics == pytest.approx(expected.metrics, rel=0, abs=1e-10)


def test_number_of_a_machine_counts_for_trials_of_several_alone(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[range] = []

    def launch(ranks: range, *_: object) -> TrialEnd:
        launched.append(ranks)
        return TrialEnd(Ending.STOPPED)

    monkeypatch.setattr("vitlab.runner.execution.launch_ranks", launch)
    monkeypatch.setenv(NODE_VARIABLE, "1")
    for nodes in (1, 2):
        assert run_trial(trial(), folder(f"of{nodes}"), settings(nodes=nodes)) is None
    assert launched == [range(2), range(1, 2)]


@pytest.mark.slow
def test_two_hosts_of_torchrun_equal_one_process(folder: Any, tmp_path: Path) -> None:
    """Two agents of torchrun stand for two machines, with one process each."""
    short = trial(
        {
            "steps": 6,
            "evaluations": 3,
            "optimizer": {"type": "sgd", "lr": 0.1},
            "schedule": "constant",
            "clip_grad": None,
            "ema": None,
        }
    )
    one = done(run_trial(short, folder("one"), settings(processes=1, every_s=60.0)))
    job = Job((JobTrial("a/s0", tmp_path / "hosts", short),), Settings(device="cpu", processes=2, nodes=2))
    command = WorkerCommand(job)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    words += ["--local-addr=127.0.0.1", *command.words[2:]]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = f"from torch.distributed.run import main; main({words!r}); open('ended well' + str(os.getpid()), 'x')"
    hosts = [warm.start(f"import os; {run}", tmp_path, environment) for _ in range(2)]
    until(lambda: not any(map(alive, hosts)))
    assert all((tmp_path / f"ended well{host}").exists() for host in hosts)
    assert command.end("no report").ending == "done"
    result = done(TrialFolder(job.folder).result())
    assert result.circumstances.numerics["processes"] == 2
    for actual, expected in zip(result.outcome.history, one.outcome.history, strict=True):
        assert actual.metrics == pytest.approx(expected.metrics, rel=0, abs=1e-15)
    theirs = load_model(folder("one"))[0].state_dict()
    for key, value in load_model(TrialFolder(job.folder))[0].state_dict().items():
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=1e-15)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NOT RUN: needs two CUDA devices")
def test_two_gpus_equal_one_up_to_rounding(folder: Any) -> None:
    one, two = (
        done(run_trial(trial(), folder(str(count)), Settings(device="cuda", processes=count))) for count in (1, 2)
    )
    for actual, expected in zip(two.outcome.history, one.outcome.history, strict=True):
        assert actual.metrics == pytest.approx(expected.metrics, rel=0, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_process_death_loses_only_steps_since_checkpoint(
    rank: int, two: tuple[TrialFolder, TrialResult], folder: Any, guests: Path
) -> None:
    what = trial({"loss": {"type": "troubled", "trouble": "killed", "rank": rank}})
    (guests.parent / "trouble").touch()
    where = folder("killed")
    with pytest.raises(TrialFailed, match=rf"lost: process {rank} of this trial was killed by signal 9 \(SIGKILL\)"):
        run_trial(what, where, settings(guests))
    assert gone(guests) and not where.is_locked() and not where.done() and where.failure() is None
    assert done(run_trial(what, where, settings(guests))).outcome == two[1].outcome
    starts = [event.body["step"] for event in where.events()[0] if event.kind == "start"]
    assert len(starts) == 2 and starts[0] == 0 < starts[1] <= 3


@pytest.mark.slow
def test_stop_request_stops_all_ranks_at_one_step(
    two: tuple[TrialFolder, TrialResult], folder: Any, guests: Path
) -> None:
    what, where = trial({"loss": {"type": "troubled", "step_s": 0.03}}), folder("stopped")
    assert run_trial(what, where, settings(guests), stop=lambda: (guests.parent / "pid1").exists()) is None
    assert gone(guests) and not where.done() and not where.is_locked()
    assert done(run_trial(what, where, settings(guests))).outcome == two[1].outcome
    starts = [event.body["step"] for event in where.events()[0] if event.kind == "start"]
    assert len(starts) == 2 and starts[1] < 20


def test_trial_has_several_gpus_exclusively(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement(["0", "1", "2", "3", "4"])
    assert placement.assign_gpus("quarter", 0.25, 1) == "0"
    assert [placement.assign_gpus(name, 1.0, 2) for name in "abc"] == ["1,2", "3,4", None]
    placement.remove("a")
    assert placement.assign_gpus("half", 0.5, 1) == "1" and placement.assign_gpus("c", 1.0, 2) is None
    placement.remove("half")
    assert placement.assign_gpus("c", 1.0, 2) == "1,2"
    assert placement.capacity(1.0, 2) == 2 and not placement.capacity(1.0, 6)

    monkeypatch.setattr(machine, "usable_gpus", lambda: ["0", "1", "2", "3"])
    local = Local(RunSpec.model_validate({"resources": {"gpu": 2}}))
    assert local.slots == 2
    work = Job((JobTrial("j", Path(), trial()),), Settings(device="cuda"))
    assert local.worker_environment(work, "2,3")["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(UserError, match=r"run\.resources\.gpu is 8, and this machine has 4"):
        Local(RunSpec.model_validate({"resources": {"gpu": 8}}))


def test_exception_of_one_rank_is_failure_of_trial(folder: Any, guests: Path) -> None:
    for trouble, kind, sentence in (
        ("memory", "oom", "memory ran out, with train.batch_size 15"),
        ("error", "error", "ArithmeticError: the loss went off"),
    ):
        where = folder(trouble)
        (guests.parent / "trouble").touch()
        with pytest.raises(TrialFailed, match=f"{kind}: {sentence}"):
            run_trial(trial({"loss": {"type": "troubled", "trouble": trouble}}), where, settings(guests))
        failure = where.failure()
        assert gone(guests) and failure is not None and failure.failure.startswith(sentence) and failure.kind == kind
        assert "in __call__" in read_json(where.path / "failure.json")["traceback"]
        assert where.events()[0][-1].kind == "end" and not where.is_locked()


@pytest.mark.slow
def test_worker_death_ends_all_ranks(folder: Any, guests: Path) -> None:
    what = trial({"loss": {"type": "troubled", "step_s": 0.05}, "steps": 1000})
    local = Local(RunSpec.model_validate({"device": "cpu", "resources": {"processes": 2}, "workers": 1}))
    local.submit(
        Job(
            (JobTrial("job", folder("job").path, what),),
            Settings(device="cpu", plugins=(str(guests),), processes=2),
        )
    )
    (worker,) = local._running.values()
    endings: list[JobEnd] = []
    until(lambda: endings.extend(local.poll(0.05)) or endings or len(list(guests.parent.glob("pid*"))) == 2)
    assert not endings and folder("job").is_locked()
    worker.process.kill()
    assert ends(local, 1)["key"].ending == "lost"
    assert gone(guests) and not folder("job").is_locked()


STUDY = """
study: shared
base:
  data: {type: digits}
  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}
  train: {steps: 3, batch_size: 16, evaluations: 1}
seeds: 1
run: {executor: inline, device: cpu, resources: {processes: 2}, micro_batch_size: 3, tracker: none}
"""


@pytest.mark.usefixtures("no_report")
def test_study_sets_processes_per_trial(tmp_path: Path) -> None:
    """The loop is used, although the model is small enough for stacking."""
    (tmp_path / "shared.yaml").write_text(STUDY)
    answer = vitlab.run(tmp_path / "shared.yaml", out=tmp_path / "out")
    (planned,) = answer.plan.trials
    numerics = done(answer.store.trial(planned.trial.key, planned.trial.code).result()).circumstances.numerics
    assert (numerics["processes"], numerics["micro_batch_size"], numerics["engine"]) == (2, 3, "loop")
    alone = {"run.resources": {}, "run.micro_batch_size": None}
    again = vitlab.run(tmp_path / "shared.yaml", out=tmp_path / "out", changes=alone)
    assert (again.trained, again.cached) == (0, 1), "how it is computed is no part of what it is"
