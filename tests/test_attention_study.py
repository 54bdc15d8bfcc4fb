"""``pipelines/attention.yaml``: its arms are one function, and in float64 they train alike, step for step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vitlab
from vitlab.data.prepare import Feed, prepare
from vitlab.lab import plan_study
from vitlab.models import Model, model
from vitlab.slots import slot
from vitlab.store import Store

STUDY = Path(__file__).parents[1] / "pipelines" / "attention.yaml"
ARMS = ("baseline", "attention=split", "attention=per_head", "attention=sdpa")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_step_0_logits_are_those_of_one_function(dtype: torch.dtype, tolerance: float) -> None:
    _, plan = plan_study(STUDY)
    assert [arm.name for arm in plan.arms] == list(ARMS)
    for seed in (0, 1):
        logits: dict[str, torch.Tensor] = {}
        seen: list[torch.Tensor] = []
        for arm in ARMS:
            trial = plan.find(arm, seed)
            data = slot("dataset").resolve(trial.spec["data"])
            prepared = prepare(data, trial.seeds)
            feed = Feed(prepared, data.options["augment"], trial.seeds, torch.device("cpu"), dtype)
            batch = feed.batch(0, trial.spec["train"]["batch_size"])
            network: Model = model.build(trial.spec["model"], prepared.info)
            network.initialise(trial.seeds["init"])
            seen.append(batch.x_BCHW)
            with torch.no_grad():
                logits[arm] = network.to(dtype).views(network(batch.x_BCHW))[""]
        assert all(torch.equal(x_BCHW, seen[0]) for x_BCHW in seen), "arms see other images"
        for arm in ARMS[1:]:
            torch.testing.assert_close(logits[arm], logits["baseline"], rtol=0, atol=tolerance)
        assert logits["baseline"].std() > 1e-3, "a model that says nothing equals any other"


def test_in_float64_the_losses_of_50_steps_agree(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "train.steps": 50,
        "train.evaluations": 50,
        "train.precision": "fp64",
        "data.validation": 0.05,
        "seeds": 1,
        "run": {"executor": "inline", "tracking_uri": "http://127.0.0.1:9"},
    }
    answer = vitlab.run(STUDY, out=tmp_path / "out", changes=changes)
    assert (answer.trained, answer.failed) == (4, 0)
    losses = {}
    for arm in ARMS:
        trial = answer.plan.find(arm, 0)
        result = Store(tmp_path / "out").trial(trial.key, trial.code).result()
        assert result is not None
        losses[arm] = torch.tensor(
            [[m.metrics["train/loss"], m.metrics["val/loss"]] for m in result.outcome.history if m.step > 0],
            dtype=torch.float64,
        )
    assert losses["baseline"].shape == (50, 2)
    assert losses["baseline"][0, 1] - losses["baseline"][-1, 1] > 0.01, "it learns nothing"
    for arm in ARMS[1:]:
        torch.testing.assert_close(losses[arm], losses["baseline"], rtol=0, atol=1e-10)
