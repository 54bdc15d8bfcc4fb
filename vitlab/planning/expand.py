"""The plan of a study: its arms, their trials, and notes for the reader of the results.

In: a study as it was read, and what this machine knows of data, models and code.  Out: a :class:`Plan`, or every
mistake of the file in one error.

The steps, each in a file of its own: :mod:`~vitlab.spec.design` lists the changes of the arms,
:mod:`~vitlab.planning.arms` applies them to the base, :mod:`~vitlab.planning.resolve` completes the options of a trial
and makes its key, :mod:`~vitlab.planning.match` and :mod:`~vitlab.planning.tune` choose further values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitlab.errors import Fault, Path, Problem, SpecError, format_count, nearest
from vitlab.identity.code import NOTHING, Surroundings, clear_caches
from vitlab.identity.trial import Trial, hash_of
from vitlab.planning import match, metrics, tune
from vitlab.planning.arms import ArmResolver, ResolvedArm, ResolvedDesign, parse_rules, resolve_arms, set_baselines
from vitlab.planning.engine_choice import EngineChoice, choose_engine
from vitlab.planning.resolve import Faults, Inform, ResolvedTrial, Resolver
from vitlab.planning.sources import notes_on_leaks
from vitlab.planning.values import UNDECIDED, Arm, Decisions, Looks, MetricFacts, Plan, Planned
from vitlab.spec import Document, Study
from vitlab.spec.changes import add_path_of_same_key, paths_by_name
from vitlab.spec.choice import component_label
from vitlab.spec.design import (
    MAX_TRIALS,
    Changes,
    DesignFault,
    component_list_to_long_form,
    cross_arms_with_blocks,
    expand_design,
)
from vitlab.spec.tree import keys_of, value_at
from vitlab.spec.trial import METRICS, OBJECTIVE

FUTILITY = 0.1
"""Least probability that ``seeds.at_most`` seeds would decide a comparison: below it, no more seeds are added to it."""


WHICH_ARMS: list[Path] = [("design",), ("blocks",), ("analysis", "compare")]
"""Places in a study that decide which arms there are, and which of them are baselines."""


@dataclass(frozen=True)
class Machine:
    """What a plan needs to know of the machine it is made on."""

    inform: Inform  #: returns the model's view of a data set
    count: match.CountCost  #: returns the cost of a model; called only if arms are matched
    surroundings: Surroundings = NOTHING  #: component files and pinned versions, which are part of every trial's code
    device: str = "cpu"  #: type of device that trials will have, ``cpu`` or ``cuda``, on which engines depend


def make_plan(
    study: Study | None,
    document: Document,
    problems: list[Problem],
    machine: Machine,
    decisions: Decisions = UNDECIDED,
) -> Plan:
    """Plan a study.

    Args:
        study: the validated study; if there are problems, its sound part, or None if too little is sound.
        document: source of the line and column of each problem.
        problems: problems found while reading the file.
        machine: what is known of data, models and code.
        decisions: decisions of earlier runs.

    Raises:
        SpecError: with every mistake of the file.
        BrokenComponent: if a plugin that the study names cannot be imported.
    """
    clear_caches()
    problems = list(problems)
    resolver = _make_arm_resolver(study, document, problems, machine)
    arms = _resolve_and_check_arms(resolver, problems)
    study, matcher, notes = resolver.study, None, []
    if study.match is not None:
        matcher = match.Matcher(study.match, machine.count)
        notes = match.match_arms(resolver, matcher, arms)
    for arm in arms:
        if arm.skip and arm.name in {each.baseline for each in arms}:
            sentence = f"the baseline '{arm.name}' cannot be run: {arm.skip}"
            raise SpecError([document.problem(("base", "model"), sentence)])
    tuning = tune.plan_tunings(resolver, matcher, arms, decisions.tunings) if study.tune is not None else []
    looks = _plan_looks(resolver, arms, decisions)
    notes += [f"'{arm.name}' is in the design more than once; it is one arm." for arm in arms if arm.is_repeated]
    planned, pending = _planned_and_pending_trials(resolver, arms, looks)
    # The trainings of no arm behind decided tunings, which are not planned again: teachers, and what these start from.
    earlier = {trial.name: trial for trial in decisions.prerequisites}
    queue = [rival.trial for item in tuning for rival in item.trials]
    for trial in queue:
        queue += filter(None, map(earlier.get, trial.needs.values()))
    decided = {trial.key: trial for trial in queue if trial.name in earlier}
    keys = {item.trial.key for item in planned}
    facts = metrics.collect_metric_facts({arm.name: arm.trial for arm in arms})
    return Plan(
        study=study.study,
        question=study.question,
        arms=_make_plan_arms(resolver, arms, [*planned, *pending], decisions, machine.device),
        trials=tuple(planned),
        analysis=study.analysis,
        # An arm may itself be a trial that others start from; it is planned once.
        prerequisites=tuple(trial for key, trial in (decided | resolver.prerequisites).items() if key not in keys),
        notes=(*notes, *_collect_notes(study, arms, facts)),
        tuning=tuple(tuning),
        pending=tuple(pending),
        probes=decisions.benchmarks,
        looks=looks,
        metrics=facts,
        identities=_arm_identities(study, arms),
    )


def _make_arm_resolver(
    study: Study | None, document: Document, problems: list[Problem], machine: Machine
) -> ArmResolver:
    """Return the resolver of a study's arms, with the base resolved; add mistakes of rules and base to ``problems``.

    Raises:
        SpecError: if too little of the study is sound to go on.
    """
    base, is_sound = document.data.get("base"), not problems
    rules = parse_rules(study, document, problems)
    if study is None or not isinstance(base, Mapping):
        raise SpecError([add_path_of_same_key(each, paths_by_name(base)) for each in problems])
    resolver = Resolver(machine.inform, machine.surroundings)
    resolved: ResolvedTrial | Faults
    try:
        resolved = resolver.resolve_trial(base)
    except Faults as error:  # it has the values that are sound, for the checks of the arms
        resolved = error
        # Missing keys were reported while reading the file.
        new = [fault for fault in error.faults if is_sound or len(fault[0]) > 1 or fault[0][0] in base]
        problems += [document.problem(("base", *path), sentence) for path, sentence in new]
    paths = paths_by_name(resolved.plain)
    problems[:] = [add_path_of_same_key(each, paths) for each in problems]
    study = metrics.fill_in_goal(study, metrics.reported_metrics(resolved.plain, resolved.info))
    # The values that stand in for wrong ones in the file would break rules that the file does not break.
    return ArmResolver(study, document, resolver, base, resolved, rules if is_sound else {})


def _resolve_and_check_arms(resolver: ArmResolver, problems: list[Problem]) -> list[ResolvedArm]:
    """Return the resolved arms of a study without mistakes.

    Raises:
        SpecError: with every mistake of the study, ``problems`` included.
    """
    study, document = resolver.study, resolver.document
    try:
        changes = expand_design(study.design)
        if study.blocks is not None:
            changes = cross_arms_with_blocks(changes, study.blocks)
    except DesignFault as error:
        raise SpecError([*problems, document.problem(error.place, str(error))]) from None
    design = resolve_arms(resolver, changes, problems)
    paths = paths_by_name(resolver.resolved.plain)
    problems[:] = [add_path_of_same_key(each, paths) for each in problems]
    if len(design.arms) * len(study.seeds.all) > MAX_TRIALS:
        size = f"{format_count(len(design.arms), 'arm')} of {format_count(len(study.seeds.all), 'seed')} each"
        sentence = f"{size}; a study has at most {MAX_TRIALS:,} trials"
        raise SpecError([*problems, document.problem(("seeds",), sentence)])
    mistakes = [*_find_match_tune_and_metric_mistakes(resolver, changes, design)]
    # With a wrong base, nobody knows which arms are equal; with a wrong design, nobody knows which ones there are.
    places = {problem.path[:length] for problem in problems for length in (1, 2)}
    if places.isdisjoint(WHICH_ARMS):
        names = design.names
        if isinstance(resolver.resolved, ResolvedTrial):
            mistakes += set_baselines(resolver, design.arms)
            names = [arm.name for arm in design.arms]
        for index, name in enumerate(study.match.spare if study.match else ()):
            if name not in names:
                sentence = f"no arm is called '{name}'.{nearest(name, names)} Arms: {'; '.join(names)}."
                mistakes.append((("match", "except", index), sentence))
    problems += [document.problem(place, sentence) for place, sentence in mistakes]
    if study.match is None:
        for arm in design.arms:
            problems += resolver.apply_rules(arm)
    if problems or isinstance(resolver.resolved, Faults):
        raise SpecError(problems)
    return design.arms


def _find_match_tune_and_metric_mistakes(
    resolver: ArmResolver, changes: Sequence[Changes], design: ResolvedDesign
) -> Iterator[Fault]:
    """Yield the mistakes of matching, tuning and metrics, as places and sentences."""
    study, base = resolver.study, resolver.resolved
    paths = design.faults + ([path for path, _ in base.faults] if isinstance(base, Faults) else [])
    knows_metrics = not any(path[:2] in (METRICS, OBJECTIVE) for path in paths)
    reported = metrics.reported_metrics(base.plain, base.info)
    if study.match is not None:
        yield from match.find_mistakes(study.match, base.plain, changes)
    if study.tune is not None:
        yield from tune.find_mistakes(study, resolver.resolve_changed, reported, changes)
    yield from metrics.find_mistakes(study, resolver.document, reported, design.trials, knows_metrics)
    if study.match is not None and value_at(base.plain, ("train", "stop_early")) is not None:
        sentence = "match compares arms of equal cost, and stop_early ends trainings before; remove one of the two"
        yield ("match",), sentence


def _plan_looks(resolver: ArmResolver, arms: Sequence[ResolvedArm], decisions: Decisions) -> Looks | None:
    """Return the looks of a study that adds seeds, with what earlier ones left open; None if it adds none.

    Raises:
        SpecError: if the study has no comparison to decide.
    """
    study, seeds = resolver.study, resolver.study.seeds.looks
    compared = {arm.name for arm in arms if arm.baseline is not None}
    if len(seeds) == 1:
        return None
    if study.blocks or not compared:
        name, what = "until" if study.seeds.until else "escalate_to", "compares nothing; remove it"
        if study.blocks:
            what = "judges over blocks, where every arm needs its seeds in every block; give their number by count"
        sentence = f"{name} adds seeds to inconclusive comparisons, and this study {what}"
        raise SpecError([resolver.document.problem(("seeds", name), sentence)])
    earlier, alpha = decisions.looks, study.analysis.alpha
    open_arms = earlier.open if earlier is not None and earlier.seeds == seeds else ()
    from vitlab.statistics.power import sequential_levels  # imports scipy, which no other plan needs

    levels = sequential_levels(tuple(map(len, seeds)), alpha, len(compared))
    return Looks(
        seeds,
        tuple(level / alpha for level in levels),
        tuple(tuple(arm for arm in arms if arm in compared) for arms in open_arms),
        FUTILITY if study.seeds.until else 0.0,
    )


def _planned_and_pending_trials(
    resolver: ArmResolver, arms: Sequence[ResolvedArm], looks: Looks | None
) -> tuple[list[Planned], list[Planned]]:
    """Return the trials of every arm that runs, and the trials whose tuned values are still to be chosen."""
    seeds, baselines = resolver.study.seeds, {arm.name: arm.baseline for arm in arms}
    planned, pending = [], []
    for arm in (arm for arm in arms if not arm.skip):
        for seed in seeds.values if looks is None else looks.seeds_of(arm.name, baselines):
            if arm.pending:
                # It has no key yet, and so no control whose seeds it could share.
                trial = Trial(arm.trial.spec, seeds.stream_seeds(seed), arm.trial.origins, arm.trial.info.content)
                pending.append(Planned(arm.name, seed, trial))
            else:
                planned.append(Planned(arm.name, seed, resolver.make_trial_and_needs(arm.trial, arm.first_seed + seed)))
    return planned, pending


def _make_plan_arms(
    resolver: ArmResolver, arms: Sequence[ResolvedArm], trials: Sequence[Planned], decisions: Decisions, device: str
) -> tuple[Arm, ...]:
    """Return the arms as the plan stores them, each with its varied values and the engine of its trials."""
    first = {item.arm: item.trial for item in reversed(trials)}
    varied = dict.fromkeys(path for arm in arms for path in arm.changes.values)
    varied |= dict.fromkeys(path for arm in arms for path in arm.solved)
    engine_name = resolver.study.run.effective_engine

    def choose(arm: ResolvedArm) -> EngineChoice:
        if arm.name not in first:
            return EngineChoice("", "")
        model, info = arm.trial.model, arm.trial.info
        work = model.component.work(info, model.options)
        return choose_engine(first[arm.name], engine_name, lambda _: work, decisions.benchmarks, device)

    return tuple(
        Arm(
            arm.name,
            values={path: _value_as_written_or_default(resolver, arm, path) for path in varied},
            baseline=arm.baseline,
            aliases=tuple(arm.aliases),
            skip=arm.skip,
            note=arm.note,
            classes=arm.trial.info.classes,
            engine=choice.engine,
            engine_reason=choice.reason,
            block=arm.changes.block,
            is_control=bool(arm.twin),
        )
        for arm, choice in zip(arms, map(choose, arms), strict=True)
    )


def _value_as_written_or_default(resolver: ArmResolver, arm: ResolvedArm, path: str) -> Any:
    """Return an arm's value at a varied path, as written in the file, or its default.

    None if the arm has replaced the component that has this option.
    """
    own = resolver.changed_base(arm.changes.values)
    full = value_at(arm.trial.plain, keys_of(path))
    for value in (arm.solved.get(path), arm.changes.values.get(path), value_at(own, keys_of(path))):
        if value is not None:
            return component_list_to_long_form(value, full)
    return component_label(full)


def _collect_notes(study: Study, arms: Sequence[ResolvedArm], facts: Mapping[str, MetricFacts]) -> list[str]:
    """Return notes on arms, components, initial weights, the metric and the data."""
    runnable = [arm for arm in arms if not arm.skip]
    notes = [
        f"'{arm.name}' is also {', '.join(map(repr, arm.aliases))}: the same trial." for arm in arms if arm.aliases
    ]
    notes += sorted(set().union(*(arm.trial.notes for arm in runnable)))
    notes += notes_on_leaks(runnable, study.seeds)
    notes += metrics.note_unusual_goal(study.analysis, facts)
    if (seeds := len(study.seeds.all)) < 3 and any(arm.baseline for arm in runnable):
        what = "no spread, no interval and no test" if seeds == 1 else "a test but no interval"
        notes.append(f"{format_count(seeds, 'seed')} of each arm: {what}. Set seeds: 3 or more for intervals.")
    if any(arm.trial.info.identity is None for arm in arms):
        notes.append("The data is not on this machine: keys are pending until it is.")
    return notes


def _arm_identities(study: Study, arms: Sequence[ResolvedArm]) -> dict[str, str]:
    """Return arm to a digest of what it trains; values chosen by matching and tuning follow from it."""
    chosen_by = {
        "match": study.match and study.match.model_dump(mode="json"),
        "tune": study.tune and study.tune.model_dump(mode="json"),
    }
    return {
        arm.name: hash_of({"trial": arm.key, "data": arm.trial.info.content, **chosen_by})[:32]  # 128 bits are enough
        for arm in arms
        if not arm.skip
    }
