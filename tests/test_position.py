"""Tests of position encodings against formulas, timm, torchvision, Hugging Face and scipy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from slot_fixtures import refusal
from torch import Tensor

from vitlab.components.attention import rotate
from vitlab.components.position import PRESETS, Position, Resampling, position, resample_grid
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError
from vitlab.geometry import Geometry

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")
from timm.layers import (  # noqa: E402
    RelPosBias,
    RotaryEmbeddingCat,
    RotaryEmbeddingMixed,
    apply_rot_embed_cat,
    build_sincos2d_pos_embed,
    resample_abs_pos_embed,
)

ALL = (
    "none",
    "learned",
    "learned2d",
    "sinusoidal",
    "sincos2d",
    "fourier",
    "relative_bias",
    "alibi2d",
    "rope2d",
    "rope2d_mixed",
    "conditional",
)


def geometry(
    grid: tuple[int, int] = (3, 5),
    *,
    prefix: tuple[str, ...] = ("class",),
    dim: int = 16,
    heads: int = 2,
    depth: int = 3,
) -> Geometry:
    return Geometry(image=grid, channels=1, patch=(1, 1), prefix=prefix, dim=dim, depth=depth, heads=heads, classes=2)


def build(name: str, g: Geometry, **options: Any) -> Position:
    torch.manual_seed(0)
    return position.build({"type": name, **options}, g)


def added(module: Position, g: Geometry, layer: int = 0) -> Tensor:
    """Return what the module adds, (T, D)."""
    return module.add(torch.zeros(1, g.tokens, g.dim), layer)[0]


# -- added ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [(), ("class",), ("class", "distillation", "register")])
def test_learned_rows(prefix: tuple[str, ...]) -> None:
    g = geometry(prefix=prefix)
    own, patches_only = build("learned", g), build("learned", g, prefix_rows="none")
    assert own.state_dict()["pos_embed"].shape == (1, g.tokens, g.dim)
    assert patches_only.state_dict()["pos_embed"].shape == (1, g.patches, g.dim)
    assert torch.equal(added(own, g), own.state_dict()["pos_embed"][0])
    assert torch.equal(added(patches_only, g)[len(prefix) :], patches_only.state_dict()["pos_embed"][0])
    assert added(patches_only, g)[: len(prefix)].abs().sum() == 0
    assert own.no_weight_decay() == {"pos_embed"}


def test_learned2d_concatenates_column_and_row() -> None:
    g = geometry()
    module = build("learned2d", g)
    x, y = (module.state_dict()[name][0] for name in ("x_embed", "y_embed"))
    rows = added(module, g)
    for row in range(3):
        for column in range(5):
            assert torch.equal(rows[1 + row * 5 + column], torch.cat([x[column], y[row]]))
    assert torch.equal(rows[0], module.state_dict()["prefix_embed"][0, 0])
    assert added(build("learned2d", g, prefix_rows="none"), g)[0].abs().sum() == 0
    assert "dim 9 is odd" in refusal(position, "learned2d", geometry(dim=9, heads=3))


@pytest.mark.parametrize("dim", [16, 9])
@pytest.mark.parametrize("prefix_rows", ["own", "none"])
def test_sinusoidal_equals_formula(dim: int, prefix_rows: str) -> None:
    g = geometry(dim=dim, heads=1)
    interleaved = added(build("sinusoidal", g, prefix_rows=prefix_rows), g)
    concatenated = added(build("sinusoidal", g, prefix_rows=prefix_rows, layout="concatenated"), g)
    first = 0 if prefix_rows == "own" else 1
    for token in range(g.tokens):
        for pair in range((dim + 1) // 2):
            angle = (token - first) / 10_000 ** (2 * pair / dim)
            sin, cos = (math.sin(angle), math.cos(angle)) if token >= first else (0.0, 0.0)
            assert interleaved[token, 2 * pair] == pytest.approx(sin, abs=1e-6)
            assert concatenated[token, pair] == pytest.approx(sin, abs=1e-6)
            if 2 * pair + 1 < dim:
                assert interleaved[token, 2 * pair + 1] == pytest.approx(cos, abs=1e-6)
                assert concatenated[token, (dim + 1) // 2 + pair] == pytest.approx(cos, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [16, 9])
def test_sinusoidal_equals_port_of_tensor2tensor(dim: int) -> None:
    """The paper's code has other frequencies than the paper, and ends an odd width with a zero."""
    fsmt = pytest.importorskip("transformers.models.fsmt.modeling_fsmt")
    g = geometry(dim=dim, heads=1)
    expected = fsmt.SinusoidalPositionalEmbedding.get_embedding(g.tokens, dim, None)
    rows = added(build("sinusoidal", g, layout="tensor2tensor"), g)
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=0)
    paper = added(build("sinusoidal", g, layout="concatenated"), g)
    assert (paper - expected).abs().max() > 0.1


