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
from launcher.errors import Finding, Layer, select_errors, shorten
from launcher.upstream import history, locate
from launcher.upstream.citations import render_citations
from launcher.upstream.entry import DATA_FILE
from launcher.upstream.history import ArgumentChange
from launcher.upstream.schema import Field, OptionString, Schema
from launcher.upstream.trainers import BACKENDS, Entry

Past = Callable[[str], Sequence[ArgumentChange]]
"""What happened to an argument of this name upstream, newest first."""


def check(config: Config, schema: Schema, entry: Entry, past: Past) -> Iterator[Finding]:
    for key, value in config.args.items():
        field = schema.fields.get(key)
        if field is None:
            yield _report_unknown(schema, entry, past, key, value)
        elif value is not None:
            fault = _check_value(schema, entry, field, value)
            if fault is not None:
                yield fault


def find_missing(
    config: Config, schema: Schema, entry: Entry, reported: Container[str | None]
) -> Iterator[Finding]:
    """Arguments that upstream's parser requires, and that neither the file nor launch sets.

    Nothing is said of the keys in `reported`.
    """
    names = {*parse_names(schema, config.args), *entry.derived, entry.names.output}
    if "batch" in config.options:
        names |= {entry.names.per_device, entry.names.accumulation}
    for name, field in schema.fields.items():
        if not field.required or name in names or f"args.{name}" in reported:
            continue
        message = f"`{name}` must be given: it has no default  ({field.where})"
        help = f"add `{name}: ...`; its type is {field.type}"
        yield _report_error("parser", "missing-argument", name, message, help)


def _report_error(layer: Layer, code: str, name: str, message: str, help: str) -> Finding:
    key = f"args.{name}"
    return Finding(severity="error", layer=layer, code=code, key=key, message=message, help=help)


