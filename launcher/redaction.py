"""Secrets out of whatever is written: by the name of their key, their shape, their value."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

from launcher.lazy_dataclass import dataclass

REDACTED = "<redacted>"

_T = TypeVar("_T")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# Names of secrets. A name is split into words: `hub_token`, `hubToken` and `HUB_TOKEN` are the same
# two.
_ALWAYS = (
    "apikey cred credential credentials creds passphrase passwd password passwords secret "
    "secrets webhook webhooks"
).split()
# `PGPASSWORD`, `OPENAIAPIKEY`: words that are written as one
_ENDINGS = ("password", "passwd", "passphrase", "apikey", "accesskey", "secretkey", "privatekey")
# `eos_token`: a token of a text, which is named by what stands before it
_TEXT_TOKENS = frozenset(
    (
        "audio bos boundary cls end eos image mask max min new next num pad prefix sep special "
        "start stop suffix unk video"
    ).split()
)
# in lower case `_key` is a secret's only after one of these: `messages_key` names a column
_KEY_OF = (
    "access account admin anthropic api app auth aws azure bot client cohere comet decryption "
    "deepseek deploy encryption fireworks gemini github gitlab google groq hf hmac huggingface "
    "jwt license master mistral neptune openai openrouter private replicate secret server service "
    "session signing slack ssh ssl storage stripe swanlab tls together wandb webhook"
).split()
# in capitals every `_KEY` is one but for these
_STORE_KEYS = frozenset("cache foreign index partition primary public sort".split())
# in lower case `_pass` is a secret's only after one of these: `forward_pass` is something else
_PASS_OF = frozenset(
    (
        "admin api app auth account basic client cluster database db docker email ftp git http "
        "https imap jdbc kafka keystore ldap mail mongo mqtt my mysql pg postgres proxy rabbitmq "
        "redis root service sftp smtp sql ssh sudo svc user vpn wifi"
    ).split()
)
# `HF_TOKEN_PATH` says where a token is, not what it is
_ABOUT = frozenset({"dir", "file", "folder", "fn", "id", "name", "path", "type"})
_ABOUT_VARIABLES = _ABOUT | frozenset(
    "host len length limit method mode port provider size sock timeout ttl uri url version".split()
)
# what may stand anywhere in the name of a variable: `MY_TOKEN_B64`, `LANGFUSE_PK`
_OF_VARIABLES = frozenset("auth cred creds key passcode pass pk pwd secret sk token".split())
_SHELL_FOLDERS = frozenset({"pwd", "oldpwd"})
# what `launch` itself says is never a secret, whatever somebody chose as a password
_OWN_KEYS = frozenset(
    {"backend", "code", "expected", "layer", "severity", "stage", "state", "status"}
)

# how tokens begin, and how they go on
_SHAPES: Mapping[str, str] = {
    "hf_ api_org_": "[A-Za-z0-9]{16,}",
    "sk-": "[A-Za-z0-9_-]{16,}",
    "ghp_ gho_ ghu_ ghs_ ghr_": "[A-Za-z0-9]{20,}",
    "github_pat_ hvs. dckr_pat_ dop_v1_ tgp_v1_ lsv2_pt_ lsv2_sk_ shpat_ ya29.": r"[\w-]{20,}",
    "glpat- glrt-": r"[\w-]{16,}",
    "AKIA ASIA": "[0-9A-Z]{16}",
    "xoxa- xoxb- xoxe- xoxp- xoxr- xoxs- xapp-": "[A-Za-z0-9-]{10,}",
    "wandb_v": r"\d_\w{20,}",
    "AIza nvapi-": r"[\w-]{30,}",
    # bounded: a word of a megabyte may hold such a begin everywhere
    "eyJ": r"[\w-]{8,600}\.[\w-]{8,}\.[\w-]{8,}",
    "sk_live_ sk_test_ rk_live_ rk_test_": "[A-Za-z0-9]{16,}",
    "whsec_": "[A-Za-z0-9+/=]{20,}",
    "npm_ gsk_ r8_ xai-": "[A-Za-z0-9]{30,}",
    "pypi-": r"[\w-]{40,}",
    "SG.": r"[\w-]{16,}\.[\w-]{16,}",
    "dapi": "[0-9a-f]{32}",
}


def _compile_shapes() -> re.Pattern[str]:
    forms = []
    for begins, rest in _SHAPES.items():
        begin = "|".join(map(re.escape, begins.split()))
        forms.append(f"(?:{begin}){rest}")
    return re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(forms)})")


_SHAPE = _compile_shapes()
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{12,}")
KEY_BLOCK = b"-----BEGIN "  # how a block of a private key in PEM begins, and of a certificate too
_BASE64 = "[A-Za-z0-9+/=]"
_BREAK = r"(?:\\[nrt]|[\s\\\"',])"
_KEY_BLOCK = re.compile(
    r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)"
    rf"(?:{_BREAK}|{_BASE64}{{16,}}+|(?:Proc-Type|DEK-Info|Version|Comment): ?[^\n\\]*+"
    rf"|{_BASE64}{{1,16}}+(?={_BREAK}*+(?:-----END|\Z)))+"
)
_KEY_BLOCK_OF_BYTES = re.compile(_KEY_BLOCK.pattern.encode())
_USER = re.compile(r"(?<=://)([^\s/@:]*):[^\s/]+(?=@)|(?<=://)[^\s/@:]{16,}(?=@)")
_WEBHOOK = re.compile(
    r"(?i)(://(?:hooks[.][\w.-]+/|api[.]telegram[.]org/bot"
    r"|[\w.-]+(?::\d+)?/(?:[\w.@-]+/)*?(?:webhook\w*|hooks?)/))(?=\S{0,500}\d)[^\s\"'<>`)\]]{8,2000}"
)
_QUERY = re.compile(
    r"(?i)([?&](?:code|key|sig|signature|x-amz-(?:credential|security-token|signature))=)[^\s&\"'<>]{6,}"
)
# name=value, name: value, 'name': 'value', --name=value; names of one word only before `=`. A name
# is tried from its begin alone: a word may be a megabyte of base64
_NAME = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)[\"']?(?P<sign>\s*:?=>?\s*|:\s+|[\"']:)")
_VALUE = re.compile(r"(?P<quote>[\"'])(?P<quoted>[^\"']+)(?P=quote)|(?P<plain>[^\s\"',;&)}\]`]+)")
# of a shell's variable all up to the next blank
_VARIABLE = re.compile(r"(?P<plain>[^\s\"'`]*[^\s\"',;)}\]`])")
# --hub_token VALUE inside a text
_FLAG = re.compile(r"(?<![\w.-])(?P<head>(?P<name>--[A-Za-z][\w.-]*+)\s+)(?P<value>(?!--)\S+)")
# in lower case, one of these is in every line of bytes that holds a secret
_HINTS = tuple(
    hint.lower().encode() for hint in ("://", "bearer", "basic", *" ".join(_SHAPES).split())
)
_LINE = re.compile(rb"[^\n\r]+")
_WORDS_OF_NAMES = (
    b"token",
    b"key",
    b"secret",
    b"cred",
    b"pass",
    b"pwd",
    b"auth",
    b"dsn",
    b"webhook",
    b"pk",
    b"sk",
)
_ANY_WORD = b"(?:" + b"|".join(_WORDS_OF_NAMES) + b")"
_NAME_HINT = re.compile(_ANY_WORD + rb"[\w.-]{0,200}+[\"']?\s*[:=]|--[\w.-]{0,60}?" + _ANY_WORD)
_INTERPOLATION = re.compile(r"(\$\{oc\.env:\w+\})")
_CUT = "..."
_PLAIN_WORDS = frozenset({"none", "null", "true", "false"})
_SHORTEST = 6
_LONGEST_NAME = 200  # characters at the end of a name that are looked at
# `"$HF_TOKEN"`, `${oc.env:HF_TOKEN}`: where a secret is, not what it is
_REFERENCE = re.compile(r"\$(?:\w+|\{[\w.:,]+\})")
# a path, or the name of a model or a data set: what a variable holds that is no secret
_PLACE = re.compile(r"~.*|[.]{0,2}/.*|[A-Za-z][\w.-]*/[\w./-]+|", re.DOTALL)
_ESCAPED_IN_URL = re.compile("%[0-9A-F]{2}")
# `completed`, `flash_attention_2`, `Qwen`, `1234.5`: words and numbers that anything may say
_WORDLIKE = re.compile(
    r"(?:[A-Z]?[a-z]+|[A-Z]+)(?<!.{20})|[A-Za-z]+\d{0,2}(?:_(?:[a-z]+\d{0,2}|\d{1,4}))+|[\d.,:e+-]{1,15}"
    r"|[a-z]+-\d{1,6}|[a-z_]+[.](?:html|json|jsonl|log|py|txt|yaml|yml)"
)


@dataclass(frozen=True, slots=True)
class Redactor:
    """What is secret to a stage file, a plan or a run beside what names and shapes tell.

    `values` are texts, in every spelling, longest first. `borrowed` are variables that a file took
    values from, with what they hold: a finding names the variable in place of the value, whether
    that is a secret or not.
    """

    values: tuple[str, ...] = ()
    borrowed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, environ: Mapping[str, str], borrowed: Iterable[str] = ()) -> Redactor:
        """What is secret in this environment, of which a file borrowed these variables."""
        taken = {name: environ[name] for name in sorted(borrowed) if name in environ}
        return cls(find_secret_values(environ, taken), taken)

    def joined(self, other: Redactor) -> Redactor:
        """What either of both hides."""
        values = _sort_longest_first({*self.values, *other.values})
        return Redactor(values, {**other.borrowed, **self.borrowed})

    def redact(self, value: _T) -> _T:
        """The same value, of the same types throughout, without secrets."""
        cleaned: _T = _clean_value(value, "", self.values)
        return cleaned

    def name_variables(self, text: str) -> str:
        """The text, with variables named where a value stands that a file borrowed."""
        for variable, value in self.borrowed.items():
            text = _name_variable(text, variable, value)
        return text

    @property
    def secrets(self) -> tuple[str, ...]:
        """The names of borrowed variables that hold secrets."""
        return tuple(name for name, value in self.borrowed.items() if holds_secret(name, value))


def find_process_secrets() -> Redactor:
    """What is secret in the environment of this process."""
    return Redactor.of(os.environ)


def combine_redactors(redactors: Iterable[Redactor]) -> Redactor:
    """What any of them hides, or the environment of this process tells."""
    whole = find_process_secrets()
    for redactor in redactors:
        whole = whole.joined(redactor)
    return whole


def name_in_environment(text: str) -> str:
    """The text without secrets; of those that a variable of this process holds, its name."""
    secrets = []
    for name, value in os.environ.items():
        if is_secret_variable(name) and _is_telling(value):
            secrets.append(name)
    redactor = Redactor.of(os.environ, secrets)
    return redactor.redact(redactor.name_variables(text))


def redact(value: _T, environ: Mapping[str, str] | None = None) -> _T:
    """The same value, of the same types throughout, without what is secret by its name, its shape
    or by `environ`.

    `environ` is that of this process where it is None. What files borrowed is known to a
    `Redactor`.
    """
    if environ is None:
        environ = os.environ
    return Redactor.of(environ).redact(value)


def holds_secret(variable: str, value: str) -> bool:
    """Whether a variable that a file borrowed holds a secret: by its name, or as neither a place
    nor a plain word.
    """
    if not value or value.lower() in _PLAIN_WORDS:
        return False
    if is_secret_variable(variable):
        return True
    return not _PLACE.fullmatch(value) and not _WORDLIKE.fullmatch(value)


def _name_variable(text: str, variable: str, value: str) -> str:
    name = f"${{oc.env:{variable}}}"
    # as messages spell it: escaped or not
    spellings = {value, repr(value)[1:-1], json.dumps(value)[1:-1], value.strip()}
    pattern = _compile_spellings(value, spellings)
    if pattern is None:
        return text
    parts = []
    # a value may be `oc` or `env`: what names a variable already is left as it is
    for index, part in enumerate(_INTERPOLATION.split(text)):
        if index % 2 == 0:
            part = pattern.sub(lambda _: name, part)
            for spelling in sorted(spellings, key=len, reverse=True):
                part = _name_cut_value(part, spelling, name)
        parts.append(part)
    return "".join(parts)


def _compile_spellings(value: str, spellings: Collection[str]) -> re.Pattern[str] | None:
    """What a value is found by in a message; None for an empty one."""
    forms = []
    for spelling in spellings:
        if len(spelling) > 3:
            forms.append(re.escape(spelling))
    for word in value.split():
        if len(word) > 5:
            forms.append(rf"(?<![\w./]){re.escape(word)}(?![\w/])")
    for spelling in spellings:
        if spelling:
            # a short one is meant only between quotes
            forms.append(rf"(?<=[`'\"]){re.escape(spelling)}(?=[`'\"])")
    if not forms:
        return None
    forms.sort(key=len, reverse=True)
    return re.compile("|".join(forms), re.IGNORECASE)


def _name_cut_value(text: str, value: str, name: str) -> str:
    """The text, naming the variable where `errors.shorten` left only the begin of its value."""
    before, dots, after = text.partition(_CUT)
    while dots:
        for length in range(min(len(value), len(before)), 3, -1):
            if before.endswith(value[:length]):
                before = before[:-length] + name
                break
        rest, dots, after = after.partition(_CUT)
        before += _CUT + rest
    return before


def redact_bytes(raw: bytes, secret_values: Sequence[str]) -> bytes:
    """What a process printed, without tokens and these values; other lines stay as they are."""
    if b"PRIVATE KEY" in raw:
        raw = _KEY_BLOCK_OF_BYTES.sub(rb"\1" + REDACTED.encode(), raw)
    hints = list(_HINTS)
    for value in secret_values:
        hints.append(value.encode("utf-8", "surrogateescape").lower())

    def clean(line: re.Match[bytes]) -> bytes:
        if not _may_hold_secret(line[0], hints):
            return line[0]
        text = line[0].decode("utf-8", "surrogateescape")
        return _clean_text(text, secret_values).encode("utf-8", "surrogateescape")

    # most logs have none in many lines
    if not _may_hold_secret(raw, hints):
        return raw
    return _LINE.sub(clean, raw)


def _may_hold_secret(text: bytes, hints: Iterable[bytes]) -> bool:
    small = text.lower()
    if any(hint in small for hint in hints):
        return True
    # far faster than the pattern alone
    if not any(word in small for word in _WORDS_OF_NAMES):
        return False
    return _NAME_HINT.search(small) is not None


def find_secret_values(
    environ: Mapping[str, str], borrowed: Collection[str] = ()
) -> tuple[str, ...]:
    """Values of variables that are secret by name, or borrowed and secret, as they may be spelt,
    longest first.

    What is short, a path, a number or a word is left out. Of a value of several lines each line
    counts.
    """
    forms: set[str] = set()
    for name, value in environ.items():
        if is_secret_variable(name) or (name in borrowed and holds_secret(name, value)):
            forms.update(_find_spellings(value))
    return _sort_longest_first(forms)


def _sort_longest_first(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


@lru_cache(maxsize=1024)
def _find_spellings(value: str) -> frozenset[str]:
    """How a secret may be printed: as it is, by line, escaped, in a URL, in or out of base64."""
    if not _is_telling(value):
        return frozenset()
    plain = {value}
    if "\n" in value:
        for line in value.splitlines():
            text = line.strip()
            if len(text) >= 2 * _SHORTEST and _is_telling(text):
                plain.add(text)
    decoded = _decode_base64(value)
    if decoded is not None and _is_telling(decoded):
        plain.add(decoded)
    forms = set(plain)
    for text in plain:
        forms.update((repr(text)[1:-1], json.dumps(text)[1:-1]))
        forms.update(_encode_in_url(text))
        forms.update(_encode_in_base64(text))
    return frozenset(forms)


def _is_telling(value: str) -> bool:
    """Whether nothing but the secret would be hidden with this text."""
    if len(value) < _SHORTEST or value.startswith(("/", "~")) or _WORDLIKE.fullmatch(value):
        return False
    return len(value) > 2 * _SHORTEST or len(set(value)) > _SHORTEST // 2


def _encode_in_url(text: str) -> set[str]:
    errors = "surrogateescape"
    forms = set()
    for quoted in (
        quote(text, errors=errors),
        quote(text, safe="", errors=errors),
        quote_plus(text, errors=errors),
    ):
        forms.add(quoted)
        forms.add(_ESCAPED_IN_URL.sub(lambda match: match[0].lower(), quoted))
    return forms


def _encode_in_base64(text: str) -> set[str]:
    """Base64 of the text, and what base64 of any longer text that holds it has in common."""
    raw = text.encode(errors="surrogateescape")
    forms: set[str] = set()
    for before in range(3):
        longer = bytes(before) + raw
        encoded = b64encode(longer).decode()
        # the characters at both ends hold bits of what stands beside it
        begin = math.ceil(before * 4 / 3)
        end = len(longer) * 4 // 3
        shared = encoded[begin:end]
        if len(shared) >= _SHORTEST:
            forms.add(shared)
    forms.add(b64encode(raw).decode().rstrip("="))
    for form in list(forms):
        forms.add(form.replace("+", "-").replace("/", "_"))
    return forms


def _decode_base64(value: str) -> str | None:
    compact = "".join(value.split())
    if len(compact) % 4 == 1:
        return None
    padded = compact + "=" * (-len(compact) % 4)
    alphabet = None
    if "-" in padded or "_" in padded:
        alphabet = b"-_"
    try:
        decoded = b64decode(padded, altchars=alphabet, validate=True)
        text = decoded.decode().strip()
    except ValueError:
        return None
    if text.isprintable() or "\n" in text:
        return text
    return None


def is_secret_variable(name: str) -> bool:
    """Whether a variable of this name holds a token or a password; its parts count anywhere."""
    return is_secret(name) or (name.isupper() and _is_secret_variable(name[-_LONGEST_NAME:]))


@lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT_VARIABLES:
        return False
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if word in _OF_VARIABLES:
            if len(words) > 1 and not _is_of_the_trade(word, before):
                return True
        elif _is_joined_name(word):
            return True
    return False


def _is_joined_name(word: str) -> bool:
    """Whether one word is the name of a secret: `SSHPASS`, `GHTOKEN`."""
    if word.endswith("pass"):
        return word.removesuffix("pass") in _PASS_OF
    if word.endswith("token"):
        return word.removesuffix("token") not in _TEXT_TOKENS
    return word.endswith(("pwd", "secret")) and word not in _SHELL_FOLDERS


def _is_of_the_trade(word: str, before: str) -> bool:
    """Whether two words name something of a model or of a store: `EOS_TOKEN`, `CACHE_KEY`."""
    if word == "token":
        return before in _TEXT_TOKENS
    return word == "key" and before in _STORE_KEYS


def is_secret(name: str) -> bool:
    """Whether a key, flag or variable of this name holds a token or a password."""
    # a word of a log may be a megabyte, and the cache would keep it
    return _is_secret(name[-_LONGEST_NAME:])


@lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return False
    if any(word in _ALWAYS or word.endswith(_ENDINGS) for word in words):
        return True
    for before, word in itertools.pairwise(words):
        if word == "key" and before in _KEY_OF:
            return True
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _TEXT_TOKENS
    if not before:
        return False
    if name.isupper():
        return last in ("auth", "dsn", "pass", "pwd") or (
            last == "key" and before not in _STORE_KEYS
        )
    return last in ("pass", "pwd") and before in _PASS_OF


def _clean_value(value: Any, name: str, secret_values: Sequence[str]) -> Any:
    if isinstance(value, str):
        tells_nothing = not value or value.lower() in _PLAIN_WORDS
        if not name or tells_nothing or _REFERENCE.fullmatch(value):
            return _clean_text(value, secret_values)
        return REDACTED
    if isinstance(value, Mapping):
        return _clean_mapping(value, name, secret_values)
    if isinstance(value, list):
        return _clean_words(value, name, secret_values)
    if isinstance(value, tuple):
        return tuple(_clean_words(value, name, secret_values))
    if is_dataclass(value) and not isinstance(value, type):
        return _clean_record(value, secret_values)
    return value


def _clean_mapping(
    values: Mapping[Any, Any], name: str, secret_values: Sequence[str]
) -> dict[Any, Any]:
    cleaned = {}
    for key, value in values.items():
        named = ""
        if is_secret_variable(str(key)):
            named = key
        elif key == "value":
            # {"hub_token": {"value": ..., "origin": ...}}: the name reaches the value
            named = name
        shown_key = key
        if isinstance(key, str):
            shown_key = _clean_text(key, secret_values)
        shown = value
        if not _is_own_word(key, value):
            shown = _clean_value(value, named, secret_values)
        cleaned[shown_key] = shown
    return cleaned


def _clean_record(record: Any, secret_values: Sequence[str]) -> Any:
    changes = {}
    for member in fields(record):
        if not member.init:
            continue
        value = getattr(record, member.name)
        if _is_own_word(member.name, value):
            continue
        name = ""
        if is_secret(member.name):
            name = member.name
        cleaned = _clean_value(value, name, secret_values)
        if cleaned is not value:
            changes[member.name] = cleaned
    return replace(record, **changes)


def _is_own_word(key: object, value: object) -> bool:
    if key not in _OWN_KEYS or not isinstance(value, str):
        return False
    return value.replace("-", "_").isidentifier()


def _clean_words(values: Sequence[Any], name: str, secret_values: Sequence[str]) -> list[Any]:
    """A list, which may be a command line: the words after `--hub_token` are its value."""
    cleaned = []
    flag = ""
    for value in values:
        if isinstance(value, str) and value.startswith("--"):
            flag = ""
            if is_secret(value) and "=" not in value:
                flag = value
            cleaned.append(_clean_text(value, secret_values))
        else:
            cleaned.append(_clean_value(value, name or flag, secret_values))
    return cleaned


def _clean_text(text: str, secret_values: Sequence[str]) -> str:
    for value in secret_values:
        if value in text:
            text = text.replace(value, REDACTED)
    if "PRIVATE KEY" in text:
        text = _KEY_BLOCK.sub(rf"\1{REDACTED}", text)
    text = _SHAPE.sub(REDACTED, text)
    behind_begin = rf"\1{REDACTED}"
    if "://" in text:
        text = _USER.sub(_clean_user, text)
        text = _WEBHOOK.sub(behind_begin, text)
        text = _QUERY.sub(behind_begin, text)
    text = _BEARER.sub(behind_begin, text)
    text = _clean_pairs(text)
    return _FLAG.sub(_clean_flag, text)


def _clean_user(match: re.Match[str]) -> str:
    """`user:<redacted>` for a name with a password, nothing of a token in their place."""
    user = match[1]
    if user is None:
        return REDACTED
    return f"{user}:{REDACTED}"


def _clean_flag(match: re.Match[str]) -> str:
    name = match["name"]
    if not is_secret(name) or _is_harmless(name, match["value"]):
        return match[0]
    return f"{match['head']}{REDACTED}"


def _clean_pairs(text: str) -> str:
    """The values behind secret names; what a harmless name stands before may be a pair itself."""
    parts = []
    done = 0
    for named in _NAME.finditer(text):
        if named.start() < done:
            continue
        span = _find_secret_value(text, named)
        if span is not None:
            begin, end = span
            parts += [text[done:begin], REDACTED]
            done = end
    return "".join([*parts, text[done:]])


def _find_secret_value(text: str, named: re.Match[str]) -> tuple[int, int] | None:
    """Where the value of a name lies, without its quotes; None if it is no secret."""
    name = named["name"]
    sign = named["sign"]
    is_assigned = "=" in sign
    if not is_secret(name) and not (is_assigned and is_secret_variable(name)):
        return None
    has_words = len(_WORD.findall(name)) > 1 or name.lower().endswith(_ENDINGS)
    if not is_assigned and not has_words and not name.isupper():
        # before a colon `token` is a word of a sentence
        return None
    value = _VALUE.match(text, named.end())
    if value is None or _is_harmless(name, value["quoted"] or value["plain"]):
        return None
    if value["quoted"]:
        return value.span("quoted")
    if name.isupper() and sign == "=":
        value = _VARIABLE.match(text, named.end()) or value
    return value.span("plain")


def _is_harmless(name: str, value: str) -> bool:
    # a shell has what was taken out in quotes: without them it would be a redirection
    value = value.strip("'\"")
    if value.lower() in _PLAIN_WORDS or value == REDACTED or _REFERENCE.fullmatch(value):
        return True
    # a count of tokens, an index of a key
    counted = not name.isupper() and name.lower().endswith(("token", "key"))
    return counted and value.replace(".", "").isdigit()
