"""The engine ``batch_last``: several small ViTs at once, with the batch as the last axis of all activations.

For few tokens and narrow heads, the matrix products of a single image are too small to be efficient: an image of the
tutorial has heads of 5 tokens by 3 channels.  Here activations have the axes (trials, width, tokens, images), so a
linear map is one product for all images of a trial, and attention, norms and softmax operate on whole vectors of
images.  This needs one operation for every channel of a head and every token, and stores all products of tokens, so it
only pays if both numbers are small (:func:`vitlab.plan.engine_choice.engine_of` has the rule); it is then twice as fast
as ``vmap``.

The module re-implements ViT's forward on canonical (timm) weights, so that all attention variants share it: linear
patches, layer norm, attention with rotation and bias, and the plain MLP.  All other parts (position encodings, heads,
other norms and MLPs, dropout) run their own forward, vectorised over trials, on a view with the usual axes (batch,
tokens, width).

K trials; B images, C channels, I by J patches of h by w pixels, N patches, F = C*h*w; T tokens, D width, O another
width, M = T * B; H heads, E channels of a head; Q tokens as queries, S the same as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from vitlab import noise
from vitlab.components import attention, mlp, norm, patch
from vitlab.components.base import Dropout, DropPath
from vitlab.components.block.prenorm import PreNorm
from vitlab.components.position import Position, encodings
from vitlab.components.position.additive import Additive
from vitlab.engines.batch_last_kernels import Attend, Normalise, Rotate, affine
from vitlab.engines.vmap import Vmap
from vitlab.models.contract import Model
from vitlab.models.vit import ViT
from vitlab.training.evaluation import forward_logits
from vitlab.training.loop import Training
from vitlab.training.losses import Value
from vitlab.training.objective.supervised import Supervised

SUPPORTED_METHODS = ("forward", "forward_features", "forward_head", "_with_prefix")
"""Methods of :class:`vitlab.models.vit.ViT` that are re-implemented here; a subclass that overrides one of them is not
supported, and neither is a block other than :class:`vitlab.components.block.prenorm.PreNorm`."""

ATTENTION_PARTS = (nn.Linear, nn.ModuleList, attention.OneHead, norm.NoNorm, Dropout)
"""Classes of the supported attentions' submodules; derived classes are not supported."""

Rows = Mapping[str, Tensor]
"""Parameters and buffers by name, each with the trials on axis 0."""

RECOMPUTED = (
    *attention.SOFTMAX,
    attention.OneHead,
    mlp.GeluMLP,
    norm.LayerNorm,
    norm.NoNorm,
    patch.LinearPatches,
    Dropout,
    DropPath,
    nn.Linear,
    nn.GELU,
    nn.Identity,
)
"""Parts whose ``forward`` may be replaced by the computation here, as are those of the model and its blocks."""


