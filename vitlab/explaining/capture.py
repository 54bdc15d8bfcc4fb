"""Capture of the attention maps and tokens of every block, with any kernel.

A fused kernel does not materialise attention weights, so hooks cannot record them.  Each attention has
``maps(x, rotation, bias)``, which computes its weights explicitly from the same parameters; capture records the
inputs of every attention during an ordinary forward pass and calls it with them.

B images, L blocks, H heads, T tokens, D width.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitlab.components.attention import Attention
from vitlab.components.block import Block
from vitlab.errors import UserError
from vitlab.geometry import Geometry
from vitlab.models.contract import evaluation_mode
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
    calls: list[list[tuple[Attention, tuple[Any, ...]]]] = []  # of the attentions of each block
    received: list[Any] = []  # by each block from earlier ones
    tokens: list[Tensor] = []  # before the first block, then after each

    def before_attention(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        calls[-1].append((module, arguments[:3]))  # without a function of the values, which no map depends on

    def before_block(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        tokens.extend([] if tokens else arguments[:1])
        calls.append([])
        received.append(arguments[3] if cast(Block, module).passes == "merged" else None)

    def after_block(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        passes = cast(Block, module).passes
        x_BTD, passed = output if passes else (output, None)
        # Tokens that were merged are recorded as often as before.
        tokens.append(passed.unmerge_rows(x_BTD) if passes == "merged" and passed is not None else x_BTD)

    hooks = []
    for block in cast("Iterable[Block]", model.blocks):
        hooks += [block.register_forward_pre_hook(before_block), block.register_forward_hook(after_block)]
        attentions = [module for module in block.modules() if isinstance(module, Attention)]
        hooks += [attention.register_forward_pre_hook(before_attention) for attention in attentions]
    try:
        with evaluation_mode(model), torch.no_grad():
            logits_by_head = model.logits_by_head(model(x_BCHW))
            try:
                maps = [[module.maps(*arguments) for module, arguments in of_block] for of_block in calls]
            except NotImplementedError as error:
                raise UserError(f"no attention maps to explain: {error}") from None
    finally:
        for hook in hooks:
            hook.remove()
    # One stack of maps is drawn as a table of blocks and heads.
    if len({len(of_block) for of_block in maps}) != 1 or not maps[0]:
        raise UserError(f"explanations need as many attention maps in each block; found {list(map(len, maps))}")
    by_block = [torch.cat(of_block, 1) for of_block in maps]  # several attentions of a block are more heads
    spread = [
        each if merged is None else merged.expand_attention_maps(each)
        for each, merged in zip(by_block, received, strict=True)
    ]
    return Captured(tuple(spread), tuple(tokens), logits_by_head, model.geometry)
