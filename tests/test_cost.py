"""Tests of parameters and multiply-accumulates against the published table, the closed form and timm."""

from __future__ import annotations

import pytest
import slot_fixtures
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from vitlab.components.head import Logits
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import UserError
from vitlab.geometry import DataInfo, Geometry
from vitlab.models import Model, model
from vitlab.models.cost import Cost, cost_of, count_macs, count_parameters
from vitlab.models.vit_parts import SIZES

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")

# Name, size, patch, pixels, distilled, parameters to the unit and GMACs as printed (timm, torchvision, the papers).
TABLE = [
    ("vit_tiny_patch16", "Ti", 16, 224, False, 5_717_416, 1.25),
    ("vit_small_patch32", "S", 32, 224, False, 22_878_952, 1.14),
    ("vit_small_patch16", "S", 16, 224, False, 22_050_664, 4.60),
    ("vit_small_patch8", "S", 8, 224, False, 22_055_272, 22.41),
    ("vit_base_patch32", "B", 32, 224, False, 88_224_232, 4.41),
    ("vit_base_patch16", "B", 16, 224, False, 86_567_656, 17.56),
    ("vit_base_patch8", "B", 8, 224, False, 86_576_872, 78.15),
    ("vit_large_patch32", "L", 32, 224, False, 306_535_400, 15.38),
    ("vit_large_patch16", "L", 16, 224, False, 304_326_632, 61.55),
    ("vit_large_patch14", "L", 14, 224, False, 304_203_752, 81.01),
    ("vit_huge_patch14", "H", 14, 224, False, 632_045_800, 167.30),
    ("vit_giant_patch14", "g", 14, 224, False, 1_012_611_432, 267.03),
    ("vit_gigantic_patch14", "G", 14, 224, False, 1_844_440_680, 483.75),
    ("deit_tiny_distilled", "Ti", 16, 224, True, 5_910_800, 1.26),
    ("deit_small_distilled", "S", 16, 224, True, 22_436_432, 4.62),
    ("deit_base_distilled", "B", 16, 224, True, 87_338_192, 17.66),
    ("deit_base_384", "B", 16, 384, False, 86_859_496, 55.48),
]


def formula(g: Geometry, *, hidden: int, classifiers: int = 1) -> Cost:
    """Return the cost of a plain ViT in closed form.

        params = (C p^2 + 1) D + P D + (P + N) D + L (4 D + 4 D^2 + 4 D + 2 D M + M + D) + 2 D + (D + 1) K
        MACs   = N C p^2 D + L (4 T D^2 + 2 T^2 D + 2 T D M) + D K

    with C channels, p^2 pixels of a patch, D width, P prefix tokens, N patches, T = P + N, L blocks, M hidden width of
    the MLP and K classes; a second classifier adds (D + 1) K and D K.

    Args:
        g: sizes; one learned position per token, biases everywhere, a final norm, linear classifiers.
        hidden: hidden width of the MLP.
        classifiers: 2 with a distillation token's own.
    """
    d, n, t, m = g.dim, g.patches, g.tokens, hidden
    pixels = g.channels * g.patch[0] * g.patch[1]
    prefix = len(g.prefix)
    block = 4 * d + 4 * d * d + 4 * d + 2 * d * m + m + d
    body = (pixels + 1) * d + prefix * d + (prefix + n) * d + g.depth * block + 2 * d
    work = n * pixels * d + g.depth * (4 * t * d * d + 2 * t * t * d + 2 * t * d * m) + classifiers * d * g.classes
    return Cost(body + classifiers * (d + 1) * g.classes, body, work)


@pytest.mark.parametrize(("size", "patch", "pixels", "distilled", "params", "gmacs"), [row[1:] for row in TABLE])
def test_sizes_equal_published(size: str, patch: int, pixels: int, distilled: bool, params: int, gmacs: float) -> None:
    data = DataInfo(image=(pixels, pixels), channels=3, classes=1000)
    prefix = ("class", "distillation") if distilled else ("class",)
    cost = cost_of(
        {
            "type": "vit",
            "size": size,
            "patch_size": patch,
            "prefix": list(prefix),
            "head": "distilled" if distilled else "linear",
        },
        data,
    )
    preset = SIZES[size]
    g = Geometry(
        image=data.image,
        channels=3,
        patch=(patch, patch),
        prefix=prefix,
        dim=preset.dim,
        depth=preset.depth,
        heads=preset.heads,
        classes=1000,
    )
    assert cost.params == params
    assert cost == formula(g, hidden=preset.hidden, classifiers=len(prefix))
    assert round(cost.macs / 1e9, 2) == pytest.approx(gmacs, abs=1e-9)


DEIT3 = [
    ("S", 16, 22_059_496, 4.60),
    ("M", 16, 38_849_512, 7.99),
    ("B", 16, 86_585_320, 17.56),
    ("L", 16, 304_374_760, 61.55),
    ("H", 14, 632_126_440, 167.30),
]


@pytest.mark.parametrize(("size", "patch", "params", "gmacs"), DEIT3)
def test_deit3(size: str, patch: int, params: int, gmacs: float) -> None:
    cost = cost_of(
        {
            "type": "vit",
            "size": size,
            "patch_size": patch,
            "layer_scale": 1e-6,
            "position": {"type": "learned", "prefix_rows": "none"},
        },
        DataInfo(image=(224, 224), channels=3, classes=1000),
    )
    assert cost.params == params
    assert round(cost.macs / 1e9, 2) == pytest.approx(gmacs, abs=1e-9)


