"""What a rule is: a short generator over typed values that says what is wrong, and edits nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from launcher.errors import Finding, Layer, Severity
from launcher.schema import Values

Rule = Callable[[Values], Iterator[Finding]]


def say(
    severity: Severity, layer: Layer, code: str, key: str, message: str, help: str | None = None
) -> Finding:
    """A finding about one argument; `stage` fills in the place in the file."""
    return Finding(
        severity=severity, layer=layer, code=code, key=f"args.{key}", message=message, help=help
    )