def sincos_cell(convention: str, row: int, column: int, grid: tuple[int, int], dim: int) -> list[float]:
    """Return one row of each convention's table, channel by channel."""
    quarter = dim // 4
    if convention == "moco":  # counted by columns, for tokens counted by rows
        place = row * grid[1] + column
        row, column = place % grid[0], place // grid[0]
    steps = quarter - 1 if convention == "big_vision" else quarter
    omega = [10_000 ** (-i / steps) for i in range(quarter)]
    sin_row, cos_row = ([f(row * w) for w in omega] for f in (math.sin, math.cos))
    sin_column, cos_column = ([f(column * w) for w in omega] for f in (math.sin, math.cos))
    if convention == "timm":
        return sin_row + sin_column + cos_row + cos_column
    return sin_column + cos_column + sin_row + cos_row


@pytest.mark.parametrize("convention", ["timm", "big_vision", "moco", "mae"])
def test_sincos2d_conventions(convention: str) -> None:
    g = geometry()
    rows = added(build("sincos2d", g, convention=convention), g)
    expected = [sincos_cell(convention, row, column, g.grid, g.dim) for row in range(3) for column in range(5)]
    torch.testing.assert_close(rows[1:], torch.tensor(expected), atol=1e-6, rtol=0)
    assert rows[0].abs().sum() == 0
    assert not build("sincos2d", g, convention=convention).state_dict()


def test_sincos2d_equals_timm() -> None:
    g = geometry()
    rows = added(build("sincos2d", g, temperature=500.0), g)[1:]
    torch.testing.assert_close(rows, build_sincos2d_pos_embed([3, 5], 16, temperature=500.0), atol=1e-6, rtol=0)
    reason = position.get("sincos2d").incompatibility(geometry(dim=6), {})
    assert reason is not None and "dim 6" in reason
    assert position.get("sincos2d").incompatibility(geometry(dim=4), {"convention": "big_vision"}) is not None


