"""Tokens out of whatever is written down: by the name of their key, by their shape, by their value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

REDACTED = "<redacted>"

_T = TypeVar("_T")

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# `eos_token`, `max_new_token` and the like are words of the trade
_TRADE = frozenset(
    {
        "additional",
        "audio",
        "bos",
        "boundary",
        "cls",
        "each",
        "end",
        "eos",
        "first",
        "image",
        "last",
        "mask",
        "max",
        "min",
        "new",
        "next",
        "num",
        "pad",
        "per",
        "prefix",
        "sep",
        "special",
        "start",
        "stop",
        "suffix",
        "unk",
        "video",
    }
)
_ALWAYS = frozenset(
    {"apikey", "credential", "credentials", "passphrase", "passwd", "password", "secret"}
)
_KEY_OF = frozenset(
    {
        "access",
        "account",
        "api",
        "auth",
        "license",
        "private",
        "secret",
        "service",
        "signing",
        "ssh",
    }
)
# `HF_TOKEN_PATH` says where a token is, not what it is
_ABOUT = frozenset({"dir", "file", "folder", "fn", "id", "name", "path", "type"})

_SHAPES: Mapping[str, str] = {
    "hf_": "[A-Za-z0-9]{16,}",
    "api_org_": "[A-Za-z0-9]{16,}",
    "sk-": "[A-Za-z0-9_-]{16,}",
    "gh[pousr]_": "[A-Za-z0-9]{20,}",
    "github_pat_": r"\w{20,}",
    "glpat-": r"[\w-]{16,}",
    "A(?:KIA|SIA)": "[0-9A-Z]{16}",
    "xox[abpr]-": "[A-Za-z0-9-]{10,}",
    "wandb_v": r"\d_\w{20,}",
    "AIza": r"[\w-]{30,}",
    "eyJ": r"[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}",
}
"""How tokens begin, and how they go on."""
_SHAPE = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(''.join, _SHAPES.items()))})")
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{12,}")
_URL = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+(?=@)")
# name=value, name: value, 'name': 'value', --name=value; names of one word only before `=`. A name is
# tried from its begin alone: a word may be a megabyte of base64
_NAME = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)[\"']?(?P<sign>\s*=\s*|:\s+|\":)")
_VALUE = re.compile(r"(?P<quote>[\"'])(?P<quoted>[^\"']+)(?P=quote)|(?P<plain>[^\s\"',;&)}\]`]+)")
# --hub_token VALUE inside a text
_FLAG = re.compile(r"(?<![\w.-])(?P<head>(?P<name>--[A-Za-z][\w.-]*+)\s+)(?P<value>(?!--)\S+)")
# The same in bytes, as patterns that begin with a text: of megabytes little else is looked at
_BEGIN_OF_BYTES = re.compile("|".join(_SHAPES).encode())
_SHAPE_OF_BYTES = re.compile(_SHAPE.pattern.encode())
_URL_OF_BYTES = re.compile(rb"://[^\s/@:]*:[^\s/@]+@")
_BEARER_OF_BYTES = tuple(re.compile(word + rb"\s+[\w.~+/=-]{12}") for word in (b"bearer", b"basic"))
_LONGEST_NAME = 200
_SECRETS_OF_BYTES = tuple(
    re.compile(word + rb"[\w.-]{0,%d}+[\"']?(?:\s*=|:)" % _LONGEST_NAME)
    for word in (b"token", b"key", b"secret", b"credential", b"pass(?:phrase|wd|word)")
)
_FLAG_OF_BYTES = re.compile(rb"(?<![\w.-])--[A-Za-z][\w.-]*+\s")
_NAME_OF_BYTES = re.compile(rb"[\w.-]*")
_PLAIN_WORDS = frozenset({"none", "null", "true", "false"})
_SHORTEST = 8


def redact(value: _T, environ: Mapping[str, str] | None = None) -> _T:
    """The same value with every token taken out of it, of the same types throughout.

    Mappings, sequences, dataclasses and text are looked into. `environ` is where known tokens are:
    their very values go wherever they turn up.
    """
    cleaned: _T = _clean(value, "", known_values(os.environ if environ is None else environ))
    return cleaned


def redact_bytes(raw: bytes, known: Sequence[str]) -> bytes:
    """What a process printed, without tokens; lines without any stay as they are, byte for byte.

    `known` are values to take out, as `known_values` gives them. A line ends with a line feed or a
    carriage return.
    """
    parts, done = [], 0
    for at in sorted(_suspects(raw, known)):
        if at < done:
            continue
        begin = max(raw.rfind(b"\n", done, at), raw.rfind(b"\r", done, at), done - 1) + 1
        feed = raw.find(b"\n", at)
        end = feed if feed >= 0 else len(raw)
        carriage = raw.find(b"\r", at, end)
        end = carriage if carriage >= 0 else end
        line = raw[begin:end].decode("utf-8", "surrogateescape")
        parts += [raw[done:begin], _text(line, known).encode("utf-8", "surrogateescape")]
        done = end
    return b"".join([*parts, raw[done:]]) if parts else raw


def _suspects(raw: bytes, known: Sequence[str]) -> Iterator[int]:
    """Where a token may be."""
    for value in known:
        text = value.encode("utf-8", "surrogateescape")
        at = raw.find(text)
        while at >= 0:
            yield at
            at = raw.find(text, at + 1)
    for begun in _BEGIN_OF_BYTES.finditer(raw):
        if _SHAPE_OF_BYTES.match(raw, begun.start()):
            yield begun.start()
    yield from (found.start() for found in _URL_OF_BYTES.finditer(raw))
    small = raw.lower()
    for pattern in _BEARER_OF_BYTES:
        yield from (found.start() for found in pattern.finditer(small))
    for pattern in _SECRETS_OF_BYTES:
        for found in pattern.finditer(small):
            at = found.start()
            before = _NAME_OF_BYTES.match(raw[max(0, at - _LONGEST_NAME) : at][::-1])
            name = (before[0][::-1] if before else b"") + raw[at : found.end() - 1]
            if _is_secret(name):
                yield at
    yield from (found.start() for found in _FLAG_OF_BYTES.finditer(raw) if _is_secret(found[0]))


@lru_cache(maxsize=4096)
def _is_secret(name: bytes) -> bool:
    return is_secret(name.decode("utf-8", "replace"))


def known_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values of variables whose name says that they are secret, longest first."""
    found = {
        value
        for name, value in environ.items()
        if len(value) >= _SHORTEST and not value.startswith(("/", "~")) and is_secret(name)
    }
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a key, flag or variable of this name holds a token or a password."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return False
    pairs = list(zip(["", *words], words, strict=False))
    if any(word in _ALWAYS for word in words):
        return True
    if any(word == "key" and before in _KEY_OF for before, word in pairs):
        return True
    before, last = pairs[-1]
    return last == "token" and before not in _TRADE


