"""Notes of a report: caveats about its table, one sentence each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlab.errors import count
from vitlab.plan.match import overlap
from vitlab.plan.registration import (
    added_comparisons,
    altered_arms,
    changes,
    removed_comparisons,
    results_before_registration,
)
from vitlab.plan.tune import edges
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.comparison import is_futile
from vitlab.report.frame import STATUSES, StoredTrial, is_metric, metric_column, usable
from vitlab.statistics import fisher, sd_interval, simultaneous_alpha, smallest_sign_flip_p
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

MAX_LISTED = 12  #: notes of one kind that are listed one by one
PAIRED = ("paired t", "moderated t")
RATE = "train.optimizer.lr"
NUMERICS = ("torch", "device", "processor", "engine", "threads", "deterministic", "processes", "micro_batch_size")
"""Settings that affect the last bits and should not differ within a comparison."""


def notes(plan: Plan, trials: Sequence[StoredTrial], frame: pd.DataFrame, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return the notes of a report; ``trials`` includes the prerequisites."""
    lines: list[str] = []
    pending = sum(item.status in ("running", "missing") for item in trials)
    if pending:
        total = {status: sum(item.status == status for item in trials) for status in STATUSES}
        lines.append(f"Preliminary: of {count(len(trials), 'trial')}, {phrasing.states(total)}.")
    lines += plan.notes
    lines += _first_of([f"{arm.name}: {arm.note}." for arm in plan.arms if arm.note], "arms of this kind")
    lines += _tuning_notes(plan, rows)
    untuned = {item.failure for item in plan.tuning}
    lines += [
        f"{arm.name} {'failed' if arm.skip in untuned else 'was skipped'}: {arm.skip.rstrip('.')}."
        for arm in plan.arms
        if arm.skip
    ]
    lines += _first_of(
        [_unsuccessful_trial(item) for item in trials if item.status in (Ending.DIVERGED, Ending.FAILED)],
        "trials of this kind",
    )
    lines += _first_of(_missing_metric(plan, frame), "of these")
    values = usable(frame, plan.analysis)
    lines += _excluded_seeds(plan, frame, values, rows)
    lines += _prerequisites(plan)
    lines += _mixed_numerics(plan, trials)
    if plan.analysis.at == "best":
        lines.append(
            f"{metric_column(plan.analysis)} is the best of several evaluations of one training: it is optimistic, "
            "the more so the noisier the evaluation and the more of them there are. The test value beside it is that "
            "of the last step."
        )
    return (
        lines
        + _exploratory_notes(plan)
        + _interim_analyses(plan, rows)
        + _seeds(plan, rows)
        + _split_noise(plan, rows)
        + _collapsed(rows)
        + _disputed_verdicts(plan, rows)
        + _learning_rate(plan)
    )


