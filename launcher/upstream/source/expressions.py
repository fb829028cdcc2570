"""What an expression may hold, and which arguments it reads; what assignments keep."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source import conditions
from launcher.upstream.source.branches import Branches
from launcher.upstream.source.packages import Module
from launcher.upstream.source.record import ANYHOW, Guards, Spot
from launcher.upstream.source.syntax import FunctionNode, is_property, list_own_attributes
from launcher.upstream.source.values import (
    DEFAULT,
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
    Items,
    ModuleValue,
    Object,
    Super,
    Text,
    Unknown,
    Value,
    Values,
    drop_texts,
    flatten_deep,
    keep_objects,
    make_list,
    mapping_of,
    merge,
    pick_entry,
    take_contents,
    take_entries,
    take_leaves,
    unpack,
)

_TABLES = ast.Dict | ast.List | ast.Tuple | ast.Name | ast.Attribute
_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


@dataclass(slots=True)
class Expressions(Branches):
    """Evaluates everything but calls, which `Calls` adds."""

    _tables: dict[tuple[Module, str], Values] = field(default_factory=dict)

    def evaluate_call(self, node: ast.Call, at: Spot) -> Values:
        """What a call returns; see `Calls`."""
        raise NotImplementedError

    def call(self, target: Value, arguments: CallArguments, guards: Guards) -> set[Value]:
        """What a function or class returns; see `Calls`."""
        raise NotImplementedError

    def call_callback_methods(self, key: ClassKey) -> None:
        """Call the methods of a class that somebody else will call; see `Calls`."""
        raise NotImplementedError

    def walk_block(self, body: Sequence[ast.stmt], at: Spot) -> Spot | None:
        """Walk statements in order; see `Walk`."""
        raise NotImplementedError

    def symbolic(self, node: ast.expr, at: Spot) -> Values:
        """What an expression may hold, as an expression over arguments if it is one."""
        values = self.value(node, at)
        if isinstance(node, ast.BoolOp) and not keep_objects(drop_texts(values)) - {DEFAULT}:
            values = NOTHING
        if values:
            return values
        text = self.express_as_text(node, at.frame)
        return NOTHING if text is None else frozenset({Text(text)})

    def value(self, node: ast.expr, at: Spot) -> Values:
        """What an expression may hold; records the arguments that it reads."""
        match node:
            case ast.Constant(value=None):
                return frozenset({DEFAULT})
            case ast.Name(id=name):
                values = at.frame.find(name)
                return self.named(at.frame.module, name) if values is None else values
            case ast.Attribute(value=owner, attr=name):
                return self.part(self.value(owner, at), name, node, at)
            case ast.Call():
                return self.evaluate_call(node, at)
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
                return self.take_entry(node, self.value(owner, at), key, at)
            case ast.Lambda():
                self.walk_defaults(node, at)
                function = Function(at.frame.module, node, scope=at.frame)
                self.call(function, CallArguments(), at.perhaps().guards)
                return frozenset({function})
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._evaluate_comprehension(node, at)
            case ast.NamedExpr(target=target, value=value):
                with self.record.muted(False):
                    values = self.symbolic(value, at)
                self.store(target, values, at)
                return values
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.value(value, at)
        self.walk_children(node, at)
        return NOTHING

    def walk_children(self, node: ast.AST, at: Spot) -> None:
        """Evaluate all that a node holds; what it gives itself is not known."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, at)
            elif isinstance(child, ast.stmt):
                # of a branch of `match`
                self.walk_block([child], at.perhaps())
            else:
                self.walk_children(child, at)

    def walk_defaults(self, node: FunctionNode, at: Spot) -> None:
        """What is evaluated where a function is defined: standard values and decorators."""
        nodes = [*node.args.defaults, *node.args.kw_defaults]
        if not isinstance(node, ast.Lambda):
            nodes += node.decorator_list
        for inner in nodes:
            if inner is not None:
                self.value(inner, at)

    def _evaluate_bool_op(self, node: ast.BoolOp, at: Spot) -> Values:
        sides = []
        for part in node.values:
            sides.append(self.value(part, at))
            true, false = self.split_branches(part, at)
            following = true if isinstance(node.op, ast.And) else false
            at = self.record.drop_outdated(following)
        return merge(*sides)

    def _evaluate_conditional(self, node: ast.IfExp, at: Spot) -> Values:
        self.value(node.test, at)
        true, false = self.split_branches(node.test, at)
        first = self._evaluate_side(node.body, true)
        second = self._evaluate_side(node.orelse, false)
        return merge(*first, *second)

    def _evaluate_side(self, node: ast.expr, at: Spot) -> list[Values]:
        """What one side of a conditional expression may hold; nothing if it is never that one."""
        at = self.record.drop_outdated(at)
        if conditions.is_impossible(at.guards):
            return []
        return [self.symbolic(node, at)]

    def _evaluate_sequence(self, items: Sequence[ast.expr], at: Spot) -> Values:
        parts: list[Values] = []
        exact = True
        for item in items:
            values = self.symbolic(item, at)
            if isinstance(item, ast.Starred):
                exact = False
                values = take_contents(values)
            parts.append(flatten_deep(values))
        return frozenset({Container(tuple(parts), exact)}) if any(parts) else NOTHING

    def _evaluate_dict(self, node: ast.Dict, at: Spot) -> Values:
        pairs: dict[str, Values] = {}
        parts: list[Values] = []
        all_named = True
        for key, value in zip(node.keys, node.values, strict=True):
            values = flatten_deep(self.symbolic(value, at))
            if key is None:
                spread = _collect_pairs(values)
                pairs |= spread
                parts.append(take_leaves(values))
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
        if all_named:
            return mapping_of(pairs)
        return frozenset({Container(tuple(parts), exact=False)})

    def take_entry(self, node: ast.expr, values: Values, key: ast.expr, at: Spot) -> Values:
        """One entry of a container: the one at `key` if that is plain, else any of them."""
        results: list[Values] = []
        for value in values:
            match value:
                case Container():
                    results.append(pick_entry(value, key))
                case Items(index):
                    text = self.find_constant_text(key, at.frame)
                    if text is not None:
                        owner = frozenset[Value]({Args(index)})
                        results.append(self.part(owner, text, node, at))
                case Unknown() | Text():
                    continue
                case _:
                    results.append(NOTHING)
        return merge(*results)

    def _evaluate_comprehension(self, node: _Comprehension, at: Spot) -> Values:
        for generator in node.generators:
            values = self.value(generator.iter, at)
            at = at.perhaps()
            self.store(generator.target, take_entries(values), at)
            for test in generator.ifs:
                self.value(test, at)
                at = self.split_branches(test, at)[0]
        if isinstance(node, ast.DictComp):
            self.value(node.key, at)
            element = node.value
        else:
            element = node.elt
        values = keep_objects(self.value(element, at))
        return make_list(values) if values else NOTHING

    def part(self, owners: Values, name: str, node: ast.AST, at: Spot) -> Values:
        """What an attribute of these values may hold."""
        parts: list[Values] = []
        for owner in owners:
            if not isinstance(owner, Default | Unknown):
                parts.append(self._read_part(owner, name, node, at))
        values = merge(*parts)
        if values and UNKNOWN in owners:
            values |= {UNKNOWN}
        return values

    def _read_part(self, owner: Value, name: str, node: ast.AST, at: Spot) -> Values:
        match owner:
            case Args() if name in self.record.fields:
                self.record.add_read(name, node, at)
                return frozenset({Text(self.record.version_name(name))})
            case Args():
                return self._read_properties(self.bound(owner, name), at)
            case Super(bound=bound, owner=after):
                return self._read_properties(self.bound(bound, name, after), at)
            case Object(key) | Class(key):
                methods = self._read_properties(self.bound(owner, name), at)
                return methods | self.stored(key, name)
            case ModuleValue(module):
                return self._find_in_module(module, name)
            case Container():
                # of what `with` gets from a generator, or of something that holds it
                inner = take_contents({owner})
                return inner | self.part(inner, name, node, at)
        return NOTHING

    def _find_in_module(self, module: Module, name: str) -> Values:
        values = self.named(module, name)
        if values:
            return values
        submodule = self.sources.submodule(module, name)
        return NOTHING if submodule is None else frozenset({ModuleValue(submodule)})

    def _read_properties(self, values: set[Value], at: Spot) -> Values:
        """The methods among `values` that are properties, read: what they return."""
        results: set[Value] = set()
        for value in values:
            if not isinstance(value, Function) or not is_property(value.node):
                results.add(value)
            elif value.bound:
                results |= self.call(value, CallArguments(), at.guards)
        return frozenset(results)

    def named(self, module: Module, name: str) -> Values:
        """What a name of a module stands for: a function, a class, a module, a table of them."""
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
            self.call_callback_methods(key)
            return values | {Class(key)}
        return values | self._evaluate_constant(owner, name)

    def _evaluate_constant(self, module: Module, name: str) -> Values:
        """A table or list of functions and classes on the level of a module."""
        key = (module, name)
        if key not in self._tables:
            # for a table that names itself
            self._tables[key] = NOTHING
            table = module.constants[name]
            if isinstance(table, _TABLES):
                at = Spot(Frame(module, self.shape(module.tree)), ANYHOW)
                with self.record.muted():
                    self._tables[key] = self.value(table, at)
        return self._tables[key]

    # assignments

    def store(self, target: ast.expr, values: Values, at: Spot) -> None:
        """Assign to a name, an attribute, an entry, or several of them."""
        match target:
            case ast.Name(id=name):
                self._store_name(name, values, at.frame)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for index, inner in enumerate(targets):
                    self.store(inner, unpack(values, index), at)
            case ast.Attribute(value=owner, attr=name):
                for value in self.value(owner, at):
                    self.put(value, name, values)
            case ast.Subscript(value=owner, slice=key):
                self.value(key, at)
                owners = self.value(owner, at)
                own = list_own_attributes(owner)
                if own and isinstance(at.frame.bound, Args):
                    self.record.reshaped |= own
                else:
                    self.record.add_change(owners)
                self.put_into(owner, values, at.frame)

    def _store_name(self, name: str, values: Values, frame: Frame) -> None:
        is_global = frame.top or name in frame.shape.globals
        if is_global and self.carries(values):
            stored = self.globals.setdefault((frame.module, name), set())
            stored |= keep_objects(values)
        if name in frame.shape.assigned:
            before = frame.env.get(name)
            if before is not None:
                values = merge(before, values)
            values = drop_texts(values)
        frame.env[name] = values

    def put(self, value: Value, name: str, values: Values) -> None:
        """Assign to an attribute of a value."""
        match value:
            case Args():
                self.record.add_write(name)
            case Object(key) | Class(key):
                self.keep(key, name, values)

    def put_into(self, owner: ast.expr, values: Values, frame: Frame) -> None:
        """Add values to the container that an expression names."""
        if not self.carries(values):
            return
        entry = make_list(keep_objects(values))
        match owner:
            case ast.Name(id=name):
                before = frame.find(name) or NOTHING
                frame.env[name] = before | entry
            case ast.Attribute(value=holder, attr=name):
                for value in self.value(holder, Spot(frame, ANYHOW)):
                    self.put(value, name, entry)


def _collect_pairs(values: Values) -> dict[str, Values]:
    """What `**` of these values adds to a mapping, by the keys that are known."""
    pairs: dict[str, Values] = {}
    for value in values:
        if isinstance(value, Container):
            pairs |= value.pairs
    return pairs
