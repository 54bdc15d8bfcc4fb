"""Tests of analyses that are repeated while seeds are added: their levels, and studies that end when decided."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_studies
from scipy import stats
from test_escalation import study

import vitlab
from vitlab import lab
from vitlab.errors import SpecError
from vitlab.planning.registration import describe_analysis_changes, make_registration, with_first_registration
from vitlab.planning.values import Looks, Plan
from vitlab.report.comparison import looks_with_open_arms
from vitlab.report.frame import StudyResults
from vitlab.spec import Study
from vitlab.statistics.power import predictive_power, sequential_levels, t_test_power

pytestmark = pytest.mark.usefixtures("no_figures")
BY_THREE = (3, 6, 9, 12)


@pytest.mark.parametrize("sizes", [BY_THREE, (5, 10), tuple(range(3, 9)), (2, 3, 20)])
def test_levels_spend_alpha_as_announced(sizes: tuple[int, ...]) -> None:
    studies, alpha = 200_000, 0.05
    levels = sequential_levels(sizes, alpha, family=1)
    values = np.random.default_rng(5).standard_normal((studies, sizes[-1]))
    rejected = np.zeros(studies, bool)
    for size, level in zip(sizes, levels, strict=True):
        rejected |= stats.ttest_1samp(values[:, :size], 0, axis=1).pvalue <= level
        spent = alpha * (size / sizes[-1]) ** 2
        assert rejected.mean() == pytest.approx(spent, abs=4 * math.sqrt(spent / studies) + 0.01 * spent)


def test_levels_of_many_pairs_equal_normal_theory() -> None:
    """With many pairs t is normal, and the probability of no rejection is an integral over a normal distribution."""
    sizes, alpha = (1000, 2000, 3000), 0.05
    z = stats.norm.isf(np.array(sequential_levels(sizes, alpha, family=1)) / 2)
    n = np.array(sizes, dtype=float)
    covariance = np.sqrt(np.minimum.outer(n, n) / np.maximum.outer(n, n))
    inside = stats.multivariate_normal(cov=covariance, abseps=1e-7, releps=1e-7, maxpts=10**7).cdf(z, lower_limit=-z)
    assert 1 - inside == pytest.approx(alpha, rel=0.01)


def test_levels_of_family_leave_less_for_each_comparison() -> None:
    alone, many = sequential_levels(BY_THREE, 0.05, family=1), sequential_levels(BY_THREE, 0.05, 10)
    assert sequential_levels((7,), 0.05, 10) == (0.05,) and many[0] == pytest.approx(alone[0])
    assert sum(many) < sum(alone) and max(*alone, *many) <= 0.05 and sum(many) >= 0.05 * 0.999
    # The levels of one of ten comparisons are those of a single one at a tenth of alpha.
    assert many == pytest.approx([10 * level for level in sequential_levels(BY_THREE, 0.005, family=1)])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [tuple(range(2, 22)), tuple(range(3, 31, 9))])
def test_levels_of_many_comparisons_lie_between_bonferroni_and_one_comparison(sizes: tuple[int, ...]) -> None:
    """The deeper the tail, the less likely is a second rejection, so the nearer are levels to what is spent."""
    spent = np.diff([0.0, *(0.05 * (size / sizes[-1]) ** 2 for size in sizes)])
    levels = np.array([sequential_levels(sizes, 0.05, family) for family in (1, 20, 100_000)])
    assert (levels[1:] <= levels[:-1] * 1.05).all() and (levels >= spent * 0.999).all()
    assert (np.diff(levels, axis=1) > 0).all()


@pytest.mark.parametrize("margin", [None, 0.5])
def test_predictive_power_equals_simulated_futures(margin: float | None) -> None:
    draws, now, then, level = np.random.default_rng(2), 6, 20, 0.03
    x = draws.normal(0.3, 1.0, now)
    mean, sd = x.mean(), x.std(ddof=1)
    # A flat prior: the precision is gamma, the mean normal given it; the spread of later seeds is taken as known.
    true_sd = sd * np.sqrt((now - 1) / draws.chisquare(now - 1, 400_000))
    true_mean = draws.normal(mean, true_sd / math.sqrt(now))
    later = draws.normal(true_mean, true_sd / math.sqrt(then - now))
    final, se = (now * mean + (then - now) * later) / then, sd / math.sqrt(then)
    decided = np.abs(final) > stats.t.isf(level / 2, then - 1) * se
    if margin is not None:
        decided |= np.abs(final) < margin - stats.t.isf(level, then - 1) * se
    expected = predictive_power(mean, sd / math.sqrt(now), now - 1, (now, then), level, margin, overlap=0.0)
    assert expected == pytest.approx(decided.mean(), abs=0.004)


@pytest.mark.parametrize("effect", [0.0, 0.7, 1.0])
def test_interval_of_the_last_look_holds_and_its_mean_is_little_too_large(effect: float) -> None:
    """The interval of the look at which a comparison ends, at that look's level, and the bias that reports state."""
    sizes, studies = (3, 6, 12), 4000
    values = np.random.default_rng(4).standard_normal((studies, sizes[-1])) + effect
    running, covered, means = np.ones(studies, bool), np.zeros(studies, bool), np.zeros(studies)
    for size, level in zip(sizes, sequential_levels(sizes, family=1, alpha=0.05), strict=True):
        mean, se = values[:, :size].mean(axis=1), stats.sem(values[:, :size], axis=1)
        reach = stats.t.isf(level / 2, size - 1) * se
        ends = running & ((np.abs(mean) > reach) | (size == sizes[-1]))
        covered[ends] = (np.abs(mean - effect) <= reach)[ends]
        means[ends] = mean[ends]
        running &= ~ends
    assert covered.mean() >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)
    assert abs(means.mean() - effect) < 0.12 * effect + 0.02


