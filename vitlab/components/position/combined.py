"""Several position encodings at once, written as a list in the place of one."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from vitlab.components.base import Options, Rotation, State
from vitlab.components.position import Position, Resampling, position
from vitlab.geometry import Geometry
from vitlab.registry import Pick, ResolvedChoice
from vitlab.spec import Choice


def _each_once(parts: tuple[ResolvedChoice, ...]) -> tuple[ResolvedChoice, ...]:
    """Return the encodings of a list, and of the lists in it, as one list."""
    flat = tuple(inner for part in parts for inner in choices_of(part))
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
            tuple[Annotated[Choice | str, Pick("position")], ...], Field(min_length=1), AfterValidator(_each_once)
        ] = ("learned", "rope2d"),
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for choice in parts:
            with torch.random.fork_rng(devices=[]):  # each draws its initial values as it does alone
                self.parts.append(position.build(choice, g))
        self._names: dict[str, str] = {}
        for prefix, part in encodings(self).items():
            # The first of equal names keeps timm's; another has its place in the list in its name.
            names = {prefix + name: name for name in part.state_dict() if name not in self._names.values()}
            self._names |= names

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        """Return a sentence if a part does not fit or is the second to rotate; None otherwise."""
        parts = options["parts"]
        rotating = [part.type for part in parts if part.component.needs_rotation]
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
        """Add every part's encoding, in order."""
        for part in self.parts:
            x_BTD = part.add(x_BTD, layer)
        return x_BTD

    def rotation(self, layer: int) -> Rotation | None:
        """Return the rotation of the part that has one."""
        rotations = (part.rotation(layer) for part in self.parts)
        return next((rotation for rotation in rotations if rotation is not None), None)

    def bias(self, layer: int) -> Tensor | None:
        """Return the sum of the parts' biases, HTT."""
        total: Tensor | None = None
        for part in self.parts:
            bias_HTT = part.bias(layer)
            total = bias_HTT if total is None else total if bias_HTT is None else total + bias_HTT
        return total

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Mix tokens by every part, in order."""
        for part in self.parts:
            x_BTD = part.mix(x_BTD, layer)
        return x_BTD

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> dict[str, Tensor]:
        """Resample the state of every part."""
        out: dict[str, Tensor] = {}
        for prefix, part in encodings(self).items():
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            out |= {prefix + name: value for name, value in part.resample(own, old, new, how).items()}
        return out


def encodings(whole: Position) -> dict[str, Position]:
    """Return the encodings that act in a module by the prefix of their names in its state.

    These are the encodings of a list, or the module itself, under an empty prefix.
    """
    if not isinstance(whole, Together):
        return {"": whole}
    return {f"parts.{index}.": part for index, part in enumerate(whole.parts)}


def choices_of(choice: ResolvedChoice) -> tuple[ResolvedChoice, ...]:
    """Return the choices of a list of encodings, or the choice itself."""
    return choice.options["parts"] if issubclass(choice.component, Together) else (choice,)