def table_notes(plan: Plan, frame: pd.DataFrame, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return the notes that follow from a table of values alone, see :mod:`vitlab.report.external`."""
    values = usable(frame, plan.analysis)
    return [
        *_first_of(_missing_metric(plan, frame), "of these"),
        *_excluded_seeds(plan, frame, values, rows),
        *_few_pairs(plan, rows),
        *_collapsed(rows),
        *_disputed_verdicts(plan, rows),
    ]


def _unsuccessful_trial(item: StoredTrial) -> str:
    reason = " ".join(item.failure.split()) or "no reason was recorded"
    consequence = "; its values are left out" if item.status == Ending.DIVERGED else ""
    kind = f" ({item.kind})" if item.kind not in (None, item.status, Ending.ERROR) else ""
    return f"{item.planned.arm}, seed {item.planned.seed}, {item.status}{kind}: {reason.rstrip('.')}{consequence}."


def _missing_metric(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """Return notes about trials that are done but have no finite value of the judged metric."""
    column = metric_column(plan.analysis)
    done = frame[frame["status"] == Ending.DONE]
    without_value = done[~np.isfinite(done[column])]
    if len(done) and len(without_value) == len(done):
        reported = [name for name in frame.columns if is_metric(name) and frame[name].notna().any()]
        return [f"No trial reports {plan.analysis.metric}; they report {', '.join(reported) or 'nothing'}."]
    pairs = zip(without_value["arm"].tolist(), without_value["seed"].tolist(), strict=True)
    return [f"{arm}, seed {seed}, is done, but its {column} is not finite; it is left out." for arm, seed in pairs]


def _excluded_seeds(
    plan: Plan, frame: pd.DataFrame, values: Mapping[str, Mapping[int, float]], rows: Sequence[phrasing.Row]
) -> list[str]:
    """Return notes about unpaired seeds, and about seeds that share a trial."""
    lines = []
    for arm, trials in frame.groupby("arm", sort=False):
        twice = trials[trials.duplicated("trial")]["seed"].tolist()
        if twice:
            lines.append(
                f"{arm}: seeds {_seed_list(twice)} are the same trial as an earlier seed, because nothing that the "
                "seeds vary is used; one training is counted once."
            )
    for row in rows:
        first, second = set(values[row["arm"]]), set(values.get(row["baseline"], {}))
        if plan.looks is not None and row["baseline"] is not None:
            judged_seeds = set(plan.looks.seeds[row["look"] - 1])
            first, second = first & judged_seeds, second & judged_seeds
        if row["baseline"] is None or not first or not second:
            continue
        if row["test"] == "Welch t":
            lines.append(f"{row['arm']} and {row['baseline']} share fewer than two seeds: Welch's t, without pairs.")
        elif unpaired := sorted(first ^ second):
            subject = f"seed {unpaired[0]} has" if len(unpaired) == 1 else f"seeds {_seed_list(unpaired)} have"
            lines.append(
                f"Warning: {row['arm']} and {row['baseline']} are compared at {count(row['pairs'], 'seed')} "
                f"only: {subject} a value in one of the two alone. Seeds that diverged or failed are left out, so the "
                "means may be too good."
            )
    return lines


def _prerequisites(plan: Plan) -> list[str]:
    """Return notes about the number of distinct prerequisites per arm."""
    prerequisites: dict[tuple[str, str], list[str]] = {}
    for planned in plan.trials:
        for role, name in planned.trial.needs.items():
            prerequisites.setdefault((planned.arm, role), []).append(name)
    lines = []
    for (arm, role), trials in prerequisites.items():
        distinct = len(set(trials))
        note = f"{arm}: {count(distinct, f'distinct {role}')} for {count(len(trials), 'trial')}"
        lines.append(note + (f"; the results need not hold for other {role}s." if distinct < len(trials) else "."))
    return lines


def _mixed_numerics(plan: Plan, trials: Sequence[StoredTrial]) -> list[str]:
    """Return notes about comparisons whose arms were trained with different numerics."""
    by_arm: dict[str, dict[str, set[str]]] = {}
    for item in trials:
        if item.result is not None:
            numerics = item.result.circumstances.numerics
            recorded = {name: numerics.get(name) for name in NUMERICS}
            for name, value in recorded.items():
                by_arm.setdefault(item.planned.arm, {}).setdefault(name, set()).add(str(value))
    lines = []
    for arm in plan.arms:
        if arm.baseline is None or arm.name not in by_arm or arm.baseline not in by_arm:
            continue
        both = {name: by_arm[arm.name][name] | by_arm[arm.baseline][name] for name in by_arm[arm.name]}
        mixed = [f"{name} {' and '.join(sorted(values))}" for name, values in both.items() if len(values) > 1]
        if mixed:
            lines.append(
                f"{arm.name} and {arm.baseline} mix numerics ({'; '.join(mixed)}): equal seeds do not give equal bits "
                "across them, so the difference includes that of the numerics."
            )
    return lines


def _collapsed(rows: Sequence[phrasing.Row]) -> list[str]:
    """Return notes about arms of which some seeds collapsed."""
    by_arm = {row["arm"]: row for row in rows}
    lines = []
    for row in rows:
        if not row["collapsed"]:
            continue
        seeds = f"{row['collapsed']} of {count(row['n'], 'seed')}"
        line = f"Warning: {seeds} of {row['arm']} collapsed: they are far worse than the others."
        baseline = by_arm.get(row["baseline"])
        if baseline is not None and baseline["n"]:
            counts = (baseline["collapsed"], row["collapsed"]), (baseline["n"], row["n"])
            line += (
                f" Of {row['baseline']} it is {baseline['collapsed']} of {baseline['n']} (Fisher's exact test, "
                f"one-sided: p = {fisher(*counts):.2g} before correction)."
            )
        lines.append(f"{line} A mean of few seeds hides how often that happens: train more seeds, or judge the rate.")
    return _first_of(lines, "of these")


def _interim_analyses(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return a note on how the looks share alpha, and which arms they left open; none without looks."""
    if plan.looks is None:
        return []
    sizes = [len(seeds) for seeds in plan.looks.seeds]
    sentences = [
        f"{_number(len(sizes))} looks share alpha, at {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} seeds: "
        "p values and intervals of differences hold for all of them together."
    ]
    compared = [row for row in rows if row["baseline"] is not None]
    added: dict[int, list[phrasing.Row]] = {}
    for row in compared:
        if at := plan.looks.number(row["arm"]):
            added.setdefault(at, []).append(row)
    for at, open_rows in added.items():
        pending = any(row["awaited"] for row in open_rows)
        until = "; until all of them have ended, the verdicts are those of the look before" if pending else ""
        these = "this arm and its baseline" if len(open_rows) == 1 else "these arms and their baselines"
        sentences.append(
            f"Look {at} left {_names([row['arm'] for row in open_rows])} inconclusive, so {these} have {sizes[at]} "
            f"seeds{until}."
        )
    last = len(sizes) - 1
    inconclusive = [row for row in compared if row["verdict"] == "cannot tell" and row["refused"] is None]
    inconclusive = [row for row in inconclusive if plan.looks.number(row["arm"]) < last and not row["awaited"]]
    failed = {row["arm"] for row in rows if row["failed"]}
    blocked = [row["arm"] for row in inconclusive if failed & {row["arm"], row["baseline"]}]
    given_up = [row["arm"] for row in inconclusive if is_futile(row, plan) and row["arm"] not in blocked]
    open_arms = [row["arm"] for row in inconclusive if row["arm"] not in {*blocked, *given_up}]
    if given_up:
        sentences.append(
            f"{_names(given_up)} got no more seeds, because {sizes[-1]} would decide the comparison with a probability "
            f"below {phrasing.percent(plan.looks.futility)}."
        )
    if blocked:
        sentences.append(
            f"{_names(blocked)} can get further seeds: first run 'vitlab run --retry-failed' to train the failed "
            "trials again."
        )
    elif open_arms:
        sentences.append(f"{_names(open_arms)} can get further seeds: run 'vitlab run' again.")
    elif not added and not given_up and not any(row["awaited"] for row in compared):
        sentences.append(
            "The first look decided every comparison that can be judged, so no further seeds were trained."
        )
    return [" ".join(sentences)]


def _number(count: int) -> str:
    """Return a number of looks at the beginning of a sentence."""
    return "Two" if count == 2 else str(count)


def _names(arms: Sequence[str]) -> str:
    """Return the names of few arms, or the number of many."""
    return "; ".join(arms) if len(arms) <= MAX_LISTED else f"{len(arms):,} comparisons"


def _seeds(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return notes about the random streams that seeds vary, and about the power of few seeds."""
    seeds = sorted({planned.seed for planned in plan.trials})
    if not seeds:
        return []
    if len(seeds) == 1 and plan.looks is None:
        return [f"One seed ({seeds[0]}): no spread, no interval, no test. Set seeds: 3 or more to compare."]
    streams: dict[str, set[int]] = {}
    for planned in plan.trials:
        for stream, value in planned.trial.seeds.items():
            streams.setdefault(stream, set()).add(value)
    varied = [stream for stream, values in streams.items() if len(values) > 1]
    first = seeds if plan.looks is None else plan.looks.seeds[0]
    more = f", and up to {len(seeds)} of inconclusive arms," if len(seeds) > len(first) else ""
    lines = [f"{count(len(first), 'seed')} ({_seed_list(first)}){more} vary {', '.join(varied) or 'nothing'}."]
    if "split" in streams and "split" not in varied:
        lines[0] += (
            " The validation split is the same in all: intervals cover training again on this split, not another split."
        )
    return lines + _few_pairs(plan, rows)


def _split_noise(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return a note on the spread between seeds, and on what the finite split adds to it."""
    measured = [row for row in rows if row["split_sd"] is not None and row["sd"] is not None and row["n"] > 1]
    df = sum(row["n"] - 1 for row in measured)
    if not df:
        return []
    sd, of_split = (
        math.sqrt(sum((row["n"] - 1) * row[name] ** 2 for row in measured) / df) for name in ("sd", "split_sd")
    )
    if not sd > 0:
        return []
    low, high = sd_interval(sd, df, plan.analysis.alpha)
    scale = phrasing.Scale.of(plan.analysis.metric, plan.units)
    decimals = scale.decimals([low, high - low])
    return [
        f"Seeds of an arm scatter by {scale.amount(sd, decimals)} (pooled standard deviation, "
        f"{phrasing.percent(1 - plan.analysis.alpha)} interval {scale.end(low, decimals)} to "
        f"{scale.end(high, decimals)}). Models that are equally good would scatter by "
        f"{scale.amount(of_split, decimals)} on a split of this size."
    ]


def _few_pairs(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return a note if the pairs are too few for an exact test."""
    lines: list[str] = []
    fewest = min((row for row in rows if row["test"] in PAIRED), key=lambda row: row["pairs"], default=None)
    if fewest is not None and smallest_sign_flip_p(fewest["pairs"]) > _level(plan, fewest):
        lines.append(
            f"{count(fewest['pairs'], 'pair')} are too few for an exact sign-flip test (its smallest p is "
            f"{smallest_sign_flip_p(fewest['pairs']):.2g}): p assumes roughly normal differences between seeds."
        )
    return lines


def _level(plan: Plan, row: phrasing.Row) -> float:
    """Return the level of a single comparison at its look, so that all of its family hold at once."""
    share = plan.alpha_shares[row["look"] - 1]
    return simultaneous_alpha(share * plan.analysis.alpha, row["family"], plan.analysis.correction)


def _disputed_verdicts(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return notes on verdicts that the sign-flip test or another interval contradicts."""
    lines = []
    for row in rows:
        if row["test"] not in PAIRED or row["verdict"] not in ("better", "worse"):
            continue
        low, high = row["difference_low"], row["difference_high"]
        level = _level(plan, row)
        if row["sign_flip_p"] is not None and row["sign_flip_p"] > level >= smallest_sign_flip_p(row["pairs"]):
            lines.append(
                f"{row['arm']}: the exact sign-flip test does not agree (p = {row['sign_flip_p']:.2g} before "
                "correction); look at the single seeds."
            )
        if low <= 0 <= high:
            lines.append(
                f"{row['arm']}: significant by Holm's method, although its simultaneous interval, which is wider, "
                "contains 0."
            )
        elif row["bca_low"] is not None and row["bca_low"] <= 0 <= row["bca_high"]:
            lines.append(f"{row['arm']}: the BCa bootstrap interval contains 0; look at the single seeds.")
    return _first_of(lines, "of these")


def _exploratory_notes(plan: Plan) -> list[str]:
    """Return notes about what was decided after the study was first run."""
    lines = [
        f"Exploratory: since the study was first run, {change}; every verdict was reached after results were known."
        for change in changes(plan)
    ]
    later, dropped, changed_arms = sorted(added_comparisons(plan)), removed_comparisons(plan), altered_arms(plan)
    if len(changed_arms) > 1 and set(changed_arms) == set(plan.identities):
        lines.append("Exploratory: every arm was changed after results were seen.")
    else:
        lines += _first_of(
            [f"Exploratory: arm '{arm}' was changed after results were seen." for arm in changed_arms],
            "arms of this kind",
        )
    if later:
        lines.append(
            f"Exploratory: {_names(later)} joined the family of comparisons after the first run, and "
            f"{'is' if len(later) == 1 else 'are'} corrected for all of them."
        )
    if dropped:
        lines.append(
            f"{_names(dropped)} left the family of comparisons after the first run; it still counts in the correction."
        )
    results, trials, compared = results_before_registration(plan)
    if results:
        before = f"{results:,} of {count(trials, 'trial')} had results before this plan was registered"
        lines.append(
            f"Exploratory: {before}, including both arms of the comparison at some seed: {_names(compared)}."
            if compared
            else f"{before}, but not both arms of any comparison."
        )
    return lines


def _tuning_notes(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return notes about tuned knobs, their cost, and values at the edge of a grid."""
    if not plan.tuning:
        return []
    lines = []
    if plan.pending:
        pending = count(len(plan.pending), "trial")
        lines.append(f"Preliminary: {pending} more will be planned once the knobs of their arms are tuned.")
    rivals = [rival for item in plan.tuning for rival in item.rivals]
    knobs = ", ".join(dict.fromkeys(knob for rival in rivals for knob in rival.values))
    scope = "at the base, for all arms" if plan.tuning[0].arm is None else "for each arm by itself"
    cost = sum(rival.wall_s for rival in rivals)
    trainings = count(sum(len(rival.trials) for rival in rivals), "full-length training")
    lines.append(
        f"Tuned {scope}, by {plan.tuning[0].select}: {knobs}. It {'takes' if plan.pending else 'took'} {trainings}"
        + (f" ({phrasing.duration(cost)})" if cost else "")
        + ", with separate seeds, which are in no mean."
    )
    if plan.tuning[0].arm is None:
        lines.append("What suits the base may not suit every arm as well: tune per arm to know.")
    elif plan.tuning[0].select != plan.analysis.metric:
        lines.append(
            f"Intervals do not include the choice of knobs, because {plan.tuning[0].select} chose them and "
            f"{plan.analysis.metric} judges the arms."
        )
    elif largest := max((row["choice_sd"] or 0.0 for row in rows), default=0.0):
        scale = phrasing.Scale.of(plan.analysis.metric, plan.units)
        lines.append(
            "Intervals include the choice of knobs: other tuning seeds might have chosen others, which adds a standard "
            f"deviation of up to {scale.amount(largest, scale.decimals([largest]))} to a difference. More tuning seeds "
            "make it smaller, more seeds of the arms do not."
        )
    warnings = [
        f"Warning: {' and '.join(edges(item))}, as chosen for {item.arm or 'all arms'}, lies at the edge of its grid: "
        "a better value may lie outside; extend the grid."
        for item in plan.tuning
        if edges(item)
    ]
    return lines + _first_of(warnings, "arms of this kind")


def _learning_rate(plan: Plan) -> list[str]:
    """Return a note if arms with different models share an untuned learning rate."""
    rates = [planned.trial.spec.train.optimizer.options.get("lr") for planned in plan.trials]
    models = [planned.trial.spec.model for planned in plan.trials]
    tuned = any(overlap(RATE, knob) for item in plan.tuning for rival in item.rivals for knob in rival.values)
    if tuned or all(model == models[0] for model in models) or len(set(rates)) > 1:
        return []
    at = f" ({rates[0]:g})" if isinstance(rates[0], float | int) else ""
    return [f"All arms ran at one learning rate{at}: none was tuned, and a better one may suit some arms."]


def _first_of(sentences: list[str], what: str) -> list[str]:
    """Return the first of many sentences, with the number of the others."""
    return (
        sentences
        if len(sentences) <= MAX_LISTED
        else [*sentences[:MAX_LISTED], f"... and {len(sentences) - MAX_LISTED:,} more {what}."]
    )


def _seed_list(seeds: Iterable[int]) -> str:
    """Format seeds as ``0 to 4`` or ``0, 3, 7``."""
    ordered = sorted(seeds)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
