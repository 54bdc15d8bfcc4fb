"""The judgement: one row per arm, with what it reached and how it differs from its baseline.

A seed that diverged or failed has no value.  Every comparison it belongs to is made twice: over the pairs that are
complete, and with what chance reaches in the place of what is missing; only what both support is claimed.

Where a study may look twice (``seeds.escalate_to``), either look spends half of alpha over the whole family.  What the
first decides stands as it was decided, at its seeds; what it leaves open is judged again once all further seeds have
ended, and counts those that were decided as comparisons that say nothing.  So the chance of any false claim is at most
alpha, whatever the first look saw: the p values of either look are valid by themselves, and Bonferroni joins the looks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitlab import statistics
from vitlab.plan.registration import added_comparisons, altered_arms, changes, results_before_registration
from vitlab.plan.values import Plan
from vitlab.report.frame import STATUSES, usable
from vitlab.report.verdict import Verdict, decide
from vitlab.spec import Analysis
from vitlab.statistics import Contrast

if TYPE_CHECKING:
    import pandas as pd

Values = Mapping[int, float]
"""Seed to value."""

LEAST_PREREQUISITES = 3  #: distinct trials that must stand behind each arm where arms differ by them
MEANINGS = {
    "arm": ("string", "the arm"),
    "baseline": ("string", "the arm it is compared with; missing where there is none, as is all that compares"),
    "planned": ("int64", "trials, one a seed"),
    "done": ("int64", "trials that ended well"),
    "diverged": ("int64", "trials whose loss was not finite"),
    "failed": ("int64", "trials that ended without a result"),
    "running": ("int64", "trials that run now"),
    "missing": ("int64", "trials that were not begun, or stopped on the way"),
    "n": ("int64", "values judged"),
    "mean": ("float64", "their mean"),
    "sd": ("float64", "their sample standard deviation; missing for one"),
    "low": ("float64", "t-interval of the mean, of level 1 - alpha"),
    "high": ("float64", "its upper end"),
    "verdict": (
        "string",
        f"{', '.join(list(Verdict)[:-1])} or {Verdict.REFUSED}; missing where the arm is compared with nothing",
    ),
    "refused": ("string", "why the comparison is not judged, where the verdict is refused"),
    "test": ("string", "how it was compared: paired t, Welch t, sign flip or none (too few values)"),
    "look": ("Int64", "the look that the comparison was judged at: 2 where the first had left it open"),
    "looks": ("Int64", "looks that share alpha: 2 where seeds.escalate_to allows a second, else 1"),
    "awaited": ("Int64", "trials of the comparison that have not ended"),
    "pairs": ("Int64", "seeds that both sides have"),
    "family": ("Int64", "comparisons judged together, those among them that were registered and are not made"),
    "broken": ("Int64", "seeds of both sides that diverged or failed"),
    "difference": ("float64", "mean difference from the baseline, over complete pairs"),
    "difference_low": ("float64", "its interval, which holds for the whole family at once"),
    "difference_high": ("float64", "the upper end of that"),
    "p": ("float64", "two-sided p of this comparison alone"),
    "p_corrected": ("float64", "the same, corrected for the family and the looks"),
    "sign_flip_p": ("float64", "p of the exact sign-flip test, alone"),
    "correlation": ("float64", "of the pairs"),
    "effect": ("float64", "Hedges' g: the difference in standard deviations of the seeds"),
    "bca_low": ("float64", "BCa bootstrap interval of the difference, from ten pairs on, for the whole family at once"),
    "bca_high": ("float64", "its upper end"),
    "detectable": ("float64", "the true difference that would have been found four times in five"),
    "seeds_needed": (
        "float64",
        "pairs that find the margin of the analysis, or else what was found, four times in five",
    ),
    "better": ("float64", "probability that the arm beats its baseline at the same seed"),
    "better_low": ("float64", "its interval, of this comparison alone"),
    "better_high": ("float64", "the upper end of that"),
    "chance": ("float64", "what guessing reaches, where seeds are broken and that is known"),
    "chance_difference": ("float64", "the difference, with chance in the place of broken seeds"),
    "chance_low": ("float64", "its interval, which holds for the whole family at once"),
    "chance_high": ("float64", "the upper end of that"),
    "chance_p": ("float64", "its p, corrected"),
    "chance_p_equal": ("float64", "as p_equal_corrected, with chance in the place of broken seeds"),
    "equal_low": ("float64", "interval of level 1 - 2 alpha, to be set against the margin of the analysis"),
    "equal_high": ("float64", "its upper end"),
    "p_equal": ("float64", "p of the test that the difference lies within the margin, alone"),
    "p_equal_corrected": ("float64", "the same, corrected for the family and the looks"),
    "exploratory": ("string", "what about it was decided after the study was first run"),
    "params": ("Int64", "parameters of the model"),
    "macs": ("Int64", "multiply-accumulates of one image, forward"),
    "wall_s": ("float64", "seconds of all trials together"),
    "images_per_s": ("float64", "training images per second, of the median trial"),
}
"""Columns of :func:`summary`, whatever the study, with their types and what they say."""
COLUMNS = tuple(MEANINGS)


def refusals(plan: Plan, seeds: Collection[int] | None = None) -> dict[str, str]:
    """Arm to the reason why its comparison is not judged at some seeds, or at all there are, where it is not.

    Arms that differ by the trial they start from (a teacher, a pre-trained body) are compared by samples of that
    trial: five students of one teacher are one sample of the teacher.
    """
    behind: dict[str, dict[str, set[str]]] = {}
    for planned in plan.trials:
        if seeds is not None and planned.seed not in seeds:
            continue
        for role, needed in planned.trial.needs.items():
            behind.setdefault(planned.arm, {}).setdefault(role, set()).add(needed.partition("/")[0])
    found = {}
    for arm in plan.arms:
        first, second = behind.get(arm.name, {}), behind.get(arm.baseline or "", {})
        for role in sorted(first.keys() & second.keys()):
            fewest = min(len(first[role]), len(second[role]))
            if first[role] != second[role] and fewest < LEAST_PREREQUISITES:
                trained = "training" if fewest == 1 else "trainings"
                found[arm.name] = (
                    f"the arms differ by their {role}, of which {fewest} {trained} stand{'s' * (fewest == 1)} behind "
                    f"an arm: fewer than {LEAST_PREREQUISITES} are no sample"
                )
    return found


def chance_level(metric: str, classes: int | None) -> float:
    """What guessing reaches in a metric, each class as likely as the others; NaN where that is not known."""
    name = metric.partition("/")[2].partition("@")[0]
    if classes is None or classes < 1:
        return math.nan
    if re.fullmatch(r"accuracy(_\w+)?|(pixel|balanced)_accuracy", name):
        return 1 / classes
    if top := re.fullmatch(r"top(\d+)", name):
        return min(1.0, int(top[1]) / classes)
    return math.log(classes) if name == "loss" else math.nan


def broken(frame: pd.DataFrame, analysis: Analysis) -> dict[str, list[int]]:
    """Arm to the seeds that diverged or failed, or ended without a finite value where the arm's others have one."""
    found = {}
    values = usable(frame, analysis)
    for arm, rows in frame.drop_duplicates(["arm", "trial"]).groupby("arm", sort=False):
        known = values[str(arm)]
        lost = rows["status"].isin(["diverged", "failed"]) | ((rows["status"] == "done") & bool(known))
        found[str(arm)] = [int(seed) for seed in rows.loc[lost, "seed"] if seed not in known]
    return found


