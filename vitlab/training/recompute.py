"""Activation checkpointing: the backward pass computes the activations of blocks again, instead of storing them.

Only the input of each block is stored, so that memory grows with one block instead of all, for about a third more
computation.  The same operations run with the same random draws, so that gradients do not change by a bit, and the
setting belongs to ``run``.

Reference: arXiv:1604.06174.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
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
        _recompute(block)


def _recompute(block: nn.Module) -> None:
    forward = block.forward

    @wraps(forward)
    def checkpointed(*inputs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*inputs)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=_contexts)

    block.forward = checkpointed


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first pass and of the second one, which has left the scope of the step's draws."""
    draws = noise.current()
    return nullcontext(), nullcontext() if draws is None else noise.drawing(draws)
