"""Replay of trial journals into a tracker, exactly once per event.

The file ``<title>-offsets.json`` in the study's folder records, for each trial, the journal offset and the tracker's
mark, written together after every delivery.  Without that file everything is delivered again without a mark, which a
tracker treats as the beginning.
"""

from __future__ import annotations

import json
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pydantic import TypeAdapter

from vitlab.plan.values import Plan, Planned
from vitlab.store.files import read_json, write_json
from vitlab.store.folders import Event, TrialFolder
from vitlab.store.result import Ending, TrialResult
from vitlab.trackers import records
from vitlab.trackers.base import Tracker

TUNING = "tuning"
COMMIT_S = 1.0  #: between two records of the progress of a delivery

Cursor: TypeAlias = Any
"""Position of a destination within a trial, such as the name and length of a file: any JSON value but null."""


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


@dataclass(frozen=True)
class End:
    """Ending of a trial; a stopped or failed trial may be resumed later."""

    how: Ending  #: done, diverged, failed or stopped
    t: int  #: milliseconds since 1970; 0 if unknown
    reason: str = ""  #: one sentence if the trial diverged or failed
    result: TrialResult | None = None  #: None if the trial ended without one


@dataclass(frozen=True)
class TrialUpdate:
    """New events of one trial."""

    item: TrackedTrial  #: the trial's name, arm, seed and parameters
    folder: TrialFolder  #: the trial's files, such as explanations
    began: int  #: milliseconds since 1970; identifies this training among those of the same trial
    events: tuple[Event, ...]  #: events of the journal in order, each delivered once
    end: End | None = None  #: delivered once


class Unreachable(Exception):
    """Error of :meth:`Replay.write` that ends a delivery at once, because no other trial could be delivered."""


class Replay(Tracker):
    """Tracker that receives the journals' events; :mod:`vitlab.trackers.base` lists the methods to define."""

    in_files: ClassVar[bool] = True  #: False if the contract test cannot compare files, as those of a database
    _next = 0  #: index of the trial at which the next delivery begins

    @property
    def _record(self) -> Path:
        """The file that records deliveries."""
        return self.folder / f"{self.title.lower()}-offsets.json"

    @cached_property
    def trials(self) -> list[TrackedTrial]:
        """The trials of the plan."""
        return tracked_trials(self.plan)

    @cached_property
    def _files(self) -> dict[str, tuple[TrialFolder, str, str]]:
        """Identity to the folder of a trial, and the paths of that folder and its journal as text.

        A delivery checks every trial of the study, and paths made anew for each take most of its time.
        """
        folders = {
            item.identity: self.store.trial(item.planned.trial.key, item.planned.trial.code) for item in self.trials
        }
        return {
            identity: (folder, str(folder.path), str(folder.path / "events.jsonl"))
            for identity, folder in folders.items()
        }

    def begin(self, marks: Mapping[str, Cursor]) -> None:
        """Prepare a delivery; by default do nothing.  A tracker may compare its destination with ``marks``.

        Args:
            marks: what :meth:`write` last returned for each trial, by :attr:`TrackedTrial.identity`.
        """

    @abstractmethod
    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        """Store the new events of a trial.  May raise any exception; the same events are then delivered again.

        Args:
            news: the events to store.
            mark: the last committed return value of ``write`` for this trial.  Anything stored after it comes from an
                interrupted delivery of these same events.  None: replace everything that is stored of this trial.

        Returns:
            The new mark.
        """

    @abstractmethod
    def finish(self, report: Sequence[Path]) -> str | None:
        """Store the study's own files, such as the study file and the report.  Called repeatedly; must be idempotent.

        Returns:
            The address to open, or a command that shows it.
        """

    def holds(self, mark: Cursor) -> bool:
        """Return True if everything up to a mark is stored; otherwise the trial is delivered again without a mark."""
        return True

    def drop(self, mark: Cursor) -> None:
        """Handle a trial that left the study, because of another design, other code or a new training."""

    # -- delivery -----------------------------------------------------------------------------------------------------

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        """Write what the journals have beyond the stored cursors."""
        account = _Account.load(self._record, self.place())
        self.begin({identity: state.mark for identity, state in account.trials.items()})
        first_error: Exception | None = None
        begin, count, committed = self._next, len(self.trials), time.monotonic()
        try:
            current = {item.identity for item in self.trials}
            for identity in [name for name in account.trials if name not in current]:
                try:
                    self.drop(account.trials[identity].mark)
                    del account.trials[identity]
                except Exception as error:  # an error of one trial delays no other
                    first_error = first_error or error
            for place in range(begin, begin + count):  # continues the last delivery, so that no trial waits forever
                if time.monotonic() > until:
                    self._next = place % count
                    break
                try:
                    self._bring_up(self.trials[place % count], account, final)
                except Unreachable:
                    raise
                except Exception as error:
                    first_error = first_error or error
                if time.monotonic() > committed + COMMIT_S:
                    account.commit()
                    committed = time.monotonic()
        finally:
            account.commit()
        link = self.finish(report) if final else None
        if first_error is not None:
            raise first_error
        return link

    def undelivered(self) -> int:
        """Return the number of trials that have begun and whose end is not delivered, or not all of their journal."""
        states = _Account.load(self._record, self.place()).trials
        missing = 0
        for identity, (_, path, journal) in self._files.items():
            state = states.get(identity)
            is_delivered = state is not None and bool(state.end) and state.offset == size_of(journal)
            missing += not is_delivered and os.path.exists(path)
        return missing

    def _bring_up(self, item: TrackedTrial, account: _Account, final: bool) -> None:
        folder, path, journal = self._files[item.identity]
        state = account.trials.get(item.identity)
        if state is None and not os.path.exists(path):
            return  # it has not begun
        size = size_of(journal)
        if state is not None and not self.holds(state.mark):
            state = None
        if state is not None and state.end == "result" and state.offset == size:
            return
        began = began_at(folder)
        if state is not None and state.began and not began:
            return  # the trial's files were deleted; it keeps what was delivered until it is retrained
        if state is not None and (state.began != began or state.offset > size):  # the trial was retrained since
            self.drop(state.mark)
            del account.trials[item.identity]
            state = None
        state = state or _TrialState(began=began)
        events, offset = folder.events(state.offset)
        last = max([state.last_t, *(event.t for event in events if event.kind != "end")])
        name, end = _end(folder, last, final)
        if name == state.end:
            end = None
        if not events and end is None:
            return
        mark = self.write(TrialUpdate(item, folder, began, tuple(events), end), state.mark)
        account.trials[item.identity] = _TrialState(mark, offset, began, name, last)


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