def test_fourier_equals_formula() -> None:
    g = geometry()
    module = build("fourier", g, features=8, hidden=6)
    s = {name.removeprefix("encoders.0."): value.double() for name, value in module.state_dict().items()}
    for row, column in ((0, 0), (1, 4), (2, 3)):
        angle = s["frequencies"] @ torch.tensor([row, column], dtype=torch.float64)
        features = torch.cat([angle.cos(), angle.sin()]) * 8**-0.5
        hidden = s["fc1.weight"] @ features + s["fc1.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        expected = s["fc2.weight"] @ hidden + s["fc2.bias"]
        torch.testing.assert_close(added(module, g)[1 + row * 5 + column].double(), expected, atol=1e-6, rtol=1e-5)
    assert added(module, g)[0].abs().sum() == 0
    spread = build("fourier", g, features=2000, gamma=4.0).state_dict()["encoders.0.frequencies"].std()
    assert spread == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize("name", ["learned", "learned2d", "fourier", "sinusoidal", "sincos2d"])
def test_rows_are_added_in_configured_layers(name: str) -> None:
    """The stem is the beginning of the first block: there are as many additions as blocks."""
    g = geometry()

    def layers(where: str) -> list[Tensor]:
        module = build(name, g, where=where)
        return [rows for layer in range(g.depth + 1) if (rows := added(module, g, layer)).abs().sum() > 0]

    assert len(layers("stem")) == 1
    shared = layers("every_layer_shared")
    assert len(shared) == g.depth and all(torch.equal(rows, shared[0]) for rows in shared)
    if name in ("sinusoidal", "sincos2d"):
        reason = position.get(name).incompatibility(g, {"where": "every_layer"})
        assert reason is not None and "every_layer_shared" in reason
    else:
        own = layers("every_layer")
        assert len(own) == g.depth and not torch.equal(own[0], own[1])


# -- rotated ----------------------------------------------------------------------------------------------------------


def pairs_of_timm(embedding: Tensor) -> tuple[Tensor, Tensor]:
    sin, cos = embedding.chunk(2, -1)
    return cos[..., 0::2], sin[..., 0::2]


@pytest.mark.parametrize("prefix", [(), ("class", "register")])
def test_axial_rotation_equals_timm(prefix: tuple[str, ...]) -> None:
    g = geometry(prefix=prefix)
    reference = RotaryEmbeddingCat(
        g.head_dim, temperature=100.0, in_pixels=False, feat_shape=list(g.grid), grid_indexing="xy"
    ).get_embed()
    cos, sin = build("rope2d", g).rotation(1)  # type: ignore[misc]
    for ours, theirs, rest in zip((cos, sin), pairs_of_timm(reference), (1.0, 0.0), strict=True):
        torch.testing.assert_close(ours[len(prefix) :], theirs, atol=1e-6, rtol=0)
        assert (ours[: len(prefix)] == rest).all()
    q = torch.randn(2, 2, g.patches, g.head_dim)
    ours = rotate(q, (cos[len(prefix) :], sin[len(prefix) :]))
    torch.testing.assert_close(ours, apply_rot_embed_cat(q, reference), atol=1e-6, rtol=0)


def test_mixed_rotation_equals_timm() -> None:
    g = geometry()
    module = build("rope2d_mixed", g)
    reference = RotaryEmbeddingMixed(
        g.dim, depth=g.depth, num_heads=g.heads, temperature=10.0, feat_shape=list(g.grid), grid_indexing="xy"
    )
    assert reference.freqs.shape == module.freqs.shape
    with torch.no_grad():
        reference.freqs.copy_(module.freqs)  # type: ignore[arg-type]
    for block in range(g.depth):
        cos, sin = module.rotation(block + 1)  # type: ignore[misc]
        for ours, theirs, rest in zip((cos, sin), pairs_of_timm(reference.get_embed()[block]), (1.0, 0.0), strict=True):
            torch.testing.assert_close(ours[:, 1:], theirs.detach(), atol=1e-6, rtol=0, check_stride=False)
            assert (ours[:, :1] == rest).all()


def test_mixed_directions_start_orthogonal_with_correct_frequencies() -> None:
    g = geometry(dim=32, heads=2)
    fx, fy = build("rope2d_mixed", g).state_dict()["freqs"].double().unflatten(-1, (2, -1))
    expected = 10.0 ** (-4 * torch.arange(4).double() / 16)
    torch.testing.assert_close(torch.hypot(fx, fy), expected.expand_as(fx), atol=1e-6, rtol=0)
    inner = fx[:, :, 0] * fx[:, :, 1] + fy[:, :, 0] * fy[:, :, 1]
    torch.testing.assert_close(inner, torch.zeros_like(inner), atol=1e-6, rtol=0)
    turns = torch.atan2(fy[:, :, 0, 0], fx[:, :, 0, 0]).flatten()
    assert len(turns.unique()) == g.depth * g.heads


@pytest.mark.parametrize("name", ["rope2d", "rope2d_mixed"])
def test_rotated_products_depend_on_offset_only(name: str) -> None:
    g = geometry((4, 4), prefix=())
    cos, sin = build(name, g).rotation(2)  # type: ignore[misc]
    q, k = torch.randn(2, 1, 1, 1, g.head_dim).expand(2, 1, 2, g.patches, g.head_dim)
    logits = (rotate(q, (cos, sin)) @ rotate(k, (cos, sin)).transpose(-2, -1))[0, 0]
    torch.testing.assert_close(logits[0, 5], logits[5, 10], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[2, 9], logits[6, 13], atol=1e-5, rtol=0)
    assert (logits[0, 5] - logits[0, 6]).abs() > 1e-4


@pytest.mark.parametrize("name", ["rope2d", "rope2d_mixed"])
def test_head_too_narrow_for_rotation_is_refused(name: str) -> None:
    g = geometry(dim=12, heads=2)
    assert "head_dim 6 (dim 12 / heads 2)" in str(position.get(name).incompatibility(g, {}))
    assert "not a multiple of 4" in refusal(position, name, g)


# -- biased -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [(), ("class",)])
def test_relative_bias_equals_timm(prefix: tuple[str, ...]) -> None:
    g = geometry(prefix=prefix)
    module = build("relative_bias", g)
    table = module.state_dict()["relative_position_bias_table"]
    for block in range(g.depth):
        reference = RelPosBias(g.grid, g.heads, prefix_tokens=len(prefix))
        reference.load_state_dict({"relative_position_bias_table": table[block]})
        assert torch.equal(module.bias(block + 1), reference.get_bias()[0])  # type: ignore[arg-type]
    shared = build("relative_bias", g, where="every_layer_shared")
    assert torch.equal(shared.bias(1), shared.bias(3))  # type: ignore[arg-type]
    assert shared.state_dict()["relative_position_bias_table"].shape[0] == 1


def test_prefix_tokens_share_three_rows() -> None:
    g = geometry(prefix=("class", "distillation"))
    module = build("relative_bias", g)
    bias = module.bias(1)
    assert bias is not None
    to_patch, from_patch, within = module.state_dict()["relative_position_bias_table"][0, -3:]
    assert (bias[:, :2, 2:] == to_patch[:, None, None]).all()
    assert (bias[:, 2:, :2] == from_patch[:, None, None]).all()
    assert (bias[:, :2, :2] == within[:, None, None]).all()


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (3, [2**-4, 2**-8, 2**-2]),
    ],
)
def test_alibi_is_slope_times_distance(heads: int, slopes: list[float]) -> None:
    g = geometry(dim=12, heads=heads, prefix=("class", "register"))
    bias = build("alibi2d", g).bias(1)
    assert bias is not None and bias.shape == (heads, g.tokens, g.tokens)
    assert bias[:, :2].abs().sum() == 0 and bias[:, :, :2].abs().sum() == 0
    for a in range(g.patches):
        for b in range(g.patches):
            distance = math.dist(divmod(a, 5), divmod(b, 5))
            for head in range(heads):
                assert bias[head, 2 + a, 2 + b] == pytest.approx(-slopes[head] * distance, rel=1e-5)


