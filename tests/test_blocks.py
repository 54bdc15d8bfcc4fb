"""Tests of blocks and controls: plans, verdicts over blocks, reports, and tables of other programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

import vitlab
from vitlab import lab
from vitlab.comparison import Verdict
from vitlab.comparison.arrays import VERDICTS, Comparisons
from vitlab.comparison.blocks import judge_blocks
from vitlab.errors import UserError
from vitlab.planning.values import Plan
from vitlab.report.report import Report

# Trials of a vaccine (Colditz et al. 1994): ill and healthy with it, ill and healthy without.
VACCINE = np.array(
    [
        *([4, 119, 11, 128], [6, 300, 29, 274], [3, 228, 11, 209], [62, 13536, 248, 12619], [33, 5036, 47, 5761]),
        *([180, 1361, 372, 1079], [8, 2537, 10, 619], [505, 87886, 499, 87892], [29, 7470, 45, 7232]),
        *([17, 1699, 65, 1600], [186, 50448, 141, 27197], [5, 2493, 3, 2338], [27, 16886, 29, 17825]),
    ],
    dtype=float,
)
STUDY: dict[str, Any] = {
    "study": "in-blocks",
    "question": "Does the position matter?",
    "base": {
        "data": "digits",
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 3, "batch_size": 16, "evaluations": 1},
    },
    "design": {"one_at_a_time": {"model.position": ["none", "sincos2d"]}},
    "blocks": {"base.data": ["digits", {"type": "synthetic", "image_size": 8}], "model.patch_size": [2, 4]},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": "none"},
}


def file_of(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    study = {name: value for name, value in {**STUDY, **changes}.items() if value is not None}
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return folder / "study.yaml"


def plan_of(folder: Path, **changes: Any) -> Plan:
    return lab.plan_study(file_of(folder, **changes), out=folder)[1]


def mistakes_of(folder: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        plan_of(folder, **changes)
    return str(error.value)


def over(differences: Any, se: Any = 0.0, **design: Any) -> Any:
    """Judge arms (C, B), the errors of which are given or 0."""
    d_CB = np.atleast_2d(np.asarray(differences, dtype=float))
    c = len(d_CB)
    whole = Comparisons(1 + np.arange(c), np.zeros(c, int), np.full(c, c), **{"variance": "own", **design})
    return judge_blocks(d_CB[None], np.broadcast_to(np.asarray(se, dtype=float), d_CB.shape)[None], whole)


def hartung_knapp(y: Any, v: Any, weights: Any) -> tuple[float, float]:
    """Return the estimate and its standard error, by Hartung and Knapp's formula for given weights."""
    mean = float((weights * y).sum() / weights.sum())
    return mean, math.sqrt(float((weights * (y - mean) ** 2).sum() / ((len(y) - 1) * weights.sum())))


# -- the method -------------------------------------------------------------------------------------------------------


def test_interval_equals_hartung_knapp_with_equal_weights() -> None:
    ill, well, others_ill, others_well = VACCINE.T
    y = np.log(ill / (ill + well)) - np.log(others_ill / (others_ill + others_well))
    v = 1 / ill - 1 / (ill + well) + 1 / others_ill - 1 / (others_ill + others_well)
    # The formula is right: with DerSimonian and Laird's weights it gives the mean that R's metafor prints.
    w = 1 / v
    q = float((w * (y - (w * y).sum() / w.sum()) ** 2).sum())
    tau2 = (q - (len(y) - 1)) / float(w.sum() - (w**2).sum() / w.sum())
    assert (round(q, 3), round(tau2, 4)) == (152.233, 0.3088)
    assert round(hartung_knapp(y, v, 1 / (v + tau2))[0], 4) == -0.7141
    mean, se = hartung_knapp(y, v, np.ones_like(y))
    half = stats.t.ppf(0.975, len(y) - 1) * se
    result = over(y, np.sqrt(v)).contrasts.single(0, 0)
    assert (result.difference, result.se, result.df) == pytest.approx((mean, se, 12))
    assert (result.low, result.high) == pytest.approx((mean - half, mean + half))
    assert result.p == pytest.approx(stats.ttest_1samp(y, 0).pvalue)
    new = judge_blocks(y[None, None], np.sqrt(v)[None, None], Comparisons.all_with_first(1))
    spread = y.std(ddof=1) * math.sqrt(1 + 1 / len(y)) * stats.t.ppf(0.975, len(y) - 1)
    assert (new.new_low[0, 0], new.new_high[0, 0]) == pytest.approx((mean - spread, mean + spread))


