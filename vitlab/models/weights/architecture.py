"""From tensors to the model they belong to: what shapes show, what was said beside them, and what must be assumed.

D width, C channels of the image, N patches, T rows of positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.errors import WeightsError
from vitlab.geometry import DataInfo, Pair
from vitlab.models.sizes import SIZES
from vitlab.models.weights.known import HALF, Known
from vitlab.models.weights.names import State

PUBLISHED = ("Ti", "S", "M", "B", "L", "H", "g", "G")
HEAD_DIM = 64  #: of the published sizes up to L, and what is assumed of a width that none of them has


@dataclass(frozen=True)
class Architecture:
    """A model, as the options of :class:`vitlab.models.vit.ViT`, and what it sees."""

    options: Mapping[str, Any]
    info: DataInfo
    heads: int
    grid: Pair
    prefix: tuple[str, ...]  #: tokens before the patches, registers included
    prefix_rows: str  #: own or none
    mean: tuple[float, ...]
    std: tuple[float, ...]
    assumed: tuple[str, ...]  #: what no tensor and no file says, in a sentence each

    def known(self) -> Known:
        """What of this cannot be read off the tensors."""
        norm, mlp = self.options["norm"], self.options["mlp"]
        return Known(
            heads=self.heads,
            image=self.info.image,
            grid=self.grid,
            prefix_rows="none" if self.prefix_rows == "none" else "own",
            pool=self.options["head"].get("pool"),
            eps=norm.get("eps"),
            gelu=mlp.get("approximate"),
            mean=self.mean,
            std=self.std,
            labels=self.info.labels or None,
        )


def architecture(state: State, known: Known, classes: int | None = None) -> Architecture:
    """The model that canonical tensors belong to.

    Args:
        state: tensors under canonical names.
        known: what is known beside them.
        classes: outputs of a head that is to be new; by default those of the head in ``state``.

    Raises:
        WeightsError: if they belong to no Vision Transformer, or if what cannot be assumed is not known.
    """
    look = _Look(state)
    dim, channels, patch_size, patch, reduction = _patches(look)
    depth = 1 + max((int(found[1]) for name in state if (found := _BLOCK.match(name))), default=-1)
    if not depth:
        raise WeightsError("these weights have no blocks: there is no blocks.0.norm1.weight")
    tokens = [("class", "cls_token"), ("distillation", "dist_token")]
    prefix = tuple(token for token, name in tokens if name in state)
    registers = look.shape("reg_token", 3)[1] if "reg_token" in state else 0
    heads, assumed_heads = _heads(look, dim, known)
    count = len(prefix) + registers
    grid, rows = _grid(look, count, patch_size, reduction, known)
    image = (grid[0] * patch_size[0] * reduction, grid[1] * patch_size[1] * reduction)
    eps = {} if known.eps is None else {"eps": known.eps}
    norm = _norm(state, "blocks.0.norm1", eps)
    pooled = "fc_norm.weight" in state
    final = "fc_norm" if pooled else "norm"
    head, outputs, assumed_head = _head(look, known, prefix, pooled, classes)
    attention: dict[str, Any] = {"type": "auto", "qkv_bias": "blocks.0.attn.qkv.bias" in state}
    if "blocks.0.attn.q_norm.weight" in state:
        attention["qk_norm"] = _norm(state, "blocks.0.attn.q_norm", eps)
    options = {
        "patch_size": patch_size,
        "dim": dim,
        "depth": depth,
        "heads": heads,
        "prefix": prefix,
        "registers": registers,
        "patch": patch,
        "position": {"type": "learned", "prefix_rows": rows} if "pos_embed" in state else "none",
        "attention": attention,
        "mlp": _mlp(look, dim, known),
        "norm": norm,
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "final_norm": _norm(state, final, eps) if f"{final}.weight" in state else {"type": "none"},
        "final_norm_at": "pooled" if pooled else "tokens",
        "head": head,
    }
    labels = known.labels if known.labels is not None and len(known.labels) == outputs else ()
    info = DataInfo(image=image, channels=channels, classes=outputs, labels=labels)
    mean, std, assumed_mean = _normalisation(known, channels)
    return Architecture(
        options=options,
        info=info,
        heads=heads,
        grid=grid,
        prefix=(*prefix, *["register"] * registers),
        prefix_rows=rows,
        mean=mean,
        std=std,
        assumed=tuple(filter(None, (assumed_heads, assumed_head, assumed_mean))),
    )


def width_of(state: State) -> int | None:
    """D, or None where nothing shows it."""
    value = state.get("blocks.0.norm1.weight")
    return value.shape[0] if value is not None and value.ndim == 1 else None


# -- how it is done ---------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"blocks\.(\d+)\.")
_STAGE = re.compile(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.conv1\.weight")


class _Look:
    """Shapes by name, with a sentence where one is not there."""

    def __init__(self, state: State) -> None:
        self.state = state

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        value = self.state.get(name)
        if value is None:
            raise WeightsError(f"these weights are not whole: {name} is missing")
        if value.ndim != axes:
            raise WeightsError(f"{name} cannot be of the shape {tuple(value.shape)}: it has {axes} axes")
        return tuple(value.shape)


def _patches(look: _Look) -> tuple[int, int, Pair, dict[str, Any], int]:
    """Width, channels, pixels per patch, the choice of the patch embedding, and the stride before the patches."""
    dim, channels, height, width = look.shape("patch_embed.proj.weight", 4)
    stem = next((f"patch_embed.backbone.{at}conv.weight" for at in ("stem.", "") if _has(look, at)), None)
    if stem is None:
        patch: dict[str, Any] = {"type": "linear", "bias": "patch_embed.proj.bias" in look.state}
        if "patch_embed.norm.weight" in look.state:
            patch["norm"] = "layernorm"
        return dim, channels, (height, width), patch, 1
    stages: dict[int, int] = {}
    for name in look.state:
        if found := _STAGE.fullmatch(name):
            stages[int(found[1])] = max(stages.get(int(found[1]), 0), int(found[2]) + 1)
    layers = [stages[stage] for stage in sorted(stages)]
    out, channels, *_ = look.shape(stem, 4)
    reduction = 4 * 2 ** max(len(layers) - 1, 0)
    return dim, channels, (height, width), {"type": "resnet", "layers": layers, "width_factor": out / 64}, reduction


def _has(look: _Look, at: str) -> bool:
    return f"patch_embed.backbone.{at}conv.weight" in look.state


def _heads(look: _Look, dim: int, known: Known) -> tuple[int, str]:
    """The number of heads, which no shape shows, and how it was come by where it was assumed."""
    if known.heads is not None:
        if known.heads < 1 or dim % known.heads:
            raise WeightsError(f"a width of {dim} cannot be divided among {known.heads} heads")
        return known.heads, ""
    if "blocks.0.attn.q_norm.weight" in look.state:
        (head_dim,) = look.shape("blocks.0.attn.q_norm.weight", 1)
        if head_dim and dim % head_dim == 0:
            return dim // head_dim, ""
    for name in PUBLISHED:
        if SIZES[name].dim == dim:
            return SIZES[name].heads, f"{SIZES[name].heads} heads, as ViT-{name} has at this width"
    if dim % HEAD_DIM:
        raise WeightsError(
            f"no tensor shows the number of heads, and a width of {dim} is neither that of a published size nor a "
            f"multiple of {HEAD_DIM}; say it (--heads)"
        )
    return dim // HEAD_DIM, f"{dim // HEAD_DIM} heads, of {HEAD_DIM} channels each"


def _grid(look: _Look, prefix: int, patch: Pair, reduction: int, known: Known) -> tuple[Pair, str]:
    """Rows and columns of patches, and whether the tokens before them have rows of positions (own, none)."""
    said = known.grid
    if said is None and known.image is not None:
        step = (patch[0] * reduction, patch[1] * reduction)
        if known.image[0] % step[0] or known.image[1] % step[1]:
            raise WeightsError(f"images of {_by(known.image)} cannot be cut into patches of {_by(step)}")
        said = (known.image[0] // step[0], known.image[1] // step[1])
    if "pos_embed" not in look.state:
        if said is None:
            raise WeightsError("these weights have no learned positions, so nothing shows their grid; say it (--grid)")
        return said, "own"
    tables, rows, _ = look.shape("pos_embed", 3)
    if tables != 1:
        raise WeightsError(f"pos_embed has {tables} tables; vitlab reads checkpoints with one")
    kinds = [known.prefix_rows] if known.prefix_rows else ["own", "none"] if prefix else ["own"]
    patches = {kind: rows - (prefix if kind == "own" else 0) for kind in kinds}
    if said is not None:
        for kind, count in patches.items():
            if count == said[0] * said[1]:
                return said, kind
        raise WeightsError(
            f"pos_embed has {rows} rows, which are not those of a grid of {_by(said)} and {prefix} tokens before it"
        )
    square = {kind: count for kind, count in patches.items() if count > 0 and math.isqrt(count) ** 2 == count}
    if len(square) != 1:
        sides = " or ".join(_by((math.isqrt(count),) * 2) for count in square.values())
        grids = f"may be a grid of {sides}" if square else "are no square grid"
        raise WeightsError(
            f"the {rows} rows of pos_embed, with {prefix} tokens before the patches, {grids}; say it (--grid)"
        )
    kind, count = square.popitem()
    side = math.isqrt(count)
    return (side, side), kind


def _norm(state: State, name: str, eps: Mapping[str, Any]) -> dict[str, Any]:
    """Which norm stands there: one without a shift is RMSNorm."""
    return {"type": "layernorm" if f"{name}.bias" in state else "rmsnorm", **eps}


def _mlp(look: _Look, dim: int, known: Known) -> dict[str, Any]:
    gated = "blocks.0.mlp.fc1_g.weight" in look.state
    hidden, _ = look.shape("blocks.0.mlp.fc1_g.weight" if gated else "blocks.0.mlp.fc1.weight", 2)
    _, back = look.shape("blocks.0.mlp.fc2.weight", 2)
    if hidden != back:
        raise WeightsError(
            f"blocks.0.mlp.fc1 makes {hidden} channels and fc2 takes {back}: a gated MLP packed into one matrix, which "
            "vitlab does not have"
        )
    ratio = hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
    if gated:
        return {"type": "swiglu", "ratio": ratio}
    return {"type": "gelu", "ratio": ratio, "approximate": known.gelu or "none"}


def _head(
    look: _Look, known: Known, prefix: tuple[str, ...], pooled: bool, classes: int | None
) -> tuple[dict[str, Any], int, str]:
    """The choice of the head, its outputs, and what was assumed of it."""
    state = look.state
    if "head.weight" in state:
        outputs, _ = look.shape("head.weight", 2)
    elif classes is None:
        raise WeightsError(
            "these weights have no head: head.weight is missing; they can start a training, with a new one"
        )
    else:
        outputs = classes
    if "head_dist.weight" in state:
        return {"type": "distilled"}, outputs, ""
    more: dict[str, Any] = {}
    if "attn_pool.latent" in state:
        pool, assumed = "map", ""
        more = {"approximate": known.gelu or "none"}
    elif pooled or "class" not in prefix:
        pool, assumed = "gap", "" if known.pool == "gap" else "the head reads the mean of the patches"
    elif known.pool is not None:
        pool, assumed = known.pool, ""
    else:
        pool, assumed = "cls", "the head reads the class token"
    if "pre_logits.fc.weight" in state:
        width, _ = look.shape("pre_logits.fc.weight", 2)
        return {"type": "mlp", "pool": pool, **more, "representation_size": width}, outputs, assumed
    return {"type": "linear", "pool": pool, **more}, outputs, assumed


def _normalisation(known: Known, channels: int) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Mean and standard deviation per channel; those of three colours say nothing of another number of channels."""
    mean, std = known.mean, known.std
    if mean is not None and std is not None:
        if len(mean) == len(std) == channels:
            return mean, std, ""
        if len(mean) == len(std) == 1:
            return mean * channels, std * channels, ""
    half = HALF[0][:1] * channels
    return half, half, f"pixels of {channels} channels normalised by 0.5 and 0.5"


def _by(pair: tuple[int, ...]) -> str:
    return "x".join(map(str, pair))
