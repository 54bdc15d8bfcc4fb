"""Tests of ``pipelines/attention.yaml``: its arms are one function and train alike in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitlab.data.prepare import Feed, prepare
from vitlab.lab import plan_study
from vitlab.models import Model, model
from vitlab.registry import slot
from vitlab.spec import TrainSpec
from vitlab.spec.trial import LENGTHS
from vitlab.training.loop import Training

STUDY = Path(__file__).parents[1] / "pipelines" / "attention.yaml"
ARMS = ("baseline", "attention=split", "attention=per_head", "attention=sdpa")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_step_0_logits_are_equal_across_arms(dtype: torch.dtype, tolerance: float) -> None:
    _, plan = plan_study(STUDY)
    assert [arm.name for arm in plan.arms] == list(ARMS)
    for seed in (0, 1):
        logits: dict[str, torch.Tensor] = {}
        outputs: list[torch.Tensor] = []
        for arm in ARMS:
            trial = plan.find(arm, seed).trial
            data = slot("dataset").resolve_choice(trial.spec.data)
            prepared = prepare(data, trial.seeds)
            feed = Feed(prepared, data.options["augment"], trial.seeds, torch.device("cpu"), dtype)
            batch = feed.batch(0, trial.spec.train.batch_size)
            network: Model = model.build(trial.spec.model, prepared.info)
            network.initialise(trial.seeds["init"])
            outputs.append(batch.x_BCHW)
            with torch.no_grad():
                logits[arm] = network.to(dtype).logits_by_head(network(batch.x_BCHW))[""]
        assert all(torch.equal(x_BCHW, outputs[0]) for x_BCHW in outputs), "arms see other images"
        for arm in ARMS[1:]:
            torch.testing.assert_close(logits[arm], logits["baseline"], rtol=0, atol=tolerance)
        assert logits["baseline"].std() > 1e-3, "a model that says nothing equals any other"


@pytest.mark.slow
def test_float64_losses_of_15_steps_agree() -> None:
    _, plan = plan_study(STUDY)
    losses: dict[str, torch.Tensor] = {}
    for arm in ARMS:
        trial = plan.find(arm, 0).trial
        length = {**dict.fromkeys(LENGTHS), "steps": 15, "batch_size": 16}
        spec = TrainSpec.model_validate({**trial.spec.plain()["train"], **length, "precision": "fp64"})
        prepared = prepare(trial.spec.data, trial.seeds)
        network: Model = model.build(trial.spec.model, prepared.info)
        network.initialise(trial.seeds["init"])
        feed = Feed(prepared, [], trial.seeds, torch.device("cpu"), torch.float64)
        training = Training(network.double(), feed, spec, trial.seeds)
        before = training.evaluate("val").metrics["loss"]
        for _ in range(15):
            training.train_step()
        after = training.evaluate("val").metrics["loss"]
        losses[arm] = torch.stack([*training.losses["loss"], torch.tensor(after, dtype=torch.float64)])
        assert abs(before - after) > 1e-3, "it stands still, as any other would"
    for arm in ARMS[1:]:
        torch.testing.assert_close(losses[arm], losses["baseline"], rtol=0, atol=1e-10)
