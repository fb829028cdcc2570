"""Write launcher/snapshots/history.json from the git histories of open-instruct and TRL.

usage: python scripts/history.py [OPEN_INSTRUCT [TRL [WHEELS]]]

OPEN_INSTRUCT and TRL are git repositories with their whole history; WHEELS is a folder with wheels of
transformers, whose repository is large: `pip download --no-deps transformers==5.0.0` and so on. What
is not given stays as it is in the table. Of transformers only removals between neighbouring minor
versions are recorded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from zipfile import ZipFile

from launcher import history
from launcher.backends import BACKENDS
from launcher.definitions import Arguments, gathered, read_source
from launcher.git import Repository
from launcher.history import Event
from launcher.lineage import Lineage, described
from launcher.renames import Change
from launcher.upstream import snapshot

TARGET = Path(__file__).resolve().parent.parent / "launcher" / "snapshots" / "history.json"
TRAINING_ARGUMENTS = "transformers/training_args.py"
# besides the scripts of the stages: the OLMo-core DPO
FURTHER = ("open_instruct/dpo.py",)


def main(arguments: list[str]) -> int:
    """Write the table; returns the exit code."""
    places = [Path(word).expanduser() for word in arguments or ["~/open-instruct"]]
    checkout = Repository(places[0])
    pin = BACKENDS["open_instruct"].PIN
    if checkout.commit(pin) is None or checkout.is_shallow():
        print(f"{checkout.root} does not hold the history of {pin[:12]}", file=sys.stderr)
        return 1
    scripts = [entry.script for entry in BACKENDS["open_instruct"].STAGES.values()]
    lineage = Lineage(checkout, "open_instruct")
    found = {script: list(lineage.events(script, pin)) for script in [*scripts, *FURTHER]}
    facts = {"open_instruct": _section(checkout, pin, found)}
    facts["trl"] = _trl(Repository(places[1])) if places[1:] else _kept("trl")
    facts["transformers"] = _transformers(places[2]) if places[2:] else _kept("transformers")
    sections = ",\n".join(f"{json.dumps(name)}: {text}" for name, text in facts.items())
    head = f'"schema_version": {history.TABLE_VERSION}'
    TARGET.write_text(f"{{\n{head},\n{sections}\n}}\n", encoding="utf-8")
    return 0


def _kept(package: str) -> str:
    table = history.table(package)
    return history.as_json(table.commit, table.events or {}, table.order)


def _section(repository: Repository, tip: str, found: Mapping[str, Sequence[Event]]) -> str:
    for script, listed in found.items():
        gone = sum(event.gone for event in listed)
        print(f"{script}: {len(listed)} changes, {gone} of them removed or renamed an argument")
    order = (repository.ask("rev-list", "--topo-order", tip) or "").split()
    return history.as_json(tip, found, order)


def _trl(repository: Repository) -> str:
    """Up to the newest release; an argument that goes on as a field of transformers' is not gone."""
    tags = (repository.ask("tag", "--sort=-version:refname") or "").split()
    releases = [tag for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    tip = repository.commit(releases[0])
    assert tip is not None
    found = {}
    for stage, entry in BACKENDS["trl"].STAGES.items():
        fields = {key.partition(".")[2] for key in snapshot("trl")["stages"][stage]}
        lineage = Lineage(repository, "trl", further=frozenset(fields))
        listed = list(lineage.events(entry.script, tip))
        known = lineage.arguments(entry.script, tip) or {}
        print(
            f"{entry.script}: not in the snapshot, commit unknown: {sorted(known.keys() - fields)}"
        )
        stay = fields - known.keys()
        found[entry.script] = [
            replace(event, release=_release(repository, event.commit, releases))
            for event in listed if event.key not in stay
        ]  # fmt: skip
    return _section(repository, tip, found)


def _release(repository: Repository, commit: str, releases: Sequence[str]) -> str | None:
    """The first release that holds a commit."""
    holding = set((repository.ask("tag", "--contains", commit) or "").split())
    first = [tag for tag in releases if tag in holding]
    return f"trl {first[-1].removeprefix('v')}" if first else None


def _transformers(folder: Path) -> str:
    """What each minor version took away from TrainingArguments."""
    versions: dict[tuple[int, int], Arguments] = {}
    for wheel in folder.glob("transformers-*.whl"):
        major, minor = wheel.name.split("-")[1].split(".")[:2]
        source = read_source(
            ZipFile(wheel).read(TRAINING_ARGUMENTS), TRAINING_ARGUMENTS, entry=False
        )
        assert source is not None
        versions[int(major), int(minor)] = gathered([source.classes["TrainingArguments"]])
    found: list[Event] = []
    order = sorted(versions, reverse=True)
    for new, old in pairwise(order):
        release = f"transformers {new[0]}.{new[1]}"
        change = Change(versions[old], versions[new])
        if new in {(old[0], old[1] + 1), (old[0] + 1, 0)}:
            found += [e for e in described(change, commit="", release=release) if e.gone]
        elif change.gone:
            print(f"{release}: {change.gone} left out, the version before is not there")
    print(f"{TRAINING_ARGUMENTS}: {len(found)} arguments removed or renamed")
    releases = [f"transformers {major}.{minor}" for major, minor in order]
    return history.as_json(releases[0], {TRAINING_ARGUMENTS: found}, releases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
