"""Tests of optimizers and schedules against torch and timm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import OptionError
from vitlab.geometry import DataInfo
from vitlab.registry import slot
from vitlab.training.optim import group_by_decay, set_learning_rates, split_for_layer_decay, supports_fused

torchvision()  # timm imports torchvision, whose import may need a workaround
import timm  # noqa: E402
from timm.optim import param_groups_layer_decay, param_groups_weight_decay  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402

STEPS = 40


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = (torch.randn(8, n, generator=g, dtype=torch.float64) for n in (5, 3))
        optimizer.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


PEERS: list[tuple[dict[str, Any], Any]] = [
    (
        {"type": "adamw", "lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3},
        lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, foreach=False),
    ),
    (
        {"type": "adam", "lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3},
        lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, foreach=False),
    ),
    (
        {"type": "sgd", "lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.3},
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.7, nesterov=True, foreach=False),
    ),
]


@pytest.mark.parametrize(
    ("choice", "peer"), PEERS, ids=lambda value: value.get("type") if isinstance(value, dict) else ""
)
def test_optimizers_equal_unfused_torch(choice: dict[str, Any], peer: Any) -> None:
    ours, theirs = model().double(), model().double()
    component = slot("optimizer").build(choice)
    optimizer = component.build(group_by_decay(ours, component.weight_decay))
    decay = [p for p in theirs.parameters() if p.ndim > 1]
    rest = [p for p in theirs.parameters() if p.ndim <= 1]
    reference = peer([{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.3}])
    start = [p.detach().clone() for p in theirs.parameters()]
    actual, expected = trained(ours, optimizer), trained(theirs, reference)
    for mine, other, before in zip(actual, expected, start, strict=True):
        assert not torch.equal(other, before)
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("choice", "peer"), [("adamw", "AdamW"), ("adam", "Adam"), ("sgd", "SGD")])
def test_optimizers_equal_torch_bitwise(choice: str, peer: str) -> None:
    ours, theirs = model().double(), model().double()
    component = slot("optimizer").build(choice)
    optimizer = component.build(group_by_decay(ours, component.weight_decay))
    momentum = {"momentum": component.momentum} if choice == "sgd" else {}
    groups = group_by_decay(theirs, component.weight_decay)
    reference = getattr(torch.optim, peer)(groups, lr=component.lr, fused=True, **momentum)
    for mine, other in zip(trained(ours, optimizer), trained(theirs, reference), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("choice", ["adamw", "adam", "sgd"])
def test_update_is_one_kernel(choice: str) -> None:
    component = slot("optimizer").build(choice)
    groups = group_by_decay(model(), component.weight_decay)
    assert supports_fused(groups)
    assert all(group["fused"] for group in component.build(groups).param_groups)
    assert not supports_fused(group_by_decay(model().to("meta"), 0.0))


def test_weight_decay_exempts_same_parameters_as_timm() -> None:
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "reg_tokens": 2}
    net = timm.models.VisionTransformer(**options, num_classes=3)
    declared = net.no_weight_decay()
    ours = {
        group["weight_decay"]: {name for name, _ in group["params"]} for group in group_by_decay(net, 0.1, declared)
    }
    names = {id(p): name for name, p in net.named_parameters()}
    theirs = {
        group["weight_decay"]: {names[id(p)] for p in group["params"]}
        for group in param_groups_weight_decay(net, 0.1, no_weight_decay_list=declared)
    }
    assert ours == theirs
    assert {"pos_embed", "cls_token", "reg_token", "norm.weight", "head.bias"} <= ours[0.0]


def test_vit_exempts_same_parameters_as_timm() -> None:
    data = DataInfo(image=(16, 16), channels=3, classes=3)
    net = slot("model").build(
        {"type": "vit", "patch_size": 8, "dim": 16, "depth": 2, "heads": 2, "registers": 2, "attention": "split"}, data
    )
    groups = group_by_decay(net, 0.1, net.no_weight_decay())
    spared = {name for name, _ in groups[0]["params"]}
    assert {"cls_token", "reg_token", "position.pos_embed", "blocks.0.attn.q.bias", "norm.weight"} <= spared
    decaying = {name for name, _ in groups[1]["params"]}
    assert {"blocks.0.attn.q.weight", "head.fc.weight", "patch_embed.proj.weight"} <= decaying
    assert spared | decaying == {name for name, _ in net.named_parameters()}


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    net[0].requires_grad_(False)
    assert {name for group in group_by_decay(net, 0.1) for name, _ in group["params"]} == {
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    }


def test_options_out_of_bounds_are_refused() -> None:
    for choice in (
        {"type": "adamw", "lr": 0},
        {"type": "adamw", "betas": [0.9, 1.0]},
        {"type": "sgd", "weight_decay": -1},
        {"type": "muon", "ns_steps": 0},
        {"type": "adafactor", "beta2_decay": 0.8},
        {"type": "cosine", "warmup": 1.5},
        {"type": "wsd", "shape": "sqrt"},
        {"type": "step", "at": [1.5]},
    ):
        with pytest.raises(OptionError):
            slot("schedule" if choice["type"] in ("cosine", "wsd", "step") else "optimizer").resolve_choice(choice)


# -- schedules --------------------------------------------------------------------------------------------------------


def factors(choice: str | dict[str, Any], steps: int = STEPS) -> list[float]:
    built = slot("schedule").build(choice)
    return [built.factor(step, steps) for step in range(steps)]


def torchs(make: Any) -> list[float]:
    """Return the factors of a scheduler of torch, for a base rate of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_equals_torch(final: float) -> None:
    expected = torchs(lambda opt: lr_scheduler.CosineAnnealingLR(opt, STEPS, eta_min=final))
    assert factors({"type": "cosine", "final": final}) == pytest.approx(expected, abs=1e-12)


