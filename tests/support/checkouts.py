"""Which open-instruct checkouts are here, by commit, for the tests that need a certain one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.upstream import locate
from launcher.upstream.open_instruct import KNOWN, PIN

COMMITS = tuple(release.version for release in KNOWN)
"""The known commits, the pin first: tests hold launch against a checkout of each that is here."""
NEWEST = max(KNOWN, key=lambda release: release.date).version
"""The newest of them, in whose history the others are."""
REQUIRED = "LAUNCH_REQUIRE_CHECKOUT"
"""With this variable set to 1, a missing checkout of the pin fails a test in place of skipping it.
"""


def missing(commit: str) -> str:
    what = "at the pin" if commit == PIN else f"at {commit[:12]}"
    return f"no open-instruct checkout {what}"


def places() -> Iterator[Path]:
    """Where a checkout may lie: what a variable names, where launch looks, and others beside the
    usual one.
    """
    named = os.environ.get("LAUNCH_OPEN_INSTRUCT")
    if named:
        yield Path(named).expanduser()
    for place, _ in locate.list_checkout_places(None, {}):
        yield place


def find(commit: str = PIN) -> Path | None:
    """The first checkout of a commit without edits; those of other commits are passed over."""
    for root in places():
        if (root / "open_instruct" / "finetune.py").is_file() and holds(root, commit):
            return root
    return None


def holds(root: Path, commit: str) -> bool:
    source = locate.locate("open_instruct", checkout=root)
    return source.pinned and source.version == commit


def require(commit: str = PIN) -> Path:
    """The checkout of a commit; without one the test is skipped, or fails where the variable
    demands the pin.
    """
    root = find(commit)
    if root is not None:
        return root
    if commit == PIN and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{missing(commit)}, and {REQUIRED} is set", pytrace=False)
    pytest.skip(missing(commit))


def only_another_is_found() -> bool:
    """Whether launch would take the checkout of another commit, because the pin's is not here."""
    return find() is None and locate.locate("open_instruct").root is not None
