"""Trackers show the trials of a study during and after a run; this is their contract.

The trials' journals are the source of truth.  Only the driver, or a process of its own for that, uses trackers: it
replays the journals into one, so an unreachable tracker delays and loses nothing, and an old study can be shown in a
new tracker.

A custom tracker derives from :class:`~vitlab.trackers.replay.Replay`, which records what has been delivered, and
defines two methods; five more have defaults:

===========================  =========================================================================================
``write(news, mark)``        store the new events of one trial after the previous mark; return the new mark
``write_study(report)``      store the study's own files after the last event; return the address to open
``begin_delivery(marks)``    prepare a delivery, such as by listing what is stored; default: nothing
``holds(mark)``              return whether everything up to a mark is still stored; default: True
``remove_trial(mark)``       handle a trial that left the study; default: keep it
``stored_points(mark)``      return the stored points of a trial; only the contract test calls it
``whole_trials``             True to receive a trial only once it has ended, and all of it at once; default: False
===========================  =========================================================================================

Exactly-once delivery: mark and journal offset are committed together, after ``write``.  If a driver dies in between,
the next driver passes the same events again, and possibly more, with the same mark.  So ``write`` must truncate, or
recognise, what it stored after the mark.

A tracker that replays no journals derives from :class:`Tracker` and defines ``deliver`` alone.  Either may raise
any exception: delivery is retried later, and no trial fails because of it.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from vitlab.errors import UserError, list_some, one_line, public
from vitlab.planning.values import Plan
from vitlab.registry import Slot
from vitlab.spec import RunSpec
from vitlab.store.files import read_json, require_mapping, write_json
from vitlab.store.folders import Store
from vitlab.store.locks import Busy, hold_lock, kill_orphan

log = logging.getLogger(__name__)

DELIVERED = "delivered.json"
"""File in a study's folder: the address of each place that lacked nothing as of the last report; null of any other."""
EMBEDDED = "embedded"  #: place in the output folder
PAUSE_S = 30.0  #: between attempts to reach an unreachable destination
WAIT_S = 60.0  #: time to wait for another process that delivers the same study


