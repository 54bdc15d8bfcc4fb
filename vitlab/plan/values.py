"""Plan, Arm and Trial: the values that planning hands on.  Plain data, to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vitlab.errors import UserError, nearest
from vitlab.spec import Analysis


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


@dataclass(frozen=True)
class Arm:
    """One condition of the study, replicated over seeds.  Arm names belong to the plan, never to trials."""

    name: str
    values: Mapping[str, Any]  #: each varied path to this arm's value
    baseline: str | None = None  #: the arm this one is compared with
    aliases: tuple[str, ...] = ()  #: other names by which the design reached the same trial
    skip: str = ""  #: why it is not run, where it is not


@dataclass(frozen=True)
class Planned:
    """A trial's place in a plan."""

    arm: str
    seed: int
    trial: Trial


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
        raise UserError(f"no trial of arm '{arm}' with seed {seed}.{hint} Arms: {', '.join(arms)}; seeds: {seeds}.")

    def to_json(self) -> dict[str, Any]:
        """JSON in which the resolved spec of an arm is written once, not once a seed."""
        specs: dict[str, Any] = {}
        trials = []
        for planned in self.trials:
            trial = planned.trial.to_json()
            specs.setdefault(planned.arm, trial.pop("spec"))
            trials.append({"arm": planned.arm, "seed": planned.seed, **trial})
        return {
            "study": self.study,
            "question": self.question,
            "arms": [asdict(arm) for arm in self.arms],
            "specs": specs,
            "trials": trials,
            "prerequisites": [trial.to_json() for trial in self.prerequisites],
            "analysis": self.analysis.model_dump(mode="json"),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        trials = []
        for item in data["trials"]:
            rest = {name: value for name, value in item.items() if name not in ("arm", "seed")}
            trial = Trial.from_json({"spec": data["specs"][item["arm"]], **rest})
            trials.append(Planned(item["arm"], item["seed"], trial))
        return cls(
            study=data["study"],
            question=data["question"],
            arms=tuple(Arm(**{**arm, "aliases": tuple(arm["aliases"])}) for arm in data["arms"]),
            trials=tuple(trials),
            analysis=Analysis.model_validate(data["analysis"]),
            prerequisites=tuple(Trial.from_json(item) for item in data["prerequisites"]),
            notes=tuple(data["notes"]),
        )
