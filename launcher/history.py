"""What became of an argument that upstream once had: which commit, which pull request, what instead.

The committed table holds every change up to the commit that it was made at. A checkout's own git
history is asked only for what lies beyond it, and never over the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from launcher.git import Repository

TABLE_VERSION = 1
What = Literal["added", "removed", "renamed"]
# TRL's configurations are built on transformers'
_TRAINING_ARGUMENTS = "transformers/training_args.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change of one argument of an entry script.

    `owner` is the dataclass (empty for a plain argparse flag); `file` and `line` its definition, at
    the commit for what was added, before it for what is gone. `to` is the new name of a renamed
    argument; `see` are arguments that took the place of a removed one, or that upstream said to use
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
        """Whether the name is no argument any more after the commit."""
        return self.what != "added"


@dataclass(frozen=True, slots=True)
class Table:
    """The committed facts of one package: the changes of each script up to `commit`, newest first."""

    commit: str = ""
    events: Mapping[str, tuple[Event, ...]] | None = None
    order: tuple[str, ...] = ()
    """Every commit (or release, where no commit is known) that changed something, newest first."""

    def of(self, script: str) -> tuple[Event, ...]:
        """The changes of one script's arguments; none for a script that is not in the table."""
        return (self.events or {}).get(script, ())


@cache
def table(package: str = "open_instruct") -> Table:
    """The committed facts of one package; an empty table for a package that has none."""
    raw = files("launcher.snapshots").joinpath("history.json").read_text(encoding="utf-8")
    return from_json(json.loads(raw).get(package))


def of(
    key: str, script: str, repository: Repository | None = None, *, head: str = "HEAD"
) -> tuple[Event, ...]:
    """What happened to one argument of `script` (`open_instruct/finetune.py`) up to `head`.

    Newest first; empty for a name that never was an argument. `repository` is the checkout's, with
    `script` relative to its `root`. A shallow history says what it holds, and the table the rest.
    For TRL there is the table only: it is installed without a history.
    """
    return tuple(event for event in events(script, repository, head=head) if event.key == key)


def events(
    script: str, repository: Repository | None = None, *, head: str = "HEAD"
) -> tuple[Event, ...]:
    """What happened to all arguments of `script` up to `head`, newest first (see `of`)."""
    package = script.partition("/")[0]
    facts = table(package)
    if package == "trl":
        return facts.of(script) + table("transformers").of(_TRAINING_ARGUMENTS)
    if repository is None or head == facts.commit:
        return facts.of(script)
    commit = head if re.fullmatch(r"[0-9a-f]{40,64}", head) else repository.commit(head)
    if commit is None or commit == facts.commit:
        return facts.of(script)
    return _up_to(repository, script, commit)


def successor(
    key: str, script: str, repository: Repository | None = None, *, head: str = "HEAD"
) -> str | None:
    """What `key` is called at `head`, followed over all its renames; None where it was removed."""
    newest: dict[str, Event] = {}
    for event in events(script, repository, head=head):
        newest.setdefault(event.key, event)
    seen = {key}
    last = newest.get(key)
    while last is not None and last.to is not None and last.to not in seen:
        key = last.to
        seen.add(key)
        last = newest.get(key)
    return key if len(seen) > 1 and (last is None or not last.gone) else None


def called_now(
    event: Event, past: Callable[[str], Sequence[Event]], fields: Collection[str]
) -> str | None:
    """The field that a renamed argument is now, followed over later renames; None without one."""
    name, seen = event.to, {event.key}
    while name is not None and name not in fields and name not in seen:
        seen.add(name)
        later = past(name)
        name = later[0].to if later and later[0].gone else None
    return name if name in fields else None


def formerly(key: str, script: str, fields: Collection[str]) -> Event | None:
    """The rename that made a field what is called `key` at the pin: of an older commit, which has not
    had it yet. Followed over earlier renames; None without one.
    """
    known, seen = events(script), {key}
    while True:
        made = next((one for one in known if one.to in seen and one.key not in seen), None)
        if made is None or made.key in fields:
            return made
        seen.add(made.key)


def sentence(event: Event) -> str:
    """One event for people: `removed by #1567 (9e8e2187c, 2026-03-30)`."""
    what = f"renamed to `{event.to}`" if event.to else event.what
    short = event.commit[:9]
    if not short:
        where = f" in {event.release}"
    elif event.pull:
        where = f" by #{event.pull} ({', '.join(filter(None, [short, event.release, event.date]))})"
    else:
        where = f" by {short} ({', '.join(filter(None, [event.release, event.date]))})"
    names = [f"`{name}`" for name in event.see]
    instead = f"; see {' and '.join(names)}" if names else ""
    return f"{what}{where}{instead}"


