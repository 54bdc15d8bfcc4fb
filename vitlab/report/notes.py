"""Notes: what a reader must know before believing the table, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
from vitlab.report.frame import STATUSES, Found, is_metric, judged, usable
from vitlab.statistics import simultaneous_alpha, smallest_sign_flip_p

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 12  #: notes of one kind that are listed one by one
RATE = "train.optimizer.lr"
NUMERICS = ("torch", "device", "processor", "engine", "threads", "deterministic", "processes", "micro_batch_size")
"""What decides the last bits, and should not differ within a comparison."""


def notes(plan: Plan, found: Sequence[Found], frame: pd.DataFrame, rows: Sequence[phrasing.Row]) -> list[str]:
    """What the reader must know before believing the table; ``found`` holds the prerequisites too."""
    said: list[str] = []
    unfinished = sum(item.status in ("running", "missing") for item in found)
    if unfinished:
        total = {status: sum(item.status == status for item in found) for status in STATUSES}
        said.append(f"Preliminary: of {phrasing.count(len(found), 'trial')}, {phrasing.states(total)}.")
    said += plan.notes
    said += _some([f"{arm.name}: {arm.note}." for arm in plan.arms if arm.note], "arms of this kind")
    said += _tuned(plan)
    untuned = {item.failure for item in plan.tuning}
    said += [
        f"{arm.name} {'failed' if arm.skip in untuned else 'was skipped'}: {arm.skip.rstrip('.')}."
        for arm in plan.arms
        if arm.skip
    ]
    said += _some(
        [_ended_badly(item) for item in found if item.status in ("diverged", "failed")], "trials of this kind"
    )
    said += _some(_not_measured(plan, frame), "of these")
    values = usable(frame, plan.analysis)
    said += _left_out(plan, frame, values, rows)
    said += _prerequisites(plan)
    said += _mixed(plan, found)
    if plan.analysis.at == "best":
        said.append(
            f"{judged(plan.analysis)} is the best of several evaluations of one training: it is optimistic, the more "
            "so the noisier the evaluation and the more of them there are. The test value beside it is that of the "
            "last step."
        )
    return (
        said
        + _exploratory(plan)
        + _looks(plan, rows)
        + _seeds(plan, rows)
        + _doubted(plan, rows)
        + _learning_rate(plan)
    )


# -- one kind each --------------------------------------------------------------------------------------------------


def _ended_badly(item: Found) -> str:
    reason = " ".join(item.failure.split()) or "no reason was recorded"
    left = "; its values are left out" if item.status == "diverged" else ""
    kind = f" ({item.kind})" if item.kind not in (None, item.status, "error") else ""
    return f"{item.planned.arm}, seed {item.planned.seed}, {item.status}{kind}: {reason.rstrip('.')}{left}."


def _not_measured(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """Trials that ended well and still have no value to judge."""
    column = judged(plan.analysis)
    done = frame[frame["status"] == "done"]
    broken = done[~np.isfinite(done[column])]
    if len(done) and len(broken) == len(done):
        known = [name for name in frame.columns if is_metric(name) and frame[name].notna().any()]
        return [f"No trial reports {plan.analysis.metric}; they report {', '.join(known) or 'nothing'}."]
    pairs = zip(broken["arm"].tolist(), broken["seed"].tolist(), strict=True)
    return [f"{arm}, seed {seed}, is done, but its {column} is not finite; it is left out." for arm, seed in pairs]


def _left_out(
    plan: Plan, frame: pd.DataFrame, values: Mapping[str, Mapping[int, float]], rows: Sequence[phrasing.Row]
) -> list[str]:
    """Seeds that a comparison goes without, and seeds that are no replicates."""
    said = []
    for arm, trials in frame.groupby("arm", sort=False):
        twice = trials[trials.duplicated("trial")]["seed"].tolist()
        if twice:
            said.append(
                f"{arm}: seeds {_listed(twice)} are the same trial as an earlier seed, because nothing that the seeds "
                "vary is used; one training is counted once."
            )
    early = None if plan.looks is None else set(plan.looks.first)
    for row in rows:
        first, second = set(values[row["arm"]]), set(values.get(row["baseline"], {}))
        if row["look"] == 1 and early is not None:
            first, second = first & early, second & early
        if row["baseline"] is None or not first or not second:
            continue
        if row["test"] == "Welch t":
            said.append(f"{row['arm']} and {row['baseline']} share fewer than two seeds: Welch's t, without pairs.")
        elif dropped := sorted(first ^ second):
            those = f"seed {dropped[0]} has" if len(dropped) == 1 else f"seeds {_listed(dropped)} have"
            said.append(
                f"Warning: {row['arm']} and {row['baseline']} are compared at {phrasing.count(row['pairs'], 'seed')} "
                f"only: {those} no value on one side. Where trials diverge or fail, what is left flatters."
            )
    return said


def _prerequisites(plan: Plan) -> list[str]:
    """How many trainings stand behind the trials that start from another."""
    behind: dict[tuple[str, str], list[str]] = {}
    for planned in plan.trials:
        for role, needed in planned.trial.needs.items():
            behind.setdefault((planned.arm, role), []).append(needed)
    said = []
    for (arm, role), trials in behind.items():
        distinct = len(set(trials))
        note = f"{arm}: {phrasing.count(distinct, f'distinct {role}')} behind {phrasing.count(len(trials), 'trial')}"
        said.append(note + (f"; what is found holds for {role}s like these alone." if distinct < len(trials) else "."))
    return said


def _mixed(plan: Plan, found: Sequence[Found]) -> list[str]:
    """Comparisons across machines that do not compute the same bits."""
    seen: dict[str, dict[str, set[str]]] = {}
    for item in found:
        if item.result is not None:
            numerics = item.result.circumstances.numerics
            known = {name: numerics.get(name) for name in NUMERICS}
            for name, value in known.items():
                seen.setdefault(item.planned.arm, {}).setdefault(name, set()).add(str(value))
    said = []
    for arm in plan.arms:
        if arm.baseline is None or arm.name not in seen or arm.baseline not in seen:
            continue
        both = {name: seen[arm.name][name] | seen[arm.baseline][name] for name in seen[arm.name]}
        mixed = [f"{name} {' and '.join(sorted(values))}" for name, values in both.items() if len(values) > 1]
        if mixed:
            said.append(
                f"{arm.name} and {arm.baseline} mix numerics ({'; '.join(mixed)}): equal seeds do not draw equal bits "
                "across them, and the difference holds what the machines differ by."
            )
    return said


def _looks(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """What the first look has left open, and what two of them cost."""
    if plan.looks is None:
        return []
    first, second = len(plan.looks.first), len(plan.looks.second)
    said = [
        f"Two looks share alpha, at {phrasing.count(first, 'seed')} and at {second}: p values and intervals of "
        "differences hold for both together."
    ]
    compared = [row for row in rows if row["baseline"] is not None]
    opened = [row for row in compared if row["arm"] in plan.looks.open]
    if opened:
        which = _names([row["arm"] for row in opened])
        awaited = any(row["awaited"] for row in opened)
        until = "; until all of them have ended, what is said is what the first look saw" if awaited else ""
        said.append(
            f"The first left {which} open, so these, and what they are compared with, have {second} seeds{until}."
        )
    left = [row for row in compared if row not in opened and row["verdict"] == "cannot tell"]
    left = [row for row in left if row["refused"] is None and not row["awaited"]]
    failed = {row["arm"] for row in rows if row["failed"]}
    stuck = [row["arm"] for row in left if failed & {row["arm"], row["baseline"]}]
    if stuck:
        said.append(
            f"{_names(stuck)} may be given further seeds once 'vitlab run --retry-failed' has trained what failed."
        )
    elif left:
        said.append(f"{_names([row['arm'] for row in left])} may be given further seeds by the next 'vitlab run'.")
    elif not opened and not any(row["awaited"] for row in compared):
        said.append("The first settled all that can be judged, so no further seeds were trained.")
    return [" ".join(said)]


def _names(arms: Sequence[str]) -> str:
    """Some arms by name, many by number."""
    return "; ".join(arms) if len(arms) <= SHOWN else f"{len(arms):,} comparisons"


def _seeds(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """What the replicates vary, and what so few of them can show."""
    seeds = sorted({planned.seed for planned in plan.trials})
    if not seeds:
        return []
    if len(seeds) == 1 and plan.looks is None:
        return [f"One seed ({seeds[0]}): no spread, no interval, no test. Ask for seeds: 3 or more to compare."]
    streams: dict[str, set[int]] = {}
    for planned in plan.trials:
        for stream, value in planned.trial.seeds.items():
            streams.setdefault(stream, set()).add(value)
    varied = [stream for stream, values in streams.items() if len(values) > 1]
    first = seeds if plan.looks is None else plan.looks.first
    more = f", and {len(seeds)} of what was left open," if len(seeds) > len(first) else ""
    said = [f"{phrasing.count(len(first), 'seed')} ({_listed(first)}){more} vary {', '.join(varied) or 'nothing'}."]
    if "split" in streams and "split" not in varied:
        said[0] += " The validation split is the same in all: intervals speak of training anew on this split."
    pairs = [row["pairs"] for row in rows if row["test"] == "paired t"]
    family = next((row["family"] for row in rows if row["family"]), 0)
    level = simultaneous_alpha(plan.level, family, plan.analysis.correction)
    if pairs and smallest_sign_flip_p(min(pairs)) > level:
        said.append(
            f"{phrasing.count(min(pairs), 'pair')} cannot convince an exact sign-flip test (its smallest p is "
            f"{smallest_sign_flip_p(min(pairs)):.2g}): p rests on differences between seeds being roughly normal."
        )
    return said


def _doubted(plan: Plan, rows: Sequence[phrasing.Row]) -> list[str]:
    """Verdicts that a second opinion does not share."""
    said = []
    for row in rows:
        if row["test"] != "paired t" or row["verdict"] not in ("better", "worse"):
            continue
        low, high = row["difference_low"], row["difference_high"]
        level = simultaneous_alpha(plan.level, row["family"], plan.analysis.correction)
        if row["sign_flip_p"] is not None and row["sign_flip_p"] > level >= smallest_sign_flip_p(row["pairs"]):
            said.append(
                f"{row['arm']}: the exact sign-flip test does not agree (p = {row['sign_flip_p']:.2g} before "
                "correction); look at the single seeds."
            )
        if low <= 0 <= high:
            said.append(
                f"{row['arm']}: Holm's steps tell it apart, and its simultaneous interval, which knows no steps, "
                "still holds 0."
            )
        elif row["bca_low"] is not None and row["bca_low"] <= 0 <= row["bca_high"]:
            said.append(f"{row['arm']}: the BCa bootstrap interval still holds 0; look at the single seeds.")
    return _some(said, "of these")


def _exploratory(plan: Plan) -> list[str]:
    """What was decided after the study was first run."""
    said = [
        f"Exploratory: since the study was first run, {change}; every verdict was reached with the results known."
        for change in changes(plan)
    ]
    later, gone, changed = sorted(added_comparisons(plan)), removed_comparisons(plan), altered_arms(plan)
    if len(changed) > 1 and set(changed) == set(plan.identities):
        said.append("Exploratory: every arm was changed after results were seen.")
    else:
        said += _some(
            [f"Exploratory: arm '{arm}' was changed after results were seen." for arm in changed], "arms of this kind"
        )
    if later:
        said.append(
            f"Exploratory: {_names(later)} joined the family of comparisons after the first run, and "
            f"{'is' if len(later) == 1 else 'are'} corrected for all of them."
        )
    if gone:
        said.append(
            f"{_names(gone)} left the family of comparisons after the first run; it still counts in the correction."
        )
    results, trials, compared = results_before_registration(plan)
    if results:
        before = f"{results:,} of {phrasing.count(trials, 'trial')} had results before this plan was registered"
        said.append(
            f"Exploratory: {before}, those of {_names(compared)} on both sides of the comparison."
            if compared
            else f"{before}, of no comparison on both sides."
        )
    return said


def _tuned(plan: Plan) -> list[str]:
    """What was tuned, at what price, and where a better value may lie beyond those tried."""
    if not plan.tuning:
        return []
    said = []
    if plan.pending:
        waiting = phrasing.count(len(plan.pending), "trial")
        said.append(f"Preliminary: {waiting} more will be planned once the knobs of their arms are tuned.")
    rivals = [rival for item in plan.tuning for rival in item.rivals]
    knobs = ", ".join(dict.fromkeys(knob for rival in rivals for knob in rival.values))
    whom = "at the base, for all arms" if plan.tuning[0].arm is None else "for each arm by itself"
    cost = sum(rival.wall_s for rival in rivals)
    trainings = phrasing.count(sum(len(rival.trials) for rival in rivals), "full-length training")
    said.append(
        f"Tuned {whom}, by {plan.tuning[0].select}: {knobs}. It {'takes' if plan.pending else 'took'} {trainings}"
        + (f" ({phrasing.duration(cost)})" if cost else "")
        + ", with seeds of their own, which stand in no mean."
    )
    if plan.tuning[0].arm is None:
        said.append("What suits the base may not suit every arm as well: tune per arm to know.")
    beyond = [
        f"Warning: {' and '.join(edges(item))}, as chosen for {item.arm or 'all arms'}, lies at the edge of its grid: "
        "a better value may lie beyond."
        for item in plan.tuning
        if edges(item)
    ]
    return said + _some(beyond, "arms of this kind")


def _learning_rate(plan: Plan) -> list[str]:
    """That arms which differ in their model were all given one learning rate, where nobody asked which suits them."""
    rates = [_rate(planned.trial.spec) for planned in plan.trials]
    models = [planned.trial.spec.get("model") for planned in plan.trials]
    tuned = any(overlap(RATE, knob) for item in plan.tuning for rival in item.rivals for knob in rival.values)
    if tuned or all(model == models[0] for model in models) or len(set(rates)) > 1:
        return []
    at = f" ({rates[0]:g})" if isinstance(rates[0], float | int) else ""
    return [f"All arms ran at one learning rate{at}: none was tuned, and a better one may suit some arms."]


def _rate(spec: Mapping[str, Any]) -> Any:
    optimizer = spec.get("train", {}).get("optimizer", {})
    return optimizer.get("lr") if isinstance(optimizer, Mapping) else None


def _some(said: list[str], what: str) -> list[str]:
    """The first of many sentences, and how many more there are."""
    return said if len(said) <= SHOWN else [*said[:SHOWN], f"... and {len(said) - SHOWN:,} more {what}."]


def _listed(seeds: Iterable[int]) -> str:
    """``0 to 4``, or ``0, 3, 7``."""
    known = sorted(seeds)
    if len(known) > 2 and known == list(range(known[0], known[-1] + 1)):
        return f"{known[0]} to {known[-1]}"
    return ", ".join(map(str, known))
