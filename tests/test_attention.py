"""Tests of attention: every implementation equals the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from slot_fixtures import refusal
from torch import Tensor

from vitlab import noise
from vitlab.components.attention import Attention, attention, rotate
from vitlab.components.base import set_dropout_ids
from vitlab.data.torchvision_import import torchvision
from vitlab.geometry import Geometry
from vitlab.registry import list_entries

NAMES = ("auto", "explicit", "split", "per_head", "sdpa")


def geometry(*, dim: int = 12, heads: int = 3, prefix: tuple[str, ...] = ("class",)) -> Geometry:
    return Geometry(image=(4, 6), channels=1, patch=(2, 2), prefix=prefix, dim=dim, depth=2, heads=heads, classes=3)


def formula(state: Mapping[str, Tensor], g: Geometry, x: Tensor, rotation: Any, bias: Tensor | None) -> Tensor:
    """Compute attention as in the papers, head by head, in float64; channel pairs are rotated as complex numbers."""
    s = {name: value.double() for name, value in state.items()}
    qkv = x @ s["qkv.weight"].T + s.get("qkv.bias", torch.zeros(()).double())
    mixed = []
    for head in range(g.heads):
        q, k, v = (
            qkv[..., part * g.dim + head * g.head_dim : part * g.dim + (head + 1) * g.head_dim] for part in range(3)
        )
        for name in ("q_norm", "k_norm"):
            if f"{name}.weight" in s:
                old = q if name == "q_norm" else k
                centred = old - old.mean(-1, keepdim=True)
                new = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * s[f"{name}.weight"]
                new = new + s[f"{name}.bias"]
                q, k = (new, k) if name == "q_norm" else (q, new)
        if rotation is not None:
            cos, sin = (part if part.ndim == 2 else part[head] for part in rotation)
            turn = torch.complex(cos.double(), sin.double())
            q, k = (
                torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
                for part in (q, k)
            )
        logits = torch.einsum("btk,bsk->bts", q, k) / g.head_dim**0.5
        if bias is not None:
            logits = logits + bias[head].double()
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        mixed.append(weights @ v)
    return torch.cat(mixed, -1) @ s["proj.weight"].T + s["proj.bias"]


def build(name: str, g: Geometry, **options: Any) -> Attention:
    torch.manual_seed(0)
    return attention.build({"type": name, **options}, g)


def extras(g: Geometry, what: str) -> tuple[Any, Tensor | None]:
    torch.manual_seed(1)
    angle = torch.randn(g.tokens, g.head_dim // 2) if what != "per_head" else torch.randn(g.heads, g.tokens, 2)
    rotation = (angle.cos(), angle.sin()) if what in ("rotation", "both", "per_head") else None
    bias = torch.randn(g.heads, g.tokens, g.tokens) if what in ("bias", "both") else None
    return rotation, bias


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["none", "bias", "rotation", "per_head", "both"])
@pytest.mark.parametrize("prefix", [(), ("class", "distillation", "register")])
@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}, {"qk_norm": "layernorm"}])
def test_implementations_equal_formula(name: str, what: str, prefix: tuple[str, ...], options: dict[str, Any]) -> None:
    g = geometry(prefix=prefix)
    module = build(name, g, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    rotation, bias = extras(g, what)
    x = torch.randn(2, g.tokens, g.dim)
    ours, reference = x.clone().requires_grad_(), x.double().requires_grad_()
    canonical = {
        key: value.detach().double().requires_grad_() for key, value in module.to_canonical(module.state_dict()).items()
    }
    y, expected = module(ours, rotation, bias), formula(canonical, g, reference, rotation, bias)
    assert (y - expected).abs().max() < 1e-5
    weight = torch.randn_like(x)
    (y * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    assert ours.grad is not None and reference.grad is not None
    assert (ours.grad - reference.grad).abs().max() < 1e-5 * (1 + reference.grad.abs().max())
    native = module.to_canonical({key: value.grad for key, value in module.named_parameters()})  # type: ignore[misc]
    for key, value in canonical.items():
        assert value.grad is not None
        assert (native[key] - value.grad).abs().max() < 1e-5 * (1 + value.grad.abs().max()), key


@pytest.mark.parametrize("name", NAMES)
def test_implementations_share_canonical_state(name: str) -> None:
    """The reference is timm's attention; its state loads strictly and round-trips bitwise."""
    torchvision()  # timm imports torchvision, whose import may need a workaround
    timm_attention = pytest.importorskip("timm.layers").Attention
    torch.manual_seed(3)
    reference = timm_attention(12, num_heads=3, qkv_bias=True, qk_norm=True, norm_layer=torch.nn.LayerNorm)
    state = reference.state_dict()
    g = geometry()
    module = build(name, g, qk_norm={"type": "layernorm", "eps": 1e-5})
    native = module.from_canonical(state)
    module.load_state_dict(native)
    back = module.to_canonical(module.state_dict())
    assert set(back) == set(state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    x = torch.randn(2, g.tokens, 12)
    assert (module(x, None, None) - reference(x)).abs().max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_conversion_does_not_modify_argument(name: str) -> None:
    module = build(name, geometry())
    state = module.to_canonical(module.state_dict())
    before = {key: value.clone() for key, value in state.items()}
    for value in module.from_canonical(state).values():
        if not any(value is other for other in state.values()):
            value.zero_()
    assert all(torch.equal(state[key], before[key]) for key in state)


@pytest.mark.parametrize("name", NAMES)
def test_maps_equal_forward_weights(name: str) -> None:
    g = geometry()
    module = build(name, g)
    rotation, bias = extras(g, "both")
    x = torch.randn(2, g.tokens, g.dim)
    maps = module.maps(x, rotation, bias)
    assert maps.shape == (2, g.heads, g.tokens, g.tokens)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, g.heads, g.tokens))
    state = module.to_canonical(module.state_dict())
    v = torch.nn.functional.linear(x, state["qkv.weight"], state["qkv.bias"])[..., 2 * g.dim :]
    mixed = (maps @ v.unflatten(-1, (g.heads, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)
    again = torch.nn.functional.linear(mixed, state["proj.weight"], state["proj.bias"])
    if name == "explicit":
        assert torch.equal(again, module(x, rotation, bias))
    torch.testing.assert_close(again, module(x, rotation, bias), atol=1e-5, rtol=0)


def test_explicit_implementations_drop_same_weights() -> None:
    g = geometry()
    x = torch.randn(4, g.tokens, g.dim)
    state = build("explicit", g).state_dict()
    outputs = []
    for name in ("explicit", "auto", "split", "per_head"):
        module = build(name, g, drop=0.4, proj_drop=0.1)
        module.load_state_dict(module.from_canonical(state))
        set_dropout_ids(module)
        with noise.use_model_draws(noise.Draws(7, 8, torch.arange(4), 9)):
            outputs.append(module(x, None, None))
        assert (outputs[-1] - module.eval()(x, None, None)).abs().max() > 0.05
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-6, rtol=0)


def test_sdpa_with_attention_dropout_is_refused() -> None:
    reason = attention.get("sdpa").incompatibility(geometry(), {"drop": 0.1})  # type: ignore[attr-defined]
    assert reason is not None and "drop is 0.1" in reason
    assert attention.get("sdpa").incompatibility(geometry(), {"drop": 0.0}) is None  # type: ignore[attr-defined]
    assert "use 'explicit' or 'auto'" in refusal(attention, {"type": "sdpa", "drop": 0.1}, geometry())


@pytest.mark.filterwarnings("error")
def test_auto_follows_rule() -> None:
    g = geometry()
    module = build("auto", g, drop=0.5)
    x = torch.randn(3, g.tokens, g.dim)
    module.eval()(x, None, None)
    assert module.kernel == "sdpa"
    module.train()(x, None, None)
    assert module.kernel == "explicit"
    module.eval()
    with torch.autocast("cpu", torch.bfloat16):
        narrow = module(x, None, None)
    assert module.kernel == "explicit" and narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), module(x, None, None), atol=0.02, rtol=0)
    assert module.kernel == "sdpa"
    normed = build("auto", g, qk_norm="layernorm")
    with torch.autocast("cpu", torch.bfloat16):
        normed(x, None, None)
    assert normed.kernel == "explicit"
    members = torch.func.vmap(lambda x: module(x, None, None))(x[:, None])
    assert module.kernel == "explicit"
    torch.testing.assert_close(members[:, 0], module(x, None, None), atol=1e-6, rtol=0)
    torch.func.grad(lambda x: module(x, None, None).sum())(x)
    assert module.kernel == "sdpa"
    torch.func.vmap(torch.func.grad(lambda x: module(x, None, None).sum()))(x[:, None])
    assert module.kernel == "explicit"


