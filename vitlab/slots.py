"""Slots: the places of an experiment that are filled by name, and who fills them.

A slot stands in one module together with its contract and its built-in components, so nobody can hold the slot without
holding its members::

    position = Slot("position", Position)

    @position.register("rope2d")
    class RoPE2D(Position):
        def __init__(self, g: Geometry, *, theta: Annotated[float, Field(gt=0)] = 100.0) -> None: ...

The signature is the schema: what the model knows comes first and positionally, the keyword-only parameters are the
options in YAML, and their annotations, defaults and bounds are all that is ever checked.  An option that is itself a
component is annotated with :class:`Pick`.

Guests are pip packages with an entry point in the group ``vitlab.<slot>``; the entry point's name is the component's.
They are listed without being imported, imported when first used, and never replace a built-in; see
:mod:`vitlab.guests`.  A single file of components can be loaded for one run with :func:`load_file`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, create_model
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from vitlab import guests
from vitlab.errors import BrokenComponent, ClashError, OptionError, Path, UnknownComponent, nearest
from vitlab.spec import Choice
from vitlab.spec.choice import Frozen
from vitlab.spec.sentences import details, sentences

T = TypeVar("T")

ROOMS = {
    "model": "vitlab.models",
    "patch": "vitlab.components.patch",
    "position": "vitlab.components.position",
    "attention": "vitlab.components.attention",
    "mlp": "vitlab.components.mlp",
    "norm": "vitlab.components.norm",
    "head": "vitlab.components.head",
    "init": "vitlab.components.init",
    "dataset": "vitlab.data.datasets",
    "augment": "vitlab.data.augment",
    "optimizer": "vitlab.training.optim",
    "schedule": "vitlab.training.optim",
    "loss": "vitlab.training.losses",
    "metric": "vitlab.training.metrics",
    "executor": "vitlab.executors",
    "tracker": "vitlab.trackers",
}
"""Slot to the module it stands in.  A string, so that naming a slot imports nothing."""

SLOT_MARK = "x-slot"
"""Stands in the JSON Schema of an option that is a choice from a slot."""

BUILT_IN = "vitlab"
"""The source of built-in components, as in ``vitlab:learned``."""


@dataclass(frozen=True)
class Origin:
    """Where a component comes from: a distribution with its version, or a file with a digest of its code."""

    source: str
    version: str

    def __str__(self) -> str:
        return f"{self.source} {self.version}"


@dataclass(frozen=True)
class Entry:
    """One line of ``vitlab list``: a name and its origin, known without importing anything."""

    slot: str
    name: str
    origin: Origin
    target: str  #: ``module:Class``


@dataclass(frozen=True)
class Resolved(Choice):
    """A choice whose component was found and whose options are complete and valid."""

    slot: str = field(kw_only=True)
    component: type = field(kw_only=True, compare=False)
    origin: Origin = field(kw_only=True)

    def parts(self) -> Iterator[Resolved]:
        """This choice and every choice inside its options."""
        yield self
        yield from _choices_in(self.options)

    def hashed(self) -> dict[str, Any]:
        """As :meth:`plain`, without the options marked :class:`Unhashed`; what is built in goes by its bare name."""
        fields = slot(self.slot).options(self.component).model_fields
        kept = {name: value for name, value in self.options.items() if not _unhashed(fields[name].metadata)}
        return {
            "type": self.type.removeprefix(f"{BUILT_IN}:"),
            **{name: _hashed(value) for name, value in kept.items()},
        }


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

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Give a class its name in this slot.  For built-ins and for files; packages use entry points."""

        def add(component: type[T]) -> type[T]:
            if component.__module__ in _loading:
                _FromFile(self, name, component, _loading[component.__module__]).join()
                return component
            package = component.__module__.partition(".")[0]
            if package == BUILT_IN:
                origin = Origin(BUILT_IN, _version())
            else:
                origin = Origin(package, "unversioned")  # a class of a notebook or a script, registered by hand
            self._add(name, component, origin)
            return component

        return add

    def _add(self, name: str, component: type[T], origin: Origin) -> None:
        if not (inspect.isclass(component) and issubclass(component, self.contract)):
            raise BrokenComponent(
                f"{self.name} '{name}' from {origin} is not a {self.contract.__name__}: "
                f"{self.name} components derive from {self.contract.__module__}.{self.contract.__name__}"
            )
        other = self._members.get((origin.source, name))
        if other is not None and other is not component:
            raise ClashError(f"{self.name} '{name}' is registered twice in {origin.source}")
        _bare.clear()  # the name may be ambiguous now, here and in whatever has this component as an option
        self._members[origin.source, name] = component
        self._origins[origin.source, name] = origin

    # -- who is there -----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all components, guests included; imports no guest."""
        loaded = {name for where, name in self._members if not guests.is_disabled(where)}
        return sorted(loaded | {point.name for point in guests.points(self.name)})

    def find(self, name: str) -> tuple[type[T], Origin]:
        """The component called ``name`` and where it comes from.

        Raises:
            UnknownComponent: naming the nearest name and all that are installed.
            ClashError: if two sources offer it, naming both and how to say which.
            BrokenComponent: if its plugin does not import, needs another vitlab, or offers something else than the
                contract.
        """
        source, _, bare = name.rpartition(":")
        points = {guests.source(point): point for point in guests.points(self.name) if point.name == bare}
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
        return self._members[where, bare], self._origins[where, bare]

    def get(self, name: str) -> type[T]:
        """The component called ``name``; raises as :meth:`find`."""
        return self.find(name)[0]

    def own(self, name: str) -> str:
        """What a default of ours is to be called: its name, with ours before it where somebody else offers it too.

        So nobody who installs a clashing guest is asked what a study meant that has not named it.
        """
        others = self._loaded(name) | {guests.source(point) for point in guests.points(self.name) if point.name == name}
        return f"{BUILT_IN}:{name}" if BUILT_IN in others and len(others) > 1 else name

    def _loaded(self, bare: str) -> set[str]:
        return {where for where, known in self._members if known == bare and not guests.is_disabled(where)}

    def _kept_out(self, source: str, bare: str) -> str:
        """A sentence where a name is not there only because its distribution is kept out."""
        offered = {guests.source(point) for point in guests.offered(self.name) if point.name == bare}
        missed = [where for where in sorted(offered) if source in ("", where)]
        if not missed:
            return ""
        verb = "is" if len(missed) == 1 else "are"
        return f" {' and '.join(missed)} would offer it and {verb} kept out: see {guests.VARIABLE}."

    def _load(self, point: EntryPoint) -> None:
        origin = _origin(point)
        if reason := guests.refusal(point):
            raise BrokenComponent(f"{self.name} '{point.name}' cannot be used: {reason}")
        try:
            component = point.load()
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a guest raises while it is imported is what we are here to report
            raise BrokenComponent(
                f"{self.name} '{point.name}' from {origin} failed to import: {error!r}\n{traceback.format_exc()}"
            ) from error
        self._add(point.name, component, origin)

    # -- options ----------------------------------------------------------------------------------------------------

    def options(self, component: type[T]) -> type[BaseModel]:
        """The pydantic model of a component's options, derived from its signature."""
        if component not in self._options:
            shared = self.shared or _Options
            self._options[component] = _options_of(component, shared)
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
        bare = (self.name, choice.type, guests.disabled())
        if not choice.options and bare in _bare:
            return _bare[bare]
        try:
            component, origin = self.find(choice.type)
        except (UnknownComponent, ClashError) as error:
            raise OptionError([(("type",), str(error))]) from None
        model = self.options(component)
        try:
            given = dict(getattr(component, "complete", dict)(choice.options))
            if origin.source == BUILT_IN:
                given = {**_defaults(model), **given}
            options = model.model_validate(given)
        except ValidationError as error:
            raise OptionError(_faults(error, f"{self.name} '{choice.type}'", model)) from None
        values = {name: getattr(options, name) for name in type(options).model_fields}
        resolved = Resolved(choice.type, values, slot=self.name, component=component, origin=origin)
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


