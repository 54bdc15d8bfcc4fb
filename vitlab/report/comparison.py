"""Summary of a study: one row per arm, with its mean and its difference from the baseline, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitlab.comparison import Verdict
from vitlab.comparison.study import Sample, is_futile, judge_study
from vitlab.planning.registration import newly_compared_arms
from vitlab.planning.values import Looks, Plan
from vitlab.report.frame import GROUPS, StudyResults, parse_column_descriptions
from vitlab.report.phrasing import Row
from vitlab.spec import Analysis
from vitlab.statistics import replicates
from vitlab.statistics.replicates import NAN
from vitlab.store.folders import OPEN, STATUSES, Store
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = parse_column_descriptions(f"""
arm | string | the arm
baseline | string | the arm it is compared with; if there is none, this and all columns of the comparison are missing
planned | int64 | trials, one a seed
done | int64 | trials that ended well
diverged | int64 | trials whose loss was not finite
failed | int64 | trials that ended without a result
running | int64 | trials that run now
paused | int64 | trials that have stopped before their end, with a checkpoint
missing | int64 | trials that have not started
n | int64 | values judged
mean | float64 | their mean
sd | float64 | their sample standard deviation; missing for one
split_sd | float64 | what it would be for equally good models, on a split of this size; needs predictions
low | float64 | t-interval of the mean, of level 1 - alpha, within the bounds of the metric; needs three values, of
    which none collapsed
high | float64 | its upper end
collapsed | int64 | values among them that are far worse than the others, in robust standard deviations
sound_mean | float64 | the mean without these; missing where there are none
best | boolean | whether its mean is the best of its block, or none is shown to be better; the best arm is among these
    with a probability of at least 1 - alpha, if p values are corrected
verdict | string | {", ".join(list(Verdict)[:-1])} or {Verdict.REFUSED}; missing where the arm is compared with
    nothing
refused | string | why the comparison is not judged, where the verdict is refused
complete_verdict | string | the verdict of the complete pairs alone; another one where lost seeds overturn it
test | string | paired t, Welch t, sign flip or none (too few values); where seeds vary the split, t is corrected for
    the overlap of training sets
shared | Int64 | comparisons whose variances are averaged with its own, itself included
look | Int64 | the look that the comparison was judged at: 2 if the first was inconclusive, and so on
looks | Int64 | looks that share alpha: more than 1 if the study adds seeds to inconclusive comparisons
decidable | float64 | probability that all seeds that the comparison may get decide it, if seeds are added until it is
    decided
awaited | Int64 | trials of the comparison that have not ended
choice_sd | float64 | standard deviation that the choice of tuned knobs adds to the difference
pairs | Int64 | seeds that both sides have
family | Int64 | comparisons that it is corrected for, with registered ones that are not made
registered | boolean | whether registered before its first result, and corrected for such alone; missing where none is
collapsed_pairs | Int64 | collapsed seeds of both sides; with any, no verdict rests on t
lost | Int64 | lost seeds of both sides: their trials diverged, failed or were killed
difference | float64 | mean difference from the baseline, over complete pairs
sound_difference | float64 | the same without collapsed seeds; missing where there are none
difference_sd | float64 | sample standard deviation of the differences between seeds
difference_se | float64 | standard error of the difference that the test uses
difference_df | float64 | its degrees of freedom
difference_low | float64 | its interval, which holds for the whole family, and after all looks, at once; needs three
    pairs
difference_high | float64 | its upper end
new_images_low | float64 | the same interval for trainings that are evaluated on new images, too
new_images_high | float64 | its upper end
p | float64 | two-sided p of this comparison alone
p_corrected | float64 | the same, corrected for the family and the looks
chance | float64 | what guessing reaches, where seeds are lost and that is known
at_chance | float64 | the same, where neither the interval of the mean nor every seed is beyond it
chance_difference | float64 | the difference, with chance in the place of lost seeds
chance_low | float64 | its interval, which holds for the whole family at once
chance_high | float64 | its upper end
chance_p | float64 | its p, corrected
chance_shared | Int64 | comparisons whose variances are averaged with its own, with chance in the place of lost seeds
equal_low | float64 | interval of level 1 - 2 alpha, to be set against the margin of the analysis
equal_high | float64 | its upper end
p_equal | float64 | p of the test that the difference lies within the margin, alone
p_equal_corrected | float64 | the same, corrected for the family and the looks
exploratory | string | the part of the comparison that was decided after the first run
params | Int64 | parameters of the model
macs | Int64 | multiply-accumulates of one image, forward
wall_s | float64 | seconds of all trials together
""")
"""Columns of :func:`summary_rows` with their types and meanings; the same for every study."""


COSTS: dict[str, Any] = {"params": "max", "macs": "max", "wall_s": lambda seconds: seconds.sum(min_count=1)}
"""Columns of costs, and how those of an arm's trials are joined."""


