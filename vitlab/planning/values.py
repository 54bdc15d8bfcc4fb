"""Plan, Arm and the other results of planning: plain data, to and from JSON.  See also :mod:`vitlab.identity.trial`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitlab.errors import UserError, nearest
from vitlab.identity.trial import FolderName
from vitlab.identity.trial import Trial as Trial
from vitlab.spec import Analysis, TrialSpec
from vitlab.spec.choice import Bounds, Goal, Unit
from vitlab.spec.tree import NewTree, Tree, Values, parse_as, type_adapter


@dataclass(frozen=True)
class MetricFacts:
    """The facts of a metric that do not depend on results, as it declares them; see vitlab.training.metrics.Metric."""

    goal: Goal
    unit: Unit
    bounds: Bounds  #: its range; None for an infinite end
    quantum: float = 0.0  #: smallest change, times the number of images; 0 if it has none
    chance: Mapping[str, float] = field(default_factory=dict)
    """Arm to the value of guesses, where it is known."""
    step: float = 0.0  #: smallest change, whatever the number of images, such as 1 for a count; 0 if it has none

    @property
    def reach(self) -> float:
        """The largest difference that the bounds allow."""
        low, high = self.bounds
        return math.inf if low is None or high is None else high - low


def declared_metric(name: str, names: Iterable[str]) -> str | None:
    """Return the metric that a name in results belongs to: ``accuracy`` for ``accuracy_dist``."""
    return max((one for one in names if name == one or name.startswith(f"{one}_")), key=len, default=None)


def why_no_block_average(analysis: Analysis, unit: Unit, bounds: Bounds) -> str:
    """Return why differences of a metric cannot be averaged over blocks; empty if they can."""
    metric, error_of_0 = analysis.metric, bounds[0] if analysis.goal == "min" else bounds[1]
    if analysis.over_blocks is None and unit != "share":
        return (
            f"{metric} is no share, and its scale may differ from block to block; write over_blocks: difference, or "
            "relative, by which each difference is divided by the baseline's error"
        )
    if analysis.over_blocks == "relative" and (error_of_0 is None or math.isinf(error_of_0)):
        return f"nobody knows which {metric} has no error, to which differences are relative; write difference"
    return ""


@dataclass(frozen=True)
class Arm:
    """One condition of the study, replicated over seeds.  Arm names belong to the plan, never to trials."""

    name: str
    values: Values  #: each varied path to this arm's value
    baseline: str | None = None  #: the arm this one is compared with
    aliases: tuple[str, ...] = ()  #: other names that the design gives to the same trial
    skip: str = ""  #: why it is not run; empty if it is
    note: str = ""  #: result of matching, and its relative difference
    classes: int | None = None  #: number of classes of its data, from which the chance level follows
    engine: str = ""  #: see :func:`vitlab.planning.engine_choice.choose_engine`; empty if it is not run
    engine_reason: str = ""  #: why a rule chose it; empty if none did
    block: str = ""  #: name of the block it is trained in, with which its own name begins
    is_control: bool = False  #: whether it equals its baseline but for the seeds

    @property
    def name_in_block(self) -> str:
        """Name without the block: arms of several blocks that have it are one arm."""
        return self.name.removeprefix(f"{self.block}: ")


@dataclass(frozen=True)
class Planned:
    """A trial's place in a plan."""

    arm: str
    seed: int
    trial: Trial


@dataclass(frozen=True)
class Rival:
    """A combination of knob values in a tuning, with its trials and its score."""

    values: Values  #: path to value
    trials: tuple[Planned, ...]
    score: float | None = None  #: mean over the trials; None until all have ended, or if one diverged
    wall_s: float = 0.0  #: total time of the trials, in seconds


