"""make_plan: expand the design, resolve every arm, merge equal ones, apply the rules, find the baselines, hash.

Every mistake of the file is found in one pass and raised together.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitlab.errors import Path, Problem, SpecError
from vitlab.plan.design import DesignFault, Draft, drafts, name_of, short_names
from vitlab.plan.key import code_of_modules, key_of
from vitlab.plan.resolve import Faults, Inform, ResolvedTrial, Resolver, changed
from vitlab.plan.rules import RuleFault, holds, parse
from vitlab.plan.values import Arm, Plan, Planned, Trial
from vitlab.spec import Document, Seeds, Study
from vitlab.spec.study import To


@dataclass
class _Arm:
    """An arm in the making."""

    draft: Draft
    name: str
    trial: ResolvedTrial
    key: str  #: of the trial without seeds: equal keys, equal arms
    aliases: list[str] = field(default_factory=list)
    skip: str = ""


def make_plan(study: Study | None, document: Document, problems: list[Problem], inform: Inform) -> Plan:
    """Plan a study.

    Args:
        study: as read, or None where the shape of the file is wrong; its base is then still checked.
        document: where everything stands, for the sentences about what is wrong.
        problems: what reading has found already.
        inform: tells what a model sees of a data set.

    Raises:
        SpecError: with every mistake of the file.
        BrokenComponent: if a plugin the study names does not import.
    """
    resolver = Resolver(inform)
    base = document.data.get("base")
    problems = list(problems)
    resolved_base = None
    if isinstance(base, Mapping):
        try:
            resolved_base = resolver.resolve(base)
        except Faults as error:
            found = [document.problem(("base", *path), sentence) for path, sentence in error.faults]
            # Where the shape is wrong, reading has said so at the same place already.
            places = {(problem.line, problem.column) for problem in problems}
            problems += [problem for problem in found if (problem.line, problem.column) not in places]
    rules = _rules(study, document, problems)
    if study is None or resolved_base is None:
        raise SpecError(problems)
    assert isinstance(base, Mapping)

    try:
        planned = drafts(study.design)
    except DesignFault as error:
        raise SpecError([*problems, document.problem(error.place, str(error))]) from None
    short = short_names(list(dict.fromkeys(path for draft in planned for path in draft.values)))
    arms: dict[str, _Arm] = {}
    for draft in planned:
        try:
            trial = resolver.resolve(changed(base, draft.values, resolved_base.plain))
        except Faults as error:
            problems += [_placed(document, draft, path, sentence) for path, sentence in error.faults]
            continue
        name, key = name_of(draft, short), key_of(trial.identity)
        if key in arms:
            if name != arms[key].name:
                arms[key].aliases.append(name)
        else:
            arms[key] = _Arm(draft, name, trial, key, skip=trial.why_not)
    problems += _same_names(arms, document)
    for arm in arms.values():
        problems += _judge(arm, rules, document)
    if problems:
        raise SpecError(problems)

    baselines = _baselines(study, document, base, resolved_base, resolver, arms)
    return _plan(study, base, arms, baselines)


def _plan(study: Study, base: Mapping[str, Any], arms: Mapping[str, _Arm], baselines: Mapping[str, str | None]) -> Plan:
    paths = list(dict.fromkeys(path for arm in arms.values() for path in arm.draft.values))
    planned = []
    prerequisites: dict[str, Trial] = {}
    for arm in arms.values():
        if arm.skip:
            continue
        for seed in study.seeds.values:
            planned.append(Planned(arm.name, seed, _trial(arm.trial, seed, study.seeds, prerequisites)))
    for item in planned:
        prerequisites.pop(item.trial.key, None)
    notes = []
    for arm in arms.values():
        if arm.aliases:
            notes.append(f"'{arm.name}' is also {', '.join(repr(name) for name in arm.aliases)}: the same trial.")
    if any(arm.trial.info.identity is None for arm in arms.values()):
        notes.append("data not here: keys are pending until it is.")
    return Plan(
        study=study.study,
        question=study.question,
        arms=tuple(
            Arm(
                arm.name,
                {path: _said(base, arm, path) for path in paths},
                baselines.get(key),
                tuple(arm.aliases),
                arm.skip,
            )
            for key, arm in arms.items()
        ),
        trials=tuple(planned),
        analysis=study.analysis,
        prerequisites=tuple(prerequisites.values()),
        notes=tuple(notes),
    )


def _trial(resolved: ResolvedTrial, seed: int, seeds: Seeds, prerequisites: dict[str, Trial]) -> Trial:
    """A trial with its seeds and its key; the trials it needs are added to ``prerequisites``."""
    streams = seeds.streams(seed)
    needs: dict[str, str] = {}
    for role, needed in resolved.needs.items():
        other = _trial(needed.trial, seed if needed.seed == "same" else needed.seed, seeds, prerequisites)
        prerequisites[other.key] = other
        needs[role] = f"{other.key}/{other.code}"
    identity = {
        "spec": resolved.identity,
        "seeds": streams,
        "origins": resolved.origins,
        "data": resolved.info.identity,
        "needs": {role: needed.partition("/")[0] for role, needed in needs.items()},
    }
    return Trial(
        resolved.plain,
        streams,
        resolved.origins,
        resolved.info.identity,
        needs,
        key=key_of(identity),
        code=code_of_modules(resolved.modules, needs),
    )


def _rules(study: Study | None, document: Document, problems: list[Problem]) -> list[tuple[int, ast.expr, str, str]]:
    """Index, expression, what to do otherwise, and why."""
    rules: list[tuple[int, ast.expr, str, str]] = []
    for index, rule in enumerate(study.where if study else ()):
        try:
            rules.append((index, parse(rule.require), rule.otherwise, rule.because))
        except RuleFault as error:
            problems.append(document.problem(("where", index, "require"), str(error)))
    return rules


def _judge(arm: _Arm, rules: list[tuple[int, ast.expr, str, str]], document: Document) -> list[Problem]:
    problems = []
    for index, rule, otherwise, because in rules:
        try:
            met = holds(rule, arm.trial.plain)
        except RuleFault as error:
            problems.append(document.problem(("where", index, "require"), str(error)))
            continue
        if not met and otherwise == "error":
            problems.append(document.problem(("where", index), f"arm '{arm.name}' breaks this rule: {because}"))
        elif not met and not arm.skip:
            arm.skip = because
    return problems


def _same_names(arms: Mapping[str, _Arm], document: Document) -> list[Problem]:
    """Two different arms under one name could not be told apart in a report."""
    first: dict[str, _Arm] = {}
    problems = []
    for arm in arms.values():
        if arm.name in first:
            place = next(iter(arm.draft.places.values()), ("design",))
            problems.append(document.problem(place, f"two different arms are called '{arm.name}'; give them labels"))
        first.setdefault(arm.name, arm)
    return problems


def _baselines(
    study: Study,
    document: Document,
    base: Mapping[str, Any],
    resolved_base: ResolvedTrial,
    resolver: Resolver,
    arms: Mapping[str, _Arm],
) -> dict[str, str | None]:
    """Arm key to the name of the arm it is compared with; None for an arm that is the baseline itself."""
    compare = study.analysis.compare
    if compare == "none" or len(arms) == 1:
        return {}
    place: Path = ("analysis", "compare")
    found: dict[str, str | None] = {}
    for key, arm in arms.items():
        against = {**arm.draft.values, **compare.to} if isinstance(compare, To) else arm.draft.against
        try:
            other = arms.get(key_of(resolver.resolve(changed(base, against, resolved_base.plain)).identity))
        except Faults as error:
            raise SpecError([document.problem((*place, "to"), str(error))]) from None
        if other is None and isinstance(compare, To):
            wanted = ", ".join(f"{path}={value}" for path, value in compare.to.items())
            raise SpecError(
                [document.problem(place, f"arm '{arm.name}' has no counterpart with {wanted} in the design")]
            )
        found[key] = other.name if other is not None and other is not arm else None
        if other is not None and other.skip and other is not arm:
            sentence = f"the baseline '{other.name}' cannot be run: {other.skip}"
            raise SpecError([document.problem(("base", "model"), sentence)])
    if not any(found.values()):
        sentence = (
            "no arm of the design equals the base, so there is nothing to compare with; name it by "
            "analysis: {compare: {to: {PATH: value}}}, add the base to the design, or say compare: none"
        )
        raise SpecError([document.problem(("design",), sentence)])
    return found


def _placed(document: Document, draft: Draft, path: Path, sentence: str) -> Problem:
    """A fault of an arm, at the change that caused it; where none did, at the base."""
    dotted = ".".join(map(str, path))
    causes = [change for change in draft.values if f"{dotted}.".startswith(f"{change.removesuffix('.type')}.")]
    causes = causes or [change for change in draft.values if change.startswith(f"{dotted}.")]
    if not causes and draft.values and ("base", *path) not in document.places:
        causes = list(draft.values)
    if causes:
        cause = max(causes, key=len)
        inner = path[cause.removesuffix(".type").count(".") + 1 :]
        return document.problem((*draft.places[cause], *inner), sentence)
    return document.problem(("base", *path), sentence)


def _value(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None where there is none."""
    value: Any = tree
    for part in path.removesuffix(".type").split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _said(base: Mapping[str, Any], arm: _Arm, path: str) -> Any:
    """What an arm has at a varied path, as the file says it, or the default that stands where the file is silent."""
    for spoken in (arm.draft.values.get(path), _value(base, path)):
        if spoken is not None:
            return spoken
    value = _value(arm.trial.plain, path)
    return value["type"] if isinstance(value, Mapping) and "type" in value else value
