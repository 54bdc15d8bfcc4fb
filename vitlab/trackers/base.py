"""The contract of trackers: where the trials of a study are shown, while they run and afterwards.

The journals of the trials are the truth.  Workers know no tracker: the driver alone replays the journals into one, so a
tracker that is away delays nothing and loses nothing, and a study that was run years ago can be shown in another.

A tracker of your own derives from :class:`~vitlab.trackers.replay.Replay`, which keeps the account of what has been
delivered, and defines two methods; two more have defaults:

===========================  =========================================================================================
``write(news, mark)``        store what is new of one trial, after the mark it was left at; return the new mark
``finish(report)``           nothing more will come: store what stands beside the trials, return where to look
``holds(mark)``              whether what was stored up to a mark is still there; yes, unless it says otherwise
``drop(mark)``               the trial is no part of the study any more; it stays, unless this says otherwise
===========================  =========================================================================================

Exactly once: mark and place in the journal are committed together, after ``write``.  A driver that dies in between has
stored what it has not committed; then the next one hands over the same news, and more, with the same mark.  So
``write`` cuts off what stands behind the mark, or recognises it.

One that needs it otherwise, as MLflow does, derives from :class:`Tracker` and has ``deliver`` alone.  Either may raise
whatever it likes: it is tried again later, and no trial ends by it.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from vitlab.errors import UserError
from vitlab.plan.values import Plan
from vitlab.registry import Slot
from vitlab.spec import RunSpec
from vitlab.store.folders import Store
from vitlab.trackers.address import public
from vitlab.trackers.service import Held, lock

log = logging.getLogger(__name__)

BUDGET_S = 5.0  #: how long one update may take before it leaves the rest to the next
REST = 4.0  #: times as long as an update that used up its budget does the driver go without another
PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0  #: between attempts to reach a place that is away
WAIT_S = 60.0  #: for another process that delivers the same study


class Tracker(ABC):
    """Shows the trials of one plan somewhere."""

    title: ClassVar[str]  #: what people call it, in a word

    def __init__(self, plan: Plan, store: Store, run: RunSpec) -> None:
        """Options follow by keyword.  Imports nothing heavy, and talks to nobody yet.

        Args:
            plan: the study.
            store: where its trials are.
            run: how they run, such as which weights they keep.

        Raises:
            UserError: for options that can lead nowhere.
        """
        self.plan = plan
        self.store = store
        self.run = run
        self.folder = store.study(plan.study)
        _inside(plan)
        self._retry_at = 0.0
        self._pause_s = PAUSE_S
        self._warned = False

    @abstractmethod
    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        """Bring the place up to the journals.  May raise anything.

        Called by one thread of one process at a time, whoever else delivers the same study; while trials run, not by
        the main thread.

        Args:
            final: nothing will be trained any more; all there is is delivered, however long it takes.
            until: the time, by ``time.monotonic()``, to leave the rest to the next call.
            report: files of the study's report; empty while it runs.

        Returns:
            the address to look at, or a command that shows it.
        """

    def update(self) -> None:
        """Deliver what the journals hold by now.

        Returns soon, however slow the place is, and never raises because it is away: what could not be delivered
        waits.
        """
        began = time.monotonic()
        if began < self._retry_at:
            return
        self._attempt(final=False, until=began + BUDGET_S, report=())
        took = time.monotonic() - began
        if took > BUDGET_S:
            self._retry_at = max(self._retry_at, time.monotonic() + REST * took)

    def close(self, report: Sequence[Path] = ()) -> str | None:
        """Deliver all there is, the report's files among it.

        Returns:
            the address to look at; None where nothing could be reached.
        """
        return self._attempt(final=True, until=math.inf, report=report)

    def warn(self, error: Exception) -> None:
        """Say once that something is missing there, until all of it has been delivered."""
        if not self._warned:
            log.warning(
                "%s is not up to date: %s. Trials go on; what is missing there is delivered when it can be, "
                "or by 'vitlab sync'.",
                self.title,
                public(" ".join(str(error).split()))[:300] or type(error).__name__,
            )
        self._warned = True

    def _attempt(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        try:
            with lock(self.folder / f".{self.title.lower()}.lock", wait_s=WAIT_S if final else 0.0):
                link = self.deliver(final=final, until=until, report=report)
        except Held as error:
            if final:
                log.warning("%s: %s; 'vitlab sync' delivers what it leaves", self.title, error)
            return None
        except Exception as error:  # whatever a tracker, its files or its network raises: a training does not end by it
            self._retry_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self.warn(error)
            return None
        self._pause_s, self._warned = PAUSE_S, False
        return link


def _inside(plan: Plan) -> None:
    """Refuse a plan, such as one that came with somebody's results, whose names lead out of the output folder."""
    trials = [*(planned.trial for planned in plan.trials), *plan.prerequisites]
    trials += [planned.trial for tuning in plan.tuning for planned in tuning.trials]
    for name in (plan.study, *(part for trial in trials for part in (trial.key, trial.code))):
        if name in (".", "..") or "/" in name or "\0" in name:
            raise UserError(f"the plan of this study names {name!r}, which is no name of a folder; it is not delivered")


tracker = Slot("tracker", Tracker)  # type: ignore[type-abstract]  # a contract is not built itself


@tracker.register("none")
class Untracked(Tracker):
    """Shows them nowhere; the report is written all the same, and ``vitlab sync`` can show them later."""

    title = ""

    def __init__(self, plan: Plan | None = None, store: Store | None = None, run: RunSpec | None = None) -> None:
        pass  # it needs none of it

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        return None

    def update(self) -> None:
        """Nothing."""

    def close(self, report: Sequence[Path] = ()) -> str | None:
        return None
