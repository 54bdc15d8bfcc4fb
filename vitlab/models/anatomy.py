"""The components of a Vision Transformer by place, and the rules by which they can be combined.

The rules are checked before a model is built, so that an impossible combination is a skip in the plan, not a crash.

A named size, such as ``size: S``, is shorthand for four options, dim, depth, heads and the ratio of the MLP; explicit
options override it.  The patch is not part of it: ViT-S/16 is ``{size: S, patch_size: 16}``.

Reference: arXiv:2010.11929 (B, L, H), arXiv:2012.12877 (Ti, S, and DeiT's, which are of the same sizes),
arXiv:2106.04560 (g, G).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vitlab.components.attention import SOFTMAX, Attention
from vitlab.components.block import Block
from vitlab.components.block.prenorm import PreNorm
from vitlab.components.head import Head
from vitlab.components.norm import NoNorm
from vitlab.components.patch import PatchEmbedding
from vitlab.components.position import Position, choices_of
from vitlab.errors import GeometryError
from vitlab.geometry import DataInfo, Geometry, Work
from vitlab.registry import BUILT_IN, Pick, ResolvedChoice, slot
from vitlab.spec import Choice

Token = Literal["class", "distillation"]
FinalNormAt = Literal["tokens", "pooled"]
LARGEST = 100_000
"""Largest width, number of heads and side of a patch: far above any model, and below what overflows."""

PatchSize = Annotated[int, Field(gt=0, le=LARGEST)]


class BlockParts(BaseModel):
    """The components that replace the model's own in some of the blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block: Annotated[Choice | str, Pick("block")] | None = None  #: form of these blocks
    attention: Annotated[Choice | str, Pick("attention")] | None = None  #: attention of these blocks
    mlp: Annotated[Choice | str, Pick("mlp")] | None = None  #: MLP of these blocks
    norm: Annotated[Choice | str, Pick("norm")] | None = None  #: norm of these blocks


Span = Annotated[str, Field(pattern=r"^\d+(-\d+)?$", coerce_numbers_to_str=True)]
"""One block, ``3``, or the first and the last of several, ``0-3``; blocks count from 0."""


@dataclass(frozen=True)
class BlockChoices:
    """The components of one block."""

    block: ResolvedChoice
    attention: ResolvedChoice
    mlp: ResolvedChoice
    norm: ResolvedChoice


