"""Models of other libraries, shrunk and with random weights, opened by vitlab: equal, refused, or documented.

``python tools/weights_zoo.py`` tries all of them and writes ``docs/pages/weights.md``; ``test_weights_zoo.py`` tries a
sample and holds it against that page.  ``python tools/weights_zoo.py WORD`` prints the rows whose name holds WORD.
"""

from __future__ import annotations

import functools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitlab.components.position import encodings_by_prefix
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError
from vitlab.registry import slot
from vitlab.weights.architecture import ModelFacts
from vitlab.weights.opening import FORMATS, open_model

tv = torchvision("torchvision.models")
import timm  # noqa: E402
import transformers  # noqa: E402
from timm.layers import SwiGLU  # noqa: E402
from timm.models import vision_transformer as timm_vit  # noqa: E402
from timm.models._hub import save_config_for_hf  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "pages" / "weights.md"
EQUAL, ROTARY = 1e-10, 1e-6  #: relative differences in float64; timm computes learned rotations in float32
UNSTATED = ModelFacts()
Verdict = Literal["equal", "refused", "differs"]


@dataclass(frozen=True)
class Original:
    """A model, the file of its weights, and the facts stated on opening it."""

    model: nn.Module
    file: Path
    size: tuple[int, int]
    channels: int = 3
    facts: ModelFacts = UNSTATED
    features: Callable[[nn.Module, Tensor], Tensor] | None = None  #: of a body without a head


@dataclass(frozen=True)
class Case:
    """A model to be tried."""

    section: str
    name: str
    make: Callable[[Path], Original]
    assumed: tuple[str, ...] = field(default=())  #: parts of assumptions that may change the function


