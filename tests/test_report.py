"""Tests of the report on synthetic studies whose statistics are computed here with scipy."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from scipy import stats
from synthetic_studies import (
    BASE,
    METRICS,
    NEAR,
    NONE,
    POSITIONS,
    SINE,
    STEPS,
    answers_of,
    arms_table,
    document,
    outcome,
    result_of,
    study,
    text_of,
    trial_of,
)

from vitlab import report
from vitlab.comparison import MEANINGS, Verdict
from vitlab.errors import UserError
from vitlab.explaining.colours import GREY
from vitlab.planning import registration
from vitlab.planning.study_folder import read_plan
from vitlab.planning.values import Arm, EarlierResults, MetricFacts, Plan, Planned, Registration, Rival, Tuning
from vitlab.report import (
    comparison,
    drawing,
    frame,
    notes,
    phrasing,
)
from vitlab.report.api import Answer
from vitlab.report.formats import parts_to_text
from vitlab.report.frame import StudyResults
from vitlab.report.notebook import Comparison
from vitlab.report.notes import notes as report_notes
from vitlab.report.page import trial_columns
from vitlab.report.report import state_digest
from vitlab.report.sections import Findings, Image, all_sections, curves
from vitlab.report.sections.arms import arm_columns as arm_columns
from vitlab.report.sections.explained import reasons_file
from vitlab.report.sections.further_metrics import MetricOfArm
from vitlab.spec import Analysis, Choice
from vitlab.statistics.replicates import mean_interval
from vitlab.store.files import write_json
from vitlab.store.folders import Store


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures of reports."""
    monkeypatch.setattr(report.Report, "figures", {})


# -- frames -----------------------------------------------------------------------------------------------------------


def test_results_have_one_row_per_trial_and_documented_columns(tmp_path):
    plan, store = study(tmp_path)
    results = frame.results(plan, store)
    assert list(results.columns) == [
        *("arm", "seed", "status", "study", "baseline", "trial", "code", "failure_kind", "failure", "model.position"),
        *("origins", "engine", "threads", "device", "ended", "params", "macs", "steps", "images", "wall_s"),
        *("train/loss", "test/accuracy", "val/accuracy"),
    ]
    assert len(results) == 20
    row = results[(results["arm"] == "position=none") & (results["seed"] == 3)].iloc[0]
    assert row["val/accuracy"] == 0.939
    assert (row["baseline"], row["model.position"], row["status"]) == ("baseline", "none", "done")
    assert (row["params"], row["steps"], row["threads"], row["engine"]) == (113_290, 200, 1, "eager")
    assert row["trial"] == plan.trials[8].trial.key
    assert results["baseline"].isna().sum() == 5
    assert results["failure_kind"].isna().all() and (results["failure"] == "").all()


def test_trials_without_result_keep_rows_and_column_types(tmp_path):
    plan, store, full, _ = outcome(tmp_path / "a")
    plan, store = study(tmp_path / "b", {arm: [None] * 5 for arm in POSITIONS})
    failed, running = (store.trial(plan.trials[i].trial.key, plan.trials[i].trial.code) for i in (6, 7))
    failed.write_failure("CUDA out of memory")
    with running.lease():
        results = frame.results(plan, store)
    assert results["status"].value_counts().to_dict() == {"missing": 18, "failed": 1, "running": 1}
    assert results.loc[6, "failure"] == "CUDA out of memory"
    assert results["val/accuracy"].isna().all()
    common = [name for name in full.frame.columns if name in results.columns]
    assert full.frame.dtypes[common].equals(results.dtypes[common])


def test_missing_value_has_reason_column(tmp_path, undrawn):
    plan, store = study(tmp_path, {"baseline": BASE[:1], "b": [None] * 7})
    folders = [store.trial(item.trial.key, item.trial.code) for item in plan.trials[1:]]
    kinds = ("error", "oom", "timeout", "preempted", "lost")
    for folder, kind in zip(folders, kinds, strict=False):
        folder.write_failure(f"by {kind}", kind=kind)
    folders[5].write_result(result_of(plan.trials[6].trial, {}, status="diverged", failure="loss is nan"))
    results = frame.results(plan, store)
    assert results["failure_kind"].tolist()[1:7] == [*kinds, "diverged"]
    assert results["failure_kind"].isna().tolist() == [True, *[False] * 6, True]
    assert results["failure"].tolist()[1:3] == ["by error", "by oom"]
    notes = document(plan, store)["notes"]
    assert "b, seed 1, failed (oom): by oom." in notes and "b, seed 0, failed: by error." in notes
    assert text_of(plan, store, "html").count(">preempted</td>") == 1


def test_trial_with_failed_prerequisite_is_failed(tmp_path):
    """Directly or indirectly; with a pending prerequisite it is missing."""
    teacher, body, other = (dataclasses.replace(trial_of(name, 0), code="t") for name in ("teacher", "body", "other"))
    body = dataclasses.replace(body, needs={"teacher": f"{teacher.key}/t"})
    plan, store = study(tmp_path, {"baseline": BASE[:2], "b": [None] * 3})
    needs = ({"teacher": f"{teacher.key}/t"}, {"body": f"{body.key}/t"}, {"teacher": f"{other.key}/t"})
    blocked = [
        dataclasses.replace(item, trial=dataclasses.replace(item.trial, needs=need))
        for item, need in zip(plan.trials[2:], needs, strict=True)
    ]
    plan = dataclasses.replace(plan, trials=(*plan.trials[:2], *blocked), prerequisites=(teacher, body, other))
    assert frame.results(plan, store)["status"].tolist()[2:] == ["missing"] * 3
    result = result_of(teacher, {}, status="diverged", failure="loss is nan")
    store.trial(teacher.key, "t").write_result(result)
    results = frame.results(plan, store)
    assert results["status"].tolist()[2:] == ["failed", "failed", "missing"]
    assert results["failure_kind"].tolist()[2:4] == ["prerequisite"] * 2
    assert results["failure"].iloc[2] == "its teacher diverged: loss is nan"
    assert results["failure"].iloc[3].startswith("its body failed: its teacher")
    assert comparison.summary_rows(StudyResults.read(plan, store))[1]["lost"] == 2
    assert document(plan, store)["made"]["failed"] == 0, "these trainings never started"


def test_varied_values_are_numeric_if_all_are(tmp_path):
    arms = {"baseline": BASE, "b": NONE, "c": NEAR}
    values = [(7, 0.1, "learned"), (4, 1, {"type": "rope2d", "theta": 50.0}), (14, 0.5, "none")]
    plan, store = study(tmp_path, arms)
    named_arms = tuple(
        Arm(name, dict(zip(("model.patch_size", "model.drop", "model.position"), value, strict=True)))
        for name, value in zip(arms, values, strict=True)
    )
    results = frame.results(Plan(plan.study, "", named_arms, plan.trials, plan.analysis), store)
    assert results["model.patch_size"].dtype == "int64"
    assert results["model.drop"].dtype == "float64"
    assert results["model.position"].iloc[5] == "rope2d(theta=50)"


def test_arm_may_vary_whole_training_section(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "longer": NONE})
    arms = tuple(Arm(arm.name, {"train": {"steps": 9} if arm.baseline else None}, arm.baseline) for arm in plan.arms)
    variant = Plan(plan.study, "", arms, plan.trials, plan.analysis)
    results = frame.results(variant, store)
    assert list(results.columns).count("train") == 1 and "train/loss" in results.columns
    assert "longer" in text_of(variant, store, "md")


def test_history_is_long_and_timed_by_journal(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE[:2], "other": [0.5, None]})
    first, running = (store.trial(plan.trials[i].trial.key, plan.trials[i].trial.code) for i in (0, 3))
    first.emit("start", attempt=1)
    for step in STEPS[1:3]:
        first.emit("metrics", step=step, epoch=0.1, images=1, metrics={"val/accuracy": 9.0, "system/x": 1.0})
    running.path.mkdir(parents=True)
    running.emit("metrics", step=50, epoch=2.5, images=1, metrics={"val/accuracy": 0.25, "system/memory": 1.0})
    history = frame.history(plan, store)
    assert list(history.columns) == ["arm", "seed", "step", "trial", "time", "epoch", "metric", "value"]
    assert len(history) == 3 * 5 * 2 + 1
    mine = history[(history["trial"] == plan.trials[0].trial.key) & (history["metric"] == "val/accuracy")]
    assert mine["time"].notna().tolist() == [False, True, True, False, False]
    assert mine["value"].iloc[-1] == BASE[0]  # from the result, not from the journal
    assert mine["time"].dt.year.iloc[1] >= 2024
    so_far = history[history["trial"] == plan.trials[3].trial.key]
    assert so_far[["metric", "value", "step"]].values.tolist() == [["val/accuracy", 0.25, 50]]


def test_best_value_comes_from_history_with_bias_note(tmp_path):
    for goal, best in (("max", 0.99), ("min", 0.2)):
        analysis = Analysis(at="best", goal=goal)
        plan, store = study(tmp_path / goal, {"baseline": BASE[:3], "b": [None, None, None]}, analysis=analysis)
        for planned in plan.trials[3:]:
            curve = [0.2, math.nan, 0.99, 0.5, 0.4]
            result = result_of(planned.trial, {"val/accuracy": 0.4}, curve=curve)
            store.trial(result.key, result.code).write_result(result)
        results = frame.results(plan, store)
        assert results["val/accuracy@best"].tolist()[3:] == [best] * 3
        assert results["val/accuracy"].tolist()[3:] == [0.4] * 3
        assert comparison.summary_rows(StudyResults.read(plan, store))[1]["mean"] == pytest.approx(best)
        assert any("optimistic" in note for note in document(plan, store)["notes"])


def test_metric_judged_at_best_is_no_further_metric(tmp_path):
    """Metrics of train.metrics have a table; the judged one stands among the arms, at its best."""
    plan, store = study(tmp_path, {"baseline": [None] * 2, "b": [None] * 2}, analysis=Analysis(at="best"))
    trials = []
    for planned in plan.trials:
        train = planned.trial.spec.train.model_copy(update={"metrics": (Choice("brier"),)})
        trial = dataclasses.replace(planned.trial, spec=planned.trial.spec.model_copy(update={"train": train}))
        finals = {"val/accuracy": 0.4, "val/loss": 1.0, "val/brier": 0.3 + 0.1 * planned.seed}
        store.trial(trial.key, trial.code).write_result(result_of(trial, finals, curve=[0.2, 0.9, 0.5, 0.4, 0.4]))
        trials.append(dataclasses.replace(planned, trial=trial))
    results = StudyResults.read(dataclasses.replace(plan, trials=tuple(trials)), store)
    rows = comparison.summary_rows(results)
    assert [row["mean"] for row in rows] == [0.9, 0.9]
    further = list(all_sections()["heads"].rows(Findings(results, rows, store)))
    assert [(row.metric, row.mean) for row in further] == [("val/brier", pytest.approx(0.35))] * 2


# -- judgement --------------------------------------------------------------------------------------------------------


def test_summary_equals_scipy(tmp_path):
    _, _, _, summary = outcome(tmp_path, analysis=Analysis(alpha=0.1, variance="own"))
    p = []
    for arm, values in list(POSITIONS.items())[1:]:
        row, reference = summary.loc[arm], stats.ttest_rel(values, BASE)
        interval = reference.confidence_interval(1 - 0.1 / 3)  # all three hold at once
        assert row["difference"] == pytest.approx(np.mean(values) - np.mean(BASE))
        assert (row["difference_low"], row["difference_high"]) == pytest.approx((interval.low, interval.high))
        assert row["p"] == pytest.approx(reference.pvalue)
        low, high = stats.t.interval(0.9, 4, np.mean(values), stats.sem(values))
        assert (row["low"], row["high"]) == pytest.approx((low, high))
        assert row["test/accuracy"] == pytest.approx(np.mean(values) - 0.01)
        p.append(reference.pvalue)
    assert summary["p_corrected"].tolist()[1:] == pytest.approx(np.minimum(1, 3 * np.array(p)).tolist())
    assert summary["family"].tolist()[1:] == [3, 3, 3]
    assert summary.loc["baseline", ["difference", "p"]].isna().all()


def test_comparisons_share_their_variance_by_the_rule(tmp_path):
    """Three comparisons: weight (3 - 1) / 6, the mean of variances, never below one's own, and t of scipy."""
    _, _, results, rows = outcome(tmp_path)
    d = np.array([np.subtract(values, BASE) for values in list(POSITIONS.values())[1:]])
    own, c, df = d.var(axis=1, ddof=1), 1 / 3, 4 * (1 + 1 / 3)
    assert own.max() < 100 * own.min()
    variance = np.maximum(own, (own + c * own.mean()) / (1 + c))
    t = d.mean(axis=1) / np.sqrt(variance / 5)
    assert rows["shared"].tolist()[1:] == [3, 3, 3] and set(rows["test"].dropna()) == {"paired t"}
    assert rows["difference_df"].tolist()[1:] == pytest.approx([df] * 3)
    p = 2 * stats.t.sf(np.abs(t), df)
    assert rows["p_corrected"].tolist()[1:] == pytest.approx(np.minimum(1, 3 * p).tolist())
    half = stats.t.ppf(1 - 0.05 / 6, df) * np.sqrt(variance / 5)
    assert rows["difference_high"].tolist()[1:] == pytest.approx((d.mean(axis=1) + half).tolist())
    excludes_zero = (rows["difference_low"] > 0) | (rows["difference_high"] < 0)
    assert excludes_zero.tolist() == rows["verdict"].isin(["better", "worse"]).tolist()
    assert "corrected for 3 comparisons" in answers_of(results)[0]
    assert any(
        "mean variance of the 3 comparisons" in note for note in document(results.plan, Store(tmp_path))["notes"]
    )


def test_comparison_of_other_seeds_keeps_its_own_variance(tmp_path):
    plan, store, _, rows = outcome(tmp_path / "b", {**POSITIONS, "late": [0.95, 0.96, 0.955, 0.953]})
    assert rows["shared"].tolist()[1:] == [3, 3, 3, 1]
    assert rows.loc["late", "p"] == pytest.approx(stats.ttest_rel([0.95, 0.96, 0.955, 0.953], BASE[:4]).pvalue)
    notes = document(plan, store)["notes"]
    assert any("their own variance alone: late." in note for note in notes)
    assert any("the 4 seeds that both have, their means are over all" in note for note in notes)
    _, _, _, own = outcome(tmp_path / "c", analysis=Analysis(variance="own"))
    assert own["shared"].tolist()[1:] == [1, 1, 1]
    assert own["p"].tolist()[1:] == pytest.approx(
        [stats.ttest_rel(values, BASE).pvalue for values in list(POSITIONS.values())[1:]]
    )


def test_answers_in_plain_words(tmp_path):
    _, _, results, _ = outcome(tmp_path, analysis=Analysis(variance="own"))
    worse, unclear, _ = answers_of(results)
    interval = stats.ttest_rel(NONE, BASE).confidence_interval(1 - 0.05 / 3)
    low, high = (f"{100 * end:.1f}".replace("-", "\N{MINUS SIGN}") for end in interval)
    assert worse == (
        f"position=none is 3.1 points below baseline (simultaneous 95 % interval {low} to {high}, "
        "p < 0.001, corrected for 3 comparisons)."
    )
    assert unclear.startswith("cannot tell: position=sincos2d is less than 0.1 points above baseline (simultaneous ")
    assert unclear.endswith("corrected for 3 comparisons).")


