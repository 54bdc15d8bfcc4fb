"""Formatting of numbers, sentences and columns of tables.

Inputs are plain rows (an arm's row of :func:`vitlab.report.comparison.summary_rows` as a mapping, None for missing
values), so that a stored report is rendered without pandas.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from vitlab.comparison import Verdict
from vitlab.errors import format_count
from vitlab.planning.values import Plan, declared_metric
from vitlab.spec import Analysis
from vitlab.store.folders import OPEN, STATUSES

if TYPE_CHECKING:
    from vitlab.report.report import Report

Row = Mapping[str, Any]
RowT = TypeVar("RowT")
MINUS, PLUS_MINUS, DASH = "\N{MINUS SIGN}", "\N{PLUS-MINUS SIGN}", "\N{EN DASH}"
ROUNDING = 1e-9  #: relative to a value: smaller widths are floating-point rounding
MAX_LISTED = 12  #: notes of one kind that are listed one by one
LONGEST_LIST = 100  #: characters of the names of more than three arms that a sentence lists
HEDGES = {"preliminary": "awaited", "exploratory": "exploratory"}
"""What a sentence says of a comparison to the column of its row that says why."""
OVERVIEW_FROM = 12  #: above this number of comparisons, an overview comes first
_SPACE_WITHIN = re.compile(
    rf"(?<=\d) (?=(?:%|m?s|min|h|[kMGT](?:i?B)?)(?!\w))|(?<=\b[pn]) (?=[=<] )|(?<=\b[pn] [=<]) "
    rf"|(?<={PLUS_MINUS}) (?=[\d.]|sd\b)|(?<=,) (?=[{MINUS}\d.]+\])"
)
"""A space within a quantity: before a unit, about the sign after ``p`` or ``n``, or before the end of an interval."""


class Answer(NamedTuple):
    """A sentence of the answer."""

    sentence: str
    verdict: str = ""  #: of the comparison that it is about
    row: Row | None = None  #: of the arm that it compares, within one study or block


@dataclass(frozen=True)
class Column:
    """A column of a table as text.  If space is short, columns of the highest ``rank`` are dropped first."""

    title: str
    cells: tuple[str, ...]
    rank: int = 0
    right: bool = True
    bold: tuple[bool, ...] = ()  #: for each cell, whether a paper has it in bold; empty for none


@dataclass(frozen=True)
class Columns(Generic[RowT]):
    """Maker of the columns of a table that has a line for each of some rows."""

    rows: Sequence[RowT]

    def __call__(self, title: str, cell: Callable[[RowT], str], rank: int = 0, *, right: bool = True) -> Column:
        """Return the column of the texts that ``cell`` makes of the rows."""
        return Column(title, tuple(map(cell, self.rows)), rank, right)

    def text_column(self, title: str, name: str = "", rank: int = 0) -> Column:
        """Return the column of a text of the rows, called as the title says or by ``name``; empty where missing."""
        name = name or title
        texts = [row[name] if isinstance(row, Mapping) else getattr(row, name) for row in self.rows]
        return Column(title, tuple(text or "" for text in texts), rank, right=False)


def difference_decimals(rows: Sequence[Any], scale: Scale) -> int:
    """Return the number of decimals of the differences of some rows."""
    return scale.decimals_for_intervals(
        [half_width(row.low, row.high) for row in rows], [row.difference for row in rows]
    )


def difference_columns(
    rows: Sequence[Any], arms: Sequence[Row], analysis: Analysis, scale: Scale, title: str
) -> list[Column]:
    """Return the columns of differences, of their intervals, and of their p values, of rows with a ``family``."""
    decimals, hedges = difference_decimals(rows, scale), list_hedges(arms)
    column, interval = Columns(rows), interval_name(max(row.family for row in rows), analysis)
    return [
        column(
            scale.title_of_difference(f"{hedges}{' ' * bool(hedges)}{title}"),
            lambda row: scale.number(row.difference, decimals, sign=True),
        ),
        column(interval, lambda row: scale.interval(row.low, row.high, decimals), rank=1),
        column("p (adjusted)", lambda row: format_p_value(row.p_corrected, analysis.alpha), rank=4),
    ]


def describe_interval_and_p(
    row: Row, analysis: Analysis, scale: Scale, decimals: int, of: str = "", p: str = "p_corrected"
) -> str:
    """Return the p value of a row with a ``family``, after the interval ``OFlow`` to ``OFhigh`` if there is one."""
    if row[p] is None:
        return "too few values to judge that by"
    text = f"p = {format_p_value(row[p], analysis.alpha)}".replace("= <", "<")
    if row[f"{of}low"] is None or row[f"{of}high"] is None:
        return text
    return f"{interval_name(row['family'], analysis)} {_format_ends(row, of, scale, decimals)}, {text}"


def keep_together(text: str) -> str:
    """Return a text that wraps within no quantity, such as ``95 %``, ``p = 0.03`` or ``[1.2, 3.4]``."""
    return _SPACE_WITHIN.sub("\N{NO-BREAK SPACE}", text)


def truncate_list(sentences: Sequence[str]) -> list[str]:
    """Return the first of many sentences, with the number of the others."""
    others = len(sentences) - MAX_LISTED
    return [*sentences[:MAX_LISTED], *([f"... and {others:,} more like these."] if others > 0 else [])]


@dataclass(frozen=True)
class Scale:
    """The display scale of a metric.  Shares of one are shown in percent, their differences in points."""

    metric: str
    factor: float
    unit: str  #: of a value: ``%``, the metric's own unit such as ``images``, or nothing
    points: str  #: of a difference: ``points``, the metric's own unit, or nothing
    label: str = ""  #: as another program writes the metric; by default as in ``val accuracy``

    @classmethod
    def of(cls, metric: str, units: Mapping[str, str]) -> Scale:
        """Return the scale of a metric such as ``val/accuracy`` or a column, given the units of a plan.

        A column of another program, whose whole name has a unit, is labelled by that name.
        """
        own = declared_metric(metric.rpartition("/")[2], units)
        unit = units.get(own or "", "number")
        factor, unit = 100.0 if unit == "share" else 1.0, {"share": "%", "number": ""}.get(unit, unit)
        return cls(metric, factor, unit, "points" if unit == "%" else unit, metric * (metric in units))

    @classmethod
    def of_plan(cls, plan: Plan) -> Scale:
        """Return the scale of the metric by which a plan's arms are judged."""
        return cls.of(plan.analysis.metric, plan.units)

    @property
    def is_share(self) -> bool:
        """True if the metric is shown in percent."""
        return self.unit == "%"

    @property
    def title(self) -> str:
        """The label of the metric, as in ``val accuracy (%)``."""
        name = self.label or self.metric.replace("/", " ")
        return f"{name} ({self.unit})" if self.unit and not name.endswith(f"({self.unit})") else name

    def title_of_difference(self, title: str) -> str:
        """Return a title with the unit of differences, as in ``difference (points)``."""
        return f"{title} ({self.points})" if self.points else title

    def decimals_for_intervals(self, widths: Sequence[float | None], values: Sequence[float | None] = ()) -> int:
        """Return the decimals for intervals of these half-widths, about one uncertain digit, or else for values."""
        # The middle one, so that a single arm of wide spread takes no digit from the others.
        half_widths = sorted(self.factor * width for width in widths if width is not None and width > 0)
        least = 1 if self.is_share else 0
        if not half_widths:
            return self.decimals_for_values(values, 1, 4)
        return min(6, max(least, math.ceil(-math.log10(half_widths[len(half_widths) // 2] / 3))))

    def decimals_for_values(self, values: Sequence[float | None], share_decimals: int, number_decimals: int) -> int:
        """Return the decimals for shares, none for whole numbers such as counts, and those for numbers otherwise."""
        if self.is_share:
            return share_decimals
        numbers = [value for value in values if value is not None]
        return 0 if numbers and all(float(value).is_integer() for value in numbers) else number_decimals

    def number(self, value: float | None, decimals: int, *, sign: bool = False) -> str:
        """Format a value without its unit; a dash if it is missing."""
        if value is None:
            return DASH
        text = f"{self.factor * float(value):{'+' if sign else ''}.{decimals}f}"  # JSON has infinities as text
        if float(text) == 0:
            text = f"{0:.{decimals}f}"
        return text.replace("-", MINUS)

    def end(self, value: float, decimals: int) -> str:
        """Format an end of an interval, with more digits if rounding would hide its sign."""
        while decimals < 9 and abs(value) > ROUNDING and float(f"{self.factor * value:.{decimals}f}") == 0:
            decimals += 1
        return self.number(value, decimals)

    def interval(self, low: float | None, high: float | None, decimals: int) -> str:
        """Format an interval as ``[1.2, 3.4]``; a dash if it is missing."""
        return DASH if low is None or high is None else f"[{self.end(low, decimals)}, {self.end(high, decimals)}]"

    def mean_with_sd(self, mean: float | None, sd: float | None, decimals: int) -> str:
        """Format ``94.1 ± 0.6``; the mean alone if there is no standard deviation."""
        text = self.number(mean, decimals)
        return text if sd is None else f"{text} {PLUS_MINUS} {self.number(sd, decimals)}"

    def amount(self, value: float, decimals: int) -> str:
        """Format the size of a difference with its unit: ``3.1 points``."""
        return f"{self.number(abs(value), decimals)} {self.points}".rstrip()


def started_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of arms of which a trial has begun."""
    return [row for row in rows if row["missing"] != row["planned"]]


def compared_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of arms that are compared with a baseline."""
    return [row for row in rows if row["baseline"] is not None]


def describe_baseline(baselines: Iterable[str | None]) -> str:
    """Return ``the baseline``, with its name if all arms are compared with one."""
    names = {*baselines} - {None}
    return f"the baseline{f' ({names.pop()})' if len(names) == 1 and names != {'baseline'} else ''}"


def half_width(low: float | None, high: float | None) -> float | None:
    """Return the half-width of an interval; None without an interval, or of one of rounding alone."""
    if low is None or high is None or high - low <= ROUNDING * max(abs(low), abs(high)):
        return None
    return (high - low) / 2


def warn_of_poor_trainings(rows: Sequence[Row]) -> str:
    """Return sentences on collapsed seeds of these arms, and on arms that may not have learned; empty without them."""
    seeds = [f"{row['arm']} ({row['collapsed']} of {row['n']})" for row in rows if row["collapsed"]]
    collapsed = f"Warning: these numbers include collapsed seeds: {list_or_count(seeds)}." * bool(seeds)
    at_chance = _describe_arms_at_chance(rows, *(row["arm"] for row in rows))
    return f"{collapsed}{at_chance}{' A difference may say only that these did not learn.' * bool(at_chance)}".strip()


def table_and_sentence_decimals(rows: Sequence[Row], scale: Scale) -> tuple[int, int]:
    """Return the number of decimals of all numbers of a table of arms, and of differences in sentences.

    A table has one number, so that a reader can subtract its means, and one more if an end of the interval of a mean
    would be 0.
    """
    intervals = [(row["low"], row["high"]) for row in rows]
    spreads = [half_width(row["low"], row["high"]) or row["sd"] for row in rows]  # two seeds have no interval
    own = scale.decimals_for_intervals(spreads, [row["mean"] for row in rows])
    widths = [half_width(row["difference_low"], row["difference_high"]) for row in rows]
    apart = scale.decimals_for_intervals(widths) if any(widths) else own
    own = max(own, apart)
    return own + any(scale.end(end, own) != scale.number(end, own) for ends in intervals for end in ends if end), apart


def format_p_value(p: float | None, alpha: float) -> str:
    """Format a p value as ``< 0.001``, ``0.034`` or ``0.61``; more digits if rounding would cross alpha."""
    if p is None:
        return DASH
    most = max(3, math.ceil(-math.log10(alpha)))  # decimals: a p value below the last one is below alpha
    if p < 10.0**-most:
        return f"< {10.0**-most:.{most}f}"
    digits = 2 if p >= 0.1 else 3 if p >= 0.001 else most
    while digits < most + 3 and (round(p, digits) <= alpha) != (p <= alpha):
        digits += 1
    return f"{p:.{digits}f}"


def percent(share: float) -> str:
    """Format a share as ``95 %``."""
    return f"{100 * share:g} %"


def is_corrected(family: int, analysis: Analysis) -> bool:
    """Return whether p values and intervals hold for several comparisons at once."""
    return family > 1 and analysis.correction != "none"


def interval_name(family: int, analysis: Analysis, alpha: float | None = None) -> str:
    """Return ``95 % interval``, preceded by ``simultaneous`` if it holds for several comparisons at once."""
    return f"{'simultaneous ' * is_corrected(family, analysis)}{percent(1 - (alpha or analysis.alpha))} interval"


def format_compact(n: float | None) -> str:
    """Format a number as ``950`` or ``1.23 M``: three figures and a prefix."""
    if n is None:
        return DASH
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= factor * 0.9995:
            return f"{n / factor:#.3g}".rstrip(".") + f" {prefix}"
    return f"{n:g}"


def format_duration(seconds: float) -> str:
    """Format seconds as ``4.2 ms``, ``42 s``, ``3 min 05 s``, ``2 h 07 min`` or ``1,300 h``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02} min" if hours < 100 else f"{round(seconds / 3600):,} h"
    if minutes:
        return f"{minutes} min {whole % 60:02} s"
    return f"{seconds:.3g} s" if seconds >= 0.1 or not seconds else f"{1000 * seconds:.3g} ms"


def format_seeds(seeds: Iterable[int], prefix: str = "") -> str:
    """Format seeds as ``0 to 4`` or ``0, 3, 7``, each after a prefix."""
    ordered = sorted(seeds)
    names = [f"{prefix}{seed}" for seed in ordered]
    is_range = len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{names[0]} to {names[-1]}" if is_range else ", ".join(names)


def describe_comparison(row: Row, seeds: int, analysis: Analysis, scale: Scale, decimals: int) -> str:
    """Return one sentence about one comparison; ``seeds`` is the larger n of its arms."""
    sentence = _comparison_sentence(row, seeds, analysis, scale, decimals)
    return f"{begin_sentence(row['verdict'], list_hedges([row]))}{sentence}"


def list_hedges(rows: Sequence[Row]) -> str:
    """Return what holds for any of some comparisons, as in ``preliminary and exploratory``; empty if nothing does."""
    return " and ".join(hedge for hedge, column in HEDGES.items() if any(row[column] for row in rows))


def begin_sentence(verdict: str, hedges: str) -> str:
    """Return what comes before the sentence of a comparison: a verdict that claims nothing, and what qualifies it."""
    parts = [verdict] * (verdict in (Verdict.CANNOT_TELL, Verdict.REFUSED)) + [hedges]
    return "".join(f"{part}: " for part in parts if part)


def _comparison_sentence(row: Row, seeds: int, analysis: Analysis, scale: Scale, decimals: int) -> str:
    arm, baseline, verdict = row["arm"], row["baseline"], row["verdict"]
    if row["n"] == 0:
        return _no_values_sentence(row, "" if seeds else f" or {baseline}")
    if row["difference"] is None:
        return f"{baseline}, with which {arm} is compared, has no trial that can be judged."
    if verdict == Verdict.SAME:
        return f"{arm} and {baseline} reached the same {scale.metric} at each of {format_count(row['pairs'], 'seed')}."
    sentence = f"{arm} is {describe_above_or_below(row['difference'], scale, decimals)} {baseline}"
    if analysis.goal == "min" and verdict in (Verdict.BETTER, Verdict.WORSE):
        sentence += f", which is {verdict}"
    if row["refused"]:
        return f"{sentence}, but {row['refused']}."
    if seeds != row["pairs"] > 1:
        common = format_count(row["pairs"], "seed")
        is_earlier = (row["look"] or 1) < (row["looks"] or 1)
        sentence += f", at the look after {common}" if is_earlier else f", over the {common} that both have"
    if row["test"] == "none":
        return f"{sentence}, and {_no_test_clause(row)} to judge that by."
    evidence = describe_interval_and_p(row, analysis, scale, decimals, "difference_")
    evidence += _correction_clause(row, analysis)
    if row["test"] == "sign flip":
        sentence += _sign_flip_clause(row, analysis, scale, decimals, evidence)
    elif row["difference_low"] is not None:
        sentence += f" ({evidence})"
    elif row["pairs"] == 2:
        sentence += f" ({_two_seeds_clause(row['difference'], row['difference_sd'], scale, decimals)}, {evidence})"
    else:
        sentence += f" ({evidence}; an arm has two seeds, which give no useful interval)"
    # An interval beyond the margin needs no words on equivalence.
    if (
        analysis.margin is not None
        and row["equal_low"] is not None
        and max(row["equal_low"], -row["equal_high"]) <= analysis.margin
    ):
        negation = "not " * (row["p_equal_corrected"] >= analysis.alpha)
        sentence += (
            f"; {negation}shown to be equivalent within {scale.amount(analysis.margin, decimals)} "
            f"({interval_name(row['family'], analysis, 2 * analysis.alpha)} "
            f"{_format_ends(row, 'equal_', scale, decimals)})"
        )
    return f"{sentence}{_lost_as_chance_clause(row, analysis, scale, decimals)}."


def _format_ends(row: Row, of: str, scale: Scale, decimals: int) -> str:
    """Format the interval of a row whose columns begin with ``of`` as ``1.2 to 3.4``."""
    return f"{scale.end(row[f'{of}low'], decimals)} to {scale.end(row[f'{of}high'], decimals)}"


def _two_seeds_clause(mean: float, sd: float | None, scale: Scale, decimals: int) -> str:
    half = (sd or 0.0) / math.sqrt(2)
    low, high = (scale.number(mean + side * half, decimals) for side in (-1, 1))
    return f"{low} and {high} at the two seeds, which gives no useful interval"


def _sign_flip_clause(row: Row, analysis: Analysis, scale: Scale, decimals: int, p: str) -> str:
    if not row["collapsed_pairs"]:
        return f" (the same at each of {format_count(row['pairs'], 'seed')}, which gives no interval; sign-flip {p})"
    clause = f" (sign-flip {p}; {format_count(row['collapsed_pairs'], 'seed')} collapsed, so t is not used"
    if row["sound_difference"] is not None:
        clause += f"; the others are {describe_above_or_below(row['sound_difference'], scale, decimals)}"
    if 2 ** (1 - row["pairs"]) * (row["family"] if is_corrected(row["family"], analysis) else 1) > analysis.alpha:
        clause += f"; {format_count(row['pairs'], 'pair')} cannot decide"
    return f"{clause})"


def _lost_as_chance_clause(row: Row, analysis: Analysis, scale: Scale, decimals: int) -> str:
    if not row["lost"]:
        return ""
    seeds = format_count(row["lost"], "lost seed")
    if row["chance_difference"] is None:
        return f"; {seeds} cannot be accounted for, because what chance reaches in {scale.metric} is not known"
    level = f"{scale.number(row['chance'], scale.decimals_for_values([row['chance']], 1, 3))} {scale.unit}".rstrip()
    difference = describe_above_or_below(row["chance_difference"], scale, decimals)
    evidence = describe_interval_and_p(row, analysis, scale, decimals, "chance_", "chance_p")
    return f"; with chance ({level}) in the place of {seeds}, {difference} ({evidence})"


def describe_arm_result(row: Row, analysis: Analysis, scale: Scale, decimals: int) -> str:
    """Return one sentence about an arm, for studies without comparisons."""
    if row["n"] == 0:
        return _no_values_sentence(row)
    of = "in " if scale.unit and not scale.is_share else ""
    sentence = f"{row['arm']} reaches {scale.number(row['mean'], decimals)} {scale.unit}".rstrip()
    sentence += f" {of}{scale.metric}"
    if row["n"] == 1:
        return f"{sentence} with one seed, which gives no interval."
    if row["collapsed"]:
        sentence += f" ({row['collapsed']} of {format_count(row['n'], 'seed')} collapsed, so no interval holds"
        sound = row["sound_mean"]
        return f"{sentence}{'' if sound is None else f'; the others reach {scale.number(sound, decimals)}'})."
    if row["n"] == 2:
        return f"{sentence} ({_two_seeds_clause(row['mean'], row['sd'], scale, decimals)})."
    if row["low"] is None:
        return f"{sentence}."
    interval = f"{percent(1 - analysis.alpha)} interval {_format_ends(row, '', scale, decimals)}"
    return f"{sentence} ({interval}, {format_count(row['n'], 'seed')})."


def format_status_counts(row: Row) -> str:
    """Format the numbers of trials per status: ``3 failed, 2 missing``."""
    return ", ".join(f"{row[status]} {status}" for status in STATUSES if row[status]) or "none planned"


def answer_per_arm(rows: Sequence[Row], analysis: Analysis, scale: Scale) -> list[Answer]:
    """Return one answer per comparison, or one per arm if there are no comparisons, of the arms that have begun.

    The last answer names the others.
    """
    compared = compared_rows(rows)
    own, apart = table_and_sentence_decimals(rows, scale)
    n, started = {row["arm"]: row["n"] for row in rows}, started_rows(rows)
    answers = []
    for row in compared_rows(started) if compared else started:
        sentence = (
            describe_comparison(row, max(row["n"], n.get(row["baseline"], 0)), analysis, scale, apart)
            if compared
            else describe_arm_result(row, analysis, scale, own)
        )
        sentence += _describe_arms_at_chance(rows, row["arm"], row["baseline"])
        answers.append(Answer(sentence, row["verdict"] or "", row))
    others = [row["arm"] for row in rows if row["missing"] == row["planned"]]
    return [*answers, *([Answer(f"no result yet: {list_or_count(others)}.")] if others else [])]


def merge_unclear_answers(report: Report) -> tuple[list[Answer], list[Answer]]:
    """Return the answers that stay, and those that each stand for several that cannot tell from one baseline.

    Such an answer has the arms and the span of their intervals.  Sentences stay that say more than that: of an arm
    without an interval, and of lost or collapsed seeds.
    """
    answers, analysis, scale = report.all_answers, report.analysis, report.scale
    groups = defaultdict[tuple[Any, ...], list[Row]](list)
    for row in (answer.row for answer in answers if answer.row and answer.verdict == Verdict.CANNOT_TELL):
        if row["difference_low"] is not None and not (row["lost"] or row["collapsed_pairs"]):
            groups[row["baseline"], row["family"], row.get("at_chance"), list_hedges([row])].append(row)
    hidden, folded = list[Row | None](), list[Answer]()
    _, decimals = table_and_sentence_decimals(report.arms, scale)
    for (baseline, family, _, hedges), unclear in groups.items():
        if len(unclear) > 1:
            arms = [row["arm"] for row in unclear]
            low = scale.end(min(row["difference_low"] for row in unclear), decimals)
            high = scale.end(max(row["difference_high"] for row in unclear), decimals)
            sentence = (
                f"{begin_sentence(Verdict.CANNOT_TELL, hedges)}{list_or_count(arms)}. "
                f"The {interval_name(family, analysis)}s of their "
                f"differences from {baseline} lie within {f'{low} to {high} {scale.points}'.rstrip()}"
            )
            if analysis.margin is not None:
                sentence += f"; none is shown to be equivalent within {scale.amount(analysis.margin, decimals)}"
            sentence += f".{_describe_arms_at_chance(report.arms, *arms, baseline)}"
            folded.append(Answer(sentence, Verdict.CANNOT_TELL))
            hidden += unclear
    return [answer for answer in answers if answer.row not in hidden], folded


def _describe_arms_at_chance(rows: Sequence[Row], *arms: str | None) -> str:
    """Return a sentence, after a space, on those of some arms that may not have learned; empty if there are none."""
    names = [row["arm"] for row in rows if row["arm"] in arms and row.get("at_chance") is not None]
    return f" Not shown to be better than chance: {list_or_count(names)}." * bool(names)


def count_verdicts(rows: Sequence[Row], prefix: str) -> str:
    """Return the number of comparisons per verdict, after the words ``prefix``; empty if there are few."""
    counts = Counter(row["verdict"] for row in compared_rows(rows))
    if counts.total() <= OVERVIEW_FROM:
        return ""
    verdicts = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
    return f"{prefix} {format_count(counts.total(), 'comparison')}: {', '.join(verdicts)}."


def list_or_count(arms: Sequence[str]) -> str:
    """Return the names of few arms, or of arms with short names, or else their number."""
    names = "; ".join(arms)
    return names if len(arms) <= 3 or len(names) <= LONGEST_LIST else f"{len(arms):,} arms"


def _no_values_sentence(row: Row, baseline: str = "") -> str:
    yet = " yet" * any(row[status] for status in OPEN)
    return f"no trial of {row['arm']}{baseline} can be judged{yet} ({format_status_counts(row)})."


def describe_above_or_below(difference: float, scale: Scale, decimals: int) -> str:
    """Format a difference as ``3.1 points below``, before the name of what it is from."""
    if difference == 0:
        return "level with"
    amount, direction = scale.amount(difference, decimals), "above" if difference > 0 else "below"
    if float(scale.number(abs(difference), decimals)) == 0:
        amount = f"less than {scale.amount(10.0**-decimals / scale.factor, decimals)}"
    return f"{amount} {direction}"


def _no_test_clause(row: Row) -> str:
    if row["pairs"] == 1 or row["n"] == 1:
        return "one seed has no spread"
    if row["collapsed_pairs"]:
        cause = "tuned arms" if row["choice_sd"] else "other splits"
        return f"collapsed seeds of {cause} leave no test"
    return "there are too few values, or none that differ,"


def _correction_clause(row: Row, analysis: Analysis) -> str:
    number = "two" if row["looks"] == 2 else row["looks"]
    looks = f"{number} looks" if row["looks"] > 1 else ""
    family = format_count(row["family"], "comparison")
    if not is_corrected(row["family"], analysis):
        alone = f", not corrected for {family}" if row["family"] > 1 else ""
        return f"{f', for {looks}' if looks else ''}{alone}"
    added = ", those added later included" if row["registered"] is False else ""
    return f", corrected for {family}{f' and {looks}' if looks else ''}{added}"
