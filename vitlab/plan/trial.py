"""Trial: one training as a value, in a module of its own, so that trials do not change with what else is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter


def _complete(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a spec that names its components.

    Raises:
        ValueError: if it does not.
    """
    for part in ("data", "model", "train"):
        if not isinstance(spec.get(part), Mapping):
            raise ValueError(f"spec.{part} is no mapping")
    for part in ("data", "model"):
        if not isinstance(spec[part].get("type"), str):
            raise ValueError(f"spec.{part} names no component")
    return spec


FolderName = Annotated[str, Field(pattern=r"^[\w-]*$")]
"""A hash that is also the name of a folder, so that a damaged one leads nowhere else."""


@dataclass(frozen=True)
class Trial:
    """One training, fully said: nothing a default could change later is left out.

    ``key`` is the hash of everything that makes the trial what it is; ``code`` the digest of the code it would run.
    Two trials with equal key and code have equal outcomes on one kind of machine.
    """

    spec: Annotated[Mapping[str, Any], AfterValidator(_complete)]
    """``data``, ``model`` and ``train``, with every option resolved."""
    seeds: Mapping[str, int]  #: stream to seed
    origins: tuple[str, ...]  #: ``slot:name source version`` of every component, sorted
    data: str | None  #: identity of the data set; None while it is not here, and then the key is pending
    needs: Mapping[str, Annotated[str, Field(pattern=r"^[\w-]*/?[\w-]*$")]] = field(default_factory=dict)
    """Role to key and code of the trial whose weights this one starts from."""
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Role to the SHA-256 of each file of the checkpoint this trial was planned with, by name; compared when opened."""
    key: FolderName = ""
    code: FolderName = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages and the versions that it is to be trained under; empty for whatever is installed."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Trial:
        """Return the trial in JSON values.

        Raises:
            ValueError: if a value is missing or of another type, naming it.
        """
        return _TRIAL.validate_python(data)


_TRIAL = TypeAdapter(Trial)