def _clean(value: Any, name: str, known: Sequence[str]) -> Any:
    if isinstance(value, str):
        hidden = name and value and value.lower() not in _PLAIN_WORDS
        return REDACTED if hidden else _text(value, known)
    if isinstance(value, Mapping):
        # {"hub_token": {"value": ..., "origin": ...}}: the name reaches the value
        return {
            _text(key, known) if isinstance(key, str) else key: _clean(
                below, key if is_secret(str(key)) else name * (key == "value"), known
            )
            for key, below in value.items()
        }
    if isinstance(value, list):
        return _words(value, name, known)
    if isinstance(value, tuple):
        return tuple(_words(value, name, known))
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        cleaned = {key: _clean(v, key if is_secret(key) else "", known) for key, v in own.items()}
        return replace(value, **{k: v for k, v in cleaned.items() if v is not own[k]})
    return value


def _words(values: Sequence[Any], name: str, known: Sequence[str]) -> list[Any]:
    """A list, which may be a command line: the words after `--hub_token` are its value."""
    cleaned, flag = [], ""
    for value in values:
        if isinstance(value, str) and value.startswith("--"):
            flag = value if is_secret(value) and "=" not in value else ""
            cleaned.append(_text(value, known))
        else:
            cleaned.append(_clean(value, name or flag, known))
    return cleaned


def _text(text: str, known: Sequence[str]) -> str:
    for value in known:
        if value in text:
            text = text.replace(value, REDACTED)
    text = _SHAPE.sub(REDACTED, text)
    text = _URL.sub(rf"\1:{REDACTED}", text)
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    return _FLAG.sub(_flag, _pairs(text))


def _flag(found: re.Match[str]) -> str:
    hidden = is_secret(found["name"]) and not _harmless(found["value"])
    return f"{found['head']}{REDACTED}" if hidden else found[0]


def _pairs(text: str) -> str:
    """The values behind secret names; what a harmless name stands before may be a pair itself."""
    parts, done = [], 0
    for named in _NAME.finditer(text):
        spoken = "=" not in named["sign"] and len(_WORD.findall(named["name"])) < 2
        if named.start() < done or spoken or not is_secret(named["name"]):
            continue
        found = _VALUE.match(text, named.end())
        if found is not None and not _harmless(found["quoted"] or found["plain"]):
            quote = found["quote"] or ""
            parts += [text[done : found.start()], f"{quote}{REDACTED}{quote}"]
            done = found.end()
    return "".join([*parts, text[done:]])


def _harmless(value: str) -> bool:
    # a shell has what was taken out in quotes: without them it would be a redirection
    value = value.strip("'\"")
    return value.lower() in _PLAIN_WORDS or value == REDACTED or value.replace(".", "").isdigit()