@dataclass(frozen=True)
class Anatomy:
    """The sizes of a model, and the component at each of its places."""

    geometry: Geometry
    task: str  #: of the data
    patch: ResolvedChoice
    position: ResolvedChoice
    head: ResolvedChoice
    stem_norm: ResolvedChoice
    final_norm: ResolvedChoice
    final_norm_at: FinalNormAt
    blocks: tuple[BlockChoices, ...]
    patch_drop: float  #: share of the patches that training leaves out
    reasons: tuple[str, ...]  #: faults of single options

    @classmethod
    def of(cls, data: DataInfo, options: Any) -> Anatomy:
        """Resolve every component and derive the sizes.

        Args:
            data: what the model sees.
            options: validated options of :class:`vitlab.models.vit.ViT`, with the sizes filled in.

        Raises:
            GeometryError: for sizes that do not divide, and blocks that do not exist.
            OptionError: for components that do not exist, or options they do not take.
        """
        patch_size, prefix = options.patch_size, options.prefix
        side = (patch_size, patch_size) if isinstance(patch_size, int) else (patch_size[0], patch_size[1])
        embedding = slot("patch").resolve(options.patch)
        assert issubclass(embedding.component, PatchEmbedding)
        reasons = []
        if list(prefix) not in ([], ["class"], ["distillation"], ["class", "distillation"]):
            listed = ", ".join(prefix)
            reasons.append(f"prefix is class, distillation, both in this order, or neither; found [{listed}]")
        default = BlockChoices(
            slot("block").resolve(options.block),
            slot("attention").resolve(options.attention),
            slot("mlp").resolve(options.mlp),
            slot("norm").resolve(options.norm),
        )
        all_blocks, faults = _by_depth(options.depth, default, options.blocks)
        try:
            geometry = Geometry.of(
                image=data.image,
                channels=data.channels,
                patch=side,
                reduction=embedding.component.reduction_of(embedding.options),
                prefix=(*prefix, *["register"] * options.registers),
                dim=options.dim,
                depth=options.depth,
                heads=options.heads,
                classes=data.classes,
            )
        except GeometryError as error:
            raise GeometryError(*error.faults, *faults) from None
        if faults:
            raise GeometryError(*faults)
        return cls(
            geometry=geometry,
            task=data.task,
            patch=embedding,
            position=slot("position").resolve(options.position),
            head=slot("head").resolve(options.head),
            stem_norm=slot("norm").resolve(options.stem_norm),
            final_norm=slot("norm").resolve(options.final_norm),
            final_norm_at=options.final_norm_at,
            blocks=all_blocks,
            patch_drop=options.patch_drop,
            reasons=tuple(reasons),
        )

    def incompatibility(self) -> str | None:
        """Return the reason why these components cannot be combined, in one sentence; None if they can."""
        for reason in self.reasons:
            return reason
        g, position, head = self.geometry, self.position, self.head
        of_blocks = [part for block in self.blocks for part in (block.block, block.attention, block.mlp)]
        for part in [self.patch, position, head, *of_blocks]:
            reason = part.component.incompatibility(g, part.options)  # type: ignore[attr-defined]
            if reason:
                return str(reason)
        assert issubclass(head.component, Head)
        for encoding, (index, block) in itertools.product(choices_of(position), enumerate(self.blocks)):
            attention = block.attention.component
            assert issubclass(encoding.component, Position) and issubclass(attention, Attention)
            if encoding.component.needs_bias and not attention.takes_bias:
                return (
                    f"position '{encoding.type}' adds a bias to the logits of attention, and attention "
                    f"'{block.attention.type}' (block {index}) does not support that; change one of the two"
                )
            if encoding.component.needs_rotation and not attention.takes_rotation:
                return (
                    f"position '{encoding.type}' rotates queries and keys, and attention "
                    f"'{block.attention.type}' (block {index}) does not support that; change one of the two"
                )
            assert issubclass(block.block.component, Block)
            if block.block.component.passes == "values" and not attention.mixes_values:
                return (
                    f"block '{block.block.type}' changes the values of attention, and attention "
                    f"'{block.attention.type}' (block {index}) does not support that; change one of the two"
                )
        if merging := self._merging_incompatibility():
            return merging
        if head.component.task != self.task:
            return (
                f"head '{head.type}' is for {head.component.task}, and the task of the data is {self.task}; use "
                "another head"
            )
        if self.patch_drop and (dropping := self._patch_drop_incompatibility()):
            return dropping
        if self.final_norm_at == "pooled" and head.component.forward is not Head.forward:
            return (
                f"head '{head.type}' does not pool apart from classifying, so final_norm_at cannot be pooled; write "
                "final_norm_at: tokens"
            )
        return None

    def _patch_drop_incompatibility(self) -> str | None:
        """Return the part that cannot be combined with dropped patches, in one sentence; None if there is none."""
        head = self.head
        assert issubclass(head.component, Head)
        for encoding in choices_of(self.position):
            assert issubclass(encoding.component, Position)
            if encoding.component.acts_in_blocks(encoding.options):
                return (
                    f"position '{encoding.type}' places every patch in the blocks, and patch_drop {self.patch_drop:g} "
                    "removes some before them; use a position that is added at the stem, or patch_drop: 0"
                )
        if head.component.task == "segmentation":
            return (
                f"head '{head.type}' reads every patch, and patch_drop {self.patch_drop:g} removes some; use another "
                "head, or patch_drop: 0"
            )
        if head.component.forward is not Head.forward and not head.component.reads:
            return (
                f"head '{head.type}' has a forward of its own, which may need every patch, and patch_drop "
                f"{self.patch_drop:g} removes some; declare the prefix tokens that it reads, use another head, or "
                "patch_drop: 0"
            )
        return None

    def _merging_incompatibility(self) -> str | None:
        """Return the part that cannot be combined with merged tokens, in one sentence; None if there is none."""
        merging: str | None = None
        for index, block in enumerate(self.blocks):
            component, attention = block.block.component, block.attention.component
            assert issubclass(component, Block) and issubclass(attention, Attention)
            if component.passes == "merged":
                merging = block.block.type
                if not (attention.mixes_values and attention.counts_keys):
                    return (
                        f"block '{merging}' reads the keys of attention and weighs them by the number of merged "
                        f"tokens, and attention '{block.attention.type}' (block {index}) does not support that; change "
                        "one of the two"
                    )
            elif merging is not None:
                return (
                    f"block {index} is '{block.block.type}', which does not weigh the tokens that '{merging}' has "
                    f"merged before it; use {{type: {merging}, tokens: 0}} there, which merges none"
                )
        for encoding in choices_of(self.position) if merging is not None else ():
            assert issubclass(encoding.component, Position)
            if encoding.component.acts_in_blocks(encoding.options):
                return (
                    f"position '{encoding.type}' places every patch in the blocks, and block '{merging}' merges some "
                    "there; use a position that is added at the stem, or another block"
                )
        return None

    def receives_values(self, index: int) -> bool:
        """Return True if a block before ``index`` passes its values on."""
        return any(block.block.component.passes == "values" for block in self.blocks[:index])  # type: ignore[attr-defined]

    def work(self) -> Work:
        """Return the work per image, by which an engine is chosen."""
        g = self.geometry
        plain = self.patch_drop == 0 and all(
            block.block.component is PreNorm
            and block.attention.component in SOFTMAX
            and all(block.attention.options[name].component is NoNorm for name in ("qk_norm", "norm"))
            and block.attention.options["drop"] == 0
            for block in self.blocks
        )
        return Work(g.tokens * g.dim, g.tokens**2 * g.head_dim if plain else None)


