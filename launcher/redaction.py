"""Secrets out of whatever is written down: by the name of their key, by their shape, by their value."""

import json
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

REDACTED = "<redacted>"

_T = TypeVar("_T")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# `eos_token`, `max_new_token`, `forward_pass`, `CACHE_KEY` and the like are words of the trade
_TRADE = {
    "token": "additional audio bos boundary cls each end eos first image last mask max min new next num pad per "
    "prefix sep special start stop suffix unk video".split(),
    "pass": "all backward by did eval first forward last max min multi new next num one per second should single "
    "test tests then train two will".split(),
    "key": "cache column config data dict foreign hash index input label map message messages metric output "
    "partition primary public row sort split state then truths".split(),
}
_ALWAYS = (
    "apikey cred credential credentials creds passphrase passwd password passwords secret secrets webhook webhooks"
).split()
# `PGPASSWORD`, `OPENAIAPIKEY`: words that are written as one
_ENDINGS = ("password", "passwd", "passphrase", "apikey", "accesskey", "secretkey", "privatekey")
_KEY_OF = (
    "access account admin anthropic api app auth aws azure bot client cohere comet decryption deepseek deploy "
    "encryption fireworks gemini github gitlab google groq hf hmac huggingface jwt license master mistral neptune "
    "openai openrouter private replicate secret server service session signing slack ssh ssl storage stripe swanlab "
    "tls together wandb webhook"
).split()
# `HF_TOKEN_PATH` says where a token is, not what it is
_ABOUT = frozenset({"dir", "file", "folder", "fn", "id", "name", "path", "type"})
# what may stand anywhere in the name of a variable: `MY_TOKEN_B64`, `LANGFUSE_PK`
_OF_VARIABLES = frozenset("auth cred creds key passcode pass pk pwd secret sk token".split())
# `SSHPASS`, `GHTOKEN`: words that are written as one; `COMPASS`, `OLDPWD` are none
_VARIABLE_ENDINGS = ("pass", "pwd", "secret", "token")
_NO_ENDING = re.compile("(?:by|com|encom|over|sur|tres|under)pass|(?:old)?pwd")
# `TOKEN_LIMIT`, `AUTH_METHOD`: what they say of a secret is none
_ABOUT_VARIABLES = _ABOUT | frozenset(
    "alg algorithm backend board bytes count enabled env error errors expiry failed failure host ids len length limit "
    "map method missing mode per port provider rate required server size sock timeout ttl url uri version".split()
)
# what `launch` itself says is never a secret, whatever somebody chose as a password
_OURS = frozenset({"backend", "code", "expected", "layer", "severity", "stage", "state", "status"})

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
_SHAPE = re.compile(
    "(?<![A-Za-z0-9])(?:{})".format(
        "|".join(f"(?:{'|'.join(map(re.escape, begins.split()))}){rest}" for begins, rest in _SHAPES.items())
    )
)
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
# name=value, name: value, 'name': 'value', --name=value; names of one word only before `=`. A name is
# tried from its begin alone: a word may be a megabyte of base64
_NAME = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)[\"']?(?P<sign>\s*:?=>?\s*|:\s+|[\"']:)")
_VALUE = re.compile(r"(?P<quote>[\"'])(?P<quoted>[^\"']+)(?P=quote)|(?P<plain>[^\s\"',;&)}\]`]+)")
# of a shell's variable all up to the next blank
_VARIABLE = re.compile(r"(?P<plain>[^\s\"'`]*[^\s\"',;)}\]`])")
# --hub_token VALUE inside a text
_FLAG = re.compile(r"(?<![\w.-])(?P<head>(?P<name>--[A-Za-z][\w.-]*+)\s+)(?P<value>(?!--)\S+)")
# in lower case, one of these is in every line of bytes that holds a secret
_HINTS = tuple(hint.lower().encode() for hint in ("://", "bearer", "basic", *" ".join(_SHAPES).split()))
_LINE = re.compile(rb"[^\n\r]+")
_WORDS_OF_NAMES = (b"token", b"key", b"secret", b"cred", b"pass", b"pwd", b"auth", b"dsn", b"webhook", b"pk", b"sk")
_ANY_WORD = b"(?:" + b"|".join(_WORDS_OF_NAMES) + b")"
_NAME_HINT = re.compile(_ANY_WORD + rb"[\w.-]{0,200}+[\"']?\s*[:=]|--[\w.-]{0,60}?" + _ANY_WORD)
_PLAIN_WORDS = frozenset({"none", "null", "true", "false"})
_SHORTEST = 6
_LONGEST_NAME = 200  # characters at the end of a name that are looked at
# `"$HF_TOKEN"`, `${oc.env:HF_TOKEN}`: where a secret is, not what it is
_REFERENCE = re.compile(r"\$(?:\w+|\{[\w.:,]+\})")
# a path, or the name of a model or a data set: what a variable holds that is no secret
_PLACE = re.compile(r"~.*|[.]{0,2}/.*|[A-Za-z][\w.-]*/[\w./-]+|", re.DOTALL)
_borrowed: set[str] = set()
_ESCAPED_IN_URL = re.compile("%[0-9A-F]{2}")
_remembered: set[str] = set()
# `completed`, `flash_attention_2`, `Qwen`, `1234.5`: words and numbers that anything may say
_WORDLIKE = re.compile(
    r"(?:[A-Z]?[a-z]+|[A-Z]+)(?<!.{20})|[A-Za-z]+\d{0,2}(?:_(?:[a-z]+\d{0,2}|\d{1,4}))+|[\d.,:e+-]{1,15}"
    r"|[a-z]+-\d{1,6}|[a-z_]+[.](?:html|json|jsonl|log|py|txt|yaml|yml)"
)


