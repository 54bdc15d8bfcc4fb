"""Notes of a report: caveats about its numbers, one sentence each, which a reader can act on."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlab.comparison import Verdict
from vitlab.comparison.study import is_futile
from vitlab.errors import format_count, one_line
from vitlab.planning.match import paths_overlap
from vitlab.planning.registration import (
    altered_arms,
    describe_analysis_changes,
    newly_compared_arms,
    no_longer_compared_arms,
)
from vitlab.planning.tune import knobs_at_edge
from vitlab.planning.values import Plan
from vitlab.report import phrasing
from vitlab.report.frame import StoredTrial, StudyResults, is_metric, metric_column
from vitlab.report.phrasing import (
    Row,
    Scale,
    compared_rows,
    format_seeds,
    list_or_count,
    percent,
    truncate_list,
)
from vitlab.statistics.replicates import boschloo_p, collapse_rate_bound, non_normality_score, sd_interval
from vitlab.store.folders import OPEN
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

MAX_GAP_SCORE = 3.0  #: normal seeds have a larger one in 1 % of studies
MAX_SHARE = 0.02  #: of one image in the metric, without a note
RATE = "train.optimizer.lr"
NUMERICS = (
    "torch",
    "device",
    "processor",
    "engine",
    "threads",
    "deterministic",
    "processes",
    "micro_batch_size",
    "resumed",
    "matmul",
    "cudnn",
    "cudnn_benchmark",
    "sdpa",
)
"""Settings that affect the last bits and should not differ within a comparison."""


def notes(results: StudyResults, prerequisite_trials: Sequence[StoredTrial], rows: Sequence[Row]) -> list[str]:
    """Return the notes of a report."""
    plan = results.plan
    trials = [*prerequisite_trials, *results.trials]
    failures = {tuning.failure for tuning in plan.tuning}
    return [
        *_note_open_trials(trials),
        *plan.notes,
        *truncate_list([f"{arm.name}: {arm.note}." for arm in plan.arms if arm.note]),
        *_note_tuning(plan, rows),
        *(
            f"{arm.name} {'failed' if arm.skip in failures else 'was skipped'}: {arm.skip.rstrip('.')}."
            for arm in plan.arms
            if arm.skip
        ),
        *truncate_list(list(_note_failures(trials))),
        *_note_repeated_trials(results.frame),
        *_note_shared_prerequisites(plan),
        *_note_large_batches(results.trials),
        *_note_early_stops(results.trials),
        *_note_pretrained_weights(trials),
        *_note_mixed_numerics(plan, trials),
        *_note_best_evaluation(plan),
        *_note_exploratory(plan),
        *_note_looks(plan, rows),
        *_note_controls(plan, rows),
        *notes_from_values(results, rows),
        *_note_few_images(results),
        *_note_varied_streams(results),
        *_note_seed_scatter(plan, rows),
        *_note_untuned_learning_rate(plan),
    ]


def notes_from_values(results: StudyResults, rows: Sequence[Row]) -> list[str]:
    """Return the notes that follow from a table of values alone, see :mod:`vitlab.judging`."""
    return [
        *_note_missing_metric(results.plan, results.frame),
        *_note_chance(results.plan, rows),
        *note_unpaired_seeds(results, rows),
        *_note_shared_variance(results.plan, rows),
        *_note_non_normal_seeds(results, rows),
        *_note_collapsed_seeds(rows),
        *_note_cut_intervals(results.plan, rows),
    ]


def note_unpaired_seeds(results: StudyResults, rows: Sequence[Row]) -> list[str]:
    """Return notes about seeds that one arm of a comparison has alone."""
    looks, lines = results.plan.looks, []
    for row in compared_rows(rows):
        first, second = (set(results.values.get(row[side], {})) for side in ("arm", "baseline"))
        if looks is not None:
            judged = set(looks.seeds[row["look"] - 1])
            first, second = first & judged, second & judged
        if row["test"] == "Welch t":
            lines.append(f"{row['arm']} and {row['baseline']} share fewer than two seeds: Welch's t, without pairs.")
        elif row["pairs"] and (unpaired := first ^ second):
            subject = "seed {} has" if len(unpaired) == 1 else "seeds {} have"
            lines.append(
                f"Warning: the difference of {row['arm']} and {row['baseline']} is over the "
                f"{format_count(row['pairs'], 'seed')} that both have, their means are over all: "
                f"{subject.format(format_seeds(unpaired))} a value in one of the two alone."
                + " Lost seeds are left out, so the means may be too good."
                * bool(row["lost"])
            )
    return truncate_list(lines)


def _note_cut_intervals(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    facts, names = plan.facts(), ("low", "high", "difference_low", "difference_high")
    ends = {row[end] for row in rows for end in names} - {None}
    if facts is not None and ends & {*facts.bounds, facts.reach, -facts.reach}:
        yield "Intervals are cut at the bounds of the metric."


def _note_open_trials(trials: Sequence[StoredTrial]) -> Iterator[str]:
    if unended := [item.folder.path for item in trials if item.status in OPEN]:
        line = (
            f"Preliminary: of {format_count(len(trials), 'trial')}, "
            f"{phrasing.format_status_counts(Counter(item.status for item in trials))}"
        )
        if outdated := sum(any(path.parent.glob("*/result.json")) for path in unended):
            line += f" ({outdated} with a result of other code, which is kept and not used)"
        yield f"{line}."


def _note_early_stops(trials: Sequence[StoredTrial]) -> Iterator[str]:
    steps = defaultdict[str, list[int]](list)
    schedules = set()
    for item in trials:
        train = item.planned.trial.spec.train
        if train.stop_early is not None and item.result is not None:
            steps[item.planned.arm].append(item.result.outcome.steps)
            schedules.add(train.schedule.type)
    if len({number for some in steps.values() for number in some}) > 1:
        ends = {arm: dict.fromkeys((f"{min(some):,}", f"{max(some):,}")) for arm, some in steps.items()}
        arms = ", ".join(f"{arm} {' to '.join(each)}" for arm, each in ends.items())
        what = "cost" if schedules == {"constant"} else "cost and in the last learning rate"
        yield f"train.stop_early: trainings ended after different numbers of steps, and so differ in {what}: {arms}."


def _note_large_batches(trials: Sequence[StoredTrial]) -> Iterator[str]:
    outcomes = [(item.planned.trial.spec.train.batch_size, item.result.outcome) for item in trials if item.result]
    for size, images in sorted({(size, end.images // end.steps) for size, end in outcomes if end.steps}):
        if images < size:
            yield f"train.batch_size: {size:,} is more than the {images:,} training images; a batch has all of them."


def _note_failures(trials: Sequence[StoredTrial]) -> Iterator[str]:
    """Yield a note for each reason for which trials diverged or failed."""
    alike = defaultdict[tuple[str, str], dict[str, list[int]]](dict)
    for item in trials:
        if item.status in (Ending.DIVERGED, Ending.FAILED):
            kind = f" ({item.kind})" if item.kind not in (None, item.status, Ending.ERROR) else ""
            reason = one_line(item.failure).rstrip(".") or "no reason was recorded"
            of_arms = alike[item.status, f"{item.status}{kind}: {reason}"]
            of_arms.setdefault(item.planned.arm, []).append(item.planned.seed)
    for (status, reason), arms in alike.items():
        names = [f"{arm}, seed{'s' * (len(seeds) > 1)} {format_seeds(seeds)}" for arm, seeds in arms.items()]
        whose = "its" if sum(map(len, arms.values())) == 1 else "their"
        consequence = f"; {whose} values are left out" if status == Ending.DIVERGED else ""
        yield f"{list_or_count(names)}, {reason}{consequence}."


def _note_missing_metric(plan: Plan, frame: pd.DataFrame) -> list[str]:
    column = metric_column(plan.analysis)
    done = frame[frame["status"] == Ending.DONE]
    without_value = done[~np.isfinite(done[column])]
    if len(done) and len(without_value) == len(done):
        reported = [name for name in frame.columns[::-1] if is_metric(name) and frame[name].notna().any()]
        return [f"No trial reports {plan.analysis.metric}; they report {', '.join(reported) or 'nothing'}."]
    return truncate_list(
        [
            f"{arm}, seed {seed}, is done, but its {column} is not finite; it is left out."
            for arm, seed in zip(without_value["arm"], without_value["seed"], strict=True)
        ]
    )


def _note_chance(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a note on arms that are not shown to be better than guesses."""
    scale = Scale.of_plan(plan)
    decimals, _ = phrasing.table_and_sentence_decimals(rows, scale)
    arms = [
        f"{row['arm']} ({scale.mean_with_sd(row['mean'], row['sd'], decimals)}; chance "
        f"{scale.number(row['at_chance'], decimals)})"
        for row in rows
        if row["at_chance"] is not None
    ]
    if arms:
        yield (
            f"Warning: not shown to be better than chance in {scale.title}: {list_or_count(arms)}. Differences from "
            "arms that did not learn say nothing of others: train longer, at another learning rate, or more seeds."
            + " The grid of the tuning may hold no value that works: extend it."
            * bool(plan.tuning)
        )


