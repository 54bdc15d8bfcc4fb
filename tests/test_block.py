"""Tests of blocks: their formulas, their place in the model, and where other forms than the default are refused."""

from __future__ import annotations

from typing import Any

import pytest
import slot_fixtures
import torch
from torch import Tensor

from vitlab.components.attention import Attention
from vitlab.engines.batch_last import model_incompatibility
from vitlab.errors import WeightsError
from vitlab.explaining.capture import capture
from vitlab.geometry import DataInfo, Geometry
from vitlab.models import ViT, model
from vitlab.registry import slot
from vitlab.spec.trial import InitFrom
from vitlab.training.optim import hidden_matrices
from vitlab.weights.transfer import load_and_freeze_weights

DATA = DataInfo(image=(8, 12), channels=3, classes=5)
SIZES = {"dim": 16, "depth": 2, "heads": 2, "patch_size": 4}
SMALL = {"type": "vit", **SIZES}
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


@pytest.mark.parametrize("gate", ["output", "highway", "gru"])
def test_gated_residual_equals_formula(gate: str) -> None:
    block: Any = build(block={"type": "gated", "gate": gate, "start": 1.5}).blocks[0]
    assert block.gate1.bias.mean().item() == pytest.approx(1.5, abs=0.2)
    x = tokens()
    attend, perceive = branches(block, x)
    y = x
    for of, gated, branch in ((block.norm1, block.gate1, attend), (block.norm2, block.gate2, perceive)):
        f, w = branch(norm(of, y)), gated.from_x.weight
        if gate == "output":
            y = y + torch.sigmoid(y @ w.T - gated.bias) * f
        elif gate == "highway":
            share = torch.sigmoid(y @ w.T + gated.bias)
            y = share * y + (1 - share) * f
        else:
            (u_r, u_z, u_g), (w_r, w_z, w_g) = w.chunk(3), gated.from_y.weight.chunk(3)
            r = torch.sigmoid(f @ w_r.T + y @ u_r.T)
            z = torch.sigmoid(f @ w_z.T + y @ u_z.T - gated.bias)
            y = (1 - z) * y + z * torch.tanh(f @ w_g.T + (r * y) @ u_g.T)
    torch.testing.assert_close(block(x, None, None), y, rtol=1e-10, atol=1e-10)


def test_matrix_optimizers_see_each_map_of_a_gated_recurrent_unit() -> None:
    gates = {f"blocks.0.{gate}.{side}.weight": 3 for gate in ("gate1", "gate2") for side in ("from_x", "from_y")}
    names = hidden_matrices(build(block={"type": "gated", "gate": "gru"}))
    assert gates.items() <= names.items()
    assert hidden_matrices(build(block="gated"))["blocks.0.gate1.from_x.weight"] == 1


@pytest.mark.parametrize("mix", ["learned", "fixed"])
def test_value_residual_equals_formula(mix: str) -> None:
    """Values of the first such block reach all later ones, around a block of another form."""
    built: Any = build(depth=4, block={"type": "value_residual", "mix": mix}, blocks={"0": {"block": "prenorm"}})
    x, first = tokens(), None
    assert built.blocks[1].shares is None and ("blocks.2.shares" in dict(built.named_parameters())) == (
        mix == "learned"
    )
    expected = built.blocks[0](x, None, None)
    for index, block in enumerate(built.blocks[1:], 1):
        y = norm(block.norm1, expected)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in block.attn.qkv(y).chunk(3, -1))
        if first is None:
            first = v
        else:
            assert index > 1
            v = block.shares[0] * first + block.shares[1] * v
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
        expected = expected + block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
        expected = expected + block.mlp(norm(block.norm2, expected))
    built.patch_embed.forward = lambda x_BCHW: x[:, 1:]
    built.cls_token = torch.nn.Parameter(x[:1, :1])
    built.position.pos_embed.data.zero_()
    x[1, 0] = x[0, 0]
    captured = capture(built, torch.zeros(2, 3, 8, 12))
    torch.testing.assert_close(captured.tokens_LBTD[-1][0], expected[0], rtol=1e-10, atol=1e-10)


def test_value_residual_requires_attention_that_mixes_values(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, slot("attention"))

    class Mean(Attention):
        def __init__(self, g: Geometry) -> None:
            super().__init__()

        def forward(self, x_BTD: Tensor, rotation: Any, bias_HTT: Any) -> Tensor:
            return x_BTD

    slot("attention").register("mean")(Mean)
    reason = ViT.incompatibility(DATA, {**SIZES, "block": "value_residual", "blocks": {"1": {"attention": "mean"}}})
    assert reason == (
        "block 'value_residual' changes the values of attention, and attention 'mean' (block 1) does not support "
        "that; change one of the two"
    )


@pytest.mark.parametrize("name", [name for name in slot("block").names() if name != "prenorm"])
def test_other_blocks_fit_the_model_and_are_refused_where_they_are_unknown(name: str) -> None:
    built = build(block=name, blocks={"1": {"block": name, "norm": "rmsnorm"}}, drop_path=0.2)
    assert f"blocks.0 is a {type(built.blocks[0]).__name__}" in (model_incompatibility(built, "fp64", CPU) or "")
    choice = model.resolve_choice({**SMALL, "block": name})
    work = ViT.work(DATA, choice.options)
    assert work is not None and work.products is None
    assert [built.layer_of(f"blocks.{i}.norm1.weight") for i in range(2)] == [1, 2]
    captured = capture(built, torch.randn(1, 3, 8, 12, dtype=torch.float64))
    assert len(captured.maps_LBHTT) == 2 and [tuple(x.shape) for x in captured.tokens_LBTD] == [(1, 7, 16)] * 3


def test_default_block_leaves_keys_of_earlier_trials() -> None:
    assert "block" not in model.resolve_choice(SMALL).hashed()
    assert (
        model.resolve_choice({**SMALL, "block": {"type": "prenorm"}}).hashed() == model.resolve_choice(SMALL).hashed()
    )
    ranges = {"0": {"norm": "rmsnorm"}}
    hashed = model.resolve_choice({**SMALL, "blocks": ranges}).hashed()["blocks"]["0"]
    assert hashed.keys() == {"norm"}
    assert model.resolve_choice({**SMALL, "block": "postnorm"}).hashed()["block"] == {"type": "postnorm"}


def test_blocks_differ_by_range() -> None:
    built = build(blocks={"1": {"block": "parallel"}})
    assert [type(block).__name__ for block in built.blocks] == ["PreNorm", "Parallel"]
    assert not hasattr(built.blocks[1], "norm2") and built(torch.zeros(1, 3, 8, 12).double()).logits.shape == (1, 5)


def test_start_from_another_block_names_the_difference() -> None:
    """The weights of a post-norm model fit a pre-norm one, which computes another function of them."""
    source, own = build(block="respostnorm"), build()
    differences = load_and_freeze_weights(own, source, InitFrom.model_validate({"checkpoint": "x"}))[1:]
    assert [sentence.split(",")[0] for sentence in differences] == ["block is prenorm"]
    assert torch.equal(own.blocks[1].norm2.weight, source.blocks[1].norm2.weight)  # type: ignore[union-attr]
    with pytest.raises(WeightsError, match=r"blocks\.0\.post_norm1\.weight"):
        load_and_freeze_weights(own, build(block="sandwich"), InitFrom.model_validate({"checkpoint": "x"}))
