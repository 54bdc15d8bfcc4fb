"""Tests of trainings that stop early, and of the weights that stay after a training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from job_helpers import run_together, run_trial
from safetensors.torch import load_file

import vitlab
from vitlab.driver.planning import plan_study
from vitlab.driver.session import Watch
from vitlab.engines.base import train
from vitlab.errors import SpecError
from vitlab.planning.values import Trial
from vitlab.report.notes import _note_best_evaluation
from vitlab.runner.execution import begin_attempt
from vitlab.runner.job import Settings
from vitlab.spec import STREAMS, TrialSpec
from vitlab.store.folders import Keep, TrialFolder
from vitlab.store.result import Measurement, Outcome, TrialResult
from vitlab.training.distributed import SingleProcess
from vitlab.training.loop import index_of_best
from vitlab.weights.opening import open_model

DATA = {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 6}
MODEL = {"type": "vit", "patch_size": 4, "dim": 12, "depth": 1, "heads": 2, "drop": 0.1, "drop_path": 0.2}
TRAIN: dict[str, Any] = {
    "steps": 60,
    "batch_size": 16,
    "evaluations": 20,
    "optimizer": {"type": "adamw", "lr": 0.03},
    "schedule": "constant",
}
RULE = {"patience": 3, "metric": "accuracy"}


def trial(seed: int = 0, **train: Any) -> Trial:
    spec = TrialSpec.model_validate({"data": DATA, "model": MODEL, "train": {**TRAIN, **train}})
    return Trial(spec, {**dict.fromkeys(STREAMS, seed), "split": 0}, (), None, key=f"key{seed}")


def stop_after(steps: int) -> Callable[[], bool]:
    countdown = iter(range(steps))
    return lambda: next(countdown, None) is None


def outcome(result: TrialResult | Exception | None) -> Outcome:
    assert isinstance(result, TrialResult) and result.status == "done"
    return result.outcome


def last_step(full: Outcome, patience: int, metric: str, sign: int) -> int:
    """Return the step at which a rule ends a training, given what it would measure without the rule."""
    best, waited = -math.inf, 0
    for moment in full.history:
        value = sign * moment.metrics[f"val/{metric}"]
        best, waited = (value, 0) if value > best else (best, waited + 1)
        if waited == patience:
            return moment.step
    return full.steps


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1), ("loss", -1)])
def test_training_stops_after_evaluations_without_better_value(metric: str, sign: int, tmp_path: Path) -> None:
    full = outcome(run_trial(trial(), TrialFolder(tmp_path / "full"), Settings()))
    for patience in (1, 3):
        rule = {"patience": patience, "metric": metric}
        stopped = outcome(run_trial(trial(stop_early=rule), TrialFolder(tmp_path / f"{patience}"), Settings()))
        expected = last_step(full, patience, metric, sign)
        assert stopped.steps == stopped.history[-1].step == expected and stopped.images == 16 * expected
        *before, end = stopped.history
        assert before == list(full.history[: len(before)]), "the rule changes no step before"
        until = outcome(
            run_trial(
                trial(steps=expected, evaluations=len(stopped.history)),
                TrialFolder(tmp_path / f"u{patience}"),
                Settings(),
            )
        )
        assert stopped.metrics == end.metrics == until.metrics and stopped.weights == until.weights
        assert {name for name in stopped.metrics if name.startswith("test/")} >= {"test/loss", "test/accuracy"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vmap", "batch_last"])
def test_trials_together_stop_as_alone(engine: str, tmp_path: Path) -> None:
    def outcomes(seeds: Sequence[int], name: str) -> list[Outcome]:
        work = [(trial(seed, stop_early=RULE), TrialFolder(tmp_path / f"{name}{seed}")) for seed in seeds]
        run_together(work, Settings(engine=engine))
        return [outcome(folder.result()) for _, folder in work]

    alone = [outcomes([seed], "alone")[0] for seed in range(3)]
    assert outcomes(range(3), "together") == alone
    assert len({one.steps for one in alone}) > 1, "they stop at different steps"


class OtherStops(SingleProcess):
    """One of two processes, of which the other one has found that the training ends."""

    def share_stop(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: True


def test_processes_of_a_trial_stop_together(tmp_path: Path) -> None:
    with begin_attempt(trial(stop_early={**RULE, "patience": 19}), TrialFolder(tmp_path / "t"), Settings()) as attempt:
        training = attempt.training
        training.peers = OtherStops()
        (ended,) = train([training])
    assert ended is not None and len(ended.history) == 1


def test_resumed_training_stops_and_keeps_weights_as_uninterrupted(tmp_path: Path) -> None:
    settings = Settings(keep=Keep(every=7, best=("val/accuracy", "max")))
    what = trial(stop_early=RULE, ema={"decay": 0.9})
    straight = TrialFolder(tmp_path / "straight")
    expected = outcome(run_trial(what, straight, settings))
    assert expected.steps < TRAIN["steps"]
    files = {file.name: file.read_bytes() for file in straight.path.glob("*.safetensors")}
    steps = range(7, expected.steps + 1, 7)
    assert set(files) == {
        "weights.safetensors",
        "weights-best-accuracy.safetensors",
        *(f"weights-step-{n}.safetensors" for n in steps),
    }
    stopped = TrialFolder(tmp_path / "stopped")
    for pieces in (5, 4, 8):
        assert run_trial(what, stopped, settings, stop=stop_after(pieces)) is None
    assert outcome(run_trial(what, stopped, settings)) == expected
    assert {file.name: file.read_bytes() for file in stopped.path.glob("*.safetensors")} == files
    assert stopped.result_unless_weights_lost(settings.keep) is not None
    (stopped.path / "weights-best-accuracy.safetensors").unlink()
    assert (
        stopped.result_unless_weights_lost(settings.keep) is None
        and stopped.result_unless_weights_lost(Keep()) is not None
    )


def test_kept_weights_are_those_of_their_moment(tmp_path: Path) -> None:
    where, settings = TrialFolder(tmp_path / "t"), Settings(keep=Keep(every=6, best=("val/loss", "min")))
    result = outcome(run_trial(trial(), where, settings))
    losses = [moment.metrics["val/loss"] for moment in result.history]
    best = result.history[losses.index(min(losses))].step
    assert 6 < best < 60
    by_other_metric = settings.keep._replace(best=("val/accuracy", "max"))
    assert (
        where.result_unless_weights_lost(settings.keep) is not None
        and where.result_unless_weights_lost(by_other_metric) is None
    )
    for name, step in (("best-loss", best), ("step-6", 6)):
        until = TrialFolder(tmp_path / f"until{step}")
        outcome(run_trial(trial(steps=step, evaluations=1), until, Settings()))
        file = where.path / f"weights-{name}.safetensors"
        assert open_model(file).info.classes == 6, "it is opened like the last weights, from which it differs"
        kept, expected = load_file(file), load_file(until.weights_file)
        assert all(torch.equal(kept[key], expected[key]) for key in kept.keys() | expected.keys())


def test_checkpoint_without_weights_to_keep_starts_again(tmp_path: Path) -> None:
    where, keep = TrialFolder(tmp_path / "t"), Keep(best=("val/loss", "min"))
    assert run_trial(trial(), where, Settings(), stop=stop_after(10)) is None
    outcome(run_trial(trial(), where, Settings(keep=keep)))
    start = [event.body for event in where.events()[0] if event.kind == "start"][-1]
    assert start["step"] == 0 and "run.keep" in start["note"] and where.result_unless_weights_lost(keep) is not None


def test_best_is_first_of_equal_values_and_finite() -> None:
    def history(*values: float) -> list[Measurement]:
        return [Measurement(at, 0.0, 0, {"val/x": value}) for at, value in enumerate(values)]

    assert index_of_best(history(1, 3, 3, 2), "val/x", "max") == 1
    assert index_of_best(history(math.nan, 3, -math.inf, 2), "val/x", "min") == 3
    assert index_of_best(history(math.nan, math.nan), "val/x", "min") == 0


# -- the best weights -------------------------------------------------------------------------------------------------

BEST = {**RULE, "weights": "best"}


def index_of_best_by_hand(history: Sequence[Measurement], metric: str, sign: int) -> int:
    values = [sign * moment.metrics[f"val/{metric}"] for moment in history]
    return values.index(max(values))


@pytest.mark.parametrize("ema", [None, {"decay": 0.9}])
@pytest.mark.parametrize(("metric", "sign", "patience"), [("accuracy", 1, 3), ("loss", -1, 3), ("loss", -1, 19)])
def test_best_weights_equal_training_until_their_step(
    ema: dict[str, float] | None, metric: str, sign: int, patience: int, tmp_path: Path
) -> None:
    def run(name: str, **train: Any) -> tuple[Outcome, TrialFolder]:
        folder = TrialFolder(tmp_path / name)
        return outcome(run_trial(trial(ema=ema, **train), folder, Settings())), folder

    rule = {"patience": patience, "metric": metric}
    last, _ = run("last", stop_early=rule)
    ended, folder = run("best", stop_early={**rule, "weights": "best"})
    best = index_of_best_by_hand(last.history, metric, sign)
    step = last.history[best].step
    assert step < ended.steps == last.steps and ended.images == last.images
    until, hand = run("until", steps=step, evaluations=best + 1)
    assert ended.metrics == {**until.metrics, "train/weights_step": step} == ended.history[best].metrics
    assert ended.weights == until.weights != last.weights
    assert folder.predictions.read_bytes() == hand.predictions.read_bytes()
    assert folder.weights_file.read_bytes() == hand.weights_file.read_bytes()
    # The rest of the history has the values of its own moments, and test images are evaluated once.
    plain = [{n: v for n, v in one.metrics.items() if not n.startswith("test/")} for one in last.history]
    del plain[best]
    assert [one.metrics for index, one in enumerate(ended.history) if index != best] == plain


def test_best_weights_of_last_measurement_equal_last_weights(tmp_path: Path) -> None:
    rule = {"patience": 1, "metric": "loss"}
    short = {"steps": 6, "evaluations": 2, "optimizer": {"type": "adamw", "lr": 0.001}}
    last = outcome(run_trial(trial(stop_early=rule, **short), TrialFolder(tmp_path / "last"), Settings()))
    what, folder = trial(stop_early={**rule, "weights": "best"}, **short), TrialFolder(tmp_path / "best")
    best = outcome(run_trial(what, folder, Settings()))
    assert best.weights == last.weights and best.metrics == {**last.metrics, "train/weights_step": 6}
    logged = [event.body for event in folder.events()[0] if event.kind == "metrics"]
    assert [body["step"] for body in logged] == [3, 6, 6]
    assert not logged[1]["metrics"].keys() & logged[2]["metrics"].keys(), "nothing is logged twice"


@pytest.mark.parametrize("ema", [None, {"decay": 0.9}])
def test_resumed_training_ends_with_best_weights_as_uninterrupted(ema: dict[str, float] | None, tmp_path: Path) -> None:
    what = trial(stop_early=BEST, ema=ema)
    settings = Settings(keep=Keep(best=("val/loss", "min")))
    straight, stopped = TrialFolder(tmp_path / "straight"), TrialFolder(tmp_path / "stopped")
    expected = outcome(run_trial(what, straight, settings))
    best = expected.metrics["train/weights_step"]
    assert best < expected.steps - 4
    # The last of these checkpoints is after the best step, whose weights are in it alone.
    for pieces in (5, int(best) - 3):
        assert run_trial(what, stopped, settings, stop=stop_after(pieces)) is None
    assert outcome(run_trial(what, stopped, settings)) == expected
    for file in (*straight.path.glob("*.safetensors"), straight.predictions):
        assert (stopped.path / file.name).read_bytes() == file.read_bytes()
    loss = index_of_best_by_hand(expected.history, "loss", -1)
    kept = load_file(straight.path / "weights-best-loss.safetensors")
    until = TrialFolder(tmp_path / "until")
    outcome(run_trial(trial(steps=expected.history[loss].step, evaluations=1, ema=ema), until, Settings()))
    hand = load_file(until.weights_file)
    assert all(torch.equal(kept[key], hand[key]) for key in kept.keys() | hand.keys()), "run.keep has its own best"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vmap", "batch_last"])
def test_trials_together_end_with_best_weights_as_alone(engine: str, tmp_path: Path) -> None:
    def outcomes(seeds: Sequence[int], name: str) -> list[Outcome]:
        work = [(trial(seed, stop_early=BEST), TrialFolder(tmp_path / f"{name}{seed}")) for seed in seeds]
        run_together(work, Settings(engine=engine))
        assert all((folder.path / "weights.safetensors").exists() for _, folder in work)
        return [outcome(folder.result()) for _, folder in work]

    alone = [outcomes([seed], "alone")[0] for seed in range(3)]
    assert outcomes(range(3), "together") == alone
    assert len({one.metrics["train/weights_step"] for one in alone}) > 1, "each has its own best"
    for seed, one in enumerate(alone):
        step = int(one.metrics["train/weights_step"])
        until = TrialFolder(tmp_path / f"until{seed}")
        run_together([(trial(seed, steps=step, evaluations=1), until)], Settings(engine=engine))
        assert outcome(until.result()).weights == one.weights


class OtherFindsBest(SingleProcess):
    """One of two processes, of which the other one finds the second measurement the best by rounding."""

    def __init__(self) -> None:
        self.asked = 0

    def share_stop(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        self.asked += 1
        return lambda: self.asked == 3 or (self.asked == 1 and stop())


def test_processes_of_a_trial_go_back_to_one_step(tmp_path: Path) -> None:
    with begin_attempt(trial(stop_early=BEST), TrialFolder(tmp_path / "t"), Settings()) as attempt:
        attempt.training.peers = OtherFindsBest()
        (ended,) = train([attempt.training])
    assert ended is not None and ended.metrics["train/weights_step"] == 6


# -- in a study -------------------------------------------------------------------------------------------------------


def study(tmp_path: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "study": "stopping",
        "base": {"data": DATA, "model": {**MODEL, "position": "learned"}, "train": {**TRAIN, "stop_early": RULE}},
        "design": {"one_at_a_time": {"model.position": ["none"]}},
        "seeds": 2,
        "run": {"executor": "inline", "tracker": "none", "keep": "best"},
    }
    for path, value in changes.items():
        *sections, name = path.split("__")
        place = content
        for section in sections:
            place = place[section]
        place[name] = value
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def test_rule_is_part_of_key_unless_there_is_none(tmp_path: Path) -> None:
    def keys(**changes: Any) -> set[str]:
        return {item.trial.key for item in plan_study(study(tmp_path, **changes))[1].trials}

    ruled, absent, empty = keys(), keys(base__train=TRAIN), keys(base__train={**TRAIN, "stop_early": None})
    assert absent == empty and not ruled & absent
    assert not ruled & keys(base__train={**TRAIN, "stop_early": {**RULE, "patience": 4}})
    assert ruled == keys(base__train={**TRAIN, "stop_early": {**RULE, "weights": "last"}})
    assert not ruled & keys(base__train={**TRAIN, "stop_early": BEST})
    assert ruled == keys(run__keep="none"), "what is kept changes no trial"


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("keep", ["last", "best"])
def test_weights_that_are_asked_for_too_late_are_named(keep: str, tmp_path: Path) -> None:
    class Ear(Watch):
        said: ClassVar[list[str]] = []

        def say(self, sentence: str) -> None:
            self.said.append(sentence)

    def run(keep: str) -> str:
        Ear.said.clear()
        short = {**TRAIN, "steps": 2, "evaluations": 1}
        seeds = {"count": 2, "vary": []}  # which are one trial
        file = study(
            tmp_path,
            run__keep=keep,
            base__train=short,
            design={"arms": {"baseline": {}}},
            seeds=seeds,
            analysis={"compare": "none"},
        )
        vitlab.run(file, out=tmp_path / "out", watch=Ear())
        return " ".join(Ear.said)

    sentence = "1 trial ended without weights that run.keep asks for now"
    assert sentence not in run("none") and sentence not in run("none")
    assert sentence in run(keep)


@pytest.mark.parametrize(("weights", "metric", "count"), [("best", "val", 1), ("best", "test", 0), ("last", "val", 0)])
def test_report_warns_of_validation_that_chose_the_weights(
    weights: str, metric: str, count: int, tmp_path: Path
) -> None:
    changes = {"base__train": {**TRAIN, "stop_early": {**RULE, "weights": weights}}}
    _, plan = plan_study(study(tmp_path, **changes, analysis={"metric": f"{metric}/accuracy"}))
    warnings = list(_note_best_evaluation(plan))
    assert len(warnings) == count and all("optimistic" in one and "best weights" in one for one in warnings)


MISTAKES = {
    "no metric of validation is called 'acuracy'. Did you mean 'accuracy'?": {
        "base__train": {**TRAIN, "stop_early": {"patience": 3, "metric": "acuracy"}}
    },
    "stop_early.patience 20 is never used up by 20 evaluations": {
        "base__train": {**TRAIN, "stop_early": {"patience": 20}}
    },
    "match compares arms of equal cost": {"match": {"quantity": "params", "knob": "model.dim", "tolerance": 0.5}},
    "it stops early by another rule than": {"design": {"one_at_a_time": {"train.stop_early.patience": [2]}}},
    "best is by a metric of validation": {"analysis": {"metric": "train/loss"}},
    "objective 'dino' follows the planned length": {
        "base__train": {**TRAIN, "objective": "dino", "stop_early": {"patience": 3}},
        "base__data": {**DATA, "augment": ["flip"]},
        "analysis": {"metric": "val/loss"},
    },
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_contradictions_are_refused(sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)) as error:
        plan_study(study(tmp_path, **MISTAKES[sentence]))
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("keep", "sentence"),
    [
        ("bset", "run.keep: found 'bset'; allowed: none, last, best, {every: N}. Did you mean 'best'?"),
        ({"every": 0}, "run.keep.every must be greater than or equal to 1; found 0"),
        ({"evry": 2}, "unknown key 'evry'. Did you mean 'every'?"),
    ],
)
def test_unknown_choice_of_weights_names_what_is_allowed(keep: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        plan_study(study(tmp_path, run__keep=keep))
    assert len(error.value.problems) == 1 and sentence in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_report_says_how_long_arms_were_trained(tmp_path: Path) -> None:
    answer = vitlab.run(study(tmp_path), out=tmp_path / "out")
    rows = answer.results()
    notes = [note for note in answer.compare().notes if note.startswith("train.stop_early")]
    steps = rows.groupby("arm")["steps"].agg(["min", "max"])
    assert len(notes) == 1 and all(f"{arm} {low:,} to {high:,}" in notes[0] for arm, low, high in steps.itertuples())
    assert steps["min"].min() < TRAIN["steps"]
    assert len(list((tmp_path / "out").rglob("weights-best-accuracy.safetensors"))) == 4