@pytest.mark.parametrize("name", ["auto", "explicit", "split", "per_head"])
def test_replicates_can_be_stacked(name: str) -> None:
    g = geometry()
    members = [attention.build(name, g) for _ in range(3)]
    rotation, bias = extras(g, "both")
    x = torch.randn(3, 2, g.tokens, g.dim)
    parameters, buffers = torch.func.stack_module_state(members)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(members[0], (parameters, buffers), (x, rotation, bias)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss))(parameters, x)
    for index, member in enumerate(members):
        member(x[index], rotation, bias).square().sum().backward()
        for key, value in member.named_parameters():
            assert value.grad is not None
            torch.testing.assert_close(gradients[key][index], value.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_forward_in_bf16_and_on_meta(name: str) -> None:
    g = geometry()
    rotation, bias = extras(g, "both")
    module = build(name, g).bfloat16()
    y = module(torch.randn(2, g.tokens, g.dim).bfloat16(), rotation, bias)
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    with torch.device("meta"):
        away = build(name, g)
        assert away(torch.randn(2, g.tokens, g.dim), None, torch.zeros(3, g.tokens, g.tokens)).device.type == "meta"


def test_rotation_turns_neighbouring_channel_pairs() -> None:
    angle = torch.tensor([[0.3, 1.1]])
    x = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    expected = torch.tensor([[angle[0, 0].cos(), angle[0, 0].sin(), -angle[0, 1].sin(), angle[0, 1].cos()]])
    torch.testing.assert_close(rotate(x, (angle.cos(), angle.sin())), expected)


def test_listing_reads_names_from_source_text() -> None:
    others = ("gated", "sigmoid", "differential")
    assert [entry.name for entry in list_entries("attention") if entry.origin.source == "vitlab"] == sorted(
        NAMES + others
    )
