"""Conditions over argument names, as text: what a branch of upstream's implies, and whether it holds.

A condition is a Python expression whose names are arguments: `use_lora and not use_qlora`,
`activation_memory_budget < 1`, `loss_type == 'simpo'`. What cannot be written so is left out:
every conclusion drawn stays true.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

PERHAPS = "..."
"""A condition that is not known from the arguments: what stands under it happens perhaps."""

Say = Callable[[ast.expr], str | None]
"""An expression of upstream's as a text over argument names; None where it is none."""

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda one, other: one is other or (isinstance(one, str) and one == other),
    ast.IsNot: lambda one, other: one is not other and not (isinstance(one, str) and one == other),
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
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


def implied(test: ast.expr, truth: bool, say: Say) -> frozenset[str]:
    """The conditions that must hold where `test` is `truth`; `PERHAPS` among them where they are not all."""
    match test:
        case ast.NamedExpr(value=value):
            return implied(value, truth, say)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return implied(operand, not truth, say)
        case ast.BoolOp(op=op, values=parts) if isinstance(op, ast.And) == truth:
            return frozenset().union(*(implied(part, truth, say) for part in parts))
    text = say(test)
    return frozenset({PERHAPS if text is None else text if truth else negated(text)})


@cache
def negated(text: str) -> str:
    """The opposite of a condition, in the form in which the code would most likely write it."""
    node = parsed(text)
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            node = operand
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            node = ast.Compare(left, [_OPPOSITE[type(op)]()], comparators)
        case ast.BoolOp(op=op, values=parts):
            opposites = [parsed(negated(ast.unparse(part))) for part in parts]
            node = ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), opposites)
        case _:
            node = ast.UnaryOp(ast.Not(), node)
    return ast.unparse(node)


def impossible(conditions: frozenset[str]) -> bool:
    """Whether two of the conditions exclude each other, read as they stand."""
    return any(negated(text) in conditions for text in conditions)


def simplified(conditions: Iterable[str]) -> frozenset[str]:
    """The conditions without those alternatives that another one has decided already."""
    known = frozenset(conditions)
    return frozenset(text for text in known if not _parts(text) & (known - {text}))


@cache
def _parts(text: str) -> frozenset[str]:
    """The alternatives of an `or`; nothing for any other condition."""
    match parsed(text):
        case ast.BoolOp(op=ast.Or(), values=parts):
            return frozenset(ast.unparse(part) for part in parts)
    return frozenset()


@cache
def names(text: str) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(parsed(text)) if isinstance(node, ast.Name))


@cache
def compares(text: str) -> bool:
    """Whether a condition asks for more than the truth of single arguments."""
    return any(isinstance(node, ast.Compare) for node in ast.walk(parsed(text)))


def holds(text: str, values: Mapping[str, Any], unknown: object) -> bool | None:
    """Whether a condition is true for these values; None where one of them is `unknown` or absent.

    One part of an `and` or `or` may decide, whatever the others are.
    """
    return _truth(parsed(text), values, unknown)


def _truth(node: ast.expr, values: Mapping[str, Any], unknown: object) -> bool | None:
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _truth(operand, values, unknown)
            return None if inner is None else not inner
        case ast.BoolOp(op=op, values=parts):
            every = isinstance(op, ast.And)
            truths = [_truth(part, values, unknown) for part in parts]
            if (not every) in truths:
                return not every
            return None if None in truths else every
    try:
        return bool(_value(node, values, unknown))
    except (_Unknown, ArithmeticError, LookupError, TypeError, ValueError):
        return None


@cache
def parsed(text: str) -> ast.expr:
    """A condition as a syntax tree, which nobody may change."""
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, values: Mapping[str, Any], unknown: object) -> Any:
    """The value of an expression, as Python would compute it; raises _Unknown where it cannot be."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            found = values[name]
            if found is unknown:
                raise _Unknown
            return found
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return [_value(item, values, unknown) for item in items]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values, unknown)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values, unknown)
        case ast.BoolOp(op=op, values=parts):
            for part in parts:
                # `and` gives its first false part, `or` its first true one, both else the last
                result = _value(part, values, unknown)
                if bool(result) is isinstance(op, ast.Or):
                    break
            return result
        case ast.Compare(left=left, ops=ops, comparators=rest):
            known = [_value(part, values, unknown) for part in (left, *rest)]
            if any(isinstance(one, float) and math.isnan(one) for one in known):
                # its comparisons and their opposites are both false
                raise _Unknown
            pairs = zip(ops, known, known[1:], strict=False)
            return all(_COMPARE[type(op)](one, other) for op, one, other in pairs)
    raise _Unknown