class BatchLast(Vmap):
    """Trainings of small ViTs: batch-last up to the head; the head and the loss are vectorised by ``vmap``."""

    name = "batch_last"
    fallback = "vmap"

    @classmethod
    def incompatibility(cls, training: Training) -> str | None:
        """Return why the training is no small ViT of supported parts on a CPU, or None."""
        if type(training.objective) is not Supervised:
            return f"engine batch_last does not support objective '{training.objective.name}'"
        return super().incompatibility(training) or incompatibility(
            training.model, training.spec.precision, training.feed.device
        )

    def _losses(self, rows: Rows, x_KBCHW: Tensor, y_KB: Tensor, draws: noise.Draws) -> Value:
        first, head = self.trainings[0], HeadOnly(self.module)
        criterion = cast(Supervised, first.objective).criterion

        def loss(rows: Rows, x_BTD: Tensor, y_B: Tensor, draws: noise.Draws) -> Value:
            with noise.drawing(draws):
                return criterion(forward_logits(head, x_BTD, first.spec.precision, rows), y_B)

        x_KBTD = BatchLastForward(head.model, rows, draws).features(x_KBCHW)
        losses: Value = vmap(loss)(head.own(rows), x_KBTD, y_KB, draws)
        return losses

    def _views(self, rows: Rows, x_BCHW: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        first, head = self.trainings[0], HeadOnly(self.module)
        x_KBTD = BatchLastForward(head.model, rows).features(x_BCHW[None])

        def logits(rows: Rows, x_BTD: Tensor) -> dict[str, Tensor]:
            return forward_logits(head, x_BTD, first.spec.precision, rows)

        views: dict[str, Tensor] = vmap(logits)(head.own(rows), x_KBTD)
        return views


def incompatibility(model: Model, precision: str, device: torch.device) -> str | None:
    """Return the reason why a model is not supported, in one sentence; None if it is."""
    if device.type != "cpu":
        return f"engine batch_last runs on CPUs only, and this is {device.type}"
    if precision not in ("fp32", "fp64"):
        return f"engine batch_last does not support precision {precision}"
    if not isinstance(model, ViT) or not all(_inherits(ViT, name, model) for name in SUPPORTED_METHODS):
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


def _attention_incompatibility(path: str, attend: attention.Attention) -> str | None:
    if type(attend) not in attention.SOFTMAX:
        return f"{path} is a {type(attend).__name__}, which is not supported by engine batch_last"
    if not all(type(part) is norm.NoNorm for part in (attend.q_norm, attend.k_norm)):
        return f"{path} normalises queries and keys, which is not supported by engine batch_last"
    for name, part in attend.named_modules():
        if name and type(part) not in ATTENTION_PARTS:
            return f"{path}.{name} is a {type(part).__name__}, which is not supported by engine batch_last"
    if cast(Dropout, attend.attn_drop).p > 0:
        return f"{path} drops weights, which is not supported by engine batch_last"
    return None


class HeadOnly(Model):
    """The part of a model after its last block: from tokens (B, T, D) to its output."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = cast(ViT, model)

    def forward(self, x_BTD: Tensor) -> Any:
        """Return the model's output for the tokens after its last block."""
        return self.model.forward_head(x_BTD)

    def logits_by_head(self, output: Any) -> dict[str, Tensor]:
        """Return the model's logits by head."""
        return self.model.logits_by_head(output)

    def own(self, rows: Rows) -> dict[str, Tensor]:
        """Return the tensors of this part by their names here."""
        return {f"model.{name}": row for name, row in rows.items() if name.startswith(("fc_norm.", "head."))}


class Hints(NamedTuple):
    """What a position encoding tells the attention of a block; an axis H of length 1 stands for all heads."""

    rotation: Sequence[Tensor]  #: cosines and sines, each (K, H, E/2, T, 1), or nothing
    bias_KHQS: Tensor | None = None


class BatchLastForward:
    """One forward pass of several ViTs of one shape, for which :func:`incompatibility` returns None.

    Args:
        model: One of them.
        rows: Their parameters and buffers; gradients flow to these.
        draws: The sources of their layers' random draws, with the trials on axis 0; None if they draw nothing.
    """

    def __init__(self, model: ViT, rows: Rows, draws: noise.Draws | None = None) -> None:
        self.model = model
        self.rows = rows
        self.draws = draws
        self.row_K = torch.arange(len(next(iter(rows.values()))))

    def features(self, x_KBCHW: Tensor) -> Tensor:
        """Return ``forward_features`` of each trial, (K, B, T, D).

        Images that all trials share have an axis 0 of length 1.
        """
        x_KDTB = self._with_prefix(self._patches(x_KBCHW))
        x_KDTB = self._part("norm_pre", self._part("pos_drop", self._positions("add", x_KDTB, 0)))
        for layer in range(1, len(self.model.blocks) + 1):
            x_KDTB = self._positions("add", x_KDTB, layer)
            x_KDTB = self._block(f"blocks.{layer - 1}", x_KDTB, self._hints(layer))
            x_KDTB = self._positions("mix", x_KDTB, layer)
        return _to_KBTD(self._part("norm", x_KDTB))

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _patches(self, x_KBCHW: Tensor) -> Tensor:
        """Return the patch tokens (K, D, N, B)."""
        embed = self.model.patch_embed
        trials = len(self.row_K)
        if type(embed) is not patch.LinearPatches:
            return _to_KDTB(self._vectorised("patch_embed", _call, x_KBCHW.expand(trials, -1, -1, -1, -1)))
        x_KMF = patch.cut(x_KBCHW, embed.proj.kernel_size).flatten(1, 2)
        y_KDM = self._linear("patch_embed.proj", x_KMF.mT.expand(trials, -1, -1))
        return self._part("patch_embed.norm", y_KDM.view(*y_KDM.shape[:2], x_KBCHW.shape[1], -1).transpose(2, 3))

    def _with_prefix(self, x_KDNB: Tensor) -> Tensor:
        tokens = [self.rows[name] for name in ("cls_token", "dist_token", "reg_token") if name in self.rows]
        prefix = [_to_KBTD(token.expand(-1, x_KDNB.shape[3], -1, -1)) for token in tokens]
        return torch.cat([*prefix, x_KDNB], 2)

    def _positions(self, hook: str, x_KDTB: Tensor, layer: int) -> Tensor:
        """Apply ``add`` or ``mix`` of the position encoding to the tokens of a layer."""
        parts = encodings(self.model.position).values()
        if all(_inherits(Position, hook, part) or _adds_nothing(hook, part, layer) for part in parts):
            return x_KDTB
        return self._tokenwise("position", x_KDTB, lambda part, x_BTD: getattr(part, hook)(x_BTD, layer))

    def _hints(self, layer: int) -> Hints:
        """Return what the position encoding tells the attention of a block."""
        rotation = [each[:, None] if each.ndim == 3 else each for each in self._hint("rotation", layer)]
        bias = self._hint("bias", layer)
        return Hints([each_KHTP.mT[..., None] for each_KHTP in rotation], *bias)

    def _hint(self, hook: str, layer: int) -> Sequence[Tensor]:
        """Return the tensors of ``rotation`` or ``bias`` of the position encoding, with the trials on axis 0."""
        if all(_inherits(Position, hook, part) for part in encodings(self.model.position).values()):
            return ()

        def call(part: nn.Module) -> tuple[Tensor, ...]:
            hint = getattr(part, hook)(layer)
            return (hint,) if isinstance(hint, Tensor) else tuple(hint or ())

        return cast("Sequence[Tensor]", self._vectorised("position", call))

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _block(self, at: str, x_KDTB: Tensor, hints: Hints) -> Tensor:
        y_KDTB = self._attention(f"{at}.attn", self._part(f"{at}.norm1", x_KDTB), hints)
        x_KDTB = x_KDTB + self._part(f"{at}.drop_path1", self._part(f"{at}.ls1", y_KDTB))
        y_KDTB = self._part(f"{at}.mlp", self._part(f"{at}.norm2", x_KDTB))
        return x_KDTB + self._part(f"{at}.drop_path2", self._part(f"{at}.ls2", y_KDTB))

    def _attention(self, at: str, x_KDTB: Tensor, hints: Hints) -> Tensor:
        attend = cast(attention.SoftmaxAttention, self.model.get_submodule(at))
        trials, _, tokens, images = x_KDTB.shape
        rows = _below(at, self.rows)
        if attend.implementation in ("split", "per_head"):
            rows = vmap(attend.to_canonical)(rows)
        qkv_KOM = affine(rows["qkv.weight"], rows.get("qkv.bias"), x_KDTB.flatten(2))
        qkv_K3HETB = qkv_KOM.view(trials, 3, attend.num_heads, attend.head_dim, tokens, images)
        if hints.rotation:
            qkv_K3HETB = Rotate.apply(qkv_K3HETB, *hints.rotation)  # type: ignore[no-untyped-call]
        y_KHETB: Tensor = Attend.apply(qkv_K3HETB, hints.bias_KHQS, attend.scale)  # type: ignore[no-untyped-call]
        y_KDM = affine(rows["proj.weight"], rows.get("proj.bias"), y_KHETB.flatten(3).flatten(1, 2))
        return self._part(f"{at}.proj_drop", y_KDM.view(x_KDTB.shape))

    def _mlp(self, at: str, x_KDTB: Tensor) -> Tensor:
        perceive = cast(mlp.GeluMLP, self.model.get_submodule(at))
        hidden_KOM = F.gelu(self._linear(f"{at}.fc1", x_KDTB.flatten(2)), approximate=perceive.act.approximate)
        hidden_KOTB = self._part(f"{at}.drop1", hidden_KOM.view(*hidden_KOM.shape[:2], *x_KDTB.shape[2:]))
        y_KDM = self._linear(f"{at}.fc2", self._part(f"{at}.norm", hidden_KOTB).flatten(2))
        return self._part(f"{at}.drop2", y_KDM.view(x_KDTB.shape))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _part(self, at: str, x_KDTB: Tensor) -> Tensor:
        """Apply a part from tokens to tokens, batch-last if it is supported."""
        part = self.model.get_submodule(at)
        if _is_identity(part):
            return x_KDTB
        if type(part) is norm.LayerNorm and f"{at}.bias" in self.rows:
            weight_KD, bias_KD = self.rows[f"{at}.weight"], self.rows[f"{at}.bias"]
            y_KDM: Tensor = Normalise.apply(x_KDTB.flatten(2), weight_KD, bias_KD, part.eps)  # type: ignore[no-untyped-call]
            return y_KDM.view(x_KDTB.shape)
        if type(part) is mlp.GeluMLP and _types(part.fc1, part.act, part.fc2) == (nn.Linear, nn.GELU, nn.Linear):
            return self._mlp(at, x_KDTB)
        return self._tokenwise(at, x_KDTB, _call)

    def _linear(self, at: str, x_KIM: Tensor) -> Tensor:
        return affine(self.rows[f"{at}.weight"], self.rows.get(f"{at}.bias"), x_KIM)

    def _tokenwise(self, at: str, x_KDTB: Tensor, call: Call) -> Tensor:
        return _to_KDTB(self._vectorised(at, call, _to_KBTD(x_KDTB)))

    def _vectorised(self, at: str, call: Call, *inputs: Tensor) -> Any:
        """Call a part of each trial with its own weights, and with inputs whose axis 0 is that of the trials."""
        call_part = _PartCall(self.model.get_submodule(at), call)

        def one(row: Tensor, rows: Rows, draws: noise.Draws | None, *inputs: Tensor) -> Any:
            with noise.drawing(draws) if draws is not None else nullcontext():
                return functional_call(call_part, dict(rows), inputs)

        rows = {f"part.{name}": row for name, row in _below(at, self.rows).items()}
        in_dims = (0, 0, None if self.draws is None else 0, *(0 for _ in inputs))
        return vmap(one, in_dims)(self.row_K, rows, self.draws, *inputs)


Call = Callable[..., Any]
"""A call of a part, which is the first argument, with inputs of one trial."""


def _call(part: nn.Module, *inputs: Tensor) -> Any:
    """Call a part's forward."""
    return part(*inputs)


class _PartCall(nn.Module):
    """A part and a call of it, as a module, so that ``functional_call`` can replace its weights."""

    def __init__(self, part: nn.Module, call: Call) -> None:
        super().__init__()
        self.part = part
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.part, *inputs)