class Pick:
    """Marks an option that is a choice from a slot: ``position: Annotated[Choice | str, Pick("position")]``."""

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any) -> Resolved:
            try:
                return slot(self.slot).resolve(value)
            except OptionError as error:
                # One validator can raise one error; the faults travel inside it and are unpacked by _faults.
                raise PydanticCustomError("faults", "{text}", {"text": str(error), "faults": error.faults}) from None

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(lambda choice: choice.plain())
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # Not a $ref: pydantic follows those.  vitlab.schema puts one in its place.
        return {SLOT_MARK: self.slot}


class Unhashed:
    """Marks an option that cannot change a number a trial computes (a path, a cadence): kept out of the trial's key.

    ``root: Annotated[str | None, Unhashed()] = None``
    """


@cache
def slot(name: str) -> Slot[Any]:
    """The slot called ``name``; imports the room it stands in."""
    if name not in ROOMS:
        raise UnknownComponent(f"no slot called '{name}'.{nearest(name, ROOMS)} Slots: {', '.join(ROOMS)}.")
    return typing.cast("Slot[Any]", getattr(importlib.import_module(ROOMS[name]), name))


def listing(name: str) -> list[Entry]:
    """Every component of a slot, without importing any: built-ins are read from the text of their room."""
    if name not in ROOMS:
        raise UnknownComponent(f"no slot called '{name}'.{nearest(name, ROOMS)} Slots: {', '.join(ROOMS)}.")
    built_in = [
        Entry(name, component, Origin(BUILT_IN, _version()), f"{module}:{cls}")
        for module, component, cls in _registered(name)
    ]
    offered = [Entry(name, point.name, _origin(point), point.value) for point in guests.points(name)]
    files = [
        Entry(name, known.name, known.origin, f"{known.component.__module__}:{known.component.__qualname__}")
        for known in _from_files
        if known.slot.name == name
    ]
    return sorted(built_in + offered + files, key=lambda entry: (entry.name, str(entry.origin)))


