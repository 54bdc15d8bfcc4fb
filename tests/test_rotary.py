"""Tests of the options of rotary encodings: against timm's tables, DINOv3's augmentation and ViT-5's registers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from slot_fixtures import refusal
from torch import Tensor
from trainings import train

from vitlab import noise
from vitlab.components.attention import rotate
from vitlab.components.position import Position, position
from vitlab.data.prepare import Feed, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.engines.base import train as train_together
from vitlab.geometry import Geometry
from vitlab.lab import plan_study
from vitlab.models.contract import weights_digest
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.testing import check_component
from vitlab.training.loop import Training

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3  # noqa: E402

AUGMENTED = {"type": "rope2d", "coordinates": "centred", "shift": 0.3, "jitter": 1.4, "rescale": 2.0}


def geometry(grid: tuple[int, int] = (3, 5), prefix: tuple[str, ...] = ("class",)) -> Geometry:
    return Geometry(image=grid, channels=1, patch=(1, 1), prefix=prefix, dim=32, depth=3, heads=2, classes=2)


def tables(module: Position, layer: int = 1) -> tuple[Tensor, Tensor]:
    rotation = module.rotation(layer)
    assert rotation is not None
    return rotation


def of_timm(embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (N, K/2) of timm's interleaved table."""
    sin, cos = embedding.chunk(2, -1)
    return cos[:, ::2], sin[:, ::2]