def parse_names(schema: Schema, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under the names that upstream's parser takes them for; the last one wins."""
    taken: dict[str, Any] = {}
    for key, value in args.items():
        if value is None:
            continue
        flag = OptionString(key) if key in schema.fields else schema.taken_as(key)
        if flag is None:
            continue
        if not flag.negated:
            taken[flag.name] = value
        elif value == []:
            taken[flag.name] = False
    return taken


def list_reported_keys(
    config: Config, schema: Schema, entry: Entry, faults: Sequence[Finding]
) -> frozenset[str | None]:
    """Keys that are reported already: wrong ones, and those that a wrong key was meant to be."""
    reported = {fault.key for fault in select_errors(faults)}
    names = tuple(schema.fields)
    for key in config.args.keys() - schema.fields.keys():
        moved = entry.moved.get(key)
        if moved is not None:
            reported.add(f"args.{moved.to}")
            continue
        for name in _find_nearest(key, names):
            reported.add(f"args.{name}")
    for key in (*entry.hints, DATA_FILE):
        if config.args.get(key) is not None:
            reported.add(f"args.{entry.names.data}")
    return frozenset(reported)


def _check_value(schema: Schema, entry: Entry, field: Field, value: Any) -> Finding | None:
    name = field.name
    type_help = f"its type is {field.type}  ({field.where})"
    if schema.in_file(name, value):
        # data sets have rules of their own
        if field.kind == "str" and any(not isinstance(item, str) for item in value):
            message = f"`{name}`: an entry is not text"
            return _report_error("launch", "bad-value", name, message, type_help)
        return None
    words = schema.words(name, value)
    reason = schema.refusal(name, words)
    if reason is not None:
        help = entry.hints.get(name, type_help)
        if isinstance(value, bool) and name not in entry.hints:
            help = "YAML reads yes, no, on and off as a bool: put the text in quotes"
        return _report_error("parser", "bad-value", name, f"`{name}`: {reason}", help)
    if isinstance(value, bool) and field.kind == "str":
        message = f"`{name}`: YAML reads a bool here, upstream will get the text {value}"
        finding = _report_error("run", "bool-as-text", name, message, "put the text in quotes")
        return replace(finding, severity="warning")
    help = type_help
    if not words:
        reason = "an empty list, which upstream would read as true"
    elif field.kind in {"int", "float"} and any(map(_overflows, words)):
        reason = "a number that is too large to be one"
    elif isinstance(value, list) and any(v is None or isinstance(v, list | dict) for v in value):
        reason = "an entry is a list, a mapping or empty, which no flag can carry"
    elif isinstance(value, dict) and field.many and name in schema.by_file:
        reason = "a mapping, where upstream reads a list of them"
        help = f"write `- path: ...` below `{name}:`, one for each set"
    elif isinstance(value, dict) and "dict" not in field.type:
        reason = f"a mapping, which upstream would take as the text `{shorten(words[0])}`"
    else:
        return None
    return _report_error("launch", "bad-value", name, f"`{name}`: {reason}", help)


def _overflows(word: str) -> bool:
    """Whether Python reads digits as infinity, such as `1e999`."""
    try:
        return math.isinf(float(word)) and any(map(str.isdigit, word))
    except (OverflowError, ValueError):
        return False


def _report_unknown(schema: Schema, entry: Entry, past: Past, key: str, value: Any) -> Finding:
    if "template" in key and chat_template.is_template(value):
        return _report_inline_template(schema, entry, key)
    finding = _report_unknown_name(schema, entry, past, key)
    lost = entry.lost.get(key)
    if finding.code == "removed-key" and lost is not None and lost.mattered(value):
        message = finding.message + render_citations(f": {lost.did}; now {lost.now}")
        finding = replace(finding, message=message, help=f"{lost.instead}; then delete the line")
    if value is None:
        # nothing of it reaches the command line
        return replace(finding, layer="launch")
    flag = schema.taken_as(key)
    if flag is None:
        return finding
    if flag.negated:
        help = f"write `{flag.name}: true` or `{flag.name}: false`"
        finding = replace(finding, code="negated-key", help=help)
        if value == []:
            # nobody but launch objects to a flag without a value
            finding = replace(finding, layer="launch")
        return finding
    if schema.refusal(flag.name, schema.words(key, value)) is not None:
        return finding
    # argparse takes the abbreviation silently: only launch objects
    if finding.code == "unknown-key":
        finding = replace(finding, code="abbreviated-key", help=f"write `{flag.name}`")
    message = f"{finding.message}; upstream would silently take it for `{flag.name}`"
    return replace(finding, layer="launch", message=message)


def find_lost(config: Config, schema: Schema, entry: Entry) -> Iterator[Finding]:
    """Arguments that `--fix` made comments, and about whose meaning nobody has decided yet."""
    for kept in config.kept:
        if kept.key in schema.fields or kept.key in config.args:
            # somebody decided: it is an argument again
            continue
        meaning = entry.lost.get(kept.key)
        if meaning is None or not meaning.mattered(kept.value):
            continue
        now = render_citations(meaning.now)
        message = f"`{kept.key}: {shorten(kept.value)}` was taken out: {meaning.did}; now {now}"
        help = f"{meaning.instead}; then delete this comment"
        finding = _report_error("launch", "lost-meaning", kept.key, message, help)
        yield replace(finding, severity="warning", file=kept.file, line=kept.line)


def _report_inline_template(schema: Schema, entry: Entry, key: str) -> Finding:
    """The text of a template under a key that no script has: no other name would make it a path."""
    owner = schema.owner or entry.owner
    message = f"`{key}` is not a field of {owner}, and no field takes the text of a template"
    help = chat_template.PUT_IT_INTO_THE_MODEL
    if "chat_template_path" in schema.fields:
        help = chat_template.WRITE_IT
    elif "tokenizer_name_or_path" in schema.fields:
        help = chat_template.PUT_IT_BESIDE
    layer: Layer = "parser"
    if schema.taken_as(key) is not None:
        # argparse takes the beginning of a field's name for the field
        layer = "launch"
    return _report_error(layer, "inline-template", key, message, help)


def _report_unknown_name(schema: Schema, entry: Entry, past: Past, key: str) -> Finding:
    """The finding about a key that is no argument: what became of it, or what it may mean."""
    message = f"`{key}` is not a field of {schema.owner or entry.owner}"
    moved = entry.moved.get(key)
    if moved is not None:
        why = f"{message}: {moved.why}"
        if moved.to is None:
            return _report_error("parser", "removed-key", key, why, "delete the line")
        if moved.to in schema.fields:
            return _report_renamed(schema, key, why, moved.to)
    changes = past(key)
    if changes and changes[0].gone:
        message = f"{message}: {history.describe_event(changes[0])}"
        name = history.find_present_name(changes[0], past, schema.fields)
        if name is not None:
            return _report_renamed(schema, key, message, name)
        help = "delete the line"
        similar = [name for name in changes[0].see if name in schema.fields]
        if similar:
            help += f"; see `{'`, `'.join(similar)}`"
        return _report_error("parser", "removed-key", key, message, help)
    return _report_error("parser", "unknown-key", key, message, _suggest_name(schema, key))


def _report_renamed(schema: Schema, key: str, message: str, name: str) -> Finding:
    help = f"write `{name}`  ({schema.fields[name].where})"
    return _report_error("parser", "renamed-key", key, message, help)


def _suggest_name(schema: Schema, key: str) -> str:
    at_pin = locate.find_line_at_pin(schema, key)
    if at_pin is not None:
        return f"it is one at the pin ({at_pin}), not at {schema.named}"
    near = _find_nearest(key, tuple(schema.fields))
    if near:
        return f"did you mean `{near[0]}`?  ({schema.fields[near[0]].where})"
    if key in keys.KEYS:
        return f"`{key}` is launch's own: it goes beside `args:`, not in it"
    stages = _find_stages_with(key)
    if stages:
        return f"available only in: {', '.join(stages)}"
    return f"{schema.script} at {schema.named} has no such argument"


@functools.lru_cache
def _find_nearest(key: str, names: tuple[str, ...]) -> list[str]:
    return difflib.get_close_matches(key, names, n=1, cutoff=0.7)


def _find_stages_with(key: str) -> list[str]:
    stages = []
    for backend, trainer in BACKENDS.items():
        for stage, names in locate.load_snapshot(backend)["stages"].items():
            # a further script of a stage has the arguments of the stage's own
            is_further = trainer.STAGES[stage].stage
            if not is_further and any(name.partition(".")[2] == key for name in names):
                stages.append(f"{stage} on {backend}")
    return stages
