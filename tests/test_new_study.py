"""Tests of ``vitlab new study``: from options and from a terminal, and what it refuses to write."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from vitlab.cli import cli
from vitlab.errors import UserError
from vitlab.spec import read_document

ANSWERS = {
    "data": "digits",
    "differs": "model.position=none,sincos2d",
    "seeds": "3",
    "length": "7 steps",
    "metric": "val/accuracy",
}


def new(file: str, **answers: str) -> Result:
    words = [word for name, value in {**ANSWERS, **answers}.items() for word in (f"--{name}", value) if value]
    return CliRunner().invoke(cli, ["new", "study", file, *words], standalone_mode=False)


def plan(file: str) -> dict[str, object]:
    result = CliRunner().invoke(cli, ["plan", file, "--format", "json"], standalone_mode=False)
    assert result.exception is None, result.exception
    planned: dict[str, object] = json.loads(result.stdout)
    return planned


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_options_give_a_study_that_plans() -> None:
    result = new("mine", data="digit_scenes", metric="val/miou", length="2 epochs", seeds="[3, 5]")
    assert result.exception is None and "mine.yaml is written: 3 arms, 6 trials" in result.stdout
    planned = plan("mine.yaml")
    assert [arm["name"] for arm in planned["arms"]] == ["baseline", "position=none", "position=sincos2d"]  # type: ignore[attr-defined]
    data = read_document("mine.yaml").data
    assert data["study"] == "mine" and data["base"]["train"]["epochs"] == 2 and data["seeds"] == [3, 5]
    first = Path("mine.yaml").read_text().splitlines()[0]
    schema = json.loads(Path(first.removeprefix("# yaml-language-server: $schema=")).read_text())
    Draft202012Validator(schema).validate(data)


def test_several_paths_values_with_options_and_a_metric_beside_the_standard_ones() -> None:
    differs = "model.head={type: linear, pool: gap}; train.optimizer.lr=1e-3, 1e-2"
    assert new("two.yaml", differs=differs, metric="val/balanced_accuracy").exception is None
    data = read_document("two.yaml").data
    assert data["design"]["one_at_a_time"] == {
        "model.head": [{"type": "linear", "pool": "gap"}],
        "train.optimizer.lr": [1e-3, 1e-2],
    }
    assert data["base"]["train"]["metrics"] == ["balanced_accuracy"]
    assert len(plan("two.yaml")["arms"]) == 4  # type: ignore[arg-type]


def test_terminal_is_asked_again_after_a_mistake() -> None:
    terminal, stdin = pty.openpty()
    typed = ["digitz", "digits", "model.position=nothing", "model.position=none", "", "5 steps", ""]
    os.write(terminal, "".join(f"{line}\n" for line in typed).encode())
    done = subprocess.run(
        [sys.executable, "-m", "vitlab", "new", "study"], stdin=stdin, capture_output=True, text=True, check=False
    )
    for descriptor in (terminal, stdin):
        os.close(descriptor)
    assert done.returncode == 0, done.stderr
    assert "Did you mean 'digits'?" in done.stderr and "no position called 'nothing'" in done.stderr
    assert done.stderr.count("Data set") == done.stderr.count("What differs") == 2
    data = read_document("study.yaml").data
    assert data["base"]["train"]["steps"] == 5 and data["seeds"] == 5


@pytest.mark.parametrize(
    ("file", "answers", "message"),
    [
        ("a.yaml", {"seeds": "", "metric": ""}, "stdin is not a terminal; give --seeds, --metric"),
        ("a.yaml", {"data": "digts"}, "--data: no dataset called 'digts'. Did you mean 'digits'?"),
        ("a.yaml", {"differs": "model.positon=none"}, "--differs: model 'vit' has no option 'positon'"),
        ("a.yaml", {"differs": "none"}, "--differs: none: write PATH=VALUE"),
        ("a.yaml", {"length": "soon"}, "--length: soon: write a number of epochs"),
        ("a.yaml", {"seeds": "0"}, "--seeds: "),
        ("a.yaml", {"metric": "accuracy"}, "--metric: "),
        ("_a.yaml", {}, "_a.yaml: "),
        ("old.yaml", {}, "old.yaml exists already and is not overwritten"),
        ("old.yaml/a.yaml", {}, "old.yaml"),
    ],
)  # fmt: skip
def test_nothing_is_written_after_a_mistake(file: str, answers: dict[str, str], message: str) -> None:
    Path("old.yaml").write_text("mine")
    error = new(file, **answers).exception
    assert isinstance(error, UserError) and str(error).startswith(message), error
    assert [path.name for path in Path().iterdir()] == ["old.yaml"] and Path("old.yaml").read_text() == "mine"
