"""Tests of convolutional networks against torchvision, published numbers, and hand calculation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import run_trial
from torch import Tensor, nn

from vitlab import noise
from vitlab.data.torchvision_import import torchvision
from vitlab.geometry import DataInfo
from vitlab.models import model
from vitlab.models.convnet import ConvNet, RegNetY16GF
from vitlab.models.cost import cost_of
from vitlab.planning.values import Trial
from vitlab.runner.job import Settings
from vitlab.runner.models import load_model
from vitlab.spec import STREAMS, TrialSpec
from vitlab.spec.trial import InitFrom
from vitlab.store.folders import TrialFolder
from vitlab.training import artifacts
from vitlab.weights.transfer import load_and_freeze_weights

NAMES = ("resnet18", "resnet50", "regnet_y_16gf")
models = torchvision("torchvision.models")


def data(side: int = 32, channels: int = 3, classes: int = 10) -> DataInfo:
    return DataInfo(image=(side, side), channels=channels, classes=classes)


def built(choice: Any, info: DataInfo, seed: int = 0) -> ConvNet:
    net = model.build(choice, info)
    assert isinstance(net, ConvNet)
    net.initialise(seed)
    return net


def images(info: DataInfo, batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, info.channels, *info.image, generator=torch.Generator().manual_seed(seed))


class RegNetY400MF(RegNetY16GF):
    """A small member of the family, for tests that do not depend on the size."""

    depths = (1, 3, 6, 6)
    widths = (48, 104, 208, 440)
    group_width = 8


def theirs_and_ours(name: str, classes: int = 10) -> tuple[nn.Module, ConvNet]:
    """Return torchvision's model with trained running statistics, and ours with the same state; in double."""
    torch.manual_seed(0)
    theirs: nn.Module = getattr(models, name)(num_classes=classes)
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.2, 0.6)
    info = data(classes=classes)
    ours = RegNetY400MF(info) if name == "regnet_y_400mf" else model.build(name, info)
    assert isinstance(ours, ConvNet)
    ours.load_state_dict(ours.from_canonical(theirs.state_dict()))
    return theirs.double(), ours.double()


# -- torchvision's ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "regnet_y_400mf"])
def test_logits_equal_torchvision(name: str) -> None:
    theirs, ours = theirs_and_ours(name)
    x = images(data(40)).double()
    with torch.no_grad():
        expected, actual = theirs.eval()(x), ours.eval()(x)
    assert ours.logits_by_head(actual).keys() == {""}
    assert expected.std() > 1e-3
    torch.testing.assert_close(actual.logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_training_step_equals_torchvision() -> None:
    theirs, ours = theirs_and_ours("resnet18")
    x = images(data()).double()
    for net in (theirs, ours):
        out = net.train()(x)
        torch.autograd.backward(getattr(out, "logits", out).square().sum())
    expected, actual = theirs.state_dict(), ours.state_dict()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-9)
    for (name, one), (other, two) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other and one.grad is not None and two.grad is not None
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_names_shapes_and_order_equal_torchvision(name: str) -> None:
    with torch.device("meta"):
        ours = model.build(name, data(224, classes=1000)).state_dict()
    theirs = getattr(models, name)().state_dict() if name != "regnet_y_16gf" else _regnet_on_meta()
    assert [(key, value.shape) for key, value in ours.items()] == [(key, value.shape) for key, value in theirs.items()]


def _regnet_on_meta() -> dict[str, Tensor]:
    regnet = torchvision("torchvision.models.regnet")
    params = regnet.BlockParams.from_init_params(
        depth=18, w_0=200, w_a=106.23, w_m=2.48, group_width=112, se_ratio=0.25
    )
    with torch.device("meta"):
        state: dict[str, Tensor] = regnet.RegNet(params).state_dict()
    return state


