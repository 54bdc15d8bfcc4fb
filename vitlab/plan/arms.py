"""Resolved arms: the rules they must meet, and their trials."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from vitlab.errors import Path, Problem
from vitlab.plan.design import Changes, changed
from vitlab.plan.key import code_of_modules, key_of
from vitlab.plan.resolve import Faults, ResolvedTrial, Resolver, other_split, same_images
from vitlab.plan.rules import RuleFault, holds, parse
from vitlab.plan.values import Trial
from vitlab.spec import Document, Seeds, Study
from vitlab.spec.trial import Teacher
from vitlab.store.files import read_json


@dataclass
class ResolvedArm:
    """An arm of the design, resolved; matching, rules and tuning complete it."""

    changes: Changes
    name: str
    trial: ResolvedTrial
    key: str  #: key of the trial without seeds, before matching and tuning; arms with equal keys are merged
    aliases: list[str] = field(default_factory=list)
    skip: str = ""
    solved: dict[str, Any] = field(default_factory=dict)  #: values chosen by matching and tuning
    off: float = 0.0  #: relative difference from the cost of its baseline
    note: str = ""
    pending: bool = False  #: whether its tuned values are still to be chosen


Rules = list[tuple[int, ast.expr, str, str]]
"""Index, expression, action for an arm that breaks the rule, and reason."""


@dataclass(frozen=True)
class PlanContext:
    """The study, its base and its rules, from which arms are resolved."""

    study: Study
    document: Document
    base: Mapping[str, Any]  #: as written in the document
    plain: Mapping[str, Any]  #: the resolved base, as far as it is sound
    faults: list[tuple[Path, str]]  #: mistakes of the base
    resolver: Resolver
    rules: Rules

    def at(self, values: Mapping[str, Any]) -> ResolvedTrial:
        """Return the base with ``values`` changed, resolved.

        Raises:
            Faults: with the mistakes that the base itself does not have; without any if they are all the base's.
        """
        try:
            return self.resolver.resolve(self.changed(values))
        except Faults as error:
            own = [fault for fault in error.faults if fault not in self.faults]
            raise Faults(own, error.plain, error.info) from None

    def changed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the base with ``values`` changed, as it would be written in the document."""
        return changed(self.base, values, self.plain)

    def apply_rules(self, arm: ResolvedArm) -> list[Problem]:
        """Apply the rules to an arm: skip it, or return a problem, for each rule that it breaks."""
        problems = []
        for index, rule, otherwise, because in self.rules:
            try:
                met = holds(rule, arm.trial.plain)
            except RuleFault as error:
                problems.append(self.document.problem(("where", index, "require"), str(error)))
                continue
            if not met and otherwise == "error":
                sentence = f"arm '{arm.name}' breaks this rule: {because}"
                problems.append(self.document.problem(("where", index), sentence))
            elif not met and not arm.skip:
                arm.skip = because
        return problems


def trial_of(
    resolved: ResolvedTrial,
    seed: int,
    seeds: Seeds,
    prerequisites: dict[str, Trial],
    splits: Mapping[str, int] = {},
) -> Trial:
    """Return a trial with its seeds and its key, and add its prerequisites to ``prerequisites``.

    Args:
        resolved: the trial without seeds.
        seed: seed of the replicate.
        seeds: seeds of the study.
        prerequisites: trials by key; extended in place.
        splits: type of data set to the seed of its split, which replaces the study's, so that no trial from which
            another one takes weights, however indirectly, is trained on the other's validation images.
    """
    data = resolved.spec.data.type
    streams = seeds.streams(seed) | ({"split": splits[data]} if data in splits else {})
    splits = {data: streams["split"], **splits}
    needs: dict[str, str] = {}
    for role, prerequisite in resolved.needs.items():
        own = seed if prerequisite.seed == "same" else prerequisite.seed
        taught = {prerequisite.trial.spec.data.type: streams["split"]} if role == "teacher" else {}
        other = trial_of(prerequisite.trial, own, seeds, prerequisites, {**taught, **splits})
        prerequisites[other.key] = other
        needs[role] = f"{other.key}/{other.code}"
    identity = {
        "spec": resolved.identity,
        "seeds": streams,
        "origins": resolved.origins,
        "data": resolved.info.identity,
        "needs": {role: prerequisite.partition("/")[0] for role, prerequisite in needs.items()},
    }
    return Trial(
        resolved.spec,
        streams,
        resolved.origins,
        resolved.info.identity,
        needs,
        resolved.files,
        key=key_of(identity),
        code=code_of_modules(resolved.modules, needs, resolved.versions),
        versions=resolved.versions,
    )