def _by_depth(
    depth: int, default: BlockChoices, blocks: Mapping[str, Any]
) -> tuple[tuple[BlockChoices, ...], list[tuple[tuple[str, ...], str]]]:
    """Return the components of every block, the default ones with the changes of ``blocks``, and faults in these."""
    choices: list[dict[str, ResolvedChoice]] = [vars(default).copy() for _ in range(depth)]
    spans: dict[int, str] = {}
    faults: list[tuple[tuple[str, ...], str]] = []
    for span, parts in blocks.items():
        first, _, last = span.partition("-")
        indices = range(int(first), int(last or first) + 1)
        if not indices or indices[-1] >= depth:
            faults.append((("blocks", "depth"), f"blocks '{span}' do not exist; the model has blocks 0 to {depth - 1}"))
            continue
        own = BlockParts.model_validate(parts)
        changes = {name: getattr(own, name) for name in BlockParts.model_fields if getattr(own, name) is not None}
        for index in indices:
            if index in spans:
                faults.append((("blocks",), f"block {index} is in '{spans[index]}' and in '{span}'; remove one"))
                break
            spans[index] = span
            choices[index] |= changes
    return tuple(BlockChoices(**parts) for parts in choices), faults


@dataclass(frozen=True)
class Size:
    """Width, number of blocks, heads per block, hidden width of the MLP over the width."""

    dim: int
    depth: int
    heads: int
    ratio: float = 4.0


SizeName = Literal["pico", "nano", "micro", "mini", "Ti", "S", "M", "B", "L", "H", "g", "G"]

SIZES: dict[str, Size] = {
    # For small images on a laptop; 0.03, 0.2, 0.8 and 2.7 million parameters in the blocks.
    "pico": Size(32, 2, 2),
    "nano": Size(64, 4, 4),
    "micro": Size(128, 4, 4),
    "mini": Size(192, 6, 3),
    # Published sizes; Ti, S and B are DeiT's too.
    "Ti": Size(192, 12, 3),
    "S": Size(384, 12, 6),
    "M": Size(512, 12, 8),
    "B": Size(768, 12, 12),
    "L": Size(1024, 24, 16),
    "H": Size(1280, 32, 16),
    "g": Size(1408, 40, 16, 48 / 11),
    "G": Size(1664, 48, 16, 64 / 13),
}
DEFAULT_SIZE = "Ti"


def expand_size(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model with the numbers of its size filled in; explicit options are unchanged.

    The ratio applies to the plain MLP, ``gelu``; others keep their own.
    """
    name = options.get("size") or DEFAULT_SIZE
    if not isinstance(name, str) or name not in SIZES:
        return dict(options)  # validation reports it, with the names of the sizes
    size = SIZES[name]
    full = dict(options)
    for number in ("dim", "depth", "heads"):
        if full.get(number) is None:
            full[number] = getattr(size, number)
    try:
        mlp = Choice.of(full["mlp"] if "mlp" in full else slot("mlp").qualify_builtin("gelu"))
    except ValueError:
        return full  # validation reports it
    if mlp.type in ("gelu", f"{BUILT_IN}:gelu"):
        full["mlp"] = {"type": mlp.type, "ratio": size.ratio, **mlp.options}
    return full
