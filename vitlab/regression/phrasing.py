"""Output formats of a check: Markdown, JSON and JUnit."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree

from vitlab.regression.decide import MAX_SEEDS, Cell
from vitlab.regression.gate import TARGET_CHANCE, CheckResult, Outlook
from vitlab.report import Report, formats


def render_markdown(result: CheckResult) -> str:
    """Return the verdict, the differences and a table of cells as Markdown."""
    lines = [f"## {result.study}: {result.verdict}", ""]
    verdicts = [*(finding.verdict for finding in result.findings), *(cell.verdict for cell in result.cells)]
    if verdicts:
        lines += [f"{verdicts.count('pass')} of {len(verdicts)} checks pass.", ""]
    lines += [f"**Warning:** {formats.escape_markdown(warning)}.\n" for warning in result.warnings]
    listed = [finding for finding in result.findings if finding.verdict != "pass" or finding.sentence]
    for item in listed:
        prefix = f"{item.arm}: " if item.arm else ""
        lines.append(f"- **{item.verdict}** {formats.escape_markdown(f'{prefix}{item.check}: {item.sentence}')}")
    lines += [""] * bool(listed)
    if result.cells:
        lines += [
            "| arm | metric | verdict | baseline | candidate | drop | at most | margin | p (adjusted) | seeds | why |",
            "|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
            *(_cell_row(cell) for cell in result.cells),
            "",
        ]
    lines += [f"- {formats.escape_markdown(note)}." for note in result.notes]
    return "\n".join(lines).rstrip() + "\n"


def render_json(result: CheckResult, report: Report | None = None) -> str:
    """Return the whole result, and a report beside it, as JSON; numbers that are not finite are null."""
    document = asdict(result) | ({} if report is None else {"report": report.to_json()})
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda _: None), indent=1)


def render_junit(result: CheckResult) -> str:
    """Return JUnit XML: a test case for each check of an arm and each cell; inconclusive ones are skipped."""
    cases = [(item.arm or "plan", item.check, item.verdict, item.sentence, item.seconds) for item in result.findings]
    cases += [(cell.arm, cell.metric, cell.verdict, _cell_sentence(cell), cell.seconds) for cell in result.cells]
    suite = ElementTree.Element("testsuite", name=f"vitlab check {result.study}", errors="0")
    children = {"regressed": "failure", "inconclusive": "skipped"}
    for arm, name, verdict, sentence, seconds in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=_replace_controls(arm), name=_replace_controls(name))
        if math.isfinite(seconds):
            case.set("time", f"{seconds:.3f}")
        if verdict in children:
            ElementTree.SubElement(case, children[verdict], message=_replace_controls(sentence))
    for name, element in {"tests": "testcase", "failures": "failure", "skipped": "skipped"}.items():
        suite.set(name, str(sum(1 for _ in suite.iter(element))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def outlook_table(cells: Sequence[Outlook]) -> str:
    """Return a table of the probabilities that an unchanged model passes, with a warning if they are low."""
    lines = [
        "| arm | metric | seeds | sd | margin | passes | seeds for 80 % |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for cell in cells:
        needs = f"over {MAX_SEEDS}" if cell.needs is None else str(cell.needs)
        numbers = (_format_number(cell.sd), _format_number(cell.margin), f"{100 * cell.chance:.0f} %", needs)
        lines.append(f"| {formats.escape_markdown(cell.arm)} | {cell.metric} | {cell.n} | {' | '.join(numbers)} |")
    chance = math.prod(cell.chance for cell in cells)
    lines += [
        "",
        "A model that computes equal bits passes. "
        f"A model that differs by rounding alone passes with probability {100 * chance:.0f} %, "
        "or more if its cells are correlated.",
    ]
    if chance < TARGET_CHANCE:
        lines.append(
            f"Warning: that is below {100 * TARGET_CHANCE:.0f} %; "
            "more seeds, or a wider margin (check.margin_sd), raise it."
        )
    return "\n".join(lines) + "\n"


def _cell_row(cell: Cell) -> str:
    numbers = (cell.old, cell.new, cell.drop, cell.worst, cell.margin, cell.p_adjusted)
    columns = [cell.arm, cell.metric, cell.verdict, *map(_format_number, numbers), str(cell.n), cell.reason]
    return f"| {' | '.join(map(formats.escape_markdown, columns))} |"


def _cell_sentence(cell: Cell) -> str:
    if not math.isfinite(cell.drop):
        return cell.reason
    return f"{_format_number(cell.old)} -> {_format_number(cell.new)} over {cell.n} seeds; {cell.reason}"


def _format_number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ""


def _replace_controls(text: str) -> str:
    """Replace the characters that XML cannot represent."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\N{REPLACEMENT CHARACTER}", text)
