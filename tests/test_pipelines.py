"""Tests of every shipped study file: it has a question, plans without data, and has the published costs."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from vitlab import lab
from vitlab.cli import cli
from vitlab.driver import planning
from vitlab.driver.smoke import run_smoke_test
from vitlab.planning.values import Plan
from vitlab.report.phrasing import format_duration
from vitlab.spec import TrainSpec

FOLDER = Path(__file__).parent.parent / "pipelines"
FILES = sorted(file for file in FOLDER.rglob("*.yaml") if "." not in file.stem)  # no baselines
LAPTOP = ("model_size", "model_size_macs", "patch_size", "patch_size_macs", "data_scale", "recipe")

# ImageNet, 224 pixels, 1000 classes: parameters to the unit and GMACs as printed by timm, torchvision and the papers.
PUBLISHED = {
    ("Ti", 16): (5_717_416, 1.25),
    ("S", 16): (22_050_664, 4.60),
    ("B", 16): (86_567_656, 17.56),
    ("L", 16): (304_326_632, 61.55),
    ("S", 32): (22_878_952, 1.14),
    ("S", 8): (22_055_272, 22.41),
}
RESNET50 = (25_557_032, 4.09)
FASHION_MNIST = 54_000  # images to train on, a tenth held out


@functools.cache
def plan_of(file: Path) -> Plan:
    return lab.plan_study(file, out=FOLDER / "no store")[1]


def specs(plan: Plan) -> dict[str, Any]:
    """Return the spec of each arm."""
    return {planned.arm: planned.trial.spec.plain() for planned in (*plan.trials, *plan.pending)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_studies_plan_and_have_a_question(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    heads = [match[1] for line in header if (match := re.match(r"# (\w+) ", line))]
    assert [head for head in heads if head in ("Question", "Expect", "Cost", "Run")] == [
        "Question",
        "Expect",
        "Cost",
        "Run",
    ]
    name = file.relative_to(FOLDER).with_suffix("")
    assert re.search(rf"vitlab run (pipelines/)?{name}\b", "\n".join(header))
    plan = plan_of(file)
    assert plan.question and len(plan.arms) > 1
    assert not [arm.name for arm in plan.arms if arm.skip]


def test_study_names_are_unique() -> None:
    names = [yaml.safe_load(file.read_text())["study"] for file in FILES]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_imagenet_sizes_equal_published() -> None:
    sizes = set()
    for file in (FOLDER / "imagenet" / f"{name}.yaml" for name in ("model_size", "patch_size", "data_scale", "recipe")):
        plan = plan_of(file)
        costs = planning.count_params_and_macs(plan, "")
        for arm, spec in specs(plan).items():
            model = spec["model"]
            assert spec["data"]["type"] == "image_folder" and spec["data"]["num_classes"] == 1000
            assert all(planned.trial.data is None for planned in plan.trials), "planned without the data"
            plain = model.get("prefix") == ["class"] and model["position"]["type"] == "learned"
            if model["type"] == "resnet50":
                published = RESNET50
            elif plain and model["head"]["type"] == "linear":
                published = PUBLISHED[model["size"], model["patch_size"]]
                sizes.add((model["size"], model["patch_size"]))
            else:
                continue
            assert costs[arm]["params"] == published[0], (file, arm)
            assert round(costs[arm]["macs"] / 1e9, 2) == pytest.approx(published[1], abs=1e-9), (file, arm)
    assert sizes == set(PUBLISHED)


def test_imagenet_recipe_equals_hand_calculation() -> None:
    """S/16 with the mean of 196 patches and a hidden layer: the cost of a part follows from its shapes."""
    costs = planning.count_params_and_macs(plan_of(FOLDER / "imagenet" / "recipe.yaml"), "")
    d, plain = 384, PUBLISHED["S", 16][0]
    params = {arm: cost["params"] for arm, cost in costs.items()}
    assert params["linear for MLP head"] == plain - d - 197 * d  # no class token, and fixed positions
    assert params["baseline"] == params["linear for MLP head"] + (d + 1) * d
    assert params["class token for mean"] == params["baseline"] + d
    assert params["learned for sincos2d"] == params["baseline"] + 196 * d
    assert params["no RandAugment and Mixup"] == params["baseline"]


@pytest.mark.parametrize("name", LAPTOP)
def test_laptop_studies_have_reference_and_named_models(name: str) -> None:
    plan = plan_of(FOLDER / f"{name}.yaml")
    trial_specs, costs = specs(plan), planning.count_params_and_macs(plan, "")
    references = [arm for arm, spec in trial_specs.items() if spec["model"] == {"type": "linear"}]
    assert references and all(costs[arm]["params"] == 784 * 10 + 10 for arm in references)
    assert all(plan.arm(arm).baseline for arm in references), "a reference is compared"
    for arm in trial_specs:
        if shape := re.search(r"(\d+)x(\d+)", arm):
            model = trial_specs[arm]["model"]
            assert (model["dim"], model["depth"], model["dim"] // model["heads"]) == (*map(int, shape.groups()), 16)
    values = [plan.arm(arm).values for arm in references]
    assert not [
        path for value_known in values for path, value in value_known.items() if path.startswith("model.") and value
    ]
    rates = len(yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["tune"]["knobs"]["train.optimizer.lr"])
    assert len(plan.tuning) == len(plan.arms) and all(len(tuning.trials) == rates for tuning in plan.tuning)
    assert {planned.seed for planned in plan.pending} == set(range(5))


@pytest.mark.slow
def test_header_numbers_equal_plan() -> None:
    def params(name: str) -> dict[str, int]:
        return {
            arm: cost["params"]
            for arm, cost in planning.count_params_and_macs(plan_of(FOLDER / f"{name}.yaml"), "").items()
        }

    sizes, patches = params("model_size"), params("patch_size")
    assert sizes["16x2"] == sizes["linear"] == 7850 and round(sizes["64x4"] / sizes["16x2"]) == 26
    assert patches["baseline"] == patches["patch_size=4"] == 53_386
    shares = [round(100 * (patches[f"patch_size={size}"] / 53_386 - 1)) for size in (14, 28)]
    assert shares == [8, 43]


@pytest.mark.parametrize("name", ["model_size", "patch_size", "data_scale"])
def test_equal_images(name: str) -> None:
    image_counts = {
        TrainSpec.model_validate(spec["train"]).images_seen()
        for spec in specs(plan_of(FOLDER / f"{name}.yaml")).values()
    }
    assert len(image_counts) == 1
    epochs = (image_counts.pop() or 0) / FASHION_MNIST
    (header,) = re.findall(r"# ([\d.]+) epochs of the 54,000", (FOLDER / f"{name}.yaml").read_text())
    assert epochs == pytest.approx(float(header), abs=0.01)


@pytest.mark.parametrize("name", ["model_size_macs", "patch_size_macs"])
def test_equal_work(name: str) -> None:
    plan = plan_of(FOLDER / f"{name}.yaml")
    trial_specs, costs = specs(plan), planning.count_params_and_macs(plan, "")
    work = {
        arm: 3 * costs[arm]["macs"] * spec["train"]["steps"] * spec["train"]["batch_size"]
        for arm, spec in trial_specs.items()
    }
    reference = work.pop("linear")
    assert max(work.values()) / min(work.values()) < 1.002
    assert max(work.values()) == pytest.approx(454e9, rel=0.002), "as the header says"
    assert reference < min(work.values()) / 100
    assert trial_specs["linear"]["train"]["steps"] == 1263


def plan_json(*arguments: str) -> Any:
    ran = CliRunner().invoke(cli, ["plan", *arguments, "--cost", "--json"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.output)


@pytest.mark.slow
def test_plan_shows_gpu_hours_with_assumptions(tmp_path: Path) -> None:
    file, out = str(FOLDER / "imagenet" / "patch_size.yaml"), str(tmp_path)
    data = plan_json(file, "--out", out, "--device-tflops", "989")
    hours = {arm["name"]: arm["cost"]["hours_at_peak"] for arm in data["arms"]}
    images = 1024 * round(90 * 1_268_355 / 1024)
    assert hours["baseline"] == pytest.approx(6 * 4_598_882_304 * images / 989e12 / 3600, rel=1e-12)
    assert all(arm["cost"]["images"] == images for arm in data["arms"])
    output = " ".join(CliRunner().invoke(cli, ["plan", file, "--out", out, "--cost"]).output.split())
    assert "Training time is of one GPU, computed and not measured" in output
    assert "36 to 8 % of 312 TFLOP/s (--device-tflops)" in output
    total = 3600 * 3 * sum(hours.values()) * 989 / 312
    assert f"in all {format_duration(total / 0.36)} to {format_duration(total / 0.08)}." in output


@pytest.mark.slow
def test_gpu_hours_need_data_if_lengths_are_epochs(tmp_path: Path) -> None:
    file, out = str(FOLDER / "quickstart.yaml"), str(tmp_path)
    images = 20 * (1149 // 32) * 32  # 20 epochs of the 1,149 training images of the digits, in batches of 32
    costs = [arm["cost"] for arm in plan_json(file, "--out", out, "--set", "run.device=cpu")["arms"]]
    assert {(cost["images"], cost["hours_at_peak"], cost["tflops"]) for cost in costs} == {(images, None, None)}
    absent = (file, "--out", out, "--set", "data.type=cifar10", "--set", f"data.root={tmp_path}")
    assert all(arm["cost"]["hours_at_peak"] is None for arm in plan_json(*absent)["arms"])
    assert "'?' where the length is in epochs" in " ".join(
        CliRunner().invoke(cli, ["plan", *absent, "--cost", "--device-tflops", "312"]).output.split()
    )


@pytest.mark.slow
def test_tuning_is_counted_in_cost(tmp_path: Path) -> None:
    file, out = str(FOLDER / "patch_size_macs.yaml"), str(tmp_path)
    gpu = ("--out", out, "--device-tflops", "312")
    hours = [arm["cost"]["hours_at_peak"] for arm in plan_json(file, *gpu)["arms"]]
    output = " ".join(CliRunner().invoke(cli, ["plan", file, *gpu, "--cost"]).output.split())
    assert f"in all {format_duration(9 * 3600 * sum(hours) / 0.36)} to " in output


def test_study_runs(tmp_path: Path) -> None:
    """Two steps of every kind of model, on data of the shape of the study's."""
    changes = {"data": {"type": "synthetic", "image_size": [28, 28]}, "run.executor": "inline"}
    assert run_smoke_test(FOLDER / "data_scale.yaml", out=tmp_path, changes=changes) == 3
