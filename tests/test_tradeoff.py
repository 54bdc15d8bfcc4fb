"""Tests of power laws, fronts and interactions of synthetic studies against numpy, statsmodels and brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.anova import AnovaRM

from vitlab import statistics
from vitlab.geometry import DataIdentity
from vitlab.plan.values import Arm, Plan, Planned, Trial
from vitlab.report import budgets, comparison, drawing, frame, tradeoff
from vitlab.report.cost_tables import front_columns
from vitlab.spec import STREAMS, Analysis, Choice, TrainSpec, TrialSpec
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Outcome, TrialResult

SPEC = TrialSpec(data=Choice("digits"), model=Choice("vit"), train=TrainSpec(steps=1))


def study(root: Path, arms: Mapping[str, tuple[Mapping[str, Any], list[float], int, float]]) -> tuple[Plan, Store]:
    """Return a study from arms with values, results of seeds, parameters and seconds per trial."""
    store, planned = Store(root), []
    for name, (_, values, params, wall_s) in arms.items():
        for seed, value in enumerate(values):
            trial = Trial(
                SPEC, {**dict.fromkeys(STREAMS, seed), "split": 0}, (), DataIdentity("d"), key=f"{name}-{seed}"
            )
            planned.append(Planned(name, seed, trial))
            around = Circumstances(1.7e9, wall_s, "host", 1, params, 10 * params, 10**8, {}, {})
            outcome = Outcome({"val/accuracy": value}, (), "w", 10, 640)
            store.trial(trial.key, trial.code).finish(TrialResult(trial.key, trial.code, "done", outcome, around, ""))
    first = next(iter(arms))
    named_arms = tuple(Arm(name, values, None if name == first else first) for name, (values, *_) in arms.items())
    return Plan("trade", "", named_arms, tuple(planned), Analysis()), store


def results(plan: Plan, store: Store) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    table = frame.results(plan, store)
    return table, comparison.summary(table, plan)


def test_numeric_arms_get_power_law(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = {16: 10_000, 32: 40_000, 64: 160_000}
    arms = {}
    for kind, dim in itertools.product(("learned", "none"), sizes):
        params = sizes[dim]
        values = 1 - (2.0 if kind == "none" else 1.0) * params**-0.3 * np.exp(random.normal(0, 0.02, 4))
        arms[f"{kind} {dim}"] = ({"model.dim": dim, "model.position": kind}, values.tolist(), params, 1.0)
    plan, store = study(tmp_path, arms)
    scalings = tradeoff.scalings(plan, frame.results(plan, store))
    assert [(item.size, item.series) for item in scalings] == list(
        itertools.product(("params", "macs"), ("learned", "none"))
    )
    for item in scalings[:2]:
        logs = [np.log(1 - np.array(arms[arm][1])).mean() for arm in item.arms]
        line = stats.linregress(np.log([arms[arm][2] for arm in item.arms]), logs)
        assert item.law.exponent == pytest.approx(line.slope) and item.law.scale == pytest.approx(
            math.exp(line.intercept)
        )
        assert item.law.exponent_low < -0.3 < item.law.exponent_high
    # Another learning rate of one size is no replicate of that size, and has no law of its own.
    faster = {
        f"lr {name}": ({**values, "train.lr": 0.1}, [0.1, 0.2], params, wall)
        for name, (values, _, params, wall) in itertools.islice(arms.items(), 1)
    }
    slow = {name: ({**values, "train.lr": 0.001}, *rest) for name, (values, *rest) in arms.items()}
    plan, store = study(tmp_path / "lr", slow | faster)
    again = tradeoff.scalings(plan, frame.results(plan, store))
    assert [(item.arms, item.law) for item in again] == [(item.arms, item.law) for item in scalings]
    assert again[0].series == "learned, lr=0.001"
    two = dict(itertools.islice(arms.items(), 2))
    plan, store = study(tmp_path / "two", two)
    assert tradeoff.scalings(plan, frame.results(plan, store)) == []  # two sizes lie on every power law


def test_front_has_arms_not_beaten_in_both(tmp_path: Path) -> None:
    arms = {
        "small": ({}, [0.70, 0.72], 100, 1.0),
        "waste": ({}, [0.69, 0.70], 200, 4.0),
        "middle": ({}, [0.80, 0.81], 300, 2.0),
        "large": ({}, [0.80, 0.80], 400, 3.0),
    }
    plan, store = study(tmp_path, arms)
    _, rows = results(plan, store)
    front = tradeoff.fronts(plan, rows)
    assert set(front) == {"params", "macs"}
    assert all(where == {"small": True, "waste": False, "middle": True, "large": False} for where in front.values())
    same = {name: (values, reached, 100, wall_s) for name, (values, reached, _, wall_s) in arms.items()}
    plan, store = study(tmp_path / "same", same)
    _, rows = results(plan, store)
    assert len({row["images_per_s"] for row in rows}) == 4, "trials that share a machine differ in speed for no reason"
    assert tradeoff.fronts(plan, rows) == {}
    alone = [{**row, "train_images_per_s": speed} for row, speed in zip(rows, (400, 100, 300, 200), strict=True)]
    expected = {"small": True, "waste": False, "middle": True, "large": False}
    assert tradeoff.fronts(plan, alone) == {"train_images_per_s": expected}, "measured of each arm alone"


def test_front_arms_with_diverged_seeds_are_marked(tmp_path: Path) -> None:
    arms = {name: ({}, [0.7 + size / 1e4] * 3, size, 1.0) for name, size in (("small", 100), ("large", 400))}
    plan, store = study(tmp_path, arms)
    for seed in (1, 2):
        folder = store.trial(f"large-{seed}", "")
        result = folder.result()
        assert result is not None
        folder.finish(replace(result, status="diverged", outcome=replace(result.outcome, metrics={})))
    _, rows = results(plan, store)
    _, note = front_columns(tradeoff.fronts(plan, rows), rows)
    assert set(note.cells) == {"small; large (2 broken seeds)"}


@pytest.mark.parametrize("width", [drawing.WIDE, drawing.NARROW])
def test_front_labels_cover_neither_points_nor_each_other(tmp_path: Path, width: float) -> None:
    random = np.random.default_rng(1)
    arms = {
        f"an arm called {index}": ({}, (0.8 + 0.001 * random.normal(size=2)).tolist(), 100 + 40 * (index % 3), 1.0)
        for index in range(9)
    }
    arms["far, cheap, and of a name that takes three lines"] = ({}, [0.9, 0.9], 90, 0.5)
    plan, store = study(tmp_path, arms)
    figure = budgets.pareto(plan, comparison.summary(frame.results(plan, store), plan), width=width)
    assert figure is not None
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        names = [" ".join(text.get_text().split()) for text in axes.texts]
        assert len(boxes) >= 2 and "far, cheap, and of a name that takes three lines" in names
        assert all(axes.bbox.containsx(x) and axes.bbox.containsy(y) for box in boxes for x, y in box.get_points())
        for first, second in itertools.combinations(boxes, 2):
            assert not first.overlaps(second)
        dots = [axes.transData.transform(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == "o"]
        assert len(dots) == 10 and not any(box.count_contains(dots) for box in boxes)


def test_grid_interaction_equals_repeated_measures_anova(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    arms, rows = {}, []
    for a, b in itertools.product((0, 1), ("x", "y")):
        values = random.normal(0.8 + 0.02 * a + 0.04 * a * (b == "y"), 0.01, 6)
        arms[f"{a}{b}"] = ({"model.depth": a, "model.mlp": b}, values.tolist(), 100, 1.0)
        rows += [{"seed": seed, "a": a, "b": b, "y": value} for seed, value in enumerate(values)]
    table = AnovaRM(pd.DataFrame(rows), "y", "seed", within=["a", "b"]).fit().anova_table
    plan, store = study(tmp_path, arms)
    [interaction] = tradeoff.interactions(plan, frame.results(plan, store))
    assert (interaction["first"], interaction["second"], interaction["pairs"]) == ("model.depth=1", "model.mlp=y", 6)
    assert interaction["p"] == interaction["p_corrected"] == pytest.approx(table.loc["a:b", "Pr > F"])
    mean = {name: np.mean(values) for name, (_, values, *_) in arms.items()}
    assert interaction["difference"] == pytest.approx(mean["1y"] - mean["1x"] - mean["0y"] + mean["0x"])
    one_at_a_time = {name: arm for name, arm in arms.items() if name != "1y"}
    plan, store = study(tmp_path / "one", one_at_a_time)
    assert tradeoff.interactions(plan, frame.results(plan, store)) == []


def test_third_factor_is_averaged_and_levels_form_a_family(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    arms = {}
    for a, b, c in itertools.product((0, 1, 2), ("x", "y"), (8, 9)):
        values = random.normal(0.5, 0.01, 5)
        arms[f"{a}{b}{c}"] = ({"model.a": a, "model.b": b, "model.c": c}, values.tolist(), 100, 1.0)
    plan, store = study(tmp_path, arms)
    interactions = tradeoff.interactions(plan, frame.results(plan, store))
    assert len(interactions) == 2 + 2 + 1 and {row["family"] for row in interactions} == {5}

    def value(a: int, b: str, c: int) -> Any:
        return np.array(arms[f"{a}{b}{c}"][1])

    per_seed = np.mean(
        [value(2, "y", c) - value(2, "x", c) - value(0, "y", c) + value(0, "x", c) for c in (8, 9)], axis=0
    )
    row = next(row for row in interactions if (row["first"], row["second"]) == ("model.a=2", "model.b=y"))
    reference = stats.ttest_1samp(per_seed, 0.0)
    interval = reference.confidence_interval(1 - 0.05 / 5)
    assert (row["p"], row["low"], row["high"]) == pytest.approx((reference.pvalue, interval.low, interval.high))


def test_share_of_draws_on_front_equals_normal_probability():
    draws = np.random.default_rng(0)
    n = 200
    first, second = ({seed: float(value) for seed, value in enumerate(x)} for x in draws.normal(size=(2, n)))
    second = {seed: value + 0.1 for seed, value in second.items()}
    d = np.array([*second.values()]) - np.array([*first.values()])
    cheap, dear = statistics.pareto_shares([1.0, 2.0], [first, second], draws=20_000)
    assert cheap == 1.0, "nothing is cheaper"
    assert dear == pytest.approx(stats.norm.cdf(d.mean() / stats.sem(d)), abs=0.015)
    level = {seed: value - d.mean() for seed, value in second.items()}
    assert statistics.pareto_shares([1.0, 2.0], [first, level], draws=20_000)[1] == pytest.approx(0.5, abs=0.015)
    # Seeds correlate: a constant difference is certain.
    assert (
        statistics.pareto_shares([1.0, 2.0], [first, {seed: value + 1e-6 for seed, value in first.items()}])[1] == 1.0
    )
    assert all(math.isnan(share) for share in statistics.pareto_shares([1.0, 2.0], [first, {0: 1.0}]))
