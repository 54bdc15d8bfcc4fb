"""Tests of exports: equal after reading, refused by name, or with a note."""

from __future__ import annotations

import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, weights_digest
from vitlab.models.trained import InputSpec, write_weights
from vitlab.planning.values import Trial
from vitlab.registry import slot
from vitlab.spec import TrialSpec
from vitlab.store.files import display_path, write_json
from vitlab.store.result import Circumstances, Ending, Outcome, TrialResult
from vitlab.weights.architecture import ModelFacts
from vitlab.weights.conversion import convert_weights_file
from vitlab.weights.opening import open_model

tv = torchvision("torchvision.models")  # before timm and transformers, which import it without the workaround
timm = pytest.importorskip("timm.models.vision_transformer")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("meta_models_draw_nothing")

VIT: dict[str, Any] = {"type": "vit", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2}
FILES = {
    "timm": "b.safetensors",
    "torchvision": "b.safetensors",
    "hf": "model.safetensors",
    "google": "b.npz",
}
"""A file of each format; all but Google's hold in their header, or beside them, what tensors do not show."""

EPS = {"type": "layernorm", "eps": 1e-3}
MUP = {"parametrization": "mup", "base_width": 8}
RMS = {"type": "rmsnorm", "eps": 1e-6}
POOLED = {"type": "layernorm", "eps": 1e-5}
TANH = {"type": "gelu", "approximate": "tanh"}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "final_norm_at": [{}, {"final_norm_at": "pooled"}],
    "head": [
        {},
        {"head": {"type": "linear", "pool": "gap"}},
        {"head": {"type": "linear", "pool": "map"}},
        {"head": {"type": "linear", "pool": "map", "approximate": "tanh"}},
        {"head": {"type": "mlp", "representation_size": 8}},
        *(
            {"prefix": ["class", "distillation"], "head": {"type": "distilled", "fusion": fusion}}
            for fusion in ("logits", "softmax", "cls", "dist")
        ),
        {"prefix": [], "head": {"type": "linear", "pool": "gap"}},
    ],
    "final_norm": [{}, {"final_norm": EPS}, {"final_norm": "rmsnorm"}, {"final_norm": "none"}],
    "norm": [{}, {"norm": EPS}, {"norm": EPS, "final_norm": EPS}, {"norm": "rmsnorm"}, {"norm": "none"}],
    "mlp": [{}, {"mlp": TANH}, {"mlp": {"type": "gelu", "ratio": 1.3}}, {"mlp": "swiglu"}],
    "blocks": [
        {},
        {"blocks": {"1": {"norm": EPS}}},
        {"blocks": {"0": {"mlp": TANH}}},
        {"blocks": {"1": {"mlp": TANH}}},
        {"blocks": {"1": {"mlp": {"type": "gelu", "ratio": 2.0}}}},
        {"blocks": {"0": {"mlp": "swiglu"}}},
        {"blocks": {"1": {"attention": {"type": "split", "qkv_bias": False}}}},
        {"blocks": {"1": {"norm": "rmsnorm"}}},
        {"blocks": {"0-1": {"mlp": TANH}}},
    ],
    "attention": [
        {},
        {"attention": {"type": "explicit", "qk_norm": "layernorm"}},
        {"attention": {"type": "explicit", "qk_norm": EPS}},
        {"attention": {"type": "per_head", "qk_norm": "rmsnorm", "drop": 0.1}},
        {"attention": {"type": "split", "qkv_bias": False}},
    ],
    "patch": [
        {},
        {"patch": {"type": "linear", "norm": "layernorm"}},
        {"patch": {"type": "linear", "norm": EPS}},
        {"patch": {"type": "linear", "norm": "rmsnorm"}},
        {"patch": {"type": "linear", "bias": False}},
        {"patch_size": [4, 2]},
        {"patch": {"type": "resnet", "layers": [1], "width_factor": 0.3}, "patch_size": 1},
    ],
    "rest": [
        {},
        {"registers": 2},
        {"layer_scale": 0.1},
        {"position": {"type": "learned", "prefix_rows": "none"}},
        {"position": "none"},
        {"position": "sincos2d"},
    ],
}


