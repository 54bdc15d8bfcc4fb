"""The statistical and learning tiers of the gate, and the result of a check."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from vitlab import statistics
from vitlab.comparison.samples import no_sample, prerequisites
from vitlab.errors import UserError, count, nearest
from vitlab.plan.values import Plan
from vitlab.regression import arrays, power
from vitlab.regression import decide as judging
from vitlab.regression.arrays import MIN_SEEDS, NAN, Verdict, as_array
from vitlab.regression.baseline import Baseline, Values
from vitlab.regression.decide import Against, Cell, Finding, Pair
from vitlab.regression.facts import first_of_arms
from vitlab.report import frame
from vitlab.spec import Study
from vitlab.spec.choice import Goal
from vitlab.store.folders import Store
from vitlab.store.result import Ending

TARGET_CHANCE = 0.8  #: the probability with which an unchanged model should pass

Train = Callable[[Sequence[int] | None, Sequence[str]], Values]
"""Train the given seeds (None: those of the file) of the given arms (empty: all) and return all values."""


@dataclass(frozen=True)
class CheckResult:
    """The result of checking a study."""

    study: str
    verdict: Verdict
    fails: bool  #: regressed, or inconclusive and the study treats that as a failure
    findings: tuple[Finding, ...] = ()  #: of the exact and the learning tier
    cells: tuple[Cell, ...] = ()  #: of the statistical tier
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  #: arms of which notably more trainings were lost or collapsed


@dataclass(frozen=True)
class Outlook:
    """The probability that a model passes a cell if nothing but its rounding has changed."""

    arm: str
    metric: str
    against: Against
    n: int  #: seeds, including those of a second look
    sd: float  #: pooled standard deviation of the baseline
    margin: float
    chance: float
    needs: int | None  #: seeds for a chance of 80 % of this cell


def values_of(plan: Plan, store: Store, study: Study) -> Values:
    """Return the final values of a trained study by metric, arm and seed.

    Raises:
        UserError: for a metric that its trials do not report.
    """
    outcomes = frame.gather(plan, store)
    table = frame.table(plan, outcomes)
    any_done = table["status"].eq(Ending.DONE).any()
    metrics: dict[str, dict[str, dict[int, float]]] = {}
    quanta = {}
    for metric, goal in goals(study).items():
        if metric not in table:
            table[metric] = NAN
        if any_done and table[metric].isna().all():
            reported = [name for name in map(str, table) if frame.is_metric(name) and table[name].notna().any()]
            raise UserError(
                f"no trial has the metric {metric}.{nearest(metric, reported)} Metrics: {', '.join(reported)}."
            )
        changes = {} if metric == study.analysis.metric else {"metric": metric, "goal": goal, "at": "last"}
        analysis = study.analysis.model_copy(update=changes)
        quanta[metric] = frame.metric_quantum(replace(plan, analysis=analysis), outcomes)
        metrics[metric] = frame.usable(table, analysis, quanta[metric])
    diverged: dict[str, tuple[int, ...]] = {}
    for item in outcomes:
        final = item.result.outcome.metrics if item.result is not None else {}
        if item.status == Ending.DIVERGED or not all(math.isfinite(final.get(metric, 0.0)) for metric in metrics):
            diverged[item.planned.arm] = (*diverged.get(item.planned.arm, ()), item.planned.seed)
    devices = sorted({str(device) for device in table["device"].dropna()})
    data = {planned.arm: str(planned.trial.data) for planned in first_of_arms(plan)}
    return Values(
        device=", ".join(devices),
        data=data,
        metrics=metrics,
        quanta=quanta,
        diverged=diverged,
        behind={arm: min(map(len, roles.values())) for arm, roles in prerequisites(plan).items()},
        versions=_versions(outcomes),
        seconds={str(arm): float(seconds) for arm, seconds in table.groupby("arm")["wall_s"].sum().items()},
    )


def foreign_result_versions(plan: Plan, store: Store, installed: Mapping[str, str]) -> list[str]:
    """Return the versions under which results of a plan were trained and that differ from the installed ones, as text.

    Args:
        plan: the plan; results that its trials start from are included.
        store: the store of the results.
        installed: distribution name to installed version.
    """
    differing: dict[str, None] = {}
    for trial in (*(planned.trial for planned in plan.trials), *plan.prerequisites):
        result = store.trial(trial.key, trial.code).result()
        if result is not None:
            differing |= dict.fromkeys(_differing_versions(result.circumstances.installed, installed))
    return list(differing)


def version_notes(baseline: Baseline, installed: Mapping[str, str]) -> list[str]:
    """Return a sentence for each side of the comparison that was trained under other than the installed versions."""
    sides = {against: values.versions for against, values in _sides(baseline)} if baseline.values is not None else {}
    if not sides.get("baseline") and baseline.facts is not None:
        same = baseline.facts.torch == installed["torch"].partition("+")[0]
        sides["baseline"] = {"torch": installed["torch"] if same else baseline.facts.torch}
    notes = []
    for against, recorded in sides.items():
        if differing := _differing_versions(recorded, installed):
            now = ", ".join(
                f"{name} {version}" for name, version in installed.items() if recorded.get(name, version) != version
            )
            notes.append(f"the {against} was trained under {', '.join(differing)}, and this environment has {now}")
    return notes


def goals(study: Study) -> dict[str, Goal]:
    """Return every judged metric with its goal, that of the analysis first."""
    assert study.check is not None
    return {study.analysis.metric: study.analysis.goal, **study.check.metrics}


def family(study: Study, baseline: Baseline, new: Values) -> tuple[list[Pair], list[str]]:
    """Return every cell, with the reason for those that cannot be judged, and notes.

    Raises:
        UserError: if the baseline has no values.
    """
    pairs, notes = [], []
    for against, values in _sides(baseline):
        if values.device != new.device:
            notes.append(f"the {against} was trained on {values.device}, and the candidate on {new.device}")
        for metric, goal in goals(study).items():
            by_arm = values.metrics.get(metric, {})
            margin, min_abs = _margins(study, values, metric)
            for arm, candidate in new.metrics[metric].items():
                if arm not in by_arm and against == "anchor":
                    notes.append(f"arm '{arm}' has no {metric} in the anchor: its drift is not measured")
                    continue
                if arm not in by_arm:
                    reason = f"the baseline has no {metric} of this arm; re-run with --accept"
                    pairs.append(Pair(arm, metric, goal, {}, candidate, margin, min_abs, refused=reason))
                    continue
                if not by_arm[arm] and not candidate and arm not in new.diverged:
                    notes.append(f"arm '{arm}' has no {metric}, and had none in the {against}: it is not judged")
                    continue
                before, after = values.data.get(arm), new.data.get(arm)
                lost_before = frozenset(values.diverged.get(arm, ())) - by_arm[arm].keys()
                lost = frozenset(new.diverged.get(arm, ())) - candidate.keys()
                pairs.append(
                    Pair(
                        arm=arm,
                        metric=metric,
                        goal=goal,
                        old=by_arm[arm],
                        new=candidate,
                        margin=margin,
                        min_abs=min_abs,
                        quantum=values.quanta.get(metric, 0.0),
                        against=against,
                        lost=(lost_before, lost),
                        refused="" if before == after else f"its data was {before} and is {after}",
                        seconds=new.seconds.get(arm, NAN),
                        no_sample=no_sample(new.behind[arm]) if arm in new.behind else "",
                    )
                )
        notes += [
            f"arm '{arm}' of the {against} is no longer in the study" for arm in values.data if arm not in new.data
        ]
    return pairs, list(dict.fromkeys(notes))


def statistical(study: Study, baseline: Baseline, train: Train) -> tuple[list[Cell], list[Finding], list[str]]:
    """Train and judge every cell; with ``escalate_to``, train more seeds of the inconclusive arms and judge them again.

    Each of two looks spends half of alpha, so that the chance of a false alarm is that of a single look.

    Returns:
        the cells, the findings on the number of lost and collapsed trainings, and notes.
    """
    assert study.check is not None
    old = _values(baseline)  # before anything is trained
    alpha = _level(study)
    pairs, notes = family(study, baseline, train(None, ()))
    cells, findings = judging.judge(pairs, alpha)
    inconclusive = list(dict.fromkeys(cell.arm for cell in cells if cell.verdict == "inconclusive" and cell.se > 0))
    more = more_seeds(study)
    if more is None or not inconclusive:
        return cells, findings, notes
    baseline_seeds = {seed for arms in old.metrics.values() for arm in inconclusive for seed in arms.get(arm, {})}
    seeds = tuple(seed for seed in more if seed in baseline_seeds or seed in study.seeds.values)
    if len(seeds) == len(study.seeds.values):
        notes.append(
            "more seeds would not help, because the baseline has no more; set escalate_to and accept a baseline again"
        )
        return cells, findings, notes
    pairs, notes = family(study, baseline, train(seeds, inconclusive))
    more_cells, more_findings = judging.judge(pairs, alpha)
    second_look = {(cell.arm, cell.metric, cell.against): cell for cell in more_cells}
    decided = {finding.check: finding for finding in findings if finding.verdict == "regressed"}
    notes.append(
        f"{count(len(seeds), 'seed')} of {', '.join(inconclusive)}, for {len(study.seeds.values)} were inconclusive"
    )
    return (
        [
            second_look.get((cell.arm, cell.metric, cell.against), cell)
            if cell.arm in inconclusive and cell.verdict == "inconclusive"
            else cell
            for cell in cells
        ],
        [*({finding.check: finding for finding in more_findings} | decided).values()],
        notes,
    )


def more_seeds(study: Study) -> tuple[int, ...] | None:
    """Return the seeds of the second look, including those of the first; None if there is no second look."""
    assert study.check is not None
    escalate_to = study.check.escalate_to
    return None if escalate_to is None or escalate_to <= len(study.seeds.values) else study.seeds.up_to(escalate_to)


def learning(plan: Plan, plugins: Sequence[str | Path] = ()) -> list[Finding]:
    """Check that the loss of every arm falls within a hundred steps, on training and on validation images.

    If only one of the two falls, the finding is inconclusive: noisy batches do that to sound networks too.
    """
    from vitlab.regression.traces import LEARNING_STEPS, trace

    findings = []
    for planned in first_of_arms(plan):
        if planned.trial.spec.train.steps == 0:
            continue  # a closed-form solution takes no steps
        result = trace(plan, planned, LEARNING_STEPS, plugins=plugins)
        half = max(1, len(result.losses) // 2)  # long enough for the noise of batches to even out
        first, last = (sum(part) / half for part in (result.losses[:half], result.losses[-half:]))
        rises = [
            f"the {which} loss went from {before:.4g} to {after:.4g} in {count(len(result.losses), 'step')}"
            for which, before, after in (("training", first, last), ("validation", result.before, result.after))
            if not after < before
        ]
        verdict: Verdict = ("pass", "inconclusive", "regressed")[len(rises)]
        findings.append(Finding(planned.arm, "learning", verdict, "; ".join(rises)))
    return findings


def outlook(study: Study, baseline: Baseline) -> list[Outlook]:
    """Return for each cell the probability that a model passes if nothing but its rounding has changed.

    Against the anchor, the drop from the anchor to the baseline counts against the margin.
    """
    assert study.check is not None
    alpha, more, now = _level(study), more_seeds(study) or (), _values(baseline)
    cells = []
    for against, values in _sides(baseline):
        for metric, goal in goals(study).items():
            by_arm, current_by_arm = (_sound(side.metrics.get(metric, {}), goal) for side in (values, now))
            sd = float(arrays.pooled_sd(as_array(by_arm))[0])
            margin, _ = _margins(study, values, metric)
            for arm, seeds in by_arm.items():
                current = current_by_arm.get(arm, {})
                if not seeds or not current:
                    continue
                drop = _sign(goal) * (fmean(seeds.values()) - fmean(current.values()))
                arm_sd = float(arrays.pooled_sd(as_array({arm: seeds}))[0]) or sd
                n, n_second = (len(seeds.keys() & set(some)) for some in (study.seeds.values, more))
                if MIN_SEEDS <= n < n_second and arm_sd > 0:
                    chance = power.chance_in_two_looks(n, n_second, arm_sd, margin - drop, alpha)
                else:
                    chance = power.chance_to_pass(n, arm_sd, margin - drop, alpha) if drop < margin else 0.0
                needs = power.seeds_to_pass(arm_sd * math.sqrt(2), margin - drop, alpha) if drop < margin else None
                cells.append(Outlook(arm, metric, against, max(n, n_second), arm_sd, margin, chance, needs))
    return cells


def _level(study: Study) -> float:
    """Return the alpha of one look: half of the study's if there may be two looks."""
    assert study.check is not None
    return study.check.alpha if more_seeds(study) is None else study.check.alpha / 2


