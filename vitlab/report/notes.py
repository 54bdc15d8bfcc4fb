"""Notes of a report: caveats about its table, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
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
from vitlab.report.frame import STATUSES, StoredTrial, is_metric, metric_column
from vitlab.report.notes_on_seeds import (
    arm_names,
    collapsed_seeds,
    first_of,
    looks_note,
    repeated_trials,
    shape_of_seeds,
    split_noise,
    spread_rule,
    unpaired_seeds,
    varied_streams,
)
from vitlab.report.study_results import StudyResults
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

RATE = "train.optimizer.lr"
PREREQUISITES = {"init_from": "pre-training"}  #: in notes; other roles have their names
NUMERICS = ("torch", "device", "processor", "engine", "threads", "deterministic", "processes", "micro_batch_size")
"""Settings that affect the last bits and should not differ within a comparison."""


def notes(results: StudyResults, prerequisite_trials: Sequence[StoredTrial], rows: Sequence[phrasing.Row]) -> list[str]:
    """Return the notes of a report."""
    plan, frame = results.plan, results.frame
    trials = [*prerequisite_trials, *results.trials]
    lines: list[str] = []
    pending = sum(item.status in ("running", "missing") for item in trials)
    if pending:
        total = {status: sum(item.status == status for item in trials) for status in STATUSES}
        lines.append(f"Preliminary: of {count(len(trials), 'trial')}, {phrasing.states(total)}.")
    lines += plan.notes
    lines += first_of([f"{arm.name}: {arm.note}." for arm in plan.arms if arm.note], "arms of this kind")
    lines += _tuning_notes(plan, rows)
    untuned = {item.failure for item in plan.tuning}
    lines += [
        f"{arm.name} {'failed' if arm.skip in untuned else 'was skipped'}: {arm.skip.rstrip('.')}."
        for arm in plan.arms
        if arm.skip
    ]
    lines += first_of(
        [_unsuccessful_trial(item) for item in trials if item.status in (Ending.DIVERGED, Ending.FAILED)],
        "trials of this kind",
    )
    lines += first_of(_missing_metric(plan, frame), "of these")
    lines += repeated_trials(frame) + unpaired_seeds(results, rows)
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
        + looks_note(plan, rows)
        + spread_rule(plan, rows)
        + varied_streams(results)
        + split_noise(plan, rows)
        + shape_of_seeds(results, rows)
        + collapsed_seeds(rows)
        + _learning_rate(plan)
    )


def table_notes(results: StudyResults, rows: Sequence[phrasing.Row]) -> list[str]:
    """Return the notes that follow from a table of values alone, see :mod:`vitlab.judging`."""
    return [
        *first_of(_missing_metric(results.plan, results.frame), "of these"),
        *unpaired_seeds(results, rows),
        *spread_rule(results.plan, rows),
        *shape_of_seeds(results, rows),
        *collapsed_seeds(rows),
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


def _prerequisites(plan: Plan) -> list[str]:
    """Return notes about the number of distinct prerequisites per arm."""
    prerequisites: dict[tuple[str, str], list[str]] = {}
    for planned in plan.trials:
        for role, name in planned.trial.needs.items():
            prerequisites.setdefault((planned.arm, role), []).append(name)
    arms_of_note: dict[tuple[str, str], list[str]] = {}
    for (arm, role), trials in prerequisites.items():
        distinct, noun = len(set(trials)), PREREQUISITES.get(role, role)
        number = f"{count(distinct, f'distinct {noun}')} for {count(len(trials), 'trial')}"
        limit = f": the results need not hold for other {noun}s." if distinct < len(trials) else "."
        arms_of_note.setdefault((number, limit), []).append(arm)
    every = {planned.arm for planned in plan.trials}
    lines = []
    for (number, limit), arms in arms_of_note.items():
        names = f"{'each of ' if len(arms) > 1 else ''}{'; '.join(arms)}"
        lines.append(f"{number} in {'every arm' if set(arms) == every else names}{limit}")
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
        lines += first_of(
            [f"Exploratory: arm '{arm}' was changed after results were seen." for arm in changed_arms],
            "arms of this kind",
        )
    if later:
        lines.append(
            f"Exploratory: {arm_names(later)} joined the family of comparisons after the first run, and "
            f"{'is' if len(later) == 1 else 'are'} corrected for all of them."
        )
    if dropped:
        lines.append(
            f"{arm_names(dropped)} left the family of comparisons after the first run; it still counts in the "
            "correction."
        )
    results, trials, compared = results_before_registration(plan)
    if results:
        before = f"{results:,} of {count(trials, 'trial')} had results before this plan was registered"
        lines.append(
            f"Exploratory: {before}, including both arms of the comparison at some seed: {arm_names(compared)}."
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
    return lines + first_of(warnings, "arms of this kind")


def _learning_rate(plan: Plan) -> list[str]:
    """Return a note if arms with different models share an untuned learning rate."""
    rates = [planned.trial.spec.train.optimizer.options.get("lr") for planned in plan.trials]
    models = [planned.trial.spec.model for planned in plan.trials]
    tuned = any(overlap(RATE, knob) for item in plan.tuning for rival in item.rivals for knob in rival.values)
    if tuned or all(model == models[0] for model in models) or len(set(rates)) > 1:
        return []
    at = f" ({rates[0]:g})" if isinstance(rates[0], float | int) else ""
    return [f"All arms ran at one learning rate{at}: none was tuned, and a better one may suit some arms."]
