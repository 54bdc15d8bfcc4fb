"""Tests of families of backbones against transformers' and timm's own models, with random parameters, at two sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError
from vitlab.weights.architecture import ModelFacts
from vitlab.weights.conversion import convert_weights_file
from vitlab.weights.opening import open_model

torchvision("torchvision.models")
timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
from timm.models._hub import save_config_for_hf  # noqa: E402

pytestmark = pytest.mark.usefixtures("meta_models_draw_nothing")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40, "image_size": 16}
LARGER = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 20,
}
SIZES = {"small": SMALL, "larger": LARGER}
CLOSE = {"rtol": 0, "atol": 1e-5}

Read = Callable[[Any, Tensor], Tensor]


def randomised(model: nn.Module) -> nn.Module:
    """Draw every parameter from N(0, 0.2), and scales around 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and name.rpartition(".")[2] in ("weight", "gamma", "lambda1", "lambda_1")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + is_scale)
    return model.eval().double()


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens(model: Any, x_BCHW: Tensor) -> Tensor:
    return model.forward_features(x_BCHW)


def first(model: Any, x_BCHW: Tensor) -> Tensor:
    return model.forward_features(x_BCHW)[:, 0]


def pooled(model: Any, x_BCHW: Tensor) -> Tensor:
    return model.head.pool(model.forward_features(x_BCHW))[:, 0]


def logits(model: Any, x_BCHW: Tensor) -> Tensor:
    return model.logits_by_head(model(x_BCHW))[""]


