"""Frozen, the base class of the models of a study file, and Choice, a component with its options.

``rope2d`` is shorthand for ``{type: rope2d}``; every key other than ``type`` is an option.  A list of components in the
place of one, ``[learned, rope2d]``, is shorthand for ``{type: together, parts: [learned, rope2d]}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import CoreSchema, core_schema

from vitlab.spec.mistakes import conflict_error
from vitlab.spec.tree import NewTree, Tree


class Frozen(BaseModel):
    """Base class of the models of a study file: immutable, without unknown keys, and without booleans as numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes, no, on and off as booleans, which Python accepts as 1 and 0.
        if any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value])):
            allowed = _types_in(cls.model_fields[info.field_name or ""].annotation)
            if allowed & {int, float} and bool not in allowed:
                raise conflict_error("found a boolean; a number is allowed. YAML reads yes, no, on and off as booleans")
        return value


def _points_to_share(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*points?\s*", value)
    if match is None:
        raise ValueError(f"found '{value}'; allowed: a number, or points such as '2 points'")
    return float(match[1]) / 100


def _require_unit(value: str) -> str:
    """Return a text that can be the unit of a metric."""
    if len(value) > 20 or not re.fullmatch(r"(?:[^\W_]|%)(?:[^\W_]|[ /%.-])*(?<![ /-])", value):
        raise ValueError(f"found {value!r}; allowed: {UNITS}")
    return value


UNITS = "share, number, or a unit of 1 to 20 letters, digits, spaces, /, %, . and -, such as images or ms"
Goal = Literal["max", "min"]
OneOrMore = Annotated[int, Field(ge=1)]
TwoOrMore = Annotated[int, Field(ge=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Portion = Annotated[float, Field(gt=0, le=1)]
"""A share that is not 0."""
Fraction = Annotated[float, Field(gt=0, lt=1)]
"""A share that is neither 0 nor 1."""
Bounds = tuple[float | None, float | None]
"""Smallest and largest value of a metric; None where there is none, or it is not known."""
OverBlocks = Literal["difference", "relative"]
Unit = Annotated[str, AfterValidator(_require_unit)]
"""``share``: of one, shown in percent; ``number``: shown without a unit; any other word is shown as the unit."""

Amount = Annotated[
    float,
    BeforeValidator(_points_to_share),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^[\d.]+ *points?$"}]}),
]
"""A difference in units of a metric; for a share, ``2 points`` means ``0.02``."""


def _types_in(annotation: Any) -> set[Any]:
    inside = get_args(annotation)
    return {annotation} if not inside else set().union(*map(_types_in, inside))


@dataclass(frozen=True)
class Choice:
    """The name of a component (``name``, or ``distribution:name`` if several distributions have it) and its options."""

    type: str
    options: Tree = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Any) -> Choice:
        """Parse a shorthand or the long form.

        Raises:
            ValueError: if ``value`` is neither, naming what is allowed.
        """
        if isinstance(value, Choice):
            return value
        if isinstance(value, list | tuple):
            return cls.parse(value[0]) if len(value) == 1 else cls(TOGETHER, {PARTS: value})
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, bool):
            raise ValueError(
                f"a component's name belongs here, found {str(value).lower()}: YAML reads yes, no, on and off as "
                "booleans. Put the name in quotes; where nothing is meant, write none"
            )
        if isinstance(value, Mapping):
            if not isinstance(value.get("type"), str):
                actual = (
                    f"found {value['type']!r} there"
                    if "type" in value
                    else "no type is written. A path such as model.dim changes one option"
                )
                raise ValueError(f"a component is a name, or a mapping whose type is its name; {actual}")
            return cls(value["type"], {name: option for name, option in value.items() if name != "type"})
        text = "nothing; where nothing is meant, write none" if value is None else repr(value)
        raise ValueError(f"a component is a name, or a mapping {{type: name, ...}}; found {text}")

    @property
    def bare_name(self) -> str:
        """The name of the component without its source: ``vit`` of ``vitlab:vit``."""
        return self.type.rpartition(":")[2]

    def plain(self) -> NewTree:
        """Return the long form in plain JSON values."""
        return {"type": self.type, **{name: plain_values(option) for name, option in self.options.items()}}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any) -> Choice:
            try:
                return cls.parse(value)
            except ValueError as error:
                raise conflict_error(f"{error}. 'vitlab list' lists the names") from None

        return choice_core_schema(validate)


ChoiceLike = Choice | str | Mapping[str, object]
"""What :meth:`Choice.parse` takes: a choice, a name, or a mapping whose ``type`` is the name."""


def choice_core_schema(validate: Callable[[Any], Choice]) -> CoreSchema:
    """Return pydantic's schema of a choice that a function validates."""
    return core_schema.no_info_plain_validator_function(
        validate, serialization=core_schema.plain_serializer_function_ser_schema(lambda choice: choice.plain())
    )


SLOT_MARK = "x-slot"
"""Key in a JSON Schema of an option that is a choice from a slot; :mod:`vitlab.cli.show` replaces it."""


def choice_from_slot(name: str) -> WithJsonSchema:
    """Return the annotation of a choice from a slot."""
    return WithJsonSchema({SLOT_MARK: name})


def plain_values(value: Any) -> Any:
    """Return an option's value in plain JSON values."""
    if isinstance(value, Choice):
        return value.plain()
    if isinstance(value, BaseModel):
        return {name: plain_values(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {name: plain_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value


TOGETHER = "together"
"""Component of a slot that applies several others of it, and that a list in the place of one component stands for."""

PARTS = "parts"
"""The option of :data:`TOGETHER` that holds the list."""


def component_label(plain: Any) -> Any:
    """Return the name of a component in plain values, several joined by ``+``; other values are returned as they are.

    Example: ``learned+rope2d``.
    """
    if not isinstance(plain, Mapping) or "type" not in plain:
        return plain
    if plain["type"] == TOGETHER and isinstance(plain.get(PARTS), list | tuple):
        return "+".join(str(component_label(part)) for part in plain[PARTS])
    return plain["type"]
