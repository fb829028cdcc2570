"""Everything known about one argument: what it is, who reads it, its value here, what became of it."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from launcher import findings
from launcher.config.keys import KEYS, STAGES, Key
from launcher.config.load import Config
from launcher.errors import Finding, InvalidConfig, brief
from launcher.findings import CodeSection, Meaning
from launcher.stage import gates, stage, unused
from launcher.stage.conversion.names import FOREIGN
from launcher.upstream import history, locate
from launcher.upstream.citations import rendered
from launcher.upstream.history import ArgumentChange
from launcher.upstream.locate import Locator, Upstream
from launcher.upstream.meaning import meaning_of
from launcher.upstream.schema import Field, Read, Schema
from launcher.upstream.trainers import BACKENDS, entry_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One argument of one entry script; `field` is None where the script has no such argument.

    `option` is what launch itself reads under that name beside `args:`, and `words` what may stand there.
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
    here: Here | None
    history: tuple[ArgumentChange, ...]

    @property
    def known(self) -> bool:
        return self.field is not None or bool(self.history) or self.advice is not None

    def as_json(self) -> dict[str, Any]:
        known, option = self.field, self.option
        shadow = self.schema.path.shadows.get(self.key)
        beside = {script: reads.get(self.key, ()) for script, reads in self.schema.beside.items()}
        return {
            "key": self.key,
            "stage": self.stage,
            "backend": self.schema.backend,
            "script": self.schema.script,
            "upstream": self.upstream.as_json(),
            "exists": known is not None,
            "option": option and {"type": option.shape, "default": option.default, "words": list(self.words)},
            "meaning": self.meaning,
            "type": known and known.type,
            "default": known and _default(known),
            "required": known and known.required,
            "choices": list(known.choices) if known else [],
            "defined": known and known.where,
            "owner": known and known.owner,
            "reads": None if self.reads is None else [asdict(read) for read in self.reads],
            "beside": {script: [asdict(read) for read in reads] for script, reads in beside.items()},
            "shadowed_by": list(shadow.by) if shadow else [],
            "advice": self.advice,
            "here": self.here and asdict(self.here),
            "history": [{**asdict(event), "text": history.sentence(event)} for event in self.history],
        }

    def lines(self) -> Iterator[str]:
        where = f"{self.stage} on {self.schema.backend}, {self.schema.script} at {self.schema.named}"
        own = self.field is None and self.option is not None
        yield f"{self.key}  ({'a key of stage files' if own else where})"
        if self.field is not None:
            yield from self._definition(self.field)
        if self.option is not None and not own:
            yield f"  option     launch's own of that name goes beside `args:`: {self.option.shape}"
        elif self.option is not None:
            yield f"  option     {self.advice}"
            yield f"  type       {self.option.shape}"
            # names fit into one line, what has an explanation gets its own
            explained = any(" " in word for word in self.words)
            lines = self.words if explained else filter(None, [", ".join(self.words)])
            for number, line in enumerate(lines):
                yield f"  {'' if number else 'values':<9}  {line}"
            yield f"  default    {self.option.default}"
        elif self.field is None:
            yield f"  none       {'this script has no such argument' if self.advice is None else self.advice}"
        if self.here is not None:
            via = f", {self.here.via}" if self.here.via else ""
            yield f"  here       {brief(self.here.value)}  ({self.here.origin}{via})"
            for finding in self.here.findings:
                yield f"  {finding.severity:<9}  {finding.message}"
        for event in self.history:
            yield f"  history    {history.sentence(event)}"

    def _definition(self, known: Field) -> Iterator[str]:
        if self.meaning is not None:
            yield fill(self.meaning, 100, initial_indent="  meaning    ", subsequent_indent=" " * 13)
        elif not self.upstream.packages:
            yield f"  meaning    is in the source of {self.schema.backend}, which is not here"
        yield f"  type       {known.type}"
        if known.choices:
            yield f"  choices    {', '.join(str(choice) for choice in known.choices)}"
        yield f"  default    {'none, it must be given' if known.required else _default(known)}"
        yield f"  defined    {known.where}  ({known.owner})"
        shadow = self.schema.path.shadows.get(self.key)
        if self.reads is None:
            yield "  read       not known for this source"
        elif not self.reads and shadow is not None:
            by = " and ".join(shadow.by)
            yield f"  read       never: {shadow.where} is not reached, {by} comes first"
        elif not self.reads:
            yield "  read       no read found: it does nothing here"
        entry = entry_of(self.schema)
        reads = self.reads or ()
        for read in reads[:_READS]:
            conditions = unused.condition_of(read, entry)
            when = f"  where {' and '.join(conditions)}" if conditions else ""
            yield f"  read       {read.where}{when}"
        if more := reads[_READS:]:
            yield f"             and in {len(more)} more places: --format json"
        for script, found in self.schema.beside.items():
            for read in found.get(self.key, ())[:1]:
                yield f"  beside     {script} reads it too: {read.where}"


def explain(
    key: str,
    *,
    locator: Locator,
    config: Config | None = None,
    stage_name: str | None = None,
    backend: str | None = None,
    derived: Mapping[str, tuple[Any, str]] | None = None,
) -> list[Explained]:
    """The argument `key`, or what people call it (`lr`, `model`), for the stage of a config or for each stage.

    `stage_name` and `backend` choose among the stages where no config is given, and those of them that never had
    such an argument are left out if another one had; `derived` are the values that launch sets for this config, with
    the reason. Raises what judging the config raises, and InvalidConfig where the source cannot be read.
    """
    # of what stands inside a mapping or a list, the whole is explained
    key = re.split(r"[.\[]", key.removeprefix("args."), maxsplit=1)[0]
    if config is not None:
        judged = stage.judge(config, stage=stage_name, locator=locator)
        if judged.schema is None or judged.upstream is None or judged.values is None:
            # what is wrong with the file stands before any of its keys
            raise InvalidConfig(judged.findings)
        return [
            _explained(name, judged.schema, judged.upstream, _here(name, config, judged, derived or {}))
            for name in _names(key, judged.schema, judged.upstream)
        ]
    explained = []
    for chosen in [backend] if backend else BACKENDS:
        source = locator.find(chosen)
        for name in [stage_name] if stage_name else STAGES:
            schema = locator.schema(chosen, name)
            explained += [_explained(argument, schema, source, None) for argument in _names(key, schema, source)]
    return [answer for answer in explained if answer.known] or explained


def _names(key: str, schema: Schema, source: Upstream) -> list[str]:
    """That argument, those of an idea, or those with it among their words."""
    if key in schema.fields or key in KEYS or _explained(key, schema, source, None).known:
        return [key]
    idea = {*IDEAS.get(key, ()), *(foreign.get(key, "") for foreign in FOREIGN.values())}
    if names := [name for name in schema.fields if name in idea]:
        return names
    names = [name for name in schema.fields if key in name.split("_")]
    return names if 0 < len(names) <= _FEW else [key]


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
_FEW = 4
_READS = 8


def notes(schema: Schema) -> dict[str, list[str]]:
    """One line for every argument that nothing reads, or that is read only sometimes."""
    entry = entry_of(schema)
    lines = {}
    for name, reads in schema.path.reads.items():
        alternatives = [unused.condition_of(read, entry) for read in reads]
        if not reads:
            lines[name] = [f"no read found: {unused.instead(schema, entry, name)}"]
        elif all(alternatives):
            shortest = min(alternatives, key=len)
            more = " (and elsewhere)" if len(alternatives) > 1 else ""
            lines[name] = [f"read only where {unused.shown(shortest)}{more}"]
    return lines


def near(key: str) -> list[str]:
    """Names of any stage and backend, and codes, that are spelt like `key`, the nearest first."""
    names = {
        name.partition(".")[2]
        for backend in BACKENDS
        for listed in locate.snapshot(backend)["stages"].values()
        for name in listed
    }
    close = difflib.get_close_matches(key, sorted(names | set(KEYS)), n=3, cutoff=0.6)
    return [*close, *difflib.get_close_matches(key, findings.all_codes(), n=2, cutoff=0.7)]


def _explained(key: str, schema: Schema, source: Upstream, here: Here | None) -> Explained:
    known, option = schema.fields.get(key), KEYS.get(key)
    entry = entry_of(schema)
    moved = entry.moved.get(key)
    lost = entry.lost.get(key)
    advice = None
    if known is not None:
        pass
    elif moved is not None and moved.to is None:
        advice = moved.why
    elif moved is not None and moved.to in schema.fields:
        advice = f"{moved.why}: write `{moved.to}`"
    elif lost is not None:
        advice = rendered(f"{lost.did}; now {lost.now}: {lost.instead}")
    elif (there := locate.at_pin(schema, key)) is not None:
        advice = f"not at {schema.named}; it is one at the pin ({there})"
    elif option is not None:
        advice = f"launch's own, beside `args:`: {option.meaning}"
    return Explained(
        key=key,
        stage=schema.stage,
        upstream=source,
        schema=schema,
        field=known,
        option=option,
        words=() if option is None else _words(option, schema),
        reads=schema.path.reads.get(key),
        meaning=None if known is None else meaning_of(source, known),
        advice=advice,
        here=here,
        history=locate.past(source, schema.script, key),
    )


def _here(key: str, config: Config, judged: stage.Judged, derived: Mapping[str, tuple[Any, str]]) -> Here | None:
    schema, values = judged.schema, judged.values
    assert schema is not None and values is not None
    known = schema.fields.get(key)
    if key in KEYS and known is None and key not in config.args:
        if config.options.get(key) is None:
            return None
        found = tuple(f for f in judged.findings if (f.key or "").partition(".")[0] == key)
        return Here(value=config.options[key], origin=str(config.origin(key)), findings=found)
    found = tuple(f for f in judged.findings if (f.key or "").partition("[")[0] == f"args.{key}")
    if config.args.get(key) is not None and key not in derived:
        place = config.origin(f"args.{key}")
        via = "from a parent, by `extends`" if place.file in map(str, config.parents) else None
        given = config.args[key]
        # a config file of the trainer's carries the others
        is_flag = known is not None and not schema.in_file(key, given)
        words = tuple(schema.words(key, given)) if is_flag else ()
        # by its name too: a password has no shape
        value, words = config.redactor.redact({key: (given, words)})[key]
        return Here(value=value, origin=str(place), via=via, words=words, findings=found)
    if key in derived:
        value, origin = derived[key]
    elif known is None:
        return None
    elif (fixed := entry_of(schema).derived.get(key)) is not None:
        value, origin = fixed[0], f"set by launch: {fixed[1]}"
    else:
        value, origin = _default(known), f"default, {known.where}"
    return Here(value=value, origin=origin, findings=found)


def _words(key: Key, schema: Schema) -> tuple[str, ...]:
    if key.name == "script":
        return tuple(
            f"{name} ({Path(entry.script).name})"
            for name, entry in BACKENDS[schema.backend].STAGES.items()
            if schema.stage in {name, entry.stage}
        )
    if key.name == "gates":
        return tuple(f"{gate}: {what}; {_limits(at)}" for gate, (at, what) in gates.GATES.items())
    return key.words or tuple(_part(part) for part in key.parts)


def _part(part: Key) -> str:
    if part.words:
        return f"{part.name}: {', '.join(part.words)}"
    default = "" if part.default == "none" else f", {part.default} unless set"
    return f"{part.name}: {part.shape}{default}; {part.meaning}"


def _limits(limit: gates.Limit) -> str:
    limits = {"red": limit.red, "yellow": limit.yellow}
    return ", ".join(f"{colour} {at:g}" for colour, at in limits.items() if at is not None)


def _default(known: Field) -> Any:
    return known.default_text if known.default_text is not None else known.default


def pipeline_lines(key: Key) -> Iterator[str]:
    """What a key of pipeline files takes, for the terminal."""
    yield f"{key.name}  (a key of pipeline files)"
    yield f"  meaning    {key.meaning}"
    yield f"  type       {key.shape}"
    for number, part in enumerate(key.parts):
        yield f"  {'' if number else 'values':<9}  {_part(part)}"
    yield f"  default    {key.default}"


def meaning_lines(section: CodeSection, meaning: Meaning, code: str) -> Iterator[str]:
    """What is known of a finding's code, for the terminal."""
    yield f"{code}  (a finding: {section.title})"
    yield f"  meaning    {meaning.plain_text()}"
    yield f"  layer      {meaning.layer}"
