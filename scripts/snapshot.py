"""Write launcher/snapshots/*.json from a pinned checkout and the installed packages.

usage: python scripts/snapshot.py [CHECKOUT]

Needs the training extras: types such as `attn_implementation` live in ai2-olmo-core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launcher.backends import BACKENDS
from launcher.sources import Folder, find_package
from launcher.upstream import locate, package_version, packages_below, take_snapshot

FOLDER = Path(__file__).resolve().parent.parent / "launcher" / "snapshots"
# package folder -> the distribution it comes from
FOREIGN = {"olmo_core": "ai2_olmo_core"}


def main(arguments: list[str]) -> int:
    """Take both snapshots; returns the exit code."""
    checkout = Path(arguments[0] if arguments else "~/open-instruct").expanduser()
    foreign = {}
    for name in FOREIGN:
        path = find_package(name)
        if path is None:
            print(
                f"{name} is not installed: run this where the training extras are", file=sys.stderr
            )
            return 1
        foreign[name] = Folder(path)
    facts = take_snapshot("open_instruct", packages_below("open_instruct", checkout), foreign)
    facts["foreign"] = {
        FOREIGN[n]: package_version(p.path.parent, FOREIGN[n]) for n, p in foreign.items()
    }
    if facts["version"] != BACKENDS["open_instruct"].PIN:
        print(f"{checkout} is at {facts['version']}, not at the pin", file=sys.stderr)
        return 1
    installed = locate("trl")
    if installed.root is None:
        print("trl is not installed", file=sys.stderr)
        return 1
    packages = {name: tree for name, tree in installed.packages.items() if isinstance(tree, Folder)}
    for name, data in (
        ("open_instruct", facts),
        ("trl", take_snapshot("trl", packages, {})),
    ):
        target = FOLDER / f"{name}.json"
        target.write_text(written(data) + "\n", encoding="utf-8")
        print(f"{target}: {len(data['fields'])} fields at {data['version']}")
    return 0


def written(data: dict[str, object]) -> str:
    """The JSON, one fact a line: differences between two snapshots can be read."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict):
            below = [f"  {json.dumps(k)}: {_below(v)}" for k, v in value.items()]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(below) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _below(value: object) -> str:
    if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
        inner = [f"   {json.dumps(k)}: {_below(v)}" for k, v in value.items()]
        return "{\n" + ",\n".join(inner) + "\n  }"
    if isinstance(value, list) and value and not isinstance(value[0], list):
        inner = [f"   {json.dumps(v, ensure_ascii=False)}" for v in value]
        return "[\n" + ",\n".join(inner) + "\n  ]" if len(value) > 4 else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