def test_error_is_at_least_what_seeds_leave_open() -> None:
    se = np.array([0.3, 0.4, 1.2])
    result = over([1.0, 1.01, 0.99], se).contrasts.single(0, 0)
    assert result.se == pytest.approx(math.sqrt((se**2).sum()) / 3)
    assert result.df == 2  # no more than blocks give, although seeds are more
    unknown = over([1.0, 2.0, 0.5], [math.nan, 0.1, 0.1]).contrasts.single(0, 0)
    assert unknown.se == pytest.approx(np.std([1.0, 2.0, 0.5], ddof=1) / math.sqrt(3))


def test_family_is_the_arms_and_never_the_blocks() -> None:
    y = np.array([[0.5, 0.7, 0.4, 0.9, 0.6], [0.1, -0.2, 0.3, 0.1, -0.1]])
    result = over(y, share=1.0).contrasts
    assert result.p_corrected[0] == pytest.approx(np.minimum(1, 2 * stats.ttest_1samp(y, 0, axis=1).pvalue))


def test_few_and_missing_blocks() -> None:
    y = [[0.5, 0.6, math.nan], [0.5, math.nan, math.nan], [math.nan] * 3]
    result = over(y)
    assert result.contrasts.pairs[0].tolist() == [2, 1, 0]
    assert np.isnan(result.contrasts.low).all() and np.isnan(result.new_low).all()
    assert result.contrasts.p[0, 0] == pytest.approx(stats.ttest_1samp([0.5, 0.6], 0).pvalue)
    assert np.isnan(result.contrasts.p[0, 1:]).all()
    assert [VERDICTS[place] for place in result.verdict[0]] == [Verdict.CANNOT_TELL] * 3


@pytest.mark.parametrize(("between", "apart"), [(0.0, 1.0), (2.0, 1.0), (0.5, 10.0)])
def test_false_alarms_intervals_and_predictions_hold(between: float, apart: float) -> None:
    draws, studies, arms, blocks, n = np.random.default_rng(3), 4000, 3, 5, 4
    effects = between * draws.standard_normal((studies, arms, blocks + 1))
    sd = apart ** draws.random((studies, 1, blocks + 1))
    seeds = draws.standard_normal((studies, arms + 1, blocks + 1, n)) * sd[..., None]
    d = (seeds[:, 1:] - seeds[:, :1]).transpose(3, 0, 1, 2) + effects
    mean, se = d.mean(axis=0), d.std(axis=0, ddof=1) / math.sqrt(n)
    result = judge_blocks(mean[..., :blocks], se[..., :blocks], Comparisons.all_with_first(arms))
    error = math.sqrt(0.05 * 0.95 / studies)
    assert (result.verdict >= VERDICTS.index(Verdict.BETTER)).any(axis=1).mean() <= 0.05 + 3 * error
    new, known = mean[:, 0, blocks], np.isfinite(result.new_low[:, 0])
    missed = (new < result.new_low[:, 0]) | (result.new_high[:, 0] < new)
    assert known.all() and missed.mean() <= 0.05 + 3 * error


# -- plans ------------------------------------------------------------------------------------------------------------


def test_every_arm_is_planned_in_every_block_as_if_it_were_alone(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "blocks")
    arms = ("baseline", "position=none", "position=sincos2d")
    blocks = ("digits, patch_size=2", "synthetic(image_size=8), patch_size=4")
    assert [arm.name for arm in plan.arms] == [f"{block}: {arm}" for block in blocks for arm in arms]
    assert {(arm.block, arm.name_in_block) for arm in plan.arms} == {(block, arm) for block in blocks for arm in arms}
    for arm in plan.arms:
        assert arm.baseline == (None if arm.name_in_block == "baseline" else f"{arm.block}: baseline")
    base = {**STUDY["base"], "data": STUDY["blocks"]["base.data"][1]}
    alone = plan_of(tmp_path / "alone", blocks=None, base=base)
    assert [item.trial.key for item in plan.trials[6:]] == [item.trial.key for item in alone.trials]
    assert plan == Plan.from_json(json.loads(json.dumps(plan.to_json())))


def test_blocks_may_have_labels_and_any_path(tmp_path: Path) -> None:
    blocks = {"labels": ["small", "large"], "model.dim": [8, 16]}
    plan = plan_of(tmp_path, blocks=blocks, design={"arms": {"plain": {}, "bare": {"model.position": "none"}}})
    assert [arm.name for arm in plan.arms] == ["small: plain", "small: bare", "large: plain", "large: bare"]
    assert plan.find("large: bare", 0).trial.spec.model.options["dim"] == 16


