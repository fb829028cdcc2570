"""Questions to a git repository: plain objects, read-only, no work tree needed."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from launcher.machine import isolation, tools

_SLOW_S = 20.0  # for comparing the files of a checkout on a cold network file system
_BULK_S = 600.0  # for the contents of thousands of objects
# no command that a checkout's own config names is run: whoever only looks at it must not run them
_COMMAND = (
    "git --no-optional-locks --no-pager -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.sshCommand=false "
    "-c core.gitProxy= -c core.askPass= -c credential.helper= -c core.alternateRefsCommand=true "
    "-c log.showSignature=false --no-replace-objects"
).split()


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository by a folder inside it; each question is a git process, and what git refuses is None or nothing."""

    root: Path

    def ask(self, *arguments: str) -> str | None:
        raw = self._run(arguments, b"", _SLOW_S)
        return None if raw is None else raw.decode("utf-8", "replace").rstrip("\n")

    def top(self) -> Path | None:
        told = self.ask("rev-parse", "--show-toplevel")
        return Path(told) if told else None

    def commit(self, revision: str) -> str | None:
        if revision.startswith("-"):
            return None
        return self.ask("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")

    def is_shallow(self) -> bool:
        return self.ask("rev-parse", "--is-shallow-repository") == "true"

    def read(self, revision: str, path: str) -> bytes | None:
        return next(self.blobs([f"{revision}:{path}"]), None)

    def blobs(self, names: Iterable[str]) -> Iterator[bytes | None]:
        """The contents of many objects (`commit:path` or an object's name), by one process."""
        asked = "".join(f"{name}\n" for name in names)
        raw = self._run(("cat-file", "--batch", "--buffer"), asked.encode(), _BULK_S) or b""
        at = 0
        for _ in range(asked.count("\n")):
            head, _, _ = raw[at : at + 4096].partition(b"\n")
            at += len(head) + 1
            kind, _, size = head.rpartition(b" ")
            # not of `... missing`, nor of a folder, whose entries follow
            yield raw[at : at + int(size)] if size.isdigit() and kind.endswith(b" blob") else None
            at += int(size) + 1 if size.isdigit() else 0

    def _run(self, arguments: tuple[str, ...], given: bytes, slow_s: float) -> bytes | None:
        """What git answers. It has `slow_s` once it has answered anything: before that it may be hanging."""
        verb, *words = arguments
        if verb in {"diff", "log", "show"}:
            words = ["--no-ext-diff", "--no-textconv", *words]
        if verb in {"diff", "status"}:
            # what is inside a submodule is its own affair, and so are the commands that its config names
            words = ["--ignore-submodules=dirty", *words]
        options = _filters(self) if verb in {"diff", "status"} else ()
        command = [*_COMMAND, *options, "-C", str(self.root), verb, *words]
        with contextlib.suppress(OSError, ValueError):
            _require_answer()
            answer = tools.ask(command, environ=_environment(), given=given, seconds=slow_s)
            if answer.returncode == 0:
                return answer.out
        return None


def _environment() -> dict[str, str]:
    # inside a git hook these name another repository; a missing object must not ask the network
    environ = {k: v for k, v in isolation.isolated(os.environ).items() if not k.startswith("GIT_")}
    offline = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "none", "LC_ALL": "C"}
    return environ | offline


@lru_cache(maxsize=1)
def _require_answer() -> None:
    """Raises NoAnswer or OSError where git does not run here; asked again then, and only then."""
    answer = tools.ask(["git", "--version"], environ=_environment())
    if answer.returncode != 0:
        raise OSError(f"git ended with {answer.returncode}")


# a question may follow another at once, and none changes what the checkout's config names
@lru_cache(maxsize=64)
def _filters(repository: Repository) -> tuple[str, ...]:
    """Options that switch off the filters of a checkout's own config: comparing files would run them."""
    pattern = r"^filter\..*\.(clean|smudge|process|required)$"
    listed = repository.ask("config", "--show-scope", "--includes", "--name-only", "--get-regexp", pattern) or ""
    options: list[str] = []
    for line in listed.splitlines():
        scope, _, name = line.partition("\t")
        # those of the user and of the machine are their own choice
        if scope in {"local", "worktree"}:
            options += ["-c", f"{name}=false" if name.endswith(".required") else f"{name}="]
    return tuple(options)


@dataclass(frozen=True, slots=True)
class CommitTree:
    """A folder as it was at a commit (its full name), read like one on disk (see `sources.Tree`)."""

    repository: Repository
    commit: str
    name: str

    def read(self, path: str) -> bytes | None:
        return _content(self.repository, self.commit, f"{self.name}/{path}")

    def place(self, path: str) -> str:
        return f"{self.commit[:12]}:{self.name}/{path}"


# a file is asked for several times, for its digest and its text; at a commit it never changes
@lru_cache(maxsize=256)
def _content(repository: Repository, commit: str, path: str) -> bytes | None:
    return repository.read(commit, path)
