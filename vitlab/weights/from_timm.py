"""timm's Vision Transformers: what a built module computes, as options and canonical tensors of vitlab's ViT.

Everything is read from the module that timm itself builds and fills by its own filters, so that a configuration, a
default or a renamed tensor of timm is never interpreted here.  Parts that the ViT does not have are refused by name.
"""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError, nearest
from vitlab.models.contract import NewState, State
from vitlab.weights.architecture import Encoding, Options, exact_ratio
from vitlab.weights.files import Json, WeightFile
from vitlab.weights.formats import TimmFormat
from vitlab.weights.transfer import to_native_rotation

MAX_REASON = 240  #: characters of timm's own message, which lists all tensors

POOLS: Mapping[str, str] = {"token": "cls", "avg": "gap", "max": "max", "avgmax": "avgmax", "map": "map", "prr": "prr"}
"""timm's ``global_pool`` to the ``pool`` of vitlab's heads."""

BLOCKS: Mapping[str, str] = {
    "Block": "prenorm",
    "EvaBlock": "prenorm",
    "ResPostBlock": "respostnorm",
    "ParallelThingsBlock": "parallel_things",
}
"""timm's blocks, by class, to vitlab's."""

NONE: Options = {"type": "none"}


def import_timm() -> Any:
    """Return timm, imported behind torchvision's operators; without it, raise a WeightsError."""
    torchvision()
    try:
        import timm
    except ImportError:
        raise WeightsError(
            "models of timm are built by timm itself, which is not installed: pip install 'vitlab[interop]'"
        ) from None
    return timm


def names_timm_architecture(config: Json) -> bool:
    """Return whether a ``config.json`` names an architecture of timm."""
    return "pretrained_cfg" in config or "architecture" in config


def pretrained_config(config: Json) -> Json:
    """Return timm's ``pretrained_cfg``; in old files it is the whole file."""
    return config.get("pretrained_cfg", config) or {}


def load_timm_model(contents: WeightFile) -> Any:
    """Return the model that a ``config.json`` of timm describes, with the tensors as timm's own filter reads them.

    The size of images, the number of their channels and of classes are the file's, so that timm resamples and
    drops nothing.

    Raises:
        WeightsError: if timm does not have the architecture, or the tensors do not belong to it.
    """
    config, tensors, where = contents.config, contents.tensors, contents.file.with_name("config.json")
    timm, pretrained = import_timm(), pretrained_config(config)
    full_name = str(config.get("architecture") or pretrained.get("architecture"))
    name = full_name.partition(".")[0]
    if not timm.is_model(name):
        raise WeightsError(
            f"{where} names the architecture '{full_name}', which timm {timm.__version__} does not have."
            f"{nearest(name, timm.list_models())} Remove {where} to open the tensors alone, with defaults for what "
            "they do not show."
        )
    head, size = tensors.get("head.weight"), pretrained.get("input_size")
    classes = int(config.get("num_classes", pretrained.get("num_classes", 0)) or 0) if head is None else head.shape[0]
    if head is None and any(key.endswith("blocks.0.norm1.weight") for key in tensors):
        classes = 0  # tensors under timm's names without a head
    arguments: Options = {"num_classes": classes}
    if size is not None:
        arguments |= {"img_size": tuple(size[1:]), "in_chans": size[0]}
    arguments |= config.get("model_args") or {}
    pool = config.get("global_pool") or arguments.get("global_pool")
    if arguments.get("global_pool", pool) != pool:
        raise WeightsError(
            f"{where} says global_pool {pool}, and {arguments['global_pool']} under model_args; correct one of them"
        )
    if pool:
        arguments["global_pool"] = pool
    half = (0.5,) * arguments.get("in_chans", 3)  # timm warns of other numbers of values than channels
    overlay = {"state_dict": dict(tensors), "num_classes": classes, "first_conv": None, "custom_load": False}
    try:
        with torch.device("meta"):
            # Refuses parts that the ViT lacks before values are read, and before timm fetches a backbone's values.
            from_timm(timm.create_model(name, **arguments))
        with torch.random.fork_rng(devices=[]):
            model = timm.create_model(
                name, pretrained=True, pretrained_cfg_overlay={**overlay, "mean": half, "std": half}, **arguments
            )
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError, AttributeError) as error:
        reason = textwrap.shorten(str(error), MAX_REASON, placeholder=" ...")
        raise WeightsError(f"timm cannot load these tensors into {name}, which {where} names: {reason}") from None
    # timm resamples positions and patches of other sizes without a word.
    for key, value in model.state_dict().items():
        if key in tensors and tensors[key].shape != value.shape:
            raise WeightsError(
                f"{where} describes a model whose {key} has shape {tuple(value.shape)}, and the tensors beside it have "
                f"{tuple(tensors[key].shape)}; use the config.json of these weights"
            )
    return model


