"""Tests of `vitlab check` on a real study: unchanged code passes, and bugs are found despite stored results.

Bugs are put in while the process runs (``benchmarks/bugs.py``), so that the code's files, and with them the places of
results in the store, stay the same: the store is full of what the sound code has computed, and whoever asked it would
see no difference.
"""

from __future__ import annotations

import json
import math
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import torch
import yaml
from click.testing import CliRunner
from scipy import stats

from vitlab import __version__ as vitlab_version
from vitlab import lab
from vitlab.cli import check as check_cli
from vitlab.cli import cli, main
from vitlab.cli.check import check_command as command
from vitlab.data.augment.geometric import Crop
from vitlab.driver.planning import plan_with_due_decisions
from vitlab.driver.session import Session, Watch
from vitlab.errors import DataError, Refused, SpecError, TrialFailed, UserError
from vitlab.planning.study_folder import write_registered_plan
from vitlab.regression import check
from vitlab.regression.baseline import Trace, read_baseline, write_baseline
from vitlab.regression.decide import Finding
from vitlab.regression.facts import train_trace
from vitlab.regression.gate import doubt_if_at_chance, train_and_check_learning
from vitlab.report import api
from vitlab.runner import circumstances
from vitlab.runner.execution import resolve_as_planned
from vitlab.spec.tree import parse_as
from vitlab.store.files import read_json
from vitlab.store.folders import Store
from vitlab.store.result import TrialResult
from vitlab.training.loop import Training

