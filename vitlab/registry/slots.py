"""The slot class: registration, lookup, validation and construction of the components of one axis; their catalogue."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from vitlab.errors import BrokenComponent, ClashError, OptionError, UnknownComponent, closest, nearest
from vitlab.imports import import_object
from vitlab.registry import plugins
from vitlab.registry.options import Options, ResolvedChoice, option_names, options_model
from vitlab.registry.plugins import place_of_class, sentence_with_place
from vitlab.registry.slot_modules import (
    BUILT_IN,
    BUILTIN_ORIGIN,
    SLOT_MODULES,
    Origin,
    built_ins,
    import_slot,
    slot_module_name,
)
from vitlab.spec.choice import PARTS, SLOT_MARK, TOGETHER, Choice, choice_core_schema
from vitlab.spec.mistakes import NESTED, collect_mistakes, foreign_model_hint
from vitlab.spec.tree import Tree

T = TypeVar("T")
Written = Choice | str | Tree | Sequence[Any]  #: forms of a choice in a study file
UNVERSIONED = "unversioned"
"""Version of a component that a notebook, a script or an imported module has registered, for this process alone."""

_slots: list[Slot[Any]] = []  # all slots that are imported


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
        fault: Callable[[type[T]], str | None] = lambda component: None,
    ) -> None:
        self.name = name
        self.contract = contract
        self.shared = shared
        self.components: dict[tuple[str, str], tuple[type[T], Origin]] = {}
        """The imported components, by source and name."""
        self._fault = fault
        _slots.append(self)

    # -- registration -------------------------------------------------------------------------------------------------

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Register a class under a name in this slot, for built-ins and files; packages use entry points."""

        def register(component: type[T]) -> type[T]:
            package = component.__module__.partition(".")[0]
            if file := plugins.files.get(component.__module__):
                origin = file.origin
            else:  # of vitlab, or of a notebook or script
                origin = BUILTIN_ORIGIN if package == BUILT_IN else Origin(package, UNVERSIONED)
            self.add_component(name, component, origin)
            return component

        return register

    def add_component(self, name: str, component: type[T], origin: Origin) -> None:
        """Add a component.

        Raises:
            BrokenComponent: if it does not implement the contract.
            ClashError: if its source has registered another class under this name.
        """
        if sentence := self._declaration_mistake(component):
            raise BrokenComponent(f"{self.name} '{name}' ({place_of_class(component)}){sentence}")
        # A module that is imported again, as in a notebook, registers its classes a second time.
        other, _ = self.components.get((origin.source, name), (component, origin))
        if not _may_replace(component, other):
            raise ClashError(f"{self.name} '{name}' is registered twice in {origin.source}")
        self.components[origin.source, name] = component, origin

    def _declaration_mistake(self, component: type[T]) -> str | None:
        """Return what is wrong with what a class declares, as the end of a sentence; None if nothing is."""
        if not (inspect.isclass(component) and issubclass(component, self.contract)):
            contract = self.contract.__name__
            base = contract.replace("Tracker", "Replay")
            return f" is no {contract}: {self.name} components derive from vitlab.plugin.{base}"
        for option in sorted(set(self.shared.model_fields if self.shared else ()) & set(option_names(component))):
            return f": option '{option}' is one of every {self.name}; rename it"
        sentence = _method_mistake(component, self.contract) or self._fault(component)
        return sentence and f": {sentence}"

    # -- lookup -------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all components, plugins included, without importing any."""
        return sorted({entry.name for entry in _list_components(self.name)})

    def find(self, name: str) -> tuple[type[T], Origin]:
        """Return the component called ``name`` and its origin.

        Raises:
            UnknownComponent: if none is installed; the message gives the nearest name and all installed ones.
            ClashError: if two sources offer it; the message gives both qualified names.
            BrokenComponent: if its plugin does not import, needs another vitlab, or does not implement the contract.
        """
        # The name of a plugin file may hold a colon, that of a component none.
        source, _, bare = name.rpartition(":")
        sources = self._sources_offering(bare)
        if source:
            sources = {where: point for where, point in sources.items() if where == source}
        if not sources:
            names = self.names()
            alike = " or ".join(f"'{each}'" for each in names if bare and bare in each)
            near = nearest(bare, names) or (f" Did you mean {alike}?" if alike else "")
            hint = foreign_model_hint(name) or near
            for file in dict.fromkeys(file.origin.source for file in plugins.files.values()):
                own = ", ".join(own for source, own in self.components if source == file)
                hint += f" {file} registers {own or 'nothing'} as {self.name}; @{self.name}.register('{bare}') adds it."
            hint = (
                hint
                or " If a file defines it, add --plugin FILE; in Python, import the file, or add plugins=['FILE']. "
                "If a package does, install it."
            )
            raise UnknownComponent(f"no {self.name} called '{name}'.{hint} Installed: {', '.join(names) or 'none'}.")
        if len(sources) > 1:
            qualified = " or ".join(f"'{where}:{bare}'" for where in sorted(sources))
            raise ClashError(f"{self.name} '{bare}' is offered by {' and '.join(sorted(sources))}; write {qualified}.")
        [(where, point)] = sources.items()
        if (where, bare) not in self.components:
            if point is None:
                # Taken from the module rather than from what its import registers, which happens once per process.
                place = built_ins(self.name)[bare]
                self.add_component(bare, import_object(place.module, place.cls), BUILTIN_ORIGIN)
            else:
                self._load_entry_point(point)
        component, origin = self.components[where, bare]
        # A notebook may have reloaded the module since; in a file, another class may have the same name.
        current = getattr(sys.modules.get(component.__module__), component.__qualname__, component)
        in_file = component.__module__ in plugins.files
        if current is not component and not in_file and _may_replace(current, component):
            self.add_component(bare, current, origin)
        return self.components[where, bare]

    def get(self, name: str) -> type[T]:
        """Return the component called ``name``; raises as :meth:`find`."""
        return self.find(name)[0]

    def qualify_builtin(self, name: str) -> str:
        """Return the name of a built-in default, qualified as ``vitlab:name`` if a plugin offers the same name.

        A study that relies on a default stays unambiguous after a clashing plugin is installed.
        """
        sources = self._sources_offering(name)
        return f"{BUILT_IN}:{name}" if BUILT_IN in sources and len(sources) > 1 else name

    def _sources_offering(self, bare: str) -> dict[str, EntryPoint | None]:
        """Return the sources that offer a name, each with the entry point that it is imported by, if it has one."""
        own = [BUILT_IN] * (bare in built_ins(self.name)) + [source for source, name in self.components if name == bare]
        points = {plugins.dist_name(point): point for point in plugins.slot_points(self.name) if point.name == bare}
        return {**dict.fromkeys(own), **points}

    def _load_entry_point(self, point: EntryPoint) -> None:
        origin = plugins.dist_origin(point)
        if reason := plugins.why_unusable(point.dist):
            raise BrokenComponent(f"{self.name} '{point.name}' cannot be used: {reason}")
        try:
            component = point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin can raise anything
            advice = "" if plugins.find_plugin_frame(error) else "; reinstall it after editing its entry points"
            raise BrokenComponent(
                f"{self.name} '{point.name}' from {origin} failed to import: {sentence_with_place(error)}{advice}"
            ) from error
        self.add_component(point.name, component, origin)

    # -- choices ------------------------------------------------------------------------------------------------------

    def options(self, component: type[Any]) -> type[BaseModel]:
        """Return the pydantic model of a component's options, derived from its signature."""
        return options_model(component, self.shared or Options)  # type: ignore[arg-type]  # a type has a hash

    def resolve_choice(self, choice: Written) -> ResolvedChoice:
        """Find the component and complete its options, nested choices included.

        If the component has a class method ``complete(options)``, it expands shorthands first; for example, a named
        size of a model becomes its dimensions.

        Raises:
            OptionError: if options are wrong; it carries every fault with its path inside the choice.
            BrokenComponent: see :meth:`find`.
        """
        if isinstance(choice, ResolvedChoice) and choice.slot == self.name:
            return choice  # of a spec that has been resolved before
        try:
            parsed = Choice.parse(choice)
        except ValueError as error:
            raise OptionError([((), f"{error}. Installed: {', '.join(self.names())}.")]) from None
        try:
            return self._resolve(parsed)
        except OptionError as error:
            if not isinstance(choice, list | tuple):
                raise
            # The paths of faults in a list begin with an index in the list.
            raise OptionError(
                [
                    ((0, *path) if len(choice) == 1 else path[1:] if path[:1] == (PARTS,) else path, sentence)
                    for path, sentence in error.faults
                ]
            ) from None

    def _resolve(self, choice: Choice) -> ResolvedChoice:
        try:
            component, origin = self.find(choice.type)
        except (UnknownComponent, ClashError) as error:
            if choice.type == TOGETHER and PARTS in choice.options:
                raise OptionError(
                    [((), f"one {self.name} belongs here, found a list of {len(choice.options[PARTS])}")]
                ) from None
            guess = self._check_as_nearest(choice)
            faults = [(("type",), str(error)), *guess.faults]
            raise OptionError(faults, guess.sound, wrong={"type", *guess.wrong}) from None
        model = self.options(component)
        options = dict(getattr(component, "complete", dict)(choice.options))
        # The default of a built-in stays what it is after a plugin with a component of that name is installed: it is
        # written as vitlab:NAME then.
        if origin.source == BUILT_IN:
            options |= {
                name: slot(mark.slot).qualify_builtin(info.default)
                for name, info in model.model_fields.items()
                if name not in options
                for mark in info.metadata
                if isinstance(mark, Pick) and isinstance(info.default, str)
            }
        collected = collect_mistakes(model, options, who=f"{self.name} '{choice.type}'")
        by_default = {name for name, info in model.model_fields.items() if not info.is_required()} - options.keys()
        result = None
        if collected.value is not None:
            result = ResolvedChoice(
                choice.type,
                dict(collected.value),
                slot=self.name,
                component=component,
                fields=model.model_fields,
                origin=origin,
            )
        if collected.mistakes:
            # What could be read is passed on, so that mistakes elsewhere in the file are found in the same run.
            # What is under a guessed name may belong elsewhere, and is wrong, too.
            names = {path[0] for path in (*collected.removed, *collected.written)}
            wrong = (names | {mistake.rename or "" for mistake in collected.mistakes}) & model.model_fields.keys()
            faults = []
            for mistake in collected.mistakes:
                path, message = mistake.path, mistake.message
                if by_default.intersection(path[:1]):  # the study does not mention it
                    message = f"{place_of_class(component)}: the default of '{path[0]}': {message}"
                faults.append((path, message))
            raise OptionError(faults, result, wrong)
        assert result is not None
        return result

    def check_choice(self, choice: Written) -> OptionError:
        """Return the mistakes of :meth:`resolve_choice`, none if the choice is sound, with the sound choice."""
        try:
            return OptionError([], self.resolve_choice(choice))
        except OptionError as error:
            return error

    def _check_as_nearest(self, choice: Choice) -> OptionError:
        """Return the mistakes of the options of a misspelt component, as options of the one that is meant.

        That differs in case, or is the only one that is one edit away, and has the same digits.
        """
        # Not those of plugins that are not imported, which may be broken.
        known = {*built_ins(self.name), *(one for _, one in self.components)}
        lower = choice.type.casefold()  # of which one letter, or the order of two, is wrong
        length = len(lower)
        near = get_close_matches(lower, known, n=2, cutoff=max(0.6, 1 - 1.01 / (length or 1)))
        meant = closest(choice.type, self.names()) or ""  # perhaps by a synonym
        if (
            meant != choice.type  # as of a name that two plugins offer
            and (near == [meant] or meant == lower)
            and abs(len(meant) - length) < 2
            and re.findall(r"\d", meant) == re.findall(r"\d", lower)
        ):
            with suppress(BrokenComponent):  # by one of the options
                return self.check_choice(Choice(meant, choice.options))
        return OptionError([])

    def build(self, choice: Written, *context: Any) -> T:
        """Construct the component of a choice; ``context`` holds its positional arguments.

        Raises:
            OptionError: if the options do not fit.
        """
        full = self.resolve_choice(choice)
        # The package of the slot reads the shared options; constructors do not know them.
        shared = self.shared.model_fields if self.shared else ()
        own = {name: value for name, value in full.options.items() if name not in shared}
        try:
            return typing.cast(T, full.component(*context, **own))
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:
                raise  # by the constructor, which has begun
            types = "".join(f", {type(each).__name__}" for each in context)
            raise BrokenComponent(
                f"{place_of_class(full.component)}: {error}; write __init__(self{types}, *, OPTION: TYPE = DEFAULT)"
            ) from error


