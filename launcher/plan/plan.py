"""GPUs -> `Plan`: batch x accumulation, steps, and the arguments that upstream will get."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.dataset import mixture, sources, survey
from launcher.dataset.mixer import count_entry_rows
from launcher.errors import Finding, Layer, Severity, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.plan import derive
from launcher.plan.derive import Derived, Setting
from launcher.redaction import Redactor
from launcher.runs.record import BatchRecord
from launcher.stage.batch import find_divisors
from launcher.stage.stage import Stage, find_trend_fault
from launcher.upstream.citations import render_citations
from launcher.upstream.schema import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run on how many devices.

    `gpus` 0 is the CPU. `devices` are groups of processes that share their rows. `per_device` x
    `accumulation` x `devices` = `global_batch`, in rows. `rows` and `steps` are None where they
    cannot be known without reading data elsewhere. `values` are the typed values, derived ones
    included.
    """

    stage: Stage
    gpus: int
    nodes: int
    devices: int
    per_device: int
    accumulation: int
    global_batch: int
    rows: int | None
    steps: int | None
    derived: Mapping[str, Derived]
    values: Values
    findings: tuple[Finding, ...]

    @property
    def processes(self) -> int:
        return max(1, self.gpus) * self.nodes

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings about the stage, and about it on these devices."""
        return (*self.stage.findings, *self.findings)

    @property
    def mixed_precision(self) -> str:
        """accelerate's option: the stage file's word, else bf16 on GPUs.

        It would take precedence over TRL's own `bf16: false`, so that there the arguments alone
        decide.
        """
        if self.stage.options.mixed_precision:
            return self.stage.options.mixed_precision
        return "bf16" if self.gpus and not self.stage.entry.own_precision else "no"

    @property
    def attention(self) -> str | None:
        """The chosen implementation of those that the stage file prefers; None where it prefers
        none.
        """
        chosen = self.derived.get("attn_implementation")
        return None if chosen is None else str(chosen.value)

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of its values."""
        return self.stage.config.redactor

    @property
    def title(self) -> str:
        return format_title(self.stage.options.stage, self.stage.name)

    def arguments(self) -> dict[str, list[str]]:
        """Upstream's flags and their words, the file's first, then the derived ones."""
        schema = self.stage.schema
        flags: dict[str, list[str]] = {}
        for name, value in combine_arguments(self.stage, self.derived).items():
            if not schema.in_file(name, value):
                flags[name] = schema.words(name, value)
        return flags

    def file_arguments(self) -> dict[str, Any]:
        """The arguments that no flag can carry: for the trainer's own config file."""
        in_file = self.stage.schema.in_file
        values = combine_arguments(self.stage, self.derived)
        return {name: value for name, value in values.items() if in_file(name, value)}

    @property
    def record(self) -> BatchRecord:
        return BatchRecord(**{part.name: getattr(self, part.name) for part in fields(BatchRecord)})


def format_title(kind: str, name: str) -> str:
    return name if name.startswith(kind) else f"{kind} {name}"


def make(
    stage: Stage,
    *,
    gpus: int,
    nodes: int = 1,
    output: Path | None = None,
    packages: Mapping[str, str] | None = None,
    rows: int | None = None,
    decided: Mapping[str, Derived] = MappingProxyType({}),
) -> Plan:
    """Solve the batch for this many GPUs (a node) and settle every argument.

    `output` is where the model goes when the stage file names no place; `packages` are those of the
    trainer's Python, where they count; `rows` are those of the data set where the user says how
    many. `decided` are values that hold whatever the stage file says. Raises InvalidConfig with the
    nearest possible splits where the global batch cannot be divided.
    """
    setting = derive.make_setting(stage, gpus=gpus, nodes=nodes, packages=packages, output=output)
    batch = setting.batch
    derived = {**derive.derive(setting), **decided}
    values = Values(stage.schema, combine_arguments(stage, derived))
    if rows is None:
        rows = count_rows(stage, values)
    steps = count_total_steps(stage, values, rows, batch.rows)
    findings = [
        *_check_deepspeed(stage, gpus, nodes),
        *_check_probe(stage, gpus),
        *_report_derived(stage, derived),
        *_check_attention(setting),
        *_check_epochs(stage, values),
        *_check_late_trend(stage, steps),
        *_check_warmup(stage, values, steps),
    ]
    return Plan(
        stage=stage,
        gpus=gpus,
        nodes=nodes,
        devices=batch.devices,
        per_device=batch.per_device,
        accumulation=batch.accumulation,
        global_batch=batch.rows,
        rows=rows,
        derived=derived,
        values=values,
        steps=steps,
        findings=tuple(findings),
    )


def complete_plan(
    plan: Plan, last: Mapping[str, Derived], findings: Iterable[Finding] = ()
) -> Plan:
    """The plan with the values that are known only when the others are, and the findings about
    them.

    They hold whatever the stage file says. The names of cache folders depend on the other values,
    and so does whether a run can be resumed: hence a second set of `Values`.
    """
    derived = {**plan.derived, **last}
    values = Values(plan.stage.schema, combine_arguments(plan.stage, derived))
    return replace(plan, derived=derived, values=values, findings=(*plan.findings, *findings))


