"""Tests of verdicts against scipy and simulation, and of baselines, facts and messages."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from scipy import stats

from vitlab.errors import UserError
from vitlab.planning.values import MetricFacts, Plan
from vitlab.regression.baseline import (
    ArmFacts,
    Baseline,
    Facts,
    Trace,
    Values,
    accept_into_baseline,
    read_baseline,
    write_baseline,
)
from vitlab.regression.decide import (
    REGRESSED,
    VERDICTS,
    Cell,
    Cells,
    Finding,
    Pair,
    capped_pooled_sd,
    chance_to_pass,
    detectable_drop,
    judge_arrays,
    pooled_sd,
    seeds_to_pass,
    worst_verdict,
)
from vitlab.regression.decide import judge_family as judge_all
from vitlab.regression.facts import compare_exact_facts
from vitlab.regression.gate import (
    CheckResult,
    doubt_if_at_chance,
    forecast_cells,
    make_unreachable_drop_infinite,
    pair_cells,
    second_look_seeds,
    train_and_judge,
)
from vitlab.regression.phrasing import render_check, render_forecast, render_json, render_junit
from vitlab.spec import Analysis, Study
from vitlab.statistics import replicates
from vitlab.statistics.replicates import values_to_array


def pair(
    old: list[float],
    new: list[float],
    margin: float = 2.0,
    min_abs: float = 1.0,
    lost: tuple[int, int] = (0, 0),
    arm: str = "arm",
    **more: str | float,
) -> Pair:
    """Return a pair with the seeds 0, 1, ..., of which the last of each side are lost."""
    before, after = (frozenset(range(len(side), len(side) + n)) for side, n in zip((old, new), lost, strict=True))
    values = dict(enumerate(old)), dict(enumerate(new))
    return Pair(arm, "val/accuracy", "max", *values, margin, min_abs, lost=(before, after), **more)  # type: ignore[arg-type]


def cells_of(arms: int, margin: np.ndarray, min_abs: np.ndarray) -> Cells:
    """Return cells of one metric without steps."""
    return Cells(margin, min_abs, np.zeros(arms), np.arange(arms), np.ones(arms, bool))


def judge(pairs: list[Pair], alpha: float = 0.05) -> list[Cell]:
    """Judge pairs whose names may be equal as pairs of different arms."""
    return judge_all([replace(item, arm=f"{item.arm} {place}") for place, item in enumerate(pairs)], alpha)[0]


def verdict_of(*pairs: Pair) -> str:
    """Return the verdict of a study."""
    cells, findings = judge_all([replace(item, arm=f"{item.arm} {place}") for place, item in enumerate(pairs)])
    return worst_verdict([*(cell.verdict for cell in cells), *(finding.verdict for finding in findings)])


# -- verdicts ---------------------------------------------------------------------------------------------------------


def test_cell_equals_one_sided_paired_test_of_scipy() -> None:
    draws = np.random.default_rng(0)
    old, new = draws.normal(0, 1, 6), draws.normal(-1, 1, 6)
    (cell,) = judge([pair([*old], [*new])])
    expected = stats.ttest_rel(new, old, alternative="less")
    assert cell.p == pytest.approx(expected.pvalue, rel=1e-9)
    bound = (old - new).mean() + stats.t.ppf(0.95, 5) * stats.sem(old - new)
    assert cell.worst == pytest.approx(bound, rel=1e-9)
    mirrored = replace(pair([*-old], [*-new]), goal="min")
    assert judge([mirrored])[0].p == pytest.approx(cell.p, rel=1e-12)


def test_cell_without_common_seeds_is_not_judged() -> None:
    apart = Pair("a", "val/accuracy", "max", dict.fromkeys(range(5), 1.0), dict.fromkeys(range(9, 13), 0.0), 2.0, 1.0)
    (cell,) = judge([apart])
    assert cell.verdict == "inconclusive" and cell.reason == "no seed has a value in both the baseline and this run"


def test_three_verdicts() -> None:
    old = [10.0, 11.0, 9.0, 10.5, 9.5]
    same = judge([pair(old, old)])[0]
    near = judge([pair(old, [value + e for value, e in zip(old, (0.1, -0.1, 0.2, -0.2, 0.05), strict=True)])])[0]
    worse = judge([pair(old, [value - 5 + e for value, e in zip(old, (0.1, -0.1, 0.2, -0.2, 0), strict=True)])])[0]
    noisy = judge([pair(old, [value + e for value, e in zip(old, (9, -9, 8, -8, -1), strict=True)])])[0]
    assert (same.verdict, same.reason, same.worse_by) == ("pass", "identical", 0.0)
    assert near.verdict == "pass" and near.worst < 2
    assert worse.verdict == "regressed" and worse.p_adjusted < 0.05
    assert noisy.verdict == "inconclusive"
    assert (
        worst_verdict([same.verdict, noisy.verdict]) == "inconclusive"
        and worst_verdict([noisy.verdict, worse.verdict]) == "regressed"
    )


def test_drops_within_margin_pass() -> None:
    old = [10.0, 11.0, 9.0, 10.5, 9.5]
    new = [value - 0.5 + e for value, e in zip(old, (0.01, -0.01, 0.02, -0.02, 0), strict=True)]
    within = judge([pair(old, new, margin=2.0, min_abs=1.0)])[0]
    assert within.p_adjusted < 0.001 and within.verdict == "pass" and "significant" in within.reason
    beyond = judge([pair(old, new, margin=0.4, min_abs=1.0)])[0]
    assert beyond.verdict == "inconclusive" and "worse, but by less than min_abs" in beyond.reason
    assert judge([pair(old, new, margin=0.4, min_abs=0.4)])[0].verdict == "regressed"


def test_zero_spread_uses_metric_quantum_or_signs() -> None:
    old = [0.90, 0.92, 0.94]
    lower = [value - 0.02 for value in old]
    (stepped,) = judge([pair(old, lower, margin=0.01, min_abs=0.01, quantum=0.002)])
    assert stepped.p == pytest.approx(stats.t.sf(0.02 / (0.002 / math.sqrt(6) / math.sqrt(3)), 2), rel=1e-6)
    assert stepped.verdict == "regressed"
    (signs,) = judge([pair(old, lower, margin=0.01, min_abs=0.01)])
    assert signs.test == "sign flip" and signs.p == 0.125 and signs.verdict == "inconclusive"
    (better,) = judge([pair(lower, old, margin=0.01, min_abs=0.01)])
    assert better.verdict == "pass" and better.worse_by < 0


def test_undecided_cell_gives_reason() -> None:
    assert "too few" in judge([pair([1, 2], [1, 2])])[0].reason
    assert judge([pair([1, 2], [1, 2])])[0].verdict == "inconclusive"
    assert "no seed" in judge([pair([1, 2, 3], [])])[0].reason
    (refused,) = judge([pair([1, 2, 3], [1, 2, 3], refused="its data was a and is b")])
    assert refused.verdict == "inconclusive" and refused.reason == "its data was a and is b"
    assert all(math.isnan(number) for number in (refused.old, refused.new, refused.worse_by)), (
        "no difference of two data"
    )
    (one,) = judge([pair([1, 2, 3], [1, 2], lost=(0, 1))])
    (two,) = judge([pair([1, 2, 3], [1], lost=(0, 2))])
    assert (one.verdict, two.verdict) == ("inconclusive", "inconclusive"), "a majority of three seeds is no test"
    assert verdict_of(pair([1, 2, 3], [], lost=(0, 3))) == "regressed"


def test_missing_seed_hides_no_loss_and_passes_nothing() -> None:
    old = [10.0, 11.0, 9.0, 10.5, 9.5]
    worse = [value - 5 + e for value, e in zip(old, (0.1, -0.1, 0.2, -0.2), strict=False)]
    (cell,) = judge([pair(old, worse, lost=(0, 1))])
    assert cell.verdict == "regressed" and "1 of 5 trainings" in cell.reason and cell.p_adjusted < 0.05
    assert judge([pair(old, old[:4], lost=(0, 1))])[0].verdict == "inconclusive"
    # The candidate has eight of the baseline's ten seeds, and lost six.
    few = pair([*old, *old], old[:2], lost=(0, 6))
    assert (
        verdict_of(few) == "regressed"
        and judge([few])[0].lost_or_collapsed == (0, 6)
        and judge([few])[0].seeds == (8, 8)
    )


def test_seeds_from_one_training_are_no_sample() -> None:
    old = [10.0, 11.0, 9.0]
    one = {"no_sample": "all its seeds start from 1 training"}
    assert (
        judge([pair(old, [value - 5 + e for value, e in zip(old, (0.1, 0, 0.2), strict=True)], **one)])[0].test
        == "none"
    )
    assert judge([pair(old, old, **one)])[0].reason == "identical"
    shared = values().model_copy(update={"behind": {"a": 1, "b": 3}})
    pairs, _ = pair_cells(study(), values(), shared)
    assert ["1 training stands behind" in item.no_sample for item in pairs] == [True, False]


def test_rate_of_found_drops_equals_simulation_by_scipy() -> None:
    """Five cells, one of which has lost two standard deviations."""
    n, arms, count = 6, 5, 4000
    values_SC2N = np.random.default_rng(5).normal(0, 1, (count, arms, 2, n))
    values_SC2N[:, 0, 1] -= 2.0
    margin, min_abs = np.full(arms, 2.0), np.full(arms, 1.0)
    judged = judge_arrays(values_SC2N, np.zeros(values_SC2N.shape, bool), cells_of(arms, margin, min_abs), alpha=0.05)
    old, new = values_SC2N[:, 0, 0], values_SC2N[:, 0, 1]
    p = stats.ttest_rel(new, old, axis=1, alternative="less").pvalue
    worst = (old - new).mean(axis=1) + stats.t.ppf(0.95, n - 1) * stats.sem(old - new, axis=1)
    found = (arms * p < 0.05) & ((old - new).mean(axis=1) >= 1) & (worst >= 2)
    sound = judged.count_lost_or_collapsed.sum(axis=1) == 0  # a Gaussian seed is seldom ten robust deviations off
    assert sound.mean() > 0.9 and 0.2 < found.mean() < 0.8
    assert ((judged.verdict[:, 0] == REGRESSED) == found)[sound].all()


def test_family_is_corrected_in_one_step() -> None:
    draws = np.random.default_rng(2)
    cells = judge([pair([*draws.normal(0, 1, 5)], [*draws.normal(-1, 1, 5)]) for _ in range(4)])
    assert [cell.p_adjusted for cell in cells] == pytest.approx([min(1, 4 * cell.p) for cell in cells])
    lost = judge([pair([*draws.normal(0, 1, 5)], [*draws.normal(-1, 1, 4)], lost=(0, 1)), pair([1, 2, 4], [3, 2, 2])])
    assert [cell.family for cell in lost] == [3, 3], "two cells and the count"


def test_pass_probability_equals_simulation() -> None:
    n, margin = 5, 2.0
    values_SC2N = np.random.default_rng(3).normal(0, 1, (4000, 1, 2, n))
    cells = cells_of(1, np.array([margin]), np.array([9.0]))
    passed = judge_arrays(values_SC2N, np.zeros(values_SC2N.shape, bool), cells, alpha=0.05).verdict == 0
    chance = chance_to_pass(n, 1.0, margin, 0.05)
    assert passed.mean() == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 4000))
    seed_count = seeds_to_pass(1.0, margin, 0.05)
    assert seed_count is not None
    assert chance_to_pass(seed_count, 1.0, margin, 0.05) >= 0.8 > chance_to_pass(seed_count - 1, 1.0, margin, 0.05)
    assert chance_to_pass(2, 1.0, margin, 0.05) == 0 and seeds_to_pass(1e6, margin, 0.05) is None


@pytest.mark.parametrize(
    ("n", "family", "margin", "min_abs"),
    [(3, 1, 2.0, 0.0), (5, 4, 2.0, 1.0), (8, 3, 2.0, 1.0), (40, 2, 2.0, 1.0), (40, 2, 0.01, 1.0)],
)
def test_detectable_drop_is_found_four_times_in_five(n: int, family: int, margin: float, min_abs: float) -> None:
    """The test decides with few seeds, the margin with many, and ``min_abs`` where the margin is smaller."""
    drop = detectable_drop(n, 1.0, margin, min_abs, 0.05, family)
    values_SC2N = np.random.default_rng(4).normal(0, 1, (2000, family, 2, n))
    values_SC2N[:, 0, 1] -= drop
    cells = cells_of(family, np.full(family, margin), np.full(family, min_abs))
    found = judge_arrays(values_SC2N, np.zeros(values_SC2N.shape, bool), cells, alpha=0.05).verdict[:, 0] == REGRESSED
    assert found.mean() == pytest.approx(0.8, abs=0.03)


def test_nothing_is_detectable_by_two_seeds_or_without_spread() -> None:
    assert detectable_drop(2, 1.0, 2.0, 1.0, 0.05, 1) == math.inf
    assert math.isnan(detectable_drop(5, 0.0, 2.0, 1.0, 0.05, 1))


def test_drop_beyond_the_worst_value_is_never_found() -> None:
    baseline = values(seeds=3)
    cell, _ = forecast_cells(study(), baseline)
    assert 0 < cell.worse_by < math.inf
    facts = MetricFacts("max", "share", (cell.new - 1.01 * cell.worse_by, 1.0))
    plan = SimpleNamespace(facts=lambda _: facts)
    assert make_unreachable_drop_infinite(cell, plan) == cell  # type: ignore[arg-type]
    facts = replace(facts, bounds=(cell.new - 0.99 * cell.worse_by, None))
    limited = make_unreachable_drop_infinite(cell, plan)  # type: ignore[arg-type]
    assert limited.worse_by == math.inf
    shown = render_forecast([limited, cell], {}, "md")
    assert shown.count("| never |") == 1 and "even the worst possible value is found less often" in shown
    assert "never" not in render_forecast([cell], {}, "md")


def test_spread_is_pooled_within_arms() -> None:
    assert pooled_sd(values_to_array({"a": {0: 1, 1: 3}, "b": {0: 10, 1: 10, 2: 13}}.values())[None]) == pytest.approx(
        math.sqrt((2 + 6) / 3)
    )
    assert pooled_sd(values_to_array({"a": {0: 1.0}}.values())[None]) == 0


def test_equal_values_have_no_spread_and_the_outlook_takes_the_spread_of_other_arms() -> None:
    """The mean of six times 0.1 differs from 0.1 by rounding."""
    equal = dict.fromkeys(range(6), 0.1)
    assert sum(equal.values()) / 6 != 0.1 and pooled_sd(values_to_array([equal])[None]) == 0
    baseline = values(seeds=6)
    baseline.metrics["val/accuracy"]["a"] = equal
    first, second = forecast_cells(study(), baseline)
    assert second.sd == pytest.approx(np.std([*baseline.metrics["val/accuracy"]["b"].values()], ddof=1))
    assert first.sd == pytest.approx(second.sd / math.sqrt(2))


# -- a study ----------------------------------------------------------------------------------------------------------


def study(seeds: int = 3, **check: object) -> Study:
    return Study.model_validate(
        {
            "study": "s",
            "base": {"data": "digits", "model": "vit", "train": {"steps": 1}},
            "seeds": seeds,
            "check": check,
        }
    )


def values(shift: float = 0.0, seeds: int = 3, device: str = "cpu", **more: float) -> Values:
    samples = {"a": [0.90, 0.92, 0.94, 0.91, 0.93, 0.92], "b": [0.80, 0.82, 0.84, 0.81, 0.83, 0.82], **more}
    return Values(
        device=device,
        data=dict.fromkeys(samples, "digits:1"),
        metrics={
            "val/accuracy": {
                arm: {seed: value + shift for seed, value in enumerate(base[:seeds])} for arm, base in samples.items()
            }
        },
        quanta={"val/accuracy": 0.001},
        diverged={},
    )


def test_margins_come_from_spread_of_baseline() -> None:
    pairs, _ = pair_cells(study(), values(), values(-0.05))
    sd = 0.02
    assert [item.arm for item in pairs] == ["a", "b"]
    assert pairs[0].margin == pytest.approx(2 * sd) and pairs[0].min_abs == pytest.approx(sd)
    pairs, _ = pair_cells(study(margin_sd=3, min_abs={"val/accuracy": 0.5}), values(), values())
    assert pairs[0].margin == 0.5 and pairs[0].min_abs == 0.5
    assert pair_cells(study(margin={"val/accuracy": 0.01}), values(), values())[0][0].margin == 0.01


def test_differing_arms_devices_and_data_are_reported() -> None:
    new = values(device="cuda", c=[0.5, 0.5, 0.6])  # type: ignore[arg-type]
    pairs, notes = pair_cells(study(), values(), new)
    assert [item.refused for item in pairs] == [
        "",
        "",
        "the baseline has no val/accuracy of this arm; accept a baseline that has it",
    ]
    assert judge(pairs)[2].verdict == "inconclusive"
    assert any("trained on cpu, and the candidate on cuda" in note for note in notes)
    pairs, _ = pair_cells(study(), values(), values().model_copy(update={"data": {"a": "digits:2", "b": "digits:1"}}))
    assert [judge([item])[0].verdict for item in pairs] == ["inconclusive", "pass"]


def test_more_seeds_are_trained_only_for_inconclusive_arms() -> None:
    requests: list[tuple[object, object]] = []
    full = values(seeds=6)
    noisy = dict(enumerate([0.80, 0.95, 0.99, 0.911, 0.932, 0.921]))

    def train(seeds: object, arms: object) -> Values:
        requests.append((seeds, arms))
        baseline_values = values(seeds=6 if seeds else 3)
        baseline_values.metrics["val/accuracy"]["a"] = {s: v for s, v in noisy.items() if seeds or s < 3}
        return baseline_values

    cells, _, notes = train_and_judge(study(escalate_to=6), full, train)
    assert requests == [(None, ()), ((0, 1, 2, 3, 4, 5), ["a"])]
    assert [(cell.arm, cell.n) for cell in cells] == [("a", 6), ("b", 3)]
    assert any("6 seeds of a" in note for note in notes)
    assert second_look_seeds(study()) is None and second_look_seeds(study(escalate_to=4)) == (0, 1, 2, 3)


def test_additional_seeds_are_limited_by_baseline() -> None:
    noisy = values(seeds=3).model_copy(deep=True)
    noisy.metrics["val/accuracy"]["a"] = {0: 0.80, 1: 0.95, 2: 0.99}
    requests: list[object] = []

    def train(seeds: object, arms: object) -> Values:
        requests.append(seeds)
        return noisy

    cells, _, notes = train_and_judge(study(escalate_to=6), values(seeds=3), train)
    assert requests == [None] and cells[0].verdict == "inconclusive" and "accept a baseline again" in notes[0]


def test_arm_without_metric_gets_no_more_seeds() -> None:
    old, new = (values().model_copy(deep=True) for _ in range(2))
    old.metrics["val/accuracy"]["b"], new.metrics["val/accuracy"]["b"] = {}, {}
    pairs, notes = pair_cells(study(), old, new)
    assert [item.arm for item in pairs] == ["a"] and "'b' has no val/accuracy" in notes[0]
    pairs, _ = pair_cells(study(), old, new.model_copy(update={"diverged": {"b": (0, 1, 2)}}))
    assert [(item.arm, item.lost[1]) for item in pairs] == [("a", frozenset()), ("b", {0, 1, 2})]


def test_outlook_is_for_all_seeds() -> None:
    """Each of two looks has half of alpha, and a model that passes at the second one passes."""
    (one, *_), (two, *_) = (forecast_cells(study(escalate_to=most), values(seeds=6)) for most in (None, 6))
    assert (one.n, two.n) == (3, 6) and two.chance > one.chance


def test_outlook_is_for_seeds_of_file() -> None:
    cells = forecast_cells(study(), values(seeds=6))
    assert [cell.n for cell in cells] == [3, 3]
    sd = np.std([0.90, 0.92, 0.94, 0.91, 0.93, 0.92], ddof=1)
    assert cells[0].chance == pytest.approx(chance_to_pass(3, float(sd), 2 * float(sd), 0.05), rel=1e-9)
    units = {"accuracy": "share"}
    table = render_forecast(cells, units, "md")
    drop = detectable_drop(3, float(sd), 2 * float(sd), float(sd), 0.05, 2)
    both = [chance_to_pass(n, float(sd), 2 * float(sd), 0.05) ** 2 for n in range(3, 20)]  # of two cells alike
    needs = 3 + next(place for place, chance in enumerate(both) if chance >= 0.8)
    mean = f"{100 * np.mean([0.90, 0.92, 0.94, 0.91, 0.93, 0.92]):.4g}"
    row = f"| a | val accuracy (%) | 3 | {mean} | 1.414 | 2.828 | 49 % | {needs} | {100 * drop:.4g} |"
    assert "Warning" in table and "less than 80 %" in table and row in table
    assert "Warning" not in render_forecast([replace(cell, chance=0.99) for cell in cells], units, "md")
    beyond = render_forecast([replace(cell, needs=None) for cell in cells], units, "md")
    assert "| over 200 |" in beyond and "Widen the margin" in beyond and "every check" not in beyond
    assert "largest number" not in beyond and "largest number" in table
    ends = [math.sqrt(5 / stats.chi2.isf(tail, 5)) for tail in (0.025, 0.975)]  # the baseline's sd is of six seeds
    assert "{:.2g} to {:.2g} times as large".format(*ends) in table and "0.62 to 2.5 times" in table
    never = render_forecast([replace(cells[0], reason="why"), cells[1]], units, "md")
    assert f"| {mean} | 1.414 | 2.828 | never | none |  |" in never and "Warning: a: val accuracy (%): why, so" in never
    assert "In other rows, a model that computes equal bits passes" in never
    few = render_forecast([replace(cells[0], reason="why", n_of_sd=2, needs=None), cells[1]], units, "md")
    assert "0.62 to 2.5 times" in few and "largest number" in few, "a row that never passes is not in the note"
    names = {"a": "x", "b": "y"}
    alone = render_forecast([replace(cell, arm="a", metric=names[cell.arm], reason="why") for cell in cells], {}, "md")
    assert alone.count("Warning") == 1 and "x: why; y: why, so" in alone
    assert "other rows" not in alone and "sd shown" not in alone
    assert "99 %" in render_forecast([replace(cell, chance=0.9999) for cell in cells], units, "md")


# -- exact tier -------------------------------------------------------------------------------------------------------


def facts(torch: str = "2.13.0", **changes: object) -> Facts:
    arm = ArmFacts(
        key="k",
        origins=("position:learned vitlab 1",),
        data="digits:1",
        seeds={"init": 0},
        spec={"train.optimizer.lr": 0.001},
        params=10,
        macs=20,
        traces=(Trace(precision="fp64", losses=(2.3, 2.2, 2.1), before=2.3, after=2.0),),
    ).model_copy(update=changes)
    return Facts(torch=torch, processor="x86", seeds=(0,), skipped={}, arms={"a": arm})


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        ({"params": 11}, "params", "10 -> 11"),
        ({"macs": 21}, "macs", "20 -> 21"),
        ({"spec": {"train.optimizer.lr": 0.002}, "key": "other"}, "key", "train.optimizer.lr: 0.001 -> 0.002"),
        ({"data": "digits:2"}, "key", "digits:1 -> digits:2"),
        ({"seeds": {"init": 1}}, "key", "seed of init: 0 -> 1"),
        ({"key": "other"}, "key", "starts from has changed"),
        ({"traces": (Trace(precision="fp64", losses=(2.3, 2.2 + 1e-5, 2.1), before=2.3, after=2.0),)}, "trace fp64", "of step 2"),
        ({"traces": (Trace(precision="fp64", losses=(2.3, 2.2, math.nan), before=2.3, after=2.0),)}, "trace fp64", "of step 3"),
        ({"traces": (Trace(precision="fp64", losses=(2.3, 2.2), before=2.3, after=2.0),)}, "trace fp64", "3 steps -> 2"),
    ],
)  # fmt: skip
def test_every_difference_is_named(changes: dict[str, object], check: str, message: str) -> None:
    findings = [item for item in compare_exact_facts(facts(), facts(**changes)) if item.verdict != "pass"]
    assert [(item.arm, item.check, item.verdict) for item in findings] == [("a", check, "differs")]
    assert message in findings[0].sentence


def test_losses_are_shown_with_equal_digits() -> None:
    other = (Trace(precision="fp64", losses=(2.3, 2.30667472, 2.1), before=2.3, after=2.0),)
    (finding,) = [item for item in compare_exact_facts(facts(), facts(traces=other)) if item.verdict != "pass"]
    shown = "2.20000000 -> 2.30667472, a relative difference of 0.046; up to 1e-07 is rounding"
    assert finding.sentence == f"the loss of step 2: {shown}"


def test_equal_facts_pass_and_rounding_is_tolerated() -> None:
    rounded = (Trace(precision="fp64", losses=(2.3, 2.2 + 1e-9, 2.1), before=2.3, after=2.0),)
    added = {"train.optimizer.lr": 0.001, "train.optimizer.added": "default", "data.root": "elsewhere"}
    for new in (facts(), facts(traces=rounded), facts(torch="2.14.0"), facts(spec=added)):  # the key is that of before
        assert {item.verdict for item in compare_exact_facts(facts(), new)} == {"pass"}
    other_code = facts(key="other", origins=("position:learned vitlab 2",))
    for new, size in (
        (other_code, "all losses are equal"),
        (facts(traces=rounded), "losses differ by at most 4.5e-10; up to 1e-07 is rounding"),  # 1e-9 of 2.2
    ):
        findings = {item.check: item.sentence for item in compare_exact_facts(facts(), new) if item.verdict == "pass"}
        assert findings["trace fp64"] == size
        assert findings["key"] == ("other code: vitlab 1 -> vitlab 2" if new is other_code else "")


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (["attention:mine my_attn.py a47b1878"], ["attention:mine my_attn.py 91527441"], "my_attn.py a47b1878 -> my_attn.py 91527441"),
        (["attention:a own.py 1", "mlp:b own.py 1"], ["attention:a own.py 2", "mlp:b own.py 2"], "own.py 1 -> own.py 2"),
        (["attention:a own.py 1"], ["attention:a timm 2"], "own.py 1 -> timm 2"),
        ([], ["attention:a my attn.py 1"], "nothing -> my attn.py 1"),
    ],
)  # fmt: skip
def test_changed_plugin_is_named(before: list[str], after: list[str], sentence: str) -> None:
    findings = compare_exact_facts(facts(origins=tuple(before)), facts(key="other", origins=tuple(after)))
    assert [(item.verdict, item.sentence) for item in findings if item.check == "key"] == [
        ("pass", f"other code: {sentence}")
    ]


def test_differing_trace_under_other_torch_is_inconclusive() -> None:
    other = (Trace(precision="fp64", losses=(2.3, 2.25, 2.1), before=2.3, after=2.0),)
    (finding,) = [
        item for item in compare_exact_facts(facts(), facts("2.14.0", traces=other)) if item.verdict != "pass"
    ]
    assert finding.verdict == "inconclusive" and "torch: 2.13.0 -> 2.14.0" in finding.sentence


@pytest.mark.parametrize(("by", "verdict"), [(1e-6, "inconclusive"), (1e-3, "differs")])
def test_other_processor_explains_rounding_only(by: float, verdict: str) -> None:
    trace = Trace(precision="fp64", losses=(2.3, 2.2 + by, 2.1), before=2.3, after=2.0)
    new = facts(traces=(trace,)).model_copy(update={"processor": "arm"})
    (finding,) = [item for item in compare_exact_facts(facts(), new) if item.verdict != "pass"]
    assert finding.verdict == verdict and "processor: x86 -> arm" in finding.sentence


def test_other_seeds_are_named() -> None:
    for seeds, message in (((0, 1), "seeds: [0] -> [0, 1]"), ((7,), "seeds: [0] -> [7]")):
        (plan,) = [
            item for item in compare_exact_facts(facts(), facts().model_copy(update={"seeds": seeds})) if item.sentence
        ]
        assert plan.verdict == "differs" and message in plan.sentence


def test_added_removed_and_skipped_arms_are_named() -> None:
    new = facts().model_copy(update={"arms": {"b": facts().arms["a"]}, "skipped": {"c": "too deep"}})
    (plan,) = [item for item in compare_exact_facts(facts(), new) if item.verdict != "pass"]
    assert all(word in plan.sentence for word in ("'b' is new", "'a' is gone", "skipped arm c", "too deep"))


# -- file -------------------------------------------------------------------------------------------------------------


def test_baseline_file_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "s.baseline.yaml"
    trace = Trace(precision="fp32", losses=(1e-5, math.inf), before=0.1, after=math.inf)
    first = accept_into_baseline(Baseline(study="s", accepted=()), facts(traces=(trace,)), values(), "why", commit="")
    write_baseline(file, first)
    assert read_baseline(file) == first
    assert file.read_text().startswith("#") and "reason: why" in file.read_text()
    second = accept_into_baseline(first, facts(), values(-0.1), "because", commit="")
    assert second.values == values(-0.1)
    assert [entry.reason for entry in second.accepted] == ["why", "because"]
    assert accept_into_baseline(second, facts(), None, "so", commit="").values == values(-0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the baseline does not exist"),
        ("[1", "not YAML"),
        ("- 1", "a mapping"),
        ("form: 7", "written by another version of vitlab"),
        ("form: 1\nstudy: s\naccepted: []\nvalues: 3", "values"),
        ("form: 1\nstudy: !!python/object/apply:os.system [echo]\naccepted: []", "not YAML"),
    ],
)
def test_invalid_baseline_is_refused_with_sentence(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "b.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_baseline(file)


# -- messages ---------------------------------------------------------------------------------------------------------

CHECKED = CheckResult(
    "s",
    "regressed",
    True,
    (Finding("a|b", "trace fp64", "regressed", "the loss of step 2: 1 -> 2, 100 %\nmore"), Finding("", "plan", "pass")),
    (
        Cell("a|b", "val/accuracy", "inconclusive", "a drop <of 1>", 3, "paired t", 0.9, 0.8, 0.1, seconds=1.5),
        Cell("c", "val/accuracy", "pass", "identical", 3, "identical"),
    ),
    ("a note",),
)  # fmt: skip


JUNIT = {
    "testsuite": ({"name", "tests", "failures", "errors"}, {"skipped", "time", "timestamp", "hostname"}, {"testcase"}),
    "testcase": ({"name"}, {"classname", "time"}, {"skipped", "failure"}),
    "failure": (set(), {"type", "message"}, set()),
    "skipped": (set(), {"type", "message"}, set()),
}
"""Of each element the attributes it must have, those it may have, and its children: what junit-10.xsd of Jenkins' xUnit
plugin allows, as far as it is needed here."""


def test_junit_is_valid_for_jenkins() -> None:
    """Arms and reasons may have characters that XML cannot represent."""
    odd = Finding("a\x00\x1b[31m<b>&\"'\ud800", "trace", "regressed", "\x08 why\n]]>")
    text = render_junit(replace(CHECKED, findings=(*CHECKED.findings, odd)), "vitlab ab")
    suite = ElementTree.fromstring(text.encode())
    for element in suite.iter():
        must, may, children = JUNIT[element.tag]
        assert must <= {*element.keys()} <= must | may
        assert {child.tag for child in element} <= children and not (element.text or "").strip()
    assert suite.tag == "testsuite" and all(suite.get(name, "").isdigit() for name in ("tests", "failures", "errors"))
    assert "a  [31m<b>&\"' " in {case.get("classname") for case in suite}


def test_junit_counts_failures() -> None:
    suite = ElementTree.fromstring(render_junit(CHECKED, "vitlab ab"))
    assert suite.get("name") == "vitlab ab"
    assert suite.attrib | {"tests": "4", "failures": "1", "skipped": "1", "errors": "0"} == suite.attrib
    assert len(suite.findall("testcase")) == 4
    assert [case.get("classname") for case in suite if case.find("failure") is not None] == ["a|b"]
    assert [case.get("time") for case in suite] == ["1.500", None, None, None]
    (skipped,) = suite.iter("skipped")
    assert "a drop <of 1>" in str(skipped.get("message"))


def test_markdown_keeps_table_and_json_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    text_out = render_check(CHECKED, "md")
    rows = [line for line in text_out.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {11}
    assert "2 of 4 checks pass" in text_out and r"\<of 1>" in text_out and "A note." in text_out
    verdicts = [line.split()[1].rstrip(":") for line in text_out.splitlines() if re.match(r"- \w+: ", line)]
    assert verdicts == sorted(verdicts, key=VERDICTS.index, reverse=True) and len(set(verdicts)) > 1
    assert json.loads(render_json(CHECKED, report=None))["cells"][1]["worse_by"] is None
    monkeypatch.setenv("COLUMNS", "80")
    terminal = render_check(CHECKED, "terminal")
    assert max(map(len, terminal.splitlines())) <= 80 and not set("|*#\\") & set(terminal.replace("a|b", ""))
    assert re.search(r"(?m)^ a\|b +val accuracy +inconclusive ", terminal) and "A note." in terminal
    assert "a drop <of 1>" in " ".join(terminal.split()), "the reason is a sentence above the table"


def test_shares_are_in_points_and_json_keeps_fractions() -> None:
    cell = Cell(
        "a", "val/accuracy", "regressed", "adjusted p 0.01", 4, "paired t", 0.9, 0.8, 0.1, 0.02, 0.15, alpha=0.05
    )
    loss = replace(cell, metric="val/loss", old=1.0, new=1.1)
    result = replace(CHECKED, findings=(), cells=(cell, loss), units={"accuracy": "share", "loss": "number"})
    shown = render_check(result, "md")
    assert (
        "regressed: a: val accuracy (%): 90 -> 80 over 4 seeds, worse by 10 points (90 % interval 5 to 15); adjusted p "
        "0.01" in shown
    )
    assert "| a | val accuracy (%) | regressed | 90 | 80 | 10 | 15 |" in shown
    assert "| a | val loss | regressed | 1 | 1.1 | 0.1 | 0.15 |" in shown
    assert "val loss: 1 -> 1.1 over 4 seeds, worse by 0.1 (" in shown
    assert "over 4 seeds, worse by 0.1 (" in render_junit(result, "vitlab check")
    assert json.loads(render_json(result, report=None))["cells"][0]["worse_by"] == 0.1


def test_zero_has_no_sign_where_lower_is_better() -> None:
    [cell] = judge([replace(pair([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]), goal="min")])
    assert not any(math.copysign(1.0, number) < 0 for number in (cell.old, cell.new, cell.worse_by))
    assert "-0" not in render_check(replace(CHECKED, cells=(cell,)), "md")
    # Equal means of other seeds, but for rounding.
    [cell] = judge([replace(pair([0.1, 0.2, 0.3], [0.3, 0.1, 0.2]), goal="min")])
    assert cell.worse_by == 0.0


@pytest.mark.parametrize(
    ("metric", "value", "reason"),
    [
        ("val/accuracy", 44 / 360, "guesses reach 12.6 % on as many images"),
        ("val/accuracy", 48 / 360, ""),
        ("val/loss", 2.3026, "guesses reach 2.303"),
        ("val/loss", 2.30, ""),
        ("train/loss", 9.0, ""),
        ("train/accuracy", 0.0, ""),
        ("val/rank", 5.5, "guesses reach 5.5"),
        ("val/rank", 5.0, ""),
        ("val/own", 0.0, ""),
    ],
)
def test_cell_no_better_than_guesses_does_not_pass(metric: str, value: float, reason: str) -> None:
    """Of guesses of 360 images of ten classes, 5 % are beyond the quantile of the binomial distribution.

    A mean rank has a chance above 1 and a smallest change, and is no share; losses of training are of other targets.
    """
    assert 44 < stats.binom.isf(0.05, 360, 0.1) < 48
    metrics = {
        "accuracy": MetricFacts("max", "share", (0.0, 1.0), 1.0, {"a": 0.1}),
        "loss": MetricFacts("min", "number", (0.0, None), 0.0, {"a": math.log(10)}),
        "rank": MetricFacts("min", "number", (1.0, None), 0.0, {"a": 5.5}, step=1.0),
        "own": MetricFacts("max", "number", (None, None)),
    }
    plan = Plan("s", "", (), (), Analysis(), metrics=metrics)
    cell = Cell("a", metric, "pass", "identical", 3, "identical", value, value, 0.0)
    of_steps = values().model_copy(update={"quanta": {"val/accuracy": 1 / 360, "val/rank": 1.0}})
    doubted = doubt_if_at_chance(cell, plan, of_steps)
    if reason:
        assert doubted.verdict == "inconclusive" and doubted.reason == f"{reason}: the arm may have learned nothing"
    else:
        assert doubted == cell
    # Without the number of images, an accuracy is compared with the mean of guesses.
    if metric == "val/accuracy":
        without_steps = of_steps.model_copy(update={"quanta": {}})
        assert "images" not in doubt_if_at_chance(replace(cell, new=0.1), plan, without_steps).reason
    assert doubt_if_at_chance(replace(cell, verdict="regressed"), plan, of_steps).verdict == "regressed"


def test_settings_are_checked_like_rest_of_file() -> None:
    for wrong in ({"margin_sd": 0}, {"escalate_to": 2}, {"on_inconclusive": "pass"}):
        with pytest.raises(ValueError):
            study(**wrong)
    assert yaml.safe_load(study().model_dump_json())["check"]["alpha"] == 0.05


def test_count_of_all_arms_is_judged_by_exact_test() -> None:
    """Boschloo's exact test finds four of ten trainings, which are no majority, lost and collapsed ones alike."""
    draws = np.random.default_rng(0)

    def judged(
        n: int, bad: int, before: int = 0, *, collapse: bool = False, arms: int = 1
    ) -> tuple[list[Cell], Finding]:
        pairs = []
        for arm in range(arms):
            old, new = 0.9 + 0.01 * draws.normal(size=(2, n))
            if collapse:
                new[:bad], old[:before] = 0.1, 0.1
                pairs.append(pair([*old], [*new], margin=10.0, arm=f"arm {arm}"))
            else:
                pairs.append(pair([*old[before:]], [*new[bad:]], lost=(before, bad), margin=10.0, arm=f"arm {arm}"))
        cells, [finding] = judge_all(pairs)
        return cells, finding

    for collapse in (False, True):
        found = {n: judged(n, round(0.4 * n), collapse=collapse)[1].verdict for n in (5, 10, 20)}
        assert found == {5: "inconclusive", 10: "regressed", 20: "regressed"}
        assert judged(20, 4, before=4, collapse=collapse)[1].verdict == "pass"
    assert judged(10, 3)[1].verdict == "inconclusive"
    # One of three trainings of each of twenty arms.
    assert judged(3, 1, arms=5)[1].verdict == "inconclusive" and judged(3, 1, arms=20)[1].verdict == "regressed"
    cells, finding = judged(10, 4)
    expected = stats.boschloo_exact([[4, 0], [6, 10]], alternative="greater").pvalue
    assert (
        f"adjusted p {2 * expected:.2g}" in finding.sentence
        and "4 of 10 were lost or collapsed, 0 of 10" in finding.sentence
    )
    assert cells[0].verdict == "inconclusive"
    assert cells[0].reason == "4 of 10 trainings were lost or collapsed (0 collapsed), 0 of 10 in the baseline"
    fisher = stats.fisher_exact([[3, 1], [2, 1999]], alternative="greater").pvalue
    assert replicates.boschloo_p((1, 3), (2000, 5)) == pytest.approx(fisher, rel=1e-9)


