"""Tests of the contract of report sections, with a section of a plugin file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic_studies
from click.testing import CliRunner

from vitlab import registry, report
from vitlab.cli import cli
from vitlab.errors import VitlabError
from vitlab.planning.study_folder import write_registered_plan
from vitlab.report.sections import Section, section
from vitlab.testing import check_component

PLUGIN = """
from dataclasses import dataclass

from vitlab.plugin import Column, Section, Table, section


@dataclass(frozen=True)
class Best:
    arm: str
    value: float


@section.register("best_seeds")
class BestSeeds(Section[Best]):
    '''The best seed of each arm.'''

    heading = "Best seeds"
    row = Best

    def rows(self, findings):
        return [Best(arm, max(values.values())) for arm, values in findings.results.values.items() if values]

    def notes(self, rows, findings):
        return ["The best of several seeds is optimistic."]

    def table(self, rows, report):
        columns = [
            Column("arm", tuple(row.arm for row in rows), right=False),
            Column("best", tuple(f"{100 * row.value:.1f}" for row in rows)),
        ]
        return Table(columns, "The best seed of each arm, in percent.") if rows else None
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "best.py"
    file.write_text(PLUGIN)
    return file


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_plugin_file_adds_section_to_every_format(tmp_path: Path, plugin: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path / "out")
    write_registered_plan(plan, store)
    folder = store.study(plan.study) / "report"
    report.write(report.collect_report(plan, store), folder)
    stored = report.read_report_if_current(plan, store, "json")
    assert stored is not None and "best_seeds" not in json.loads(stored)

    words = ["report", plan.study, "--out", str(store.root), "--plugin", str(plugin)]
    shown = {form: CliRunner().invoke(cli, [*words, "--format", form]) for form in report.FORMATS}
    assert all(result.exit_code == 0 for result in shown.values())
    print(f"\nfiles to add a section: 1, {plugin.name}")
    assert report.read_report_if_current(plan, store, "json") is None, "the stored report lacks a section"
    best = f"{100 * max(synthetic_studies.BASE):.1f}"
    [first, *_] = json.loads(shown["json"].output)["best_seeds"]
    assert first == {"arm": "baseline", "value": max(synthetic_studies.BASE)}
    assert "## Best seeds\n\nThe best seed of each arm, in percent." in shown["md"].output
    assert f"| baseline | {best} |" in shown["md"].output and best in shown["terminal"].output
    assert '<h2 id="best_seeds">Best seeds</h2>' in shown["html"].output and "Best seeds" in shown["latex-all"].output
    assert "The best of several seeds is optimistic." in shown["md"].output
    check_component("section", "best_seeds")

    report.write(report.collect_report(plan, store), folder)
    stored = report.read_report_if_current(plan, store, "json")
    assert stored is not None and json.loads(stored)["best_seeds"][0] == first
    plugin.write_text(PLUGIN.replace("optimistic", "the largest"))
    registry.load_file(plugin)
    assert report.read_report_if_current(plan, store, "json") is None, "the section has been edited"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"best", tuple(', '"best", ("1",) + tuple('), "columns with results have .* cells; give each one per row"),
        (('"The best seed of each arm, in percent."', '""'), "a table needs a caption"),
        (("Best(arm, max(values.values()))", "Best(arm, values)"), "rows with results change when JSON is read again"),
    ],
)
def test_broken_section_fails_contract_test(change: tuple[str, str], sentence: str, plugin: Path) -> None:
    text = plugin.read_text().replace(*change).replace('f"{100 * row.value:.1f}"', "str(row.value)")
    assert text != PLUGIN
    plugin.write_text(text)
    registry.load_file(plugin)
    with pytest.raises(AssertionError, match=sentence):
        check_component("section", "best_seeds")


def test_section_with_only_a_heading_fails_contract_test(plugin: Path) -> None:
    plugin.write_text(PLUGIN.partition("    row = Best")[0])
    registry.load_file(plugin)
    with pytest.raises(
        AssertionError, match="shows nothing but its heading; define rows, notes, table, figure or images"
    ):
        check_component("section", "best_seeds")


def test_section_named_as_a_value_of_the_report_fails_contract_test(plugin: Path) -> None:
    plugin.write_text(plugin.read_text().replace('section.register("best_seeds")', 'section.register("notes")'))
    registry.load_file(plugin)
    with pytest.raises(AssertionError, match="every report stores its own notes under this name; rename the section"):
        check_component("section", "notes")


def test_figure_with_other_arguments_is_refused() -> None:
    class Wide(Section[Any]):
        """A figure of a given width."""

        def figure(self, rows: Any, findings: Any, width: float) -> None:  # type: ignore[override]
            """Draw."""

    with pytest.raises(VitlabError, match=r"figure\(self, rows, findings, width\); its arguments are self, rows and"):
        section.register("wide")(Wide)
