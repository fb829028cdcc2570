"""GPUs -> `Plan`: batch x accumulation, steps, and the arguments that upstream will be given."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.dataset import mixture, sources, survey
from launcher.dataset.mixer import entry_rows
from launcher.errors import Finding, Severity, launch_finding
from launcher.plan import derive
from launcher.plan.derive import Derived, Setting
from launcher.runs.record import BatchRecord
from launcher.stage.batch import divisors
from launcher.stage.stage import Stage, trend_fault
from launcher.upstream.citations import rendered
from launcher.upstream.schema import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run on how many devices.

    `gpus` 0 is the CPU. `devices` are groups of processes that share their rows. `per_device` x `accumulation` x
    `devices` = `global_batch`, in rows. `rows` and
    `steps` are None where they cannot be known without reading data elsewhere. `values` are the typed
    values, derived ones included.
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
        """What is worth saying of the stage, and of it on these devices."""
        return (*self.stage.findings, *self.findings)

    @property
    def mixed_precision(self) -> str:
        """accelerate's option: the stage file's word, else bf16 on GPUs.

        It would win over TRL's own `bf16: false`, so that there the arguments alone decide.
        """
        bf16 = self.gpus and not self.stage.entry.own_precision
        return self.stage.options.mixed_precision or ("bf16" if bf16 else "no")

    @property
    def attention(self) -> str | None:
        """The implementation chosen of those that the stage file prefers; None where it prefers none."""
        chosen = self.derived.get("attn_implementation")
        return None if chosen is None else str(chosen.value)

    @property
    def title(self) -> str:
        return titled(self.stage.options.stage, self.stage.name)

    def arguments(self) -> dict[str, list[str]]:
        """Upstream's flags and their words, the file's first, then the derived ones."""
        schema = self.stage.schema
        flags = {}
        for name, value in self._all_arguments().items():
            if not schema.in_file(name, value):
                flags[name] = schema.words(name, value)
        return flags

    def file_arguments(self) -> dict[str, Any]:
        """The arguments that no flag can carry: for the trainer's own config file."""
        schema = self.stage.schema
        return {name: value for name, value in self._all_arguments().items() if schema.in_file(name, value)}

    def _all_arguments(self) -> dict[str, Any]:
        return _arguments(self.stage, self.derived)

    @property
    def record(self) -> BatchRecord:
        return BatchRecord(**{part.name: getattr(self, part.name) for part in fields(BatchRecord)})


