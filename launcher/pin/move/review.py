"""What a person has to look at after a move of the pin: rules whose lines changed, and citations
that are gone.
"""

import difflib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.paths import PROJECT
from launcher.pin.cited import PACKAGE, Citing, commits_of_rules, rules_of, stale
from launcher.upstream import citations
from launcher.upstream.citations import CitedPlace, RuleStanding, SourceFiles, Table

_CONTEXT = 2
_LEAST_WIDTH = 40


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

    def side_by_side(self, columns: int) -> Iterator[str]:
        """What differs between the two texts, the old one on the left."""
        width = max(_LEAST_WIDTH, (columns - 3) // 2)
        old = list(_wrapped(self.old, width))
        new = list(_wrapped(self.new, width))
        groups = difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(
            _CONTEXT
        )
        for number, group in enumerate(groups):
            if number:
                yield f"{'...':<{width}} | ..."
            for _, first, last, begin, end in group:
                left = old[first:last]
                right = new[begin:end]
                for row in range(max(len(left), len(right))):
                    one_side = left[row] if row < len(left) else ""
                    other_side = right[row] if row < len(right) else ""
                    mark = " " if one_side == other_side else "|"
                    yield f"{one_side:<{width}} {mark} {other_side}".rstrip()


@dataclass(frozen=True, slots=True)
class Stale:
    """A citation that the new commit lacks: who cites it, what the line was, and where it may be
    now.
    """

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

    def lines(self, columns: int) -> Iterator[str]:
        for function in self.changed:
            yield ""
            yield function.name
            yield from (f"  {rule.where}: {rule.name}" for rule in function.rules)
            for citation, before, after in function.lines:
                yield f"  {citation}: line {before or '-'} -> {after or 'gone'}"
            yield from (f"  {row}" for row in function.side_by_side(columns - 2))
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
    """What differs for rules between the commits at which they were confirmed and the second of
    `commits`.

    A citation is gone where neither that commit nor one of the known commits `later` than it has
    it. `trees` are open-instruct's files by full commit: of both commits, and of every one that
    confirms a rule.
    """
    old, new = commits
    confirmed = _confirmed(cited, trees)
    standing = RuleStanding("", confirmed, trees[new].place)
    waiting: dict[tuple[str, str], list[tuple[Unconfirmed, str]]] = {}
    for rule in rules_of(PACKAGE):
        release, differing = standing.nearest(rule)
        commit = release.rpartition(" ")[2]
        for citation in differing:
            key = (_function(citation, [trees[commit], trees[new]]), commit)
            waiting.setdefault(key, []).append((_unconfirmed(rule, cited), citation))
    changed = []
    for (name, commit), pairs in sorted(waiting.items()):
        changed.append(_changed(name, pairs, trees[commit], trees[new]))
    names = sorted({citing.citation for citing in cited})
    tables = [citations.table(trees[commit].trees, names) for commit in (new, *later)]
    lost = [_stale(citing, trees[old], trees[new]) for citing in stale(cited, tables, new)]
    return Review(old, new, tuple(changed), tuple(lost))


def _confirmed(cited: Sequence[Citing], trees: Mapping[str, SourceFiles]) -> dict[str, Table]:
    names = [citing.citation for citing in cited]
    tables: dict[str, Table] = {}
    for name in commits_of_rules():
        commit = next(commit for commit in trees if commit.startswith(name))
        tables[f"{PACKAGE} {commit}"] = citations.table(trees[commit].trees, names)
    return tables


def _unconfirmed(rule: Callable[..., object], cited: Sequence[Citing]) -> Unconfirmed:
    about = getattr(rule, "about", None)
    if about is None:
        code = rule.__code__
        file = Path(code.co_filename).relative_to(PROJECT).as_posix()
        return Unconfirmed(rule.__name__, f"{file}:{code.co_firstlineno}")
    # made by `check`: it stands where its citation is written
    named = set(citations.of_rule(rule))
    where = next(
        citing.where for citing in cited if citing.citation in named and "/rules/" in citing.file
    )
    return Unconfirmed(about, where)


def _function(citation: str, sources: Sequence[SourceFiles]) -> str:
    """What encloses a cited line, as it is headed in the list: the function's symbol, else the
    citation itself.
    """
    named = citations.parse(citation)
    for source in sources:
        file = source.file(named.label)
        line = None if file is None else file.find(named)
        if file is not None and line is not None:
            return f"{named.label}::{named.symbol}" if file.is_function(line) else citation
    return citation


def _changed(
    name: str, pairs: Sequence[tuple[Unconfirmed, str]], old: SourceFiles, new: SourceFiles
) -> Changed:
    names = sorted({citation for _, citation in pairs})
    rows = [
        (citation, _line(old.place(citation)), _line(new.place(citation))) for citation in names
    ]
    rules = tuple(sorted({rule for rule, _ in pairs}))
    return Changed(name, rules, tuple(rows), _text(old, names), _text(new, names))


def _line(place: CitedPlace | None) -> int | None:
    return None if place is None else place.line


def _text(source: SourceFiles, names: Sequence[str]) -> str:
    """What encloses the first of some citations of one function that is there; else the function by
    its name.
    """
    for citation in names:
        named = citations.parse(citation)
        file = source.file(named.label)
        if file is None:
            continue
        line = file.find(named)
        if line is None and named.symbol:
            line = file.find(citations.Citation(named.label, named.symbol))
            if line is not None and not file.is_function(line):
                continue
        if line is not None:
            return file.enclosing(line)
    return ""


def _stale(citing: Citing, old: SourceFiles, new: SourceFiles) -> Stale:
    named = citations.parse(citing.citation)
    before = old.file(named.label)
    line = None if before is None else before.find(named)
    if before is None or line is None:
        return Stale(citing.where, citing.citation, "", None)
    after = new.file(named.label)
    now = None
    if after is not None:
        nearest = _nearest(before.lines, after.lines, line)
        now = None if nearest is None else after.cite(named.label, nearest)
    return Stale(
        citing.where,
        citing.citation,
        before.lines[line - 1].strip(),
        None if now is None else str(now),
    )


def _nearest(old: Sequence[str], new: Sequence[str], line: int) -> int | None:
    """The line that took the place of a line: the most alike of those that replaced the text around
    it.
    """
    for tag, first, last, begin, end in difflib.SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        if first < line <= last:
            if tag == "equal":
                return begin + line - first
            alike = difflib.get_close_matches(old[line - 1], new[begin:end], n=1, cutoff=0.5)
            return begin + 1 + new[begin:end].index(alike[0]) if alike else None
    return None


def _wrapped(text: str, width: int) -> Iterator[str]:
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        pieces = textwrap.wrap(
            line,
            width,
            subsequent_indent=f"{indent}    ",
            drop_whitespace=False,
            break_on_hyphens=False,
        )
        yield from (piece.rstrip() for piece in pieces or [""])