def notes_on_files(arms: Iterable[ResolvedArm], seeds: Seeds) -> list[str]:
    """Return notes on arms whose initial weights or teacher may have been trained on their validation images.

    ``spec.json`` beside a trial's weights tells the data of the trial and of its prerequisites.  For weights from
    elsewhere, the training data is unknown.
    """
    arms_by_note: dict[str, list[str]] = {}
    for arm in arms:
        if arm.skip:
            continue
        for role, source in arm.trial.spec.sources().items():
            reason = ""
            if isinstance(source, Teacher) and source.pretrained is not None:
                reason = _unknown(source.pretrained)
            elif source.checkpoint is not None:
                file = FilePath(source.checkpoint)
                exposure = _has_seen(file, arm.trial, seeds)
                reason = exposure or (_unknown(file.name) if exposure is None and role == "teacher" else "")
            if reason:
                arms_by_note.setdefault(f"{_SEEN_BY[role]}: of {{arms}}, {reason}.", []).append(f"'{arm.name}'")
    return [note.replace("{arms}", ", ".join(names)) for note, names in arms_by_note.items()]


_SEEN_BY = {"init_from": "Validation seen in pretraining", "teacher": "Validation seen by teacher"}


def _has_seen(
    file: FilePath, trial: ResolvedTrial, seeds: Seeds, visited: frozenset[FilePath] = frozenset()
) -> str | None:
    """Return how the weights in a file may have been trained on a trial's validation images.

    Returns:
        A clause, empty if they were not; None if there is no readable ``spec.json`` beside the file.
    """
    try:
        source = Trial.from_json(read_json(file.with_name("spec.json")))
        theirs, identity, split = source.spec.data, source.data, source.seeds["split"]
        mine = trial.spec.data
        if same_images(mine, trial.info.identity, theirs, identity):
            reason = other_split(mine, theirs)
            if reason is not None or {seeds.streams(seed)["split"] for seed in seeds.all} != {split}:
                why = f" ({reason})" if reason else ""
                return f"{file.parent.name[:8]}/{file.name} was trained on another split of {mine.type}{why}"
    except (KeyError, TypeError, ValueError):
        return None  # the file is missing or is not a trial's spec
    if len(file.parents) < 3:  # not in a trial's folder: the trials that it needed cannot be located
        return ""
    visited |= {file}
    for source_key in source.needs.values():
        needed = file.parents[2] / source_key / file.name
        if needed not in visited and (clause := _has_seen(needed, trial, seeds, visited)):
            return clause
    return ""


def _unknown(teacher: str) -> str:
    return (
        f"the teacher is {teacher}, which may have been trained on their validation images; accuracies on "
        "these may flatter"
    )


def rules_of(study: Study | None, document: Document, problems: list[Problem]) -> Rules:
    """Parse the rules of a study; add a problem for each that is not a valid expression."""
    rules: Rules = []
    for index, rule in enumerate(study.where if study else ()):
        try:
            rules.append((index, parse(rule.require), rule.otherwise, rule.because))
        except RuleFault as error:
            problems.append(document.problem(("where", index, "require"), str(error)))
    return rules
