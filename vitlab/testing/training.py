"""Contract tests of what trains a model and measures it: optimizers, schedules, losses, objectives, engines, metrics.

B images, N of a split, K classes, H and W pixels.
"""

import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from vitlab.components.base import NewState
from vitlab.data.pixels import IGNORED
from vitlab.data.prepare import prepare
from vitlab.engines import Engine
from vitlab.errors import list_some
from vitlab.geometry import DataInfo
from vitlab.models import Model
from vitlab.registry import ResolvedChoice, slot
from vitlab.registry.plugins import NO_CHANGE, sentence_with_place
from vitlab.runner.models import make_training
from vitlab.spec import STREAMS, TrainSpec, TrialSpec
from vitlab.testing.assertions import (
    FirstCallFailed,
    check_each,
    check_type,
    checked_reason,
    equal_states,
    forbid_global_draws,
    prefix_failures,
)
from vitlab.training import artifacts
from vitlab.training.loop import Training
from vitlab.training.losses import Loss, Value
from vitlab.training.metrics.features import Features
from vitlab.training.objective import Objective
from vitlab.training.optim import Optimizer, group_by_decay, set_learning_rates
from vitlab.training.optim.schedules import Schedule

B, K = 6, 7
STEPS = 6
RATE = 0.01
SEEDS = {**dict.fromkeys(STREAMS, 1), "split": 0}
DATA = {
    "type": "synthetic",
    "image_size": 8,
    "train_images": 40,
    "test_images": 10,
    "num_classes": K,
    "augment": [{"type": "random_resized_crop"}],
}
MODEL = {"type": "vit", "patch_size": 2, "dim": 8, "depth": 1, "heads": 2}


def check_optimizer(choice: ResolvedChoice) -> None:
    """Check that trainings repeat and resume bit for bit, and that groups decide on rate and weight decay."""
    built: Optimizer = slot("optimizer").build(choice)
    if reason := built.incompatibility(TrainSpec(steps=STEPS).model_dump()):
        raise SkipTest(reason)
    for attribute in ("lr", "weight_decay"):
        value = getattr(built, attribute, None)
        assert isinstance(value, int | float), f"its attribute {attribute} is {value!r}; set a number in __init__"
    model = _build_training({}).model
    with prefix_failures("build"):
        optimizer = built.build(built.route(group_by_decay(model, 0.5), model))
    check_type(optimizer, torch.optim.Optimizer, "build", "a torch.optim.Optimizer")
    check_each(
        lambda: check_training_resumes_exactly(optimizer=choice.plain()),
        lambda: _check_step_direction(choice),
        lambda: _check_decay(choice),
    )


def _check_step_direction(choice: ResolvedChoice) -> None:
    # Warm-up begins at rates near 0, and a schedule may end there.
    moves = _moves_along_gradients(choice, rate=0.0)
    assert not moves, (
        f"steps at rate 0 move {list_some(moves)}; read the rate from group['lr'], which a training sets before "
        "every step"
    )
    along_gradient = sum(_moves_along_gradients(choice, rate=RATE).values())
    assert along_gradient < 0, f"steps at rate {RATE:g} move no weight, or follow the gradients; go against them"


def _check_decay(choice: ResolvedChoice) -> None:
    groups = group_by_decay(_build_training({}).model, 0.5)
    decaying = {name for group in groups if group["weight_decay"] for name, _ in group["params"]}
    for weight_decay, expected in ((0.5, decaying), (0.0, set[str]())):
        # Without gradients, what moves is what decays.
        shrunk = set(_moves_along_gradients(choice, rate=RATE, weight_decay=weight_decay, scale=0.0))
        assert shrunk == expected, (
            f"steps without a gradient treat {list_some(sorted(shrunk ^ expected))} as if group['weight_decay'] were "
            "another; decay weights by it, and others not"
        )


