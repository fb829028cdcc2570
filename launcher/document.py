"""One YAML file -> `Document`: plain values, and the file and line of every key."""

from __future__ import annotations

import codecs
import difflib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from launcher.builder import LOADER, Builder, Origin, bad
from launcher.errors import Finding, InvalidConfig
from launcher.files import open_regular
from launcher.paths import canonical

SUFFIXES = frozenset({".yaml", ".yml"})
MAX_BYTES = 4 * 2**20
_FORM = "a stage file is `stage: sft` or `stage: dpo` and `args:` with names below; a pipeline is `stages:`"
_MISSPELT = "what is wrong may stand a line earlier: a `: `, quote or bracket that is missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What one file holds. `faults` are keys that stand twice or cannot be keys: the rest was read."""

    value: dict[str, Any]
    origins: dict[str, Origin]
    faults: tuple[Finding, ...] = ()


def read_yaml(path: Path) -> Document:
    """The mapping in a YAML file and the place of each of its keys.

    Raises InvalidConfig: missing, a directory, empty, binary, not UTF-8, broken, not a mapping.
    """
    text = _read_text(path)
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
    # a link, or a word on a command line, may name any file: what it holds is not shown
    message = "not a stage file, and its name does not end in .yaml or .yml"
    hidden = {"not-a-mapping", "empty-file"}
    raise InvalidConfig(
        f if f.code in hidden else replace(f, message=message, help=None, key=None) for f in found
    )


def parse(path: Path, text: str) -> Document:
    """The mapping in a YAML text, as if it stood in the file; raises like `read_yaml`."""
    builder = Builder(str(path))
    try:
        value = builder.build(yaml.parse(text, Loader=LOADER))
    except yaml.MarkedYAMLError as error:
        raise InvalidConfig([*builder.findings, _broken(path, text, error)]) from None
    except yaml.reader.ReaderError as error:
        raise InvalidConfig(_unreadable(path, text, error)) from None
    if value is None:
        raise InvalidConfig(bad(path, "empty-file", "the file holds no YAML", 1, _FORM))
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "one value"
        raise InvalidConfig(
            bad(
                path, "not-a-mapping", f"the file is {what}, not a mapping of keys to values", 1, _FORM
            )
        )  # fmt: skip
    return Document(value=value, origins=builder.origins, faults=tuple(builder.findings))


def _broken(path: Path, text: str, error: yaml.MarkedYAMLError) -> Finding:
    mark = error.problem_mark or error.context_mark
    what = ", ".join(part for part in (error.context, error.problem) if part)
    if mark is None:
        return bad(path, "broken-yaml", what, None, _MISSPELT)
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    indent = line[: len(line) - len(line.lstrip())]
    help = "YAML is never indented with tabs: use spaces" if "\t" in indent else _MISSPELT
    # the end of the file lies one line beyond its last
    return bad(path, "broken-yaml", what, min(mark.line + 1, max(1, len(lines))), help)


def _unreadable(path: Path, text: str, error: yaml.reader.ReaderError) -> Finding:
    # libyaml counts bytes, PyYAML's own reader characters
    before = text.encode("utf-8", "replace") if LOADER is not yaml.SafeLoader else text
    line = before[: error.position].count(b"\n" if isinstance(before, bytes) else "\n") + 1  # type: ignore[arg-type]
    what = str(error.reason)
    if isinstance(error.character, int):
        what = f"the character U+{error.character:04X} is not allowed in YAML"
    return bad(path, "broken-yaml", what, line, "delete it, or save the file as UTF-8 text")


def _instead(path: Path) -> str:
    """What may be meant by a file that is not there: names like it in the same folder."""
    start = "" if path.is_absolute() else "; a relative path starts where launch is started"
    try:
        names = sorted(name for name in os.listdir(path.parent) if name.endswith((".yaml", ".yml")))
    except (OSError, ValueError):
        return f"there is no folder {path.parent} that can be read{start}"
    near = difflib.get_close_matches(path.name, names, n=3)
    if near:
        return f"did you mean {' or '.join(str(path.parent / name) for name in near)}?"
    return f"no YAML file in {path.parent} has a name like it{start}"


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise InvalidConfig(
                bad(path, "not-a-file", "this is a directory", None, "name a file in it")
            )
        with open_regular(path) as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        told = bad(path, "missing-file", "there is no such file", None, _instead(path))
        raise InvalidConfig(told) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            bad(path, "unreadable-file", f"cannot be read: {reason}", None)
        ) from None
    if len(raw) > MAX_BYTES:
        raise InvalidConfig(bad(path, "huge-file", f"larger than {MAX_BYTES >> 20} MiB", None))
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidConfig(bad(path, "not-utf8", "this is UTF-16", 1, "save it as UTF-8"))
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\0")) + 1
        help = "name a YAML file: a stage file, or a pipeline"
        raise InvalidConfig(bad(path, "binary-file", "a binary file, not YAML", line, help))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8: byte 0x{raw[error.start]:02x}"
        raise InvalidConfig(bad(path, "not-utf8", message, line, "save it as UTF-8")) from None
