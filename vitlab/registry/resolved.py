"""Resolved choices: the component is imported, and the options are complete and valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from vitlab.registry.options import Unhashed
from vitlab.registry.slot_modules import BUILT_IN, Origin, slot
from vitlab.spec.choice import Choice


@dataclass(frozen=True)
class Resolved(Choice):
    """A choice with its component class and complete, validated options."""

    slot: str = field(kw_only=True)
    component: type = field(kw_only=True, compare=False)
    origin: Origin = field(kw_only=True)

    def parts(self) -> Iterator[Resolved]:
        """Yield this choice and every choice nested in its options."""
        yield self
        yield from _choices_in(self.options)

    @property
    def key_name(self) -> str:
        """The name in a trial's key: for built-ins the bare name, and of a renamed one the former name."""
        if self.origin.source != BUILT_IN:
            return self.type
        bare = self.type.removeprefix(f"{BUILT_IN}:")
        return slot(self.slot).former_names.get(bare, bare)

    @property
    def rename_note(self) -> str | None:
        """A note on the new name, if a built-in component is called by its former one; None otherwise."""
        present = {former: name for name, former in slot(self.slot).former_names.items()}
        bare = self.type.removeprefix(f"{BUILT_IN}:")
        if self.origin.source != BUILT_IN or bare not in present:
            return None
        return f"{self.slot} '{bare}' is now called '{present[bare]}'; both names mean the same trials."

    def hashed(self) -> dict[str, Any]:
        """Return :meth:`plain` with :attr:`key_name` for the type, and without options marked :class:`Unhashed`."""
        fields = slot(self.slot).options(self.component).model_fields
        options = {name: value for name, value in self.options.items() if not _unhashed(fields[name].metadata)}
        return {"type": self.key_name, **{name: _hashed(value) for name, value in options.items()}}


def _choices_in(value: Any) -> Iterator[Resolved]:
    if isinstance(value, Resolved):
        yield from value.parts()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _choices_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _choices_in(item)
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _choices_in(getattr(value, name))


def _unhashed(metadata: list[Any]) -> bool:
    return any(isinstance(mark, Unhashed) or mark is Unhashed for mark in metadata)


def _hashed(value: Any) -> Any:
    if isinstance(value, Resolved):
        return value.hashed()
    if isinstance(value, Choice):
        return value.plain()
    if isinstance(value, BaseModel):
        return {name: _hashed(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {name: _hashed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hashed(item) for item in value]
    return value
