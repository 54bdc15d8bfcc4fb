"""A run of a study: what its parts share, which of its trials have a result, and which process runs it.

One driver at a time runs a study; a second one follows it, and takes over when it ends.
"""

import fnmatch
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vitlab.errors import Interrupted, UserError, nearest
from vitlab.planning.values import Plan, Planned
from vitlab.report.phrasing import format_duration
from vitlab.spec import RunSpec
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.locks import Busy, hold_lock, is_alive, is_locked, lock_owner_and_driver
from vitlab.store.result import Ending
from vitlab.trackers import Tracker, Untracked, delivery

POLL_S = 0.5  #: polling interval while another driver runs the study


class Watch:
    """Observer of a run.  The methods of the base class do nothing."""

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Handle the plan; ``todo`` are the trials to train."""

    def on_start(self, planned: Planned) -> None:
        """Handle the submission of a trial to a worker."""

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        """Handle the end of a trial (done, failed, refused or stopped), or of an attempt that is tried again."""

    def tick(self) -> None:
        """Refresh the display; called regularly."""

    def status(self, what: str) -> AbstractContextManager[object]:
        """Return a context during which the display shows what is done, such as ``writing the report``."""
        return nullcontext()

    def say(self, sentence: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """Close the display."""


@dataclass(frozen=True)
class Session:
    """One run of a study: where its trials are stored, how they run, and who is told about them."""

    store: Store
    run: RunSpec
    plugins: Sequence[str | Path] = ()  #: files of components
    watch: Watch = field(default_factory=Watch)
    tracker: Tracker = field(default_factory=Untracked)

    @cached_property
    def delivery(self) -> delivery.BackgroundDelivery:
        """Delivery to the tracker, beside the run."""
        return delivery.BackgroundDelivery(self.tracker, delivery.started)

    @property
    def plugin_files(self) -> tuple[str, ...]:
        """Paths of the files of components, for workers in other folders."""
        return tuple(str(Path(plugin).resolve()) for plugin in self.plugins)


def iterate_with_time_left(what: str, items: Sequence[Any], watch: Watch) -> Iterator[Any]:
    """Yield items, and show each as ``what 2 of 5`` until the next, with the time that is left."""
    began, total = time.monotonic(), len(items)
    for number, item in enumerate(items):
        left_s = (time.monotonic() - began) / max(1, number) * (total - number)
        left = f", {format_duration(max(1, round(left_s)))} left" * bool(number)
        with watch.status(f"{what} {number + 1} of {total}{left}"):
            yield item


# -- stages ------------------------------------------------------------------------------------------------------------


def require_matching_arm(plan: Plan, only: str) -> None:
    """Raise UserError if a pattern matches no arm."""
    arms = [arm.name for arm in plan.arms]
    if not any(is_selected(arm, only) for arm in arms):
        raise UserError(f"no arm matches '{only}'.{nearest(only, arms)} Arms: {'; '.join(arms)}.")


def is_selected(arm: str | None, only: str) -> bool:
    """Return whether a pattern matches an arm, or its exact name, which may contain brackets; None is for all arms."""
    return arm is None or arm == only or fnmatch.fnmatchcase(arm, only)


def endings_of_cached_trials(plan: Plan, only: str, store: Store, ended: Collection[str] = ()) -> dict[str, str]:
    """Return ``cached`` for every training that has a result, by its ``key/code``, without those that have ``ended``.

    A trial that others start from must also have its weights.  Checkpoints that cached trials have left are removed.
    """
    tuned = (planned for tuning in plan.tuning if is_selected(tuning.arm, only) for planned in tuning.trials)
    trials = [planned.trial for planned in distinct_trials([*tuned, *plan.trials])]
    dependencies = {name for trial in (*trials, *plan.prerequisites) for name in trial.needs.values()}
    cached = [item for item in plan.prerequisites if item.name not in ended and store.folder(item).has_weights()]
    for trial in (trial for trial in trials if trial.name not in ended):
        folder = store.folder(trial)
        if folder.has_weights() if trial.name in dependencies else folder.done():
            folder.remove_checkpoint_and_restore_spec(trial.to_json())
            cached.append(trial)
    return {trial.name: "cached" for trial in cached}


def next_trials_to_train(plan: Plan, only: str, ended: Collection[str]) -> tuple[Plan, list[Planned]]:
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
        if plan.pending and tuning.open and is_selected(tuning.arm, only)
        for planned in tuning.trials
    ]
    remaining = [planned for planned in rivals if planned.trial.name not in ended]
    if remaining:
        return replace(plan, trials=tuple(rivals)), distinct_trials(remaining)
    remaining = [planned for planned in plan.trials if is_selected(planned.arm, only)]
    return plan, distinct_trials([planned for planned in remaining if planned.trial.name not in ended])


def add_missing_prerequisites(plan: Plan, todo: Sequence[Planned], store: Store) -> list[Planned]:
    """Return ``todo`` preceded by the missing trials of no arm that it depends on, directly or indirectly."""
    prerequisites = {item.trial.name: item for item in plan.labelled_prerequisites}
    missing: dict[str, Planned] = {}
    pending = [dependency for planned in todo for dependency in planned.trial.needs.values()]
    while pending:
        name = pending.pop()
        item = prerequisites.get(name)
        if item is None or name in missing or store.folder(item.trial).has_weights():
            continue
        missing[name] = item
        pending += item.trial.needs.values()
    return [*missing.values(), *todo]


def distinct_trials(trials: Iterable[Planned]) -> list[Planned]:
    """Return each trial once, also if several seeds or arms share it."""
    trials_by_name: dict[str, Planned] = {}
    for planned in trials:
        trials_by_name.setdefault(planned.trial.name, planned)
    return list(trials_by_name.values())


def describe_outdated(folders: Iterable[TrialFolder]) -> Iterator[str]:
    """Yield a sentence if some of the missing ones of trials have a result of other code."""
    if any(not folder.done() and any(folder.path.parent.glob("*/result.json")) for folder in folders):
        yield (
            "Some missing trials ended before under other code: vitlab, a package or a file of --plugin has changed. "
            "The earlier results are kept and not used."
        )


# -- the driver --------------------------------------------------------------------------------------------------------


@contextmanager
def follow_until_sole_driver(plan: Plan, store: Store, watch: Watch) -> Iterator[bool]:
    """Hold the study's lock and yield whether another process had it; show that one's progress until it ends.

    Raises:
        Interrupted: after Ctrl-C while the other process goes on.
    """
    lock = store.driver_lock(plan.study)
    with ExitStack() as own_lock:

        def is_free() -> bool:
            """Try to take the lock, see :func:`vitlab.store.locks.hold_lock`; say if its last owner was killed."""
            killed = describe_killed_driver(plan, store)
            with suppress(Busy):
                own_lock.enter_context(hold_lock(lock))
                own_lock.callback(_erase_owner, lock)
                if killed:
                    watch.say(f"{plan.study} was run by {killed}, which is gone; this one takes over.")
                return True
            return False

        if is_free():
            yield False
            return
        owner = _describe_owner(lock)
        watch.say(f"{plan.study} is run by {owner}; this one follows until it ends, then trains what is missing.")
        trials = [*plan.trials, *(item for tuning in plan.tuning if tuning.open for item in tuning.trials)]
        remaining = {
            folder: item for item in distinct_trials(trials) if not (folder := store.folder(item.trial)).done()
        }
        running: set[TrialFolder] = set()
        watch.on_plan(plan, [*remaining.values()], store)
        try:
            while not is_free():
                for folder, planned in list(remaining.items()):
                    if (result := folder.result()) is not None:
                        del remaining[folder]
                        watch.on_end(planned, Ending.DONE, result.failure)
                    elif folder not in running and folder.is_locked():
                        running.add(folder)
                        watch.on_start(planned)
                watch.tick()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            raise Interrupted("stopped following; the other driver is still running") from None
        finally:
            watch.close()
        yield True


def _erase_owner(lock: Path) -> None:
    """Erase the name in the lock of this process; one that stays is of a process that was killed."""
    with suppress(OSError):  # deleted meanwhile
        os.truncate(lock, 0)


def describe_driver(plan: Plan, store: Store) -> str:
    """Describe the process that runs a study; empty if there is none."""
    lock = store.driver_lock(plan.study)
    return _describe_owner(lock) if is_locked(lock) else ""


def describe_killed_driver(plan: Plan, store: Store) -> str:
    """Describe the process that ran a study last if it was killed; empty if it ended by itself or runs."""
    lock = store.driver_lock(plan.study)
    name = lock_owner_and_driver(lock)[0]
    return _describe_owner(lock) if name and not is_alive(name) and not is_locked(lock) else ""


def _describe_owner(lock: Path) -> str:
    """Describe the process that took the lock last."""
    host, _, rest = lock_owner_and_driver(lock)[0].partition("/")
    return f"process {rest.partition('/')[0]} on {host}" if host else "another process"
