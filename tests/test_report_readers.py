"""Tests of report formats by independent readers: names are harmless, and numbers are complete."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import html5lib
import numpy as np
import pandas as pd
import pytest
import synthetic_studies
from markdown_it import MarkdownIt

from vitlab import report
from vitlab.planning.values import Plan
from vitlab.report import frame
from vitlab.store.folders import Store

NAMES = (
    "=HYPERLINK(1)", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "</script><svg onload=alert(1)>", "a|b`c`*d*[e](f)",
    r"\input{/etc/passwd} & 5% $x_1$ #2 ~ ^ {", "<!-- ]]>", "{{ 7 * 7 }}", 'q"u,o;t\'e', "line\nbreak\x1b[2J",
    "\N{FULLWIDTH EQUALS SIGN}1+1", "1. first", "a--b", "turned\N{RIGHT-TO-LEFT OVERRIDE}round",
)  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Store]:
    random = np.random.default_rng(0)
    arms = {
        "baseline": synthetic_studies.BASE[:3],
        **{name: (0.9 + 0.01 * random.normal(size=3)).tolist() for name in NAMES},
    }
    plan, store = synthetic_studies.study(tmp_path_factory.mktemp("hostile"), arms, question=NAMES[4], notes=NAMES)
    return dataclasses.replace(plan, arms=tuple(dataclasses.replace(arm, values={}) for arm in plan.arms)), store


@pytest.fixture(scope="module")
def text(hostile: tuple[Plan, Store]) -> str:
    """Return the page, rendered once."""
    return str(synthetic_studies.text_of(*hostile, "html"))


class Rows(HTMLParser):
    """Parser of the tables of a page, their headers, and the landmarks for screen readers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.cell: list[str] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self.cell is not None:
            self.rows[-1].append("".join(self.cell))
            self.cell = None

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def as_text(name: str) -> str:
    """Return a name as shown in running text: on one line, without control characters."""
    return " ".join(name.replace("\x1b", " ").replace("\N{RIGHT-TO-LEFT OVERRIDE}", " ").split())