def test_margin_makes_equivalence_a_verdict(tmp_path):
    from statsmodels.stats.weightstats import ttost_paired

    analysis = Analysis(margin=0.01, correction="none", variance="own")
    plan, store, _, rows = outcome(tmp_path, POSITIONS, analysis=analysis)
    for arm, values in (("position=sincos2d", NEAR), ("position=none", NONE)):
        expected = ttost_paired(np.array(values), np.array(BASE), -0.01, 0.01)[0]
        assert rows.loc[arm, "p_equal"] == pytest.approx(expected)
    half = stats.t.ppf(0.95, 4) * stats.sem(np.array(NEAR) - np.array(BASE))
    assert rows.loc["position=sincos2d", "equal_high"] == pytest.approx(np.mean(NEAR) - np.mean(BASE) + half)
    sentences = answers_of(StudyResults.read(plan, store))
    assert (
        "shown to be equivalent within 1.0 points (90 % interval" in sentences[1] and "cannot tell" not in sentences[1]
    )
    assert "equivalent" not in sentences[0] and "below" in sentences[0], "the interval lies beyond the margin"
    plan, store, *_ = outcome(tmp_path / "less", POSITIONS, analysis=analysis.model_copy(update={"margin": 0.006}))
    assert "; not shown to be equivalent within 0.6 points" in answers_of(StudyResults.read(plan, store))[2]
    assert "equivalent" in text_of(plan, store, "md")


def test_verdict_is_equal_in_every_format(tmp_path, undrawn):
    """The arms have clear differences, so the verdicts are known."""
    near = [value + shift for value, shift in zip(BASE, (1e-4, -1e-4, 0.0, 2e-4, -2e-4), strict=True)]
    wide = [0.99, 0.90, 1.0, 0.89, 0.97]
    arms = {"baseline": BASE, "up": [value + 0.01 + noise for value, noise in zip(BASE, near, strict=True)]}
    arms |= {"down": NONE, "equal": BASE, "near": near, "wide": wide, "taught": NONE}
    plan, store = study(tmp_path, arms, analysis=Analysis(margin=0.002, variance="own"))
    plan = _with_teachers(plan, {"baseline": ["k1/c"] * 5, "taught": ["k2/c"] * 5})
    expected = [None, "better", "worse", "same", "equivalent", "cannot tell", "refused"]
    assert expected[1:] == list(Verdict) == list(MEANINGS)
    summary = comparison.summary_rows_to_frame(comparison.summary_rows(StudyResults.read(plan, store)), plan.analysis)
    assert summary["verdict"].dtype == "string" and summary["verdict"].isna().tolist() == [True, *[False] * 6]
    assert summary["verdict"].tolist()[1:] == expected[1:]
    assert summary["refused"].notna().tolist() == [*[False] * 6, True]
    doc = document(plan, store)
    assert [row["verdict"] for row in doc["arms"]] == expected
    report.write(report.collect_report(plan, store), tmp_path / "report")
    assert pd.read_csv(tmp_path / "report" / "summary.csv")["verdict"].tolist()[1:] == expected[1:]
    html = text_of(plan, store, "html")
    assert re.findall(r'<td class="verdict"[^>]*>(.*?)</td>', html) == ["", *expected[1:]]
    assert [answer.partition(":")[0] for answer in doc["answers"][-2:]] == expected[-2:]
    assert re.findall(r'<li class="([\w-]+)">', html) == [word.replace(" ", "-") for word in expected[1:]]


def test_loss_is_shown_raw_and_less_is_better(tmp_path):
    low = [value - 0.9 for value in NONE]
    high = [value - 0.9 for value in BASE]
    analysis = Analysis(metric="val/loss", goal="min")
    _, _, results, summary = outcome(tmp_path, {"baseline": high, "b": low}, analysis=analysis, metric="val/loss")
    [sentence] = answers_of(results)
    assert sentence.startswith("b is 0.031 below baseline, which is better (95 % interval \N{MINUS SIGN}0.03")
    assert "points" not in sentence and "after" not in sentence
    assert summary.loc["b", "verdict"] == "better"


BLUNDERS = MetricFacts("min", "images", (0.0, None), step=1.0)


def count_study(root, arms, unit="images", **options):
    """Return a study that is judged by a count with a unit of its own."""
    facts = {"loss": METRICS["loss"], "blunders": dataclasses.replace(BLUNDERS, unit=unit)}
    analysis = Analysis(metric="val/blunders", goal="min")
    return study(root, arms, analysis=analysis, metric="val/blunders", metrics=facts, **options)


def test_own_unit_is_shown_in_every_format(tmp_path):
    plan, store = count_study(tmp_path, {"baseline": [9, 8, 9, 10, 9], "b": [6, 5, 6, 7, 5]})
    page = text_of(plan, store, "md")
    assert "| val blunders (images) ± sd |" in page and "| test blunders (images), mean" in page
    assert "b is 3.2 images below baseline, which is better (95 % interval" in page
    terminal = text_of(plan, store, "terminal")
    assert "val blunders (images)" in terminal and "b is 3.2 images below baseline" in terminal
    tex = text_of(plan, store, "latex")
    assert "difference (images)" in tex and "deviation of val blunders (images) over 5 seeds; lower is better." in tex
    html = text_of(plan, store, "html")
    assert ">val blunders (images)</th>" in html and "points" not in page + tex + terminal
    notebook = Comparison.of(report.collect_report(plan, store))._repr_html_()
    assert ">val blunders (images) ± sd</th>" in notebook and "val/blunders: lower is better." in notebook
    drawn = figures_of(plan, store)["arms"]
    assert [axes.get_xlabel() for axes in drawn.axes] == [
        "val blunders (images); lower is better",
        "difference from the baseline\n(images)",
    ]


def test_unit_of_percent_has_differences_in_points(tmp_path):
    plan, store = count_study(tmp_path, {"baseline": [90.0, 80.0, 95.0], "b": [9.0, 5.5, 6.0]}, unit="%")
    page = text_of(plan, store, "md")
    assert "| val blunders (%) ± sd |" in page and "b is 81.5 points below baseline" in page
    assert "| 88.3 ± 7.6 |" in page, "not multiplied by 100"


@pytest.mark.parametrize("format", ["terminal", "md", "html", "latex", "latex-all"])
def test_baseline_of_another_name_is_marked_in_every_table(tmp_path: Path, format: str) -> None:
    plan, store = study(tmp_path, {"position=learned": BASE, "position=none": NONE})
    page = text_of(plan, store, format).replace(r"\penalty500{}", "")
    assert "position=learned (baseline)" in page and "position=none (baseline)" not in page
    plan, store = study(tmp_path / "named", {"baseline": BASE, "position=none": NONE})
    assert "(baseline)" not in text_of(plan, store, format)


def test_arm_without_baseline_is_described_in_its_unit(tmp_path):
    plan, store = count_study(tmp_path, {"alone": [3.0]})
    assert "alone reaches 3 images in val/blunders with one seed, which gives no interval." in text_of(
        plan, store, "md"
    )


@pytest.mark.parametrize("unit", ["images", "number"])
def test_whole_numbers_without_interval_are_shown_without_decimals(unit, tmp_path):
    facts = {"blunders": dataclasses.replace(BLUNDERS, unit=unit, step=0.0)}  # equal values have no interval
    analysis = Analysis(metric="val/blunders", goal="min")
    arms = {"baseline": [0.0, 0.0, 0.0], "b": [0.0, 0.0, 0.0]}
    plan, store = study(tmp_path, arms, analysis=analysis, metric="val/blunders", metrics=facts)
    shown = {
        column.title: column.cells
        for column in arm_columns(
            document(plan, store)["arms"], plan.analysis, phrasing.Scale.of(plan.analysis.metric, plan.units)
        )
    }
    title = "val blunders (images)" if unit == "images" else "val blunders"
    assert shown[f"{title} \u00b1 sd"] == ("0 \u00b1 0",) * 2 and shown["difference"] == ("", "0")
    trials = trial_columns(document(plan, store)["trials"], plan.units)
    [cells] = [column.cells for column in trials if column.title == title]
    assert cells == ("0",) * 6
    loss = phrasing.Scale.of("val/loss", {})
    assert (
        loss.decimals_for_intervals([], [0.25, 1.0]),
        loss.decimals_for_intervals([], []),
        loss.decimals_for_intervals([], [3.0, None]),
    ) == (4, 4, 0)


@pytest.mark.parametrize(
    ("goal", "sentence"), [("min", "val/loss: lower is better."), ("max", "val/loss: higher is better.")]
)
def test_report_names_better_direction_once(goal, sentence, tmp_path, undrawn):
    plan, store = study(
        tmp_path, {"baseline": BASE, "b": NONE}, analysis=Analysis(metric="val/loss", goal=goal), metric="val/loss"
    )
    for form in ("terminal", "md"):
        assert text_of(plan, store, form).count(" is better.") == text_of(plan, store, form).count(sentence) == 1
    assert f"judged by val/loss ({sentence[10:-1]}, last evaluation)</p>" in text_of(plan, store, "html")


