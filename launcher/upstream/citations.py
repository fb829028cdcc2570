"""What of the pin's source the rules cite, and whether the source at hand still holds it.

A rule is written by hand, about the pin; `rules.rule.cites` says which lines it is about. Where one of them
is no longer found in the same function or class, the rule may be wrong there, and says less.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.errors import Finding, Severity
from launcher.upstream.source.packages import Tree

CITATION = re.compile(r"((?:\w+/)*\w+\.py):(\d+(?:[,-]\d+)*)")
# Cited by their bare name outside a list of files of one folder; all others are open-instruct's.
_FOLDERS = {
    "hf_argparser.py": "transformers",
    "subprocess_handler.py": "torch/distributed/elastic/multiprocessing/subprocess_handler",
}
_LESS: Mapping[Severity, Severity] = {"error": "warning", "warning": "note", "note": "note"}

Table = Mapping[str, Sequence[str]]
"""`package/file.py:line` of the pin -> the qualified name around it ("" for the module), and a digest."""


def citations(text: str) -> Iterator[str]:
    """Each `package/file.py:line` that a text names; of a range its first line."""
    for line in text.splitlines():
        folder = None
        for name, numbers in CITATION.findall(line):
            if "/" in name:
                folder = name.rpartition("/")[0]
            else:
                name = f"{folder or _FOLDERS.get(name, 'open_instruct')}/{name}"
            for number in numbers.split(","):
                yield f"{name}:{number.partition('-')[0]}"


def of_rule(rule: Callable[..., object]) -> list[str]:
    """The lines that `rules.rule.cites` names for a rule, each once."""
    places: list[str] = []
    for text in getattr(rule, "cites", ()):
        places.extend(citations(text))
    return list(dict.fromkeys(places))


def table(trees: Mapping[str, Tree], cited: Iterable[str]) -> dict[str, list[str]]:
    """Where each cited line of these packages stands, to be found again in another commit of them."""
    read = CitationCheck({}, trees)
    found = {}
    for citation in sorted(set(cited)):
        label, _, number = citation.rpartition(":")
        file = read.file(label)
        if file is not None and int(number) <= len(file.lines):
            found[citation] = [file.around(int(number)), _digest(file.lines[int(number) - 1])]
    return found


@dataclass(slots=True)
class CitationCheck:
    """Whether a line that the pin has at `package/file.py:line` is in the same place of these sources.

    Files are read as their lines are checked. A line that the table does not know counts as standing, and
    one of `others`, which are scripts that do not run and files that define arguments of theirs.
    """

    known: Table
    trees: Mapping[str, Tree]
    others: frozenset[str] = frozenset()
    _files: dict[str, _SourceFile | None] = field(default_factory=dict)

    def __call__(self, citation: str) -> bool:
        label = citation.rpartition(":")[0]
        if citation not in self.known or label in self.others:
            return True
        name, digest = self.known[citation]
        file = self.file(label)
        return file is not None and digest in file.digests(name)

    def file(self, label: str) -> _SourceFile | None:
        """A file by `package/path.py`; None where it is not there or is no Python."""
        if label not in self._files:
            package, _, below = label.partition("/")
            raw = self.trees[package].read(below) if package in self.trees else None
            self._files[label] = None if raw is None else _parsed(raw)
        return self._files[label]


def downgrade(found: Finding, gone: Iterable[str]) -> Finding:
    """A finding of the pin where some of what it is about is `gone`: one severity less, and why."""
    listed = ", ".join(one.removeprefix("open_instruct/") for one in gone)
    message = f"{found.message} (of the pin: what it has at {listed} is not in this source)"
    return replace(found, severity=_LESS[found.severity], message=message)


@dataclass(slots=True)
class _SourceFile:
    """One file: its lines, and the first and last line of each function and class, by qualified name."""

    lines: list[str]
    spans: list[tuple[str, int, int]]

    def around(self, number: int) -> str:
        """The innermost function or class that a line stands in; "" for the module."""
        inside = [(last - first, name) for name, first, last in self.spans if first <= number <= last]
        return min(inside)[1] if inside else ""

    def digests(self, name: str) -> set[str]:
        """Of every line below that name; where a class has another name here, of methods called so."""
        spans = [(a, b) for known, a, b in self.spans if known == name] if name else [(1, None)]
        _, dot, method = name.rpartition(".")
        if dot and not spans:
            spans = [(a, b) for known, a, b in self.spans if known.endswith(f".{method}")]
        return {_digest(line) for a, b in spans for line in self.lines[a - 1 : b]}


def _parsed(raw: bytes) -> _SourceFile | None:
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = raw.decode("utf-8", "replace").splitlines()
    return _SourceFile(lines=lines, spans=list(_spans(tree, "")))


def _spans(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            yield name, child.lineno, child.end_lineno or child.lineno
            yield from _spans(child, f"{name}.")
        else:
            yield from _spans(child, prefix)


def _digest(line: str) -> str:
    return hashlib.sha256(" ".join(line.split()).encode()).hexdigest()[:16]