BEIT = {"use_relative_position_bias": True, "use_mask_token": True}
FAMILIES: dict[str, tuple[str, dict[str, Any], str, Read]] = {
    "ViT": ("ViTModel", {}, "last_hidden_state", tokens),
    "CLIP": ("CLIPVisionModel", {}, "pooler_output", first),
    "CLIP of LAION": ("CLIPVisionModel", {"hidden_act": "gelu"}, "pooler_output", first),
    "CLIP with its projection": ("CLIPVisionModelWithProjection", {"projection_dim": 6}, "image_embeds", logits),
    "CLIP, classifier": ("CLIPForImageClassification", {}, "logits", logits),
    "SigLIP": ("SiglipVisionModel", {}, "pooler_output", pooled),
    "SigLIP, tokens": ("SiglipVisionModel", {}, "last_hidden_state", tokens),
    "SigLIP, classifier": ("SiglipForImageClassification", {}, "logits", logits),
    "DINOv2": ("Dinov2Model", {"mlp_ratio": 2}, "last_hidden_state", tokens),
    "DINOv2, gated": ("Dinov2Model", {"use_swiglu_ffn": True}, "last_hidden_state", tokens),
    "DINOv2 with registers": ("Dinov2WithRegistersModel", {"mlp_ratio": 2}, "last_hidden_state", tokens),
    "DINOv3": ("DINOv3ViTModel", {"num_register_tokens": 4}, "last_hidden_state", tokens),
    "DINOv3, gated": (
        "DINOv3ViTModel",
        {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu", "key_bias": True},
        "last_hidden_state",
        tokens,
    ),
    "BEiT": (
        "BeitModel",
        BEIT,
        "pooler_output",
        lambda model, x: model.fc_norm(model.head.pool(tokens(model, x)))[:, 0],
    ),
    "BEiT, shared": (
        "BeitModel",
        {"use_shared_relative_position_bias": True, "use_mean_pooling": False},
        "last_hidden_state",
        tokens,
    ),
    "BEiT, classifier": ("BeitForImageClassification", BEIT, "logits", logits),
    "data2vec, classifier": ("Data2VecVisionForImageClassification", BEIT, "logits", logits),
    "I-JEPA": ("IJepaModel", {}, "last_hidden_state", tokens),
    "I-JEPA, classifier": ("IJepaForImageClassification", {}, "logits", logits),
    "MAE": ("ViTMAEModel", {"mask_ratio": 0.0}, "last_hidden_state", tokens),
    "AIMv2": ("Aimv2VisionModel", {}, "last_hidden_state", tokens),
}


def hugging_face(kind: str, options: dict[str, Any], folder: Path) -> tuple[nn.Module, int]:
    """Write a model of transformers as ``save_pretrained`` does; return it and the side of its images."""
    make = getattr(transformers, kind)
    config_class = make.config_class
    sizes = {**options, "patch_size": 4}
    if "vision_config" in getattr(config_class, "sub_configs", {}) and kind.endswith("Classification"):
        config = config_class(vision_config=sizes, text_config={}, num_labels=5)
    else:
        config = config_class(**sizes, num_labels=5)
    model = randomised(make(config))
    model.save_pretrained(folder)
    return model, options["image_size"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_family_of_transformers_computes_the_same(name: str, size: str, tmp_path: Path) -> None:
    kind, options, output, read = FAMILIES[name]
    theirs, side = hugging_face(kind, {**SIZES[size], **options}, tmp_path)
    keep = read is logits
    opened = open_model(tmp_path / "model.safetensors", head="keep" if keep else "new")
    ours, x_BCHW = opened.model.double(), images(side)
    more = {"noise": torch.arange(float((side // 4) ** 2)).expand(2, -1)} if "MAE" in name else {}
    with torch.no_grad():
        expected = getattr(theirs(pixel_values=x_BCHW, **more), output)
        torch.testing.assert_close(read(ours, x_BCHW), expected, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("Dinov2ForImageClassification", {}, "these weights have no head"),
        ("Siglip2VisionModel", {}, "says model_type siglip2_vision_model; supported models of transformers"),
        ("CLIPVisionModel", {"hidden_act": "relu"}, "hidden_act is relu; supported: gelu"),
    ],
)
def test_other_function_of_transformers_is_refused(
    kind: str, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    hugging_face(kind, {**SMALL, **options}, tmp_path)
    with pytest.raises(WeightsError, match=sentence):
        open_model(tmp_path / "model.safetensors")


# -- timm -------------------------------------------------------------------------------------------------------------

TIMM = (
    "vit_base_patch16_clip_quickgelu_224",
    "vit_base_patch16_clip_224",
    "vit_base_patch16_siglip_256",
    "vit_so400m_patch14_siglip_224",
    "vit_base_patch14_dinov2",
    "vit_giant_patch14_reg4_dinov2",
    "vit_base_patch16_dinov3",
    "vit_small_plus_patch16_dinov3",
    "eva02_base_patch14_224",
    "eva02_base_patch16_clip_224",
    "beit_base_patch16_224",
    "beitv2_base_patch16_224",
    "beit3_base_patch16_224",
    "deit3_small_patch16_224",
    "aimv2_large_patch14_224",
    "vit_huge_patch14_gap_224",
)
"""One architecture of each family; the last is I-JEPA's."""


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", TIMM)
def test_family_of_timm_computes_the_same(name: str, depth: int, tmp_path: Path) -> None:
    with torch.device("meta"):
        heads = (block := timm.create_model(name).blocks[0]).attn.num_heads
        assert block is not None
    patch = 4 if depth == 1 else 6
    options = {"embed_dim": 8 * heads * depth, "depth": depth, "img_size": 4 * patch, "patch_size": patch}
    options |= {"num_classes": 5}
    theirs = randomised(timm.create_model(name, **options))
    save_config_for_hf(theirs, str(tmp_path / "config.json"), model_args=options)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    ours = open_model(tmp_path / "pytorch_model.bin").model.double()
    x_BCHW = images(4 * patch)
    with torch.no_grad():
        expected = theirs(x_BCHW)
        torch.testing.assert_close(
            logits(ours, x_BCHW) / expected.abs().max(), expected / expected.abs().max(), **CLOSE
        )
    if depth == 1:
        return  # the way back is tried at one size: each builds all architectures that timm may need
    convert_weights_file(tmp_path / "pytorch_model.bin", tmp_path / "back" / "model.safetensors", "timm")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    again = timm.create_model(written["architecture"], num_classes=5, **written["model_args"]).eval().double()
    from safetensors.torch import load_file

    again.load_state_dict(load_file(tmp_path / "back" / "model.safetensors"), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(again(x_BCHW) / expected.abs().max(), expected / expected.abs().max(), **CLOSE)


# -- Meta's own files -------------------------------------------------------------------------------------------------


def meta_names(state: dict[str, Tensor], heads: int | None) -> dict[str, Tensor]:
    """Return tensors of timm's DINOv2 or DINOv3 under the names of Meta's repositories."""
    out: dict[str, Tensor] = {"mask_token": torch.zeros(1, len(state["norm.weight"]))}
    rename = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma", "fc1_g": "w1", "fc1_x": "w2"}
    gated = "blocks.0.mlp.fc1_g.weight" in state
    packed = (
        "blocks.0.mlp.fc1.weight" in state
        and len(state["blocks.0.mlp.fc1.weight"]) != (state["blocks.0.mlp.fc2.weight"].shape[1])
    )
    for name, value in state.items():
        for theirs, metas in rename.items():
            name = name.replace(theirs, metas)
        if gated or packed:
            name = name.replace("mlp.fc2", "mlp.w3").replace("mlp.fc1", "mlp.w12")
        if name == "reg_token":
            name = "register_tokens" if heads is None else "storage_tokens"
        out[name] = value
    for name in [name for name in out if name.endswith("q_bias")]:
        query, value = out.pop(name), out.pop(name.replace("q_bias", "v_bias"))
        # The middle third is arbitrary, and masked.
        out[name.replace("q_bias", "qkv.bias")] = torch.cat([query, torch.full_like(query, 3.0), value])
        mask = torch.cat([torch.ones_like(query), torch.zeros_like(query), torch.ones_like(query)])
        out[name.replace("q_bias", "qkv.bias_mask")] = mask
    if heads is not None:
        quarter = len(state["norm.weight"]) // heads // 4
        out["rope_embed.periods"] = 100.0 ** (torch.arange(quarter) / quarter)
    return out


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("vit_small_patch14_dinov2", None),
        ("vit_small_patch14_reg4_dinov2", None),
        ("vit_giant_patch14_reg4_dinov2", None),
        ("vit_small_patch16_dinov3", 2),
        ("vit_small_patch16_dinov3_qkvb", 2),
        ("vit_small_plus_patch16_dinov3_qkvb", 3),
    ],
)
def test_files_of_meta_compute_the_same(name: str, heads: int | None, tmp_path: Path) -> None:
    width = 8 * (heads or 2)
    options = {"embed_dim": width, "depth": 2, "num_heads": heads or 2, "img_size": 16, "patch_size": 4}
    if "giant" in name:
        options["mlp_ratio"] = 5.0
    theirs = randomised(timm.create_model(name, num_classes=0, **options))
    state = meta_names(theirs.state_dict(), heads)
    if "register_tokens" in state:  # Meta's table has a row for the class token
        row = torch.full((1, 1, width), 0.5, dtype=torch.float64)
        state |= {"pos_embed": torch.cat([row, state["pos_embed"]], 1), "cls_token": state["cls_token"] - row}
    torch.save(state, tmp_path / "dino.pth")
    facts = ModelFacts(heads=2, grid=(4, 4)) if heads is None else ModelFacts(image=(16, 16))
    ours = open_model(tmp_path / "dino.pth", facts=facts, head="new").model.double()
    x_BCHW = images(16)
    with torch.no_grad():
        torch.testing.assert_close(tokens(ours, x_BCHW), theirs.forward_features(x_BCHW), **CLOSE)


# -- out again --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_rotary_model_is_equal_in_transformers(mlp: str, tmp_path: Path) -> None:
    options = {"num_register_tokens": 2, "use_gated_mlp": mlp == "swiglu"}
    options |= {"hidden_act": "silu" if mlp == "swiglu" else "gelu", "key_bias": True}
    theirs, side = hugging_face("DINOv3ViTModel", {**SMALL, **options}, tmp_path)
    # Through timm's names and vitlab's order of channels, and back.
    with pytest.raises(WeightsError, match=r"write to model\.safetensors"):
        convert_weights_file(tmp_path / "model.safetensors", tmp_path / "other.safetensors", "hf", head="drop")
    convert_weights_file(tmp_path / "model.safetensors", tmp_path / "back" / "model.safetensors", "hf", head="drop")
    again = transformers.DINOv3ViTModel.from_pretrained(tmp_path / "back", dtype=torch.float64).eval()
    x_BCHW = images(side)
    with torch.no_grad():
        expected = theirs(x_BCHW).last_hidden_state
        torch.testing.assert_close(again(x_BCHW).last_hidden_state, expected, **CLOSE)
    assert again.config.key_bias and again.config.num_register_tokens == 2
