"""make_plan: expand the design, resolve every arm, merge equal ones, match, apply the rules, tune, hash.

All mistakes of the file are collected in one pass and raised together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab import errors
from vitlab.errors import Path, Problem, SpecError, is_about_key
from vitlab.geometry import DataInfo
from vitlab.identity.code import NOTHING, Surroundings, refresh
from vitlab.identity.trial import Trial, key_of
from vitlab.planning import match, metrics, tune
from vitlab.planning.arms import PlanContext, ResolvedArm, controls_of, mistakes_of, parse_rules, trial_of
from vitlab.planning.engine_choice import EngineChoice, engine_of
from vitlab.planning.resolve import Faults, Inform, ResolvedTrial, Resolver
from vitlab.planning.sources import notes_on_files
from vitlab.planning.values import UNDECIDED, Arm, Decisions, Looks, Plan, Planned, Tuning
from vitlab.spec import Document, Study
from vitlab.spec.choice import label
from vitlab.spec.design import MOST, Changes, DesignFault, as_component, changes_of, in_blocks, name_of, short_names
from vitlab.spec.study import To
from vitlab.spec.tree import Tree, keys_of, value_at
from vitlab.spec.trial import METRICS, OBJECTIVE

FUTILITY = 0.1  #: comparisons that at_most seeds decide with less probability get no more


def make_plan(
    study: Study | None,
    document: Document,
    problems: list[Problem],
    inform: Inform,
    count: match.CountCost,
    decisions: Decisions = UNDECIDED,
    surroundings: Surroundings = NOTHING,
    device: str = "cpu",
) -> Plan:
    """Plan a study.

    Args:
        study: the validated study; if there are problems, its sound part, or None if too little is sound.
        document: source of the line and column of each problem.
        problems: problems found while reading the file.
        inform: returns the model's view of a data set.
        count: returns the cost of a model; called only if arms are matched.
        decisions: decisions of earlier runs.
        surroundings: component files and pinned versions, which are part of every trial's code.
        device: type of device that trials will have, ``cpu`` or ``cuda``, on which the choice of an engine depends.

    Raises:
        SpecError: with every mistake of the file.
        BrokenComponent: if a plugin that the study names cannot be imported.
    """
    refresh()
    resolver = Resolver(inform, surroundings)
    base = document.data.get("base")
    problems = list(problems)
    sound = not problems
    rules = parse_rules(study, document, problems)
    if study is None or not isinstance(base, Mapping):
        raise SpecError(problems)
    base_trial: ResolvedTrial | Faults
    base_faults: list[tuple[Path, str]] = []
    try:
        base_trial = resolver.resolve(base)
    except Faults as error:  # it has the values that are sound, for the checks below
        base_trial, base_faults = error, error.faults
        # Missing keys were reported while reading the file.
        new = [(path, sentence) for path, sentence in base_faults if sound or len(path) > 1 or path[0] in base]
        problems += [document.problem(("base", *path), sentence) for path, sentence in new]
    plain = base_trial.plain
    reported = metrics.metrics(plain, base_trial.info)
    study = metrics.with_goal(study, reported)
    context = PlanContext(study, document, base, plain, base_faults, resolver, rules)
    try:
        design = changes_of(study.design)
        if study.blocks is not None:
            design = in_blocks(design, study.blocks)
    except DesignFault as error:
        raise SpecError([*problems, document.problem(error.place, str(error))]) from None
    arms, trials, repeated, faulty = _resolved_arms(context, design, problems)
    if len(arms) * len(study.seeds.all) > MOST:
        size = f"{errors.count(len(arms), 'arm')} of {errors.count(len(study.seeds.all), 'seed')} each"
        sentence = f"{size}; a study has at most {MOST:,} trials"
        raise SpecError([*problems, document.problem(("seeds",), sentence)])
    faulty += [path for path, _ in base_faults]
    metrics_resolved = not any(path[:2] in (METRICS, OBJECTIVE) for path in faulty)
    faults = match.mistakes(study.match, plain, design) if study.match is not None else []
    faults += tune.mistakes(study, context.at, reported, design) if study.tune is not None else []
    faults += metrics.mistakes(study, document, reported, trials, metrics_resolved)
    if study.match is not None and value_at(plain, ("train", "stop_early")) is not None:
        sentence = "match compares arms of equal cost, and stop_early ends trainings before; remove one of the two"
        faults.append((("match",), sentence))
    problems += [document.problem(place, sentence) for place, sentence in faults]
    if study.match is None and sound:
        for arm in arms.values():
            problems += context.apply_rules(arm)
    if problems or isinstance(base_trial, Faults):
        raise SpecError(problems)

    baselines = _baselines(context, arms)
    matcher = match.Matcher(study.match, count) if study.match is not None else None
    notes = match.solve(context, matcher, base_trial, arms, baselines) if matcher is not None else []
    for arm in arms.values():
        if arm.skip and arm.name in baselines.values():
            sentence = f"the baseline '{arm.name}' cannot be run: {arm.skip}"
            raise SpecError([document.problem(("base", "model"), sentence)])
    prerequisites: dict[str, Trial] = {}
    tuning = []
    if study.tune is not None:
        tuning = tune.plan(context, matcher, base_trial, arms, decisions.tunings, prerequisites)
    if len(study.seeds.looks) > 1 and (study.blocks or not any(baselines.values())):
        name, what = "until" if study.seeds.until else "escalate_to", "compares nothing; remove it"
        if study.blocks:
            what = "judges over blocks, where every arm needs its seeds in every block; give their number by count"
        sentence = f"{name} adds seeds to inconclusive comparisons, and this study {what}"
        raise SpecError([document.problem(("seeds", name), sentence)])
    notes += [f"'{name}' is in the design more than once; it is one arm." for name in dict.fromkeys(repeated)]
    return _plan(context, arms, baselines, tuning, prerequisites, notes, decisions, device)


def _resolved_arms(
    context: PlanContext, design: Sequence[Changes], problems: list[Problem]
) -> tuple[dict[str, ResolvedArm], list[tuple[Tree, DataInfo | None]], list[str], list[Path]]:
    """Resolve the arms of a design, and add their mistakes to ``problems``.

    Returns:
        The arms by key; values and data of every trial, as far as they are sound; the names that the design repeats;
        the paths of mistakes.
    """
    short = short_names(list(dict.fromkeys(path for changes in design for path in changes.values)))
    arms: dict[str, ResolvedArm] = {}
    trials: list[tuple[Tree, DataInfo | None]] = []
    wrong: dict[tuple[Path, str], list[Path]] = {}
    repeated: list[str] = []
    faulty: list[Path] = []
    for changes in design:
        try:
            trial = context.at(changes.values)
        except Faults as error:
            trials.append((error.plain, error.info))
            for path, sentence in error.faults:
                faulty.append(path)
                change, place = _locate(changes, path)
                values = change[:-1] if isinstance(change[-1], int) else change
                place = values if place == change and is_about_key(path, sentence) else place
                wrong.setdefault((values, sentence), []).append(place)
            continue
        trials.append((trial.plain, trial.info))
        name, key = name_of(changes, short, trial.plain), key_of(trial.identity)
        if key not in arms:
            arms[key] = ResolvedArm(changes, name, trial, key, skip=trial.incompatibility)
        elif name != arms[key].name:
            arms[key].aliases.append(name)
        elif changes.values and changes.places != arms[key].changes.places:
            repeated.append(name)
    for (values, sentence), places in wrong.items():
        # A mistake that several values of a list share is reported once, at the list.
        problems.append(context.document.problem(places[0] if len(set(places)) == 1 else values, sentence))
    for arm in [arm for arm in arms.values() if arm.is_base]:
        arms |= {control.key: control for control in controls_of(arm, context.study.controls)}
    blocks = list(dict.fromkeys(arm.changes.block for arm in arms.values()))
    arms = dict(sorted(arms.items(), key=lambda item: blocks.index(item[1].changes.block)))
    problems += [context.document.problem(arm.place, sentence) for arm, sentence in mistakes_of(arms.values())]
    return arms, trials, repeated, faulty


def _plan(
    context: PlanContext,
    arms: Mapping[str, ResolvedArm],
    baselines: Mapping[str, str | None],
    tuning: list[Tuning],
    prerequisites: dict[str, Trial],
    notes: list[str],
    decisions: Decisions,
    device: str,
) -> Plan:
    """Give every arm its trials, and return the plan with notes for the reader of its results."""
    study = context.study
    seeds = study.seeds
    compared = {arm.name: baselines.get(key) for key, arm in arms.items()}
    looks = _looks(study, compared, decisions)
    runnable = {key: arm for key, arm in arms.items() if not arm.skip}
    planned, pending = [], []
    for arm in runnable.values():
        for seed in seeds.values if looks is None else looks.seeds_of(arm.name, compared):
            if arm.pending:
                # Without a key, because its tuned values are still to be chosen; it cannot be run.
                trial = Trial(arm.trial.spec, seeds.streams(seed), arm.trial.origins, arm.trial.info.content)
                pending.append(Planned(arm.name, seed, trial))
            else:
                trial = trial_of(arm.trial, arm.first_seed + seed, seeds, prerequisites)
                planned.append(Planned(arm.name, seed, trial))
    # An arm may itself be a trial that others start from; it is planned once.
    for item in planned:
        prerequisites.pop(item.trial.key, None)
    first = {item.arm: item.trial for item in reversed([*planned, *pending])}
    for arm in arms.values():
        if arm.aliases:
            notes.append(f"'{arm.name}' is also {', '.join(map(repr, arm.aliases))}: the same trial.")
    notes += sorted(set().union(*(arm.trial.notes for arm in runnable.values())))
    notes += notes_on_files(runnable.values(), seeds)
    facts = metrics.facts({arm.name: arm.trial for arm in arms.values()})
    notes += metrics.goal_notes(study.analysis, facts)
    if any(arm.trial.info.identity is None for arm in arms.values()):
        notes.append("The data is not on this machine: keys are pending until it is.")

    def engine(arm: ResolvedArm) -> EngineChoice:
        if arm.name not in first:
            return EngineChoice("", "")
        model, info = arm.trial.model, arm.trial.info
        return engine_of(
            first[arm.name],
            study.run.effective_engine,
            lambda _: model.component.work(info, model.options),
            decisions.benchmarks,
            device,
        )

    paths = [path for arm in arms.values() for path in arm.changes.values]
    paths = list(dict.fromkeys([*paths, *(path for arm in arms.values() for path in arm.solved)]))
    chosen_by = {
        name: None if how is None else how.model_dump(mode="json")
        for name, how in (("match", study.match), ("tune", study.tune))
    }
    return Plan(
        study=study.study,
        question=study.question,
        arms=tuple(
            Arm(
                arm.name,
                {path: _shown_value(context, arm, path) for path in paths},
                baselines.get(key),
                tuple(arm.aliases),
                arm.skip,
                arm.note,
                arm.trial.info.classes,
                *engine(arm),
                arm.changes.block,
                bool(arm.twin),
            )
            for key, arm in arms.items()
        ),
        trials=tuple(planned),
        analysis=study.analysis,
        prerequisites=tuple(prerequisites.values()),
        notes=tuple(notes),
        tuning=tuple(tuning),
        pending=tuple(pending),
        probes=decisions.benchmarks,
        looks=looks,
        metrics=facts,
        # What an arm trains; values chosen by matching and tuning follow from it.  128 bits are enough here.
        identities={
            arm.name: key_of({"trial": key, "data": arm.trial.info.content, **chosen_by})[:32]
            for key, arm in runnable.items()
        },
    )


def _looks(study: Study, compared: Mapping[str, str | None], decisions: Decisions) -> Looks | None:
    """Return the looks of a study that adds seeds, with what earlier ones left open; None if it adds none."""
    seeds = study.seeds.looks
    if len(seeds) == 1:
        return None
    earlier = decisions.looks
    open_arms = earlier.open if earlier is not None and earlier.seeds == seeds else ()
    alpha, family = study.analysis.alpha, sum(baseline is not None for baseline in compared.values())
    from vitlab.statistics import sequential_levels  # imports scipy, which no other plan needs

    levels = sequential_levels(tuple(map(len, seeds)), alpha, family)
    return Looks(
        seeds,
        tuple(level / alpha for level in levels),
        tuple(tuple(arm for arm in arms if compared.get(arm) is not None) for arms in open_arms),
        FUTILITY if study.seeds.until else 0.0,
    )


def _baselines(context: PlanContext, arms: Mapping[str, ResolvedArm]) -> dict[str, str | None]:
    """Return arm key to the name of the arm it is compared with; None for a baseline."""
    compare = context.study.analysis.compare
    if compare == "none" or len(arms) == 1 or all(arm.is_base for arm in arms.values()):
        return {}
    place: Path = ("analysis", "compare")
    names: dict[str, str | None] = {}
    for key, arm in arms.items():
        if arm.twin:
            names[key] = arm.twin
            continue
        against = {**arm.changes.values, **compare.to} if isinstance(compare, To) else arm.changes.against
        try:
            other = arms.get(key_of(context.at(against).identity))
        except Faults as error:
            raise SpecError([context.document.problem((*place, "to"), str(error))]) from None
        if other is None and isinstance(compare, To):
            pairs = ", ".join(f"{path}={value}" for path, value in compare.to.items())
            sentence = f"arm '{arm.name}' has no counterpart with {pairs} in the design"
            raise SpecError([context.document.problem(place, sentence)])
        names[key] = other.name if other is not None and other is not arm else None
    if not any(names.values()):
        sentence = (
            "no arm of the design equals the base, so there is no baseline; set "
            "analysis: {compare: {to: {PATH: value}}}, add the base to the design, or write compare: none"
        )
        raise SpecError([context.document.problem(("design",), sentence)])
    return names


def _locate(changes: Changes, path: Path) -> tuple[Path, Path]:
    """Return the place of the change that caused a fault of an arm, and the place of the fault inside it.

    The base does not have this fault, so one of the changes caused it.
    """
    dotted = ".".join(map(str, path))
    causes = [change for change in changes.values if f"{dotted}.".startswith(f"{change.removesuffix('.type')}.")]
    causes = causes or [change for change in changes.values if change.startswith(f"{dotted}.")]
    if not causes and changes.values:
        # A change can make another value wrong, as a width does the number of heads: take the closest in the tree.
        causes = [max(changes.values, key=lambda change: _shared(path, change))]
    if causes:
        cause = max(causes, key=len)
        inner = path[cause.removesuffix(".type").count(".") + 1 :]
        return changes.places[cause], (*changes.places[cause], *inner)
    return ("base",), ("base", *path)


def _shared(path: Path, change: str) -> int:
    """Return the number of leading keys that the path of a fault and the path of a change share."""
    pairs = zip(path, change.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shown_value(context: PlanContext, arm: ResolvedArm, path: str) -> Any:
    """Return an arm's value at a varied path, as written in the file, or its default.

    None if the arm has replaced the component that has this option.
    """
    own = context.changed(arm.changes.values)
    full = value_at(arm.trial.plain, keys_of(path))
    for value in (arm.solved.get(path), arm.changes.values.get(path), value_at(own, keys_of(path))):
        if value is not None:
            return as_component(value, full)
    return label(full)
