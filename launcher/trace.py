"""What a walk along an entry script has found, and which conditions a test draws.

A condition is kept only where it speaks of values that nothing has changed since.
"""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from launcher import conditions
from launcher.flow import (
    DEFAULT,
    NOTHING,
    UNKNOWN,
    Args,
    Frame,
    Items,
    Object,
    Text,
    Value,
    Values,
    forgotten,
    leaves,
)
from launcher.lookup import Lookup
from launcher.schema import Shadow
from launcher.sources import Module

PERHAPS = "..."
"""A condition that is not known from the arguments: what stands under it happens perhaps."""

Guards = frozenset[str]
ANYHOW: Guards = frozenset()
UNSURE: Guards = frozenset({PERHAPS})
EXITS = "sys.exit"
"""Among what a statement writes: it may end the script."""


class Passed(str):
    """A condition that holds because the path would have ended in a `raise` otherwise."""

    __slots__ = ()


@dataclass(slots=True)
class Trace(Lookup, ABC):
    """What one walk along an entry script knows and has found, and how conditions are drawn from tests."""

    script: Module = field(kw_only=True)
    fields: frozenset[str] = field(kw_only=True)
    recorders: frozenset[str] = frozenset()
    reads: dict[str, dict[str, set[Guards]]] = field(default_factory=dict)
    refusals: dict[str, set[tuple[Guards, str]]] = field(default_factory=dict)
    shadows: dict[str, Shadow] = field(default_factory=dict)
    # arguments that the script itself gives other values, as far as it was walked
    written: set[str] = field(default_factory=set)
    # those of them that keep their truth: entries of a list are given another form
    reshaped: set[str] = field(default_factory=set)
    # the places of refusals inside `__post_init__`
    parsing: set[str] = field(default_factory=set)
    # what holds because the script would have raised otherwise, wherever it got to
    assumed: set[str] = field(default_factory=set)
    _walked: dict[object, list[Guards]] = field(default_factory=dict)
    _entered: set[ast.AST] = field(default_factory=set)
    _visited: set[object] = field(default_factory=set)
    _tables: dict[tuple[str, str], Values] = field(default_factory=dict)
    # kept from pass to pass: what calls return, write, and see
    _returns: dict[object, set[Value]] = field(default_factory=dict)
    _effects: dict[object, set[str]] = field(default_factory=dict)
    _frames: dict[object, Frame] = field(default_factory=dict)
    _wrote: set[str] = field(default_factory=set)
    _silent: int = 0
    _leaving: dict[ast.stmt, bool] = field(default_factory=dict)
    _active: dict[ast.AST, int] = field(default_factory=dict)
    _depth: int = 0
    _count: int = 0

    @abstractmethod
    def value(self, node: ast.expr, frame: Frame, guards: Guards) -> Values:
        """What an expression may hold; records the arguments that it reads."""

    # --- what is known at a place --------------------------------------------------------------------

    def learnt(self) -> int:
        """How much is known that a further pass could build on; it only ever grows."""
        told = sum(map(len, self._returns.values())) + sum(map(len, self._effects.values()))
        return self.known() + told

    def stands(self, text: str) -> bool:
        """Whether a condition speaks of the stage file's values, as far as the script was walked."""
        names = conditions.names(text)
        if names & self.reshaped and conditions.compares(text):
            return False
        return not names & self.written

    @contextmanager
    def _watched(self) -> Iterator[set[str]]:
        """The arguments that get other values meanwhile."""
        before, self._wrote = self._wrote, set()
        try:
            yield self._wrote
        finally:
            before |= self._wrote
            self._wrote = before

    def _forget(self, wrote: set[str], frame: Frame, guards: Guards) -> Guards:
        """The conditions that are still known after arguments were given other values."""
        if not wrote:
            return guards
        for one in frame.chain():
            for name, held in one.env.items():
                one.env[name] = forgotten(held, wrote)
        kept = frozenset(c for c in guards if c == PERHAPS or not conditions.names(c) & wrote)
        # with a condition less, what follows happens for certain no longer
        lost = any(not isinstance(c, Passed) for c in guards - kept)
        return kept | UNSURE if lost or EXITS in wrote else kept

    @contextmanager
    def _silently(self, quiet: bool = True) -> Iterator[None]:
        self._silent += quiet
        try:
            yield
        finally:
            self._silent -= quiet

    @contextmanager
    def _aloud(self) -> Iterator[None]:
        silent, self._silent = self._silent, 0
        try:
            yield
        finally:
            self._silent = silent

    # --- what was found ------------------------------------------------------------------------------

    def _read(self, name: str, where: str, guards: Guards) -> None:
        if not self._silent:
            self._count += 1
            self.reads.setdefault(name, {}).setdefault(where, set()).add(guards)

    def _refused(
        self, node: ast.stmt, raised: ast.expr | None, frame: Frame, guards: Guards
    ) -> None:
        """A `raise`: worth knowing where nothing but arguments decides whether it is reached."""
        if isinstance(raised, ast.Call):
            raised = raised.func
        if PERHAPS in guards or raised is None:
            return
        if not all(self.stands(c) for c in guards):
            return
        name = ast.unparse(raised).rpartition(".")[2]
        self.refusals.setdefault(place(node, frame), set()).add((guards, name))

    def _shadowed(self, test: ast.expr, frame: Frame, guards: Guards) -> None:
        """A branch that cannot be reached: what its test reads loses against what it contradicts."""
        rivals = {
            name
            for one in guards
            if conditions.negated(one) in guards
            for name in conditions.names(one)
        }
        told = self._expressed(test, frame)
        read = conditions.names(ast.unparse(told)) if told is not None else frozenset()
        for name in read - rivals:
            self.shadows[name] = Shadow(where=place(test, frame), by=tuple(sorted(rivals)))

    def _write(self, name: str | None) -> None:
        """An argument gets another value; None where it is not known which one."""
        if name is not None and name in self.fields:
            self.written.add(name)
            self._wrote.add(name)

    def _changed(self, held: Values, node: ast.expr, frame: Frame) -> None:
        """A value is changed in place: that of an argument, perhaps."""
        if isinstance(node, ast.Name):
            for name in frame.home(node.id).aliases.get(node.id, ()):
                self._write(name)
        for value in held:
            if isinstance(value, Text):
                for name in conditions.names(value.text):
                    self._write(name)

    def _let_go(self, name: str, held: Values) -> None:
        """Something that is not followed keeps a value under a name."""
        kept = {v for v in leaves(held) if isinstance(v, Args | Items | Object)}
        if self.carries(kept):
            self.loose.setdefault(name, set()).update(kept | {UNKNOWN})

    # --- expressions over arguments ------------------------------------------------------------------

    def _taken(self, test: ast.expr, say: conditions.Say) -> tuple[Guards, Guards]:
        """What must hold where a test is true, and where it is false; marked where that is not all."""
        known = all(say(part) is not None for part in single_tests(test))
        sure = ANYHOW if known else UNSURE
        return (
            conditions.implied(test, True, say) | sure,
            conditions.implied(test, False, say) | sure,
        )

    def _say(self, frame: Frame) -> conditions.Say:
        told: dict[ast.expr, str | None] = {}

        def say(node: ast.expr) -> str | None:
            if node not in told:
                known = self._expressed(node, frame)
                text = None if known is None else ast.unparse(known)
                # a condition that speaks of no argument says nothing about a stage file
                told[node] = text if text is not None and conditions.names(text) else None
            return told[node]

        return say

    def _texted(self, node: ast.expr, frame: Frame) -> Values:
        told = self._expressed(node, frame)
        return NOTHING if told is None else frozenset({Text(ast.unparse(told))})

    def _expressed(self, node: ast.expr, frame: Frame) -> ast.expr | None:
        """An expression with argument names for the objects they belong to; None where that fails."""
        match node:
            case ast.Constant():
                return node
            case ast.Name(id=name):
                held = frame.find(name)
                if held is None:
                    return self.literal(frame.module, node)
                texts = [v.text for v in held if isinstance(v, Text)]
                return conditions.parsed(texts[0]) if len(texts) == len(held) == 1 else None
            case ast.Attribute(value=ast.Name() | ast.Attribute() as owner, attr=name):
                return self._attribute_expressed(node, owner, name, frame)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                parts = self._all_expressed([left, *comparators], frame)
                return None if parts is None else ast.Compare(parts[0], ops, parts[1:])
            case ast.BoolOp(op=op, values=parts):
                told = self._all_expressed(parts, frame)
                return None if told is None else ast.BoolOp(op, told)
            case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
                inner = self._expressed(operand, frame)
                return None if inner is None else ast.UnaryOp(op, inner)
            case ast.NamedExpr(value=value):
                return self._expressed(value, frame)
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name() | ast.Attribute() as owner, ast.Constant(value=str(name)), *_],
            ):
                return self._attribute_expressed(
                    ast.Attribute(owner, name, ast.Load()), owner, name, frame
                )
            case ast.Call(func=function, args=[inner], keywords=[]):
                # the member of that value
                known = self.is_enum(frame.module, function)
                return self._expressed(inner, frame) if known else None
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                told = self._all_expressed(items, frame)
                return None if told is None else ast.Tuple(told, ast.Load())
        return None

    def _attribute_expressed(
        self, node: ast.Attribute, owner: ast.expr, name: str, frame: Frame
    ) -> ast.expr | None:
        if name == "value":
            # of a member of an enum
            return self._expressed(owner, frame)
        if name in self.fields:
            with self._silently():
                owners = self.value(owner, frame, UNSURE)
            known = owners - {DEFAULT}
            if known and all(isinstance(o, Args) for o in known):
                return ast.Name(name, ast.Load())
        root = owner
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and frame.find(root.id) is None:
            return self.literal(frame.module, node)
        return None

    def _all_expressed(self, nodes: Sequence[ast.expr], frame: Frame) -> list[ast.expr] | None:
        told = []
        for node in nodes:
            one = self._expressed(node, frame)
            if one is None:
                return None
            told.append(one)
        return told

    # --- names that are spelt out --------------------------------------------------------------------

    def _constant_text(self, node: ast.expr, frame: Frame) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name) and frame.find(node.id) is not None:
            return None
        found = self.literal(frame.module, node)
        return found.value if found is not None and isinstance(found.value, str) else None

    def _names_meant(self, name: ast.expr, frame: Frame) -> set[str]:
        """The arguments that a computed name may be: those that its function spells out, or parts of."""
        parts = _spelt(name)
        if parts:
            pattern = re.compile(".*".join(re.escape(part) for part in parts))
            return {known for known in self.fields if pattern.fullmatch(known)}
        told: set[str] = set()
        nodes = next((one.node for one in frame.chain() if one.node is not None), None)
        for node in ast.walk(nodes) if nodes is not None else ():
            match node:
                case ast.Constant(value=str() as text):
                    told.add(text)
                case ast.Name() if frame.find(node.id) is None:
                    told |= _texts(self.sources.evaluate(frame.module, node))
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=of_class) if frame.bound:
                    told |= self._class_texts(frame.bound, of_class)
        return told & self.fields

    def _class_texts(self, value: Value, name: str) -> set[str]:
        """The texts in a list on the level of a class."""
        key = self.class_of(value)
        for module, node in self.order(key) if key else ():
            for statement in node.body:
                match statement:
                    case ast.Assign(targets=[ast.Name(id=known)], value=told) if known == name:
                        pass
                    case ast.AnnAssign(target=ast.Name(id=known), value=told) if known == name:
                        pass
                    case _:
                        continue
                return _texts(self.sources.evaluate(module, told))
        return set()


def _spelt(name: ast.expr) -> list[str]:
    """The texts around what is put in: `f"{kind}_steps"`, `kind + "_steps"`; nothing for all else."""
    match name:
        case ast.JoinedStr(values=values):
            parts = [str(v.value) if isinstance(v, ast.Constant) else "" for v in values]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [
                str(one.value) if isinstance(one, ast.Constant) else "" for one in (left, right)
            ]
        case _:
            return []
    # an empty part stands for what is put in
    whole = "\0".join(part or "" for part in parts)
    return re.split("\0+", whole) if any(parts) else []


def place(node: ast.AST, frame: Frame) -> str:
    return f"{frame.module.label}:{getattr(node, 'lineno', 0)}"


def single_tests(test: ast.expr) -> Iterator[ast.expr]:
    """What a test is joined of by `and`, `or` and `not`."""
    match test:
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from single_tests(part)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from single_tests(operand)
        case ast.NamedExpr(value=value):
            yield from single_tests(value)
        case _:
            yield test


def _texts(value: object) -> set[str]:
    """The texts in a list; nothing for any other value."""
    return {one for one in value if isinstance(one, str)} if isinstance(value, list) else set()
