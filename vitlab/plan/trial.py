"""Trial: one training as a value, in a module of its own, so that trials do not change with what else is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Trial:
    """One training, fully said: nothing a default could change later is left out.

    ``key`` is the hash of everything that makes the trial what it is; ``code`` the digest of the code it would run.
    Two trials with equal key and code have equal outcomes on one kind of machine.
    """

    spec: Mapping[str, Any]  #: ``data``, ``model`` and ``train``, with every option resolved
    seeds: Mapping[str, int]  #: stream to seed
    origins: tuple[str, ...]  #: ``slot:name source version`` of every component, sorted
    data: str | None  #: identity of the data set; None while it is not here, and then the key is pending
    needs: Mapping[str, str] = field(
        default_factory=dict
    )  #: role to key of the trial whose weights this one starts from
    key: str = ""
    code: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        return cls(**{**data, "origins": tuple(data["origins"])})
