"""Tests of the maximal update parametrization, arXiv:2203.03466."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_cli import call
from test_engines import DATA, MODEL, TRAIN, training

from vitlab.data.prepare import data_info
from vitlab.driver.coordinates import Coordinates, measure_changes_by_width
from vitlab.errors import OptionError
from vitlab.geometry import DataInfo
from vitlab.planning.resolve import Faults, Resolver
from vitlab.registry import slot
from vitlab.spec import TrialSpec
from vitlab.spec.trial import InitFrom
from vitlab.training.evaluation import forward_logits
from vitlab.training.loop import Training
from vitlab.weights.transfer import load_and_freeze_weights

INFO = DataInfo(image=(8, 8), channels=1, classes=6)


FAST = {"optimizer": {"type": "adamw", "lr": 1e-2}, "schedule": "constant"}


def model_of_width(width: int, parametrization: str) -> dict[str, Any]:
    return {"dim": width, "heads": 4, "drop": 0.0, "drop_path": 0.0, "parametrization": parametrization}


def of_width(width: int, parametrization: str, seed: int = 0, **options: Any) -> Training:
    model = {**model_of_width(width, parametrization), **options.pop("model", {})}
    return training(seed, model=model, **{**FAST, **options})


@pytest.mark.slow
def test_coordinates_do_not_grow_with_width() -> None:
    """Coordinate check, appendix D.1: mean absolute changes of attentions and MLPs after four steps, at two widths."""
    spreads = {}
    for parametrization in ("standard", "mup"):
        specs = {
            width: TrialSpec.model_validate(
                {"data": DATA, "model": {**MODEL, **model_of_width(width, parametrization)}, "train": TRAIN | FAST}
            )
            for width in (16, 256)
        }
        changes = measure_changes_by_width(specs, 3, steps=4)
        of_blocks = [by_width for layer, by_width in changes.items() if layer.startswith("blocks")]
        assert len(of_blocks) == 4 and "logits" in changes
        sizes = [sum(by_width[width] for by_width in of_blocks) for width in (16, 256)]
        spreads[parametrization] = max(sizes) / min(sizes)
    assert spreads["mup"] < 1.5
    assert spreads["standard"] > 20


@pytest.mark.parametrize("change", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("width", [32, 64])
def test_diverged_width_is_beyond_every_factor(change: float, width: int) -> None:
    one = Coordinates("mup", {"blocks.0.attn": {32: 0.1, 64: 0.1}, "logits": {32: 0.1, 64: 0.1, width: change}})
    assert one.worst == "logits" and one.ratio("logits") == math.inf
    assert one.describe_width_dependence(2).startswith("mup: beyond the factor 2")


@pytest.mark.parametrize("attention", ["explicit", "split", "per_head", "sdpa"])
def test_initial_values_rates_and_decay_follow_table_3(attention: str) -> None:
    wide, usual = (of_width(256, kind, model={"attention": attention}) for kind in ("mup", "standard"))
    growth = 256 / 64
    state, other = (one.model.to_canonical(one.model.state_dict()) for one in (wide, usual))
    for name, value in other.items():
        is_hidden = name.startswith("blocks") and value.ndim == 2
        factor = growth**-0.5 if is_hidden else 1 / growth if name == "head.weight" else 1.0
        torch.testing.assert_close(state[name], value * factor, rtol=1e-6, atol=0)
    names = {id(parameter): name for name, parameter in wide.model.named_parameters()}
    for group in wide.optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            is_scaled = parameter.ndim == 2 and (name.startswith("blocks") or name.startswith("head"))
            assert group.get("lr_scale", 1.0) == (1 / growth if is_scaled else 1.0), name
            if is_scaled:
                assert group["weight_decay"] == pytest.approx(0.05 * growth)
    head_dim, base_head_dim = 256 // 4, 64 // 4
    scale = wide.model.blocks[0].attn.scale  # type: ignore[union-attr,index]
    assert scale == pytest.approx(math.sqrt(base_head_dim) / head_dim)


def test_kernels_agree_on_scale_of_attention() -> None:
    x_BCHW = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = []
    for attention in ("explicit", "sdpa", "auto", "split", "per_head"):
        model = of_width(32, "mup", model={"attention": attention}).model.double().eval()
        model.load_state_dict({name: value * 5 for name, value in model.state_dict().items()})
        logits.append(forward_logits(model, x_BCHW, "fp64")[""])
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-10, atol=1e-12)


def test_base_width_equals_standard_bitwise() -> None:
    base, usual = of_width(64, "mup"), of_width(64, "standard")
    for one in (base, usual):
        one.train_step()
    for name, value in usual.model.state_dict().items():
        assert torch.equal(base.model.state_dict()[name], value)


@pytest.mark.parametrize("init", slot("init").names())
@pytest.mark.parametrize("patch", ["linear", "conv_stem"])
def test_hidden_deviation_falls_as_root_of_inputs_in_every_scheme(init: str, patch: str) -> None:
    options = {"patch_size": 4, "depth": 1, "heads": 4, "init": init, "patch": patch, "parametrization": "mup"}
    deviations = []
    for width in (64, 256):
        model = slot("model").build({"type": "vit", "dim": width, **options}, INFO)
        model.initialise(0)
        deviations.append(float(model.blocks[0].mlp.fc1.weight.detach().std()))
    assert deviations[0] / deviations[1] == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("init", ["timm", "deit", "moco", "torch"])  # jax and torchvision start the head at 0
@pytest.mark.parametrize("classes", [50, 1000])
def test_deviation_of_output_falls_as_inputs_in_every_scheme(init: str, classes: int) -> None:
    """A Xavier deviation depends on the outputs, too, whose number does not grow."""
    data = dataclasses.replace(INFO, classes=classes)
    options = {"patch_size": 4, "depth": 1, "heads": 4, "init": init, "parametrization": "mup"}
    deviations = []
    for width in (64, 512):
        model = slot("model").build({"type": "vit", "dim": width, **options}, data)
        model.initialise(0)
        deviations.append(float(model.head.fc.weight.detach().double().std()))
    assert deviations[0] / deviations[1] == pytest.approx(8, rel=0.03)


def test_impossible_combinations_are_refused() -> None:
    def build(**options: Any) -> None:
        slot("model").build({"type": "vit", "patch_size": 4, "dim": 36, "parametrization": "mup", **options}, INFO)

    with pytest.raises(OptionError, match="base_width 64 is not a multiple of heads 3"):
        build(heads=3)
    with pytest.raises(OptionError, match="needs scaled dot-product attention"):
        build(heads=4, attention="linear")
    options = {"patch_size": 4, "dim": 36, "heads": 3, "parametrization": "mup"}
    reason = slot("model").get("vit").incompatibility(INFO, options)
    assert reason == "parametrization mup: base_width 64 is not a multiple of heads 3; set a multiple"
    identity = slot("model").resolve_choice({"type": "vit", "patch_size": 4}).hashed()
    assert "depth" in identity and "parametrization" not in identity and "base_width" not in identity


def build(**options: Any) -> Any:
    sizes = {"patch_size": 4, "dim": 32, "depth": 1, "heads": 4}
    return slot("model").build({"type": "vit", **sizes, "parametrization": "mup", **options}, INFO)


def test_model_can_be_copied_and_pickled() -> None:
    model = build()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.rate_factors() == model.rate_factors() != {}
        other.initialise(0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"head": {"type": "linear", "pool": "map"}}, "pool 'map' of head 'linear' by its root"),
        ({"head": {"type": "mlp", "pool": "prr"}}, "pool 'prr' of head 'mlp' by its root"),
        ({"dim": 12, "heads": 3, "base_width": 6, "position": "sincos2d"}, "a model of base_width 6 too: "),
        ({"dim": 12, "heads": 3, "base_width": 9, "position": "rope2d"}, "a model of base_width 9 too: "),
    ],
)
def test_parts_that_do_not_scale_are_refused_at_planning(options: dict[str, Any], sentence: str) -> None:
    own = {"patch_size": 4, "dim": 32, "heads": 4, **options}
    reason = slot("model").get("vit").incompatibility(INFO, {**own, "parametrization": "mup"})
    assert reason is not None and sentence in reason
    assert slot("model").get("vit").incompatibility(INFO, own) is None


@pytest.mark.parametrize(("optimizer", "growth"), [("adamw", 4), ("adam", 1)])
def test_only_decoupled_decay_is_scaled(optimizer: str, growth: float) -> None:
    one = of_width(256, "mup", optimizer={"type": optimizer, "lr": 1e-2, "weight_decay": 0.1})
    scaled = [group for group in one.optimizer.param_groups if group.get("lr_scale", 1.0) == 1 / 4]
    assert scaled and all(group["weight_decay"] == pytest.approx(0.1 * growth) for group in scaled)


def trial(dim: int, train: dict[str, Any]) -> dict[str, Any]:
    model = {"type": "vit", "patch_size": 4, "dim": dim, "heads": 4, "depth": 1, "parametrization": "mup"}
    return {"data": DATA, "model": model, "train": {"steps": 1, **train}}


def test_planning_refuses_other_optimizers_and_objectives_with_parts_of_their_own() -> None:
    for dim in (32, 64):  # 64 is base_width
        with pytest.raises(Faults) as caught:
            Resolver(data_info).resolve_trial(trial(dim, {"optimizer": "sgd"}))
        sentence = "model.parametrization mup is for Adam, and the optimizer is SGD; use adamw or adam"
        assert caught.value.faults == [(("train", "optimizer"), sentence)]
        assert Resolver(data_info).resolve_trial(trial(dim, {"optimizer": "adam"})).incompatibility == ""
        spec = Resolver(data_info).resolve_trial(trial(dim, {"objective": "mae"}))
        assert "objective 'mae' trains further ones" in spec.incompatibility


def test_start_from_another_scale_of_attention_names_it() -> None:
    how = InitFrom.model_validate({"checkpoint": "x"})
    standard = build(parametrization="standard")
    sentence = "parametrization is mup with base_width 64, and in the model that the weights were trained in it is "
    assert load_and_freeze_weights(build(), standard, how)[1:] == [f"{sentence}standard"]
    assert load_and_freeze_weights(build(), build(base_width=16), how)[1:] == [f"{sentence}mup with base_width 16"]
    assert (
        load_and_freeze_weights(build(base_width=32), standard, how)[1:]
        == load_and_freeze_weights(build(), build(), how)[1:]
        == []
    )


def study_file(folder: Path, **base: Any) -> Path:
    model = {"type": "vit", "patch_size": 4, "dim": 32, "depth": 1, "heads": 4, "drop": 0.1}
    train = {"epochs": 1, "batch_size": 16, "optimizer": {"type": "adamw", "lr": 1e-2}, "ema": {"decay": 0.9}}
    study = {"study": "widths", "base": {"data": DATA, "model": model, "train": train, **base}}
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(study))
    return file


def test_command_prints_changes_by_width_and_a_sentence(tmp_path: Path) -> None:
    file = study_file(tmp_path)
    options = ("--widths", "256,16", "--out", tmp_path, "--seeds", 1)
    code, printed, err = call("coordinates", file, *options)
    rows = [line.split() for line in printed.splitlines()]
    assert code == 0
    names = ["blocks.0.attn", "blocks.0.mlp", "logits"]
    for parametrization in ("standard", "mup"):
        first = rows.index([parametrization, "16", "256", "ratio"]) + 1
        assert [row[0] for row in rows[first : first + 3]] == names
        for _, narrow, wide, ratio in rows[first : first + 3]:
            sizes = sorted((float(narrow), float(wide)))
            assert float(ratio) == pytest.approx(sizes[1] / sizes[0], rel=0.02)
    trainings = [f"{kind}: training 1 seed at each width" for kind in ("standard", "mup")]
    assert err.splitlines() == ["importing PyTorch", *trainings]
    assert "standard: beyond the factor 2; " in printed and "mup: within the factor 2; " in printed
    code, printed, _ = call("coordinates", file, *options, "--factor", 1)
    assert code == 1 and "mup: beyond the factor 1; " in printed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--set", "model.heads=3", "--set", "model.dim=48", "--widths", "48,96"),
            "base_width 64 is not a multiple of heads 3; set a multiple",
        ),
        (("--widths", "30,64"), "model.dim 30, model.parametrization standard: dim 30 is not a multiple of heads 4"),
        (("--set", "train.optimizer=sgd"), "mup is for Adam, and the optimizer is SGD; use adamw or adam"),
        (("--set", "model=resnet8"), "base.model: 'resnet8' has no model.parametrization; use a study of a vit"),
        (("--widths", "64"), "at least two different positive widths"),
    ],
)
def test_command_refuses_what_cannot_be_compared(options: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    code, _, err = call("coordinates", study_file(tmp_path), "--out", tmp_path, *options)
    assert code == 2 and sentence in " ".join(err.split())
