"""The first row of a local data file: what would crash once a run has begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# bytes read for the first row; one that is longer is not judged
_HEAD = 2**20


def columns(path: Path, most: int | None = None) -> tuple[dict[str, Any], frozenset[str]] | None:
    """The first row of a .jsonl, and the names in so many rows of its head, or in all of them.

    None where it cannot be told.
    """
    if path.suffix != ".jsonl" or fault(path) is not None:
        return None
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return None
    lines = head.strip().split(b"\n")
    # the last one may be cut off
    kept = (lines if len(head) < _HEAD else lines[:-1])[:most]
    try:
        rows = [json.loads(line) for line in kept if line.strip()]
    except (RecursionError, ValueError):
        return None
    if not rows or not all(isinstance(row, dict) for row in rows):
        return None
    return rows[0], frozenset().union(*rows)


def fault(path: Path) -> str | None:
    """What is wrong with a .jsonl; None where nothing is, or where it cannot be told."""
    if path.suffix != ".jsonl":
        return None
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except (OSError, ValueError):
        return None
    before, _, _ = head.partition(head.strip()[:1] or b"\n")
    if not head.strip():
        return "holds no rows" if len(head) < _HEAD else None
    number = before.count(b"\n") + 1
    line, end, _ = head[len(before) :].partition(b"\n")
    if not end and len(head) == _HEAD:
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return f"line {number} is no JSON: one object a line is read"
    except RecursionError:
        return None
    return None if isinstance(row, dict) else f"line {number} is no JSON object"
