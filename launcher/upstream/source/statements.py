"""The walk along an entry script, statement by statement, under the conditions known there.

It errs on the side of `read`; `reads` says what counts as reading at all. A condition is kept only
while nothing has changed the values that it is about.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace

from launcher.lazy_dataclass import dataclass
from launcher.upstream.schema import Shadow
from launcher.upstream.source import conditions
from launcher.upstream.source.conditions import PERHAPS
from launcher.upstream.source.packages import Module, mark
from launcher.upstream.source.values import (
    ANY,
    DEFAULT,
    FUNCTIONS,
    NOTHING,
    UNKNOWN,
    Args,
    CallArguments,
    Class,
    ClassKey,
    Container,
    Default,
    Frame,
    Function,
    FunctionNode,
    FunctionShape,
    Items,
    Lookup,
    Method,
    ModuleValue,
    Object,
    Super,
    Text,
    Unknown,
    Value,
    Values,
    carried,
    contents,
    entries,
    functions_in,
    leaves,
    listed,
    merged,
    objects,
    parameters_of,
    remembered,
    shallow,
    within,
    without_texts,
)

# methods of the parser that return one object for each dataclass
_PARSES = {"parse_args_into_dataclasses", "parse_args_and_config", "parse", "parse_args"}
_LOGS = frozenset("debug info warning warning_once warning_rank0 error exception critical".split())
_SHOWS = frozenset({"print", "pprint", "warn", "warn_once", "print_rank0"})
_LOGGER = re.compile(r"(^|[._])log(s|ger|gers|ging)?([._(]|$)", re.IGNORECASE)
_PUTS = frozenset("append appendleft add extend insert update setdefault put push".split())
_CHANGES = _PUTS | {"pop", "popitem", "clear", "remove", "discard", "sort", "reverse"}
_COLLECTS = frozenset(
    "dict list tuple set frozenset zip enumerate reversed sorted iter next chain itertools".split()
)
_COPIES = {"copy", "deepcopy", "replace", "cast"}
_AS_MAPPING = {"vars", "asdict"}
_MAX_GUARDS = 16  # one function under more sets of conditions than this is walked without any
_MAX_DEPTH = 60
_TABLES = ast.Dict | ast.List | ast.Tuple | ast.Name | ast.Attribute
_DEFINES = FUNCTIONS | ast.ClassDef | ast.Import | ast.ImportFrom
_LITERALS = ast.List | ast.ListComp | ast.Set | ast.SetComp | ast.Dict | ast.DictComp | ast.Tuple
_LEAVES = ast.Return | ast.Break | ast.Continue
_LOOPS = ast.For | ast.AsyncFor | ast.While
_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp

Guards = frozenset[str]
ANYHOW: Guards = frozenset()
UNSURE: Guards = frozenset({PERHAPS})


class _Inexpressible(Exception):
    """An expression is about something else than arguments."""


class Passed(str):
    """A condition that holds because the path would have ended in a `raise` otherwise."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the walk is: in which function, and the conditions that hold there."""

    frame: Frame
    guards: Guards

    def under(self, guards: Guards) -> Spot:
        return Spot(self.frame, self.guards | guards)

    def perhaps(self) -> Spot:
        return self.under(UNSURE)