def write_trial(folder: Path, options: dict[str, Any], image: tuple[int, int] = (16, 16)) -> tuple[Path, Model]:
    """Return the file and the model of a trial with these options."""
    info = DataInfo(image=image, channels=3, classes=5)
    choice = slot("model").resolve_choice({**VIT, **options})
    model: Model = slot("model").build(choice, info)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            weight = torch.randn(parameter.shape, generator=generator) * 0.3 + (0.5 if parameter.ndim < 2 else 0)
            parameter.copy_((weight * 1024).round() / 1024)  # so that a row of positions added to a token is exact
    folder.mkdir(exist_ok=True)
    write_weights(folder / "weights.safetensors", model.state_dict(), InputSpec(info, (0.5,) * 3, (0.5,) * 3))
    spec = {"data": {"type": "digits"}, "model": choice.plain(), "train": {"steps": 1}}
    write_json(folder / "spec.json", Trial(TrialSpec.model_validate(spec), {}, (), None).to_json())
    return folder / "weights.safetensors", model.double().eval()


def logits(model: torch.nn.Module, image: tuple[int, int] = (16, 16)) -> Tensor:
    x_BCHW = torch.randn(3, 3, *image, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        output = model.double().eval()(x_BCHW)
    if isinstance(model, Model):
        return model.logits_by_head(output)[""]
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[no-any-return]


def facts_in(notes: tuple[str, ...]) -> ModelFacts:
    """Return the facts in the notes on an .npz: model and image size."""
    text = " ".join(notes)
    eps = float(text.partition("norms is ")[2].partition(",")[0]) if "norms is" in text else None
    gelu = "none" if "its GELU is computed exactly" in text else "tanh" if "its GELU is" in text else None
    return ModelFacts.model_validate({"eps": eps, "gelu": gelu, "image": (16, 16)})


def outcome(folder: Path, options: dict[str, Any], to: str) -> str:
    """Return ``equal``, or the sentence that refuses the model."""
    file, model = write_trial(folder, options)
    target = folder / FILES[to]
    for other in folder.glob("*.json"):
        if other.name != "spec.json":
            other.unlink()
    target.unlink(missing_ok=True)
    try:
        _, notes = convert_weights_file(file, target, to)
    except WeightsError as error:
        assert not target.exists() and "\n" not in str(error)
        return str(error).partition(": ")[2]
    facts = facts_in(notes) if to == "google" else ModelFacts()
    torch.testing.assert_close(logits(open_model(target, facts=facts).model), logits(model), rtol=1e-10, atol=1e-10)
    return "equal"


def test_changed_tensor_of_trial_file_is_refused(tmp_path: Path) -> None:
    """The trial's result has the digest of the weights that it ended with; a file without a result is opened."""
    file, _ = write_trial(tmp_path, {})
    ended = Outcome({"val/accuracy": 0.5}, (), weights_digest(safetensors.torch.load_file(file)), 1, 8)
    circumstances = Circumstances(1.0, 1.0, "here", 1, 1, 1, 1, {}, {})
    write_json(tmp_path / "result.json", asdict(TrialResult("k", "c", Ending.DONE, ended, circumstances)))
    open_model(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(WeightsError, match="its tensors are not the weights that the trial ended with"):
        open_model(file)
    (tmp_path / "result.json").unlink()
    open_model(file)


def test_changed_header_of_trial_file_is_refused(tmp_path: Path) -> None:
    file, _ = write_trial(tmp_path, {})
    whole = file.read_bytes()
    open_model(file)
    file.write_bytes(whole.replace(b"[0.5, 0.5, 0.5]", b"[0.5, 0.4, 0.5]", 1))
    with pytest.raises(WeightsError, match="its header is damaged") as caught:
        open_model(file)
    assert display_path(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "to",
    [
        pytest.param(to, marks=[pytest.mark.slow] * (to != "torchvision"))
        for to in ("timm", "torchvision", "hf", "google")
    ],
)
def test_model_is_equal_after_reading_or_refused(to: str, tmp_path: Path) -> None:
    """Every option alone, and random combinations of them; for timm, which tests below try by option, every fourth."""
    alone = [option for options in OPTIONS.values() for option in options if option][:: 4 if to == "timm" else 1]
    draw = random.Random(0)
    mixed = []
    for _ in range(5 if to == "timm" else 20):
        places = draw.sample(list(OPTIONS), 3)
        mixed.append({name: value for place in places for name, value in draw.choice(OPTIONS[place]).items()})
    differences = []
    for options in [{}, *alone, *mixed]:
        if (
            slot("model")
            .get("vit")
            .incompatibility(  # type: ignore[attr-defined]
                DataInfo(image=(16, 16), channels=3, classes=5),
                slot("model").resolve_choice({**VIT, **options}).options,
            )
        ):
            continue
        try:
            differences.append(outcome(tmp_path / "trial", options, to))
        except AssertionError as error:
            raise AssertionError(f"{options}: {error}") from error
    assert differences[0] == "equal" and differences.count("equal") >= (4 if to == "timm" else 8)
    assert len(set(differences)) > 5


@pytest.mark.parametrize("to", ["timm", "hf", "torchvision", "google"])
def test_equal_blocks_become_one_option(to: str, tmp_path: Path) -> None:
    assert outcome(tmp_path / "trial", {"blocks": {"0-1": {"mlp": TANH}}}, to) == "equal"


@pytest.mark.parametrize(
    ("options", "to", "sentence"),
    [
        ({"norm": EPS, "final_norm": EPS}, "timm", "norm.eps is 0.001, and timm has 1e-06"),
        ({"final_norm": EPS}, "timm", "final_norm.eps is 0.001, and timm has 1e-06"),
        ({"attention": {"type": "explicit", "qk_norm": EPS}}, "timm", "attention.qk_norm.eps is 0.001, and timm has"),
        ({"patch": {"type": "linear", "norm": EPS}}, "timm", "patch.norm is layernorm, and timm has none"),
        ({"patch": {"type": "linear", "norm": "rmsnorm"}}, "timm", "patch.norm is rmsnorm, and timm has none"),
        ({"blocks": {"1": {"norm": EPS}}}, "hf", "norm.eps of block 1 is 0.001, and the file holds 1e-06"),
        (
            {"blocks": {"1": {"mlp": TANH}}},
            "torchvision",
            "mlp.approximate of block 1 is tanh, and the file holds none",
        ),
        (
            {"blocks": {"1": {"mlp": {"type": "gelu", "ratio": 2}}}},
            "timm",
            "blocks.1.mlp.fc1.weight, blocks.1.mlp.fc1.bias, blocks.1.mlp.fc2.weight are of another shape",
        ),
        ({"norm": "none"}, "timm", "norm is none, and timm has layernorm"),
        (
            {"head": {"type": "linear", "pool": "map", "approximate": "tanh"}},
            "timm",
            "head.approximate is tanh, and timm has none",
        ),
        (
            {"prefix": ["class", "distillation"], "head": {"type": "distilled", "fusion": "softmax"}},
            "hf",
            "head.fusion is softmax, and the file holds logits",
        ),
        (
            {"patch": {"type": "resnet", "layers": [1], "width_factor": 0.3}, "patch_size": 1},
            "timm",
            "patch is resnet, and timm has linear",
        ),
        (
            {"patch_size": [4, 2]},
            "torchvision",
            "its patches are of 4x2 pixels, and the format supports square ones alone",
        ),
        ({"blocks": {"1": {"block": "postnorm"}}}, "timm", "block of block 1 is postnorm, and timm has prenorm"),
        ({"block": "parallel_things"}, "torchvision", "the format torchvision requires blocks.0.norm1.bias"),
        ({"blocks": {"1": {"block": "parallel_things"}}}, "timm", "block of block 1 is parallel_things, and timm has"),
        ({"attention": "differential"}, "timm", "attention is differential, and timm has softmax"),
        ({"mlp": "relu2"}, "timm", "mlp is relu2, and timm has gelu"),
        (
            {"mlp": {"type": "gelu", "norm": "layernorm"}},
            "hf",
            "Hugging Face's vit has no tensor for blocks.0.mlp.norm.weight",
        ),
        ({"attention": {"type": "auto", "proj_bias": False}}, "timm", "mlp.bias is yes, and timm has no"),
        (
            {"norm": {"type": "layernorm", "affine": "scale"}},
            "timm",
            "norm.affine is scale, and timm has scale_and_shift",
        ),
        ({"final_norm": "dyt"}, "timm", "final_norm is dyt, and timm has layernorm"),
        (MUP, "timm", "parametrization is mup with base_width 8, and timm has standard"),
        (MUP, "hf", "parametrization is mup with base_width 8, and the file holds standard"),
    ],
)
def test_unsupported_property_is_named(options: dict[str, Any], to: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in outcome(tmp_path / "trial", options, to)


@pytest.mark.parametrize(
    "options",
    [
        {"position": {"type": "rope2d", "theta": 100.0, "coordinates": "centred"}, "prefix": ["class"], "registers": 4},
        {"position": ["learned", "rope2d"], "attention": {"type": "auto", "qkv_bias": False}},
        {"position": "rope2d_mixed"},
        {"block": "respostnorm"},
        {"stem_norm": "layernorm", "patch": {"type": "linear", "bias": False}},
        {"head": {"type": "linear", "pool": "avgmax", "over": "all"}, "final_norm_at": "pooled"},
        {"mlp": {"type": "swiglu", "ratio": 2.0}},
        {"norm": RMS, "final_norm": RMS},
        {"mlp": {"type": "gelu", "norm": "layernorm"}, "attention": {"type": "auto", "norm": "layernorm"}},
        {"attention": {"type": "auto", "qkv_bias": "qv"}, "position": ["learned", "rope2d"]},
        {
            "attention": {"type": "split", "qkv_bias": "qv"},
            "position": {"type": "relative_bias", "where": "every_layer"},
            "layer_scale": 0.1,
        },
        {
            "head": {"type": "linear", "pool": "map", "over": "all", "pool_eps": 1e-5},
            "layer_scale": 0.1,
            "norm": POOLED,
            "final_norm": POOLED,
        },
    ],
)
def test_trial_is_equal_in_timm(options: dict[str, Any], tmp_path: Path) -> None:
    """The reference is the model that timm builds by the call, or from the folder, that the conversion names."""
    file, model = write_trial(tmp_path / "trial", options)
    files, notes = convert_weights_file(file, tmp_path / "model.safetensors", "timm")
    library = sys.modules["timm"]
    if len(files) == 2:
        theirs = library.create_model(f"local-dir:{tmp_path}", pretrained=True)
    else:
        (note,) = (note for note in notes if note.endswith("builds the model"))
        theirs = eval(note.removesuffix(" builds the model"), {"timm": library})
        theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)
    if len(files) == 2:  # and back
        again = open_model(tmp_path / "model.safetensors").model
        torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
        bias = model.component_choices["blocks.0.attn"].options["qkv_bias"]
        assert again.component_choices["blocks.0.attn"].options["qkv_bias"] == bias


def test_torchvision_requires_square_images(tmp_path: Path) -> None:
    file, _ = write_trial(tmp_path / "trial", {}, image=(16, 8))
    with pytest.raises(WeightsError, match="its images are of 16x8 pixels, and the format supports square ones alone"):
        convert_weights_file(file, tmp_path / "b.pth", "torchvision")


def test_foreign_config_beside_target_is_noticed(tmp_path: Path) -> None:
    file, _ = write_trial(tmp_path / "trial", {})
    write_json(tmp_path / "config.json", {"model_type": "vit", "hidden_size": 16, "num_attention_heads": 4})
    with pytest.raises(WeightsError, match="heads"):
        convert_weights_file(file, tmp_path / "model.safetensors", "hf")


# -- as the libraries read them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"final_norm_at": "pooled"}, {}),
        ({"final_norm_at": "pooled", "head": {"type": "linear", "pool": "gap"}}, {"global_pool": "avg"}),
        ({"head": {"type": "linear", "pool": "gap"}}, {"global_pool": "avg", "fc_norm": False}),
        ({"mlp": TANH}, {"act_layer": "gelu_tanh"}),
        ({"registers": 2, "layer_scale": 0.1}, {"reg_tokens": 2, "init_values": 0.1}),
        ({"attention": {"type": "per_head", "qkv_bias": False}}, {"qkv_bias": False}),
        (
            {"block": {"type": "parallel_things", "number": 2}, "layer_scale": 0.1, "attention": "split"},
            {"block_fn": timm.ParallelThingsBlock, "init_values": 0.1},
        ),
    ],
)
def test_timm_computes_the_same(options: dict[str, Any], arguments: dict[str, Any], tmp_path: Path) -> None:
    file, model = write_trial(tmp_path / "trial", options)
    convert_weights_file(file, tmp_path / "b.pth", "timm")
    base = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    theirs = timm.VisionTransformer(**base, **arguments)
    theirs.load_state_dict(torch.load(tmp_path / "b.pth"), strict=True)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"final_norm_at": "pooled", "norm": EPS, "final_norm": EPS},
        {"mlp": {"type": "gelu", "ratio": 1.3, "approximate": "tanh"}},
        {"final_norm_at": "pooled", "prefix": ["class", "distillation"], "head": "distilled"},
    ],
)
def test_transformers_computes_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    file, model = write_trial(tmp_path / "trial", options)
    convert_weights_file(file, tmp_path / "model.safetensors", "hf")
    kind = "DeiTForImageClassificationWithTeacher" if "prefix" in options else "ViTForImageClassification"
    theirs = getattr(transformers, kind).from_pretrained(tmp_path, attn_implementation="sdpa")
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pooled", [False, True])
def test_torchvision_computes_the_same(pooled: bool, tmp_path: Path) -> None:
    options = {"final_norm_at": "pooled"} if pooled else {"head": {"type": "mlp", "representation_size": 8}}
    file, model = write_trial(tmp_path / "trial", options)
    convert_weights_file(file, tmp_path / "b.pth", "torchvision")
    theirs = tv.VisionTransformer(
        image_size=16,
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=64,
        num_classes=5,
        representation_size=None if pooled else 8,
    )
    theirs.load_state_dict(torch.load(tmp_path / "b.pth"), strict=True)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-10, atol=1e-10)