def redact(value: _T, environ: Mapping[str, str] | None = None) -> _T:
    """The same value, of the same types throughout, without tokens and the values of those in `environ`."""
    known = known_values(os.environ if environ is None else environ)
    if environ is None and _remembered:
        known = _longest_first({*known, *_remembered})
    cleaned: _T = _clean(value, "", known)
    return cleaned


def remember(environ: Mapping[str, str]) -> None:
    """Take the secrets of a run's environment for secrets of this process too, which may not have them."""
    _remembered.update(known_values(environ))


def forget() -> None:
    """Forget what was remembered: another command begins."""
    _remembered.clear()


def borrow(variable: str) -> None:
    """Note that a config took a value from a variable: messages name that in its place, and it may be a secret."""
    _borrowed.add(variable)


def borrowed(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted(n for n in _borrowed & environ.keys() if holds_secret(n, environ[n])))


def holds_secret(variable: str, value: str) -> bool:
    if not value or value.lower() in _PLAIN_WORDS:
        return False
    return is_secret_variable(variable) or not (_PLACE.fullmatch(value) or _WORDLIKE.fullmatch(value))


def unechoed(text: str) -> str:
    """The text, with variables named where a value stands that a config took from the environment."""
    for variable in _borrowed & os.environ.keys():
        value = os.environ[variable]
        # as messages spell it: quoted, escaped, or its words one by one
        spelt = {value, repr(value)[1:-1], json.dumps(value)[1:-1], value.strip()}
        forms = [re.escape(form) for form in spelt if len(form) > 3]
        forms += [rf"(?<![\w./]){re.escape(word)}(?![\w/])" for word in value.split() if len(word) > 5]
        forms += [rf"(?<=[`'\"]){re.escape(form)}(?=[`'\"])" for form in spelt if form]
        forms.sort(key=len, reverse=True)
        # a value may be `oc` or `env`
        parts = re.split(r"(\$\{oc\.env:\w+\})", text)
        pattern, name = (re.compile("|".join(forms) or r"(?!)", re.IGNORECASE), f"${{oc.env:{variable}}}")
        text = "".join(p if at % 2 else pattern.sub(lambda _, n=name: n, p) for at, p in enumerate(parts))
    return text


