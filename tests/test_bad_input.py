"""Tests of user mistakes: one sentence each, with its place, exit code 2, and nothing written.

Every mistake stands in a file on disk and goes through the command line, for that is the way it comes.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vitlab.cli import errors, main
from vitlab.errors import BrokenComponent, Problem, SpecError, WeightsError, closest
from vitlab.lab import plan_study
from vitlab.registry import Slot
from vitlab.store.files import Damaged
from vitlab.training import artifacts
from vitlab.weights.opening import open_model

ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"
STUDY = """\
study: small
base:
  data: {type: digits}
  model: {type: vit, patch_size: 2, dim: 8, depth: 1, heads: 2, position: learned}
  train: {steps: 2, batch_size: 8, optimizer: {type: adamw, lr: 1.0e-3}}
design:
  one_at_a_time:
    model.position: [none]
"""

Vitlab = Callable[..., tuple[int, str, str]]


def call(*arguments: object) -> tuple[int, str, str]:
    """Run a ``vitlab`` command in this process and return exit code, stdout and stderr."""
    out, err = StringIO(), StringIO()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            mock.patch.object(sys, "argv", ["vitlab", *map(str, arguments)]),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            main()
        code = 0
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty working directory in which nothing may be written."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def refused(folder: Path, *arguments: object) -> list[str]:
    """Return the stderr lines of a command that must be refused without writing anything."""
    before = sorted(folder.rglob("*"))
    code, out, err = call(*arguments)
    assert code == 2, (code, out, err)
    assert out == "" and "Traceback" not in err and "\x1b" not in err, (out, err)
    assert sorted(folder.rglob("*")) == before, "something was written"
    return messages(err)


def messages(err: str) -> list[str]:
    """Return the mistakes on stderr, one line each, without what is read and loaded, source lines and the final count."""
    lines = [line for line in err.splitlines() if not line.startswith((" ", "reading ", "loading "))]
    count = re.match(r"(\d+) mistakes", lines[-1]) if lines else None
    if count is None:
        assert len(lines) <= 1, lines
        return lines
    assert len(lines) == int(count[1]) + 1, lines
    return lines[:-1]


def mistakes(folder: Path, text: str) -> list[str]:
    """Return the mistakes that ``vitlab run`` reports, one line each."""
    (folder / "s.yaml").write_text(text)
    return refused(folder, "run", "s.yaml")


def one(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


KINDS = [
    # unknown key
    ("study: small", "study: small\ndepth: 3", "2:1", ["unknown key 'depth'. The path of 'depth' is base.model.depth.", "Allowed here:"]),
    ("dim: 8", "seeds: 4, dim: 8", "4:37", ["no option 'seeds'.", " 'seeds' stands at the top of the file.", "Options:"]),
    ("dim: 8", "steps: 4, dim: 8", "4:37", ["no option 'steps'. The path of 'steps' is base.train.steps.", "Options:"]),
    ("model.position: [none]", "position: [none]", "8:5", ["unknown key 'position'. The path of 'position' is model.position."]),
    ("study: small", "study: small\nsedes: 3", "2:1", ["unknown key 'sedes'", "Did you mean 'seeds'?", "Allowed here:", "analysis"]),
    ("  train: {steps: 2,", "  trian: {}\n  train: {steps: 2,", "5:3", ["unknown key 'trian'", "'train'", "distill"]),
    ("dim: 8", "int: 4, dim: 8", "4:37", ["no option 'int'", "Options:", "heads"]),
    ("study: small", "study: small\nfloat: 3", "2:1", ["unknown key 'float'", "Allowed here:"]),
    ("dim: 8", "dmi: 4, dim: 8", "4:37", ["no option 'dmi'", "'dim'", "Options:", "heads"]),
    ("lr: 1.0e-3", "lr: 1.0e-3, weight_deacy: 0", "5:73", ["no option 'weight_deacy'", "'weight_decay'"]),
    # unknown component
    ("position: learned", "position: leraned", "4:75", ["no position called 'leraned'", "'learned'", "Installed:", "sincos2d"]),
    ("type: adamw", "type: admaw", "5:54", ["no optimizer called 'admaw'", "'adamw'", "sgd"]),
    ("study: small", "study: small\nrun: {executor: loacl}", "2:17", ["no executor called 'loacl'", "'local'", "inline"]),
    ("study: small", "study: small\nrun: {executor: {type: local, wrokers: 2}}", "2:31", ["no option 'wrokers'"]),
    ("[none]", "[none, sincos]", "8:28", ["no position called 'sincos'", "'sincos2d'"]),
    # wrong type
    ("dim: 8", "dim: eight", "4:42", ["dim must be a whole number; found 'eight'"]),
    ("dim: 8", "dim: [8]", "4:37", ["dim must be a whole number; found a list"]),
    ("patch_size: 2", "patch_size: [2]", "4:22", ["'patch_size.1' is missing"]),
    ("patch_size: 2", "patch_size: 0", "4:34", ["patch_size", "greater than 0", "found 0"]),
    ("patch_size: 2", "patch_size: two", "4:34", ["patch_size must be a whole number or a list; found 'two'"]),
    ("[none]", "none", "8:21", ["model.position must be a list; found 'none'"]),
    ("study: small", "study: small\nseeds: many", "2:8", ["seeds", "'many'"]),
    ("study: small", "study: [small]", "1:1", ["study must be a text; found a list"]),
    # out of bounds
    ("lr: 1.0e-3", "lr: 0", "5:65", ["lr", "greater than 0", "found 0"]),
    ("dim: 8", "dim: 8, drop: 1", "4:51", ["drop", "less than 1", "found 1"]),
    ("depth: 1", "depth: 1000000000000", "4:52", ["depth", "less than or equal to 1000"]),
    ("dim: 8", "dim: 8, registers: 99999999999", "4:56", ["registers", "less than or equal to 1000"]),
    ("lr: 1.0e-3", "lr: .inf", "5:65", [".inf", "finite"]),
    ("lr: 1.0e-3", "lr: .nan", "5:65", [".nan", "finite"]),
    ("study: small", "study: small\nseeds: 1000000000", "2:8", ["less than or equal to 1000000; found 1000000000"]),
    # sizes that do not divide
    ("patch_size: 2", "patch_size: 3", "4:34", ["image height 8", "patch_size 3", "1, 2, 4, 8"]),
    ("patch_size: 2", "patch_size: [2, 5]", "4:22", ["image width 8", "patch_size 5", "1, 2, 4, 8"]),
    ("dim: 8", "dim: 9", "4:62", ["dim 9", "heads 2", "1, 3, 9"]),
    ("dim: 8", "dim: 99999999999999999999999", "4:42", ["dim must be less than or equal to 100000"]),
    ("model.position: [none]", "model.dim: [16, 17]", "8:21", ["dim 17", "heads 2"]),
    ("heads: 2", "num_heads: 2", "4:55", ["'num_heads'. Write model:", "heads: 3"]),
    # what to write
    ("steps: 2", "epochs: 0", "5:19", ["found 0", "write steps: 0"]),
    ("dim: 8", "dim: [8, 16]", "4:37", ["belong in design"]),
    ("model.position: [none]", "model.position: none, learned2d", "8:21", ["write [none, learned2d]"]),
    ("model.position: [none]", "model: {position: [none]}", "8:5", ["write model.position: [...]"]),
    ("model.position: [none]", "base.model.position: [none]", "8:5", ["leave out 'base.'"]),
    ("  data: {type: digits}\n", "", "2:1", ["'base.data' is missing; write it, such as data: digits"]),
    ("type: vit, ", "", "4:3", ["whose type is its name"]),
    ("study: small", "study: small\nmatch: params", "2:8", ["'vitlab show match' describes it"]),
    ("study: small", "study: small\nanalysis: {compare: learned}", "2:21", ["{to: {model.position: learned}}"]),
    ("  one_at_a_time:", "  grid:", "6:1", ["add one with its values (model.position: learned; "]),
    ("{type: digits}", "{type: image_folder, root: /nowhere}", "3:30", ["no folder /nowhere"]),
    # designs
    ("design:\n  one_at_a_time:\n    model.position: [none]\n", "design: {}\n", "6:1", ["exactly one of one_at_a_time, leave_one_out", "an empty design"]),
    ("  one_at_a_time:\n", "  one_at_time:\n", "7:3", ["unknown key 'one_at_time'", "'one_at_a_time'", "grid"]),
    ("[none]", "[]", "8:5", ["model.position", "at least 1"]),
    ("model.position: [none]", "model.postion: [none]", "8:5", ["no option 'postion'", "'position'"]),
    ("model.position: [none]", "modle.position: [none]", "8:5", ["unknown key 'modle'", "'model'"]),
    ("model.position: [none]", "model.mlp.ration: [2]", "8:5", ["no option 'ration'", "'ratio'"]),
    # duplicates
    ("dim: 8", "dim: 8, dim: 16", "4:45", ["key 'dim' is given twice", "first in line 4"]),
    ("design:\n", "seeds: 2\nseeds: 3\ndesign:\n", "7:1", ["key 'seeds' is given twice", "first in line 6"]),
    # no is false
    ("position: learned", "position: no", "4:75", ["a component's name belongs here", "found false", "write none"]),
    ("[none]", "[off]", "8:22", ["a component's name belongs here", "found false"]),
    ("study: small", "study: no", "1:8", ["study", "yes, no, on and off", "quotes"]),
    ("study: small", "no: small", "1:1", ["'no'", "quotes"]),
    # rules
    ("study: small", "study: small\nwhere: [{require: 'model.dim >', because: x}]", "2:19", ["'model.dim >' is not an expression", "allowed:"]),
    ("study: small", "study: small\nwhere: [{require: '__import__(\"os\")', because: x}]", "2:19", ["is not allowed in a rule", "allowed:"]),
    ("study: small", "study: small\nwhere: [{require: '1 < 2 and model.dim is 3', because: x}]", "2:19", ["'model.dim is 3' is not allowed"]),
    ("study: small", "study: small\nwhere: [{require: 'model.dim ** 9 > 1', because: x}]", "2:19", ["'model.dim ** 9' is not allowed", "+ - *"]),
    ("study: small", "study: small\nwhere: [{require: '\"a\" * 99999999999999 == 1', because: x}]", "2:19", ["'a' is not a number"]),
    ("study: small", "study: small\nwhere: [{require: '\"%099999999999d\" % 1', because: x}]", "2:19", ["is not a number"]),
    ("study: small", "study: small\nwhere: [{require: 'model.dim / 0 > 1', because: x}]", "2:19", ["cannot be computed", "division"]),
    ("study: small", f"study: small\nwhere: [{{require: '{'a.' * 200}a', because: x}}]", "2:19", ["there is no 'a'"]),
    ("study: small", f"study: small\nwhere: [{{require: '{'(' * 300}1', because: x}}]", "2:19", ["not an expression"]),
    ("study: small", f"study: small\nwhere: [{{require: '{'1 + ' * 300}1', because: x}}]", "2:19", ["at most 500 characters"]),
    ("study: small", "study: small\nwhere: [{require: 'model.head == 1', otherwise: skip, because: x}]", "2:38", ["unknown key 'otherwise'", "else"]),
    # hostile
    ("study: small", "study: !!python/object/apply:os.system ['touch pwned']", "1:8", ["!!python/object/apply:os.system", "is not allowed"]),
    ("study: small", "study: !!python/name:os.system", "1:8", ["!!python/name:os.system", "is not allowed"]),
    ("dim: 8", "dim: !!binary aGk=", "4:42", ["!!binary", "is not allowed"]),
    ("dim: 8", "dim: !secret 8", "4:42", ["!secret", "is not allowed"]),
    ("study: small", "study: ../../small", "1:8", ["study", "'../../small'"]),
    ("study: small", "study: /tmp/small", "1:8", ["study", "'/tmp/small'"]),
    ("study: small", "study: ..", "1:8", ["study", "'..'"]),
    ("study: small", 'study: "sm\\x1b[31mall"', "1:8", ["cannot be printed", "U+001B"]),
    ("study: small", 'study: "small\\n"', "1:8", ["study"]),
    ("study: small", "study: small\nquestion: \x07", "2:11", ["cannot be printed", "U+0007"]),
    ("study: small", f"study: small\nwhere: {'[' * 60}{']' * 60}", "2:58", ["nested too deeply"]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "instead", "place", "words"), KINDS)
def test_mistake_is_one_sentence_with_its_place(
    here: Path, old: str, instead: str, place: str, words: list[str]
) -> None:
    assert STUDY.count(old) == 1
    line = one(mistakes(here, STUDY.replace(old, instead)))
    assert line.startswith(f"s.yaml:{place}: "), line
    for word in words:
        assert word in line, line


@pytest.mark.parametrize("command", ["run", "plan", "validate"])
def test_commands_that_read_a_study_report_same_mistakes(here: Path, command: str) -> None:
    (here / "s.yaml").write_text(STUDY.replace("heads: 2", "heads: 3"))
    line = one(refused(here, command, "s.yaml"))
    assert line.startswith("s.yaml:4:62: dim 8 is not a multiple of heads 3"), line


def test_command_line_values_are_checked_like_the_file(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY)
    for change, words in {
        "model.dmi=4": ["no option 'dmi'", "'dim'"],
        "modle.dim=4": ["unknown key 'modle'", "'model'"],
        "train.optimizer.lr=0": ["lr", "greater than 0"],
        "model.heads=3": ["dim 8", "heads 3"],
        "seeds=none": ["seeds", "'none'"],
        "model.depth.x=1": ["--set model.depth.x=1: ", "depth must be a whole number; found a mapping"],
        "study=../up": ["study", "'../up'"],
        "model.dim": ["--set model.dim: the value is missing; write model.dim=VALUE"],
        "=3": ["write PATH=VALUE"],
        "model.dim=": ["the value is missing; write model.dim=VALUE, where null stands for none"],
        "seeds: 5": ["the value is missing; write seeds=VALUE, "],
        "model.mlp.ratio=4": ["whose type is its name; no type is written.", " Installed: geglu, gelu, "],
        "train.optimizer.type=null": ["found None there. 'vitlab list' lists the names"],
        "num_workers=4": ["'num_workers'. Write run.threads: N; the CPU threads of a process also read its images."],
        "model.dim=[1": ["--set model.dim=[1", "'[' opens here and is not closed"],
        "model.dim=!!python/name:os.system": ["!!python/name:os.system", "is not allowed"],
    }.items():
        line = one(refused(here, "run", "s.yaml", "--set", change))
        for word in words:
            assert word in line, line


# -- numbers and names that YAML reads otherwise ----------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1e-3", "1E-3", ".001", "0.001", "1.0e-3", "+1e-3", "1_0e-4"])
def test_numbers_in_text_form_are_parsed(here: Path, number: str) -> None:
    (here / "s.yaml").write_text(STUDY.replace("1.0e-3", number))
    code, out, err = call("plan", "s.yaml", "--json")
    assert code == 0, err
    assert all(spec["train"]["optimizer"]["lr"] == 0.001 for spec in json.loads(out)["specs"].values())
    code, out, err = call("plan", "s.yaml", "--json", "--set", f"train.optimizer.lr={number}")
    assert code == 0 and json.loads(out)["specs"]["baseline"]["train"]["optimizer"]["lr"] == 0.001


@pytest.mark.parametrize("truth", ["yes", "on", "true", "no", "[true, 3]"])
@pytest.mark.parametrize("path", ["train.optimizer.lr", "model.dim", "train.batch_size", "seeds"])
def test_booleans_are_refused_as_numbers(here: Path, path: str, truth: str) -> None:
    (here / "s.yaml").write_text(STUDY)
    line = one(refused(here, "run", "s.yaml", "--set", f"{path}={truth}"))
    assert path.rpartition(".")[2] in line
    assert "booleans" in line or "[" in truth or path == "seeds", line


def test_all_mistakes_of_a_file_are_reported_in_order(here: Path) -> None:
    text = """\
