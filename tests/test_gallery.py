"""Tests of the gallery: its pages have the numbers of their Parquet files, and headers those of their pages."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic_studies
from scipy import stats
from test_docs import ROOT, docs_module

from vitlab.planning.packaged import packaged_studies
from vitlab.planning.study_folder import read_plan
from vitlab.planning.values import Plan
from vitlab.report import Report, phrasing
from vitlab.report.comparison import summary_rows
from vitlab.report.frame import StudyResults
from vitlab.report.phrasing import Column, Scale
from vitlab.report.sections.arms import arm_columns
from vitlab.report.sections.main_effects import factor_answers

FOLDER = ROOT / "docs" / "pages" / "gallery"
STUDIES = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())
OF_IMAGES = ("split_sd", "new_images_low", "new_images_high")
"""Columns of the table of arms that follow from predictions, which the gallery does not store."""
NUMBER = r"\d+\.\d+|\d+(?= (?:%|points|seeds))"
"""Numbers of a header that are results: fractions, and whole numbers with a unit."""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    made: dict[str, str] = docs_module("gallery").pages()
    return {path: html.unescape(text).replace("\\", "") for path, text in made.items()}


def stored(study: str) -> tuple[Plan, pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Return the plan, the final values, the curves and the report of a study."""
    folder = FOLDER / study
    plan = read_plan(folder / "plan.json")
    assert plan is not None
    frames = (pd.read_parquet(folder / f"{name}.parquet") for name in ("results", "history"))
    return plan, *frames, json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("study", STUDIES)
def test_table_of_arms_follows_from_parquet(study: str, pages: dict[str, str]) -> None:
    plan, results, _, doc = stored(study)
    rows = summary_rows(StudyResults(plan, results))
    for row, reported in zip(rows, doc["arms"], strict=True):
        for name in row.keys() - set(OF_IMAGES):
            expected = row[name]
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=1e-9, abs=1e-12)
            # A stored report may be older than a column.
            assert reported.get(name) == expected, (row["arm"], name)
    if not doc.get("blocks"):  # with blocks, the answers are those over all blocks
        scale = Scale.of(plan.analysis.metric, plan.units)
        answers = [
            *factor_answers(replace(Report.from_json(doc), arms=rows)),
            *phrasing.answer_per_arm(rows, plan.analysis, scale),
        ]
        assert doc["answers"] == [answer.sentence for answer in answers]
    page = pages[f"gallery/{study}.md"]
    for text in (plan.question, *doc["answers"], *doc["notes"]):
        assert " ".join(text.split()) in page
    for column in arm_columns(rows, plan.analysis, Scale.of(plan.analysis.metric, plan.units)):
        if column.title in ("difference", "verdict") or "interval" in column.title:
            assert all(f"| {cell} |" in page for cell in column.cells), column.title


@pytest.mark.parametrize("study", STUDIES)
def test_differences_equal_independent_statistics(study: str) -> None:
    """Means, standard deviations and paired tests by NumPy and SciPy, from the final values alone."""
    plan, results, history, doc = stored(study)
    metric = plan.analysis.metric
    done = results[results["status"] == "done"]
    values = {arm: rows.set_index("seed")[metric].astype(float) for arm, rows in done.groupby("arm")}
    for row in doc["arms"]:
        # A metric that counts is rounded to its step in the report; it is stored in single precision.
        own = values[row["arm"]]
        assert row["mean"] == pytest.approx(own.mean(), abs=1e-6) and row["n"] == len(own)
        assert row["sd"] == pytest.approx(own.std(ddof=1), abs=1e-6)
        if row["test"] == "paired t":
            pair = pd.concat([own, values[row["baseline"]]], axis=1, join="inner").to_numpy()
            difference = pair[:, 0] - pair[:, 1]
            assert row["difference"] == pytest.approx(difference.mean(), abs=1e-6)
            if difference.std() > 1e-6 and row["shared"] == 1 and row["choice_sd"] is None:
                assert row["p"] == pytest.approx(stats.ttest_1samp(difference, 0).pvalue, rel=1e-3)
    last = history[history["metric"] == metric].sort_values("step").groupby("trial")["value"].last()
    finals = done.drop_duplicates("trial").set_index("trial")[metric]
    assert np.allclose(last.reindex(finals.index), finals, atol=1e-12) and plan.analysis.at == "last"


@pytest.mark.parametrize("study", STUDIES)
def test_findings_in_header_are_on_page(study: str) -> None:
    """A number is one of the arms that its clause names, or of the literature in the same header."""
    plan, _, _, doc = stored(study)
    head = docs_module("gallery").read_header(packaged_studies()[study])
    laws = [cell for name in ("scaling", "blocks") for column in section_columns(name, doc) for cell in column.cells]
    everywhere = numbers(head["Expect"], "\n".join(doc["notes"]), *laws, *baseline_texts(plan, doc))
    texts = {row["arm"]: list(arm_texts(row["arm"], plan, doc)) for row in doc["arms"]}
    for clause in re.split(r"[.;](?:\s|$)", head["Found"]):
        named = [
            arm for arm in texts if any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", clause) for name in names(arm))
        ]
        allowed = everywhere.union(*(numbers(*texts[arm]) for arm in named or texts))
        missing = numbers(clause) - allowed
        assert not missing, f"{sorted(missing)} of {clause!r} are not those of {named or 'any arm'} on the page"


