"""Who runs a study: one driver at a time; whoever else is asked to run it looks on, and goes on when that one ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vitlab.driver.scheduler import Watch, distinct, follow_driver
from vitlab.plan.values import Plan
from vitlab.store.folders import Busy, Store, held, hold, holder


@contextmanager
def sole_driver(plan: Plan, store: Store, watch: Watch) -> Iterator[bool]:
    """Hold the study; as long as another process does, look on.  Yields whether there was one."""
    lock = store.driver(plan.study)
    told: set[str] = set()
    with ExitStack() as held_here:

        def busy() -> bool:
            """Whether another process has it; else this one has it now: only taking it tells, see :func:`held`."""
            try:
                held_here.enter_context(hold(lock))
                return False
            except Busy:
                other = _named(lock)
            if other not in told:
                told.add(other)
                watch.say(f"{plan.study} is run by {other}; this one looks on until that ends.")
            return True

        waited = busy()
        if waited:
            trials = distinct(
                [*plan.trials, *(item for tuning in plan.tuning if tuning.open for item in tuning.trials)]
            )
            left = [item for item in trials if not store.trial(item.trial.key, item.trial.code).done()]
            watch.planned(plan, left, store)
            try:
                follow_driver(trials, store, busy, watch)
            finally:
                watch.close()
        yield waited


def driver_of(study: str, store: Store) -> str:
    """Who runs a study at present, in words; empty where nobody does."""
    lock = store.driver(study)
    return _named(lock) if held(lock) else ""


def _named(lock: Path) -> str:
    """Who took the lock of a study last, in words."""
    host, _, rest = holder(lock)[0].partition("/")
    return f"process {rest.partition('/')[0]} on {host}" if host else "another process"
