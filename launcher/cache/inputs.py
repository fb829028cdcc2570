"""What a run depends on, by content: data, tokenizer, model, DeepSpeed file, entry script.

The manifest keeps it, and the next attempt compares: a resume continues in the middle of something.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.artifacts.fingerprint import READERS, MissingContent
from launcher.dataset import mixture
from launcher.machine import codec
from launcher.paths import exists
from launcher.plan.plan import Plan
from launcher.upstream import facts

Contents = Sequence[Mapping[str, Any]]
"""Mappings of `role`, `name` and `digest`, which is None if nothing local knows it; `files` are the
digests of local files, by name."""

FILES_KEPT = 1000
"""Of one data set or model; of more, only their common digest is kept."""


def of_plan(plan: Plan) -> list[dict[str, Any]]:
    """What a later attempt must find unchanged: for the manifest (`contents`).

    Raises MissingContent if something local cannot be read.
    """
    values = plan.values
    stage = plan.stage
    contents = []
    for name in data_names(plan):
        if exists(Path(name)):
            contents.append(_read_record("data", name, None))
        else:
            contents.append(_make_record("data", name, None))
    model = values.get(stage.entry.names.model)
    revision = values.get("model_revision")
    tokenizer = values.get("tokenizer_name_or_path") or model
    tokenizer_revision = values.get("tokenizer_revision") or revision
    if model:
        contents.append(_read_record("model", model, revision))
    if tokenizer:
        contents.append(_read_record("tokenizer", tokenizer, tokenizer_revision))
    if stage.deepspeed is not None:
        # a file that cannot be read is reported elsewhere
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(stage.deepspeed.read_bytes()).hexdigest()
            contents.append(_make_record("deepspeed", str(stage.deepspeed), digest))
    script = stage.entry.script
    code = facts.digest(stage.upstream.packages, script) or stage.schema.digests.get(script)
    contents.append(_make_record("code", script, code))
    return contents


def data_names(plan: Plan) -> list[str]:
    """The files, folders and names of the hub that a stage reads its data from."""
    mixed = mixture.of_values(plan.values, os.environ)
    if mixed is not None:
        return mixed.names()
    data = plan.values.get(plan.stage.entry.names.data)
    if isinstance(data, list):
        return [str(name) for name in data[::2]]
    return [str(data)] if data else []


def _read_record(role: str, name: str, revision: str | None) -> dict[str, Any]:
    content = READERS[role](name, revision)
    if content.kind == "name":
        # of a name on the hub whose commit is unknown here the content is unknown
        return _make_record(role, content.name, None)
    record = _make_record(role, content.name, content.digest)
    if content.kind in ("file", "folder"):
        record["files"] = {}
        if len(content.files) <= FILES_KEPT:
            record["files"] = {file.name: file.digest for file in content.files}
    return record


def _make_record(role: str, name: str, digest: str | None) -> dict[str, Any]:
    return {"role": role, "name": name, "digest": digest}


def digests(listed: object, role: str) -> list[Any]:
    """The digests of one role; none if `listed` is no list of contents."""
    return [record.get("digest") for record in _parse_records(listed) if record.get("role") == role]


def names(listed: Contents, role: str) -> str:
    return ", ".join(str(record.get("name")) for record in listed if record.get("role") == role)


def _parse_records(listed: object) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = codec.fit_value(listed, list[Mapping[str, Any]], [])
    return records


def changed(listed: object, cwd: Path) -> list[dict[str, Any]]:
    """What is not as `of_plan` found it: for each file `role`, `name`, `file`, `before`, `after`.

    `after` is None if it is gone or cannot be read. Relative names start at `cwd`.
    """
    changes: list[dict[str, Any]] = []
    for record in _parse_records(listed):
        if isinstance(record.get("files"), dict):
            changes += _find_changes(record, cwd)
    return changes


def _find_changes(record: Mapping[str, Any], cwd: Path) -> Iterator[dict[str, Any]]:
    role = str(record.get("role"))
    name = str(record.get("name"))
    digest = record.get("digest")
    change = {"role": role, "name": name}
    try:
        content = READERS[role](str(cwd / name), None)
    except (KeyError, MissingContent):
        yield {**change, "file": name, "before": digest, "after": None}
        return
    if content.digest == digest:
        return
    before = record["files"]
    after = {file.name: file.digest for file in content.files}
    if not before:
        before = {name: digest}
        after = {name: content.digest}
    for file in sorted({*before, *after}):
        if before.get(file) != after.get(file):
            yield {**change, "file": file, "before": before.get(file), "after": after.get(file)}