def check_training_resumes_exactly(**fields: Any) -> None:
    """Check that a training with these fields of ``train`` repeats bit for bit, also if a checkpoint interrupts it."""
    with prefix_failures("trains a small ViT", FirstCallFailed):
        training = _build_training(fields)
        with forbid_global_draws(), torch.random.fork_rng([]):  # every step seeds torch's generator
            whole = _train_steps(training, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        first = _build_training(fields, lambda state: artifacts.make_checkpoint_writer(Path(folder), state)())
        second = _build_training(fields)
        _train_steps(first, STEPS // 2)
        with prefix_failures("its state is written to a checkpoint and read again"):
            first.save_if_finite()
            state = artifacts.clean_up_and_read_checkpoint(Path(folder))
            assert state is not None
            second.load(state)
        resumed = _train_steps(second, STEPS - STEPS // 2)
    assert equal_states(whole, resumed), (
        f"a training that was interrupted after {STEPS // 2} steps ends with other weights than an equal one; keep "
        "what steps change in the state that state_dict returns, and nothing outside of the instance, and draw from "
        "vitlab.plugin.noise"
    )


def check_schedule(choice: ResolvedChoice) -> None:
    """Check that factors are positive numbers that depend on the step and the length alone, for every warm-up."""
    configured = {"": choice}
    if isinstance(choice.options.get("warmup"), float):
        configured = {
            f"with warmup {warmup}: ": slot("schedule").resolve_choice({**choice.plain(), "warmup": warmup})
            for warmup in (0.0, 0.1, 0.5, 1.0)
        }
    for what, each in configured.items():
        schedule: Schedule = slot("schedule").build(each)
        for steps in (1, 2, 7, 100):
            with prefix_failures(f"{what}factor in a training of {steps} steps"):
                factors = [schedule.factor(step, steps) for step in range(steps)]
                # A training that is resumed asks for a later step first.
            backwards = [schedule.factor(step, steps) for step in reversed(range(steps))]
            for step, factor in enumerate(factors):
                assert isinstance(factor, int | float) and math.isfinite(factor) and factor > 0, (
                    f"{what}the factor of step {step} of {steps} is {factor!r}; it is a number above 0"
                )
            assert factors == backwards[::-1], (
                f"{what}factors depend on the order of the calls; a resumed training begins in between"
            )


def check_loss(choice: ResolvedChoice, needed: str = "") -> None:
    """Check that a loss is a mean over images, for indices, and for class shares and pixels if it takes them.

    It must take ``needed``, one of these.
    """
    generator = torch.Generator().manual_seed(0)
    logits_BK = torch.randn(B, K, generator=generator, dtype=torch.float64)
    target_B = torch.arange(B) % K
    loss: Loss = slot("loss").build(choice)
    with prefix_failures("of class indices", FirstCallFailed):
        value = loss({"": logits_BK.clone()}, target_B.clone())
    with prefix_failures("of class indices"):
        check_type(value, Value, "__call__", "Value(tensor, {})")
        check_type(value.total, Tensor, "__call__", "Value(tensor, {}), with a tensor that has a gradient")
        _check_loss_is_mean(loss, logits_BK, target_B)
    right, wrong = (
        float(loss({"": 8.0 * torch.nn.functional.one_hot(predicted_B, K).double()}, target_B).total)
        for predicted_B in (target_B, target_B.roll(1))
    )
    assert right < wrong, f"is {right:g} of right predictions and {wrong:g} of wrong ones; it is minimised"
    # Segmentation and mixed images: a loss may refuse either, and must be a mean where it does not.
    logits_BKHW = torch.randn(B, K, 3, 3, generator=generator, dtype=torch.float64)
    target_BHW = torch.randint(0, K, (B, 3, 3), generator=generator)
    target_BHW[0, 0] = IGNORED  # so that the parts of a batch have different numbers of labels
    for kind, logits, target in (
        ("class shares", logits_BK, logits_BK.softmax(1).detach()),
        ("pixels", logits_BKHW, target_BHW),
    ):
        try:
            loss({"": logits}, target)
        except Exception as error:  # not every loss is for mixed images, or for pixels
            assert kind != needed, (
                f"of {kind}, which trials of this study have: {sentence_with_place(error)}; take them, too"
            )
            continue
        with prefix_failures(f"of {kind}"):
            _check_loss_is_mean(loss, logits, target)


def check_objective(choice: ResolvedChoice) -> None:
    """Check that trainings repeat and resume bit for bit."""
    cls: Any = choice.component
    data, model = slot("dataset").resolve_choice(DATA), slot("model").resolve_choice(MODEL)
    info, fields = prepare(data, SEEDS).info, {"objective": choice.plain()}
    trial = {
        "data": data.plain(),
        "model": model.plain(),
        "train": {**TrainSpec(steps=STEPS).model_dump(), **fields},
    }
    if reason := cls.incompatibility(info, model, trial):
        raise SkipTest(reason)
    check_training_resumes_exactly(**fields)
    training = _build_training(fields)
    objective: Objective = training.objective
    assert "loss" in objective.standard_metrics(info), "standard_metrics has no 'loss'; every evaluation reports one"
    with torch.no_grad(), prefix_failures("views of an evaluation"):
        labelled = objective.evaluation_batch(training.feed.batch(0, B, 1, [range(B)]))
        views = objective.views(labelled.x_BCHW, labelled.y_B)
    assert "" in views and len(views[""]) == B, "views has no '' with a row for each image"


def check_engine(choice: ResolvedChoice) -> None:
    """Check that trainings end with the loop's weights up to rounding, and do not depend on each other."""
    cls: type[Engine] = choice.component
    fields = [{"precision": "fp64", "optimizer": {"type": "adamw", "lr": rate}} for rate in (RATE, 3 * RATE)]
    if reason := cls.incompatibility(_build_training(fields[0])):
        raise SkipTest(reason)
    together = _train_by_engine(cls, [_build_training(each) for each in fields])
    for each, weights in zip(fields, together, strict=True):
        for name, value in _train_steps(_build_training(each), STEPS).items():
            assert torch.allclose(weights[name], value, rtol=1e-9, atol=1e-10), (
                f"a training ends with another {name} than by engine loop; both compute the same steps"
            )
        # Which trials are trained together depends on the machine, so it must not show in their weights.
        (alone,) = _train_by_engine(cls, [_build_training(each)])
        assert equal_states(alone, weights), "the weights of a training depend on the trainings beside it"


def _train_by_engine(cls: type[Engine], trainings: Sequence[Training]) -> list[NewState]:
    with prefix_failures(f"trains {len(trainings)} small ViTs"):
        engine = cls(trainings)
        for _ in range(STEPS):
            engine.train_step()
        evaluations = [list(one) for one in engine.evaluate(["val"])]
    assert len(evaluations) == len(trainings), f"evaluate gives {len(evaluations)} results for {len(trainings)}"
    return [_copy_weights(training.module) for training in trainings]


def _check_loss_is_mean(loss: Loss, logits: Tensor, target: Tensor) -> None:
    def of(part: slice) -> Tensor:
        return loss({"": logits[part]}, target[part]).total

    inputs, labels = logits.clone(), target.clone()
    parts = [slice(0, 2), slice(2, None)]
    with forbid_global_draws():
        whole, totals = of(slice(None)), [of(part) for part in parts]
    assert whole.ndim == 0, f"has shape {tuple(whole.shape)}; return its mean, one number, as Value(mean, {{}})"
    assert whole.dtype == logits.dtype, f"is {whole.dtype} of logits in {logits.dtype}; keep their dtype"
    _check_unchanged(inputs, logits, labels, target)
    weights = [float(loss.weight(target[part])) for part in parts]
    micro = sum(weight * float(total) for weight, total in zip(weights, totals, strict=True)) / sum(weights)
    assert math.isclose(micro, float(whole), rel_tol=1e-9), (
        f"is {micro:.6g} in two parts, and {float(whole):.6g} at once: return a mean over the batch, not a sum, the "
        "number of its terms from weight(), and keep nothing from one call to the next"
    )
    for scale in (1.0, 100.0):  # at 100, a probability is 0 in float32 and its logarithm infinite
        leaf = (scale * logits).float().requires_grad_()
        total = loss({"": leaf}, target.float() if target.is_floating_point() else target).total
        assert total.requires_grad, "has no gradient; compute it by torch alone, without .detach(), .item() and numpy"
        torch.autograd.backward(total)
        assert leaf.grad is not None and leaf.grad.isfinite().all(), (
            f"the gradient of logits up to {scale:g} is not finite"
        )


def _check_unchanged(*pairs: Tensor) -> None:
    """Check that a component left its arguments as they were, given copies of them."""
    assert all(map(torch.equal, pairs[::2], pairs[1::2])), f"changes its arguments; {NO_CHANGE}"


def _build_training(fields: Mapping[str, Any], *write: Callable[[artifacts.State], None]) -> Training:
    """Return the training of a small ViT by these fields of ``train``; ``write`` writes its checkpoints, if any."""
    train = {"steps": STEPS, "batch_size": 4, "evaluations": 1, **fields}
    spec = TrialSpec.model_validate({"data": DATA, "model": MODEL, "train": train})
    return make_training(spec, SEEDS, *write)


def _train_steps(training: Training, steps: int) -> NewState:
    for _ in range(steps):
        training.train_step()
    return _copy_weights(training.module)


def _moves_along_gradients(
    choice: ResolvedChoice, *, rate: float, weight_decay: float = 0.0, scale: float = 1.0
) -> dict[str, float]:
    """Return the weights that three steps on normal gradients change, and how far each moves along its gradient.

    The gradients are multiplied by ``scale``.
    """
    model = _build_training({}).model
    optimizer: Optimizer = slot("optimizer").build(choice)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.01)  # a weight of 0 could not shrink
    before = _copy_weights(model)
    with prefix_failures(f"steps at rate {rate:g}"):
        built = optimizer.build(optimizer.route(group_by_decay(model, weight_decay), model))
        set_learning_rates(built, rate)
        for _ in range(3):  # the first step may only fill the state
            built.step()
    return {
        name: float(((value.detach() - before[name]) * value.grad).sum())
        for name, value in model.named_parameters()
        if value.grad is not None and not torch.equal(value, before[name])
    }


def _copy_weights(model: Model) -> NewState:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# -- metrics ----------------------------------------------------------------------------------------------------------

N = 40
CUTS = ((N,), (1, 22, N - 23), (N - 3, 3))
"""Batch sizes of three passes over one split."""


def check_metric(choice: ResolvedChoice) -> None:
    """Check a metric for each of its tasks, on random, correct and wrong predictions."""
    cls: Any = choice.component
    low, high = cls.bounds
    name = slot("metric").build(choice).name or choice.bare_name
    assert re.fullmatch(r"\w+", name), f"is called '{name}' in results; a name is letters, digits and _"
    for task in cls.tasks:
        data = DataInfo(image=(4, 4), channels=1, classes=K, task=task)
        with prefix_failures(f"of {task}"):
            if checked_reason(cls.incompatibility(data, choice.options)) is not None:
                continue
            if cls.reads == "features":
                _check_feature_metric(choice)
            else:
                level = slot("metric").build(choice).chance(data)
                assert level is None or low <= level <= high, f"chance gives {level!r}, outside of {cls.bounds}"
                _check_prediction_metric(choice, task)


def _check_prediction_metric(choice: ResolvedChoice, task: str) -> None:
    cls: Any = choice.component
    target = _make_targets(task)
    if task == "multilabel":
        one_hot = 2 * target - 1
    else:
        one_hot = torch.nn.functional.one_hot(target.clamp(min=0), K).movedim(-1, 1).float()
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(one_hot.shape, generator=generator) + one_hot
    # Logits of 20 are certain in float32, and those of a wrong class certainly wrong.
    predictions = {
        "random": random,
        "right": 20 * one_hot,
        "wrong": -20 * one_hot if task == "multilabel" else 20 * one_hot.roll(1, 1),
    }
    values = {kind: _compute_metric(choice, logits, target) for kind, logits in predictions.items()}
    for kind, value in values.items():
        _check_bounds(cls, value, f"predictions are {kind}")
    best = (max if cls.goal == "max" else min)(values.values())
    assert values["right"] == best != values["wrong"], (
        f"has the goal {cls.goal}, and is {values['right']:g} where predictions are right, {values['wrong']:g} where "
        f"they are wrong and {values['random']:g} in between; the class sets goal = 'max' or goal = 'min'"
    )
    reference = values["random"]
    for cuts in CUTS[1:]:
        value = _compute_metric(choice, random, target, cuts)
        assert _is_close(value, reference), (
            f"is {value:g} in batches of {cuts}, and {reference:g} in one of {N}; let rows return what value combines, "
            "such as a row for each image, and keep nothing from one call to the next"
        )
    value = _compute_metric(choice, random.flip(0), target.flip(0))
    assert _is_close(value, reference), f"is {value:g} with the images in another order, and was {reference:g}"
    value = _compute_metric(choice, random.double(), target)
    assert _is_close(value, reference, 1e-4), f"is {value:g} of logits in float64, and {reference:g} of them in float32"
    if task == "segmentation":
        unlabelled = (target == IGNORED)[:, None]
        value = _compute_metric(choice, torch.where(unlabelled, random.flip(1), random), target)
        assert _is_close(value, reference), "depends on predictions where there is no label; ignore these"


def _check_feature_metric(choice: ResolvedChoice) -> None:
    """Check a metric of features on random ones and on those that tell the classes apart."""
    cls: Any = choice.component
    metric: Any = slot("metric").build(choice)
    generator = torch.Generator().manual_seed(1)
    label_N = torch.arange(N) % K
    random_ND = torch.randn(N, 2 * K, generator=generator, dtype=torch.float64)
    apart_ND = torch.nn.functional.one_hot(label_N, 2 * K) + 0.01 * random_ND
    for kind, x_ND in (("random", random_ND), ("apart", apart_ND)):
        with prefix_failures("of_features", FirstCallFailed):
            value, reordered = (
                float(metric.of_features(images, lambda images=images: images))
                for order_N in (torch.arange(N), torch.randperm(N, generator=generator))
                for images in [Features(x_ND[order_N], label_N[order_N])]
            )
        _check_bounds(cls, value, f"features are {kind}")
        assert _is_close(value, reordered), (
            f"is {reordered:g} with the images in another order, and was {value:g} before"
        )


def _check_bounds(cls: Any, value: float, where: str) -> None:
    low, high = cls.bounds
    assert math.isfinite(value), f"is {value} where {where}"
    assert low - 1e-6 <= value <= high + 1e-6, (
        f"is {value:g} where {where}, and its bounds are {low:g} and {high:g}; set bounds = (LOW, HIGH) in the class"
    )


def _make_targets(task: str) -> Tensor:
    """Return targets of every class at unequal rates; of pixels, some are unlabelled, as is one whole image."""
    generator = torch.Generator().manual_seed(0)
    if task == "classification":
        return torch.cat([torch.arange(K), torch.randint(0, 3, (N - K,), generator=generator)])
    if task == "multilabel":
        return torch.cat([torch.eye(K), (torch.rand(N - K, K, generator=generator) < 0.3).float()])
    target_NHW = torch.randint(0, K, (N, 4, 4), generator=generator)
    target_NHW[torch.rand(target_NHW.shape, generator=generator) < 0.1] = IGNORED
    target_NHW[5] = IGNORED
    return target_NHW


def _compute_metric(
    choice: ResolvedChoice, logits: Tensor, target: Tensor, batch_sizes: Sequence[int] = CUTS[0]
) -> float:
    """Return the metric's value of a split, computed by a new instance."""
    metric: Any = slot("metric").build(choice)
    inputs, labels = logits.clone(), target.clone()
    with (
        prefix_failures(f"rows of batches of {tuple(batch_sizes)}", FirstCallFailed),
        forbid_global_draws(),
    ):
        parts = zip(torch.split(inputs, list(batch_sizes)), torch.split(labels, list(batch_sizes)), strict=True)
        rows = [metric.rows(*part) for part in parts]
        for value in rows:
            check_type(value, Tensor, "rows", "a tensor with a row for each image")
            assert value.ndim, "rows returned one number; return a tensor with a row for each image"
        rows_N = torch.cat(rows)
    _check_unchanged(inputs, logits, labels, target)
    with prefix_failures("value", FirstCallFailed):
        value = float(metric.value(rows_N))
        column_N = metric.column(rows_N)
    shape = None if column_N is None else tuple(column_N.shape)
    assert shape in (None, (N,)), f"column has shape {shape}; it is one value per image, {(N,)}, or None"
    return value


def _is_close(one: float, other: float, within: float = 1e-5) -> bool:
    return math.isclose(one, other, rel_tol=within, abs_tol=within)
