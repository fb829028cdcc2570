"""What one upstream source says about its entry scripts: read from the trees, kept as plain JSON.

The committed snapshots, the cache and what was just read have the same form; `build_schema` makes a
`Schema` of any of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.files import write_text
from launcher.lazy_dataclass import dataclass
from launcher.paths import PACKAGE
from launcher.upstream import behaviour
from launcher.upstream.schema import Path as ScriptPath
from launcher.upstream.schema import Read, Refusal, Schema, Shadow, parse_field, render_field
from launcher.upstream.trainers import Backend, Entry

if TYPE_CHECKING:
    # what reads sources is imported only where there is something to read
    from launcher.upstream.source.packages import Sources, Tree

FORM = 4
"""Of the JSON; part of a cache entry's name."""

FactsRecord = Mapping[str, Any]


def read_facts(
    backend: Backend,
    trees: Mapping[str, Tree],
    externals: Mapping[str, Sequence[Any]],
    stages: Sequence[str],
) -> dict[str, Any]:
    """Everything about these stages of a backend, parsed now.

    `externals` are the choices of types that live in packages which are not among the trees. A
    stage whose script or dataclasses cannot be read stands under `unreadable` with the reason.
    `absent` are files that were looked for and are not there.
    """
    from launcher.upstream.source.packages import Sources

    reading = _SourceFacts(backend, externals)
    # what a script does is read in upstream's own packages only: the same whatever else is here
    own = {name: tree for name, tree in trees.items() if name in backend.PACKAGES}
    for stage in stages:
        sources = Sources(trees)
        walked = Sources(own)
        try:
            script = find_script(trees, backend.STAGES[stage])
            if digest(trees, script) is None:
                raise LookupError(f"it has no {script}")
            reading.add(stage, script, sources, walked)
        except (LookupError, OSError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            reading.unreadable[stage] = str(error) or type(error).__name__
        reading.files |= sources.digests | walked.digests
        reading.absent |= sources.absent | walked.absent
    return reading.as_json(stages)


def find_script(trees: Mapping[str, Tree], entry: Entry) -> str:
    """The file of an entry script in a source: its announced new name if that file is there."""
    if entry.renamed and digest(trees, entry.renamed) is not None:
        return entry.renamed
    return entry.script


@dataclass(slots=True)
class _SourceFacts:
    """The facts so far, each by stage but for `fields` (`Owner.name`), `externals` and `files`."""

    backend: Backend
    known_externals: Mapping[str, Sequence[Any]]
    stages: dict[str, list[str]] = field(default_factory=dict)
    classes: dict[str, list[list[str]]] = field(default_factory=dict)
    paths: dict[str, object] = field(default_factory=dict)
    fields: dict[str, object] = field(default_factory=dict)
    externals: dict[str, list[object]] = field(default_factory=dict)
    tables: dict[str, object] = field(default_factory=dict)
    models: dict[str, object] = field(default_factory=dict)
    behaviours: dict[str, object] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)

    def add(self, stage: str, script: str, sources: Sources, walked: Sources) -> None:
        """Read one entry script. Raises LookupError with the reason if it cannot be read."""
        from launcher.upstream.source import tables

        entry = self.backend.STAGES[stage]
        if script != entry.script:
            self.renamed[stage] = script
        self._add_path(stage, script, sources, walked)
        if entry.tables is not None:
            module, names = entry.tables
            self.tables[stage] = tables.map_parameters(walked, module, names)
        if entry.models is not None:
            self.models[stage] = _read_models(sources, entry.models, entry.own_shapes)
        if self._is_described(stage):
            kind = entry.behaves_as or stage
            self.behaviours[stage] = behaviour.observe_behaviours(walked, kind, script)

    def _is_described(self, stage: str) -> bool:
        """Whether rules ask what this script does at one commit or another."""
        if not self.backend.CHECKOUT:
            return False
        kind = self.backend.STAGES[stage].behaves_as or stage
        return any(behaviour.list_behaviours(kind))

    def _add_path(self, stage: str, script: str, sources: Sources, walked: Sources) -> None:
        from launcher.upstream.source import reads
        from launcher.upstream.source.fields import read_fields

        entry = self.backend.STAGES[stage]
        classes = list(entry.classes)
        with suppress(LookupError):
            # or else the script builds its parser in a way of its own
            classes = reads.find_entry_classes(walked, script)
        choices = {**self.known_externals, **self.backend.COMPUTED}
        declared = read_fields(sources, classes, choices, takes_none=self.backend.TAKES_NONE)
        fields = reads.apply_own_defaults(walked, script, declared)
        absent = sorted(entry.at(fields).names.needed - fields.keys())
        if absent:
            raise LookupError(f"it has no {', '.join(absent)}")
        path = reads.read_path(walked, script, classes, fields, entry.recorders)
        if not any(path.reads.values()):
            # nothing was followed: that says nothing about any argument
            path = ScriptPath()
        self.classes[stage] = [list(names) for names in classes]
        self.paths[stage] = _path_as_json(path)
        self.stages[stage] = []
        for name, argument in fields.items():
            key = f"{argument.owner}.{name}"
            if argument != declared[name]:
                # a default that a script sets itself is that of no other script of the dataclass
                key = f"{argument.owner}@{stage}.{name}"
            self.stages[stage].append(key)
            self.fields[key] = render_field(argument)
            external = argument.external
            if external and external.partition(".")[0] not in self.backend.PACKAGES:
                self.externals[external] = list(argument.choices)

    def as_json(self, stages: Sequence[str]) -> dict[str, Any]:
        entries = self.backend.STAGES.values()
        facts: dict[str, Any] = {
            "stages": self.stages,
            "classes": self.classes,
            "paths": self.paths,
            "fields": dict(sorted(self.fields.items())),
            "externals": self.externals,
        }
        if any(entry.tables for entry in entries):
            facts["tables"] = self.tables
        if any(entry.models for entry in entries):
            facts["models"] = self.models
        if any(map(self._is_described, stages)):
            facts["behaviours"] = self.behaviours
        facts["unreadable"] = self.unreadable
        facts["files"] = dict(sorted(self.files.items()))
        facts["absent"] = sorted(self.absent)
        if self.renamed:
            facts["renamed"] = self.renamed
        return facts