def _sides(baseline: Baseline) -> Iterator[tuple[Against, Values]]:
    """Yield the value sets that a candidate is compared with."""
    values = _values(baseline)
    yield "baseline", values
    if baseline.anchor is not None and baseline.anchor.metrics != values.metrics:
        yield "anchor", baseline.anchor


def _sound(arms: Mapping[str, Mapping[int, float]], goal: Goal) -> dict[str, dict[int, float]]:
    """Return the values of each arm's seeds without those that collapsed."""
    collapsed = statistics.collapsed_seeds(arms, _sign(goal))
    return {arm: {seed: x for seed, x in by.items() if seed not in collapsed[arm]} for arm, by in arms.items()}


def _sign(goal: Goal) -> int:
    return 1 if goal == "max" else -1


def _values(baseline: Baseline) -> Values:
    if baseline.values is None:
        raise UserError(
            "the baseline has no results of trials; add them with 'vitlab check FILE --accept --reason TEXT', without "
            "--tier"
        )
    return baseline.values


def _differing_versions(recorded: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Return the recorded versions that differ from the installed ones, as ``torch 2.12.0``."""
    return [f"{name} {version}" for name, version in recorded.items() if installed.get(name, version) != version]


def _versions(outcomes: Sequence[frame.StoredTrial]) -> dict[str, str]:
    """Return the version, or versions, of each distribution that results were trained under."""
    versions: dict[str, set[str]] = defaultdict(set)
    for item in outcomes:
        if item.result is not None:
            for name, version in item.result.circumstances.installed.items():
                versions[name].add(version)
    return {name: ", ".join(sorted(versions[name])) for name in sorted(versions)}


def _margins(study: Study, values: Values, metric: str) -> tuple[float, float]:
    """Return the margin and ``min_abs`` of a metric; their defaults follow from the spread of the baseline."""
    assert study.check is not None
    sd = float(arrays.robust_sd(as_array(values.metrics.get(metric, {})), _sign(goals(study)[metric]))[0])
    steps = 2 * values.quanta.get(metric, 0.0)
    min_abs = study.check.min_abs.get(metric, max(sd, steps))
    return study.check.margin.get(metric, max(study.check.margin_sd * sd, steps, min_abs)), min_abs
