"""Questions to a git repository: plain objects, read-only, no work tree needed."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

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

    def ask(self, *arguments: str, timeout_s: float = 60.0) -> str | None:
        raw = self._run(arguments, b"", timeout_s)
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
        raw = self._run(("cat-file", "--batch", "--buffer"), asked.encode(), 600.0) or b""
        at = 0
        for _ in range(asked.count("\n")):
            head, _, _ = raw[at : at + 4096].partition(b"\n")
            at += len(head) + 1
            kind, _, size = head.rpartition(b" ")
            # not of `... missing`, nor of a folder, whose entries follow
            yield raw[at : at + int(size)] if size.isdigit() and kind.endswith(b" blob") else None
            at += int(size) + 1 if size.isdigit() else 0

    def _run(self, arguments: tuple[str, ...], given: bytes, timeout_s: float) -> bytes | None:
        # most commands never ask git anything
        import subprocess

        verb, *words = arguments
        if verb in {"diff", "log", "show"}:
            words = ["--no-ext-diff", "--no-textconv", *words]
        if verb in {"diff", "status"}:
            # what is inside a submodule is its own affair, and so are the commands that its config names
            words = ["--ignore-submodules=dirty", *words]
        options = _filters(self) if verb in {"diff", "status"} else ()
        command = [*_COMMAND, *options, "-C", str(self.root), verb, *words]
        # inside a git hook these name another repository; a missing object must not ask the network
        environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        offline = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "none", "LC_ALL": "C"}
        about: dict[str, Any] = {"input": given, "timeout": timeout_s, "env": environ | offline}
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            return bytes(subprocess.run(command, capture_output=True, check=True, **about).stdout)
        return None


# a question may follow another at once, and none changes what the checkout's config names
@lru_cache(maxsize=64)
def _filters(repository: Repository) -> tuple[str, ...]:
    """Options that switch off the filters of a checkout's own config: comparing files would run them."""
    pattern = r"^filter\..*\.(clean|smudge|process|required)$"
    names = repository.ask("config", "--local", "--includes", "--name-only", "--get-regexp", pattern) or ""
    off = (f"{name}={'false' if name.endswith('.required') else ''}" for name in names.splitlines())
    return tuple(word for option in off for word in ("-c", option))


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
