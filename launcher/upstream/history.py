"""What became of an argument that upstream once had: which commit, which pull, what instead.

The committed table holds every change up to the commit that it was made at. What lies beyond it is
looked up in a checkout's own git history, by the lines that define the argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from launcher.lazy_dataclass import dataclass
from launcher.paths import SNAPSHOTS
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
    argument; `see` are arguments that took the place of a removed one, or that upstream advised to
    use instead, without doing the same. `date` is the commit's (YYYY-MM-DD), `pull` its pull
    request, `release` the first version that holds it, which may be all that is known (an empty
    `commit`).
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


def find_changes(
    key: str, script: str, repository: Repository | None = None, *, head: str = "HEAD"
) -> tuple[ArgumentChange, ...]:
    """What happened to one argument of `script` (`open_instruct/finetune.py`) up to `head`.

    Newest first; empty for a name that never was an argument. `repository` is the checkout's; for
    TRL there is the table only: it is installed without a history.
    """
    listed = tuple(event for event in load_events(script) if event.key == key)
    at = find_table_commit(script.partition("/")[0])
    if repository is None or script.startswith("trl/") or head == at or not key.isidentifier():
        return listed
    commit = repository.commit(head)
    if commit is None or commit == at:
        return listed
    if repository.commit(at) is None:
        return tuple(find(repository, key, script, None, commit)) or listed
    later = tuple(find(repository, key, script, at, commit))
    if repository.is_shallow():
        return later + listed
    before = _list_ancestors(repository, commit)
    return later + tuple(event for event in listed if event.commit in before)


@cache
def load_events(script: str) -> tuple[ArgumentChange, ...]:
    """The committed changes of all arguments of `script`, newest first."""
    package = script.partition("/")[0]
    backend = BACKENDS.get(package)
    changes = _read_events(package, script)
    if backend is not None and "transformers" in backend.PACKAGES:
        # TRL's configurations are built on transformers'
        changes += _read_events("transformers", "transformers/training_args.py")
    return changes


def find_present_name(
    event: ArgumentChange, past: Callable[[str], Sequence[ArgumentChange]], fields: Collection[str]
) -> str | None:
    """The field that a renamed argument is now, followed over later renames; None without one."""
    name = event.to
    passed = {event.key}
    while name is not None and name not in fields:
        if name in passed:
            return None
        passed.add(name)
        later = past(name)
        name = later[0].to if later and later[0].gone else None
    return name


def describe_event(event: ArgumentChange) -> str:
    """One event for people: `removed by #1567 (9e8e2187c, 2026-03-30)`."""
    text = f"renamed to `{event.to}`" if event.to else event.what
    short = event.commit[:9]
    about = [part for part in (event.release, event.date) if part]
    if not short:
        text += f" in {event.release}"
    elif event.pull:
        text += f" by #{event.pull} ({', '.join([short, *about])})"
    else:
        text += f" by {short} ({', '.join(about)})"
    if event.see:
        text += "; see " + " and ".join(f"`{name}`" for name in event.see)
    return text


@cache
def _read_table() -> Mapping[str, Any]:
    raw = (SNAPSHOTS / "history.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(raw)
    return data


def find_table_commit(package: str) -> str:
    """The commit up to which the table holds every change of a package; "" for any other."""
    return str(_read_table().get(package, {}).get("commit", ""))


def _read_events(package: str, script: str) -> tuple[ArgumentChange, ...]:
    """The rows of the table about a script.

    Each has the scripts (their numbers), what, key, new name or names to see, owner, file, line.
    """
    data = _read_table().get(package, {"scripts": [], "changes": []})
    if script not in data["scripts"]:
        return ()
    number = str(data["scripts"].index(script))
    changes = []
    for commit in data["changes"]:
        about = {name: commit.get(name) for name in ("commit", "date", "pull", "release")}
        for numbers, what, key, to, owner, file, line in commit["events"]:
            if number not in numbers:
                continue
            change = ArgumentChange(key=key, what=what, owner=owner, file=file, line=line, **about)
            if isinstance(to, list):
                change = replace(change, see=tuple(to))
            elif to is not None:
                change = replace(change, to=to)
            changes.append(change)
    return tuple(changes)


def find(
    repository: Repository, key: str, script: str, base: str | None, head: str
) -> Iterator[ArgumentChange]:
    """The commits from `base` to `head` that changed whether `key` is defined, newest first.

    Searched are the files that have ever defined an argument of the script. A definition that only
    moves, or changes its type, is no change. What came with the same commit and has the same type
    and the same words, or is alone, is the new name.
    """
    paths = sorted({script, *(event.file for event in load_events(script))})
    since = [f"^{base}"] if base else []
    log = repository.ask(*_LOG.split(), f"-G^\\s+{key}\\s*:", head, *since, "--", *paths)
    for block in (log or "").split("\x02")[1:]:
        about, _, patch = block.partition("\n")
        commit, date, parents, subject = about.split("\x03")
        if not parents and repository.is_shallow():
            # the oldest commit of a history that was cut off looks as if it added everything
            continue
        definitions = list(_parse_definitions(patch))
        own = [definition for definition in definitions if definition.key == key]
        if len({definition.sign for definition in own}) != 1:
            continue
        what: What = "added"
        to = None
        if own[0].sign == "-":
            to = _find_new_name(own[0], definitions)
            what = "removed" if to is None else "renamed"
        pull = _PULL.search(subject)
        yield ArgumentChange(
            key=key,
            what=what,
            to=to,
            owner=own[0].owner,
            file=own[0].file,
            line=own[0].line,
            commit=commit,
            date=date,
            pull=None if pull is None else int(pull[1] or pull[2]),
        )


class _Definition(NamedTuple):
    """A field that a patch takes away (`-`) or adds (`+`)."""

    sign: str
    key: str
    type: str
    owner: str
    file: str
    line: int


def _find_new_name(gone: _Definition, definitions: Sequence[_Definition]) -> str | None:
    """The argument of the same commit that took the place of one that is gone."""
    before = {definition.key for definition in definitions if definition.sign == "-"}
    added = set()
    for definition in definitions:
        if definition.key not in before and definition.type == gone.type:
            added.add(definition.key)
    if len(added) == 1:
        return added.pop()
    words = set(gone.key.split("_"))
    alike = []
    for name in added:
        others = set(name.split("_"))
        if others <= words or words <= others:
            alike.append(name)
    return max(alike, key=len, default=None)


def _parse_definitions(patch: str) -> Iterator[_Definition]:
    file = ""
    owner = ""
    lines: dict[str, int] = {}
    for line in patch.splitlines():
        hunk = _HUNK.match(line)
        if line.startswith(("--- a/", "+++ b/")):
            file = line[6:]
        elif hunk is not None:
            lines = {"-": int(hunk[1]), "+": int(hunk[2])}
            owner = hunk[3] or ""
        elif line[:1] in lines:
            sign = line[0]
            definition = _DEFINITION.match(line)
            if definition is not None:
                yield _Definition(
                    sign, definition[1], definition[2].strip(), owner, file, lines[sign]
                )
            lines[sign] += 1


@lru_cache(maxsize=8)
def _list_ancestors(repository: Repository, commit: str) -> frozenset[str]:
    return frozenset((repository.ask("rev-list", commit, "--") or "").split())
