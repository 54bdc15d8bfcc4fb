"""Capture of the attention maps and tokens of every block, with any kernel.

A fused kernel does not materialise attention weights, so hooks cannot record them.  Each attention has
``maps(x, rotation, bias)``, which computes its weights explicitly from the same parameters; capture records the
inputs of every attention during an ordinary forward pass and calls it with them.

B images, L blocks, H heads, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitlab.components.attention import Attention
from vitlab.components.block import Block
from vitlab.errors import UserError
from vitlab.geometry import Geometry
from vitlab.models.vit import ViT


@dataclass(frozen=True)
class Captured:
    """The recorded values of a forward pass over a batch."""

    maps_LBHTT: tuple[Tensor, ...]  #: attention weights, one (B, H, T, T) per block; every row sums to 1
    tokens_LBTD: tuple[Tensor, ...]  #: tokens before the first block, then after each: one (B, T, D) more than blocks
    logits_by_head: Mapping[str, Tensor]  #: logits by name; ``""`` is the prediction
    geometry: Geometry


def capture(model: ViT, x_BCHW: Tensor) -> Captured:
    """Run the model on a batch and record its attention maps and tokens.

    The model runs in evaluation mode, without gradients, in its own precision; its mode is restored.

    Raises:
        UserError: if an attention of the model has no maps.
    """
    calls: list[tuple[Attention, tuple[Any, ...]]] = []
    tokens: list[Tensor] = []

    def before_attention(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        calls.append((module, arguments[:3]))  # without a function of the values, which no map depends on

    def before_block(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not tokens:
            tokens.append(arguments[0])

    def after_block(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        tokens.append(output[0] if cast(Block, module).passes_values else output)

    hooks = []
    for block in cast("Iterable[Block]", model.blocks):
        hooks += [
            block.register_forward_pre_hook(before_block),
            block.register_forward_hook(after_block),
            block.attn.register_forward_pre_hook(before_attention),
        ]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits_by_head = model.logits_by_head(model(x_BCHW))
            maps = tuple(_maps(module, arguments) for module, arguments in calls)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if len(maps) != len(model.blocks):
        raise UserError(f"captured {len(maps)} attention maps from {len(model.blocks)} blocks")
    return Captured(maps, tuple(tokens), logits_by_head, model.geometry)


def _maps(module: Attention, arguments: tuple[Any, ...]) -> Tensor:
    try:
        return module.maps(*arguments)
    except NotImplementedError:
        raise UserError(
            f"attention '{type(module).__name__}' has no attention maps to explain; implement its method maps"
        ) from None