def test_counting_leaves_cpu_model_unchanged() -> None:
    data = DataInfo(image=(16, 24), channels=1, classes=5)
    built = model.build({"type": "vit", "size": "pico", "patch_size": 4}, data)
    built.train()
    before = {name: value.clone() for name, value in built.state_dict().items()}
    count = count_macs(built, data)
    assert built.training
    assert all(
        value.device.type == "cpu" and torch.equal(value, before[name]) for name, value in built.state_dict().items()
    )
    # By hand: 24 patches, 25 tokens, width 32, 2 blocks, hidden 128.
    assert count == 24 * 16 * 32 + 2 * (4 * 25 * 32 * 32 + 2 * 25 * 25 * 32 + 2 * 25 * 32 * 128) + 32 * 5


@pytest.mark.parametrize("attention", ["auto", "sdpa", "split", "per_head"])
def test_attention_implementations_cost_the_same(attention: str) -> None:
    data = DataInfo(image=(16, 16), channels=3, classes=10)
    usual = cost_of({"type": "vit", "size": "pico", "patch_size": 4, "attention": "explicit"}, data)
    assert cost_of({"type": "vit", "size": "pico", "patch_size": 4, "attention": attention}, data) == usual


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("options", [{}, {"attention": "sdpa", "patch": "conv_stem"}, {"position": "conditional"}])
def test_macs_equal_torchs_counter(device: str, options: dict[str, str]) -> None:
    info = DataInfo(image=(32, 32), channels=3, classes=10)
    net = model.build({"type": "vit", "patch_size": 8, "dim": 12, "depth": 2, "heads": 3, **options}, info).eval()
    x_1CHW = torch.empty((1, 3, 32, 32), device="meta")
    weights = {name: value.to("meta") for name, value in net.state_dict().items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        torch.func.functional_call(net, weights, (x_1CHW,))
    assert count_macs(net.to_empty(device=device), info) == counter.get_total_flops() // 2


@pytest.mark.parametrize("ratio", [1e17, 4e18, 1e20])
def test_model_beyond_64_bits_is_refused_with_sentence(ratio: float) -> None:
    data, mlp = DataInfo(image=(8, 8), channels=1, classes=10), {"type": "gelu", "ratio": ratio}
    with pytest.raises(UserError, match="the model is too large for torch"):
        cost_of({"type": "vit", "patch_size": 2, "dim": 100_000, "depth": 1, "heads": 2, "mlp": mlp}, data)


def test_body_has_no_classifier() -> None:
    costs = [
        cost_of({"type": "vit", "size": "pico", "patch_size": 4}, DataInfo(image=(8, 8), channels=3, classes=classes))
        for classes in (10, 100)
    ]
    assert costs[0].body_params == costs[1].body_params
    assert costs[1].params - costs[0].params == 90 * 33


def test_default_swiglu_costs_as_much_as_plain_mlp() -> None:
    data = DataInfo(image=(32, 32), channels=3, classes=10)
    plain, gated = (
        cost_of({"type": "vit", "dim": 192, "depth": 4, "heads": 3, "patch_size": 4, "mlp": mlp}, data)
        for mlp in ("gelu", "swiglu")
    )
    assert gated.params == pytest.approx(plain.params, rel=0.01)
    assert gated.macs == pytest.approx(plain.macs, rel=0.01)


def test_parameters_equal_timm() -> None:
    theirs = timm.create_model("test_vit", num_classes=1000)
    data = DataInfo(image=(160, 160), channels=3, classes=1000)
    ours = cost_of(
        {"type": "vit", "dim": 64, "depth": 6, "heads": 2, "mlp": {"type": "gelu", "ratio": 3}, "patch_size": 16}, data
    )
    assert isinstance(ours, Cost)
    assert ours.params == count_parameters(theirs) == 371_240


class Flash(Model):
    """One attention over the rows of an image, whose fused kernel is chosen in the forward pass."""

    def __init__(self, data: DataInfo) -> None:
        super().__init__()
        self.head = nn.Linear(data.image[1], data.classes)

    def forward(self, x_BCHW: torch.Tensor) -> Logits:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return Logits(self.head(scaled_dot_product_attention(x_BCHW, x_BCHW, x_BCHW)).mean((1, 2)))


class Drawing(Flash):
    def forward(self, x_BCHW: torch.Tensor) -> Logits:
        return super().forward(x_BCHW + torch.randn((), device=x_BCHW.device))


def test_draws_are_refused_on_meta_alone_and_fused_attention_never(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, model)
    model.register("flash")(Flash)
    model.register("drawing")(Drawing)
    data = DataInfo(image=(8, 16), channels=1, classes=5)
    built = Flash(data)
    linear = 8 * 16 * 5  # torch has no formula for fused attention on CPUs
    assert cost_of("flash", data).macs >= linear and count_macs(built, data) >= linear
    assert count_macs(Drawing(data), data) == count_macs(built, data)
    with pytest.raises(RuntimeError, match="randn draws in evaluation"):
        cost_of("drawing", data)


def test_model_reading_its_own_parameters_costs_nothing() -> None:
    """The operation counter rejects outputs that are views of parameters with gradients."""
    data = DataInfo(image=(16, 16), channels=1, classes=5, task="segmentation")
    cost = cost_of("prior", data)
    assert (cost.params, cost.macs) == (5, 0)
    assert count_macs(model.build("prior", data), data) == 0
