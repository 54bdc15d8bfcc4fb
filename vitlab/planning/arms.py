"""Resolved arms: the rules they must meet, and their trials.

Rules are conditions on an arm's values, written as expressions over the resolved trial: ``model.dim % model.heads ==
0``, ``not (model.patch_size == 2 and model.position == 'rope2d')``.  An expression is parsed and walked, never
evaluated by Python; only the operators listed here are allowed.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitlab.errors import Path, Problem, nearest
from vitlab.identity.code import code_of_modules
from vitlab.identity.trial import key_of
from vitlab.planning.resolve import Faults, ResolvedTrial, Resolver
from vitlab.planning.values import Trial
from vitlab.registry import slot
from vitlab.spec import Document, Seeds, Study
from vitlab.spec.choice import label
from vitlab.spec.design import Changes, changed
from vitlab.spec.run import REPORTING_SEEDS
from vitlab.spec.tree import NewTree, Tree, Values, copied, put, value_at, without
from vitlab.spec.trial import SOURCES

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_NODES = (
    *(ast.BoolOp, ast.boolop, ast.Compare, ast.Name, ast.Attribute, ast.expr_context, ast.List, ast.Tuple),
    *(ast.Constant, ast.UnaryOp, ast.BinOp, *_OPERATORS),
)
_ALLOWED = "numbers, 'names', dotted paths, + - * / // %, comparisons, in, and, or, not, and parentheses"
MAX_RULE_LENGTH = 500  #: largest number of characters
MAX_RULE_DEPTH = 60  #: largest depth of nesting


class RuleFault(Exception):
    """A rule that is not an allowed expression, or names a value that the trial does not have."""


def parse_rule(text: str) -> ast.expr:
    """Parse a rule.

    Raises:
        RuleFault: if ``text`` is not an allowed expression, naming what is allowed.
    """
    if len(text) > MAX_RULE_LENGTH:
        raise RuleFault(f"a rule has at most {MAX_RULE_LENGTH} characters; found {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RuleFault(f"'{text}' is not an expression; allowed: {_ALLOWED}") from None
    if _depth(tree) > MAX_RULE_DEPTH:
        raise RuleFault(f"'{text:.40}...' is nested too deeply for a rule")
    for node in ast.walk(tree):
        is_value = not isinstance(node, ast.Constant) or isinstance(node.value, int | float | str | None)
        if not is_value or not isinstance(node, _NODES) or not isinstance(getattr(node, "op", ast.Not()), _NODES):
            raise RuleFault(f"'{ast.unparse(node)}' is not allowed in a rule; allowed: {_ALLOWED}")
    return tree


def holds(rule: ast.expr, trial: Tree) -> bool:
    """Return whether the resolved trial meets the rule.

    Raises:
        RuleFault: if it names a value that the trial does not have, or compares values that have no order.
    """
    try:
        return bool(_value(rule, trial))
    except (TypeError, ArithmeticError) as error:
        raise RuleFault(f"'{ast.unparse(rule)}' cannot be computed: {error}") from None


def _value(node: ast.expr, trial: Tree) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            return _look_up(ast.unparse(node), trial)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, trial) for item in items]
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(value, trial) for value in values)
        case ast.BoolOp(values=values):
            return any(_value(value, trial) for value in values)
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_value(operand, trial))
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_number(_value(left, trial)), _number(_value(right, trial)))
        case ast.Compare(left=left, ops=ops, comparators=rights):
            values = [_value(item, trial) for item in (left, *rights)]
            pairs = itertools.pairwise(values)
            return all(_OPERATORS[type(op)](*pair) for op, pair in zip(ops, pairs, strict=True))
    raise AssertionError(f"parse_rule() let {ast.dump(node)} through")


def _number(value: Any) -> int | float:
    """Check that an operand is a number, and return it; Python would repeat texts and lists to any length."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _depth(tree: ast.AST) -> int:
    level, depth = [tree], 0
    while level:
        level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
    return depth


def _look_up(path: str, trial: Tree) -> Any:
    """Return the value at a dotted path of the trial; for a slot, the name of its component, or several by ``+``."""
    value: Any = trial
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            allowed = list(value) if isinstance(value, Mapping) else []
            raise RuleFault(
                f"'{path}': there is no '{part}'.{nearest(part, allowed)} Allowed here: {', '.join(allowed)}."
            )
        value = value[part]
    return label(value)


