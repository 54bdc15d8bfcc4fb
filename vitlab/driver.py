"""Who runs a study: one driver at a time; whoever else is asked to run it looks on, and goes on when that one ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vitlab.execution import Watch, distinct, look_on
from vitlab.plan.values import Plan
from vitlab.store import Busy, Store, held, hold, holder


@contextmanager
def sole_driver(plan: Plan, store: Store, watch: Watch) -> Iterator[bool]:
    """Hold the study; as long as another process does, look on.  Yields whether there was one."""
    lock = store.driver(plan.study)
    waited = False
    with ExitStack() as held_here:
        while True:
            try:
                held_here.enter_context(hold(lock))
                break
            except Busy:
                waited = True
            other = driver_of(plan.study, store) or "another process"
            watch.say(f"{plan.study} is run by {other}; this one looks on until that ends.")
            trials = distinct(
                [*plan.trials, *(item for tuning in plan.tuning if tuning.open for item in tuning.trials)]
            )
            left = [item for item in trials if not store.trial(item.trial.key, item.trial.code).done()]
            watch.planned(plan, left, store)
            try:
                look_on(trials, store, lambda: held(lock), watch)
            finally:
                watch.close()
        yield waited


def driver_of(study: str, store: Store) -> str:
    """Who runs a study at present, in words; empty where nobody does."""
    lock = store.driver(study)
    if not held(lock):
        return ""
    host, _, rest = holder(lock)[0].partition("/")
    return f"process {rest.partition('/')[0]} on {host}" if host else "another process"
