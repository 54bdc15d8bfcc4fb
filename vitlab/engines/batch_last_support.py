"""What the engine ``batch_last`` supports, and which tokens its last block computes."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from vitlab.components import mlp, norm, patch
from vitlab.components.attention import Attention, softmax
from vitlab.components.base import Dropout, DropPath
from vitlab.components.block import LayerScale
from vitlab.components.block.residual import PreNorm
from vitlab.components.head import Distilled, LinearHead, MLPHead
from vitlab.components.position import Position
from vitlab.components.position.additive import Additive, Conditional
from vitlab.components.position.combined import Together, encodings
from vitlab.models.contract import Model
from vitlab.models.vit import ViT

SUPPORTED_METHODS = ("forward", "forward_features", "forward_head", "_with_prefix")
"""Methods of :class:`vitlab.models.vit.ViT` that are re-implemented here; a subclass that overrides one of them is not
supported, and neither is a block other than :class:`vitlab.components.block.residual.PreNorm`."""

ATTENTION_PARTS = (nn.Linear, nn.ModuleList, softmax.OneHead, norm.NoNorm, Dropout)
"""Classes of the supported attentions' submodules; derived classes are not supported."""

TOKENWISE = (mlp.GeluMLP, norm.LayerNorm, norm.NoNorm, Dropout, DropPath, nn.Linear, nn.GELU, nn.Identity)
"""Parts that compute every token by itself; derived classes may not."""

RECOMPUTED = (*softmax.SOFTMAX, softmax.OneHead, patch.LinearPatches, *TOKENWISE)
"""Parts whose ``forward`` may be replaced by the computation here, as are the methods of the model and its blocks."""

POOLING = ("pool", "classify")
"""Methods of a head that read its tokens, beside ``forward``."""


def incompatibility(model: Model, precision: str, device: torch.device) -> str | None:
    """Return the reason why a model is not supported, in one sentence; None if it is."""
    if device.type != "cpu":
        return f"engine batch_last runs on CPUs only, and this is {device.type}"
    if precision not in ("fp32", "tf32", "fp64"):
        return f"engine batch_last does not support precision {precision}"
    if not isinstance(model, ViT) or not all(inherits(ViT, name, model) for name in SUPPORTED_METHODS):
        return f"a {type(model).__name__} is not supported by engine batch_last"
    if model.patch_drop.p > 0:
        return "patch_drop is not supported by engine batch_last"
    blocks = [(f"blocks.{name}", block) for name, block in model.blocks.named_children()]
    for path, block in blocks:
        if type(block) is not PreNorm:
            return f"{path} is a {type(block).__name__}, which is not supported by engine batch_last"
        if reason := _attention_incompatibility(f"{path}.attn", block.attn):
            return reason
    parts = [part for part in model.named_modules() if type(part[1]) in RECOMPUTED]
    for path, module in [("", model), *blocks, *parts]:
        if _is_altered(module):
            return f"{path or 'the model'}, a {type(module).__name__}, has a replaced forward method or a hook"
    return None


def _attention_incompatibility(path: str, attend: Attention) -> str | None:
    if type(attend) not in softmax.SOFTMAX:
        return f"{path} is a {type(attend).__name__}, which is not supported by engine batch_last"
    if not all(type(part) is norm.NoNorm for part in (attend.q_norm, attend.k_norm)):
        return f"{path} normalises queries and keys, which is not supported by engine batch_last"
    for name, part in attend.named_modules():
        if name and type(part) not in ATTENTION_PARTS:
            return f"{path}.{name} is a {type(part).__name__}, which is not supported by engine batch_last"
    if cast(Dropout, attend.attn_drop).p > 0:
        return f"{path} drops weights, which is not supported by engine batch_last"
    return None


def tokens_read(model: ViT) -> int | None:
    """Return how many leading tokens the head reads, if the last block can be computed for these alone.

    Otherwise return None.  The last block has keys and values of all tokens in either case.
    """
    head, last, layer = model.head, cast(PreNorm, model.blocks[-1]), len(model.blocks)
    if type(head) not in (LinearHead, MLPHead, Distilled) or not head.reads:
        return None
    if any(name in vars(head) for name in POOLING):
        return None
    parts = [
        last.ls1,
        last.drop_path1,
        last.norm2,
        last.mlp,
        last.ls2,
        last.drop_path2,
        cast(softmax.SoftmaxAttention, last.attn).proj_drop,
        model.norm,
    ]
    modules = [head, *(module for part in parts for module in part.modules())]
    if any(type(module) not in (*TOKENWISE, LayerScale) for module in modules[1:]) or any(map(_is_altered, modules)):
        return None
    if not all(inherits(Position, "mix", part) or does_nothing("mix", part, layer) for part in positions_of(model)):
        return None
    return 1 + max(model.geometry.prefix.index(token) for token in head.reads)


def positions_of(model: ViT) -> list[Position]:
    """Return the position encodings of a model; a list of a derived class, which may combine them otherwise, is one."""
    whole = model.position
    if any(isinstance(part, Together) and type(part) is not Together for part in whole.modules()):
        return [whole]
    return list(encodings(whole).values())


def inherits(base: type, method: str, part: nn.Module) -> bool:
    """Return True if a part inherits ``method`` from ``base`` unchanged."""
    return getattr(type(part), method) is getattr(base, method) and method not in vars(part)


def does_nothing(hook: str, part: nn.Module, layer: int) -> bool:
    """Return True if ``hook`` of a built-in encoding, which acts at certain layers, does nothing at ``layer``."""
    if hook == "add":
        return inherits(Additive, hook, part) and layer not in cast(Additive, part).layers
    return type(part) is Conditional and layer != 1


def _is_altered(module: nn.Module) -> bool:
    """Return True if the module's forward pass is altered from outside of its class: a replaced method, or a hook."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or any(name in vars(module) for name in SUPPORTED_METHODS)