@pytest.mark.parametrize(("images", "noted"), [(9, True), (49, True), (50, False)])
def test_note_says_what_one_image_of_a_small_split_is_worth(images, noted, tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b": NONE})
    results = dataclasses.replace(StudyResults.read(plan, store), quantum=1 / images)
    notes = [note for note in report_notes(results, (), ()) if note.startswith("Warning: val/accuracy is of")]
    assert len(notes) == noted
    if noted:
        assert f"is of {images} images, and one of them is {100 / images:.1f} points; " in notes[0]


def test_step_of_count_widens_interval_of_equal_values(tmp_path):
    """A count of 3 at every seed was rounded to a whole number, so its interval is that of this rounding."""
    plan, store = count_study(tmp_path, {"baseline": [3.0] * 4, "b": [1.0, 2.0, 1.0, 3.0]})
    results = StudyResults.read(plan, store)
    assert results.quantum == 1.0
    row = arms_table(results).loc["baseline"]
    half = stats.t.ppf(0.975, 3) * math.sqrt(1 / 12) / math.sqrt(4)
    assert (row["low"], row["high"]) == (pytest.approx(3 - half), pytest.approx(3 + half))


@pytest.mark.parametrize(
    ("value", "step", "expected"),
    [
        (0.30000001192092896, 0.1, 0.3),  # single precision
        (7.0000005, 1.0, 7.0),
        (39.99999, 5.0, 40.0),
        (1.2000000476837158, 0.4, 1.2),
        (2.5, 1.0, 2.5),  # no multiple of the step
    ],
)
def test_values_are_rounded_to_step(value, step, expected):
    assert frame._remove_float32_rounding(value, step) == pytest.approx(expected, rel=1e-15)


def test_diverged_seeds_are_counted_excluded_and_reported(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b": [*NONE[:4], None]})
    last = plan.trials[-1].trial
    diverged = result_of(last, {"val/accuracy": 0.1}, status="diverged", failure="loss is nan at step 120")
    store.trial(last.key, last.code).write_result(diverged)
    row = arms_table(StudyResults.read(plan, store)).loc["b"]
    assert (row["n"], row["diverged"], row["pairs"]) == (4, 1, 4)
    assert row["p"] == pytest.approx(stats.ttest_rel(NONE[:4], BASE[:4]).pvalue)
    assert row["mean"] == pytest.approx(np.mean(NONE[:4]))
    notes = document(plan, store)["notes"]
    assert "b, seed 4, diverged: loss is nan at step 120; its values are left out." in notes
    assert any("the difference of b and baseline is over the 4 seeds that both have" in note for note in notes)
    text = text_of(plan, store, "md")
    assert "| 4/5 |" in text and "10 trainings, any for tuning or teachers included, 1 of them diverged;" in text


def test_trials_that_diverged_for_one_reason_share_a_note(tmp_path):
    plan, store = study(tmp_path, {"baseline": [None] * 3, "b": [None] * 3})
    for number, planned in enumerate(plan.trials):
        trial, failure = planned.trial, "loss is inf" if number == 1 else "loss is nan"
        diverged = result_of(trial, {"val/accuracy": 0.1}, status="diverged", failure=failure)
        store.trial(trial.key, trial.code).write_result(diverged)
    doc = document(plan, store)
    assert [note for note in doc["notes"] if "diverged" in note] == [
        "baseline, seeds 0, 2; b, seeds 0 to 2, diverged: loss is nan; their values are left out.",
        "baseline, seed 1, diverged: loss is inf; its values are left out.",
    ]
    assert "cannot tell: no trial of b or baseline can be judged (3 diverged)." in doc["answers"]


def test_caption_of_one_comparison_speaks_of_no_others(tmp_path):
    for arms, several in (({"baseline": BASE, "b": NONE}, False), ({"baseline": BASE, "b": NONE, "c": SINE}, True)):
        doc = document(*study(tmp_path / str(several), arms))
        caption = all_sections()["comparisons"].table((), report.Report.from_json(doc)).caption
        assert ("of one comparison alone" in caption) is several


def test_arms_at_chance_are_noted(tmp_path, undrawn):
    """From the intervals alone, and not where chance is not known; a tuned arm may lack a value that works."""
    at_chance = {"baseline": [0.10, 0.12, 0.09], "a": [0.11, 0.09, 0.10]}
    with_better = _diverging_study(tmp_path / "one", {**at_chance, "b": [0.6, 0.61, 0.62]})
    rival = Rival({"train.optimizer.lr": 0.1}, with_better[0].trials[:1], 0.11)
    tuned = dataclasses.replace(with_better[0], tuning=(Tuning("a", "k", "val/loss", (rival,), winner=0),))
    for plan, store in (_diverging_study(tmp_path / "chance", at_chance), with_better, (tuned, with_better[1])):
        (note,) = _notes_on_chance(plan, store)
        means = "baseline (10.3 ± 1.5; chance 10.0); a (10.0 ± 1.0; chance 10.0)"
        assert note.startswith(f"Warning: not shown to be better than chance in val accuracy (%): {means}. ")
        assert ("grid of the tuning may hold no value that works" in note) is bool(plan.tuning)
        answers = document(plan, store)["answers"]
        assert answers[0].endswith(" Not shown to be better than chance: baseline; a.")
        assert all(answer.endswith(" Not shown to be better than chance: baseline.") for answer in answers[1:])
        answer = Answer(plan, store, 0, 6, 0, "", None)
        texts = str(answer), repr(answer.compare())
        assert all(note in " ".join(text.split()) for text in texts) and escape(note) in answer._repr_html_()
    assert not _notes_on_chance(*study(tmp_path / "unknown", at_chance))
    for form in ("md", "latex", "html"):
        assert "Tuned: a with lr=0.1." in text_of(tuned, with_better[1], form)


@pytest.mark.parametrize("goal", ["max", "min"])
@pytest.mark.parametrize(
    ("a", "b", "named"),
    [
        ([float(np.float32(0.1))] * 3, [0.1] * 3, "baseline; b"),
        ([0.10, 0.12, 0.09], [0.1] * 3, "baseline; b"),
        ([0.12] * 3, [0.1] * 3, "b"),
        ([0.9, 0.91, 0.1, 0.905], [0.101, 0.1, 0.099, 0.1], "b"),
        ([0.1] * 3, [0.12], "baseline"),
    ],
    ids=["one class", "one arm of one class", "equal and better", "collapsed", "one seed"],
)
def test_equal_and_collapsed_seeds_are_told_from_chance(tmp_path, undrawn, goal, a, b, named):
    """Equal seeds have no interval, and a collapsed seed makes one by t too wide; the loss is 1 minus the accuracy."""
    name = "accuracy" if goal == "max" else "loss"
    arms = {"baseline": a, "b": b}
    if goal == "min":
        arms = {arm: [float(np.float32(1 - value)) for value in values] for arm, values in arms.items()}
    plan, store = study(tmp_path, arms, analysis=Analysis(metric=f"val/{name}", goal=goal), metric=f"val/{name}")
    chance = dict.fromkeys(arms, 0.1 if goal == "max" else 0.9)
    plan = dataclasses.replace(plan, metrics={**METRICS, name: dataclasses.replace(METRICS[name], chance=chance)})
    (note,) = _notes_on_chance(plan, store)
    listed = note.split("): ", 1)[1] if goal == "max" else note.split("loss: ", 1)[1]
    assert re.sub(r" \([^)]*\)", "", listed.partition(". Differences")[0]) == named


def test_arm_of_which_every_seed_beats_guesses_is_not_at_chance(tmp_path, undrawn):
    """The interval of three seeds that differ much includes chance, but 100 images tell each from guesses."""
    values = {"baseline": [0.17, 0.25, 0.45], "a": [0.15, 0.25, 0.45]}
    assert all(stats.ttest_1samp(each, 0).confidence_interval().low < 0.1 for each in values.values())
    beyond = 0.1 + 2 * np.sqrt(0.1 * 0.9 / 100)
    assert min(values["a"]) < beyond < min(values["baseline"])
    plan, store = _diverging_study(tmp_path, values)
    results = dataclasses.replace(StudyResults.read(plan, store), quantum=0.01)
    assert arms_table(results)["at_chance"].dropna().to_dict() == {"a": 0.1}
    assert len(arms_table(dataclasses.replace(results, quantum=0.0))["at_chance"].dropna()) == 2


def test_arm_without_interval_is_at_chance_unless_guesses_reach_less(tmp_path, undrawn):
    """One or two seeds, and equal seeds of an arm that always answers one class, have no interval."""
    beyond = 0.1 + 2 * np.sqrt(0.1 * 0.9 / 100)
    studies = {"a": [0.15], "b": [0.17]}, {"a": [0.09, 0.08], "b": [0.17, 0.18]}, {"a": [0.11] * 3, "b": [0.17] * 3}
    for number, values in enumerate(studies):
        assert values["a"][0] < beyond < values["b"][0]
        plan, store = _diverging_study(tmp_path / str(number), values)
        results = dataclasses.replace(StudyResults.read(plan, store), quantum=0.01)
        assert arms_table(results)["at_chance"].dropna().to_dict() == {"a": 0.1}


def test_arm_at_chance_keeps_out_of_the_sentence_on_others(tmp_path, undrawn):
    arms = {"baseline": [0.5, 0.6, 0.7], "b": [0.5, 0.7, 0.6], "c": [0.6, 0.5, 0.7], "d": [0.1, 0.5, 0.2]}
    made = report.collect_report(*_diverging_study(tmp_path, arms))
    own, others = made.main_answers
    assert own.startswith("cannot tell: d is ") and own.endswith(" Not shown to be better than chance: d.")
    rows = {row["arm"]: row for row in made.arms}
    assert others.startswith("cannot tell: b; c. ") and "chance" not in others
    said = [float(end.replace("\N{MINUS SIGN}", "-")) for end in re.findall(r"within (\S+) to (\S+) points", others)[0]]
    low, high = (f(rows[arm][f"difference_{end}"] for arm in "bc") for f, end in ((min, "low"), (max, "high")))
    assert said == pytest.approx([100 * low, 100 * high], abs=0.06) and low > rows["d"]["difference_low"]


def _notes_on_chance(plan: Plan, store: Store) -> list[str]:
    return [note for note in document(plan, store)["notes"] if "to be better than chance" in note]


def _diverging_study(tmp_path: Path, arms: Mapping[str, Sequence[float | None]], **options: Any) -> tuple[Plan, Store]:
    """Return a study of ten classes in which every trial without a value has diverged."""
    plan, store = study(tmp_path, arms, **options)
    chance = {arm.name: 0.1 for arm in plan.arms}
    metrics = {**METRICS, "accuracy": dataclasses.replace(METRICS["accuracy"], chance=chance)}
    plan = dataclasses.replace(plan, metrics=metrics)
    for item in plan.trials:
        folder = store.trial(item.trial.key, item.trial.code)
        if not folder.done():
            folder.write_result(result_of(item.trial, {"val/accuracy": 0.1}, status="diverged", failure="loss is nan"))
    return plan, store


def test_claim_supported_by_complete_pairs_only_is_not_made(tmp_path):
    better = [value + 0.03 + 0.001 * (index % 3) for index, value in enumerate([*BASE, *BASE])]
    arms = {"baseline": [*BASE, *BASE], "fragile": [*better[:9], None], "sturdy": better}
    plan, store = _diverging_study(tmp_path, arms, analysis=Analysis(variance="own"))
    results = StudyResults.read(plan, store)
    rows = arms_table(results)
    complete = stats.ttest_rel(better[:9], [*BASE, *BASE][:9])
    filled = stats.ttest_rel([*better[:9], 0.1], [*BASE, *BASE])
    row = rows.loc["fragile"]
    assert (row["lost"], row["pairs"], row["chance"]) == (1, 9, 0.1)
    assert row["p"] == pytest.approx(complete.pvalue) and row["p_corrected"] < 1e-6
    assert row["chance_p"] == pytest.approx(min(1, 2 * filled.pvalue))
    interval = filled.confidence_interval(1 - 0.05 / 2)
    assert (row["chance_low"], row["chance_high"]) == pytest.approx((interval.low, interval.high))
    fragile, sturdy = answers_of(results)
    assert fragile.startswith("cannot tell: fragile is 3.10 points above baseline")
    assert (
        "; with chance (10.0 %) in the place of 1 lost seed, 5.89 points below (" in fragile
        and "detected" not in fragile
    )
    columns = {
        column.title: column.cells
        for column in arm_columns(
            document(plan, store)["arms"], plan.analysis, phrasing.Scale.of(plan.analysis.metric, plan.units)
        )
    }
    assert columns["verdict"] == ("", "cannot tell (1 lost seed)", "better")
    assert sturdy.startswith("sturdy is 3.09 points above baseline") and "chance" not in sturdy
    assert rows.loc["sturdy", ["chance", "chance_p"]].isna().all() and rows.loc["sturdy", "lost"] == 0


def test_claim_supported_by_both_comparisons_is_made(tmp_path):
    plan, store = _diverging_study(tmp_path, {"baseline": [0.9, 0.901, 0.902, 0.9], "b": [0.101, 0.1, 0.102, None]})
    [sentence] = answers_of(StudyResults.read(plan, store))
    assert sentence.startswith("b is 80.") and "in the place of 1 lost seed" in sentence
    unknown = dataclasses.replace(plan, metrics=METRICS)
    [sentence] = answers_of(StudyResults.read(unknown, store))
    assert (
        sentence.startswith("cannot tell: b is 80.") and "what chance reaches in val/accuracy is not known" in sentence
    )


# -- registration -----------------------------------------------------------------------------------------------------


def test_change_after_first_run_is_exploratory(tmp_path):
    plan, store = study(tmp_path)
    folder = store.study(plan.study) / "plan.json"
    finished_keys = [item.trial.key for item in plan.trials[:1]]
    first = registration.with_first_registration(plan, None, lambda trial: False)
    assert first.registered == Registration(
        **{"metric": "val/accuracy", "goal": "max", "at": "last", "margin": None, "correction": "bonferroni"},
        **{"variance": "shared", "over_blocks": None, "alpha": 0.05, "seeds": (0, 1, 2, 3, 4)},
        family=tuple((arm, "baseline") for arm in list(POSITIONS)[1:]),
        arms={},
        looks=(),
        known=EarlierResults(0, 20, ()),
    )
    assert not any(
        "xploratory" in text for text in (*document(first, store)["notes"], *document(first, store)["answers"])
    )
    write_json(folder, first.to_json())
    changed = dataclasses.replace(plan, analysis=Analysis(alpha=0.1, correction="none"), registered=None)
    # Nothing had ended, so no result was known.
    fresh = registration.with_first_registration(changed, read_plan(folder), lambda trial: False)
    assert fresh.registered.alpha == 0.1
    later = registration.with_first_registration(changed, read_plan(folder), lambda trial: trial.key in finished_keys)
    assert later.registered == first.registered and later.analysis.alpha == 0.1
    doc = document(later, store)
    assert any(
        note.startswith("Exploratory: since the study was first run, correction was bonferroni and is none;")
        for note in doc["notes"]
    )
    assert doc["answers"][0].startswith("exploratory: position=none is 3.1 points below baseline")
    assert doc["answers"][1].startswith("cannot tell: ")  # statements without a claim are not preliminary
    assert "worse (exploratory)" in text_of(later, store, "md")
    assert Plan.from_json(later.to_json()) == later


def test_registered_comparison_survives_stopped_later_run(tmp_path):
    """Its trials have changed code and no results; those of the run before had results."""
    plan, _ = study(tmp_path)
    first = registration.with_first_registration(plan, None, lambda trial: False)
    edited = dataclasses.replace(
        plan,
        trials=tuple(dataclasses.replace(p, trial=dataclasses.replace(p.trial, code="edited")) for p in plan.trials),
    )

    def end_trial(trial):
        return trial.code != "edited"

    stopped = registration.with_first_registration(edited, first, end_trial)
    other = dataclasses.replace(edited, analysis=Analysis(metric="val/loss", goal="min"))
    assert registration.describe_analysis_changes(registration.with_first_registration(other, stopped, end_trial)) == [
        "metric was val/accuracy and is val/loss",
        "goal was max and is min",
    ]


def test_changed_margin_is_written_in_full(tmp_path):
    plan, _ = study(tmp_path)
    before, after = (dataclasses.replace(plan, analysis=Analysis(margin=x)) for x in (0.123456789, 0.1234567891))
    first = registration.with_first_registration(before, None, lambda trial: False)
    assert registration.describe_analysis_changes(
        registration.with_first_registration(after, first, lambda trial: True)
    ) == ["margin was 0.123456789 and is 0.1234567891"]


@pytest.mark.parametrize("which", ["position=none", "baseline"])
def test_arm_replaced_under_its_name_is_exploratory(tmp_path, which):
    plan, store = study(tmp_path, identities={arm: f"{arm} as it was" for arm in POSITIONS})
    first = registration.with_first_registration(plan, None, lambda trial: False)
    now = dataclasses.replace(plan, identities={**plan.identities, which: "another"})
    later = registration.with_first_registration(now, first, lambda trial: True)
    doc = document(later, store)
    assert f"Exploratory: changed after results were seen: {which}." in doc["notes"]
    rows = {row["arm"]: row["exploratory"] for row in doc["arms"]}
    touched = {arm for arm, reason in rows.items() if reason}
    assert touched == ({"position=none"} if which == "position=none" else set(POSITIONS) - {"baseline"})
    assert doc["answers"][0].startswith("exploratory: position=none is 3.1 points below")
    every = dataclasses.replace(plan, identities=dict.fromkeys(POSITIONS, "another"))
    later = registration.with_first_registration(every, first, lambda trial: True)
    assert f"Exploratory: changed after results were seen: {'; '.join(POSITIONS)}." in document(later, store)["notes"]


def test_comparison_registered_after_results_is_exploratory(tmp_path):
    """As in a second study, with more seeds, that reuses the trials of the first."""
    plan, store = study(tmp_path)
    none = {item.trial.key for item in plan.trials if item.arm in ("baseline", "position=none") and item.seed < 2}
    again = registration.with_first_registration(plan, None, lambda trial: trial.key in none)
    doc = document(again, store)
    assert (
        "Exploratory: 4 of 20 trials had results before this plan was registered, including both arms of the "
        "comparison at some seed: position=none."
    ) in doc["notes"]
    assert [bool(row["exploratory"]) for row in doc["arms"]] == [False, True, False, False]
    base = {item.trial.key for item in plan.trials if item.arm == "baseline"}
    shared = registration.with_first_registration(plan, None, lambda trial: trial.key in base)
    doc = document(shared, store)
    assert not any("before this plan was registered" in note for note in doc["notes"])
    assert not any(row["exploratory"] for row in doc["arms"])


def test_plan_is_read_as_it_was_written(tmp_path):
    plan, _ = study(tmp_path, identities={arm: arm for arm in POSITIONS})
    plan = registration.with_first_registration(plan, None, lambda trial: False)
    data = plan.to_json()
    fields = {
        "name",
        "values",
        "baseline",
        "aliases",
        "skip",
        "note",
        "classes",
        "engine",
        "engine_reason",
        "block",
        "is_control",
    }
    assert {*data["arms"][0]} == fields and Plan.from_json(data) == plan


def test_later_arm_is_corrected_for_all_and_removed_arm_still_counts(tmp_path):
    plan, store = study(tmp_path, analysis=Analysis(variance="own"))
    few = dataclasses.replace(plan, arms=plan.arms[:3])
    extended = dataclasses.replace(plan, registered=registration.make_registration(few))
    rows = arms_table(StudyResults.read(extended, store))
    raw = [stats.ttest_rel(values, BASE).pvalue for values in list(POSITIONS.values())[1:]]
    assert rows["family"].tolist()[1:] == [2, 2, 3]
    assert rows["p_corrected"].tolist()[1:3] == pytest.approx([2 * raw[0], min(1, 2 * raw[1])])
    assert rows["p_corrected"].iloc[3] == pytest.approx(min(1, 3 * raw[2]))
    assert rows["exploratory"].notna().tolist() == [False, False, False, True]
    removed = dataclasses.replace(few, trials=plan.trials[:15], registered=registration.make_registration(plan))
    rows = arms_table(StudyResults.read(removed, store))
    assert rows["family"].tolist()[1:] == [3, 3]
    assert rows["p_corrected"].iloc[1] == pytest.approx(3 * raw[0])
    assert any(
        "still counted in the correction: position=sinusoidal" in note for note in document(removed, store)["notes"]
    )
    more = dataclasses.replace(
        plan, registered=dataclasses.replace(registration.make_registration(plan), seeds=(0, 1, 2))
    )
    assert any("there were 3 seeds and are 5" in note for note in document(more, store)["notes"])


def test_non_finite_value_is_excluded_and_reported(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b": [math.nan, *NONE[1:]]})
    doc = document(plan, store)
    assert doc["arms"][1]["n"] == 4
    assert "b, seed 0, is done, but its val/accuracy is not finite; it is left out." in doc["notes"]


def test_unknown_metric_is_reported_with_existing_ones(tmp_path):
    plan, store = study(tmp_path, analysis=Analysis(metric="val/accurcy"))
    doc = document(plan, store)
    assert any(
        note == "No trial reports val/accurcy; they report val/accuracy, test/accuracy, train/loss."
        for note in doc["notes"]
    )
    assert doc["answers"][0].startswith("cannot tell: no trial of position=none or baseline can be judged (5 done)")
    assert "arms" not in figures_of(plan, store)


def test_one_seed_has_no_interval_and_no_verdict(tmp_path):
    _, _, results, summary = outcome(tmp_path, {"baseline": BASE[:1], "b": NONE[:1]})
    assert answers_of(results) == [
        "cannot tell: b is 3.1 points below baseline, and one seed has no spread to judge that by."
    ]
    assert summary[["sd", "low", "high", "p", "p_corrected"]].isna().all(axis=None)


def test_equal_seeds_are_one_replicate(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b": NONE})
    same = tuple(
        Planned(item.arm, item.seed, plan.trials[0 if item.seed < 5 and item.arm == "baseline" else 5].trial)
        for item in plan.trials
    )
    plan = Plan(plan.study, plan.question, plan.arms, same, plan.analysis)
    doc = document(plan, store)
    assert [row["n"] for row in doc["arms"]] == [1, 1]
    assert any("seeds 1 to 4 are the same trial as an earlier seed" in note for note in doc["notes"])


def test_equal_arms_are_equal_and_constant_differences_uncertain(tmp_path):
    shifted = [value - 0.01 for value in BASE]
    _, _, results, summary = outcome(tmp_path, {"baseline": BASE, "same": BASE, "moved": shifted})
    same, constant = answers_of(results)
    assert same == "same and baseline reached the same val/accuracy at each of 5 seeds."
    assert constant.startswith(
        "cannot tell: moved is 1.0 points below baseline (the same at each of 5 seeds, which gives no interval"
    )
    assert summary.loc["moved", "p"] == 0.0625


def test_note_on_batches_larger_than_the_data(tmp_path):
    plan, store = study(tmp_path)  # steps of 64 images
    spec = plan.trials[0].trial.spec
    for size, expected in ((65, 1), (64, 0)):
        other = spec.model_copy(update={"train": spec.train.model_copy(update={"batch_size": size})})
        trials = [dataclasses.replace(item, trial=dataclasses.replace(item.trial, spec=other)) for item in plan.trials]
        notes = document(dataclasses.replace(plan, trials=tuple(trials)), store)["notes"]
        sentence = f"train.batch_size: {size} is more than the 64 training images; a batch has all of them."
        assert notes.count(sentence) == expected


def test_note_on_two_engines_says_how_to_have_one(tmp_path):
    plan, store = study(tmp_path, numerics={"position=none": {"engine": "loop"}})
    [mixed] = [note for note in document(plan, store)["notes"] if note.startswith("Numerics differ")]
    assert "engine " in mixed and mixed.endswith("Set run.engine: loop before the first run to compute all arms alike.")


def test_notes_are_complete(tmp_path):
    arms = tuple(Arm(name, {}, None if name == "baseline" else "baseline") for name in POSITIONS)
    arms += (Arm("position=rope2d", {}, "baseline", skip="head_dim 12 does not divide by 8."),)
    plan, store = study(
        tmp_path, planned_arms=arms, notes=("data is small.",), numerics={"position=none": {"threads": 2}}
    )
    store.trial(plan.trials[5].trial.key, plan.trials[5].trial.code)
    notes = document(plan, store)["notes"]
    assert "data is small." in notes
    assert "position=rope2d was skipped: head_dim 12 does not divide by 8." in notes
    [mixed] = [note for note in notes if note.startswith("Numerics differ")]
    assert mixed.startswith("Numerics differ from the baseline's (threads 1 and 2) in position=none: ")
    assert "run.engine: loop" not in mixed
    assert any(note.startswith("All arms ran at one learning rate (0.002)") for note in notes)
    assert any(note.startswith("5 seeds (0 to 4) vary all random draws of a training. The split") for note in notes)


def _with_splits(plan: Plan) -> Plan:
    trials = tuple(
        dataclasses.replace(item, trial=dataclasses.replace(item.trial, seeds={**item.trial.seeds, "split": item.seed}))
        for item in plan.trials
    )
    return dataclasses.replace(plan, trials=trials)


def _note_on_splits(plan: Plan, store: Store) -> str:
    [note] = [note for note in document(plan, store)["notes"] if note.startswith("5 seeds")]
    return note


SPLITS = [np.arange(900 * seed, 900 * seed + 1000) % 4500 for seed in range(5)]
"""Validation images of 5 seeds: each shares a tenth with the next, so that 5 of 10 pairs share a tenth."""


def test_seeds_of_varied_splits_are_corrected_for_their_overlap(tmp_path):
    """The corrected resampled t of Nadeau and Bengio, written out with scipy; what needs independent seeds is missing."""
    own = Analysis(margin=0.02, variance="own")
    one_split, store = study(tmp_path, analysis=own)
    plan = _with_splits(one_split)
    assert "the same images, not another split" in _note_on_splits(one_split, store)
    rows = arms_table(StudyResults.read(plan, store))
    assert "are not tested" in _note_on_splits(plan, store)
    assert rows.loc["position=none", ["low", "p", "difference_low", "p_equal"]].isna().all()
    assert rows.loc["position=none", "verdict"] == "cannot tell"
    for item in plan.trials[:5]:
        images = pd.DataFrame({"split": "val", "id": SPLITS[item.seed]})
        file = store.trial(item.trial.key, item.trial.code).predictions
        pd.concat([images, images.assign(split="test", id=7)]).to_parquet(file)
    assert StudyResults.read(one_split, store).overlap == {}
    results = StudyResults.read(plan, store)
    ratio = 0.05 / 0.95
    assert results.overlap == pytest.approx(dict.fromkeys(POSITIONS, ratio))
    rows = arms_table(StudyResults.read(plan, store))
    for arm in list(POSITIONS)[1:]:
        d = np.array(POSITIONS[arm]) - np.array(BASE)
        se = math.sqrt((1 / 5 + ratio) * d.var(ddof=1))
        row = rows.loc[arm]
        assert row["p"] == pytest.approx(2 * stats.t.sf(abs(d.mean()) / se, 4))
        half = stats.t.ppf(1 - 0.05 / 3 / 2, 4) * se
        assert (row["difference_low"], row["difference_high"]) == pytest.approx((d.mean() - half, d.mean() + half))
        assert row["p_equal"] == pytest.approx(
            max(stats.t.sf((d.mean() + 0.02) / se, 4), stats.t.sf((0.02 - d.mean()) / se, 4))
        )
    half = stats.t.ppf(0.975, 4) * math.sqrt(1 / 5 + ratio) * np.std(BASE, ddof=1)
    assert rows.loc["baseline", "high"] - rows.loc["baseline", "mean"] == pytest.approx(half)
    note = _note_on_splits(plan, store)
    assert (
        "of a training and the validation split. Two" in note
        and "5 % of their validation images" in note
        and "on other images" in note
    )
    assert "not another split" not in note


def test_varied_splits_are_not_corrected_where_nothing_is_known_to_hold(tmp_path):
    plan, store = study(tmp_path, analysis=Analysis(metric="test/accuracy"))
    plan = _with_splits(plan)
    assert "no correction for that is known to hold" in _note_on_splits(plan, store)
    assert StudyResults.read(plan, store).overlap == {}
    plan = dataclasses.replace(plan, analysis=Analysis())
    for item in plan.trials[:5]:  # a data set that defines its validation images
        images = pd.DataFrame({"split": "val", "id": range(10)})
        images.to_parquet(store.trial(item.trial.key, item.trial.code).predictions)
    assert set(StudyResults.read(plan, store).overlap.values()) == {0.0}
    assert "the same in all" in _note_on_splits(plan, store)
    for item in plan.trials[:5]:  # drawn splits that have no image in common by chance
        images = pd.DataFrame({"split": "val", "id": range(10 * item.seed, 10 * item.seed + 10)})
        images.to_parquet(store.trial(item.trial.key, item.trial.code).predictions)
    assert all(math.isnan(ratio) for ratio in StudyResults.read(plan, store).overlap.values())
    assert "have no image in common" in _note_on_splits(plan, store)


def test_comparisons_of_varied_splits_share_their_variance_and_leave_no_sign_flip(tmp_path):
    """Shared standard errors grow as those of single comparisons do; a collapsed seed leaves nothing to test by."""
    draws = np.random.default_rng(3)
    arms = {f"arm{n}": (0.9 + 0.01 * draws.permutation([-1.3, -0.5, 0.1, 0.5, 1.2])).tolist() for n in range(7)}
    plan, _, results, before = outcome(tmp_path, arms)
    results = dataclasses.replace(results, overlap=dict.fromkeys(arms, 0.1))
    after = arms_table(results)
    assert set(after["test"].dropna()) == {"paired t"} and set(after["shared"].dropna()) == {6}
    wider = (after["difference_high"] - after["difference"]) / (before["difference_high"] - before["difference"])
    assert wider.dropna().to_numpy() == pytest.approx(math.sqrt(1.5))
    collapsed = {**arms, "arm1": [*arms["arm1"][:4], 0.1]}
    plan, _, results, _ = outcome(tmp_path / "collapsed", collapsed)
    results = dataclasses.replace(results, overlap=dict.fromkeys(arms, 0.1))
    rows = comparison.summary_rows(results)
    row = next(row for row in rows if row["arm"] == "arm1")
    assert (row["test"], row["verdict"]) == ("none", "cannot tell")
    assert (
        "collapsed seeds of other splits leave no test"
        in phrasing.answer_per_arm(rows, plan.analysis, phrasing.Scale.of(plan.analysis.metric, {}))[0].sentence
    )


@pytest.mark.parametrize("values", [{}, {"baseline": [None]}, {"baseline": BASE}, {"baseline": BASE, "b": NONE}])
def test_columns_of_comparison_are_same_for_every_study(tmp_path: Path, values: dict[str, list[Any]]) -> None:
    plan, store, _, table = outcome(tmp_path, values)
    columns = [*comparison.COLUMNS, "test/accuracy", "test/accuracy_sd"]
    assert ["arm", *table.columns] == columns and len(table) == len(values)
    assert list(Comparison.of(report.collect_report(plan, store)).columns) == columns
    assert table["test/accuracy"].dtype == "float64" and table["test/accuracy"].notna().all() == (
        values != {"baseline": [None]}
    )


def test_infinite_test_metric_is_shown_as_such(tmp_path: Path) -> None:
    plan, _, results, _ = outcome(tmp_path, {"baseline": BASE, "b": NONE})
    results.frame.loc[results.frame["arm"].eq("b"), "test/accuracy"] = math.inf
    rows = comparison.summary_rows(results)
    json.dumps(rows, allow_nan=False)
    assert [row["test/accuracy"] for row in rows] == [pytest.approx(np.mean(BASE) - 0.01), "inf"]
    assert comparison.summary_rows_to_frame(rows, plan.analysis)["test/accuracy"].tolist()[1] == math.inf
    [column] = [
        column
        for column in arm_columns(rows, plan.analysis, phrasing.Scale.of(plan.analysis.metric, {}))
        if column.title.startswith("test accuracy")
    ]
    assert column.cells[1] == "inf"


def _with_teachers(plan: Plan, teachers: Mapping[str, Sequence[str]]) -> Plan:
    trials = tuple(
        dataclasses.replace(
            item, trial=dataclasses.replace(item.trial, needs={"teacher": teachers[item.arm][item.seed]})
        )
        if item.arm in teachers
        else item
        for item in plan.trials
    )
    return dataclasses.replace(plan, trials=trials)


def test_students_of_one_teacher_are_one_sample_of_teacher(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "big teacher": NONE, "no teacher": NONE})
    plan = _with_teachers(plan, {"baseline": ["k1/c"] * 5, "big teacher": ["k2/c"] * 5})
    doc = document(plan, store)
    assert doc["answers"][0] == (
        "refused: big teacher is 3.1 points below baseline, but the arms differ by their teacher, of which 1 "
        "training stands behind an arm: fewer than 3 are no sample."
    )
    assert doc["arms"][1]["p"] is doc["arms"][1]["difference_low"] is None
    assert doc["arms"][2]["p"] is not None
    for arm in ("baseline", "big teacher"):
        assert f"{arm}: 1 distinct teacher for 5 trials: the results need not hold for other teachers." in doc["notes"]


def test_teacher_per_seed_is_judged_normally(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b": NONE})
    for other in ("k", "m"):  # the same teachers on both sides, then others
        plan = _with_teachers(
            plan, {"baseline": [f"k{s}/c" for s in range(5)], "b": [f"{other}{s}/c" for s in range(5)]}
        )
        doc = document(plan, store)
        assert doc["arms"][1]["p"] == pytest.approx(stats.ttest_rel(NONE, BASE).pvalue)
        assert not any("teacher" in note for note in doc["notes"])


def test_failed_prerequisite_is_reported(tmp_path, undrawn):
    plan, store = study(tmp_path, {"baseline": BASE, "b": [None] * 5})
    teacher = trial_of("teacher", 0)
    plan = _with_teachers(plan, {"b": [f"{teacher.key}/{teacher.code}", *["k/c"] * 4]})
    plan = dataclasses.replace(plan, prerequisites=(teacher,))
    fresh = frame.gather_trials(plan, store, plan.labelled_prerequisites)[0]
    assert fresh.status == "missing"
    report.write(report.collect_report(plan, store), store.study(plan.study) / "report")
    store.trial(teacher.key, teacher.code).write_failure("the worker ran out of memory")
    assert report.read_report_if_current(plan, store, "json") is None
    notes = document(plan, store)["notes"]
    assert "teacher of b, seed 0, failed: the worker ran out of memory." in notes
    assert notes[0] == "Preliminary: of 11 trials, 5 done, 2 failed, 4 missing."


def test_pending_comparison_counts_in_family(tmp_path):
    _, _, _, summary = outcome(tmp_path, {"baseline": BASE, "b": SINE, "c": [None] * 5})
    assert summary.loc["b", "p_corrected"] == pytest.approx(2 * stats.ttest_rel(SINE, BASE).pvalue)
    assert math.isnan(summary.loc["c", "p_corrected"])


def test_claims_before_all_trials_ended_are_preliminary(tmp_path):
    _, _, results, _ = outcome(tmp_path, {"baseline": BASE, "b": [*NONE[:4], None], "c": NONE})
    b, c = answers_of(results)
    assert b.startswith("preliminary: b is ") and c.startswith("c is ")
    _, _, results, _ = outcome(tmp_path / "2", {"baseline": [*BASE[:4], None], "b": NONE, "c": [None] * 5})
    b, c = answers_of(results)
    assert b.startswith("preliminary: b is ")
    assert c == "no result yet: c."


def test_arms_without_comparison_report_their_value(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE}, analysis=Analysis(compare="none"))
    low, high = stats.t.interval(0.95, 4, np.mean(BASE), stats.sem(BASE))
    assert document(plan, store)["answers"] == [
        f"baseline reaches {100 * np.mean(BASE):.1f} % val/accuracy "
        f"(95 % interval {100 * low:.1f} to {100 * high:.1f}, 5 seeds)."
    ]
    assert "difference" not in text_of(plan, store, "md")


# -- documents --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Parser of tags, attributes and text of a page."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_has_no_scripts_and_no_external_content(tmp_path):
    plan, store = study(tmp_path)
    html = text_of(plan, store, "html")
    page = Page(html)
    assert not re.search(r"https?://|@import|javascript:", html)
    for tag, attributes in page.tags:
        assert tag != "script" and not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    identifiers = set(ids)
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", html)) <= identifiers
    used = set(re.findall(r"var\((--[\w-]+)\)", html))
    assert not re.search("#(?:fefefe|1b1e23)", html[html.index("<body>") :])  # every colour is the page's
    assert used <= set(re.findall(r"(--[\w-]+):", html))
    assert sum(tag == "svg" and "role" in attributes for tag, attributes in page.tags) == 2
    stacked = html[html.index('class="panels"') : html.index("</div>", html.index('class="panels"'))]
    assert stacked.count("#arms-figure") == 3, "means, differences, and the labels again beside these"


@pytest.mark.parametrize("dpi", [72, 100, 150])
def test_text_is_measured_alike_at_all_resolutions(dpi: int) -> None:
    with drawing.apply_style():
        figure = drawing.empty_figure(drawing.WIDTH, 2)
        text = figure.text(0, 0, "position=sinusoidal, depth=2", fontsize=7.5)
        exact = TextPath((0, 0), text.get_text(), size=7.5).get_extents().width  # in points, without a raster
        figure.dpi = dpi
        assert text.get_window_extent().width * 72 / dpi == pytest.approx(exact, rel=0.03)


def _beside(figure: Figure) -> list[Axes]:
    return list(figure.subplots(1, 2))


def _text_alone(figure: Figure) -> None:
    figure.text(0.5, 0.5, "nothing to draw")


def _twins(figure: Figure) -> None:
    figure.subplots().twinx()


def _label_of_all(figure: Figure) -> None:
    _beside(figure)
    figure.supxlabel("steps")


def _inset(figure: Figure) -> None:
    figure.subplots().inset_axes((0.5, 0.0, 0.4, 0.4))


@pytest.mark.parametrize(
    ("draw", "panels"),
    [(_beside, 2), *((draw, 0) for draw in (_text_alone, _twins, _label_of_all, _inset, Figure.subplots))],
)
def test_panels_are_stacked_only_where_they_show_the_whole_figure(draw: Callable[[Figure], Any], panels: int) -> None:
    figure = drawing.empty_figure(drawing.WIDTH, 2)
    draw(figure)
    drawn = drawing.Drawing(figure, "of a plugin")
    assert drawing.svg_to_element(drawn.svg, "own", drawn.caption)
    assert drawing.stacked_panels_svg(drawn, "own").count("max-width") == panels


def test_stored_report_says_that_it_has_no_figures(tmp_path):
    stored = report.Report.from_json(document(*study(tmp_path)))
    for attribute in ("figures", "results_frame"):
        with pytest.raises(AssertionError, match="a stored report has no figures and no results"):
            getattr(stored, attribute)


def test_texts_of_an_image_are_named():
    with pytest.raises(TypeError):
        Image(Path("maps.png"), "baseline, seed 0", "What the model looks at")


@pytest.mark.slow
def test_write_stores_every_file_and_stored_reads_them(tmp_path):
    plan, store = study(tmp_path)
    folder = store.study(plan.study) / "report"
    assert report.read_report_if_current(plan, store, "md") is None
    files = report.write(report.collect_report(plan, store), folder)
    assert {file.name for file in files} == {
        *("report.md", "report.html", "report.tex", "report.json", "results.csv", "results.parquet", "history.parquet"),
        *("summary.csv", *(f"{name}.{form}" for name in ("arms", "curves") for form in ("png", "pdf", "svg"))),
    }
    assert sorted(folder.iterdir()) == sorted(files)
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("arms", "curves"))
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "results.parquet"), frame.results(plan, store))
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "history.parquet"), frame.history(plan, store))
    for form in ("csv", "json", "terminal", "latex", "latex-all", "html", "md"):
        assert report.read_report_if_current(plan, store, form) == report.collect_report(plan, store).render(form)
    text = (folder / "report.md").read_text()
    assert "![arms](arms.png)\n\nFirst each seed (small)" in text
    assert report.read_report_if_current(plan, store, "parquet") == (folder / "results.parquet").read_bytes()


