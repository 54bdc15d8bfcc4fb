"""Translation of parameter names between a library and the canonical (timm) checkpoint, and sizes that it shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vitlab.errors import WeightsError
from vitlab.geometry import Pair
from vitlab.weights.known import ModelFacts, some

State = Mapping[str, Tensor]


class Canonical(NamedTuple):
    """A state under canonical names, and the keys that have no canonical name."""

    state: dict[str, Tensor]
    unknown: tuple[str, ...] = ()  #: keys the format does not have
    dropped: tuple[str, ...] = ()  #: keys that are no part of what the model computes, such as an optimizer's


class Format:
    """One library's checkpoint format of a Vision Transformer.  All methods are pure functions of their arguments."""

    name: ClassVar[str]
    title: ClassVar[str]  #: the library's name in sentences
    convention: ClassVar[ModelFacts]  #: facts of this library unless a file states others
    fixed: ClassVar[frozenset[str]] = frozenset()  #: facts of the convention, or inferred, that hold for every file
    needs: ClassVar[tuple[str, ...]] = ()  #: canonical names that are required
    needs_rows: ClassVar[bool] = False  #: whether the tokens before the patches must have rows of positions
    square: ClassVar[bool] = False  #: whether images and patches must be square

    def recognise(self, names: Collection[str]) -> bool:
        """Return True if these look like the names of this format."""
        raise NotImplementedError

    def to_canonical(self, state: State) -> Canonical:
        """Convert this format's names and shapes to canonical ones."""
        raise NotImplementedError

    def from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        """Convert canonical names and shapes to this format's.

        Raises:
            WeightsError: for tensors that this format has no name for, and for required ones that are missing.
        """
        missing = [name for name in self.needs if name not in state]
        if missing:
            raise WeightsError(
                f"the format {self.name} requires {some(missing)}, which this model does not have; use another format"
            )
        return self._from_canonical(state, heads)

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def infer_facts(self, state: State) -> ModelFacts:
        """Return the facts that names and shapes in this format show or suggest, and canonical ones do not."""
        return ModelFacts()


@dataclass(frozen=True)
class Layout:
    """A pair of functions between a library's layout of a tensor and the canonical one."""

    to_canonical: Callable[[Tensor], Tensor]  #: to the canonical layout
    from_canonical: Callable[..., Tensor]  #: from it, given the number of ``heads``


SAME = Layout(lambda x: x, lambda x, heads: x)


class KeyEntry(NamedTuple):
    """A library's name and the canonical one.  ``{i}`` stands for a number, ``{i+1}`` for the same counted from 1."""

    theirs: str
    ours: str
    layout: Layout = SAME


def pair(theirs: str, ours: str) -> list[KeyEntry]:
    """Return the entries of a layer's weight and bias; ``{p}`` stands for either."""
    return [KeyEntry(theirs.replace("{p}", kind), ours.replace("{p}", kind)) for kind in ("weight", "bias")]


class KeyMap:
    """A table that translates names, and the layouts of their tensors, in both directions.

    Where two entries have the same canonical name, both are read and the first is written.
    """

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        entries = tuple(entries)
        self._to_canonical = [(_pattern(entry.theirs), entry.ours, entry.layout) for entry in entries]
        self._from_canonical = [(_pattern(entry.ours), entry.theirs, entry.layout) for entry in entries]

    def to_canonical(self, state: State) -> Canonical:
        """Return every tensor under its canonical name.

        Raises:
            WeightsError: if a tensor has an unexpected shape, or two have the same canonical name.
        """
        out: dict[str, Tensor] = {}
        unknown = []
        for name, value in state.items():
            target = _look_up(name, self._to_canonical)
            if target is None:
                unknown.append(name)
                continue
            if target[0] in out:
                raise WeightsError(f"the file holds {name} twice, under two spellings; remove one of them")
            out[target[0]] = _convert_layout(name, value, target[1].to_canonical)
        return Canonical(out, tuple(unknown))

    def from_canonical(self, state: State, heads: int, title: str) -> dict[str, Tensor]:
        """Return canonical tensors under the library's names; the inverse of :meth:`to_canonical`.

        Raises:
            WeightsError: for tensors that ``title`` has no name for.
        """
        out: dict[str, Tensor] = {}
        unsupported = []
        for name, value in state.items():
            target = _look_up(name, self._from_canonical)
            if target is None:
                unsupported.append(name)
            else:
                layout = target[1]
                out[target[0]] = _convert_layout(name, value, partial(layout.from_canonical, heads=heads))
        if unsupported:
            raise WeightsError(f"{title} has no tensor for {some(unsupported)}; use another format")
        return out


