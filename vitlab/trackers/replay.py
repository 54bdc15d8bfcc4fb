"""Replay of trial journals into a tracker, exactly once per event.

The file ``<title>-offsets.json`` in the study's folder records, for each trial, the journal offset and the tracker's
mark, written together after every delivery.  Without that file everything is delivered again without a mark, which a
tracker treats as the beginning.
"""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from vitlab.planning.values import Plan, Planned
from vitlab.spec.tree import parse_as, type_adapter
from vitlab.store.files import read_json, write_json
from vitlab.store.folders import Event, TrialFolder
from vitlab.store.result import Ending, TrialResult
from vitlab.trackers import Tracker, records

log = logging.getLogger(__name__)

TUNING = "tuning"
COMMIT_S = 5.0  #: time between two records of the progress of a delivery, which are long in a large study
LIVE_S = 30.0  #: of a trial's journal that are delivered together while it runs

_StudyStates = dict[str, dict[str, object]]
"""What has been delivered, by place and trial."""

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
        return trial_identity(trial.key, trial.code, self.planned.arm)


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
    began: int  #: milliseconds since 1970; identifies this training among the trainings of the trial
    events: tuple[Event, ...]  #: events of the journal in order, each delivered once
    end: End | None = None  #: delivered once


class Unreachable(Exception):
    """Error of :meth:`Replay.write` that ends a delivery at once, because no other trial could be delivered."""