def test_warmup_then_cosine_equals_torch() -> None:
    warm = 8
    expected = torchs(
        lambda opt: lr_scheduler.SequentialLR(
            opt,
            [
                lr_scheduler.LinearLR(opt, start_factor=1 / (warm + 1), total_iters=warm),
                lr_scheduler.CosineAnnealingLR(opt, STEPS - warm),
            ],
            [warm],
        )
    )
    rates = factors({"type": "cosine", "warmup": warm / STEPS})
    assert rates == pytest.approx(expected, abs=1e-12)
    assert max(rates) == rates[warm] == 1.0


def test_cosine_equals_timm() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = CosineLRScheduler(optimizer, t_initial=STEPS, lr_min=0.05, t_in_epochs=False)
    expected = []
    for step in range(STEPS):
        peer.step_update(step)
        expected.append(optimizer.param_groups[0]["lr"])
    assert factors({"type": "cosine", "final": 0.05}) == pytest.approx(expected, abs=1e-12)


def test_linear_equals_torch() -> None:
    expected = torchs(lambda opt: lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.2, total_iters=STEPS))
    assert factors({"type": "linear", "final": 0.2}) == pytest.approx(expected, abs=1e-12)


def test_constant_after_warmup() -> None:
    assert factors({"type": "constant", "warmup": 0.1}, 20) == pytest.approx([1 / 3, 2 / 3] + [1.0] * 18)
    assert factors("constant") == [1.0] * STEPS


def test_polynomial_equals_torch() -> None:
    expected = torchs(lambda opt: lr_scheduler.PolynomialLR(opt, STEPS, power=0.7))
    assert factors({"type": "polynomial", "power": 0.7}) == pytest.approx(expected, abs=1e-12)
    line = factors({"type": "linear", "final": 0.2})
    assert factors({"type": "polynomial", "power": 1.0, "final": 0.2}) == pytest.approx(line, abs=1e-12)


def test_step_equals_torch() -> None:
    expected = torchs(lambda opt: lr_scheduler.MultiStepLR(opt, [12, 30], gamma=0.2))
    assert factors({"type": "step", "at": [0.3, 0.75], "gamma": 0.2}) == pytest.approx(expected, abs=1e-12)


def test_first_step_of_a_short_run_passes_no_milestone() -> None:
    assert factors({"type": "step"}, 1) == [1.0]
    assert factors({"type": "step", "at": [0.1, 0.5]}, 3) == pytest.approx([1.0, 0.1, 0.01])
    assert factors({"type": "step", "at": [0.0, 0.5]}, 2) == pytest.approx([0.1, 0.01]), "0 is the start"