def _note_repeated_trials(frame: pd.DataFrame) -> Iterator[str]:
    for arm, rows in frame[frame.duplicated(["arm", "trial"])].groupby("arm", sort=False):
        yield (
            f"{arm}: seeds {format_seeds(rows['seed'])} are the same trial as an earlier seed, because nothing that "
            "the seeds vary is used; one training is counted once."
        )


def _note_shared_prerequisites(plan: Plan) -> list[str]:
    names = defaultdict[tuple[str, str], list[str]](list)
    for planned in plan.trials:
        for role, name in planned.trial.needs.items():
            names[planned.arm, role.replace("init_from", "pre-training")].append(name)
    return truncate_list(
        [
            f"{arm}: {format_count(len(set(trials)), f'distinct {noun}')} for {format_count(len(trials), 'trial')}: "
            f"the results need not hold for other {noun}s."
            for (arm, noun), trials in names.items()
            if len(set(trials)) < len(trials)
        ]
    )


def _note_pretrained_weights(trials: Sequence[StoredTrial]) -> list[str]:
    arms: dict[str, dict[str, None]] = defaultdict(dict)
    for item in trials:
        if item.result is not None and item.result.circumstances.weights:
            arms["; ".join(item.result.circumstances.weights)][item.planned.arm or "pre-training"] = None
    return [f"Weights to start from ({', '.join(names)}): {notes}." for notes, names in arms.items()]


