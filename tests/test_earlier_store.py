"""Tests of a store written by an earlier version: reports are rendered, and trials keep their keys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

import vitlab
from vitlab import lab
from vitlab.plan.plan_file import read_plan
from vitlab.plan.values import Plan

STORED = Path(__file__).parent / "stores" / "earlier"
"""A study of two arms and two seeds, as version 0.1.0 left it; without weights."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    shutil.copytree(STORED, tmp_path / "earlier")
    return tmp_path / "earlier"


def test_results_and_comparison_of_earlier_store_are_read(store: Path) -> None:
    results = vitlab.results(store / "runs" / "studies" / "earlier")
    values = {
        (row.arm, row.seed): json.loads(file.read_text())["outcome"]["metrics"]["val/accuracy"]
        for row in results.itertuples()
        for file in store.glob(f"runs/trials/{row.trial}*/*/result.json")
    }
    assert len(values) == 4 and set(results["status"]) == {"done"}
    assert results.set_index(["arm", "seed"])["val/accuracy"].to_dict() == values
    comparison = vitlab.compare(store / "runs" / "studies" / "earlier").set_index("arm")
    means = results.groupby("arm")["val/accuracy"].mean()
    assert comparison.loc["position=none", "difference"] == pytest.approx(means["position=none"] - means["baseline"])


def test_trials_of_earlier_store_keep_their_keys(store: Path) -> None:
    _, plan = lab.plan_study(store / "study.yaml", out=store / "runs")
    assert {planned.trial.key for planned in plan.trials} == {file.name for file in store.glob("runs/trials/*")}


def test_plan_of_earlier_store_has_metric_facts(store: Path) -> None:
    file = store / "runs" / "studies" / "earlier" / "plan.json"
    assert "metrics" not in json.loads(file.read_text())
    plan = read_plan(file)
    assert (
        plan is not None
        and {"accuracy": "share", "top5": "share", "ece": "share", "loss": "number"}.items() <= plan.units.items()
    )
    _, planned_again = lab.plan_study(store / "study.yaml", out=store / "runs")
    assert {name: plan.metrics[name] for name in planned_again.metrics} == planned_again.metrics


def test_specs_of_an_earlier_store_are_typed_and_written_unchanged(store: Path) -> None:
    stored = json.loads((store / "runs" / "studies" / "earlier" / "plan.json").read_text())
    _, planned_again = lab.plan_study(store / "study.yaml", out=store / "runs")
    for plan in (Plan.from_json(stored), planned_again):
        assert json.dumps(plan.to_json()["specs"]) == json.dumps(stored["specs"])
        spec = plan.find("position=none", 0).spec
        assert spec.train.batch_size == stored["specs"]["position=none"]["train"]["batch_size"]
        assert spec.model.options["position"] == {"type": "none"}
        with pytest.raises(ValidationError):
            spec.train.batch_size = 1