class _Trial(NamedTuple):
    """A row of the results, as far as each is needed by itself: a table may have a million."""

    arm: str
    baseline: Any  #: name of an arm, or a missing value of pandas
    seed: int
    status: str
    trial: str
    tested: float  #: the test metric of the same name as the metric; NaN where there is none


def summary_rows(results: StudyResults, refused: Mapping[str, str] = {}) -> list[Row]:
    """Return one row per arm, in JSON values: its mean and its difference from the baseline.

    Columns are :func:`column_names`, also where nothing was measured.  What is missing is None; infinities are
    the texts ``inf`` and ``-inf``, because JSON has no number for them.  ``refused`` has further reasons why arms are
    not compared.
    """
    # A table of other programs need not have every column.
    costs_of_trials = results.frame.reindex(columns=["arm", *COSTS]).astype(dict.fromkeys(COSTS, "float64"))
    costs = costs_of_trials.groupby("arm", sort=False).agg(COSTS).to_dict("index")
    arms = trials_by_arm(results)
    samples = samples_by_arm(results, arms)
    compared = {arm: trials[0].baseline for arm, trials in arms.items() if isinstance(trials[0].baseline, str)}
    samples |= {arm: Sample({}) for arm in compared.values() if arm not in samples}
    awaited = {
        arm: sum(_count_awaited(arms.get(name, []), arm, results.plan) for name in (arm, baseline))
        for arm, baseline in compared.items()
    }
    judged = judge_study(results.plan, compared, samples, quantum=results.quantum, refused=refused, awaited=awaited)
    best = {*arms} if refused else _arms_near_best(results, samples, judged)
    return [
        _summarize_arm(arm, trials, {**costs[arm], "best": arm in best}, results, judged)
        for arm, trials in arms.items()
    ]


def samples_by_arm(results: StudyResults, arms: Mapping[str, Sequence[_Trial]]) -> dict[str, Sample]:
    """Return the sample of every arm, from its trials by :func:`trials_by_arm`."""
    return {
        arm: Sample(values, _lost_seeds(trials, values), results.overlap.get(arm, 0.0), results.images.get(arm, {}))
        for arm, trials in arms.items()
        for values in [results.values.get(arm, {})]
    }


def plan_without_registration(plan: Plan) -> Plan:
    """Return the plan without its registration, for further comparisons; looks have equal levels, at all seeds."""
    looks = plan.looks
    if looks is not None:
        number = len(looks.seeds)
        looks = Looks(looks.seeds[-1:] * number, (1 / number,) * number)
    return replace(plan, registered=None, looks=looks)


def _arms_near_best(
    results: StudyResults, samples: Mapping[str, Sample], judged: Mapping[str, Mapping[str, Any]]
) -> set[str]:
    """Return the arms of the best mean, one a block, and those that none is shown to be better than.

    The truly best arm is left out only where a comparison of it with another arm is wrong, of which there are as many
    as each is corrected for.
    """
    plan, best = results.plan, dict[str, str]()
    means = {arm: np.mean([*sample.values.values()]) for arm, sample in samples.items() if sample.values}
    arms = [arm for arm in plan.arms if arm.name in means and not arm.is_control]
    for arm in sorted(arms, key=lambda arm: means[arm.name], reverse=plan.analysis.goal == "max"):
        best.setdefault(arm.block, arm.name)
    beside = tuple(replace(arm, baseline=best[arm.block]) for arm in arms if arm.name != best[arm.block])
    compared = {arm.name: str(arm.baseline) for arm in beside}
    further = judge_study(
        replace(plan_without_registration(plan), arms=beside), compared, samples, quantum=results.quantum
    )
    # A control is no rival of the arms; it may be the best where its baseline may, which it repeats with other seeds.
    controls = [arm for arm in plan.arms if arm.is_control]
    rows = [*further.items(), *((arm.name, judged[arm.name]) for arm in arms if arm.name in judged)]
    beaten = {arm for arm, row in rows if row["verdict"] == Verdict.WORSE}
    beaten |= {row["baseline"] for _, row in rows if row["verdict"] == Verdict.BETTER}
    near = {*best.values()} | {arm.name for arm in arms} - beaten
    return near | {arm.name for arm in controls if arm.baseline in near}


