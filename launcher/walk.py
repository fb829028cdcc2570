"""The walk along an entry script, statement by statement, under the conditions known there.

It errs on the side of `read`; `reads` says what counts as reading at all.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from launcher import conditions
from launcher.calls import LOGS, SHOWS
from launcher.expressions import Expressions, own_attributes
from launcher.flow import (
    INLINE,
    NOTHING,
    UNKNOWN,
    Args,
    Class,
    Frame,
    Function,
    Given,
    Object,
    entries,
    merged,
    objects,
    within,
    without_texts,
)
from launcher.lookup import last
from launcher.sources import Module
from launcher.trace import ANYHOW, UNSURE, Guards, Passed

_ENDS = {"sys.exit", "os._exit", "exit", "quit", "os.abort", "os.execv", "os.execvp", "os.execvpe"}
_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
_LITERALS = ast.List | ast.ListComp | ast.Set | ast.SetComp | ast.Dict | ast.DictComp | ast.Tuple
_LEAVES = ast.Return | ast.Break | ast.Continue
_LOOPS = ast.For | ast.AsyncFor | ast.While


@dataclass(slots=True)
class Walk(Expressions):
    """One entry script being walked, several times until nothing new is learnt."""

    def start(self) -> None:
        """Walk once, from parsing to the end."""
        for known in (self._walked, self._entered, self._visited, self._tables):
            known.clear()
        self.reads.clear()
        self.refusals.clear()
        self.assumed.clear()
        self.written.clear()
        self.reshaped.clear()
        for index in range(len(self.classes)):
            for function in self.bound(Args(index), "__post_init__"):
                self._call(function, Given(), ANYHOW)
        self.parsing = set(self.refusals)
        before = self._count
        self._script()
        main = self.script.functions.get("main")
        if self._count == before and main is not None:
            given = Given([frozenset({Args(i)}) for i in range(len(self.classes))])
            self._call(Function(self.script.name, main), given, ANYHOW)

    def _script(self) -> None:
        """The statements of the script's own level, the `__main__` block among them."""
        frame = Frame(self.script, self.shape(self.script.tree), top=True)
        guards: Guards | None = ANYHOW
        for node in self.script.tree.body:
            if guards is None or isinstance(node, _DEFINES):
                continue
            main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            body = node.body if main and isinstance(node, ast.If) else [node]
            guards = self._block(body, frame, guards)
        self._finished(frame)

    def body(self, statements: Sequence[ast.stmt], frame: Frame, guards: Guards) -> None:
        """Walk the statements of a function."""
        self._block(statements, frame, guards)
        self._finished(frame)

    # --- statements ----------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], frame: Frame, guards: Guards) -> Guards | None:
        """Walk statements in order; the conditions that hold after them, None if none goes on."""
        for statement in body:
            if conditions.impossible(guards):
                return None
            with self._watched() as wrote:
                told = self._statement(statement, frame, guards)
            if told is None:
                return None
            guards = self._forget(wrote, frame, told)
        return guards

    def _statement(self, node: ast.stmt, frame: Frame, guards: Guards) -> Guards | None:
        match node:
            case ast.If():
                return self._if(node, frame, guards)
            case ast.Return(value=value):
                if value is not None:
                    self._return(value, frame, guards)
                return None
            case ast.Raise(exc=raised):
                self._refused(node, raised, frame, guards)
                return None
            case ast.Continue() | ast.Break():
                return None
            case ast.Expr() if _ends(node):
                self.children(node, frame, guards)
                frame.exits = True
                return None
            case ast.Assign(value=value) if self._puts_back(node, frame):
                with self._silently():
                    self.value(value, frame, guards)
                if not self._only_named(value, frame):
                    self._write(_attribute_of(node.targets[0]))
            case ast.Assign(targets=targets, value=value):
                held = self.held(value, frame, guards)
                for target in targets:
                    self._store(target, held, frame, guards)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._store(target, self.held(value, frame, guards), frame, guards)
            case ast.AugAssign(target=target, value=value):
                self._augmented(target, value, frame, guards)
            case ast.Delete(targets=targets):
                for target in targets:
                    self._store(target, NOTHING, frame, guards)
            case ast.Assert(test=test):
                return self._assert(node, test, frame, guards)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, frame, guards)
            case ast.With() | ast.AsyncWith():
                return self._with(node, frame, guards)
            case ast.Try() | ast.TryStar():
                return self._try(node, frame, guards)
            case ast.Match():
                return self._match(node, frame, guards)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._nested(node, frame, guards)
            case ast.ClassDef():
                self._class(node, frame, guards)
            case ast.Import() | ast.ImportFrom():
                self._import(node, frame)
            case _:
                self.children(node, frame, guards)
        return guards

    def _return(self, value: ast.expr, frame: Frame, guards: Guards) -> None:
        held = self.held(value, frame, guards)
        if frame.shape.single:
            frame.returned |= held
        else:
            # what the other ways out give back is something else
            frame.returned |= without_texts(held) or {UNKNOWN}

    def _if(self, node: ast.If, frame: Frame, guards: Guards) -> Guards | None:
        say = self._say(frame)
        taken = self._taken(node.test, say)
        yes, no = guards | taken[0], guards | taken[1]
        dead = conditions.impossible(yes)
        quiet = (_only_complains(node.body) or dead) and not node.orelse
        quiet = quiet or self._only_puts_back(node, frame)
        with self._watched() as wrote, self._silently(quiet):
            # nothing that training does depends on such a test
            self.value(node.test, frame, guards)
        yes, no = self._forget(wrote, frame, yes), self._forget(wrote, frame, no)
        dead = conditions.impossible(yes)
        if dead and not node.orelse:
            self._shadowed(node.test, frame, yes)
        after_yes = None if dead else self._block(node.body, frame, yes)
        after_no = None
        if not conditions.impossible(no):
            after_no = self._block(node.orelse, frame, no) if node.orelse else no
        if after_yes is None and after_no is not None:
            return self._passed(node.body, after_no, no, guards)
        if after_no is None and after_yes is not None:
            return self._passed(node.orelse, after_yes, yes, guards)
        return None if after_no is None else self._after(guards, node)

    def _passed(
        self, body: Sequence[ast.stmt], after: Guards, taken: Guards, before: Guards
    ) -> Guards:
        """The conditions where only one branch goes on; whether the other one surely raises matters."""
        if not _refuses(body):
            return after
        new = taken - before - UNSURE
        if all(isinstance(c, Passed) for c in before):
            self.assumed |= new
        # whoever was not refused certainly gets here
        kept = after - (UNSURE - before) if after == taken else after
        return (kept - new) | frozenset(Passed(c) for c in new & after)

    def _assert(self, node: ast.stmt, test: ast.expr, frame: Frame, guards: Guards) -> Guards:
        yes, no = self._taken(test, self._say(frame))
        with self._silently(), self._watched() as wrote:
            self.value(test, frame, guards)
        self._refused(node, ast.Name("AssertionError"), frame, guards | no)
        new = self._forget(wrote, frame, yes - guards - UNSURE)
        return guards | frozenset(Passed(c) for c in new)

    def _loop(self, node: _LOOPS, frame: Frame, guards: Guards) -> Guards:
        # the loop that trains has a first round, any other one perhaps none
        rounds = ANYHOW if _trains(node) else UNSURE
        for _ in range(3):
            before = dict(frame.env)
            with self._watched() as wrote:
                inner = guards | rounds
                if isinstance(node, ast.While):
                    self.value(node.test, frame, guards)
                    inner |= self._taken(node.test, self._say(frame))[0] - UNSURE
                else:
                    held = self.value(node.iter, frame, guards)
                    self._store(node.target, entries(held), frame, guards)
                self._block(node.body, frame, inner)
            # what one round does to names and arguments, the next one meets
            known = self._forget(wrote, frame, guards)
            again = known != guards or any(
                self.carries(held - before.get(name, NOTHING)) for name, held in frame.env.items()
            )
            guards = known
            if not again:
                break
        self._block(node.orelse, frame, guards | UNSURE)
        return self._after(guards, node)

    def _with(self, node: ast.With | ast.AsyncWith, frame: Frame, guards: Guards) -> Guards | None:
        swallows = False
        for item in node.items:
            swallows |= "suppress" in ast.unparse(item.context_expr)
            held = self.value(item.context_expr, frame, guards)
            if item.optional_vars is not None:
                self._store(item.optional_vars, held, frame, guards)
        after = self._block(node.body, frame, guards | UNSURE if swallows else guards)
        return self._after(guards, node) if swallows else after

    def _try(self, node: ast.Try | ast.TryStar, frame: Frame, guards: Guards) -> Guards | None:
        perhaps = guards | UNSURE
        with self._watched() as wrote:
            after = self._block(node.body, frame, perhaps if node.handlers else guards)
        if after is not None:
            after = self._block(node.orelse, frame, after)
        unsure = self._forget(wrote, frame, guards)
        handled = []
        for handler in node.handlers:
            if handler.name:
                frame.env[handler.name] = NOTHING
            handled.append(self._block(handler.body, frame, unsure | UNSURE))
        last = self._block(node.finalbody, frame, unsure)
        ends = after is None and all(told is None for told in handled)
        return None if ends or last is None else self._after(guards, node)

    def _match(self, node: ast.Match, frame: Frame, guards: Guards) -> Guards:
        held = self.held(node.subject, frame, guards)
        for case in node.cases:
            for part in ast.walk(case.pattern):
                match part:
                    case ast.MatchClass(kwd_attrs=names):
                        for name in names:
                            self.part(held, name, part, frame, guards)
                    case ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
                        frame.env[name] = merged(held, NOTHING)
                    case ast.MatchMapping(rest=str() as name):
                        frame.env[name] = NOTHING
            self.children(case.pattern, frame, guards)
            if case.guard is not None:
                self.value(case.guard, frame, guards)
            self._block(case.body, frame, guards | UNSURE)
        return self._after(guards, node)

    def _after(self, guards: Guards, node: ast.stmt) -> Guards:
        """The conditions that are known after branches; perhaps one of them has left the function."""
        if node not in self._leaving:
            # a loop's own `break` and `continue` lead to what stands behind it
            leaves = ast.Return if isinstance(node, _LOOPS) else _LEAVES
            self._leaving[node] = any(isinstance(n, leaves) or _ends(n) for n in within(node))
        return guards | UNSURE if self._leaving[node] else guards

    def _nested(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame, guards: Guards
    ) -> None:
        """A function inside a function sees its names, as they are when it is called."""
        self.defined(node, frame, guards)
        function = Function(frame.module.name, node, scope=frame)
        before = frame.env.get(node.name, NOTHING)
        frame.env[node.name] = before | {function}
        frame.nested.append((function, guards))

    def defined(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        frame: Frame,
        guards: Guards,
    ) -> None:
        """What is evaluated where a function is defined: standard values and decorators."""
        marks = [] if isinstance(node, ast.Lambda) else node.decorator_list
        for one in (*node.args.defaults, *node.args.kw_defaults, *marks):
            if one is not None:
                self.value(one, frame, guards)

    def _finished(self, frame: Frame) -> None:
        """At the end of a function: those inside it that somebody unseen may call."""
        for function, guards in frame.nested:
            node = function.node
            assert not isinstance(node, ast.Lambda)
            shared = node.name in frame.shape.passed_on or node.decorator_list
            if shared or node not in self._entered:
                self._call(function, Given(), guards | UNSURE)

    def _class(self, node: ast.ClassDef, frame: Frame, guards: Guards) -> None:
        """A class inside a function: its methods see the function's names."""
        key = (frame.module.name, f"{node.name}@{node.lineno}")
        self.local[key] = (frame.module, node, frame)
        frame.env[node.name] = frozenset({Class(*key)})
        for part in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
            self.value(part, frame, guards)
        inner = Frame(frame.module, INLINE, outer=frame)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.defined(statement, frame, guards)
            else:
                self._statement(statement, inner, guards)
        self._all_methods(Object(*key), guards | UNSURE)

    def _import(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        scratch = Module(frame.module.name, frame.module.label, frame.module.tree)
        scratch.bind(node)
        for name in (*scratch.imports, *scratch.modules):
            frame.env[name] = self.named(scratch, name, frame)

    def _augmented(self, target: ast.expr, value: ast.expr, frame: Frame, guards: Guards) -> None:
        held = self.value(value, frame, guards)
        load = ast.copy_location(_loaded(target), target)
        name = _attribute_of(target)
        own = isinstance(frame.bound, Args) and ast.unparse(target) == f"self.{name}"
        with self._silently(own):
            before = self.value(load, frame, guards)
        if not isinstance(target, ast.Name) or isinstance(value, _LITERALS):
            self._changed(before, target, frame)
        self._store(target, merged(objects(before), held), frame, guards)

    def _puts_back(self, node: ast.Assign, frame: Frame) -> bool:
        """Whether a method of the arguments' own only gives one of them another form."""
        match node.targets:
            case [ast.Attribute(value=ast.Name(id="self"), attr=name)] if name in self.fields:
                return isinstance(frame.bound, Args) and own_attributes(node.value) == {name}
        return False

    def _only_named(self, value: ast.expr, frame: Frame) -> bool:
        """Whether a value stays what it is: the member of an enum for a member's value."""
        match value:
            case ast.Call(func=function, args=[ast.Attribute()], keywords=[]):
                return self.is_enum(frame.module, function)
        return isinstance(value, ast.Attribute)

    def _only_puts_back(self, node: ast.If, frame: Frame) -> bool:
        """Whether a test of one argument decides about nothing but that argument's own form."""
        name = next(iter(own_attributes(node.test)), None)
        if not isinstance(frame.bound, Args) or own_attributes(node.test) != {name}:
            return False
        for statement in (*node.body, *node.orelse):
            match statement:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)]):
                    if attr != name or not own_attributes(statement.value) <= {name}:
                        return False
                case ast.Expr(value=ast.Call() as call) if self._shows(call):
                    continue
                case _:
                    return False
        return name in self.fields


