"""`vitlab check` on a real study: what is unchanged passes, and what is broken is found though its results are there.

Bugs are put in while the process runs, so that the code's files, and with them the places of results in the store, stay
the same: the store is full of what the sound code has computed, and whoever asked it would see no difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner

import vitlab.components.attention as attention
from vitlab import checking
from vitlab.cli import cli
from vitlab.cli.check import command
from vitlab.components.position.additive import Learned
from vitlab.data.augment.geometric import Crop
from vitlab.errors import UserError
from vitlab.store import Store
from vitlab.training.loop import Training

CONTENT: dict[str, Any] = {
    "study": "gate",
    "base": {
        "data": {"type": "digits", "augment": [{"type": "crop", "padding": 1}]},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "learned"},
        "train": {"steps": 24, "batch_size": 16, "evaluations": 1, "optimizer": {"type": "adamw", "lr": 0.01}},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 3,
    "run": {"executor": "inline", "tracking_uri": "http://127.0.0.1:9"},
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


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study, its baseline, and a store that holds all its results."""
    folder = tmp_path_factory.mktemp("gate")
    write(folder)
    assert vitlab(folder, "--accept", "--reason", "the first").exit_code == 0
    return folder


def no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learned, "add", lambda self, x_BTD, layer: x_BTD)


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 / K instead of 1 / root K."""
    sound = attention._fused_kernel
    monkeypatch.setattr(attention, "_fused_kernel", lambda q, k, v, bias: sound(q * q.shape[-1] ** -0.5, k, v, bias))


def half_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Training.rate
    monkeypatch.setattr(Training, "rate", lambda self, step: 0.5 * sound(self, step))


def no_augmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crop, "__call__", lambda self, x, *rest: x)


@pytest.mark.parametrize(
    ("bug", "arms"),
    [
        (no_position, {"baseline"}),
        (wrong_scale, {"baseline", "position=none"}),
        (half_the_rate, {"baseline", "position=none"}),
        (no_augmentation, {"baseline", "position=none"}),
    ],
)
def test_a_bug_is_caught_though_the_store_is_full(
    accepted: Path, bug: Callable[[pytest.MonkeyPatch], None], arms: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    _, plan = checking.lab.plan_study(accepted / "gate.yaml")
    store = Store(accepted / "out")
    assert all(store.trial(item.trial.key, item.trial.code).done() for item in plan.trials)
    done = vitlab(accepted, "--json", "--tier", "exact")
    said = json.loads(done.stdout)
    assert done.exit_code == 1 and said["verdict"] == "regressed"
    found = [finding for finding in said["findings"] if finding["verdict"] == "regressed"]
    assert {(finding["arm"], finding["check"]) for finding in found} == {
        (arm, f"trace {precision}") for arm in arms for precision in ("fp64", "fp32")
    }


def test_what_github_and_junit_are_told(accepted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_the_rate(monkeypatch)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    done = vitlab(accepted, "--tier", "exact", "--junit", str(tmp_path / "new" / "check.xml"))
    assert done.exit_code == 1
    assert done.stdout.count("::error file=") == 4
    assert "## gate: regressed" in (tmp_path / "summary.md").read_text()
    assert ElementTree.parse(tmp_path / "new" / "check.xml").getroot().get("failures") == "4"


def test_another_option_in_the_file_is_named(accepted: Path) -> None:
    done = vitlab(accepted, "--tier", "exact", "--set", "train.optimizer.weight_decay=0.3", "--set", "seeds=1")
    assert done.exit_code == 1 and "train.optimizer.weight_decay: 0.05 -> 0.3" in done.stdout


def test_what_cannot_be_meant_is_a_sentence(accepted: Path, tmp_path: Path) -> None:
    write(tmp_path, study="other")
    baseline = ("--baseline", str(accepted / "gate.baseline.yaml"))
    for words, said in [
        (("--accept",), "says why"),
        (("--reason", "x"), "says why"),
        (("--anchor",), "--anchor goes with"),
        (("--plan", "--workflow"), "ask for one"),
        ((), "no baseline is there"),
        (baseline, "is the baseline of study 'gate'"),
    ]:
        with pytest.raises(UserError, match=said):
            vitlab(tmp_path, *words)


def test_the_workflow_is_yaml_that_runs_this_check(accepted: Path) -> None:
    done = vitlab(accepted, "--workflow")
    jobs = yaml.safe_load(done.stdout)["jobs"]
    runs = [step["run"] for step in jobs["check"]["steps"] if "vitlab check" in step.get("run", "")]
    assert len(runs) == 2
    known = {name for parameter in command.params for name in parameter.opts}
    for run in runs:
        words = run.split()
        assert words[:3] == ["vitlab", "check", str(accepted / "gate.yaml")]
        assert {word for word in words if word.startswith("--")} <= known
