"""Statistical tier: one verdict for every cell, which is an arm and a metric, and one for the count of lost trainings.

Let d be the candidate's values minus the baseline's at equal seeds, signed so that a drop is negative:

- ``regressed``: the one-sided test of "no drop" rejects after Bonferroni's correction over the family, and the mean
  drop is at least ``min_abs``; otherwise tiny drops of tiny spread would be significant among many cells of few seeds.
- ``pass``: the test of "a drop of the margin, or more" rejects.  All cells have to, so each may be tested at ``alpha``
  itself (Berger's intersection-union test), and the chance that a change worse than the margin passes is at most alpha.
- ``inconclusive``: neither.

Values that are all equal pass as ``identical``.  The standard deviation of the differences is at least what the
metric's rounding causes (q / sqrt 6 for the difference of two values rounded to q).

A training that was lost has no value, and the value of one that collapsed would hide a drop of the others in its
spread.  Both are left out of d.  A cell with a larger share of them than in the baseline does not pass.  Their number
over all arms is judged by Boschloo's exact test, one-sided, which belongs to the family as soon as there is one such
training.  It compares the seeds that both sides have, so that an arm with more seeds has no more weight on one side.

Where all seeds of an arm collapse, their own median shows no collapse, and d has the drop.  If other trainings come to
nothing by chance, so may these: p is then at least the share of such trainings elsewhere, to the power of the seeds.

Reference: Berger (1982), Technometrics 24, 295-300; Boschloo (1970), Statistica Neerlandica 24, 1-35.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtr, ndtri, stdtr, stdtrit

from vitlab.comparison.arrays import MIN_SEEDS
from vitlab.spec.choice import Goal
from vitlab.statistics import power, replicates
from vitlab.statistics.replicates import NAN, NORMAL_MAD, Floats, Ints, Mask, finite_median, moments, rounding_error

Verdict = Literal["pass", "inconclusive", "differs", "regressed"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the best to the worst; ``differs`` is the exact tier's, which knows no better and worse."""
PASS, INCONCLUSIVE, _, REGRESSED = range(4)
OUTLIER_FACTOR = 3.0  #: largest pooled standard deviation, in robust ones; more is due to outliers
MAX_SEEDS = 200  #: largest number of seeds that is recommended
TARGET_CHANCE = 0.8  #: the probability with which an unchanged model should pass, and a drop counts as detectable


@dataclass(frozen=True)
class Finding:
    """The result of one check of an arm or of the plan."""

    arm: str  #: empty for the plan
    check: str
    verdict: Verdict
    sentence: str = ""
    seconds: float = NAN  #: that it took


@dataclass(frozen=True)
class Pair:
    """The values, thresholds and exclusions by which a cell is judged."""

    arm: str
    metric: str
    goal: Goal
    old: Mapping[int, float]  #: seed to value, of the baseline
    new: Mapping[int, float]  #: of the candidate
    margin: float
    min_abs: float
    quantum: float = 0.0  #: the smallest step of the metric, 0 where it has none
    lost: Sequence[frozenset[int]] = (frozenset(), frozenset())
    """Seeds without a finite value, of the baseline and of the candidate."""
    refused: str = ""  #: the reason why the cell is not judged
    no_sample: str = ""  #: the reason why its seeds are no sample; identical values pass nevertheless
    seconds: float = NAN  #: that training the candidate's seeds took

    @property
    def sign(self) -> int:
        """Return 1 if larger values are better, -1 if smaller ones are."""
        return 1 if self.goal == "max" else -1


