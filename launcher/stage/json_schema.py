"""`Schema` -> a JSON Schema (draft-07) of stage files, for editors: completion, hover, underlined mistakes.

It accepts every stage file that launch accepts, and refuses misspelt names and values of a wrong kind; what
it cannot see is listed in docs/editors.md. Words such as `1e-5`, `no` and `off` are taken as text too,
because YAML 1.1 and 1.2 read them differently. `errorMessage`, `doNotSuggest` and `enumDescriptions` are
editors' own keywords; validators leave them aside.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from launcher.config.document import plain
from launcher.config.keys import KEYS, LARGEST, OFF, ON, STAGES, Key
from launcher.dataset import mixture
from launcher.runs import slurm
from launcher.stage import explain, gates
from launcher.upstream.schema import Field, Schema, source_name
from launcher.upstream.trainers import BACKENDS, Entry

Json = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
DEFAULT_BACKEND = KEYS["backend"].default

_INTERPOLATED = r"\$\{"
_NUMBER = r"[-+]?(?:[\d_]+\.?[\d_]*|\.[\d_]+)(?:[eE][-+]?[\d_]+)?"
_NO_NUMBER = r"[-+]?(?:[iI][nN][fF]\w*|[nN][aA][nN])"
# What may stand for one word, by the kind that upstream's parser converts it to.
_WORDS: Mapping[str, Json] = {
    kind: {"type": types, "pattern": rf"{_INTERPOLATED}|{pattern}", "errorMessage": message, **limits}
    for kind, types, pattern, message, limits in (
        ("int", ["integer", "string"], r"^\s*[-+]?[\d_]+\s*$", "a whole number", {}),
        ("float", ["number", "string"], rf"^\s*(?:{_NUMBER}|{_NO_NUMBER})\s*$", "a number", {}),
        (
            "bool",
            ["boolean", "integer", "string"],
            r"^(?:[tTyY1fFnN0]|[yY][eE][sS]|[nN][oO]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|[oO][nN]|[oO][fF][fF])$",
            "true or false",
            {"minimum": 0, "maximum": 1},
        ),
        ("dict", ["string"], "^$", "a mapping cannot be given as a flag, upstream refuses every value", {}),
    )
}


def combined(schemas: Iterable[Schema]) -> Json:
    """One JSON Schema for stage files of these scripts, by its own `stage`, `backend` and `script`.

    Where a file leaves the choice to the file that it extends, whatever one of the candidates takes is accepted.
    """
    schemas = list(schemas)
    stages = [name for name in STAGES if any(s.stage == name for s in schemas)]
    backends = [name for name in BACKENDS if any(s.backend == name for s in schemas)]
    own = any(schema.key == schema.stage for schema in schemas)
    needed = {"stage": True, "backend": DEFAULT_BACKEND not in backends, "script": not own}
    required = {"required": [key for key, is_needed in needed.items() if is_needed]}
    named = f"{'+'.join(stages if own else [s.key for s in schemas])}-{'+'.join(backends)}"
    sources = ", ".join(dict.fromkeys(source_name(s.backend, s.version) for s in schemas))
    further = [schema.key for schema in schemas if schema.key != schema.stage]
    references = [{"$ref": f"#/definitions/{schema.backend}-{schema.key}"} for schema in schemas]
    conditions = [_says_it_is(schema, further) for schema in schemas]
    choices: list[tuple[Json, Json]] = [
        *zip(conditions, references, strict=True),
        ({"not": {"anyOf": conditions}}, {"anyOf": references}),
    ]
    return {
        "$schema": DRAFT,
        "$id": f"urn:launch:stage-file:{named}",
        "title": f"launch stage file ({', '.join(stages)}; {', '.join(backends)})",
        "$comment": f"made by `launch schema --json-schema` from {sources}",
        "type": "object",
        "properties": _options(stages, backends, schemas),
        "additionalProperties": False,
        "allOf": [
            {"if": {"required": ["extends"]}, "else": required},
            *({"if": condition, "then": {"properties": {"args": args}}} for condition, args in choices),
        ],
        "definitions": {f"{schema.backend}-{schema.key}": _args(schema) for schema in schemas},
    }


def _says_it_is(schema: Schema, further: Sequence[str]) -> Json:
    """What a file says of itself whose arguments are those of this script."""
    backend = _is("backend", [schema.backend])
    if schema.backend == DEFAULT_BACKEND:
        unsaid = {"not": {"required": ["extends"]}, "properties": {"backend": {"type": "null"}}}
        backend = {"anyOf": [backend, unsaid]}
    # a further script of a stage runs where it is named
    script = {"not": _is("script", further)} if schema.key == schema.stage else _is("script", [schema.key])
    return {"allOf": [_is("stage", [schema.stage]), backend, script]}


def _is(key: str, values: Sequence[str]) -> Json:
    return {"required": [key], "properties": {key: {"enum": list(values)}}}


def _options(stages: Sequence[str], backends: Sequence[str], schemas: Sequence[Schema]) -> Json:
    scripts = {s.key: BACKENDS[s.backend].STAGES[s.key].script for s in schemas}
    files = "|".join(sorted({path.rpartition("/")[2] for path in scripts.values()}))
    attention = [_enum("attention", KEYS["attention"].words), {"type": "string", "pattern": "/"}]
    several = {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"anyOf": attention}}
    script = _word("script", list(scripts), [None], rf"{_INTERPOLATED}|(?:^|/)(?:{files})$")
    script["anyOf"][0]["enumDescriptions"] = list(scripts.values())
    own: dict[str, Json] = {
        "stage": _word("stage", stages),
        "backend": _word("backend", backends, [None]),
        "script": script,
        "deepspeed": _word("deepspeed", KEYS["deepspeed"].words, [False, None], ""),
        "attention": {
            "anyOf": [{"title": "attention (in order)", **several}, *attention, _silent("attention", [None])]
        },
        # which options there are is sbatch's to say
        "slurm": {
            "type": ["object", "null"],
            "propertyNames": {"not": {"enum": sorted(slurm.RESERVED)}},
            "additionalProperties": {"type": ["string", "number", "boolean", "null"], "pattern": r"\S"},
        },
        "gates": _mapping({name: {"description": what} for name, (_, what) in gates.GATES.items()}),
        "args": {"type": ["object", "null"]},
        "extends": {"type": ["string", "null"], "pattern": r"\S"},
    }
    return {
        name: {"title": name, "description": key.meaning, **(own.get(name) or _of(key))} for name, key in KEYS.items()
    }


def _of(key: Key) -> Json:
    if key.kind == "number":
        digits = "^[0-9]{1,9}$"
        if key.least > 0:
            digits = "^(?=.*[1-9])[0-9]{1,9}$"
        return {
            "type": ["integer", "string", "null"],
            "minimum": key.least,
            "maximum": LARGEST,
            "pattern": f"{_INTERPOLATED}|{digits}",
            "description": key.meaning,
            "errorMessage": key.shape,
        }
    if key.kind == "text":
        return {"type": ["string", "number", "boolean", "null"]}
    mapping = _mapping({part.name: _of(part) for part in key.parts})
    if key.kind == "mapping" and not key.switch:
        return mapping
    words = key.words or ("on", "off")
    # how the YAML of launch and of an editor may read a plain `on` or `No`
    others: list[Any] = [None]
    for value, texts in ((True, ON), (False, OFF)):
        if not set(texts).isdisjoint(words):
            others += [value, *(form for t in texts for form in (t, t.capitalize(), t.upper()))]
    meaning = key.meaning or f"{key.name}: {', '.join(key.words)}"
    found = {"description": meaning, **_word(key.name, words, others)}
    if key.switch:
        found["anyOf"].append({"title": f"{key.name} (mapping)", **mapping, "type": "object"})
    return found


def _mapping(properties: Json) -> Json:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _word(key: str, names: Sequence[Any], others: Sequence[Any] = (), text: str = _INTERPOLATED) -> Json:
    """One of some names; `others`, and texts of a pattern, are accepted and not suggested.

    As alternatives and not as if-then-else, where yaml-language-server suggests nothing. Their titles
    differ, or its hover would take them for one and show each.
    """
    written = {"title": f"{key} (text)", "type": "string", "pattern": text}
    return {"anyOf": [_enum(key, names), written, _silent(key, others)]}


def _enum(key: str, names: Sequence[Any]) -> Json:
    # texts are said to be texts, or an editor would insert a plain `no`, which is a bool
    typed = {"type": "string"} if all(isinstance(name, str) for name in names) else {}
    message = f"one of {', '.join(dict.fromkeys(map(str, names)))}"
    return {"title": key, "enum": list(names), "errorMessage": message, **typed}


def _silent(key: str, values: Sequence[Any]) -> Json:
    # an `enum` would make editors suggest them
    return {"title": f"{key} (other)", "not": {"not": {"enum": list(values)}}}


def _args(schema: Schema) -> Json:
    entry, notes = BACKENDS[schema.backend].STAGES[schema.key], explain.notes(schema)
    properties: Json = {}
    for name, known in schema.fields.items():
        properties[name] = {"title": name, **_description(known, entry, notes.get(name, ()))}
        if name in entry.hints and known.kind in {"str", "dict"}:
            # upstream refuses it whatever it holds
            properties[name] |= {"type": "null", "doNotSuggest": True, "errorMessage": entry.hints[name]}
        else:
            default = {"default": known.default} if _is_offered(schema, known) else {}
            properties[name] |= {**default, **_value_of(schema, known)}
    for key, moved in entry.moved.items():
        advice = "delete the line" if moved.to is None else f"write `{moved.to}`"
        message = f"not a field of {entry.owner}: {moved.why}; {advice}"
        # a key that this script does not have: no text matches, and nothing else is a text
        refused = {"description": message, "errorMessage": message, "doNotSuggest": True}
        properties.setdefault(key, {"title": key, **refused, "type": "string", "pattern": "(?!)"})
    return _mapping(properties)


def _description(known: Field, entry: Entry, notes: Sequence[str]) -> Json:
    """What is known of a field: its type, default, place, and `notes`."""
    given = json.dumps(known.default, default=str)
    default = known.default_text if known.default is None else given
    lines = [f"default: `{default or 'none'}`", f"defined in `{known.where}`"]
    if known.name in entry.derived:
        value, why = entry.derived[known.name]
        lines.append(f"launch sets `{value}` where it is not given: {why}")
    if known.name in entry.hints:
        lines.append(entry.hints[known.name])
    text = "\n".join([f"{known.type}, {lines[0]}", *lines[1:], *notes])
    return {"description": text.replace("`", "")}


def _is_offered(schema: Schema, known: Field) -> bool:
    """Whether an editor may insert the default: it is plain JSON, and launch takes it."""
    try:
        json.dumps(known.default, allow_nan=False)
    except (TypeError, ValueError):
        return False
    words = [] if known.default is None else schema.words(known.name, known.default)
    return bool(words) and schema.refusal(known.name, words) is None


def _value_of(schema: Schema, known: Field) -> Json:
    """What a stage file may hold for a field, also where only the trainer's config file can carry it."""
    value = _value(known)
    if known.name not in schema.by_file:
        return value
    if known.name == "datasets":
        names = value["items"]
        return {**value, "items": {"anyOf": [names, _set_of_mixture()]}}
    if known.kind == "str":
        return {key: limit for key, limit in value.items() if key not in ("minItems", "maxItems")}
    return value


