"""Tests of the pages of the repository: commands, options, files, names, and the shown study."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

import vitlab
from vitlab.cli import COMMANDS, cli
from vitlab.cli.report import FORMATS
from vitlab.plugin import check_component
from vitlab.spec import read_document
from vitlab.spec.design import Node

ROOT = Path(__file__).parents[1]
PAGES = [page for page in ("README.md", "pipelines/README.md", "plugins/README.md", "docker/README.md", "CONTRIBUTING.md")
         if (ROOT / page).exists()]  # fmt: skip


def fenced(page: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of every fenced block of a page."""
    for indent, language, text in re.findall(r"(?ms)^( *)```(\w*)\n(.*?)^ *```$", (ROOT / page).read_text()):
        yield language, re.sub(rf"(?m)^{indent}", "", text)


def inline(page: str) -> list[str]:
    """Return the texts between backticks in the running text of a page."""
    running = re.sub(r"(?ms)^ *```.*?^ *```$", "", (ROOT / page).read_text())
    return re.findall(r"`([^`]+)`", running.replace("\n", " "))


def shell(page: str) -> list[str]:
    """Return every command of a page, without its comment."""
    lines = [
        line for language, text in fenced(page) if language in ("", "sh", "bash", "shell") for line in text.splitlines()
    ]
    lines += inline(page)
    lines = [re.sub(r"\s+#.*", "", re.sub(r"^(\$ |\w+=\S+ )*", "", line.strip())) for line in lines]
    return [line for line in lines if re.match(r"(\.venv/bin/)?(vitlab|pip|make|docker|python) ", line)]


def of_vitlab(page: str) -> list[list[str]]:
    """Return the words of every vitlab command of a page; a line may have several."""
    names = []
    for line in shell(page):
        for part in line.split(";"):
            words = part.strip().removeprefix(".venv/bin/").split()
            if words[:1] == ["vitlab"] and len(words) > 1:
                names.append(words[1:])
    return names


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None, words
    rest = words[1:]
    while isinstance(command, click.Group):
        assert rest and rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def test_pages_have_commands() -> None:
    assert {"run", "judge", "check", "ui", "new", "sync"} <= {words[0] for words in of_vitlab("README.md")}
    assert any(words[:2] == ["list", "position"] for words in of_vitlab("plugins/README.md"))


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    for words in of_vitlab(page):
        if words[0].startswith("--"):
            continue
        assert words[0] in COMMANDS, words
        command, rest = command_of(words)
        options = {name for parameter in command.params for name in parameter.opts}
        for word in rest:
            if word.startswith("--"):
                assert word.partition("=")[0] in options, (page, words, word)
        if words[0] == "report" and "--format" in rest:
            formats = rest[rest.index("--format") + 1].split("|")
            assert set(formats) <= set(FORMATS), words


@pytest.mark.parametrize("page", PAGES)
def test_make_pip_and_docker_targets_exist(page: str) -> None:
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    for line in shell(page):
        words = shlex.split(line)
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word and not word.startswith("-")} <= targets, line
        if words[:2] == ["pip", "install"]:
            for option, value in itertools.pairwise(words):
                if option in ("-c", "-e", "-r"):
                    assert (ROOT / value.partition("[")[0]).exists(), line
        if words[0] == "docker":
            for option, value in itertools.pairwise(words):
                if option in ("-f", "--file"):
                    assert (ROOT / value).exists(), line


@pytest.mark.parametrize("page", PAGES)
def test_files_and_links_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    here = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (here / link).exists(), link
    made_here = (ROOT / ".gitignore").read_text().split()
    for file in re.findall(r"\b(?:pipelines|plugins|docker|tests|vitlab)/[\w./-]*\w", text):
        assert (ROOT / file).exists() or file in made_here, file
    if page == "pipelines/README.md":
        for file in re.findall(r"(?m)^\| `([\w./]+\.yaml)`", text):
            assert (here / file).exists(), file


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_parse_and_imports_exist(page: str) -> None:
    for language, text in fenced(page):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vitlab."):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
    for text in inline(page):
        if (call := re.search(r"vitlab\.(\w+)\((.*)\)", text)) is not None:
            tree = ast.parse(call.group(0), mode="eval").body
            assert isinstance(tree, ast.Call)
            keywords = {str(word.arg): None for word in tree.keywords}
            inspect.signature(getattr(vitlab, call.group(1))).bind(*tree.args, **keywords)


# -- shown study ------------------------------------------------------------------------------------------------------


def test_shown_study_is_the_file() -> None:
    (block,) = [text for language, text in fenced("README.md") if language == "yaml"]
    assert yaml.safe_load(block) == read_document(ROOT / "pipelines" / "quickstart.yaml").data


def test_every_design_kind_is_in_grammar() -> None:
    text = (ROOT / "pipelines" / "README.md").read_text()
    lines = set(re.findall(r"(?m)^\| `(\w+): ", text))
    assert lines == set(Node.model_fields)


@pytest.mark.slow
def test_first_commands_work(tmp_path: Path) -> None:
    """Uses the quickstart itself; results and costs of a run have smaller tests elsewhere."""
    quickstart, out = "quickstart", str(tmp_path / "out")

    def output_of(*words: str) -> str:
        done = CliRunner().invoke(cli, list(words))
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    assert "quickstart  (digits)" in output_of("list", "studies")
    assert output_of("show", "study", quickstart) == (ROOT / "pipelines" / "quickstart.yaml").read_text()
    trials = 3 * yaml.safe_load((ROOT / "pipelines" / "quickstart.yaml").read_text())["seeds"]
    assert f"3 arms, {trials} trials" in output_of("validate", "--build", quickstart)
    assert f"{trials} trials, 0 of them trained already" in output_of("plan", quickstart, "--out", out, "--cost")
    assert "3 combinations of components ran" in output_of(
        "run", quickstart, "--smoke", "--out", out, "--executor", "inline", "--set", "data.fraction=0.1"
    )


# -- component --------------------------------------------------------------------------------------------------------


def test_component_of_readme_passes_contract_test_and_trains(tmp_path: Path) -> None:
    (block,) = [text for language, text in fenced("README.md") if language == "python"]
    (tmp_path / "tilted.py").write_text(block)
    words = ["run", "quickstart", "--smoke", "--out", str(tmp_path / "out"), "--executor", "inline"]
    words += ["--plugin", str(tmp_path / "tilted.py"), "--set", "model.position=tilted", "--set", "data.fraction=0.1"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, (done.output, done.exception)
    check_component("position", "tilted")


# -- packages ---------------------------------------------------------------------------------------------------------


def test_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "pages" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w.]+)`", "\n".join(re.findall(r"(?m)^\| (`.*?) \|", page))))
    there = {
        path.name for path in (ROOT / "vitlab").iterdir() if path.suffix == ".py" and not path.name.startswith("_")
    }
    there |= {path.name for path in (ROOT / "vitlab").iterdir() if (path / "__init__.py").exists()}
    assert there <= named, there - named
