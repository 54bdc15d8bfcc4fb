"""A ViT as a model of timm: the architecture and the arguments by which timm builds it, and its tensors.

timm builds each candidate without values; the one that :func:`from_timm` reads as the same model is the answer, so that
a file is only written if timm computes what the ViT computes.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import nn

from vitlab.errors import WeightsError
from vitlab.models.contract import NewState, State
from vitlab.weights.architecture import Architecture, Options
from vitlab.weights.files import Json
from vitlab.weights.from_timm import POOLS, from_timm, import_timm
from vitlab.weights.transfer import describe_mismatches, find_mismatches, find_option_differences

ENTRIES: Mapping[str, str] = {
    "VisionTransformer": """
        vit_base_patch16_224 vit_base_patch16_clip_224 deit_base_distilled_patch16_224 vit_base_patch16_rpn_224
        vit_base_patch16_18x2_224 vit_base_r50_s16_224 vit_tiny_r_s16_p8_224 vit_giant_patch14_dinov2
        aimv2_large_patch14_224
    """,
    "Eva": """
        vit_small_patch16_rope_224 vit_small_patch16_rope_mixed_224 vit_small_patch16_dinov3
        vit_small_plus_patch16_dinov3 eva02_base_patch14_224 eva02_base_patch16_clip_224 eva_giant_patch14_224
        vit_pe_core_tiny_patch16_384
    """,
    "Beit": "beit_base_patch16_224",
}
"""Class to architectures of timm, which differ in what JSON cannot say, such as the class of a norm and its eps."""


class TimmTarget(NamedTuple):
    """A model of timm that computes what a ViT computes."""

    name: str  #: of the architecture
    arguments: Options  #: of :func:`timm.create_model`, as JSON has them
    tensors: NewState


def find_timm_model(architecture: Architecture, state: State) -> TimmTarget:
    """Return the model of timm that computes what a ViT with these canonical tensors computes.

    Raises:
        WeightsError: if no model of timm does, with the options in which the most similar one differs.
    """
    timm, target, mine = import_timm(), _timm_arguments(architecture), architecture.build_without_values()
    if "head.weight" not in state:
        target["num_classes"] = 0
    reasons: list[list[str]] = []
    relative = "relative_bias" in architecture.encoding_options  # BEiT's alone
    candidates = {
        name: kind for kind, names in ENTRIES.items() if (kind == "Beit") == relative for name in names.split()
    }
    for name, kind in candidates.items():
        accepted = inspect.signature(getattr(timm.models, kind)).parameters
        arguments = {key: value for key, value in target.items() if key in accepted}
        try:
            with torch.device("meta"):
                module = timm.create_model(name, **arguments)
            theirs = replace(architecture, options=from_timm(module)[0]).build_without_values()
            unequal = [
                f"{option} is {own}, and timm has {other}"
                for option, own, other in find_option_differences(mine, theirs, head="head.weight" in state)
                # Without rotations, a bias of keys adds one number to a query's logits, which the softmax cancels.
                if not (relative and (option, own, other) == ("attention.qkv_bias", "yes", "qv"))
            ]
            if not unequal:
                return TimmTarget(name, arguments, to_timm_tensors(module, state))
        except WeightsError as error:
            unequal = [str(error)]
        except (TypeError, AssertionError, ValueError, RuntimeError, AttributeError):
            continue  # an architecture that does not have these sizes
        reasons.append(unequal)
    closest = min(reasons, key=len, default=["its sizes do not fit there"])
    raise WeightsError(
        f"no model that a config.json of timm can describe computes what this one does: {'; '.join(closest)}"
    )


def to_timm_tensors(target: nn.Module, state: State) -> NewState:
    """Return canonical tensors under the names and in the layouts of a model of timm."""
    dtype = reduce(torch.promote_types, (value.dtype for value in state.values()))
    zeros = {name: torch.zeros(value.shape, dtype=dtype) for name, value in target.state_dict().items()}
    # from_timm only moves values and adds zeros, so that the transposed linear map moves the values back.
    canonical, move_back = torch.func.vjp(lambda tensors: from_timm(target, tensors)[1], zeros)  # type: ignore[misc]
    if faults := find_mismatches(canonical, state):
        raise WeightsError(f"timm's model has other tensors than this one: {describe_mismatches(faults)}")
    (tensors,) = move_back({name: state[name].to(dtype) for name in canonical})
    return dict(tensors)


def timm_config(target: TimmTarget, architecture: Architecture) -> Json:
    """Return the ``config.json`` from which timm builds a model and its transforms (``local-dir:`` and the hub)."""
    info = architecture.info
    labels = {"label_names": list(info.labels)} if info.labels else {}
    return {
        "architecture": target.name,
        "num_classes": info.classes,
        "num_features": architecture.geometry.dim,
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


def _timm_arguments(architecture: Architecture) -> Options:
    """Return arguments of timm's ``VisionTransformer`` and ``Eva``, as far as JSON can hold them."""
    anatomy, encodings = architecture.anatomy, architecture.encoding_options
    g, block = anatomy.geometry, anatomy.blocks[0]
    attention, mlp, head = (part.plain() for part in (block.attention, block.mlp, anatomy.head))
    rotary = encodings.get("rope2d") or encodings.get("rope2d_mixed")
    relative = encodings.get("relative_bias", {}).get("where")
    learned = "learned" in encodings
    stem_norm, normed = _is_norm(anatomy.stem_norm.plain()), _is_norm(anatomy.final_norm.plain())
    pooled = normed and anatomy.final_norm_at == "pooled"
    registers = g.prefix.count("register")
    qkv_bias = attention.get("qkv_bias", True)
    attention_norm, mlp_norm = _is_norm(attention.get("norm")), _is_norm(mlp.get("norm"))
    arguments: Options = {
        "img_size": list(g.image),
        "patch_size": list(g.patch),
        "in_chans": g.channels,
        "num_classes": architecture.info.classes,
        "embed_dim": g.dim,
        "depth": g.depth,
        "num_heads": g.heads,
        "mlp_ratio": mlp["ratio"],
        "qkv_bias": bool(qkv_bias),
        "qk_norm": _is_norm(attention.get("qk_norm")),
        "proj_bias": attention.get("proj_bias", True),
        "scale_attn_norm": attention_norm,
        "scale_attn_inner": attention_norm,
        "scale_mlp_norm": mlp_norm,
        "scale_mlp": mlp_norm,
        "init_values": architecture.options.get("layer_scale"),
        "class_token": "class" in g.prefix,
        "reg_tokens": registers,
        "num_reg_tokens": registers,
        "no_embed_class": architecture.prefix_rows == "none",
        "pos_embed": "learn" if learned else "none",
        "use_abs_pos_emb": learned,
        "pre_norm": stem_norm,
        "use_pre_transformer_norm": stem_norm,
        "final_norm": normed,
        "fc_norm": pooled,
        "use_fc_norm": pooled,
        "use_post_transformer_norm": normed and not pooled,
        "global_pool": {ours: theirs for theirs, ours in POOLS.items()}.get(head.get("pool", "cls"), "avg"),
        "pool_include_prefix": head.get("over") == "all",
        "attn_pool_num_heads": head.get("pool_heads"),
        "attn_pool_mlp_ratio": head.get("ratio"),
        "use_rot_pos_emb": rotary is not None,
        "use_rel_pos_bias": relative == "every_layer",
        "use_shared_rel_pos_bias": relative == "every_layer_shared",
        "attn_type": "eva" if qkv_bias == "qv" else "rope",  # the first has no bias of keys
        "qkv_fused": True,
    }
    if mlp["type"] == "gelu":
        arguments["act_layer"] = {"tanh": "gelu_tanh", "sigmoid": "quick_gelu"}.get(mlp["approximate"], "gelu")
    else:
        arguments["swiglu_mlp"] = mlp["type"] in ("swiglu", "geglu")
    if (block.norm.type, block.norm.options.get("eps")) == ("rmsnorm", 1e-6):
        arguments["norm_layer"] = "rmsnorm"  # timm's own eps, which a name cannot change
    if rotary is not None:
        kind = "dinov3" if rotary.get("coordinates") == "centred" else "cat"
        arguments |= {
            "rope_type": "mixed" if rotary["type"] == "rope2d_mixed" else kind,
            "rope_grid_indexing": "xy",  # the order of channels in vitlab's rotations
            "rope_rotate_half": False,
            "ref_feat_shape": list(rotary["reference"]) if rotary.get("reference") else None,
            "rope_grid_offset": rotary.get("offset", 0.0),
        }
        if "theta" in rotary:
            arguments["rope_temperature"] = rotary["theta"]
    return arguments


def _is_norm(choice: Options | None) -> bool:
    return choice is not None and choice["type"] != "none"
