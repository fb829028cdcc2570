"""What differs from when a checkpoint was saved -> `ResumeChange`, with what a resume would make of it."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.cache import inputs
from launcher.cache.inputs import Contents
from launcher.cache.keys import Cache
from launcher.errors import Severity, brief
from launcher.machine import python
from launcher.machine.python import Trainer
from launcher.plan.plan import Plan
from launcher.redaction import REDACTED
from launcher.runs.record import Manifest, Record
from launcher.stage import unused

Steps = tuple[int | None, int | None]
NAMES = tuple(
    "gpus per_device accumulation position data tokenizer model deepspeed reference pin packages "
    "mixed_precision".split()
)
"""What `--allow-changed-resume` takes, beside the name of any argument."""
BATCH = frozenset({"gpus", "per_device", "accumulation"})
"""Those that decide how rows make a step: `position` allows them too."""

_RESTORED = "the checkpoint's value is used; yours is ignored"
_ADAPTER = re.compile(r"lora_\w+|use_dora|use_rslora|use_qlora")
# another class of optimizer, or another layout of its state, finds nothing of its own in what was saved
_OPTIMIZER = (
    "optim optim_args optim_target_modules optimizer_type optimizer_kwargs use_8bit_optimizer dpo_use_paged_optimizer"
)
# torch's AdamW each time, None by default; whether it is fused lies in the state too
_ADAMW = (None, "adamw_torch", "adamw_torch_fused")
_ENGINE = r"deepspeed zero_stage zero_hpz_partition_size offload_(?:optimizer|param) fsdp\w*"
_STATE = re.compile("|".join([*_OPTIMIZER.split(), *_ENGINE.split()]))
_RULES: tuple[tuple[str, str, Severity | None], ...] = (
    # where things go, what is shown, how fast it is: none of it moves a weight
    (
        r"output_dir overwrite_\w+ do_not_randomize_output_dir exp_name run_name logging_\w+ log_\w+ report_to "
        r"with_tracking wandb_\w+ trackio_\w+ project push_to_hub hf_\w+ hub_\w+ save_\w+ checkpointing_steps "
        r"keep_last_n_checkpoints clean_checkpoints_at_end resume_from_checkpoint \w*local_cache_dir \w*skip_cache "
        r"\w*cache_mode cache_\w+_only verbose try_\w+ oe_eval\w* eval_\w+ do_eval per_device_eval_batch_size "
        r"dataloader_\w+ dataset_num_proc preprocessing_num_workers gs_bucket_path timeout ddp_\w+ disable_tqdm "
        r"low_cpu_mem_usage gradient_checkpointing\w* activation_memory_budget include_\w+ load_best_model_at_end "
        r"metric_for_best_model greater_is_better torch_empty_cache_steps skip_memory_metrics ignore_data_skip "
        r"profiling per_device_train_batch_size gradient_accumulation_steps",
        "",
        None,
    ),
    (
        r"model_name_or_path model_revision config_name use_lora use_peft use_qlora use_dora use_rslora lora_\w+ "
        r"load_in_\w+ additional_model_arguments model_init_kwargs",
        "the checkpoint holds the weights of another model",
        "error",
    ),
    (
        r"(?:dataset_)?mixer_list\w* dataset_\w+ datasets (?:dataset_)?transform_fn target_columns config_hash "
        r"test_split_size streaming "
        r"max_seq_length max_length max_train_samples packing\w* truncation_mode seed data_seed group_by_length "
        r"train_sampling_strategy sft_messages_key ground_truths_key sequence_parallel_size tokenizer_\w+ "
        r"chat_template\w* add_bos use_fast use_slow_tokenizer get_tokenizer_fn eos_token pad_token",
        "the position would refer to other data",
        "error",
    ),
    (_OPTIMIZER, "the saved state belongs to another optimizer", "error"),
    (_ENGINE, "the saved states may not fit another engine", "error"),
    # they lie in the optimizer's and the schedule's state, which is loaded over the requested values
    (r"learning_rate weight_decay adam_\w+ fused_optimizer", _RESTORED, "warning"),
    (
        r"lr_scheduler_\w+ warmup_\w+ final_lr_ratio num_train_epochs num_epochs max_steps max_train_steps",
        "the learning rate continues with another schedule",
        "warning",
    ),
    (r".+", "it takes effect from the checkpoint on", "warning"),
)
_ARGUMENTS = [(re.compile("|".join(names.split())), effect, severity) for names, effect, severity in _RULES]
"""What a resume makes of another value of an argument; the first that matches its name."""


@dataclass(frozen=True, slots=True)
class ResumeChange:
    """One thing that differs; `what` is the name to allow it by, `key` the argument it belongs to.

    `severity` is error where a resume would go on at the wrong place or with other weights, warning where
    the run becomes another one, note where nothing comes of it. `restored` says that upstream takes the
    value of before out of the checkpoint.
    """

    what: str
    before: Any
    after: Any
    effect: str
    severity: Severity
    key: str | None = None
    restored: bool = False

    def as_json(self) -> dict[str, Any]:
        names = ("what", "before", "after", "effect", "severity")
        return {name: getattr(self, name) for name in names}

    @property
    def differs(self) -> str:
        return f"`{self.what}` changed: {brief(self.before)} -> {brief(self.after)}"

    @property
    def text(self) -> str:
        return self.effect if self.what == "position" else f"{self.differs}: {self.effect}"


def since(
    record: Manifest, plan: Plan, steps: Steps, trainer: Trainer, caches: Sequence[Cache], now: Contents
) -> Iterator[ResumeChange]:
    """Everything that differs between an attempt's manifest and what is about to start.

    `steps` are all steps, then and now; `caches` are the cache folders of this start, `now` its contents.
    """
    yield from _devices(record, plan)
    yield from _batch(record, plan, steps)
    yield from _arguments(record, plan, now)
    yield from _contents(record, plan, now)
    yield from _engine(record, plan, now)
    yield from _reference(record, plan, caches)
    yield from _versions(record, plan, trainer)


def _devices(record: Manifest, plan: Plan) -> Iterator[ResumeChange]:
    """deepspeed/runtime/engine.py::DeepSpeedEngine._load_zero_checkpoint[raise ZeRORuntimeException]: ZeRO's states
    belong to one number of processes.
    """
    was = record.processes
    now = plan.processes
    severity: Severity = "error"
    own_engine = plan.values.get("zero_stage") is not None or bool(plan.values.get("fsdp"))
    if was is None or (was == now and record.gpus == plan.gpus):
        return
    if was == now:
        was = record.gpus
        now = plan.gpus
        effect = "another kind of device rounds in another way"
        severity = "warning"
    elif plan.gpus and (plan.stage.options.deepspeed is not None or own_engine):
        effect = "its states were saved for that number of processes and cannot be loaded"
    elif not plan.stage.entry.by_trainer:
        # finetune.py::main[num_training_steps_for_scheduler =],
        # dpo_tune_cache.py::main[num_training_steps_for_scheduler =]
        effect = "the learning rate schedule counts every process and would continue at another place"
    else:
        effect = "new processes start with new random states"
        severity = "warning"
    yield ResumeChange("gpus", was, now, effect, severity)


def _batch(record: Manifest, plan: Plan, steps: Steps) -> Iterator[ResumeChange]:
    rows = record.global_batch
    moved = rows not in (None, plan.global_batch)
    effect = "the same rows make a step, split in another way"
    if None not in steps and steps[0] != steps[1]:
        effect = f"the run would have {steps[1]} steps, not {steps[0]}"
    elif moved:
        effect = f"a step took {rows} rows and takes {plan.global_batch}"
    split = (
        ("per_device", record.per_device, plan.per_device),
        ("accumulation", record.accumulation, plan.accumulation),
    )
    for what, before, value in split:
        key = getattr(plan.stage.entry.names, what)
        if before not in (None, value):
            yield ResumeChange(what, before, value, effect, "error" if moved else "note", key)


def _arguments(record: Manifest, plan: Plan, now: Contents) -> Iterator[ResumeChange]:
    names = plan.stage.entry.names
    redactor = plan.redactor
    same = {
        name
        for name, role in ((names.model, "model"), (names.data, "data"))
        if (was := inputs.digests(record.contents, role)) and None not in was and was == inputs.digests(now, role)
    }
    for name in plan.stage.schema.fields:
        effect, severity = next((e, s) for pattern, e, s in _ARGUMENTS if pattern.fullmatch(name))
        before = record.argument(name)
        after = _plain(plan.values[name])
        recorded = isinstance(record.args.get(name), dict)
        if severity is None or not recorded or before == after:
            continue
        # what looks like a token is kept out of a manifest
        if REDACTED in str(before) or redactor.redact({name: after}) != {name: after}:
            continue
        if _ADAPTER.fullmatch(name) and not _has_adapter(plan):
            continue
        if name in same:
            effect = "another name for the same content"
            severity = "note"
        elif _STATE.fullmatch(name) and not unused.acts(plan.values, plan.stage.entry, name):
            effect = "nothing reads it here"
            severity = "note"
        elif name == "optim" and before in _ADAMW and after in _ADAMW:
            effect = _RESTORED
            severity = "warning"
        yield ResumeChange(name, before, after, effect, severity, name, effect == _RESTORED)


def _has_adapter(plan: Plan) -> bool:
    return bool(plan.values.get("use_lora") or plan.values.get("use_peft"))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


_EFFECTS: tuple[tuple[str, str, str], ...] = (
    ("data", "data", "the position would refer to other data"),
    ("tokenizer", "tokenizer", "the data would be tokenised in another way"),
    ("model", "model", "the run began from other weights"),
    ("deepspeed", "deepspeed", "its states may not fit another DeepSpeed configuration"),
    ("code", "pin", "upstream's script is another one"),
)


def _contents(record: Manifest, plan: Plan, now: Contents) -> Iterator[ResumeChange]:
    before = record.contents
    base = plan.stage.schema.pairs or _has_adapter(plan)
    for role, what, effect in _EFFECTS:
        was = inputs.digests(before, role)
        digests = inputs.digests(now, role)
        if not was or not digests or None in (*was, *digests) or was == digests:
            continue
        after = f"{inputs.names(now, role)}, with other content"
        # without an adapter or a reference the weights come out of the checkpoint alone
        severity: Severity = "warning" if role == "model" and not base else "error"
        yield ResumeChange(what, inputs.names(before, role), after, effect, severity)


def _engine(record: Manifest, plan: Plan, now: Contents) -> Iterator[ResumeChange]:
    """With DeepSpeed or without, and in which precision; between a CPU and GPUs nothing is compared."""
    gpus = record.gpus
    before = record.contents
    if gpus is None or bool(gpus) is not bool(plan.gpus):
        return
    # the first record that was kept of contents tells whether there was none
    if inputs.digests(before, "code"):
        names = ["DeepSpeed" if inputs.digests(one, "deepspeed") else "none" for one in (before, now)]
        if names[0] != names[1]:
            effect = "the states of the one are not those of the other"
            yield ResumeChange("deepspeed", names[0], names[1], effect, "error")
    words = iter(record.argv)
    precision = next((next(words, None) for word in words if word == "--mixed_precision"), None)
    if not plan.stage.entry.own_precision and precision not in (None, plan.mixed_precision):
        effect = "it takes effect from the checkpoint on"
        yield ResumeChange("mixed_precision", precision, plan.mixed_precision, effect, "warning")


def _reference(record: Manifest, plan: Plan, caches: Sequence[Cache]) -> Iterator[ResumeChange]:
    """dpo_tune_cache.py::main[accelerator.load_state],
    dpo_tune_cache.py::main[dpo_utils.build_reference_logprobs_cache]: loaded first, then made its own reference.
    """
    now = next((one for one in caches if one.kind == "reference"), None)
    kept = (Record(one) for one in record.caches if isinstance(one, dict))
    was = next((one for one in kept if one.get("kind") == "reference"), None)
    if now is None or was is None or not plan.stage.entry.caches_reference:
        return
    key = _plain(dict(now.key))
    before = was.part("key")
    other = [name for name in key if name in before and before[name] != key[name]]
    if was.get("digest") != now.digest or other:
        by = ", ".join(other) or "the content of the model, the data or upstream's code"
        effect = f"another reference belongs to it ({by}), and the half-trained model would be taken for it"
        yield ResumeChange("reference", str(was.get("path")), str(now.path), effect, "error")


def _versions(record: Manifest, plan: Plan, trainer: Trainer) -> Iterator[ResumeChange]:
    was = record.upstream.version
    now = plan.stage.upstream.version
    if plan.stage.backend.CHECKOUT and was is not None and was != now:
        effect = "another version may count, tokenise and save in another way"
        yield ResumeChange("pin", was, now, effect, "error")
    before = record.packages
    after = trainer.packages
    other = [n for n in python.DECISIVE if before and before.get(n) != after.get(n)]
    if other:
        effect = "they may round, tokenise and shuffle in another way"
        was, now = (", ".join(f"{name} {one.get(name) or 'none'}" for name in other) for one in (before, after))
        yield ResumeChange("packages", was, now, effect, "warning")