def load_file(file: FilePath | str) -> Origin:
    """Run a Python file that registers components, for this process.

    A file whose code has not changed is run once; one that was edited is run again, and its components replace those it
    registered before.  A file that fails leaves everything as it was.

    Raises:
        BrokenComponent: if it is not there or fails, with its traceback.
        ClashError: if it registers what another file of that name has registered.
    """
    path = FilePath(file).resolve()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BrokenComponent(f"plugin file {file}: {error.strerror}") from None
    digest = _digest(text)
    origin = Origin(path.name, digest)
    if _files.get(path) == origin:
        return origin
    name = f"vitlab_file_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BrokenComponent(f"plugin file {file}: the name of a Python file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    replaced = [known for known in _from_files if known.origin == _files.get(path)]
    for known in replaced:
        known.leave()
    kept = len(_from_files)
    _loading[name] = origin
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        for new in _from_files[kept:]:
            new.leave()
        for known in replaced:
            known.join()
        if not isinstance(error, Exception | SystemExit) or isinstance(error, BrokenComponent | ClashError):
            raise
        # whatever else a guest raises while it is run is what we are here to report
        raise BrokenComponent(f"plugin file {file} failed: {error!r}\n{traceback.format_exc()}") from error
    finally:
        del _loading[name]
    _files[path] = origin
    return origin


# -- how it is done ---------------------------------------------------------------------------------------------------


def _digest(text: bytes) -> str:
    """Of the syntax tree, which a comment does not change; of the text of what has none."""
    with suppress(SyntaxError, ValueError):
        text = ast.dump(ast.parse(text)).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclass(frozen=True)
