"""The loop: one training, from its first step or from a checkpoint to its last evaluation.

The batch, the learning rate and everything a step draws (:mod:`vitlab.noise`) are functions of the step, so a training
that was stopped and resumed computes what it would have computed undisturbed.
"""

from __future__ import annotations

import importlib
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from vitlab import noise
from vitlab.data.prepare import Batch, Feed
from vitlab.geometry import Task
from vitlab.models.contract import Model
from vitlab.plan.key import AVERAGING, MIXING
from vitlab.registry import slot
from vitlab.spec import TrainSpec
from vitlab.store.result import Measurement
from vitlab.training.losses import Loss, Value
from vitlab.training.metrics import Columns, Metric, MetricAccumulator, mean, metrics_of
from vitlab.training.microbatch import WeightedLoss, Whole
from vitlab.training.optim import Optimizer, Schedule, decay_groups, layer_groups, set_rate

if TYPE_CHECKING:
    # Not imported here, but by name where it is asked for, so that it is no part of the code of trials that do without.
    from vitlab.training.distillation import Distillation
    from vitlab.training.ema import Average
    from vitlab.training.mixup import Mixing

EVALUATION_BATCH = 512
"""Images of an evaluation batch, whatever the training uses, so that metrics do not depend on the size it uses."""

WORTH_S = 1.0
"""Seconds of work that are worth a checkpoint after an evaluation: less is done again rather than written down."""

EVALUATION_PIXELS = 1 << 19
"""Pixels of an evaluation batch of segmentation, at most, for there is a score of every class at each of them."""

Split = Literal["train", "val", "test"]
State = Mapping[str, Any]
"""What a checkpoint holds."""


class EvaluationResult(NamedTuple):
    """What an evaluation found."""

    split: Split
    metrics: Mapping[str, float]
    columns: Columns  #: one value per image, by name


@dataclass(frozen=True)
class Trained:
    """What came of a training."""

    metrics: Mapping[str, float]  #: of the last measurement, test included; empty if it diverged
    history: tuple[Measurement, ...]  #: without ``system/*``
    steps: int
    images: int
    predictions: Mapping[str, Columns]  #: of the last evaluation: for each split, one value per image and column
    diverged: str = ""  #: if a loss was not finite, where, in one sentence


def train(
    model: Model,
    feed: Feed,
    spec: TrainSpec,
    seeds: Mapping[str, int],
    *,
    task: Task = "classification",
    distillation: Distillation | None = None,
    parts: Whole | None = None,
    resume: State | None = None,
    emit: Callable[[Measurement], None] = lambda measurement: None,
    save: Callable[[State], None] = lambda state: None,
    stop: Callable[[], bool] = lambda: False,
    every_s: float = 60.0,
) -> Trained | None:
    """Train a model in place; with an average of its weights it ends as that.

    Args:
        model: initialised, and on the device of the feed.
        feed: the batches.
        spec: how long, how, and how often it is evaluated; the last time after the last step, and then on test too.
        seeds: of the streams ``dropout``, ``drop_path`` and ``mixup``.
        task: what the labels are of.
        distillation: from whom it learns beside the labels.
        parts: what the batches of its steps are cut into; by default they are taken whole.
        resume: a state that ``save`` was given once, to go on from.
        emit: is told every measurement, ``system/*`` included.
        save: is given the state when stopped, at an evaluation where more than :data:`WORTH_S` would be lost
            otherwise, and elsewhere where more than ``every_s`` would be.
        stop: is asked before every step.
        every_s: see ``save``.

    Returns:
        what came of it, or None if it was stopped before its last step.
    """
    training = Training(model, feed, spec, seeds, task, distillation, parts)
    if resume is not None:
        training.load(resume)
    return complete(training, emit=emit, save=save, stop=stop, every_s=every_s)


