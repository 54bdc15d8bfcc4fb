"""Statistical tier: one verdict for every cell, which is an arm and a metric.

Let d be the candidate's values minus the baseline's at equal seeds, signed so that a drop is negative:

- ``regressed``: the one-sided test of "no drop" rejects after Holm's correction over all cells, and the mean drop is
  at least ``min_abs``; otherwise tiny drops of tiny spread would be significant among many cells of few seeds.
- ``pass``: the test of "a drop of the margin, or more" rejects.  All cells have to, so each may be tested at ``alpha``
  itself (Berger's intersection-union test), and the chance that a change worse than the margin passes is at most alpha.
- ``inconclusive``: neither.  The cell reports the drop that the test could have detected, and the seeds with which an
  unchanged model would pass.

Values that are all equal, those of collapsed seeds included, pass as ``identical``, whatever their spread.  The
standard deviation of the differences is at least that of the metric's rounding (q / sqrt 6 for the difference of two
values rounded to q).

Lost seeds have no value.  The values of collapsed seeds are far below the others, and would hide a drop of the others
in their spread.  Both are counted as seeds without a usable value, and d is of the other seeds alone.  A seed that
was lost and now collapses, or the reverse, changes nothing.  If they are a larger share of the candidate's seeds
than of the baseline's, a regression of the other seeds stands, and nothing passes.  The cell has also regressed if
the additional ones are more than half of its seeds, or significant by Boschloo's exact test.  Seeds have collapsed
far below the median of both sides, or of their own side, by bounds that treat both sides alike.  The tests of counts
are corrected on their own, with half of alpha; without such a test, the means have all of it.  A count is tested if
such seeds are enough for some split of them to have a p of 0.15.  That choice, like Tarone's, depends on their
number, which Boschloo's test does not take as given; at 0.15, all tests together keep alpha whatever the share of
such seeds.  The rule about more than half of the seeds is no test and not counted in that: of three seeds that
collapse by chance every other time, it alone finds 11 % regressed.

Reference: Holm (1979), Scand. J. Statist. 6, 65-70; Berger (1982), Technometrics 24, 295-300; Tarone (1990), Biometrics
46, 515-522; Boschloo (1970), Statistica Neerlandica 24, 1-35.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from vitlab import statistics
from vitlab.spec.choice import Goal
from vitlab.statistics.replicates import t_quantile

Verdict = Literal["pass", "regressed", "inconclusive"]
Against = Literal["baseline", "anchor"]
NAN = math.nan
MIN_SEEDS = 3  #: fewest seeds of a judged cell
COLLAPSED_SD = 8.0  #: robust standard deviations below the median at which a training counts as collapsed
OUTLIER_FACTOR = 3.0  #: largest pooled standard deviation, in robust ones; more is due to outliers
MAX_SEEDS = 200  #: largest number of seeds that is recommended
BEST_P = 0.15  #: a count is tested if as many lost and collapsed seeds can have such a p


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
    against: Against = "baseline"
    failed: tuple[int, int] = (0, 0)  #: seeds without a finite value, of the baseline and of the candidate
    refused: str = ""  #: the reason why the cell is not judged
    no_sample: str = ""  #: the reason why its seeds are no sample; identical values pass nevertheless


@dataclass(frozen=True)
class Cell:
    """A judged cell.  ``drop`` is positive if the candidate is worse; NaN marks what was not computed."""

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
    family: int = 1  #: cells that are judged together; twice as many if their counts have half of alpha
    broken: tuple[int, int] = (0, 0)  #: lost and collapsed seeds of the baseline and of the candidate
    collapsed: tuple[int, int] = (0, 0)  #: collapsed seeds among them, which are left out of the means
    p_broken: float = NAN  #: Boschloo's one-sided p that the candidate has more of them, corrected

    @property
    def detectable(self) -> float:
        """The drop that is detected with 80 % power, at the level that the first cell of the family has to pass."""
        if not self.se > 0:
            return NAN
        return smallest_detectable_drop(self.se, self.df, self.margin, self.min_abs, self.alpha, self.family)

    @property
    def needs(self) -> int | None:
        """Seeds with which an unchanged model passes with 80 % power; None if unknown or above ``MAX_SEEDS``."""
        if self.test != "paired t":
            return None
        return seeds_to_pass(self.se * math.sqrt(self.n), self.margin, self.alpha)


def pooled_sd(samples: Iterable[Sequence[float]]) -> float:
    """Return the pooled standard deviation within samples; 0 if none has two values."""
    squares, df = 0.0, 0
    for values in samples:
        if len(values) > 1:
            squares += float(np.var(values, ddof=1)) * (len(values) - 1)
            df += len(values) - 1
    return math.sqrt(squares / df) if df else 0.0


def sound_seeds(arms: Mapping[str, Mapping[int, float]], goal: Goal) -> dict[str, dict[int, float]]:
    """Return the values of each arm's seeds without those that collapsed."""
    collapsed = statistics.collapsed_seeds(arms, _sign(goal))
    return {arm: {seed: x for seed, x in by.items() if seed not in collapsed[arm]} for arm, by in arms.items()}


