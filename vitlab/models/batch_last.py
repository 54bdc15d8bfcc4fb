"""The passes of several small ViTs at once, with the batch as the innermost axis of everything they hand on.

Where tokens are few and heads narrow, a product of matrices is too small for a processor to be good at: an image of the
tutorial has heads of 5 tokens by 3 channels.  So here nothing is computed for an image.  Activations lie as
(members, width, tokens, images), a linear map is one product for all images of a member, and what attention, norms and
softmax do between channels and tokens is done to whole vectors of images.  It needs one operation for every channel of
a head and every token, and holds what they make of each other; so it pays only where these are few
(:func:`vitlab.plan.cohorts.engine_of` has the rule).

It is the model of :mod:`vitlab.models.vit`, told for its weights in timm's form, so attentions that keep them otherwise
share one telling.  What is told here is linear patches, layer norm, attention and the plain MLP.  All else a model may
have (encodings of position, heads, other norms and MLPs, dropout) does its own work, vectorised over members, and finds
the axes in their usual order: (batch, tokens, width) of a member is a view of what lies here.

K members; B images, C channels, I by J patches of h by w pixels, N patches, F = C*h*w; T tokens, D width, O another
width, M = T * B; H heads, E channels of a head; Q tokens as queries, S the same as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from vitlab import noise
from vitlab.components import attention, mlp, norm, patch
from vitlab.components.base import Dropout, DropPath
from vitlab.components.position import Position
from vitlab.components.position.additive import Additive
from vitlab.models.contract import Model

if TYPE_CHECKING:
    from vitlab.models.vit import Block, ViT

SUPPORTED_METHODS = ("forward", "forward_features", "forward_head", "_with_prefix")
"""Methods of :class:`vitlab.models.vit.ViT` in whose place the passes stand; a model with others is not known.  And a
block is a :class:`vitlab.models.vit.Block`, of no derived class."""

OF_ATTENTION = (nn.Linear, nn.ModuleList, attention.OneHead, norm.NoNorm, Dropout)
"""What the attentions are made of that are told here.  Exactly these, as with the attentions themselves."""

Rows = Mapping[str, Tensor]
"""Parameters and buffers by name, each with the members in front."""


RECOMPUTED = (
    *attention.SOFTMAX,
    attention.OneHead,
    mlp.GeluMLP,
    norm.LayerNorm,
    norm.NoNorm,
    patch.Linear,
    Dropout,
    DropPath,
    nn.Linear,
    nn.GELU,
    nn.Identity,
)
"""Parts that may be computed here without a call of their ``forward``, as the model itself and its blocks are."""


def incompatibility(model: ViT) -> str | None:
    """Return why a model cannot be computed like this, in one sentence; None where it can."""
    position = model.position
    for what, needed, hook in (
        ("rotates queries and keys", position.needs_rotation, "rotation"),
        ("has a bias", position.needs_bias, "bias"),
    ):
        if needed or not _is_of(Position, hook, position):
            return f"attention that {what} is not known with the batch innermost"
    for path, block in model.blocks.named_children():
        attend = cast("Block", block).attn
        where = f"blocks.{path}.attn"
        if type(attend) not in attention.SOFTMAX:
            return f"{where} is a {type(attend).__name__}, which is not known with the batch innermost"
        if not all(type(part) is norm.NoNorm for part in (attend.q_norm, attend.k_norm)):
            return f"{where} normalises queries and keys, which is not known with the batch innermost"
        for name, part in attend.named_modules():
            if name and type(part) not in OF_ATTENTION:
                return f"{where}.{name} is a {type(part).__name__}, which is not known with the batch innermost"
        if cast(Dropout, attend.attn_drop).p > 0:
            return f"{where} drops weights, which is not known with the batch innermost"
    parts = [part for part in model.named_modules() if type(part[1]) in RECOMPUTED]
    for path, module in [
        ("", model),
        *((f"blocks.{name}", block) for name, block in model.blocks.named_children()),
        *parts,
    ]:
        if _is_altered(module):
            return f"{path or 'the model'}, a {type(module).__name__}, has a replaced forward method or a hook"
    return None


class HeadOnly(Model):
    """What a model does after its last block: from tokens (B, T, D) to its output."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BTD: Tensor) -> Any:
        return self.model.forward_head(x_BTD)

    def views(self, output: Any) -> dict[str, Tensor]:
        return self.model.views(output)


