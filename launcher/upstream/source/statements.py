"""The walk along an entry script, statement by statement, under the conditions known there.

It errs on the side of `read`; `reads` says what counts as reading at all. A condition is kept only
where it speaks of values that nothing has changed since.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

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
    Class,
    Default,
    Frame,
    Function,
    FunctionNode,
    Given,
    Items,
    Key,
    Lookup,
    ModuleName,
    Object,
    Several,
    Super,
    Text,
    Unknown,
    Value,
    Values,
    carried,
    contents,
    entries,
    followable,
    last,
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
_LOGS = frozenset({"debug", "info", "warning", "warning_once", "warning_rank0", "error", "exception", "critical"})
_SHOWS = frozenset({"print", "pprint", "warn", "warn_once", "print_rank0"})
_LOGGER = re.compile(r"(^|[._])log(s|ger|gers|ging)?([._(]|$)", re.IGNORECASE)
# what these give back holds none of what they were given
_TELLS = frozenset(
    "isinstance issubclass len str repr bool int float id hash type any all sum callable format print dir".split()
)
_PUTS = frozenset("append appendleft add extend insert update setdefault put push".split())
_CHANGES = _PUTS | {"pop", "popitem", "clear", "remove", "discard", "sort", "reverse"}
_COLLECTS = frozenset("dict list tuple set frozenset zip enumerate reversed sorted iter next chain itertools".split())
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
    """An expression speaks of something else than arguments."""


class Passed(str):
    """A condition that holds because the path would have ended in a `raise` otherwise."""

    __slots__ = ()


@dataclass(slots=True)
class Walk(Lookup):
    """One entry script being walked, several times until nothing new is learnt: what is known, and
    what was found."""

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
    parsing: set[str] = field(default_factory=set)  # the places of refusals inside `__post_init__`
    # what holds because the script would have raised otherwise, wherever it got to
    assumed: set[str] = field(default_factory=set)
    # the functions that were walked, each with its module
    ran: dict[FunctionNode, str] = field(default_factory=dict)
    _walked: dict[object, list[Guards]] = field(default_factory=dict)
    _visited: set[object] = field(default_factory=set)
    _tables: dict[tuple[str, str], Values] = field(default_factory=dict)
    # kept from pass to pass: what calls return, write, and see
    _returns: dict[object, set[Value]] = field(default_factory=dict)
    _frames: dict[object, Frame] = field(default_factory=dict)
    _silent: bool = False
    _active: set[ast.AST] = field(default_factory=set)
    _depth: int = 0

    def learnt(self) -> int:
        """How much is known that a further pass could build on; it only ever grows."""
        return self.known() + sum(map(len, self._returns.values()))

    def stands(self, text: str) -> bool:
        """Whether a condition speaks of the stage file's values, as far as the script was walked."""
        names = conditions.names(text)
        return names <= self.fields - self.written.keys() and not (names & self.reshaped and conditions.compares(text))

    def _still(self, guards: Guards) -> Guards:
        """The conditions that are known after arguments may have got other values."""
        kept = frozenset(c for c in guards if all(self._now(_argument(name)) == name for name in conditions.names(c)))
        # with a condition less, what follows happens for certain no longer
        return kept if all(isinstance(c, Passed) for c in guards - kept) else kept | UNSURE

    @contextmanager
    def _silently(self, quiet: bool = True) -> Iterator[None]:
        """Without a record of what is read; what a silent test calls is recorded again."""
        before, self._silent = self._silent, quiet
        try:
            yield
        finally:
            self._silent = before

    def _read(self, name: str, where: str, guards: Guards) -> None:
        if not self._silent:
            self.reads.setdefault(name, {}).setdefault(where, set()).add(guards)

    def _refused(self, node: ast.stmt, raised: ast.expr | None, frame: Frame, guards: Guards) -> None:
        """A `raise`: worth knowing where nothing but arguments decides whether it is reached."""
        if raised is not None and PERHAPS not in guards and all(map(self.stands, guards)):
            self.refusals.setdefault(place(node, frame), set()).add((guards, mark(raised)))

    def _shadowed(self, test: ast.expr, frame: Frame, guards: Guards) -> None:
        """A branch that cannot be reached: what its test reads loses against what it contradicts."""
        against = (one for one in guards if conditions.negated(one) in guards)
        rivals = {_argument(name) for one in against for name in conditions.names(one)}
        names = map(_argument, conditions.names(self._text(test, frame) or PERHAPS))
        for name in {*names} - rivals:
            self.shadows[name] = Shadow(where=place(test, frame), by=tuple(sorted(rivals)))

    def _write(self, name: str) -> None:
        if name in self.fields:
            self.written[name] = self.written.get(name, 0) + 1

    def _now(self, name: str) -> str:
        """An argument's name in conditions: what held before it was written says nothing of it afterwards."""
        return f"{name}·{self.written[name]}" if name in self.written else name

    def _changed(self, values: Values) -> None:
        """A value is changed in place: that of an argument, perhaps."""
        for value in values:
            if isinstance(value, Text):
                for name in conditions.names(value.text):
                    self._write(_argument(name))

    def _taken(self, test: ast.expr, frame: Frame) -> tuple[Guards, Guards]:
        """What must hold where a test is true, and where it is false."""
        texts: dict[ast.expr, str | None] = {}

        def say(node: ast.expr) -> str | None:
            if node not in texts:
                text = self._text(node, frame)
                # a condition that speaks of no argument says nothing about a stage file
                texts[node] = text if text is not None and conditions.names(text) else None
            return texts[node]

        return conditions.implied(test, True, say), conditions.implied(test, False, say)

    def _text(self, node: ast.expr, frame: Frame) -> str | None:
        """An expression with argument names for the objects they belong to; None where that fails."""
        try:
            return ast.unparse(self._expressed(node, frame))
        except _Inexpressible:
            return None

    def _expressed(self, node: ast.expr, frame: Frame) -> ast.expr:
        match node:
            case ast.Constant():
                return node
            case ast.Name(id=name) if (values := frame.find(name)) is not None:
                texts = [v.text for v in values if isinstance(v, Text)]
                if len(texts) == len(values) == 1:
                    return conditions.parsed(texts[0])
            case ast.Name():
                return self._literally(node, frame)
            case ast.Attribute(value=ast.Name() | ast.Attribute() as owner, attr=name):
                return self._attribute_expressed(node, owner, name, frame)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                parts = [self._expressed(part, frame) for part in (left, *comparators)]
                return ast.Compare(parts[0], ops, parts[1:])
            case ast.BoolOp(op=op, values=parts):
                return ast.BoolOp(op, [self._expressed(part, frame) for part in parts])
            case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
                return ast.UnaryOp(op, self._expressed(operand, frame))
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name() | ast.Attribute() as owner, ast.Constant(value=str(name)), *_],
            ):
                return self._attribute_expressed(ast.Attribute(owner, name, ast.Load()), owner, name, frame)
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return ast.Tuple([self._expressed(item, frame) for item in items], ast.Load())
        raise _Inexpressible

    def _literally(self, node: ast.expr, frame: Frame) -> ast.expr:
        found = self.literal(frame.module, node)
        if found is None:
            raise _Inexpressible
        return found

    def _attribute_expressed(self, node: ast.Attribute, owner: ast.expr, name: str, frame: Frame) -> ast.expr:
        if name in self.fields:
            with self._silently():
                known = self.value(owner, frame, UNSURE) - {DEFAULT}
            if known and all(isinstance(one, Args) for one in known):
                return ast.Name(self._now(name), ast.Load())
        root = _root(owner)
        if isinstance(root, ast.Name) and frame.find(root.id) is None:
            return self._literally(node, frame)
        raise _Inexpressible

    def _constant_text(self, node: ast.expr, frame: Frame) -> str | None:
        if isinstance(node, ast.Name) and frame.find(node.id) is not None:
            return None
        found = node if isinstance(node, ast.Constant) else self.literal(frame.module, node)
        return found.value if isinstance(found, ast.Constant) and isinstance(found.value, str) else None

    def _possible_names(self, name: ast.expr, frame: Frame) -> set[str]:
        """The arguments that a computed name may be: those that its function spells out."""
        around = next((one.node for one in frame.chain() if one.node is not None), name)
        texts = [node.value for node in ast.walk(around) if isinstance(node, ast.Constant)]
        for node in ast.walk(around):
            if isinstance(node, ast.Name) and frame.find(node.id) is None:
                several = self.sources.evaluate(frame.module, node)
                texts += several if isinstance(several, list) else []
        return {text for text in texts if isinstance(text, str) and text in self.fields}

    def start(self) -> None:
        """Walk once, from parsing to the end."""
        for table in (self._walked, self._tables, self.reads, self.refusals):
            table.clear()
        for known in (self._visited, self.assumed, self.written, self.reshaped):
            known.clear()
        for index in range(len(self.classes)):
            for function in self.bound(Args(index), "__post_init__"):
                self._call(function, Given(), ANYHOW)
        self.parsing = set(self.refusals)
        frame = Frame(self.script, self.shape(self.script.tree), top=True)
        guards: Guards | None = ANYHOW
        for node in self.script.tree.body:
            if guards is None or isinstance(node, _DEFINES):
                continue
            main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            guards = self._block(node.body if main and isinstance(node, ast.If) else [node], frame, guards)

    def _block(self, body: Sequence[ast.stmt], frame: Frame, guards: Guards) -> Guards | None:
        """Walk statements in order; the conditions that hold after them, None if none goes on."""
        for statement in body:
            after = self._statement(statement, frame, guards)
            if after is None:
                return None
            guards = self._still(after)
        return guards

    def _statement(self, node: ast.stmt, frame: Frame, guards: Guards) -> Guards | None:
        match node:
            case ast.If():
                return self._if(node, frame, guards)
            case ast.Return(value=value):
                if value is not None:
                    values = self.symbolic(value, frame, guards)
                    # what the other ways out give back is something else
                    frame.returned |= values if frame.shape.single else without_texts(values) or {UNKNOWN}
                return None
            case ast.Raise(exc=raised):
                self._refused(node, raised, frame, guards)
                return None
            case ast.Continue() | ast.Break():
                return None
            case ast.Assign(value=value) if self._puts_back(node, frame):
                with self._silently():
                    self.value(value, frame, guards)
                if not self._only_named(value, frame):
                    self._write(mark(node.targets[0]))
            case ast.Assign(targets=targets, value=value):
                values = self.symbolic(value, frame, guards)
                for target in targets:
                    self._store(target, values, frame, guards)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._store(target, self.symbolic(value, frame, guards), frame, guards)
            case ast.AugAssign(target=target, value=value):
                values, before = self.value(value, frame, guards), self.value(target, frame, guards)
                if not isinstance(target, ast.Name) or isinstance(value, _LITERALS):
                    self._changed(before)
                self._store(target, merged(objects(before), values), frame, guards)
            case ast.Assert(test=test):
                fails: list[ast.stmt] = [ast.copy_location(ast.Raise(ast.Name("AssertionError")), node)]
                return self._if(ast.If(ast.UnaryOp(ast.Not(), test), fails, []), frame, guards)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, frame, guards)
            case ast.With() | ast.AsyncWith():
                return self._with(node, frame, guards)
            case ast.Try() | ast.TryStar():
                return self._try(node, frame, guards)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.defined(node, frame, guards)
                # it sees the names of this one, as they are when it is called
                function = Function(frame.module.name, node, scope=frame)
                frame.env[name] = frame.env.get(name, NOTHING) | {function}
            case ast.Import() | ast.ImportFrom():
                scratch = Module(frame.module.name, frame.module.label, frame.module.tree)
                scratch.bind(node)
                for name in (*scratch.imports, *scratch.modules):
                    frame.env[name] = self.named(scratch, name, frame)
            case _:
                self.children(node, frame, guards)
        return guards | self._leaves(node)

    def _if(self, node: ast.If, frame: Frame, guards: Guards) -> Guards | None:
        yes, no = (guards | taken for taken in self._taken(node.test, frame))
        quiet = (_only_complains(node.body) or conditions.impossible(yes)) and not node.orelse
        with self._silently(self._silent or quiet or self._only_puts_back(node, frame)):
            # nothing that training does depends on such a test
            self.value(node.test, frame, guards)
        yes, no = self._still(yes), self._still(no)
        dead = conditions.impossible(yes)
        if dead and not node.orelse:
            self._shadowed(node.test, frame, yes)
        after_yes = None if dead else self._block(node.body, frame, yes)
        after_no = None if conditions.impossible(no) else self._block(node.orelse, frame, no)
        if after_yes is None and after_no is not None:
            return self._passed(node.body, after_no, no, guards)
        if after_no is None and after_yes is not None:
            return self._passed(node.orelse, after_yes, yes, guards)
        return None if after_no is None else guards | self._leaves(node)

    def _passed(self, body: Sequence[ast.stmt], after: Guards, taken: Guards, before: Guards) -> Guards:
        """The conditions where only one branch goes on; whether the other one surely raises matters."""
        if not _refuses(body):
            return after
        new = taken - before - UNSURE
        if all(isinstance(c, Passed) for c in before):
            self.assumed |= new
        # whoever was not refused certainly gets here
        kept = after - (UNSURE - before) if after == taken else after
        return (kept - new) | frozenset(Passed(c) for c in new & after)

    def _loop(self, node: _LOOPS, frame: Frame, guards: Guards) -> Guards:
        # the loop that trains (takes a gradient or a step itself) has a first round, any other one perhaps none
        called = (inner.func for inner in within(node) if isinstance(inner, ast.Call))
        trains = any(isinstance(one, ast.Attribute) and one.attr in {"backward", "step"} for one in called)
        rounds = ANYHOW if trains else UNSURE
        # what one round does to names and arguments, the next one meets
        for _ in range(2):
            known, before = guards, dict(frame.env)
            inner = guards | rounds
            if isinstance(node, ast.While):
                self.value(node.test, frame, guards)
                inner |= self._taken(node.test, frame)[0] - UNSURE
            else:
                self._store(node.target, entries(self.value(node.iter, frame, guards)), frame, guards)
            self._block(node.body, frame, inner)
            guards = self._still(guards)
            if guards == known and frame.env == before:
                break
        self._block(node.orelse, frame, guards | UNSURE)
        return guards | self._leaves(node)

    def _with(self, node: ast.With | ast.AsyncWith, frame: Frame, guards: Guards) -> Guards | None:
        swallows = False
        for item in node.items:
            swallows |= "suppress" in ast.unparse(item.context_expr)
            values = self.value(item.context_expr, frame, guards)
            if item.optional_vars is not None:
                self._store(item.optional_vars, values, frame, guards)
        after = self._block(node.body, frame, guards | UNSURE if swallows else guards)
        return guards | self._leaves(node) if swallows else after

    def _try(self, node: ast.Try | ast.TryStar, frame: Frame, guards: Guards) -> Guards | None:
        after = self._block(node.body, frame, guards | UNSURE if node.handlers else guards)
        if after is not None:
            after = self._block(node.orelse, frame, after)
        unsure, ends = self._still(guards), after is None
        for handler in node.handlers:
            if handler.name:
                frame.env[handler.name] = NOTHING
            ends = self._block(handler.body, frame, unsure | UNSURE) is None and ends
        last = self._block(node.finalbody, frame, unsure)
        return None if ends or last is None else guards | self._leaves(node)

    @remembered
    def _leaves(self, node: ast.stmt) -> Guards:
        """What is not known after branches: perhaps one of them has left the function."""
        # a loop's own `break` and `continue` lead to what stands behind it
        leaves = ast.Return if isinstance(node, _LOOPS) else _LEAVES
        return UNSURE if any(isinstance(inner, leaves) for inner in within(node)) else ANYHOW

    def defined(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, frame: Frame, guards: Guards) -> None:
        """What is evaluated where a function is defined: standard values and decorators."""
        marks = [] if isinstance(node, ast.Lambda) else node.decorator_list
        for one in (*node.args.defaults, *node.args.kw_defaults, *marks):
            if one is not None:
                self.value(one, frame, guards)

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
        tested = own_attributes(node.test)
        if not isinstance(frame.bound, Args) or len(tested) != 1 or not tested <= self.fields:
            return False
        for statement in (*node.body, *node.orelse):
            match statement:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)]) if (
                    attr in tested and own_attributes(statement.value) <= tested
                ):
                    continue
                case ast.Expr(value=ast.Call() as call) if self._shows(call):
                    continue
            return False
        return True

    def _called(self, node: ast.Call, frame: Frame, guards: Guards) -> Values:
        if self._shows(node):
            with self._silently():
                self.children(node, frame, guards)
            return NOTHING
        special = self._special(node, frame, guards)
        if special is not None:
            return special
        if isinstance(node.func, ast.Attribute):
            owners = self.value(node.func.value, frame, guards)
            given = self._given(node, frame, guards)
            result = self._of_container(node, node.func, owners, given, frame, guards)
            if result is not None:
                return result
            targets = self.part(owners, node.func.attr, node.func, frame, guards)
        else:
            targets = self.value(node.func, frame, guards)
            given = self._given(node, frame, guards)
        return self._reached(node, targets, given, frame, guards)

    def _reached(self, node: ast.Call, targets: Values, given: Given, frame: Frame, guards: Guards) -> Values:
        follow = [one for one in targets if isinstance(one, Function | Class | Object)]
        # one of a table's entries: which one is not known
        sure = len(targets) == len(follow) == 1 and not isinstance(node.func, ast.Subscript)
        if UNKNOWN in targets and follow:
            # of a wrapped function other parameters may be filled already
            given = replace(given, rest=given.rest | carried(given.everything()))
        results = [self._call(t, given, guards if sure else guards | UNSURE) for t in follow]
        if follow:
            return merged(*results) if sure else without_texts(merged(*results, NOTHING))
        self._handed_over(given, guards)
        if isinstance(node.func, ast.Name) and node.func.id in _TELLS:
            return NOTHING
        # a wrapper gives back what it wraps, a copy what it was made of
        back = carried(given.everything()) | self._wrapped(node.func, given, frame)
        if back and last(node.func) in _COPIES:
            for name in given.named:
                self._write(name)
            return back
        return back | listed(back) | {UNKNOWN} if back else NOTHING

    def _wrapped(self, function: ast.expr, given: Given, frame: Frame) -> Values:
        """A function handed to one that is not followed, first of all: it may come back, wrapped."""
        root = _root(function)
        if not isinstance(root, ast.Name):
            return NOTHING
        if root.id in _COLLECTS:
            values = leaves(value for part in given.everything() for value in part)
            return listed(values) if objects(values) else NOTHING
        # a method of some object, such as `map`, gives back something else
        first = given.positional[0] if given.positional and frame.find(root.id) is None else NOTHING
        return frozenset(v for v in first if isinstance(v, Function))

    def _special(self, node: ast.Call, frame: Frame, guards: Guards) -> Values | None:
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[]):
                return self.named(frame.module, "super", frame)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, _, *_]):
                return self._getattr(node, frame, guards)
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[_, _, *_]):
                return self._setattr(node, frame, guards)
            case ast.Call(func=ast.Attribute(attr=name)) if name in _PARSES:
                self.children(node, frame, guards)
                parsed = tuple(frozenset[Value]({Args(i)}) for i in range(len(self.classes)))
                # a single one comes by itself
                alone = len(parsed) == 1 and name in {"parse", "parse_args"}
                return parsed[0] if alone else frozenset({Several(parsed)})
            case ast.Call(args=[one]) if last(node.func) in _AS_MAPPING:
                values = self.value(one, frame, guards)
                return frozenset({Items(v.index) for v in values if isinstance(v, Args)})
        return None

    def _of_container(
        self, node: ast.Call, function: ast.Attribute, owners: Values, given: Given, frame: Frame, guards: Guards
    ) -> Values | None:
        """What a method of a list or a table gives back; None for any other object."""
        if function.attr in _CHANGES:
            self._changed(owners)
        if function.attr in _PUTS and not any(isinstance(v, Object | Args | ModuleName) for v in owners):
            for values in given.everything():
                self.put_into(function.value, contents(values) or values, frame)
        containers = frozenset(v for v in owners if isinstance(v, Items | Several))
        if not containers:
            return None
        of_items = self.entry(node, containers, node.args[0], frame, guards) if node.args else NOTHING
        # `items` gives pairs, `values` and `copy` a container, `get` an entry
        return of_items | contents(containers) | containers | {UNKNOWN}

    def _given(self, node: ast.Call, frame: Frame, guards: Guards) -> Given:
        given = Given()
        rest: list[Values] = []
        for argument in node.args:
            values = self.symbolic(argument, frame, guards)
            if not isinstance(argument, ast.Starred):
                given.positional.append(values)
                continue
            rest.append(contents(values))
        for keyword in node.keywords:
            values = self.symbolic(keyword.value, frame, guards)
            if keyword.arg is not None:
                given.named[keyword.arg] = values
                continue
            for value in values:
                if isinstance(value, Items):
                    # whoever gets them all may read any of them
                    for name in self.fields:
                        self._read(name, place(node, frame), guards)
                elif isinstance(value, Several) and value.keys is not None:
                    given.named |= value.pairs
                elif isinstance(value, Several):
                    rest.append(contents({value}))
        given.rest = objects(merged(*rest)) if rest else NOTHING
        return given

    def _shows(self, node: ast.Call) -> bool:
        """Whether a call only writes to a log, to the screen, or to a record."""
        match node.func:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _SHOWS or name in self.recorders:
                return True
            case ast.Attribute(value=owner, attr=name):
                return name in _LOGS and _LOGGER.search(ast.unparse(owner)) is not None
        return False

    def _getattr(self, node: ast.Call, frame: Frame, guards: Guards) -> Values:
        owner, name, *rest = node.args
        owners = self.value(owner, frame, guards)
        others = [self.symbolic(one, frame, guards) for one in (name, *rest)][1:]
        text = self._constant_text(name, frame)
        if text is not None:
            values = self.part(owners, text, node, frame, guards)
            # it may be the value for an attribute that is not there
            return values if text in self.fields or not rest else merged(values, *others)
        if any(isinstance(one, Args) for one in owners) and not isinstance(frame.bound, Args):
            for known in self._possible_names(name, frame):
                self._read(known, place(node, frame), guards | UNSURE)
        return NOTHING

    def _setattr(self, node: ast.Call, frame: Frame, guards: Guards) -> Values:
        owner, name, *rest = node.args
        values = self.symbolic(rest[0], frame, guards) if rest else NOTHING
        owners = self.value(owner, frame, guards)
        self.value(name, frame, guards)
        text = self._constant_text(name, frame)
        for value in owners:
            if text is not None:
                self.put(value, text, values)
            elif isinstance(value, Args):
                for known in self._possible_names(name, frame):
                    self._write(known)
        return NOTHING

    def _handed_over(self, given: Given, guards: Guards) -> None:
        """Functions given to something that is not followed, which may call them."""
        functions = [one for values in given.everything() for one in followable(values)]
        if not functions:
            return
        loose = (v for values in given.everything() for v in entries(values))
        rest = frozenset(v for v in loose if isinstance(v, Args | Object) and self.carries({v}))
        for function in functions:
            self._call(function, Given([], {}, rest), guards | UNSURE)

    def _call(self, target: Value, given: Given, guards: Guards) -> set[Value]:
        match target:
            case Class():
                return self._instance(target, given, guards)
            case Object():
                found = self.bound(target, "__call__")
                return {v for f in found for v in self._call(f, given, guards)}
            case Function(node=node):
                if not isinstance(node, ast.Lambda) and node.name in self.recorders:
                    return set()
                return self._function(target, given, guards)
        return set()

    def _function(self, target: Function, given: Given, guards: Guards) -> set[Value]:
        module = self.sources.module(target.module)
        assert module is not None
        node, shape = target.node, self.shape(target.node)
        env = self._parameters(target, given, module)
        # it can get at the arguments by what it is given, or by what it sees
        sees = target.module == self.script.name or target.scope is not None
        sees = sees or any(name in shape.mentioned for _, name in self.globals)
        # and what it refuses may be the value of an argument that it got alone
        sees = sees or (shape.refuses and any(isinstance(v, Text) for values in env.values() for v in values))
        if not sees and not any(map(self.carries, env.values())):
            self._looked_through(module, target)
            return set()
        if node in self._active:
            env = {name: without_texts(values) for name, values in env.items()}
        visible: frozenset[tuple[str, Values]] = frozenset()
        if target.scope is not None:
            around = ((n, target.scope.find(n)) for n in shape.mentioned)
            visible = frozenset((n, values) for n, values in around if values)
        key = (target, frozenset(env.items()), visible)
        returned = self._returns.setdefault(key, set())
        before = self._walked.setdefault(key, [])
        if not any(known <= guards for known in before) and self._depth <= _MAX_DEPTH:
            if len(before) >= _MAX_GUARDS:
                guards = frozenset.intersection(*before, guards) | UNSURE
            if shape.generator or isinstance(node, ast.AsyncFunctionDef):
                guards = guards | UNSURE
            before.append(guards)
            frame = self._frame(target, module, env)
            frame.returned = returned
            self._run(node, frame, guards)
        return set(returned)

    def _frame(self, target: Function, module: Module, env: dict[str, Values]) -> Frame:
        """The frame of a call: one for all calls that differ in functions and containers only.

        Functions inside this one see it; with a frame for each of their kind there would be no end.
        """
        plain = frozenset(
            (name, frozenset(v for v in values if not isinstance(v, Function | Several)))
            for name, values in env.items()
        )
        bound = None if isinstance(target.bound, Function) else target.bound
        key = (target.node, target.owner, target.scope, bound, plain)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(module, self.shape(target.node), node=target.node)
            frame.outer, frame.owner, frame.bound = target.scope, target.owner, target.bound
        for name, values in env.items():
            frame.given[name] = frame.given.get(name, NOTHING) | values
        return frame

    def _run(self, node: FunctionNode, frame: Frame, guards: Guards) -> None:
        self.ran[node] = frame.module.name
        around, frame.env = frame.env, dict(frame.given)
        for name in frame.shape.assigned & frame.env.keys():
            frame.env[name] = without_texts(frame.env[name])
        self._depth += 1
        again = node in self._active
        self._active.add(node)
        with self._silently(False):
            if isinstance(node, ast.Lambda):
                frame.returned |= self.symbolic(node.body, frame, guards)
            else:
                self._block(node.body, frame, guards)
        if again:
            frame.env = around
        else:
            self._active.remove(node)
        self._depth -= 1

    def _parameters(self, target: Function, given: Given, module: Module) -> dict[str, Values]:
        arguments = target.node.args
        parameters = parameters_of(arguments)
        env = {p.arg: self.annotated(p, module) for p in parameters}
        got: dict[str, Values] = {}
        positional = list(given.positional)
        if target.bound is not None:
            positional.insert(0, frozenset({target.bound}))
        places = [*arguments.posonlyargs, *arguments.args]
        for parameter, values in zip(places, positional, strict=False):
            got[parameter.arg] = values
        got |= {name: values for name, values in given.named.items() if name in env}
        for name in env:
            if given.rest and not got.get(name):
                got[name] = given.rest | {UNKNOWN}
            if got.get(name, NOTHING) - {UNKNOWN}:
                env[name] = got[name]
        more = {k: v for k, v in given.named.items() if k not in got}
        if arguments.vararg is not None:
            spare = tuple(positional[len(places) :])
            items = (*spare, given.rest) if given.rest else spare
            env[arguments.vararg.arg] = frozenset({Several(items, exact=not given.rest)})
        if arguments.kwarg is not None:
            more |= {"": given.rest} if given.rest else {}
            env[arguments.kwarg.arg] = _mapping(more)
        return env

    def _instance(self, target: Class, given: Given, guards: Guards) -> set[Value]:
        if target.key in self.ancestors:
            # one of the parsed dataclasses that the source makes itself
            return {DEFAULT}
        made = Object(target.key)
        starts = self.bound(made, "__init__")
        for function in starts:
            self._call(function, given, guards)
        if not starts:
            # a dataclass, or a named tuple, keeps what it is made of
            for values in given.everything():
                self.keep(made.key, ANY, objects(values))
        if self.keeps(made.key):
            # whoever gets an object that keeps the arguments may call any of its methods
            for _, node in self.order(made.key):
                for statement in node.body:
                    if isinstance(statement, FUNCTIONS) and statement.name != "__init__":
                        for function in self.bound(made, statement.name):
                            self._call(function, Given(), guards | UNSURE)
        return {made}

    def _looked_through(self, module: Module, target: Function) -> None:
        """A function that gets no arguments may still name classes that will get them."""
        if target.node not in self._visited:
            self._visited.add(target.node)
            for name in sorted(self.shape(target.node).names):
                for value in self.named(module, name, None):
                    if isinstance(value, Function) and value.module == module.name:
                        self._looked_through(module, value)

    def _referenced(self, key: Key) -> None:
        """A class named on the path whose methods, or whose base's, take the arguments: a callback."""
        if key in self._visited or key in self.ancestors:
            return
        self._visited.add(key)
        methods = [
            (owner, known, statement, [parameter.arg for parameter in parameters_of(statement.args)])
            for owner, known in self.order(key)
            for statement in known.body
            if isinstance(statement, FUNCTIONS)
        ]
        taken = {
            parameter.arg: values
            for owner, _, statement, _ in methods
            for parameter in parameters_of(statement.args)
            if (values := self.annotated(parameter, owner))
        }
        with self._silently(False):
            for owner, known, statement, names in methods:
                if taken.keys() & names:
                    function = Function(owner.name, statement, Object(key), f"{owner.name}:{known.name}")
                    self._call(function, Given([], taken), UNSURE)

    def symbolic(self, node: ast.expr, frame: Frame, guards: Guards) -> Values:
        """What an expression may hold, as an expression over arguments where it is one."""
        values = self.value(node, frame, guards)
        if isinstance(node, ast.BoolOp) and not objects(without_texts(values)) - {DEFAULT}:
            values = NOTHING
        text = None if values else self._text(node, frame)
        return values if text is None else frozenset({Text(text)})

    def value(self, node: ast.expr, frame: Frame, guards: Guards) -> Values:
        """What an expression may hold; records the arguments that it reads."""
        match node:
            case ast.Constant(value=value):
                return frozenset({DEFAULT}) if value is None else NOTHING
            case ast.Name(id=name):
                found = frame.find(name)
                return self.named(frame.module, name, frame) if found is None else found
            case ast.Attribute(value=owner, attr=name):
                return self.part(self.value(owner, frame, guards), name, node, frame, guards)
            case ast.Call():
                return self._called(node, frame, guards)
            case ast.BoolOp(op=op, values=parts):
                return self._short_circuit(isinstance(op, ast.And), parts, frame, guards)
            case ast.IfExp():
                return self._either(node, frame, guards)
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return self._sequence(items, frame, guards)
            case ast.Dict():
                return self._table(node, frame, guards)
            case ast.Subscript(value=owner, slice=key):
                self.value(key, frame, guards)
                return self.entry(node, self.value(owner, frame, guards), key, frame, guards)
            case ast.Lambda():
                self.defined(node, frame, guards)
                function = Function(frame.module.name, node, scope=frame)
                self._call(function, Given(), guards | UNSURE)
                return frozenset({function})
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, frame, guards)
            case ast.NamedExpr(target=target, value=value):
                with self._silently(False):
                    inner = self.symbolic(value, frame, guards)
                self._store(target, inner, frame, guards)
                return inner
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.value(value, frame, guards)
        self.children(node, frame, guards)
        return NOTHING

    def children(self, node: ast.AST, frame: Frame, guards: Guards) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, frame, guards)
            elif isinstance(child, ast.stmt):
                # of a branch of `match`
                self._block([child], frame, guards | UNSURE)
            else:
                self.children(child, frame, guards)

    def _short_circuit(self, every: bool, parts: Sequence[ast.expr], frame: Frame, guards: Guards) -> Values:
        values = []
        for part in parts:
            values.append(self.value(part, frame, guards))
            guards = self._still(guards | self._taken(part, frame)[not every])
        return merged(*values)

    def _either(self, node: ast.IfExp, frame: Frame, guards: Guards) -> Values:
        self.value(node.test, frame, guards)
        values = []
        for part, taken in zip((node.body, node.orelse), self._taken(node.test, frame), strict=True):
            inner = self._still(guards | taken)
            if not conditions.impossible(inner):
                values.append(self.symbolic(part, frame, inner))
        return merged(*values)

    def _sequence(self, items: Sequence[ast.expr], frame: Frame, guards: Guards) -> Values:
        parts, exact = list[Values](), True
        for item in items:
            values = self.symbolic(item, frame, guards)
            if isinstance(item, ast.Starred):
                exact, values = False, contents(values)
            parts.append(shallow(values))
        return frozenset({Several(tuple(parts), exact)}) if any(parts) else NOTHING

    def _table(self, node: ast.Dict, frame: Frame, guards: Guards) -> Values:
        pairs: dict[str, Values] = {}
        parts: list[Values] = []
        named = True
        for key, value in zip(node.keys, node.values, strict=True):
            inner = shallow(self.symbolic(value, frame, guards))
            if key is None:
                spread = {name: one for v in inner if isinstance(v, Several) for name, one in v.pairs.items()}
                pairs |= spread
                parts.append(leaves(inner))
                named = named and bool(spread)
                continue
            self.value(key, frame, guards)
            parts.append(inner)
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                pairs[key.value] = inner
            else:
                named = False
        if not any(parts):
            return NOTHING
        return _mapping(pairs) if named else frozenset({Several(tuple(parts), exact=False)})

    def entry(self, node: ast.expr, values: Values, key: ast.expr, frame: Frame, guards: Guards) -> Values:
        """One entry of a container: the one at `key` where that is plain, else any of them."""
        results: list[Values] = []
        for value in values:
            match value, key:
                case Several(items=items, exact=True), ast.Constant(value=int() as place) if (
                    -len(items) <= place < len(items)
                ):
                    results.append(items[place])
                case Several(keys=(*names,)), ast.Constant(value=str() as name) if name in names:
                    results.append(value.pairs[name])
                case Several(), _:
                    results.append(contents({value}) | {UNKNOWN})
                case Items(index), _:
                    text = self._constant_text(key, frame)
                    if text is not None:
                        results.append(self.part(frozenset({Args(index)}), text, node, frame, guards))
                case Unknown() | Text(), _:
                    continue
                case _:
                    results.append(NOTHING)
        return merged(*results)

    def _comprehension(self, node: _Comprehension, frame: Frame, guards: Guards) -> Values:
        for number, generator in enumerate(node.generators):
            values = self.value(generator.iter, frame, guards)
            if number == 0:
                guards |= UNSURE
            self._store(generator.target, entries(values), frame, guards)
            for test in generator.ifs:
                self.value(test, frame, guards)
                guards |= self._taken(test, frame)[0]
        if isinstance(node, ast.DictComp):
            self.value(node.key, frame, guards)
        values = objects(self.value(node.value if isinstance(node, ast.DictComp) else node.elt, frame, guards))
        return listed(values) if values else NOTHING

    def part(self, owners: Values, name: str, node: ast.AST, frame: Frame, guards: Guards) -> Values:
        results: list[Iterable[Value]] = []
        for owner in owners:
            match owner:
                case Args() if name in self.fields:
                    self._read(name, place(node, frame), guards)
                    results.append({Text(self._now(name))})
                case Super(bound=bound, owner=after):
                    results.append(self._properties(self.bound(bound, name, after), guards))
                case Args():
                    results.append(self._properties(self.bound(owner, name), guards))
                case Object(key) | Class(key):
                    results.append(self._properties(self.bound(owner, name), guards) | self.stored(key, name))
                case ModuleName(name=module_name):
                    results.append(self._of_module(module_name, name))
                case Several():
                    # of what `with` gets from a generator, or of something that holds it
                    inner = contents({owner})
                    of_entry = self.part(inner, name, node, frame, guards) if inner else inner
                    results.append(inner | of_entry)
                case Default() | Unknown():
                    continue
                case _:
                    results.append(NOTHING)
        values = merged(*results)
        return values | {UNKNOWN} if values and UNKNOWN in owners else values

    def _of_module(self, module_name: str, name: str) -> Values:
        module = self.sources.module(module_name)
        if module is None:
            return NOTHING
        values = self.named(module, name, None)
        if not values and self.sources.submodule(module, name) is not None:
            return frozenset({ModuleName(f"{module_name}.{name}")})
        return values

    def _properties(self, values: set[Value], guards: Guards) -> Values:
        """The methods among `values` that are properties, read: what they return."""
        results: set[Value] = set()
        for value in values:
            marks = map(mark, getattr(value.node, "decorator_list", ())) if isinstance(value, Function) else ()
            if not any(one.endswith("property") for one in marks):
                results.add(value)
            elif isinstance(value, Function) and value.bound:
                results |= self._call(value, Given(), guards)
        return frozenset(results)

    def named(self, module: Module, name: str, frame: Frame | None) -> Values:
        """What a name of a module stands for: a function, a class, a module, a table of them."""
        if name == "super" and frame is not None:
            for one in frame.chain():
                if one.owner and one.bound:
                    return frozenset({Super(one.bound, one.owner)})
        values = frozenset(self.globals.get((module.name, name), ()))
        found = self.sources.resolve(module, name)
        if found is None:
            owner = self.sources.named_module(module, name)
            return values if owner is None else values | {ModuleName(owner.name)}
        owner, name = found
        values |= self.globals.get((owner.name, name), set())
        if name in owner.functions:
            return values | {Function(owner.name, owner.functions[name])}
        if name in owner.classes:
            self._referenced((owner.name, name))
            return values | {Class((owner.name, name))}
        return values | self._constant(owner, name)

    def _constant(self, module: Module, name: str) -> Values:
        """A table or list of functions and classes on the level of a module."""
        key = (module.name, name)
        if key not in self._tables:
            self._tables[key] = NOTHING
            value = module.constants[name]
            if isinstance(value, _TABLES):
                frame = Frame(module, self.shape(module.tree))
                with self._silently():
                    self._tables[key] = self.value(value, frame, ANYHOW)
        return self._tables[key]

    def _store(self, target: ast.expr, values: Values, frame: Frame, guards: Guards) -> None:
        match target:
            case ast.Name(id=name):
                self._store_name(name, values, frame)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one, part in zip(targets, _unpacked(values, targets), strict=True):
                    self._store(one, part, frame, guards)
            case ast.Attribute(value=owner, attr=name):
                owners = self.value(owner, frame, guards)
                for value in owners:
                    self.put(value, name, values)
            case ast.Subscript(value=owner, slice=key):
                self.value(key, frame, guards)
                owners = self.value(owner, frame, guards)
                if isinstance(frame.bound, Args) and own_attributes(owner):
                    self.reshaped |= own_attributes(owner)
                else:
                    self._changed(owners)
                self.put_into(owner, values, frame)

    def _store_name(self, name: str, values: Values, frame: Frame) -> None:
        if (frame.top or name in frame.shape.globals) and self.carries(values):
            self.globals.setdefault((frame.module.name, name), set()).update(objects(values))
        if name in frame.shape.assigned:
            before = frame.env.get(name)
            values = without_texts(values if before is None else merged(before, values))
        frame.env[name] = values

    def put(self, value: Value, name: str, values: Values) -> None:
        match value:
            case Args():
                self._write(name)
            case Object(key) | Class(key):
                self.keep(key, name, values)

    def put_into(self, owner: ast.expr, values: Values, frame: Frame) -> None:
        if not self.carries(values):
            return
        entry = listed(objects(values))
        if isinstance(owner, ast.Name):
            frame.env[owner.id] = (frame.find(owner.id) or NOTHING) | entry
        elif isinstance(owner, ast.Attribute):
            for value in self.value(owner.value, frame, ANYHOW):
                self.put(value, owner.attr, entry)


