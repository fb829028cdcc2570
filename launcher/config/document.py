"""One YAML file -> `Document`: plain values, and the file and line of every key.

Built of YAML events and not by PyYAML's constructor: that keeps line numbers, finds duplicate keys,
cannot be made to explode, and reads `1e-5` as the number that its author meant (PyYAML
follows YAML 1.1 and reads a string).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from launcher import files
from launcher.errors import Finding, InvalidConfig, launch_finding
from launcher.files import open_regular
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_dir, resolve_path

SUFFIXES = frozenset({".yaml", ".yml"})
MAX_BYTES = 4 * 2**20
_FORM = (
    "a stage file is `stage: sft` or `stage: dpo` and `args:` with names below; "
    "a pipeline is `stages:`"
)
_MISSPELT = "the mistake may be a line earlier: a missing `: `, quote or bracket"

MAX_DEPTH = 64
MAX_NODES = 100_000
MAX_KEYS = 1_000
"""Keys of a mapping whose names mean something: those below an argument may be more."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
# An exponent without a sign or a point (`12e4567`) is a commit more often than a number: it stays
# text.
_FLOAT = re.compile(
    r"[-+]?((\.[0-9]+|(0|[1-9][0-9]*)\.[0-9]*)([eE][-+]?[0-9]+)?|(0|[1-9][0-9]*)[eE][-+][0-9]+)\Z"
)
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
_TEXTS = {"!", f"{_TAG}str"}
_SCALARS = _TEXTS | {f"{_TAG}{kind}" for kind in ("int", "float", "bool", "null")}


KEPT = "# lost:"
"""What begins a comment in which `--fix` keeps an argument whose meaning is lost, until
somebody has decided.
"""
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
    """What one file holds. `faults` are keys that stand twice or cannot be keys: the rest was
    read.
    """

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
    is_yaml = resolve_path(path).suffix in SUFFIXES
    try:
        document = parse(path, text)
    except InvalidConfig as error:
        if is_yaml:
            raise
        findings = error.findings
    else:
        if is_yaml or not document.faults:
            return document
        findings = document.faults
    if path.suffix in SCRIPTS:
        help = f"launch init --from {path} makes a stage file of it"
        raise refuse_file(path, "foreign-file", "this is a script, not a stage file", 1, help)
    # a link, or a word on a command line, may name any file: what it holds is not shown
    message = "not a stage file, and its name does not end in .yaml or .yml"
    shown = []
    for finding in findings:
        if finding.code not in ("not-a-mapping", "empty-file"):
            finding = replace(finding, message=message, help=None, key=None)
        shown.append(finding)
    raise InvalidConfig(shown)


def parse(path: Path, text: str) -> Document:
    """The mapping in a YAML text, as if it stood in the file; raises like `read_yaml`."""
    builder = Builder(str(path))
    try:
        value = builder.build(text)
    except yaml.reader.ReaderError as error:
        fault = _report_bad_character(path, text, error)
        raise InvalidConfig([*builder.findings, fault]) from None
    except yaml.MarkedYAMLError as error:
        fault = _report_broken(path, text, error)
        raise InvalidConfig([*builder.findings, fault]) from None
    if value is None:
        raise refuse_file(path, "empty-file", "the file holds no YAML", 1, _FORM)
    if not isinstance(value, dict):
        what = "one value"
        if isinstance(value, list):
            what = "a list"
        message = f"the file is {what}, not a mapping of keys to values"
        raise refuse_file(path, "not-a-mapping", message, 1, _FORM)
    kept = _find_kept_keys(path, text)
    return Document(value, builder.origins, tuple(builder.findings), tuple(kept))


def _find_kept_keys(path: Path, text: str) -> Iterator[KeptKey]:
    if KEPT not in text:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        match = _KEPT_LINE.match(line)
        if match is not None:
            yield KeptKey(key=match[1], value=match[2], file=str(path), line=number)


def _report_bad_character(path: Path, text: str, error: yaml.reader.ReaderError) -> Finding:
    # libyaml counts bytes
    line = text.encode("utf-8", "replace").count(b"\n", 0, error.position) + 1
    message = f"the character U+{error.character:04X} is not allowed in YAML"
    return bad(path, "broken-yaml", message, line, "delete it, or save the file as UTF-8 text")


def _report_broken(path: Path, text: str, error: yaml.MarkedYAMLError) -> Finding:
    message = ", ".join(filter(None, (error.context, error.problem)))
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return bad(path, "broken-yaml", message, None, _MISSPELT)
    lines = text.splitlines()
    if mark.line >= len(lines):
        # the end of the file lies one line beyond its last
        return bad(path, "broken-yaml", message, max(1, len(lines)), _MISSPELT)
    help = _MISSPELT
    if re.match(r"\s*\t", lines[mark.line]):
        help = "YAML is never indented with tabs: use spaces"
    return bad(path, "broken-yaml", message, mark.line + 1, help)