class _FromFile:
    """A component that a file has registered."""

    slot: Slot[Any]
    name: str
    component: type
    origin: Origin

    def join(self) -> None:
        self.slot._add(self.name, self.component, self.origin)
        _from_files.append(self)

    def leave(self) -> None:
        _bare.clear()
        del self.slot._members[self.origin.source, self.name]
        del self.slot._origins[self.origin.source, self.name]
        _from_files.remove(self)


_loading: dict[str, Origin] = {}  # module to origin, while a file runs
_files: dict[FilePath, Origin] = {}
_from_files: list[_FromFile] = []
_bare: dict[tuple[str, str, str], Resolved] = {}
"""Choices without options, which most are, resolved once: slot, name, and which guests are kept out."""


class _Options(Frozen):
    model_config = ConfigDict(arbitrary_types_allowed=True)


def _options_of(component: type, base: type[BaseModel]) -> type[BaseModel]:
    """A pydantic model of the keyword-only parameters of ``component``'s constructor."""
    constructor: Callable[..., None] = component.__init__  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(constructor, include_extras=True)
    except Exception as error:  # whatever a guest wrote there, such as a name imported for type checkers alone
        raise BrokenComponent(f"{component.__qualname__}: its annotations cannot be read: {error!r}") from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and constructor is not object.__init__:
            raise BrokenComponent(f"{component.__qualname__}: an option must be named, **{name} is not one")
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if name.startswith("_") or name == "type":
            raise BrokenComponent(f"{component.__qualname__}: no option can be called '{name}'")
        if name not in hints:
            raise BrokenComponent(f"{component.__qualname__}: option '{name}' needs an annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], default)
    model = create_model(component.__name__, __base__=(base,), **fields)
    model.model_config["validate_default"] = True
    model.model_rebuild(force=True)
    return model


def _defaults(model: type[BaseModel]) -> dict[str, str]:
    """The defaults that are choices, where their names alone would not do."""
    found = {}
    for name, info in model.model_fields.items():
        for mark in info.metadata:
            if isinstance(mark, Pick) and isinstance(info.default, str):
                called = slot(mark.slot).own(info.default)
                if called != info.default:
                    found[name] = called
    return found


def _faults(error: ValidationError, who: str, model: type[BaseModel]) -> list[tuple[Path, str]]:
    faults: list[tuple[Path, str]] = []
    for detail, (path, text) in zip(details(error), sentences(error, model.model_fields), strict=True):
        if detail["type"] == "faults":
            faults += [((*path, *inner), sentence) for inner, sentence in detail["ctx"]["faults"]]
        elif detail["type"] == "extra_forbidden" and len(path) == 1:
            names = list(model.model_fields)
            options = f"Options: {', '.join(names)}." if names else "It has no options."
            faults.append((path, f"{who} has no option '{path[-1]}'.{nearest(str(path[-1]), names)} {options}"))
        else:
            faults.append((path, f"{who}: {text}"))
    return faults


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


def _origin(point: EntryPoint) -> Origin:
    return Origin(guests.source(point), guests.version(point))


def _version() -> str:
    from vitlab import __version__

    return __version__


@cache
def _registered(slot_name: str) -> tuple[tuple[str, str, str], ...]:
    """(module, component, class) for each ``@<slot>.register("name")`` in the text of the slot's room."""
    found = []
    for module, text in _texts(ROOMS[slot_name]):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id=name), attr="register"),
                        args=[ast.Constant(value=str(known))],
                    ) if name == slot_name:
                        found.append((module, known, node.name))
    return tuple(found)


def _texts(room: str) -> Iterator[tuple[str, str]]:
    """The modules of a room and their text; a room is a module, or a package with one module per component."""
    root = FilePath(__file__).parent.joinpath(*room.split(".")[1:])
    files = sorted(root.glob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    for file in files:
        suffix = "" if file.stem == "__init__" or not root.is_dir() else f".{file.stem}"
        yield room + suffix, file.read_text(encoding="utf-8")
