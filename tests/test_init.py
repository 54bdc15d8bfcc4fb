"""Tests of initial values: every scheme against its library, and draws that depend on names only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import slot_fixtures
import torch
from scipy import stats
from torch import Tensor, nn

from vitlab.components.attention.softmax import SOFTMAX
from vitlab.data.torchvision_import import torchvision
from vitlab.geometry import DataInfo
from vitlab.models import ViT, model
from vitlab.registry import list_entries, slot

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

DATA = DataInfo(image=(16, 16), channels=3, classes=10)
SMALL = {"dim": 64, "depth": 2, "heads": 4, "patch_size": 4}
THEIRS = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}


def built(seed: int = 0, **options: Any) -> ViT:
    vit = model.build({"type": "vit", **SMALL, **options}, DATA)
    assert isinstance(vit, ViT)
    vit.initialise(seed)
    return vit


def canonical(of: ViT) -> dict[str, Tensor]:
    return of.to_canonical(of.state_dict())


def same_law(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Check equal constants, or draws by the Kolmogorov-Smirnov test and their spread."""
    mine, other = ours.flatten().double(), theirs.flatten().double()
    if other.std() == 0:
        assert torch.equal(mine, other), name
        return
    assert stats.ks_2samp(mine.numpy(), other.numpy()).pvalue > 1e-3, name
    # The deviation of a sample deviation is at most about 1 / sqrt(2 n), for each of the two.
    assert (mine.std() / other.std()).item() == pytest.approx(1, abs=5 / math.sqrt(len(mine))), name
    assert (mine.mean() - other.mean()).abs() < 6 * other.std() / math.sqrt(len(mine)), name


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        same_law(ours[name], theirs[name], name)


@pytest.mark.parametrize(
    ("scheme", "theirs"),
    [
        ("timm", ""),
        ("jax", "jax"),
        ({"type": "jax", "head_bias": -math.log(10)}, "jax_nlhb"),
        ("moco", "moco"),
        ("torch", "reset"),
    ],
    ids=str,
)
@pytest.mark.parametrize("pool", ["cls", "map"])
def test_timm_scheme_equals_timm(scheme: Any, theirs: str, pool: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        reference = VisionTransformer(
            **THEIRS, reg_tokens=4, weight_init=theirs, global_pool="map" if pool == "map" else "token"
        )
    compare(canonical(built(init=scheme, registers=4, head={"type": "linear", "pool": pool})), reference.state_dict())


def test_timm_scheme_equals_timm_for_distilled_model() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        reference = VisionTransformerDistilled(**THEIRS)
    compare(canonical(built(prefix=["class", "distillation"], head="distilled")), reference.state_dict())


def test_deit_draws_wide_tokens() -> None:
    ours = canonical(built(init="deit", prefix=["class", "distillation"], head="distilled", dim=128))
    for name in ("cls_token", "dist_token", "pos_embed", "head.weight", "blocks.0.attn.qkv.weight"):
        assert stats.kstest(ours[name].flatten().numpy(), stats.norm(scale=0.02).cdf).pvalue > 1e-3, name
    for name in ("head.bias", "blocks.1.mlp.fc1.bias", "blocks.1.attn.qkv.bias"):
        assert not ours[name].any(), name


@pytest.mark.parametrize("representation", [None, 48])
def test_torchvision_scheme_equals_torchvision(representation: int | None) -> None:
    models = torchvision("torchvision.models.vision_transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        reference = models.VisionTransformer(16, 4, 2, 4, 64, 256, num_classes=10, representation_size=representation)
    renamed = {}
    for name, value in reference.state_dict().items():
        name = name.replace("encoder.layers.encoder_layer_", "blocks.").replace("encoder.ln.", "norm.")
        name = name.replace("self_attention.in_proj_", "attn.qkv.").replace("self_attention.out_proj", "attn.proj")
        name = name.replace("ln_1", "norm1").replace("ln_2", "norm2").replace("mlp.0", "mlp.fc1")
        name = name.replace("mlp.3", "mlp.fc2").replace("heads.head", "head").replace("conv_proj", "patch_embed.proj")
        name = name.replace("encoder.pos_embedding", "pos_embed").replace("class_token", "cls_token")
        renamed[name.replace("heads.pre_logits", "pre_logits.fc")] = value
    head: Any = "linear" if representation is None else {"type": "mlp", "representation_size": representation}
    compare(canonical(built(init="torchvision", head=head)), renamed)


def test_bounds_of_uniform_draws() -> None:
    moco, torch_ = canonical(built(init="moco")), canonical(built(init="torch"))
    jax = canonical(built(init="jax"))
    for state, name, bound in [
        (moco, "blocks.0.attn.qkv.weight", math.sqrt(6 / (64 + 64))),  # three matrices, not one of 3 x 64 rows
        (jax, "blocks.0.attn.qkv.weight", math.sqrt(6 / (3 * 64 + 64))),
        (moco, "blocks.0.mlp.fc1.weight", math.sqrt(6 / (64 + 256))),
        (torch_, "blocks.0.mlp.fc2.weight", 1 / math.sqrt(256)),
        (torch_, "blocks.0.mlp.fc2.bias", 1 / math.sqrt(256)),
    ]:
        largest = state[name].abs().max().item()
        assert 0.9 * bound < largest <= bound, name
        assert stats.kstest(state[name].flatten().numpy(), stats.uniform(-bound, 2 * bound).cdf).pvalue > 1e-3, name


# -- keys of draws ----------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_values() -> None:
    first = canonical(built(3, layer_scale=0.1))
    torch.rand(17)
    second = built(4, layer_scale=0.1)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1)
    second.initialise(3)
    assert all(torch.equal(first[name], value) for name, value in canonical(second).items())
    other = canonical(built(4, layer_scale=0.1))
    changed = [name for name in first if not torch.equal(first[name], other[name])]
    assert {"blocks.0.attn.qkv.weight", "pos_embed", "cls_token", "patch_embed.proj.bias"} <= set(changed)
    before = torch.get_rng_state()
    second.initialise(5)
    assert torch.equal(before, torch.get_rng_state())


def test_no_two_parameters_share_draws() -> None:
    state = canonical(built())
    twins = [
        (f"blocks.0.{name}", f"blocks.1.{name}") for name in ("attn.qkv.weight", "mlp.fc1.weight", "attn.proj.weight")
    ]
    for one, other in twins:
        correlation = torch.corrcoef(torch.stack([state[one].flatten(), state[other].flatten()]))[0, 1]
        assert correlation.abs() < 5 / math.sqrt(state[one].numel())


IMPLEMENTATIONS = [entry.name for entry in list_entries("attention") if slot("attention").get(entry.name) in SOFTMAX]


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("scheme", ["timm", "moco", "torch"])
def test_arms_with_different_attention_start_as_one_function(attention: str, scheme: str) -> None:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    reference, other = built(1, init=scheme, attention="explicit"), built(1, init=scheme, attention=attention)
    torch.testing.assert_close(other(x).logits, reference(x).logits, atol=1e-5, rtol=0)
    wide, other_wide = reference.double(), other.double()
    wide.initialise(1)
    other_wide.initialise(1)
    torch.testing.assert_close(other_wide(x.double()).logits, wide(x.double()).logits, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"mlp": "swiglu"},
        {"position": "sincos2d"},
        {"head": {"type": "linear", "pool": "gap"}},
        {"registers": 2},
        {"depth": 3},
        {"norm": "rmsnorm"},
        {"patch": {"type": "linear", "bias": False}},
        {"prefix": ["class", "distillation"], "head": "distilled"},
    ],
    ids=str,
)
def test_arms_share_initial_values_of_common_parameters(options: Mapping[str, Any]) -> None:
    base, arm = canonical(built(2)), canonical(built(2, **options))
    shared = [name for name in base if name in arm and base[name].shape == arm[name].shape]
    assert {"cls_token", "blocks.0.attn.qkv.weight", "blocks.1.attn.proj.weight", "head.weight"} <= set(shared)
    for name in shared:
        assert torch.equal(base[name], arm[name]), name


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", slot("init").names())
def test_scale_of_tokens_and_positions(scheme: str) -> None:
    init = {"type": scheme, "token_std": 0.3, "position_std": 0.7}
    state = canonical(built(init=init, registers=60, prefix=["class", "distillation"], head="distilled"))
    assert state["reg_token"].std().item() == pytest.approx(0.3, rel=0.05)
    assert state["cls_token"].std().item() == pytest.approx(0.3, rel=0.4)
    assert state["dist_token"].std().item() == pytest.approx(0.3, rel=0.4)
    assert state["pos_embed"].std().item() == pytest.approx(0.7, rel=0.05)


