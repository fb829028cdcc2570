"""Tests of upstream's as conditions over argument names, and the branches that they decide."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source import conditions
from launcher.upstream.source.lookup import Lookup
from launcher.upstream.source.record import UNSURE, Spot, WalkRecord
from launcher.upstream.source.syntax import find_root
from launcher.upstream.source.values import DEFAULT, Args, Frame, Text, Values


class _Inexpressible(Exception):
    """An expression is about something else than arguments."""


@dataclass(slots=True)
class Branches(Lookup):
    """Says an expression over argument names, where it is one."""

    record: WalkRecord = field(kw_only=True)

    def value(self, node: ast.expr, at: Spot) -> Values:
        """What an expression may hold; see `Expressions`."""
        raise NotImplementedError

    def split_branches(self, test: ast.expr, at: Spot) -> tuple[Spot, Spot]:
        """The two spots behind a test: each adds what holds if it is true, or if it is false."""
        texts: dict[ast.expr, str | None] = {}

        def say(node: ast.expr) -> str | None:
            if node not in texts:
                text = self.express_as_text(node, at.frame)
                # a condition that names no argument says nothing about a stage file
                texts[node] = text if text is not None and conditions.list_arguments(text) else None
            return texts[node]

        if_true = conditions.find_implied(test, True, say)
        if_false = conditions.find_implied(test, False, say)
        return at.under(if_true), at.under(if_false)

    def express_as_text(self, node: ast.expr, frame: Frame) -> str | None:
        """An expression with argument names for the objects that they belong to, if it can be."""
        try:
            return ast.unparse(self._express(node, frame))
        except _Inexpressible:
            return None

    def _express(self, node: ast.expr, frame: Frame) -> ast.expr:
        """The expression with argument names in it. Raises _Inexpressible if it asks for others."""
        match node:
            case ast.Constant():
                return node
            case ast.Name():
                return self._express_name(node, frame)
            case ast.Attribute(value=ast.Name() | ast.Attribute()):
                return self._express_attribute(node, frame)
            case ast.Compare(left=left, ops=operators, comparators=right):
                first = self._express(left, frame)
                return ast.Compare(first, operators, self._express_all(right, frame))
            case ast.BoolOp(op=operator, values=parts):
                return ast.BoolOp(operator, self._express_all(parts, frame))
            case ast.UnaryOp(op=ast.Not() | ast.USub() as operator, operand=operand):
                return ast.UnaryOp(operator, self._express(operand, frame))
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return ast.Tuple(self._express_all(items, frame), ast.Load())
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name() | ast.Attribute() as owner, ast.Constant(value=str() as name), *_],
            ):
                attribute = ast.Attribute(owner, name, ast.Load())
                return self._express_attribute(attribute, frame)
        raise _Inexpressible

    def _express_all(self, nodes: Iterable[ast.expr], frame: Frame) -> list[ast.expr]:
        return [self._express(node, frame) for node in nodes]

    def _express_name(self, node: ast.Name, frame: Frame) -> ast.expr:
        values = frame.find(node.id)
        if values is None:
            return self._express_literal(node, frame)
        match list(values):
            case [Text(text)]:
                return conditions.parse_condition(text)
        raise _Inexpressible

    def _express_attribute(self, node: ast.Attribute, frame: Frame) -> ast.expr:
        if node.attr in self.record.fields:
            with self.record.muted():
                owners = self.value(node.value, Spot(frame, UNSURE))
            owners -= {DEFAULT}
            if owners and all(isinstance(owner, Args) for owner in owners):
                name = self.record.version_name(node.attr)
                return ast.Name(name, ast.Load())
        root = find_root(node)
        if isinstance(root, ast.Name) and frame.find(root.id) is None:
            return self._express_literal(node, frame)
        raise _Inexpressible

    def _express_literal(self, node: ast.expr, frame: Frame) -> ast.expr:
        literal = self.literal(frame.module, node)
        if literal is None:
            raise _Inexpressible
        return literal

    def find_constant_text(self, node: ast.expr, frame: Frame) -> str | None:
        """The text that an expression always is, such as the name in `getattr(args, "name")`."""
        if isinstance(node, ast.Name) and frame.find(node.id) is not None:
            return None
        match self.literal(frame.module, node):
            case ast.Constant(value=str() as text):
                return text
        return None

    def find_possible_names(self, name: ast.expr, frame: Frame) -> set[str]:
        """The arguments that a computed name may be: those that its function spells out."""
        around: ast.AST = name
        for outer in frame.chain():
            if outer.function is not None:
                around = outer.function.node
                break
        texts: list[object] = []
        for node in ast.walk(around):
            if isinstance(node, ast.Constant):
                texts.append(node.value)
            elif isinstance(node, ast.Name) and frame.find(node.id) is None:
                constants = self.sources.evaluate(frame.module, node)
                if isinstance(constants, list):
                    texts += constants
        return {text for text in texts if isinstance(text, str) and text in self.record.fields}
