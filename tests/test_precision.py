"""Tests of loss scaling in fp16 and of activation checkpointing."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import run_trial
from pydantic import ValidationError
from test_engines import SETTINGS, results, same, state_of, training, trial, work
from torch import Tensor, nn

from vitlab import noise
from vitlab.engines import engine_or_fallback
from vitlab.engines.base import Loop, train
from vitlab.errors import UserError
from vitlab.geometry import DataInfo
from vitlab.planning.engine_choice import choose_engine
from vitlab.registry import slot
from vitlab.runner.circumstances import cuda_settings
from vitlab.runner.execution import torch_settings
from vitlab.runner.job import Settings
from vitlab.spec import RunSpec
from vitlab.training.memory import checkpoint_activations
from vitlab.training.optim import group_by_decay

FP16: dict[str, Any] = {"precision": "fp16", "steps": 6, "evaluations": 2, "clip_grad": 0.5}


# -- loss scaling -----------------------------------------------------------------------------------------------------


def overflow_at(model: nn.Module, steps: set[int]) -> None:
    """Let a gradient be infinite in the backward passes with these numbers."""
    passes = iter(range(1000))
    weight = model.get_parameter("head.fc.weight" if hasattr(model.head, "fc") else "head.weight")  # type: ignore[arg-type]
    weight.register_hook(lambda gradient: gradient * float("inf") if next(passes) in steps else gradient)


def test_fp16_equals_recipe_of_torch() -> None:
    """Reference: "Working with unscaled gradients" in the documentation of torch.amp, with a step that overflows."""
    ours, theirs = training(0, **FP16), training(0, **FP16)
    for one in (ours, theirs):
        overflow_at(one.model, {2})
    model = theirs.model
    spec = slot("optimizer").build(theirs.spec.optimizer)
    groups = group_by_decay(model, spec.weight_decay, model.no_weight_decay())
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(6):
        before = state_of(ours)
        ours.train_step()
        theirs.step = step
        batch, draws = theirs.draw_batch(range(16))
        with noise.use_model_draws(draws), torch.autocast("cpu", torch.float16):
            logits_BK = model(batch.x_BCHW).logits
        loss = slot("loss").build(theirs.spec.loss)({"": logits_BK.float()}, batch.y_B).total
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        for group in optimizer.param_groups:
            group["lr"] = theirs.learning_rate(step)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
        scaler.step(optimizer)
        scaler.update()
        assert same(state_of(ours), state_of(theirs))
        assert same(before, state_of(ours)) == (step == 2)
    assert ours.scaling is not None and ours.scaling.state_dict()["scaler"] == scaler.state_dict()
    assert ours.scaling.pop_skipped_steps() == 1 and ours.scaling.pop_skipped_steps() == 0


def test_fp16_resumes_scale_and_skipped_steps() -> None:
    whole, first = training(0, **FP16), training(0, **FP16)
    states: list[Any] = []
    first.write = lambda state: states.append(copy.deepcopy(dict(state)))
    overflow_at(whole.model, {0, 1, 4})
    overflow_at(first.model, {0, 1})
    [expected] = train([whole])
    calls = iter(range(2))
    assert train([first], stop=lambda: next(calls, None) is None, every_s=0.0) == [None]
    second = training(0, **FP16)
    overflow_at(second.model, {2})
    second.load(states[-1])
    assert second.step == 2
    [result] = train([second])
    assert same(state_of(second), state_of(whole))
    assert result is not None and expected is not None and result.history == expected.history
    assert [point.metrics["train/skipped_steps"] for point in result.history] == [2, 1]
    assert engine_or_fallback("vmap", training(0, **FP16))[1] is Loop
    assert choose_engine(trial(0, precision="fp16"), "auto", lambda _: None).engine == "loop"


# -- activation checkpointing -----------------------------------------------------------------------------------------


def gradients_and_saved_bytes(checkpointing: bool, micro_batch: range = range(16)) -> tuple[list[Tensor], int]:
    """Return the gradients of a step, and the bytes of the activations that its forward pass stores."""
    one = training(0, model={"depth": 4, "attention": {"type": "explicit", "drop": 0.1}})
    if checkpointing:
        checkpoint_activations(one.model)
    own = {parameter.untyped_storage().data_ptr() for parameter in one.model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch, draws = one.draw_batch(micro_batch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = one.compute_loss(batch.x_BCHW, batch.y_B, draws)
    loss.total.backward()
    return [parameter.grad for parameter in one.model.parameters() if parameter.grad is not None], sum(saved.values())


def test_checkpointing_gives_same_gradients_with_less_memory() -> None:
    """With dropout of tokens and weights and stochastic depth, whose draws are repeated outside of their scope."""
    (expected, stored), (gradients, less) = (
        gradients_and_saved_bytes(checkpointing) for checkpointing in (False, True)
    )
    assert len(gradients) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    assert less < stored / 3


def test_checkpointing_changes_no_result_of_a_trial(tmp_path: Path) -> None:
    plain, checkpointed = work(tmp_path / "plain", trial(0)), work(tmp_path / "checkpointed", trial(0))
    run_trial(*plain[0], SETTINGS)
    run_trial(*checkpointed[0], replace(SETTINGS, activation_checkpointing="blocks"))
    before, after = results(plain)[0], results(checkpointed)[0]
    assert after.outcome == before.outcome
    assert after.circumstances.numerics["activation_checkpointing"] == "blocks"


class Stateful(nn.Module):
    """A block whose forward pass updates buffers, and a weight that depends on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.1)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.linear(torch.tanh(self.norm(x_BD)))


