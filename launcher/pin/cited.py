"""Every citation of upstream's source in this repository, and the committed tables of their lines.

For those who change rules or move the pin: nothing else reads launch's own source.
"""

import ast
import io
import json
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from launcher.machine.git import Repository
from launcher.rules import registry
from launcher.upstream import citations
from launcher.upstream.citations import Committed, Table
from launcher.upstream.source.packages import Folder, Tree, find_package
from launcher.upstream.trainers import BACKENDS

FOLDERS = ("launcher", "docs", "tests")
PACKAGE = "open_instruct"
_EVIDENCE = "evidence"
_BESIDE = ("README.md", "pyproject.toml")


@dataclass(frozen=True, slots=True, order=True)
class Citing:
    """A line of this repository, relative to its root, and what it cites."""

    file: str
    line: int
    citation: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def find_citations(root: Path) -> list[Citing]:
    """What the source, the tests and the pages of a clone cite, in the order of files and lines."""
    paths = [root / name for name in _BESIDE if (root / name).is_file()]
    for folder in FOLDERS:
        paths += [path for path in (root / folder).rglob("*") if path.suffix in {".py", ".md"}]
    cited: set[Citing] = set()
    for path in paths:
        name = path.relative_to(root).as_posix()
        if _EVIDENCE in path.parts or name in _ABOUT_CITATIONS:
            continue
        for line, text in _list_texts(path):
            for citation in citations.find_citations(text):
                cited.add(Citing(name, line, citation))
    return sorted(cited)


# they show what a citation looks like, or list all of them
_ABOUT_CITATIONS = frozenset(
    {
        "docs/cited.md",
        "docs/pin.md",
        "launcher/upstream/citations.py",
        "tests/rules/test_cited.py",
        "tests/pin/test_move.py",
        "tests/agreement/test_upstream_facts.py",
    }
)


def _list_texts(path: Path) -> Iterable[tuple[int, str]]:
    """The texts of a file that may cite something, each with its line."""
    text = path.read_text(encoding="utf-8")
    if "::" not in text:
        return ()
    if path.suffix == ".py":
        return _list_strings(text)
    return enumerate(text.splitlines(), 1)


def _list_strings(text: str) -> Iterator[tuple[int, str]]:
    """The strings of a module, their parts joined, and its comments, with their lines."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str() as string, lineno=line):
                yield from enumerate(string.split("\n"), line)
    source = io.StringIO(text)
    for token in tokenize.generate_tokens(source.readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def select_package(cited: Sequence[Citing], package: str) -> list[str]:
    """The citations of one package, each once, sorted."""
    names = {citing.citation for citing in cited}
    return sorted(name for name in names if name.startswith(f"{package}/"))


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables as they are committed, and why some could not be brought up to date."""

    committed: Committed
    problems: tuple[str, ...] = ()

    def text(self) -> str:
        """The tables as JSON, one citation a line."""
        parts = []
        for release, table in sorted(self.committed.tables.items()):
            rows = []
            for name, place in sorted(table.items()):
                rows.append(f"  {json.dumps(name)}: {json.dumps(list(place))}")
            parts.append(f" {json.dumps(release)}: {{\n" + ",\n".join(rows) + "\n }")
        pin = json.dumps(self.committed.pin)
        later = json.dumps(list(self.committed.later))
        head = f'{{\n"pin": {pin},\n"later": {later},\n"releases": {{\n'
        return head + ",\n".join(parts) + "\n}\n}\n"


def list_commits_of_rules() -> tuple[str, ...]:
    """The commits that have a table: the baseline, those that `reviewed` names, the known ones."""
    backend = BACKENDS[PACKAGE]
    names = {release.version for release in backend.KNOWN}
    for rule in list_rules(PACKAGE):
        names.update(citations.list_reviews(rule))
    return (backend.BASELINE, *sorted(names - {backend.BASELINE}))


def list_rules(backend: str) -> list[Callable[..., object]]:
    """Every rule about a backend's scripts, each once."""
    rules: list[Callable[..., object]] = []
    for key in BACKENDS[backend].STAGES:
        rules += [*registry.of_script(backend, key), *registry.of_stage(backend, key)]
    return list(dict.fromkeys(rules))


def select_later_commits(
    pin: str, commits: Iterable[str], repository: Repository
) -> tuple[str, ...]:
    """Those of some commits that come after the pin."""
    later: list[str] = []
    for commit in sorted(commits):
        if commit == pin:
            continue
        if repository.ask("merge-base", "--is-ancestor", pin, commit) is not None:
            later.append(commit)
    return tuple(later)


def take_tables(
    cited: Sequence[Citing],
    old: Mapping[str, Table],
    trees: Mapping[str, Tree],
    commits: Mapping[str, Tree],
    later: tuple[str, ...],
) -> Tables:
    """The tables of the commits that are to be known, and of the packages at hand.

    `commits` are trees of open-instruct by full commit, those of `later` come after the pin;
    `trees` are other packages by release (`trl 1.16.0`). A package that is not among these keeps
    its table of `old`, if that holds all that is cited.
    """
    by_release: dict[str, Table] = {}
    problems: list[str] = []
    named = select_package(cited, PACKAGE)
    for commit, tree in commits.items():
        by_release[f"{PACKAGE} {commit}"] = citations.build_table({PACKAGE: tree}, named)
    for package in _list_other_packages(cited):
        named = select_package(cited, package)
        kept = _find_release(package, old)
        current = _find_release(package, trees)
        if current is not None and kept in {None, current}:
            by_release[current] = citations.build_table({package: trees[current]}, named)
            continue
        table = {} if kept is None else old[kept]
        if kept is not None:
            by_release[kept] = {name: table[name] for name in named if name in table}
        unlisted = [name for name in named if name not in table]
        if unlisted:
            count = f"{len(unlisted)} line(s) of {kept or package} are cited"
            problems.append(f"{count} and it is not installed: {unlisted[0]}")
    return Tables(Committed(BACKENDS[PACKAGE].PIN, by_release, later), tuple(problems))


def _list_other_packages(cited: Iterable[Citing]) -> list[str]:
    packages = {citing.citation.partition("/")[0] for citing in cited}
    return sorted(packages - {PACKAGE})


def _find_release(package: str, releases: Iterable[str]) -> str | None:
    for release in releases:
        if release.startswith(f"{package} "):
            return release
    return None


def find_installed(cited: Sequence[Citing]) -> dict[str, Tree]:
    """The cited packages that are installed here, by release."""
    trees: dict[str, Tree] = {}
    for package in _list_other_packages(cited):
        folder = find_package(package)
        if folder is not None:
            distribution = _DISTRIBUTIONS.get(package, package)
            release = metadata.version(distribution).partition("+")[0]
            trees[f"{package} {release}"] = Folder(folder)
    return trees


_DISTRIBUTIONS = {"olmo_core": "ai2-olmo-core"}


def find_stale(cited: Sequence[Citing], tables: Sequence[Table], pin: str) -> list[Citing]:
    """What is cited of open-instruct and is in no table of the pin or of known commits after it.

    What a rule cites may be gone where somebody has confirmed the rule at the pin.
    """
    accounted: set[str] = set()
    for rule in list_rules(PACKAGE):
        if any(pin.startswith(name) for name in citations.list_reviews(rule)):
            accounted.update(citations.list_of_rule(rule))
    for table in tables:
        accounted.update(table)
    gone = []
    for citing in cited:
        citation = citing.citation
        if citation.startswith(f"{PACKAGE}/") and citation not in accounted:
            gone.append(citing)
    return gone
