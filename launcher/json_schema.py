"""`Schema` -> a JSON Schema (draft-07) of stage files, for editors: completion, hover, underlined mistakes.

It accepts every stage file that launch accepts, and refuses what launch refuses as far as JSON Schema
can say: what it cannot see is listed in docs/editors.md. Words such as `1e-5`, `no` and `off` are
taken as text too, because YAML 1.1 and 1.2 read them differently. `errorMessage`, `doNotSuggest`,
`enumDescriptions` and `markdownDescription` are editors' own keywords; validators leave them aside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from launcher import gates, options, rules, sbatch, skypilot
from launcher.backends import BACKENDS, Entry, Moved
from launcher.builder import plain
from launcher.keys import DEEPSPEED, KEYS, LARGEST, OFF, ON, STAGES, Key
from launcher.schema import Field, Schema, Values

Json = dict[str, Any]
Notes = Mapping[str, Sequence[str]]

DRAFT = "http://json-schema.org/draft-07/schema#"
DEFAULT_BACKEND = KEYS["backend"].default

# Both Python's and ECMA's regular expressions. The end: `$` would let Python pass a line end.
_END = r"(?![\s\S])"
_INTERPOLATED = r"\$\{"
# argparse's test for a word that cannot be a value, as far as it does not hang on upstream's flags
_NO_FLAG = r"(?!-(?:h|-=|(?!\d+\n?$|\d*\.\d+\n?$)[^ ]+$))"
_DIGITS = r"\d+(?:_\d+)*"
_INT = rf"\s*[-+]?{_DIGITS}\s*"
_DECIMAL = rf"(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?{_DIGITS})?"
_NO_DECIMAL = "[iI][nN][fF](?:[iI][nN][iI][tT][yY])?|[nN][aA][nN]"
_FLOAT = rf"\s*[-+]?(?:{_DECIMAL}|{_NO_DECIMAL})\s*"
_NONE, _FALSE, _TRUE = ("none", "null"), ("no", "off", "false"), ("yes", "on", "true")
# upstream's own words for a bool, and YAML 1.1's, which a YAML 1.2 parser hands over as text
_BOOL = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0", "on", "off")
# Python writes smaller ones with an exponent, which argparse does not know for negative numbers
_SMALL = {"type": "number", "exclusiveMinimum": -0.0001, "exclusiveMaximum": 0}
_WRITE = 'argparse knows no negative numbers with an exponent: in quotes, "-0.00001"'
_WRITTEN_OUT = {"allOf": [{"if": _SMALL, "then": {"type": "string", "errorMessage": _WRITE}}]}


def combined(
    schemas: Iterable[Schema], *, notes: Mapping[tuple[str, str], Notes] | None = None
) -> Json:
    """One JSON Schema for stage files of these scripts, chosen by a file's own `stage` and `backend`.

    `notes` are further lines for the hover text of a field (what reads it, its history), by (backend, key
    of the script) and its name. Where a file leaves the choice to the file that it extends, whatever one
    of the candidates takes is accepted.
    """
    parts = [(schema, BACKENDS[schema.backend].STAGES[schema.key]) for schema in schemas]
    given = notes or {}
    return _document(parts, [given.get((s.backend, s.key), {}) for s, _ in parts])


# --- the file -------------------------------------------------------------------------------------


def _document(parts: Sequence[tuple[Schema, Entry]], notes: Sequence[Notes]) -> Json:
    stages = [name for name in STAGES if any(s.stage == name for s, _ in parts)]
    backends = [name for name in BACKENDS if any(s.backend == name for s, _ in parts)]
    keys = list(dict.fromkeys(schema.key for schema, _ in parts))
    name = f"{'+'.join(keys if not set(keys) & set(stages) else stages)}-{'+'.join(backends)}"
    sources = ", ".join(dict.fromkeys(f"{s.backend} {s.version}" for s, _ in parts))
    return {
        "$schema": DRAFT,
        "$id": f"urn:launch:stage-file:{name}",
        "title": f"launch stage file ({', '.join(stages)}; {', '.join(backends)})",
        "$comment": f"made by `launch schema --json-schema` from {sources}",
        "type": "object",
        "properties": _options(stages, backends, parts),
        "additionalProperties": False,
        "allOf": [
            {"if": {"required": ["extends"]}, "else": {"required": _required(parts, backends)}},
            *_choose(parts, stages, backends),
        ],
        "definitions": {
            _key(schema): _args(schema, entry, extra)
            for (schema, entry), extra in zip(parts, notes, strict=True)
        }
        | {kind: {"title": word["errorMessage"], **word} for kind, word in _words().items()},
    }


def _key(schema: Schema) -> str:
    return f"{schema.backend}-{schema.key}"


def _required(parts: Sequence[tuple[Schema, Entry]], backends: Sequence[str]) -> list[str]:
    needed = ["stage"] if DEFAULT_BACKEND in backends else ["stage", "backend"]
    # a further script of a stage runs where it is named
    own = any(schema.key == schema.stage for schema, _ in parts)
    return needed if own else [*needed, "script"]


def _choose(
    parts: Sequence[tuple[Schema, Entry]], stages: Sequence[str], backends: Sequence[str]
) -> Iterator[Json]:
    """Which arguments are checked: by what the file says of itself, None where it says nothing."""
    for stage in (*stages, None):
        for backend in (*backends, None):
            fitting = [
                (schema, entry)
                for schema, entry in parts
                if stage in {None, schema.stage} and backend in {None, schema.backend}
            ]
            given = [_is_stage(stage, stages), _is_backend(backend, backends)]
            if fitting:
                scripts = {"properties": {"script": _script(fitting)}}
                yield {"if": {"allOf": given}, "then": scripts}
            yield from _choose_script([schema for schema, _ in fitting], given)


def _choose_script(fitting: Sequence[Schema], given: list[Json]) -> Iterator[Json]:
    """The arguments of a stage's own script where `script` is silent, else those of the one it names."""
    further = sorted({schema.key for schema in fitting if schema.key != schema.stage})
    named = {schema.key for schema in fitting}
    own = [schema for schema in fitting if schema.key not in further] or fitting
    for script, some in (
        *((key, [s for s in fitting if s.key == key]) for key in further if len(named) > 1),
        (None, own),
    ):
        listed = [{"$ref": f"#/definitions/{_key(schema)}"} for schema in some]
        if listed:
            told = [_says("script", key) for key in further]
            others = {"not": {"anyOf": told}} if told else {}
            which = others if script is None else _says("script", script)
            yield {
                "if": {"allOf": [*given, *([which] if which else [])]},
                "then": {
                    "properties": {"args": listed[0] if len(listed) == 1 else {"anyOf": listed}}
                },
            }


