"""Tests of benchmarks: speeds with a fake clock, separate files, and the choice of engines."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

import vitlab
from vitlab import report
from vitlab.cli import cli
from vitlab.driver import benchmark
from vitlab.driver.session import Session, Watch
from vitlab.engines.vmap import Vmap
from vitlab.lab import plan_study
from vitlab.planning.values import EngineBenchmark
from vitlab.spec.tree import parse_as
from vitlab.store.folders import Store

STUDY: dict[str, Any] = {
    "study": "small",
    "base": {
        "data": {"type": "synthetic", "image_size": 8, "train_images": 40, "test_images": 8, "validation": 0.2},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 2, "batch_size": 16, "evaluations": 1},
    },
    "design": {"one_at_a_time": {"model.depth": [2], "train.ema": [{"decay": 0.9}]}},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": "none"},
}


WRITE = report.write


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(benchmark, "_measure_in_own_process", lambda measure, *arguments: measure(*arguments))
    monkeypatch.setattr(benchmark, "BLOCK_S", 0.01)
    monkeypatch.setattr(benchmark, "ROUNDS", 2)
    monkeypatch.setattr(benchmark, "PROBES", 1)
    monkeypatch.setattr(benchmark, "PROBE_S", 0.02)
    monkeypatch.setattr(benchmark, "LONG_S", 10.0)
    monkeypatch.setattr(report, "write", lambda *_: [])
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return file


def everything(out: Path) -> dict[str, bytes]:
    """Return every file of the trials of a store."""
    return {str(file): file.read_bytes() for file in sorted(out.glob("trials/**/*")) if file.is_file()}


def test_speed_is_steps_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a quarter of a second; warm-up steps take forever."""
    now, steps = [0.0], [0]

    def step() -> None:
        steps[0] += 1
        now[0] += 1e6 if steps[0] <= benchmark.WARM_UP else 0.25

    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(benchmark, "BLOCK_S", 10.0)
    assert benchmark.measure_step_rate(step, torch.device("cpu")) == pytest.approx(4.0, rel=1e-9)
    assert steps[0] == benchmark.WARM_UP + 40
    assert benchmark.measure_step_rate(step, torch.device("cpu"), 0.0, warm_up=0) == pytest.approx(4.0, rel=1e-9)
    assert steps[0] == benchmark.WARM_UP + 41, "one step is measured at least"


@pytest.mark.slow
def test_arms_are_measured_into_separate_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = write(tmp_path), tmp_path / "out"
    before = vitlab.run(file, out=out)
    trials, results = everything(out), before.results()
    with monkeypatch.context() as patched:
        patched.setattr(report, "write", WRITE)
        answer = vitlab.run(file, out=out, measure=True)
    assert (answer.folder / "report" / "fronts.png").exists()
    assert answer.trained == 0 and everything(out) == trials, "a trial was touched"
    assert answer.results().equals(results)

    costs_file = out / "studies" / "small" / "cost.json"
    frame = pd.read_json(costs_file)
    assert list(frame["arm"]) == [arm.name for arm in answer.plan.arms]
    assert set(frame["rounds"]) == {2} and set(frame["device"]) == {"cpu"} and set(frame["threads"]) == {1}
    for name in ("train_images_per_s", "infer_images_per_s"):
        assert (frame[f"{name}_q1"] > 0).all()
        assert (frame[f"{name}_q1"] <= frame[name]).all() and (frame[name] <= frame[f"{name}_q3"]).all()
    assert (frame["peak_bytes"] > 1 << 20).all() and set(frame["batch_size"]) == {16}

    doc = json.loads(str(report.render(answer.plan, answer.store, "json")))
    assert [row["arm"] for row in doc["cost"]] == list(frame["arm"])
    assert [row["peak_bytes"] for row in doc["cost"]] == list(frame["peak_bytes"])
    assert "images/s in inference" in str(report.render(answer.plan, answer.store, "md"))
    assert {"train_images_per_s", "infer_images_per_s"} & {front["cost"] for front in doc["fronts"]}

    content = costs_file.read_bytes()
    vitlab.run(file, out=out)
    assert costs_file.read_bytes() == content, "measured again, though nobody asked"
    costs_file.write_text(json.dumps([{**row, "code": "of an earlier day"} for row in json.loads(content)]))
    doc = json.loads(str(report.render(answer.plan, answer.store, "json")))
    assert doc["cost"] == [] and any("was measured under other code" in note for note in doc["notes"])