study: small
qestion: Why?
base:
  data: {type: digts}
  model: {type: vit, patch_size: 2, dim: eight, depth: 1, heads: 2, position: leraned}
  train: {steps: 2, epochs: 3}
seeds: [1, 1]
where: [{require: "model.dim >", because: x}]
analysis: {metric: accuracy, goal: maximum}
"""
    lines = mistakes(here, text)
    assert [line.split(":")[1] for line in lines] == ["2", "4", "5", "5", "6", "7", "8", "9", "9"], lines
    assert all(re.match(r"s\.yaml:\d+:\d+: ", line) for line in lines)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("design:", "analysis: {compare: {to: {model.depth: 7}}}\ndesign:", "has no counterpart with model.depth=7"),
        ("one_at_a_time:", "grid:", "no arm of the design equals the base"),
        (
            "design:",
            "match: {quantity: params, knob: model.dim, except: [nobody]}\ndesign:",
            "no arm is called 'nobody'",
        ),
    ],
)
def test_missing_arm_is_reported_beside_other_mistakes(here: Path, old: str, new: str, message: str) -> None:
    lines = mistakes(here, STUDY.replace("steps: 2", "steps: 2, clip_gard: 1").replace(old, new))
    assert len(lines) == 2 and any(message in line for line in lines), lines


def test_arms_are_named_beside_a_wrong_component(here: Path) -> None:
    match = "match: {quantity: params, knob: model.dim, except: [positoin=none, position=none]}"
    lines = mistakes(here, f"{STUDY.replace('depth: 1', 'depht: 1')}{match}\n")
    assert len(lines) == 2 and "no arm is called 'positoin=none'. Did you mean 'position=none'?" in lines[1], lines


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("boddy", "found 'boddy'; allowed: nothing, body, a whole number. Did you mean 'body'?"),
        ("0", "found 0; allowed: nothing, body, a number greater than or equal to 1."),
    ],
)
def test_mistake_of_a_name_or_a_number_says_both(here: Path, value: str, message: str) -> None:
    text = STUDY.replace("  train:", f"  init_from: {{hub: a/b, freeze: {value}}}\n  train:")
    assert f"base.init_from.freeze: {message}" in mistakes(here, text)[-1]


def test_mistakes_of_several_files_are_reported_together(here: Path) -> None:
    (here / "good.yaml").write_text(STUDY)
    (here / "a.yaml").write_text(STUDY.replace("dim: 8", "dmi: 8"))
    (here / "b.yaml").write_text(STUDY.replace("heads: 2", "heads: 3"))
    code, out, err = call("validate", "good.yaml", "a.yaml", "no.yaml", "b.yaml")
    assert code == 2 and out == "good.yaml: 2 arms, 6 trials\n"
    assert [line.split(":")[0] for line in messages(err)] == ["a.yaml", "b.yaml", "no.yaml"]
    assert err.endswith("\n3 mistakes\n")


BLOCK = """\
study: small
base:
  data: {type: digits}
  model: {type: vit, patch_size: 2, dim: 8, depth: 1, heads: 2, position: learned}
  train:
    steps: 2
    optimizer: {type: adamw, lr: 1.0e-3}
