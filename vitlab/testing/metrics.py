"""Contract tests of metrics: values are independent of how a split is cut into batches.

B images of a batch, N of a split, K classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.data.pixels import IGNORED
from vitlab.geometry import DataInfo
from vitlab.registry import ResolvedChoice, slot
from vitlab.testing.assertions import during, expect
from vitlab.training.metrics import declaration_fault
from vitlab.training.metrics.features import Features

N, K = 40, 7
CUTS = ((N,), (1, 22, N - 23), (N - 3, 3))
"""Batch sizes of three passes over one split."""


def check_metric(who: str, choice: ResolvedChoice) -> None:
    """Check a metric for each of its tasks, on random, correct and wrong predictions."""
    cls: Any = choice.component
    sentence = declaration_fault(cls)
    expect(sentence is None, f"{who}: {sentence}")
    low, high = cls.bounds
    name = slot("metric").build(choice).name or choice.type.rpartition(":")[2]
    expect(bool(re.fullmatch(r"\w+", name)), f"{who} is called '{name}' in results; a name is letters, digits and _")
    for task in cls.tasks:
        data = DataInfo(image=(4, 4), channels=1, classes=K, task=task)
        reason = cls.incompatibility(data, choice.options)
        if reason is None and cls.reads == "features":
            _check_features(f"{who} of {task}", choice)
        elif reason is None:
            level = slot("metric").build(choice).chance(data)
            expect(level is None or low <= level <= high, f"{who}: chance gives {level!r}, outside of {cls.bounds}")
            _check_on(f"{who} of {task}", choice, task)
        else:
            expect(bool(reason.strip()), f"{who}: incompatibility must return a sentence or None")


def _check_on(who: str, choice: ResolvedChoice, task: str) -> None:
    cls: Any = choice.component
    target = _targets(task)
    one_hot = torch.nn.functional.one_hot(target.clamp(min=0), K).movedim(-1, 1).float()
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(one_hot.shape, generator=generator) + one_hot
    predictions = {"random": random, "right": 20 * one_hot, "wrong": 20 * one_hot.roll(1, 1)}
    values = {kind: _evaluate(who, choice, logits, target, CUTS[0]) for kind, logits in predictions.items()}
    low, high = cls.bounds
    for kind, value in values.items():
        expect(math.isfinite(value), f"{who} is {value} where predictions are {kind}")
        expect(low - 1e-6 <= value <= high + 1e-6, f"{who} is {value:g}, and its bounds are {low:g} and {high:g}")
    sign = 1 if cls.goal == "max" else -1
    best = max(values, key=lambda kind: sign * values[kind])
    expect(
        sign * (values["right"] - values["wrong"]) > 0 and values["right"] == values[best],
        f"{who} has the goal {cls.goal}, and is {values['right']:g} where predictions are right, {values['wrong']:g} "
        f"where they are wrong and {values['random']:g} in between",
    )
    reference = values["random"]
    for cuts in CUTS[1:]:
        value = _evaluate(who, choice, random, target, cuts)
        expect(_close(value, reference), f"{who} is {value:g} in batches of {cuts}, and {reference:g} in one of {N}")
    repeated = _evaluate(who, choice, random, target, CUTS[0])
    expect(repeated == reference, f"{who} is {repeated!r} a second time, and was {reference!r}")
    reversed_value = _evaluate(who, choice, random.flip(0), target.flip(0), CUTS[0])
    expect(
        _close(reversed_value, reference),
        f"{who} is {reversed_value:g} with the images in another order, and was {reference:g}",
    )
    wide = _evaluate(who, choice, random.double(), target, CUTS[0])
    expect(
        _close(wide, reference, 1e-4),
        f"{who} is {wide:g} of logits in float64, and {reference:g} of the same in float32",
    )
    if task == "segmentation":
        hidden = torch.where((target == IGNORED)[:, None], random.flip(1), random)
        value = _evaluate(who, choice, hidden, target, CUTS[0])
        expect(_close(value, reference), f"{who} depends on predictions where there is no label; ignore these")


def _check_features(who: str, choice: ResolvedChoice) -> None:
    """Check a metric of features on random ones and on those that tell the classes apart."""
    cls: Any = choice.component
    metric: Any = slot("metric").build(choice)
    generator = torch.Generator().manual_seed(1)
    label_N = torch.arange(N) % K
    random_ND = torch.randn(N, 2 * K, generator=generator, dtype=torch.float64)
    apart_ND = torch.nn.functional.one_hot(label_N, 2 * K) + 0.01 * random_ND
    for kind, x_ND in (("random", random_ND), ("apart", apart_ND)):
        images = Features(x_ND, label_N)
        with during(f"{who}: of_features", Exception):
            value = float(metric.of_features(images, images if cls.needs_train else None))
            order_N = torch.randperm(N, generator=generator)
            again = Features(x_ND[order_N], label_N[order_N])
            other = float(metric.of_features(again, again if cls.needs_train else None))
        low, high = cls.bounds
        expect(math.isfinite(value), f"{who} is {value} where features are {kind}")
        expect(low - 1e-6 <= value <= high + 1e-6, f"{who} is {value:g}, and its bounds are {low:g} and {high:g}")
        expect(_close(value, other), f"{who} is {other:g} with the images in another order, and was {value:g} before")


def _targets(task: str) -> Tensor:
    """Return targets of every class at unequal rates; of pixels, some are unlabelled, as is one whole image."""
    generator = torch.Generator().manual_seed(0)
    if task == "classification":
        return torch.cat([torch.arange(K), torch.randint(0, 3, (N - K,), generator=generator)])
    target_NHW = torch.randint(0, K, (N, 4, 4), generator=generator)
    target_NHW[torch.rand(target_NHW.shape, generator=generator) < 0.1] = IGNORED
    target_NHW[5] = IGNORED
    return target_NHW


def _evaluate(who: str, choice: ResolvedChoice, logits: Tensor, target: Tensor, cuts: Sequence[int]) -> float:
    """Return the metric's value of a split, computed by a new instance."""
    metric: Any = slot("metric").build(choice)
    inputs, labels = logits.clone(), target.clone()
    with during(f"{who}: rows of batches of {tuple(cuts)}", Exception):
        parts = zip(torch.split(inputs, list(cuts)), torch.split(labels, list(cuts)), strict=True)
        rows_N = torch.cat([metric.rows(*part) for part in parts])
    expect(torch.equal(inputs, logits) and torch.equal(labels, target), f"{who} changes the logits or the labels")
    with during(f"{who}: value", Exception):
        value = float(metric.value(rows_N))
        column_N = metric.column(rows_N)
    shape = None if column_N is None else tuple(column_N.shape)
    expect(shape in (None, (N,)), f"{who}: column has shape {shape}; it is one value per image, {(N,)}, or None")
    return value


def _close(one: float, other: float, within: float = 1e-5) -> bool:
    return math.isclose(one, other, rel_tol=within, abs_tol=within)
