"""`Schema` -> a JSON Schema (draft-07) of stage files, for editors: completion, hover, mistakes.

It accepts every stage file that launch accepts, and refuses misspelt names and values of a wrong
kind; docs/editors.md lists what it cannot see. Words such as `1e-5`, `no` and `off` are accepted as
text too, because YAML 1.1 and 1.2 read them differently. `errorMessage`, `doNotSuggest` and
`enumDescriptions` are editors' own keywords; validators ignore them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.config.document import parse_scalar
from launcher.config.keys import KEYS, LARGEST, OFF, ON, STAGES, Key
from launcher.runs import slurm
from launcher.stage import explain, gates
from launcher.upstream.schema import Field, Schema, name_source
from launcher.upstream.trainers import BACKENDS, Entry

Json = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
DEFAULT_BACKEND = KEYS["backend"].default

_INTERPOLATED = r"\$\{"
_NUMBER = r"[-+]?(?:[\d_]+\.?[\d_]*|\.[\d_]+)(?:[eE][-+]?[\d_]+)?"
_NO_NUMBER = r"[-+]?(?:[iI][nN][fF]\w*|[nN][aA][nN])"
_BOOL = (
    r"^(?:[tTyY1fFnN0]|[yY][eE][sS]|[nN][oO]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|[oO][nN]|"
    r"[oO][fF][fF])$"
)


def _build_kind(types: list[str], pattern: str, message: str) -> Json:
    return {"type": types, "pattern": rf"{_INTERPOLATED}|{pattern}", "errorMessage": message}


_KINDS: Mapping[str, Json] = {
    "int": _build_kind(["integer", "string"], r"^\s*[-+]?[\d_]+\s*$", "a whole number"),
    "float": _build_kind(["number", "string"], rf"^\s*(?:{_NUMBER}|{_NO_NUMBER})\s*$", "a number"),
    "bool": {
        **_build_kind(["boolean", "integer", "string"], _BOOL, "true or false"),
        "minimum": 0,
        "maximum": 1,
    },
    "dict": _build_kind(
        ["string"], "^$", "a mapping cannot be given as a flag, upstream refuses every value"
    ),
}
"""One word, by the kind that upstream's parser converts it to."""


def combine_schemas(schemas: Iterable[Schema]) -> Json:
    """One JSON Schema for stage files of these scripts, by its own `stage`, `backend` and `script`.

    If a file leaves the choice to the file that it extends, what any of the candidates takes is
    accepted.
    """
    schemas = list(schemas)
    covered_stages = {schema.stage for schema in schemas}
    covered_backends = {schema.backend for schema in schemas}
    stages = [name for name in STAGES if name in covered_stages]
    backends = [name for name in BACKENDS if name in covered_backends]
    further = [schema.key for schema in schemas if schema.key != schema.stage]
    has_own_script = len(further) < len(schemas)
    required = ["stage"]
    if DEFAULT_BACKEND not in backends:
        required.append("backend")
    names = stages
    if not has_own_script:
        required.append("script")
        names = further
    definitions = {}
    conditions = []
    references = []
    choices = []
    for schema in schemas:
        name = f"{schema.backend}-{schema.key}"
        definitions[name] = _build_args(schema)
        reference = {"$ref": f"#/definitions/{name}"}
        condition = _match_script(schema, further)
        references.append(reference)
        conditions.append(condition)
        choices.append(_build_choice(condition, reference))
    choices.append(_build_choice({"not": {"anyOf": conditions}}, {"anyOf": references}))
    sources = dict.fromkeys(name_source(schema.backend, schema.version) for schema in schemas)
    return {
        "$schema": DRAFT,
        "$id": f"urn:launch:stage-file:{'+'.join(names)}-{'+'.join(backends)}",
        "title": f"launch stage file ({', '.join(stages)}; {', '.join(backends)})",
        "$comment": f"made by `launch schema --json-schema` from {', '.join(sources)}",
        "type": "object",
        "properties": _build_options(stages, backends, schemas),
        "additionalProperties": False,
        "allOf": [{"if": {"required": ["extends"]}, "else": {"required": required}}, *choices],
        "definitions": definitions,
    }


def _build_choice(condition: Json, args: Json) -> Json:
    return {"if": condition, "then": {"properties": {"args": args}}}