def complete(
    training: Training,
    *,
    emit: Callable[[Measurement], None] = lambda measurement: None,
    save: Callable[[State], None] = lambda state: None,
    stop: Callable[[], bool] = lambda: False,
    every_s: float = 60.0,
) -> Trained | None:
    """What remains of a training; see :func:`train`."""
    saved, worth_s = time.monotonic(), min(every_s, WORTH_S)
    try:
        for moment in moments(training.steps, training.spec.evaluations, after=training.measured):
            while training.step < moment:
                if stop():
                    training.save(save)
                    return None
                training.advance()
                if time.monotonic() - saved > every_s:
                    training.save(save)
                    saved = time.monotonic()
            last = moment == training.steps
            if last and time.monotonic() - saved > worth_s:
                training.save(save)
            measurement, predictions = training.measure(map(training.evaluate, splits_of(last)))
            emit(measurement)
            if not last and time.monotonic() - saved > worth_s:
                training.save(save)
                saved = time.monotonic()
    except Diverged as error:
        return training.diverged(error)
    return training.ended(predictions)


def steps_of(spec: TrainSpec, feed: Feed) -> int:
    """The length of a training in optimizer steps."""
    if spec.steps is not None:
        return spec.steps
    if spec.epochs is not None:
        return max(1, round(spec.epochs * feed.steps_per_epoch(spec.batch_size)))
    assert spec.images is not None
    return max(1, round(spec.images / feed.batch_images(spec.batch_size)))


