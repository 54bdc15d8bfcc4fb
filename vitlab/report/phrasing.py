"""Numbers and sentences: how a result is said.

Works on plain rows (an arm's row of :func:`vitlab.report.comparison.summary` as a mapping, None where there is no
value), so that a stored report is said again without pandas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vitlab.report.verdict import Row as Row
from vitlab.report.verdict import Verdict, is_equivalent, of_complete_pairs
from vitlab.spec import Analysis

MINUS, TIMES, DASH = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
FEW = 12  #: comparisons that are read one by one; of more, an overview comes first
SHARES = frozenset({"accuracy", "top", "ece", "miou", "iou", "precision", "recall", "f1"})
"""Words in the name of a metric that is a share of one."""


@dataclass(frozen=True)
class Scale:
    """How the judged metric is shown.  Shares of one are shown in percent, and their differences in points."""

    metric: str
    factor: float
    unit: str  #: of a value: ``%`` or nothing
    points: str  #: of a difference: ``points`` or nothing

    @classmethod
    def of(cls, metric: str) -> Scale:
        name = metric.partition("/")[2]
        share = not SHARES.isdisjoint(word if word in SHARES else word.rstrip("0123456789") for word in name.split("_"))
        return cls(metric, 100.0, "%", "points") if share else cls(metric, 1.0, "", "")

    @property
    def title(self) -> str:
        """``val accuracy (%)``."""
        name = self.metric.replace("/", " ")
        return f"{name} ({self.unit})" if self.unit else name

    def decimals(self, widths: Sequence[float | None]) -> int:
        """Decimals that suit intervals of these half-widths: one figure that stands, one that wavers."""
        known = sorted(self.factor * width for width in widths if width is not None and width > 0)
        least = 1 if self.unit else 0
        if not known:
            return 1 if self.unit else 4
        return min(6, max(least, math.ceil(-math.log10(known[len(known) // 2] / 3))))

    def number(self, value: float | None, decimals: int, *, sign: bool = False) -> str:
        """A value of the metric without its unit; a dash where there is none."""
        if value is None:
            return DASH
        said = f"{self.factor * value:{'+' if sign else ''}.{decimals}f}"
        if float(said) == 0:
            said = f"{0:.{decimals}f}"
        return said.replace("-", MINUS)

    def end(self, value: float, decimals: int) -> str:
        """An end of an interval: with more digits where rounding would hide on which side of 0 it lies."""
        while decimals < 9 and value != 0 and float(f"{self.factor * value:.{decimals}f}") == 0:
            decimals += 1
        return self.number(value, decimals)

    def amount(self, value: float, decimals: int) -> str:
        """The size of a difference with its unit: ``3.1 points``."""
        return f"{self.number(abs(value), decimals)} {self.points}".rstrip()


def widths(rows: Sequence[Row], low: str, high: str) -> list[float | None]:
    """Half-widths of the intervals of all arms."""
    return [None if row[low] is None or row[high] is None else (row[high] - row[low]) / 2 for row in rows]


def p_value(p: float | None, alpha: float) -> str:
    """``< 0.001``, ``0.034``, ``0.61``; more digits where rounding would hide on which side of alpha it lies."""
    if p is None:
        return DASH
    most = max(3, math.ceil(-math.log10(alpha)))  # decimals: what is smaller than the last of them is below alpha
    if p < 10.0**-most:
        return f"< {10.0**-most:.{most}f}"
    digits = 2 if p >= 0.1 else 3 if p >= 0.001 else most
    while digits < most + 3 and (round(p, digits) <= alpha) != (p <= alpha):
        digits += 1
    return f"{p:.{digits}f}"


def percent(share: float) -> str:
    """``95 %``."""
    return f"{100 * share:g} %"


def interval_name(row: Row, analysis: Analysis, alpha: float | None = None) -> str:
    """``95 % interval``; ``simultaneous`` where it holds for several comparisons at once."""
    several = row["family"] is not None and row["family"] > 1 and analysis.correction != "none"
    return f"{'simultaneous ' * several}{percent(1 - (alpha or analysis.alpha))} interval"


def count(n: int, what: str) -> str:
    """``1 seed``, ``5 seeds``."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def compact(n: float | None) -> str:
    """``950``, ``1.23 M``: three figures and a prefix."""
    if n is None:
        return DASH
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= factor * 0.9995:
            return f"{n / factor:#.3g}".rstrip(".") + f" {prefix}"
    return f"{n:g}"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 07 min``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole % 60:02} s" if minutes else f"{seconds:.3g} s"


