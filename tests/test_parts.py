"""Tests of norms, MLPs and attentions against formulas in float64, and of their options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.components.base import set_dropout_ids
from vitlab.engines.batch_last import model_incompatibility
from vitlab.geometry import DataInfo, Geometry
from vitlab.models import ViT, model
from vitlab.registry import slot
from vitlab.testing import check_component

DATA = DataInfo(image=(8, 12), channels=3, classes=5)
SMALL = {"type": "vit", "dim": 16, "depth": 2, "heads": 2, "patch_size": 4}
G = Geometry(image=(8, 12), channels=3, patch=(4, 4), prefix=("class",), dim=16, depth=2, heads=2, classes=5)


def random(part: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    set_dropout_ids(part)
    return part.double().eval()


def tokens() -> Tensor:
    return 2 * torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("affine", ["scale_and_shift", "scale", "none"])
def test_layer_norm_equals_formula(affine: str) -> None:
    of, x = random(slot("norm").build({"type": "layernorm", "affine": affine}, 16)), tokens()
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    names = [name for name, _ in of.named_parameters()]
    assert names == {"scale_and_shift": ["weight", "bias"], "scale": ["weight"], "none": []}[affine]
    close(of(x), expected * (1 if affine == "none" else of.weight) + (of.bias if affine == "scale_and_shift" else 0))


@pytest.mark.parametrize("affine", ["scale", "none"])
def test_rms_norm_equals_formula(affine: str) -> None:
    of, x = random(slot("norm").build({"type": "rmsnorm", "affine": affine}, 16)), tokens()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close(of(x), expected if affine == "none" else expected * of.weight)


def test_dynamic_tanh_equals_formula() -> None:
    fresh = slot("norm").build("dyt", 16)
    assert fresh.alpha.tolist() == [0.5] and slot("norm").build({"type": "dyt", "alpha": 0.25}, 16).alpha.item() == 0.25
    of, x = random(fresh), tokens()
    close(of(x), of.weight * torch.tanh(of.alpha * x) + of.bias)
    built = model.build({**SMALL, "norm": "dyt"}, DATA)
    assert {"blocks.0.norm1.alpha", "blocks.0.norm1.weight"} <= built.no_weight_decay()


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
def test_gated_attention_equals_formula(gate: str) -> None:
    attend, x = random(slot("attention").build({"type": "gated", "gate": gate}, G)), tokens()
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in attend.qkv(x).chunk(3, -1))
    y_BTHK = ((q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v).transpose(1, 2)
    gate_BTG = 1 / (1 + torch.exp(-(x @ attend.gate.weight.T + attend.gate.bias)))
    gated = y_BTHK * (gate_BTG.unflatten(-1, (2, 8)) if gate == "elementwise" else gate_BTG[..., None])
    close(attend(x, None, None), attend.proj(gated.flatten(2)))


def test_sigmoid_attention_equals_formula() -> None:
    attend, x = random(slot("attention").build("sigmoid", G)), tokens()
    bias_HTT = torch.randn(2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in attend.qkv(x).chunk(3, -1))
    logits = q @ k.transpose(-2, -1) / math.sqrt(8) + bias_HTT - math.log(7)
    y_BTHK = (1 / (1 + torch.exp(-logits)) @ v).transpose(1, 2)
    close(attend(x, None, bias_HTT), attend.proj(y_BTHK.flatten(2)))
    with pytest.raises(NotImplementedError, match="has no attention weights"):
        attend.maps(x, None, None)


def test_factor_of_differential_attention_follows_the_block() -> None:
    built = model.build({**SMALL, "depth": 3, "attention": "differential"}, DATA)
    assert [block.attn.block_index for block in built.blocks] == [0, 1, 2]
    reason = ViT.incompatibility(DATA, {"dim": 18, "heads": 2, "patch_size": 4, "attention": "differential"})
    assert reason is not None and "there are 9" in reason


@pytest.mark.parametrize(
    ("slot_name", "choice"),
    [
        ("norm", {"type": "layernorm", "affine": "scale"}),
        ("norm", {"type": "layernorm", "affine": "none"}),
        ("norm", {"type": "rmsnorm", "affine": "none"}),
        ("mlp", {"type": "gelu", "bias": False, "norm": "layernorm"}),
        ("mlp", {"type": "gelu", "norm": {"type": "layernorm", "affine": "none"}}),
        ("attention", {"type": "per_head", "qkv_bias": "qv", "proj_bias": False}),
        ("attention", {"type": "auto", "qkv_bias": "qv", "qk_norm": "layernorm"}),
        ("attention", {"type": "gated", "gate": "headwise"}),
    ],
)
def test_options_pass_contract_test(slot_name: str, choice: dict[str, Any]) -> None:
    """In a model, too, by the engine that computes with the batch last."""
    check_component(slot_name, choice)


def test_batch_last_supports_what_it_recomputes() -> None:
    def reason(**options: Any) -> str | None:
        built = model.build({**SMALL, **options}, DATA)
        work = ViT.work(DATA, model.resolve_choice({**SMALL, **options}).options)
        found = model_incompatibility(built, "fp64", torch.device("cpu"))
        assert (found is None) == (work is not None and work.products is not None)
        return found

    assert reason() is None
    assert reason(norm="dyt", mlp={"type": "geglu", "bias": False}) is None
    assert reason(attention={"type": "split", "proj_bias": False}) is None
    assert "blocks.0.attn.norm is a LayerNorm, which is not supported" in str(
        reason(attention={"type": "auto", "norm": "layernorm"})
    )
    for name in ("gated", "sigmoid", "differential"):
        assert "is not supported by engine batch_last" in str(reason(attention=name))


def test_options_at_their_default_are_no_part_of_a_key() -> None:
    for slot_name, choice in (
        ("mlp", {"type": "gelu", "bias": True, "norm": "none", "ratio": 4}),
        ("mlp", {"type": "vitlab:swiglu", "bias": True}),
        ("norm", {"type": "layernorm", "affine": "scale_and_shift", "eps": 1e-6}),
        ("attention", {"type": "auto", "proj_bias": True, "qk_norm": "none"}),
    ):
        assert slot(slot_name).resolve_choice(choice).hashed() == {"type": choice["type"].removeprefix("vitlab:")}
    assert slot("mlp").resolve_choice({"type": "gelu", "bias": False}).hashed()["bias"] is False
