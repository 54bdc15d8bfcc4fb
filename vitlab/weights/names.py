"""Names of parameters in two languages: a library's, and the canonical one, which is timm's."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vitlab.errors import WeightsError
from vitlab.weights.known import ModelFacts, some

State = Mapping[str, Tensor]


class Canonical(NamedTuple):
    """A state under canonical names, and what could not be said in them."""

    state: dict[str, Tensor]
    unknown: tuple[str, ...] = ()  #: keys the format does not have
    dropped: tuple[str, ...] = ()  #: keys that are no part of what the model computes, such as an optimizer's


class Format:
    """One library's way to write a Vision Transformer down.  All methods are pure functions of their arguments."""

    name: ClassVar[str]
    title: ClassVar[str]  #: whose it is, in a few words
    convention: ClassVar[ModelFacts]  #: what is so in this library unless a file says otherwise
    fixed: ClassVar[frozenset[str]] = frozenset()  #: facts of the convention, or shown, that are so in every file
    needs: ClassVar[tuple[str, ...]] = ()  #: canonical names it cannot be without
    needs_rows: ClassVar[bool] = False  #: whether the tokens before the patches must have rows of positions
    square: ClassVar[bool] = False  #: whether images and patches must be square

    def recognise(self, names: Collection[str]) -> bool:
        """Whether these look like the names of this format."""
        raise NotImplementedError

    def to_canonical(self, state: State) -> Canonical:
        """From this format's names and shapes to canonical ones."""
        raise NotImplementedError

    def from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        """From canonical names and shapes to this format's.

        Raises:
            WeightsError: for what this format has no place for, and for what it cannot be without, by name.
        """
        missing = [name for name in self.needs if name not in state]
        if missing:
            raise WeightsError(f"in the format {self.name} a model cannot be without {some(missing)}")
        return self._written(state, heads)

    def _written(self, state: State, heads: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def shown(self, state: State) -> ModelFacts:
        """Return what the names and shapes of a file in this format show, or suggest, that canonical ones do not."""
        return ModelFacts()


@dataclass(frozen=True)
class Layout:
    """How one library lays a tensor out that another lays out differently."""

    forth: Callable[[Tensor], Tensor]  #: to the canonical layout
    back: Callable[..., Tensor]  #: from it, given the number of ``heads``


SAME = Layout(lambda x: x, lambda x, heads: x)


class Entry(NamedTuple):
    """A name here and there.  ``{i}`` stands for a number, ``{i+1}`` for the same one counted from 1."""

    theirs: str
    ours: str
    layout: Layout = SAME


def pair(theirs: str, ours: str) -> list[Entry]:
    """A layer's weight and bias; ``{p}`` stands for the one and the other."""
    return [Entry(theirs.replace("{p}", kind), ours.replace("{p}", kind)) for kind in ("weight", "bias")]


class KeyMap:
    """Translates names, and with them the layout of what they name, in both directions.

    Where two entries have the same canonical name, both are read and the first is written.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        entries = tuple(entries)
        self._forth = [(_pattern(entry.theirs), entry.ours, entry.layout) for entry in entries]
        self._back = [(_pattern(entry.ours), entry.theirs, entry.layout) for entry in entries]

    def forth(self, state: State) -> Canonical:
        """Every tensor under its canonical name.

        Raises:
            WeightsError: if one is not of the shape that its name promises, or two have one name.
        """
        found: dict[str, Tensor] = {}
        unknown = []
        for name, value in state.items():
            known = _looked_up(name, self._forth)
            if known is None:
                unknown.append(name)
                continue
            if known[0] in found:
                raise WeightsError(f"{name} comes twice, in two spellings")
            found[known[0]] = _laid_out(name, value, known[1].forth)
        return Canonical(found, tuple(unknown))

    def back(self, state: State, heads: int, title: str) -> dict[str, Tensor]:
        """The inverse of :meth:`forth`.

        Raises:
            WeightsError: for names that ``title`` has none for.
        """
        found: dict[str, Tensor] = {}
        homeless = []
        for name, value in state.items():
            known = _looked_up(name, self._back)
            if known is None:
                homeless.append(name)
            else:
                layout = known[1]
                found[known[0]] = _laid_out(name, value, partial(layout.back, heads=heads))
        if homeless:
            raise WeightsError(f"{title} has no place for {some(homeless)}")
        return found


def joined(state: State) -> dict[str, Tensor]:
    """Queries, keys and values of each attention, ``q``, ``k`` and ``v``, as one ``qkv``; all else as it is."""
    out = dict(state)
    for name in state:
        found = _QUERY.fullmatch(name)
        if found:
            parts = [f"{found[1]}.{part}.{found[2]}" for part in "qkv"]
            if all(part in state for part in parts):
                out[f"{found[1]}.qkv.{found[2]}"] = torch.cat([out.pop(part) for part in parts])
    return out


def apart(state: State) -> dict[str, Tensor]:
    """The inverse of :func:`joined`."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        found = _QKV.fullmatch(name)
        if found:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                out[f"{found[1]}.{part}.{found[2]}"] = rows.clone()
        else:
            out[name] = value
    return out


# -- how it is done ---------------------------------------------------------------------------------------------------

_QUERY = re.compile(r"(blocks\.\d+\.attn)\.q\.(weight|bias)")
_QKV = re.compile(r"(blocks\.\d+\.attn)\.qkv\.(weight|bias)")
_NUMBER = re.compile(r"\{([a-z])(\+1)?\}")

_Entries = list[tuple[re.Pattern[str], str, Layout]]


def _pattern(text: str) -> re.Pattern[str]:
    """What matches the names of ``text``; a number counted from 1 gets a group that says so."""
    out, at = "", 0
    for place in _NUMBER.finditer(text):
        out += re.escape(text[at : place.start()]) + f"(?P<{place[1]}{'_from_1' if place[2] else ''}>\\d+)"
        at = place.end()
    return re.compile(out + re.escape(text[at:]))


def _looked_up(name: str, entries: _Entries) -> tuple[str, Layout] | None:
    for pattern, other, layout in entries:
        found = pattern.fullmatch(name)
        if found:
            numbers = {
                group.removesuffix("_from_1"): int(number) - group.endswith("_from_1")
                for group, number in found.groupdict().items()
            }
            filled = _NUMBER.sub(lambda place: str(numbers[place[1]] + (1 if place[2] else 0)), other)  # noqa: B023
            return filled, layout
    return None


def _laid_out(name: str, value: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
    try:
        return how(value)
    except (RuntimeError, IndexError, ValueError):
        raise WeightsError(f"{name} cannot be of the shape {tuple(value.shape)}") from None
