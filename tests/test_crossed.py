"""Tests of seeds crossed with images: mean squares, the part of the finite split, intervals for new images."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm

import vitlab
from vitlab import lab
from vitlab.report import frame as reader
from vitlab.report.frame import gather_trials
from vitlab.statistics.replicates import MeanSquares, interval_for_new_images, sd_interval, split_sd

pytestmark = pytest.mark.usefixtures("no_figures")


def test_mean_squares_equal_analysis_of_variance() -> None:
    values_SI = np.random.default_rng(0).normal(size=(4, 7)) + np.arange(7)
    frame = pd.DataFrame([(s, i, values_SI[s, i]) for s in range(4) for i in range(7)], columns=["s", "i", "y"])
    reference = anova_lm(ols("y ~ C(s) + C(i)", frame).fit())
    expected = reference["sum_sq"] / reference["df"]
    squares = MeanSquares.from_table(values_SI)
    assert [squares.images, squares.rest] == pytest.approx(expected.tolist()[1:])


def test_split_sd_is_whole_spread_of_equally_good_models() -> None:
    """Correctness is drawn anew for each seed, so models differ by the images alone."""
    draws = np.random.default_rng(1)
    p_I = draws.uniform(0.2, 1.0, 360)
    tables = [draws.random((200, 360)) < p_I for _ in range(20)]
    expected = math.sqrt((p_I * (1 - p_I)).mean() / 360)
    assert np.mean([split_sd(table.astype(float)) for table in tables]) == pytest.approx(expected, rel=0.02)
    better = np.array([0.0, 0.3] * 100)[:, None]  # half of the seeds lose 30 % of the images
    worse = [(draws.random((200, 360)) < p_I) & (draws.random((200, 360)) >= better) for _ in range(20)]
    split = np.mean([split_sd(table.astype(float)) for table in worse])
    whole = np.mean([table.mean(axis=1).std(ddof=1) for table in worse])
    own = 0.15 * p_I.mean() * math.sqrt(200 / 199)
    assert whole**2 == pytest.approx(split**2 + own**2, rel=0.03)


@pytest.mark.parametrize(("by_seed", "by_image"), [(0.2, 0.2), (0.05, 0.5), (0.0, 1.0)])
def test_interval_for_new_images_covers_new_trainings_and_images(by_seed: float, by_image: float) -> None:
    draws, seeds, images, studies = np.random.default_rng(2), 5, 100, 3000
    quantile = stats.t.ppf(0.975, seeds - 1)
    covered = own = 0
    for _ in range(studies):
        d = (
            draws.normal(0, by_seed, (seeds, 1))
            + draws.normal(0, by_image, images)
            + draws.normal(size=(seeds, images))
        )
        means = d.mean(axis=1)
        se = means.std(ddof=1) / math.sqrt(seeds)
        low, high = interval_for_new_images(d, se, seeds - 1, alpha=0.05)
        inner = means.mean() - quantile * se, means.mean() + quantile * se
        assert low <= inner[0] + 1e-12 and high >= inner[1] - 1e-12
        covered += low <= 0 <= high
        own += inner[0] <= 0 <= inner[1]
    assert 0.93 <= covered / studies <= 0.985
    if by_image >= 0.5:
        assert own / studies < 0.92, "the interval for these images must not hold for others"


def test_interval_of_standard_deviation_equals_chi_square() -> None:
    low, high = sd_interval(2.0, 9, 0.1)
    assert (low, high) == pytest.approx(tuple(2 * math.sqrt(9 / stats.chi2.isf(tail, 9)) for tail in (0.05, 0.95)))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crossed")
    content = {
        "study": "crossed",
        "base": {
            "data": {"type": "digits"},
            "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
            "train": {"steps": 200, "batch_size": 32, "evaluations": 1},
        },
        "design": {"arms": {"baseline": {}, "other": {"model.position": "none"}}},
        "seeds": 3,
        "run": {"executor": "inline", "tracker": "none"},
    }
    file = folder / "crossed.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    lab.run(file, out=folder / "out")
    return file


@pytest.mark.slow
def test_comparison_has_interval_for_new_images(study: Path) -> None:
    out = study.parent / "out"
    table = vitlab.compare(study, out=out).set_index("arm")
    rows = vitlab.predictions(study, out=out).query("split == 'val'")
    right = (rows["prediction"] == rows["label"]).astype(float).to_numpy().reshape(2, 3, -1)
    for number, arm in enumerate(("baseline", "other")):
        squares = MeanSquares.from_table(right[number])
        expected = math.sqrt(squares.rest / right.shape[2])
        assert table.loc[arm, "split_sd"] == pytest.approx(expected)
    d = right[1] - right[0]
    low, high = interval_for_new_images(d, float(stats.sem(d.mean(axis=1))), 2, alpha=0.05)
    assert table.loc["other", ["new_images_low", "new_images_high"]].tolist() == pytest.approx([low, high])
    report = (out / "studies" / "crossed" / "report" / "report.md").read_text()
    assert "Models that are equally good would scatter by" in report and "interval with new images" in report


@pytest.mark.parametrize(("metric", "available"), [("val/loss", True), ("val/ece", False), ("test/accuracy", True)])
def test_values_of_images_are_read_if_their_mean_is_the_metric(study: Path, metric: str, available: bool) -> None:
    _, plan = lab.plan_study(study, out=study.parent / "out", changes={"analysis.metric": metric})
    from vitlab.store.folders import Store

    store = Store((study.parent / "out").resolve())
    values = reader.image_values(plan, gather_trials(plan, store))
    assert bool(values) == available
    if available:
        assert {arm: sorted(seeds) for arm, seeds in values.items()} == {"baseline": [0, 1, 2], "other": [0, 1, 2]}


def test_values_of_other_images_are_not_crossed(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlab.store.folders import Store

    _, plan = lab.plan_study(study, out=study.parent / "out")
    trials = gather_trials(plan, Store((study.parent / "out").resolve()))
    load, calls = reader._read_image_values, iter(range(100))

    def shifted(*arguments):  # the images of the third trial are others
        ids, values = load(*arguments)
        return ids + (next(calls) == 2), values

    assert reader.image_values(plan, trials)
    monkeypatch.setattr(reader, "_read_image_values", shifted)
    assert reader.image_values(plan, trials) == {}
    monkeypatch.setattr(
        reader, "_read_image_values", lambda *arguments: tuple(values[:1] for values in load(*arguments))
    )
    assert reader.image_values(plan, trials) == {}, "one image has no spread"
