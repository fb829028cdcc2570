"""Taking a snapshot: the facts of what is checked out or installed, as JSON to be committed.

For those who move the pin, by scripts/snapshot.py.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.artifacts import chat_template
from launcher.machine.git import CommitTree, Repository
from launcher.paths import PACKAGE
from launcher.upstream import facts, locate
from launcher.upstream.source.packages import Folder, Tree, find_package
from launcher.upstream.trainers import BACKENDS, Release

VERSION = 2
FOLDER = PACKAGE / "upstream" / "snapshots"


def take(backend: str, checkout: Path | None = None) -> dict[str, Any]:
    """The facts of a backend's source as it is here: names, types, defaults, places, reads.

    Raises LookupError where there is no source, or no package whose types the dataclasses use. A
    stage that cannot be read stands under `unreadable`, with the reason.
    """
    source = locate.locate(backend, checkout=checkout)
    packages = {name: tree for name, tree in source.packages.items() if isinstance(tree, Folder)}
    if source.root is None:
        raise LookupError(f"there is no source of {backend} here to take a snapshot of")
    return _take_facts(backend, packages, locate.find_version(backend, packages))


def take_at(repository: Repository, commit: str) -> dict[str, Any]:
    """The facts of open-instruct at a commit, without a checkout of it; raises as `take`."""
    backend = "open_instruct"
    trees = {name: CommitTree(repository, commit, name) for name in BACKENDS[backend].PACKAGES}
    return _take_facts(backend, trees, commit)


def _take_facts(backend: str, packages: Mapping[str, Tree], version: str) -> dict[str, Any]:
    module = BACKENDS[backend]
    foreign: dict[str, Folder] = {}
    versions: dict[str, str] = {}
    if backend == "open_instruct":
        path = find_package("olmo_core")
        if path is None:
            raise LookupError("olmo_core is not installed, and the dataclasses use types of it")
        foreign["olmo_core"] = Folder(path)
        versions["ai2_olmo_core"] = locate.find_package_version(path.parent, "ai2_olmo_core")
    digests: dict[str, str] = {}
    stages: list[str] = []
    for name, entry in module.STAGES.items():
        digest = facts.digest(packages, entry.script)
        # a commit without a further script of a stage lacks nothing that belongs to a stage
        if digest is not None or not entry.stage:
            stages.append(name)
            digests[entry.script] = digest or ""
    data = facts.read_facts(module, {**packages, **foreign}, {}, stages)
    del data["absent"]
    for label, digest in data["files"].items():
        package = label.partition("/")[0]
        # the files of other packages are not among the digests
        if package in module.PACKAGES:
            digests.setdefault(label, digest)
    return {
        "schema_version": VERSION,
        "backend": backend,
        "version": version,
        "foreign": versions,
        **data,
        "files": dict(sorted(digests.items())),
    }


def write(release: Release, data: Mapping[str, Any]) -> None:
    """The commit-ready file of a snapshot."""
    (FOLDER / release.snapshot).write_text(render_snapshot(data) + "\n", encoding="utf-8")


def remove_others(backend: str) -> None:
    """Remove the snapshots of commits that are no longer known."""
    names = {release.snapshot for release in BACKENDS[backend].KNOWN}
    for path in FOLDER.glob(f"{backend}_*.json"):
        if path.name not in names:
            path.unlink()


def list_templates(package: Path) -> dict[str, str]:
    """The names of the chat templates with a training template in a TRL package, by digest."""
    source = (package / "chat_template_utils.py").read_text(encoding="utf-8")
    replaced = re.findall(
        r"if chat_template == (\w+)_chat_template:\s+return \w+_training_chat_template", source
    )
    table = {}
    for name in sorted(replaced):
        text = (package / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
        table[chat_template.digest(text)] = name
    return table


def write_templates(table: Mapping[str, str]) -> None:
    path = FOLDER / "trl_templates.json"
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def render_snapshot(data: Mapping[str, object]) -> str:
    """The JSON, one fact a line: differences between two snapshots can be read."""
    parts = {}
    for key, value in data.items():
        if isinstance(value, dict):
            below = {name: _render_value(inner) for name, inner in value.items()}
            parts[key] = _render_object(below, " ")
        else:
            parts[key] = json.dumps(value, ensure_ascii=False)
    return _render_object(parts, "")


def _render_value(value: object) -> str:
    if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
        below = {name: _render_value(inner) for name, inner in value.items()}
        return _render_object(below, "  ")
    if not isinstance(value, list) or not value or isinstance(value[0], list):
        return json.dumps(value, ensure_ascii=False)
    if len(value) <= 4:
        return json.dumps(value)
    rows = [f"   {json.dumps(entry, ensure_ascii=False)}" for entry in value]
    return "[\n" + ",\n".join(rows) + "\n  ]"


def _render_object(texts: Mapping[str, str], indent: str) -> str:
    """A JSON object of values that are JSON already; `indent` is that of its last line."""
    rows = [f"{indent} {json.dumps(key)}: {text}" for key, text in texts.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
