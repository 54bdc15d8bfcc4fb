"""Tests of timm's model as an arm: logits, groups, initial values, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vitlab_timm", reason="pip install -e plugins/vitlab-timm")

from vitlab_timm import Timm

from vitlab import lab
from vitlab.driver.smoke import run_smoke_test
from vitlab.models.contract import names_in_last_layer
from vitlab.models.cost import cost_of
from vitlab.plugin import DataInfo, OptionError, WeightsError, check_component, model, torchvision
from vitlab.runner.models import load_model
from vitlab.spec.trial import InitFrom
from vitlab.store.folders import TrialFolder
from vitlab.weights.transfer import load_and_freeze_weights

torchvision()
import timm  # noqa: E402  # what it imports needs help first
from timm.optim import param_groups_layer_decay  # noqa: E402

STUDY = Path(__file__).parents[1] / "study.yaml"
DATA = DataInfo(image=(32, 48), channels=1, classes=3)
SQUARE = DataInfo(image=(32, 32), channels=1, classes=3)
NETS: list[tuple[str, dict[str, Any]]] = [
    ("test_vit", {}),
    ("test_resnet", {}),
    ("test_convnext", {"drop_path_rate": 0.1}),
]
nets = pytest.mark.parametrize(("name", "options"), NETS)


def built(name: str, info: DataInfo = DATA, seed: int = 0, **more: Any) -> Timm:
    net = model.build({"type": "timm", "name": name, **more}, info)
    assert isinstance(net, Timm)
    net.initialise(seed)
    return net


def theirs(name: str, info: DataInfo = DATA, **more: Any) -> Any:
    size = {"img_size": info.image} if timm.get_pretrained_cfg(name).fixed_input_size else {}
    return timm.create_model(name, num_classes=info.classes, in_chans=info.channels, **size, **more)


def images(info: DataInfo = DATA) -> torch.Tensor:
    return torch.randn(2, info.channels, *info.image, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_contract() -> None:
    check_component("model", "timm")


@pytest.mark.slow
@nets
def test_logits_equal_timm_with_same_weights(name: str, options: dict[str, Any]) -> None:
    mine, other = built(name, options=options).eval(), theirs(name, **options).eval()
    other.load_state_dict(mine.to_canonical(mine.state_dict()))
    with torch.no_grad():
        output = mine(images())
        assert torch.equal(mine.logits_by_head(output)[""], other(images()))
    assert cost_of({"type": "timm", "name": name, "options": options}, DATA).params == sum(
        p.numel() for p in other.parameters()
    )


@nets
def test_initial_values_equal_timm_and_depend_on_seed(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    one, again, other = built(name, options=options), built(name, options=options), built(name, seed=1, options=options)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in one.state_dict().items())
    assert not all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
    one.initialise(0)  # nothing of the generator's state is used up
    torch.manual_seed(7)
    assert torch.equal(before, torch.random.get_rng_state())
    expected, actual = theirs(name, **options).state_dict(), one.to_canonical(one.state_dict())
    for key, value in expected.items():
        if value.numel() > 1000:  # equal distributions
            assert actual[key].float().std().item() == pytest.approx(value.float().std().item(), rel=0.2, abs=1e-6), key


@nets
def test_layers_and_decay_equal_timm(name: str, options: dict[str, Any]) -> None:
    mine, other = built(name, options=options), theirs(name, **options)
    exempt = other.no_weight_decay() if hasattr(other, "no_weight_decay") else ()
    groups = param_groups_layer_decay(other, 0.1, no_weight_decay_list=exempt, layer_decay=0.5)
    names = {id(parameter): key for key, parameter in other.named_parameters()}
    last = max(mine.layer_of(f"net.{key}") for key in names.values())
    for group in groups:
        for parameter in group["params"]:
            key = f"net.{names[id(parameter)]}"
            assert 0.5 ** (last - mine.layer_of(key)) == group["lr_scale"], key
            assert (key in mine.no_weight_decay()) == (group["weight_decay"] == 0), key


@pytest.mark.parametrize(
    "name", ["test_vit", "test_resnet", "test_convnext", "poolformer_s12"]
)  # the last one has no groups
def test_classifier_is_last_layer_and_buffers_follow_parameters(name: str) -> None:
    with torch.device("meta"):
        net = model.build({"type": "timm", "name": name}, DATA)
    assert isinstance(net, Timm) and net.head is not None
    mine = {key for key, value in net.named_parameters() if any(value is p for p in net.head.parameters())}
    assert (
        mine <= names_in_last_layer(net) and len(names_in_last_layer(net)) <= len(mine) + 2
    )  # at most with a norm before it
    for key, _ in net.named_buffers():
        beside = [name for name, _ in net.named_parameters() if name.rpartition(".")[0] == key.rpartition(".")[0]]
        assert {net.layer_of(name) for name in beside} in (set(), {net.layer_of(key)})


def test_frozen_batch_norm_keeps_statistics() -> None:
    net = built("test_resnet")
    net.requires_grad_(False)
    before = {key: value.clone() for key, value in net.named_buffers()}
    net.train()(images())
    assert before and all(torch.equal(value, before[key]) for key, value in net.named_buffers())


def test_weights_are_exchanged_with_vit() -> None:
    info = DataInfo(image=(32, 32), channels=3, classes=3)
    options = {"name": "vit_tiny_patch16_224", "options": {"depth": 2, "patch_size": 8, "embed_dim": 48}}
    mine = model.build({"type": "timm", **options}, info)
    vit = model.build({"type": "vit", "patch_size": 8, "dim": 48, "depth": 2, "heads": 3}, info)
    for seed, (source, target) in enumerate(((vit, mine), (mine, vit))):
        source.initialise(seed)
        target.initialise(seed + 2)
        load_and_freeze_weights(target, source, InitFrom(checkpoint="x.pt", head="keep"))
        logits = [one.logits_by_head(one.eval()(images(info)))[""] for one in (source, target)]
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "path", "sentence"),
    [
        ({"name": "test_vitt"}, ("name",), "timm has no model called 'test_vitt'. Did you mean 'test_vit'"),
        ({"name": "test_vit.r160_in1k"}, ("name",), "name: test_vit and weights: r160_in1k"),
        ({"name": "test_vit", "weights": "r161"}, ("weights",), "no weights 'r161' of test_vit. It has: r160_in1k."),
        ({"options": {"num_classes": 3}}, ("options", "num_classes"), "follows from the data"),
        ({"options": {"pretrained": True}}, ("options", "pretrained"), "not an option of a model"),
        ({"name": "test_vit", "options": {"drop": 0.1}}, ("options",), "unexpected keyword argument 'drop'"),
        ({"name": ["test_vit"]}, ("name",), "must be a text"),
        ({"options": {"depth": {"a": 1}}}, ("options", "depth"), ""),
    ],
)
def test_mistakes_are_reported_with_place(options: dict[str, Any], path: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(OptionError) as caught:
        model.resolve_choice({"type": "timm", **options})
    place, text = caught.value.faults[0]
    assert tuple(place)[: len(path)] == path and sentence in text


@pytest.mark.parametrize(
    ("name", "info", "words"),
    [
        ("vit_tiny_patch16_224", DataInfo(image=(28, 64), channels=1, classes=3), "patches of 16 by 16 do not divide"),
        ("inception_v3", DATA, "cannot be used for 32 by 48 pixels and 1 channels: "),
        ("test_vit", DataInfo(image=(32, 32), channels=1, classes=3, task="segmentation"), "the task is segmentation"),
    ],
)
def test_impossible_model_is_planned_skip(name: str, info: DataInfo, words: str) -> None:
    choice = model.resolve_choice({"type": "timm", "name": name})
    reason = Timm.incompatibility(info, choice.options)
    assert reason is not None and words in reason
    with pytest.raises(OptionError, match=r"cannot be used|one prediction"):
        model.build(choice, info)


# -- weights by name --------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Write weights where Hugging Face's hub caches this name; there is no network."""
    torch.manual_seed(3)
    state: dict[str, torch.Tensor] = timm.create_model("test_resnet").state_dict()
    repo = tmp_path / "models--timm--test_resnet.r160_in1k"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    save_file(state, snapshot / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return state


def test_weights_come_by_name_from_timm_cache(published: dict[str, torch.Tensor]) -> None:
    info = DataInfo(image=(64, 64), channels=3, classes=1000)
    net = built("test_resnet", info, weights="r160_in1k")
    state = net.to_canonical(net.state_dict())
    assert state.keys() == published.keys()
    assert all(torch.equal(state[key], value) for key, value in published.items())


def test_weights_are_adapted_to_channels_and_classes_like_timm(published: dict[str, torch.Tensor]) -> None:
    one, again, other = (built("test_resnet", SQUARE, seed=seed, weights="r160_in1k") for seed in (0, 0, 1))
    head = {f"net.fc.{kind}" for kind in ("weight", "bias")}
    for key, value in one.state_dict().items():
        source = published[key.removeprefix("net.")]
        if key == "net.conv1.0.weight":
            torch.testing.assert_close(value, source.sum(1, keepdim=True))
        elif key not in head:
            assert torch.equal(value, source), key
        assert torch.equal(value, again.state_dict()[key])
        assert key not in head or value.shape[0] == 3
    assert not torch.equal(one.state_dict()["net.fc.weight"], other.state_dict()["net.fc.weight"])


def test_planning_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *_, **__: pytest.fail("fetched"))
    assert cost_of({"type": "timm", "name": "test_vit", "weights": "r160_in1k"}, SQUARE).params > 0


def test_unavailable_weights_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise OSError("no\nroute")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", away)
    net = model.build({"type": "timm", "name": "test_vit", "weights": "r160_in1k"}, DATA)
    with pytest.raises(WeightsError, match=r"timm's weights test_vit.r160_in1k could not be loaded: no route"):
        net.initialise(0)


# -- in a study -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_study_can_be_planned(tmp_path: Path) -> None:
    plan = lab.plan_study(STUDY, out=tmp_path)[1]
    assert len(plan.arms) == 5 and not any(arm.skip for arm in plan.arms)
    assert any("vitlab-timm 0.1.0" in origin for origin in plan.trials[0].trial.origins)


@pytest.mark.slow
def test_two_steps_leave_a_model(tmp_path: Path) -> None:
    assert (
        run_smoke_test(STUDY, out=tmp_path, changes={"run.executor": "inline"}) == 1
    )  # one set of components, five names
    (file,) = tmp_path.glob("trials/*/*/result.json")
    net, _ = load_model(TrialFolder(file.parent))
    assert isinstance(net, Timm)
    expected = theirs("test_vit", DataInfo(image=(32, 32), channels=1, classes=10))
    assert net.to_canonical(net.state_dict()).keys() == expected.state_dict().keys()
