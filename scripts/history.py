"""Bring the committed table of argument changes to another commit of open-instruct.

usage: python scripts/history.py REPOSITORY [COMMIT]

REPOSITORY holds the history since the baseline, the commit at which rules were first written; the
default of COMMIT is the pin. Take the snapshot of that commit first: arguments that only one of
snapshot and table has are looked up in git. The changes up to the baseline, and those of TRL and
transformers, are kept by hand; later ones depend on COMMIT alone, except for rows of the same
change that were edited by hand.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from launcher.machine.git import Repository
from launcher.upstream import history
from launcher.upstream.locate import load_snapshot
from launcher.upstream.trainers import BACKENDS

PACKAGE = "open_instruct"
TARGET = Path(history.__file__).parent / "snapshots" / "history.json"


class CommitChanges(TypedDict):
    """A commit of the table, with a row for each argument that it changed."""

    commit: str
    date: str
    pull: int | None
    events: list[list[Any]]


def main(arguments: list[str]) -> int:
    """Write the table; returns the exit code."""
    repository = Repository(Path(arguments[0]).expanduser())
    backend = BACKENDS[PACKAGE]
    commit = repository.commit(arguments[1] if arguments[1:] else backend.PIN)
    if commit is None or repository.commit(backend.BASELINE) is None:
        print(f"{repository.root} lacks a commit: git fetch", file=sys.stderr)
        return 1
    data: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
    table = data[PACKAGE]
    ancestors = set(_list_commits(repository, backend.BASELINE))
    ancestors.intersection_update(_list_commits(repository, commit))
    kept = []
    edited: dict[tuple[str, ...], list[Any]] = {}
    for change in table["changes"]:
        if change["commit"] in ancestors:
            kept.append(change)
        for row in change["events"]:
            edited[_identity(change, row)] = row
    later = _find_later_changes(repository, table["scripts"], kept, commit)
    for change in later:
        events = change["events"]
        change["events"] = [edited.get(_identity(change, row), row) for row in events]
    table["changes"] = [*later, *kept]
    table["commit"] = commit
    TARGET.write_text(render(data), encoding="utf-8")
    return 0


def _list_commits(repository: Repository, revisions: str) -> list[str]:
    return (repository.ask("rev-list", revisions, "--") or "").split()


def _identity(change: CommitChanges, row: list[Any]) -> tuple[str, ...]:
    """What a row is about: the commit, the scripts, what happened, the argument."""
    return (change["commit"], *row[:3])


def _find_later_changes(
    repository: Repository, scripts: list[str], kept: Iterable[CommitChanges], commit: str
) -> list[CommitChanges]:
    """The changes from the baseline to `commit`, newest first."""
    base = BACKENDS[PACKAGE].BASELINE
    changes: dict[str, CommitChanges] = {}
    for stage, entry in BACKENDS[PACKAGE].STAGES.items():
        if entry.script not in scripts:
            # added later than the table: without its arguments at the baseline
            continue
        number = str(scripts.index(entry.script))
        before = _present_arguments(kept, number)
        after = {key.partition(".")[2] for key in load_snapshot(PACKAGE)["stages"][stage]}
        for key in sorted(before ^ after):
            print(f"{entry.script} {key}:")
            for change in history.find(repository, key, entry.script, base, commit):
                print(f"  {history.describe_event(change)}")
                of_commit = changes.setdefault(
                    change.commit,
                    CommitChanges(
                        commit=change.commit, date=change.date, pull=change.pull, events=[]
                    ),
                )
                instead = change.to or list(change.see) or None
                of_commit["events"].append(
                    [number, change.what, key, instead, change.owner, change.file, change.line]
                )
    order = _list_commits(repository, f"{base}..{commit}")
    return [changes[name] for name in order if name in changes]


def _present_arguments(changes: Iterable[CommitChanges], number: str) -> set[str]:
    """The arguments of a script whose newest change did not remove them."""
    newest: dict[str, str] = {}
    for change in changes:
        for numbers, what, key, *_ in change["events"]:
            if number in numbers:
                newest.setdefault(key, what)
    return {key for key, what in newest.items() if what == "added"}


def render(data: Mapping[str, Any]) -> str:
    """The table as JSON text, one event a line."""
    parts = []
    for name, table in data.items():
        text = json.dumps(table)
        if isinstance(table, dict):
            changes = []
            for change in table["changes"]:
                events = map(json.dumps, change["events"])
                changes.append(_open_list(change, "events", events))
            text = _open_list(table, "changes", changes, end="\n")
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _open_list(record: Mapping[str, Any], key: str, items: Iterable[str], *, end: str = "") -> str:
    """A record as JSON whose list under `key`, the last one, has each item on a line of its own."""
    head = json.dumps({name: value for name, value in record.items() if name != key})
    joined = ",\n".join(items)
    return f'{head[:-1]}, "{key}": [\n{joined}{end}]}}'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
