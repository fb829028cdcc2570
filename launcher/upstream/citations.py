"""What launch cites of upstream's source, by symbol and anchor text, and where that is in a source.

A citation is written `package/file.py::symbol[anchor]`: the function or class that the line stands
in (nothing for the module itself) and a text that only this line of it holds. `[anchor #2]` is the
second line with that text. A symbol alone is the line that defines it; a file without a package is
open-instruct's. No line number stands in launch's source: `rendered` shows it out of the committed
table, `RuleStanding` out of a checkout.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from typing import NamedTuple

from launcher.errors import Finding, Severity
from launcher.lazy_dataclass import dataclass
from launcher.paths import SNAPSHOTS
from launcher.upstream.source.functions import normalise
from launcher.upstream.source.packages import Tree

_FILE = r"(?<![\w/.{}])((?:\w+/)*\w+\.py)::"
_SYMBOL = r"([A-Za-z_][\w.]*\w|[A-Za-z_])"
_ANCHOR = r"\[([^\[\]\n]+)\]"
CITATION = re.compile(rf"{_FILE}(?:{_SYMBOL}(?:{_ANCHOR})?|{_ANCHOR})")
_NTH = re.compile(r"(.+?) #(\d+)")
# what a test of this repository is called in words, too
_OWN_FOLDERS = ("tests/", "launcher/", "scripts/", "benchmarks/", "test_")
_LESS: Mapping[Severity, Severity] = {"error": "warning", "warning": "note", "note": "note"}


class CitedPlace(NamedTuple):
    """Where a cited line is: its number from 1, digests of the line and of what encloses it.

    What encloses a line is the innermost function, without docstrings and log calls; of a line
    outside any function, the statement of the class or of the module.
    """

    line: int
    words: str
    enclosing: str


Table = Mapping[str, CitedPlace]
"""`package/file.py::symbol[anchor]` -> its place in one release, without what that lacks."""


@dataclass(frozen=True, slots=True)
class Citation:
    """The file with its package, the qualified symbol, the anchor and which of its lines."""

    label: str
    symbol: str
    anchor: str = ""
    nth: int = 0

    def __str__(self) -> str:
        number = f" #{self.nth}" if self.nth else ""
        anchor = f"[{self.anchor}{number}]" if self.anchor else ""
        return f"{self.label}::{self.symbol}{anchor}"


def parse(text: str) -> Citation:
    """The citation that a text begins with. Raises ValueError where it begins with none."""
    match = CITATION.match(text)
    if match is None:
        raise ValueError(f"not a citation: {text}")
    return _parse_match(match)


def find_citations(text: str) -> Iterator[str]:
    """Each citation that a text names, with its package."""
    for match in CITATION.finditer(text):
        if not match[1].startswith(_OWN_FOLDERS):
            yield str(_parse_match(match))


def _parse_match(match: re.Match[str]) -> Citation:
    label = match[1] if "/" in match[1] else f"open_instruct/{match[1]}"
    symbol = match[2] or ""
    anchor = match[3] or match[4] or ""
    numbered = _NTH.fullmatch(anchor)
    if numbered is None:
        return Citation(label, symbol, anchor)
    return Citation(label, symbol, numbered[1], int(numbered[2]))


def list_of_rule(rule: Callable[..., object]) -> list[str]:
    """The lines that `rules.rule.cites` names for a rule, each once."""
    places: list[str] = []
    for text in getattr(rule, "cites", ()):
        places.extend(find_citations(text))
    return list(dict.fromkeys(places))


def list_reviews(rule: Callable[..., object]) -> tuple[str, ...]:
    """The commits, besides `BASELINE`, at which the rule was confirmed; see `rules.rule.cites`."""
    reviewed: tuple[str, ...] = getattr(rule, "reviewed", ())
    return reviewed


@dataclass(frozen=True, slots=True)
class Committed:
    """The committed tables by release (`open_instruct COMMIT`, `trl 1.16.0`), and the pin's commit.

    `later` are the commits with a table that come after the pin.
    """

    pin: str
    tables: Mapping[str, Table]
    later: tuple[str, ...] = ()

    def at_pin_or_later(self) -> list[Table]:
        return [self.tables[f"open_instruct {commit}"] for commit in (self.pin, *self.later)]


@cache
def load_committed() -> Committed:
    raw = (SNAPSHOTS / "cited.json").read_text(encoding="utf-8")
    data = json.loads(raw)
    tables = {}
    for release, table in data["releases"].items():
        tables[release] = {name: CitedPlace(*place) for name, place in table.items()}
    return Committed(data["pin"], tables, tuple(data["later"]))


def merge_tables(releases: Iterable[str]) -> Table:
    """What the committed tables know of some releases, together."""
    tables = load_committed().tables
    places: dict[str, CitedPlace] = {}
    for release in releases:
        places.update(tables.get(release, {}))
    return places


def load_commits(package: str, baseline: str) -> dict[str, Table]:
    """The committed tables of a package that has commits, by release, its baseline's first."""
    tables: dict[str, Table] = {f"{package} {baseline}": {}}
    for release, table in load_committed().tables.items():
        if release.startswith(f"{package} "):
            tables[release] = table
    return tables