def titled(kind: str, name: str) -> str:
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
    trainer's Python, where they count; `rows` are those of the data set where somebody says how many.
    `decided` are values that hold whatever the stage file says.
    Raises InvalidConfig with the nearest possible splits where the global batch cannot be divided.
    """
    setting = derive.setting(stage, gpus=gpus, nodes=nodes, packages=packages, output=output)
    batch = setting.batch
    derived = {**derive.derive(setting), **decided}
    values = Values(stage.schema, _arguments(stage, derived))
    if rows is None:
        rows = count_rows(stage, values)
    steps = total_steps(stage, values, rows, batch.rows)
    findings = [
        *_devices_and_deepspeed(stage, gpus, nodes),
        *_without_probe(stage, gpus),
        *_set_by_launch(setting, derived),
        *_attention(setting),
        *_late_trend(stage, steps),
        *_endless_warmup(stage, values, steps),
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


def _arguments(stage: Stage, derived: Mapping[str, Derived]) -> dict[str, Any]:
    """The stage file's arguments with the derived ones, by upstream's names."""
    arguments = dict(stage.args)
    for name, value in derived.items():
        arguments[name] = value.value
    return arguments


def _set_by_launch(setting: Setting, derived: Mapping[str, Derived]) -> Iterator[Finding]:
    """What the entry script needs and the stage file does not say."""
    file = str(setting.stage.config.path)
    for name, value in derive.of_script(setting):
        if derived.get(name) == value:
            message = f"`{name}: {value.value}` is set by launch: {value.why}"
            yield launch_finding("note", "derived", message, key=f"args.{name}", file=file)


def _late_trend(stage: Stage, steps: int | None) -> Iterator[Finding]:
    """A trend that so few steps cannot show, where the stage file alone did not tell."""
    fault = trend_fault(stage.options, steps)
    if fault is not None and fault.key not in {finding.key for finding in stage.findings}:
        yield stage.config.placed(fault)


_WARMUPS = ("warmup_steps", "warmup_ratio")
_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau")


def _endless_warmup(stage: Stage, values: Values, steps: int | None) -> Iterator[Finding]:
    """A warm-up that takes at least as long as training: no step has the learning rate that the file names.

    TRL's `warmup_steps` is a share of all steps below 1
    (transformers/training_args.py::TrainingArguments.get_warmup_steps[int(self.warmup_steps]), open-instruct's
    `warmup_ratio` always (finetune.py::_create_scheduler[num_warmup_steps = int],
    dpo_tune_cache.py::main[num_warmup_steps]). Step k of W has k/W of the learning rate.
    """
    if not steps or values.get("lr_scheduler_type") in _WITHOUT_WARMUP:
        return
    # a rule that knows the arguments alone may have said it already
    said = {finding.key for finding in stage.findings if finding.code == "out-of-range"}
    for name in _WARMUPS:
        warmup = values.get(name)
        if f"args.{name}" in said or not isinstance(warmup, int | float) or not 0 < warmup < math.inf:
            continue
        is_share = name == "warmup_ratio" or warmup < 1
        length = steps * warmup if is_share else warmup
        if int(length) < steps:
            continue
        message = f"`{name}: {warmup:g}`: the warm-up takes {length:,.0f} steps, and {steps:,} are planned"
        rate = values.get("learning_rate")
        if isinstance(rate, int | float):
            reached = (steps - 1) / length
            message += f": the learning rate gets to {rate * reached:.3g}, {100 * reached:.2g} % of {rate:g}"
        help = f"a share of all steps: `{name}: 0.1`"
        yield _run_finding(stage, "warning", "endless-warmup", f"args.{name}", message, help)


def _attention(setting: Setting) -> Iterator[Finding]:
    """Why implementations that `attention:` prefers are passed over."""
    choice = setting.attention
    if choice is None or not choice.why:
        return
    if choice.name is None:
        message = f"no implementation of `attention:` is available here: {choice.why}"
        yield _run_finding(setting.stage, "error", "attention-missing", "attention", message, "add sdpa to the list")
        return
    message = f"attention falls back to {choice.name}: {choice.why}"
    yield _run_finding(setting.stage, "note", "attention-fallback", "attention", message)


def _run_finding(
    stage: Stage, severity: Severity, code: str, key: str, message: str, help: str | None = None
) -> Finding:
    finding = launch_finding(severity, code, message, help, key=key)
    return stage.config.placed(replace(finding, layer="run"))


def completed(plan: Plan, last: Mapping[str, Derived], findings: Iterable[Finding] = ()) -> Plan:
    """The plan with the values that are known only when the others are, and what there is to say of them.

    They hold whatever the stage file says.
    """
    derived = {**plan.derived, **last}
    values = plan.values
    if derived != plan.derived:
        values = Values(plan.stage.schema, _arguments(plan.stage, derived))
    return replace(plan, derived=derived, values=values, findings=(*plan.findings, *findings))


def output_folder(plan: Plan) -> Path | None:
    return plan.stage.backend.output_folder(plan.values)


def model_in(plan: Plan, output: Path) -> Path:
    return output / plan.stage.entry.final_model


def _without_probe(stage: Stage, gpus: int) -> Iterator[Finding]:
    if stage.options.probe is not None:
        return
    if not gpus and not stage.entry.runs_on_cpu:
        message = (
            "the pinned scripts do not run on a CPU without what the probe supplies there (memory "
            "counters, a process group)"
        )
        help = "leave the probe on, or use GPUs"
        yield _run_finding(stage, "error", "probe-needed", "probe", message, help)
        return
    message = (
        "without the probe nothing that runs inside is counted, tested or enforced: the verdict has "
        "the console log alone"
    )
    yield stage.config.placed(launch_finding("note", "no-probe", message, key="probe"))


def _devices_and_deepspeed(stage: Stage, gpus: int, nodes: int) -> Iterator[Finding]:
    options = stage.options
    if options.deepspeed is not None and not gpus:
        message = f"`deepspeed: {options.deepspeed_name}` is left out on the CPU"
        yield stage.config.placed(launch_finding("note", "deepspeed-left-out", message, key="deepspeed"))
    # DPO's own `zero_stage` starts DeepSpeed too (dpo_tune_cache.py::main[if args.zero_stage])
    started = options.deepspeed is not None or stage.values.get("zero_stage") is not None
    if (gpus, nodes) == (1, 1) and not started and stage.entry.needs_process_group:
        message = (
            "one process without DeepSpeed has no process group: the reference pass crashes in "
            "dist.barrier (dpo_utils.py::build_reference_logprobs_cache[dist.barrier #1])"
        )
        message = rendered(message)
        help = "set a `deepspeed:`, such as zero2"
        yield _run_finding(stage, "error", "no-process-group", "deepspeed", message, help)
    if nodes > 1:
        message = (
            "the same command runs on each machine, with NODE_RANK (0, 1, ...), HEAD_ADDRESS and "
            "HEAD_PORT filled in: by --node-rank and --main-address, or Slurm"
        )
        yield launch_finding("note", "several-nodes", message, key="nodes")


def splits(total: int, processes: int) -> list[int]:
    if total < 1 or processes < 1 or total % processes:
        return []
    return divisors(total // processes)


def total_steps(stage: Stage, values: Values, rows: int | None, batch: int) -> int | None:
    """Optimizer steps in all; an epoch's last batch is rounded up
    (finetune.py::main[num_update_steps_per_epoch = math.ceil #1], trainer.py).
    """
    if (limit := step_limit(stage, values)) is not None:
        return limit
    if rows is None or repacks(stage, values):
        return None
    return steps_of(stage, values, rows, batch)


def step_limit(stage: Stage, values: Values) -> int | None:
    """Steps that are trained however many rows there are; None where the rows decide.

    open-instruct's scripts take every limit but None for one, 0 and -1 too: no epoch is begun
    (finetune.py::main[if args.max_train_steps], finetune.py::main[args.num_train_epochs = math.ceil],
    dpo_tune_cache.py::main[if args.max_train_steps], dpo.py::main[effective_steps = args.max_train_steps],
    dpo.py::main[if args.max_train_steps is not None:]). TRL's -1 and 0 stand for none
    (transformers/trainer.py::Trainer.set_initial_training_values[if args.max_steps > 0 #1]).
    """
    if caches_only(stage, values) is not None:
        return 0
    limit = values[stage.entry.names.max_steps]
    if not isinstance(limit, int) or (limit < 1 and not stage.entry.zero_is_limit):
        return None
    return max(0, limit)


def caches_only(stage: Stage, values: Values) -> str | None:
    """What a run ends after, without a step and without a model: `data set` or `reference pass`."""
    return next((what for key, what in stage.entry.ends_after.items() if values.get(key)), None)


def steps_of(stage: Stage, values: Values, rows: int, batch: int) -> int | None:
    """Optimizer steps of all epochs over so many rows, `batch` of them a step."""
    epochs = values[stage.entry.names.epochs]
    if not isinstance(epochs, int | float):
        return None
    if stage.entry.drops_last:
        return int(rows // batch * epochs)
    return math.ceil(epochs * -(-rows // batch))


def repacks(stage: Stage, values: Values) -> bool:
    """Whether rows are put together before they are counted into batches."""
    return stage.entry.repacks(values)


def count_rows(stage: Stage, values: Values) -> int | None:
    """Rows before filtering: counts in the mixer list, local files, known sets; None if unknown.

    Of a mixture of TRL's, those that `test_split_size` leaves.
    """
    mixed = mixture.of_values(values, os.environ)
    if mixed is not None:
        return mixed.train_rows
    listed = values.get(stage.entry.names.data)
    if isinstance(listed, list) and listed and len(listed) % 2 == 0:
        splits = values.get(f"{stage.entry.names.data}_splits") or ["train"]
        if set(splits) != {"train"} and not all(str(n).endswith(".jsonl") for n in listed[::2]):
            return None
        pairs = zip(listed[::2], listed[1::2], strict=True)
        counted = [entry_rows(str(name), str(amount)) for name, amount in pairs]
        return sum(n for n in counted if n is not None) if None not in counted else None
    if not isinstance(listed, str):
        return None
    split = values.get("dataset_train_split") or "train"
    source = sources.of_name(listed, str(split), values.get("dataset_config"), os.environ)
    # an error about the rows says more than a count of the others
    surveyed = survey.look(source.files)
    return None if not source.files or surveyed.unread or surveyed.faults else surveyed.rows
