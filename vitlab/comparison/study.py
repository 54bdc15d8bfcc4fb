"""Judgement of a study: a comparison with a verdict for every arm that has a baseline.

With several looks (``seeds.until`` and ``seeds.escalate_to``), each look has a part of alpha, see
:func:`vitlab.statistics.power.sequential_levels`.  What a look decides is final.  What it leaves open is judged again
once all further seeds have ended; the decided comparisons still count in the family.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitlab.comparison import Verdict
from vitlab.comparison.arrays import VERDICTS, Choices, Comparisons, Contrast, Judgements, judge_studies
from vitlab.planning.registration import altered_arms, describe_analysis_changes, newly_compared_arms
from vitlab.planning.values import MetricFacts, Plan
from vitlab.statistics import power, replicates
from vitlab.statistics.replicates import NAN, Floats

MIN_PREREQUISITES = 3  #: distinct prerequisites that each arm needs if arms differ by them
CONTRAST_COLUMNS = {name: f"difference_{name}" for name in ("sd", "se", "df", "low", "high")} | {
    "collapsed": "collapsed_pairs"
}
"""Attribute of a contrast to its column in a summary, where that has another name."""


@dataclass(frozen=True)
class Sample:
    """The sample of an arm."""

    values: Mapping[int, float]  #: seed to value
    lost: Sequence[int] = ()  #: seeds without a value, because their trials diverged, failed or were killed
    overlap: float = 0.0  #: validation images over training images, if seeds hold out others of the same images
    images: Mapping[int, Floats] = field(default_factory=dict)
    """Seed to one value per image; the images of all arms are the same, in the same order."""


def prerequisites_by_arm(plan: Plan, seeds: Collection[int] | None = None) -> dict[str, dict[str, set[str]]]:
    """Return the trainings that each arm's trials start from, by arm and role, at the given seeds or at all."""
    names: dict[str, dict[str, set[str]]] = {}
    for planned in plan.trials:
        if seeds is None or planned.seed in seeds:
            for role, trial in planned.trial.needs.items():
                names.setdefault(planned.arm, {}).setdefault(role, set()).add(trial.partition("/")[0])
    return names


def refusals_by_arm(plan: Plan, seeds: Collection[int] | None = None) -> dict[str, str]:
    """Return the reasons why comparisons are refused, by arm, at the given seeds or at all.

    If two arms differ by their prerequisite (a teacher, a pre-trained body), the prerequisites are the sample:
    five students of one teacher are one sample of the teacher.
    """
    of_arms, reasons = prerequisites_by_arm(plan, seeds), {}
    for arm in plan.arms:
        first, second = of_arms.get(arm.name, {}), of_arms.get(arm.baseline or "", {})
        for role in sorted(first.keys() & second.keys()):
            if first[role] != second[role] and (
                reason := describe_few_prerequisites(min(len(first[role]), len(second[role])))
            ):
                reasons[arm.name] = f"the arms differ by their {role}, of which {reason}"
    return reasons


def describe_few_prerequisites(n_prerequisites: int) -> str:
    """Return why so many distinct prerequisites of an arm are no sample; empty if they are."""
    if n_prerequisites >= MIN_PREREQUISITES:
        return ""
    stand = "training stands" if n_prerequisites == 1 else "trainings stand"
    return f"{n_prerequisites} {stand} behind an arm: fewer than {MIN_PREREQUISITES} are no sample"


@dataclass(frozen=True)
class Family:
    """The comparisons of a plan: registered ones are corrected for these alone, later ones for all.

    Registered comparisons that were dropped still count.
    """

    sizes: Mapping[str, int]  #: arm to the number of comparisons that its own is corrected for
    later: frozenset[str]  #: arms whose comparison was added after the first run
    controls: frozenset[str]  #: arms that are judged by themselves
    exploratory: Mapping[str, str]  #: arm to what of its comparison was decided after the first run

    @classmethod
    def from_plan(cls, plan: Plan, compared: Mapping[str, str]) -> Family:
        """Return the family of a plan's comparisons, given arm to baseline."""
        controls = {arm.name for arm in plan.arms if arm.is_control}
        in_family = compared.keys() - controls
        later = newly_compared_arms(plan) & in_family
        registered = len(in_family) - len(later)
        dropped = 0 if plan.registered is None else max(0, len(plan.registered.family) - registered)
        sizes = {arm: dropped + (len(in_family) if arm in later else registered) for arm in in_family}
        sizes |= dict.fromkeys(controls, 1)
        of_all, altered = describe_analysis_changes(plan), altered_arms(plan)
        known_before = plan.registered.known.comparisons if plan.registered else ()
        exploratory = {}
        for arm, baseline in compared.items():
            causes = [
                *of_all,
                *["this comparison was added after the first run"] * (arm in later),
                *["results of it were there before it was registered"] * (arm in known_before),
                *(f"arm '{name}' was changed after results were seen" for name in altered if name in (arm, baseline)),
            ]
            exploratory[arm] = "; ".join(causes)
        return cls(sizes, frozenset(later), frozenset(controls), exploratory)


