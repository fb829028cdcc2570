"""Bring the committed table of what became of arguments up to another commit of open-instruct.

usage: python scripts/history.py REPOSITORY [COMMIT]

REPOSITORY holds the history since the table's commit, COMMIT is the pin unless given. Take the
snapshot of that commit first: what it has, and the table does not, or the other way round, is looked
up in git. What the table says of TRL and transformers is extended by hand.
"""

import json
import sys
from pathlib import Path
from typing import Any

from launcher.machine.git import Repository
from launcher.upstream import history
from launcher.upstream.history import ArgumentChange
from launcher.upstream.locate import snapshot
from launcher.upstream.trainers import BACKENDS

PACKAGE = "open_instruct"
TARGET = Path(history.__file__).parent / "snapshots" / "history.json"


def main(arguments: list[str]) -> int:
    """Write the table; returns the exit code."""
    repository = Repository(Path(arguments[0]).expanduser())
    commit = repository.commit(arguments[1] if arguments[1:] else BACKENDS[PACKAGE].PIN)
    data: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
    table = data[PACKAGE]
    if commit is None or repository.commit(table["commit"]) is None:
        print(f"{repository.root} lacks a commit: git fetch", file=sys.stderr)
        return 1
    changes: dict[str, dict[str, Any]] = {}
    for stage, entry in BACKENDS[PACKAGE].STAGES.items():
        number = str(table["scripts"].index(entry.script))
        newest: dict[str, ArgumentChange] = {}
        for event in history.events(entry.script):
            newest.setdefault(event.key, event)
        before = {key for key, event in newest.items() if not event.gone}
        after = {key.partition(".")[2] for key in snapshot(PACKAGE)["stages"][stage]}
        for key in sorted(before ^ after):
            found = list(history.find(repository, key, entry.script, table["commit"], commit))
            print(f"{entry.script} {key}:", *map(history.sentence, found), sep="\n  ")
            for one in found:
                head: dict[str, Any] = {
                    "commit": one.commit, "date": one.date, "pull": one.pull, "events": []
                }  # fmt: skip
                row = [number, one.what, key, one.to or list(one.see) or None, one.owner]
                changes.setdefault(one.commit, head)["events"].append([*row, one.file, one.line])
    order = (repository.ask("rev-list", f"{table['commit']}..{commit}") or "").split()
    table["changes"][:0] = [changes[name] for name in order if name in changes]
    table["commit"] = commit
    TARGET.write_text(written(data), encoding="utf-8")
    return 0


def written(data: dict[str, Any]) -> str:
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
