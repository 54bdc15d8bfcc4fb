"""The contract of engines, and the engine ``loop``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from vitlab.training.evaluation import EvaluationResult, Split
from vitlab.training.loop import Training


class EngineFailed(Exception):
    """An engine failed before it completed anything; :attr:`fallback` may succeed with new trainings."""

    def __init__(self, fallback: str, error: Exception) -> None:
        super().__init__(str(error))
        self.fallback = fallback


class Engine(ABC):
    """A way to compute several trainings, and those that are at the same step.

    Args:
        trainings: Trainings that it supports, see :meth:`incompatibility`.

    Raises:
        EngineFailed: If it cannot be set up and there is a fallback.
    """

    name: ClassVar[str]
    fallback: ClassVar[str] = ""
    """The engine to use for trainings that this one does not support, or at which it fails; empty for none."""

    def __init__(self, trainings: Sequence[Training]) -> None:
        self.trainings = list(trainings)
        self._completed = False

    @classmethod
    def incompatibility(cls, training: Training) -> str | None:
        """Return the reason why the engine does not support a training, in one sentence; None if it does."""
        return None

    def train_step(self) -> None:
        """Take one optimizer step of every training.  Nothing is read back from the device.

        Raises:
            EngineFailed: If the first computation fails and there is a fallback.
        """
        with self._falling_back():
            self._train_step()
        self._completed = True

    def evaluate(self, splits: Sequence[Split]) -> Sequence[Iterable[EvaluationResult]]:
        """Return the evaluations of every training, possibly computed as they are consumed.

        Raises:
            EngineFailed: See :meth:`train_step`.
        """
        with self._falling_back():
            evaluations = self._evaluate(splits)
        self._completed = True
        return evaluations

    @abstractmethod
    def _train_step(self) -> None: ...

    @abstractmethod
    def _evaluate(self, splits: Sequence[Split]) -> Sequence[Iterable[EvaluationResult]]: ...

    @contextmanager
    def _falling_back(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # components that do not support an engine may raise anything
            if self._completed or not self.fallback:
                raise
            raise EngineFailed(self.fallback, error) from error


class Loop(Engine):
    """Computes one training after another.  It supports every training."""

    name = "loop"

    def _train_step(self) -> None:
        for training in self.trainings:
            training.train_step()

    def _evaluate(self, splits: Sequence[Split]) -> Sequence[Iterable[EvaluationResult]]:
        return [map(training.evaluate, splits) for training in self.trainings]
