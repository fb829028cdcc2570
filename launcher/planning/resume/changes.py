"""What differs from when a checkpoint was saved -> `ResumeChange`, with what a resume would make of
it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from launcher.cache import inputs
from launcher.cache.inputs import Contents
from launcher.cache.keys import Cache
from launcher.errors import Severity, shorten
from launcher.lazy_dataclass import dataclass
from launcher.machine import python
from launcher.machine.python import Trainer
from launcher.plan.plan import Plan
from launcher.redaction import REDACTED
from launcher.runs.record import Manifest, Record
from launcher.stage import unused

NAMES = tuple(
    "gpus per_device accumulation position data tokenizer model deepspeed reference pin packages "
    "mixed_precision".split()
)
"""What `--allow-changed-resume` takes, beside the name of any argument."""
BATCH = frozenset({"gpus", "per_device", "accumulation"})
"""Those that decide how rows make a step: `position` allows them too."""

_RESTORED = "the checkpoint's value is used; yours is ignored"
_ADAPTER = re.compile(r"lora_\w+|use_dora|use_rslora|use_qlora")
# torch's AdamW each time, None by default; whether it is fused lies in the state too
_ADAMW = (None, "adamw_torch", "adamw_torch_fused")
# patterns of arguments' names, by what a resume makes of another value
# where things go, what is shown, how fast it is: none of it moves a weight
_PASSIVE = r"""
    output_dir overwrite_\w+ do_not_randomize_output_dir exp_name run_name logging_\w+ log_\w+
    report_to with_tracking wandb_\w+ trackio_\w+ project push_to_hub hf_\w+ hub_\w+ save_\w+
    checkpointing_steps keep_last_n_checkpoints clean_checkpoints_at_end resume_from_checkpoint
    \w*local_cache_dir \w*skip_cache \w*cache_mode cache_\w+_only verbose try_\w+ oe_eval\w*
    eval_\w+ do_eval per_device_eval_batch_size dataloader_\w+ dataset_num_proc
    preprocessing_num_workers gs_bucket_path timeout ddp_\w+ disable_tqdm low_cpu_mem_usage
    gradient_checkpointing\w* activation_memory_budget include_\w+ load_best_model_at_end
    metric_for_best_model greater_is_better torch_empty_cache_steps skip_memory_metrics
    ignore_data_skip profiling per_device_train_batch_size gradient_accumulation_steps
"""
_MODEL = r"""
    model_name_or_path model_revision config_name use_lora use_peft use_qlora use_dora use_rslora
    lora_\w+ load_in_\w+ additional_model_arguments model_init_kwargs
"""
_DATA = r"""
    (?:dataset_)?mixer_list\w* dataset_\w+ datasets (?:dataset_)?transform_fn target_columns
    config_hash test_split_size streaming max_seq_length max_length max_train_samples packing\w*
    truncation_mode seed data_seed group_by_length train_sampling_strategy sft_messages_key
    ground_truths_key sequence_parallel_size tokenizer_\w+ chat_template\w* add_bos use_fast
    use_slow_tokenizer get_tokenizer_fn eos_token pad_token
"""
# another class of optimizer, or another layout of its state, finds nothing of its own there
_OPTIMIZER = """
    optim optim_args optim_target_modules optimizer_type optimizer_kwargs use_8bit_optimizer
    dpo_use_paged_optimizer
"""
# ZeRO's states belong to one number of processes:
# deepspeed/runtime/engine.py::DeepSpeedEngine._load_zero_checkpoint[raise ZeRORuntimeException]
_ENGINE = r"deepspeed zero_stage zero_hpz_partition_size offload_(?:optimizer|param) fsdp\w*"
# they lie in the optimizer's and the schedule's state, which is loaded over the requested values
_STORED = r"learning_rate weight_decay adam_\w+ fused_optimizer"
_SCHEDULE = r"""
    lr_scheduler_\w+ warmup_\w+ final_lr_ratio num_train_epochs num_epochs max_steps
    max_train_steps
