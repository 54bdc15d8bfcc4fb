"""What a planned study will be able to detect, by the spread of earlier trainings of its kind.

The spread is the standard deviation of differences between two arms at one seed, pooled over stored studies.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from vitlab.comparison.arrays import MIN_SEEDS, Comparisons, Correction, Variance, judge_studies
from vitlab.errors import UserError, format_count
from vitlab.planning.registration import comparison_family as family_of
from vitlab.planning.study_folder import read_plan
from vitlab.planning.values import Plan, Trial
from vitlab.report import phrasing
from vitlab.report.frame import StudyResults
from vitlab.spec.trial import LENGTHS
from vitlab.statistics import replicates
from vitlab.store.folders import Store

MIN_DF = 4  #: with fewer degrees of freedom the spread is not known even roughly
SIMILAR_LENGTH = 2.0  #: trainings are alike if one is at most this many times as long as the other
SEED_COUNTS = (3, 5, 8, 10, 15, 20, 30)  #: numbers of seeds that are listed beside the planned one
CHANCE = 0.8  #: power at which a difference counts as detectable
STUDIES = 1000  #: simulated
MAX_VALUES = 300_000  #: of all simulated studies together; of more, fewer studies are simulated
MAX_SIMULATED = 30  #: comparisons of a simulated study; more are corrected for, and behave alike


@dataclass(frozen=True)
class Forecast:
    """Differences that a study will be able to detect, by the spread of earlier trainings."""

    kind: str  #: what the earlier trainings have in common with the planned ones
    studies: tuple[str, ...]
    comparisons: int  #: of those studies
    sd: float  #: standard deviation of the difference between two arms at one seed
    sd_low: float  #: lower end of its interval
    sd_high: float
    family: int  #: comparisons of the planned study
    detectable: tuple[tuple[int, float], ...]
    """Number of seeds, and the difference that is found four times in five."""

    def sentences(self, plan: Plan) -> list[str]:
        """Return the forecast in words."""
        scale = phrasing.Scale.of_plan(plan)
        low, high = self.sd_low / self.sd, self.sd_high / self.sd
        planned = _largest_seed_count(plan)
        at = dict(self.detectable)[planned]
        decimals = scale.decimals_for_intervals([at * (high - low) / 2])
        interval = f"{phrasing.percent(1 - plan.analysis.alpha)} interval"
        facts = plan.facts()
        reach = math.inf if facts is None else facts.reach

        def number(value: float) -> str:
            return f"more than {scale.number(reach, decimals)}" if value > reach else scale.end(value, decimals)

        others = [] if plan.looks else [pair for pair in self.detectable if pair[0] != planned]
        listed = ", ".join(f"{number(value)} with {seeds}" for seeds, value in others)
        return [
            f"{format_count(self.comparisons, 'earlier comparison')} {self.kind} ({', '.join(self.studies)}): "
            f"differences scatter between seeds by {scale.amount(self.sd, decimals)} ({interval} "
            f"{number(self.sd_low)} to {number(self.sd_high)}).",
            f"With {format_count(planned, 'seed')}, a difference of {f'{number(at)} {scale.points}'.rstrip()} "
            f"({number(at * low)} to {number(at * high)}) is found four times in five, after "
            f"correction for {format_count(self.family, 'comparison')}{'; ' * bool(listed)}{listed}.",
        ]


def forecast(plan: Plan, store: Store) -> Forecast:
    """Return what a plan will be able to detect.

    Spread is taken from trials of the plan itself if enough have ended; otherwise from studies on the same data with
    the same type of model and a similar length of training, or else from all on the same data.

    Raises:
        UserError: if the plan compares nothing, or no earlier trainings tell the spread.
    """
    family = len(family_of(plan))
    if not family:
        raise UserError("the study compares nothing, so there is nothing to detect")
    planned = [item.trial for item in plan.trials_and_pending]  # the last are of arms that are not tuned yet
    own, like = {trial.key for trial in planned}, planned[0]
    earlier = [spread for stored in _plans_of_same_metric(plan, store) for spread in _paired_spreads(stored, store)]
    vary_split = _varies_split(plan, planned)
    alike = [item for item in earlier if item.varies_split == vary_split]
    for kind, spreads in (
        ("of this study", [item for item in earlier if own.issuperset(item.keys)]),
        ("of like trainings", [item for item in alike if _is_similar(item.trial, like)]),
        ("on the same data", [item for item in alike if item.trial.data == like.data]),
    ):
        distinct: list[_Spread] = []
        for item in sorted(spreads, key=lambda item: -item.df):
            if all(item.keys.isdisjoint(other.keys) for other in distinct):
                distinct.append(item)
        df = sum(item.df for item in distinct)
        if df >= MIN_DF:
            return _make_forecast(plan, kind, distinct, family)
    raise UserError(
        "too few earlier trainings on this data tell how seeds scatter: two arms with 5 seeds are enough, or three "
        "with 3; train these first, such as by 'vitlab run' with --set seeds=5"
    )


@dataclass(frozen=True)
class _Spread:
    """Spread between seeds of arms that are compared with one baseline at the same seeds."""

    study: str
    trial: Trial  #: one of an arm
    keys: frozenset[str]  #: of all trials
    variance: float  #: of the difference between two arms at one seed
    df: int
    variances: tuple[float, ...]  #: of the differences from the baseline, by comparison
    varies_split: bool  #: whether its seeds have different splits, and the metric is of their validation images
    overlap: float  #: see :class:`vitlab.comparison.arrays.Comparisons`


def _make_forecast(plan: Plan, kind: str, spreads: Sequence[_Spread], family: int) -> Forecast:
    df = np.array([item.df for item in spreads], dtype=float)
    variances = np.array([item.variance for item in spreads])
    sd = math.sqrt(float((df * variances).sum() / df.sum()))
    if not sd > 0:
        raise UserError(
            "the values of earlier trainings are all equal, so seeds have no spread; choose another analysis.metric"
        )
    # The log of a pooled sd has this variance, plus what comparisons differ by beyond chance.
    error = 1 / (2 * df.sum())
    positive = [(item, one) for item in spreads for one in item.variances if one > 0]
    logs = np.array([math.log(one) / 2 for _, one in positive])
    if len(logs) > 2:
        from scipy.special import polygamma

        single_df = np.array([item.df / len(item.variances) for item, _ in positive])
        between = max(0.0, float(logs.var(ddof=1) - (polygamma(1, single_df / 2) / 4).mean()))
        error += between / len(logs)
    reach = math.exp(replicates.t_quantile(1 - plan.analysis.alpha / 2, float(df.sum())) * math.sqrt(error))
    one_baseline = len({arm.baseline for arm in plan.arms} - {None}) == 1
    variance = plan.analysis.variance if one_baseline else "own"
    alpha = plan.analysis.alpha * plan.alpha_shares[-1]
    rules = family, alpha, plan.analysis.correction, variance, max(item.overlap for item in spreads)
    counts = sorted({*SEED_COUNTS, _largest_seed_count(plan)})
    detectable = tuple((n, sd * detectable_difference(n, *rules)) for n in counts)
    studies = tuple(dict.fromkeys(item.study for item in spreads))
    comparisons = sum(len(item.variances) for item in spreads)
    return Forecast(kind, studies, comparisons, sd, sd / reach, sd * reach, family, detectable)


@lru_cache
def detectable_difference(
    n: int, family: int, alpha: float, correction: Correction, variance: Variance, overlap: float = 0.0
) -> float:
    """Return the difference that simulated studies find four times in five, in sd of a difference at one seed."""
    comparisons = min(family, MAX_SIMULATED)
    # Few studies suffice for many seeds and arms, whose intervals hardly differ from one study to the next.
    studies = max(20, min(STUDIES, MAX_VALUES // (n * (comparisons + 1))))
    values = np.random.default_rng(1).standard_normal((studies, comparisons + 1, n)) / math.sqrt(2)
    design = replace(
        Comparisons.all_with_first(comparisons),
        family=np.full(comparisons, family),
        alpha=alpha,
        correction=correction,
        variance=variance,
    )
    contrasts = judge_studies(values, design).contrasts
    half_widths = (contrasts.high - contrasts.low) / 2
    half_widths[np.isnan(half_widths)] = np.inf  # by chance a seed looks collapsed: the exact test finds nothing
    difference = np.quantile(half_widths - contrasts.difference, CHANCE)
    return float(difference) * math.sqrt(1 + n * overlap)  # seeds whose splits overlap are fewer independent ones


def _plans_of_same_metric(plan: Plan, store: Store) -> Iterator[Plan]:
    """Yield the stored plans that are judged by the same metric, and the plan itself."""
    yield plan
    for file in sorted(store.root.glob("studies/*/plan.json")):
        with suppress(UserError):  # a damaged plan tells nothing; 'vitlab run' of its study sets it aside
            stored = read_plan(file)
            if stored and (stored.analysis.metric, stored.analysis.at) == (plan.analysis.metric, plan.analysis.at):
                yield stored


def _paired_spreads(stored: Plan, store: Store) -> Iterator[_Spread]:
    """Yield the spreads of a stored study, from arms that have at least two pairs."""
    if not stored.trials:
        return
    results = StudyResults.read(stored, store)
    trials = {(item.arm, item.seed): item.trial for item in stored.trials}
    groups = defaultdict(list)
    for arm in stored.arms:
        if arm.baseline is not None:
            sides = [results.values.get(name, {}).keys() for name in (arm.name, arm.baseline)]
            groups[arm.baseline, tuple(sorted(sides[0] & sides[1]))].append(arm.name)
    for (baseline, seeds), arms in groups.items():
        overlap = results.largest_val_train_ratio((baseline, *arms))
        if len(seeds) < 2 or math.isnan(overlap):
            continue
        table_AS = np.array([[results.values[name][seed] for seed in seeds] for name in (baseline, *arms)])
        yield _Spread(
            stored.study,
            trials[arms[0], seeds[0]],
            keys=frozenset(trials[name, seed].key for name in (baseline, *arms) for seed in seeds),
            variance=2 * replicates.MeanSquares.from_table(table_AS).rest,
            df=len(arms) * (len(seeds) - 1),
            variances=tuple(np.var(table_AS[1:] - table_AS[0], axis=1, ddof=1).tolist()),
            varies_split=_varies_split(stored, (trials[baseline, seed] for seed in seeds)),
            overlap=overlap,
        )


def _varies_split(plan: Plan, trials: Iterable[Trial]) -> bool:
    """Return whether trials have different splits, and the metric is of their validation images."""
    return len({trial.seeds.get("split") for trial in trials}) > 1 and plan.analysis.metric.startswith("val/")


def _is_similar(trial: Trial, other: Trial) -> bool:
    """Return whether two trials have the same data, type of model and a similar length of training."""
    first, second = trial.spec.train, other.spec.train
    unit = next(name for name in LENGTHS if getattr(first, name) is not None)
    length, other_length = getattr(first, unit), getattr(second, unit)
    if trial.data != other.data or trial.spec.model.type != other.spec.model.type or other_length is None:
        return False
    return bool(max(length, other_length) <= SIMILAR_LENGTH * min(length, other_length))


def _largest_seed_count(plan: Plan) -> int:
    """Return the largest number of seeds that an arm of a plan may have, at least as many as can be judged."""
    planned = {item.seed for item in plan.trials_and_pending}
    return max(MIN_SEEDS, len(plan.looks.seeds[-1] if plan.looks else planned))
