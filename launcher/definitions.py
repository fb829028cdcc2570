"""What an entry script's parser takes, read from files at any state: names, types, defaults, places.

Unlike `declarations`, which judges values by the source that will run, this reads scripts of all
ages: dataclasses in the script or anywhere in the package, one or several, or plain argparse flags.
Nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from launcher.sources import top_level

_PARSERS = re.compile(r"ArgumentParserPlus$|^HfArgumentParser$|^TrlParser$")
_QUOTED = re.compile(r"`(?:\w+\.|--)?(\w+)`")
_INSTEAD = re.compile(r"\b(?:[Uu]se|[Uu]sing) `(?:--)?(\w+)`[^.`]{0,20} (?:instead|is preferred)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A field (or flag) as its file defines it; type and default as normalised source text.

    `handed` are fields that its class gives the value to, `advised` those that it says to use instead.
    """

    name: str
    type: str
    default: str | None
    owner: str
    file: str
    line: int
    handed: tuple[str, ...] = ()
    advised: tuple[str, ...] = ()


Arguments = Mapping[str, Definition]


@dataclass(frozen=True, slots=True)
class Class:
    """A class: its bases as dotted names, and the fields that it defines itself.

    `handed` are the pairs of `self.new = self.old` in its methods, `advised` those of texts such as
    "`old` is deprecated, use `new` instead".
    """

    bases: tuple[str, ...]
    fields: tuple[Definition, ...]
    handed: tuple[tuple[str, str], ...] = ()
    advised: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Source:
    """What of one file matters here; `imports` maps a name to the dotted name it stands for."""

    classes: dict[str, Class] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    parsed: tuple[str, ...] = ()
    flags: tuple[Definition, ...] = ()


