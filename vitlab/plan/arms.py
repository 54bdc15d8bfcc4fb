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
from vitlab.plan.resolve import ResolvedTrial, Resolver, changed, other_split, same_images
from vitlab.plan.rules import RuleFault, holds, parse
from vitlab.plan.values import Trial
from vitlab.spec import Document, Seeds, Study
from vitlab.spec.trial import SOURCES
from vitlab.store.folders import read_json


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
    resolved: ResolvedTrial,
    seed: int,
    seeds: Seeds,
    prerequisites: dict[str, Trial],
    splits: Mapping[str, int] = {},
) -> Trial:
    """Return a trial with its seeds and its key, and add the trials it needs to ``prerequisites``.

    Args:
        resolved: the trial without seeds.
        seed: of the replicate.
        seeds: of the study.
        prerequisites: by key.
        splits: type of data set to the seed of ``split`` that replaces the study's: no trial whose weights another one
            takes, however indirectly, may be trained on the images that this one is judged by.
    """
    data = resolved.plain["data"]["type"]
    streams = seeds.streams(seed) | ({"split": splits[data]} if data in splits else {})
    splits = {data: streams["split"], **splits}
    needs: dict[str, str] = {}
    for role, needed in resolved.needs.items():
        own = seed if needed.seed == "same" else needed.seed
        taught = {needed.trial.plain["data"]["type"]: streams["split"]} if role == "teacher" else {}
        other = trial_of(needed.trial, own, seeds, prerequisites, {**taught, **splits})
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
        resolved.files,
        key=key_of(identity),
        code=code_of_modules(resolved.modules, needs, resolved.versions),
        versions=resolved.versions,
    )


def notes_on_files(arms: Iterable[Making], seeds: Seeds) -> list[str]:
    """Return notes on the arms that take weights from files which may come from training on their validation images.

    The spec beside a file that a trial left says what the trial, and those whose weights it took, were trained on.  Of
    a teacher from elsewhere nothing is known.
    """
    found: dict[str, list[str]] = {}
    for arm in arms:
        if arm.skip:
            continue
        for role, path in SOURCES.items():
            source: Any = arm.trial.plain
            for part in path:
                source = source.get(part) or {}
            how = ""
            if source.get("pretrained") is not None:
                how = _unknown(source["pretrained"])
            elif source.get("checkpoint") is not None:
                file = FilePath(source["checkpoint"])
                left = _has_seen(file, arm.trial, seeds)
                how = left or (_unknown(file.name) if left is None and role == "teacher" else "")
            if how:
                found.setdefault(f"{_SEEN_BY[role]}: of {{arms}}, {how}.", []).append(f"'{arm.name}'")
    return [note.replace("{arms}", ", ".join(names)) for note, names in found.items()]


_SEEN_BY = {"init_from": "Validation seen in pretraining", "teacher": "Validation seen by teacher"}


def _has_seen(file: FilePath, trial: ResolvedTrial, seeds: Seeds) -> str | None:
    """Say how the training behind a file may have used a trial's validation images.

    Returns:
        a clause, empty if it did not; None where no spec beside the file says what it was trained on.
    """
    try:
        left = Trial.from_json(read_json(file.with_name("spec.json")))
        theirs, identity, split = left.spec["data"], left.data, left.seeds["split"]
        mine = trial.plain["data"]
        if same_images(mine, trial.info.identity, theirs, identity):
            reason = other_split(mine, theirs)
            if reason is not None or {seeds.streams(seed)["split"] for seed in seeds.all} != {split}:
                why = f" ({reason})" if reason else ""
                return f"{file.parent.name[:8]}/{file.name} was trained on another split of {mine['type']}{why}"
    except (KeyError, TypeError, ValueError):
        return None  # no such file, or of something else
    for needed in left.needs.values():
        if before := _has_seen(file.parents[2] / needed / file.name, trial, seeds):
            return before
    return ""


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
