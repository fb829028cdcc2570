"""What a run depends on, by content: data, tokenizer, model, DeepSpeed file, entry script.

The manifest keeps it, and the next attempt compares: a resume continues in the middle of something.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.artifacts.fingerprint import READERS, MissingContent
from launcher.dataset import mixture
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.paths import exists
from launcher.plan.plan import Plan
from launcher.stage.stage import Stage
from launcher.upstream import facts

Contents = Sequence[Mapping[str, Any]]
"""Each is a `ContentRecord` as JSON."""

FILES_KEPT = 1000
"""Of one data set or model; of more, only their common digest is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentRecord:
    """One thing that a run reads.

    `digest` is None if its content is unknown on this machine. `files` are the digests of its local
    files by name, empty if there are too many, and None if it has no local files.
    """

    role: str = ""
    name: str = ""
    digest: str | None = None
    files: Mapping[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        if self.files is None:
            del record["files"]
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A file that a run read and that changed since.

    `before` and `after` are digests. `after` is None if the file is gone or cannot be read.
    """

    role: str
    name: str
    file: str
    before: str | None
    after: str | None


def record_inputs(plan: Plan) -> list[dict[str, Any]]:
    """What a later attempt must find unchanged: for the manifest (`contents`).

    Raises MissingContent if something local cannot be read.
    """
    records = [*_read_data(plan), *_read_models(plan), *_read_code(plan.stage)]
    return [record.as_json() for record in records]


def _read_data(plan: Plan) -> Iterator[ContentRecord]:
    for name in list_data_names(plan):
        if exists(Path(name)):
            yield _read_content("data", name, None)
        else:
            yield ContentRecord(role="data", name=name)


def _read_models(plan: Plan) -> Iterator[ContentRecord]:
    """The model and its tokenizer."""
    values = plan.values
    model = values.get(plan.stage.entry.names.model)
    revision = values.get("model_revision")
    tokenizer = values.get("tokenizer_name_or_path") or model
    tokenizer_revision = values.get("tokenizer_revision") or revision
    if model:
        yield _read_content("model", model, revision)
    if tokenizer:
        yield _read_content("tokenizer", tokenizer, tokenizer_revision)


def _read_code(stage: Stage) -> Iterator[ContentRecord]:
    """The DeepSpeed file and the entry script."""
    if stage.deepspeed is not None:
        # a file that cannot be read is reported elsewhere
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(stage.deepspeed.read_bytes()).hexdigest()
            yield ContentRecord(role="deepspeed", name=str(stage.deepspeed), digest=digest)
    script = stage.entry.script
    yield ContentRecord(role="code", name=script, digest=code_digest(stage, script))


def code_digest(stage: Stage, label: str) -> str | None:
    """The digest of an upstream file here, else of the snapshot's; None if neither has it."""
    return facts.digest(stage.upstream.packages, label) or stage.schema.digests.get(label)


def list_data_names(plan: Plan) -> list[str]:
    """The files, folders and names of the hub that a stage reads its data from."""
    mixed = mixture.read_mixture(plan.values, os.environ)
    if mixed is not None:
        return mixed.names()
    data = plan.values.get(plan.stage.entry.names.data)
    if not data:
        return []
    if isinstance(data, list):
        # each name is followed by its amount
        return [str(name) for name in data[::2]]
    return [str(data)]


def _read_content(role: str, name: str, revision: str | None) -> ContentRecord:
    content = READERS[role](name, revision)
    if content.kind == "name":
        # on the hub, and its commit is unknown here
        return ContentRecord(role=role, name=content.name)
    files: dict[str, str] | None = None
    if content.kind in ("file", "folder"):
        files = {}
        if len(content.files) <= FILES_KEPT:
            files = content.digests()
    return ContentRecord(role=role, name=content.name, digest=content.digest, files=files)


def list_digests(listed: object, role: str) -> list[str | None]:
    """The digests of one role; none if `listed` is no list of contents."""
    return [record.digest for record in _parse_records(listed) if record.role == role]


def join_names(listed: Contents, role: str) -> str:
    return ", ".join(record.name for record in _parse_records(listed) if record.role == role)


def _parse_records(listed: object) -> list[ContentRecord]:
    records: list[ContentRecord] = codec.fit_value(listed, list[ContentRecord], [])
    return records


def compare_inputs(listed: object, cwd: Path) -> list[dict[str, Any]]:
    """The files that are not as `record_inputs` read them, each a `FileChange` as JSON.

    Relative names start at `cwd`.
    """
    changes: list[dict[str, Any]] = []
    for record in _parse_records(listed):
        if record.files is not None:
            changes += map(asdict, _find_changes(record, record.files, cwd))
    return changes


def _find_changes(
    record: ContentRecord, before: Mapping[str, str | None], cwd: Path
) -> Iterator[FileChange]:
    """Compare the files that were read `before` with those of now."""
    role = record.role
    name = record.name
    digest = record.digest
    try:
        content = READERS[role](str(cwd / name), None)
    except (KeyError, MissingContent):
        yield FileChange(role=role, name=name, file=name, before=digest, after=None)
        return
    if content.digest == digest:
        return
    after = content.digests()
    if not before:
        before = {name: digest}
        after = {name: content.digest}
    for file in sorted({*before, *after}):
        old = before.get(file)
        new = after.get(file)
        if old != new:
            yield FileChange(role=role, name=name, file=file, before=old, after=new)
