"""Tests of weights against the libraries: theirs in ours, ours in theirs, equal logits."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError
from vitlab.registry import slot
from vitlab.weights.architecture import ModelFacts
from vitlab.weights.conversion import convert_weights_file
from vitlab.weights.conversion import inspect as look
from vitlab.weights.opening import FORMATS, open_checkpoint, open_model

tv = torchvision("torchvision.models")
timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2  # noqa: E402

CLOSE = {"rtol": 0, "atol": 1e-5}
HEADS = ModelFacts(heads=2)
SQUARE = ModelFacts(heads=2, grid=(4, 4))


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return random values, because initial zeros and ones hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def vit(**options: Any) -> nn.Module:
    base = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    return randomised(VisionTransformer(**{**base, **options}))


def deit(**options: Any) -> nn.Module:
    return randomised(
        VisionTransformerDistilled(
            **{
                "img_size": 16,
                "patch_size": 4,
                "embed_dim": 16,
                "depth": 2,
                "num_heads": 2,
                "num_classes": 5,
                **options,
            }
        )
    )


def hybrid(layers: tuple[int, ...]) -> nn.Module:
    return vit(img_size=32, patch_size=1, embed_layer=functools.partial(HybridEmbed, backbone=_resnetv2(layers=layers)))


def torchvision_vit(**options: Any) -> nn.Module:
    base = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    return randomised(tv.VisionTransformer(**{**base, "num_classes": 5, **options}))


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def hugging_face(kind: str, **options: Any) -> nn.Module:
    config = transformers.DeiTConfig if kind.startswith("DeiT") else transformers.ViTConfig
    return randomised(
        getattr(transformers, kind)(config(**{**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 5, **options}))
    )


def logits(model: nn.Module, x_BCHW: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(x_BCHW)
    if hasattr(model, "logits_by_head"):
        return model.logits_by_head(out)[""]
    return out if isinstance(out, Tensor) else out.logits


def images(*size: int) -> Tensor:
    return torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(1))


def saved(model: nn.Module, file: Path) -> Path:
    torch.save(model.state_dict(), file)
    return file


TIMM: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], ModelFacts]] = {
    "plain": (vit, (16, 16), HEADS),
    "oblong": (lambda: vit(img_size=(8, 24)), (8, 24), ModelFacts(heads=2, grid=(2, 6))),
    "oblong patches": (lambda: vit(patch_size=(8, 2), img_size=(16, 4)), (16, 4), HEADS),
    "three heads": (lambda: vit(embed_dim=24, num_heads=3), (16, 16), ModelFacts(heads=3)),
    "registers": (lambda: vit(reg_tokens=2), (16, 16), HEADS),
    "registers without rows": (lambda: vit(reg_tokens=3, no_embed_class=True), (16, 16), SQUARE),
    "distilled": (deit, (16, 16), HEADS),
    "layer scale": (lambda: vit(init_values=0.1, no_embed_class=True), (16, 16), SQUARE),
    "mean": (lambda: vit(global_pool="avg", class_token=False), (16, 16), HEADS),
    "mean of a model with a class token": (lambda: vit(global_pool="avg"), (16, 16), HEADS),
    "map": (lambda: vit(global_pool="map", class_token=False), (16, 16), HEADS),
    "map of tanh": (
        lambda: vit(global_pool="map", class_token=False, act_layer="gelu_tanh"),
        (16, 16),
        ModelFacts(heads=2, gelu="tanh"),
    ),
    "no bias of queries": (lambda: vit(qkv_bias=False), (16, 16), HEADS),
    "queries normalised": (lambda: vit(qk_norm=True), (16, 16), ModelFacts()),
    "swiglu": (lambda: vit(mlp_layer=timm.layers.SwiGLU, act_layer=nn.SiLU, mlp_ratio=2.7), (16, 16), HEADS),
    "rmsnorm": (lambda: vit(norm_layer="rmsnorm"), (16, 16), HEADS),
    "no final norm": (lambda: vit(final_norm=False), (16, 16), HEADS),
    "no positions": (lambda: vit(pos_embed="none"), (16, 16), ModelFacts(heads=2, image=(16, 16))),
    "grey": (lambda: vit(in_chans=1), (16, 16), HEADS),
    "hybrid": (lambda: hybrid((1, 2)), (32, 32), HEADS),
    "hybrid of a stem alone": (lambda: hybrid(()), (32, 32), HEADS),
}


@pytest.mark.parametrize("name", TIMM)
def test_timm_round_trip(name: str, tmp_path: Path) -> None:
    make, size, facts = TIMM[name]
    theirs = make()
    model = open_model(saved(theirs, tmp_path / "a.pth"), facts=facts)
    assert model.info.image == size and model.info.classes == 5
    x_BCHW = images(*size)[:, : model.info.channels]
    torch.testing.assert_close(logits(model.model, x_BCHW), logits(theirs, x_BCHW), **CLOSE)
    ours = randomised(model.model, seed=3)
    again = make()
    again.load_state_dict(FORMATS["timm"].from_canonical(ours.to_canonical(ours.state_dict()), 2), strict=True)
    torch.testing.assert_close(logits(again, x_BCHW), logits(ours, x_BCHW), **CLOSE)


@pytest.mark.parametrize("attention", ["split", "per_head", "explicit", "sdpa"])
def test_every_attention_reads_one_file(attention: str, tmp_path: Path) -> None:
    theirs = vit()
    checkpoint = open_checkpoint(saved(theirs, tmp_path / "a.pth"), format_name=None)
    architecture = checkpoint.architecture(HEADS)
    options = {**architecture.options, "attention": {"type": attention}}
    ours = slot("model").build({"type": "vit", **options}, architecture.info)
    ours.load_state_dict(ours.from_canonical(checkpoint.state), strict=True)
    torch.testing.assert_close(logits(ours.eval(), images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)
    back = FORMATS["hf"].from_canonical(ours.to_canonical(ours.state_dict()), 2)
    other = hugging_face("ViTForImageClassification", intermediate_size=64, layer_norm_eps=1e-6)
    other = type(other).from_pretrained(None, config=other.config, state_dict=back).eval()
    torch.testing.assert_close(logits(other, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)


@pytest.mark.parametrize("representation", [None, 12])
def test_torchvision_round_trip(representation: int | None, tmp_path: Path) -> None:
    theirs = torchvision_vit(representation_size=representation)
    model = open_model(saved(theirs, tmp_path / "a.pt"), facts=HEADS)
    assert model.mean == (0.485, 0.456, 0.406)
    torch.testing.assert_close(logits(model.model, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)
    ours = randomised(model.model, seed=3)
    state = FORMATS["torchvision"].from_canonical(ours.to_canonical(ours.state_dict()), 2)
    theirs.load_state_dict(state, strict=True)
    torch.testing.assert_close(logits(theirs, images(16, 16)), logits(ours, images(16, 16)), **CLOSE)


def test_old_names_of_torchvision(tmp_path: Path) -> None:
    theirs = torchvision_vit()
    old = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): value
        for name, value in theirs.state_dict().items()
    }
    torch.save(old, tmp_path / "a.pth")
    model = open_model(tmp_path / "a.pth", facts=HEADS).model
    torch.testing.assert_close(logits(model, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)


HUGGING_FACE = ["ViTForImageClassification", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"]


@pytest.mark.parametrize("oblong", [False, True])
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_hugging_face_round_trip(kind: str, oblong: bool, tmp_path: Path) -> None:
    size = {"image_size": (8, 24), "patch_size": (4, 8)} if oblong else {}
    theirs = hugging_face(kind, **size)
    x_BCHW = images(8, 24) if oblong else images(16, 16)
    facts = ModelFacts(heads=2, grid=(2, 3) if oblong else None)
    theirs.save_pretrained(tmp_path / "disk")
    from_disk = open_model(tmp_path / "disk" / "model.safetensors")
    in_memory = open_model(saved(theirs, tmp_path / "memory.pth"), facts=facts)
    for model in (from_disk, in_memory):
        torch.testing.assert_close(logits(model.model, x_BCHW), logits(theirs, x_BCHW), **CLOSE)
    assert [note[:34] for note in from_disk.notes] == ["assumed: pixels normalised by mean"], "its config says the rest"
    ours = randomised(in_memory.model, seed=3)
    state = FORMATS["hf"].from_canonical(ours.to_canonical(ours.state_dict()), 2)
    theirs = type(theirs).from_pretrained(None, config=theirs.config, state_dict=state).eval()
    torch.testing.assert_close(logits(theirs, x_BCHW), logits(ours, x_BCHW), **CLOSE)


def test_hugging_face_output_equals_transformers(tmp_path: Path) -> None:
    """Names on disk equal those of ``save_pretrained``, and ``from_pretrained`` reads the folder."""
    theirs = hugging_face("DeiTForImageClassificationWithTeacher")
    theirs.save_pretrained(tmp_path / "theirs")
    source = saved(theirs, tmp_path / "memory.pth")
    convert_weights_file(source, tmp_path / "ours" / "model.safetensors", "hf", facts=HEADS)
    output, expected = (safetensors.torch.load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    assert output.keys() == expected.keys() and all(torch.equal(output[name], expected[name]) for name in expected)
    again = transformers.DeiTForImageClassificationWithTeacher.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(logits(again, images(16, 16)), logits(theirs, images(16, 16)), rtol=0, atol=0)


def test_hugging_face_body_has_no_head(tmp_path: Path) -> None:
    theirs = hugging_face("ViTModel")
    file = saved(theirs, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"a\.pth: these weights have no head \(head\.weight\)"):
        open_model(file, facts=HEADS)
    model = open_model(file, facts=HEADS, head="new").model
    with torch.no_grad():
        features = model.forward_features(images(16, 16))
        expected = theirs(images(16, 16))
    torch.testing.assert_close(features, expected.last_hidden_state, **CLOSE)
    assert logits(model, images(16, 16)).shape == (3, 1) and not logits(model, images(16, 16)).any()
    assert not look(file, facts=HEADS).faults
    # The hidden layer before the head that is not there is kept.
    convert_weights_file(file, tmp_path / "model.safetensors", "hf", facts=HEADS)
    again = transformers.ViTModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images(16, 16)).pooler_output, expected.pooler_output, **CLOSE)
    convert_weights_file(file, tmp_path / "b.npz", "google", facts=HEADS)
    kernel_OD = np.load(tmp_path / "b.npz")["pre_logits/kernel"].T
    assert np.array_equal(kernel_OD, theirs.state_dict()["pooler.dense.weight"].numpy())


# -- Google's .npz, whose reader in timm is the oracle ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "mean of normed tokens", "map", "hybrid", "hybrid of a stem alone"])
def test_google_round_trip_through_timm_reader(name: str, tmp_path: Path) -> None:
    make: Callable[[], nn.Module]
    make = {
        "plain": lambda: vit(act_layer="gelu_tanh"),
        "mean of normed tokens": lambda: vit(class_token=False, global_pool="avg", fc_norm=False),
        "map": lambda: vit(class_token=False, global_pool="map", act_layer="gelu_tanh"),
        "hybrid": lambda: hybrid((1, 2)),
        "hybrid of a stem alone": lambda: hybrid(()),
    }[name]
    theirs, file = make(), tmp_path / "a.npz"
    convert_weights_file(saved(theirs, tmp_path / "a.pth"), file, "google", facts=HEADS)
    again = randomised(make(), seed=9)
    again.load_pretrained(str(file))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in theirs.state_dict().items())
    canonical = open_checkpoint(file, format_name=None).state
    assert canonical.keys() == theirs.state_dict().keys()
    assert all(torch.equal(canonical[name], value) for name, value in theirs.state_dict().items())
    model = open_model(file)
    assert model.mean == (0.5, 0.5, 0.5)
    if name in ("plain", "map"):
        torch.testing.assert_close(logits(model.model, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)


def npz(model: nn.Module, **more: Any) -> dict[str, np.ndarray[Any, Any]]:
    state = FORMATS["google"].from_canonical(model.state_dict(), 2)
    return {**{name: value.numpy() for name, value in state.items()}, **more}


def test_npz_round_trips_bitwise(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = npz(hybrid((1, 1)))
    arrays = {name: rng.standard_normal(value.shape).astype(np.float32) for name, value in arrays.items()}
    arrays |= {
        "pre_logits/kernel": rng.standard_normal((16, 12)).astype(np.float32),
        "pre_logits/bias": np.ones(12, "f4"),
    }
    arrays["head/kernel"] = rng.standard_normal((12, 5)).astype(np.float32)
    state = {name: torch.from_numpy(value) for name, value in arrays.items()}
    canonical = FORMATS["google"].to_canonical(state)
    assert not canonical.unknown and not canonical.dropped
    back = FORMATS["google"].from_canonical(canonical.state, 2)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) and back[name].shape == state[name].shape for name in state)


@pytest.mark.parametrize("stacked", [False, True])
def test_big_vision_layout(stacked: bool, tmp_path: Path) -> None:
    theirs = vit(no_embed_class=True, act_layer="gelu_tanh")
    arrays = {}
    for name, value in npz(theirs).items():
        for old, new in (("LayerNorm_2", "LayerNorm_1"), ("Attention_1", "Attention_0"), ("MlpBlock_3", "MlpBlock_0")):
            name = name.replace(old, new)
        arrays["params/" + name.replace("Transformer/posembed_input/pos_embedding", "pos_embedding")] = value
    if stacked:
        blocks = [name for name in arrays if "encoderblock_0" in name]
        for name in blocks:
            both = [arrays.pop(name.replace("block_0", f"block_{i}")) for i in (0, 1)]
            arrays[name.replace("encoderblock_0", "encoderblock")] = np.stack(both)
    arrays["opt/step"] = np.int64(3)
    np.savez(tmp_path / "a.npz", **arrays)
    model = open_model(tmp_path / "a.npz")
    torch.testing.assert_close(logits(model.model, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)
    again = vit(no_embed_class=True, act_layer="gelu_tanh")
    randomised(again, seed=7).load_pretrained(str(tmp_path / "a.npz"))
    torch.testing.assert_close(logits(again, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)
    assert model.notes[-1] == "left out: opt/step"


# -- DeiT's own files -------------------------------------------------------------------------------------------------


def test_files_written_by_deit_training(tmp_path: Path) -> None:
    theirs = deit()
    torch.save(
        {"model": theirs.state_dict(), "epoch": 3, "args": argparse.Namespace(lr=1e-3), "optimizer": {"state": {}}},
        tmp_path / "a.pth",
    )
    model = open_model(tmp_path / "a.pth", facts=HEADS)
    torch.testing.assert_close(logits(model.model, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)
    assert model.mean == (0.485, 0.456, 0.406)
    assert "under the key 'model'" in model.notes[0] and "epoch, args, optimizer" in model.notes[-1]


def test_deit_3(tmp_path: Path) -> None:
    """Its layer scales have other names, and its class token has no position row."""
    theirs = vit(init_values=0.1, no_embed_class=True)
    state = {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value
        for name, value in theirs.state_dict().items()
    }
    torch.save({"model": state}, tmp_path / "a.pth")
    filtered = timm.models.vision_transformer.checkpoint_filter_fn(state, theirs, adapt_layer_scale=True)
    checkpoint = open_checkpoint(tmp_path / "a.pth", format_name=None)
    assert checkpoint.form.name == "timm" and checkpoint.state.keys() == filtered.keys()
    model = open_model(tmp_path / "a.pth", facts=HEADS)
    torch.testing.assert_close(logits(model.model, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)
    assert model.mean == (0.485, 0.456, 0.406)


# -- conversion -------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(st.permutations(["timm", "torchvision", "hf", "google"]))
def test_format_chain_changes_no_bit(way: list[str]) -> None:
    state = start = dict(vit().state_dict())
    for name in way:
        exported = FORMATS[name].from_canonical(state, 2)
        assert FORMATS[name].recognise(exported.keys())
        back = FORMATS[name].to_canonical(exported)
        assert not back.unknown and not back.dropped
        state = back.state
    assert state.keys() == start.keys() and all(torch.equal(state[name], start[name]) for name in start)


@pytest.mark.parametrize("how", ["timm", "google", "torchvision", "hf"])
def test_other_resolution_equals_library(how: str, tmp_path: Path) -> None:
    theirs, file = vit(), tmp_path / "b.safetensors"
    convert_weights_file(saved(theirs, tmp_path / "a.pth"), file, "timm", facts=HEADS, image=(24, 32), resample=how)
    table = theirs.state_dict()["pos_embed"]
    resampled = open_checkpoint(file, format_name=None).state["pos_embed"]
    grid = table[:, 1:].reshape(1, 4, 4, 16)
    if how == "timm":
        theirs.set_input_size((24, 32))
        expected = theirs.state_dict()["pos_embed"]
    elif how == "google":
        from scipy.ndimage import zoom

        expected = torch.from_numpy(zoom(grid[0].numpy(), (6 / 4, 8 / 4, 1), order=1)).reshape(1, 48, 16)
    else:
        corners = {"align_corners": True} if how == "torchvision" else {"align_corners": False}
        expected = nn.functional.interpolate(grid.permute(0, 3, 1, 2), (6, 8), mode="bicubic", **corners)
        expected = expected.flatten(2).mT
    torch.testing.assert_close(resampled[:, -48:], expected[:, -48:], rtol=0, atol=1e-5)
    assert torch.equal(resampled[:, 0], table[:, 0])
    model = open_model(file)
    assert model.info.image == (24, 32) and not model.notes, "the header of the new file says what tensors do not"
    if how == "timm":
        torch.testing.assert_close(logits(model.model, images(24, 32)), logits(theirs, images(24, 32)), **CLOSE)


def test_missing_class_token_row_is_added_without_changing_function(tmp_path: Path) -> None:
    theirs, other = vit(no_embed_class=True), torchvision_vit(mlp_dim=64)
    convert_weights_file(saved(theirs, tmp_path / "a.pth"), tmp_path / "b.pth", "torchvision", facts=SQUARE)
    other.load_state_dict(torch.load(tmp_path / "b.pth"), strict=True)
    torch.testing.assert_close(logits(other, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)


def test_pre_logits_are_kept_or_dropped_with_the_head(tmp_path: Path) -> None:
    source = saved(torchvision_vit(representation_size=16), tmp_path / "a.pth")
    with pytest.raises(WeightsError, match="have no pre-logits"):
        convert_weights_file(source, tmp_path / "b.pth", "hf", facts=HEADS)
    _, notes = convert_weights_file(source, tmp_path / "b.pth", "timm", facts=HEADS, head="drop")
    assert any("pre_logits.fc.weight" in note and "head.bias" in note for note in notes)
    assert not any(name.startswith(("head", "pre_logits")) for name in torch.load(tmp_path / "b.pth"))
    convert_weights_file(source, tmp_path / "c.npz", "google", facts=HEADS)
    assert "pre_logits/kernel" in np.load(tmp_path / "c.npz").files


@pytest.mark.parametrize(
    ("make", "to", "sentence"),
    [
        (lambda: vit(reg_tokens=2), "hf", "Hugging Face's vit has no tensor for reg_token; try --to timm"),
        (lambda: vit(init_values=0.1), "torchvision", r"torchvision has no tensor for blocks\.0\.ls1\.gamma"),
        (lambda: vit(norm_layer="rmsnorm"), "hf", r"requires blocks\.0\.norm1\.bias, norm\.bias"),
        (lambda: vit(class_token=False, global_pool="avg"), "torchvision", "requires cls_token"),
        (lambda: vit(global_pool="avg"), "hf", "no tensor for fc_norm|requires norm|reads the mean"),
        (deit, "torchvision", "torchvision has no tensor for dist_token, head_dist"),
    ],
)
def test_unsupported_model_is_refused_by_name(
    make: Callable[[], nn.Module], to: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=sentence):
        convert_weights_file(saved(make(), tmp_path / "a.pth"), tmp_path / "b.pth", to, facts=HEADS)
    assert not (tmp_path / "b.pth").exists()


# -- bad files --------------------------------------------------------------------------------------------------------


def refusal(file: Path, **how: Any) -> str:
    with pytest.raises(WeightsError) as refused:
        open_model(file, **{"facts": HEADS, **how})
    sentence = str(refused.value)
    assert "\n" not in sentence and file.name in sentence
    return sentence


@pytest.mark.parametrize("suffix", ["pth", "safetensors", "npz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_file_gives_one_sentence(suffix: str, share: float, tmp_path: Path) -> None:
    whole = tmp_path / f"whole.{suffix}"
    convert_weights_file(saved(vit(), tmp_path / "a.pth"), whole, "google" if suffix == "npz" else "timm", facts=HEADS)
    torn = tmp_path / f"torn.{suffix}"
    torn.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])
    assert "cannot be read as" in refusal(torn)


class Foreign:
    pass


def test_other_file_types_are_refused(tmp_path: Path) -> None:
    state = vit().state_dict()
    torch.save(state, tmp_path / "a.safetensors")
    assert "is a file of torch.save, but its suffix is .safetensors; rename it to .pth" in refusal(
        tmp_path / "a.safetensors"
    )
    (tmp_path / "b.pth").write_bytes(safetensors.torch.save({name: value.clone() for name, value in state.items()}))
    assert "is a safetensors file, but its suffix is .pth; rename it to .safetensors" in refusal(tmp_path / "b.pth")
    np.savez(tmp_path / "c.npz", object=np.array([{}], dtype=object))
    assert "allow_pickle" in refusal(tmp_path / "c.npz") or "pickle" in refusal(tmp_path / "c.npz")
    torch.save({"model": Foreign()}, tmp_path / "d.pth")
    assert "only tensors are read" in refusal(tmp_path / "d.pth") and "Foreign" in refusal(tmp_path / "d.pth")
    torch.save({"epoch": 3}, tmp_path / "e.pth")
    assert "holds no tensors; its keys: epoch" in refusal(tmp_path / "e.pth")
    torch.save(nn.Conv2d(3, 4, 1).state_dict(), tmp_path / "f.pth")
    assert "Its first keys are weight, bias" in refusal(tmp_path / "f.pth")
    assert "no such file" in refusal(tmp_path / "g.pth")
    (tmp_path / "h.pth").mkdir()
    assert "is a folder" in refusal(tmp_path / "h.pth")
    (tmp_path / "weights.onnx").touch()
    assert ".safetensors, .pth" in refusal(tmp_path / "weights.onnx")
    shuffle = tv.shufflenet_v2_x0_5(weights=None, num_classes=2)
    assert "conv1.0.weight" in refusal(saved(shuffle, tmp_path / "i.pth"))
    torch.save({"stem.0.weight": torch.ones(4), "fc.weight": torch.ones(2, 4)}, tmp_path / "j.pth")
    assert "stem.0.weight has shape (4,)" in refusal(tmp_path / "j.pth")
    torch.save({"stem.0.weight": torch.ones(4, 3, 3, 3), "fc.weight": torch.tensor(1.0)}, tmp_path / "k.pth")
    assert "fc.weight has shape ()" in refusal(tmp_path / "k.pth")


def test_wrong_format_names_right_one(tmp_path: Path) -> None:
    file = saved(torchvision_vit(), tmp_path / "a.pth")
    with pytest.raises(WeightsError, match="not in the format hf; it looks like torchvision"):
        look(file, form="hf")


def test_missing_unknown_and_misshapen_keys_are_named(tmp_path: Path) -> None:
    state = dict(vit().state_dict())
    del state["blocks.1.norm2.bias"]
    state["blocks.0.extra"] = torch.zeros(2)
    state["blocks.1.mlp.fc1.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "a.pth")
    sentence = refusal(tmp_path / "a.pth")
    assert "blocks.1.norm2.bias is missing" in sentence and "blocks.0.extra is unknown" in sentence
    assert "blocks.1.mlp.fc1.bias is of another shape" in sentence
    report = look(tmp_path / "a.pth", facts=HEADS)
    assert report.faults == {
        "missing": ["blocks.1.norm2.bias"],
        "unknown": ["blocks.0.extra"],
        "of another shape": ["blocks.1.mlp.fc1.bias"],
    }


def test_norm_before_blocks_is_read_from_tensors(tmp_path: Path) -> None:
    theirs = vit(pre_norm=True)
    ours = open_model(saved(theirs, tmp_path / "clip.pth"), facts=HEADS).model
    torch.testing.assert_close(logits(ours, images(16, 16)), logits(theirs, images(16, 16)), **CLOSE)


def test_large_number_in_foreign_name_is_read_at_once(tmp_path: Path) -> None:
    file, name = tmp_path / "dated.safetensors", "runs.20261124153000.step"
    safetensors.torch.save_file({"encoder.pos_embedding": torch.zeros(1, 17, 16), name: torch.zeros(1)}, file)
    with pytest.raises(WeightsError, match=f"{name} is unknown"):
        look(file)


def test_facts_without_tensors_are_requested(tmp_path: Path) -> None:
    file = saved(vit(), tmp_path / "a.pth")
    assert "--heads" in refusal(file, facts=ModelFacts())
    assert "3 heads do not divide the width of 16 channels" in refusal(file, facts=ModelFacts(heads=3))
    oblong = saved(vit(img_size=(8, 24)), tmp_path / "b.pth")
    assert "13 rows of pos_embed, with 1 token before the patches, are not a square grid" in refusal(oblong)
    both = saved(vit(img_size=12, reg_tokens=4, no_embed_class=True), tmp_path / "c.pth")
    assert "may be a grid of 2x2 or 3x3" in refusal(both)
    assert open_model(both, facts=ModelFacts(heads=2, grid=(3, 3))).info.image == (12, 12)
    assert open_model(saved(vit(embed_dim=192, num_heads=3), tmp_path / "d.pth")).model.geometry.heads == 3
    assert "assumed: 3 heads, as ViT-Ti has" in str(open_model(tmp_path / "d.pth").notes)


def test_hub_files_beside_weights(tmp_path: Path) -> None:
    file = saved(vit(), tmp_path / "pytorch_model.bin")
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_features": 16,
        "model_args": {"num_heads": 2, "embed_dim": 16, "depth": 2, "patch_size": 4},
        "pretrained_cfg": {"input_size": [3, 16, 16], "mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = open_model(file)
    assert model.mean == (0.1, 0.2, 0.3) and model.model.geometry.heads == 2
    assert not any("evaluation" in note for note in model.notes)
    for crop, options in (
        ({"crop_pct": 0.9, "interpolation": "bicubic"}, "data.crop_pct: 0.9, data.interpolation: bicubic;"),
        ({"crop_pct": 0.9, "test_crop_pct": 1.0, "crop_mode": "squash"}, "data.crop_pct: 1.0, data.fit: squash;"),
    ):
        with_crop = {**config, "pretrained_cfg": {**config["pretrained_cfg"], **crop}}
        (tmp_path / "config.json").write_text(json.dumps(with_crop))
        assert any(f"the authors' evaluation of pictures is {options}" in note for note in open_model(file).notes)
    with pytest.raises(WeightsError, match="the file says heads 2, and 4 was given"):
        open_model(file, facts=ModelFacts(heads=4))
    for wrong, sentence in (
        ({**config, "model_args": {**config["model_args"], "embed_dim": 8}}, "size mismatch for cls_token"),
        (
            {**config, "model_args": {**config["model_args"], "patch_size": 8}},
            "a model whose pos_embed has shape (1, 5, 16)",
        ),
        ({**config, "global_pool": "avgmax"}, 'Missing key(s) in state_dict: "fc_norm.weight"'),
        ({**config, "model_args": {"num_heads": "two"}}, "timm cannot load these tensors into vit_tiny_patch16_224"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        assert sentence in refusal(file)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json cannot be read"):
        open_model(file)