def _is_stage(stage: str | None, stages: Sequence[str]) -> Json:
    if stage is None:
        return {"not": {"anyOf": [_says("stage", known) for known in stages]}}
    return _says("stage", stage)


def _is_backend(backend: str | None, backends: Sequence[str]) -> Json:
    if backend is None:
        return {"not": {"anyOf": [_is_backend(known, backends) for known in backends]}}
    if backend != DEFAULT_BACKEND:
        return _says("backend", backend)
    unsaid = {"not": {"required": ["extends"]}, "properties": {"backend": {"type": "null"}}}
    return {"anyOf": [_says("backend", backend), unsaid]}


def _says(key: str, value: str) -> Json:
    return {"required": [key], "properties": {key: {"const": value}}}


# --- launch's own options -------------------------------------------------------------------------


def _options(
    stages: Sequence[str], backends: Sequence[str], parts: Sequence[tuple[Schema, Entry]]
) -> Json:
    own: dict[str, Json] = {
        "stage": _one_of("stage", stages, KEYS["stage"].meaning, []),
        "backend": _backend(backends),
        "script": _script(parts),
        "deepspeed": _deepspeed(),
        "attention": _attention(),
        "slurm": _sbatch(),
        "skypilot": _skypilot(),
        "gates": _gates(),
        "args": {"type": ["object", "null"]},
        "extends": {"type": ["string", "null"], "pattern": r"\S"},
    }
    return {
        name: {"title": name, "description": key.meaning, **(own.get(name) or _of(key))}
        for name, key in KEYS.items()
    }


def _of(key: Key) -> Json:
    """What a key of launch's own takes, by its kind."""
    if key.kind == "word":
        on, off = (not set(words).isdisjoint(key.words) for words in (ON, OFF))
        texts = (*(_TRUE if on else ()), *(_FALSE if off else ()))
        others = [*([True] if on else []), *([False] if off else []), None]
        meaning = key.meaning or f"{key.name}: {', '.join(key.words)}"
        return _one_of(key.name, key.words, meaning, others, texts)
    if key.kind == "switch":
        texts = (*_TRUE, *_FALSE)
        return _one_of(key.name, ("on", "off"), key.meaning, [True, False, None], texts)
    if key.kind == "number":
        return {
            "type": ["integer", "string", "null"],
            "minimum": 1,
            "maximum": LARGEST,
            "pattern": rf"{_INTERPOLATED}|^(?=[0-9]{{1,9}}{_END})0*[1-9]",
            "errorMessage": key.shape,
            "description": key.meaning,
        }
    if key.kind == "text":
        return {"type": ["string", "number", "boolean", "null"]}
    mapping = {
        "type": ["object", "null"],
        "properties": {part.name: _of(part) for part in key.parts},
        "additionalProperties": False,
    }
    if not key.switch:
        return mapping
    switch = _enum(f"{key.name} (switch)", ("on", "off"), [True, False, None], (*_TRUE, *_FALSE))
    return {"anyOf": [{"title": key.name, **mapping, "type": "object"}, *switch["anyOf"]]}


