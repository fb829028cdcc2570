"""Config + schema + rules -> `Stage`: a stage exists only if nothing about it is wrong."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.load import Config
from launcher.errors import Finding, InvalidConfig, Severity, launch_finding, select_errors
from launcher.lazy_dataclass import dataclass
from launcher.rules import registry
from launcher.rules.context import Context, Machine
from launcher.rules.protected import ProtectedPlaces
from launcher.stage import arguments, options, unused
from launcher.stage.batch import report_impossible_batch
from launcher.stage.options import TREND_LOSSES, Batch, Options
from launcher.upstream import locate
from launcher.upstream.locate import Locator, Upstream
from launcher.upstream.schema import Schema, Values
from launcher.upstream.trainers import BACKENDS, Backend, Entry, find_entry

if TYPE_CHECKING:
    from launcher.rules.trl.attention import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage that upstream would take.

    `args` are the values that the file gives, under upstream's names; `findings` hold no errors.
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
        return find_entry(self.schema)

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.options.backend]

    @property
    def deepspeed(self) -> Path | None:
        """The DeepSpeed file of the command.

        Launch's own ZeRO-3 files switch DeepSpeed's `memory_efficient_linear` off, which is faster
        (docs/benchmarks.md). Without gradient checkpointing autograd would then keep every gathered
        weight until the backward pass: there it stays on.
        """
        name = self.options.deepspeed_name
        if name in {"zero3", "zero3_offload"} and not self.entry.recomputes(self.values):
            return options.find_deepspeed_file(f"{name}_efficient_linear")
        return self.options.deepspeed

    def read_deepspeed(self) -> tuple[Mapping[str, Any] | None, Finding | None]:
        """The content of that file, or what is wrong with it."""
        return replace(self.options, deepspeed=self.deepspeed).read_deepspeed()

    @property
    def refers(self) -> bool:
        """Whether DPO compares its log-probabilities with those of a reference model."""
        loss_type = self.values.get("loss_type")
        return self.schema.pairs and loss_type not in self.entry.without_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A config that was read, valid or not, and its findings.

    `deepspeed` is the content of the DeepSpeed file. Rules say nothing about the keys in `refused`.
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


def judge_stage_file(
    config: Config,
    *,
    stage: str | None = None,
    locator: Locator | None = None,
    protected: ProtectedPlaces | None = None,
) -> Judged:
    """Check a config against the source that would run it, by what the file alone tells.

    Parameters and errors are those of `read_stage_file`; `protected` looks at the folders that no
    run may overwrite, once for several configs.
    """
    judged = read_stage_file(config, stage=stage, locator=locator)
    return replace(judged, findings=check_unplanned(judged, protected=protected))


def check_unplanned(
    judged: Judged, machine: Machine | None = None, protected: ProtectedPlaces | None = None
) -> tuple[Finding, ...]:
    """All findings of a config that is not planned: of GPUs only what the file says is known."""
    if judged.values is None:
        return judged.findings
    protected = protected or ProtectedPlaces()
    return apply_rules(judged, _build_file_context(judged, machine, protected))


def read_stage_file(
    config: Config, *, stage: str | None = None, locator: Locator | None = None
) -> Judged:
    """Read a config by the source that would run it: typed options and arguments, and findings.

    The rules that need more facts than the arguments are left to `apply_rules`. `stage` is what
    the command line asked for; `locator` finds the source, once for several configs. Never raises
    for the content of the config; raises NotReady if a named checkout is none.
    """
    locator = locator or Locator()
    name, findings = _choose_stage(config, stage, locator)
    if name is None:
        return Judged(config=config, findings=_sort_findings(config, findings))
    source = locator.find(find_backend(config))
    key, _ = options.read_entry_key(config, name, source.backend)
    schema = locator.schema(source.backend, key)
    entry = find_entry(schema)
    opts, option_faults = options.read_stage_options(config, name, source.root, schema.fields)
    values = _build_values(opts, schema, arguments.parse_names(schema, config.args))

    past = functools.partial(locate.find_past, source, schema.script)
    argument_faults = list(arguments.check(config, schema, entry, past))
    reported = arguments.list_reported_keys(config, schema, entry, argument_faults)
    missing = list(arguments.find_missing(config, schema, entry, reported))
    reported |= {fault.key for fault in missing}
    lost = arguments.find_lost(config, schema, entry)
    findings += [*option_faults, *argument_faults, *missing, *lost]
    for finding in _apply_argument_rules(opts, values):
        if finding.layer == "parser" or finding.key not in reported:
            findings.append(finding)

    findings += unused.find_refusals(values, entry, _collect_keys(findings, {"error"}))
    grave = _collect_keys(findings, {"error", "warning"})
    findings += [
        finding for finding in unused.find_unread(values, entry) if finding.key not in grave
    ]
    findings += _find_batch_faults(opts, config, entry, values)
    findings += _find_attention_faults(opts, config)
    findings += _find_expect_faults(opts, entry, values)

    refused = reported | _collect_keys(findings, {"error"})
    deepspeed, fault = opts.read_deepspeed()
    if fault is not None and fault.key not in refused:
        findings.append(fault)
    return Judged(
        config=config,
        stage=name,
        options=opts,
        schema=schema,
        upstream=source,
        values=values,
        deepspeed=deepspeed,
        allow_unpinned=locator.allow_unpinned,
        refused=refused,
        findings=_sort_findings(config, findings),
    )


def _collect_keys(findings: Iterable[Finding], severities: set[Severity]) -> frozenset[str | None]:
    return frozenset(finding.key for finding in findings if finding.severity in severities)


def _apply_argument_rules(opts: Options, values: Values) -> Iterator[Finding]:
    """The findings of the rules that need the arguments alone."""
    accepts_leaks = opts.expect.get("packing") in {"on", "any"}
    for finding in registry.apply(values):
        if accepts_leaks and finding.code == "packing-leaks":
            finding = replace(finding, severity="note", help=None)
        yield finding


def apply_rules(judged: Judged, context: Context) -> tuple[Finding, ...]:
    """All findings of a config: its own, those of the rules with these facts, the source's."""
    assert judged.upstream is not None
    findings = list(judged.findings)
    for finding in registry.apply_in(context):
        if finding.key not in judged.refused:
            findings.append(finding)
    allowed = judged.allow_unpinned
    ordered = _sort_findings(judged.config, findings)
    unpinned = locate.report_unpinned(
        judged.upstream, allowed=allowed, where_found=context.at_start
    )
    if unpinned is None:
        return ordered
    # about no line of the file
    return (unpinned, *ordered)