# -- attempts ---------------------------------------------------------------------------------------------------------


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a random value, because initial zeros and ones hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def outcome(case: Case) -> tuple[Verdict, str]:
    """Return the verdict on a case, and vitlab's notes.

    Raises:
        AssertionError: if it computes something else, and no assumption of the case is among the notes.
    """
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng():
        torch.manual_seed(0)
        folder = Path(name)
        original = case.make(folder)
        body = original.features is not None
        try:
            model = open_model(original.file, facts=original.facts, head="new" if body else "keep")
        except WeightsError as error:
            sentence = str(error).removeprefix(f"{original.file}: ").replace(f"{folder}/", "")
            return "refused", sentence
        notes = [note.replace(f"{folder}/", "").removeprefix("assumed: ") for note in model.notes]
        mine, theirs = model.model.double(), original.model.double()
        exact = _exact_rotation(mine, theirs)
        generator = torch.Generator().manual_seed(1)
        x_BCHW = torch.randn(2, original.channels, *original.size, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            if original.features is not None:
                actual, expected = mine.forward_features(x_BCHW), original.features(theirs, x_BCHW)
            else:
                actual, expected = mine.logits_by_head(mine(x_BCHW))[""], _logits(theirs(x_BCHW))
        difference = float((actual - expected).abs().max() / expected.abs().max())
        if difference <= (EQUAL if exact else ROTARY):
            return "equal", "; ".join(notes)
        listed = " ".join(notes)
        assert case.assumed and all(part in listed for part in case.assumed), (
            f"{case.section}, {case.name}: off by {difference:.1e}, with the notes {notes}"
        )
        return "differs", "; ".join(notes)


def _logits(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else getattr(output, "image_embeds", None)
    return output.logits if logits is None else logits


def _exact_rotation(mine: Any, theirs: Any) -> bool:
    """Recompute fixed rotations of both sides in float64; return whether nothing is computed in float32."""
    names = {type(module).__name__ for module in theirs.modules()}
    if any(name.endswith("Fp32") for name in names) or names & {"Aimv2RMSNorm", "DINOv3ViTRopePositionEmbedding"}:
        return False
    rope = getattr(theirs, "rope", None)
    if rope is None:
        return True
    if not hasattr(rope, "temperature") or hasattr(rope, "freqs"):
        return False
    grid = theirs.patch_embed.grid_size
    quarter = rope.dim // 4
    frequency = rope.temperature ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    row, column = (place.flatten().double() for place in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    row, column = row + rope.grid_offset, column + rope.grid_offset
    reference = getattr(rope, "ref_feat_shape", None)
    if type(rope).__name__ == "RotaryEmbeddingDinoV3":
        row, column = (2 * math.pi * ((p + 0.5) / s * 2 - 1) for p, s in zip((row, column), grid, strict=True))
    elif reference is not None:
        row, column = (p / s * r for p, s, r in zip((row, column), grid, reference, strict=True))
    axes = (column, row) if rope.grid_indexing == "xy" else (row, column)
    angle = torch.cat([axis[:, None] * frequency for axis in axes], 1)
    angle = torch.cat([angle, angle], 1) if rope.rotate_half else angle.repeat_interleave(2, 1)
    table = torch.cat([angle.sin(), angle.cos()], 1)
    torch.testing.assert_close(rope.get_embed(grid).double(), table, rtol=0, atol=1e-5)
    theirs.rope.get_embed = lambda shape=None: table
    with _float64():
        choice, context = mine._parts["position"]
        fresh = encodings_by_prefix(slot("position").build(choice, *context))
    for at, position in encodings_by_prefix(mine.position).items():
        if type(position).__name__ == "RoPE2D":
            position.cos, position.sin = fresh[at].cos, fresh[at].sin
    return True


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- timm -------------------------------------------------------------------------------------------------------------

CONFIGURED = "timm, with its config.json"
ARGUMENTS = "timm, arguments of VisionTransformer"
ROTATED = "timm, arguments of Eva"
BARE = "timm, the tensors alone"


def published(name: str, folder: Path, **more: Any) -> nn.Module:
    """Return timm's architecture at a head width of 8, with two blocks and 4 by 4 patches, and write its config."""
    with torch.device("meta"):
        whole = timm.create_model(name)
    first = whole.blocks[0]
    attention = first.attns[0].attn if hasattr(first, "attns") else getattr(first, "attn", first)
    heads = attention.num_heads
    patch = int(next(part for part in name.split("_") if part.startswith("patch"))[5:]) if "patch" in name else 16
    patch = 32 if "_s32_" in name or name.startswith(("test_vit",)) else patch
    options = {"embed_dim": 8 * heads, "depth": 2, "img_size": 4 * patch, "num_classes": 5, **more}
    if getattr(getattr(whole, "rope", None), "ref_feat_shape", None):
        options.setdefault("ref_feat_shape", (4, 4))
    if name == "vit_base_mci_224":
        options["embed_dim"] = 768  # created by its last layer
    keys = {getattr(getattr(block, "attn", None), "num_kv_heads", heads) for block in whole.blocks}
    if keys != {heads} or "sapiens" in name:  # one number per block, of which there are two here
        options["num_kv_heads"] = (heads, min(keys))
    model = randomised(timm.create_model(name, **options))
    save_config_for_hf(model, str(folder / "config.json"), model_args=_plain(options))
    return model


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: value.__name__ if isinstance(value, type) else value for name, value in options.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in texts.items()}


def _saved(model: nn.Module, file: Path, **how: Any) -> Original:
    torch.save(model.state_dict(), file)
    size = model.patch_embed.img_size
    return Original(model, file, size, model.in_chans, **how)


def configured(name: str, folder: Path, **options: Any) -> Original:
    return _saved(published(name, folder, **options), folder / "pytorch_model.bin")


def small(folder: Path, base: str, **options: Any) -> Original:
    common = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5, "img_size": 16, "patch_size": 4}
    options = {**common, **options}
    model = randomised(timm.create_model(base, **options))
    save_config_for_hf(model, str(folder / "config.json"), model_args=_plain(options))
    return _saved(model, folder / "pytorch_model.bin")


def bare(folder: Path, *, facts: ModelFacts = ModelFacts(heads=2), **options: Any) -> Original:  # noqa: B008
    common = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5, "img_size": 16, "patch_size": 4}
    return _saved(randomised(VisionTransformer(**{**common, **options})), folder / "a.pth", facts=facts)


