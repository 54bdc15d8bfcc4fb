"""A step's batch in parts: fewer images at a time where memory holds no more, and to each of several processes its own.

The gradient of a step is that of its whole batch, whatever that is cut into.  A loss is the mean over its decisions,
which are images, or pixels that have a label; so each part counts by how many it decides, and the sum over the parts is
divided by all of them, however unequal they are.  Which images a step sees, and how each is augmented, mixed and
masked, is drawn for the step and the image (:mod:`vitlab.noise`) and not for the batch.  So the results are those of
the whole batch but for rounding: this is how a trial is computed, no part of what it is, and stands in ``run``.

What looks at a whole batch cannot be cut: batch normalisation is refused.  Parts of others that draw from torch's own
generator draw anew for every part.

K members of a cohort; ``...`` them, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitlab.errors import UserError
from vitlab.training.distributed import SingleProcess
from vitlab.training.losses import Loss, Value


class WeightedLoss(NamedTuple):
    """The loss of a part, (...), and how many decisions it is the mean over."""

    loss: Value
    weight: Tensor | float


class Whole:
    """A step's batch at once."""

    def require(self, model: nn.Module, count: int) -> None:
        """Refuse a model, or a number of images, that cannot be computed like this."""

    def met(self, model: nn.Module, step: int) -> None:
        """Begin at a step, with all who compute a part."""

    def rows(self, count: int) -> list[range]:
        """The places in the step's batch, of ``count`` images, that are computed here, one part after another."""
        return [range(count)]

    def weight(self, loss: Loss, target: Tensor) -> Tensor | float:
        """What a part counts beside the others; see :meth:`~vitlab.training.losses.Loss.weight`."""
        return 1.0

    def weights(self, loss: Loss, targets: Sequence[Tensor]) -> Tensor | float:
        """The same for each member of a cohort, (K,)."""
        return 1.0

    def joined(self, parts: Sequence[WeightedLoss], parameters: Sequence[nn.Parameter]) -> Value:
        """The loss of the whole batch; the gradients that its parts have added up are made those of that loss."""
        (part,) = parts
        return part.loss

    def joined_stack(self, parts: Sequence[WeightedLoss], gradients: list[Tensor]) -> tuple[Value, list[Tensor]]:
        """The same for a cohort, of stacked gradients, each (K, ...), that are returned."""
        (part,) = parts
        return part.loss, gradients


class MicroBatches(Whole):
    """A step's batch in parts."""

    def __init__(self, size: int | None, peers: SingleProcess) -> None:
        """
        Args:
            size: images of a part, at most; None: as many as there are for this process.
            peers: the processes that share a batch.
        """
        self.size = size
        self.peers = peers

    def require(self, model: nn.Module, count: int) -> None:
        for path, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.training:  # a frozen one uses its running statistics
                raise UserError(
                    f"{path} normalises by the statistics of a whole batch, which cannot be computed in parts: leave "
                    "out run.micro_batch_size, and have one process train a trial (run.resources)"
                )
        if count < self.peers.count:
            raise UserError(f"batches of {count} images cannot be shared by {self.peers.count} processes")

    def met(self, model: nn.Module, step: int) -> None:
        self.peers.require_alike(model, step)

    def rows(self, count: int) -> list[range]:
        own = self.peers.rows(count)
        size = self.size or len(own)
        return [range(begin, min(begin + size, own.stop)) for begin in range(own.start, own.stop, size)]

    def weight(self, loss: Loss, target: Tensor) -> Tensor:
        return loss.weight(target)

    def weights(self, loss: Loss, targets: Sequence[Tensor]) -> Tensor:
        return torch.stack([loss.weight(target) for target in targets])

    def joined(self, parts: Sequence[WeightedLoss], parameters: Sequence[nn.Parameter]) -> Value:
        sums = _sums(parts)
        self.peers.add_up(parameters, sums)
        weight, loss = _means(sums, parts[0].loss)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        return loss

    def joined_stack(self, parts: Sequence[WeightedLoss], gradients: list[Tensor]) -> tuple[Value, list[Tensor]]:
        weight_K, loss = _means(_sums(parts), parts[0].loss)
        return loss, [gradient / weight_K.view(-1, *(1,) * (gradient.ndim - 1)) for gradient in gradients]


def microbatches_of(micro_batch_size: int | None, peers: SingleProcess) -> Whole:
    """How the batches of a training are cut, by what ``run`` says; not at all where it says nothing."""
    return Whole() if micro_batch_size is None and peers.count == 1 else MicroBatches(micro_batch_size, peers)


# -- how it is done ---------------------------------------------------------------------------------------------------


def _sums(parts: Sequence[WeightedLoss]) -> Tensor:
    """(1 + losses, ...): the weights of all parts added up, then the loss and each of its terms, weighted."""
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
    """All that the parts weigh, (...), and the loss of the whole batch with its terms."""
    weight = sums[0].clamp(min=1)  # where no decision has a label there is nothing to learn
    total, *terms = (sums[1:] / weight).unbind()
    return weight, Value(total, dict(zip(like.parts, terms, strict=True)))