class BatchLastForward:
    """The passes of models of one shape; see :class:`vitlab.models.contract.Innermost`."""

    def __init__(self, model: ViT) -> None:
        """``model``: one of them, of which :func:`incompatibility` says nothing."""
        self.model = model
        self.rest: Model = HeadOnly(model)

    def rest_of(self, rows: Rows) -> dict[str, Tensor]:
        return {f"model.{name}": row for name, row in rows.items() if name.startswith(("fc_norm.", "head."))}

    def features(self, rows: Rows, draws: noise.Draws, x_KBCHW: Tensor) -> Tensor:
        """(K, B, T, D): what ``forward_features`` gives for each member."""
        return _BatchLastPass(self.model, rows, draws).features(x_KBCHW)


class _BatchLastPass:
    """One forward pass."""

    def __init__(self, model: ViT, rows: Rows, draws: noise.Draws) -> None:
        self.model = model
        self.rows = rows
        self.draws = draws

    def features(self, x_KBCHW: Tensor) -> Tensor:
        x_KDTB = self._with_prefix(self._patches(x_KBCHW))
        x_KDTB = self._part("pos_drop", self._positions("add", x_KDTB, 0))
        for layer in range(1, len(self.model.blocks) + 1):
            x_KDTB = self._positions("add", x_KDTB, layer)
            x_KDTB = self._block(f"blocks.{layer - 1}", x_KDTB)
            x_KDTB = self._positions("mix", x_KDTB, layer)
        return _usual(self._part("norm", x_KDTB))

    # -- from pixels to tokens ----------------------------------------------------------------------------------------

    def _patches(self, x_KBCHW: Tensor) -> Tensor:
        """(K, D, N, B)."""
        embed = self.model.patch_embed
        if type(embed) is not patch.Linear:
            return _innermost(self._vectorised("patch_embed", x_KBCHW))
        x_KMF = patch.cut(x_KBCHW, embed.proj.kernel_size).flatten(1, 2)
        y_KDM = self._linear("patch_embed.proj", x_KMF.mT)
        return self._part("patch_embed.norm", y_KDM.view(*y_KDM.shape[:2], x_KBCHW.shape[1], -1).transpose(2, 3))

    def _with_prefix(self, x_KDNB: Tensor) -> Tensor:
        tokens = [self.rows[name] for name in ("cls_token", "dist_token", "reg_token") if name in self.rows]
        prefix = [_usual(token.expand(-1, x_KDNB.shape[3], -1, -1)) for token in tokens]
        return torch.cat([*prefix, x_KDNB], 2)

    def _positions(self, hook: str, x_KDTB: Tensor, layer: int) -> Tensor:
        """What the encoding adds to the tokens of a layer, or how it mixes them."""
        position = self.model.position
        if _is_of(Position, hook, position):
            return x_KDTB
        if hook == "add" and _is_of(Additive, hook, position) and layer not in cast(Additive, position).layers:
            return x_KDTB
        return self._tokenwise("position", x_KDTB, lambda part, x_BTD: getattr(part, hook)(x_BTD, layer))

    # -- a block ------------------------------------------------------------------------------------------------------

    def _block(self, at: str, x_KDTB: Tensor) -> Tensor:
        y_KDTB = self._attention(f"{at}.attn", self._part(f"{at}.norm1", x_KDTB))
        x_KDTB = x_KDTB + self._part(f"{at}.drop_path1", self._part(f"{at}.ls1", y_KDTB))
        y_KDTB = self._part(f"{at}.mlp", self._part(f"{at}.norm2", x_KDTB))
        return x_KDTB + self._part(f"{at}.drop_path2", self._part(f"{at}.ls2", y_KDTB))

    def _attention(self, at: str, x_KDTB: Tensor) -> Tensor:
        attend = cast(attention.Fused, self.model.get_submodule(at))
        members, _, tokens, images = x_KDTB.shape
        rows = _below(at, self.rows)
        if type(attend).to_canonical is not attention.Attention.to_canonical:
            rows = vmap(attend.to_canonical)(rows)
        qkv_KOM = _affine(rows["qkv.weight"], rows.get("qkv.bias"), x_KDTB.flatten(2))
        qkv_K3HETB = qkv_KOM.view(members, 3, attend.num_heads, attend.head_dim, tokens, images)
        y_KHETB: Tensor = _Attend.apply(qkv_K3HETB, attend.scale)  # type: ignore[no-untyped-call]
        y_KDM = _affine(rows["proj.weight"], rows["proj.bias"], y_KHETB.flatten(3).flatten(1, 2))
        return self._part(f"{at}.proj_drop", y_KDM.view(x_KDTB.shape))

    def _mlp(self, at: str, x_KDTB: Tensor) -> Tensor:
        perceive = cast(mlp.GeluMLP, self.model.get_submodule(at))
        hidden_KOM = F.gelu(self._linear(f"{at}.fc1", x_KDTB.flatten(2)), approximate=perceive.act.approximate)
        hidden_KOTB = self._part(f"{at}.drop1", hidden_KOM.view(*hidden_KOM.shape[:2], *x_KDTB.shape[2:]))
        y_KDM = self._linear(f"{at}.fc2", hidden_KOTB.flatten(2))
        return self._part(f"{at}.drop2", y_KDM.view(x_KDTB.shape))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _part(self, at: str, x_KDTB: Tensor) -> Tensor:
        """A part from tokens to tokens: here, where its form is known here."""
        part = self.model.get_submodule(at)
        if _idle(part):
            return x_KDTB
        if type(part) is norm.LayerNorm:
            weight_KD, bias_KD = self.rows[f"{at}.weight"], self.rows[f"{at}.bias"]
            y_KDM: Tensor = _Normalise.apply(x_KDTB.flatten(2), weight_KD, bias_KD, part.eps)  # type: ignore[no-untyped-call]
            return y_KDM.view(x_KDTB.shape)
        if type(part) is mlp.GeluMLP and _types(part.fc1, part.act, part.fc2) == (nn.Linear, nn.GELU, nn.Linear):
            return self._mlp(at, x_KDTB)
        return self._tokenwise(at, x_KDTB, lambda part, x_BTD: part(x_BTD))

    def _linear(self, at: str, x_KIM: Tensor) -> Tensor:
        return _affine(self.rows[f"{at}.weight"], self.rows.get(f"{at}.bias"), x_KIM)

    def _tokenwise(self, at: str, x_KDTB: Tensor, call: Call) -> Tensor:
        return _innermost(self._vectorised(at, _usual(x_KDTB), call))

    def _vectorised(self, at: str, x_KB: Tensor, call: Call = lambda part, x_B: part(x_B)) -> Tensor:
        """What a part itself makes of each member's batch, (K, B, ...)."""
        asked = _Asked(self.model.get_submodule(at), call)

        def one(rows: Rows, draws: noise.Draws, x_B: Tensor) -> Tensor:
            with noise.drawing(draws):
                return cast(Tensor, functional_call(asked, dict(rows), (x_B,)))

        rows = {f"part.{name}": row for name, row in _below(at, self.rows).items()}
        y_KB: Tensor = vmap(one)(rows, self.draws, x_KB)
        return y_KB