def validate(judged: Judged) -> Stage:
    """The stage of a valid config; raises InvalidConfig with all findings of an invalid one."""
    if select_errors(judged.findings):
        raise InvalidConfig(judged.findings)
    assert judged.options and judged.schema and judged.upstream and judged.values is not None
    return Stage(
        config=judged.config,
        options=judged.options,
        schema=judged.schema,
        upstream=judged.upstream,
        values=judged.values,
        args={key: value for key, value in judged.config.args.items() if value is not None},
        findings=judged.findings,
    )


def _build_values(opts: Options, schema: Schema, args: Mapping[str, Any]) -> Values:
    """The values as they are if the first choice of `attention:` is available."""
    values = Values(schema, args)
    choice = choose_attention(opts, values)
    if choice is None or choice.name is None or values.given("attn_implementation"):
        return values
    return Values(schema, {**args, "attn_implementation": choice.name})


def choose_attention(
    options: Options,
    values: Values,
    *,
    gpus: int | None = None,
    packages: Mapping[str, str] | None = None,
) -> Choice | None:
    """The first attention implementation of `attention:` that is available; None without the key.

    `gpus` counts those of all nodes, `packages` are those of the trainer's Python; None: unknown.
    """
    if not options.attention or "attn_implementation" not in values.schema.fields:
        return None
    from launcher.rules.trl import attention

    context = Context(
        values=values,
        environ=os.environ,
        mixed_precision=options.mixed_precision,
        gpus=gpus,
        packages=packages,
    )
    return attention.choose(options.attention, context)


