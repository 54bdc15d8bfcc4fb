"""Rules of a study: conditions on an arm's values, written as expressions.

In: the text of a rule, and the values of a resolved trial.  Out: whether the trial meets it.

Examples: ``model.dim % model.heads == 0``, ``not (model.patch_size == 2 and model.position == 'rope2d')``.  An
expression is parsed and walked, never evaluated by Python; only the operators listed here are allowed.
"""

import ast
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from vitlab.errors import nearest
from vitlab.spec.choice import component_label
from vitlab.spec.tree import Tree

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
    for node in ast.walk(tree):
        is_value = not isinstance(node, ast.Constant) or isinstance(node.value, int | float | str | None)
        operators = getattr(node, "ops", [getattr(node, "op", ast.Not())])  # they have no place in the text
        if not is_value or not all(isinstance(each, _NODES) for each in (node, *operators)):
            raise RuleFault(
                f"'{ast.get_source_segment(text.strip(), node)}' is not allowed in a rule; allowed: {_ALLOWED}"
            )
    return tree


def is_met(rule: ast.expr, trial: Tree) -> bool:
    """Return whether the resolved trial meets the rule.

    Raises:
        RuleFault: if it names a value that the trial does not have, or compares values that have no order.
    """
    try:
        return bool(_evaluate(rule, trial))
    except (TypeError, ArithmeticError, RecursionError) as error:
        raise RuleFault(f"it cannot be computed: {error}") from None


def _evaluate(node: ast.expr, trial: Tree) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            return _value_or_component_name(ast.unparse(node), trial)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, trial) for item in items]
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_evaluate(value, trial) for value in values)
        case ast.BoolOp(values=values):
            return any(_evaluate(value, trial) for value in values)
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_evaluate(operand, trial))
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](
                _require_number(_evaluate(left, trial)), _require_number(_evaluate(right, trial))
            )
        case ast.Compare(left=left, ops=ops, comparators=rights):
            values = [_evaluate(item, trial) for item in (left, *rights)]
            pairs = itertools.pairwise(values)
            return all(_OPERATORS[type(op)](*pair) for op, pair in zip(ops, pairs, strict=True))
    raise AssertionError(f"parse_rule() let {ast.dump(node)} through")


def _require_number(value: Any) -> int | float:
    """Check that an operand is a number, and return it; Python would repeat texts and lists to any length."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _value_or_component_name(path: str, trial: Tree) -> Any:
    """Return the value at a dotted path of the trial; for a slot, the name of its component, or several by ``+``."""
    value: Any = trial
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            allowed = list(value) if isinstance(value, Mapping) else []
            raise RuleFault(
                f"'{path}': there is no '{part}'.{nearest(part, allowed)} Allowed here: {', '.join(allowed)}."
            )
        value = value[part]
    return component_label(value)