def trials_by_arm(results: StudyResults) -> dict[str, list[_Trial]]:
    """Return what is needed of the trials of every arm that has any."""
    table = results.frame.rename(columns={_test_split_column(results.plan.analysis): "tested"})
    table = table.reindex(columns=[*_Trial._fields]).astype({"tested": "float64"})
    arms: dict[str, list[_Trial]] = {str(arm): [] for arm in table["arm"].unique()}
    for trial in map(_Trial._make, table.itertuples(index=False, name=None)):
        arms[trial.arm].append(trial)
    return arms


def _lost_seeds(trials: Sequence[_Trial], values: Mapping[int, float]) -> list[int]:
    """Return the lost seeds: their trials diverged, failed, or lack a finite value that other seeds of the arm have."""
    first_seeds = {trial.trial: trial for trial in reversed(trials)}  # seeds that share a trial are one training
    return [
        trial.seed
        for trial in first_seeds.values()
        if trial.seed not in values
        and (trial.status in (Ending.DIVERGED, Ending.FAILED) or (trial.status == Ending.DONE and bool(values)))
    ]


def _count_awaited(trials: Sequence[_Trial], arm: str, plan: Plan) -> int:
    """Return how many trials of one side of an arm's comparison have not ended, its latest look included."""
    open_seeds = {trial.seed for trial in trials if trial.status in OPEN}
    if plan.looks is not None:
        due = set(plan.looks.seeds[plan.looks.latest_look(arm)])
        # Seeds of a look that has just become due may not be planned yet.
        open_seeds = open_seeds & due | due - {trial.seed for trial in trials}
    return len(open_seeds)


def column_names(analysis: Analysis) -> list[str]:
    """Return the columns of :func:`summary_rows`, which depend on the study's metric alone.

    They are ``COLUMNS``, followed by the mean of the test metric of the same name and its standard deviation
    (``test/NAME``, ``test/NAME_sd``), unless a table of other programs does not say which split its metric is of.
    """
    test = _test_split_column(analysis)
    return [*COLUMNS, *([test, f"{test}_sd"] if test else [])]


def summary_rows_to_frame(rows: Sequence[Row], analysis: Analysis) -> pd.DataFrame:
    """Return the rows of :func:`summary_rows` as a frame."""
    import pandas as pd

    columns = column_names(analysis)
    return pd.DataFrame(rows, columns=columns).astype({name: _column_type(name) for name in columns})


def _summarize_arm(
    arm: str,
    trials: Sequence[_Trial],
    costs: Mapping[Any, float],
    results: StudyResults,
    comparisons: Mapping[str, Row],
) -> Row:
    plan, comparison = results.plan, comparisons.get(arm)
    analysis, facts = plan.analysis, plan.facts()
    values, images = results.values.get(arm, {}), results.images.get(arm, {})
    mean = replicates.mean_interval(
        [*values.values()], analysis.alpha, results.quantum, results.largest_val_train_ratio([arm])
    )
    lowest, highest = (None, None) if facts is None else facts.bounds
    sign = 1 if analysis.goal == "max" else -1
    statuses = [trial.status for trial in trials]
    of_images = [images[seed] for seed in values if seed in images]
    if comparison is not None:
        collapsed = set(comparison["collapsed_seeds"])
    else:
        # Seeds of a baseline are judged beside those of the arms that are compared with it.
        beside = [name for name, other in comparisons.items() if other["baseline"] == arm]
        group = {name: results.values.get(name, {}) for name in (arm, *beside)}
        collapsed = set(replicates.collapsed_seeds_by_arm(group, sign, results.quantum)[arm])
    sound = [value for seed, value in values.items() if seed not in collapsed]
    chance = NAN if facts is None else facts.chance.get(arm, NAN)
    ahead = [sign * (value - chance) for value in values.values()]
    row = {
        **(comparison or {}),
        **vars(mean),
        "arm": arm,
        "planned": len(trials),
        **{status: statuses.count(status) for status in STATUSES},
        "low": NAN if collapsed else mean.low if lowest is None else max(mean.low, lowest),
        "high": NAN if collapsed else mean.high if highest is None else min(mean.high, highest),
        "split_sd": replicates.split_sd(np.array(of_images)) if len(of_images) > 1 else NAN,
        "collapsed": len(collapsed),
        "at_chance": NAN if collapsed else _chance_if_unbeaten(chance, mean, ahead, results.quantum),
        "sound_mean": float(np.mean(sound)) if collapsed and sound else NAN,
        **costs,
    }
    if test := _test_split_column(analysis):
        tested = [trial.tested for trial in trials if trial.seed in values and not math.isnan(trial.tested)]
        with np.errstate(invalid="ignore"):  # infinite values have no deviation
            row[test] = float(np.mean(tested or NAN))
            row[f"{test}_sd"] = float(np.std(tested, ddof=1)) if len(tested) > 1 else NAN
    return {name: _json_value(row.get(name), _column_type(name)) for name in column_names(analysis)}