def read_source(raw: bytes, path: str, *, entry: bool) -> Source | None:
    """One file, parsed; None where it is no Python. Only an entry script is searched for its parser."""
    try:
        tree, text = ast.parse(raw), _Lines(raw)
        source = Source()
        for node in top_level(tree):
            _note(source, node, path, text)
        if entry:
            # nothing else is walked through: it is most of the time that reading a history takes
            makers = [node for node in tree.body if text.hold(node, b"Parser")]
            _note_inner_imports(source, makers, path)
            source.parsed = _parser_classes(makers)
            source.flags = () if source.parsed else tuple(_plain_flags(tree, path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return source


@dataclass(slots=True)
class _Lines:
    """The text of a file, to tell what a statement cannot hold without walking through it."""

    raw: bytes
    lines: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.raw.splitlines()

    def hold(self, node: ast.stmt, word: bytes) -> bool:
        return any(word in line for line in self.lines[node.lineno - 1 : node.end_lineno])


def _note_inner_imports(source: Source, nodes: Iterable[ast.stmt], path: str) -> None:
    """The parser's classes may be imported where the parser is made."""
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom):
                for alias in inner.names:
                    name = alias.asname or alias.name
                    if name not in source.classes:
                        source.imports.setdefault(name, f"{_origin(inner, path)}.{alias.name}")


def _note(source: Source, node: ast.stmt, path: str, text: _Lines) -> None:
    if isinstance(node, ast.ImportFrom):
        origin = _origin(node, path)
        for alias in node.names:
            if alias.name == "*":
                source.stars.append(origin)
            else:
                source.imports[alias.asname or alias.name] = f"{origin}.{alias.name}"
                source.classes.pop(alias.asname or alias.name, None)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            source.imports[name] = alias.name if alias.asname else name
    elif isinstance(node, ast.ClassDef):
        bases = tuple(ast.unparse(base) for base in node.bases)
        fields = tuple(_own_fields(node, path))
        advised = tuple(_advised(node)) if fields and text.hold(node, b"eprecated") else ()
        source.classes[node.name] = Class(bases, fields, tuple(_handed(node)), advised)
        source.imports.pop(node.name, None)


def _origin(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    folder = path.split("/")[: -node.level]
    return ".".join([*folder, *([node.module] if node.module else [])])


def _own_fields(node: ast.ClassDef, path: str) -> Iterator[Definition]:
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation, name = ast.unparse(statement.annotation).strip("'\""), statement.target.id
        if name.startswith("_") or "ClassVar" in annotation or "InitVar" in annotation:
            continue
        value = statement.value
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
            keywords = {k.arg: k.value for k in value.keywords}
            if isinstance(init := keywords.get("init"), ast.Constant) and init.value is False:
                continue
            value = keywords.get("default") or keywords.get("default_factory")
        yield Definition(
            name=name, type=_plain_type(annotation), default=_text(value), owner=node.name,
            file=path, line=statement.lineno,
        )  # fmt: skip


def _handed(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """What the class itself still takes under an old name: (old, new) of `self.new = self.old`."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name != "__post_init__":
            continue
        for inner in ast.walk(method):
            match inner:
                case ast.Assign(
                    targets=[ast.Attribute(value=ast.Name(id="self"), attr=new)],
                    value=ast.Attribute(value=ast.Name(id="self"), attr=old),
                ) if new != old:
                    yield old, new


def _advised(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """(old, new) of the texts that call an argument deprecated and name another to use instead."""
    for statement in node.body:
        own = ""
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            own = statement.target.id
        elif not isinstance(statement, ast.FunctionDef):
            continue
        for inner in ast.walk(statement):
            text = inner.value if isinstance(inner, ast.Constant) else None
            if isinstance(text, str) and "deprecated" in text.lower():
                old = own or next(iter(_QUOTED.findall(text)), "")
                yield from ((old, new) for new in _INSTEAD.findall(text) if new != old)


def _plain_type(annotation: str) -> str:
    """One spelling for each type, so that `Optional[List[int]]` equals `list[int] | None`."""
    text = re.sub(r"\b(?:typing|t)\.", "", annotation)
    text = re.sub(r"\b(List|Dict|Tuple)\b", lambda found: found[1].lower(), text)
    while (
        plain := re.sub(r"\b(?:Optional|Union)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", _union, text)
    ) != text:
        text = plain
    return text


def _union(found: re.Match[str]) -> str:
    if found[0].startswith("Optional"):
        return f"{found[1]} | None"
    return re.sub(r",\s*(?![^\[]*\])", " | ", found[1])


def _text(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)


def _parser_classes(makers: Iterable[ast.stmt]) -> tuple[str, ...]:
    """The dotted names in the call `ArgumentParserPlus((A, b.C))`, also by way of a variable."""
    assigned: dict[str, ast.expr] = {}
    calls: list[ast.expr] = []
    for node in (inner for maker in makers for inner in ast.walk(maker)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node.value
        elif isinstance(node, ast.Call) and _PARSERS.search(_last(node.func)):
            named = [k.value for k in node.keywords if k.arg == "dataclass_types"]
            calls += [*node.args[:1], *named][:1]
    for given in calls:
        if isinstance(given, ast.Name) and given.id in assigned:
            given = assigned[given.id]
        items = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
        if names := tuple(ast.unparse(i) for i in items if isinstance(i, ast.Name | ast.Attribute)):
            return names
    return ()


def _last(node: ast.expr) -> str:
    """`f` of `f(...)` and of `a.f(...)`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _plain_flags(tree: ast.Module, path: str) -> Iterator[Definition]:
    """The flags of `parser.add_argument("--name", ...)`: what scripts had before dataclasses."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "add_argument":
            continue
        for word in node.args:
            if (
                isinstance(word, ast.Constant)
                and isinstance(word.value, str)
                and word.value.startswith("--")
            ):
                options = {k.arg: k.value for k in node.keywords}
                switch = _text(options.get("action")) in {"'store_true'", "'store_false'"}
                yield Definition(
                    name=word.value[2:].replace("-", "_"),
                    type="bool" if switch else _text(options.get("type")) or "str",
                    default="False" if switch else _text(options.get("default")) or "None",
                    owner="", file=path, line=node.lineno,
                )  # fmt: skip


def gathered(classes: Iterable[Class]) -> dict[str, Definition]:
    """The fields of a class by name; `classes` are its bases, and at last itself."""
    found: dict[str, Definition] = {}
    handed: list[tuple[str, str]] = []
    advised: list[tuple[str, str]] = []
    for one in classes:
        found |= {known.name: known for known in one.fields}
        handed += one.handed
        advised += one.advised
    return {
        key: replace(
            known,
            handed=tuple(new for old, new in handed if old == key),
            advised=tuple(dict.fromkeys(new for old, new in advised if old == key)),
        )
        for key, known in found.items()
    }


class _Unreadable(Exception):
    """A file that the arguments depend on is missing as an object, or is no Python."""


@dataclass(slots=True)
class Taken:
    """The arguments of scripts at one state of the files of a package.

    `paths` are the Python files there are, relative to the folder that holds the package; `parsed`
    reads one of them (as an entry script or not), None where it cannot. `seen` are the paths that it
    depends on, also those that are missing.
    """

    paths: Container[str]
    parsed: Callable[[str, bool], Source | None]
    seen: set[str] = field(default_factory=set)

    def of(self, script: str) -> dict[str, Definition] | None:
        """Every argument by name, in the parser's order; None where they cannot be told."""
        found: dict[str, Definition] = {}
        try:
            source = self._source(script, entry=True)
            if source is None:
                return None
            for known in source.flags:
                found.setdefault(known.name, known)
            for name in source.parsed:
                found |= gathered(self._classes(script, source, name, frozenset()))
        except _Unreadable:
            return None
        return found or None

    def _classes(
        self, path: str, source: Source, name: str, below: frozenset[tuple[str, str]]
    ) -> Iterator[Class]:
        """A class after its bases; nothing for one that lies outside of the package."""
        home = self._home(path, source, name)
        if home is None and self._is_ours(path, source, name):
            raise _Unreadable
        there = None if home is None or home in below else self._source(home[0])
        if home is None or there is None:
            return
        for base in reversed(there.classes[home[1]].bases):
            yield from self._classes(home[0], there, base, below | {home})
        yield there.classes[home[1]]

    def _is_ours(self, path: str, source: Source, name: str) -> bool:
        """Whether a class that was not found should have been: other packages are not read."""
        origin = source.imports.get(name.partition(".")[0], "")
        return origin.partition(".")[0] == path.partition("/")[0]

    def _home(self, path: str, source: Source, name: str) -> tuple[str, str] | None:
        """The file and the plain name of a class, followed over imports (at most 20 steps)."""
        for _ in range(20):
            head, _, rest = name.partition(".")
            if name in source.classes:
                return path, name
            if head not in source.imports:
                return self._starred(source, name)
            dotted = f"{source.imports[head]}.{rest}" if rest else source.imports[head]
            found = self._module(dotted)
            if found is None:
                return None
            path, name = found
            there = self._source(path)
            if there is None:
                return None
            source = there
        return None

    def _starred(self, source: Source, name: str) -> tuple[str, str] | None:
        for module in source.stars:
            found = self._module(f"{module}.{name}")
            there = self._source(found[0]) if found else None
            if found and there and name in there.classes:
                return found[0], name
        return None

    def _module(self, dotted: str) -> tuple[str, str] | None:
        """`a.b.C` -> the file of `a.b`, and `C`."""
        module, _, name = dotted.rpartition(".")
        if not module:
            return None
        folder = module.replace(".", "/")
        for path in (f"{folder}.py", f"{folder}/__init__.py"):
            self.seen.add(path)
            if path in self.paths:
                return path, name
        return None

    def _source(self, path: str, *, entry: bool = False) -> Source | None:
        self.seen.add(path)
        if path not in self.paths:
            return None
        source = self.parsed(path, entry)
        if source is None:
            raise _Unreadable
        return source
