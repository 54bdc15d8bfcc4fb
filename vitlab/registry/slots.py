"""The slot class: registration, lookup, validation and construction of the components of one axis."""

from __future__ import annotations

import inspect
import marshal
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from vitlab import imports
from vitlab.errors import BrokenComponent, ClashError, OptionError, UnknownComponent, nearest
from vitlab.registry import plugin_files, plugins
from vitlab.registry.options import Options, ResolvedChoice, clashing_defaults, faults_of, options_of
from vitlab.registry.plugin_files import with_frames
from vitlab.registry.slot_modules import BUILT_IN, BUILTIN_ORIGIN, Origin
from vitlab.spec.choice import PARTS, TOGETHER, Choice
from vitlab.spec.collect import collect

T = TypeVar("T")

RENAMED_METHODS = {"why_not": "incompatibility", "views": "logits_by_head"}
"""Former name of a contract's method to its present name, so that a plugin's override is not lost silently."""

MAX_RESOLVED = 10_000  #: resolved choices that are cached

_resolved: dict[tuple[str, str, bytes, str, int], ResolvedChoice] = {}
"""Cache of resolved choices by slot, name, plain options, disabled plugins and number of reloads."""


class Slot(Generic[T]):
    """An axis of choice: a contract and the components that implement it.

    Args:
        name: the slot's name in YAML, and the entry-point group ``vitlab.<name>``.
        contract: the class every component derives from.
        shared: options that every component of the slot takes in YAML, read by the slot's package and not by the
            component.
        fault: returns in one sentence what is wrong with what a class declares, or None; called when it is registered.
    """

    def __init__(
        self,
        name: str,
        contract: type[T],
        *,
        shared: type[BaseModel] | None = None,
        fault: Callable[[type[T]], str | None] | None = None,
    ) -> None:
        self.name = name
        self.contract = contract
        self.shared = shared
        self._fault = fault
        self._members: dict[tuple[str, str], type[T]] = {}
        self._origins: dict[tuple[str, str], Origin] = {}
        self._options: dict[type[T], type[BaseModel]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Register a class under a name in this slot, for built-ins and files; packages use entry points."""

        def add(component: type[T]) -> type[T]:
            if origin := plugin_files.running(component.__module__):
                plugin_files.FromFile(self, name, component, origin).register()
                return component
            package = component.__module__.partition(".")[0]
            # A class outside the package and outside a plugin file is registered by a notebook or a script.
            self._add(name, component, BUILTIN_ORIGIN if package == BUILT_IN else Origin(package, "unversioned"))
            return component

        return add

    def _add(self, name: str, component: type[T], origin: Origin) -> None:
        if not (inspect.isclass(component) and issubclass(component, self.contract)):
            raise BrokenComponent(
                f"{self.name} '{name}' from {origin} is not a {self.contract.__name__}: "
                f"{self.name} components derive from {self.contract.__module__}.{self.contract.__name__}"
            )
        for old, new in RENAMED_METHODS.items():
            if hasattr(component, old) and hasattr(self.contract, new):
                raise BrokenComponent(
                    f"{self.name} '{name}' from {origin} defines {old}(), which is unused: rename it {new}()"
                )
        if self._fault is not None and (sentence := self._fault(component)):
            raise BrokenComponent(f"{self.name} '{name}' from {origin}: {sentence}")
        other = self._members.get((origin.source, name))
        if other is not None and other is not component and not _is_reloaded(other, component):
            raise ClashError(f"{self.name} '{name}' is registered twice in {origin.source}")
        _resolved.clear()  # the name may be ambiguous now, also in choices that have this component as an option
        self._members[origin.source, name] = component
        self._origins[origin.source, name] = origin

    def _remove(self, name: str, origin: Origin) -> None:
        _resolved.clear()
        del self._members[origin.source, name]
        del self._origins[origin.source, name]

    def names(self) -> list[str]:
        """Return the names of all components, plugins included, without importing a plugin."""
        loaded = {name for where, name in self._members if not plugins.is_disabled(where)}
        return sorted(loaded | {point.name for point in plugins.points(self.name)})

    def imported(self) -> list[str]:
        """Return the names of the built-ins that are imported."""
        return sorted(name for where, name in self._members if where == BUILT_IN)

    def find(self, name: str) -> tuple[type[T], Origin]:
        """Return the component called ``name`` and its origin.

        Raises:
            UnknownComponent: if none is installed; the message gives the nearest name and all installed ones.
            ClashError: if two sources offer it; the message gives both qualified names.
            BrokenComponent: if its plugin does not import, needs another vitlab, or does not implement the contract.
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
                f"{self._disabled_hint(source, bare)}"
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
        """Return the component called ``name``; raises as :meth:`find`."""
        return self.find(name)[0]

    def qualify_builtin(self, name: str) -> str:
        """Return the name of a built-in default, qualified as ``vitlab:name`` if a plugin offers the same name.

        A study that relies on a default stays unambiguous after a clashing plugin is installed.
        """
        sources = self._loaded(name) | {
            plugins.source(point) for point in plugins.points(self.name) if point.name == name
        }
        return f"{BUILT_IN}:{name}" if BUILT_IN in sources and len(sources) > 1 else name

    def _loaded(self, bare: str) -> set[str]:
        return {where for where, component in self._members if component == bare and not plugins.is_disabled(where)}

    def _disabled_hint(self, source: str, bare: str) -> str:
        """Return a sentence naming the disabled plugins that offer a missing component; empty if there are none."""
        offered = {plugins.source(point) for point in plugins.offered(self.name) if point.name == bare}
        disabled = [where for where in sorted(offered) if source in ("", where)]
        if not disabled:
            return ""
        verb = "is" if len(disabled) == 1 else "are"
        return f" {' and '.join(disabled)}, which would offer it, {verb} disabled; see {plugins.VARIABLE}."

    def _load(self, point: EntryPoint) -> None:
        origin = Origin(plugins.source(point), plugins.version(point))
        if reason := plugins.refusal(point):
            raise BrokenComponent(f"{self.name} '{point.name}' cannot be used: {reason}")
        try:
            component = point.load()
        except (Exception, SystemExit) as error:  # importing a plugin can raise anything
            raise BrokenComponent(
                f"{self.name} '{point.name}' from {origin} failed to import: {with_frames(error)}"
            ) from error
        self._add(point.name, component, origin)

    def options(self, component: type[T]) -> type[BaseModel]:
        """Return the pydantic model of a component's options, derived from its signature."""
        if component not in self._options:
            self._options[component] = options_of(component, self.shared or Options)
        return self._options[component]

    def resolve(self, choice: Choice | str | Mapping[str, Any] | Sequence[Any]) -> ResolvedChoice:
        """Find the component and complete its options, nested choices included.

        If the component has a class method ``complete(options)``, it expands shorthands first; for example, a named
        size of a model becomes its dimensions.

        Raises:
            OptionError: if options are wrong; it carries every fault with its path inside the choice.
            BrokenComponent: see :meth:`find`.
        """
        if isinstance(choice, ResolvedChoice) and choice.slot == self.name:
            return choice
        if isinstance(choice, list | tuple):
            return self._resolve_list(choice)
        try:
            choice = Choice.of(choice)
        except ValueError as error:
            raise OptionError([((), str(error))]) from None
        key = self._key(choice)
        if key in _resolved:
            return _resolved[key]
        try:
            component, origin = self.find(choice.type)
        except (UnknownComponent, ClashError) as error:
            if choice.type == TOGETHER and PARTS in choice.options:
                sentence = f"one {self.name} belongs here, found a list of {len(choice.options[PARTS])}"
                raise OptionError([((), sentence)]) from None
            raise OptionError([(("type",), str(error))]) from None
        model = self.options(component)
        options = dict(getattr(component, "complete", dict)(choice.options))
        if origin.source == BUILT_IN:
            options = {**clashing_defaults(model), **options}
        collected = collect(model, options, partial(faults_of, who=f"{self.name} '{choice.type}'", model=model))
        result = None
        if collected.value is not None:
            values = {name: getattr(collected.value, name) for name in type(collected.value).model_fields}
            result = ResolvedChoice(choice.type, values, slot=self.name, component=component, origin=origin)
        if collected.faults:
            wrong = {path[0] for path in collected.removed if path[0] in model.model_fields}
            faults = [(fault.path, fault.message) for fault in collected.faults]
            raise OptionError(faults, result, wrong)
        assert result is not None
        if key is not None:
            if len(_resolved) >= MAX_RESOLVED:
                _resolved.clear()
            _resolved[key] = result
        return result

    def _key(self, choice: Choice) -> tuple[str, str, bytes, str, int] | None:
        """Return the key of a choice in the cache; None if an option is no plain value."""
        try:
            options = marshal.dumps(dict(choice.options), 2)  # tells types apart; version 2 writes equal values equally
        except ValueError:
            return None
        return self.name, choice.type, options, plugins.disabled(), imports.reloads()

    def _resolve_list(self, parts: Sequence[Any]) -> ResolvedChoice:
        """Resolve a list in the place of a choice; the paths of faults begin with an index in the list."""
        try:
            return self.resolve(Choice.of(parts))
        except OptionError as error:
            if len(parts) == 1:
                raise OptionError([((0, *path), sentence) for path, sentence in error.faults]) from None
            shorter = [(path[1:] if path[:1] == (PARTS,) else path, sentence) for path, sentence in error.faults]
            raise OptionError(shorter) from None

    def build(self, choice: Choice | str | Mapping[str, Any] | Sequence[Any], *context: Any) -> T:
        """Construct the component of a choice; ``context`` holds its positional arguments.

        Raises:
            OptionError: if the options do not fit.
        """
        full = choice if isinstance(choice, ResolvedChoice) else self.resolve(choice)
        shared = set(self.shared.model_fields) if self.shared else set()
        own = {name: value for name, value in full.options.items() if name not in shared}
        return typing.cast(T, full.component(*context, **own))


def _is_reloaded(old: type[Any], new: Any) -> bool:
    """Return whether ``new`` replaces ``old`` because their module was reloaded."""
    last = imports.last_import(old.__module__)
    names = (old.__module__, old.__qualname__)
    return (
        last is not None
        and last.reloaded
        and names == (getattr(new, "__module__", ""), getattr(new, "__qualname__", ""))
    )
