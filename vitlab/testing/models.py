"""Whole models, and the schemes of their initial values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitlab.geometry import DataInfo
from vitlab.registry import Resolved, slot
from vitlab.testing.expect import during, expect

B = 3
DATA = DataInfo(image=(32, 32), channels=3, classes=5)


def check_scheme(who: str, choice: Resolved) -> None:
    """Draws are a function of the seed and the name, and leave nothing unset."""
    scheme: Any = slot(choice.slot).build(choice)
    for kind, name, shape in (
        ("linear", "blocks.0.attn.qkv.weight", (48, 16)),
        ("linear_bias", "blocks.0.mlp.fc1.bias", (64,)),
        ("conv", "patch_embed.proj.weight", (16, 3, 4, 4)),
        ("conv_bias", "patch_embed.proj.bias", (16,)),
        ("token", "cls_token", (1, 1, 16)),
        ("position", "pos_embed", (1, 17, 16)),
    ):
        drawn = []
        for seed in (0, 0, 1):
            x = torch.full(shape, torch.nan)
            with during(f"{who} draws {name}", Exception):
                scheme.draw(x, name, kind, 16, seed)
            drawn.append(x)
        expect(bool(drawn[0].isfinite().all()), f"{who} leaves values of {name} unset or not finite")
        expect(torch.equal(drawn[0], drawn[1]), f"{who} draws {name} otherwise a second time under the same seed")
        constant = bool((drawn[0] == drawn[0].flatten()[0]).all())
        expect(constant or not torch.equal(drawn[0], drawn[2]), f"{who} draws {name} the same under every seed")


def check_model(who: str, choice: Resolved) -> None:
    """It builds without memory, begins as its seed says, learns everywhere, and comes back from timm's names."""
    reason = choice.component.incompatibility(DATA, choice.options)  # type: ignore[attr-defined]
    if reason is not None:
        expect(bool(reason.strip()), f"{who}: incompatibility gives a reason in words, or None")
        return
    with during(f"{who}: built and run on the meta device, as a plan is checked", Exception), torch.device("meta"):
        shape = _logits(_model(choice), torch.zeros(B, DATA.channels, *DATA.image)).shape
    expect(shape[:2] == (B, DATA.classes), f"{who}: logits have shape {tuple(shape)}; expected {(B, DATA.classes)}")
    first, second = _model(choice), _model(choice)
    for model in (first, second):
        model.initialise(0)
    expect(_same(first.state_dict(), second.state_dict()), f"{who}: initialise(seed) is not a function of the seed")
    second.initialise(1)
    drawn = any(len(parameter.unique()) > 1 for parameter in first.parameters())  # a convex model may begin at zero
    apart = not _same(first.state_dict(), second.state_dict())
    expect(apart or not drawn, f"{who}: initialise draws the same under every seed")
    x = torch.randn(B, DATA.channels, *DATA.image, generator=torch.Generator().manual_seed(0))
    with during(f"{who}: forward and backward", Exception):
        logits = _logits(first, x)
        torch.autograd.backward(logits.square().sum())
    expect(bool(logits.isfinite().all()), f"{who}: logits are not finite")
    for name, parameter in first.named_parameters():
        expect(parameter.grad is not None, f"{who}: parameter {name} receives no gradient")
        expect(first.layer_of(name) >= 0, f"{who}: layer_of({name}) is below 0")
    unknown = first.no_weight_decay() - {name for name, _ in first.named_parameters()}
    expect(not unknown, f"{who}: no_weight_decay names what is no parameter: {', '.join(sorted(unknown))}")
    with during(f"{who}: its state is converted to the canonical form and back", Exception):
        back = second.from_canonical(second.to_canonical(second.state_dict()))
    expect(_same(back, second.state_dict()), f"{who}: from_canonical(to_canonical(state)) is not the state")


def _model(choice: Resolved) -> Any:
    return slot("model").build(choice, DATA)


def _logits(model: Any, x: Tensor) -> Tensor:
    views: dict[str, Tensor] = model.views(model(x))
    return views[""]


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
