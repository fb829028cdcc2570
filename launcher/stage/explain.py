"""Everything known about one argument: what it is, who reads it, its value, its history."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

from launcher import findings
from launcher.config.keys import KEYS, STAGES, Key
from launcher.config.load import Config
from launcher.errors import Finding, InvalidConfig, shorten
from launcher.findings import CodeSection, Meaning
from launcher.lazy_dataclass import dataclass
from launcher.stage import gates, stage, unused
from launcher.stage.conversion.names import FOREIGN
from launcher.upstream import history, locate
from launcher.upstream.citations import render_citations
from launcher.upstream.history import ArgumentChange
from launcher.upstream.locate import Locator, Upstream
from launcher.upstream.meaning import find_meaning
from launcher.upstream.schema import Field, Read, Schema
from launcher.upstream.trainers import BACKENDS, find_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The value that a stage file gives an argument, and who set it.

    `origin` is `default`, `derived`, a `file:line` or the text of an override; `via` tells how a
    parent comes in. `words` is what stands on the command line.
    """

    value: Any
    origin: str
    via: str | None = None
    words: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def lines(self) -> Iterator[str]:
        origin = self.origin
        if self.via is not None:
            origin = f"{origin}, {self.via}"
        yield f"  here       {shorten(self.value)}  ({origin})"
        for finding in self.findings:
            yield f"  {finding.severity:<9}  {finding.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One argument of one entry script; `field` is None if the script has no such argument.

    `option` is launch's own key of that name, beside `args:`, and `words` what it may hold.
    """

    key: str
    stage: str
    upstream: Upstream
    schema: Schema
    field: Field | None
    option: Key | None
    words: tuple[str, ...]
    reads: tuple[Read, ...] | None
    meaning: str | None
    advice: str | None
    in_file: Here | None
    history: tuple[ArgumentChange, ...]

    @property
    def known(self) -> bool:
        return self.field is not None or bool(self.history) or self.advice is not None

    def as_json(self) -> dict[str, Any]:
        field = self.field
        option = self.option
        shadow = self.schema.path.shadows.get(self.key)
        beside = {}
        for script, reads in self.schema.beside.items():
            beside[script] = _dump_reads(reads.get(self.key, ()))
        return {
            "key": self.key,
            "stage": self.stage,
            "backend": self.schema.backend,
            "script": self.schema.script,
            "upstream": self.upstream.as_json(),
            "exists": field is not None,
            "option": option and _dump_option(option, self.words),
            "meaning": self.meaning,
            "type": field and field.type,
            "default": field and _find_default(field),
            "required": field and field.required,
            "choices": [] if field is None else list(field.choices),
            "defined": field and field.where,
            "owner": field and field.owner,
            "reads": None if self.reads is None else _dump_reads(self.reads),
            "beside": beside,
            "shadowed_by": [] if shadow is None else list(shadow.by),
            "advice": self.advice,
            "here": self.in_file and asdict(self.in_file),
            "history": list(map(_dump_event, self.history)),
        }

    def lines(self) -> Iterator[str]:
        schema = self.schema
        option = self.option
        if option is not None and self.field is None:
            yield f"{self.key}  (a key of stage files)"
            yield from self._render_option(option)
        else:
            script = f"{schema.script} at {schema.named}"
            yield f"{self.key}  ({self.stage} on {schema.backend}, {script})"
            if self.field is not None:
                yield from self._render_field(self.field)
            else:
                yield f"  none       {self.advice or 'this script has no such argument'}"
            if option is not None:
                own = f"launch's own of that name goes beside `args:`: {option.shape}"
                yield f"  option     {own}"
        if self.in_file is not None:
            yield from self.in_file.lines()
        for event in self.history:
            yield f"  history    {history.describe_event(event)}"

    def _render_option(self, option: Key) -> Iterator[str]:
        yield f"  option     {self.advice}"
        yield f"  type       {option.shape}"
        words = list(self.words)
        # names fit into one line, an explanation gets its own
        if words and not any(" " in word for word in words):
            words = [", ".join(words)]
        yield from _label_first("values", words)
        yield f"  default    {option.default}"

    def _render_field(self, field: Field) -> Iterator[str]:
        if self.meaning is not None:
            indent = " " * 13
            yield fill(self.meaning, 100, initial_indent="  meaning    ", subsequent_indent=indent)
        elif not self.upstream.packages:
            yield f"  meaning    is in the source of {self.schema.backend}, which is not here"
        yield f"  type       {field.type}"
        if field.choices:
            yield f"  choices    {', '.join(map(str, field.choices))}"
        default = _find_default(field)
        if field.required:
            default = "none, it must be given"
        yield f"  default    {default}"
        yield f"  defined    {field.where}  ({field.owner})"
        yield from self._render_reads()

    def _render_reads(self) -> Iterator[str]:
        shadow = self.schema.path.shadows.get(self.key)
        reads = self.reads or ()
        if self.reads is None:
            yield "  read       not known for this source"
        elif not reads and shadow is not None:
            first = " and ".join(shadow.by)
            yield f"  read       never: {shadow.where} is not reached, {first} comes first"
        elif not reads:
            yield "  read       no read found: it does nothing here"
        entry = find_entry(self.schema)
        for read in reads[:_MOST_READS]:
            line = f"  read       {read.where}"
            conditions = unused.find_conditions(read, entry)
            if conditions:
                line = f"{line}  where {' and '.join(conditions)}"
            yield line
        more = len(reads) - _MOST_READS
        if more > 0:
            yield f"             and in {more} more places: --format json"
        for script, reads_beside in self.schema.beside.items():
            for read in reads_beside.get(self.key, ())[:1]:
                yield f"  beside     {script} reads it too: {read.where}"


def _label_first(label: str, texts: Sequence[str]) -> Iterator[str]:
    """A line for each text, the first with a label."""
    for text in texts:
        yield f"  {label:<9}  {text}"
        label = ""


def _dump_option(option: Key, words: Sequence[str]) -> dict[str, object]:
    return {"type": option.shape, "default": option.default, "words": list(words)}


def _dump_event(event: ArgumentChange) -> dict[str, object]:
    return {**asdict(event), "text": history.describe_event(event)}


def _dump_reads(reads: Sequence[Read]) -> list[dict[str, object]]:
    return [asdict(read) for read in reads]


def explain(
    key: str,
    *,
    locator: Locator,
    config: Config | None = None,
    stage_name: str | None = None,
    backend: str | None = None,
    derived: Mapping[str, tuple[Any, str]] | None = None,
) -> list[Explained]:
    """The argument `key`, or what people call it (`lr`, `model`).

    It is explained for the stage of a config. Without one it is explained for each stage, those of
    `stage_name` and `backend` if they are given; stages that never had such an argument are left
    out if another one had. `derived` are the values that launch sets for this config, with the
    reason. Raises what judging the config raises, and InvalidConfig if the source cannot be read.
    """
    # of what stands inside a mapping or a list, the whole is explained
    key = re.split(r"[.\[]", key.removeprefix("args."), maxsplit=1)[0]
    if config is not None:
        judged = stage.judge_stage_file(config, stage=stage_name, locator=locator)
        if judged.schema is None or judged.upstream is None or judged.values is None:
            # what is wrong with the file comes before its keys
            raise InvalidConfig(judged.findings)
        explained = []
        for name in _find_names(key, judged.schema, judged.upstream):
            in_file = _find_value_in_file(name, config, judged, derived or {})
            explained.append(_explain_key(name, judged.schema, judged.upstream, in_file))
        return explained
    explained = []
    for chosen in BACKENDS:
        if backend not in (None, chosen):
            continue
        source = locator.find(chosen)
        for name_of_stage in STAGES:
            if stage_name not in (None, name_of_stage):
                continue
            schema = locator.schema(chosen, name_of_stage)
            for name in _find_names(key, schema, source):
                explained.append(_explain_key(name, schema, source, None))
    return [answer for answer in explained if answer.known] or explained


def _find_names(key: str, schema: Schema, source: Upstream) -> list[str]:
    """The arguments that a key means: itself, those of an idea, or those that have it as a word."""
    if key in KEYS or _explain_key(key, schema, source, None).known:
        return [key]
    meant = [*IDEAS.get(key, ())]
    for tool_names in FOREIGN.values():
        meant.append(tool_names.get(key, ""))
    names = [name for name in schema.fields if name in meant]
    if names:
        return names
    names = [name for name in schema.fields if key in name.split("_")]
    if 1 <= len(names) <= _MOST_NAMES:
        return names
    return [key]


IDEAS: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "model": ("model_name_or_path",),
    "data": ("dataset_mixer_list", "mixer_list", "dataset_name"),
    "dataset": ("dataset_mixer_list", "mixer_list", "dataset_name"),
    "batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "epochs": ("num_train_epochs", "num_epochs"),
    "steps": ("max_train_steps", "max_steps"),
    "seq_len": ("max_seq_length", "max_length"),
    "context": ("max_seq_length", "max_length"),
    "scheduler": ("lr_scheduler_type",),
    "flash": ("attn_implementation",),
    "lora": ("use_lora", "use_peft"),
    "rank": ("lora_rank", "lora_r"),
    "clip": ("clip_grad_norm", "max_grad_norm"),
    "save": ("checkpointing_steps", "save_steps", "save_strategy"),
    "wandb": ("with_tracking", "report_to"),
    "template": ("chat_template_name", "chat_template_path"),
}
"""What people call arguments, beside the names that other tools give them."""
_MOST_NAMES = 4
_MOST_READS = 8


def list_notes(schema: Schema) -> dict[str, list[str]]:
    """One line for every argument that nothing reads, or that is read only under conditions."""
    entry = find_entry(schema)
    lines = {}
    for name, reads in schema.path.reads.items():
        alternatives = [unused.find_conditions(read, entry) for read in reads]
        if not reads:
            lines[name] = [f"no read found: {unused.suggest_instead(schema, entry, name)}"]
        elif all(alternatives):
            shortest = min(alternatives, key=len)
            line = f"read only where {unused.join_conditions(shortest)}"
            if len(alternatives) > 1:
                line = f"{line} (and elsewhere)"
            lines[name] = [line]
    return lines


def find_near_names(key: str) -> list[str]:
    """Names of any stage and backend, and codes, that are spelt like `key`, the nearest first."""
    names = set(KEYS)
    for backend in BACKENDS:
        for qualified in locate.load_snapshot(backend)["stages"].values():
            names |= {name.partition(".")[2] for name in qualified}
    close = difflib.get_close_matches(key, sorted(names), n=3, cutoff=0.6)
    return close + difflib.get_close_matches(key, findings.list_codes(), n=2, cutoff=0.7)


def _explain_key(key: str, schema: Schema, source: Upstream, in_file: Here | None) -> Explained:
    field = schema.fields.get(key)
    advice = None
    meaning = None
    if field is None:
        advice = _find_advice(key, schema)
    else:
        meaning = find_meaning(source, field)
    option = KEYS.get(key)
    words: tuple[str, ...] = ()
    if option is not None:
        words = _list_words(option, schema)
    return Explained(
        key=key,
        stage=schema.stage,
        upstream=source,
        schema=schema,
        field=field,
        option=option,
        words=words,
        reads=schema.path.reads.get(key),
        meaning=meaning,
        advice=advice,
        in_file=in_file,
        history=locate.find_past(source, schema.script, key),
    )


def _find_advice(key: str, schema: Schema) -> str | None:
    """What to do about a key that is no argument of this script."""
    entry = find_entry(schema)
    moved = entry.moved.get(key)
    if moved is not None and moved.to is None:
        return moved.why
    if moved is not None and moved.to in schema.fields:
        return f"{moved.why}: write `{moved.to}`"
    lost = entry.lost.get(key)
    if lost is not None:
        return render_citations(f"{lost.did}; now {lost.now}: {lost.instead}")
    at_pin = locate.find_line_at_pin(schema, key)
    if at_pin is not None:
        return f"not at {schema.named}; it is one at the pin ({at_pin})"
    if key in KEYS:
        return f"launch's own, beside `args:`: {KEYS[key].meaning}"
    return None


def _find_value_in_file(
    key: str, config: Config, judged: stage.Judged, derived: Mapping[str, tuple[Any, str]]
) -> Here | None:
    schema = judged.schema
    assert schema is not None
    field = schema.fields.get(key)
    if key in KEYS and field is None and key not in config.args:
        if config.options.get(key) is None:
            return None
        faults = _find_faults(judged, key, ".")
        return Here(value=config.options[key], origin=str(config.origin(key)), findings=faults)
    faults = _find_faults(judged, f"args.{key}", "[")
    if key in derived:
        value, origin = derived[key]
        return Here(value=value, origin=origin, findings=faults)
    if config.args.get(key) is not None:
        value = config.args[key]
        place = config.origin(f"args.{key}")
        via = None
        if place.file in map(str, config.parents):
            via = "from a parent, by `extends`"
        words: tuple[str, ...] = ()
        if field is not None and not schema.in_file(key, value):
            words = tuple(schema.words(key, value))
        # with its key, as a password has no shape
        value, words = config.redactor.redact({key: (value, words)})[key]
        return Here(value=value, origin=str(place), via=via, words=words, findings=faults)
    if field is None:
        return None
    fixed = find_entry(schema).derived.get(key)
    if fixed is not None:
        value, reason = fixed
        return Here(value=value, origin=f"set by launch: {reason}", findings=faults)
    return Here(value=_find_default(field), origin=f"default, {field.where}", findings=faults)


def _find_faults(judged: stage.Judged, key: str, separator: str) -> tuple[Finding, ...]:
    """The findings about a key, or about a part of its value, which a separator precedes."""
    findings = []
    for finding in judged.findings:
        name, _, _ = (finding.key or "").partition(separator)
        if name == key:
            findings.append(finding)
    return tuple(findings)


def _list_words(key: Key, schema: Schema) -> tuple[str, ...]:
    words = list(key.words)
    if key.name == "script":
        for name, entry in BACKENDS[schema.backend].STAGES.items():
            if schema.stage in {name, entry.stage}:
                words.append(f"{name} ({Path(entry.script).name})")
    elif key.name == "gates":
        for gate, (limit, meaning) in gates.GATES.items():
            words.append(f"{gate}: {meaning}; {_describe_limits(limit)}")
    elif not words:
        words = [_describe_part(part) for part in key.parts]
    return tuple(words)


def _describe_part(part: Key) -> str:
    if part.words:
        return f"{part.name}: {', '.join(part.words)}"
    shape = part.shape
    if part.default != "none":
        shape = f"{shape}, {part.default} unless set"
    return f"{part.name}: {shape}; {part.meaning}"


def _describe_limits(limit: gates.Limit) -> str:
    limits = []
    if limit.red is not None:
        limits.append(f"red {limit.red:g}")
    if limit.yellow is not None:
        limits.append(f"yellow {limit.yellow:g}")
    return ", ".join(limits)


def _find_default(field: Field) -> Any:
    if field.default_text is not None:
        return field.default_text
    return field.default


def describe_pipeline_key(key: Key) -> Iterator[str]:
    """What a key of pipeline files takes, for the terminal."""
    yield f"{key.name}  (a key of pipeline files)"
    yield f"  meaning    {key.meaning}"
    yield f"  type       {key.shape}"
    yield from _label_first("values", [_describe_part(part) for part in key.parts])
    yield f"  default    {key.default}"


def describe_code(section: CodeSection, meaning: Meaning, code: str) -> Iterator[str]:
    """What is known of a finding's code, for the terminal."""
    yield f"{code}  (a finding: {section.title})"
    yield f"  meaning    {meaning.plain_text()}"
    yield f"  layer      {meaning.layer}"
