"""Correction of comparisons for their family: shared variances, p values and simultaneous intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vitlab import statistics
from vitlab.plan.registration import added_comparisons, altered_arms, changes, results_before_registration
from vitlab.plan.values import Plan
from vitlab.spec import Analysis
from vitlab.statistics import Contrast, Moderated

Values = Mapping[int, float]
"""Seed to value."""


@dataclass(frozen=True)
class Corrected:
    """Comparisons of one look after correction, by arm."""

    contrasts: Mapping[str, Contrast]
    p: Mapping[str, float]
    p_equal: Mapping[str, float]  #: of equivalence; empty without a margin
    levels: Mapping[str, float]  #: level of a single interval, so that all of the family hold at once
    corrections: Mapping[str, str]  #: as in column ``correction``
    own_variance: Mapping[str, str]  #: reason why a comparison has its own variance


def correct(
    contrasts: Mapping[str, Contrast],
    compared: Mapping[str, str],
    values: Mapping[str, Values],
    family: Family,
    analysis: Analysis,
) -> Corrected:
    """Share variances if the analysis says so, and correct p values and intervals for the family."""
    judged: dict[str, Contrast] = dict(contrasts)
    levels = {arm: family.level(arm) for arm in contrasts}
    corrections = dict.fromkeys(contrasts, str(analysis.correction))
    own_variance: dict[str, str] = {}
    joint_p: dict[str, float] = {}
    if analysis.variance == "moderated":
        tuned = (arm for arm, contrast in contrasts.items() if contrast.test == "tuned t")
        own_variance |= dict.fromkeys(tuned, "the choice of its knobs is a part of it")
    for members in family.families() if analysis.variance == "moderated" else ():
        # Registered comparisons are the last members, so that they share with registered ones alone.
        paired = [arm for arm in members if arm in contrasts and contrasts[arm].test == "paired t"]
        judged |= {arm: contrasts[arm] for arm in paired}
        levels |= {arm: family.level(arm) for arm in paired}
        corrections |= dict.fromkeys(paired, str(analysis.correction))
        joint_p = {arm: p for arm, p in joint_p.items() if arm not in paired}
        for (baseline, seeds), arms in _groups(paired, compared, values).items():
            sides = [[values[arm][seed] for seed in seeds] for arm in (*arms, baseline)]
            shared = statistics.moderate(sides[:-1], sides[-1])
            if isinstance(shared, str):
                own_variance |= dict.fromkeys(arms, shared)
                continue
            own_variance |= dict.fromkeys(arms, "its spread differs from that of the other arms")
            arms = [arms[place] for place in shared.arms]
            own_variance |= dict.fromkeys(arms, "")
            moderated = {arm: _moderated(contrasts[arm], se, shared) for arm, se in zip(arms, shared.se, strict=True)}
            if family.is_joint(members, arms, analysis):
                t = [contrast.difference / contrast.se for contrast in moderated.values()]
                steps = statistics.step_down(t, shared.df, shared.loadings)
                joint_p |= {arm: min(1.0, p / family.share) for arm, p in zip(arms, steps, strict=True)}
                bound = statistics.max_t_quantile(family.alpha, shared.df, shared.loadings)
                levels |= dict.fromkeys(arms, statistics.t_two_sided(bound, shared.df))
                corrections |= dict.fromkeys(arms, "max t")
            judged |= {arm: _with_interval(contrast, levels[arm]) for arm, contrast in moderated.items()}
    adjusted = family.adjust({arm: contrast.p for arm, contrast in judged.items()}) | joint_p
    equal: dict[str, float] = {}
    if analysis.margin is not None:
        equal = {arm: statistics.equivalence(one, analysis.margin, levels[arm]).p for arm, one in judged.items()}
        adjusted, equal = family.adjust_claims({arm: one.p for arm, one in judged.items()}, equal)
    reasons = {arm: reason for arm, reason in own_variance.items() if reason}
    return Corrected(judged, adjusted, equal, levels, corrections, reasons)


def _groups(
    arms: Sequence[str], compared: Mapping[str, str], values: Mapping[str, Values]
) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """Return the arms that have a baseline and its seeds in common, by both."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for arm in arms:
        seeds = tuple(sorted(values[arm].keys() & values[compared[arm]].keys()))
        groups.setdefault((compared[arm], seeds), []).append(arm)
    return groups