def _suggest_path(path: Path) -> str | None:
    """Advice about a file that is not there: names like it in the same folder."""
    if "=" in path.name:
        return "the stage file comes first: FILE KEY=VALUE"
    names = [name for name in files.list_names(path.parent) if Path(name).suffix in SUFFIXES]
    near = difflib.get_close_matches(path.name, names, n=3)
    if near:
        paths = [str(path.parent / name) for name in near]
        return f"did you mean {' or '.join(paths)}?"
    if path.is_absolute():
        return None
    return "a relative path starts where launch is started"


def read_text(path: Path) -> str:
    try:
        if is_dir(path):
            raise refuse_file(path, "not-a-file", "this is a directory", help="name a file in it")
        with open_regular(path) as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        message = "there is no such file"
        raise refuse_file(path, "missing-file", message, help=_suggest_path(path)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse_file(path, "unreadable-file", f"cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        raise refuse_file(path, "huge-file", f"larger than {MAX_BYTES >> 20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8: byte 0x{content[error.start]:02x}"
        raise refuse_file(path, "not-utf8", message, line, "save it as UTF-8") from None
    before, nul, _ = text.partition("\0")
    if nul:
        line = before.count("\n") + 1
        help = "name a YAML file: a stage file, or a pipeline"
        raise refuse_file(path, "binary-file", "a binary file, not YAML", line, help)
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
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}"

    @property
    def place(self) -> dict[str, Any]:
        return asdict(self)


def bad(
    path: Path, code: str, message: str, line: int | None = None, help: str | None = None
) -> Finding:
    return launch_finding("error", code, message, help, file=str(path), line=line)


def refuse_file(
    path: Path, code: str, message: str, line: int | None = None, help: str | None = None
) -> InvalidConfig:
    """What to raise for an error after which nothing more can be said of a file."""
    return InvalidConfig(bad(path, code, message, line, help))


def report_misplaced(
    path: Path,
    origins: Mapping[str, Origin],
    key: str,
    code: str,
    message: str,
    help: str | None = None,
) -> Finding:
    place = find_place(path, origins, key).place
    return launch_finding("error", code, message, help, key=key, **place)


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

    def build(self, text: str) -> Any:
        """The value of the only document; raises InvalidConfig where it cannot be read further."""
        self._events = yaml.parse(text, Loader=LOADER)
        root = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    message = "more than one YAML document"
                    self._stop("several-documents", message, _find_line(event))
            elif isinstance(event, yaml.NodeEvent):
                root = self._build_value(event, "", 0)
        return root

    def _build_value(self, event: Any, path: str, depth: int) -> Any:
        line = _find_line(event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                help = f"`&{event.anchor}` must come before it; quote a text that begins with `*`"
                self._stop("broken-yaml", f"undefined alias `*{event.anchor}`", line, help)
            return self._copy_alias(self._anchors[event.anchor], depth, line)
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            self._count_node(depth, line)
            value = self._build_scalar(event, line)
        else:
            self._count_node(depth + 1, line)
            if event.tag not in _COLLECTIONS:
                self._stop_at_tag(event.tag, line)
            if isinstance(event, yaml.MappingStartEvent):
                value = self._build_mapping(path, depth + 1)
            else:
                value = self._build_list(path, depth + 1)
        if event.anchor:
            self._anchors[event.anchor] = value
        return value

    def _copy_alias(self, value: Any, depth: int, line: int) -> Any:
        """What an alias stands for: counted again, so that aliases of aliases cannot explode."""
        if not isinstance(value, dict | list):
            self._count_node(depth, line)
            return value
        below = depth + 1
        self._count_node(below, line)
        if isinstance(value, list):
            return [self._copy_alias(item, below, line) for item in value]
        self._nodes += len(value)
        return {key: self._copy_alias(item, below, line) for key, item in value.items()}

    def _read_until(self, end: type) -> Iterator[Any]:
        """The events that begin an entry of a collection, up to its end."""
        for event in self._events:
            if isinstance(event, end):
                return
            yield event

    def _build_list(self, path: str, depth: int) -> list[Any]:
        values: list[Any] = []
        for event in self._read_until(yaml.SequenceEndEvent):
            place = join(path, len(values))
            self.origins[place] = Origin(self.file, _find_line(event))
            values.append(self._build_value(event, place, depth))
        return values

    def _build_mapping(self, path: str, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for event in self._read_until(yaml.MappingEndEvent):
            line = _find_line(event)
            key = self._build_value(event, join(path, "?"), depth)
            # the author's own spelling: a key `on` or `1e3` is meant as text
            spelling = getattr(event, "value", "") or key
            name = self._record_key(spelling, path, lines, line)
            place = join(path, name or "?")
            value = self._build_value(next(self._events), place, depth)
            if name == "<<" and isinstance(value, dict | list):
                self._merge_mappings(values, value, path, line)
            elif name is not None:
                values[name] = value
        return values

    def _merge_mappings(self, values: dict[str, Any], value: Any, path: str, line: int) -> None:
        sources = value
        if not isinstance(sources, list):
            sources = [value]
        for source in sources:
            if not isinstance(source, dict):
                continue
            for key, below in source.items():
                if key not in values:
                    values[key] = below
                    self.origins[join(path, key)] = Origin(self.file, line)

    def _record_key(self, name: Any, path: str, lines: dict[str, int], line: int) -> str | None:
        """The name of a key, noted with its place; None for what cannot be one."""
        if not isinstance(name, str):
            what = _SHOWN.get(type(name), "this")
            self._add_finding("bad-key", f"{what} cannot be a key: keys are plain names", line)
            return None
        # below an argument (a mixer, model kwargs) any text may be a key
        if path in _NAMED and name != "<<" and not KEY.match(name):
            self._add_finding("bad-key", f"`{name}` cannot be a key: keys are plain names", line)
            return None
        if name in lines and name != "<<":
            message = f"`{name}` is also in line {lines[name]}"
            self._add_finding(
                "duplicate-key", message, line, join(path, name), "delete one of them"
            )
        lines.setdefault(name, line)
        is_argument = path.removeprefix("open_instruct.").startswith("args.")
        if len(lines) > MAX_KEYS and not is_argument:
            where = f"`{path}`" if path else "the file"
            self._stop("too-large", f"{where} holds more than {MAX_KEYS:,} keys", line)
        self.origins[join(path, name)] = Origin(self.file, line)
        return name

    def _count_node(self, depth: int, line: int) -> None:
        if depth > MAX_DEPTH:
            self._stop("too-deep", f"nested deeper than {MAX_DEPTH} levels", line)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._stop("too-large", f"more than {MAX_NODES} values (aliases counted)", line)

    def _build_scalar(self, event: Any, line: int) -> Any:
        tag = event.tag
        if tag is not None and tag not in _SCALARS:
            self._stop_at_tag(tag, line)
        unusable = UNUSABLE.search(event.value)
        if unusable is not None:
            message = f"the character U+{ord(unusable[0]):04X} is not allowed in a value"
            self._stop("bad-character", message, line)
        if tag in _TEXTS or (tag is None and not event.implicit[0]):
            return event.value
        return parse_scalar(event.value)

    def _stop_at_tag(self, tag: str, line: int) -> NoReturn:
        shown = tag.replace(_TAG, "!!")
        self._stop("unknown-tag", f"the YAML tag `{shown}` is not supported", line)

    def _add_finding(
        self, code: str, message: str, line: int, key: str | None = None, help: str | None = None
    ) -> None:
        self.findings.append(replace(bad(Path(self.file), code, message, line, help), key=key))

    def _stop(self, code: str, message: str, line: int, help: str | None = None) -> NoReturn:
        self._add_finding(code, message, line, help=help)
        raise InvalidConfig(self.findings)


def _find_line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def parse_scalar(text: str) -> Any:
    """What an unquoted YAML scalar means: null, a bool, an int, a float or the text itself.

    Dates, octals and sexagesimals stay text: upstream's parser is the one to judge them.
    """
    if text in _NULL:
        return None
    if text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if _INT.match(text) and len(text) < 400:
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    return text


def join(path: str, step: str | int) -> str:
    """A dotted key: `path.name`, or `path[index]`."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    if not path:
        return step
    return f"{path}.{step}"


Steps = tuple[str | int, ...]


def walk_leaves(value: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """What is neither a mapping nor a list in a tree of them, with the steps that lead to each."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from walk_leaves(below, (*steps, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from walk_leaves(below, (*steps, index))
    else:
        yield steps, value


def find_nearest_origin(origins: Mapping[str, Origin], key: str) -> Origin | None:
    """The place of `key`, or of the nearest key that encloses it."""
    while key and key not in origins:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return origins.get(key)


def find_place(path: Path, origins: Mapping[str, Origin], key: str) -> Origin:
    """The same, or the start of the file."""
    return find_nearest_origin(origins, key) or Origin(str(path), 1)