def test_stored_report_is_stale_after_trial_ends(tmp_path, undrawn):
    plan, store = study(tmp_path, {"baseline": BASE, "b": [*NONE[:4], None]})
    report.write(report.collect_report(plan, store), store.study(plan.study) / "report")
    assert report.read_report_if_current(plan, store, "terminal") is not None
    last = plan.trials[-1].trial
    store.trial(last.key, last.code).write_result(result_of(last, {"val/accuracy": 0.9}))
    assert report.read_report_if_current(plan, store, "terminal") is None
    (store.study(plan.study) / "report" / "report.json").write_text("{torn")
    assert report.read_report_if_current(plan, store, "terminal") is None


def test_trial_ending_during_report_makes_it_stale(tmp_path, monkeypatch, undrawn):
    plan, store = study(tmp_path, {"baseline": BASE, "b": [*NONE[:4], None]})
    last = plan.trials[-1].trial
    gather = frame.gather_trials

    def then_ends(*args: Any) -> Any:
        content = gather(*args)
        store.trial(last.key, last.code).write_result(result_of(last, {"val/accuracy": 0.9}))
        return content

    monkeypatch.setattr(frame, "gather_trials", then_ends)
    report.write(report.collect_report(plan, store), store.study(plan.study) / "report")
    assert report.read_report_if_current(plan, store, "csv") is None