def _attribute_of(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else None


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression that is read."""
    match target:
        case ast.Attribute(value=value, attr=name):
            return ast.Attribute(value, name, ast.Load())
        case ast.Subscript(value=value, slice=key):
            return ast.Subscript(value, key, ast.Load())
        case ast.Name(id=name):
            return ast.Name(name, ast.Load())
    return target


def _only_complains(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch only raises, warns or logs."""
    complains = False
    for node in body:
        match node:
            case ast.Raise():
                complains = True
            case ast.If(body=inner, orelse=other) if _only_complains([*inner, *other]):
                complains = True
            case ast.Expr(value=ast.Call(func=function)):
                if last(function) not in LOGS | SHOWS:
                    return False
                complains = True
            case ast.Assign(
                targets=[ast.Name()], value=ast.JoinedStr() | ast.Constant(value=str())
            ):
                # the text of the complaint
                continue
            case _:
                return False
    return complains


def _refuses(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch ends in a `raise`, whatever happens in it."""
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    inside = (node for statement in body for node in within(statement))
    return not any(isinstance(node, _LEAVES) or _ends(node) for node in inside)


def _trains(loop: ast.stmt) -> bool:
    """Whether a loop takes a gradient or an optimizer's step in its own statements."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"backward", "step"}
        for node in within(loop)
    )


def _ends(node: ast.AST) -> bool:
    """Whether a statement ends the script on purpose."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in _ENDS
    )
