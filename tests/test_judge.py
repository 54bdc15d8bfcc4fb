"""Tests of ``vitlab judge`` on tables of results from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from synthetic_studies import BASE, POSITIONS, document, outcome, text_of

from vitlab.cli.report import judge_command as command
from vitlab.errors import UserError
from vitlab.judging.judgement import judge
from vitlab.planning.study_folder import read_plan
from vitlab.planning.values import Looks
from vitlab.report.comparison import summary_rows
from vitlab.report.frame import StudyResults
from vitlab.report.phrasing import Scale, answer_per_arm
from vitlab.spec import Analysis

GALLERY = Path(__file__).parents[1] / "docs" / "pages" / "gallery"


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def long(arms: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {"model": arm, "run": seed, "acc": value} for arm, values in arms.items() for seed, value in enumerate(values)
    ]


def notes_of(path: Path, **options: Any) -> str:
    return "\n".join(judge(path, **{"metric": "acc", "arm": "model", "seed": "run", **options}).notes)


@pytest.mark.slow
def test_exported_study_is_judged_to_last_digit(tmp_path: Path) -> None:
    plan, store, _, _ = outcome(tmp_path / "store")
    own = document(plan, store)
    file = tmp_path / "results.csv"
    file.write_text(text_of(plan, store, "csv"), encoding="utf-8")
    options = ["--arm", "arm", "--seed", "seed", "--metric", "val/accuracy", "--format", "json"]
    result = CliRunner().invoke(command, [str(file), *options], catch_exceptions=False)
    judged = json.loads(result.stdout)
    assert judged["answers"] == own["answers"]
    assert {row["registered"] for row in judged["arms"]} == {None}
    other = {"params", "macs", "wall_s", "images_per_s", "test/accuracy", "test/accuracy_sd"}
    for mine, theirs in zip(own["arms"], judged["arms"], strict=True):
        assert {k: v for k, v in mine.items() if k not in other} == {k: v for k, v in theirs.items() if k not in other}
    # Other forms of the table have the same digits.
    frame = pd.read_csv(file, converters={"val/accuracy": float})[["arm", "seed", "val/accuracy"]]
    frame.to_parquet(tmp_path / "r.parquet")
    frame.to_json(tmp_path / "r.jsonl", orient="records", lines=True, double_precision=15)
    frame.pivot(index="seed", columns="arm", values="val/accuracy")[list(POSITIONS)].reset_index().to_csv(
        tmp_path / "wide.csv", index=False
    )
    for name, arm in (("r.parquet", "arm"), ("r.jsonl", "arm"), ("wide.csv", None)):
        again = judge(tmp_path / name, metric="val/accuracy", arm=arm, seed="seed").report.to_json()
        assert again["answers"] == own["answers"]
        assert [row["p"] for row in again["arms"]] == [row["p"] for row in judged["arms"]]


NOT_IN_TABLE = {
    *("split_sd", "new_images_low", "new_images_high", "params", "macs", "wall_s", "images_per_s", "registered")
}
"""Columns of a report that need more than arms, seeds and values."""


def equal_but_for(own: list[dict[str, Any]], judged: list[dict[str, Any]], others: set[str]) -> bool:
    left_out = {name for row in own for name in row if name in others | NOT_IN_TABLE or name.startswith("test/")}
    return len(own) == len(judged) and all(
        row[name] == pytest.approx(value, rel=1e-12, abs=1e-15) if isinstance(value, float) else row[name] == value
        for stored, row in zip(own, judged, strict=True)
        for name, value in stored.items()
        if name not in left_out
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "segmentation", "tutorial", "mae", "finetune"])
def test_shipped_study_is_judged_to_last_digit(tmp_path: Path, name: str) -> None:
    plan = read_plan(GALLERY / name / "plan.json")
    assert plan is not None
    frame = pd.read_parquet(GALLERY / name / "results.parquet")
    own = summary_rows(StudyResults(plan, frame))
    file = tmp_path / "results.csv"
    options: dict[str, Any] = {"metric": plan.analysis.metric, "arm": "arm", "seed": "seed"}
    frame.to_csv(file, index=False)
    judged = judge(file, **options, baselines="baseline")
    arms = judged.report.to_json()["arms"]
    assert judged.answers == [
        each.sentence for each in answer_per_arm(own, plan.analysis, Scale.of(plan.analysis.metric, plan.units))
    ] and equal_but_for(own, arms, {"exploratory"})
    baselines = [row["arm"] for row in own if row["baseline"] is None]
    if len(baselines) == 1:
        assert judge(file, **options, baseline=baselines[0]).report.to_json()["arms"] == arms


@pytest.mark.parametrize("name", ["optimizers", "vit5"])
def test_shipped_study_of_tuned_arms_is_judged_to_last_digit_but_for_the_tuning(tmp_path: Path, name: str) -> None:
    """A table has no scores of rivals, so that the study without them is what it tells."""
    plan = read_plan(GALLERY / name / "plan.json")
    assert plan is not None and plan.tuning
    frame = pd.read_parquet(GALLERY / name / "results.parquet")
    own = summary_rows(StudyResults(dataclasses.replace(plan, tuning=()), frame))
    file = tmp_path / "results.csv"
    frame.to_csv(file, index=False)
    analysis = plan.analysis
    judged = judge(file, metric=analysis.metric, arm="arm", seed="seed", baselines="baseline", margin=analysis.margin)
    assert equal_but_for(own, judged.report.to_json()["arms"], {"exploratory"})
    assert any((row["shared"] or 1) > 1 for row in own)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_baselines_may_be_numbers_beside_empty_cells(tmp_path: Path, suffix: str) -> None:
    rows = [{"depth": d, "seed": s, "acc": BASE[s] + d, "of": None if d == 6 else 6} for d in (6, 12) for s in range(5)]
    frame, file = pd.DataFrame(rows), tmp_path / f"r.{suffix}"
    if suffix == "jsonl":
        frame.to_json(file, orient="records", lines=True)
    else:
        frame.to_csv(file, index=False) if suffix == "csv" else frame.to_parquet(file)
    arms = judge(file, metric="acc", arm="depth", seed="seed", baselines="of").report.to_json()["arms"]
    assert [row["baseline"] for row in arms] == [None, "6"]
    by_name = judge(frame.rename(columns={"depth": "arm"}), metric="acc", seed="seed", baselines="of")
    assert [row["baseline"] for row in by_name.report.to_json()["arms"]] == [None, "6"]


def test_bad_baselines_are_refused_with_sentence(tmp_path: Path) -> None:
    rows = [{**row, "of": {"a": None, "b": "a", "c": "d"}[row["model"]]} for row in long(dict.fromkeys("abc", BASE))]
    for changed, options, message in (
        (rows, {"baselines": "of"}, "no arm 'd'. Arms: a; b; c."),
        (rows, {"baselines": "off"}, "no column 'off'. Did you mean 'of'?"),
        (rows, {"baselines": "of", "baseline": "a"}, "cannot be combined with baseline; remove one"),
        ([*rows[:9], {**rows[9], "of": "c"}], {"baselines": "of"}, "arm 'b' has several values of 'of': 'a', 'c'"),
        (rows[:5], {"baselines": "of"}, "column 'of' names no baseline"),
    ):
        with pytest.raises(UserError) as error:
            notes_of(table(tmp_path / "r.csv", changed), **options)
        assert message in str(error.value)


@pytest.mark.slow
def test_study_of_many_arms_or_with_margin_is_judged_to_last_digit(tmp_path: Path) -> None:
    draws = np.random.default_rng(4)
    arms = {
        "baseline": BASE,
        **{f"arm{n}": (0.96 - 0.004 * n + 0.004 * draws.normal(size=5)).tolist() for n in range(6)},
    }
    for name, analysis in (("one", Analysis()), ("margin", Analysis(margin=0.02))):
        plan, store, _, _ = outcome(tmp_path / name, arms, analysis=analysis)
        own = document(plan, store)
        file = tmp_path / "results.csv"
        file.write_text(text_of(plan, store, "csv"), encoding="utf-8")
        judged = judge(file, metric="val/accuracy", arm="arm", seed="seed", margin=analysis.margin).report.to_json()
        assert {row["shared"] for row in own["arms"] if row["baseline"]} == {6}
        assert judged["answers"] == own["answers"] and equal_but_for(own["arms"], judged["arms"], set())


def test_study_until_decided_is_judged_to_last_digit(tmp_path: Path) -> None:
    """A table has no looks: what depends on them differs, everything else is equal."""
    looks = Looks((tuple(range(3)), tuple(range(5))), (0.3, 0.8), (("position=sincos2d",),), 0.1)
    plan, store, _, _ = outcome(tmp_path / "store", looks=looks)
    own = document(plan, store)
    file = tmp_path / "results.csv"
    file.write_text(text_of(plan, store, "csv"), encoding="utf-8")
    judged = judge(file, metric="val/accuracy", arm="arm", seed="seed").report.to_json()
    of_looks = {"look", "looks", "decidable", "p", "p_corrected", "shared"}  # decided comparisons share no more
    of_looks |= {f"difference_{name}" for name in ("low", "high", "se", "df")}
    [mine, theirs] = [[row for row in doc["arms"] if row["arm"] == "position=sincos2d"] for doc in (own, judged)]
    assert mine[0]["look"] == 2 and mine[0]["pairs"] == 5
    assert equal_but_for(mine, theirs, of_looks)


def test_published_table_with_known_answer(tmp_path: Path) -> None:
    """Student (1908), Biometrika 6, 1-25: hours of sleep gained by ten patients, with two drugs each.

    Expected is the output of R for its data set ``sleep``: t.test(extra ~ group, data = sleep, paired = TRUE).
    """
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    file = tmp_path / "sleep.csv"
    pd.DataFrame({"ID": range(1, 11), "1": first, "2": second}).to_csv(file, index=False)
    judged = judge(file, metric="extra", seed="ID", baseline="2", goal="max").report.to_json()
    [row] = [row for row in judged["arms"] if row["arm"] == "1"]
    assert row["difference"] == pytest.approx(-1.58, abs=1e-9) and row["pairs"] == 10
    assert (row["difference_low"], row["difference_high"]) == pytest.approx((-2.4598858, -0.7001142), abs=5e-8)
    assert row["p"] == pytest.approx(0.002833, abs=5e-7) and row["verdict"] == "worse"
    assert "1 is 1.6 below 2 (95 % interval" in judged["answers"][0]


@pytest.mark.slow
def test_table_is_judged_without_slow_imports(tmp_path: Path) -> None:
    file = table(tmp_path / "r.csv", long({"a": BASE, "b": [value - 0.02 for value in BASE[::-1]]}))
    code = (
        "import sys; from vitlab.cli import cli; "
        f"cli.main(['judge', {str(file)!r}, '--arm', 'model', '--seed', 'run', '--metric', 'acc'], "
        "standalone_mode=False); "
        "print('imported:', sorted({'torch', 'statsmodels', 'matplotlib', 'mlflow', 'jinja2', 'scipy.optimize'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "imported: []" in done.stdout, done.stdout + done.stderr
    assert "b is " in done.stdout and "below a" in done.stdout


def test_percent_unequal_seeds_and_missing_values_are_reported(tmp_path: Path) -> None:
    arms = {"a": [93.1, 93.4, 92.8, 93.0], "b": [94.0, 94.1, 93.7]}
    rows = [*long(arms), {"model": "b", "run": 3, "acc": None}, {"model": "b", "run": 4, "acc": 93.0}]
    file = table(tmp_path / "r.csv", rows)
    text = notes_of(file)
    assert "seeds 3, 4 have a value in one of the two alone" in text
    assert "Warning: 1 lost seed, without a value: b, seed 3." in text and "by chance" in text
    assert "by chance" not in notes_of(file, chance=10)
    doc = judge(file, metric="acc", arm="model", seed="run").report.to_json()
    difference = np.mean([94.0 - 93.1, 94.1 - 93.4, 93.7 - 92.8])
    assert doc["units"] == {"acc": "%"} and doc["arms"][1]["difference"] == pytest.approx(difference)
    assert "points above a" in doc["answers"][0]


def test_single_values_and_best_of_several_are_reported(tmp_path: Path) -> None:
    rows = [{"model": "a", "run": 0, "best_acc": 0.9, "n": 5}, {"model": "b", "run": 0, "best_acc": 0.91, "n": 3}]
    file = table(tmp_path / "r.csv", rows)
    [answer] = judge(file, metric="best_acc", arm="model", seed="run").answers
    assert "one seed has no spread to judge that by" in answer
    assert "'best_acc' seems to be the best of several values" in notes_of(file, metric="best_acc")


def test_duplicates_count_once_or_are_refused(tmp_path: Path) -> None:
    rows = long({"a": [0.9, 0.91, 0.92], "b": [0.8, 0.81, 0.83]})
    assert "1 row left out, with the seed and the value of another one" in notes_of(
        table(tmp_path / "r.csv", [*rows, rows[0]])
    )
    with pytest.raises(
        UserError, match=r"1 training: 2 rows of arm 'a' with seed 0 \(line 2; line 8\); keep one of them"
    ):
        notes_of(table(tmp_path / "r.csv", [*rows, {**rows[0], "acc": 0.5}]))
    # All are counted; of copies, the first are listed, of trainings with epochs, one.
    many = [{**row, "run": seed} for seed in range(4) for row in rows[::3]]
    other = [{**row, "acc": 0.1} for row in many]
    for epochs, listed in ((0, 0), 5), ((0, 1), 1):
        doubled = [{**row, "epoch": epoch} for epoch, part in zip(epochs, (many, other), strict=True) for row in part]
        with pytest.raises(UserError) as error:
            notes_of(table(tmp_path / "r.csv", doubled))
        text = str(error.value)
        assert "several values for 8 trainings: 2 rows of arm" in text and f") and {8 - listed} more" in text
        assert (
            text.count("2 rows of arm") == listed and "\n" not in text and ("differ in epoch" in text) == (listed == 1)
        )


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("model,run,acc\na,0,x\n", {}, "'x' in line 2 of column 'acc' is not a number"),
        ("model,run,acc\na,0,1\n", {"arm": "modle"}, "no column 'modle'. Did you mean 'model'?"),
        ("model,run,acc\na,0,1\n", {"seed": ""}, "no column ''. Columns: model; run; acc."),
        ("model,run,acc,f1\na,0,0.9x,1\n", {"metric": "ac"}, "no column 'ac'. Did you mean 'acc'? Columns: f1; "),
        ("model,run,acc\na,0,1\n", {"baseline": "b"}, "no arm 'b'. Arms: a."),
        ("model,run,acc\n,0,1\n", {}, "no 'model' in line 2"),
        ("model,run,acc\na,,1\n", {}, "no 'run' in line 2"),
        ("model,run,acc\n", {}, "has no rows"),
        ("", {}, "cannot be read as csv"),
    ],
)
def test_bad_table_is_refused_with_sentence(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    file = tmp_path / "r.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        notes_of(file, **options)
    assert message in str(error.value) and str(file) in str(error.value)
    with pytest.raises(UserError, match="a table is one of"):
        notes_of(tmp_path / "r.pkl")
    with pytest.raises(UserError, match="does not exist"):
        notes_of(tmp_path / "none.csv")


@pytest.mark.parametrize("seeds", [[0, 1, "inf"], [0, 1, 1e30], [[0], [1], [2]], ["a", "b", "c"]])
def test_seeds_of_any_kind_pair_the_arms(tmp_path: Path, seeds: list[Any]) -> None:
    rows = [{"model": arm, "run": seed, "acc": base + 0.01 * i} for arm, base in (("a", 0.9), ("b", 0.8))
            for i, seed in enumerate(seeds)]  # fmt: skip
    file = tmp_path / "r.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arms = judge(file, metric="acc", arm="model", seed="run").report.to_json()["arms"]
    assert [row["pairs"] for row in arms if row["arm"] == "b"] == [3]


@pytest.mark.parametrize("option", ["--margin", "--alpha"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_number_that_is_not_finite_is_refused(tmp_path: Path, option: str, value: str) -> None:
    file = table(tmp_path / "r.csv", long({"a": BASE, "b": BASE[::-1]}))
    words = [str(file), "--arm", "model", "--seed", "run", "--metric", "acc", option, value]
    done = CliRunner().invoke(command, words)
    assert isinstance(done.exception, UserError) and f"{option} {value}" in str(done.exception)


@pytest.mark.parametrize(
    ("column", "title"),
    [
        ("acc", "acc (%)"),
        ("test_acc", "test_acc (%)"),
        ("eval/top1", "eval/top1 (%)"),
        ("Top-1 acc (%)", "Top-1 acc (%)"),
        ("params", "metric/params"),
    ],
)
def test_report_names_the_metric_as_the_table_does(tmp_path: Path, column: str, title: str) -> None:
    """A table does not say which split a column is of, so that the report names none."""
    scale = 100 if "%" in column else 1
    arms = {"a": [scale * value for value in BASE], "b": [scale * (value - 0.02) for value in BASE[::-1]]}
    rows = [{column if name == "acc" else name: value for name, value in row.items()} for row in long(arms)]
    text = judge(table(tmp_path / "r.csv", rows), metric=column, arm="model", seed="run").render("md")
    assert f"| {title} ± sd |" in text and not re.search(r"\bval\b", text)
    shown = "metric/params" if column == "params" else column
    assert f"\n{shown}: {'lower' if column == 'params' else 'higher'} is better." in text


def test_help_has_examples_a_line_each() -> None:
    text = CliRunner().invoke(command, ["--help"]).stdout
    assert "  vitlab judge results.csv --arm model --seed seed --metric acc\n" in text