def bare_named(name: str, folder: Path, facts: ModelFacts, **options: Any) -> Original:
    return _saved(published(name, folder, **options), folder / "a.pth", facts=facts)


VIT_ARGUMENTS: list[dict[str, Any]] = [
    {},
    *({"global_pool": pool} for pool in ("avg", "avgmax", "max", "map", "prr")),
    *({"global_pool": pool, "class_token": False} for pool in ("avg", "map")),
    {"global_pool": "avg", "fc_norm": False},
    {"global_pool": "token", "fc_norm": True},
    {"global_pool": "map", "fc_norm": True},
    {"global_pool": "avg", "pool_include_prefix": True},
    {"global_pool": "map", "pool_include_prefix": True},
    {"global_pool": "map", "pool_include_prefix": True, "class_token": False},
    {"global_pool": "avg", "pool_include_prefix": True, "reg_tokens": 2, "class_token": False},
    *({"norm_layer": norm} for norm in ("layernorm", "layernormfp32", "rmsnorm", "rmsnormfp32", "simplenorm")),
    *({"act_layer": act} for act in ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")),
    {"act_layer": "gelu_tanh", "global_pool": "map"},
    {"mlp_layer": SwiGLU, "act_layer": "silu"},
    {"mlp_layer": SwiGLU, "act_layer": "gelu"},
    {"mlp_layer": SwiGLU, "act_layer": "silu", "global_pool": "map"},
    {"mlp_layer": timm.layers.GluMlp},
    {"mlp_layer": timm.layers.Mlp},
    {"reg_tokens": 1},
    {"reg_tokens": 4},
    {"no_embed_class": True},
    {"no_embed_class": True, "reg_tokens": 3},
    {"no_embed_class": True, "img_size": [12, 20]},
    {"dynamic_img_size": True},
    {"pre_norm": True},
    {"final_norm": False},
    {"qkv_bias": False},
    {"qk_norm": True},
    {"proj_bias": False},
    {"scale_attn_norm": True},
    {"scale_mlp_norm": True},
    {"init_values": 0.1},
    {"pos_embed": "none"},
    {"attn_layer": "diff"},
    {"embed_norm_layer": "layernorm"},
    {"embed_norm_layer": "rmsnorm"},
    {"img_size": [12, 20]},
    {"img_size": [16, 36]},
    {"patch_size": [4, 8]},
    {"in_chans": 1},
    {"in_chans": 4},
    {"mlp_ratio": 2},
    {"mlp_ratio": 2.7},
    {"num_heads": 4},
    {"drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.1},
    {"weight_init": "jax", "fix_init": True},
    {"block_fn": timm_vit.ResPostBlock, "init_values": 0.1},
    {"block_fn": timm_vit.ParallelScalingBlock},
    {"block_fn": timm_vit.ParallelThingsBlock},
]
"""Sets of arguments beside a config.json; what JSON cannot hold stands there by its name."""

EVA_ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"rope_grid_indexing": "ij"},
    {"rope_rotate_half": True},
    {"rope_grid_indexing": "ij", "rope_rotate_half": True},
    {"rope_temperature": 10.0},
    {"rope_type": "dinov3"},
    {"rope_type": "dinov3", "rope_grid_indexing": "ij", "rope_rotate_half": True, "img_size": [12, 20]},
    {"rope_type": "mixed"},
    {"rope_type": "mixed", "rope_grid_indexing": "ij"},
    {"rope_type": "mrope", "rope_mrope_section": [2, 1, 1], "rope_grid_indexing": "ij"},
    {"rope_grid_offset": 1.0},
    {"ref_feat_shape": [4, 4]},
    {"ref_feat_shape": [8, 8]},
    {"use_abs_pos_emb": True},
    {"use_abs_pos_emb": True, "use_rot_pos_emb": False},
    {"use_rot_pos_emb": False},
    {"img_size": [12, 20]},
    {"qk_norm": True, "rope_rotate_half": True},
    {"attn_type": "eva"},
    {"qkv_fused": False},
    {"qkv_bias": False},
    {"num_reg_tokens": 3},
    {"class_token": False, "global_pool": "avg"},
    {"global_pool": "avg", "use_fc_norm": False},
    {"global_pool": "map", "attn_pool_mlp_ratio": 4.0},
    {"global_pool": "map", "class_token": False},
    {"swiglu_mlp": True},
    {"swiglu_mlp": True, "swiglu_align_to": 8},
    {"attn_only_layer_scale": True},
    {"use_post_norm": True, "attn_type": "eva"},
    {"scale_mlp": True},
    {"dynamic_img_size": True},
    {"rope_rescale_coords": 2.0},
]