def test_mistakes_of_blocks(tmp_path: Path) -> None:
    assert "the design sets model.position, too" in mistakes_of(tmp_path, blocks={"model.position": ["none"]})
    assert "two blocks are called 'digits'" in mistakes_of(tmp_path, blocks={"data": ["digits", {"type": "digits"}]})
    assert "a study with blocks" not in mistakes_of(tmp_path, blocks={"data": ["digits"], "model.dim": [8, 16]})
    assert "rows need one value of each" in mistakes_of(tmp_path, blocks={"data": ["digits"], "model.dim": [8, 16]})
    text = mistakes_of(tmp_path, seeds={"count": 2, "escalate_to": 4})
    assert "escalate_to" in text and "give their number by count" in text
    assert "val/loss is no share" in mistakes_of(tmp_path, analysis={"metric": "val/loss"})
    assert "there are no blocks" in mistakes_of(tmp_path, blocks=None, analysis={"over_blocks": "relative"})
    relative = plan_of(tmp_path, analysis={"metric": "val/loss", "over_blocks": "relative"})
    assert relative.analysis.over_blocks == "relative"
    text = mistakes_of(tmp_path, blocks={"data": ["digits", "digit"], "model.dim": [8, 9]})
    assert "Did you mean 'digits'?" in text and "study.yaml" in text


def test_controls_equal_the_base_but_for_their_seeds(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, controls=2)
    names = [arm.name_in_block for arm in plan.arms[:5]]
    assert names == ["baseline", "position=none", "position=sincos2d", "control", "control 2"]
    control, base = (plan.find(f"digits, patch_size=2: {name}", 1).trial for name in ("control", "baseline"))
    assert control.spec == base.spec and control.key != base.key
    assert {control.seeds[stream] for stream in ("init", "order")} == {2_000_001} and control.seeds["split"] == 0
    assert plan.arm("digits, patch_size=2: control").baseline == "digits, patch_size=2: baseline"
    alone = plan_of(tmp_path, controls=1, design=None, blocks=None)
    assert [(arm.name, arm.baseline) for arm in alone.arms] == [("baseline", None), ("control", "baseline")]
    taken = {"arms": {"baseline": {}, "control": {"model.position": "none"}}}
    assert "two different arms are called 'control'" in mistakes_of(tmp_path, controls=1, design=taken, blocks=None)
    tuned = {"knobs": {"train.optimizer.lr": [1e-3, 1e-2]}, "seeds": 1}
    plan = plan_of(tmp_path, controls=1, blocks=None, tune=tuned)
    assert [tuning.arm for tuning in plan.tuning] == ["baseline", "position=none", "position=sincos2d"]


# -- reports ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_study_in_blocks_is_run_and_reported(tmp_path: Path, no_figures: None) -> None:
    answer = vitlab.run(file_of(tmp_path, controls=1), out=tmp_path)
    assert answer.trained == 16 and not answer.failed
    comparison = answer.compare()
    warning, *over_blocks = comparison.answers
    assert warning.startswith("Not shown to be better than chance: ")
    assert [sentence.split(", ")[1].split(" is ")[0] for sentence in over_blocks] == [
        *("position=none", "position=sincos2d"),
        "control",
    ]
    assert "two blocks give no useful interval" in over_blocks[0]
    stored = Report.from_json(json.loads((answer.folder / "report" / "report.json").read_text()))
    rows = {row.arm: row for row in stored.sections["blocks"]}
    assert (rows["position=none"].family, rows["control"].family) == (2, 1)
    frame = comparison.set_index("arm")
    assert frame["family"].dropna().tolist() == [4, 4, 1, 4, 4, 1]
    expected = [frame.loc[f"{block}: position=none", "difference"] for block in rows["position=none"].differences]
    assert list(rows["position=none"].differences.values()) == pytest.approx(expected)
    assert sum(note.startswith("Control: ") for note in stored.notes) == 2
    assert any(note.startswith("There are two families") for note in stored.notes)
    page = (answer.folder / "report" / "report.html").read_text()
    assert "Over blocks" in page and "over 2 blocks" in page


