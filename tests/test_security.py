"""Tests of the page on security: each of its sentences names tests that exist; those that no other file has are here."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vitlab import cli
from vitlab.errors import public
from vitlab.spec.changes import without_secrets
from vitlab.trackers import server

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "pages" / "security.md"
STUDY = "study: s\nseeds: 1\nbase: {data: digits, model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}, train: {steps: 1}}\n"  # fmt: skip


def test_every_sentence_names_tests_that_exist() -> None:
    items = re.findall(r"(?ms)^- (.*?)(?=^- |^$|\Z)", PAGE.read_text())
    assert len(items) == PAGE.read_text().count("\n- ") > 25
    for item in items:
        comment = re.search(r"<!-- (.*) -->\s*$", item)
        assert comment is not None, f"no test is named: {item}"
        for name in comment[1].split():
            file, _, function = name.partition("::")
            tree = ast.parse((TESTS / file).read_text())
            assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """Run the command line as its own process would, and return the exit code."""
    monkeypatch.setattr(sys, "argv", ["vitlab", *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir [made]", "!!python/name:os.system", "!made [1]"])
def test_yaml_tags_make_no_objects(tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(STUDY.replace("seeds: 1", f"seeds: {tag}"))
    assert command(monkeypatch, "validate", "s.yaml") == 2
    assert "s.yaml:2" in capsys.readouterr().err and not Path("made").exists()


@pytest.mark.parametrize(
    "rule", ["__import__('os').mkdir('made')", "model.dim.__class__", "(lambda: 1)()", "9**9**9**9"]
)
def test_rules_of_a_design_run_no_code(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    design = f'design: {{grid: {{model.dim: [8, 16]}}, where: ["{rule} > 0"]}}\n'
    Path("s.yaml").write_text(STUDY + design)
    assert command(monkeypatch, "validate", "s.yaml") == 2
    assert "s.yaml:4" in capsys.readouterr().err and not Path("made").exists()


def test_study_file_may_read_data_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(STUDY.replace("digits", "{type: mnist, root: /elsewhere}"))
    assert command(monkeypatch, "run", "s.yaml") == 2
    assert "looked in /elsewhere" in capsys.readouterr().err and not Path("vitlab-runs").exists()


def test_server_listens_on_this_machine_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []

    class Stopped(Exception):
        """The server has not been started."""

    def popen(words: list[str], **_: Any) -> None:
        hosts.append(words[words.index("--host") + 1])
        raise Stopped

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(server, "study_links", lambda *_: {"tiny": "#page"})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    result = CliRunner().invoke(cli.cli, ["ui", "--out", str(tmp_path), "--port", "45932", "--no-browser"])
    assert isinstance(result.exception, Stopped) and hosts == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hush", "http://me:***"),
        ("'http://me:hu/sh.example:5000' has", "'http://me:***' has"),
        ("no answer from http://me:4hush; later", "no answer from http://me:*** later"),
        *(
            (text, text)
            for text in ("http://host:5000: no", "http://[::1]:80/x", "sqlite:///a/b.db", "https://a:1.", "a: b")
        ),
    ],
)
def test_password_is_masked_where_its_at_sign_is_missing(text: str, shown: str) -> None:
    assert public(text) == shown


def test_key_of_a_view_is_no_secret() -> None:
    page = "http://host:5000/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=vitlab-arms"
    assert public(page) == page
    assert public(f"{page}&api_key=hush&key=hush") == f"{page}&api_key=***&key=***"


def test_variables_of_workers_are_not_stored() -> None:
    variables = {"env_vars": {"API_KEY": "hush"}, "pip": ["acme"]}
    for changes in (
        {"run.executor": {"type": "ray", "runtime_env": variables}},
        {"run.executor.runtime_env": variables},
        {"run.executor.runtime_env.env_vars.API_KEY": "hush"},
        {"run": {"executor": {"type": "ray", "runtime_env": variables}}},
    ):
        stored = str(without_secrets(changes))
        assert "hush" not in stored and "API_KEY" in stored and ("acme" in stored) == ("acme" in str(changes))


@pytest.mark.parametrize("user", ["me:hush", "hush", ":hush", "me:hu/hush"])
def test_no_message_shows_a_password(user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"http://{user}@127.0.0.1:9"
    Path("s.yaml").write_text(STUDY)
    Path("named.yaml").write_text(f"{STUDY}run: {{tracker: {{type: mlflow, uri: '{uri}'}}, executor: nothing}}\n")
    for words in (
        ["validate", "named.yaml"],
        ["validate", "s.yaml", "--set", f"run.tracker={{type: none, uri: '{uri}'}}"],
        ["validate", "s.yaml", "--set", f"run.traker.uri={uri}"],
        ["validate", "s.yaml", "--set", f"\t{uri}"],
        ["run", "s.yaml", "--set", "run.tracker=none", "--tracking-uri", uri],
        ["judge", f"{uri}:x/#/experiments/1", "--metric", "acc"],
        ["judge", f"ftp://{user}@host/", "--metric", "acc"],
    ):
        assert command(monkeypatch, *words) == 2
        shown = capsys.readouterr()
        assert "hush" not in shown.err + shown.out and shown.err, words
