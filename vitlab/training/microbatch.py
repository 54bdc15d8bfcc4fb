"""Gradient accumulation: a step's batch in microbatches, to fit in memory or to divide it between processes.

The gradient of a step equals its full batch's.  A loss is the mean over its decisions (images, or labelled pixels),
so each microbatch is weighted by its number of decisions, and the sum is divided by the total weight.  The images of a
step, their augmentation, mixing and masks are drawn per step and image (:mod:`vitlab.noise`), not per batch.  Results
therefore equal the full batch's up to rounding, and the setting belongs to ``run``, not to a trial's identity.

Batch normalisation depends on the full batch and is refused.  Third-party components that draw from torch's own
generator draw anew for every microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitlab.errors import UserError
from vitlab.training.distributed import SingleProcess
from vitlab.training.losses import Value


class WeightedLoss(NamedTuple):
    """The loss of a microbatch, and the number of decisions in its mean."""

    loss: Value
    weight: Tensor | float


class MicroBatches:
    """The parts of a step's batch that this process computes one after another; by default one part, the full batch.

    Args:
        size: Maximum images of a microbatch; None for all images of this process.
        peers: The processes that share a batch.
    """

    def __init__(self, size: int | None = None, peers: SingleProcess | None = None) -> None:
        self.size = size
        self.peers = SingleProcess() if peers is None else peers
        self.whole = size is None and self.peers.count == 1  #: whether one part is the full batch

    def require(self, model: nn.Module, count: int) -> None:
        """Check that batches of ``count`` images of a model can be divided.

        Raises:
            UserError: If the result of a module depends on the full batch, or there are fewer images than processes.
        """
        for path, module in model.named_modules():
            # A frozen batch norm uses its running statistics.
            if not self.whole and isinstance(module, _BatchNorm) and module.training:
                raise UserError(
                    f"{path} normalises by the statistics of a whole batch, which cannot be computed in parts; remove "
                    "run.micro_batch_size, and set run.resources so that one process trains a trial"
                )
        if count < self.peers.count:
            raise UserError(
                f"batches of {count} images cannot be divided among {self.peers.count} processes; set a larger batch"
            )

    def rows(self, count: int) -> list[range]:
        """Return the ranges of a batch of ``count`` images that this process computes, in order."""
        # A process cuts its own share of the batch alone.
        own = self.peers.rows(count)
        size = self.size or len(own)
        return [range(begin, min(begin + size, own.stop)) for begin in range(own.start, own.stop, size)]

    def combine(self, parts: Sequence[WeightedLoss], parameters: Sequence[nn.Parameter]) -> Value:
        """Return the loss of the full batch, and normalise the accumulated gradients to it in place."""
        first = parts[0].loss
        if self.whole:
            return first
        # The weights, then the weighted loss and its terms, summed over all parts in one tensor.
        rows = [
            torch.stack(
                [torch.as_tensor(weight).to(loss.total), *(x * weight for x in (loss.total, *loss.parts.values()))]
            )
            for loss, weight in parts
        ]
        sums = torch.stack(rows).sum(0)
        self.peers.sum_gradients(parameters, sums)
        weight = sums[0].clamp(min=1)  # where no decision has a label there is nothing to learn
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        total, *terms = (sums[1:] / weight).unbind()
        return Value(total, dict(zip(first.parts, terms, strict=True)))
