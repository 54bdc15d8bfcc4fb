"""The baseline: what a study's trials were, as text that can be reviewed.

A YAML file that is changed by ``vitlab check --accept --reason`` alone, and keeps every reason.  The anchor is what was
accepted first, or last by ``--anchor``: candidates are held against it too, so that many small drops, each within its
margin, cannot add up unseen.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from vitlab.errors import Problem, SpecError, UserError
from vitlab.spec.choice import Frozen
from vitlab.spec.sentences import sentences
from vitlab.store.folders import write_bytes

FORM = 1  #: of the file
HEAD = "# What 'vitlab check' compares with.  Written by 'vitlab check --accept --reason TEXT'; do not edit.\n"


class Beginning(Frozen):
    """A trace, see :mod:`vitlab.regression.traces`."""

    precision: str
    engine: str = "loop"
    losses: tuple[float, ...]
    before: float
    after: float


class ArmFacts(Frozen):
    """What is exact about an arm, of its first seed."""

    key: str
    origins: tuple[str, ...]
    data: str | None
    seeds: dict[str, int]  #: stream to seed
    spec: dict[str, Any]  #: dotted path to value
    params: int
    macs: int
    traces: tuple[Beginning, ...]


class Facts(Frozen):
    """What is exact about a study, and where it was found."""

    torch: str
    processor: str
    seeds: tuple[int, ...]
    skipped: dict[str, str]  #: arm to reason
    arms: dict[str, ArmFacts]


class Values(Frozen):
    """What the trials of a study came to."""

    device: str
    data: dict[str, str]  #: arm to the identity of its data
    metrics: dict[str, dict[str, dict[int, float]]]  #: metric to arm to seed to final value
    quanta: dict[str, float]  #: metric to its smallest step; 0 for those without steps
    diverged: dict[str, tuple[int, ...]]  #: arm to seeds that diverged, or came to no finite value
    behind: dict[str, int] = Field(default_factory=dict)
    """Arm to how many trainings its seeds start from, where they start from any."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Name to version of what was installed; of a file of an earlier vitlab nothing is known."""


class Accepted(Frozen):
    """Somebody's decision."""

    date: str
    reason: str
    vitlab: str
    what: str  #: exact, values, anchor; those that were changed


class Baseline(Frozen):
    """The whole file."""

    form: int = FORM
    study: str
    accepted: tuple[Accepted, ...]
    facts: Facts | None = None
    values: Values | None = None
    anchor: Values | None = None


def read_baseline(file: Path) -> Baseline:
    """Read a baseline.

    Raises:
        UserError: if there is none, or it is none.
    """
    if not file.is_file():
        raise UserError(f"{file}: no baseline is there; 'vitlab check --accept --reason TEXT' writes it")
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise UserError(f"{file}: no baseline: a mapping belongs here")
        if data.get("form") != FORM:
            raise UserError(f"{file}: a baseline of form {data.get('form')!r}; this version reads form {FORM}")
        return Baseline.model_validate(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise SpecError([Problem(str(file), 0, 0, text) for _, text in sentences(error)]) from None


def write_baseline(file: Path, baseline: Baseline) -> None:
    """Write it whole or not at all."""
    text = yaml.safe_dump(baseline.model_dump(mode="json"), sort_keys=False, width=110, default_flow_style=None)
    write_bytes(file, (HEAD + text).encode())


def accepted(
    old: Baseline | None, study: str, facts: Facts, values: Values | None, reason: str, version: str, anchor: bool
) -> Baseline:
    """The baseline with what is to stand from now on.

    Args:
        old: what stood, if anything did.
        study: its name.
        facts: as found now.
        values: as found now; None leaves those that stand.
        reason: why; it is kept.
        version: of vitlab.
        anchor: whether the values are the anchor from now on, too.
    """
    first = old is None or old.anchor is None
    moved = values is not None and (anchor or first)
    what = ["exact", *(["values"] if values is not None else []), *(["anchor"] if moved else [])]
    date = datetime.now(UTC).date().isoformat()
    entry = Accepted(date=date, reason=reason, vitlab=version, what=", ".join(what))
    return Baseline(
        study=study,
        accepted=(*(old.accepted if old is not None else ()), entry),
        facts=facts,
        values=values if values is not None else (old.values if old is not None else None),
        anchor=values if moved else (old.anchor if old is not None else None),
    )
