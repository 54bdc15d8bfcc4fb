"""The slot ``loss``: training losses.

B batch, K classes, M decisions; ``...`` none for classification, pixel rows and columns for segmentation.

With mixed images (:mod:`vitlab.training.mixup`) the target is the share of each class, (B, K), instead of an index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from vitlab.components.base import Probability
from vitlab.data.pixels import IGNORED
from vitlab.errors import DataError
from vitlab.geometry import TASKS, Task
from vitlab.registry import Slot


class Value(NamedTuple):
    """A scalar loss, and its terms by name if it has several."""

    total: Tensor
    parts: Mapping[str, Tensor]

    def detached(self) -> Value:
        """Return the value detached from the graph."""
        return Value(self.total.detach(), {name: part.detach() for name, part in self.parts.items()})


class Loss(ABC):
    """Contract: options in the constructor; a call takes the logits of a batch and its targets.

    ``logits_by_head`` are a model's logits, float32 or wider: ``""`` is the prediction, (B, K, ...); heads with further
    classifiers name them.  ``target`` holds class indices, (B, ...); decisions labelled
    :data:`~vitlab.data.pixels.IGNORED` add nothing to the loss.  For mixed images it is floating point, (B, K): the
    share of each class; for images of several classes (task ``multilabel``) it is 1 for each of these and 0 elsewhere.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("classification", "segmentation")  #: tasks it applies to

    @abstractmethod
    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        """Return the mean loss over the batch."""

    def weight(self, target: Tensor) -> Tensor:
        """Return the number of decisions in the mean, a scalar: the weight of a microbatch.

        By default the labelled decisions are counted; override this for a loss that is another mean.
        """
        if target.is_floating_point():
            return torch.full((), len(target), device=target.device)
        return (target != IGNORED).sum()

    def set_class_counts(self, count_K: Tensor) -> None:  # noqa: B027  # most losses need none
        """Take the number of training images of each class, (K,), before the first step; classification alone."""


loss = Slot("loss", Loss)  # type: ignore[type-abstract]  # a contract is not built


