"""The Vision Transformer, assembled from components.  Reference: arXiv:2010.11929, figure 1.

B batch, C channels, H and W pixels, N patches, T tokens (class, distillation, registers, then the patches row by row),
D width.

Modules are named as in timm, so that the canonical checkpoint is timm's; the few that differ (the head, the position,
attentions that keep their matrices apart) are translated by ``to_canonical`` and ``from_canonical``.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from vitlab.components.attention import Attention
from vitlab.components.base import Dropout, Options, PatchDrop, Positive, Probability, set_dropout_ids
from vitlab.components.block import Block, Place
from vitlab.components.head import Head
from vitlab.components.init import Init, Kind, parameters_with_fan_in, seeded
from vitlab.components.norm import NormChoice
from vitlab.components.position import Position
from vitlab.errors import OptionError
from vitlab.geometry import DataInfo, Geometry, Work
from vitlab.models.contract import Model, NewState, State, model
from vitlab.models.vit_parts import (
    Anatomy,
    AttentionChoice,
    BlockChoice,
    BlockParts,
    Dimension,
    FinalNormAt,
    MLPChoice,
    SizeName,
    Span,
    Token,
    fill_in_size,
)
from vitlab.registry import Pick, ResolvedChoice, Unhashed, import_optional, slot
from vitlab.spec import Choice

TOKENS = {"class": "cls_token", "distillation": "dist_token", "register": "reg_token"}
"""Tokens before the patches, and the parameter of each."""


@model.register("vit")
class ViT(Model):
    """The Vision Transformer, with every part a choice.  Reference: arXiv:2010.11929.

    The defaults are ViT-Ti/16.  Differs from the paper in nothing that is not an option.

    Args:
        size: a named size, shorthand for dim, depth, heads and the ratio of the MLP; given beside it, these win.
        patch_size: pixels, one number or height and width.
        dim: width of the tokens; by default the size's, and 192 without one.
        depth: number of blocks; by default the size's, and 12 without one.
        heads: heads of attention; by default the size's, and 3 without one.
        prefix: tokens before the patches: class, distillation.
        registers: further tokens after these that nothing reads (arXiv:2309.16588).
        patch: the map from pixels to patch tokens.
        position: how tokens know where they are.
        block: how attention and the MLP are joined, in every block.
        attention: the attention of every block.
        mlp: the MLP of every block.
        norm: the norms of every block.
        blocks: other choices for some of the blocks, ``{"0-3": {attention: split}}``.
        layer_scale: the value layer scale starts from; none without one.
        drop: dropout after the positions were added.
        patch_drop: share of the patches that each image loses in training, after the positions were added
            (arXiv:2208.07220); evaluation keeps all.
        drop_path: stochastic depth (arXiv:1603.09382) of the last block; it grows linearly from 0 at the first.
        stem_norm: a norm before the first block, as in CLIP (arXiv:2103.00020), whose patches then have no bias.
        final_norm: the norm after the last block.
        final_norm_at: on all tokens, as in the paper, or on what the head has pooled, as timm does for means.
        head: the map from tokens to predictions.
        init: the scheme of initial values.
        parametrization: with ``mup``, initial values, rates of Adam and the scale of attention depend on dim such that
            the best learning rate should not (arXiv:2203.03466).
        base_width: dim at which ``mup`` equals ``standard``.

    Raises:
        OptionError: for components that do not work together, and what :meth:`Anatomy.of` raises.
        GeometryError: for sizes that do not divide.
    """

    geometry: Geometry
    position: Position
    head: Head

    def __init__(
        self,
        data: DataInfo,
        *,
        size: Annotated[SizeName | None, Unhashed()] = None,
        patch_size: Dimension | tuple[Dimension, Dimension] = 16,
        dim: Dimension | None = None,
        depth: Annotated[int, Field(gt=0, le=1000)] | None = None,
        heads: Dimension | None = None,
        prefix: tuple[Token, ...] = ("class",),
        registers: Annotated[int, Field(ge=0, le=1000)] = 0,
        patch: Annotated[Choice | str, Pick("patch")] = "linear",
        position: Annotated[Choice | str, Pick("position")] = "learned",
        block: BlockChoice = "prenorm",
        attention: AttentionChoice = "auto",
        mlp: MLPChoice = "gelu",
        norm: NormChoice = "layernorm",
        blocks: Mapping[Span, BlockParts] = {},
        layer_scale: Positive | None = None,
        drop: Probability = 0.0,
        patch_drop: Probability = 0.0,
        drop_path: Probability = 0.0,
        stem_norm: NormChoice = "none",
        final_norm: NormChoice = "layernorm",
        final_norm_at: FinalNormAt = "tokens",
        head: Annotated[Choice | str, Pick("head")] = "linear",
        init: Annotated[Choice | str, Pick("init")] = "timm",
        parametrization: Literal["standard", "mup"] = "standard",
        base_width: Dimension = 64,
    ) -> None:
        # The anatomy reads the options by their names, which are thus written in the signature alone.
        options = {name: value for name, value in locals().items() if name not in ("self", "data", "__class__")}
        super().__init__()
        anatomy = ViT.anatomy(data, options)
        if reason := anatomy.incompatibility():
            raise OptionError([((), reason)])
        self.parametrization = parametrization
        g = anatomy.geometry
        self.geometry = g
        self.final_norm_at = final_norm_at
        self.scheme: Init = slot("init").build(init)
        self._parts: dict[str, tuple[ResolvedChoice, tuple[Any, ...]]] = {}

        self.patch_embed = self._build_part("patch_embed", anatomy.patch, g)
        self.cls_token = _create_token(g, "class")
        self.dist_token = _create_token(g, "distillation")
        self.reg_token = _create_token(g, "register")
        self.position = self._build_part("position", anatomy.position, g)
        self.pos_drop = Dropout(drop)
        self.patch_drop = PatchDrop(patch_drop, len(g.prefix))
        self.norm_pre = self._build_part("norm_pre", anatomy.stem_norm, g.dim)
        self.blocks = nn.ModuleList()
        for i, parts in enumerate(anatomy.blocks):
            place = Place(g, i, layer_scale, drop_path * i / max(g.depth - 1, 1), anatomy.receives_values(i))
            built: Block = self._build_part(f"blocks.{i}", parts.block, place)
            for path, role in built.parts.items():
                context = g.dim if role == "norm" else g
                built.add_part(path, self._build_part(f"blocks.{i}.{path}", getattr(parts, role), context))
            self.blocks.append(built)
        # As in timm there are two places, and the other one stays empty.
        none = slot("norm").resolve_choice("none")
        self.norm = self._build_part("norm", anatomy.final_norm if final_norm_at == "tokens" else none, g.dim)
        self.fc_norm = self._build_part("fc_norm", anatomy.final_norm if final_norm_at == "pooled" else none, g.dim)
        self.head = self._build_part("head", anatomy.head, g)
        set_dropout_ids(self)
        self.base_width = base_width
        if parametrization == "mup":
            import_optional("mup").scale_attention_logits(self)

    # -- the figure -------------------------------------------------------------------------------------------------

    def forward(self, x_BCHW: Tensor) -> NamedTuple:
        return self.forward_head(self.forward_features(x_BCHW))

    def forward_features(self, x_BCHW: Tensor, position: Position | None = None) -> Tensor:
        """Return the tokens (B, T, D) after the last block and, unless it follows pooling, the last norm.

        ``position``, if given, takes the place of the model's own, such as one that leaves out tokens.
        """
        position = self.position if position is None else position
        x_BTD = self._add_prefix_tokens(self.patch_embed(x_BCHW))
        x_BTD = self.norm_pre(self.patch_drop(self.pos_drop(position.add(x_BTD, 0))))
        passed: dict[str, Any] = {}  # from block to block
        for layer, block in enumerate(cast("Iterable[Block]", self.blocks), 1):
            x_BTD = position.add(x_BTD, layer)
            hints = (position.rotation(layer), position.bias(layer))
            # Other blocks have three arguments, so that a plugin's need not know of this.
            if block.passes:
                x_BTD, passed[block.passes] = block(x_BTD, *hints, passed.get(block.passes))
            else:
                x_BTD = block(x_BTD, *hints)
            x_BTD = position.mix(x_BTD, layer)
        x_BTD, merged = self.norm(x_BTD), passed.get("merged")
        return x_BTD if merged is None else merged.unmerge_rows(x_BTD)

    def forward_head(self, x_BTD: Tensor) -> NamedTuple:
        """Return the predictions from the tokens of :meth:`forward_features`."""
        if self.final_norm_at == "tokens":
            return self.head(x_BTD)
        return self.head.classify(self.fc_norm(self.head.pool(x_BTD)))

    def _add_prefix_tokens(self, x_BND: Tensor) -> Tensor:
        prefix = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        return torch.cat([*(token.expand(x_BND.shape[0], -1, -1) for token in prefix), x_BND], 1)

    def logits_by_head(self, output: Any) -> dict[str, Tensor]:
        return self.head.logits_by_head(output)

    # -- options ----------------------------------------------------------------------------------------------------

    complete = staticmethod(fill_in_size)
    """The options with the numbers of the size filled in; the slot asks for them."""

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Options) -> str | None:
        return cls.anatomy(data, options).incompatibility()

    @classmethod
    def work(cls, data: DataInfo, options: Options) -> Work | None:
        return cls.anatomy(data, options).work()

    @classmethod
    def anatomy(cls, data: DataInfo, options: Options) -> Anatomy:
        """Return the component at every place of the model with these options."""
        return Anatomy.of(data, model.options(cls).model_validate(cls.complete(options)))

    @property
    def component_choices(self) -> Mapping[str, ResolvedChoice]:
        return {path: choice for path, (choice, _) in self._parts.items()}

    def _build_part(self, path: str, choice: ResolvedChoice, *context: Geometry | Place | int) -> Any:
        """Build a component and record its options for :meth:`initialise`."""
        self._parts[path] = (choice, context)
        return slot(choice.slot).build(choice, *context)

    # -- parameters -------------------------------------------------------------------------------------------------

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | (set(TOKENS.values()) & dict(self.named_parameters()).keys())

    def rate_factors(self) -> dict[str, float]:
        return import_optional("mup").rate_factors(self) if self.parametrization == "mup" else {}

    def layer_of(self, name: str) -> int:
        """Return 0 for patches, tokens and positions, from 1 for blocks; the last norm belongs to the last block."""
        first, _, rest = name.partition(".")
        if first == "blocks":
            return int(rest.partition(".")[0]) + 1
        if first == "norm":
            return self.geometry.depth
        if first in ("patch_embed", *TOKENS.values(), "position", "pos_embed", "norm_pre"):
            return 0
        return self.geometry.depth + 1

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the parameters of the scheme by their canonical names, and the other values as components draw them.

        Each component draws with a generator of its own, so that none changes the values of another.
        """
        factors = import_optional("mup").init_factors(self) if self.parametrization == "mup" else {}
        for path, (choice, context) in self._parts.items():
            with seeded(seed, path), torch.device("cpu"):
                fresh = slot(choice.slot).build(choice, *context)
            part = self.get_submodule(path)
            for name, value in [*fresh.named_parameters(), *fresh.named_buffers()]:
                parent, _, last = name.rpartition(".")
                getattr(part.get_submodule(parent), last).copy_(value)
        state = self.to_canonical(self.state_dict())
        for name, (kind, fan_in) in self._parameters_to_draw(state).items():
            x = torch.empty(state[name].shape)
            self.scheme.initialise_parameter(x, name, kind, fan_in, seed)
            state[name] = x * factors[name] if factors else x
        self.load_state_dict(self.from_canonical(state))

    def _parameters_to_draw(self, state: State) -> dict[str, tuple[Kind, int]]:
        """Return the parameters that the scheme draws: canonical name to kind and the layer's number of inputs."""
        parameters: dict[str, tuple[Kind, int]] = dict.fromkeys(TOKENS.values(), ("token", 0))
        parameters |= {self.canonical_name(name): (kind, fan_in) for name, kind, fan_in in parameters_with_fan_in(self)}
        excluded = {
            self.canonical_name(f"{path}.{name}")
            for path, module in self.named_modules()
            for name in getattr(module, "keeps_init", ())
        }
        for path in self.attentions():  # whose own matrices may be parts of the canonical ones
            for layer in (f"{path}.qkv", f"{path}.proj"):
                matrix = state.get(f"{layer}.weight")
                if matrix is not None and matrix.ndim == 2:
                    parameters |= {
                        f"{layer}.weight": ("linear", matrix.shape[1]),
                        f"{layer}.bias": ("linear_bias", matrix.shape[1]),
                    }
        if "pos_embed" in (self.canonical_name(name) for name, _ in self.named_parameters()):
            parameters["pos_embed"] = ("position", 0)
        return {name: how for name, how in parameters.items() if name in state and name not in excluded}

    # -- the canonical checkpoint -----------------------------------------------------------------------------------

    def canonical_name(self, name: str) -> str:
        """Return timm's name of a parameter outside of attention."""
        if name.startswith("position."):
            name = f"position.{self.position.canonical_name(name.removeprefix('position.'))}"
        if name == "position.pos_embed":
            return "pos_embed"
        for own, theirs in self.head.canonical.items():
            if name.startswith(f"head.{own}"):
                return theirs + name.removeprefix(f"head.{own}")
        return name

    def attentions(self) -> dict[str, Attention]:
        """Return the attentions of the blocks by path, such as ``blocks.0.attn``."""
        return {path: one for path, one in self.blocks.named_modules(prefix="blocks") if isinstance(one, Attention)}

    def to_canonical(self, state: State) -> NewState:
        return self._convert_to_or_from_canonical(
            state, {name: self.canonical_name(name) for name in state}, "to_canonical"
        )

    def from_canonical(self, state: State) -> NewState:
        names = {self.canonical_name(name): name for name in self.state_dict()}
        return self._convert_to_or_from_canonical(state, names, "from_canonical")

    def _convert_to_or_from_canonical(
        self, state: State, names: Mapping[str, str], method: Literal["to_canonical", "from_canonical"]
    ) -> NewState:
        """Return a state whose attentions are converted, and whose other entries are renamed."""
        attentions = self.attentions()
        states: dict[str, NewState] = {path: {} for path in attentions}
        converted: NewState = {}
        for name, value in state.items():
            block, _, own_name = name.partition(".attn.")
            if f"{block}.attn" in states:
                states[f"{block}.attn"][own_name] = value
            else:
                converted[names.get(name, name)] = value
        for path, own in states.items():
            other = getattr(attentions[path], method)(own)
            converted |= {f"{path}.{name}": value for name, value in other.items()}
        return converted


def _create_token(g: Geometry, name: str) -> nn.Parameter | None:
    """Return a parameter (1, R, D) for the R tokens of that name, or None if there are none."""
    count = g.prefix.count(name)
    return nn.Parameter(torch.zeros(1, count, g.dim)) if count else None
