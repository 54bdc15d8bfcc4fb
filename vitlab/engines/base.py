"""The contract of engines, the engine ``loop``, and the schedule of steps, evaluations and checkpoints of trainings."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from vitlab.registry import Slot
from vitlab.store.result import Measurement, Outcome
from vitlab.training.evaluation import EvaluationResult, Split
from vitlab.training.loop import Diverged, Training
from vitlab.training.memory import is_out_of_memory


class EngineFailed(Exception):
    """An engine failed with an error before it completed anything; :attr:`fallback` may succeed with new trainings."""

    def __init__(self, fallback: str, error: Exception) -> None:
        super().__init__(str(error))
        self.fallback, self.error = fallback, error


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
        """Take one optimizer step of every training; raise EngineFailed if the first one fails.

        Lack of memory is raised as it is, and so is every error of an engine without a fallback.
        """
        with self._convert_to_engine_failed():
            self.compute_step()
        self._completed = True

    def evaluate(self, splits: Sequence[Split]) -> Sequence[Iterable[EvaluationResult]]:
        """Return for each training its evaluations, possibly computed only when they are iterated over."""
        with self._convert_to_engine_failed():
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
    def _convert_to_engine_failed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # components that do not support an engine may raise anything
            if self._completed or not self.fallback or is_out_of_memory(error):
                raise
            raise EngineFailed(self.fallback, error) from error


engine: Slot[Engine] = Slot("engine", Engine)  # type: ignore[type-abstract]  # a contract is not built


@engine.register("loop")
class Loop(Engine):
    """Trainings, one after another.  It supports every training."""

    one_at_a_time = True

    def compute_step(self) -> None:
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
        EngineFailed: If the engine fails at its first step; see :meth:`Engine.train_step`.
    """
    group = _JointTraining(trainings, engine, stop, every_s)
    for step in evaluation_steps(trainings[0].steps, trainings[0].spec.evaluations):
        if not group.advance_to(step):
            break
        group.evaluate_and_finish_at(step)
    return [group.outcomes.get(training) for training in trainings]


class _JointTraining:
    """Trainings on their way through the steps and evaluations that they share; for its arguments see :func:`train`."""

    def __init__(
        self, trainings: Sequence[Training], engine: type[Engine], stop: Callable[[], bool], every_s: float
    ) -> None:
        self._engine_type = engine
        self._stop = stop
        self._every_s, self._worth_s = every_s, min(every_s, WORTH_SAVING_S)
        self._active = list(trainings)  #: those without an outcome
        self.outcomes: dict[Training, Outcome] = {}
        self._engine: Engine | None = None  #: the latest one
        self._saved_at = time.monotonic()

    def advance_to(self, step: int) -> bool:
        """Train all to a step and return True; return False if they were stopped before it, and saved."""
        while behind := [training for training in self._active if training.step < step]:
            # Trainings at one step go on together until they reach the next ones ahead.
            present, *ahead = sorted({training.step for training in behind})
            engine = self._reuse_or_build_engine([training for training in behind if training.step == present])
            for _ in range(present, ahead[0] if ahead else step):
                if self._stop():
                    self._save_if_due(self._active)
                    return False
                engine.train_step()
                self._save_if_due(self._active, self._every_s)
        return True

    def evaluate_and_finish_at(self, step: int) -> None:
        """Measure the trainings that have not been measured at a step yet, and end those that are over."""
        # A training that was ahead after a resume may have been measured here already.  The last step is always due: a
        # training of 0 steps has no other one.
        due = [each for each in self._active if each.last_measured_step < step or step == each.steps]
        if not due:
            return
        is_last = step == due[0].steps
        if is_last:  # the evaluation may take longer than all steps, and fail
            self._save_if_due(due, self._worth_s)
        measurements = self._measure(due, ["val"])
        if ending := [training for training in measurements if is_last or training.stops_early()]:
            for training in ending:
                if training.best is not None:
                    training.emit(measurements[training])  # while it has the weights of this measurement
                    training.restore_best_weights()
            measurements |= self._measure(ending, ["test", *due[0].feed.test_sets])
        # A training may have diverged on a test set alone; it has an outcome by _measure.
        for training in (each for each in measurements if each not in self.outcomes):
            training.emit(measurements[training])
            if training in ending:
                self.outcomes[training] = training.finish()
        self._active = [training for training in self._active if training not in self.outcomes]
        if not is_last:
            self._save_if_due(self._active, self._worth_s)

    def _measure(self, trainings: Sequence[Training], splits: Sequence[Split]) -> dict[Training, Measurement]:
        """Return the measurements of trainings; those that have diverged get an outcome instead."""
        measurements: dict[Training, Measurement] = {}
        evaluations = self._reuse_or_build_engine(trainings).evaluate(splits)
        for training, own in zip(trainings, evaluations, strict=True):
            try:
                measurements[training] = training.add_measurement(own)
            except Diverged as error:
                self.outcomes[training] = training.diverge(error)
        return measurements

    def _reuse_or_build_engine(self, trainings: Sequence[Training]) -> Engine:
        """Return the engine of these trainings, which is the latest one if that has the same."""
        if self._engine is None or self._engine.trainings != trainings:
            self._engine = self._engine_type(trainings)
        return self._engine

    def _save_if_due(self, trainings: Sequence[Training], unsaved_s: float = -math.inf) -> None:
        """Save trainings if the work of more than ``unsaved_s`` is not saved."""
        if time.monotonic() - self._saved_at > unsaved_s:
            for training in trainings:
                training.save_if_finite()
            self._saved_at = time.monotonic()


def evaluation_steps(steps: int, evaluations: int) -> list[int]:
    """Return the evenly spaced steps after which an evaluation follows, the last step included."""
    return sorted({-(-i * steps // evaluations) for i in range(1, evaluations + 1)})