def _script(parts: Sequence[tuple[Schema, Entry]]) -> Json:
    """Upstream's script: its key, or its path; without it the stage's own runs."""
    keys = list(dict.fromkeys(schema.key for schema, _ in parts))
    told = [", ".join(e.script for s, e in parts if s.key == key) for key in keys]
    files = sorted({entry.script.rpartition("/")[2].removesuffix(".py") for _, entry in parts})
    return {
        "anyOf": [
            {"title": "script", "enum": keys, "type": "string", "enumDescriptions": told},
            {
                "title": "script (path)",
                "type": "string",
                "pattern": rf"{_INTERPOLATED}|(?:^|/)(?:{'|'.join(files)})\.py{_END}",
            },
            _silently("script", [None]),
        ],
    }


def _sbatch() -> Json:
    """sbatch's options, `_` for `-`; which of them take a value, `launcher.sbatch` knows."""
    scalar = {"type": ["string", "number", "boolean", "null"]}
    names = sorted({*sbatch.KEYS, *(name.replace("-", "_") for name in sbatch.KEYS)})
    return {
        "type": ["object", "null"],
        "properties": dict.fromkeys(names, scalar),
        "additionalProperties": False,
    }


def _skypilot() -> Json:
    kinds: dict[type, str] = {str: "string", dict: "object", list: "array"}
    return {
        "type": ["object", "null"],
        "properties": {
            name: {"type": [*(kinds[kind] for kind in allowed), "null"]}
            for name, allowed in skypilot.FIELDS.items()
        },
        "additionalProperties": False,
    }


def _gates() -> Json:
    """The limits of a ladder: where a gate turns red, or red and yellow."""
    number = {"type": ["number", "null"]}
    pair = {
        "type": "object",
        "properties": {"red": number, "yellow": number},
        "additionalProperties": False,
        "minProperties": 1,
    }
    switch = {"enum": ["on", "off", True, False, None]}
    # what will be a number when it is read
    later = {"type": "string", "pattern": _INTERPOLATED}
    return {
        "type": ["object", "null"],
        "properties": {
            name: {"description": told, "anyOf": [number, pair, switch, later]}
            for name, (_, told) in gates.GATES.items()
        },
        "additionalProperties": False,
    }


def _backend(backends: Sequence[str]) -> Json:
    if DEFAULT_BACKEND not in backends:
        return _one_of("backend", backends, "the trainer", [])
    return _one_of("backend", backends, f"the trainer; {DEFAULT_BACKEND} where it is not set")


def _deepspeed() -> Json:
    names = (*DEEPSPEED, "none")
    told = [*(_zero(name) for name in DEEPSPEED), "no DeepSpeed"]
    return {
        "description": f"a DeepSpeed config: {', '.join(names)}, or a path",
        "anyOf": [
            {"title": "deepspeed", "enum": list(names), "type": "string", "enumDescriptions": told},
            {"title": "deepspeed (path)", "type": "string"},
            _silently("deepspeed", [False, None]),
        ],
    }


def _zero(name: str) -> str:
    """What a packaged DeepSpeed config does, read from it."""
    config = json.loads(options.deepspeed_file(name).read_text(encoding="utf-8"))
    zero = config["zero_optimization"]
    told = [f"ZeRO stage {zero['stage']}"]
    if "communication_data_type" in config:
        told.append(f"communication in {config['communication_data_type']}")
    for part, name in (("param", "parameters"), ("optimizer", "optimizer")):
        if f"offload_{part}" in zero:
            told.append(f"{name} offloaded to {zero[f'offload_{part}']['device']}")
    return ", ".join(told)


def _attention() -> Json:
    names = list(KEYS["attention"].words)
    one = {
        "anyOf": [
            {"title": "attention", "enum": names, "type": "string"},
            {"title": "attention (a kernel's repository)", "type": "string", "pattern": "/"},
        ]
    }
    several = {"type": "array", "minItems": 1, "uniqueItems": True, "items": one}
    return {
        "anyOf": [
            {"title": "attention (in order)", **several},
            *one["anyOf"],
            _silently("attention", [None]),
        ],
    }