def test_many_comparisons_start_with_overview(tmp_path, monkeypatch):
    plan, store = study(tmp_path)
    assert document(plan, store)["overview"] == ""
    monkeypatch.setattr(phrasing, "OVERVIEW_FROM", 1)
    doc = document(plan, store)
    assert doc["overview"] == "Of 3 comparisons: 2 worse, 1 cannot tell." and len(doc["answers"]) == 3
    html = text_of(plan, store, "html")
    top = html[html.index('<section id="answer"') : html.index("<details>")]
    assert doc["overview"] in top and top.count("<li") == 1 and "position=none is 3.1 points below" in top
    assert "<summary>All 3 answers</summary>" in html
    assert text_of(plan, store, "md").splitlines()[2] == doc["overview"]
    assert doc["overview"] in text_of(plan, store, "terminal")


def test_comparisons_that_cannot_tell_are_one_sentence_outside_of_json(tmp_path, undrawn):
    lost = [*NEAR[:4], math.nan]
    arms = {"baseline": BASE, "worse": NONE, "near": NEAR, "wide": [0.99, 0.95, 0.97, 0.98, 0.96], "alone": lost}
    plan, store = study(tmp_path, arms)
    doc = document(plan, store)
    rows = [row for row in doc["arms"] if row["arm"] in ("near", "wide")]
    unclear = [answer for answer in doc["answers"] if answer.startswith("cannot tell: ")]
    assert len(doc["answers"]) == 4 and len(unclear) == 3
    ends = min(row["difference_low"] for row in rows), max(row["difference_high"] for row in rows)
    low, high = (f"{100 * end:.1f}".replace("-", "\N{MINUS SIGN}") for end in ends)
    sentence = (
        "cannot tell: near; wide. The simultaneous 95 % intervals of their differences from baseline lie within "
        f"{low} to {high} points."
    )
    for format in ("terminal", "md"):
        text = " ".join(text_of(plan, store, format).split())
        assert sentence in text and "worse is 3.1 points below" in text and not any(one in text for one in unclear[:2])
        assert unclear[2] in text, "a lost seed has a sentence"
    page = unescape(text_of(plan, store, "html")).replace("\N{NO-BREAK SPACE}", " ")
    assert page.index(sentence) < page.index("<summary>All 4 answers</summary>") < page.index(unclear[0])


def test_many_arms_that_cannot_tell_are_counted(tmp_path: Path, undrawn: None) -> None:
    arms = {"baseline": BASE, **{f"position=sincos2d, depth={depth}, heads=2": NEAR for depth in range(1, 5)}}
    plan, store = study(tmp_path, arms)
    assert "cannot tell: 4 arms. The simultaneous" in text_of(plan, store, "md")
    assert "position=sincos2d, depth=1, heads=2" in document(plan, store)["answers"][0]


def test_sentence_of_several_arms_says_that_none_is_equivalent(tmp_path: Path) -> None:
    arms = {"baseline": BASE, "a": NEAR, "b": [*reversed(BASE)]}
    for margin, says in ((1e-5, True), (None, False)):
        (folded,), _ = folded_and_others(*study(tmp_path / str(margin), arms, analysis=Analysis(margin=margin)))
        assert folded.startswith("cannot tell: a; b. ")
        assert ("points; none is shown to be equivalent within 0.0" in folded) == says, folded


def test_table_of_trials_has_the_judged_metric_first_and_no_numbered_ones() -> None:
    row = {"arm": "a", "seed": 0, "status": "done", "failure_kind": None, "wall_s": 1.0, "trial": "k"}
    row |= {"val/loss": 1.0, "test/per_class_0": 0.5, "test/per_class_1": 0.5, "val/knn20_t0_07": 0.9}
    row |= {"test/accuracy": 0.5, "test/loss": 2.0}
    titles = [column.title for column in trial_columns([{**row, "val/accuracy": 0.4}], {"accuracy": "share"})]
    assert titles[:5] == ["arm", "seed", "status", "val accuracy (%)", "test accuracy (%)"]
    assert titles[5:] == ["time", "trial"]
    judged = [column.title for column in trial_columns([{**row, "test/per_class_2": 0.5}], {"accuracy": "share"})]
    assert judged[3:] == ["test per_class_2", "time", "trial"], "the judged metric stays"


def test_captions_name_one_baseline() -> None:
    assert phrasing.describe_baseline([None, "depth=2", "depth=2"]) == "the baseline (depth=2)"
    assert {phrasing.describe_baseline(names) for names in (["a", "b"], ["baseline"], [None])} == {"the baseline"}


def test_figures_and_table_say_which_arm_is_the_baseline(tmp_path: Path) -> None:
    plan, store = study(tmp_path, {"plain": BASE, "b": NONE})
    latex, figures = text_of(plan, store, "latex"), report.collect_report(plan, store).figures
    assert "Difference from the baseline (plain) with its" in latex
    assert "the difference from the baseline (plain) with its" in figures["arms"].caption


@pytest.mark.parametrize(("schedule", "what"), [("constant", "cost"), ("cosine", "cost and in the last learning rate")])
def test_trainings_that_ended_at_one_step_have_no_range(schedule: str, what: str) -> None:
    def ended(arm: str, steps: int) -> Any:
        train = SimpleNamespace(stop_early={"patience": 2}, schedule=SimpleNamespace(type=schedule))
        spec = SimpleNamespace(train=train)
        planned = SimpleNamespace(arm=arm, trial=SimpleNamespace(spec=spec))
        return SimpleNamespace(planned=planned, result=SimpleNamespace(outcome=SimpleNamespace(steps=steps)))

    trials = [ended("lion", 280), ended("lion", 280), ended("adamw", 1200), ended("adamw", 900)]
    [note] = notes._note_early_stops(trials)
    assert note.endswith(f" differ in {what}: lion 280, adamw 900 to 1,200.")


def folded_and_others(plan, store):
    report_ = report.collect_report(plan, store)
    main = report_.main_answers
    return [answer for answer in main if "lie within" in answer], [
        answer for answer in report_.answers if answer in main
    ]


def test_folded_sentence_has_only_arms_with_an_interval_from_one_baseline(tmp_path, undrawn):
    """An arm outside of the span, equal differences, single seeds and another baseline keep their sentences."""
    wide = [0.99, 0.95, 0.97, 0.98, 0.96]
    arms = {"baseline": BASE, "a": NEAR, "b": wide, "c": [0.9]}
    (folded,), (own,) = folded_and_others(*study(tmp_path / "seeds", arms))
    assert folded.startswith("cannot tell: a; b. ") and own.startswith("cannot tell: c is 7.2 points below baseline")
    made = report.collect_report(*study(tmp_path / "added", arms))
    later = dataclasses.replace(made, answers=[], arms=[{**row, "exploratory": "added"} for row in made.arms])
    own, folded = later.main_answers
    assert folded.startswith("cannot tell: exploratory: a; b. ") and own.startswith("cannot tell: exploratory: c is ")
    alike = {"up": [value + 0.1 for value in (0.5, 0.6, 0.7)], "down": [value - 0.1 for value in (0.5, 0.6, 0.7)]}
    folded, own = folded_and_others(*study(tmp_path / "alike", {"baseline": [0.5, 0.6, 0.7], **alike}))
    assert not folded and len(own) == 2 and all("which gives no interval" in answer for answer in own)
    folded, own = folded_and_others(*study(tmp_path / "one", {"baseline": BASE[:1], "a": NONE[:1], "b": NEAR[:1]}))
    assert not folded and all("one seed has no spread" in answer for answer in own)
    two = [("one", None), ("two", None), ("a", "one"), ("b", "one"), ("c", "two"), ("d", "two"), ("e", "two")]
    planned = tuple(Arm(arm, {}, baseline) for arm, baseline in two)
    values = dict(
        zip((arm for arm, _ in two), (BASE, NONE, NEAR, wide, NONE[::-1], NONE[1:] + NONE[:1], NEAR), strict=True)
    )
    folded, own = folded_and_others(*study(tmp_path / "two", values, planned_arms=planned))
    assert [sentence.partition(".")[0] for sentence in folded] == ["cannot tell: a; b", "cannot tell: c; d"]
    assert "differences from one lie" in folded[0] and "differences from two lie" in folded[1]
    assert len(own) == 1 and own[0].startswith("e is ")


def test_page_shows_the_folded_sentence_and_classes_by_verdict(tmp_path, undrawn):
    worse = {f"w{n}": NONE for n in range(14)}
    plan, store = study(tmp_path, {"baseline": BASE, "near": NEAR, **worse, "far": NEAR[::-1], "late": [None] * 5})
    html = text_of(plan, store, "html")
    top, rest = html[html.index('<section id="answer"') :].split("<details>", 1)
    assert top.count("<li") == 13 and top.count('<li class="worse">') == 12
    assert '<li class="cannot-tell">cannot tell: near; far. ' in top
    assert rest.count('<li class="worse">') == 14 and rest.count('<li class="cannot-tell">') == 2
    assert "<li>no result yet: late.</li>" in rest


