"""Config + schema + rules -> `Stage`: a stage exists only if nothing about it is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from launcher import options, rules, upstream
from launcher.backends import BACKENDS, Entry
from launcher.config import Config
from launcher.errors import Finding, InvalidConfig, Layer, brief, errors
from launcher.options import Batch, Options
from launcher.schema import Field, Flag, Schema, Values
from launcher.upstream import Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage that upstream would take: what was asked for, typed, and what is worth saying of it.

    `args` are the values given, under upstream's names and as the file holds them; `findings` hold
    no errors.
    """

    config: Config
    options: Options
    schema: Schema
    upstream: Upstream
    values: Values
    args: Mapping[str, Any]
    findings: tuple[Finding, ...]

    @property
    def name(self) -> str:
        """What the run is called: `name:`, else the file's."""
        return self.options.name or self.config.path.stem

    @property
    def entry(self) -> Entry:
        """The entry script's description."""
        return BACKENDS[self.options.backend].STAGES[self.options.stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A config with everything found out about it, valid or not."""

    config: Config
    stage: str | None
    options: Options | None
    schema: Schema | None
    upstream: Upstream | None
    values: Values | None
    findings: tuple[Finding, ...]


def judge(
    config: Config,
    *,
    stage: str | None = None,
    checkout: Path | None = None,
    search: Sequence[Path] | None = None,
    allow_unpinned: bool = False,
    running: bool = False,
) -> Judged:
    """Check a config against the source that would run it; collects, never raises for its content.

    `stage` is what the command line asked for. `search` is the trainer's import path. Raises
    NotReady where a checkout was named and is none.
    """
    found, findings = _stage_name(config, stage)
    if found is None:
        return _rejected(config, findings)
    source = upstream.locate(_backend(config), checkout=checkout, search=search)
    pin = upstream.unpinned(source, running=running, allowed=allow_unpinned)
    findings += [pin] if pin is not None else []
    schema = upstream.load_schema(source, found, allow_unpinned=allow_unpinned)
    folders = (source.root,) if source.root is not None else ()
    opts, problems = options.read(config, found, folders, schema.fields)
    findings += problems
    entry = BACKENDS[opts.backend].STAGES[found]
    checked = list(_check_args(config, schema, entry))
    values = Values(schema, _taken(schema, config.args))
    meant = _meant(config, schema, entry, checked)
    ruled = [_placed(config, finding) for finding in rules.apply(values)]
    findings += [*checked, *(f for f in ruled if f.layer == "parser" or f.key not in meant)]
    findings += [_placed(config, fault) for fault in _batch_faults(opts, entry, values)]
    return Judged(
        config=config, stage=found, options=opts, schema=schema, upstream=source, values=values,
        findings=tuple(sorted(findings, key=_order)),
    )  # fmt: skip


def validate(judged: Judged, *, strict: bool = False) -> Stage:
    """The stage, if it stands; raises InvalidConfig with all findings where one of them stops it."""
    if errors(judged.findings, strict=strict):
        raise InvalidConfig(judged.findings)
    assert judged.options and judged.schema and judged.upstream and judged.values is not None
    known = {k: v for k, v in judged.config.args.items() if v is not None}
    return Stage(
        config=judged.config, options=judged.options, schema=judged.schema,
        upstream=judged.upstream, values=judged.values, args=known, findings=judged.findings,
    )  # fmt: skip


def _batch_faults(opts: Options, entry: Entry, values: Values) -> Iterator[Finding]:
    """Batch numbers below 1, and those that stand both in `batch:` and among the arguments."""
    batch = opts.batch or Batch()
    for name, wanted in (
        (entry.names.per_device, batch.per_device),
        (entry.names.accumulation, batch.total),
    ):
        key = f"args.{name}"
        if wanted and values.given(name):
            yield Finding(
                severity="error", layer="launch", code="batch-twice", key=key,
                message=f"`{name}` and `batch:` both set the batch",
                help="keep `batch:`, leave this one out",
            )  # fmt: skip
        elif not wanted and values[name] < 1:
            yield Finding(
                severity="error", layer="run", code="impossible-batch", key=key,
                message=f"`{name}: {values[name]}` is no batch", help="a whole number above 0",
            )  # fmt: skip


def _rejected(config: Config, findings: list[Finding]) -> Judged:
    return Judged(
        config=config, stage=None, options=None, schema=None, upstream=None, values=None,
        findings=tuple(sorted(findings, key=_order)),
    )  # fmt: skip


def _order(finding: Finding) -> tuple[str, int]:
    return finding.file or "", finding.line or 0


def _backend(config: Config) -> str:
    backend = config.options.get("backend")
    return backend if isinstance(backend, str) and backend in BACKENDS else "open_instruct"


def _stage_name(config: Config, asked: str | None) -> tuple[str | None, list[Finding]]:
    """The stage to check against, None where that makes no sense, and what is wrong so far."""
    faults = list(config.faults)
    fault = options.stage_fault(config)
    if fault is not None:
        faults.append(fault)
        # a stage that was forgotten can be guessed, and everything else said too
        forgotten = config.shape == "stage" and config.options.get("stage") is None
        return (asked or _guess(config), faults) if forgotten else (None, faults)
    named = options.stage_of(config)
    if named is not None and asked is not None and named != asked:
        key = "script" if config.shape == "wrapped" else "stage"
        origin = config.origin(key)
        wrong = Finding(
            severity="error", layer="launch", code="wrong-stage", key=key,
            message=f"this is a {named} file, not {asked}", help=f"launch {named} {config.path}",
            file=origin.file, line=origin.line,
        )  # fmt: skip
        return None, [*faults, wrong]
    return named or asked or _guess(config), faults


def _guess(config: Config) -> str:
    """Which stage a flat upstream file belongs to: the one whose own names it uses more."""
    sft, dpo = (set(upstream.snapshot("open_instruct")["stages"][s]) for s in ("sft", "dpo"))
    names = {
        stage: {key.partition(".")[2] for key in keys}
        for stage, keys in (("sft", sft), ("dpo", dpo))
    }
    only_sft = len(config.args.keys() & (names["sft"] - names["dpo"]))
    only_dpo = len(config.args.keys() & (names["dpo"] - names["sft"]))
    if only_sft == only_dpo:
        return "dpo" if "dpo" in str(config.path).lower() else "sft"
    return "sft" if only_sft > only_dpo else "dpo"


def _placed(config: Config, finding: Finding) -> Finding:
    origin = config.origin(finding.key or "")
    return replace(finding, file=origin.file, line=origin.line)


# --- every key against the schema ------------------------------------------------------------------


def _check_args(config: Config, schema: Schema, entry: Entry) -> Iterator[Finding]:
    for key, value in config.args.items():
        fault = (
            _check_value(schema, entry, schema.fields[key], value)
            if key in schema.fields
            else _check_unknown(schema, entry, key, value)
        )
        if fault is not None:
            yield _placed(config, fault)


def _taken(schema: Schema, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under the names that upstream's parser would take them for; the last one wins."""
    taken: dict[str, Any] = {}
    for key, value in args.items():
        if value is None:
            continue
        flag = Flag(key) if key in schema.fields else schema.taken_as(key)
        if flag is not None and not flag.negated:
            taken[flag.name] = value
        elif flag is not None and value == []:
            taken[flag.name] = False
    return taken


def _meant(
    config: Config, schema: Schema, entry: Entry, faults: Sequence[Finding]
) -> frozenset[str | None]:
    """Keys about which enough was said: theirs, and those that a wrong key was meant to be."""
    meant = {fault.key for fault in faults}
    for key in config.args.keys() - schema.fields.keys():
        moved = entry.moved.get(key)
        near = [moved.to] if moved is not None else _near(schema, key)
        meant |= {f"args.{name}" for name in near}
    if any(config.args.get(key) is not None for key in entry.hints):
        meant.add(f"args.{entry.names.data}")
    return frozenset(meant)


def _check_value(schema: Schema, entry: Entry, known: Field, value: Any) -> Finding | None:
    if value is None:
        return None
    key, help = f"args.{known.name}", f"its type is {known.type}  ({known.where})"
    layer: Layer = "launch"
    words = schema.words(known.name, value)
    reason = schema.refusal(known.name, words)
    if reason is not None:
        layer, help = "parser", entry.hints.get(known.name) or _advice(value, words) or help
    elif not words:
        reason = "an empty list, which upstream would read as true"
    elif isinstance(value, list) and any(v is None or isinstance(v, list | dict) for v in value):
        reason = "an entry is a list, a mapping or empty, which no flag can carry"
    elif isinstance(value, dict) and "dict" not in known.type:
        reason = f"a mapping, which upstream would take as the text `{brief(words[0])}`"
    elif isinstance(value, bool) and known.kind == "str":
        return Finding(
            severity="warning", layer="run", code="bool-as-text", key=key,
            message=f"`{known.name}`: YAML reads a bool here, upstream will get the text {value}",
            help="put the text in quotes",
        )  # fmt: skip
    else:
        return None
    return Finding(
        severity="error", layer=layer, code="bad-value", key=key,
        message=f"`{known.name}`: {reason}", help=help,
    )  # fmt: skip


def _advice(value: Any, words: Sequence[str]) -> str | None:
    """What to write instead, where YAML or argparse reads something else than its author meant."""
    if isinstance(value, bool):
        return "YAML reads yes, no, on and off as a bool: put the text in quotes"
    if len(words) == 1 and words[0].startswith("-"):
        try:
            plain = format(Decimal(words[0]), "f")
        except ArithmeticError:
            return None
        return f'argparse knows no negative numbers with an exponent: write "{plain}", in quotes'
    return None


def _check_unknown(schema: Schema, entry: Entry, key: str, value: Any) -> Finding:
    code, message, help = _explain_unknown(schema, entry, key)
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
    return Finding(
        severity="error", layer=layer, code=code, key=f"args.{key}", message=message, help=help
    )


def _explain_unknown(schema: Schema, entry: Entry, key: str) -> tuple[str, str, str]:
    message = f"`{key}` is not a field of {entry.owner}"
    moved = entry.moved.get(key)
    if moved is not None:
        if moved.to is None:
            return "removed-key", f"{message}: {moved.why}", "delete the line"
        where = schema.fields[moved.to].where if moved.to in schema.fields else ""
        return "renamed-key", f"{message}: {moved.why}", f"write `{moved.to}`  ({where})"
    near = _near(schema, key)
    if near:
        help = f"did you mean `{near[0]}`?  ({schema.fields[near[0]].where})"
    elif key in options.KEYS:
        help = f"`{key}` is launch's own: it stands beside `args:`, not in it"
    elif others := list(_homes(schema, key)):
        help = f"it exists for {' and '.join(others)} only"
    else:
        help = f"{schema.script} at {schema.version[:12]} has no such argument"
    return "unknown-key", message, help


def _near(schema: Schema, key: str) -> list[str]:
    return difflib.get_close_matches(key, schema.fields, n=1, cutoff=0.7)


def _homes(schema: Schema, key: str) -> Iterator[str]:
    """The other stages and backends that have a field of this name."""
    for backend in BACKENDS:
        for stage, names in upstream.snapshot(backend)["stages"].items():
            if any(name.partition(".")[2] == key for name in names):
                yield f"{stage} on {backend}"
