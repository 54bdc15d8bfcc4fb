"""The remaining time of a run, estimated from the journals of its trials."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitlab.plan.values import Planned, Trial
from vitlab.spec.trial import LENGTHS
from vitlab.store.folders import Event, Store, TrialFolder

COUNTED = {"epochs": "epoch", "steps": "step", "images": "images"}
"""Unit of a training's length to the field of a measurement that counts it."""


class TrialProgress:
    """A reader of a running trial's journal, from where it ended when the reader was made."""

    def __init__(self, folder: TrialFolder, trial: Trial) -> None:
        self._folder = folder
        _, self._offset = folder.events()
        train = trial.spec.train
        self._unit = next(unit for unit in LENGTHS if getattr(train, unit) is not None)
        self._length = float(getattr(train, self._unit))
        self._start: Event | None = None
        self._points: list[tuple[float, float]] = []  #: time in seconds since 1970, and share of the training
        self.latest: Mapping[str, Any] = {}  #: the last measurement: ``step, epoch, images, metrics``

    def update(self) -> None:
        """Read the lines that have been appended to the journal."""
        events, self._offset = self._folder.events(self._offset)
        for event in events:
            if event.kind == "start":
                self._start, self._points = event, []  # a new attempt, with a speed of its own
            elif event.kind == "metrics":
                self.latest = dict(event.body)
                self._points.append((event.t / 1000, self._share(self.latest)))

    @property
    def started(self) -> float | None:
        """Time of the first line of the latest attempt in the journal, in seconds since 1970; None if it has none."""
        if self._start is not None:
            return self._start.t / 1000
        return self._points[0][0] if self._points else None

    @property
    def share(self) -> float:
        """Share of the training that has been measured, from 0 to 1."""
        return self._points[-1][1] if self._points else 0.0

    @property
    def seconds(self) -> float | None:
        """Duration of a whole training at the speed measured so far, or None before there is one."""
        points = self._points
        if len(points) == 1 and self._start is not None:  # includes what only the first step costs
            points = [(self._start.t / 1000, self._share_at_start(points[0][1])), *points]
        if len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        return (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])

    def _share(self, measurement: Mapping[str, Any]) -> float:
        count = measurement.get(COUNTED[self._unit], 0)
        return min(1.0, count / self._length) if self._length and isinstance(count, int | float) else 0.0

    def _share_at_start(self, share: float) -> float:
        step, first = self.latest.get("step", 0), 0 if self._start is None else self._start.body.get("step", 0)
        return share * first / step if step and isinstance(first, int) else 0.0

    def remaining(self, now: float) -> float | None:
        """Return the remaining seconds of the training, or None if its speed is not known yet."""
        if self.seconds is None:
            return None
        return max(0.0, (1 - self.share) * self.seconds - max(0.0, now - self._points[-1][0]))


@dataclass
class _Batch:
    """Trials that are trained together."""

    trials: list[str]
    arms: list[str]
    running: dict[str, TrialProgress] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    seconds: float | None = None  #: how long it took, if it has ended

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.trials)

    @property
    def started(self) -> float | None:
        return min((item.started for item in self.running.values() if item.started is not None), default=None)

    def duration(self) -> float | None:
        """Return how long the batch takes, measured or at the speed so far; None if that is unknown."""
        known = [item.seconds for item in self.running.values() if item.seconds is not None]
        return max(known, default=None) if self.seconds is None else self.seconds


class RemainingTime:
    """An estimate of the remaining time: running batches at their measured speed, waiting ones at that of others.

    Args:
        todo: The trials to train.
        store: The store of their journals.
        later: Number of further trials, which are not planned yet.
    """

    def __init__(self, todo: Sequence[Planned], store: Store, later: int = 0) -> None:
        self._store, self._later = store, later
        self._slots, self._most_active = len(todo), 0
        self._batches: dict[str, _Batch] = {}
        for planned in todo:
            self._batches[trial_name(planned)] = _Batch([trial_name(planned)], [planned.arm])

    def schedule(self, batches: Iterable[Sequence[Planned]], slots: int) -> None:
        """Take over which trials are trained together, and how many batches run at a time."""
        self._slots = slots
        for planned in batches:
            batch = _Batch([trial_name(item) for item in planned], [item.arm for item in planned])
            self._batches |= dict.fromkeys(batch.trials, batch)

    def start(self, planned: Planned) -> TrialProgress:
        """Follow the journal of a trial from now on."""
        progress = TrialProgress(self._store.trial(planned.trial.key, planned.trial.code), planned.trial)
        if batch := self._batches.get(trial_name(planned)):
            batch.running[trial_name(planned)] = progress
        return progress

    def end(self, planned: Planned, now: float) -> None:
        """Record that a trial has ended, in whatever way, for good."""
        batch = self._batches.get(trial_name(planned))
        if batch is None:
            return
        for progress in batch.running.values():
            progress.update()
        if batch.started is not None:
            batch.seconds = max(0.0, now - batch.started)
        batch.ended.add(trial_name(planned))

    def update(self) -> None:
        """Read what has been appended to the journals of running trials."""
        for batch in self._distinct():
            for name, progress in batch.running.items():
                if name not in batch.ended:
                    progress.update()

    def seconds(self, now: float) -> float | None:
        """Return the remaining seconds, or None before any speed has been measured; call :meth:`update` first."""
        batches = [batch for batch in self._distinct() if not batch.is_over]
        active = [batch for batch in batches if batch.started is not None]
        self._most_active = max(self._most_active, len(active))
        costs = self._costs()
        if not costs:
            return None if batches or self._later else 0.0
        usual = statistics.fmean(costs.values())
        busy = [_remaining(batch, now, costs, usual) for batch in active]
        # A scheduler may hold jobs back, so that fewer run at a time than there are slots.
        places = max(1, min(self._slots, self._most_active or 1))
        ends = [*busy, *[0.0] * max(0, places - len(busy))]
        heapq.heapify(ends)
        waiting = [sum(costs.get(arm, usual) for arm in batch.arms) for batch in batches if batch.started is None]
        for seconds in [*waiting, *[usual] * self._later]:
            heapq.heappush(ends, heapq.heappop(ends) + seconds)
        return max(ends)

    def _distinct(self) -> list[_Batch]:
        return list({id(batch): batch for batch in self._batches.values()}.values())

    def _costs(self) -> dict[str, float]:
        """Return arm to seconds of a trial: the duration of its batch shared by the trials in it."""
        by_arm: dict[str, list[float]] = {}
        for batch in self._distinct():
            if (seconds := batch.duration()) is not None:
                for arm in batch.arms:
                    by_arm.setdefault(arm, []).append(seconds / len(batch.trials))
        return {arm: statistics.fmean(values) for arm, values in by_arm.items()}


def _remaining(batch: _Batch, now: float, costs: Mapping[str, float], usual: float) -> float:
    """Return the remaining seconds of a batch that has started."""
    known = [left for item in batch.running.values() if (left := item.remaining(now)) is not None]
    if known:
        return max(known)
    elapsed = now - batch.started if batch.started is not None else 0.0
    return max(0.0, sum(costs.get(arm, usual) for arm in batch.arms) - elapsed)


def trial_name(planned: Planned) -> str:
    """Return the name of a trial in displays: its arm and seed."""
    return f"{planned.arm} s{planned.seed}"
