"""Python packages read as text: modules, imports, classes and constants, by AST, never imported.

An import would cost seconds, would run upstream's code, and its ImportError would look like an
absent field. Names are followed over files the way Python would, inside the given packages.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from launcher.lazy_dataclass import dataclass
from launcher.machine.git import CommitTree

Definition = ast.FunctionDef | ast.AsyncFunctionDef
UNKNOWN: Any = object()
"""What `evaluate` returns for an expression that only running the module could tell."""
_MAX_IMPORTS = 20


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
"""A package's files by their path below it; labels begin with its `name`, the top-level one."""


def find_package(name: str, search: Iterable[Path] | None = None) -> Path | None:
    """The folder of a top-level package, without importing it; in `search` or in our own path."""
    if search is None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return None
        return Path(spec.origin).parent
    for folder in search:
        if (folder / name / "__init__.py").is_file():
            return folder / name
    return None


@dataclass(slots=True, eq=False)
class Module:
    """One parsed file: where each name comes from, its classes, functions and constants.

    `label` is `package/path/below.py`; `modules` are names that stand for a whole module. What
    `import *` brings is not followed.
    """

    name: str
    label: str
    tree: ast.Module
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, Definition] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)

    def definitions(self) -> Iterator[tuple[str, Definition]]:
        """The functions and methods, by their qualified names."""
        yield from self.functions.items()
        for owner in self.classes.values():
            yield from methods_of(owner)

    def bind(self, node: ast.stmt) -> None:
        """Enter the names that a statement binds; of several bindings the last counts."""
        match node:
            case ast.ImportFrom(names=aliases):
                origin = self._resolve_origin(node)
                for alias in aliases:
                    name = alias.asname or alias.name
                    self._forget(name)
                    self.imports[name] = (origin, alias.name)
            case ast.Import(names=aliases):
                for alias in aliases:
                    # `import a.b` binds `a`, `import a.b as c` the module below it
                    name = alias.asname or alias.name.partition(".")[0]
                    self._forget(name)
                    self.modules[name] = alias.name if alias.asname else name
            case ast.ClassDef(name=name):
                self._forget(name)
                self.classes[name] = node
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._forget(name)
                self.functions[name] = node
            case (
                ast.Assign(targets=[ast.Name(id=name), *_], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self._forget(name)
                self.constants[name] = value

    def _forget(self, name: str) -> None:
        for bound in (self.imports, self.modules, self.classes, self.functions, self.constants):
            bound.pop(name, None)

    def _resolve_origin(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        above = self.name.split(".")
        # of a package's own file, one dot is the package itself
        up = node.level - self.label.endswith("/__init__.py")
        parts = above[: len(above) - up]
        if node.module:
            parts.append(node.module)
        return ".".join(parts)


def methods_of(owner: ast.ClassDef) -> Iterator[tuple[str, Definition]]:
    """The methods that a class itself defines, by their qualified names."""
    for statement in owner.body:
        if isinstance(statement, Definition):
            yield f"{owner.name}.{statement.name}", statement


@dataclass(slots=True)
class Sources:
    """The packages that may be read, by top-level name, and what has been read of them so far.

    `digests` are the sha256 of every file that was read, by label; `absent` the labels of files
    that would have been read, had they been there.
    """

    roots: Mapping[str, Tree]
    digests: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    _modules: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """The module `a.b.c`, parsed once; None if it is not among the roots.

        Raises SyntaxError for a file that Python cannot parse.
        """
        if name not in self._modules:
            self._modules[name] = self._read_module(name)
        return self._modules[name]

    def module_at(self, file: str) -> Module | None:
        """The module of a file named from a root, such as `open_instruct/finetune.py`."""
        return self.module(file.removesuffix(".py").replace("/", "."))

    def resolve(self, module: Module, name: str) -> tuple[Module, str] | None:
        """Where `name`, used in `module`, is defined, followed over files."""
        for _ in range(_MAX_IMPORTS):
            if name in module.classes or name in module.constants or name in module.functions:
                return module, name
            if name not in module.imports:
                return None
            origin, name = module.imports[name]
            following = self.module(origin)
            if following is None:
                return None
            module = following
        return None

    def resolve_class(self, module: Module, node: ast.expr) -> tuple[Module, ast.ClassDef] | None:
        """The class that a name, or `module.Name`, stands for; None if no root holds it."""
        origin = None
        match node:
            case ast.Name(id=name):
                origin = self.resolve(module, name)
            case ast.Attribute(value=value, attr=name):
                owner = self.module_of(module, value)
                if owner is not None:
                    origin = self.resolve(owner, name)
        if origin is None:
            return None
        module, name = origin
        if name not in module.classes:
            return None
        return module, module.classes[name]

    def named_module(self, module: Module, name: str) -> Module | None:
        """The module that a name of another module's stands for."""
        if name in module.modules:
            return self.module(module.modules[name])
        dotted = self.external(module, name)
        return None if dotted is None else self.module(dotted)

    def submodule(self, owner: Module, name: str) -> Module | None:
        """`name` of a module, if that is a module itself: imported there, or a file below it."""
        return self.named_module(owner, name) or self.module(f"{owner.name}.{name}")

    def module_of(self, module: Module, node: ast.expr) -> Module | None:
        match node:
            case ast.Name(id=name):
                return self.named_module(module, name)
            case ast.Attribute(value=value, attr=name):
                owner = self.module_of(module, value)
                return None if owner is None else self.submodule(owner, name)
        return None

    def linearised(self, module: Module, node: ast.ClassDef) -> list[tuple[Module, ast.ClassDef]]:
        """The class and its bases over all files, base first: the order dataclasses collect in."""
        keys: dict[type, tuple[Module, ast.ClassDef]] = {}
        stand_ins: dict[ast.ClassDef, type] = {}

        def build(module: Module, node: ast.ClassDef) -> type:
            # Python's own method resolution order, on empty stand-ins for upstream's classes
            if node not in stand_ins:
                bases: list[type] = []
                for base in node.bases:
                    key = self.resolve_class(module, base)
                    if key is not None:
                        bases.append(build(*key))
                stand_in = type(node.name, tuple(bases), {})
                stand_ins[node] = stand_in
                keys[stand_in] = (module, node)
            return stand_ins[node]

        order = build(module, node).__mro__
        return [keys[stand_in] for stand_in in reversed(order) if stand_in is not object]

    def external(self, module: Module, name: str) -> str | None:
        """The dotted name of something imported, as it is called there."""
        if name not in module.imports:
            return None
        return ".".join(module.imports[name])

    def evaluate(self, module: Module, node: ast.expr | None) -> Any:
        """The value of a default: literals, constants, and the few calls upstream uses.

        Executes nothing.
        """
        try:
            return self._evaluate(module, node)
        except (_Unknowable, ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            return UNKNOWN

    def _evaluate(self, module: Module, node: ast.expr | None) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self._evaluate(module, item) for item in items]
            case ast.Dict():
                return self._evaluate_dict(module, node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluate(module, operand)
            case ast.Name(id="__file__"):
                return module.label
            case ast.Name(id=name):
                return self._evaluate_name(module, name)
            case ast.Attribute(value=ast.Name() as owner, attr=name):
                return self._evaluate_member(module, owner, name)
            case ast.Lambda(body=body):
                return self._evaluate(module, body)
            case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=None)):
                start = None if lower is None else self._evaluate(module, lower)
                end = None if upper is None else self._evaluate(module, upper)
                return self._evaluate(module, value)[start:end]
            case ast.Call(func=function, args=[argument], keywords=[]):
                value = self._evaluate(module, argument)
                return self._evaluate_call(ast.unparse(function), value)
        raise _Unknowable

    def _evaluate_dict(self, module: Module, node: ast.Dict) -> dict[Any, Any]:
        mapping = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                mapping[self._evaluate(module, key)] = self._evaluate(module, value)
        return mapping

    def _evaluate_member(self, module: Module, owner: ast.Name, name: str) -> Any:
        """The value of a member of an enum. Raises LookupError for any other attribute."""
        key = self.resolve_class(module, owner)
        members = None if key is None else read_enum_members(self, *key)
        if members is None:
            raise LookupError(name)
        return members[name]

    def _evaluate_name(self, module: Module, name: str) -> Any:
        origin = self.resolve(module, name)
        if origin is not None:
            owner, original = origin
            if original in owner.constants:
                return self._evaluate(owner, owner.constants[original])
        return {"list": list, "dict": dict}[name]()

    def _evaluate_call(self, function: str, value: Any) -> Any:
        match function:
            case "frozenset":
                return value
            case "len":
                return len(value)
            case "os.path.basename":
                return Path(value).name
        raise _Unknowable

    def _read_module(self, name: str) -> Module | None:
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
        module = Module(name, label, ast.parse(raw))
        for node in _list_top_statements(module.tree.body):
            module.bind(node)
        return module


def _list_top_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, also under `if` and `try` (lazy packages import there)."""
    for node in body:
        yield node
        match node:
            case ast.If(body=inner, orelse=other):
                yield from _list_top_statements([*inner, *other])
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=last):
                for handler in handlers:
                    yield from _list_top_statements(handler.body)
                yield from _list_top_statements([*other, *last, *inner])


class _Unknowable(Exception):
    """The expression's value depends on running the module."""


def read_enum_members(
    sources: Sources, module: Module, node: ast.ClassDef
) -> dict[str, Any] | None:
    """Member names and values of an Enum class; None for any other class."""
    if not any(ast.unparse(base).endswith("Enum") for base in node.bases):
        return None
    members = {}
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=expression):
                value = sources.evaluate(module, expression)
                if value is not UNKNOWN:
                    members[name] = value
    return members


def mark(node: ast.expr) -> str:
    """The last part of a decorator's or a function's name; "" if it has none."""
    while isinstance(node, ast.Call):
        node = node.func
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
