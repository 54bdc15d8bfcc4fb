"""Trials of a plan that a tracker shows: their names, parameters and identities."""

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
class TrackedTrial:
    """A trial as shown by a tracker."""

    planned: Planned
    kind: str  #: ``trial``, ``prerequisite`` or ``tuning``
    name: str
    params: Mapping[str, str]

    @property
    def identity(self) -> str:
        """Identity under which a tracker stores the trial."""
        trial = self.planned.trial
        return identity_of(trial.key, trial.code, self.planned.arm)


def tracked_trials(plan: Plan) -> list[TrackedTrial]:
    """Return the trials of a plan, each once; a trial shared by several seeds is one training."""
    rivals = [planned for tuning in plan.tuning for planned in tuning.trials]
    trials = [planned.trial for planned in (*plan.trials, *rivals)] + list(plan.prerequisites)
    params = records.params(trials)
    items: dict[str, TrackedTrial] = {}
    for planned in plan.trials:
        values = {"arm": planned.arm, "seed": str(planned.seed), **params[planned.trial.key]}
        item = TrackedTrial(planned, "trial", f"{planned.arm}/s{planned.seed}", values)
        items.setdefault(item.identity, item)
    for trial in plan.prerequisites:
        seed = trial.seeds.get("init", 0)
        values = {"arm": records.ABSENT, "seed": str(seed), **params[trial.key]}
        item = TrackedTrial(Planned("", seed, trial), "prerequisite", f"prerequisite {trial.key[:8]}/s{seed}", values)
        items.setdefault(item.identity, item)
    for planned in rivals:  # of no arm, so that no mean includes them
        values = {"arm": records.ABSENT, "seed": str(planned.seed), **params[planned.trial.key]}
        item = TrackedTrial(replace(planned, arm=""), TUNING, f"tuning {planned.arm}/s{planned.seed}", values)
        items.setdefault(item.identity, item)
    return list(items.values())


def identity_of(key: str, code: str, arm: str) -> str:
    """Return the identity of a tracked trial."""
    return f"{key}/{code}/{arm}"


def size_of(folder: TrialFolder) -> int:
    """Return the size of a trial's journal in bytes."""
    try:
        return (folder.path / "events.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def began_at(folder: TrialFolder) -> int:
    """Return the time of the first readable event of a trial's journal, which identifies the journal.

    Returns:
        Milliseconds since 1970; 0 if there is no journal.
    """
    with suppress(FileNotFoundError), open(folder.path / "events.jsonl", "rb") as journal:
        for line in journal:
            if line.endswith(b"\n"):
                with suppress(ValueError, LookupError, TypeError, OverflowError):
                    return int(json.loads(line)["t"])
    return 0