@pytest.mark.slow
def test_measured_engine_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = write(tmp_path, run={**STUDY["run"], "engine": "measured"}), tmp_path / "out"
    answer = vitlab.run(file, out=out)
    probes = json.loads((out / "studies" / "small" / "plan.json").read_text())["probes"]
    assert len(probes) == 2, "one of each shape that can be trained together"
    for probe in probes.values():
        speeds = probe["speeds"]
        assert speeds[probe["engine"]] == max(speeds.values()) and probe["trials"] == 2
        assert (
            set(speeds) == {"loop", *benchmark.engines_to_benchmark()}
            and min(speeds.values()) > 0
            and not probe["reasons"]
        )
    trained = answer.results().set_index("arm")["engine"].to_dict()
    assert trained == {arm.name: arm.engine for arm in answer.plan.arms} and trained["ema={decay=0.9}"] == "loop"

    def refuse(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(benchmark, "benchmark_engines", refuse)
    more = vitlab.run(file, out=out, changes={"seeds": 3})
    assert more.trained == 3 and more.plan.probes == answer.plan.probes
    for shape in probes:
        probes[shape]["engine"] = "loop"
    plan_file = out / "studies" / "small" / "plan.json"
    plan_file.write_text(json.dumps({**json.loads(plan_file.read_text()), "probes": probes}))
    assert {arm.engine for arm in plan_study(file, out=out)[1].arms} == {"loop"}, "what plan.json holds is what counts"


def probed(folder: Path, **changes: Any) -> tuple[EngineBenchmark, list[str]]:
    plan = plan_study(write(folder, design=None), out=folder, changes=changes)[1]
    messages: list[str] = []
    store = Store(folder / "out")
    run = plan_study(write(folder, design=None))[0].run
    watch = Watch()
    watch.say = messages.append  # type: ignore[method-assign]
    (probe,) = benchmark.benchmark_engines(plan, {"shape": plan.trials}, Session(store, run, watch=watch)).values()
    assert messages == [f"baseline: {probe.summary}"] and not store.root.exists()
    return probe, messages


def test_unstackable_arm_is_trained_by_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "a part of it is declared not to be safe for vmap"
    monkeypatch.setattr(Vmap, "incompatibility", classmethod(lambda cls, training: reason))
    probe, (message,) = probed(tmp_path)
    assert probe.engine == "loop" and set(probe.speeds) == {"loop"}
    assert (
        set(probe.reasons) == set(benchmark.engines_to_benchmark())
        and "; not vmap: a part of it is declared" in message
    )


def test_unsupported_engine_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine batch_last does not support norms of queries; vmap does."""
    probe, (message,) = probed(tmp_path, **{"base.model.attention": {"type": "auto", "qk_norm": "layernorm"}})
    assert set(probe.speeds) == {"loop", "vmap"} and "normalises queries and keys" in probe.reasons["batch_last"]
    assert "; not batch_last: blocks.0.attn normalises queries and keys" in message
    assert set(probed(tmp_path)[0].speeds) == {"loop", "vmap", "batch_last"}


def test_long_step_is_not_benchmarked_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LONG_S", 0.0)
    monkeypatch.setattr(Vmap, "__init__", lambda *_: pytest.fail("it was tried"))
    probe, (message,) = probed(tmp_path)
    assert probe.engine == "loop" and "so other engines could save no noticeable time" in message


def test_benchmark_output_and_stored_choice() -> None:
    probe = EngineBenchmark("vmap", 16, {"loop": 900.0, "vmap": 12000.0}, {"batch_last": "it is not known"})
    assert probe.summary == (
        "engine vmap: 12,000 images/s of a worker, 16 trials together, 900 by loop; not batch_last: it is not known."
    )
    assert parse_as(EngineBenchmark, json.loads(json.dumps(asdict(probe)))) == probe


class EndedWell(threading.Thread):
    """A thread in place of a process, which would import torch again."""

    exitcode = 0


@pytest.mark.slow
def test_benchmark_of_gpu_runs_to_its_end_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools" / "benchmarks"))
    import gpu

    lines = [line for part in ("singles", "seeds", "determinism", "resume") for line in gpu.PARTS[part](True)]
    assert sum("timm" in line.what for line in lines) == 1 and sum("2 by vmap" in line.what for line in lines) == 3
    assert all(line.images_per_s > 0 for line in lines if "by" in line.what and "5 steps" not in line.what)
    assert [line.what.rpartition(": ")[2] for line in lines[-3:]] == ["equal to the bit"] * 3

    def run(command: list[str], cwd: Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        with contextlib.chdir(cwd):
            cli.main(command[4:], standalone_mode=False)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=run))
    assert [re.sub(r"\d+ s$", "", line.what) for line in gpu.PARTS["study"](True)] == [
        "study of 4 trainings of 4 steps, cold: ",
        "study of 4 trainings of 4 steps, warm: ",
        "study of 4 trainings of 4 steps, again: ",
        "the study twice: 4 of 4 trainings equal to the bit",
    ]
    threads = SimpleNamespace(Barrier=threading.Barrier, Queue=queue.Queue, Process=EndedWell)
    monkeypatch.setattr(gpu.multiprocessing, "get_context", lambda _: threads)
    [line] = gpu.PARTS["processes"](True)
    assert line.what.endswith("2 processes of one by loop") and line.images_per_s > 0