@pytest.mark.parametrize("study", [name for name in packaged_studies() if "/" not in name])
def test_finding_in_table_of_studies_is_that_of_header(study: str, pages: dict[str, str]) -> None:
    gallery = docs_module("gallery")
    head, finding = gallery.read_header(packaged_studies()[study]), gallery.finding(study)
    assert finding.startswith("not run yet: needs ") == ("Found" not in head)
    missing = numbers(finding) - numbers(head["Found"]) if "Found" in head else ()
    assert not missing
    if study in STUDIES:
        assert finding[1:] in pages[f"gallery/{study}.md"] and finding[1:] in pages["gallery/index.md"]


def test_numbers_beside_the_picture_in_readme_are_those_of_the_page() -> None:
    *_, doc = stored("quickstart")
    (alternative,) = re.findall(r"!\[The report of the quickstart\.(.*?)\]", (ROOT / "README.md").read_text())
    assert len(numbers(alternative)) == 2 and numbers(alternative) <= numbers(*doc["answers"])


def names(arm: str) -> set[str]:
    return {arm, *re.findall(r"=([^,]+)", arm)}


def arm_texts(arm: str, plan: Plan, doc: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells and the answers that concern an arm."""
    index = [row["arm"] for row in doc["arms"]].index(arm)
    yield from (
        column.cells[index]
        for column in arm_columns(doc["arms"], plan.analysis, Scale.of(plan.analysis.metric, plan.units))
    )
    yield from (answer for answer in doc["answers"] if f"{arm} is " in answer)
    for group in (section_columns("heads", doc), section_columns("tuning", doc)):
        for at, name in enumerate(group[0].cells if group else ()):
            yield from (column.cells[at] for column in group if name == arm)


def section_columns(name: str, doc: Mapping[str, Any]) -> list[Column]:
    table = Report.from_json(doc).table(name)
    return [] if table is None else [*table.columns]


def baseline_texts(plan: Plan, doc: Mapping[str, Any]) -> Iterator[str]:
    for arm in {row["baseline"] for row in doc["arms"]} - {None}:
        yield from arm_texts(arm, plan, doc)


def numbers(*texts: str) -> set[str]:
    """Return the numbers in texts, without signs; of a cell, which has no unit, every number."""
    found: set[str] = set()
    for text in texts:
        found |= set(re.findall(r"\d+(?:\.\d+)?" if len(text) < 30 else NUMBER, text))
    return found


@pytest.mark.parametrize("study", STUDIES)
def test_files_are_small_and_of_no_machine(study: str, pages: dict[str, str]) -> None:
    for file in (FOLDER / study).iterdir():
        # A plan has an entry for every trial, and a specification for every rival of a tuned arm.
        most = 500_000 if file.name == "plan.json" else 200_000
        assert file.stat().st_size <= (2 * most if study == "transfer" else most), file  # it has 48 arms
        if file.suffix in (".json", ".html"):
            assert not re.search(r"[\"= ]/(?!>)", file.read_text()), f"{file} has a path of the machine it was made on"
    figures = (FOLDER / study / "figures.html").read_text()
    assert "<script" not in figures and not re.search(r"(?:href|src)=\"(?!#)", figures)
    assert not re.search(r"(?:fill|stroke): ?#(?!ffffff)", figures), "a colour that does not follow the scheme"
    assert figures.count('class="picture"') == figures.count("<figure>") >= 1


def test_maker_writes_what_a_page_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery, file = docs_module("gallery"), tmp_path / "positions.yaml"
    file.write_text(
        "# Question   Where?\n# Expect     A loss.\n# Cost       Little.\n# Run        vitlab run positions\n"
    )
    monkeypatch.setattr(gallery, "packaged_studies", lambda: {"positions": file})
    synthetic_studies.study(tmp_path / "out", {"baseline": [0.9, 0.91, 0.93], "position=none": [0.6, 0.62, 0.63]})
    monkeypatch.setattr(gallery, "FOLDER", tmp_path / "gallery")
    monkeypatch.setattr(gallery, "finding", lambda study: "a place is worth 0.3")
    folder = gallery.store_results("positions", tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == gallery.DOWNLOADS.keys() | {"figures.html"}
    page = gallery.pages()["gallery/positions.md"]
    assert page.count("<figure>") == 2 and "vitlab run positions" in page
    assert "A loss." in page and "A place is worth 0.3." in page
    root = '{"root": "/home/me", "set": "--set data.root=/home/me"}'
    assert gallery.without_places(root) == root.replace("/home/me", "FOLDER")


def test_index_lists_every_study_once(pages: dict[str, str]) -> None:
    index = pages["gallery/index.md"]
    with_page = re.findall(r"(?m)^## \[(\w+)\]\(\1\.md\)", index)
    without = re.findall(r"(?m)^- `([\w/]+)`: .*Cost: ", index)
    assert with_page == [name for name in packaged_studies() if name in STUDIES] and "quickstart" in with_page
    assert sorted([*with_page, *without]) == sorted(packaged_studies())
    assert {f"gallery/{name}.md" for name in with_page} | {"gallery/index.md"} == pages.keys()