def redact_bytes(raw: bytes, known: Sequence[str]) -> bytes:
    """What a process printed without tokens and values `known`; lines without any stay as they are, byte for byte."""
    if b"PRIVATE KEY" in raw:
        raw = _KEY_BLOCK_OF_BYTES.sub(rb"\1" + REDACTED.encode(), raw)
    values = (value.encode("utf-8", "surrogateescape").lower() for value in known)
    hints = (*_HINTS, *values)

    def may_hold_secret(text: bytes) -> bool:
        small = text.lower()
        if any(hint in small for hint in hints):
            return True
        # far faster than the pattern alone
        return any(word in small for word in _WORDS_OF_NAMES) and _NAME_HINT.search(small) is not None

    # most logs have none in many lines
    if not may_hold_secret(raw):
        return raw

    def clean(line: re.Match[bytes]) -> bytes:
        if not may_hold_secret(line[0]):
            return line[0]
        text = line[0].decode("utf-8", "surrogateescape")
        return _text(text, known).encode("utf-8", "surrogateescape")

    return _LINE.sub(clean, raw)


def known_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values of variables that are secret by name, as they may be spelt, longest first.

    What is short, a path, a number or a word is left out. Of a value of several lines each line counts.
    """
    forms: set[str] = set()
    for name, value in environ.items():
        if is_secret_variable(name) or (name in _borrowed and holds_secret(name, value)):
            forms.update(_spellings(value))
    return _longest_first(forms)


def _longest_first(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


@lru_cache(maxsize=1024)
def _spellings(value: str) -> frozenset[str]:
    """How a secret may be printed: as it is, line by line, escaped, in a URL, in base64, out of base64."""
    if not _is_telling(value):
        return frozenset()
    plain = {value}
    if "\n" in value:
        plain.update(line.strip() for line in value.splitlines() if len(line.strip()) >= 2 * _SHORTEST)
        plain = {text for text in plain if text == value or _is_telling(text)}
    decoded = _out_of_base64(value)
    if decoded is not None and _is_telling(decoded):
        plain.add(decoded)
    forms = set(plain)
    for text in plain:
        forms.update((repr(text)[1:-1], json.dumps(text)[1:-1]))
        forms.update(_in_url(text))
        forms.update(_in_base64(text))
    return frozenset(forms)


def _is_telling(value: str) -> bool:
    """Whether nothing but the secret would be hidden with this text."""
    if len(value) < _SHORTEST or value.startswith(("/", "~")) or _WORDLIKE.fullmatch(value):
        return False
    return len(value) > 2 * _SHORTEST or len(set(value)) > _SHORTEST // 2


def _in_url(text: str) -> set[str]:
    quoted = {quote(text, safe="", errors="surrogateescape"), quote(text, errors="surrogateescape")}
    quoted.add(quote_plus(text, errors="surrogateescape"))
    return quoted | {_ESCAPED_IN_URL.sub(lambda found: found[0].lower(), one) for one in quoted}


def _in_base64(text: str) -> set[str]:
    """Base64 of the text, and what base64 of any longer text that holds it has in common."""
    raw = text.encode(errors="surrogateescape")
    forms: set[str] = set()
    for before in range(3):
        whole = b64encode(bytes(before) + raw).decode().rstrip("=")
        # the characters at both ends hold bits of what stands beside it
        begin = -(-before * 4 // 3)
        end = (before + len(raw)) * 4 // 3
        shared = whole[begin:end]
        if len(shared) >= _SHORTEST:
            forms.add(shared)
    forms.add(b64encode(raw).decode().rstrip("="))
    return forms | {form.replace("+", "-").replace("/", "_") for form in forms}


def _out_of_base64(value: str) -> str | None:
    compact = "".join(value.split())
    if len(compact) % 4 == 1:
        return None
    padded = compact + "=" * (-len(compact) % 4)
    try:
        decoded = b64decode(padded, altchars=b"-_" if "-" in padded or "_" in padded else None, validate=True)
        text = decoded.decode().strip()
    except ValueError:
        return None
    return text if text.isprintable() or "\n" in text else None


def is_secret_variable(name: str) -> bool:
    """Whether a variable of this name holds a token or a password; its parts count wherever they stand."""
    return is_secret(name) or (name.isupper() and _is_secret_variable(name[-_LONGEST_NAME:]))


@lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT_VARIABLES:
        return False
    for before, word in zip(["", *words], words, strict=False):
        trade = _TRADE.get("pass" if word == "pwd" else word, ())
        if word in _OF_VARIABLES and len(words) > 1 and before not in trade:
            return True
        ending = next((one for one in _VARIABLE_ENDINGS if word.endswith(one) and word != one), None)
        if ending is None or _NO_ENDING.fullmatch(word):
            continue
        if word.removesuffix(ending) not in _TRADE.get(ending, ()):
            return True
    return False


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
    pairs = list(zip(["", *words], words, strict=False))
    if any(word == "key" and before in _KEY_OF for before, word in pairs):
        return True
    before, last = pairs[-1]
    if last == "token":
        return before not in _TRADE["token"]
    if last in ("pass", "pwd"):
        return bool(before) and before not in _TRADE["pass"]
    # in lower case these are keys of mappings, methods and the like
    upper = bool(before) and name.isupper()
    return upper and (last in ("auth", "dsn") or (last == "key" and before not in _TRADE["key"]))


def _clean(value: Any, name: str, known: Sequence[str]) -> Any:
    if isinstance(value, str):
        shown = not name or not value or value.lower() in _PLAIN_WORDS or _REFERENCE.fullmatch(value)
        return _text(value, known) if shown else REDACTED
    if isinstance(value, Mapping):
        cleaned = {}
        for key, below in value.items():
            # {"hub_token": {"value": ..., "origin": ...}}: the name reaches the value
            named = key if is_secret_variable(str(key)) else name * (key == "value")
            spelt = _text(key, known) if isinstance(key, str) else key
            cleaned[spelt] = below if _ours(key, below) else _clean(below, named, known)
        return cleaned
    if isinstance(value, list | tuple):
        words = _words(value, name, known)
        return words if isinstance(value, list) else tuple(words)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        clean = {key: _clean(v, key if is_secret(key) else "", known) for key, v in own.items() if not _ours(key, v)}
        return replace(value, **{k: v for k, v in clean.items() if v is not own[k]})
    return value


def _ours(key: object, value: object) -> bool:
    return key in _OURS and isinstance(value, str) and value.replace("-", "_").isidentifier()


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
    if "PRIVATE KEY" in text:
        text = _KEY_BLOCK.sub(rf"\1{REDACTED}", text)
    text = _SHAPE.sub(REDACTED, text)
    if "://" in text:
        text = _USER.sub(lambda found: f"{found[1]}:{REDACTED}" if found[1] is not None else REDACTED, text)
        text = _QUERY.sub(rf"\1{REDACTED}", _WEBHOOK.sub(rf"\1{REDACTED}", text))
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    return _FLAG.sub(_flag, _pairs(text))


def _flag(found: re.Match[str]) -> str:
    hidden = is_secret(found["name"]) and not _harmless(found["name"], found["value"])
    return f"{found['head']}{REDACTED}" if hidden else found[0]


def _pairs(text: str) -> str:
    """The values behind secret names; what a harmless name stands before may be a pair itself."""
    parts, done = [], 0
    for named in _NAME.finditer(text):
        name, sign = named["name"], named["sign"]
        if named.start() < done:
            continue
        if not is_secret(name) and not ("=" in sign and is_secret_variable(name)):
            continue
        # `unexpected token: foo` is a sentence; a name is of several words, in capitals, or nothing but a password
        spoken = len(_WORD.findall(name)) > 1 or name.isupper() or name.lower().endswith(_ENDINGS)
        found = _VALUE.match(text, named.end()) if spoken or "=" in sign else None
        if found is None or _harmless(name, found["quoted"] or found["plain"]):
            continue
        quote = found["quote"] or ""
        if name.isupper() and sign == "=" and not quote:
            found = _VARIABLE.match(text, named.end()) or found
        parts += [text[done : found.start()], f"{quote}{REDACTED}{quote}"]
        done = found.end()
    return "".join([*parts, text[done:]])


def _harmless(name: str, value: str) -> bool:
    # a shell has what was taken out in quotes: without them it would be a redirection
    value = value.strip("'\"")
    # a count of tokens, an index of a key
    counted = not name.isupper() and name.lower().endswith(("token", "key"))
    return (
        value.lower() in _PLAIN_WORDS
        or value == REDACTED
        or _REFERENCE.fullmatch(value) is not None
        or (counted and value.replace(".", "").isdigit())
    )
