"""The design algebra: the arms of a study, as one node that can contain others.

one_at_a_time  the base, and each alternative of each factor alone            1 + sum(k)
leave_one_out  a full recipe with one part removed (or a bare one with one added)   1 + n, or 2 + 2n
grid           every combination of the levels, or of the arms of several nodes     product(k)
zip            several factors moved together, row by row                      k
arms           listed by name                                                  k
union          the arms of several nodes, equal ones merged                    at most sum(k)
sample         n arms drawn from a node with a seed of its own                 n
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from vitlab.spec.choice import Frozen
from vitlab.spec.collect import conflict

Levels = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)]
"""Dotted path to its values."""


class LeaveOneOut(Frozen):
    """A recipe less one part (``remove``), the bare recipe plus one part (``add``), or ``both``."""

    of: Annotated[dict[str, Any], Field(min_length=1)]
    """Dotted path to the value that stands for "without"; or the name of a part to several such changes, as in
    ``arms``."""
    direction: Literal["remove", "add", "both"] = "remove"
    """Whether parts are removed from the recipe, added to the bare one, or both."""


class Zip(Frozen):
    """``{PATH: [v, ...], ...}`` with equal lengths, and names for the rows under ``labels``."""

    levels: Levels
    labels: list[str] | None = None  #: names of the rows

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        levels = {path: levels for path, levels in value.items() if path != "labels"}
        return {"levels": levels, "labels": value.get("labels")}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(schema)
        definition = handler.resolve_ref_schema(reference)
        definition.pop("required")
        definition["properties"] = {"labels": {"type": "array", "items": {"type": "string"}}}
        definition["additionalProperties"] = {"type": "array", "minItems": 1}
        definition["minProperties"] = 1
        return reference

    @model_validator(mode="after")
    def _equal_lengths(self) -> Zip:
        lengths = {path: len(levels) for path, levels in self.levels.items()}
        if self.labels is not None:
            lengths["labels"] = len(self.labels)
            if len(set(self.labels)) < len(self.labels):
                raise ValueError("two rows have the same label; each needs its own")
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "rows need one value of each; found " + ", ".join(f"{n} of {p}" for p, n in lengths.items())
            )
        return self


class Sample(Frozen):
    """``n`` arms drawn from those of ``over`` without replacement."""

    n: Annotated[int, Field(ge=1)]  #: number of arms drawn
    seed: int = 0  #: seed of the draw
    over: Node  #: design whose arms are drawn from


Grid = Annotated[
    Annotated[Levels, Tag("<levels>")] | Annotated[list["Node"], Field(min_length=1), Tag("<nodes>")],
    # With a discriminator, pydantic reports errors of one form only.
    Discriminator(lambda grid: "<nodes>" if isinstance(grid, list) else "<levels>"),
]


class Node(Frozen):
    """A node of a design: exactly one of the seven kinds."""

    one_at_a_time: Levels | None = None  #: dotted path to values: one arm per value, all else as in the base
    leave_one_out: LeaveOneOut | None = None
    grid: Grid | None = None  #: dotted path to values: one arm per combination; or designs to cross
    zip: Zip | None = None
    arms: Annotated[dict[str, dict[str, Any] | None], Field(min_length=1)] | None = None
    """Name of an arm to its changes of the base."""
    union: Annotated[list[Node], Field(min_length=1)] | None = None  #: designs whose arms are joined
    sample: Sample | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Node:
        kinds_set = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(kinds_set) != 1:
            kinds = ", ".join(type(self).model_fields)
            actual = " and ".join(kinds_set) if kinds_set else "an empty design"
            raise conflict(f"a design has exactly one of {kinds}; found {actual}", *kinds_set)
        return self

    @property
    def kind(self) -> str:
        """Name of the design that is set."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)