def summary(frame: pd.DataFrame, plan: Plan, refused: Mapping[str, str] = {}) -> pd.DataFrame:
    """One row per arm: what it reached, and how it differs from its baseline.

    Columns are those of ``MEANINGS``, followed by the mean of the test metric of the same name and its standard
    deviation (``test/NAME``, ``test/NAME_sd``), if there is one.

    Args:
        frame: see :func:`vitlab.report.frame.results`.
        plan: says how to judge, and what was registered.
        refused: arm to a reason why its comparison is not judged, beside those of :func:`refusals`.
    """
    import pandas as pd

    analysis, values = plan.analysis, usable(frame, plan.analysis)
    grouped = {str(arm): rows for arm, rows in frame.groupby("arm", sort=False)}
    compared = {arm: str(rows["baseline"].iloc[0]) for arm, rows in grouped.items() if rows["baseline"].notna().all()}
    waiting = awaited(frame, plan, compared)
    judgements = judge(plan, compared, values, broken(frame, analysis), refused, waiting)
    test = f"test/{analysis.metric.partition('/')[2]}"
    rows_out = []
    for arm, rows in grouped.items():
        counts = {status: int((rows["status"] == status).sum()) for status in STATUSES}
        mean = statistics.mean_interval(list(values[arm].values()), analysis.alpha)
        row: dict[str, Any] = {"arm": arm, "baseline": compared.get(arm), "planned": len(rows), **counts}
        row |= {"n": mean.n, "mean": mean.mean, "sd": mean.sd, "low": mean.low, "high": mean.high}
        row |= judgements.get(arm, {})
        row |= {"params": rows["params"].max(), "macs": rows["macs"].max(), "wall_s": rows["wall_s"].sum()}
        row["images_per_s"] = (rows["images"] / rows["wall_s"]).median() if rows["wall_s"].gt(0).any() else math.nan
        row["verdict"] = decide(dict.fromkeys(MEANINGS) | row, analysis)
        if test in rows:
            tested = rows.loc[rows["seed"].isin(list(values[arm])), test]
            row |= {test: tested.mean(), f"{test}_sd": tested.std()}
        rows_out.append(row)
    tests = [test, f"{test}_sd"] if test in frame else []
    types = {name: kind for name, (kind, _) in MEANINGS.items()} | dict.fromkeys(tests, "float64")
    return pd.DataFrame(rows_out, columns=list(types)).astype(types)


