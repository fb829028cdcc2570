"""What a call returns: functions, classes and callbacks are walked, the rest is guessed at."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import field, replace

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source.expressions import Expressions
from launcher.upstream.source.lookup import Method
from launcher.upstream.source.packages import Module, methods_of
from launcher.upstream.source.record import UNSURE, Guards, Spot
from launcher.upstream.source.syntax import (
    LOGS,
    SHOWS,
    FunctionNode,
    FunctionShape,
    find_root,
    list_parameters,
    take_last_name,
)
from launcher.upstream.source.values import (
    ANY,
    DEFAULT,
    NOTHING,
    UNKNOWN,
    Args,
    CallArguments,
    Class,
    ClassKey,
    Container,
    Frame,
    Function,
    Items,
    ModuleValue,
    Object,
    Super,
    Text,
    Value,
    Values,
    drop_texts,
    find_carried,
    find_functions,
    keep_objects,
    make_list,
    mapping_of,
    merge,
    take_contents,
    take_entries,
    take_leaves,
)

# methods of the parser that return one object for each dataclass
_PARSES = {"parse_args_into_dataclasses", "parse_args_and_config", "parse", "parse_args"}
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


@dataclass(slots=True)
class Calls(Expressions):
    """Adds calls: a function is walked once for what it gets, under the weakest conditions."""

    script: Module = field(kw_only=True)
    recorders: frozenset[str] = frozenset()
    # the functions that were walked, each with its module
    ran: dict[FunctionNode, Module] = field(default_factory=dict)
    _walked: dict[object, list[Guards]] = field(default_factory=dict)
    _visited: set[object] = field(default_factory=set)
    # kept from pass to pass: what calls return, write, and see
    _returns: dict[object, set[Value]] = field(default_factory=dict)
    _frames: dict[object, Frame] = field(default_factory=dict)
    _active: set[ast.AST] = field(default_factory=set)
    _depth: int = 0

    def evaluate_call(self, node: ast.Call, at: Spot) -> Values:
        if self.shows(node):
            with self.record.muted():
                self.walk_children(node, at)
            return NOTHING
        special = self._call_special(node, at)
        if special is not None:
            return special
        function = node.func
        if not isinstance(function, ast.Attribute):
            targets = self.value(function, at)
            arguments = self._evaluate_arguments(node, at)
            return self._follow(function, targets, arguments, at)
        owners = self.value(function.value, at)
        arguments = self._evaluate_arguments(node, at)
        result = self._call_container_method(node, function, owners, arguments, at)
        if result is not None:
            return result
        targets = self.part(owners, function.attr, function, at)
        return self._follow(function, targets, arguments, at)

    def _follow(
        self, function: ast.expr, targets: Values, arguments: CallArguments, at: Spot
    ) -> Values:
        """What a call returns whose function may be any of `targets`."""
        callables = [value for value in targets if isinstance(value, Function | Class | Object)]
        if not callables:
            return self._call_unknown(function, arguments, at)
        if UNKNOWN in targets:
            # of a wrapped function other parameters may be filled already
            rest = arguments.rest | find_carried(arguments.sets())
            arguments = replace(arguments, rest=rest)
        if len(targets) == 1 and not isinstance(function, ast.Subscript):
            return frozenset(self.call(callables[0], arguments, at.guards))
        # one of a table's entries: which one is not known
        guards = at.perhaps().guards
        results = [self.call(target, arguments, guards) for target in callables]
        return drop_texts(merge(*results, NOTHING))

    def _call_unknown(self, function: ast.expr, arguments: CallArguments, at: Spot) -> Values:
        self._call_argument_functions(arguments, at)
        # a wrapper gives back what it wraps, a copy what it was made of
        back = find_carried(arguments.sets()) | self._unwrap_call(function, arguments, at.frame)
        if not back:
            return NOTHING
        if take_last_name(function) in _COPIES:
            for name in arguments.named:
                self.record.add_write(name)
            return back
        return back | make_list(back) | {UNKNOWN}

    def _unwrap_call(self, function: ast.expr, arguments: CallArguments, frame: Frame) -> Values:
        """A function that is the first argument of one not followed: it may come back, wrapped."""
        root = find_root(function)
        if not isinstance(root, ast.Name):
            return NOTHING
        if root.id in _COLLECTS:
            values = take_leaves(value for part in arguments.sets() for value in part)
            return make_list(values) if keep_objects(values) else NOTHING
        if not arguments.positional or frame.find(root.id) is not None:
            # a method of some object, such as `map`, gives back something else
            return NOTHING
        return frozenset(v for v in arguments.positional[0] if isinstance(v, Function))

    def _call_argument_functions(self, arguments: CallArguments, at: Spot) -> None:
        """Functions given to something that is not followed, which may call them."""
        functions: list[Value] = []
        rest: set[Value] = set()
        for values in arguments.sets():
            functions += find_functions(values)
            for value in take_entries(values):
                if isinstance(value, Args | Object) and self.carries({value}):
                    rest.add(value)
        guards = at.perhaps().guards
        for function in functions:
            self.call(function, CallArguments(rest=frozenset(rest)), guards)

    def _call_special(self, node: ast.Call, at: Spot) -> Values | None:
        """A call of Python's own functions or of the parser; None for any other."""
        match node.func, node.args:
            case ast.Name(id="super"), []:
                return _find_super(at.frame)
            case ast.Name(id="getattr" | "hasattr"), [_, _, *_]:
                return self._call_getattr(node, at)
            case ast.Name(id="setattr" | "delattr"), [_, _, *_]:
                return self._call_setattr(node, at)
            case ast.Attribute(attr=name), _ if name in _PARSES:
                self.walk_children(node, at)
                return self._parse_arguments(name)
            case function, [argument] if take_last_name(function) in _AS_MAPPING:
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
            self.record.add_change(owners)
        is_object = any(isinstance(owner, Object | Args | ModuleValue) for owner in owners)
        if function.attr in _PUTS and not is_object:
            for values in arguments.sets():
                self.put_into(function.value, take_contents(values) or values, at.frame)
        containers = frozenset(v for v in owners if isinstance(v, Items | Container))
        if not containers:
            return None
        # `items` gives pairs, `values` and `copy` a container, `get` an entry
        result = take_contents(containers) | containers | {UNKNOWN}
        if node.args:
            result |= self.take_entry(node, containers, node.args[0], at)
        return result

    def _evaluate_arguments(self, node: ast.Call, at: Spot) -> CallArguments:
        arguments = CallArguments()
        rest: list[Values] = []
        for argument in node.args:
            values = self.symbolic(argument, at)
            if isinstance(argument, ast.Starred):
                rest.append(take_contents(values))
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
                    for name in self.record.fields:
                        self.record.add_read(name, node, at)
                elif isinstance(value, Container) and value.keys is not None:
                    arguments.named |= value.pairs
                elif isinstance(value, Container):
                    rest.append(take_contents({value}))
        arguments.rest = keep_objects(merge(*rest))
        return arguments

    def shows(self, node: ast.Call) -> bool:
        """Whether a call only writes to a log, to the screen, or to a record."""
        name = take_last_name(node.func)
        if name in SHOWS or name in self.recorders:
            return True
        if name in LOGS and isinstance(node.func, ast.Attribute):
            return _LOGGER.search(ast.unparse(node.func.value)) is not None
        return False

    def _call_getattr(self, node: ast.Call, at: Spot) -> Values:
        owner, name, *rest = node.args
        owners = self.value(owner, at)
        self.value(name, at)
        others = [self.symbolic(default, at) for default in rest]
        text = self.find_constant_text(name, at.frame)
        if text is not None:
            values = self.part(owners, text, node, at)
            if rest and text not in self.record.fields:
                # it may be the value for an attribute that is not there
                return merge(values, *others)
            return values
        if any(isinstance(v, Args) for v in owners) and not isinstance(at.frame.bound, Args):
            for possible in self.find_possible_names(name, at.frame):
                self.record.add_read(possible, node, at.perhaps())
        return NOTHING

    def _call_setattr(self, node: ast.Call, at: Spot) -> Values:
        owner, name, *rest = node.args
        values = self.symbolic(rest[0], at) if rest else NOTHING
        owners = self.value(owner, at)
        self.value(name, at)
        text = self.find_constant_text(name, at.frame)
        for value in owners:
            if text is not None:
                self.put(value, text, values)
            elif isinstance(value, Args):
                for possible in self.find_possible_names(name, at.frame):
                    self.record.add_write(possible)
        return NOTHING

    def call(self, target: Value, arguments: CallArguments, guards: Guards) -> set[Value]:
        match target:
            case Class():
                return self._create_instance(target, arguments, guards)
            case Object():
                returned: set[Value] = set()
                for function in self.bound(target, "__call__"):
                    returned |= self.call(function, arguments, guards)
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
            env = {name: drop_texts(values) for name, values in env.items()}
        visible = _find_visible(target, shape)
        key = (target, frozenset(env.items()), frozenset(visible.items()))
        returned = self._returns.setdefault(key, set())
        earlier = self._walked.setdefault(key, [])
        is_covered = any(seen <= guards for seen in earlier)
        if is_covered or self._depth > _MAX_DEPTH:
            return set(returned)
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
        passed = frozenset[Value]().union(*env.values())
        if self.carries(passed):
            return True
        return shape.refuses and any(isinstance(value, Text) for value in passed)

    def _open_frame(self, target: Function, env: dict[str, Values]) -> Frame:
        """The frame of a call: one for all calls that differ in functions and containers only.

        A function that is passed down may be defined inside the callee and refer to its frame. A
        frame for each such function would create the next one, without end.
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
        """Walk the body of a function that is called; afterwards its caller's names hold again."""
        frame = at.frame
        self.ran[node] = frame.module
        around = frame.env
        frame.env = dict(frame.parameters)
        for name in frame.shape.assigned & frame.env.keys():
            frame.env[name] = drop_texts(frame.env[name])
        is_recursion = node in self._active
        self._active.add(node)
        self._depth += 1
        with self.record.muted(False):
            if isinstance(node, ast.Lambda):
                frame.returned |= self.symbolic(node.body, at)
            else:
                self.walk_block(node.body, at)
        self._depth -= 1
        if is_recursion:
            frame.env = around
        else:
            self._active.remove(node)

    def _bind_parameters(self, target: Function, arguments: CallArguments) -> dict[str, Values]:
        """What the parameters of a function hold in a call, `*args` and `**kwargs` too."""
        signature = target.node.args
        rest = arguments.rest
        positional = list(arguments.positional)
        if target.bound is not None:
            positional.insert(0, frozenset({target.bound}))
        places = [*signature.posonlyargs, *signature.args]
        passed = {p.arg: values for p, values in zip(places, positional, strict=False)}
        # those that no parameter is named after
        named = dict(arguments.named)
        env: dict[str, Values] = {}
        for parameter in list_parameters(signature):
            name = parameter.arg
            values = named.pop(name, None) or passed.get(name, NOTHING)
            if rest and not values:
                values = rest | {UNKNOWN}
            if not values - {UNKNOWN}:
                values = self.annotated(parameter, target.module)
            env[name] = values
        further = positional[len(places) :]
        if rest:
            further.append(rest)
            named[""] = rest
        if signature.vararg is not None:
            items = Container(tuple(further), exact=not rest)
            env[signature.vararg.arg] = frozenset({items})
        if signature.kwarg is not None:
            env[signature.kwarg.arg] = mapping_of(named)
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
            self.call(function, arguments, guards)
        if not starts:
            # a dataclass, or a named tuple, keeps what it is made of
            for values in arguments.sets():
                self.keep(key, ANY, keep_objects(values))
        if self.keeps(key):
            # whoever gets an object that keeps the arguments may call any of its methods
            for _, _, method in self._list_methods(key):
                if method.name == "__init__":
                    continue
                for function in self.bound(instance, method.name):
                    self.call(function, CallArguments(), guards | UNSURE)
        return {instance}

    def _list_methods(self, key: ClassKey) -> Iterator[Method]:
        for module, owner in self.order(key):
            for _, method in methods_of(owner):
                yield module, owner, method

    def _look_through(self, module: Module, node: FunctionNode) -> None:
        """A function that gets no arguments may still name classes that will get them."""
        if node in self._visited:
            return
        self._visited.add(node)
        for name in sorted(self.shape(node).names):
            for value in self.named(module, name):
                if isinstance(value, Function) and value.module is module:
                    self._look_through(module, value.node)

    def call_callback_methods(self, key: ClassKey) -> None:
        """A callback: a class named on the path whose methods, or a base's, take the arguments."""
        if key in self._visited or key in self.ancestors:
            return
        self._visited.add(key)
        taken: dict[str, Values] = {}
        for module, _, method in self._list_methods(key):
            for parameter in list_parameters(method.args):
                values = self.annotated(parameter, module)
                if values:
                    taken[parameter.arg] = values
        if not taken:
            return
        with self.record.muted(False):
            for module, owner, method in self._list_methods(key):
                if any(parameter.arg in taken for parameter in list_parameters(method.args)):
                    function = Function(module, method, Object(key), owner)
                    self.call(function, CallArguments(named=taken), UNSURE)


def _find_visible(target: Function, shape: FunctionShape) -> dict[str, Values]:
    """What a function inside a function sees of the names around it."""
    visible: dict[str, Values] = {}
    if target.scope is not None:
        for name in shape.mentioned:
            values = target.scope.find(name)
            if values:
                visible[name] = values
    return visible


def _find_super(frame: Frame) -> Values:
    """What `super()` stands for in a method, or in a function inside one."""
    for outer in frame.chain():
        function = outer.function
        if function is not None and function.owner and function.bound:
            return frozenset({Super(function.bound, function.owner)})
    return NOTHING
