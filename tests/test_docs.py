"""Tests of the site: its instructions work, its reference equals the code, and it builds strictly."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import warm
import yaml

import vitlab
from vitlab import registry
from vitlab.cli import COMMANDS
from vitlab.components.head import Logits
from vitlab.report.comparison import COLUMNS
from vitlab.report.frame import AFTER, BEFORE, HISTORY
from vitlab.spec import Analysis, RunSpec, TrainSpec, TrialSpec
from vitlab.spec.run import Retries
from vitlab.store.result import Ending

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))
REFERENCE = ROOT / "docs" / "pages" / "reference"  #: pages that are generated from the code
RUNNER = ROOT / "tests" / "docs_runner.py"
SHARES = 3  #: tests that follow the pages


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """Return the generated pages."""
    pages: dict[str, str] = docs_module("reference").pages()
    return pages


def test_reference_in_the_repository_is_generated_from_the_code(reference: dict[str, str]) -> None:
    stored = {file.name: file.read_text() for file in REFERENCE.iterdir()}
    outdated = sorted(name for name in stored.keys() | reference.keys() if stored.get(name) != reference.get(name))
    assert not outdated, "make reference writes these pages anew"


def docs_module(name: str) -> ModuleType:
    """Import a hook of the site, which is not part of a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **more}


WRONG = [
    ("sh", "vitlab lst"),
    ("sh", "vitlab run nowhere.yaml --smoke"),
    ("sh", "vitlab ui --prt 5000"),
    ("sh", "make nothing"),
    ("sh", "rm -rf /"),
    ("yaml", "design: {one_at_a_time: {model.position: [lerned]}}"),
    ("yaml", "run: {worker: 2}"),
    ("toml", "[project"),
    ("python", "import vitlab\nvitlab.nothing"),
]
RIGHT = [("sh", "vitlab list position  # a comment"), ("yaml", "run: {workers: 2}"), ("python", "import vitlab")]


