"""The architecture of a checkpoint: from tensor shapes, from stated facts, and from assumptions for the rest.

A fact is what the shapes of tensors do not show.

D width, C channels of the image, N patches, T rows of positions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast, get_args

import torch
from pydantic import PositiveFloat, PositiveInt

from vitlab.components.base import Gelu
from vitlab.components.head import Pool
from vitlab.components.position import encodings_of_choice
from vitlab.errors import WeightsError, list_some
from vitlab.geometry import DataInfo, Geometry, Pair
from vitlab.models.contract import State
from vitlab.models.vit import ViT
from vitlab.models.vit_parts import SIZES, Anatomy
from vitlab.spec.choice import Frozen

RELATIVE = "position.relative_position_bias_table"
"""Canonical name of BEiT's relative positions, the tables of all blocks in one tensor."""
Values = tuple[float, ...]
"""One value per channel."""

EncodingType = Literal["none", "rope2d", "rope2d_mixed", "sincos2d"]


class Encoding(Frozen):
    """A position encoding that no tensor shows, and the layout of the channels that it rotates."""

    type: EncodingType = "none"
    options: Mapping[str, Any] = {}  #: of the position encoding
    axes: Literal["xy", "ij"] = "xy"  #: whether the first half of the channel pairs turns with the column or the row
    pairs: Literal["interleaved", "halves"] = "interleaved"  #: channels 2i and 2i + 1, or i and i + K/2


class ModelFacts(Frozen):
    """Facts about a model; None for those that are unknown."""

    heads: PositiveInt | None = None
    image: tuple[PositiveInt, PositiveInt] | None = None  #: pixels, height and width
    grid: tuple[PositiveInt, PositiveInt] | None = None  #: patches, rows and columns
    prefix_rows: Literal["own", "none"] | None = None  #: whether tokens before the patches have rows of positions
    pool: Pool | None = None
    norm: Literal["layernorm", "rmsnorm"] | None = None
    eps: PositiveFloat | None = None  #: of the norms
    gelu: Gelu | None = None  #: the approximation the MLPs compute
    position: Encoding | None = None  #: beside learned rows
    mean: Values | None = None  #: of pixels in [0, 1]
    std: Values | None = None
    labels: tuple[str, ...] | None = None  #: names of the classes

    def with_defaults(self, other: ModelFacts) -> ModelFacts:
        """Return these facts, and the facts in ``other`` where they are unknown."""
        return other.model_copy(update={name: value for name, value in self if value is not None})

    def with_stated_facts(self, other: ModelFacts) -> ModelFacts:
        """Return the facts that a caller states, with these, of a file, for the ones that it does not state.

        Raises:
            WeightsError: if the two contradict each other.
        """
        for name in ("heads", "image", "grid"):
            own, theirs = getattr(self, name), getattr(other, name)
            if None not in (own, theirs) and own != theirs:
                raise WeightsError(
                    f"the file says {name} {format_sides(own)}, and {format_sides(theirs)} was given; "
                    f"give {format_sides(own)}"
                )
        return other.with_defaults(self)


