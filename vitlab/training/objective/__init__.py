"""The slot ``objective``: what a training minimises, and what its evaluations measure.

supervised.py   supervised: a loss on labels, with mixing and distillation
dino.py         dino: self-distillation of views of an image
mae.py          mae: hidden patches reconstructed from visible ones

B images of a batch, C channels, H and W pixels; ``...`` further axes of an objective's inputs and targets.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from vitlab.data.batches import Batch, Feed
from vitlab.geometry import TASKS, DataInfo
from vitlab.models.contract import Model
from vitlab.registry import ResolvedChoice, Slot
from vitlab.spec import TrainSpec
from vitlab.training.losses import Value
from vitlab.training.metrics.contract import Metric

if TYPE_CHECKING:
    from vitlab.training.distillation import Distillation
    from vitlab.training.distributed import ByBatch


@dataclass(frozen=True)
class Setup:
    """The parts of a training that its objective reads."""

    model: Model
    feed: Feed
    spec: TrainSpec
    seeds: Mapping[str, int]
    steps: int  #: length of the training
    distillation: Distillation | None


class Objective(ABC):
    """Contract: ``Objective(setup, *, options)``.

    A step calls ``batch``, ``loss`` on its images and targets, and ``after_step``; an evaluation calls
    ``evaluation_batch`` and ``views``, from which ``standard_metrics`` are computed.  ``loss`` and ``views`` are pure
    functions of their arguments and of the weights of ``module`` if ``vmap_safe``: engines vectorise them over trials.
    """

    labels: ClassVar[bool] = True
    """Whether the model's head is trained, on labels; if not, evaluations report no metric of predictions."""
    vmap_safe: ClassVar[bool] = False  #: whether engine ``vmap`` may compute several trainings at once
    whole_batch: ClassVar[bool] = False  #: whether it needs the images of a step in one piece
    unread: ClassVar[tuple[str, ...]] = ()
    """Paths of options that it never reads, such as ``train.loss``; arms that differ in these alone are refused."""
    needs_end: ClassVar[bool] = False  #: whether it follows the planned length, so that no training may stop early
    module: Model
    """The trained module: the model itself, or a module that holds it as ``model`` beside the objective's own parts.
    It is in checkpoints; only the model's own weights are stored."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.module = setup.model

    @property
    def name(self) -> str:
        """Return the name in the study, for messages."""
        return self.setup.spec.objective.type

    @classmethod
    def incompatibility(cls, data: DataInfo, model: ResolvedChoice, trial: Mapping[str, Any]) -> str | None:
        """Return in one sentence why a model cannot be trained by this objective; None if it can.

        Args:
            data: What the model sees.
            model: The model.
            trial: The trial in plain values, with the objective's own options.
        """
        return None

    @classmethod
    def standard_metrics(cls, data: DataInfo) -> dict[str, Metric]:
        """Return the metrics that every trial reports, by name, ``loss`` first; by default the mean of the views."""
        return {"loss": MeanLoss()}

    def batch(self, step: int, rows: range) -> Batch:
        """Return ``rows`` of the training batch of a step: inputs (B, ...), targets (B, ...) and identities (B)."""
        spec = self.setup.spec
        return self.setup.feed.batch(step, spec.batch_size, spec.repeats, [rows])

    def evaluation_batch(self, batch: Batch) -> Batch:
        """Return a batch of labelled images with the inputs and targets of :meth:`views`."""
        return batch

    @abstractmethod
    def loss(self, x: Tensor, target: Tensor) -> Value:
        """Return the mean loss of a training batch."""

    @abstractmethod
    def views(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the tensors that the metrics of an evaluation read, by view; ``""`` is the main one, (B, ...)."""

    def weight(self, target: Tensor) -> Tensor:
        """Return the weight of a microbatch: the number of terms in its mean, a scalar."""
        return torch.full((), len(target), device=target.device)

    def after_step(self, step: int) -> None:  # noqa: B027  # most have no state of their own
        """Update the objective's own state after an optimizer step, counted from 1."""

    def evaluation_metrics(self) -> AbstractContextManager[ByBatch]:
        """Return a context whose value holds further metrics of the evaluation inside it, of which means are reported.

        A metric has the values of the images of each batch, (B,).  Several processes evaluate some of the batches each,
        so the names of all metrics must be there when the context begins.
        """
        return nullcontext({})

    def stacking_incompatibility(self) -> str | None:
        """Return why engine ``vmap`` does not support this training, in one sentence; None if it does."""
        if not self.vmap_safe:
            return f"engine vmap does not support objective '{self.name}'"
        with self.evaluation_metrics() as values:
            return f"engine vmap does not report {', '.join(values)} of objective '{self.name}'" if values else None


class MeanLoss(Metric):
    """The mean of an objective's losses of single images, which are its main view.

    Losses of different objectives are different quantities; compare them within one objective alone.
    """

    tasks = TASKS
    goal = "min"
    bounds = (0.0, math.inf)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        if logits.ndim != 1:
            raise ValueError(
                f"views of an objective without metrics of its own are losses, (B,); found {tuple(logits.shape)}"
            )
        return logits.double()

    def column(self, rows_N: Tensor) -> Tensor:
        return rows_N


objective = Slot("objective", Objective)  # type: ignore[type-abstract]  # a contract is not built