def robust_sd(arms: Mapping[str, Mapping[int, float]], goal: Goal) -> float:
    """Return the pooled standard deviation of the sound seeds of arms, limited where a few outliers dominate it.

    The limit is a multiple of the standard deviation that follows from the median distance to the median of an arm.
    """
    lists = [np.array([*by.values()]) for by in sound_seeds(arms, goal).values() if len(by) > 1]
    pooled = pooled_sd([values.tolist() for values in lists])
    distances = [np.abs(x - np.median(x)) * math.sqrt(len(x) / (len(x) - 1)) for x in lists if len(x) > 2]
    robust = statistics.NORMAL_MAD * float(np.median(np.concatenate(distances))) if distances else 0.0
    return min(pooled, OUTLIER_FACTOR * robust) if robust > 0 else pooled


def judge(family: Sequence[Pair], alpha: float = 0.05) -> list[Cell]:
    """Judge every cell of a family, in the order given."""
    collapsed = [_collapsed_seeds(pair) for pair in family]
    cells = [_compute_cell(pair, seeds, alpha) for pair, seeds in zip(family, collapsed, strict=True)]
    counts = [_broken_seeds(pair, seeds) for pair, seeds in zip(family, collapsed, strict=True)]
    tested = [
        place
        for place, (bad, seeds) in enumerate(counts)
        if not family[place].refused
        and not family[place].no_sample
        and statistics.smallest_boschloo(sum(bad), seeds) <= BEST_P
    ]
    share = 0.5 if tested else 1.0  # of alpha, that the tests of means have
    corrected = statistics.adjust_p_values([cell.p for cell in cells], share=share)
    p_of_counts = statistics.adjust_p_values([statistics.boschloo(*counts[place]) for place in tested], share=share)
    p_broken = dict(zip(tested, p_of_counts, strict=True))
    judged = []
    for place, (cell, pair) in enumerate(zip(cells, family, strict=True)):
        cell = replace(cell, p_corrected=corrected[place], family=round(len(cells) / share), broken=counts[place][0])
        judged.append(_add_verdict(replace(cell, p_broken=p_broken.get(place, NAN)), pair, counts[place][1], alpha))
    return judged


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts."""
    distinct = set(verdicts)
    return "regressed" if "regressed" in distinct else "inconclusive" if "inconclusive" in distinct else "pass"


def chance_to_detect(
    drop: float, se: float, df: float, margin: float, min_abs: float, alpha: float, family: int = 1
) -> float:
    """Return the probability that a true drop is judged ``regressed`` at the first step of Holm's procedure.

    Given the estimated spread, the mean drop must exceed three bounds: the test rejects, the drop is at least
    ``min_abs``, and a drop of ``margin`` is not ruled out.
    """
    from scipy.special import chdtri, ndtr

    shares = (np.arange(2000) + 0.5) / 2000
    estimated_se = se * np.sqrt(chdtri(df, shares) / df)
    rejects, passes = (
        t_quantile(1 - alpha / family, df) * estimated_se,
        margin - t_quantile(1 - alpha, df) * estimated_se,
    )
    return float(ndtr((drop - np.maximum(np.maximum(rejects, passes), min_abs)) / se).mean())


def smallest_detectable_drop(
    se: float, df: float, margin: float, min_abs: float, alpha: float, family: int, chance: float = 0.8
) -> float:
    """Return the smallest true drop that is detected with probability ``chance``, see :func:`chance_to_detect`."""
    from scipy.optimize import brentq

    def missing_power(drop: float) -> float:
        return chance_to_detect(drop, se, df, margin, min_abs, alpha, family) - chance

    high = max(margin, min_abs) + se
    while missing_power(high) < 0:
        high *= 2
    return float(brentq(missing_power, 0.0, high))


def chance_to_pass(n: int, sd: float, margin: float, alpha: float) -> float:
    """Return the probability that an unchanged model passes the test of one arm and metric.

    Old and new values at one seed are taken as independent: any change of rounding has the effect of another seed
    (arXiv:2103.04514).

    Args:
        n: seeds.
        sd: standard deviation from seed to seed.
        margin: of the cell.
        alpha: of the test.
    """
    se = sd * math.sqrt(2 / n)
    if n < MIN_SEEDS:
        return 0.0
    return statistics.power(margin, se, n - 1, 2 * alpha) if se > 0 else 1.0


def chance_in_two_looks(first: int, second: int, sd: float, margin: float, alpha: float, draws: int = 20_000) -> float:
    """Simulate :func:`chance_to_pass` with ``first`` seeds, and ``second`` seeds if the cell has not passed by then."""
    d = np.random.default_rng(0).normal(0.0, sd * math.sqrt(2), (draws, second))
    passed = np.zeros(draws, dtype=bool)
    for n in (first, second):
        se = d[:, :n].std(1, ddof=1) / math.sqrt(n)
        passed |= d[:, :n].mean(1) + t_quantile(1 - alpha, n - 1) * se < margin
    return float(passed.mean())


def seeds_to_pass(sd_of_differences: float, margin: float, alpha: float, chance: float = 0.8) -> int | None:
    """Return the fewest seeds with which an unchanged model passes at ``chance``; None above ``MAX_SEEDS``."""
    sd = sd_of_differences / math.sqrt(2)
    too_few, enough = MIN_SEEDS - 1, MAX_SEEDS
    if chance_to_pass(MAX_SEEDS, sd, margin, alpha) < chance:
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if chance_to_pass(middle, sd, margin, alpha) >= chance:
            enough = middle
        else:
            too_few = middle
    return enough


def _compute_cell(pair: Pair, collapsed: tuple[set[int], set[int]], alpha: float) -> Cell:
    """Return the cell of the seeds that have not collapsed on either side, with its p value, without a verdict."""
    sign, is_identical = _sign(pair.goal), pair.old == pair.new
    old_values, new_values = (
        {seed: value for seed, value in values.items() if seed not in seeds}
        for values, seeds in zip((pair.old, pair.new), collapsed, strict=True)
    )
    pair = replace(pair, old=old_values, new=new_values)
    common = sorted(pair.old.keys() & pair.new.keys())
    if len(common) >= MIN_SEEDS or not (len(pair.old) >= MIN_SEEDS and len(pair.new) >= MIN_SEEDS):
        old = np.array([pair.old[seed] for seed in common])
        new = np.array([pair.new[seed] for seed in common])
        d = sign * (new - old)
        n, df, test = len(common), len(common) - 1.0, "paired t"
        sd = _sd(d, pair, old, new)
        se = sd / math.sqrt(n) if n else NAN
    else:
        old, new = np.array([*pair.old.values()]), np.array([*pair.new.values()])
        n, test = min(len(old), len(new)), "Welch t"
        a, b = (float(values.var(ddof=1)) / len(values) for values in (old, new))
        se = max(math.sqrt(a + b), pair.quantum * math.sqrt((1 / len(old) + 1 / len(new)) / 12))
        df = (a + b) ** 2 / (a**2 / (len(old) - 1) + b**2 / (len(new) - 1)) if a + b > 0 else n - 1.0
    cell = Cell(pair.arm, pair.metric, pair.against, "inconclusive", "", n, test, margin=pair.margin)
    cell = replace(cell, collapsed=(len(collapsed[0]), len(collapsed[1])))
    cell = replace(cell, min_abs=pair.min_abs, alpha=alpha)
    if pair.refused:
        return replace(cell, test="none", reason=pair.refused)
    if not n:
        return replace(cell, test="none", reason="no seed has a value in both the baseline and this run")
    cell = replace(cell, old=float(old.mean()), new=float(new.mean()), drop=float(sign * (old.mean() - new.mean())))
    if n < MIN_SEEDS:
        return replace(cell, test="none", reason=f"{n} seeds are too few to judge; set seeds to at least {MIN_SEEDS}")
    if test == "paired t" and not d.any() and (is_identical or not any(collapsed)):
        return replace(cell, test="identical", worst=0.0, p=1.0)
    if pair.no_sample:
        return replace(cell, test="none", reason=pair.no_sample)
    if se == 0:
        # Equal differences of a metric without steps have no spread; only their signs can be tested.
        p = 2.0**-n if cell.drop > 0 else 1.0
        return replace(cell, test="sign flip", worst=cell.drop, p=p)
    from scipy.special import stdtr

    worst = cell.drop + t_quantile(1 - alpha, df) * se
    return replace(cell, p=float(stdtr(df, -cell.drop / se)), se=se, df=df, worst=worst)


def _sd(d: np.ndarray, pair: Pair, old: np.ndarray, new: np.ndarray) -> float:
    """Return the standard deviation of differences, at least that of the metric's steps; rounding counts as 0."""
    if len(d) < 2:
        return NAN
    sd = float(d.std(ddof=1))
    scale = max(float(np.abs(old).max()), float(np.abs(new).max()))
    return max(sd if sd > 1e-12 * scale else 0.0, pair.quantum / math.sqrt(6))


