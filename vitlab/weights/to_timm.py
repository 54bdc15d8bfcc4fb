"""A ViT as a model of timm: the architecture and the arguments by which timm builds it, and its tensors.

timm builds each candidate without values; the one that :func:`from_timm` reads as the same model is the answer, so that
a file is only written if timm computes what the ViT computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitlab.errors import WeightsError
from vitlab.models.vit import ViT
from vitlab.weights.architecture import Architecture
from vitlab.weights.from_timm import POOLS, from_timm, timm_module
from vitlab.weights.known import some

ENTRIES = (
    "vit_base_patch16_224",
    "vit_base_patch16_clip_224",
    "deit_base_distilled_patch16_224",
    "vit_base_patch16_rpn_224",
    "vit_base_patch16_18x2_224",
    "vit_base_r50_s16_224",
    "vit_tiny_r_s16_p8_224",
    "vit_giant_patch14_dinov2",
    "aimv2_large_patch14_224",
    "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_mixed_224",
    "vit_small_patch16_dinov3",
    "vit_small_patch16_dinov3_qkvb",
    "vit_small_plus_patch16_dinov3",
    "eva02_base_patch14_224",
    "eva02_base_patch16_clip_224",
    "eva_giant_patch14_224",
)
"""Architectures of timm that differ in what JSON cannot say, such as the class of a norm and its eps."""


class TimmTarget(NamedTuple):
    """A model of timm that computes what a ViT computes."""

    name: str  #: of the architecture
    arguments: Mapping[str, Any]  #: of :func:`timm.create_model`, as JSON has them
    parts: Mapping[str, str]  #: further arguments, which JSON cannot hold, as they are written in Python
    tensors: Mapping[str, Tensor]

    def call(self) -> str:
        """Return the call that builds the model."""
        texts = {**{name: repr(value) for name, value in self.arguments.items()}, **self.parts}
        return f"timm.create_model({self.name!r}, {', '.join(f'{name}={text}' for name, text in texts.items())})"


def to_timm(
    architecture: Architecture,
    state: Mapping[str, Tensor],
    differences: Callable[[Architecture, Architecture], list[str]],
) -> TimmTarget:
    """Return the model of timm that computes what a ViT computes.

    Args:
        architecture: of the ViT.
        state: its canonical tensors.
        differences: the options in which two architectures compute differently, as sentences.

    Raises:
        WeightsError: if no model of timm does, with the options in which the most similar one differs.
    """
    timm, wanted = timm_module(), _arguments(architecture)
    if "head.weight" not in state:
        wanted["num_classes"] = 0
    reasons: list[str] | None = None
    # First by what a config.json can hold, then by parts that only Python can name.
    for parts in ({}, _parts(architecture)):
        for name in ENTRIES:
            accepted = inspect.signature(_class_of(name)).parameters
            for arguments in _variants({key: value for key, value in wanted.items() if key in accepted}, accepted):
                objects = {key: part for key, (part, _) in parts.items() if key in accepted}
                try:
                    with torch.device("meta"):
                        module = timm.create_model(name, **{**arguments, **objects}).eval()
                    vit = from_timm(module)
                    same = replace(architecture, options=vit.options, prefix_rows=vit.prefix_rows)
                    unequal = differences(architecture, same)
                    if not unequal:
                        texts = {key: text for key, (_, text) in parts.items() if key in objects}
                        return TimmTarget(name, arguments, texts, timm_tensors(module, state))
                except WeightsError as error:
                    unequal = [str(error)]
                except (TypeError, AssertionError, ValueError, RuntimeError, AttributeError):
                    continue  # an architecture that does not have these sizes
                if reasons is None or len(unequal) < len(reasons):
                    reasons = unequal
    listed = "; ".join(one.replace("the file holds", "timm has") for one in reasons or ["its sizes do not fit there"])
    raise WeightsError(f"no model of timm computes what this model does: {listed}")


def _variants(arguments: dict[str, Any], accepted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments; for ``Eva`` also with the attention whose keys have a bias."""
    return [arguments, {**arguments, "attn_type": "rope"}] if "attn_type" in accepted else [arguments]


