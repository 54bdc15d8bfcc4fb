"""The components of a Vision Transformer by place, and the rules by which they can be combined.

The rules are checked before a model is built, so that an impossible combination is a skip in the plan, not a crash.

A named size, such as ``size: S``, is shorthand for four options, dim, depth, heads and the ratio of the MLP; explicit
options override it.  The patch is not part of it: ViT-S/16 is ``{size: S, patch_size: 16}``.

Reference: arXiv:2010.11929 (B, L, H), arXiv:2012.12877 (Ti, S, and DeiT's, which are of the same sizes),
arXiv:2106.04560 (g, G).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from vitlab.components.attention.softmax import SOFTMAX
from vitlab.components.base import Options
from vitlab.components.block.residual import PreNorm
from vitlab.components.head import Head
from vitlab.components.norm import NoNorm, NormChoice
from vitlab.components.position import encodings_of_choice
from vitlab.errors import Fault, GeometryError
from vitlab.geometry import DataInfo, Geometry, Work
from vitlab.registry import BUILT_IN, Pick, ResolvedChoice, import_optional, slot
from vitlab.spec import Choice
from vitlab.spec.choice import Frozen

Token = Literal["class", "distillation"]
FinalNormAt = Literal["tokens", "pooled"]
LARGEST = 100_000
"""Largest width, number of heads and side of a patch: far above any model, and below what overflows."""

Dimension = Annotated[int, Field(gt=0, le=LARGEST)]


BlockChoice = Annotated[Choice | str, Pick("block")]
AttentionChoice = Annotated[Choice | str, Pick("attention")]
MLPChoice = Annotated[Choice | str, Pick("mlp")]


class BlockParts(Frozen):
    """The components that replace the model's own in some of the blocks."""

    block: BlockChoice | None = None
    """Form of these blocks."""
    attention: AttentionChoice | None = None
    """Attention of these blocks."""
    mlp: MLPChoice | None = None
    """MLP of these blocks."""
    norm: NormChoice | None = None
    """Norm of these blocks."""


Span = Annotated[str, Field(pattern=r"^\d+(-\d+)?$", coerce_numbers_to_str=True)]
"""One block, ``3``, or the first and the last of several, ``0-3``; blocks count from 0."""


class BlockChoices(NamedTuple):
    """The components of one block."""

    block: ResolvedChoice
    attention: ResolvedChoice
    mlp: ResolvedChoice
    norm: ResolvedChoice


@dataclass(frozen=True)
class Anatomy:
    """The sizes of a model, and the component at each of its places."""

    geometry: Geometry
    task: str  #: of the head: ``segmentation``, or ``classification`` also where an image has several classes
    patch: ResolvedChoice
    position: ResolvedChoice
    head: ResolvedChoice
    stem_norm: ResolvedChoice
    final_norm: ResolvedChoice
    final_norm_at: FinalNormAt
    blocks: tuple[BlockChoices, ...]
    patch_drop: float  #: share of the patches that training leaves out
    mup_base_width: int | None  #: of maximal update parametrization; None for the standard one

    @classmethod
    def of(cls, data: DataInfo, options: Any) -> Anatomy:
        """Collect the components and derive the sizes.

        Args:
            data: what the model sees.
            options: validated options of :class:`vitlab.models.vit.ViT`, with the sizes filled in.

        Raises:
            GeometryError: for sizes that do not divide, and blocks that do not exist.
        """
        blocks, faults = _choose_by_block(options)
        patch_size = options.patch_size
        try:
            geometry = Geometry(
                image=data.image,
                channels=data.channels,
                patch=(patch_size, patch_size) if isinstance(patch_size, int) else patch_size,
                reduction=options.patch.component.reduction_of(options.patch.options),
                prefix=(*options.prefix, *["register"] * options.registers),
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
            task="segmentation" if data.task == "segmentation" else "classification",
            patch=options.patch,
            position=options.position,
            head=options.head,
            stem_norm=options.stem_norm,
            final_norm=options.final_norm,
            final_norm_at=options.final_norm_at,
            blocks=blocks,
            patch_drop=options.patch_drop,
            mup_base_width=options.base_width if options.parametrization == "mup" else None,
        )

    def incompatibility(self) -> str | None:
        """Return the reason why these components cannot be combined, in one sentence; None if they can."""
        # Later checks rely on earlier ones, so they are made one by one.
        return next(self._iter_incompatibilities(), None)

    def _iter_incompatibilities(self) -> Iterator[str]:
        g, head = self.geometry, self.head
        prefix = [token for token in g.prefix if token != "register"]
        if prefix not in ([], ["class"], ["distillation"], ["class", "distillation"]):
            yield f"prefix is class, distillation, both in this order, or neither; found [{', '.join(prefix)}]"
        of_blocks = [part for block in self.blocks for part in (block.block, block.attention, block.mlp)]
        for part in (self.patch, self.position, head, *of_blocks):
            if reason := part.component.incompatibility(g, part.options):
                yield reason
        yield from self._attention_faults()
        yield from self._removed_patch_faults()
        if head.component.task != self.task:
            yield (
                f"head '{head.type}' is for {head.component.task}, and the task of the data is {self.task}; use "
                "another head"
            )
        if self.final_norm_at == "pooled" and head.component.forward is not Head.forward:
            yield (
                f"head '{head.type}' does not pool apart from classifying, so final_norm_at cannot be pooled; write "
                "final_norm_at: tokens"
            )
        if self.mup_base_width is not None and (reason := import_optional("mup").incompatibility(self)):
            yield reason

    def _attention_faults(self) -> Iterator[str]:
        """Yield what positions and blocks need of an attention that does not have it."""
        for index, (block, attention, *_) in enumerate(self.blocks):
            end = f"attention '{attention.type}' (block {index}) does not support that; change one of the two"
            can = attention.component
            for position in encodings_of_choice(self.position):
                if position.component.overrides("bias") and not can.takes_bias:
                    yield f"position '{position.type}' adds a bias to the logits of attention, and {end}"
                if position.component.overrides("rotation") and not can.takes_rotation:
                    yield f"position '{position.type}' rotates queries and keys, and {end}"
            if block.component.passes == "values" and not can.mixes_values:
                yield f"block '{block.type}' changes the values of attention, and {end}"
            if block.component.passes == "merged" and not (can.mixes_values and can.counts_keys):
                yield (
                    f"block '{block.type}' reads the keys of attention and weighs them by the number of merged tokens, "
                    f"and {end}"
                )

    def _removed_patch_faults(self) -> Iterator[str]:
        """Yield the parts that need patches which were dropped, or merged with others, before them."""
        head, causes = self.head, []
        if self.patch_drop:
            causes.append((f"patch_drop {self.patch_drop:g} removes some before them", "patch_drop: 0"))
        merging: str | None = None
        for index, block in enumerate(self.blocks):
            if block.block.component.passes == "merged":
                merging = block.block.type
            elif merging is not None:
                yield (
                    f"block {index} is '{block.block.type}', which does not weigh the tokens that '{merging}' has "
                    f"merged before it; use {{type: {merging}, tokens: 0}} there, which merges none"
                )
        if merging is not None:
            causes.append((f"block '{merging}' merges some there", "another block"))
        for position in encodings_of_choice(self.position):
            if position.component.acts_in_blocks(position.options):
                for cause, remedy in causes:
                    yield (
                        f"position '{position.type}' places every patch in the blocks, and {cause}; use a position "
                        f"that is added at the stem, or {remedy}"
                    )
        if not self.patch_drop:
            return
        if head.component.task == "segmentation":
            yield (
                f"head '{head.type}' reads every patch, and patch_drop {self.patch_drop:g} removes some; use another "
                "head, or patch_drop: 0"
            )
        if head.component.forward is not Head.forward and not head.component.reads:
            yield (
                f"head '{head.type}' has a forward of its own, which may need every patch, and patch_drop "
                f"{self.patch_drop:g} removes some; declare the prefix tokens that it reads, use another head, or "
                "patch_drop: 0"
            )

    def receives_values(self, index: int) -> bool:
        """Return True if a block before ``index`` passes its values on."""
        return any(block.block.component.passes == "values" for block in self.blocks[:index])

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


