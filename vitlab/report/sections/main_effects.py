"""Main effects of a grid: each level against the baseline's, averaged over the settings of the other factors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from vitlab.comparison.study import refusals_by_arm
from vitlab.errors import format_count
from vitlab.planning.values import Arm
from vitlab.report.drawing import Drawing
from vitlab.report.phrasing import (
    Answer,
    Columns,
    begin_sentence,
    describe_above_or_below,
    describe_interval_and_p,
    difference_columns,
    difference_decimals,
    interval_name,
    list_hedges,
    truncate_list,
)
from vitlab.report.sections import Findings, Section, Table, section
from vitlab.report.sections.arms import describe_dots, draw_effects
from vitlab.report.sections.interactions import Grid, is_shown, judge_averages, shorten_change_paths

if TYPE_CHECKING:
    from vitlab.report.report import Report

CAVEAT = "P values and intervals are corrected for the main effects alone, a family beside the comparisons of arms."


@dataclass(frozen=True)
class MainEffect:
    """The effect of a level, in the unit of the metric; numbers are None where too few seeds have them."""

    changes: ClassVar = ("level", "against")
    level: str  #: a level of a factor, as ``path=value``
    against: str  #: the baseline's level of this factor
    settings: int  #: settings of the other factors, over which the difference is averaged
    pairs: int  #: seeds that all of their arms have
    family: int  #: main effects that are corrected together
    verdict: str  #: as in the table of arms
    difference: float | None  #: mean difference of the level from the baseline's
    low: float | None  #: its interval, which holds for the whole family at once
    high: float | None  #: its upper end
    p_corrected: float | None  #: two-sided p, corrected for the family


@section.register("main_effects")
class MainEffects(Section[MainEffect]):
    """Difference of every level of a grid from the baseline's, averaged over the other factors."""

    heading = "Main effects"
    place = 25
    row = MainEffect
    of_seeds = True

    def rows(self, findings: Findings) -> Iterator[MainEffect]:
        """Return the effect of every level that has the reference's beside it in two settings or more.

        The reference is the first arm without a baseline.  There are none without interactions, where a comparison of
        arms is refused, where arms were tuned one by one, whose seeds do not know the choice, and over blocks.
        """
        plan = findings.plan
        grid = Grid.from_plan(plan)
        unlike = any(arm.block for arm in plan.arms) or any(tuning.arm for tuning in plan.tuning)
        if grid is None or unlike or refusals_by_arm(plan) or not grid.arms_by_interaction():
            return
        settings = defaultdict[tuple[str, str], list[Arm]](list)
        for path, place in grid.factors.items():
            reference = grid.reference[place]
            for levels, arm in grid.arms.items():
                if levels[place] != reference and (other := grid.arm(levels, place)):
                    key = f"{path}={levels[place]}", f"{path}={reference}"
                    settings[key].append(replace(arm, baseline=other.name))
        effects = {key: arms for key, arms in settings.items() if len(arms) > 1}
        averages = judge_averages(findings.results, effects.values())
        for ((level, against), arms), row in zip(effects.items(), averages, strict=True):
            if not row["pairs"]:  # its arms have not been trained yet
                continue
            names = ("pairs", "family", "verdict", "difference", "low", "high", "p_corrected")
            yield MainEffect(level, against, len(arms), **{name: row[name] for name in names})

    def figure(self, rows: Sequence[MainEffect], findings: Findings) -> Drawing:
        labels = shorten_change_paths(rows)
        effects = {labels[row.level]: row for row in rows}
        verdicts = [row.verdict for row in rows]
        figure = draw_effects(effects, verdicts, "main effect", findings.scale)
        return Drawing(
            figure,
            f"Every main effect with its {interval_name(rows[0].family, findings.plan.analysis)}; "
            f"{describe_dots(map(vars, rows))}.",
        )

    def table(self, rows: Sequence[MainEffect], report: Report) -> Table:
        column, labels = Columns(rows), shorten_change_paths(rows)
        columns = [
            column("level", lambda row: labels[row.level], right=False),
            column("compared with", lambda row: labels[row.against], 3, right=False),
            column("settings", lambda row: str(row.settings), rank=4),
            column("n", lambda row: str(row.pairs), rank=2),
            *difference_columns(rows, report.arms, report.analysis, report.scale, "main effect"),
            column.text_column("verdict"),
        ]
        return Table(
            columns,
            f"Each level less the baseline's, {', '.join(dict.fromkeys(row.against for row in rows))}, "
            f"averaged over the settings of the other factors that have both, at the n seeds that all have. {CAVEAT}",
            CAVEAT,
        )


def factor_answers(report: Report) -> list[Answer]:
    """Return an answer about each factor of a grid, each interaction that is shown, and the others together."""
    analysis, scale = report.analysis, report.scale
    effects, interactions = (report.sections.get(name, ()) for name in ("main_effects", "interactions"))
    factors = defaultdict[str, list[MainEffect]](list)
    labels, decimals = shorten_change_paths([*effects, *interactions]), difference_decimals(effects, scale)
    for row in effects:
        factors[labels[row.level].partition("=")[0]].append(row)
    verdicts, others = dict[str, str](), list[Any]()  # of each sentence
    for name, rows in factors.items():
        levels = [
            f"{labels[row.level]} is {describe_above_or_below(row.difference, scale, decimals)} {labels[row.against]} "
            f"({describe_interval_and_p(vars(row), analysis, scale, decimals)}: {row.verdict})"
            for row in rows
            if row.difference is not None
        ]
        settings = " or ".join(map(str, sorted({row.settings for row in rows})))
        head = f"Main effect of {name}, averaged over {settings} settings of the other factors"
        verdict, *further = {row.verdict for row in rows}
        verdicts[f"{head}: {'; '.join(levels)}."] = "mixed" if further else verdict
    decimals = difference_decimals(interactions, scale)
    for row in (row for row in interactions if row.difference is not None):
        shown = is_shown(row, analysis)
        if shown or (len(interactions) == 1 and row.low is not None and not row.lost):
            sentence = (
                f"{labels[row.first]} and {labels[row.second]} {'' if shown else 'are not shown to '}interact: "
                f"together they make {scale.amount(row.difference, decimals)} "
                f"{'more' if row.difference > 0 else 'less'} than the sum of both alone "
                f"({describe_interval_and_p(vars(row), analysis, scale, decimals)})"
                f"{': a main effect of either averages unlike ones' * shown}."
            )
            verdicts[sentence] = "shown" * shown
        else:
            others.append(row)
    sentences = truncate_list([*verdicts])
    if others:
        sentence = f"no {'other ' * (len(others) < len(interactions))}interaction is shown"
        if intervals := [row for row in others if row.low is not None and not row.lost]:
            low, high = scale.end(min(row.low for row in intervals), decimals), max(row.high for row in intervals)
            span = f"{low} to {scale.end(high, decimals)} {scale.points}".rstrip()
            sentence += (
                f"; an effect may still differ by {span} between levels of another factor "
                f"({interval_name(intervals[0].family, analysis)} over {format_count(len(intervals), 'interaction')})"
            )
        if len(intervals) < len(others):
            sentence += (
                f"; {len(others) - len(intervals)} cannot be judged, because seeds are too few, collapsed or lost"
            )
        sentences.append(f"{sentence}.")
    start = begin_sentence("", list_hedges(report.arms))
    return [Answer(f"{start}{sentence}", verdicts.get(sentence, "")) for sentence in sentences]
