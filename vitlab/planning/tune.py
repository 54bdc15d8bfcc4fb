"""Tuning: the search over knob values for each arm, and the choice of the best.

Every combination of values is trained at full length with seeds that no reported trial has.  The choice is stored in
the plan under the key of the arm without the tuned knobs, and is reused until the arm or the tuning changes.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from vitlab.errors import Fault, Path, Problem, SpecError
from vitlab.identity.trial import hash_of
from vitlab.planning.arms import ArmResolver, ResolvedArm
from vitlab.planning.match import Matcher, Unmatched, is_number, paths_overlap, places_of_knob
from vitlab.planning.metrics import Metrics, goal_of
from vitlab.planning.resolve import Faults, ResolvedTrial
from vitlab.planning.values import Planned, Rival, Trial, Tuning
from vitlab.spec import Analysis, Study, Tune
from vitlab.spec.design import MAX_TRIALS, Changes, format_value, short_names
from vitlab.spec.run import REPORTING_SEEDS
from vitlab.spec.tree import Tree, Values, keys_of, without
from vitlab.store.result import Ending, TrialResult

PENDING = "pending(tune)"
"""Placeholder for a value that is not chosen yet."""


def selection_metric(tune: Tune, analysis: Analysis) -> str:
    """Return the metric to select by; for a test metric of the analysis, the same metric on validation."""
    return tune.select or analysis.metric.replace("test/", "val/")


def format_knobs(values: Values) -> str:
    """Format a combination of values: ``lr=0.001, weight_decay=0.05``."""
    short = short_names(list(values))
    return ", ".join(f"{short[path]}={format_value(value)}" for path, value in values.items())


def tuning_key(trial: ResolvedTrial, study: Study) -> str:
    """Return the key of a tuning: a hash of the arm without the tuned knobs, and of all that the choice depends on."""
    tune, analysis = study.tune, study.analysis
    assert tune is not None
    spec: Tree = trial.identity
    for knob in tune.knobs:
        spec = without(spec, keys_of(knob))
    question = [
        tune.knobs,
        tune.seeds,
        sorted(study.seeds.vary),
        selection_metric(tune, analysis),
        analysis.goal,
        analysis.at,
    ]
    return hash_of({"spec": spec, "origins": trial.foreign_origins, "data": trial.info.content, "tune": question})


def find_mistakes(
    study: Study,
    resolve_at: Callable[[Values], ResolvedTrial],
    reported: Metrics,
    design: Sequence[Changes],
) -> Iterator[Fault]:
    """Yield the mistakes in a ``tune`` that show before any training, as places and sentences.

    Args:
        study: the study.
        resolve_at: returns the base with other values; raises Faults if it cannot take them.
        reported: name to metric, for the metrics of the base.
        design: the changes of every arm.
    """
    tune = study.tune
    assert tune is not None
    rivals = math.prod(map(len, tune.knobs.values()))
    trials = rivals * tune.seeds * (len(design) if tune.per == "arm" else 1)
    if trials > MAX_TRIALS:
        yield ("tune",), f"{rivals:,} combinations make {trials:,} trainings; a tuning has at most {MAX_TRIALS:,}"
    for position, (knob, values) in enumerate(tune.knobs.items()):
        place: Path = ("tune", "knobs", knob)
        indices_by_sentence: dict[str, list[int]] = {}
        for index, value in enumerate(values):
            try:
                resolve_at({knob: value})
            except Faults as error:
                for _, sentence in error.faults:
                    indices_by_sentence.setdefault(sentence, []).append(index)
        # A mistake that all values of a knob share is reported once, at the knob.
        for sentence, indices in indices_by_sentence.items():
            yield place if len(indices) == len(values) else (*place, indices[0]), sentence
        for where in places_of_knob(knob, design):
            yield where, f"the design sets {knob}, which 'tune' chooses; remove it from one of the two"
        if study.match is not None and paths_overlap(knob, study.match.knob):
            yield place, f"{knob} cannot be tuned: 'match' solves for {study.match.knob}"
        for other in list(tune.knobs)[:position]:
            if paths_overlap(knob, other):
                yield place, f"{knob} and {other} cannot both be tuned, because one contains the other; remove one"
    analysis, select = study.analysis, selection_metric(tune, study.analysis)
    goal, own = goal_of(select, reported), analysis.metric.partition("/")[2]
    if select.partition("/")[2] != own and goal not in (None, analysis.goal):
        sentence = f"the goal of {select} is {goal}, and that of the analysis {analysis.goal}"
        yield ("tune", "select"), f"{sentence}; select by a metric with its goal"


def plan_tunings(
    resolver: ArmResolver, matcher: Matcher | None, arms: Sequence[ResolvedArm], decided: Mapping[str, Tuning]
) -> list[Tuning]:
    """Return the tuning of every arm: one that is decided already, or one with the trials to decide it.

    Args:
        resolver: resolver of the arms.
        matcher: solver of ``match``, if the study has one.
        arms: the arms; completed in place with the chosen values.
        decided: earlier tunings by key.
    """
    study = resolver.study
    assert study.tune is not None
    runnable = [arm for arm in arms if not arm.skip]
    all_arms = ResolvedArm(Changes(), "base", resolver.base_trial, "")
    problems: list[Problem] = []
    tunings: dict[str, Tuning] = {}
    for arm in [all_arms] if study.tune.per == "study" else [arm for arm in runnable if not arm.twin]:
        key = tuning_key(arm.trial, study)
        name = None if arm is all_arms else arm.name
        earlier = decided.get(key)
        if earlier is not None and earlier.winner is not None:
            tunings[arm.name] = replace(earlier, arm=name)
            continue
        rivals = _make_rivals(resolver, matcher, arm, problems)
        tuning = Tuning(name, key, selection_metric(study.tune, study.analysis), tuple(rivals))
        if earlier is not None and _trial_names(earlier) == _trial_names(tuning):  # other code need not fail
            tuning = replace(earlier, arm=name)
        tunings[arm.name] = (
            tuning if rivals else replace(tuning, failure="no combination of the tuned values is possible")
        )
    for arm in runnable:
        tuning = tunings[all_arms.name if study.tune.per == "study" else arm.twin or arm.name]
        if tuning.failure:
            arm.skip = tuning.failure
        elif tuning.winner is None:
            arm.pending = True
            arm.solved |= dict.fromkeys(study.tune.knobs, PENDING)
        else:
            arm.solved |= tuning.rivals[tuning.winner].values
            try:
                arm.trial = resolver.resolve_changed({**arm.changes.values, **arm.solved})
            except Faults as error:
                problems += _faults_to_knob_problems(resolver, arm.name, error)
                continue
            arm.skip = arm.trial.incompatibility
            problems += resolver.apply_rules(arm)
    if problems:
        raise SpecError(problems)
    return list(tunings.values())


def decide_tuning(tuning: Tuning, result_of: Callable[[Trial], TrialResult | None], analysis: Analysis) -> Tuning:
    """Return the tuning with its winner, or with the reason for a failure; unchanged until all its trials have ended.

    The rival with the best mean over the seeds wins, the first among equals.  A rival with a diverged training is worse
    than any without.
    """
    rivals, reported = [], set()
    for rival in tuning.rivals:
        outcomes = [result_of(planned.trial) for planned in rival.trials]
        results = [result for result in outcomes if result is not None]
        if len(results) < len(outcomes):
            return tuning
        reported |= {name for result in results for name in result.outcome.metrics}
        scores = [
            result.outcome.value(tuning.select, analysis.at, analysis.goal)
            for result in results
            if result.status == Ending.DONE
        ]
        finite = [score for score in scores if score is not None]
        score = sum(finite) / len(finite) if len(finite) == len(results) else None
        wall_s = sum(result.circumstances.wall_s for result in results)
        rivals.append(replace(rival, score=score, wall_s=wall_s))
    scored = replace(tuning, rivals=tuple(rivals))
    if reported and tuning.select not in reported:
        names = ", ".join(sorted(reported))
        failure = (
            f"its tuning selects by {tuning.select}, and its trials report {names}; set tune.select to one of them"
        )
        return replace(scored, failure=failure)
    scored_rivals = [(index, rival.score) for index, rival in enumerate(rivals) if rival.score is not None]
    if not scored_rivals:
        combinations = "; ".join(format_knobs(rival.values) for rival in rivals)
        return replace(scored, failure=f"every combination of its tuning diverged: {combinations}")
    sign = 1 if analysis.goal == "max" else -1
    return replace(scored, winner=max(scored_rivals, key=lambda item: sign * item[1])[0])


def knobs_at_edge(tuning: Tuning) -> list[str]:
    """Return the knobs whose winning value is the smallest or largest tried, so that a better one may lie beyond."""
    if tuning.winner is None:
        return []
    knobs = []
    for knob, value in tuning.rivals[tuning.winner].values.items():
        values = [rival.values[knob] for rival in tuning.rivals]
        if all(map(is_number, values)) and len(set(values)) > 1 and value in (min(values), max(values)):
            knobs.append(knob)
    return knobs


def _trial_names(tuning: Tuning) -> set[str]:
    return {planned.trial.name for planned in tuning.trials}


def _make_rivals(
    resolver: ArmResolver, matcher: Matcher | None, arm: ResolvedArm, problems: list[Problem]
) -> list[Rival]:
    """Return the possible combinations of knob values for an arm, with their trials."""
    study = resolver.study
    assert study.tune is not None
    rivals = []
    for combination in itertools.product(*study.tune.knobs.values()):
        values = dict(zip(study.tune.knobs, combination, strict=True))
        try:
            trial = resolver.resolve_changed({**arm.changes.values, **arm.solved, **values})
            if matcher is not None and abs(matcher.relative_difference(trial, arm.trial)) > matcher.match.tolerance:
                sentence = f"tuning {format_knobs(values)} would undo the match in {matcher.match.quantity}"
                problems.append(resolver.document.problem(("tune", "knobs"), sentence))
        except Faults as error:
            problems += _faults_to_knob_problems(resolver, arm.name, error)
            continue
        except Unmatched:
            pass  # the two cannot be compared, so there is no match to undo
        rival = ResolvedArm(arm.changes, f"{arm.name} ({format_knobs(values)})", trial, "", skip=trial.incompatibility)
        problems += resolver.apply_rules(rival)
        if not rival.skip:
            trials = [
                Planned(rival.name, seed, resolver.make_trial_and_needs(trial, seed))
                # No reported trial can have one of these seeds.
                for seed in range(REPORTING_SEEDS, REPORTING_SEEDS + study.tune.seeds)
            ]
            rivals.append(Rival(values, tuple(trials)))
    return rivals


def _faults_to_knob_problems(resolver: ArmResolver, arm: str, error: Faults) -> list[Problem]:
    """Return a problem for each knob value that an arm cannot take."""
    assert resolver.study.tune is not None
    problems = []
    for path, sentence in error.faults:
        dotted = ".".join(map(str, path))
        knob = next((knob for knob in resolver.study.tune.knobs if paths_overlap(dotted, knob)), "")
        problems.append(resolver.document.problem(("tune", "knobs", knob), f"arm '{arm}': {sentence}"))
    return problems
