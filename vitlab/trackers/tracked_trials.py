"""Which trials of a plan a tracker shows, under which names, and how to tell one training of them from another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from vitlab.plan.values import Plan, Planned
from vitlab.store.folders import TrialFolder
from vitlab.trackers import records

TUNING = "tuning"


@dataclass(frozen=True)
class Shown:
    """A trial that is shown."""

    planned: Planned
    kind: str  #: trial, prerequisite of one, or tuning
    name: str
    params: Mapping[str, str]

    @property
    def identity(self) -> str:
        trial = self.planned.trial
        return identity_of(trial.key, trial.code, self.planned.arm)


def shown(plan: Plan) -> list[Shown]:
    """The trials of a plan, each once: a trial that several seeds share is one training, not several."""
    rivals = [planned for tuning in plan.tuning for planned in tuning.trials]
    trials = [planned.trial for planned in (*plan.trials, *rivals)] + list(plan.prerequisites)
    params = records.params(trials)
    found: dict[str, Shown] = {}
    for planned in plan.trials:
        own = {"arm": planned.arm, "seed": str(planned.seed), **params[planned.trial.key]}
        item = Shown(planned, "trial", f"{planned.arm}/s{planned.seed}", own)
        found.setdefault(item.identity, item)
    for trial in plan.prerequisites:
        seed = trial.seeds.get("init", 0)
        own = {"arm": records.ABSENT, "seed": str(seed), **params[trial.key]}
        item = Shown(Planned("", seed, trial), "prerequisite", f"prerequisite {trial.key[:8]}/s{seed}", own)
        found.setdefault(item.identity, item)
    for planned in rivals:  # of no arm, so that they enter no mean
        own = {"arm": records.ABSENT, "seed": str(planned.seed), **params[planned.trial.key]}
        item = Shown(replace(planned, arm=""), TUNING, f"tuning {planned.arm}/s{planned.seed}", own)
        found.setdefault(item.identity, item)
    return list(found.values())


def identity_of(key: str, code: str, arm: str) -> str:
    """Tells one shown trial from another."""
    return f"{key}/{code}/{arm}"


def size_of(folder: TrialFolder) -> int:
    """Bytes of a trial's journal."""
    try:
        return (folder.path / "events.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def began_at(folder: TrialFolder) -> int:
    """Return the time of the first readable event of a trial's journal, which tells one journal from another.

    Returns:
        milliseconds since 1970; 0 where there is no journal.
    """
    with suppress(FileNotFoundError), open(folder.path / "events.jsonl", "rb") as journal:
        for line in journal:
            if line.endswith(b"\n"):
                with suppress(ValueError, LookupError, TypeError, OverflowError):
                    return int(json.loads(line)["t"])
    return 0
