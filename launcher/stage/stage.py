"""Config + schema + rules -> `Stage`: a stage exists only if nothing about it is wrong."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.load import Config
from launcher.errors import Finding, InvalidConfig, Severity, errors, launch_finding
from launcher.rules import registry
from launcher.rules.context import Context, Machine
from launcher.stage import arguments, options, unused
from launcher.stage.batch import impossible
from launcher.stage.options import TREND_LOSSES, Batch, Options
from launcher.upstream import locate
from launcher.upstream.locate import Locator, Upstream
from launcher.upstream.schema import Schema, Values
from launcher.upstream.trainers import BACKENDS, Backend, Entry, entry_of

if TYPE_CHECKING:
    from launcher.rules.trl.attention import Choice


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
        return self.options.name or self.config.path.stem

    @property
    def entry(self) -> Entry:
        return entry_of(self.schema)

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.options.backend]

    @property
    def deepspeed(self) -> Path | None:
        """The DeepSpeed file of the command.

        Launch's own ZeRO-3 leaves the linears as they are, which is faster (docs/benchmarks.md). Where no layer is
        computed again autograd would then keep every gathered weight until the backward pass: there DeepSpeed's
        `memory_efficient_linear` stays on.
        """
        name = self.options.deepspeed_name
        if name in {"zero3", "zero3_offload"} and not self.entry.recomputes(self.values):
            return options.deepspeed_file(f"{name}_efficient_linear")
        return self.options.deepspeed

    def read_deepspeed(self) -> tuple[Mapping[str, Any] | None, Finding | None]:
        """The content of that file, or what is wrong with it."""
        return replace(self.options, deepspeed=self.deepspeed).read_deepspeed()

    @property
    def refers(self) -> bool:
        """Whether DPO holds its log-probabilities against those of a reference model."""
        return self.schema.pairs and self.values.get("loss_type") not in self.entry.without_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A config with what was found out about it, valid or not.

    `deepspeed` is the DeepSpeed file in use, parsed. `refused` are the keys of which no rule has to say more.
    """

    config: Config
    findings: tuple[Finding, ...]
    stage: str | None = None
    options: Options | None = None
    schema: Schema | None = None
    upstream: Upstream | None = None
    values: Values | None = None
    deepspeed: Mapping[str, Any] | None = None
    allow_unpinned: bool = False
    refused: frozenset[str | None] = frozenset()


def judge(config: Config, *, stage: str | None = None, locator: Locator | None = None) -> Judged:
    """Check a config against the source that would run it, by what the file alone tells; never raises for its content.

    Parameters and errors are those of `read`.
    """
    judged = read(config, stage=stage, locator=locator)
    return replace(judged, findings=unplanned_findings(judged))


def unplanned_findings(judged: Judged, machine: Machine | None = None) -> tuple[Finding, ...]:
    """All findings of a config that was read and is not planned: of GPUs only what the file itself says is known."""
    if judged.values is None:
        return judged.findings
    return apply_rules(judged, _file_context(judged, machine))


def read(config: Config, *, stage: str | None = None, locator: Locator | None = None) -> Judged:
    """Read a config by the source that would run it: its options and arguments, typed, and what is wrong with them.

    The rules that need more facts than the arguments are left to `apply_rules`. `stage` is what the command line
    asked for; `locator` finds the source, once for several configs. Raises NotReady where a checkout was named
    and is none.
    """
    locator = locator or Locator()
    found, findings = _stage_name(config, stage, locator)
    if found is None:
        return Judged(config=config, findings=_in_order(config, findings))
    source = locator.find(backend_of(config))
    key, _ = options.entry_of(config, found, source.backend)
    schema = locator.schema(source.backend, key)
    entry = entry_of(schema)
    folders = (source.root,) if source.root is not None else ()
    opts, problems = options.read(config, found, folders, schema.fields)
    findings += problems
    checked = list(arguments.check(config, schema, entry, functools.partial(locate.past, source, schema.script)))
    values = _values(opts, schema, arguments.taken(schema, config.args))
    reported = arguments.reported(config, schema, entry, checked)
    lacking = list(arguments.missing(config, schema, entry, reported))
    reported |= {fault.key for fault in lacking}
    checked += lacking
    checked += arguments.lost(config, schema, entry)
    ruled = list(registry.apply(values))
    if opts.expect.get("packing") in {"on", "any"}:
        # what the file itself puts up with stops nothing
        ruled = [replace(f, severity="note", help=None) if f.code == "packing-leaks" else f for f in ruled]
    findings += [*checked, *(f for f in ruled if f.layer == "parser" or f.key not in reported)]
    wrong = {finding.key for finding in findings if finding.severity == "error"}
    findings += unused.refused(values, entry, wrong)
    # the analysis says nothing more of keys of which something as grave was said
    grave = {f.key for f in findings if f.severity in {"error", "warning"}}
    findings += [finding for finding in unused.find(values, entry) if finding.key not in grave]
    findings += [*_batch_faults(opts, config, entry, values), *_attention_faults(opts, config)]
    findings += _expect_faults(opts, entry, values)
    wrong = {finding.key for finding in findings if finding.severity == "error"}
    refused = frozenset(reported | wrong)
    deepspeed, fault = opts.read_deepspeed()
    if fault is not None and fault.key not in refused:
        findings.append(fault)
    return Judged(
        config=config,
        stage=found,
        options=opts,
        schema=schema,
        upstream=source,
        values=values,
        deepspeed=deepspeed,
        allow_unpinned=locator.allow_unpinned,
        refused=refused,
        findings=_in_order(config, findings),
    )