def mean_and_sd(values: list[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"


def in_a_page(name: str) -> str:
    return name.replace("\x1b", "\ufffd").replace("\N{RIGHT-TO-LEFT OVERRIDE}", "\ufffd")


@pytest.mark.slow
def test_page_escapes_names(text: str) -> None:
    page = Rows(text)
    assert not {"script", "iframe", "object", "img", "link", "form"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert {row[0] for row in page.rows} >= {"baseline", *map(in_a_page, NAMES)}


def test_page_is_valid_html(text: str) -> None:
    strict = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    tree = strict.parse(text)
    first = tree.find(".//section[@aria-labelledby='arms']//table")
    names = [row.find("th").text for row in first.findall("tbody/tr")]
    assert names == ["baseline", *map(in_a_page, NAMES)]
    reached = [row.findall("td")[1].text for row in first.findall("tbody/tr")]
    assert reached[0].replace("\N{NO-BREAK SPACE}", " ") == mean_and_sd(synthetic_studies.BASE[:3])
    with pytest.raises(html5lib.html5parser.ParseError):
        html5lib.HTMLParser(strict=True).parse("<!doctype html><p><b>never closed</p>")


def test_direction_marks_in_names_are_removed(hostile: tuple[Plan, Store], text: str) -> None:
    for output in (text, *(synthetic_studies.text_of(*hostile, form) for form in ("terminal", "md", "latex"))):
        assert not re.search("[\u202a-\u202e\u2066-\u2069]", output)


def test_page_is_accessible_by_keyboard_and_screen_reader(text: str) -> None:
    page = Rows(text)
    assert [len(page.all(tag)) for tag in ("main", "header", "h1")] == [1, 1, 1] and page.all("html") == [
        {"lang": "en"}
    ]
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table")) >= 3
    assert all(len(attributes["aria-label"] or "") > 40 for attributes in page.all("svg") if "role" in attributes)
    wide = [attributes for attributes in page.all("div") if attributes.get("class") == "wide"]
    assert all(one["tabindex"] == "0" and one["role"] == "region" and one["aria-label"] for one in wide)
    identifiers = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    for _, attributes in page.tags:
        assert str(attributes.get("href", "#answer")).removeprefix("#") in identifiers
        assert attributes.get("aria-labelledby", "answer") in identifiers
    assert page.tags.index(("a", {"class": "skip", "href": "#answer"})) < page.tags.index(("header", {}))
    for at in ("@media print", "prefers-color-scheme: dark", ":focus-visible"):
        assert at in text


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_contrast_suffices_in_light_and_dark_mode(text: str) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 to 1."""
    blocks = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        for name in ("ink", "grey", "better", "worse", "warn"):
            dark, light = sorted(_luminance(colours[side]) for side in (name, "paper"))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, name


def test_markdown_has_names_and_numbers(hostile: tuple[Plan, Store]) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(synthetic_studies.text_of(*hostile, "md"))
    rows: list[list[str]] = []
    for index, token in enumerate(tokens):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("th_open", "td_open"):
            inside = tokens[index + 1].children or []
            assert {child.type for child in inside} <= {"text", "text_special"}
            rows[-1].append("".join(child.content for child in inside))
    assert not any(token.type == "html_block" for token in tokens)
    assert {row[0] for row in rows} >= {"baseline", *(as_text(name) for name in NAMES)}
    first = rows[1 : 2 + len(NAMES)]
    assert first[0][2] == mean_and_sd(synthetic_studies.BASE[:3])


def _tex_tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a LaTeX file as TeX would set them; fail at unexpected commands and characters."""
    allowed = {
        "textbackslash": "\\",
        "textasciitilde": "~",
        "textasciicircum": "^",
        "textless": "<",
        "textgreater": ">",
        "textbar": "|",
    }
    lines = [line for line in text.split("\n") if not line.startswith("%")]
    assert all(line.isprintable() for line in text.split("\n"))
    tables = []
    for body in re.findall(r"\\toprule\n(.*?)\\bottomrule", "\n".join(lines), re.DOTALL):
        rows = []
        for line in body.strip().split("\n"):
            if line.strip() == r"\midrule":
                continue
            plain = re.sub(r"\\textbf\{((?:[^{}]|\{\})*)\}", r"\1", line.strip())  # the means that may be the best
            plain = re.sub(r"\\shortstack\[.\]\{([^{}]*)\}", lambda title: title[1].replace(r"\\", " "), plain)
            source, row, cell = plain.removesuffix(r" \\").replace("~", " "), [], ""
            assert line.endswith(r" \\")
            while source:
                if command := re.match(r"\\([a-zA-Z]+)\{\}", source):
                    cell, source = cell + allowed[command[1]], source[command.end() :]
                elif escaped := re.match(r"\\([&%$#_{}])", source):
                    cell, source = cell + escaped[1], source[2:]
                elif maths := re.match(r"\$(-|\^2|\\pm)\$|\{\}", source):
                    cell, source = (
                        cell + {"-": "\N{MINUS SIGN}", "^2": "2", r"\pm": "\N{PLUS-MINUS SIGN}", None: ""}[maths[1]],
                        source[maths.end() :],
                    )
                elif source.startswith(" & "):
                    row, cell, source = [*row, cell], "", source[3:]
                else:
                    assert source[0] not in "\\{}$&%#_^~", source
                    cell, source = cell + source[0], source[1:]
            rows.append([*row, cell])
        tables.append(rows)
    return tables


def test_latex_has_names_and_numbers(hostile: tuple[Plan, Store]) -> None:
    texts = (synthetic_studies.text_of(*hostile, form) for form in ("latex", "latex-all"))
    short, text = (each.replace(r"\penalty500{}", "") for each in texts)
    (rows,) = _tex_tables(short)
    assert {row[0].replace("''", '"') for row in rows} >= {"baseline", *map(as_text, NAMES)}
    assert f"{100 * np.mean(synthetic_studies.BASE[:3]):.1f} \N{PLUS-MINUS SIGN} " in rows[1][1]
    tables = _tex_tables(text)
    layouts = [
        re.sub(r"(>\{\\raggedright\\arraybackslash\})?p\{.*?\}", "l", layout)
        for layout in re.findall(r"\\begin\{tabular\}\{@\{\}(.*?)@\{\}\}\n", text)
    ]
    assert len(layouts) == len(tables) >= 2 and set("".join(layouts)) == {"l", "r"}
    for layout, rows in zip(layouts, tables, strict=True):
        assert {len(row) for row in rows} == {len(layout)}
    names = {row[0].replace("''", '"') for row in tables[0]}
    assert names >= {"baseline", *map(as_text, NAMES)}
    assert all(line.startswith("%") for line in text.split("\n") if "\\input" in line)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex here")
def test_latex_compiles(hostile: tuple[Plan, Store], tmp_path: Path) -> None:
    (tmp_path / "report.tex").write_text(
        "".join(synthetic_studies.text_of(*hostile, form) for form in ("latex", "latex-all"))
    )
    (tmp_path / "paper.tex").write_text(
        r"\documentclass{article}\usepackage{array,booktabs,graphicx}\DeclareUnicodeCharacter{FF1D}{=}"
        r"\begin{document}\input{report}\end{document}"
    )
    done = subprocess.run(
        ["pdflatex", "-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=tmp_path, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").read_bytes().startswith(b"%PDF")


def test_csv_has_no_formula_and_every_number(hostile: tuple[Plan, Store]) -> None:
    plan, store = hostile
    rows = list(csv.DictReader(io.StringIO(synthetic_studies.text_of(plan, store, "csv"))))
    assert [row["arm"].removeprefix("'") for row in rows[::3]] == ["baseline", *NAMES]
    for row in rows:
        for cell in (*row, *row.values()):
            number = re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", cell)
            assert number or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\N{FULLWIDTH EQUALS SIGN}"))
    expected = frame.results(plan, store)["val/accuracy"]
    assert [float(row["val/accuracy"]) for row in rows] == pytest.approx(expected.tolist())


def test_json_and_parquet_have_unchanged_names(hostile: tuple[Plan, Store]) -> None:
    plan, store = hostile
    doc: dict[str, Any] = json.loads(synthetic_studies.text_of(plan, store, "json"))
    assert [row["arm"] for row in doc["arms"]] == ["baseline", *NAMES]
    rendered = report.render(plan, store, "parquet")
    assert isinstance(rendered, bytes)
    assert pd.read_parquet(io.BytesIO(rendered))["arm"].unique().tolist() == ["baseline", *NAMES]


def test_terminal_output_has_no_control_sequences(hostile: tuple[Plan, Store]) -> None:
    output = synthetic_studies.text_of(*hostile, "terminal")
    assert all(line.isprintable() for line in output.splitlines())
