"""Seeds: the replicates of a study, and the looks at which more of them are added."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from vitlab.spec.choice import Frozen
from vitlab.spec.mistakes import conflict
from vitlab.spec.trial import STREAMS, Stream

REPORTING_SEEDS = 1_000_000  #: seeds of replicates are smaller; larger ones are for tuning
MAX_LOOKS = 20  #: at the results of a study whose seeds are added until it is decided

Count = Annotated[int, Field(ge=1, le=REPORTING_SEEDS)]
Values = tuple[Annotated[int, Field(ge=0, lt=REPORTING_SEEDS)], ...]


class Seeds(Frozen):
    """Replicates.  Each seed sets the streams in ``vary`` to itself; the other streams are 0 in every replicate."""

    count: Count | None = None
    """Number of seeds of every arm; they are 0, 1, 2, ..."""
    at_least: Count | None = None
    """The same, with ``until``."""
    values: Annotated[Values, Field(min_length=1)] = (0, 1, 2)
    """Seeds of every arm."""
    vary: tuple[Stream, ...] = ("init", "order", "augment", "mixup", "dropout", "drop_path", "subset")
    """Random streams that depend on the seed; the others are equal in all trials."""
    escalate_to: Count | None = None
    """Total number of seeds of inconclusive arms, added at once."""
    until: Literal["decided"] | None = None
    """``decided``: inconclusive arms get ``every`` more seeds at a time, until they have ``at_most``."""
    at_most: Count | None = None
    """Total number of seeds of an arm, with ``until``."""
    every: Count | None = None
    """Seeds that are added at a time, with ``until``; by default as many as at first."""

    @model_validator(mode="before")
    @classmethod
    def _values_of_a_count(cls, value: Any) -> Any:
        """Set ``values`` to 0, 1, 2, ... if their number is given."""
        if not isinstance(value, Mapping):
            return value
        # All else reads ``values``; the count stays beside it as the file has it.
        numbers = [name for name in ("count", "at_least", "values") if name in value]
        if len(numbers) > 1:
            raise ValueError(f"found {numbers[0]} and {numbers[1]}; give one of count, at_least and values")
        if "at_least" in numbers and "until" not in value:
            raise ValueError("at_least needs until: decided; otherwise give count")
        count = value.get("count", value.get("at_least"))
        if isinstance(count, int) and 0 < count <= REPORTING_SEEDS:  # otherwise reported as a wrong count
            return {**value, "values": tuple(range(count))}
        return value

    @field_validator("values")
    @classmethod
    def _distinct(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(values)) < len(values):
            raise ValueError("a seed is listed twice; each seed is one replicate")
        return values

    @model_validator(mode="after")
    def _more(self) -> Self:
        if self.until is None:
            for name in ("at_most", "every"):
                if getattr(self, name) is not None:
                    raise conflict(f"{name} needs until: decided", name, "until")
        elif self.escalate_to is not None:
            raise conflict("escalate_to and until are two ways to add seeds; remove one", "escalate_to", "until")
        elif self.at_most is None or self.at_most <= len(self.values):
            raise conflict(
                f"until: decided needs at_most, the total number of seeds of an arm: more than the {len(self.values)} "
                f"of the first look; found {self.at_most or 'none'}",
                "at_most",
                "values",
                "until",
            )
        elif len(self._sizes) > MAX_LOOKS:
            raise conflict(
                f"a study has at most {MAX_LOOKS} looks at its results, and this one has {len(self._sizes):,}; "
                "raise every",
                "every",
                "at_most",
            )
        if len(self._sizes) > 1 and len(self.values) < 2:
            raise conflict("adding seeds needs at least 2 seeds at first, which have a spread", "values")
        if self.escalate_to is not None and self.escalate_to <= len(self.values):
            raise conflict(
                f"escalate_to is the total number of seeds: more than the {len(self.values)} of the first look; found "
                f"{self.escalate_to}",
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
        """All seeds that may run, including the seeds of later looks."""
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


def _as_mapping(value: Any) -> Any:
    """Expand ``5`` and ``[0, 1, 7]``."""
    if isinstance(value, bool | float | str):
        found = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"found {found}; write their number, such as 5, or a list, such as [1, 2, 3, 4, 5]")
    if isinstance(value, int):
        return {"count": value}
    return {"values": value} if isinstance(value, list | tuple) else value


SeedsOrNumber = Annotated[Seeds, BeforeValidator(_as_mapping, json_schema_input_type=Count | Values | Seeds)]
"""Seeds as a study file has them: their number, a list, or a mapping."""
