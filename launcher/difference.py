"""What lies between two commits of open-instruct: arguments, who reads them, refusals, dataset cache.

Commits are read from git objects, without a checkout, and compared by what things mean, not by how
they are spelt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from launcher import conditions, facts, history, upstream
from launcher.backends import BACKENDS, Entry
from launcher.errors import not_ready
from launcher.git import Repository
from launcher.noops import condition_of
from launcher.pin import PACKAGE, Commits, describe
from launcher.schema import Field, Read, Refusal, Schema
from launcher.sources import UNKNOWN, Sources
from launcher.upstream import Upstream

BACKEND = BACKENDS["open_instruct"]
_CACHE_MODULE, _CACHE_VERSION = f"{PACKAGE}.dataset_transformation", "DATASET_CACHE_VERSION"

What = Literal[
    "added", "removed", "renamed", "type", "default", "required", "unread", "read", "conditions"
]
Conditions = frozenset[frozenset[str]]


# --- one commit -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One commit: what its entry scripts take and do, by stage.

    `unreadable` holds the reason of every stage that is not in `schemas`. `cache` is the version that
    goes into the keys of cached datasets, None where the source has none, UNKNOWN where only running
    it would tell.
    """

    name: str
    commit: str
    date: str | None
    subject: str | None
    source: Upstream
    schemas: Mapping[str, Schema]
    unreadable: Mapping[str, str]
    cache: Any

    @property
    def title(self) -> str:
        """Commit, date and subject, for people."""
        about = ", ".join(part for part in (self.date, self.subject) if part)
        return f"{self.commit[:12]} ({about})" if about else self.commit[:12]

    def entry(self, stage: str) -> Entry:
        """The description of an entry script in the names of this commit."""
        known = self.schemas.get(stage)
        return BACKEND.STAGES[stage].at(known.fields if known else {})

    def as_json(self) -> dict[str, object]:
        """For the envelope."""
        return {
            "name": self.name, "commit": self.commit, "date": self.date, "subject": self.subject,
            "pin": self.commit == BACKEND.PIN, "unreadable": dict(self.unreadable),
            "dataset_cache_version": None if self.cache is UNKNOWN else self.cache,
        }  # fmt: skip


def read_revisions(commits: Commits) -> tuple[Revision, Revision]:
    """Both commits, read; raises NotReady where git lacks their files (a partial clone)."""
    old, new = commits.names
    repository = commits.repository
    return _read(repository, commits.old, old), _read(repository, commits.new, new)


def _read(repository: Repository, commit: str, name: str) -> Revision:
    _check_objects(repository, commit)
    # DeepSpeed files that a stage file names may lie in the checkout
    source = replace(upstream.at_commit(repository, commit), root=repository.top())
    externals = upstream.snapshot("open_instruct")["externals"]
    schemas: dict[str, Schema] = {}
    unreadable: dict[str, str] = {}
    for stage, entry in BACKEND.STAGES.items():
        read = facts.cached(BACKEND, source.packages, externals, stage)
        try:
            schemas[stage] = facts.schema_of(read, BACKEND, stage, "source", commit)
        except LookupError as error:
            unreadable[stage] = f"{entry.script} cannot be read: {error.args[0]}"
    date, subject = describe(repository, commit)
    return Revision(
        name=name, commit=commit, date=date, subject=subject, source=source, schemas=schemas,
        unreadable=unreadable, cache=_cache_version(source),
    )  # fmt: skip


def _check_objects(repository: Repository, commit: str) -> None:
    """Files that were never fetched must not look like absent ones."""
    if repository.ask("config", "--get-regexp", r"partialclone|promisor") is None:
        return
    listed = repository.ask("ls-tree", "-r", "--full-tree", commit, "--", f"{PACKAGE}/") or ""
    files = [line.split()[2] for line in listed.splitlines() if line.endswith(".py")]
    if None in list(repository.blobs(files)):
        raise not_ready(
            "missing-objects",
            f"the files of {commit[:12]} were never fetched into {repository.root}, a "
            "partial clone", f"git -C {repository.root} fetch --refetch --no-filter origin",
            file=str(repository.root),
        )  # fmt: skip


def _cache_version(source: Upstream) -> Any:
    sources = Sources(source.packages)
    try:
        module = sources.module(_CACHE_MODULE)
    except (SyntaxError, ValueError, RecursionError):
        return UNKNOWN
    if module is None or _CACHE_VERSION not in module.constants:
        return None
    return sources.evaluate(module, module.constants[_CACHE_VERSION])


