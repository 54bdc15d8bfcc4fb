"""Telling a real loss from chance: one verdict for every cell, an arm and a metric.

With d the candidate's values less the baseline's at equal seeds, signed so that a drop is negative:

- ``regressed``: the one-sided test of "no drop" rejects after Holm's correction over all cells, and the mean drop is
  at least ``min_abs``, for many cells of few seeds would otherwise be told apart by tiny drops of tiny spread.
- ``pass``: the test of "a drop of the margin, or more" rejects.  All cells have to, so each may be tested at ``alpha``
  itself (Berger's intersection-union test), and the chance that a change worse than the margin passes is at most alpha.
- ``inconclusive``: neither.  What the test could have found, and the seeds that an unchanged model would need in order
  to pass, are said.

Values that are all equal pass as ``identical``, whatever their spread.  Where the differences have less spread than the
steps of the metric explain (q / sqrt 6 for the difference of two values rounded to q), they are given that.  Seeds that
were lost have no value, and none is better than the worst: what the others show to have regressed has regressed, and
nothing passes.

Reference: Holm (1979), Scand. J. Statist. 6, 65-70; Berger (1982), Technometrics 24, 295-300.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from vitlab import statistics
from vitlab.spec.check import Goal
from vitlab.statistics.student import t_quantile

Verdict = Literal["pass", "regressed", "inconclusive"]
Against = Literal["baseline", "anchor"]
NAN = math.nan
FEWEST = 3  #: seeds below which nothing is judged
MOST = 200  #: seeds beyond which nobody is told to go


@dataclass(frozen=True)
class Pair:
    """What a cell is judged by."""

    arm: str
    metric: str
    goal: Goal
    old: Mapping[int, float]  #: seed to value, of the baseline
    new: Mapping[int, float]  #: of the candidate
    margin: float
    min_abs: float
    quantum: float = 0.0  #: the smallest step of the metric, 0 where it has none
    against: Against = "baseline"
    lost: int = 0  #: seeds that diverged, or came to no finite value, and did not in the baseline
    refused: str = ""  #: why it is not judged, if it is not
    no_sample: str = (
        ""  #: why chance cannot be told from its seeds, if it cannot; what is identical passes all the same
    )


@dataclass(frozen=True)
class Cell:
    """A cell, judged.  ``drop`` is positive where the candidate is worse; NaN stands for what was not computed."""

    arm: str
    metric: str
    against: Against
    verdict: Verdict
    reason: str
    n: int
    test: str
    old: float = NAN  #: means
    new: float = NAN
    drop: float = NAN
    se: float = NAN  #: standard error of the drop
    worst: float = NAN  #: upper bound of the drop at level 1 - alpha
    p: float = NAN
    p_corrected: float = NAN
    margin: float = NAN
    min_abs: float = NAN
    df: float = NAN  #: degrees of freedom of ``se``
    alpha: float = NAN
    family: int = 1  #: cells that are judged together

    @property
    def detectable(self) -> float:
        """The drop that is found with 80 % power, at the level that the first cell of the family has to pass."""
        if not self.se > 0:
            return NAN
        return smallest_found(self.se, self.df, self.margin, self.min_abs, self.alpha, self.family)

    @property
    def needs(self) -> int | None:
        """Seeds with which an unchanged model passes with 80 % power; None beyond ``MOST``, or where it is unknown."""
        if self.test != "paired t":
            return None
        return seeds_to_pass(self.se * math.sqrt(self.n), self.margin, self.alpha)


def pooled_sd(samples: Iterable[Sequence[float]]) -> float:
    """Standard deviation within samples; 0 where none has two values."""
    squares, df = 0.0, 0
    for values in samples:
        if len(values) > 1:
            squares += float(np.var(values, ddof=1)) * (len(values) - 1)
            df += len(values) - 1
    return math.sqrt(squares / df) if df else 0.0


def judge(family: Sequence[Pair], alpha: float = 0.05) -> list[Cell]:
    """Judge every cell of a family, in the order given."""
    cells = [_tested(pair, alpha) for pair in family]
    corrected = statistics.adjust_p_values([cell.p for cell in cells])
    return [
        _decided(replace(cell, p_corrected=p, family=len(cells)), pair, alpha)
        for cell, p, pair in zip(cells, corrected, family, strict=True)
    ]


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of them: what has regressed anywhere has regressed, and only what passes everywhere passes."""
    found = set(verdicts)
    return "regressed" if "regressed" in found else "inconclusive" if "inconclusive" in found else "pass"


