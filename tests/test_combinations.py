"""Tests of all pairs of installed positions, attentions and poolings, and of all pairs of parts of a block.

A combination either works in full, or is refused beforehand with a reason.  Plugins are included.  Pairs suffice: a
head reads only the tokens after the last block, and every reason for a refusal is about one part or two.  A pair that
works in any combination is tried in one that works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.errors import OptionError
from vitlab.geometry import DataInfo
from vitlab.models import ViT, model
from vitlab.registry import list_entries, slot

TINY = {"dim": 16, "depth": 2, "heads": 2, "patch_size": 4, "prefix": ["class", "distillation"], "registers": 1}
OTHER_FUNCTIONS = ("differential", "gated", "sigmoid")
"""Built-in attentions that compute another function than softmax attention; they are tried in pairs."""
BUILT_IN = {
    (name, entry.name)
    for name in ("position", "attention", "head")
    for entry in list_entries(name)
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


def covering(accepts: Callable[[dict[str, Any]], bool], **values: list[Any]) -> list[dict[str, Any]]:
    """Return rows in which every two values of different names occur together, chosen greedily.

    Two values that occur together in any accepted row do so in an accepted one that is returned.
    """

    def pairs(row: dict[str, Any]) -> set[tuple[Any, ...]]:
        return set(combinations([(name, row[name]) for name in values if name in row], 2))

    every = {
        pair
        for one, two in combinations(values, 2)
        for pair in product([(one, v) for v in values[one]], [(two, v) for v in values[two]])
    }
    rows = []
    missing = set(every)
    while missing:
        row = dict(min(missing))
        for name in values:
            if name not in row:
                row[name] = max(values[name], key=lambda v: len(missing & pairs({**row, name: v})))
        missing -= pairs(row)
        rows.append(row)

    missing = every.difference(*(pairs(row) for row in rows if accepts(row)))
    while missing:
        chosen = dict(pair := min(missing))
        candidates = [
            dict(zip(values, row, strict=True))
            for row in product(*([chosen[name]] if name in chosen else values[name] for name in values))
        ]
        candidates.sort(key=lambda row: len(missing & pairs(row)), reverse=True)
        accepted = next(filter(accepts, candidates), None)
        missing.remove(pair)
        if accepted is not None:
            missing -= pairs(accepted)
            rows.append(accepted)
    return rows


def test_covering_has_every_accepted_pair_in_accepted_row() -> None:
    values: dict[str, list[Any]] = {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1, 2], "d": [0, 1]}

    def accepts(row: dict[str, Any]) -> bool:
        return (row["a"] != 0 or row["b"] == 2) and (row["c"] != 0 or row["a"] == 0) and row["b"] + row["d"] != 1

    rows = covering(accepts, **values)
    every = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    works = 0
    for one, two in combinations(values, 2):
        for pair in product(values[one], values[two]):
            found = [accepts(row) for row in rows if (row[one], row[two]) == pair]
            expected = any(accepts(row) for row in every if (row[one], row[two]) == pair)
            assert found and any(found) == expected, (one, two, pair)
            works += expected
    assert works == 37 and len(rows) < len(every) / 2


def incompatibility(position: str, attention: str, head: str, pool: str | None) -> str | None:
    options = options_of(position, attention, head, pool)
    return ViT.incompatibility(data_of(head), {name: value for name, value in options.items() if name != "type"})


@pytest.mark.parametrize(
    "row",
    covering(
        lambda row: incompatibility(row["position"], row["attention"], *row["pooling"]) is None,
        position=slot("position").names(),
        attention=[name for name in slot("attention").names() if name not in OTHER_FUNCTIONS],
        pooling=poolings(),
    ),
    ids=lambda row: f"{row['position']}-{row['attention']}-{row['pooling'][0]}-{row['pooling'][1]}",
)
def test_combination_works_or_is_refused_with_reason(row: dict[str, Any]) -> None:
    position, attention, (head, pool) = row["position"], row["attention"], row["pooling"]
    options = options_of(position, attention, head, pool)
    native = {("position", position), ("attention", attention), ("head", head)} <= BUILT_IN
    reason = incompatibility(position, attention, head, pool)
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
        other.load_state_dict(through)
        assert torch.equal(prediction(other), expected)
        with torch.no_grad():
            for value in other.state_dict().values():
                if value.is_floating_point():
                    value.fill_(torch.nan)


def refuses(row: dict[str, Any]) -> bool:
    """Return whether the attention does not support the position or the block."""
    attention, passes = slot("attention").get(row["attention"]), slot("block").get(row["block"]).passes
    refused = {
        "rope2d": not attention.takes_rotation,
        "relative_bias": not attention.takes_bias,
    }.get(row["position"], False)
    refused |= passes == "values" and not attention.mixes_values
    refused |= passes == "merged" and not (attention.mixes_values and attention.counts_keys)
    return bool(refused | (passes == "merged" and row["position"] != "learned"))


@pytest.mark.parametrize(
    "row",
    covering(
        lambda row: not refuses(row),
        block=slot("block").names(),
        attention=[name for name in slot("attention").names() if name not in ("explicit", "sdpa", "split")],
        mlp=slot("mlp").names(),
        norm=slot("norm").names(),
        position=["learned", "rope2d", "relative_bias"],
    ),
    ids=lambda row: "-".join(row.values()),
)
def test_pair_of_parts_of_a_block_works_or_is_refused_with_reason(row: dict[str, Any]) -> None:
    options = {"type": "vit", **TINY, "layer_scale": 0.5, "drop_path": 0.2, **row}
    reason = ViT.incompatibility(data_of("linear"), {name: value for name, value in options.items() if name != "type"})
    assert (reason is not None) == refuses(row)
    if reason is not None:
        with pytest.raises(OptionError) as caught:
            model.build(options, data_of("linear"))
        assert reason in str(caught.value)
        return
    built = build(options, "linear", seed=0)
    built(IMAGES).logits.square().mean().backward()
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    built.eval()
    expected, other = prediction(built), build(options, "linear", seed=1).eval()
    assert expected.isfinite().all() and not torch.equal(prediction(other), expected)
    other.load_state_dict(other.from_canonical(built.to_canonical(built.state_dict())))
    assert torch.equal(prediction(other), expected)