def _parts(architecture: Architecture) -> dict[str, tuple[Any, str]]:
    """Return arguments of timm's models that are classes, each with its text in Python."""
    from timm.layers import LayerNorm, RmsNorm, SwiGLU
    from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock

    block = ViT.anatomy(architecture.info, _options(architecture)).blocks[0]
    norm, mlp, kind = block.norm.plain(), block.mlp.plain(), block.block.plain()
    parts: dict[str, tuple[Any, str]] = {}
    classes = {"layernorm": LayerNorm, "rmsnorm": RmsNorm}
    if norm["type"] in classes:
        layer = classes[norm["type"]]
        text = f"functools.partial(timm.layers.{layer.__name__}, eps={norm['eps']:g})"
        parts["norm_layer"] = (partial(layer, eps=norm["eps"]), text)
    if kind["type"] == "parallel_things":
        text = f"functools.partial(timm.models.vision_transformer.ParallelThingsBlock, num_parallel={kind['number']})"
        parts["block_fn"] = (partial(ParallelThingsBlock, num_parallel=kind["number"]), text)
    if kind["type"] == "respostnorm":
        parts["block_fn"] = (ResPostBlock, "timm.models.vision_transformer.ResPostBlock")
    if mlp["type"] in ("swiglu", "geglu"):
        act = {"swiglu": nn.SiLU, "geglu": nn.GELU}[mlp["type"]]
        parts["mlp_layer"] = (SwiGLU, "timm.layers.SwiGLU")
        parts["act_layer"] = (act, f"torch.nn.{act.__name__}")
    return parts


