"""Plan and Arm: the values that planning hands on, beside :mod:`vitlab.plan.trial`.  Plain data, to and from JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

from vitlab.errors import UserError, nearest
from vitlab.plan.trial import FolderName
from vitlab.plan.trial import Trial as Trial
from vitlab.spec import Analysis


@dataclass(frozen=True)
class Arm:
    """One condition of the study, replicated over seeds.  Arm names belong to the plan, never to trials."""

    name: str
    values: Mapping[str, Any]  #: each varied path to this arm's value
    baseline: str | None = None  #: the arm this one is compared with
    aliases: tuple[str, ...] = ()  #: other names by which the design reached the same trial
    skip: str = ""  #: why it is not run, where it is not
    note: str = ""  #: what planning has solved for in it, and how closely
    classes: int | None = None  #: of its data, from which follows what chance reaches
    engine: str = ""  #: what trains it, see :func:`vitlab.plan.cohorts.engine_of`; empty where it is not run


@dataclass(frozen=True)
class Planned:
    """A trial's place in a plan."""

    arm: str
    seed: int
    trial: Trial


@dataclass(frozen=True)
class Rival:
    """Values for the knobs of a tuning, and the trainings that speak for them."""

    values: Mapping[str, Any]  #: path to value
    trials: tuple[Planned, ...]
    score: float | None = None  #: mean over the trials; None until all have ended, and for good where one diverged
    wall_s: float = 0.0  #: what they took


@dataclass(frozen=True)
class Tuning:
    """One choice of knobs, for an arm or for the whole study: who stood against whom, and who won."""

    arm: str | None  #: None where one choice, made at the base, is for all arms
    key: str  #: of the arm without these knobs, and of what was asked: by it a choice that was made is found again
    select: str  #: the metric of the scores
    rivals: tuple[Rival, ...]
    winner: int | None = None  #: index among the rivals
    failure: str = ""  #: why none of them can win

    @property
    def open(self) -> bool:
        """Whether nothing has been decided yet."""
        return self.winner is None and not self.failure

    @property
    def trials(self) -> list[Planned]:
        return [planned for rival in self.rivals for planned in rival.trials]

    def to_json(self) -> dict[str, Any]:
        rivals = [
            {
                "values": dict(rival.values),
                "score": rival.score,
                "wall_s": rival.wall_s,
                "spec": rival.trials[0].trial.spec,
                "trials": [_without_spec(planned) for planned in rival.trials],
            }
            for rival in self.rivals
        ]
        return {**vars(self), "rivals": rivals}

    @classmethod
    def from_json(cls, data: Any) -> Tuning:
        """Return the tuning in JSON values.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: if a value is missing or of another type.
        """
        tuning = _TUNING.validate_python(_tuning_with_specs(data))
        if tuning.winner is not None and not 0 <= tuning.winner < len(tuning.rivals):
            raise ValueError(f"there is no rival {tuning.winner}")
        return tuning


@dataclass(frozen=True)
class EngineBenchmark:
    """Which engine trains trials of one shape fastest: measured once, and from then on a value of the plan."""

    engine: str  #: the fastest
    members: int  #: of the cohorts that were measured
    speeds: Mapping[str, float]
    """Engine to images a second of one worker: of a trial by itself under ``loop``, of all members elsewhere."""
    why_not: Mapping[str, str] = field(default_factory=dict)  #: the other engines, and why they were not measured

    @property
    def said(self) -> str:
        """``engine vmap: 12,000 images/s of a worker, as a cohort of 16, 9,000 by loop; not stack: ...``"""
        rest = [f"{speed:,.0f} by {engine}" for engine, speed in self.speeds.items() if engine != self.engine]
        alone = "one trial at a time" if self.engine == "loop" else f"as a cohort of {self.members}"
        first = f"{self.speeds[self.engine]:,.0f} images/s of a worker, {alone}"
        reasons = {
            reason: [name for name, why in self.why_not.items() if why == reason] for reason in self.why_not.values()
        }
        missing = [f"; not {' or '.join(engines)}: {reason}" for reason, engines in reasons.items()]
        return f"engine {self.engine}: {', '.join([first, *rest])}{''.join(missing)}."


@dataclass(frozen=True)
class InterimAnalysis:
    """Two looks at one study, each at half of alpha: what the first seeds leave open is given more of them."""

    first: tuple[int, ...]  #: seeds of every arm
    second: tuple[int, ...]  #: those of what is open, the first among them
    open: tuple[
        str, ...
    ] = ()  #: arms whose comparison was left open, see :func:`vitlab.report.escalation.inconclusive_arms`

    def seeds(self, arm: str, baselines: Mapping[str, str | None]) -> tuple[int, ...]:
        """The seeds of an arm: both sides of a comparison that is open have the further ones."""
        return self.second if arm in {*self.open, *(baselines.get(name) for name in self.open)} else self.first


@dataclass(frozen=True)
class _Known:
    """Results that were there when a study was registered."""

    results: int
    trials: int
    comparisons: tuple[str, ...]


@dataclass(frozen=True)
class _Registered:
    """The parts of a registration that are read by name, see :mod:`vitlab.plan.registration`."""

    seeds: tuple[int, ...]
    family: tuple[tuple[str, str], ...]
    arms: Mapping[str, str] = field(default_factory=dict)
    known: _Known | None = None


_REGISTERED = TypeAdapter(_Registered)