def from_timm(module: nn.Module, tensors: State | None = None) -> tuple[Options, NewState]:
    """Return the options and the canonical tensors of a ViT that computes what a module of timm computes.

    Args:
        module: of timm.
        tensors: that take the place of the module's own.

    Raises:
        WeightsError: for a model of a class that is not read here, or a part that vitlab's ViT does not have.
    """
    kind = type(module).__name__
    if kind not in ("VisionTransformer", "VisionTransformerDistilled", "Eva", "Beit"):
        raise WeightsError(f"timm's {kind} is no model of vitlab's; train it as an arm with model: {{type: timm}}")
    m: Any = module
    parts = [_block_options(block) for block in m.blocks]
    for index, part in enumerate(parts):
        if part != parts[0]:
            raise _refusal(f"block {index} of the model", "differs from block 0, as vitlab's checkpoints do not")
    heads = _find_attention(m.blocks[0]).num_heads
    own = m.state_dict() if tensors is None else tensors
    state = TimmFormat().to_canonical({re.sub(r"\.([qkv])_proj\.", r".\1.", key): own[key] for key in own}).state
    encoding = _rotary_encoding(getattr(m, "rope", None), m.patch_embed.grid_size)
    position: list[Options] = []
    if getattr(m, "pos_embed", None) is not None:
        position.append({"type": "learned", "prefix_rows": "none" if getattr(m, "no_embed_class", False) else "own"})
    if encoding.type != "none":
        position.append({"type": encoding.type, **encoding.options})
        state = to_native_rotation(state, encoding, heads)
    if kind == "Beit":
        position += _relative_position_options(m)
    pooled, final_norm = _norm_options(getattr(m, "fc_norm", None)), _norm_options(m.norm)
    if NONE not in (pooled, final_norm):
        raise _refusal("the model", "has a norm on its tokens and another after pooling")
    options: Options = {
        "patch_size": m.patch_embed.patch_size,
        "dim": m.embed_dim,
        "depth": len(m.blocks),
        "heads": heads,
        "prefix": [name for name, token in (("class", "cls_token"), ("distillation", "dist_token")) if token in state],
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "patch": _patch_options(m.patch_embed),
        "position": position or "none",
        **parts[0],
        "stem_norm": _norm_options(getattr(m, "norm_pre", None)),
        "final_norm": final_norm if pooled == NONE else pooled,
        "final_norm_at": "tokens" if pooled == NONE else "pooled",
        "head": _head_options(m),
    }
    return options, state


def _refusal(part: str, reason: str) -> WeightsError:
    return WeightsError(f"{part} {reason}; use other weights, or train the model as an arm with model: {{type: timm}}")


