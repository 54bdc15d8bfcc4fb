"""Tests of models of other libraries: equal, refused, or documented; and of the tables that decide it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError
from vitlab.weights import hugging_face as tables
from vitlab.weights.architecture import ModelFacts
from vitlab.weights.conversion import convert_weights_file
from vitlab.weights.conversion import inspect as look
from vitlab.weights.from_timm import from_timm
from vitlab.weights.opening import open_model

torchvision("torchvision.models")
timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
import weights_zoo  # noqa: E402

pytestmark = pytest.mark.usefixtures("meta_models_draw_nothing")
CASES = weights_zoo.cases()
HEAVY = ("regnet", "convnext", "swin_t", "resnet50", "vit_base_mci", "_r50_", "_r26_")
QUICK = ("test_vit3", "3x5 patches", "big_vision, sincos2d positions, 4x4 stated")
DIFFERENT = (
    "vit_base_patch16_rpn_224",
    "vit_small_patch16_dinov3",
    "vit_small_plus_patch16_dinov3",
    "vit_base_patch16_rope_reg1_gap_256",
    "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_ape_224",
    "vit_giant_patch16_lingbot",
    "vit_so400m_patch16_siglip_gap_256",
    "vit_giantopt_patch16_siglip_256",
    "vit_base_patch32_siglip_256",
    "eva_giant_patch14_224",
    "test_vit3",
    "global_pool=token, fc_norm=True",
    "norm_layer=simplenorm",
    "vit_small_patch16_18x2_224",
    "block_fn=ParallelThingsBlock",
    "several attentions side by side",
    "ViTMSNForImageClassification: num_attention_heads=4",
    "3x5 patches",
    "big_vision, sincos2d positions, 4x4 stated",
    "VisionTransformer, conv_stem_configs",
)


def sample() -> list[weights_zoo.Case]:
    light = [case for case in CASES if not any(word in case.name for word in HEAVY)]
    return [case for index, case in enumerate(light) if index % 10 == 0 or case.name in DIFFERENT]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case.name not in QUICK)) for case in sample()],
    ids=lambda case: f"{case.section}: {case.name}",
)
def test_foreign_model_is_equal_or_refused_as_documented(case: weights_zoo.Case) -> None:
    assert weights_zoo.row(case) in weights_zoo.PAGE.read_text().splitlines()


def test_page_has_every_case_once_and_only_documented_differences() -> None:
    head, _, tables = weights_zoo.PAGE.read_text().partition("\n## ")
    lines = [line for line in tables.splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| ---", "| configuration"))]
    assert len(rows) == len(CASES)
    for line, case in zip(rows, CASES, strict=True):
        assert line.startswith(f"| {weights_zoo._cell(case.name)} | ")
        assert line.split(" | ")[1] in ("equal", "refused", "differs")
    counts = [
        sum(map(int, numbers)) for numbers in zip(*re.findall(r"(?m)\| (\d+) \| (\d+) \| (\d+) \|$", head), strict=True)
    ]
    assert counts == [
        sum(line.split(" | ")[1] == result for line in rows) for result in ("equal", "refused", "differs")
    ]


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_architecture_that_timm_lacks_is_refused_by_name(tmp_path: Path) -> None:
    file = vit(tmp_path, architecture="vit_tinny_patch16_224")
    with pytest.raises(WeightsError, match="Did you mean 'vit_tiny_patch16_224'"):
        open_model(file)
    for name in ("resnet18", "swin_tiny_patch4_window7_224"):
        with pytest.raises(WeightsError, match="is no model of vitlab's"):
            from_timm(timm.create_model(name))


CONFIGS = (
    *(f"{name}Config" for name in ("ViT", "DeiT", "ViTMSN", "ViTMAE", "IJepa", "Beit", "Data2VecVision", "Dinov2")),
    *(f"{name}Config" for name in ("Dinov2WithRegisters", "DINOv3ViT", "CLIPVision", "SiglipVision", "Aimv2Vision")),
)


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_of_every_family_are_those_of_transformers(name: str) -> None:
    config = getattr(transformers, name)()
    family = tables.FAMILIES[tables.detect_family(config.to_dict(), "config.json")]
    assert set(config.to_dict()) <= tables.KEYS
    eps = config.rms_norm_eps if hasattr(config, "rms_norm_eps") else config.layer_norm_eps
    assert (family.eps, family.act, family.heads) == (eps, config.hidden_act, config.num_attention_heads)


def vit(folder: Path, **config: Any) -> Path:
    """Write a model of timm and its config; return the file."""
    case = weights_zoo.small(folder, "vit_tiny_patch16_224")
    config_data = json.loads((folder / "config.json").read_text())
    for key, value in config.items():
        config_data[key] = {**config_data[key], **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config_data))
    return case.file


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_args": {"embed_heads": 3}}, "unexpected keyword argument 'embed_heads'"),
        ({"model_args": {"depth": 3}}, 'Missing key(s) in state_dict: "blocks.2.norm1.weight"'),
        ({"model_args": {"patch_size": 8}}, "describes a model whose pos_embed has shape (1, 5, 16)"),
        ({"model_args": {"global_pool": "avg"}}, "says global_pool token, and avg under model_args"),
        ({"model_args": {"mlp_layer": "GluMlp"}}, "'str' object is not callable"),
    ],
)
def test_config_of_other_function_is_refused_by_key_and_value(
    config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError) as refused:
        open_model(vit(tmp_path, **config))
    assert sentence in str(refused.value)


def test_unknown_config_is_named(tmp_path: Path) -> None:
    file = vit(tmp_path)
    (tmp_path / "config.json").write_text('{"hello": 1}')
    notes = open_model(file, facts=ModelFacts(heads=2)).notes
    assert "names neither a timm architecture nor a model_type, and was not read: its keys are hello" in notes[0]
    assert any("GELU computed exactly" in note for note in notes)


@pytest.mark.parametrize(
    ("preprocessor", "mean", "std"),
    [
        ({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 0.5]}, (0.1, 0.2, 0.3), (0.5, 0.5, 0.5)),
        ({"do_normalize": False, "image_mean": [0.1, 0.2, 0.3]}, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        ({"do_rescale": False, "do_normalize": False}, (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
        ({"rescale_factor": 1 / 127.5, "image_mean": [1, 1, 1], "image_std": [1, 1, 1]}, (0.5,) * 3, (0.5,) * 3),
    ],
)
def test_preprocessor_steps_reduce_to_mean_and_std(
    preprocessor: dict[str, Any], mean: tuple[float, ...], std: tuple[float, ...], tmp_path: Path
) -> None:
    """The reference is transformers' normalisation, (v * rescale_factor - mean) / std, in terms of v / 255."""
    case = weights_zoo.hugging_face("ViTForImageClassification", tmp_path, preprocessor=preprocessor)
    model = open_model(case.file)
    assert model.mean == pytest.approx(mean) and model.std == pytest.approx(std)
    value = 200.0
    scaled = value * (preprocessor.get("rescale_factor", 1 / 255) if preprocessor.get("do_rescale", True) else 1)
    normal = preprocessor.get("do_normalize", True)
    expected = (scaled - preprocessor["image_mean"][0]) / preprocessor["image_std"][0] if normal else scaled
    assert (value / 255 - model.mean[0]) / model.std[0] == pytest.approx(expected)


