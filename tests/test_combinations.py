"""Tests of all combinations of installed positions, attentions and poolings, plugins included.

A combination either works in full, or is refused beforehand with a reason.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.errors import OptionError
from vitlab.geometry import DataInfo
from vitlab.models import ViT, model
from vitlab.registry import listing, slot

TINY = {"dim": 16, "depth": 2, "heads": 2, "patch_size": 4, "prefix": ["class", "distillation"], "registers": 1}
BUILT_IN = {
    (name, entry.name)
    for name in ("position", "attention", "head")
    for entry in listing(name)
    if entry.origin.source == "vitlab"
}


def poolings() -> list[tuple[str, str | None]]:
    """Return every head, and the linear one with every pooling."""
    return [("linear", pool) for pool in ("cls", "gap", "map")] + [
        (name, None) for name in slot("head").names() if name != "linear"
    ]


def data_of(head: str) -> DataInfo:
    # Oblong on purpose: rows and columns must not be confused.
    return DataInfo(image=(8, 12), channels=3, classes=3, task=slot("head").get(head).task)


def options_of(position: str, attention: str, head: str, pool: str | None) -> dict[str, Any]:
    return {
        "type": "vit",
        **TINY,
        "position": position,
        "attention": attention,
        "head": head if pool is None else {"type": head, "pool": pool},
    }


def build(options: dict[str, Any], head: str, seed: int) -> ViT:
    built = model.build(options, data_of(head))
    assert isinstance(built, ViT)
    built.initialise(seed)
    return built


IMAGES = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))


@cache
def explicit(position: str, head: str, pool: str | None) -> Tensor:
    """Return the prediction with the explicit attention, which the other built-in ones must equal."""
    return prediction(build(options_of(position, "explicit", head, pool), head, seed=0))


@torch.no_grad()
def prediction(built: ViT) -> Tensor:
    return built.logits_by_head(built(IMAGES))[""]


@pytest.mark.parametrize(("head", "pool"), poolings(), ids=lambda value: str(value))
@pytest.mark.parametrize("attention", slot("attention").names())
@pytest.mark.parametrize("position", slot("position").names())
def test_combination_works_or_is_refused_with_reason(
    position: str, attention: str, head: str, pool: str | None
) -> None:
    options = options_of(position, attention, head, pool)
    native = {("position", position), ("attention", attention), ("head", head)} <= BUILT_IN
    reason = ViT.incompatibility(data_of(head), {name: value for name, value in options.items() if name != "type"})
    if reason is not None:
        assert not native, f"refused among the built-ins: {reason}"
        assert reason.strip()
        with pytest.raises(OptionError) as caught:
            model.build(options, data_of(head))
        assert reason in str(caught.value)
        return

    built = build(options, head, seed=0)
    logits = built.logits_by_head(built(IMAGES))[""]
    assert logits.shape[:2] == (2, 3)
    assert logits.isfinite().all()
    if native:
        torch.testing.assert_close(logits, explicit(position, head, pool), atol=1e-5, rtol=0)

    for narrow in (False, True):
        built.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            views = built.logits_by_head(built(IMAGES))
        torch.testing.assert_close(views[""].float(), logits, atol=0.005 if narrow else 0, rtol=0)
        sum(view.float().square().mean() for view in views.values()).backward()  # type: ignore[union-attr]
        for name, parameter in built.named_parameters():
            assert parameter.grad is not None or not native, name
            assert parameter.grad is None or parameter.grad.isfinite().all(), name

    state, expected = built.state_dict(), prediction(built)
    other = build(options, head, seed=1)
    assert not torch.equal(prediction(other), expected)
    canonical = other.from_canonical(built.to_canonical(state))
    assert canonical.keys() == state.keys()
    for through in (state, canonical):
        other.initialise(1)
        other.load_state_dict(through)
        assert torch.equal(prediction(other), expected)
