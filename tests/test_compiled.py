"""Tests of the engine ``compiled`` and of the dry run for GPUs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from job_helpers import run_together, run_trial
from test_engines import SETTINGS, results, state_of, training, trial, work
from torch import Tensor

from vitlab import noise
from vitlab.engines import engine_or_fallback
from vitlab.engines.base import Loop, train
from vitlab.engines.compiled import Compiled, CompiledVmap
from vitlab.planning.engine_choice import choose_engine, group_trials
from vitlab.planning.values import Planned
from vitlab.registry import slot

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "count"), [(Compiled, 1), (CompiledVmap, 2)])
def test_compiled_is_one_graph_and_equals_loop(
    engine: type[Compiled] | type[CompiledVmap], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two epochs of four steps, whose draws have different keys.

    In float64 sums in another order differ by 1e-16 times their number of terms; Adam divides by the root of the second
    moment, so differences in gradients of 1e-14 may become 1e-10 in a weight.
    """
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("vitlab.engines.compiled.BACKEND", backend)
    how: dict[str, Any] = {"precision": "fp64", "model": {"depth": 1}, "steps": 8, "mix": {"mixup": 0.2}}
    before, after = [[training(seed, **how) for seed in range(count)] for _ in range(2)]
    expected, results = train(before, Loop), train(after, engine)
    assert after[0].steps > after[0].feed.steps_per_epoch(after[0].spec.batch_size)
    assert len(graphs) == 1
    for looped, compiled, reference, result in zip(before, after, expected, results, strict=True):
        for name, weight in state_of(looped).items():
            torch.testing.assert_close(state_of(compiled)[name], weight, rtol=1e-8, atol=1e-10)
        assert result is not None and reference is not None
        assert result.metrics == pytest.approx(reference.metrics, rel=1e-8)


def test_compiled_vmap_falls_back_to_vmap_and_loop() -> None:
    assert engine_or_fallback("compiled_vmap", training())[0] == "compiled_vmap"
    assert engine_or_fallback("compiled_vmap", training(precision="fp64"))[0] == "vmap"
    assert engine_or_fallback("compiled_vmap", training(model={"attention": "sdpa"}))[0] == "loop"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch warns of its own code while it compiles
@pytest.mark.parametrize("stacked", [False, True])
def test_generated_code_drops_the_same_values(stacked: bool) -> None:
    """Inductor once took the number of a draw for an index, and widened keys inside of vmap, and so drew others."""

    def drop(x_BN: Tensor, key: Tensor, sample_B: Tensor) -> Tensor:
        return x_BN * (noise.uniform(noise.fold(key, 5), sample_B, x_BN.shape[1]) >= 0.1)

    function = torch.func.vmap(drop) if stacked else drop
    keys = torch.tensor([noise.key(seed, "dropout") for seed in range(2)])
    inputs = torch.ones(2, 16, 60), keys, torch.arange(32).view(2, 16)
    inputs = inputs if stacked else tuple(each[0] for each in inputs)
    expected = function(*inputs)
    assert 0.05 < (expected == 0).float().mean() < 0.15
    assert torch.equal(torch.compile(function, fullgraph=True, dynamic=False)(*inputs), expected)


@pytest.mark.slow
def test_part_that_breaks_graph_is_trained_by_loop_with_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = slot("mlp").get("gelu")
    forward = mlp.forward

    def breaking(self: Any, x_BTD: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return forward(self, x_BTD)  # type: ignore[no-any-return]

    monkeypatch.setattr("vitlab.engines.compiled.BACKEND", "eager")
    monkeypatch.setattr(mlp, "forward", breaking)
    items, looped = work(tmp_path / "compiled", trial(0)), work(tmp_path / "loop", trial(0))
    run_together(items, replace(SETTINGS, engine="compiled"))
    run_trial(*looped[0], SETTINGS)
    assert results(items)[0].outcome == results(looped)[0].outcome
    assert results(items)[0].circumstances.numerics["engine"] == "loop"
    starts = [event.body for event in items[0][1].events()[0] if event.kind == "start"]
    assert starts[-1]["note"].startswith("trained by engine loop, for engine compiled failed: Unsupported")


def test_compiled_trains_one_trial_at_a_time() -> None:
    planned = [Planned("a", seed, trial(seed, ema={"decay": 0.9})) for seed in range(3)]
    assert choose_engine(planned[0].trial, "compiled", lambda _: None, {}).engine == "compiled"
    groups = group_trials(planned, 1, "compiled", lambda _: None)
    assert [(engine, len(group)) for engine, group in groups] == [("compiled", 1)] * 3
    engine, _, note = engine_or_fallback("compiled", training(precision="fp64"))
    assert engine == "loop" and "does not support precision fp64" in note


FAULTS = """
import sys
sys.path.insert(0, {tools!r})
import torch
import gpu_dry_run
from gpu_dry_run import IMAGES, Arm, Watch, step_of
from vitlab.components.mlp import GeluMLP
from vitlab.engines import vmap
from vitlab.training import loop
arm = Arm("base", {{}}, {{}})
print([isinstance(step_of(arm, engine), Watch) for engine in ("loop", "vmap")])
picking = ["color_jitter", "rand_augment", "rand_augment_timm", "three_augment"]
augmented = Arm("augment", {{}}, {{"precision": "fp16"}}, {{**IMAGES, "channels": 3, "augment": picking}})
print(isinstance(step_of(augmented, "loop"), Watch))
print(step_of(Arm("optimizer: adafactor", {{}}, {{"optimizer": "adafactor"}}), "loop").reads)
gpu_dry_run.READ_BACKS["base"] = "it does not"
print(step_of(arm, "loop"))
del gpu_dry_run.READ_BACKS["base"]
forward = GeluMLP.forward
for fault in (
    lambda x: x * x.abs().max().item(),
    lambda x: x if x.sum() > 0 else -x,
    lambda x: x + torch.zeros(x.shape[-1]),
    lambda x: x + x.detach().cpu().to(x.device),
):
    GeluMLP.forward = lambda self, x, fault=fault: fault(forward(self, x))
    print(step_of(arm, "loop"))
GeluMLP.forward = forward
gpu_dry_run.DEPTH, gpu_dry_run.TOGETHER = 2, 4
print(gpu_dry_run.at_depth(arm, "loop")[1], gpu_dry_run.together()[1])
loop.number_drop_paths = lambda model: []
vmap.enable_joint_batches = lambda feeds: None
print(gpu_dry_run.at_depth(arm, "loop")[1], gpu_dry_run.together()[1])
"""


@pytest.mark.slow
def test_dry_run_finds_faults_on_gpus() -> None:
    """In a process of its own, since the device that stands for a GPU cannot be removed."""
    done = warm.python(FAULTS.format(tools=str(HERE.parent / "tools")), HERE.parent, os.environ)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[True, True]", "True"]
    assert int(lines[2]) == 2 * 20  # two norms of each weight of a ViT with one block
    expected = [
        "nothing is read back; remove the arm from READ_BACKS",
        "_local_scalar_dense",
        "_local_scalar_dense",
        "on the same device",
        "from the device to the host",
    ]
    *found, within, without = lines[3:]
    for line, sign in zip(found, expected, strict=True):
        assert sign in line
    assert within == "True True", "drop path and augmentation are drawn together"
    assert without == "False False", "and are counted where they are not"