def _match_script(schema: Schema, further: Sequence[str]) -> Json:
    """The condition that a stage file belongs to this script."""
    stage = _match_key("stage", [schema.stage])
    backend = _match_key("backend", [schema.backend])
    if schema.backend == DEFAULT_BACKEND:
        backend = {"anyOf": [backend, _NO_BACKEND]}
    script = _match_key("script", [schema.key])
    if schema.key == schema.stage:
        script = {"not": _match_key("script", further)}
    return {"allOf": [stage, backend, script]}


# a parent may name another one
_NO_BACKEND: Json = {"not": {"required": ["extends"]}, "properties": {"backend": {"type": "null"}}}


def _match_key(key: str, values: Sequence[str]) -> Json:
    return {"required": [key], "properties": {key: {"enum": list(values)}}}


def _build_options(
    stages: Sequence[str], backends: Sequence[str], schemas: Sequence[Schema]
) -> Json:
    types: dict[str, Json] = {
        "stage": _build_word("stage", stages),
        "backend": _build_word("backend", backends, [None]),
        "script": _build_script(schemas),
        "deepspeed": _build_word("deepspeed", KEYS["deepspeed"].words, [False, None], ""),
        "attention": _build_attention(),
        # sbatch knows which options there are
        "slurm": {
            "type": ["object", "null"],
            "propertyNames": {"not": {"enum": sorted(slurm.RESERVED)}},
            "additionalProperties": {
                "type": ["string", "number", "boolean", "null"],
                "pattern": r"\S",
            },
        },
        "gates": _build_mapping(
            {name: {"description": what} for name, (_, what) in gates.GATES.items()}
        ),
        "args": {"type": ["object", "null"]},
        "extends": {"type": ["string", "null"], "pattern": r"\S"},
    }
    options = {}
    for name, key in KEYS.items():
        type_of_key = types.get(name) or _build_option(key)
        options[name] = {"title": name, "description": key.meaning, **type_of_key}
    return options


def _build_script(schemas: Sequence[Schema]) -> Json:
    """The key of a script, or a path that ends in its file name."""
    scripts = {}
    for schema in schemas:
        scripts[schema.key] = BACKENDS[schema.backend].STAGES[schema.key].script
    files = "|".join(sorted({path.rpartition("/")[2] for path in scripts.values()}))
    script = _build_word("script", list(scripts), [None], rf"{_INTERPOLATED}|(?:^|/)(?:{files})$")
    script["anyOf"][0]["enumDescriptions"] = list(scripts.values())
    return script


def _build_attention() -> Json:
    """One implementation, or several in the order of preference."""
    single = [_build_enum("attention", KEYS["attention"].words), {"type": "string", "pattern": "/"}]
    several = {
        "title": "attention (in order)",
        "type": "array",
        "minItems": 1,
        "uniqueItems": True,
        "items": {"anyOf": single},
    }
    return {"anyOf": [several, *single, _accept_silently("attention", [None])]}


def _build_option(key: Key) -> Json:
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
    mapping = _build_mapping({part.name: _build_option(part) for part in key.parts})
    if key.kind == "mapping" and not key.switch:
        return mapping
    words = key.words or ("on", "off")
    # how the YAML of launch and of an editor may read a plain `on` or `No`
    others: list[Any] = [None]
    for value, texts in ((True, ON), (False, OFF)):
        if not set(texts).isdisjoint(words):
            others.append(value)
            for text in texts:
                others += [text, text.capitalize(), text.upper()]
    word = _build_word(key.name, words, others)
    if key.switch:
        word["anyOf"].append({"title": f"{key.name} (mapping)", **mapping, "type": "object"})
    return {"description": key.meaning or f"{key.name}: {', '.join(key.words)}", **word}


def _build_mapping(properties: Json) -> Json:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _build_word(
    key: str, names: Sequence[Any], others: Sequence[Any] = (), text: str = _INTERPOLATED
) -> Json:
    """One of some names; `others`, and texts of a pattern, are accepted and not suggested.

    These are alternatives and not if-then-else, where yaml-language-server suggests nothing. Their
    titles differ, or its hover would take them for one and show each.
    """
    pattern = {"title": f"{key} (text)", "type": "string", "pattern": text}
    return {"anyOf": [_build_enum(key, names), pattern, _accept_silently(key, others)]}


def _build_enum(key: str, names: Sequence[Any]) -> Json:
    message = f"one of {', '.join(dict.fromkeys(map(str, names)))}"
    enum: Json = {"title": key, "enum": list(names), "errorMessage": message}
    if all(isinstance(name, str) for name in names):
        # or an editor would insert a plain `no`, which is a bool
        enum["type"] = "string"
    return enum


