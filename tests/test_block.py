"""Tests of blocks: their formulas, their place in the model, and where other forms than the default are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.engines.batch_last import incompatibility
from vitlab.explain.capture import capture
from vitlab.geometry import DataInfo
from vitlab.models import ViT, model
from vitlab.registry import slot

DATA = DataInfo(image=(8, 12), channels=3, classes=5)
SMALL = {"type": "vit", "dim": 16, "depth": 2, "heads": 2, "patch_size": 4}
CPU = torch.device("cpu")


def build(**options: Any) -> ViT:
    built = model.build({**SMALL, **options}, DATA)
    assert isinstance(built, ViT)
    built.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return built.double().eval()


def tokens() -> Tensor:
    return torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def norm(of: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normed: Tensor = centred / (centred.square().mean(-1, keepdim=True) + of.eps).sqrt() * of.weight + of.bias
    return normed


def branches(block: Any, x: Tensor) -> tuple[Any, Any]:
    return lambda y: block.attn(y, None, None), block.mlp


def test_postnorm_equals_formula() -> None:
    block: Any = build(block="postnorm", layer_scale=0.5).blocks[0]
    x = tokens()
    attend, perceive = branches(block, x)
    y = norm(block.norm1, x + block.ls1.gamma * attend(x))
    y = norm(block.norm2, y + block.ls2.gamma * perceive(y))
    torch.testing.assert_close(block(x, None, None), y, rtol=1e-10, atol=1e-10)


def test_sandwich_equals_formula() -> None:
    block: Any = build(block="sandwich", layer_scale=0.5).blocks[0]
    x = tokens()
    attend, perceive = branches(block, x)
    y = x + block.ls1.gamma * norm(block.post_norm1, attend(norm(block.norm1, x)))
    y = y + block.ls2.gamma * norm(block.post_norm2, perceive(norm(block.norm2, y)))
    torch.testing.assert_close(block(x, None, None), y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in slot("block").names() if name != "prenorm"])
def test_other_blocks_fit_the_model_and_are_refused_where_they_are_unknown(name: str) -> None:
    built = build(block=name, blocks={"1": {"block": name, "norm": "rmsnorm"}}, drop_path=0.2)
    assert f"blocks.0 is a {type(built.blocks[0]).__name__}" in (incompatibility(built, "fp64", CPU) or "")
    resolved = model.resolve({**SMALL, "block": name})
    work = ViT.work(DATA, resolved.options)
    assert work is not None and work.products is None
    assert [built.layer_of(f"blocks.{i}.norm1.weight") for i in range(2)] == [1, 2]
    captured = capture(built, torch.randn(1, 3, 8, 12, dtype=torch.float64))
    assert len(captured.maps_LBHTT) == 2 and [tuple(x.shape) for x in captured.tokens_LBTD] == [(1, 7, 16)] * 3


def test_default_block_leaves_keys_of_earlier_trials() -> None:
    assert "block" not in model.resolve(SMALL).hashed()
    assert model.resolve({**SMALL, "block": {"type": "prenorm"}}).hashed() == model.resolve(SMALL).hashed()
    ranges = {"0": {"norm": "rmsnorm"}}
    hashed = model.resolve({**SMALL, "blocks": ranges}).hashed()["blocks"]["0"]
    assert hashed.keys() == {"attention", "mlp", "norm"}
    assert model.resolve({**SMALL, "block": "postnorm"}).hashed()["block"] == {"type": "postnorm"}


def test_blocks_differ_by_range() -> None:
    built = build(blocks={"1": {"block": "parallel"}})
    assert [type(block).__name__ for block in built.blocks] == ["PreNorm", "Parallel"]
    assert not hasattr(built.blocks[1], "norm2") and built(torch.zeros(1, 3, 8, 12).double()).logits.shape == (1, 5)