def test_one_channel_gives_one_note_on_normalisation(tmp_path: Path) -> None:
    case = weights_zoo.bare(tmp_path, in_chans=1)
    notes = [note for note in open_model(case.file, facts=case.facts).notes if "normalised" in note]
    assert notes == ["assumed: pixels of 1 channels normalised by mean 0.5 and std 0.5"]


def test_rotary_positions_are_refused_by_torchvision(tmp_path: Path) -> None:
    case = weights_zoo.configured("vit_small_patch16_dinov3", tmp_path)
    rotary = {"type": "rope2d", "theta": 100.0, "coordinates": "centred", "normalize": "separate"}
    assert look(case.file).architecture.options["position"] == [rotary]
    with pytest.raises(WeightsError, match="the format torchvision requires pos_embed"):
        convert_weights_file(case.file, tmp_path / "b.pth", "torchvision")


def test_pooled_norm_is_documented_as_in_timm(tmp_path: Path) -> None:
    for norm in (True, False):
        folder = tmp_path / str(norm)
        folder.mkdir()
        case = weights_zoo.small(folder, "vit_tiny_patch16_224", global_pool="avg", fc_norm=norm)
        _, notes = convert_weights_file(case.file, folder / "b.pth", "timm")
        assert f"fc_norm={norm}, global_pool='avg'" in notes[-1]


def test_centred_coordinates_do_not_depend_on_grid() -> None:
    """Corners of the image are at -1 and 1 for any patch size: two by two patches have their mean angle."""
    from vitlab.geometry import DataInfo
    from vitlab.registry import slot

    angles = []
    for patch in (4, 8):
        data = DataInfo(image=(16, 32), channels=3, classes=2)
        options = {"patch_size": patch, "dim": 16, "depth": 1, "heads": 1, "prefix": [], "head": "linear"}
        position = {"type": "rope2d", "theta": 10.0, "coordinates": "centred"}
        model = slot("model").build(
            {"type": "vit", **options, "position": position, "head": {"type": "linear", "pool": "gap"}}, data
        )
        cos, sin = model.position.rotation(1)
        # The slowest pair of each axis turns by 2 pi / theta^(3/4) per unit, so less than pi to either side.
        angle = torch.atan2(sin, cos)[:, [3, 7]].unflatten(0, model.geometry.grid)
        angles.append(angle)
    fine, coarse = angles
    pooled = fine.unflatten(0, (2, 2)).unflatten(2, (4, 2)).mean((1, 3))
    torch.testing.assert_close(pooled, coarse, rtol=0, atol=1e-5)
    assert float(coarse[0, 0, 1]) == pytest.approx(-0.5 * 2 * torch.pi / 10**0.75, abs=1e-5)
