"""Cohorts: trainings of one shape, done together.

One model of a small network is too little work for a processor: most of a step is spent on calling kernels.  A cohort
stacks the weights of its members and calls every kernel once for all of them.  ``torch.func.vmap`` does that to any
model; to small ViTs the passes of :mod:`vitlab.models.innermost` do it twice as fast again.

The story is that of :mod:`vitlab.training.loop`, and each member is a training as told there, with its own batches,
draws, rates, optimizer, history and checkpoint.  Joint are the two passes of a step, and evaluations.  That needs no
second way of keeping anything: the weights of a member's model are rows of the stacked ones, and its gradients rows of
the stacked gradients.  Evaluations are vectorised by ``vmap`` whatever the steps are.

What a member computes depends neither on how many others there are nor on what they are: on a CPU to the last bit.  As
some kernels treat a stack of one otherwise, a member that is alone is given a shadow of itself.

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
    Trained,
    Training,
    evaluation_batches,
    forward_logits,
    moments,
    splits_of,
)
from vitlab.training.losses import Value
from vitlab.training.metrics import MetricAccumulator
from vitlab.training.microbatch import WeightedLoss
from vitlab.training.optim import Joint

Rows = dict[str, Tensor]
"""Tensors of a model by name, each with the members in front."""

Stacking = Literal["vmap", "stack"]
"""How the passes are computed: ``vmap`` vectorises those of the model, ``stack`` has the batch innermost."""


@dataclass(frozen=True, eq=False)
class Member:
    """A training of a cohort, and whom it tells; see :func:`vitlab.training.loop.train`."""

    training: Training
    emit: Callable[[Measurement], None] = lambda measurement: None
    save: Callable[[State], None] = lambda state: None


def train_cohort(
    members: Sequence[Member],
    *,
    engine: Stacking = "vmap",
    stop: Callable[[], bool] = lambda: False,
    every_s: float = 60.0,
) -> list[Trained | None]:
    """Train models in place, together.

    Members are equal but for their seeds, their rates and what else is no shape: they see the same validation and test
    images, and have the same length and evaluations.  They may stand at different steps, as after a resume: those that
    are behind come up first.

    Args:
        members: the trainings.
        engine: ``stack`` only for trainings of which :func:`stacking_incompatibility` says nothing.
        stop: is asked before every step.
        every_s: as of :func:`vitlab.training.loop.train`.

    Returns:
        what came of each, or None where it was stopped before its last step.
    """
    ended: dict[Member, Trained] = {}
    active = list(members)
    cohort: Cohort | None = None
    first = members[0].training
    saved, worth_s = time.monotonic(), min(every_s, WORTH_S)
    for moment in moments(first.steps, first.spec.evaluations):
        last = moment == first.steps
        while behind := [member for member in active if member.training.step < moment]:
            step, *later = sorted({member.training.step for member in behind})
            cohort = _cohort([member for member in behind if member.training.step == step], cohort, engine)
            for _ in range(step, later[0] if later else moment):
                if stop():
                    _save(active)
                    return [ended.get(member) for member in members]
                cohort.advance()
                if time.monotonic() - saved > every_s:
                    _save(active)
                    saved = time.monotonic()
        due = [member for member in active if last or member.training.measured < moment]
        if not due:
            continue
        if last and time.monotonic() - saved > worth_s:
            _save(due)
        cohort = _cohort(due, cohort, engine)
        for member, evaluated in zip(due, cohort.evaluate(splits_of(last)), strict=True):
            try:
                measurement, predictions = member.training.measure(evaluated)
            except Diverged as error:
                ended[member] = member.training.diverged(error)
                active.remove(member)
                continue
            member.emit(measurement)
            if last:
                ended[member] = member.training.ended(predictions)
        if not last and time.monotonic() - saved > worth_s:
            _save(active)
            saved = time.monotonic()
    return [ended.get(member) for member in members]


def require_stackable(model: Model) -> None:
    """Raise ValueError, saying why, for a model that declares that its replicates cannot be stacked."""
    parts = [path for path, part in model.named_modules() if isinstance(part, Part) and not part.vmap_safe]
    if not model.vmap_safe:
        raise ValueError(f"{', '.join(parts) or 'the model'} is declared not to be safe for vmap")


def stacking_incompatibility(model: Model, precision: str, device: torch.device) -> str | None:
    """Why the engine ``stack`` does not take a training, in one sentence; None where it does."""
    if device.type != "cpu":
        return f"the batch is innermost on CPUs alone, and this is {device.type}"
    if precision not in ("fp32", "fp64"):
        return f"precision {precision} is not known with the batch innermost"
    return model.batch_last_incompatibility()


class Cohort:
    """Trainings that stand at one step, their weights stacked.

    Raises:
        ValueError: if one of them learns from a teacher, which is not stacked.
    """

    def __init__(self, trainings: Sequence[Training], engine: Stacking = "vmap") -> None:
        if any(training.distillation is not None for training in trainings):
            raise ValueError("a training with distillation cannot be stacked: its teacher has no stacked form")
        self.trainings = list(trainings)
        self.engine = engine
        self.rows = range(len(trainings)) if len(trainings) > 1 else [0, 0]  # whose row each is
        models = [training.model for training in trainings]
        self.model = models[0]
        self.learned: Rows = {}
        self.kept: Rows = {}  # what no gradient is wanted of: frozen parameters, and buffers
        for name, parameter in self.model.named_parameters():
            rows = self._stacked([model.get_parameter(name) for model in models])
            (self.learned if parameter.requires_grad else self.kept)[name] = rows.requires_grad_(
                parameter.requires_grad
            )
        for name, _ in self.model.named_buffers():
            self.kept[name] = self._stacked([model.get_buffer(name) for model in models])
        self.parameters = {name: [model.get_parameter(name) for model in models] for name in self.learned}
        self.optimizers = Joint([training.optimizer for training in self.trainings])

    def advance(self) -> None:
        """One optimizer step of every member.  Nothing is read back from the device."""
        first = self.trainings[0]
        learned: list[WeightedLoss] = []
        gradients: list[Tensor] = []
        for rows in first.parts.rows(first.batch_images):
            part, found = self._learn(rows)
            learned.append(part)
            gradients = [one + other for one, other in zip(gradients, found, strict=True)] if gradients else found
        loss, gradients = first.parts.joined_stack(learned, gradients)
        for parameters, gradient in zip(self.parameters.values(), gradients, strict=True):
            for parameter, row in zip(parameters, gradient, strict=False):
                parameter.grad = row
        for training in self.trainings:
            training.clip_and_set_lr()
        self.optimizers.step()
        for member, training in enumerate(self.trainings):
            training.after_step(Value(loss.total[member], {name: part[member] for name, part in loss.parts.items()}))

    def _learn(self, rows: range) -> tuple[WeightedLoss, list[Tensor]]:
        """The losses of some images of every member's batch, as a rule all, and their gradients."""
        first = self.trainings[0]
        each = [training.draw(rows) for training in self.trainings]
        drawn = [each[row] for row in self.rows]
        x_KBCHW = torch.stack([batch.x_BCHW for batch, _ in drawn])
        y_KB = torch.stack([batch.y_B for batch, _ in drawn])
        draws = noise.Draws(
            dropout=self._keys([draws.dropout for _, draws in drawn]),
            drop_path=self._keys([draws.drop_path for _, draws in drawn]),
            sample_B=torch.stack([batch.id_B for batch, _ in drawn]),
        )
        losses = self._losses_innermost if self.engine == "stack" else vmap(self._loss)
        loss: Value = losses({**self.learned, **self.kept}, x_KBCHW, y_KB, draws)
        weight = first.parts.weights(first.loss, y_KB.unbind())
        gradients = torch.autograd.grad((loss.total * weight).sum(), list(self.learned.values()))
        # Fused optimizers read memory in the order of the weights, whatever the strides of a gradient say.
        return WeightedLoss(loss.detached(), weight), [gradient.contiguous() for gradient in gradients]

    @torch.no_grad()
    def evaluate(self, splits: Sequence[Split]) -> list[list[EvaluationResult]]:
        """The evaluations of every member."""
        began = time.perf_counter()
        first = self.trainings[0]
        rows = {**self.learned, **self.kept}
        found: list[list[EvaluationResult]] = [[] for _ in self.trainings]
        self.model.eval()
        with ExitStack() as averages:
            for training in self.trainings:  # each writes its average into its rows of the stack
                averages.enter_context(training.averaged())
            for split in splits:
                tallies = [MetricAccumulator(training.metrics) for training in self.trainings]
                for batch in evaluation_batches(first.feed, split, first.task):
                    views = vmap(forward_logits, in_dims=(None, None, None, 0))(
                        self.model, batch.x_BCHW, first.spec.precision, rows
                    )
                    for member, tally in enumerate(tallies):
                        tally.add({name: view[member] for name, view in views.items()}, batch.y_B, batch.id_B)
                for evaluated, tally in zip(found, tallies, strict=True):
                    evaluated.append(EvaluationResult(split, tally.metrics(), tally.columns()))
        self.model.train()
        for training in self.trainings:
            training.leave_out(time.perf_counter() - began)
        return found

    def _loss(self, rows: Rows, x_BCHW: Tensor, y_B: Tensor, draws: noise.Draws) -> Value:
        first = self.trainings[0]
        with noise.drawing(draws):
            views = forward_logits(self.model, x_BCHW, first.spec.precision, rows)
        return first.loss(views, y_B)

    def _losses_innermost(self, rows: Rows, x_KBCHW: Tensor, y_KB: Tensor, draws: noise.Draws) -> Value:
        """The same for all members: up to the head with the batch innermost, from there on vectorised."""
        first = self.trainings[0]
        passes = self.model.innermost()

        def loss(rows: Rows, x_BTD: Tensor, y_B: Tensor, draws: noise.Draws) -> Value:
            with noise.drawing(draws):
                return first.loss(forward_logits(passes.rest, x_BTD, first.spec.precision, rows), y_B)

        x_KBTD = passes.features(rows, draws, x_KBCHW)
        found: Value = vmap(loss)(passes.rest_of(rows), x_KBTD, y_KB, draws)
        return found

    def _keys(self, keys: Sequence[Any]) -> Tensor:
        keys_K, device = torch.tensor(keys, dtype=torch.int64), self.trainings[0].feed.device
        # From memory that the system may move, a GPU copies only while the host waits for it.
        return keys_K.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else keys_K

    def _stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors of the members, stacked; from now on they are rows of the stack."""
        rows = torch.stack([tensors[row].detach() for row in self.rows])
        for tensor, row in zip(tensors, rows.unbind(), strict=False):
            tensor.data = row
        return rows


# -- how it is done ---------------------------------------------------------------------------------------------------


def _cohort(members: Sequence[Member], latest: Cohort | None, engine: Stacking) -> Cohort:
    """The cohort of these; the latest one, if it is that."""
    trainings = [member.training for member in members]
    return latest if latest is not None and latest.trainings == trainings else Cohort(trainings, engine)


def _save(members: Sequence[Member]) -> None:
    for member in members:
        member.training.save(member.save)
