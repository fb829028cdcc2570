"""Python packages read as text: modules, imports, classes and constants, by AST, never imported.

An import would cost seconds, would run upstream's code, and its ImportError would look like an
absent field. Names are followed over files the way Python would, inside the given packages.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from launcher.machine.git import CommitTree

_T = TypeVar("_T")
UNKNOWN: Any = object()
"""What `evaluate` returns for an expression that only running the module could tell."""


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def read(self, path: str) -> bytes | None:
        try:
            return (self.path / path).read_bytes()
        except OSError:
            return None


Tree = Folder | CommitTree
"""A package's files by their path below it; its `name` is the top-level one, which labels begin with."""


def find_package(name: str, search: Iterable[Path] | None = None) -> Path | None:
    """The folder of a top-level package, without importing it; in `search` or in our own path."""
    if search is not None:
        return next((f / name for f in search if (f / name / "__init__.py").is_file()), None)
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@dataclass(slots=True, eq=False)
class Module:
    """One parsed file: where each name comes from, its classes, functions and constants.

    `label` is `package/path/below.py`; `modules` are names that stand for a whole module. What `import *`
    brings is not followed.
    """

    name: str
    label: str
    tree: ast.Module
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return self.name if self.label.endswith("/__init__.py") else self.name.rpartition(".")[0]

    def bind(self, node: ast.stmt) -> None:
        """Enter what a statement of the module gives names to; of several bindings the last counts."""
        match node:
            case ast.ImportFrom(names=names):
                origin = _absolute(node, self.package)
                for alias in names:
                    self._bind(self.imports, alias.asname or alias.name, (origin, alias.name))
            case ast.Import(names=names):
                for alias in names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._bind(self.modules, name, alias.name if alias.asname else name)
            case ast.ClassDef(name=name):
                self._bind(self.classes, name, node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._bind(self.functions, name, node)
            case (
                ast.Assign(targets=[ast.Name(id=name), *_], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self._bind(self.constants, name, value)

    def _bind(self, kind: dict[str, _T], name: str, what: _T) -> None:
        for bound in (self.imports, self.modules, self.classes, self.functions, self.constants):
            bound.pop(name, None)
        kind[name] = what


@dataclass(slots=True)
class Sources:
    """The packages that may be read, by top-level name, and what has been read of them so far.

    `digests` are the sha256 of every file that was read, by label; `absent` the labels of files that would
    have been read, had they been there.
    """

    roots: Mapping[str, Tree]
    digests: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    _modules: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """The module `a.b.c`, parsed once; None where it is not among the roots.

        Raises SyntaxError for a file that Python cannot parse.
        """
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def module_at(self, file: str) -> Module | None:
        """The module of a file that is named from a root, such as `open_instruct/finetune.py`; see `module`."""
        return self.module(file.removesuffix(".py").replace("/", "."))

    def resolve(self, module: Module, name: str) -> tuple[Module, str] | None:
        """Where `name`, used in `module`, is defined, followed over files (at most 20 steps)."""
        for _ in range(20):
            if name in module.classes or name in module.constants or name in module.functions:
                return module, name
            origin, name = module.imports.get(name, ("", name))
            following = self.module(origin) if origin else None
            if following is None:
                return None
            module = following
        return None

    def resolve_class(self, module: Module, node: ast.expr) -> tuple[Module, ast.ClassDef] | None:
        """The class that a name, or `module.Name`, stands for; None where no root holds it."""
        found = None
        if isinstance(node, ast.Name):
            found = self.resolve(module, node.id)
        elif isinstance(node, ast.Attribute):
            owner = self.module_of(module, node.value)
            found = None if owner is None else self.resolve(owner, node.attr)
        if found is None or found[1] not in found[0].classes:
            return None
        return found[0], found[0].classes[found[1]]

    def named_module(self, module: Module, name: str) -> Module | None:
        """The module that a name of another module's stands for."""
        if name in module.modules:
            return self.module(module.modules[name])
        origin, original = module.imports.get(name, ("", ""))
        return self.module(f"{origin}.{original}") if origin else None

    def submodule(self, owner: Module, name: str) -> Module | None:
        """`name` of a module, where that is a module itself: imported there, or a file below it."""
        return self.named_module(owner, name) or self.module(f"{owner.name}.{name}")

    def module_of(self, module: Module, node: ast.expr) -> Module | None:
        if isinstance(node, ast.Name):
            return self.named_module(module, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.module_of(module, node.value)
            return None if owner is None else self.submodule(owner, node.attr)
        return None

    def linearised(self, module: Module, node: ast.ClassDef) -> list[tuple[Module, ast.ClassDef]]:
        """The class and its bases over all files, base first: the order dataclasses collect in."""
        nodes: dict[str, tuple[Module, ast.ClassDef]] = {}
        stand_ins: dict[str, type] = {}

        def build(module: Module, node: ast.ClassDef) -> type:
            key = f"{module.name}:{node.name}"
            nodes[key] = (module, node)
            bases = []
            for base in node.bases:
                found = self.resolve_class(module, base)
                if found is not None:
                    known = stand_ins.get(f"{found[0].name}:{found[1].name}")
                    bases.append(known or build(*found))
            # Python's own method resolution order, on empty stand-ins for upstream's classes
            stand_ins[key] = type(key, tuple(bases), {})
            return stand_ins[key]

        order = build(module, node).__mro__
        return [nodes[stand_in.__name__] for stand_in in reversed(order) if stand_in is not object]

    def external(self, module: Module, name: str) -> str | None:
        """The dotted name of something imported, as it is called there."""
        origin, original = module.imports.get(name, ("", ""))
        return f"{origin}.{original}" if origin else None

    def evaluate(self, module: Module, node: ast.expr | None) -> Any:
        """The value of a default: literals, constants, and the few calls upstream uses; executes nothing."""
        try:
            return self._value(module, node)
        except (_Unknowable, ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            return UNKNOWN

    def _value(self, module: Module, node: ast.expr | None) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self._value(module, item) for item in items]
            case ast.Call(func=ast.Name(id="frozenset"), args=[one], keywords=[]):
                return self._value(module, one)
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {
                    self._value(module, k): self._value(module, v)
                    for k, v in pairs
                    if k is not None
                }
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(module, operand)
            case ast.Name(id="__file__"):
                return module.label
            case ast.Name(id=name):
                found = self.resolve(module, name)
                if found is not None and found[1] in found[0].constants:
                    return self._value(found[0], found[0].constants[found[1]])
                return {"list": list, "dict": dict}[name]()
            case ast.Attribute(value=ast.Name() as owner, attr=attribute):
                known = self.resolve_class(module, owner)
                members = enum_members(self, *known) if known is not None else None
                return (members or {})[attribute]
            case ast.Lambda(body=body):
                return self._value(module, body)
            case ast.Subscript(value=inner, slice=ast.Slice(lower=lower, upper=upper, step=None)):
                start, end = (
                    None if bound is None else self._value(module, bound)
                    for bound in (lower, upper)
                )
                return self._value(module, inner)[start:end]
            case ast.Call(func=ast.Name(id="len"), args=[one], keywords=[]):
                return len(self._value(module, one))
            case ast.Call(func=function, args=[one], keywords=[]) if (
                ast.unparse(function) == "os.path.basename"
            ):
                return Path(self._value(module, one)).name
        raise _Unknowable

    def _read(self, name: str) -> Module | None:
        top, _, below = name.partition(".")
        root = self.roots.get(top)
        if root is None:
            return None
        path = below.replace(".", "/")
        candidates = (f"{path}/__init__.py".lstrip("/"), f"{path}.py")
        for candidate in candidates:
            raw = root.read(candidate)
            if raw is not None:
                return self._parse(name, f"{root.name}/{candidate}", raw)
        folder = path.rpartition("/")[0]
        # below a file there are names, no modules
        if not folder or root.read(f"{folder}.py") is None:
            self.absent |= {f"{root.name}/{candidate}" for candidate in candidates}
        return None

    def _parse(self, name: str, label: str, raw: bytes) -> Module:
        self.digests[label] = hashlib.sha256(raw).hexdigest()
        tree = ast.parse(raw)
        module = Module(name, label, tree)
        for node in top_level(tree):
            module.bind(node)
        return module


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import, also under `if` and `try` (lazy packages import there)."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If):
            waiting[:0] = [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            waiting[:0] = [*handlers, *node.orelse, *node.finalbody, *node.body]


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


class _Unknowable(Exception):
    """The expression's value depends on running the module."""


def enum_members(sources: Sources, module: Module, node: ast.ClassDef) -> dict[str, Any] | None:
    """Member names and values of an Enum class; None for any other class."""
    if not any(ast.unparse(base).rpartition(".")[2].endswith("Enum") for base in node.bases):
        return None
    values = {
        statement.targets[0].id: sources.evaluate(module, statement.value)
        for statement in node.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    return {name: value for name, value in values.items() if value is not UNKNOWN}


def mark(node: ast.expr) -> str:
    """The last part of a decorator's or a function's name."""
    while isinstance(node, ast.Call):
        node = node.func
    return (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )
