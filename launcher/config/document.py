"""One YAML file -> `Document`: plain values, and the file and line of every key.

Built of YAML events and not by PyYAML's constructor: that keeps line numbers, finds duplicate keys,
cannot be made to explode, and reads `1e-5` as the number that its author meant (PyYAML
follows YAML 1.1 and reads a string).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from launcher import files
from launcher.errors import Finding, InvalidConfig, launch_finding
from launcher.files import open_regular
from launcher.paths import canonical, is_dir

SUFFIXES = frozenset({".yaml", ".yml"})
MAX_BYTES = 4 * 2**20
_FORM = "a stage file is `stage: sft` or `stage: dpo` and `args:` with names below; a pipeline is `stages:`"
_MISSPELT = "the mistake may be a line earlier: a missing `: `, quote or bracket"

MAX_DEPTH = 64
MAX_NODES = 100_000
MAX_KEYS = 1_000
"""Keys of a mapping whose names mean something: those below an argument may be more."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
# An exponent without a sign or a point (`12e4567`) is a commit more often than a number: it stays text.
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|(0|[1-9][0-9]*)\.[0-9]*)([eE][-+]?[0-9]+)?|(0|[1-9][0-9]*)[eE][-+][0-9]+)\Z")
_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = {"", "~", "null", "Null", "NULL"}
_TAG = "tag:yaml.org,2002:"
# the mappings whose keys are names of ours or of upstream's
_NAMED = {"", "args", "batch", "expect", "probe", "open_instruct", "open_instruct.args"}
KEY = re.compile(r"[A-Za-z_][\w.-]*\Z")
# No process can be given a NUL, no terminal a lone surrogate.
UNUSABLE = re.compile("[\x00\ud800-\udfff]")
_SHOWN = {type(None): "nothing", dict: "a mapping", list: "a list"}
_COLLECTIONS = {None, "!", f"{_TAG}map", f"{_TAG}seq"}


KEPT = "# lost:"
"""What begins a comment in which `--fix` keeps an argument whose meaning is lost, until somebody has decided."""
_KEPT_LINE = re.compile(rf"[ \t]*{KEPT}[ \t]*([\w.-]+)[ \t]*:[ \t]*(.*?)[ \t]*(?:#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKey:
    """An argument in such a comment, with its value as it was written; `line` is 1-based."""

    key: str
    value: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Document:
    """What one file holds. `faults` are keys that stand twice or cannot be keys: the rest was read."""

    value: dict[str, Any]
    origins: dict[str, Origin]
    faults: tuple[Finding, ...] = ()
    kept: tuple[KeptKey, ...] = ()


SCRIPTS = frozenset({".sh", ".bash", ".slurm", ".sbatch"})
"""How the names of shell scripts end, and of batch scripts of Slurm's."""


def read_yaml(path: Path) -> Document:
    """The mapping in a YAML file and the place of each of its keys.

    Raises InvalidConfig: missing, a directory, empty, binary, not UTF-8, broken, not a mapping.
    """
    text = read_text(path)
    named = canonical(path).suffix in SUFFIXES
    try:
        document = parse(path, text)
        if named or not document.faults:
            return document
        found = document.faults
    except InvalidConfig as error:
        if named:
            raise
        found = error.findings
    if path.suffix in SCRIPTS:
        help = f"launch init --from {path} makes a stage file of it"
        raise refused(path, "foreign-file", "this is a script, not a stage file", 1, help)
    # a link, or a word on a command line, may name any file: what it holds is not shown
    message = "not a stage file, and its name does not end in .yaml or .yml"
    hidden = {"not-a-mapping", "empty-file"}
    raise InvalidConfig(f if f.code in hidden else replace(f, message=message, help=None, key=None) for f in found)


def parse(path: Path, text: str) -> Document:
    """The mapping in a YAML text, as if it stood in the file; raises like `read_yaml`."""
    builder = Builder(str(path))
    try:
        value = builder.build(yaml.parse(text, Loader=LOADER))
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError) as error:
        raise InvalidConfig([*builder.findings, _broken(path, text, error)]) from None
    if value is None:
        raise refused(path, "empty-file", "the file holds no YAML", 1, _FORM)
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "one value"
        raise refused(path, "not-a-mapping", f"the file is {what}, not a mapping of keys to values", 1, _FORM)
    kept = _kept_keys(path, text) if KEPT in text else ()
    return Document(value, builder.origins, tuple(builder.findings), tuple(kept))


def _kept_keys(path: Path, text: str) -> Iterator[KeptKey]:
    for number, line in enumerate(text.splitlines(), start=1):
        found = _KEPT_LINE.match(line)
        if found is not None:
            yield KeptKey(key=found[1], value=found[2], file=str(path), line=number)


