"""Tests of ``vitlab new study``: a copy of a packaged study with its own name and a schema, and what it refuses."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from vitlab.cli import cli, new
from vitlab.errors import UserError
from vitlab.planning.packaged import packaged_studies
from vitlab.spec import read_document


def arms(file: Path | str) -> list[Any]:
    result = CliRunner().invoke(cli, ["plan", str(file), "--json"], standalone_mode=False)
    assert result.exception is None, result.exception
    planned: list[Any] = json.loads(result.stdout)["arms"]
    return planned


@pytest.fixture(autouse=True, scope="module")
def _schema_is_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new, "study_schema", functools.cache(new.study_schema))
        yield


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("source", ["quickstart", "segmentation"])
def test_copy_plans_like_its_source_under_its_own_name(source: str) -> None:
    result = CliRunner().invoke(cli, ["new", "study", "mine", "--from", source], standalone_mode=False)
    assert result.exception is None and f"mine.yaml is written, a copy of {source}" in result.stdout
    data, original = read_document("mine.yaml").data, read_document(packaged_studies()[source]).data
    assert data == {**original, "study": "mine"} and arms("mine.yaml") == arms(source)
    text = Path("mine.yaml").read_text()
    assert "Found" not in text, "results of the original are no results of the copy"
    schema = json.loads(Path(text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")).read_text())
    Draft202012Validator(schema).validate(data)


@pytest.mark.parametrize("source", sorted(packaged_studies()))
def test_every_packaged_study_can_be_copied(source: str) -> None:
    assert CliRunner().invoke(cli, ["new", "study", "--from", source], standalone_mode=False).exception is None
    assert read_document("study.yaml").data == {**read_document(packaged_studies()[source]).data, "study": "study"}


@pytest.mark.parametrize("name", ["2024", "1e5", "yes", "null"])
def test_name_stays_a_text_whatever_yaml_would_read(name: str) -> None:
    assert CliRunner().invoke(cli, ["new", "study", name], standalone_mode=False).exception is None
    assert read_document(f"{name}.yaml").data["study"] == name


@pytest.mark.parametrize(
    "text",
    [
        "study: mine\nquestion: Why?\nseeds: 3\n",
        "# Kept\nseeds: 3\nstudy: mine  # and this\nquestion: Why?\n",
        "seeds: 3\n\"study\": 'mine'\nquestion: Why?",
        "{seeds: 3, study: mine, question: 'Why?'}",
    ],
)
def test_study_of_ones_own_is_copied_whole(text: str) -> None:
    Path("mine.yaml").write_text(text)
    for name, source in (("new", "mine"), ("again", "new")):
        words = ["new", "study", f"{name}.yaml", "--from", f"{source}.yaml"]
        assert CliRunner().invoke(cli, words, standalone_mode=False).exception is None
        assert read_document(f"{name}.yaml").data == {"study": name, "question": "Why?", "seeds": 3}
        copy = Path(f"{name}.yaml").read_text()
        assert all(copy.count(comment) == text.count(comment) for comment in ("# Kept", "# and this"))
        assert copy.count("yaml-language-server") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["a.yaml", "--from", "quikstart"],
            "quikstart: no such file, and no study of this name comes with vitlab. Did you mean 'quickstart'?",
        ),
        (["a", "--from", "old.yaml"], "old.yaml:1:1: a study is a mapping that begins with 'study: NAME'"),
        (["a", "--from", sys.executable], f"{sys.executable}:"),
        (["a", "--from", "block.yaml"], "block.yaml: the name can be replaced only in a line 'study: NAME'"),
        (["_a.yaml"], "_a.yaml: a study has the name of its file"),
        (["old.yaml"], "old.yaml exists already and is not overwritten"),
    ],
)
def test_nothing_is_written_after_a_mistake(words: list[str], message: str) -> None:
    Path("old.yaml").write_text("mine")
    Path("block.yaml").write_text("study: >-\n  mine\nseeds: 3\n")
    error = CliRunner().invoke(cli, ["new", "study", *words], standalone_mode=False).exception
    assert isinstance(error, UserError) and str(error).startswith(message), error
    assert {path.name for path in Path().iterdir()} == {"old.yaml", "block.yaml"}
    assert Path("old.yaml").read_text() == "mine"


@pytest.mark.parametrize("folder", ["new/", "there"])
def test_study_in_a_folder_has_its_name(folder: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    result = CliRunner().invoke(cli, ["new", "study", folder], standalone_mode=False)
    name = folder.removesuffix("/")
    assert result.exception is None and read_document(tmp_path / name / f"{name}.yaml").data["study"] == name