def _moderated(contrast: Contrast, se: float, shared: Moderated) -> Contrast:
    """Return a comparison with a moderated standard error, never below its own."""
    se = max(contrast.se, se * math.sqrt(1 + contrast.overlap * contrast.pairs))
    p = statistics.t_two_sided(contrast.difference / se, shared.df)
    return replace(contrast, test="moderated t", p=p, se=se, df=shared.df, prior_df=shared.prior_df)


def _with_interval(contrast: Contrast, level: float) -> Contrast:
    """Return a comparison with its interval of level ``1 - level``."""
    half = statistics.t_quantile(1 - level / 2, contrast.df) * contrast.se
    return replace(contrast, low=contrast.difference - half, high=contrast.difference + half)


class Family:
    """Comparisons that are corrected together: the registered ones alone, added ones along with the registered."""

    def __init__(
        self,
        plan: Plan,
        look: int,
        arms: Sequence[str],
        later: Sequence[str],
        n_dropped: int,
        why: Mapping[str, Sequence[str]],
    ) -> None:
        self.look, self.share = look, plan.alpha_shares[look]
        self.alpha, self.correction = self.share * plan.analysis.alpha, plan.analysis.correction
        self.first = [arm for arm in arms if arm not in later]
        self.all = list(arms)
        self.n_dropped = n_dropped  # registered comparisons that were dropped; they still count in the correction
        self.why = why

    @classmethod
    def of(cls, plan: Plan, compared: Mapping[str, str], look: int = 0) -> Family:
        """Return the family of a plan's comparisons at a look, given arm to baseline."""
        later = added_comparisons(plan)
        first = 0 if plan.registered is None else len(plan.registered["family"])
        n_registered = sum(arm not in later for arm in compared)
        reasons = {
            "this comparison was added after the first run": later,
            "results of it were there before it was registered": results_before_registration(plan)[2],
        }
        why = {arm: [*changes(plan), *(text for text, arms in reasons.items() if arm in arms)] for arm in compared}
        for altered_arm in altered_arms(plan):
            for arm in (arm for arm, baseline in compared.items() if altered_arm in (arm, baseline)):
                why[arm].append(f"arm '{altered_arm}' was changed after results were seen")
        return cls(plan, look, list(compared), list(later), max(0, first - n_registered), why)

    def size(self, arm: str) -> int:
        """Return the number of comparisons that an arm's is corrected for."""
        return len(self.first if arm in self.first else self.all) + self.n_dropped

    def level(self, arm: str) -> float:
        """Return the level of an arm's interval, so that all intervals of its family hold at once."""
        return statistics.simultaneous_alpha(self.alpha, self.size(arm), self.correction)

    def adjust(self, p: Mapping[str, float]) -> dict[str, float]:
        """Return the adjusted p values of some comparisons; the others count in the family as NaN."""
        adjusted: dict[str, float] = {}
        for family in self.families():
            values = statistics.adjust_p_values(self._members(family, p), self.correction, self.share)
            adjusted |= dict(zip(family, values, strict=False))
        return adjusted

    def adjust_claims(
        self, difference: Mapping[str, float], equivalence: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the adjusted p values of differences and of equivalences, which are one family, see :meth:`adjust`."""
        adjusted: tuple[dict[str, float], dict[str, float]] = {}, {}
        for family in self.families():
            both = statistics.adjust_claims(
                self._members(family, difference), self._members(family, equivalence), self.correction, self.share
            )
            for result, values in zip(adjusted, both, strict=True):
                result.update(zip(family, values, strict=False))
        return adjusted

    def is_joint(self, members: Sequence[str], arms: Sequence[str], analysis: Analysis) -> bool:
        """Return whether the members of a family are corrected under their correlation: if ``arms`` are all of them.

        With a margin, claims of difference and of equivalence are one family, whose correlation is not used.
        """
        complete = len(members) == len(arms) and not self.n_dropped
        return complete and analysis.correction == "holm" and analysis.margin is None

    def families(self) -> tuple[list[str], ...]:
        """Return the comparisons of each family, the registered ones last; the others count along with them."""
        return (self.all, self.first) if self.all != self.first else (self.all,)

    def _members(self, family: Sequence[str], p: Mapping[str, float]) -> list[float]:
        return [*(p.get(arm, math.nan) for arm in family), *[math.nan] * self.n_dropped]