def _broken(path: Path, text: str, error: yaml.MarkedYAMLError | yaml.reader.ReaderError) -> Finding:
    if isinstance(error, yaml.reader.ReaderError):
        # libyaml counts bytes
        line = text.encode("utf-8", "replace").count(b"\n", 0, error.position) + 1
        what = f"the character U+{error.character:04X} is not allowed in YAML"
        return bad(path, "broken-yaml", what, line, "delete it, or save the file as UTF-8 text")
    mark = error.problem_mark or error.context_mark
    what = ", ".join(part for part in (error.context, error.problem) if part)
    if mark is None:
        return bad(path, "broken-yaml", what, None, _MISSPELT)
    # the end of the file lies one line beyond its last
    lines = [*text.splitlines()[: mark.line + 1], ""]
    with_tabs = mark.line < len(lines) and re.match(r"\s*\t", lines[mark.line])
    help = "YAML is never indented with tabs: use spaces" if with_tabs else _MISSPELT
    return bad(path, "broken-yaml", what, min(mark.line + 1, max(1, len(lines) - 1)), help)


def _near(path: Path) -> str | None:
    """Advice about a file that is not there: names like it in the same folder."""
    if "=" in path.name:
        return "the stage file comes first: FILE KEY=VALUE"
    names = [name for name in files.names(path.parent) if name.endswith((".yaml", ".yml"))]
    if near := difflib.get_close_matches(path.name, names, n=3):
        return f"did you mean {' or '.join(str(path.parent / name) for name in near)}?"
    return None if path.is_absolute() else "a relative path starts where launch is started"


