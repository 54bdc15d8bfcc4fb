"""Tests of both components against the paper's formulas, pixel by pixel and in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vitlab_spt_lsa", reason="pip install -e plugins/vitlab-spt-lsa")

from vitlab import lab
from vitlab.models import ViT
from vitlab.plugin import DataInfo, Geometry, check_component, slot

STUDY = Path(__file__).parents[1] / "study.yaml"
DATA = DataInfo(image=(8, 12), channels=3, classes=3)


def geometry(patch: tuple[int, int] = (4, 2)) -> Geometry:
    prefix = ("class",)
    return Geometry(image=(8, 12), channels=3, patch=patch, prefix=prefix, dim=16, depth=2, heads=2, classes=3)


def built(slot_name: str, name: str) -> Any:
    torch.manual_seed(0)
    return slot(slot_name).build(name, geometry()).double()


@pytest.mark.parametrize(("slot_name", "name"), [("patch", "shifted"), ("attention", "locality")])
def test_contract(slot_name: str, name: str) -> None:
    check_component(slot_name, name)


def test_shifted_equals_the_formula() -> None:
    module, x = built("patch", "shifted"), torch.randn(2, 3, 8, 12).double()
    torch.nn.init.normal_(module.norm.weight), torch.nn.init.normal_(module.norm.bias)

    def pixel(image: int, row: int, column: int) -> Tensor:
        inside = 0 <= row < 8 and 0 <= column < 12
        return x[image, :, row, column] if inside else torch.zeros(3).double()

    tokens = module(x)
    assert tokens.shape == (2, 12, 16)
    shifts = [(0, 0), (2, 1), (2, -1), (-2, 1), (-2, -1)]  # half a patch of 4 by 2 pixels
    weight = module.proj.weight.reshape(16, 5, 3, 4, 2)
    scale, offset = (each.reshape(5, 3, 4, 2) for each in (module.norm.weight, module.norm.bias))
    for image, row, column in ((0, 0, 0), (1, 1, 3), (1, 0, 5)):
        patch = torch.zeros(5, 3, 4, 2).double()
        for copy, (down, right) in enumerate(shifts):
            for i in range(4):
                for j in range(2):
                    patch[copy, :, i, j] = pixel(image, 4 * row + i - down, 2 * column + j - right)
        patch = (patch - patch.mean()) / (patch.var(correction=0) + 1e-5).sqrt() * scale + offset
        expected = (weight * patch).sum((1, 2, 3, 4)) + module.proj.bias
        torch.testing.assert_close(tokens[image, 6 * row + column], expected)


@pytest.mark.parametrize("biased", [False, True])
def test_locality_equals_the_formula(biased: bool) -> None:
    g, module = geometry(), built("attention", "locality")
    assert torch.equal(module.scale_H, torch.full((2,), 8**-0.5).double())
    module.load_state_dict({**module.state_dict(), "scale_H": torch.tensor([0.3, 2.5])})
    x, bias = torch.randn(2, g.tokens, 16).double(), torch.randn(2, g.tokens, g.tokens).double()
    q, k, v = (x @ module.qkv.weight.T + module.qkv.bias).chunk(3, -1)
    maps, mixed = module.maps(x, None, bias if biased else None), torch.zeros(2, g.tokens, 16).double()
    for head, scale in enumerate((0.3, 2.5)):
        own = slice(8 * head, 8 * head + 8)
        for i in range(g.tokens):
            others = [j for j in range(g.tokens) if j != i]
            logits = scale * (q[:, [i], own] * k[:, others, own]).sum(-1) + biased * bias[head, i, others]
            weights = logits.exp() / logits.exp().sum(1, keepdim=True)
            mixed[:, i, own] = (weights[..., None] * v[:, others, own]).sum(1)
            torch.testing.assert_close(maps[:, head, i, others], weights, atol=1e-7, rtol=1e-6)
            assert not maps[:, head, i, i].any()
    expected = mixed @ module.proj.weight.T + module.proj.bias
    torch.testing.assert_close(module(x, None, bias if biased else None), expected, atol=1e-6, rtol=1e-6)


def test_locality_starts_from_weights_of_another_attention() -> None:
    plain, own = built("attention", "explicit"), built("attention", "locality")
    own.load_state_dict(own.from_canonical(plain.to_canonical(plain.state_dict())))
    assert torch.equal(own.qkv.weight, plain.qkv.weight) and own.scale_H[0].item() == pytest.approx(1 / math.sqrt(8))


def test_patches_of_one_pixel_are_skipped_with_the_reason() -> None:
    options = {"patch_size": 1, "dim": 16, "depth": 1, "heads": 2, "patch": "shifted"}
    assert "shifts by half a patch, and patch_size is 1" in str(ViT.incompatibility(DATA, options))


def test_study_can_be_planned(tmp_path: Path) -> None:
    _, plan = lab.plan_study(STUDY, out=tmp_path)
    assert len(plan.pending) == 20 and not [arm for arm in plan.arms if arm.skip]