def _registration(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a registration in JSON values.

    Raises:
        ValueError: if a value is missing or of another type, naming it.
    """
    _REGISTERED.validate_python(data)
    return data


@dataclass(frozen=True)
class Plan:
    """Everything a study will run, in order."""

    study: str
    question: str
    arms: tuple[Arm, ...]
    trials: tuple[Planned, ...]
    analysis: Analysis
    prerequisites: tuple[Trial, ...] = ()  #: trials that others need and that stand in no arm, each once
    notes: tuple[str, ...] = ()  #: what the reader of the report must know
    tuning: tuple[Tuning, ...] = ()  #: choices of knobs, made or still open
    pending: tuple[Planned, ...] = ()
    """Trials of arms whose tuning is still open: without a key, and with the knobs that the base has."""
    probes: Mapping[str, EngineBenchmark] = field(default_factory=dict)  #: by :func:`vitlab.plan.cohorts.shape`
    registered: Annotated[Mapping[str, Any], AfterValidator(_registration)] | None = None
    """How the answer was to be judged when the study was first run, see :mod:`vitlab.plan.registration`."""
    looks: InterimAnalysis | None = None  #: where there may be two of them
    version: FolderName = ""  #: of the study file, see :mod:`vitlab.plan.versions`
    identities: Mapping[str, str] = field(default_factory=dict)
    """Arm to a digest of what it trains, without seeds and code, and of how it is matched and tuned."""

    @property
    def sharing(self) -> int:
        """How many looks share alpha."""
        return 1 if self.looks is None else 2

    @property
    def level(self) -> float:
        """Alpha of a look at the results: looking twice spends half of it each time."""
        return self.analysis.alpha / self.sharing

    @property
    def paths(self) -> list[str]:
        """Every path some arm varies, in the order of the design."""
        return list(dict.fromkeys(path for arm in self.arms for path in arm.values))

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def find(self, arm: str, seed: int) -> Trial:
        """The trial of an arm and a seed.

        Raises:
            UserError: if there is none, naming those there are.
        """
        for planned in self.trials:
            if (planned.arm, planned.seed) == (arm, seed):
                return planned.trial
        arms = [known.name for known in self.arms]
        seeds = ", ".join(map(str, sorted({planned.seed for planned in self.trials})))
        hint = nearest(arm, arms) if arm not in arms else ""
        raise UserError(f"no trial of arm '{arm}' with seed {seed}.{hint} Arms: {'; '.join(arms)}. Seeds: {seeds}.")

    def to_json(self) -> dict[str, Any]:
        """JSON in which the resolved spec of an arm is written once, not once a seed."""
        specs: dict[str, Any] = {}
        for planned in (*self.trials, *self.pending):
            specs.setdefault(planned.arm, planned.trial.spec)
        return {
            "study": self.study,
            "question": self.question,
            "arms": [asdict(arm) for arm in self.arms],
            "specs": specs,
            "trials": [_without_spec(planned) for planned in self.trials],
            "prerequisites": [trial.to_json() for trial in self.prerequisites],
            "analysis": self.analysis.model_dump(mode="json"),
            "notes": list(self.notes),
            "tuning": [tuning.to_json() for tuning in self.tuning],
            "pending": [_without_spec(planned) for planned in self.pending],
            "probes": {shape: asdict(probe) for shape, probe in self.probes.items()},
            "registered": None if self.registered is None else dict(self.registered),
            "looks": None if self.looks is None else asdict(self.looks),
            "version": self.version,
            "identities": dict(self.identities),
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Return the plan in JSON values.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: if a value is missing or of another type, or names
                an arm that is not there.
        """

        def placed(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
            return [_with_spec(item, data["specs"][item["arm"]]) for item in items]

        plan = _PLAN.validate_python(
            {
                **data,
                "trials": placed(data["trials"]),
                "pending": placed(data.get("pending", ())),
                "tuning": [Tuning.from_json(item) for item in data.get("tuning", ())],
                "probes": probes_of(data),
            }
        )
        known = {arm.name for arm in plan.arms}
        named = {item.arm for item in (*plan.trials, *plan.pending)} | {arm.baseline for arm in plan.arms} - {None}
        if named - known:
            raise ValueError(f"there is no arm {sorted(map(str, named - known))[0]!r}")
        return plan


def probes_of(plan: Mapping[str, Any]) -> dict[str, EngineBenchmark]:
    """The probes of a plan in JSON; those of a form that is no longer written are measured anew."""
    known = set(EngineBenchmark.__dataclass_fields__)
    return {
        shape: _PROBE.validate_python(probe) for shape, probe in plan.get("probes", {}).items() if known == set(probe)
    }


def _without_spec(planned: Planned) -> dict[str, Any]:
    """A planned trial in JSON, where its spec is written elsewhere, once for all seeds."""
    trial = planned.trial.to_json()
    del trial["spec"]
    return {"arm": planned.arm, "seed": planned.seed, **trial}


def _with_spec(item: Mapping[str, Any], spec: Any) -> dict[str, Any]:
    """Return a planned trial in JSON, its spec included."""
    rest = {name: value for name, value in item.items() if name not in ("arm", "seed")}
    return {"arm": item["arm"], "seed": item["seed"], "trial": {"spec": spec, **rest}}


def _tuning_with_specs(data: Mapping[str, Any]) -> dict[str, Any]:
    rivals = [
        {**rival, "trials": [_with_spec(item, rival["spec"]) for item in rival["trials"]]} for rival in data["rivals"]
    ]
    return {**data, "rivals": rivals}


_PLAN = TypeAdapter(Plan)
_TUNING = TypeAdapter(Tuning)
_PROBE = TypeAdapter(EngineBenchmark)
