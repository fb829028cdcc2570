"""Config + schema + rules -> `Stage`: a stage exists only if nothing about it is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import options, rules, upstream
from launcher.backends import BACKENDS, Entry
from launcher.config import Config
from launcher.errors import Finding, InvalidConfig, Layer, errors
from launcher.options import Options
from launcher.schema import Field, Schema, Values
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
    backend = str(config.options.get("backend") or "open_instruct")
    source = upstream.locate(
        backend if backend in BACKENDS else "open_instruct", checkout=checkout, search=search
    )
    folders = (source.root,) if source.root is not None else ()
    opts, problems = options.read(config, found, folders)
    findings += problems
    pin = upstream.unpinned(source, running=running, allowed=allow_unpinned)
    findings += [pin] if pin is not None else []
    schema = upstream.load_schema(source, found, allow_unpinned=allow_unpinned)
    entry = BACKENDS[opts.backend].STAGES[found]
    given = {key: value for key, value in config.args.items() if value is not None}
    findings += _check_args(config, schema, entry)
    known = {key: value for key, value in given.items() if key in schema.fields}
    values = Values(schema, known)
    findings += [_placed(config, finding) for finding in rules.apply(values)]
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


def _rejected(config: Config, findings: list[Finding]) -> Judged:
    return Judged(
        config=config, stage=None, options=None, schema=None, upstream=None, values=None,
        findings=tuple(findings),
    )  # fmt: skip


def _order(finding: Finding) -> tuple[str, int]:
    return finding.file or "", finding.line or 0


def _stage_name(config: Config, asked: str | None) -> tuple[str | None, list[Finding]]:
    fault = options.stage_fault(config)
    if fault is not None:
        return None, [fault]
    named = options.stage_of(config)
    if named is not None and asked is not None and named != asked:
        key = "script" if config.shape == "wrapped" else "stage"
        origin = config.origin(key)
        wrong = Finding(
            severity="error", layer="launch", code="wrong-stage", key=key,
            message=f"this is a {named} file, not {asked}", help=f"launch {named} {config.path}",
            file=origin.file, line=origin.line,
        )  # fmt: skip
        return None, [wrong]
    return named or asked or _guess(config), []


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


def _check_value(schema: Schema, entry: Entry, known: Field, value: Any) -> Finding | None:
    key = f"args.{known.name}"
    if value is None:
        return None
    if isinstance(value, list) and None in value:
        return Finding(
            severity="error", layer="launch", code="bad-value", key=f"{key}[{value.index(None)}]",
            message=f"an entry of `{known.name}` is empty", help="null is not a value of a list",
        )  # fmt: skip
    words = schema.words(known.name, value)
    reason = known.refusal(words)
    if reason is not None:
        help = entry.hints.get(known.name, f"{known.type}  ({known.where})")
        return Finding(
            severity="error", layer="parser", code="bad-value", key=key,
            message=f"`{known.name}`: {reason}", help=help,
        )  # fmt: skip
    if not words:
        return Finding(
            severity="error", layer="launch", code="bad-value", key=key,
            message=f"`{known.name}` is an empty list; upstream would read true",
            help=f"{known.type}  ({known.where})",
        )  # fmt: skip
    return None


def _check_unknown(schema: Schema, entry: Entry, key: str, value: Any) -> Finding:
    code, message, help = _explain_unknown(schema, entry, key)
    taken_as = _abbreviates(schema, key)
    layer: Layer = "launch" if value is None else "parser"
    if taken_as is not None and value is not None:
        known = schema.fields.get(taken_as)
        words = schema.words(taken_as, value)
        if known is not None and known.refusal(words) is None:
            # argparse would take the abbreviation without a word: only we object
            layer = "launch"
            if code == "unknown-key":
                code, help = "abbreviated-key", f"write `{taken_as}`"
            message += f"; upstream would silently take it for `{taken_as}`"
    return Finding(
        severity="error", layer=layer, code=code, key=f"args.{key}", message=message, help=help
    )


def _explain_unknown(schema: Schema, entry: Entry, key: str) -> tuple[str, str, str]:
    owner = entry.classes[0][1] if schema.backend == "open_instruct" else entry.classes[1][1]
    message = f"`{key}` is not a field of {owner}"
    moved = entry.moved.get(key)
    if moved is not None:
        if moved.to is None:
            return "removed-key", f"{message}: {moved.why}", "delete the line"
        where = schema.fields[moved.to].where if moved.to in schema.fields else ""
        return "renamed-key", f"{message}: {moved.why}", f"write `{moved.to}`  ({where})"
    near = difflib.get_close_matches(key, schema.fields, n=1, cutoff=0.7)
    if near:
        return (
            "unknown-key",
            message,
            f"did you mean `{near[0]}`?  ({schema.fields[near[0]].where})",
        )
    if key in options.KEYS:
        return (
            "unknown-key",
            message,
            f"`{key}` is launch's own: it stands beside `args:`, not in it",
        )
    return "unknown-key", message, f"{schema.script} at {schema.version[:12]} has no such argument"


def _abbreviates(schema: Schema, key: str) -> str | None:
    """The field that argparse would take `--key` for: an exact alias or an unambiguous prefix."""
    flag = f"--{key}"
    flags = list(schema.flags())
    exact = [known for known in flags if known == flag]
    matches = exact or [known for known in flags if known.startswith(flag)]
    # two spellings of one field are still two option strings: argparse calls that ambiguous
    if len(matches) != 1:
        return None
    name = matches[0].removeprefix("--").replace("-", "_")
    return name if name in schema.fields else None