@pytest.mark.parametrize("scheme", slot("init").names())
@pytest.mark.parametrize("head", ["linear", "mlp", "distilled"])
def test_zero_head_stays_zero(scheme: str, head: str) -> None:
    vit = built(init=scheme, head={"type": head, "weights": "zero"}, prefix=["class", "distillation"])
    views = vit.logits_by_head(vit(torch.randn(2, 3, 16, 16)))
    assert all((view - view[:, :1]).abs().max() < 1e-6 for view in views.values())
    state = canonical(vit)
    assert not state["head.weight"].any()
    assert not state["head.bias"].any()
    if head == "mlp":
        assert state["pre_logits.fc.weight"].any()


def test_layer_scale_and_norms_keep_initial_values() -> None:
    state = canonical(built(layer_scale=1e-4))
    assert torch.equal(state["blocks.1.ls2.gamma"], torch.full((64,), 1e-4))
    assert torch.equal(state["blocks.1.norm2.weight"], torch.ones(64))
    assert torch.equal(state["norm.bias"], torch.zeros(64))


# -- guests -----------------------------------------------------------------------------------------------------------


def test_plugin_with_own_draws_depends_on_seed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlab.components.mlp import MLP

    class Spectral(MLP):
        keeps_init = frozenset({"own.weight"})

        def __init__(self, g: Any) -> None:
            super().__init__()
            self.frequencies = nn.Parameter(torch.randn(g.dim))
            self.register_buffer("phase", torch.rand(g.dim), persistent=False)
            self.own = nn.Linear(g.dim, g.dim)
            nn.init.eye_(self.own.weight)

        def forward(self, x_BTD: Tensor) -> Tensor:
            return self.own(torch.cos(x_BTD * self.frequencies + self.phase))

    slot_fixtures.keep(monkeypatch, slot("mlp"))
    slot("mlp").register("spectral")(Spectral)
    one, again, other = (built(seed, mlp="spectral").blocks[1].mlp for seed in (0, 0, 1))
    assert torch.equal(one.frequencies, again.frequencies)
    assert torch.equal(one.phase, again.phase)
    assert not torch.equal(one.frequencies, other.frequencies)
    assert not torch.equal(one.phase, other.phase)
    assert torch.equal(one.own.weight, torch.eye(64))
    assert not one.own.bias.any()


def test_residual_by_depth_equals_fix_init_of_timm() -> None:
    theirs = VisionTransformer(**THEIRS)
    theirs.load_state_dict(canonical(built()))
    theirs.fix_init_weight()
    ours = canonical(built(init={"type": "timm", "residual": "by_depth"}))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours[name], value, atol=1e-7, rtol=0)
