"""Results of trials: frozen records that are stored as JSON without loss.

``outcome`` is bitwise reproducible between two runs; ``circumstances`` (times, host, attempts, memory, numerics) may
differ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field


class Ending(StrEnum):
    """How a trial ended, or one attempt at it.  Files and reports use the values.

    A worker reports how its job ended, except for ``lost``, which its executor reports.  An attempt that ended as
    ``error``, ``oom``, ``timeout``, ``preempted`` or ``lost`` is retried as often as ``run.retries`` allows under that
    name, and then ``failed``.  ``done`` and ``diverged`` are final, ``failed`` until the user asks for a retry; the
    next run trains what was ``stopped`` or ``refused``.
    """

    DONE = "done"  #: every trial of the job has a result, which may be diverged
    DIVERGED = "diverged"  #: a trial has a result without metrics: a loss was not finite; its job is done
    FAILED = "failed"  #: a trial has no result, and is not tried again
    REFUSED = "refused"  #: the code or a version differs from the plan; nothing was written, and the run ends
    STOPPED = "stopped"  #: it was stopped by ``cancel``, after writing a checkpoint or before it began
    ERROR = "error"  #: the attempt raised an exception, which a retry would raise again
    OOM = "oom"  #: memory ran out; first retried by ``Executor.with_more_memory`` and ``run.on_oom``
    TIMEOUT = "timeout"  #: the attempt exceeded ``run.timeout``; a checkpoint exists if the trial could be stopped
    PREEMPTED = "preempted"  #: the machine was claimed for other work (a SIGTERM); a checkpoint exists
    LOST = "lost"  #: the worker ended without a report (a signal, the kernel's OOM killer, a lost machine)


EndingWithResult = Literal[Ending.DONE, Ending.DIVERGED]

Number = Annotated[float, Field(strict=True)]
"""A number that may be NaN or infinite, such as a metric of a diverged training."""

Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1e11)]
"""A time since 1970, or a duration."""

Millis = Annotated[int, Field(strict=True, ge=0, le=10**14)]
"""Milliseconds since 1970."""

Count = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]


def _validate_numerics(numerics: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``numerics``; raise ValueError if a field that reports show is of another type."""
    for name, kind in (("torch", str), ("device", str), ("processor", str), ("engine", str), ("threads", int)):
        if name in numerics and type(numerics[name]) is not kind:
            raise ValueError(f"{name} is no {kind.__name__}")
    return numerics


@dataclass(frozen=True)
class Measurement:
    """Metrics at one step of a training.  Names are ``train|val|test|system/NAME``."""

    step: Count  #: optimizer steps done
    epoch: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
    images: Count
    metrics: Mapping[str, Number]


@dataclass(frozen=True)
class Outcome:
    """The computed numbers of a trial.

    ``metrics`` are the final values; ``history`` is every measurement in order, without ``system/*``; ``weights`` is a
    SHA-256 over the final weights, names and bytes.
    """

    metrics: Mapping[str, Number]
    history: tuple[Measurement, ...]
    weights: str
    steps: Count
    images: Count

    def value(self, metric: str, at: str, goal: str) -> float | None:
        """Return the ``last`` or the ``best`` (by the ``max`` or ``min`` goal) finite value of a metric, if any."""
        steps = [measurement.metrics for measurement in self.history] if at == "best" else [self.metrics]
        finite = [metrics[metric] for metrics in steps if math.isfinite(metrics.get(metric, math.nan))]
        return (max if goal == "max" else min)(finite, default=None)


@dataclass(frozen=True)
class Circumstances:
    """The circumstances of a result: times, host, cost, versions and numerics."""

    started: Seconds
    wall_s: Seconds
    host: str
    attempts: Count
    params: Count
    macs: Count  #: multiply-accumulates of one forward pass of one image
    memory_bytes: Count  #: peak of the process (CPU) or of the allocator (CUDA)
    versions: Mapping[str, str]
    #: torch, device, engine, attention kernel, threads, precision
    numerics: Annotated[Mapping[str, object], AfterValidator(_validate_numerics)]
    ended: Seconds = 0.0  #: since 1970
    weights: tuple[str, ...] = ()  #: what ``init_from`` loaded, resampled, assumed and left out, a sentence each

    @property
    def installed_versions(self) -> dict[str, str]:
        """Return the installed versions by name, without vitlab itself, which is covered by the code digest."""
        versions = {**self.versions, "torch": str(self.numerics.get("torch", self.versions.get("torch")))}
        return {name: version for name, version in versions.items() if name != "vitlab"}


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.  ``failure`` is one sentence if ``status`` is not ``done``."""

    key: str
    code: str
    status: EndingWithResult
    outcome: Outcome
    circumstances: Circumstances
    failure: str = ""


@dataclass(frozen=True)
class Failure:
    """The failure of the last attempt at a trial, if it has no result."""

    failure: str  #: one sentence
    kind: Ending
    traceback: str
    time: Seconds  #: since 1970
    has_failed_for_good: Annotated[bool, Field(strict=True)] = False  #: True if the trial runs again only on request
