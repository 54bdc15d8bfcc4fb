"""Capture of the attention maps and tokens of every block, with any kernel.

A fused kernel does not materialise attention weights, so hooks cannot record them.  Each attention has
``maps(x, rotation, bias)``, which computes its weights explicitly from the same parameters; capture calls it with the
inputs of every attention during an ordinary forward pass.

B images, L blocks, H heads, T tokens, D width, C classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab.components.attention import Attention
from vitlab.components.block import Block
from vitlab.models.contract import Model, evaluation_mode
from vitlab.models.vit import ViT


@dataclass(frozen=True)
class Captured:
    """The recorded values of a forward pass over a batch."""

    maps_LBHTT: tuple[Tensor, ...]  #: attention weights, one (B, H, T, T) per block; every row sums to 1
    no_maps: str  #: the reason why there are no maps; empty if there are
    tokens_LBTD: tuple[Tensor, ...]  #: tokens before the first block, then after each: one (B, T, D) more than blocks
    logits_BC: Tensor  #: the prediction; of a segmentation (B, C, H, W)


def capture(model: Model, x_BCHW: Tensor) -> Captured:
    """Run the model on a batch and record the attention maps and tokens of a ViT, and of any model the logits.

    The model runs in evaluation mode, without gradients, in its own precision; its mode is restored.
    """
    maps: list[list[Tensor]] = []  # of the attentions of each block
    received: list[Any] = []  # by each block from earlier ones
    tokens: list[Tensor] = []  # before the first block, then after each
    blocks: list[Any] = [*model.blocks] if isinstance(model, ViT) else []
    no_maps = "" if blocks else f"only models of type vit have maps of attention; this is a {type(model).__name__}"

    def before_attention(attention: Attention, arguments: tuple[Any, ...]) -> None:
        nonlocal no_maps
        try:
            # Without a function of the values, which no map depends on.
            maps[-1].append(attention.maps(*arguments[:3]))
        except NotImplementedError as error:
            no_maps = str(error)

    def before_block(block: Block, arguments: tuple[Any, ...]) -> None:
        tokens.extend([] if tokens else arguments[:1])
        maps.append([])
        received.append(arguments[3] if block.passes == "merged" else None)

    def after_block(block: Block, arguments: tuple[Any, ...], output: Any) -> None:
        x_BTD, passed = output if block.passes else (output, None)
        # Tokens that were merged are recorded as often as before.
        tokens.append(passed.unmerge_rows(x_BTD) if block.passes == "merged" and passed is not None else x_BTD)

    hooks = []
    for block in blocks:
        hooks += [block.register_forward_pre_hook(before_block), block.register_forward_hook(after_block)]
        attentions = [module for module in block.modules() if isinstance(module, Attention)]
        hooks += [attention.register_forward_pre_hook(before_attention) for attention in attentions]
    try:
        with evaluation_mode(model), torch.no_grad():
            logits_BC = model.logits_by_head(model(x_BCHW))[""]
    finally:
        for hook in hooks:
            hook.remove()
    # One stack of maps is drawn as a table of blocks and heads.
    if not no_maps and (len({len(of_block) for of_block in maps}) != 1 or not maps[0]):
        no_maps = f"its blocks have different numbers of attention maps: {list(map(len, maps))}"
    by_block = [] if no_maps else [torch.cat(of_block, 1) for of_block in maps]  # several attentions are more heads
    spread = [
        each if merged is None else merged.expand_attention_maps(each)
        for each, merged in zip(by_block, received, strict=False)  # without maps, there is nothing to expand
    ]
    return Captured(tuple(spread), no_maps, tuple(tokens), logits_BC)
