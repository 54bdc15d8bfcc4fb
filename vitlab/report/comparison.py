"""Comparison of arms: one row per arm, with its mean and its difference from the baseline.

A seed that diverged or failed has no value.  Every comparison with such a seed is made twice: over the complete pairs,
and with chance level in place of the missing values; a verdict must hold in both.

With ``variance: moderated``, comparisons with one baseline at the same seeds share what they know about spread, and are
corrected together under their correlation; see :mod:`vitlab.statistics.moderation`.  Those that cannot share have their
own variance, and a family that holds some of them is corrected by Holm's method.

With several looks (``seeds.until`` and ``seeds.escalate_to``), each look has a part of alpha over the whole family, see
:func:`vitlab.statistics.sequential_levels`.  What a look decides is final.  What it leaves open is judged again once
all further seeds have ended, with the decided comparisons counted in the family as NaN.  Its
estimate and interval are those of the look.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab import statistics
from vitlab.plan.values import Plan
from vitlab.report.comparison_columns import MEANINGS, contrast_columns, image_columns
from vitlab.report.family import Family, Values, correct
from vitlab.report.frame import GROUPS, STATUSES, joint_overlap, usable
from vitlab.report.image_values import ImageValues
from vitlab.report.verdict import decide
from vitlab.spec import Analysis
from vitlab.statistics import Contrast
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

MIN_PREREQUISITES = 3  #: distinct prerequisites that each arm needs if arms differ by them


def refusals(plan: Plan, seeds: Collection[int] | None = None) -> dict[str, str]:
    """Return the reasons why comparisons are refused, by arm, at the given seeds or at all.

    If two arms differ by their prerequisite (a teacher, a pre-trained body), the sample is that of the prerequisites:
    five students of one teacher are one sample of the teacher.
    """
    prerequisites: dict[str, dict[str, set[str]]] = {}
    for planned in plan.trials:
        if seeds is not None and planned.seed not in seeds:
            continue
        for role, trial in planned.trial.needs.items():
            prerequisites.setdefault(planned.arm, {}).setdefault(role, set()).add(trial.partition("/")[0])
    reasons = {}
    for arm in plan.arms:
        first, second = prerequisites.get(arm.name, {}), prerequisites.get(arm.baseline or "", {})
        for role in sorted(first.keys() & second.keys()):
            fewest = min(len(first[role]), len(second[role]))
            if first[role] != second[role] and fewest < MIN_PREREQUISITES:
                trained = "training" if fewest == 1 else "trainings"
                reasons[arm.name] = (
                    f"the arms differ by their {role}, of which {fewest} {trained} stand{'s' * (fewest == 1)} behind "
                    f"an arm: fewer than {MIN_PREREQUISITES} are no sample"
                )
    return reasons


def broken_seeds(frame: pd.DataFrame, analysis: Analysis) -> dict[str, list[int]]:
    """Return the seeds of each arm that diverged or failed, or lack a finite value that other seeds of the arm have."""
    broken = {}
    values = usable(frame, analysis)
    for arm, rows in frame.drop_duplicates(["arm", "trial"]).groupby("arm", sort=False):
        usable_seeds = values[str(arm)]
        is_broken = rows["status"].isin([Ending.DIVERGED, Ending.FAILED]) | (
            (rows["status"] == Ending.DONE) & bool(usable_seeds)
        )
        broken[str(arm)] = [int(seed) for seed in rows.loc[is_broken, "seed"] if seed not in usable_seeds]
    return broken


def summary(
    frame: pd.DataFrame, plan: Plan, refused: Mapping[str, str] = {}, images: ImageValues = {}
) -> list[dict[str, Any]]:
    """Return one row per arm, in JSON values: its mean and its difference from the baseline.

    Columns are those of :func:`column_names`, whatever has been measured.  What is missing is None; infinities are the
    texts ``inf`` and ``-inf``, because JSON has no number for them.

    Args:
        frame: see :func:`vitlab.report.frame.results`.
        plan: the plan with the analysis and the registration.
        refused: arm to a reason why its comparison is refused, in addition to :func:`refusals`.
        images: the values of single images, see :func:`vitlab.report.image_values.image_values`.
    """
    analysis, values = plan.analysis, usable(frame, plan.analysis)
    grouped = {str(arm): rows for arm, rows in frame.groupby("arm", sort=False)}
    compared = {arm: str(rows["baseline"].iloc[0]) for arm, rows in grouped.items() if rows["baseline"].notna().all()}
    pending = pending_trials(frame, plan, compared)
    quantum = frame.attrs.get("quantum", 0.0)
    overlap = {arm: joint_overlap(frame, filter(None, (arm, compared.get(arm)))) for arm in grouped}
    judgements = judge(
        plan, compared, values, broken_seeds(frame, analysis), refused, pending, quantum, images, overlap
    )
    collapsed = statistics.collapsed_seeds(values, 1 if analysis.goal == "max" else -1)
    columns = column_names(analysis)
    test = next(iter(columns[len(MEANINGS) :]), None)
    summary_rows = []
    for arm, rows in grouped.items():
        counts = {status: int((rows["status"] == status).sum()) for status in STATUSES}
        by_seed = list(values[arm].values())
        mean = statistics.mean_interval(by_seed, analysis.alpha, quantum, joint_overlap(frame, [arm]))
        row: dict[str, Any] = {"arm": arm, "baseline": compared.get(arm), "planned": len(rows), **counts}
        row |= {"n": mean.n, "mean": mean.mean, "sd": mean.sd, "low": mean.low, "high": mean.high}
        row["collapsed"] = len(collapsed[arm])
        of_images = [images[arm][seed] for seed in values[arm] if seed in images.get(arm, {})]
        row["split_sd"] = statistics.split_sd(np.array(of_images)) if len(of_images) > 1 else math.nan
        row |= judgements.get(arm, {})
        row |= {name: rows[name].max() if rows[name].notna().any() else None for name in ("params", "macs")}
        row["wall_s"] = rows["wall_s"].sum()
        row["images_per_s"] = (rows["images"] / rows["wall_s"]).median() if rows["wall_s"].gt(0).any() else math.nan
        row["verdict"] = decide(dict.fromkeys(MEANINGS) | row, analysis)
        if test is not None and test in rows:
            tested = rows.loc[rows["seed"].isin(list(values[arm])), test]
            with np.errstate(invalid="ignore"):  # infinite values have no deviation
                row |= {test: tested.mean(), f"{test}_sd": tested.std()}
        summary_rows.append({name: _json_value(row.get(name), _type(name)) for name in columns})
    return summary_rows


def column_names(analysis: Analysis) -> list[str]:
    """Return the columns of :func:`summary`, which depend on the study's metric alone.

    They are those of ``MEANINGS``, followed by the mean of the test metric of the same name and its standard deviation
    (``test/NAME``, ``test/NAME_sd``), unless a table of other programs does not say which split its metric is of.
    """
    split, _, name = analysis.metric.partition("/")
    return [*MEANINGS, *([f"test/{name}", f"test/{name}_sd"] if split in GROUPS else [])]


def summary_frame(rows: Sequence[Mapping[str, Any]], analysis: Analysis) -> pd.DataFrame:
    """Return the rows of :func:`summary` as a frame."""
    import pandas as pd

    columns = column_names(analysis)
    return pd.DataFrame(rows, columns=columns).astype({name: _type(name) for name in columns})


def _type(column: str) -> str:
    """Return the type of a column of :func:`summary`."""
    return MEANINGS[column][0] if column in MEANINGS else "float64"


def _json_value(value: Any, kind: str) -> str | int | float | None:
    """Return a value of a column of a type as a JSON value, see :func:`summary`."""
    if value is None or kind == "string":
        return None if value is None else str(value)
    if math.isnan(value):
        return None
    if math.isinf(value):
        return str(float(value))
    return float(value) if kind == "float64" else int(value)


def pending_trials(frame: pd.DataFrame, plan: Plan, compared: Mapping[str, str]) -> dict[str, int]:
    """Return the number of trials per comparison that have not ended, those of its latest look included."""
    open_ = frame[frame["status"].isin(["running", "missing"])]
    seeds: dict[str, set[int]] = {str(arm): set(rows["seed"]) for arm, rows in open_.groupby("arm")}
    planned: dict[str, set[int]] = {str(arm): set(rows["seed"]) for arm, rows in frame.groupby("arm")}
    counts = {}
    for arm, baseline in compared.items():
        sides = [seeds.get(name, set()) for name in (arm, baseline)]
        if plan.looks is not None:
            own_seeds = set(plan.looks.seeds[plan.looks.number(arm)])
            # Seeds of a look that has just become due may not be planned yet.
            sides = [
                side & own_seeds | own_seeds - planned[name] for side, name in zip(sides, (arm, baseline), strict=True)
            ]
        counts[arm] = sum(map(len, sides))
    return counts


def judge(
    plan: Plan,
    compared: Mapping[str, str],
    values: Mapping[str, Values],
    lost: Mapping[str, Sequence[int]],
    refused: Mapping[str, str],
    pending: Mapping[str, int],
    quantum: float = 0.0,
    images: ImageValues = {},
    overlap: Mapping[str, float] = {},
) -> dict[str, dict[str, Any]]:
    """Return the comparison columns of :func:`summary` for every arm that has a baseline.

    Args:
        plan: the plan with the analysis and the registration.
        compared: arm to its baseline.
        values: arm to the values of its seeds.
        lost: arm to its seeds that diverged or failed.
        refused: see :func:`summary`.
        pending: see :func:`pending_trials`.
        quantum: the step of the metric, 0 if it has none or it is not known.
        images: see :func:`summary`.
        overlap: arm to what its comparison is corrected for, see :func:`vitlab.report.frame.joint_overlap`.
    """
    rows: dict[str, dict[str, Any]] = {}
    latest = {arm: 0 if plan.looks is None else plan.looks.number(arm) for arm in compared}
    for look in range(len(plan.alpha_shares)):
        seeds = None if plan.looks is None else set(plan.looks.seeds[look])
        is_seen = (lambda seed: True) if seeds is None else seeds.__contains__
        # Until all further seeds have ended, the verdicts are those of the look before.
        arms = [arm for arm in compared if look in (0, latest[arm] - bool(pending[arm])) or look < latest[arm]]
        if not arms:
            break
        rows |= _judge_look(
            plan,
            {arm: compared[arm] for arm in arms},
            {arm: {seed: value for seed, value in some.items() if is_seen(seed)} for arm, some in values.items()},
            {arm: list(filter(is_seen, some)) for arm, some in lost.items()},
            refusals(plan, seeds) | dict(refused),
            Family.of(plan, compared, look),
            pending,
            quantum,
            images,
            overlap,
        )
    return rows


def _judge_look(
    plan: Plan,
    compared: Mapping[str, str],
    values: Mapping[str, Values],
    lost: Mapping[str, Sequence[int]],
    refused: Mapping[str, str],
    family: Family,
    pending: Mapping[str, int],
    quantum: float,
    images: ImageValues,
    overlap: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    """Judge the comparisons of one look at the given seeds, see :func:`judge`."""
    analysis = plan.analysis
    facts = plan.facts(analysis.metric)
    chance = {} if facts is None else facts.chance
    imputed = {
        arm: {**by_seed, **dict.fromkeys(lost.get(arm, ()), chance.get(arm, math.nan))}
        for arm, by_seed in values.items()
    }
    contrasts, imputed_contrasts = {}, {}
    for arm, baseline in compared.items():
        first, second = values[arm], values.get(baseline, {})
        options = family.level(arm), quantum, overlap.get(arm, 0.0)
        contrasts[arm] = imputed_contrasts[arm] = statistics.compare(first, second, *options)
        sides = imputed[arm], imputed.get(baseline, {})
        if sides != (first, second):
            chance_known = all(math.isfinite(value) for side in sides for value in side.values())
            imputed_contrasts[arm] = (
                statistics.compare(*sides, *options) if chance_known else _without_test(contrasts[arm], math.nan)
            )
        if arm in refused:
            contrasts[arm], imputed_contrasts[arm] = (
                _without_test(c[arm], c[arm].difference) for c in (contrasts, imputed_contrasts)
            )
    collapsed = statistics.collapsed_seeds(values, 1 if analysis.goal == "max" else -1)
    collapsed_pairs = {arm: len(collapsed[arm]) + len(collapsed.get(base, ())) for arm, base in compared.items()}
    for arm in (arm for arm in compared if collapsed_pairs[arm]):
        contrasts[arm], imputed_contrasts[arm] = (_exact(side[arm]) for side in (contrasts, imputed_contrasts))
    choices = _choices(plan, values)
    choice_sd = {}
    for arm, baseline in compared.items():
        variances = [choices[name] for name in (arm, baseline) if name in choices]
        choice_sd[arm] = math.sqrt(sum(variance for variance, _ in variances)) if variances else math.nan
        contrasts[arm], imputed_contrasts[arm] = (
            statistics.with_choices(side[arm], variances, family.level(arm)) for side in (contrasts, imputed_contrasts)
        )
    judged = correct(contrasts, compared, values, family, analysis)
    nothing_lost = imputed == values
    imputed_judged = judged if nothing_lost else correct(imputed_contrasts, compared, imputed, family, analysis)
    rows: dict[str, dict[str, Any]] = {
        arm: {"look": family.look + 1, "looks": len(plan.alpha_shares), "awaited": pending[arm]} for arm in compared
    }
    for arm, baseline in compared.items():
        missing = len(lost.get(arm, ())) + len(lost.get(baseline, ()))
        contrast, imputed_contrast = judged.contrasts[arm], imputed_judged.contrasts[arm]
        level = judged.levels[arm]
        rows[arm] |= contrast_columns(contrast)
        rows[arm] |= {"correction": judged.corrections[arm], "own_variance": judged.own_variance.get(arm)}
        rows[arm] |= {
            "p_corrected": judged.p[arm],
            "family": family.size(arm),
            "broken": missing,
            "collapsed_pairs": collapsed_pairs[arm],
            "refused": refused.get(arm),
            "choice_sd": choice_sd[arm],
            "decidable": _decidable(contrast, plan, family, arm),
        }
        rows[arm]["exploratory"] = "; ".join(family.why[arm]) or None
        if missing:
            rows[arm] |= {"chance": chance.get(arm, math.nan), "chance_p": imputed_judged.p[arm]}
            rows[arm]["chance_difference"] = imputed_contrast.difference
        if analysis.margin is not None:
            test = statistics.equivalence(contrast, analysis.margin, level)
            rows[arm] |= {"equal_low": test.low, "equal_high": test.high, "p_equal": test.p}
            rows[arm] |= {"p_equal_corrected": judged.p_equal[arm]}
            if missing:
                rows[arm]["chance_p_equal"] = imputed_judged.p_equal[arm]
        if missing:
            rows[arm] |= {"chance_difference": imputed_contrast.difference}
            rows[arm] |= {"chance_low": imputed_contrast.low, "chance_high": imputed_contrast.high}
        if arm not in refused:
            rows[arm] |= image_columns(arm, baseline, values, images, contrast, level)
    return rows


def _choices(plan: Plan, values: Mapping[str, Values]) -> dict[str, tuple[float, float]]:
    """Return the variance of the choice of knobs, and its degrees of freedom, of arms that are tuned by the metric."""
    sign = 1 if plan.analysis.goal == "max" else -1
    choices = {}
    for tuning in plan.tuning:
        scored = [(index, rival) for index, rival in enumerate(tuning.rivals) if rival.score is not None]
        own_values = list(values.get(tuning.arm or "", {}).values())
        if tuning.winner is None or tuning.select != plan.analysis.metric or len(own_values) < 2 or len(scored) < 2:
            continue
        variance = statistics.choice_variance(
            [sign * rival.score for _, rival in scored if rival.score is not None],
            [index for index, _ in scored].index(tuning.winner),
            sign * float(np.mean(own_values)),
            float(np.std(own_values, ddof=1)),
            len(tuning.rivals[tuning.winner].trials),
        )
        choices[str(tuning.arm)] = variance, len(scored) - 1.0
    return choices


def is_futile(row: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether the study gives up a comparison, because all of its seeds would hardly decide it."""
    return plan.looks is not None and row["decidable"] is not None and row["decidable"] < plan.looks.futility