def read_text(path: Path) -> str:
    try:
        if is_dir(path):
            raise refused(path, "not-a-file", "this is a directory", help="name a file in it")
        with open_regular(path) as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise refused(path, "missing-file", "there is no such file", help=_near(path)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refused(path, "unreadable-file", f"cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise refused(path, "huge-file", f"larger than {MAX_BYTES >> 20} MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, message = raw.count(b"\n", 0, error.start) + 1, f"not UTF-8: byte 0x{raw[error.start]:02x}"
        raise refused(path, "not-utf8", message, line, "save it as UTF-8") from None
    if "\0" in text:
        line, help = text.count("\n", 0, text.index("\0")) + 1, "name a YAML file: a stage file, or a pipeline"
        raise refused(path, "binary-file", "a binary file, not YAML", line, help)
    return text


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

    @property
    def place(self) -> dict[str, Any]:
        return asdict(self)


def bad(path: Path, code: str, message: str, line: int | None = None, help: str | None = None) -> Finding:
    return launch_finding("error", code, message, help, file=str(path), line=line)


def refused(path: Path, code: str, message: str, line: int | None = None, help: str | None = None) -> InvalidConfig:
    """What to raise for an error after which nothing more can be said of a file."""
    return InvalidConfig(bad(path, code, message, line, help))


def misplaced(
    path: Path, origins: Mapping[str, Origin], key: str, code: str, message: str, help: str | None = None
) -> Finding:
    return launch_finding("error", code, message, help, key=key, **place_of(path, origins, key).place)


class Builder:
    """Builds plain values out of YAML events, noting where each key stands.

    `findings` collect what does not stop the reading: keys that stand twice or cannot be keys.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.origins: dict[str, Origin] = {}
        self.findings: list[Finding] = []
        self._anchors: dict[str, Any] = {}
        self._nodes = 0
        self._events: Iterator[Any] = iter(())

    def build(self, events: Iterator[Any]) -> Any:
        """The value of the only document; raises InvalidConfig where it cannot be read further."""
        self._events, root, documents = events, None, 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._stop("several-documents", "more than one YAML document", _line(event))
            elif isinstance(event, yaml.NodeEvent):
                root = self._value(event, "", 0)
        return root

    def _value(self, event: Any, path: str, depth: int) -> Any:
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                help = f"`&{event.anchor}` must come before it; quote a text that begins with `*`"
                self._stop("broken-yaml", f"undefined alias `*{event.anchor}`", line, help)
            return self._copied(self._anchors[event.anchor], depth, line)
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            self._count(depth, line)
            value = self._scalar(event, line)
        else:
            self._count(depth + 1, line)
            if event.tag not in _COLLECTIONS:
                self._stop("unknown-tag", f"the YAML tag `{event.tag}` is not supported", line)
            if isinstance(event, yaml.MappingStartEvent):
                value = self._mapping(path, depth + 1)
            else:
                value = []
                for below in self._until(yaml.SequenceEndEvent):
                    where = join(path, len(value))
                    self.origins[where] = Origin(self.file, _line(below))
                    value.append(self._value(below, where, depth + 1))
        if event.anchor:
            self._anchors[event.anchor] = value
        return value

    def _copied(self, value: Any, depth: int, line: int) -> Any:
        self._count(depth + isinstance(value, dict | list), line)
        if isinstance(value, dict):
            self._nodes += len(value)
            return {key: self._copied(below, depth + 1, line) for key, below in value.items()}
        return [self._copied(below, depth + 1, line) for below in value] if isinstance(value, list) else value

    def _until(self, end: type) -> Iterator[Any]:
        """The events that begin an entry of a collection, up to its end."""
        while not isinstance(event := next(self._events), end):
            yield event

    def _mapping(self, path: str, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for event in self._until(yaml.MappingEndEvent):
            key, line = self._value(event, join(path, "?"), depth), _line(event)
            # the author's own spelling: a key `on` or `1e3` is meant as text
            name = self._key(getattr(event, "value", "") or key, path, lines, line)
            value = self._value(next(self._events), join(path, "?" if name is None else name), depth)
            if name == "<<" and isinstance(value, dict | list):
                for source in value if isinstance(value, list) else [value]:
                    self._merge(values, source, path, line)
            elif name is not None:
                values[name] = value
        return values

    def _merge(self, values: dict[str, Any], source: Any, path: str, line: int) -> None:
        for key in source if isinstance(source, dict) else ():
            if key not in values:
                values[key] = source[key]
                self.origins[join(path, key)] = Origin(self.file, line)

    def _key(self, name: Any, path: str, lines: dict[str, int], line: int) -> str | None:
        """The name of a key, noted with its place; None for what cannot be one."""
        # below an argument (a mixer, model kwargs) any text may be a key
        if not isinstance(name, str) or not (KEY.match(name) or name == "<<" or path not in _NAMED):
            shown = f"`{name}`" if isinstance(name, str) else _SHOWN.get(type(name), "this")
            self._add("bad-key", f"{shown} cannot be a key: keys are plain names", line)
            return None
        if name in lines and name != "<<":
            message = f"`{name}` is also in line {lines[name]}"
            self._add("duplicate-key", message, line, join(path, name), "delete one of them")
        lines.setdefault(name, line)
        if len(lines) > MAX_KEYS and not path.removeprefix("open_instruct.").startswith("args."):
            where = f"`{path}`" if path else "the file"
            self._stop("too-large", f"{where} holds more than {MAX_KEYS:,} keys", line)
        self.origins[join(path, name)] = Origin(self.file, line)
        return name

    def _count(self, depth: int, line: int) -> None:
        if depth > MAX_DEPTH:
            self._stop("too-deep", f"nested deeper than {MAX_DEPTH} levels", line)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._stop("too-large", f"more than {MAX_NODES} values (aliases counted)", line)

    def _scalar(self, event: Any, line: int) -> Any:
        tag = event.tag
        if tag and tag != "!" and not tag.startswith(_TAG):
            self._stop("unknown-tag", f"the YAML tag `{tag}` is not supported", line)
        if (character := UNUSABLE.search(event.value)) is not None:
            self._stop("bad-character", f"the character U+{ord(character[0]):04X} is not allowed in a value", line)
        kind = tag.removeprefix(_TAG) if tag else None
        if kind in {"str", "!"} or (kind is None and not event.implicit[0]):
            return event.value
        if kind in {None, "int", "float", "bool", "null"}:
            return plain(event.value)
        self._stop("unknown-tag", f"the YAML tag `!!{kind}` is not supported", line)

    def _add(self, code: str, message: str, line: int, key: str | None = None, help: str | None = None) -> None:
        self.findings.append(replace(bad(Path(self.file), code, message, line, help), key=key))

    def _stop(self, code: str, message: str, line: int, help: str | None = None) -> NoReturn:
        self._add(code, message, line, help=help)
        raise InvalidConfig(self.findings)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def plain(text: str) -> Any:
    """What an unquoted YAML scalar means: null, a bool, an int, a float or the text itself.

    Dates, octals and sexagesimals stay text: upstream's parser is the one to judge them.
    """
    if text in _NULL:
        return None
    if text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if _INT.match(text) and len(text) < 400:
        return int(text)
    return float(text) if _FLOAT.match(text) else text


def join(path: str, step: str | int) -> str:
    """A dotted key: `path.name`, or `path[index]`."""
    return f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}" if path else step


Steps = tuple[str | int, ...]


def leaves(value: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """What is neither a mapping nor a list in a tree of them, with the steps that lead to each."""
    if isinstance(value, dict | list):
        for step, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(below, (*steps, step))
    else:
        yield steps, value


def nearest(origins: Mapping[str, Origin], key: str) -> Origin | None:
    """The place of `key`, or of the nearest key that encloses it."""
    while key and key not in origins:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return origins.get(key)


def place_of(path: Path, origins: Mapping[str, Origin], key: str) -> Origin:
    """The same, or the start of the file."""
    return nearest(origins, key) or Origin(str(path), 1)
