"""Options: the keyword-only parameters of a constructor as a pydantic model, validated choices, and errors."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from vitlab.errors import BrokenComponent, OptionError, nearest
from vitlab.registry.slot_modules import BUILT_IN, Origin, slot
from vitlab.spec.choice import Choice, Frozen, plain_values
from vitlab.spec.collect import Fault
from vitlab.spec.sentences import details, fault

SLOT_MARK = "x-slot"
"""Key in the JSON Schema of an option that is a choice from a slot."""

FAULTS = "faults"  #: the type of the pydantic error that carries the faults of a nested choice


class Pick:
    """Mark of an option that is a choice from a slot: ``position: Annotated[Choice | str, Pick("position")]``."""

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any) -> ResolvedChoice:
            try:
                return slot(self.slot).resolve(value)
            except OptionError as error:
                # A validator can raise only one error, so it carries all faults; faults_of unpacks them.
                raise PydanticCustomError(FAULTS, "{text}", {"text": str(error), FAULTS: error.faults}) from None

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(lambda choice: choice.plain())
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # Not a $ref, which pydantic would follow; vitlab.registry.json_schema replaces the mark by one.
        return {SLOT_MARK: self.slot}


class Unhashed:
    """Mark of an option that cannot change a trial's numbers, such as a path; the trial's key leaves it out.

    ``root: Annotated[str | None, Unhashed()] = None``
    """


class Options(Frozen):
    """The base model of options in a slot without shared options."""

    model_config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)


def options_of(component: type, base: type[BaseModel]) -> type[BaseModel]:
    """Return a pydantic model of the keyword-only parameters of ``component``'s constructor.

    Raises:
        BrokenComponent: if a parameter cannot be an option; the message names it and the reason.
    """
    constructor: Callable[..., None] = component.__init__  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(constructor, include_extras=True)
    except Exception as error:  # a plugin's annotation may name anything, such as an import for type checkers only
        raise BrokenComponent(f"{component.__qualname__}: its annotations cannot be read: {error!r}") from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and constructor is not object.__init__:
            raise BrokenComponent(f"{component.__qualname__}: replace **{name} by options with names")
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if name.startswith("_") or name == "type":
            raise BrokenComponent(
                f"{component.__qualname__}: rename option '{name}'; 'type' and names with a leading '_' are reserved"
            )
        if name not in hints:
            raise BrokenComponent(f"{component.__qualname__}: option '{name}' needs an annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], default)
    model = create_model(component.__name__, __base__=(base,), **fields)
    model.model_config["validate_default"] = True
    model.model_rebuild(force=True)
    return model


def clashing_defaults(model: type[BaseModel]) -> dict[str, str]:
    """Return the default of each option whose default names a built-in that a plugin offers too, as ``vitlab:NAME``.

    The keys are names of options.
    """
    defaults = {}
    for name, info in model.model_fields.items():
        for mark in info.metadata:
            if isinstance(mark, Pick) and isinstance(info.default, str):
                qualified = slot(mark.slot).qualify_builtin(info.default)
                if qualified != info.default:
                    defaults[name] = qualified
    return defaults


def is_choice(info: FieldInfo) -> bool:
    """Return whether an option is a choice from a slot, or a list of them."""
    return any(isinstance(mark, Pick) for mark in info.metadata) or _picks(info.annotation)


def _picks(annotation: Any) -> bool:
    arguments = typing.get_args(annotation)
    return any(isinstance(part, Pick) or _picks(part) for part in arguments)


def faults_of(error: ValidationError, who: str, model: type[BaseModel]) -> list[Fault]:
    """Return every fault in the options of ``who``, nested choices included, each with its path inside them."""
    faults: list[Fault] = []
    for detail in details(error):
        translated = fault(detail, model.model_fields)
        if detail["type"] == FAULTS:
            nested = detail["ctx"][FAULTS]
            faults += [
                Fault((*translated.path, *inner), sentence, FAULTS, within=translated.path)
                for inner, sentence in nested
            ]
        elif detail["type"] == "extra_forbidden" and len(translated.path) == 1:
            names, name = list(model.model_fields), str(translated.path[-1])
            options = f"Options: {', '.join(names)}." if names else "It has no options."
            faults.append(replace(translated, message=f"{who} has no option '{name}'.{nearest(name, names)} {options}"))
        else:
            faults.append(replace(translated, message=f"{who}: {translated.message}"))
    return faults


@dataclass(frozen=True)
class ResolvedChoice(Choice):
    """A choice with its component class and complete, validated options."""

    slot: str = field(kw_only=True)
    component: type = field(kw_only=True, compare=False)
    origin: Origin = field(kw_only=True)

    def parts(self) -> Iterator[ResolvedChoice]:
        """Yield this choice and every choice nested in its options."""
        yield self
        yield from _choices_in(self.options)

    def plain(self) -> dict[str, Any]:
        """Return the long form in plain JSON values."""
        return {"type": self.type, **{name: plain_values(value) for name, value in self.options.items()}}

    def hashed(self) -> dict[str, Any]:
        """Return :meth:`plain` as keys contain it.

        A built-in has its bare name.  Options marked :class:`Unhashed` and options at their default are left out:
        an option that is added later changes no key, and a default that is changed changes the code digest.
        """
        fields = slot(self.slot).options(self.component).model_fields
        is_builtin = self.origin.source == BUILT_IN
        options = {name: value for name, value in self.options.items() if not _is_unhashed(fields[name])}
        return {
            "type": self.type.removeprefix(f"{BUILT_IN}:") if is_builtin else self.type,
            **{name: _hashed(value) for name, value in options.items() if not _is_default(value, fields[name])},
        }


def _choices_in(value: Any) -> Iterator[ResolvedChoice]:
    """Yield the choices in an option's value and those nested in their options."""
    if isinstance(value, ResolvedChoice):
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


def _is_unhashed(info: FieldInfo) -> bool:
    return any(isinstance(mark, Unhashed) or mark is Unhashed for mark in info.metadata)


def _is_default(value: Any, info: FieldInfo) -> bool:
    """Return whether an option has its default."""
    default = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, ResolvedChoice) and isinstance(default, str):
        choices = slot(value.slot)
        default = choices.resolve(choices.qualify_builtin(default))
    return isinstance(value, bool) == isinstance(default, bool) and bool(_hashed(value) == _hashed(default))


def _hashed(value: Any) -> Any:
    """Return an option's value as keys contain it."""
    if isinstance(value, ResolvedChoice):
        return value.hashed()
    if isinstance(value, BaseModel):
        fields = {name: (getattr(value, name), info) for name, info in type(value).model_fields.items()}
        return {name: _hashed(item) for name, (item, info) in fields.items() if not _is_default(item, info)}
    if isinstance(value, Mapping):
        return {name: _hashed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hashed(item) for item in value]
    return plain_values(value)
