"""timm's Vision Transformers: what a built module computes, as options and canonical tensors of vitlab's ViT.

Everything is read from the module that timm itself builds and fills by its own filters, so that a configuration, a
default or a renamed tensor of timm is never interpreted here.  Parts that the ViT does not have are refused by name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError, nearest
from vitlab.weights.known import Encoding
from vitlab.weights.transfer import to_native_rotation

Options = dict[str, Any]
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


class TimmViT(NamedTuple):
    """A Vision Transformer of timm: the options of an equal ViT, and its tensors under canonical names."""

    options: Options
    state: dict[str, Tensor]
    image: tuple[int, int]  #: pixels, height and width
    channels: int
    prefix_rows: str  #: whether tokens before the patches have rows of positions, ``own`` or ``none``


def timm_module() -> Any:
    """Return timm, imported behind torchvision's operators.

    Raises:
        WeightsError: if it is not installed.
    """
    torchvision()
    try:
        import timm
    except ImportError:
        raise WeightsError(
            "models of timm are built by timm itself, which is not installed: pip install 'vitlab[interop]'"
        ) from None
    return timm


def names_timm(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` names an architecture of timm."""
    return "pretrained_cfg" in config or "architecture" in config


def build_timm(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> nn.Module:
    """Return the model that a ``config.json`` of timm describes, with the tensors as timm's own filter reads them.

    The size of images, the number of their channels and of classes are those of the file, so that timm resamples and
    drops nothing.

    Raises:
        WeightsError: if timm does not have the architecture, or the tensors are not those of it.
    """
    timm, pretrained = timm_module(), pretrained_config(config)
    full_name = str(config.get("architecture") or pretrained.get("architecture"))
    name, arguments = full_name.partition(".")[0], dict(config.get("model_args") or {})
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
    if size is not None:
        arguments = {"img_size": tuple(size[1:]), "in_chans": size[0], **arguments}
    if config.get("global_pool"):
        if arguments.get("global_pool", config["global_pool"]) != config["global_pool"]:
            raise WeightsError(
                f"{where} says global_pool {config['global_pool']}, and {arguments['global_pool']} under model_args; "
                "correct one of them"
            )
        arguments["global_pool"] = config["global_pool"]
    half = (0.5,) * arguments.get("in_chans", 3)  # timm warns of other numbers of values than channels
    overlay = {
        "state_dict": dict(tensors),
        "num_classes": classes,
        "first_conv": None,
        "custom_load": False,
        "mean": half,
        "std": half,
    }
    try:
        with torch.device("meta"):
            # Refuses parts that the ViT lacks before values are read, and before timm fetches those of a backbone.
            from_timm(timm.create_model(name, **{"num_classes": classes, **arguments}))
        with torch.random.fork_rng(devices=[]):
            model: nn.Module = timm.create_model(
                name, pretrained=True, pretrained_cfg_overlay=overlay, **{"num_classes": classes, **arguments}
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
    return model.eval()


def pretrained_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return timm's ``pretrained_cfg``; in old files it is the whole file."""
    pretrained: Mapping[str, Any] = config.get("pretrained_cfg", config) or {}
    return pretrained


def from_timm(module: nn.Module) -> TimmViT:
    """Return the options and the canonical tensors of a ViT that computes what a module of timm computes.

    Args:
        module: a ``VisionTransformer``, ``VisionTransformerDistilled`` or ``Eva`` of timm.

    Raises:
        WeightsError: for a model of another class, or a part that vitlab's ViT does not have.
    """
    kind = type(module).__name__
    if kind not in ("VisionTransformer", "VisionTransformerDistilled", "Eva"):
        raise WeightsError(f"timm's {kind} is no model of vitlab's; train it as an arm with model: {{type: timm}}")
    m: Any = module
    patch, image, channels = _patch(m.patch_embed)
    blocks = list(m.blocks)
    parts = [_block(block) for block in blocks]
    for index, part in enumerate(parts):
        if part != parts[0]:
            raise _refusal(f"block {index} of the model", "differs from block 0, as vitlab's checkpoints do not")
    heads = _attention_of(blocks[0]).num_heads
    state = _canonical(m.state_dict())
    learned = getattr(m, "pos_embed", None) is not None
    rows = "none" if m.no_embed_class else "own"
    encoding = _rotary(getattr(m, "rope", None), m.patch_embed.grid_size)
    position: Any = {"type": "learned", "prefix_rows": rows} if learned else "none"
    if encoding.type != "none":
        rotary = {"type": encoding.type, **encoding.options}
        position = [position, rotary] if learned else rotary
        state = to_native_rotation(state, encoding, heads)
    pooled, on_tokens = _norm(m.fc_norm) if hasattr(m, "fc_norm") else NONE, _norm(m.norm)
    if NONE not in (pooled, on_tokens):
        raise _refusal("the model", "has a norm on its tokens and another after pooling")
    prefix = [name for name, token in (("class", "cls_token"), ("distillation", "dist_token")) if token in state]
    options: Options = {
        "patch_size": m.patch_embed.patch_size,
        "dim": m.embed_dim,
        "depth": len(blocks),
        "heads": heads,
        "prefix": tuple(prefix),
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "patch": patch,
        "position": position,
        **parts[0],
        "stem_norm": _norm(m.norm_pre),
        "final_norm": on_tokens if pooled == NONE else pooled,
        "final_norm_at": "tokens" if pooled == NONE else "pooled",
        "head": _head(m),
    }
    return TimmViT(options, state, image, channels, rows)


NONE: Options = {"type": "none"}


def _refusal(part: str, reason: str) -> WeightsError:
    return WeightsError(f"{part} {reason}; use other weights, or train the model as an arm with model: {{type: timm}}")


def _patch(embed: Any) -> tuple[Options, tuple[int, int], int]:
    """Return the options of the patch embedding, the size of the image and its channels."""
    if hasattr(embed, "backbone"):
        backbone = embed.backbone
        stages = getattr(backbone, "stages", None)
        if type(backbone).__name__ not in ("ResNetV2", "Sequential") or not hasattr(
            backbone, "stem" if stages else "conv"
        ):
            raise _refusal(f"its stem {type(backbone).__name__}", "is no part of vitlab's")
        conv = (backbone.stem if stages is not None else backbone).conv
        layers = [] if stages is None else [len(stage.blocks) for stage in stages]
        options: Options = {"type": "resnet", "layers": layers, "width_factor": conv.out_channels / 64}
        return options, tuple(embed.img_size), conv.in_channels
    if type(embed).__name__ != "PatchEmbed":
        raise _refusal(f"its patch embedding {type(embed).__name__}", "is no part of vitlab's")
    options = {"type": "linear", "bias": embed.proj.bias is not None, "norm": _norm(embed.norm)}
    return options, tuple(embed.img_size), embed.proj.in_channels


def _block(block: Any) -> Options:
    """Return the options of one block: ``block``, ``attention``, ``mlp``, ``norm`` and ``layer_scale``."""
    kind = type(block).__name__
    if kind not in BLOCKS:
        raise _refusal(f"block {kind} of timm", "is stored in a form that vitlab does not read")
    if kind == "ParallelThingsBlock":
        first = (block.attns[0], block.ffns[0])
        described = _describe(first[0].norm, first[0].attn, first[0].ls, first[1].norm, first[1].mlp, first[1].ls)
        return {"block": {"type": "parallel_things", "number": len(block.attns)}, **described}
    scales = [getattr(block, name, None) for name in (("gamma_1", "gamma_2") if kind == "EvaBlock" else ("ls1", "ls2"))]
    return {
        "block": BLOCKS[kind],
        **_describe(block.norm1, block.attn, scales[0], block.norm2, block.mlp, scales[1]),
    }


def _describe(norm: Any, attention: Any, scale: Any, mlp_norm: Any, mlp: Any, mlp_scale: Any) -> Options:
    if _norm(norm) != _norm(mlp_norm):
        raise _refusal("a block", "has another norm before its MLP than before its attention")
    scaled = [part is not None and not isinstance(part, nn.Identity) for part in (scale, mlp_scale)]
    if scaled[0] != scaled[1]:
        raise _refusal("a block", "scales the output of its attention and not of its MLP")
    return {
        "attention": _attention(attention),
        "mlp": _mlp(mlp),
        "norm": _norm(norm),
        "layer_scale": 1e-5 if scaled[0] else None,
    }


def _norm(norm: Any) -> Options:
    """Return the options of a norm; ``none`` for an identity."""
    kind = type(norm).__name__
    if isinstance(norm, nn.Identity) or norm is None:
        return NONE
    if isinstance(norm, nn.LayerNorm):
        affine = "none" if norm.weight is None else "scale" if norm.bias is None else "scale_and_shift"
        return {"type": "layernorm", "eps": norm.eps, "affine": affine}
    if kind in ("RmsNorm", "RmsNormFp32", "RMSNorm"):
        return {"type": "rmsnorm", "eps": norm.eps, "affine": "none" if norm.weight is None else "scale"}
    raise _refusal(f"norm {kind} of timm", "is no part of vitlab's")


def _attention_of(block: Any) -> Any:
    return block.attns[0].attn if hasattr(block, "attns") else block.attn


def _attention(attention: Any) -> Options:
    """Return the options of an attention."""
    kind = type(attention).__name__
    if kind not in ("Attention", "EvaAttention", "AttentionRope"):
        raise _refusal(f"attention {kind} of timm", "is stored in a form that vitlab does not read")
    keys = getattr(attention, "num_kv_heads", None)
    if keys not in (None, attention.num_heads):
        raise _refusal("its attention", f"shares {keys} heads of keys between {attention.num_heads} heads of queries")
    biased = any(name.startswith(("qkv.bias", "q_bias", "q_proj.bias")) for name, _ in attention.named_parameters())
    options: Options = {
        "type": "gated" if getattr(attention, "gate", None) is not None else "auto",
        "qkv_bias": biased,
        "qk_norm": _norm(attention.q_norm),
        "norm": _norm(attention.norm),
        "proj_bias": attention.proj.bias is not None,
    }
    return options


def _mlp(mlp: Any) -> Options:
    """Return the options of an MLP."""
    kind = type(mlp).__name__
    hidden, dim = mlp.fc2.in_features, mlp.fc2.out_features
    options: Options = {"ratio": _ratio(hidden, dim), "bias": mlp.fc2.bias is not None, "norm": _norm(mlp.norm)}
    if kind == "Mlp":
        return {"type": "gelu", "approximate": _gelu(mlp.act), **options}
    gates = {"SiLU": "swiglu", "GELU": "geglu"}
    activation = type(mlp.act).__name__
    if kind not in ("SwiGLU", "GluMlp") or activation not in gates or getattr(mlp, "gate_last", False):
        raise _refusal(f"mlp {kind} of timm, with {activation}", "is no part of vitlab's")
    return {"type": gates[activation], **options}


def _ratio(hidden: int, dim: int) -> float:
    """Return a ratio that gives exactly this hidden width, which is rounded down."""
    return hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim


def _gelu(act: Any) -> str:
    kind = type(act).__name__
    if kind == "GELUTanh" or (isinstance(act, nn.GELU) and act.approximate == "tanh"):
        return "tanh"
    if kind == "GELU":
        return "none"
    raise _refusal(f"activation {kind} of timm", "is no part of vitlab's")


def _rotary(rope: Any, grid: tuple[int, int]) -> Encoding:
    """Return the rotary position encoding of a model; its type is ``none`` if there is none."""
    if rope is None:
        return Encoding(type="none")
    kind = type(rope).__name__
    pairs = "halves" if getattr(rope, "rotate_half", False) else "interleaved"
    options: Options = {}
    if kind == "RotaryEmbeddingMixed":
        return Encoding(type="rope2d_mixed", axes=rope.grid_indexing, pairs=pairs)
    if kind == "RotaryEmbeddingDinoV3" and rope.min_period is None:
        options = {"theta": float(rope.temperature), "coordinates": "centred", "normalize": rope.normalize_coords}
    elif kind == "RotaryEmbeddingCat" and rope.grid_type == "index":
        options = {"theta": float(rope.temperature)}
        reference = None if rope.ref_feat_shape is None else tuple(rope.ref_feat_shape)
        if reference not in (None, tuple(grid)):
            options["reference"] = reference
    else:
        raise _refusal(f"the rotary positions {kind} of timm", "are no part of vitlab's")
    if rope.grid_offset:
        options["offset"] = float(rope.grid_offset)
    return Encoding(type="rope2d", options=options, axes=rope.grid_indexing, pairs=pairs)


def _head(m: Any) -> Options:
    """Return the options of the head; its weights may be missing."""
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
        if pooling.num_heads != _attention_of(m.blocks[0]).num_heads or pooling.mlp.fc1.out_features != 4 * m.embed_dim:
            raise _refusal("its attention pooling", "has other heads, or another width of its MLP, than vitlab's")
        if _norm(pooling.norm) != {"type": "layernorm", "eps": 1e-6, "affine": "scale_and_shift"}:
            raise _refusal("its attention pooling", "has another norm than vitlab's")
        options["approximate"] = _gelu(pooling.mlp.act)
    return options


def _canonical(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of timm's models under canonical names: one matrix of q, k and v, and the parts of a gated MLP."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        stem, _, last = name.rpartition(".")
        if last in ("gamma_1", "gamma_2"):
            out[f"{stem}.ls{last[-1]}.gamma"] = value
        elif last in ("q_bias", "v_bias") or stem.endswith((".q_proj", ".k_proj", ".v_proj")):
            continue
        elif (
            name.endswith((".mlp.fc1.weight", ".mlp.fc1.bias"))
            and value.shape[0] == 2 * state[f"{stem[:-1]}2.weight"].shape[1]
        ):
            out[f"{stem}_g.{last}"], out[f"{stem}_x.{last}"] = value.chunk(2)
        else:
            out[name] = value
    for name, value in state.items():
        if name.endswith(".q_bias"):
            stem = name.removesuffix(".q_bias")
            out[f"{stem}.qkv.bias"] = torch.cat([value, torch.zeros_like(value), state[f"{stem}.v_bias"]])
        elif name.endswith((".q_proj.weight", ".q_proj.bias")):
            stem, last = name.split(".q_proj.")
            parts = [state.get(f"{stem}.{part}_proj.{last}") for part in "qkv"]
            out[f"{stem}.qkv.{last}"] = torch.cat([torch.zeros_like(value) if part is None else part for part in parts])
    return out
