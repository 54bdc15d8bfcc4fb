"""Tests of the command line: exit codes, stdout and stderr, and parsable output."""

from __future__ import annotations

import base64
import csv
import gc
import importlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import html5lib
import pandas as pd
import pytest
import synthetic_studies
import yaml

import vitlab
from vitlab import interrupts, lab, registry, report, spec
from vitlab.__main__ import main as run_command
from vitlab.cli import COMMANDS, MODULES, cli, main, options, weights
from vitlab.cli import plan as plan_module
from vitlab.cli import run as cli_run
from vitlab.cli.errors import print_error
from vitlab.cli.models import _find_models, _format_predictions, name_folders
from vitlab.cli.show import study_schema
from vitlab.components.position import PRESETS
from vitlab.data.prepare import DataSource
from vitlab.driver.explanations import find_class
from vitlab.errors import BrokenComponent, Interrupted, UserError, list_some
from vitlab.explaining import one_image
from vitlab.geometry import DataInfo
from vitlab.planning.packaged import packaged_studies
from vitlab.planning.study_folder import write_registered_plan
from vitlab.planning.values import Plan
from vitlab.report.api import Answer, open_study
from vitlab.report.formats import parts_to_text
from vitlab.report.phrasing import format_duration
from vitlab.store.files import write_json
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.locks import hold_lock
from vitlab.store.result import Ending
from vitlab.training.artifacts import make_checkpoint_writer
from vitlab.weights.opening import FORMATS

pytestmark = pytest.mark.usefixtures("no_figures", "unreachable_tracker")

ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"
"""Nobody listens there: these tests are of the commands, not of MLflow."""

STUDY = {
    "study": "tiny",
    "question": "Does the position matter?",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "sinusoidal"},
        "train": {"steps": 4, "batch_size": 16, "evaluations": 2},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": {"type": "mlflow", "uri": NOWHERE}},
}


def call(*arguments: object) -> tuple[int, str, str]:
    """Run a ``vitlab`` command in this process and return exit code, stdout and stderr."""
    code, out, err = call_bytes(*arguments)
    return code, out.decode(), err


def call_bytes(*arguments: object) -> tuple[int, bytes, str]:
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    code = 0
    try:
        with (
            mock.patch.object(sys, "argv", ["vitlab", *map(str, arguments)]),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            main()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    out.flush()
    return code, out.buffer.getvalue(), err.getvalue()  # type: ignore[attr-defined]


def parsed(text: str) -> Any:
    """Parse strict JSON, without NaN and infinities."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def relative(path: Path) -> Path:
    """Return a path as messages print it: relative to the working directory if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a study run by the command line: its file and its output folder."""
    folder = tmp_path_factory.mktemp("ran")
    file, out = write(folder), folder / "out"
    code, printed, err = call("run", file, "--out", out, "--json")
    assert code == 0, err
    assert parsed(printed)["study"] == "tiny"
    assert "tiny: 2 arms, 4 trials; 4 to train\n" in err and "[4/4]" in err, "progress goes to stderr"
    return file, out


# -- run --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_prints_answer_to_stdout_and_progress_to_stderr(
    ran: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = ran
    monkeypatch.setattr(report, "write", lambda *_: [])
    code, printed, err = call("run", file, "--out", out)
    assert code == 0
    assert "0 trained, 4 cached from earlier runs." in printed and "position=none" in printed
    # The path is relative if the output folder is below the working directory.
    assert f"{out.name}/studies/tiny/report/report.html" in printed and "vitlab sync" in printed
    assert "nothing to train" in err and "nothing to train" not in printed
    # Another machine needs a copy of the trials alone.
    shutil.copytree(out / "trials", tmp_path / "trials")
    assert "0 trained, 4 cached from earlier runs." in call("run", file, "--out", tmp_path)[1]


@pytest.mark.parametrize(
    ("start_command", "line"),
    [("vitlab ui tiny", "MLflow   vitlab ui tiny   (opens the study)"), ("", "MLflow   http://server/#/experiments/1")],
)
def test_run_prints_command_that_opens_the_study_or_address_of_server(start_command: str, line: str) -> None:
    plan = Plan("tiny", "", (), (), spec.Analysis())
    answer = Answer(plan, Store(Path("out")), 1, 0, 0, "MLflow", "http://server/#/experiments/1", start_command)
    assert cli_run._format_run_summary(answer).splitlines()[-1] == line


def test_tables_of_documentation_keep_their_lines() -> None:
    printed = call("show", "position", "sincos2d")[1]
    assert "\n==========  ====" in printed and "\nmae         T^(" in printed


RAN = "2 combinations of components ran two steps each, in this run or an earlier one.\n"


@pytest.mark.slow
def test_smoke_trains_each_component_set_two_steps(tmp_path: Path) -> None:
    code, printed, err = call("run", write(tmp_path), "--out", tmp_path / "out", "--smoke")
    assert (code, printed) == (0, RAN), err
    code, printed, err = call("run", write(tmp_path), "--out", tmp_path / "out", "--smoke")
    assert (code, printed) == (0, RAN) and "nothing to train, 2 trained already" in err
    results = [json.loads(file.read_text()) for file in tmp_path.glob("out/trials/*/*/result.json")]
    assert len(results) == 2 and not (tmp_path / "out" / "studies").exists()
    arms = {"one_at_a_time": {"model.position": ["none"], "model.dim": [16, 24]}}
    code, printed, err = call("run", write(tmp_path, design=arms), "--out", tmp_path / "more", "--smoke")
    assert (code, printed) == (0, RAN), err
    assert "4 trials; 2 to train\n" in err


def test_commands_collect_garbage_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports of MLflow and torch make millions of objects."""
    thresholds: list[int] = []
    before = gc.get_threshold()
    monkeypatch.setattr(interrupts, "install", lambda: None)
    monkeypatch.setattr(interrupts.state, "code", None)
    monkeypatch.setattr("vitlab.cli.main", lambda: thresholds.append(gc.get_threshold()[0]))
    try:
        run_command()
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled() and thresholds[0] >= 100 * before[0]


@pytest.mark.slow
def test_failed_trials_exit_with_4_and_answer_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sour.py").write_text(
        "from vitlab.training.optim import optimizer\nfrom vitlab.training.optim.torch_optimizers import AdamW\n\n\n"
        "@optimizer.register('sour')\nclass Sour(AdamW):\n    '''Refuses.'''\n\n"
        "    def build(self, groups):\n        raise RuntimeError('not today')\n"
    )
    file = write(tmp_path, design={"one_at_a_time": {"train.optimizer": ["sour"]}}, seeds=1)
    command = ("run", file, "--out", tmp_path / "out", "--plugin", tmp_path / "sour.py", "--json")
    code, printed, err = call(*command[:-1])
    assert code == 4 and "\n1 trained, 0 cached from earlier runs, 1 failed.\n" in printed
    code, printed, err = call(*command, "--retry-failed")
    assert code == 4 and parsed(printed)["result"]["study"] == "tiny" and parsed(printed)["kind"] == "trials"
    why = f"vitlab status tiny --out {relative(tmp_path / 'out')}"
    assert f"1 trial failed; '{why}' shows why" in err and "RuntimeError: not today, at " in err and "sour.py:10" in err
    code, reasons, err = call(*why.split()[1:])
    assert (code, err) == (0, "") and "RuntimeError: not today" in " ".join(reasons.split())
    assert (tmp_path / "out" / "studies" / "tiny" / "report" / "report.html").exists()
    monkeypatch.setattr(report, "write", lambda *_: [])
    assert call(*command)[0] == 4, "what failed stays failed until it is asked for again"

    code, printed, _ = call("status", file, "--out", tmp_path / "out", "--json")
    status = parsed(printed)
    assert code == 0 and status["arms"] == {"baseline": {"done": 1}, "optimizer=sour": {"failed": 1}}
    folder = next(path.parent for path in tmp_path.glob("out/trials/*/*/failure.json"))
    assert status["failures"][0].startswith("optimizer=sour s0 failed: RuntimeError: not today, at ")
    code, printed, _ = call("status", file, "--out", tmp_path / "out")
    logs = f"'vitlab logs tiny --out {relative(tmp_path / 'out')} --arm ARM --seed N' shows"
    assert logs in " ".join(printed.split())
    again = " ".join(printed.split()).partition(", this trains what has no result: ")[2]
    assert again.startswith("vitlab run ") and again.endswith("/sour.py --retry-failed") and "studies/tiny" in again
    (folder / "log.txt").write_text("printed by the worker")
    code, printed, err = call("logs", file, "--out", tmp_path / "out")
    assert code == 0 and err == "" and "\nprinted by the worker\n" in printed and "Traceback" in printed
    assert printed.startswith("optimizer=sour, seed 0: failed: RuntimeError: not today, at ")


def test_background_run_receives_every_option(tmp_path: Path) -> None:
    """Includes options added later: its command line is built from the existing options."""
    (tmp_path / "own.py").touch()
    values = {"workers": "2", "only": "arm=a b", "changes": "data.root=/my data", "plugins": str(tmp_path / "own.py")}
    words = [
        word
        for option in cli_run.run_command.params
        if isinstance(option, click.Option) and "--detach" not in option.opts
        for _ in range(2 if option.multiple else 1)
        for word in [option.opts[0], *([] if option.is_flag else [values.get(str(option.name), "some")])]
    ]
    assert {"--out", "--set", "--plugin", "--measure"} < set(words)
    with cli_run.run_command.make_context("run", ["study.yaml", *words, "--detach"]) as context:
        assert list(options.words_of_given_options(context, without=("--detach",))) == words
    with cli_run.run_command.make_context("run", ["study.yaml", "--detach"]) as context:
        assert list(options.words_of_given_options(context, without=("--detach",))) == []