def failing_blocks(folder: Path, pages: Iterable[Path]) -> list[dict[str, Any]]:
    """Follow the pages in a process of their own, and return the blocks that could not be done as they are shown."""
    words = [str(RUNNER), str(folder / "run"), *map(str, pages)]
    code = f"import sys; sys.path.insert(0, {str(RUNNER.parent)!r}); sys.argv = {words!r}"
    done = warm.python(f"{code}; import docs_runner; docs_runner.main()", folder, environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("pages", range(SHARES))
def test_pages_can_be_followed(pages: int, tmp_path: Path) -> None:
    """A share of the pages, so that several processes may follow them at a time."""
    followed = [page for page in PAGES if page.parent != REFERENCE]
    failed = failing_blocks(tmp_path, followed[pages::SHARES])
    assert not failed, "\n\n".join(f"{b['page']}:{b['line']}\n{b['shown']}\n{b['reason']}" for b in failed)


@pytest.mark.slow
def test_examples_of_the_python_page_run(tmp_path: Path) -> None:
    """On the tutorial's study, with fewer and shorter trainings."""
    (study,) = re.findall(r'(?s)```yaml title="first.yaml"\n(.*?)```', (REFERENCE.parent / "tutorial.md").read_text())
    content = yaml.safe_load(study) | {"seeds": 1, "run": {"executor": "inline", "tracker": "none"}}
    content["base"]["train"] |= {"epochs": 1, "evaluations": 1}
    examples = re.findall(r"(?s)```python\n(?!vitlab\.).*?```", (REFERENCE / "python.md").read_text())
    assert {name for text in examples for name in re.findall(r"vitlab\.(\w+)\(", text)} == {
        "run", "plan", "results", "compare", "predictions", "load", "explain",
    }  # fmt: skip
    page = tmp_path / "examples.md"
    page.write_text("\n\n".join([f'```yaml title="first.yaml"\n{yaml.safe_dump(content)}```', *examples]))
    assert not failing_blocks(tmp_path, [page])


@pytest.mark.slow
def test_wrong_blocks_of_a_page_are_found(tmp_path: Path) -> None:
    control = tmp_path / "control.md"
    control.write_text("".join(f"```{language}\n{text}\n```\n\n" for language, text in WRONG + RIGHT))
    assert [block["shown"].strip() for block in failing_blocks(tmp_path, [control])] == [text for _, text in WRONG]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_commands_in_text_exist(page: Path) -> None:
    running = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
    for text in re.findall(r"`([^`\n]+)`", running):
        if text.startswith("vitlab ") and not text.startswith("vitlab --"):
            assert text.split()[1] in COMMANDS, text
    for file in re.findall(r"`((?:pipelines|plugins|docker|tests|vitlab)/[\w./-]*\w)`", running):
        assert (ROOT / file).exists(), file


def test_executor_page_lists_every_ending_with_its_retries() -> None:
    page = (ROOT / "docs" / "pages" / "guides" / "executor.md").read_text()
    rows = dict(re.findall(r"(?m)^\| `(\w+)` \| by the .*? \| .*? \| (.*?) \|", page))
    assert set(rows) | {"diverged"} == set(Ending)
    for ending, retried in rows.items():
        assert (ending in Retries.model_fields) == (f"`run.retries.{ending}`" in retried)
        if ending in Retries.model_fields:
            assert f"`run.retries.{ending}`, by default {Retries.model_fields[ending].default}" in retried


def test_messages_of_the_page_of_questions_are_printed() -> None:
    """Each part of a quoted message stands in the source, where texts may go on in the next line."""
    source = "".join(file.read_text() for file in sorted((ROOT / "vitlab").rglob("*.py")))
    source = re.sub(r"\{[^{}]*\}", "...", re.sub(r'"\s*\n\s*f?"', "", source))
    messages = re.findall(r"(?m)^### `(.*)`$", (ROOT / "docs" / "pages" / "faq.md").read_text())
    assert len(messages) > 8
    for message in messages:
        for part in filter(None, (part.strip() for part in message.split("..."))):
            assert part in source, part


def test_every_ask_that_is_met_has_a_link() -> None:
    page = (ROOT / "docs" / "pages" / "asks.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \| .+? \| (has|partly|not)\b[^|]*\|(.*)\|$", page)
    assert [int(number) for number, *_ in rows] == [*range(1, 41)]
    for number, state, where in rows:
        assert ("](" in where) == (state != "not"), number


@pytest.mark.parametrize("name", registry.SLOT_MODULES)
def test_reference_has_every_component_and_option(name: str, reference: dict[str, str]) -> None:
    """The reference is the signatures, without vitlab's own schema."""
    text = reference[f"{name}.md"]
    sections = dict(re.findall(r"(?ms)^## `(\w+)`\n(.*?)(?=^## |\Z)", text))
    registered = {entry.name for entry in registry.list_entries(name) if entry.origin.source == registry.BUILT_IN}
    assert set(sections) == registered and registered
    for component, section in sections.items():
        cls = registry.slot(name).get(f"{registry.BUILT_IN}:{component}")
        rows = {row[0]: row for row in re.findall(r"(?m)^\| `(\w+)` \| (.*?) \| (.*?) \|", section)}
        parameters = {
            option: parameter
            for option, parameter in inspect.signature(cls).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        assert set(rows) == set(parameters), component
        for option, parameter in parameters.items():
            if parameter.default is parameter.empty:
                assert rows[option][2] == "required", (component, option)
            elif isinstance(parameter.default, bool | int | float | str):
                default = parameter.default
                default = float(f"{default:.6g}") if isinstance(default, float) else default
                shown = default if isinstance(default, str) else json.dumps(default)
                assert rows[option][2] == f"`{shown}`", (component, option)
        if (papers := re.findall(r"arXiv:(\d{4}\.\d{4,5})", inspect.getdoc(cls) or "")) and parameters:
            assert all(f"https://arxiv.org/abs/{paper}" in section for paper in papers), component


def test_reference_has_every_public_function_and_argument(reference: dict[str, str]) -> None:
    text = reference["python.md"]
    sections = dict(re.findall(r"(?ms)^## `vitlab\.(\w+)`\n(.*?)(?=^## |\Z)", text))
    public = {name: getattr(vitlab, name) for name in vitlab.__all__}
    functions = {name: member for name, member in public.items() if inspect.isfunction(member)}
    assert sections.keys() == functions.keys() and "history" in sections
    for name, function in functions.items():
        for argument in inspect.signature(function).parameters:
            assert re.search(rf"(?m)^    {argument}\b", sections[name]), (name, argument)
    errors = {name for name, member in public.items() if inspect.isclass(member)}
    listed = set(re.findall(r"(?m)^\| `([\w.]+)` \|", text))
    assert {f"vitlab.{name}" for name in errors} | {"vitlab.errors.UnknownComponent"} <= listed
    for name, columns in (("results", BEFORE | AFTER), ("compare", COLUMNS), ("history", HISTORY)):
        rows = set(re.findall(r"(?m)^\| `([\w./]+)` \|", sections[name]))
        assert columns.keys() <= rows, name
    fields = re.findall(r"(?m)^\| `Logits` \| (.*?) \|", sections["load"])
    assert fields == [", ".join(f"`{name}`" for name in Logits._fields)]


def test_reference_has_bounds_and_every_command(reference: dict[str, str]) -> None:
    assert "| `theta` | number > 0 | `100.0` |" in reference["position.md"]
    commands = reference["commands.md"]
    for name in COMMANDS:
        assert re.search(rf"(?m)^## `vitlab {name}\b", commands), name
    assert "``" not in "".join(reference.values()).replace("```", "")


def test_reference_has_every_key_of_the_study_file(reference: dict[str, str]) -> None:
    """The reference is the pydantic models, without the JSON Schema that the page is made from."""
    page = reference["keys.md"]
    sections = dict(re.findall(r"(?ms)^## Under `([\w.]+)`\n(.*?)(?=^## |\Z)", page))
    for path, model in (("base", TrialSpec), ("base.train", TrainSpec), ("run", RunSpec), ("analysis", Analysis)):
        entries = re.findall(r"(?m)^### `([\w.]+)`\n\n\*.+\*\n\n(\S.*)$", sections[path])  # with a type and a meaning
        assert [key for key, _ in entries] == [
            f"{path}.{field.alias or name}" for name, field in model.model_fields.items()
        ], path
    entry = "### `base.train.evaluations`\n\n*whole number >= 1 and <= 1e+06, by default `10`*\n"
    assert entry in sections["base.train"]


def built(config: Path, site: Path) -> Path:
    """Return the folder of the site, built strictly."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip('the site needs mkdocs-material: pip install -c constraints.txt -e ".[docs]"')
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(config), "-d", str(site)],
        capture_output=True, text=True, env=environment(NO_MKDOCS_2_WARNING="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.mark.slow
def test_pages_in_the_repository_build_strictly(tmp_path: Path) -> None:
    """Without theme, search and hooks: pages, headings and files that links of Markdown name exist."""
    (tmp_path / "theme").mkdir()
    (tmp_path / "theme" / "main.html").write_text("{{ page.content }}")
    changes = {
        "INHERIT": str(ROOT / "docs" / "mkdocs.yml"),
        "docs_dir": str(ROOT / "docs" / "pages"),
        "theme": {"name": None, "custom_dir": str(tmp_path / "theme"), "static_templates": []},
        "plugins": [],
        "hooks": [],
        "validation": {"nav": {"omitted_files": "info"}},  # a hook lists the pages of results
    }
    (tmp_path / "mkdocs.yml").write_text(json.dumps(changes))
    site = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert 'id="alibi2d"' in (site / "reference" / "position" / "index.html").read_text()


@pytest.mark.slow
def test_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    site = built(ROOT / "docs" / "mkdocs.yml", tmp_path / "site")
    pages = [page.relative_to(ROOT / "docs" / "pages").as_posix() for page in PAGES]
    pages += docs_module("gallery").pages()
    for page in pages:
        html = (site / page).with_suffix(".html").read_text()
        loaded = re.findall(r"<(?:script|img|iframe|object|source)\b[^>]*\b(?:src|data)=\"?([^\" >]+)", html)
        loaded += re.findall(
            r"<link\b[^>]*rel=\"?(?:stylesheet|icon|preconnect|preload)\"?[^>]*href=\"?([^\" >]+)", html
        )
        loaded += re.findall(r"<link\b[^>]*href=\"?([^\" >]+)[^>]*rel=\"?(?:stylesheet|icon|preconnect|preload)", html)
        assert loaded and not [address for address in loaded if re.match(r"(https?:)?//", address)], (page, loaded)
    listed = re.findall(r"(?m)^- \[[^\]]+\]\(([\w./-]+\.md)\): .{5}", (site / "llms.txt").read_text())
    for page in pages:
        text = (site / page).read_text()
        assert page in listed and text.lstrip().startswith("#") and "<svg" not in text, page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style
    html = (site / "reference" / "position.html").read_text()
    assert re.search(r"<h2 id=\"?alibi2d\"?>", html)
    assert (site / "search" / "search_index.js").is_file(), "for pages that are opened as files"


def test_links_of_pages_lead_to_files_of_the_repository() -> None:
    """A reader of the repository follows them without the site: generated results have stand-ins."""
    for page in PAGES:
        prose = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
        for link in re.findall(r"\]\(([^)\s#]+)", prose):
            assert "://" in link or (page.parent / link).exists(), (page, link)


def test_dead_link_fails_build(tmp_path: Path) -> None:
    """Links without a heading or page, on written and on generated pages."""
    page, other = tmp_path / "index.html", tmp_path / "guide" / "index.html"
    other.parent.mkdir()
    page.write_text('<a href="#here"></a><p id="here"><a href="guide/#top"></a><a href="https://example.org/x"></a>')
    other.write_text('<h1 id="top"><a href="../#there"></a><a href="../missing/"></a><a href="..#here"></a>')
    assert docs_module("links").dead_links(tmp_path) == [
        ("guide/index.html", "../#there"),
        ("guide/index.html", "../missing/"),
    ]