def timm_tensors(target: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return canonical tensors under the names and in the layouts of a model of timm.

    Raises:
        WeightsError: if the model lacks one of them, or cannot hold it.
    """
    rest, out = dict(state), {}
    for key, value in target.state_dict().items():
        stem, _, last = key.rpartition(".")
        if key in rest:
            out[key] = rest.pop(key)
        elif last in ("gamma_1", "gamma_2"):
            out[key] = rest.pop(f"{stem}.ls{last[-1]}.gamma")
        elif last in ("q_bias", "v_bias") or stem.endswith((".q_proj", ".k_proj", ".v_proj")):
            out[key] = _part(rest, stem, last)
        elif stem.endswith(".mlp.fc1"):
            out[key] = torch.cat([rest.pop(f"{stem}_{half}.{last}") for half in "gx"])  # the gate is the first half
        elif key == "rope.freqs":
            out[key] = rest.pop("position.freqs")
        else:
            raise WeightsError(f"timm's model needs {key}, which this model does not have")
        if out[key].shape != value.shape:
            raise WeightsError(f"{key} has shape {tuple(out[key].shape)}, and {tuple(value.shape)} in timm's model")
    rest = {name: value for name, value in rest.items() if not name.endswith((".attn.qkv.weight", ".attn.qkv.bias"))}
    if rest:
        raise WeightsError(f"timm's model has no tensor for {some(rest)}")
    return {key: value.contiguous().clone() for key, value in out.items()}


def timm_config(target: TimmTarget, architecture: Architecture) -> dict[str, Any]:
    """Return the ``config.json`` from which timm builds a model and its transforms (``local-dir:`` and the hub)."""
    info = architecture.info
    labels = {"label_names": list(info.labels)} if info.labels else {}
    return {
        "architecture": target.name,
        "num_classes": info.classes,
        "num_features": architecture.options["dim"],
        "global_pool": target.arguments["global_pool"],
        "model_args": {key: value for key, value in target.arguments.items() if key != "num_classes"},
        "pretrained_cfg": {
            "input_size": [info.channels, *info.image],
            "num_classes": info.classes,
            "mean": list(architecture.mean),
            "std": list(architecture.std),
            **labels,
        },
    }


def _class_of(name: str) -> type:
    """Return the class whose arguments an architecture of timm takes."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return cast(type, Eva if any(word in name for word in ("rope", "dinov3", "eva")) else VisionTransformer)


def _arguments(architecture: Architecture) -> dict[str, Any]:
    """Return arguments of timm's ``VisionTransformer`` and ``Eva``, as far as JSON can hold them."""
    options = _options(architecture)
    anatomy = ViT.anatomy(architecture.info, options)
    g, block = anatomy.geometry, anatomy.blocks[0]
    attention, mlp, head = (part.plain() for part in (block.attention, block.mlp, anatomy.head))
    parts = _encodings(anatomy.position.plain())
    learned, rotary = parts.get("learned"), parts.get("rope2d") or parts.get("rope2d_mixed")
    pool = next((theirs for theirs, ours in POOLS.items() if ours == head.get("pool", "cls")), "token")
    normed = anatomy.final_norm.type != "none"
    pooled = normed and anatomy.final_norm_at == "pooled"
    classed = "class" in g.prefix
    registers = sum(token == "register" for token in g.prefix)
    gated = mlp["type"] in ("swiglu", "geglu")
    arguments: dict[str, Any] = {
        "img_size": list(g.image),
        "patch_size": list(g.patch),
        "in_chans": g.channels,
        "num_classes": architecture.info.classes,
        "embed_dim": g.dim,
        "depth": g.depth,
        "num_heads": g.heads,
        "mlp_ratio": mlp["ratio"],
        "qkv_bias": attention.get("qkv_bias", True),
        "qk_norm": attention.get("qk_norm", {"type": "none"})["type"] != "none",
        "proj_bias": attention.get("proj_bias", True),
        "scale_attn_norm": _has_norm(attention),
        "scale_attn_inner": _has_norm(attention),
        "scale_mlp_norm": _has_norm(mlp),
        "scale_mlp": _has_norm(mlp),
        "init_values": options.get("layer_scale"),
        "class_token": classed,
        "reg_tokens": registers,
        "num_reg_tokens": registers,
        "no_embed_class": architecture.prefix_rows == "none",
        "pos_embed": "learn" if learned else "none",
        "use_abs_pos_emb": learned is not None,
        "pre_norm": anatomy.stem_norm.type != "none",
        "use_pre_transformer_norm": anatomy.stem_norm.type != "none",
        "final_norm": normed,
        "fc_norm": pooled,
        "use_fc_norm": pooled,
        "use_post_transformer_norm": normed and not pooled,
        "global_pool": pool,
        "pool_include_prefix": head.get("over") == "all",
        "use_rot_pos_emb": rotary is not None,
    }
    if mlp["type"] == "gelu":
        arguments["act_layer"] = "gelu_tanh" if mlp["approximate"] == "tanh" else "gelu"
    if gated:
        arguments["swiglu_mlp"] = True
    if rotary is not None:
        centred = rotary.get("coordinates") == "centred"
        mixed = rotary["type"] == "rope2d_mixed"
        arguments |= {
            "rope_type": "mixed" if mixed else "dinov3" if centred else "cat",
            "rope_grid_indexing": "xy",  # the order of channels in vitlab's rotations
            "rope_rotate_half": False,
            "ref_feat_shape": list(rotary["reference"]) if rotary.get("reference") else None,
            "rope_grid_offset": rotary.get("offset", 0.0),
        }
        if not mixed:
            arguments["rope_temperature"] = rotary["theta"]
    return arguments


def _options(architecture: Architecture) -> dict[str, Any]:
    return {name: value for name, value in architecture.options.items() if name != "type"}


def _has_norm(part: Mapping[str, Any]) -> bool:
    return bool(part.get("norm", {"type": "none"})["type"] != "none")


def _encodings(position: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the options of every position encoding, by type."""
    parts = position.get("parts", [position])
    return {part["type"]: part for part in parts if part["type"] != "none"}


def _part(state: Mapping[str, Tensor], stem: str, last: str) -> Tensor:
    """Return the queries', keys' or values' part of the one matrix of an attention, or of its bias.

    Raises:
        WeightsError: if keys have a bias, which timm's model does not have.
    """
    which, kind = (last[0], "bias") if last in ("q_bias", "v_bias") else (stem[-6], last)
    attention = stem if last in ("q_bias", "v_bias") else stem.rpartition(".")[0]
    bias = state.get(f"{attention}.qkv.bias")
    if bias is not None and bias.chunk(3)[1].any():
        raise WeightsError(
            f"the keys of {attention} have a bias, and timm's model has none; train with qkv_bias: false"
        )
    return state[f"{attention}.qkv.{kind}"].chunk(3)["qkv".index(which)]
