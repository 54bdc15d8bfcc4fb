"""Several position encodings at once, written as a list in the place of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, cast

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from vitlab.components.base import Rotation, State
from vitlab.components.position.contract import Position, Resampling, position
from vitlab.errors import OptionError
from vitlab.geometry import Geometry
from vitlab.registry import Pick, ResolvedChoice
from vitlab.spec import Choice


def _each_once(parts: tuple[ResolvedChoice, ...]) -> tuple[ResolvedChoice, ...]:
    names = [inner.type for part in parts for inner in choices_of(part)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"position '{name}' is in the list twice; remove one")
    return parts


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

    def __init__(
        self,
        g: Geometry,
        *,
        parts: Annotated[
            tuple[Annotated[Choice | str, Pick("position")], ...], Field(min_length=1), AfterValidator(_each_once)
        ] = ("learned", "rope2d"),
    ) -> None:
        super().__init__()
        choices = [position.resolve(part) for part in parts]
        if reason := self.incompatibility(g, {"parts": choices}):
            raise OptionError([(("parts",), reason)])
        self.parts = nn.ModuleList()
        for choice in choices:
            with torch.random.fork_rng(devices=[]):  # each draws its initial values as it does alone
                self.parts.append(position.build(choice, g))
        self._names: dict[str, str] = {}
        for at, part in encodings(self).items():
            self._names |= {at + name: name for name in part.state_dict() if name not in self._names.values()}

    @classmethod
    def incompatibility(cls, g: Geometry, options: Mapping[str, Any]) -> str | None:
        """Return a sentence if a part does not fit or is the second to rotate; None otherwise."""
        choices: Sequence[ResolvedChoice] = options["parts"]
        every = [inner for choice in choices for inner in choices_of(choice)]
        rotating = [choice.type for choice in every if choice.component.needs_rotation]  # type: ignore[attr-defined]
        if len(rotating) > 1:
            return (
                f"positions {' and '.join(map(repr, rotating))} each rotate queries and keys, and attention applies "
                "one rotation; keep one of them"
            )
        reasons = (choice.component.incompatibility(g, choice.options) for choice in every)  # type: ignore[attr-defined]
        return next((reason for reason in reasons if reason), None)

    def _parts(self) -> Iterable[Position]:
        return cast(Iterable[Position], self.parts)

    def canonical_name(self, name: str) -> str:
        """Return the name that an entry of the state has without the list, unless an earlier part has that name."""
        return self._names.get(name, name)

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Add every part's encoding, in order."""
        for part in self._parts():
            x_BTD = part.add(x_BTD, layer)
        return x_BTD

    def rotation(self, layer: int) -> Rotation | None:
        """Return the rotation of the part that has one."""
        rotations = (part.rotation(layer) for part in self._parts())
        return next((rotation for rotation in rotations if rotation is not None), None)

    def bias(self, layer: int) -> Tensor | None:
        """Return the sum of the parts' biases, HTT."""
        total: Tensor | None = None
        for part in self._parts():
            bias_HTT = part.bias(layer)
            total = bias_HTT if total is None else total if bias_HTT is None else total + bias_HTT
        return total

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Mix tokens by every part, in order."""
        for part in self._parts():
            x_BTD = part.mix(x_BTD, layer)
        return x_BTD

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> dict[str, Tensor]:
        """Resample the state of every part."""
        out: dict[str, Tensor] = {}
        for at, part in encodings(self).items():
            own = {name.removeprefix(at): value for name, value in state.items() if name.startswith(at)}
            out |= {at + name: value for name, value in part.resample(own, old, new, how).items()}
        return out


def encodings(whole: Position) -> dict[str, Position]:
    """Return the encodings that act in a module by the prefix of their names in its state.

    These are those of a list, lists in it included, or the module itself, under an empty prefix.
    """
    if not isinstance(whole, Together):
        return {"": whole}
    parts: dict[str, Position] = {}
    for index, part in enumerate(whole._parts()):
        parts |= {f"parts.{index}.{at}": inner for at, inner in encodings(part).items()}
    return parts


def choices_of(choice: ResolvedChoice) -> tuple[ResolvedChoice, ...]:
    """Return the choices of a list of encodings, lists in it included, or the choice itself."""
    if not issubclass(choice.component, Together):
        return (choice,)
    return tuple(inner for part in choice.options["parts"] for inner in choices_of(part))
