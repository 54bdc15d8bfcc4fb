"""The engine ``batch_last``: several small ViTs at once, with the batch as the last axis of all activations.

For few tokens and narrow heads, the matrix products of a single image are too small to be efficient: an image of the
tutorial has heads of 5 tokens by 3 channels.  Here activations have the axes (trials, width, tokens, images), so a
linear map is one product for all images of a trial, and attention, norms and softmax operate on whole vectors of
images.  This needs one operation for every channel of a head and every token, and stores all products of tokens, so it
only pays if both numbers are small; :func:`vitlab.planning.engine_choice.choose_engine` has the rule.

If the head reads the class token alone, the last block computes only the keys and values of other tokens, which changes
no result: with three blocks, this saves more than a quarter of the work of their linear maps.

The module re-implements ViT's forward on canonical (timm) weights, so that all attention variants share it: linear
patches, layer norm, attention with rotation and bias, and the plain MLP.  All other parts (position encodings, heads,
other norms and MLPs, dropout) run their own forward, vectorised over trials, on a view with the usual axes (batch,
tokens, width).

K trials; B images, C channels, I by J patches of h by w pixels, N patches, F = C*h*w; T tokens, D width, O another
width, M = T * B; H heads, E channels of a head; Q tokens as queries, S the same as keys.  The tensors of
``rows``, parameters and buffers by name, have the trials on axis 0.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from vitlab import noise
from vitlab.components import mlp, norm, patch
from vitlab.components.attention import Attention, softmax
from vitlab.components.base import Dropout, DropPath
from vitlab.components.block import LayerScale
from vitlab.components.block.residual import PreNorm
from vitlab.components.head import Distilled, LinearHead, MLPHead
from vitlab.components.position import Position, Together, encodings_by_prefix
from vitlab.components.position.additive import Additive, Conditional
from vitlab.engines.base import engine
from vitlab.engines.batch_last_kernels import Attend, Normalise, Rotate, apply_affine_map
from vitlab.engines.vmap import Call, PartCall, Vmap
from vitlab.models.contract import Model, State
from vitlab.models.vit import ViT
from vitlab.training.evaluation import forward_logits
from vitlab.training.loop import Training
from vitlab.training.losses import Value
from vitlab.training.objective.supervised import Supervised

ATTENTION_PARTS = (nn.Linear, nn.ModuleList, nn.ModuleDict, norm.NoNorm, Dropout)
"""Classes of the supported attentions' submodules; derived classes are not supported."""

TOKENWISE = (mlp.GeluMLP, norm.LayerNorm, norm.NoNorm, Dropout, DropPath, nn.Linear, nn.GELU, nn.Identity)
"""Parts that compute every token by itself; derived classes may not."""


