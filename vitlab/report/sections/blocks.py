"""Blocks: every arm over all blocks of a study, such as data sets, beside its verdicts in single blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from vitlab.comparison import Verdict
from vitlab.comparison.arrays import VERDICTS, Comparisons
from vitlab.comparison.blocks import judge_blocks
from vitlab.errors import format_count
from vitlab.explaining.colours import PAPER, RULE
from vitlab.planning.registration import family_over_blocks_and_incomplete_arms
from vitlab.planning.values import Arm, Plan
from vitlab.report.drawing import NARROW, Drawing, apply_style, describe_shared_name_parts, empty_figure, wrapped_labels
from vitlab.report.phrasing import (
    Answer,
    Columns,
    Row,
    Scale,
    begin_sentence,
    describe_above_or_below,
    describe_interval_and_p,
    difference_columns,
    difference_decimals,
    interval_name,
    list_hedges,
    percent,
)
from vitlab.report.sections import Findings, Section, Table, finite_or_none, section
from vitlab.report.sections.arms import Mark, describe_dots, difference_mark, draw_differences, draw_seeds
from vitlab.spec import Analysis
from vitlab.statistics.replicates import NAN

if TYPE_CHECKING:
    from vitlab.report.report import Report


DECIDED = Verdict.BETTER, Verdict.WORSE, Verdict.EQUIVALENT


@dataclass(frozen=True)
class ArmOverBlocks:
    """An arm and its baseline over all blocks; numbers are None where there are too few blocks."""

    arm: str  #: the arm, without its block
    baseline: str  #: the arm that it is compared with
    differences: Mapping[str, float | None]  #: the difference in each block, such as ``digits``
    ahead: int  #: blocks in which the arm has the better mean
    behind: int  #: blocks in which the baseline has
    verdict: str  #: as in the table of arms, over all blocks
    remark: str  #: why it is refused or not decided, or why the verdict is not final; may be empty
    family: int  #: arms that are corrected together
    pairs: int  #: blocks that have a difference
    difference: float | None  #: mean difference over blocks; with ``over_blocks: relative`` over the baseline's error
    low: float | None  #: its interval, which holds for the whole family at once
    high: float | None  #: its upper end
    new_low: float | None  #: prediction interval of the difference in a new block, by as many seeds
    new_high: float | None  #: its upper end
    p: float | None  #: two-sided p of this arm alone
    p_corrected: float | None  #: the same, corrected for the family
    alone: Mapping[str, int] = field(default_factory=dict)  #: decided verdicts of single blocks, to their number


@section.register("blocks")
class Blocks(Section[ArmOverBlocks]):
    """Every arm over all blocks."""

    heading = "Over blocks"
    place = -10
    row = ArmOverBlocks
    of_seeds = True
    of_table = True

    def rows(self, findings: Findings) -> list[ArmOverBlocks]:
        return compare_over_blocks(findings.plan, findings.arms)

    def notes(self, rows: Sequence[ArmOverBlocks], findings: Findings) -> Iterator[str]:
        for row in rows:
            missing = [block for block, value in row.differences.items() if value is None]
            if missing and row.verdict != Verdict.REFUSED:
                yield (
                    f"Warning: {row.arm} has no difference from {row.baseline} in {', '.join(missing)}, and is judged "
                    f"over the {format_count(row.pairs, 'other block')}."
                )
        if fewer := family_over_blocks_and_incomplete_arms(findings.plan)[1]:
            yield (
                "Exploratory: a block was dropped after the first run, and still had to be judged with the others for "
                f"{', '.join(sorted(fewer))}."
            )
        if rows:
            single = sum(arm.baseline is not None and not arm.is_control for arm in findings.plan.arms)
            yield (
                "There are two families: verdicts over blocks are corrected for "
                f"{format_count(rows[0].family, 'arm')}, verdicts in single blocks for "
                f"{format_count(single, 'comparison')}. Over blocks, a block counts as one observation, and every "
                "block has the same weight: intervals are about blocks such as these."
            )

    def table(self, rows: Sequence[ArmOverBlocks], report: Report) -> Table:
        analysis, column = report.analysis, Columns(rows)
        scale = block_scale(analysis, report.scale)
        decimals = difference_decimals(rows, scale)
        *differences, p = difference_columns(rows, report.arms, analysis, scale, "difference")
        columns = [
            column.text_column("arm"),
            column("blocks", lambda row: str(row.pairs), rank=3),
            column("ahead / behind", lambda row: f"{row.ahead} / {row.behind}", rank=2),
            *differences,
            column(
                f"in a new block ({percent(1 - analysis.alpha)})",
                lambda row: scale.interval(row.new_low, row.new_high, decimals),
                rank=2,
            ),
            p,
            column.text_column("verdict"),
        ]
        what = "Mean difference from the baseline over blocks"
        if analysis.over_blocks == "relative":
            error = analysis.metric if analysis.goal == "min" else f"largest value less {analysis.metric}"
            what += f", in each block divided by the baseline's error ({error})"
        return Table(
            columns,
            f"{what}. A difference in a new block, measured by as many seeds, lies in the prediction interval, "
            "which is of each arm by itself.",
        )

    def figure(self, rows: Sequence[ArmOverBlocks], findings: Findings) -> Drawing:
        plan, labels = findings.plan, wrapped_labels([row.arm for row in rows], 24)
        scale, marks = block_scale(plan.analysis, findings.scale), list[Mark]()
        with apply_style():
            figure = empty_figure(NARROW, 0.95 + 0.45 * len(rows))
            axes = figure.subplots()
            for place, row in enumerate(rows):
                draw_seeds(
                    axes, place, [scale.factor * value for value in row.differences.values() if value is not None]
                )
                if row.difference is not None:
                    marks.append(Mark(place, row.difference, row.new_low, row.new_high, RULE, PAPER))
                    marks.append(difference_mark(place, row.difference, row.low, row.high, row.verdict))
            draw_differences(axes, [*labels.values()], marks, scale, f"difference from {rows[0].baseline}")
        caption = (
            "The difference in each block (small), the mean with its "
            f"{interval_name(rows[0].family, plan.analysis)}, and where a new block lies (pale); "
            f"{describe_dots(map(vars, rows))}."
        )
        return Drawing(figure, caption + describe_shared_name_parts(labels))


def block_answers(report: Report) -> list[Answer]:
    """Return one answer per arm."""
    rows, scale = report.sections.get("blocks", ()), block_scale(report.analysis, report.scale)
    decimals = difference_decimals(rows, scale)
    return [Answer(_over_blocks_sentence(row, report.analysis, scale, decimals), row.verdict) for row in rows]


def _over_blocks_sentence(row: ArmOverBlocks, analysis: Analysis, scale: Scale, decimals: int) -> str:
    prefix = begin_sentence(row.verdict, row.remark)
    prefix += f"{'over' if prefix else 'Over'} {format_count(row.pairs, 'block')}, {row.arm}"
    if row.difference is None:
        return f"{prefix} has no difference from {row.baseline}."
    sentence = f"{prefix} is {describe_above_or_below(row.difference, scale, decimals)} {row.baseline}"
    if analysis.goal == "min" and row.verdict in (Verdict.BETTER, Verdict.WORSE):
        sentence += f", which is {row.verdict}"
    if row.verdict == Verdict.EQUIVALENT and analysis.margin is not None:
        sentence += f", shown to be equivalent within {scale.amount(analysis.margin, decimals)}"
    if row.pairs == 1:
        return f"{sentence}, and one block has no spread to judge that by."
    evidence = describe_interval_and_p(vars(row), analysis, scale, decimals)
    if row.family > 1:
        evidence += f", {'not ' * (analysis.correction == 'none')}corrected for {format_count(row.family, 'arm')}"
    score = f"ahead in {row.ahead} and behind in {row.behind}"
    alone = ", ".join(f"{count} {verdict}" for verdict, count in row.alone.items())
    alone = f" In single blocks: {alone}." * bool(alone)
    if row.low is None or row.high is None:
        why = "two blocks give no useful interval" if row.pairs == 2 else "equal differences give no interval"
        return f"{sentence}, {score} ({evidence}; {why}).{alone}"
    low, high = (scale.end(end or 0.0, decimals) for end in (row.new_low, row.new_high))
    level = percent(1 - analysis.alpha)
    return f"{sentence} ({evidence}), {score}; a new block is predicted between {low} and {high} ({level}).{alone}"


def block_scale(analysis: Analysis, scale: Scale) -> Scale:
    """Return the scale of what is averaged over blocks, given the metric's."""
    if analysis.over_blocks == "relative":
        return Scale(analysis.metric, 100.0, "%", "% of the baseline's error")
    return scale if scale.points else Scale(analysis.metric, 1.0, "", f"in {analysis.metric}")


