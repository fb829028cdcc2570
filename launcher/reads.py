"""Which arguments an entry script reads, where, and under which conditions: by AST, from its start.

The walk follows the parsed dataclasses through calls, attributes and helper modules, over all files
of the packages given. It errs on the side of `read`; what it does not count as reading:

- tests whose only effect is to raise or to warn, and what is written to a log or the screen;
- the whole object handed to a tracker, a printer or a hash (`vars(args)`, `asdict(args)`, `getattr`
  with a computed name);
- values that `__post_init__` puts back into the same argument;
- branches that cannot be reached after an earlier `raise` or `return`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from launcher import conditions
from launcher.schema import Path, Read, Refusal, Shadow
from launcher.sources import UNKNOWN, Module, Sources, enum_members

# methods of the parser that return one object for each dataclass
_PARSES = {"parse_args_into_dataclasses", "parse_args_and_config", "parse", "parse_args"}
_PARSERS = {"ArgumentParserPlus", "HfArgumentParser", "TrlParser"}
_LOGS = {"debug", "info", "warning", "warning_once", "warning_rank0", "error", "exception", "critical"}
_SHOWS = {"print", "pprint", "warn", "warn_once", "print_rank0"}
# a condition that is not known from the arguments: what stands under it happens perhaps
_PERHAPS = "..."
# one function under more sets of conditions than this is walked without any
_MAX_GUARDS = 16
_MAX_PASSES = 5


@dataclass(frozen=True, slots=True)
class _Args:
    """An object of the parsed dataclasses, by its place among them."""

    index: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An instance of any other class."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Class:
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Function:
    """A function; `bound` is what its first parameter holds, `owner` the class that defines it."""

    module: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    bound: _Value | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class _Module:
    name: str


@dataclass(frozen=True, slots=True)
class _Tuple:
    items: tuple[frozenset[_Value], ...]


@dataclass(frozen=True, slots=True)
class _Keywords:
    """What `**kwargs` collects."""

    items: tuple[tuple[str, frozenset[_Value]], ...]


@dataclass(frozen=True, slots=True)
class _Text:
    """A value that is an expression over argument names."""

    text: str


@dataclass(frozen=True, slots=True)
class _Super:
    """What `super()` is inside a method of `owner`."""

    bound: _Value
    owner: str


_Value = _Args | _Object | _Class | _Function | _Module | _Tuple | _Keywords | _Text | _Super
_Values = frozenset[_Value]
_NOTHING: _Values = frozenset()
_Guards = frozenset[str]
_Env = dict[str, _Values]


@dataclass(slots=True)
class _Frame:
    """One function being walked: where its names come from, and what they may hold."""

    module: Module
    env: _Env
    owner: str | None = None
    bound: _Value | None = None
    assigned: frozenset[str] = frozenset()
    returned: set[_Value] = field(default_factory=set)


def entry_classes(sources: Sources, script: str) -> list[tuple[str, str]]:
    """The dataclasses that a script parses, as (module, class name): the parser's first argument.

    Raises LookupError where there is no such script, or it hands its parser something else.
    """
    module = _script(sources, script)
    inside = replace(module, imports=dict(module.imports), modules=dict(module.modules))
    assigned = {
        target.id: node.value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            # also inside the function that builds the parser
            inside.bind(node)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if ast.unparse(node.func).rpartition(".")[2] not in _PARSERS:
            continue
        given = node.args[0]
        if isinstance(given, ast.Name):
            given = assigned.get(given.id, given)
        items = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
        found = [sources.resolve_class(inside, item) for item in items]
        if None not in found:
            return [(owner.name, known.name) for owner, known in (f for f in found if f)]
    raise LookupError(f"{script} hands its parser no dataclasses")


def _script(sources: Sources, script: str) -> Module:
    name = script.removesuffix(".py").replace("/", ".")
    module = sources.module(name)
    if module is None:
        raise LookupError(f"there is no {script}")
    return module


def find(
    sources: Sources,
    script: str,
    classes: Sequence[tuple[str, str]],
    fields: Iterable[str],
    recorders: Iterable[str] = (),
) -> Path:
    """Every read of each argument on the path of `script`, and every refusal of their values.

    `classes` are the parsed dataclasses as (module, class name). `recorders` are functions that only
    write down what they read, such as the hash of a cache key. Raises LookupError without the script.
    """
    walk = _Walk(sources, _script(sources, script), classes, frozenset(fields), frozenset(recorders))
    walk.run()
    return Path(
        reads={name: walk.told(name) for name in sorted(walk.fields)},
        refusals=walk.refused(),
        shadows=walk.shadows,
    )


@dataclass(slots=True)
class _Walk:
    sources: Sources
    script: Module
    classes: Sequence[tuple[str, str]]
    fields: frozenset[str]
    recorders: frozenset[str]
    reads: dict[str, dict[str, set[_Guards]]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    refusals: dict[str, set[tuple[_Guards, str]]] = field(default_factory=dict)
    shadows: dict[str, Shadow] = field(default_factory=dict)
    # what holds because the script would have raised otherwise
    assumed: set[str] = field(default_factory=set)
    # what `self.x` of an instance may hold, by module, class and attribute
    attributes: dict[tuple[str, str, str], set[_Value]] = field(default_factory=dict)
    walked: dict[object, list[_Guards]] = field(default_factory=dict)
    returns: dict[object, set[_Value]] = field(default_factory=dict)
    ancestors: dict[tuple[str, str], int] = field(default_factory=dict)
    orders: dict[tuple[str, str], list[tuple[Module, ast.ClassDef]]] = field(default_factory=dict)
    constants: dict[tuple[str, str], _Values] = field(default_factory=dict)
    visited: set[object] = field(default_factory=set)
    # the places of refusals inside `__post_init__`, and what it gives other values
    parsing: frozenset[str] = frozenset()
    normalised: frozenset[str] = frozenset()
    silent: int = 0
    depth: int = 0

    def run(self) -> dict[str, tuple[Read, ...]]:
        for index, (module_name, class_name) in enumerate(self.classes):
            for owner, node in self._order(module_name, class_name):
                self.ancestors.setdefault((owner.name, node.name), index)
        for _ in range(_MAX_PASSES):
            # what an attribute holds may be learnt after the method that reads it was walked
            before = sum(map(len, self.attributes.values())) + sum(map(len, self.returns.values()))
            self.walked.clear()
            self.visited.clear()
            self.constants.clear()
            self.reads.clear()
            self.refusals.clear()
            self.written.clear()
            self._start()
            after = sum(map(len, self.attributes.values())) + sum(map(len, self.returns.values()))
            if before == after:
                break

    def told(self, name: str) -> tuple[Read, ...]:
        """The reads of one argument, in the order of files and lines."""
        told = []
        for where, alternatives in self.reads.get(name, {}).items():
            # what the script itself changes on the way says nothing about the stage file
            kept = {
                frozenset(
                    c
                    for c in guards - self.assumed - {_PERHAPS}
                    if not conditions.names(c) & self.written
                )
                for guards in alternatives
            }
            kept = {conditions.simplified(one) for one in kept}
            kept = {one for one in kept if not any(other < one for other in kept)}
            kept = {one for one in kept if not conditions.impossible(one)}
            told += [Read(where=where, when=tuple(sorted(guards))) for guards in kept]
        return tuple(sorted(told, key=_by_place))

    def refused(self) -> tuple[Refusal, ...]:
        """The `raise` statements that arguments alone lead to; what is needed to get there included."""
        told = []
        for where, alternatives in self.refusals.items():
            for guards, name in alternatives:
                parsing = where in self.parsing
                changed = self.normalised if parsing else self.written
                written = any(conditions.names(c) & changed for c in guards)
                if guards and not written and not conditions.impossible(guards):
                    # what other refusals exclude need not be said again
                    when = tuple(sorted(conditions.simplified(guards - self.assumed or guards)))
                    told.append(Refusal(where=where, when=when, error=name, parsing=parsing))
        return tuple(sorted(told, key=_by_place))

    # --- where it begins --------------------------------------------------------------------------

    def _start(self) -> None:
        for index, (module_name, class_name) in enumerate(self.classes):
            self._method(_Args(index), module_name, class_name, "__post_init__", frozenset())
        self.parsing, self.normalised = frozenset(self.refusals), frozenset(self.written)
        block = next((s for s in self.script.tree.body if _is_main(s)), None)
        if isinstance(block, ast.If):
            frame = _Frame(self.script, {}, assigned=_reassigned(block.body))
            self._block(block.body, frame, frozenset())
        main = self.script.functions.get("main")
        if not self.reads and main is not None:
            given = [frozenset[_Value]({_Args(i)}) for i in range(len(self.classes))]
            function = _Function(self.script.name, main)
            self._call(function, given, {}, frozenset())

    def _order(self, module_name: str, class_name: str) -> list[tuple[Module, ast.ClassDef]]:
        """The class and its bases, the class itself first."""
        key = (module_name, class_name)
        if key not in self.orders:
            module = self.sources.module(module_name)
            node = module.classes.get(class_name) if module else None
            told = self.sources.linearised(module, node) if module and node else []
            self.orders[key] = told[::-1]
        return self.orders[key]

    def _class_of(self, value: _Value) -> tuple[str, str] | None:
        match value:
            case _Args(index):
                return self.classes[index]
            case _Object(module, name) | _Class(module, name):
                return module, name
        return None

    def _find_method(
        self, value: _Value, name: str, after: str | None = None
    ) -> tuple[Module, ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef] | None:
        """A method by name, in the order in which Python looks; `after` a class, for `super()`."""
        key = self._class_of(value)
        order = self._order(*key) if key else []
        names = [f"{module.name}:{node.name}" for module, node in order]
        start = names.index(after) + 1 if after in names else 0
        for module, node in order[start:]:
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    if statement.name == name:
                        return module, node, statement
        return None

    def _method(
        self, value: _Value, module_name: str, class_name: str, name: str, guards: _Guards
    ) -> None:
        found = self._find_method(value, name)
        if found is not None:
            module, node, statement = found
            owner = f"{module.name}:{node.name}"
            self._call(_Function(module.name, statement, value, owner), [], {}, guards)

    # --- statements -------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], frame: _Frame, guards: _Guards) -> _Guards | None:
        """Walk statements in order; the conditions that hold after them, None if none goes on."""
        for statement in body:
            if conditions.impossible(guards):
                return None
            told = self._statement(statement, frame, guards)
            if told is None:
                return None
            guards = told
        return guards

    def _statement(self, node: ast.stmt, frame: _Frame, guards: _Guards) -> _Guards | None:
        match node:
            case ast.If():
                return self._if(node, frame, guards)
            case ast.Return(value=value):
                frame.returned |= self._value(value, frame, guards) if value else set()
                return None
            case ast.Raise():
                self._refused(node, node.exc, frame, guards)
                return None
            case ast.Continue() | ast.Break():
                return None
            case ast.Assign(value=value) if self._puts_back(node, frame):
                with self._silently():
                    self._value(value, frame, guards)
            case ast.Assign(targets=targets, value=value):
                held = self._value(value, frame, guards)
                for target in targets:
                    guards = self._store(target, held, frame, guards)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                guards = self._store(target, self._value(value, frame, guards), frame, guards)
            case ast.AugAssign(target=target, value=value):
                self._value(value, frame, guards)
                if isinstance(target, ast.Attribute):
                    load = ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
                    self._value(load, frame, guards)
                guards = self._store(target, _NOTHING, frame, guards)
            case ast.Assert(test=test):
                with self._silently():
                    self._value(test, frame, guards)
                no = guards | self._taken(test, False, frame)
                self._refused(node, ast.Name("AssertionError"), frame, no)
                after = conditions.implied(test, True, self._say(frame))
                self.assumed |= after
                return guards | after
            case ast.For() | ast.AsyncFor():
                return self._for(node, frame, guards)
            case ast.While(test=test, body=body):
                self._value(test, frame, guards)
                inner = guards | conditions.implied(test, True, self._say(frame)) | {_PERHAPS}
                self._block(body, frame, inner)
                return self._after(guards, node)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    held = self._value(item.context_expr, frame, guards)
                    if item.optional_vars is not None:
                        guards = self._store(item.optional_vars, held, frame, guards)
                return self._block(body, frame, guards)
            case ast.Try():
                return self._try(node, frame, guards)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._nested(node, frame, guards)
            case ast.Import() | ast.ImportFrom():
                self._import(node, frame)
            case ast.Match(subject=subject, cases=cases):
                self._value(subject, frame, guards)
                for case in cases:
                    self._block(case.body, frame, guards | {_PERHAPS})
                return self._after(guards, node)
            case ast.ClassDef() | ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case _:
                self._children(node, frame, guards)
        return guards

    def _if(self, node: ast.If, frame: _Frame, guards: _Guards) -> _Guards | None:
        yes = guards | self._taken(node.test, True, frame)
        no = guards | self._taken(node.test, False, frame)
        dead = conditions.impossible(yes)
        if (_only_complains(node.body) or dead) and not node.orelse:
            # nothing that training does depends on this test
            with self._silently():
                self._value(node.test, frame, guards)
            if dead:
                self._shadowed(node.test, frame, yes)
        else:
            self._value(node.test, frame, guards)
        after_yes = None if dead else self._block(node.body, frame, yes)
        after_no = None
        if not conditions.impossible(no):
            after_no = self._block(node.orelse, frame, no) if node.orelse else no
        if after_yes is None and after_no is not None and _refuses(node.body):
            self.assumed |= no - guards - {_PERHAPS}
            # whoever was not refused certainly gets here
            return after_no - ({_PERHAPS} - guards)
        if after_yes is None or after_no is None:
            return after_yes if after_no is None else after_no
        return self._after(guards, node)

    def _taken(self, test: ast.expr, truth: bool, frame: _Frame) -> _Guards:
        """What must hold where a branch is taken; marked where that is not all there is to it."""
        say = self._say(frame)
        sure = say(test) is not None
        return conditions.implied(test, truth, say) | (set() if sure else {_PERHAPS})

    def _for(
        self, node: ast.For | ast.AsyncFor, frame: _Frame, guards: _Guards
    ) -> _Guards:
        held = self._value(node.iter, frame, guards)
        items = {v for one in held if isinstance(one, _Tuple) for part in one.items for v in part}
        self._store(node.target, frozenset(items), frame, guards)
        self._block(node.body, frame, guards | {_PERHAPS})
        self._block(node.orelse, frame, guards | {_PERHAPS})
        return self._after(guards, node)

    def _try(self, node: ast.Try, frame: _Frame, guards: _Guards) -> _Guards | None:
        perhaps = guards | {_PERHAPS}
        after = self._block(node.body, frame, perhaps if node.handlers else guards)
        if after is not None:
            after = self._block(node.orelse, frame, after)
        handled = [self._block(handler.body, frame, perhaps) for handler in node.handlers]
        ends = after is None and all(told is None for told in handled)
        last = self._block(node.finalbody, frame, guards)
        return None if ends or last is None else self._after(guards, node)

    def _after(self, guards: _Guards, node: ast.stmt) -> _Guards:
        """The conditions that are still known after a statement that may have changed arguments."""
        changed = {
            target.attr
            for target in ast.walk(node)
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
        }
        return frozenset(c for c in guards if not conditions.names(c) & changed)

    def _nested(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: _Frame, guards: _Guards
    ) -> None:
        """A function inside a function sees its names: walked where it stands, as if called."""
        frame.env[node.name] = _NOTHING
        inner = _Frame(
            frame.module, dict(frame.env), frame.owner, frame.bound,
            _reassigned(node.body, frame.env),
        )  # fmt: skip
        for parameter in _parameters(node.args):
            inner.env[parameter.arg] = self._annotated(parameter, frame.module)
        self._block(node.body, inner, guards)

    def _import(self, node: ast.Import | ast.ImportFrom, frame: _Frame) -> None:
        scratch = Module(frame.module.name, frame.module.label, frame.module.tree)
        scratch.bind(node)
        for name in (*scratch.imports, *scratch.modules):
            frame.env[name] = self._named(scratch, name, frame)

    def _store(self, target: ast.expr, held: _Values, frame: _Frame, guards: _Guards) -> _Guards:
        match target:
            case ast.Name(id=name):
                kept = frozenset(v for v in held if not isinstance(v, _Text))
                single = name not in frame.assigned
                frame.env[name] = held if single else frame.env.get(name, _NOTHING) | kept
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = next((v.items for v in held if isinstance(v, _Tuple)), ())
                for index, one in enumerate(targets):
                    part = parts[index] if index < len(parts) else _NOTHING
                    guards = self._store(one, part, frame, guards)
            case ast.Attribute(value=owner, attr=name):
                for value in self._value(owner, frame, guards):
                    if isinstance(value, _Args) and name in self.fields:
                        self.written.add(name)
                        guards = frozenset(c for c in guards if name not in conditions.names(c))
                    elif isinstance(value, _Object):
                        kept = {v for v in held if not isinstance(v, _Text)}
                        key = (value.module, value.name, name)
                        self.attributes.setdefault(key, set()).update(kept)
            case ast.Subscript() | ast.Starred():
                self._children(target, frame, guards)
        return guards

    def _puts_back(self, node: ast.Assign, frame: _Frame) -> bool:
        """Whether a method of the arguments' own only gives one of them another form."""
        match node.targets:
            case [ast.Attribute(value=ast.Name(id="self"), attr=name)] if name in self.fields:
                read = {
                    inner.attr
                    for inner in ast.walk(node.value)
                    if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self"
                }
                return isinstance(frame.bound, _Args) and read == {name}
        return False

    # --- expressions ------------------------------------------------------------------------------

    def _value(self, node: ast.expr, frame: _Frame, guards: _Guards) -> _Values:
        """What an expression may hold; records the arguments that it reads."""
        match node:
            case ast.Name(id=name):
                return frame.env[name] if name in frame.env else self._named(frame.module, name, frame)
            case ast.Attribute(value=owner, attr=name, ctx=ast.Load()):
                return self._attribute(node, self._value(owner, frame, guards), name, frame, guards)
            case ast.Call():
                return self._called(node, frame, guards)
            case ast.BoolOp(op=op, values=parts):
                self._short_circuit(isinstance(op, ast.And), parts, frame, guards)
                return self._texted(node, frame)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._value(test, frame, guards)
                say = self._say(frame)
                yes = guards | conditions.implied(test, True, say)
                no = guards | conditions.implied(test, False, say)
                one = _NOTHING if conditions.impossible(yes) else self._value(body, frame, yes)
                other = _NOTHING if conditions.impossible(no) else self._value(orelse, frame, no)
                return frozenset(v for v in one | other if not isinstance(v, _Text))
            case ast.Tuple(elts=items) | ast.List(elts=items):
                parts = tuple(self._value(item, frame, guards) for item in items)
                return frozenset({_Tuple(parts)}) if any(parts) else _NOTHING
            case ast.Dict(keys=keys, values=values):
                for key in keys:
                    if key is not None:
                        self._value(key, frame, guards)
                parts = tuple(self._value(item, frame, guards) for item in values)
                return frozenset({_Tuple(parts)}) if any(parts) else _NOTHING
            case ast.Subscript(value=owner, slice=key):
                self._value(key, frame, guards)
                held = self._value(owner, frame, guards)
                # any entry of a table of functions may be meant
                return frozenset(
                    v for one in held if isinstance(one, _Tuple) for part in one.items for v in part
                )
            case ast.Compare() | ast.UnaryOp():
                self._children(node, frame, guards)
                return self._texted(node, frame)
            case ast.Lambda():
                inner = _Frame(frame.module, dict(frame.env), frame.owner, frame.bound)
                for parameter in _parameters(node.args):
                    inner.env[parameter.arg] = _NOTHING
                self._value(node.body, inner, guards)
                return _NOTHING
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, frame, guards)
            case ast.NamedExpr(target=target, value=value):
                held = self._value(value, frame, guards)
                self._store(target, held, frame, guards)
                return held
            case ast.Await(value=value) | ast.Starred(value=value):
                return self._value(value, frame, guards)
        self._children(node, frame, guards)
        return _NOTHING

    def _children(self, node: ast.AST, frame: _Frame, guards: _Guards) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._value(child, frame, guards)
            elif not isinstance(child, ast.stmt):
                self._children(child, frame, guards)

    def _short_circuit(
        self, every: bool, parts: Sequence[ast.expr], frame: _Frame, guards: _Guards
    ) -> None:
        say = self._say(frame)
        for part in parts:
            if conditions.impossible(guards):
                return
            self._value(part, frame, guards)
            guards |= conditions.implied(part, every, say)

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        frame: _Frame,
        guards: _Guards,
    ) -> _Values:
        inner = _Frame(frame.module, dict(frame.env), frame.owner, frame.bound)
        for generator in node.generators:
            held = self._value(generator.iter, inner, guards)
            items = {v for one in held if isinstance(one, _Tuple) for part in one.items for v in part}
            self._store(generator.target, frozenset(items), inner, guards)
            for test in generator.ifs:
                self._value(test, inner, guards)
        if isinstance(node, ast.DictComp):
            self._value(node.key, inner, guards)
            held = self._value(node.value, inner, guards)
        else:
            held = self._value(node.elt, inner, guards)
        return frozenset({_Tuple((held,))}) if held else _NOTHING

    def _attribute(
        self, node: ast.Attribute, owners: _Values, name: str, frame: _Frame, guards: _Guards
    ) -> _Values:
        held: set[_Value] = set()
        for owner in owners:
            match owner:
                case _Args() if name in self.fields:
                    self._read(name, f"{frame.module.label}:{node.lineno}", guards)
                    held.add(_Text(name))
                case _Super(bound=bound, owner=after):
                    held |= self._bound(bound, name, after)
                case _Args() | _Object() | _Class():
                    known = self._bound(owner, name, None)
                    if isinstance(owner, _Object):
                        known |= self._stored(owner, name)
                    held |= self._properties(known, guards)
                case _Module(name=module_name):
                    module = self.sources.module(module_name)
                    if module is not None:
                        held |= self._named(module, name, None)
        return frozenset(held)

    def _stored(self, owner: _Object, name: str) -> set[_Value]:
        """What any class of an instance's line has put into an attribute."""
        held: set[_Value] = set()
        for module, node in self._order(owner.module, owner.name) or ():
            held |= self.attributes.get((module.name, node.name, name), set())
        return held | self.attributes.get((owner.module, owner.name, name), set())

    def _bound(self, value: _Value, name: str, after: str | None) -> set[_Value]:
        found = self._find_method(value, name, after)
        if found is None:
            return set()
        module, node, statement = found
        marks = {ast.unparse(mark).rpartition(".")[2] for mark in statement.decorator_list}
        bound = None if "staticmethod" in marks or isinstance(value, _Class) else value
        if "classmethod" in marks:
            key = self._class_of(value)
            bound = _Class(*key) if key else None
        return {_Function(module.name, statement, bound, f"{module.name}:{node.name}")}

    def _properties(self, held: set[_Value], guards: _Guards) -> set[_Value]:
        """The methods among `held` that are properties, read: what they return."""
        told: set[_Value] = set()
        for value in held:
            if isinstance(value, _Function) and isinstance(value.node, ast.FunctionDef):
                marks = {ast.unparse(mark).rpartition(".")[2] for mark in value.node.decorator_list}
                if marks & {"property", "cached_property"}:
                    told |= self._call(value, [], {}, guards) if value.bound else set()
                    continue
            told.add(value)
        return told

    def _named(self, module: Module, name: str, frame: _Frame | None) -> _Values:
        """What a name of a module stands for: a function, a class, a module, a table of them."""
        if name == "super" and frame is not None and frame.owner and frame.bound:
            return frozenset({_Super(frame.bound, frame.owner)})
        found = self.sources.resolve(module, name)
        if found is None:
            owner = self.sources.named_module(module, name)
            return frozenset({_Module(owner.name)}) if owner is not None else _NOTHING
        owner, name = found
        if name in owner.functions:
            return frozenset({_Function(owner.name, owner.functions[name])})
        if name in owner.classes:
            self._referenced(owner, owner.classes[name])
            return frozenset({_Class(owner.name, name)})
        return self._constant(owner, name)

    def _constant(self, module: Module, name: str) -> _Values:
        """A table or list of functions and classes on the level of a module."""
        key = (module.name, name)
        if key not in self.constants:
            self.constants[key] = _NOTHING
            value = module.constants[name]
            if isinstance(value, ast.Dict | ast.List | ast.Tuple | ast.Name | ast.Attribute):
                self.constants[key] = self._value(value, _Frame(module, {}), frozenset())
        return self.constants[key]

    # --- calls ------------------------------------------------------------------------------------

    def _called(self, node: ast.Call, frame: _Frame, guards: _Guards) -> _Values:
        if self._shows(node):
            with self._silently():
                self._children(node, frame, guards)
            return _NOTHING
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[]):
                return self._named(frame.module, "super", frame)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, name, *rest]):
                return self._getattr(node, owner, name, rest, frame, guards)
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _PARSES:
                self._children(node, frame, guards)
                parsed = tuple(frozenset[_Value]({_Args(i)}) for i in range(len(self.classes)))
                # a single one may come by itself
                alone = {_Args(0)} if len(parsed) == 1 else set()
                return frozenset({_Tuple(parsed), *alone})
        targets = self._value(node.func, frame, guards)
        if isinstance(node.func, ast.Attribute) and not targets:
            # an entry of a table of functions: `handlers.get(name)`
            owners = self._value(node.func.value, frame, guards)
            items = {v for o in owners if isinstance(o, _Tuple) for part in o.items for v in part}
            if items:
                self._children(node, frame, guards)
                return frozenset(items)
        positional: list[_Values] = []
        for argument in node.args:
            held = self._argument(argument, frame, guards)
            spread = [v for v in held if isinstance(v, _Tuple)]
            starred = isinstance(argument, ast.Starred) and spread
            positional += list(spread[0].items) if starred else [held]
        named: dict[str, _Values] = {}
        for keyword in node.keywords:
            held = self._argument(keyword.value, frame, guards)
            if keyword.arg is not None:
                named[keyword.arg] = held
            else:
                named |= {k: v for one in held if isinstance(one, _Keywords) for k, v in one.items}
        if ast.unparse(node.func).rpartition(".")[2] == "partial" and positional:
            targets, positional = positional[0], positional[1:]
        told: set[_Value] = set()
        # one of a table's entries: which one is not known
        sure = len(targets) == 1 and not isinstance(node.func, ast.Subscript)
        for target in targets:
            told |= self._call(target, positional, named, guards | (set() if sure else {_PERHAPS}))
        if not targets:
            self._handed_over(positional, named, guards)
            # a wrapper gives back what it wraps, a table what it is made of
            given = (v for held in (*positional, *named.values()) for v in held)
            told |= {v for v in given if isinstance(v, _Function)}
        return frozenset(told)

    def _argument(self, node: ast.expr, frame: _Frame, guards: _Guards) -> _Values:
        held = self._value(node, frame, guards)
        return held or self._texted(node, frame)

    def _shows(self, node: ast.Call) -> bool:
        """Whether a call only writes to a log, to the screen, or to a record."""
        match node.func:
            case ast.Name(id=name):
                return name in _SHOWS or name in self.recorders
            case ast.Attribute(value=owner, attr=name):
                logs = name in _LOGS and "log" in ast.unparse(owner).lower()
                return logs or name in _SHOWS or name in self.recorders
        return False

    def _getattr(
        self,
        node: ast.Call,
        owner: ast.expr,
        name: ast.expr,
        rest: Sequence[ast.expr],
        frame: _Frame,
        guards: _Guards,
    ) -> _Values:
        owners = self._value(owner, frame, guards)
        for one in (name, *rest):
            self._value(one, frame, guards)
        told = self.sources.evaluate(frame.module, name)
        if told is UNKNOWN or not isinstance(told, str):
            return _NOTHING
        attribute = ast.copy_location(ast.Attribute(owner, told, ast.Load()), node)
        return self._attribute(attribute, owners, told, frame, guards)

    def _handed_over(
        self, positional: Sequence[_Values], named: dict[str, _Values], guards: _Guards
    ) -> None:
        """Functions given to something that is not followed, which may call them."""
        for held in (*positional, *named.values()):
            for value in held:
                if isinstance(value, _Function):
                    tables = [v for one in named.values() for v in one if isinstance(v, _Tuple)]
                    items = [part for table in tables for part in table.items if _carries(part)]
                    self._call(value, items, {}, guards | {_PERHAPS})

    def _call(
        self,
        target: _Value,
        positional: Sequence[_Values],
        named: dict[str, _Values],
        guards: _Guards,
    ) -> set[_Value]:
        match target:
            case _Class():
                return self._instance(target, positional, named, guards)
            case _Object():
                found = self._bound(target, "__call__", None)
                return {v for f in found for v in self._call(f, positional, named, guards)}
            case _Function(node=ast.FunctionDef() | ast.AsyncFunctionDef() as node):
                if node.name in self.recorders:
                    return set()
                return self._function(target, node, positional, named, guards)
        return set()

    def _function(
        self,
        target: _Function,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        positional: Sequence[_Values],
        named: dict[str, _Values],
        guards: _Guards,
    ) -> set[_Value]:
        module = self.sources.module(target.module)
        assert module is not None
        env = self._parameters_of(target, node, positional, named, module)
        if not any(_carries(held) or self._kept(held) for held in env.values()):
            self._looked_through(module, node)
            return set()
        # what is walked without counting has not been counted
        key = (target.module, target.owner, node, frozenset(env.items()), self.silent > 0)
        returned = self.returns.setdefault(key, set())
        before = self.walked.setdefault(key, [])
        if any(known <= guards for known in before) or self.depth > 60:
            return returned
        if len(before) >= _MAX_GUARDS:
            guards = frozenset.intersection(*before, guards)
        before.append(guards)
        frame = _Frame(
            module, env, target.owner, target.bound, _reassigned(node.body, env), returned
        )
        self.depth += 1
        try:
            self._block(node.body, frame, guards)
        finally:
            self.depth -= 1
        return returned

    def _parameters_of(
        self,
        target: _Function,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        positional: Sequence[_Values],
        named: dict[str, _Values],
        module: Module,
    ) -> _Env:
        parameters = _parameters(node.args)
        env = {p.arg: self._annotated(p, module) for p in parameters}
        given = ([frozenset({target.bound})] if target.bound is not None else []) + list(positional)
        places = [*node.args.posonlyargs, *node.args.args]
        for parameter, held in zip(places, given, strict=False):
            env[parameter.arg] = held or env[parameter.arg]
        for name, held in named.items():
            if name in env:
                env[name] = held or env[name]
        rest = tuple((k, v) for k, v in named.items() if k not in env)
        if node.args.vararg is not None:
            env[node.args.vararg.arg] = frozenset({_Tuple(tuple(given[len(places) :]))})
        if node.args.kwarg is not None:
            env[node.args.kwarg.arg] = frozenset({_Keywords(rest)})
        if isinstance(target.bound, _Object):
            for parameter in parameters:
                # handed over by somebody who is not followed, under the name of what is kept
                if not env[parameter.arg] and parameter.annotation is None:
                    kept = self._stored(target.bound, parameter.arg)
                    env[parameter.arg] = frozenset(v for v in kept if isinstance(v, _Args))
        return env

    def _annotated(self, parameter: ast.arg, module: Module) -> _Values:
        """What a parameter holds by its annotation: one of the parsed dataclasses, or a base of one."""
        node = parameter.annotation
        match node:
            case ast.BinOp(left=left):
                node = left
            case ast.Subscript(slice=inner) if ast.unparse(node.value).endswith("Optional"):
                node = inner
        found = self.sources.resolve_class(module, node)
        if found is None or (found[0].name, found[1].name) not in self.ancestors:
            return _NOTHING
        return frozenset({_Args(self.ancestors[found[0].name, found[1].name])})

    def _kept(self, held: Iterable[_Value]) -> bool:
        """Whether one of the objects has been given the arguments to keep."""
        return any(isinstance(value, _Object) and self._holds(value) for value in held)

    def _holds(self, made: _Object) -> bool:
        line = {(module.name, node.name) for module, node in self._order(made.module, made.name)}
        line.add((made.module, made.name))
        return any(key[:2] in line and _carries(held) for key, held in self.attributes.items())

    def _instance(
        self,
        target: _Class,
        positional: Sequence[_Values],
        named: dict[str, _Values],
        guards: _Guards,
    ) -> set[_Value]:
        if (target.module, target.name) in self.ancestors:
            return set()
        made = _Object(target.module, target.name)
        starts = self._bound(made, "__init__", None)
        for function in starts:
            self._call(function, positional, named, guards)
        for name, held in named.items() if not starts else ():
            # a dataclass keeps what it is made of
            kept = {v for v in held if not isinstance(v, _Text)}
            self.attributes.setdefault((made.module, made.name, name), set()).update(kept)
        if self._holds(made):
            self._all_methods(made, guards | {_PERHAPS})
        return {made}

    def _all_methods(self, made: _Object, guards: _Guards) -> None:
        """An object that keeps the arguments: whoever gets it may call any of its methods."""
        for _, node in self._order(made.module, made.name):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    for function in self._bound(made, statement.name, None):
                        self._call(function, [], {}, guards)

    def _looked_through(
        self, module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef
    ) -> None:
        """A function that gets no arguments may still name classes that will get them."""
        if node not in self.visited:
            self.visited.add(node)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                    self._named(module, inner.id, None)

    def _referenced(self, module: Module, node: ast.ClassDef) -> None:
        """A class named on the path whose methods, or whose base's, take the arguments: a callback."""
        key = (module.name, node.name)
        if key in self.visited or key in self.ancestors:
            return
        self.visited.add(key)
        methods = [
            (owner, known, statement)
            for owner, known in self._order(*key)
            for statement in known.body
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        taken = {
            parameter.arg: held
            for owner, _, statement in methods
            for parameter in _parameters(statement.args)
            if (held := self._annotated(parameter, owner))
        }
        made = _Object(*key)
        silent, self.silent = self.silent, 0
        for owner, known, statement in methods if taken else ():
            if {p.arg for p in _parameters(statement.args)} & taken.keys():
                where = f"{owner.name}:{known.name}"
                function = _Function(owner.name, statement, made, where)
                self._call(function, [], taken, frozenset({_PERHAPS}))
        self.silent = silent

    # --- what was found ---------------------------------------------------------------------------

    def _shadowed(self, test: ast.expr, frame: _Frame, guards: _Guards) -> None:
        """A branch that cannot be reached: what its test reads loses against what it contradicts."""
        rivals = {
            name for one in guards if conditions.negated(one) in guards for name in conditions.names(one)
        }
        where = f"{frame.module.label}:{test.lineno}"
        told = self._expressed(test, frame)
        read = conditions.names(ast.unparse(told)) if told is not None else frozenset()
        for name in read - rivals:
            self.shadows[name] = Shadow(where=where, by=tuple(sorted(rivals)))

    def _read(self, name: str, where: str, guards: _Guards) -> None:
        if not self.silent:
            self.reads.setdefault(name, {}).setdefault(where, set()).add(guards)

    @contextmanager
    def _silently(self) -> Iterator[None]:
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1

    # --- expressions over arguments ----------------------------------------------------------------

    def _refused(
        self, node: ast.stmt, raised: ast.expr | None, frame: _Frame, guards: _Guards
    ) -> None:
        """A `raise`: worth knowing where nothing but arguments decides whether it is reached."""
        if isinstance(raised, ast.Call):
            raised = raised.func
        if _PERHAPS in guards or raised is None:
            return
        name = ast.unparse(raised).rpartition(".")[2]
        where = f"{frame.module.label}:{node.lineno}"
        self.refusals.setdefault(where, set()).add((guards, name))

    def _say(self, frame: _Frame) -> conditions.Say:
        def say(node: ast.expr) -> str | None:
            told = self._expressed(node, frame)
            text = None if told is None else ast.unparse(told)
            # a condition that speaks of no argument says nothing about a stage file
            return text if text is not None and conditions.names(text) else None

        return say

    def _texted(self, node: ast.expr, frame: _Frame) -> _Values:
        told = self._expressed(node, frame)
        return _NOTHING if told is None else frozenset({_Text(ast.unparse(told))})

    def _expressed(self, node: ast.expr, frame: _Frame) -> ast.expr | None:
        """An expression with argument names for the objects they belong to; None where that fails."""
        match node:
            case ast.Constant():
                return node
            case ast.Name(id=name) if name in frame.env:
                texts = [v.text for v in frame.env[name] if isinstance(v, _Text)]
                single = len(texts) == len(frame.env[name]) == 1
                return ast.parse(texts[0], mode="eval").body if single else None
            case ast.Attribute(value=ast.Name() | ast.Attribute() as owner, attr=name):
                with self._silently():
                    owners = self._value(owner, frame, frozenset())
                if name in self.fields and owners and all(isinstance(o, _Args) for o in owners):
                    return ast.Name(name, ast.Load())
                return self._literal(node, frame)
            case ast.Name():
                return self._literal(node, frame)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                parts = self._all_expressed([left, *comparators], frame)
                return None if parts is None else ast.Compare(parts[0], ops, parts[1:])
            case ast.BoolOp(op=op, values=parts):
                told = self._all_expressed(parts, frame)
                return None if told is None else ast.BoolOp(op, told)
            case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
                inner = self._expressed(operand, frame)
                return None if inner is None else ast.UnaryOp(op, inner)
            case ast.Call(func=function, args=[inner], keywords=[]) if self._is_enum(function, frame):
                # the member of that value
                return self._expressed(inner, frame)
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                told = self._all_expressed(items, frame)
                return None if told is None else ast.Tuple(told, ast.Load())
        return None

    def _all_expressed(self, nodes: Sequence[ast.expr], frame: _Frame) -> list[ast.expr] | None:
        told = [one for node in nodes if (one := self._expressed(node, frame)) is not None]
        return told if len(told) == len(nodes) else None

    def _is_enum(self, node: ast.expr, frame: _Frame) -> bool:
        found = self.sources.resolve_class(frame.module, node)
        return found is not None and enum_members(self.sources, *found) is not None

    def _literal(self, node: ast.expr, frame: _Frame) -> ast.expr | None:
        """A constant or a member of an enum, by its value."""
        value = self.sources.evaluate(frame.module, node)
        if value is UNKNOWN or not isinstance(value, str | int | float | bool | None):
            return None
        return ast.Constant(value)


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _carries(held: Iterable[_Value]) -> bool:
    """Whether a value is, or contains, one of the parsed dataclasses or a function bound to one."""
    for value in held:
        match value:
            case _Args():
                return True
            case _Function(bound=bound) if bound is not None and _carries({bound}):
                return True
            case _Tuple(items=items) if any(_carries(item) for item in items):
                return True
            case _Keywords(items=pairs) if any(_carries(item) for _, item in pairs):
                return True
    return False


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _reassigned(body: Sequence[ast.stmt], parameters: Iterable[str] = ()) -> frozenset[str]:
    """Names that are given a value more than once: what they hold is not one expression."""
    seen = set(parameters)
    twice: set[str] = set()
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            (twice if node.id in seen else seen).add(node.id)
    return frozenset(twice)


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
                if ast.unparse(function).rpartition(".")[2] not in _LOGS | _SHOWS:
                    return False
                complains = True
            case ast.Assign(targets=[ast.Name()], value=ast.JoinedStr() | ast.Constant(value=str())):
                # the text of the complaint
                continue
            case _:
                return False
    return complains


def _refuses(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch ends in a `raise`."""
    return bool(body) and isinstance(body[-1], ast.Raise)


def _by_place(read: Read | Refusal) -> tuple[str, int, tuple[str, ...]]:
    file, _, line = read.where.rpartition(":")
    return file, int(line), read.when