@pytest.mark.parametrize(
    ("shape", "fall"),
    [
        ("1-sqrt", lambda x: 1 - x**0.5),  # arXiv:2405.18392, equation 2
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: 0.5 * (1 + math.cos(math.pi * x))),
    ],
)
def test_wsd_is_constant_between_warmup_and_cooldown(shape: str, fall: Any) -> None:
    choice = {"type": "wsd", "warmup": 0.1, "cooldown": 0.25, "shape": shape, "final": 0.1}
    expected = [(step + 1) / 5 for step in range(4)] + [1.0] * 26
    expected += [0.1 + 0.9 * fall(step / 10) for step in range(10)]
    assert factors(choice) == pytest.approx(expected, abs=1e-12)
    assert factors({"type": "wsd", "cooldown": 0.0}) == [1.0] * STEPS
    assert all(0 < value <= 1 for value in factors({"type": "wsd", "warmup": 0.9, "cooldown": 0.9}))


def test_run_may_be_all_warmup_or_one_step() -> None:
    assert factors({"type": "cosine", "warmup": 1.0}, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factors("cosine", 1) == [1.0]
    assert all(math.isfinite(value) for value in factors({"type": "linear", "warmup": 1.0}, 1))


def test_every_group_gets_scheduled_rate() -> None:
    component = slot("optimizer").build({"type": "adamw", "lr": 0.5})
    built = component.build(group_by_decay(model(), component.weight_decay))
    set_learning_rates(built, 0.25)
    assert [group["lr"] for group in built.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in built.param_groups] == [0.0, 0.05]


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "factor"), [(["class"], 0.75), (["class", "distillation"], 0.6)])
def test_layer_decay_rates_equal_timm(prefix: list[str], factor: float) -> None:
    sizes = {"patch_size": 4, "depth": 3}
    options = {"type": "vit", **sizes, "dim": 12, "heads": 2, "position": "learned", "prefix": prefix}
    distilled = "distillation" in prefix
    if distilled:
        options["head"] = "distilled"
    ours = slot("model").build(options, DataInfo(image=(8, 8), channels=3, classes=5))
    model_name = "deit_tiny_distilled_patch16_224" if distilled else "vit_tiny_patch16_224"
    theirs = timm.create_model(model_name, img_size=8, **sizes, embed_dim=12, num_heads=2, num_classes=5)
    expected = {}
    names = {id(p): name for name, p in theirs.named_parameters()}
    no_decay = [name for name in theirs.no_weight_decay() if name in dict(theirs.named_parameters())]
    for group in param_groups_layer_decay(theirs, 0.3, no_weight_decay_list=no_decay, layer_decay=factor):
        for p in group["params"]:
            expected[names[id(p)]] = (pytest.approx(group["lr_scale"]), group["weight_decay"])
    layers = {name: ours.layer_of(name) for name, _ in ours.named_parameters()}
    rates = {}
    for group in split_for_layer_decay(group_by_decay(ours, 0.3, ours.no_weight_decay()), layers, factor):
        for name, _ in group["params"]:
            rates[name.replace("position.pos_embed", "pos_embed")] = (group["lr_scale"], group["weight_decay"])
    heads = {name for name in rates if name.startswith("head")}
    assert len(heads) == (4 if distilled else 2) and all(rates.pop(name)[0] == 1 for name in heads)
    assert all(expected.pop(name)[0] == 1 for name in list(expected) if name.startswith("head"))
    assert rates == expected
    assert rates["pos_embed"][0] == pytest.approx(factor**4) and rates["blocks.2.mlp.fc1.weight"][0] == factor


def test_layer_rate_is_share_of_optimizer_rate() -> None:
    net = model().double()
    layers = {name: int(name[0]) for name, _ in net.named_parameters()}
    component = slot("optimizer").build({"type": "sgd", "lr": 0.1, "momentum": 0.0})
    optimizer = component.build(split_for_layer_decay(group_by_decay(net, 0.0), layers, 0.5))
    set_learning_rates(optimizer, 0.4)
    before = [p.detach().clone() for p in net.parameters()]
    sum(p.sum() for p in net.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    scales = [0.5**3, 0.5**3, 0.5**2, 0.5**2, 1, 1]
    for p, was, scale in zip(net.parameters(), before, scales, strict=True):
        torch.testing.assert_close(was - p, torch.full_like(p, 0.4 * scale), rtol=1e-12, atol=1e-15)
    again = component.build(split_for_layer_decay(group_by_decay(net, 0.0), layers, 0.5))
    again.load_state_dict(optimizer.state_dict())
    assert [group["lr_scale"] for group in again.param_groups] == [0.125, 0.25, 1, 0.125, 1][: len(again.param_groups)]