@dataclass(frozen=True)
class Tuning:
    """A tuning of knobs, for one arm or for the whole study: its rivals and its winner."""

    arm: str | None  #: None if one choice, made at the base, is for all arms
    key: str  #: see :func:`vitlab.planning.tune.tuning_key`; identifies the tuning in later plans
    select: str  #: the metric of the scores
    rivals: tuple[Rival, ...]
    winner: int | None = None  #: index among the rivals
    failure: str = ""  #: why there is no winner

    def __post_init__(self) -> None:
        if self.winner is not None and not 0 <= self.winner < len(self.rivals):
            raise ValueError(f"there is no rival {self.winner}")

    @property
    def open(self) -> bool:
        """True if the choice is still to be made."""
        return self.winner is None and not self.failure

    @property
    def trials(self) -> list[Planned]:
        """Trials of all rivals."""
        return [planned for rival in self.rivals for planned in rival.trials]


@dataclass(frozen=True)
class EngineBenchmark:
    """A measurement of the fastest engine for trials of one shape, stored in the plan."""

    engine: str  #: the fastest
    trials: int  #: number of trials that were measured together
    speeds: Mapping[str, float]
    """Engine to images per second of one worker: of one trial for ``loop``, of all trials for other engines."""
    reasons: Mapping[str, str]  #: engine to the reason why it was not measured

    @property
    def summary(self) -> str:
        """The result in one sentence.

        Example: ``engine vmap: 12,000 images/s of a worker, 16 trials together, 9,000 by loop; not batch_last: ...``
        """
        rest = [f"{speed:,.0f} by {engine}" for engine, speed in self.speeds.items() if engine != self.engine]
        together = "one trial at a time" if self.engine == "loop" else f"{self.trials} trials together"
        first = f"{self.speeds[self.engine]:,.0f} images/s of a worker, {together}"
        missing = [f"; not {engine}: {reason}" for engine, reason in self.reasons.items()]
        return f"engine {self.engine}: {', '.join([first, *rest])}{''.join(missing)}."


@dataclass(frozen=True)
class Looks:
    """Looks at the results of a study to which seeds are added; each spends a part of alpha.

    A look judges the comparisons that all earlier ones left inconclusive.
    """

    seeds: tuple[tuple[int, ...], ...]  #: seeds of each look, including the earlier looks'
    shares: tuple[float, ...]  #: level of each look, as a share of alpha
    open: tuple[tuple[str, ...], ...] = ()
    """Arms whose comparison each look left inconclusive, see :mod:`vitlab.report.comparison`."""
    futility: float = 0.0  #: comparisons that are decided with less probability get no more seeds

    def latest_look(self, arm: str) -> int:
        """Return the index of the last look at an arm's comparison."""
        return next((at for at, arms in enumerate(self.open) if arm not in arms), len(self.open))

    def seeds_of(self, arm: str, baselines: Mapping[str, str | None]) -> tuple[int, ...]:
        """Return the seeds of an arm; both arms of an inconclusive comparison have the seeds of the next look."""
        compared = [arm, *(name for name, baseline in baselines.items() if baseline == arm)]
        return self.seeds[max(map(self.latest_look, compared))]


@dataclass(frozen=True)
class EarlierResults:
    """Results that existed when a study was registered."""

    results: int  #: trials that had one
    trials: int  #: all trials
    comparisons: tuple[str, ...]  #: arms that shared a seed with results with their baseline


@dataclass(frozen=True)
class Registration:
    """The analysis of a study before its results are known, see :mod:`vitlab.planning.registration`."""

    metric: str
    goal: str
    at: str
    margin: float | None
    correction: str
    alpha: float
    seeds: tuple[int, ...]
    family: tuple[tuple[str, str], ...]  #: arms and their baselines
    looks: tuple[tuple[int, float], ...] = ()  #: number of seeds and share of alpha of each look
    variance: str = "own"
    over_blocks: str | None = None
    arms: Mapping[str, str] = field(default_factory=dict)  #: arm to a digest of what it trains
    known: EarlierResults = EarlierResults(0, 0, ())
    seen: bool = False  #: whether results were known when the file was changed last