design:
  one_at_a_time:
    model.position: [none]
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # two unknown keys, one of which stands for the length of the training
        ({"{steps: 2, batch_size: 8": "{epoch: 40, batch_sze: 64"}, ["'epochs'", "'batch_size'"]),
        ({"{steps: 2, batch_size: 8": "{batch_sze: 64"}, ["exactly one; found none of them", "'batch_size'"]),
        # a component behind an unknown key
        ({"study: small": "study: small\nrun: {executor: locall, gpus: 1}"}, ["'local'", "unknown key 'gpus'"]),
        # a component of an arm behind sizes that do not divide
        ({"patch_size: 2": "patch_size: 3", "position: [none]": "attention: [sdpa, flash]"}, ["patch_size 3", "'flash'"]),
        # sizes behind a component, and behind an unknown option
        ({"patch_size: 2": "patch_size: 3", "position: learned": "position: rope"}, ["patch_size 3", "'rope2d'"]),
        ({"patch_size: 2": "patch_size: 3", "dim: 8": "dim: eight"}, ["patch_size 3", "found 'eight'"]),
        ({"patch_size: 2": "patch_size: two", "heads: 2": "heads: 3"}, ["found 'two'", "dim 8 is not a multiple of heads 3"]),
        ({"patch_size: 2": "patch_size: 3", "heads: 2": "heads: 2, drp: 0.1"}, ["patch_size 3", "'drop'"]),
        # sizes behind an option of the data that does not change the images, and behind data that is not known
        ({"digits}": "digits, fractoin: 2}", "patch_size: 2": "patch_size: 3"}, ["'fraction'", "patch_size 3"]),
        ({"digits}": "digts}", "patch_size: 2": "patch_size: 3", "heads: 2": "heads: 3"}, ["'digits'", "heads 3"]),
        (
            {"learned}": "rope}", "type: adamw": "type: adamW", "1.0e-3}": "1.0e-3}, schedule: cosin",
             "study: small": "study: small\nanalysis: {metric: val/acc}"},
            ["'val/accuracy'", "'rope2d'", "'adamw'", "'cosine'"],
        ),
        ({"dim: 8": "dim: two", "[none]": "[none, lerned]"}, ["dim must be a whole number", "'lerned'"]),
        ({"  data: {type: digits}\n": "", "type: adamw": "type: admaw"}, ["'base.data' is missing", "'admaw'"]),
        # rules across fields behind wrong values beside them
        (
            {"study: small": "study: small\nrun: {explain: [0], keep: none, threads: 0}"},
            ["explain needs stored weights", "run.threads must be"],
        ),
        # sizes behind other sizes
        (
            {"patch_size: 2": "patch_size: [3, 5]", "heads: 2": "heads: 3, blocks: {'0-3': {mlp: swiglu}}"},
            ["height 8 is not a multiple of patch_size 3", "width 8 is not a multiple of patch_size 5",
             "not a multiple of heads 3", "blocks '0-3' do not exist"],
        ),
        # several in one component inside of another one, and in a list of components
        (
            {"learned}": "learned, attention: {type: sdpa, drp: 0, qkv_bais: true, proj_drop: x}, mlp: {type: gelu, ratio: -1, drp: 0}}"},
            ["'drop'", "'qkv_bias'", "proj_drop must be a number", "ratio must be greater", "'drop'"],
        ),
        (
            {"{type: digits}": "{type: digits, augment: [{type: crp, x: 1}, {type: crop, padding: -1, foo: 2}, flp], validation: 3}"},
            ["'crop'", "no option 'x'", "padding must be", "no option 'foo'", "'flip'", "validation must be less"],
        ),
        ({"study: small": "study: sm/all\nwhere: [{require: 'model.dim >', because: x}]"}, ["study must be", "not an expression"]),
        ({"study: small": "study: small\ntune: {knobs: {train.optimizer.lr: [Infinity, 1]}}"}, ["lr must be a finite number"]),
        ({"  train:": "train:", "type: vit": "type: vti"}, ["'base.train' is missing", "'vit'", "unknown key 'train'"]),
        ({"study: small": "study: small\nseds: 3\ntune: {knobs: {train.optimizer.lr: [-1, 1]}}"}, ["'seeds'", "lr must be greater"]),
    ],
)  # fmt: skip
def test_mistake_does_not_hide_others(here: Path, changes: dict[str, str], words: list[str]) -> None:
    text = STUDY
    for old, instead in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, instead)
    lines = mistakes(here, text)
    assert len(lines) == len(words), lines
    for line, word in zip(lines, words, strict=True):
        assert word in line, (word, lines)


@pytest.mark.parametrize(
    ("old", "instead", "words"),
    [
        # a rule with a wrong value is not checked
        ("steps: 2", "steps: two", "base.train.steps must be a whole number"),
        ("study: small", "study: small\nrun: {explain: [0], keep: nothing}", "run.keep: found 'nothing'"),
        ("study: small", "study: small\nrun: {explain: true}", "run.explain: found a boolean"),
        ("heads: 2", "heads: two", "heads must be a whole number"),
        ("[none]", "[none, 1]", "a component is a name"),
        # the default of a wrong size is compared with no other size
        ("dim: 8, depth: 1, heads: 2", "dim: eight, depth: 1, heads: 5", "found 'eight'"),
        ("patch_size: 2", "patch_size: two", "found 'two'"),
        ("depth: 1, heads: 2", "depth: one, heads: 2, blocks: {'20': {mlp: swiglu}}", "found 'one'"),
        # another name of the length of the training
        ("steps: 2", "max_steps: 2", "unknown key 'max_steps'. Write train.steps: N."),
        ("steps: 2", "duration: 2", "unknown key 'duration'. Did you mean 'epochs'?"),
        # a component of a plugin that is missing
        ("study: small", "study: small\nplugins: {require: [x.py]}\nrun: {executor: mine}", "this study needs x.py"),
        ("[none]", "[none, mine]\nplugins: {require: [acme-vit]}", "this study needs acme-vit"),
    ],
)
def test_mistake_does_not_cause_others(here: Path, old: str, instead: str, words: str) -> None:
    assert words in one(mistakes(here, STUDY.replace(old, instead)))