def test_reason_has_count_of_newly_collapsed_trainings() -> None:
    """Its margin alone would let the cell pass."""
    old, new = 0.9 + 0.01 * np.random.default_rng(0).normal(size=(2, 10))
    new[:4] = 0.1
    sound = pair([*old], [*old[:9]], lost=(0, 1), arm="sound")
    [cell, _], _ = judge_all([pair([*old], [*new], margin=1.0, arm="rope"), sound])
    assert (
        cell.verdict != "pass"
        and "4 of 10 trainings were lost or collapsed (4 collapsed), 0 of 10 in the baseline" in cell.reason
    )


def test_metrics_of_one_training_count_once() -> None:
    sound = [0.90, 0.91, 0.89, 0.905, 0.895, 0.9, 0.91, 0.9]
    half = pair(sound, [0.1, 0.1, 0.1, *sound[3:]], margin=1.0)
    _, [finding] = judge_all([half, replace(half, metric="val/loss")])
    assert "3 of 8 were lost or collapsed, 0 of 8" in finding.sentence


def test_lost_and_collapsed_seeds_offset_each_other() -> None:
    """A seed that was lost and collapses now, or the reverse, is one without a usable value before and after."""
    sound = [0.90, 0.91, 0.89, 0.905, 0.895, 0.9]
    collapsed = [*sound, 0.1]
    for pairs, expected in (
        (pair(sound, collapsed, lost=(1, 0), margin=1.0), "pass"),
        (pair(collapsed, sound, lost=(0, 1), margin=1.0), "pass"),
        (pair(collapsed, collapsed, lost=(0, 1), margin=1.0), "pass"),  # of the eighth seed the baseline has nothing
        (pair([*sound, 0.9], collapsed, margin=1.0), "inconclusive"),
        (pair([*sound, 0.9], sound, lost=(0, 1), margin=1.0), "inconclusive"),
    ):
        assert judge([pairs])[0].verdict == expected


