"""Tests with the real wandb package, offline: every point of every journal is in W&B's own files once."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("wandb", reason="pip install -e plugins/vitlab-wandb")
pytest.importorskip("vitlab_wandb", reason="pip install -e plugins/vitlab-wandb")

import vitlab_wandb
import yaml
from vitlab_wandb import WandB, records_of
from wandb.proto.wandb_internal_pb2 import Record

from vitlab import lab
from vitlab.errors import SpecError
from vitlab.plugin import RunSpec, Store, check_component
from vitlab.store.folders import Event
from vitlab.trackers.replay import TrialUpdate

pytestmark = pytest.mark.usefixtures("no_figures")

PLUGIN = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))


def study_file(folder: Path, **options: Any) -> Path:
    model = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2}
    train = {"steps": 4, "batch_size": 16, "evaluations": 2}
    content = {"study": "tiny", "base": {"data": {"type": "digits"}, "model": model, "train": train}, "seeds": 2}
    tracker = {"type": "wandb", **options}
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump({**content, "run": {"executor": "inline", "tracker": tracker}}))
    return file


@pytest.mark.slow
def test_wandb_passes_contract_test() -> None:
    check_component("tracker", "wandb")


@pytest.mark.parametrize("is_late", [pytest.param(True, marks=pytest.mark.slow), False])
def test_trial_is_delivered_once_its_file_has_its_end(is_late: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """W&B's process writes the file after the run has finished; one that never does loses no trial."""
    late = iter([b""] * 3 if is_late else [])

    def read(data: bytes) -> Iterator[bytes]:
        return records_of(next(late, data) if is_late else b"")

    study = study_file(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(vitlab_wandb, "records_of", read)
        patch.setattr(vitlab_wandb, "WAIT_S", 30.0 if is_late else 0.0)
        assert (lab.run(study, out=tmp_path / "out").link is not None) == is_late and not list(late)
    answer = lab.run(study, out=tmp_path / "out")
    assert answer.link and answer.trained == 0
    assert len(list((tmp_path / "out/wandb").glob("offline-run-*"))) == 2


@pytest.mark.slow
def test_offline_files_have_every_point_of_journals_once(tmp_path: Path) -> None:
    """The files are read by W&B's own messages, and the journals as JSON."""
    answer = lab.run(study_file(tmp_path), out=tmp_path / "out")
    assert answer.tracker == "wandb" and answer.link == f"wandb sync {tmp_path}/out/wandb/offline-run-*"
    found: Counter[tuple[str, str, float, int]] = Counter()
    finals, arms = {}, set()
    for file in (tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb"):
        name = ""
        for message in map(Record.FromString, records_of(file.read_bytes())):
            if message.HasField("run") and message.run.display_name:
                name = message.run.display_name
                arms.add(message.run.run_group)
            for item in message.history.item:
                key = item.key or "/".join(item.nested_key)
                if not key.startswith("_"):
                    found[name, key, json.loads(item.value_json), message.history.step.num] += 1
            for item in message.summary.update:
                key = item.key or "/".join(item.nested_key)
                finals[name, key] = json.loads(item.value_json)
    expected: Counter[tuple[str, str, float, int]] = Counter()
    for seed in (0, 1):
        trial = answer.plan.find("baseline", seed).trial
        folder = answer.store.trial(trial.key, trial.code).path
        for line in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
            if line["kind"] == "metrics":
                extra = {"progress/epoch": line["epoch"], "progress/images": line["images"]}
                for key, value in {**line["metrics"], **extra}.items():
                    expected[f"baseline/s{seed}", key, value, line["step"]] += 1
        result = json.loads((folder / "result.json").read_text())["outcome"]["metrics"]
        final = finals[f"baseline/s{seed}", "final/val/accuracy"]
        assert math.isclose(final, result["val/accuracy"], abs_tol=1e-12)
    assert found == expected and set(expected.values()) == {1} and arms == {"baseline"}


def test_measurement_of_an_earlier_step_is_logged_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B drops points of earlier steps, and the best weights are measured last."""
    logged, last = {}, [-1]

    def log(values: dict[str, float], step: int) -> None:
        assert step > last[-1]
        last.append(step)
        logged[step] = values

    run = SimpleNamespace(log=log, summary={}, finish=lambda exit_code: None)
    monkeypatch.setattr("wandb.init", lambda **_: run)
    monkeypatch.setattr(WandB, "_await_end", lambda *_: None)
    _, plan = lab.plan_study(study_file(tmp_path))
    board = WandB(plan, Store(tmp_path), RunSpec())
    metrics = [(1, {"val/loss": 3.0}), (2, {"val/loss": 4.0}), (1, {"test/loss": 5.0})]
    events = [Event(0, "metrics", {"step": step, "epoch": 0, "images": 0, "metrics": each}) for step, each in metrics]
    board.write(TrialUpdate(board.trials[0], None, 0, tuple(events)), None)  # type: ignore[arg-type]
    assert logged[1].items() >= {"val/loss": 3.0, "test/loss": 5.0}.items() and logged[2]["val/loss"] == 4.0


def test_study_file_may_not_send_results(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="sends results to a server"):
        lab.plan_study(study_file(tmp_path, mode="online"))


def test_mark_of_foreign_results_deletes_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "wandb" / "offline-run-x" / "mine"
    precious.mkdir(parents=True)
    answer = lab.plan_study(study_file(tmp_path))[1]
    for mark in ("x", "../precious", "*", 5):
        WandB(answer, Store(tmp_path), RunSpec()).remove_trial(mark)
    assert precious.exists()


def test_study_can_be_planned(tmp_path: Path) -> None:
    study, plan = lab.plan_study(PLUGIN / "study.yaml", out=tmp_path)
    assert study.run.tracker.type == "wandb" and not any(arm.skip for arm in plan.arms)