def compare_over_blocks(plan: Plan, rows: Sequence[Row]) -> list[ArmOverBlocks]:
    """Return every compared arm over all blocks, from the rows of the summary; none without blocks."""
    by_name, analysis = {row["arm"]: row for row in rows}, plan.analysis
    blocks = list(dict.fromkeys(arm.block for arm in plan.arms))
    cells: dict[str, dict[str, Row]] = {}
    arms: dict[str, Arm] = {}
    for arm in plan.arms:
        if arm.block and arm.baseline is not None and arm.name in by_name:
            cells.setdefault(arm.name_in_block, {})[arm.block] = by_name[arm.name]
            arms.setdefault(arm.name_in_block, arm)
    if not cells:
        return []
    # Of two studies, one has the complete pairs, and one has chance in the place of lost seeds.
    numbers_CBK = np.full((len(cells), len(blocks), 3), NAN)
    for place, block in np.ndindex(numbers_CBK.shape[:2]):
        if row := [*cells.values()][place].get(blocks[block]):
            names = "difference", "chance_difference" if row["lost"] else "difference", "difference_se"
            numbers = np.array([row[name] for name in names], dtype=float)
            numbers_CBK[place, block] = numbers / _divisor_of_differences(plan, by_name[row["baseline"]]["mean"])
    both_SCB, is_control = np.moveaxis(numbers_CBK[:, :, :2], 2, 0), np.array([arm.is_control for arm in arms.values()])
    family, fewer_blocks = family_over_blocks_and_incomplete_arms(plan)
    design = replace(
        Comparisons.all_with_first(len(cells), analysis),
        family=np.where(is_control, 1, len(family)),
        margin=None if analysis.over_blocks == "relative" else analysis.margin,
        registered=~is_control,
    )
    result = judge_blocks(both_SCB, np.stack([numbers_CBK[:, :, 2]] * 2), design)
    is_settled = (result.verdict[0] == result.verdict[1]) & (result.contrasts.pairs[0] == result.contrasts.pairs[1])
    over_all = []
    for place, (name, of_block) in enumerate(cells.items()):
        contrast, differences_B = result.contrasts.single(0, place), both_SCB[0, place]
        verdict = VERDICTS[result.verdict[0, place] if is_settled[place] else 0]
        refused = dict.fromkeys(row["refused"] for row in of_block.values() if row["refused"])
        refused |= dict.fromkeys(_reasons_mean_misleads(plan, by_name, of_block))
        caveats = [] if is_settled[place] else ["lost seeds may change this"]
        hedges = list_hedges([*of_block.values(), {"awaited": 0, "exploratory": name in fewer_blocks}])
        numbers_by_name = {end: getattr(contrast, end) for end in ("difference", "low", "high", "p", "p_corrected")}
        numbers_by_name |= {end: getattr(result, end)[0, place].item() for end in ("new_low", "new_high")}
        over_all.append(
            ArmOverBlocks(
                name,
                plan.arm(str(arms[name].baseline)).name_in_block,
                finite_or_none(dict(zip(blocks, differences_B.tolist(), strict=True))),
                int((design.sign * differences_B > 0).sum()),
                int((design.sign * differences_B < 0).sum()),
                str(Verdict.REFUSED if refused else verdict),
                "; ".join(filter(None, [*refused, *caveats, hedges])),
                int(design.family[place]),
                contrast.pairs,
                **finite_or_none(numbers_by_name),
                alone=Counter(row["verdict"] for row in of_block.values() if row["verdict"] in DECIDED),
            )
        )
    return over_all


def _reasons_mean_misleads(plan: Plan, by_name: Mapping[str, Row], of_block: Mapping[str, Row]) -> Iterator[str]:
    """Yield why the mean of an arm's differences in some blocks would say something else than its sentence."""
    baselines = dict.fromkeys(plan.arm(row["baseline"]).name_in_block for row in of_block.values())
    if len(baselines) > 1:
        yield f"it is compared with {' and '.join(baselines)} in different blocks"
    perfect = [
        block
        for block, row in of_block.items()
        if row["difference"] is not None and math.isnan(_divisor_of_differences(plan, by_name[row["baseline"]]["mean"]))
    ]
    if perfect:  # leaving these blocks out would favour the arm
        yield f"its baseline has no error in {', '.join(perfect)} that a difference could be divided by"


def _divisor_of_differences(plan: Plan, baseline_mean: float | None) -> float:
    """Return what a difference is divided by, given the baseline's mean; NaN if it has no error to divide by."""
    analysis, facts = plan.analysis, plan.facts()
    if analysis.over_blocks != "relative":
        return 1.0
    largest = 0.0 if analysis.goal == "min" or facts is None else facts.bounds[1]
    error = NAN if baseline_mean is None or largest is None else abs(largest - baseline_mean)
    return error or NAN
