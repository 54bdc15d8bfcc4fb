"""Tests of the attentions against formulas per token in float64, and against vitlab's softmax attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vitlab_linear_attention", reason="pip install -e plugins/vitlab-linear-attention")

from vitlab_linear_attention import orthogonal, windows

from vitlab import lab
from vitlab.models import ViT
from vitlab.models.cost import count_macs
from vitlab.plugin import DataInfo, Geometry, check_component, model, slot, torchvision
from vitlab.spec.trial import InitFrom
from vitlab.weights.transfer import load_and_freeze_weights

STUDY = Path(__file__).parents[1] / "study.yaml"
NAMES = ("linear", "performer", "neighborhood", "windowed")
PREFIXES: list[tuple[str, ...]] = [(), ("class",), ("class", "distillation", "register")]
GRIDS = [(4, 4), (3, 5), (1, 6), (5, 2)]


def geometry(grid: tuple[int, int] = (3, 5), prefix: tuple[str, ...] = ("class",), dim: int = 16) -> Geometry:
    return Geometry(
        image=(grid[0] * 4, grid[1] * 4),
        channels=3,
        patch=(4, 4),
        prefix=prefix,
        dim=dim,
        depth=2,
        heads=2,
        classes=3,
    )


def built(choice: Any, g: Geometry, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return slot("attention").build(choice, g).double().eval()


def tokens(g: Geometry, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, g.tokens, g.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def heads_of(attention: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, H, T, K) from the canonical weights."""
    state = attention.to_canonical(attention.state_dict())
    out = x_BTD @ state["qkv.weight"].T + state["qkv.bias"]
    q, k, v = (part.reshape(*x_BTD.shape[:2], 2, -1).transpose(1, 2) for part in out.chunk(3, -1))
    return q, k, v


def projected(attention: Any, weights_BHTT: Tensor, v_BHTK: Tensor) -> Tensor:
    y = (weights_BHTT @ v_BHTK).transpose(1, 2).flatten(2)
    return y @ attention.proj.weight.T + attention.proj.bias


def bias_of(g: Geometry) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(g.heads, g.tokens, g.tokens, dtype=torch.float64, generator=generator)


