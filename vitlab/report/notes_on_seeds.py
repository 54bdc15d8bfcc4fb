"""Notes of a report that concern its seeds: missing and collapsed ones, looks, spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlab.comparison.study import is_futile
from vitlab.errors import count
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.study_results import StudyResults
from vitlab.statistics import boschloo, gap_score, largest_hidden_rate, sd_interval

if TYPE_CHECKING:
    import pandas as pd

MAX_GAP_SCORE = 3.0  #: normal seeds have a larger one in 1 % of studies
MAX_LISTED = 12  #: notes of one kind that are listed one by one


def repeated_trials(frame: pd.DataFrame) -> list[str]:
    """Return notes about seeds that share a trial."""
    repeated = frame[frame.duplicated(["arm", "trial"])]
    return [
        f"{arm}: seeds {_seed_list(rows['seed'].tolist())} are the same trial as an earlier seed, because nothing that "
        "the seeds vary is used; one training is counted once."
        for arm, rows in repeated.groupby("arm", sort=False)
    ]


def unpaired_seeds(results: StudyResults, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return notes about seeds that one arm of a comparison has alone."""
    plan, lines = results.plan, []
    for row in rows:
        first, second = (set(results.values.get(row[side], {})) for side in ("arm", "baseline"))
        if plan.looks is not None and row["baseline"] is not None:
            judged_seeds = set(plan.looks.seeds[row["look"] - 1])
            first, second = first & judged_seeds, second & judged_seeds
        if row["baseline"] is None or not first or not second:
            continue
        if row["test"] == "Welch t":
            lines.append(f"{row['arm']} and {row['baseline']} share fewer than two seeds: Welch's t, without pairs.")
        elif row["pairs"] and (unpaired := sorted(first ^ second)):
            subject = f"seed {unpaired[0]} has" if len(unpaired) == 1 else f"seeds {_seed_list(unpaired)} have"
            lines.append(
                f"Warning: the difference of {row['arm']} and {row['baseline']} is over the "
                f"{count(row['pairs'], 'seed')} that both have, their means are over all: {subject} a value in one of "
                "the two alone. Seeds that diverged or failed are left out, so the means may be too good."
            )
    return first_of(lines, "of these")


def spread_rule(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return a note on the variances of comparisons and their correction; none for a single comparison."""
    shared = max((row["shared"] or 1 for row in rows), default=1)
    if shared < 2:
        return []
    alone = [row["arm"] for row in rows if row["test"] == "paired t" and row["shared"] == 1]
    others = f" With other seeds, and their own variance alone: {arm_names(alone)}." if alone else ""
    corrected = (
        "" if plan.analysis.correction == "none" else " P values and intervals are corrected by Bonferroni's method."
    )
    return [
        f"The variance of a difference is averaged with the mean variance of {shared} comparisons, which have one "
        f"baseline and the same seeds, and is never below its own: a rule of vitlab's own, checked by simulation."
        f"{others}{corrected}"
    ]


def shape_of_seeds(results: StudyResults, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return a note if the seeds of the arms lie in groups, or far to one side, more than normal values do."""
    sound = [results.values[row["arm"]] for row in rows if row["n"] and not row["collapsed"]]
    seeds = sorted(set.intersection(*map(set, sound))) if sound else []
    score = gap_score(np.array([[values[seed] for seed in seeds] for values in sound])) if len(seeds) > 2 else 0.0
    if not score > MAX_GAP_SCORE or not any(row["test"] == "paired t" for row in rows):
        return []
    return [
        "Warning: seeds lie in groups, or far out on one side, more than normal values do (their gaps exceed those by "
        f"{score:.1f} standard errors). P values and intervals are too small for such seeds: look at the single ones."
    ]


def collapsed_seeds(rows: Sequence[phrasing.Row]) -> list[str]:
    """Return notes about arms of which some seeds collapsed, and about how many may, where none did."""
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
                f" Of {row['baseline']} it is {baseline['collapsed']} of {baseline['n']} (Boschloo's exact test, "
                f"one-sided: p = {boschloo(*counts):.2g} before correction)."
            )
        lines.append(f"{line} A mean of few seeds hides how often that happens: train more seeds, or judge the rate.")
    lines = first_of(lines, "of these")
    sizes = [row["n"] for row in rows if row["n"] > 1 and not row["collapsed"]]
    if sizes and any(row["baseline"] is not None for row in rows):
        rate = 100 * largest_hidden_rate(min(sizes))
        lines.append(
            f"No collapse in {count(min(sizes), 'seed')} of an arm still allows up to {rate:.0f} % of its trainings to "
            "collapse (exact binomial bound, 95 %)."
        )
    return lines


