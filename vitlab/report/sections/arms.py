"""Arms: what each reached, its difference from the baseline, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitlab.comparison.verdict import Verdict
from vitlab.errors import count
from vitlab.plan.palette import BETTER, GREY, INK, PAPER, RULE, WORSE
from vitlab.plan.values import Plan
from vitlab.report.drawing import WIDE, Drawing, style
from vitlab.report.labels import short_labels, wrapped_labels, wrapped_line
from vitlab.report.phrasing import (
    DASH,
    PLUS_MINUS,
    Column,
    Row,
    Scale,
    compact,
    interval_name,
    overturned_verdict,
    p_value,
    percent,
    widths,
)
from vitlab.report.sections.base import Findings, Section, Table, section
from vitlab.spec import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitlab.report.document import Report

OUTLIER = 4  #: times the median length of the intervals, from which on one is cut
MAX_TICK_CHARACTERS = 36  #: characters that the labels of an axis have room for


@section.register("arms")
class Arms(Section[Row]):
    """What each arm reached, and how it differs from its baseline."""

    heading = "Arms"
    place = 0

    def table(self, rows: Sequence[Row], report: Report) -> Table:
        """Return the table: mean, difference from the baseline, verdict, cost."""
        caption = "What each arm reached, and how it differs from its baseline."
        return Table(columns(report.arms, report.analysis, report.units), caption)

    def figure(self, rows: Sequence[Row], findings: Findings, width: float) -> Drawing | None:
        """Draw every arm with its seeds and interval, and beside it (below it, if narrow) its difference."""
        return _figure(findings, width)


def columns(rows: Sequence[Row], analysis: Analysis, units: Mapping[str, str]) -> list[Column]:
    """Return the table of arms: mean, difference from the baseline, verdict, cost."""
    scale = Scale.of(analysis.metric, units)
    own, apart = decimals_of_means_and_differences(rows, scale)
    of_sd = own + 1 if own or any(row["sd"] for row in rows) else 0
    interval = f"{percent(1 - analysis.alpha)} interval"
    best = " at best" if analysis.at == "best" else ""

    def cells(cell: Any) -> tuple[str, ...]:
        return tuple(cell(row) for row in rows)

    def bracket(row: Row, low: str, high: str, decimals: int) -> str:
        if row[low] is None:
            return DASH
        return f"[{scale.end(row[low], decimals)}, {scale.end(row[high], decimals)}]"

    table = [
        Column("arm", cells(lambda row: row["arm"]), right=False),
        Column("n", cells(lambda row: f"{row['n']}" if row["n"] == row["planned"] else f"{row['n']}/{row['planned']}")),
        Column(scale.title + best, cells(lambda row: scale.number(row["mean"], own))),
        Column(interval, cells(lambda row: bracket(row, "low", "high", own)), rank=3),
        Column("sd", cells(lambda row: scale.number(row["sd"], of_sd)), rank=6),
    ]
    if any(row["collapsed"] for row in rows):

        def collapsed(row: Row) -> str:
            without = f" ({scale.number(row['sound_mean'], own)} without)" if row["sound_mean"] is not None else ""
            return f"{row['collapsed']}/{row['n']}{without}"

        table.append(Column("collapsed", cells(collapsed)))
    compared = [row for row in rows if row["baseline"] is not None]
    if len({row["baseline"] for row in compared}) > 1:
        table.append(Column("compared with", cells(lambda row: row["baseline"] or ""), rank=2, right=False))
    if compared:
        widest = max(compared, key=lambda row: row["family"])  # comparisons added later belong to a larger family
        p = "p" if widest["family"] < 2 or analysis.correction == "none" else "p (adjusted)"
        families = {row["family"] for row in compared}
        blank = {row["arm"] for row in rows if row["baseline"] is None}

        def versus(cell: Any) -> tuple[str, ...]:
            return cells(lambda row: "" if row["arm"] in blank else cell(row))

        def adjusted(row: Row) -> str:
            text = p_value(row["p_corrected"], analysis.alpha)
            return f"{text} (of {row['family']})" if len(families) > 1 and text != DASH else text

        table += [
            Column("difference", versus(lambda row: scale.number(row["difference"], apart, sign=True))),
            Column(
                interval_name(widest, analysis),
                versus(lambda row: bracket(row, "difference_low", "difference_high", apart)),
                rank=1,
            ),
            Column(p, versus(adjusted)),
            Column("verdict", cells(lambda row: _verdict_cell(row)), right=False),
        ]
    test = f"test/{analysis.metric.partition('/')[2]}"
    if test != analysis.metric and any(row.get(test) is not None for row in rows):
        title = f"{Scale.of(test, units).title}, mean {PLUS_MINUS} sd"
        tested = [row.get(name) for row in rows for name in (test, f"{test}_sd")]
        of_test = scale.decimals(widths(rows, "low", "high"), tested)
        table.append(
            Column(title, cells(lambda row: spread(scale, row.get(test), row.get(f"{test}_sd"), of_test)), rank=4)
        )
    table += [
        Column("parameters", cells(lambda row: compact(row["params"])), rank=5),
        Column("MACs", cells(lambda row: compact(row["macs"])), rank=7),
    ]
    return [column for column in table if column.title not in ("parameters", "MACs") or set(column.cells) != {DASH}]


def decimals_of_means_and_differences(rows: Sequence[Row], scale: Scale) -> tuple[int, int]:
    """Return the number of decimals of means and of differences."""
    means, differences = ([row[name] for row in rows] for name in ("mean", "difference"))
    return (
        scale.decimals(widths(rows, "low", "high"), means),
        scale.decimals(widths(rows, "difference_low", "difference_high"), differences),
    )


def paper_columns(rows: Sequence[Row], analysis: Analysis, units: Mapping[str, str]) -> list[Column]:
    """Return the table of arms in the width of a paper: mean ± sd, difference with its interval, verdict."""
    scale = Scale.of(analysis.metric, units)
    own, apart = decimals_of_means_and_differences(rows, scale)
    labels = short_labels([row["arm"] for row in rows])

    def difference(row: Row) -> str:
        if row["baseline"] is None:
            return ""
        text = scale.number(row["difference"], apart, sign=True)
        if row["difference_low"] is None:
            return text
        low, high = (scale.end(row[end], apart) for end in ("difference_low", "difference_high"))
        return f"{text} [{low}, {high}]"

    table = [Column("arm", tuple(labels[row["arm"]] for row in rows), right=False)]
    if len({row["n"] for row in rows}) > 1:
        table.append(Column("n", tuple(str(row["n"]) for row in rows)))
    table.append(Column(scale.title, tuple(spread(scale, row["mean"], row["sd"], own) for row in rows)))
    if any(row["baseline"] is not None for row in rows):
        title = f"difference ({scale.points})" if scale.points else "difference"
        table.append(Column(title, tuple(map(difference, rows))))
        table.append(Column("verdict", tuple(_verdict_cell(row) for row in rows), right=False))
    return table


def paper_caption(question: str, rows: Sequence[Row], analysis: Analysis, units: Mapping[str, str]) -> str:
    """Return the caption of :func:`paper_columns`."""
    counts = {row["n"] for row in rows}
    seeds = f" over {count(max(counts), 'seed')}" if len(counts) == 1 else " over n seeds"
    title = Scale.of(analysis.metric, units).title
    sentences = [question, f"Mean {PLUS_MINUS} standard deviation of {title}{seeds}; {analysis.direction}."]
    compared = [row for row in rows if row["baseline"] is not None]
    if compared:
        baselines = {row["baseline"] for row in compared}
        against = " ".join(baselines.pop().split()) if len(baselines) == 1 else "the baseline of the arm"
        interval = interval_name(max(compared, key=lambda row: row["family"]), analysis)
        sizes = sorted({row["family"] for row in compared})
        corrected = f", corrected for {' or '.join(map(str, sizes))} comparisons" if sizes[-1] > 1 else ""
        corrected = "" if analysis.correction == "none" else corrected
        sentences.append(
            f"Difference from {against} with its {interval}; verdicts at level {analysis.alpha:g}{corrected}."
        )
    return " ".join(filter(None, sentences))


def spread(scale: Scale, mean: float | None, sd: float | None, decimals: int) -> str:
    """Return ``94.1 ± 0.6``; the mean alone if there is no standard deviation."""
    text = scale.number(mean, decimals)
    return text if sd is None else f"{text} {PLUS_MINUS} {scale.number(sd, decimals)}"


def _verdict_cell(row: Row) -> str:
    verdict = row["verdict"] or ""
    if verdict == Verdict.CANNOT_TELL and overturned_verdict(row) is not None:
        return f"{verdict} ({count(row['broken'], 'broken seed')})"
    claimed = verdict not in ("", Verdict.CANNOT_TELL, Verdict.REFUSED)
    return f"{verdict} (exploratory)" if row["exploratory"] and claimed else verdict


def _figure(findings: Findings, width: float) -> Drawing | None:
    plan = findings.plan
    values = {name: list(by_seed.values()) for name, by_seed in findings.results.values.items() if by_seed}
    if not values:
        return None
    rows = {row["arm"]: row for row in findings.arms}
    names = [name for name in rows if name in values]
    compared = [name for name in names if rows[name]["difference"] is not None]
    scale, wide = Scale.of(plan.analysis.metric, plan.units), width >= WIDE
    labels = wrapped_labels(names, 30 if wide else 20)
    row = max(0.34, 0.14 * max(label.count("\n") + 1 for label in labels.values()) + 0.12)
    with style():
        from matplotlib.figure import Figure

        if not compared:
            figure = Figure(figsize=(width, 0.95 + row * len(names)), layout="constrained")
            left, right = figure.subplots(), None
        elif wide:
            figure = Figure(figsize=(width, 0.95 + row * len(names)), layout="constrained")
            left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
        else:
            heights = [0.7 + row * len(group) for group in (names, compared)]
            figure = Figure(figsize=(width, 0.4 + sum(heights)), layout="constrained")
            left, right = figure.subplots(2, 1, height_ratios=heights)
        place = {name: index for index, name in enumerate(names)}
        for name in names:
            _dots(left, place[name], [scale.factor * value for value in values[name]])
        marks = [
            _Mark(place[name], rows[name]["mean"], rows[name]["low"], rows[name]["high"], INK, INK) for name in names
        ]
        _marks(left, marks, scale, [value for by_seed in values.values() for value in by_seed])
        _name_rows(left, names, labels)
        label = scale.title + (", best" if plan.analysis.at == "best" else "")
        left.set_xlabel(wrapped_line(f"{label}; {plan.analysis.direction}", 38 if wide else 40))
        if right is not None:
            beside = names if wide else compared
            place = {name: index for index, name in enumerate(beside)}
            _marks(right, [_difference(place[name], rows[name]) for name in compared], scale, [0.0])
            _name_rows(right, beside, labels)
            right.axvline(0, color=GREY, linewidth=0.9, zorder=1)
            baselines = {rows[name]["baseline"] for name in compared}
            against = labels.get(baselines.pop(), "its baseline") if len(baselines) == 1 else "its baseline"
            unit = f" ({scale.points})" if scale.points else ""
            right.set_xlabel(wrapped_line(f"difference to {against}{unit}", 38 if wide else 26))
            if wide:
                right.spines["left"].set_visible(False)
                right.tick_params(axis="y", length=0, labelleft=False)
        return Drawing(figure, _caption(plan, [rows[name] for name in names]))


def _caption(plan: Plan, rows: Sequence[Row]) -> str:
    """Return the caption of the figure."""
    interval = f" with its {percent(1 - plan.analysis.alpha)} interval"
    text = "each seed (small) and the mean" if any(row["n"] > 1 for row in rows) else "the value"
    text += interval * any(row["low"] is not None for row in rows)
    compared = [row for row in rows if row["difference"] is not None]
    if not compared:
        return f"Of every arm {text}."
    text = f"First {text}, then the difference to the baseline"
    if any(row["difference_low"] is not None for row in compared):
        several = max(row["family"] for row in compared) > 1 and plan.analysis.correction != "none"
        text += (
            f"{interval}{', which holds for all of them at once' * several}; a filled dot is a verdict of better or "
        )
        text += "worse, and an arrow an interval that goes on beyond the picture"
    return f"{text}."


def _name_rows(axes: Axes, names: Sequence[str], labels: Mapping[str, str]) -> None:
    axes.set_yticks(range(len(names)), [labels[name] for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, pad=7)
    axes.grid(axis="x", color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)


def _dots(axes: Axes, y: float, values: Sequence[float]) -> None:
    """Draw single seeds, alternately a little above and below their line."""
    places = [y + (0.13 * (-1) ** index if len(values) > 1 else 0.0) for index in range(len(values))]
    axes.scatter(values, places, s=11, facecolors="none", edgecolors=GREY, linewidths=0.8)


@dataclass(frozen=True)
class _Mark:
    """A value with its interval on the line ``y``."""

    y: float
    value: float
    low: float | None
    high: float | None
    colour: str
    fill: str


def _difference(y: float, row: Row) -> _Mark:
    colour = {Verdict.BETTER: BETTER, Verdict.WORSE: WORSE}.get(row["verdict"])
    fill, colour = colour or PAPER, colour or GREY
    return _Mark(y, row["difference"], row["difference_low"], row["difference_high"], colour, fill)


def _marks(axes: Axes, marks: Sequence[_Mark], scale: Scale, points: Sequence[float]) -> None:
    """Draw values with their intervals, within limits that hold all values, ``points`` and intervals.

    An interval that is more than ``OUTLIER`` times as long as is typical of the others ends in an arrow if it would
    also be longer than what the values span.
    """
    values = [scale.factor * value for value in [*points, *(mark.value for mark in marks)]]
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal values: use the width of a notable difference
        notable = 1e-3 if scale.decimals_of(values, 0, 1) else 1.0
        half_width = 0.5 * max(notable, abs(high) * 0.02)
        low, high = low - half_width, high + half_width
    ends = [(mark.value, end) for mark in marks for end in (mark.low, mark.high) if end is not None]
    lengths = [scale.factor * abs(end - value) for value, end in ends]
    longest = max(high - low, OUTLIER * statistics.median_low(lengths or [0.0]))
    for value, end in ends:
        reach = max(-longest, min(longest, scale.factor * (end - value)))
        low, high = min(low, scale.factor * value + reach), max(high, scale.factor * value + reach)
    room = 0.05 * (high - low)
    low, high = low - room, high + room
    for mark in marks:
        if mark.low is not None and mark.high is not None:
            left, right = scale.factor * mark.low, scale.factor * mark.high
            ends_shown = [max(left, low), min(right, high)]
            axes.plot(ends_shown, [mark.y] * 2, color=mark.colour, linewidth=1.5)
            for beyond, edge, arrow in ((left < low, low, "<"), (right > high, high, ">")):
                if beyond:
                    axes.plot([edge], [mark.y], marker=arrow, markersize=4.5, color=mark.colour, clip_on=False)
        axes.plot(
            [scale.factor * mark.value],
            [mark.y],
            marker="o",
            markersize=5.5,
            color=mark.colour,
            markerfacecolor=mark.fill,
            markeredgewidth=1.2,
        )
    axes.set_xlim(low, high)
    _few_ticks(axes)


def _few_ticks(axes: Axes) -> None:
    """Set as many ticks as have room: numbers that differ little have long labels."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    low, high = axes.get_xlim()
    for most in range(7, 0, -1):
        axes.xaxis.set_major_locator(MaxNLocator(most))
        ticks = [tick for tick in axes.xaxis.get_major_locator()() if low <= tick <= high]
        labels = axes.xaxis.get_major_formatter().format_ticks(ticks)
        if sum(len(label) + 2 for label in labels) <= MAX_TICK_CHARACTERS:
            return