def test_arm_may_change_a_default_part_of_a_wrong_model(here: Path) -> None:
    text = STUDY.replace("depth: 1", "depth: one").replace("[none]\n", "[none]\n    model.mlp.ratio: [2]\n")
    assert "depth must be a whole number" in one(mistakes(here, text))


@pytest.mark.parametrize(
    ("name", "allowed", "meant"),
    [
        ("AdamW", ["adam", "adamw", "sgd"], "adamw"),
        ("adamW", ["adam", "adamw", "sgd"], "adamw"),
        ("SGD", ["adam", "adamw", "sgd"], "sgd"),
        ("learning_rate", ["lr", "betas", "weight_decay"], "lr"),
        ("wd", ["lr", "betas", "weight_decay"], "weight_decay"),
        ("bs", ["epochs", "batch_size"], "batch_size"),
        ("maximize", ["max", "min"], "max"),
        ("flash", ["auto", "explicit", "sdpa"], "sdpa"),
        ("acc", ["loss", "accuracy", "ece"], "accuracy"),
        ("accuracy", ["model", "seed", "acc"], "acc"),
        ("acc", ["val_acc", "val_loss"], "val_acc"),
        ("acc", ["val_acc", "test_acc"], None),
        ("batch_norm", ["norm=batch_norm, patch_size=2, depth=4"], "norm=batch_norm, patch_size=2, depth=4"),
        ("0.1", ["rate of 0.15", "rate of 0.1", "rate of 10.1"], "rate of 0.1"),
        ("p\u043esition", ["patch", "position"], "position"),
        ("nothing like it", ["patch", "position"], None),
    ],
)
def test_nearest_name_ignores_case_and_knows_synonyms(name: str, allowed: list[str], meant: str | None) -> None:
    assert closest(name, allowed) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (STUDY.replace("  data:", "\tdata:"), ["line 3 is indented with a tab; YAML needs spaces"]),
        (STUDY.replace("position: learned", "p\u043esition: learned"), ["'position'", "U+043E", "CYRILLIC"]),
        (STUDY.replace("position: learned", "position: \u201clearned\u201d"), ["U+201C", "DOUBLE QUOTATION MARK"]),
        (STUDY.replace("depth: 1", "depth: ${oc.env:DEPTH}"), ["not YAML. A study file has no interpolation", "--set"]),
        (BLOCK.replace("steps: 2", "steps: ${STEPS}"), ["base.train.steps must be a whole number", "no interpolation"]),
        (STUDY.replace("study: small", "study: \u00e9tude-\u03b1"), ["letters, digits, '.', '_' or '-'", "It has '\u03b1'", "(U+03B1"]),
        (STUDY.replace("study: small", "study: small\nanalysis: {goal: maximize}"), ["found 'maximize'", "'max'"]),
        (STUDY.replace("study: small", "study: small\nanalysis: {correction: holm}"), ["found 'holm'", "bonferroni"]),
        (STUDY.replace("lr: 1.0e-3", "learning_rate: 1.0e-3"), ["no option 'learning_rate'. Write train.optimizer: {type: adamw, lr: 1e-3"]),
    ],
)  # fmt: skip
def test_invisible_characters_are_named(here: Path, text: str, words: list[str]) -> None:
    line = one(mistakes(here, text))
    for word in words:
        assert word in line, line


def test_mistake_about_several_values_is_reported_once(here: Path) -> None:
    head = one(mistakes(here, STUDY.replace("model.position: [none]", "model.head.pol: [gap, cls]")))
    assert head.startswith("s.yaml:8:5: ") and "'pol'" in head
    first, second = mistakes(here, STUDY.replace("model.position: [none]", "model.position: [lerned, sincos]"))
    assert "Installed:" in first and "Installed:" in second and "'sincos2d'" in second, "each is enough by itself"


def test_mistake_shows_source_line_with_caret(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "s.yaml").write_text(STUDY.replace("dim: 8", "dmi: 8").replace("type: adamw", "type: admaw"))
    code, _, err = call("validate", "s.yaml")
    lines = err.splitlines()
    assert code == 2 and lines[-1] == "2 mistakes" and "\x1b" not in err
    with pytest.raises(SpecError) as error:
        plan_study("s.yaml")
    assert str(error.value).splitlines() == lines[:-1]
    assert lines[1] == " 4 |   model: {type: vit, patch_size: 2, dmi: 8, depth: 1, heads: 2, position: learned}"
    assert lines[2] == "   |" + " " * 37 + "^^^"
    assert lines[1][lines[2].index("^") :].startswith("dmi")

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    def messages_under(**environment: str) -> str:
        terminal = Terminal()
        with mock.patch.object(sys, "stderr", terminal), mock.patch.dict(os.environ, environment):
            errors.print_error(
                SpecError([Problem("s.yaml", 1, 1, "a sentence of several words " * 6, "study: small")] * 2)
            )
        return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in messages_under(TERM="xterm", COLUMNS="80")
    plain = messages_under(NO_COLOR="1", TERM="xterm", COLUMNS="40")
    assert "\x1b" not in plain and max(map(len, plain.splitlines())) <= 40
    assert set(re.findall(r"\w+", plain)) == set(
        re.findall(r"\w+", "s.yaml:1:1 a sentence of several words study: small")
    ) - {""}


@pytest.mark.parametrize(
    ("old", "new", "marked"),
    [
        ("lr: 1.0e-3", "lr: -1", "-1"),
        ("heads: 2", "heads: 3", "3"),
        ("position: learned", "position: lerned", "lerned"),
        ("position: learned", "position:\n      lerned", "lerned"),
        ("study: small", "study: small\nseeds: two", "two"),
        ("depth: 1", "depht: 1", "depht"),
        ("depth: 1", "depth: 'one'", "'one'"),
        ("model.position: [none]", "model.position: [lerned]", "lerned"),
        ("model.position: [none]", "model.hed.pool: [gap]", "model.hed.pool"),
        ("study: small", "study: 'a b'", "'a b'"),
    ],
)
def test_caret_is_under_what_is_wrong(here: Path, old: str, new: str, marked: str) -> None:
    """A wrong value is marked itself, and a wrong key is marked where it stands."""
    text = STUDY.replace(old, new)
    assert text != STUDY
    (here / "s.yaml").write_text(text)
    _, _, err = call("validate", "s.yaml")
    _, source, carets, *_ = err.splitlines()
    assert source[carets.index("^") : carets.rindex("^") + 1] == marked, err


def test_alias_of_wrong_value_is_marked_at_its_key(here: Path) -> None:
    text = STUDY.replace("dim: 8, depth: 1", "dim: &n 8, depth: *n").replace("lr: 1.0e-3", "lr: *n")
    (here / "s.yaml").write_text(text.replace("&n 8", "&n -8"))
    _, _, err = call("validate", "s.yaml")
    marked = [
        source[carets.index("^") : carets.rindex("^") + 1]
        for source, carets in itertools.pairwise(err.splitlines())
        if "^" in carets
    ]
    assert "depth" in marked and "lr" in marked, err


def test_wrong_metric_is_reported_beside_misspelt_data(here: Path) -> None:
    wrong = STUDY.replace("type: digits", "type: digts")
    assert wrong != STUDY
    first, second = mistakes(here, f"{wrong}analysis: {{metric: val/acuracy}}\n")
    assert "'digits'" in first and "no trial reports val/acuracy. Did you mean 'val/accuracy'?" in second
    assert "Reported" not in second
    # What some data or an option of it reports is no mistake while the data is unknown.
    for metric in ("val/miou", "test/mce", "val/loss", "train/loss"):
        assert "digts" in one(mistakes(here, f"{wrong}analysis: {{metric: {metric}}}\n"))