def _choose_by_block(options: Any) -> tuple[tuple[BlockChoices, ...], list[Fault]]:
    """Return the components of every block, the model's own with the changes of ``blocks``, and faults in these."""
    own = BlockChoices(options.block, options.attention, options.mlp, options.norm)
    choices = [own] * options.depth
    spans: dict[int, str] = {}
    faults: list[Fault] = []
    for span, parts in options.blocks.items():
        first, _, last = span.partition("-")
        indices = range(int(first), int(last or first) + 1)
        if not indices or indices[-1] >= options.depth:
            sentence = f"blocks '{span}' do not exist; the model has blocks 0 to {options.depth - 1}"
            faults.append((("blocks", "depth"), sentence))
            continue
        for index in indices:
            if index in spans:
                faults.append((("blocks",), f"block {index} is in '{spans[index]}' and in '{span}'; remove one"))
                break
            spans[index] = span
            choices[index] = own._replace(**{name: choice for name, choice in parts if choice is not None})
    return tuple(choices), faults


class Size(NamedTuple):
    """Width, number of blocks, heads per block, hidden width of the MLP."""

    dim: int
    depth: int
    heads: int
    hidden: int


SizeName = Literal["pico", "nano", "micro", "mini", "Ti", "S", "M", "B", "L", "H", "g", "G"]

# The first four are for small images on a laptop, with 0.03, 0.2, 0.8 and 2.7 million parameters in the blocks.  Others
# are published; Ti, S and B are DeiT's too.
_SIZES = """
pico    32  2  2  128
nano    64  4  4  256
micro  128  4  4  512
mini   192  6  3  768
Ti     192 12  3  768
S      384 12  6 1536
M      512 12  8 2048
B      768 12 12 3072
L     1024 24 16 4096
H     1280 32 16 5120
g     1408 40 16 6144
G     1664 48 16 8192
"""
SIZES = {name: Size(*map(int, numbers)) for name, *numbers in map(str.split, _SIZES.strip().splitlines())}
DEFAULT_SIZE = "Ti"


def fill_in_size(options: Options) -> Options:
    """Return the options of a model with the numbers of its size filled in; explicit options are unchanged.

    The ratio applies to the plain MLP, ``gelu``; others keep their own.
    """
    name = options.get("size") or DEFAULT_SIZE
    if not isinstance(name, str) or name not in SIZES:
        return options  # validation reports it, with the names of the sizes
    size = SIZES[name]
    full = dict(options)
    for number in ("dim", "depth", "heads"):
        if full.get(number) is None:
            full[number] = getattr(size, number)
    try:
        # Explicit options of the MLP win over the size's ratio.
        mlp = Choice.parse(full["mlp"] if "mlp" in full else slot("mlp").qualify_builtin("gelu"))
    except ValueError:
        return full  # validation reports it
    if mlp.type in ("gelu", f"{BUILT_IN}:gelu"):
        full["mlp"] = {"type": mlp.type, "ratio": size.hidden / size.dim, **mlp.options}
    return full
