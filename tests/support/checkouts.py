"""Which open-instruct checkouts are here, by their commits, for the tests that need a certain one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.upstream import locate
from launcher.upstream.open_instruct import PIN

NEWEST = "e6c3044aa6201c8bfa4573c1b03142af599e730d"
"""The newest commit that rules are held against."""
COMMITS = (PIN, NEWEST)
REQUIRED = "LAUNCH_REQUIRE_CHECKOUT"
"""With this variable set to 1, a missing checkout of the pin fails a test in place of skipping it."""


def missing(commit: str) -> str:
    what = "at the pin" if commit == PIN else f"at {commit[:12]}"
    return f"no open-instruct checkout {what}"


def places() -> Iterator[Path]:
    """Where a checkout may lie: what a variable names, where launch looks, and others beside the usual one."""
    named = os.environ.get("LAUNCH_OPEN_INSTRUCT")
    if named:
        yield Path(named).expanduser()
    yield locate.SUBMODULE
    for place in locate.FOUND_IN:
        yield place.expanduser()
    home = Path("~").expanduser()
    yield from sorted(home.glob("open-instruct-*"))


def find(commit: str = PIN) -> Path | None:
    """The first checkout of a commit without edits; the search goes on past those of other commits."""
    for root in places():
        if (root / "open_instruct" / "finetune.py").is_file() and holds(root, commit):
            return root
    return None


def holds(root: Path, commit: str) -> bool:
    source = locate.locate("open_instruct", checkout=root)
    if commit == PIN:
        return source.pinned
    return source.version == commit


def require(commit: str = PIN) -> Path:
    """The checkout of a commit; without one the test is skipped, or fails where the variable demands the pin."""
    root = find(commit)
    if root is not None:
        return root
    if commit == PIN and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{missing(commit)}, and {REQUIRED} is set", pytrace=False)
    pytest.skip(missing(commit))