def test_guess_of_misspelt_option_brings_no_further_mistake(here: Path) -> None:
    """Images of 1000 pixels, for which the nearest name would ask, fit no patch of 7, and 9 dimensions no 2 heads."""
    data = STUDY.replace("type: digits", "type: digits, train_size: 1000")
    assert data != STUDY
    assert "Did you mean 'size'?" in one(mistakes(here, data.replace("patch_size: 2", "patch_size: 7")))
    assert "Did you mean 'dim'?" in one(mistakes(here, STUDY.replace("dim: 8", "dmi: 9")))


def test_metric_of_misspelt_objective_is_no_mistake(here: Path) -> None:
    text = STUDY.replace("optimizer:", "objective: mea, optimizer:")
    assert "'mea'" in one(mistakes(here, f"{text}analysis: {{metric: val/reconstruction}}\n"))


def test_mistake_caused_by_set_names_set(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY)
    for change, words in {
        "seed=5": ["unknown key 'seed'", "Did you mean 'seeds'?"],
        "lr=0.1": ["Did you mean 'train.optimizer.lr'?"],
        "model.heads=3": ["dim 8 is not a multiple of heads 3"],
        "analysis.metric=val/acc": ["'val/accuracy'"],
    }.items():
        line = one(refused(here, "plan", "s.yaml", "--set", change))
        assert line.startswith(f"--set {change}: ") and "s.yaml" not in line, line
        for word in words:
            assert word in line, line
    (here / "s.yaml").write_text(STUDY.replace("lr: 1.0e-3", "lr: -1"))
    lines = refused(here, "plan", "s.yaml", "--set", "model.depth=2", "--set", "model.heads=3")
    assert [line.split(": ")[0] for line in lines] == ["--set model.heads=3", "s.yaml:5:65"]


def test_mistake_caused_by_changes_in_python_names_changes(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY)
    for changes, words in (
        ({"seed": 5}, "changes={'seed': 5}: unknown key 'seed'. Did you mean 'seeds'?"),
        ({"seeds": 3, "model.heads": 3}, "changes={'model.heads': 3}: dim 8 is not a multiple of heads 3"),
        (
            {"model.depth.x": 1},
            "changes={'model.depth.x': 1}: model 'vit': depth must be a whole number; found a mapping",
        ),
    ):
        with pytest.raises(SpecError) as raised:
            plan_study(here / "s.yaml", changes=changes)
        assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        (["model.dim=10"], "--set model.dim=10"),
        (["seeds=3", "model.dim=10"], "--set model.dim=10"),
        (["data.size=9"], "--set data.size=9"),
        (["train.stop_early.patience=99", "model.depth=1"], "--set train.stop_early.patience=99"),
    ],
)
def test_mistake_that_a_change_makes_at_a_line_of_a_sound_file_is_at_the_change(
    here: Path, changes: list[str], place: str
) -> None:
    words = [word for change in changes for word in ("--set", change)]
    line = one(refused(here, "plan", "quickstart", *words))
    assert line.startswith(f"{place}: ") and "quickstart.yaml" not in line


def test_mistake_of_a_file_beside_one_by_a_change_is_at_its_line(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY.replace("steps: 2", "steps: 2, stop_early: {patience: 2, metric: acc}"))
    lines = refused(here, "plan", "s.yaml", "--set", "model.dim=9")
    assert [line.partition(": ")[0] for line in lines] == ["--set model.dim=9", "s.yaml:5:55"]
    assert "no metric of validation is called 'acc'" in lines[1]


def test_malformed_list_of_plugins_hides_no_other_mistake(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY.replace("adamw", "adamq") + "plugins: {requires: []}\n")
    lines = refused(here, "plan", "s.yaml")
    assert len(lines) == 2 and any("no optimizer called 'adamq'. Did you mean 'adam'?" in line for line in lines), lines


def test_early_stop_without_a_metric_or_a_model_is_answered(here: Path) -> None:
    (here / "s.yaml").write_text("study: s\nbase: {data: digits, train: {steps: 2, stop_early: {patience: 1}}}\n")
    assert "'base.model' is missing" in refused(here, "plan", "s.yaml")[0]


def test_mistake_that_a_change_makes_in_a_line_names_the_change(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY.replace("model.position: [none]", "model.heads: [4]"))
    lines = refused(here, "plan", "s.yaml", "--set", "model.dim=9")
    assert any("s.yaml:" in line and "(with --set model.dim=9)" in line for line in lines), lines


def test_decimal_comma_in_braces_is_answered_by_a_point(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY.replace("lr: 1.0e-3", "lr: 0,05") + "analysis: {margin: 1,5}\n")
    lines = refused(here, "plan", "s.yaml")
    answer = " A comma ends a value; write a decimal point."
    assert any(f"has no option '05'.{answer}" in line for line in lines), lines
    assert any(f"unknown key '5'.{answer}" in line for line in lines), lines
    (here / "s.yaml").write_text(STUDY.replace("lr: 1.0e-3", "2: x"))
    lines = refused(here, "plan", "s.yaml")
    assert any("has no option '2'. Options:" in line for line in lines), "a key with a value is no end of a number"


def test_mistake_of_the_file_names_no_change_beside_one_that_does(here: Path) -> None:
    text = STUDY.replace("model.position: [none]", "model.heads: [4]") + "analysis: {alpha: 2}\n"
    (here / "s.yaml").write_text(text)
    lines = refused(here, "plan", "s.yaml", "--set", "model.dim=9")
    assert [("with --set" in line) for line in lines if "alpha" in line] == [False], lines
    assert any("heads" in line and "(with --set model.dim=9)" in line for line in lines), lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seeds: 0\n", "s.yaml:9:8: seeds must be greater than or equal to 1; found 0"),
        ("seeds: [1, -1]\n", "s.yaml:9:12: seeds.1 must be greater than or equal to 0; found -1"),
        ("seeds: ['a']\n", "s.yaml:9:9: seeds.0 must be a whole number; found 'a'"),
        ("seeds: [1, 1]\n", "s.yaml:9:1: seeds: a seed is listed twice; each seed is one replicate"),
        ("seeds: {count: 1, escalate_to: 3}\n", "s.yaml:9:1: seeds: adding seeds needs at least 2 seeds at first"),
        ("run: {retries: -1}\n", "s.yaml:9:16: run.retries must be greater than or equal to 0; found -1"),
    ],
)
def test_mistake_names_what_is_written(here: Path, text: str, line: str) -> None:
    assert one(mistakes(here, STUDY + text)).startswith(line)


@pytest.mark.parametrize(
    ("margin", "words"),
    [
        ("2", ["val/accuracy is from 0 to 1", "'2 points' or 0.02"]),
        ("1", ["'1 point' or 0.01"]),
        ("100 points", ["val/accuracy is from 0 to 1"]),
        ("2 %", ["2 points"]),
        ("-1 points", ["a number, or points"]),
        ("0", ["greater than 0"]),
    ],
)
def test_margin_outside_metric_bounds_is_refused(here: Path, margin: str, words: list[str]) -> None:
    line = one(mistakes(here, STUDY.replace("study: small", f"study: small\nanalysis: {{margin: {margin}}}")))
    for word in words:
        assert word in line, line
    if margin == "2":
        for name in ("margin", "min_abs"):
            line = one(mistakes(here, f"{STUDY}check: {{{name}: {{val/accuracy: 2}}}}\n"))
            assert "'2 points' or 0.02" in line
        line = one(mistakes(here, f"{STUDY}check: {{min_abs: {{val/los: 2}}, metrics: {{val/loss: min}}}}\n"))
        assert "not compared" in line and "'val/loss'" in line


def test_margin_in_points_equals_margin_in_shares(here: Path) -> None:
    (here / "s.yaml").write_text(
        STUDY + "check: {min_abs: {val/loss: 3, val/accuracy: 1 point}, metrics: {val/loss: min}}\n"
    )
    messages = []
    for margin in ("2 points", "2points", "0.02"):
        study, plan = plan_study("s.yaml", changes={"analysis.margin": margin if "p" in margin else 0.02})
        messages.append(plan.analysis.margin)
        assert study.check.min_abs == {"val/loss": 3, "val/accuracy": 0.01}
    assert messages == [0.02, 0.02, 0.02]
    (here / "s.yaml").write_text(STUDY)
    line = one(refused(here, "plan", "s.yaml", "--set", "analysis={metric: val/loss, margin: 2 points}"))
    assert "points are hundredths of a share" in line
    assert plan_study("s.yaml", changes={"analysis": {"metric": "val/loss", "margin": 2}})[1].analysis.margin == 2


