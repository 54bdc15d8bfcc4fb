"""One training: its state, and what a step and an evaluation of it compute.

The batch, the learning rate and every random draw of a step (:mod:`vitlab.noise`) are functions of the step, so that a
resumed training computes the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitlab import noise
from vitlab.components.base import draw_path_scales, number_drop_paths
from vitlab.data.batches import Batch, Feed, sample_ids
from vitlab.models.contract import Model, evaluation_mode
from vitlab.registry import import_optional, slot
from vitlab.spec import TrainSpec
from vitlab.spec.trial import StopEarly
from vitlab.store.result import Measurement, Outcome
from vitlab.training.artifacts import State as State
from vitlab.training.evaluation import Columns, EvaluationResult, MetricAccumulator, Split, evaluation_batches
from vitlab.training.features import evaluate_features
from vitlab.training.losses import Value
from vitlab.training.memory import MicroBatches, WeightedLoss, peak_memory
from vitlab.training.metrics import Metric, build_metrics
from vitlab.training.metrics.contract import mean
from vitlab.training.metrics.features import FeatureMetric
from vitlab.training.metrics.test_sets import average_test_sets, metrics_of_test_set
from vitlab.training.objective import Objective, Setup
from vitlab.training.optim import (
    Group,
    LossScaling,
    Optimizer,
    WeightAverage,
    group_by_decay,
    set_learning_rates,
    split_by_settings,
    split_for_layer_decay,
)
from vitlab.training.optim.schedules import Schedule

if TYPE_CHECKING:
    from vitlab.training.distillation import Distillation

WEIGHTS_STEP = "train/weights_step"
"""Metric of a training that ends with its best weights: the step that they are of."""

LossFunction = Callable[[Tensor, Tensor, noise.Draws], Value]
"""Returns the loss of images, (B, C, H, W), with their targets and the random draws of the layers."""


def count_steps(spec: TrainSpec, feed: Feed) -> int:
    """Return the length of a training in optimizer steps."""
    if spec.steps is not None:
        return spec.steps
    if spec.epochs is not None:
        return max(1, round(spec.epochs * feed.steps_per_epoch(spec.batch_size)))
    assert spec.images is not None
    return max(1, round(spec.images / feed.images_per_batch(spec.batch_size)))


def index_of_best(history: Sequence[Measurement], metric: str, goal: str) -> int:
    """Return the index of the first measurement with the best value of a metric; the first one if none is finite."""
    sign = 1 if goal == "max" else -1
    values = [sign * measurement.metrics.get(metric, math.nan) for measurement in history]
    return max(range(len(values)), key=lambda index: values[index] if math.isfinite(values[index]) else -math.inf)


class Diverged(Exception):
    """A loss is not finite."""


class Training:
    """The state of a training between two steps, and the operations on it.

    Args:
        model: Initialised model on the device of ``feed``; it is trained in place.
        feed: The batches.
        spec: Length, optimizer and number of evaluations.
        seeds: Seeds of the streams ``dropout``, ``drop_path`` and ``mixup``.
        distillation: The teacher of the objective, if any.
        micro_batches: How the batch of a step is split, and the processes that share it; by default it is whole.
        emit: Called with every measurement, including ``system/*``.
        write: Called with every state that is to be saved.
        on_step: Called after every step with its number, counted from 1.
        on_diverge: Called with the reason once a loss is not finite.
    """

    def __init__(
        self,
        model: Model,
        feed: Feed,
        spec: TrainSpec,
        seeds: Mapping[str, int],
        distillation: Distillation | None = None,
        micro_batches: MicroBatches | None = None,
        *,
        emit: Callable[[Measurement], None] = lambda measurement: None,
        write: Callable[[State], None] = lambda state: None,
        on_step: Callable[[int], None] = lambda step: None,
        on_diverge: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.model = model
        self.feed = feed
        self.spec = spec
        self.seeds = seeds
        self.micro_batches = micro_batches or MicroBatches()
        self.peers = self.micro_batches.peers
        self.emit = emit
        self.write = write
        self.on_step = on_step
        self.on_diverge = on_diverge
        self.steps = count_steps(spec, feed)

        # The objective decides what is trained: the model, or a module that holds it beside parts of its own.
        setup = Setup(model, feed, spec, seeds, self.steps, distillation)
        self.objective: Objective = slot("objective").build(spec.objective, setup)
        self.module = self.objective.module
        self.module.train()
        self.micro_batches.require_splittable_batches(self.module, self.images_per_batch)

        self.schedule: Schedule = slot("schedule").build(spec.schedule)
        optimizer: Optimizer = slot("optimizer").build(spec.optimizer)
        self.base_rate = optimizer.lr
        self.optimizer = optimizer.build(self._build_param_groups(optimizer))
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.peers.sum_gradients_during_backward(self.parameters, len(self.micro_batches.rows(self.images_per_batch)))
        self.path_layers = number_drop_paths(self.module)
        self.scaling = LossScaling(feed.device) if spec.precision == "fp16" else None
        self.average: WeightAverage | None = optimizer.average(self.optimizer)
        if spec.ema is not None:
            self.average = import_optional("averaging").Average(self.module, spec.ema)
        self.compiled_loss: LossFunction | None = None  #: of an engine that compiles :meth:`compute_loss`

        metrics = build_metrics(feed.info, spec.metrics, self.objective.standard_metrics(feed.info))
        self.metrics = {name: one for name, one in metrics.items() if not isinstance(one, FeatureMetric)}
        self.feature_metrics = {name: one for name, one in metrics.items() if isinstance(one, FeatureMetric)}
        self.test_set_metrics = {name: metrics_of_test_set(one) for name, one in feed.test_sets.items()}

        self.step = 0
        self.history: list[Measurement] = []  #: without ``system/*``
        self.predictions: dict[str, Columns] = {}  #: of the last measurement, by split
        self.best: State | None = None  #: what ``stop_early.weights: best`` goes back to; tensors are on the CPU
        self.result_index = -1  #: in ``history``; of an earlier measurement once the training has gone back to ``best``
        self._system: dict[str, float] = {}
        self.failure = ""  #: one sentence naming the step with a non-finite loss; empty if it did not diverge
        # Losses since the last measurement stay on the device: reading one would wait for the step to be computed.
        self.losses: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._interval_began = time.perf_counter()
        self._interval_images = 0

    def _build_param_groups(self, optimizer: Optimizer) -> Sequence[Group]:
        """Return the parameters in groups of equal decay and rate."""
        module = self.module
        groups: Sequence[Group] = group_by_decay(module, optimizer.weight_decay, module.no_weight_decay())
        # Before rates are divided by layer and width, which split every rule's groups in the same way.
        groups = optimizer.route(groups, module)
        if self.spec.layer_decay is not None:
            layers = {name: module.layer_of(name) for name, _ in module.named_parameters()}
            groups = split_for_layer_decay(groups, layers, self.spec.layer_decay)
        if factors := module.rate_factors():
            groups = split_by_settings(groups, import_optional("mup").make_group_scaling(factors, optimizer))
        return groups

    @property
    def epoch(self) -> float:
        """Return the number of epochs trained so far."""
        return self.step / self.feed.steps_per_epoch(self.spec.batch_size)

    @property
    def images(self) -> int:
        """Return the number of images seen so far, including repeats."""
        return self.step * self.images_per_batch

    @property
    def images_per_batch(self) -> int:
        """Return the effective batch size in images."""
        return self.feed.images_per_batch(self.spec.batch_size)

    @property
    def last_measured_step(self) -> int:
        """Return the step of the last measurement, 0 before the first."""
        return self.history[-1].step if self.history else 0

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.base_rate * self.schedule.factor(step, self.steps)

    def train_step(self) -> None:
        """Take one optimizer step.  Nothing is read back from the device."""
        self.optimizer.zero_grad()
        # A batch may be computed in micro-batches, and by several processes that each have some of its images; loss and
        # gradients are then combined to the ones of the whole batch.
        losses = [self.forward_backward(rows) for rows in self.micro_batches.rows(self.images_per_batch)]
        loss = self.micro_batches.combine_losses_and_gradients(losses, self.parameters)
        self.apply_learning_rate()
        if self.scaling is None:
            self.clip_gradients()
            self.optimizer.step()
        else:  # gradients are clipped unscaled, and a step with infinite ones is left out
            self.scaling.step(self.optimizer, self.parameters, self.spec.clip_grad)
        self.after_step(loss)

    def forward_backward(self, rows: range) -> WeightedLoss:
        """Accumulate the gradients of ``rows`` of the step's batch, usually all of it."""
        batch, draws = self._draw_batch_and_path_scales(rows)
        compute_loss = self.compiled_loss or self.compute_loss
        loss = compute_loss(batch.x_BCHW, batch.y_B, draws)
        # Not every part has equally many labels, so a mean over the batch weighs the means of its parts.
        weight = 1.0 if self.micro_batches.whole else self.objective.weight(batch.y_B)
        weighted = loss.total * weight
        torch.autograd.backward(weighted if self.scaling is None else self.scaling.scaler.scale(weighted))
        return WeightedLoss(loss.detached(), weight)

    def _draw_batch_and_path_scales(self, rows: range) -> tuple[Batch, noise.Draws]:
        """Return :meth:`draw_batch` with scales of paths, and seed torch; stacked trainings draw these in one call."""
        batch, draws = self.draw_batch(rows)
        # Third-party components may draw from torch's own generator, so it is seeded by the step as well.
        key = noise.key(self.seeds["dropout"], "torch", self.step, *([rows.start] if rows.start else []))
        noise.seed_torch(key, self.feed.device)
        if self.path_layers:
            scale_1LB = draw_path_scales(self.path_layers, [draws.drop_path], [sample_ids(batch)], batch.x_BCHW)
            draws = draws._replace(scale_LB=scale_1LB[0])
        return batch, draws

    def compute_loss(self, x_BCHW: Tensor, target: Tensor, draws: noise.Draws) -> Value:
        """Return the loss of some images of a step, a pure function of the weights, which engines stack or compile."""
        with noise.use_model_draws(draws):
            return self.objective.loss(x_BCHW, target)

    def draw_batch(self, rows: range) -> tuple[Batch, noise.Draws]:
        """Return ``rows`` of the step's batch and the random draws of its layers."""
        batch = self.objective.batch(self.step, rows)
        draws = noise.Draws(
            dropout=noise.key(self.seeds["dropout"], "dropout", batch.epoch),
            drop_path=noise.key(self.seeds["drop_path"], "drop_path", batch.epoch),
            sample_B=batch.id_B,
            step=noise.key(self.seeds["dropout"], "step", self.step),
        )
        return batch, draws

    def apply_learning_rate(self) -> None:
        """Set the learning rate of the step."""
        set_learning_rates(self.optimizer, self.learning_rate(self.step))

    def clip_gradients(self) -> None:
        """Clip the gradients to the largest global norm of the study, if it has one."""
        if self.spec.clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.spec.clip_grad)

    def after_step(self, loss: Value) -> None:
        """Record the loss of an optimizer step, and update what follows the weights."""
        self.losses["loss"].append(loss.total)
        for name, part in loss.parts.items():
            self.losses[name].append(part)
        self.step += 1
        self.objective.after_step(self.step)
        if self.average is not None:
            self.average.update(self.step)
        self.on_step(self.step)

    @torch.no_grad()
    def evaluate(self, split: Split) -> EvaluationResult:
        """Evaluate a split with the weights that the training will end with; all processes at the same time."""
        objective, peers = self.objective, self.peers
        further = nullcontext({}) if split in self.feed.test_sets else objective.evaluation_metrics()
        accumulator = MetricAccumulator(self.metrics_of_split(split))
        with self.evaluated_weights():
            with further as values, evaluation_mode(self.module):
                for batch in map(objective.evaluation_batch, evaluation_batches(self.feed, split, peers)):
                    accumulator.add_batch(objective.views(batch.x_BCHW, batch.y_B), batch.y_B, batch.id_B)
            result = accumulator.compute_result(split, peers)
            means = {
                name: mean(torch.cat(parts).cpu()) for name, parts in peers.all_gather_by_batch(values).items() if parts
            }
            return self.add_feature_metrics(result._replace(metrics={**result.metrics, **means}))

    def add_feature_metrics(self, result: EvaluationResult) -> EvaluationResult:
        """Add the metrics of features to an evaluation with the current weights, unless the training has diverged."""
        if result.split in self.feed.test_sets or not self.feature_metrics or not math.isfinite(result.metrics["loss"]):
            return result
        values = evaluate_features(
            self.model, self.feed, result.split, self.spec.precision, self.feature_metrics, self.peers
        )
        return result._replace(metrics={**result.metrics, **values})

    def metrics_of_split(self, split: Split) -> Mapping[str, Metric]:
        """Return the metrics of a split by name."""
        return self.test_set_metrics.get(split, self.metrics)

    def stops_early(self) -> bool:
        """Return whether the rule ``train.stop_early`` ends the training after its last measurement."""
        rule = self.spec.stop_early
        # Machines may round an evaluation differently, and a process that went on alone would wait for ever.
        return rule is not None and self.peers.share_stop(lambda: self._evaluations_since_best(rule) >= rule.patience)()

    def _evaluations_since_best(self, rule: StopEarly) -> int:
        goal = {**self.metrics, **self.feature_metrics}[rule.metric].goal
        return len(self.history) - 1 - index_of_best(self.history, f"val/{rule.metric}", goal)

    def _keep_weights_if_best(self) -> None:
        """Keep the evaluated weights if ``train.stop_early`` ends with the best, and the last measurement is it."""
        rule = self.spec.stop_early
        if rule is None or rule.weights == "last":
            return
        # Shared, so that all processes go back to the same step.
        if self.peers.share_stop(lambda: not self._evaluations_since_best(rule))():
            with self.evaluated_weights():
                weights = {name: value.to("cpu", copy=True) for name, value in self.module.state_dict().items()}
            self.best = {"index": len(self.history) - 1, "weights": weights, "predictions": self.predictions}

    def restore_best_weights(self) -> None:
        """Go back to the best weights when the training is over; only measurements of them follow."""
        assert self.best is not None
        self.module.load_state_dict(self.best["weights"])
        self.average = None  # the weights are averages already
        self.predictions = dict(self.best["predictions"])
        self.result_index = self.best["index"]

    def add_measurement(self, evaluations: Iterable[EvaluationResult]) -> Measurement:
        """Add a measurement of this step to the history, and return it with ``system/*``.

        A training is measured twice at its last step: the second measurement adds the splits that are evaluated at the
        end alone to the first one.  After :meth:`restore_best_weights` it adds them to the measurement of these
        weights, and only what it adds is returned.

        Args:
            evaluations: The evaluations of this step, computed after the training time of the interval is taken.

        Raises:
            Diverged: If a training or evaluation loss is not finite.
        """
        if self.result_index >= 0:
            before = self.history[self.result_index]
            added = {**self._collect_metrics_and_predictions(evaluations), WEIGHTS_STEP: float(before.step)}
            self.history[self.result_index] = replace(before, metrics={**before.metrics, **added})
            return replace(before, metrics=added)
        if self.history and self.last_measured_step == self.step:
            metrics = dict(self.history.pop().metrics)
        else:
            metrics = self._collect_train_metrics()
            self.predictions = {}
        metrics |= self._collect_metrics_and_predictions(evaluations)
        measurement = Measurement(self.step, self.epoch, self.images, metrics)
        self.history.append(measurement)
        self._keep_weights_if_best()
        self._interval_began, self._interval_images = time.perf_counter(), self.images
        self._system["system/memory_bytes"] = float(peak_memory(self.feed.device))
        return replace(measurement, metrics={**metrics, **self._system})

    def _collect_train_metrics(self) -> dict[str, float]:
        """Return the ``train/*`` metrics of the steps since the last measurement, and take their speed.

        Raises:
            Diverged: If a loss is not finite.
        """
        metrics: dict[str, float] = {}
        # Nothing was trained before the first measurement of a training of 0 steps.
        if self.losses:
            losses = {name: torch.stack(values).double().cpu() for name, values in self.losses.items()}
            if len(infinite := (~losses["loss"].isfinite()).nonzero()):
                step = self.step - len(losses["loss"]) + int(infinite[0]) + 1
                raise Diverged(
                    f"the loss is not finite at step {step} of {self.steps} "
                    f"(learning rate {self.learning_rate(step - 1):g})"
                )
            metrics = {f"train/{name}": mean(values) for name, values in losses.items()}
            metrics["train/lr"] = self.learning_rate(self.step - 1)
            self.losses.clear()
            if self.scaling is not None:
                metrics["train/skipped_steps"] = self.scaling.pop_skipped_steps()
        # Before the evaluations run, which are no training.
        speed = (self.images - self._interval_images) / (time.perf_counter() - self._interval_began)
        self._system = {"system/images_per_s": speed}
        return metrics

    def _collect_metrics_and_predictions(self, evaluations: Iterable[EvaluationResult]) -> dict[str, float]:
        """Return the metrics of evaluations, those of test sets averaged, and store the predictions.

        Raises:
            Diverged: If a loss is not finite.
        """
        metrics: dict[str, float] = {}
        by_kind: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
        for split, values_by_name, columns in evaluations:
            if split in self.feed.test_sets:
                by_kind[self.feed.test_sets[split].kind].append(values_by_name)
                continue
            if not torch.tensor(values_by_name["loss"]).isfinite():
                raise Diverged(f"the loss on {split} is not finite after step {self.step}")
            metrics |= {f"{split}/{name}": value for name, value in values_by_name.items()}
            self.predictions[split] = columns
        return metrics | {f"test/{name}": value for name, value in average_test_sets(by_kind).items()}

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are evaluated."""
        return self.average.averaged_weights() if self.average is not None else nullcontext()

    def save_if_finite(self) -> None:
        """Write a checkpoint, unless a loss is not finite, which the next measurement reports."""
        # By the measurement alone, so that the step at which a training ends does not depend on when it was saved.
        if self.losses and not torch.stack(self.losses["loss"]).isfinite().all():
            return
        began = time.perf_counter()
        self.write(
            {
                "model": self.module.state_dict(),
                "average": self.average and self.average.state_dict(),
                "best": self.best,
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "history": [asdict(measurement) for measurement in self.history],
                "losses": {name: torch.stack(values) for name, values in self.losses.items()},
                "scaling": self.scaling and self.scaling.state_dict(),
            }
        )
        self.exclude_time_since(began)

    def exclude_time_since(self, began: float) -> None:
        """Exclude the time spent on saving or evaluating from the measured speed of training."""
        self._interval_began += time.perf_counter() - began

    def load(self, state: State) -> None:
        """Restore the state that :meth:`save` wrote."""
        self.module.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.history = [Measurement(**measurement) for measurement in state["history"]]
        for name, values in state["losses"].items():
            self.losses[name] = list(values.to(self.feed.device))
        if self.scaling is not None:
            self.scaling.load_state_dict(state["scaling"])
        self._interval_began, self._interval_images = time.perf_counter(), self.images

    def finish(self) -> Outcome:
        """Return the outcome, but for the digest of the weights, and give the model the weights that were evaluated."""
        # Stored and evaluated weights are then the same.
        if self.average is not None:
            self.average.replace()
        final = self.history[self.result_index]
        return Outcome(final.metrics, tuple(self.history), "", self.step, self.images)

    def diverge(self, why: Diverged) -> Outcome:
        """Return the outcome of a diverged training, which has no metrics and no weights."""
        self.failure = str(why)
        self.on_diverge(self.failure)
        return Outcome({}, tuple(self.history), "", self.step, self.images)