@engine.register("batch_last")
class BatchLast(Vmap):
    """Trainings of small ViTs: batch-last up to the head; the head and the loss are vectorised by ``vmap``."""

    fallback = "vmap"

    @classmethod
    def incompatibility(cls, training: Training) -> str | None:
        if type(training.objective) is not Supervised:
            return f"engine batch_last does not support objective '{training.objective.name}'"
        return super().incompatibility(training) or model_incompatibility(
            training.model, training.spec.precision, training.feed.device
        )

    def _compute_losses(self, rows: State, x_KBCHW: Tensor, y_KB: Tensor, draws: noise.Draws) -> Value:
        first, head = self.trainings[0], HeadOnly(self.module)
        criterion = cast(Supervised, first.objective).criterion

        def loss(rows: State, x_BTD: Tensor, y_B: Tensor, draws: noise.Draws) -> Value:
            with noise.use_model_draws(draws):
                return criterion(forward_logits(head, x_BTD, first.spec.precision, rows), y_B)

        x_KBTD = BatchLastForward(head.model, rows, draws).features(x_KBCHW, count_tokens_head_reads(head.model))
        losses: Value = vmap(loss)(head.tensors_of_head(rows), x_KBTD, y_KB, draws)
        return losses

    def _compute_views(self, rows: State, x_BCHW: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        first, head = self.trainings[0], HeadOnly(self.module)
        x_KBTD = BatchLastForward(head.model, rows).features(x_BCHW[None], count_tokens_head_reads(head.model))

        def logits(rows: State, x_BTD: Tensor) -> dict[str, Tensor]:
            return forward_logits(head, x_BTD, first.spec.precision, rows)

        views: dict[str, Tensor] = vmap(logits)(head.tensors_of_head(rows), x_KBTD)
        return views


class HeadOnly(Model):
    """The part of a model after its last block: from tokens (B, T, D) to its output."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = cast(ViT, model)

    def forward(self, x_BTD: Tensor) -> Any:
        return self.model.forward_head(x_BTD)

    def logits_by_head(self, output: Any) -> dict[str, Tensor]:
        return self.model.logits_by_head(output)

    def tensors_of_head(self, rows: State) -> dict[str, Tensor]:
        """Return the tensors of this part by their names here."""
        return {f"model.{name}": row for name, row in rows.items() if name.startswith(("fc_norm.", "head."))}


class Hints(NamedTuple):
    """What a position encoding tells the attention of a block; an axis H of length 1 stands for all heads."""

    rotation: Sequence[Tensor]  #: cosines and sines, each (K, H, E/2, T, 1), or nothing
    bias_KHQS: Tensor | None = None


class BatchLastForward:
    """One forward pass of several ViTs of one shape, for which :func:`model_incompatibility` returns None.

    Args:
        model: One of them.
        rows: Their parameters and buffers; gradients flow to these.
        draws: The sources of their layers' random draws, with the trials on axis 0; None if they draw nothing.
    """

    def __init__(self, model: ViT, rows: State, draws: noise.Draws | None = None) -> None:
        self.model = model
        self.rows = rows
        self.draws = draws
        self.row_K = torch.arange(len(next(iter(rows.values()))))

    def features(self, x_KBCHW: Tensor, tokens: int | None = None) -> Tensor:
        """Return ``forward_features`` of each trial, (K, B, T, D).

        Args:
            x_KBCHW: Images; those that all trials share have an axis 0 of length 1.
            tokens: If given, T is this number of leading tokens, and the last block computes no others.
        """
        x_KDTB = self._add_prefix_tokens(self._embed_patches(x_KBCHW))
        x_KDTB = self._apply_part("norm_pre", self._apply_part("pos_drop", self._apply_position("add", x_KDTB, 0)))
        for layer in range(1, len(self.model.blocks) + 1):
            path, queries = f"blocks.{layer - 1}", tokens if layer == len(self.model.blocks) else None
            x_KDTB = self._apply_position("add", x_KDTB, layer)
            y_KDTB = self._apply_part(f"{path}.norm1", x_KDTB)
            y_KDTB = self._apply_attention(f"{path}.attn", y_KDTB, self._position_hints(layer, queries), queries)
            y_KDTB = self._apply_part(f"{path}.drop_path1", self._apply_part(f"{path}.ls1", y_KDTB))
            x_KDTB = x_KDTB[:, :, :queries] + y_KDTB
            y_KDTB = self._apply_part(f"{path}.mlp", self._apply_part(f"{path}.norm2", x_KDTB))
            x_KDTB = x_KDTB + self._apply_part(f"{path}.drop_path2", self._apply_part(f"{path}.ls2", y_KDTB))
            x_KDTB = self._apply_position("mix", x_KDTB, layer)
        return _to_KBTD(self._apply_part("norm", x_KDTB))

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _embed_patches(self, x_KBCHW: Tensor) -> Tensor:
        """Return the patch tokens (K, D, N, B)."""
        embed = self.model.patch_embed
        trials = len(self.row_K)
        if type(embed) is not patch.LinearPatches:
            return _to_KDTB(
                self._call_vectorised("patch_embed", nn.Module.__call__, x_KBCHW.expand(trials, -1, -1, -1, -1))
            )
        x_KMF = patch.cut_patches(x_KBCHW, embed.proj.kernel_size).flatten(1, 2)
        y_KDM = self._apply_linear("patch_embed.proj", x_KMF.mT.expand(trials, -1, -1))
        return self._apply_part("patch_embed.norm", y_KDM.view(*y_KDM.shape[:2], x_KBCHW.shape[1], -1).transpose(2, 3))

    def _add_prefix_tokens(self, x_KDNB: Tensor) -> Tensor:
        tokens = [self.rows[name] for name in ("cls_token", "dist_token", "reg_token") if name in self.rows]
        prefix = [_to_KBTD(token.expand(-1, x_KDNB.shape[3], -1, -1)) for token in tokens]
        return torch.cat([*prefix, x_KDNB], 2)

    def _apply_position(self, hook: str, x_KDTB: Tensor, layer: int) -> Tensor:
        """Apply ``add`` or ``mix`` of the position encoding to the tokens of a layer."""
        parts = position_encodings_of_model(self.model)
        if all(hook_does_nothing(hook, part, layer) for part in parts):
            return x_KDTB
        return self._apply_tokenwise("position", x_KDTB, lambda part, x_BTD: getattr(part, hook)(x_BTD, layer))

    def _position_hints(self, layer: int, queries: int | None) -> Hints:
        """Return what the position encoding tells the attention of a block."""
        rotation = [
            each[:, None] if each.ndim == 3 else each for each in self._call_rotation_or_bias("rotation", layer)
        ]
        bias = [each_KHTT[:, :, :queries] for each_KHTT in self._call_rotation_or_bias("bias", layer)]
        return Hints([each_KHTP.mT[..., None] for each_KHTP in rotation], *bias)

    def _call_rotation_or_bias(self, hook: str, layer: int) -> Sequence[Tensor]:
        """Return the tensors of ``rotation`` or ``bias`` of the position encoding, with the trials on axis 0."""
        if not any(part.overrides(hook) for part in position_encodings_of_model(self.model)):
            return ()

        def call(part: nn.Module) -> tuple[Tensor, ...]:
            hint = getattr(part, hook)(layer)
            return (hint,) if isinstance(hint, Tensor) else tuple(hint or ())

        return cast("Sequence[Tensor]", self._call_vectorised("position", call))

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _apply_attention(self, path: str, x_KDTB: Tensor, hints: Hints, queries: int | None) -> Tensor:
        attend = cast(softmax.SoftmaxAttention, self.model.get_submodule(path))
        trials, width, tokens, images = x_KDTB.shape
        heads = (attend.num_heads, attend.head_dim)
        rows = _tensors_of_part(path, self.rows)
        # Projections that are several matrices, or without a bias of keys.
        if "qkv.weight" not in attend.stacked_maps() or attend.qkv_bias == "qv":
            rows = vmap(attend.to_canonical)(rows)
        q_KDM, kv_KOM = self._queries_keys_values(rows, x_KDTB, queries)
        q_KHEQB, kv_K2HETB = q_KDM.view(trials, *heads, -1, images), kv_KOM.view(trials, 2, *heads, tokens, images)
        if hints.rotation:
            q_rotation = [each_KHPT1[:, :, :, :queries] for each_KHPT1 in hints.rotation]
            q_KHEQB = Rotate.apply(q_KHEQB[:, None], *q_rotation).squeeze(1)  # type: ignore[no-untyped-call]
            kv_K2HETB = Rotate.apply(kv_K2HETB, *hints.rotation)  # type: ignore[no-untyped-call]
        y_KHEQB: Tensor = Attend.apply(q_KHEQB, kv_K2HETB, hints.bias_KHQS, attend.scale)  # type: ignore[no-untyped-call]
        y_KDM = apply_affine_map(rows["proj.weight"], rows.get("proj.bias"), y_KHEQB.flatten(3).flatten(1, 2))
        return self._apply_part(f"{path}.proj_drop", y_KDM.view(trials, width, -1, images))

    def _queries_keys_values(self, rows: State, x_KDTB: Tensor, queries: int | None) -> Sequence[Tensor]:
        """Return the queries (K, D, Q * B), and keys and values (K, 2 * D, M) of all tokens."""
        weight_KOD, bias_KO = rows["qkv.weight"], rows.get("qkv.bias")
        sizes = [x_KDTB.shape[1], 2 * x_KDTB.shape[1]]
        if queries is None:
            return torch.split(apply_affine_map(weight_KOD, bias_KO, x_KDTB.flatten(2)), sizes, 1)
        weights = torch.split(weight_KOD, sizes, 1)
        biases = (None, None) if bias_KO is None else torch.split(bias_KO, sizes, 1)
        inputs = (x_KDTB[:, :, :queries].flatten(2), x_KDTB.flatten(2))
        return [apply_affine_map(*each) for each in zip(weights, biases, inputs, strict=True)]

    def _apply_mlp(self, path: str, x_KDTB: Tensor) -> Tensor:
        perceive = cast(mlp.GeluMLP, self.model.get_submodule(path))
        hidden_KOM = F.gelu(
            self._apply_linear(f"{path}.fc1", x_KDTB.flatten(2)), approximate=cast(nn.GELU, perceive.act).approximate
        )
        hidden_KOTB = self._apply_part(f"{path}.drop1", hidden_KOM.view(*hidden_KOM.shape[:2], *x_KDTB.shape[2:]))
        y_KDM = self._apply_linear(f"{path}.fc2", self._apply_part(f"{path}.norm", hidden_KOTB).flatten(2))
        return self._apply_part(f"{path}.drop2", y_KDM.view(x_KDTB.shape))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _apply_part(self, path: str, x_KDTB: Tensor) -> Tensor:
        """Apply a part from tokens to tokens, batch-last if it is supported."""
        part = self.model.get_submodule(path)
        if _is_identity(part):
            return x_KDTB
        if type(part) is norm.LayerNorm and f"{path}.bias" in self.rows:
            weight_KD, bias_KD = self.rows[f"{path}.weight"], self.rows[f"{path}.bias"]
            y_KDM: Tensor = Normalise.apply(x_KDTB.flatten(2), weight_KD, bias_KD, part.eps)  # type: ignore[no-untyped-call]
            return y_KDM.view(x_KDTB.shape)
        if type(part) is mlp.GeluMLP and type(part.act) is nn.GELU:
            return self._apply_mlp(path, x_KDTB)
        return self._apply_tokenwise(path, x_KDTB, nn.Module.__call__)

    def _apply_linear(self, path: str, x_KIM: Tensor) -> Tensor:
        return apply_affine_map(self.rows[f"{path}.weight"], self.rows.get(f"{path}.bias"), x_KIM)

    def _apply_tokenwise(self, path: str, x_KDTB: Tensor, call: Call) -> Tensor:
        return _to_KDTB(self._call_vectorised(path, call, _to_KBTD(x_KDTB)))

    def _call_vectorised(self, path: str, call: Call, *inputs: Tensor) -> Any:
        """Call a part of each trial with its own weights, and with inputs that have the trials on axis 0."""
        call_part = PartCall(self.model.get_submodule(path), call)

        def one(row: Tensor, rows: State, draws: noise.Draws | None, *inputs: Tensor) -> Any:
            with noise.use_model_draws(draws) if draws is not None else nullcontext():
                return functional_call(call_part, dict(rows), inputs)

        rows = {f"part.{name}": row for name, row in _tensors_of_part(path, self.rows).items()}
        in_dims = (0, 0, None if self.draws is None else 0, *(0 for _ in inputs))
        return vmap(one, in_dims)(self.row_K, rows, self.draws, *inputs)


def _to_KBTD(x_KDTB: Tensor) -> Tensor:
    """Return (K, D, T, B) as a view (K, B, T, D); the function is its own inverse."""
    return x_KDTB.permute(0, 3, 2, 1)


def _to_KDTB(x_KBTD: Tensor) -> Tensor:
    """Return (K, B, T, D) as a contiguous (K, D, T, B)."""
    return _to_KBTD(x_KBTD).contiguous()


def _tensors_of_part(path: str, rows: State) -> dict[str, Tensor]:
    """Return the tensors of a part by their names in it."""
    return {name.removeprefix(f"{path}."): row for name, row in rows.items() if name.startswith(f"{path}.")}


def _is_identity(part: nn.Module) -> bool:
    """Return True if a part is the identity; derived classes are assumed not to be."""
    if type(part) in (Dropout, DropPath):
        return cast(Any, part).p == 0 or not part.training
    return type(part) in (nn.Identity, norm.NoNorm)


# -- supported models --------------------------------------------------------------------------------------------------


def model_incompatibility(model: Model, precision: str, device: torch.device) -> str | None:
    """Return the reason why a model is not supported, in one sentence; None if it is."""
    if device.type != "cpu":
        return f"engine batch_last runs on CPUs only, and this is {device.type}"
    if precision not in ("fp32", "tf32", "fp64"):
        return f"engine batch_last does not support precision {precision}"
    if type(model) is not ViT:
        return f"a {type(model).__name__} is not supported by engine batch_last"
    if model.patch_drop.p > 0:
        return "patch_drop is not supported by engine batch_last"
    # An objective may read activations of the model, which this engine does not compute by calling its parts.
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in model.modules()):
        return "engine batch_last supports no model with hooks or replaced forward methods"
    for name, block in model.blocks.named_children():
        path = f"blocks.{name}"
        if type(block) is not PreNorm:
            return f"{path} is a {type(block).__name__}, which is not supported by engine batch_last"
        if reason := _attention_incompatibility(f"{path}.attn", block.attn):
            return reason
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


def count_tokens_head_reads(model: ViT) -> int | None:
    """Return how many leading tokens the head reads, if the last block can be computed for these alone.

    Otherwise return None.  The last block has keys and values of all tokens in either case.
    """
    head, last, layer = model.head, cast(PreNorm, model.blocks[-1]), len(model.blocks)
    if type(head) not in (LinearHead, MLPHead, Distilled) or not head.reads:
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
    if any(type(module) not in (*TOKENWISE, LayerScale) for part in parts for module in part.modules()):
        return None
    if not all(hook_does_nothing("mix", part, layer) for part in position_encodings_of_model(model)):
        return None
    return 1 + max(model.geometry.prefix.index(token) for token in head.reads)


def position_encodings_of_model(model: ViT) -> list[Position]:
    """Return the position encodings of a model; a list of a derived class, which may combine them otherwise, is one."""
    whole = model.position
    if any(isinstance(part, Together) and type(part) is not Together for part in whole.modules()):
        return [whole]
    return list(encodings_by_prefix(whole).values())


def hook_does_nothing(hook: str, part: Position, layer: int) -> bool:
    """Return True if an encoding does not override ``hook``, or is a built-in one that does nothing at ``layer``."""
    if not part.overrides(hook):
        return True
    if hook == "add":
        return isinstance(part, Additive) and type(part).add is Additive.add and layer not in part.layers
    return type(part) is Conditional and layer != 1