@cache
def slot(name: str) -> Slot[Any]:
    """Import and return the slot called ``name``.

    Raises:
        UnknownComponent: if no slot has that name; the message gives the nearest name and all slots.
    """
    return typing.cast("Slot[Any]", getattr(import_slot(name), name))


def remove_origin(origin: Origin) -> None:
    """Remove the components of an origin from all slots."""
    for each in _slots:
        for key in [key for key, (_, other) in each.components.items() if other == origin]:
            del each.components[key]


class Pick:
    """Mark of an option that is a choice from a slot: ``position: Annotated[Choice | str, Pick("position")]``."""

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any) -> ResolvedChoice:
            try:
                return slot(self.slot).resolve_choice(value)
            except OptionError as error:
                # A validator can raise only one error, so it carries all mistakes.
                raise PydanticCustomError(NESTED, "{text}", {"text": str(error), NESTED: error.faults}) from None

        return choice_core_schema(validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # Not a $ref, which pydantic would follow; vitlab.cli.show replaces the mark by one.
        return {SLOT_MARK: self.slot}


def is_choice(info: FieldInfo) -> bool:
    """Return whether an option is a choice from a slot, or a list of them."""
    return any(isinstance(mark, Pick) for mark in info.metadata) or _has_pick(info.annotation)


def _has_pick(annotation: Any) -> bool:
    return any(isinstance(part, Pick) or _has_pick(part) for part in typing.get_args(annotation))


def _method_mistake(component: type[Any], contract: type[Any]) -> str | None:
    """Return which methods a class lacks, or has with other parameters, as a sentence; None if there are none."""
    missing = []
    for name, method in vars(contract).items():
        if not inspect.isfunction(method) or name == "__init__":
            continue
        own, parameters = inspect.getattr_static(component, name), inspect.signature(method).parameters.values()
        required = [each for each in parameters if each.default is each.empty and each.kind is not each.KEYWORD_ONLY]
        call = f"{name}({', '.join(each.name for each in required)})"
        if getattr(own, "__isabstractmethod__", False):
            missing.append(call)
            continue
        try:
            with suppress(ValueError):  # of a function in C, which has no signature
                given = required[isinstance(own, staticmethod | classmethod) :]
                inspect.signature(getattr(component, name)).bind_partial(*given)
        except TypeError:
            return f"define its method {call}, with these parameters"
    return f"define {', '.join(missing)}, which the class lacks" if missing else None


def _may_replace(new: type[Any], old: type[Any]) -> bool:
    """Return whether a class may take the place of another: it is the same, or comes from a reload of its module.

    A class that a notebook defines again does not, because its code has no digest that changes with it.
    """
    names = [(item.__module__, item.__qualname__) for item in (new, old)]
    return new is old or (inspect.isclass(new) and names[0] == names[1] and old.__module__ != "__main__")


# -- catalogue --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One component of ``vitlab list``, read without importing it."""

    slot: str
    name: str
    origin: Origin
    target: str  #: ``module:Class``
    summary: str = ""  #: the first line of its documentation; empty for plugins, which are not imported


def list_entries(name: str | None = None) -> list[Entry]:
    """Return every component of a slot, or of all slots, without importing any.

    Raises:
        UnknownComponent: if no slot has that name.
    """
    if name is None:
        return [entry for each in SLOT_MODULES for entry in list_entries(each)]
    slot_module_name(name)  # raises for a name that no slot has
    return sorted(_list_components(name), key=lambda entry: (entry.name, str(entry.origin)))


def _list_components(slot: str) -> list[Entry]:
    """Return the components of a slot: built-ins, those of installed plugins, and those that a file has registered."""
    entries = [
        Entry(slot, component, BUILTIN_ORIGIN, f"{place.module}:{place.cls}", without_markup(place.summary))
        for component, place in built_ins(slot).items()
    ]
    for point in plugins.slot_points(slot):
        entries.append(Entry(slot, point.name, plugins.dist_origin(point), point.value))
    known = {(entry.origin.source, entry.name) for entry in entries}
    for each in _slots:
        for (source, name), (cls, origin) in each.components.items():
            if each.name == slot and (source, name) not in known:
                target = f"{cls.__module__}:{cls.__qualname__}"
                entries.append(Entry(slot, name, origin, target, first_line(inspect.getdoc(cls))))
    return entries


def first_line(documentation: str | None) -> str:
    """Return the first line of a docstring."""
    return without_markup((documentation or "").partition("\n")[0])


def without_markup(documentation: str) -> str:
    """Return a docstring without the markup of reStructuredText, such as roles."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", documentation).replace("``", "`")
