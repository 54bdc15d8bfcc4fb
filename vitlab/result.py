"""Result: what a trial found, as frozen records that go to JSON and come back equal.

``outcome`` is what the trial computed, compared bit for bit between two runs; ``circumstances`` is how it came about
(times, host, attempts, memory, numerics) and may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True)
class Measurement:
    """Metrics at one moment of a training.  Names are ``train|val|test|system/NAME``."""

    step: int  #: optimizer steps done
    epoch: float
    images: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """What was computed.

    ``metrics`` are the final values; ``history`` is every measurement in order, without ``system/*``; ``weights`` is a
    SHA-256 over the final weights, names and bytes.
    """

    metrics: Mapping[str, float]
    history: tuple[Measurement, ...]
    weights: str
    steps: int
    images: int


@dataclass(frozen=True)
class Circumstances:
    """How it came about."""

    started: float  #: seconds since 1970
    wall_s: float
    host: str
    attempts: int
    params: int
    macs: int  #: multiply-accumulates of one forward pass of one image
    memory_bytes: int  #: peak of the process (CPU) or of the allocator (CUDA)
    versions: Mapping[str, str]
    numerics: Mapping[str, Any]  #: torch, device, engine, attention kernel, threads, precision
    ended: float = 0.0  #: seconds since 1970; read from the file where an older version did not write it


@dataclass(frozen=True)
class Result:
    """The end of a trial.  ``failure`` is one sentence where ``status`` is not ``done``."""

    key: str
    code: str
    status: Status
    outcome: Outcome
    circumstances: Circumstances
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        outcome = dict(data["outcome"])
        outcome["history"] = tuple(Measurement(**item) for item in outcome["history"])
        return cls(
            **{
                **data,
                "outcome": Outcome(**outcome),
                "circumstances": Circumstances(**data["circumstances"]),
            }
        )