def render_citations(text: str, line_of: Callable[[str], int | None] | None = None) -> str:
    """A text for people: each citation in it as `file.py:LINE`, or `file.py` without a known line.

    `line_of` answers for another source than the committed releases.
    """
    if "::" not in text:
        return text
    line_of = line_of or _find_committed_line

    def show(match: re.Match[str]) -> str:
        if match[1].startswith(_OWN_FOLDERS):
            return match[0]
        line = line_of(str(_parse_match(match)))
        return match[1] if line is None else f"{match[1]}:{line}"

    return CITATION.sub(show, text)


def _find_committed_line(citation: str) -> int | None:
    place = _read_current_table().get(citation)
    return None if place is None else place.line


@cache
def _read_current_table() -> Table:
    """What is cited of the pin, and of the release of each package."""
    pin = f"open_instruct {load_committed().pin}"
    releases = load_committed().tables
    return merge_tables(r for r in releases if r == pin or not r.startswith("open_instruct "))


def build_table(trees: Mapping[str, Tree], cited: Iterable[str]) -> dict[str, CitedPlace]:
    """Where each of these citations is in the packages at hand; what is not there is left out."""
    sources = SourceFiles(trees)
    places = {}
    for citation in sorted(set(cited)):
        place = sources.place(citation)
        if place is not None:
            places[citation] = place
    return places


@dataclass(slots=True)
class SourceFiles:
    """Files of packages, read and parsed when first needed."""

    trees: Mapping[str, Tree]
    _files: dict[str, SourceFile | None] = field(default_factory=dict)

    def file(self, label: str) -> SourceFile | None:
        """A file by `package/path.py`; None where it is not there or is no Python."""
        if label not in self._files:
            package, _, below = label.partition("/")
            raw = self.trees[package].read(below) if package in self.trees else None
            self._files[label] = None if raw is None else parse_source(raw)
        return self._files[label]

    def place(self, citation: str) -> CitedPlace | None:
        """Where a citation is; None if its line is gone, or several lines are alike."""
        cited = self.find(parse(citation))
        if cited is None:
            return None
        file, line = cited
        return CitedPlace(line, digest(file.lines[line - 1]), digest(file.enclosing(line)))

    def find(self, citation: Citation) -> tuple[SourceFile, int] | None:
        """The file and the line of a citation; None as for `place`."""
        file = self.file(citation.label)
        if file is None:
            return None
        line = file.find(citation)
        return None if line is None else (file, line)


@dataclass(slots=True)
class RuleStanding:
    """Whether what a rule cites is, in one source, as it was when somebody last confirmed the rule.

    `confirmed` holds the tables of the commits at which rules were confirmed, the first of them the
    one that all were `written_for`, as people read it; `place` answers for the source at hand.
    `others` are scripts that do not run and files that define arguments of theirs: what is cited
    there counts as unchanged, and so does what no table knows. With `by_line` the enclosing
    function does not count: nobody confirms rules for a release of a package that is merely
    installed.
    """

    written_for: str
    confirmed: Mapping[str, Table]
    place: Callable[[str], CitedPlace | None]
    others: frozenset[str] = frozenset()
    by_line: bool = False

    def changed(self, rule: Callable[..., object]) -> list[str]:
        """What a rule cites and is not as it was at any commit where the rule was confirmed."""
        return self.nearest(rule)[1]

    def nearest(self, rule: Callable[..., object]) -> tuple[str, list[str]]:
        """The release, of those where a rule was confirmed, most like this source; what differs."""
        first = next(iter(self.confirmed))
        nearest = first
        fewest = self._find_differing_citations(rule, first)
        for release in self.confirmed:
            if fewest and release != first and _has_commit(list_reviews(rule), release):
                differing = self._find_differing_citations(rule, release)
                if len(differing) < len(fewest):
                    nearest = release
                    fewest = differing
        return nearest, fewest

    def _find_differing_citations(self, rule: Callable[..., object], release: str) -> list[str]:
        places = self.confirmed[release]
        return [citation for citation in list_of_rule(rule) if not self._is_same(citation, places)]

    def line(self, citation: str) -> int | None:
        place = self.place(citation)
        return None if place is None else place.line

    def weighed(self, finding: Finding, changed: Sequence[str]) -> Finding:
        """A finding of a rule whose citations `changed`: a note until the rule is confirmed."""
        if not changed:
            return finding
        names = ", ".join(self._name_line(citation) for citation in changed)
        about = f"written for {self.written_for}: this source differs at {names}"
        message = f"{finding.message} ({about})"
        severity: Severity = _LESS[finding.severity] if self.by_line else "note"
        return replace(finding, severity=severity, message=message)

    def _name_line(self, citation: str) -> str:
        label = citation.partition("::")[0].removeprefix("open_instruct/")
        for places in self.confirmed.values():
            if citation in places:
                return f"{label}:{places[citation].line}"
        return label

    def _is_same(self, citation: str, places: Table) -> bool:
        label = citation.partition("::")[0]
        is_listed = any(citation in table for table in self.confirmed.values())
        if label in self.others or not is_listed:
            return True
        before = places.get(citation)
        now = self.place(citation)
        if before is None or now is None:
            return before is now
        if self.by_line:
            return before.words == now.words
        return before[1:] == now[1:]