def _decidable(contrast: Contrast, plan: Plan, family: Family, arm: str) -> float:
    """Return the probability that all seeds that a comparison may get decide it; NaN if it gets no more."""
    looks = plan.looks
    if looks is None or not looks.futility or not 1 < contrast.pairs < len(looks.seeds[-1]):
        return math.nan
    alpha = looks.shares[-1] * plan.analysis.alpha
    level = statistics.simultaneous_alpha(alpha, family.size(arm), plan.analysis.correction)
    sizes = contrast.pairs, len(looks.seeds[-1])
    return statistics.predictive_power(
        contrast.difference, contrast.se, contrast.df, sizes, level, plan.analysis.margin, contrast.overlap
    )


def _without_test(contrast: Contrast, difference: float) -> Contrast:
    return Contrast(difference, math.nan, math.nan, math.nan, "none", contrast.pairs, overlap=contrast.overlap)


def _exact(contrast: Contrast) -> Contrast:
    """Return a comparison that rests on the exact sign-flip test; it has no interval.

    The test needs independent seeds; if they hold out different images, the comparison has none.
    """
    if contrast.overlap and contrast.test == "paired t":
        return _without_test(contrast, contrast.difference)
    if contrast.test != "paired t" or math.isnan(contrast.sign_flip_p):
        return contrast
    return replace(
        contrast, test="sign flip", p=contrast.sign_flip_p, low=math.nan, high=math.nan, se=math.nan, df=math.nan
    )
