"""The statistical and learning tiers of the gate, and the result of a check."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from vitlab.comparison.study import describe_few_prerequisites, prerequisites_by_arm
from vitlab.driver.session import Watch, iterate_with_time_left
from vitlab.errors import UserError, format_count, nearest
from vitlab.planning.values import Plan
from vitlab.regression import decide
from vitlab.regression.baseline import Values
from vitlab.regression.decide import Cell, Finding, Pair, Verdict, pooled_sd, worst_verdict
from vitlab.regression.facts import LEARNING_STEPS, train_trace
from vitlab.report import frame
from vitlab.report.phrasing import Scale
from vitlab.report.provenance import merge_distinct_values
from vitlab.spec import Study
from vitlab.spec.choice import Goal
from vitlab.statistics import replicates
from vitlab.statistics.replicates import NAN, values_to_array
from vitlab.store.folders import Store
from vitlab.store.result import Ending, TrialResult


@dataclass(frozen=True)
class CheckResult:
    """The result of checking a study."""

    study: str
    verdict: Verdict
    fails: bool  #: differs or regressed, or inconclusive and the study treats that as a failure
    findings: tuple[Finding, ...] = ()  #: of the exact and the learning tier
    cells: tuple[Cell, ...] = ()  #: of the statistical tier
    notes: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)  #: of metrics, see :attr:`vitlab.planning.values.Plan.units`


@dataclass(frozen=True)
class Outlook:
    """What the seeds of a cell can tell: that nothing but rounding has changed, or a regression."""

    arm: str
    metric: str
    n: int  #: seeds, with a second look included
    new: float  #: mean of the baseline, and of a candidate that equals it
    sd: float  #: standard deviation of the baseline
    n_of_sd: int  #: seeds from which it is estimated
    margin: float
    chance: float  #: that a model passes that differs by rounding alone
    needs: int | None  #: seeds by which it passes in all cells four times in five
    worse_by: float  #: what is found four times in five; infinite if nothing is, NaN without spread
    verdict: Verdict = "pass"  #: of a candidate that equals the baseline
    reason: str = ""


CellT = TypeVar("CellT", Cell, Outlook)


def read_final_values(plan: Plan, store: Store, study: Study) -> Values:
    """Return the final values of a trained study by metric, arm and seed; a metric without any raises UserError."""
    outcomes = frame.gather_trials(plan, store)
    table = frame.trials_to_frame(plan, outcomes)
    metrics, quanta = {}, {}
    for metric, goal in judged_goals(study).items():
        if metric not in table:
            table[metric] = NAN
        if table["status"].eq(Ending.DONE).any() and table[metric].isna().all():
            reported = [name for name in map(str, table) if frame.is_metric(name) and table[name].notna().any()]
            raise UserError(
                f"no trial has the metric {metric}.{nearest(metric, reported)} Metrics: {', '.join(reported)}."
            )
        changes = {} if metric == study.analysis.metric else {"metric": metric, "goal": goal, "at": "last"}
        analysis = study.analysis.model_copy(update=changes)
        quanta[metric] = frame.metric_quantum(replace(plan, analysis=analysis), outcomes)
        metrics[metric] = frame.judged_values(table, analysis, quanta[metric])
    diverged = defaultdict[str, tuple[int, ...]](tuple)
    for item in outcomes:
        final = item.result.outcome.metrics if item.result is not None else {}
        if item.status == Ending.DIVERGED or not all(math.isfinite(final.get(metric, 0.0)) for metric in metrics):
            diverged[item.planned.arm] += (item.planned.seed,)
    return Values(
        device=", ".join(sorted({str(device) for device in table["device"].dropna()})),
        data={arm: str(planned.trial.data) for arm, planned in plan.first_trials.items()},
        metrics=metrics,
        quanta=quanta,
        diverged=diverged,
        behind={arm: min(map(len, roles.values())) for arm, roles in prerequisites_by_arm(plan).items()},
        versions=recorded_versions(item.result for item in outcomes),
        seconds={str(arm): float(seconds) for arm, seconds in table.groupby("arm")["wall_s"].sum().items()},
    )


def recorded_versions(results: Iterable[TrialResult | None]) -> dict[str, str]:
    """Return the versions under which trials were trained; of several, all of them."""
    return merge_distinct_values(
        (result.circumstances.installed_versions for result in results if result is not None), ", "
    )


def differing_versions(recorded: Mapping[str, str], installed: Mapping[str, str]) -> str:
    """Return the recorded versions that differ from the installed ones, as in ``torch 2.12.0``."""
    return ", ".join(f"{name} {now}" for name, now in recorded.items() if installed.get(name, now) != now)


def judged_goals(study: Study) -> dict[str, Goal]:
    """Return every judged metric with its goal, the analysis's own first."""
    return {study.analysis.metric: study.analysis.goal, **study.check.metrics}


