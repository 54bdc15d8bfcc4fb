"""Options: the keyword-only parameters of a constructor as a pydantic model, validated choices, and errors."""

from __future__ import annotations

import inspect
import os
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from vitlab.errors import BrokenComponent, UserError, closest, one_line
from vitlab.registry.plugins import place_of_class
from vitlab.registry.slot_modules import BUILT_IN, Origin, import_slot
from vitlab.spec.choice import Choice, Frozen
from vitlab.spec.mistakes import collect_mistakes, foreign_option_hint
from vitlab.spec.tree import NewTree, Tree, Values

P = ParamSpec("P")
R = TypeVar("R")


class Unhashed:
    """Mark of an option that cannot change a trial's numbers, such as a path; the trial's key leaves it out.

    ``root: Annotated[str | None, Unhashed()] = None``
    """


class Options(Frozen):
    """The base model of options in a slot without shared options."""

    model_config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)


def option_names(component: type) -> list[str]:
    """Return the keyword-only parameters of a component's constructor."""
    parameters = inspect.signature(component.__init__).parameters.values()  # type: ignore[misc]
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def documented_arguments(component: type) -> dict[str, str]:
    """Return the documentation of the constructor arguments of a class, inherited ones included."""
    meanings: dict[str, str] = {}
    for base in reversed(component.__mro__):  # an argument that a subclass documents again has its words
        for documented in (base, vars(base).get("__init__")):
            meanings |= parse_docstring_args(inspect.cleandoc(getattr(documented, "__doc__", None) or ""))
    return meanings