def test_attention_pictures_are_in_page(tmp_path, undrawn):
    plan, store = study(tmp_path)
    folder = store.study(plan.study) / "report"
    report.write(report.collect_report(plan, store), folder)
    assert document(plan, store)["explained"] == [] and "<img" not in text_of(plan, store, "html")
    pixels = b"\x89PNG, or whatever was drawn"
    for arm, image in ((5, 3), (0, 12), (0, 3), (6, 3)):  # the last is no first seed
        place = store.trial(plan.trials[arm].trial.key, plan.trials[arm].trial.code).path / "explain" / f"test-{image}"
        place.mkdir(parents=True)
        (place / "rollout_class.png").write_bytes(pixels)
        (place / "heads_class.png").write_bytes(b"")
    assert report.read_report_if_current(plan, store, "html") is not None  # another study has explained its trials
    write_json(reasons_file(plan, store), {})
    assert report.read_report_if_current(plan, store, "html") is None  # it is older than they are
    pictures = document(plan, store)["explained"]
    assert [(row["arm"], row["image"], row["of"]) for row in pictures] == [
        ("baseline", 3, "class"), ("baseline", 12, "class"), ("position=none", 3, "class"),
    ]  # fmt: skip
    assert all((store.root / row["file"]).read_bytes() == pixels for row in pictures)
    table = Comparison.of(report.collect_report(plan, store)).tables["explained"]
    assert max(map(len, str(table).splitlines())) < 80 and str(table).endswith("columns: arm, seed, image, of, file")
    assert table[["file"]].iloc[0, 0] in str(table[["file"]])
    page = Page(text_of(plan, store, "html"))
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [attributes["src"] for attributes in images] == [
        f"data:image/png;base64,{base64.b64encode(pixels).decode()}"
    ] * 3
    assert images[0]["alt"] == "Test image 3, attention of the class token, baseline, seed 0; own scale"
    reasons_file(plan, store).write_text('{"position=none": "it kept no weights (run.keep).", "of a version": "no"}')
    assert report.read_report_if_current(plan, store, "html") is None
    [note] = [note for note in document(plan, store)["notes"] if "What models look at" in note]
    assert note == "Missing in What models look at: position=none: it kept no weights (run.keep)."


def test_study_without_results_is_reported(tmp_path):
    plan, store = study(tmp_path, {arm: [None] * 3 for arm in POSITIONS})
    files = report.write(report.collect_report(plan, store), store.study(plan.study) / "report")
    assert not [file for file in files if file.suffix == ".png"]
    assert "Preliminary: of 12 trials, 12 missing." in text_of(plan, store, "md")
    skipped = Plan("positions", "", (Arm("a", {}, skip="no"),), (), Analysis())
    for form in report.FORMATS:
        assert report.render(skipped, store, form)


def test_terminal_drops_columns_before_breaking_lines(tmp_path, monkeypatch):
    plan, store = study(tmp_path)
    for width, expected, hidden in (
        (200, "MACs", ""),
        (95, "(adjusted)", "parameters, MACs."),
        (85, "verdict", "p (adjusted)"),
        (60, "simultaneous", "n,"),
    ):
        monkeypatch.setenv("COLUMNS", str(width))
        output = text_of(plan, store, "terminal")
        assert max(map(len, output.splitlines())) <= width
        table, _, below = output.partition("Not shown: ")
        assert expected in table and ("MACs" in table) == (not hidden) == (not below)
        assert hidden in " ".join(below.partition("See a wider terminal or")[0].split())
        row = next(line for line in output.splitlines() if line.startswith(" position=none"))
        assert "\N{MINUS SIGN}3.1" in row and "worse" in row


def test_each_class_has_a_line_and_a_terminal_shows_the_first(tmp_path, monkeypatch):
    plan, store = study(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for classes, shown in ((8, [*range(8)]), (30, [*range(20)])):
        rows = [
            MetricOfArm(arm, f"val/accuracy_{c}", 0.01 * c * place, 0.005 * c**2)
            for place, arm in enumerate(("baseline", "b", "c"))
            for c in range(classes)
        ]
        content = dataclasses.replace(report.collect_report(plan, store), sections={"heads": rows})
        lines = content.render("terminal").partition("Further metrics")[2].splitlines()
        cells = [line.split() for line in lines if line.startswith(" val accuracy_")]
        assert [int(line[1].removeprefix("accuracy_")) for line in cells] == shown
        assert [float(line[-3]) for line in cells] == pytest.approx([2 * c for c in shown]), "c, the last column"
        assert any("A terminal shows the first 20 of 30 metrics" in line for line in lines) == (classes == 30)
        document_text = content.render("md")
        assert all(f"val accuracy_{c} " in document_text for c in range(classes))


def test_intervals_of_means_and_of_differences_have_names_of_their_own(tmp_path):
    plan, store = study(tmp_path, dict(itertools.islice(POSITIONS.items(), 2)))
    titles = [column.title for column in report.collect_report(plan, store).table("arms").columns]
    assert [title for title in titles if "interval" in title] == ["95 % interval of mean", "95 % interval"]


def test_narrow_terminal_shows_intervals_rather_than_p_and_names_whole(tmp_path, monkeypatch):
    plan, store = _grid(tmp_path)
    for width, titles in ((200, ("interval", "(adjusted)")), (80, ("interval",)), (40, ())):
        monkeypatch.setenv("COLUMNS", str(width))
        output = text_of(plan, store, "terminal")
        assert max(map(len, output.splitlines())) <= width
        table = output[output.index("is better.") :]
        head, rows = table[: table.index("───")], table[table.index("───") :]
        assert [title for title in ("interval", "(adjusted)") if title in head] == [*titles]
        assert all(part in rows for part in ("none,", "linear", "fused")) and "difference" in head and "verdict" in head


def _latex_tables(latex: str) -> list[tuple[str, list[list[str]]]]:
    """Return layout and cells of every table of a text with balanced braces and environments."""
    code = "".join(line for line in latex.splitlines(keepends=True) if not line.startswith("%"))
    bare = re.sub(r"\\[{}\\]", "", code)
    assert bare.count("{") == bare.count("}")
    environments = re.findall(r"\\(begin|end)\{(\w+)\}", code)
    assert [name for _, name in environments] == ["table", "tabular", "tabular", "table"] * (len(environments) // 4)
    tables_found = []
    for layout, body in re.findall(r"\\begin\{tabular\}\{@\{\}(.*?)@\{\}\}\n(.*?)\\end\{tabular\}", code, re.DOTALL):
        rows = [line.strip().removesuffix(r" \\") for line in body.splitlines() if line.endswith(r"\\")]
        tables_found.append((layout, [re.split(r"(?<!\\)&", row) for row in rows]))
        columns = re.sub(r">\{[^}]*\}p\{[^}]*\}", "l", layout)
        assert set(columns) <= {"l", "r"} and {len(row) for row in tables_found[-1][1]} == {len(columns)}
    return tables_found


def test_latex_fits_paper_width(tmp_path):
    """An article in ten points is 345 points wide; cells are measured in TeX's font."""
    from matplotlib import get_data_path
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(fname=str(Path(get_data_path()) / "fonts" / "ttf" / "cmr10.ttf"), size=10)

    def width(cell: str) -> float:
        text = (
            re.sub(r"\\textbf\{(.*)\}", r"\1", cell.strip())
            .replace(r"$\pm$", "+")
            .replace("$-$", "+")
            .replace("\\", "")
        )
        return float(TextPath((0, 0), text, prop=font).get_extents().width) if text else 0.0

    plan, store = _grid(tmp_path)
    (layout, rows), (_, crossed), (_, effects) = _latex_tables(latex := text_of(plan, store, "latex"))
    assert {cells[-1].strip() for cells in effects[1:]} <= {"better", "worse", "cannot tell"}
    assert {cells[0].strip() for cells in crossed} == {"position", "none", "learned", "sincos2d"}
    assert r"\label{tab:positions-means-of-the-grid}" in latex
    wrapped = re.search(r"p\{([\d.]+)\\linewidth\}", layout)
    assert wrapped is not None
    columns = [345 * float(wrapped[1]), *(max(map(width, cells)) for cells in list(zip(*rows, strict=True))[1:])]
    assert sum(columns) + 2 * 6 * (len(columns) - 1) <= 345
    assert max(width(word) for row in rows for word in row[0].replace(r"\penalty500{}", " ").split()) < columns[0]
    head, first, *_ = rows
    assert [cell.strip() for cell in head] == ["arm", r"val accuracy (\%)", "difference (points)", "verdict"]
    mean, sd = 100 * np.mean(GRID["none", "fused"]), 100 * np.std(GRID["none", "fused"], ddof=1)
    assert first[1].strip() == rf"\textbf{{{mean:.1f} $\pm$~{sd:.1f}}}" and first[2].strip() == first[3].strip() == ""
    assert r"\label{tab:positions-arms}" in latex and "Mean $\\pm$ standard deviation" in latex and "5 seeds" in latex
    everything = text_of(plan, store, "latex-all")
    tables_all = _latex_tables(everything)
    columns = arm_columns(document(plan, store)["arms"], plan.analysis, report.collect_report(plan, store).scale)
    shown = [
        re.sub(r"\\shortstack\[.\]\{(.*)\}", r"\1", cell.strip())
        .replace(r"\\", " ")
        .replace("~", " ")
        .replace("\\", "")
        for _, rows in tables_all
        for cell in rows[0]
    ]
    titles = [column.title for column in columns]
    assert [title for title in shown if title == "arm"] and not {*titles} - {
        title.replace(r"$pm$", "\N{PLUS-MINUS SIGN}") for title in shown
    }, "a wide table has all of its columns, in several parts"
    for _, rows in tables_all:
        titles = [title.strip() for title in rows[0]]
        assert not any(word in titles[1] for word in ("interval", "(adjusted)", "verdict"))
        assert ("verdict" in titles) == any("effect" in title or title == "difference" for title in titles)
    if shutil.which("pdflatex"):
        needs = re.findall(r"\\usepackage\{.*?\}", everything)
        measure = r"\renewcommand\resizebox[3]{\setbox0\hbox{#3}\typeout{width \the\wd0}}"
        lines = [r"\documentclass{article}", *needs, r"\begin{document}", measure, everything, r"\end{document}"]
        (tmp_path / "paper.tex").write_text("\n".join(lines))
        words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
        log = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        widths = [float(width) for width in re.findall(r"^width ([\d.]+)pt", log, re.MULTILINE)]
        assert len(widths) == len(tables_all) and max(widths) * 7 / 8 <= 345, "letters of 8 points have at least 7"
    labels = re.findall(r"\\label\{(.*?)\}", everything)
    assert len(labels) == len(tables_all)  # one for each section with a table, which others may join
    assert {"tab:positions-arms", "tab:positions-comparisons", "tab:positions-interactions"} <= {*labels}


def test_report_is_outdated_once_a_trial_has_a_checkpoint(tmp_path):
    plan, store = study(tmp_path, {"baseline": [*BASE[:4], None]})
    before = state_digest(plan, store)
    store.folder(plan.trials[-1].trial).checkpoint.mkdir(parents=True)
    assert frame.results(plan, store)["status"].tolist()[-1] == "paused"
    assert state_digest(plan, store) != before


def test_provenance_counts_every_training_once(tmp_path):
    plan, store = study(tmp_path)
    provenance = document(plan, store)["made"]
    assert (provenance["trained"], provenance["failed"]) == (20, 0)
    assert provenance["data"] == [{"set": "digits", "identity": "sha256:c0ffee"}]
    assert provenance["wall_s"] == pytest.approx(20 * 7.5)
    assert "20 trainings, any for tuning or teachers included" in text_of(plan, store, "md")


def test_end_is_time_of_result(tmp_path):
    """Not its start plus its duration: a stacked trial has a share of the time, and a paused one waits."""
    plan, store = study(tmp_path, {"baseline": [None, None]})
    first, second = (item.trial for item in plan.trials)
    timed = result_of(first, {"val/accuracy": 0.9})
    timed = dataclasses.replace(timed, circumstances=dataclasses.replace(timed.circumstances, ended=1.79e9 + 600.25))
    store.trial(first.key, first.code).write_result(timed)
    assert document(plan, store)["made"]["ended"] == "2026-09-21 14:23 UTC"
    timed = dataclasses.replace(timed, key=second.key, code=second.code)
    timed = dataclasses.replace(timed, circumstances=dataclasses.replace(timed.circumstances, ended=1.79e9 + 1200))
    store.trial(second.key, second.code).write_result(timed)
    assert document(plan, store)["made"]["ended"] == "2026-09-21 14:33 UTC"
    end_times = frame.results(plan, store)["ended"]
    assert end_times.tolist() == [pd.Timestamp(1.79e9 + after, unit="s", tz="UTC") for after in (600.25, 1200)]


def test_two_folders_of_one_data_type_are_two_data_sets(tmp_path):
    plan, store = study(tmp_path)
    other = dataclasses.replace(plan.trials[-1], trial=dataclasses.replace(plan.trials[-1].trial, data="sha256:decaf"))
    provenance = document(dataclasses.replace(plan, trials=(*plan.trials[:-1], other)), store)["made"]
    assert [item["identity"] for item in provenance["data"]] == ["sha256:c0ffee", "sha256:decaf"]


def test_markup_in_names_is_escaped(tmp_path):
    plan, store = study(tmp_path, {"_baseline_": BASE, "*none": NONE})
    assert "| \\_baseline\\_ |" in text_of(plan, store, "md")
    assert r"    {}*none & " in text_of(plan, store, "latex")  # \\* would swallow the star


def test_unknown_format_is_refused(tmp_path):
    plan, store = study(tmp_path)
    with pytest.raises(UserError, match=r"no report format 'htm'\. Did you mean 'html'\?"):
        report.render(plan, store, "htm")


# -- labels -----------------------------------------------------------------------------------------------------------


def test_labels_have_only_differences():
    names = [
        "position=none, attention=linear(eps=1, dim=2), seedless",
        "position=rope2d, attention=linear(eps=1, dim=2), seedless",
    ]
    assert list(drawing.short_labels(names).values()) == ["position=none", "position=rope2d"]
    assert drawing.split_name_at_commas(names[0]) == ("position=none", "attention=linear(eps=1, dim=2)", "seedless")
    assert drawing.short_labels(["a=1"]) == {"a=1": "a=1"} and drawing.short_labels(["a, b", "a"]) == {
        "a, b": "b",
        "a": "a",
    }
    grid = [f"position={p}, attention={a}" for p in ("learned", "sincos2d") for a in ("fused", "linear")]
    assert drawing.wrapped_labels(grid, 20)[grid[1]] == "position=learned,\nattention=linear"


@given(
    st.lists(st.text("ab, ([\n\u65e5", min_size=1, max_size=90), min_size=1, max_size=8, unique=True),
    st.integers(6, 40),
)
def test_labels_are_unique_and_not_empty(names, width):
    for shortened in (drawing.short_labels(names), drawing.wrapped_labels(names, width)):
        assert list(shortened) == names and len(set(shortened.values())) == len(names)
    assert all(len(line) <= width + 3 for label in shortened.values() for line in label.split("\n"))


# -- pictures ---------------------------------------------------------------------------------------------------------


def findings_of(plan: Plan, store: Store) -> Findings:
    results = StudyResults.read(plan, store)
    return Findings(results, comparison.summary_rows(results), store)


def figures_of(plan: Plan, store: Store) -> dict[str, Any]:
    """Return the figures of a report, by section."""
    return {name: drawing.figure for name, drawing in report.collect_report(plan, store).figures.items()}


def test_figure_shows_numbers(tmp_path):
    plan, store = study(tmp_path, analysis=Analysis(variance="own"))
    figure_set = figures_of(plan, store)
    left, right = figure_set["arms"].axes
    assert [label.get_text() for label in left.get_yticklabels()] == list(POSITIONS)
    dots = np.concatenate([group.get_offsets()[:, 0] for group in left.collections])
    assert sorted(dots) == pytest.approx(sorted(100 * value for values in POSITIONS.values() for value in values))
    intervals = [
        line.get_xdata() for line in right.lines if len(line.get_xdata()) == 2 and len(set(line.get_ydata())) == 1
    ]
    expected = stats.ttest_rel(NONE, BASE).confidence_interval(1 - 0.05 / 3)
    assert any(np.allclose(ends, [100 * expected.low, 100 * expected.high]) for ends in intervals)
    [curves] = figure_set["curves"].axes
    bold = [line for line in curves.lines if line.get_linewidth() > 1]
    ends = sorted(float(line.get_ydata()[-1]) for line in bold)
    assert ends == pytest.approx(sorted(100 * np.mean(values) for values in POSITIONS.values()))


GRID = {
    (position, attention): [
        value - 0.01 * i - 0.02 * j * (i > 0) + 0.002 * seed * (i - j) for seed, value in enumerate(BASE)
    ]
    for i, position in enumerate(("none", "learned", "sincos2d"))
    for j, attention in enumerate(("fused", "linear"))
}


def _grid(tmp_path: Path) -> tuple[Plan, Store]:
    """Return three positions with two attentions; each attention has its own baseline."""
    name = {cell: f"position={cell[0]}, attention={cell[1]}" for cell in GRID}
    arms = tuple(
        Arm(name[p, a], {"model.position": p, "model.attention": a}, None if p == "none" else name["none", a])
        for p, a in GRID
    )
    return study(tmp_path, {name[cell]: values for cell, values in GRID.items()}, planned_arms=arms)


def _texts_overlap(figure: Any, texts: Sequence[Any]) -> bool:
    figure.draw_without_rendering()
    boxes = [item.get_window_extent() for item in texts]
    assert all(figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 for box in boxes)
    return any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))


