"""Tests of the metric slot: chosen in a study, equal everywhere, and plugins treated like built-ins."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import slot_fixtures
import torch
import yaml
from torch import Tensor

import vitlab
from vitlab import lab, testing
from vitlab.errors import BrokenComponent, SpecError
from vitlab.geometry import DataInfo
from vitlab.planning.values import MetricFacts, Plan
from vitlab.regression import gate
from vitlab.report.sections import all_sections
from vitlab.spec import Analysis, Choice, Study
from vitlab.trackers import records
from vitlab.training.evaluation import MetricAccumulator
from vitlab.training.metrics import STANDARD, Metric, build_metrics, metric

pytestmark = pytest.mark.usefixtures("no_figures")

GUEST = """
import torch
from torch import Tensor

from vitlab.training.metrics import Metric, metric


@metric.register("gap")
class Gap(Metric):
    '''Mean distance of the predicted class from the class.'''

    goal = "min"
    bounds = (0.0, float("inf"))

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits.argmax(1) - target).abs()

    def column(self, rows_N: Tensor) -> Tensor:
        return rows_N
"""
SEEDS = 2


@pytest.fixture(autouse=True)
def _slots_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, metric)


def study(folder: Path, **changes: Any) -> Path:
    """Write two arms and two seeds on synthetic images of six classes."""
    train = {"steps": 4, "batch_size": 16, "evaluations": 2, **changes.pop("train", {})}
    content = {
        "study": "measured",
        "base": {
            "data": {"type": "synthetic", "image_size": 8, "train_images": 60, "test_images": 30, "num_classes": 6},
            "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
            "train": train,
        },
        "design": {"one_at_a_time": {"model.position": ["none"]}},
        "seeds": SEEDS,
        "run": {"executor": "inline", "tracker": "none"},
        **changes,
    }
    file = folder / "measured.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def planned(folder: Path, **changes: Any) -> tuple[Study, Plan]:
    return lab.plan_study(study(folder, **changes), out=folder / "out")


def problems(folder: Path, **changes: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        planned(folder, **changes)
    return [problem.message for problem in caught.value.problems]


# -- computation ------------------------------------------------------------------------------------------------------


def valued(choice: str | dict[str, Any], logits: Tensor, target: Tensor) -> float:
    one = metric.build(choice)
    return float(one.value(torch.cat([one.rows(logits[:31], target[:31]), one.rows(logits[31:], target[31:])])))


def test_selectable_metrics_equal_scikit_learn() -> None:
    from sklearn.metrics import balanced_accuracy_score, brier_score_loss, top_k_accuracy_score

    g = torch.Generator().manual_seed(0)
    logits = torch.randn(80, 6, generator=g, dtype=torch.float64)
    target = torch.randint(0, 4, (80,), generator=g) ** 2 // 2  # 0, 0, 2 and 4: two classes never occur
    y, p = target.numpy(), logits.softmax(1).numpy()
    assert valued("balanced_accuracy", logits, target) == pytest.approx(
        np.mean([(p.argmax(1)[y == k] == k).mean() for k in (0, 2, 4)]), rel=1e-14
    )
    several = torch.cat([target, torch.tensor([1, 3, 5])])
    more = torch.cat([logits, torch.randn(3, 6, generator=g, dtype=torch.float64)])
    assert valued("balanced_accuracy", more, several) == pytest.approx(
        balanced_accuracy_score(several, more.argmax(1)), rel=1e-14
    )
    assert valued({"type": "top_k", "k": 3}, logits, target) == top_k_accuracy_score(y, p, k=3, labels=range(6))
    brier = brier_score_loss(y, p, labels=range(6), scale_by_half=False)
    assert valued("brier", logits, target) == pytest.approx(brier, rel=1e-13)
    coarse = valued({"type": "ece", "bins": 1}, logits, target)
    assert coarse == pytest.approx(abs((p.argmax(1) == y).mean() - p.max(1).mean()), rel=1e-12)


def test_trials_report_default_metrics_with_plugins_installed() -> None:
    @metric.register("accuracy")
    class Mine(Metric):
        """A metric of this file, without relation to plugins."""

        def rows(self, logits: Tensor, target: Tensor) -> Tensor:
            raise AssertionError("nobody has named it")

    for task, names in STANDARD.items():
        data = DataInfo(image=(4, 4), channels=1, classes=7, task=task)
        metric_names = build_metrics(data)
        assert len(metric_names) == len(names) and next(iter(metric_names)) == "loss"
        package = metric.contract.__module__.rpartition(".")[0]
    assert all(type(one).__module__.startswith(f"{package}.") for one in metric_names.values())
    assert set(build_metrics(DataInfo(image=(4, 4), channels=1, classes=5))) == {"loss", "accuracy", "ece"}


def test_metrics_are_skipped_after_non_finite_loss() -> None:
    class Fails(Metric):
        """A metric that raises."""

        def rows(self, logits: Tensor, target: Tensor) -> Tensor:
            return target

        def value(self, rows_N: Tensor) -> float:
            raise ValueError("not a number")

    data = DataInfo(image=(4, 4), channels=1, classes=3)
    tally = MetricAccumulator({**build_metrics(data), "fails": Fails()})
    tally.add_batch({"": torch.full((2, 3), torch.nan)}, torch.tensor([0, 1]), torch.arange(2))
    assert list(tally.compute_result("val").metrics) == ["loss"]


# -- in a study -------------------------------------------------------------------------------------------------------


def test_study_without_metrics_keeps_its_trial_keys(tmp_path: Path) -> None:
    def keys(**train: Any) -> list[str]:
        return [item.trial.key for item in planned(tmp_path, train=train)[1].trials]

    bare = keys()
    assert keys(metrics=[]) == bare == keys(metrics=["accuracy", "vitlab:loss", {"type": "top_k", "k": 5}])
    two = keys(metrics=["brier", "balanced_accuracy"])
    assert not set(two) & set(bare)
    assert two == keys(metrics=["balanced_accuracy", "ece", {"type": "brier"}, "brier"]), "in no order, each once"


def test_contradictory_metrics_are_refused_in_planning(tmp_path: Path) -> None:
    metric_names = ["acuracy", "miou", {"type": "top_k", "k": 6}]
    assert problems(tmp_path, train={"metrics": metric_names})[0].startswith("no metric called 'acuracy'. Did you mean")
    assert problems(tmp_path, train={"metrics": metric_names[1:]}) == [
        "metric 'miou' is for segmentation, not classification",
        "metric 'top_k': k is 6, and the data has 6 classes; set a smaller k",
    ]
    twice = [{"type": "ece", "bins": 5}]
    assert problems(tmp_path, train={"metrics": twice}) == [
        "metric 'ece': another metric of the trial is called 'ece' in results; remove one of the two"
    ]
    unreported = "no trial reports val/brier. Reported: val/loss, val/accuracy, val/top5, val/ece."
    assert problems(tmp_path, analysis={"metric": "val/brier"}) == [f"{unreported} Write base.train.metrics: [brier]."]
    [without_split] = problems(tmp_path, analysis={"metric": "acuracy"})
    assert "Did you mean 'val/accuracy'? Reported: val/loss" in without_split and ", test/accuracy" in without_split
    assert "no trial reports test/acuracy. Did you mean 'test/accuracy'?" in problems(
        tmp_path, analysis={"metric": "val/loss"}, check={"metrics": {"test/acuracy": "max"}}
    )[0]  # fmt: skip
    [of_training] = problems(tmp_path, analysis={"metric": "train/a-b"})
    assert of_training == "no trial reports train/a-b. 'vitlab list metric' lists more."
    arms = {"arms": {"one": {}, "other": {"train.metrics": ["brier"]}}}
    assert planned(tmp_path, design=arms, analysis={"metric": "val/brier"})[1].analysis.goal == "min"


def test_message_names_metrics_that_hold_the_word(tmp_path: Path) -> None:
    (sentence,) = problems(tmp_path, train={"metrics": ["f1"]})
    assert sentence.startswith("no metric called 'f1'. Did you mean 'macro_f1' or 'micro_f1'? Installed")


def test_class_weights_are_one_for_each_class(tmp_path: Path) -> None:
    for weights in ([], [1, 2, 3]):
        loss = {"type": "cross_entropy", "class_weights": weights}
        (sentence,) = problems(tmp_path, train={"loss": loss})
        assert sentence == "the data has 6 classes; write one number for each, or balanced"
    (sentence,) = problems(tmp_path, train={"loss": {"type": "cross_entropy", "class_weights": "balance"}})
    assert "class_weights" in sentence and "balanced" in sentence


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"timm": "vit_tiny"}, "must be NAME.TAG, such as .*'vitlab list weights tiny'"),
        ({"pretrained": "ViT_B_16"}, "must be MODEL_Weights.TAG"),
        ({"hub": "vit-base"}, "must be ORG/NAME"),
    ],
)
def test_names_of_weights_are_described_in_words(tmp_path: Path, source: dict[str, str], words: str) -> None:
    sentences = problems(tmp_path, design={"arms": {"new": {}, "started": {"init_from": source}}})
    assert any(re.search(words, sentence) for sentence in sentences), sentences


@pytest.mark.parametrize(
    ("analysis", "goal"),
    [
        ({}, "max"),
        ({"metric": "val/loss"}, "min"),
        ({"metric": "test/ece"}, "min"),
        ({"metric": "train/loss"}, "min"),
        ({"metric": "val/top5"}, "max"),
        ({"metric": "val/loss", "goal": "max"}, "max"),
    ],
)
def test_metric_has_goal(analysis: dict[str, str], goal: str, tmp_path: Path) -> None:
    study, plan = planned(tmp_path, analysis=analysis)
    assert study.analysis.goal == plan.analysis.goal == goal
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).analysis == plan.analysis


def test_tuning_with_wrong_goal_is_refused(tmp_path: Path) -> None:
    tune = {"knobs": {"train.optimizer.lr": [1e-3, 1e-2]}, "select": "val/accuracy"}
    assert problems(tmp_path, analysis={"metric": "val/loss"}, tune=tune) == [
        "the goal of val/accuracy is max, and that of the analysis min; select by a metric with its goal"
    ]


def test_metric_facts_are_stored_in_plan(tmp_path: Path) -> None:
    plan = planned(tmp_path, train={"metrics": ["brier", {"type": "top_k", "k": 3}]})[1]
    arms = [arm.name for arm in plan.arms]
    assert plan.metrics == {
        "loss": MetricFacts("min", "number", (0, None), 0, dict.fromkeys(arms, math.log(6))),
        "accuracy": MetricFacts("max", "share", (0, 1), 1, dict.fromkeys(arms, 1 / 6)),
        "top5": MetricFacts("max", "share", (0, 1), 1, dict.fromkeys(arms, 5 / 6)),
        "ece": MetricFacts("min", "share", (0, 1)),
        "brier": MetricFacts("min", "number", (0, 2)),
        "top3": MetricFacts("max", "share", (0, 1), 1, dict.fromkeys(arms, 1 / 2)),
    }
    stored = Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
    assert stored.metrics == plan.metrics
    assert stored.facts("test/accuracy_dist") == plan.metrics["accuracy"] and stored.facts("val/topology") is None


def test_standard_metrics_that_are_named_are_reported_and_train_nothing_anew(tmp_path: Path) -> None:
    named = planned(tmp_path, train={"metrics": ["ece", {"type": "top_k", "k": 5}]})[1]
    plain = planned(tmp_path)[1]
    assert [item.trial.key for item in named.trials] == [item.trial.key for item in plain.trials]
    names = [f"{split}/{name}" for split in ("test", "val") for name in ("accuracy", "ece", "loss", "top5")]
    section: Any = all_sections()["heads"]
    done, found = pd.DataFrame(columns=[*names, "train/loss"]), SimpleNamespace(plan=named)
    assert [*section.metrics_frame(found, done)] == ["test/ece", "test/top5", "val/ece", "val/top5"]


def test_unit_chance_and_quantum_of_plugin_metric_are_used(tmp_path: Path) -> None:
    plugin = tmp_path / "my_metrics.py"
    declared = "bounds = (0.0, 2.0)\n    unit = 'share'\n    quantum = 1.0\n    def chance(self, data): return 0.25\n"
    plugin.write_text(GUEST.replace('bounds = (0.0, float("inf"))', declared))
    file = study(tmp_path, train={"metrics": ["gap"]}, analysis={"metric": "val/gap"}, check={})
    answer = lab.run(file, out=tmp_path / "out", plugins=[plugin])
    assert answer.plan.facts("val/gap") == MetricFacts(
        "min", "share", (0, 2), 1, {arm.name: 0.25 for arm in answer.plan.arms}
    )
    assert "val gap (%)" in (answer.folder / "report" / "report.md").read_text()
    found, plan = lab.plan_study(file, plugins=[plugin])
    images = vitlab.predictions(file, out=tmp_path / "out").query("split == 'val' and seed == 0 and arm == 'baseline'")
    assert gate.read_final_values(plan, answer.store, found).quanta == {"val/gap": 1 / len(images)}


COUNT = GUEST.replace(
    'bounds = (0.0, float("inf"))', "bounds = (0.0, float('inf'))\n    unit = 'images'\n    step = 1.0"
)


@pytest.mark.slow
def test_count_with_own_unit_is_planned_reported_and_gated(tmp_path: Path) -> None:
    plugin = tmp_path / "my_metrics.py"
    plugin.write_text(
        COUNT.replace("gap", "far").replace(".abs()\n", ".abs() > 2\n").replace("rows_N\n", "rows_N\n\n    def value(self, rows_N: Tensor) -> float:\n        return float(rows_N.sum())\n")
    )  # fmt: skip
    file = study(tmp_path, train={"metrics": ["far"]}, analysis={"metric": "val/far"}, check={})
    answer = lab.run(file, out=tmp_path / "out", plugins=[plugin])
    assert answer.plan.facts("val/far") == MetricFacts("min", "images", (0, None), step=1.0)
    page = (answer.folder / "report" / "report.md").read_text()
    assert "val far (images)" in page and "images" in answer.answers[0] and "val/far: lower is better." in page
    found, plan = lab.plan_study(file, plugins=[plugin])
    assert gate.read_final_values(plan, answer.store, found).quanta == {"val/far": 1.0}
    predicted = vitlab.predictions(file, out=tmp_path / "out")
    for row in answer.results().to_dict("records"):
        own = predicted.query(f"split == 'val' and seed == {row['seed']} and arm == '{row['arm']}'")
        assert row["val/far"] == ((own["prediction"] - own["label"]).abs() > 2).sum()


@pytest.mark.parametrize(
    ("unit", "bounds", "sentence"),
    [
        ("share", "(0.0, 2.0)", None),
        ("images", "(0.0, 1.0)", "points are hundredths of a share, and val/gap is not a share; write a number"),
    ],
)
def test_margin_in_points_needs_unit_share(unit: str, bounds: str, sentence: str | None, tmp_path: Path) -> None:
    plugin = tmp_path / "my_metrics.py"
    plugin.write_text(GUEST.replace('(0.0, float("inf"))', f"{bounds}\n    unit = '{unit}'"))
    file = study(tmp_path, train={"metrics": ["gap"]}, analysis={"metric": "val/gap", "margin": "2 points"})
    if sentence is None:
        assert lab.plan_study(file, plugins=[plugin])[0].analysis.margin == 0.02
    else:
        with pytest.raises(SpecError, match=sentence):
            lab.plan_study(file, plugins=[plugin])


def test_plugin_file_with_wrong_unit_is_refused(tmp_path: Path) -> None:
    plugin = tmp_path / "my_metrics.py"
    plugin.write_text(COUNT.replace("'images'", "5"))
    with pytest.raises(
        BrokenComponent, match=r"^metric 'gap' \(.*my_metrics.py:\d+\): unit: found 5; allowed: share, number"
    ):
        lab.plan_study(study(tmp_path), plugins=[plugin])
    assert "gap" not in metric.names()


@pytest.mark.parametrize(
    "wrong", [{"type": "top_k", "kk": 3}, {"type": "top_k", "k": 1}, "topk", {"type": "top_k", "k": 9}]
)
def test_mistake_in_metric_has_no_follow_up_error(wrong: Any, tmp_path: Path) -> None:
    [of_base] = problems(tmp_path, train={"metrics": [wrong]}, analysis={"metric": "val/top3"})
    assert "no trial reports" not in of_base
    arms = {"arms": {"one": {}, "other": {"train.metrics": [wrong]}}}
    [of_arm] = problems(tmp_path, design=arms, analysis={"metric": "val/top3"})
    assert "no trial reports" not in of_arm
    both = problems(tmp_path, train={"lr": 1}, analysis={"metric": "val/top3"})
    assert len(both) == 2 and "no trial reports val/top3" in both[-1], "another mistake does not hide it"


@pytest.mark.parametrize(
    ("analysis", "note"),
    [
        ({"metric": "val/loss", "goal": "max"}, "val/loss is better when lower, and the study asks for max: verdicts count higher values as better."),
        ({"goal": "min"}, "val/accuracy is better when higher, and the study asks for min: verdicts count lower values as better."),
        ({"metric": "train/loss", "goal": "max"}, "train/loss is better when lower, and the study asks for max: verdicts count higher values as better."),
        ({"metric": "val/loss", "goal": "min"}, None),
        ({"metric": "val/loss"}, None),
    ],
)  # fmt: skip
def test_goal_against_that_of_metric_is_noted(analysis: dict[str, str], note: str | None, tmp_path: Path) -> None:
    notes = planned(tmp_path, analysis=analysis)[1].notes
    assert [one for one in notes if "better when" in one] == ([note] if note else [])


# -- a guest ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plugin_metric_is_planned_trained_reported_and_gated_like_builtin(tmp_path: Path) -> None:
    plugin = tmp_path / "my_metrics.py"
    plugin.write_text(GUEST)
    file = study(
        tmp_path,
        train={"metrics": ["gap", "balanced_accuracy"]},
        analysis={"metric": "val/gap"},
        check={"metrics": {"test/gap": "min"}},
    )
    answers = {
        engine: lab.run(file, out=tmp_path / engine, plugins=[plugin], changes={"run.engine": engine})
        for engine in ("loop", "vmap")
    }
    answer = answers["loop"]
    assert answer.failed == 0 and answer.trained == 2 * SEEDS
    assert answer.plan.analysis.goal == "min"
    assert all(any(origin.startswith("metric:gap my_metrics.py ") for origin in item.trial.origins) for item in answer.plan.trials)  # fmt: skip
    frame = answer.results()
    predicted = vitlab.predictions(file, out=tmp_path / "loop")
    for (arm, seed, split), rows in predicted.groupby(["arm", "seed", "split"]):
        (row,) = frame[(frame["arm"] == arm) & (frame["seed"] == seed)].to_dict("records")
        cli_only_option = (rows["prediction"] - rows["label"]).abs()
        assert row[f"{split}/gap"] == pytest.approx(cli_only_option.mean(), rel=1e-12)
        assert (rows["gap"] == cli_only_option).all()
    stacked = answers["vmap"].results()
    assert stacked["val/gap"].tolist() == pytest.approx(frame["val/gap"].tolist(), abs=0.2)
    assert set(stacked["engine"]) == {"vmap"} and set(stacked) == set(frame)
    page = (answer.folder / "report" / "report.md").read_text()
    assert "val gap" in page and "test gap" in page and "val balanced_accuracy (%)" in page
    rows = json.loads((answer.folder / "report" / "report.json").read_text())["heads"]
    assert {"val/balanced_accuracy"} <= {row["metric"] for row in rows} and "val/gap" not in str(rows)
    for row in rows:
        assert row["mean"] == pytest.approx(frame.loc[frame["arm"] == row["arm"], row["metric"]].mean())
    folder = answer.store.trial(answer.plan.trials[0].trial.key, answer.plan.trials[0].trial.code)
    curve = [event.body["metrics"] for event in folder.events()[0] if event.kind == "metrics"]
    assert len(curve) == 2 and all({"val/gap", "val/balanced_accuracy"} <= set(point) for point in curve)
    result = folder.result()
    assert result is not None
    assert {"final/val/gap", "final/test/gap"} <= {point.name for point in records.final_points(result, answer.plan.analysis)}  # fmt: skip
    parsed, plan = lab.plan_study(file, plugins=[plugin])
    assert gate.judged_goals(parsed) == {"val/gap": "min", "test/gap": "min"}
    values = gate.read_final_values(plan, answer.store, parsed)
    assert set(values.metrics) == {"val/gap", "test/gap"} and len(values.metrics["val/gap"]["baseline"]) == SEEDS


def test_changed_formula_is_new_trial(tmp_path: Path) -> None:
    plugin = tmp_path / "my_metrics.py"
    codes = []
    for text in (GUEST, GUEST.replace(".abs()", ".abs() * 2"), "# a comment\n" + GUEST.replace(".abs()", ".abs() * 2")):
        plugin.write_text(text)
        file = study(tmp_path, train={"metrics": ["gap"]})
        trial = lab.plan_study(file, plugins=[plugin])[1].trials[0].trial
        codes.append(trial.code)
    assert codes[0] != codes[1] and codes[1] == codes[2]


# -- contract test ----------------------------------------------------------------------------------------------------


class Right(Metric):
    """Share of images that are right."""

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits.argmax(1) == target


class MeanOfBatches(Right):
    """A mean of means, which depends on the batch sizes."""

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().rows(logits, target).double().mean()[None]


class InOrder(Right):
    """A metric in which later images count more."""

    def value(self, rows_N: Tensor) -> float:
        return float((rows_N * torch.arange(len(rows_N))).sum() / torch.arange(len(rows_N)).sum())


class Percent(Right):
    """A metric that exceeds its bounds."""

    def value(self, rows_N: Tensor) -> float:
        return 100 * super().value(rows_N)


class OtherWay(Right):
    """An error with goal max."""

    def value(self, rows_N: Tensor) -> float:
        return 1 - super().value(rows_N)


class Random(Right):
    """A metric with a random value."""

    def value(self, rows_N: Tensor) -> float:
        return super().value(rows_N) * float(torch.rand(()))


class Writes(Right):
    """A metric that changes the input of the next one."""

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().rows(logits.sub_(logits.mean()), target)


class Unlabelled(Metric):
    """A metric that counts pixels without a label."""

    tasks = ("segmentation",)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        wrong = torch.where(target < 0, logits.argmax(1) > 2, logits.argmax(1) != target)
        return 1 - wrong.double().flatten(1).mean(1)


class Undefined(Right):
    """A metric that divides by zero if all predictions are correct."""

    def value(self, rows_N: Tensor) -> float:
        return float((rows_N.sum() - len(rows_N)) / (rows_N.sum() - len(rows_N)))


class Columns(Right):
    """A metric whose column has a wrong shape."""

    def column(self, rows_N: Tensor) -> Tensor:
        return rows_N[:2]


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (MeanOfBatches, r"in batches of \(1, 22, 17\), and .* in one of 40"),
        (InOrder, "with the images in another order"),
        (Percent, r"is [\d.]+ where .*, and its bounds are 0 and 1"),
        (OtherWay, "has the goal max, and is 0 where predictions are right, 1 where they are wrong"),
        (Random, "in batches of|has the goal max"),
        (Writes, "changes its arguments; .* write x = x . y in place"),
        (Unlabelled, "depends on predictions where there is no label|has the goal max"),
        (Undefined, "is nan where predictions are right"),
        (Columns, r"column has shape \(2,\); it is one value per image, \(40,\), or None"),
    ],
)
def test_bad_metric_fails_contract_test(cls: type[Metric], sentence: str) -> None:
    metric.register("bad")(cls)
    with pytest.raises(AssertionError, match=sentence):
        testing.check_component("metric", "bad")


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ({"goal": "high"}, "goal: found 'high'; allowed: max or min"),
        ({"bounds": {0, 1}}, "bounds: found {0, 1}; allowed: two numbers, the lower one first"),
        ({"bounds": 5}, "bounds: found 5; allowed: two numbers, the lower one first, with math.inf for an end without"),
        ({"bounds": (0, math.nan)}, "bounds: found (0, nan); allowed: two numbers"),
        ({"bounds": (1.0, 0.0)}, "bounds: found (1.0, 0.0); allowed: two numbers, the lower one first"),
        ({"bounds": (False, True)}, "bounds: found (False, True); allowed: two numbers"),
        (
            {"unit": 5},
            "unit: found 5; allowed: share, number, or a unit of 1 to 20 letters, digits, spaces, /, %, . and",
        ),
        ({"unit": ""}, "unit: found ''; allowed: share"),
        ({"unit": "images " * 3}, "unit: found 'images images images '; allowed: share"),
        ({"unit": "<b>"}, "unit: found '<b>'; allowed: share"),
        ({"unit": "ms\n"}, "unit: found 'ms\\n'; allowed: share"),
        ({"quantum": -1.0}, "quantum: found -1.0; allowed: 0 or more"),
        ({"step": math.inf}, "step: found inf; allowed: 0 or more"),
        ({"quantum": 1.0, "step": 2.0}, "quantum is 1 and step is 2; set one of them"),
        (
            {"tasks": "classification"},
            "tasks: found 'classification'; allowed: a tuple of at least one of classification",
        ),
        ({"tasks": ()}, "tasks: found (); allowed: a tuple of at least one"),
    ],
)
def test_metric_with_wrong_facts_is_refused_at_registration(declared: dict[str, Any], sentence: str) -> None:
    wrong = type("Wrong", (Right,), declared)
    with pytest.raises(BrokenComponent, match=rf"^metric 'wrong' \(.*\): {re.escape(sentence)}"):
        metric.register("wrong")(wrong)
    assert "wrong" not in metric.names()


@pytest.mark.parametrize(
    "unit", ["images", "ms", "1/s", "images per s", "%", "\N{MICRO SIGN}s", "m.s-2", "share", "number"]
)
def test_metric_with_unit_is_registered_and_its_facts_are_read_back(unit: str) -> None:
    metric.register("measured")(type("Measured", (Right,), {"unit": unit}))
    facts = MetricFacts("max", unit, (0.0, None), step=1.0)
    plan = Plan("s", "", (), (), Analysis(), metrics={"measured": facts})
    stored = json.loads(json.dumps(plan.to_json()))
    assert stored["metrics"]["measured"]["unit"] == unit
    assert Plan.from_json(stored).metrics == {"measured": facts}
    del stored["metrics"]["measured"]["step"]  # a file of an earlier version
    assert Plan.from_json(stored).metrics == {"measured": MetricFacts("max", unit, (0.0, None))}
    stored["metrics"]["measured"]["unit"] = "<b>"
    with pytest.raises(ValueError, match="found '<b>'; allowed: share, number, or a unit"):
        Plan.from_json(stored)


def test_good_metric_passes_contract_test() -> None:
    metric.register("good")(Right)
    testing.check_component("metric", "good")


@pytest.mark.parametrize("labels", [("T-shirt/top", "Trouser", "Dress"), (), ("a b", "a/b", "c")])
def test_accuracy_of_each_class_equals_recall_of_scikit_learn(labels: tuple[str, ...]) -> None:
    from sklearn.metrics import recall_score

    random = torch.Generator().manual_seed(0)
    logits_NK, target_N = torch.randn(60, 3, generator=random), torch.randint(0, 3, (60,), generator=random)
    data = DataInfo(image=(8, 8), channels=1, classes=3, labels=labels)
    metrics = build_metrics(data, [Choice(type="per_class_accuracy")])
    accumulator = MetricAccumulator(metrics)
    for part in (slice(0, 25), slice(25, 60)):
        accumulator.add_batch({"": logits_NK[part]}, target_N[part], torch.arange(60)[part])
    values = {
        name: value for name, value in accumulator.compute_result("val").metrics.items() if name.startswith("per_class")
    }
    expected = recall_score(target_N, logits_NK.argmax(1), average=None)
    names = ["T_shirt_top", "Trouser", "Dress"] if "Trouser" in labels else ["0", "1", "2"]
    assert values == pytest.approx(
        {
            "per_class_accuracy": expected.mean(),
            **{f"per_class_accuracy_{n}": v for n, v in zip(names, expected, strict=True)},
        }
    )
    present = target_N != 1
    few = metrics["per_class_accuracy"].parts(metrics["per_class_accuracy"].rows(logits_NK[present], target_N[present]))
    assert list(few) == [names[0], names[2]], "a class without images has no accuracy"


@pytest.mark.parametrize("seed", range(4))
def test_f1_and_auroc_equal_scikit_learn(seed: int) -> None:
    from sklearn.metrics import f1_score, roc_auc_score

    g = torch.Generator().manual_seed(seed)
    target_N = torch.randint(5, (60,), generator=g)
    logits_NK = torch.randn(60, 5, generator=g, dtype=torch.float64).mul(3).round() / 2  # with ties
    logits_NK[torch.arange(60), target_N] += 1
    f1, auroc = (metric.build(name) for name in ("macro_f1", "auroc"))

    def value(one: Metric, keep_N: torch.Tensor) -> float:
        parts = [one.rows(logits_NK[part], target_N[part]) for part in keep_N.nonzero()[:, 0].split(17)]
        return one.value(torch.cat(parts))

    for keep_N in (torch.ones(60, dtype=torch.bool), target_N != 2):
        labels, logits = target_N[keep_N], logits_NK[keep_N]
        assert value(f1, keep_N) == pytest.approx(f1_score(labels, logits.argmax(1), average="macro"), abs=1e-12)
        probabilities = logits.softmax(1)
        areas = [roc_auc_score(labels == label, probabilities[:, label]) for label in labels.unique()]
        assert value(auroc, keep_N) == pytest.approx(np.mean(areas), abs=1e-12)
    everything = roc_auc_score(target_N, logits_NK.softmax(1), multi_class="ovr", average="macro")
    assert value(auroc, torch.ones(60, dtype=torch.bool)) == pytest.approx(everything, abs=1e-12)
    assert value(auroc, target_N == 1) == 0.5, "one class alone has no other to be told from"


@pytest.mark.parametrize("levels", [2, 1000])  # with 2, most scores are ties
def test_metrics_of_several_labels_equal_scikit_learn(levels: int) -> None:
    from sklearn.metrics import average_precision_score, f1_score

    random = torch.Generator().manual_seed(0)
    target_NK = (torch.rand(80, 4, generator=random) < 0.3).float()
    logits_NK = torch.randint(-levels, levels, (80, 4), generator=random) / levels + 0.25 * target_NK
    metrics = build_metrics(DataInfo(image=(8, 8), channels=3, classes=4, task="multilabel"))
    assert list(metrics) == ["loss", "map", "micro_f1", "macro_f1"]
    accumulator = MetricAccumulator(metrics)
    for part in (slice(0, 33), slice(33, 80)):
        accumulator.add_batch({"": logits_NK[part]}, target_NK[part], torch.arange(80)[part])
    result, predicted_NK = accumulator.compute_result("val"), logits_NK > 0
    decisions = torch.nn.functional.binary_cross_entropy_with_logits(logits_NK, target_NK, reduction="none")
    assert result.metrics == pytest.approx(
        {
            "loss": float(decisions.mean()),
            "map": average_precision_score(target_NK, logits_NK),
            "micro_f1": f1_score(target_NK, predicted_NK, average="micro"),
            "macro_f1": f1_score(target_NK, predicted_NK, average="macro"),
        }
    )
    assert set(result.columns) == {"id", "loss"}, "an image has no single label"
    torch.testing.assert_close(result.columns["loss"].float(), decisions.mean(1))
    target_NK[:, 1], logits_NK[:, 1] = 0, -1
    rest = torch.tensor([0, 2, 3])
    for name, one in metrics.items():
        if name not in ("loss", "micro_f1"):
            few = one.value(one.rows(logits_NK[:, rest], target_NK[:, rest]))
            assert one.value(one.rows(logits_NK, target_NK)) == pytest.approx(few), "a class that does not occur"
