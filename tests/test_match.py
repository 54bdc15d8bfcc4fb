"""Tests of matching: the solved knob against exhaustive search, formulas, and built models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from vitlab.cli import cli
from vitlab.data.prepare import data_info
from vitlab.errors import SpecError
from vitlab.geometry import DataInfo
from vitlab.lab import plan_study
from vitlab.planning.expand import Machine, make_plan
from vitlab.planning.values import Plan
from vitlab.registry import slot
from vitlab.spec import read_study

BASE: dict[str, Any] = {
    "data": {"type": "digits"},
    "model": {"type": "vit", "patch_size": 2, "dim": 24, "depth": 2, "heads": 3},
    "train": {"steps": 200, "batch_size": 16},
}
COMPARE_NONE = {"compare": "none"}


@dataclass(frozen=True)
class Counts:
    params: int
    body_params: int
    macs: int


def stub(model: Mapping[str, Any], info: DataInfo) -> Counts:
    """Return simple costs: a body of dim^2 per block, a classifier, and work by the number of patches."""
    body = model["depth"] * model["dim"] ** 2 + 7 * model["patch_size"] ** 2
    patches = (info.image[0] // model["patch_size"]) ** 2
    return Counts(body + info.classes * model["dim"], body, body * patches)


def planned(tmp_path: Path, *, base: Mapping[str, Any] = BASE, count: Any = stub, **study: Any) -> Plan:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "base": dict(base), "seeds": 1, **study}, sort_keys=False))
    parsed, document, problems = read_study(file, changes={})
    return make_plan(parsed, document, problems, Machine(data_info, count))


def models(plan: Plan) -> dict[str, Any]:
    return {item.arm: item.trial.spec.plain()["model"] for item in plan.trials}


def trains(plan: Plan) -> dict[str, Any]:
    return {item.arm: item.trial.spec.plain()["train"] for item in plan.trials}


def problems(tmp_path: Path, **study: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, **study)
    return [problem.message for problem in caught.value.problems]


# -- solved values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", ["params", "body_params", "macs", "train_macs"])
@pytest.mark.parametrize("depth", [1, 3, 5, 11])
def test_width_is_best_of_all_with_whole_heads(tmp_path: Path, quantity: str, depth: int) -> None:
    plan = planned(
        tmp_path,
        design={"one_at_a_time": {"model.depth": [depth]}},
        match={"quantity": quantity, "knob": "model.dim", "tolerance": 0.5},
    )
    info = data_info("digits")

    def cost(dim: int, depth: int) -> int:
        counts = stub({**BASE["model"], "dim": dim, "depth": depth}, info)
        return counts.macs if quantity == "train_macs" else int(getattr(counts, quantity))

    target = cost(24, 2)
    best = min(range(3, 300, 3), key=lambda dim: abs(cost(dim, depth) - target))
    assert models(plan)[f"depth={depth}"]["dim"] == best != 24
    assert models(plan)["baseline"]["dim"] == 24, "the baseline is what others are matched with"


@pytest.mark.parametrize("knob", ["steps", "images"])
def test_steps_compensate_work_per_step(tmp_path: Path, knob: str) -> None:
    length = {"steps": 200} if knob == "steps" else {"images": 3200}
    plan = planned(
        tmp_path,
        base={**BASE, "train": {**length, "batch_size": 16}},
        design={"one_at_a_time": {"model.patch_size": [1, 4], "train.batch_size": [24]}},
        match={"quantity": "train_macs", "knob": f"train.{knob}"},
    )
    body = {patch: 2 * 24**2 + 7 * patch**2 for patch in (1, 2, 4)}
    work = {patch: body[patch] * (8 // patch) ** 2 for patch in body}
    steps = {
        "patch_size=1": round(200 * work[2] / work[1]),
        "patch_size=4": round(200 * work[2] / work[4]),
        "batch_size=24": round(200 * 16 / 24),
    }
    for arm, count in steps.items():
        train = trains(plan)[arm]
        assert train[knob] == count * (train["batch_size"] if knob == "images" else 1)
        assert sum(name in train for name in ("steps", "images", "epochs")) == 1


def test_baseline_without_cost_cannot_be_matched(tmp_path: Path) -> None:
    (message,) = problems(
        tmp_path,
        base={**BASE, "train": {"steps": 0, "batch_size": 16}},
        design={"one_at_a_time": {"model.patch_size": [4]}},
        match={"quantity": "train_macs", "knob": "train.steps"},
    )
    assert "the baseline has 0 train_macs, so no arm can be matched to it" in message


def test_epochs_are_matched_if_images_are_equal(tmp_path: Path) -> None:
    base = {**BASE, "train": {"epochs": 20, "batch_size": 16}}
    match_options = {"quantity": "train_macs", "knob": "train.epochs"}
    plan = planned(tmp_path, base=base, design={"one_at_a_time": {"model.patch_size": [4]}}, match=match_options)
    work = {patch: (2 * 24**2 + 7 * patch**2) * (8 // patch) ** 2 for patch in (2, 4)}
    assert trains(plan)["patch_size=4"]["epochs"] == pytest.approx(20 * work[2] / work[4], rel=1e-3)
    assert "train_macs for each image of the data" in plan.arm("patch_size=4").note
    design = {"one_at_a_time": {"data.normalize": ["half"]}}
    assert trains(planned(tmp_path, base=base, design=design, match=match_options))["normalize=half"]["epochs"] == 20
    (message,) = problems(tmp_path, base=base, design={"one_at_a_time": {"data.fraction": [0.5]}}, match=match_options)
    assert "fraction=0.5" in message and "steps or images" in message


def test_real_number_is_matched_to_four_digits(tmp_path: Path) -> None:
    def count(model: Mapping[str, Any], info: DataInfo) -> Counts:
        hidden = int(model["dim"] * model["mlp"]["ratio"])
        params = hidden * (3 if model["mlp"]["type"] == "swiglu" else 2)
        return Counts(params, params, params)

    plan = planned(
        tmp_path,
        base={**BASE, "model": {**BASE["model"], "dim": 240}},
        design={"one_at_a_time": {"model.mlp": ["swiglu"]}},
        match={"quantity": "params", "knob": "model.mlp.ratio"},
        count=count,
    )
    assert models(plan)["mlp=swiglu"]["mlp"]["ratio"] == pytest.approx(4 * 2 / 3, abs=5e-3)


def test_arm_of_equal_cost_stays_same_trial(tmp_path: Path) -> None:
    design = {"one_at_a_time": {"model.position": ["none"], "train.optimizer": ["sgd"]}}
    plain = planned(tmp_path, design=design)
    match_options = {"quantity": "train_macs", "knob": "train.steps"}
    matched = planned(tmp_path, design=design, match=match_options)
    assert [item.trial.key for item in matched.trials] == [item.trial.key for item in plain.trials]
    assert "exactly" in matched.arm("position=none").note


# -- matching pairs ---------------------------------------------------------------------------------------------------


def test_arm_is_matched_with_its_comparison(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        design={"grid": {"model.depth": [2, 8], "model.heads": [3, 2]}},
        analysis={"compare": {"to": {"model.depth": 2}}},
        match={"quantity": "body_params", "knob": "model.dim", "tolerance": 0.1},
    )
    dims = {arm: model["dim"] for arm, model in models(plan).items()}
    assert dims == {"depth=2, heads=3": 24, "depth=2, heads=2": 24, "depth=8, heads=3": 12, "depth=8, heads=2": 12}


def test_comparison_with_matched_arm_matches_its_baseline(tmp_path: Path) -> None:
    of = {"model.depth": 8, "model.position": "none", "model.mlp.ratio": 2.0}
    plan = planned(
        tmp_path,
        design={"leave_one_out": {"of": of, "direction": "both"}},
        match={"quantity": "body_params", "knob": "model.dim", "tolerance": 0.1},
    )
    dims = {arm: model["dim"] for arm, model in models(plan).items()}
    assert plan.arm("bare").baseline == "baseline" and plan.arm("bare + ratio").baseline == "bare"
    assert dims.pop("without position") == dims.pop("without ratio") == 24 == dims["baseline"]
    assert dims.pop("bare + depth") == dims.pop("baseline") == 24 and set(dims.values()) == {12}


def test_without_comparison_arms_are_matched_with_base(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        design={"grid": {"model.depth": [8, 1]}},
        analysis=COMPARE_NONE,
        match={"quantity": "body_params", "knob": "model.dim", "tolerance": 0.1},
    )
    assert {arm: model["dim"] for arm, model in models(plan).items()} == {"depth=8": 12, "depth=1": 33}


def test_rules_apply_to_matched_values(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        design={"one_at_a_time": {"model.patch_size": [1, 4]}},
        match={"quantity": "train_macs", "knob": "train.steps"},
        where=[{"require": "train.steps < 500", "because": "too long here"}],
    )
    assert [arm.name for arm in plan.arms if arm.skip == "too long here"] == ["patch_size=4"]


# -- messages ---------------------------------------------------------------------------------------------------------


def test_plan_reports_match_and_deviation(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        design={"one_at_a_time": {"model.depth": [8], "model.patch_size": [4]}},
        match={"quantity": "params", "knob": "model.dim", "tolerance": 0.1},
    )
    deep = plan.arm("depth=8")
    assert plan.paths == ["model.depth", "model.patch_size", "model.dim"] and deep.values["model.dim"] == 12
    cost, target = 8 * 12**2 + 28 + 120, 2 * 24**2 + 28 + 240
    assert f"model.dim 12: {cost:,} params" in deep.note and f"below {target:,}" in deep.note
    (note,) = [note for note in plan.notes if "matched" in note]
    farthest = max(abs(cost / target - 1), abs((2 * 24**2 + 7 * 16 + 240) / target - 1))
    assert "params by model.dim" in note and "within 10 %" in note and f"{100 * farthest:.2g} % off" in note
    assert Plan.from_json(plan.to_json()) == plan


def test_unmatchable_arm_is_refused_or_skipped_with_nearest(tmp_path: Path) -> None:
    design = {"one_at_a_time": {"model.depth": [3, 8]}}
    match_options = {"quantity": "body_params", "knob": "model.dim", "tolerance": 0.02}
    info = data_info("digits")
    target = stub(BASE["model"], info).body_params
    costs = {dim: stub({**BASE["model"], "dim": dim, "depth": 3}, info).body_params for dim in (18, 21)}
    near, far = (f"{100 * abs(costs[dim] / target - 1):.2g} %" for dim in (21, 18))
    (message,) = problems(tmp_path, design=design, match=match_options)
    assert (
        "depth=3" in message
        and "model.dim 21" in message
        and near in message
        and "model.dim 18" in message
        and far in message
    )
    plan = planned(tmp_path, design=design, match={**match_options, "else": "skip"})
    assert f"model.dim 21: {costs[21]:,} body_params" in plan.arm("depth=3").skip
    assert set(models(plan)) == {"baseline", "depth=8"}


@pytest.mark.slow
def test_reference_may_stay_unmatched(tmp_path: Path) -> None:
    design = {"arms": {"base": {}, "deep": {"model.depth": 8}, "reference": {"model": "linear"}}}
    match_options = {"quantity": "params", "knob": "model.dim", "tolerance": 0.1}
    assert any("'reference'" in message for message in problems(tmp_path, design=design, match=match_options))
    plan = real(tmp_path, base=BASE, design=design, match={**match_options, "except": ["reference"]})
    assert models(plan)["reference"] == {"type": "linear"} and plan.arm("reference").baseline == "base"
    assert models(plan)["deep"]["dim"] < BASE["model"]["dim"]
    assert any("not matched: reference" in note for note in plan.notes)
    (message,) = problems(tmp_path, design=design, match={**match_options, "except": ["refrence"]})
    assert "'refrence'" in message and "'reference'" in message


def test_unrunnable_baseline_is_named(tmp_path: Path) -> None:
    messages = problems(
        tmp_path,
        base={**BASE, "model": {**BASE["model"], "prefix": [], "head": {"type": "linear", "pool": "cls"}}},
        design={"one_at_a_time": {"model.depth": [8]}},
        match={"quantity": "params", "knob": "model.dim"},
    )
    assert any("baseline" in sentence and "cannot be run" in sentence for sentence in messages), messages


@pytest.mark.parametrize(
    ("match_options", "design", "words"),
    [
        ("model.dim", {"one_at_a_time": {"model.dim": [48, 96]}}, ["the design sets model.dim"]),
        ("model.dim", {"arms": {"a": {}, "b": {"model": {"type": "vit", "patch_size": 2, "dim": 6}}}}, ["sets model.dim"]),
        ("train.steps", {"one_at_a_time": {"train.images": [64]}}, ["sets train.steps"]),
        ("model.dmi", {}, ["'model.dmi'", "'model.dim'"]),
        ("model.position", {}, ["no number 'model.position'", "model.dim", "train.steps"]),
        ("train.batch_size", {}, ["no number 'train.batch_size' to match by"]),
        ("train.images", {}, ["'train.images'", "'train.steps'"]),
    ],
)  # fmt: skip
def test_unusable_knobs_are_refused(tmp_path: Path, match_options: str, design: Any, words: list[str]) -> None:
    messages = problems(
        tmp_path, match={"quantity": "train_macs", "knob": match_options}, **({"design": design} if design else {})
    )
    assert len(messages) == 1, messages
    assert all(word in messages[0] for word in words), messages


def test_arm_without_knob_is_reported(tmp_path: Path) -> None:
    design = {"arms": {"base": {}, "conv": {"model": "resnet8"}}}
    messages = problems(tmp_path, design=design, match={"quantity": "params", "knob": "model.dim"})
    assert any("'conv'" in sentence and "no number at model.dim" in sentence for sentence in messages), messages


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    messages = problems(
        tmp_path,
        design={"one_at_a_time": {"model.heads": [5], "model.depth": [4]}},
        match={"quantity": "params", "knob": "model.dmi"},
        tune={"knobs": {"train.optimizer.lrr": [1], "model.depth": [3]}},
    )
    assert len(messages) == 4 and all(
        any(word in one for one in messages) for word in ("heads 5", "dmi", "lrr", "model.depth")
    )


# -- real models ------------------------------------------------------------------------------------------------------


def real(tmp_path: Path, **study: Any) -> Plan:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "seeds": 1, **study}, sort_keys=False))
    return plan_study(file, out=tmp_path)[1]


def count_parameters(spec: Mapping[str, Any]) -> int:
    model = slot("model").build(spec["model"], data_info(spec["data"]))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_built_models_have_planned_parameters(tmp_path: Path) -> None:
    plan = real(
        tmp_path,
        base={**BASE, "model": {**BASE["model"], "dim": 48, "depth": 3}},
        design={"one_at_a_time": {"model.depth": [2, 5], "model.mlp": ["swiglu"], "model.position": ["rope2d"]}},
        match={"quantity": "params", "knob": "model.dim", "tolerance": 0.1},
    )
    counts = {item.arm: count_parameters(item.trial.spec.plain()) for item in plan.trials}
    target = counts.pop("baseline")
    assert len(counts) == 4
    for arm, count in counts.items():
        assert abs(count / target - 1) <= 0.1, (arm, count, target)
        assert f"{count:,} params" in plan.arm(arm).note
        wider = {item.arm: item.trial.spec.plain() for item in plan.trials}[arm]
        for step in (-3, 3) if arm != "position=rope2d" else ():
            other = count_parameters({**wider, "model": {**wider["model"], "dim": wider["model"]["dim"] + step}})
            assert abs(other - target) >= abs(count - target), "a neighbour is closer"


def test_training_work_is_equal_by_formula(tmp_path: Path) -> None:
    """The formula counts multiply-accumulates of a plain ViT: patches, projections, attention, MLP, classifier."""
    plan = real(
        tmp_path,
        base={**BASE, "train": {"steps": 1000, "batch_size": 16}},
        design={"one_at_a_time": {"model.patch_size": [1, 4], "model.depth": [4]}},
        match={"quantity": "train_macs", "knob": "train.steps"},
    )

    def work(spec: Mapping[str, Any]) -> float:
        d, p, depth = (spec["model"][name] for name in ("dim", "patch_size", "depth"))
        n = (8 // p) ** 2
        t = n + 1
        macs = n * p * p * d + depth * (4 * t * d * d + 2 * t * t * d + 2 * t * d * 4 * d) + d * 10
        return 3 * macs * spec["train"]["steps"] * spec["train"]["batch_size"]

    works = {item.arm: work(item.trial.spec.plain()) for item in plan.trials}
    assert len({item.trial.spec.train.steps for item in plan.trials}) == 4
    for arm, count in works.items():
        assert count == pytest.approx(works["baseline"], rel=0.01), arm


def test_command_shows_matched_values(tmp_path: Path) -> None:
    content = {
        "study": "s",
        "base": BASE,
        "design": {"one_at_a_time": {"model.depth": [4]}},
        "match": {"quantity": "params", "knob": "model.dim", "tolerance": 0.2},
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(content))
    done = CliRunner().invoke(cli, ["plan", str(file), "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "depth=4: matched by model.dim 18" in done.output and "within 20 %" in done.output
