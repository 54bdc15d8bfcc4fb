"""The architecture of a checkpoint: from tensor shapes, from stated facts, and from assumptions for the rest.

D width, C channels of the image, N patches, T rows of positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.errors import WeightsError
from vitlab.geometry import DataInfo, Pair
from vitlab.models.anatomy import SIZES
from vitlab.spec import Choice
from vitlab.spec.choice import PARTS, TOGETHER
from vitlab.weights.known import AssumedFacts, Encoding, ModelFacts, plain, requested_grid, some
from vitlab.weights.names import BlockNames, State, depth_of

PUBLISHED = ("Ti", "S", "M", "B", "L", "H", "g", "G")
HEAD_DIM = 64  #: of the published sizes up to L; assumed for any other width


@dataclass(frozen=True)
class Architecture:
    """A model as the options of :class:`vitlab.models.vit.ViT`, and its data."""

    options: Mapping[str, Any]
    info: DataInfo
    heads: int
    grid: Pair
    prefix: tuple[str, ...]  #: tokens before the patches, registers included
    prefix_rows: str  #: own or none
    mean: tuple[float, ...]
    std: tuple[float, ...]
    assumed: tuple[str, ...]  #: one sentence for each fact that no tensor and no file states

    def facts(self) -> ModelFacts:
        """Return the facts that no tensor shows, such as heads, image size and normalisation."""
        norm, mlp, position = (self.options[part] for part in ("norm", "mlp", "position"))
        choice = Choice.of(position)
        parts = [Choice.of(part) for part in choice.options[PARTS]] if choice.type == TOGETHER else [choice]
        others = [Encoding(type=part.type, options=part.options) for part in parts if part.type in _NOT_IN_TENSORS]
        return ModelFacts(
            heads=self.heads,
            image=self.info.image,
            grid=self.grid,
            prefix_rows="none" if self.prefix_rows == "none" else "own",
            pool=self.options["head"].get("pool"),
            norm=norm["type"] if norm["type"] in ("layernorm", "rmsnorm") else None,
            eps=norm.get("eps"),
            gelu="none" if mlp["type"] == "swiglu" else mlp.get("approximate"),
            blocks="pre_norm",
            position=others[0] if others else Encoding(type="none"),
            pre_logits="tanh",
            mean=self.mean,
            std=self.std,
            labels=self.info.labels or None,
        )


def architecture(
    state: State,
    known: ModelFacts,
    classes: int | None = None,
    *,
    defaults: ModelFacts = ModelFacts(),  # noqa: B008
    title: str = "",
    unknown: Collection[str] = (),
) -> Architecture:
    """Return the model that canonical tensors belong to.

    Args:
        state: tensors under canonical names.
        known: facts that are stated beside them.
        classes: outputs of a new head; by default those of the head in ``state``.
        defaults: facts to assume for unknown ones, by the convention of a format.
        title: the format's library.
        unknown: names in the file that have no canonical one.

    Raises:
        WeightsError: if they belong to no Vision Transformer, or a fact without a default is unknown.
    """
    tensors = _Tensors(state, unknown)
    facts = AssumedFacts(known, defaults, title)
    dim, channels, patch_size, patch, reduction = _patches(tensors)
    depth = depth_of(state)
    if depth is None:
        raise WeightsError(tensors.without("blocks.0.norm1.weight is missing"))
    prefix = tuple(token for token, name in (("class", "cls_token"), ("distillation", "dist_token")) if name in state)
    registers = tensors.shape("reg_token", 3)[1] if "reg_token" in state else 0
    heads = _heads(tensors, dim, facts)
    grid, rows = _grid(tensors, len(prefix) + registers, patch_size, reduction, facts)
    image = (grid[0] * patch_size[0] * reduction, grid[1] * patch_size[1] * reduction)
    pooled = "fc_norm.weight" in state
    final = "fc_norm" if pooled else "norm"
    head, outputs = _head(tensors, facts, prefix, registers, pooled, classes)
    eps = facts.of("eps", lambda value: f"norms of eps {value:g}, the default of {title}")
    block = tensors.block
    norm = _norm(state, block.norm, eps, facts)
    attention: dict[str, Any] = {"type": "auto", "qkv_bias": f"{block.attention}.qkv.bias" in state}
    if f"{block.attention}.q_norm.weight" in state:
        attention["qk_norm"] = _norm(state, f"{block.attention}.q_norm", eps)
    options = {
        "patch_size": patch_size,
        "dim": dim,
        "depth": depth,
        "heads": heads,
        "prefix": prefix,
        "registers": registers,
        "patch": patch,
        "position": _position(state, rows, facts),
        "block": {"type": "parallel_things", "number": block.parallel} if block.parallel else "prenorm",
        "attention": attention,
        "mlp": _mlp(tensors, dim, facts),
        "norm": norm,
        "layer_scale": 1e-5 if f"{block.layer_scale}.gamma" in state else None,
        "final_norm": _norm(state, final, eps) if f"{final}.weight" in state else {"type": "none"},
        "final_norm_at": "pooled" if pooled else "tokens",
        "head": head,
    }
    labels = known.labels if known.labels is not None and len(known.labels) == outputs else ()
    info = DataInfo(image=image, channels=channels, classes=outputs, labels=labels)
    mean, std = facts.normalisation(channels)
    return Architecture(
        options=options,
        info=info,
        heads=heads,
        grid=grid,
        prefix=(*prefix, *["register"] * registers),
        prefix_rows=rows,
        mean=mean,
        std=std,
        assumed=tuple(facts.assumed),
    )


_STAGE = re.compile(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.conv1\.weight")
_CANONICAL = re.compile(
    r"(cls_token|dist_token|reg_token|pos_embed|position\.freqs|attn_pool\..+)|"
    r"(patch_embed\.(proj|norm)|norm|fc_norm|head|head_dist|pre_logits\.fc)\.(weight|bias)|"
    r"patch_embed\.backbone\.((stem\.)?(conv|norm)|stages\.\d+\.blocks\.\d+\..+)\.(weight|bias)|"
    r"blocks\.\d+\.((attns|ffns)\.\d+\.)?(norm[12]?|attn\.(qkv|proj|q_norm|k_norm)|mlp\.(fc1|fc2|fc1_g|fc1_x))\."
    r"(weight|bias)|"
    r"blocks\.\d+\.((attns|ffns)\.\d+\.)?ls[12]?\.gamma"
)
_NOT_IN_TENSORS = ("rope2d", "rope2d_mixed", "sincos2d")
"""Position encodings that leave no tensor, and are stated as an :class:`Encoding`."""


class _Tensors:
    """Canonical tensors by name, and the checks of their shapes."""

    def __init__(self, state: State, unknown: Collection[str]) -> None:
        self.state = state
        self.unknown = unknown  #: names in the file that its format does not have
        self.block = BlockNames.of(state)

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        value = self.state.get(name)
        if value is None:
            raise WeightsError(self.without(f"{name} is missing"))
        if value.ndim != axes:
            raise WeightsError(
                f"{name} has shape {tuple(value.shape)}; expected {axes} axes. Use a checkpoint of a Vision "
                "Transformer."
            )
        return tuple(value.shape)

    def without(self, fault: str) -> str:
        """Return the message for ``fault``, preceded by tensors that no model of vitlab has."""
        foreign = sorted({*self.unknown, *(name for name in self.state if not _CANONICAL.fullmatch(name))})
        if not foreign:
            return f"the checkpoint is incomplete: {fault}; use a complete one"
        names = f"{some(foreign)} {'is' if len(foreign) == 1 else 'are'} unknown"
        return f"these are not the weights of a supported Vision Transformer: {names}, and {fault}; use other weights"


def _patches(tensors: _Tensors) -> tuple[int, int, Pair, dict[str, Any], int]:
    """Return width, channels, patch size, options of the patch embedding, and the stride of the stem before it."""
    dim, channels, height, width = tensors.shape("patch_embed.proj.weight", 4)
    stems = (f"patch_embed.backbone.{at}conv.weight" for at in ("stem.", ""))
    stem = next((name for name in stems if name in tensors.state), None)
    if stem is None:
        if any(name.startswith("patch_embed.backbone.") for name in tensors.state):
            raise WeightsError(tensors.without("patch_embed.backbone.conv.weight is missing"))
        patch: dict[str, Any] = {"type": "linear", "bias": "patch_embed.proj.bias" in tensors.state}
        if "patch_embed.norm.weight" in tensors.state:
            patch["norm"] = "layernorm"
        return dim, channels, (height, width), patch, 1
    stages: dict[int, int] = {}
    for name in tensors.state:
        if match := _STAGE.fullmatch(name):
            stages[int(match[1])] = max(stages.get(int(match[1]), 0), int(match[2]) + 1)
    layers = [stages[stage] for stage in sorted(stages)]
    out, channels, *_ = tensors.shape(stem, 4)
    reduction = 4 * 2 ** max(len(layers) - 1, 0)
    return dim, channels, (height, width), {"type": "resnet", "layers": layers, "width_factor": out / 64}, reduction


def _heads(tensors: _Tensors, dim: int, facts: AssumedFacts) -> int:
    """Return the number of heads, which no shape determines."""
    heads = facts.known.heads
    if heads is not None:
        if heads < 1 or dim % heads:
            raise WeightsError(
                f"{heads} heads do not divide the width of {dim} channels; give a divisor of it (--heads, or heads of "
                "a teacher in a study)"
            )
        return heads
    q_norm = f"{tensors.block.attention}.q_norm.weight"
    if q_norm in tensors.state:
        (head_dim,) = tensors.shape(q_norm, 1)
        if head_dim and dim % head_dim == 0:
            return dim // head_dim
    for name in PUBLISHED:
        if SIZES[name].dim == dim:
            facts.assumed.append(f"{SIZES[name].heads} heads, as ViT-{name} has at this width")
            return SIZES[name].heads
    if dim % HEAD_DIM:
        raise WeightsError(
            f"no tensor shows the number of heads, and a width of {dim} is neither that of a published size nor a "
            f"multiple of {HEAD_DIM}; give it (--heads, or heads of a teacher in a study)"
        )
    facts.assumed.append(f"{dim // HEAD_DIM} heads, of {HEAD_DIM} channels each")
    return dim // HEAD_DIM


def _grid(tensors: _Tensors, prefix: int, patch: Pair, reduction: int, facts: AssumedFacts) -> tuple[Pair, str]:
    """Return the grid of patches, and whether prefix tokens have rows of positions (``own`` or ``none``).

    By default the grid is assumed to be square and prefix tokens to have rows; weights for which only one of the two
    can hold are refused.
    """
    source = facts.known
    requested = requested_grid(source.image, source.grid, (patch[0] * reduction, patch[1] * reduction))
    if "pos_embed" not in tensors.state:
        if requested is None:
            raise WeightsError(f"these weights have no learned positions, so nothing shows their grid; {_GRID_HINT}")
        return requested, source.prefix_rows or "own"
    tables, rows, _ = tensors.shape("pos_embed", 3)
    if tables != 1:
        raise WeightsError(
            f"pos_embed holds {tables} tables of positions (its first dimension), and vitlab supports one; use other "
            "weights"
        )
    kinds = [source.prefix_rows] if source.prefix_rows else ["own", "none"] if prefix else ["own"]
    patches = {kind: rows - (prefix if kind == "own" else 0) for kind in kinds}
    if requested is not None:
        for kind, count in patches.items():
            if count == requested[0] * requested[1]:
                return requested, kind
        raise WeightsError(
            f"pos_embed has {rows} rows; a grid of {plain(requested)} patches has {requested[0] * requested[1]}, plus "
            f"{prefix} if the tokens before the patches have rows. Correct the grid or the image size that is given "
            "for these weights (--source-grid, --grid of vitlab explain, or config.json)."
        )
    description = f"the {rows} rows of pos_embed, with {prefix} token{'' if prefix == 1 else 's'} before the patches,"
    square = {kind: count for kind, count in patches.items() if count > 0 and math.isqrt(count) ** 2 == count}
    if len(square) != 1:
        sides = " or ".join(plain((math.isqrt(count),) * 2) for count in square.values())
        raise WeightsError(
            f"{description} {f'may be a grid of {sides}' if square else 'are not a square grid'}; {_GRID_HINT}"
        )
    kind, count = square.popitem()
    grid = (math.isqrt(count), math.isqrt(count))
    with_rows = max(patches.get("own", 0), 0) if kind == "none" else 0
    # Of the other grids with several rows, the one closest to a square.
    for side in (side for side in range(math.isqrt(with_rows), 1, -1) if with_rows % side == 0):
        raise WeightsError(
            f"{description} may be a grid of {plain(grid)} without rows for these tokens, or one with them, such as "
            f"{side}x{with_rows // side}; {_GRID_HINT}"
        )
    which = "rows" if kind == "own" else "no rows"
    own = "" if not prefix or source.prefix_rows else f", and {which} of positions for the tokens before it"
    facts.assumed.append(f"a square grid, {plain(grid)}{own}")
    return grid, kind


NO_HEAD = (
    "these weights have no head (head.weight); use weights with one, or start a training from them with "
    "init_from.head: new"
)
_GRID_HINT = "give it as --source-grid HxW (--grid HxW in vitlab explain)"


def _position(state: State, rows: str, facts: AssumedFacts) -> Any:
    """Return the options of the position encoding; an encoding other than learned rows may leave no tensor."""
    encoding = facts.known.position or facts.defaults.position
    if encoding is None:
        kind = "no rotary positions" if "pos_embed" in state else "no positions, neither rotary nor computed ones"
        order = "" if facts.known.blocks else ", and norms before attention and MLP"
        facts.assumed.append(f"{kind}{order}, which no tensor would show")
    elif facts.known.position is None and encoding.type != "none":
        facts.assumed.append(f"positions are {facts.title}'s {encoding.type}, which no tensor shows")
    learned = {"type": "learned", "prefix_rows": rows}
    if encoding is None or encoding.type == "none":
        return learned if "pos_embed" in state else "none"
    other = {"type": encoding.type, **encoding.options}
    return [learned, other] if "pos_embed" in state else other


def _norm(state: State, name: str, eps: float | None, facts: AssumedFacts | None = None) -> dict[str, Any]:
    """Return the options of the norm ``name``; a norm without a shift is RMSNorm."""
    kind = "layernorm" if f"{name}.bias" in state else "rmsnorm"
    if facts is not None and facts.known.norm is None and kind == "rmsnorm":
        facts.assumed.append("norms without a shift are RMSNorm, and subtract no mean")
    if facts is not None and facts.known.norm not in (None, kind):
        raise WeightsError(
            f"{name} belongs to a {kind}, and the format or config.json says {facts.known.norm}; use files that match"
        )
    return {"type": kind} if eps is None else {"type": kind, "eps": eps}


def _mlp(tensors: _Tensors, dim: int, facts: AssumedFacts) -> dict[str, Any]:
    mlp = tensors.block.mlp
    gated = f"{mlp}.fc1_g.weight" in tensors.state
    hidden, _ = tensors.shape(f"{mlp}.{'fc1_g' if gated else 'fc1'}.weight", 2)
    _, back = tensors.shape(f"{mlp}.fc2.weight", 2)
    if hidden != back:
        raise WeightsError(
            f"{mlp}.fc1 has {hidden} outputs and fc2 {back} inputs, as in a gated MLP packed into one matrix, "
            "which vitlab does not support; use other weights"
        )
    ratio = hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
    if gated:
        facts.of("gelu", lambda value: "the gate of the MLP is a SiLU")
        return {"type": "swiglu", "ratio": ratio}
    gelu = facts.of("gelu", lambda value: f"GELU {_GELU[value]}, as is the custom of {facts.title}")
    return {"type": "gelu", "ratio": ratio, "approximate": gelu or "none"}


_GELU = {"none": "computed exactly", "tanh": "approximated by tanh"}


def _head(
    tensors: _Tensors,
    facts: AssumedFacts,
    prefix: tuple[str, ...],
    registers: int,
    pooled: bool,
    classes: int | None,
) -> tuple[dict[str, Any], int]:
    """Return the options of the head, and its number of outputs."""
    state = tensors.state
    if "head.weight" in state:
        outputs, _ = tensors.shape("head.weight", 2)
    elif classes is None:
        raise WeightsError(NO_HEAD)
    else:
        outputs = classes
    if "head_dist.weight" in state:
        return {"type": "distilled"}, outputs
    pool_option, headless = facts.known.pool, "head.weight" not in state
    before = prefix or registers
    more: dict[str, Any] = {}
    sentence = ""
    if "attn_pool.latent" in state:
        pool = "map"
        more = {"approximate": facts.known.gelu or facts.defaults.gelu or "none"}
        sentence = "attention pooling reads the patches alone" if before else ""
    elif pool_option == "map":
        if not headless:
            raise WeightsError(
                "the format or config.json says that the head pools by attention, and attn_pool.latent is missing; use "
                "files that match"
            )
        pool = "gap" if "class" not in prefix else "cls"
    elif pool_option is not None:
        if pool_option == "cls" and "class" not in prefix:
            raise WeightsError(
                "the format or config.json says that the head reads the class token, and cls_token is missing; use "
                "files that match"
            )
        pool = pool_option
    elif pooled or "class" not in prefix:
        pool = "gap"
        sentence = f"the head reads the mean of the patches{', without the tokens before them' if before else ''}"
    else:
        pool = facts.defaults.pool or "cls"
        sentence = "the head reads the class token"
    if pool_option is None and sentence and not headless:
        facts.assumed.append(sentence)
    if "pre_logits.fc.weight" in state:
        width, _ = tensors.shape("pre_logits.fc.weight", 2)
        facts.of("pre_logits", lambda value: f"the hidden layer before the head has {value}")
        return {"type": "mlp", "pool": pool, **more, "representation_size": width}, outputs
    return {"type": "linear", "pool": pool, **more}, outputs