@pytest.mark.parametrize(
    ("seeds", "note"),
    [(1, "no spread, no interval and no test"), (2, "s of each arm: a test but no interval"), (3, "")],
)
def test_seeds_too_few_to_compare_are_noted(here: Path, seeds: int, note: str) -> None:
    (here / "s.yaml").write_text(f"{STUDY}seeds: {seeds}\n")
    for command in ("validate", "plan"):
        out = call(command, "s.yaml")[1]
        assert (f"{note}. Set seeds: 3 or more for intervals." in out) == bool(note) and ("Set seeds" in out) == bool(
            note
        )
    (here / "s.yaml").write_text(f"{STUDY}seeds: {seeds}\nanalysis: {{compare: none}}\n")
    assert "Set seeds" not in call("validate", "s.yaml")[1], "nothing is compared"


def test_duplicate_value_gives_warning(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY.replace("[none]", "[none, none, learned2d]"))
    code, out, _ = call("validate", "s.yaml")
    assert code == 0 and "'position=none' is in the design more than once" in out


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_missing_data_is_reported_before_run(here: Path, command: str) -> None:
    (here / "s.yaml").write_text(STUDY.replace("type: digits", "type: cifar10, root: /nowhere"))
    code, out, _ = call(command, "s.yaml")
    assert code == 0 and out.count("data not here: cifar10") == 1 and "/nowhere" in out


# -- invalid files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty; a study begins with 'study: NAME'"),
        (b"# nothing\n", "the file is empty; a study begins with 'study: NAME'"),
        (b"- a\n", ":1:1: a study is a mapping that begins with 'study: NAME'; found a list"),
        (b"just words\n", ":1:1: a study is a mapping that begins with 'study: NAME'; found 'just words'"),
        (b"{[1]: 2}\n", "single name"),
        (
            b"study: [small\nbase: 1\n",
            ":1:8: '[' opens here and is not closed before line 2, column 5; close it, or write the comma that is missing there",
        ),
        (
            b"base: {data: [a, b}\n",
            ":1:14: '[' opens here and is not closed before line 1, column 19; close it",
        ),
        (
            b"base: {data: a\n",
            ":1:7: '{' opens here and is not closed before line 2, column 1; close it, or",
        ),
        (
            b'study: "a\nbase: 1\n',
            ":1:8: '\"' opens here and is not closed before line 3, column 1; close it",
        ),
        (
            b"study: 'small\nbase:\n  data: 'digits'\n",
            ":3:10: the value ends before this, with '; remove the rest, or",
        ),
        (b"study: small\nbase: {data: digits}, x\n", ":2:21: the value ends before this, with }; remove the rest, or"),
        (b'study: small\nquestion: "Does it" work?\n', ":2:21: the value ends before this, with "),
        (b"study: small\nquestion: @home\n", ":2:11: a text that begins with @ needs quotes"),
        (b"study: small\nquestion: *is* it\n", ":2:14: a text that begins with * needs quotes"),
        (b"study: small\nquestion: > 5 layers\n", ":2:13: a text that begins with > needs quotes"),
        (b"study: small\nseeds: - 1\n", ":2:8: a text that begins with - needs quotes"),
        (b"study: small\nseeds:\t1\n", ":2:7: a tab stands here; write a space"),
        (
            b"study:small\nbase:\n  data: digits\n",
            ":1:1: line 1 has no 'key: value'; write a colon and a space after the key",
        ),
        (
            b"base:\n  model\n  data: digits\n",
            ":2:3: line 2 has no 'key: value'; write a colon and a space after the key",
        ),
        (b"study: small\nbase: {data: digits}}\n", ":2:21: '}' closes nothing; remove it"),
        (b"study: small\nwhere: [1]]\n", ":2:11: ']' closes nothing; remove it"),
        (b"study: small\nbase: {\n", ":3:1: the file ends inside '{' or '['; close it"),
        (b"study: small\nwhere: [", ":2:9: the file ends inside '{' or '['; close it"),
        (b"study: small\n\tbase: 1\n", ":2:1: line 2 is indented with a tab; YAML needs spaces"),
        (b"study: small\n---\nstudy: other\n", ":2:1: not YAML: "),
        (
            b"base:\n    data: a\n  model: b\n",
            ":3:3: wrong indentation: it begins in column 3, and the keys from line 1 ",
        ),
        (b"base:\n  data: a\n    model: b\n", ":3:10: wrong indentation: it is indented deeper than line 2, "),
        (b"study: small\nquestion: Which: a or b?\n", ":2:16: a text that contains ': ' needs quotes"),
        (b"study: \xff\xfe\n", ":1:8: byte 0xff is not UTF-8 text; save the file as UTF-8"),
        (b"study: a\nquestion: caf\xe9\n", ":2:14: byte 0xe9 is not UTF-8 text; save the file as UTF-8"),
        ("study: small\n".encode("utf-16"), ":1:1: byte 0xff is not UTF-8 text; save the file as UTF-8"),
        (b"study: " + b"[" * 5_000, "s.yaml: nested too deeply"),
        (b'study: small\nquestion: "C:\\Users\\x"\n', ":2:16: in double quotes a backslash begins an escape"),
        (b'study: small\nquestion: "C:\\temp\\x"\n', ":2:21: in double quotes a backslash begins an escape"),
        (b'study: small\nquestion: "C:\\temp"\n', ":2:11: in double quotes a backslash begins an escape"),
        (b"PK\x03\x04\x14\x00\x06\x00", ":1:3: not YAML: a character that cannot be printed, U+0003"),
        (b"\x7fELF\x02\x01\x01\x00", "cannot be printed, U+"),
        (b"study: \xed\xa0\x80\n", "is not UTF-8 text"),
    ],
)
def test_file_without_study_is_refused(here: Path, content: bytes, message: str) -> None:
    (here / "s.yaml").write_bytes(content)
    assert message in one(refused(here, "run", "s.yaml"))


def test_path_without_file_is_refused(here: Path) -> None:
    (here / "folder").mkdir()
    (here / "folder" / "zebra.yaml").touch()
    os.mkfifo(here / "pipe")
    (here / "mine.yaml").touch()
    with (here / "large.yaml").open("wb") as file:
        file.truncate(100_000_000)
    for name, message in {
        "no.yaml": "no.yaml: no such file",
        "no/s.yaml": "no/s.yaml: no such file",
        "mien.yaml": "mien.yaml: no such file. Did you mean 'mine.yaml'?",
        "nosuch.yaml": "nosuch.yaml: no such file$",
        "folder/apple.yaml": "folder/apple.yaml: no such file$",
        "mine": "mine: no such file, and no study of this name comes with vitlab. Did you mean 'mine.yaml'?",
        "folder": "folder is a folder here, not a study file; write the path of a file",
        "pipe": "pipe: is not a regular file",
        "large.yaml": "large.yaml: has 100,000,000 bytes; a study file has at most 1,000,000",
        "": ". is a folder here, not a study file; write the path of a file",
        "x" * 300: "no such file, and no study of this name comes with vitlab",
        "x" * 300 + ".yaml": "File name too long",
    }.items():
        assert message in f"{one(refused(here, 'run', name))}$"


def test_alias_expansion_is_bounded(here: Path) -> None:
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    line = one(mistakes(here, "\n".join(layers) + "\n"))
    assert re.match(r"s\.yaml:\d+:\d+: more than 100,000 values; a study file is a page or two", line), line
    assert "nested too deeply" in one(mistakes(here, "study: &s [*s]\n"))
    layers = ["a0: &a0 {x: 1}"]
    layers += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 40)]
    assert any("'base' is missing" in line for line in mistakes(here, "\n".join(layers) + "\n"))


def test_match_by_a_wrong_model_is_no_further_mistake(here: Path) -> None:
    text = re.sub(r"model: \{.*\}", "model: 5", STUDY) + "match: {quantity: params, knob: model.dim}\n"
    lines = mistakes(here, text)
    assert any("base.model" in line for line in lines) and not any("match" in line for line in lines)