def pair_cells(study: Study, old: Values, new: Values) -> tuple[list[Pair], list[str]]:
    """Return every cell of a baseline's old and new ones, with the reason for those not to be judged, and notes."""
    pairs, notes = [], []
    if old.device != new.device:
        notes.append(f"the baseline was trained on {old.device}, and the candidate on {new.device}")
    for metric, goal in judged_goals(study).items():
        by_arm = old.metrics.get(metric, {})
        margin, min_abs = _margin_and_min_abs(study, old, metric)
        for arm, candidate in new.metrics[metric].items():
            seeds, before, after = by_arm.get(arm), old.data.get(arm), new.data.get(arm)
            if seeds == {} and not candidate and arm not in new.diverged:
                notes.append(f"arm '{arm}' has no {metric}, and had none in the baseline: it is not judged")
                continue
            refused = "" if before == after else f"its data was {before} and is {after}; if that is meant, accept it"
            if seeds is None:
                refused = f"the baseline has no {metric} of this arm; accept a baseline that has it"
            sides = (seeds or {}, old.diverged), (candidate, new.diverged)
            pairs.append(
                Pair(
                    arm,
                    metric,
                    goal,
                    seeds or {},
                    candidate,
                    margin,
                    min_abs,
                    quantum=old.quanta.get(metric, 0.0),
                    lost=[frozenset(diverged.get(arm, ())).difference(has_value) for has_value, diverged in sides],
                    refused=refused,
                    no_sample=describe_few_prerequisites(new.behind[arm]) if arm in new.behind else "",
                    seconds=new.seconds.get(arm, NAN),
                )
            )
    notes += [f"arm '{arm}' of the baseline is no longer in the study" for arm in old.data if arm not in new.data]
    return pairs, list(dict.fromkeys(notes))


def train_and_judge(
    study: Study, old: Values, train: Callable[[Sequence[int] | None, Sequence[str]], Values]
) -> tuple[list[Cell], list[Finding], list[str]]:
    """Train and judge every cell; with ``escalate_to``, train more seeds of the inconclusive arms and judge them again.

    ``train`` trains the given seeds (None: the file's) of the given arms (empty: all) and returns all values.
    Each of two looks spends half of alpha, so that a false alarm is as likely as with a single look.  Returns the
    cells, the findings on the number of lost and collapsed trainings, and notes.
    """
    more, first = second_look_seeds(study), study.seeds.values
    alpha = study.check.alpha / (1 if more is None else 2)
    pairs, notes = pair_cells(study, old, train(None, ()))
    cells, findings = decide.judge_family(pairs, alpha)
    arms = list(dict.fromkeys(cell.arm for cell in cells if cell.verdict == "inconclusive" and cell.se > 0))
    if more is None or not arms:
        return cells, findings, notes
    baseline_seeds = {seed for values in old.metrics.values() for arm in arms for seed in values.get(arm, {})}
    seeds = tuple(seed for seed in more if seed in baseline_seeds or seed in first)
    if len(seeds) == len(first):
        advice = "more seeds need a baseline that has them: accept a baseline again, with the seeds of escalate_to"
        return cells, findings, [*notes, advice]
    pairs, notes = pair_cells(study, old, train(seeds, arms))
    more_cells, more_findings = decide.judge_family(pairs, alpha)
    second_look = {(cell.arm, cell.metric): cell for cell in more_cells}
    cells = [
        second_look.get((cell.arm, cell.metric), cell) if cell.arm in arms and cell.verdict == "inconclusive" else cell
        for cell in cells
    ]
    findings = [finding for finding in findings if finding.verdict == "regressed"] or more_findings
    notes.append(f"{format_count(len(seeds), 'seed')} of {', '.join(arms)}, for {len(first)} were inconclusive")
    return cells, findings, notes


def doubt_if_at_chance(cell: CellT, plan: Plan, values: Values) -> CellT:
    """Return a cell, with a candidate that is no better than guesses as inconclusive, where it would pass.

    The accuracy of guesses is binomial.  All seeds may share them, such as one class for all images.
    """
    facts, scale = plan.facts(cell.metric), Scale.of(cell.metric, plan.units)
    if facts is None or cell.verdict != "pass" or cell.metric.startswith("train/"):  # losses of other targets
        return cell
    level, sign = facts.chance.get(cell.arm, NAN), 1 if facts.goal == "max" else -1
    spread = math.sqrt(level * (1 - level) * values.quanta.get(cell.metric, 0.0)) if facts.unit == "share" else 0.0
    reach = level + sign * (1.645 * spread + 1e-6)  # 5 % of guesses are beyond; metrics are of single precision
    if not sign * (cell.new - reach) <= 0:
        return cell
    return replace(
        cell,
        verdict="inconclusive",
        reason=f"guesses reach {scale.factor * reach:.4g}{' %' * scale.is_share}{' on as many images' * bool(spread)}: "
        "the arm may have learned nothing",
    )


def make_unreachable_drop_infinite(cell: Outlook, plan: Plan) -> Outlook:
    """Return a cell whose ``worse_by`` is infinite if its metric has no value that is so much worse."""
    facts = plan.facts(cell.metric)
    worst = None if facts is None else facts.bounds[facts.goal == "min"]
    return cell if worst is None or not cell.worse_by > abs(cell.new - worst) else replace(cell, worse_by=math.inf)


