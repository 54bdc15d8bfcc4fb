"""Tables of a report as text: titles and cells, for every format to lay out.

Like :mod:`vitlab.report.phrasing`, it works on plain rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.errors import count
from vitlab.report import tuning_budget
from vitlab.report.corruptions import corruption_columns
from vitlab.report.cost_tables import cost_caption, cost_columns, front_columns, scaling_columns
from vitlab.report.labels import short_labels
from vitlab.report.phrasing import (
    CORRECTIONS,
    DASH,
    MINUS,
    PLUS_MINUS,
    Column,
    Row,
    Scale,
    compact,
    duration,
    interval_name,
    overturned_verdict,
    p_value,
    percent,
    widths,
)
from vitlab.report.verdict import Verdict
from vitlab.spec import Analysis

JOINT = ("interval with new images", "p with chance")
"""Columns of :func:`detail_columns` that hold for all comparisons at once."""


def columns(rows: Sequence[Row], analysis: Analysis, units: Mapping[str, str]) -> list[Column]:
    """Return the table of arms: mean, difference from the baseline, verdict, cost."""
    scale = Scale.of(analysis.metric, units)
    own, apart = _decimals(rows, scale)
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
        table.append(Column("collapsed", cells(lambda row: f"{row['collapsed']}/{row['n']}")))
    compared = [row for row in rows if row["baseline"] is not None]
    if len({row["baseline"] for row in compared}) > 1:
        table.append(Column("compared with", cells(lambda row: row["baseline"] or ""), right=False))
    if compared:
        widest = max(compared, key=lambda row: row["family"])  # comparisons added later belong to a larger family
        corrections = {CORRECTIONS[row["correction"]] for row in compared if row["correction"] in CORRECTIONS}
        p = "p" if widest["family"] < 2 or not corrections else f"p ({' or '.join(sorted(corrections))})"
        blank = {row["arm"] for row in rows if row["baseline"] is None}

        def versus(cell: Any) -> tuple[str, ...]:
            return cells(lambda row: "" if row["arm"] in blank else cell(row))

        table += [
            Column("difference", versus(lambda row: scale.number(row["difference"], apart, sign=True))),
            Column(
                interval_name(widest, analysis),
                versus(lambda row: bracket(row, "difference_low", "difference_high", apart)),
                rank=1,
            ),
            Column(p, versus(lambda row: p_value(row["p_corrected"], analysis.alpha))),
            Column("verdict", cells(lambda row: _verdict_cell(row, analysis)), right=False),
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


def _decimals(rows: Sequence[Row], scale: Scale) -> tuple[int, int]:
    """Return the number of decimals of means and of differences."""
    means, differences = ([row[name] for row in rows] for name in ("mean", "difference"))
    return (
        scale.decimals(widths(rows, "low", "high"), means),
        scale.decimals(widths(rows, "difference_low", "difference_high"), differences),
    )


def paper_columns(rows: Sequence[Row], analysis: Analysis, units: Mapping[str, str]) -> list[Column]:
    """Return the table of arms in the width of a paper: mean ± sd, difference with its interval, verdict."""
    scale = Scale.of(analysis.metric, units)
    own, apart = _decimals(rows, scale)
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
        table.append(Column("verdict", tuple(_verdict_cell(row, analysis) for row in rows), right=False))
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
        names = sorted({CORRECTIONS[row["correction"]] for row in compared if row["correction"] in CORRECTIONS})
        corrected = f", corrected by {' or '.join(names)}" if names else ""
        sentences.append(
            f"Difference from {against} with its {interval}; verdicts at level {analysis.alpha:g}{corrected}."
        )
    return " ".join(filter(None, sentences))


def spread(scale: Scale, mean: float | None, sd: float | None, decimals: int) -> str:
    """Return ``94.1 ± 0.6``; the mean alone if there is no standard deviation."""
    text = scale.number(mean, decimals)
    return text if sd is None else f"{text} {PLUS_MINUS} {scale.number(sd, decimals)}"


def _verdict_cell(row: Row, analysis: Analysis) -> str:
    verdict = row["verdict"] or ""
    if verdict == Verdict.CANNOT_TELL and overturned_verdict(row, analysis) is not None:
        return f"{verdict} ({count(row['broken'], 'broken seed')})"
    claimed = verdict not in ("", Verdict.CANNOT_TELL, Verdict.REFUSED)
    return f"{verdict} (exploratory)" if row["exploratory"] and claimed else verdict


def detail_columns(rows: Sequence[Row], analysis: Analysis, units: Mapping[str, str]) -> list[Column]:
    """Return the table of comparisons with the statistics of each verdict; columns without values are left out."""
    compared = [row for row in rows if row["baseline"] is not None and row["difference"] is not None]
    if not compared:
        return []
    scale = Scale.of(analysis.metric, units)
    _, apart = _decimals(rows, scale)

    def bracket(row: Row, low: str, high: str, factor: float, decimals: int) -> str:
        if row[low] is None:
            return DASH
        return "[" + ", ".join(f"{factor * row[end]:.{decimals}f}".replace("-", MINUS) for end in (low, high)) + "]"

    def cells(cell: Any) -> tuple[str, ...]:
        return tuple(cell(row) for row in compared)

    alpha = analysis.alpha
    table = [
        Column("arm", cells(lambda row: row["arm"]), right=False),
        Column("compared with", cells(lambda row: row["baseline"]), right=False),
        Column("test", cells(lambda row: row["test"]), right=False),
        Column("pairs", cells(lambda row: str(row["pairs"]))),
        Column("p", cells(lambda row: p_value(row["p"], alpha))),
        Column(
            "interval with new images",
            cells(lambda row: bracket(row, "new_images_low", "new_images_high", scale.factor, apart)),
        ),
        Column("broken", cells(lambda row: str(row["broken"]))),
        Column("difference with chance", cells(lambda row: scale.number(row["chance_difference"], apart, sign=True))),
        Column("p with chance", cells(lambda row: p_value(row["chance_p"], alpha))),
    ]
    return [column for column in table if not set(column.cells) <= ({"0"} if column.title == "broken" else {DASH})]


def head_columns(rows: Sequence[Row], units: Mapping[str, str]) -> list[Column]:
    """Return the table of heads: the mean of each head of an arm, alone and fused."""
    if not rows:
        return []
    table = [Column("arm", tuple(row["arm"] for row in rows), right=False)]
    for name in rows[0]:
        if name == "arm" or all(row[name] is None for row in rows):
            continue
        scale = Scale.of(name, units)
        decimals = scale.decimals_of([row[name] for row in rows], 1, 3)
        cells = tuple(DASH if row[name] is None else scale.number(row[name], decimals) for row in rows)
        table.append(Column(scale.title, cells))
    return table


def interaction_columns(rows: Sequence[Row], analysis: Analysis, units: Mapping[str, str]) -> list[Column]:
    """Return the table of two-way interactions."""
    if not rows:
        return []
    scale = Scale.of(analysis.metric, units)
    decimals = scale.decimals(widths(rows, "low", "high"), [row["difference"] for row in rows])

    def bracket(row: Row) -> str:
        if row["low"] is None:
            return DASH
        return f"[{scale.end(row['low'], decimals)}, {scale.end(row['high'], decimals)}]"

    return [
        Column("change", tuple(row["first"] for row in rows), right=False),
        Column("with", tuple(row["second"] for row in rows), right=False),
        Column("beside", tuple(row["against"] for row in rows), rank=2, right=False),
        Column(
            "interaction" + (f" ({scale.points})" if scale.points else ""),
            tuple(scale.number(row["difference"], decimals, sign=True) for row in rows),
        ),
        Column(interval_name(rows[0], analysis), tuple(map(bracket, rows)), rank=1),
        Column("p", tuple(p_value(row["p_corrected"], analysis.alpha) for row in rows)),
    ]


def _comparisons_caption(details: Sequence[Column], rows: Sequence[Row]) -> str:
    """Return the caption of the table of comparisons, which says of several whether they are corrected."""
    text = "Statistics of each verdict."
    if sum(row["baseline"] is not None for row in rows) < 2:
        return text
    joint = [column.title for column in details if column.title in JOINT]
    text += " Intervals and p values in this table are of one comparison each"
    return text + (f", except for {' and '.join(joint)}: these hold for all comparisons at once." if joint else ".")


def tables(doc: Mapping[str, Any], analysis: Analysis) -> list[tuple[str, str, list[Column]]]:
    """Return the non-empty tables other than that of arms, each with heading and caption."""
    details = detail_columns(doc["arms"], analysis, doc["units"])
    entries = [
        (
            "Comparisons",
            _comparisons_caption(details, doc["arms"]),
            details,
        ),
        (
            "Interactions",
            "Effect of two changes together minus the sum of their single effects, at the seeds that all four arms "
            "have; corrected as a family of their own, which is not registered.",
            interaction_columns(doc["interactions"], analysis, doc["units"]),
        ),
        (
            "Scaling",
            "Power laws of "
            + ("the metric" if analysis.goal == "min" else "one less the metric")
            + ", fitted to logarithms; the interval is of the spread of seeds alone.",
            scaling_columns(doc["scaling"], analysis),
        ),
        (
            "Fronts",
            "By the means of the seeds that reached a value, and how often if these means are drawn anew from the "
            "spread of seeds; costs are taken as they are.",
            front_columns(doc["fronts"], doc["arms"], doc["front_shares"]),
        ),
        ("Cost", cost_caption(doc["cost"]), cost_columns(doc["cost"])),
        ("Heads", "Mean metric of each head alone, and of their fusion.", head_columns(doc["heads"], doc["units"])),
        (
            "Corrupted test images",
            "Mean error over corruptions and severities with the interval of the seeds, uncorrected for other "
            "arms; as a share of the baseline's, averaged over corruptions; and the mean over severities of each.",
            corruption_columns(doc["corrupted"], analysis.alpha, doc["units"]),
        ),
        ("Tuning", "Candidates of each tuning.", tuning_columns(doc["tuning"], doc["units"])),
        (
            "Tuning budget",
            tuning_budget.caption(doc["tuning"], analysis.goal),
            tuning_budget.columns(doc["tuning"], analysis.goal, doc["units"]),
        ),
    ]
    return [table for table in entries if table[2]]


def tuning_columns(rows: Sequence[Row], units: Mapping[str, str]) -> list[Column]:
    """Return the table of tuning candidates: value, score, cost and outcome."""
    if not rows:
        return []
    scale = Scale.of(rows[0]["metric"], units)
    decimals = scale.decimals_of([row["score"] for row in rows], 2, 4)

    def score(row: Row) -> str:
        return DASH if row["score"] is None else scale.number(row["score"], decimals)

    return [
        Column("tuned for", tuple(row["arm"] for row in rows), right=False),
        Column("rival", tuple(row["rival"] for row in rows), right=False),
        Column(scale.title, tuple(map(score, rows))),
        Column("trainings", tuple(f"{row['trials']}" for row in rows), rank=2),
        Column("time", tuple(duration(row["wall_s"]) if row["wall_s"] else DASH for row in rows), rank=1),
        Column("outcome", tuple(row["outcome"] for row in rows), right=False),
    ]


def trial_columns(rows: Sequence[Row], units: Mapping[str, str]) -> list[Column]:
    """Return the table of trials: a selection of the columns of results.csv."""
    metrics = [name for name in (rows[0] if rows else ()) if name.startswith(("val/", "test/"))]
    table = [
        Column("arm", tuple(row["arm"] for row in rows), right=False),
        Column("seed", tuple(str(row["seed"]) for row in rows)),
        Column("status", tuple(row["status"] for row in rows), right=False),
    ]
    if any(row["failure_kind"] for row in rows):
        table.append(Column("failure", tuple(row["failure_kind"] or "" for row in rows), right=False))
    for metric in metrics:
        scale = Scale.of(metric, units)
        decimals = scale.decimals_of([row[metric] for row in rows], 2, 4)
        cells = tuple(scale.number(row[metric], decimals) for row in rows)
        table.append(Column(scale.title, cells))
    return [
        *table,
        Column("time", tuple(DASH if row["wall_s"] is None else duration(row["wall_s"]) for row in rows)),
        Column("trial", tuple(row["trial"][:12] for row in rows), right=False),
    ]
