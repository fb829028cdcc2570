"""Commits of open-instruct as checkouts of their own: what a comparison of two commits runs.

A commit is cloned from the checkout at hand, objects shared, into launch's cache: it has a history, so
a run can tell which commit it was, and nothing is written into the checkout that it came from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from launcher.artifacts.fingerprint import cache_home
from launcher.config.load import load
from launcher.errors import InvalidConfig, brief, launch_finding, not_ready, usage
from launcher.lifecycle.prepare import Request
from launcher.machine import git
from launcher.machine.git import Repository
from launcher.paths import expanded
from launcher.stage.stage import backend_of
from launcher.upstream import locate
from launcher.upstream.trainers import BACKENDS


def python_of(request: Request) -> Path | None:
    """The Python of the checkout that would be used: a clone of it has none of its own."""
    source = locate.locate("open_instruct", checkout=request.checkout)
    python = None if source.root is None else source.root / ".venv" / "bin" / "python"
    return python if python is not None and python.exists() else None


def find(request: Request, named: str) -> Path:
    """The checkout in a folder, or of a commit of the one that would be used.

    Raises UsageError for another backend, InvalidConfig for what is neither, NotReady where it cannot be
    made.
    """
    if not BACKENDS[backend_of(load(request.config, request.overrides))].CHECKOUT:
        raise usage("bad-vary", "only open-instruct runs from a checkout", "vary its arguments")
    named = named.strip().strip("'\"")
    place = expanded(named)
    # `a/b` may be a branch too, but a folder that is there is meant
    if place.is_dir():
        return place.absolute()
    root = locate.locate("open_instruct", checkout=request.checkout).root
    commit = None if root is None else Repository(root).commit(named)
    if commit is None or root is None:
        raise InvalidConfig(
            launch_finding(
                "error",
                "no-checkout",
                f"`{brief(named)}` is neither a folder nor a commit of {root or 'open-instruct'}",
                "open_instruct=PATH,PATH or open_instruct=COMMIT,COMMIT",
            )
        )
    return cloned(root, commit)


def cloned(root: Path, commit: str) -> Path:
    """A clean checkout of a commit (its full name), made where it is not there yet."""
    place = cache_home(os.environ) / "checkouts" / commit
    if Repository(place).commit("HEAD") == commit and edits(place) is None:
        return place
    shutil.rmtree(place, ignore_errors=True)
    half = place.with_name(f".{commit}.{os.getpid()}")
    # a clone of a clone would share the objects of the first, which may be tidied away
    top = Repository(root).top() or root
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _git("clone", "--quiet", "--shared", "--no-checkout", str(top), str(half))
        _git("-C", str(half), "-c", "advice.detachedHead=false", "checkout", "--quiet", commit)
        half.replace(place)
    except (OSError, subprocess.CalledProcessError) as error:
        text = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        reason = (text or str(error)).strip().splitlines()[-1]
        raise not_ready(
            "no-checkout",
            f"{commit[:12]} could not be checked out: {reason}",
            "check it out yourself and name the folder: open_instruct=PATH",
        ) from None
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return place


def edits(root: Path | None) -> str | None:
    """A digest of what differs from the commit that is checked out; None where nothing does."""
    changed = None if root is None else Repository(root).ask("diff", "HEAD")
    return hashlib.sha256(changed.encode()).hexdigest() if changed else None


def _git(*words: str) -> None:
    more: dict[str, Any] = {"env": git.environment("file"), "stdin": subprocess.DEVNULL}
    argv = [*git.COMMAND, *words]
    subprocess.run(argv, check=True, capture_output=True, text=True, errors="replace", **more)
