"""Write launcher/upstream/snapshots/*.json from open-instruct's repository and installed packages.

usage: python scripts/snapshot.py [REPOSITORY] [--only BACKEND]

Needs the training extras: types such as `attn_implementation` live in ai2-olmo-core. REPOSITORY (a
checkout with its history, or a bare repository) holds the known commits, each of which has a
snapshot, and those at which rules were confirmed, for the tables of citations (cited.json).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.machine.git import CommitTree, Repository
from launcher.paths import PROJECT
from launcher.pin import cited, snapshot
from launcher.upstream import citations, locate
from launcher.upstream.source.packages import Tree, find_package
from launcher.upstream.trainers import BACKENDS

STALE = 3
"""The exit code where all is written, and some citations are not at the pin."""


def main(words: list[str]) -> int:
    """Take the snapshots and the tables; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", type=Path, nargs="?")
    parser.add_argument("--only", choices=[*BACKENDS])
    options = parser.parse_args(words)
    place = options.repository or locate.locate(cited.PACKAGE).root
    if place is None:
        print("no open-instruct checkout here; name one", file=sys.stderr)
        return 1
    repository = Repository(place.expanduser())
    backends = list(BACKENDS)
    if options.only:
        backends = [options.only]
    try:
        for backend in backends:
            write_snapshots(backend, repository)
        if "trl" in backends:
            write_templates()
        problems, stale = write_tables(repository)
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 1
    for problem in problems:
        print(problem, file=sys.stderr)
    for citing in stale:
        missing = f"{citing.citation} is not in open-instruct at the pin"
        print(f"{citing.where}: {missing}", file=sys.stderr)
    if problems:
        return 1
    return STALE if stale else 0


def write_snapshots(backend: str, repository: Repository) -> None:
    """The snapshots of all known releases. Raises LookupError if one cannot be taken."""
    for release in BACKENDS[backend].KNOWN:
        if BACKENDS[backend].CHECKOUT:
            commit = find_commit(repository, release.version, "which is known")
            facts = snapshot.take_at(repository, commit)
        else:
            facts = snapshot.take(backend)
        version = facts["version"]
        unreadable = facts["unreadable"]
        if "+" in version or unreadable:
            raise LookupError(f"{backend} at {version}: edited, or unreadable: {unreadable}")
        snapshot.write(release, facts)
        print(f"{backend}: {len(facts['fields'])} fields at {version}")
    snapshot.remove_others(backend)


def find_commit(repository: Repository, name: str, why: str) -> str:
    commit = repository.commit(name)
    if commit is None:
        fetch = f"git -C {repository.root} fetch origin {name}"
        raise LookupError(f"{repository.root} lacks {name}, {why}: {fetch}")
    return commit


def write_templates() -> None:
    package = find_package("trl")
    if package is not None:
        templates = snapshot.list_templates(package)
        snapshot.write_templates(templates)
        print(f"trl: {len(templates)} chat templates that have one for training")


def write_tables(repository: Repository) -> tuple[Sequence[str], Sequence[cited.Citing]]:
    """Bring cited.json up to date; returns problems, and citations that are not at the pin."""
    pin = BACKENDS[cited.PACKAGE].PIN
    trees: dict[str, Tree] = {}
    for name in cited.list_commits_of_rules():
        commit = find_commit(repository, name, "at which rules were confirmed")
        trees[commit] = CommitTree(repository, commit, cited.PACKAGE)
    citing = cited.find_citations(PROJECT)
    later = cited.select_later_commits(pin, trees, repository)
    installed = cited.find_installed(citing)
    tables = cited.take_tables(citing, citations.load_committed().tables, installed, trees, later)
    (snapshot.FOLDER / "cited.json").write_text(tables.text(), encoding="utf-8")
    releases = tables.committed.tables
    places = sum(map(len, releases.values()))
    print(f"cited: {places} places in {len(releases)} releases")
    return tables.problems, cited.find_stale(citing, tables.committed.at_pin_or_later(), pin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
