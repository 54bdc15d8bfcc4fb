"""Output formats of a check: text for terminals, Markdown, JSON and JUnit."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar
from xml.etree import ElementTree

from vitlab.errors import format_count
from vitlab.regression.decide import MAX_SEEDS, TARGET_CHANCE, Cell
from vitlab.regression.gate import CheckResult, Outlook
from vitlab.report import Report, formats
from vitlab.report.phrasing import Column, Columns, Scale, percent

RowT = TypeVar("RowT", Cell, Outlook)


def render_check(result: CheckResult, form: str) -> str:
    """Return the verdict, what differs and a table of cells as Markdown (``md``), or fitted to the terminal."""
    verdicts = [*(finding.verdict for finding in result.findings), *(cell.verdict for cell in result.cells)]
    lines = [f"{verdicts.count('pass')} of {len(verdicts)} checks pass."] if verdicts else []
    lines += [
        f"{cell.verdict}: {cell.arm}: {_cell_sentence(cell, result.units)}"
        for cell in result.cells
        if cell.verdict != "pass"
    ]
    for item in result.findings:
        if item.verdict != "pass" or item.sentence:
            lines.append(f"{item.verdict}: {f'{item.arm}: ' if item.arm else ''}{item.check}: {item.sentence}")
    column = Columns([_in_unit(cell, Scale.of(cell.metric, result.units)) for cell in result.cells])
    table = [
        *map(column.text_column, ("arm", "metric")),
        column("verdict", lambda cell: "identical" if cell.test == "identical" else cell.verdict, right=False),
        _number(column, "baseline", "old", rank=2),
        _number(column, "candidate", "new", rank=2),
        _number(column, "drop", "drop"),
        _number(column, "at most", "worst"),
        _number(column, "margin", "margin"),
        _number(column, "p (adjusted)", "p_adjusted", rank=1),
        column("seeds", lambda cell: str(cell.n), rank=3),
    ]
    return _render(
        form,
        f"{result.study}: {result.verdict}",
        lines,
        table,
        [f"{note[:1].upper()}{note[1:]}." for note in result.notes],
    )


def render_outlook(cells: Sequence[Outlook], units: Mapping[str, str], form: str) -> str:
    """Return a table of the probabilities that an unchanged model passes, and of the drops that are found."""
    column = Columns([_in_unit(cell, Scale.of(cell.metric, units)) for cell in cells])
    table = [
        *map(column.text_column, ("arm", "metric")),
        column("seeds", lambda cell: str(cell.n)),
        _number(column, "sd", "sd", rank=2),
        _number(column, "margin", "margin", rank=1),
        column("passes", lambda cell: f"{100 * cell.chance:.0f} %"),
        column("seeds for 80 %", lambda cell: str(cell.needs or f"over {MAX_SEEDS}")),
        _number(column, "finds drop", "drop"),
    ]
    chance = math.prod(cell.chance for cell in cells)
    notes = [
        "A model that computes equal bits passes. "
        f"A model that differs by rounding alone passes with probability {100 * chance:.0f} %, "
        "or more if its cells are correlated.",
        f"A drop of this size is found with probability {percent(TARGET_CHANCE)}, by the spread of the baseline. "
        "More seeds do not find drops below the margin, which pass.",
    ]
    if chance < TARGET_CHANCE:
        notes.append(
            f"Warning: unchanged models pass at less than {percent(TARGET_CHANCE)}; "
            "more seeds, or a wider margin (check.margin_sd), raise it."
        )
    return _render(form, "How likely an unchanged model passes, and which drop is found", [], table, notes)


def _render(form: str, title: str, lines: Sequence[str], table: Sequence[Column], notes: Sequence[str]) -> str:
    rows = formats.markdown_table(table) if table[0].cells else []
    if form == "terminal":
        return formats.to_text(title, *lines, *([table] if rows else []), *notes)
    above, below = ([f"- {formats.escape_markdown(line)}" for line in part] for part in (lines, notes))
    return "\n".join([f"## {title}", "", *above, "", *rows, "", *below, ""])


def render_json(result: CheckResult, report: Report | None = None) -> str:
    """Return the whole result, and a report beside it, as JSON; numbers that are not finite are null."""
    document = asdict(result) | ({} if report is None else {"report": report.to_json()})
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda _: None), indent=1)


def render_junit(result: CheckResult) -> str:
    """Return JUnit XML: a test case for each check of an arm and each cell; inconclusive ones are skipped."""
    cases = [(item.arm or "plan", item.check, item.verdict, item.sentence, item.seconds) for item in result.findings]
    cases += [
        (cell.arm, cell.metric, cell.verdict, _cell_sentence(cell, result.units), cell.seconds) for cell in result.cells
    ]
    suite = ElementTree.Element("testsuite", name=f"vitlab check {result.study}", errors="0")
    children = {"regressed": "failure", "differs": "failure", "inconclusive": "skipped"}
    for arm, name, verdict, sentence, seconds in cases:
        case = ElementTree.SubElement(
            suite, "testcase", classname=formats.replace_controls(arm), name=formats.replace_controls(name)
        )
        if math.isfinite(seconds):
            case.set("time", f"{seconds:.3f}")
        if verdict in children:
            ElementTree.SubElement(case, children[verdict], message=formats.replace_controls(sentence))
    for name, element in {"tests": "testcase", "failures": "failure", "skipped": "skipped"}.items():
        suite.set(name, str(sum(1 for _ in suite.iter(element))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _in_unit(row: RowT, scale: Scale) -> RowT:
    """Return a row with the label of its metric, and its numbers in the unit of the metric."""
    numbers = vars(row).keys() & {"old", "new", "drop", "worst", "margin", "sd"}
    return replace(row, metric=scale.title, **{name: scale.factor * getattr(row, name) for name in numbers})


def _number(column: Columns[Any], title: str, name: str, rank: int = 0) -> Column:
    return column(title, lambda row: _format_number(getattr(row, name)), rank)


def _cell_sentence(cell: Cell, units: Mapping[str, str]) -> str:
    """Return the drop of a cell with its interval, and the reason of its verdict."""
    if not math.isfinite(cell.drop):
        return cell.reason
    scale = Scale.of(cell.metric, units)
    cell = _in_unit(cell, scale)
    old, new, drop, low, high = map(
        _format_number, (cell.old, cell.new, cell.drop, 2 * cell.drop - cell.worst, cell.worst)
    )
    interval = f" ({percent(1 - 2 * cell.alpha)} interval {low} to {high})" if cell.test == "paired t" else ""
    drop = f"{drop} {scale.points}".rstrip()
    return (
        f"{cell.metric}: {old} -> {new} over {format_count(cell.n, 'seed')}, worse by {drop}{interval}; {cell.reason}"
    )


def _format_number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ""