def test_arms_and_blocks_dropped_after_the_first_run_still_count(tmp_path: Path) -> None:
    """Without arm b, the verdict on arm a is corrected for both; without a data set, it is exploratory."""
    from synthetic_studies import study

    from vitlab.planning.registration import make_registration
    from vitlab.planning.values import Arm
    from vitlab.report.comparison import summary_rows
    from vitlab.report.frame import StudyResults
    from vitlab.report.sections.blocks import compare_over_blocks

    draws, registered = np.random.default_rng(0), None
    found: list[Any] = []
    for names, blocks in (("ab", "123"), ("a", "123"), ("ab", "12")):
        arms = [
            Arm(f"set{block}: {name}", {}, f"set{block}: base" if name != "base" else None, block=f"set{block}")
            for block in blocks
            for name in ("base", *names)
        ]
        values = {arm.name: draws.normal(0.9, 0.01, 3).tolist() for arm in arms}
        folder = tmp_path / str(len(found))
        plan, store = study(folder, values, planned_arms=tuple(arms), registered=registered)
        registered = registered or make_registration(plan)
        found.append(compare_over_blocks(plan, summary_rows(StudyResults.read(plan, store))))
    assert [[(row.arm, row.family, row.remark) for row in rows] for rows in found] == [
        [("a", 2, ""), ("b", 2, "")],
        [("a", 2, "")],
        [("a", 2, "exploratory"), ("b", 2, "exploratory")],
    ]