def _chance_if_unbeaten(chance: float, mean: replicates.Mean, ahead: Sequence[float], quantum: float) -> float:
    """Return ``chance`` if an arm, whose values are ``ahead`` of it, is not shown to be better; NaN if it is."""
    # The quantum is 1 / images: two standard deviations of the share that guesses get right.
    noise = 2 * math.sqrt(max(0.0, chance * (1 - chance) * quantum))
    if not ahead or 0 < noise < min(ahead):
        return NAN
    half = mean.mean - mean.low
    # One or two seeds, or equal ones, as of an arm that always answers one class, do not say how far they scatter.
    if math.isnan(half) or mean.sd == 0:
        half = noise
    return chance if np.mean(ahead) - half <= 1e-6 * abs(chance) else NAN  # metrics are of float32


def _test_split_column(analysis: Analysis) -> str | None:
    """Return the test metric of the same name as the metric, if the metric says which split it is of."""
    split, _, name = analysis.metric.partition("/")
    return f"test/{name}" if split in GROUPS else None


def _column_type(column: str) -> str:
    return COLUMNS[column][0] if column in COLUMNS else "float64"


def _json_value(value: Any, kind: str) -> str | int | float | bool | None:
    """Return a value of a column of a type as a JSON value, see :func:`summary_rows`."""
    if value is None or kind == "string":
        return None if value is None else str(value)
    if math.isnan(value):
        return None
    if math.isinf(value):
        return str(float(value))
    return float(value) if kind == "float64" else bool(value) if kind == "boolean" else int(value)


# -- looks -------------------------------------------------------------------------------------------------------------


def looks_with_open_arms(plan: Plan, store: Store) -> Looks | None:
    """Return the plan's looks with the arms that each leaves open, by the results that exist; None without looks."""
    looks = plan.looks
    if looks is None or plan.pending:  # tunings come first
        return looks
    existing = {(planned.arm, planned.seed) for planned in plan.trials}
    for look, seeds in enumerate(looks.seeds[:-1]):
        if look and any((arm, seed) not in existing for arm in looks.open[look - 1] for seed in seeds):
            break  # the next plan has the seeds of this look
        trials = tuple(planned for planned in plan.trials if planned.seed in seeds)
        so_far = replace(plan, trials=trials, looks=replace(looks, open=looks.open[:look]))
        arms = arms_to_continue(so_far, store, *looks.open[look : look + 1])
        looks = replace(looks, open=(*looks.open[:look], arms, *looks.open[look + 1 :]) if arms else looks.open[:look])
        if not arms:
            break
    return looks


def arms_to_continue(plan: Plan, store: Store, before: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the arms whose comparison is inconclusive at the latest of the plan's looks, and may become conclusive.

    It may not if it is refused, if a trial of one of its arms failed, which must be retried first, or if all seeds that
    it may get would decide it with too little probability.  Registered comparisons are judged together, so none is
    opened before all of them have ended.  An arm that was open ``before`` stays open once its seeds have all ended:
    each look is valid on its own.  The plan has the seeds of that look alone.
    """
    if plan.looks is None or plan.pending:
        return ()
    rows = summary_rows(StudyResults.read(plan, store))
    failed = {row["arm"] for row in rows if row["failed"]}
    rows = [row for row in rows if plan.looks.latest_look(row["arm"]) == len(plan.looks.open)]
    pending = {row["arm"] for row in rows if row["awaited"]}
    open_arms = set(before)
    if not pending - newly_compared_arms(plan):
        open_arms |= {
            row["arm"]
            for row in rows
            if row["verdict"] == Verdict.CANNOT_TELL and row["difference"] is not None
            if failed.isdisjoint((row["arm"], row["baseline"])) and not is_futile(row["decidable"], plan)
        }
    return tuple(row["arm"] for row in rows if row["arm"] in open_arms - pending)
