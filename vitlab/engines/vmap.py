"""The engine ``vmap``: trials of one shape, trained together with stacked weights.

Most of a step of a small model is kernel launch overhead.  The weights of the trials are stacked, and every kernel is
launched once for all of them by ``torch.func.vmap``.

Only forward, backward and evaluation are batched over trials; each trial keeps its own batches, random draws, learning
rate, optimizer, history and checkpoint.  The weights of a trial's model are rows of the stacked weights, and its
gradients rows of the stacked gradients.

On a CPU the results of a trial are bitwise independent of the other trials.  Some kernels treat a stack of one
differently, so a single trial is stacked twice.

K trials; B images of a batch, C channels, H and W pixels.
Reference: arXiv:2102.02344 (HFTA).
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from vitlab import noise
from vitlab.components.base import Part, draw_path_scales
from vitlab.data.batches import enable_joint_batches, sample_ids
from vitlab.engines.base import Engine, engine
from vitlab.models.contract import NewState, State
from vitlab.training.evaluation import NARROW, EvaluationResult, MetricAccumulator, Split, evaluation_batches
from vitlab.training.loop import Training
from vitlab.training.losses import Value
from vitlab.training.memory import WeightedLoss
from vitlab.training.optim import Composite, Group, find_or_add_group, subclass_without_compile_hooks

Call = Callable[..., Any]
"""A call of a module, which is the first argument, with inputs of one trial."""


class PartCall(nn.Module):
    """A part and a call of it, as a module, so that ``functional_call`` can replace its weights."""

    def __init__(self, part: nn.Module, call: Call) -> None:
        super().__init__()
        self.part = part
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.part, *inputs)


@engine.register("vmap")
class Vmap(Engine):
    """Trainings with stacked weights, vectorised by ``torch.func.vmap``."""

    fallback = "loop"

    def __init__(self, trainings: Sequence[Training]) -> None:
        super().__init__(trainings)
        enable_joint_batches([training.feed for training in trainings])
        with self._convert_to_engine_failed():
            self._stack_weights()

    @classmethod
    def incompatibility(cls, training: Training) -> str | None:
        if reason := training.objective.stacking_incompatibility():
            return reason
        if training.scaling is not None:
            return "engine vmap does not scale losses, as precision fp16 requires"
        if training.module.vmap_safe:
            return None
        modules = training.module.named_modules()
        parts = [path for path, part in modules if isinstance(part, Part) and not part.vmap_safe]
        return f"{', '.join(parts) or 'the model'} does not support engine vmap"

    def compute_step(self) -> None:
        """Compute all gradients at once, and take the optimizer steps."""
        first = self.trainings[0]
        losses: list[tuple[Value, Tensor]] = []
        gradients: list[Tensor] = []
        for rows in first.micro_batches.rows(first.images_per_batch):
            part, part_gradients = self._forward_backward(rows)
            losses.append(part)
            gradients = (
                [one + other for one, other in zip(gradients, part_gradients, strict=True)]
                if gradients
                else part_gradients
            )
        # zip without strict: a single trial is stacked twice, and its second row has no parameter.
        for parameters, gradient in zip(self.parameters.values(), gradients, strict=True):
            for parameter, row in zip(parameters, gradient, strict=False):
                parameter.grad = row
        values = []
        for row, training in enumerate(self.trainings):
            parts = [
                WeightedLoss(
                    Value(loss.total[row], {name: part[row] for name, part in loss.parts.items()}), weight[row]
                )
                for loss, weight in losses
            ]
            values.append(training.micro_batches.combine_losses_and_gradients(parts, training.parameters))
            training.apply_learning_rate()
            training.clip_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        for training, value in zip(self.trainings, values, strict=True):
            training.after_step(value)

    def _forward_backward(self, rows: range) -> tuple[tuple[Value, Tensor], list[Tensor]]:
        """Return losses and weights of ``rows`` of every trial's batch, usually all of it, and their gradients."""
        first = self.trainings[0]
        each = [training.draw_batch(rows) for training in self.trainings]
        stacked = [each[row] for row in self.rows]
        x_KBCHW = torch.stack([batch.x_BCHW for batch, _ in stacked])
        y_KB = torch.stack([batch.y_B for batch, _ in stacked])
        dropout, drop_path, step = (
            noise.tensor_of([getattr(draws, name) for _, draws in stacked], first.feed.device)
            for name in ("dropout", "drop_path", "step")
        )
        draws = noise.Draws(dropout, drop_path, torch.stack([batch.id_B for batch, _ in stacked]), step)
        if first.path_layers:
            keys, samples = zip(*((draws.drop_path, sample_ids(batch)) for batch, draws in stacked), strict=True)
            draws = draws._replace(scale_LB=draw_path_scales(first.path_layers, keys, samples, x_KBCHW))
        loss = self._compute_losses({**self.trainable, **self.frozen}, x_KBCHW, y_KB, draws)
        weight_K = torch.ones_like(loss.total)
        if not first.micro_batches.whole:
            weight_K = torch.stack([first.objective.weight(y_B) for y_B in y_KB]).to(loss.total)
        gradients = torch.autograd.grad((loss.total * weight_K).sum(), list(self.trainable.values()))
        # Fused optimizers read memory in the order of the weights and ignore the strides of a gradient.
        return (loss.detached(), weight_K), [gradient.contiguous() for gradient in gradients]

    @torch.no_grad()
    def compute_evaluations(self, splits: Sequence[Split]) -> list[list[EvaluationResult]]:
        """Evaluate all trainings batch by batch."""
        began = time.perf_counter()
        first = self.trainings[0]
        rows = {**self.trainable, **self.frozen}
        results: list[list[EvaluationResult]] = [[] for _ in self.trainings]
        self.module.eval()
        with ExitStack() as averages:
            for training in self.trainings:  # each copies its averaged weights into its row of the stack
                averages.enter_context(training.evaluated_weights())
            for split in splits:
                # All trials share the images, so that a batch is prepared once.
                accumulators = [MetricAccumulator(training.metrics_of_split(split)) for training in self.trainings]
                for batch in evaluation_batches(first.feed, split):
                    batch = first.objective.evaluation_batch(batch)
                    views = self._compute_views(rows, batch.x_BCHW, batch.y_B)
                    for row, accumulator in enumerate(accumulators):
                        accumulator.add_batch({name: view[row] for name, view in views.items()}, batch.y_B, batch.id_B)
                for training, evaluations, accumulator in zip(self.trainings, results, accumulators, strict=True):
                    evaluations.append(training.add_feature_metrics(accumulator.compute_result(split)))
        self.module.train()
        for training in self.trainings:
            training.exclude_time_since(began)
        return results

    def _compute_losses(self, rows: State, x_KBCHW: Tensor, y_KB: Tensor, draws: noise.Draws) -> Value:
        """Return the losses of the batches of all trials, whose stacked weights are ``rows``."""

        def loss(rows: NewState, x_BCHW: Tensor, y_B: Tensor, draws: noise.Draws) -> Any:
            with noise.use_model_draws(draws):
                return functional_call(self._loss, rows, (x_BCHW, y_B))

        losses: Value = vmap(loss)(self._cast_biases(rows), x_KBCHW, y_KB, draws)
        return losses

    def _compute_views(self, rows: State, x_BCHW: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """Return the views of the objective on a batch that all trials share, each with the trials on axis 0."""
        call = partial(functional_call, self._views, args=(x_BCHW, y_B))
        views: dict[str, Tensor] = vmap(call)(self._cast_biases(rows))
        return views

    def _cast_biases(self, rows: State) -> NewState:
        """Return the weights of a :class:`PartCall`, biases of linear maps in the dtype that autocast gives products.

        Autocast does not reach biases inside of vmap, where a layer is a product and a sum; a bias in 32 bits would
        then widen the output of the layer.
        """
        dtype = NARROW.get(self.trainings[0].spec.precision)
        return {f"part.{name}": row.to(dtype) if dtype and name in self.biases else row for name, row in rows.items()}

    def _stack_weights(self) -> None:
        count = len(self.trainings)
        self.rows = range(count) if count > 1 else [0, 0]  # the trial of each row
        models = [training.module for training in self.trainings]
        self.module, objective = models[0], self.trainings[0].objective
        self._loss = PartCall(self.module, lambda _, *inputs: objective.loss(*inputs))
        self._views = PartCall(self.module, lambda _, *inputs: objective.views(*inputs))
        linear = [path for path, part in self.module.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
        self.biases = {f"{path}.bias" for path in linear}
        self.trainable: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}  # frozen parameters and buffers
        weights = [dict(model.named_parameters()) for model in models]
        for name, parameter in weights[0].items():
            rows = self._stack_as_views([parameters[name] for parameters in weights])
            (self.trainable if parameter.requires_grad else self.frozen)[name] = rows.requires_grad_(
                parameter.requires_grad
            )
        for name, _ in self.module.named_buffers():
            self.frozen[name] = self._stack_as_views([model.get_buffer(name) for model in models])
        self.parameters = {name: [parameters[name] for parameters in weights] for name in self.trainable}
        self.optimizers = join_optimizers([training.optimizer for training in self.trainings])

    def _stack_as_views(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack the tensors of the trials and make each a view of its row."""
        rows = torch.stack([tensors[row].detach() for row in self.rows])
        # The models' own tensors become views, so optimizers, checkpoints and metrics need not know of the stack.
        for tensor, row in zip(tensors, rows.unbind(), strict=False):
            tensor.data = row
        return rows


# -- optimizers of several models that step together ------------------------------------------------------------------

ADAMS, SGDS = (
    (*classes, *map(subclass_without_compile_hooks, classes))
    for classes in ((torch.optim.Adam, torch.optim.AdamW), (torch.optim.SGD,))
)
"""Classes of elementwise optimizers; a derived class may compute another step."""


class _JointOptimizer:
    """Optimizers of one class as one.

    Several Adam or AdamW optimizers step by torch's fused kernel alone.  The method ``step`` of torch's optimizer calls
    the same kernel; for 700 small parameters it takes eight times as long, since it visits every parameter in Python
    and increments its counter by a call of its own.  Here the counters are views of one vector.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.groups = [group for member in members for group in member.param_groups]
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for member in members:
            self.state |= {p: member.state[p] for group in member.param_groups for p in group["params"]}
        # A shallow copy has the defaults and hooks of its class, and state and groups of all.
        self.combined = copy.copy(members[0])
        self.combined.state = self.state
        self.steps_P: Tensor | None = None  #: the counters of all parameters, for the kernel alone

    @torch.no_grad()
    def step(self) -> None:
        merged: list[Group] = []  # groups that differ in nothing but their parameters, as one
        for group in self.groups:
            settings = {name: value for name, value in group.items() if name != "param_names"}
            find_or_add_group(merged, settings)["params"] += group["params"]
        # The kernel has no notion of a missing gradient, which torch's step leaves out.
        if self.steps_P is not None and all(p.grad is not None for p in self.state):
            self.steps_P += 1
            for group in merged:
                self._call_kernel(group)
            return
        self.combined.param_groups = merged
        self.combined.step()
        if self.steps_P is None and self._is_supported_by_kernel():
            self.steps_P = torch.stack([state["step"] for state in self.state.values()])
            for state, step in zip(self.state.values(), self.steps_P.unbind(), strict=True):
                state["step"] = step

    def _is_supported_by_kernel(self) -> bool:
        """Return True if all parameters have a state of Adam, and the kernel takes them all in one call."""
        return (
            type(self.combined) in ADAMS
            and all(group["fused"] and not (group["amsgrad"] or group["maximize"]) for group in self.groups)
            and len({(p.dtype, p.device) for p in self.state}) == 1
            and all("exp_avg" in state for state in self.state.values())
        )

    def _call_kernel(self, group: Group) -> None:
        kernel: Any = torch._fused_adamw_ if isinstance(self.combined, torch.optim.AdamW) else torch._fused_adam_
        states = [self.state[p] for p in group["params"]]
        beta1, beta2 = group["betas"]
        kernel(
            group["params"],
            [p.grad for p in group["params"]],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def join_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer | _JointOptimizer]:
    """Return optimizers of several models as ones that step together, one call for all parameters of equal settings.

    Torch's elementwise optimizers, and those with the attribute ``joint_safe``, are joined: their result for a
    parameter does not depend on the others, bitwise, and they count no steps per group.  Each optimizer keeps its own
    state, and loads none from then on.  Other optimizers step one by one.
    """
    parts = [part for one in optimizers for part in (one.parts if isinstance(one, Composite) else [one])]
    by_type: defaultdict[type, list[torch.optim.Optimizer]] = defaultdict(list)
    alone: list[torch.optim.Optimizer] = []
    for part in parts:
        is_joined = type(part) in (*ADAMS, *SGDS) or getattr(part, "joint_safe", False)
        (by_type[type(part)] if is_joined else alone).append(part)
    return [*alone, *map(_JointOptimizer, by_type.values())]
