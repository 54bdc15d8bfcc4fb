"""Replay: the journals of a study's trials handed to a tracker piece by piece, each piece once.

How far each trial has been delivered stands in the study's folder, in ``<title>-offsets.json``: the place in the
journal, and the tracker's own mark, written together after every delivery.  Without that file everything is delivered
anew, with no mark, which a tracker takes for the beginning.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

from vitlab.store.folders import Event, TrialFolder, read_json, write_json
from vitlab.store.result import Result
from vitlab.trackers.base import Tracker
from vitlab.trackers.tracked_trials import Shown, began_at, shown, size_of

Cursor: TypeAlias = Any
"""Says how far a place has come with a trial, such as the name and the length of a file.  Any JSON value but null."""


@dataclass(frozen=True)
class End:
    """How a trial ended, for now: one that was stopped, or failed, may be taken up again."""

    how: Literal["done", "diverged", "failed", "stopped"]
    t: int  #: milliseconds since 1970; 0 where nobody knows
    reason: str = ""  #: one sentence where it did not end well
    result: Result | None = None  #: None where it ended without one


@dataclass(frozen=True)
class TrialUpdate:
    """What is new of one trial."""

    item: Shown  #: who it is: its name, arm, seed and parameters
    folder: TrialFolder  #: where its files are, such as explanations
    began: int  #: milliseconds since 1970; tells this training from an earlier one of the same trial
    events: tuple[Event, ...]  #: of the journal, in order, each handed over once
    end: End | None = None  #: handed over once


class Replay(Tracker):
    """A tracker that is handed the journals; see :mod:`vitlab.trackers.base` for what it defines."""

    @abstractmethod
    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        """Store what is new of a trial.  May raise anything; the same news then come again.

        Args:
            news: what is to be stored.
            mark: what the last ``write`` for this trial returned, as far as that was committed.  What is stored behind
                it is these same news, from a delivery that broke off.  None: whatever is stored of this trial is to be
                replaced.

        Returns:
            the new mark.
        """

    @abstractmethod
    def finish(self, report: Sequence[Path]) -> str | None:
        """Store what stands beside the trials, such as the study file and the report.  Called often, alike.

        Returns:
            the address to look at, or a command that shows it.
        """

    def holds(self, mark: Cursor) -> bool:
        """Whether all is there up to a mark; if not, the trial is delivered anew, without a mark."""
        return True

    def drop(self, mark: Cursor) -> None:
        """What this mark stands for is no part of the study any more: another design, other code, a new training."""

    def place(self) -> str:
        """Names where this delivers to: what one place has, another has not."""
        return self.title

    # -- the account --------------------------------------------------------------------------------------------------

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        account = _Account.read(self.folder / f"{self.title.lower()}-offsets.json", self.place())
        items = shown(self.plan)
        trouble: Exception | None = None
        try:
            current = {item.identity for item in items}
            for identity in [known for known in account.trials if known not in current]:
                try:
                    self.drop(account.trials[identity].mark)
                    del account.trials[identity]
                except Exception as error:  # the trouble with one trial keeps back no other
                    trouble = trouble or error
            for item in items:
                if time.monotonic() > until:
                    break
                try:
                    self._bring_up(item, account, final)
                except Exception as error:
                    trouble = trouble or error
        finally:
            account.commit()
        if trouble is not None:
            raise trouble
        return self.finish(report) if final else None

    def _bring_up(self, item: Shown, account: _Account, final: bool) -> None:
        folder = self.store.trial(item.planned.trial.key, item.planned.trial.code)
        known, size = account.trials.get(item.identity), size_of(folder)
        if known is not None and not self.holds(known.mark):
            known = None
        if known is not None and known.end == "result" and known.offset == size:
            return
        began = began_at(folder)
        if known is not None and (known.began != began or known.offset > size):  # it was trained anew since
            self.drop(known.mark)
            del account.trials[item.identity]
            known = None
        known = known or _Delivered(began=began)
        events, offset = folder.events(known.offset)
        last = max([known.last_t, *(event.t for event in events if event.kind != "end")])
        name, end = _end(folder, last, final)
        if name == known.end:
            end = None
        if not events and end is None:
            return
        mark = self.write(TrialUpdate(item, folder, began, tuple(events), end), known.mark)
        account.trials[item.identity] = _Delivered(mark, offset, began, name, last)


@dataclass
class _Delivered:
    """What a place holds of a trial."""

    mark: Cursor | None = None
    offset: int = 0  #: bytes of the journal
    began: int = 0  #: time of its first event
    end: str = ""  #: which end was delivered: ``result``, ``stopped``, or a failure with its time
    last_t: int = 0  #: time of the last event that was no end


@dataclass
class _Account:
    """What one place holds of a study."""

    file: Path
    place: str
    trials: dict[str, _Delivered]
    seen: Mapping[str, Any]  #: as it stands in the file

    @classmethod
    def read(cls, file: Path, place: str) -> _Account:
        """What the file says; what another version has written is dropped, and delivered anew."""
        data = (read_json(file, _ACCOUNTS.validate_python) or {}).get(place, {})
        account = cls(file, place, {}, data)
        with suppress(ValueError):
            account.trials = _TRIALS.validate_python(data)
        return account

    def commit(self) -> None:
        now = {name: asdict(item) for name, item in self.trials.items()}
        if now != self.seen:
            write_json(self.file, {**(read_json(self.file, _ACCOUNTS.validate_python) or {}), self.place: now})


_ACCOUNTS = TypeAdapter(dict[str, dict[str, Any]])  #: by place
_TRIALS = TypeAdapter(dict[str, _Delivered])


def _end(folder: TrialFolder, last_t: int, final: bool) -> tuple[str, End | None]:
    """Which end a trial has come to, and what there is to say of it."""
    result = folder.result()
    if result is not None:
        return "result", End(result.status, int(result.circumstances.ended * 1000), result.failure, result)
    failure = folder.last_failure()
    if failure is not None and last_t <= failure.time * 1000:  # it has not begun again since
        return f"failure {failure.time}", End("failed", int(failure.time * 1000), failure.failure)
    if final and last_t and not folder.held():
        return "stopped", End("stopped", last_t)
    return "", None
