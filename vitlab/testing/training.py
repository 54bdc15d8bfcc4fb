"""Contract tests of what trains a model: optimizers, schedules, losses and objectives.

B images, K classes, H and W pixels.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor

from vitlab.data.pixels import IGNORED
from vitlab.data.prepare import Feed, prepare
from vitlab.engines import Engine
from vitlab.models import Model
from vitlab.registry import ResolvedChoice, slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.testing.assertions import during, expect
from vitlab.training import checkpoint
from vitlab.training.loop import Training
from vitlab.training.losses import Loss, Value
from vitlab.training.objective import Objective
from vitlab.training.optim import Optimizer, Schedule, decay_groups, set_rate

B, K = 6, 5
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


def check_optimizer(who: str, choice: ResolvedChoice) -> None:
    """Check that trainings repeat and resume bit for bit, and that rate and weight decay are those of the groups.

    Raises:
        AssertionError: with the rule that it violates.
        SkipTest: if a package that it needs is not installed.
    """
    built: Optimizer = slot("optimizer").build(choice)
    reason = built.incompatibility(_train().model_dump())
    if reason is not None:
        raise SkipTest(f"{who}: {reason}")
    for attribute in ("lr", "weight_decay"):
        value = getattr(built, attribute, None)
        expect(isinstance(value, int | float), f"{who}: its attribute {attribute} is {value!r}; it is a number")
    check_training(who, optimizer=choice.plain())
    moved = _moved(who, choice, rate=0.0)
    expect(
        not moved,
        f"{who}: steps at rate 0 move {_some(moved)}; read the rate from group['lr'], which a training sets before "
        "every step",
    )
    expect(bool(_moved(who, choice, rate=RATE)), f"{who}: steps at rate {RATE:g} move no weight")
    # Without gradients, what moves is what decays.
    groups = decay_groups(_model(), 0.5)
    exempt = {name for group in groups if not group["weight_decay"] for name, _ in group["params"]}
    decaying = {name for group in groups if group["weight_decay"] for name, _ in group["params"]}
    for weight_decay in (0.5, 0.0):
        moved = _moved(who, choice, rate=RATE, weight_decay=weight_decay, scale=0.0)
        wrong = moved & (exempt if weight_decay else exempt | decaying)
        expect(
            not wrong,
            f"{who}: {_some(wrong)} shrinks without a gradient, and the weight_decay of its group is 0; read it from "
            "group['weight_decay']",
        )
        still = decaying - moved if weight_decay else set()
        expect(
            not still,
            f"{who}: {_some(still)} does not shrink without a gradient, and the weight_decay of its group is "
            f"{weight_decay:g}; read it from group['weight_decay']",
        )


def check_training(who: str, **fields: Any) -> None:
    """Check that a training with these fields of ``train`` repeats bit for bit, also if a checkpoint interrupts it."""
    with _scrambled(0), during(f"{who}: trains a small ViT", Exception):
        whole = _trained(_training(fields), STEPS)
    with _scrambled(1):
        again = _trained(_training(fields), STEPS)
    expect(
        _same(whole, again),
        f"{who}: two equal trainings end with other weights; draw from vitlab.plugin.noise, and keep nothing outside "
        "of the instance",
    )
    with tempfile.TemporaryDirectory() as folder, _scrambled(2):
        first = _training(fields, Path(folder))
        _trained(first, STEPS // 2)
        with during(f"{who}: its state is written to a checkpoint and read again", Exception):
            first.save()
            state = checkpoint.load(Path(folder))
            assert state is not None
            second = _training(fields)
            second.load(state)
        resumed = _trained(second, STEPS - STEPS // 2)
    expect(
        _same(whole, resumed),
        f"{who}: a training that was interrupted after {STEPS // 2} steps ends with other weights; keep what steps "
        "change in the state that state_dict returns",
    )


def check_schedule(who: str, choice: ResolvedChoice) -> None:
    """Check that factors are positive numbers that depend on the step and the length alone, for every warm-up."""
    configured = [choice]
    if "warmup" in choice.options and isinstance(choice.options["warmup"], float):
        options = {**choice.plain()}
        configured = [slot("schedule").resolve({**options, "warmup": warmup}) for warmup in (0.0, 0.1, 0.5, 1.0)]
    for each in configured:
        schedule: Schedule = slot("schedule").build(each)
        for steps in (1, 2, 7, 100):
            what = f"{who} with warmup {each.options['warmup']}" if "warmup" in each.options else who
            with during(f"{what}: factor in a training of {steps} steps", Exception):
                factors = [schedule.factor(step, steps) for step in range(steps)]
                backwards = [schedule.factor(step, steps) for step in reversed(range(steps))]
            for step, factor in enumerate(factors):
                expect(
                    isinstance(factor, int | float) and math.isfinite(factor) and factor > 0,
                    f"{what}: the factor of step {step} of {steps} is {factor!r}; it is a number above 0",
                )
            expect(
                factors == backwards[::-1],
                f"{what}: factors depend on the order of the calls; a resumed training begins in between",
            )


def check_loss(who: str, choice: ResolvedChoice) -> None:
    """Check that a loss is a mean over images, for indices, and for class shares and pixels if it takes them."""
    generator = torch.Generator().manual_seed(0)
    logits_BK = torch.randn(B, K, generator=generator, dtype=torch.float64)
    target_B = torch.arange(B) % K
    loss: Loss = slot("loss").build(choice)
    with during(f"{who}: of class indices", Exception):
        loss({"": logits_BK}, target_B)
    _check_mean(who, loss, logits_BK, target_B)
    right = float(loss({"": 8.0 * torch.nn.functional.one_hot(target_B, K).double()}, target_B).total)
    wrong = float(loss({"": 8.0 * torch.nn.functional.one_hot(target_B.roll(1), K).double()}, target_B).total)
    expect(right < wrong, f"{who} is {right:g} of right predictions and {wrong:g} of wrong ones; it is minimised")
    logits_BKHW = torch.randn(B, K, 3, 3, generator=generator, dtype=torch.float64)
    target_BHW = torch.randint(0, K, (B, 3, 3), generator=generator)
    target_BHW[0, 0] = IGNORED
    for logits, target in ((logits_BK, logits_BK.softmax(1).detach()), (logits_BKHW, target_BHW)):
        try:
            loss({"": logits}, target)
        except Exception:  # not every loss is for mixed images, or for pixels
            continue
        _check_mean(who, loss, logits, target)


def check_objective(who: str, choice: ResolvedChoice) -> None:
    """Check that trainings repeat and resume bit for bit.

    Raises:
        AssertionError: with the rule that it violates.
        SkipTest: if it cannot train a small ViT on images of five classes.
    """
    cls: Any = choice.component
    data, model = slot("dataset").resolve(DATA), slot("model").resolve(MODEL)
    info = prepare(data, SEEDS).info
    trial = {
        "data": data.plain(),
        "model": model.plain(),
        "train": {**_train().model_dump(), "objective": choice.plain()},
    }
    reason = cls.incompatibility(info, model, trial)
    if reason is not None:
        raise SkipTest(f"{who}: {reason}")
    check_training(who, objective=choice.plain())
    training = _training({"objective": choice.plain()})
    objective: Objective = training.objective
    metrics = objective.standard_metrics(info)
    expect("loss" in metrics, f"{who}: standard_metrics has no 'loss'; every evaluation reports one")
    with torch.no_grad(), during(f"{who}: views of an evaluation", Exception):
        labelled = objective.evaluation_batch(training.feed.batch(0, B, 1, [range(B)]))
        views = objective.views(labelled.x_BCHW, labelled.y_B)
        with_weights = objective.views(labelled.x_BCHW, labelled.y_B, dict(objective.module.state_dict()))
    expect("" in views and len(views[""]) == B, f"{who}: views has no '' with a row for each image")
    close = all(torch.allclose(views[name], with_weights[name]) for name in views)
    expect(close, f"{who}: views with the module's own weights as an argument differ from views without")


def check_engine(who: str, choice: ResolvedChoice) -> None:
    """Check that trainings end with the loop's weights up to rounding, and do not depend on each other.

    Raises:
        AssertionError: with the rule that it violates.
        SkipTest: if the engine does not support a small ViT in double precision.
    """
    cls: type[Engine] = choice.component
    fields = [{"precision": "fp64", "optimizer": {"type": "adamw", "lr": rate}} for rate in (RATE, 3 * RATE)]
    if reason := cls.incompatibility(_training(fields[0])):
        raise SkipTest(f"{who}: {reason}")
    together = _by_engine(who, cls, fields)
    for number, each in enumerate(fields):
        expected = _trained(_training(each), STEPS)
        actual = together[number]
        close = all(torch.allclose(actual[name], value, rtol=1e-9, atol=1e-10) for name, value in expected.items())
        expect(close, f"{who}: a training ends with other weights than by engine loop; both compute the same steps")
        (alone,) = _by_engine(who, cls, [each])
        expect(_same(alone, actual), f"{who}: the weights of a training depend on the trainings beside it")


def _by_engine(who: str, cls: type[Engine], fields: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    trainings = [_training(each) for each in fields]
    with during(f"{who}: trains {len(trainings)} small ViTs", Exception):
        engine = cls(trainings)
        for _ in range(STEPS):
            engine.train_step()
        evaluations = [list(one) for one in engine.evaluate(["val"])]
    expect(len(evaluations) == len(trainings), f"{who}: evaluate gives {len(evaluations)} results for {len(trainings)}")
    return [_weights(training.module) for training in trainings]


def _check_mean(who: str, loss: Loss, logits: Tensor, target: Tensor) -> None:
    def of(part: slice) -> Value:
        return loss({"": logits[part]}, target[part])

    kind = "class shares" if target.is_floating_point() else "class indices" if target.ndim == 1 else "pixels"
    inputs, labels = logits.clone(), target.clone()
    whole = of(slice(None)).total
    expect(whole.ndim == 0, f"{who} of {kind} has shape {tuple(whole.shape)}; it is one number")
    expect(torch.equal(inputs, logits) and torch.equal(labels, target), f"{who} changes its arguments")
    expect(torch.equal(whole, of(slice(None)).total), f"{who} of {kind} differs between two equal calls")
    doubled = loss({"": torch.cat([logits, logits])}, torch.cat([target, target])).total
    expect(
        torch.allclose(doubled, whole, rtol=1e-9),
        f"{who} of {kind} is {float(doubled):.6g} if every image is there twice, and {float(whole):.6g} before: return "
        "a mean over the batch, not a sum",
    )
    parts = [slice(0, 2), slice(2, None)]
    weights = [float(loss.weight(target[part])) for part in parts]
    micro = sum(weight * float(of(part).total) for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    expect(
        math.isclose(micro, float(whole), rel_tol=1e-9),
        f"{who} of {kind} is {micro:.6g} in two parts, and {float(whole):.6g} at once: weight() is the number of terms "
        "in the mean",
    )
    for scale in (1.0, 100.0):
        leaf = (scale * logits).float().requires_grad_()
        with during(f"{who}: backward", Exception):
            torch.autograd.backward(loss({"": leaf}, target.float() if target.is_floating_point() else target).total)
        assert leaf.grad is not None
        finite = bool(leaf.grad.isfinite().all())
        expect(finite, f"{who} of {kind}: the gradient of logits up to {scale:g} is not finite")


def _train(**fields: Any) -> TrainSpec:
    return TrainSpec.model_validate({"steps": STEPS, "batch_size": 4, "evaluations": 1, **fields})


def _training(fields: Mapping[str, Any], folder: Path | None = None) -> Training:
    """Return the training of a small ViT, whose checkpoints are written to ``folder``."""
    data = slot("dataset").resolve(DATA)
    prepared = prepare(data, SEEDS)
    dtype = torch.float64 if fields.get("precision") == "fp64" else torch.float32
    feed = Feed(prepared, data.options["augment"], SEEDS, dtype=dtype)
    write = (lambda state: None) if folder is None else (lambda state: checkpoint.write(folder, state))
    return Training(_model().to(dtype), feed, _train(**fields), SEEDS, prepared.info.task, write=write)


def _model() -> Model:
    model: Model = slot("model").build(MODEL, prepare(slot("dataset").resolve(DATA), SEEDS).info)
    model.initialise(0)
    return model


def _trained(training: Training, steps: int) -> dict[str, Tensor]:
    for _ in range(steps):
        training.train_step()
    return _weights(training.module)


@contextmanager
def _scrambled(seed: int) -> Iterator[None]:
    """Run a block with the generators of Python, numpy and torch in a state that depends on ``seed``."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _moved(who: str, choice: ResolvedChoice, *, rate: float, weight_decay: float = 0.0, scale: float = 1.0) -> set[str]:
    """Return the names of the weights that three steps on normal gradients times ``scale`` change."""
    model = _model()
    optimizer: Optimizer = slot("optimizer").build(choice)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.01)  # a weight of 0 could not shrink
    before = _weights(model)
    with during(f"{who}: steps at rate {rate:g}", Exception):
        built = optimizer.build(optimizer.route(decay_groups(model, weight_decay), model))
        set_rate(built, rate)
        for _ in range(3):  # the first step may only fill the state
            built.step()
    return {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}


def _some(names: set[str]) -> str:
    """Return the first names in a sentence."""
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


def _weights(model: Model) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
