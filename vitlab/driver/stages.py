"""The stages of a run: which trials have a result, and which are trained next."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from vitlab.driver.session import name_of
from vitlab.errors import UserError, nearest
from vitlab.plan.values import Plan, Planned
from vitlab.store.folders import Store


def require_arm(plan: Plan, only: str) -> None:
    """Raise UserError if a pattern matches no arm."""
    arms = [arm.name for arm in plan.arms]
    if not any(is_selected(arm, only) for arm in arms):
        raise UserError(f"no arm matches '{only}'.{nearest(only, arms)} Arms: {'; '.join(arms)}.")


def is_selected(arm: str, only: str) -> bool:
    """Return whether a pattern matches an arm; an arm's exact name matches even if it contains brackets."""
    return arm == only or fnmatch.fnmatchcase(arm, only)


def cached_trials(plan: Plan, only: str, store: Store, ended: Collection[str] = ()) -> dict[str, str]:
    """Return ``cached`` for every training that has a result, by its ``key/code``, without those that have ``ended``.

    A trial that others start from must also have its weights.  Checkpoints that cached trials have left are removed.
    """
    tuned = (planned for tuning in plan.tuning if _is_tuned_for(tuning.arm, only) for planned in tuning.trials)
    trials = [*tuned, *plan.trials]
    starters = [*(planned.trial for planned in trials), *plan.prerequisites]
    needed = {name for trial in starters for name in trial.needs.values()}
    cached = [trial for trial in plan.prerequisites if store.trial(trial.key, trial.code).has_weights()]
    for trial in (planned.trial for planned in distinct(trials) if name_of(planned.trial) not in ended):
        folder = store.trial(trial.key, trial.code)
        if folder.has_weights() if name_of(trial) in needed else folder.done():
            folder.remove_checkpoint(trial.to_json())
            cached.append(trial)
    return {name_of(trial): "cached" for trial in cached if name_of(trial) not in ended}


def next_stage(plan: Plan, only: str, ended: Collection[str]) -> tuple[Plan, list[Planned]]:
    """Return the next trials to train: the trials of open tunings before the trials of arms.

    Args:
        plan: the plan.
        only: arms to train, as a shell pattern.
        ended: ``key/code`` of the trainings that have ended.

    Returns:
        The plan of this stage, which has no other trials than the stage, and the trials that have not ended.
    """
    rivals = [
        planned
        for tuning in plan.tuning
        if plan.pending and tuning.open and _is_tuned_for(tuning.arm, only)
        for planned in tuning.trials
    ]
    remaining = [planned for planned in rivals if name_of(planned.trial) not in ended]
    if remaining:
        return replace(plan, trials=tuple(rivals)), distinct(remaining)
    remaining = [planned for planned in plan.trials if is_selected(planned.arm, only)]
    return plan, distinct([planned for planned in remaining if name_of(planned.trial) not in ended])


def with_prerequisites(plan: Plan, todo: Sequence[Planned], store: Store) -> list[Planned]:
    """Return ``todo`` preceded by the missing trials of no arm that it depends on, directly or indirectly."""
    prerequisites = {name_of(trial): trial for trial in plan.prerequisites}
    missing: dict[str, Planned] = {}
    pending = [dependency for planned in todo for dependency in planned.trial.needs.values()]
    while pending:
        name = pending.pop()
        trial = prerequisites.get(name)
        if trial is None or name in missing or store.trial(trial.key, trial.code).has_weights():
            continue
        missing[name] = Planned(f"prerequisite {trial.key[:8]}", trial.seeds["init"], trial)
        pending += trial.needs.values()
    return [*missing.values(), *todo]


def distinct(trials: Iterable[Planned]) -> list[Planned]:
    """Return each trial once, also if several seeds or arms share it."""
    trials_by_name: dict[str, Planned] = {}
    for planned in trials:
        trials_by_name.setdefault(name_of(planned.trial), planned)
    return list(trials_by_name.values())


def _is_tuned_for(arm: str | None, only: str) -> bool:
    """Return True if a tuning is for a selected arm, or for all arms."""
    return arm is None or is_selected(arm, only)