@dataclass(slots=True)
class Walk(Lookup):
    """One entry script, walked until nothing new is learnt: what is known and recorded of it."""

    script: Module = field(kw_only=True)
    fields: frozenset[str] = field(kw_only=True)
    recorders: frozenset[str] = frozenset()
    reads: dict[str, dict[str, set[Guards]]] = field(default_factory=dict)
    refusals: dict[str, set[tuple[Guards, str]]] = field(default_factory=dict)
    shadows: dict[str, Shadow] = field(default_factory=dict)
    # arguments that the script itself gives other values, as far as it was walked, and how often
    written: dict[str, int] = field(default_factory=dict)
    # those of them that keep their truth: entries of a list are given another form
    reshaped: set[str] = field(default_factory=set)
    # the places of refusals inside `__post_init__`
    parsing: set[str] = field(default_factory=set)
    # the functions that were walked, each with its module
    ran: dict[FunctionNode, Module] = field(default_factory=dict)
    _walked: dict[object, list[Guards]] = field(default_factory=dict)
    _visited: set[object] = field(default_factory=set)
    _tables: dict[tuple[Module, str], Values] = field(default_factory=dict)
    # kept from pass to pass: what calls return, write, and see
    _returns: dict[object, set[Value]] = field(default_factory=dict)
    _frames: dict[object, Frame] = field(default_factory=dict)
    _silent: bool = False
    _active: set[ast.AST] = field(default_factory=set)
    _depth: int = 0

    def learnt(self) -> int:
        """How much is known that a further pass could build on; it only ever grows."""
        return self.size() + sum(map(len, self._returns.values()))

    def stands(self, text: str) -> bool:
        """Whether a condition is about the stage file's values, as far as the script was walked."""
        names = conditions.names(text)
        if not names <= self.fields - self.written.keys():
            return False
        return names.isdisjoint(self.reshaped) or not conditions.compares(text)

    def start(self) -> None:
        """Walk once, from parsing to the end."""
        for table in (self._walked, self._tables, self.reads, self.refusals, self.written):
            table.clear()
        self._visited.clear()
        self.reshaped.clear()
        for index in range(len(self.classes)):
            for function in self.bound(Args(index), "__post_init__"):
                self._call(function, CallArguments(), ANYHOW)
        self.parsing = set(self.refusals)
        at: Spot | None = Spot(Frame(self.script, self.shape(self.script.tree), top=True), ANYHOW)
        for node in self.script.tree.body:
            if at is None:
                return
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                at = self._walk_block(node.body, at)
            elif not isinstance(node, _DEFINES):
                at = self._walk_block([node], at)

    # what is recorded

    @contextmanager
    def _mute(self, quiet: bool = True) -> Iterator[None]:
        """Without a record of what is read; what a silent test calls is recorded again."""
        before = self._silent
        self._silent = quiet
        try:
            yield
        finally:
            self._silent = before

    def _record_read(self, name: str, node: ast.AST, at: Spot) -> None:
        if not self._silent:
            places = self.reads.setdefault(name, {})
            places.setdefault(place(node, at.frame), set()).add(at.guards)

    def _record_refusal(self, node: ast.Raise, at: Spot) -> None:
        """A `raise`: worth knowing if nothing but arguments decides whether it is reached."""
        if node.exc is None or PERHAPS in at.guards:
            return
        if all(map(self.stands, at.guards)):
            refusals = self.refusals.setdefault(place(node, at.frame), set())
            refusals.add((at.guards, mark(node.exc)))

    def _record_shadow(self, test: ast.expr, at: Spot) -> None:
        """A branch that cannot be reached: what its test reads loses against what excludes it."""
        rivals: set[str] = set()
        for text in at.guards:
            if conditions.negated(text) in at.guards:
                rivals |= _find_arguments(text)
        for name in _find_arguments(self._express_as_text(test, at.frame) or PERHAPS) - rivals:
            self.shadows[name] = Shadow(where=place(test, at.frame), by=tuple(sorted(rivals)))

    def _record_write(self, name: str) -> None:
        if name in self.fields:
            self.written[name] = self.written.get(name, 0) + 1

    def _record_change(self, values: Values) -> None:
        """A value is changed in place: that of an argument, perhaps."""
        for value in values:
            if isinstance(value, Text):
                for name in _find_arguments(value.text):
                    self._record_write(name)

    # conditions

    def _version_name(self, name: str) -> str:
        """An argument's name in conditions: each write of it makes a new name."""
        count = self.written.get(name)
        return name if count is None else f"{name}·{count}"

    def _drop_outdated(self, at: Spot) -> Spot:
        """The conditions that are known after arguments may have got other values."""
        outdated = frozenset(text for text in at.guards if not self._is_current(text))
        if not outdated:
            return at
        kept = Spot(at.frame, at.guards - outdated)
        # with a condition less, what follows happens for certain no longer
        return kept if _are_passed(outdated) else kept.perhaps()

    def _is_current(self, text: str) -> bool:
        return all(
            self._version_name(_strip_version(name)) == name for name in conditions.names(text)
        )

    def _split_branches(self, test: ast.expr, at: Spot) -> tuple[Spot, Spot]:
        """Where the walk is if a test is true, and if it is false."""
        texts: dict[ast.expr, str | None] = {}

        def say(node: ast.expr) -> str | None:
            if node not in texts:
                text = self._express_as_text(node, at.frame)
                # a condition that names no argument says nothing about a stage file
                texts[node] = text if text is not None and conditions.names(text) else None
            return texts[node]

        return (
            at.under(conditions.implied(test, True, say)),
            at.under(conditions.implied(test, False, say)),
        )

    def _express_as_text(self, node: ast.expr, frame: Frame) -> str | None:
        """An expression with argument names for the objects that they belong to, if it can be."""
        try:
            return ast.unparse(self._express(node, frame))
        except _Inexpressible:
            return None

    def _express(self, node: ast.expr, frame: Frame) -> ast.expr:
        match node:
            case ast.Constant():
                return node
            case ast.Name():
                return self._express_name(node, frame)
            case ast.Attribute(value=ast.Name() | ast.Attribute()):
                return self._express_attribute(node, frame)
            case ast.Compare():
                left = self._express(node.left, frame)
                comparators = self._express_all(node.comparators, frame)
                return ast.Compare(left, node.ops, comparators)
            case ast.BoolOp():
                return ast.BoolOp(node.op, self._express_all(node.values, frame))
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                return ast.UnaryOp(node.op, self._express(node.operand, frame))
            case ast.Tuple() | ast.List() | ast.Set():
                return ast.Tuple(self._express_all(node.elts, frame), ast.Load())
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=name), *_]):
                if isinstance(owner, ast.Name | ast.Attribute) and isinstance(name, str):
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
                return conditions.parsed(text)
        raise _Inexpressible

    def _express_attribute(self, node: ast.Attribute, frame: Frame) -> ast.expr:
        if node.attr in self.fields:
            with self._mute():
                owners = self.value(node.value, Spot(frame, UNSURE))
            owners -= {DEFAULT}
            if owners and all(isinstance(owner, Args) for owner in owners):
                return ast.Name(self._version_name(node.attr), ast.Load())
        root = _find_root(node)
        if isinstance(root, ast.Name) and frame.find(root.id) is None:
            return self._express_literal(node, frame)
        raise _Inexpressible

    def _express_literal(self, node: ast.expr, frame: Frame) -> ast.expr:
        literal = self.literal(frame.module, node)
        if literal is None:
            raise _Inexpressible
        return literal

    def _find_constant_text(self, node: ast.expr, frame: Frame) -> str | None:
        if isinstance(node, ast.Name) and frame.find(node.id) is not None:
            return None
        match self.literal(frame.module, node):
            case ast.Constant(value=str() as text):
                return text
        return None

    def _find_possible_names(self, name: ast.expr, frame: Frame) -> set[str]:
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
        return {text for text in texts if isinstance(text, str) and text in self.fields}

    # statements

    def _walk_block(self, body: Sequence[ast.stmt], at: Spot) -> Spot | None:
        """Walk statements in order; where the walk is after them, None if none goes on."""
        for statement in body:
            after = self._walk_statement(statement, at)
            if after is None:
                return None
            at = self._drop_outdated(after)
        return at

    def _walk_statement(self, node: ast.stmt, at: Spot) -> Spot | None:
        match node:
            case ast.If():
                return self._walk_if(node, at)
            case ast.Return():
                self._walk_return(node, at)
                return None
            case ast.Raise():
                self._record_refusal(node, at)
                return None
            case ast.Continue() | ast.Break():
                return None
            case ast.Assign():
                self._assign(node, at)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._store(target, self.symbolic(value, at), at)
            case ast.AugAssign(target=target, value=value):
                values = self.value(value, at)
                before = self.value(target, at)
                if not isinstance(target, ast.Name) or isinstance(value, _LITERALS):
                    self._record_change(before)
                self._store(target, merged(objects(before), values), at)
            case ast.Assert(test=test):
                fails = ast.copy_location(ast.Raise(ast.Name("AssertionError")), node)
                return self._walk_if(ast.If(ast.UnaryOp(ast.Not(), test), [fails], []), at)
            case ast.For() | ast.AsyncFor() | ast.While():
                at = self._walk_loop(node, at)
            case ast.With() | ast.AsyncWith():
                return self._walk_with(node, at)
            case ast.Try() | ast.TryStar():
                return self._walk_try(node, at)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._walk_defaults(node, at)
                # it sees the names of this one, as they are when it is called
                function = Function(at.frame.module, node, scope=at.frame)
                env = at.frame.env
                env[name] = env.get(name, NOTHING) | {function}
            case ast.Import() | ast.ImportFrom():
                module = at.frame.module
                scratch = Module(module.name, module.label, module.tree)
                scratch.bind(node)
                for name in (*scratch.imports, *scratch.modules):
                    at.frame.env[name] = self.named(scratch, name, at.frame)
            case _:
                self._walk_children(node, at)
        return self._continue_after(node, at)

    @remembered
    def _may_leave(self, node: ast.stmt) -> bool:
        # a loop's own `break` and `continue` lead to what stands behind it
        leaves = ast.Return if isinstance(node, _LOOPS) else _LEAVES
        return any(isinstance(inner, leaves) for inner in within(node))

    def _continue_after(self, node: ast.stmt, at: Spot) -> Spot:
        """Where the walk is after branches: perhaps one of them has left the function."""
        return at.perhaps() if self._may_leave(node) else at

    def _walk_return(self, node: ast.Return, at: Spot) -> None:
        if node.value is None:
            return
        # its caller may know other conditions
        at.frame.returned |= without_texts(self.value(node.value, at)) or {UNKNOWN}

    def _assign(self, node: ast.Assign, at: Spot) -> None:
        if self._puts_back(node, at.frame):
            with self._mute():
                self.value(node.value, at)
            if not self._makes_member(node.value, at.frame):
                self._record_write(mark(node.targets[0]))
            return
        values = self.symbolic(node.value, at)
        for target in node.targets:
            self._store(target, values, at)

    def _walk_if(self, node: ast.If, at: Spot) -> Spot | None:
        yes, no = self._split_branches(node.test, at)
        dead = conditions.impossible(yes.guards)
        # nothing that training does depends on such a test
        quiet = not node.orelse and (dead or _only_complains(node.body))
        with self._mute(self._silent or quiet or self._only_puts_back(node, at.frame)):
            self.value(node.test, at)
        yes = self._drop_outdated(yes)
        no = self._drop_outdated(no)
        dead = conditions.impossible(yes.guards)
        if dead and not node.orelse:
            self._record_shadow(node.test, yes)
        after_yes = None
        if not dead:
            after_yes = self._walk_block(node.body, yes)
        after_no = None
        if not conditions.impossible(no.guards):
            after_no = self._walk_block(node.orelse, no)
        if after_yes is not None and after_no is not None:
            return self._continue_after(node, at)
        if after_no is not None:
            return self._continue_in_branch(node.body, after_no, no, at)
        if after_yes is not None:
            return self._continue_in_branch(node.orelse, after_yes, yes, at)
        return None

    def _continue_in_branch(
        self, body: Sequence[ast.stmt], after: Spot, taken: Spot, before: Spot
    ) -> Spot:
        """Where the walk is if only one branch goes on, and `body` is the other one."""
        if not _refuses(body):
            return after
        new = taken.guards - before.guards - UNSURE
        kept = after.guards
        if after.guards == taken.guards:
            # whoever was not refused certainly gets here
            kept -= UNSURE - before.guards
        return Spot(after.frame, (kept - new) | {Passed(text) for text in new & after.guards})

    def _walk_loop(self, node: _LOOPS, at: Spot) -> Spot:
        # a loop that trains has a first round, any other one perhaps none
        rounds = ANYHOW if _trains(node) else UNSURE
        # what one round does to names and arguments, the next one meets
        for _ in range(2):
            start = at
            before = dict(at.frame.env)
            inside = at.under(rounds)
            if isinstance(node, ast.While):
                self.value(node.test, at)
                inside = inside.under(self._split_branches(node.test, at)[0].guards - UNSURE)
            else:
                self._store(node.target, entries(self.value(node.iter, at)), at)
            self._walk_block(node.body, inside)
            at = self._drop_outdated(at)
            if at == start and at.frame.env == before:
                break
        self._walk_block(node.orelse, at.perhaps())
        return at

    def _walk_with(self, node: ast.With | ast.AsyncWith, at: Spot) -> Spot | None:
        swallows = False
        for item in node.items:
            swallows = swallows or "suppress" in ast.unparse(item.context_expr)
            values = self.value(item.context_expr, at)
            if item.optional_vars is not None:
                self._store(item.optional_vars, values, at)
        if not swallows:
            return self._walk_block(node.body, at)
        self._walk_block(node.body, at.perhaps())
        return self._continue_after(node, at)

    def _walk_try(self, node: ast.Try | ast.TryStar, at: Spot) -> Spot | None:
        after = self._walk_block(node.body, at.perhaps() if node.handlers else at)
        if after is not None:
            after = self._walk_block(node.orelse, after)
        ends = after is None
        start = self._drop_outdated(at)
        for handler in node.handlers:
            if handler.name:
                at.frame.env[handler.name] = NOTHING
            if self._walk_block(handler.body, start.perhaps()) is not None:
                ends = False
        if self._walk_block(node.finalbody, start) is None or ends:
            return None
        return self._continue_after(node, at)

    def _walk_defaults(self, node: FunctionNode, at: Spot) -> None:
        """What is evaluated where a function is defined: standard values and decorators."""
        nodes = [*node.args.defaults, *node.args.kw_defaults]
        if not isinstance(node, ast.Lambda):
            nodes += node.decorator_list
        for inner in nodes:
            if inner is not None:
                self.value(inner, at)

    def _puts_back(self, node: ast.Assign, frame: Frame) -> bool:
        """Whether a method of the arguments' own only gives one of them another form."""
        match node.targets:
            case [ast.Attribute(value=ast.Name(id="self"), attr=name)] if name in self.fields:
                return isinstance(frame.bound, Args) and own_attributes(node.value) == {name}
        return False

    def _makes_member(self, value: ast.expr, frame: Frame) -> bool:
        """Whether a value stays what it is: the member of an enum for a member's value."""
        match value:
            case ast.Call(func=function, args=[ast.Attribute()], keywords=[]):
                return self.members(frame.module, function) is not None
        return False

    def _only_puts_back(self, node: ast.If, frame: Frame) -> bool:
        """Whether a test of one argument decides about nothing but that argument's own form."""
        tested = own_attributes(node.test)
        if not isinstance(frame.bound, Args) or len(tested) != 1 or not tested <= self.fields:
            return False
        for statement in (*node.body, *node.orelse):
            match statement:
                case ast.Assign(
                    targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value
                ):
                    if name not in tested or not own_attributes(value) <= tested:
                        return False
                case ast.Expr(value=ast.Call() as call):
                    if not self._shows(call):
                        return False
                case _:
                    return False
        return True

    # calls

    def _evaluate_call(self, node: ast.Call, at: Spot) -> Values:
        if self._shows(node):
            with self._mute():
                self._walk_children(node, at)
            return NOTHING
        special = self._call_special(node, at)
        if special is not None:
            return special
        function = node.func
        if not isinstance(function, ast.Attribute):
            targets = self.value(function, at)
            return self._follow(node, targets, self._evaluate_arguments(node, at), at)
        owners = self.value(function.value, at)
        arguments = self._evaluate_arguments(node, at)
        result = self._call_container_method(node, function, owners, arguments, at)
        if result is not None:
            return result
        targets = self.part(owners, function.attr, function, at)
        return self._follow(node, targets, arguments, at)

    def _follow(
        self, node: ast.Call, targets: Values, arguments: CallArguments, at: Spot
    ) -> Values:
        callables = [v for v in targets if isinstance(v, Function | Class | Object)]
        if not callables:
            return self._call_unknown(node.func, arguments, at)
        if UNKNOWN in targets:
            # of a wrapped function other parameters may be filled already
            rest = arguments.rest | carried(arguments.sets())
            arguments = replace(arguments, rest=rest)
        if len(targets) == 1 and not isinstance(node.func, ast.Subscript):
            return frozenset(self._call(callables[0], arguments, at.guards))
        # one of a table's entries: which one is not known
        guards = at.perhaps().guards
        results = [self._call(target, arguments, guards) for target in callables]
        return without_texts(merged(*results, NOTHING))

    def _call_unknown(self, function: ast.expr, arguments: CallArguments, at: Spot) -> Values:
        self._call_argument_functions(arguments, at)
        # a wrapper gives back what it wraps, a copy what it was made of
        back = carried(arguments.sets()) | self._unwrap_call(function, arguments, at.frame)
        if not back:
            return NOTHING
        if last(function) in _COPIES:
            for name in arguments.named:
                self._record_write(name)
            return back
        return back | listed(back) | {UNKNOWN}

    def _unwrap_call(self, function: ast.expr, arguments: CallArguments, frame: Frame) -> Values:
        """A function that is the first argument of one not followed: it may come back, wrapped."""
        root = _find_root(function)
        if not isinstance(root, ast.Name):
            return NOTHING
        if root.id in _COLLECTS:
            values = leaves(value for part in arguments.sets() for value in part)
            return listed(values) if objects(values) else NOTHING
        if not arguments.positional or frame.find(root.id) is not None:
            # a method of some object, such as `map`, gives back something else
            return NOTHING
        return frozenset(v for v in arguments.positional[0] if isinstance(v, Function))

    def _call_argument_functions(self, arguments: CallArguments, at: Spot) -> None:
        """Functions given to something that is not followed, which may call them."""
        functions: list[Value] = []
        rest: set[Value] = set()
        for values in arguments.sets():
            functions += functions_in(values)
            rest |= {v for v in entries(values) if isinstance(v, Args | Object)}
        if not functions:
            return
        rest = {value for value in rest if self.carries({value})}
        for function in functions:
            self._call(function, CallArguments(rest=frozenset(rest)), at.perhaps().guards)

    def _call_special(self, node: ast.Call, at: Spot) -> Values | None:
        """A call of Python's own functions or of the parser; None for any other."""
        match node.func, node.args:
            case ast.Name(id="super"), []:
                return self.named(at.frame.module, "super", at.frame)
            case ast.Name(id="getattr" | "hasattr"), [_, _, *_]:
                return self._call_getattr(node, at)
            case ast.Name(id="setattr" | "delattr"), [_, _, *_]:
                return self._call_setattr(node, at)
            case ast.Attribute(attr=name), _ if name in _PARSES:
                self._walk_children(node, at)
                return self._parse_arguments(name)
            case function, [argument] if last(function) in _AS_MAPPING:
                values = self.value(argument, at)
                return frozenset(Items(value.index) for value in values if isinstance(value, Args))
        return None

    def _parse_arguments(self, method: str) -> Values:
        parsed = [frozenset[Value]({Args(index)}) for index in range(len(self.classes))]
        if len(parsed) == 1 and method in {"parse", "parse_args"}:
            # a single one comes by itself
            return parsed[0]
        return frozenset({Container(tuple(parsed))})

    def _call_container_method(
        self,
        node: ast.Call,
        function: ast.Attribute,
        owners: Values,
        arguments: CallArguments,
        at: Spot,
    ) -> Values | None:
        """What a method of a list or a table gives back; None for any other object."""
        if function.attr in _CHANGES:
            self._record_change(owners)
        is_object = any(isinstance(owner, Object | Args | ModuleValue) for owner in owners)
        if function.attr in _PUTS and not is_object:
            for values in arguments.sets():
                self._put_into(function.value, contents(values) or values, at.frame)
        containers = frozenset(v for v in owners if isinstance(v, Items | Container))
        if not containers:
            return None
        # `items` gives pairs, `values` and `copy` a container, `get` an entry
        result = contents(containers) | containers | {UNKNOWN}
        if node.args:
            result |= self._take_entry(node, containers, node.args[0], at)
        return result

    def _evaluate_arguments(self, node: ast.Call, at: Spot) -> CallArguments:
        arguments = CallArguments()
        rest: list[Values] = []
        for argument in node.args:
            values = self.symbolic(argument, at)
            if isinstance(argument, ast.Starred):
                rest.append(contents(values))
            else:
                arguments.positional.append(values)
        for keyword in node.keywords:
            values = self.symbolic(keyword.value, at)
            if keyword.arg is not None:
                arguments.named[keyword.arg] = values
                continue
            for value in values:
                if isinstance(value, Items):
                    # whoever gets them all may read any of them
                    for name in self.fields:
                        self._record_read(name, node, at)
                elif isinstance(value, Container) and value.keys is not None:
                    arguments.named |= value.pairs
                elif isinstance(value, Container):
                    rest.append(contents({value}))
        arguments.rest = objects(merged(*rest))
        return arguments

    def _shows(self, node: ast.Call) -> bool:
        """Whether a call only writes to a log, to the screen, or to a record."""
        name = last(node.func)
        if name in _SHOWS or name in self.recorders:
            return True
        if name in _LOGS and isinstance(node.func, ast.Attribute):
            return _LOGGER.search(ast.unparse(node.func.value)) is not None
        return False

    def _call_getattr(self, node: ast.Call, at: Spot) -> Values:
        owner, name, *rest = node.args
        owners = self.value(owner, at)
        self.value(name, at)
        others = [self.symbolic(default, at) for default in rest]
        text = self._find_constant_text(name, at.frame)
        if text is not None:
            values = self.part(owners, text, node, at)
            if rest and text not in self.fields:
                # it may be the value for an attribute that is not there
                return merged(values, *others)
            return values
        if any(isinstance(v, Args) for v in owners) and not isinstance(at.frame.bound, Args):
            for possible in self._find_possible_names(name, at.frame):
                self._record_read(possible, node, at.perhaps())
        return NOTHING

    def _call_setattr(self, node: ast.Call, at: Spot) -> Values:
        owner, name, *rest = node.args
        values = self.symbolic(rest[0], at) if rest else NOTHING
        owners = self.value(owner, at)
        self.value(name, at)
        text = self._find_constant_text(name, at.frame)
        for value in owners:
            if text is not None:
                self._put(value, text, values)
            elif isinstance(value, Args):
                for possible in self._find_possible_names(name, at.frame):
                    self._record_write(possible)
        return NOTHING

    def _call(self, target: Value, arguments: CallArguments, guards: Guards) -> set[Value]:
        match target:
            case Class():
                return self._create_instance(target, arguments, guards)
            case Object():
                returned: set[Value] = set()
                for function in self.bound(target, "__call__"):
                    returned |= self._call(function, arguments, guards)
                return returned
            case Function(node=node):
                if isinstance(node, ast.Lambda) or node.name not in self.recorders:
                    return self._call_function(target, arguments, guards)
        return set()

    def _call_function(
        self, target: Function, arguments: CallArguments, guards: Guards
    ) -> set[Value]:
        """Walk a function, unless it was walked with the same under fewer conditions."""
        shape = self.shape(target.node)
        env = self._bind_parameters(target, arguments)
        if not self._concerns(target, shape, env):
            self._look_through(target.module, target.node)
            return set()
        if target.node in self._active:
            env = {name: without_texts(values) for name, values in env.items()}
        visible: set[tuple[str, Values]] = set()
        if target.scope is not None:
            for name in shape.mentioned:
                values = target.scope.find(name)
                if values:
                    visible.add((name, values))
        key = (target, frozenset(env.items()), frozenset(visible))
        returned = self._returns.setdefault(key, set())
        earlier = self._walked.setdefault(key, [])
        if self._depth <= _MAX_DEPTH and not any(seen <= guards for seen in earlier):
            if len(earlier) >= _MAX_GUARDS:
                guards = frozenset.intersection(*earlier, guards) | UNSURE
            if shape.generator or isinstance(target.node, ast.AsyncFunctionDef):
                guards |= UNSURE
            earlier.append(guards)
            frame = self._open_frame(target, env)
            frame.returned = returned
            self._run_body(target.node, Spot(frame, guards))
        return set(returned)

    def _concerns(self, target: Function, shape: FunctionShape, env: dict[str, Values]) -> bool:
        """Whether a function gets or sees the arguments, or may refuse the value of one."""
        if target.module is self.script or target.scope is not None:
            return True
        if any(name in shape.mentioned for _, name in self.globals):
            return True
        if any(map(self.carries, env.values())):
            return True
        if not shape.refuses:
            return False
        return any(isinstance(value, Text) for values in env.values() for value in values)

    def _open_frame(self, target: Function, env: dict[str, Values]) -> Frame:
        """The frame of a call: one for all calls that differ in functions and containers only.

        Functions inside this one see it; with a frame for each of their kind there would be no end.
        """
        plain: set[tuple[str, Values]] = set()
        for name, values in env.items():
            others = frozenset(v for v in values if not isinstance(v, Function | Container))
            plain.add((name, others))
        bound = None if isinstance(target.bound, Function) else target.bound
        key = (replace(target, bound=bound), frozenset(plain))
        frame = self._frames.get(key)
        if frame is None:
            frame = Frame(target.module, self.shape(target.node), target)
            self._frames[key] = frame
        for name, values in env.items():
            before = frame.parameters.get(name, NOTHING)
            frame.parameters[name] = before | values
        return frame

    def _run_body(self, node: FunctionNode, at: Spot) -> None:
        frame = at.frame
        self.ran[node] = frame.module
        around = frame.env
        frame.env = dict(frame.parameters)
        for name in frame.shape.assigned & frame.env.keys():
            frame.env[name] = without_texts(frame.env[name])
        is_recursion = node in self._active
        self._active.add(node)
        self._depth += 1
        with self._mute(False):
            if isinstance(node, ast.Lambda):
                frame.returned |= self.symbolic(node.body, at)
            else:
                self._walk_block(node.body, at)
        self._depth -= 1
        if is_recursion:
            frame.env = around
        else:
            self._active.remove(node)

    def _bind_parameters(self, target: Function, arguments: CallArguments) -> dict[str, Values]:
        signature = target.node.args
        positional = list(arguments.positional)
        if target.bound is not None:
            positional.insert(0, frozenset({target.bound}))
        places = [*signature.posonlyargs, *signature.args]
        passed = {p.arg: values for p, values in zip(places, positional, strict=False)}
        unnamed = dict(arguments.named)
        env: dict[str, Values] = {}
        for parameter in parameters_of(signature):
            name = parameter.arg
            values = unnamed.pop(name, None) or passed.get(name, NOTHING)
            if arguments.rest and not values:
                values = arguments.rest | {UNKNOWN}
            env[name] = values if values - {UNKNOWN} else self.annotated(parameter, target.module)
        if signature.vararg is not None:
            items = positional[len(places) :]
            if arguments.rest:
                items.append(arguments.rest)
            exact = not arguments.rest
            env[signature.vararg.arg] = frozenset({Container(tuple(items), exact)})
        if signature.kwarg is not None:
            if arguments.rest:
                unnamed[""] = arguments.rest
            env[signature.kwarg.arg] = _build_mapping(unnamed)
        return env

    def _create_instance(
        self, target: Class, arguments: CallArguments, guards: Guards
    ) -> set[Value]:
        key = target.key
        if key in self.ancestors:
            # one of the parsed dataclasses that the source makes itself
            return {DEFAULT}
        instance = Object(key)
        starts = self.bound(instance, "__init__")
        for function in starts:
            self._call(function, arguments, guards)
        if not starts:
            # a dataclass, or a named tuple, keeps what it is made of
            for values in arguments.sets():
                self.keep(key, ANY, objects(values))
        if self.keeps(key):
            # whoever gets an object that keeps the arguments may call any of its methods
            for _, _, method in self._list_methods(key):
                if method.name != "__init__":
                    for function in self.bound(instance, method.name):
                        self._call(function, CallArguments(), guards | UNSURE)
        return {instance}

    def _list_methods(self, key: ClassKey) -> Iterator[Method]:
        for module, owner in self.order(key):
            for statement in owner.body:
                if isinstance(statement, FUNCTIONS):
                    yield module, owner, statement

    def _look_through(self, module: Module, node: FunctionNode) -> None:
        """A function that gets no arguments may still name classes that will get them."""
        if node in self._visited:
            return
        self._visited.add(node)
        for name in sorted(self.shape(node).names):
            for value in self.named(module, name, None):
                if isinstance(value, Function) and value.module is module:
                    self._look_through(module, value.node)

    def _call_callback_methods(self, key: ClassKey) -> None:
        """A callback: a class named on the path whose methods, or a base's, take the arguments."""
        if key in self._visited or key in self.ancestors:
            return
        self._visited.add(key)
        taken: dict[str, Values] = {}
        for module, _, method in self._list_methods(key):
            for parameter in parameters_of(method.args):
                values = self.annotated(parameter, module)
                if values:
                    taken[parameter.arg] = values
        if not taken:
            return
        with self._mute(False):
            for module, owner, method in self._list_methods(key):
                if any(parameter.arg in taken for parameter in parameters_of(method.args)):
                    function = Function(module, method, Object(key), owner)
                    self._call(function, CallArguments(named=taken), UNSURE)

    # expressions

    def symbolic(self, node: ast.expr, at: Spot) -> Values:
        """What an expression may hold, as an expression over arguments if it is one."""
        values = self.value(node, at)
        if isinstance(node, ast.BoolOp) and not objects(without_texts(values)) - {DEFAULT}:
            values = NOTHING
        if values:
            return values
        text = self._express_as_text(node, at.frame)
        return NOTHING if text is None else frozenset({Text(text)})

    def value(self, node: ast.expr, at: Spot) -> Values:
        """What an expression may hold; records the arguments that it reads."""
        match node:
            case ast.Constant(value=value):
                return frozenset({DEFAULT}) if value is None else NOTHING
            case ast.Name(id=name):
                values = at.frame.find(name)
                return self.named(at.frame.module, name, at.frame) if values is None else values
            case ast.Attribute(value=owner, attr=name):
                return self.part(self.value(owner, at), name, node, at)
            case ast.Call():
                return self._evaluate_call(node, at)
            case ast.BoolOp():
                return self._evaluate_bool_op(node, at)
            case ast.IfExp():
                return self._evaluate_conditional(node, at)
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return self._evaluate_sequence(items, at)
            case ast.Dict():
                return self._evaluate_dict(node, at)
            case ast.Subscript(value=owner, slice=key):
                self.value(key, at)
                return self._take_entry(node, self.value(owner, at), key, at)
            case ast.Lambda():
                self._walk_defaults(node, at)
                function = Function(at.frame.module, node, scope=at.frame)
                self._call(function, CallArguments(), at.perhaps().guards)
                return frozenset({function})
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._evaluate_comprehension(node, at)
            case ast.NamedExpr(target=target, value=value):
                with self._mute(False):
                    values = self.symbolic(value, at)
                self._store(target, values, at)
                return values
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.value(value, at)
        self._walk_children(node, at)
        return NOTHING

    def _walk_children(self, node: ast.AST, at: Spot) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, at)
            elif isinstance(child, ast.stmt):
                # of a branch of `match`
                self._walk_block([child], at.perhaps())
            else:
                self._walk_children(child, at)

    def _evaluate_bool_op(self, node: ast.BoolOp, at: Spot) -> Values:
        sides = []
        for part in node.values:
            sides.append(self.value(part, at))
            true, false = self._split_branches(part, at)
            at = self._drop_outdated(true if isinstance(node.op, ast.And) else false)
        return merged(*sides)

    def _evaluate_conditional(self, node: ast.IfExp, at: Spot) -> Values:
        self.value(node.test, at)
        true, false = self._split_branches(node.test, at)
        sides = []
        for part, branch in ((node.body, true), (node.orelse, false)):
            branch = self._drop_outdated(branch)
            if not conditions.impossible(branch.guards):
                sides.append(self.symbolic(part, branch))
        return merged(*sides)

    def _evaluate_sequence(self, items: Sequence[ast.expr], at: Spot) -> Values:
        parts: list[Values] = []
        exact = True
        for item in items:
            values = self.symbolic(item, at)
            if isinstance(item, ast.Starred):
                exact = False
                values = contents(values)
            parts.append(shallow(values))
        return frozenset({Container(tuple(parts), exact)}) if any(parts) else NOTHING

    def _evaluate_dict(self, node: ast.Dict, at: Spot) -> Values:
        pairs: dict[str, Values] = {}
        parts: list[Values] = []
        all_named = True
        for key, value in zip(node.keys, node.values, strict=True):
            values = shallow(self.symbolic(value, at))
            if key is None:
                spread: dict[str, Values] = {}
                for inner in values:
                    if isinstance(inner, Container):
                        spread |= inner.pairs
                pairs |= spread
                parts.append(leaves(values))
                all_named = all_named and bool(spread)
                continue
            self.value(key, at)
            parts.append(values)
            match key:
                case ast.Constant(value=str() as name):
                    pairs[name] = values
                case _:
                    all_named = False
        if not any(parts):
            return NOTHING
        return (
            _build_mapping(pairs)
            if all_named
            else frozenset({Container(tuple(parts), exact=False)})
        )

    def _take_entry(self, node: ast.expr, values: Values, key: ast.expr, at: Spot) -> Values:
        """One entry of a container: the one at `key` if that is plain, else any of them."""
        results: list[Values] = []
        for value in values:
            match value:
                case Container():
                    results.append(_pick_entry(value, key))
                case Items(index):
                    text = self._find_constant_text(key, at.frame)
                    if text is not None:
                        results.append(self.part(frozenset({Args(index)}), text, node, at))
                case Unknown() | Text():
                    continue
                case _:
                    results.append(NOTHING)
        return merged(*results)

    def _evaluate_comprehension(self, node: _Comprehension, at: Spot) -> Values:
        for generator in node.generators:
            values = self.value(generator.iter, at)
            at = at.perhaps()
            self._store(generator.target, entries(values), at)
            for test in generator.ifs:
                self.value(test, at)
                at = self._split_branches(test, at)[0]
        if isinstance(node, ast.DictComp):
            self.value(node.key, at)
            element = node.value
        else:
            element = node.elt
        values = objects(self.value(element, at))
        return listed(values) if values else NOTHING

    def part(self, owners: Values, name: str, node: ast.AST, at: Spot) -> Values:
        """What an attribute of these values may hold."""
        results: list[Iterable[Value]] = []
        for owner in owners:
            match owner:
                case Args() if name in self.fields:
                    self._record_read(name, node, at)
                    results.append({Text(self._version_name(name))})
                case Super(bound=bound, owner=after):
                    results.append(self._read_properties(self.bound(bound, name, after), at))
                case Args():
                    results.append(self._read_properties(self.bound(owner, name), at))
                case Object(key) | Class(key):
                    methods = self._read_properties(self.bound(owner, name), at)
                    results.append(methods | self.stored(key, name))
                case ModuleValue(module):
                    results.append(self._find_in_module(module, name))
                case Container():
                    # of what `with` gets from a generator, or of something that holds it
                    inner = contents({owner})
                    of_entry = self.part(inner, name, node, at) if inner else inner
                    results.append(inner | of_entry)
                case Default() | Unknown():
                    continue
                case _:
                    results.append(NOTHING)
        values = merged(*results)
        return values | {UNKNOWN} if values and UNKNOWN in owners else values

    def _find_in_module(self, module: Module, name: str) -> Values:
        values = self.named(module, name, None)
        submodule = None if values else self.sources.submodule(module, name)
        return values if submodule is None else frozenset({ModuleValue(submodule)})

    def _read_properties(self, values: set[Value], at: Spot) -> Values:
        """The methods among `values` that are properties, read: what they return."""
        results: set[Value] = set()
        for value in values:
            if not isinstance(value, Function) or not _is_property(value.node):
                results.add(value)
            elif value.bound:
                results |= self._call(value, CallArguments(), at.guards)
        return frozenset(results)

    def named(self, module: Module, name: str, frame: Frame | None) -> Values:
        """What a name of a module stands for: a function, a class, a module, a table of them."""
        if name == "super" and frame is not None:
            for outer in frame.chain():
                function = outer.function
                if function is not None and function.owner and function.bound:
                    return frozenset({Super(function.bound, function.owner)})
        values = frozenset(self.globals.get((module, name), ()))
        origin = self.sources.resolve(module, name)
        if origin is None:
            named_module = self.sources.named_module(module, name)
            return values if named_module is None else values | {ModuleValue(named_module)}
        owner, name = origin
        values |= self.globals.get((owner, name), set())
        if name in owner.functions:
            return values | {Function(owner, owner.functions[name])}
        if name in owner.classes:
            key = (owner, owner.classes[name])
            self._call_callback_methods(key)
            return values | {Class(key)}
        return values | self._evaluate_constant(owner, name)

    def _evaluate_constant(self, module: Module, name: str) -> Values:
        """A table or list of functions and classes on the level of a module."""
        key = (module, name)
        if key not in self._tables:
            self._tables[key] = NOTHING
            value = module.constants[name]
            if isinstance(value, _TABLES):
                frame = Frame(module, self.shape(module.tree))
                with self._mute():
                    self._tables[key] = self.value(value, Spot(frame, ANYHOW))
        return self._tables[key]

    # assignments

    def _store(self, target: ast.expr, values: Values, at: Spot) -> None:
        match target:
            case ast.Name(id=name):
                self._store_name(name, values, at.frame)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for index, inner in enumerate(targets):
                    self._store(inner, _unpack(values, index), at)
            case ast.Attribute(value=owner, attr=name):
                for value in self.value(owner, at):
                    self._put(value, name, values)
            case ast.Subscript(value=owner, slice=key):
                self.value(key, at)
                owners = self.value(owner, at)
                own = own_attributes(owner)
                if own and isinstance(at.frame.bound, Args):
                    self.reshaped |= own
                else:
                    self._record_change(owners)
                self._put_into(owner, values, at.frame)

    def _store_name(self, name: str, values: Values, frame: Frame) -> None:
        is_global = frame.top or name in frame.shape.globals
        if is_global and self.carries(values):
            stored = self.globals.setdefault((frame.module, name), set())
            stored |= objects(values)
        if name in frame.shape.assigned:
            before = frame.env.get(name)
            if before is not None:
                values = merged(before, values)
            values = without_texts(values)
        frame.env[name] = values

    def _put(self, value: Value, name: str, values: Values) -> None:
        match value:
            case Args():
                self._record_write(name)
            case Object(key) | Class(key):
                self.keep(key, name, values)

    def _put_into(self, owner: ast.expr, values: Values, frame: Frame) -> None:
        if not self.carries(values):
            return
        entry = listed(objects(values))
        match owner:
            case ast.Name(id=name):
                before = frame.find(name) or NOTHING
                frame.env[name] = before | entry
            case ast.Attribute(value=holder, attr=name):
                for value in self.value(holder, Spot(frame, ANYHOW)):
                    self._put(value, name, entry)