def test_control_changes_no_other_verdict(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    values = {arm: draws.normal(0.9, 0.01, 5) for arm in ("baseline", "a", "b", "control")}
    from synthetic_studies import arms_table, study

    from vitlab.planning.values import Arm
    from vitlab.report.frame import StudyResults

    rows = {}
    for names in (("baseline", "a", "b"), ("baseline", "a", "b", "control")):
        arms = [
            Arm(name, {}, "baseline" if name != "baseline" else None, is_control=name == "control") for name in names
        ]
        plan, store = study(
            tmp_path / str(len(names)), {name: values[name].tolist() for name in names}, planned_arms=tuple(arms)
        )
        rows[len(names)] = arms_table(StudyResults.read(plan, store))
    for column in ("p_corrected", "difference_low", "difference_high", "family", "shared"):
        assert rows[3].loc[["a", "b"], column].tolist() == rows[4].loc[["a", "b"], column].tolist()
    assert rows[4].loc["control", "family"] == 1


# -- tables of other programs -----------------------------------------------------------------------------------------


def table(arms: dict[str, float], blocks: int = 4, seeds: int = 4, scale: float = 1.0) -> pd.DataFrame:
    draws, rows = np.random.default_rng(5), []
    for block in range(blocks):
        level = draws.uniform(0.6, 0.9)
        for arm, effect in arms.items():
            apart = effect * draws.uniform(0.5, 1.5)
            for seed in range(seeds):  # other seeds in each block
                value = scale * (level + apart + draws.normal(0, 0.004))
                rows.append({"data": f"set{block}", "model": arm, "seed": seed + 10 * block, "acc": value})
    return pd.DataFrame(rows)


def judged(frame: pd.DataFrame, **options: Any) -> Any:
    named = {"metric": "acc", "arm": "model", "seed": "seed", "block": "data", "baseline": "base", **options}
    return vitlab.judge(frame, **named)


def test_judge_over_blocks_equals_t_over_block_means() -> None:
    frame = table({"base": 0.0, "worse": -0.08, "near": 0.002})
    judgement = judged(frame)
    rows = {row.arm: row for row in judgement.report.sections["blocks"]}
    means = frame.groupby(["model", "data"])["acc"].mean().unstack("model")
    d = means["worse"] - means["base"]
    assert list(rows["worse"].differences.values()) == pytest.approx(d.tolist())
    assert rows["worse"].difference == pytest.approx(d.mean())
    assert (rows["worse"].ahead, rows["worse"].behind, rows["worse"].verdict) == (0, 4, "worse")
    assert rows["near"].verdict == "cannot tell"
    assert judgement.answers[0].startswith("Over 4 blocks, worse is ")
    alone = [row["verdict"] for row in judgement.report.arms if row["arm"].endswith(": worse")]
    assert judgement.answers[0].endswith(f" In single blocks: {alone.count('worse')} worse.") and "worse" in alone
    own = judged(frame[frame["model"] != "near"]).report.sections["blocks"][0]
    assert own.p == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
    assert len(judgement) == 12
    wide = frame.pivot(index=["data", "seed"], columns="model", values="acc").reset_index()
    assert {row.arm: row for row in judged(wide, arm=None).report.sections["blocks"]} == rows
    text = judgement.render("md")
    assert "## Over blocks" in text and "set2: worse" in text
    assert b"Over blocks" in judgement.render("latex-all").encode()


def test_differences_relative_to_the_error_of_the_baseline() -> None:
    frame = table({"base": 0.0, "worse": -0.05})
    means = frame.groupby(["model", "data"])["acc"].mean().unstack("model")
    expected = (means["worse"] - means["base"]) / (1 - means["base"])
    row = judged(frame, over_blocks="relative").report.sections["blocks"][0]
    assert list(row.differences.values()) == pytest.approx(expected.tolist())
    percent = judged(frame.assign(acc=100 * frame["acc"]), over_blocks="relative").report.sections["blocks"][0]
    assert list(percent.differences.values()) == pytest.approx(expected.tolist())
    loss = frame.assign(loss=1 - frame["acc"]).drop(columns="acc")
    row = judged(loss, metric="loss", over_blocks="relative").report.sections["blocks"][0]
    assert list(row.differences.values()) == pytest.approx((-expected).tolist()) and row.verdict == "worse"
    with pytest.raises(UserError, match="loss is no share"):
        judged(loss, metric="loss")
    with pytest.raises(UserError, match="nobody knows which psnr has no error"):
        judged(frame.rename(columns={"acc": "psnr"}), metric="psnr", over_blocks="relative")
    perfect = frame.assign(acc=frame["acc"].where(frame["model"] != "base", 1.0))
    row = judged(perfect, over_blocks="relative").report.sections["blocks"][0]
    assert row.difference is None and row.verdict == "refused"


def test_means_over_unlike_differences_are_refused() -> None:
    frame = table({"base": 0.0, "other": 0.0, "arm": 0.02})
    is_first, is_arm = frame["data"] == "set0", frame["model"] == "arm"
    frame["against"] = is_arm.map({True: "base", False: ""}).where(~(is_arm & is_first), "other")
    answers = judged(frame, baseline=None, baselines="against").report.answers
    assert answers[0].startswith("refused: it is compared with other and base in different blocks: over 4 blocks, arm ")
    perfect = frame.assign(acc=frame["acc"].where(~(is_first & (frame["model"] == "base")), 1.0))
    answers = judged(perfect, over_blocks="relative").report.answers
    reason = "its baseline has no error in set0 that a difference could be divided by"
    assert len(answers) == 2 and all(text.startswith(f"refused: {reason}: over 3 blocks, ") for text in answers)


def test_missing_arms_blocks_and_seeds_are_said() -> None:
    frame = table({"base": 0.0, "worse": -0.05, "near": 0.0})
    incomplete = frame[~((frame["model"] == "near") & (frame["data"] == "set1"))]
    judgement = judged(incomplete)
    assert (
        "Warning: near has no difference from base in set1, and is judged over the 3 other blocks." in judgement.notes
    )
    assert "over 3 blocks, near" in judgement.answers[1]
    without = judged(frame[~((frame["model"] == "base") & (frame["data"] == "set0"))])
    assert "Warning: nothing is compared in 'set0', which has no 'base'." in without.notes
    two = judged(frame[frame["data"].isin(["set0", "set1"])])
    assert "two blocks give no useful interval" in two.answers[0]
    one = judged(frame[frame["data"] == "set0"])
    assert "one block has no spread" in one.answers[0]
    lost = frame.assign(acc=frame["acc"].where(~((frame["model"] == "worse") & (frame["seed"] == 2))))
    assert "lost seeds may change this" in judged(lost).answers[0]
    known = judged(lost, chance=0.1).report.sections["blocks"][0]
    assert known.verdict in ("worse", "cannot tell") and known.pairs == 4


def test_mistakes_of_tables_with_blocks_come_together() -> None:
    frame = table({"base": 0.0, "worse": -0.05})
    with pytest.raises(UserError) as error:
        judged(frame, block="dat", looks=[2, 4], over_blocks="relativ")
    for part in (
        "no column 'dat'. Did you mean 'data'?",
        "looks: with block",
        "over_blocks relativ: allowed: difference, relative",
    ):
        assert part in str(error.value)
    with pytest.raises(UserError, match="no 'data' in row 3"):
        judged(frame.assign(data=frame["data"].where(frame.index != 2, "")))
    with pytest.raises(UserError, match="no arm 'set0: bass'"):
        judged(frame, baseline="bass")
    with pytest.raises(UserError, match="or compare within each data by block"):
        judged(frame.assign(seed=frame["seed"] % 10), block=None)


def test_baselines_of_a_column_are_those_of_the_block() -> None:
    frame = table({"base": 0.0, "worse": -0.05})
    named = frame.assign(against=np.where(frame["model"] == "worse", "base", ""))
    rows = judged(named, baseline=None, baselines="against").report.sections["blocks"]
    assert [(row.arm, row.baseline, row.pairs) for row in rows] == [("worse", "base", 4)]