@lru_cache(maxsize=64)
def _up_to(repository: Repository, script: str, commit: str) -> tuple[Event, ...]:
    """The changes up to a commit: those that git alone knows, then those of the table."""
    from launcher.lineage import Lineage

    package = script.partition("/")[0]
    facts, lineage = table(package), Lineage(repository, package)
    ancestors = frozenset((repository.ask("rev-list", commit, "--") or "").split())
    if not ancestors:
        return facts.of(script)
    seen = [name for name in facts.order if name in ancestors][:1]
    known = [name for name in [facts.commit] if name and repository.commit(name)] + seen
    walked = tuple(lineage.events(script, commit, known))
    if known:
        if not lineage.has(script, commit):
            return ()
        newest = facts.order[:1] if facts.commit in ancestors else seen
        later = facts.order[: facts.order.index(newest[0])] if newest else facts.order
        return walked + tuple(event for event in facts.of(script) if event.commit not in later)
    taken = lineage.arguments(script, commit)
    if taken is None:
        return walked + facts.of(script)
    return walked + tuple(_agreeing(walked, facts.of(script), taken, repository.is_shallow()))


def _agreeing(
    walked: Sequence[Event], older: Sequence[Event], taken: Collection[str], shallow: bool
) -> Iterator[Event]:
    """What the table can add where it has no commit in common with the history that was walked.

    Nothing that contradicts it: of an argument that is there, the newest event is no removal, and a
    whole history knows best about the arguments that it speaks of.
    """
    oldest = {event.key: event for event in walked}
    agreed: set[str] = set()
    for event in older:
        first = oldest.get(event.key)
        if first is not None and not shallow:
            continue
        was_there = event.key in taken if first is None else first.gone
        if event.key in agreed or event.gone != was_there:
            agreed.add(event.key)
            yield event


# -------------------------------------------------------------------------------- the committed form


def as_json(commit: str, scripts: Mapping[str, Sequence[Event]], order: Sequence[str]) -> str:
    """The facts of one package as JSON text, one event a line; `order` are its commits (or releases),
    newest first.

    An event row is: the scripts (their numbers), what, key, new name or names to see, owner, file,
    line.
    """
    rows: dict[str, dict[str, str]] = {}
    heads: dict[str, dict[str, object]] = {}
    for number, found in enumerate(scripts.values()):
        for event in found:
            row = [event.what, event.key, event.to or list(event.see) or None, event.owner]
            text = json.dumps([*row, event.file, event.line])[1:]
            at = event.commit or event.release or ""
            same = rows.setdefault(at, {})
            same[text] = same.get(text, "") + str(number)
            heads[at] = {
                "commit": event.commit, "date": event.date, "pull": event.pull,
                **({"release": event.release} if event.release else {}),
            }  # fmt: skip
    changes = []
    for name in order:
        if name in rows:
            listed = ",\n".join(f'["{where}", {text}' for text, where in rows[name].items())
            changes.append(f'{json.dumps(heads[name])[:-1]}, "events": [\n{listed}]}}')
    head = f'"commit": {json.dumps(commit)}, "scripts": {json.dumps(list(scripts))}'
    return f'{{{head}, "changes": [\n' + ",\n".join(changes) + "\n]}"


def from_json(data: Mapping[str, Any] | None) -> Table:
    """The inverse of `as_json`, parsed; an empty table for None."""
    if data is None:
        return Table()
    found: dict[str, list[Event]] = {script: [] for script in data["scripts"]}
    names = list(found)
    for change in data["changes"]:
        at = {key: change.get(key) for key in ("commit", "date", "pull", "release")}
        for numbers, what, key, to, owner, file, line in change["events"]:
            event = Event(
                key=key, what=what, owner=owner, file=file, line=line, **at,
                to=to if isinstance(to, str) else None,
                see=tuple(to) if isinstance(to, list) else (),
            )  # fmt: skip
            for number in numbers:
                found[names[int(number)]].append(event)
    order = tuple(change["commit"] or change["release"] for change in data["changes"])
    return Table(data["commit"], {k: tuple(v) for k, v in found.items()}, order)
