"""Tests of blocks, attentions, MLPs and norms against timm: with equal weights, equal logits and first gradients.

Weights are paired by name.  Where timm keeps matrices in another form, a function converts them in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlab.data.torchvision_import import torchvision
from vitlab.geometry import DataInfo
from vitlab.models import ViT, model

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")
from timm.layers.diff_attention import DiffAttention  # noqa: E402
from timm.models import vision_transformer as timm_vit  # noqa: E402

DATA = DataInfo(image=(16, 24), channels=3, classes=5)
SMALL = {"type": "vit", "dim": 24, "depth": 2, "heads": 3, "patch_size": 8}
THEIRS = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

State = Mapping[str, Tensor]


class SquaredReLU(nn.ReLU):
    """timm has no such activation; its MLP takes any."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


class GatedAttention(timm.layers.Attention):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, gated=True, **options)


class PreciseDiffAttention(DiffAttention):  # type: ignore[misc]
    """timm's, whose factor is not rounded to float32."""

    def _compute_lambda(self) -> Tensor:
        first = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1))
        second = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dim=-1))
        return first - second + self.lambda_init  # type: ignore[no-any-return]


class DualLambda(DiffAttention):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, dual_lambda=True, **options)


def same(state: State) -> dict[str, Tensor]:
    return dict(state)


def unpacked(state: State) -> dict[str, Tensor]:
    """Return the weights of a ``ParallelScalingBlock`` under our names."""
    out = {}
    for name, value in state.items():
        at, _, rest = name.rpartition(".")
        block, _, layer = at.rpartition(".")
        if layer == "in_proj" or rest == "mlp_bias":
            block = block if layer == "in_proj" else at
            mlp, qkv = value[: 4 * 24], value[4 * 24 :]
            kind = rest if layer == "in_proj" else "bias"
            out[f"{block}.mlp.fc1.{kind}"] = mlp
            if len(qkv):
                out[f"{block}.attn.qkv.{kind}"] = qkv
        else:
            new = {"in_norm": "norm1", "attn_out_proj": "attn.proj", "mlp_out_proj": "mlp.fc2", "ls": "ls1"}
            new |= {"q_norm": "attn.q_norm", "k_norm": "attn.k_norm"}
            out[f"{block}.{new[layer]}.{rest}" if block.startswith("blocks.") else name] = value
    return out


def split_gate(state: State) -> dict[str, Tensor]:
    """Return the weights of MLPs that keep both first matrices in one, the gate last, under our names."""
    out = {}
    for name, value in state.items():
        if ".mlp.fc1." in name:
            linear, gate = value.chunk(2)
            out |= {name.replace("fc1", "fc1_x"): linear, name.replace("fc1", "fc1_g"): gate}
        else:
            out[name] = value
    return out


@dataclass(frozen=True)
class Pair:
    """One model in our options and in timm's."""

    name: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    convert: Callable[[State], dict[str, Tensor]] = same

    def __str__(self) -> str:
        return self.name


NO_BIAS = {
    "attention": {"type": "explicit", "qkv_bias": False, "proj_bias": False},
    "mlp": {"type": "gelu", "bias": False},
}

