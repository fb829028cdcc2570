"""Commits of open-instruct as checkouts of their own: what a comparison of two commits runs.

A commit is cloned from the checkout at hand, objects shared, into launch's cache: it has a history, so
a run can tell which commit it was, and nothing is written into the checkout that it came from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from launcher import git, upstream
from launcher.config import load
from launcher.errors import Finding, InvalidConfig, NotReady, brief, not_ready, usage
from launcher.fingerprint import cache_home
from launcher.git import Repository
from launcher.paths import expanded
from launcher.preparation import Request
from launcher.stage import backend_of


class Checkouts:
    """Finds checkouts by folder or by commit, for the stage file of a request."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def python(self) -> Path | None:
        """The Python of the checkout that would be used: a clone of it has none of its own."""
        source = upstream.locate("open_instruct", checkout=self.request.checkout)
        python = None if source.root is None else source.root / ".venv" / "bin" / "python"
        return python if python is not None and python.exists() else None

    def find(self, named: str) -> Path:
        """The checkout in a folder, or of a commit of the one that would be used.

        Raises UsageError for another backend, and for what is neither; NotReady where it cannot be made.
        """
        if backend_of(load(self.request.config, self.request.overrides)) != "open_instruct":
            raise usage("bad-vary", "only open-instruct runs from a checkout", "vary its arguments")
        named = named.strip().strip("'\"")
        place = expanded(named)
        # `a/b` may be a branch too, but a folder that is there is meant
        if place.is_dir():
            return place.absolute()
        source = upstream.locate("open_instruct", checkout=self.request.checkout)
        commit = None if source.root is None else Repository(source.root).commit(named)
        if commit is None or source.root is None:
            raise InvalidConfig(
                Finding(
                    severity="error", layer="launch", code="no-checkout",
                    message=f"`{brief(named)}` is neither a folder nor a commit of "
                    f"{source.root or 'a checkout, for there is none'}",
                    help="open_instruct=PATH,PATH or open_instruct=COMMIT,COMMIT",
                )
            )  # fmt: skip
        return materialised(source.root, commit)


def materialised(root: Path, commit: str) -> Path:
    """A clean checkout of a commit (its full name), made where it is not there yet."""
    place = cache_home(os.environ) / "checkouts" / commit
    made = Repository(place)
    if made.commit("HEAD") == commit and edits(place) is None:
        return place
    shutil.rmtree(place, ignore_errors=True)
    half = place.with_name(f".{commit}.{os.getpid()}")
    # a clone of a clone would share the objects of the first, which may be tidied away
    top = Repository(root).top() or root
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _git(["clone", "--quiet", "--shared", "--no-checkout", str(top), str(half)])
        _git(["-C", str(half), "-c", "advice.detachedHead=false", "checkout", "--quiet", commit])
        half.replace(place)
    except OSError as error:
        raise _failed(commit, error.strerror or str(error)) from None
    except subprocess.CalledProcessError as error:
        raise _failed(commit, (error.stderr or "git failed").strip().splitlines()[-1]) from None
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return place


def edits(root: Path | None) -> str | None:
    """A digest of what differs from the commit that is checked out; None where nothing does."""
    told = None if root is None else Repository(root).ask("diff", "HEAD")
    return hashlib.sha256(told.encode()).hexdigest() if told else None


def _git(words: Sequence[str]) -> None:
    subprocess.run(
        [*git.COMMAND, *words], check=True, capture_output=True, text=True, errors="replace",
        env=git.environment("file"), stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _failed(commit: str, reason: str) -> NotReady:
    return not_ready(
        "no-checkout", f"{commit[:12]} could not be checked out: {reason}",
        "check it out yourself and name the folder: open_instruct=PATH",
    )  # fmt: skip