PLAIN = ModelFacts(heads=2)
BARE_FILES: dict[str, tuple[dict[str, Any], ModelFacts, tuple[str, ...]]] = {
    "as it is": ({}, PLAIN, ()),
    "heads of no size": ({}, ModelFacts(), ()),
    "registers": ({"reg_tokens": 2}, PLAIN, ()),
    "mean": ({"global_pool": "avg"}, PLAIN, ()),
    "mean, pool_include_prefix": ({"global_pool": "avg", "pool_include_prefix": True}, PLAIN, ("without the tokens",)),
    "mean, fc_norm off": ({"global_pool": "avg", "fc_norm": False}, PLAIN, ("the head reads the class token",)),
    "class token, fc_norm on": ({"fc_norm": True}, PLAIN, ("the head reads the mean",)),
    "largest": ({"global_pool": "max"}, PLAIN, ("the head reads the mean",)),
    "attention pooling": ({"global_pool": "map"}, PLAIN, ()),
    "attention pooling, pool_include_prefix": (
        {"global_pool": "map", "pool_include_prefix": True},
        PLAIN,
        ("reads the patches alone",),
    ),
    "several attentions side by side": (
        {"block_fn": functools.partial(timm_vit.ParallelThingsBlock, num_parallel=3), "init_values": 0.1},
        PLAIN,
        (),
    ),
    "no class row": ({"no_embed_class": True}, PLAIN, ()),
    "no class row, 4x4 stated": ({"no_embed_class": True}, ModelFacts(heads=2, grid=(4, 4)), ()),
    "no class row, 9 patches": ({"no_embed_class": True, "img_size": 12}, PLAIN, ()),
    "no class row, prime with one": ({"no_embed_class": True, "img_size": 8}, PLAIN, ()),
    "3x5 patches": ({"img_size": (12, 20)}, PLAIN, ()),
    "3x5 patches, stated": ({"img_size": (12, 20)}, ModelFacts(heads=2, grid=(3, 5)), ()),
    "2x6 patches": ({"img_size": (8, 24)}, PLAIN, ()),
    "no positions": ({"pos_embed": "none"}, PLAIN, ()),
    "no positions, 4x4 stated": ({"pos_embed": "none"}, ModelFacts(heads=2, grid=(4, 4)), ()),
    "gelu_tanh": ({"act_layer": "gelu_tanh"}, PLAIN, ("GELU computed exactly",)),
    "quick_gelu": ({"act_layer": "quick_gelu"}, PLAIN, ("GELU computed exactly",)),
    "relu": ({"act_layer": "relu"}, PLAIN, ("GELU computed exactly",)),
    "swiglu of silu": ({"mlp_layer": SwiGLU, "act_layer": "silu"}, PLAIN, ()),
    "swiglu of gelu": ({"mlp_layer": SwiGLU}, PLAIN, ("SiLU",)),
    "rmsnorm": ({"norm_layer": "rmsnorm"}, PLAIN, ()),
    "simplenorm": ({"norm_layer": "simplenorm"}, PLAIN, ("RMSNorm",)),
    "eps 1e-5": ({"norm_layer": functools.partial(nn.LayerNorm, eps=1e-5)}, PLAIN, ("norms of eps 1e-06",)),
    "eps 1e-12": ({"norm_layer": functools.partial(nn.LayerNorm, eps=1e-12)}, PLAIN, ("norms of eps 1e-06",)),
    "post-norm blocks": ({"block_fn": timm_vit.ResPostBlock}, PLAIN, ("norms before attention and MLP",)),
    "parallel blocks": ({"block_fn": timm_vit.ParallelScalingBlock}, PLAIN, ()),
    "norm before the blocks": ({"pre_norm": True}, PLAIN, ()),
    "one channel": ({"in_chans": 1}, PLAIN, ()),
}
SHRUNK = ModelFacts(heads=6, grid=(4, 4))
BARE_NAMES: dict[str, tuple[ModelFacts, tuple[str, ...]]] = {
    "vit_small_patch16_dinov3": (SHRUNK, ("neither rotary",)),
    "vit_small_patch16_rope_224": (SHRUNK, ("neither rotary",)),
    "vit_small_patch16_rope_ape_224": (SHRUNK, ("no rotary positions",)),
    "vit_small_patch16_rope_mixed_224": (SHRUNK, ()),
    "vit_base_patch16_rope_reg1_gap_256": (ModelFacts(heads=12, grid=(4, 4)), ("neither rotary",)),
    "vit_base_patch16_rpn_224": (ModelFacts(heads=12), ("norms before attention and MLP",)),
    "deit3_small_patch16_224": (SHRUNK, ()),
    "vit_base_mci_224": (ModelFacts(heads=12), ()),
}