def _has_commit(short: Iterable[str], release: str) -> bool:
    """Whether one of some commits, each of any length, is the commit of a release."""
    commit = release.rpartition(" ")[2]
    return any(commit.startswith(name) for name in short)


@dataclass(frozen=True, slots=True)
class _Scope:
    """A function or class: its qualified name, its first line (of decorators too) and its last."""

    name: str
    first: int
    last: int
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(slots=True)
class SourceFile:
    """One file: its lines, its statements, its functions and classes."""

    lines: list[str]
    tree: ast.Module
    scopes: list[_Scope]
    _innermost: list[_Scope | None]
    _texts: dict[ast.stmt, str] = field(default_factory=dict)

    def around(self, line: int) -> str:
        """The innermost function or class that a line stands in; "" for the module."""
        scope = self._innermost[line]
        return "" if scope is None else scope.name

    def is_function(self, line: int) -> bool:
        """Whether a line stands in a function, not in a class body or in the module."""
        scope = self._innermost[line]
        return scope is not None and not isinstance(scope.node, ast.ClassDef)

    def find(self, citation: Citation) -> int | None:
        """The line of a citation; None where there is none, or more than one that fits."""
        symbol = self._find_symbol(citation.symbol)
        if symbol is None:
            return None
        if not citation.anchor:
            return self._find_definition(symbol)
        lines = self._find_lines(citation.anchor, symbol)
        if not citation.nth and len(lines) > 1:
            return None
        index = max(citation.nth - 1, 0)
        return lines[index] if index < len(lines) else None

    def _find_definition(self, symbol: str) -> int | None:
        """The line that defines a function or class: the first of that name."""
        for scope in self.scopes:
            if scope.name == symbol:
                return scope.node.lineno
        return None

    def enclosing(self, line: int) -> str:
        """The text of what encloses a line, without docstrings and log calls; see `CitedPlace`."""
        node = self._find_enclosing_node(line)
        if node is None:
            return ""
        if node not in self._texts:
            self._texts[node] = _render_node(node)
        return self._texts[node]

    def _find_symbol(self, name: str) -> str | None:
        """A symbol's name; if its class has another name, that of the only method called so."""
        names = {scope.name for scope in self.scopes}
        if not name or name in names:
            return name
        owner, _, method = name.rpartition(".")
        if not owner:
            return None
        alike = [other for other in names if other.endswith(f".{method}")]
        return alike[0] if len(alike) == 1 else None

    def _find_lines(self, anchor: str, symbol: str) -> list[int]:
        whole = _compile_anchor(anchor)
        numbers = []
        for number, text in enumerate(self.lines, 1):
            if self.around(number) == symbol and whole.search(_collapse_spaces(text)):
                numbers.append(number)
        return numbers

    def _find_enclosing_node(self, line: int) -> ast.stmt | None:
        scope = self._innermost[line]
        if scope is not None and not isinstance(scope.node, ast.ClassDef):
            return scope.node
        body = self.tree.body if scope is None else scope.node.body
        for statement in body:
            if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                return statement
        return None if scope is None else scope.node


def parse_source(raw: bytes) -> SourceFile | None:
    """A file's text as lines and scopes; None for what is no Python of this interpreter."""
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = raw.decode("utf-8", "replace").splitlines()
    scopes = list(_list_scopes(tree, ""))
    innermost: list[_Scope | None] = [None] * (len(lines) + 2)
    # an inner scope comes after the one around it
    for scope in scopes:
        for number in range(scope.first, scope.last + 1):
            innermost[number] = scope
    return SourceFile(lines=lines, tree=tree, scopes=scopes, _innermost=innermost)


def digest(text: str) -> str:
    """16 hexadecimal digits of a text; how its words are spaced does not count."""
    return hashlib.sha256(_collapse_spaces(text).encode()).hexdigest()[:16]


def _collapse_spaces(line: str) -> str:
    return " ".join(line.split())


@cache
def _compile_anchor(anchor: str) -> re.Pattern[str]:
    """An anchor that begins and ends where words do: `model.save` is not in `model.save_whole`."""
    begin = r"(?<!\w)" if re.match(r"\w", anchor) else ""
    end = r"(?!\w)" if re.search(r"\w$", anchor) else ""
    return re.compile(begin + re.escape(anchor) + end)


def _list_scopes(node: ast.AST, prefix: str) -> Iterator[_Scope]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            first = min(node.lineno for node in (child, *child.decorator_list))
            last = child.end_lineno or child.lineno
            yield _Scope(name, first, last, child)
            yield from _list_scopes(child, f"{name}.")
        else:
            yield from _list_scopes(child, prefix)


def _render_node(node: ast.stmt) -> str:
    """Decorators, name and bases of a class; all of anything else."""
    if not isinstance(node, ast.ClassDef):
        return normalise(node)
    parts = [*node.decorator_list, *node.bases, *node.keywords]
    return " ".join([node.name, *map(ast.unparse, parts)])
