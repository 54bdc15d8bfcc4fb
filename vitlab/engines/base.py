"""The contract of engines, the engine ``loop``, and the schedule of steps, evaluations and checkpoints of trainings."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from vitlab.registry import Slot
from vitlab.store.result import Measurement, Outcome
from vitlab.training.evaluation import EvaluationResult, Split
from vitlab.training.loop import Diverged, Training


class EngineFailed(Exception):
    """An engine failed before it completed anything; :attr:`fallback` may succeed with new trainings."""

    def __init__(self, fallback: str, error: Exception) -> None:
        super().__init__(str(error))
        self.fallback = fallback


class Engine(ABC):
    """Contract: ``Engine(trainings)`` computes trainings that it supports and that are at the same step.

    A step and an evaluation of a training must equal :class:`Loop`'s up to rounding, and must not depend on the
    other trainings: the engine is no part of a trial's key.

    Raises:
        EngineFailed: If it cannot be set up and there is a fallback.
    """

    fallback: ClassVar[str] = ""
    """The engine to use for trainings that this one does not support, or at which it fails; empty for none."""

    one_at_a_time: ClassVar[bool] = False
    """Whether each training is computed by itself, so that trials are not trained in batches."""

    benchmarked: ClassVar[bool] = True
    """Whether ``run.engine: measured`` tries it; compiling takes longer than the benchmark."""

    def __init__(self, trainings: Sequence[Training]) -> None:
        self.trainings = list(trainings)
        self._completed = False

    @classmethod
    def incompatibility(cls, training: Training) -> str | None:
        """Return the reason why the engine does not support a training, in one sentence; None if it does."""
        return None

    def train_step(self) -> None:
        """Take one optimizer step of every training; raise EngineFailed if the first one fails."""
        with self._fallback_on_error():
            self.compute_step()
        self._completed = True

    def evaluate(self, splits: Sequence[Split]) -> Sequence[Iterable[EvaluationResult]]:
        """Return for each training its evaluations, possibly computed only when they are iterated over."""
        with self._fallback_on_error():
            evaluations = self.compute_evaluations(splits)
        self._completed = True
        return evaluations

    @abstractmethod
    def compute_step(self) -> None:
        """Take one optimizer step of every training.  Nothing is read back from the device."""

    @abstractmethod
    def compute_evaluations(self, splits: Sequence[Split]) -> Sequence[Iterable[EvaluationResult]]:
        """Return for each training its evaluations of these splits."""

    @contextmanager
    def _fallback_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # components that do not support an engine may raise anything
            if self._completed or not self.fallback:
                raise
            raise EngineFailed(self.fallback, error) from error


engine: Slot[Engine] = Slot("engine", Engine)  # type: ignore[type-abstract]  # a contract is not built


@engine.register("loop")
class Loop(Engine):
    """Computes one training after another.  It supports every training."""

    one_at_a_time = True

    def compute_step(self) -> None:
        """Take the steps in turn."""
        for training in self.trainings:
            training.train_step()

    def compute_evaluations(self, splits: Sequence[Split]) -> Sequence[Iterable[EvaluationResult]]:
        """Evaluate each training when its evaluations are iterated over."""
        return [map(training.evaluate, splits) for training in self.trainings]


WORTH_SAVING_S = 1.0
"""Seconds of work from which a checkpoint is written after an evaluation; less work is repeated after a resume."""


def train(
    trainings: Sequence[Training],
    engine: type[Engine] = Loop,
    *,
    stop: Callable[[], bool] = lambda: False,
    every_s: float = 60.0,
) -> list[Outcome | None]:
    """Train models in place.

    The trainings share the shapes, the validation and test images, the length and the evaluations; each may stop early.
    After a resume they may be at different steps; those behind are trained first.  With ``spec.ema`` a model holds the
    averaged weights afterwards.

    Args:
        trainings: The trainings.  A training is saved when it is stopped, at an evaluation if more than
            :data:`WORTH_SAVING_S` of work is unsaved, and at any step if more than ``every_s`` is.
        engine: An engine that supports each of them.
        stop: Called before every step; training stops once it returns True.
        every_s: See ``trainings``; ``run.checkpoint_interval`` of a study.

    Returns:
        The outcome of each training, or None if it was stopped before its last step.

    Raises:
        EngineFailed: If the engine fails at its first step.
    """
    outcomes: dict[Training, Outcome] = {}
    active = list(trainings)
    latest: Engine | None = None
    first = trainings[0]
    saved_at, worth_s = time.monotonic(), min(every_s, WORTH_SAVING_S)
    splits = ("val", "test", *first.feed.test_sets)  # the last measurement of a training evaluates all of these
    for moment in evaluation_steps(first.steps, first.spec.evaluations):
        last = moment == first.steps
        while behind := [training for training in active if training.step < moment]:
            # Trainings at one step go on together until they reach the next ones ahead.
            step, *later = sorted({training.step for training in behind})
            latest = _reuse_or_build([training for training in behind if training.step == step], engine, latest)
            for _ in range(step, later[0] if later else moment):
                if stop():
                    _save_all(active)
                    return [outcomes.get(training) for training in trainings]
                latest.train_step()
                if time.monotonic() - saved_at > every_s:
                    _save_all(active)
                    saved_at = time.monotonic()
        due = [training for training in active if last or training.last_measured_step < moment]
        if not due:  # before the point at which all have resumed
            continue
        # Saved before the last evaluation, which may take longer than all steps and fail.
        if last and time.monotonic() - saved_at > worth_s:
            _save_all(due)
        latest = _reuse_or_build(due, engine, latest)
        measurements = _measure_or_diverge(due, latest.evaluate(splits if last else splits[:1]), outcomes)
        ending = list(measurements) if last else [training for training in measurements if training.stops_early()]
        if ending and not last:
            latest = _reuse_or_build(ending, engine, latest)
            measurements |= _measure_or_diverge(ending, latest.evaluate(splits[1:]), outcomes)
        for training, measurement in measurements.items():
            if training not in outcomes:
                training.emit(measurement)
                if training in ending:
                    outcomes[training] = training.finish()
        active = [training for training in active if training not in outcomes]
        if not last and time.monotonic() - saved_at > worth_s:
            _save_all(active)
            saved_at = time.monotonic()
    return [outcomes.get(training) for training in trainings]


def _measure_or_diverge(
    trainings: Sequence[Training], evaluations: Sequence[Iterable[EvaluationResult]], outcomes: dict[Training, Outcome]
) -> dict[Training, Measurement]:
    """Return the measurements of trainings; those that have diverged get an outcome instead."""
    measurements: dict[Training, Measurement] = {}
    for training, own in zip(trainings, evaluations, strict=True):
        try:
            measurements[training] = training.measure(own)
        except Diverged as error:
            outcomes[training] = training.diverge(error)
    return measurements


def evaluation_steps(steps: int, evaluations: int) -> list[int]:
    """Return the evenly spaced steps after which an evaluation follows, the last step included."""
    return sorted({-(-i * steps // evaluations) for i in range(1, evaluations + 1)})


def _reuse_or_build(trainings: list[Training], engine: type[Engine], latest: Engine | None) -> Engine:
    """Return the engine of these trainings, which is the latest one if that has the same."""
    return latest if latest is not None and latest.trainings == trainings else engine(trainings)


def _save_all(trainings: Iterable[Training]) -> None:
    for training in trainings:
        training.save()