# -- how it is done ---------------------------------------------------------------------------------------------------

Call = Callable[[Any, Tensor], Tensor]
"""What a part is asked for, given a batch."""


class _Asked(nn.Module):
    """A part, and what it is asked for: in the form in which other weights can stand in for its own."""

    def __init__(self, part: nn.Module, call: Call) -> None:
        super().__init__()
        self.part = part
        self.call = call

    def forward(self, x_B: Tensor) -> Tensor:
        return self.call(self.part, x_B)


class _Normalise(torch.autograd.Function):
    """Layer norm over axis 1 of (K, D, M), with a scale and a shift (K, D) each."""

    @staticmethod
    def forward(ctx: Any, x_KDM: Tensor, weight_KD: Tensor, bias_KD: Tensor, eps: float) -> Tensor:
        y_KDM = x_KDM - x_KDM.mean(1, keepdim=True)
        scale_K1M = y_KDM.square().mean(1, keepdim=True).add_(eps).rsqrt_()
        y_KDM.mul_(scale_K1M)
        ctx.save_for_backward(y_KDM, scale_K1M, weight_KD)
        return torch.addcmul(bias_KD[..., None], y_KDM, weight_KD[..., None])

    @staticmethod
    def backward(ctx: Any, grad_KDM: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        y_KDM, scale_K1M, weight_KD = ctx.saved_tensors
        along_KDM = grad_KDM * y_KDM
        weight_K1D, share = weight_KD[:, None], 1 / weight_KD.shape[1]
        found_KDM = grad_KDM * weight_KD[..., None]
        found_KDM.sub_(weight_K1D @ grad_KDM, alpha=share).addcmul_(y_KDM, weight_K1D @ along_KDM, value=-share)
        return found_KDM.mul_(scale_K1M), along_KDM.sum(2), grad_KDM.sum(2), None


class _Attend(torch.autograd.Function):
    """Scaled dot-product attention, from queries, keys and values (K, 3, H, E, T, B) to (K, H, E, T, B)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, scale: float) -> Tensor:
        q, k, v = qkv.unbind(1)
        weights_KHQSB = _over_channels(q * scale, k).softmax(3)
        ctx.save_for_backward(qkv, weights_KHQSB)
        ctx.scale = scale
        return _over_tokens(weights_KHQSB.unbind(3), v.unbind(3))

    @staticmethod
    def backward(ctx: Any, grad_KHEQB: Tensor) -> tuple[Tensor, None]:
        qkv, weights_KHQSB = ctx.saved_tensors
        q, k, v = qkv.unbind(1)
        found = torch.empty_like(qkv)
        found_q, found_k, found_v = found.unbind(1)
        _over_tokens(weights_KHQSB.unbind(2), grad_KHEQB.unbind(3), found_v)
        logits_KHQSB = _over_channels(grad_KHEQB, v)
        # That of the softmax: w * (g - sum of w * g over keys).
        logits_KHQSB = torch._softmax_backward_data(logits_KHQSB, weights_KHQSB, 3, logits_KHQSB.dtype)
        logits_KHQSB.mul_(ctx.scale)
        _over_tokens(logits_KHQSB.unbind(3), k.unbind(3), found_q)
        _over_tokens(logits_KHQSB.unbind(2), q.unbind(3), found_k)
        return found, None


def _over_channels(a_KHEQB: Tensor, b_KHESB: Tensor) -> Tensor:
    """(K, H, Q, S, B): of every two tokens the sum over channels of their product."""
    (a, *others), (b, *partners) = a_KHEQB.unbind(2), b_KHESB.unbind(2)
    sum_KHQSB = a[:, :, :, None] * b[:, :, None]
    for a, b in zip(others, partners, strict=True):
        sum_KHQSB.addcmul_(a[:, :, :, None], b[:, :, None])
    return sum_KHQSB


def _over_tokens(weights: Sequence[Tensor], values: Sequence[Tensor], out_KHETB: Tensor | None = None) -> Tensor:
    """(K, H, E, T, B): values (K, H, E, B), summed with weights (K, H, T, B); into ``out`` where that is given."""
    sum_KHETB = torch.mul(weights[0][:, :, None], values[0][:, :, :, None], out=out_KHETB)
    for weight, value in zip(weights[1:], values[1:], strict=True):
        sum_KHETB.addcmul_(weight[:, :, None], value[:, :, :, None])
    return sum_KHETB


def _affine(weight_KOI: Tensor, bias_KO: Tensor | None, x_KIM: Tensor) -> Tensor:
    """(K, O, M); weights of a convolution count as what they are to a patch."""
    weight_KOI = weight_KOI.flatten(2)
    return weight_KOI @ x_KIM if bias_KO is None else torch.baddbmm(bias_KO[..., None], weight_KOI, x_KIM)


def _usual(x_KDTB: Tensor) -> Tensor:
    """The same as (K, B, T, D): a view; and back."""
    return x_KDTB.permute(0, 3, 2, 1)


def _innermost(x_KBTD: Tensor) -> Tensor:
    """The same as (K, D, T, B), and in memory so; a view where it is."""
    return x_KBTD.permute(0, 3, 2, 1).contiguous()


def _below(at: str, rows: Rows) -> dict[str, Tensor]:
    """The tensors of a part, by their names in it."""
    return {name.removeprefix(f"{at}."): row for name, row in rows.items() if name.startswith(f"{at}.")}


def _idle(part: nn.Module) -> bool:
    """Whether a part changes nothing.  One of a derived class may do anything."""
    if type(part) in (Dropout, DropPath):
        return cast(Any, part).p == 0 or not part.training
    return type(part) in (nn.Identity, norm.NoNorm)


def _is_of(base: type, method: str, part: nn.Module) -> bool:
    """Whether a part has a method from that very class."""
    return getattr(type(part), method) is getattr(base, method)


def _is_altered(module: nn.Module) -> bool:
    """Return True if code outside of the module's class has a say in its forward pass: a replaced method, or a hook."""
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
