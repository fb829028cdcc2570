"""Taking a snapshot: the facts of what is checked out or installed, written as the committed JSON is.

For those who move the pin, by scripts/snapshot.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.machine.git import Repository
from launcher.paths import PACKAGE
from launcher.pin.pin import gitlink
from launcher.rules import registry
from launcher.upstream import citations, facts, history, locate
from launcher.upstream.source.packages import Folder, find_package
from launcher.upstream.trainers import BACKENDS

VERSION = 2
FOLDER = PACKAGE / "upstream" / "snapshots"
# package folder -> the distribution it comes from: types that the dataclasses use
FOREIGN: Mapping[str, Mapping[str, str]] = {"open_instruct": {"olmo_core": "ai2_olmo_core"}}


def take(backend: str, checkout: Path | None = None) -> dict[str, Any]:
    """The facts of a backend's source as it is here: names, types, defaults, places, reads.

    Raises LookupError where there is no source, or no package whose types the dataclasses use. A
    stage that cannot be read stands under `unreadable`, with the reason.
    """
    module = BACKENDS[backend]
    source = locate.locate(backend, checkout=checkout)
    packages = {name: tree for name, tree in source.packages.items() if isinstance(tree, Folder)}
    if source.root is None:
        raise LookupError(f"there is no source of {backend} here to take a snapshot of")
    foreign = {}
    for name in FOREIGN.get(backend, {}):
        path = find_package(name)
        if path is None:
            raise LookupError(f"{name} is not installed, and the dataclasses use types of it")
        foreign[name] = Folder(path)
    # a commit without a further script of a stage lacks nothing that belongs to a stage
    stages = [
        name
        for name, entry in module.STAGES.items()
        if not entry.stage or facts.digest(packages, entry.script) is not None
    ]
    told = facts.read(module, {**packages, **foreign}, {}, stages)
    del told["absent"]
    # the files of other packages are not among the digests
    digests = {k: v for k, v in told["files"].items() if k.partition("/")[0] in module.PACKAGES}
    for name in stages:
        script = module.STAGES[name].script
        digests[script] = facts.digest(packages, script) or ""
    return {
        "schema_version": VERSION,
        "backend": backend,
        "version": locate.version_of(backend, packages),
        "foreign": {
            FOREIGN[backend][name]: locate.package_version(p.path.parent, FOREIGN[backend][name])
            for name, p in foreign.items()
        },
        **told,
        "files": dict(sorted(digests.items())),
    }


def write(backend: str, told: Mapping[str, Any], checkout: Path | None = None) -> None:
    """Commit-ready files of a snapshot, and of the lines that the rules cite in its source."""
    (FOLDER / f"{backend}.json").write_text(written(told) + "\n", encoding="utf-8")
    table = json.loads((FOLDER / "cited.json").read_text(encoding="utf-8"))
    packages = locate.locate(backend, checkout=checkout).packages
    table[backend] = cited_of(backend, {name: tree for name, tree in packages.items() if isinstance(tree, Folder)})
    text = written(dict(sorted(table.items()))) + "\n"
    (FOLDER / "cited.json").write_text(text, encoding="utf-8")


def cited_of(backend: str, packages: Mapping[str, Folder]) -> dict[str, list[str]]:
    """Where what the rules of a backend cite stands in its source; see `cited.table`."""
    places: list[str] = []
    for stage in BACKENDS[backend].STAGES:
        for rule in registry.of_script(backend, stage):
            places += citations.of_rule(rule)
        for wider in registry.of_stage(backend, stage):
            places += citations.of_rule(wider)
    return citations.table(packages, places)


def further_steps(backend: str, version: str) -> Iterator[str]:
    """What of launch's own repository does not name this version yet, and what to make anew."""
    module, root = BACKENDS[backend], locate.REPOSITORY
    named = version.partition("+")[0]
    if named != module.PIN:
        yield f"write {named} as PIN in launcher/upstream/{backend}.py"
        yield "mend the cited lines that tests/agreement/test_upstream_facts.py names, then make golden"
    if not module.CHECKOUT:
        return
    if gitlink(Repository(root), "external/open-instruct") != named:
        yield f"git update-index --cacheinfo 160000,{named},external/open-instruct"
    if history.table_commit(backend) != named:
        yield "make history: what became of arguments up to this commit"
    if named not in (root / "README.md").read_text(encoding="utf-8"):
        yield "name the commit in README.md"


# --- the form -------------------------------------------------------------------------------------


def written(data: Mapping[str, object]) -> str:
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