@pytest.mark.parametrize(
    ("name", "weights", "params", "gmacs"),
    [
        ("resnet18", "ResNet18_Weights", 11_689_512, 1.81),
        ("resnet50", "ResNet50_Weights", 25_557_032, 4.09),
        ("regnet_y_16gf", "RegNet_Y_16GF_Weights", 83_590_140, 15.91),
    ],
)
def test_costs_equal_published(name: str, weights: str, params: int, gmacs: float) -> None:
    published = getattr(models, weights).IMAGENET1K_V1.meta
    cost = cost_of(name, data(224, classes=1000))
    assert cost.params == params == published["num_params"]
    assert round(cost.macs / 1e9, 2) == gmacs
    assert cost.macs / 1e9 == pytest.approx(published["_ops"], abs=1e-3)
    assert cost.body_params == cost_of(name, data(224, classes=7)).body_params < cost.params


# -- stems and widths -------------------------------------------------------------------------------------------------


def test_costs_equal_hand_calculation() -> None:
    """ResNet-8: 28, 14 and 7 positions a side; 16, 32 and 64 channels."""
    macs = (
        28**2 * 9 * (1 * 16 + 2 * 16 * 16)
        + 14**2 * (9 * (16 * 32 + 32 * 32) + 16 * 32)
        + 7**2 * (9 * (32 * 64 + 64 * 64) + 32 * 64)
        + 64 * 10
    )
    norms = 2 * (3 * 16 + 3 * 32 + 3 * 64)
    kernels = 9 * (16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 16 * 32 + 32 * 64
    cost = cost_of("resnet8", data(28, channels=1))
    assert (cost.params, cost.macs) == (kernels + norms + 65 * 10, macs)
    assert cost.body_params == kernels + norms


def test_resnet18_for_cifar_costs_equal_usual_figure() -> None:
    """The usual adaptation of ResNet-18 to 32 by 32 pixels has 11,173,962 parameters and 0.56 GMACs."""
    cost = cost_of({"type": "resnet18", "stem": "small"}, data(32))
    assert cost.params == 11_173_962
    assert round(cost.macs / 1e9, 2) == 0.56


@pytest.mark.parametrize(
    ("choice", "side", "channels", "last"),
    [
        ({"type": "resnet8"}, 28, 1, 7),
        ({"type": "resnet8", "stem": "imagenet"}, 28, 1, 2),
        ({"type": "resnet8", "width_factor": 0.5}, 8, 3, 2),
        ({"type": "resnet18", "stem": "small", "width_factor": 0.25}, 28, 1, 4),
        ({"type": "resnet18", "stem": "small", "width_factor": 0.25}, 8, 3, 1),
        ({"type": "resnet50", "stem": "small", "width_factor": 0.125}, 28, 3, 4),
        ({"type": "resnet18", "width_factor": 0.25}, 28, 1, 1),
    ],
)
def test_small_images(choice: dict[str, Any], side: int, channels: int, last: int) -> None:
    info = data(side, channels)
    net = built(choice, info)
    sizes = []
    net.get_submodule("avgpool").register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[-2:]))
    logits = net(images(info)).logits
    assert sizes == [(last, last)] and logits.shape == (3, 10) and bool(logits.isfinite().all())
    assert net.get_parameter("conv1.weight").shape[1] == channels


def test_small_regnet_stem_keeps_size() -> None:
    with torch.device("meta"):
        net = model.build({"type": "regnet_y_16gf", "stem": "small"}, data(28, channels=1))
        assert net.get_submodule("stem")(torch.empty(2, 1, 28, 28)).shape == (2, 32, 28, 28)
        assert net(torch.empty(2, 1, 28, 28)).logits.shape == (2, 10)


def test_oblong_images() -> None:
    info = DataInfo(image=(12, 20), channels=3, classes=4)
    assert built("resnet8", info)(images(info)).logits.shape == (3, 4)


def test_width_scales_every_channel() -> None:
    with torch.device("meta"):
        usual, narrow = (model.build({"type": "resnet50", "width_factor": w}, data()) for w in (1, 0.25))
    for (name, one), (_, two) in zip(usual.named_parameters(), narrow.named_parameters(), strict=True):
        into = 1 if name == "conv1.weight" else 4
        out = 1 if name.startswith("fc.") else 4
        factors = (out, into, 1, 1)[: one.ndim]
        assert tuple(one.shape) == tuple(f * n for f, n in zip(factors, two.shape, strict=True)), name


