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
from vitlab.testing.assertions import about, checked_reason
from vitlab.training.metrics import declaration_fault
from vitlab.training.metrics.features import Features

N, K = 40, 7
CUTS = ((N,), (1, 22, N - 23), (N - 3, 3))
"""Batch sizes of three passes over one split."""


def check_metric(choice: ResolvedChoice) -> None:
    """Check a metric for each of its tasks, on random, correct and wrong predictions."""
    cls: Any = choice.component
    sentence = declaration_fault(cls)
    assert sentence is None, sentence
    low, high = cls.bounds
    name = slot("metric").build(choice).name or choice.type.rpartition(":")[2]
    assert re.fullmatch(r"\w+", name), f"is called '{name}' in results; a name is letters, digits and _"
    for task in cls.tasks:
        data = DataInfo(image=(4, 4), channels=1, classes=K, task=task)
        with about(f"of {task}"):
            if checked_reason(cls.incompatibility(data, choice.options)) is not None:
                continue
            if cls.reads == "features":
                _check_features(choice)
            else:
                level = slot("metric").build(choice).chance(data)
                assert level is None or low <= level <= high, f"chance gives {level!r}, outside of {cls.bounds}"
                _check_predictions(choice, task)


def _check_predictions(choice: ResolvedChoice, task: str) -> None:
    cls: Any = choice.component
    target = _targets(task)
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
    values = {kind: _evaluate(choice, logits, target) for kind, logits in predictions.items()}
    for kind, value in values.items():
        _check_bounds(cls, value, f"predictions are {kind}")
    sign = 1 if cls.goal == "max" else -1
    best = max(values, key=lambda kind: sign * values[kind])
    assert sign * (values["right"] - values["wrong"]) > 0 and values["right"] == values[best], (
        f"has the goal {cls.goal}, and is {values['right']:g} where predictions are right, {values['wrong']:g} "
        f"where they are wrong and {values['random']:g} in between"
    )
    reference = values["random"]
    for cuts in CUTS[1:]:
        value = _evaluate(choice, random, target, cuts)
        assert _close(value, reference), f"is {value:g} in batches of {cuts}, and {reference:g} in one of {N}"
    repeated = _evaluate(choice, random, target)
    assert repeated == reference, f"is {repeated!r} a second time, and was {reference!r}"
    value = _evaluate(choice, random.flip(0), target.flip(0))
    assert _close(value, reference), f"is {value:g} with the images in another order, and was {reference:g}"
    value = _evaluate(choice, random.double(), target)
    assert _close(value, reference, 1e-4), f"is {value:g} of logits in float64, and {reference:g} of them in float32"
    if task == "segmentation":
        unlabelled = (target == IGNORED)[:, None]
        value = _evaluate(choice, torch.where(unlabelled, random.flip(1), random), target)
        assert _close(value, reference), "depends on predictions where there is no label; ignore these"


def _check_features(choice: ResolvedChoice) -> None:
    """Check a metric of features on random ones and on those that tell the classes apart."""
    cls: Any = choice.component
    metric: Any = slot("metric").build(choice)
    generator = torch.Generator().manual_seed(1)
    label_N = torch.arange(N) % K
    random_ND = torch.randn(N, 2 * K, generator=generator, dtype=torch.float64)
    apart_ND = torch.nn.functional.one_hot(label_N, 2 * K) + 0.01 * random_ND
    for kind, x_ND in (("random", random_ND), ("apart", apart_ND)):
        with about("of_features"):
            value, reordered = (
                float(metric.of_features(images, images if cls.needs_train else None))
                for order_N in (torch.arange(N), torch.randperm(N, generator=generator))
                for images in [Features(x_ND[order_N], label_N[order_N])]
            )
        _check_bounds(cls, value, f"features are {kind}")
        assert _close(value, reordered), f"is {reordered:g} with the images in another order, and was {value:g} before"


def _check_bounds(cls: Any, value: float, where: str) -> None:
    low, high = cls.bounds
    assert math.isfinite(value), f"is {value} where {where}"
    assert low - 1e-6 <= value <= high + 1e-6, f"is {value:g} where {where}, and its bounds are {low:g} and {high:g}"


def _targets(task: str) -> Tensor:
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


def _evaluate(choice: ResolvedChoice, logits: Tensor, target: Tensor, cuts: Sequence[int] = CUTS[0]) -> float:
    """Return the metric's value of a split, computed by a new instance."""
    metric: Any = slot("metric").build(choice)
    inputs, labels = logits.clone(), target.clone()
    with about(f"rows of batches of {tuple(cuts)}"):
        parts = zip(torch.split(inputs, list(cuts)), torch.split(labels, list(cuts)), strict=True)
        rows_N = torch.cat([metric.rows(*part) for part in parts])
    assert torch.equal(inputs, logits) and torch.equal(labels, target), "changes the logits or the labels"
    with about("value"):
        value = float(metric.value(rows_N))
        column_N = metric.column(rows_N)
    shape = None if column_N is None else tuple(column_N.shape)
    assert shape in (None, (N,)), f"column has shape {shape}; it is one value per image, {(N,)}, or None"
    return value


def _close(one: float, other: float, within: float = 1e-5) -> bool:
    return math.isclose(one, other, rel_tol=within, abs_tol=within)
