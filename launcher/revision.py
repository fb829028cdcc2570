"""One commit of open-instruct as launch sees it: read from git objects, without a checkout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher import facts, upstream
from launcher.backends import BACKENDS, Entry
from launcher.errors import not_ready
from launcher.git import Repository
from launcher.lineage import Lineage
from launcher.pin import PACKAGE, Commits, describe
from launcher.schema import Field, Schema
from launcher.sources import UNKNOWN, Sources
from launcher.upstream import Upstream

BACKEND = BACKENDS["open_instruct"]
_CACHE_MODULE, _CACHE_VERSION = f"{PACKAGE}.dataset_transformation", "DATASET_CACHE_VERSION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One commit: what its entry scripts take and do, by stage.

    `unreadable` holds the reason of every stage that is not in `schemas`; `rough` the arguments of
    those of them whose names, types and defaults can still be told. `cache` is the version that goes
    into the keys of cached datasets, None where the source has none, UNKNOWN where it is not here.
    """

    name: str
    commit: str
    date: str | None
    subject: str | None
    source: Upstream
    schemas: Mapping[str, Schema]
    classes: Mapping[str, tuple[str, ...]]
    unreadable: Mapping[str, str]
    rough: Mapping[str, Mapping[str, Field]]
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
    first, second = (
        _read(commits.repository, commit, name, known)
        for commit, name, known in zip(
            (commits.old, commits.new), commits.names, commits.known, strict=True
        )
    )
    return first, second


def _read(repository: Repository, commit: str, name: str, known: bool) -> Revision:
    if not known:
        return _pin_alone(name)
    listed = _listing(repository, commit)
    # DeepSpeed files that a stage file names may lie in the checkout
    source = replace(upstream.at_commit(repository, commit), root=repository.top())
    told = upstream.snapshot("open_instruct")["externals"]
    schemas: dict[str, Schema] = {}
    classes: dict[str, tuple[str, ...]] = {}
    unreadable: dict[str, str] = {}
    roughly: dict[str, dict[str, Field]] = {}
    for stage, entry in BACKEND.STAGES.items():
        if entry.script not in listed:
            unreadable[stage] = _no_script(entry.script, listed, commit)
            continue
        read = facts.cached(BACKEND, source.packages, told, stage)
        try:
            schemas[stage] = facts.schema_of(read, BACKEND, stage, "source", commit)
            classes[stage] = _classes(read, stage)
        except LookupError as error:
            unreadable[stage] = f"{entry.script} cannot be read: {error.args[0]}"
            roughly[stage] = rough(repository, entry.script, commit)
    date, subject = describe(repository, commit)
    return Revision(
        name=name, commit=commit, date=date, subject=subject, source=source, schemas=schemas,
        classes=classes, unreadable=unreadable, rough=roughly, cache=_cache_version(source),
    )  # fmt: skip


def _pin_alone(name: str) -> Revision:
    """The pin where no repository holds it: its facts are committed, but for the cache's version."""
    told = upstream.snapshot("open_instruct")
    version = str(told["version"])
    schemas = {
        stage: facts.schema_of(told, BACKEND, stage, "snapshot", version)
        for stage in BACKEND.STAGES
    }
    source = Upstream(
        backend="open_instruct", root=None, source="snapshot", asked=False, pin=version,
        version=version,
    )  # fmt: skip
    return Revision(
        name=name, commit=version, date=None, subject=None, source=source, schemas=schemas,
        classes={stage: _classes(told, stage) for stage in schemas}, unreadable={}, rough={},
        cache=UNKNOWN,
    )  # fmt: skip


def _listing(repository: Repository, commit: str) -> frozenset[str]:
    """The Python files of the package at a commit; raises NotReady where git has not all of them."""
    told = repository.ask("ls-tree", "-r", "-z", "--full-tree", commit, "--", f"{PACKAGE}/")
    entries = [entry.partition("\t") for entry in (told or "").split("\0") if entry]
    files = {path: head.split(" ")[2] for head, _, path in entries if path.endswith(".py")}
    whole = told is not None
    if whole and repository.ask("config", "--get-regexp", r"partialclone|promisor") is not None:
        whole = None not in list(repository.blobs(files.values()))
    if not whole:
        raise not_ready(
            "missing-objects",
            f"the files of {commit[:12]} were never fetched into {repository.root}, a "
            "partial clone", f"git -C {repository.root} fetch --refetch --no-filter origin",
            file=str(repository.root),
        )  # fmt: skip
    return frozenset(files)


def _no_script(script: str, listed: frozenset[str], commit: str) -> str:
    family = script.rpartition("/")[2].partition("_")[0].partition(".")[0]
    related = sorted(p for p in listed if p.rpartition("/")[2].startswith(family))
    there = f"; there is {', '.join(related)}" if related else ""
    return f"there is no {script} at {commit[:12]}{there}"


def _classes(told: facts.Facts, stage: str) -> tuple[str, ...]:
    """The dataclasses that a script parses; of the first one, how many base classes have fields."""
    owners = dict.fromkeys(key.partition(".")[0] for key in told["stages"][stage])
    named = [name for _, name in told["classes"][stage]]
    bases = len(owners.keys() - set(named))
    return (f"{named[0]} (with the fields of {bases} more)" if bases else named[0], *named[1:])


def rough(repository: Repository, script: str, commit: str) -> dict[str, Field]:
    """Names, types and defaults of a script of any age, as text."""
    taken = Lineage(repository, PACKAGE).arguments(script, commit) or {}
    return {
        name: Field(
            name=name, type=known.type, kind="opaque", default_text=known.default,
            required=known.default is None, owner=known.owner, where=f"{known.file}:{known.line}",
        )
        for name, known in taken.items()
    }  # fmt: skip


def _cache_version(source: Upstream) -> Any:
    sources = Sources(source.packages)
    try:
        module = sources.module(_CACHE_MODULE)
    except (SyntaxError, ValueError, RecursionError):
        return UNKNOWN
    if module is None or _CACHE_VERSION not in module.constants:
        return None
    return sources.evaluate(module, module.constants[_CACHE_VERSION])
