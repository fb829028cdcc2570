"""Every argument of a config against the schema: names, values, and what to write instead."""

import difflib
import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.artifacts import chat_template
from launcher.config import keys
from launcher.config.load import Config
from launcher.errors import Finding, Layer, brief
from launcher.upstream import history, locate
from launcher.upstream.citations import rendered
from launcher.upstream.entry import DATA_FILE
from launcher.upstream.history import ArgumentChange
from launcher.upstream.schema import Field, OptionString, Schema
from launcher.upstream.trainers import BACKENDS, Entry

Past = Callable[[str], Sequence[ArgumentChange]]
"""What happened to an argument of this name upstream, newest first."""


def check(config: Config, schema: Schema, entry: Entry, past: Past) -> Iterator[Finding]:
    for key, value in config.args.items():
        known = schema.fields.get(key)
        fault = _check_unknown(schema, entry, past, key, value) if known is None else None
        if known is not None and value is not None:
            fault = _check_value(schema, entry, known, value)
        if fault is not None:
            yield fault


def missing(config: Config, schema: Schema, entry: Entry, reported: Container[str | None]) -> Iterator[Finding]:
    """Arguments that upstream's parser asks for, and that neither the file nor launch gives.

    `reported` are the keys of which enough was said.
    """
    given = taken(schema, config.args).keys() | entry.derived.keys() | {entry.names.output}
    if "batch" in config.options:
        given |= {entry.names.per_device, entry.names.accumulation}
    for name, known in schema.fields.items():
        if known.required and name not in given and f"args.{name}" not in reported:
            message = f"`{name}` must be given: it has no default  ({known.where})"
            yield _error("parser", "missing-argument", name, message, f"add `{name}: ...`; its type is {known.type}")


def _error(layer: Layer, code: str, name: str, message: str, help: str) -> Finding:
    return Finding(severity="error", layer=layer, code=code, key=f"args.{name}", message=message, help=help)


