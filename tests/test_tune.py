"""Tests of tuning: two stages, a stable choice, and kills, added seeds, changed arms and divergence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

import vitlab
from vitlab import report
from vitlab.cli import cli
from vitlab.driver.session import Watch
from vitlab.errors import SpecError
from vitlab.lab import Answer, plan_study
from vitlab.planning.tune import decide_tuning, knobs_at_edge
from vitlab.planning.values import Plan, Planned, Rival, Trial, Tuning
from vitlab.report.api import open_study
from vitlab.spec import Analysis, Choice, TrainSpec, TrialSpec
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Measurement, Outcome, TrialResult

pytestmark = pytest.mark.usefixtures("no_report", "unreachable_tracker")
NOWHERE = "http://127.0.0.1:9"
"""Nobody listens there."""

LR = "train.optimizer.lr"
BASE: dict[str, Any] = {
    "data": {"type": "digits"},
    "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "learned"},
    "train": {"steps": 20, "batch_size": 16, "evaluations": 2, "optimizer": {"type": "adamw", "lr": 1e-3}},
}
POSITIONS = {"one_at_a_time": {"model.position": ["none"]}}
RUN = {"engine": "loop", "executor": "inline", "tracker": {"type": "mlflow", "uri": NOWHERE}, "keep": "none"}


def study(folder: Path, **changes: Any) -> Path:
    content = {"study": "tuned", "base": BASE, "design": POSITIONS, "seeds": 2, "run": RUN}
    content |= {"tune": {"knobs": {LR: [1e-3, 1e-2, 3e-2]}}, **changes}
    file = folder / "tuned.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value}, sort_keys=False))
    return file


def results(out: Path) -> set[str]:
    """Return the trials with results in a store."""
    return {file.parent.parent.name for file in out.glob("trials/*/*/result.json")}


def trained_seeds(out: Path) -> list[int]:
    """Return the seeds of all trials in a store."""
    results = map(Path.read_text, out.glob("trials/*/*/result.json"))
    return sorted(json.loads(text)["trial"]["seeds"]["init"] for text in results)


def rate(plan: Plan, arm: str) -> float:
    (value,) = {item.trial.spec.train.optimizer.options["lr"] for item in plan.trials if item.arm == arm}
    return float(value)


# -- plan -------------------------------------------------------------------------------------------------------------


def test_trials_are_pending_before_choice(tmp_path: Path) -> None:
    tune = {"knobs": {LR: [1e-3, 1e-2], "train.optimizer.weight_decay": [0.0, 0.1, 0.2]}, "seeds": 3}
    _, plan = plan_study(study(tmp_path, tune=tune), out=tmp_path)
    assert not plan.trials and [(item.arm, item.seed) for item in plan.pending] == [
        ("baseline", 0),
        ("baseline", 1),
        ("position=none", 0),
        ("position=none", 1),
    ]
    assert all(item.trial.key == "" for item in plan.pending)
    assert plan.arm("baseline").values[LR] == "pending(tune)" and plan.arm("position=none").baseline == "baseline"
    for tuning, arm in zip(plan.tuning, ["baseline", "position=none"], strict=True):
        assert tuning.arm == arm and tuning.open and len(tuning.rivals) == 6
        for rival in tuning.rivals:
            assert [item.seed for item in rival.trials] == [1_000_000, 1_000_001, 1_000_002]
            for item in rival.trials:
                optimizer = item.trial.spec.plain()["train"]["optimizer"]
                assert {LR: optimizer["lr"], "train.optimizer.weight_decay": optimizer["weight_decay"]} == rival.values
                assert item.trial.spec.train.steps == 20 and item.trial.seeds["split"] == 0
    stored = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(stored) == plan
    for rival in (rival for tuning in stored["tuning"] for rival in tuning["rivals"]):
        assert rival["spec"]["train"]["steps"] == 20
        assert not [item for item in rival["trials"] if {"spec", "trial"} & item.keys()], "its seeds share the spec"
    _, other = plan_study(study(tmp_path, tune=tune, seeds={"count": 2, "vary": ["init"]}), out=tmp_path)
    assert other.tuning[0].key != plan.tuning[0].key, "its trainings draw otherwise, and may choose otherwise"


def test_logarithmic_range_is_the_list_of_its_values(tmp_path: Path) -> None:
    def planned(**knobs: Any) -> list[Tuning]:
        return list(plan_study(study(tmp_path, tune={"knobs": knobs}), out=tmp_path)[1].tuning)

    values = [1e-4, *(float(f"{value:.3g}") for value in np.geomspace(1e-4, 3e-2, 5)[1:-1]), 3e-2]
    assert planned(**{LR: {"log": [1e-4, 3e-2], "n": 5}}) == planned(**{LR: values})
    close = {"log": [0.12345, 0.12346], "n": 4}  # three digits do not tell them apart
    assert planned(**{LR: close}) == planned(**{LR: [0.12345, 0.123453, 0.123457, 0.12346]})
    (sizes, *_) = planned(**{"train.batch_size": {"log": [8, 64], "n": 4}})
    assert [item.trial.spec.train.batch_size for item in sizes.trials[::2]] == [8, 16, 32, 64]
    for wrong in (
        {"log": [1e-2, 1e-4], "n": 4},
        {"log": [0, 1], "n": 4},
        {"log": [1, 2]},
        {"log": [1, 2], "n": 1},
        {"lo": 1},
    ):
        with pytest.raises(SpecError, match=r"allowed: a list of values, or \{log: \[LOW, HIGH\], n: N\}"):
            planned(**{LR: wrong})


def test_rival_is_trial_of_explicit_file(tmp_path: Path) -> None:
    """Tuning has no special trials: another study with these values explicitly shares them."""
    _, plan = plan_study(study(tmp_path, tune={"knobs": {LR: [1e-2]}, "per": "study"}), out=tmp_path)
    (tuning,) = plan.tuning
    optimizer = {"type": "adamw", "lr": 1e-2}
    cli_only_option = study(
        tmp_path, base={**BASE, "train": {**BASE["train"], "optimizer": optimizer}}, tune=None, seeds=1
    )
    _, other = plan_study(cli_only_option, out=tmp_path)
    assert tuning.arm is None
    assert tuning.rivals[0].trials[0].trial.spec == other.find("baseline", 0).trial.spec


def test_tuned_arms_may_vary_optimizer_but_not_rate(tmp_path: Path) -> None:
    optimizers = {"one_at_a_time": {"train.optimizer": ["sgd"]}}
    _, plan = plan_study(study(tmp_path, design=optimizers), out=tmp_path)
    assert {item.trial.spec.train.optimizer.type for item in plan.tuning[1].trials} == {"sgd"}
    for design in (
        {"one_at_a_time": {LR: [1e-2]}},
        {"one_at_a_time": {"train.optimizer": [{"type": "sgd", "lr": 0.1}]}},
    ):
        with pytest.raises(SpecError, match=r"the design sets train\.optimizer\.lr"):
            plan_study(study(tmp_path, design=design), out=tmp_path)


def test_matching_precedes_tuning(tmp_path: Path) -> None:
    design = {"one_at_a_time": {"model.patch_size": [2]}}
    match = {"quantity": "train_macs", "knob": "train.steps", "tolerance": 0.1}
    _, plan = plan_study(study(tmp_path, design=design, match=match), out=tmp_path)
    _, alone = plan_study(study(tmp_path, design=design, match=match, tune=None), out=tmp_path)
    steps = alone.find("patch_size=2", 0).trial.spec.train.steps
    assert 0 < steps < 20
    assert {item.trial.spec.train.steps for item in plan.tuning[1].trials} == {steps}
    with pytest.raises(SpecError, match="would undo the match in train_macs"):
        tune = {"knobs": {"train.batch_size": [16, 32]}}
        plan_study(study(tmp_path, design=design, match=match, tune=tune), out=tmp_path)
    with pytest.raises(SpecError, match=r"'match' solves for train\.steps"):
        plan_study(study(tmp_path, design=design, match=match, tune={"knobs": {"train.epochs": [1]}}), out=tmp_path)


def test_unsupported_values_are_refused_or_skipped_by_rule(tmp_path: Path) -> None:
    tune = {"knobs": {"model.heads": [2, 3]}}
    with pytest.raises(SpecError, match="heads 3"):
        plan_study(study(tmp_path, tune=tune), out=tmp_path)
    wide = {"one_at_a_time": {"model.dim": [12]}}
    with pytest.raises(SpecError, match=r"arm 'dim=12'.*heads 8"):
        plan_study(study(tmp_path, design=wide, tune={"knobs": {"model.heads": [2, 8]}}), out=tmp_path)
    rule = [{"require": "train.optimizer.lr < 0.02", "because": "it always diverges"}]
    _, plan = plan_study(study(tmp_path, where=rule), out=tmp_path)
    assert [rival.values[LR] for rival in plan.tuning[0].rivals] == [1e-3, 1e-2]


# -- choice -----------------------------------------------------------------------------------------------------------


SPEC = TrialSpec(data=Choice("digits"), model=Choice("vit"), train=TrainSpec(steps=1))


def tuning_of(*values: float, seeds: int = 1) -> Tuning:
    """Return rivals whose trials differ in their keys: value and seed."""
    rivals = [
        Rival({LR: value}, tuple(Planned("", seed, Trial(SPEC, {}, (), None, key=f"{value}/{seed}")) for seed in range(seeds)))
        for value in values
    ]  # fmt: skip
    return Tuning("a", "k", "val/accuracy", tuple(rivals))


def select_rival(tuning: Tuning, scores: dict[str, float | None], **analysis: Any) -> Tuning:
    """Return the tuning after trials with these scores; None is a divergence, NaN a missing value."""

    def result_of(trial: Trial) -> TrialResult | None:
        if trial.key not in scores:
            return None
        score = scores[trial.key]
        around = Circumstances(0.0, 2.0, "host", 1, 1, 1, 1, {}, {})
        history = (Measurement(1, 1.0, 1, {"val/accuracy": 0.99 - (score or 0)}),)
        outcome = Outcome({} if score is None else {"val/accuracy": score}, history, "", 1, 1)
        return TrialResult(trial.key, "", "diverged" if score is None else "done", outcome, around)

    return decide_tuning(tuning, result_of, Analysis(**analysis))


def test_best_mean_wins_and_ties_go_to_first() -> None:
    scores = {"1.0/0": 0.7, "1.0/1": 0.5, "2.0/0": 0.6, "2.0/1": 0.8, "3.0/0": 0.8, "3.0/1": 0.6}
    choice = select_rival(tuning_of(1.0, 2.0, 3.0, seeds=2), scores)
    assert choice.winner == 1 and [rival.score for rival in choice.rivals] == pytest.approx([0.6, 0.7, 0.7])
    assert [rival.wall_s for rival in choice.rivals] == [4.0] * 3
    assert select_rival(tuning_of(1.0, 2.0, 3.0, seeds=2), scores, goal="min").winner == 0
    assert select_rival(tuning_of(3.0, 2.0, 1.0, seeds=2), scores).winner == 0, "equals: the first in the file"
    one = {"1.0/0": 0.7, "2.0/0": 0.5, "3.0/0": 0.6}
    assert select_rival(tuning_of(1.0, 2.0, 3.0), one, at="best").winner == 1, (
        "judged by the best of the curve, as the answer"
    )


def test_diverged_seed_is_worse_than_any_value() -> None:
    scores = {"1.0/0": 0.01, "1.0/1": 0.01, "2.0/0": 0.9, "2.0/1": None}
    assert select_rival(tuning_of(1.0, 2.0, seeds=2), scores).winner == 0
    assert select_rival(tuning_of(2.0, 1.0, seeds=2), scores, goal="min").winner == 1
    assert select_rival(tuning_of(1.0, 2.0), {"1.0/0": float("nan"), "2.0/0": 0.1}).winner == 1
    none = select_rival(tuning_of(1.0, 2.0), {"1.0/0": None, "2.0/0": None})
    assert none.winner is None and not none.open and "diverged: lr=1; lr=2" in none.failure


def test_nothing_is_chosen_before_all_rivals_end() -> None:
    tuning = tuning_of(1.0, 2.0, seeds=2)
    assert select_rival(tuning, {"1.0/0": 0.1, "1.0/1": 0.1, "2.0/0": 0.9}) == tuning


def test_winner_at_edge_of_range_is_flagged() -> None:
    values, scores = (3.0, 1.0, 2.0), {"1.0/0": 0.1, "2.0/0": 0.2, "3.0/0": 0.3}
    assert knobs_at_edge(select_rival(tuning_of(*values), scores)) == [LR]
    assert knobs_at_edge(select_rival(tuning_of(*values), scores, goal="min")) == [LR]
    assert knobs_at_edge(select_rival(tuning_of(*values), {**scores, "2.0/0": 0.9})) == []
    assert knobs_at_edge(select_rival(tuning_of(1.0), scores)) == [] and knobs_at_edge(tuning_of(1.0, 2.0)) == []


# -- end to end -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Answer]:
    """Return a tuned study after its run: its file, its output folder and its answer."""
    folder = tmp_path_factory.mktemp("tuned")
    file = study(folder)
    answer = vitlab.run(file, out=folder / "out")
    assert (answer.folder / "report" / "report.html").exists()
    return file, folder / "out", answer


def copy_of(tuned: tuple[Path, Path, Answer], folder: Path) -> Path:
    shutil.copytree(tuned[1], folder / "out")
    return folder / "out"


@pytest.mark.slow
def test_every_arm_is_trained_with_its_own_choice(tuned: tuple[Path, Path, Answer]) -> None:
    _, out, answer = tuned
    assert (answer.trained, answer.failed) == (2 * 3 * 2 + 2 * 2, 0)
    assert trained_seeds(out) == [0, 0, 1, 1] + 6 * [1_000_000] + 6 * [1_000_001]
    scores: dict[tuple[str, float], list[float]] = {}
    for file in out.glob("trials/*/*/result.json"):
        result = json.loads(file.read_text())
        spec = result["trial"]
        if spec["seeds"]["init"] >= 1_000_000:
            own = spec["spec"]["model"]["position"]["type"], spec["spec"]["train"]["optimizer"]["lr"]
            scores.setdefault(own, []).append(result["outcome"]["metrics"]["val/accuracy"])
    for arm, position in (("baseline", "learned"), ("position=none", "none")):
        means = {lr: np.mean(values) for (where, lr), values in sorted(scores.items()) if where == position}
        assert len(means) == 3 and rate(answer.plan, arm) == max(means, key=lambda lr: means[lr])
        assert answer.plan.arm(arm).values[LR] == rate(answer.plan, arm)
    assert not answer.plan.pending and set(answer.results()["seed"]) == {0, 1}
    assert answer.results().groupby("arm")[LR].nunique().eq(1).all()


def test_repeated_run_trains_nothing_and_added_seed_only_itself(
    tuned: tuple[Path, Path, Answer], tmp_path: Path
) -> None:
    file, out = tuned[0], copy_of(tuned, tmp_path)
    before = results(out)
    again = vitlab.run(file, out=out)
    assert again.trained == 0 and again.plan == tuned[2].plan and results(out) == before
    more = vitlab.run(file, out=out, changes={"seeds": 3})
    assert (more.trained, more.cached) == (2, 2 * 3 * 2 + 4)
    assert sorted(set(trained_seeds(out))) == [0, 1, 2, 1_000_000, 1_000_001] and len(results(out)) == len(before) + 2


def test_choice_outlives_rival_trials(tuned: tuple[Path, Path, Answer], tmp_path: Path) -> None:
    file, out = tuned[0], copy_of(tuned, tmp_path)
    for item in (item for tuning in tuned[2].plan.tuning for item in tuning.trials):
        shutil.rmtree(out / "trials" / item.trial.key)
    again = vitlab.run(file, out=out)
    assert (again.trained, again.cached) == (0, 4) and again.plan == tuned[2].plan


@pytest.mark.slow
def test_only_changed_arm_is_tuned_again(tuned: tuple[Path, Path, Answer], tmp_path: Path) -> None:
    file, out = tuned[0], copy_of(tuned, tmp_path)
    content = yaml.safe_load(file.read_text())
    content["design"]["one_at_a_time"]["model.position"] = ["none", "sincos2d"]
    wider = tmp_path / "wider.yaml"
    wider.write_text(yaml.safe_dump(content))
    _, plan = plan_study(wider, out=out)
    assert [tuning.arm for tuning in plan.tuning if tuning.open] == ["position=sincos2d"]
    assert {item.arm for item in plan.pending} == {"position=sincos2d"} and len(plan.trials) == 4
    content["tune"]["knobs"][LR].append(0.1)
    wider.write_text(yaml.safe_dump(content))
    assert all(tuning.open for tuning in plan_study(wider, out=out)[1].tuning), "another grid is another question"
    answer = vitlab.run(wider, out=out)
    assert answer.trained == 2 * 2 + (4 * 2 + 2) + sum(
        2 for arm in ("baseline", "position=none") if rate(answer.plan, arm) == 0.1
    )


class Killer(Watch):
    """Hook that ends the process, as seen by the study, at a moment of a run."""

    def __init__(self, *, trial: int = 10**9, stage: int = 10**9, before_choosing: bool = False) -> None:
        self.left, self.stages, self.before_choosing = trial, stage, before_choosing

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        self.stages -= 1
        if self.stages < 0:
            raise SystemExit("killed")

    def on_end(self, planned: Planned, how: str, detail: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise SystemExit("killed")

    def close(self) -> None:
        if self.before_choosing:
            raise SystemExit("killed")


@pytest.mark.parametrize(
    ("killer", "ending"),
    [
        (Killer(trial=2), 3),
        (Killer(before_choosing=True), 4),
        (Killer(stage=1), 4),
        (Killer(trial=4), 5),
    ],
    ids=["in stage one", "before the choice", "after the choice", "in stage two"],
)
def test_killed_run_resumes(tuned: tuple[Path, Path, Answer], tmp_path: Path, killer: Killer, ending: int) -> None:
    short = {**BASE, "train": {**BASE["train"], "steps": 4, "evaluations": 1}}
    file = study(tmp_path, base=short, design=None, tune={"knobs": {LR: [1e-3, 1e-2]}})
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="killed"):
        vitlab.run(file, out=out, watch=killer)
    before = results(out)
    assert len(before) == ending
    plan, _ = open_study(file, out=out)
    assert bool(plan.pending) == plan.tuning[0].open
    again = vitlab.run(file, out=out)
    assert again.trained == 4 + 2 - ending and before < results(out) and again.failed == 0
    assert rate(again.plan, "baseline") == plan_study(file, out=out)[1].tuning[0].rivals[again.plan.tuning[0].winner or 0].values[LR]  # fmt: skip
    assert not again.plan.pending


@pytest.mark.slow
def test_arm_fails_with_sentence_if_all_rivals_diverge(tmp_path: Path) -> None:
    sgd = {"type": "sgd", "lr": 0.1}
    base = {**BASE, "train": {**BASE["train"], "steps": 8, "optimizer": sgd}}
    knobs = {LR: [1e20, 0.1]}
    file = study(tmp_path, base=base, seeds=1, design=None, tune={"knobs": knobs, "seeds": 1})
    one = vitlab.run(file, out=tmp_path / "out")
    assert one.failed == 0 and rate(one.plan, "baseline") == 0.1, "a diverged rival is the worst"
    assert "diverged" in str(report.render(one.plan, one.store, "md"))

    file = study(tmp_path, base=base, seeds=2, design=None, tune={"knobs": {LR: [1e20, 1e25]}, "seeds": 1})
    for _ in range(2):  # the second run trains nothing and still fails
        none = vitlab.run(file, out=tmp_path / "out")
        assert none.failed == 2 and not none.plan.trials
        assert "baseline failed: every combination of its tuning diverged: lr=1e+20; lr=1e+25" in str(
            report.render(none.plan, none.store, "json")
        )
    assert none.trained == 0
    plan_file = tmp_path / "out" / "studies" / "tuned" / "plan.json"
    plan_data = json.loads(plan_file.read_text())
    for trial in (trial for rival in plan_data["tuning"][0]["rivals"] for trial in rival["trials"]):
        trial["code"] = "of-an-earlier-day"
    plan_file.write_text(json.dumps(plan_data))
    assert plan_study(file, out=tmp_path / "out")[1].tuning[0].open, "other code may not fail where that did"


def test_failed_rival_keeps_choice_open_until_retried(tmp_path: Path) -> None:
    plugin = tmp_path / "touchy.py"
    plugin.write_text(
        "import os\nimport torch\nfrom vitlab.training.optim import optimizer\n"
        "@optimizer.register('touchy')\nclass Touchy(optimizer.get('sgd')):\n    '''Fails at one rate.'''\n"
        "    def __init__(self, *, lr: float = 0.1) -> None:\n        super().__init__(lr=lr)\n"
        f"        if lr == 0.2 and os.path.exists({str(tmp_path / 'mood')!r}):\n            raise RuntimeError('no')\n"
    )
    (tmp_path / "mood").touch()
    base = {**BASE, "train": {"steps": 4, "batch_size": 16, "optimizer": "touchy"}}
    file = study(tmp_path, base=base, design=None, seeds=1, tune={"knobs": {LR: [0.1, 0.2]}, "seeds": 1})
    first = vitlab.run(file, out=tmp_path / "out", plugins=[plugin])
    assert first.failed == 1 and first.plan.pending and not first.plan.trials
    again = vitlab.run(file, out=tmp_path / "out", plugins=[plugin])
    assert (again.trained, again.failed) == (0, 1) and again.plan.pending
    (tmp_path / "mood").unlink()
    retried = vitlab.run(file, out=tmp_path / "out", plugins=[plugin], retry_failed=True)
    assert (retried.trained, retried.failed) == (2, 0) and not retried.plan.pending


def test_shared_choice_is_made_at_base(tmp_path: Path) -> None:
    file = study(tmp_path, tune={"knobs": {LR: [1e-3, 3e-2]}, "per": "study", "seeds": 1}, seeds=1)
    answer = vitlab.run(file, out=tmp_path / "out")
    assert answer.trained == 2 + 2 and rate(answer.plan, "baseline") == rate(answer.plan, "position=none")
    notes = json.loads(str(report.render(answer.plan, answer.store, "json")))["notes"]
    assert any(note.startswith("Tuned at the base, for all arms, by val/accuracy") for note in notes)


# -- messages ---------------------------------------------------------------------------------------------------------


def test_teachers_of_tuning_are_counted_by_run_and_report_alike(tmp_path: Path) -> None:
    train = {**BASE["train"], "steps": 2, "evaluations": 1}
    model = {**BASE["model"], "depth": 2}
    source = {"trial": {"model": model, "data": BASE["data"], "train": train}, "seed": "same"}
    teacher = {"trial": {"model": model, "train": train, "init_from": source}, "seed": "same"}
    file = study(
        tmp_path,
        base={**BASE, "train": train, "distill": {"kind": "hard", "teacher": teacher}},
        tune={"knobs": {LR: [1e-3, 1e-2]}, "per": "study", "seeds": 1},
        design={"one_at_a_time": {"distill.kind": ["none"]}},
        seeds=1,
        run={**RUN, "tracker": "none"},
    )
    trainings = 2 + 2 + 2 * 2  # of candidates and arms, and a teacher and its initial weights for the seeds of each
    assert vitlab.run(file, out=tmp_path).trained == trainings
    again = vitlab.run(file, out=tmp_path)
    made = report.collect_report(again.plan, again.store).made
    assert made is not None and again.cached == made.trained == trainings and not made.failed
    [teacher_of_tuning] = set(again.plan.tuning[0].trials[0].trial.needs.values())
    shutil.rmtree(tmp_path / "trials" / teacher_of_tuning)
    _, plan = plan_study(file, out=tmp_path)
    assert len(plan.prerequisites) == 2, "a choice outlives the trials that made it"


def test_report_shows_rivals_cost_and_edges(tuned: tuple[Path, Path, Answer]) -> None:
    answer = tuned[2]
    document = json.loads(str(report.render(answer.plan, answer.store, "json")))
    assert [(row["arm"], row["rival"]) for row in document["tuning"]] == [
        (arm, f"lr={lr:g}") for arm in ("baseline", "position=none") for lr in (1e-3, 1e-2, 3e-2)
    ]
    for row, rate_of in zip(document["tuning"], [1e-3, 1e-2, 3e-2] * 2, strict=True):
        won = rate(answer.plan, row["arm"]) == rate_of
        expected = ("chosen" if rate_of == 1e-2 else f"chosen, at the edge of the grid of {LR}") if won else ""
        assert row["outcome"] == expected and row["trials"] == 2 and row["wall_s"] > 0
    edge = [arm for arm in ("baseline", "position=none") if rate(answer.plan, arm) != 1e-2]
    warned = [note for note in document["notes"] if "edge of its grid" in note]
    assert len(warned) == bool(edge) and all(arm in note for arm in edge for note in warned)
    assert any("12 full-length trainings" in note for note in document["notes"])
    assert not any("one learning rate" in note for note in document["notes"])
    for form in ("terminal", "md", "html"):
        output = str(report.render(answer.plan, answer.store, form))
        assert "tuned for" in output and "lr=0.03" in output


def test_report_without_tuning_names_origin_of_learning_rate(tmp_path: Path) -> None:
    def notes(**changes: Any) -> str:
        plan = plan_study(study(tmp_path, tune=None, **changes), out=tmp_path)[1]
        return str(report.render(plan, Store(tmp_path / "out"), "md"))

    assert "All arms ran at one learning rate (0.001)" in notes()
    assert "learning rate" not in notes(design={"one_at_a_time": {"data.fraction": [0.5]}}), "one model suits itself"
    several = notes(design={"one_at_a_time": {"train.optimizer": ["muon", {"type": "sgd", "lr": 0.2}]}})
    assert "Each optimizer ran at one learning rate (adamw 0.001, muon 0.001, sgd 0.2): none was tuned" in several
    grid = {"one_at_a_time": {"train.optimizer": [{"type": "sgd", "lr": rate} for rate in (0.1, 0.2)]}}
    assert "learning rate" not in notes(design=grid), "the arms say which rates were tried"


def test_commands_show_both_stages(tuned: tuple[Path, Path, Answer], tmp_path: Path) -> None:
    file, out, answer = tuned

    def output_of(*arguments: str | Path) -> str:
        done = CliRunner().invoke(cli, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.output

    fresh = output_of("plan", file, "--out", tmp_path)
    counts = "16 trials (4 of arms, once their knobs are tuned; 12 of tuning), 0 of them trained already"
    assert "pending(tune)" in fresh and counts in fresh
    assert f"2 arms, {counts.partition(', 0')[0]}\n" in output_of("validate", file), "counted as by plan"
    assert fresh.count("To be tuned first") == 1, "arms with the same rivals share a sentence"
    assert f"lr={rate(answer.plan, 'baseline'):g} was chosen by val/accuracy" in output_of("plan", file, "--out", out)
    assert "2" in output_of("status", file, "--out", out)
    with pytest.raises(SystemExit):
        vitlab.run(study(tmp_path, design=None), out=tmp_path / "out", watch=Killer(trial=1))
    status = json.loads(output_of("status", tmp_path / "tuned.yaml", "--out", tmp_path / "out", "--json"))
    assert status["tuning"] == {"done": 2, "missing": 4} and status["arms"] == {"baseline": {"pending": 2}}
    assert "not here" not in output_of("gc", "--out", out), "rivals are kept as long as a plan names them"
    assert not [line for line in output_of("gc", "--out", out).splitlines() if "/trials/" in line]