def _one_of(
    key: str,
    names: Sequence[str],
    description: str,
    others: Sequence[Any] = (None,),
    words: Sequence[str] = (),
) -> Json:
    """One of some names; `others`, and `words` in any spelling, are accepted and not suggested."""
    return {"title": key, "description": description, **_enum(key, names, others, words)}


def _enum(
    key: str, values: Sequence[Any], others: Sequence[Any] = (), words: Sequence[str] = ()
) -> Json:
    """As alternatives and not as if-then-else, where yaml-language-server suggests nothing.

    Their titles differ, or its hover would take them for one and show each.
    """
    message = f"one of {', '.join(dict.fromkeys(map(str, values)))}"
    texts = rf"|^(?:{_any_case(words)}){_END}" if words else ""
    interpolated = {"type": "string", "pattern": f"{_INTERPOLATED}{texts}", "errorMessage": message}
    found: list[Json] = [
        {"title": key, "enum": list(values), **_quoted(values), "errorMessage": message},
        {"title": f"{key} (interpolated)", **interpolated},
    ]
    return {"anyOf": [*found, *([_silently(key, others)] if others else [])]}


def _quoted(values: Sequence[Any]) -> Json:
    """Texts are said to be texts, or an editor would insert a plain `no`, which is a bool."""
    return {"type": "string"} if all(isinstance(value, str) for value in values) else {}


def _silently(key: str, values: Sequence[Any]) -> Json:
    """These values, where an `enum` would make editors suggest them."""
    return {"title": f"{key} (other)", "not": {"not": {"enum": list(values)}}}


def _any_case(words: Iterable[str]) -> str:
    return "|".join(
        "".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in word) for word in words
    )


# --- upstream's arguments -------------------------------------------------------------------------


def _args(schema: Schema, entry: Entry, notes: Notes) -> Json:
    properties = {name: _field(schema, entry, name, notes) for name in schema.fields}
    moved = {
        key: {"title": key, **_moved(entry, move)}
        for key, move in entry.moved.items()
        if key not in properties
    }
    return {
        "type": ["object", "null"],
        "properties": {**properties, **moved},
        "additionalProperties": False,
    }


def _moved(entry: Entry, moved: Moved) -> Json:
    """A key that this script does not have: always refused, with the reason in the editor."""
    advice = "delete the line" if moved.to is None else f"write `{moved.to}`"
    message = f"not a field of {entry.owner}: {moved.why}; {advice}"
    # no text matches, and nothing else is a text: refused with one message, not with two
    return {
        "description": message,
        "doNotSuggest": True,
        "type": "string",
        "pattern": "(?!)",
        "errorMessage": message,
    }


def _field(schema: Schema, entry: Entry, name: str, notes: Notes) -> Json:
    known = schema.fields[name]
    told = {"title": name, **_told(known, entry, notes.get(name, ()))}
    if _never(schema, entry, name):
        return {
            **told,
            "type": "null",
            "doNotSuggest": True,
            "errorMessage": entry.hints[name],
        }
    default = {"default": known.default} if _is_offered(schema, known) else {}
    return {**told, **default, **_value(schema, known)}


def _told(known: Field, entry: Entry, notes: Sequence[str]) -> Json:
    """What is known of a field, as text and as Markdown: its type, default, place, and `notes`."""
    given = json.dumps(known.default, default=str)
    default = known.default_text if known.default is None else given
    lines = [f"default: `{default or 'none'}`", f"defined in `{known.where}`"]
    if known.name in entry.derived:
        value, why = entry.derived[known.name]
        lines.append(f"launch sets `{value}` where it is not given: {why}")
    if known.name in entry.hints:
        lines.append(entry.hints[known.name])
    lines += notes
    markdown = "\n\n".join([f"`{known.type}`, {lines[0]}", *lines[1:]])
    text = "\n".join([f"{known.type}, {lines[0]}", *lines[1:]])
    return {"description": text.replace("`", ""), "markdownDescription": markdown}


def _never(schema: Schema, entry: Entry, name: str) -> bool:
    """Whether upstream refuses a field whatever it holds (a key that has a hint, and a rule)."""
    if name not in entry.hints or schema.fields[name].kind not in {"str", "dict"}:
        return False
    found = rules.apply(Values(schema, {name: ""}))
    return any(f.layer == "parser" and f.key == f"args.{name}" for f in found)