def _options_text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in _plain(options).items()) or "none"


def _timm_cases() -> Iterator[Case]:
    modules = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit")
    for name in sorted(name for module in modules for name in timm.list_models(module=module)):
        yield Case(CONFIGURED, name, functools.partial(configured, name))
    for options in VIT_ARGUMENTS:
        make = functools.partial(small, base="vit_tiny_patch16_224", **options)
        yield Case(ARGUMENTS, _options_text(options), make)
    for options in EVA_ARGUMENTS:
        make = functools.partial(small, base="vit_small_patch16_rope_224", **options)
        yield Case(ROTATED, _options_text(options), make)
    for name, (options, facts_given, assumed) in BARE_FILES.items():
        yield Case(BARE, name, functools.partial(bare, facts=facts_given, **options), assumed)
    for name, (facts_given, assumed) in BARE_NAMES.items():
        yield Case(BARE, name, functools.partial(bare_named, name, facts=facts_given), assumed)


# -- transformers -----------------------------------------------------------------------------------------------------

HUGGING_FACE = "transformers, as save_pretrained writes it"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SEEN = {"image_size": 16, "patch_size": 4, "num_labels": 5}


def hugging_face(kind: str, folder: Path, *, preprocessor: dict[str, Any] | None = None, **options: Any) -> Original:
    import json

    config = getattr(transformers, kind).config_class(**{**SIZES, **SEEN, **options})
    model = randomised(getattr(transformers, kind)(config))
    model.save_pretrained(folder)
    if preprocessor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    size = config.image_size
    pair = (size, size) if isinstance(size, int) else (size[0], size[1])
    has_head = any(hasattr(model, name) for name in ("classifier", "cls_classifier", "visual_projection"))
    headless = {} if has_head else {"features": _last_hidden}
    return Original(model, folder / "model.safetensors", pair, config.num_channels, **headless)


def _last_hidden(model: nn.Module, x_BCHW: Tensor) -> Tensor:
    # Without noise, transformers' MAE shuffles the patches.
    order = {"noise": torch.arange(16.0).expand(len(x_BCHW), -1)} if type(model).__name__ == "ViTMAEModel" else {}
    tokens: Tensor = getattr(model, "vit", model)(x_BCHW, **order).last_hidden_state
    return tokens