def undone(row: Row, analysis: Analysis) -> Verdict | None:
    """Return the verdict of the complete pairs, if seeds that diverged or failed have undone it."""
    if not row["broken"] or row["verdict"] == Verdict.REFUSED:
        return None
    complete = of_complete_pairs(row, analysis)
    return complete if complete != row["verdict"] else None


def answer(row: Row, analysis: Analysis, scale: Scale, decimals: int) -> str:
    """One sentence about one comparison."""
    said = _sentence(row, analysis, scale, decimals)
    if row["verdict"] in (Verdict.CANNOT_TELL, Verdict.REFUSED):
        return f"{row['verdict']}: {said}"
    hedges = [*(["preliminary"] if row["awaited"] else []), *(["exploratory"] if row["exploratory"] else [])]
    return f"{' and '.join(hedges)}: {said}" if hedges else said


def _sentence(row: Row, analysis: Analysis, scale: Scale, decimals: int) -> str:
    arm, baseline, found = row["arm"], row["baseline"], row["verdict"]
    if row["n"] == 0:
        return _none_of(row)
    if row["difference"] is None:
        return f"{baseline}, with which {arm} is compared, has no trial that can be judged."
    if found == Verdict.SAME:
        return f"{arm} and {baseline} reached the same {scale.metric} at each of {count(row['pairs'], 'seed')}."
    said = f"{arm} is {_distance(row['difference'], scale, decimals)} {baseline}"
    if analysis.goal == "min" and found in (Verdict.BETTER, Verdict.WORSE):
        said += f", which is {found}"
    if row["refused"]:
        return f"{said}, but {row['refused']}."
    if row["test"] == "none":
        return f"{said}, and {_too_few(row)} to judge that by."
    over = _correction(row, analysis)
    if row["test"] == "sign flip":
        said += (
            f" at each of {count(row['pairs'], 'seed')} alike, which gives no interval"
            f" (sign-flip p {_equals(row['p_corrected'], analysis.alpha)}{over})"
        )
        return f"{said}{_with_chance(row, analysis, scale, decimals)}."
    low, high = (scale.end(row[end], decimals) for end in ("difference_low", "difference_high"))
    said += f" ({interval_name(row, analysis)} {low} to {high}, p {_equals(row['p_corrected'], analysis.alpha)}{over})"
    if analysis.margin is not None and row["p_equal"] is not None:
        low, high = (scale.number(row[end], decimals) for end in ("equal_low", "equal_high"))
        shown = "" if is_equivalent(row, analysis) else "not "
        said += (
            f"; {shown}shown to be equivalent within {scale.amount(analysis.margin, decimals)} "
            f"({interval_name(row, analysis, 2 * analysis.alpha)} {low} to {high})"
        )
    said += _with_chance(row, analysis, scale, decimals)
    if found != Verdict.CANNOT_TELL or undone(row, analysis) is not None:
        return f"{said}."
    said += f"; {count(row['pairs'] or row['n'], 'seed')} could have detected"
    said += f" {scale.amount(row['detectable'], decimals)} with 80 % power"
    if row["seeds_needed"] is not None and row["seeds_needed"] > row["pairs"]:
        wanted = (
            "a difference of this size"
            if analysis.margin is None
            else f"a difference of {scale.amount(analysis.margin, decimals)}"
        )
        said += f", and {wanted} needs {count(round(row['seeds_needed']), 'seed')}"
    return f"{said}."


