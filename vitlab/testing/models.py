"""Contract tests of whole models and of initialisation schemes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitlab.geometry import DataInfo
from vitlab.registry import ResolvedChoice, slot
from vitlab.testing.assertions import about, checked_reason, equal_states, on_another_device

B = 3
DATA = DataInfo(image=(32, 32), channels=3, classes=5)


def check_scheme(choice: ResolvedChoice) -> None:
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
            with about(f"draws {name}"):
                scheme.draw(x, name, kind, 16, seed)
            draws.append(x)
        assert draws[0].isfinite().all(), f"leaves values of {name} unset or not finite"
        assert torch.equal(draws[0], draws[1]), f"draws {name} differently in two calls under one seed"
        constant = bool((draws[0] == draws[0].flatten()[0]).all())
        assert constant or not torch.equal(draws[0], draws[2]), f"draws {name} the same under every seed"


def check_model(choice: ResolvedChoice) -> None:
    """Check a model's meta build, seeded initialisation, gradients and round trip through the canonical form."""
    if checked_reason(choice.component.incompatibility(DATA, choice.options)) is not None:
        return
    with about("built and run on the meta device, as a plan is checked"), torch.device("meta"):
        shape = _logits(_model(choice), torch.zeros(B, DATA.channels, *DATA.image)).shape
    assert shape[:2] == (B, DATA.classes), f"logits have shape {tuple(shape)}; expected {(B, DATA.classes)}"
    with on_another_device():
        _logits(_model(choice).to("meta"), torch.zeros(B, DATA.channels, *DATA.image, device="meta"))
    # Two instances: initialise must not depend on what the constructor drew.
    first, second = _model(choice), _model(choice)
    for model in (first, second):
        model.initialise(0)
    assert equal_states(first.state_dict(), second.state_dict()), "initialise(seed) is not a function of the seed"
    second.initialise(1)
    is_random = any(len(parameter.unique()) > 1 for parameter in first.parameters())  # a convex model may start at zero
    differs = not equal_states(first.state_dict(), second.state_dict())
    assert differs or not is_random, "initialise draws the same under every seed"
    x = torch.randn(B, DATA.channels, *DATA.image, generator=torch.Generator().manual_seed(0))
    with about("forward and backward"):
        logits = _logits(first, x)
        torch.autograd.backward(logits.square().sum())
    assert logits.isfinite().all(), "logits are not finite"
    for name, parameter in first.named_parameters():
        assert parameter.grad is not None, f"parameter {name} receives no gradient"
        assert first.layer_of(name) >= 0, f"layer_of({name}) is below 0"
    unknown = first.no_weight_decay() - {name for name, _ in first.named_parameters()}
    assert not unknown, f"no_weight_decay returns names of no parameters: {', '.join(sorted(unknown))}"
    with about("its state is converted to the canonical form and back"):
        restored = second.from_canonical(second.to_canonical(second.state_dict()))
    assert equal_states(restored, second.state_dict()), "from_canonical(to_canonical(state)) is not the state"


def _model(choice: ResolvedChoice) -> Any:
    return slot("model").build(choice, DATA)


def _logits(model: Any, x: Tensor) -> Tensor:
    views: dict[str, Tensor] = model.logits_by_head(model(x))
    return views[""]
