"""Arms: what each reached, its difference from the baseline, the verdict, and the statistics behind it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vitlab.comparison import Verdict
from vitlab.errors import format_count, list_some
from vitlab.explaining.colours import BETTER, GREY, INK, PAPER, WORSE
from vitlab.planning.values import Plan
from vitlab.report import phrasing
from vitlab.report.drawing import (
    NARROW,
    WIDTH,
    Drawing,
    apply_style,
    describe_shared_name_parts,
    empty_figure,
    short_labels,
    wrap_line,
    wrapped_labels,
)
from vitlab.report.phrasing import (
    DASH,
    PLUS_MINUS,
    Column,
    Columns,
    Row,
    Scale,
    compared_rows,
    describe_baseline,
    format_p_value,
)
from vitlab.report.sections import Findings, Section, Table, section
from vitlab.spec import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitlab.report.report import Report

DOTS = {
    Verdict.BETTER: (BETTER, "green better"),
    Verdict.WORSE: (WORSE, "orange worse"),
    Verdict.SAME: (INK, "in the colour of the text the same"),
    Verdict.EQUIVALENT: (INK, "in the colour of the text equivalent"),
    "shown": (INK, "in the colour of the text shown"),
}
"""What is decided to the colour of its filled dot, and to words on that."""
OUTLIER = 4  #: times the median length of the intervals, from which on one is cut
FEW_TICKS = 5  #: intervals between ticks; values that differ little have long labels


@section.register("arms")
class Arms(Section[Row]):
    """What each arm reached, and how it differs from its baseline."""

    heading = "Arms"
    place = 0

    def table(self, rows: Sequence[Row], report: Report) -> Table | None:
        if not phrasing.started_rows(report.arms):
            return None
        caption = "What each arm reached, and how it differs from its baseline."
        return Table(arm_columns(report.arms, report.analysis, report.scale), caption + _describe_tuned_values(report))

    def figure(self, rows: Sequence[Row], findings: Findings) -> Drawing | None:
        plan, values = findings.plan, findings.results.values
        rows = [row for row in findings.arms if values.get(row["arm"])]
        if not rows:
            return None
        compared = [row for row in rows if row["difference"] is not None]
        scale, labels = findings.scale, wrapped_labels([row["arm"] for row in rows], 30)
        places = {name: place for place, name in enumerate(labels)}
        height = 0.95 + len(rows) * max(0.34, 0.26 + 0.14 * max(label.count("\n") for label in labels.values()))
        with apply_style():
            figure = empty_figure(WIDTH, height)
            of_means, *of_differences = figure.subplots(1, 2 if compared else 1, sharey=True, squeeze=False).ravel()
            for name, place in places.items():
                draw_seeds(of_means, place, [scale.factor * value for value in values[name].values()])
            means = [Mark(places[row["arm"]], row["mean"], row["low"], row["high"], INK, INK) for row in rows]
            draw_marks(of_means, means, scale, [value for name in places for value in values[name].values()])
            title = scale.title + ", best" * (plan.analysis.at == "best")
            of_means.set_xlabel(wrap_line(f"{title}; {plan.analysis.direction}", 38 if of_differences else 76))
            for axes in of_differences:
                facts = ("difference", "difference_low", "difference_high", "verdict")
                marks = [difference_mark(places[row["arm"]], *(row[fact] for fact in facts)) for row in compared]
                draw_differences(axes, [*labels.values()], marks, scale, "difference from the baseline")
            of_means.set_yticks(range(len(rows)), _arm_column(rows, labels, findings.arms).cells)
            of_means.set_ylim(len(rows) - 0.4, -0.6)
            of_means.grid(axis="x")
            for axes in (of_means, *of_differences):
                axes.tick_params(axis="y", length=0, pad=7)
                axes.locator_params(axis="x", nbins=FEW_TICKS)
                axes.ticklabel_format(axis="x", useOffset=False, style="plain")
                low, high = axes.get_xlim()
                # Of equal values, ticks would be as long as their rounding.
                if phrasing.half_width(low, high) is None:
                    axes.set_xlim(sorted((0.99 * low, 1.01 * high)))
            caption = _figure_caption(plan, rows, compared) + describe_shared_name_parts(labels)
            if absent := [row["arm"] for row in findings.arms if row not in rows]:
                caption += f" Without a value: {phrasing.list_or_count(absent)}."
            return Drawing(figure, caption)


@section.register("comparisons")
class Comparisons(Section[Row]):
    """The statistics behind each verdict."""

    heading = "Comparisons"
    place = 20
    in_terminal = False

    def table(self, rows: Sequence[Row], report: Report) -> Table | None:
        compared = [row for row in report.arms if row["difference"] is not None]
        if not compared:
            return None
        scale, alpha = report.scale, report.analysis.alpha
        decimals, _ = phrasing.table_and_sentence_decimals(report.arms, scale)
        column = Columns(compared)
        table = [
            column.text_column("arm"),
            column.text_column("compared with", "baseline"),
            column("test", lambda row: row["test"] + ", shared variance" * ((row["shared"] or 1) > 1), right=False),
            column("pairs", lambda row: str(row["pairs"])),
            column("p", lambda row: format_p_value(row["p"], alpha)),
            column(
                "interval with new images",
                lambda row: scale.interval(row["new_images_low"], row["new_images_high"], decimals),
            ),
            column("lost seeds", lambda row: str(row["lost"])),
            column("difference with chance", lambda row: scale.number(row["chance_difference"], decimals, sign=True)),
            column("p with chance", lambda row: format_p_value(row["chance_p"], alpha)),
        ]
        informative = [one for one in table if not set(one.cells) <= {DASH, "0"}]
        titles = {one.title for one in informative}
        caption = "Statistics of each verdict."
        if len(compared_rows(report.arms)) > 1:
            caption += " p is of one comparison alone, and the other numbers hold for all at once."
        if "interval with new images" in titles:
            caption += (
                " With new images: for trainings that are evaluated on other images of the kind; with few seeds, it is "
                "often equal to the interval for the same images."
            )
        if "lost seeds" in titles:
            caption += (
                " Lost seeds have no value: their trials diverged, failed or were killed. With chance: what guesses "
                "reach stands in their place."
            )
        return Table(informative, caption)


def arm_columns(rows: Sequence[Row], analysis: Analysis, scale: Scale) -> list[Column]:
    """Return the table of the arms that have begun: mean, difference from the baseline, verdict, cost."""
    rows = phrasing.started_rows(rows)
    decimals, _ = phrasing.table_and_sentence_decimals(rows, scale)
    title = f"{scale.title}{' at best' * (analysis.at == 'best')}"
    title += f" {PLUS_MINUS} sd" * any(row["sd"] is not None for row in rows)
    column, level = Columns(rows), phrasing.percent(1 - analysis.alpha)

    def difference(title: str, cell: Callable[[Row], str], rank: int = 0) -> Column:
        return column(title, lambda row: "" if row["baseline"] is None else cell(row), rank)

    table = [
        _arm_column(rows, {}, rows),
        column("n", lambda row: f"{row['n']}" if row["n"] == row["planned"] else f"{row['n']}/{row['planned']}", 3),
        replace(
            column(title, lambda row: scale.mean_with_sd(row["mean"], row["sd"], decimals), 1), bold=_near_best(rows)
        ),
        column(f"{level} interval of mean", lambda row: scale.interval(row["low"], row["high"], decimals), rank=6),
    ]
    if any(row["collapsed"] for row in rows):

        def collapsed(row: Row) -> str:
            without = f" ({scale.number(row['sound_mean'], decimals)} without)" if row["sound_mean"] is not None else ""
            return f"{row['collapsed']}/{row['n']}{without}"

        table.append(column("collapsed", collapsed, rank=3))
    compared = compared_rows(rows)
    if len({row["baseline"] for row in compared}) > 1:
        table.append(column.text_column("compared with", "baseline", rank=4))
    if compared:
        families = sorted({row["family"] for row in compared})  # comparisons added later belong to a larger one
        is_adjusted = phrasing.is_corrected(families[-1], analysis)

        def p(row: Row) -> str:
            text = format_p_value(row["p_corrected"], analysis.alpha)
            return f"{text} (of {row['family']})" if len(families) > 1 and text != DASH else text

        table += [
            difference("difference", lambda row: scale.number(row["difference"], decimals, sign=True)),
            difference(
                phrasing.interval_name(families[-1], analysis),
                lambda row: scale.interval(row["difference_low"], row["difference_high"], decimals),
                rank=1,
            ),
            difference("p (adjusted)" if is_adjusted else "p", p, rank=4),
            column("verdict", format_verdict, right=False),
        ]
    test = f"test/{analysis.metric.partition('/')[2]}"
    if test != analysis.metric and any(row.get(test) is not None for row in rows):
        title = f"{replace(scale, metric=test).title}, mean {PLUS_MINUS} sd"
        table.append(
            column(title, lambda row: scale.mean_with_sd(row.get(test), row.get(f"{test}_sd"), decimals), rank=7)
        )
    costs = [
        _parameters(rows),
        column("MACs", lambda row: phrasing.format_compact(row["macs"]), rank=10),
    ]
    return [*table, *(cost for cost in costs if set(cost.cells) != {DASH})]


def paper_table(report: Report) -> Table:
    """Return the table of arms in the width of a paper: mean ± sd, difference with its interval, verdict."""
    rows, analysis = phrasing.started_rows(report.arms), report.analysis
    scale, counts = report.scale, {row["n"] for row in rows}
    decimals, _ = phrasing.table_and_sentence_decimals(rows, scale)
    labels = short_labels([row["arm"] for row in rows])

    def difference(row: Row) -> str:
        text = "" if row["baseline"] is None else scale.number(row["difference"], decimals, sign=True)
        if row["difference_low"] is None:
            return text
        return f"{text} {scale.interval(row['difference_low'], row['difference_high'], decimals)}"

    column, table = Columns(rows), [_arm_column(rows, labels, rows)]
    if len(counts) > 1:
        table.append(column("n", lambda row: str(row["n"])))
    means = column(scale.title, lambda row: scale.mean_with_sd(row["mean"], row["sd"], decimals))
    table.append(replace(means, bold=_near_best(rows)))
    seeds = format_count(max(counts), "seed") if len(counts) == 1 else "n seeds"
    caption = f"Mean {PLUS_MINUS} standard deviation of {scale.title} over {seeds}; {analysis.direction}."
    if compared := compared_rows(rows):
        table.append(column(scale.title_of_difference("difference"), difference))
        table.append(column("verdict", format_verdict, right=False))
        caption += f" Difference from {describe_baseline(row['baseline'] for row in compared)}"
        if any(row["difference_low"] is not None for row in compared):
            caption += f" with its {phrasing.interval_name(max(row['family'] for row in compared), analysis)}"
        caption += f"; verdicts at level {analysis.alpha:g}."
        if len(counts) > 1 and any(row["pairs"] for row in compared):
            caption += " A difference is of the seeds that both arms have."
    if len({row["params"] for row in rows}) > 1:
        table.append(_parameters(rows))
    sentences = (
        report.question,
        caption + _describe_tuned_values(report) + describe_shared_name_parts(labels),
        phrasing.warn_of_poor_trainings(rows),
    )
    return Table(table, " ".join(filter(None, sentences)))


def _describe_tuned_values(report: Report) -> str:
    candidates = report.sections.get("tuning", ())
    chosen = [f"{row.arm} with {row.rival}" for row in candidates if row.outcome.startswith("chosen")]
    return f" Tuned: {list_some(chosen, phrasing.MAX_LISTED, '; ')}." * bool(chosen)


def _arm_column(rows: Sequence[Row], labels: Mapping[str, str], all_rows: Sequence[Row]) -> Column:
    """Return the names of arms, or their labels; the one baseline of all is marked, unless its name says so."""
    baselines = {row["baseline"] for row in all_rows} - {None}

    def cell(row: Row) -> str:
        arm: str = row["arm"]
        return labels.get(arm, arm) + " (baseline)" * (baselines == {arm} and not arm.endswith("baseline"))

    return Columns(rows)("arm", cell, right=False)


def _near_best(rows: Sequence[Row]) -> tuple[bool, ...]:
    """Return which arms may be the best; empty where all may, and for a report that does not say."""
    best = tuple(bool(row.get("best")) for row in rows)
    return () if all(near for near, row in zip(best, rows, strict=True) if row["mean"] is not None) else best


def _parameters(rows: Sequence[Row]) -> Column:
    return Columns(rows)("parameters", lambda row: phrasing.format_compact(row["params"]), rank=8)


def format_verdict(row: Row) -> str:
    """Return the verdict on an arm, with what qualifies it; empty if there is none."""
    verdict = row["verdict"] or ""
    if verdict == Verdict.CANNOT_TELL and row["lost"]:  # which may be why
        verdict += f" ({format_count(row['lost'], 'lost seed')})"
    return f"{verdict} (exploratory)" if row["exploratory"] and verdict not in ("", Verdict.REFUSED) else verdict


def _figure_caption(plan: Plan, rows: Sequence[Row], compared: Sequence[Row]) -> str:
    interval = f" with its {phrasing.percent(1 - plan.analysis.alpha)} interval"
    text = "each seed (small) and the mean" if any(row["n"] > 1 for row in rows) else "the value"
    text += interval * any(row["low"] is not None for row in rows)
    if not compared:
        return f"Of every arm {text}."
    text = f"First {text}, then the difference from {describe_baseline(row['baseline'] for row in compared)}"
    if any(row["difference_low"] is not None for row in compared):
        several = phrasing.is_corrected(max(row["family"] for row in compared), plan.analysis)
        text += (
            f"{interval}{', which holds for all of them at once' * several}; {describe_dots(compared)}; an arrow is an "
            "interval that goes on beyond the picture"
        )
    return f"{text}."


def describe_dots(rows: Iterable[Any]) -> str:
    """Return what filled dots of differences mean, of the verdicts that are in a figure."""
    verdicts = {row["verdict"] for row in rows}
    decided = ", ".join(text for verdict, (_, text) in DOTS.items() if verdict in verdicts)
    return f"differences with a filled dot are decided: {decided}" if decided else "no difference is decided"


def draw_seeds(axes: Axes, y: float, values: Sequence[float]) -> None:
    """Draw single seeds, alternately a little above and below their line."""
    places = [y + (0.13 * (-1) ** index if len(values) > 1 else 0.0) for index in range(len(values))]
    axes.scatter(values, places, s=11, facecolors="none", edgecolors=GREY, linewidths=0.8)


@dataclass(frozen=True)
class Mark:
    """A value with its interval on the line ``y``."""

    y: float
    value: float
    low: float | None
    high: float | None
    colour: str
    fill: str


def difference_mark(y: float, value: float, low: float | None, high: float | None, verdict: str) -> Mark:
    """Return the mark of a difference: grey and hollow where it is not decided, so that only claims catch the eye."""
    colour, _ = DOTS.get(verdict, (GREY, ""))
    return Mark(y, value, low, high, colour, colour if verdict in DOTS else PAPER)


def draw_differences(axes: Axes, labels: Sequence[str], marks: Sequence[Mark], scale: Scale, title: str) -> None:
    """Draw a line for each label, with the marks of differences, and a rule at 0."""
    axes.axvline(0, color=GREY, linewidth=0.9, zorder=1)
    draw_marks(axes, marks, scale, [0.0])
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel(wrap_line(scale.title_of_difference(title), 36))
    axes.grid(axis="x")
    axes.locator_params(axis="x", nbins=FEW_TICKS)


def draw_effects(rows: Mapping[str, Any], verdicts: Sequence[str], title: str, scale: Scale) -> Figure:
    """Draw the difference and the interval of the row of each label, with its verdict."""
    marks = [
        difference_mark(place, row.difference, row.low, row.high, verdict)
        for place, (row, verdict) in enumerate(zip(rows.values(), verdicts, strict=True))
        if row.difference is not None
    ]
    with apply_style():
        figure = empty_figure(NARROW, 0.8 + 0.45 * len(rows))
        draw_differences(figure.subplots(), [*wrapped_labels([*rows], 24).values()], marks, scale, title)
    return figure


def draw_marks(axes: Axes, marks: Sequence[Mark], scale: Scale, points: Sequence[float]) -> None:
    """Draw values with their intervals; one that is much longer than others and ``points`` span ends in an arrow."""
    values = [*points, *(mark.value for mark in marks)]
    lengths = [abs(end - mark.value) for mark in marks for end in (mark.low, mark.high) if end is not None]
    longest = max(max(values) - min(values), OUTLIER * statistics.median_low(lengths or [0.0]))
    for mark in marks:
        if mark.low is not None and mark.high is not None:
            low, high = max(mark.low, mark.value - longest), min(mark.high, mark.value + longest)
            axes.plot([scale.factor * low, scale.factor * high], [mark.y] * 2, color=mark.colour, linewidth=1.5)
            for end, shown, arrow in ((mark.low, low, "<"), (mark.high, high, ">")):
                if shown != end:
                    axes.plot(scale.factor * shown, mark.y, arrow, markersize=4.5, color=mark.colour)
        axes.plot(
            scale.factor * mark.value,
            mark.y,
            "o",
            markersize=5.5,
            color=mark.colour,
            markerfacecolor=mark.fill,
            markeredgewidth=1.2,
        )