def _accept_silently(key: str, values: Sequence[Any]) -> Json:
    # an `enum` would make editors suggest them
    return {"title": f"{key} (other)", "not": {"not": {"enum": list(values)}}}


def _build_args(schema: Schema) -> Json:
    entry = BACKENDS[schema.backend].STAGES[schema.key]
    notes = explain.list_notes(schema)
    properties: Json = {}
    for name, field in schema.fields.items():
        argument: Json = {
            "title": name,
            "description": _describe_field(field, entry, notes.get(name, ())),
        }
        if name in entry.hints and field.kind in {"str", "dict"}:
            # upstream refuses every value
            argument |= {"type": "null", "doNotSuggest": True, "errorMessage": entry.hints[name]}
        else:
            if _is_offered(schema, field):
                argument["default"] = field.default
            argument |= _build_value(schema, field)
        properties[name] = argument
    for key, moved in entry.moved.items():
        advice = f"write `{moved.to}`"
        if moved.to is None:
            advice = "delete the line"
        message = f"not a field of {entry.owner}: {moved.why}; {advice}"
        refused = {
            "title": key,
            "description": message,
            "errorMessage": message,
            "doNotSuggest": True,
            # nothing is a text that no pattern matches
            "type": "string",
            "pattern": "(?!)",
        }
        properties.setdefault(key, refused)
    return _build_mapping(properties)


def _describe_field(field: Field, entry: Entry, notes: Sequence[str]) -> str:
    """What is known of a field: its type, default, place, and `notes`."""
    default = json.dumps(field.default, default=str)
    if field.default is None:
        default = field.default_text or "none"
    lines = [f"{field.type}, default: {default}"]
    lines.append(f"defined in {field.where}")
    if field.name in entry.derived:
        value, why = entry.derived[field.name]
        lines.append(f"launch sets {value} where it is not given: {why}")
    if field.name in entry.hints:
        lines.append(entry.hints[field.name])
    lines += notes
    return "\n".join(lines).replace("`", "")


def _is_offered(schema: Schema, field: Field) -> bool:
    """Whether an editor may insert the default: it is plain JSON, and launch takes it."""
    if field.default is None:
        return False
    try:
        json.dumps(field.default, allow_nan=False)
    except (TypeError, ValueError):
        return False
    words = schema.words(field.name, field.default)
    return bool(words) and schema.refusal(field.name, words) is None


def _build_value(schema: Schema, field: Field) -> Json:
    """What a stage file may hold for a field, also where only the trainer's file can carry it."""
    value = _build_plain_value(field)
    if field.name not in schema.by_file:
        return value
    if field.name == "datasets":
        mixture = {"type": "object", "required": ["path"]}
        return {**value, "items": {"anyOf": [value["items"], mixture]}}
    if field.kind == "str":
        return {key: limit for key, limit in value.items() if key not in ("minItems", "maxItems")}
    return value


def _build_plain_value(field: Field) -> Json:
    """What a stage file may hold for a field: null, one word, or a list of words."""
    limits: Json = {"minItems": 1}
    if not field.many:
        # upstream's parser takes a list of one word for the word itself
        limits["maxItems"] = 1
    if field.choices or field.kind == "choice":
        word = _build_word(field.name, _list_spellings(field.choices), [None])
        title = f"{field.name} (list)"
        words = {"title": title, "type": "array", "items": word, **limits}
        return {"anyOf": [*word["anyOf"], words]}
    if field.kind in _KINDS:
        word = _KINDS[field.kind]
        if field.refusal(["none"]) is None:
            none = "|^(?:[nN][oO][nN][eE]|[nN][uU][lL][lL])$"
            word = {**word, "pattern": word["pattern"] + none}
        return {**word, "type": [*word["type"], "array", "null"], "items": word, **limits}
    # text, and what becomes one: a number or a bool is accepted and not suggested
    no_text = ["string"]
    if field.many or "dict" not in field.type:
        no_text.append("object")
    return {
        "anyOf": [
            {"title": field.name, "type": "string"},
            {"title": f"{field.name} (no text)", "not": {"type": no_text}},
        ],
        "items": {"type": ["string", "number", "boolean"]},
        **limits,
    }


def _list_spellings(choices: Iterable[Any]) -> list[Any]:
    """The choices, and the values that become the same word as one."""
    values: dict[Any, None] = {}
    for choice in choices:
        for value in (choice, str(choice), parse_scalar(str(choice))):
            if str(value) == str(choice):
                values[value] = None
    return list(values)
