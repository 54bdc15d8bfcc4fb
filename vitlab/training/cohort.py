"""Batches of trials of one shape, trained together.

Most of a step of a small model is kernel launch overhead.  A cohort stacks the weights of its members and launches
every kernel once for all of them.  ``torch.func.vmap`` does this for any model; for small ViTs the batch-last forward
pass of :mod:`vitlab.models.batch_last` is twice as fast again.

The order of steps, evaluations and checkpoints is that of :mod:`vitlab.training.loop`.  Only forward, backward and
evaluation are batched over trials; each member keeps its own batches, random draws, learning rate, optimizer, history
and checkpoint.  The weights of a member's model are rows of the stacked weights, and its gradients rows of the stacked
gradients.  Evaluations always use ``vmap``.

On a CPU the results of a member are bitwise independent of the other members.  Some kernels treat a stack of one
differently, so a single member is stacked twice.

K members; B images of a batch, C channels, H and W pixels.
Reference: arXiv:2102.02344 (HFTA).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from vitlab import noise
from vitlab.components.base import Part
from vitlab.models.contract import Model
from vitlab.store.result import Measurement
from vitlab.training.loop import (
    WORTH_S,
    Diverged,
    EvaluationResult,
    Split,
    State,
    Training,
    TrainingResult,
    evaluation_batches,
    evaluation_steps,
    forward_logits,
    splits_of,
)
from vitlab.training.losses import Value
from vitlab.training.metrics import MetricAccumulator
from vitlab.training.microbatch import WeightedLoss
from vitlab.training.optim import Joint

Rows = dict[str, Tensor]
"""Tensors of a model by name, each with the member axis first."""

Stacking = Literal["vmap", "stack"]
"""Engine of the forward and backward passes: ``vmap`` over the model, or ``stack`` with the batch axis last."""


@dataclass(frozen=True, eq=False)
class Member:
    """A training of a cohort and its callbacks; see :func:`vitlab.training.loop.train`."""

    training: Training
    emit: Callable[[Measurement], None] = lambda measurement: None
    save: Callable[[State], None] = lambda state: None


def train_cohort(
    members: Sequence[Member],
    *,
    engine: Stacking = "vmap",
    stop: Callable[[], bool] = lambda: False,
    every_s: float = 60.0,
) -> list[TrainingResult | None]:
    """Train models together, in place.

    Members may differ in whatever does not affect shapes, such as seeds and learning rates.  They share the validation
    and test images, the length and the evaluations.  After a resume they may be at different steps; those behind are
    trained first.

    Args:
        members: The trainings.
        engine: ``stack`` requires that :func:`stacking_incompatibility` returns None for every training.
        stop: Called before every step; training stops once it returns True.
        every_s: See :func:`vitlab.training.loop.train`.

    Returns:
        The results of each member, or None if it was stopped before its last step.
    """
    results: dict[Member, TrainingResult] = {}
    active = list(members)
    cohort: Cohort | None = None
    first = members[0].training
    saved_at, worth_s = time.monotonic(), min(every_s, WORTH_S)
    for moment in evaluation_steps(first.steps, first.spec.evaluations):
        last = moment == first.steps
        while behind := [member for member in active if member.training.step < moment]:
            step, *later = sorted({member.training.step for member in behind})
            cohort = _cohort([member for member in behind if member.training.step == step], cohort, engine)
            for _ in range(step, later[0] if later else moment):
                if stop():
                    _save(active)
                    return [results.get(member) for member in members]
                cohort.train_step()
                if time.monotonic() - saved_at > every_s:
                    _save(active)
                    saved_at = time.monotonic()
        due = [member for member in active if last or member.training.last_measured_step < moment]
        if not due:
            continue
        if last and time.monotonic() - saved_at > worth_s:
            _save(due)
        cohort = _cohort(due, cohort, engine)
        for member, evaluated in zip(due, cohort.evaluate(splits_of(last)), strict=True):
            try:
                measurement, predictions = member.training.measure(evaluated)
            except Diverged as error:
                results[member] = member.training.diverged(error)
                active.remove(member)
                continue
            member.emit(measurement)
            if last:
                results[member] = member.training.finish(predictions)
        if not last and time.monotonic() - saved_at > worth_s:
            _save(active)
            saved_at = time.monotonic()
    return [results.get(member) for member in members]


def require_stackable(model: Model) -> None:
    """Check that a model supports stacking.

    Raises:
        ValueError: If the model or a part of it declares that it is not safe for vmap.
    """
    parts = [path for path, part in model.named_modules() if isinstance(part, Part) and not part.vmap_safe]
    if not model.vmap_safe:
        raise ValueError(f"{', '.join(parts) or 'the model'} is declared not to be safe for vmap")


def stacking_incompatibility(model: Model, precision: str, device: torch.device) -> str | None:
    """Return in one sentence why the engine ``stack`` does not support a training; None if it does."""
    if device.type != "cpu":
        return f"engine stack runs on CPUs only, and this is {device.type}"
    if precision not in ("fp32", "fp64"):
        return f"engine stack does not support precision {precision}"
    return model.batch_last_incompatibility()


class Cohort:
    """Trainings at one step, with stacked weights.

    Raises:
        ValueError: If one of them uses distillation, which cannot be stacked.
    """

    def __init__(self, trainings: Sequence[Training], engine: Stacking = "vmap") -> None:
        if any(training.distillation is not None for training in trainings):
            raise ValueError("a training with distillation cannot be stacked: its teacher has no stacked form")
        self.trainings = list(trainings)
        self.engine = engine
        self.rows = range(len(trainings)) if len(trainings) > 1 else [0, 0]  # the member of each row
        models = [training.model for training in trainings]
        self.model = models[0]
        self.trainable: Rows = {}
        self.frozen: Rows = {}  # frozen parameters and buffers
        for name, parameter in self.model.named_parameters():
            rows = self._stacked([model.get_parameter(name) for model in models])
            (self.trainable if parameter.requires_grad else self.frozen)[name] = rows.requires_grad_(
                parameter.requires_grad
            )
        for name, _ in self.model.named_buffers():
            self.frozen[name] = self._stacked([model.get_buffer(name) for model in models])
        self.parameters = {name: [model.get_parameter(name) for model in models] for name in self.trainable}
        self.optimizers = Joint([training.optimizer for training in self.trainings])

    def train_step(self) -> None:
        """Take one optimizer step of every member.  Nothing is read back from the device."""
        first = self.trainings[0]
        losses: list[WeightedLoss] = []
        gradients: list[Tensor] = []
        for rows in first.parts.rows(first.batch_images):
            part, part_gradients = self._learn(rows)
            losses.append(part)
            gradients = (
                [one + other for one, other in zip(gradients, part_gradients, strict=True)]
                if gradients
                else part_gradients
            )
        loss, gradients = first.parts.combine_stacked(losses, gradients)
        for parameters, gradient in zip(self.parameters.values(), gradients, strict=True):
            for parameter, row in zip(parameters, gradient, strict=False):
                parameter.grad = row
        for training in self.trainings:
            training.clip_and_set_lr()
        self.optimizers.step()
        for member, training in enumerate(self.trainings):
            training.after_step(Value(loss.total[member], {name: part[member] for name, part in loss.parts.items()}))

    def _learn(self, rows: range) -> tuple[WeightedLoss, list[Tensor]]:
        """Return the losses of ``rows`` of every member's batch, usually all of it, and their gradients."""
        first = self.trainings[0]
        each = [training.draw(rows) for training in self.trainings]
        stacked = [each[row] for row in self.rows]
        x_KBCHW = torch.stack([batch.x_BCHW for batch, _ in stacked])
        y_KB = torch.stack([batch.y_B for batch, _ in stacked])
        draws = noise.Draws(
            dropout=self._keys([draws.dropout for _, draws in stacked]),
            drop_path=self._keys([draws.drop_path for _, draws in stacked]),
            sample_B=torch.stack([batch.id_B for batch, _ in stacked]),
        )
        losses = self._losses_innermost if self.engine == "stack" else vmap(self._loss)
        loss: Value = losses({**self.trainable, **self.frozen}, x_KBCHW, y_KB, draws)
        weight = first.parts.weights(first.loss, y_KB.unbind())
        gradients = torch.autograd.grad((loss.total * weight).sum(), list(self.trainable.values()))
        # Fused optimizers read memory in the order of the weights and ignore the strides of a gradient.
        return WeightedLoss(loss.detached(), weight), [gradient.contiguous() for gradient in gradients]

    @torch.no_grad()
    def evaluate(self, splits: Sequence[Split]) -> list[list[EvaluationResult]]:
        """Return the evaluations of every member."""
        began = time.perf_counter()
        first = self.trainings[0]
        rows = {**self.trainable, **self.frozen}
        results: list[list[EvaluationResult]] = [[] for _ in self.trainings]
        self.model.eval()
        with ExitStack() as averages:
            for training in self.trainings:  # each copies its averaged weights into its row of the stack
                averages.enter_context(training.averaged())
            for split in splits:
                accumulators = [MetricAccumulator(training.metrics) for training in self.trainings]
                for batch in evaluation_batches(first.feed, split, first.task):
                    views = vmap(forward_logits, in_dims=(None, None, None, 0))(
                        self.model, batch.x_BCHW, first.spec.precision, rows
                    )
                    for member, accumulator in enumerate(accumulators):
                        accumulator.add({name: view[member] for name, view in views.items()}, batch.y_B, batch.id_B)
                for evaluations, accumulator in zip(results, accumulators, strict=True):
                    evaluations.append(EvaluationResult(split, accumulator.metrics(), accumulator.columns()))
        self.model.train()
        for training in self.trainings:
            training.exclude_time(time.perf_counter() - began)
        return results

    def _loss(self, rows: Rows, x_BCHW: Tensor, y_B: Tensor, draws: noise.Draws) -> Value:
        first = self.trainings[0]
        with noise.drawing(draws):
            views = forward_logits(self.model, x_BCHW, first.spec.precision, rows)
        return first.loss(views, y_B)

    def _losses_innermost(self, rows: Rows, x_KBCHW: Tensor, y_KB: Tensor, draws: noise.Draws) -> Value:
        """Return the losses of all members: batch-last up to the head, then vmap."""
        first = self.trainings[0]
        passes = self.model.batch_last()

        def loss(rows: Rows, x_BTD: Tensor, y_B: Tensor, draws: noise.Draws) -> Value:
            with noise.drawing(draws):
                return first.loss(forward_logits(passes.rest, x_BTD, first.spec.precision, rows), y_B)

        x_KBTD = passes.features(rows, draws, x_KBCHW)
        losses: Value = vmap(loss)(passes.rest_of(rows), x_KBTD, y_KB, draws)
        return losses

    def _keys(self, keys: Sequence[Any]) -> Tensor:
        keys_K, device = torch.tensor(keys, dtype=torch.int64), self.trainings[0].feed.device
        # A copy from unpinned memory to a GPU would block the host.
        return keys_K.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else keys_K

    def _stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack the tensors of the members and make each a view of its row."""
        rows = torch.stack([tensors[row].detach() for row in self.rows])
        for tensor, row in zip(tensors, rows.unbind(), strict=False):
            tensor.data = row
        return rows


# -- helpers -----------------------------------------------------------------------------------------------------------


def _cohort(members: Sequence[Member], latest: Cohort | None, engine: Stacking) -> Cohort:
    """Return the cohort of ``members``, reusing the latest one if it is the same."""
    trainings = [member.training for member in members]
    return latest if latest is not None and latest.trainings == trainings else Cohort(trainings, engine)


def _save(members: Sequence[Member]) -> None:
    for member in members:
        member.training.save(member.save)