def _set_of_mixture() -> Json:
    """One entry of `datasets`."""
    text: Json = {"type": ["string", "null"]}
    texts: Json = {"type": ["string", "array"], "items": {"type": "string"}}
    types: Json = {
        "path": {"type": "string"},
        "split": {"type": "string", "default": "train"},
        "columns": {"type": ["array", "null"], "items": {"type": "string"}},
        "fraction": {"type": ["number", "null"]},
        "data_files": {"type": [*texts["type"], "object", "null"], "items": texts["items"]},
    }
    properties = {key: {"title": key, "description": _MEANINGS[key], **types.get(key, text)} for key in mixture.KEYS}
    return {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}


_MEANINGS = {
    "path": "a folder, a name on the hub, or a reader such as json",
    "name": "the configuration of the data set",
    "data_dir": "the folder in it that holds the files",
    "data_files": "the files, a list of them, or those of each split",
    "split": "the split, or a part of it: train[:1000], train[10%:20%]",
    "columns": "the columns to keep",
    "fraction": "its share of the whole mixture, given for all sets or for none",
}


def _value(known: Field) -> Json:
    """What a stage file may hold for a field: null, one word, or a list of words."""
    # upstream's parser takes a list of one word for the word itself
    limits: Json = {"minItems": 1} if known.many else {"minItems": 1, "maxItems": 1}
    if known.choices or known.kind == "choice":
        names = list(dict.fromkeys(v for choice in known.choices for v in _spellings(choice)))
        one = _word(known.name, names, [None])
        return {"anyOf": [*one["anyOf"], {"title": f"{known.name} (list)", "type": "array", "items": one, **limits}]}
    if known.kind in _WORDS:
        word = _WORDS[known.kind]
        if known.refusal(["none"]) is None:
            none = "|^(?:[nN][oO][nN][eE]|[nN][uU][lL][lL])$"
            word = {**word, "pattern": word["pattern"] + none}
        return {**word, "type": [*word["type"], "array", "null"], "items": word, **limits}
    # text, and what becomes one: a number or a bool is accepted and not suggested
    mapping = [] if not known.many and "dict" in known.type else ["object"]
    return {
        "anyOf": [
            {"title": known.name, "type": "string"},
            {"title": f"{known.name} (no text)", "not": {"type": ["string", *mapping]}},
        ],
        "items": {"type": ["string", "number", "boolean"]},
        **limits,
    }


def _spellings(choice: Any) -> Iterator[Any]:
    """The values that become the same word as a choice."""
    for value in (choice, str(choice), plain(str(choice))):
        if str(value) == str(choice):
            yield value
