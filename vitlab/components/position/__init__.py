"""Position encodings: the five hooks of their contract, resampling to another grid, and several encodings at once.

Libraries resample in ways that differ by up to the size of the values themselves, so every setting is explicit and has
a name.

R, C rows and columns of a grid, X values per place.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from vitlab.components.base import NewState, Options, Part, Rotation, State, to_float32_or_wider
from vitlab.geometry import Geometry, Pair
from vitlab.registry import Pick, ResolvedChoice, Slot
from vitlab.spec import Choice


@dataclass(frozen=True)
class Resampling:
    """The settings of a resampling."""

    filter: Literal["bilinear", "bicubic"] = "bicubic"
    align_corners: bool = False  #: whether the corner places, rather than the corners of the cells, coincide
    antialias: bool = True  #: whether the filter widens if the grid shrinks (and is another one if it grows)


PRESETS = {
    "timm": Resampling(),
    "google": Resampling("bilinear", align_corners=True, antialias=False),  # scipy.ndimage.zoom of order 1
    "deit": Resampling(antialias=False),
    "torchvision": Resampling(align_corners=True, antialias=False),
    "hf": Resampling(antialias=False),
}
"""What each library changes in these settings when it loads a checkpoint at another resolution."""


def resample_grid(values_RCX: Tensor, size: Pair, how: Resampling) -> Tensor:
    """Resample (R, C, X) to (*size, X), in at least float32; values of the same size are unchanged."""
    if tuple(values_RCX.shape[:2]) == tuple(size):
        return values_RCX
    x_1XRC = to_float32_or_wider(values_RCX).permute(2, 0, 1)[None]
    y_1XRC = F.interpolate(x_1XRC, size=size, mode=how.filter, align_corners=how.align_corners, antialias=how.antialias)
    return y_1XRC[0].permute(1, 2, 0).to(values_RCX.dtype)


class Position(Part):
    """Base of position encodings: five hooks, each with the identity as default.

    Layer 0 is the stem, before dropout; block i, counted from 0, is layer i + 1.  The model calls ``add`` at every
    layer (before the block), ``rotation`` and ``bias`` for every block, and ``mix`` after every block.
    """

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Add an encoding to tokens, (B, T, D) to (B, T, D)."""
        return x_BTD

    def rotation(self, layer: int) -> Rotation | None:
        """Return the rotation of queries and keys, in which class and distillation tokens stay as they are, or None."""
        return None

    def bias(self, layer: int) -> Tensor | None:
        """Return the bias on the logits of every head, (H, T, T), for query (first T) and key, or None."""
        return None

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Mix tokens after a block with their neighbours, (B, T, D) to (B, T, D)."""
        return x_BTD

    @classmethod
    def acts_in_blocks(cls, options: Options) -> bool:
        """Return whether the encoding acts at a later layer than the stem, where some patches may be missing."""
        return any(map(cls.overrides, ("bias", "rotation", "mix")))

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Return whether the encoding has a hook of its own, such as ``bias``, which the attention must then apply."""
        return getattr(cls, hook) is not getattr(Position, hook)

    def _register_constant(self, name: str, value: Tensor) -> None:
        """Register a buffer of the default dtype that is no part of the state."""
        self.register_buffer(name, value.to(torch.get_default_dtype()), persistent=False)

    def canonical_name(self, name: str) -> str:
        """Return the name in a canonical checkpoint of an entry of this module's state."""
        return name

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> NewState:
        """Resample a state of this module from the grid of ``old`` to the grid of ``new``.

        Raises:
            WeightsError: if ``new`` has prefix tokens whose rows ``old`` lacks.
        """
        return dict(state)


position = Slot("position", Position)


def patch_coordinates(g: Geometry) -> tuple[Tensor, Tensor]:
    """Return the row and column of every patch, each int64 (N,)."""
    place_N = torch.arange(g.patches)
    return place_N // g.grid[1], place_N % g.grid[1]


# -- several at once --------------------------------------------------------------------------------------------------


def _flatten_distinct_parts(parts: tuple[ResolvedChoice, ...]) -> tuple[ResolvedChoice, ...]:
    """Return the encodings of a list, and of the lists in it, as one list."""
    flat = tuple(inner for part in parts for inner in encodings_of_choice(part))
    names = [part.type for part in flat]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"position '{name}' is in the list twice; remove one")
    return flat


@position.register("together")
class Together(Position):
    """Several encodings at once; a list is its short form: ``position: [learned, rope2d]``.

    Rows are added and tokens mixed in the order of the list, biases are summed, and one encoding may rotate queries
    and keys.  In a checkpoint, each encoding has the names it has alone, so that ``learned`` is timm's ``pos_embed``;
    at the same seed, it starts from the values it has alone.

    Reference: arXiv:2303.11331 (EVA-02), arXiv:2403.13298 (RoPE-Mixed with a learned table), arXiv:2602.08071 (ViT-5).

    Args:
        parts: the encodings, each at most once.
    """

    parts: Any  #: a list of modules, each a :class:`Position`

    def __init__(
        self,
        g: Geometry,
        *,
        parts: Annotated[
            tuple[Annotated[Choice | str, Pick("position")], ...],
            Field(min_length=1),
            AfterValidator(_flatten_distinct_parts),
        ] = ("learned", "rope2d"),
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for choice in parts:
            with torch.random.fork_rng(devices=[]):  # each draws its initial values as it does alone
                self.parts.append(position.build(choice, g))
        self._names: dict[str, str] = {}
        for prefix, part in encodings_by_prefix(self).items():
            # The first of equal names keeps timm's; another has its place in the list in its name.
            self._names |= {prefix + name: name for name in part.state_dict() if name not in self._names.values()}

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        parts = options["parts"]
        rotating = [part.type for part in parts if part.component.overrides("rotation")]
        if len(rotating) > 1:
            return (
                f"positions {' and '.join(map(repr, rotating))} each rotate queries and keys, and attention applies "
                "one rotation; keep one of them"
            )
        return next(filter(None, (part.component.incompatibility(g, part.options) for part in parts)), None)

    def canonical_name(self, name: str) -> str:
        """Return the name that an entry of the state has without the list, unless an earlier part has that name."""
        return self._names.get(name, name)

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        for part in self.parts:
            x_BTD = part.add(x_BTD, layer)
        return x_BTD

    def rotation(self, layer: int) -> Rotation | None:
        """Return the rotation of the part that has one."""
        return next(filter(None, (part.rotation(layer) for part in self.parts)), None)

    def bias(self, layer: int) -> Tensor | None:
        biases_HTT = [bias_HTT for part in self.parts if (bias_HTT := part.bias(layer)) is not None]
        return reduce(torch.add, biases_HTT) if biases_HTT else None

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        for part in self.parts:
            x_BTD = part.mix(x_BTD, layer)
        return x_BTD


def encodings_by_prefix(whole: Position) -> dict[str, Position]:
    """Return the encodings that act in a module by the prefix of their names in its state.

    These are the encodings of a list, or the module itself, under an empty prefix.
    """
    if not isinstance(whole, Together):
        return {"": whole}
    return {f"parts.{index}.": part for index, part in enumerate(whole.parts)}


def encodings_of_choice(choice: ResolvedChoice) -> tuple[ResolvedChoice, ...]:
    """Return the choices of a list of encodings, or the choice itself."""
    return choice.options["parts"] if issubclass(choice.component, Together) else (choice,)
