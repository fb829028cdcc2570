"""The functions that an entry script reaches: those that the walk goes through, and what these call in turn.

The walk follows arguments. A function that gets tensors or rows instead is found by its name, as Python
would resolve it; a method by the name of an attribute, in classes that are named on the path.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from launcher.upstream.source import functions, reads
from launcher.upstream.source.packages import Module, Sources

_Node = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Reached:
    """One function on the path, or a constant of a module that one uses.

    `symbol` is the file and the qualified name, as in a citation; `line` its first, `text` its normalised text.
    """

    symbol: str
    line: int
    text: str


def functions_on_path(
    sources: Sources,
    script: str,
    classes: Sequence[tuple[str, str]],
    fields: Iterable[str],
    recorders: Iterable[str] = (),
) -> dict[str, Reached]:
    """Every function and constant of these packages that `script` reaches, by its symbol.

    The parameters are those of `reads.find`. Functions inside a function belong to it. Raises LookupError
    without the script.
    """
    walk = reads.walked(sources, script, classes, fields, recorders)
    search = _Search(sources)
    search.start(walk.script, classes)
    for node, module_name in walk.ran.items():
        search.add_node(module_name, node)
    search.run()
    return dict(sorted(search.reached.items()))


@dataclass(slots=True)
class _Search:
    sources: Sources
    reached: dict[str, Reached] = field(default_factory=dict)
    _waiting: list[tuple[Module, ast.AST]] = field(default_factory=list)
    # classes that are named on the path, and the names of attributes there
    _classes: dict[tuple[str, str], ast.ClassDef] = field(default_factory=dict)
    _attributes: set[str] = field(default_factory=set)
    _constants: set[tuple[str, str]] = field(default_factory=set)

    def start(self, script: Module, classes: Sequence[tuple[str, str]]) -> None:
        for statement in script.tree.body:
            if isinstance(statement, ast.If | ast.Expr):
                self._waiting.append((script, statement))
        for module_name, name in classes:
            owner = self.sources.module(module_name)
            if owner is not None and name in owner.classes:
                self._add_class(owner, owner.classes[name])

    def add_node(self, module_name: str, node: ast.AST) -> None:
        """A function that the walk went through; one inside another counts as that one."""
        module = self.sources.module(module_name)
        if module is None:
            return
        for name, known in _definitions(module):
            if known.lineno <= getattr(node, "lineno", 0) <= (known.end_lineno or 0):
                self._add_function(module, name, known)

    def run(self) -> None:
        while self._waiting:
            while self._waiting:
                module, node = self._waiting.pop()
                self._look(module, node)
            self._add_methods()

    def _look(self, module: Module, node: ast.AST) -> None:
        imported = Module(module.name, module.label, module.tree)
        for inner in ast.walk(node):
            match inner:
                case ast.Import() | ast.ImportFrom():
                    # also inside a function
                    imported.bind(inner)
                case ast.Name(id=name):
                    self._named(module, name)
                case ast.Attribute(value=owner, attr=name):
                    self._attributes.add(name)
                    around = self.sources.module_of(module, owner)
                    if around is not None:
                        self._named(around, name)
        for name, (origin, original) in imported.imports.items():
            around = self.sources.module(origin)
            if around is not None and name not in module.imports:
                self._named(around, original)

    def _named(self, module: Module, name: str) -> None:
        found = self.sources.resolve(module, name)
        if found is None:
            return
        owner, name = found
        if name in owner.functions:
            self._add_function(owner, name, owner.functions[name])
        elif name in owner.classes:
            self._add_class(owner, owner.classes[name])
        elif name in owner.constants and (owner.name, name) not in self._constants:
            # such as a table of functions, or of chat templates
            self._constants.add((owner.name, name))
            value = owner.constants[name]
            symbol = f"{owner.label}::{name}"
            self.reached[symbol] = Reached(symbol, value.lineno, f"{name} = {ast.unparse(value)}")
            self._waiting.append((owner, value))

    def _add_function(self, module: Module, name: str, node: _Node) -> None:
        symbol = f"{module.label}::{name}"
        if symbol not in self.reached:
            self.reached[symbol] = Reached(symbol, node.lineno, functions.normalised(node))
            self._waiting.append((module, node))

    def _add_class(self, module: Module, node: ast.ClassDef) -> None:
        if (module.name, node.name) in self._classes:
            return
        self._classes[module.name, node.name] = node
        for base in node.bases:
            known = self.sources.resolve_class(module, base)
            if known is not None:
                self._add_class(*known)
        for statement in node.body:
            # standard values of its fields, and decorators
            if not isinstance(statement, _Node):
                self._waiting.append((module, statement))

    def _add_methods(self) -> None:
        for (module_name, _), node in list(self._classes.items()):
            module = self.sources.module(module_name)
            if module is None:
                continue
            outside = any(self.sources.resolve_class(module, base) is None for base in node.bases)
            for statement in node.body:
                if not isinstance(statement, _Node):
                    continue
                # a base that is not here calls what it likes, as Python does what has underscores around it
                called = statement.name in self._attributes or statement.name.startswith("__")
                if called or outside:
                    self._add_function(module, f"{node.name}.{statement.name}", statement)


def _definitions(module: Module) -> Iterator[tuple[str, _Node]]:
    """The functions and methods of a module, by their qualified names."""
    yield from module.functions.items()
    for owner, node in module.classes.items():
        for statement in node.body:
            if isinstance(statement, _Node):
                yield f"{owner}.{statement.name}", statement