@pytest.mark.parametrize(
    ("merged", "message"),
    [
        ("{? [a, b] : 1}", ":1:8: a key must be a single name"),
        ("{yes: 1}", ":1:6: YAML reads the key 'yes' as a boolean"),
        ("[1]", ":1:6: '<<' takes a mapping or a list of mappings"),
    ],
)
def test_mistake_in_merged_mapping_has_its_place(here: Path, merged: str, message: str) -> None:
    assert one(mistakes(here, f"<<: {merged}\n")).startswith(f"s.yaml{message}")


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 50_000, "- " * 100_000, "? " * 100_000])
def test_nesting_depth_is_bounded(here: Path, text: str) -> None:
    assert re.match(r"s\.yaml", one(mistakes(here, text)))


# -- missing files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", ["{type: mnist, root: %s}", "{type: image_folder, root: %s}", "{type: cifar10, root: %s}"]
)
def test_missing_data_is_reported_before_anything_is_written(here: Path, data: str) -> None:
    text = STUDY.replace("{type: digits}", data % (here / "nowhere")).replace("patch_size: 2", "patch_size: 4")
    line = one(mistakes(here, text))
    assert re.match(r"s\.yaml:3:\d+: ", line) and str(here / "nowhere") in line, line


def test_missing_weights_are_reported(here: Path) -> None:
    text = STUDY.replace("design:", "  init_from: {checkpoint: nowhere.safetensors}\ndesign:")
    assert one(mistakes(here, text)) == "s.yaml:6:27: no such file: nowhere.safetensors"


def test_starting_trial_without_data_is_reported(here: Path) -> None:
    """Its objective reads no labels, so it is asked for test sets that would need them."""
    trial = "{model: {type: vit, patch_size: 2, dim: 8, heads: 2, depth: 1}, train: {steps: 1, objective: mae}}"
    found = mistakes(here, STUDY.replace("design:", f"  init_from: {{trial: {trial}}}\ndesign:"))
    assert one(found) == "s.yaml:6:15: 'data' is missing"


# -- a study file from somebody else ----------------------------------------------------------------------------------