def _patch_options(embed: Any) -> Options:
    backbone = getattr(embed, "backbone", None)
    if backbone is not None:
        stages = getattr(backbone, "stages", None)
        stem: Any = getattr(backbone, "stem", None) if stages else backbone
        if type(backbone).__name__ not in ("ResNetV2", "Sequential") or not hasattr(stem, "conv"):
            raise _refusal(f"its stem {type(backbone).__name__}", "is no part of vitlab's")
        layers = [len(stage.blocks) for stage in stages or ()]
        return {"type": "resnet", "layers": layers, "width_factor": stem.conv.out_channels / 64}
    if type(embed).__name__ != "PatchEmbed":
        raise _refusal(f"its patch embedding {type(embed).__name__}", "is no part of vitlab's")
    return {"type": "linear", "bias": embed.proj.bias is not None, "norm": _norm_options(embed.norm)}


def _block_options(block: Any) -> Options:
    """Return the options of one block: ``block``, ``attention``, ``mlp``, ``norm`` and ``layer_scale``."""
    kind = type(block).__name__
    if kind not in BLOCKS:
        raise _refusal(f"block {kind} of timm", "is stored in a form that vitlab does not read")
    choice: Options = {"type": BLOCKS[kind]}
    if kind == "ParallelThingsBlock":
        choice["number"] = len(block.attns)
        first, second = block.attns[0], block.ffns[0]
        norms, scales, mlp = (first.norm, second.norm), [first.ls, second.ls], second.mlp
    else:
        names = ("gamma_1", "gamma_2") if hasattr(block, "gamma_1") else ("ls1", "ls2")
        norms, scales, mlp = (block.norm1, block.norm2), [getattr(block, name, None) for name in names], block.mlp
    norm, other = map(_norm_options, norms)
    if norm != other:
        raise _refusal("a block", "has another norm before its MLP than before its attention")
    scaled = [not isinstance(scale, nn.Identity | None) for scale in scales]
    if scaled[0] != scaled[1]:
        raise _refusal("a block", "scales the output of its attention and not of its MLP")
    return {
        "block": choice,
        "attention": _attention_options(_find_attention(block)),
        "mlp": _mlp_options(mlp),
        "norm": norm,
        "layer_scale": 1e-5 if scaled[0] else None,
    }


def _norm_options(norm: Any) -> Options:
    kind = type(norm).__name__
    if isinstance(norm, nn.Identity | None):
        return NONE
    if isinstance(norm, nn.LayerNorm):
        affine = "none" if norm.weight is None else "scale" if norm.bias is None else "scale_and_shift"
        return {"type": "layernorm", "eps": norm.eps, "affine": affine}
    if kind in ("RmsNorm", "RmsNormFp32", "RMSNorm"):
        return {"type": "rmsnorm", "eps": norm.eps, "affine": "none" if norm.weight is None else "scale"}
    raise _refusal(f"norm {kind} of timm", "is no part of vitlab's")


def _find_attention(block: Any) -> Any:
    return block.attns[0].attn if hasattr(block, "attns") else block.attn


def _attention_options(attention: Any) -> Options:
    kind = type(attention).__name__
    if kind not in ("Attention", "EvaAttention", "AttentionRope"):
        raise _refusal(f"attention {kind} of timm", "is stored in a form that vitlab does not read")
    keys = getattr(attention, "num_kv_heads", None)
    if keys not in (None, attention.num_heads):
        raise _refusal("its attention", f"shares {keys} heads of keys between {attention.num_heads} heads of queries")
    names = {name for name, _ in attention.named_parameters()}
    of_keys = bool(names & {"qkv.bias", "k_proj.bias"})
    return {
        "type": "auto" if getattr(attention, "gate", None) is None else "gated",
        "qkv_bias": of_keys or ("qv" if names & {"q_bias", "q_proj.bias"} else False),
        "qk_norm": _norm_options(getattr(attention, "q_norm", None)),
        "norm": _norm_options(getattr(attention, "norm", None)),
        "proj_bias": attention.proj.bias is not None,
    }


