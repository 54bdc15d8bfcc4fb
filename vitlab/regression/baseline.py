"""Baseline file: the accepted facts and values of a study, as text that can be reviewed.

The YAML file is changed by ``vitlab check --accept --reason`` alone, and records every reason.
"""

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError

from vitlab._version import __version__
from vitlab.errors import UserError
from vitlab.planning.study_folder import git_output
from vitlab.spec.choice import Frozen
from vitlab.spec.mistakes import mistakes_in
from vitlab.store.files import write_bytes

HEAD = "# What 'vitlab check' compares with.  Written by 'vitlab check --accept --reason TEXT'; do not edit.\n"


class Trace(Frozen):
    """The losses of the first steps of a training; they are not finite if it diverges."""

    model_config = ConfigDict(allow_inf_nan=True)

    precision: str
    engine: str = "loop"  #: the engine that computed it
    losses: tuple[float, ...]  #: of every step
    before: float  #: loss on the first validation images, before the first step
    after: float  #: the same after the last step


class ArmFacts(Frozen):
    """The exactly reproducible facts of an arm, taken from its first seed."""

    key: str
    origins: tuple[str, ...]
    data: str | None
    seeds: dict[str, int]  #: stream to seed
    spec: dict[str, object]  #: dotted path to value
    params: int
    macs: int
    traces: tuple[Trace, ...]


class Facts(Frozen):
    """The exactly reproducible facts of a study, and the environment they were computed in."""

    torch: str
    processor: str
    seeds: tuple[int, ...]
    skipped: dict[str, str]  #: arm to reason
    arms: dict[str, ArmFacts]


class Values(Frozen):
    """The final values of a study's trials."""

    device: str
    data: dict[str, str]  #: arm to the identity of its data
    metrics: dict[str, dict[str, dict[int, float]]]  #: metric to arm to seed to final value
    quanta: dict[str, float]  #: metric to its smallest step; 0 if it has none
    diverged: dict[str, tuple[int, ...]]  #: arm to seeds that diverged or have no finite value
    behind: dict[str, int] = Field(default_factory=dict)
    """Arm to the number of trainings its seeds start from, if they start from any."""
    versions: dict[str, str] = Field(default_factory=dict)  #: distribution name to installed version
    seconds: dict[str, float] = Field(default_factory=dict, exclude=True, repr=False)
    """Arm to the seconds that its trainings took; not written into the file."""


class Acceptance(Frozen):
    """One acceptance of new values, with its reason."""

    date: str
    reason: str
    vitlab: str
    what: str  #: the sections that were changed: exact, values


class Baseline(Frozen):
    """The content of a baseline file."""

    form: Literal[1] = 1  #: version of the file format
    study: str
    accepted: tuple[Acceptance, ...]
    facts: Facts | None = None
    values: Values | None = None
    learned: tuple[str, ...] = ()  #: arms that passed the tier ``learning`` at its last acceptance
    commit: str = ""  #: the code of the last acceptance, if the study limits costs


def read_baseline(file: Path, advice: str = "") -> Baseline:
    """Read a baseline; a file that is missing, which ``advice`` is about, or another one, raises UserError."""
    if not file.is_file():
        raise UserError(f"{file}: the baseline does not exist{advice}")
    data, remedy = file.read_bytes(), "delete it and accept the results of the code again"
    try:
        return Baseline.model_validate(yaml.safe_load(data))
    except ValidationError as error:
        if "form" in error.errors()[0]["loc"]:
            raise UserError(f"{file}: written by another version of vitlab; check with that, or {remedy}") from None
        faults = [f"{file}: {mistake.message.strip()}" for mistake in mistakes_in(error, Baseline)]
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # yaml raises all of them
        mark = getattr(error, "problem_mark", None)
        faults = [f"{file}{f':{mark.line + 1}' if mark else ''}: not YAML"]
    if git_output(file.parent, "rev-parse", "HEAD"):
        remedy = f"restore it by 'git checkout HEAD -- {shlex.quote(str(file))}', or {remedy}"
    raise UserError(*faults, f"{file}: damaged; {remedy}")


def write_baseline(file: Path, baseline: Baseline) -> None:
    """Write a baseline file atomically."""
    text = yaml.safe_dump(baseline.model_dump(mode="json"), sort_keys=False, width=110, default_flow_style=None)
    write_bytes(file, (HEAD + text).encode())


def accept_into_baseline(before: Baseline, facts: Facts, values: Values | None, reason: str, commit: str) -> Baseline:
    """Return a baseline with new facts and values accepted for a reason; without values, it keeps its own."""
    today, what = datetime.now(UTC).date().isoformat(), "exact" if values is None else "exact, values"
    accepted = *before.accepted, Acceptance(date=today, reason=reason, vitlab=__version__, what=what)
    changes = {"facts": facts, "values": values or before.values, "accepted": accepted, "commit": commit}
    return before.model_copy(update=changes)
