"""Expressions on the path of an entry script: what they may hold, and which arguments they read."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from launcher import conditions
from launcher.calls import Calls
from launcher.flow import (
    DEFAULT,
    INLINE,
    NOTHING,
    UNKNOWN,
    Args,
    Class,
    Default,
    Frame,
    Function,
    Given,
    Items,
    Keywords,
    ModuleName,
    Object,
    Several,
    Super,
    Text,
    Unknown,
    Value,
    Values,
    contents,
    entries,
    leaves,
    listed,
    mapping,
    merged,
    objects,
    shallow,
    without_texts,
)
from launcher.lookup import mark
from launcher.sources import Module
from launcher.trace import ANYHOW, UNSURE, Guards, place

_TABLES = ast.Dict | ast.List | ast.Tuple | ast.Name | ast.Attribute


@dataclass(slots=True)
class Expressions(Calls):
    """What expressions may hold, and what assignments make of it."""

    @abstractmethod
    def defined(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        frame: Frame,
        guards: Guards,
    ) -> None:
        """What is evaluated where a function is defined: standard values and decorators."""

    def held(self, node: ast.expr, frame: Frame, guards: Guards) -> Values:
        """What an expression may hold, as an expression over arguments where it is one."""
        held = self.value(node, frame, guards)
        if isinstance(node, ast.BoolOp) and not objects(without_texts(held)) - {DEFAULT}:
            return self._texted(node, frame)
        return held or self._texted(node, frame)

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
            case ast.Dict(keys=keys, values=values):
                return self._table(keys, values, frame, guards)
            case ast.Subscript(value=owner, slice=key):
                self.value(key, frame, guards)
                return self.entry(node, self.value(owner, frame, guards), key, frame, guards)
            case ast.Compare(left=left, comparators=[first, *more]):
                self.value(left, frame, guards)
                self.value(first, frame, guards)
                for part in more:
                    self.value(part, frame, guards | UNSURE)
                return NOTHING
            case ast.Lambda():
                self.defined(node, frame, guards)
                function = Function(frame.module.name, node, scope=frame)
                self._call(function, Given(), guards | UNSURE)
                return frozenset({function})
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, frame, guards)
            case ast.NamedExpr(target=target, value=value):
                with self._aloud():
                    held = self.held(value, frame, guards)
                self._store(target, held, frame, guards)
                return held
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.value(value, frame, guards)
            case ast.Yield(value=ast.expr() as value):
                frame.returned |= listed(self.value(value, frame, guards))
                return NOTHING
            case ast.YieldFrom(value=value):
                frame.returned |= without_texts(self.value(value, frame, guards))
                return NOTHING
        self.children(node, frame, guards)
        return NOTHING

    def children(self, node: ast.AST, frame: Frame, guards: Guards) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, frame, guards)
            elif not isinstance(child, ast.stmt):
                self.children(child, frame, guards)

    def _short_circuit(
        self, every: bool, parts: Sequence[ast.expr], frame: Frame, guards: Guards
    ) -> Values:
        say = self._say(frame)
        held = []
        for part in parts:
            if conditions.impossible(guards):
                break
            with self._watched() as wrote:
                held.append(self.value(part, frame, guards))
            guards = self._forget(wrote, frame, guards | self._taken(part, say)[not every])
        return merged(*held)

    def _either(self, node: ast.IfExp, frame: Frame, guards: Guards) -> Values:
        with self._watched() as wrote:
            self.value(node.test, frame, guards)
        held = []
        for part, taken in zip(
            (node.body, node.orelse), self._taken(node.test, self._say(frame)), strict=True
        ):
            inner = self._forget(wrote, frame, guards | taken)
            if not conditions.impossible(inner):
                held.append(self.held(part, frame, inner))
        return merged(*held)

    def _sequence(self, items: Sequence[ast.expr], frame: Frame, guards: Guards) -> Values:
        parts, exact = list[Values](), True
        for item in items:
            held = self.held(item, frame, guards)
            if isinstance(item, ast.Starred):
                exact, held = False, contents(held)
            parts.append(shallow(held))
        return frozenset({Several(tuple(parts), exact)}) if any(parts) else NOTHING

    def _table(
        self,
        keys: Sequence[ast.expr | None],
        values: Sequence[ast.expr],
        frame: Frame,
        guards: Guards,
    ) -> Values:
        pairs: dict[str, Values] = {}
        parts: list[Values] = []
        named = True
        for key, value in zip(keys, values, strict=True):
            held = shallow(self.held(value, frame, guards))
            if key is None:
                spread = [pair for v in held if isinstance(v, Keywords) for pair in v.items]
                pairs |= dict(spread)
                parts.append(leaves(held))
                named = named and bool(spread)
                continue
            self.value(key, frame, guards)
            parts.append(held)
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                pairs[key.value] = held
            else:
                named = False
        if not any(parts):
            return NOTHING
        return frozenset({mapping(pairs) if named else Several(tuple(parts), exact=False)})

    def entry(
        self, node: ast.expr, held: Values, key: ast.expr, frame: Frame, guards: Guards
    ) -> Values:
        """One entry of a container: the one meant where that is plain, else any of them."""
        told: list[Values] = []
        for value in held:
            match value, key:
                case Several(items=items, exact=True), ast.Constant(value=int() as place) if (
                    -len(items) <= place < len(items)
                ):
                    told.append(items[place])
                case Keywords(items=pairs), ast.Constant(value=str() as name) if name in dict(
                    pairs
                ):
                    told.append(dict(pairs)[name])
                case Several() | Keywords(), _:
                    told.append(contents({value}) | {UNKNOWN})
                case Items(index), _:
                    meant = self._constant_text(key, frame)
                    if meant is not None:
                        own = frozenset[Value]({Args(index)})
                        told.append(self.part(own, meant, node, frame, guards))
                case Unknown() | Text(), _:
                    continue
                case _:
                    told.append(NOTHING)
        return merged(*told)

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        frame: Frame,
        guards: Guards,
    ) -> Values:
        inner = Frame(frame.module, INLINE, outer=frame, owner=frame.owner, bound=frame.bound)
        for number, generator in enumerate(node.generators):
            held = self.value(generator.iter, inner, guards)
            if number == 0:
                guards |= UNSURE
            for name, part in _named_parts(generator.target, entries(held)):
                inner.env[name] = part
            for test in generator.ifs:
                self.value(test, inner, guards)
                guards |= self._taken(test, self._say(inner))[0]
        if isinstance(node, ast.DictComp):
            self.value(node.key, inner, guards)
            held = self.value(node.value, inner, guards)
        else:
            held = self.value(node.elt, inner, guards)
        held = objects(held)
        return listed(held) if held else NOTHING

    # --- attributes and names ------------------------------------------------------------------------

    def part(
        self, owners: Values, name: str, node: ast.AST, frame: Frame, guards: Guards
    ) -> Values:
        """What an attribute of these values may hold."""
        told: list[Iterable[Value]] = []
        for owner in owners:
            match owner:
                case Args() if name in self.fields:
                    self._read(name, place(node, frame), guards)
                    told.append({Text(name)})
                case Args(index) if name == "__dict__":
                    told.append({Items(index)})
                case Super(bound=bound, owner=after):
                    told.append(self._properties(self.bound(bound, name, after=after), guards))
                case Args() | Object() | Class():
                    known = self._properties(self.bound(owner, name), guards)
                    if isinstance(owner, Object | Class):
                        known = known | self.stored(owner, name)
                    elif not known:
                        known = frozenset(self.loose.get(name, ()))
                    told.append(known)
                case ModuleName(name=module_name):
                    told.append(self._of_module(module_name, name))
                case Several() | Keywords():
                    # of what `with` gets from a generator, or of something that holds it
                    inner = contents({owner})
                    of_entry = self.part(inner, name, node, frame, guards) if inner else inner
                    told.append(inner | of_entry)
                case Text() if name == "value":
                    # of a member of an enum
                    told.append({owner})
                case Default() | Unknown():
                    continue
                case _:
                    told.append(NOTHING)
        if not told:
            told.append(self.loose.get(name, ()))
        held = merged(*told)
        return held | {UNKNOWN} if held and UNKNOWN in owners else held

    def _of_module(self, module_name: str, name: str) -> Values:
        module = self.sources.module(module_name)
        if module is None:
            return NOTHING
        held = self.named(module, name, None)
        if not held and self.sources.submodule(module, name) is not None:
            return frozenset({ModuleName(f"{module_name}.{name}")})
        return held

    def _properties(self, held: set[Value], guards: Guards) -> Values:
        """The methods among `held` that are properties, read: what they return."""
        told: set[Value] = set()
        for value in held:
            if isinstance(value, Function) and isinstance(value.node, ast.FunctionDef):
                marks = {mark(one) for one in value.node.decorator_list}
                if any(one.endswith("property") for one in marks):
                    told |= self._call(value, Given(), guards) if value.bound else set()
                    continue
            told.add(value)
        return frozenset(told)

    def named(self, module: Module, name: str, frame: Frame | None) -> Values:
        """What a name of a module stands for: a function, a class, a module, a table of them."""
        if name == "super" and frame is not None:
            around = next((one for one in frame.chain() if one.owner and one.bound), None)
            if around is not None and around.owner and around.bound:
                return frozenset({Super(around.bound, around.owner)})
        found = self.sources.resolve(module, name)
        shared = self.globals.get((module.name, name), set())
        if found is None and (others := self.definitions(module, name)):
            return frozenset(shared) | {Function(module.name, one) for one in others}
        if found is None:
            owner = self.sources.named_module(module, name)
            if owner is None:
                return frozenset(shared)
            return frozenset({ModuleName(owner.name)}) | shared
        owner, name = found
        held: Values = frozenset(shared | self.globals.get((owner.name, name), set()))
        if name in owner.functions:
            return held | {Function(owner.name, one) for one in self.definitions(owner, name)}
        if name in owner.classes:
            self._referenced(owner, owner.classes[name])
            return held | {Class(owner.name, name)}
        return held | self._constant(owner, name)

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

    # --- assignments ---------------------------------------------------------------------------------

    def _store(self, target: ast.expr, held: Values, frame: Frame, guards: Guards) -> None:
        match target:
            case ast.Name(id=name):
                self._store_name(name, held, frame)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one, part in zip(targets, _unpacked(held, targets), strict=True):
                    self._store(one, part, frame, guards)
            case ast.Starred(value=inner):
                self._store(inner, held, frame, guards)
            case ast.Attribute(value=owner, attr=name):
                owners = self.value(owner, frame, guards)
                for value in owners:
                    self.put(value, name, held, guards)
                if not objects(owners):
                    self._let_go(name, held)
            case ast.Subscript(value=owner, slice=key):
                self.value(key, frame, guards)
                owners = self.value(owner, frame, guards)
                told = self._constant_text(key, frame)
                if any(isinstance(one, Items) for one in owners) and held != {Text(told or "")}:
                    self._write(told)
                if isinstance(frame.bound, Args) and own_attributes(owner):
                    self.reshaped |= own_attributes(owner)
                else:
                    self._changed(owners, owner, frame)
                self.put_into(owner, held, frame)

    def _store_name(self, name: str, held: Values, frame: Frame) -> None:
        home = frame.home(name)
        if (home.top or name in home.shape.globals) and self.carries(held):
            self.globals.setdefault((frame.module.name, name), set()).update(objects(held))
        for value in held:
            if isinstance(value, Text) and "." not in value.text:
                home.aliases.setdefault(name, set()).update(conditions.names(value.text))
        if name in home.shape.assigned or home is not frame:
            before = home.env.get(name)
            home.env[name] = without_texts(held if before is None else merged(before, held))
        else:
            home.env[name] = held

    def put(self, value: Value, name: str, held: Values, guards: Guards) -> None:
        """An attribute of an object gets another value."""
        if isinstance(value, Args):
            if name in self.fields:
                self._write(name)
                return
            for function in self.bound(value, name, setter=True):
                self._call(function, Given([held]), guards)
            self._let_go(name, held)
        elif isinstance(value, Object | Class):
            for function in self.bound(value, name, setter=True):
                self._call(function, Given([held]), guards)
            self.keep(value, name, held)
        elif isinstance(value, ModuleName) and self.carries(held):
            self.globals.setdefault((value.name, name), set()).update(objects(held))

    def put_into(self, owner: ast.expr, held: Values, frame: Frame) -> None:
        """A container gets another entry."""
        if isinstance(owner, ast.Name) and self.carries(held):
            before = frame.find(owner.id) or NOTHING
            frame.home(owner.id).env[owner.id] = before | listed(objects(held))
        elif isinstance(owner, ast.Attribute) and self.carries(held):
            entry = listed(objects(held))
            for value in self.value(owner.value, frame, ANYHOW):
                self.put(value, owner.attr, entry, ANYHOW)


def _unpacked(held: Values, targets: Sequence[ast.expr]) -> list[Values]:
    """What each of several targets gets of a value that is unpacked."""
    sure = not any(isinstance(target, ast.Starred) for target in targets)
    parts: list[list[Values]] = [[] for _ in targets]
    for value in held:
        for index, part in enumerate(parts):
            match value:
                case Several(items=items, exact=True) if sure and len(items) > index:
                    part.append(items[index])
                case Several() | Keywords():
                    known = contents({value})
                    starred = isinstance(targets[index], ast.Starred)
                    part.append(listed(known) if starred else known)
                case Text() | Function():
                    part.append(NOTHING)
                case _:
                    part.append(frozenset({value}))
    return [merged(*part) for part in parts]


def _named_parts(target: ast.expr, held: Values) -> Iterator[tuple[str, Values]]:
    """The names that a loop's target gives values to."""
    match target:
        case ast.Name(id=name):
            yield name, held
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            for one, part in zip(targets, _unpacked(held, targets), strict=True):
                yield from _named_parts(one, part)
        case ast.Starred(value=inner):
            yield from _named_parts(inner, held)


def own_attributes(node: ast.AST) -> set[str]:
    """The attributes of `self` that an expression names."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