# --- what differs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One thing that changed about one argument.

    `before` and `after` are what it is about, as text; `old` and `new` the `file:line` of the
    definitions (of the first reads where reads changed). `to` is the new name of a renamed argument,
    `near` names to look at instead of one that is gone. `why` is what history says.
    """

    name: str
    what: What
    before: str | None = None
    after: str | None = None
    old: str = ""
    new: str = ""
    to: str | None = None
    near: tuple[str, ...] = ()
    why: str | None = None

    def as_json(self) -> dict[str, object]:
        """Every fact of it."""
        places = {"old": self.old or None, "new": self.new or None}
        return {**asdict(self), **places, "near": list(self.near)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintChange:
    """A `raise` that arguments alone lead to: new, or gone."""

    what: Literal["added", "removed"]
    refusal: Refusal

    def as_json(self) -> dict[str, object]:
        """The refusal on the side that has it."""
        known = self.refusal
        refusal = {
            "when": list(known.when), "error": known.error, "where": known.where,
            "parsing": known.parsing,
        }  # fmt: skip
        return {
            "what": self.what,
            "before": refusal if self.what == "removed" else None,
            "after": refusal if self.what == "added" else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """What changed about one entry script; `reads` is whether what it reads could be compared."""

    stage: str
    script: str
    fields: tuple[FieldChange, ...] = ()
    constraints: tuple[ConstraintChange, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    reads: bool = True

    @property
    def empty(self) -> bool:
        """Whether nothing at all changed."""
        return not (self.fields or self.constraints or self.unreadable)

    def as_json(self) -> dict[str, object]:
        """Everything."""
        return {
            "stage": self.stage, "script": self.script, "unreadable": dict(self.unreadable),
            "reads_compared": self.reads,
            "fields": [change.as_json() for change in self.fields],
            "constraints": [change.as_json() for change in self.constraints],
        }  # fmt: skip


def compare(old: Revision, new: Revision, stage: str, repository: Repository) -> StageDifference:
    """What changed about the entry script of a stage."""
    script = BACKEND.STAGES[stage].script
    first, second = old.schemas.get(stage), new.schemas.get(stage)
    if first is None or second is None:
        sides = (("old", old), ("new", new))
        unreadable = {s: r.unreadable[stage] for s, r in sides if stage in r.unreadable}
        return StageDifference(stage=stage, script=script, unreadable=unreadable, reads=False)
    past = _Past(repository, script, old.commit, new.commit)
    found = tuple(_fields(first.fields, second.fields, past))
    renames = {c.name: c.to for c in found if c.what == "renamed" and c.to}
    followed = bool(first.path.reads) and bool(second.path.reads)
    if followed:
        found += tuple(_reads(first, second, (old.entry(stage), new.entry(stage)), renames))
    refusals = first.path.refusals, second.path.refusals
    return StageDifference(
        stage=stage, script=script, fields=found, reads=followed,
        constraints=tuple(_constraints(*refusals, renames)) if followed else (),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Past:
    """What history says of a script's arguments between two commits, whichever of them is older."""

    repository: Repository
    script: str
    old: str
    new: str

    def at_old(self, key: str) -> Sequence[history.Event]:
        return history.of(key, self.script, self.repository, head=self.old)

    def at_new(self, key: str) -> Sequence[history.Event]:
        return history.of(key, self.script, self.repository, head=self.new)

    def renames(self, gone: Sequence[str], added: Sequence[str]) -> dict[str, str]:
        """Old name -> new name; where NEW is the older commit, as it was renamed later."""
        found = {}
        for name in gone:
            events = self.at_new(name)
            if events and (to := history.called_now(events[0], self.at_new, added)) is not None:
                found[name] = to
        for name in added:
            events = self.at_old(name)
            if events and (to := history.called_now(events[0], self.at_old, gone)) is not None:
                found.setdefault(to, name)
        return found

    def why(self, key: str, *, gone: bool) -> str | None:
        """How a name went away or came, for people; None where NEW is the older commit."""
        found = self.at_new(key)
        return history.sentence(found[0]) if found and found[0].gone == gone else None


def _fields(
    old: Mapping[str, Field], new: Mapping[str, Field], past: _Past
) -> Iterator[FieldChange]:
    gone = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    renames = past.renames(gone, added)
    for name in gone:
        to, events = renames.get(name), past.at_new(name)
        yield FieldChange(
            name=name, what="renamed" if to else "removed", to=to, old=old[name].where,
            before=old[name].type, after=None if to is None else new[to].type,
            new=new[to].where if to else "", why=past.why(name, gone=True),
            near=() if to else tuple(n for e in events[:1] for n in e.see if n in new),
        )  # fmt: skip
    for name in (name for name in added if name not in renames.values()):
        known = new[name]
        yield FieldChange(
            name=name, what="added", after=f"{known.type} = {shown_default(known)}",
            new=known.where, why=past.why(name, gone=False),
        )  # fmt: skip
    for name, known in old.items():
        to = name if name in new else renames.get(name)
        if to is not None:
            yield from _altered(known, new[to])


