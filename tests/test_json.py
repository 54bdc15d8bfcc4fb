"""Tests of ``--json``: one document on stdout, whatever happens, of the form that the page on JSON describes."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import click
import jsonschema
import pytest
from test_cli import call, call_bytes, parsed, write

from vitlab.cli import COMMANDS, cli
from vitlab.errors import BrokenComponent, Interrupted, Refused, TrialFailed, UserError, VitlabError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pages" / "guides" / "json.md").read_text()
SCHEMA = json.loads(re.findall(r"(?ms)^```json title=\"errors.schema.json\"\n(.*?)^```", PAGE)[0])

BAD = {
    "run": ["nothing.yaml"],
    "plan": ["bad.yaml"],
    "validate": ["bad.yaml", "worse.yaml"],
    "check": ["bad.yaml"],
    "ab": ["nowhere..HEAD", "bad.yaml"],
    "status": ["nothing"],
    "studies": ["--out", "bad.yaml"],
    "report": ["nothing"],
    "compare": ["nothing", "never"],
    "judge": ["nothing.csv", "--metric", "acc"],
    "logs": ["nothing"],
    "gc": ["--drop"],
    "list": ["postion"],
    "show": ["position", "lerned"],
    "new study": ["bad.yaml"],
    "new plugin": ["acme-x", "--slot", "postion"],
    "plugins": ["--strct"],
    "completion": ["tcsh"],
    "schema": ["more"],
    "sync": ["nowhere"],
    "ui": ["nothing", "--no-browser"],
    "weights inspect": ["nothing.pth"],
    "weights convert": ["nothing.pth", "x.safetensors", "--to", "timm"],
    "explain": ["nothing"],
    "export": ["nothing", "--arm", "a"],
    "coordinates": ["bad.yaml"],
    "skill": ["more"],
}
"""Command to arguments that are wrong."""


def leaves() -> list[str]:
    """Return every command, with its subcommands."""
    names = []
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        names += [f"{name} {sub}" for sub in command.commands] if isinstance(command, click.Group) else [name]
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path).rename("bad.yaml")
    text = Path("bad.yaml").read_text()
    Path("bad.yaml").write_text(text.replace("depth: 1", "dpth: 1").replace("sinusoidal", "sinusodal"))
    Path("worse.yaml").write_text(text.replace("seeds: 2", "seeds: two"))
    return tmp_path


def document(*arguments: object) -> dict[str, Any]:
    code, printed, _ = call(*arguments, "--json")
    found: dict[str, Any] = parsed(printed)
    jsonschema.validate(found, SCHEMA)
    assert found["exit_code"] == code
    return found


def test_every_command_has_bad_input() -> None:
    assert sorted(leaves()) == sorted(BAD)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", BAD)
def test_mistakes_of_every_command_are_one_document(name: str) -> None:
    found = document(*name.split(), *BAD[name])
    assert found["exit_code"] == 2 and found["kind"] in ("usage", "user", "study") and found["mistakes"]


@pytest.mark.usefixtures("folder")
def test_mistakes_of_files_have_place_value_and_what_is_allowed() -> None:
    found = document("validate", "bad.yaml", "worse.yaml")
    by_path = {mistake["path"]: mistake for mistake in found["mistakes"]}
    key, name, seeds = by_path["base.model.dpth"], by_path["base.model.position.type"], by_path["seeds"]
    assert (key["suggestion"], key["value"]) == ("depth", 1) and "dim" in key["allowed"]
    assert (name["suggestion"], name["value"]) == ("sinusoidal", "sinusodal") and "rope2d" in name["allowed"]
    assert (seeds["file"], seeds["value"], seeds["allowed"]) == ("worse.yaml", "two", None)
    for mistake in (key, name, seeds):
        line = Path(mistake["file"]).read_text().splitlines()[mistake["line"] - 1]
        assert re.match(r"dpth|sinusodal|two", line[mistake["column"] - 1 :])


@pytest.mark.usefixtures("folder")
def test_mistakes_of_tables_have_their_line() -> None:
    Path("r.csv").write_text("arm,seed,acc\na,0,0.5\na,1,x\n")
    (mistake,) = document("judge", "r.csv", "--metric", "acc")["mistakes"]
    assert (mistake["file"], mistake["line"], mistake["column"]) == ("r.csv", 3, 0)


@pytest.mark.usefixtures("folder")
def test_list_of_what_is_allowed_is_with_each_mistake() -> None:
    """Text repeats no list; a program reads one mistake at a time."""
    text = Path("bad.yaml").read_text()
    Path("bad.yaml").write_text(text.replace("- none", "- nune"))
    found = document("validate", "bad.yaml")
    names = [mistake["allowed"] for mistake in found["mistakes"] if mistake["value"] in ("sinusodal", "nune")]
    assert len(names) == 2 and names[0] == names[1] and "rope2d" in names[0]


@pytest.mark.usefixtures("folder")
def test_each_mistake_of_a_command_line_is_an_item() -> None:
    found = document("plan", "bad.yaml", "--set", "seeds", "--set", "train..steps=3")
    assert [mistake["message"].partition(":")[0] for mistake in found["mistakes"]] == [
        "--set seeds",
        "--set train..steps=3",
    ]
    found = document("validate", "worse.yaml", "--set", "x", "--set", "y")
    assert [mistake["message"].partition(":")[0] for mistake in found["mistakes"]] == ["--set x", "--set y"]
    found = document("validate", "nothing", "worse.yaml")
    assert {"", "seeds"} < {mistake["path"] for mistake in found["mistakes"]}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run", "bad.yaml", "--otu", "x"], "--out"),
        (["valdate", "bad.yaml"], "validate"),
        (["plan", "worse.yaml", "--set", "run.enigne=loop"], "engine"),
    ],
)
def test_nearest_name_is_the_suggestion(words: list[str], meant: str) -> None:
    assert meant in [mistake["suggestion"] for mistake in document(*words)["mistakes"]]


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (click.UsageError("a"), 2, "usage"),
        (UserError("a"), 2, "user"),
        (BrokenComponent("a"), 3, "plugin"),
        (VitlabError("a"), 3, "internal"),
        (RuntimeError("a"), 3, "internal"),
        (OSError(22, "Invalid argument"), 3, "internal"),
        (OSError(9, "Bad file descriptor"), 3, "internal"),
        (OSError(17, "File exists"), 3, "internal"),
        (OSError(22, "Invalid argument", "a:b"), 2, "machine"),
        (OSError(28, "No space left on device"), 2, "machine"),
        (TrialFailed("a"), 4, "trials"),
        (Refused("a"), 4, "refused"),
        (Interrupted("a"), 130, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_kinds_of_errors(error: BaseException, code: int, kind: str, tmp_path: Path) -> None:
    """An error of the system that names no file is a fault of a program, unless a disk or stdout caused it."""
    with mock.patch("vitlab.driver.planning.plan_study", side_effect=error):
        found = document("plan", write(tmp_path), "--out", tmp_path / "out")
    assert (found["exit_code"], found["kind"], len(found["mistakes"])) == (code, kind, 1)
    assert kind in SCHEMA["properties"]["kind"]["enum"]


def test_secrets_are_masked(tmp_path: Path) -> None:
    file = write(
        tmp_path, run={"tracker": {"type": "mlflow", "uri": "http://me:hidden@h:1", "ur": "http://me:hidden@h"}}
    )
    _, printed, err = call("plan", file, "--json")
    assert "hidden" not in printed + err and parsed(printed)["mistakes"]


def test_output_of_plugins_stays_out_of_the_document(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('I am loud')\n")
    code, printed, err = call("list", "norm", "--plugin", tmp_path / "loud.py", "--json")
    assert code == 0 and parsed(printed) and "I am loud" in err


def test_what_libraries_write_to_the_descriptor_stays_out_of_the_document(tmp_path: Path) -> None:
    """A library in C, or a process that a plugin starts, knows the descriptor alone."""
    (tmp_path / "loud.py").write_text("import os\nos.write(1, b'I am loud')\nos.system('echo so am I')")
    words = ["list", "norm", "--plugin", str(tmp_path / "loud.py"), "--json"]
    done = subprocess.run([sys.executable, "-m", "vitlab", *words], capture_output=True, text=True, check=True)
    assert parsed(done.stdout) and "I am loud" in done.stderr and "so am I" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["list"], ["list", "studies"], ["list", "norm"], ["show", "norm", "layernorm"], ["show", "norm"], ["show", "studies"],
        ["show", "study", "quickstart"], ["schema"], ["skill"], ["completion", "bash"], ["studies"], ["gc"], ["plugins"],
        ["validate", "quickstart"], ["plan", "quickstart", "--cost"], ["new", "study", "mine.yaml"],
        ["new", "plugin", "acme-x", "--slot", "norm"],
    ],
)  # fmt: skip
def test_results_are_one_document(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, err = call(*words, "--json")
    assert code == 0, err
    parsed(printed)


def test_document_of_lines_has_what_is_printed(tmp_path: Path) -> None:
    text = call("show", "study", "quickstart")[1]
    assert "\n".join(parsed(call("show", "study", "quickstart", "--json")[1])["lines"]) + "\n" == text
    assert call_bytes("schema")[1] == call_bytes("schema", "--json")[1]


def test_modules_document_exit_codes() -> None:
    """The page has the exit codes of the command line, as the reference has."""
    codes = re.findall(
        r"\b(\d+) ", " ".join((importlib.import_module("vitlab.cli").__doc__ or "").split("Exit codes:")[1:])
    )
    assert {int(code) for code in codes} >= set(SCHEMA["properties"]["exit_code"]["enum"])