def _mlp_options(mlp: Any) -> Options:
    kind, activation = type(mlp).__name__, type(mlp.act).__name__
    ratio = exact_ratio(mlp.fc2.in_features, mlp.fc2.out_features)
    options: Options = {"ratio": ratio, "bias": mlp.fc2.bias is not None, "norm": _norm_options(mlp.norm)}
    if kind == "Mlp":
        return {"type": "gelu", "approximate": _gelu_option(mlp.act), **options}
    gates = {"SiLU": "swiglu", "GELU": "geglu"}
    if kind not in ("SwiGLU", "GluMlp") or activation not in gates or getattr(mlp, "gate_last", False):
        raise _refusal(f"mlp {kind} of timm, with {activation}", "is no part of vitlab's")
    return {"type": gates[activation], **options}


def _gelu_option(act: Any) -> str:
    kind = type(act).__name__
    if kind == "GELUTanh" or (kind == "GELU" and getattr(act, "approximate", "none") == "tanh"):
        return "tanh"
    if kind == "QuickGELU":
        return "sigmoid"
    if kind != "GELU":
        raise _refusal(f"activation {kind} of timm", "is no part of vitlab's")
    return "none"


def _rotary_encoding(rope: Any, grid: tuple[int, int]) -> Encoding:
    """Return the rotary position encoding of a model; its type is ``none`` if there is none."""
    if rope is None:
        return Encoding()
    kind, pairs = type(rope).__name__, "halves" if getattr(rope, "rotate_half", False) else "interleaved"
    if kind == "RotaryEmbeddingMixed":
        return Encoding(type="rope2d_mixed", axes=rope.grid_indexing, pairs=pairs)
    options: Options = {"theta": float(rope.temperature)} if hasattr(rope, "temperature") else {}
    if kind == "RotaryEmbeddingDinoV3" and rope.min_period is None:
        options |= {"coordinates": "centred", "normalize": rope.normalize_coords}
    elif kind == "RotaryEmbeddingCat" and rope.grid_type == "index":
        reference = tuple(rope.ref_feat_shape or grid)
        if reference != tuple(grid):
            options["reference"] = reference
    else:
        raise _refusal(f"the rotary positions {kind} of timm", "are no part of vitlab's")
    if rope.grid_offset:
        options["offset"] = float(rope.grid_offset)
    return Encoding(type="rope2d", options=options, axes=rope.grid_indexing, pairs=pairs)


def _relative_position_options(m: Any) -> list[Options]:
    shared, own = m.rel_pos_bias is not None, m.blocks[0].attn.relative_position_bias_table is not None
    if shared and own:
        raise _refusal("the model", "has relative positions that its blocks share, and others for each block")
    if not shared and not own:
        return []
    return [{"type": "relative_bias", "where": "every_layer_shared" if shared else "every_layer"}]


def _head_options(m: Any) -> Options:
    if type(m).__name__ == "VisionTransformerDistilled":
        return {"type": "distilled"}
    pool = POOLS.get(m.global_pool or "token")
    if pool is None:
        raise _refusal("its head", f"pools by {m.global_pool}")
    if pool == "cls" and m.cls_token is None:
        pool = "gap"
    options: Options = {"type": "linear", "pool": pool}
    over_all = getattr(m, "pool_include_prefix", False) or (pool == "map" and type(m).__name__ == "Eva")
    if over_all and pool not in ("cls", "prr") and m.num_prefix_tokens:
        options["over"] = "all"
    if pool == "map":
        pooling = m.attn_pool
        norm = _norm_options(pooling.norm)
        options["pool_eps"] = norm.get("eps")
        if norm != {"type": "layernorm", "eps": options["pool_eps"], "affine": "scale_and_shift"}:
            raise _refusal("its attention pooling", "has another norm than vitlab's")
        options |= {
            "approximate": _gelu_option(pooling.mlp.act),
            "ratio": exact_ratio(pooling.mlp.fc1.out_features, m.embed_dim),
        }
        if pooling.num_heads != _find_attention(m.blocks[0]).num_heads:
            options["pool_heads"] = pooling.num_heads
    return options