class MeanOfDecisions(Loss):
    """A loss that is the mean of the terms of all labelled decisions of the prediction."""

    @abstractmethod
    def term(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        """Return the term of each decision, (M,)."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        logits_MK, target_M = flat(logits_by_head[""], target)
        return Value(mean_labelled(self.term(logits_MK, target_M), target_M), {})


@loss.register("cross_entropy")
@dataclass(kw_only=True)
class CrossEntropy(MeanOfDecisions):
    """Negative log-likelihood of the class, under the softmax of the prediction.

    Label smoothing mixes the target with the uniform distribution over all classes.  Reference: arXiv:1512.00567.

    With ``class_weights``, the term of each class is multiplied by the weight of the class, and the sum is divided by
    the number of labels.  The mean of torch's ``CrossEntropyLoss`` is divided by the sum of the labels' weights, which
    differs between the parts of a batch, so that a step would depend on micro-batches and processes.

    Args:
        label_smoothing: Weight of the uniform distribution.
        class_weights: A number for each class, in the order of the classes, for training alone: evaluations have no
            weights.  ``balanced`` stands for n / (K n_c), as in scikit-learn: n training images of K classes, of which
            n_c are of class c.
        reads: ``probabilities`` applies softmax to the prediction before the loss, so that softmax is applied
            twice, as for a network ending in softmax under torch's ``CrossEntropyLoss``.  It exists to study that
            mistake: with K classes the loss is bounded below by ln(e + K - 1) - 1, which is 1.46 for ten.
    """

    label_smoothing: Probability = 0.0
    class_weights: Literal["balanced"] | tuple[NonNegativeFloat, ...] | None = None
    reads: Literal["logits", "probabilities"] = "logits"

    def term(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        if self.reads == "probabilities":
            logits_MK = logits_MK.softmax(1)
        weight_K = None if self.class_weights is None else logits_MK.new_tensor(self.class_weights)
        return F.cross_entropy(
            logits_MK,
            target_M,
            weight_K,
            label_smoothing=self.label_smoothing,
            ignore_index=IGNORED,
            reduction="none",
        )

    def set_class_counts(self, count_K: Tensor) -> None:
        if self.class_weights != "balanced":
            return
        if absent := (count_K == 0).nonzero()[:, 0].tolist():
            raise DataError(
                f"train.loss.class_weights: balanced weights divide by the number of training images of a class, and "
                f"class {', '.join(map(str, absent))} has none; write a number for each class"
            )
        self.class_weights = tuple((count_K.sum() / (len(count_K) * count_K.double())).tolist())


@loss.register("bce")
@dataclass(kw_only=True)
class BinaryCrossEntropy(MeanOfDecisions):
    """One binary decision per class, averaged over classes.  Reference: arXiv:2204.07118 (DeiT III), arXiv:2110.00476.

    Label smoothing gives the class ``1 - s + s / K`` and every other ``s / K``.

    Args:
        label_smoothing: Weight ``s`` of the uniform distribution.
        class_weights: A number for each class, in the order of the classes, by which the loss of its presence is
            multiplied, in training alone: torch's ``pos_weight``.  Images without the class over images with it make
            both count alike.
        threshold: Share of a class in a mixed image above which its decision is yes, before smoothing; 0 in both
            papers' code.  Without one, the target of a decision is the share.
    """

    tasks = TASKS

    label_smoothing: Probability = 0.0
    class_weights: tuple[NonNegativeFloat, ...] | None = None
    threshold: Probability | None = None

    def term(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        share_MK = smoothed_targets(target_M, logits_MK, self.label_smoothing, self.threshold)
        weight_K = None if self.class_weights is None else logits_MK.new_tensor(self.class_weights)
        loss_MK = F.binary_cross_entropy_with_logits(logits_MK, share_MK, pos_weight=weight_K, reduction="none")
        return loss_MK.mean(1)


@loss.register("focal")
@dataclass(kw_only=True)
class Focal(MeanOfDecisions):
    """Cross-entropy that gives less weight to well-classified images.  Reference: arXiv:1708.02002.

    The loss is the sum over classes of ``-q (1 - p) ** gamma ln p``, with the probability ``p`` under the softmax and
    the target ``q``, which label smoothing mixes with the uniform distribution.

    Args:
        gamma: Exponent; 0 gives the cross-entropy.
        label_smoothing: Weight of the uniform distribution.
    """

    gamma: NonNegativeFloat = 2.0
    label_smoothing: Probability = 0.0

    def term(self, logits_MK: Tensor, target_M: Tensor) -> Tensor:
        share_MK = smoothed_targets(target_M, logits_MK, self.label_smoothing)
        log_MK = logits_MK.log_softmax(1)
        # A power below 1 has no finite gradient at 0.
        rest_MK = (-log_MK.expm1()).clamp(min=torch.finfo(log_MK.dtype).tiny)
        return -(share_MK * rest_MK**self.gamma * log_MK).sum(1)


def smoothed_targets(target_M: Tensor, logits_MK: Tensor, smoothing: float, threshold: float | None = None) -> Tensor:
    """Return the share of each class, (M, K), smoothed; with a threshold, a larger share is 1 before, and others 0."""
    classes = logits_MK.shape[1]
    # Decisions without a label pass as class 0, and have no weight in the mean.
    share_MK = target_M if target_M.is_floating_point() else F.one_hot(target_M.clamp(min=0), classes)
    if threshold is not None:
        share_MK = share_MK > threshold
    return share_MK.to(logits_MK.dtype) * (1 - smoothing) + smoothing / classes


def flat(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape (B, K, ...) and (B, ...) to (M, K) and (M,), one row per decision.  Class shares stay (B, K).

    Torch's loss over pixels has no deterministic backward pass on CUDA; the loss over rows has one.
    """
    if logits.ndim == 2:
        return logits, target
    return logits.movedim(1, -1).flatten(0, -2), target.flatten()


def mean_labelled(value_M: Tensor, target_M: Tensor) -> Tensor:
    """Return the mean over the labelled decisions, or 0 if there are none."""
    if target_M.is_floating_point():
        return value_M.mean()
    labelled_M = target_M != IGNORED
    return torch.where(labelled_M, value_M, 0).sum() / labelled_M.sum().clamp(min=1)