def _read_models(
    sources: Sources,
    listings: tuple[tuple[str, str], tuple[str, str]],
    own_shapes: tuple[str, str] | None,
) -> dict[str, object]:
    """The models that a script can build, by hub name, and the names of configs.

    These are its library's and its own; a library that is not among the trees has none.
    """
    from launcher.upstream.source import tables

    (where, constant), (library, owner) = listings
    module = sources.module(where)
    names = None
    if module is not None:
        names = sources.evaluate(module, module.constants.get(constant))
    configs = tables.list_sized_configs(sources, library, owner)
    if own_shapes is not None:
        configs |= tables.list_keys(sources, *own_shapes)
    return {"names": names if isinstance(names, dict) else {}, "configs": sorted(configs)}


def build_schema(
    facts: FactsRecord,
    backend: Backend,
    stage: str,
    source: Literal["source", "snapshot"],
    version: str,
) -> Schema:
    """The `Schema` of one entry script (`stage` is its key in `STAGES`).

    Raises LookupError with the reason if it is unreadable.
    """
    entry = backend.STAGES[stage]
    reason = facts.get("unreadable", {}).get(stage)
    if reason is not None:
        raise LookupError(reason)
    if stage not in facts["stages"]:
        # taken before this script was started from here
        raise LookupError(f"nothing was read of {entry.script}")
    arguments = [parse_field(facts["fields"][key]) for key in facts["stages"][stage]]
    fields = {argument.name: argument for argument in arguments}
    owners = [argument.owner for argument in arguments]
    owner = entry.owner
    if owner not in owners:
        owner = max(set(owners), key=owners.count)
    paths = facts.get("paths", {})
    # other scripts that parse the same dataclasses, as far as they were read
    beside = {}
    for name, other in backend.STAGES.items():
        if other.script in entry.beside and name in paths:
            beside[other.script] = _path_from_json(paths[name]).reads
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
        owner=owner,
        path=_path_from_json(paths.get(stage, {})),
        beside=beside,
        tables=facts.get("tables", {}).get(stage, {}),
        models=models.get("names", {}),
        configs=frozenset(models.get("configs", ())),
        behaviours=facts.get("behaviours", {}).get(stage, {}),
    )


def _path_as_json(path: ScriptPath) -> dict[str, object]:
    reads = {}
    for name, places in path.reads.items():
        reads[name] = [[read.where, *read.when] for read in places]
    shadows = {}
    for name, shadow in path.shadows.items():
        shadows[name] = [shadow.where, *shadow.by]
    refusals = []
    for refusal in path.refusals:
        refusals.append({**asdict(refusal), "when": list(refusal.when)})
    return {"reads": reads, "shadows": shadows, "refusals": refusals}


def _path_from_json(data: FactsRecord) -> ScriptPath:
    reads = {}
    for name, places in data.get("reads", {}).items():
        reads[name] = tuple(Read(where, tuple(when)) for where, *when in places)
    shadows = {}
    for name, (where, *by) in data.get("shadows", {}).items():
        shadows[name] = Shadow(where, tuple(by))
    refusals = []
    for entry in data.get("refusals", ()):
        refusal = Refusal(**entry)
        refusals.append(replace(refusal, when=tuple(refusal.when)))
    return ScriptPath(reads=reads, shadows=shadows, refusals=tuple(refusals))


def read_cached_facts(
    backend: Backend,
    trees: Mapping[str, Tree],
    externals: Mapping[str, Sequence[Any]],
    stage: str,
    before_reading: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """`read_facts` of one stage, remembered by the content of every file that was read.

    An entry is used only while all those files still have the same sha256, and none is there now
    that was looked for in vain; a folder that cannot be written costs time, nothing else. Several
    processes may write at once: the last one stays.
    """
    script = digest(trees, find_script(trees, backend.STAGES[stage])) or ""
    name = hashlib.sha256(f"{FORM} {_digest_reader()} {backend.NAME} {stage} {script}".encode())
    place = cache_folder() / f"{name.hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        kept: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        if _answers(kept, stage) and _is_current(kept, trees):
            return kept
    if before_reading is not None:
        before_reading()
    fresh = read_facts(backend, trees, externals, [stage])
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, json.dumps(fresh, separators=(",", ":")))
    return fresh


def _answers(kept: FactsRecord, stage: str) -> bool:
    """Whether a cache entry holds what was read of a stage, or why nothing could be."""
    if stage in kept["unreadable"]:
        return True
    return stage in kept["stages"] and bool(kept["files"])


def _is_current(kept: FactsRecord, trees: Mapping[str, Tree]) -> bool:
    """Whether the files that were read are the same, and those that lacked still lack."""
    if any(digest(trees, label) is not None for label in kept["absent"]):
        return False
    return all(digest(trees, label) == sha for label, sha in kept["files"].items())


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
def _digest_reader() -> str:
    """What reads the sources, by content: another version of it may find other facts."""
    folder = PACKAGE / "upstream"
    files = [folder / f"{name}.py" for name in ("schema", "facts", "behaviour")]
    files += sorted((folder / "source").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
