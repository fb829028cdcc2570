"""Conditions over argument names, as text: what a branch of upstream's implies, whether it holds.

A condition is a Python expression whose names are arguments: `use_lora and not use_qlora`,
`activation_memory_budget < 1`, `loss_type == 'simpo'`. What cannot be written so is left out:
every conclusion drawn stays true.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

PERHAPS = "..."
"""A condition that is not known from the arguments: what stands under it happens perhaps."""

Say = Callable[[ast.expr], str | None]
"""An expression of upstream's as a text over argument names; None if it is none."""


def _is_same(left: Any, right: Any) -> bool:
    # the members of an enum are texts here
    return left is right or (isinstance(left, str) and left == right)


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: _is_same,
    ast.IsNot: lambda left, right: not _is_same(left, right),
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
_OPPOSITE |= {right: left for left, right in _OPPOSITE.items()}


class _Unknown(Exception):
    """The condition names something whose value is not known before the run."""


def find_implied(test: ast.expr, truth: bool, say: Say) -> frozenset[str]:
    """The conditions that must hold if `test` is `truth`; with `PERHAPS` if they are not all."""
    match test:
        case ast.NamedExpr(value=value):
            return find_implied(value, truth, say)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return find_implied(operand, not truth, say)
        case ast.BoolOp(op=op, values=parts) if isinstance(op, ast.And) == truth:
            sides = [find_implied(part, truth, say) for part in parts]
            return frozenset().union(*sides)
    text = say(test)
    if text is None:
        text = PERHAPS
    elif not truth:
        text = negate(text)
    return frozenset({text})


@cache
def negate(text: str) -> str:
    """The opposite of a condition, in the form in which the code would most likely write it."""
    node = parse_condition(text)
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            node = operand
        case ast.Compare(left=left, ops=[comparison], comparators=comparators):
            opposite = _OPPOSITE[type(comparison)]()
            node = ast.Compare(left, [opposite], comparators)
        case ast.BoolOp(op=op, values=parts):
            opposites = [parse_condition(negate(ast.unparse(part))) for part in parts]
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            node = ast.BoolOp(other, opposites)
        case _:
            node = ast.UnaryOp(ast.Not(), node)
    return ast.unparse(node)


def is_impossible(conditions: frozenset[str]) -> bool:
    """Whether two of the conditions exclude each other, read as they stand."""
    return any(negate(text) in conditions for text in conditions)


def simplify(conditions: Iterable[str]) -> frozenset[str]:
    """The conditions without those alternatives that another one has decided already."""
    texts = frozenset(conditions)
    return frozenset(text for text in texts if _split_alternatives(text).isdisjoint(texts))


@cache
def _split_alternatives(text: str) -> frozenset[str]:
    """The alternatives of an `or`; nothing for any other condition."""
    match parse_condition(text):
        case ast.BoolOp(op=ast.Or(), values=parts):
            return frozenset(map(ast.unparse, parts))
    return frozenset()


@cache
def list_arguments(text: str) -> frozenset[str]:
    return frozenset(
        node.id for node in ast.walk(parse_condition(text)) if isinstance(node, ast.Name)
    )


@cache
def compares(text: str) -> bool:
    """Whether a condition asks for more than the truth of single arguments."""
    return any(isinstance(node, ast.Compare) for node in ast.walk(parse_condition(text)))


@cache
def parse_condition(text: str) -> ast.expr:
    """A condition as a syntax tree, which nobody may change."""
    return ast.parse(text, mode="eval").body


def holds(text: str, values: Mapping[str, Any], unknown: object) -> bool | None:
    """Whether a condition is true for these values; None if one of them is `unknown` or absent.

    One part of an `and` or `or` may decide, whatever the others are.
    """
    return _evaluate_truth(parse_condition(text), values, unknown)


def _evaluate_truth(node: ast.expr, values: Mapping[str, Any], unknown: object) -> bool | None:
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            truth = _evaluate_truth(operand, values, unknown)
            return None if truth is None else not truth
        case ast.BoolOp(op=op, values=parts):
            is_and = isinstance(op, ast.And)
            truths = [_evaluate_truth(part, values, unknown) for part in parts]
            if (not is_and) in truths:
                return not is_and
            return None if None in truths else is_and
    try:
        return bool(_evaluate(node, values, unknown))
    except (_Unknown, ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _evaluate(node: ast.expr, values: Mapping[str, Any], unknown: object) -> Any:
    """The value of an expression, as Python would compute it; raises _Unknown if it cannot be."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            if values[name] is unknown:
                raise _Unknown
            return values[name]
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return [_evaluate(item, values, unknown) for item in items]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, values, unknown)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, values, unknown)
        case ast.BoolOp(op=op, values=parts):
            for part in parts:
                # `and` gives its first false part, `or` its first true one, both else the last
                value = _evaluate(part, values, unknown)
                if bool(value) is isinstance(op, ast.Or):
                    break
            return value
        case ast.Compare(left=left, ops=ops, comparators=rest):
            sides = [_evaluate(part, values, unknown) for part in (left, *rest)]
            return _compare_all(ops, sides)
    raise _Unknown


def _compare_all(ops: Sequence[ast.cmpop], sides: Sequence[Any]) -> bool:
    """A chain such as `0 < a <= 1`, each operator between two neighbours of `sides`."""
    for side in sides:
        if isinstance(side, float) and math.isnan(side):
            # its comparisons and their opposites are both false
            raise _Unknown
    for op, (left, right) in zip(ops, pairwise(sides), strict=True):
        if not _COMPARE[type(op)](left, right):
            return False
    return True
