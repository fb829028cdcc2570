"""Questions to a git repository: plain objects, read-only, no work tree needed."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from launcher.lazy_dataclass import dataclass
from launcher.machine import isolation, tools

_SLOW_S = 20.0  # to compare the files of a checkout on a cold network file system
_BULK_S = 600.0  # for the contents of thousands of objects
# No command that a checkout's own config names is run: to look at it must be safe.
_COMMAND = """
    git --no-optional-locks --no-pager -c core.fsmonitor=false -c core.hooksPath=/dev/null
    -c core.sshCommand=false -c core.gitProxy= -c core.askPass= -c credential.helper=
    -c core.alternateRefsCommand=true -c log.showSignature=false --no-replace-objects
""".split()
_COMPARING = frozenset({"diff", "status"})
_SHOWING = frozenset({"diff", "log", "show"})


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository by a folder inside it. Each question is a git process; None if git refuses."""

    root: Path

    def ask(self, *arguments: str) -> str | None:
        raw = self._run_git(arguments, b"", _SLOW_S)
        if raw is None:
            return None
        return raw.decode("utf-8", "replace").rstrip("\n")

    def top(self) -> Path | None:
        top = self.ask("rev-parse", "--show-toplevel")
        if not top:
            return None
        return Path(top)

    def commit(self, revision: str) -> str | None:
        if revision.startswith("-"):
            return None
        name = f"{revision}^{{commit}}"
        return self.ask("rev-parse", "--verify", "--quiet", "--end-of-options", name)

    def is_shallow(self) -> bool:
        return self.ask("rev-parse", "--is-shallow-repository") == "true"

    def read(self, revision: str, path: str) -> bytes | None:
        return next(self.blobs([f"{revision}:{path}"]), None)

    def blobs(self, names: Iterable[str]) -> Iterator[bytes | None]:
        """The contents of many objects (`commit:path`, or an object's name), by one process.

        None for one that is missing, or is a folder.
        """
        names = list(names)
        request = "".join(f"{name}\n" for name in names)
        raw = self._run_git(("cat-file", "--batch", "--buffer"), request.encode(), _BULK_S) or b""
        position = 0
        for _ in names:
            # `NAME TYPE SIZE`, then the content; or `NAME missing`
            header, _, _ = raw[position : position + 4096].partition(b"\n")
            position += len(header) + 1
            kind, _, size = header.rpartition(b" ")
            if not size.isdigit():
                yield None
                continue
            end = position + int(size)
            if kind.endswith(b" blob"):
                yield raw[position:end]
            else:
                yield None
            position = end + 1

    def _run_git(self, arguments: tuple[str, ...], input: bytes, slow_s: float) -> bytes | None:
        """What git answers, within `slow_s` seconds once it is known to run at all."""
        verb, *words = arguments
        if verb in _SHOWING:
            words = ["--no-ext-diff", "--no-textconv", *words]
        options: tuple[str, ...] = ()
        if verb in _COMPARING:
            # the inside of a submodule would run the commands that its config names
            words = ["--ignore-submodules=dirty", *words]
            options = _disable_filters(self)
        command = [*_COMMAND, *options, "-C", str(self.root), verb, *words]
        with contextlib.suppress(OSError, ValueError):
            _require_answer()
            answer = tools.run_tool(
                command, environ=_build_environment(), input=input, seconds=slow_s
            )
            if answer.returncode == 0:
                return answer.out
        return None


def _build_environment() -> dict[str, str]:
    environ = {}
    for name, value in isolation.isolate(os.environ).items():
        # inside a git hook these name another repository
        if not name.startswith("GIT_"):
            environ[name] = value
    # a missing object must not ask the network
    environ["GIT_NO_LAZY_FETCH"] = "1"
    environ["GIT_TERMINAL_PROMPT"] = "0"
    environ["GIT_ALLOW_PROTOCOL"] = "none"
    environ["LC_ALL"] = "C"
    return environ


@lru_cache(maxsize=1)
def _require_answer() -> None:
    """Raise NoAnswer or OSError if git does not run here; only success is cached."""
    answer = tools.run_tool(["git", "--version"], environ=_build_environment())
    if answer.returncode != 0:
        raise OSError(f"git ended with {answer.returncode}")


# questions follow each other at once, and none changes the checkout's config
@lru_cache(maxsize=64)
def _disable_filters(repository: Repository) -> tuple[str, ...]:
    """Options that switch off the filters of a checkout's own config: comparing would run them."""
    pattern = r"^filter\..*\.(clean|smudge|process|required)$"
    arguments = ["--show-scope", "--includes", "--name-only", "--get-regexp", pattern]
    answer = repository.ask("config", *arguments) or ""
    options: list[str] = []
    for line in answer.splitlines():
        scope, _, name = line.partition("\t")
        # those of the user and of the machine are their own choice
        if scope not in ("local", "worktree"):
            continue
        value = "false" if name.endswith(".required") else ""
        options += ["-c", f"{name}={value}"]
    return tuple(options)


@dataclass(frozen=True, slots=True)
class CommitTree:
    """A folder as it was at a commit (its full name), read like one on disk (`sources.Tree`)."""

    repository: Repository
    commit: str
    name: str

    def read(self, path: str) -> bytes | None:
        return _read_at(self.repository, self.commit, f"{self.name}/{path}")

    def place(self, path: str) -> str:
        return f"{self.commit[:12]}:{self.name}/{path}"


# a file is read several times, for its digest and its text; at a commit it never changes
@lru_cache(maxsize=256)
def _read_at(repository: Repository, commit: str, path: str) -> bytes | None:
    return repository.read(commit, path)
