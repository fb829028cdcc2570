"""The functions that an entry script reaches: those that the walk goes through, and their callees.

The walk follows arguments. A function that gets tensors or rows instead is found by its name, as
Python would resolve it; a method by the name of an attribute, in classes named on the path.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source import reads
from launcher.upstream.source.functions import normalise
from launcher.upstream.source.packages import Definition, Module, Sources, methods_of
from launcher.upstream.source.values import ClassKey


@dataclass(frozen=True, slots=True)
class Reached:
    """One function on the path, or a constant of a module that one uses.

    `symbol` is the file and the qualified name, as in a citation; `line` its first, `text` its
    normalised text.
    """

    symbol: str
    line: int
    text: str


def find_functions_on_path(
    sources: Sources,
    script: str,
    classes: Sequence[tuple[str, str]],
    fields: Iterable[str],
    recorders: Iterable[str] = (),
) -> Mapping[str, Reached]:
    """Every function and constant of these packages that `script` reaches, by its symbol.

    The parameters are those of `reads.read_path`. Functions inside a function belong to it. Raises
    LookupError without the script.
    """
    walk = reads.walk_script(sources, script, classes, fields, recorders)
    search = _Search(sources)
    for statement in walk.script.tree.body:
        if isinstance(statement, ast.If | ast.Expr):
            search.waiting.append((walk.script, statement))
    for key in walk.classes:
        search.add_class(*key)
    for node, module in walk.ran.items():
        search.add_around(module, node.lineno)
    search.run()
    return dict(sorted(search.reached.items()))


@dataclass(slots=True)
class _Search:
    sources: Sources
    reached: dict[str, Reached] = field(default_factory=dict)
    waiting: list[tuple[Module, ast.AST]] = field(default_factory=list)
    # classes that are named on the path, in the order in which they were met
    classes: dict[ClassKey, None] = field(default_factory=dict)
    # the names of attributes on the path
    attributes: set[str] = field(default_factory=set)

    def run(self) -> None:
        while self.waiting:
            while self.waiting:
                module, node = self.waiting.pop()
                self._follow_names(module, node)
            for module, owner in list(self.classes):
                self._add_methods(module, owner)

    def add_around(self, module: Module, line: int) -> None:
        """The function of a line that the walk went through; one inside another counts as that."""
        for name, node in module.definitions():
            if node.lineno <= line <= (node.end_lineno or 0):
                self._add(module, name, node)

    def add_class(self, module: Module, node: ast.ClassDef) -> None:
        if (module, node) in self.classes:
            return
        self.classes[module, node] = None
        for base in node.bases:
            key = self.sources.resolve_class(module, base)
            if key is not None:
                self.add_class(*key)
        for statement in node.body:
            # standard values of its fields, and decorators
            if not isinstance(statement, Definition):
                self.waiting.append((module, statement))

    def _follow_names(self, module: Module, node: ast.AST) -> None:
        imported = Module(module.name, module.label, module.tree)
        for inner in ast.walk(node):
            match inner:
                case ast.Import() | ast.ImportFrom():
                    # also inside a function
                    imported.bind(inner)
                case ast.Name(id=name):
                    self._add_name(module, name)
                case ast.Attribute(value=owner, attr=name):
                    self.attributes.add(name)
                    self._add_name(self.sources.module_of(module, owner), name)
        for name, (origin, original) in imported.imports.items():
            if name not in module.imports:
                self._add_name(self.sources.module(origin), original)

    def _add_name(self, module: Module | None, name: str) -> None:
        origin = None if module is None else self.sources.resolve(module, name)
        if origin is None:
            return
        owner, name = origin
        if name in owner.functions:
            self._add(owner, name, owner.functions[name])
        elif name in owner.classes:
            self.add_class(owner, owner.classes[name])
        elif name in owner.constants:
            # such as a table of functions, or of chat templates
            self._add(owner, name, owner.constants[name])

    def _add(self, module: Module, name: str, node: Definition | ast.expr) -> None:
        symbol = f"{module.label}::{name}"
        if symbol in self.reached:
            return
        text = normalise(node)
        if isinstance(node, ast.expr):
            text = f"{name} = {text}"
        self.reached[symbol] = Reached(symbol, node.lineno, text)
        self.waiting.append((module, node))

    def _add_methods(self, module: Module, owner: ast.ClassDef) -> None:
        # a base that is not here calls what it likes, as Python does what has underscores around it
        outside = any(self.sources.resolve_class(module, base) is None for base in owner.bases)
        for name, node in methods_of(owner):
            if outside or node.name in self.attributes or node.name.startswith("__"):
                self._add(module, name, node)