_CLASSIFIER = "ViTForImageClassification"
HUGGING_FACE_CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in (_CLASSIFIER, "ViTModel", "DeiTForImageClassification", "DeiTModel")),
    ("DeiTForImageClassificationWithTeacher", {}),
    ("ViTMSNForImageClassification", {}),
    ("ViTMSNForImageClassification", {"num_attention_heads": 4}),
    ("ViTMSNForImageClassification", {"layer_norm_eps": 1e-4}),
    ("ViTMSNModel", {}),
    *(
        (_CLASSIFIER, {"hidden_act": act})
        for act in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu")
    ),
    (_CLASSIFIER, {"layer_norm_eps": 1e-3}),
    (_CLASSIFIER, {"num_attention_heads": 4}),
    (_CLASSIFIER, {"qkv_bias": False}),
    (_CLASSIFIER, {"image_size": [8, 24], "patch_size": [4, 8]}),
    (_CLASSIFIER, {"num_channels": 1}),
    ("ViTModel", {"pooler_act": "relu"}),
    ("ViTModel", {"pooler_output_size": 12}),
    (_CLASSIFIER, {"preprocessor": {"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}}),
    (_CLASSIFIER, {"preprocessor": {"rescale_factor": 0.5, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}}),
    (_CLASSIFIER, {"preprocessor": {"do_flip_channel_order": True}}),
    ("ViTForMaskedImageModeling", {}),
    ("ViTMAEModel", {"mask_ratio": 0.0}),
    ("BeitForImageClassification", {}),
    ("Data2VecVisionForImageClassification", {}),
    ("Dinov2ForImageClassification", {}),
    ("Dinov2WithRegistersForImageClassification", {}),
    ("DINOv3ViTModel", {}),
    ("IJepaForImageClassification", {}),
    ("CLIPVisionModelWithProjection", {}),
    ("CLIPVisionModelWithProjection", {"hidden_act": "gelu"}),
    ("SiglipVisionModel", {}),
    ("Siglip2VisionModel", {}),
    ("Aimv2VisionModel", {}),
    ("YolosModel", {"image_size": [16, 16]}),
]


def _hugging_face_cases() -> Iterator[Case]:
    for kind, options in HUGGING_FACE_CASES:
        title = f"{kind}: {_options_text(options)}" if options else kind
        yield Case(HUGGING_FACE, title, functools.partial(hugging_face, kind, **options))


HUGGING_FACE_BARE = "transformers, the tensors alone"
HUGGING_FACE_TENSORS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (_CLASSIFIER, {}, ()),
    (_CLASSIFIER, {"hidden_act": "gelu_new"}, ("GELU computed exactly",)),
    (_CLASSIFIER, {"layer_norm_eps": 1e-6}, ("norms of eps 1e-12",)),
    (_CLASSIFIER, {"image_size": [12, 20]}, ()),
    ("DeiTForImageClassificationWithTeacher", {}, ()),
    ("ViTMSNForImageClassification", {}, ("norms of eps 1e-12",)),
    ("Dinov2ForImageClassification", {}, ()),
    ("BeitForImageClassification", {}, ()),
]


def hugging_face_bare(kind: str, folder: Path, **options: Any) -> Original:
    stored = hugging_face(kind, folder, **options)
    return Original(stored.model, stored.file.rename(folder / "a.safetensors"), stored.size, facts=PLAIN)


def _hugging_face_bare_cases() -> Iterator[Case]:
    for kind, options, assumed in HUGGING_FACE_TENSORS:
        title = f"{kind}: {_options_text(options)}" if options else kind
        yield Case(HUGGING_FACE_BARE, title, functools.partial(hugging_face_bare, kind, **options), assumed)


# -- torchvision ------------------------------------------------------------------------------------------------------

TORCHVISION = "torchvision, the tensors alone"


def of_torchvision(folder: Path, *, old: bool = False, facts: ModelFacts = PLAIN, **options: Any) -> Original:
    base = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    model = randomised(tv.VisionTransformer(**{**base, "num_classes": 5, **options}))
    state = model.state_dict()
    if old:
        state = {k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for k, v in state.items()}
    torch.save(state, folder / "a.pth")
    side = options.get("image_size", 16)
    return Original(model, folder / "a.pth", (side, side), facts=facts)


def network_of_torchvision(folder: Path, name: str) -> Original:
    model = randomised(getattr(tv, name)(num_classes=5))
    torch.save(model.state_dict(), folder / "a.pth")
    return Original(model, folder / "a.pth", (64, 64))


def _torchvision_cases() -> Iterator[Case]:
    stem = tv.vision_transformer.ConvStemConfig
    stems = [stem(out_channels=8, kernel_size=3, stride=2), stem(out_channels=16, kernel_size=3, stride=2)]
    for name, options, assumed in (
        ("VisionTransformer", {}, ()),
        ("VisionTransformer, names before 0.12", {"old": True}, ()),
        ("VisionTransformer, representation_size=12", {"representation_size": 12}, ()),
        ("VisionTransformer, norm_layer of eps 1e-3",
         {"norm_layer": functools.partial(nn.LayerNorm, eps=1e-3)}, ("norms of eps 1e-06",)),
        ("VisionTransformer, conv_stem_configs", {"conv_stem_configs": stems}, ()),
        ("VisionTransformer, heads not stated", {"facts": ModelFacts()}, ()),
    ):  # fmt: skip
        yield Case(TORCHVISION, name, functools.partial(of_torchvision, **options), assumed)
    for name in ("resnet18", "resnet34", "resnet50", "regnet_y_16gf", "regnet_y_400mf", "convnext_tiny", "swin_t"):
        yield Case(TORCHVISION, name, functools.partial(network_of_torchvision, name=name))


# -- Google -----------------------------------------------------------------------------------------------------------

GOOGLE = "Google, the .npz alone"
_NEWER = (("LayerNorm_2", "LayerNorm_1"), ("Attention_1", "Attention_0"), ("MlpBlock_3", "MlpBlock_0"))


def of_google(
    folder: Path, *, root: str | None = None, stacked: bool = False, fixed: bool = False, facts: ModelFacts = ModelFacts(),  # noqa: B008
    **options: Any,
) -> Original:  # fmt: skip
    """Return a model whose .npz was read by timm; with a ``root`` it has big_vision's layout."""
    common = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5, "img_size": 16, "patch_size": 4}
    options = {**common, "act_layer": "gelu_tanh", **options}
    source = randomised(VisionTransformer(**options))
    arrays = {name: value.numpy() for name, value in FORMATS["google"].from_canonical(source.state_dict(), 2).items()}
    if root is not None:
        arrays = {root + _renamed(name): value for name, value in arrays.items()}
    if stacked:
        for name in [name for name in arrays if "encoderblock_0" in name]:
            both = [arrays.pop(name.replace("block_0", f"block_{i}")) for i in (0, 1)]
            arrays[name.replace("encoderblock_0", "encoderblock")] = np.stack(both)
    file = folder / "a.npz"
    np.savez(file, **arrays)
    theirs = randomised(VisionTransformer(**options), seed=9)
    theirs.load_pretrained(str(file))
    if fixed:
        arrays.pop(f"{root}pos_embedding")
        np.savez(file, **arrays)
        with torch.no_grad():
            theirs.pos_embed.copy_(_sincos(4, 4, 16))
    return Original(theirs, file, tuple(theirs.patch_embed.img_size), facts=facts)  # type: ignore[arg-type]


