"""What one upstream source says about its entry scripts: read from the trees, kept as plain JSON.

The committed snapshots, the cache and what was just read have the same form; `schema_of` makes a
`Schema` of any of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.paths import PACKAGE
from launcher.upstream import behaviour
from launcher.upstream.schema import Path as ScriptPath
from launcher.upstream.schema import Read, Refusal, Schema, Shadow, field_as_json, field_from_json
from launcher.upstream.trainers import Backend, Entry

if TYPE_CHECKING:
    import ast

    # what reads sources is imported only where there is something to read
    from launcher.upstream.source.packages import Module, Sources, Tree

FORM = 4
"""Of the JSON; part of a cache entry's name."""

Facts = Mapping[str, Any]


def read(
    backend: Backend, trees: Mapping[str, Tree], externals: Mapping[str, Sequence[Any]], stages: Sequence[str]
) -> dict[str, Any]:
    """Everything about these stages of a backend, parsed now.

    `externals` are the choices of types that live in packages which are not among the trees. A stage
    whose script or dataclasses cannot be read stands under `unreadable` with the reason. `absent` are
    files that were looked for and are not there.
    """
    from launcher.upstream.source.packages import Sources

    entries = backend.STAGES.values()
    optional = [key for key in ("tables", "models") if any(getattr(e, key) for e in entries)]
    kinds = {stage: backend.STAGES[stage].behaves_as or stage for stage in stages}
    described = [stage for stage, kind in kinds.items() if backend.CHECKOUT and any(behaviour.of_script(kind))]
    if described:
        optional.append("behaviours")
    keys = ("stages", "classes", "paths", "fields", "externals", *optional, "unreadable", "files")
    facts: dict[str, Any] = {**{key: {} for key in keys}, "absent": []}
    # what a script does is read in upstream's own packages only: the same whatever else is here
    own = {name: tree for name, tree in trees.items() if name in backend.PACKAGES}
    for stage in stages:
        sources, walked = Sources(trees), Sources(own)
        try:
            script = script_in(trees, backend.STAGES[stage])
            if digest(trees, script) is None:
                raise LookupError(f"it has no {script}")
            if script != backend.STAGES[stage].script:
                facts.setdefault("renamed", {})[stage] = script
            _read_stage(backend, stage, trees, sources, walked, externals, facts)
            if (tables := backend.STAGES[stage].tables) is not None:
                facts["tables"][stage] = _tables(walked, *tables)
            if (places := backend.STAGES[stage].models) is not None:
                facts["models"][stage] = _models(sources, *places, backend.STAGES[stage].own_shapes)
            if stage in described:
                facts["behaviours"][stage] = behaviour.read(walked, kinds[stage], script)
        except (LookupError, OSError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            facts["unreadable"][stage] = str(error) or type(error).__name__
        facts["files"] |= sources.digests | walked.digests
        facts["absent"] += sources.absent | walked.absent
    facts["absent"] = sorted(set(facts["absent"]))
    facts["files"] = dict(sorted(facts["files"].items()))
    facts["fields"] = dict(sorted(facts["fields"].items()))
    return facts


def script_in(trees: Mapping[str, Tree], entry: Entry) -> str:
    """The file of an entry script in a source: under its announced name where that is there."""
    if entry.renamed and digest(trees, entry.renamed) is not None:
        return entry.renamed
    return entry.script


def _read_stage(
    backend: Backend,
    stage: str,
    trees: Mapping[str, Tree],
    sources: Sources,
    walked: Sources,
    externals: Mapping[str, Sequence[Any]],
    facts: dict[str, Any],
) -> None:
    from launcher.upstream.source import reads
    from launcher.upstream.source.fields import read_fields

    entry = backend.STAGES[stage]
    script = script_in(trees, entry)
    try:
        classes = reads.entry_classes(walked, script)
    except LookupError:
        # a script that builds its parser in a way of its own
        classes = list(entry.classes)
    fields = read_fields(sources, classes, {**externals, **backend.COMPUTED}, takes_none=backend.TAKES_NONE)
    declared = fields
    fields = reads.with_own_defaults(walked, script, fields)
    if absent := sorted(entry.at(fields).names.needed - fields.keys()):
        raise LookupError(f"it has no {', '.join(absent)}")
    path = reads.find(walked, script, classes, fields, entry.recorders)
    if not any(path.reads.values()):
        # nothing was followed: that says nothing about any argument
        path = ScriptPath()
    keys = []
    for name, known in fields.items():
        # a default that a script gives its parser is that of no other script with the same dataclass
        owner = known.owner if known == declared[name] else f"{known.owner}@{stage}"
        keys.append(f"{owner}.{known.name}")
    facts["stages"][stage] = keys
    facts["classes"][stage] = [list(one) for one in classes]
    facts["paths"][stage] = {
        "reads": {name: [[one.where, *one.when] for one in found] for name, found in path.reads.items()},
        "shadows": {name: [one.where, *one.by] for name, one in path.shadows.items()},
        "refusals": [{**asdict(one), "when": list(one.when)} for one in path.refusals],
    }
    for key, known in zip(keys, fields.values(), strict=True):
        facts["fields"][key] = field_as_json(known)
        if known.external and known.external.partition(".")[0] not in backend.PACKAGES:
            facts["externals"][known.external] = list(known.choices)


def _models(
    sources: Sources, named: tuple[str, str], configured: tuple[str, str], own: tuple[str, str] | None
) -> dict[str, Any]:
    """The models that a script can build, by hub name, and the names of configs: its library's and its own.

    A library that is not among the trees has none: its source is not here.
    """
    import ast

    module, library = sources.module(named[0]), sources.module(configured[0])
    models = sources.evaluate(module, module.constants.get(named[1])) if module else None
    made = library.classes.get(configured[1]) if library is not None else None
    functions = [node for node in made.body if isinstance(node, ast.FunctionDef)] if made else []
    # a config of a given size takes the vocabulary and no other size
    sized = [f for f in functions if [a.arg for a in (*f.args.args, *f.args.kwonlyargs)] == ["cls", "vocab_size"]]
    configs = {function.name for function in sized}
    if own is not None:
        configs |= _keys(sources, *own)
    return {"names": models if isinstance(models, dict) else {}, "configs": sorted(configs)}


def _keys(sources: Sources, where: str, name: str) -> set[str]:
    """The texts under which a mapping of a module has something; none where the module is not there."""
    import ast

    module = sources.module(where)
    table = None if module is None else module.constants.get(name)
    if module is None or not isinstance(table, ast.Dict):
        return set()
    keys = [sources.evaluate(module, key) for key in table.keys]
    return {key for key in keys if isinstance(key, str)}


def _tables(sources: Sources, where: str, names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """The texts that a script looks up in these mappings of a module, each with the parameters of the
    function that it stands for. A mapping that is not there, or that the module changes later, is none.
    """
    import ast

    module, tables = sources.module(where), {}
    if module is None:
        return {}
    changed = set()
    for node in ast.walk(module.tree):
        match node:
            case (
                ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                | ast.Attribute(value=ast.Name(id=name), attr="update" | "setdefault")
                | ast.AugAssign(target=ast.Name(id=name))
            ):
                changed.add(name)
    for name in names:
        table = module.constants.get(name)
        if not isinstance(table, ast.Dict) or name in changed:
            continue
        keys = [sources.evaluate(module, key) for key in table.keys]
        if all(isinstance(key, str) for key in keys):
            functions = [_parameters(sources, module, value) for value in table.values]
            tables[name] = dict(zip(keys, functions, strict=True))
    return tables


def _parameters(sources: Sources, module: Module, node: ast.expr) -> list[str]:
    """The parameters of a function that stands alone or first in a tuple; `**` for any others."""
    import ast

    node = node.elts[0] if isinstance(node, ast.Tuple) and node.elts else node
    origin = sources.resolve(module, node.id) if isinstance(node, ast.Name) else None
    function = origin[0].functions.get(origin[1]) if origin is not None else None
    if function is None:
        return []
    taken = function.args
    names = [one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    return [*names, "**"] if taken.kwarg is not None else names


def schema_of(
    facts: Facts, backend: Backend, stage: str, source: Literal["source", "snapshot"], version: str
) -> Schema:
    """The `Schema` of one entry script (`stage` is its key in `STAGES`).

    Raises LookupError with the reason where it is unreadable.
    """
    entry = backend.STAGES[stage]
    if (reason := facts.get("unreadable", {}).get(stage)) is not None:
        raise LookupError(reason)
    if stage not in facts["stages"]:
        # taken before this script was started from here
        raise LookupError(f"nothing was read of {entry.script}")
    fields = {known.name: known for known in (field_from_json(facts["fields"][key]) for key in facts["stages"][stage])}
    owners = [known.owner for known in fields.values()]
    paths = facts.get("paths", {})
    models = facts.get("models", {}).get(stage, {})
    return Schema(
        backend=backend.NAME,
        stage=entry.stage or stage,
        entry=stage,
        script=facts.get("renamed", {}).get(stage, entry.script),
        source=source,
        version=version,
        fields=fields,
        digests=facts["files"],
        splits=entry.at(fields).splits,
        by_file=entry.by_file & fields.keys(),
        owner=entry.owner if entry.owner in owners else max(set(owners), key=owners.count),
        path=_script_path(paths.get(stage) or {}),
        # other scripts that parse the same dataclasses, as far as they were read
        beside={
            other.script: _script_path(paths[name]).reads
            for name, other in backend.STAGES.items()
            if other.script in entry.beside and name in paths
        },
        tables=facts.get("tables", {}).get(stage, {}),
        models=models.get("names", {}),
        configs=frozenset(models.get("configs", ())),
        behaviours=facts.get("behaviours", {}).get(stage, {}),
    )


def _script_path(data: Mapping[str, Any]) -> ScriptPath:
    return ScriptPath(
        reads={
            name: tuple(Read(where, tuple(when)) for where, *when in found)
            for name, found in data.get("reads", {}).items()
        },
        shadows={name: Shadow(where, tuple(by)) for name, (where, *by) in data.get("shadows", {}).items()},
        refusals=tuple(Refusal(**{**one, "when": tuple(one["when"])}) for one in data.get("refusals", ())),
    )


def cached(
    backend: Backend,
    trees: Mapping[str, Tree],
    externals: Mapping[str, Sequence[Any]],
    stage: str,
    before_reading: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """`read` of one stage, remembered by the content of every file that was read.

    An entry is used only while all those files still have the same sha256, and none is there now that
    was looked for in vain; a folder that cannot be written costs time, nothing else. Several processes
    may write at once: the last one stays.
    """
    script = digest(trees, script_in(trees, backend.STAGES[stage])) or ""
    name = hashlib.sha256(f"{FORM} {_reader()} {backend.NAME} {stage} {script}".encode())
    place = cache_folder() / f"{name.hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        known: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        answers = (stage in known["stages"] and known["files"]) or stage in known["unreadable"]
        files = {**known["files"], **dict.fromkeys(known["absent"])}
        if answers and all(digest(trees, label) == sha for label, sha in files.items()):
            return known
    if before_reading is not None:
        before_reading()
    # only where there is something to write
    import tempfile

    fresh = read(backend, trees, externals, [stage])
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=place.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(fresh, stream, separators=(",", ":"))
        os.replace(scratch, place)
    return fresh


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification: a relative path does not count
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return folder / "launch" / "sources"


def digest(trees: Mapping[str, Tree], label: str) -> str | None:
    """The sha256 of a file that is known as `package/path/below.py`."""
    package, _, below = label.partition("/")
    raw = trees[package].read(below) if package in trees else None
    return None if raw is None else hashlib.sha256(raw).hexdigest()


@cache
def _reader() -> str:
    """What reads the sources, by content: another version of it may find other facts."""
    files = [PACKAGE / "upstream" / f"{name}.py" for name in ("schema", "facts", "behaviour")]
    files += sorted((PACKAGE / "upstream" / "source").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
