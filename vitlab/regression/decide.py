"""Statistical tier: one verdict for every cell, which is an arm and a metric, and one for the count of lost trainings.

Let d be the candidate's values minus the baseline's at equal seeds, signed so that a drop is negative:

- ``regressed``: the one-sided test of "no drop" rejects after Bonferroni's correction over the family, and the mean
  drop is at least ``min_abs``; otherwise tiny drops of tiny spread would be significant among many cells of few seeds.
- ``pass``: the test of "a drop of the margin, or more" rejects.  All cells have to, so each may be tested at ``alpha``
  itself (Berger's intersection-union test), and the chance that a change worse than the margin passes is at most alpha.
- ``inconclusive``: neither.  The cell reports the seeds with which an unchanged model would pass.

Values that are all equal pass as ``identical``.  The standard deviation of the differences is at least that of the
metric's rounding (q / sqrt 6 for the difference of two values rounded to q).

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from vitlab.comparison.arrays import TESTS
from vitlab.regression.arrays import MIN_SEEDS, NAN, VERDICTS, Cells, Judged, Verdict, judge_arrays
from vitlab.regression.power import seeds_to_pass
from vitlab.spec.choice import Goal

Against = Literal["baseline", "anchor"]
NOTABLE_SHARE = 0.2  #: of an arm's seeds: as many additional lost or collapsed trainings are a warning


@dataclass(frozen=True)
class Finding:
    """The result of one check of an arm or of the plan."""

    arm: str  #: empty for the plan
    check: str
    verdict: Verdict
    sentence: str = ""


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
    lost: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    """Seeds without a finite value, of the baseline and of the candidate."""
    refused: str = ""  #: the reason why the cell is not judged
    no_sample: str = ""  #: the reason why its seeds are no sample; identical values pass nevertheless
    seconds: float = NAN  #: that training the candidate's seeds took


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
    p_adjusted: float = NAN
    margin: float = NAN
    min_abs: float = NAN
    alpha: float = NAN
    family: int = 1  #: tests that are corrected together
    broken: tuple[int, int] = (0, 0)  #: lost and collapsed seeds of the baseline and of the candidate
    seeds: tuple[int, int] = (0, 0)  #: seeds among which these are
    collapsed: tuple[int, int] = (0, 0)  #: collapsed seeds among them
    seconds: float = NAN  #: that training the candidate's seeds took

    @property
    def needs(self) -> int | None:
        """Seeds with which an unchanged model passes with 80 % power; None if unknown or above ``MAX_SEEDS``."""
        if self.test != "paired t":
            return None
        return seeds_to_pass(self.se * math.sqrt(self.n), self.margin, self.alpha)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts."""
    return max(verdicts, key=VERDICTS.index, default="pass")


def judge(family: Sequence[Pair], alpha: float = 0.05) -> tuple[list[Cell], list[Finding]]:
    """Return the cells of a family, in the order given, and a finding for the count of lost and collapsed trainings."""
    if not family:
        return [], []
    seeds = sorted({seed for pair in family for side in (pair.old, pair.new, *pair.lost) for seed in side})
    signs = [1 if pair.goal == "max" else -1 for pair in family]
    values_C2N = np.array([
        [[sign * side.get(seed, NAN) for seed in seeds] for side in (pair.old, pair.new)]
        for pair, sign in zip(family, signs, strict=True)
    ]).reshape(len(family), 2, len(seeds))  # fmt: skip
    lost_C2N = np.array([[[seed in side for seed in seeds] for side in pair.lost] for pair in family], dtype=bool)
    trainings = list(dict.fromkeys((pair.against, pair.arm) for pair in family))
    sides = list(dict.fromkeys(pair.against for pair in family))
    cells = Cells(
        margin=np.array([pair.margin for pair in family]),
        min_abs=np.array([pair.min_abs for pair in family]),
        quantum=np.array([pair.quantum for pair in family]),
        trainings=np.array([trainings.index((pair.against, pair.arm)) for pair in family]),
        sides=np.array([sides.index(pair.against) for pair in family]),
        counted=np.array([not pair.refused and not pair.no_sample for pair in family]),
    )
    judged = judge_arrays(values_C2N[None], lost_C2N.reshape(values_C2N.shape)[None], cells, alpha)
    found = [_cell(pair, judged, place, alpha) for place, pair in enumerate(family)]
    findings = [_finding(side, judged, place) for place, side in enumerate(sides)]
    return found, [finding for finding in findings if finding is not None]


