"""A copy of a clone in which all that follows from the pin is made anew."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from launcher.errors import InvalidConfig, NotReady, launch_finding, not_ready
from launcher.lazy_dataclass import dataclass
from launcher.machine.git import Repository
from launcher.upstream.source.packages import find_package

PINNED = "launcher/upstream/open_instruct.py"
_PIN = re.compile(r'^PIN = "([0-9a-f]{40})"$', re.MULTILINE)
NAMING = ("README.md",)
"""Pages that name the pin in words."""
GOLDEN = (
    "tests/plan/test_command.py",
    "tests/plan/test_plan_golden.py",
    "tests/agreement/test_parser_agreement.py",
)
"""Tests that write what they compare with; none of them writes what is cited."""
_READ = (
    "open_instruct",
    "configs",
    "scripts",
    "pyproject.toml",
)  # not the pictures, which a partial clone lacks
NEEDS = ("pytest", "olmo_core", "transformers", "deepspeed", "hypothesis")
_TRAILING = 12
_STALE = 3  # of scripts/snapshot.py: all is written, some citations are not at the commit


@dataclass(frozen=True, slots=True)
class Staged:
    """What a move would change, and the tests of `GOLDEN` that fail at the new commit.

    `files` are new texts by path, None where the file goes.
    """

    files: Mapping[str, bytes | None]
    failed: tuple[str, ...]


def require_packages() -> None:
    """Raises NotReady if this Python lacks what snapshot and golden files are made with."""
    lacking = [name for name in NEEDS if find_package(name) is None]
    if lacking:
        message = f"moving the pin needs {', '.join(lacking)} in {sys.executable}"
        raise not_ready(
            "no-trainer",
            message,
            "make install-open-instruct install-dev, then .venv/bin/launch pin move",
        )


def stage_move(
    clone: Path, place: Path, repository: Repository, commit: str, say: Callable[[str], None]
) -> Staged:
    """Move the pin in a copy of a clone that is made in `place`.

    Raises InvalidConfig where the new commit cannot be read as this launch reads open-instruct,
    NotReady where something here is lacking.
    """
    copy = place / "launch"
    checkout = place / "open-instruct"
    names = list(_list_tracked(clone))
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(clone / name, target, follow_symlinks=False)
    say(f"Reading open-instruct at {commit[:12]}")
    _export_commit(repository, commit, checkout)
    old = _set_pin(copy, commit)
    steps = _Steps(copy, checkout)
    # each step reads what the ones before it wrote
    say("Taking its snapshot (about half a minute)")
    steps.run("scripts/snapshot.py", str(repository.root), "--only", "open_instruct", also=_STALE)
    steps.run("scripts/history.py", str(repository.root), commit)
    for name in NAMING:
        page = copy / name
        page.write_text(page.read_text(encoding="utf-8").replace(old, commit), encoding="utf-8")
    steps.run("scripts/reference.py")
    say("Asking its own parsers about generated sets, planning the shipped files (some minutes)")
    failed = steps.write_golden()
    return Staged(_find_changes(copy, clone, names), failed)


def _list_tracked(clone: Path) -> Iterator[str]:
    """The files of a clone that git tracks or would, as they lie there now."""
    command = [
        "git",
        "-C",
        str(clone),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(command, capture_output=True, check=True).stdout
    for raw in sorted(set(listed.split(b"\0")) - {b""}):
        name = os.fsdecode(raw)
        path = clone / name
        if path.is_symlink() or path.is_file():
            yield name


def _export_commit(repository: Repository, commit: str, target: Path) -> None:
    """What launch and its tests read of a commit, without a history, as git stored it."""
    there = (repository.ask("ls-tree", "--name-only", commit) or "").splitlines()
    parts = [name for name in _READ if name in there]
    command = ["git", "-C", str(repository.root), "archive", "--format=tar", commit, "--", *parts]
    done = subprocess.run(command, capture_output=True)
    if done.returncode != 0:
        raise not_ready(
            "unknown-commit",
            f"git cannot read {commit}: {done.stderr.decode(errors='replace').strip()}",
        )
    target.mkdir()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(target, filter="data")


def _set_pin(copy: Path, commit: str) -> str:
    """Write the pin where launch reads it; returns the one before."""
    path = copy / PINNED
    text = path.read_text(encoding="utf-8")
    before = _PIN.search(text)
    if before is None:
        raise not_ready(
            "no-pin",
            f"no line `PIN = ...` is in {PINNED}",
            f"git checkout -- {PINNED}",
            file=PINNED,
        )
    path.write_text(_PIN.sub(f'PIN = "{commit}"', text), encoding="utf-8")
    return before[1]


def _list_files(copy: Path, names: Sequence[str]) -> Iterator[str]:
    """What was copied, and what the steps wrote beside it."""
    yield from names
    for folder in ("docs", "tests/data", "launcher/upstream/snapshots"):
        for path in sorted((copy / folder).rglob("*")):
            name = path.relative_to(copy).as_posix()
            if path.is_file() and name not in names and "__pycache__" not in path.parts:
                yield name


def _find_changes(copy: Path, clone: Path, names: Sequence[str]) -> dict[str, bytes | None]:
    """The new text of each file that is not as it was; None where it is gone."""
    changes: dict[str, bytes | None] = {}
    for name in _list_files(copy, names):
        path = copy / name
        if path.is_symlink():
            continue
        before = clone / name
        if not path.is_file():
            changes[name] = None
        elif not before.is_file() or before.read_bytes() != path.read_bytes():
            changes[name] = path.read_bytes()
    return changes


@dataclass(frozen=True, slots=True)
class _Steps:
    """Programs of the copy, which import the copy's own launch."""

    copy: Path
    checkout: Path

    def run(self, *words: str, also: int = 0) -> None:
        """Raises InvalidConfig with the last lines if the exit code is neither 0 nor `also`."""
        done = self._run_python(words, {})
        if done.returncode not in {0, also}:
            last = "; ".join((done.stderr or done.stdout).strip().splitlines()[-_TRAILING:])
            message = f"{words[0]} cannot follow to this commit: {last}"
            help = "launch does not read this commit yet: see what `launch pin diff` says of it"
            raise InvalidConfig(launch_finding("error", "unreadable-source", message, help))

    def write_golden(self) -> tuple[str, ...]:
        """Let the tests of `GOLDEN` write; returns those that fail all the same."""
        words = ["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-rfE", *GOLDEN]
        settings = {"LAUNCH_GOLDEN": "write", "LAUNCH_OPEN_INSTRUCT": str(self.checkout)}
        done = self._run_python(words, settings)
        if done.returncode not in {0, 1}:
            last = "; ".join((done.stderr + done.stdout).strip().splitlines()[-_TRAILING:])
            message = f"the golden files cannot be written: {last}"
            raise NotReady(launch_finding("error", "no-golden", message))
        failed: list[str] = []
        for line in done.stdout.splitlines():
            # `FAILED tests/x.py::test_y - AssertionError: ...`
            outcome, _, rest = line.partition(" ")
            if outcome in {"FAILED", "ERROR"}:
                failed.append(rest.partition(" - ")[0])
        return tuple(failed)

    def _run_python(
        self, words: Sequence[str], settings: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        environ = dict(os.environ)
        for name in os.environ:
            if name.startswith("LAUNCH_"):
                del environ[name]
        environ |= {"PYTHONPATH": str(self.copy), "PYTHONDONTWRITEBYTECODE": "1", **settings}
        return subprocess.run(
            [sys.executable, *words], cwd=self.copy, env=environ, capture_output=True, text=True
        )