def second_look_seeds(study: Study) -> tuple[int, ...] | None:
    """Return the seeds of the second look, the first ones included; None if there is no second look."""
    most = study.check.escalate_to or 0
    return study.seeds.values_extended_to(most) if most > len(study.seeds.values) else None


def train_and_check_learning(
    plan: Plan, plugins: Sequence[str | Path], watch: Watch, learned: Sequence[str] = ()
) -> Iterator[Finding]:
    """Check that the loss of every arm falls within a hundred steps, on training and on validation images.

    If only one of the two falls, the finding is inconclusive: noisy batches do that to sound networks too.  So it is
    if the loss falls to nothing better than the loss of equal probabilities for all classes.  But an arm in
    ``learned``, which passed this check at acceptance, has regressed if its validation loss rises.
    """
    # A closed-form solution takes no steps.
    work = [planned for planned in plan.first_trials.values() if planned.trial.spec.train.steps != 0]
    watch.say(f"learning: the first {LEARNING_STEPS} steps of {format_count(len(work), 'training')}, on the CPU")
    accuracy = plan.metrics.get("accuracy")
    for planned in iterate_with_time_left("learning: training", work, watch):
        result = train_trace(plan, planned, LEARNING_STEPS, plugins=plugins)
        steps = format_count(len(result.losses), "step")
        half = max(1, len(result.losses) // 2)  # long enough for the noise of batches to even out
        sides = {"training": (fmean(result.losses[:half]), fmean(result.losses[-half:]))}
        sides["validation"] = result.before, result.after
        rises = [
            f"the {which} loss does not fall in {steps}: {before:.4g} -> {after:.4g}"
            for which, (before, after) in sides.items()
            if not after < before
        ]
        chance = None if accuracy is None else accuracy.chance.get(planned.arm)
        if not rises and chance and result.after >= -math.log(chance):
            rises = [
                f"the validation loss after {steps} is {result.after:.4g}, no lower than the loss of equal "
                f"probabilities, {-math.log(chance):.4g}"
            ]
        verdict: Verdict = ("pass", "inconclusive", "regressed")[len(rises)]
        if verdict == "inconclusive" and planned.arm in learned and not result.after <= result.before:
            verdict = "regressed"
            rises.append("it fell when the baseline was accepted")
        yield Finding(planned.arm, "learning", verdict, "; ".join(rises))


def make_check_result(
    study: Study, findings: Sequence[Finding], cells: Sequence[Cell] = (), notes: Sequence[str] = ()
) -> CheckResult:
    """Return the result of a check, whose verdict is the worst of all."""
    verdict = worst_verdict([*(finding.verdict for finding in findings), *(cell.verdict for cell in cells)])
    is_tolerated = verdict == "inconclusive" and study.check.on_inconclusive != "fail"
    fails = verdict != "pass" and not is_tolerated
    return CheckResult(study.study, verdict, fails, tuple(findings), tuple(cells), tuple(notes))


def forecast_cells(study: Study, values: Values) -> list[Outlook]:
    """Return for each cell the probability that an unchanged model passes, and the change for the worse that is found.

    Of two looks, the second counts, as the first one can only add to the probability.
    """
    cells, more = [], second_look_seeds(study)
    alpha = study.check.alpha / (1 if more is None else 2)
    family = sum(1 for metric in judged_goals(study) for seeds in values.metrics.get(metric, {}).values() if seeds)
    for metric, goal in judged_goals(study).items():
        sign, by_arm = 1 if goal == "max" else -1, values.metrics.get(metric, {})
        collapsed = replicates.collapsed_seeds_by_arm(by_arm, sign)
        sound = {arm: {seed: by_arm[arm][seed] for seed in by_arm[arm] if seed not in collapsed[arm]} for arm in by_arm}
        sd = float(pooled_sd(values_to_array(sound.values())[None])[0])
        margin, min_abs = _margin_and_min_abs(study, values, metric)
        for arm, seeds in sound.items():
            if not seeds:
                continue
            arm_sd = float(pooled_sd(values_to_array([seeds])[None])[0]) or sd
            n, mean = len(seeds.keys() & {*(more or study.seeds.values)}), fmean(seeds.values())
            chance = decide.chance_to_pass(n, arm_sd, margin, alpha)
            needs = decide.seeds_to_pass(arm_sd, margin, alpha, decide.TARGET_CHANCE ** (1 / family))
            worse_by = decide.detectable_drop(n, arm_sd, margin, min_abs, alpha, family)
            cells.append(Outlook(arm, metric, n, mean, arm_sd, len(seeds), margin, chance, needs, worse_by))
    return cells


def _margin_and_min_abs(study: Study, values: Values, metric: str) -> tuple[float, float]:
    """Return the margin and ``min_abs`` of a metric; their defaults follow from the spread of the baseline."""
    sign = 1 if judged_goals(study)[metric] == "max" else -1
    sd = float(decide.capped_pooled_sd(values_to_array(values.metrics.get(metric, {}).values())[None], sign)[0])
    check, steps = study.check, 2 * values.quanta.get(metric, 0.0)
    min_abs = check.min_abs.get(metric, max(sd, steps))
    return check.margin.get(metric, max(check.margin_sd * sd, steps, min_abs)), min_abs