IMAGENET = ModelFacts(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""The normalisation of torchvision and DeiT."""
CLIP = ModelFacts(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
"""The normalisation of OpenAI's CLIP."""
HALF = ModelFacts(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
"""The normalisation of Google's checkpoints and of timm's Vision Transformers."""

PUBLISHED = ("Ti", "S", "M", "B", "L", "H", "g", "G")
HEAD_DIM = 64  #: of the published sizes up to L; assumed for any other width
Options = dict[str, Any]
"""Options of a component or of a model, as a study file has them."""


@dataclass(frozen=True)
class Architecture:
    """A model as the options of :class:`vitlab.models.vit.ViT`, and its data."""

    options: Options
    info: DataInfo
    mean: Values
    std: Values
    assumed: tuple[str, ...] = ()  #: one sentence for each fact that no tensor and no file states

    @cached_property
    def anatomy(self) -> Anatomy:
        """The sizes of the model, and the component at each of its places."""
        return ViT.anatomy(self.info, self.options)

    @property
    def geometry(self) -> Geometry:
        """The sizes of the model."""
        return self.anatomy.geometry

    @property
    def encoding_options(self) -> dict[str, Options]:
        """The options of every position encoding, by type."""
        return {choice.type: choice.plain() for choice in encodings_of_choice(self.anatomy.position)}

    @property
    def prefix_rows(self) -> Literal["own", "none"]:
        """Whether tokens before the patches have rows of positions."""
        return "none" if self.encoding_options.get("learned", {}).get("prefix_rows") == "none" else "own"

    def facts(self) -> ModelFacts:
        """Return the facts that no tensor shows, such as heads, image size and normalisation."""
        block, head = self.anatomy.blocks[0], self.anatomy.head
        computed = [options for kind, options in self.encoding_options.items() if kind in get_args(EncodingType)]
        position = dict(computed[0]) if computed else {"type": "none"}
        return ModelFacts(
            heads=self.geometry.heads,
            image=self.info.image,
            grid=self.geometry.grid,
            prefix_rows=self.prefix_rows,
            pool=head.options.get("pool"),
            norm=cast(Any, block.norm.type) if block.norm.type in ("layernorm", "rmsnorm") else None,
            eps=block.norm.options.get("eps"),
            gelu="none" if block.mlp.type == "swiglu" else block.mlp.options.get("approximate"),
            position=Encoding(type=position.pop("type"), options=position),
            mean=self.mean,
            std=self.std,
            labels=self.info.labels or None,
        )

    def build(self) -> ViT:
        """Return the model with arbitrary values; torch's generator is not advanced."""
        with torch.random.fork_rng(devices=[]):
            return ViT(self.info, **self.options)

    def build_without_values(self) -> ViT:
        """Return the model without values."""
        with torch.device("meta"):
            return ViT(self.info, **self.options)


_GRID_HINT = "give it as --source-grid HxW"
GELUS = {"none": "computed exactly", "tanh": "approximated by tanh", "sigmoid": "approximated by a sigmoid"}
_STAGE = re.compile(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.\d+\.conv1\.weight")
_CANONICAL = re.compile(
    r"(cls_token|dist_token|reg_token|pos_embed|position\.(freqs|relative_position_bias_table)|(attn|seq)_pool\..+)|"
    r"(patch_embed\.(proj|norm)|norm_pre|norm|fc_norm|head|head_dist|pre_logits\.fc)\.(weight|bias)|"
    r"patch_embed\.backbone\.((stem\.)?(conv|norm)|stages\.\d+\.blocks\.\d+\..+)\.(weight|bias)|"
    r"blocks\.\d+\.((attns|ffns)\.\d+\.)?(norm[12]?|attn\.(qkv|proj|q_norm|k_norm)|mlp\.(fc1|fc2|fc1_g|fc1_x))\."
    r"(weight|bias)|"
    r"blocks\.\d+\.((attns|ffns)\.\d+\.)?ls[12]?\.gamma"
)


@dataclass
class Inference:
    """The parts of a model, one after the other, and a sentence for each assumption on the way."""

    state: State  #: tensors under canonical names
    facts: ModelFacts  #: facts that are stated beside them
    usual: ModelFacts  #: facts to assume for unknown ones, by the convention of a format
    title: str  #: the format's library
    unknown: Collection[str]  #: names in the file that have no canonical one
    assumed: list[str] = field(default_factory=list)

    def architecture(self) -> Architecture:
        """Return the model that the tensors belong to; a head that is not among them has one output.

        Raises:
            WeightsError: if they belong to no Vision Transformer, or a fact without a default is unknown.
        """
        state, facts = self.state, self.facts
        dim, channels, patch_size, patch, pixels = self._infer_patch_embedding()
        depth = count_blocks(state)
        if depth is None:
            raise WeightsError(self._missing_message("blocks.0.norm1.weight is missing"))
        prefix = tuple(
            token for token, name in (("class", "cls_token"), ("distillation", "dist_token")) if name in state
        )
        registers = self._shape_with_ndim("reg_token", 3)[1] if "reg_token" in state else 0
        # All blocks have the parts of the first one.
        branches = {match[1] for name in state if (match := re.match(r"blocks\.0\.attns\.(\d+)\.", name))}
        block: Any = "prenorm"
        first, second, norm1, scale = "blocks.0.", "blocks.0.", "norm1", "ls1"
        if branches:
            block = {"type": "parallel_things", "number": len(branches)}
            first, second, norm1, scale = "blocks.0.attns.0.", "blocks.0.ffns.0.", "norm", "ls"
        heads = self._infer_number_of_heads(dim, f"{first}attn.q_norm.weight")
        grid, rows = self._infer_grid_and_prefix_rows(len(prefix) + registers, pixels)
        final = "fc_norm" if "fc_norm.weight" in state else "norm"
        head, outputs = self._infer_head(prefix, registers, final)
        eps = self._get_or_assume("eps", "norms of eps {:g}, the default of " + self.title)
        self._shape_with_ndim(f"{first}{norm1}.weight", 1)
        norm = self._infer_norm(first + norm1, eps, facts.norm)
        if norm["type"] == "rmsnorm" and facts.norm is None:
            self.assumed.append("norms without a shift are RMSNorm, and subtract no mean")
        attention = {
            "type": "auto",
            "qkv_bias": f"{first}attn.qkv.bias" in state,
            "proj_bias": f"{first}attn.proj.bias" in state,
            "qk_norm": self._infer_norm(f"{first}attn.q_norm", eps),
        }
        options = {
            "patch_size": patch_size,
            "dim": dim,
            "depth": depth,
            "heads": heads,
            "prefix": prefix,
            "registers": registers,
            "patch": patch,
            "position": self._infer_position(rows),
            "block": block,
            "attention": attention,
            "mlp": self._infer_mlp(f"{second}mlp", dim),
            "norm": norm,
            "layer_scale": 1e-5 if f"{first}{scale}.gamma" in state else None,
            "stem_norm": self._infer_norm("norm_pre", eps),
            "final_norm": self._infer_norm(final, eps),
            "final_norm_at": "pooled" if final == "fc_norm" else "tokens",
            "head": head,
        }
        image = (grid[0] * pixels[0], grid[1] * pixels[1])
        labels = facts.labels if facts.labels is not None and len(facts.labels) == outputs else ()
        info = DataInfo(image=image, channels=channels, classes=outputs, labels=labels)
        mean, std, assumed = choose_normalisation(facts, self.usual, self.title, channels)
        return Architecture(options, info, mean, std, (*self.assumed, *assumed))

    def _shape_with_ndim(self, name: str, ndim: int) -> tuple[int, ...]:
        value = self.state.get(name)
        if value is None:
            raise WeightsError(self._missing_message(f"{name} is missing"))
        if value.ndim != ndim:
            raise WeightsError(
                f"{name} has shape {tuple(value.shape)}; expected {ndim} axes. Use a checkpoint of a Vision "
                "Transformer."
            )
        return tuple(value.shape)

    def _missing_message(self, fault: str) -> str:
        """Return the message for ``fault``, preceded by tensors that no model of vitlab has."""
        foreign = sorted({*self.unknown, *(name for name in self.state if not _CANONICAL.fullmatch(name))})
        if not foreign:
            return f"the checkpoint is incomplete: {fault}; use a complete one"
        names = f"{list_some(foreign)} {'is' if len(foreign) == 1 else 'are'} unknown"
        return f"these are not the weights of a supported Vision Transformer: {names}, and {fault}; use other weights"

    def _get_or_assume(self, name: str, sentence: str) -> Any:
        """Return the fact ``name``; the usual one is recorded as an assumption, in the words of ``sentence``."""
        value = getattr(self.facts, name)
        if value is None:
            value = getattr(self.usual, name)
            if value is not None:
                self.assumed.append(sentence.format(value))
        return value

    def _infer_patch_embedding(self) -> tuple[int, int, Pair, Options, Pair]:
        """Return width, channels, patch size, options of the patch embedding, and the pixels of a patch."""
        dim, channels, height, width = self._shape_with_ndim("patch_embed.proj.weight", 4)
        stems = (f"patch_embed.backbone.{at}conv.weight" for at in ("stem.", ""))
        stem = next((name for name in stems if name in self.state), None)
        if stem is None:
            if any(name.startswith("patch_embed.backbone.") for name in self.state):
                raise WeightsError(self._missing_message("patch_embed.backbone.conv.weight is missing"))
            norm = self._infer_norm("patch_embed.norm", self.facts.eps or self.usual.eps or 1e-6)
            patch: Options = {"type": "linear", "bias": "patch_embed.proj.bias" in self.state, "norm": norm}
            return dim, channels, (height, width), patch, (height, width)
        stages = Counter(match[1] for match in map(_STAGE.fullmatch, self.state) if match)  # one name a block
        layers = [stages[stage] for stage in sorted(stages)]
        out, channels, *_ = self._shape_with_ndim(stem, 4)
        stride = 4 * 2 ** max(len(layers) - 1, 0)
        patch = {"type": "resnet", "layers": layers, "width_factor": out / 64}
        return dim, channels, (height, width), patch, (height * stride, width * stride)

    def _infer_number_of_heads(self, dim: int, q_norm: str) -> int:
        """Return the number of heads: a known fact, as a tensor shows, or as in the published model of this width."""
        if (heads := self.facts.heads) is not None:
            if dim % heads:
                raise WeightsError(
                    f"{heads} heads do not divide the width of {dim} channels; give a divisor of it (--heads, or heads "
                    "of a teacher in a study)"
                )
            return heads
        if RELATIVE in self.state:
            return self._shape_with_ndim(RELATIVE, 3)[2]
        if q_norm in self.state:
            (head_dim,) = self._shape_with_ndim(q_norm, 1)
            if head_dim and dim % head_dim == 0:
                return dim // head_dim
        for name in PUBLISHED:
            if SIZES[name].dim == dim:
                self.assumed.append(f"{SIZES[name].heads} heads, as ViT-{name} has at this width")
                return SIZES[name].heads
        if dim % HEAD_DIM:
            raise WeightsError(
                f"no tensor shows the number of heads, and a width of {dim} is neither that of a published size nor a "
                f"multiple of {HEAD_DIM}; give it (--heads, or heads of a teacher in a study; init_from takes the "
                "model's)"
            )
        self.assumed.append(f"{dim // HEAD_DIM} heads, of {HEAD_DIM} channels each")
        return dim // HEAD_DIM

    def _infer_grid_and_prefix_rows(self, prefix: int, pixels: Pair) -> tuple[Pair, str]:
        """Return the grid of patches, and whether prefix tokens have rows of positions (``own`` or ``none``).

        By default the grid is assumed to be square and prefix tokens to have rows; weights for which only one of the
        two can hold are refused.
        """
        facts = self.facts
        requested = compute_requested_grid(facts.image, facts.grid, pixels)
        if "pos_embed" not in self.state:
            if requested is not None:
                return requested, facts.prefix_rows or "own"
            if RELATIVE in self.state:
                side = (math.isqrt(self._shape_with_ndim(RELATIVE, 3)[1] - (3 if prefix else 0)) + 1) // 2
                self.assumed.append(f"a square grid, {side}x{side}")
                return (side, side), facts.prefix_rows or "own"
            if self.unknown:
                raise WeightsError(self._missing_message("pos_embed is missing"))
            raise WeightsError(f"these weights have no learned positions, so nothing shows their grid; {_GRID_HINT}")
        tables, rows, _ = self._shape_with_ndim("pos_embed", 3)
        if tables != 1:
            raise WeightsError(
                f"pos_embed holds {tables} tables of positions (its first dimension), and vitlab supports one; use "
                "other weights"
            )
        kinds = [facts.prefix_rows] if facts.prefix_rows else ["own", "none"] if prefix else ["own"]
        patches = {kind: rows - (prefix if kind == "own" else 0) for kind in kinds}
        if requested is not None:
            for kind, count in patches.items():
                if count == requested[0] * requested[1]:
                    return requested, kind
            raise WeightsError(
                f"pos_embed has {rows} rows; a grid of {format_sides(requested)} patches has "
                f"{requested[0] * requested[1]}, plus {prefix} if the tokens before the patches have rows. Correct the "
                "grid or the image size that is given for these weights (--source-grid, or config.json)."
            )
        table = f"the {rows} rows of pos_embed, with {prefix} token{'' if prefix == 1 else 's'} before the patches,"
        square = {
            kind: side for kind, count in patches.items() if count > 0 and (side := math.isqrt(count)) ** 2 == count
        }
        if len(square) != 1:
            sides = " or ".join(f"{side}x{side}" for side in square.values())
            raise WeightsError(
                f"{table} {f'may be a grid of {sides}' if square else 'are not a square grid'}; {_GRID_HINT}"
            )
        kind, side = square.popitem()
        with_rows = patches.get("own", 0) if kind == "none" else 0
        # Of the other grids with several rows, the one closest to a square.
        for other in range(math.isqrt(max(with_rows, 0)), 1, -1):
            if with_rows % other == 0:
                raise WeightsError(
                    f"{table} may be a grid of {side}x{side} without rows for these tokens, or one with them, such as "
                    f"{other}x{with_rows // other}; {_GRID_HINT}"
                )
        which = "rows" if kind == "own" else "no rows"
        own = "" if not prefix or facts.prefix_rows else f", and {which} of positions for the tokens before it"
        self.assumed.append(f"a square grid, {side}x{side}{own}")
        return (side, side), kind

    def _infer_position(self, rows: str) -> Any:
        """Return the options of the position encoding; an encoding other than learned rows may leave no tensor."""
        learned = "pos_embed" in self.state
        encoding = self.facts.position or self.usual.position
        if encoding is None:
            kind = "no rotary positions" if learned else "no positions, neither rotary nor computed ones"
            self.assumed.append(f"{kind}, and norms before attention and MLP, which no tensor would show")
        elif self.facts.position is None and encoding.type != "none":
            self.assumed.append(f"positions are {self.title}'s {encoding.type}, which no tensor shows")
        parts: list[Options] = [{"type": "learned", "prefix_rows": rows}] if learned else []
        if RELATIVE in self.state:
            shared = len(self.state[RELATIVE]) < (count_blocks(self.state) or 1)
            parts.append({"type": "relative_bias", "where": "every_layer_shared" if shared else "every_layer"})
        if encoding is not None and encoding.type != "none":
            parts.append({"type": encoding.type, **encoding.options})
        return parts or "none"

    def _infer_norm(self, name: str, eps: float, kind: str | None = None) -> Options:
        """Return the options of the norm ``name``, if any; without a shift it is RMSNorm unless its kind is known."""
        if f"{name}.weight" not in self.state:
            return {"type": "none"}
        kind = kind or ("layernorm" if f"{name}.bias" in self.state else "rmsnorm")
        return {"type": kind, "eps": eps}

    def _infer_mlp(self, name: str, dim: int) -> Options:
        gated = f"{name}.fc1_g.weight" in self.state
        hidden, _ = self._shape_with_ndim(f"{name}.{'fc1_g' if gated else 'fc1'}.weight", 2)
        bias: Options = {} if f"{name}.fc2.bias" in self.state else {"bias": False}
        if gated:
            self._get_or_assume("gelu", "the gate of the MLP is a SiLU, the first half where one matrix holds both")
            return {"type": "swiglu", "ratio": exact_ratio(hidden, dim), **bias}
        sentence = GELUS.get(str(self.usual.gelu), "")
        gelu = self._get_or_assume("gelu", f"GELU {sentence}, as is the custom of {self.title}")
        return {"type": "gelu", "ratio": exact_ratio(hidden, dim), "approximate": gelu, **bias}

    def _infer_head(self, prefix: tuple[str, ...], registers: int, final: str) -> tuple[Options, int]:
        state = self.state
        has_head = "head.weight" in state
        outputs = self._shape_with_ndim("head.weight", 2)[0] if has_head else 1
        if "head_dist.weight" in state:
            return {"type": "distilled"}, outputs
        stated = self.facts.pool
        if stated == "map" and "attn_pool.latent" not in state:
            stated = None  # a head that pools by attention has been left out
        before = prefix or registers
        options: Options = {"type": "linear", "pool": stated}
        sentence = ""
        if "attn_pool.latent" in state:
            hidden, dim = self._shape_with_ndim("attn_pool.mlp.fc1.weight", 2)
            options |= {"pool": "map", "approximate": self.facts.gelu or self.usual.gelu}
            if hidden != 4 * dim:
                options["ratio"] = exact_ratio(hidden, dim)
            sentence = "attention pooling reads the patches alone" if before else ""
        elif stated is None and (final == "fc_norm" or "class" not in prefix):
            options["pool"] = "gap"
            sentence = f"the head reads the mean of the patches{', without the tokens before them' if before else ''}"
        elif stated is None:
            options["pool"] = "cls"
            sentence = "the head reads the class token"
        if stated is None and sentence and has_head:
            self.assumed.append(sentence)
        if "pre_logits.fc.weight" in state:
            options |= {"type": "mlp", "representation_size": self._shape_with_ndim("pre_logits.fc.weight", 2)[0]}
        return options, outputs


def exact_ratio(hidden: int, dim: int) -> float:
    """Return a ratio of an MLP that gives exactly this hidden width, which is rounded down."""
    return hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim


def count_blocks(state: State) -> int | None:
    """Return the number of blocks in a canonical state; None if it has none."""
    blocks = [int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name))]
    return max(blocks) + 1 if blocks else None


def choose_normalisation(
    facts: ModelFacts, usual: ModelFacts, title: str, channels: int
) -> tuple[Values, Values, tuple[str, ...]]:
    """Return mean and standard deviation per channel, and a sentence if they are assumed.

    The usual values of RGB do not apply to other numbers of channels.
    """
    if facts.mean is not None and facts.std is not None:
        sizes = {len(facts.mean), len(facts.std)}
        if sizes == {channels}:
            return facts.mean, facts.std, ()
        if sizes == {1}:
            return facts.mean * channels, facts.std * channels, ()
    if facts.mean is None and usual.mean is not None and usual.std is not None and len(usual.mean) == channels:
        whose = "DeiT and DINO" if usual.mean == IMAGENET.mean and title != "torchvision" else title
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (usual.mean, usual.std))
        sentence = f"pixels normalised by mean {mean} and std {std}, as is the custom of {whose}"
        return usual.mean, usual.std, (sentence,)
    half = (0.5,) * channels
    return half, half, (f"pixels of {channels} channels normalised by mean 0.5 and std 0.5",)


def format_sides(value: Any) -> str:
    """Return a value as text; the sides of a pair are separated by ``x``."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def compute_requested_grid(image: Pair | None, grid: Pair | None, patch_pixels: Pair) -> Pair | None:
    """Return the grid of patches of an image size, or the grid that is given; None if neither is given.

    Patches that do not divide the image, and a grid that contradicts its size, are refused.
    """
    if image is None:
        return grid
    if image[0] % patch_pixels[0] or image[1] % patch_pixels[1]:
        raise WeightsError(
            f"an image of {format_sides(image)} pixels is not a multiple of the patch size "
            f"{format_sides(patch_pixels)}; give a size that is"
        )
    requested = (image[0] // patch_pixels[0], image[1] // patch_pixels[1])
    if grid not in (None, requested):
        raise WeightsError(
            f"images of {format_sides(image)} have a grid of {format_sides(requested)}, not of {format_sides(grid)}; "
            "give one of the two"
        )
    return requested