@dataclass(frozen=True, repr=False)
class Plan:
    """Arms and trials of a study, in order."""

    study: str
    question: str
    arms: tuple[Arm, ...]
    trials: tuple[Planned, ...]
    analysis: Analysis
    prerequisites: tuple[Trial, ...] = ()  #: trials that others need and that belong to no arm, each once
    notes: tuple[str, ...] = ()  #: notes for the reader of the report
    tuning: tuple[Tuning, ...] = ()  #: tunings, decided or open
    pending: tuple[Planned, ...] = ()
    """Trials of arms whose tuning is open: without a key, and with the knob values of the base."""
    probes: Mapping[str, EngineBenchmark] = field(
        default_factory=dict
    )  #: by :func:`vitlab.planning.engine_choice.speed_digest`
    registered: Registration | None = None  #: analysis of the first run
    looks: Looks | None = None
    """Set if the study adds seeds to inconclusive comparisons."""
    version: FolderName = ""  #: version of the study file, see :mod:`vitlab.planning.study_folder`
    identities: Mapping[str, str] = field(default_factory=dict)
    """Arm to a digest of its trial without seeds and code, and of its matching and tuning."""
    metrics: Mapping[str, MetricFacts] = field(default_factory=dict)  #: name in results, without its split, to facts

    def __repr__(self) -> str:
        return f"<Plan {self.study}: arms: {len(self.arms)}, trials: {len(self.trials)}>"

    @property
    def alpha_shares(self) -> tuple[float, ...]:
        """Level of each look, as a share of alpha."""
        return (1.0,) if self.looks is None else self.looks.shares

    @property
    def paths(self) -> list[str]:
        """Paths that the arms vary, in the order of the design."""
        return list(dict.fromkeys(path for arm in self.arms for path in arm.values))

    @property
    def trials_and_pending(self) -> tuple[Planned, ...]:
        """Trials of all arms, with those whose tuned values are still to be chosen."""
        return (*self.trials, *self.pending)

    @property
    def first_trials(self) -> dict[str, Planned]:
        """The trial of the first seed of every arm that runs, by arm."""
        first: dict[str, Planned] = {}
        for planned in self.trials:
            first.setdefault(planned.arm, planned)
        return first

    @property
    def rival_trials(self) -> list[Planned]:
        """Trials of all tunings."""
        return [planned for tuning in self.tuning for planned in tuning.trials]

    @property
    def trials_with_keys(self) -> list[Trial]:
        """Trials of arms, of tunings and of prerequisites; pending ones have no key."""
        return [*(planned.trial for planned in (*self.trials, *self.rival_trials)), *self.prerequisites]

    @property
    def labelled_prerequisites(self) -> list[Planned]:
        """Prerequisites, each called after the first arm that needs it, such as ``teacher of hard``."""
        trials = {trial.name: trial for trial in self.prerequisites}
        queue, prerequisites = [*self.trials, *self.rival_trials], []
        for item in queue:  # grows while it is read: a teacher may need another trial
            for role, name in item.trial.needs.items():
                if (trial := trials.pop(name, None)) is not None:
                    arm = f"{role.replace('init_from', 'pre-training')} of {item.arm}"
                    # Streams that do not vary have the seed 0, also in the trials of other seeds.
                    prerequisites.append(Planned(arm, max(trial.seeds.values()), trial))
                    queue.append(prerequisites[-1])
        return prerequisites

    def facts(self, metric: str | None = None) -> MetricFacts | None:
        """Return the facts of a metric such as ``val/accuracy``, by default the judged one; None if not known."""
        own = declared_metric((metric or self.analysis.metric).rpartition("/")[2], self.metrics)
        return None if own is None else self.metrics[own]

    @property
    def units(self) -> dict[str, str]:
        """The unit of each metric, by its name without the split."""
        return {name: facts.unit for name, facts in self.metrics.items()}

    def arm(self, name: str) -> Arm:
        """Return the arm with this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def find(self, arm: str | None = None, seed: int | None = None) -> Planned:
        """Return the trial of an arm, by default the baseline, and a seed, by default the first one.

        Raises:
            UserError: if there is none, naming the seeds of the arm, or the arms of the plan.
        """
        if arm is None:
            arm = next((each.name for each in self.arms if each.baseline is None and not each.skip), self.arms[0].name)
        for planned in self.trials:
            if planned.arm == arm and seed in (None, planned.seed):
                return planned
        if seeds := sorted({planned.seed for planned in self.trials if planned.arm == arm}):
            raise UserError(f"no trial with seed {seed}. Seeds: {', '.join(map(str, seeds))}.")
        arms = [candidate.name for candidate in self.arms]
        hint = nearest(arm, arms) if arm not in arms else ""
        raise UserError(f"no trial of arm '{arm}'.{hint} Arms: {'; '.join(arms)}.")

    def to_json(self) -> NewTree:
        """Return the plan as JSON values, with the resolved spec of an arm once rather than once per seed."""
        # The spec is the largest part of a trial, and the same for all seeds of an arm.
        specs = {planned.arm: planned.trial.spec for planned in self.trials_and_pending}
        return {
            **type_adapter(Plan).dump_python(self, mode="json", exclude={"trials", "pending", "tuning"}),
            "specs": {arm: spec.plain() for arm, spec in specs.items()},
            "trials": [_without_spec(planned) for planned in self.trials],
            "pending": [_without_spec(planned) for planned in self.pending],
            "tuning": [
                {**vars(tuning), "rivals": [_rival_to_json(rival) for rival in tuning.rivals]} for tuning in self.tuning
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Parse a plan from JSON values.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: if a value is missing or of another type, or names
                an arm that does not exist.
        """
        specs = {arm: TrialSpec.model_validate(spec) for arm, spec in data["specs"].items()}

        def with_specs(items: Iterable[Tree], spec: TrialSpec | None = None) -> list[NewTree]:
            return [{**item, "trial": {**item, "spec": spec or specs[item["arm"]]}} for item in items]

        def rival(item: Tree) -> NewTree:
            return {**item, "trials": with_specs(item["trials"], TrialSpec.model_validate(item["spec"]))}

        plan = parse_as(
            Plan,
            {
                **data,
                "trials": with_specs(data["trials"]),
                "pending": with_specs(data["pending"]),
                "tuning": [{**item, "rivals": [*map(rival, item["rivals"])]} for item in data["tuning"]],
            },
        )
        names = {arm.name for arm in plan.arms}
        references = {item.arm for item in plan.trials_and_pending} | {arm.baseline for arm in plan.arms} - {None}
        if references - names:
            raise ValueError(f"there is no arm {sorted(map(str, references - names))[0]!r}")
        return plan


@dataclass(frozen=True)
class Decisions:
    """Decisions that follow from results of earlier runs; planning reads them from the stored plan."""

    tunings: Mapping[str, Tuning] = field(default_factory=dict)  #: decided tunings by key
    benchmarks: Mapping[str, EngineBenchmark] = field(default_factory=dict)  #: by shape
    looks: Looks | None = None
    prerequisites: tuple[Trial, ...] = ()  #: with a result, of all trials


UNDECIDED = Decisions()


def _rival_to_json(rival: Rival) -> NewTree:
    """Return a rival as JSON values, with its spec once."""
    trials = [_without_spec(planned) for planned in rival.trials]
    return {**vars(rival), "values": dict(rival.values), "spec": rival.trials[0].trial.spec.plain(), "trials": trials}


def _without_spec(planned: Planned) -> NewTree:
    """Return a planned trial as JSON values without its spec, which is stored once for all seeds."""
    values = {"arm": planned.arm, "seed": planned.seed, **vars(planned.trial)}
    del values["spec"]
    return values