def _renamed(name: str) -> str:
    for old, new in _NEWER:
        name = name if name.startswith("MAPHead") else name.replace(old, new)
    return name.replace("Transformer/posembed_input/pos_embedding", "pos_embedding")


def _sincos(rows: int, columns: int, width: int) -> Tensor:
    """Return the fixed positions of big_vision's models/vit.py, after arXiv:2205.01580."""
    y, x = np.mgrid[:rows, :columns]
    omega = 1.0 / 10_000 ** (np.arange(width // 4) / (width // 4 - 1))
    y, x = np.einsum("m,d->md", y.flatten(), omega), np.einsum("m,d->md", x.flatten(), omega)
    return torch.from_numpy(np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1))[None]


def _hybrid(layers: tuple[int, ...]) -> dict[str, Any]:
    embed = functools.partial(HybridEmbed, backbone=_resnetv2(layers=layers))
    return {"img_size": 32, "patch_size": 1, "embed_layer": embed}


def _google_cases() -> Iterator[Case]:
    none = {"class_token": False, "no_embed_class": True}
    cases: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("vit_jax", {}, ()),
        ("vit_jax, mean", {**none, "global_pool": "avg", "fc_norm": False}, ()),
        ("vit_jax, attention pooling", {**none, "global_pool": "map"}, ()),
        (
            "vit_jax, GELU computed exactly (written by a converter)",
            {"act_layer": "gelu"},
            ("GELU approximated by tanh",),
        ),
        *((f"vit_jax, hybrid of {len(layers)} stages", {"layers": layers}, ()) for layers in ((1, 1), (1, 1, 1), ())),
    ]
    for root in ("opt/target/", "params/img/", "params/", ""):
        title = f"big_vision under '{root}'"
        cases.append((title, {"root": root, "no_embed_class": True}, ()))
        cases.append((f"{title}, scanned", {"root": root, "stacked": True, "no_embed_class": True}, ()))
    pooled = {**none, "root": "params/", "global_pool": "map"}
    fixed = {"root": "params/", "fixed": True, "no_embed_class": True}
    cases += [
        ("big_vision, attention pooling", pooled, ()),
        ("big_vision, sincos2d positions", fixed, ()),
        ("big_vision, sincos2d positions, 4x4 stated", {**fixed, "facts": ModelFacts(grid=(4, 4))}, ()),
    ]
    for name, options, assumed in cases:
        yield Case(GOOGLE, name, functools.partial(_google, **options), assumed)