# -- conditional ------------------------------------------------------------------------------------------------------


def test_conditional_equals_timm() -> None:
    from timm.models.twins import PosConv

    g = geometry(prefix=("class", "register"))
    module = build("conditional", g)
    reference = PosConv(g.dim, g.dim)
    reference.load_state_dict({name.replace("proj.", "proj.0."): value for name, value in module.state_dict().items()})
    x = torch.randn(2, g.tokens, g.dim)
    y = module.mix(x, 1)
    torch.testing.assert_close(y[:, 2:], reference(x[:, 2:], g.grid), atol=1e-6, rtol=0)
    assert torch.equal(y[:, :2], x[:, :2])
    assert all(torch.equal(module.mix(x, layer), x) for layer in (0, 2, 3))
    assert "kernel_size 4 is even" in refusal(position, {"type": "conditional", "kernel_size": 4}, g)


# -- resampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [(4, 4), (2, 8), (7, 5)])
@pytest.mark.parametrize("new", [(4, 4), (9, 6), (3, 2)])
@pytest.mark.parametrize("how", PRESETS.values(), ids=PRESETS)
def test_resampling_equals_timm(old: tuple[int, int], new: tuple[int, int], how: Resampling) -> None:
    source, target = geometry(old), geometry(new)
    state = {"pos_embed": torch.randn(1, source.tokens, 16)}
    ours = build("learned", target).resample(state, source, target, how)["pos_embed"]
    theirs = resample_abs_pos_embed(
        state["pos_embed"],
        new_size=list(new),
        old_size=list(old),
        interpolation=how.filter,
        antialias=how.antialias,
        align_corners=how.align_corners,
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert torch.equal(ours[:, 0], state["pos_embed"][:, 0])
    build("learned", target).load_state_dict({"pos_embed": ours})


def test_timm_preset_equals_timm_default() -> None:
    source, target = geometry((7, 7)), geometry((5, 9))
    table = torch.randn(1, source.tokens, 16)
    ours = build("learned", target).resample({"pos_embed": table}, source, target, PRESETS["timm"])["pos_embed"]
    torch.testing.assert_close(ours, resample_abs_pos_embed(table, [5, 9], [7, 7]), atol=1e-6, rtol=0)


def test_torchvision_preset_equals_torchvision() -> None:
    interpolate = torchvision("torchvision.models.vision_transformer").interpolate_embeddings
    source, target = geometry((7, 7)), geometry((10, 10))
    table = torch.randn(1, source.tokens, 16)
    theirs = interpolate(160, 16, {"encoder.pos_embedding": table.clone()})["encoder.pos_embedding"]
    ours = build("learned", target).resample({"pos_embed": table}, source, target, PRESETS["torchvision"])["pos_embed"]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_hugging_face_preset_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.vit.modeling_vit import ViTEmbeddings

    config = transformers.ViTConfig(hidden_size=16, num_attention_heads=2, image_size=28, patch_size=4, num_channels=1)
    embeddings = ViTEmbeddings(config)
    torch.nn.init.normal_(embeddings.position_embeddings)
    source, target = geometry((7, 7)), geometry((5, 9))
    theirs = embeddings.interpolate_pos_encoding(torch.zeros(1, target.tokens, 16), 20, 36)
    state = {"pos_embed": embeddings.position_embeddings.detach()}
    ours = build("learned", target).resample(state, source, target, PRESETS["hf"])["pos_embed"]
    torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("old", "new"), [((6, 6), (9, 9)), ((6, 6), (4, 4)), ((3, 5), (6, 4))])
