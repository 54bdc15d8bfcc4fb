"""Trial: one training as a value, in its own module, so that its code digest does not depend on other plan values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter

from vitlab.geometry import DataIdentity
from vitlab.spec.tree import NewTree
from vitlab.spec.trial import TrialSpec

FolderName = Annotated[str, Field(pattern=r"^[\w-]*$")]
"""A hash that is also the name of a folder; the pattern prevents a path from leaving the parent folder."""


def _identity(value: Any) -> Any:
    """Return the identity of a text; other values are left to the validation."""
    return DataIdentity.parse(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Trial:
    """One training, fully specified: every option is written out, so that a changed default does not change it.

    ``key`` is the hash of the spec, seeds, origins, data and prerequisites; ``code`` is the digest of the code that it
    runs.  Two trials with equal key and code have equal outcomes on one kind of machine.
    """

    spec: TrialSpec  #: with every option resolved
    seeds: Mapping[str, int]  #: stream to seed
    origins: tuple[str, ...]  #: ``slot:name source version`` of every component, sorted
    data: Annotated[DataIdentity, BeforeValidator(_identity)] | None
    """Identity of the data set; None if it is not downloaded yet, in which case the key is pending."""
    needs: Mapping[str, Annotated[str, Field(pattern=r"^[\w-]*/?[\w-]*$")]] = field(default_factory=dict)
    """Role to key and code of the trial whose weights this one starts from."""
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Role to file name to SHA-256, for the checkpoints of the plan; compared when the files are opened.

    Published weights stand under their name, with the beginning of their SHA-256.
    """
    key: FolderName = ""
    code: FolderName = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package to the version required for training; empty for the installed versions."""

    def to_json(self) -> NewTree:
        """Return the trial as plain data."""
        return {"spec": self.spec.plain(), **self.beside_spec()}

    def beside_spec(self) -> NewTree:
        """Return the fields other than the spec as plain data."""
        values = {name: value for name, value in vars(self).items() if name != "spec"}
        return {**values, "data": None if self.data is None else str(self.data)}

    @classmethod
    def from_json(cls, data: Any) -> Trial:
        """Parse a trial from JSON values.

        Raises:
            ValueError: if a value is missing or of another type, naming it.
        """
        return _TRIAL().validate_python(data)


_TRIAL = cache(lambda: TypeAdapter(Trial))
