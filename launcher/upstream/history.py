"""What became of an argument that upstream once had: which commit, which pull request, what instead.

The committed table holds every change up to the commit that it was made at. What lies beyond it is
looked up in a checkout's own git history, by the lines that define the argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from launcher.upstream.trainers import BACKENDS

if TYPE_CHECKING:
    from launcher.machine.git import Repository

What = Literal["added", "removed", "renamed"]
_PULL = re.compile(r"\(#(\d{1,9})\)\s*$|^Merge pull request #(\d{1,9})\b")
_DEFINITION = re.compile(r"[-+]\s+(\w+)\s*:\s*([^=]+)")
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@ ?(?:class (\w+))?")
_LOG = (
    "log --root --first-parent --diff-merges=first-parent --no-renames --no-color --relative"
    " --src-prefix=a/ --dst-prefix=b/ --pickaxe-all -U0 --format=%x02%H%x03%cs%x03%P%x03%s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentChange:
    """One change of one argument of an entry script.

    `owner` is the dataclass (empty for a plain argparse flag); `file` and `line` its definition, at
    the commit for what was added, before it for what is gone. `to` is the new name of a renamed
    argument; `see` are arguments that took the place of a removed one, or that upstream advised to use
    instead, without doing the same. `date` is the commit's (YYYY-MM-DD), `pull` its pull request,
    `release` the first version that holds it, which may be all that is known (an empty `commit`).
    """

    key: str
    what: What
    to: str | None = None
    see: tuple[str, ...] = ()
    owner: str
    file: str
    line: int
    commit: str
    date: str
    pull: int | None = None
    release: str | None = None

    @property
    def gone(self) -> bool:
        return self.what != "added"


def of(
    key: str, script: str, repository: Repository | None = None, *, head: str = "HEAD"
) -> tuple[ArgumentChange, ...]:
    """What happened to one argument of `script` (`open_instruct/finetune.py`) up to `head`.

    Newest first; empty for a name that never was an argument. `repository` is the checkout's; for
    TRL there is the table only: it is installed without a history.
    """
    known = tuple(event for event in events(script) if event.key == key)
    at = table_commit(script.partition("/")[0])
    if repository is None or script.startswith("trl/") or head == at or not key.isidentifier():
        return known
    commit = repository.commit(head)
    if commit is None or commit == at:
        return known
    base = at if repository.commit(at) is not None else None
    later = tuple(find(repository, key, script, base, commit))
    if base is None:
        return later or known
    before = _ancestors(repository, commit)
    cut = repository.is_shallow()
    return later + tuple(event for event in known if event.commit in before or cut)


@cache
def events(script: str) -> tuple[ArgumentChange, ...]:
    """The committed changes of all arguments of `script`, newest first."""
    package = script.partition("/")[0]
    backend = BACKENDS.get(package)
    # TRL's configurations are built on transformers'
    more = backend is not None and "transformers" in backend.PACKAGES
    return _events(package, script) + (_events("transformers", "transformers/training_args.py") if more else ())


def called_now(
    event: ArgumentChange, past: Callable[[str], Sequence[ArgumentChange]], fields: Collection[str]
) -> str | None:
    """The field that a renamed argument is now, followed over later renames; None without one."""
    name, names = event.to, {event.key}
    while name is not None and name not in fields and name not in names:
        names.add(name)
        later = past(name)
        name = later[0].to if later and later[0].gone else None
    return name if name in fields else None


def sentence(event: ArgumentChange) -> str:
    """One event for people: `removed by #1567 (9e8e2187c, 2026-03-30)`."""
    what = f"renamed to `{event.to}`" if event.to else event.what
    short, number = event.commit[:9], f"#{event.pull}" if event.pull else ""
    about = ", ".join(filter(None, [short if number else "", event.release, event.date]))
    where = f" by {number or short} ({about})" if short else f" in {event.release}"
    names = [f"`{name}`" for name in event.see]
    return f"{what}{where}" + (f"; see {' and '.join(names)}" if names else "")


@cache
def _table() -> Mapping[str, Any]:
    raw = files("launcher.upstream.snapshots").joinpath("history.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(raw)
    return data


def table_commit(package: str) -> str:
    """The commit up to which the table holds every change of a package; "" for any other package."""
    return str(_table().get(package, {}).get("commit", ""))


def _events(package: str, script: str) -> tuple[ArgumentChange, ...]:
    """The rows of the table: the scripts (their numbers), what, key, new name or names to see, owner,
    file, line."""
    data = _table().get(package, {"scripts": [], "changes": []})
    if script not in data["scripts"]:
        return ()
    number = str(data["scripts"].index(script))
    return tuple(
        ArgumentChange(
            key=key,
            what=what,
            to=to if isinstance(to, str) else None,
            see=tuple(to) if isinstance(to, list) else (),
            owner=owner,
            file=file,
            line=line,
            **{name: change.get(name) for name in ("commit", "date", "pull", "release")},
        )
        for change in data["changes"]
        for numbers, what, key, to, owner, file, line in change["events"]
        if number in numbers
    )


def find(repository: Repository, key: str, script: str, base: str | None, head: str) -> Iterator[ArgumentChange]:
    """The commits from `base` to `head` that changed whether `key` is defined, newest first.

    Searched are the files that have ever defined an argument of the script. A definition that only
    moves, or changes its type, is no change. What came with the same commit and has the same type and the
    same words, or is alone, is the new name.
    """
    paths = sorted({script, *(event.file for event in events(script))})
    since = [f"^{base}"] if base else []
    log = repository.ask(*_LOG.split(), f"-G^\\s+{key}\\s*:", head, *since, "--", *paths)
    for block in (log or "").split("\x02")[1:]:
        about, _, patch = block.partition("\n")
        commit, date, parents, subject = about.split("\x03")
        changed = list(_definitions(patch))
        own = [one for one in changed if one.key == key]
        # the oldest commit of a history that was cut off only looks as if it added everything
        if len({one.sign for one in own}) != 1 or not (parents or not repository.is_shallow()):
            continue
        gone, before = own[0].sign == "-", {one.key for one in changed if one.sign == "-"}
        came = {one.key for one in changed if one.key not in before and one.type == own[0].type}
        words = {*key.split("_")}
        alike = [name for name in came if len(came) == 1 or (w := {*name.split("_")}) <= words or words <= w]
        to = max(alike, key=len, default=None) if gone else None
        number = _PULL.search(subject)
        yield ArgumentChange(
            key=key,
            what="renamed" if to else "removed" if gone else "added",
            to=to,
            owner=own[0].owner,
            file=own[0].file,
            line=own[0].line,
            commit=commit,
            date=date,
            pull=int(number[1] or number[2]) if number else None,
        )


class _Definition(NamedTuple):
    """A field that a patch takes away (`-`) or adds (`+`)."""

    sign: str
    key: str
    type: str
    owner: str
    file: str
    line: int


def _definitions(patch: str) -> Iterator[_Definition]:
    file, owner, at = "", "", {"-": 0, "+": 0}
    for line in patch.splitlines():
        if line.startswith(("--- a/", "+++ b/")):
            file = line[6:]
        elif found := _HUNK.match(line):
            at, owner = {"-": int(found[1]), "+": int(found[2])}, found[3] or ""
        elif line[:1] in at:
            if known := _DEFINITION.match(line):
                yield _Definition(line[0], known[1], known[2].strip(), owner, file, at[line[0]])
            at[line[0]] += 1


@lru_cache(maxsize=8)
def _ancestors(repository: Repository, commit: str) -> frozenset[str]:
    return frozenset((repository.ask("rev-list", commit, "--") or "").split())