def _strip_version(name: str) -> str:
    """The argument of a name in conditions; see `Walk._version_name`."""
    return name.partition("·")[0]


def _find_arguments(text: str) -> set[str]:
    return set(map(_strip_version, conditions.names(text)))


def _are_passed(guards: Guards) -> bool:
    return all(isinstance(text, Passed) for text in guards)


def _find_root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def last(node: ast.expr) -> str:
    """The last part of a function's dotted name; nothing if it has none."""
    return "" if isinstance(node, ast.Call) else mark(node)


def _is_property(node: FunctionNode) -> bool:
    if isinstance(node, ast.Lambda):
        return False
    return any(mark(decorator).endswith("property") for decorator in node.decorator_list)


def _trains(loop: _LOOPS) -> bool:
    """Whether a loop takes a gradient or a step itself."""
    for inner in within(loop):
        match inner:
            case ast.Call(func=ast.Attribute(attr="backward" | "step")):
                return True
    return False


def _only_complains(body: Sequence[ast.stmt]) -> bool:
    complains = False
    for node in body:
        match node:
            case ast.Raise():
                complains = True
            case ast.If(body=inner, orelse=other) if _only_complains([*inner, *other]):
                complains = True
            case ast.Expr(value=ast.Call(func=function)) if last(function) in _LOGS | _SHOWS:
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
    return not any(isinstance(node, _LEAVES) for node in inside)


def _unpack(values: Values, index: int) -> Values:
    """What the target at `index` gets of a value that is unpacked."""
    parts: list[Values] = []
    for value in values:
        match value:
            case Container(items=items, exact=True) if len(items) > index:
                parts.append(items[index])
            case Container():
                parts.append(contents({value}))
            case Text() | Function():
                parts.append(NOTHING)
            case _:
                parts.append(frozenset({value}))
    return merged(*parts)


def _pick_entry(container: Container, key: ast.expr) -> Values:
    items = container.items
    match key:
        case ast.Constant(value=int() as index):
            if container.exact and -len(items) <= index < len(items):
                return items[index]
        case ast.Constant(value=str() as name) if name in container.pairs:
            return container.pairs[name]
    return contents({container}) | {UNKNOWN}


def _build_mapping(pairs: Mapping[str, Values]) -> Values:
    return frozenset({Container(tuple(pairs.values()), exact=False, keys=tuple(pairs))})


def own_attributes(node: ast.AST) -> set[str]:
    """The attributes of `self` that an expression names."""
    names: set[str] = set()
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                names.add(name)
    return names


def place(node: ast.AST, frame: Frame) -> str:
    return f"{frame.module.label}:{getattr(node, 'lineno', 0)}"