def _google(folder: Path, *, layers: tuple[int, ...] | None = None, **options: Any) -> Original:
    return of_google(folder, **options, **({} if layers is None else _hybrid(layers)))


# -- page -------------------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Return every case, in the order of the page."""
    of_transformers = [*_hugging_face_cases(), *_hugging_face_bare_cases()]
    return [*_timm_cases(), *of_transformers, *_torchvision_cases(), *_google_cases()]


def row(case: Case) -> str:
    """Return the line of the page for a case, after trying it."""
    verdict, sentences = outcome(case)
    return f"| {_cell(case.name)} | {verdict} | {_cell(sentences)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


HEADER = """# Weights of other libraries

The tables have configurations of timm, transformers, torchvision and Google. Each model is reduced to two blocks, with
random weights. `vitlab.weights.opening.open_model` opens the file of its weights, and the logits in float64 are compared
with the original's.

- **equal**: logits agree up to rounding (1e-10, or 1e-6 for rotations that timm computes in float32). The last column
  has the assumptions. `vitlab weights inspect`, `vitlab weights convert` and a trial's log print them, too.
- **refused**: the file is not opened; the last column has the reason.
- **differs**: the file is opened, and the logits differ, because neither the tensors nor a config show an option of the
  original. The last column has the wrong assumption.

A `config.json` is read only beside a file with the hub's name, `model.safetensors` or `pytorch_model.bin`. All its keys
are read. If it names an architecture of timm, timm builds the model and loads the weights, so timm must be installed.

`python tools/weights_zoo.py` tries all rows and writes this page. `tests/test_weights_zoo.py` tries some of them and
fails if the page differs.
"""


def page() -> str:
    """Return the whole page, after trying every case."""
    versions = f"timm {timm.__version__}, transformers {transformers.__version__}, torchvision {tv_version()}"
    tables: dict[str, list[str]] = {}
    for case in cases():
        tables.setdefault(case.section, []).append(row(case))
    text = f"{HEADER}\nVersions: {versions}.\n\n" + summary(tables)
    for section, rows in tables.items():
        text += f"\n## {section}\n\n| configuration | result | assumptions, or reason |\n| --- | --- | --- |\n"
        text += "\n".join(rows) + "\n"
    return text


def summary(tables: dict[str, list[str]]) -> str:
    """Return a table with the number of rows of each section and result."""
    results = ("equal", "refused", "differs")
    text = f"| read from | {' | '.join(results)} |\n| --- | --: | --: | --: |\n"
    for section, rows in tables.items():
        counts = [str(sum(f" | {result} | " in line for line in rows)) for result in results]
        text += f"| {section} | {' | '.join(counts)} |\n"
    return text


def tv_version() -> str:
    import importlib.metadata

    return importlib.metadata.version("torchvision").partition("+")[0]


def main(word: str | None) -> None:
    if word is None:
        PAGE.write_text(page())
        return
    for case in cases():
        if word in f"{case.section}: {case.name}":
            try:
                print(row(case))
            except Exception as error:
                print("FAILED", case.section, case.name, type(error).__name__, error)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