def apply_rules(judged: Judged, context: Context) -> tuple[Finding, ...]:
    """All findings of a config that was read: its own, those of the rules with these facts, that of the source."""
    assert judged.upstream is not None
    ruled = [finding for finding in registry.apply_in(context) if finding.key not in judged.refused]
    pin = locate.unpinned(judged.upstream, allowed=judged.allow_unpinned, where_found=context.at_start)
    placeless = [] if pin is None else [pin]
    return _in_order(judged.config, [*judged.findings, *ruled], placeless)


def validate(judged: Judged, *, strict: bool = False) -> Stage:
    """The stage, if it stands; raises InvalidConfig with all findings where one of them stops it."""
    if errors(judged.findings, strict=strict):
        raise InvalidConfig(judged.findings)
    assert judged.options and judged.schema and judged.upstream and judged.values is not None
    return Stage(
        config=judged.config,
        options=judged.options,
        schema=judged.schema,
        upstream=judged.upstream,
        values=judged.values,
        args={k: v for k, v in judged.config.args.items() if v is not None},
        findings=judged.findings,
    )


def _values(opts: Options, schema: Schema, given: Mapping[str, Any]) -> Values:
    """The values as they will be if the first choice of `attention:` can be had."""
    values = Values(schema, given)
    choice = preferred_attention(opts, values)
    if choice is None or choice.name is None or values.given("attn_implementation"):
        return values
    return Values(schema, {**given, "attn_implementation": choice.name})


def preferred_attention(
    options: Options, values: Values, *, gpus: int | None = None, packages: Mapping[str, str] | None = None
) -> Choice | None:
    """Which of the attention implementations that a stage file prefers can be had; None without any.

    `gpus` counts those of all nodes, `packages` are those of the trainer's Python: None is not known.
    """
    if not options.attention or "attn_implementation" not in values.schema.fields:
        return None
    from launcher.rules.trl import attention

    context = Context(
        values=values, environ=os.environ, mixed_precision=options.mixed_precision, gpus=gpus, packages=packages
    )
    return attention.choose(options.attention, context)


def _file_context(judged: Judged, machine: Machine | None) -> Context:
    """The facts that a stage file holds itself, and the machine."""
    opts = judged.options
    values = judged.values
    assert opts is not None and values is not None and judged.upstream is not None
    names = entry_of(values.schema).names
    batch = opts.batch or Batch()
    accumulation = None
    if not batch.total:
        accumulation = _number(values, names.accumulation)
    return Context(
        values=values,
        environ=os.environ,
        deepspeed=judged.deepspeed,
        mixed_precision=opts.mixed_precision,
        named_precision=opts.mixed_precision,
        gpus=opts.gpus,
        per_device=batch.per_device or _number(values, names.per_device),
        accumulation=accumulation,
        machine=machine,
        source=judged.upstream.root,
    )


def _number(values: Values, name: str) -> int | None:
    given = values.get(name)
    return given if isinstance(given, int) else None


def _attention_faults(opts: Options, config: Config) -> Iterator[Finding]:
    key = "attn_implementation"
    inside = config.args.get("model_init_kwargs")
    twice = [f"args.{key}"] if config.args.get(key) is not None else []
    twice += ["args.model_init_kwargs"] if isinstance(inside, dict) and key in inside else []
    for where in twice if opts.attention else ():
        message = f"`{key}` and `attention:` both name the attention implementation"
        yield launch_finding("error", "attention-twice", message, "keep `attention:`, leave this one out", key=where)