def test_collapsed_majority_of_three_is_found_and_whole_drop_is_none() -> None:
    sound = [0.90, 0.91, 0.89]
    (two,) = judge([pair(sound, [0.1, 0.11, 0.9], margin=1.0)])
    assert (two.lost_or_collapsed, two.collapsed) == ((0, 2), (0, 2))
    (whole,) = judge([pair(sound, [0.1, 0.11, 0.095], margin=0.02, min_abs=0.01)])
    assert (
        whole.lost_or_collapsed == (0, 0)
        and whole.verdict == "regressed"
        and whole.worse_by == pytest.approx(0.9 - 0.305 / 3)
    )
    # Where every fifth training collapses, those of one arm of twenty may do so by chance.
    sides_SN = 0.9 + 0.01 * np.random.default_rng(0).normal(size=(38, 3))
    sides_SN[:, 2] = 0.1
    others = [pair([*old], [*new], margin=1.0) for old, new in zip(sides_SN[::2], sides_SN[1::2], strict=True)]
    again = judge([pair(sound, [0.1, 0.11, 0.095], margin=0.02, min_abs=0.01), *others])[0]
    assert again.verdict == "inconclusive" and again.p == pytest.approx(((38 + 1) / (117 + 1)) ** 3)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_false_alarms_with_collapses_are_rare(lost: bool) -> None:
    """A fifth of all trainings collapses, or is lost, on both sides: the worst cell of docs/pages/statistics_appendix.md."""
    draws, count, seeds, arms = np.random.default_rng(4), 500, 3, 20
    values_SA2N = draws.normal(size=(count, arms, 2, seeds))
    bad = draws.random(values_SA2N.shape) < 0.2
    values_SA2N = np.where(bad, math.nan if lost else values_SA2N - 50, values_SA2N)
    sd = capped_pooled_sd(values_SA2N[:, :, 0], sign=1)[:, None]
    judged = judge_arrays(values_SA2N, bad & lost, cells_of(arms, 2 * sd, sd), alpha=0.05)
    verdicts = np.maximum(judged.verdict.max(axis=1), judged.count_verdict)
    assert (verdicts == REGRESSED).mean() <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / count)