def chance_to_find(
    drop: float, se: float, df: float, margin: float, min_abs: float, alpha: float, family: int = 1
) -> float:
    """The probability that a cell whose true drop is ``drop`` has regressed, at the first step of Holm's.

    Given the spread that is estimated, three things ask for a mean drop beyond a bound: that the test rejects, that the
    drop is as large as ``min_abs``, and that one of ``margin`` is not ruled out.
    """
    from scipy.special import chdtri, ndtr

    shares = (np.arange(2000) + 0.5) / 2000
    found = se * np.sqrt(chdtri(df, shares) / df)
    rejects, passes = t_quantile(1 - alpha / family, df) * found, margin - t_quantile(1 - alpha, df) * found
    return float(ndtr((drop - np.maximum(np.maximum(rejects, passes), min_abs)) / se).mean())


def smallest_found(
    se: float, df: float, margin: float, min_abs: float, alpha: float, family: int, chance: float = 0.8
) -> float:
    """The smallest true drop that is found with the given chance, see :func:`chance_to_find`."""
    from scipy.optimize import brentq

    def lacks(drop: float) -> float:
        return chance_to_find(drop, se, df, margin, min_abs, alpha, family) - chance

    high = max(margin, min_abs) + se
    while lacks(high) < 0:
        high *= 2
    return float(brentq(lacks, 0.0, high))


def chance_to_pass(n: int, sd: float, margin: float, alpha: float, correlation: float = 0.0) -> float:
    """The probability that an unchanged model passes a cell.

    Args:
        n: seeds.
        sd: standard deviation from seed to seed.
        margin: of the cell.
        alpha: of the test.
        correlation: between old and new values at one seed; 0 if any rounding has changed, which is soon like another
            seed (arXiv:2103.04514).
    """
    se = sd * math.sqrt(2 * (1 - correlation) / n)
    if n < FEWEST:
        return 0.0
    return statistics.power(margin, se, n - 1, 2 * alpha) if se > 0 else 1.0


def chance_in_two_looks(first: int, second: int, sd: float, margin: float, alpha: float, draws: int = 20_000) -> float:
    """As :func:`chance_to_pass`, if after ``first`` seeds what has not passed is given ``second``; simulated."""
    d = np.random.default_rng(0).normal(0.0, sd * math.sqrt(2), (draws, second))
    passed = np.zeros(draws, dtype=bool)
    for n in (first, second):
        se = d[:, :n].std(1, ddof=1) / math.sqrt(n)
        passed |= d[:, :n].mean(1) + t_quantile(1 - alpha, n - 1) * se < margin
    return float(passed.mean())


def seeds_to_pass(sd_of_differences: float, margin: float, alpha: float, chance: float = 0.8) -> int | None:
    """The fewest seeds with which an unchanged model passes a cell with a given chance; None beyond ``MOST``."""
    sd = sd_of_differences / math.sqrt(2)
    too_few, enough = FEWEST - 1, MOST
    if chance_to_pass(MOST, sd, margin, alpha) < chance:
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if chance_to_pass(middle, sd, margin, alpha) >= chance:
            enough = middle
        else:
            too_few = middle
    return enough


# -- how it is done ---------------------------------------------------------------------------------------------------


