"""Tests that need a GPU: shared GPUs, real out-of-memory, bf16, stacked trials, explanations.

``make test-gpu`` runs these and the other tests marked ``gpu``, and says NOT RUN where there is no CUDA device.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import vitlab
from vitlab.driver.scheduler import Schedule
from vitlab.driver.session import Session, Watch
from vitlab.executors import Job, JobTrial, Settings
from vitlab.executors.local import Local
from vitlab.lab import Answer
from vitlab.planning.values import Planned, Trial
from vitlab.spec import Choice, RunSpec, TrainSpec, TrialSpec
from vitlab.store.folders import Keep, Store, TrialFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: no CUDA device"),
]

HERE = Path(__file__).parent


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, precision: str, steps: int, **how: Any) -> Answer:
    """Run four seeds of a tiny ViT on the bundled digits, all on the first GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    model = {"type": "vit", "patch_size": 4, "dim": 64, "depth": 2, "heads": 4, "position": "learned"}
    content = {
        "study": "tiny",
        "base": {
            "data": {"type": "digits"},
            "model": model,
            "train": {"steps": steps, "batch_size": 64, "evaluations": 2, "precision": precision},
        },
        "seeds": 4,
        "run": {"device": "cuda", "tracker": "none", **how},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return vitlab.run(folder / "tiny.yaml", out=folder / "out")


def test_four_quarter_gpu_trials_in_bf16_run_and_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = run(tmp_path, monkeypatch, "bf16", 3000, resources={"gpu": 0.25}, engine="loop", explain=[3])
    assert (answer.trained, answer.failed) == (4, 0)
    frame = answer.results()
    assert set(frame["status"]) == {"done"} and frame["val/accuracy"].min() > 0.3
    folders = [answer.store.trial(item.trial.key, item.trial.code) for item in answer.plan.trials]
    times = []
    for folder in folders:
        result = folder.result()
        assert result is not None and result.circumstances.numerics["device"] == "cuda"
        assert result.circumstances.numerics["precision"] == "bf16" and math.isfinite(result.circumstances.wall_s)
        events, _ = folder.events()
        (start,) = (event for event in events if event.kind == "start")
        assert start.body["attempt"] == 1
        (end,) = (event for event in events if event.kind == "end")
        times.append((start.t, end.t))
    assert sorted(begin for begin, _ in times)[1] < min(end for _, end in times), "none ran beside another"
    assert len({folder.events()[0][0].body["pid"] for folder in folders}) == 4
    assert (folders[0].path / "explain" / "test-3" / "rollout_class.png").exists()


def test_batch_of_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = run(tmp_path, monkeypatch, "fp32", 300, engine="vmap", workers=1)
    frame = answer.results()
    assert (answer.trained, answer.failed) == (4, 0)
    assert set(frame["engine"]) == {"vmap"} and set(frame["device"]) == {"cuda"} and frame["val/accuracy"].min() > 0.3


class Ear(Watch):
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def on_end(self, planned: Planned, how: str, detail: str) -> None:
        self.heard.append((planned.arm, how))


def test_out_of_memory_trial_gets_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trials request half a GPU and use 0.7 of it: the second fails, and resumes when the first has ended."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    executor = Local(RunSpec.model_validate({"device": "cuda", "resources": {"gpu": 0.5}, "retries": 0}))
    jobs = []
    for name, seconds in (("first", 20.0), ("second", 0.1)):
        spec = TrialSpec(
            data=Choice("take", {"takes": 0.7, "for": seconds}), model=Choice("vit"), train=TrainSpec(steps=1)
        )
        trial = Trial(spec=spec, seeds={}, origins=(), data=None, key=name, code="c0de")
        folder = Store(tmp_path).trial(name, "c0de").path
        settings = Settings(device="cuda", keep=Keep(last=False))
        jobs.append(Job((JobTrial(name, folder, trial),), settings, runner="gpu_runner"))
    planned = {item.folder: Planned(item.name, 0, item.trials[0].trial) for item in jobs}
    ear = Ear()
    schedule = Schedule(executor, planned, Session(Store(tmp_path), executor.run, watch=ear), jobs)
    schedule.run_jobs()
    assert schedule.failed == 0 and all(TrialFolder(item.folder).done() for item in jobs)
    assert ear.heard == [("second", "oom"), ("first", "done"), ("second", "done")]