def test_margin_does_not_grow_with_outlying_seed() -> None:
    draws = np.random.default_rng(1)
    seeds = [*(0.9 + 0.007 * draws.normal(size=9)), 0.1]
    assert np.std(seeds, ddof=1) > 0.2
    sound = pytest.approx(np.std(seeds[:9], ddof=1))

    def robust(seeds: list[float]) -> float:
        return float(capped_pooled_sd(np.array([[seeds]]), sign=1)[0])

    assert robust(seeds) == robust(seeds[:9]) == sound
    assert robust([*seeds[:9], 1.7]) < 5 * np.std(seeds[:9], ddof=1)  # far above: no collapse
    assert robust([1.0, 1.0, 1.0, 2.0]) == pytest.approx(0.5)  # steps have no median distance


@pytest.mark.parametrize("collapsed", [(), (9,), (2, 9)])
def test_collapsed_seed_of_baseline_does_not_hide_drop(collapsed: tuple[int, ...]) -> None:
    """One collapsed seed among ten: a loss of ten points of the others is a regression, and none is a pass."""
    draws = np.random.default_rng(2)
    old, same = 0.9 + 0.007 * draws.normal(size=(2, 10))
    old[list(collapsed)] = 0.1
    same[list(collapsed[:1])] = 0.1

    def verdict(new: np.ndarray) -> Cell:
        sides = (values(seeds=0, a=[0.0]), values(seeds=0, a=[0.0]))
        stored, fresh = (
            side.model_copy(update={"metrics": {"val/accuracy": {"a": dict(enumerate(numbers.tolist()))}}})
            for side, numbers in zip(sides, (old, new), strict=True)
        )
        [cell], _, _ = train_and_judge(study(seeds=10), stored, lambda more, arms: fresh)
        return cell

    other = np.where(old < 0.5, 0.2, old)
    assert (verdict(other).test == "identical") is (not collapsed), "equal but for collapsed seeds is not identical"
    assert verdict(old).test == "identical"
    lost, kept = verdict(same - 0.1), verdict(same)
    assert lost.verdict == "regressed" and 0.08 < lost.worse_by < 0.12 and lost.collapsed[0] == len(collapsed)
    assert kept.verdict == "pass" and kept.margin < 0.03