def judge_study(
    plan: Plan,
    compared: Mapping[str, str],
    samples: Mapping[str, Sample],
    *,
    quantum: float,
    refused: Mapping[str, str] = {},
    awaited: Mapping[str, int] = {},
) -> dict[str, dict[str, Any]]:
    """Return the comparison of every arm that has a baseline: its columns in a summary, by name.

    NaN marks what was not computed.  Beside the columns stands ``collapsed_seeds``, a list of seeds of the arm.

    Args:
        plan: the plan with the analysis and the registration.
        compared: arm to its baseline.
        samples: arm to its sample, at least of every arm in ``compared`` and their baselines.
        quantum: smallest change of the metric; 0 if it has none or it is not known.
        refused: arm to a reason why its comparison is refused, in addition to :func:`refusals_by_arm`.
        awaited: arm to the number of trials of its comparison that have not ended, also at its latest look.
    """
    if not compared:
        return {}
    # Until all further seeds have ended, the look before gives the verdicts.
    latest = {arm: 0 if plan.looks is None else plan.looks.latest_look(arm) for arm in compared}
    look_of = {arm: max(0, look - bool(awaited.get(arm, 0))) for arm, look in latest.items()}
    study = _StudyArrays(plan, compared, samples, quantum)
    rows: dict[str, dict[str, Any]] = {}
    for look in sorted(set(look_of.values())):
        new_rows = study.judge_look(look, {arm for arm in compared if look_of[arm] >= look}, refused, awaited)
        rows |= {arm: row for arm, row in new_rows.items() if look_of[arm] == look}
    return {arm: rows[arm] for arm in compared}


def is_futile(decidable: float | None, plan: Plan) -> bool:
    """Return whether the study gives up a comparison, because all of its seeds would hardly decide it."""
    return plan.looks is not None and decidable is not None and decidable < plan.looks.futility


