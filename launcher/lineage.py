"""How the arguments of an entry script changed, commit by commit, read from git objects.

A field that moves between classes or files is still an argument: what counts is what the script's
parser takes. Commits are followed along first parents, as pull requests are merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.definitions import Arguments, Source, Taken, read_source
from launcher.git import Repository
from launcher.history import Event
from launcher.renames import Change

_PULL = re.compile(r"\(#(\d{1,9})\)\s*$|^Merge pull request #(\d{1,9})\b")
# the name of an object that is not there, in SHA-1 and SHA-256 repositories
_NOTHING = frozenset({"0" * 40, "0" * 64})


def pull_request(subject: str) -> int | None:
    """The number that a squashed or merged pull request leaves in the subject line."""
    found = _PULL.search(subject)
    return int(found[1] or found[2]) if found else None


def described(
    change: Change,
    *,
    commit: str,
    date: str = "",
    pull: int | None = None,
    release: str | None = None,
) -> Iterator[Event]:
    """What a commit (or a release) did to the arguments, one event each."""
    new_names = change.renames()
    for key in [*change.gone, *change.new]:
        known = change.before[key] if key in change.before else change.after[key]
        to = new_names.get(key)
        removed = key in change.before and to is None
        yield Event(
            key=key, what="removed" if removed else "renamed" if to else "added", to=to,
            see=change.see(key, set(new_names.values())) if removed else (),
            owner=known.owner, file=known.file, line=known.line,
            commit=commit, date=date, pull=pull, release=release,
        )  # fmt: skip


@dataclass(slots=True)
class _Reader:
    """The files of a package at any commit: `state` maps a path to its object, texts are kept."""

    repository: Repository
    texts: dict[str, bytes | None] = field(default_factory=dict)
    sources: dict[tuple[str, str, bool], Source | None] = field(default_factory=dict)
    versions: dict[str, set[str]] = field(default_factory=dict)
    """All objects that a path is known to have had: they are read together, by one process."""

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """The contents of objects; one process for all that are new."""
        wanted = sorted(set(names) - self.texts.keys())
        if wanted:
            self.texts.update(zip(wanted, self.repository.blobs(wanted), strict=True))
            if len(wanted) > 1 and not any(self.texts[name] for name in wanted):
                # git gives up on all of them where a partial clone lacks one
                self.texts[names[0]] = next(self.repository.blobs(names[:1]))
        return [self.texts[name] for name in names]

    def source(self, path: str, name: str, *, entry: bool) -> Source | None:
        """The file `path` as the object `name`, parsed once."""
        key = (path, name, entry)
        if key not in self.sources:
            if name not in self.texts:
                self.read([name, *self.versions.get(path, ())])
            raw = self.texts[name]
            self.sources[key] = None if raw is None else read_source(raw, path, entry=entry)
        return self.sources[key]


@dataclass(frozen=True, slots=True)
class _Commit:
    """One commit of a line and what it did to the package's files: path -> (before, after)."""

    name: str
    parents: tuple[str, ...]
    date: str
    subject: str
    files: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class Lineage:
    """The changes of entry scripts' arguments in one repository; what was read is kept.

    `further` are arguments that classes of other packages add, which are not read here.
    """

    repository: Repository
    package: str
    further: frozenset[str] = frozenset()
    _reader: _Reader = field(init=False)
    _shallow: bool | None = None

    def __post_init__(self) -> None:
        self._reader = _Reader(self.repository)

    def has(self, script: str, commit: str) -> bool:
        """Whether there is such a file at a commit."""
        return bool(self.repository.ask("ls-tree", commit, "--", script))

    def arguments(self, script: str, commit: str) -> Arguments | None:
        """What the script's parser takes at a commit; None where that cannot be told."""
        return self._taken(self._state(commit)).of(script)

    def events(self, script: str, tip: str, known: Sequence[str] = ()) -> Iterator[Event]:
        """Every change up to the commit `tip`, newest first, without what `known` commits hold."""
        state = self._state(tip)
        if script not in state:
            return
        line = self._line(tip, known)
        for commit in line:
            for path, names in commit.files.items():
                self._reader.versions.setdefault(path, set()).update(set(names) - _NOTHING)
        at = self._taken(state)
        after = at.of(script)
        unread: _Commit | None = None
        for commit in line:
            _undo(state, commit)
            if not commit.files.keys() & at.seen:
                continue
            if script not in state:
                if self._is_cut(commit):
                    return
                former = self._former(script, after or {}, state, commit)
                if former is None:
                    yield from self._changed(script, {}, after or {}, unread or commit, known)
                    return
                script = former
            at = self._taken(state)
            before = at.of(script)
            if before is None:
                # the next commit that can be read has to answer for what this one did
                unread = unread or commit
                continue
            if after is not None and before.keys() != after.keys():
                yield from self._changed(script, before, after, unread or commit, known)
            after, unread = before, None

    def _changed(
        self,
        script: str,
        before: Arguments,
        after: Arguments,
        commit: _Commit,
        known: Sequence[str],
    ) -> Iterator[Event]:
        """What a commit changed; a merge that is no pull request passes on what it brought in."""
        events = self._compared(before, after, commit)
        if len(commit.parents) < 2 or pull_request(commit.subject) is not None:
            yield from events
            return
        brought: dict[tuple[str, bool], Event] = {}
        covered: set[str] = set()
        for parent in commit.parents[1:]:
            there = self.arguments(script, parent)
            if there is None:
                continue
            theirs = {e.key for e in events if (e.key in there) == (e.key in after)}
            if self._holds(known, parent):
                covered |= theirs
            for event in self.events(script, parent, [commit.parents[0], *known]):
                if event.key in theirs:
                    brought.setdefault((event.key, event.what == "added"), event)
        for event in events:
            found = brought.get((event.key, event.what == "added"))
            if found is not None or event.key not in covered:
                yield found or event

    def _compared(self, before: Arguments, after: Arguments, commit: _Commit) -> list[Event]:
        change = Change(before, after, further=self.further)
        if change.gone and change.new:
            gone, new = self._lines(commit)
            change = replace(change, lines_gone=gone - new, lines_new=new - gone)
        pull = pull_request(commit.subject)
        return list(described(change, commit=commit.name, date=commit.date, pull=pull))

    def _lines(self, commit: _Commit) -> tuple[frozenset[str], frozenset[str]]:
        """All lines of the files that a commit touched, as they were before and after it."""
        sides = []
        for names in zip(*commit.files.values(), strict=True):
            wanted = sorted(set(names) - _NOTHING)
            texts = [raw.decode("utf-8", "replace") for raw in self._reader.read(wanted) if raw]
            sides.append(frozenset(line.strip() for text in texts for line in text.splitlines()))
        return sides[0], sides[1]

    def _former(
        self, script: str, after: Arguments, state: Mapping[str, str], commit: _Commit
    ) -> str | None:
        """The script that a new one goes on from: it took most of the same arguments, and went away
        with the same commit or has a name of the same family (dpo_tune.py, dpo_tune_cache.py)."""
        folder, _, own = script.rpartition("/")
        best, most = None, 0.5
        for path in state:
            place, _, name = path.rpartition("/")
            related = place == folder and _family(name) == _family(own)
            if not related and commit.files.get(path, ("", ""))[1] not in _NOTHING:
                continue
            theirs = self._taken(state).of(path) or {}
            share = len(theirs.keys() & after.keys()) / max(1, len(theirs.keys() | after.keys()))
            if share > most:
                best, most = path, share
        return best

    def _holds(self, known: Sequence[str], commit: str) -> bool:
        return any(
            self.repository.ask("merge-base", "--is-ancestor", commit, name) is not None
            for name in known
        )

    def _taken(self, state: Mapping[str, str]) -> Taken:
        return Taken(state, lambda path, entry: self._reader.source(path, state[path], entry=entry))

    def _state(self, commit: str) -> dict[str, str]:
        """Path -> object of every Python file of the package, relative to the repository's `root`."""
        told = self.repository.ask("ls-tree", "-r", "-z", commit, "--", f"{self.package}/") or ""
        state = {}
        for entry in told.split("\0"):
            head, _, path = entry.partition("\t")
            if path.endswith(".py"):
                state[path] = head.split(" ")[2]
        return state

    def _line(self, tip: str, known: Sequence[str]) -> list[_Commit]:
        """The commits from `tip` along first parents that touch the package, newest first."""
        told = self.repository.ask(
            "-c", "log.diffMerges=separate", "log", "--first-parent", "-m", "--root",
            "--raw", "-z", "--no-renames", "--no-abbrev", "--no-color",
            "--no-ext-diff", "--no-show-signature", "--relative",
            "--format=%x02%H %P%x03%cs%x03%s", tip, *(f"^{name}" for name in known),
            "--", f"{self.package}/*.py",
        )  # fmt: skip
        return list(_parsed_log(told or ""))

    def _is_cut(self, commit: _Commit) -> bool:
        """Whether a commit only looks like the first one, because older ones were not cloned."""
        if commit.parents:
            return False
        if self._shallow is None:
            self._shallow = self.repository.is_shallow()
        return self._shallow


def _undo(state: dict[str, str], commit: _Commit) -> None:
    """Take the files back to what they were before the commit."""
    for path, (old, _) in commit.files.items():
        if old in _NOTHING:
            state.pop(path, None)
        else:
            state[path] = old


def _family(name: str) -> str:
    """`dpo` of dpo_tune_cache.py."""
    return name.partition(".")[0].partition("_")[0]


def _parsed_log(told: str) -> Iterator[_Commit]:
    commit: _Commit | None = None
    words = iter(told.split("\0"))
    for word in words:
        word = word.lstrip("\n")
        if word.startswith("\x02"):
            if commit is not None:
                yield commit
            names, date, subject = word[1:].rstrip("\n").split("\x03", 2)
            name, *parents = names.split()
            commit = _Commit(name, tuple(parents), date, subject)
        elif word.startswith(":") and commit is not None:
            old, new = word.split(" ")[2:4]
            commit.files[next(words, "")] = (old, new)
    if commit is not None:
        yield commit
