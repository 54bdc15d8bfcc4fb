"""Lock of a study: one driver at a time; a second driver follows the first, then takes over when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vitlab.driver.scheduler import Watch, distinct, follow_driver
from vitlab.plan.values import Plan
from vitlab.store.files import hold
from vitlab.store.folders import Store
from vitlab.store.locks import Busy, is_locked, owner


@contextmanager
def sole_driver(plan: Plan, store: Store, watch: Watch) -> Iterator[bool]:
    """Hold the study's lock and yield whether another process had it; follow that process until it ends."""
    lock = store.driver(plan.study)
    reported: set[str] = set()
    with ExitStack() as own_lock:

        def busy() -> bool:
            """Try to take the lock and return True if another process has it; see :func:`held`."""
            try:
                own_lock.enter_context(hold(lock))
                return False
            except Busy:
                other = _describe_owner(lock)
            if other not in reported:
                reported.add(other)
                watch.say(f"{plan.study} is run by {other}; this one follows until it ends.")
            return True

        waited = busy()
        if waited:
            trials = distinct(
                [*plan.trials, *(item for tuning in plan.tuning if tuning.open for item in tuning.trials)]
            )
            missing = [item for item in trials if not store.trial(item.trial.key, item.trial.code).done()]
            watch.planned(plan, missing, store)
            try:
                follow_driver(trials, store, busy, watch)
            finally:
                watch.close()
        yield waited


def driver_of(study: str, store: Store) -> str:
    """Describe the process that runs a study; empty if there is none."""
    lock = store.driver(study)
    return _describe_owner(lock) if is_locked(lock) else ""


def _describe_owner(lock: Path) -> str:
    """Describe the process that took the lock last."""
    host, _, rest = owner(lock)[0].partition("/")
    return f"process {rest.partition('/')[0]} on {host}" if host else "another process"