class Replay(Tracker):
    """Tracker that receives the journals' events; :mod:`vitlab.trackers` lists the methods to define."""

    whole_trials: ClassVar[bool] = False
    """True if the destination cannot continue a trial: ``write`` is called when a trial has ended, with all of its
    events, and the mark of what it replaces."""

    @cached_property
    def trials(self) -> list[TrackedTrial]:
        """The trials of the plan."""
        return tracked_trials(self.plan)

    def begin_delivery(self, marks: Mapping[str, Cursor]) -> None:
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
    def write_study(self, report: Sequence[Path]) -> str | None:
        """Store the study's own files, such as the study file and the report.  Called repeatedly; must be idempotent.

        Returns:
            The address to open, or a command that shows it.
        """

    def holds(self, mark: Cursor) -> bool:
        """Return True if everything up to a mark is stored; otherwise the trial is delivered again without a mark."""
        return True

    def remove_trial(self, mark: Cursor) -> None:
        """Handle a trial that left the study, because of another design, other code or a new training."""

    def stored_points(self, mark: Cursor) -> Iterable[tuple[str, float, int]]:
        """Return the metrics stored of a trial, as name, value and step; only the contract test needs them."""
        raise NotImplementedError

    def marks(self) -> dict[str, Cursor]:
        """Return the mark of every delivered trial, by :attr:`TrackedTrial.identity`."""
        return {identity: state.mark for identity, state in self._load_states().trials.items()}

    # -- delivery -----------------------------------------------------------------------------------------------------

    def deliver(self, *, final: bool, report: Sequence[Path]) -> str | None:
        """Write what the journals have beyond the stored marks."""
        states = self._load_states()
        self.begin_delivery({identity: state.mark for identity, state in states.trials.items()})
        first_error: Exception | None = None
        due = time.monotonic() + COMMIT_S
        try:
            for identity in states.trials.keys() - {item.identity for item in self.trials}:
                try:
                    self.remove_trial(states.trials[identity].mark)
                    del states.trials[identity]
                except Exception as error:  # an error of one trial delays no other
                    first_error = first_error or error
            for number, item in enumerate(self.trials, 1):
                try:
                    self._deliver_trial(item, states, final)
                except Unreachable:
                    raise
                except Exception as error:
                    first_error = first_error or error
                if time.monotonic() > due:
                    states.save_if_changed()
                    due = time.monotonic() + COMMIT_S
                    if final:  # by a warning, which reaches the driver from a process of its own
                        log.warning("%s: %s of %s trials looked at", self.title, number, len(self.trials))
        finally:
            states.save_if_changed()
        link = self.write_study(report) if final else None
        if first_error is not None:
            raise first_error
        return link

    def count_undelivered(self) -> int:
        """Return the number of trials that have begun and whose end is not delivered, or not all of their journal."""
        states, missing = self._load_states().trials, 0
        for item in self.trials:
            state, folder = states.get(item.identity), self.trial_folder(item)
            if state is not None and state.end:
                missing += state.offset < folder.journal_size()
            else:
                missing += folder.path.exists()
        return missing

    def trial_folder(self, item: TrackedTrial) -> TrialFolder:
        """Return the folder of a trial."""
        return self.store.folder(item.planned.trial)

    def _load_states(self) -> _StudyState:
        """Read what has been delivered."""
        return _StudyState.load(self.folder / f"{self.title.lower()}-offsets.json", self.place())

    def _deliver_trial(self, item: TrackedTrial, states: _StudyState, final: bool) -> None:
        """Write the new events of one trial, if there are any."""
        folder, state = self.trial_folder(item), states.trials.get(item.identity)
        if state is None and not folder.path.exists():
            return  # it has not begun
        size = folder.journal_size()
        if state is not None:
            if not self.holds(state.mark):
                state = None
            elif state.end.startswith("result") and state.offset == size:
                return
        result = folder.result()
        began = first_event = training_start(folder)
        if not began and result is not None:  # its journal is lost
            began = state.began if state is not None else round(result.circumstances.started * 1000)
        if state is not None:
            if state.began and not began:
                return  # the trial's files were deleted; it keeps what was delivered until it is retrained
            if state.began != began or state.offset > size > 0:  # the trial was retrained since
                self.remove_trial(state.mark)
                del states.trials[item.identity]
                state = None
        state = state or _TrialState(began=began)
        events, offset = folder.events(state.offset)
        if training_start(folder) != first_event:
            return  # a worker has begun the journal since: its events would be stored as another training's, too
        last = max([state.last_t, *(event.t for event in events if event.kind != "end")])
        name, end = _read_ending(folder, result, last, final and not self.whole_trials)
        if not events and name in ("", state.end):
            return
        if self.whole_trials:
            events, state = folder.events()[0], replace(state, steps={})
        elif name == state.end:
            end = None
        if end is None and (self.whole_trials or (not final and last - max(state.last_t, began) < LIVE_S * 1000)):
            return  # a short trial is written once, when it has ended
        if end is not None and end.result is not None:
            events = [*_recover_lost_metrics(end, events, state.steps), *events]
        mark = self.write(TrialUpdate(item, folder, began, tuple(events), end), state.mark)
        self.delivered["trials"] += 1
        measured = (event.body for event in events if event.kind == "metrics")
        steps = state.steps | {
            metric: max(body["step"], state.steps.get(metric, -1))
            for body in sorted(measured, key=lambda body: body["step"])
            for metric in body["metrics"]
        }
        states.trials[item.identity] = _TrialState(mark, offset, began, name, last, steps)


def tracked_trials(plan: Plan) -> list[TrackedTrial]:
    """Return the trials of a plan, each once; a trial shared by several seeds is one training."""
    params = records.params_by_trial(plan.trials_with_keys)
    items: dict[str, TrackedTrial] = {}

    def add(planned: Planned, kind: str, name: str) -> None:
        values = {"arm": planned.arm or records.ABSENT, "seed": str(planned.seed), **params[planned.trial.key]}
        item = TrackedTrial(planned, kind, f"{name}/s{planned.seed}", values)
        items.setdefault(item.identity, item)

    for planned in plan.trials:
        add(planned, "trial", planned.arm)
    for planned in plan.labelled_prerequisites:
        add(replace(planned, arm=""), "prerequisite", planned.arm)
    for planned in plan.rival_trials:  # of no arm: no mean includes them
        add(replace(planned, arm=""), TUNING, f"tuning {planned.arm}")
    return list(items.values())