def moments(steps: int, evaluations: int, after: int = 0) -> Iterator[int]:
    """The steps after which there is an evaluation: evenly spaced, the last at the end, those up to ``after`` done."""
    for moment in sorted({-(-i * steps // evaluations) for i in range(1, evaluations + 1)}):
        if moment > after or moment == steps:
            yield moment


@torch.no_grad()
def evaluate(
    model: Model, feed: Feed, split: Split, task: Task, precision: str, metrics: Mapping[str, Metric] | None = None
) -> tuple[dict[str, float], Columns]:
    """Metrics of a model on a split, by default those of its task, and what each image contributed.

    Leaves the model as it found it.
    """
    was_training = model.training
    model.eval()
    tally = MetricAccumulator(metrics_of(feed.info) if metrics is None else metrics)
    for batch in evaluation_batches(feed, split, task):
        tally.add(forward_logits(model, batch.x_BCHW, precision), batch.y_B, batch.id_B)
    model.train(was_training)
    return tally.metrics(), tally.columns()


def evaluation_batches(feed: Feed, split: Split, task: Task) -> Iterator[Batch]:
    """The batches of an evaluation, of a size that does not depend on that of training."""
    size = EVALUATION_BATCH
    if task == "segmentation":
        size = max(1, min(size, EVALUATION_PIXELS // feed.pixels))
    return feed.evaluation(split, size)


def splits_of(last: bool) -> tuple[Split, ...]:
    """What a measurement evaluates on: on test only the last."""
    return ("val", "test") if last else ("val",)


def forward_logits(model: Model, x_BCHW: Tensor, precision: str, weights: State | None = None) -> dict[str, Tensor]:
    """The logits of a batch by view, float32 or wider; ``bf16`` is autocast over the weights as they are.

    ``weights`` stand in for the model's own parameters and buffers.
    """
    with torch.autocast(x_BCHW.device.type, torch.bfloat16, enabled=precision == "bf16"):
        output = model(x_BCHW) if weights is None else functional_call(model, dict(weights), (x_BCHW,))
        views = model.views(output)
    return {name: logits.to(torch.promote_types(logits.dtype, torch.float32)) for name, logits in views.items()}


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that the allocator held on CUDA, the most that the process held elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Diverged(Exception):
    """A loss is not finite."""


class Training:
    """A training between two steps: all that changes, and how it changes."""

    def __init__(
        self,
        model: Model,
        feed: Feed,
        spec: TrainSpec,
        seeds: Mapping[str, int],
        task: Task,
        distillation: Distillation | None,
        parts: Whole | None = None,
    ) -> None:
        self.model = model.train()
        self.feed = feed
        self.spec = spec
        self.seeds = seeds
        self.task = task
        self.distillation = distillation
        self.parts = parts if parts is not None else Whole()
        self.parts.require(model, self.batch_images)
        self.steps = steps_of(spec, feed)
        self.loss: Loss = slot("loss").build(spec.loss)
        self.metrics = metrics_of(feed.info, spec.metrics)
        self.mixing: Mixing | None = None
        if spec.mix is not None:
            self.mixing = importlib.import_module(MIXING).Mixing(spec.mix, seeds["mixup"], feed.info.classes)
        self.average: Average | None = None
        if spec.ema is not None:
            self.average = importlib.import_module(AVERAGING).Average(model, spec.ema)
        self.schedule: Schedule = slot("schedule").build(spec.schedule)
        chosen: Optimizer = slot("optimizer").build(spec.optimizer)
        self.base_rate = chosen.lr
        groups = decay_groups(model, chosen.weight_decay, model.no_weight_decay())
        if spec.layer_decay is not None:
            layers = {name: model.layer_of(name) for name, _ in model.named_parameters()}
            groups = layer_groups(groups, layers, spec.layer_decay)
        self.optimizer = chosen.build(groups)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

        self.step = 0
        self.history: list[Measurement] = []
        self.losses: defaultdict[str, list[Tensor]] = defaultdict(list)  # since the last measurement, on the device
        self._interval_began = time.perf_counter()
        self._interval_images = 0

    @property
    def images(self) -> int:
        """Images seen so far, repeats included."""
        return self.step * self.batch_images

    @property
    def batch_images(self) -> int:
        """Images that a step learns from: the effective size of a batch."""
        return self.feed.batch_images(self.spec.batch_size)

    @property
    def measured(self) -> int:
        """The step of the last measurement, 0 before the first."""
        return self.history[-1].step if self.history else 0

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.base_rate * self.schedule.factor(step, self.steps)

    def advance(self) -> None:
        """One optimizer step.  Nothing is read back from the device."""
        self.optimizer.zero_grad()
        learned = [self.forward_backward(rows) for rows in self.parts.rows(self.batch_images)]
        loss = self.parts.joined(learned, self.parameters)
        self.clip_and_set_lr()
        self.optimizer.step()
        self.after_step(loss)

    def forward_backward(self, rows: range) -> WeightedLoss:
        """Add to the gradients those of some images of the step's batch, as a rule all."""
        batch, draws = self.draw(rows)
        # For parts of others that draw from torch's own generator: theirs is a function of the step, too.
        key = noise.key(self.seeds["dropout"], "torch", self.step, *([rows.start] if rows.start else []))
        noise.seed_torch(key, self.feed.device)
        with noise.drawing(draws):
            views = forward_logits(self.model, batch.x_BCHW, self.spec.precision)
        if self.distillation is None:
            loss = self.loss(views, batch.y_B)
        else:
            loss = self.distillation(self.loss, views, batch.y_B, batch.x_BCHW)
        weight = self.parts.weight(self.loss, batch.y_B)
        torch.autograd.backward(loss.total * weight)
        return WeightedLoss(loss.detached(), weight)

    def draw(self, rows: range) -> tuple[Batch, noise.Draws]:
        """What the step learns from, or some images of it, and what its layers draw from."""
        if self.mixing is None:
            batch = self.feed.batch(self.step, self.spec.batch_size, self.spec.repeats, [rows])
        else:
            taken = self.mixing.rows(rows, self.batch_images)
            batch = self.feed.batch(self.step, self.spec.batch_size, self.spec.repeats, taken)
            x_BCHW, y_B, id_B, epoch = self.mixing(batch, self.step)
            batch = Batch(x_BCHW[: len(rows)], y_B[: len(rows)], id_B[: len(rows)], epoch)
        draws = noise.Draws(
            dropout=noise.key(self.seeds["dropout"], "dropout", batch.epoch),
            drop_path=noise.key(self.seeds["drop_path"], "drop_path", batch.epoch),
            sample_B=batch.id_B,
        )
        return batch, draws

    def clip_and_set_lr(self) -> None:
        """Set the rate and clip the gradients: all that comes between them and the step of the optimizer."""
        set_rate(self.optimizer, self.rate(self.step))
        if self.spec.clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.spec.clip_grad)

    def after_step(self, loss: Value) -> None:
        """Note that the weights have moved, by the gradients of ``loss``."""
        self.losses["loss"].append(loss.total)
        for name, part in loss.parts.items():
            self.losses[name].append(part)
        self.step += 1
        if self.average is not None:
            self.average.update(self.step)

    def evaluate(self, split: Split) -> EvaluationResult:
        """Evaluate the weights that are to be kept."""
        with self.averaged(), self._watching() as seen:
            found, columns = evaluate(self.model, self.feed, split, self.task, self.spec.precision, self.metrics)
        return EvaluationResult(split, {**found, **seen}, columns)

    def measure(self, evaluated: Iterable[EvaluationResult]) -> tuple[Measurement, dict[str, Columns]]:
        """Close the interval since the last measurement.

        Args:
            evaluated: the evaluations after its last step; they are asked for when training has been timed.

        Raises:
            Diverged: if a loss of the interval, or one of the evaluation, is not finite.
        """
        metrics: dict[str, float] = {}
        predictions: dict[str, Columns] = {}
        if self.losses:
            losses = {name: torch.stack(values).double().cpu() for name, values in self.losses.items()}
            self._check(losses["loss"])
            metrics = {f"train/{name}": mean(values) for name, values in losses.items()}
            metrics["train/lr"] = self.rate(self.step - 1)
            self.losses.clear()
        speed = (self.images - self._interval_images) / (time.perf_counter() - self._interval_began)
        for split, found, columns in evaluated:
            if not torch.tensor(found["loss"]).isfinite():
                raise Diverged(f"the loss on {split} is not finite after step {self.step}")
            metrics |= {f"{split}/{name}": value for name, value in found.items()}
            predictions[split] = columns
        epoch = self.step / self.feed.steps_per_epoch(self.spec.batch_size)
        measurement = Measurement(self.step, epoch, self.images, metrics)
        self.history.append(measurement)
        self._interval_began, self._interval_images = time.perf_counter(), self.images
        system = {"system/images_per_s": speed, "system/memory_bytes": float(peak_memory(self.feed.device))}
        return Measurement(self.step, epoch, self.images, {**metrics, **system}), predictions

    def _watching(self) -> AbstractContextManager[Mapping[str, float]]:
        """What is to be seen of an evaluation beside its metrics."""
        return self.distillation.watching(self.model) if self.distillation is not None else nullcontext({})

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are evaluated."""
        return self.average.standing_in() if self.average is not None else nullcontext()

    def save(self, write: Callable[[State], None]) -> None:
        """Hand out the state, unless the training has diverged: then what was saved before is what to go on from.

        That it diverged is found at the next measurement, whenever anything was saved, so that equal trainings end at
        equal steps.
        """
        if self.losses and not torch.stack(self.losses["loss"]).isfinite().all():
            return
        began = time.perf_counter()
        write(
            {
                "model": self.model.state_dict(),
                "average": self.average.state_dict() if self.average is not None else None,
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "history": [asdict(measurement) for measurement in self.history],
                "losses": {name: torch.stack(values) for name, values in self.losses.items()},
            }
        )
        self.leave_out(time.perf_counter() - began)

    def leave_out(self, seconds: float) -> None:
        """Take time off the interval: writing, or evaluating, is not training."""
        self._interval_began += seconds

    def load(self, state: State) -> None:
        """Go on from what :meth:`save` handed out."""
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.history = [Measurement(**measurement) for measurement in state["history"]]
        for name, values in state["losses"].items():
            self.losses[name] = list(values.to(self.feed.device))
        self._interval_began, self._interval_images = time.perf_counter(), self.images

    def ended(self, predictions: Mapping[str, Columns]) -> Trained:
        """What came of it after the last measurement; the model is left with the weights that were evaluated."""
        if self.average is not None:
            self.average.replace()
        return Trained(self.history[-1].metrics, tuple(self.history), self.step, self.images, predictions)

    def diverged(self, why: Diverged) -> Trained:
        """What came of it if it cannot go on."""
        return Trained({}, tuple(self.history), self.step, self.images, {}, str(why))

    def _check(self, losses: Tensor) -> None:
        infinite = (~losses.isfinite()).nonzero()
        if len(infinite):
            step = self.step - len(losses) + int(infinite[0]) + 1
            raise Diverged(
                f"the loss is not finite at step {step} of {self.steps} (learning rate {self.rate(step - 1):g})"
            )
