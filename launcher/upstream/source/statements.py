"""The walk along an entry script, statement by statement, under the conditions known there.

It errs on the side of `read`; `reads` says what counts as reading at all.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source import conditions
from launcher.upstream.source.calls import Calls
from launcher.upstream.source.lookup import remember
from launcher.upstream.source.packages import Definition, Module, mark
from launcher.upstream.source.record import ANYHOW, UNSURE, Passed, Spot
from launcher.upstream.source.syntax import (
    LOOPS,
    list_own_attributes,
    may_leave,
    only_complains,
    refuses,
    trains,
)
from launcher.upstream.source.values import (
    NOTHING,
    UNKNOWN,
    Args,
    CallArguments,
    Frame,
    Function,
    drop_texts,
    keep_objects,
    merge,
    take_entries,
)

_DEFINES = Definition | ast.ClassDef | ast.Import | ast.ImportFrom
_LITERALS = ast.List | ast.ListComp | ast.Set | ast.SetComp | ast.Dict | ast.DictComp | ast.Tuple


@dataclass(slots=True)
class Walk(Calls):
    """One entry script, walked until nothing new is learnt: what is known and recorded of it."""

    def learnt(self) -> int:
        """How much is known that a further pass could build on; it only ever grows."""
        return self.size() + sum(map(len, self._returns.values()))

    def start(self) -> None:
        """Walk once, from parsing to the end."""
        self.record.clear()
        self._walked.clear()
        self._tables.clear()
        self._visited.clear()
        for index in range(len(self.classes)):
            for function in self.bound(Args(index), "__post_init__"):
                self.call(function, CallArguments(), ANYHOW)
        self.record.parsing = set(self.record.refusals)
        tree = self.script.tree
        frame = Frame(self.script, self.shape(tree), top=True)
        body: list[ast.stmt] = []
        for node in tree.body:
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                body += node.body
            elif not isinstance(node, _DEFINES):
                body.append(node)
        self.walk_block(body, Spot(frame, ANYHOW))

    def walk_block(self, body: Sequence[ast.stmt], at: Spot) -> Spot | None:
        """Walk statements in order; where the walk is after them, None if none goes on."""
        for statement in body:
            after = self._walk_statement(statement, at)
            if after is None:
                return None
            at = self.record.drop_outdated(after)
        return at

    def _walk_statement(self, node: ast.stmt, at: Spot) -> Spot | None:
        match node:
            case ast.Return():
                self._walk_return(node, at)
                return None
            case ast.Raise():
                self.record.add_refusal(node, at)
                return None
            case ast.Continue() | ast.Break():
                return None
            case ast.If():
                return self._walk_if(node, at)
            case ast.Assert(test=test):
                fails = ast.copy_location(ast.Raise(ast.Name("AssertionError")), node)
                return self._walk_if(ast.If(ast.UnaryOp(ast.Not(), test), [fails], []), at)
            case ast.With() | ast.AsyncWith():
                return self._walk_with(node, at)
            case ast.Try() | ast.TryStar():
                return self._walk_try(node, at)
            case ast.For() | ast.AsyncFor() | ast.While():
                at = self._walk_loop(node, at)
            case _:
                self._walk_simple(node, at)
        return self._continue_after(node, at)

    def _walk_simple(self, node: ast.stmt, at: Spot) -> None:
        """A statement that decides about no branch: assignments, definitions and imports."""
        match node:
            case ast.Assign():
                self._assign(node, at)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.store(target, self.symbolic(value, at), at)
            case ast.AugAssign(target=target, value=value):
                values = self.value(value, at)
                before = self.value(target, at)
                if not isinstance(target, ast.Name) or isinstance(value, _LITERALS):
                    self.record.add_change(before)
                self.store(target, merge(keep_objects(before), values), at)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.walk_defaults(node, at)
                # it sees the names of this one, as they are when it is called
                function = Function(at.frame.module, node, scope=at.frame)
                env = at.frame.env
                env[name] = env.get(name, NOTHING) | {function}
            case ast.Import() | ast.ImportFrom():
                module = at.frame.module
                scratch = Module(module.name, module.label, module.tree)
                scratch.bind(node)
                for name in (*scratch.imports, *scratch.modules):
                    at.frame.env[name] = self.named(scratch, name)
            case _:
                self.walk_children(node, at)

    @remember
    def _may_leave(self, node: ast.stmt) -> bool:
        return may_leave(node)

    def _continue_after(self, node: ast.stmt, at: Spot) -> Spot:
        """Where the walk is after branches: perhaps one of them has left the function."""
        return at.perhaps() if self._may_leave(node) else at

    def _walk_return(self, node: ast.Return, at: Spot) -> None:
        if node.value is None:
            return
        # its caller may know other conditions
        at.frame.returned |= drop_texts(self.value(node.value, at)) or {UNKNOWN}

    def _assign(self, node: ast.Assign, at: Spot) -> None:
        if self._puts_back(node, at.frame):
            with self.record.muted():
                self.value(node.value, at)
            if not self._makes_member(node.value, at.frame):
                self.record.add_write(mark(node.targets[0]))
            return
        values = self.symbolic(node.value, at)
        for target in node.targets:
            self.store(target, values, at)

    def _walk_if(self, node: ast.If, at: Spot) -> Spot | None:
        yes, no = self.split_branches(node.test, at)
        dead = conditions.is_impossible(yes.guards)
        # nothing that training does depends on such a test
        quiet = not node.orelse and (dead or only_complains(node.body))
        quiet = quiet or self.record.silent or self._only_puts_back(node, at.frame)
        with self.record.muted(quiet):
            self.value(node.test, at)
        yes = self.record.drop_outdated(yes)
        no = self.record.drop_outdated(no)
        if conditions.is_impossible(yes.guards) and not node.orelse:
            text = self.express_as_text(node.test, yes.frame)
            self.record.add_shadow(text, node.test, yes)
        after_yes = self._walk_branch(node.body, yes)
        after_no = self._walk_branch(node.orelse, no)
        if after_yes is not None and after_no is not None:
            return self._continue_after(node, at)
        if after_no is not None:
            return self._continue_in_branch(node.body, after_no, no, at)
        if after_yes is not None:
            return self._continue_in_branch(node.orelse, after_yes, yes, at)
        return None

    def _walk_branch(self, body: Sequence[ast.stmt], at: Spot) -> Spot | None:
        """Walk a branch, unless nothing leads into it."""
        return None if conditions.is_impossible(at.guards) else self.walk_block(body, at)

    def _continue_in_branch(
        self, body: Sequence[ast.stmt], after: Spot, taken: Spot, before: Spot
    ) -> Spot:
        """Where the walk is if only one branch goes on, and `body` is the other one."""
        if not refuses(body):
            return after
        new = taken.guards - before.guards - UNSURE
        kept = after.guards
        if after.guards == taken.guards:
            # whoever was not refused certainly gets here
            kept -= UNSURE - before.guards
        return Spot(after.frame, (kept - new) | {Passed(text) for text in new & after.guards})

    def _walk_loop(self, node: LOOPS, at: Spot) -> Spot:
        # a loop that trains has a first round, any other one perhaps none
        rounds = ANYHOW if trains(node) else UNSURE
        # what one round does to names and arguments, the next one meets
        for _ in range(2):
            start = at
            before = dict(at.frame.env)
            inside = at.under(rounds)
            if isinstance(node, ast.While):
                self.value(node.test, at)
                inside = inside.under(self.split_branches(node.test, at)[0].guards - UNSURE)
            else:
                self.store(node.target, take_entries(self.value(node.iter, at)), at)
            self.walk_block(node.body, inside)
            at = self.record.drop_outdated(at)
            if at == start and at.frame.env == before:
                break
        self.walk_block(node.orelse, at.perhaps())
        return at

    def _walk_with(self, node: ast.With | ast.AsyncWith, at: Spot) -> Spot | None:
        swallows = False
        for item in node.items:
            swallows = swallows or "suppress" in ast.unparse(item.context_expr)
            values = self.value(item.context_expr, at)
            if item.optional_vars is not None:
                self.store(item.optional_vars, values, at)
        if not swallows:
            return self.walk_block(node.body, at)
        self.walk_block(node.body, at.perhaps())
        return self._continue_after(node, at)

    def _walk_try(self, node: ast.Try | ast.TryStar, at: Spot) -> Spot | None:
        after = self.walk_block(node.body, at.perhaps() if node.handlers else at)
        if after is not None:
            after = self.walk_block(node.orelse, after)
        ends = after is None
        start = self.record.drop_outdated(at)
        for handler in node.handlers:
            if handler.name:
                at.frame.env[handler.name] = NOTHING
            if self.walk_block(handler.body, start.perhaps()) is not None:
                ends = False
        if self.walk_block(node.finalbody, start) is None or ends:
            return None
        return self._continue_after(node, at)

    def _puts_back(self, node: ast.Assign, frame: Frame) -> bool:
        """Whether a method of the arguments' own only gives one of them another form."""
        if not isinstance(frame.bound, Args):
            return False
        match node.targets:
            case [ast.Attribute(value=ast.Name(id="self"), attr=name)]:
                return name in self.record.fields and list_own_attributes(node.value) == {name}
        return False

    def _makes_member(self, value: ast.expr, frame: Frame) -> bool:
        """Whether a value stays what it is: the member of an enum for a member's value."""
        match value:
            case ast.Call(func=function, args=[ast.Attribute()], keywords=[]):
                return self.members(frame.module, function) is not None
        return False

    def _only_puts_back(self, node: ast.If, frame: Frame) -> bool:
        """Whether a test of one argument decides about nothing but that argument's own form."""
        if not isinstance(frame.bound, Args):
            return False
        tested = list_own_attributes(node.test)
        if len(tested) != 1 or not tested <= self.record.fields:
            return False
        for statement in (*node.body, *node.orelse):
            match statement:
                case ast.Assign(
                    targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value
                ):
                    if name not in tested or not list_own_attributes(value) <= tested:
                        return False
                case ast.Expr(value=ast.Call() as call):
                    if not self.shows(call):
                        return False
                case _:
                    return False
        return True