def _argument(name: str) -> str:
    return name.partition("·")[0]


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _only_complains(body: Sequence[ast.stmt]) -> bool:
    complains = False
    for node in body:
        match node:
            case ast.Raise():
                complains = True
            case ast.If(body=inner, orelse=other) if _only_complains([*inner, *other]):
                complains = True
            case ast.Expr(value=ast.Call(func=function)):
                if last(function) not in _LOGS | _SHOWS:
                    return False
                complains = True
            case ast.Assign(targets=[ast.Name()], value=ast.JoinedStr() | ast.Constant(value=str())):
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


def _unpacked(values: Values, targets: Sequence[ast.expr]) -> list[Values]:
    """What each of several targets gets of a value that is unpacked."""
    parts: list[list[Values]] = [[] for _ in targets]
    for value in values:
        for index, part in enumerate(parts):
            match value:
                case Several(items=items, exact=True) if len(items) > index:
                    part.append(items[index])
                case Several():
                    part.append(contents({value}))
                case Text() | Function():
                    part.append(NOTHING)
                case _:
                    part.append(frozenset({value}))
    return [merged(*part) for part in parts]


def _mapping(pairs: Mapping[str, Values]) -> Values:
    return frozenset({Several(tuple(pairs.values()), exact=False, keys=tuple(pairs))})


def own_attributes(node: ast.AST) -> set[str]:
    """The attributes of `self` that an expression names."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }


def place(node: ast.AST, frame: Frame) -> str:
    return f"{frame.module.label}:{getattr(node, 'lineno', 0)}"
