"""Activation checkpointing: the backward pass computes the activations of blocks again, instead of storing them.

Only the input of each block is stored, so that memory grows with one block instead of all, for about a third more
computation.  The same operations run with the same random draws and the same buffers, such as the running statistics
of a batch norm, so that gradients do not change by a bit, and the setting belongs to ``run``.  Buffers keep the values
of the first pass.

Reference: arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitlab import noise
from vitlab.errors import UserError
from vitlab.models.contract import Model


def recompute_blocks(model: Model) -> None:
    """Let the backward pass compute the activations inside a model's blocks again; other passes do not change.

    Raises:
        UserError: If the model has no blocks.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise UserError(f"run.activation_checkpointing: a {type(model).__name__} has no list of blocks; set it to none")
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _recomputed(kind)


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a block's class.

    A function stored in the block would be shared by its deep copies, which would then compute with its weights.
    """

    @wraps(kind.forward)
    def checkpointed(self: nn.Module, *inputs: Any) -> Any:
        forward = partial(kind.forward, self)
        if not (self.training and torch.is_grad_enabled()):
            return forward(*inputs)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=partial(_contexts, self))

    return type(kind.__name__, (kind,), {"forward": checkpointed, "__module__": kind.__module__})


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first pass, which is about to begin, and of the second one."""
    return nullcontext(), _second_pass(noise.current(), _state(block))


def _state(block: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return copies of a block's buffers; those that are not persistent are constants."""
    return [
        (module, name, buffer.clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


@contextmanager
def _second_pass(draws: noise.Draws | None, state: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Use the draws of the first pass, whose scope has ended, and copies of the buffers as they were before it."""
    after = [module._buffers[name] for module, name, _ in state]
    for module, name, buffer in state:
        module._buffers[name] = buffer
    try:
        with nullcontext() if draws is None else noise.drawing(draws):
            yield
    finally:
        for (module, name, _), current in zip(state, after, strict=True):
            module._buffers[name] = current