def test_only_takes_arms(ran: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell takes a name or a pattern, as Python does."""
    file, out = ran
    monkeypatch.setattr(report, "write", lambda *_: [])
    code, _, err = call("run", file, "--out", out, "--only", "position=nones")
    assert code == 2 and "no arm matches 'position=nones'. Did you mean 'position=none'?" in err
    for pattern in ("position=none", "position=*"):
        code, _, err = call("run", file, "--out", out, "--only", pattern)
        assert code == 0 and "nothing to train, " in err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "tiny.yaml", "seeds=3"], "changed by --set seeds=3."),
        (["plan", "tiny.yaml", "train.steps=5", "+seeds=[0,1]"], "changed by --set train.steps=5 --set seeds=[0,1]."),
        (["validate", "tiny.yaml", "seeds=3"], "changed by --set seeds=3"),
        (["run", "seeds=3"], "changed by --set seeds=3"),
        (["show", "position", "none", "seeds=3"], "extra argument (seeds=3). See '"),
    ],
)
def test_change_without_set_is_hinted_at(words: list[str], hint: str, ran: tuple[Path, Path], tmp_path: Path) -> None:
    code, _, err = call(*(ran[0] if word == "tiny.yaml" else word for word in words))
    assert code == 2 and hint in err


def test_option_that_no_value_of_a_study_resembles_brings_no_hint(ran: tuple[Path, Path]) -> None:
    assert call("run", ran[0], "--frobnicate")[2].startswith("No such option '--frobnicate'. See '")


# -- exit codes of what goes wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], ["No such command 'rnu'", "Did you mean 'run'?"]),
        (["run"], ["Missing argument 'FILE'"]),
        (["run", "{file}", "--wrokers", "2"], ["No such option", "--wrokers", "'--workers'"]),
        (["run", "{file}", "--sedes", "5"], ["No such option", "'--sedes'", "is changed by --set seeds=VALUE."]),
        (["run", "{file}", "--batch-size", "5"], ["No such option", "is changed by --set train.batch_size=VALUE."]),
        (["run", "{file}", "--model.depth", "5"], ["No such option", "is changed by --set model.depth=VALUE."]),
        (["run", "{file}", "--otu", "x"], ["No such option", "Did you mean", "'--out'"]),
        (["run", "{file}", "--workers", "0"], ["0 is not in the range"]),
        (["run", "{file}", "--executor", "loacl"], ["--executor loacl: no executor called 'loacl'.", "'local'"]),
        (["run", "{file}", "--seed", "3"], ["changed by --set seeds=VALUE."]),
        (["run", "{file}", "0.01"], ["argument (0.01). A value of the study file is changed by --set PATH=VALUE."]),
        (["run", "{file}", "lr=0.01"], ["is changed by --set train.optimizer.lr=0.01."]),
        (
            ["run", "{file}", "--dry-run"],
            ["'--dry-run'. 'vitlab plan FILE' shows what 'vitlab run FILE' would train; "],
        ),
        (["run", "{file}", "--model", "b"], ["'--model'. A value of the study file is changed by --set model=VALUE."]),
        (["run", "{file}", "b.yaml"], ["(b.yaml). A command takes one study file: 'vitlab run FILE', or "]),
        (["run", "{file}", "--resume"], ["'--resume'. A run resumes by itself; give the same command again."]),
        (["run", "{file}", "--force"], ["'--force'. A finished trial is not trained again; --retry-failed repeats "]),
        (["run", "--config", "{file}"], ["'--config'. FILE is an argument, as in 'vitlab run FILE'."]),
        (["run", "{file}", "-o", "x"], ["'-o'. Type 'vitlab run FILE --out FOLDER', "]),
        (["judge", "x.csv", "-m", "acc"], ["No such option '-m'. Did you mean '--metric' or '--margin'? See '"]),
        (["report", "{file}", "-f", "md"], ["No such option '-f'. Did you mean '--format'? See '"]),
        (
            ["gc", "--dry-run"],
            ["'--dry-run'. 'vitlab plan FILE' shows what", "'vitlab gc' deletes nothing without --yes."],
        ),
        (["run", "{file}", "-m", "a=1,2"], ["'-m'. Write design: {grid: "]),
        (["run", "{file}", "--verbose"], ["'--verbose'. Messages have one level; 'vitlab logs STUDY' prints what"]),
        (["-V"], ["'-V'. Messages have one level; ", "'vitlab --version' the version."]),
        (["run", "{file}", "--wandb"], ["'--wandb'. Write run.tracker with the name of a tracker: mlflow, or wandb"]),
        (["logs", "{file}", "baseline"], ["argument (baseline). An arm is named by --arm ARM."]),
        (
            ["explain", "{file}", "baseline"],
            ["argument (baseline). An arm is named by --arm ARM, an image by --image IMAGE."],
        ),
        (["judge", "a.csv", "b.csv"], ["argument (b.csv). See '"]),
        (["eval", "{file}"], ["'eval'. 'vitlab run FILE' evaluates, too; 'vitlab report STUDY' prints the values."]),
        (["init"], ["No such command 'init'. 'vitlab new study FILE' writes a study file."]),
        (["rm", "tiny"], ["'rm'. Delete the folder studies/NAME in the output folder; 'vitlab gc --yes' then deletes"]),
        (["sweep"], ["No such command 'sweep'. Write design: {grid: "]),
        (["show", "softmax"], ["'softmax'. Softmax attention is model.attention: auto; 'vitlab show attention auto'"]),
        (["judge", "x.csv", "--force"], ["No such option '--force'. See '"]),
        (["judge", "x.csv", "--output", "r.md"], ["No such option '--output'. Type --format md > FILE, or another fo"]),
        (["train", "{file}"], ["No such command 'train'. Type 'vitlab run FILE'."]),
        (
            ["{file}"],
            ["No such command '", "one study file: 'vitlab run FILE', or 'vitlab new study FILE' for a new one."],
        ),
        (["new", "x.yaml"], ["No such command 'x.yaml'. A command takes one study file: "]),
        (["tune", "{file}"], ["No such command 'tune'. Write tune: {knobs: {"]),
        (["kill"], ["No such command 'kill'. Ctrl-C stops a run, "]),
        (["list", "studies", "vit"], ["type vitlab list studies | grep vit."]),
        (["ls"], ["No such command 'ls'. Type 'vitlab list' for components, 'vitlab studies' for studies."]),
        (["help"], ["No such command 'help'. Type 'vitlab --help', or 'vitlab COMMAND --help'."]),
        (["version"], ["No such command 'version'. Type 'vitlab --version'."]),
        (["run", "{file}", "--set", "run.executor=loacl"], ["--set run.executor=loacl: no executor called 'loacl'."]),
        (["show", "train.optimizer.lr"], ["'vitlab show optimizer NAME' the options of one."]),
        (["show", "model.position.learned"], [" 'vitlab list position' lists the components of position, "]),
        (["run", "{file}", "--only", "sinusoid"], ["no arm matches 'sinusoid'"]),
        (
            ["list", "vit"],
            ["no slot called 'vit'. For a component, an option or a study, type 'vitlab show vit'. Slots:"],
        ),
        (["run", "{file}", "--set", "run.keep=always"], ["allowed: none, last, best, {every: N}."]),
        (["run", "{file}", "--set", "train.metrics=[mcc]"], ["no metric called 'mcc'. If a file defines it"]),
        (["run", "{file}", "--set", "model.dmi=3"], ["no option 'dmi'", "Did you mean 'dim'?"]),
        (["run", "{file}", "--plugin", "{out}/no.py"], ["no.py", "this is not a file"]),
        (["plan", "{file}", "--jsn"], ["No such option", "'--json'"]),
        (["status", "tinny"], ["study 'tinny' has not been run", "Did you mean 'tiny'?"]),
        (["report", "tinny"], ["study 'tinny' has not been run", "Did you mean 'tiny'?"]),
        (["explain", "tinny"], ["study 'tinny' has not been run", "Did you mean 'tiny'?"]),
        (["report", "tiny", "--format", "pdf"], ["--format: found 'pdf'; allowed: 'terminal', 'md', "]),
        (["logs", "zzzz"], ["study 'zzzz' has not been run"]),
        (["logs", "tiny", "--lines", "0"], ["0 is not in the range x>=1"]),
        (["logs", ""], ["study '.' has not been run"]),
        (["logs", "../.."], ["study '../..' has not been run"]),
        (["list", "weigts"], ["no slot called 'weigts'. Did you mean 'weights'?"]),
        (["list", "postion"], ["no slot called 'postion'", "'position'", "Slots:"]),
        (["show", "study", sys.executable], [f"{sys.executable}:"]),
        (["export", "tiny", "--arm", "a", "--to", "hub:me/tiny"], ["--to hub:me/tiny: vitlab uploads nothing", "hf"]),
        (["show", "position", "leraned"], ["no position called 'leraned'", "'learned'"]),
        (["show", "ropd2d"], ["no slot, component or study called 'ropd2d'. Did you mean 'rope2d'?"]),
        (["show", "base.train.emma"], ["called 'base.train.emma'. Did you mean 'base.train.ema'?"]),
        (["show", "base.train.ema", "x"], ["Type 'vitlab show base.train.ema' for the key."]),
        (["show", "ema"], ["no slot, component or study called 'ema'. Type 'vitlab show base.train.ema' for the key."]),
        (["show", "none"], ["'none' is in position, norm, tracker", "'vitlab show position none'"]),
        (["show", "dino"], ["'dino' is in objective, study"]),
        (["show", "postion", "learned"], ["no slot, component or study called 'postion'", "'position'"]),
        (["show", "adamw", "lr"], ["'adamw' is no slot; type 'vitlab show adamw'"]),
        (["sync", "{out}/studies/tiny"], ["tiny has no studies; write the folder that 'vitlab run' wrote to"]),
        (["sync", "{out}/nowhere"], ["nowhere: no such folder; write the folder that 'vitlab run' wrote to"]),
        (["run", "{file}", "--workers", "2.5"], ["--workers: '2.5' is not a whole number. See '"]),
        (["judge", "{file}", "--goal", "up"], ["--goal: found 'up'; allowed: 'max', 'min'. See '"]),
        (["show", "learning_rate"], ["'learning_rate'. Write train.optimizer: {type: adamw, lr: 1e-3"]),
        (["show", "batchsize"], ["called 'batchsize'. Did you mean 'batch_size'?"]),
        (
            ["run", "{file}", "--set", "model.attention=softmax"],
            ["no attention called 'softmax'. Did you mean 'auto'?"],
        ),
        (["run", "{file}", "--set", "train.schedule=none"], ["no schedule called 'none'. Did you mean 'constant'?"]),
        (["ui", "--port", "0"], ["0 is not in the range"]),
        (["explain", "{file}", "--image", "test:0", "--arm", "basline"], ["basline", "'baseline'"]),
        (["explain", "{file}", "--image", "{file}"], ["cannot be read as a picture", "; name an image file"]),
        (["explain", "{out}/studies/tiny/plan.json"], ["plan.json"]),
        (["weights", "inspect", "{out}/no.safetensors"], ["no.safetensors"]),
        (["weights", "inspect", "{file}"], ["tiny.yaml"]),
        (["weights", "convert", "{file}", "x.safetensors"], ["Missing option '--to'"]),
    ],
)
def test_user_mistakes_exit_with_2(ran: tuple[Path, Path], arguments: list[str], words: list[str]) -> None:
    file, out = ran
    arguments = [argument.format(file=file, out=out) for argument in arguments]
    places = [] if arguments[0] in ("rnu", "list", "show", "sync", "weights", "judge") else ["--out", str(out)]
    code, printed, err = call(*arguments, *places)
    assert (code, printed) == (2, ""), (printed, err)
    assert "Traceback" not in err
    for word in words:
        assert word in " ".join(err.split()), err


def test_change_of_an_axis_of_the_design_leaves_the_others(tmp_path: Path) -> None:
    file = write(tmp_path, design={"one_at_a_time": {"model.position": ["none"], "model.dim": [16]}})
    code, printed, _ = call("plan", file, "--set", "design.one_at_a_time.model.position=[rope2d, learned2d]", "--json")
    arms = [arm["name"] for arm in json.loads(printed)["arms"]]
    assert code == 0 and arms == ["baseline", "position=rope2d", "position=learned2d", "dim=16"]


def test_component_shows_long_numbers_short() -> None:
    assert "= 0.666667\n" in call("show", "base.train.ema")[1]


def test_mistake_without_a_reader_of_messages_keeps_its_code(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    os.close(read)
    with open(write_end, "w") as gone:
        words = [sys.executable, "-m", "vitlab", "run", "nothing", "--goal", "x"]
        assert subprocess.run(words, stderr=gone, cwd=tmp_path).returncode == 2


def test_plugin_mistakes_exit_with_3(tmp_path: Path) -> None:
    bad_file = tmp_path / "broken.py"
    bad_file.write_text("import nothing_of_that_name\n")
    code, printed, err = call("validate", write(tmp_path), "--plugin", bad_file)
    assert (code, printed) == (3, "")
    assert err.splitlines() == [
        f"plugin file {bad_file} failed: ModuleNotFoundError: No module named 'nothing_of_that_name', "
        f"at {relative(bad_file)}:1",
    ]


def test_broken_plugin_and_wrong_study_keep_their_places(tmp_path: Path) -> None:
    file, words = write(tmp_path), ("validate", tmp_path / "broken.yaml", tmp_path / "tiny.yaml")
    (tmp_path / "broken.yaml").write_text(file.read_text())
    problem = vitlab.errors.Problem(str(file), 21, 8, "found 'two'", "seeds: two", ("seeds",), "two")
    faults = [BrokenComponent("it broke"), vitlab.SpecError([problem])]
    with mock.patch("vitlab.driver.planning.plan_study", side_effect=faults * 2):
        code, _, err = call(*words)
        assert code == 3 and "it broke" in err and "seeds: two\n" in err and "^^^" in err, err
        code, printed, _ = call(*words, "--json")
    [placed] = [mistake for mistake in json.loads(printed)["mistakes"] if mistake["path"] == "seeds"]
    assert code == 3 and placed["line"] and placed["file"] == str(file) and placed["value"] == "two"
    assert not placed["message"].startswith(placed["file"])


BLOCKS = """
import torch
from vitlab.components.position import position
from vitlab.components.position.additive import NoPosition


@position.register("short")
class Short(NoPosition):
    "Lacks a row."

    def add(self, x_BTD, layer):
        return x_BTD + torch.zeros(
            x_BTD.shape[1] + 1, x_BTD.shape[2], device=x_BTD.device
        )
"""


@pytest.mark.parametrize("words", [["validate", "--build"], ["plan", "--cost"]])
def test_failure_in_plugin_file_names_its_line(tmp_path: Path, words: list[str]) -> None:
    name = f"short_{words[0]}"
    plugin = tmp_path / f"{name}.py"
    plugin.write_text(BLOCKS.replace("short", name))
    line = 1 + next(index for index, text in enumerate(BLOCKS.splitlines()) if "return x_BTD" in text)
    file = write(tmp_path, design={"one_at_a_time": {"model.position": [name]}}, seeds=1)
    code, printed, err = call(*words, file, "--plugin", plugin)
    assert code == 3, printed
    assert err.startswith(f"in the model of arm 'position={name}': RuntimeError: ") and "torch/" not in err, err
    assert err.endswith(f", at {relative(plugin)}:{line}\n") and len(err.splitlines()) == 1, err
    code, _, err = call("run", file, "--out", tmp_path / "out", "--plugin", plugin)
    assert code == 4 and re.search(
        rf"failed: RuntimeError: The size of tensor a .*, at {relative(plugin)}:{line}", err
    ), err


@pytest.mark.parametrize("command", ["validate --build", "run --smoke"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("syncing", "x_BTD.mean().item()", "Tensor.item() cannot be called on meta tensors"),
        ("drawing", "torch.randn((), device=x_BTD.device)", "randn draws in evaluation"),
    ],
)
def test_part_that_waits_or_draws_is_refused_before_training(
    tmp_path: Path, command: str, name: str, value: str, message: str
) -> None:
    name = f"{name}_{command[:3]}"
    plugin = tmp_path / f"{name}.py"
    plugin.write_text(re.sub(r"torch\.zeros\([^)]*\)", value, BLOCKS.replace("short", name)))
    file = write(tmp_path, design={"one_at_a_time": {"model.position": [name]}}, seeds=1)
    code, _, err = call(*command.split(), file, "--plugin", plugin, *["--out", tmp_path / "out"] * command.count("run"))
    assert code == 3 and message in err and f"in the model of arm 'position={name}'" in err, err
    assert not [*tmp_path.glob("out/trials/*/*/events.jsonl")]


SHAPES = """
from vitlab.components.position.additive import NoPosition
from vitlab.plugin import position


@position.register("narrow_{end}")
class Narrow(NoPosition):
    "Returns too few features."

    def __init__(self, g, *, by: int = 1) -> None:
        super().__init__(g)
        self.by = by

    def add(self, x_BTD, layer):
        return x_BTD[..., self.by :]
"""


@pytest.mark.parametrize("command", ["validate --build", "run --smoke", "plan --cost"])
def test_wrong_shape_is_a_sentence_with_the_line_of_the_class(tmp_path: Path, command: str) -> None:
    name, plugin = f"narrow_{command[:3]}", tmp_path / f"narrow_{command[:3]}.py"
    plugin.write_text(SHAPES.format(end=command[:3]))
    file = write(tmp_path, design={"one_at_a_time": {"model.position": [name]}}, seeds=1)
    code, printed, err = call(
        *command.split(), file, "--plugin", plugin, *["--out", tmp_path / "out"] * command.count("run")
    )
    assert code == 3 and f"position '{name}' ({relative(plugin)}:6)" in err and "Traceback" not in err, err
    if command == "plan --cost":
        assert err.startswith(f"in the model of arm 'position={name}': RuntimeError: ") and not printed, err
    else:
        assert re.search(r"add\(x, 0\) has shape \(3, 17, 15\); expected \(3, 17, 16\)$", err.strip()), err


def test_constructor_without_super_has_a_remedy(tmp_path: Path) -> None:
    plugin = tmp_path / "narrow_several.py"
    text = SHAPES.format(end="several").replace("super().__init__(g)", "self.extra = torch.nn.Linear(1, 1)")
    plugin.write_text(f"import torch\n{text}")
    arms = ["narrow_several", {"type": "narrow_several", "by": 2}]
    file = write(tmp_path, design={"one_at_a_time": {"model.position": arms}}, seeds=1)
    code, _, err = call("validate", "--build", file, "--plugin", plugin)
    both = "'position=narrow_several' and of arm 'position=narrow_several(by=2)'"
    assert code == 3 and err.startswith(f"in the model of arm {both}: AttributeError: "), err
    assert err.endswith(":12; begin the constructor with super().__init__()\n"), "one fault is one mistake"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("can't convert meta device type tensor to numpy. Use Tensor.cpu() to copy", "in place of .item()"),
        ("Tensor on device cpu is not on the expected device meta!", "meta!; create a tensor on the input's device"),
    ],
)
def test_words_of_torch_on_meta_tensors_have_a_remedy(text: str, remedy: str) -> None:
    assert remedy in vitlab.registry.plugins.sentence_with_place(RuntimeError(text))


LOSSES = '''
import torch
from torch.nn import functional as F
from vitlab.components.position.additive import NoPosition
from vitlab.plugin import Loss, Value, loss, position


@loss.register("summed_{end}")
class Summed(Loss):
    """A sum."""

    def __init__(self, *, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, logits_by_head, target):
        return Value(F.cross_entropy(logits_by_head[""], target, reduction="sum"), {{}})


@loss.register("noisy_{end}")
class Noisy(Loss):
    """A mean with noise, if there is any."""

    def __init__(self, *, scale: float = 0.0) -> None:
        self.scale = scale

    def __call__(self, logits_by_head, target):
        logits = logits_by_head[""]
        return Value(F.cross_entropy(logits + self.scale * torch.rand_like(logits), target), {{}})


@loss.register("unused_{end}")
class Unused(Summed):
    """A sum, which no trial uses."""


@position.register("large_{end}")
class Large(NoPosition):
    """An encoding of grids that are large enough."""

    def __init__(self, g, *, least: int = 1) -> None:
        super().__init__(g)

    @classmethod
    def incompatibility(cls, g, options):
        return "the grid is too small" if g.grid[0] < options["least"] else None
'''


@pytest.mark.parametrize("command", ["validate --build", "run --smoke"])
def test_components_of_plugins_are_tested_before_training(tmp_path: Path, command: str) -> None:
    plugin, end = tmp_path / f"losses_{command[:3]}.py", command[:3]
    plugin.write_text(LOSSES.format(end=end))
    losses = [{"type": f"summed_{end}", "factor": factor} for factor in (1.0, 2.0)]
    losses += [f"noisy_{end}", {"type": f"noisy_{end}", "scale": 0.5}]
    changes = {"model.position": [{"type": f"large_{end}", "least": 3}, {"type": f"large_{end}", "least": 4}]}
    file = write(tmp_path, design={"one_at_a_time": {"train.loss": losses, **changes}}, seeds=1)
    code, _, err = call(*command.split(), file, "--plugin", plugin, *["--out", tmp_path / "out"] * command.count("run"))
    faults = [line for line in err.splitlines() if "of class indices" in line]
    assert code == 3 and len(faults) == len(err.strip().splitlines()) - 1, err
    lines = LOSSES.format(end=end).splitlines()
    for fault, name in zip(faults, ("summed", "noisy"), strict=True):
        line = 1 + lines.index(f'@loss.register("{name}_{end}")')
        assert f"loss '{name}_{end}' ({relative(plugin)}:{line}): " in fault, err
    assert not [*tmp_path.glob("out/trials/*/*/events.jsonl")]


PER_CLASS = '''
from torch.nn import functional as F
from vitlab.plugin import Loss, Value, loss


@loss.register("weighted_by_class")
class Weighted(Loss):
    """Classes have weights."""

    def __init__(self, *, weights: list[float] = []) -> None:
        self.weights = weights

    def __call__(self, logits_by_head, target):
        logits = logits_by_head[""]
        return Value(F.cross_entropy(logits, target, weight=logits.new_tensor(self.weights)), {})
'''


def test_option_per_class_is_not_tested_on_data_of_other_classes(tmp_path: Path) -> None:
    """Ten weights fit the ten digits; without them the loss fails its test."""
    plugin = tmp_path / "per_class.py"
    plugin.write_text(PER_CLASS)
    for name, expected in (({"type": "weighted_by_class", "weights": [1.0] * 10}, 0), ("weighted_by_class", 3)):
        file = write(tmp_path, design={"one_at_a_time": {"train.loss": [name]}}, seeds=1)
        code, _, err = call("validate", "--build", file, "--plugin", plugin)
        assert code == expected and ("of class indices" in err) == (expected == 3), err


INDICES_ALONE = '''
from vitlab.plugin import Loss, Value, loss


@loss.register("indices_alone")
class IndicesAlone(Loss):
    """Reads class indices."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, logits_by_head, target):
        return Value(-self.scale * logits_by_head[""].log_softmax(1).gather(1, target[:, None]).mean(), {})
'''


def test_loss_is_tested_on_the_targets_of_the_study(tmp_path: Path) -> None:
    plugin = tmp_path / "indices_alone.py"
    plugin.write_text(INDICES_ALONE)
    design = {"one_at_a_time": {"train.loss": [{"type": "indices_alone", "scale": 2.0}]}}
    file = write(tmp_path, design=design, seeds=1)
    assert call("validate", "--build", file, "--plugin", plugin)[0] == 0
    code, _, err = call("validate", "--build", file, "--plugin", plugin, "--set", "train.mix={mixup: 0.2}")
    assert code == 3 and "loss 'indices_alone'" in err and "of class shares, which trials of this study have: " in err


@pytest.mark.parametrize("command", ["validate --build", "run --smoke"])
def test_every_wrong_model_is_reported_once(tmp_path: Path, command: str) -> None:
    first, second = f"one_{command[:3]}", f"two_{command[:3]}"
    plugin = tmp_path / f"{first}.py"
    plugin.write_text(BLOCKS.replace("short", first) + BLOCKS.replace("short", second))
    design = {"grid": {"model.position": [first, second], "train.optimizer.weight_decay": [0.1, 0.2]}}
    file = write(tmp_path, design=design, seeds=1, analysis={"compare": "none"})
    words = [*command.split(), file, "--plugin", plugin]
    words += ["--out", tmp_path / "out"] * command.count("run")
    code, _, err = call(*words)
    assert code == 3 and err.count("RuntimeError") == 2, err
    for name in (first, second):
        assert err.count(f"in the model of arm '{name}, ") == 1, err
    assert len(json.loads(call(*words, "--json")[1])["mistakes"]) == 2


def test_wrong_models_are_one_error_for_every_file_and_for_python(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, seeds=1) for name in ("a", "b"))
    with mock.patch("vitlab.driver.planning._count_cost", side_effect=UserError("too large for torch")):
        code, _, err = call("validate", "--build", first, second)
        with pytest.raises(vitlab.SpecError) as error:
            vitlab.plan(first, out=tmp_path)
    models = len(error.value.problems)
    assert models and all(each.line and "in the model of arm" in each.message for each in error.value.problems)
    assert code == 2 and err.count("too large for torch") == 2 * models and err.endswith(f"\n{2 * models} mistakes\n")
    plugin = tmp_path / "broken_twice.py"
    plugin.write_text(BLOCKS.replace("short", "thrice") + BLOCKS.replace("short", "twice"))
    file = write(tmp_path, design={"one_at_a_time": {"model.position": ["thrice", "twice"]}}, seeds=1)
    with pytest.raises(BrokenComponent) as broken:
        vitlab.plan(file, plugins=[plugin], out=tmp_path)
    assert len(broken.value.args) == 2 and str(broken.value).count("RuntimeError") == 2


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("a wire came loose"), 3, "This is a fault of vitlab or of a plugin"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Interrupted("stopped; the next run resumes from here"), 130, "resumes from here"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_external_errors_have_exit_codes(tmp_path: Path, error: BaseException, code: int, message: str) -> None:
    with mock.patch("vitlab.driver.planning.plan_study", side_effect=error):
        exit_code, printed, err = call("plan", write(tmp_path), "--out", tmp_path / "out")
    assert (exit_code, printed) == (code, "") and message in err
    assert ("a wire came loose" in err and "Traceback" in err) == (code == 3)


def test_errors_of_a_run_wrap_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    print_error(Interrupted("interrupted; the report is vitlab-runs/studies/report.html; the same command goes on"))
    assert "\n  vitlab-runs/studies/report.html;\n" in capsys.readouterr().err


def process(command: str, *arguments: object, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command line of bash in which ``vitlab`` stands for the command and $0, $1 ... for the arguments."""
    line = command.replace("vitlab", f"{sys.executable} -m vitlab")
    words = ["bash", "-c", f"set -o pipefail; {line}", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("command", ["report $0 --out $1 --format html", "list"])
def test_closed_pipe_ends_quietly(ran: tuple[Path, Path], command: str) -> None:
    """``vitlab report | head -0`` closes the pipe early; there is neither a traceback nor an error."""
    done = process(f"vitlab {command} | head -0", *ran)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("command", "unbuffered"), [("list", ""), ("report $0 --out $1 --format html", ""), ("list", "1")]
)
@pytest.mark.parametrize(
    ("target", "reason"), [("&-", "bad file descriptor"), ("/dev/full", "no space left on device")]
)
def test_unwritable_stdout_is_one_sentence(
    ran: tuple[Path, Path], command: str, target: str, reason: str, unbuffered: str
) -> None:
    done = process(f"vitlab {command} >{target}", *ran, unbuffered=unbuffered)
    message = f"standard output, or the disk: {reason}. Results so far are kept; "
    assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_unwritable_stdout_is_exit_code_2_where_ctrl_c_is_ignored() -> None:
    assert process("trap '' INT; vitlab list >/dev/full").returncode == 2


@pytest.mark.slow
def test_closed_standard_streams_leave_their_descriptors_to_no_file(ran: tuple[Path, Path], tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("import os\nprint(os.open(os.devnull, os.O_RDONLY))\n")
    done = process("vitlab list patch --plugin $0 <&- 2>&-", plugin)
    assert done.returncode == 0 and int(done.stdout.splitlines()[0]) > 2
    done = process("vitlab report none <&- 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


# -- looking at a study -----------------------------------------------------------------------------------------------


def test_plan(ran: tuple[Path, Path], tmp_path: Path) -> None:
    file, out = ran
    code, printed, err = call("plan", file, "--out", out)
    assert (code, err) == (0, "") and "4 trials, 4 of them trained already; metric val/accuracy." in printed
    code, printed, err = call("plan", file, "--out", out, "--json", "--cost", "--set", "seeds=3")
    plan = parsed(printed)
    assert (code, err) == (0, "") and [trial["cached"] for trial in plan["trials"]] == [True, True, False] * 2
    seconds = vitlab.results(file, out=out)["wall_s"].map(format_duration)
    (measured,) = re.findall(
        "Measured: an earlier training of these arms took (.*)[.]", call("plan", file, "--out", out)[1]
    )
    assert set(measured.split(" to ")) <= set(seconds)
    assert plan["arms"][0]["cost"]["params"] == plan["arms"][1]["cost"]["params"] > 0
    assert plan["specs"]["baseline"]["model"]["patch_size"] == 4
    code, printed, _ = call("plan", file, "--out", tmp_path / "none")
    assert code == 0 and "0 of them trained already" in printed and not (tmp_path / "none").exists()
    assert "under other code" not in printed
    with mock.patch("vitlab.planning.resolve.trial_code_digest", return_value="other"):
        _, printed, _ = call("plan", file, "--out", out, "--set", "seeds=3")
    assert "Some missing trials ended before under other code: vitlab, a package or a file of --plugin has" in printed


def test_table_of_explanations_leaves_out_a_column_before_words_break(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"model": "no distillation, seed 0", "image": "test:0", "true": "2", "predicted": "2", "probability": 0.246}
    for columns, shown in (("45", False), ("80", True)):
        monkeypatch.setenv("COLUMNS", columns)
        text = _format_predictions([row])
        assert ("24.6 %" in text) == shown and "predicted" in text and "test:0" in text
        assert max(map(len, text.splitlines())) <= int(columns) or not shown


def test_plan_at_80_columns_breaks_no_word_and_shows_gpu_time(
    ran: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    counted = mock.Mock(side_effect=DataSource.count_training_images)
    monkeypatch.setattr(DataSource, "count_training_images", lambda *arguments: counted(*arguments))
    quickstart = ROOT / "pipelines" / "quickstart.yaml"
    code, printed, err = call("plan", quickstart, "--cost", "--device-tflops", "312", "--out", ran[1])
    assert counted.call_count == 1, "the arms have the same data"
    assert (code, err) == (0, "") and max(map(len, printed.splitlines())) <= 80
    for word in ("sinusoidal", "against", "params", "training", "13.8 k", "230 k"):
        assert word in printed
    # 1797 - 360 images, a fifth of them for validation; 20 epochs of whole batches of 32, in 3 passes of 229,760 MACs
    images = 20 * (1149 // 32) * 32
    shortest, longest = (1000 * 2 * 3 * 229_760 * images / (312e12 * share) for share in (0.36, 0.08))
    assert f"{shortest:.3g} ms to" in printed and f"{longest:.3g} ms" in printed
    assert "?" not in printed.partition("Training time is")[0].partition("params")[2]
    unknown = " ".join(call("plan", quickstart, "--cost", "--set", "run.device=cpu", "--out", ran[1])[1].split())
    assert "on this CPU is not known before one of these arms has ended" in unknown and " ms" not in unknown
    assert "MACs" in unknown and "training time" not in unknown and "?" not in unknown.partition("MACs")[2]


@pytest.mark.parametrize("engines", [("loop", "vmap"), ("vmap", "vmap")])
def test_narrow_plan_keeps_the_engines_of_arms_that_differ(
    engines: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    made, _ = synthetic_studies.study(tmp_path, {"baseline": [None], "position=none": [None]})
    arms = [replace(arm, engine=engine) for arm, engine in zip(made.arms, engines, strict=True)]
    states = {planned.trial.name: "missing" for planned in made.trials}
    table = parts_to_text(plan_module._arm_columns(replace(made, arms=tuple(arms)), states, {}))
    assert ("loop" in table and "vmap" in table) if "loop" in engines else "vmap" not in table


def test_plan_says_how_to_have_one_engine_if_arms_have_several(tmp_path: Path) -> None:
    study = {"base.train.ema": {"decay": 0.9}, "design": {"arms": {"baseline": {}, "plain": {"train.ema": None}}}}
    changes = [word for key, value in study.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    hint = "Engines round differently. To compute all arms alike, set run.engine: loop before the first run."
    both = call("plan", "quickstart", *changes, "--out", tmp_path)[1]
    assert "Engine batch_last on" in both and "Engine loop on" in both and hint in " ".join(both.split())
    alike = call("plan", "quickstart", *changes, "--set", "run.engine=loop", "--out", tmp_path)[1]
    assert "plain" in alike and "batch_last" not in alike and "Engines round" not in alike


def test_prerequisites_have_the_seed_of_the_trial_that_needs_them(tmp_path: Path) -> None:
    """Also if no stream that initialises them varies."""
    small = {"model": {"type": "vit", "size": "pico", "patch_size": 4}, "train": {"steps": 1}}
    seeds = {"count": 2, "vary": ["order"]}
    for own, expected in ((None, [0, 1]), (7, [7])):
        teacher = {"trial": small} if own is None else {"trial": small, "seed": own}
        arms = {"plain": {}, "taught": {"distill": {"teacher": teacher}}}
        _, plan = lab.plan_study(write(tmp_path, design={"arms": arms}, seeds=seeds), out=tmp_path)
        found = plan.labelled_prerequisites
        assert [(item.arm, item.seed) for item in found] == [("teacher of taught", seed) for seed in expected]
        states = {item.trial.name: Ending.DONE for item in (*plan.trials, *found)}
        total = len(plan.trials) + len(expected)
        sentence = plan_module._describe_trials(plan, states)
        assert sentence.startswith(f"{total} trials (") and f"), {total} of them trained already" in sentence


def test_plan_of_many_arms_shows_all(ran: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    rates = [round(0.001 * i, 4) for i in range(1, 101)]
    file = tmp_path / "many.yaml"
    text = ran[0].read_text().partition("design:")[0]
    file.write_text(f"{text}design: {{one_at_a_time: {{train.optimizer.lr: {rates}}}}}\nseeds: 1\n")
    code, printed, err = call("plan", file, "--out", tmp_path / "out")
    rows = [line for line in printed.splitlines() if line.strip().startswith("lr=")]
    assert (code, err) == (0, "") and len(rows) == 99, "one rate is the base's"
    assert "lr=0.002 " in printed and "lr=0.1 " in printed


def test_show_metric_prints_its_facts(tmp_path: Path) -> None:
    plugin = tmp_path / "counts.py"
    plugin.write_text(
        "from vitlab.training.metrics import metric\nfrom vitlab.training.metrics.predictions import Accuracy\n\n\n@metric.register('hits')\nclass Hits(Accuracy):\n"
        '    """Correct images."""\n\n    bounds = (0, float("inf"))\n    unit = "images"\n    quantum, step = 0, 1\n'
    )
    facts = {
        "hits": "goal max; unit images; bounds 0 to inf; step 1; tasks classification",
        "top_k": "goal max; unit share; bounds 0 to 1; quantum 1; tasks classification",
        "loss": "goal min; unit number; bounds 0 to inf; tasks classification, segmentation, multilabel",
    }
    for name, line in facts.items():
        code, printed, err = call("show", "metric", name, "--plugin", plugin)
        assert (code, err) == (0, "") and line in printed.splitlines()
    assert "goal" not in call("show", "position", "none")[1]


def test_show_without_name_lists_and_list_takes_plugin(tmp_path: Path) -> None:
    code, printed, err = call("show", "position")
    assert (code, err) == (0, "") and printed == call("list", "position")[1]
    assert "Axial rotary encoding" in printed
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from vitlab.components.position import position\nfrom vitlab.components.position.additive import Learned\n\n"
        '@position.register("of_mine")\nclass Mine(Learned):\n    """A table of mine."""\n'
    )
    code, printed, err = call("list", "position", "--plugin", plugin)
    assert (code, err) == (0, "") and re.search(r"of_mine +mine\.py .* A table of mine\.", printed)


def test_component_is_shown_by_a_name_that_only_one_slot_has() -> None:
    assert call("show", "rope2d") == call("show", "position", "rope2d")
    assert call("show", "vitlab:rope2d") == call("show", "position", "vitlab:rope2d")
    assert call("show", "quickstart") == call("show", "study", "quickstart")
    assert call("list", "components") == call("list")


def test_show_describes_a_key_as_its_reference_page_does() -> None:
    page = (ROOT / "docs" / "pages" / "reference" / "keys.md").read_text(encoding="utf-8")
    code, printed, err = call("show", "train.ema")
    assert (code, err) == (0, "") and printed == call("show", "base.train.ema")[1]
    lines = [line for line in printed.splitlines() if line.startswith(" ")]
    for path, head, meaning in zip(("", ".decay", ".warmup"), lines[::2], lines[1::2], strict=True):
        entry = page.partition(f"### `base.train.ema{path}`\n")[2].partition("\n###")[0]
        assert head.split()[0] == f"ema{path}".rpartition(".")[2] and meaning.strip() in entry
    assert re.search(r"decay +number >= 0 and < 1 += 0\.9999", printed) and call("show", "run")[0] == 0
    assert parsed(call("show", "train.ema.decay", "--json")[1])["default"] == 0.9999
    assert "Ema" in parsed(call("show", "train.ema", "--json")[1])["$defs"]
    code, printed, err = call("show", "design")  # its schema refers to itself
    assert (code, err) == (0, "") and "one_at_a_time" in printed and call("show", "design.sample")[0] == 0


def test_lines_have_the_columns_that_are_set_also_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, call("list", "position")[1].splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, call("list", "position")[1].splitlines())) <= 80
    assert max(map(len, call("show", "ropd2d")[2].splitlines())) <= 80


def test_validate_writes_nothing(ran: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, err = call("validate", ran[0], ran[0], "--build")
    assert (code, err) == (0, "") and printed.count(
        f"{ran[0]}: 2 arms, 4 trials\n  2 seeds of each arm: a test but no interval."
    ) == 2
    assert list(tmp_path.iterdir()) == []
    # A baseline lies beside its study, so that FILES of a pattern such as *.yaml has it too.
    code, printed, _ = call("validate", ran[0], ROOT / "pipelines" / "quickstart.baseline.yaml")
    assert code == 0 and re.fullmatch(
        r".*: 2 arms, 4 trials\n.*no interval.*\n.*baseline\.yaml: a baseline .*: skipped\n", printed
    )


@pytest.mark.parametrize("which", ["file", "folder", "name"])
def test_status(ran: tuple[Path, Path], which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = ran
    study = {"file": file, "folder": out / "studies" / "tiny", "name": "tiny"}[which]
    code, printed, err = call("status", study, "--out", out, "--json")
    assert (code, err) == (0, "")
    assert parsed(printed)["arms"] == {"baseline": {"done": 2}, "position=none": {"done": 2}}
    code, printed, err = call("status", study, "--out", out)
    assert (code, err) == (0, "") and "position=none" in printed
    assert "This is version" not in printed and "has no result" not in printed
    assert call("status", "--out", out) == (0, printed, ""), "the study that was run last"
    monkeypatch.setenv("COLUMNS", "45")
    assert re.search("position=none +2", call("status", study, "--out", out)[1])


def test_status_and_plan_show_paused_trials(ran: tuple[Path, Path], tmp_path: Path) -> None:
    """An arm has one line; a trial with a damaged checkpoint begins again."""
    out = tmp_path / "out"
    shutil.copytree(ran[1], out)
    plan, store = open_study("tiny", out=out)
    contents = ({"training": {"step": 2}}, {"training": {"step": 3}}, {})
    for planned, content in zip(plan.trials, contents, strict=False):
        folder = store.folder(planned.trial)
        (folder.path / "result.json").unlink()
        make_checkpoint_writer(folder.checkpoint, content)()
    _, printed, _ = call("status", "tiny", "--out", out)
    assert "\nbaseline: seeds 0, 1 paused, at step 2 to 3 of 4\n" in printed
    assert "\nposition=none: seed 0 paused, at step 0 of 4\n" in printed and "was run by" not in printed
    assert "this trains what has no result:\nvitlab run " in printed and "--retry-failed" not in printed
    store.driver_lock("tiny").write_text(f"{socket.gethostname()}/4194305/7 \n")  # beyond the largest id of a process
    killed = f"it was run by process 4194305 on {socket.gethostname()}, which was killed, or whose machine stopped"
    assert killed in call("status", "tiny", "--out", out)[1]
    _, printed, _ = call("plan", ran[0], "--out", out)
    head, *rows = (line.split() for line in printed.splitlines() if line.startswith((" arm", " baseline", " position")))
    at = head.index("paused") - len(head)
    assert [row[at] for row in rows] == ["2", "1"]
    assert "1 of them trained already, 3 paused, which go on from a checkpoint" in printed
    trials = json.loads(call("plan", ran[0], "--out", out, "--json")[1])["trials"]
    assert [(trial["cached"], trial["paused"]) for trial in trials] == [(False, True)] * 3 + [(True, False)]
    assert "paused" not in call("plan", ran[0], "--out", ran[1])[1]


def test_status_counts_damaged_result_as_missing(
    ran: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(ran[1], tmp_path / "out")
    [file, *_] = sorted((tmp_path / "out").glob("trials/*/*/result.json"))
    file.write_bytes(file.read_bytes()[:100])
    code, printed, _ = call("status", "tiny", "--out", tmp_path / "out", "--json")
    counts = sum(map(Counter, parsed(printed)["arms"].values()), Counter())
    assert (code, counts) == (0, {"done": 3, "missing": 1}) and f"{file} is damaged" in caplog.text


def test_diverged_trials_are_counted_and_explained(ran: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(ran[1], out)
    plan, store = open_study("tiny", out=out)
    for planned in plan.trials[:3]:
        folder = store.folder(planned.trial)
        stored = folder.result()
        assert stored is not None
        folder.write_result(replace(stored, status=Ending.DIVERGED, failure="the loss is not finite at step 2"))
    counts = parsed(call("status", "tiny", "--out", out, "--json")[1])["arms"]
    assert counts == {"baseline": {"diverged": 2}, "position=none": {"done": 1, "diverged": 1}}
    _, printed, _ = call("status", "tiny", "--out", out)
    assert printed.count("the loss is not finite") == 1
    assert "\nbaseline s0, s1, position=none s0 diverged: the loss is not finite at step 2\n" in printed
    assert "1 done, 3 diverged;" in call("studies", "--out", out)[1]
    assert "0 trained, 4 cached from earlier runs, 3 diverged." in call("run", ran[0], "--out", out)[1]
    assert "4 of them trained already" in call("plan", ran[0], "--out", out)[1]


def test_plan_in_a_pipe_has_every_column_and_comes_before_its_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is skipped has its reason, in 'vitlab validate' too."""
    monkeypatch.delenv("COLUMNS", raising=False)
    augment = [[], ["flip"], [{"type": "crop", "padding": 1}, {"type": "erasing", "p": 0.25}, "flip"]]
    rule = {"require": "model.depth < 2", "else": "skip", "because": "two blocks are too many"}
    design = {"grid": {"data.augment": augment, "model.depth": [1, 2], "train.optimizer.lr": [0.01, 0.02]}}
    file = write(tmp_path, design=design, where=[rule], analysis={"metric": "val/accuracy", "compare": "none"})
    code, printed, err = call("validate", file)
    assert code == 0 and printed.count(": skipped: two blocks are too many\n") == 6, err
    code, printed, err = call("plan", file, "--out", tmp_path / "out", "--power")
    assert code == 2 and "compares nothing" in err and "12 trials, 0 of them trained already" in printed
    assert "Not shown" not in printed and printed.splitlines()[2].split()[:4] == ["arm", "augment", "depth", "lr"]


def test_status_and_plan_name_and_count_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason that several trials share is one line, and the parts of a plan's trials add up."""
    monkeypatch.setenv("COLUMNS", "200")
    teacher = {"teacher": {"trial": {"model": {"type": "vit", "size": "pico", "patch_size": 4}, "train": {"steps": 1}}}}
    file = write(
        tmp_path,
        design={"arms": {"plain": {}, "taught": {"distill": teacher}}},
        tune={"knobs": {"train.optimizer.lr": [0.1, 0.2]}, "seeds": 1},
    )
    code, printed, err = call("plan", file, "--out", tmp_path / "out")
    assert code == 0, err
    assert (
        "\n9 trials (4 of arms, once their knobs are tuned; 4 of tuning; 1 of teachers or pre-training), 0 of them "
    ) in printed
    _, plan = lab.plan_study(file, changes={"study": "taught"}, out=tmp_path / "out")
    store = Store(tmp_path / "out")
    for planned in plan.labelled_prerequisites + plan.rival_trials[:2]:
        folder = store.folder(planned.trial)
        with folder.lease():
            folder.mark_failed("it broke", Ending.OOM)
    write_json(store.study("taught") / "plan.json", plan.to_json())
    _, printed, _ = call("status", "taught", "--out", tmp_path / "out")
    (line,) = [line for line in printed.splitlines() if "it broke" in line]
    assert line == (
        "plain (lr=0.1) s1000000, plain (lr=0.2) s1000000, teacher of taught (lr=0.1) s1000000 failed: it broke"
    )
    assert "\n (teachers, pre-training) " in printed
    head = call("logs", "taught", "--arm", "teacher of taught (lr=0.1)", "--out", tmp_path / "out")[1].splitlines()[0]
    assert head == "teacher of taught (lr=0.1), seed 1000000: failed: it broke"


def test_report_in_every_format(ran: tuple[Path, Path]) -> None:
    file, out = ran
    printed: dict[str, bytes] = {}
    for form in importlib.import_module("vitlab.cli.report").FORMATS:
        code, printed[form], err = call_bytes("report", file, "--out", out, "--format", form)
        assert (code, err) == (0, ""), form
    frame = pd.read_parquet(io.BytesIO(printed["parquet"]))
    assert len(frame) == 4 and set(frame["arm"]) == {"baseline", "position=none"}
    rows = list(csv.DictReader(io.StringIO(printed["csv"].decode())))
    assert [float(row["val/accuracy"]) for row in rows] == pytest.approx(list(frame["val/accuracy"]))
    assert parsed(printed["json"].decode())["study"] == "tiny"
    assert printed["html"].lower().startswith(b"<!doctype html>") and printed["html"].rstrip().endswith(b"</html>")
    for form in ("terminal", "md", "html", "latex"):
        assert b"position" in printed[form] and b"none" in printed[form]
    assert b"\\begin{tabular}" in printed["latex"] and re.search(rb"(?m)^\|[ :|-]+\|$", printed["md"])


def test_studies_without_results_have_no_verdicts(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 3, "b": [None] * 3})
    write_registered_plan(plan, store)
    assert "6 missing; nothing compared" in call("studies", "--out", store.root)[1]


@pytest.mark.parametrize("command", [[], ["weights"]])
def test_command_alone_prints_its_help(command: list[str]) -> None:
    code, out, err = call(*command)
    assert (code, out) == (2, "") and err.startswith("Usage: ") and "Error" not in err and "--help" in err


def test_studies_of_the_gate_are_listed_apart(ran: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(ran[1], tmp_path / "out")
    gates = shutil.copytree(tmp_path / "out" / "studies" / "tiny", tmp_path / "out" / "studies" / "tiny-check")
    plan = json.loads((gates / "plan.json").read_text())
    write_json(gates / "plan.json", {**plan, "study": "tiny-check"})
    write_json(gates / "changes.json", {"study": "tiny-check", "seeds": {"values": [0, 1]}})
    commits = shutil.copytree(gates, tmp_path / "out" / "studies" / "tiny-0123abc")
    write_json(commits / "plan.json", {**plan, "study": "tiny-0123abc"})
    write_json(commits / "changes.json", {"seeds": {"values": [0, 1]}, "study": "tiny-0123abc"})
    lines = call("studies", "--out", tmp_path / "out")[1].splitlines()
    assert lines[0] == "tiny  Does the position matter?" and " 4 done; 1 same; " in lines[1]
    assert lines[2:] == ["of 'vitlab check' and 'vitlab ab': tiny-0123abc, tiny-check"]


def test_logs_and_gc(ran: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = ran
    code, printed, err = call("logs", ran[0], "--arm", "position=none", "--seed", "1", "--out", out)
    head, *lines = printed.splitlines()
    assert (code, err) == (0, "") and head == "position=none, seed 1: done"
    assert "start" in printed and "val/accuracy" in printed and "end" in lines[-2]
    assert "{" not in printed and "metrics.train" not in printed, "mappings are spelled out, by their last names"
    rounded = re.findall(r" (\d+\.\d+)", printed)
    assert rounded and all(len(number.replace(".", "").lstrip("0")) <= 4 for number in rounded), printed
    plan = json.loads((out / "studies" / "tiny" / "plan.json").read_text())
    (key,) = [item["key"] for item in plan["trials"] if (item["arm"], item["seed"]) == ("position=none", 1)]
    assert key in lines[-1] and lines[-1].endswith(f" has all {len(lines) - 1} lines in its files")
    code, last, _ = call("logs", "--arm", "position=none", "--seed", "1", "--lines", "1", "--out", out)
    assert last.splitlines() == [head, *lines[-2:]]
    code, _, err = call("logs", "tiny", "--arm", "position=non", "--out", out)
    assert code == 2 and "Did you mean 'position=none'?" in err

    # Without an arm or a seed, the trial that was written to last, or the one that is running.
    shutil.copytree(out, tmp_path / "new")
    by_trial = {(item["arm"], item["seed"]): item["key"] for item in plan["trials"]}
    folders = {name: next((tmp_path / "new" / "trials" / key).iterdir()) for name, key in by_trial.items()}
    for age, name in enumerate([("position=none", 0), ("baseline", 1), ("baseline", 0), ("position=none", 1)]):
        os.utime(folders[name] / "events.jsonl", (1e9 - age, 1e9 - age))
    code, printed, err = call("logs", "tiny", "--out", tmp_path / "new")
    assert (code, err) == (0, "") and printed.startswith("position=none, seed 0: done\n")
    (folders["position=none", 0] / "log.txt").write_text("it printed\n")
    assert call("logs", "tiny", "--lines", "1", "--out", tmp_path / "new")[1].splitlines()[1] == "it printed"
    for ending, expected in ((Ending.DIVERGED, False), (Ending.FAILED, True)):
        with mock.patch("vitlab.store.folders.TrialFolder.state", return_value=ending):
            printed = call("status", "tiny", "--out", tmp_path / "new")[1]
        assert "'vitlab logs tiny " in printed and ("--retry-failed" in printed) == expected, printed
    assert call("logs", "tiny", "--arm", "baseline", "--out", tmp_path / "new")[1].startswith("baseline, seed 1: done")
    (folders["baseline", 0] / "result.json").unlink()
    TrialFolder(folders["baseline", 0]).write_failure("it broke", "Traceback:\n  here", Ending.OOM)
    printed = call("logs", "tiny", "--lines", "2", "--out", tmp_path / "new")[1]
    assert printed.startswith("baseline, seed 0: failed: it broke\nTraceback:\n  here\n"), "one that failed is next"
    (folders["position=none", 1] / "result.json").unlink()
    with hold_lock(folders["position=none", 1] / "lock"):
        assert call("logs", "tiny", "--out", tmp_path / "new")[1].startswith("position=none, seed 1: running\n")
    shutil.rmtree(tmp_path / "new" / "trials")
    code, _, err = call("logs", "tiny", "--out", tmp_path / "new")
    assert code == 2 and "no such trial has begun; type vitlab run FILE, with the study's file" in err

    # A study without its second seed: the plan as the next run would write it.
    shutil.copytree(out, tmp_path / "out")
    _, plan = lab.plan_study(ran[0], changes={"seeds": 1}, out=tmp_path / "out")
    write_json(tmp_path / "out" / "studies" / "tiny" / "plan.json", plan.to_json())
    before = {str(path) for path in (tmp_path / "out" / "trials").glob("*/*")}
    code, printed, err = call("gc", "--out", tmp_path / "out")
    useless = {line.partition("\t")[0] for line in printed.splitlines()}
    assert code == 0 and len(useless) == 2 and useless < before and "would be deleted; add --yes" in err
    assert {str(path) for path in (tmp_path / "out" / "trials").glob("*/*")} == before
    code, printed, err = call("gc", "--out", tmp_path / "out", "--yes")
    assert code == 0 and {line.partition("\t")[0] for line in printed.splitlines()} == useless and "deleted" in err
    assert {str(path) for path in (tmp_path / "out" / "trials").glob("*/*")} == before - useless
    assert call("gc", "--out", tmp_path / "out") == (0, "", "nothing to delete\n")


@pytest.mark.parametrize("plan", ["{torn", "{}", "[]", '{"study": "tiny"}', ""])
def test_gc_deletes_nothing_if_a_plan_is_unreadable(ran: tuple[Path, Path], tmp_path: Path, plan: str) -> None:
    """A torn plan or one of another version would make its trials look unused."""
    shutil.copytree(ran[1], tmp_path / "out")
    file = tmp_path / "out" / "studies" / "tiny" / "plan.json"
    file.write_text(plan)
    code, printed, err = call("gc", "--out", tmp_path / "out", "--yes")
    assert (code, printed) == (2, "") and "nothing is deleted" in err and str(file) in err
    assert len(list((tmp_path / "out").glob("trials/*/*/result.json"))) == 4
    for words in (["status"], ["report"], ["compare", ran[0]]):
        code, printed, err = call(*words, ran[0], "--out", tmp_path / "out")
        assert (code, printed) == (2, "") and err.startswith(f"{file} is damaged or in another format (")
        assert "\n" not in err.strip()


def test_sync_reports_unreachable_tracker(ran: tuple[Path, Path]) -> None:
    code, printed, err = call("sync", ran[1])
    assert (code, printed) == (2, "") and err.splitlines()[-1].startswith(
        "1 of 1 studies not delivered: tiny. The lines"
    )
    assert err.splitlines()[0] == "tiny: MLflow gets what it lacks; for many trials this takes minutes"


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_explain_separates_arms_and_images_and_draws_side_by_side(
    ran: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = ran
    target = tmp_path / "seen"
    images = ["--image", "test:3", "--image", "test:5"]
    code, printed, err = call("explain", file, *images, "--out", out, "--to", target, "--json")
    assert code == 0 and "explaining baseline, seed 0, test:3" in err, err
    found = parsed(printed)
    files, page = {Path(file) for file in found["files"]}, Path(found["page"])
    assert len(files) == len(found["files"]) and all(file.stat().st_size for file in files)
    assert found["not_explained"] == found["no_attention"] == {}
    assert {*files, page} == {path for path in target.rglob("*") if path.is_file()}
    arms = {path.name for path in (target / "tiny" / "test-3").iterdir() if path.is_dir()}
    assert "baseline-s0" in arms and len(arms) > 1
    assert all((target / "tiny" / name / "rollout_class.png").exists() for name in ("test-3", "test-5"))

    stored = vitlab.predictions(file, out=out).query("split == 'test' and seed == 0").set_index(["arm", "id"])
    checked = {(row["model"], row["image"], row["map"]): row for row in found["maps"]}
    assert len(checked) == 2 * len(found["predictions"]) == len(found["maps"])
    for row in found["predictions"]:
        for name in ("rollout_class", "attribution"):
            check = checked[row["model"], row["image"], name]
            assert (check["class"], check["probability"]) == (row["predicted"], row["probability"])
            lowest, mean, highest = (check[f"without_random_{of}"] for of in ("lowest", "mean", "highest"))
            assert lowest - 1e-9 <= mean <= highest + 1e-9
        trial = stored.loc[(row["model"].removesuffix(", seed 0"), int(row["image"].removeprefix("test:")))]
        assert (row["true"], row["predicted"]) == (str(trial["label"]), str(trial["prediction"]))
        assert row["probability"] == pytest.approx(trial["probability"], abs=1e-5)
    code, printed, err = call("explain", "tiny", *images, "--out", out, "--to", target)
    *table, address = printed.splitlines()
    assert code == 0 and Path(address) == page, "a study is named by its name, too"
    cells = [re.split(r"\s{2,}", line.strip()) for line in table if "test:" in line]
    assert cells == [
        [row["model"], row["image"], row["true"], row["predicted"], f"{100 * row['probability']:.1f} %"]
        for row in found["predictions"]
    ]

    document = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page.read_text())
    assert [heading.text for heading in document.iter("h1")] == ["tiny: what models look at"]
    assert "Does the position matter?" in "".join(document.find(".//dl").itertext())
    for section, image in zip(document.iter("section"), ("test image 3", "test image 5"), strict=True):
        assert section.find("h2").text.startswith(f"{image}, true class ")
        names = [heading.text for heading in section.find("div").iter("h3")]
        assert names == ["baseline, seed 0", "position=none, seed 0"]
        sources = [picture.get("src") for picture in section.iter("img")]
        # After the image, and two maps of two arms over it, and alone, the figures stand in the page, too.
        assert len(sources) > 9 and {base64.b64decode(source.split(",")[1]) for source in sources[9:]} == {
            file.read_bytes() for file in files if file.match(f"*-{image[-1]}/*/*.png")
        }
    code, printed, err = call("explain", file, "--image", "test:99999", "--out", out, "--to", target)
    assert (code, printed) == (2, "") and "99999" in err and "Traceback" not in err

    marks = [mark.get("style") for mark in document.iterfind(".//div[@class='scale']/i/b")]
    assert len(marks) == 4, "the equal share on each scale of attention"
    for section in document.iter("section"):
        ends = {span.text for span in section.iterfind(".//div[@class='scale']/span[2]")}
        assert sorted(end[0] == "+" for end in ends) == [False, True], "one scale of attention and one of logits"

    def explain(model: Any, x: Any, image: Any, labels: Any, subject: Any, *, head: Any, target: int | None) -> Any:
        if "arm baseline," in subject.model:
            raise UserError("attention 'X' has no maps")
        assert target == 7
        return explain_image(model, x, image, labels, subject, head=head, target=target)

    before = {str(path.parent.relative_to(page.parent)) for path in page.parent.rglob("*.csv")}
    code, printed, err = call("explain", file, "--image", "test:3", "--arm", "baseline", "--out", out, "--to", target)
    earlier = list_some(sorted(before - {"test-3", "test-3/baseline-s0"}))
    assert f"has files of earlier calls, too, which its index.html does not show: {earlier}\n" in err
    assert f"which it does not show: {earlier}</dd>" in page.read_text()

    explain_image = one_image.explain
    monkeypatch.setattr(one_image, "explain", explain)
    own = ("--scale", "own", "--target", "7")
    code, printed, err = call("explain", file, *own, "--out", out, "--to", tmp_path / "others")
    assert code == 0 and "baseline, seed 0 is not explained: attention 'X' has no maps" in err
    assert "others/tiny/index.html" in printed and "baseline" not in printed
    text = (tmp_path / "others" / "tiny" / "index.html").read_text()
    assert "<dt>Not explained</dt><dd>baseline, seed 0: attention &#39;X&#39; has no maps</dd>" in text


def test_seeds_of_an_arm_are_explained_beside_each_other(ran: tuple[Path, Path]) -> None:
    mistakes = list[str]()
    models = _find_models(ran[0], ran[1], ("position=none", "baseline"), (1, 0), mistakes)[2]
    assert not mistakes and [model.name for model in models] == [
        f"{arm}, seed {seed}" for arm in ("baseline", "position=none") for seed in (1, 0)
    ]
    assert len({model.folder.path for model in models}) == len({model.place for model in models}) == 4


def test_validation_image_is_named_by_its_index_in_predictions(ran: tuple[Path, Path]) -> None:
    stored = vitlab.predictions(ran[0], out=ran[1]).query("split == 'val' and seed == 0 and arm == 'baseline'")
    last = stored.iloc[-1]
    shown = vitlab.explain(ran[0], f"val:{last.id}", arm="baseline", out=ran[1])
    assert (shown.subject.image, shown.subject.class_name) == (f"val image {last.id}", str(last.label))
    assert shown.ranking[0] == (str(last.prediction), pytest.approx(last.probability, abs=1e-5))
    other = next(index for index in range(len(stored)) if index not in set(stored.id))
    with pytest.raises(UserError, match=f"there is no val image {other}: the split has {len(stored)}, with ids "):
        vitlab.explain(ran[0], f"val:{other}", arm="baseline", out=ran[1])


def test_explain_reports_every_mistake_at_once(ran: tuple[Path, Path], tmp_path: Path) -> None:
    file, out = ran
    (tmp_path / "cat.png").touch()
    images = [tmp_path / "cta.png", tmp_path / "cat.png", "test:360"]
    words = [word for image in images for word in ("--image", image)]
    code, printed, err = call("explain", file, *words, "--arm", "basline", "--out", out, "--to", tmp_path / "seen")
    _, missing, empty, arm, split = err.splitlines()
    assert (
        split == "baseline, seed 0: there is no test image 360: the split has 360, with ids 0, 1, 2, 3, 4 and 355 more"
    )
    assert (code, printed) == (2, "") and f"no such file. Did you mean '{images[1]}'?" in missing
    assert f"{images[1]} cannot be read as a picture" in empty and "no trial of arm 'basline'" in arm
    code, printed, err = call("explain", file, "--image", tmp_path, "--out", out, "--to", tmp_path / "seen")
    assert f"image {tmp_path}: this is a folder. Name an image file" in err
    command = ("explain", file, *words, "--arm", "basline", "--out", out, "--to", tmp_path / "seen", "--json")
    mistakes = parsed(call(*command)[1])["mistakes"]
    assert [mistake["message"] for mistake in mistakes] == [missing, empty, arm, split]
    assert mistakes[2]["allowed"] == ["baseline", "position=none"]
    assert parsed(call("explain", "tinny", "--out", out, "--json")[1])["mistakes"][0]["allowed"] == ["tiny"]
    words[-1] = "test:-1"
    code, printed, err = call("explain", file, *words, "--seed", 7, "--out", out, "--to", tmp_path / "seen")
    assert "no trial with seed 7. Seeds: 0, 1.\nbaseline, seed 0: there is no test image -1: the split" in err
    seeds = ("--seed", 7, "--seed", 0, "--seed", 8)
    code, printed, err = call("explain", file, *words, *seeds, "--out", out, "--to", tmp_path / "seen")
    assert err.splitlines()[-3:-1] == [f"no trial with seed {seed}. Seeds: 0, 1." for seed in (7, 8)]
    words[-1] = "test:360"
    code, printed, err = call("explain", file, *words, "--out", out, "--to", tmp_path / "seen")
    assert (
        err.splitlines()[-1]
        == "every model: there is no test image 360: the split has 360, with ids 0, 1, 2, 3, 4 and 355 more"
    )
    target = ("--image", "test:360", "--target", "sven", "--out", out, "--to", tmp_path / "seen", "--json")
    mistakes = parsed(call("explain", file, *target)[1])["mistakes"]
    assert [mistake["message"] for mistake in mistakes] == [
        "every model: there is no test image 360: the split has 360, with ids 0, 1, 2, 3, 4 and 355 more",
        "every model: target sven: no such class; allowed: 0 to 9.",
    ]
    [trial, *_] = out.glob("trials/*/*")
    code, printed, err = call("explain", trial, "--seed", 0, "--to", tmp_path / "seen")
    assert (code, printed) == (2, "") and "--arm and --seed choose trials of a study" in err
    other = tmp_path / trial.parent.name
    shutil.copytree(trial, other / "version")
    code, printed, err = call("explain", other, "--out", out, "--to", tmp_path / "seen")
    assert (code, printed) == (2, "") and f"{other}: name a version of the trial's code: {other}/version\n" in err
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize(
    ("target", "labels", "expected"),
    [
        ("3", (), 3),
        ("cow", ("cat", "dog", "cow", "hen"), 2),
        ("1", ("cat", "dog", "cow", "hen"), 1),
        ("1", ("3", "2", "1", "0"), 2),
        ("4", (), "target 4: no such class; allowed: 0 to 3."),
        ("-1", (), "target -1: no such class; allowed: 0 to 3."),
        ("12", ("0", "1", "2", "3"), "target 12: no such class; allowed: 0 to 3.$"),
        ("cta", ("cat", "dog", "cow", "hen"), "allowed: 0 to 3, cat, dog, cow, hen. Did you mean 'cat'?"),
    ],
)
def test_target_is_name_or_index_of_a_class(target: str, labels: tuple[str, ...], expected: int | str) -> None:
    info = DataInfo(image=(8, 8), channels=1, classes=4, labels=labels)
    if isinstance(expected, int):
        assert find_class(target, info) == expected
    else:
        with pytest.raises(UserError, match=re.escape(expected).replace(r"\$", "$")):
            find_class(target, info)


def test_explain_says_that_trials_kept_no_weights(ran: tuple[Path, Path], tmp_path: Path) -> None:
    file, out = ran[0], tmp_path / "out"
    shutil.copytree(ran[1], out)
    weights = list(out.glob("trials/*/*/weights.safetensors"))
    for each in weights:
        each.unlink()
    for words in ([file], ["tiny", "--arm", "baseline"], [weights[0].parent]):
        code, printed, err = call("explain", *words, "--out", out, "--to", tmp_path / "seen")
        assert (code, printed) == (2, "") and "kept no weights (run.keep)" in err.splitlines()[-1], err
    end = weights[0].parent / "result.json"
    end.write_text(json.dumps(json.loads(end.read_text()) | {"status": "diverged", "failure": "at step 2"}))
    err = call("explain", end.parent, "--out", out, "--to", tmp_path / "seen")[2]
    assert err.splitlines()[-1].endswith("it diverged: at step 2"), err
    for result in out.glob("trials/*/*/result.json"):
        result.unlink()
    code, printed, err = call("explain", file, "--out", out, "--to", tmp_path / "seen")
    sentence = "every model: this version of the study has not trained it; type vitlab run"
    assert (code, printed) == (2, "") and err.splitlines()[-1].startswith(sentence) and "trials/" not in err
    assert not (tmp_path / "seen").exists()


def test_folders_have_short_names_that_differ_even_where_case_does_not() -> None:
    names = [
        "Wide",
        "wide",
        "wide 1",
        "gated (headwise)",
        "no positions",
        "model=vit(dim=32, heads=4)",
        "a/3.jpg",
        "a-3.jpg",
    ]
    folders = name_folders([*names, "x" * 300])
    assert [*folders.values()][:-1] == [
        *(
            "Wide",
            "wide.1",
            "wide-1",
            "gated-headwise",
            "no-positions",
            "model=vit-dim=32-heads=4",
            "a-3-jpg",
            "a-3-jpg.1",
        )
    ]
    assert len({folder.casefold() for folder in folders.values()}) == len(names) + 1
    assert len(folders["x" * 300]) < 100


# -- registry ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_list_and_show_agree(tmp_path: Path) -> None:
    code, printed, err = call("list", "--json")
    rows = parsed(printed)
    assert (code, err) == (0, "") and {row["slot"] for row in rows} == set(registry.SLOT_MODULES)
    assert vitlab.list_components().to_dict("records") == rows
    shown = str(vitlab.list_components("position")).split("\n")
    assert max(map(len, shown)) <= 120 and "..." not in shown[0] and shown[0].split() == ["slot", "name", "summary"]
    assert shown[-1] == "components; columns: slot, name, origin, target, summary"
    assert vitlab.list_components("norm")["slot"].tolist() == ["norm"] * len(registry.slot("norm").names())
    code, printed, err = call("list")
    assert (code, err) == (0, "") and [line.split()[0] for line in printed.splitlines()] == [
        *registry.SLOT_MODULES,
        "studies",
    ]
    for row in rows:
        code, printed, err = call("show", row["slot"], row["name"])
        assert (code, err) == (0, ""), (row, err)
        options = registry.slot(row["slot"]).options(registry.slot(row["slot"]).get(row["name"])).model_fields
        assert all(f"\n  {option} " in printed for option in options), row
    code, printed, _ = call("list", "position")
    assert code == 0 and re.search(r"(?m)^sincos2d +Sines and cosines of row and column", printed)


def test_plugins() -> None:
    code, printed, err = call("plugins", "--strict")
    assert code == 0 and err == "" and printed


def test_schema_describes_every_property() -> None:
    """Editors show descriptions on hover; the texts are those in the source."""
    schema = study_schema()
    pending: list[tuple[str, Any]] = [("", schema)]
    missing, count = [], 0
    while pending:
        place, node = pending.pop()
        if isinstance(node, list):
            pending += [(f"{place}[{index}]", item) for index, item in enumerate(node)]
        elif isinstance(node, dict):
            pending += [(f"{place}.{key}", item) for key, item in node.items()]
            for name, field in node.get("properties", {}).items():
                count += 1
                missing += [] if field.get("description") else [f"{node.get('title', place)}: {name}"]
    assert count > 500 and missing == []
    definitions = schema["$defs"]
    assert "norm of the gradient" in definitions["TrainSpec"]["properties"]["clip_grad"]["description"]  # a comment
    assert (
        "learning rate of a layer" in definitions["TrainSpec"]["properties"]["layer_decay"]["description"]
    )  # below it
    assert "cannot be matched" in definitions["Match"]["properties"]["else"]["description"]  # by its alias
    assert definitions["RunSpec"]["properties"]["executor"]["default"] == {"type": "local"}, "as a file may say it"
    vit = next(form for form in definitions["slot.model"]["anyOf"] if form.get("title") == "model vit")
    assert "2309.16588" in vit["properties"]["registers"]["description"]  # an argument of the constructor
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.slow
def test_schema_accepts_all_studies_and_refuses_misspelling() -> None:
    code, printed, err = call("schema")
    schema = parsed(printed)
    assert (code, err) == (0, "") and schema == study_schema()
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    studies = {name: spec.read_document(file).data for name, file in packaged_studies().items()}
    assert studies
    for name, study in studies.items():
        assert [error.message for error in check.iter_errors(study)] == [], name
    for path, value in {
        ("sedes",): 3,
        ("base", "model", "dmi"): 3,
        ("base", "model", "position"): "leraned",
        ("base", "train", "batch_size"): 0,
        ("analysis", "goal"): "maximum",
    }.items():
        wrong = json.loads(json.dumps(studies["quickstart"]))
        node = wrong
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value
        assert not check.is_valid(wrong), path


# -- help -------------------------------------------------------------------------------------------------------------


def commands() -> list[list[str]]:
    paths = [[name] for name in COMMANDS]
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        paths += [[name, inner] for inner in getattr(command, "commands", ())]
    return paths


@pytest.mark.parametrize("names", commands(), ids=" ".join)
def test_help_documents_every_option(names: list[str]) -> None:
    code, printed, err = call(*names, "--help")
    assert (code, err) == (0, "") and f"vitlab {' '.join(names)} " in printed.splitlines()[0]
    command = cli.get_command(click.Context(cli), names[0])
    for name in names[1:]:
        command = getattr(command, "commands")[name]  # noqa: B009  # of a group
    assert command is not None and command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.opts[-1] in printed


def test_help_names_existing_things() -> None:
    """Names are literal in the commands, so that help imports no other package."""
    assert set(weights.FORMATS) == set(FORMATS) and set(weights.RESAMPLINGS) == set(PRESETS)


def test_help_lists_every_command() -> None:
    code, printed, err = call("--help")
    assert (code, err) == (0, "")
    modules = {file.stem for file in (ROOT / "vitlab" / "cli").glob("*.py")} - {
        "__init__",
        "errors",
        "options",
    }
    assert modules == {MODULES.get(name, name) for name in COMMANDS}
    for name, line in COMMANDS.items():
        assert f"  {name}" in printed and line.split()[0] in printed
    code, printed, err = call("--version")
    assert code == 0 and printed.endswith(f", version {vitlab.__version__}\n")


@pytest.mark.parametrize("sample", sorted(path.stem for path in (ROOT / "docs" / "samples").glob("*.txt")))
def test_samples_of_the_reference_are_what_commands_print(
    sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are made, and the rest is true."""
    monkeypatch.setenv("COLUMNS", "120")
    text = (ROOT / "docs" / "samples" / f"{sample}.txt").read_text(encoding="utf-8")
    lost = None if sample == "status" else 0.71
    first = {"baseline": [0.81, 0.83, 0.80, 0.82, 0.84], "position=none": [0.70, 0.74, lost, 0.69, lost]}
    second = {"baseline": [0.88, 0.89, 0.87, 0.90, 0.88], "position=none": [0.71, 0.73, 0.70, 0.72, 0.69]}
    trial_of = synthetic_studies.trial_of

    def trial_of_study(arm: str, seed: int) -> Any:
        return replace(trial_of(arm, seed, {"faster": 4e-3}.get(name, 2e-3)), key=trial_of(f"{name} {arm}", seed).key)

    monkeypatch.setattr(synthetic_studies, "trial_of", trial_of_study)
    monkeypatch.chdir(tmp_path)
    for name, values in {"faster": second, "positions": first}.items():
        plan, store = synthetic_studies.study(tmp_path / "vitlab-runs", values)
        plan = replace(plan, study=name)
        for item in plan.trials:
            if values[item.arm][item.seed] is None:
                with store.folder(item.trial).lease():
                    store.folder(item.trial).mark_failed("the worker ran out of memory", Ending.OOM)
        write_json(store.study(name) / "plan.json", plan.to_json())
    typed, _, printed = text.partition("\n")
    code, output, err = call(*typed.split()[2:])
    assert (code, err) == (0, "") and output.strip("\n") == printed.strip("\n")
