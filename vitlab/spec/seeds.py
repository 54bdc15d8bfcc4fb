"""Seeds: the replicates of a study, and the looks at which more of them are added."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from vitlab.errors import nearest
from vitlab.spec.choice import Frozen
from vitlab.spec.mistakes import conflict
from vitlab.spec.trial import STREAMS

REPORTING_SEEDS = 1_000_000  #: seeds of replicates are smaller; larger ones are for tuning
MAX_LOOKS = 20  #: at the results of a study whose seeds are added until it is decided


class Seeds(Frozen):
    """Replicates.  Each seed sets the streams in ``vary`` to itself; the other streams are 0 in every replicate."""

    values: tuple[int, ...] = (0, 1, 2)  #: seeds of every arm
    vary: tuple[str, ...] = tuple(stream for stream in STREAMS if stream != "split")
    """Random streams that depend on the seed; the others are equal in all trials."""
    escalate_to: int | None = None  #: total number of seeds of inconclusive arms, added at once
    until: Literal["decided"] | None = None
    """``decided``: inconclusive arms get ``every`` more seeds at a time, until they have ``at_most``."""
    at_most: int | None = None  #: total number of seeds of an arm, with ``until``
    every: int | None = None  #: seeds that are added at a time, with ``until``; by default as many as at first

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        """Expand ``5``, ``[0, 1, 7]``, ``{count: 5, vary: [init]}`` and ``at_least`` to the form with ``values``."""
        if isinstance(value, bool | float | str):
            found = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ValueError(f"found {found}; write their number, such as 5, or a list, such as [1, 2, 3, 4, 5]")
        if isinstance(value, int):
            value = {"count": value}
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = {"values": list(value)}
        if isinstance(value, Mapping) and value.keys() & {"count", "at_least"}:
            name = "at_least" if "at_least" in value else "count"
            if name == "at_least" and "until" not in value:
                raise ValueError("at_least needs until: decided; otherwise give count")
            count, rest = value[name], {key: item for key, item in value.items() if key != name}
            if other := sorted(rest.keys() & {"count", "values"}):
                raise ValueError(f"found {name} and {other[0]}; give one of count, at_least and values")
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"the number of seeds is a whole number from 1; found {name}: {count!r}")
            if count > REPORTING_SEEDS:
                raise ValueError(f"found {count:,} seeds; at most {REPORTING_SEEDS:,} are allowed")
            return {"values": list(range(count)), **rest}
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(schema)
        definition = handler.resolve_ref_schema(reference)
        count = {"type": "integer", "minimum": 1, "maximum": REPORTING_SEEDS}
        values = {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": REPORTING_SEEDS},
            "minItems": 1,
            "uniqueItems": True,
        }
        vary = {"type": "array", "items": {"enum": list(STREAMS)}}
        most = {**count, "minimum": 2}
        by_count = {**count, "description": "Number of seeds; they are 0, 1, 2, ..."}
        properties = {"count": by_count, "values": values, "vary": vary, "escalate_to": most}
        properties |= {
            "until": {"enum": ["decided"]},
            "at_least": {**count, "minimum": 2, "description": "Number of seeds of every arm; they are 0, 1, 2, ..."},
            "at_most": most,
            "every": count,
        }
        long_form = {**definition, "properties": properties}
        definition.clear()
        definition["anyOf"] = [count, values, long_form]
        return reference

    @field_validator("values")
    @classmethod
    def _distinct(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if not values:
            raise ValueError("at least one seed is needed")
        if len(set(values)) < len(values):
            raise ValueError("a seed is listed twice; each seed is one replicate")
        if any(not 0 <= seed < REPORTING_SEEDS for seed in values):
            raise ValueError(f"seeds must be from 0 to {REPORTING_SEEDS - 1:,}")
        return values

    @field_validator("vary")
    @classmethod
    def _streams(cls, vary: tuple[str, ...]) -> tuple[str, ...]:
        for stream in vary:
            if stream not in STREAMS:
                raise ValueError(
                    f"no stream called '{stream}'.{nearest(stream, STREAMS)} Streams: {', '.join(STREAMS)}"
                )
        return vary

    @model_validator(mode="after")
    def _more(self) -> Seeds:
        if self.until is None:
            for name in ("at_most", "every"):
                if getattr(self, name) is not None:
                    raise conflict(f"{name} needs until: decided", name, "until")
        elif self.escalate_to is not None:
            raise conflict("escalate_to and until are two ways to add seeds; remove one", "escalate_to", "until")
        elif self.at_most is None or not len(self.values) < self.at_most <= REPORTING_SEEDS:
            raise conflict(
                f"until: decided needs at_most, the total number of seeds of an arm: more than the {len(self.values)} "
                f"of the first look and at most {REPORTING_SEEDS:,}; found {self.at_most or 'none'}",
                "at_most",
                "values",
                "until",
            )
        elif self.every is not None and self.every < 1:
            raise conflict(f"every is a whole number from 1; found {self.every}", "every")
        elif len(self._sizes) > MAX_LOOKS:
            raise conflict(
                f"a study has at most {MAX_LOOKS} looks at its results, and this one has {len(self._sizes):,}; "
                "raise every",
                "every",
                "at_most",
            )
        if len(self._sizes) > 1 and len(self.values) < 2:
            raise conflict("adding seeds needs at least 2 seeds at first, which have a spread", "values")
        if self.escalate_to is not None and not len(self.values) < self.escalate_to <= REPORTING_SEEDS:
            raise conflict(
                f"escalate_to is the total number of seeds: more than the {len(self.values)} of the first look "
                f"and at most {REPORTING_SEEDS:,}; found {self.escalate_to}",
                "escalate_to",
                "values",
            )
        return self

    def up_to(self, most: int) -> tuple[int, ...]:
        """Return these seeds and the smallest others, ``most`` in all."""
        existing = set(self.values)
        further = (seed for seed in itertools.count() if seed not in existing)
        return (*self.values, *itertools.islice(further, max(0, most - len(existing))))

    @property
    def all(self) -> tuple[int, ...]:
        """All seeds that may run, including those of later looks."""
        return self.up_to(self._most)

    @property
    def looks(self) -> tuple[tuple[int, ...], ...]:
        """Seeds of each look, of which the last has all."""
        return tuple(self.all[:size] for size in self._sizes)

    @property
    def _sizes(self) -> Sequence[int]:
        """Number of seeds at each look."""
        step = self._most if self.until is None else self.every or len(self.values)
        return [*range(len(self.values), self._most, step), self._most]

    @property
    def _most(self) -> int:
        """Largest number of seeds of an arm."""
        return max(self.escalate_to or 0, self.at_most or 0, len(self.values))

    def streams(self, seed: int) -> dict[str, int]:
        """Return stream to seed, for the replicate ``seed``."""
        return {stream: seed if stream in self.vary else 0 for stream in STREAMS}
