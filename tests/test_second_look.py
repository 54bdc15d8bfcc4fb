"""Two looks at one study: what they cost, what gets more seeds, and that nobody has to remember either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

import vitlab
from vitlab import lab
from vitlab.errors import SpecError
from vitlab.plan.registration import changes, registered, registration
from vitlab.plan.values import Arm, Looks, Plan
from vitlab.report.judgement import judge
from vitlab.report.render import _Made
from vitlab.spec import Analysis, Study

FIRST, SECOND = tuple(range(5)), tuple(range(10))


def study(folder: Path, seeds: Any, **changes: Any) -> Path:
    """A tiny study: an arm that computes what the baseline does, for nothing is ever clipped, and one that does not."""
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


def holm(p: list[float]) -> list[float]:
    """Holm's corrected p values by their definition."""
    order = sorted(range(len(p)), key=p.__getitem__)
    found = dict[int, float]()
    worst = 0.0
    for rank, index in enumerate(order):
        worst = max(worst, (len(p) - rank) * p[index])
        found[index] = min(1.0, worst)
    return [found[index] for index in range(len(p))]


@pytest.fixture
def values() -> dict[str, dict[int, float]]:
    """Ten seeds of three arms: far from the baseline, a little away from it, and not."""
    draws = np.random.default_rng(3)
    means = {"baseline": 0.8, "far": 0.5, "near": 0.83, "level": 0.8}
    return {arm: dict(enumerate(mean + draws.normal(0, 0.02, 10))) for arm, mean in means.items()}


def judged(values: dict[str, dict[int, float]], open_: tuple[str, ...], waiting: int = 0) -> dict[str, dict[str, Any]]:
    compared = {arm: "baseline" for arm in values if arm != "baseline"}
    plan = Plan("s", "", tuple(Arm(arm, {}, compared.get(arm)) for arm in values), (), Analysis())
    plan = Plan(**{**vars(plan), "looks": Looks(FIRST, SECOND, open_)})
    return judge(plan, compared, values, {}, {}, dict.fromkeys(compared, waiting))


def test_either_look_spends_half_of_alpha_over_the_whole_family(values):
    rows = judged(values, ("near", "level"))
    base = values["baseline"]

    def p(arm: str, seeds: tuple[int, ...]) -> float:
        return float(stats.ttest_rel([values[arm][s] for s in seeds], [base[s] for s in seeds]).pvalue)

    first = holm([p(arm, FIRST) for arm in ("far", "near", "level")])
    second = holm([1.0, p("near", SECOND), p("level", SECOND)])  # what is decided says nothing any more
    assert rows["far"]["p_corrected"] == pytest.approx(2 * first[0])
    assert rows["near"]["p_corrected"] == pytest.approx(min(1, 2 * second[1]))
    assert rows["level"]["p_corrected"] == pytest.approx(min(1, 2 * second[2]))
    assert [(rows[arm]["look"], rows[arm]["pairs"]) for arm in rows] == [(1, 5), (2, 10), (2, 10)]
    for arm, seeds in (("far", FIRST), ("near", SECOND)):
        d = [values[arm][seed] - base[seed] for seed in seeds]
        low, high = stats.t.interval(1 - 0.05 / 2 / 3, len(d) - 1, np.mean(d), stats.sem(d))
        assert (rows[arm]["difference_low"], rows[arm]["difference_high"]) == pytest.approx((low, high))


def test_until_all_further_seeds_have_ended_the_first_look_is_what_was_seen(values):
    before, under_way = judged(values, ()), judged(values, ("near",), waiting=1)
    assert {arm: row["difference"] for arm, row in under_way.items()} == {
        arm: row["difference"] for arm, row in before.items()
    }
    assert under_way["near"]["look"] == 1 and under_way["near"]["awaited"] == 1


def test_what_the_first_look_leaves_open_is_trained_on_and_what_it_settles_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(_Made, "figures", lambda self: {})
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
    kept = json.loads((answer.folder / "plan.json").read_text())
    assert kept["looks"] == {"first": [0, 1], "second": [0, 1, 2, 3], "open": ["other"]}
    assert (kept["registered"]["seeds"], kept["registered"]["escalate_to"]) == ([0, 1], 4)

    report = (answer.folder / "report" / "report.md").read_text()
    assert "Two looks share alpha, at 2 seeds and at 4" in report and "The first left other open" in report
    assert "xploratory" not in report and "reliminary" not in report and "no value on one side" not in report
    table = vitlab.compare(file, out=out).set_index("arm")
    assert table.loc["other", ["look", "pairs"]].tolist() == [2, 4]
    assert table.loc["same", ["look", "pairs"]].tolist() == [1, 2]

    again = lab.run(file, out=out)
    assert (again.trained, again.cached) == (0, 10) and again.plan.looks == answer.plan.looks
    made = json.loads((again.folder / "report" / "report.json").read_text())["made"]
    assert (made["trained"], made["cached"]) == (0, 10)


def test_a_second_look_that_was_thought_of_later_is_exploratory(tmp_path):
    _, before = lab.plan_study(study(tmp_path, 2), out=tmp_path)
    _, after = lab.plan_study(study(tmp_path, {"count": 2, "escalate_to": 3}), out=tmp_path)
    earlier = {**before.to_json(), "registered": registration(before)}
    assert changes(registered(after, earlier, lambda key, code: True)) == ["escalate_to was none and is 3"]
    assert changes(registered(after, earlier, lambda key, code: False)) == []


def test_seeds_that_make_no_sense_are_refused_where_they_stand(tmp_path):
    def refusal(seeds: Any, **changes: Any) -> str:
        with pytest.raises(SpecError) as caught:
            lab.plan_study(study(tmp_path, seeds, **changes), out=tmp_path)
        return str(caught.value)

    said = refusal({"count": 5, "escalate_to": 5})
    assert "more than the 5 of the first look" in said and "tiny.yaml" in said
    assert "compares nothing" in refusal({"count": 2, "escalate_to": 4}, analysis={"compare": "none"})
    assert "at most" in refusal({"count": 2, "escalate_to": 900_000})


def test_further_seeds_are_the_smallest_others():
    base = {"data": "digits", "model": "vit", "train": {"steps": 1}}
    made = Study.model_validate({"study": "s", "base": base, "seeds": {"values": [7, 1], "escalate_to": 5}})
    assert made.seeds.all == (7, 1, 0, 2, 3)
    assert Study.model_validate({"study": "s", "base": base, "seeds": 3}).seeds.all == (0, 1, 2)