def _with_chance(row: Row, analysis: Analysis, scale: Scale, decimals: int) -> str:
    """The comparison again, where seeds diverged or failed."""
    if not row["broken"]:
        return ""
    lost = f"{count(row['broken'], 'seed')} that diverged or failed"
    if row["chance_difference"] is None:
        return f"; {lost} cannot be accounted for, because what chance reaches in {scale.metric} is not known"
    there = f"; with chance ({scale.number(row['chance'], 1 if scale.unit else 3)} {scale.unit}".rstrip() + ")"
    there += f" in the place of {lost}, {_distance(row['chance_difference'], scale, decimals)}"
    if row["chance_p"] is None:
        return f"{there}, which cannot be judged"
    said = f"p {_equals(row['chance_p'], analysis.alpha)}"
    if row["chance_low"] is not None:
        low, high = (scale.end(row[end], decimals) for end in ("chance_low", "chance_high"))
        said = f"{interval_name(row, analysis)} {low} to {high}, {said}"
    return f"{there} ({said})"


def reached(row: Row, analysis: Analysis, scale: Scale, decimals: int) -> str:
    """One sentence about one arm where nothing is compared."""
    if row["n"] == 0:
        return _none_of(row)
    said = f"{row['arm']} reaches {scale.number(row['mean'], decimals)} {scale.unit}".rstrip() + f" {scale.metric}"
    if row["low"] is None:
        return f"{said} with one seed, which gives no interval."
    low, high = (scale.number(row[end], decimals) for end in ("low", "high"))
    return f"{said} ({percent(1 - analysis.alpha)} interval {low} to {high}, {count(row['n'], 'seed')})."


def states(row: Row) -> str:
    """``3 failed, 2 missing``: what became of the trials of an arm, or of a study."""
    names = ("done", "diverged", "failed", "running", "missing")
    return ", ".join(f"{row[name]} {name}" for name in names if row[name]) or "none planned"


def answers(rows: Sequence[Row], analysis: Analysis) -> list[str]:
    """One sentence per comparison; where nothing is compared, one per arm."""
    scale = Scale.of(analysis.metric)
    compared = [row for row in rows if row["baseline"] is not None]
    if compared:
        decimals = scale.decimals(widths(compared, "difference_low", "difference_high"))
        return [answer(row, analysis, scale, decimals) for row in compared]
    decimals = scale.decimals(widths(rows, "low", "high"))
    return [reached(row, analysis, scale, decimals) for row in rows]


def overview(rows: Sequence[Row]) -> str:
    """Return the number of comparisons per verdict; nothing where there are so few that each is read."""
    counts = Counter(row["verdict"] for row in rows if row["baseline"] is not None)
    if counts.total() <= FEW:
        return ""
    verdicts = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
    return f"Of {count(counts.total(), 'comparison')}: {', '.join(verdicts)}."


def _none_of(row: Row) -> str:
    """That nothing of an arm can be judged, and whether that may change."""
    yet = " yet" if row["running"] or row["missing"] else ""
    return f"no trial of {row['arm']} can be judged{yet} ({states(row)})."


def _distance(difference: float, scale: Scale, decimals: int) -> str:
    if difference == 0:
        return "level with"
    said, where = scale.amount(difference, decimals), "above" if difference > 0 else "below"
    if float(scale.number(abs(difference), decimals)) == 0:
        said = f"less than {scale.amount(10.0**-decimals / scale.factor, decimals)}"
    return f"{said} {where}"


def _too_few(row: Row) -> str:
    if row["pairs"] == 1 or row["n"] == 1:
        return "one seed has no spread"
    return "there are too few values, or none that differ,"


def _equals(p: float | None, alpha: float) -> str:
    said = p_value(p, alpha)
    return said if said.startswith("<") else f"= {said}"


def _correction(row: Row, analysis: Analysis) -> str:
    looks = " and two looks" if row["looks"] == 2 else ""
    family = count(row["family"], "comparison")
    if row["family"] < 2 or analysis.correction == "none":
        alone = f", not corrected for {family}" if row["family"] > 1 else ""
        return f"{', for two looks' if looks else ''}{alone}"
    return f" after {analysis.correction.capitalize()} over {family}{looks}"