@dataclass
class ResolvedArm:
    """An arm of the design, resolved; matching, rules and tuning complete it."""

    changes: Changes
    name: str
    trial: ResolvedTrial
    key: str  #: key of the trial without seeds, before matching and tuning; arms with equal keys are merged
    aliases: list[str] = field(default_factory=list)
    skip: str = ""
    solved: NewTree = field(default_factory=dict)  #: values chosen by matching and tuning
    off: float = 0.0  #: relative difference from the cost of its baseline
    note: str = ""
    pending: bool = False  #: whether its tuned values are still to be chosen
    twin: str = ""  #: name of the arm that a control equals; empty if it is none
    first_seed: int = 0  #: added to the seeds of the study

    @property
    def is_base(self) -> bool:
        """Whether it is the base, in its block."""
        return self.changes.values == self.changes.conditions and not self.twin

    @property
    def place(self) -> Path:
        """Place of its first change in the document."""
        return next(iter(self.changes.places.values()), ("design",))


CONTROL_SEEDS = 2 * REPORTING_SEEDS  #: seeds of controls are larger than those of arms and of tunings


def controls_of(arm: ResolvedArm, number: int) -> Iterator[ResolvedArm]:
    """Yield so many controls of an arm, which equal it but for their seeds."""
    for place in range(number):
        label = "control" if not place else f"control {place + 1}"
        name = f"{arm.changes.block}: {label}" if arm.changes.block else label
        first = CONTROL_SEEDS + place * REPORTING_SEEDS
        yield replace(arm, name=name, key=f"{arm.key} {label}", aliases=[], solved={}, twin=arm.name, first_seed=first)


Rules = list[tuple[int, ast.expr, str, str]]
"""Index, expression, action for an arm that breaks the rule, and reason."""


@dataclass(frozen=True)
class PlanContext:
    """The study, its base and its rules, from which arms are resolved."""

    study: Study
    document: Document
    base: Tree  #: as written in the document
    plain: Tree  #: the resolved base, as far as it is sound
    faults: list[tuple[Path, str]]  #: mistakes of the base
    resolver: Resolver
    rules: Rules

    def at(self, values: Values) -> ResolvedTrial:
        """Return the base with ``values`` changed, resolved.

        Raises:
            Faults: with the mistakes that the base itself does not have; without any if they are all the base's.
        """
        try:
            return self.resolver.resolve(self.changed(values))
        except Faults as error:
            own = [fault for fault in error.faults if fault not in self.faults]
            raise Faults(own, error.plain, error.info) from None

    def changed(self, values: Values) -> NewTree:
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
    key = key_of(
        {
            "spec": resolved.identity,
            "origins": resolved.foreign_origins,
            "data": resolved.info.content,
            "seeds": streams,
            "needs": {role: prerequisite.partition("/")[0] for role, prerequisite in needs.items()},
        }
    )
    return Trial(
        resolved.spec,
        streams,
        resolved.origins,
        resolved.info.content,
        needs,
        resolved.files,
        key=key,
        code=code_of_modules(resolved.modules, needs, resolved.versions),
        versions=resolved.versions,
    )


def parse_rules(study: Study | None, document: Document, problems: list[Problem]) -> Rules:
    """Parse the rules of a study; add a problem for each that is not a valid expression."""
    rules: Rules = []
    for index, rule in enumerate(study.where if study else ()):
        try:
            rules.append((index, parse_rule(rule.require), rule.otherwise, rule.because))
        except RuleFault as error:
            problems.append(document.problem(("where", index, "require"), str(error)))
    return rules


def mistakes_of(arms: Collection[ResolvedArm]) -> Iterator[tuple[ResolvedArm, str]]:
    """Yield each arm that cannot be in a study with another one, with a sentence."""
    by_training: dict[str, ResolvedArm] = {}
    by_name: dict[str, ResolvedArm] = {}
    for arm in arms:
        other = arm if arm.twin else by_training.setdefault(key_of(_read(arm.trial)), arm)
        if other is not arm:
            own, others = arm.changes.values, other.changes.values
            paths = [path for path in {**others, **own} if own.get(path) != others.get(path)]
            sentence = (
                f"arms '{other.name}' and '{arm.name}' train the same: they differ only in {' and '.join(paths)}, "
                "which their objective never reads; remove one of them"
            )
            yield arm, sentence
        if by_name.setdefault(arm.name, arm) is not arm:
            yield arm, f"two different arms are called '{arm.name}'; give them labels"
    for first, arm in itertools.pairwise(arms):
        if arm.trial.spec.train.stop_early != first.trial.spec.train.stop_early:
            yield arm, f"it stops early by another rule than '{first.name}'; write one train.stop_early, in base"
            return


def _read(trial: ResolvedTrial) -> Tree:
    """Return the identity of a trial without what its objective never reads, and the same of its prerequisites."""
    identity = trial.identity
    objective: Any = slot("objective").resolve(trial.spec.train.objective).component
    for path in (tuple(dotted.split(".")) for dotted in objective.unread):
        identity = without(identity, path)
        if value_at(identity, path[:-1]) == {}:  # as if no option of the component had been set
            identity = without(identity, path[:-1])
    for role, other in trial.needs.items():
        identity = copied(identity)
        put(identity, (*SOURCES[role], "trial"), _read(other.trial))
    return identity