def test_selected_outputs_of_a_head_equal_those_of_the_whole_head(tmp_path: Path) -> None:
    """The file of indices is of timm: the 200 classes of ImageNet-A among the 1,000 of ImageNet."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    whole = timm.VisionTransformer(**sizes, num_classes=1000).eval()
    torch.nn.init.normal_(whole.head.weight)
    torch.nn.init.normal_(whole.head.bias)
    safetensors.torch.save_file(whole.state_dict(), tmp_path / "a.safetensors")
    indices = Path(timm.__file__).parents[1] / "data" / "_info" / "imagenet_a_indices.txt"
    convert_weights_file(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", "timm", facts=ModelFacts(heads=2), classes=indices
    )
    part = timm.VisionTransformer(**sizes, num_classes=200).eval()
    part.load_state_dict(safetensors.torch.load_file(tmp_path / "b.safetensors"))
    x_BCHW = torch.randn(3, 3, 16, 16)
    rows = [int(line) for line in indices.read_text().split()]
    with torch.no_grad():
        torch.testing.assert_close(part(x_BCHW), whole(x_BCHW)[:, rows], rtol=0, atol=1e-6)
        ours = open_model(tmp_path / "b.safetensors").model
        torch.testing.assert_close(ours.logits_by_head(ours(x_BCHW))[""], part(x_BCHW))
    hub = tmp_path / "hub"
    hub.mkdir()
    safetensors.torch.save_file(whole.state_dict(), hub / "model.safetensors")
    described = {"architecture": "vit_tiny_patch16_224", "num_classes": 1000, "model_args": sizes}
    write_json(hub / "config.json", {**described, "pretrained_cfg": {"input_size": [3, 16, 16]}})
    convert_weights_file(hub / "model.safetensors", tmp_path / "e.safetensors", "timm", classes=indices)
    selected = safetensors.torch.load_file(tmp_path / "e.safetensors")
    assert all(torch.equal(selected[name], value) for name, value in part.state_dict().items())
    for text, message in (
        ("0\n1000\n", r"names output 1000, and the head has 1,000 outputs"),
        ("a\n", "no file of ind"),
    ):
        (tmp_path / "c.txt").write_text(text)
        with pytest.raises(WeightsError, match=message):
            convert_weights_file(
                tmp_path / "a.safetensors",
                tmp_path / "d.safetensors",
                "timm",
                facts=ModelFacts(heads=2),
                classes=tmp_path / "c.txt",
            )
    assert not (tmp_path / "d.safetensors").exists()