def test_google_preset_equals_scipy_zoom(old: tuple[int, int], new: tuple[int, int]) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    grid = torch.randn(*old, 3)
    zoomed = ndimage.zoom(grid.numpy(), (new[0] / old[0], new[1] / old[1], 1), order=1)
    torch.testing.assert_close(resample_grid(grid, new, PRESETS["google"]), torch.tensor(zoomed), atol=1e-5, rtol=0)
    other = resample_grid(grid, new, Resampling("bilinear", align_corners=False, antialias=False))
    assert np.abs(other.numpy() - zoomed).max() > 0.1


def test_prefix_rows_are_found_by_name() -> None:
    old = geometry(prefix=("class", "distillation"))
    state = {"pos_embed": torch.randn(1, old.tokens, 16)}
    new = geometry((5, 3), prefix=("distillation",))
    out = build("learned", new).resample(state, old, new, PRESETS["timm"])["pos_embed"]
    assert out.shape == (1, new.tokens, 16) and torch.equal(out[:, 0], state["pos_embed"][:, 1])
    four = geometry(prefix=("class", "register", "register", "register"))
    state4 = {"pos_embed": torch.randn(1, four.tokens, 16)}
    two = geometry((5, 3), prefix=("register", "register"))
    out = build("learned", two).resample(state4, four, two, PRESETS["timm"])["pos_embed"]
    assert torch.equal(out[:, :2], state4["pos_embed"][:, 1:3])
    with pytest.raises(WeightsError, match="prefix token 'register' number 3; its prefix tokens: register, register"):
        build("learned", four).resample({"pos_embed": out}, two, geometry(prefix=("register",) * 3), PRESETS["timm"])
    more = geometry(prefix=("class", "register"))
    with pytest.raises(
        WeightsError, match="no row for prefix token 'register' number 1; its prefix tokens: class, distill"
    ):
        build("learned", more).resample(state, old, more, PRESETS["timm"])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("prefix", [(), ("class", "register")])