def _tested(pair: Pair, alpha: float) -> Cell:
    """The cell with its p value, still without a verdict."""
    sign = 1.0 if pair.goal == "max" else -1.0
    common = sorted(pair.old.keys() & pair.new.keys())
    if len(common) >= FEWEST or not (len(pair.old) >= FEWEST and len(pair.new) >= FEWEST):
        old = np.array([pair.old[seed] for seed in common])
        new = np.array([pair.new[seed] for seed in common])
        d = sign * (new - old)
        n, df, test = len(common), len(common) - 1.0, "paired t"
        sd = _sd(d, pair, old, new)
        se = sd / math.sqrt(n) if n else NAN
    else:
        old, new = np.array([*pair.old.values()]), np.array([*pair.new.values()])
        welch = statistics.welch_t_test([*pair.new.values()], [*pair.old.values()], alpha)
        floor = pair.quantum * math.sqrt((1 / len(old) + 1 / len(new)) / 12)
        n, test = min(len(old), len(new)), "Welch t"
        se = max(welch.se, floor) if welch.se > 0 else floor
        df = welch.df if welch.df > 0 else n - 1.0
    cell = Cell(pair.arm, pair.metric, pair.against, "inconclusive", "", n, test, margin=pair.margin)
    cell = replace(cell, min_abs=pair.min_abs, alpha=alpha)
    if pair.refused:
        return replace(cell, test="none", reason=pair.refused)
    if not n:
        return replace(cell, test="none", reason="no seed has a value on both sides")
    cell = replace(cell, old=float(old.mean()), new=float(new.mean()), drop=float(sign * (old.mean() - new.mean())))
    if n < FEWEST:
        return replace(cell, test="none", reason=f"{n} seeds are too few to judge; {FEWEST} are the fewest")
    if test == "paired t" and not d.any():
        return replace(cell, test="identical", worst=0.0, p=1.0)
    if pair.no_sample:
        return replace(cell, test="none", reason=pair.no_sample)
    if se == 0:
        # Equal differences of a metric without steps: nothing to measure chance by but their signs.
        p = 2.0**-n if cell.drop > 0 else 1.0
        return replace(cell, test="sign flip", worst=cell.drop, p=p)
    from scipy.special import stdtr

    worst = cell.drop + t_quantile(1 - alpha, df) * se
    return replace(cell, p=float(stdtr(df, -cell.drop / se)), se=se, df=df, worst=worst)


def _sd(d: np.ndarray, pair: Pair, old: np.ndarray, new: np.ndarray) -> float:
    """Standard deviation of differences, no less than the steps of the metric give them, 0 if only rounding is left."""
    if len(d) < 2:
        return NAN
    sd = float(d.std(ddof=1))
    scale = max(float(np.abs(old).max()), float(np.abs(new).max()))
    return max(sd if sd > 1e-12 * scale else 0.0, pair.quantum / math.sqrt(6))


def _decided(cell: Cell, pair: Pair, alpha: float) -> Cell:
    """The cell with its verdict."""
    found = _of_values(cell, pair, alpha)
    if not pair.lost or pair.refused:
        return found
    tried = pair.lost + len(pair.new)
    said = f"{pair.lost} of {tried} seeds diverged, or came to no number, and did not in the {pair.against}"
    if found.verdict == "regressed":
        return replace(found, reason=f"{found.reason}; {said}")
    return replace(found, verdict="regressed" if 2 * pair.lost > tried else "inconclusive", reason=said)


def _of_values(cell: Cell, pair: Pair, alpha: float) -> Cell:
    """The cell with the verdict of the values that there are."""
    if cell.reason:
        return cell
    if cell.test == "identical":
        return replace(cell, verdict="pass", reason="identical")
    rejected = cell.p_corrected < alpha
    if cell.worst < pair.margin:
        note = "a drop that is real, and within the margin" if rejected else "no drop as large as the margin"
        return replace(cell, verdict="pass", reason=note)
    if rejected and cell.drop >= pair.min_abs:
        return replace(cell, verdict="regressed", reason=f"p {cell.p_corrected:.2g} after Holm")
    why = f"a drop of {pair.margin:.3g} cannot be ruled out"
    if rejected:
        why += f", and one of {cell.drop:.2g} is too small to count"
    return replace(cell, reason=why)