class Tracker(ABC):
    """Delivery of one plan's trials and report to one kind of tracker."""

    title: ClassVar[str]  #: display name, one word

    def __init__(self, plan: Plan, store: Store, run: RunSpec) -> None:
        """Set up the tracker without heavy imports or connections; a subclass's options follow by keyword.

        Args:
            plan: the study.
            store: the store of its trials.
            run: the run settings, such as which weights are kept.

        Raises:
            UserError: if the options cannot work.
        """
        self.plan = plan
        self.store = store
        self.run = run
        self.folder = store.study(plan.study)
        self.delivered = Counter[str]()  #: what this object has delivered: number by kind, such as points
        for name in (plan.study, *(part for trial in plan.trials_with_keys for part in (trial.key, trial.code))):
            if name in (".", "..") or "/" in name or "\0" in name:  # of a plan that was copied with other results
                raise UserError(
                    f"plan.json: {name!r} is not the name of a folder, so the study is not delivered; run it again"
                )
        self._retry_at = 0.0  #: 0.0 unless the last delivery failed

    @classmethod
    def reason_to_confirm(cls, option: str, value: Any, root: Path) -> str:
        """Return why the user must confirm an option that only a file gives; empty if not.

        A study file may come from other people.  An option needs confirmation if it sends results or credentials to a
        server, or has something written outside the output folder.

        Args:
            option: name of the option.
            value: its value.
            root: the output folder.
        """
        return ""

    @classmethod
    def prepare(cls) -> None:
        """Start what every delivery needs, without waiting for it, before trials are known.  By default do nothing."""
        return

    @abstractmethod
    def deliver(self, *, final: bool, report: Sequence[Path]) -> str | None:
        """Deliver what is new in the journals.  May raise any exception.

        Called by one thread of one process at a time, also if several processes deliver the same study; while trials
        run, the caller is not the main thread.

        Args:
            final: True after the last training; everything is delivered, however long it takes.
            report: files of the study's report; empty while the study runs.

        Returns:
            The address to open, or a command that shows it; None if there is neither.
        """

    def place(self) -> str:
        """Return the name of the destination; deliveries are recorded per destination."""
        return self.title

    def start_command(self) -> str:
        """Return the command that serves the address that :meth:`close` returns; empty if it is served already."""
        return ""

    def count_undelivered(self) -> int | None:
        """Return the number of trials that have begun and are not completely delivered; None if it is not recorded."""
        return None

    def update(self) -> None:
        """Deliver the current content of the journals.

        Does not raise if the destination is unreachable: what could not be delivered is retried by a later update.
        """
        if time.monotonic() >= self._retry_at:
            self._try_to_deliver(final=False, report=())

    def close(self, report: Sequence[Path] = ()) -> str | None:
        """Deliver everything, including the report's files.

        Returns:
            The address to open, empty if the tracker has none; None if the destination was unreachable.
        """
        return self._try_to_deliver(final=True, report=report)

    def sync(self, report: Sequence[Path] = ()) -> str | None:
        """Check that what was delivered is still stored, and deliver everything that is missing.

        :attr:`delivered` then has the number of missing items by kind.  By default nothing is checked.

        Returns:
            The same as :meth:`close`.
        """
        return self.close(report)

    def warn(self, error: Exception) -> None:
        """Log that deliveries are missing."""
        log.warning(
            "%s is not up to date: %s. A later delivery, or 'vitlab sync', has what is missing.",
            self.title,
            public(one_line(error))[:300] or type(error).__name__,
        )

    def _try_to_deliver(self, *, final: bool, report: Sequence[Path]) -> str | None:
        try:
            with hold_lock_with_timeout(self.folder / f".{self.title.lower()}.lock", wait_s=WAIT_S if final else 0.0):
                if self.place() not in read_deliveries(
                    self.folder
                ):  # a later sync asks for a place that it cannot know
                    self._record_delivery(None)
                link = self.deliver(final=final, report=files_within(self.store.root, report)) or ""
                if final and report:
                    self._record_delivery(link)
        except Busy as error:
            if final:
                log.warning("%s: %s; 'vitlab sync' delivers what it leaves", self.title, error)
            return None
        except Exception as error:  # no error of a tracker, its files or its network may end a training
            if not self._retry_at:  # one warning until all is delivered
                self.warn(error)
            self._retry_at = time.monotonic() + PAUSE_S
            return None
        self._retry_at = 0.0
        return link

    def _record_delivery(self, link: str | None) -> None:
        write_json(self.folder / DELIVERED, {**read_deliveries(self.folder), self.place(): link})


def files_within(root: Path, files: Iterable[Path]) -> list[Path]:
    """Return the files that exist.  Those behind a link that leads out of the output folder are named and left out.

    An output folder may come from other people, and such a link may lead to any file of the user.
    """
    there = [file for file in files if file.is_file()]
    outside = [file for file in there if not file.resolve().is_relative_to(root.resolve())]
    if outside:
        log.warning(
            "not delivered, because links lead out of %s: %s; move the files there", root, list_some(map(str, outside))
        )
    return [file for file in there if file not in outside]


@contextmanager
def hold_lock_with_timeout(file: Path, *, wait_s: float) -> Iterator[None]:
    """Hold a file's lock.

    Raises:
        Busy: if another process still holds it after ``wait_s``.
    """
    until = time.monotonic() + wait_s
    with ExitStack() as locks:
        while True:
            try:
                locks.enter_context(hold_lock(file))
                break
            except Busy:
                if not kill_orphan(file):  # a delivering process that hangs, whose driver is dead
                    if time.monotonic() >= until:
                        raise Busy(f"{file} is held by another process") from None
                    time.sleep(0.1)
        yield


def read_deliveries(study_folder: Path) -> Mapping[str, Any]:
    """Return by place what the last complete delivery of a study returned."""
    record = read_json(study_folder / DELIVERED, require_mapping) or {}
    # Earlier versions knew one place.
    return {str(record["place"]): record.get("link")} if "place" in record else record


tracker = Slot("tracker", Tracker)  # type: ignore[type-abstract]  # the abstract class itself is never built


@tracker.register("none")
class Untracked(Tracker):
    """No tracking; the report is still written, and ``vitlab sync`` can deliver the trials later."""

    title = ""

    def __init__(self, *study: object) -> None:
        pass

    def deliver(self, *, final: bool, report: Sequence[Path]) -> str | None:
        """Do nothing."""
        return None
