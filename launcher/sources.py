"""Python packages read as text: modules, imports, classes and constants, by AST, never imported.

An import would cost seconds, would run upstream's code, and its ImportError would look like an
absent field. Names are followed over files the way Python would, inside the given packages.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNKNOWN: Any = object()
"""What `evaluate` returns for an expression that only running the module could tell."""


def find_package(name: str, search: tuple[Path, ...] | None = None) -> Path | None:
    """The folder of a top-level package, without importing it; in `search` or in our own path."""
    if search is not None:
        found = (folder / name for folder in search)
        return next((path for path in found if (path / "__init__.py").is_file()), None)
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@dataclass(slots=True)
class Module:
    """One parsed file: where each name comes from, and its classes and constants."""

    name: str
    label: str
    path: Path
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)

    def unbind(self, name: str) -> None:
        """Forget what the name was before: of several bindings the last one counts."""
        self.imports.pop(name, None)
        self.classes.pop(name, None)
        self.constants.pop(name, None)


@dataclass(slots=True)
class Sources:
    """The packages that may be read, by top-level name, and what has been read of them so far."""

    roots: Mapping[str, Path]
    _modules: dict[str, Module | None] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """The module `a.b.c`, parsed once; None where it is not among the roots."""
        if name not in self._modules:
            path = self._file(name)
            self._modules[name] = None if path is None else self._parse(name, path)
        return self._modules[name]

    def resolve(self, module: Module, name: str) -> tuple[Module, str] | None:
        """Where `name`, used in `module`, is defined, followed over files (at most 20 steps)."""
        for _ in range(20):
            if name in module.classes or name in module.constants:
                return module, name
            if name not in module.imports:
                return None
            origin, original = module.imports[name]
            following = self.module(origin)
            if following is None:
                return None
            module, name = following, original
        return None

    def external(self, module: Module, name: str) -> str | None:
        """The dotted name of something imported from a package that is not among the roots."""
        origin, original = module.imports.get(name, ("", ""))
        return f"{origin}.{original}" if origin else None

    def evaluate(self, module: Module, node: ast.expr | None) -> Any:
        """The value of a default: literals, constants, and the few calls upstream uses."""
        try:
            return _Evaluator(self, module).value(node)
        except (_Unknowable, ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            return UNKNOWN

    def _file(self, name: str) -> Path | None:
        top, *rest = name.split(".")
        root = self.roots.get(top)
        if root is None:
            return None
        path = root.joinpath(*rest)
        candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        return next((candidate for candidate in candidates if candidate.is_file()), None)

    def _parse(self, name: str, path: Path) -> Module:
        raw = path.read_bytes()
        root = self.roots[name.partition(".")[0]]
        label = f"{root.name}/{path.relative_to(root).as_posix()}"
        self.digests[label] = hashlib.sha256(raw).hexdigest()
        module = Module(name, label, path)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in _top_level(ast.parse(raw)):
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(node, package)
                for alias in node.names:
                    module.unbind(alias.asname or alias.name)
                    module.imports[alias.asname or alias.name] = (origin, alias.name)
            elif isinstance(node, ast.ClassDef):
                module.unbind(node.name)
                module.classes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                module.unbind(node.targets[0].id)
                module.constants[node.targets[0].id] = node.value
            elif (
                isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
            ):
                module.unbind(node.target.id)
                module.constants[node.target.id] = node.value
        return module


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
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


@dataclass(slots=True)
class _Evaluator:
    """Interprets the handful of expression forms that defaults are written in; executes nothing."""

    sources: Sources
    module: Module

    def value(self, node: ast.expr | None) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self.value(k): self.value(v) for k, v in pairs if k is not None}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.Name(id="__file__"):
                return str(self.module.path)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
                return self._member(owner, attribute)
            case ast.Lambda(body=body):
                return self.value(body)
            case ast.Subscript(value=inner, slice=ast.Slice(lower=lower, upper=upper, step=None)):
                start = None if lower is None else self.value(lower)
                return self.value(inner)[start : None if upper is None else self.value(upper)]
            case ast.Call(func=function, args=arguments, keywords=[]):
                return self._call(ast.unparse(function), [self.value(a) for a in arguments])
        raise _Unknowable

    def _name(self, name: str) -> Any:
        found = self.sources.resolve(self.module, name)
        if found is None or found[1] not in found[0].constants:
            if name in {"list", "dict"}:
                return [] if name == "list" else {}
            raise _Unknowable
        return _Evaluator(self.sources, found[0]).value(found[0].constants[found[1]])

    def _member(self, owner: str, attribute: str) -> Any:
        found = self.sources.resolve(self.module, owner)
        if found is None or found[1] not in found[0].classes:
            raise _Unknowable
        members = enum_members(self.sources, found[0], found[0].classes[found[1]])
        if members is None or attribute not in members:
            raise _Unknowable
        return members[attribute]

    def _call(self, function: str, arguments: list[Any]) -> Any:
        match function, arguments:
            case "len", [value]:
                return len(value)
            case "os.path.basename", [str() as path]:
                return Path(path).name
        raise _Unknowable


def enum_members(sources: Sources, module: Module, node: ast.ClassDef) -> dict[str, Any] | None:
    """Member names and values of an Enum class; None for any other class."""
    names = [ast.unparse(base) for base in node.bases]
    if not any(name.rpartition(".")[2].endswith("Enum") for name in names):
        return None
    members = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = sources.evaluate(module, statement.value)
            if value is not UNKNOWN:
                members[statement.targets[0].id] = value
    return members
