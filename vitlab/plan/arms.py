"""Arms in the making: what they are made from, the rules they must meet, and their trials."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from vitlab.errors import Problem
from vitlab.plan.design import Draft
from vitlab.plan.key import code_of_modules, key_of
from vitlab.plan.resolve import ResolvedTrial, Resolver, changed
from vitlab.plan.rules import RuleFault, holds, parse
from vitlab.plan.values import Trial
from vitlab.spec import Document, Seeds, Study
from vitlab.store import read_json


@dataclass
class Making:
    """An arm in the making."""

    draft: Draft
    name: str
    trial: ResolvedTrial
    key: str  #: of the trial without seeds, as the design has it: equal keys, equal arms
    aliases: list[str] = field(default_factory=list)
    skip: str = ""
    solved: dict[str, Any] = field(default_factory=dict)  #: values that planning found, beside those of the draft
    off: float = 0.0  #: relative distance from what it is matched with
    note: str = ""
    pending: bool = False  #: its knobs are not chosen yet


Rules = list[tuple[int, ast.expr, str, str]]
"""Index, expression, what to do otherwise, and why."""


@dataclass(frozen=True)
class Workshop:
    """What arms are made from."""

    study: Study
    document: Document
    base: Mapping[str, Any]
    resolved_base: ResolvedTrial
    resolver: Resolver
    rules: Rules

    def at(self, values: Mapping[str, Any]) -> ResolvedTrial:
        """The base with some values.

        Raises:
            Faults: if it cannot have them.
        """
        return self.resolver.resolve(changed(self.base, values, self.resolved_base.plain))

    def judge(self, arm: Making) -> list[Problem]:
        """Apply the rules: an arm that breaks one is skipped, or a mistake."""
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
    resolved: ResolvedTrial, seed: int, seeds: Seeds, prerequisites: dict[str, Trial], split: int | None = None
) -> Trial:
    """A trial with its seeds and its key; the trials it needs are added to ``prerequisites``.

    ``split`` is the seed of that stream, where it is not the study's: neither a teacher nor a body that was trained on
    the same data may have seen the images that their trial is judged by.
    """
    streams = seeds.streams(seed) | ({} if split is None else {"split": split})
    needs: dict[str, str] = {}
    for role, needed in resolved.needs.items():
        own = seed if needed.seed == "same" else needed.seed
        same = needed.trial.plain["data"]["type"] == resolved.plain["data"]["type"]
        shared = streams["split"] if same or role == "teacher" else None
        other = trial_of(needed.trial, own, seeds, prerequisites, shared)
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


def teachers_in_files(arms: Iterable[Making], seeds: Seeds) -> list[str]:
    """What to say of arms whose teacher is a file: it may know the images that they are judged by.

    Of a file that a trial has left, its spec beside it says on what it was trained.
    """
    found: dict[str, list[str]] = {}
    for arm in arms:
        teacher = arm.trial.plain.get("distill", {}).get("teacher", {})
        if arm.skip:
            continue
        how = ""
        if teacher.get("pretrained") is not None:
            how = _unknown(teacher["pretrained"])
        elif teacher.get("checkpoint") is not None:
            how = _has_seen(FilePath(teacher["checkpoint"]), arm.trial.plain["data"], seeds)
        if how:
            found.setdefault(how, []).append(f"'{arm.name}'")
    return [f"Validation seen by teacher: of {', '.join(names)}, {how}." for how, names in found.items()]


def _has_seen(file: FilePath, data: Mapping[str, Any], seeds: Seeds) -> str:
    """What is known of a file of weights having been trained on validation images of this data; empty if it was not."""
    left = read_json(file.with_name("spec.json"))
    if left is None:
        return _unknown(file.name)
    theirs, splits = left["spec"]["data"], {seeds.streams(seed)["split"] for seed in seeds.all}
    held_out = all(theirs.get(name) == data.get(name) for name in ("validation", "classes"))
    if theirs["type"] != data["type"] or (held_out and splits == {left["seeds"]["split"]}):
        return ""
    return f"the teacher in {file.parent.name[:8]}/{file.name} was trained on another split of {data['type']}"


def _unknown(teacher: str) -> str:
    return (
        f"the teacher is {teacher}, and nothing says that it was not trained on their validation images; accuracies on "
        "these may flatter"
    )


def rules_of(study: Study | None, document: Document, problems: list[Problem]) -> Rules:
    """The rules of a study, read; what is no expression is added to ``problems``."""
    rules: Rules = []
    for index, rule in enumerate(study.where if study else ()):
        try:
            rules.append((index, parse(rule.require), rule.otherwise, rule.because))
        except RuleFault as error:
            problems.append(document.problem(("where", index, "require"), str(error)))
    return rules
