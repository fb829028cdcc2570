"""What a person has to look at after a move: rules whose lines changed, citations that are gone."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.paths import PROJECT
from launcher.pin.cited import PACKAGE, Citing, find_stale, list_commits_of_rules, list_rules
from launcher.upstream import citations
from launcher.upstream.citations import RuleStanding, SourceFiles, Table

_CONTEXT = 2


@dataclass(frozen=True, slots=True, order=True)
class Unconfirmed:
    """A rule that waits to be confirmed: its name, and where it stands in launch (`file:line`)."""

    name: str
    where: str


@dataclass(frozen=True, slots=True)
class Changed:
    """A function (or a statement outside any) that rules cite and that changed.

    `old` and `new` are its texts without docstrings and log calls; `new` is "" where it is gone.
    `lines` are the citations: each with its line in the old and in the new commit, None where it is
    gone.
    """

    name: str
    rules: tuple[Unconfirmed, ...]
    lines: tuple[tuple[str, int | None, int | None], ...]
    old: str
    new: str

    def diff(self) -> list[str]:
        """What differs between the two texts, as `diff -u` shows it."""
        old = self.old.splitlines()
        new = self.new.splitlines()
        # without the names of files
        return list(difflib.unified_diff(old, new, n=_CONTEXT, lineterm=""))[2:]


@dataclass(frozen=True, slots=True)
class Stale:
    """A citation that the new commit lacks: who cites it, and its line before and perhaps now."""

    where: str
    citation: str
    text: str
    now: str | None


@dataclass(frozen=True, slots=True)
class Review:
    """All that waits for a person after a move from one commit to another."""

    old: str
    new: str
    changed: tuple[Changed, ...]
    stale: tuple[Stale, ...]

    @property
    def rules(self) -> dict[Unconfirmed, list[str]]:
        """The rules that wait to be confirmed, each with the functions of its that changed."""
        functions: dict[Unconfirmed, list[str]] = {}
        for function in self.changed:
            for rule in function.rules:
                functions.setdefault(rule, []).append(function.name)
        return dict(sorted(functions.items()))

    def as_json(self) -> dict[str, object]:
        rules = [{**asdict(rule), "changed": functions} for rule, functions in self.rules.items()]
        return {**asdict(self), "rules": rules}

    def lines(self) -> Iterator[str]:
        for function in self.changed:
            yield ""
            yield function.name
            for rule in function.rules:
                yield f"  {rule.where}: {rule.name}"
            for citation, before, after in function.lines:
                yield f"  {citation}: line {before or '-'} -> {after or 'gone'}"
            for row in function.diff():
                yield f"  {row}".rstrip()
        for line in self.stale:
            yield ""
            yield f"{line.where}: {line.citation} is gone"
            yield f"  it was: {line.text}"
            if line.now is not None:
                yield f"  it may be {line.now} now"


def review(
    cited: Sequence[Citing],
    trees: Mapping[str, SourceFiles],
    commits: tuple[str, str],
    later: Sequence[str] = (),
) -> Review:
    """What differs for rules between where they were confirmed and the second of `commits`.

    A citation is gone where neither that commit nor one of the known commits `later` than it has
    it. `trees` are open-instruct's files by full commit: of both commits, and of every one that
    confirms a rule.
    """
    old, new = commits
    confirmed = _read_confirmed_tables(cited, trees)
    standing = RuleStanding("", confirmed, trees[new].place)
    # by the function that changed and the commit where its rules were confirmed
    waiting: dict[tuple[str, str], list[tuple[Unconfirmed, str]]] = {}
    for rule in list_rules(PACKAGE):
        release, differing = standing.nearest(rule)
        commit = release.rpartition(" ")[2]
        for citation in differing:
            function = _name_function(citation, [trees[commit], trees[new]])
            pairs = waiting.setdefault((function, commit), [])
            pairs.append((_describe_rule(rule, cited), citation))
    changed = []
    for (name, commit), pairs in sorted(waiting.items()):
        changed.append(_describe_change(name, pairs, trees[commit], trees[new]))
    names = sorted({citing.citation for citing in cited})
    tables = [citations.build_table(trees[commit].trees, names) for commit in (new, *later)]
    lost = []
    for citing in find_stale(cited, tables, new):
        lost.append(_describe_stale(citing, trees[old], trees[new]))
    return Review(old, new, tuple(changed), tuple(lost))


def _read_confirmed_tables(
    cited: Sequence[Citing], trees: Mapping[str, SourceFiles]
) -> dict[str, Table]:
    names = [citing.citation for citing in cited]
    tables: dict[str, Table] = {}
    for name in list_commits_of_rules():
        commit = next(commit for commit in trees if commit.startswith(name))
        tables[f"{PACKAGE} {commit}"] = citations.build_table(trees[commit].trees, names)
    return tables


def _describe_rule(rule: Callable[..., object], cited: Sequence[Citing]) -> Unconfirmed:
    about = getattr(rule, "about", None)
    if about is None:
        code = rule.__code__
        file = Path(code.co_filename).relative_to(PROJECT).as_posix()
        return Unconfirmed(rule.__name__, f"{file}:{code.co_firstlineno}")
    # made by `check`: it stands where its citation is written
    named = set(citations.list_of_rule(rule))
    places = [citing for citing in cited if citing.citation in named]
    where = next(citing.where for citing in places if "/rules/" in citing.file)
    return Unconfirmed(about, where)


def _name_function(citation: str, sources: Sequence[SourceFiles]) -> str:
    """What encloses a cited line, as the list heads it: the function, else the citation itself."""
    named = citations.parse(citation)
    for source in sources:
        cited = source.find(named)
        if cited is not None:
            file, line = cited
            return f"{named.label}::{named.symbol}" if file.is_function(line) else citation
    return citation


def _describe_change(
    name: str, pairs: Sequence[tuple[Unconfirmed, str]], old: SourceFiles, new: SourceFiles
) -> Changed:
    names = sorted({citation for _, citation in pairs})
    rules = sorted({rule for rule, _ in pairs})
    lines = []
    for citation in names:
        lines.append((citation, _find_line(old, citation), _find_line(new, citation)))
    return Changed(
        name,
        tuple(rules),
        tuple(lines),
        _read_enclosing_text(old, names),
        _read_enclosing_text(new, names),
    )


def _find_line(source: SourceFiles, citation: str) -> int | None:
    place = source.place(citation)
    return None if place is None else place.line


def _read_enclosing_text(source: SourceFiles, names: Sequence[str]) -> str:
    """What encloses the first of some citations of one function that is there.

    If none is, the function by its name.
    """
    for citation in names:
        named = citations.parse(citation)
        cited = source.find(named)
        if cited is not None:
            file, line = cited
            return file.enclosing(line)
        if not named.symbol:
            continue
        defined = source.find(citations.Citation(named.label, named.symbol))
        if defined is not None:
            file, line = defined
            if file.is_function(line):
                return file.enclosing(line)
    return ""


def _describe_stale(citing: Citing, old: SourceFiles, new: SourceFiles) -> Stale:
    named = citations.parse(citing.citation)
    before = old.find(named)
    if before is None:
        return Stale(citing.where, citing.citation, "", None)
    file, line = before
    text = file.lines[line - 1].strip()
    now = None
    after = new.file(named.label)
    if after is not None:
        nearest = _find_nearest_line(file.lines, after.lines, line)
        if nearest is not None:
            now = f"{named.label}:{nearest}: {after.lines[nearest - 1].strip()}"
    return Stale(citing.where, citing.citation, text, now)


def _find_nearest_line(old: Sequence[str], new: Sequence[str], line: int) -> int | None:
    """The line most like a line, of those that replaced the text around it."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, first, last, begin, end in matcher.get_opcodes():
        if not first < line <= last:
            continue
        if tag == "equal":
            return begin + line - first
        replaced_by = new[begin:end]
        alike = difflib.get_close_matches(old[line - 1], replaced_by, n=1, cutoff=0.5)
        if not alike:
            return None
        return begin + 1 + replaced_by.index(alike[0])
    return None