def awaited(frame: pd.DataFrame, plan: Plan, compared: Mapping[str, str]) -> dict[str, int]:
    """Arm to how many trials of its comparison have not ended; those of a second look count where it is to have one."""
    open_ = frame[frame["status"].isin(["running", "missing"])]
    seeds: dict[str, set[int]] = {str(arm): set(rows["seed"]) for arm, rows in open_.groupby("arm")}
    first = None if plan.looks is None else set(plan.looks.first)
    found = {}
    for arm, baseline in compared.items():
        decided = plan.looks is not None and arm not in plan.looks.open
        sides = [seeds.get(arm, set()), seeds.get(baseline, set())]
        found[arm] = sum(len(side & first if decided and first is not None else side) for side in sides)
    return found


def judge(
    plan: Plan,
    compared: Mapping[str, str],
    values: Mapping[str, Values],
    lost: Mapping[str, Sequence[int]],
    refused: Mapping[str, str],
    waiting: Mapping[str, int],
) -> dict[str, dict[str, Any]]:
    """Arm to its part of a row of :func:`summary`, for every arm that is compared with another.

    Args:
        plan: says how to judge, and what was registered.
        compared: arm to its baseline.
        values: arm to what its seeds reached.
        lost: arm to its seeds that diverged or failed.
        refused: see :func:`summary`.
        waiting: see :func:`awaited`.
    """
    family = _Family.of(plan, compared)
    if plan.looks is None:
        rows = _look(plan, compared, values, lost, refusals(plan) | dict(refused), family)
    else:
        first = set(plan.looks.first)
        early = {arm: {seed: value for seed, value in known.items() if seed in first} for arm, known in values.items()}
        gone = {arm: [seed for seed in seeds if seed in first] for arm, seeds in lost.items()}
        rows = _look(plan, compared, early, gone, refusals(plan, first) | dict(refused), family)
        ready = {arm: compared[arm] for arm in plan.looks.open if arm in compared and not waiting[arm]}
        rows |= _look(plan, ready, values, lost, refusals(plan) | dict(refused), family, look=2)
    return {arm: {**row, "awaited": waiting[arm]} for arm, row in rows.items()}


def _look(
    plan: Plan,
    compared: Mapping[str, str],
    values: Mapping[str, Values],
    lost: Mapping[str, Sequence[int]],
    refused: Mapping[str, str],
    family: _Family,
    look: int = 1,
) -> dict[str, dict[str, Any]]:
    """:func:`judge` at some of the comparisons, and some of the seeds."""
    analysis = plan.analysis
    guess = {arm.name: chance_level(analysis.metric, arm.classes) for arm in plan.arms}
    whole = {
        arm: {**known, **dict.fromkeys(lost.get(arm, ()), guess.get(arm, math.nan))} for arm, known in values.items()
    }
    contrasts, again = {}, {}
    for arm, baseline in compared.items():
        first, second, level = values[arm], values.get(baseline, {}), family.level(arm)
        contrasts[arm] = again[arm] = statistics.compare(first, second, level)
        filled = whole[arm], whole.get(baseline, {})
        if filled != (first, second):
            known = all(math.isfinite(value) for side in filled for value in side.values())
            again[arm] = statistics.compare(*filled, level) if known else _unjudged(contrasts[arm], math.nan)
        if arm in refused:
            contrasts[arm], again[arm] = (_unjudged(c[arm], c[arm].difference) for c in (contrasts, again))
    rows: dict[str, dict[str, Any]] = {arm: {"look": look, "looks": family.looks} for arm in compared}
    p = family.corrected({arm: found.p for arm, found in contrasts.items()})
    p_again = family.corrected({arm: found.p for arm, found in again.items()})
    for arm, baseline in compared.items():
        missing = len(lost.get(arm, ())) + len(lost.get(baseline, ()))
        rows[arm] |= _of_contrast(contrasts[arm], family.level(arm), analysis)
        rows[arm] |= {"p_corrected": p[arm], "family": family.size(arm), "broken": missing, "refused": refused.get(arm)}
        rows[arm]["exploratory"] = "; ".join(family.why[arm]) or None
        if missing:
            found = again[arm]
            rows[arm] |= {"chance": guess.get(arm, math.nan), "chance_difference": found.difference}
            rows[arm] |= {"chance_low": found.low, "chance_high": found.high, "chance_p": p_again[arm]}
        if arm not in refused:
            rows[arm] |= _of_seeds(values[arm], values.get(baseline, {}), family.level(arm), analysis)
    if analysis.margin is not None:
        equal, equal_again = (
            {arm: statistics.equivalence(one, analysis.margin, family.level(arm)) for arm, one in side.items()}
            for side in (contrasts, again)
        )
        p = family.corrected({arm: found.p for arm, found in equal.items()})
        p_again = family.corrected({arm: found.p for arm, found in equal_again.items()})
        for arm, shown in equal.items():
            rows[arm] |= {"equal_low": shown.low, "equal_high": shown.high, "p_equal": shown.p}
            rows[arm] |= {"p_equal_corrected": p[arm]}
            if rows[arm]["broken"]:
                rows[arm]["chance_p_equal"] = p_again[arm]
    return rows


