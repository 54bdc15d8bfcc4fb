"""Activation checkpointing: the backward pass computes the activations of blocks again, instead of storing them.

Only the input of each block is stored, so that memory grows with one block instead of all, for about a third more
computation.  The same operations run with the same random draws, so that gradients do not change by a bit, and the
setting belongs to ``run``.

Reference: arXiv:1604.06174.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
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
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=_contexts)

    return type(kind.__name__, (kind,), {"forward": checkpointed, "__module__": kind.__module__})


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first pass and of the second one, which has left the scope of the step's draws."""
    draws = noise.current()
    return nullcontext(), nullcontext() if draws is None else noise.drawing(draws)
