"""Tests of power laws, fronts, main effects and interactions of synthetic studies against numpy, statsmodels and brute force."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.anova import AnovaRM

from vitlab import report
from vitlab.comparison.study import Sample
from vitlab.identity.trial import Trial
from vitlab.planning.values import Arm, Plan, Planned
from vitlab.report import Report, comparison
from vitlab.report.frame import StudyResults
from vitlab.report.notebook import Comparison
from vitlab.report.sections import Findings, all_sections, interactions
from vitlab.report.sections.cost import SPEEDS, MeasuredCost, write_costs
from vitlab.spec import STREAMS, Analysis, Choice, TrainSpec, TrialSpec
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Outcome, TrialResult

SPEC = TrialSpec(data=Choice("digits"), model=Choice("vit"), train=TrainSpec(steps=1))


def study(
    root: Path, arms: Mapping[str, tuple[Mapping[str, Any], list[float], int, float]], analysis: Analysis | None = None
) -> tuple[Plan, Store]:
    """Return a study from arms with values, results of seeds, parameters and seconds per trial."""
    store, planned = Store(root), []
    for name, (_, values, params, wall_s) in arms.items():
        for seed, value in enumerate(values):
            trial = Trial(SPEC, {**dict.fromkeys(STREAMS, seed), "split": 0}, (), "d", key=f"{name}-{seed}")
            planned.append(Planned(name, seed, trial))
            around = Circumstances(1.7e9, wall_s, "host", 1, params, 10 * params, 10**8, {}, {})
            outcome = Outcome({"val/accuracy": value}, (), "w", 10, 640)
            store.trial(trial.key, trial.code).write_result(
                TrialResult(trial.key, trial.code, "done", outcome, around, "")
            )
    first = next(iter(arms))
    named_arms = tuple(Arm(name, values, None if name == first else first) for name, (values, *_) in arms.items())
    return Plan("trade", "", named_arms, tuple(planned), analysis or Analysis()), store


def findings(plan: Plan, store: Store) -> Findings:
    results = StudyResults.read(plan, store)
    return Findings(results, comparison.summary_rows(results), store)


def rows_of(name: str, plan: Plan, store: Store) -> list[Any]:
    """Return the rows of a section of a report."""
    return list(all_sections()[name].rows(findings(plan, store)))


def test_numeric_arms_get_law_only_where_study_asks(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = {16: 10_000, 32: 40_000, 64: 160_000}
    arms = {}
    for kind, dim in itertools.product(("learned", "none"), sizes):
        params = sizes[dim]
        values = 1 - (2.0 if kind == "none" else 1.0) * params**-0.3 * np.exp(random.normal(0, 0.02, 4))
        arms[f"{kind} {dim}"] = ({"model.dim": dim, "model.position": kind}, values.tolist(), params, 1.0)
    assert rows_of("scaling", *study(tmp_path, arms)) == []
    asked = Analysis(power_law="params")
    plan, store = study(tmp_path, arms, asked)
    rows = rows_of("scaling", plan, store)
    assert [(row.size, row.series, row.seeds) for row in rows] == [("params", "learned", 4), ("params", "none", 4)]
    for row in rows:
        log_x = np.log([arms[arm][2] for arm in row.arms])
        logs = np.log([1 - np.array(arms[arm][1]) for arm in row.arms])
        slopes = [stats.linregress(log_x, logs[:, seed]).slope for seed in range(4)]
        interval = stats.ttest_1samp(slopes, 0).confidence_interval()
        assert (row.slope, row.slope_low, row.slope_high) == pytest.approx((np.mean(slopes), *interval))
        assert row.offset is None and row.exponent is None, "three sizes show no offset"
    # Another learning rate of one size is no replicate of that size, and has no law of its own.
    faster = {
        f"lr {name}": ({**values, "train.lr": 0.1}, [0.1, 0.2], params, wall)
        for name, (values, _, params, wall) in itertools.islice(arms.items(), 1)
    }
    slow = {name: ({**values, "train.lr": 0.001}, *rest) for name, (values, *rest) in arms.items()}
    plan, store = study(tmp_path / "lr", slow | faster, asked)
    again = rows_of("scaling", plan, store)
    assert [(row.arms, row.slope) for row in again] == [(row.arms, row.slope) for row in rows]
    assert again[0].series == "learned, lr=0.001"


@pytest.mark.parametrize(
    ("sizes", "error", "reason"),
    [
        ((1000, 2000), 0.2, "it has 2 different numbers of parameters, and two lie on every power law"),
        ((1000, 1100, 1200), 0.2, "the largest number of parameters is less than 2 times the smallest"),
        ((1000, 2000, 4000), 0.0, "an error of 0 has no logarithm"),
    ],
)
def test_missing_law_has_reason(sizes: tuple[int, ...], error: float, reason: str, tmp_path: Path) -> None:
    arms = {f"dim={size}": ({"model.dim": size}, [1 - error, 0.7], size, 1.0) for size in sizes}
    plan, store = study(tmp_path, arms, Analysis(power_law="params"))
    assert rows_of("scaling", plan, store) == []
    assert list(all_sections()["scaling"].notes([], findings(plan, store))) == [f"No law over parameters: {reason}."]
    assert not list(all_sections()["scaling"].notes([], findings(*study(tmp_path / "unasked", arms))))


def test_error_of_three_sizes_that_is_not_shown_to_fall_is_noted(tmp_path: Path) -> None:
    for falls in (False, True):
        arms = {}
        for place, size in enumerate((1000, 2000, 4000)):
            errors = [0.4 * 0.5 ** (falls * place) + shift * place for shift in (0.01, -0.01, 0.002)]
            arms[f"dim={size}"] = ({"model.dim": size}, [1 - error for error in errors], size, 1.0)
        plan, store = study(tmp_path / str(falls), arms, Analysis(power_law="params"))
        found = findings(plan, store)
        section = all_sections()["scaling"]
        [row] = section.rows(found)
        assert (row.slope_high < 0) == falls
        noted = "The error is not shown to fall with parameters, so no exponent is fitted." in section.notes(
            [row], found
        )
        assert noted != falls
        table = report.collect_report(plan, store).table("scaling")
        assert table.caveat.startswith("Power law of 1 \u2212 val/accuracy over parameters, fitted to logarithms")


def test_offset_is_claimed_only_where_sizes_show_it(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    sizes = np.geomspace(1_000, 64_000, 6)
    for name, offset in (("levels off", 0.05), ("keeps falling", 0.0)):
        arms = {}
        for size in sizes:
            errors = (offset + 8 * size**-0.5) * np.exp(random.normal(0, 0.01, 5))
            arms[f"{size:.0f}"] = ({"model.dim": int(size)}, (1 - errors).tolist(), int(size), 1.0)
        plan, store = study(tmp_path / name, arms, Analysis(power_law="params"))
        found = findings(plan, store)
        [row] = all_sections()["scaling"].rows(found)
        assert row.offset_low <= offset <= row.offset_high and row.exponent_low <= 0.5 <= row.exponent_high
        assert row.levels_off is (offset > 0)
        notes = list(all_sections()["scaling"].notes([row], found))
        assert any("cannot tell whether the error keeps falling or levels off" in note for note in notes) is not (
            row.levels_off
        )


def test_front_has_arms_not_beaten_in_both(tmp_path: Path) -> None:
    arms = {
        "small": ({}, [0.70, 0.72], 100, 1.0),
        "waste": ({}, [0.69, 0.70], 200, 4.0),
        "middle": ({}, [0.80, 0.81], 300, 2.0),
        "large": ({}, [0.80, 0.80], 400, 3.0),
    }
    front = rows_of("fronts", *study(tmp_path, arms))
    expected = {"small": True, "waste": False, "middle": True, "large": False}
    assert [(row.cost, row.arm, row.on_front) for row in front] == [
        (cost, *item) for cost in ("macs", "params") for item in expected.items()
    ]
    assert [(row.value, row.mean) for row in front[:4]] == [
        (10 * size, np.mean(seeds)) for _, seeds, size, _ in arms.values()
    ]
    same = {name: (values, reached, 100, wall_s) for name, (values, reached, _, wall_s) in arms.items()}
    plan, store = study(tmp_path / "same", same)
    found = findings(plan, store)
    assert not list(all_sections()["fronts"].rows(found))
    costs = []
    for arm, speed in zip(plan.arms, (400.0, 100.0, 300.0, 200.0), strict=True):
        speeds = {f"{name}{end}": speed if name[0] == "t" else 1.0 for name in SPEEDS for end in ("", "_q1", "_q3")}
        text = dict.fromkeys(("code", "device", "processor", "precision", "torch", "measured"), "")
        numbers = dict.fromkeys(("rounds", "peak_bytes", "threads", "batch_size", "load"), 1)
        costs.append(MeasuredCost(arm=arm.name, trial=f"{arm.name}-0", **text, **numbers, **speeds))
    write_costs(costs, plan, store)
    shown = str(Comparison.of(report.collect_report(plan, store)).tables["cost"])
    assert all(name in shown.splitlines()[0] for name in (*SPEEDS, "peak_bytes"))
    rows = all_sections()["fronts"].rows(found)
    measured = [(row.cost, row.arm, row.on_front) for row in rows]
    assert measured == [("train_images_per_s", *item) for item in expected.items()], "measured of each arm alone"
    sized = findings(*study(tmp_path / "same", arms))  # its fronts of MACs and of speed are the same
    assert [row.cost for row in all_sections()["fronts"].rows(sized)] == ["train_images_per_s"] * 4 + ["macs"] * 4 + [
        "params"
    ] * 4


def test_front_arms_with_diverged_seeds_are_marked(tmp_path: Path) -> None:
    arms = {name: ({}, [0.7 + size / 1e4] * 3, size, 1.0) for name, size in (("small", 100), ("large", 400))}
    plan, store = study(tmp_path, arms)
    for seed in (1, 2):
        folder = store.trial(f"large-{seed}", "")
        result = folder.result()
        assert result is not None
        folder.write_result(replace(result, status="diverged", outcome=replace(result.outcome, metrics={})))
    content = report.collect_report(plan, store)
    _, arms_on_front = all_sections()["fronts"].table(content.sections["fronts"], content).columns
    assert set(arms_on_front.cells) == {"small; large (2 lost seeds)"}


def test_front_names_every_arm_once_by_a_sign_of_its_own(tmp_path: Path) -> None:
    arms = {f"arm {index}": ({}, [0.8 + 0.001 * index] * 2, 100 + 40 * (index % 3), 1.0) for index in range(9)}
    arms |= {f"waste {index}": ({}, [0.1, 0.2], 900, 1.0) for index in range(6)}
    for number, expected in ((9, list(arms)[:9]), (15, ["arm 6", "arm 7", "arm 8"])):
        found = findings(*study(tmp_path / str(number), dict(itertools.islice(arms.items(), number))))
        part = all_sections()["fronts"]
        drawn = part.figure(list(part.rows(found)), found).figure
        [legend] = drawn.legends
        assert [text.get_text() for text in legend.get_texts()] == expected, "of many arms, those on a front"
        signs = {(line.get_marker(), line.get_color()) for line in legend.get_lines()}
        assert len(signs) == len(expected)
        dots = [line for line in drawn.axes[0].lines if line.get_linestyle() == "None"]
        assert len(dots) == number


def test_grid_interaction_equals_repeated_measures_anova(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    arms, rows = {}, []
    for a, b in itertools.product((0, 1), ("x", "y")):
        values = random.normal(0.8 + 0.02 * a + 0.04 * a * (b == "y"), 0.01, 6)
        arms[f"{a}{b}"] = ({"model.depth": a, "model.mlp": b}, values.tolist(), 100, 1.0)
        rows += [{"seed": seed, "a": a, "b": b, "y": value} for seed, value in enumerate(values)]
    table = AnovaRM(pd.DataFrame(rows), "y", "seed", within=["a", "b"]).fit().anova_table
    plan, store = study(tmp_path, arms)
    [interaction] = rows_of("interactions", plan, store)
    assert (interaction.first, interaction.second, interaction.pairs) == ("model.depth=1", "model.mlp=y", 6)
    assert interaction.p == interaction.p_corrected == pytest.approx(table.loc["a:b", "Pr > F"])
    mean = {name: np.mean(values) for name, (_, values, *_) in arms.items()}
    assert interaction.difference == pytest.approx(mean["1y"] - mean["1x"] - mean["0y"] + mean["0x"])
    one_at_a_time = {name: arm for name, arm in arms.items() if name != "1y"}
    plan, store = study(tmp_path / "one", one_at_a_time)
    assert rows_of("interactions", plan, store) == []


def test_third_factor_is_averaged_and_levels_form_a_family(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    arms = {}
    for a, b, c in itertools.product((0, 1, 2), ("x", "y"), (8, 9)):
        values = random.normal(0.5, 0.01, 5)
        arms[f"{a}{b}{c}"] = ({"model.a": a, "model.b": b, "model.c": c}, values.tolist(), 100, 1.0)
    plan, store = study(tmp_path, arms)
    rows = rows_of("interactions", plan, store)
    assert len(rows) == 2 + 2 + 1 and {row.family for row in rows} == {5}

    def value(a: int, b: str, c: int) -> Any:
        return np.array(arms[f"{a}{b}{c}"][1])

    per_seed = np.mean(
        [value(2, "y", c) - value(2, "x", c) - value(0, "y", c) + value(0, "x", c) for c in (8, 9)], axis=0
    )
    row = next(row for row in rows if (row.first, row.second) == ("model.a=2", "model.b=y"))
    reference = stats.ttest_1samp(per_seed, 0.0)
    interval = reference.confidence_interval(1 - 0.05 / 5)
    assert (row.p, row.low, row.high) == pytest.approx((reference.pvalue, interval.low, interval.high))


def grid_arms(levels: Mapping[str, list[Any]], seeds: int = 5) -> dict[str, Any]:
    """Return the arms of a grid with random results, by their values joined."""
    random = np.random.default_rng(7)
    return {
        "".join(map(str, values)): (
            dict(zip(levels, values, strict=True)),
            random.normal(0.5 + 0.02 * values[0], 0.01, seeds).tolist(),
            100,
            1.0,
        )
        for values in itertools.product(*levels.values())
    }


def test_main_effects_equal_repeated_measures_anova(tmp_path: Path) -> None:
    arms = grid_arms({"model.a": [0, 1], "model.b": ["x", "y"]}, seeds=6)
    rows = [{"seed": s, "a": n[0], "b": n[1], "y": v} for n, arm in arms.items() for s, v in enumerate(arm[1])]
    table = AnovaRM(pd.DataFrame(rows), "y", "seed", within=["a", "b"]).fit().anova_table
    first, second = rows_of("main_effects", *study(tmp_path, arms))
    assert (first.level, first.against, first.settings, first.pairs) == ("model.a=1", "model.a=0", 2, 6)
    assert first.p_corrected == pytest.approx(min(1.0, 2 * table.loc["a", "Pr > F"]))
    assert second.p_corrected == pytest.approx(min(1.0, 2 * table.loc["b", "Pr > F"]))
    assert (first.verdict, second.verdict) == ("better", "cannot tell")
    mean = {name: np.mean(values) for name, (_, values, *_) in arms.items()}
    assert first.difference == pytest.approx((mean["1x"] - mean["0x"] + mean["1y"] - mean["0y"]) / 2)


def test_main_effect_is_averaged_over_settings_that_have_both_levels(tmp_path: Path) -> None:
    arms = grid_arms({"model.a": [0, 1, 2], "model.b": ["x", "y"], "model.c": [8, 9]})
    plan, store = study(tmp_path, arms, Analysis(variance="own"))
    plan = replace(plan, arms=tuple(replace(arm, skip="too wide" * (arm.name == "2y9")) for arm in plan.arms))
    effects = {row.level: row for row in rows_of("main_effects", plan, store)}
    assert {level: row.settings for level, row in effects.items()} == {
        "model.a=1": 4,
        "model.a=2": 3,
        "model.b=y": 5,
        "model.c=9": 5,
    }
    of_seeds = np.mean([np.subtract(arms[f"2{b}"][1], arms[f"0{b}"][1]) for b in ("x8", "x9", "y8")], axis=0)
    reference, row = stats.ttest_1samp(of_seeds, 0.0), effects["model.a=2"]
    interval = reference.confidence_interval(1 - 0.05 / 4)
    assert (row.p_corrected, row.low, row.high) == pytest.approx((4 * reference.pvalue, interval.low, interval.high))
    [one] = [item.trial for item in plan.trials if (item.arm, item.seed) == ("2x8", 0)]
    (store.folder(one).path / "result.json").unlink()
    assert {row.level: row.pairs for row in rows_of("main_effects", plan, store)} == {
        **dict.fromkeys(effects, 4),
        "model.a=1": 5,
    }
    store.folder(one).write_failure("lost")
    lost = {row.level: row.verdict for row in rows_of("main_effects", plan, store)}
    assert effects["model.a=2"].verdict == "better" and lost["model.a=2"] == "cannot tell", "chance is not known"


def test_main_effect_with_collapsed_seeds_has_no_interval(tmp_path: Path) -> None:
    arms = grid_arms({"model.a": [0, 1], "model.b": [0, 1]}, seeds=6)
    arms["11"][1][0] = 0.1
    plan, store = study(tmp_path, arms)
    row = rows_of("main_effects", plan, store)[0]
    assert row.low is None and row.p_corrected is not None
    made, warning = report.collect_report(plan, store), "these numbers include collapsed seeds: 11 (1 of 6)."
    assert any(warning in answer for answer in made.answers)
    for form in ("terminal", "md", "html", "latex", "latex-all"):
        assert str(made.render(form)).count("these numbers include collapsed seeds") > 2, form
    summary = {row["arm"]: (row["low"], row["high"]) for row in made.to_json()["arms"]}
    assert summary["11"] == (None, None) and None not in summary["10"], "one rule for the page and the files"


def test_answer_says_how_large_an_interaction_that_is_not_shown_may_be(tmp_path: Path) -> None:
    arms = grid_arms({"model.a": [0, 1], "model.b": [0, 1]})
    plan, store = study(tmp_path, arms)
    both, one, other, neither = (np.array(arms[name][1]) for name in ("11", "10", "01", "00"))
    interval = stats.ttest_1samp(both - one - other + neither, 0.0).confidence_interval(0.95)
    assert interval.low < 0 < interval.high
    sentence = next(line for line in report.collect_report(plan, store).answers if "interact" in line)
    said = re.match(
        r"a=1 and b=1 are not shown to interact: together they make (\S+) (?:points )?(more|less) than the sum of both "
        r"alone \(95 % interval (\S+) to (\S+), p = \S+\)\.$",
        sentence,
    )
    assert said is not None
    estimate, low, high = (float(number.replace("\N{MINUS SIGN}", "-")) for number in said.group(1, 3, 4))
    [row] = rows_of("interactions", plan, store)
    factor = 100 if "points" in sentence else 1
    assert (low, high) == pytest.approx((factor * interval.low, factor * interval.high), rel=0.2)
    difference = float((both - one - other + neither).mean())
    assert (estimate if said[2] == "more" else -estimate) == pytest.approx(factor * difference, abs=0.06)
    assert (row.difference, row.low, row.high) == pytest.approx((difference, interval.low, interval.high))
    made = report.collect_report(plan, store)
    added = [{**arm, "exploratory": "added" if arm["arm"] == "11" else None} for arm in made.arms]
    assert not any("exploratory" in line for line in made.answers)
    hedged = replace(made, arms=added, answers=[])
    assert [answer.sentence.startswith("exploratory: ") for answer in hedged.all_answers][:3] == [True] * 3
    titles = {"main_effects": "main effect", "interactions": "interaction"}
    for name in titles:
        plain, table = made.table(name), hedged.table(name)
        assert plain and table and titles[name] in {column.title for column in plain.columns}
        assert f"exploratory {titles[name]}" in {column.title for column in table.columns}
    floor = replace(made, arms=[{**arm, "at_chance": 0.1 if arm["arm"] == "01" else None} for arm in made.arms])
    warning = "Not shown to be better than chance: 01. A difference may say only that these did not learn."
    assert [warning in answer.sentence for answer in replace(floor, answers=[]).all_answers].index(True) == 0
    assert not any(warning in answer for answer in made.answers)
    for form in ("terminal", "md", "html", "latex"):
        assert warning in " ".join(str(floor.render(form)).split()), form
    wider = report.collect_report(*study(tmp_path / "wider", grid_arms({"model.a": [0, 1], "model.b": [0, 1, 2]})))
    said = re.search(
        r"\. no interaction is shown; an effect may still differ by (\S+) to (\S+) ", ". ".join(wider.answers)
    )
    assert said is not None
    spans = [
        factor * f(getattr(row, end) for row in wider.sections["interactions"])
        for f, end in ((min, "low"), (max, "high"))
    ]
    assert [float(end.replace("\N{MINUS SIGN}", "-")) for end in said.groups()] == pytest.approx(spans, rel=0.2)
    (store.folder(plan.trials[0].trial).path / "result.json").unlink()
    store.folder(plan.trials[0].trial).write_failure("lost")
    answers = report.collect_report(plan, store).answers
    assert any("1 cannot be judged, because seeds are too few, collapsed or lost" in line for line in answers)


def test_main_effects_are_of_crossed_arms_alone(tmp_path: Path) -> None:
    arms = grid_arms({"model.a": [0, 1], "model.b": [0, 1]})
    plan, store = study(tmp_path / "one", {name: arm for name, arm in arms.items() if name != "11"})
    assert rows_of("main_effects", plan, store) == []
    plan, store = study(tmp_path, arms)
    control = Arm("control", plan.arms[0].values, "00", is_control=True)
    with_control = replace(plan, arms=(*plan.arms, control))
    assert rows_of("main_effects", with_control, store) == rows_of("main_effects", plan, store)
    assert rows_of("interactions", with_control, store) == rows_of("interactions", plan, store)
    in_blocks = replace(plan, arms=tuple(replace(arm, block="digits") for arm in plan.arms))
    assert rows_of("main_effects", in_blocks, store) == []


def test_crossed_table_has_mean_and_interval_of_every_arm(tmp_path: Path) -> None:
    arms = grid_arms({"model.b": [0, 1], "model.a": [0, 1, 2]})
    del arms["12"]
    report = Report.from_findings(findings(*study(tmp_path, arms)), [])
    table = report.table("crossed")
    assert table is not None
    assert [column.title for column in table.columns] == ["b", "a=0", "a=1", "a=2"]
    cells = {f"{b}{a}": table.columns[1 + a].cells[b] for b in (0, 1) for a in (0, 1, 2)}
    assert cells.pop("12") == "" and table.columns[0].cells == ("0", "1") and "model.b and model.a" in table.caption
    for arm, cell in cells.items():
        interval = stats.ttest_1samp(arms[arm][1], 0.0).confidence_interval()
        expected = np.mean(arms[arm][1]), interval.low, interval.high
        [row] = [row for row in report.sections["crossed"] if row.arm == arm]
        assert (row.mean, row.low, row.high) == pytest.approx(expected)
        assert [float(one) for one in re.findall(r"[\d.]+", cell)] == pytest.approx(expected, abs=6e-4)
    for name in ("main_effects", "interactions"):  # paths stand in captions alone
        table = report.table(name)
        assert table is not None and "model.a" in table.caption
        assert not any("model" in cell for column in table.columns for cell in column.cells)


@pytest.mark.parametrize(
    "levels",
    [
        {"model.a": [0, 1]},
        {"model.a": [0, 1], "model.b": [*range(5)]},
        {"model.a": [0, 1], "model.b": [0, 1], "model.c": [0, 1]},
    ],
)
def test_other_grids_have_no_crossed_table(levels: dict[str, list[Any]], tmp_path: Path) -> None:
    plan, store = study(tmp_path, grid_arms(levels, seeds=1))
    assert rows_of("crossed", plan, store) == []


def test_interaction_is_said_to_make_main_effects_averages_of_unlike_ones(tmp_path: Path) -> None:
    arms = grid_arms({"model.a": [0, 1], "model.b": [0, 1]})
    answers = []
    for folder, more in (("none", 0.0), ("some", 0.2)):
        arms["11"][1][:] = [value + more for value in arms["11"][1]]
        found = findings(*study(tmp_path / folder, arms))
        answers.append(Report.from_findings(found, []).answers)
    assert not any("b=1 interact: " in answer for answer in answers[0])
    assert answers[1][2].startswith("a=1 and b=1 interact: together they make 0.1")


def test_answers_of_a_grid_begin_with_its_main_effects(tmp_path: Path) -> None:
    arms = grid_arms({"model.a": [0, 1], "model.b": ["x", "y"]}, seeds=6)
    found = findings(*study(tmp_path, arms, Analysis(correction="none", variance="own")))
    answered = Report.from_findings(found, [])
    mean = np.mean([np.subtract(arms[f"1{b}"][1], arms[f"0{b}"][1]) for b in "xy"], axis=0)
    interval = stats.ttest_1samp(mean, 0.0).confidence_interval()
    numbers = re.findall(r"-?\d\.\d+", answered.answers[0].replace("\N{MINUS SIGN}", "-"))
    assert answered.answers[0].startswith("Main effect of a, averaged over 2 settings of the other factors: a=1 is 0.0")
    assert answered.answers[1].endswith("cannot tell).")
    assert [float(one) for one in numbers[:3]] == pytest.approx([mean.mean(), interval.low, interval.high], abs=1e-3)
    [axes] = answered.figures["main_effects"].figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a=1", "b=y"]
    _, *lines = axes.lines
    assert list(lines[0].get_xdata()) == pytest.approx([interval.low, interval.high])
    assert float(lines[1].get_xdata()[0]) == pytest.approx(mean.mean())


def simulated(arms: int, seeds: int, studies: int, best: float = 0.0) -> Iterator[dict[str, Sample]]:
    """Yield the samples of studies whose arms are alike but for the last, with noise that all arms share."""
    random = np.random.default_rng(11)
    for _ in range(studies):
        values = random.normal(0.5, 0.01, (arms, seeds)) + random.normal(0, 0.01, seeds)
        values[-1] += best
        yield {str(arm): Sample(dict(enumerate(of_arm.tolist()))) for arm, of_arm in enumerate(values)}


@pytest.mark.slow
def test_main_effects_keep_their_level_where_nothing_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 3 x 4 grids with 3 seeds, at most 5 % of studies have a false main effect, but for chance."""
    arms = {str(arm): Arm(str(arm), {}) for arm in range(12)}
    results = StudyResults(Plan("null", "", tuple(arms.values()), (), Analysis()), pd.DataFrame())
    effects = [[replace(arms[f"{4 * a + b}"], baseline=f"{b}") for b in range(4)] for a in (1, 2)]
    effects += [[replace(arms[f"{4 * a + b}"], baseline=f"{4 * a}") for a in range(3)] for b in (1, 2, 3)]
    wrong = 0
    for samples in simulated(12, 3, 400):
        values = {arm: dict(sample.values) for arm, sample in samples.items()}
        monkeypatch.setattr(interactions, "samples_by_arm", lambda *_, samples=samples: samples)
        monkeypatch.setitem(vars(results), "values", values)
        wrong += any(row["verdict"] != "cannot tell" for row in interactions.judge_averages(results, effects))
    assert 2 <= wrong <= stats.binom.ppf(0.999, 400, 0.05)


def test_arms_near_best_contain_the_best_arm() -> None:
    plan = Plan("best", "", tuple(Arm(str(arm), {}) for arm in range(5)), (), Analysis())
    results = StudyResults(plan, pd.DataFrame())
    sets = [comparison._arms_near_best(results, samples, {}) for samples in simulated(5, 4, 400, best=0.004)]
    assert sum("4" in near for near in sets) >= stats.binom.ppf(0.001, 400, 0.95)
    [clear] = [comparison._arms_near_best(results, samples, {}) for samples in simulated(5, 4, 1, best=0.2)]
    assert clear == {"4"}