def looks_note(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return a note on how the looks share alpha, and which arms they left open; none without looks."""
    if plan.looks is None:
        return []
    sizes = [len(seeds) for seeds in plan.looks.seeds]
    sentences = [
        f"{_number(len(sizes))} looks share alpha, at {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} seeds: "
        "p values and intervals of differences hold for all of them together. Differences of comparisons that ended "
        "early are 2 to 12 % too large on average."
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
            f"Look {at} left {arm_names([row['arm'] for row in open_rows])} inconclusive, so {these} have {sizes[at]} "
            f"seeds{until}."
        )
    last = len(sizes) - 1
    inconclusive = [row for row in compared if row["verdict"] == "cannot tell" and row["refused"] is None]
    inconclusive = [row for row in inconclusive if plan.looks.number(row["arm"]) < last and not row["awaited"]]
    failed = {row["arm"] for row in rows if row["failed"]}
    given_up = [row["arm"] for row in inconclusive if is_futile(row["decidable"], plan)]
    blocked = [
        row["arm"] for row in inconclusive if row["arm"] not in given_up and failed & {row["arm"], row["baseline"]}
    ]
    open_arms = [row["arm"] for row in inconclusive if row["arm"] not in {*blocked, *given_up}]
    if given_up:
        sentences.append(
            f"{arm_names(given_up)} got no more seeds, because {sizes[-1]} seeds would decide "
            f"{'the' if len(given_up) == 1 else 'each'} comparison with a probability below "
            f"{phrasing.percent(plan.looks.futility)}."
        )
    if blocked:
        sentences.append(
            f"{arm_names(blocked)} can get further seeds: first run 'vitlab run --retry-failed' to train the failed "
            "trials again."
        )
    elif open_arms:
        sentences.append(f"{arm_names(open_arms)} can get further seeds: run 'vitlab run' again.")
    elif not added and not given_up and not any(row["awaited"] for row in compared):
        sentences.append(
            "The first look decided every comparison that can be judged, so no further seeds were trained."
        )
    return [" ".join(sentences)]


def _number(looks: int) -> str:
    """Return a number of looks at the beginning of a sentence."""
    return "Two" if looks == 2 else str(looks)


def arm_names(arms: Sequence[str]) -> str:
    """Return the names of few arms, or the number of many."""
    return "; ".join(arms) if len(arms) <= MAX_LISTED else f"{len(arms):,} comparisons"


def varied_streams(results: StudyResults) -> list[str]:
    """Return notes about the random streams that seeds vary."""
    plan = results.plan
    seeds = sorted({planned.seed for planned in plan.trials})
    if not seeds:
        return []
    if len(seeds) == 1 and plan.looks is None:
        return [f"One seed ({seeds[0]}): no spread, no interval, no test. Set seeds: 3 or more to compare."]
    streams: dict[str, set[int]] = {}
    for planned in plan.trials:
        for stream, value in planned.trial.seeds.items():
            streams.setdefault(stream, set()).add(value)
    varying = [stream for stream, values in streams.items() if len(values) > 1]
    first = seeds if plan.looks is None else plan.looks.seeds[0]
    more = f", and up to {len(seeds)} of inconclusive arms," if len(seeds) > len(first) else ""
    lines = [f"{count(len(first), 'seed')} ({_seed_list(first)}){more} vary {', '.join(varying) or 'nothing'}."]
    if "split" in streams and "split" not in varying:
        lines[0] += (
            " The validation split is the same in all: intervals cover training again on this split, not another split."
        )
    if "split" in varying:
        lines[0] += _of_splits(results)
    return lines


def _of_splits(results: StudyResults) -> str:
    """Return what intervals are about if seeds hold out different validation images."""
    ratios = set(results.overlap.values())
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
    low, high = (f"{100 * bound(ratios) / (1 + bound(ratios)):.0f}" for bound in (min, max))
    share = f"{high} %" if low == high else f"{low} to {high} %"
    return (
        f" Two seeds have {share} of their validation images in common on average, and their training sets overlap: "
        "p values and intervals are corrected for that (corrected resampled t, Nadeau and Bengio 2003), and cover "
        "training and validation on other images. The sign-flip test, which needs independent seeds, is left out, and "
        "intervals of fronts and power laws are not corrected."
    )


def split_noise(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return a note on the spread between seeds, and on what the finite split adds to it."""
    usable = [row for row in rows if row["split_sd"] is not None and row["sd"] is not None and row["n"] > 1]
    df = sum(row["n"] - 1 for row in usable)
    if not df:
        return []
    sd, of_split = (
        math.sqrt(sum((row["n"] - 1) * row[name] ** 2 for row in usable) / df) for name in ("sd", "split_sd")
    )
    if not sd > 0:
        return []
    low, high = sd_interval(sd, df, plan.analysis.alpha)
    scale = phrasing.Scale.of(plan.analysis.metric, plan.units)
    decimals = scale.decimals([low, high - low])
    sentence = (
        f"Seeds of an arm scatter by {scale.amount(sd, decimals)} (pooled standard deviation, "
        f"{phrasing.percent(1 - plan.analysis.alpha)} interval {scale.end(low, decimals)} to "
        f"{scale.end(high, decimals)})."
    )
    if of_split < sd:  # otherwise trainings agree on images more than by chance, as barely trained models do
        amount = scale.amount(of_split, decimals)
        sentence += f" Models that are equally good would scatter by {amount} on a split of this size."
    return [sentence]


def first_of(sentences: list[str], what: str) -> list[str]:
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