def combine_arguments(stage: Stage, derived: Mapping[str, Derived]) -> dict[str, Any]:
    """The stage file's arguments with the derived ones, by upstream's names."""
    return {**stage.args, **{name: value.value for name, value in derived.items()}}


def _build_finding(
    stage: Stage,
    severity: Severity,
    code: str,
    key: str,
    message: str,
    help: str | None = None,
    layer: Layer = "run",
) -> Finding:
    finding = launch_finding(severity, code, message, help, key=key)
    return stage.config.placed(replace(finding, layer=layer))


def _report_derived(stage: Stage, derived: Mapping[str, Derived]) -> Iterator[Finding]:
    """What the entry script needs and the stage file does not say."""
    file = str(stage.config.path)
    for name, value in derived.items():
        if value.of_script:
            message = f"`{name}: {value.value}` is set by launch: {value.why}"
            yield launch_finding("note", "derived", message, key=f"args.{name}", file=file)


def _check_late_trend(stage: Stage, steps: int | None) -> Iterator[Finding]:
    """A trend that so few steps cannot show, where the file alone did not show that."""
    fault = find_trend_fault(stage.options, steps)
    if fault is not None and all(finding.key != fault.key for finding in stage.findings):
        yield stage.config.placed(fault)


def _check_epochs(stage: Stage, values: Values) -> Iterator[Finding]:
    """Epochs that no trainer can turn into steps
    (transformers/trainer.py::Trainer.set_initial_training_values[if args.max_steps > 0 #1] rounds
    them up).
    """
    names = stage.entry.names
    epochs = values[names.epochs]
    if not isinstance(epochs, float) or math.isfinite(epochs):
        return
    if find_step_limit(stage, values) is None:
        name = names.epochs
        message = (
            f"`{name}: {epochs}`: the trainer cannot count the steps of so many epochs and stops"
        )
        help = f"a number, such as `{name}: 3`, or a limit by `{names.max_steps}`"
        yield _build_finding(stage, "error", "out-of-range", f"args.{name}", message, help)


def _check_warmup(stage: Stage, values: Values, steps: int | None) -> Iterator[Finding]:
    """A warm-up that takes at least as long as training: no step has the full learning rate.

    TRL's `warmup_steps` is a share of all steps below 1
    (transformers/training_args.py::TrainingArguments.get_warmup_steps[int(self.warmup_steps]),
    open-instruct's `warmup_ratio` always (finetune.py::_create_scheduler[num_warmup_steps = int],
    dpo_tune_cache.py::main[num_warmup_steps]). Step k of W has k/W of the learning rate.
    """
    if not steps or values.get("lr_scheduler_type") in ("constant", "reduce_lr_on_plateau"):
        return
    # a rule that knows the arguments alone may have said it already
    refused = {finding.key for finding in stage.findings if finding.code == "out-of-range"}
    for name in ("warmup_steps", "warmup_ratio"):
        warmup = values.get(name)
        key = f"args.{name}"
        if key in refused or not isinstance(warmup, int | float) or not 0 < warmup < math.inf:
            continue
        length = warmup
        if name == "warmup_ratio" or warmup < 1:
            length = steps * warmup
        if int(length) < steps:
            continue
        message = (
            f"`{name}: {warmup:g}`: the warm-up takes {length:,.0f} steps, "
            f"and {steps:,} are planned"
        )
        rate = values.get("learning_rate")
        if isinstance(rate, int | float):
            share = (steps - 1) / length
            message += (
                f": the learning rate gets to {rate * share:.3g}, {100 * share:.2g} % of {rate:g}"
            )
        help = f"a share of all steps: `{name}: 0.1`"
        yield _build_finding(stage, "warning", "endless-warmup", key, message, help)


def _check_attention(setting: Setting) -> Iterator[Finding]:
    """Why implementations that `attention:` prefers are passed over."""
    choice = setting.attention
    stage = setting.stage
    if choice is None or not choice.why:
        return
    if choice.name is None:
        message = f"no implementation of `attention:` is available here: {choice.why}"
        help = "add sdpa to the list"
        yield _build_finding(stage, "error", "attention-missing", "attention", message, help)
    else:
        message = f"attention falls back to {choice.name}: {choice.why}"
        yield _build_finding(stage, "note", "attention-fallback", "attention", message)


def _check_probe(stage: Stage, gpus: int) -> Iterator[Finding]:
    if stage.options.probe is not None:
        return
    if not gpus and not stage.entry.runs_on_cpu:
        message = (
            "the pinned scripts do not run on a CPU without what the probe supplies there (memory "
            "counters, a process group)"
        )
        help = "leave the probe on, or use GPUs"
        yield _build_finding(stage, "error", "probe-needed", "probe", message, help)
    else:
        message = (
            "without the probe nothing that runs inside is counted, tested or enforced: the "
            "verdict has the console log alone"
        )
        yield _build_finding(stage, "note", "no-probe", "probe", message, layer="launch")