def _note_mixed_numerics(plan: Plan, trials: Sequence[StoredTrial]) -> list[str]:
    numerics = defaultdict[str | None, list[Mapping[str, object]]](list)
    for item in trials:
        if item.result is not None:
            numerics[item.planned.arm].append(item.result.circumstances.numerics)
    arms = defaultdict[str, list[str]](list)
    for arm in plan.arms:
        if arm.name in numerics and arm.baseline in numerics:
            both = [*numerics[arm.name], *numerics[arm.baseline]]
            distinct = {name: sorted({str(values.get(name)) for values in both}) for name in sorted(NUMERICS)}
            if mixed := [f"{name} {' and '.join(several)}" for name, several in distinct.items() if len(several) > 1]:
                arms["; ".join(mixed)].append(arm.name)
    return [
        f"Numerics differ from the baseline's ({mixed}) in {list_or_count(affected)}: equal seeds do not give equal "
        "bits across them, so differences include their effect."
        + " Set run.engine: loop before the first run to compute all arms alike."
        * ("engine " in mixed)
        for mixed, affected in arms.items()
    ]


def _note_best_evaluation(plan: Plan) -> Iterator[str]:
    rules = [planned.trial.spec.train.stop_early for planned in plan.trials]
    restored = any(rule is not None and rule.weights == "best" for rule in rules)
    if plan.analysis.at != "last" or (restored and plan.analysis.metric.startswith("val/")):
        yield (
            f"{metric_column(plan.analysis)} is of the best of several evaluations of one training: it is optimistic, "
            "the more so the noisier the evaluation and the more of them there are. The test value beside it is of the "
            f"{'best' if restored else 'last'} weights."
        )


def _note_exploratory(plan: Plan) -> Iterator[str]:
    for edit in describe_analysis_changes(plan):
        yield f"Exploratory: since the study was first run, {edit}; every verdict was reached after results were known."
    for what, arms in (
        ("Exploratory: changed after results were seen", altered_arms(plan)),
        (
            "Exploratory: added after the first run, and corrected for all comparisons",
            sorted(newly_compared_arms(plan)),
        ),
        ("Dropped after the first run, and still counted in the correction", no_longer_compared_arms(plan)),
    ):
        if arms:
            yield f"{what}: {list_or_count(arms)}."
    if plan.registered is not None and (known := plan.registered.known).comparisons:
        yield (
            f"Exploratory: {known.results:,} of {format_count(known.trials, 'trial')} had results before this plan was "
            f"registered, including both arms of the comparison at some seed: {list_or_count(known.comparisons)}."
        )


