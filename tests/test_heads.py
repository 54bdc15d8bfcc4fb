"""Tests of heads, MLPs and norms against formulas, scipy and torchvision; whole heads are in test_vit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import erf, log_softmax, softmax
from torch import Tensor

from vitlab.components.head import DistilledLogits, Logits
from vitlab.data.torchvision_import import torchvision
from vitlab.geometry import DataInfo, Geometry
from vitlab.models import ViT, model
from vitlab.registry import slot

head = slot("head")
PREFIXES = [(), ("class",), ("class", "distillation"), ("class", "register", "register"), ("register",)]


def geometry(prefix: tuple[str, ...] = ("class",), classes: int = 5) -> Geometry:
    return Geometry(image=(8, 12), channels=3, patch=(4, 4), prefix=prefix, dim=16, depth=1, heads=2, classes=classes)


def tokens(g: Geometry, seed: int = 0) -> Tensor:
    return torch.randn(3, g.tokens, g.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numbers(x: Tensor) -> Any:
    return x.detach().numpy()


# -- pooling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES, ids=str)
def test_mean_of_patches(prefix: tuple[str, ...]) -> None:
    g = geometry(prefix)
    built = head.build({"type": "linear", "pool": "gap"}, g).double()
    x = tokens(g)
    mean = numbers(x)[:, len(prefix) :].mean(1)
    expected = mean @ numbers(built.fc.weight).T + numbers(built.fc.bias)
    np.testing.assert_allclose(numbers(built(x).logits), expected, atol=1e-12)


@pytest.mark.parametrize("prefix", [p for p in PREFIXES if "class" in p], ids=str)
def test_class_token(prefix: tuple[str, ...]) -> None:
    g = geometry(prefix)
    built = head.build("linear", g).double()
    x = tokens(g)
    expected = numbers(x)[:, 0] @ numbers(built.fc.weight).T + numbers(built.fc.bias)
    np.testing.assert_allclose(numbers(built(x).logits), expected, atol=1e-12)


def test_attention_pooling_equals_hand_calculation() -> None:
    """The reference is a query per head and image in numpy."""
    g = geometry()
    built = head.build({"type": "linear", "pool": "map"}, g).double()
    torch.nn.init.normal_(built.attn_pool.latent, generator=torch.Generator().manual_seed(1))
    x, pool = tokens(g), built.attn_pool
    linear = lambda layer, v: v @ numbers(layer.weight).T + numbers(layer.bias)  # noqa: E731
    query = linear(pool.q, numbers(pool.latent)[0, 0])
    for image in range(3):
        keys, values = np.split(linear(pool.kv, numbers(x)[image, 1:]), 2, axis=1)
        gathered = []
        for part in (slice(0, 8), slice(8, 16)):
            weights = softmax(keys[:, part] @ query[part] / np.sqrt(8))
            gathered.append(weights @ values[:, part])
        y = linear(pool.proj, np.concatenate(gathered))
        normed = (y - y.mean()) / np.sqrt(y.var() + 1e-6)
        hidden = linear(pool.mlp.fc1, normed)
        y = y + linear(pool.mlp.fc2, hidden * 0.5 * (1 + erf(hidden / np.sqrt(2))))
        np.testing.assert_allclose(numbers(built(x).logits)[image], linear(built.fc, y), atol=1e-10)


def test_sequence_pooling_equals_formula() -> None:
    g = geometry()
    built, x = head.build({"type": "linear", "pool": "seq"}, g).double(), tokens(g)
    patches = numbers(x)[:, 1:]
    weights = softmax(patches @ numbers(built.score.weight).T + numbers(built.score.bias), 1)
    expected = (weights * patches).sum(1) @ numbers(built.fc.weight).T + numbers(built.fc.bias)
    np.testing.assert_allclose(numbers(built(x).logits), expected, atol=1e-12)


@pytest.mark.parametrize("pool", ["gap", "map", "seq"])
def test_prefix_tokens_are_not_pooled(pool: str) -> None:
    g = geometry(("class", "distillation", "register"))
    built = head.build({"type": "linear", "pool": pool}, g).double()
    x = tokens(g)
    other = x.clone()
    other[:, :3] += 100
    assert torch.equal(built(x).logits, built(other).logits)
    other[:, 3] += 1
    assert not torch.equal(built(x).logits, built(other).logits)


# -- classifiers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 24])
def test_pre_logits_as_in_torchvision(size: int | None) -> None:
    """The whole model with a hidden layer, with weights copied by name."""
    models = torchvision("torchvision.models.vision_transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = models.VisionTransformer(16, 4, 2, 2, 32, 64, num_classes=5, representation_size=size or 32).eval()
        torch.nn.init.normal_(theirs.heads.head.weight)
    options = {"type": "mlp"} if size is None else {"type": "mlp", "representation_size": size}
    ours = model.build(
        {
            "type": "vit",
            "patch_size": 4,
            "dim": 32,
            "depth": 2,
            "heads": 2,
            "mlp": {"type": "gelu", "ratio": 2},
            "head": options,
        },
        DataInfo(image=(16, 16), channels=3, classes=5),
    ).eval()
    renames = {
        "encoder.layers.encoder_layer_": "blocks.",
        "encoder.ln.": "norm.",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj": "attn.proj",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "mlp.0": "mlp.fc1",
        "mlp.3": "mlp.fc2",
        "heads.head": "head",
        "heads.pre_logits": "pre_logits.fc",
        "conv_proj": "patch_embed.proj",
        "encoder.pos_embedding": "pos_embed",
        "class_token": "cls_token",
    }
    state = {}
    for name, value in theirs.state_dict().items():
        for old, new in renames.items():
            name = name.replace(old, new)
        state[name] = value
    ours.load_state_dict(ours.from_canonical(state))
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(x).logits, theirs(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("fusion", ["logits", "softmax", "cls", "dist"])
def test_fusions_of_distilled_pair(fusion: str) -> None:
    g = geometry(("class", "distillation"))
    built = head.build({"type": "distilled", "fusion": fusion}, g).double().eval()
    x = tokens(g)
    out = built(x)
    assert isinstance(out, DistilledLogits)
    cls = numbers(x)[:, 0] @ numbers(built.fc.weight).T + numbers(built.fc.bias)
    dist = numbers(x)[:, 1] @ numbers(built.fc_dist.weight).T + numbers(built.fc_dist.bias)
    np.testing.assert_allclose(numbers(out.cls), cls, atol=1e-12)
    np.testing.assert_allclose(numbers(out.dist), dist, atol=1e-12)
    expected = {
        "logits": (cls + dist) / 2,
        "softmax": np.log((softmax(cls, 1) + softmax(dist, 1)) / 2),
        "cls": cls,
        "dist": dist,
    }
    views = built.logits_by_head(out)
    assert list(views) == ["", "logits", "softmax", "cls", "dist"]
    for name, value in expected.items():
        np.testing.assert_allclose(numbers(views[name]), value, atol=1e-12)
    assert torch.equal(views[""], views[fusion])
    # The training loss must not depend on the output option.
    assert torch.equal(built.train().logits_by_head(out)[""], views["logits"])


def test_late_softmax_fusion_is_distribution_for_large_logits() -> None:
    built = head.build({"type": "distilled", "fusion": "softmax"}, geometry(("class", "distillation"))).eval()
    views = built.logits_by_head(DistilledLogits(torch.tensor([[1e4, 0.0, 0.0]]), torch.tensor([[0.0, 1e4, 0.0]])))
    torch.testing.assert_close(views[""].exp(), torch.tensor([[0.5, 0.5, 0.0]]))


def test_options_that_change_a_metric_are_in_trial_key() -> None:
    plain = head.resolve_choice("distilled").hashed()
    assert head.resolve_choice({"type": "distilled", "fusion": "softmax"}).hashed() != plain, "another val/accuracy"
    assert head.resolve_choice({"type": "distilled", "weights": "zero"}).hashed() != plain
    assert head.resolve_choice("linear").hashed() != head.resolve_choice({"type": "linear", "pool": "gap"}).hashed()


@pytest.mark.parametrize("name", ["linear", "mlp", "distilled", "segmentation"])
def test_zero_head_gives_uniform_prediction(name: str) -> None:
    g = geometry(("class", "distillation"))
    built = head.build({"type": name, "weights": "zero"}, g).double()
    for view in built.logits_by_head(built(tokens(g))).values():
        expected = log_softmax(np.zeros(view.shape), 1)
        np.testing.assert_allclose(log_softmax(numbers(view), 1), expected, atol=1e-12)
    built.logits_by_head(built(tokens(g)))[""].sum().backward()
    assert built.fc.weight.grad.abs().sum() > 0


# -- segmentation -----------------------------------------------------------------------------------------------------


def bilinear(grid: Any, size: tuple[int, int]) -> Any:
    """Interpolate bilinearly per axis, with half-pixel centres and clamped edges."""
    for axis in (0, 1):
        old, new = grid.shape[axis], size[axis]
        place = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = np.floor(place).astype(int)
        high = np.minimum(low + 1, old - 1)
        share = (place - low).reshape([-1 if a == axis else 1 for a in range(grid.ndim)])
        grid = np.take(grid, low, axis) * (1 - share) + np.take(grid, high, axis) * share
    return grid


@pytest.mark.parametrize("prefix", PREFIXES, ids=str)
def test_patch_scores_become_pixel_scores(prefix: tuple[str, ...]) -> None:
    g = geometry(prefix, classes=3)
    built = head.build("segmentation", g).double()
    x = tokens(g)
    out = built(x)
    assert isinstance(out, Logits)
    assert out.logits.shape == (3, 3, 8, 12)
    for image in range(3):
        scores = numbers(x)[image, len(prefix) :] @ numbers(built.fc.weight).T + numbers(built.fc.bias)
        expected = bilinear(scores.reshape(2, 3, 3), (8, 12))
        np.testing.assert_allclose(numbers(out.logits)[image].transpose(1, 2, 0), expected, atol=1e-12)


def test_segmentation_model() -> None:
    data = DataInfo(image=(16, 24), channels=1, classes=4, task="segmentation")
    options = {"patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "registers": 1, "head": "segmentation"}
    built = model.build({"type": "vit", **options}, data)
    built.initialise(0)
    out = built(torch.randn(2, 1, 16, 24))
    assert built.logits_by_head(out)[""].shape == (2, 4, 16, 24)
    F.cross_entropy(built.logits_by_head(out)[""], torch.randint(4, (2, 16, 24))).backward()
    reason = ViT.incompatibility(data, {**options, "head": "linear"})
    assert reason == "head 'linear' is for classification, and the task of the data is segmentation; use another head"


# -- norm between pool and classify -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "mlp", "distilled", "segmentation"])
def test_token_norm_commutes_with_token_selection(name: str) -> None:
    task = "segmentation" if name == "segmentation" else "classification"
    data = DataInfo(image=(8, 8), channels=3, classes=3, task=task)
    outs = []
    for at in ("tokens", "pooled"):
        built = model.build(
            {
                "type": "vit",
                "patch_size": 4,
                "dim": 16,
                "depth": 1,
                "heads": 2,
                "prefix": ["class", "distillation"],
                "head": name,
                "final_norm_at": at,
            },
            data,
        )
        built.initialise(0)
        outs.append(
            built.logits_by_head(built(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))))[""]
        )
    torch.testing.assert_close(outs[0], outs[1])


# -- MLPs and norms ---------------------------------------------------------------------------------------------------


def test_gelu_is_exact_by_default() -> None:
    g = geometry()
    x = tokens(g)
    exact = slot("mlp").build("gelu", g).double()
    rough = slot("mlp").build({"type": "gelu", "approximate": "tanh"}, g).double()
    rough.load_state_dict(exact.state_dict())
    hidden = numbers(exact.fc1(x))
    cubic = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
    for built, gate in ((exact, (1 + erf(hidden / np.sqrt(2))) / 2), (rough, (1 + np.tanh(cubic)) / 2)):
        expected = (hidden * gate) @ numbers(built.fc2.weight).T + numbers(built.fc2.bias)
        np.testing.assert_allclose(numbers(built(x)), expected, atol=1e-12)


def test_swiglu_equals_formula() -> None:
    g = geometry()
    x, built = tokens(g), slot("mlp").build("swiglu", g).double()
    assert built.fc1_g.out_features == int(16 * 8 / 3)
    gate, value = numbers(built.fc1_g(x)), numbers(built.fc1_x(x))
    expected = (gate / (1 + np.exp(-gate)) * value) @ numbers(built.fc2.weight).T + numbers(built.fc2.bias)
    np.testing.assert_allclose(numbers(built(x)), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "none"])
def test_norms_equal_formulas(name: str) -> None:
    g = geometry()
    # Small values show the epsilon, which a test at unit scale would not.
    x, built = tokens(g) * 1e-3, slot("norm").build(name, g.dim).double()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    v = numbers(x)
    if name == "layernorm":
        expected = (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-6)
        expected = expected * numbers(built.weight) + numbers(built.bias)
    elif name == "rmsnorm":
        expected = v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6) * numbers(built.weight)
    else:
        expected = v
    np.testing.assert_allclose(numbers(built(x)), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_epsilon_is_option(name: str) -> None:
    x = torch.full((1, 1, 4), 1e-4, dtype=torch.float64) * torch.tensor([1.0, -1.0, 1.0, -1.0])
    wide, narrow = (slot("norm").build({"type": name, "eps": eps}, 4).double()(x) for eps in (1e-4, 1e-12))
    assert wide.abs().max().item() == pytest.approx(1e-4 / np.sqrt(1e-8 + 1e-4))
    assert narrow.abs().max().item() == pytest.approx(1, abs=1e-3)


def test_norms_in_bf16_and_autocast() -> None:
    for name in slot("norm").names():
        built = slot("norm").build(name, 8)
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = built(x.bfloat16())
        torch.testing.assert_close(out.float(), built(x), atol=0.05, rtol=0.05)
        assert built.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