class _StudyArrays:
    """A study as arrays, for any of its looks."""

    def __init__(self, plan: Plan, compared: Mapping[str, str], samples: Mapping[str, Sample], quantum: float) -> None:
        self.plan, self.compared, self.samples = plan, compared, samples
        self.family = family = Family.from_plan(plan, compared)
        analysis = plan.analysis
        self.facts = plan.facts() or MetricFacts(analysis.goal, "number", (None, None))
        arms = [*samples]
        self.seeds = np.unique([seed for sample in samples.values() for seed in (*sample.values, *sample.lost)])
        self.values_AN = replicates.values_to_array([sample.values for sample in samples.values()], self.seeds.tolist())
        self.lost_AN = np.array([np.isin(self.seeds, sample.lost) for sample in samples.values()])
        overlap_C2 = np.array([[samples[name].overlap for name in pair] for pair in compared.items()])
        self.comparisons = replace(
            Comparisons.all_with_first(len(compared), analysis),
            arms=np.array([arms.index(arm) for arm in compared]),
            baselines=np.array([arms.index(baseline) for baseline in compared.values()]),
            family=np.array([family.sizes[arm] for arm in compared]),
            quantum=quantum,
            overlap=overlap_C2.max(axis=1),  # NaN if one of the two is not known
            registered=np.array([arm not in family.later | family.controls for arm in compared]),
            reach=self.facts.reach,
        )

    def judge_look(
        self, look: int, tested: set[str], refused: Mapping[str, str], awaited: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """Return a row for each comparison, of the seeds of a look, at which the arms in ``tested`` are tested."""
        looks, shares = self.plan.looks, self.plan.alpha_shares
        seeds = None if looks is None else set(looks.seeds[look])
        seen_N = np.isin(self.seeds, self.seeds if seeds is None else [*seeds])
        values_AN = np.where(seen_N, self.values_AN, NAN)
        reasons = refusals_by_arm(self.plan, seeds) | dict(refused)
        choices, choice_sds = self._tuning_variances(values_AN)
        tested_SC = np.array([[arm in tested and arm not in reasons for arm in self.compared]])
        comparisons = replace(self.comparisons, share=shares[look], tested=tested_SC, choices=choices)
        chance_A = np.array([self.facts.chance.get(arm, NAN) for arm in self.samples])
        # One study of many that could be judged at once.
        judgements = judge_studies(
            values_AN[None], comparisons, lost_SAN=(self.lost_AN & seen_N)[None], chance_A=chance_A
        )
        rows = {}
        for place, arm in enumerate(self.compared):
            of_look = {"look": look + 1, "looks": len(shares), "awaited": awaited.get(arm, 0)}
            row = self._comparison_columns(judgements, place, arm, float(comparisons.levels[place]), reasons.get(arm))
            rows[arm] = {**row, **of_look, "choice_sd": choice_sds[place]}
        return rows

    def _comparison_columns(
        self, judgements: Judgements, place: int, arm: str, level: float, reason: str | None
    ) -> dict[str, Any]:
        """Return the columns of the comparison of an arm, which is refused if there is a reason."""
        contrast, lost = judgements.contrasts.single(0, place), int(judgements.lost[0, place])
        verdict, of_complete = (VERDICTS[each[0, place]] for each in (judgements.verdict, judgements.complete_verdict))
        low, high = self._new_image_interval(arm, contrast, level)
        row = {
            **{CONTRAST_COLUMNS.get(name, name): value for name, value in vars(contrast).items()},
            "baseline": self.compared[arm],
            "verdict": Verdict.REFUSED if reason else verdict,
            "complete_verdict": Verdict.REFUSED if reason else of_complete,
            "refused": reason,
            "exploratory": self.family.exploratory[arm] or None,
            "registered": None if self.plan.registered is None else arm not in self.family.later,
            "family": self.family.sizes[arm],
            "lost": lost,
            "collapsed_seeds": self.seeds[judgements.collapsed_arms[0, place]].tolist(),
            "sound_difference": float(judgements.sound_difference[0, place]),
            "decidable": self._predictive_power(contrast, place),
            "new_images_low": low,
            "new_images_high": high,
        }
        if lost:
            filled = judgements.with_chance.single(0, place)
            row |= {f"chance_{name}": getattr(filled, name) for name in ("difference", "low", "high", "shared")}
            row |= {"chance_p": filled.p_corrected, "chance": self.facts.chance.get(arm, NAN)}
        return row

    def _tuning_variances(self, values_AN: Floats) -> tuple[Choices, list[float]]:
        """Return what the choice of knobs by the metric of the analysis adds to each comparison, and its sd."""
        values = {arm: row[np.isfinite(row)].tolist() for arm, row in zip(self.samples, values_AN, strict=True)}
        sign, of_arms = self.comparisons.sign, {}
        for tuning in self.plan.tuning:
            arm, winner = tuning.arm or "", tuning.winner
            own = values.get(arm, [])
            scores = {place: sign * rival.score for place, rival in enumerate(tuning.rivals) if rival.score is not None}
            is_judged = tuning.select == self.plan.analysis.metric
            if winner is not None and is_judged and min(len(own), len(scores)) > 1:
                of_arms[arm] = replicates.retuning_variance(
                    [*scores.values()],
                    [*scores].index(winner),
                    sign * float(np.mean(own)),
                    float(np.std(own, ddof=1)),
                    len(tuning.rivals[winner].trials),
                )
        sides = [[of_arms.get(name, (NAN, 1.0)) for name in pair] for pair in self.compared.items()]
        variance_C2, df_C2 = np.moveaxis(np.array(sides), 2, 0)
        added_C = np.where(np.isnan(variance_C2).all(axis=1), NAN, np.nansum(variance_C2, axis=1))
        return Choices(np.nan_to_num(variance_C2)[None], df_C2[None]), np.sqrt(added_C).tolist()

    def _predictive_power(self, contrast: Contrast, index: int) -> float:
        """Return the probability that all seeds that a comparison may get decide it; NaN if it gets no more."""
        looks, comparisons = self.plan.looks, self.comparisons
        if looks is None or not looks.futility or not 1 < contrast.pairs < len(looks.seeds[-1]):
            return NAN
        level = float(replace(comparisons, share=looks.shares[-1]).levels[index])
        sizes = contrast.pairs, len(looks.seeds[-1])
        overlap = float(np.asarray(comparisons.overlap)[index])
        return power.predictive_power(
            contrast.difference, contrast.se, contrast.df, sizes, level, comparisons.margin, overlap
        )

    def _new_image_interval(self, arm: str, contrast: Contrast, level: float) -> tuple[float, float]:
        """Return the interval for new images, if the pairs have values of single images."""
        first, second = self.samples[arm], self.samples[self.compared[arm]]
        seeds = sorted(first.values.keys() & second.values.keys())
        available = set(seeds) <= first.images.keys() & second.images.keys()
        if math.isnan(contrast.low) or not available or not 1 < len(seeds) == contrast.pairs:
            return NAN, NAN
        differences_SI = np.array([first.images[seed] - second.images[seed] for seed in seeds])
        low, high = replicates.interval_for_new_images(differences_SI, contrast.se, contrast.df, level)
        return max(low, -self.comparisons.reach), min(high, self.comparisons.reach)
