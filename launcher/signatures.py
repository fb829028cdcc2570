"""The log lines that a verdict looks for, held against the source that prints them.

A line that was reworded upstream is no longer found in a log; that must read as unknown, never as
something that did not happen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from launcher.backends import open_instruct_log, trl_log
from launcher.patterns import Pattern

PATTERNS: Mapping[str, tuple[Pattern, ...]] = {
    "open_instruct": open_instruct_log.PATTERNS,
    "trl": trl_log.PATTERNS,
}

# how a text may stand in a log: by itself, after a logger's head, as the name of a progress bar
_HEAD = "a" + ".py:1 - "
_FORMS = ("{}", f"01/01/2026 00:00:00 - INFO - {_HEAD}{{}}", "{}:   0%|", f"{_HEAD}{{}}[1]")
_PERCENT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrifgex]")
_BRACES = re.compile(r"\{[^{}]*\}")


def said(backend: str, modules: Iterable[ast.Module]) -> list[str]:
    """Which of the patterns of a backend a text in these modules would match, by `key`."""
    told: set[str] = set()
    waiting = list(PATTERNS[backend])
    for sample in {sample for module in modules for sample in _texts(module)}:
        lines = [form.format(sample).encode("utf-8", "replace") for form in _FORMS]
        whole = b"\n".join(lines)
        found = [known for known in waiting if known.needle in whole and _matches(known, lines)]
        told |= {key(known) for known in found}
        waiting = [known for known in waiting if known not in found]
    return sorted(told)


def key(known: Pattern) -> str:
    """A pattern's name, with what tells it from others of the same name."""
    return f"{known.name}: {known.needle.decode()}"


def _matches(known: Pattern, lines: Iterable[bytes]) -> bool:
    return any(known.needle in line and known.regex.search(line) for line in lines)


def _texts(module: ast.Module) -> Iterator[str]:
    """Every text that a module could print, with a `1` for each value that is put in."""
    inside: set[ast.AST] = set()
    # a text's parts come after the text that holds them
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            parts = (p.value if isinstance(p, ast.Constant) else "1" for p in node.values)
            yield "".join(str(part) for part in parts)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and len(node.value) < 400
            and node not in inside
        ):
            # `%s` of a logger, `{}` of str.format
            yield _BRACES.sub("1", _PERCENT.sub("1", node.value))
