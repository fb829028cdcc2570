"""Bring the committed table of what became of arguments to another commit of open-instruct, later or earlier.

usage: python scripts/history.py REPOSITORY [COMMIT]

REPOSITORY holds the history since the commit that rules were written at, COMMIT is the pin unless given. Take the
snapshot of that commit first: what it has, and the table does not, or the other way round, is looked up in git. The
table up to the commit that rules were written at is kept by hand, and so is what it says of TRL and transformers;
what lies behind that commit depends on COMMIT alone, but for rows of the same change that were edited by hand.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher.machine.git import Repository
from launcher.upstream import history
from launcher.upstream.history import ArgumentChange
from launcher.upstream.locate import snapshot
from launcher.upstream.trainers import BACKENDS

PACKAGE = "open_instruct"
TARGET = Path(history.__file__).parent / "snapshots" / "history.json"
Change = dict[str, Any]
"""A commit of the table: its hash, date and pull request, and its rows under `events`."""


def main(arguments: list[str]) -> int:
    """Write the table; returns the exit code."""
    repository = Repository(Path(arguments[0]).expanduser())
    backend = BACKENDS[PACKAGE]
    commit = repository.commit(arguments[1] if arguments[1:] else backend.PIN)
    data: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
    table = data[PACKAGE]
    base = backend.BASELINE
    if commit is None or repository.commit(base) is None:
        print(f"{repository.root} lacks a commit: git fetch", file=sys.stderr)
        return 1
    before = _commits(repository, base) & _commits(repository, commit)
    by_hand = [change for change in table["changes"] if change["commit"] in before]
    later = _later(repository, table["scripts"], by_hand, base, commit)
    edited = {(change["commit"], *_identity(row)): row for change in table["changes"] for row in change["events"]}
    for change in later:
        change["events"] = [edited.get((change["commit"], *_identity(row)), row) for row in change["events"]]
    table["changes"] = [*later, *by_hand]
    table["commit"] = commit
    TARGET.write_text(written(data), encoding="utf-8")
    return 0


def _commits(repository: Repository, head: str) -> set[str]:
    return set((repository.ask("rev-list", head, "--") or "").split())


def _identity(row: list[Any]) -> tuple[Any, ...]:
    """What a row is about: the scripts, what happened, the argument."""
    return tuple(row[:3])


def _later(
    repository: Repository, scripts: list[str], known: Iterable[Change], base: str, commit: str
) -> list[Change]:
    """The changes from `base` to `commit`, the newest first, by what the snapshot has and the table does not."""
    changes: dict[str, Change] = {}
    for stage, entry in BACKENDS[PACKAGE].STAGES.items():
        number = str(scripts.index(entry.script))
        before = _present(known, number)
        after = {key.partition(".")[2] for key in snapshot(PACKAGE)["stages"][stage]}
        for key in sorted(before ^ after):
            found = list(history.find(repository, key, entry.script, base, commit))
            print(f"{entry.script} {key}:", *map(history.sentence, found), sep="\n  ")
            for change in found:
                head: Change = {"commit": change.commit, "date": change.date, "pull": change.pull, "events": []}
                changes.setdefault(change.commit, head)["events"].append(_row(number, key, change))
    order = (repository.ask("rev-list", f"{base}..{commit}") or "").split()
    return [changes[name] for name in order if name in changes]


def _row(number: str, key: str, change: ArgumentChange) -> list[Any]:
    instead = change.to or list(change.see) or None
    return [number, change.what, key, instead, change.owner, change.file, change.line]


def _present(changes: Iterable[Change], number: str) -> set[str]:
    """The arguments of a script that its newest change did not take away."""
    newest: dict[str, str] = {}
    for change in changes:
        for numbers, what, key, *_ in change["events"]:
            if number in numbers:
                newest.setdefault(key, what)
    return {key for key, what in newest.items() if what == "added"}


def written(data: Mapping[str, Any]) -> str:
    """The table as JSON text, one event a line."""
    parts = []
    for name, table in data.items():
        if not isinstance(table, dict):
            parts.append(f"{json.dumps(name)}: {json.dumps(table)}")
            continue
        changes = []
        for change in table["changes"]:
            listed = ",\n".join(map(json.dumps, change["events"]))
            head = json.dumps({key: value for key, value in change.items() if key != "events"})
            changes.append(f'{head[:-1]}, "events": [\n{listed}]}}')
        head = json.dumps({key: value for key, value in table.items() if key != "changes"})
        joined = ",\n".join(changes)
        parts.append(f'{json.dumps(name)}: {head[:-1]}, "changes": [\n{joined}\n]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
