"""Gradient accumulation: a step's batch in microbatches, to fit in memory or to divide it between processes.

The gradient of a step is that of its full batch.  A loss is the mean over its decisions (images, or labelled pixels),
so each microbatch is weighted by its number of decisions, and the sum is divided by the total weight.  The images of a
step, their augmentation, mixing and masks are drawn per step and image (:mod:`vitlab.noise`), not per batch.  Results
therefore equal those of the full batch up to rounding, and the setting belongs to ``run``, not to a trial's identity.

Batch normalisation depends on the full batch and is refused.  Third-party components that draw from torch's own
generator draw anew for every microbatch.

K trials trained together; ``...`` is (K,) for these, and empty for one training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitlab.errors import UserError
from vitlab.training.distributed import SingleProcess
from vitlab.training.losses import Value


class WeightedLoss(NamedTuple):
    """The loss of a microbatch, (...), and the number of decisions in its mean."""

    loss: Value
    weight: Tensor | float


class Weighted(Protocol):
    """A loss or an objective: a mean over the decisions of a batch."""

    def weight(self, target: Tensor) -> Tensor:
        """Return the number of decisions in the mean, a scalar."""


class FullBatch:
    """A step's batch in one piece."""

    def require(self, model: nn.Module, count: int) -> None:
        """Check that a model and a batch size support this mode.

        Raises:
            UserError: If they do not.
        """

    def synchronise(self, model: nn.Module, step: int) -> None:
        """Wait until all processes are ready for a step."""

    def rows(self, count: int) -> list[range]:
        """Return the ranges of a batch of ``count`` images that this process computes, in order."""
        return [range(count)]

    def weight(self, loss: Weighted, target: Tensor) -> Tensor | float:
        """Return the weight of a microbatch; see :meth:`~vitlab.training.losses.Loss.weight`."""
        return 1.0

    def weights(self, loss: Weighted, targets: Sequence[Tensor]) -> Tensor | float:
        """Return the weight of a microbatch for each of K trials."""
        return 1.0

    def combine(self, parts: Sequence[WeightedLoss], parameters: Sequence[nn.Parameter]) -> Value:
        """Return the loss of the full batch, and normalise the accumulated gradients to it in place."""
        (part,) = parts
        return part.loss

    def combine_stacked(self, parts: Sequence[WeightedLoss], gradients: list[Tensor]) -> tuple[Value, list[Tensor]]:
        """Return the loss of the full batches of K trials, and their normalised gradients, each (K, ...)."""
        (part,) = parts
        return part.loss, gradients


class MicroBatches(FullBatch):
    """A step's batch in microbatches.

    Args:
        size: Maximum images of a microbatch; None for all images of this process.
        peers: The processes that share a batch.
    """

    def __init__(self, size: int | None, peers: SingleProcess) -> None:
        self.size = size
        self.peers = peers

    def require(self, model: nn.Module, count: int) -> None:
        """Raise if a module's result depends on the whole batch."""
        for path, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.training:  # a frozen one uses its running statistics
                raise UserError(
                    f"{path} normalises by the statistics of a whole batch, which cannot be computed in parts; remove "
                    "run.micro_batch_size, and set run.resources so that one process trains a trial"
                )
        if count < self.peers.count:
            raise UserError(
                f"batches of {count} images cannot be divided among {self.peers.count} processes; set a larger batch"
            )

    def synchronise(self, model: nn.Module, step: int) -> None:
        """Raise if the ranks differ."""
        self.peers.require_equal(model, step)

    def rows(self, count: int) -> list[range]:
        """Return the rows of this rank's micro-batches."""
        own = self.peers.rows(count)
        size = self.size or len(own)
        return [range(begin, min(begin + size, own.stop)) for begin in range(own.start, own.stop, size)]

    def weight(self, loss: Weighted, target: Tensor) -> Tensor:
        """Return the loss's weight of a micro-batch."""
        return loss.weight(target)

    def weights(self, loss: Weighted, targets: Sequence[Tensor]) -> Tensor:
        """Return the loss's weight of each trial's micro-batch."""
        return torch.stack([loss.weight(target) for target in targets])

    def combine(self, parts: Sequence[WeightedLoss], parameters: Sequence[nn.Parameter]) -> Value:
        """Turn summed gradients and losses into means over the whole batch."""
        sums = _sums(parts)
        self.peers.sum_gradients(parameters, sums)
        weight, loss = _means(sums, parts[0].loss)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        return loss

    def combine_stacked(self, parts: Sequence[WeightedLoss], gradients: list[Tensor]) -> tuple[Value, list[Tensor]]:
        """Turn summed gradients of stacked trials into means over the whole batch."""
        weight_K, loss = _means(_sums(parts), parts[0].loss)
        return loss, [gradient / weight_K.view(-1, *(1,) * (gradient.ndim - 1)) for gradient in gradients]


def microbatches_of(micro_batch_size: int | None, peers: SingleProcess) -> FullBatch:
    """Return the batch splitting for the settings of ``run``; the full batch by default."""
    return FullBatch() if micro_batch_size is None and peers.count == 1 else MicroBatches(micro_batch_size, peers)


def _sums(parts: Sequence[WeightedLoss]) -> Tensor:
    """Return the sums over microbatches, (1 + losses, ...): weights, then the weighted loss and its terms."""
    rows = [
        torch.stack(
            [
                torch.as_tensor(weight).to(loss.total),
                *(value * weight for value in (loss.total, *loss.parts.values())),
            ]
        )
        for loss, weight in parts
    ]
    return torch.stack(rows).sum(0)


def _means(sums: Tensor, like: Value) -> tuple[Tensor, Value]:
    """Return the total weight, (...), and the loss of the full batch with its terms."""
    weight = sums[0].clamp(min=1)  # where no decision has a label there is nothing to learn
    total, *terms = (sums[1:] / weight).unbind()
    return weight, Value(total, dict(zip(like.parts, terms, strict=True)))
