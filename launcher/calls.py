"""Calls on the path of an entry script: which functions and objects get the arguments."""

from __future__ import annotations

import ast
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.flow import (
    DEFAULT,
    INLINE,
    NOTHING,
    UNKNOWN,
    Args,
    Class,
    Frame,
    Function,
    Given,
    Items,
    Keywords,
    ModuleName,
    Object,
    Partial,
    Several,
    Shape,
    Text,
    Value,
    Values,
    contents,
    entries,
    leaves,
    listed,
    mapping,
    merged,
    objects,
    parameters_of,
    shallow,
    without_texts,
)
from launcher.lookup import carried, followable, last
from launcher.sources import Module
from launcher.trace import ANYHOW, EXITS, UNSURE, Guards, Trace, place

# methods of the parser that return one object for each dataclass
_PARSES = {"parse_args_into_dataclasses", "parse_args_and_config", "parse", "parse_args"}
LOGS = frozenset({
    "debug", "info", "warning", "warning_once", "warning_rank0", "error", "exception", "critical",
})  # fmt: skip
SHOWS = frozenset({"print", "pprint", "warn", "warn_once", "print_rank0"})
_LOGGER = re.compile(r"(^|[._])log(s|ger|gers|ging)?([._(]|$)", re.IGNORECASE)
# what these give back holds none of what they were given
_TELLS = {
    "isinstance", "issubclass", "len", "str", "repr", "bool", "int", "float", "id", "hash", "type",
    "any", "all", "sum", "callable", "format", "print", "dir",
}  # fmt: skip
_PUTS = {"append", "appendleft", "add", "extend", "insert", "update", "setdefault", "put", "push"}
_CHANGES = _PUTS | {"pop", "popitem", "clear", "remove", "discard", "sort", "reverse"}
_COLLECTS = {
    "dict", "list", "tuple", "set", "frozenset", "zip", "enumerate", "reversed", "sorted", "iter",
    "next", "chain", "itertools",
}  # fmt: skip
_COPIES = {"copy", "deepcopy", "replace", "cast"}
_AS_MAPPING = {"vars", "asdict"}
# one function under more sets of conditions than this is walked without any
_MAX_GUARDS = 16
_MAX_DEPTH = 60
_MAX_RECURSION = 2