@dataclass(frozen=True)
class Cell:
    """A judged cell.  ``worse_by`` is positive if the candidate is worse; NaN marks what was not computed."""

    arm: str
    metric: str
    verdict: Verdict
    reason: str
    n: int
    test: str
    old: float = NAN  #: means
    new: float = NAN
    worse_by: float = NAN
    se: float = NAN  #: standard error of ``worse_by``
    worst: float = NAN  #: upper bound of ``worse_by`` at level 1 - alpha
    p: float = NAN
    p_adjusted: float = NAN
    margin: float = NAN
    min_abs: float = NAN
    alpha: float = NAN
    family: int = 1  #: tests that are corrected together
    lost_or_collapsed: tuple[int, int] = (0, 0)  #: lost and collapsed seeds of the baseline and of the candidate
    seeds: tuple[int, int] = (0, 0)  #: seeds among which these are
    collapsed: tuple[int, int] = (0, 0)  #: collapsed seeds among them
    seconds: float = NAN  #: that training the candidate's seeds took


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts."""
    return max(verdicts, key=VERDICTS.index, default="pass")


def judge_family(family: Sequence[Pair], alpha: float = 0.05) -> tuple[list[Cell], list[Finding]]:
    """Return the cells of a family, in the order given, and a finding for the count of lost and collapsed trainings."""
    if not family:
        return [], []
    seeds = sorted({seed for pair in family for side in (pair.old, pair.new, *pair.lost) for seed in side})
    values_C2N = np.array([replicates.values_to_array((pair.old, pair.new), seeds) * pair.sign for pair in family])
    lost_C2N = np.array([[np.isin(seeds, [*side]) for side in pair.lost] for pair in family])
    trainings = list(dict.fromkeys(pair.arm for pair in family))
    margin, min_abs, quantum = np.array([(pair.margin, pair.min_abs, pair.quantum) for pair in family]).T
    cells = Cells(
        margin,
        min_abs,
        quantum,
        trainings=np.array([trainings.index(pair.arm) for pair in family]),
        counted=np.array([not pair.refused and not pair.no_sample for pair in family]),
    )
    judgements = judge_arrays(values_C2N[None], lost_C2N[None], cells, alpha)
    decisions = [_make_cell(pair, judgements, place, alpha) for place, pair in enumerate(family)]
    (old, new), (seeds_old, seeds_new) = judgements.count_lost_or_collapsed[0], judgements.count_seeds[0]
    if not old + new:
        return decisions, []
    sentence = f"{new} of {seeds_new} were lost or collapsed, {old} of {seeds_old} in the baseline"
    p = judgements.count_p[0]
    test = f" (Boschloo's exact test, adjusted p {p:.2g})" if p < 1 else ""
    return decisions, [Finding("", "trainings", VERDICTS[judgements.count_verdict[0]], sentence + test)]


def _make_cell(pair: Pair, judgements: JudgedCells, index: int, alpha: float) -> Cell:
    def of_cell(name: str) -> Any:
        return getattr(judgements, name)[0, index].tolist()

    n, identical = of_cell("pairs"), of_cell("identical")
    is_judged = not pair.refused and (identical or (n >= MIN_SEEDS and not pair.no_sample))
    by_t = is_judged and not identical and of_cell("se") > 0
    # A refused cell has no means, such as of two data sets, which nobody should subtract.
    old, new = (NAN if pair.refused else pair.sign * mean + 0.0 for mean in of_cell("means"))  # 0.0 in place of -0.0
    same: dict[str, Any] = {name: getattr(pair, name) for name in ("arm", "metric", "margin", "min_abs", "seconds")}
    same |= {name: of_cell(name) if is_judged else NAN for name in ("worst", "p", "p_adjusted")}
    same |= {name: tuple(of_cell(name)) for name in ("lost_or_collapsed", "seeds", "collapsed")}
    cell = Cell(
        verdict=VERDICTS[of_cell("verdict")] if is_judged else "inconclusive",
        reason="",
        n=n,
        test="none" if not is_judged else "identical" if identical else "paired t" if by_t else "sign flip",
        old=old,
        new=new,
        worse_by=NAN if pair.refused else of_cell("drop"),
        se=of_cell("se") if by_t else NAN,
        alpha=alpha,
        family=int(judgements.family[0]),
        **same,
    )
    more = ""
    if of_cell("has_more"):
        (old, new), (seeds_old, seeds_new) = cell.lost_or_collapsed, cell.seeds
        more = (
            f"{new} of {seeds_new} trainings were lost or collapsed ({cell.collapsed[1]} collapsed), "
            f"{old} of {seeds_old} in the baseline"
        )
    return replace(cell, reason=_verdict_reason(cell, pair, more))


def _verdict_reason(cell: Cell, pair: Pair, more: str) -> str:
    """Return the reason of the verdict; ``more`` says that the candidate lost more trainings, if it did."""
    if pair.refused or (more and cell.verdict != "regressed"):
        return pair.refused or more
    if cell.test == "none" and not cell.n:
        return "no seed has a value in both the baseline and this run"
    if cell.test == "none" and cell.n < MIN_SEEDS:
        few = (
            "seeds are left to compare, which are too few"
            if any(cell.lost_or_collapsed)
            else "seeds are too few to judge"
        )
        return f"{cell.n} {few}; set seeds to at least {MIN_SEEDS + max(cell.lost_or_collapsed)}, and accept them"
    if cell.test in ("none", "identical"):
        return pair.no_sample if cell.test == "none" else "identical"
    is_significant = cell.p_adjusted < cell.alpha
    if cell.worst < cell.margin:
        return "significantly worse, but within the margin" if is_significant else "not worse by the margin"
    if cell.verdict == "regressed":
        return f"adjusted p {cell.p_adjusted:.2g}{f'; {more}' if more else ''}"
    significant = "significantly worse, but by less than min_abs; " * is_significant
    return f"{significant}it may be worse by the margin; more seeds tell, and --plan says how many"


def chance_to_pass(n: int, sd: float, margin: float, alpha: float) -> float:
    """Return the probability that ``n`` seeds of an arm show that an unchanged model has no drop of the margin.

    Old and new values at one seed are taken as independent: any change of rounding has the effect of another seed
    (arXiv:2103.04514).  ``sd`` is from seed to seed.
    """
    if n < MIN_SEEDS or margin <= 0:
        return 0.0
    se = sd * math.sqrt(2 / n)
    return power.t_test_power(margin, se, n - 1, 2 * alpha) if se > 0 else 1.0


def seeds_to_pass(sd: float, margin: float, alpha: float, chance: float = TARGET_CHANCE) -> int | None:
    """Return the fewest seeds by which an unchanged model passes with this probability; None above ``MAX_SEEDS``."""
    sizes = range(MIN_SEEDS, MAX_SEEDS + 1)
    place = bisect_left(sizes, chance, key=lambda n: chance_to_pass(n, sd, margin, alpha))
    return sizes[place] if place < len(sizes) else None


def detectable_drop(n: int, sd: float, margin: float, min_abs: float, alpha: float, family: int) -> float:
    """Return the drop that is found at ``TARGET_CHANCE``; infinite for too few seeds, NaN if they have no spread.

    A drop is found in one of ``family`` cells with ``n`` seeds if the cell regresses, see :func:`judge_arrays`.
    """
    if n < MIN_SEEDS or sd <= 0:
        return math.inf if n < MIN_SEEDS else NAN
    df, se = n - 1, sd * math.sqrt(2 / n)
    errors = se * ndtri((np.arange(4000) + 0.5) / 4000)  # of the mean, equally probable
    to_find, to_pass = se * stdtrit(df, [1 - alpha / family, 1 - alpha])

    def chance(drop: float) -> float:
        # For each measured drop, the measured standard error has to be small enough for significance, and too large
        # to pass; its square has a chi-squared distribution.
        observed = drop + errors
        most, least = np.maximum(observed, 0) / to_find, np.maximum(margin - observed, 0) / to_pass
        power = np.maximum(chdtr(df, df * most**2) - chdtr(df, df * least**2), 0)
        return float(np.mean(power * (observed >= min_abs)))

    # At two degrees of freedom, t grows with the root of 1 / alpha.
    far = 10 * max(margin, min_abs, sd) * family / alpha
    return float(brentq(lambda drop: chance(drop) - TARGET_CHANCE, 0.0, far))


# -- many studies at once, from arrays (studies, cells, sides, seeds) --------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """What is judged in every study of an array: cells C, each with the values of two sides at seeds N.

    Cells of several metrics share their trainings, so these are counted once.
    """

    margin: Floats  #: of each cell, or of each study and cell
    min_abs: Floats
    quantum: Floats
    trainings: Ints  #: the arm of each cell
    counted: Mask  #: cells whose trainings are counted and tested


@dataclass(frozen=True)
class JudgedCells:
    """The judged cells of studies (S, C), and the counts of all arms (S)."""

    pairs: Ints  #: seeds that neither side lost
    means: Floats  #: of the baseline and of the candidate (S, C, 2)
    identical: Mask
    drop: Floats  #: of the means, 0 within rounding
    se: Floats
    worst: Floats
    p: Floats
    p_adjusted: Floats
    has_more: Mask  #: whether the candidate lost a larger share
    verdict: Ints  #: place in ``VERDICTS``
    collapsed: Ints  #: (S, C, 2)
    lost_or_collapsed: Ints  #: lost and collapsed seeds of the baseline and of the candidate (S, C, 2)
    seeds: Ints  #: among these (S, C, 2)
    count_lost_or_collapsed: Ints  #: (S, 2)
    count_seeds: Ints  #: (S, 2)
    count_p: Floats  #: adjusted (S); NaN without lost and collapsed trainings
    count_verdict: Ints  #: (S)
    family: Ints  #: (S)


def judge_arrays(values_SC2N: Floats, lost_SC2N: Mask, cells: Cells, alpha: float) -> JudgedCells:
    """Judge every cell of every study, by the values of the baseline and of the candidate.

    They are signed so that larger is better, and NaN where there is none; lost seeds have no finite value.
    """
    collapsed_SC2N = _find_collapsed(values_SC2N)
    sound_SC2N = np.where(collapsed_SC2N, NAN, values_SC2N)
    n, drop, sd = moments(sound_SC2N[:, :, 0] - sound_SC2N[:, :, 1])
    rounding = rounding_error(sound_SC2N.reshape(*n.shape, -1))
    drop, sd = np.where(np.abs(drop) <= rounding, 0.0, drop), np.where(sd > rounding, sd, 0.0)
    both = np.isfinite(values_SC2N).all(axis=2)
    equal = (values_SC2N[:, :, 0] == values_SC2N[:, :, 1]) | ~both
    identical = equal.all(axis=2) & (both.sum(axis=2) >= MIN_SEEDS)
    with np.errstate(divide="ignore", invalid="ignore"):
        se = np.maximum(sd, cells.quantum / math.sqrt(6)) / np.sqrt(n)
        # Equal differences of a metric without steps have no spread; only their signs can be tested.
        p = np.where(se > 0, stdtr(n - 1, -drop / se), np.where(drop > 0, 0.5**n, 1.0))
        worst = drop + np.where(se > 0, stdtrit(n - 1, 1 - alpha) * se, 0.0)
    is_tested = cells.counted & (n >= MIN_SEEDS) & ~identical
    p = np.where(identical, 1.0, np.where(is_tested, p, NAN))
    worst = np.where(identical, 0.0, np.where(is_tested, worst, NAN))
    _, means, _ = moments(np.where(np.isfinite(sound_SC2N).all(axis=2, keepdims=True), sound_SC2N, NAN))

    present = np.isfinite(values_SC2N) | lost_SC2N
    lost_or_collapsed_SC2, seeds_SC2, sums, sizes = _count_lost(present, collapsed_SC2N | lost_SC2N, cells)
    # The probability that as many trainings of an arm all come to nothing, at the rate of the others.
    others = sizes.sum(axis=1, keepdims=True) - seeds_SC2[:, :, 1]
    bad = sums.sum(axis=1, keepdims=True) - lost_or_collapsed_SC2[:, :, 1]
    rate = np.clip((bad + 1) / (others + 1), 0.0, 1.0)
    p = np.maximum(p, np.where(bad > 0, rate ** np.maximum(n, 1), 0.0))
    family = n.shape[1] + (sums.sum(axis=1) > 0)
    p_adjusted = np.minimum(1.0, family[:, None] * p)
    count_p = np.minimum(1.0, family * _p_of_more_lost(sums, sizes))

    share_SC2 = lost_or_collapsed_SC2 / np.maximum(seeds_SC2, 1)
    count_share = sums / np.maximum(sizes, 1)
    has_more = cells.counted & (share_SC2[:, :, 1] > share_SC2[:, :, 0])
    with np.errstate(invalid="ignore"):
        passes = (identical | (worst < cells.margin)) & ~has_more
        regressed = (p_adjusted < alpha) & (drop >= cells.min_abs) & ~(worst < cells.margin)
        count_verdict = np.select(
            [count_p < alpha, count_share[:, 1] > count_share[:, 0]], [REGRESSED, INCONCLUSIVE], PASS
        )
    verdict = np.select([regressed, passes], [REGRESSED, PASS], INCONCLUSIVE)
    return JudgedCells(
        n, means, identical, drop, se, worst, p, p_adjusted, has_more, verdict, collapsed_SC2N.sum(axis=3),
        lost_or_collapsed_SC2, seeds_SC2, sums, sizes, count_p, count_verdict, family,
    )  # fmt: skip


def _find_collapsed(values_SC2N: Floats) -> Mask:
    """Return which seeds collapsed: by the other seeds of their side, or by the seeds of both sides together.

    The second rule finds two of three seeds that collapsed.  It compares equal numbers of both sides, so that a drop of
    all seeds of a side, which the test of means has to find, is no collapse.
    """
    s, c, _, n = values_SC2N.shape
    by_side = replicates.find_collapsed(values_SC2N.reshape(s * c, 2, n))
    common = np.where(np.isfinite(values_SC2N).all(axis=2, keepdims=True), values_SC2N, NAN)
    together = replicates.find_collapsed(common.reshape(s * c, 1, 2 * n))
    return np.asarray((by_side | together.reshape(by_side.shape)).reshape(values_SC2N.shape))


def _count_lost(present: Mask, lost_or_collapsed: Mask, cells: Cells) -> tuple[Ints, Ints, Ints, Ints]:
    """Return lost and collapsed trainings, and all, of each cell's arm (S, C, 2) and of all arms (S, 2)."""
    groups = [cells.trainings == training for training in np.unique(cells.trainings)]
    of_arm, is_bad = (
        np.stack([np.any(flags[:, group], axis=1) for group in groups], axis=1)
        for flags in (present, lost_or_collapsed)
    )  # (S, T, 2, N)
    common = np.all(of_arm, axis=2, keepdims=True)
    used = of_arm & (common | ~np.any(common, axis=3, keepdims=True))
    bad_ST2, all_ST2 = (used & is_bad).sum(axis=3), used.sum(axis=3)
    is_counted = np.array([cells.counted[group].any() for group in groups])
    sums, sizes = (n[:, is_counted].sum(axis=1) for n in (bad_ST2, all_ST2))
    return bad_ST2[:, cells.trainings], all_ST2[:, cells.trainings], sums, sizes


