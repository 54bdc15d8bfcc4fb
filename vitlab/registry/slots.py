"""Slot: one axis of choice, the components that fill it by name, and how one of them is found, checked and built."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from vitlab import imports
from vitlab.errors import BrokenComponent, ClashError, OptionError, UnknownComponent, nearest
from vitlab.registry import plugin_files, plugins
from vitlab.registry.blame import with_frames
from vitlab.registry.options import Options, clashing_defaults, faults_of, is_choice, options_of
from vitlab.registry.resolved import Resolved
from vitlab.registry.slot_modules import BUILT_IN, BUILTIN_ORIGIN, Origin
from vitlab.spec.choice import Choice
from vitlab.spec.collect import collect

T = TypeVar("T")

_bare: dict[tuple[str, str, str, int], Resolved] = {}
"""Choices without options, which most are, resolved once: slot, name, which guests are kept out, and reloads so far."""


class Slot(Generic[T]):
    """One axis of choice: the contract, and the components that keep it."""

    def __init__(self, name: str, contract: type[T], *, shared: type[BaseModel] | None = None) -> None:
        """
        Args:
            name: the slot's name in YAML, and the entry-point group ``vitlab.<name>``.
            contract: the class every component derives from.
            shared: options that every component of the slot takes in YAML, read by the room rather than by the
                component.
        """
        self.name = name
        self.contract = contract
        self.shared = shared
        self._members: dict[tuple[str, str], type[T]] = {}
        self._origins: dict[tuple[str, str], Origin] = {}
        self._options: dict[type[T], type[BaseModel]] = {}

    # -- who comes and goes -----------------------------------------------------------------------------------------

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Give a class its name in this slot.  For built-ins and for files; packages use entry points."""

        def add(component: type[T]) -> type[T]:
            if origin := plugin_files.running(component.__module__):
                plugin_files.FromFile(self, name, component, origin).join()
                return component
            package = component.__module__.partition(".")[0]
            # What is of no package of ours is a class of a notebook or a script, registered by hand.
            self._add(name, component, BUILTIN_ORIGIN if package == BUILT_IN else Origin(package, "unversioned"))
            return component

        return add

    def _add(self, name: str, component: type[T], origin: Origin) -> None:
        if not (inspect.isclass(component) and issubclass(component, self.contract)):
            raise BrokenComponent(
                f"{self.name} '{name}' from {origin} is not a {self.contract.__name__}: "
                f"{self.name} components derive from {self.contract.__module__}.{self.contract.__name__}"
            )
        if hasattr(component, "why_not") and hasattr(self.contract, "incompatibility"):
            raise BrokenComponent(
                f"{self.name} '{name}' from {origin} defines why_not(), which is unused: rename it incompatibility()"
            )
        other = self._members.get((origin.source, name))
        if other is not None and other is not component and not _is_reloaded(other, component):
            raise ClashError(f"{self.name} '{name}' is registered twice in {origin.source}")
        _bare.clear()  # the name may be ambiguous now, here and in whatever has this component as an option
        self._members[origin.source, name] = component
        self._origins[origin.source, name] = origin

    def _remove(self, name: str, origin: Origin) -> None:
        _bare.clear()
        del self._members[origin.source, name]
        del self._origins[origin.source, name]

    # -- who is there -----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all components, guests included; imports no guest."""
        loaded = {name for where, name in self._members if not plugins.is_disabled(where)}
        return sorted(loaded | {point.name for point in plugins.points(self.name)})

    def find(self, name: str) -> tuple[type[T], Origin]:
        """The component called ``name`` and where it comes from.

        Raises:
            UnknownComponent: naming the nearest name and all that are installed.
            ClashError: if two sources offer it, naming both and how to say which.
            BrokenComponent: if its plugin does not import, needs another vitlab, or offers something else than the
                contract.
        """
        source, _, bare = name.rpartition(":")
        points = {plugins.source(point): point for point in plugins.points(self.name) if point.name == bare}
        sources = self._loaded(bare) | set(points)
        if source:
            sources &= {source}
        if not sources:
            names = self.names()
            raise UnknownComponent(
                f"no {self.name} called '{name}'.{nearest(bare, names)} Installed: {', '.join(names) or 'none'}."
                f"{self._kept_out(source, bare)}"
            )
        if len(sources) > 1:
            qualified = " or ".join(f"'{where}:{bare}'" for where in sorted(sources))
            raise ClashError(f"{self.name} '{bare}' is offered by {' and '.join(sorted(sources))}; write {qualified}.")
        where = sources.pop()
        if (where, bare) not in self._members:
            self._load(points[where])
        component, origin = self._members[where, bare], self._origins[where, bare]
        current = getattr(sys.modules.get(component.__module__), component.__qualname__, component)
        if current is not component and _is_reloaded(component, current):
            self._add(bare, current, origin)
        return self._members[where, bare], origin

    def get(self, name: str) -> type[T]:
        """The component called ``name``; raises as :meth:`find`."""
        return self.find(name)[0]

    def own(self, name: str) -> str:
        """What a default of ours is to be called: its name, with ours before it where somebody else offers it too.

        So nobody who installs a clashing guest is asked what a study meant that has not named it.
        """
        others = self._loaded(name) | {
            plugins.source(point) for point in plugins.points(self.name) if point.name == name
        }
        return f"{BUILT_IN}:{name}" if BUILT_IN in others and len(others) > 1 else name

    def _loaded(self, bare: str) -> set[str]:
        return {where for where, known in self._members if known == bare and not plugins.is_disabled(where)}

    def _kept_out(self, source: str, bare: str) -> str:
        """A sentence where a name is not there only because its distribution is kept out."""
        offered = {plugins.source(point) for point in plugins.offered(self.name) if point.name == bare}
        missed = [where for where in sorted(offered) if source in ("", where)]
        if not missed:
            return ""
        verb = "is" if len(missed) == 1 else "are"
        return f" {' and '.join(missed)} would offer it and {verb} kept out: see {plugins.VARIABLE}."

    def _load(self, point: EntryPoint) -> None:
        origin = Origin(plugins.source(point), plugins.version(point))
        if reason := plugins.refusal(point):
            raise BrokenComponent(f"{self.name} '{point.name}' cannot be used: {reason}")
        try:
            component = point.load()
        except (Exception, SystemExit) as error:  # whatever a guest raises while it is imported is to be reported
            raise BrokenComponent(
                f"{self.name} '{point.name}' from {origin} failed to import: {with_frames(error)}"
            ) from error
        self._add(point.name, component, origin)

    # -- options ----------------------------------------------------------------------------------------------------

    def options(self, component: type[T]) -> type[BaseModel]:
        """The pydantic model of a component's options, derived from its signature."""
        if component not in self._options:
            self._options[component] = options_of(component, self.shared or Options)
        return self._options[component]

    def resolve(self, choice: Choice | str | Mapping[str, Any]) -> Resolved:
        """Find the component and complete its options, nested choices included.

        A component with a class method ``complete(options)`` spells out its own shorthands first: a named size of a
        model becomes the numbers it stands for.

        Raises:
            OptionError: with every fault and its path inside the choice.
            BrokenComponent: see :meth:`find`.
        """
        if isinstance(choice, Resolved) and choice.slot == self.name:
            return choice
        try:
            choice = Choice.of(choice)
        except ValueError as error:
            raise OptionError([((), str(error))]) from None
        bare = (self.name, choice.type, plugins.disabled(), imports.reloads())
        if not choice.options and bare in _bare:
            return _bare[bare]
        try:
            component, origin = self.find(choice.type)
        except (UnknownComponent, ClashError) as error:
            raise OptionError([(("type",), str(error))]) from None
        model = self.options(component)
        given = dict(getattr(component, "complete", dict)(choice.options))
        if origin.source == BUILT_IN:
            given = {**clashing_defaults(model), **given}
        found = collect(model, given, partial(faults_of, who=f"{self.name} '{choice.type}'", model=model))
        resolved = None
        if found.value is not None:
            values = {name: getattr(found.value, name) for name in type(found.value).model_fields}
            resolved = Resolved(choice.type, values, slot=self.name, component=component, origin=origin)
        if found.faults:
            # A default in the place of a wrong component is good enough to examine the rest with; no other value is.
            wrong = {path[0] for path in found.removed if path[0] in model.model_fields}
            choices = {name for name in wrong if is_choice(model.model_fields[str(name)])}
            faults = [(fault.path, fault.message) for fault in found.faults]
            raise OptionError(faults, resolved if wrong == choices else None, wrong)
        assert resolved is not None
        if not choice.options:
            _bare[bare] = resolved
        return resolved

    def build(self, choice: Choice | str | Mapping[str, Any], *context: Any) -> T:
        """Construct the component a choice names; ``context`` is what comes first in its signature.

        Raises:
            OptionError: if the options do not fit.
        """
        resolved = choice if isinstance(choice, Resolved) else self.resolve(choice)
        shared = set(self.shared.model_fields) if self.shared else set()
        own = {name: value for name, value in resolved.options.items() if name not in shared}
        return typing.cast(T, resolved.component(*context, **own))


def _is_reloaded(old: type[Any], new: Any) -> bool:
    """Whether a class stands for another since the module of both was reloaded."""
    last = imports.last_import(old.__module__)
    names = (old.__module__, old.__qualname__)
    return (
        last is not None
        and last.reloaded
        and names == (getattr(new, "__module__", ""), getattr(new, "__qualname__", ""))
    )