def test_checkpointing_updates_buffers_once() -> None:
    """Running statistics after a step follow the formula of one pass, and power iterations start from the same vector."""
    torch.manual_seed(0)
    plain = nn.Module()
    plain.blocks = nn.ModuleList([Stateful(), Stateful()])
    recomputed = copy.deepcopy(plain)
    checkpoint_activations(recomputed)  # type: ignore[arg-type]
    first_BD, second_BD = torch.randn(2, 20, 6).unbind(0)
    for model in (plain, recomputed):
        for x_BD in (first_BD, second_BD):
            y_BD = x_BD.clone().requires_grad_()
            for block in model.blocks:
                y_BD = block(y_BD)
            y_BD.square().sum().backward()
    norm: Any = recomputed.blocks[0].norm
    mean_D = 0.9 * 0.1 * first_BD.mean(0) + 0.1 * second_BD.mean(0)
    torch.testing.assert_close(norm.running_mean, mean_D)
    assert norm.num_batches_tracked == 2
    assert same(dict(recomputed.named_buffers()), dict(plain.named_buffers()))
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (plain, recomputed)]
    assert same(*gradients)


def test_checkpointing_is_refused_without_blocks_and_with_other_engines() -> None:
    model = slot("model").build({"type": "linear"}, DataInfo(image=(8, 8), channels=1, classes=3))
    with pytest.raises(UserError, match="has no list of blocks"):
        checkpoint_activations(model)
    with pytest.raises(ValidationError, match="engine vmap stores all activations"):
        RunSpec.model_validate({"activation_checkpointing": "blocks", "engine": "vmap"})
    assert RunSpec.model_validate({"activation_checkpointing": "blocks"}).effective_engine == "loop"


# -- tf32 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_products_and_convolutions_have_precision_of_trial(precision: str, allowed: bool) -> None:
    parts = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [part.allow_tf32 for part in parts]
    with torch_settings(Settings(), torch.device("cpu"), precision):
        assert [part.allow_tf32 for part in parts] == [allowed] * 2
        recorded = cuda_settings()
    assert [part.allow_tf32 for part in parts] == before
    name = "tf32" if allowed else "fp32"
    assert recorded["matmul"] == recorded["cudnn"] == name and "math" in str(recorded["sdpa"])


def test_tf32_is_fp32_on_cpu() -> None:
    wide, narrow = training(0), training(0, precision="tf32")
    train([wide])
    train([narrow])
    assert same(state_of(wide), state_of(narrow))
    assert engine_or_fallback("batch_last", training(0, precision="tf32"))[0] == "batch_last"