def _build_file_context(
    judged: Judged, machine: Machine | None, protected: ProtectedPlaces
) -> Context:
    """The facts that a stage file holds itself, and the machine."""
    opts = judged.options
    values = judged.values
    assert opts is not None and values is not None and judged.upstream is not None
    names = find_entry(values.schema).names
    batch = opts.batch or Batch()
    accumulation = None
    if not batch.total:
        accumulation = _read_number(values, names.accumulation)
    return Context(
        values=values,
        environ=os.environ,
        deepspeed=judged.deepspeed,
        mixed_precision=opts.mixed_precision,
        named_precision=opts.mixed_precision,
        gpus=opts.gpus,
        per_device=batch.per_device or _read_number(values, names.per_device),
        accumulation=accumulation,
        machine=machine,
        source=judged.upstream.root,
        protected=protected,
    )


def _read_number(values: Values, name: str) -> int | None:
    value = values.get(name)
    if isinstance(value, int):
        return value
    return None


def _find_attention_faults(opts: Options, config: Config) -> Iterator[Finding]:
    if not opts.attention:
        return
    name = "attn_implementation"
    model_kwargs = config.args.get("model_init_kwargs")
    keys = []
    if config.args.get(name) is not None:
        keys.append(name)
    if isinstance(model_kwargs, dict) and name in model_kwargs:
        keys.append("model_init_kwargs")
    message = f"`{name}` and `attention:` both name the attention implementation"
    help = "keep `attention:`, leave this one out"
    for key in keys:
        yield launch_finding("error", "attention-twice", message, help, key=f"args.{key}")


def _find_expect_faults(opts: Options, entry: Entry, values: Values) -> Iterator[Finding]:
    """What `expect:` asks of a run that these arguments do not ask for."""
    names = entry.names
    if opts.expect.get("liger") == "engaged" and not entry.liger(values):
        reason = ""
        if not names.liger:
            reason = f"{entry.script} has no Liger"
        yield _report_impossible_expectation(opts, "liger", names.liger, reason)
    per_device = (opts.batch or Batch()).per_device or values[names.per_device]
    if opts.expect.get("packing") in {"isolated", "on"} and not entry.packs(values, per_device):
        reason = ""
        if entry.packs(values, None):
            reason = "a micro-batch of one row has nothing to pack"
        yield _report_impossible_expectation(opts, "packing", names.packing, reason)
    limit = _read_number(values, names.max_steps)
    # TRL's 0 and -1 are no limit
    if limit is not None and limit > 0:
        fault = find_trend_fault(opts, limit)
        if fault is not None:
            yield fault


def _report_impossible_expectation(
    opts: Options, point: str, argument: str | None, reason: str
) -> Finding:
    """The finding that `expect.POINT` cannot hold; without a `reason`, as the argument is off."""
    message = f"`expect.{point}: {opts.expect[point]}` cannot hold: "
    if reason:
        message += reason
        help = f"expect.{point}=off"
    else:
        message += f"`{argument}` is not true"
        help = f"set `{argument}: true`, or expect.{point}=off"
    severity: Severity = "warning"
    if opts.on_violation == "stop":
        severity = "error"
        message += ", and the probe would stop the run"
    return launch_finding(severity, "impossible-expectation", message, help, key=f"expect.{point}")


def find_trend_fault(opts: Options, steps: int | None) -> Finding | None:
    """The finding that a run of so many steps is too short to show the trend of `expect:`."""
    trend = opts.expect.get("trend")
    if trend in {None, "any"} or steps is None or steps >= TREND_LOSSES:
        return None
    message = f"`expect.trend: {trend}` cannot be proved: a run of {max(steps, 0)} steps "
    message += f"has as many losses at most, {TREND_LOSSES} are needed"
    help = "a longer run, or expect.trend=any"
    return launch_finding("warning", "impossible-expectation", message, help, key="expect.trend")