def taken(schema: Schema, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under the names that upstream's parser would take them for; the last one wins."""
    taken: dict[str, Any] = {}
    for key, value in args.items():
        if value is None:
            continue
        flag = OptionString(key) if key in schema.fields else schema.taken_as(key)
        if flag is not None and not flag.negated:
            taken[flag.name] = value
        elif flag is not None and value == []:
            taken[flag.name] = False
    return taken


def reported(config: Config, schema: Schema, entry: Entry, faults: Sequence[Finding]) -> frozenset[str | None]:
    """Keys about which enough was said: wrong ones, and those that a wrong key was meant to be."""
    keys = {fault.key for fault in faults if fault.severity == "error"}
    for key in config.args.keys() - schema.fields.keys():
        moved = entry.moved.get(key)
        near = [moved.to] if moved is not None else _nearest(key, tuple(schema.fields))
        keys |= {f"args.{name}" for name in near}
    if any(config.args.get(key) is not None for key in (*entry.hints, DATA_FILE)):
        keys.add(f"args.{entry.names.data}")
    return frozenset(keys)


def _check_value(schema: Schema, entry: Entry, known: Field, value: Any) -> Finding | None:
    if schema.in_file(known.name, value):
        return _check_in_file(known, value)
    layer: Layer = "launch"
    help = f"its type is {known.type}  ({known.where})"
    words = schema.words(known.name, value)
    reason = schema.refusal(known.name, words)
    if reason is not None:
        if isinstance(value, bool):
            help = "YAML reads yes, no, on and off as a bool: put the text in quotes"
        layer, help = "parser", entry.hints.get(known.name, help)
    elif not words:
        reason = "an empty list, which upstream would read as true"
    elif known.kind in {"int", "float"} and any(map(_too_large, words)):
        reason = "a number that is too large to be one"
    elif isinstance(value, list) and any(v is None or isinstance(v, list | dict) for v in value):
        reason = "an entry is a list, a mapping or empty, which no flag can carry"
    elif isinstance(value, dict) and known.many and known.name in schema.by_file:
        reason = "a mapping, where upstream reads a list of them"
        help = f"write `- path: ...` below `{known.name}:`, one for each set"
    elif isinstance(value, dict) and "dict" not in known.type:
        reason = f"a mapping, which upstream would take as the text `{brief(words[0])}`"
    elif isinstance(value, bool) and known.kind == "str":
        message = f"`{known.name}`: YAML reads a bool here, upstream will get the text {value}"
        warning = _error("run", "bool-as-text", known.name, message, "put the text in quotes")
        return replace(warning, severity="warning")
    else:
        return None
    return _error(layer, "bad-value", known.name, f"`{known.name}`: {reason}", help)


def _check_in_file(known: Field, value: Any) -> Finding | None:
    """What the trainer's config file would carry, and the trainer then not read; data sets have rules of their own."""
    if known.kind == "str" and any(not isinstance(item, str) for item in value):
        help = f"its type is {known.type}  ({known.where})"
        return _error("launch", "bad-value", known.name, f"`{known.name}`: an entry is not text", help)
    return None


def _too_large(word: str) -> bool:
    """Whether Python reads infinity out of digits, as it does of `1e999`."""
    try:
        return math.isinf(float(word)) and any(map(str.isdigit, word))
    except (OverflowError, ValueError):
        return False


def _check_unknown(schema: Schema, entry: Entry, past: Past, key: str, value: Any) -> Finding:
    if "template" in key and chat_template.is_template(value):
        return _inline_template(schema, entry, key)
    code, message, help = _explain_unknown(schema, entry, past, key)
    meaning = entry.lost.get(key)
    if code == "removed-key" and meaning is not None and meaning.mattered(value):
        message += rendered(f": {meaning.did}; now {meaning.now}")
        help = f"{meaning.instead}; then delete the line"
    layer: Layer = "launch" if value is None else "parser"
    flag = schema.taken_as(key)
    if flag is not None and value is not None:
        if flag.negated:
            code, help = "negated-key", f"write `{flag.name}: true` or `{flag.name}: false`"
            layer = "launch" if value == [] else layer
        elif schema.refusal(flag.name, schema.words(key, value)) is None:
            # argparse would take the abbreviation without a word: only we object
            layer = "launch"
            if code == "unknown-key":
                code, help = "abbreviated-key", f"write `{flag.name}`"
            message += f"; upstream would silently take it for `{flag.name}`"
    return _error(layer, code, key, message, help)


def lost(config: Config, schema: Schema, entry: Entry) -> Iterator[Finding]:
    """Arguments that `--fix` has made comments of, and whose meaning nobody has decided about yet."""
    for kept in config.kept:
        meaning = entry.lost.get(kept.key)
        is_back = kept.key in schema.fields or kept.key in config.args
        if meaning is None or is_back or not meaning.mattered(kept.value):
            continue
        yield Finding(
            severity="warning",
            layer="launch",
            code="lost-meaning",
            key=f"args.{kept.key}",
            message=f"`{kept.key}: {brief(kept.value)}` was taken out: {meaning.did}; now {rendered(meaning.now)}",
            help=f"{meaning.instead}; then delete this comment",
            file=kept.file,
            line=kept.line,
        )


def _inline_template(schema: Schema, entry: Entry, key: str) -> Finding:
    """The text of a template under a key that no script has: renaming the key would not make it a path."""
    message = f"`{key}` is not a field of {schema.owner or entry.owner}, and no field takes the text of a template"
    help = chat_template.PUT_IT_INTO_THE_MODEL
    if "chat_template_path" in schema.fields:
        help = chat_template.WRITE_IT
    elif "tokenizer_name_or_path" in schema.fields:
        help = chat_template.PUT_IT_BESIDE
    # argparse would take the beginning of a field's name for the field
    layer: Layer = "parser" if schema.taken_as(key) is None else "launch"
    return _error(layer, "inline-template", key, message, help)


def _explain_unknown(schema: Schema, entry: Entry, past: Past, key: str) -> tuple[str, str, str]:
    message = f"`{key}` is not a field of {schema.owner or entry.owner}"
    moved = entry.moved.get(key)
    if moved is not None and moved.to is None:
        return "removed-key", f"{message}: {moved.why}", "delete the line"
    if moved is not None and moved.to is not None and moved.to in schema.fields:
        where = schema.fields[moved.to].where
        return "renamed-key", f"{message}: {moved.why}", f"write `{moved.to}`  ({where})"
    events = past(key)
    if events and events[0].gone:
        return _explain_gone(schema, entry, past, key, events)
    near = _nearest(key, tuple(schema.fields))
    if (there := locate.at_pin(schema, key)) is not None:
        help = f"it is one at the pin ({there}), not at {schema.named}"
    elif near:
        help = f"did you mean `{near[0]}`?  ({schema.fields[near[0]].where})"
    elif key in keys.KEYS:
        help = f"`{key}` is launch's own: it goes beside `args:`, not in it"
    elif others := _homes(key):
        help = f"available only in: {', '.join(others)}"
    else:
        help = f"{schema.script} at {schema.named} has no such argument"
    return "unknown-key", message, help


def _explain_gone(
    schema: Schema, entry: Entry, past: Past, key: str, events: Sequence[ArgumentChange]
) -> tuple[str, str, str]:
    """A key that once was an argument: what became of it, followed over all its renames."""
    message = f"`{key}` is not a field of {schema.owner or entry.owner}: {history.sentence(events[0])}"
    name = history.called_now(events[0], past, schema.fields)
    if name is not None:
        return "renamed-key", message, f"write `{name}`  ({schema.fields[name].where})"
    instead = [see for see in events[0].see if see in schema.fields]
    return "removed-key", message, "delete the line" + (f"; see `{'`, `'.join(instead)}`" if instead else "")


@functools.lru_cache
def _nearest(key: str, names: tuple[str, ...]) -> list[str]:
    return difflib.get_close_matches(key, names, n=1, cutoff=0.7)


def _homes(key: str) -> list[str]:
    return [
        f"{stage} on {backend}"
        for backend in BACKENDS
        for stage, names in locate.snapshot(backend)["stages"].items()
        # a further script of a stage has the arguments of the stage's own
        if not BACKENDS[backend].STAGES[stage].stage and any(name.partition(".")[2] == key for name in names)
    ]
