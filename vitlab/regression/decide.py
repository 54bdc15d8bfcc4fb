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

import numpy as np

from vitlab import statistics
from vitlab.comparison.arrays import MIN_SEEDS
from vitlab.regression.arrays import VERDICTS, Cells, Judged, Verdict, judge_arrays
from vitlab.spec.choice import Goal
from vitlab.statistics.replicates import NAN

MAX_SEEDS = 200  #: largest number of seeds that is recommended
NOTABLE_SHARE = 0.2  #: of an arm's seeds: as many additional lost or collapsed trainings are a warning


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
    lost: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
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
    """A judged cell.  ``drop`` is positive if the candidate is worse; NaN marks what was not computed."""

    arm: str
    metric: str
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
    p_adjusted: float = NAN
    margin: float = NAN
    min_abs: float = NAN
    alpha: float = NAN
    family: int = 1  #: tests that are corrected together
    broken: tuple[int, int] = (0, 0)  #: lost and collapsed seeds of the baseline and of the candidate
    seeds: tuple[int, int] = (0, 0)  #: seeds among which these are
    collapsed: tuple[int, int] = (0, 0)  #: collapsed seeds among them
    seconds: float = NAN  #: that training the candidate's seeds took


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts."""
    return max(verdicts, key=VERDICTS.index, default="pass")


def judge(family: Sequence[Pair], alpha: float = 0.05) -> tuple[list[Cell], list[Finding]]:
    """Return the cells of a family, in the order given, and a finding for the count of lost and collapsed trainings."""
    if not family:
        return [], []
    seeds = sorted({seed for pair in family for side in (pair.old, pair.new, *pair.lost) for seed in side})
    values_C2N = np.array([statistics.as_array((pair.old, pair.new), seeds) * pair.sign for pair in family])
    lost_C2N = np.array([[np.isin(seeds, [*side]) for side in pair.lost] for pair in family])
    trainings = list(dict.fromkeys(pair.arm for pair in family))
    cells = Cells(
        margin=np.array([pair.margin for pair in family]),
        min_abs=np.array([pair.min_abs for pair in family]),
        quantum=np.array([pair.quantum for pair in family]),
        trainings=np.array([trainings.index(pair.arm) for pair in family]),
        counted=np.array([not pair.refused and not pair.no_sample for pair in family]),
    )
    judged = judge_arrays(values_C2N[None], lost_C2N[None], cells, alpha)
    found = [_cell(pair, judged, place, alpha) for place, pair in enumerate(family)]
    (old, new), (seeds_old, seeds_new) = judged.count_broken[0], judged.count_seeds[0]
    if not old + new:
        return found, []
    sentence = f"{new} of {seeds_new} were lost or collapsed, {old} of {seeds_old} in the baseline"
    p = judged.count_p[0]
    test = f" (Boschloo's exact test, adjusted p {p:.2g})" if p < 1 else ""
    return found, [Finding("", "trainings", VERDICTS[judged.count_verdict[0]], sentence + test)]


def warnings(cells: Iterable[Cell]) -> list[str]:
    """Return a sentence for each arm of which notably more trainings are lost or collapsed than in the baseline."""
    sentences = {}
    for cell in cells:
        (old, new), (seeds_old, seeds_new) = cell.broken, cell.seeds
        if new and new / seeds_new - old / max(seeds_old, 1) >= NOTABLE_SHARE:
            sentences[cell.arm] = _broken_trainings(cell, f" of {cell.arm}")
    return list(sentences.values())


def _cell(pair: Pair, judged: Judged, place: int, alpha: float) -> Cell:
    """Return a cell with its verdict and the reason for it."""
    names = ("identical", "means", "se", "worst", "p", "p_adjusted", "verdict", "broken", "seeds", "collapsed")
    of_cell = {name: getattr(judged, name)[0, place].tolist() for name in names}
    n, identical = int(judged.pairs[0, place]), of_cell["identical"]
    is_judged = not pair.refused and (identical or (n >= MIN_SEEDS and not pair.no_sample))
    by_t = is_judged and not identical and of_cell["se"] > 0
    # A refused cell has no means, such as of two data sets, which nobody should subtract.
    old, new = (NAN if pair.refused else pair.sign * mean for mean in of_cell["means"])
    cell = Cell(
        arm=pair.arm,
        metric=pair.metric,
        verdict=VERDICTS[of_cell["verdict"]] if is_judged else "inconclusive",
        reason="",
        n=n,
        test="none" if not is_judged else "identical" if identical else "paired t" if by_t else "sign flip",
        old=old,
        new=new,
        drop=pair.sign * (old - new),
        se=of_cell["se"] if by_t else NAN,
        worst=of_cell["worst"] if is_judged else NAN,
        p=of_cell["p"] if is_judged else NAN,
        p_adjusted=of_cell["p_adjusted"] if is_judged else NAN,
        margin=pair.margin,
        min_abs=pair.min_abs,
        alpha=alpha,
        family=int(judged.family[0]),
        broken=tuple(of_cell["broken"]),
        seeds=tuple(of_cell["seeds"]),
        collapsed=tuple(of_cell["collapsed"]),
        seconds=pair.seconds,
    )
    more = _broken_trainings(cell) if judged.has_more[0, place] else ""
    return replace(cell, reason=_reason(cell, pair, more))


def _reason(cell: Cell, pair: Pair, more: str) -> str:
    """Return the reason of the verdict; ``more`` says that the candidate lost more trainings, if it did."""
    if pair.refused or (more and cell.verdict != "regressed"):
        return pair.refused or more
    if cell.test == "none" and not cell.n:
        return "no seed has a value in both the baseline and this run"
    if cell.test == "none" and cell.n < MIN_SEEDS:
        few = "seeds are left to compare, which are too few" if any(cell.broken) else "seeds are too few to judge"
        return f"{cell.n} {few}; set seeds to at least {MIN_SEEDS + max(cell.broken)}"
    if cell.test in ("none", "identical"):
        return pair.no_sample if cell.test == "none" else "identical"
    is_significant = cell.p_adjusted < cell.alpha
    if cell.worst < cell.margin:
        return "a significant drop, but within the margin" if is_significant else "no drop as large as the margin"
    if cell.verdict == "regressed":
        return f"adjusted p {cell.p_adjusted:.2g}{f'; {more}' if more else ''}"
    small = f", and one of {cell.drop:.2g} is too small to count" if is_significant else ""
    return f"a drop of {cell.margin:.3g} cannot be ruled out{small}"


def _broken_trainings(cell: Cell, of_arm: str = "") -> str:
    """Return the numbers of lost and collapsed trainings, as a sentence."""
    kind = "were lost or collapsed" if any(cell.collapsed) else "diverged or have no finite value"
    kind = "collapsed" if cell.collapsed == cell.broken else kind
    (old, new), (seeds_old, seeds_new) = cell.broken, cell.seeds
    return f"{new} of {seeds_new} trainings{of_arm} {kind}, {old} of {seeds_old} in the baseline"


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


def seeds_to_pass(sd: float, margin: float, alpha: float, chance: float = 0.8) -> int | None:
    """Return the fewest seeds with which an unchanged model passes at ``chance``; None above ``MAX_SEEDS``."""
    sizes = range(MIN_SEEDS, MAX_SEEDS + 1)
    place = bisect_left(sizes, chance, key=lambda n: chance_to_pass(n, sd, margin, alpha))
    return sizes[place] if place < len(sizes) else None