@pytest.mark.parametrize(
    ("name", "stem", "least"),
    [
        ("resnet8", "small", 3),
        ("resnet8", "imagenet", 9),
        ("resnet18", "small", 5),
        ("resnet18", "imagenet", 17),
        ("resnet50", "imagenet", 17),
        ("regnet_y_16gf", "small", 9),
        ("regnet_y_16gf", "imagenet", 17),
    ],
)
def test_too_small_images_are_refused(name: str, stem: str, least: int) -> None:
    choice = model.resolve_choice({"type": name, "stem": stem})
    component: Any = choice.component
    assert component.incompatibility(data(least), choice.options) is None
    reason = component.incompatibility(DataInfo(image=(64, least - 1), channels=3, classes=10), choice.options)
    assert reason is not None and f"64 by {least - 1} pixels" in reason and f"at least {least} a side" in reason
    assert "too few" in component.incompatibility(data(least - 1), choice.options)


def test_refusal_names_alternative() -> None:
    choice = model.resolve_choice("resnet18")
    component: Any = choice.component
    assert component.incompatibility(data(8), choice.options).endswith("; stem: small takes 5")
    assert "stem" not in component.incompatibility(data(4), choice.options)
    segmentation = DataInfo(image=(32, 32), channels=3, classes=10, task="segmentation")
    assert "segmentation" in component.incompatibility(segmentation, choice.options)


def test_layers_for_layer_decay() -> None:
    with torch.device("meta"):
        resnet, regnet = (model.build(name, data()) for name in ("resnet50", "regnet_y_16gf"))
    assert [
        resnet.layer_of(n) for n in ("conv1.weight", "bn1.bias", "layer1.0.conv1.weight", "layer1.2.bn3.weight")
    ] == [
        0,
        0,
        1,
        3,
    ]
    assert resnet.layer_of("layer2.0.downsample.0.weight") == 4
    assert resnet.layer_of("layer4.2.bn1.running_mean") == 16 and resnet.layer_of("fc.bias") == 17
    assert [regnet.layer_of(f"trunk_output.block3.block3-{i}.f.a.0.weight") for i in (0, 1, 10)] == [7, 8, 17]
    assert regnet.layer_of("stem.0.weight") == 0 and regnet.layer_of("fc.weight") == 19
    assert resnet.no_weight_decay() == {n for n, p in resnet.named_parameters() if p.ndim == 1}
    assert not resnet.vmap_safe


def test_initial_values_depend_on_name_and_seed() -> None:
    usual, small = (
        built({"type": "resnet18", "stem": stem, "width_factor": 0.25}, data()) for stem in ("imagenet", "small")
    )
    one, two = usual.state_dict(), small.state_dict()
    assert one.keys() == two.keys()
    assert {name for name in one if one[name].shape != two[name].shape or not one[name].equal(two[name])} == {
        "conv1.weight"
    }
    generator = torch.Generator().manual_seed(noise.key(0, "init", "layer1.1.conv2.weight"))
    weight = torch.randn(16, 16, 3, 3, generator=generator) * (2 / (16 * 9)) ** 0.5
    torch.testing.assert_close(one["layer1.1.conv2.weight"], weight)
    fresh = {name: value.clone() for name, value in one.items()}
    usual(images(data()))
    assert not usual.state_dict()["bn1.running_mean"].equal(fresh["bn1.running_mean"])
    usual.initialise(0)
    assert all(value.equal(fresh[name]) for name, value in usual.state_dict().items())
    usual.initialise(1)
    assert not usual.state_dict()["fc.weight"].equal(fresh["fc.weight"])


@pytest.mark.parametrize("name", ["resnet18", "regnet_y_400mf"])
def test_initial_values_are_distributed_like_torchvision(name: str) -> None:
    _, ours = theirs_and_ours(name, classes=100)
    ours.initialise(0)
    torch.manual_seed(0)
    theirs = getattr(models, name)(num_classes=100)
    for (key, expected), actual in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        if expected.std() == 0:
            assert actual.equal(expected.double()), key
        elif expected.numel() >= 2000:
            assert actual.std().item() == pytest.approx(expected.std().item(), rel=0.1), key
            assert actual.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.5), key
        else:
            assert bool(actual.isfinite().all()) and 0.5 < actual.std() / expected.std() < 2, key


