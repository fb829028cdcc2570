"""The log lines that a verdict looks for, held against the source that prints them.

A line that was reworded upstream is no longer found in a log; that must read as unknown, never as
something that did not happen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from launcher.backends import open_instruct_log, trl_log
from launcher.logs import Pattern

PATTERNS: Mapping[str, tuple[Pattern, ...]] = {
    "open_instruct": open_instruct_log.PATTERNS,
    "trl": trl_log.PATTERNS,
}

# how a text may stand in a log: by itself, after a logger's head, as the name of a progress bar
_FORMS = ("{}", "01/01/2026 00:00:00 - INFO - a.py" ":1 - {}", "{}:   0%|", "a.py" ":1 - {}[1]")
_PERCENT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrifgex]")
_BRACES = re.compile(r"\{[^{}]*\}")


def said(backend: str, modules: Iterable[ast.Module]) -> list[str]:
    """Which of the patterns of a backend a text in these modules would match, by `key`."""
    samples = {sample for module in modules for sample in _texts(module)}
    return sorted(
        {key(known) for known in PATTERNS[backend] if any(_matches(known, s) for s in samples)}
    )


def key(known: Pattern) -> str:
    """A pattern's name, with what tells it from others of the same name."""
    return f"{known.name}: {known.needle.decode()}"


def _matches(known: Pattern, sample: str) -> bool:
    for form in _FORMS:
        line = form.format(sample).encode("utf-8", "replace")
        if known.needle in line and known.regex.search(line):
            return True
    return False


def _texts(module: ast.Module) -> Iterator[str]:
    """Every text that a module could print, with a `1` for each value that is put in."""
    inside = {
        part for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "1" for p in node.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            # `%s` of a logger, `{}` of str.format
            if len(node.value) < 400:
                yield _BRACES.sub("1", _PERCENT.sub("1", node.value))