def _to_KBTD(x_KDTB: Tensor) -> Tensor:
    """Return (K, D, T, B) as a view (K, B, T, D); the function is its own inverse."""
    return x_KDTB.permute(0, 3, 2, 1)


def _to_KDTB(x_KBTD: Tensor) -> Tensor:
    """Return (K, B, T, D) as a contiguous (K, D, T, B)."""
    return x_KBTD.permute(0, 3, 2, 1).contiguous()


def _below(at: str, rows: Rows) -> dict[str, Tensor]:
    """Return the tensors of a part by their names in it."""
    return {name.removeprefix(f"{at}."): row for name, row in rows.items() if name.startswith(f"{at}.")}


def _is_identity(part: nn.Module) -> bool:
    """Return True if a part is the identity; derived classes are assumed not to be."""
    if type(part) in (Dropout, DropPath):
        return cast(Any, part).p == 0 or not part.training
    return type(part) in (nn.Identity, norm.NoNorm)


def _inherits(base: type, method: str, part: nn.Module) -> bool:
    """Return True if a part inherits ``method`` from ``base`` unchanged."""
    return getattr(type(part), method) is getattr(base, method)


def _adds_nothing(hook: str, part: nn.Module, layer: int) -> bool:
    """Return True if ``hook`` is the addition of rows at certain layers, and ``layer`` is none of them."""
    return hook == "add" and _inherits(Additive, hook, part) and layer not in cast(Additive, part).layers


def _is_altered(module: nn.Module) -> bool:
    """Return True if the module's forward pass is altered from outside of its class: a replaced method, or a hook."""
    cls = type(module)
    replaced = [
        name for name in SUPPORTED_METHODS if (method := getattr(cls, name, None)) and not _is_own(cls, name, method)
    ]
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return bool(replaced) or any(hooks) or any(name in vars(module) for name in SUPPORTED_METHODS)


def _is_own(cls: type, name: str, method: Any) -> bool:
    """Return True if a method was written in the body of the class that has it."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    if owner is nn.Module:
        return True
    return (method.__module__, method.__qualname__) == (owner.__module__, f"{owner.__qualname__}.{name}")


def _types(*parts: nn.Module) -> tuple[type, ...]:
    return tuple(type(part) for part in parts)
