"""What a run depends on, by content: data, tokenizer, model, DeepSpeed file, entry script.

The manifest keeps it, and the next attempt compares: a resume goes on in the middle of something.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.artifacts.fingerprint import READERS, MissingContent
from launcher.dataset import mixture
from launcher.paths import exists
from launcher.plan.plan import Plan
from launcher.upstream import facts

Contents = Sequence[Mapping[str, Any]]
"""Mappings of `role`, `name` and `digest`, which is None where nothing local knows it; `files` are the
digests of what lies here, by name."""

FILES_KEPT = 1000
"""Of one data set or model; of more, only their common digest tells."""


def of_plan(plan: Plan) -> list[dict[str, Any]]:
    """What a later attempt must find unchanged: for the manifest (`contents`).

    Raises MissingContent where something local cannot be read.
    """
    return list(_contents(plan))


def _contents(plan: Plan) -> Iterator[dict[str, Any]]:
    values, stage = plan.values, plan.stage
    listed = _data(plan)
    model, revision = values.get(stage.entry.names.model), values.get("model_revision")
    named = [("data", name, None) for name in listed]
    named += [("model", model, revision)]
    tokenizer = values.get("tokenizer_name_or_path") or model
    named += [("tokenizer", tokenizer, values.get("tokenizer_revision") or revision)]
    for role, name, at in named:
        if role == "data" and not exists(Path(name)):
            yield _record(role, name, None)
        elif isinstance(name, str) and name:
            found = READERS[role](name, at)
            # a name on the hub whose commit is not known here says nothing of its content
            record = _record(role, found.name, None if found.kind == "name" else found.digest)
            if found.kind in ("file", "folder"):
                kept = found.files if len(found.files) <= FILES_KEPT else ()
                record["files"] = {file.name: file.digest for file in kept}
            yield record
    if stage.deepspeed is not None:
        # a file that cannot be read is reported elsewhere
        with contextlib.suppress(OSError):
            raw = stage.deepspeed.read_bytes()
            path = str(stage.deepspeed)
            yield _record("deepspeed", path, hashlib.sha256(raw).hexdigest())
    script = stage.entry.script
    code = facts.digest(stage.upstream.packages, script) or stage.schema.digests.get(script)
    yield _record("code", script, code)


def _data(plan: Plan) -> list[str]:
    """The files, folders and names of the hub that a stage reads its data from."""
    values = plan.values
    mixed = mixture.of_values(values, os.environ)
    if mixed is not None:
        return mixed.names()
    data = values.get(plan.stage.entry.names.data)
    if isinstance(data, list):
        return [str(name) for name in data[::2]]
    return [str(data)] if data else []


def _record(role: str, name: str, digest: str | None) -> dict[str, Any]:
    return {"role": role, "name": name, "digest": digest}


def digests(listed: object, role: str) -> list[Any]:
    """The digests of one role; of anything that is no such list, none."""
    return [record.get("digest") for record in _records(listed) if record.get("role") == role]


def names(listed: Contents, role: str) -> str:
    return ", ".join(str(record.get("name")) for record in listed if record.get("role") == role)


def changed(listed: object, cwd: Path) -> list[dict[str, Any]]:
    """What is not as `of_plan` found it: `role`, `name` and, a file each, `file`, `before` and `after`.

    `after` is None for what is gone or cannot be read. Relative names start at `cwd`.
    """
    local = [record for record in _records(listed) if isinstance(record.get("files"), dict)]
    return [change for record in local for change in _changes(record, cwd)]


def _records(listed: object) -> list[Mapping[str, Any]]:
    found = listed if isinstance(listed, list | tuple) else ()
    return [record for record in found if isinstance(record, Mapping)]


def _changes(record: Mapping[str, Any], cwd: Path) -> Iterator[dict[str, Any]]:
    role, name, digest = str(record.get("role")), str(record.get("name")), record.get("digest")
    change = {"role": role, "name": name}
    try:
        found = READERS[role](str(cwd / name), None)
    except (KeyError, MissingContent):
        yield {**change, "file": name, "before": digest, "after": None}
        return
    if found.digest == digest:
        return
    before, after = dict(record["files"]), {file.name: file.digest for file in found.files}
    if not before:
        before, after = {name: digest}, {name: found.digest}
    for file in sorted(before.keys() | after.keys()):
        if before.get(file) != after.get(file):
            yield {**change, "file": file, "before": before.get(file), "after": after.get(file)}