def size_of(journal: str) -> int:
    """Return the size of a journal in bytes."""
    try:
        return os.stat(journal).st_size
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


@dataclass
class _TrialState:
    """Delivery state of one trial at one destination."""

    mark: Cursor | None = None
    offset: int = 0  #: bytes of the journal
    began: int = 0  #: time of its first event
    end: str = ""  #: the delivered ending: ``result``, ``stopped``, or a failure with its time
    last_t: int = 0  #: time of the last event that is not an ending


@dataclass
class _Account:
    """Delivery state of one study at one destination."""

    file: Path
    place: str
    trials: dict[str, _TrialState]
    stored: Mapping[str, Any]  #: content of the file

    @classmethod
    def load(cls, file: Path, place: str) -> _Account:
        """Read the state from a file; what an incompatible version has written is dropped and delivered again."""
        data = (read_json(file, _ACCOUNTS().validate_python) or {}).get(place, {})
        account = cls(file, place, {}, data)
        with suppress(ValueError):
            account.trials = _TRIALS().validate_python(data)
        return account

    def commit(self) -> None:
        now = {name: asdict(item) for name, item in self.trials.items()}
        if now != self.stored:
            write_json(self.file, {**(read_json(self.file, _ACCOUNTS().validate_python) or {}), self.place: now})
            self.stored = now


_ACCOUNTS = cache(lambda: TypeAdapter(dict[str, dict[str, Any]]))  #: by place
_TRIALS = cache(lambda: TypeAdapter(dict[str, _TrialState]))


def _end(folder: TrialFolder, last_t: int, final: bool) -> tuple[str, End | None]:
    """Return the identifier of a trial's ending and the ending; an empty identifier if the trial has not ended."""
    result = folder.result()
    if result is not None:
        return "result", End(result.status, int(result.circumstances.ended * 1000), result.failure, result)
    failure = folder.last_failure()
    if failure is not None and last_t <= failure.time * 1000:  # not restarted since
        return f"failure {failure.time}", End(Ending.FAILED, int(failure.time * 1000), failure.failure)
    if final and last_t and not folder.is_locked():
        return "stopped", End(Ending.STOPPED, last_t)
    return "", None
