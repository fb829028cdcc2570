"""One YAML document -> plain values, and the file and line of every key.

Read event by event instead of through a constructor: that keeps line numbers, finds duplicate keys,
cannot be made to recurse or explode, and reads `1e-5` as the number that its author meant (PyYAML
follows YAML 1.1 and reads a string).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import Finding, InvalidConfig

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 64
MAX_NODES = 100_000

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = {"", "~", "null", "Null", "NULL"}
_TAG = "tag:yaml.org,2002:"
# the mappings whose keys are names of ours or of upstream's
_NAMED = {"", "args", "batch", "expect", "open_instruct", "open_instruct.args"}
KEY = re.compile(r"[A-Za-z_][\w.-]*\Z")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a file and 1-based line, or the text of an override."""

    file: str
    line: int | None = None
    override: str | None = None

    def __str__(self) -> str:
        if self.override is not None:
            return f"override `{self.override}`"
        return self.file if self.line is None else f"{self.file}:{self.line}"


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, Origin]]:
    """The mapping in a YAML file and the place of each of its keys.

    Raises InvalidConfig: missing, a directory, empty, binary, not UTF-8, broken, not a mapping.
    """
    text = _read_text(path)
    origins: dict[str, Origin] = {}
    try:
        value = Builder(str(path), origins).build(yaml.parse(text, Loader=LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise InvalidConfig(
            bad(path, "broken-yaml", what, mark.line + 1 if mark else None)
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = (
            f"the character U+{error.character:04X} is not allowed in YAML"
            if isinstance(error.character, int)
            else str(error.reason)
        )
        raise InvalidConfig(bad(path, "broken-yaml", what, line)) from None
    if value is None:
        raise InvalidConfig(bad(path, "empty-file", "the file holds no YAML", None))
    if not isinstance(value, dict):
        raise InvalidConfig(
            bad(path, "not-a-mapping", "the file is not a mapping of keys to values", 1)
        )
    return value, origins


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise InvalidConfig(bad(path, "not-a-file", "this is a directory", None))
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InvalidConfig(bad(path, "missing-file", "there is no such file", None)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            bad(path, "unreadable-file", f"cannot be read: {reason}", None)
        ) from None
    if len(raw) > MAX_BYTES:
        raise InvalidConfig(bad(path, "huge-file", f"larger than {MAX_BYTES >> 20} MiB", None))
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\0")) + 1
        raise InvalidConfig(bad(path, "binary-file", "a binary file, not YAML", line))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8: byte 0x{raw[error.start]:02x}"
        raise InvalidConfig(bad(path, "not-utf8", message, line)) from None


def bad(path: Path, code: str, message: str, line: int | None, help: str | None = None) -> Finding:
    return Finding(
        severity="error",
        layer="launch",
        code=code,
        message=message,
        help=help,
        file=str(path),
        line=line,
    )


class Builder:
    """Builds plain values out of YAML events, iteratively, noting where each key stands."""

    def __init__(self, file: str, origins: dict[str, Origin]) -> None:
        self.file = file
        self.origins = origins
        self.anchors: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.nodes = 0
        self.findings: list[Finding] = []

    def build(self, events: Iterator[Any]) -> Any:
        """The value of the only document; raises InvalidConfig with all duplicate and bad keys."""
        root: list[Any] = []
        stack: list[_Open] = []
        documents = 0
        for event in events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._stop("several-documents", "more than one YAML document", line)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                if len(stack) >= MAX_DEPTH:
                    self._stop("too-deep", f"nested deeper than {MAX_DEPTH} levels", line)
                self._count(1, line)
                new: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
                stack.append(_Open(new, self._path(stack), event.anchor, self.nodes, line))
                self._note(stack[-1].path, line)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                done = stack.pop()
                if done.anchor:
                    self.anchors[done.anchor] = done.value
                    self.sizes[done.anchor] = self.nodes - done.before + 1
                self._put(root, stack, done.value, done.line)
            elif isinstance(event, yaml.ScalarEvent):
                self._count(1, line)
                value = self._scalar(event, line)
                if event.anchor:
                    self.anchors[event.anchor] = value
                    self.sizes[event.anchor] = 1
                self._put(root, stack, value, line, event.value)
            elif isinstance(event, yaml.AliasEvent):
                name = str(event.anchor)
                if name not in self.anchors:
                    self._stop("broken-yaml", f"undefined alias `*{name}`", line)
                self._count(self.sizes[name], line)
                self._put(root, stack, _copy(self.anchors[name]), line)
        if self.findings:
            raise InvalidConfig(self.findings)
        return root[0] if root else None

    def _put(
        self, root: list[Any], stack: list[_Open], value: Any, line: int, raw: str = ""
    ) -> None:
        if not stack:
            root.append(value)
            return
        top = stack[-1]
        if isinstance(top.value, list):
            self._note(f"{top.path}[{len(top.value)}]", line)
            top.value.append(value)
        elif not top.has_key:
            self._key(top, value, line, raw)
        else:
            top.has_key = False
            if top.key == "<<" and isinstance(value, dict | list):
                merged = value if isinstance(value, list) else [value]
                for mapping in (m for m in merged if isinstance(m, dict)):
                    top.merged.update({k: v for k, v in mapping.items() if k not in top.merged})
                for key, inherited in top.merged.items():
                    top.value.setdefault(key, inherited)
                    self._note(join(top.path, key), line)
            elif top.key is not None:
                top.value[top.key] = value

    def _key(self, top: _Open, key: Any, line: int, raw: str) -> None:
        top.has_key = True
        # The author's own spelling: a key `on` or `1e3` is meant as text.
        name = raw if not isinstance(key, dict | list) and raw else key
        if (
            not isinstance(name, str)
            # below an argument (a mixer, model kwargs) any text may be a key
            or (not KEY.match(name) and name != "<<" and top.path in _NAMED)
        ):
            shown = name if isinstance(name, str) else type(name).__name__
            self._add("bad-key", f"`{shown}` cannot be a key: keys are plain names", line)
            top.key = None
            return
        if name in top.seen and name != "<<":
            first = top.seen[name]
            self._add(
                "duplicate-key",
                f"`{name}` stands here and in line {first}",
                line,
                join(top.path, name),
            )
        top.seen.setdefault(name, line)
        top.key = name
        self._note(join(top.path, name), line)

    def _path(self, stack: list[_Open]) -> str:
        if not stack:
            return ""
        top = stack[-1]
        if isinstance(top.value, list):
            return f"{top.path}[{len(top.value)}]"
        return join(top.path, str(top.key))

    def _note(self, path: str, line: int) -> None:
        if path:
            self.origins[path] = Origin(self.file, line)

    def _count(self, nodes: int, line: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self._stop("too-large", f"more than {MAX_NODES} values (aliases counted)", line)

    def _scalar(self, event: Any, line: int) -> Any:
        tag = event.tag
        if tag and tag != "!" and not tag.startswith(_TAG):
            self._stop("unknown-tag", f"the YAML tag `{tag}` is not supported", line)
        kind = tag.removeprefix(_TAG) if tag else None
        if kind in {"str", "!"} or (kind is None and not event.implicit[0]):
            return event.value
        if kind in {None, "int", "float", "bool", "null"}:
            return plain(event.value)
        self._stop("unknown-tag", f"the YAML tag `!!{kind}` is not supported", line)

    def _add(self, code: str, message: str, line: int, key: str | None = None) -> None:
        self.findings.append(
            Finding(
                severity="error",
                layer="launch",
                code=code,
                message=message,
                key=key,
                file=self.file,
                line=line,
            )
        )

    def _stop(self, code: str, message: str, line: int) -> Any:
        self._add(code, message, line)
        raise InvalidConfig(self.findings)


@dataclass(slots=True)
class _Open:
    """A mapping or sequence whose end has not been seen yet."""

    value: Any
    path: str
    anchor: str | None
    before: int
    line: int
    key: str | None = None
    has_key: bool = False
    seen: dict[str, int] = field(default_factory=dict)
    merged: dict[str, Any] = field(default_factory=dict)


def plain(text: str) -> Any:
    """What an unquoted YAML scalar means: null, a bool, an int, a float or the text itself.

    Dates, octals and sexagesimals stay text: upstream's parser is the one to judge them.
    """
    if text in _NULL:
        return None
    if text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if _INT.match(text):
        return int(text) if len(text) < 400 else text
    if _FLOAT.match(text):
        return float(text)
    return text


def join(path: str, key: str) -> str:
    """A dotted key."""
    return f"{path}.{key}" if path else key


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value