def parse_docstring_args(text: str) -> dict[str, str]:
    """Return the entries of a docstring's ``Args:`` section."""
    _, _, section = text.partition("Args:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    entries = re.findall(r"(?ms)^    (\w+): (.*?)(?=^    \w+: |\Z)", section)
    return {name: one_line(meaning) for name, meaning in entries}


@cache
def options_model(component: type, base: type[BaseModel]) -> type[BaseModel]:
    """Return a pydantic model of the keyword-only parameters of ``component``'s constructor.

    Raises:
        BrokenComponent: if a parameter cannot be an option; the message names it and the reason.
    """
    constructor: Callable[..., None] = component.__init__  # type: ignore[misc]

    def refusal(sentence: str) -> BrokenComponent:
        return BrokenComponent(f"{place_of_class(component)}: {component.__qualname__}: {sentence}")

    try:
        hints = typing.get_type_hints(constructor, include_extras=True)
    except Exception as error:  # a plugin's annotation may name anything, such as an import for type checkers only
        raise refusal(f"its annotations cannot be read: {error!r}") from error
    fields: dict[str, Any] = {}
    meanings = documented_arguments(
        component
    )  # become descriptions in the JSON Schema, for editors and ``vitlab show``
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and constructor is not object.__init__:
            raise refusal(f"replace **{name} by options with names")
        if parameter.kind is not parameter.KEYWORD_ONLY:
            if parameter.default is not parameter.empty:
                raise refusal(
                    f"write '*, ' before '{name}' in __init__: options are keyword-only, such as *, {name}: int = 1"
                )
            continue
        # A study file writes the name of the component as ``type``, beside its options.
        if name.startswith("_") or name in ("type", "training"):  # the latter is an attribute of every torch module
            raise refusal(
                f"rename option '{name}': 'type' is the component's name in a study, 'training' an attribute of every "
                "torch module, and a leading '_' marks what is private"
            )
        if name not in hints:
            raise refusal(f"option '{name}' needs an annotation, such as {name}: float")
        fields[name] = (
            hints[name],
            Field(
                ... if parameter.default is parameter.empty else parameter.default,
                description=meanings.get(name),
            ),
        )
    return create_model(
        component.__name__,
        __base__=(base,),
        # Defaults are validated like values, so that a choice among them is resolved, too.  The class has no source
        # text, for which pydantic would search the files of all imported modules.
        __cls_kwargs__={"validate_default": True, "use_attribute_docstrings": False},
        **fields,
    )


def check_arguments(*, unchecked: Collection[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a public function raise UserError, with every mistake, for arguments of wrong names or types.

    Args:
        unchecked: arguments whose values the function checks itself, with others of its mistakes.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(function), f"vitlab.{function.__name__}"
        by_place = [each.name for each in signature.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]

        @cache  # annotations are read at the first call, when their types are imported
        def arguments_model() -> type[BaseModel]:
            # The type of what is returned may be known to type checkers alone.
            annotations = {**function.__annotations__, **dict.fromkeys([*unchecked, "return"], "object")}
            hints = typing.get_type_hints(SimpleNamespace(__annotations__=annotations), function.__globals__)
            fields: dict[str, Any] = {
                name: (hints[name], ... if each.default is each.empty else each.default)
                for name, each in signature.parameters.items()
            }
            return create_model(
                function.__name__,
                __base__=(Options,),
                __cls_kwargs__={"allow_inf_nan": True},  # the function has a sentence on its bounds
                **fields,
            )

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            sentences = [f"{name}: '{each}' is given twice" for each in by_place[: len(args)] if each in kwargs]
            if len(args) > len(by_place):
                sentences.append(
                    f"{name}: {len(args)} arguments have no name; allowed without one: {', '.join(by_place) or 'none'}"
                )
            given = {
                each: Path(value) if isinstance(value, os.PathLike) else value
                for each, value in {**dict(zip(by_place, args, strict=False)), **kwargs}.items()
            }
            for each in sorted(given.keys() - signature.parameters) if "changes" in signature.parameters else ():
                if closest(each, signature.parameters) is None:
                    sentences.append(
                        f"{name}: no argument '{each}'; a value of the study is written "
                        f"changes={{'{each}': {given.pop(each)!r}}}.{foreign_option_hint(each)}"
                    )
            collected = collect_mistakes(arguments_model(), given, who=name)
            # What to write in a file is no help in Python.
            in_yaml = r"(\. YAML reads|; write \[|; 'vitlab show ).*"
            sentences += [re.sub(in_yaml, "", mistake.message) for mistake in collected.mistakes]
            if sentences:
                raise UserError(*sentences)
            by_name: Callable[..., R] = function
            return by_name(**{each: getattr(collected.value, each) for each in given})

        return call

    return decorate


@dataclass(frozen=True, kw_only=True)
class ResolvedChoice(Choice):
    """A choice with its component class and complete, validated options."""

    slot: str
    component: type[Any] = field(compare=False)
    fields: Mapping[str, FieldInfo] = field(compare=False, repr=False)  #: of its options, by name
    origin: Origin

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has its own classes of options, which are made from signatures.
        return _unpickle_choice, (self.slot, self.plain())

    def walk(self) -> Iterator[ResolvedChoice]:
        """Yield this choice and every choice nested in its options."""
        yield self
        for part in _iter_direct_choices(self.options):
            yield from part.walk()

    def hashed(self) -> NewTree:
        """Return what a trial's key contains: the name, and each option that has another value than its default.

        A built-in has its bare name.  An option that is added to a component later changes no key at its default; a
        changed default changes the code digest.  Options marked :class:`Unhashed` are left out, too.
        """
        name = self.type.removeprefix(f"{BUILT_IN}:") if self.origin.source == BUILT_IN else self.type
        return {"type": name, **_options_to_hash(self.options, self.fields)}


def _unpickle_choice(slot: str, plain: Tree) -> Any:
    return getattr(import_slot(slot), slot).resolve_choice(plain)


def _iter_direct_choices(value: Any) -> Iterator[ResolvedChoice]:
    """Yield the choices in an option's value, without the choices in their options."""
    match value:
        case ResolvedChoice():
            yield value
        case list() | tuple():
            for item in value:
                yield from _iter_direct_choices(item)
        case Mapping() | BaseModel():
            yield from _iter_direct_choices([*dict(value).values()])


def _options_to_hash(values: Values, fields: Mapping[str, FieldInfo]) -> NewTree:
    """Return the options that are part of a key: at another value than their default, and not :class:`Unhashed`."""
    return {
        name: _value_to_hash(value)
        for name, value in values.items()
        if not any(mark is Unhashed or isinstance(mark, Unhashed) for mark in fields[name].metadata)
        and not _is_default(value, fields[name])
    }


def _value_to_hash(value: Any) -> Any:
    """Return an option's value in plain JSON values, as a key contains it."""
    match value:
        case ResolvedChoice():
            return value.hashed()
        case Choice():
            return value.plain()
        case BaseModel():
            return _options_to_hash(dict(value), type(value).model_fields)
        case Mapping():
            return {name: _value_to_hash(item) for name, item in value.items()}
        case list() | tuple():
            return [_value_to_hash(item) for item in value]
    return value


def _is_default(value: Any, info: FieldInfo) -> bool:
    if info.is_required():
        return False
    default = info.get_default(call_default_factory=True, validated_data={})  # as written in the signature
    if isinstance(value, ResolvedChoice) and isinstance(default, str):
        return value.hashed() == {"type": default}
    # True equals 1, and is another value of an option that takes both.
    return isinstance(value, bool) == isinstance(default, bool) and bool(
        _value_to_hash(value) == _value_to_hash(default)
    )
