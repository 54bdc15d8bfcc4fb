"""Bounds on what a reader meets and what a change touches; ``make shape`` prints the numbers.

How many files a section and an engine take is shown by tests that add one from a file of a user: test_sections.py and
test_engines.py.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import os
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from synthetic_studies import study

from vitlab import report
from vitlab.report.formats import FORMATS, Format

ROOT = Path(__file__).parents[1]

FIRST_LINES = (
    300  #: bound on the code of a first reading: with the page, an hour in which strangers read seven lines a minute
)
NOUNS = {
    "plan_study",
    "_planned_and_pending_trials",
    "ResolvedTrial.to_seeded_trial",
    "Job",
    "Training.train_step",
    "Attempt.end_with_outcome",
}
NOUNS |= {
    "decide_verdicts",
    "collect_report",
}  #: a first reading passes study, plan, trial, job, training, result, verdict, report
STOP = re.compile(r"(?m)^(?:(\d+)\.|- (\d+)([a-z])) `([\w/.]+)`:((?:,?\s+`[\w.]+`\s+\(\d+\))+)")

DIGITS = {
    "study": "shape",
    "base": {
        "data": {"type": "digits", "fraction": 0.2},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 2, "batch_size": 16},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": "none"},
}

RUN = """
import inspect, json, sys
import vitlab
from vitlab.engines.base import Engine

paths, step = [], Engine.train_step

def train_step(engine):
    names, frame = ["train_step"], sys._getframe(1)
    while frame.f_code is not inspect.unwrap(vitlab.run).__code__:
        if "/vitlab/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    paths.append([*names, "run"][::-1])
    step(engine)

Engine.train_step = train_step
vitlab.run("shape.yaml", out="out")
print(json.dumps([paths[0], [name for name in sys.modules if name.partition(".")[0] == "vitlab"]]))
"""


def test_few_frames_lead_to_a_training_step_and_a_study_loads_few_modules(tmp_path: Path) -> None:
    """Ten functions at most, no two of one name among those called run or train."""
    (tmp_path / "shape.yaml").write_text(yaml.safe_dump(DIGITS))
    done = warm.python(RUN, tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    frames, modules = json.loads(done.stdout.splitlines()[-1])
    print(f"\nframes from lab.run to train_step: {len(frames)}: {' > '.join(frames)}")
    print(f"modules loaded by a study of digits: {len(modules)}")
    assert len(frames) <= 10 and frames.count("run") == frames.count("train") == 1, frames
    assert len(modules) <= 170, sorted(modules)


def test_package_does_not_grow() -> None:
    """Count Python's own tokens: a docstring is one; comments, new lines and indents are none, so dense lines hide nothing.

    Whoever adds a feature looks first what can go. A higher bound needs a reason in docs/pages/log.md.
    """
    none = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    files = sorted((ROOT / "vitlab").rglob("*.py"))
    texts = [file.read_text() for file in files]
    lines = sum(text.count("\n") for text in texts)
    comments = tokens = 0
    for text in texts:
        kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(text).readline)]
        comments += kinds.count(tokenize.COMMENT)
        tokens += sum(kind not in none for kind in kinds)
    names = len(re.findall(r"\bimport_module\(", "".join(texts)))
    untyped = len(re.findall(r"(?:Mapping|dict)\[str, Any\]", "".join(texts)))
    print(
        f"\ntokens: {tokens:,}; lines: {lines:,}, of them comments {100 * comments / lines:.1f} %; modules: {len(files)}"
    )
    print(f"imports by a name in a string: {names}; [str, Any] mappings: {untyped}")
    assert tokens <= 381_390 and len(files) <= 265 and names <= 5 and untyped <= 150


def test_few_modules_stand_beside_the_packages() -> None:
    modules = sorted(file.name for file in (ROOT / "vitlab").glob("*.py") if not file.name.startswith("_"))
    print(f"\nroot modules: {len(modules)}: {', '.join(modules)}")
    assert len(modules) <= 7, modules


def test_path_of_a_run_is_true_and_short() -> None:
    """Every stop has about the stated lines, without docstrings, and is named by the code of an earlier one.

    Stops of the second reading, such as 3a and 3b, come between stops 3 and 4 of the first one.
    """
    page = (ROOT / "docs" / "pages" / "architecture.md").read_text()
    (stated,) = re.findall(r"first reading has (\d+) lines,[^.]*the\s+second one ([\d,]+) in all", page)
    stops = [
        (int(first or number), letter, file, functions) for first, number, letter, file, functions in STOP.findall(page)
    ]
    headings = [page.index("### First reading"), page.index("### Second reading"), page.index("### Where to add")]
    listed = [[bool(stop[2]) for stop in STOP.findall(page[a:b])] for a, b in itertools.pairwise(headings)]
    assert not any(listed[0]) and all(listed[1]) and sum(map(len, listed)) == len(stops)
    numbers = [number for number, letter, *_ in stops if not letter]
    assert numbers == [*range(2, 2 + len(numbers))], numbers  # the first one is the study file
    labels = [f"{number}{letter}" for number, letter, *_ in stops if letter]
    assert {*re.findall(r"\b(\d+[a-z])\b", page[headings[0] : headings[1]])} <= {*labels}
    first, total, read_first = 0, 0, []
    names_so_far = {"run"}
    for _, later, file, functions in sorted(stops, key=lambda stop: stop[:2]):
        tree = ast.parse((ROOT / "vitlab" / file).read_text())
        for path, lines in re.findall(r"`([\w.]+)`\s+\((\d+)\)", functions):
            node = find_definition(tree, path)
            count = count_code_lines(node)
            assert path.rpartition(".")[2] in names_so_far, f"nothing before {file}: {path} leads there"
            assert abs(count - int(lines)) <= 5, (file, path, count)
            total += count
            first += 0 if later else count
            read_first += [] if later else [path]
            names_so_far |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            names_so_far |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    print(f"\nlines of the path of a run: {first:,} at first, {total:,} in all")
    assert 250 < first <= FIRST_LINES
    assert {*read_first} >= NOUNS and len(read_first) <= 24, read_first
    for lines, text in zip((first, total), stated, strict=True):
        assert abs(lines - int(text.replace(",", ""))) <= 40, (first, total)


def find_definition(tree: ast.Module, path: str) -> ast.AST:
    """Return the function or class of a dotted name in a module."""
    node: Any = tree
    for name in path.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == name)
    return node


def count_code_lines(node: Any) -> int:
    """Return the lines of a definition with its decorators, without the docstrings in it."""
    first = min(each.lineno for each in (node, *node.decorator_list))
    documented = [each for each in ast.walk(node) if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    texts = [each.body[0] for each in documented if ast.get_docstring(each) is not None]
    return node.end_lineno - first + 1 - sum(text.end_lineno - text.lineno + 1 for text in texts)


def test_format_is_an_entry_of_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None) -> None:
    monkeypatch.setitem(FORMATS, "title", Format(lambda content: content.title, "title.txt"))
    plan, store = study(tmp_path)
    assert report.render(plan, store, "title") == plan.question
    files = report.write(report.collect_report(plan, store), tmp_path / "report")
    assert (tmp_path / "report" / "title.txt") in files
    print("\nfiles to add a format: 1, by its entry in FORMATS")
