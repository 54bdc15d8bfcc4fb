"""The trials of a plan that have no result: which they are, and their training in stages."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from vitlab.driver.scheduler import Watch, distinct, execute, with_prerequisites
from vitlab.errors import UserError, count, nearest
from vitlab.plan.values import Plan, Planned, Trial
from vitlab.spec import RunSpec
from vitlab.store.folders import Store
from vitlab.trackers import Tracker


def require_arm(plan: Plan, only: str) -> None:
    """Raise UserError if a pattern matches no arm."""
    arms = [arm.name for arm in plan.arms]
    if not any(is_selected(arm, only) for arm in arms):
        raise UserError(f"no arm matches '{only}'.{nearest(only, arms)} Arms: {'; '.join(arms)}.")


def is_selected(arm: str, only: str) -> bool:
    """Return whether a pattern matches an arm; an arm's exact name matches even if it contains brackets."""
    return arm == only or fnmatch.fnmatchcase(arm, only)


def cached_trials(plan: Plan, only: str, store: Store, ended: Collection[str]) -> dict[str, str]:
    """Return ``cached`` for every training that has a result, by its ``key/code``, without those that have ``ended``.

    A trial that others start from must also have its weights.  Checkpoints that cached trials have left are removed.
    """
    trials = [*(rivals(plan, only) if plan.pending else ()), *plan.trials]
    starters = [*(planned.trial for planned in trials), *plan.prerequisites]
    needed = {name for trial in starters for name in trial.needs.values()}
    cached = [trial for trial in plan.prerequisites if store.trial(trial.key, trial.code).has_weights()]
    for trial in (planned.trial for planned in distinct(trials) if _name(planned.trial) not in ended):
        folder = store.trial(trial.key, trial.code)
        if folder.has_weights() if _name(trial) in needed else folder.done():
            folder.remove_checkpoint(trial.to_json())
            cached.append(trial)
    return {_name(trial): "cached" for trial in cached if _name(trial) not in ended}


def rivals(plan: Plan, only: str) -> list[Planned]:
    """Return the trials of the open tunings of the selected arms."""
    return [
        planned
        for tuning in plan.tuning
        if tuning.open and (tuning.arm is None or is_selected(tuning.arm, only))
        for planned in tuning.trials
    ]


def next_stage(plan: Plan, only: str, ended: Collection[str]) -> tuple[Plan, list[Planned]]:
    """Return the next trials to train: those of open tunings before those of the arms.

    Args:
        plan: the plan.
        only: arms to train, as a shell pattern.
        ended: ``key/code`` of the trainings that have ended.

    Returns:
        The plan of this stage, which has no other trials than the stage, and the trials that have not ended.
    """
    trials = rivals(plan, only) if plan.pending else []
    remaining = [planned for planned in trials if _name(planned.trial) not in ended]
    if remaining:
        return replace(plan, trials=tuple(trials)), distinct(remaining)
    remaining = [planned for planned in plan.trials if is_selected(planned.arm, only)]
    return plan, distinct([planned for planned in remaining if _name(planned.trial) not in ended])


def train(
    plan: Plan,
    trials: Sequence[Planned],
    store: Store,
    run: RunSpec,
    plugins: Sequence[str | Path],
    tracker: Tracker,
    watch: Watch,
    *,
    retry_failed: bool,
) -> dict[str, str]:
    """Train the trials and their missing prerequisites.

    Args:
        plan: the plan of the stage.
        trials: those to train, each once.
        store: the store of the trials.
        run: the run settings.
        plugins: files of components.
        tracker: the tracker.
        watch: the display.
        retry_failed: train trials that failed under the same code; otherwise they stay failed.

    Returns:
        ``trained`` or ``failed`` for each of these trainings, by its ``key/code``.
    """
    failed_before: list[Planned] = []

    def without_failed(some: Sequence[Planned]) -> list[Planned]:
        remaining: list[Planned] = []
        for planned in some:
            failed = not retry_failed and store.trial(planned.trial.key, planned.trial.code).has_failed_for_good()
            (failed_before if failed else remaining).append(planned)
        return remaining

    to_train = without_failed(with_prerequisites(plan, without_failed(trials), store))
    if failed_before:
        trials_before = count(len(failed_before), "trial")
        watch.say(f"{trials_before} failed before under this code; --retry-failed trains them again.")
    watch.on_plan(plan, to_train, store)
    try:
        execute(to_train, store, run, plugins, tracker, watch, plan.probes)
    finally:
        watch.close()
    done = {_name(item.trial) for item in to_train if store.trial(item.trial.key, item.trial.code).done()}
    outcomes = {_name(item.trial): "trained" if _name(item.trial) in done else "failed" for item in to_train}
    return outcomes | {_name(item.trial): "failed" for item in failed_before}


def _name(trial: Trial) -> str:
    return f"{trial.key}/{trial.code}"