def _check_deepspeed(stage: Stage, gpus: int, nodes: int) -> Iterator[Finding]:
    options = stage.options
    if options.deepspeed is not None and not gpus:
        message = f"`deepspeed: {options.deepspeed_name}` is left out on the CPU"
        yield _build_finding(
            stage, "note", "deepspeed-left-out", "deepspeed", message, layer="launch"
        )
    # DPO's own `zero_stage` starts DeepSpeed too (dpo_tune_cache.py::main[if args.zero_stage])
    has_deepspeed = options.deepspeed is not None or stage.values.get("zero_stage") is not None
    if gpus == 1 and nodes == 1 and not has_deepspeed and stage.entry.needs_process_group:
        message = render_citations(
            "one process without DeepSpeed has no process group: the reference pass crashes in "
            "dist.barrier (dpo_utils.py::build_reference_logprobs_cache[dist.barrier #1])"
        )
        help = "set a `deepspeed:`, such as zero2"
        yield _build_finding(stage, "error", "no-process-group", "deepspeed", message, help)
    if nodes > 1:
        message = (
            "the same command runs on each machine, with NODE_RANK (0, 1, ...), HEAD_ADDRESS and "
            "HEAD_PORT filled in: by --node-rank and --main-address, or Slurm"
        )
        yield launch_finding("note", "several-nodes", message, key="nodes")


def find_output_folder(plan: Plan) -> Path | None:
    return plan.stage.backend.output_folder(plan.values)


def find_model_in(plan: Plan, output: Path) -> Path:
    return output / plan.stage.entry.final_model


def list_splits(total: int, processes: int) -> list[int]:
    """The rows a device that a global batch of `total` rows can be split into."""
    if total < 1 or processes < 1 or total % processes:
        return []
    return find_divisors(total // processes)


def count_total_steps(stage: Stage, values: Values, rows: int | None, batch: int) -> int | None:
    """Optimizer steps in all; an epoch's last batch is rounded up
    (finetune.py::main[num_update_steps_per_epoch = math.ceil #1], trainer.py).
    """
    limit = find_step_limit(stage, values)
    if limit is not None:
        return limit
    if rows is None or stage.entry.repacks(values):
        return None
    return count_steps(stage, values, rows, batch)


def find_step_limit(stage: Stage, values: Values) -> int | None:
    """Steps that are trained however many rows there are; None where the rows decide.

    open-instruct's scripts take every limit but None for one, 0 and -1 too: no epoch is begun
    (finetune.py::main[if args.max_train_steps],
    finetune.py::main[args.num_train_epochs = math.ceil],
    dpo_tune_cache.py::main[if args.max_train_steps],
    dpo.py::main[effective_steps = args.max_train_steps],
    dpo.py::main[if args.max_train_steps is not None:]). TRL's -1 and 0 stand for none
    (transformers/trainer.py::Trainer.set_initial_training_values[if args.max_steps > 0 #1]).
    """
    if find_caches_only(stage, values) is not None:
        return 0
    limit = values[stage.entry.names.max_steps]
    if not isinstance(limit, int) or (limit < 1 and not stage.entry.zero_is_limit):
        return None
    return max(0, limit)


def find_caches_only(stage: Stage, values: Values) -> str | None:
    """What a run ends after, without a step or a model: `data set` or `reference pass`."""
    for key, end in stage.entry.ends_after.items():
        if values.get(key):
            return end
    return None


def count_steps(stage: Stage, values: Values, rows: int, batch: int) -> int | None:
    """Optimizer steps of all epochs over these rows, `batch` of them a step."""
    epochs = values[stage.entry.names.epochs]
    if not isinstance(epochs, int | float) or not math.isfinite(epochs):
        return None
    if stage.entry.drops_last:
        return int(rows // batch * epochs)
    return math.ceil(epochs * -(-rows // batch))


def count_rows(stage: Stage, values: Values) -> int | None:
    """Rows before filtering: counts in the mixer list, local files, known sets; None if unknown.

    Of a mixture of TRL's, those that `test_split_size` leaves.
    """
    mixed = mixture.read_mixture(values, os.environ)
    if mixed is not None:
        return mixed.train_rows
    data = stage.entry.names.data
    listed = values.get(data)
    if isinstance(listed, list):
        return _count_listed_rows(listed, values.get(f"{data}_splits") or ["train"])
    if not isinstance(listed, str):
        return None
    split = values.get("dataset_train_split") or "train"
    source = sources.find_named_source(listed, str(split), values.get("dataset_config"), os.environ)
    if not source.files:
        return None
    surveyed = survey.look(source.files)
    if surveyed.unread or surveyed.faults:
        # an error about the rows says more than a count of the others
        return None
    return surveyed.rows


def _count_listed_rows(listed: list[Any], splits: list[Any]) -> int | None:
    """Rows of a mixer list: names and amounts in turn."""
    names = [str(name) for name in listed[::2]]
    amounts = listed[1::2]
    if not names or len(names) != len(amounts):
        return None
    if set(splits) != {"train"} and not all(name.endswith(".jsonl") for name in names):
        return None
    total = 0
    for name, amount in zip(names, amounts, strict=True):
        rows = count_entry_rows(name, str(amount))
        if rows is None:
            return None
        total += rows
    return total
