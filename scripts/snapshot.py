"""Write launcher/upstream/snapshots/*.json from a repository of open-instruct and the installed packages.

usage: python scripts/snapshot.py [REPOSITORY] [--only BACKEND]

Needs the training extras: types such as `attn_implementation` live in ai2-olmo-core. REPOSITORY (a checkout with its
history, or a bare repository) holds the known commits, each of which has a snapshot, and those at which rules were
confirmed, for the tables of what is cited (cited.json).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.machine.git import CommitTree, Repository
from launcher.paths import PROJECT
from launcher.pin import cited, snapshot
from launcher.upstream import citations, locate
from launcher.upstream.source.packages import Tree, find_package
from launcher.upstream.trainers import BACKENDS, Release

STALE = 3
"""The exit code where all is written, and some citations are not at the pin."""


def main(words: list[str]) -> int:
    """Take the snapshots and the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, nargs="?")
    parser.add_argument("--only", choices=[*BACKENDS])
    asked = parser.parse_args(words)
    place = asked.repository or locate.locate(cited.PACKAGE).root
    if place is None:
        print("there is no open-instruct checkout here", file=sys.stderr)
        return 1
    repository = Repository(place.expanduser())
    for backend in [asked.only] if asked.only else [*BACKENDS]:
        for release in BACKENDS[backend].KNOWN:
            try:
                facts = take(backend, release, repository)
            except LookupError as error:
                print(error.args[0], file=sys.stderr)
                return 1
            version, missing = facts["version"], facts["unreadable"]
            if "+" in version or missing:
                print(f"{backend} at {version}: edited, or unreadable: {missing}", file=sys.stderr)
                return 1
            snapshot.write(release, facts)
            print(f"{backend}: {len(facts['fields'])} fields at {version}")
        snapshot.remove_others(backend)
    package = find_package("trl")
    if package is not None and asked.only in {None, "trl"}:
        templates = snapshot.templates_of(package)
        snapshot.write_templates(templates)
        print(f"trl: {len(templates)} chat templates that have one for training")
    return write_tables(repository)


def take(backend: str, release: Release, repository: Repository) -> Mapping[str, Any]:
    """The facts of a known release. Raises LookupError where it, or a package whose types it uses, is not here."""
    if not BACKENDS[backend].CHECKOUT:
        return snapshot.take(backend)
    commit = repository.commit(release.version)
    if commit is None:
        raise LookupError(
            f"{repository.root} lacks {release.version}, which is known: {_fetch(repository, release.version)}"
        )
    return snapshot.take_at(repository, commit)


def _fetch(repository: Repository, commit: str) -> str:
    return f"git -C {repository.root} fetch origin {commit}"


def write_tables(repository: Repository) -> int:
    """Bring cited.json up to what is cited now; says what is not at the pin."""
    pin = BACKENDS[cited.PACKAGE].PIN
    trees: dict[str, Tree] = {}
    for name in cited.commits_of_rules():
        commit = repository.commit(name)
        if commit is None:
            lacking = f"{repository.root} lacks {name}, at which rules were confirmed"
            print(f"{lacking}: {_fetch(repository, name)}", file=sys.stderr)
            return 1
        trees[commit] = CommitTree(repository, commit, cited.PACKAGE)
    citing = cited.find_citations(PROJECT)
    later = cited.later_than(pin, trees, repository)
    tables = cited.take_tables(citing, citations.committed().tables, cited.installed(citing), trees, later)
    (snapshot.FOLDER / "cited.json").write_text(tables.text(), encoding="utf-8")
    count = sum(map(len, tables.committed.tables.values()))
    print(f"cited: {count} places in {len(tables.committed.tables)} releases")
    return report(tables.problems, cited.stale(citing, tables.committed.at_pin_or_later(), pin))


def report(problems: Sequence[str], stale: Sequence[cited.Citing]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    for citing in stale:
        print(f"{citing.where}: {citing.citation} is not in open-instruct at the pin", file=sys.stderr)
    if problems:
        return 1
    return STALE if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