def trial_identity(key: str, code: str, arm: str) -> str:
    """Return the identity of a tracked trial."""
    return f"{key}/{code}/{arm}"


def training_start(folder: TrialFolder) -> int:
    """Return when a training began, which identifies it among the trainings of its trial.

    Returns:
        Milliseconds since 1970: the time of the first readable event of the journal; 0 if there is no journal.
    """
    with suppress(FileNotFoundError), open(folder.journal, "rb") as journal:
        for line in journal:
            if line.endswith(b"\n"):
                with suppress(ValueError, LookupError, TypeError, OverflowError):
                    return int(json.loads(line)["t"])
    return 0


def _recover_lost_metrics(end: End, events: Iterable[Event], delivered: Mapping[str, int]) -> list[Event]:
    """Return the metrics that a journal has lost and that are not delivered, from the result.

    A step may have two measurements, and the second one may follow those of later steps: each metric by itself is
    measured at growing steps.  Their times are not known, so they have the time of the trial's end.

    Args:
        end: the trial's end, with a result.
        events: events of the journal that are not delivered yet.
        delivered: metric to its last delivered step.
    """
    assert end.result is not None
    new = {(name, event.body["step"]) for event in events if event.kind == "metrics" for name in event.body["metrics"]}
    recovered: list[Event] = []
    for moment in end.result.outcome.history:
        metrics = {
            name: value
            for name, value in moment.metrics.items()
            if moment.step > delivered.get(name, -1) and (name, moment.step) not in new
        }
        if metrics:
            recovered.append(Event(end.t, "metrics", {**asdict(moment), "metrics": metrics}))
    return recovered


def _read_ending(folder: TrialFolder, result: TrialResult | None, last_t: int, final: bool) -> tuple[str, End | None]:
    """Return the identifier of a trial's ending and the ending; an empty identifier if the trial has not ended."""
    if result is not None:
        ended = int(result.circumstances.ended * 1000)
        return f"result {ended}", End(result.status, ended, result.failure, result)
    failure = folder.failure()
    if failure is not None and last_t <= failure.time * 1000:  # not restarted since
        return f"failure {failure.time}", End(Ending.FAILED, int(failure.time * 1000), failure.failure)
    if final and last_t and not folder.is_locked():
        return "stopped", End(Ending.STOPPED, last_t)
    return "", None


@dataclass
class _TrialState:
    """Delivery state of one trial at one destination."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # a state of another form is no state
    mark: Cursor | None = None
    offset: int = 0  #: bytes of the journal
    began: int = 0  #: see :func:`training_start`
    end: str = ""  #: identifier of the delivered ending, see :func:`_read_ending`
    last_t: int = 0  #: time of the last event that is not an ending
    steps: dict[str, int] = field(default_factory=dict)  #: of the last delivered value of each metric


@dataclass
class _StudyState:
    """Delivery state of one study at one destination."""

    file: Path
    place: str
    trials: dict[str, _TrialState] = field(default_factory=dict)
    stored: dict[str, object] = field(default_factory=dict)  #: content of the file

    @classmethod
    def load(cls, file: Path, place: str) -> _StudyState:
        """Read the state from a file; without a valid one, everything is delivered again."""
        states = cls(file, place)
        with suppress(ValueError):
            places = read_json(file, type_adapter(_StudyStates).validate_python) or {}
            states.trials = parse_as(dict[str, _TrialState], places.get(place, {}))
        states.stored = states._to_json()
        return states

    def save_if_changed(self) -> None:
        """Write the state, if it has changed, beside the states at other destinations."""
        now = self._to_json()
        if now != self.stored:
            places = read_json(self.file, type_adapter(_StudyStates).validate_python) or {}
            write_json(self.file, {**places, self.place: now})
            self.stored = now

    def _to_json(self) -> dict[str, object]:
        return {name: dict(vars(item)) for name, item in self.trials.items()}