def test_grid_has_panel_per_arm_with_distinct_labels(tmp_path):
    plan, store = _grid(tmp_path)
    figure_set = figures_of(plan, store)
    assert list(figure_set) == ["arms", "curves", "main_effects", "interactions"]
    left, right = figure_set["arms"].axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert len(set(names)) == 6 and all(name.count("=") == 2 and "..." not in name for name in names)
    assert not _texts_overlap(figure_set["arms"], left.get_yticklabels())
    assert right.bbox.x0 > left.bbox.x1
    panels = [axes for axes in figure_set["curves"].axes if axes.get_visible()]
    for axes, arm in zip(panels, plan.arms, strict=True):
        assert " ".join(axes.get_title(loc="left").split()) == arm.name
        own = axes.lines[-1]
        assert float(own.get_ydata()[-1]) == pytest.approx(100 * np.mean(GRID[tuple(arm.values.values())]))
        behind = [line for line in axes.lines[:-1] if line.get_color() == GREY]
        assert len(behind) == (arm.baseline is not None)
        if behind:
            baseline = next(other for other in plan.arms if other.name == arm.baseline)
            end = 100 * np.mean(GRID[tuple(baseline.values.values())])
            assert float(behind[0].get_ydata()[-1]) == pytest.approx(end)
    assert figure_set["curves"].get_size_inches()[0] == drawing.WIDTH


def test_captions_say_what_is_drawn(tmp_path):
    def captions_of(name: str, seeds: int) -> dict[str, str]:
        arms = {"baseline": BASE[:seeds], "b": [value - 0.1 for value in reversed(BASE[:seeds])]}
        figures = report.collect_report(*study(tmp_path / name, arms)).figures
        return {name: drawing.caption for name, drawing in figures.items()}

    one, five = captions_of("one", 1), captions_of("five", 5)
    assert one["arms"] == "First the value, then the difference from the baseline."
    assert "each seed (small) and the mean with its 95 % interval" in five["arms"]
    assert "a filled dot are decided: orange worse;" in five["arms"] and "for all of them at once" not in five["arms"]
    undecided = report.collect_report(*study(tmp_path / "near", {"baseline": BASE, "b": NEAR})).figures["arms"].caption
    assert "; no difference is decided; " in undecided and "green" not in undecided
    assert five["curves"].startswith("val accuracy (%) over training: the mean of the seeds with its 95 % t-interval")
    assert "dashed" not in five["curves"] and "grey" not in five["curves"]
    many = report.collect_report(*study(tmp_path / "fifth", {**POSITIONS, "fifth": SINE})).figures
    assert "The baseline is grey behind other arms." in many["curves"].caption
    assert "holds for all of them at once" in many["arms"].caption


def test_figure_of_arms_marks_the_baseline(tmp_path):
    axes = report.collect_report(*study(tmp_path, {"a": BASE, "b": NEAR})).figures["arms"].figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a (baseline)", "b"]
    lost = report.collect_report(*_diverging_study(tmp_path / "lost", {"a": BASE, "b": [None] * 5}))
    labels = [label.get_text() for label in lost.figures["arms"].figure.axes[0].get_yticklabels()]
    assert labels == ["a (baseline)"], "as in the table, also where no other arm has a value"


def test_figure_of_arms_names_those_without_a_value(tmp_path):
    arms = {"baseline": BASE, "a": NEAR, "b": [None] * 5, "c": [None] * 5}
    caption = report.collect_report(*_diverging_study(tmp_path / "lost", arms)).figures["arms"].caption
    assert caption.endswith(" Without a value: b; c.")
    whole = report.collect_report(*study(tmp_path / "whole", {"baseline": BASE, "a": NEAR}))
    assert "Without a value" not in whole.figures["arms"].caption


@pytest.mark.slow
def test_few_seeds_are_lines_and_many_are_a_band(tmp_path):
    for seeds, thin, bands in ((2, 8, 0), (4, 16, 0), (5, 0, 4)):
        arms = {arm: values[:seeds] for arm, values in POSITIONS.items()}
        [axes] = figures_of(*study(tmp_path / str(seeds), arms))["curves"].axes
        assert sum(line.get_linewidth() < 1 for line in axes.lines) == thin
        assert sum(any(len(path.vertices) for path in band.get_paths()) for band in axes.collections) == bands
    arms = {**POSITIONS, "fifth": SINE}
    panels = figures_of(*study(tmp_path / "many", arms))["curves"].axes
    visible = [axes for axes in panels if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in visible] == list(arms)
    assert all(sum(line.get_linewidth() < 1 for line in axes.lines) == 0 for axes in visible)
    assert [any(line.get_color() == GREY for line in axes.lines) for axes in visible] == [False, *[True] * 4]