def test_seeds_until_decided_have_their_forms() -> None:
    def seeds(value: Any) -> Any:
        base = {"data": "digits", "model": "vit", "train": {"steps": 1}}
        return Study.model_validate({"study": "s", "base": base, "seeds": value}).seeds

    sizes = [len(some) for some in seeds({"until": "decided", "at_least": 3, "at_most": 10}).looks]
    assert sizes == [3, 6, 9, 10]
    listed = seeds({"until": "decided", "values": [7, 1], "at_most": 5, "every": 1})
    assert listed.looks == ((7, 1), (7, 1, 0), (7, 1, 0, 2), (7, 1, 0, 2, 3))
    assert [len(some) for some in seeds({"count": 5, "escalate_to": 10}).looks] == [5, 10]
    assert seeds(4).looks == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ({"until": "decided", "at_least": 3}, "until: decided needs at_most"),
        ({"until": "decided", "at_least": 3, "at_most": 3}, "more than the 3 of the first look"),
        ({"until": "decided", "at_least": 1, "at_most": 9}, "at least 2 seeds at first"),
        ({"until": "decided", "count": 2, "at_least": 3, "at_most": 9}, "give one of count, at_least and values"),
        ({"until": "decided", "count": 2, "escalate_to": 4, "at_most": 9}, "two ways to add seeds"),
        ({"until": "decided", "at_least": 2, "at_most": 900_000, "every": 1}, "at most 20 looks"),
        ({"until": "certain", "at_least": 2, "at_most": 9}, "allowed: decided"),
        ({"count": 3, "at_most": 9}, "at_most needs until: decided"),
        ({"at_least": 3}, "at_least needs until: decided"),
        ({"count": 1, "escalate_to": 5}, "at least 2 seeds at first"),
        (
            {"until": "decided", "at_least": 2, "at_most": 9, "every": 0},
            "seeds.every must be greater than or equal to 1",
        ),
    ],
)
def test_seeds_until_decided_are_refused_with_place(tmp_path: Path, seeds: Any, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        lab.plan_study(study(tmp_path, seeds), out=tmp_path)
    assert words in str(caught.value) and "tiny.yaml:" in str(caught.value)


@pytest.mark.slow
def test_study_adds_seeds_until_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.planning.expand.FUTILITY", 1e-9)  # nothing is given up
    file = study(tmp_path, {"until": "decided", "at_least": 2, "at_most": 4, "every": 1})
    answer = lab.run(file, out=tmp_path / "out")
    seeds = {
        arm: [item.seed for item in answer.plan.trials if item.arm == arm] for arm in ("baseline", "same", "other")
    }
    assert seeds == {"baseline": [0, 1, 2, 3], "same": [0, 1], "other": [0, 1, 2, 3]}
    assert answer.plan.looks is not None and answer.plan.looks.open == (("other",), ("other",))
    assert answer.trained == 10
    data = json.loads((answer.folder / "plan.json").read_text())
    assert [size for size, _ in data["registered"]["looks"]] == [2, 3, 4]
    table = vitlab.compare(file, out=tmp_path / "out").set_index("arm")
    assert table.loc["other", ["look", "looks", "pairs"]].tolist() == [3, 3, 4]
    report = (answer.folder / "report" / "report.md").read_text()
    assert "3 looks share alpha, at 2, 3 and 4 seeds" in report and "Look 2 left other inconclusive" in report
    assert "xploratory" not in report and "reliminary" not in report
    again = lab.run(file, out=tmp_path / "out")
    assert (again.trained, again.cached) == (0, 10) and again.plan.looks == answer.plan.looks


# -- synthetic studies ------------------------------------------------------------------------------------------------

LOOKS = Looks((tuple(range(4)), tuple(range(8)), tuple(range(12))), (0.1, 0.4, 0.7), futility=0.1)
BASE, FAR = [0.80, 0.81, 0.79, 0.80] * 3, [0.500, 0.511, 0.489, 0.501] * 3
NEAR = [0.82, 0.80, 0.81, 0.83] * 3
LEVEL = [0.80, 0.812, 0.788, 0.799] * 3


def looks_of(root: Path, arms: dict[str, list[float]], seeds: int) -> Looks:
    plan, store = synthetic_studies.study(root, {arm: values[:seeds] for arm, values in arms.items()}, looks=LOOKS)
    looks = looks_with_open_arms(Plan(**{**vars(plan), "registered": make_registration(plan)}), store)
    assert looks is not None
    return looks


def test_futile_comparison_gets_no_more_seeds(tmp_path: Path) -> None:
    arms = {"baseline": BASE, "far": FAR, "near": NEAR, "level": LEVEL}
    assert looks_of(tmp_path / "a", arms, 4).open == (("near", "level"),)
    assert looks_of(tmp_path / "b", arms, 8).open == (("near", "level"), ("near",))


def test_look_waits_until_its_seeds_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.report.comparison.is_futile", lambda *_: False)
    arms = {"baseline": BASE, "near": NEAR}
    assert [looks_of(tmp_path / str(seeds), arms, seeds).open for seeds in (4, 8)] == [(("near",),), (("near",),) * 2]


def test_rows_are_those_of_the_last_complete_look() -> None:
    values = {"baseline": dict(enumerate(BASE)), "near": dict(enumerate(NEAR)), "far": dict(enumerate(FAR))}
    plan, _ = synthetic_plan((("near",), ("near",)))
    rows = synthetic_studies.judged_rows(plan, values)
    assert [(row["look"], row["pairs"]) for row in rows.values()] == [(3, 12), (1, 4)]
    waiting = synthetic_studies.judged_rows(plan, values, {"near": 1})
    assert (waiting["near"]["look"], waiting["near"]["pairs"], waiting["near"]["awaited"]) == (2, 8, 1)
    d = np.subtract(NEAR[:8], BASE[:8])
    p = stats.ttest_1samp(d, 0).pvalue
    assert waiting["near"]["p_corrected"] == pytest.approx(min(1, 2 * p / 0.4))  # the decided arm counts
    for row, size, share in ((waiting["near"], 8, 0.4), (rows["near"], 12, LOOKS.shares[2])):
        d = np.subtract(NEAR[:size], BASE[:size])
        low, high = stats.t.interval(1 - 0.05 * share / 2, size - 1, d.mean(), stats.sem(d))
        assert (row["difference"], row["difference_low"], row["difference_high"]) == pytest.approx(
            (d.mean(), low, high)
        )


def synthetic_plan(open_: tuple[tuple[str, ...], ...]) -> tuple[Plan, None]:
    from vitlab.planning.values import Arm
    from vitlab.spec import Analysis

    arms = (Arm("baseline", {}, None), Arm("near", {}, "baseline"), Arm("far", {}, "baseline"))
    looks = Looks(LOOKS.seeds, LOOKS.shares, open_, LOOKS.futility)
    return Plan("s", "", arms, (), Analysis(variance="own"), looks=looks), None


def test_seeds_of_a_look_that_are_not_planned_yet_are_awaited(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": BASE[:4], "near": NEAR[:4]}, looks=LOOKS)
    due = Plan(**{**vars(plan), "looks": Looks(LOOKS.seeds, LOOKS.shares, (("near",),), 0.1)})
    rows = synthetic_studies.arms_table(StudyResults.read(due, store))
    assert rows.loc["near", ["look", "awaited", "pairs"]].tolist() == [1, 8, 4]


def test_levels_are_those_registered_with_the_first_results(tmp_path: Path) -> None:
    seeds = {"until": "decided", "at_least": 2, "at_most": 4}
    _, few = lab.plan_study(study(tmp_path, seeds, analysis={}), out=tmp_path)
    arms = {"baseline": {}, **{f"lr{n}": {"train.clip_grad": float(n)} for n in range(1, 20)}}
    _, many = lab.plan_study(study(tmp_path, seeds, analysis={}, design={"arms": arms}), out=tmp_path)
    assert few.looks is not None and many.looks is not None and many.looks.shares != few.looks.shares
    earlier = replace(few, registered=make_registration(few))
    before = with_first_registration(many, earlier, lambda trial: False)
    assert before.looks == many.looks and not describe_analysis_changes(before), "no result was there"
    after = with_first_registration(many, earlier, lambda trial: True)
    assert after.looks is not None and after.looks.shares == few.looks.shares


def test_added_look_is_exploratory(tmp_path: Path) -> None:
    seeds = {"until": "decided", "at_least": 2, "at_most": 6}
    _, before = lab.plan_study(study(tmp_path, seeds), out=tmp_path)
    _, after = lab.plan_study(study(tmp_path, {**seeds, "every": 1}), out=tmp_path)
    earlier = replace(before, registered=make_registration(before))
    [clause] = describe_analysis_changes(with_first_registration(after, earlier, lambda trial: True))
    assert clause == "the results were to be judged at 2, 4 and 6 seeds, and are judged at 2, 3, 4, 5 and 6 seeds"


@pytest.mark.slow
def test_decided_study_uses_fewer_seeds_than_fixed_one() -> None:
    """At 1.5 times the detectable effect, at most 65 % of the seeds of a study with one look and the same power."""
    sizes, studies = tuple(range(3, 31, 3)), 4000
    levels, effect = sequential_levels(sizes, family=1, alpha=0.05), 1.5 * 2.8 / math.sqrt(30)
    values = np.random.default_rng(1).standard_normal((studies, 30)) + effect
    used, found = np.full(studies, 30), np.zeros(studies, bool)
    for size, level in reversed(list(zip(sizes, levels, strict=True))):
        rejects = stats.ttest_1samp(values[:, :size], 0, axis=1).pvalue <= level
        used[rejects], found = size, found | rejects
    fixed = next(n for n in range(3, 100) if t_test_power(effect, n**-0.5, n - 1, alpha=0.05) >= found.mean())
    assert used.mean() <= 0.65 * fixed