def test_every_state_can_be_resampled(name: str, prefix: tuple[str, ...]) -> None:
    old, new = geometry((2, 6), prefix=prefix), geometry((5, 3), prefix=prefix)
    module, target = build(name, old), build(name, new)
    state = module.resample(module.state_dict(), old, new, PRESETS["timm"])
    target.load_state_dict(state)
    same = module.resample(module.state_dict(), old, old, PRESETS["timm"])
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in same.items())


def test_relative_tables_are_resampled_without_prefix_rows() -> None:
    old, new = geometry((3, 3)), geometry((4, 5))
    state = {"relative_position_bias_table": torch.randn(3, 28, 2)}
    how = Resampling("bicubic", align_corners=False, antialias=False)
    out = build("relative_bias", new).resample(state, old, new, how)["relative_position_bias_table"]
    grid = state["relative_position_bias_table"][1, :25].T.reshape(1, 2, 5, 5)
    theirs = torch.nn.functional.interpolate(grid, size=(7, 9), mode="bicubic", align_corners=False)
    torch.testing.assert_close(out[1, :63], theirs.flatten(2)[0].T)
    assert torch.equal(out[:, 63:], state["relative_position_bias_table"][:, 25:])


# -- all --------------------------------------------------------------------------------------------------------------


def act(module: Position, g: Geometry, x: Tensor) -> Tensor:
    """Return everything a module does to tokens and logits, as one number per sample."""
    y = x
    total = x.new_zeros(x.shape[0])
    for layer in range(g.depth + 1):
        y = module.add(y, layer)
        if layer:
            y = module.mix(y, layer)
            rotation, bias = module.rotation(layer), module.bias(layer)
            if rotation is not None:
                q = y.unflatten(-1, (g.heads, -1)).transpose(1, 2)
                total = total + rotate(q, rotation).pow(3).sum((1, 2, 3))
            if bias is not None:
                total = total + (bias * torch.arange(g.tokens).to(bias.dtype)).sum()
    return total + y.pow(3).sum((1, 2))


class Whole(torch.nn.Module):
    def __init__(self, module: Position, g: Geometry) -> None:
        super().__init__()
        self.module, self.g = module, g

    def forward(self, x: Tensor) -> Tensor:
        return act(self.module, self.g, x)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("prefix", [(), ("class", "distillation", "register")])
def test_every_parameter_learns(name: str, prefix: tuple[str, ...]) -> None:
    g = geometry(prefix=prefix)
    module = build(name, g)
    act(module, g, torch.randn(2, g.tokens, g.dim, requires_grad=True)).sum().backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key
    assert module.no_weight_decay() <= {key for key, _ in module.named_parameters()}
    assert (module.rotation(1) is not None) == module.overrides("rotation")
    assert (module.bias(1) is not None) == module.overrides("bias")


@pytest.mark.parametrize("name", ALL)
def test_forward_in_bf16_on_meta_and_stacked(name: str) -> None:
    g = geometry()
    x = torch.randn(2, g.tokens, g.dim)
    assert build(name, g).bfloat16().add(x.bfloat16(), 0).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert build(name, g).add(x, 0).dtype == torch.float32
    assert act(build(name, g).bfloat16(), g, x.bfloat16()).isfinite().all()
    with torch.device("meta"):
        away = build(name, g)
        assert act(away, g, torch.randn(2, g.tokens, g.dim)).device.type == "meta"
    members = [Whole(position.build(name, g), g) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(members)
    x = torch.randn(2, 2, g.tokens, g.dim)

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(members[0], (parameters, buffers), (x,))

    stacked = torch.func.vmap(call)(parameters, buffers, x)
    expected = torch.stack([member(x) for member, x in zip(members, x, strict=True)])
    torch.testing.assert_close(stacked, expected, rtol=1e-5, atol=1e-5)
    assert not set(buffers) & set(members[0].state_dict())