def test_curves_use_epochs_if_all_arms_agree(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b": NONE})
    findings = findings_of(plan, store)
    results, history = findings.results, findings.history.copy()
    figure_set = curves.draw_curves(results, history, "val/accuracy").figure
    assert figure_set.get_supxlabel() == "epoch" and figure_set.axes[0].get_xlim() == (0, STEPS[-1] / 20)
    history.loc[history["arm"] == "b", "epoch"] *= 2  # half as many images
    figure_set = curves.draw_curves(results, history, "val/accuracy").figure
    assert figure_set.get_supxlabel() == "optimizer step" and figure_set.axes[0].get_xlim() == (0, STEPS[-1])


def test_loss_has_own_curves(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b": NONE})
    findings = findings_of(plan, store)
    draw = all_sections()["loss"].figure
    assert draw((), findings) is None
    loss = findings.history[findings.history["metric"] == "val/accuracy"].assign(metric="val/loss")
    findings.__dict__["history"] = pd.concat([findings.history, loss.assign(value=1 - loss["value"])])
    assert draw((), findings).figure.get_supylabel() == "val loss"
    loss_plan = dataclasses.replace(plan, analysis=Analysis(metric="val/loss", goal="min"))
    assert all_sections()["loss"].metric(loss_plan) is None
    judged_by_test = findings_of(dataclasses.replace(plan, analysis=Analysis(metric="test/accuracy")), store)
    assert all_sections()["curves"].figure((), judged_by_test).figure.get_supylabel() == "val accuracy (%)"


def test_curves_of_values_far_apart_are_logarithmic_and_their_caption_says_what_is_cut(tmp_path):
    values = {"baseline": [0.80, 0.82, 0.81, 0.83, 0.79], "b": [0.60, 0.62, 0.61, 0.63, 0.59]}
    findings = findings_of(*study(tmp_path, values))
    rows = findings.history[findings.history["metric"] == "val/accuracy"].copy()
    for far, scale in ((1.0, "linear"), (1000.0, "log")):
        loss = rows.assign(metric="val/loss", value=np.where(rows["arm"] == "b", far, 1.0))
        drawing = curves.draw_curves(findings.results, loss, "val/loss")
        assert {axes.get_yscale() for axes in drawing.figure.axes} == {scale}
        assert "beyond the picture" not in drawing.caption and ("logarithmic" in drawing.caption) == (scale == "log")
    loss.loc[loss["step"] == loss["step"].min(), "value"] = 1e9
    assert "some values lie beyond the picture" in curves.draw_curves(findings.results, loss, "val/loss").caption


def test_figure_of_interactions_has_the_numbers_of_their_table(tmp_path):
    plan, store = _grid(tmp_path)
    content = report.collect_report(plan, store)
    rows, (axes,) = content.sections["interactions"], content.figures["interactions"].figure.axes
    assert len(rows) == 2 and axes.get_xlabel() == "difference of differences (points)"
    lines = [line.get_xdata() for line in axes.get_lines()[1:]]  # after the rule at 0: intervals and their dots
    expected = [numbers for row in rows for numbers in ([row.low, row.high], [row.difference]) if None not in numbers]
    for drawn, numbers in zip(lines, expected, strict=True):
        assert drawn == pytest.approx(100 * np.array(numbers))
    labels = [" ".join(label.get_text().split()) for label in axes.get_yticklabels()]
    assert all(f"{row.first.partition('.')[2]} with {row.second.partition('.')[2]}" in labels for row in rows)


def test_selected_arms_stand_beside_their_baseline_and_sections_are_frames(tmp_path):
    plan, store = _grid(tmp_path)
    arms = Comparison.of(report.collect_report(plan, store))
    last = plan.arms[-1]
    shown = [line.strip() for line in repr(arms[arms["arm"] == last.name]).splitlines()]
    assert len(shown) == 3 and last.name in shown[1] and "verdict" in shown[0], "the numbers of a selected arm"
    rows = document(plan, store)
    for name in ("main_effects", "interactions"):
        table = arms.tables[name]
        assert table.to_dict("records") == rows[name] != []
        head = str(table).splitlines()[0]
        assert "low" in head and "difference" in head and "..." not in head
        assert f"{name}: {len(table)} x {len(table.columns)}" in repr(arms.tables).splitlines()
    assert "mean" in str(arms.tables["crossed"]).splitlines()[0], "a small table is shown whole"


def test_curves_of_any_metric_are_drawn_and_others_are_refused(tmp_path):
    arms = Comparison.of(report.collect_report(*study(tmp_path, {"baseline": BASE, "b": NEAR})))
    (axes,) = arms.curves("train/loss").axes
    line = {line.get_label(): line for line in axes.get_lines()}["b"]
    assert line.get_ydata()[-1] == pytest.approx(1 - np.mean(NEAR))  # as the results are made
    with pytest.raises(UserError, match=r"no curves of 'train/los'. Did you mean 'train/loss'\? Measured: train/loss,"):
        arms.curves("train/los")


def test_captions_name_no_baseline_where_there_is_none(tmp_path):
    plan, store = study(tmp_path, {"a": BASE, "b": NEAR}, planned_arms=(Arm("a", {}, None), Arm("b", {}, None)))
    figures = report.collect_report(plan, store).figures
    assert "curves" in figures and not any("baseline" in drawing.caption for drawing in figures.values())


def test_comparison_with_drawn_figures_is_pickled(tmp_path):
    arms = Comparison.of(report.collect_report(*study(tmp_path, POSITIONS)))
    assert arms.figures["arms"]._repr_png_().startswith(b"\x89PNG")
    again = pickle.loads(pickle.dumps(arms))
    assert again.answers == arms.answers and list(again.figures) == list(arms.figures)
    assert again.figures["arms"]._repr_png_().startswith(b"\x89PNG")


def test_figure_with_formatted_ticks_is_pickled():
    figure = drawing.empty_figure(drawing.WIDTH, 2)
    drawing.format_ticks_without_exponents(figure.subplots())
    assert pickle.loads(pickle.dumps(figure))._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_vector_figures_have_text_and_are_reproducible(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b $x$": NONE})
    [first, second] = [figures_of(plan, store)["arms"] for _ in range(2)]
    svg = drawing.Drawing(first, "").svg
    assert svg == drawing.Drawing(second, "").svg and drawing.render_pdf(first) == drawing.render_pdf(second)
    tree = ElementTree.fromstring(svg)
    texts = {"".join(item.itertext()) for item in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"baseline", "b $x$", "val accuracy (%); higher is better"} <= texts
    assert drawing.render_pdf(first).startswith(b"%PDF") and b"/FontType 3" not in drawing.render_pdf(first)


@pytest.mark.slow
def test_page_starts_with_answer_and_has_every_column(tmp_path):
    plan, store = _grid(tmp_path)
    html = text_of(plan, store, "html")
    assert (
        "95\N{NO-BREAK SPACE}% interval</th>" in html and "95 %" not in html[html.index("</style>") :].split("<svg")[0]
    )
    html = html.replace("\N{NO-BREAK SPACE}", " ")
    section = html[html.index('<section aria-labelledby="arms">') : html.index("Comparisons</h2>")]
    titles = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', section)
    assert {"difference", "verdict", "p (adjusted)"} <= set(titles)
    assert titles[-3:] == ["test accuracy (%), mean \u00b1 sd", "parameters", "MACs"]
    values = GRID["sincos2d", "linear"]
    cells = f"{100 * np.mean(values) - 1:.1f} \u00b1 {100 * np.std(values, ddof=1):.1f}"
    assert cells in section and "<details>" not in section
    assert html.count('class="picture"') == 4
    assert 'data-label="difference">' in section and html.count("<dt>Versions") == 1 and "<dt>vitlab" not in html


def test_diverged_trials_are_dashed_and_not_in_mean(tmp_path):
    plan, store = study(tmp_path, {"baseline": BASE, "b": [*NONE[:4], None]})
    last = plan.trials[-1].trial
    result = result_of(last, {}, curve=[0.3, 0.2, 0.1, 0.1, 0.1], status="diverged", failure="nan")
    store.trial(last.key, last.code).write_result(result)
    [axes] = figures_of(plan, store)["curves"].axes
    ends = [float(line.get_ydata()[-1]) for line in axes.lines if line.get_linewidth() > 1]
    assert sorted(ends) == pytest.approx([100 * np.mean(NONE[:4]), 100 * np.mean(BASE)])
    assert [float(line.get_ydata()[-1]) for line in axes.lines if line.is_dashed()] == [pytest.approx(10.0)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 16])
def test_any_number_of_arms_and_seeds_is_drawn(tmp_path, count):
    arms = {f"arm {index} 日本": [0.9 + 0.001 * index + 0.002 * seed for seed in range(2)] for index in range(count)}
    for name, figure in figures_of(*study(tmp_path, arms)).items():
        if count == 2:
            assert drawing.render_png(figure, dpi=40).startswith(b"\x89PNG")
        element = drawing.svg_to_element(drawing.Drawing(figure, name).svg, name, 'a "b" <c> 0.0123')
        tag = element.partition(">")[0]
        assert tag.startswith('<svg role="img"') and 'aria-label="a &quot;b&quot; &lt;c&gt; 0.0123"' in tag


@pytest.mark.parametrize(("value", "spread"), [(0.9, 0.0), (0.97, 1e-6), (0.0, 0.0), (1.0, 1e-15), (0.5, 1e-3)])
def test_tick_labels_do_not_overlap_for_close_values(tmp_path, value, spread):
    values = [value + spread * index for index in range(3)]
    plan, store = study(tmp_path, {"baseline": values, "b": values, "c": values[::-1]})
    figure = figures_of(plan, store)["arms"]
    figure.draw_without_rendering()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        labels = [t for t in axes.get_xticklabels() if low <= t.get_position()[0] <= high and t.get_text()]
        boxes = [label.get_window_extent() for label in labels]
        assert boxes and all(left.x1 + 1 < right.x0 for left, right in itertools.pairwise(boxes))
        assert axes.xaxis.get_offset_text().get_text() == ""


def _arrows(axes: Any) -> list[float]:
    """Return the places of arrows, which stand for ends of intervals outside of the picture."""
    return [float(x) for line in axes.lines if line.get_marker() in ("<", ">") for x in line.get_xdata()]


@pytest.mark.parametrize("seeds", [3, 4])
def test_arms_figure_shows_intervals_of_few_seeds_in_full(tmp_path, seeds):
    """By the formula of t-intervals, which with 2 or 3 seeds are far longer than what the seeds span."""
    draws = np.random.default_rng(1).normal(0.8, 0.02, (3, seeds))
    plan, store = study(tmp_path, dict(zip(("learned", "none", "rope2d"), draws.tolist(), strict=True)))
    figure = figures_of(plan, store)["arms"]
    for axes, values in zip(figure.axes, (draws, draws[1:] - draws[0]), strict=True):
        means = 100 * values.mean(axis=1)  # intervals of differences are simultaneous, so no shorter than these
        half_widths = 100 * stats.t.ppf(0.975, seeds - 1) * values.std(axis=1, ddof=1) / seeds**0.5
        low, high = axes.get_xlim()
        assert low < (means - half_widths).min() and (means + half_widths).max() < high and not _arrows(axes)


def test_arms_figure_cuts_interval_of_another_magnitude(tmp_path):
    draws = np.random.default_rng(0).normal(0.8, 0.002, (3, 5)) + np.array([[0.0], [0.01], [0.02]])
    arms = dict(zip(("learned", "none", "rope2d"), draws.tolist(), strict=True)) | {"few": [0.79, 0.83, 0.81]}
    left, right = figures_of(*study(tmp_path, arms))["arms"].axes
    for axes in (left, right):
        low, high = axes.get_xlim()
        before, beyond = _arrows(axes)
        assert low < before < low + 0.1 * (high - low) and high - 0.1 * (high - low) < beyond < high
    low, high = left.get_xlim()
    assert low < 79 and 83 < high < 90  # all seeds are in it, and the interval of three of them is 10 points long


def test_numbers_have_readable_precision():
    assert [phrasing.format_compact(n) for n in (950, 12_345, 999_950, 5.7e9)] == ["950", "12.3 k", "1.00 M", "5.70 G"]
    assert [phrasing.format_p_value(p, 0.05) for p in (0.0004, 0.0123, 0.612, 0.05004)] == [
        "< 0.001",
        "0.012",
        "0.61",
        "0.05004",
    ]
    # A level below a thousandth must not be hidden behind "< 0.001".
    strict = {0.0008: "0.0008", 0.00052: "0.00052", 0.00048: "0.0005", 0.00004: "< 0.0001", 0.02: "0.020"}
    assert {p: phrasing.format_p_value(p, 0.0005) for p in strict} == strict
    assert [phrasing.format_duration(s) for s in (0, 0.0213, 3.2, 59.7, 185, 7620, 4_680_100)] == [
        "0 s",
        "21.3 ms",
        "3.2 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 07 min",
        "1,300 h",
    ]
    units = {"accuracy": "share", "top5": "share", "ece": "share", "loss": "number"}
    assert phrasing.Scale.of("val/accuracy_cls", units).unit == phrasing.Scale.of("test/top5", units).unit == "%"
    assert phrasing.Scale.of("val/loss", units).unit == phrasing.Scale.of("val/topology", units).unit == ""
    assert phrasing.Scale.of("val/ece", units).number(-0.0001, 1) == "0.0"
    # An interval that holds no 0 is not shown as one that ends there.
    ends = [phrasing.Scale.of("val/accuracy", units).end(value, 1) for value in (0.0002, -0.000003, 0.0, 0.016)]
    assert ends == ["0.02", "\N{MINUS SIGN}0.0003", "0.0", "1.6"]
    # Equal values have no spread: their mean and the ends of its interval differ by rounding alone.
    rounding = {"low": 0.09999999999999998, "high": 0.10000000000000006}
    assert phrasing.half_width(**rounding) is None and phrasing.half_width(0.1, 0.2) == pytest.approx(0.05)
    scale = phrasing.Scale.of("val/accuracy", units)
    assert scale.decimals_for_intervals([phrasing.half_width(**rounding)]) == 1
    assert scale.end(2.8e-17, 1) == "0.0"


def test_importing_report_is_light():
    heavy = "{'torch', 'mlflow', 'ray', 'pandas', 'matplotlib', 'scipy', 'jinja2', 'rich.console'}"
    modules = "vitlab.report.frame, vitlab.report.sections, vitlab.report.report"
    code = f"import sys, {modules}; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_stored_report_is_printed_without_pandas(tmp_path, undrawn):
    plan, store = study(tmp_path)
    report.write(report.collect_report(plan, store), store.study(plan.study) / "report")
    code = (
        "import sys\nfrom vitlab import report\nfrom vitlab.planning.values import Plan\n"
        "from vitlab.store.folders import Store, read_json\nfrom pathlib import Path\n"
        f"store = Store(Path({str(tmp_path)!r}))\nplan = Plan.from_json(read_json(store.study('positions') / 'plan.json'))\n"
        "assert all(report.read_report_if_current(plan, store, form) for form in report.FORMATS)\n"
        "sys.exit(bool({'pandas', 'scipy', 'matplotlib', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_collapsed_seed_is_counted_and_no_verdict_rests_on_t(tmp_path):
    """By t alone, b would be worse: five pairs never convince a sign-flip test, ten do."""
    draws = np.random.default_rng(4)
    base, other, worse = 0.9 + 0.002 * draws.normal(size=(3, 10))
    arms = {"baseline": base, "a": other, "b": [*(worse[:4] - 0.05), 0.1]}
    plan, store, results, rows = outcome(tmp_path / "a", {name: list(values[:5]) for name, values in arms.items()})
    assert rows["collapsed"].tolist() == [0, 0, 1] and rows["collapsed_pairs"].tolist()[1:] == [0, 1]
    assert rows["test"].tolist()[1:] == ["paired t", "sign flip"] and rows.loc["b", "verdict"] == "cannot tell"
    assert rows.loc["b", "p"] == pytest.approx(2 / 2**5)
    assert "1 seed collapsed, so t is not used" in answers_of(results)[1]
    notes = document(plan, store)["notes"]
    p = stats.boschloo_exact([[1, 0], [4, 5]], alternative="greater").pvalue
    assert any("1 of 5 seeds of b collapsed" in note and f"p = {p:.2g}" in note for note in notes)
    assert "1/5" in text_of(plan, store, "md")
    arms = {"baseline": list(base), "b": [*(worse[:9] - 0.05), 0.1]}
    _, _, _, rows = outcome(tmp_path / "b", arms)
    assert rows.loc["b", "test"] == "sign flip" and rows.loc["b", "verdict"] == "worse"
    _, _, _, sound = outcome(tmp_path / "c", {"baseline": list(base), "a": list(other)})
    assert sound["collapsed"].tolist() == [0, 0]


def test_single_precision_makes_no_difference_and_equal_values_have_no_exact_interval(tmp_path):
    """Three seeds that gain one image each differ by the rounding of single precision alone."""
    images = 360
    base = np.array([320, 322, 319])
    for kind in (np.float64, np.float32):
        arms = {
            "baseline": [float(kind(n / images)) for n in base],
            "b": [float(kind((n + 1) / images)) for n in base],
            "equal": [float(kind(300 / images))] * 3,
        }
        _, _, _, rows = outcome(tmp_path / kind.__name__, arms)
        assert rows.loc["b", "test"] == "sign flip" and rows.loc["b", "p"] == pytest.approx(0.25)
        assert rows.loc["equal", ["low", "high"]].isna().all()
    interval = mean_interval([300 / images] * 4, quantum=1 / images, overlap=0.0, alpha=0.05)
    half = stats.t.ppf(0.975, 3) / images / math.sqrt(12) / 2
    assert (interval.low, interval.high) == pytest.approx((300 / images - half, 300 / images + half))


def test_values_are_rounded_to_images_of_stored_predictions(tmp_path):
    images, hits = 360, [320, 322, 319]
    values = {"baseline": [float(np.float32(n / images)) for n in hits], "b": [300 / images] * 3}
    plan, store = study(tmp_path, values)
    folder = store.trial(plan.trials[0].trial.key, plan.trials[0].trial.code)
    ids = [*range(images), *range(5)]
    pd.DataFrame({"split": ["val"] * images + ["test"] * 5, "id": ids}).to_parquet(folder.predictions)
    results = StudyResults.read(plan, store)
    assert results.quantum == 1 / images
    assert list(results.values["baseline"].values()) == [n / images for n in hits]
    rows = arms_table(results)
    half = stats.t.ppf(0.975, 2) / images / math.sqrt(12) / math.sqrt(3)
    assert rows.loc["b", "high"] - rows.loc["b", "mean"] == pytest.approx(half)


def test_arms_that_have_not_run_are_named_once(tmp_path: Path, undrawn: None) -> None:
    plan, store = study(tmp_path, {"baseline": BASE, "b": NONE, "c": [None] * 5, "d": [None] * 5})
    (store.folder(plan.trials[-1].trial).path.parent / "other").mkdir(parents=True)
    (store.folder(plan.trials[-1].trial).path.parent / "other" / "result.json").touch()
    checkpoint = store.folder(plan.trials[-2].trial).checkpoint
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    doc = document(plan, store)
    assert [answer.split(" ")[0] for answer in doc["answers"]] == ["b", "cannot", "no"] and len(doc["arms"]) == 4
    assert "no trial of d can be judged yet (1 paused, 4 missing)" in doc["answers"][1]
    assert doc["answers"][-1] == "no result yet: c."
    assert (
        "Preliminary: of 20 trials, 10 done, 1 paused, 9 missing (1 with a result of other code, which is kept and not "
        "used)." in (doc["notes"])
    )
    assert frame.results(plan, store)["status"].tolist()[-2:] == ["paused", "missing"]
    rows = re.findall(r"^\| (baseline|b|c|d) \|", text_of(plan, store, "md"), flags=re.MULTILINE)
    assert set(rows) == {"baseline", "b", "d"}
    assert "<li>no result yet: c.</li>" in text_of(plan, store, "html")
    plan, store = study(tmp_path / "none", {"baseline": [None], "b": [None]})
    assert document(plan, store)["answers"] == ["no result yet: baseline; b."]
    assert " n " not in text_of(plan, store, "terminal")
    arms = Comparison.of(report.collect_report(plan, store))
    assert "standard deviation" not in repr(arms) and "<table" not in (arms._repr_html_() or "")


def test_intervals_that_end_at_the_bounds_have_a_note(tmp_path: Path, undrawn: None) -> None:
    mean = [0.05, 0.3, 0.1]
    assert stats.ttest_1samp(mean, 0).confidence_interval().low < 0
    for name, values, is_cut in (
        ("wide", [0.0, 1.0, 0.5], True),
        ("mean", mean, True),
        ("narrow", [0.5, 0.52, 0.51], False),
    ):
        plan, store = study(tmp_path / name, {"baseline": [0.5, 0.5, 0.51], "b": values})
        notes = document(plan, store)["notes"]
        assert ("Intervals are cut at the bounds of the metric." in notes) == is_cut


def test_words_of_tables_break_at_signs_and_lines_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("position=sinusoidal, patch_size=4", "model.head=mean-pool, lr=0.001")
    columns = [
        phrasing.Column("arm", names, right=False),
        phrasing.Column("val accuracy (%)", ("97.1 ± 0.3",) * 2),
        phrasing.Column("verdict", ("same (exploratory)",) * 2, right=False),
    ]
    whole = " ".join((*names, "val accuracy (%) 97.1 ± 0.3 arm verdict same (exploratory)")).split()
    for width in (45, 50, 60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = parts_to_text(columns).splitlines()
        assert max(map(len, lines)) <= width
        for part in " ".join(lines).replace("─", "").split():
            assert any(word.endswith(part) or (part in word and part[-1] in "=,_/-.") for word in whole), part
        assert any("0.001" in line for line in lines)


def test_table_has_every_column_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [phrasing.Column(f"column {rank}", ("value",), rank) for rank in range(30)]
    for width, hidden in ((None, 0), ("80", 20)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if width:
            monkeypatch.setenv("COLUMNS", width)
        text = parts_to_text("A sentence. " * 20, columns)
        assert ("Not shown" in text) == bool(hidden) and text.count("value") <= 30 - hidden
        assert hidden or text.splitlines()[0] == ("A sentence. " * 20).strip()


def test_latex_has_means_that_may_be_best_in_bold(tmp_path: Path) -> None:
    plan, store = study(tmp_path)
    text = text_of(plan, store, "latex")
    rows = {line.split(" &")[0].strip(): "textbf" in line for line in text.splitlines() if line.endswith(r"\\")}
    assert {name for name, is_bold in rows.items() if is_bold} == {"baseline", "position=sincos2d"}
    assert "Bold: the best mean" in text and "parameters" not in text
    near = [row["arm"] for row in document(plan, store)["arms"] if row["best"]]
    assert near == ["baseline", "position=sincos2d"]
    plan, store = study(tmp_path / "alike", {"baseline": BASE, "b": NEAR})
    assert "Bold" not in text_of(plan, store, "latex"), "no arm is told from the best"


def test_scatter_leaves_out_arms_at_chance(tmp_path, undrawn):
    results = StudyResults.read(*_diverging_study(tmp_path, {"baseline": [0.5, 0.6, 0.7], "a": [0.7, 0.72, 0.71]}))
    rows = [{**row, "split_sd": 0.01} for row in comparison.summary_rows(results)]
    dead = [rows[0], {**rows[1], "at_chance": 0.1}]
    (pooled,), (alone,) = (list(notes._note_seed_scatter(results.plan, some)) for some in (rows, dead))
    assert "scatter by 7" in pooled and "without" not in pooled
    assert "scatter by 10" in alone and "without arms at chance" in alone