def warnings(cells: Iterable[Cell]) -> list[str]:
    """Return a sentence for each arm of which notably more trainings are lost or collapsed than in the baseline."""
    sentences = {}
    for cell in cells:
        (old, new), (seeds_old, seeds_new) = cell.broken, cell.seeds
        if new and new / seeds_new - old / max(seeds_old, 1) >= NOTABLE_SHARE:
            sentences[cell.arm, cell.against] = _broken_trainings(cell, f" of {cell.arm}")
    return list(sentences.values())


def _cell(pair: Pair, judged: Judged, place: int, alpha: float) -> Cell:
    """Return a cell with its verdict and the reason for it."""
    n, sign = int(judged.contrasts.pairs[0, place]), 1 if pair.goal == "max" else -1
    broken, seeds, collapsed = (
        (int(of_sides[0, place, 0]), int(of_sides[0, place, 1]))
        for of_sides in (judged.broken, judged.seeds, judged.collapsed)
    )
    cell = Cell(
        pair.arm, pair.metric, pair.against, "inconclusive", "", n, TESTS[0], margin=pair.margin,
        min_abs=pair.min_abs, alpha=alpha, family=int(judged.family[0]), seconds=pair.seconds,
        broken=broken, seeds=seeds, collapsed=collapsed,
    )  # fmt: skip
    if pair.refused:
        return replace(cell, reason=pair.refused)
    more = _broken_trainings(cell) if judged.has_more[0, place] else ""
    if not n:
        return replace(cell, reason=more or "no seed has a value in both the baseline and this run")
    old_mean, new_mean = (sign * judged.means[0, place]).tolist()
    cell = replace(cell, old=old_mean, new=new_mean, drop=sign * (old_mean - new_mean))
    identical = bool(judged.identical[0, place])
    if not identical and n < MIN_SEEDS:
        few = "seeds are left to compare, which are too few" if any(cell.broken) else "seeds are too few to judge"
        return replace(cell, reason=more or f"{n} {few}; set seeds to at least {MIN_SEEDS + max(cell.broken)}")
    if not identical and pair.no_sample:
        return replace(cell, reason=pair.no_sample)
    by_t = not identical and judged.se[0, place] > 0
    cell = replace(
        cell,
        test="identical" if identical else "paired t" if by_t else "sign flip",
        verdict=VERDICTS[judged.verdict[0, place]],
        worst=float(judged.worst[0, place]),
        p=float(judged.p[0, place]),
        p_adjusted=float(judged.p_adjusted[0, place]),
        se=float(judged.se[0, place]) if by_t else NAN,
    )
    reason = _reason(cell)
    if more:
        reason = f"{reason}; {more}" if cell.verdict == "regressed" else more
    return replace(cell, reason=reason)


def _reason(cell: Cell) -> str:
    """Return the reason of the verdict on the seeds that have values."""
    is_significant = cell.p_adjusted < cell.alpha
    if cell.test == "identical":
        return "identical"
    if cell.worst < cell.margin:
        return "a significant drop, but within the margin" if is_significant else "no drop as large as the margin"
    if cell.verdict == "regressed":
        return f"adjusted p {cell.p_adjusted:.2g}"
    reason = f"a drop of {cell.margin:.3g} cannot be ruled out"
    return reason + (f", and one of {cell.drop:.2g} is too small to count" if is_significant else "")


def _broken_trainings(cell: Cell, of_arm: str = "") -> str:
    """Return the numbers of lost and collapsed trainings, as a sentence."""
    kind = "were lost or collapsed" if any(cell.collapsed) else "diverged or have no finite value"
    kind = "collapsed" if cell.collapsed == cell.broken else kind
    (old, new), (seeds_old, seeds_new) = cell.broken, cell.seeds
    return f"{new} of {seeds_new} trainings{of_arm} {kind}, {old} of {seeds_old} in the {cell.against}"


def _finding(against: Against, judged: Judged, place: int) -> Finding | None:
    """Return the result of the test of counts; None if no training was lost or collapsed."""
    (old, new), (seeds_old, seeds_new) = judged.count_broken[0, place], judged.count_seeds[0, place]
    if not old + new:
        return None
    check = "trainings" if against == "baseline" else f"trainings since the {against}"
    sentence = f"{new} of {seeds_new} were lost or collapsed, {old} of {seeds_old} in the {against}"
    p = judged.count_p[0, place]
    test = f" (Boschloo's exact test, adjusted p {p:.2g})" if p < 1 else ""
    return Finding("", check, VERDICTS[judged.count_verdict[0, place]], sentence + test)