def _p_of_more_lost(sums: Ints, sizes: Ints) -> Floats:
    """Return the p of Boschloo's test that the candidate lost more (S); NaN if neither side lost any."""
    p = np.where(sums.sum(axis=1) > 0, 1.0, NAN)
    for study in np.flatnonzero(sums[:, 1] * sizes[:, 0] > sums[:, 0] * sizes[:, 1]):
        old, new = sums[study].tolist()
        p[study] = replicates.boschloo_p((old, new), tuple(sizes[study].tolist()))
    return p


def pooled_sd(values_SAN: Floats) -> Floats:
    """Return the pooled standard deviation within the arms of each study; 0 if none has two values."""
    # Distances to the median: the mean of equal values may differ from them by rounding.
    n, _, sd = moments(values_SAN - finite_median(values_SAN)[:, :, None])
    df = np.maximum(n - 1, 0)
    squares = np.where(df > 0, df * sd**2, 0.0).sum(axis=1)
    return np.asarray(np.sqrt(squares / np.maximum(df.sum(axis=1), 1)))


def capped_pooled_sd(values_SAN: Floats, sign: int) -> Floats:
    """Return the pooled standard deviation of the seeds that did not collapse, limited where a few outliers dominate.

    The limit is a multiple of the standard deviation that follows from the median distance to the median of an arm.
    """
    sound = np.where(replicates.find_collapsed(values_SAN, sign), NAN, values_SAN)
    pooled, n = pooled_sd(sound), np.isfinite(sound).sum(axis=2, keepdims=True)
    distances = np.abs(sound - finite_median(sound)[:, :, None]) * np.sqrt(n / np.maximum(n - 1, 1))
    robust = NORMAL_MAD * finite_median(np.where(n > 2, distances, NAN).reshape(len(sound), -1))
    return np.asarray(np.where(robust > 0, np.minimum(pooled, OUTLIER_FACTOR * robust), pooled))