@dataclass(slots=True)
class Calls(Trace):
    """Calls, followed to functions and classes; what they cannot be followed to is assumed."""

    @abstractmethod
    def held(self, node: ast.expr, frame: Frame, guards: Guards) -> Values:
        """What an expression may hold, as an expression over arguments where it is one."""

    @abstractmethod
    def children(self, node: ast.AST, frame: Frame, guards: Guards) -> None:
        """Evaluate all expressions below a node."""

    @abstractmethod
    def part(
        self, owners: Values, name: str, node: ast.AST, frame: Frame, guards: Guards
    ) -> Values:
        """What an attribute of these values may hold."""

    @abstractmethod
    def entry(
        self, node: ast.expr, held: Values, key: ast.expr, frame: Frame, guards: Guards
    ) -> Values:
        """One entry of a container: the one meant where that is plain, else any of them."""

    @abstractmethod
    def named(self, module: Module, name: str, frame: Frame | None) -> Values:
        """What a name of a module stands for: a function, a class, a module, a table of them."""

    @abstractmethod
    def put(self, value: Value, name: str, held: Values, guards: Guards) -> None:
        """An attribute of an object gets another value."""

    @abstractmethod
    def put_into(self, owner: ast.expr, held: Values, frame: Frame) -> None:
        """A container gets another entry."""

    @abstractmethod
    def body(self, statements: Sequence[ast.stmt], frame: Frame, guards: Guards) -> None:
        """Walk the statements of a function."""

    # --- calls ---------------------------------------------------------------------------------------

    def _called(self, node: ast.Call, frame: Frame, guards: Guards) -> Values:
        if self._shows(node):
            with self._silently():
                self.children(node, frame, guards)
            return NOTHING
        special = self._special(node, frame, guards)
        if special is not None:
            return special
        targets: Values = NOTHING
        if isinstance(node.func, ast.Attribute):
            owners = self.value(node.func.value, frame, guards)
            given = self._given(node, frame, guards)
            told = self._of_container(node, owners, given, frame, guards)
            if told is not None:
                return told
            targets = self.part(owners, node.func.attr, node.func, frame, guards)
        else:
            targets = self.value(node.func, frame, guards)
            given = self._given(node, frame, guards)
        return self._reached(node, targets, given, frame, guards)

    def _reached(
        self, node: ast.Call, targets: Values, given: Given, frame: Frame, guards: Guards
    ) -> Values:
        """What a call of any of these targets gives back."""
        follow = [one for one in targets if isinstance(one, Function | Partial | Class | Object)]
        # one of a table's entries: which one is not known
        sure = len(targets) == len(follow) == 1 and not isinstance(node.func, ast.Subscript)
        told = [self._call(t, given, guards if sure else guards | UNSURE) for t in follow]
        if follow:
            return merged(*told) if sure else without_texts(merged(*told, NOTHING))
        self._handed_over(given, guards)
        if isinstance(node.func, ast.Name) and node.func.id in _TELLS:
            return NOTHING
        # a wrapper gives back what it wraps, a copy what it was made of
        back = carried(given.everything()) | self._wrapped(node.func, given, frame)
        if back and last(node.func) in _COPIES:
            for name in given.named:
                self._write(name)
            return back
        if given.items:
            for name in self.fields:
                self._read(name, given.where, guards)
        return back | listed(back) | {UNKNOWN} if back else NOTHING

    def _wrapped(self, function: ast.expr, given: Given, frame: Frame) -> Values:
        """A function handed to one that is not followed, first of all: it may come back, wrapped."""
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in _COLLECTS:
            held = leaves(value for part in given.everything() for value in part)
            return listed(held) if objects(held) else NOTHING
        if not isinstance(root, ast.Name) or frame.find(root.id) is not None:
            # a method of some object, such as `map`
            return NOTHING
        first = given.positional[0] if given.positional else NOTHING
        return frozenset(v for v in first if isinstance(v, Function | Partial))

    def _special(self, node: ast.Call, frame: Frame, guards: Guards) -> Values | None:
        """Calls that mean something to the walk by themselves."""
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[]):
                return self.named(frame.module, "super", frame)
            case ast.Call(func=ast.Name(id="super"), args=[_, instance]):
                self.value(instance, frame, guards)
                return self.named(frame.module, "super", frame)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, name, *rest]):
                return self._getattr(node, owner, name, rest, frame, guards)
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, name, *rest]):
                held = self.held(rest[0], frame, guards) if rest else NOTHING
                self._setattr(owner, name, held, frame, guards)
                return NOTHING
            case ast.Call(func=ast.Attribute(attr="__setattr__"), args=[owner, name, value]):
                self._setattr(owner, name, self.held(value, frame, guards), frame, guards)
                return NOTHING
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _PARSES:
                if last(owner) in {"version", "json", "datetime", "urlparse"}:
                    return None
                self.children(node, frame, guards)
                parsed = tuple(frozenset[Value]({Args(i)}) for i in range(len(self.classes)))
                # a single one comes by itself
                alone = len(parsed) == 1 and name in {"parse", "parse_args"}
                return parsed[0] if alone else frozenset({Several(parsed)})
            case ast.Call(args=[one]) if last(node.func) in _AS_MAPPING:
                held = self.value(one, frame, guards)
                return frozenset({Items(v.index) for v in held if isinstance(v, Args)})
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                given = self._given(node, frame, guards)
                return frozenset({mapping(given.named)}) if any(given.named.values()) else NOTHING
            case ast.Call(args=[function, *_]) if last(node.func) in {"partial", "partialmethod"}:
                return self._partial(node, function, frame, guards)
        return None

    def _partial(self, node: ast.Call, function: ast.expr, frame: Frame, guards: Guards) -> Values:
        targets = self.value(function, frame, guards)
        rest = ast.copy_location(ast.Call(node.func, node.args[1:], node.keywords), node)
        given = self._given(rest, frame, guards)
        told: set[Value] = set()
        for target in targets:
            if isinstance(target, Function | Partial | Class):
                self._call(target, given, guards | UNSURE)
                positional = tuple(shallow(held) for held in given.positional)
                named = tuple((key, shallow(held)) for key, held in given.named.items())
                told.add(Partial(target, positional, named))
        return frozenset(told) or carried(given.everything())

    def _of_container(
        self, node: ast.Call, owners: Values, given: Given, frame: Frame, guards: Guards
    ) -> Values | None:
        """What a method of a list or a table gives back; None for any other object."""
        assert isinstance(node.func, ast.Attribute)
        owner, name = node.func.value, node.func.attr
        if name in _CHANGES:
            self._changed(owners, owner, frame)
        told: list[Values] = []
        for value in owners:
            if isinstance(value, Items) and name in {"get", "pop", "setdefault"} and node.args:
                told.append(self.entry(node, frozenset({value}), node.args[0], frame, guards))
            elif isinstance(value, Items) and name == "update":
                for key in given.named:
                    self._write(key)
                for one in (pair for held in given.positional for pair in held):
                    for key, _ in one.items if isinstance(one, Keywords) else ():
                        self._write(key)
        tables = frozenset(v for v in owners if isinstance(v, Several | Keywords))
        if name in _PUTS and not any(isinstance(v, Object | Args | ModuleName) for v in owners):
            for held in given.everything():
                self.put_into(owner, contents(held) or held, frame)
        if tables:
            self._handed_over(given, guards)
            held = contents(tables)
            pairs = Several((NOTHING, held)) if name == "items" else None
            told.append(frozenset({Several((frozenset({pairs}),), False)}) if pairs else held)
            if name in {"values", "copy"}:
                told[-1] = told[-1] | tables
        if not told:
            return frozenset({UNKNOWN}) if any(isinstance(v, Items) for v in owners) else None
        return merged(*told) | {UNKNOWN}

    def _given(self, node: ast.Call, frame: Frame, guards: Guards) -> Given:
        """The arguments of a call."""
        given = Given(where=place(node, frame))
        rest: list[Values] = []
        for argument in node.args:
            held = self.held(argument, frame, guards)
            if not isinstance(argument, ast.Starred):
                given.positional.append(held)
                continue
            spread = next((v for v in held if isinstance(v, Several)), None)
            if spread is not None and spread.exact and len(held) == 1:
                given.positional += spread.items
            else:
                rest.append(contents(held))
        for keyword in node.keywords:
            held = self.held(keyword.value, frame, guards)
            if keyword.arg is not None:
                given.named[keyword.arg] = held
                continue
            for value in held:
                match value:
                    case Keywords(items=pairs):
                        given.named |= dict(pairs)
                    case Items():
                        given.items = True
                    case Several():
                        rest.append(contents({value}))
        given.rest = objects(merged(*rest)) if rest else NOTHING
        return given

    def _shows(self, node: ast.Call) -> bool:
        """Whether a call only writes to a log, to the screen, or to a record."""
        match node.func:
            case ast.Name(id=name):
                return name in SHOWS or name in self.recorders
            case ast.Attribute(value=owner, attr=name):
                logs = name in LOGS and _LOGGER.search(ast.unparse(owner)) is not None
                return logs or name in SHOWS or name in self.recorders
        return False

    def _getattr(
        self,
        node: ast.Call,
        owner: ast.expr,
        name: ast.expr,
        rest: Sequence[ast.expr],
        frame: Frame,
        guards: Guards,
    ) -> Values:
        owners = self.value(owner, frame, guards)
        others = [self.held(one, frame, guards) for one in (name, *rest)][1:]
        told = self._constant_text(name, frame)
        if told is not None:
            held = self.part(owners, told, node, frame, guards)
            # it may be the value for an attribute that is not there
            return held if told in self.fields or not rest else merged(held, *others)
        if any(isinstance(one, Args) for one in owners) and not isinstance(frame.bound, Args):
            for known in self._names_meant(name, frame):
                self._read(known, place(node, frame), guards | UNSURE)
        return NOTHING

    def _setattr(
        self, owner: ast.expr, name: ast.expr, held: Values, frame: Frame, guards: Guards
    ) -> None:
        owners = self.value(owner, frame, guards)
        self.value(name, frame, guards)
        told = self._constant_text(name, frame)
        for value in owners:
            if told is not None:
                self.put(value, told, held, guards)
            elif isinstance(value, Args):
                for known in self._names_meant(name, frame):
                    self._write(known)

    def _handed_over(self, given: Given, guards: Guards) -> None:
        """Functions given to something that is not followed, which may call them."""
        functions = [one for held in given.everything() for one in followable(held)]
        if not functions:
            return
        named = {
            key: held
            for values in given.named.values()
            for one in values
            if isinstance(one, Keywords)
            for key, held in one.items
        }
        loose = (v for held in given.everything() for v in entries(held))
        rest = frozenset(v for v in loose if isinstance(v, Args | Object) and self.carries({v}))
        for function in functions:
            self._call(function, Given([], named, rest), guards | UNSURE)

    # --- functions -----------------------------------------------------------------------------------

    def _call(self, target: Value, given: Given, guards: Guards) -> set[Value]:
        match target:
            case Class():
                return self._instance(target, given, guards)
            case Object():
                found = self.bound(target, "__call__")
                return {v for f in found for v in self._call(f, given, guards)}
            case Partial(function=function, positional=items, named=pairs):
                more = replace(given, positional=[*items, *given.positional])
                more.named = {**dict(pairs), **given.named}
                return self._call(function, more, guards)
            case Function(node=node):
                if not isinstance(node, ast.Lambda) and node.name in self.recorders:
                    return set()
                return self._function(target, given, guards)
        return set()

    def _function(self, target: Function, given: Given, guards: Guards) -> set[Value]:
        module = self.sources.module(target.module)
        assert module is not None
        node, shape = target.node, self.shape(target.node)
        env = self._parameters(target, given, module, guards)
        if not self._follows(target, env, shape):
            self._looked_through(module, target)
            return set()
        if self._active.get(node, 0) >= _MAX_RECURSION:
            env = {name: without_texts(held) for name, held in env.items()}
        seen: frozenset[tuple[str, Values]] = frozenset()
        if target.scope is not None:
            around = ((n, target.scope.find(n)) for n in shape.mentioned)
            seen = frozenset((n, held) for n, held in around if held)
        quiet = self._silent > 0 and shape.plain
        # what is walked without counting has not been counted
        key = (target, frozenset(env.items()), seen, quiet)
        returned = self._returns.setdefault(key, set())
        effects = self._effects.setdefault(key, set())
        before = self._walked.setdefault(key, [])
        if not any(known <= guards for known in before) and self._depth <= _MAX_DEPTH:
            if len(before) >= _MAX_GUARDS:
                guards = frozenset.intersection(*before, guards) | UNSURE
            if shape.generator or isinstance(node, ast.AsyncFunctionDef):
                guards = guards | UNSURE
            before.append(guards)
            self._entered.add(node)
            frame = self._frame(target, module, env, quiet)
            frame.returned = returned
            with self._watched() as wrote:
                self._run(node, frame, guards, quiet)
            effects |= wrote | ({EXITS} if frame.exits else set())
        self._wrote |= effects
        return set(returned)

    def _frame(
        self, target: Function, module: Module, env: dict[str, Values], quiet: bool
    ) -> Frame:
        """The frame of a call: one for all calls that differ in functions and containers only.

        Functions inside this one see it; with a frame for each of their kind there would be no end.
        """
        plain = frozenset((name, _plain(held)) for name, held in env.items())
        bound = None if isinstance(target.bound, Function | Partial) else target.bound
        key = (target.node, target.owner, target.scope, bound, plain, quiet)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(module, self.shape(target.node), node=target.node)
            frame.outer, frame.owner, frame.bound = target.scope, target.owner, target.bound
        for name, held in env.items():
            frame.given[name] = frame.given.get(name, NOTHING) | held
        return frame

    def _run(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        frame: Frame, guards: Guards, quiet: bool,
    ) -> None:  # fmt: skip
        silent, self._silent = self._silent, int(quiet)
        around = frame.env, frame.nested
        frame.env, frame.nested = dict(frame.given), []
        for name in frame.shape.assigned & frame.env.keys():
            frame.env[name] = without_texts(frame.env[name])
        self._depth += 1
        self._active[node] = self._active.get(node, 0) + 1
        try:
            if isinstance(node, ast.Lambda):
                frame.returned |= self.held(node.body, frame, guards)
            else:
                self.body(node.body, frame, guards)
        finally:
            if self._active[node] > 1:
                frame.env, frame.nested = around
            self._active[node] -= 1
            self._depth -= 1
            self._silent = silent

    def _follows(self, target: Function, env: Mapping[str, Values], shape: Shape) -> bool:
        """Whether a call can get at the arguments: by what it is given, or by what it sees."""
        if target.module == self.script.name or target.scope is not None:
            return True
        if any(self.carries(held) for held in env.values()):
            return True
        return any(
            name in shape.mentioned and (owner == target.module or self._imports(target, owner))
            for owner, name in self.globals
        )

    def _imports(self, target: Function, owner: str) -> bool:
        """Whether a function's module can name what another one holds."""
        module = self.sources.module(target.module)
        assert module is not None
        known = {*module.modules.values(), *module.stars}
        known |= {o for o, _ in module.imports.values()}
        known |= {f"{o}.{name}" for o, name in module.imports.values()}
        return owner in known

    def _parameters(
        self, target: Function, given: Given, module: Module, guards: Guards
    ) -> dict[str, Values]:
        """What the parameters of a function hold at a call."""
        arguments = target.node.args
        parameters = parameters_of(arguments)
        env = {p.arg: self.annotated(p, module) for p in parameters}
        got: dict[str, Values] = {}
        positional = list(given.positional)
        if target.bound is not None:
            positional.insert(0, frozenset({target.bound}))
        places = [*arguments.posonlyargs, *arguments.args]
        for parameter, held in zip(places, positional, strict=False):
            got[parameter.arg] = held
        got |= {name: held for name, held in given.named.items() if name in env}
        for name in env:
            if given.items and name in self.fields and name not in got:
                self._read(name, given.where, guards)
                got[name] = frozenset({Text(name)})
            elif given.rest and not got.get(name):
                got[name] = given.rest | {UNKNOWN}
            if got.get(name, NOTHING) - {UNKNOWN}:
                env[name] = got[name]
        for parameter, default in _defaults(arguments):
            if parameter.arg not in got and not isinstance(default, ast.Constant):
                frame = target.scope or Frame(module, INLINE)
                with self._silently():
                    known = objects(self.value(default, frame, ANYHOW))
                env[parameter.arg] = known or env[parameter.arg]
        more = tuple((k, v) for k, v in given.named.items() if k not in got)
        if arguments.vararg is not None:
            spare = tuple(positional[len(places) :])
            items = (*spare, given.rest) if given.rest else spare
            env[arguments.vararg.arg] = frozenset({Several(items, exact=not given.rest)})
        if arguments.kwarg is not None:
            rest = (("", given.rest),) if given.rest else ()
            env[arguments.kwarg.arg] = frozenset({Keywords((*more, *rest))})
        if isinstance(target.bound, Object):
            for parameter in parameters:
                # handed over by somebody who is not followed, under the name of what is kept
                given_here = parameter.arg in got or env[parameter.arg]
                if not given_here and parameter.annotation is None:
                    kept = self.stored(target.bound, parameter.arg)
                    env[parameter.arg] = frozenset(v for v in kept if isinstance(v, Args))
        return env

    # --- objects -------------------------------------------------------------------------------------

    def _instance(self, target: Class, given: Given, guards: Guards) -> set[Value]:
        if (target.module, target.name) in self.ancestors:
            return self._fresh(target, given)
        made = Object(target.module, target.name)
        starts = self.bound(made, "__init__")
        for function in starts:
            self._call(function, given, guards)
        if not starts:
            self._filled(made, given)
        if self.keeps(made):
            self._all_methods(made, guards | UNSURE)
        return {made}

    def _fresh(self, target: Class, given: Given) -> set[Value]:
        """An instance of a parsed dataclass that the source makes itself."""
        index = self.ancestors[target.module, target.name]
        if not given.items and not given.rest:
            return {DEFAULT}
        # a copy, with changes
        for name in given.named:
            self._write(name)
        return {Args(index)}

    def _filled(self, made: Object, given: Given) -> None:
        """A dataclass, or a named tuple, keeps what it is made of."""
        names = [
            statement.target.id
            for _, node in reversed(self.order((made.module, made.name)))
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        ]
        pairs = {**dict(zip(names, given.positional, strict=False)), **given.named}
        for name, held in pairs.items():
            self.keep(made, name, objects(held))
        if self.carries(given.rest):
            for name in names:
                self.keep(made, name, given.rest | {UNKNOWN})

    def _all_methods(self, made: Object, guards: Guards) -> None:
        """An object that keeps the arguments: whoever gets it may call any of its methods."""
        for _, node in self.order((made.module, made.name)):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    for function in self.bound(made, statement.name):
                        self._call(function, Given(), guards)

    def _looked_through(self, module: Module, target: Function) -> None:
        """A function that gets no arguments may still name classes that will get them."""
        if target.node in self._visited:
            return
        self._visited.add(target.node)
        for name in sorted(self.shape(target.node).names):
            for value in self.named(module, name, None):
                if isinstance(value, Function) and value.module == module.name:
                    self._looked_through(module, value)

    def _referenced(self, module: Module, node: ast.ClassDef) -> None:
        """A class named on the path whose methods, or whose base's, take the arguments: a callback."""
        key = (module.name, node.name)
        if key in self._visited or key in self.ancestors:
            return
        self._visited.add(key)
        methods = [
            (owner, known, statement)
            for owner, known in self.order(key)
            for statement in known.body
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        taken = {
            parameter.arg: held
            for owner, _, statement in methods
            for parameter in parameters_of(statement.args)
            if (held := self.annotated(parameter, owner))
        }
        made = Object(*key)
        with self._aloud():
            for owner, known, statement in methods if taken else ():
                if {p.arg for p in parameters_of(statement.args)} & taken.keys():
                    where = f"{owner.name}:{known.name}"
                    function = Function(owner.name, statement, made, where)
                    self._call(function, Given([], taken), UNSURE)


def _plain(held: Values) -> Values:
    """The values without functions and containers."""
    return frozenset(v for v in held if not isinstance(v, Function | Partial | Several | Keywords))


def _defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
    """Parameters with their standard values."""
    places = [*arguments.posonlyargs, *arguments.args]
    if arguments.defaults:
        yield from zip(places[-len(arguments.defaults) :], arguments.defaults, strict=True)
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            yield parameter, default