def fuse_qkv(state: State) -> dict[str, Tensor]:
    """Concatenate ``q``, ``k`` and ``v`` of each attention to one ``qkv``; other tensors are unchanged."""
    out = dict(state)
    for name in state:
        match = _QUERY.fullmatch(name)
        if match:
            parts = [f"{match[1]}.{part}.{match[2]}" for part in "qkv"]
            if all(part in state for part in parts):
                out[f"{match[1]}.qkv.{match[2]}"] = torch.cat([out.pop(part) for part in parts])
    return out


def split_qkv(state: State) -> dict[str, Tensor]:
    """Split each ``qkv`` into ``q``, ``k`` and ``v``; the inverse of :func:`fuse_qkv`."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        match = _QKV.fullmatch(name)
        if match:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                out[f"{match[1]}.{part}.{match[2]}"] = rows.clone()
        else:
            out[name] = value
    return out


_QUERY = re.compile(r"(blocks\.\d+\.attn)\.q\.(weight|bias)")
_QKV = re.compile(r"(blocks\.\d+\.attn)\.qkv\.(weight|bias)")
_NUMBER = re.compile(r"\{([a-z])(\+1)?\}")

_Entries = list[tuple[re.Pattern[str], str, Layout]]


def _pattern(text: str) -> re.Pattern[str]:
    """Return a pattern for the names of ``text``; the group of a number counted from 1 ends in ``_from_1``."""
    out, at = "", 0
    for place in _NUMBER.finditer(text):
        out += re.escape(text[at : place.start()]) + f"(?P<{place[1]}{'_from_1' if place[2] else ''}>\\d+)"
        at = place.end()
    return re.compile(out + re.escape(text[at:]))


def _look_up(name: str, entries: _Entries) -> tuple[str, Layout] | None:
    for pattern, other, layout in entries:
        match = pattern.fullmatch(name)
        if match:
            numbers = {
                group.removesuffix("_from_1"): int(number) - group.endswith("_from_1")
                for group, number in match.groupdict().items()
            }
            filled = _NUMBER.sub(lambda place: str(numbers[place[1]] + (1 if place[2] else 0)), other)  # noqa: B023
            return filled, layout
    return None


def _convert_layout(name: str, value: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    try:
        return convert(value)
    except (RuntimeError, IndexError, ValueError):
        raise WeightsError(
            f"{name} has the unexpected shape {tuple(value.shape)}; use an unchanged checkpoint"
        ) from None


class BlockNames(NamedTuple):
    """Canonical names of the parts of the first block; all blocks have the same parts."""

    norm: str = "blocks.0.norm1"
    attention: str = "blocks.0.attn"
    mlp: str = "blocks.0.mlp"
    layer_scale: str = "blocks.0.ls1"
    parallel: int = 0  #: attentions, and MLPs, side by side as in ``parallel_things``; 0 in a block with one of each

    @classmethod
    def of(cls, state: State) -> BlockNames:
        """Return the names in a canonical state."""
        branches = {match[1] for name in state if (match := PARALLEL.match(name))}
        if not branches:
            return cls()
        attention, mlp = "blocks.0.attns.0", "blocks.0.ffns.0"
        return cls(f"{attention}.norm", f"{attention}.attn", f"{mlp}.mlp", f"{attention}.ls", len(branches))


PARALLEL = re.compile(r"blocks\.0\.(?:attns|ffns)\.(\d+)\.")


def tensor_size(state: State, name: str, axis: int) -> int | None:
    """Return the length of an axis of a tensor; None if the state has no such axis."""
    value = state.get(name)
    return int(value.shape[axis]) if value is not None and value.ndim > axis else None


def depth_of(state: State) -> int | None:
    """Return the number of blocks in a canonical state; None if it has none."""
    blocks = {int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name))}
    return max(blocks) + 1 if blocks else None


def patch_of(state: State) -> Pair | None:
    """Return the patch size in pixels; None for a hybrid, whose patches are cut from a feature map."""
    value = state.get("patch_embed.proj.weight")
    hybrid = any(name.startswith("patch_embed.backbone.") for name in state)
    return (value.shape[2], value.shape[3]) if value is not None and value.ndim == 4 and not hybrid else None
