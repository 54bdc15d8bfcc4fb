"""Tests of escalation: cost of two stages, and which arms get more seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_studies
import yaml
from scipy import stats

import vitlab
from vitlab import lab
from vitlab.comparison.study import refusals_by_arm
from vitlab.errors import SpecError
from vitlab.planning.registration import describe_analysis_changes, make_registration, with_first_registration
from vitlab.planning.values import Arm, Looks, Plan
from vitlab.report.comparison import arms_to_continue
from vitlab.spec import Analysis, Study
from vitlab.store.folders import Store

pytestmark = pytest.mark.usefixtures("no_figures")
FIRST, SECOND = tuple(range(5)), tuple(range(10))
SHARES = (0.25, 0.8)


def study(folder: Path, seeds: Any, **changes: Any) -> Path:
    """Return a tiny study: an arm equal to the baseline, because nothing is clipped, and one that differs."""
    content = {
        "study": "tiny",
        "base": {
            "data": {"type": "digits"},
            "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
            "train": {"steps": 6, "batch_size": 16, "evaluations": 1},
        },
        "design": {
            "arms": {
                "baseline": {},
                "same": {"train.clip_grad": 1.0e6},
                "other": {"train.optimizer": {"type": "adamw", "lr": 0.1}},
            }
        },
        "seeds": seeds,
        "analysis": {"alpha": 1.0e-6},
        "run": {"executor": "inline", "tracker": "none"},
        **changes,
    }
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


@pytest.fixture
def values() -> dict[str, dict[int, float]]:
    """Return ten seeds of three arms: far from the baseline, near it, and equal to it."""
    draws = np.random.default_rng(3)
    means = {"baseline": 0.8, "far": 0.5, "near": 0.83, "level": 0.8}
    return {arm: dict(enumerate(mean + draws.normal(0, 0.02, 10))) for arm, mean in means.items()}


def judge_values(
    values: dict[str, dict[int, float]], open_: tuple[str, ...], waiting: int = 0
) -> dict[str, dict[str, Any]]:
    compared = {arm: "baseline" for arm in values if arm != "baseline"}
    plan = Plan("s", "", tuple(Arm(arm, {}, compared.get(arm)) for arm in values), (), Analysis(variance="own"))
    plan = Plan(**{**vars(plan), "looks": Looks((FIRST, SECOND), SHARES, (open_,) if open_ else ())})
    return synthetic_studies.judged_rows(plan, values, waiting)


def test_each_stage_spends_its_share_of_alpha_on_whole_family(values):
    rows = judge_values(values, ("near", "level"))
    base = values["baseline"]

    def p(arm: str, seeds: tuple[int, ...]) -> float:
        return float(stats.ttest_rel([values[arm][s] for s in seeds], [base[s] for s in seeds]).pvalue)

    assert rows["far"]["p_corrected"] == pytest.approx(3 * p("far", FIRST) / 0.25)
    assert rows["near"]["p_corrected"] == pytest.approx(min(1, 3 * p("near", SECOND) / 0.8))
    assert rows["level"]["p_corrected"] == pytest.approx(min(1, 3 * p("level", SECOND) / 0.8))
    assert [(rows[arm]["look"], rows[arm]["pairs"]) for arm in rows] == [(1, 5), (2, 10), (2, 10)]
    levels = tuple(0.05 * share / 3 for share in (0.25, 0.8))
    waiting = judge_values(values, (), waiting=1)
    for look, (arm, seeds) in enumerate((("far", FIRST), ("near", SECOND))):
        d = [values[arm][seed] - base[seed] for seed in seeds]
        low, high = stats.t.interval(1 - levels[look], len(d) - 1, np.mean(d), stats.sem(d))
        ended = tuple(rows[arm][name] for name in ("difference", "difference_low", "difference_high"))
        assert ended == pytest.approx((np.mean(d), low, high))
        d = [values[arm][seed] - base[seed] for seed in FIRST]
        low, high = stats.t.interval(1 - levels[0], len(d) - 1, np.mean(d), stats.sem(d))
        assert (waiting[arm]["difference_low"], waiting[arm]["difference_high"]) == pytest.approx((low, high))


def test_first_stage_is_reported_until_further_seeds_end(values):
    before, under_way = judge_values(values, ()), judge_values(values, ("near",), waiting=1)
    assert {arm: row["difference"] for arm, row in under_way.items()} == {
        arm: row["difference"] for arm, row in before.items()
    }
    assert under_way["near"]["look"] == 1 and under_way["near"]["awaited"] == 1


@pytest.mark.slow
def test_inconclusive_arms_get_more_seeds_and_decided_ones_do_not(tmp_path, monkeypatch):
    file, out = study(tmp_path, {"count": 2, "escalate_to": 4}), tmp_path / "out"
    plan = lab.run(file, out=out, only="baseline").plan
    assert (len(plan.trials), plan.looks.open) == (6, ()), "not before all have ended"
    answer = lab.run(file, out=out)
    seeds = {
        arm: [item.seed for item in answer.plan.trials if item.arm == arm] for arm in ("baseline", "same", "other")
    }
    assert seeds == {"baseline": [0, 1, 2, 3], "same": [0, 1], "other": [0, 1, 2, 3]}
    assert (answer.trained, answer.cached, answer.failed) == (8, 2, 0)
    assert answer.results()["status"].eq("done").all()
    plan_data = json.loads((answer.folder / "plan.json").read_text())
    assert (plan_data["looks"]["seeds"], plan_data["looks"]["open"]) == ([[0, 1], [0, 1, 2, 3]], [["other"]])
    assert [size for size, _ in plan_data["registered"]["looks"]] == [2, 4] and plan_data["registered"]["seeds"] == [
        0,
        1,
    ]

    report = (answer.folder / "report" / "report.md").read_text()
    assert "2 looks share alpha, at 2 and 4 seeds" in report and "Look 1 left other inconclusive" in report
    assert "xploratory" not in report and "reliminary" not in report and "a value in one of the two alone" not in report
    table = vitlab.compare(file, out=out).set_index("arm")
    assert table.loc["other", ["look", "pairs"]].tolist() == [2, 4]
    assert table.loc["same", ["look", "pairs"]].tolist() == [1, 2]

    again = lab.run(file, out=out)
    assert (again.trained, again.cached) == (0, 10) and again.plan.looks == answer.plan.looks
    provenance = json.loads((again.folder / "report" / "report.json").read_text())["made"]
    assert provenance["trained"] == again.cached


def test_escalation_added_later_is_exploratory(tmp_path):
    _, before = lab.plan_study(study(tmp_path, 2), out=tmp_path)
    _, after = lab.plan_study(study(tmp_path, {"count": 2, "escalate_to": 3}), out=tmp_path)
    earlier = replace(before, registered=make_registration(before))
    assert describe_analysis_changes(with_first_registration(after, earlier, lambda trial: True)) == [
        "the results were to be judged once, and are judged at 2 and 3 seeds"
    ]
    assert describe_analysis_changes(with_first_registration(after, earlier, lambda trial: False)) == []


def test_invalid_seed_counts_are_refused_with_place(tmp_path):
    def refusal(seeds: Any, **changes: Any) -> str:
        with pytest.raises(SpecError) as caught:
            lab.plan_study(study(tmp_path, seeds, **changes), out=tmp_path)
        return str(caught.value)

    message = refusal({"count": 5, "escalate_to": 5})
    assert "more than the 5 of the first look" in message and "tiny.yaml" in message
    assert "compares nothing" in refusal({"count": 2, "escalate_to": 4}, analysis={"compare": "none"})
    assert "at most" in refusal({"count": 2, "escalate_to": 900_000})


def test_further_seeds_are_smallest_unused():
    base = {"data": "digits", "model": "vit", "train": {"steps": 1}}
    study = Study.model_validate({"study": "s", "base": base, "seeds": {"values": [7, 1], "escalate_to": 5}})
    assert study.seeds.all == (7, 1, 0, 2, 3)
    assert Study.model_validate({"study": "s", "base": base, "seeds": 3}).seeds.all == (0, 1, 2)


# -- inconclusive arms of synthetic studies ---------------------------------------------------------------------------

SEEDS = Looks(((0, 1, 2, 3), tuple(range(8))), (0.5, 0.5))
BASE, FAR, NEAR = [0.80, 0.81, 0.79, 0.80], [0.500, 0.511, 0.489, 0.501], [0.81, 0.80, 0.80, 0.82]


def registered_study(root: Path, arms: dict[str, list[float | None]], names: Sequence[str]) -> tuple[Plan, Store]:
    """Return a study of two stages whose first run had only some of its arms."""
    plan, store = synthetic_studies.study(root, arms, looks=SEEDS)
    few = replace(plan, arms=tuple(arm for arm in plan.arms if arm.name in names))
    return replace(plan, registered=make_registration(few)), store


def test_escalation_waits_for_all_registered_trials(tmp_path):
    arms = {"baseline": BASE, "far": FAR, "near": NEAR}
    assert arms_to_continue(*registered_study(tmp_path / "a", arms, list(arms))) == ("near",)
    assert arms_to_continue(*registered_study(tmp_path / "b", {**arms, "far": [*FAR[:3], None]}, list(arms))) == ()


def test_escalated_arm_stays_escalated_after_changes(tmp_path):
    arms = {"baseline": BASE, "far": FAR, "near": NEAR}
    added = registered_study(tmp_path / "a", {**arms, "new": [None] * 4}, list(arms))
    assert arms_to_continue(*added) == arms_to_continue(*added, before=("near",)) == ("near",)
    anew = registered_study(tmp_path / "b", {**arms, "far": [None] * 4}, list(arms))
    assert arms_to_continue(*anew) == () and arms_to_continue(*anew, before=("near",)) == ("near",)
    itself = registered_study(tmp_path / "c", {**arms, "near": [None] * 4}, list(arms))
    assert arms_to_continue(*itself, before=("near",)) == ()


def test_failed_trial_blocks_further_seeds_until_retried(tmp_path):
    plan, store = registered_study(tmp_path, {"baseline": BASE, "near": [*NEAR[:3], None]}, ["baseline", "near"])
    failed = plan.trials[-1].trial
    store.trial(failed.key, failed.code).write_failure("memory ran out", kind="oom")
    assert arms_to_continue(plan, store) == ()
    [notes] = [note for note in synthetic_studies.document(plan, store)["notes"] if note.startswith("2 looks")]
    assert (
        "near can get further seeds: first run 'vitlab run --retry-failed' to train the failed trials again." in notes
    )


def test_reported_stages_equal_data(tmp_path):
    def rendered(plan: Plan, store: Store) -> str:
        return next(note for note in synthetic_studies.document(plan, store)["notes"] if note.startswith("2 looks"))

    decided = registered_study(tmp_path / "a", {"baseline": BASE, "far": FAR}, ["baseline", "far"])
    assert rendered(*decided).endswith("The first look decided every comparison that can be judged.")
    undecided = registered_study(tmp_path / "b", {"baseline": BASE, "near": NEAR}, ["baseline", "near"])
    assert rendered(*undecided).endswith("near can get further seeds: run 'vitlab run' again.")


def test_comparison_is_refused_only_from_its_own_stage(tmp_path):
    """The baseline has more seeds for another arm, and so more teachers than an arm decided earlier."""
    plan, _ = synthetic_studies.study(tmp_path, {"baseline": [*BASE, *BASE], "far": FAR})
    taught = tuple(
        replace(
            item, trial=replace(item.trial, needs={"teacher": f"t{item.seed % 2 if item.seed < 4 else item.seed}/c"})
        )
        for item in plan.trials
    )
    plan = replace(plan, trials=taught, looks=SEEDS)
    assert refusals_by_arm(plan, SEEDS.seeds[0]) == {} and "far" in refusals_by_arm(plan)
    rows = synthetic_studies.judged_rows(plan, {"baseline": dict(enumerate(BASE)), "far": dict(enumerate(FAR))})
    assert rows["far"]["refused"] is None and rows["far"]["p_corrected"] < 0.05