def _altered(old: Field, new: Field) -> Iterator[FieldChange]:
    to = new.name if new.name != old.name else None
    change = FieldChange(name=old.name, what="type", old=old.where, new=new.where, to=to)
    if _takes(old) != _takes(new):
        yield replace(change, before=_shown_type(old), after=_shown_type(new))
    if new.required and not old.required:
        yield replace(change, what="required", before=shown_default(old), after="required")
    elif not _same_default(old, new):
        before, after = shown_default(old), shown_default(new)
        yield replace(change, what="default", before=before, after=after)


def _takes(known: Field) -> tuple[object, ...]:
    """What of a type decides which words a flag takes."""
    kind = known.type if known.kind == "opaque" else known.kind
    return kind, sorted(map(str, known.choices)), known.many, known.bare


def _shown_type(known: Field) -> str:
    return f"{known.type} ({', '.join(map(str, known.choices))})" if known.choices else known.type


def _same_default(old: Field, new: Field) -> bool:
    if old.default_text is not None or new.default_text is not None:
        return old.default_text == new.default_text
    same_kind = isinstance(old.default, bool) == isinstance(new.default, bool)
    return old.required == new.required and same_kind and bool(old.default == new.default)


def shown_default(known: Field) -> str:
    """A default for people: as YAML would have it, or as the source spells it."""
    if known.required:
        return "required"
    if known.default_text is not None:
        return known.default_text
    if known.default is None or isinstance(known.default, bool):
        return {None: "none", True: "true", False: "false"}[known.default]
    return str(known.default)


# --- reads and refusals ---------------------------------------------------------------------------


def _reads(
    old: Schema, new: Schema, entries: tuple[Entry, Entry], renames: Mapping[str, str]
) -> Iterator[FieldChange]:
    for name, known in old.fields.items():
        to = name if name in new.fields else renames.get(name)
        if to is None or name in entries[0].acts or to in entries[1].acts:
            continue
        first, second = old.path.reads.get(name), new.path.reads.get(to)
        if first is None or second is None:
            continue
        before = _alternatives(first, entries[0], renames)
        after = _alternatives(second, entries[1], {})
        if before == after:
            continue
        what: What = "conditions" if before and after else "read" if after else "unread"
        yield FieldChange(
            name=name, what=what, to=to if to != name else None, before=shown_reads(before),
            after=shown_reads(after), old=first[0].where if first else known.where,
            new=second[0].where if second else new.fields[to].where,
        )  # fmt: skip


def _alternatives(reads: Sequence[Read], entry: Entry, renames: Mapping[str, str]) -> Conditions:
    """The alternatives under which an argument is read: none at all, or `{{}}` for always.

    `a and b or a and not b` is `a`.
    """
    known = {frozenset(_renamed(c, renames) for c in condition_of(r, entry)) for r in reads}
    while pair := next(((a, b) for a in known for b in known if _opposed(a, b)), None):
        known = known - {*pair} | {pair[0] & pair[1]}
    return frozenset(a for a in known if not any(b < a for b in known))


def _opposed(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether two alternatives differ in one condition alone, which is false in the other."""
    rest = one - other
    return len(rest) == 1 and {conditions.negated(*rest)} == other - one


def _renamed(text: str, renames: Mapping[str, str]) -> str:
    """A condition in the new names."""
    for name in conditions.names(text) & renames.keys():
        text = re.sub(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)", renames[name], text)
    return text


def shown_reads(alternatives: Conditions) -> str:
    """The conditions of reads, for people."""
    if not alternatives:
        return "nowhere"
    if frozenset() in alternatives:
        return "always"
    return " or ".join(sorted(" and ".join(sorted(a)) for a in alternatives))


def _constraints(
    old: Iterable[Refusal], new: Iterable[Refusal], renames: Mapping[str, str]
) -> Iterator[ConstraintChange]:
    def condition(refusal: Refusal, renames: Mapping[str, str]) -> object:
        return frozenset(_renamed(c, renames) for c in refusal.when), refusal.parsing

    first = {condition(refusal, renames): refusal for refusal in old}
    second = {condition(refusal, {}): refusal for refusal in new}
    for key, refusal in first.items():
        if key not in second:
            yield ConstraintChange(what="removed", refusal=refusal)
    for key, refusal in second.items():
        if key not in first:
            yield ConstraintChange(what="added", refusal=refusal)