def rotation_of(g: Geometry) -> tuple[Tensor, Tensor]:
    angle = torch.arange(g.tokens, dtype=torch.float64)[:, None] * torch.arange(1, g.head_dim // 2 + 1) / 3
    return angle.cos(), angle.sin()


def turned(x_BHTK: Tensor, g: Geometry) -> Tensor:
    """Rotate pairs of channels as complex numbers."""
    cos, sin = rotation_of(g)
    pairs = torch.view_as_complex(x_BHTK.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(pairs).flatten(-2)


@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str) -> None:
    check_component("attention", name)


# -- linear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", GRIDS)
def test_linear_equals_formula(grid: tuple[int, int], prefix: tuple[str, ...]) -> None:
    g = geometry(grid, prefix)
    attention, x = built("linear", g), tokens(g)
    q, k, v = heads_of(attention, x)
    weights = torch.empty(2, 2, g.tokens, g.tokens, dtype=torch.float64)
    for i in range(g.tokens):
        for j in range(g.tokens):
            features = (torch.nn.functional.elu(one) + 1 for one in (q[:, :, i], k[:, :, j]))
            weights[:, :, i, j] = torch.stack(list(features)).prod(0).sum(-1)
    weights /= weights.sum(-1, keepdim=True)
    torch.testing.assert_close(attention.maps(x, None, None), weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(attention(x, None, None), projected(attention, weights, v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "performer"])
@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_extreme_tokens_give_finite_values_and_gradients(name: str, scale: float) -> None:
    g = geometry()
    attention = built(name, g).float()
    x = (scale * tokens(g)).float().requires_grad_()
    out = attention(x, None, None)
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    rows = attention.maps(x, None, None).sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


# -- performer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_performer_equals_formula(prefix: tuple[str, ...], rotates: bool) -> None:
    g = geometry((3, 5), prefix)
    attention, x = built({"type": "performer", "features": 11}, g), tokens(g)
    q, k, v = heads_of(attention, x)
    if rotates:
        q, k = turned(q, g), turned(k, g)
    assert attention.features_FK.shape == (11, g.head_dim)

    def features(x: Tensor) -> Tensor:  # equation 5 of the paper, nothing taken out
        x = x / g.head_dim**0.25
        return torch.exp(x @ attention.features_FK.T - (x * x).sum(-1, keepdim=True) / 2) / math.sqrt(11)

    weights = torch.einsum("bhif,bhjf->bhij", features(q), features(k))
    weights /= weights.sum(-1, keepdim=True)
    rotation = rotation_of(g) if rotates else None
    torch.testing.assert_close(attention.maps(x, rotation, None), weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(attention(x, rotation, None), projected(attention, weights, v), rtol=1e-10, atol=1e-12)


def test_performer_approaches_softmax_with_many_features() -> None:
    """The error falls with the root of the number of features: 64 times as many give about an eighth of it.

    Of small tokens: the estimate has heavy tails, and with long queries and keys the root is slow to show.
    """
    g = geometry()
    x, exact = 0.3 * tokens(g), built("explicit", g)
    error = {}
    for count in (64, 4096):
        errors = []
        for seed in range(8):
            attention = built({"type": "performer", "features": count}, g, seed)
            attention.load_state_dict(attention.from_canonical(exact.state_dict()))
            errors.append((attention.maps(x, None, None) - exact.maps(x, None, None)).square().mean())
        error[count] = torch.stack(errors).mean().sqrt().item()
    assert error[4096] < 0.001
    assert 5 < error[64] / error[4096] < 13


def test_features_are_orthogonal_in_groups_with_normal_lengths() -> None:
    torch.manual_seed(0)
    rows = orthogonal(20_000, 8).double()
    group = rows[:8] / rows[:8].norm(dim=1, keepdim=True)
    torch.testing.assert_close(group @ group.T, torch.eye(8, dtype=torch.float64), atol=1e-6, rtol=0)
    # A chi-squared of 8 degrees of freedom has mean 8 and variance 16; each channel is standard normal.
    assert rows.square().sum(1).mean().item() == pytest.approx(8, abs=0.15)
    assert rows.square().sum(1).var().item() == pytest.approx(16, abs=1)
    torch.testing.assert_close(rows.mean(0), torch.zeros(8, dtype=torch.float64), atol=0.03, rtol=0)
    torch.testing.assert_close(rows.T @ rows / len(rows), torch.eye(8, dtype=torch.float64), atol=0.05, rtol=0)
    assert orthogonal(5, 8).shape == (5, 8)


def test_features_are_drawn_with_initial_values() -> None:
    def initial_state(seed: int) -> dict[str, Tensor]:
        net = model.build(vit("performer"), DATA)
        net.initialise(seed)
        return dict(net.state_dict())

    one, again, other = initial_state(0), initial_state(0), initial_state(1)
    first, second = (f"blocks.{i}.attn.features_FK" for i in range(2))
    assert torch.equal(one[first], again[first])
    assert not torch.equal(one[first], other[first]) and not torch.equal(one[first], one[second])


# -- neighborhood -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", GRIDS)
def test_neighborhood_is_softmax_over_window(grid: tuple[int, int], prefix: tuple[str, ...], window: int) -> None:
    g = geometry(grid, prefix)
    attention, x, bias = built({"type": "neighborhood", "window": window}, g), tokens(g), bias_of(g)
    q, k, v = heads_of(attention, x)
    logits = turned(q, g) @ turned(k, g).transpose(-2, -1) / math.sqrt(g.head_dim) + bias
    mask = torch.zeros(g.tokens, g.tokens, dtype=torch.bool)
    mask[: len(prefix)] = True
    mask[:, : len(prefix)] = True
    for patch in range(g.patches):
        ranges = []
        for at, length in zip(divmod(patch, grid[1]), grid, strict=True):
            size = min(window, length)
            first = min(max(at - size // 2, 0), length - size)
            ranges.append(range(first, first + size))
            assert at in ranges[-1]
        for row in ranges[0]:
            for column in ranges[1]:
                mask[len(prefix) + patch, len(prefix) + row * grid[1] + column] = True
    weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
    torch.testing.assert_close(attention.maps(x, rotation_of(g), bias), weights, rtol=1e-10, atol=1e-12)
    out = attention(x, rotation_of(g), bias)
    torch.testing.assert_close(out, projected(attention, weights, v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_window_as_large_as_grid_is_softmax_attention(prefix: tuple[str, ...]) -> None:
    g = geometry((3, 5), prefix)
    attention, exact = built({"type": "neighborhood", "window": 9}, g), built("explicit", g, seed=1)
    exact.load_state_dict(attention.state_dict())
    x, rotation, bias = tokens(g), rotation_of(g), bias_of(g)
    torch.testing.assert_close(attention(x, rotation, bias), exact(x, rotation, bias), rtol=1e-10, atol=1e-12)


# -- windowed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", ["odd", "none"])
@pytest.mark.parametrize("window", [1, 2, 3, 9])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", GRIDS)
def test_windowed_is_softmax_over_window(
    grid: tuple[int, int], prefix: tuple[str, ...], window: int, shift: str
) -> None:
    g = geometry(grid, prefix)
    attention, x, bias = built({"type": "windowed", "window": window, "shift": shift}, g), tokens(g), bias_of(g)
    q, k, v = heads_of(attention, x)
    logits = turned(q, g) @ turned(k, g).transpose(-2, -1) / math.sqrt(g.head_dim) + bias
    for block in range(3):
        attention.block_index = block
        borders = []
        for length in grid:
            first = window // 2 if shift == "odd" and block == 1 and window < length else 0
            borders.append([at for at in range(length) if at % window == first % window])
        mask = torch.ones(g.tokens, g.tokens, dtype=torch.bool)
        for a in range(g.patches):
            for b in range(g.patches):
                ends = zip(divmod(a, grid[1]), divmod(b, grid[1]), borders, strict=True)
                mask[len(prefix) + a, len(prefix) + b] = not any(
                    min(i, j) < border <= max(i, j) for i, j, own in ends for border in own
                )
        weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
        torch.testing.assert_close(attention.maps(x, rotation_of(g), bias), weights, rtol=1e-10, atol=1e-12)
        out = attention(x, rotation_of(g), bias)
        torch.testing.assert_close(out, projected(attention, weights, v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("window", [2, 3, 4, 5, 12])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", [*GRIDS, (9, 14), (8, 12)])
def test_windows_equal_comparison_of_all_pairs(
    grid: tuple[int, int], prefix: tuple[str, ...], window: int, shift: int
) -> None:
    """Tokens of the same window in order, then fillers with index 0."""
    g = geometry(grid, prefix)
    key_NS, hidden_NS = windows(g, window, shift)
    shifts = [shift if window < length else 0 for length in grid]
    numbers = [
        [(at - by) // window for at, by in zip(divmod(patch, grid[1]), shifts, strict=True)]
        for patch in range(g.patches)
    ]
    most = len(prefix) + min(window, grid[0]) * min(window, grid[1])
    for patch, number in enumerate(numbers):
        same = [*range(len(prefix)), *(len(prefix) + i for i, other in enumerate(numbers) if other == number)]
        assert key_NS[patch].tolist() == same + [0] * (most - len(same))
        assert hidden_NS[patch].tolist() == [False] * len(same) + [True] * (most - len(same))


def test_windowed_block_holds_one_set_of_windows() -> None:
    net = model.build(vit({"type": "windowed", "window": 3}, depth=3), DATA)
    assert isinstance(net, ViT)
    g = geometry((4, 6), ("class",))
    for index, block in enumerate(net.blocks):
        buffers = dict(block.attn.named_buffers())
        key_NS, hidden_NS = windows(g, 3, index % 2)
        assert buffers.keys() == {"key_NS", "hidden_NS"}
        assert torch.equal(buffers["key_NS"], key_NS) and torch.equal(buffers["hidden_NS"], hidden_NS)


@pytest.mark.parametrize("window", [2, 3])
def test_windowed_equals_torchvision_with_gradients(window: int) -> None:
    """torchvision's Swin shifts the image cyclically and hides what was not adjacent; its bias is zero here."""
    torchvision()  # its import may need a workaround
    from torchvision.models.swin_transformer import shifted_window_attention

    g = geometry((6, 12), ())
    attention = built({"type": "windowed", "window": window}, g)
    parameters = dict(attention.named_parameters())
    for block in range(2):
        attention.block_index = block
        shift = [block * (window // 2)] * 2
        x, y = tokens(g).requires_grad_(), tokens(g).requires_grad_()
        expected = shifted_window_attention(
            y.unflatten(1, g.grid),
            parameters["qkv.weight"],
            parameters["proj.weight"],
            torch.zeros(1, g.heads, window**2, window**2, dtype=torch.float64),
            [window, window],
            g.heads,
            shift_size=shift,
            qkv_bias=parameters["qkv.bias"],
            proj_bias=parameters["proj.bias"],
        ).flatten(1, 2)
        out = attention(x, None, None)
        # Hidden pairs have a logit of -100 there.
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        for of, inputs in ((out, x), (expected, y)):
            of.square().sum().backward(inputs=[inputs])
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-12)


# -- in a model, and in a study ---------------------------------------------------------------------------------------

DATA = DataInfo(image=(16, 24), channels=1, classes=3)


def vit(attention: Any, **options: Any) -> dict[str, Any]:
    return {"type": "vit", "dim": 16, "depth": 2, "heads": 2, "patch_size": 4, "attention": attention, **options}


@pytest.mark.parametrize("name", NAMES)
def test_cost_grows_linearly_with_tokens(name: str) -> None:
    """A doubled image doubles the work, except that of the class token, which is one row of T."""

    def work(attention: str, columns: int) -> int:
        info = DataInfo(image=(16, columns * 4), channels=1, classes=3)
        return count_macs(model.build(vit(attention, position="none"), info), info)

    def ratio(attention: str) -> float:
        return (work(attention, 256) - work(attention, 128)) / (work(attention, 128) - work(attention, 64))

    assert ratio(name) == pytest.approx(2, rel=1e-6)
    assert ratio("explicit") > 3


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_other_attention_can_be_loaded(name: str) -> None:
    source, started = model.build(vit("split"), DATA), model.build(vit(name), DATA)
    source.initialise(0)
    started.initialise(1)
    load_and_freeze_weights(started, source, InitFrom(checkpoint="of-another.pt", head="keep"))
    expected = source.to_canonical(source.state_dict())
    state = started.to_canonical(started.state_dict())
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert {key.rpartition(".")[2] for key in state.keys() - expected.keys()} <= {"features_FK"}


def test_unsupported_position_is_planned_skip(tmp_path: Path) -> None:
    plan = lab.plan_study(STUDY, out=tmp_path)[1]
    skips = {arm.name: arm.skip for arm in plan.arms if arm.skip}
    assert len(plan.arms) == 12 and len(skips) == 3
    for attention, position, does in (
        (
            "linear",
            "alibi2d",
            "adds a bias to the logits of attention, and attention 'linear' (block 0) does not support that; "
            "change one of the two",
        ),
        (
            "performer",
            "alibi2d",
            "adds a bias to the logits of attention, and attention 'performer' (block 0) does not support that; "
            "change one of the two",
        ),
        (
            "linear",
            "rope2d",
            "rotates queries and keys, and attention 'linear' (block 0) does not support that; change one of the two",
        ),
    ):
        (reason,) = [reason for name, reason in skips.items() if attention in name and position in name]
        assert reason == f"position '{position}' {does}"


@pytest.mark.parametrize("position", ["alibi2d", "relative_bias"])
@pytest.mark.parametrize("name", ["linear", "performer"])
def test_bias_is_refused_with_reason(name: str, position: str) -> None:
    options = {key: value for key, value in vit(name, position=position).items() if key != "type"}
    reason = ViT.incompatibility(DATA, options)
    assert reason is not None and position in reason and f"'{name}' (block 0) does not support that" in reason