BUGS = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "benchmarks" / "bugs.py"))["BUGS"]
ADDRESS = "git+https://example.org/v@commit"
UNKNOWN = "git+https://HOST/OWNER/vitlab@COMMIT"
CONTENT: dict[str, Any] = {
    "study": "gate",
    "base": {
        "data": {"type": "digits", "augment": [{"type": "crop", "padding": 1}]},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "learned"},
        "train": {"steps": 24, "batch_size": 16, "evaluations": 1, "optimizer": {"type": "adamw", "lr": 0.01}},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 3,
    "run": {"executor": "inline", "tracker": "none"},
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "gate.yaml"
    file.write_text(yaml.safe_dump({**CONTENT, **changes}))
    return file


def vitlab(folder: Path, *words: str) -> Any:
    done = CliRunner().invoke(cli, ["check", str(folder / "gate.yaml"), "--out", str(folder / "out"), *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(scope="module", autouse=True)
def short_trainings() -> Iterator[None]:
    """Skip reports, which cost more than these trainings, and the doubt in models that have learned as little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlab.report.write", lambda *_: [])
        patch.setattr("vitlab.regression.gate.doubt_if_at_chance", lambda cell, *_: cell)
        patch.setattr("vitlab.regression.check.git_output", lambda *_: "")  # temporary folders may be in a repository
        patch.setattr("vitlab.regression.baseline.git_output", lambda *_: "")
        yield


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a study, its baseline, and a store with all its results."""
    folder = tmp_path_factory.mktemp("gate")
    write(folder)
    done = vitlab(folder, "--accept", "--reason", "the first")
    assert done.exit_code == 0 and "it, and commit it." in done.stdout and "which regression is found" in done.stdout
    return folder


@pytest.mark.slow
def test_unchanged_code_passes_exactly(accepted: Path) -> None:
    done = vitlab(accepted, "--json", "--tier", "exact", "--tier", "statistical")
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["verdict"] == "pass"
    assert {(cell["verdict"], cell["reason"], cell["worse_by"]) for cell in document["cells"]} == {
        ("pass", "identical", 0.0)
    }
    assert {cell["arm"] for cell in document["cells"]} == {"baseline", "position=none"}
    assert {finding["verdict"] for finding in document["findings"]} == {"pass"}
    assert {finding["check"] for finding in document["findings"]} == {
        "plan", "key", "params", "macs", "trace fp64", "trace fp32",
    }  # fmt: skip


@pytest.mark.slow
def test_second_interim_analysis_does_not_affect_gate(accepted: Path) -> None:
    """Its plan depends on stored results; the baseline was accepted before there were any."""
    twice = ("--set", "seeds={count: 2, escalate_to: 4}", "--set", "analysis.alpha=1e-9")
    changes = {"seeds": {"count": 2, "escalate_to": 4}, "analysis.alpha": 1e-9}
    study, plan = lab.plan_study(accepted / "gate.yaml", out=accepted / "out", changes=changes)
    store = Store((accepted / "out").resolve())
    write_registered_plan(
        plan_with_due_decisions(plan, Session(store, study.run)), store
    )  # as a run does after its first stage
    _, plan = lab.plan_study(accepted / "gate.yaml", out=accepted / "out", changes=changes)
    assert plan.looks is not None and plan.looks.open == (("position=none",),)
    once = ("--set", "seeds=2", "--set", "analysis.alpha=1e-9")
    first, second = (json.loads(vitlab(accepted, "--json", "--tier", "exact", *each).stdout) for each in (once, twice))
    assert first["findings"] == second["findings"] and first["verdict"] == second["verdict"] == "differs"


def test_retraining_unchanged_code_passes_exactly(accepted: Path, tmp_path: Path) -> None:
    """In a fresh store, as in CI, every trial is trained again with equal results."""
    shutil.copytree(accepted, tmp_path / "ci", ignore=shutil.ignore_patterns("out"))
    done = vitlab(tmp_path / "ci", "--json", "--tier", "statistical")
    assert {cell["reason"] for cell in json.loads(done.stdout)["cells"]} == {"identical"}


@pytest.mark.parametrize(
    ("bug", "arms"),
    [
        ("no_position", {"baseline"}),
        ("wrong_scale", {"baseline", "position=none"}),
        ("half_the_rate", {"baseline", "position=none"}),
        ("no_augmentation", {"baseline", "position=none"}),
    ],
)
def test_bug_is_detected_despite_full_store(
    accepted: Path, bug: str, arms: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    BUGS[bug](monkeypatch)
    _, plan = check.lab.plan_study(accepted / "gate.yaml")
    store = Store(accepted / "out")
    assert all(store.trial(item.trial.key, item.trial.code).done() for item in plan.trials)
    done = vitlab(accepted, "--json", "--tier", "exact")
    document = json.loads(done.stdout)
    assert done.exit_code == 1 and document["verdict"] == "differs"
    findings = [finding for finding in document["findings"] if finding["verdict"] == "differs"]
    # An unused table cannot be stacked, so the loop trains it; in fp32 this alone might change the rounding.
    precisions = ("fp64",) if bug == "no_position" else ("fp64", "fp32")
    assert {(finding["arm"], finding["check"]) for finding in findings} == {
        (arm, f"trace {precision}") for arm in arms for precision in precisions
    }


@pytest.fixture
def other_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Pretend that this process has another version of torch."""
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    circumstances.versions.cache_clear()
    yield "9.9.0"
    circumstances.versions.cache_clear()


@pytest.mark.slow
def test_results_of_other_torch_are_not_reused(
    accepted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_torch: str
) -> None:
    """The store is full of results of the earlier version of torch."""
    shutil.copytree(accepted, tmp_path / "here")
    before = {file: file.read_bytes() for file in (tmp_path / "here" / "out").glob("trials/*/*/result.json")}
    with monkeypatch.context() as patch:
        BUGS["half_the_rate"](patch)
        done = vitlab(tmp_path / "here", "--json", "--tier", "statistical")
    document = json.loads(done.stdout)
    assert {cell["reason"] for cell in document["cells"]} != {"identical"}, "results of another torch were taken"
    was = str(read_baseline(accepted / "gate.baseline.yaml").values.versions["torch"])  # type: ignore[union-attr]
    assert f"the baseline was trained under torch {was}, and this environment has torch 9.9.0" in document["notes"]
    assert {file: file.read_bytes() for file in before} == before, "nothing that was computed is lost"
    trained = {*(tmp_path / "here" / "out").glob("trials/*/*/result.json")} - before.keys()
    assert len(trained) == len(before) == 6
    assert {parse_as(TrialResult, read_json(file)).circumstances.installed_versions["torch"] for file in trained} == {
        other_torch
    }
    # the gate reuses its own trainings
    again = json.loads(vitlab(tmp_path / "here", "--json", "--tier", "statistical").stdout)
    assert again["cells"] == document["cells"]
    assert len([*(tmp_path / "here" / "out").glob("trials/*/*/result.json")]) == 12


def test_other_torch_version_is_reported(accepted: Path, tmp_path: Path, other_torch: str) -> None:
    shutil.copytree(accepted, tmp_path / "here")
    exact = json.loads(vitlab(tmp_path / "here", "--json", "--tier", "exact").stdout)
    assert exact["verdict"] == "pass" and [
        note for note in exact["notes"] if "this environment has torch 9.9.0" in note
    ]


def test_trial_with_recorded_versions_is_not_trained_under_others(
    accepted: Path, tmp_path: Path, other_torch: str
) -> None:
    file, versions = accepted / "gate.yaml", {"torch": "2.0.0"}
    plain, with_versions = (
        lab.plan_study(file, versions=versions_option)[1].trials[0].trial for versions_option in ({}, versions)
    )
    assert plain.key == with_versions.key and plain.code != with_versions.code
    sentence = "^versions: {'torch': '2.0.0'.*} required, {.*'torch': '9.9.0',.*} here; install the former or require "
    with pytest.raises(Refused, match=sentence):  # of a worker, which may be elsewhere
        resolve_as_planned([with_versions])
    with pytest.raises(Refused, match=sentence):
        lab.run(file, out=tmp_path / "out", versions={**versions, "pytorch": "9.9.0"})


def test_exit_code_github_and_junit_report_verdict(
    accepted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as a process, because click's test runner could hide a lost exit code."""
    BUGS["half_the_rate"](monkeypatch)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    words = ["--out", str(accepted / "out"), "--tier", "exact", "--junit", str(tmp_path / "new" / "check.xml")]
    monkeypatch.setattr(sys, "argv", ["vitlab", "check", str(accepted / "gate.yaml"), *words])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    assert "## gate: differs" in (tmp_path / "summary.md").read_text()
    suite = ElementTree.parse(tmp_path / "new" / "check.xml").getroot()
    assert suite.get("failures") == "4" and suite.get("errors") == "0"
    for wrong, message in (("--baseline=no.yaml", "does not exist"), ("--set=seeds", "the value is missing")):
        (tmp_path / "new" / "check.xml").unlink()
        with pytest.raises(UserError, match=message):
            vitlab(accepted, *words[2:], wrong)
        suite = ElementTree.parse(tmp_path / "new" / "check.xml").getroot()
        assert suite.get("errors") == "1" and len(suite.findall("testcase/error")) == 1


def test_engine_of_seeds_is_traced(accepted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked attention has its own kernel; its fault does not show in single trainings."""
    from vitlab.engines import batch_last_kernels

    _, plan = check.lab.plan_study(accepted / "gate.yaml")
    facts = read_baseline(accepted / "gate.baseline.yaml").facts
    assert facts is not None and {trace.engine for arm in facts.arms.values() for trace in arm.traces} == {"batch_last"}
    (sound, *_) = facts.arms["baseline"].traces
    products = batch_last_kernels.pairwise_dot_products
    monkeypatch.setattr(batch_last_kernels, "pairwise_dot_products", lambda a, b: products(0.5 * a, b))
    alone, stacked = (train_trace(plan, plan.trials[0], 20, "fp64", engine).losses for engine in ("loop", "batch_last"))
    assert alone == pytest.approx(sound.losses, rel=1e-9) != pytest.approx(stacked, rel=1e-6)


def test_changed_option_is_named_although_trials_fail(accepted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise TrialFailed("2 trials failed, so the gate has no verdict.")

    monkeypatch.setattr(check, "_train_missing", failing)
    monkeypatch.setattr(check, "git_output", lambda *_: "1a2b3c4")
    tiers = ("--tier", "exact", "--tier", "statistical")
    done = vitlab(accepted, *tiers, "--set", "train.optimizer.weight_decay=0.3", "--set", "seeds=1")
    assert "2 trials failed, so the gate has no verdict." in done.stdout
    with pytest.raises(TrialFailed):
        vitlab(accepted, "--tier", "statistical")
    assert done.exit_code == 1 and "train.optimizer.weight_decay: 0.05 -> 0.3" in done.stdout
    shown = " ".join(done.stdout.split())
    looked, accepted_by = (
        shown.index("See what has changed since the baseline was committed by 'git diff 1a2b3c4'"),
        shown.index("If the change is meant, accept"),
    )
    assert shown.index("0.05 -> 0.3") < looked < accepted_by, "acceptance is the last thing to try"
    assert "seeds: [0, 1, 2] -> [0]" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_acceptance_is_advised_only_where_baseline_is_compared(accepted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Finding("a", "learning", "regressed", "no loss falls")
    monkeypatch.setattr(check.gate, "train_and_check_learning", lambda *_: [failing])
    tiers = ("--tier", "exact", "--tier", "learning", "--set")
    same, other = (vitlab(accepted, *tiers, f"train.optimizer.weight_decay={decay}") for decay in (0.05, 0.3))
    assert same.exit_code == other.exit_code == 1 and "git" not in same.stdout, "there is no repository"
    assert "accept it" in " ".join(other.stdout.split()) and "accept it" not in " ".join(same.stdout.split())


def test_untrained_arm_is_detected(accepted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    easier = {"data.augment": [], "train.batch_size": 32, "train.optimizer.lr": 0.005, "train.steps": 100}
    easier |= {"design": None}
    _, plan = check.lab.plan_study(accepted / "gate.yaml", changes=easier)
    assert [item.verdict for item in train_and_check_learning(plan, (), Watch())] == ["pass"]
    monkeypatch.setattr(Training, "learning_rate", lambda self, step: 0.0)
    findings = list(train_and_check_learning(plan, (), Watch()))
    assert [item.verdict for item in findings] == ["regressed"]
    assert "validation loss does not fall in" in findings[0].sentence


def test_arm_whose_loss_falls_to_the_loss_of_guesses_has_not_learnt(
    accepted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten digits: equal probabilities have the loss log 10 = 2.3026."""
    _, plan = check.lab.plan_study(accepted / "gate.yaml", changes={"design": None})
    for after, verdict in ((2.3027, "inconclusive"), (2.3025, "pass")):
        trace = Trace(precision="fp32", losses=(2.5, 2.4), before=2.6, after=after)
        monkeypatch.setattr("vitlab.regression.gate.train_trace", lambda *_, trace=trace, **__: trace)
        (finding,) = train_and_check_learning(plan, (), Watch())
        assert (finding.verdict, "equal probabilities" in finding.sentence) == (verdict, verdict != "pass")


def test_validation_loss_that_rises_has_regressed_only_in_an_arm_that_learned_at_acceptance(
    accepted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost sign in a loss makes the training loss fall and the validation loss rise."""
    _, plan = check.lab.plan_study(accepted / "gate.yaml", changes={"design": None})
    for after, learned, verdict in (
        (8.763, ("baseline",), "regressed"),
        (2.309, ("baseline",), "inconclusive"),
        (8.763, ("other",), "inconclusive"),
    ):
        trace = Trace(precision="fp32", losses=(1.1, -5.0), before=2.309, after=after)
        monkeypatch.setattr("vitlab.regression.gate.train_trace", lambda *_, trace=trace, **__: trace)
        (finding,) = train_and_check_learning(plan, (), Watch(), learned)
        assert finding.verdict == verdict
        assert ("fell when the baseline was accepted" in finding.sentence) == (verdict == "regressed")


@pytest.mark.slow
def test_acceptance_warns_of_arms_that_learn_too_little(accepted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each check will find of them; a tier that was not asked for is not run."""
    found = [
        Finding("a", "learning", "inconclusive", "no better than equal probabilities"),
        Finding("b", "learning", "pass"),
    ]
    monkeypatch.setattr(check.gate, "train_and_check_learning", lambda *_: found)
    baseline = ("--baseline", str(accepted / "other.yaml"), "--accept", "--reason", "r")
    lines = vitlab(accepted, *baseline).stdout.splitlines()
    assert [line for line in lines if line.startswith("Warning: ") and "learning" in line] == [
        "Warning: a: learning: no better than equal probabilities; `learning` will be inconclusive at every check "
        "until the arm changes"
    ]
    file = accepted / "other.yaml"
    assert read_baseline(file).learned == ("b",), "a check compares with it"
    assert "learning" not in vitlab(accepted, *baseline, "--tier", "exact").stdout
    assert read_baseline(file).learned == ("b",), "what was not computed again is kept"


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("form: 1\nstudy: [1\naccepted: []", r"gate\.baseline\.yaml:3: not YAML"),
        ("form: 1\n\tstudy: s", r"gate\.baseline\.yaml:2: not YAML"),
        (b"form: 1\nstudy: \xff", r"gate\.baseline\.yaml: not YAML"),
        ("study: 7", "'accepted' is missing"),
        ("accepted: 2026-13-45", r"gate\.baseline\.yaml: not YAML"),
        ("accepted: !!timestamp x", r"gate\.baseline\.yaml: not YAML"),
        ("[" * 3000, r"gate\.baseline\.yaml: not YAML"),
        ("", "a mapping"),
    ],
)
def test_damaged_baseline_is_refused_with_its_line_and_remedy(
    tmp_path: Path, damage: str | bytes, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    (tmp_path / "gate.baseline.yaml").write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with pytest.raises(UserError, match=fault) as error:
        vitlab(tmp_path, "--plan")
    assert "damaged; delete it and accept" in str(error.value) and "git" not in str(error.value)
    assert "while scanning" not in str(error.value) and "<unicode string>" not in str(error.value)
    monkeypatch.setattr("vitlab.regression.baseline.git_output", lambda *_: "a commit")
    with pytest.raises(UserError, match=r"git checkout HEAD -- .*gate\.baseline\.yaml', or delete it and accept"):
        vitlab(tmp_path, "--plan")


def test_baseline_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "gate.baseline.yaml").write_text("form: 7")
    with pytest.raises(UserError, match="another version of vitlab; check with that, or delete it and accept") as error:
        vitlab(tmp_path, "--plan")
    assert "damaged" not in str(error.value)


def test_command_that_restores_a_baseline_quotes_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.regression.baseline.git_output", lambda *_: "a commit")
    file = tmp_path / "my gate.yaml"
    file.write_text("")
    with pytest.raises(UserError) as error:
        read_baseline(file)
    assert f"git checkout HEAD -- {shlex.quote(str(file))}" in str(error.value)


def test_arm_that_learned_nothing_does_not_pass_after_the_whole_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals its baseline to the bit, and its accuracy is a tenth."""
    monkeypatch.setattr(check.gate, "doubt_if_at_chance", doubt_if_at_chance)
    write(tmp_path, design=None, check={"on_inconclusive": "fail"})
    words = ("--tier", "statistical", "--set", "train.optimizer.lr=1e-12")
    done = vitlab(tmp_path, *words, "--accept", "--reason", "r")
    assert done.exit_code == 0 and " never " in done.stdout and "%" not in done.stdout.split("never")[1].split("\n")[0]
    assert "so every check of it is inconclusive" in " ".join(done.stdout.split())
    assert "In other rows" not in done.stdout and "passes with probability" not in " ".join(done.stdout.split())
    done = vitlab(tmp_path, *words)
    assert done.exit_code == 5 and "0 of 1 checks pass" in done.stdout and "identical" not in done.stdout
    assert "the arm may have learned nothing" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_cost_is_no_tier_of_a_study_without_limits(accepted: Path) -> None:
    with pytest.raises(UserError, match="limits no cost"):
        vitlab(accepted, "--tier", "cost", "--tier", "cost")
    stderr = vitlab(accepted, "--tier", "exact", "--tier", "cost").stderr
    assert "gate: exact\n" in stderr


def test_trace_equals_start_of_real_training(accepted: Path) -> None:
    """The mean of its losses equals the logged loss of a trial with as many steps."""
    _, plan = check.lab.plan_study(accepted / "gate.yaml")
    facts_traced = train_trace(plan, plan.trials[0], 24)
    frame = api.results(accepted / "out" / "studies" / "gate-check")
    assert sum(facts_traced.losses) / 24 == pytest.approx(frame["train/loss"][0], rel=1e-6)
    assert torch.tensor(facts_traced.losses).isfinite().all() and len(train_trace(plan, plan.trials[0], 5).losses) == 5


def test_trial_with_prerequisite_is_traced_with_it(tmp_path: Path) -> None:
    body = {**CONTENT["base"], "train": {"steps": 400, "batch_size": 16}}
    file = write(tmp_path, base={**CONTENT["base"], "init_from": {"trial": body}}, design=None, seeds=1)
    _, plan = check.lab.plan_study(file)
    assert plan.prerequisites
    cold, warm = (train_trace(item, item.trials[0], 10) for item in (check.lab.plan_study(write(tmp_path))[1], plan))
    assert warm.losses != cold.losses and len(warm.losses) == 10


def test_fault_of_prerequisite_keeps_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**CONTENT["base"], "train": {"steps": 400, "batch_size": 16}}
    file = write(tmp_path, base={**CONTENT["base"], "init_from": {"trial": body}}, design=None, seeds=1)
    _, plan = check.lab.plan_study(file)

    def fail(training: Training) -> None:
        raise DataError("the data is gone")

    monkeypatch.setattr(Training, "train_step", fail)
    with pytest.raises(DataError, match="the data is gone"):
        train_trace(plan, plan.trials[0], 10)


def test_missing_plugin_of_baseline_is_named(accepted: Path, tmp_path: Path) -> None:
    stored = read_baseline(accepted / "gate.baseline.yaml")
    assert stored.facts is not None
    arm = next(iter(stored.facts.arms.values())).model_copy(update={"origins": ("position:mine my own.py 1",)})
    facts = stored.facts.model_copy(update={"arms": {"baseline": arm}})
    write_baseline(tmp_path / "gate.baseline.yaml", stored.model_copy(update={"facts": facts}))
    write(tmp_path, design={"one_at_a_time": {"model.position": ["mine"]}})
    with pytest.raises(SpecError, match=r"accepted with --plugin 'PATH/my own.py'; add"):
        vitlab(tmp_path)
    (tmp_path / "my own.py").touch()
    write(tmp_path, design={"one_at_a_time": {"model.position": [{"type": "mine", "size": 3}], "model.nrm": ["none"]}})
    with pytest.raises(SpecError) as raised:
        vitlab(tmp_path)
    sentences = [problem.message for problem in raised.value.problems]
    assert len(sentences) == 2 and f"--plugin '{tmp_path / 'my own.py'}'" in sentences[0] and "'nrm'" in sentences[1]


def test_pass_probability_is_reported_before_training(accepted: Path, tmp_path: Path) -> None:
    done = vitlab(accepted, "--plan", "--out", str(tmp_path / "nothing"))
    assert done.exit_code == 0 and "passes with probability" in done.stdout and "Warning" in done.stdout
    assert not (tmp_path / "nothing" / "trials").exists()


def test_outlook_follows_acceptance_of_values_alone(accepted: Path, tmp_path: Path) -> None:
    """The values that an exact acceptance keeps may be of a metric that is no longer judged."""
    for suffix in (".yaml", ".baseline.yaml"):
        shutil.copy(accepted / f"gate{suffix}", tmp_path)
    done = vitlab(tmp_path, "--accept", "--reason", "facts", "--tier", "exact", "--set", "analysis.metric=val/loss")
    assert done.exit_code == 0 and "is written" in done.stdout and "passes" not in done.stdout
    done = vitlab(tmp_path, "--plan", "--set", "analysis.metric=val/loss")
    assert "gate.baseline.yaml has no values to judge." in done.stdout and "passes" not in done.stdout


def test_inconclusive_fails_if_configured(accepted: Path, tmp_path: Path) -> None:
    write(tmp_path, check={"on_inconclusive": "fail"}, seeds=1)
    shutil.copy(accepted / "gate.baseline.yaml", tmp_path)
    done = vitlab(tmp_path, "--out", str(accepted / "out"), "--tier", "statistical")
    assert done.exit_code == 5 and "too few" in done.stdout


@pytest.mark.slow
def test_inconclusive_arms_get_more_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differently drawn crops act like other seeds; the arm without crops is unchanged."""
    check = {"escalate_to": 5, "margin": {"val/accuracy": 1e-3}, "min_abs": {"val/accuracy": 1e-3}, "alpha": 1e-3}
    file = write(tmp_path, design={"arms": {"crops": {}, "none": {"data.augment": []}}}, check=check)
    assert vitlab(tmp_path, "--accept", "--reason", "five seeds of each").exit_code == 0
    cropped = Crop.__call__
    monkeypatch.setattr(Crop, "__call__", lambda self, x, key, id_B: cropped(self, x, key + 1, id_B))
    new = tmp_path / "new"
    document = json.loads(vitlab(tmp_path, "--out", str(new), "--json", "--tier", "statistical").stdout)
    crops, none = document["cells"]
    assert (none["verdict"], none["reason"], none["n"]) == ("pass", "identical", 3)
    assert (crops["arm"], crops["n"], crops["alpha"], crops["verdict"]) == ("crops", 5, 5e-4, "inconclusive")
    assert document["notes"] == ["5 seeds of crops, for 3 were inconclusive"]
    before, after = (
        api.results(out / "studies" / "gate-check").query("arm == 'crops'")["val/accuracy"].to_numpy()
        for out in (tmp_path / "out", new)
    )
    assert crops["p"] == pytest.approx(stats.ttest_rel(after, before, alternative="less").pvalue, rel=1e-6)
    results = api.results(new / "studies" / "gate-check")
    assert results.groupby("arm")["status"].value_counts().to_dict() == {
        ("crops", "done"): 5, ("none", "done"): 3, ("none", "missing"): 2
    }  # fmt: skip
    assert not (new / "studies" / "gate").exists() and lab.plan_study(file)[0].seeds.values == (0, 1, 2)


def test_no_surviving_arm_means_regression(accepted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial has the metric then; this is not a mistake of the file."""
    write(tmp_path, design=None)
    shutil.copy(accepted / "gate.baseline.yaml", tmp_path)
    monkeypatch.setattr(Training, "learning_rate", lambda self, step: math.inf)
    done = vitlab(tmp_path, "--tier", "statistical", "--format", "md")
    assert done.exit_code == 1 and "3 of 3 trainings were lost or collapsed (0 collapsed)" in done.stdout


@pytest.mark.slow
def test_reasons_are_stored_and_exact_results_not_retrained(accepted: Path, tmp_path: Path) -> None:
    write(tmp_path)
    baseline = tmp_path / "gate.baseline.yaml"
    assert vitlab(tmp_path, "--accept", "--reason", "only facts", "--tier", "exact").exit_code == 0
    assert read_baseline(baseline).values is None and not (tmp_path / "out" / "trials").exists()
    with pytest.raises(UserError, match="no section of the statistical tier"):
        vitlab(tmp_path, "--tier", "statistical")
    first = read_baseline(accepted / "gate.baseline.yaml")
    assert [entry.reason for entry in first.accepted] == ["the first"]
    assert first.values is not None and first.values.quanta == {"val/accuracy": pytest.approx(1 / 287, rel=0.01)}


def test_contradictory_settings_are_refused(accepted: Path, tmp_path: Path) -> None:
    write(tmp_path, study="other")
    baseline = ("--baseline", str(accepted / "gate.baseline.yaml"))
    for words, message in [
        (("--accept",), "--accept needs --reason"),
        (("--reason", "x"), "--reason needs --accept"),
        (("--plan", "--workflow"), "exclude each other"),
        (("--plan", "--json"), "do no check"),
        ((), "the baseline does not exist; write it: vitlab check .*gate.yaml --out .* --accept --reason TEXT"),
        (("--plan",), "write it: vitlab check .*gate.yaml .*--accept --reason TEXT"),
        (baseline, "is the baseline of study 'gate'"),
    ]:
        with pytest.raises(UserError, match=message):
            vitlab(tmp_path, *words)
    for words in ((), ("--plan",)):  # beside a missing baseline
        write(tmp_path, sedes=3, design={"one_at_a_time": {"model.position": ["lerned"]}})
        with pytest.raises(SpecError) as mistakes:
            vitlab(tmp_path, *words)
        assert [word in str(mistakes.value) for word in ("sedes", "lerned", "does not exist")] == [True] * 3
    write(tmp_path, tune={"knobs": {"train.optimizer.lr": [0.01, 0.02]}})
    with pytest.raises(UserError, match="has 'tune', which would hide a change"):
        vitlab(tmp_path, "--accept", "--reason", "x")


def test_workflow_installs_torch_of_baseline(accepted: Path, tmp_path: Path) -> None:
    write(tmp_path)
    text = (accepted / "gate.baseline.yaml").read_text()
    line = f"\n  torch: {torch.__version__.partition('+')[0]}\n"
    assert text.count(line) == 1
    (tmp_path / "gate.baseline.yaml").write_text(text.replace(line, "\n  torch: 2.11.9\n"))
    done = vitlab(tmp_path, "--workflow")
    assert "pip install torch==2.11.9 torchvision " in done.stdout and "does not exist" not in done.stderr
    (tmp_path / "gate.baseline.yaml").unlink()
    assert "the workflow has the installed versions" in vitlab(tmp_path, "--workflow").stderr


def test_workflow_is_valid_yaml_that_runs_check(accepted: Path) -> None:
    done = vitlab(accepted, "--workflow")
    jobs = yaml.safe_load(done.stdout)["jobs"]
    installed = [step["run"] for step in jobs["check"]["steps"] if "pip install torch" in step.get("run", "")]
    version = torch.__version__.partition("+")[0]
    assert [words.split()[2] for words in installed] == [f"torch=={version}"], (
        "under another every trace is inconclusive"
    )
    runs = [step["run"] for step in jobs["check"]["steps"] if "vitlab check" in step.get("run", "")]
    assert len(runs) == 2
    options = {name for parameter in command.params for name in parameter.opts}
    for run in runs:
        words = run.split()
        assert words[:3] == ["vitlab", "check", str(accepted / "gate.yaml")]
        assert {word for word in words if word.startswith("--")} <= options


def test_workflow_repeats_options_and_python_of_baseline(accepted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has a file alone, with a plugin beside it."""
    monkeypatch.setattr(check_cli, "_pip_source_of_vitlab", lambda: ADDRESS)
    monkeypatch.chdir(accepted)
    (accepted / "own.py").write_text("")
    steps = yaml.safe_load(vitlab(accepted, "--workflow", "--plugin", "own.py", "--set", "seeds=[1, 2]").stdout)[
        "jobs"
    ]["check"]["steps"]
    runs = [shlex.split(step["run"]) for step in steps if "run" in step]
    checks = [words for words in runs if words[:2] == ["vitlab", "check"]]
    assert len(checks) == 2
    for words in checks:
        parsed = command.make_context("check", [*words[2:]], resilient_parsing=True).params
        assert parsed["changes"] == ("seeds=[1, 2]",) and parsed["plugins"] == (Path("own.py"),)
        assert parsed["baseline"] == accepted / "gate.baseline.yaml" and "--out" not in words
    assert ["pip", "install", ADDRESS] in runs, "there is no package in this folder"
    assert ["vitlab", "plugins", "--strict"] in runs[: runs.index(checks[0])]
    [python] = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    values = read_baseline(accepted / "gate.baseline.yaml").values
    assert values is not None and values.versions["python"].startswith(f"{python}.")
    (accepted / "pyproject.toml").write_text("")
    assert f"pip install {ADDRESS} -e ." in vitlab(accepted, "--workflow").stdout
    (accepted / "pyproject.toml").unlink()


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, f"vitlab=={vitlab_version}"),  # from an index
        ({"url": "https://example.org/v", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}, f"{ADDRESS[:-6]}c0ffee"),
        (
            {"url": "https://me:SECRET@example.org/v?t=SECRET", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            f"{ADDRESS[:-6]}c0ffee",
        ),
        ({"url": "https://example.org/v.whl", "archive_info": {}}, UNKNOWN),
        ({"url": "file:///home/me/v.whl", "archive_info": {}}, UNKNOWN),
        ({"url": "file:///home/me/v", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}, UNKNOWN),
        ({"url": "CLONE", "dir_info": {}}, "git+https://example.org/o/v.git@COMMIT"),
        ({"url": "BARE", "dir_info": {"editable": True}}, UNKNOWN),
        ({"url": "HERE", "dir_info": {}}, "."),
        ({"url": "LINK", "dir_info": {}}, "."),
    ],
)
def test_workflow_installs_vitlab_from_where_it_is(
    origin: Any, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("CLONE", "BARE", "HERE", "LINK")}
    (tmp_path / "LINK").symlink_to(tmp_path / "HERE")
    make_clone(places["CLONE"], "git@example.org:o/v.git")
    for name in ("BARE", "HERE"):
        subprocess.run(["git", "init", "-q", str(places[name])], check=True)
    source = source.replace("COMMIT", head(places["CLONE"])) if source != UNKNOWN else source
    monkeypatch.chdir(places["HERE"])
    if origin and origin["url"] in places:
        origin["url"] = places[origin["url"]].as_uri()
    installed = SimpleNamespace(read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr(check_cli, "distribution", lambda name: installed)
    assert check_cli._pip_source_of_vitlab() == source


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://me:SECRET@example.org/o/v.git", "https://example.org/o/v.git"),
        ("https://ghp_SECRET@example.org/o/v.git", "https://example.org/o/v.git"),
        ("https://example.org/o/v.git?private_token=SECRET", "https://example.org/o/v.git"),
        ("ssh://git:SECRET@example.org:22/o/v.git", None),
        ("file:///home/me/v", None),
        ("git@work:o/v.git", None),  # an alias in this user's configuration of ssh
    ],
)
def test_workflow_has_no_secrets_and_no_address_of_this_machine_alone(
    remote: str, address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_clone(tmp_path, remote)
    origin = {"url": tmp_path.as_uri(), "dir_info": {}}
    installed = SimpleNamespace(read_text=lambda name: json.dumps(origin))
    monkeypatch.setattr(check_cli, "distribution", lambda name: installed)
    assert check_cli._pip_source_of_vitlab() == (f"git+{address}@{head(tmp_path)}" if address else UNKNOWN)
    monkeypatch.setenv("PATH", "")
    assert check_cli._pip_source_of_vitlab() == UNKNOWN, "without git"


def make_clone(folder: Path, remote: str) -> None:
    """Make a repository with one commit, and an origin."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    subprocess.run([*git, "remote", "add", "origin", remote], check=True)


def head(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_workflow_of_repository_checks_present_baseline() -> None:
    """Its commands parse, its files exist, and its baseline is of the pinned torch and of today's trials."""
    root = Path(__file__).parents[1]
    job = yaml.safe_load((root / ".github" / "workflows" / "check.yml").read_text())["jobs"]["quickstart"]
    words = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    for program, name, *rest in words:
        if program == "vitlab":
            command_of_vitlab = cli.get_command(click.Context(cli), name)
            assert command_of_vitlab is not None
            command_of_vitlab.make_context(name, list(rest))
        else:
            assert (program, name) == ("pip", "install") and (root / rest[rest.index("-c") + 1]).is_file()
    (check_step,) = [step for step in job["steps"] if "vitlab check" in step.get("run", "")]
    assert check_step["timeout-minutes"] <= 5 and shlex.split(check_step["run"])[2] == "pipelines/quickstart.yaml"
    baseline = read_baseline(root / "pipelines" / "quickstart.baseline.yaml")
    assert baseline.facts is not None and baseline.values is not None
    pins = dict(line.split("==") for line in (root / "constraints.txt").read_text().splitlines() if "==" in line)
    assert baseline.facts.torch == pins["torch"] and baseline.values.versions["torch"].startswith(pins["torch"])
    plan = lab.plan_study(root / "pipelines" / "quickstart.yaml")[1]
    assert {arm: facts.key for arm, facts in baseline.facts.arms.items()} == {
        planned.arm: planned.trial.key for planned in plan.trials if planned.seed == 0
    }