class _Family:
    """Comparisons that are judged together: those registered by themselves, those added later along with them."""

    def __init__(
        self, plan: Plan, arms: Sequence[str], later: Sequence[str], gone: int, why: Mapping[str, Sequence[str]]
    ) -> None:
        self.alpha, self.correction = plan.level, plan.analysis.correction
        self.looks = plan.sharing
        self.first = [arm for arm in arms if arm not in later]
        self.all = list(arms)
        self.gone = gone  # comparisons that were registered and are not made: they have had their chance
        self.why = why

    @classmethod
    def of(cls, plan: Plan, compared: Mapping[str, str]) -> _Family:
        later = added_comparisons(plan)
        first = 0 if plan.registered is None else len(plan.registered["family"])
        here = sum(arm not in later for arm in compared)
        reasons = {
            "this comparison was added after the first run": later,
            "results of it were there before it was registered": results_before_registration(plan)[2],
        }
        why = {arm: [*changes(plan), *(text for text, arms in reasons.items() if arm in arms)] for arm in compared}
        for changed in altered_arms(plan):
            for arm in (arm for arm, baseline in compared.items() if changed in (arm, baseline)):
                why[arm].append(f"arm '{changed}' was changed after results were seen")
        return cls(plan, list(compared), list(later), max(0, first - here), why)

    def size(self, arm: str) -> int:
        return len(self.first if arm in self.first else self.all) + self.gone

    def level(self, arm: str) -> float:
        return statistics.simultaneous_alpha(self.alpha, self.size(arm), self.correction)

    def corrected(self, p: Mapping[str, float]) -> dict[str, float]:
        """Of some of its comparisons: the others count as comparisons that say nothing."""
        found: dict[str, float] = {}
        for family in (self.all, self.first) if self.all != self.first else (self.all,):
            values = [*(p.get(arm, math.nan) for arm in family), *[math.nan] * self.gone]
            found |= dict(zip(family, statistics.adjust_p_values(values, self.correction, self.looks), strict=False))
        return found


# -- how it is done ---------------------------------------------------------------------------------------------------


def _unjudged(contrast: Contrast, difference: float) -> Contrast:
    return Contrast(difference, math.nan, math.nan, math.nan, "none", contrast.pairs)


def _of_contrast(contrast: Contrast, level: float, analysis: Analysis) -> dict[str, Any]:
    wanted = contrast.difference if analysis.margin is None else analysis.margin
    paired = contrast.test == "paired t"
    sd = contrast.se * math.sqrt(contrast.pairs) if paired else math.nan
    return {
        "difference": contrast.difference,
        "difference_low": contrast.low,
        "difference_high": contrast.high,
        "test": contrast.test,
        "pairs": contrast.pairs,
        "correlation": contrast.correlation,
        "p": contrast.p,
        "sign_flip_p": contrast.sign_flip_p,
        "effect": contrast.effect,
        "detectable": statistics.detectable_difference(contrast.se, contrast.df, level),
        "seeds_needed": statistics.required_pairs(wanted, sd, level) if paired else math.nan,
    }


def _of_seeds(first: Values, second: Values, level: float, analysis: Analysis) -> dict[str, float]:
    """What needs the single seeds: how often one arm beats the other, and a bootstrap interval."""
    sign = 1 if analysis.goal == "max" else -1
    common = sorted(first.keys() & second.keys())
    if len(common) >= 2:
        x, y = ([sign * values[seed] for seed in common] for values in (first, second))
        found = statistics.superiority_of_pairs(x, y, analysis.alpha)
    else:
        x, y = ([sign * value for value in values.values()] for values in (first, second))
        found = statistics.superiority(x, y, analysis.alpha)
    low, high = statistics.bca([first[seed] - second[seed] for seed in common], level)
    beats = {"better": found.probability, "better_low": found.low, "better_high": found.high}
    return {**beats, "bca_low": low, "bca_high": high}