def _sign(goal: Goal) -> int:
    return 1 if goal == "max" else -1


def _collapsed_seeds(pair: Pair) -> tuple[set[int], set[int]]:
    """Return the collapsed seeds of the baseline and of the candidate.

    The bound from the values of both sides finds them if most seeds of a side collapsed; the bound of each side finds
    single ones, also if the sides differ in their medians.
    """
    sign, sides = _sign(pair.goal), (pair.old, pair.new)
    each = statistics.collapsed_seeds({"old": pair.old, "new": pair.new}, sign)
    both = sign * np.array([*pair.old.values(), *pair.new.values()], dtype=float)
    bound = -math.inf
    if len(both):
        center = float(np.median(both))
        spread = max(statistics.NORMAL_MAD * float(np.median(np.abs(both - center))), pair.quantum)
        bound = center - COLLAPSED_SD * spread if spread > 0 else -math.inf
    old, new = ({seed for seed, value in side.items() if sign * value < bound} for side in sides)
    return old | set(each["old"]), new | set(each["new"])


def _broken_seeds(pair: Pair, collapsed: tuple[set[int], set[int]]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the numbers of lost and collapsed seeds, and of all seeds, of the baseline and of the candidate."""
    old, new = (len(seeds) + lost for seeds, lost in zip(collapsed, pair.failed, strict=True))
    return (old, new), (len(pair.old) + pair.failed[0], len(pair.new) + pair.failed[1])


def _add_verdict(cell: Cell, pair: Pair, seeds: tuple[int, int], alpha: float) -> Cell:
    """Return the cell with its verdict, lost and collapsed seeds included.

    Args:
        cell: with its p values.
        pair: what it was computed from.
        seeds: of the baseline and of the candidate, those that are lost or collapsed included.
        alpha: of the family.
    """
    result = _verdict_of_values(cell, pair, alpha)
    old, new = cell.broken
    additional = new - (old * seeds[1] / seeds[0] if seeds[0] else 0.0)
    if pair.refused or additional <= 0:
        return result
    collapsed = f" ({cell.collapsed[1]} collapsed)" if 0 < cell.collapsed[1] < new else ""
    if cell.collapsed == cell.broken:
        kind = "collapsed"
    elif any(cell.collapsed):
        kind = "diverged, have no finite value or collapsed"
    else:
        kind = "diverged or have no finite value"
    reason = f"{new} of {seeds[1]} seeds {kind}{collapsed}, and {old} of {seeds[0]} in the {pair.against}"
    significant = cell.p_broken < alpha
    if significant:
        reason += f" (Boschloo's exact test, corrected p {cell.p_broken:.2g})"
    if result.verdict == "regressed":
        return replace(result, reason=f"{result.reason}; {reason}")
    regressed = significant or 2 * additional > seeds[1]
    return replace(result, verdict="regressed" if regressed else "inconclusive", reason=reason)


def _verdict_of_values(cell: Cell, pair: Pair, alpha: float) -> Cell:
    """Return the cell with the verdict of the seeds that have values."""
    if cell.reason:
        return cell
    if cell.test == "identical":
        return replace(cell, verdict="pass", reason="identical")
    rejected = cell.p_corrected < alpha
    if cell.worst < pair.margin:
        note = "a significant drop, but within the margin" if rejected else "no drop as large as the margin"
        return replace(cell, verdict="pass", reason=note)
    if rejected and cell.drop >= pair.min_abs:
        return replace(cell, verdict="regressed", reason=f"p {cell.p_corrected:.2g} after Holm")
    reason = f"a drop of {pair.margin:.3g} cannot be ruled out"
    if rejected:
        reason += f", and one of {cell.drop:.2g} is too small to count"
    return replace(cell, reason=reason)