"""


def _compile_names(names: str) -> re.Pattern[str]:
    return re.compile("|".join(names.split()))


_STATE = _compile_names(_OPTIMIZER + _ENGINE)
_ARGUMENTS: tuple[tuple[re.Pattern[str], str, Severity | None], ...] = (
    (_compile_names(_PASSIVE), "", None),
    (_compile_names(_MODEL), "the checkpoint holds the weights of another model", "error"),
    (_compile_names(_DATA), "the position would refer to other data", "error"),
    (_compile_names(_OPTIMIZER), "the saved state belongs to another optimizer", "error"),
    (_compile_names(_ENGINE), "the saved states may not fit another engine", "error"),
    (_compile_names(_STORED), _RESTORED, "warning"),
    (_compile_names(_SCHEDULE), "the learning rate continues with another schedule", "warning"),
    (_compile_names(".+"), "it takes effect from the checkpoint on", "warning"),
)
"""What a resume makes of another value of an argument; the first that matches its name."""


@dataclass(frozen=True, slots=True)
class ResumeChange:
    """One thing that differs; `what` is the name to allow it by, `key` the argument it belongs to.

    `severity` is error if a resume would continue at the wrong place or with other weights, warning
    if the run becomes another one, note if nothing follows. `restored`: upstream takes the value
    of before out of the checkpoint.
    """

    what: str
    before: Any
    after: Any
    effect: str
    severity: Severity
    key: str | None = None
    restored: bool = False

    @property
    def differs(self) -> str:
        return f"`{self.what}` changed: {shorten(self.before)} -> {shorten(self.after)}"

    @property
    def text(self) -> str:
        if self.what == "position":
            return self.effect
        return f"{self.differs}: {self.effect}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An attempt's manifest, and what is about to start.

    `steps` are all steps, then and now. `caches` are the cache folders of this start, `now` is what
    its data and models hold.
    """

    record: Manifest
    plan: Plan
    steps: tuple[int | None, int | None]
    trainer: Trainer
    caches: Sequence[Cache]
    now: Contents

    def changes(self) -> Iterator[ResumeChange]:
        yield from self._compare_devices()
        yield from self._compare_batch()
        yield from self._compare_arguments()
        yield from self._compare_contents()
        yield from self._compare_engine()
        yield from self._compare_reference()
        yield from self._compare_versions()

    def _compare_devices(self) -> Iterator[ResumeChange]:
        plan = self.plan
        was = self.record.processes
        now = plan.processes
        if was is None or (was == now and self.record.gpus == plan.gpus):
            return
        severity: Severity = "error"
        values = plan.values
        has_engine = plan.stage.options.deepspeed is not None
        has_engine = has_engine or values.get("zero_stage") is not None or values.get("fsdp")
        if was == now:
            was = self.record.gpus
            now = plan.gpus
            effect = "another kind of device rounds in another way"
            severity = "warning"
        elif plan.gpus and has_engine:
            effect = "its states were saved for that number of processes and cannot be loaded"
        elif not plan.stage.entry.by_trainer:
            # finetune.py::main[num_training_steps_for_scheduler =],
            # dpo_tune_cache.py::main[num_training_steps_for_scheduler =]
            effect = "the learning rate schedule counts every process and would continue at "
            effect += "another place"
        else:
            effect = "new processes start with new random states"
            severity = "warning"
        yield ResumeChange("gpus", was, now, effect, severity)

    def _compare_batch(self) -> Iterator[ResumeChange]:
        record = self.record
        plan = self.plan
        was, now = self.steps
        severity: Severity = "note"
        effect = "the same rows make a step, split in another way"
        if record.global_batch not in (None, plan.global_batch):
            severity = "error"
            effect = f"a step took {record.global_batch} rows and takes {plan.global_batch}"
        if None not in self.steps and was != now:
            effect = f"the run would have {now} steps, not {was}"
        names = plan.stage.entry.names
        split = (
            ("per_device", names.per_device, record.per_device, plan.per_device),
            ("accumulation", names.accumulation, record.accumulation, plan.accumulation),
        )
        for what, key, before, after in split:
            if before not in (None, after):
                yield ResumeChange(what, before, after, effect, severity, key)

    def _compare_arguments(self) -> Iterator[ResumeChange]:
        plan = self.plan
        names = plan.stage.entry.names
        renamed = []
        for name, role in ((names.model, "model"), (names.data, "data")):
            was = inputs.list_digests(self.record.contents, role)
            if was and None not in was and was == inputs.list_digests(self.now, role):
                renamed.append(name)
        for name in plan.stage.schema.fields:
            effect, severity = _find_effect(name)
            before = self.record.argument(name)
            after = _to_recorded(plan.values[name])
            recorded = isinstance(self.record.args.get(name), dict)
            if severity is None or not recorded or before == after:
                continue
            # what looks like a token is kept out of a manifest
            if REDACTED in str(before) or plan.redactor.redact({name: after}) != {name: after}:
                continue
            if _ADAPTER.fullmatch(name) and not _has_adapter(plan):
                continue
            if name in renamed:
                effect = "another name for the same content"
                severity = "note"
            elif _STATE.fullmatch(name) and not unused.may_be_read(
                plan.values, plan.stage.entry, name
            ):
                effect = "nothing reads it here"
                severity = "note"
            elif name == "optim" and before in _ADAMW and after in _ADAMW:
                effect = _RESTORED
                severity = "warning"
            yield ResumeChange(name, before, after, effect, severity, name, effect == _RESTORED)

    def _compare_contents(self) -> Iterator[ResumeChange]:
        record = self.record.contents
        # without an adapter or a reference the weights come out of the checkpoint alone
        needs_base = self.plan.stage.schema.pairs or _has_adapter(self.plan)
        for role, what, effect in _EFFECTS:
            was = inputs.list_digests(record, role)
            now = inputs.list_digests(self.now, role)
            if not was or not now or None in (*was, *now) or was == now:
                continue
            severity: Severity = "error"
            if role == "model" and not needs_base:
                severity = "warning"
            after = f"{inputs.join_names(self.now, role)}, with other content"
            yield ResumeChange(what, inputs.join_names(record, role), after, effect, severity)

    def _compare_engine(self) -> Iterator[ResumeChange]:
        """With DeepSpeed or without, and the precision; not compared between a CPU and GPUs."""
        plan = self.plan
        gpus = self.record.gpus
        record = self.record.contents
        if gpus is None or bool(gpus) is not bool(plan.gpus):
            return
        # the first record that was kept of contents tells whether there was none
        if inputs.list_digests(record, "code"):
            was = _find_engine(record)
            now = _find_engine(self.now)
            if was != now:
                effect = "the states of the one are not those of the other"
                yield ResumeChange("deepspeed", was, now, effect, "error")
        argv = self.record.argv
        if plan.stage.entry.own_precision or "--mixed_precision" not in argv:
            return
        was = argv[argv.index("--mixed_precision") + 1]
        if was != plan.mixed_precision:
            effect = "it takes effect from the checkpoint on"
            yield ResumeChange("mixed_precision", was, plan.mixed_precision, effect, "warning")

    def _compare_reference(self) -> Iterator[ResumeChange]:
        """dpo_tune_cache.py::main[accelerator.load_state],
        dpo_tune_cache.py::main[dpo_utils.build_reference_logprobs_cache]: loaded first, then made
        its own reference.
        """
        if not self.plan.stage.entry.caches_reference:
            return
        kept = [cache for cache in self.record.caches if cache.get("kind") == "reference"]
        caches = [cache for cache in self.caches if cache.kind == "reference"]
        if not kept or not caches:
            return
        was = Record(kept[0])
        now = caches[0]
        before = was.part("key")
        is_other = was.get("digest") != now.digest
        for name, value in _to_recorded(dict(now.key)).items():
            is_other = is_other or before.get(name, value) != value
        if is_other:
            effect = (
                "another reference belongs to it, and the half-trained model would be taken for it"
            )
            yield ResumeChange("reference", str(was.get("path")), str(now.path), effect, "error")

    def _compare_versions(self) -> Iterator[ResumeChange]:
        stage = self.plan.stage
        was = self.record.upstream.version
        now = stage.upstream.version
        if stage.backend.CHECKOUT and was not in (None, now):
            effect = "another version may count, tokenise and save in another way"
            yield ResumeChange("pin", was, now, effect, "error")
        before = self.record.packages
        after = self.trainer.packages
        if not before:
            return
        names = [name for name in python.DECISIVE if before.get(name) != after.get(name)]
        if names:
            effect = "they may round, tokenise and shuffle in another way"
            was = _format_versions(names, before)
            yield ResumeChange("packages", was, _format_versions(names, after), effect, "warning")


def _find_effect(name: str) -> tuple[str, Severity | None]:
    """What a resume makes of another value of an argument."""
    for pattern, effect, severity in _ARGUMENTS:
        if pattern.fullmatch(name):
            return effect, severity
    raise KeyError(name)


def _format_versions(names: Iterable[str], packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {packages.get(name) or 'none'}" for name in names)


def _find_engine(contents: Any) -> str:
    if inputs.list_digests(contents, "deepspeed"):
        return "DeepSpeed"
    return "none"


def _has_adapter(plan: Plan) -> bool:
    return bool(plan.values.get("use_lora") or plan.values.get("use_peft"))


def _to_recorded(value: Any) -> Any:
    """The value as a record has it."""
    return json.loads(json.dumps(value, default=str))


_EFFECTS: tuple[tuple[str, str, str], ...] = (
    ("data", "data", "the position would refer to other data"),
    ("tokenizer", "tokenizer", "the data would be tokenised in another way"),
    ("model", "model", "the run began from other weights"),
    ("deepspeed", "deepspeed", "its states may not fit another DeepSpeed configuration"),
    ("code", "pin", "upstream's script is another one"),
)