def _expect_faults(opts: Options, entry: Entry, values: Values) -> Iterator[Finding]:
    """What `expect:` asks of a run that these arguments do not ask for."""
    names = entry.names
    per_device = (opts.batch or Batch()).per_device or values[names.per_device]
    packs = entry.packs(values, per_device)
    no_liger = "" if names.liger else f"{entry.script} has no Liger"
    of_one_row = entry.packs(values, None) and not packs
    no_packing = "a micro-batch of one row has nothing to pack" if of_one_row else ""
    for point, states, is_on, name, reason in (
        ("liger", {"engaged"}, entry.liger(values), names.liger, no_liger),
        ("packing", {"isolated", "on"}, packs, names.packing, no_packing),
    ):
        state = opts.expect.get(point)
        if state not in states or is_on:
            continue
        message = f"`expect.{point}: {state}` cannot hold: {reason or f'`{name}` is not true'}"
        stops = opts.on_violation == "stop"
        message += ", and the probe would stop the run" if stops else ""
        help = f"expect.{point}=off" if reason else f"set `{name}: true`, or expect.{point}=off"
        severity: Severity = "error" if stops else "warning"
        yield launch_finding(severity, "impossible-expectation", message, help, key=f"expect.{point}")
    limit = values.get(names.max_steps)
    # TRL's 0 and -1 are no limit
    if isinstance(limit, int) and limit > 0 and (fault := trend_fault(opts, limit)) is not None:
        yield fault


def trend_fault(opts: Options, steps: int | None) -> Finding | None:
    """Where `expect:` asks a run of at most so many steps for a trend that fewer losses cannot show."""
    if opts.expect.get("trend") in {None, "any"} or steps is None or steps >= TREND_LOSSES:
        return None
    message = f"`expect.trend: {opts.expect['trend']}` cannot be proved: a run of {max(steps, 0)} steps "
    message += f"has as many losses at most, {TREND_LOSSES} are needed"
    help = "a longer run, or expect.trend=any"
    return launch_finding("warning", "impossible-expectation", message, help, key="expect.trend")


def _batch_faults(opts: Options, config: Config, entry: Entry, values: Values) -> Iterator[Finding]:
    batch = opts.batch or Batch()
    split = (
        (entry.names.per_device, "per_device", batch.per_device),
        (entry.names.accumulation, "global", batch.total),
    )
    for name, part, by_batch in split:
        key = f"args.{name}"
        if by_batch and values.given(name):
            message, help = f"`{name}` and `batch:` both set the batch", f"leave this one out; set `batch.{part}`"
            yield launch_finding("error", "batch-twice", message, help, key=key)
        elif not by_batch and isinstance(values[name], int) and values[name] < 1:
            message, help = f"`{name}: {values[name]}` is not a batch size", "a whole number above 0"
            yield replace(launch_finding("error", "impossible-batch", message, help, key=key), layer="run")
    per_device = batch.per_device or values[entry.names.per_device]
    if not batch.total or not isinstance(per_device, int) or per_device < 1:
        return
    # whole micro-batches, however many devices there are
    if batch.total % per_device:
        yield impossible(config, total=batch.total, per_device=per_device)


def _in_order(config: Config, findings: Sequence[Finding], placeless: Sequence[Finding] = ()) -> tuple[Finding, ...]:
    placed = [one if one.file is not None else config.placed(one) for one in findings]
    return tuple(sorted([*placeless, *placed], key=lambda one: (one.file or "", one.line or 0)))


def backend_of(config: Config) -> str:
    """The backend that a file names, or the default where it names none that there is."""
    backend = config.options.get("backend")
    return backend if isinstance(backend, str) and backend in BACKENDS else "open_instruct"


def _stage_name(config: Config, asked: str | None, locator: Locator) -> tuple[str | None, list[Finding]]:
    """The stage to check against, None where that makes no sense, and what is wrong so far."""
    faults = list(config.faults)
    wrong_backend, fault = options.backend_fault(config), options.stage_fault(config)
    faults += [one for one in (wrong_backend, fault) if one is not None]
    if wrong_backend is not None:
        # held against another trainer's arguments, nearly every line would be wrong
        return None, faults
    if fault is not None:
        # a stage that was forgotten can be guessed, and everything else said too
        forgotten = config.shape == "stage" and config.options.get("stage") is None
        return (asked or _guess(config, locator)) if forgotten else None, faults
    named = options.stage_of(config)
    if named is not None and asked is not None and named != asked:
        key = "script" if config.shape == "wrapped" else "stage"
        message, help = f"the file's stage is {named}, not {asked}", f"launch {named} {config.path}"
        return None, [*faults, launch_finding("error", "wrong-stage", message, help, key=key)]
    return named or asked or _guess(config, locator), faults


def _guess(config: Config, locator: Locator) -> str:
    """Which stage a flat upstream file belongs to: the one whose own names it uses more."""
    if any(key.startswith("dpo_") for key in config.args):
        return "dpo"  # of no script's for SFT, at any commit
    sft, dpo = (set(locator.schema("open_instruct", stage).fields) for stage in ("sft", "dpo"))
    only_sft, only_dpo = len(config.args.keys() & (sft - dpo)), len(config.args.keys() & (dpo - sft))
    if only_sft == only_dpo:
        return "dpo" if "dpo" in str(config.path).lower() else "sft"
    return "sft" if only_sft > only_dpo else "dpo"
