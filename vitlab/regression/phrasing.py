"""Output formats of a check: text for terminals, Markdown, JSON and JUnit."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from xml.etree import ElementTree

from vitlab.errors import format_count
from vitlab.regression.decide import MAX_SEEDS, TARGET_CHANCE, VERDICTS, Cell, Finding
from vitlab.regression.gate import CellT, CheckResult, Outlook
from vitlab.report import Report, formats
from vitlab.report.phrasing import Column, Columns, Scale, percent
from vitlab.statistics.replicates import sd_interval


def render_check(result: CheckResult, form: str) -> str:
    """Return the verdict, findings, the worst ones first, and a table of cells: as text or, for ``md``, Markdown."""
    findings = _list_findings(result)
    passing = [finding.verdict for finding in findings].count("pass")
    lines = [f"{passing} of {len(findings)} checks pass."] if findings else []
    lines += [
        f"{item.verdict}: {f'{item.arm}: ' if item.arm else ''}{item.check}: {item.sentence}"
        for item in sorted(findings, key=lambda item: -VERDICTS.index(item.verdict))
        if item.verdict != "pass" or item.sentence
    ]
    column = Columns([_in_unit(cell, Scale.of(cell.metric, result.units)) for cell in result.cells])
    table = [
        *map(column.text_column, ("arm", "metric")),
        column("verdict", lambda cell: "identical" if cell.reason == "identical" else cell.verdict, right=False),
        _number(column, "baseline", "old", rank=2),
        _number(column, "candidate", "new", rank=2),
        _number(column, "worse by", "worse_by"),
        _number(column, "at most (alone)", "worst"),
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


def render_forecast(cells: Sequence[Outlook], units: Mapping[str, str], form: str) -> str:
    """Return a table of the probabilities that an unchanged model passes, and of the regressions that are found."""
    column = Columns([_in_unit(cell, Scale.of(cell.metric, units)) for cell in cells])
    table = [
        *map(column.text_column, ("arm", "metric")),
        column("seeds", lambda cell: str(cell.n)),
        _number(column, "mean", "new", rank=2),
        _number(column, "sd", "sd", rank=2),
        _number(column, "margin", "margin", rank=1),
        column("passes", lambda cell: "never" if cell.reason else f"{min(99, 100 * cell.chance):.0f} %"),
        column("seeds for 80 %", lambda cell: "none" if cell.reason else str(cell.needs or f"over {MAX_SEEDS}")),
        column("found if worse by", lambda cell: "" if cell.reason else _format_number(cell.worse_by)),
    ]
    doubts = defaultdict[str, list[str]](list)
    for cell in column.rows:
        if cell.reason:
            doubts[cell.arm].append(f"{cell.metric}: {cell.reason}")
    notes = [
        f"Warning: {arm}: {'; '.join(reasons)}, so every check of it is inconclusive. Train longer, or correct the "
        "arm, and accept it again."
        for arm, reasons in doubts.items()
    ]
    if judged := [cell for cell in cells if not cell.reason]:
        chance = math.prod(cell.chance for cell in judged)
        never = " Where that is never, even the worst possible value is found less often."
        factors = sd_interval(1.0, max(1, min(cell.n_of_sd for cell in judged) - 1))
        notes.append(
            f"{'In other rows, a' if notes else 'A'} model that computes equal bits passes. One that differs by "
            f"rounding alone passes with probability {min(99, 100 * chance):.0f} %, or more if its cells are "
            f"correlated. What is worse by the last column is found with probability {percent(TARGET_CHANCE)}."
            f"{never * any(cell.worse_by == math.inf for cell in judged)} All of this assumes the sd shown; the true "
            f"one may be {factors[0]:.2g} to {factors[1]:.2g} times as large (95 % interval)."
        )
        if chance < TARGET_CHANCE:
            seeds = ", or give every arm the largest number of seeds for 80 % in the table,"
            notes.append(
                f"Warning: unchanged models pass at less than {percent(TARGET_CHANCE)}. Widen the margin "
                f"(check.margin_sd, or check.margin){seeds * all(cell.needs for cell in judged)} and accept again."
            )
    return _render(form, "How likely an unchanged model passes, and which regression is found", [], table, notes)


def _render(form: str, title: str, lines: Sequence[str], table: Sequence[Column], notes: Sequence[str]) -> str:
    rows = formats.markdown_table(table) if table[0].cells else []
    if form == "terminal":
        return formats.parts_to_text(title, *lines, *([table] if rows else []), *notes)
    above, below = ([f"- {formats.escape_markdown(line)}" for line in part] for part in (lines, notes))
    return "\n".join([f"## {title}", "", *above, "", *rows, "", *below, ""])


def render_json(result: CheckResult, report: Report | None) -> str:
    """Return the whole result, and a report beside it, as JSON; numbers that are not finite are null."""
    document = asdict(result) | ({} if report is None else {"report": report.to_json()})
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda _: None), indent=1)


def render_junit(result: CheckResult, name: str) -> str:
    """Return JUnit XML: a test case for each check of an arm and each cell; inconclusive ones are skipped."""
    suite = ElementTree.Element("testsuite", name=name, errors="0")
    children = {"regressed": "failure", "differs": "failure", "inconclusive": "skipped"}
    for item in _list_findings(result):
        arm, name, message = map(formats.replace_controls, (item.arm or "plan", item.check, item.sentence))
        case = ElementTree.SubElement(suite, "testcase", classname=arm, name=name)
        if math.isfinite(item.seconds):
            case.set("time", f"{item.seconds:.3f}")
        if item.verdict in children:
            ElementTree.SubElement(case, children[item.verdict], message=message)
    for name, element in {"tests": "testcase", "failures": "failure", "skipped": "skipped"}.items():
        suite.set(name, str(sum(1 for _ in suite.iter(element))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _list_findings(result: CheckResult) -> list[Finding]:
    """Return the cells as findings, which have a sentence unless they pass, and the other findings."""
    cells = [
        Finding(
            cell.arm,
            Scale.of(cell.metric, result.units).title,
            cell.verdict,
            "" if cell.verdict == "pass" else _cell_sentence(cell, result.units),
            cell.seconds,
        )
        for cell in result.cells
    ]
    return [*cells, *result.findings]


def _in_unit(row: CellT, scale: Scale) -> CellT:
    """Return a row with the label of its metric, and its numbers in the unit of the metric."""
    numbers = vars(row).keys() & {"old", "new", "worse_by", "worst", "margin", "sd"}
    return replace(row, metric=scale.title, **{name: scale.factor * getattr(row, name) for name in numbers})


def _number(column: Columns[Any], title: str, name: str, rank: int = 0) -> Column:
    return column(title, lambda row: _format_number(getattr(row, name)), rank)


def _cell_sentence(cell: Cell, units: Mapping[str, str]) -> str:
    """Return by how much a cell is worse, with the interval, and the reason of its verdict."""
    if not math.isfinite(cell.worse_by):
        return cell.reason
    scale = Scale.of(cell.metric, units)
    cell = _in_unit(cell, scale)
    old, new, worse_by, low, high = map(
        _format_number, (cell.old, cell.new, cell.worse_by, 2 * cell.worse_by - cell.worst, cell.worst)
    )
    interval = f" ({percent(1 - 2 * cell.alpha)} interval {low} to {high})" if cell.test == "paired t" else ""
    worse_by = f"{worse_by} {scale.points}".rstrip()
    return f"{old} -> {new} over {format_count(cell.n, 'seed')}, worse by {worse_by}{interval}; {cell.reason}"


def _format_number(value: float) -> str:
    return "" if math.isnan(value) else "never" if value == math.inf else f"{value:.4g}"
