"""Contract tests of whole models and of initialisation schemes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitlab.geometry import DataInfo
from vitlab.registry import ResolvedChoice, slot
from vitlab.testing.assertions import during, expect, on_another_device

B = 3
DATA = DataInfo(image=(32, 32), channels=3, classes=5)


def check_scheme(who: str, choice: ResolvedChoice) -> None:
    """Check that draws depend only on the seed and the parameter's name, and set every value."""
    scheme: Any = slot(choice.slot).build(choice)
    for kind, name, shape in (
        ("linear", "blocks.0.attn.qkv.weight", (48, 16)),
        ("linear_bias", "blocks.0.mlp.fc1.bias", (64,)),
        ("conv", "patch_embed.proj.weight", (16, 3, 4, 4)),
        ("conv_bias", "patch_embed.proj.bias", (16,)),
        ("token", "cls_token", (1, 1, 16)),
        ("position", "pos_embed", (1, 17, 16)),
    ):
        draws = []
        for seed in (0, 0, 1):
            x = torch.full(shape, torch.nan)
            with during(f"{who} draws {name}", Exception):
                scheme.draw(x, name, kind, 16, seed)
            draws.append(x)
        expect(bool(draws[0].isfinite().all()), f"{who} leaves values of {name} unset or not finite")
        expect(torch.equal(draws[0], draws[1]), f"{who} draws {name} differently in two calls under one seed")
        constant = bool((draws[0] == draws[0].flatten()[0]).all())
        expect(constant or not torch.equal(draws[0], draws[2]), f"{who} draws {name} the same under every seed")


def check_model(who: str, choice: ResolvedChoice) -> None:
    """Check a model's meta build, seeded initialisation, gradients and round trip through the canonical form."""
    reason = choice.component.incompatibility(DATA, choice.options)
    if reason is not None:
        expect(bool(reason.strip()), f"{who}: incompatibility must return a sentence or None")
        return
    with during(f"{who}: built and run on the meta device, as a plan is checked", Exception), torch.device("meta"):
        shape = _logits(_model(choice), torch.zeros(B, DATA.channels, *DATA.image)).shape
    expect(shape[:2] == (B, DATA.classes), f"{who}: logits have shape {tuple(shape)}; expected {(B, DATA.classes)}")
    with on_another_device(who):
        _logits(_model(choice).to("meta"), torch.zeros(B, DATA.channels, *DATA.image, device="meta"))
    first, second = _model(choice), _model(choice)
    for model in (first, second):
        model.initialise(0)
    expect(_same(first.state_dict(), second.state_dict()), f"{who}: initialise(seed) is not a function of the seed")
    second.initialise(1)
    is_random = any(len(parameter.unique()) > 1 for parameter in first.parameters())  # a convex model may start at zero
    differs = not _same(first.state_dict(), second.state_dict())
    expect(differs or not is_random, f"{who}: initialise draws the same under every seed")
    x = torch.randn(B, DATA.channels, *DATA.image, generator=torch.Generator().manual_seed(0))
    with during(f"{who}: forward and backward", Exception):
        logits = _logits(first, x)
        torch.autograd.backward(logits.square().sum())
    expect(bool(logits.isfinite().all()), f"{who}: logits are not finite")
    for name, parameter in first.named_parameters():
        expect(parameter.grad is not None, f"{who}: parameter {name} receives no gradient")
        expect(first.layer_of(name) >= 0, f"{who}: layer_of({name}) is below 0")
    unknown = first.no_weight_decay() - {name for name, _ in first.named_parameters()}
    expect(not unknown, f"{who}: no_weight_decay returns names of no parameters: {', '.join(sorted(unknown))}")
    with during(f"{who}: its state is converted to the canonical form and back", Exception):
        restored = second.from_canonical(second.to_canonical(second.state_dict()))
    expect(_same(restored, second.state_dict()), f"{who}: from_canonical(to_canonical(state)) is not the state")


def _model(choice: ResolvedChoice) -> Any:
    return slot("model").build(choice, DATA)


def _logits(model: Any, x: Tensor) -> Tensor:
    views: dict[str, Tensor] = model.logits_by_head(model(x))
    return views[""]


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