class Deed:
    """Pickle that writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def hostile(here: Path, suffix: str, *, zipped: bool) -> Path:
    """Return a file of weights that would write a file if it were unpickled."""
    file = here / f"weights{suffix}"
    if zipped:
        torch.save({"head.weight": Deed(here / "pwned")}, file)  # as torch keeps pickles
    else:
        file.write_bytes(pickle.dumps({"head.weight": Deed(here / "pwned")}))
    return file


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".safetensors", ".npz"])
def test_pickle_in_place_of_weights_is_refused(tmp_path: Path, suffix: str, zipped: bool) -> None:
    with pytest.raises(WeightsError, match="weights"):
        open_model(hostile(tmp_path, suffix, zipped=zipped))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("place", ["init_from: {checkpoint: %s}", "distill: {teacher: {checkpoint: %s}, kind: hard}"])
def test_study_cannot_run_a_pickle(here: Path, place: str) -> None:
    file = hostile(here, ".pth", zipped=True)
    one_arm = STUDY[: STUDY.index("design:")]
    (here / "s.yaml").write_text(f"{one_arm}  {place % file}\nseeds: 1\n")
    code, _, err = call("run", "s.yaml", "--executor", "inline", "--tracking-uri", NOWHERE)
    assert code == 4 and "only tensors are read" in err, err
    assert not (here / "pwned").exists()


def test_checkpoint_replaced_by_pickle_is_not_run(tmp_path: Path) -> None:
    (tmp_path / artifacts.CHECKPOINT).write_bytes(pickle.dumps(Deed(tmp_path / "pwned")))
    with pytest.raises(Damaged):
        artifacts.clean_up_and_read_checkpoint(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_arm_label_is_shown_consistently(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.report.Report.figures", {})  # nine arms take seconds to draw
    names = [
        "../../up",
        "/tmp/up",
        "a/../../../up",
        "$(touch pwned)",
        "{{7*7}}",
        "<script>alert(1)</script>",
        "a\\input{b}",
        "a\n\\input{b}",
    ]
    arms = {name: {"train.optimizer.lr": 1e-3 * (number + 2)} for number, name in enumerate(names)}
    (here / "in").mkdir()
    (here / "in" / "s.yaml").write_text(
        yaml.safe_dump({**yaml.safe_load(STUDY), "design": {"arms": {"plain": {}, **arms}}, "seeds": 1})
    )
    code, _, err = call("run", "in/s.yaml", "--out", "in/out", "--executor", "inline", "--tracking-uri", NOWHERE)
    assert code == 0, err
    page = (here / "in" / "out" / "studies" / "small" / "report" / "report.html").read_text()
    assert "<script>alert" not in page and "{{7*7}}" in page
    lines = (here / "in" / "out" / "studies" / "small" / "report" / "report.tex").read_text().splitlines()
    assert lines and not any("\\input" in line for line in lines if not line.startswith("%"))
    assert sorted(str(path.relative_to(here)) for path in here.glob("*/*")) == ["in/out", "in/s.yaml"]
    assert not list(here.rglob("pwned")) and not list(here.rglob("up"))


@pytest.mark.parametrize(
    ("message", "instead", "words"),
    [
        ("study: small", "study: small\nplugins: {require: ['../evil.py']}", ["this study needs ../evil.py: add --plugin"]),
        ("study: small", "study: small\nplugins: {require: ['evil @ file:///tmp/evil']}", ["is not a requirement"]),
        ("type: vit", "type: 'os:system'", ["no model called 'os:system'"]),
        ("type: vit", "type: ../evil", ["no model called '../evil'"]),
        ("type: adamw", "type: evil.py", ["no optimizer called 'evil.py'"]),
        ("study: small", "study: small\nrun: {executor: '../evil'}", ["no executor called '../evil'"]),
        ("study: small", "study: small\nrun: {tracker: 'evil:Evil'}", ["no tracker called 'evil:Evil'"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'sqlite:////tmp/evil.db'}}", ["/tmp/evil.db is not in it"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'sqlite:///../evil.db'}}", ["evil.db is not in it"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'file:///tmp/evil'}}", ["refuses to write"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'http://evil.example:5000'}}", ["only to servers that you name", "--tracking-uri"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'http://evil.example\\@127.0.0.1:5000'}}", ["holds no password"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'http://127.0.0.1.evil.example'}}", ["only to servers that you name"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'http://me:hush@127.0.0.1:9'}}", ["a study file holds no password"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'postgresql://127.0.0.1/db'}}", ["through its MLflow server"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'databricks://profile'}}", ["only to servers that you name"]),
        ("study: small", "study: small\nrun: {tracker: {type: mlflow, uri: 'http://evil.example:5000'}}", ["only to servers that you name", "--tracking-uri"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'http://evil.example:5000'}}", ["only to servers that you name"]),
        ("study: small", "study: small\nrun: {tracker: {uri: 'http://me:hush@127.0.0.1:9'}}", ["a study file holds no password"]),
        ("study: small", "study: small\nrun: {executor: {type: slurm, setup: ['touch pwned']}}", ["'setup' runs code", "--set"]),
        ("study: small", "study: small\nrun: {executor: {type: slurm, sbatch: {qos: \"a\\nb\"}}}", ["sbatch.qos must be a text that matches"]),
        ("study: small", "study: small\nrun: {executor: {type: slurm, sbatch: {output: /tmp/x}}}", ["'sbatch' runs code"]),
        ("study: small", "study: small\nrun: {executor: {type: ray, runtime_env: {pip: [x]}}}", ["'runtime_env' runs code"]),
        ("study: small", "study: small\nrun: {device: cpu, resources: {processes: 2, nodes: 2}}", ["runs a trial on one machine"]),
        ("study: small", "study: small\nrun: {device: cpu, resources: {processes: 3, nodes: 2}}", ["cannot be divided equally"]),
        ("study: small", "study: small\nrun: {executor: {type: ray, address: 'evil.example:6379'}}", ["'address' runs code"]),
        ("type: digits", "type: mnist, root: /etc", ["mnist is not here: looked in /etc"]),
        ("type: digits", "type: image_folder, root: ../..", ["image_folder: ../.. has no folder 'train'"]),
    ],
)  # fmt: skip
def test_hostile_file_runs_nothing_and_writes_nowhere(here: Path, message: str, instead: str, words: list[str]) -> None:
    (here / "evil.py").write_text("open('pwned', 'w')\n")
    (here / "in").mkdir()
    (here / "in" / "s.yaml").write_text(STUDY.replace(message, instead).replace("patch_size: 2", "patch_size: 4"))
    line = one(refused(here, "run", "in/s.yaml"))
    for word in words:
        assert word in line, line


def test_server_of_study_file_is_confirmed_by_command_line_or_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = "http://127.0.0.1:9"
    (here / "s.yaml").write_text(STUDY.replace("study: small", f"study: small\nrun: {{tracker: {{uri: '{uri}'}}}}"))
    code, _, err = call("validate", "s.yaml")
    assert code == 2 and "only to servers that you name yourself" in err
    assert call("validate", "s.yaml", "--set", f"run.tracker.uri={uri}")[0] == 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{uri}/")
    assert call("validate", "s.yaml")[0] == 0


def test_command_line_may_set_what_study_file_may_not(here: Path) -> None:
    (here / "s.yaml").write_text(
        STUDY.replace("study: small", "study: small\nrun: {executor: {type: slurm, setup: [ls]}}")
    )
    code, _, err = call("plan", "s.yaml", "--set", "run.executor.setup=[module load cuda]")
    assert code == 0, err


# -- as users see it: a process of its own ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STUDY.replace("dim: 8", "dmi: 8"), "s.yaml:4:37: model 'vit' has no option 'dmi'. Did you mean 'dim'?"),
        ("study: !!python/object/apply:os.system ['touch pwned']\n", "s.yaml:1:8: the tag !!python/object/apply"),
    ],
)
def test_separate_process_reports_mistake(here: Path, text: str, message: str) -> None:
    (here / "s.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "vitlab", "run", "s.yaml"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert one(messages(done.stderr)).startswith(message), done.stderr
    assert [path.name for path in here.iterdir()] == ["s.yaml"]


# -- other input ------------------------------------------------------------------------------------------------------

QUICKSTART = re.sub(r"(?m)^#.*\n", "", (ROOT / "pipelines" / "quickstart.yaml").read_text())
PIECES = (
    *"{}[]:,#&*!|>'\"%@`-? \n\t0123456789eE.+-_~/\\\x00\x1b\ufeff\u2028ä\U0001d54d",
    *("no", "null", "1e999", "-1", "0", "[]", "{}", "<<: *a", "&a ", "*a", "!!set", "!!int ", "? ", "--- ", "model.dim", "type", "\r\n"),
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """Return the quickstart with up to four accidents: characters and lines deleted, doubled, moved or inserted."""
    text = QUICKSTART
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(["delete", "insert", "replace", "drop line", "double line", "indent"])):
            case "delete":
                text = text[:at] + text[at + draw(st.integers(1, 12)) :]
            case "insert":
                text = text[:at] + draw(st.sampled_from(PIECES) | st.characters()) + text[at:]
            case "replace":
                text = text[:at] + draw(st.sampled_from(PIECES)) + text[at + draw(st.integers(1, 6)) :]
            case change:
                lines = text.splitlines(keepends=True)
                if lines:
                    number = draw(st.integers(0, len(lines) - 1))
                    lines[number] = {"drop line": "", "double line": lines[number] * 2, "indent": "  " + lines[number]}[
                        change
                    ]
                text = "".join(lines)
    return text


@pytest.mark.slow
@given(text=mutated())
@example(text=QUICKSTART.replace("2.0e-3", "1_"))
@example(text=QUICKSTART.replace("15", "0x"))
@example(text=QUICKSTART.replace("32", "1e400"))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_damage_gives_plan_or_user_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    code, out, err = call("validate", file)
    assert code in (0, 2), (code, err)
    assert "Traceback" not in err and not re.search(r"[\x00-\x08\x0b-\x1f]", out + err), err
    assert bool(err) == (code == 2)
    for line in messages(err):
        assert re.match(rf"{re.escape(str(file))}(:\d+:\d+)?: \S", line), line


@pytest.mark.parametrize(
    ("first", "second", "further"),
    [
        ("type: digits", "type: digts, fractoin: 1", "dataset 'digits' has no option 'fractoin'"),
        ("type: adamw", "type: adamww, beta: 1", "optimizer 'adamw' has no option 'beta'"),
        ("model.position: [none]", "model.positoin: [none]", "model 'vit' has no option 'positoin'"),
    ],
)
def test_misspelt_component_hides_no_mistake_of_its_options(here: Path, first: str, second: str, further: str) -> None:
    text = STUDY.replace(first, second)
    assert text != STUDY
    text = text if "vit'" not in further else text.replace("type: vit", "type: vitt")
    lines = mistakes(here, text)
    assert len(lines) == 2 and any(further in line for line in lines), lines
    assert any(" called '" in line and "Did you mean" in line for line in lines), lines


def test_all_mistakes_of_nested_misspelt_components_are_found_at_once(here: Path) -> None:
    """The options of a wrong name are those of the one that is meant; of an unknown one, nothing is known."""
    nested = "type: vitt, mlp: {type: swigluu, ratioo: 3}, position: {type: unheard_of, foo: 1}"
    lines = mistakes(here, STUDY.replace("type: vit", nested).replace(", position: learned", ""))
    assert len(lines) == 4 and not any("foo" in line for line in lines), lines
    for line, words in zip(
        lines, ("'vitt'", "'swigluu'", "'ratioo'. Did you mean 'ratio'", "'unheard_of'"), strict=True
    ):
        assert words in line, line


def test_repeated_key_hides_no_mistake_but_those_below_it(here: Path) -> None:
    text = STUDY.replace("dim: 8", "dim: 8, dim: 7").replace("type: digits", "type: digts")
    lines = mistakes(here, text.replace("  train:", "  train: {epochs: many}\n  train: {steps: x}\n  train:", 1))
    twice = [line for line in lines if "is given twice" in line]
    assert len(twice) == 3 and any("'digts'" in line for line in lines), lines
    assert not any(word in line for line in lines for word in ("many", "'x'", "is missing")), lines
    assert any(line.startswith("s.yaml:1:12: key 'a' is given twice") for line in mistakes(here, "<<: {a: 1, a: 2}\n"))


def test_component_of_other_digits_is_not_meant(here: Path) -> None:
    """Its options say nothing: resnet8 has neither depth nor heads."""
    assert "no model called 'resnet9'" in one(mistakes(here, STUDY.replace("type: vit", "type: resnet9")))


@pytest.mark.parametrize("name", ["my_adamw", "adamp", "adamv"])
def test_name_that_may_be_another_component_brings_one_mistake(here: Path, name: str) -> None:
    """A forgotten --plugin, or a name as near to adam as to adamw."""
    text = STUDY.replace("type: adamw", f"type: {name}, beta: 1")
    assert text != STUDY and f"'{name}'" in one(mistakes(here, text))


def test_broken_plugin_hides_no_misspelt_component(here: Path) -> None:
    """A plugin one edit away, and one among the options of the component that may be meant."""
    broken = BrokenComponent("norm 'layernrm' cannot be used")

    def find(slot: Slot[Any], name: str, find: Any = Slot.find) -> Any:
        if name in ("layernrm", "adamwx"):
            raise broken
        return find(slot, name)

    with mock.patch.object(Slot, "find", find), mock.patch.object(Slot, "names", lambda _: ["adamwx"]):
        assert "'adamwxx'" in one(mistakes(here, STUDY.replace("type: adamw", "type: adamwxx")))
        line = one(mistakes(here, STUDY.replace("type: vit", "type: vitt, norm: layernrm")))
        assert "no model called 'vitt'" in line


@pytest.mark.parametrize("metric", ["accc", "val/accc"])
@pytest.mark.parametrize("section", ["run: {keep: best}", "blocks: {data.fraction: [0.5, 1]}"])
def test_wrong_metric_is_one_mistake(here: Path, metric: str, section: str) -> None:
    line = one(mistakes(here, f"{STUDY}analysis: {{metric: {metric}}}\n{section}\n"))
    assert f"no trial reports {metric}. Did you mean 'val/accuracy'?" in line


def test_mistake_in_the_base_names_no_change_elsewhere(here: Path) -> None:
    (here / "s.yaml").write_text(STUDY.replace("lr: 1.0e-3", "lr: -1"))
    line = one(refused(here, "plan", "s.yaml", "--set", "seeds=5"))
    assert "with --set" not in line and "lr" in line