def test_frozen_body_keeps_statistics() -> None:
    info = data(8)
    net, source = built("resnet8", info), built("resnet8", data(8, classes=3), seed=1)
    source.train()(images(info))
    load_and_freeze_weights(net, source, InitFrom.model_validate({"checkpoint": "x", "head": "new", "freeze": "body"}))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    torch.autograd.backward(net(images(info)).logits.square().sum())
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    assert before["bn1.running_mean"].equal(source.state_dict()["bn1.running_mean"])
    assert {name for name, p in net.named_parameters() if p.grad is not None} == {"fc.weight", "fc.bias"}
    assert net.training and net.fc.training


# -- in a trial -------------------------------------------------------------------------------------------------------


def trial(**choice: Any) -> Trial:
    spec = {
        "data": {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 4},
        "model": {"type": "resnet8", "width_factor": 0.5, **choice},
        "train": {
            "steps": 20,
            "batch_size": 16,
            "evaluations": 4,
            "optimizer": {"type": "adamw", "lr": 0.01},
            "schedule": "cosine",
            "loss": "cross_entropy",
        },
    }
    return Trial(TrialSpec.model_validate(spec), dict.fromkeys(STREAMS, 0), (), None, key="key")


def stopping_after(steps: int) -> Any:
    countdown = iter(range(steps))
    return lambda: next(countdown, None) is None


def test_resume_equals_uninterrupted_bitwise(tmp_path: Path) -> None:
    straight, stopped = TrialFolder(tmp_path / "straight"), TrialFolder(tmp_path / "stopped")
    expected = run_trial(trial(), straight, Settings())
    assert expected is not None and expected.status == "done"
    for _ in range(2):
        assert run_trial(trial(), stopped, Settings(), stop=stopping_after(7)) is None
    actual = run_trial(trial(), stopped, Settings())
    assert actual is not None and actual.outcome == expected.outcome and actual.circumstances.attempts == 3
    assert stopped.weights_file.read_bytes() == straight.weights_file.read_bytes()
    assert expected.outcome.metrics["val/accuracy"] > 0.5  # it learns: chance is 0.25
    assert expected.circumstances.macs == cost_of(trial().spec.plain()["model"], data(8, 1, 4)).macs
    net, _ = load_model(stopped)
    state = net.state_dict()
    assert state["bn1.num_batches_tracked"].item() == 20
    assert not net.training and state["bn1.running_mean"].abs().max() > 0


def test_checkpoint_keeps_buffers_bitwise(tmp_path: Path) -> None:
    info = data(8)
    net = built("resnet8", info)
    for seed in range(3):
        net.train()(images(info, seed=seed))
    artifacts.make_checkpoint_writer(tmp_path, {"model": net.state_dict()})()
    actual = artifacts.clean_up_and_read_checkpoint(tmp_path)
    assert actual is not None and actual["model"].keys() == net.state_dict().keys()
    for name, value in net.state_dict().items():
        assert actual["model"][name].dtype == value.dtype and actual["model"][name].equal(value), name
    assert actual["model"]["layer3.0.bn2.num_batches_tracked"].equal(torch.tensor(3))


NARROW = """
import torch
from torch.nn.functional import cross_entropy
from vitlab.geometry import DataInfo
from vitlab.models import model
torch.set_num_threads(1)
network = model.build({"type": "resnet8", "width_factor": 0.25}, DataInfo(image=(8, 8), channels=1, classes=10))
network.initialise(0)
x_BCHW, y_B = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
for _ in range(100):
    cross_entropy(network(x_BCHW).logits, y_B).backward()
"""


@pytest.mark.slow
def test_narrow_network_trains_without_corrupting_memory() -> None:
    """Uses four channels; glibc aborts the process when the heap is damaged."""
    environment = {**os.environ, "MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    done = subprocess.run([sys.executable, "-c", NARROW], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