@pytest.mark.parametrize("grid", [(3, 5), (4, 2)])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"theta": 50.0}, {"temperature": 50.0}),
        ({"normalize": "max"}, {"normalize_coords": "max"}),
        ({"normalize": "min"}, {"normalize_coords": "min"}),
        ({"offset": 0.5}, {"grid_offset": 0.5}),
        ({"periods": [0.5, 40.0]}, {"min_period": 0.5, "max_period": 40.0}),
    ],
)
def test_centred_rotation_equals_dinov3_of_timm(
    ours: dict[str, Any], theirs: dict[str, Any], grid: tuple[int, int]
) -> None:
    g = geometry(grid)
    module = position.build({"type": "rope2d", "coordinates": "centred", **ours}, g)
    reference = RotaryEmbeddingDinoV3(
        g.head_dim, feat_shape=list(grid), grid_indexing="xy", rotate_half=False, **theirs
    )
    for mine, other in zip(tables(module), of_timm(reference.get_embed()), strict=True):
        torch.testing.assert_close(mine[1:], other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"offset": 1.0}, {"grid_offset": 1.0}),
        ({"reference": [6, 4]}, {"ref_feat_shape": [6, 4]}),
        ({"offset": -0.5, "reference": [2, 2]}, {"grid_offset": -0.5, "ref_feat_shape": [2, 2]}),
    ],
)
def test_places_of_patches_equal_timm(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    g = geometry()
    reference = RotaryEmbeddingCat(
        g.head_dim, temperature=100.0, in_pixels=False, feat_shape=list(g.grid), grid_indexing="xy", **theirs
    )
    module = position.build({"type": "rope2d", **ours}, g)
    for mine, other in zip(tables(module), of_timm(reference.get_embed()), strict=True):
        torch.testing.assert_close(mine[1:], other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("coordinates", ["patches", "centred"])
def test_augmentation_equals_dinov3_of_timm(coordinates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get the same uniform numbers, for row and column, in the order shift, jitter, rescale."""
    g = geometry()
    options = {"shift": 0.3, "jitter": 1.4, "rescale": 2.0}
    theirs = {f"{name}_coords": value for name, value in options.items()}
    if coordinates == "centred":
        reference: Any = RotaryEmbeddingDinoV3(g.head_dim, feat_shape=list(g.grid), rotate_half=False, **theirs)
    else:
        reference = RotaryEmbeddingCat(
            g.head_dim, temperature=100.0, in_pixels=False, feat_shape=list(g.grid), grid_indexing="ij", **theirs
        )
    module = position.build({"type": "rope2d", "coordinates": coordinates, **options}, g).train()
    torch.manual_seed(5)
    u_5 = torch.cat([torch.rand(2), torch.rand(2), torch.rand(1)])
    monkeypatch.setattr(noise, "uniform", lambda key, sample_B, n: u_5[None, :n])
    torch.manual_seed(5)
    expected = of_timm(reference.train().get_embed())
    with noise.use_model_draws(noise.Draws(1, 2, torch.arange(4), step=3)):
        actual = tables(module)
    for mine, other in zip(actual, expected, strict=True):
        rows_first = mine[1:].roll(g.head_dim // 4, 1)  # timm's 'ij' turns the first pairs with the row
        torch.testing.assert_close(rows_first, other, atol=2e-5, rtol=0)
    plain = tables(position.build({"type": "rope2d", "coordinates": coordinates}, g))
    assert not torch.allclose(actual[0], plain[0], atol=0.1) and (actual[0][:1] == 1).all()


def test_draws_follow_key_of_step() -> None:
    g = geometry()
    module, plain = (position.build(each, g) for each in (AUGMENTED, {"type": "rope2d", "coordinates": "centred"}))

    def drawn(step: int, sample: int = 0, layer: int = 1) -> Tensor:
        with noise.use_model_draws(
            noise.Draws(1, 2, torch.arange(sample, sample + 4), step=noise.key(0, "step", step))
        ):
            return tables(module, layer)[0]

    module.train()
    assert torch.equal(drawn(3), drawn(3)) and torch.equal(drawn(3), drawn(3, sample=8, layer=2))
    assert not torch.equal(drawn(3), drawn(4))
    assert torch.equal(tables(module)[0], tables(plain)[0])  # outside of a step
    module.eval()
    assert torch.equal(drawn(3), tables(plain)[0])
    module.train()
    keys = torch.tensor([noise.key(0, "step", step) for step in (1, 2, 3)])

    def stacked(key: Tensor) -> Tensor:
        with noise.use_model_draws(noise.Draws(1, 2, torch.arange(4), step=key)):
            return tables(module)[0]

    for row, step in zip(torch.vmap(stacked)(keys), (1, 2, 3), strict=True):
        torch.testing.assert_close(row, drawn(step), atol=1e-6, rtol=0)


def test_factors_are_log_uniform_within_bounds() -> None:
    module: Any = position.build(AUGMENTED, geometry()).train()
    places = [module._transform_places(noise.key(0, step)) for step in range(400)]
    rows, columns = (torch.stack(axis) for axis in zip(*places, strict=True))
    height, width = (axis[:, -1] - axis[:, 0] for axis in (rows, columns))
    still = position.build({**AUGMENTED, "shift": 0.0, "jitter": 1.0, "rescale": 1.0}, geometry())
    assert not list(still.buffers())[2:]  # nothing to transform
    row_factor, column_factor = (height / (4 / 3)).log(), (width / (8 / 5)).log()
    bound = math.log(1.4 * 2.0)
    for factor in (row_factor, column_factor):
        assert factor.abs().max() <= bound and factor.abs().max() > 0.7 * bound
        assert abs(float(factor.mean())) < 0.1
    assert (row_factor - column_factor).abs().max() <= 2 * math.log(1.4) + 1e-6  # jitter; rescaling is shared
    shift = rows.mean(1) / (height / (4 / 3))
    assert shift.abs().max() <= 0.3 and shift.abs().max() > 0.25


# -- registers --------------------------------------------------------------------------------------------------------


def vit5(registers: int, head_dim: int, theta: float) -> np.ndarray[Any, Any]:
    """Return the angle of each register and pair, rows first, after models_vit5.py and rope.py of its authors."""
    side = int(registers**0.5)
    half = head_dim // 2
    freqs = 1.0 / theta ** (np.arange(0, half, 2) / half)
    t = np.arange(side) / side * side
    rows = np.broadcast_to((t[:, None] * freqs)[:, None], (side, side, half // 2))
    columns = np.broadcast_to((t[:, None] * freqs)[None], (side, side, half // 2))
    return np.concatenate([rows, columns], 2).reshape(registers, half)


@pytest.mark.parametrize(("count", "theta"), [(1, 100.0), (4, 100.0), (9, 30.0)])
def test_registers_turn_as_in_vit5(count: int, theta: float) -> None:
    g = geometry(prefix=("class", *["register"] * count))
    module = position.build({"type": "rope2d", "theta": 1e4, "registers": True, "register_theta": theta}, g)
    without = tables(position.build({"type": "rope2d", "theta": 1e4}, g))
    angle = np.roll(vit5(count, g.head_dim, theta), g.head_dim // 4, 1)  # columns first
    for mine, rest, expected in zip(tables(module), without, (np.cos(angle), np.sin(angle)), strict=True):
        np.testing.assert_allclose(mine[1 : 1 + count], expected, rtol=0, atol=1e-6)
        assert torch.equal(mine[1 + count :], rest[1 + count :]) and torch.equal(mine[:1], rest[:1])
    q = torch.randn(1, 2, g.tokens, g.head_dim)
    assert torch.equal(rotate(q, tables(module))[:, :, 0], q[:, :, 0])


def test_registers_turn_in_augmented_steps_as_in_others() -> None:
    g = geometry(prefix=("class", *["register"] * 4))
    module = position.build({**AUGMENTED, "registers": True}, g).train()
    with noise.use_model_draws(noise.Draws(1, 2, torch.arange(4), step=3)):
        augmented = tables(module)[0]
    assert torch.equal(augmented[:5], tables(module)[0][:5]) and not torch.equal(augmented, tables(module)[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"normalize": "max"}, "uses normalize with coordinates: centred alone"),
        ({"periods": [1.0, 2.0]}, "uses periods with coordinates: centred alone"),
        ({"coordinates": "centred", "reference": [4, 4]}, "does not depend on the grid; remove reference"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(position, {"type": "rope2d", **options}, geometry())


def test_number_of_turned_registers_is_a_square_or_0() -> None:
    turned, plain = ({"type": "rope2d", "registers": registers} for registers in (True, False))
    assert "their number is 3; set " in refusal(position, turned, geometry(prefix=("class", *["register"] * 3)))
    one, other = (tables(position.build(options, geometry())) for options in (turned, plain))
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("options", [{"coordinates": "centred", "jitter": 1.5, "rescale": 2.0}, {"reference": [2, 2]}])
def test_contract_holds(options: dict[str, Any]) -> None:
    check_component("position", {"type": "rope2d", **options})


# -- in a training ----------------------------------------------------------------------------------------------------

SEEDS = dict.fromkeys(STREAMS, 0)
DATA = {"type": "synthetic", "image_size": 8, "train_images": 48, "test_images": 12, "num_classes": 3}
MODEL = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 2, "heads": 2, "position": ["learned", AUGMENTED]}
SPEC = TrainSpec.model_validate({"steps": 6, "batch_size": 8, "evaluations": 2})


def trained(model: Any = MODEL, **options: Any) -> str:
    data = prepare(DATA, SEEDS)
    built = slot("model").build(model, data.info)
    built.initialise(0)
    train(built, Feed(data, [], SEEDS), SPEC, SEEDS, **options)
    return weights_digest(built.state_dict())


def test_resume_repeats_draws_bitwise() -> None:
    states: list[Any] = []
    whole = trained(save=lambda state: states.append(copy.deepcopy(state)), every_s=0.0)
    assert trained() == whole
    assert len(states) > 1 and trained(resume=states[len(states) // 2]) == whole
    assert trained({**MODEL, "position": ["learned", {"type": "rope2d", "coordinates": "centred"}]}) != whole


def test_stacked_trainings_equal_single_ones() -> None:
    data = prepare(DATA, SEEDS)
    spec = SPEC.model_copy(update={"precision": "fp64"})

    def training(seed: int) -> Training:
        built = slot("model").build(MODEL, data.info)
        built.initialise(seed)
        seeds = {**SEEDS, "dropout": seed}
        return Training(built.double(), Feed(data, [], seeds, dtype=torch.float64), spec, seeds)

    together, alone = [training(seed) for seed in (1, 2)], [training(seed) for seed in (1, 2)]
    train_together(together, slot("engine").get("vmap"))
    for one, other in zip(together, alone, strict=True):
        train_together([other], slot("engine").get("loop"))
        for name, value in other.model.state_dict().items():
            torch.testing.assert_close(one.model.state_dict()[name], value, rtol=0, atol=1e-9)


def test_added_options_keep_keys_of_earlier_trials(tmp_path: Path) -> None:
    base = {"data": {"type": "digits"}, "train": {"steps": 2, "batch_size": 8}}
    file = tmp_path / "study.yaml"
    model = {"type": "vit", "patch_size": 2, "dim": 8, "depth": 2, "heads": 2}
    keys = []
    for written in ({"type": "rope2d"}, {"type": "rope2d", "jitter": 1.0, "registers": False, "periods": None}):
        file.write_text(yaml.safe_dump({"study": "s", "base": {**base, "model": {**model, "position": written}}}))
        keys.append(plan_study(file)[1].trials[0].trial.key)
    hashed = position.resolve_choice("rope2d").hashed()
    assert keys[0] == keys[1] and set(hashed) == {"type"}
