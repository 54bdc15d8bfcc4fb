"""Memory of a step: its batch in microbatches, activations that the backward pass computes again, and the peak.

**Gradient accumulation**, to fit a batch in memory or to divide it between processes.  The gradient of a step equals
the one of its full batch.  A loss is the mean over its decisions (images, or labelled pixels), so each microbatch is
weighted by its number of decisions, and the sum is divided by the total weight.  The images of a step, their
augmentation, mixing and masks are drawn per step and image (:mod:`vitlab.noise`), not per batch.  Results therefore
equal the full batch's up to rounding.  Batch normalisation depends on the full batch and is refused.  Third-party
components that draw from torch's own generator draw anew for every microbatch.

**Activation checkpointing.**  Only the input of each block is stored, so that memory grows with one block instead of
all, for about a third more computation.  The same operations run with the same random draws and the same buffers, such
as the running statistics of a batch norm, so that gradients do not change by a bit.  Buffers keep the values of the
first pass.  Reference: arXiv:1604.06174.

Both settings belong to ``run``, not to a trial's identity.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from vitlab import noise
from vitlab.errors import UserError
from vitlab.models.contract import Model
from vitlab.training.distributed import ALONE, SingleProcess
from vitlab.training.losses import Value

OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""Messages of RuntimeErrors that torch raises when memory runs out, instead of torch.OutOfMemoryError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that the host or the device ran out of memory."""
    matches = isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)
    return matches or isinstance(error, MemoryError | torch.OutOfMemoryError)


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

    def __init__(self, size: int | None = None, peers: SingleProcess = ALONE) -> None:
        self.size = size
        self.peers = peers
        self.whole = size is None and peers.count == 1  #: whether one part is the full batch

    def require_splittable_batches(self, model: nn.Module, count: int) -> None:
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
        return [own[begin : begin + size] for begin in range(0, len(own), size)]

    def combine_losses_and_gradients(self, parts: Sequence[WeightedLoss], parameters: Sequence[nn.Parameter]) -> Value:
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
        self.peers.finish_gradient_sums(sums)
        weight = sums[0].clamp(min=1)  # where no decision has a label there is nothing to learn
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        total, *terms = (sums[1:] / weight).unbind()
        return Value(total, dict(zip(first.parts, terms, strict=True)))


# -- activation checkpointing -----------------------------------------------------------------------------------------


def checkpoint_activations(model: Model) -> None:
    """Let the backward pass compute the activations inside a model's blocks again; other passes do not change.

    Raises:
        UserError: If the model has no blocks.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise UserError(f"run.activation_checkpointing: a {type(model).__name__} has no list of blocks; set it to none")
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _checkpointing_class(kind)


@cache
def _checkpointing_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a block's class.

    A function stored in the block would be shared by its deep copies, which would then compute with its weights.
    """

    @wraps(kind.forward)
    def checkpointed(self: nn.Module, *inputs: Any) -> Any:
        forward = partial(kind.forward, self)
        if not (self.training and torch.is_grad_enabled()):
            return forward(*inputs)
        # The contexts of the first pass, which is about to begin, and of the second one.
        contexts = lambda: (nullcontext(), _as_in_first_pass(noise.current(), _copy_buffers(self)))  # noqa: E731
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)

    return type(kind.__name__, (kind,), {"forward": checkpointed, "__module__": kind.__module__})


def _copy_buffers(block: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return copies of a block's buffers; those that are not persistent are constants."""
    return [
        (module, name, buffer.clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


@contextmanager
def _as_in_first_pass(draws: noise.Draws | None, state: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Use the draws of the first pass, whose scope has ended, and copies of the buffers as they were before it."""
    after = [module._buffers[name] for module, name, _ in state]
    for module, name, buffer in state:
        module._buffers[name] = buffer
    try:
        with nullcontext() if draws is None else noise.use_model_draws(draws):
            yield
    finally:
        for (module, name, _), current in zip(state, after, strict=True):
            module._buffers[name] = current


# -- measurement -------------------------------------------------------------------------------------------------------


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the allocator on CUDA, of the process elsewhere; 0 if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, IndexError):  # on Linux, as ru_maxrss includes the peak of the program that started this one
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    try:
        import resource
    except ImportError:  # Windows
        return 0
    # macOS counts bytes, other systems KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