def _is_offered(schema: Schema, known: Field) -> bool:
    """Whether an editor may insert the default: it is plain JSON, and launch takes it."""
    try:
        json.dumps(known.default, allow_nan=False)
    except (TypeError, ValueError):
        return False
    words = [] if known.default is None else schema.words(known.name, known.default)
    return bool(words) and schema.refusal(known.name, words) is None


def _value(schema: Schema, known: Field) -> Json:
    """What a stage file may hold for a field: null, one word, or a list of words."""
    if known.choices or known.kind == "choice":
        return _chosen(known)
    kind = _kind(known)
    word = _words()[kind]
    listed: Json = {"items": {"$ref": f"#/definitions/{kind}"}, "minItems": 1}
    # upstream's parser takes a list of one word for the word itself
    alone = {"if": {"type": "array"}, "then": {**listed, "maxItems": 1}}
    if kind == "str":
        pattern = _several() if known.name in schema.splits else word["pattern"]
        return {**(listed if known.many else alone), **_texts(known, pattern)}
    if known.many:
        return {**word, **listed, "type": ["array", *word["type"], "null"]}
    return {**word, **alone, "type": [*word["type"], "array", "null"]}


def _texts(known: Field, pattern: str) -> Json:
    """Text, and whatever becomes one: numbers and bools are accepted and not suggested."""
    message = _words()["str"]["errorMessage"]
    mapping = [] if not known.many and "dict" in known.type else ["object"]
    return {
        "anyOf": [
            {"title": known.name, "type": "string", "pattern": pattern, "errorMessage": message},
            {"title": f"{known.name} (no text)", "not": {"type": ["string", *mapping]}},
        ],
        **_WRITTEN_OUT,
    }


def _chosen(known: Field) -> Json:
    names = list(dict.fromkeys(v for choice in known.choices for v in _spellings(choice)))
    listed = {"items": _enum(known.name, names), "minItems": 1}
    whole = _enum(known.name, names, [None])["anyOf"]
    if known.many:
        return {**listed, "anyOf": [*whole, {"title": f"{known.name} (list)", "type": "array"}]}
    one = {"title": f"{known.name} (list of one)", "type": "array", **listed, "maxItems": 1}
    return {"anyOf": [*whole, one]}


def _kind(known: Field) -> str:
    kind = known.kind if known.kind in {"int", "float", "bool", "dict"} else "str"
    none = kind != "str" and known.refusal(["none"]) is None
    return f"{kind}-or-none" if none else kind


@cache
def _words() -> dict[str, Json]:
    """What may stand for one word, by the kind that upstream's parser converts it to."""
    words: dict[str, Json] = {
        "int": {
            "type": ["integer", "string"],
            "pattern": _text(_INT),
            "errorMessage": "a whole number",
        },
        "float": {
            "type": ["number", "string"],
            "pattern": _text(_FLOAT),
            "errorMessage": "a number",
            **_WRITTEN_OUT,
        },
        "bool": {
            "type": ["boolean", "integer", "string"],
            "minimum": 0,
            "maximum": 1,
            "pattern": rf"{_INTERPOLATED}|^(?:{_any_case(_BOOL)}){_END}",
            "errorMessage": "true or false",
        },
        "str": {
            "type": ["string", "number", "boolean"],
            "pattern": _text(),
            "errorMessage": "text; what reads as a flag (`-x`) cannot be a value",
            **_WRITTEN_OUT,
        },
        "dict": {
            "type": ["string"],
            "pattern": rf"{_INTERPOLATED}|^{_END}",
            "errorMessage": "a mapping cannot be given as a flag, upstream refuses every value",
        },
    }
    none = f"|^(?:{_any_case(_NONE)}){_END}"
    return words | {
        f"{kind}-or-none": {**word, "pattern": word["pattern"] + none}
        for kind, word in words.items()
        if kind != "str"
    }


def _spellings(choice: Any) -> Iterator[Any]:
    """The values that become the same word as a choice."""
    for value in (choice, str(choice), plain(str(choice))):
        if str(value) == str(choice):
            yield value


def _text(words: str | None = None) -> str:
    """A pattern of texts that argparse would take for a value, and of interpolated ones."""
    rest = "" if words is None else f"(?:{words}){_END}"
    return rf"{_INTERPOLATED}|^{_NO_FLAG}{rest}"


def _several() -> str:
    """A pattern of one or more words with blanks between them, none of which reads as a flag."""
    word = r"(?:[^-\s]\S*|-|-\d+|-\d*\.\d+)"
    return rf"{_INTERPOLATED}|^\s*{word}(?:\s+{word})*\s*{_END}"
