"""Write launcher/upstream/snapshots/*.json from a pinned checkout and the installed packages.

usage: python scripts/snapshot.py [CHECKOUT] [--repository PATH] [--commit COMMIT] [--only BACKEND]

Needs the training extras: types such as `attn_implementation` live in ai2-olmo-core. The tables of what is cited
(cited.json) also want the commits at which rules were confirmed: CHECKOUT's own history holds them, or PATH. COMMIT
says what a CHECKOUT without a history is.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--repository", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--only", choices=[*BACKENDS])
    asked = parser.parse_args(words)
    checkout = asked.checkout and asked.checkout.expanduser()
    for backend in [asked.only] if asked.only else [*BACKENDS]:
        try:
            facts = snapshot.take(backend, checkout)
            if backend == cited.PACKAGE and asked.commit:
                facts["version"] = asked.commit
        except LookupError as error:
            print(error.args[0], file=sys.stderr)
            return 1
        version, missing = facts["version"], facts["unreadable"]
        if "+" in version or missing:
            print(f"{backend} at {version}: edited, or unreadable: {missing}", file=sys.stderr)
            return 1
        snapshot.write(backend, facts)
        print(f"{backend}: {len(facts['fields'])} fields at {version}")
    package = find_package("trl")
    if package is not None and asked.only in {None, "trl"}:
        templates = snapshot.templates_of(package)
        snapshot.write_templates(templates)
        print(f"trl: {len(templates)} chat templates that have one for training")
    return write_tables(checkout, asked.repository)


def write_tables(checkout: Path | None, repository: Path | None) -> int:
    """Bring cited.json up to what is cited now; says what is not at the pin."""
    source = locate.locate(cited.PACKAGE, checkout=checkout)
    pin = BACKENDS[cited.PACKAGE].PIN
    root = repository or source.root
    if root is None or source.root is None:
        print("there is no open-instruct checkout here", file=sys.stderr)
        return 1
    trees: dict[str, Tree] = {}
    git = Repository(root)
    for name in cited.commits_of_rules():
        commit = git.commit(name)
        if commit is None:
            print(f"{root} lacks {name}, at which rules were confirmed: git -C {root} fetch origin", file=sys.stderr)
            return 1
        trees[commit] = CommitTree(git, commit, cited.PACKAGE)
    trees[pin] = source.packages[cited.PACKAGE]
    citing = cited.find_citations(PROJECT)
    later = cited.later_than(pin, trees, git)
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