def _note_tuning(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    if not plan.tuning:
        return
    first = plan.tuning[0]
    select = first.select
    if plan.pending:
        pending = format_count(len(plan.pending), "trial")
        yield f"Preliminary: {pending} more will be planned once the knobs of their arms are tuned."
    rivals = [rival for item in plan.tuning for rival in item.rivals]
    knobs = ", ".join(dict.fromkeys(knob for rival in rivals for knob in rival.values))
    scope = "at the base, for all arms" if first.arm is None else "for each arm by itself"
    trainings = format_count(sum(len(rival.trials) for rival in rivals), "full-length training")
    seconds = phrasing.format_duration(sum(rival.wall_s for rival in rivals))
    yield f"Tuned {scope}, by {select}: {knobs}, in {trainings} ({seconds}) with separate seeds, which are in no mean."
    if first.arm is None:
        yield "What suits the base may not suit every arm as well: tune per arm to know."
    elif select != plan.analysis.metric:
        yield (
            f"Intervals do not include the choice of knobs, because {select} chose them and {plan.analysis.metric} "
            "judges the arms."
        )
    elif any(row["choice_sd"] for row in rows):
        yield (
            "Intervals include the choice of knobs, because other tuning seeds might have chosen others. More tuning "
            "seeds make this part smaller, more seeds of the arms do not."
        )
    arms = defaultdict[str, list[str]](list)
    for item in plan.tuning:
        for knob in knobs_at_edge(item):
            arms[knob].append(item.arm or "all arms")
    for knob, affected in arms.items():
        yield (
            f"Warning: the chosen {knob} lies at the edge of its grid for {list_or_count(affected)}: a better value "
            "may lie outside; extend the grid."
        )


def _note_looks(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    """Return a note on how the looks share alpha, and which comparisons they left open; none without looks."""
    looks = plan.looks
    if looks is None:
        return
    sizes = [len(seeds) for seeds in looks.seeds]
    sentences = [
        f"{len(sizes)} looks share alpha, at {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} seeds: p values and "
        "intervals of differences hold for all of them together. Differences of comparisons that may end early were 2 "
        "to 7 % too large on average in simulated studies."
    ]
    compared = {row["arm"]: row for row in compared_rows(rows)}
    added, undecided = defaultdict(list), defaultdict(list)
    failed = {row["arm"] for row in rows if row["failed"]}
    for arm, row in compared.items():
        look = looks.latest_look(arm)
        if look:
            added[look].append(arm)
        if row["verdict"] == Verdict.CANNOT_TELL and look < len(sizes) - 1 and not row["awaited"]:
            is_blocked = not failed.isdisjoint((arm, row["baseline"]))
            undecided["futile" if is_futile(row["decidable"], plan) else "failed" if is_blocked else "open"].append(arm)
    for look, arms in added.items():
        until = ""
        if any(compared[arm]["awaited"] for arm in arms):
            until = "; until all of these have ended, the look before gives the verdicts"
        sentences.append(
            f"Look {look} left {list_or_count(arms)} inconclusive, so that it got seeds up to {sizes[look]}{until}."
        )
    consequences = {
        "futile": f"got no more seeds, because {sizes[-1]} seeds would decide the comparison with a probability below "
        f"{percent(looks.futility)}.",
        "failed": "can get further seeds: first run 'vitlab run --retry-failed' to train the failed trials again.",
        "open": "can get further seeds: run 'vitlab run' again.",
    }
    sentences += [
        f"{list_or_count(undecided[cause])} {text}" for cause, text in consequences.items() if undecided[cause]
    ]
    if len(sentences) == 1 and not any(row["awaited"] for row in compared.values()):
        sentences.append("The first look decided every comparison that can be judged.")
    yield " ".join(sentences)


def _note_controls(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return what each control did, which equals its baseline but for the seeds."""
    scale, lines = Scale.of_plan(plan), []
    _, decimals = phrasing.table_and_sentence_decimals(rows, scale)
    for row in (row for row in compared_rows(rows) if plan.arm(row["arm"]).is_control and row["p"] is not None):
        outcome = "they are not told apart, as it should be"
        if row["verdict"] in (Verdict.BETTER, Verdict.WORSE):
            outcome = f"this is a false alarm, as {percent(plan.analysis.alpha)} of controls give by chance"
        sentence = phrasing.describe_comparison(row, row["n"], plan.analysis, scale, decimals)
        lines.append(f"Control: {sentence} The two differ by their seeds alone: {outcome}.")
    return truncate_list(lines)


def _note_shared_variance(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    complete, filled = (max((row[name] or 1 for row in rows), default=1) for name in ("shared", "chance_shared"))
    if max(complete, filled) < 2:
        return
    alone = [row["arm"] for row in rows if row["test"] == "paired t" and row["shared"] == 1]
    others = f" Of complete pairs, with their own variance alone: {list_or_count(alone)}." * bool(alone)
    corrected = " P values and intervals are corrected by Bonferroni's method." * (plan.analysis.correction != "none")
    yield (
        "A few seeds give a poor estimate of the spread, so the variance of a difference is averaged with the mean "
        f"variance of the {max(complete, filled)} comparisons that share baseline and seeds"
        f"{', with chance in the place of lost seeds' * (filled > complete)}, and never taken for less than its own "
        f"(a rule of vitlab's own, checked by simulation).{others}{corrected}"
    )


def _note_non_normal_seeds(results: StudyResults, rows: Sequence[Row]) -> Iterator[str]:
    """Return a note if the seeds of the arms lie in groups, or far to one side, more than normal values do."""
    sound = [results.values[row["arm"]] for row in rows if row["n"] and not row["collapsed"]]
    seeds = sorted(set.intersection(*map(set, sound))) if sound else []
    if len(seeds) < 3 or not any(row["test"] == "paired t" for row in rows):
        return
    score = non_normality_score(np.array([[values[seed] for seed in seeds] for values in sound]))
    if score > MAX_GAP_SCORE:
        yield (
            "Warning: seeds lie in groups, or far out on one side, more than normal values do (their gaps exceed those "
            f"by {score:.1f} standard errors). P values and intervals are too small for such seeds: look at the single "
            "ones."
        )


def _note_collapsed_seeds(rows: Sequence[Row]) -> Iterator[str]:
    by_arm = {row["arm"]: row for row in rows}
    for row in (row for row in rows if row["collapsed"]):
        seeds = f"{row['collapsed']} of {format_count(row['n'], 'seed')}"
        line = f"Warning: {seeds} of {row['arm']} collapsed: they are far worse than the others."
        baseline = by_arm.get(row["baseline"])
        if baseline is not None and baseline["n"]:
            p = boschloo_p((baseline["collapsed"], row["collapsed"]), (baseline["n"], row["n"]))
            line += (
                f" Of {row['baseline']}, {baseline['collapsed']} of {baseline['n']} did (Boschloo's exact test, "
                f"one-sided: p = {p:.2g} before correction)."
            )
        yield f"{line} A mean of few seeds hides how often that happens: train more seeds to know."
    sizes = [row["n"] for row in rows if row["n"] > 1 and not row["collapsed"]]
    if sizes and compared_rows(rows):
        rate = 100 * collapse_rate_bound(min(sizes))
        yield (
            "Seeds that collapse fall far behind the others. An arm with none among "
            f"{format_count(min(sizes), 'seed')} may still have them in up to {rate:.0f} % of its trainings (exact "
            "binomial bound, 95 %)."
        )


def _note_few_images(results: StudyResults) -> Iterator[str]:
    plan, share = results.plan, results.quantum
    facts = plan.facts()
    if facts and facts.quantum and share > MAX_SHARE:
        yield (
            f"Warning: {plan.analysis.metric} is of {round(facts.quantum / share)} images, and one of them is "
            f"{Scale.of_plan(plan).amount(share, 1)}; other images of the kind may give another verdict. "
            "Judge by more images."
        )


def _note_varied_streams(results: StudyResults) -> Iterator[str]:
    """Return a note on the random streams that seeds vary, and on what intervals cover thereby."""
    plan = results.plan
    seeds = sorted({planned.seed for planned in plan.trials})
    if not seeds or (len(seeds) == 1 and plan.looks is None):
        return
    streams = [planned.trial.seeds for planned in plan.trials]
    varying = [stream for stream in streams[0] if len({each.get(stream) for each in streams}) > 1]
    first = seeds if plan.looks is None else plan.looks.seeds[0]
    more = f", and up to {len(seeds)} of inconclusive arms," if len(seeds) > len(first) else ""
    what = ", ".join(varying) or "nothing"
    # A training may use few of the streams, all of which vary by default.
    if {*streams[0]} - {"split"} <= {*varying}:
        what = "all random draws of a training" + " and the validation split" * ("split" in varying)
    line = f"{format_count(len(first), 'seed')} ({format_seeds(first)}){more} vary {what}."
    if "split" in varying:
        line += _describe_varied_splits(set(results.overlap.values()))
    elif "split" in streams[0]:
        line += (
            " The split of training and validation images is the same in all: intervals cover training again on the "
            "same images, not another split."
        )
    yield line


def _describe_varied_splits(ratios: set[float]) -> str:
    """Return what intervals are about if seeds hold out different validation images, by the overlaps of the arms."""
    if not ratios:
        return (
            " Their training sets overlap, and no correction for that is known to hold for a metric of other than the "
            "validation images: intervals cover training again on another split of these images, not on other images."
        )
    if any(map(math.isnan, ratios)):
        return (
            " Their training sets overlap, by an amount that is not known, because the predictions of two seeds are "
            "not stored, or have no image in common: arms of which it is not known are not tested."
        )
    if not any(ratios):
        return " The data set defines its validation images, so that they are the same in all."
    low, high = (100 * bound(ratios) / (1 + bound(ratios)) for bound in (min, max))
    share = f"{high:.0f} %" if low == high else f"{low:.0f} to {high:.0f} %"
    return (
        f" Two seeds have {share} of their validation images in common on average, and their training sets overlap: "
        "p values and intervals are corrected for that (corrected resampled t, Nadeau and Bengio 2003), and cover "
        "training and validation on other images. The sign-flip test, which needs independent seeds, is left out."
    )


def _note_seed_scatter(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    # Pooled, because the spread of a single arm with few seeds is hardly known.
    known = [row for row in rows if row["split_sd"] is not None and row["n"] > 1]
    usable = [row for row in known if not row["collapsed"] and row["at_chance"] is None]  # others scatter otherwise
    df = sum(row["n"] - 1 for row in usable)
    if not any(row["sd"] for row in usable):
        return
    sd, of_split = (
        math.sqrt(sum((row["n"] - 1) * row[name] ** 2 for row in usable) / df) for name in ("sd", "split_sd")
    )
    low, high = sd_interval(sd, df, plan.analysis.alpha)
    scale = Scale.of_plan(plan)
    decimals = scale.decimals_for_intervals([low, high - low])
    sentence = (
        f"Seeds of an arm scatter by {scale.amount(sd, decimals)} (pooled standard deviation"
        f"{' without arms at chance or with collapsed seeds' * (len(usable) < len(known))}, "
        f"{percent(1 - plan.analysis.alpha)} interval {scale.end(low, decimals)} to {scale.end(high, decimals)})."
    )
    if of_split < sd:  # otherwise trainings agree on images more than by chance, as barely trained models do
        amount = scale.amount(of_split, decimals)
        sentence += (
            f" Models that are equally good would scatter by {amount} on a split of this size, by its images alone."
        )
    yield sentence


def _note_untuned_learning_rate(plan: Plan) -> Iterator[str]:
    specs = [planned.trial.spec for planned in plan.trials]
    rates = {(spec.train.optimizer.type, spec.train.optimizer.options.get("lr")) for spec in specs}
    several = len(dict(rates)) > 1
    tuned = any(paths_overlap(RATE, knob) for item in plan.tuning for rival in item.rivals for knob in rival.values)
    if tuned or len(rates) > len(dict(rates)):  # a study with several rates of an optimizer has tried some
        return
    if several or any(spec.model != specs[0].model for spec in specs):
        values = ", ".join(sorted(f"{name} {rate}" if several else f"{rate}" for name, rate in rates))
        who = "Each optimizer" if several else "All arms"
        yield f"{who} ran at one learning rate ({values}): none was tuned, and a better one may suit some arms."