PAIRS = [
    Pair("prenorm", {"block": "prenorm", "layer_scale": 0.1}, {"init_values": 0.1}),
    Pair("respostnorm", {"block": "respostnorm"}, {"block_fn": timm_vit.ResPostBlock}),
    Pair("parallel", {"block": "parallel"}, {"block_fn": timm_vit.ParallelScalingBlock}, unpacked),
    Pair(
        "parallel, qk norm, layer scale, no qkv bias",
        {
            "block": "parallel",
            "layer_scale": 0.1,
            "attention": {"type": "explicit", "qk_norm": "layernorm", "qkv_bias": False},
        },
        {"block_fn": timm_vit.ParallelScalingBlock, "init_values": 0.1, "qk_norm": True, "qkv_bias": False},
        unpacked,
    ),
    Pair("parallel things", {"block": "parallel_things"}, {"block_fn": timm_vit.ParallelThingsBlock}),
    Pair(
        "three parallel things, layer scale, three matrices",
        {"block": {"type": "parallel_things", "number": 3}, "layer_scale": 0.1, "attention": "split"},
        {"block_fn": partial(timm_vit.ParallelThingsBlock, num_parallel=3), "init_values": 0.1},
    ),
    Pair("no bias but in norms and patches", NO_BIAS, {"qkv_bias": False, "proj_bias": False}),
    Pair(
        "scale norms",
        {"attention": {"type": "split", "norm": "layernorm"}, "mlp": {"type": "gelu", "norm": "layernorm"}},
        {"scale_attn_norm": True, "scale_mlp_norm": True},
    ),
    Pair(
        "geglu with a norm",
        {"mlp": {"type": "geglu", "ratio": 4.0, "norm": "layernorm"}},
        {"mlp_layer": timm.layers.SwiGLU, "scale_mlp_norm": True},
    ),
    Pair(
        "swiglu without bias",
        {"mlp": {"type": "swiglu", "ratio": 4.0, "bias": False}, "attention": {"type": "auto", "proj_bias": False}},
        {"mlp_layer": timm.layers.SwiGLU, "act_layer": "silu", "proj_bias": False},
    ),
    Pair("packed geglu", {"mlp": {"type": "geglu", "ratio": 2.0}}, {"mlp_layer": timm.layers.GluMlp}, split_gate),
    Pair(
        "relu2",
        {"mlp": {"type": "relu2"}},
        {"act_layer": SquaredReLU},
    ),
    Pair("gated", {"attention": "gated"}, {"attn_layer": GatedAttention}),
    Pair(
        "gated with norms",
        {"attention": {"type": "gated", "qk_norm": "layernorm", "norm": "layernorm", "qkv_bias": False}},
        {"attn_layer": GatedAttention, "qk_norm": True, "scale_attn_norm": True, "qkv_bias": False},
    ),
    Pair("differential", {"attention": "differential"}, {"attn_layer": PreciseDiffAttention}),
    Pair(
        "differential of two numbers, with norms",
        {
            "attention": {
                "type": "differential",
                "factor": "numbers",
                "qk_norm": "layernorm",
                "norm": "layernorm",
                "proj_bias": False,
            },
            "mlp": {"type": "gelu", "bias": False},
        },
        {"attn_layer": DualLambda, "qk_norm": True, "scale_attn_norm": True, "proj_bias": False},
    ),
]


def built(pair: Pair, dtype: torch.dtype) -> tuple[ViT, nn.Module]:
    """Return our model and timm's with equal weights, which are random because zeros and ones hide errors."""
    with torch.random.fork_rng(devices=[]):
        theirs = timm_vit.VisionTransformer(**{**THEIRS, **pair.theirs})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn(parameter.shape, generator=generator))
    ours = model.build({**SMALL, **pair.ours}, DATA)
    assert isinstance(ours, ViT)
    converted = pair.convert(theirs.state_dict())
    assert converted.keys() == ours.to_canonical(ours.state_dict()).keys()
    ours.load_state_dict(ours.from_canonical(converted))
    return ours.to(dtype).eval(), theirs.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_logits_and_first_gradients_equal_timm(pair: Pair, dtype: torch.dtype) -> None:
    ours, theirs = built(pair, dtype)
    x_BCHW = torch.randn(2, 3, *DATA.image, generator=torch.Generator().manual_seed(1)).to(dtype)
    y_B = torch.tensor([1, 4])
    mine, other = ours.logits_by_head(ours(x_BCHW))[""], theirs(x_BCHW)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    for logits in (mine, other):
        nn.functional.cross_entropy(logits, y_B).backward()
    gradients = ours.to_canonical({name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
    expected = pair.convert({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance)
    decayed = {name for name, _ in ours.named_parameters()} - ours.no_weight_decay()
    vectors = [name for name, p in ours.named_parameters() if p.ndim <= 1 or name.endswith("bias")]
    assert not decayed & set(vectors)