def _find_batch_faults(
    opts: Options, config: Config, entry: Entry, values: Values
) -> Iterator[Finding]:
    names = entry.names
    batch = opts.batch or Batch()
    yield from _find_batch_number_faults(values, names.per_device, "per_device", batch.per_device)
    yield from _find_batch_number_faults(values, names.accumulation, "global", batch.total)
    per_device = batch.per_device or _read_number(values, names.per_device)
    if not batch.total or per_device is None or per_device < 1:
        return
    # whole micro-batches, however many devices there are
    if batch.total % per_device:
        yield report_impossible_batch(config, total=batch.total, per_device=per_device)


def _find_batch_number_faults(
    values: Values, name: str, part: str, by_batch: int | None
) -> Iterator[Finding]:
    """What is wrong with an argument that `batch.PART` sets too, or with its value."""
    key = f"args.{name}"
    value = values[name]
    if by_batch and values.given(name):
        message = f"`{name}` and `batch:` both set the batch"
        help = f"leave this one out; set `batch.{part}`"
        yield launch_finding("error", "batch-twice", message, help, key=key)
    elif not by_batch and isinstance(value, int) and value < 1:
        message = f"`{name}: {value}` is not a batch size"
        help = "a whole number above 0"
        finding = launch_finding("error", "impossible-batch", message, help, key=key)
        yield replace(finding, layer="run")


def _sort_findings(config: Config, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings with their places, in the order of these."""
    ordered = []
    for finding in findings:
        if finding.file is None:
            finding = config.placed(finding)
        ordered.append(finding)
    ordered.sort(key=lambda finding: (finding.file or "", finding.line or 0))
    return tuple(ordered)


def find_backend(config: Config) -> str:
    """The backend that a file names, or the default if it names none that exists."""
    backend = config.options.get("backend")
    if isinstance(backend, str) and backend in BACKENDS:
        return backend
    return "open_instruct"


def _choose_stage(
    config: Config, asked: str | None, locator: Locator
) -> tuple[str | None, list[Finding]]:
    """The stage to check against, None if that makes no sense, and what is wrong so far."""
    faults = list(config.faults)
    wrong_backend = options.find_backend_fault(config)
    wrong_stage = options.find_stage_fault(config)
    if wrong_backend is not None:
        faults.append(wrong_backend)
    if wrong_stage is not None:
        faults.append(wrong_stage)
    if wrong_backend is not None:
        # against another trainer's arguments nearly every line would be wrong
        return None, faults
    named = options.find_stage(config)
    if named is not None and asked is not None and named != asked:
        key = "stage"
        if config.shape == "wrapped":
            key = "script"
        message = f"the file's stage is {named}, not {asked}"
        help = f"launch {named} {config.path}"
        return None, [*faults, launch_finding("error", "wrong-stage", message, help, key=key)]
    # a stage that is missing can be guessed, one that is wrong cannot
    is_missing = config.shape == "stage" and config.options.get("stage") is None
    if wrong_stage is not None and not is_missing:
        return None, faults
    return named or asked or _guess_stage(config, locator), faults


def _guess_stage(config: Config, locator: Locator) -> str:
    """The stage of a flat upstream file: the one whose own names it uses more."""
    names = config.args.keys()
    if any(name.startswith("dpo_") for name in names):
        return "dpo"
    sft = locator.schema("open_instruct", "sft").fields.keys()
    dpo = locator.schema("open_instruct", "dpo").fields.keys()
    only_sft = len(names & (sft - dpo))
    only_dpo = len(names & (dpo - sft))
    if only_dpo > only_sft:
        return "dpo"
    if only_dpo == only_sft and "dpo" in str(config.path).lower():
        return "dpo"
    return "sft"
